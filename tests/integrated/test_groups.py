"""Groups set apart in the precision of q(w), beside dense products."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.integrated import groups as groups_
from numpyro_sgp.integrated import placing, profile, row_parts
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.precision import Arrow, Conditional, Dense, Square
from numpyro_sgp.integrated.profile import Profile
from tests.helpers import slow
from tests.integrated.dense import rows

RNG, X = rows(60, 3)
GROUP = RNG.integers(0, 12, 60)
OTHER = RNG.integers(0, 4, 60)
SLOPE = np.where(np.arange(60) % 7, RNG.normal(size=60), 0.0)
Y = RNG.poisson(np.exp(np.sin(X[:, 0]) + 0.3 * (GROUP % 3))).astype(float)


def intercepts(X, group, other, slope, y=None):
    """Beside an effect of other groups, with a mean of the groups as a value."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("others", 4):
        a = numpyro.sample("a", dist.Normal(0.0, 0.7))
    with numpyro.plate("groups", 12):
        b = numpyro.sample("b", dist.Normal(0.0, tau))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    numpyro.deterministic("average", level + b.mean())
    numpyro.deterministic("apart", b[1:] - b[:-1])
    eta = numpyro.deterministic("eta", level + f + a[other] + b[group])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def slopes(X, group, other, slope, y=None):
    """Two effects of the same groups, one of them by a design matrix of zeros and ones."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("groups", 12):
        b = numpyro.sample("b", dist.Normal(0.5, tau))
        c = numpyro.sample("c", dist.Normal(0.0, 0.4))
    design = (group[:, None] == jnp.arange(12)).astype(f.dtype)
    eta = numpyro.deterministic("eta", f + b[group] + tau * slope * (design @ c))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def correlated(X, group, other, slope, y=None):
    """A normal of two dimensions for each group, and two predictors in a row."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    root = jnp.stack([jnp.stack([tau, 0.0 * tau]), jnp.stack([0.3 * tau, 0.5 + 0.0 * tau])])
    with numpyro.plate("groups", 12):
        b = numpyro.sample("b", dist.MultivariateNormal(jnp.zeros(2), scale_tril=root))
    eta = numpyro.deterministic("eta", f + b[group, 0] + slope * b[group, 1])
    log_sd = numpyro.deterministic("log_sd", 0.3 * b[group, 1] - 0.5)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(eta, jnp.exp(log_sd)), obs=y)


def classes(X, group, other, slope, y=None):
    """An effect of groups for each of three classes, its axis of groups the second."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("outputs", 2):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("classes", 2, dim=-2), numpyro.plate("groups", 12, dim=-1):
        b = numpyro.sample("b", dist.Normal(0.0, tau))
    eta = jnp.concatenate([f + b[:, group], jnp.zeros((1, X.shape[0]))]).T
    with numpyro.plate("data", X.shape[0]):
        label = None if y is None else y.astype(int) % 3
        numpyro.sample("y", dist.Categorical(logits=eta), obs=label)


MODELS = [intercepts, slopes, correlated, classes]
DATA = X, GROUP, OTHER, SLOPE, Y
SPLIT = {intercepts: (12, 1), slopes: (12, 2), correlated: (12, 2), classes: (12, 2)}


@pytest.fixture
def few(monkeypatch):
    """Twelve groups are many."""
    monkeypatch.setattr(groups_, "FEWEST", 12)


def profile_of(model, grouped):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    guide.setup(*DATA)
    field = Field(guide, DATA, {})
    row_parts.choose_layout(field, jnp.zeros(1), DATA, {}, grouped=grouped)
    return Profile(field, DATA, {})


def order(field):
    """Where numbers of the field are in the dense one."""
    dense, names = np.arange(field.size), {}
    end = field.size - field.num_effects
    for name in field.effects:
        start, end = end, end + int(np.prod(field.shapes[name]))
        names[name] = dense[start:end].reshape(field.shapes[name])
    apart = field.apart()
    found = [dense[: field.size - field.num_effects], *(names[k].ravel() for k in apart)]
    columns = [
        np.moveaxis(names[k], axis, 0).reshape(field.groups.number, -1)
        for k, axis in field.groups.axes.items()
    ]
    return np.concatenate([*found, np.concatenate(columns, axis=1).ravel()])


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(m, id=m.__name__) for m in MODELS])
def test_nodes_are_those_of_dense_products(model, few):
    """The bound, its slope, q(w), what natural steps leave, and covariances of draws."""
    dense, arrow = profile_of(model, False), profile_of(model, True)
    groups = arrow.field.groups
    assert dense.field.groups is None and (groups.number, groups.each) == SPLIT[model]
    for free in (0.3, -0.8):
        a, slope_a = dense(np.full(1, free), dense.start(), True)
        b, slope_b = arrow(np.full(1, free), arrow.start(), True)
        assert isinstance(a.q.precision, Dense) and isinstance(b.q.precision, Arrow)
        places = order(arrow.field)
        np.testing.assert_allclose(b.value, a.value, rtol=1e-10)
        np.testing.assert_allclose(slope_b, slope_a, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(b.left, a.left, atol=1e-9)
        P = np.asarray(a.q.precision.dense())[np.ix_(places, places)]
        np.testing.assert_allclose(b.q.precision.dense(), P, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(b.weighed.mean, a.weighed.mean[places], atol=1e-8)
        root = b.weighed.factor.draw(jnp.eye(len(P)))
        np.testing.assert_allclose(root.T @ root, np.linalg.inv(P), atol=1e-8)


@pytest.mark.slow
def test_products_with_an_arrow_are_those_with_its_matrix():
    keys = jax.random.split(jax.random.key(0), 6)
    across = jax.random.normal(keys[0], (4, 3, 2))
    own = jax.random.normal(keys[1], (2, 4, 3, 3))
    own = jnp.einsum("sgij,sgkj->sgik", own, own) + 30.0 * jnp.eye(3)
    rest = 50.0 * jnp.eye(2) + 1.0
    P, Q = (
        Arrow(rest, scale * across, D) for scale, D in zip((1.0, 2.0), own, strict=True)
    )
    v, maps = jax.random.normal(keys[2], (14,)), jax.random.normal(keys[3], (14, 5))
    np.testing.assert_allclose(P.times(v), P.dense() @ v, rtol=1e-10)
    root, other = P.root(), Q.root()
    np.testing.assert_allclose(root.solve(v), np.linalg.solve(P.dense(), v), rtol=1e-10)
    log_det = np.linalg.slogdet(P.dense())[1]
    np.testing.assert_allclose(2 * root.log_diagonal().sum(), log_det, rtol=1e-10)
    there = other.transposed(v)
    np.testing.assert_allclose(there @ there, v @ Q.dense() @ v, rtol=1e-10)
    S = np.linalg.inv(P.dense())
    np.testing.assert_allclose(root.ratio(other), np.trace(Q.dense() @ S), rtol=1e-10)
    factor = root.spread()
    assert isinstance(factor, Conditional)
    np.testing.assert_allclose(factor.squares(), np.trace(S), rtol=1e-10)
    here = factor.transposed(maps)
    np.testing.assert_allclose(here.T @ here, maps.T @ S @ maps, rtol=1e-9)
    x = jax.random.normal(keys[4], (7, 14))
    each = jnp.stack([factor.draw(row) for row in x])
    np.testing.assert_allclose(factor.draw(x), each, rtol=1e-10)
    bad = Arrow(rest, across, -own[0])
    assert np.isnan(bad.root().log_diagonal()).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_draws_of_many_are_the_same_when_compiled(each, dtype):
    rng, number, size = np.random.default_rng(0), 150, 26
    parts = (size, size), (number, each, size), (number, each, each)
    F, T, U = (rng.normal(size=shape).astype(dtype) for shape in parts)
    x = rng.normal(size=(256, size + number * each)).astype(dtype)
    rest = x[:, :size] @ F.T
    groups = np.einsum("gkr,sr->sgk", T, rest)
    groups += np.einsum("gkl,sgl->sgk", U, x[:, size:].reshape(256, number, each))
    expected = np.concatenate([rest, groups.reshape(256, -1)], axis=1)
    found = jax.jit(Conditional.draw)(Conditional(*map(jnp.asarray, (F, T, U))), x)
    assert found.dtype == dtype
    atol = 1000 * np.finfo(dtype).eps  # sums of some 30 numbers up to 50
    np.testing.assert_allclose(found, expected, atol=atol)


NEW = X[::9], GROUP[::9], OTHER[::9], SLOPE[::9]


def run(model, data=DATA, **more):
    return sgp.nested(model, sgp.SVGP(5), data, progress_bar=False, **more)


@pytest.fixture(scope="module")
def both():
    """Dense and not, without weights, whose draws are others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "_MOST_WEIGHED", 0.0)
        dense = run(intercepts)
        patch.setattr(groups_, "FEWEST", 12)
        return dense, run(intercepts)


@pytest.mark.slow
def test_posteriors_are_those_of_dense_products(both):
    """Of sums over all groups and of differences between them, too."""
    dense, arrow = both
    assert dense.field.groups is None and arrow.field.groups.axes == {"b": 0}
    np.testing.assert_allclose(arrow.log_evidence, dense.log_evidence, atol=1e-6)
    found, expected = arrow.posterior(*NEW), dense.posterior(*NEW)
    assert (
        set(found) == set(expected) == {"f", "a", "b", "level", "eta", "average", "apart"}
    )
    for name, q in expected.items():
        np.testing.assert_allclose(found[name].mean, q.mean, atol=1e-6)
        np.testing.assert_allclose(found[name].sd, q.sd, atol=1e-6)
    np.testing.assert_allclose(arrow.summary(), dense.summary(), atol=1e-5)


@pytest.mark.slow
def test_draws_have_its_moments(both):
    """4,000 draws: means to .1 sd and sds to 10 %, five standard errors and more."""
    _, arrow = both
    q = arrow.posterior(*NEW)
    draws = arrow.sample(jax.random.key(0), *NEW, sample_shape=(4000,))
    for name in ("f", "a", "b", "eta", "average", "apart"):
        values = np.asarray(draws[name])
        assert np.all(np.abs(values.mean(0) - q[name].mean) < 0.1 * q[name].sd)
        assert np.all(np.abs(values.std(0) / q[name].sd - 1.0) < 0.1)
    level, b, f = (np.asarray(draws[k]) for k in ("level", "b", "f"))
    eta = level[:, None] + f + np.asarray(draws["a"])[:, NEW[2]] + b[:, NEW[1]]
    np.testing.assert_allclose(draws["eta"], eta, atol=1e-9)
    functions = arrow.functions(jax.random.key(1), 4000)["f"](NEW[0])
    assert np.all(np.abs(np.mean(functions, 0) - q["f"].mean) < 0.1 * q["f"].sd)


@pytest.mark.slow
def test_it_is_asked_what_others_are_asked(both, tmp_path):
    dense, arrow = both
    y, expected = arrow.predict(*NEW)["y"], dense.predict(*NEW)["y"]
    np.testing.assert_allclose(y.mean, expected.mean, rtol=0.05)  # 2,048 draws
    arrow.save(tmp_path / "groups.npz")
    loaded = sgp.load(tmp_path / "groups.npz", intercepts, DATA)
    assert loaded.field.groups.axes == {"b": 0}
    for name, q in arrow.posterior(*NEW).items():
        np.testing.assert_allclose(loaded.posterior(*NEW)[name].sd, q.sd, rtol=1e-12)
    gain = "inducing points"
    causes = [q.check().causes for q in (dense, arrow, loaded)]
    for found in causes[1:]:
        np.testing.assert_allclose(found[gain].nats, causes[0][gain].nats, atol=1e-5)
        assert np.isfinite(found["family"].nats)


@pytest.mark.slow
def test_weights_are_of_draws_from_the_same_gaussian(few):
    """Without hyperparameters 4,096 draws are weighed, whose errors are some .05 sd."""

    def model(*data):
        condition = numpyro.handlers.condition(intercepts, {"tau": jnp.asarray(0.8)})
        return condition(*data)

    data = X, GROUP, OTHER, SLOPE, np.minimum(Y, 1.0)
    arrow = run(model, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_, "FEWEST", 64)
        dense = run(model, data)
    a, b = (q.nodes.nodes[0].weighed for q in (dense, arrow))
    assert isinstance(b.factor, Conditional) and isinstance(a.factor, Square)
    assert float(a.gain) > 0.05
    np.testing.assert_allclose(b.gain, a.gain, atol=0.03)
    eye, places = jnp.eye(len(a.mean)), order(arrow.field)
    sd, other = (jnp.sqrt(jnp.sum(q.factor.draw(eye) ** 2, axis=0)) for q in (a, b))
    np.testing.assert_allclose(other / sd[places], 1.0, atol=0.1)
    np.testing.assert_allclose((b.mean - a.mean[places]) / other, 0.0, atol=0.1)


@pytest.mark.slow
def test_weights_of_a_gaussian_posterior_are_all_the_same(few):
    arrow = profile_of(grouped_with(lambda b, group, tau: b[group] * tau), True)
    assert arrow.field.groups is not None
    node, _ = arrow(np.full(1, 0.4), arrow.start(), to_weigh=True)
    np.testing.assert_allclose(node.weighed.gain, 0.0, atol=1e-8)
    np.testing.assert_allclose(node.weighed.effective, 1.0, atol=1e-8)
    S = np.linalg.inv(node.q.precision.dense())
    root = node.weighed.factor.draw(jnp.eye(len(S)))
    np.testing.assert_allclose(root.T @ root, S, atol=1e-8)


@pytest.mark.slow
def test_float32(few, both):
    with jax.enable_x64(False):
        data = tuple(np.asarray(a, np.float32 if a.dtype == float else None) for a in DATA)
        single = run(intercepts, data)
        assert single.field.groups is not None and single.field.dtype == jnp.float32
        found = single.posterior(*data[:4])
    for name, q in both[1].posterior(*DATA[:4]).items():
        assert np.all(np.abs(found[name].mean - q.mean) < 0.1 * q.sd)
        assert np.all(np.abs(found[name].sd / q.sd - 1.0) < 0.1)


@pytest.mark.slow
def test_rows_in_blocks(few, both, monkeypatch):
    monkeypatch.setattr(row_parts, "LARGEST", 1)
    monkeypatch.setattr(row_parts, "_BLOCK", 10 * 8 * (2 * 11 + 40))
    blocks = run(intercepts)
    assert row_parts.RowParts(blocks.field, DATA, {}).size == 10
    assert blocks.field.groups.axes == {"b": 0}
    np.testing.assert_allclose(blocks.log_evidence, both[1].log_evidence, atol=1e-5)
    sd = blocks.posterior(*NEW)["eta"].sd
    np.testing.assert_allclose(sd, both[1].posterior(*NEW)["eta"].sd, atol=1e-6)


@pytest.mark.slow
def test_the_joint_guide_has_the_bound_of_dense_products():
    """And its slope, at any q(w), whose numbers are in another order."""

    def guide_of(model):
        guide = sgp.AutoJointGP(model, sgp.SVGP(5))
        guide.setup(*DATA)
        return guide

    dense = guide_of(slopes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_, "FEWEST", 12)
        apart = guide_of(slopes)
    assert dense.known().field.groups is None
    assert apart.known().field.groups.axes == {"b": 0, "c": 0}
    places, size = order(apart.known().field), apart.known().field.size
    mean, A = RNG.normal(size=size), 0.3 * RNG.normal(size=(size, size))
    S = A @ A.T + 0.1 * np.eye(size)
    found = []
    for guide, at in ((dense, np.arange(size)), (apart, places)):
        root = np.linalg.cholesky(S[np.ix_(at, at)])
        q = {"auto_field_mu": mean[at], "auto_field_sqrt": root}

        def bound(tau, guide=guide, q=q):
            params = guide.known().starts | q | {"tau_auto_loc": tau}
            terms = guide.bound_terms(jax.random.key(0), params, DATA, {})
            return sum(map(jnp.sum, jax.tree.leaves(terms)))

        found.append(jax.value_and_grad(bound)(0.7))
    assert "tau_auto_loc" in dense.known().starts
    np.testing.assert_allclose(found[1], found[0], rtol=1e-10)


@pytest.mark.slow
def test_joint_fits_are_those_of_dense_products(tmp_path):
    """Two effects of the same groups; also in batches, whose first steps are the same."""

    def fits(**more):
        return sgp.fit(slopes, sgp.SVGP(5), DATA, joint=True, progress_bar=False, **more)

    batches = {"batch_size": 20, "steps": 5}
    dense, in_batches = fits(), fits(**batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_, "FEWEST", 12)
        apart, of_batches = fits(), fits(**batches)
    assert dense.field.groups is None and apart.field.groups.axes == {"b": 0, "c": 0}
    np.testing.assert_allclose(apart.bound, dense.bound, atol=1e-5)
    np.testing.assert_allclose(of_batches.losses, in_batches.losses, rtol=1e-8)
    expected = dense.posterior(*NEW)
    apart.save(tmp_path / "joint.npz")
    for found in (apart, sgp.load(tmp_path / "joint.npz", slopes, DATA)):
        for name, q in found.posterior(*NEW).items():
            np.testing.assert_allclose(q.mean, expected[name].mean, atol=1e-3)
            np.testing.assert_allclose(q.sd, expected[name].sd, atol=1e-3)
    assert apart.check().causes["q(u)"].nats < 1e-3


# ---- what groups are not ----------------------------------------------------------------


def grouped_with(of_groups):
    def model(X, group, other, slope, y=None):
        tau = numpyro.sample("tau", dist.Uniform(-1.0, 1.0))
        with numpyro.plate("groups", 12):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + of_groups(b, group, tau), 0.5), obs=y)

    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "of_groups",
    [
        slow(lambda b, group, tau: (b - b.mean())[group]),
        lambda b, group, tau: b[group] - b[(group + 1) % 12],
        # At tau = 0, the prior's median, each row has one group.
        lambda b, group, tau: b[group] + tau * b[(group + 1) % 12],
        lambda b, group, tau: b[group] + 1e-3 * b[-1],
    ],
    ids=["sums to zero", "differences", "neighbours", "a common one"],
)
def test_rows_of_several_groups_are_dense(of_groups, few):
    field = profile_of(grouped_with(of_groups), True).field
    assert field.groups is None and field.row_size == field.size == 17


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_slopes_of_other_groups_are_told_apart_at_any_scale(x64, few):
    """A covariate of 60,000 does not hide that intercepts are of other groups."""

    def model(X, group, other, x, y=None):
        with numpyro.plate("groups", 12):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
            c = numpyro.sample("c", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + b[group] + c[other] * x, 0.5), obs=y)

    with jax.enable_x64(x64):
        dtype = jnp.zeros(()).dtype
        income = np.asarray(6e4 + 1e4 * SLOPE, dtype)
        cases = (GROUP[::-1], {"b": 0}), (GROUP, {"b": 0, "c": 0})
        for second, expected in cases:
            data = np.asarray(X, dtype), GROUP, second, income, np.asarray(Y, dtype)
            guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
            guide.setup(*data)
            field = Field(guide, data, {})
            row_parts.choose_layout(field, jnp.zeros(0, dtype), data, {}, grouped=True)
            assert field.groups.axes == expected


@pytest.mark.slow
def test_weights_that_cancel_in_some_rows_are_of_one_group(few):
    """In float32 rounding is all that there is of them."""

    def model(X, group, other, x, y=None):
        with numpyro.plate("groups", 12):
            b = numpyro.sample("b", dist.Normal(0.0, 0.7))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            eta = f + 1.1 * b[group] + 0.3 * x * b[group]
            numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)

    with jax.enable_x64(False):
        x = np.where(np.arange(60) % 3, SLOPE, -1.1 / 0.3 * (1 + 1e-6)).astype(np.float32)
        data = X.astype(np.float32), GROUP, OTHER, x, Y.astype(np.float32)
        guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
        guide.setup(*data)
        field = Field(guide, data, {})
        free = jnp.zeros(0, np.float32)
        row_parts.choose_layout(field, free, data, {}, grouped=True)
        assert field.groups.axes == {"b": 0}


@pytest.mark.slow
def test_later_rows_of_several_groups_are_no_rows_of_one(few):
    """The posterior knows them; the bound, which took the first set for all, says so."""

    def model(X, design, y=None):
        with numpyro.plate("groups", 12):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        eta = numpyro.deterministic("eta", f + design @ b)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)

    one = np.eye(12)[GROUP]
    both = 0.5 * (one + one[::-1])
    posterior = run(model, (X, one, Y))
    assert posterior.field.groups.axes == {"b": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_, "FEWEST", 64)
        expected = run(model, (X, one, Y)).posterior(X, both)["eta"]
    found = posterior.posterior(X, both)["eta"]
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-9)
    np.testing.assert_allclose(found.sd, expected.sd, atol=1e-9)
    with pytest.raises(ValueError, match="several groups of 'b', where those of the inf"):
        posterior.check(X, both, Y)
    guide = sgp.AutoJointGP(model, sgp.SVGP(5))
    guide.setup(X, one, Y)
    for design, finite in ((one, True), (both, False)):
        given = guide.known().starts, (X, design, Y), {}
        terms = guide.bound_terms(jax.random.key(0), *given)
        assert bool(np.isfinite(terms["likelihood"])) is finite


@pytest.mark.slow
def test_few_groups_are_dense():
    assert profile_of(intercepts, True).field.groups is None


@pytest.mark.slow
def test_the_size_of_a_field_is_that_of_its_rows(few, monkeypatch):
    monkeypatch.setattr(placing, "MAX_FIELD", 16)
    assert profile_of(intercepts, True).field.size == 22
    with pytest.raises(ValueError, match="22 numbers .'f': 5, 'level': 1, .*at most 16"):
        profile_of(intercepts, False)
    monkeypatch.setattr(placing, "MAX_FIELD", 12)
    with pytest.raises(ValueError, match="22 numbers .*at most 13"):
        profile_of(intercepts, True)

"""Tighter bounds by relaxed conditionals, in minibatches and for any likelihood."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_sgp as sgp
from tests.helpers import count_data, rbf, regression_data

KERNEL = sgp.kernels.RBF(1.3, 0.7)
KEY = jax.random.key(0)


def model(X, y, num_rows=None, noise=None):
    noise = numpyro.param("noise", 0.3) if noise is None else noise
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", num_rows or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def at_the_optimum(approximation, collapsed, y):
    """Parameters of a guide whose q(u) is a collapsed bound's."""
    params = {"noise": jnp.asarray(0.3)}
    for name, block in zip(("qu", "qv"), collapsed.optimal_q(y).blocks, strict=False):
        params[f"f_auto_{name}_mu"] = block.mu
        if block.sqrt is not None:
            S = block.sqrt @ block.sqrt.T
            params[f"f_auto_{name}_sqrt"] = jnp.linalg.cholesky(S)
    return params


def bound_of(guide, program, expectation=sgp.GaussHermite(2), **kwargs):  # noqa: B008
    """The bound as a compiled function of the parameters and the model's arguments."""
    loss = sgp.TraceGP_ELBO(expectation).loss

    @partial(jax.jit, static_argnums=3)
    def bound(params, X, y, num_rows=None):
        given = {} if num_rows is None else {"num_rows": num_rows}
        return -loss(KEY, params, program, guide, X, y, **given, **kwargs)

    return bound


Z, O = jnp.array([[-1.5], [0.5]]), jnp.array([[-0.5], [1.5], [1.0]])
FAMILIES = {
    "svgp": (sgp.SVGP, sgp.CollapsedSVGP, {"inducing": Z}, (Z,)),
    "solve": (
        sgp.SOLVEGP,
        sgp.CollapsedSOLVEGP,
        {"inducing": Z, "orthogonal": O},
        (Z, O),
    ),
    "odvgp": (sgp.ODVGP, sgp.CollapsedODVGP, {"inducing": Z, "orthogonal": O}, (Z, O)),
}


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tight"),
    [
        pytest.param("svgp", "diagonal", marks=SLOW),
        ("solve", "block"),
        ("odvgp", "diagonal"),
        pytest.param("svgp", "block", marks=SLOW),
        pytest.param("solve", "diagonal", marks=SLOW),
        pytest.param("odvgp", "block", marks=SLOW),
    ],
)
def test_at_the_optimum_the_bound_is_the_collapsed_one(family, tight):
    X, y = regression_data(12)
    option, collapsed, points, sets = FAMILIES[family]
    tight = sgp.relaxation.Blocks(5) if tight == "block" else tight
    best = collapsed(KERNEL, X, *sets, 0.3, tight=tight)
    guide = sgp.AutoSparseGP(model, option(**points, train_inducing=False, tight=tight))
    guide.setup(X, y)
    params = at_the_optimum(option, best, y)
    found, slopes = jax.jit(jax.value_and_grad(bound_of(guide, model)))(params, X, y)
    np.testing.assert_allclose(found, best.log_prob(y), rtol=1e-8)
    plain = sgp.AutoSparseGP(model, option(**points, train_inducing=False))
    plain.setup(X, y)
    assert bound_of(plain, model)(params, X, y) < found
    # The noise is learned by the tight bound: its slope is the collapsed bound's.
    one = lambda s: collapsed(KERNEL, X, *sets, s, tight=tight).log_prob(y)  # noqa: E731
    slope = jax.jit(jax.grad(one))(0.3)
    np.testing.assert_allclose(slopes["noise"], slope, rtol=1e-6)
    # Predictions are the plain ones.
    new = guide.posterior(params, X[:3], y[:3])["f"]
    other = plain.posterior(params, X[:3], y[:3])["f"]
    np.testing.assert_allclose(new.variance, other.variance)


@pytest.mark.slow
def test_several_functions_masks_and_noise_of_each_row():
    """Precisions are read off each row and function; zero where nothing is seen."""
    X, y = regression_data(8)
    noise = jnp.stack([jnp.linspace(0.2, 0.6, 8), jnp.full(8, 0.4)])
    mask = jnp.arange(8) != 3

    def two(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X).expand([2]))
        with numpyro.plate("data", 8), numpyro.handlers.mask(mask=mask):
            mean = jnp.stack([f[0], 2.0 * f[1]])
            fn = dist.Normal(mean.T, noise.T).to_event(1)
            numpyro.sample("y", fn, obs=jnp.stack([y, -y]).T)

    def bound(tight, given=Z):
        guide = sgp.AutoSparseGP(two, sgp.SVGP(inducing=Z, tight=tight))
        guide.setup(X, y)
        params = {"f_auto_Z": given, "f_auto_qu_mu": jnp.ones((2, 2))}
        params["f_auto_qu_sqrt"] = 0.5 * jnp.stack([jnp.eye(2)] * 2)
        return bound_of(guide, two, sgp.GaussHermite(3))(params, X, y)

    K = rbf(Z, Z, 1.3, 0.7) + 1.3e-8 * np.eye(2)
    Kuf = rbf(Z, X, 1.3, 0.7)
    D = rbf(X, X, 1.3, 0.7) - Kuf.T @ np.linalg.solve(K, Kuf)
    precision = np.stack([1 / noise[0] ** 2, 4 / noise[1] ** 2]) * mask
    scaled = precision * np.diag(D)
    gain = 0.5 * np.sum(scaled - np.log1p(scaled))
    np.testing.assert_allclose(bound("diagonal") - bound("none"), gain, rtol=1e-6)
    gain = 0.5 * np.sum(scaled)
    for root in np.sqrt(precision):
        gain -= 0.5 * np.linalg.slogdet(np.eye(8) + root[:, None] * D * root)[1]
    np.testing.assert_allclose(bound("block") - bound("none"), gain, rtol=1e-6)
    assert jnp.isfinite(jax.grad(lambda Z: bound("block", Z))(Z)).all()


def poisson(X, y, num_rows=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", num_rows or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mixture", "svgp", "solve"],
)
def test_scalar_is_its_formula_for_any_likelihood(family):
    X, y = count_data(12)
    if family == "mixture":
        option = sgp.MixtureSVGP(num_components=2, inducing=Z, tight="scalar")
    else:
        option = FAMILIES[family][0](**FAMILIES[family][2], tight="scalar")
    guide = sgp.AutoSparseGP(poisson, option)
    svi = SVI(poisson, guide, optax.adam(0.05), sgp.TraceGP_ELBO(sgp.GaussHermite(50)))
    result = svi.run(KEY, 200, X, y, progress_bar=False)
    params = result.params
    v = params["f_auto_qf_scale"]
    assert 0 < v < 1  # learned, and tighter than the plain bound

    compiled = bound_of(guide, poisson, sgp.GaussHermite(50))

    def bound(v, *args):
        return compiled({**params, "f_auto_qf_scale": jnp.asarray(v)}, *args)

    assert bound(v, X, y) > bound(1.0, X, y)
    # By E[exp f] in closed form, with the variances that the relaxation leaves.
    q = guide.posterior(params, X, y)["f"]
    weights = np.exp(q.log_weights)
    d = 1.3 - np.sum(np.asarray(q.projection) ** 2, axis=-2)
    each = [q.marginals(k) for k in range(q.num_components)]
    mean, variance = (np.stack(moments) for moments in zip(*each, strict=True))
    variance = variance - (1 - v) * d
    expected = y * mean - np.exp(mean + 0.5 * variance)
    expected = expected - jax.scipy.special.gammaln(y + 1)
    expected = np.sum(weights @ expected) - np.sum(q.prior_kl())
    expected -= 0.5 * len(X) * (v - np.log(v) - 1)
    np.testing.assert_allclose(bound(v, X, y), expected, rtol=1e-5)
    # In minibatches, v's cost is scaled as the data are.
    each = [bound(v, X[i : i + 4], y[i : i + 4], 12) for i in (0, 4, 8)]
    np.testing.assert_allclose(np.mean(each), bound(v, X, y), rtol=1e-9)
    # At v = 1 it is the plain bound.
    option.relaxation = None
    plain = sgp.AutoSparseGP(poisson, option)
    plain.setup(X, y)
    given = {k: p for k, p in params.items() if k != "f_auto_qf_scale"}
    np.testing.assert_allclose(
        bound(1.0, X, y),
        bound_of(plain, poisson, sgp.GaussHermite(50))(given, X, y),
        rtol=1e-9,
    )


@pytest.mark.slow
def test_scalar_never_exceeds_the_evidence():
    """Its best value for a Gaussian likelihood is the spherical bound, in closed form."""
    X, y = regression_data(12)
    guide = sgp.AutoSparseGP(
        model, sgp.SVGP(inducing=Z, train_inducing=False, tight="scalar")
    )
    guide.setup(X, y, noise=0.3)
    best = sgp.CollapsedSVGP(KERNEL, X, Z, 0.3)
    params = at_the_optimum(sgp.SVGP, best, y)
    K = rbf(Z, Z, 1.3, 0.7) + 1.3e-8 * np.eye(2)
    Kuf = rbf(Z, X, 1.3, 0.7)
    trace = 12 * 1.3 - np.trace(Kuf.T @ np.linalg.solve(K, Kuf))
    v = 1 / (1 + trace / (12 * 0.3**2))
    plain = float(best.log_prob(y)) + 0.5 * trace / 0.3**2
    spherical = plain - 6 * np.log1p(trace / (12 * 0.3**2))
    bound = bound_of(guide, model, noise=0.3)
    for scale in (0.5 * v, 1.5 * v, v):
        found = bound({**params, "f_auto_qf_scale": jnp.asarray(scale)}, X, y)
        assert found <= spherical + 1e-8
    np.testing.assert_allclose(found, spherical, rtol=1e-8)
    assert spherical < sgp.MarginalGP(KERNEL, X, 0.3).log_prob(y)


@pytest.mark.slow
def test_deep_layers_may_be_tight():
    X, y = regression_data(8)

    def deep(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        g = numpyro.sample("g", sgp.GaussianProcess(KERNEL, f[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(g, 0.3), obs=y)

    def bound(inner, outer):
        options = {"f": sgp.SVGP(inducing=Z, tight=inner)}
        options["g"] = sgp.SVGP(inducing=Z, tight=outer)
        guide = sgp.AutoSparseGP(deep, options)
        svi = SVI(deep, guide, optax.adam(0.01), sgp.TraceGP_ELBO(sgp.MonteCarlo(4)))
        params = svi.get_params(svi.init(KEY, X, y))
        return -svi.loss.loss(KEY, params, deep, guide, X, y)

    # With the same draws: the outer layer's gain; at v = 1 the scalar changes nothing.
    assert bound("none", "diagonal") > bound("none", "none")
    np.testing.assert_allclose(bound("scalar", "scalar"), bound("none", "none"), rtol=1e-9)


@SLOW
def test_sites_and_lbfgs_take_tight_bounds():
    X, y = regression_data(12)
    guide = sgp.AutoSparseGP(
        model,
        sgp.SVGP(
            inducing=Z, covariance="pseudo_data", train_inducing=False, tight="diagonal"
        ),
    )
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    result = sgp.fit_lbfgs(svi, KEY, X, y, noise=0.3, progress_bar=False)
    best = sgp.CollapsedSVGP(KERNEL, X, Z, 0.3, tight="diagonal").log_prob(y)
    np.testing.assert_allclose(-result.losses[-1], best, rtol=1e-6)


class NormalWithExpectation(dist.Normal):
    """Its expectation under a Gaussian f in closed form."""

    def __init__(self, f, scale):
        self.f = f
        super().__init__(f, scale)

    def expected_log_prob(self, mean, variance, value):
        plain = dist.Normal(mean, self.scale).log_prob(value)
        return plain - 0.5 * variance / self.scale**2


@pytest.mark.slow
def test_likelihoods_with_an_expectation_of_their_own_are_relaxed_alike():
    def closed(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", NormalWithExpectation(f, 0.3), obs=y)

    X, y = regression_data(8)
    for tight in ("none", "diagonal"):
        found = []
        for program in (closed, partial(model, noise=0.3)):
            option = sgp.SVGP(inducing=Z, train_inducing=False, tight=tight)
            guide = sgp.AutoSparseGP(program, option)
            params = SVI(program, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
            params = params.get_params(params.init(KEY, X, y))
            found.append(bound_of(guide, program)(params, X, y))
        np.testing.assert_allclose(*found, rtol=1e-9)


@pytest.mark.slow
def test_closed_forms_stay_beside_a_tight_bound():
    """A likelihood without a slope by f has one by its closed form."""
    X, y = regression_data(6)
    labels = jnp.array([0, 1, 1, 0, 1, 0])

    def program(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        g = numpyro.sample("g", sgp.GaussianProcess(KERNEL, X).expand([2]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
            numpyro.sample("label", sgp.likelihoods.RobustMax(g), obs=labels)

    options = {"inducing": Z, "train_inducing": False}
    options = {"f": sgp.SVGP(**options, tight="diagonal"), "g": sgp.SVGP(**options)}
    guide = sgp.AutoSparseGP(program, options)
    svi = SVI(program, guide, optax.adam(0.1), sgp.TraceGP_ELBO(sgp.MonteCarlo(2)))
    params = svi.get_params(svi.init(KEY, X, y))
    slopes = jax.jit(jax.grad(bound_of(guide, program, sgp.MonteCarlo(2))))(params, X, y)
    assert jnp.abs(slopes["g_auto_qu_mu"]).max() > 0.1


def test_a_partition_is_for_the_rows_that_it_names():
    X, y = regression_data(6)
    blocks = sgp.relaxation.Blocks(partition=np.arange(6).reshape(2, 3))
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z, tight=blocks))
    guide.setup(X, y)
    loss = sgp.TraceGP_ELBO(sgp.GaussHermite(2)).loss
    with pytest.raises(ValueError, match="each of the row numbers 0 to 8 once"):
        loss(KEY, {}, model, guide, *regression_data(9))


class NoRelaxation(sgp.relaxation.Relaxation):
    """V = I, by the interface of one's own."""

    name, is_gaussian, factor = "no", False, 1.0

    def cost(self, prior, A, residual, precision):
        return jnp.zeros(residual.shape[:-1])


@pytest.mark.slow
def test_a_relaxation_of_ones_own_is_taken():
    X, y = count_data(8)
    found = []
    for tight in ("none", jax.tree_util.register_static(NoRelaxation)()):
        guide = sgp.AutoSparseGP(poisson, sgp.SVGP(inducing=Z, tight=tight))
        svi = SVI(poisson, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        params = svi.get_params(svi.init(KEY, X, y))
        found.append(bound_of(guide, poisson, sgp.GaussHermite(20))(params, X, y))
    np.testing.assert_allclose(*found, rtol=1e-9)


def set_up(program, option, *args):
    sgp.AutoSparseGP(program, option).setup(*args)


@pytest.mark.slow
def test_bad_input_is_told():
    X, y = count_data(12)
    for tight in ("diagonal", "block"):
        with pytest.raises(ValueError, match="'f'.*Gaussian likelihoods.*tight='scalar'"):
            set_up(poisson, sgp.SVGP(3, tight=tight), X, y)
    with pytest.raises(ValueError, match="13 rows do not fit 12 rows"):
        set_up(model, sgp.SVGP(3, tight=sgp.relaxation.Blocks(13)), X, y * 1.0)
    with pytest.raises(ValueError, match="tight must be one of"):
        sgp.SOLVEGP(3, 3, tight="full")
    with pytest.raises(ValueError, match=r"one of \('none', 'scalar'\)"):
        sgp.MixtureSVGP(3, tight="diagonal")
    with pytest.raises(ValueError, match="InverseFree|Conditional"):
        sgp.SVGP(3, tight=sgp.relaxation.Conditional())
    with pytest.raises(ValueError, match="independent latent functions"):
        sgp.SVGP(3, covariance="coupled", tight="scalar")

    def ties(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(jnp.sum(f), 1.0), obs=y)

    with pytest.raises(ValueError, match="ties rows of X together"):
        set_up(ties, sgp.SVGP(3, tight="diagonal"), X, 1.0)

    def deep(X, y):
        inner = numpyro.sample("inner", sgp.GaussianProcess(KERNEL, X))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, inner[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    with pytest.raises(ValueError, match="'inner': no observed site is Gaussian"):
        set_up(deep, sgp.SVGP(3, tight="diagonal"), X, y * 1.0)

    def scaled(X, y):
        with numpyro.handlers.scale(scale=0.5):
            f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(scaled, sgp.SVGP(3, tight="diagonal"))
    svi = SVI(scaled, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    with (
        pytest.warns(UserWarning, match="'f' is scaled by 0.5"),
        pytest.raises(ValueError, match="'f' is scaled"),
    ):
        svi.run(KEY, 1, X, y * 1.0, progress_bar=False)

    def elsewhere(X, y, batch_size):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", len(X), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(f[i], 0.3), obs=y[i])

    guide = sgp.AutoSparseGP(elsewhere, sgp.SVGP(3, tight="diagonal"))
    svi = SVI(elsewhere, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    with pytest.raises(ValueError, match="minibatch of 4 rows of plate 'data'.*X\\[idx\\]"):
        svi.run(KEY, 1, X, y * 1.0, 4, progress_bar=False)

    def weighted(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.handlers.scale(scale=2.0), numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(weighted, sgp.SVGP(3, tight="diagonal"))
    svi = SVI(weighted, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    with pytest.raises(ValueError, match="'y' is scaled beside its plates"):
        svi.run(KEY, 1, X, y * 1.0, progress_bar=False)

    def two_likelihoods(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("a", dist.Normal(f[:1], 0.01).to_event(1), obs=y[:1])
        numpyro.sample("y", dist.Poisson(jnp.exp(f[1:])).to_event(1), obs=y[1:])

    single = X.astype(jnp.float32), y.astype(jnp.float32)
    with pytest.raises(ValueError, match="are for Gaussian likelihoods"):
        set_up(two_likelihoods, sgp.SVGP(3, tight="diagonal"), *single)
    guide = sgp.AutoSparseGP(poisson, sgp.SVGP(3, tight="scalar"))
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(2, joint=True))
    with pytest.raises(ValueError, match="draws rows together"):
        SVI(poisson, guide, optax.adam(0.01), loss).run(KEY, 1, X, y, progress_bar=False)

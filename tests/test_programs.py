"""Programs that are shared by what does the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree

import numpyro_sgp as sgp
from numpyro_sgp import _programs
from numpyro_sgp._equality import computed_once
from numpyro_sgp._flat import Flat
from numpyro_sgp._kept import program
from numpyro_sgp._programs import begun, on_data, one_program, shared, used_alone
from numpyro_sgp.diagnostics.optimality import nats_left
from numpyro_sgp.diagnostics.sparsity import sparsity_curve
from numpyro_sgp.families import Block, BlockGaussian


@pytest.fixture
def compiled(monkeypatch):
    """Names of the programs that are compiled."""
    found, start = [], _programs._start

    def counted(lowered, *args):
        found.append(lowered)
        return start(lowered, *args)

    monkeypatch.setattr(_programs, "_start", counted)
    monkeypatch.setattr(_programs, "_COMPILED", type(_programs._COMPILED)())
    return found


def test_the_same_program_is_compiled_once(compiled):
    def times(factor):
        return shared(lambda x, named: {"a": factor * x, "b": (named["x"], None)})

    for factor in (2.0, 2.0, 3.0):
        found = times(factor)(jnp.ones(3), {"x": jnp.zeros(2)})
        assert np.array_equal(found["a"], np.full(3, factor)) and found["b"][1] is None
    assert len(compiled) == 2


def test_other_shapes_types_and_constants_are_other_programs(compiled):
    constant = np.arange(5000.0)
    for change in (0.0, 1.0):
        values = constant.copy()
        values[2500] += change
        assert shared(lambda x, values=values: (values * x).sum())(1.0) == values.sum()
    double = shared(lambda x: x + x)
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(3, jnp.float32), jnp.ones(3, int), 1.0):
        assert double(x).dtype == (x + jnp.zeros_like(x)).dtype
    assert len(compiled) == 7


def test_trees_of_other_structures_share_and_keep_theirs(compiled):
    twice = [shared(lambda tree: jax.tree.map(lambda v: 2.0 * v, tree)) for _ in range(2)]
    assert list(twice[0]({"a": 1.0, "b": 2.0})) == ["a", "b"]
    assert list(twice[1]({"c": 1.0, "d": 2.0})) == ["c", "d"]
    assert len(compiled) == 1


def test_callbacks_are_not_shared(compiled):
    def calls(value):
        shape = jax.ShapeDtypeStruct((), float)
        return shared(lambda x: jax.pure_callback(lambda x: x + value, shape, x))

    assert [float(calls(value)(1.0)) for value in (1.0, 2.0)] == [2.0, 3.0]


def test_what_nothing_is_made_of_is_left_out_of_programs():
    def run(key, x):
        first, _ = jax.random.split(key)  # as for a site with a value
        jax.random.normal(first, (3,))
        return jax.vmap(jnp.sin)(x)

    traced = jax.make_jaxpr(run)(jax.random.key(0), jnp.ones(3))
    assert len(used_alone(traced).jaxpr.eqns) < len(traced.jaxpr.eqns)
    assert len(used_alone(traced).jaxpr.invars) == 2
    found = shared(run)(jax.random.key(0), jnp.ones(3))
    np.testing.assert_allclose(found, np.sin(np.ones(3)), rtol=1e-12)
    assert used_alone(jax.make_jaxpr(jnp.sin)(1.0)).jaxpr.eqns


def test_programs_run_inside_of_transformations():
    double = shared(lambda x: 2.0 * x)
    assert jax.grad(double)(1.0) == 2.0
    assert np.array_equal(jax.vmap(double)(jnp.arange(3.0)), [0.0, 2.0, 4.0])
    assert jax.jit(double)(2.0) == 4.0


def test_prepared_programs_are_compiled_beside(compiled):
    double = shared(lambda x: 2.0 * x)
    double.prepare(1.0)
    assert double(1.0) == 2.0 and len(compiled) == 1


def test_what_is_begun_is_compiled_beside_and_computed_when_called(compiled):
    seen = []

    def double(x):
        seen.append(x)
        return {"fn": dist.Normal(2.0 * x, 1.0), "name": "f"}

    finish = begun(double, jnp.ones(3))
    assert len(seen) == len(compiled) == 1
    found = finish()
    assert np.array_equal(found["fn"].mean, 2.0 * np.ones(3)) and found["name"] == "f"
    assert len(seen) == len(compiled) == 1
    assert begun(lambda x: jnp.ones(int(x.max())), jnp.array([1, 3]))().shape == (3,)
    with pytest.raises(ZeroDivisionError):
        begun(lambda x: x / (1 // 0), jnp.ones(3))


def test_anything_may_be_returned_and_values_may_be_asked_for():
    def model(X, scale):
        fn = dist.Normal(X.mean(), scale).expand([2]).to_event(1)
        return {"fn": fn, "name": "f", "run": model, "none": None}

    found = on_data(lambda args, kwargs: model(*args, **kwargs), (np.ones(3), 2.0), {})
    assert found["name"] == "f" and found["run"] is model and found["none"] is None
    assert np.array_equal(found["fn"].mean, [1.0, 1.0])

    def asks(x):
        return jnp.ones(int(x.max()))

    assert one_program(asks, jnp.array([1, 3])).shape == (3,)


def test_other_data_of_the_same_shapes_compile_nothing(compiled):
    """A second guide and a second fit, as folds and restarts are."""

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    rng = np.random.default_rng(0)

    def fit():
        X = rng.normal(size=(30, 1))
        sgp.fit(model, sgp.SVGP(4), (X, np.sin(X[:, 0])), progress_bar=False)

    fit()
    assert len(compiled) > 5
    compiled.clear()
    fit()
    # But for the one that looks for rows that the likelihood ties together.
    assert len(compiled) <= 1


def test_flat_vectors_are_those_of_jax():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": (np.float32(2.0), np.zeros((0, 4)))}
    for some in (tree, {}, {"a": tree["a"]}):
        flat = Flat(some)
        vector, unravel = ravel_pytree(some)
        assert np.array_equal(flat.ravel(some), vector)
        if some:
            assert flat.dtype == vector.dtype
        for moved in (vector + 1.0, np.asarray(vector) + 1.0):
            found, wanted = flat.unravel(moved), unravel(vector + 1.0)
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
            assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    kinds = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(1, jnp.float16)}
    mixed = Flat(kinds)  # which NumPy does not join
    assert np.array_equal(mixed.ravel(kinds), np.ones(3)) and mixed.dtype == jnp.float32
    out = jax.jit(lambda v: flat.unravel(v)["a"][1])(jnp.arange(6.0))
    assert np.array_equal(out, [3.0, 4.0, 5.0])


@pytest.mark.slow
def test_a_check_of_other_data_of_the_same_shapes_compiles_next_to_nothing(compiled):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.4), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    rng = np.random.default_rng(0)

    def check():
        X = rng.normal(size=(31, 1))
        guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=np.zeros((1, 1))))
        return sgp.fit(model, guide, (X, np.sin(X[:, 0])), progress_bar=False).check()

    found = check()
    assert found.causes["inducing points"].nats > 1.0 and found.evidence.upper < 0.0
    compiled.clear()
    check()
    assert len(compiled) <= 1  # that of rows that the likelihood ties together


@pytest.mark.slow
def test_diagnostics_of_a_model_that_looks_at_its_data():
    def model(X, y=None, looks=True):
        if looks and y is not None and np.max(np.asarray(y)) > 1e6:
            raise ValueError("too large")
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.4), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X = np.linspace(0.0, 3.0, 31)[:, None]
    data = X, np.sin(X[:, 0])
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(*data)
    params = guide.known().starts
    for told in (nats_left, lambda *given: sparsity_curve(*given).gained[-1]):
        plain = told(guide, params, *data, False)
        assert 1.0 < plain < np.inf
        np.testing.assert_allclose(told(guide, params, *data), plain, rtol=1e-6)


# ---- posteriors, whose parts are programs -----------------------------------------------

X = jnp.linspace(0.0, 1.0, 12)[:, None]
LEVEL = {"now": 1.0}


def level(X):
    """A mean function that reads what may change."""
    return LEVEL["now"] * jnp.ones(X.shape[0])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["variance"], meta_fields=["fixed"]
)
@dataclasses.dataclass
class Changing:
    """A kernel of one's own, likewise, with a part that JAX does not see."""

    variance: float
    fixed: object = 1.0

    def __call__(self, A, B):
        apart = (A[:, None, 0] - B[None, :, 0]) ** 2
        return LEVEL["now"] * self.variance * self.fixed * jnp.exp(-apart)

    def diag(self, A):
        return LEVEL["now"] * self.variance * self.fixed * jnp.ones(A.shape[0])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["function"], meta_fields=[]
)
@dataclasses.dataclass
class Leafy:
    """A mean function with a leaf that is no array."""

    function: object

    def __call__(self, X):
        return self.function(X[:, 0])


def posterior(kernel=None, mean=None, X=X):
    kernel = sgp.kernels.RBF(1.0, 0.5) if kernel is None else kernel
    q = BlockGaussian((Block(jnp.ones(4), jnp.eye(4)),))
    return sgp.SparsePosterior(sgp.GaussianProcess(kernel, X, mean), (X[::3],), q)


@pytest.mark.slow
def test_moments_and_draws_of_a_posterior_are_a_program_each(compiled):
    rows = jnp.linspace(0.0, 1.0, 11)[:, None]  # a number that no other test has

    def look(scale):
        q = posterior(sgp.kernels.RBF(scale, 0.5), X=rows)
        return q.mean, q.variance, q.covariance_matrix, q.sample(jax.random.key(0), (3,))

    look(1.0)
    assert len(compiled) == 5  # with the factors
    look(2.0)
    assert len(compiled) == 5
    with jax.disable_jit():
        plain = look(2.0)
    for one, other in zip(look(2.0), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_whole_functions_are_drawn_by_a_program_and_looked_at_by_another(compiled):
    rows = jnp.linspace(0.0, 1.0, 10)[:, None]  # a number that no other test has

    def look(scale, key):
        draws = posterior(sgp.kernels.Matern32(scale, 0.5), X=rows)
        return draws.sample_functions(jax.random.key(key), (3,), 64)(rows)

    look(1.0, 0)
    assert len(compiled) == 3  # with the factors
    other = look(2.0, 1)
    assert len(compiled) == 3
    with jax.disable_jit():
        plain = look(2.0, 1)
    np.testing.assert_allclose(other, plain, rtol=1e-8, atol=1e-8)  # of a solve by K_uu


def test_sizes_of_drawn_functions_are_whole_numbers_of_any_kind():
    q, key = posterior(), jax.random.key(0)
    wanted = q.sample_functions(key, (2,), 16)(X)
    for shape, number in (((jnp.array(2),), np.array(16)), (2, np.int64(16))):
        assert np.array_equal(q.sample_functions(key, shape, number)(X), wanted)
    for shape, number in (((2.0,), 16), ((2,), 16.0)):
        with pytest.raises(TypeError):
            q.sample_functions(key, shape, number)
    with pytest.raises(TypeError, match="one random key"):
        q.sample_functions(3, (2,), 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_functions_with_a_mean_that_has_a_function_in_it():
    mean = jax.tree_util.Partial(lambda f, X: f(X[:, 0]), jax.tree_util.Partial(jnp.sin))
    tree = functools.partial(jax.tree.map, lambda x: x)
    samples = tree(posterior(mean=mean).sample_functions(jax.random.key(0), (2,), 16))
    leafy = dataclasses.replace(samples, mean_function=Leafy(jnp.sin))
    np.testing.assert_allclose(leafy(X), samples(X), rtol=1e-12, atol=1e-12)


@functools.wraps(level)
def wrapped(X, to=LEVEL):
    return to["now"] * jnp.ones(X.shape[0])


@pytest.mark.parametrize("mean", [level, wrapped, lambda X: level(X)])
def test_what_a_mean_function_reads_may_change(monkeypatch, mean):
    before = posterior(mean=mean).mean[0]
    monkeypatch.setitem(LEVEL, "now", 100.0)
    np.testing.assert_allclose(posterior(mean=mean).mean[0] - before, 99.0)


def test_what_a_kernel_of_ones_own_reads_may_change(monkeypatch):
    part = np.array([1.0])
    assert (
        posterior(Changing(1.0)).variance[0] == posterior(Changing(1.0, part)).variance[0]
    )
    part[0] = 9.0
    np.testing.assert_allclose(posterior(Changing(1.0, part)).variance[0], 9.0, rtol=1e-6)
    monkeypatch.setitem(LEVEL, "now", 4.0)
    np.testing.assert_allclose(posterior(Changing(1.0)).variance[0], 4.0, rtol=1e-6)


@pytest.mark.slow
def test_traced_values_that_hide_in_a_kernel_are_differentiated():
    def total(s):
        return posterior(Changing(1.0, s)).variance.sum()

    np.testing.assert_allclose(jax.grad(total)(2.0), 12.0, rtol=1e-6)


@pytest.mark.slow
def test_random_numbers_are_those_of_the_configuration():
    key, found = jax.random.key(0), []
    for partitionable in (True, False):
        with jax.threefry_partitionable(partitionable):
            found.append(posterior().sample(key, (3,)))
    assert not np.allclose(*found)


def test_programs_of_one_function_are_few(monkeypatch):
    monkeypatch.setattr(_programs, "FEW", 3)
    run = shared(lambda x: 2.0 * x)
    for rows in range(1, 8):
        run(jnp.ones(rows))
    assert len(run._programs) == 3 and run(jnp.ones(2)).shape == (2,)


# ---- programs that are compiled briefly ----------------------------------------------


def largest(m, s):
    """At the largest of sums of products with something: its place is where it is equal."""
    a = jnp.exp(m + jnp.linspace(-2.0, 2.0, 20)[:, None]) * s + jnp.arange(120.0) % 7
    return jnp.max(a, axis=0).sum()


class Owner:
    """Of programs that are kept with it."""


def lesser(m, s):
    p = jax.nn.sigmoid(m + jnp.linspace(-2.0, 2.0, 20)[:, None])
    y = jnp.arange(120.0) % 7
    return jnp.minimum(y + p * s, 3.0 + (1.0 - p) * s).sum()


@pytest.mark.quick(1)
@pytest.mark.parametrize("fn", [largest, lesser])
def test_derivatives_of_maxima_are_kept_where_programs_are_compiled_briefly(
    fn, monkeypatch
):
    given = _programs._options

    def as_outside_of_tests(*args, **kwargs):  # where level 0 is for all (conftest.py)
        return {"xla_backend_optimization_level": 2, **(given(*args, **kwargs) or {})}

    monkeypatch.setattr(_programs, "_options", as_outside_of_tests)
    m = np.sin(np.arange(120.0)).astype(np.float32)
    slope = jax.grad(fn, (0, 1))
    with jax.disable_jit():
        expected = slope(m, jnp.float32(2.5))
    found = shared(slope, briefly=True)(m, np.float32(2.5))
    kept = program(Owner(), lambda owner, *arrays, static: slope(*arrays))
    for a, b, c in zip(found, expected, kept(m, np.float32(2.5), static=()), strict=True):
        # Sums of at most 2,400 numbers of size 20, in float32.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(c, b, rtol=1e-5, atol=1e-4)


def asks(fn, *args):
    """Whether a program has what it compares for equality in arrays of their own."""
    closed = jax.make_jaxpr(fn)(*args)
    return computed_once(closed) is not closed


def test_what_asks_whether_results_are_equal():
    x = jnp.linspace(0.1, 2.0, 5)
    assert asks(jax.grad(lambda x: jnp.clip(x * x, 0.2, 1.0).sum()), x)
    assert asks(jax.grad(lambda x: (x * x).max()), x)
    assert not asks(lambda x: jnp.where(x * x == 1.0, 0.0, x), x)
    assert not asks(lambda x: jnp.where(jnp.isnan(x * x), 0.0, x), x)
    assert not asks(jax.grad(lambda x: jnp.abs(x * x - 1.0).sum()), x)


def in_loops(x):
    """Maxima in loops, branches and programs within others, also of no numbers."""

    def body(i, x):
        return jax.lax.cond(i % 2 == 0, jnp.sin, lambda x: jnp.clip(x * x, 0.1, 0.7), x)

    x = jax.lax.fori_loop(0, 3, body, x) + jnp.maximum(x * x, x + 0.1)
    _, maxima = jax.lax.scan(lambda c, x: (c, jnp.max(x * x + c)), 0.5, x.reshape(4, 5))
    return maxima.sum() + jax.checkpoint(jnp.max)(x * x) + jnp.maximum(x[:0], x[:0]).sum()


def test_programs_that_ask_whether_results_are_equal_are_the_same():
    x = jnp.sin(jnp.arange(20.0))
    fn = jax.value_and_grad(in_loops)
    assert asks(fn, x)
    x = jnp.where(jnp.arange(20) == 3, jnp.array([[jnp.inf], [jnp.nan], [0.3]]), x)
    for row in x:
        found, expected = shared(fn)(row), jax.jit(fn)(row)
        same = functools.partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(same, found, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "approximation",
    [
        sgp.SVGP(4),
        sgp.SVGP(4, tight="diagonal"),
        sgp.SOLVEGP(4, 4),
        sgp.InverseFreeSVGP(4),
    ],
    ids=["SVGP", "tight", "SOLVEGP", "inverse free"],
)
def test_bounds_ask_for_no_equality(approximation):
    def model(X, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        kernel = sgp.kernels.Matern32(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X = np.linspace(0.0, 3.0, 20).reshape(10, 2)
    guide = sgp.AutoSparseGP(model, approximation)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, X[:, 0]))

    def loss(params):
        return svi.loss.loss(jax.random.key(0), params, model, guide, X, X[:, 0])

    assert not asks(jax.value_and_grad(loss), params)


@pytest.mark.slow
def test_guides_of_the_same_model_predict_and_score_by_the_same_programs(compiled):
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    counts = []
    for shift in (0.0, 0.5):
        X = np.linspace(0.0, 3.0, 9)[:, None] + shift
        y = np.arange(9) % 4
        guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
        guide.setup(X, y)
        params = {**guide.known().starts, "lengthscale_auto_loc": jnp.array(1.0 + shift)}
        before = len(compiled)
        mean = sgp.predict(guide, params, X)["f"].mean
        np.testing.assert_allclose(sgp.Predictor(guide, params)(X)["f"].mean, mean)
        sgp.log_predictive_density(guide, params, X, y)
        counts.append(len(compiled) - before)
    assert counts[0] > 2 and counts[1] == 0

"""What a predictor keeps, its batches and its precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy.linalg import solve_triangular

import numpyro_sgp as sgp
from numpyro_sgp.distributions import keep
from numpyro_sgp.families import Block, BlockGaussian
from numpyro_sgp.predictive.row_batches import row_batches
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.row_axes import (
    RowAxes,
    inputs_are_untouched,
    row_axes,
    rows_apart,
)
from tests.helpers import slow

RNG = np.random.default_rng(0)
M, D = 300, 4
Z = RNG.normal(size=(M, D))
X_NEW = RNG.normal(size=(700, D))


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(1.3, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)


def q_params(shrink, dtype):
    """A q(u) whose variances are ``shrink`` of the prior's, or less."""
    L = np.tril(0.02 * RNG.normal(size=(M, M))) + np.diag(RNG.uniform(0.2, 1.0, M))
    sqrt = shrink * L / np.linalg.norm(L, 2)
    found = {"f_auto_Z": Z, "f_auto_qu_mu": RNG.normal(size=M), "f_auto_qu_sqrt": sqrt}
    return {name: jnp.asarray(value, dtype) for name, value in found.items()}


def guide_of(dtype):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=jnp.asarray(Z, dtype)))
    X = jnp.asarray(X_NEW[:10], dtype)
    guide.setup(X, jnp.zeros(10, dtype))
    return guide


def by_hand(params, jitter):
    """Marginals in double precision, by dense linear algebra."""

    def kernel(A, B):
        r = np.sqrt(3.0 * ((A[:, None] - B) ** 2).sum(axis=-1)) / 2.0
        return 1.3 * (1.0 + r) * np.exp(-r)

    Z, mu, P = (np.asarray(params[f"f_auto_{k}"], float) for k in ("Z", "qu_mu", "qu_sqrt"))
    L = np.linalg.cholesky(kernel(Z, Z) + jitter * np.eye(M))
    A = solve_triangular(L, kernel(Z, X_NEW), lower=True)
    return A.T @ mu, 1.3 - (A**2).sum(axis=0) + ((P.T @ A) ** 2).sum(axis=0)


# Smaller than the prior; wider in a few directions; wider in most.
@pytest.mark.quick(1)
@pytest.mark.parametrize("shrink", [0.9, slow(1.2), 30.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_marginals_are_those_of_dense_algebra(shrink, dtype):
    params = q_params(shrink, dtype)
    predictor = sgp.Predictor(guide_of(dtype), params, batch_size=256)
    found = predictor(jnp.asarray(X_NEW, dtype))["f"]
    kept = predictor.kept["f"]
    assert (kept.more.shape[0] > 0) == (shrink > 1.0)
    mean, variance = by_hand(params, float(kept.jitter))
    single = dtype == jnp.float32
    assert found.mean.dtype == dtype and found.mean.shape == (700,)
    # Rounding times the square root of the condition of K_uu, some 1e2.
    assert_allclose(found.variance, variance, rtol=1e-4 if single else 1e-10)
    assert_allclose(found.mean, mean, atol=2e-4 if single else 1e-10)


@pytest.mark.slow
def test_any_number_of_rows_takes_few_programs():
    params, traced = q_params(0.9, jnp.float64), []

    def counted(X, y=None):
        traced.append(X.shape[0])
        model(X, y)

    guide = sgp.AutoSparseGP(counted, sgp.SVGP(inducing=jnp.asarray(Z)))
    guide.setup(jnp.asarray(X_NEW[:10]), jnp.zeros(10))
    predictor = sgp.Predictor(guide, params, batch_size=256)
    whole = predictor(X_NEW)["f"]
    predictor(X_NEW[:200])
    traced.clear()
    for count in (700, 300, 257, 256, 250, 200, 600):
        found = predictor(X_NEW[:count])["f"]
        assert_allclose(found.variance, whole.variance[:count], rtol=1e-12)
    # To see whether rows are apart among as many.
    assert traced == [300, 257, 256, 250, 600]
    predictor(X_NEW[:100])  # as they are
    assert traced[-1] == 100


def test_batches_have_all_rows_once():
    for num_rows in (0, 1, 5, 127, 128, 129, 200, 256, 1000, 1001):
        X, other = np.arange(num_rows)[:, None], np.zeros((2, 2))
        rows = RowAxes((0, None, None), {})
        parts = list(row_batches([X, other, 3.0], 256, rows))
        rows = np.concatenate([batch[0][:count] for batch, count, _ in parts])
        assert np.array_equal(rows, X)
        assert len({size for *_, size in parts}) == 1
        assert all(len(batch[0]) == size for batch, _, size in parts)
        assert all(batch[1] is other for batch, *_ in parts)


def test_batches_of_arrays_on_the_host_are_no_copies_and_compile_nothing(count_compiled):
    X, keys = jnp.arange(600.0), jax.random.split(jax.random.key(0), 600)
    whole = np.asarray(X)
    count_compiled()
    rows = RowAxes((0, 0), {})
    told = row_batches([X, np.zeros(600)], 256, rows)
    first, second, last = (batch[0] for batch, *_ in told)
    assert count_compiled() == 0
    assert np.shares_memory(first, whole) and np.shares_memory(second, whole)
    assert np.array_equal(last[:88], whole[512:]) and (last[88:] == 599.0).all()
    # Keys of random numbers have no array on the host.
    batches = [batch[1] for batch, *_ in row_batches([X, keys], 256, rows)]
    assert all(batch.dtype == keys.dtype and len(batch) == 256 for batch in batches)


@pytest.mark.slow
def test_a_plate_with_a_size_of_its_own_gets_rows_as_they_are():
    def fixed(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", 200, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    guide = sgp.AutoSparseGP(fixed, sgp.SVGP(5))
    guide.setup(jnp.asarray(X_NEW[:200]), jnp.zeros(200))
    params = guide.known().starts
    found = sgp.Predictor(guide, params)(X_NEW[:150])["f"]
    known = guide.posterior(params, jnp.asarray(X_NEW[:150]))["f"]
    assert_allclose(found.variance, known.variance, rtol=1e-8)
    assert sgp.predict(guide, params, X_NEW[:150], quantiles=())["y"].mean.shape == (150,)


@pytest.mark.slow
def test_layers_and_functions_and_draws():
    """Two latent functions, a deep GP, and predictions with what is kept."""

    def deep(X, y=None):
        inner = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X).expand([2])
        h = numpyro.sample("h", inner)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), h.T))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    X = jnp.asarray(X_NEW[:40])
    guide = sgp.AutoSparseGP(deep, {"h": sgp.SVGP(5), "f": sgp.SVGP(4)})
    svi = numpyro.infer.SVI(deep, guide, numpyro.optim.Adam(0.05), sgp.TraceGP_ELBO())
    params = svi.run(jax.random.key(0), 30, X, X[:, 0], progress_bar=False).params
    predictor = sgp.Predictor(guide, params, batch_size=16)
    found, known = predictor(X), guide.posterior(params, X)
    for name in ("h", "f"):
        assert_allclose(found[name].mean, known[name].mean, rtol=1e-8, atol=1e-10)
        assert_allclose(found[name].variance, known[name].variance, rtol=1e-7)
    kept = sgp.predict(guide, params, X, quantiles=(), kept=predictor.kept)
    plain = sgp.predict(guide, params, X, quantiles=())
    assert_allclose(kept["y"].sd, plain["y"].sd, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("called", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_is_a_part_of_what_jax_traces(called):
    params, X = q_params(0.9, jnp.float64), jnp.asarray(X_NEW[:5])
    guide = guide_of(jnp.float64)
    predictor, known = sgp.Predictor(guide, params), sgp.Predictor(guide, params)(X)["f"]
    if called:
        predictor(X)

    def at(x):
        return predictor(x[None])["f"].mean[0]

    assert_allclose(jax.vmap(at)(X), known.mean, rtol=1e-9)
    found = jax.jit(lambda X: predictor(X)["f"].variance)(X)
    assert_allclose(found, known.variance, rtol=1e-9)
    assert_allclose(jax.jit(lambda a: a * predictor(X)["f"].mean)(2.0), 2.0 * known.mean)
    ends = [predictor(X[:1] + h * np.eye(D)[0])["f"].mean[0] for h in (1e-5, -1e-5)]
    assert_allclose(jax.grad(at)(X[0])[0], (ends[0] - ends[1]) / 2e-5, rtol=1e-6)


def test_bad_input_is_told():
    params, guide = q_params(0.9, jnp.float64), guide_of(jnp.float64)
    with pytest.raises(ValueError, match="batch_size must be a whole number, 1 or more"):
        sgp.Predictor(guide, params, batch_size=0)
    with pytest.raises(ValueError, match="missing"):
        sgp.Predictor(guide, {})
    with pytest.raises(ValueError, match="columns"):
        sgp.Predictor(guide, params)(X_NEW[:, :2])


def test_a_q_that_is_wider_in_some_directions_is_split():
    L = np.linalg.cholesky(np.eye(3) + 0.5)
    sqrt = jnp.diag(jnp.array([0.5, 1.5, 0.1]))
    kept = keep(jnp.asarray(L), jnp.zeros(()), BlockGaussian((Block(jnp.zeros(3), sqrt),)))
    inverse = np.linalg.inv(L)
    W = inverse.T @ (np.eye(3) - np.asarray(sqrt) ** 2) @ inverse
    root, more = np.asarray(kept.root), np.asarray(kept.more)
    assert more.shape == (1, 3)
    assert_allclose(root.T @ root - more.T @ more, W, atol=1e-11)


@pytest.mark.slow
def test_sites_with_rows_of_their_own_are_whole():
    def two(X, X2, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), X2))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)
        with numpyro.plate("others", X2.shape[0]):
            numpyro.sample("y2", dist.Normal(g, 0.2), obs=y)

    guide = sgp.AutoSparseGP(two, sgp.SVGP(5))
    given = jnp.asarray(X_NEW[:140]), jnp.asarray(X_NEW[140:160])
    guide.setup(*given, 0.0)
    params = guide.known().starts
    found = sgp.Predictor(guide, params)(*given)
    assert (found["f"].mean.shape, found["g"].mean.shape) == ((140,), (20,))
    predicted = sgp.predict(guide, params, *given, quantiles=(), batch_size=50)
    shapes = {name: p.mean.shape for name, p in predicted.items()}
    assert shapes == {"f": (140,), "y": (140,), "g": (20,), "y2": (20,)}


@pytest.mark.slow
def test_a_table_of_groups_before_the_inputs_is_no_row():
    def grouped(effect, X, group, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + effect[group], 0.2), obs=y)

    guide = sgp.AutoSparseGP(grouped, sgp.SVGP(5))
    effect, group = jnp.arange(200.0), jnp.arange(150) % 7
    given = effect, jnp.asarray(X_NEW[:150]), group
    guide.setup(*given, jnp.zeros(150))
    params = guide.known().starts
    assert sgp.Predictor(guide, params)(*given)["f"].mean.shape == (150,)
    y = sgp.predict(guide, params, *given, quantiles=(), batch_size=40)["y"]
    assert_allclose(y.mean, effect[group], atol=1e-6)  # q(f) starts at the prior


@pytest.mark.filterwarnings("ignore:The inputs of GP site")
@pytest.mark.slow
def test_inputs_that_a_model_standardises_are_not_cut_or_filled_up():
    def standardising(X, y=None):
        inputs = (X - X.mean(axis=0)) / X.std(axis=0)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), inputs))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    guide = sgp.AutoSparseGP(standardising, sgp.SVGP(6))
    X = jnp.asarray(np.exp(X_NEW[:140, :1]))
    guide.setup(X, jnp.zeros(140))
    params = {**guide.known().starts, "f_auto_qu_mu": jnp.arange(6.0)}
    want = guide.posterior(params, X)["f"].mean
    assert_allclose(sgp.Predictor(guide, params)(X)["f"].mean, want, atol=1e-9)
    found = sgp.predict(guide, params, X, quantiles=(), batch_size=50)
    assert_allclose(found["f"].mean, want, atol=1e-9)


@pytest.mark.slow
def test_responses_that_know_the_mean_of_their_rows_are_not_cut_or_filled_up():
    def of_shares(X, exposure, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f * exposure / exposure.mean(), 0.2), obs=y)

    guide = sgp.AutoSparseGP(of_shares, sgp.SVGP(6))
    X, exposure = X_NEW[:140], np.exp(X_NEW[:140, 0])
    guide.setup(X, exposure, np.zeros(140))
    params = {**guide.known().starts, "f_auto_qu_mu": jnp.arange(6.0)}
    f = np.asarray(guide.posterior(params, X, exposure)["f"].mean)
    # Of rows that are alike the mean is that of any, of the next ones it is not.
    for given in (np.ones(140), exposure):
        for batch_size in (50, 1000):
            options = {"quantiles": (), "batch_size": batch_size}
            found = sgp.predict(guide, params, X, given, **options)
            assert_allclose(found["y"].mean, f * given / given.mean(), atol=1e-9)


class Ornstein:
    """A kernel by protocol, in which JAX sees no numbers."""

    def __init__(self, lengthscale):
        self.lengthscale = lengthscale

    def __call__(self, X1, X2):
        return jnp.exp(-jnp.abs(X1 - X2.T) / self.lengthscale)

    def diag(self, X):
        return jnp.ones(len(X), X.dtype)


def an_argument(X, lengthscale):
    return sgp.kernels.RBF(1.0, lengthscale)


def of_ones_own(X, lengthscale):
    return Ornstein(lengthscale)


def of_rows(X, lengthscale):
    return sgp.kernels.RBF(1.0, lengthscale + 0.05 * X.shape[0])


def of_columns(X, lengthscale):
    return sgp.kernels.RBF(1.0, jnp.stack([lengthscale * 1e-6, 1e6]))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [an_argument, of_ones_own, of_rows, of_columns])
def test_another_kernel_has_not_what_the_first_one_kept(kernel):
    def model(X, lengthscale, y=None):
        gp = sgp.GaussianProcess(kernel(X, lengthscale), X)
        f = numpyro.sample("f", gp)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    X = np.linspace(0.0, 5.0, 30)[:, None]
    if kernel is of_columns:
        X = np.hstack([1e-6 * X, np.zeros_like(X)])
    guide = sgp.AutoSparseGP(model, sgp.SVGP(6))
    guide.setup(X, 1.0, X[:, 0])
    params = {**guide.known().starts, "f_auto_qu_mu": jnp.arange(6.0) - 2.0}
    predictor = sgp.Predictor(guide, params)
    for n, lengthscale in ((3, 1.0), (3, 2.0), (5, jnp.array(0.5)), (3, 1.0)):
        found = predictor(X[:n], lengthscale)["f"]
        q = guide.posterior(params, X[:n], lengthscale)["f"]
        assert_allclose(found.mean, q.mean, rtol=1e-8)
        assert_allclose(found.variance, q.variance, rtol=1e-6)
    scales = jnp.array([1.0, 2.0])
    found = jax.vmap(lambda scale: predictor(X[:3], scale)["f"].mean)(scales)
    wanted = [guide.posterior(params, X[:3], scale)["f"].mean for scale in scales]
    assert_allclose(found, wanted, rtol=1e-8)


def of_inputs(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def as_columns(X, y=None):
    of_inputs(X[:, :1], y)


def narrower_with_rows(X, y=None):
    kernel = sgp.kernels.RBF(1.0, 1.0 / X.shape[0])
    numpyro.sample("f", sgp.GaussianProcess(kernel, X))


def level_of_inputs(X, y=None):
    mean = sgp.means.Constant(X.mean())
    numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X, mean))


def two_layers(X, y=None):
    first = numpyro.sample("first", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    kernel = sgp.kernels.RBF(1.0, jnp.exp(first.mean()))
    numpyro.sample("f", sgp.GaussianProcess(kernel, X))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("model", "are_untouched", "are_apart"),
    [
        (of_inputs, True, True),
        (as_columns, False, True),
        (narrower_with_rows, True, False),
        (level_of_inputs, False, False),
        (two_layers, False, False),
    ],
)
def test_inputs_that_are_arguments_are_apart_whatever_their_numbers(
    model, are_untouched, are_apart
):
    arrays = [np.random.default_rng(0).normal(size=(300, 2))]

    def run(arrays, at_site):
        return messages.trace_of(model, tuple(arrays), {}, at_site=at_site)

    sites = ["first", "f"] if model is two_layers else ["f"]
    axes = row_axes(
        functools.partial(run, at_site=messages.above_prior_mean), arrays, sites
    )
    assert axes is not None
    assert inputs_are_untouched(run, axes, sites, arrays) == are_untouched
    assert rows_apart(run, axes, sites)(arrays) == are_apart


@pytest.mark.slow
def test_rows_that_a_model_numbers_are_not_numbered_anew_in_batches():
    def numbering(y):
        days = jnp.arange(y.shape[0])[:, None] / 50.0
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), days))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    guide, y = sgp.AutoSparseGP(numbering, sgp.SVGP(6)), jnp.zeros(140)
    guide.setup(y)
    params = {**guide.known().starts, "f_auto_qu_mu": jnp.arange(6.0)}
    want = guide.posterior(params, y)["f"].mean
    assert_allclose(sgp.Predictor(guide, params, 50)(y)["f"].mean, want, atol=1e-9)
    found = sgp.predict(guide, params, y, quantiles=(), batch_size=50)
    assert_allclose(found["f"].mean, want, atol=1e-9)


@pytest.mark.slow
def test_as_many_outputs_as_rows_stay_apart():
    def outputs(X, y=None):
        with numpyro.plate("latent", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("output", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = sgp.AutoSparseGP(outputs, sgp.SVGP(4))
    guide.setup(jnp.asarray(X_NEW[:10]), jnp.zeros((2, 10)))
    params = guide.known().starts
    for num_rows, batch_size in ((2, 100), (5, 2), (3, 3)):
        X = jnp.asarray(X_NEW[:num_rows])
        y = sgp.predict(guide, params, X, quantiles=(), batch_size=batch_size)["y"]
        assert y.mean.shape == (2, num_rows) and y.row_axis == 1

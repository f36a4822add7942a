"""The prior at a GP site, against SciPy's multivariate normal and dense formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI
from numpyro.infer.util import initialize_model, potential_energy

import numpyro_sgp as sgp
from numpyro_sgp import GaussianProcess, kernels, means
from numpyro_sgp.kernels import RBF

# Large and in every reference, so that nine digits show whether and where it is added.
JITTER = 1e-4
VARIANCES = np.array([1.3, 0.4, 2.0])
LENGTHSCALES = np.array([0.7, 1.1, 0.5])
seeds = st.integers(0, 2**32 - 1)


def inputs(N, D=2, seed=0):
    """Points on different cells of a grid, so that no two are close."""
    rng = np.random.default_rng(seed)
    cells = rng.permutation(16)[:N]
    X = np.stack([cells // 4, cells % 4], axis=1) + rng.uniform(-0.2, 0.2, (N, 2))
    return X[:, :D]


def rbf(variance, lengthscale, X1, X2):
    squared = np.sum((X1[:, None] - X2[None]) ** 2, axis=-1)
    return variance * np.exp(-0.5 * squared / lengthscale**2)


def dense(variance, lengthscale, X):
    """K(X, X) with the jitter."""
    return rbf(variance, lengthscale, X, X) + JITTER * variance * np.eye(len(X))


def density(value, mean, variance, lengthscale, X):
    K = dense(variance, lengthscale, X)
    return scipy.stats.multivariate_normal(mean, K).logpdf(value)


def process(variance=1.3, lengthscale=0.7, X=None, mean=None):
    X = inputs(5) if X is None else X
    return GaussianProcess(RBF(variance, lengthscale), X, mean, JITTER)


log_prob = jax.jit(lambda gp, value: gp.log_prob(value))


def condition(gp, value, X_new):
    normal = gp.condition(value, X_new)
    return normal.mean, normal.covariance_matrix


condition = jax.jit(condition)
sample = jax.jit(lambda gp, key: gp.sample(key))


@given(seeds)
def test_log_prob_is_the_multivariate_normal_density(seed):
    rng = np.random.default_rng(seed)
    variance, lengthscale, level = rng.uniform(0.3, 2.0, 3)
    X, value = inputs(5, seed=seed), rng.normal(size=5)
    got = log_prob(process(variance, lengthscale, X, level), value)
    expected = density(value, np.full(5, level), variance, lengthscale, X)
    assert_allclose(got, expected, rtol=1e-9)


def test_default_jitter_is_relative_to_the_variance():
    # Two equal rows: the density is dominated by the jitter.
    X, value = np.zeros((2, 1)), np.array([0.3, 0.3 + 1e-4])
    K = 100.0 * (np.ones((2, 2)) + 1e-8 * np.eye(2))
    got = log_prob(GaussianProcess(RBF(100.0, 1.0), X), value)
    expected = scipy.stats.multivariate_normal(np.zeros(2), K).logpdf(value)
    # The matrix has the condition number 2e8.
    assert_allclose(got, expected, rtol=1e-6)


def test_moments_are_those_of_the_kernel_and_the_mean():
    gp = process(mean=0.4)
    K = rbf(1.3, 0.7, inputs(5), inputs(5))  # without jitter
    assert_allclose(gp.covariance_matrix, K, rtol=1e-9)
    assert_allclose(gp.variance, np.diag(K), rtol=1e-9)
    assert_allclose(gp.mean, np.full(5, 0.4))
    assert (gp.batch_shape, gp.event_shape) == ((), (5,))


def test_samples_have_the_mean_and_the_covariance():
    X = inputs(4)
    gp = process(VARIANCES[:2], LENGTHSCALES[:2], X, np.array([0.5, -1.0]))
    draws = np.asarray(gp.sample(jax.random.key(0), (20_000,)))
    assert draws.shape == (20_000, 2, 4)
    flat = draws.reshape(20_000, 8)
    K = scipy.linalg.block_diag(  # the two functions are independent
        *(dense(*h, X) for h in zip(VARIANCES[:2], LENGTHSCALES[:2], strict=True))
    )
    # 8 means and 36 covariances, each within five standard errors: together these fail
    # for one key in 4e4.
    error = np.sqrt(np.diag(K) / 20_000)
    assert (np.abs(flat.mean(0) - np.repeat([0.5, -1.0], 4)) < 5 * error).all()
    error = np.sqrt((np.outer(np.diag(K), np.diag(K)) + K**2) / 20_000)
    assert (np.abs(np.cov(flat.T) - K) < 5 * error).all()


# ---- batches ------------------------------------------------------------------------


def test_a_plate_is_an_expand():
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        with numpyro.plate("latent", 3):
            f = numpyro.sample("f", process())
    fn = trace["f"]["fn"]
    assert isinstance(fn, GaussianProcess) and fn.batch_shape == (3,)
    assert f.shape == (3, 5)
    assert_allclose(log_prob(fn, f), log_prob(process().expand([3]), f), rtol=1e-12)


def test_each_function_has_its_own_hyperparameters():
    rng = np.random.default_rng(0)
    X, X_new, value = inputs(5), inputs(3, seed=1), rng.normal(size=(3, 5))
    gp = process(VARIANCES, LENGTHSCALES, X, np.array([0.0, 1.0, -1.0]))
    assert gp.batch_shape == (3,)
    densities = log_prob(gp, value)
    loc, covariance = condition(gp, value, X_new)
    for q in range(3):
        own = (VARIANCES[q], LENGTHSCALES[q])
        mean = [0.0, 1.0, -1.0][q]
        expected = density(value[q], np.full(5, mean), *own, X)
        assert_allclose(densities[q], expected, rtol=1e-9)
        assert_allclose(gp.covariance_matrix[q], rbf(*own, X, X), rtol=1e-9)
        m, V = textbook_condition(value[q], mean, *own, X, X_new)
        assert_allclose(loc[q], m, rtol=1e-9, atol=1e-12)
        assert_allclose(covariance[q], V, rtol=1e-9, atol=1e-12)


def test_each_function_may_have_its_own_inputs():
    X = np.stack([inputs(5, seed=s) for s in range(3)])
    gp = process(X=X)
    assert (gp.batch_shape, gp.event_shape) == ((3,), (5,))
    value = np.random.default_rng(0).normal(size=(3, 5))
    expected = [density(value[q], np.zeros(5), 1.3, 0.7, X[q]) for q in range(3)]
    assert_allclose(log_prob(gp, value), expected, rtol=1e-9)


# ---- means --------------------------------------------------------------------------

WEIGHTS = np.array([0.5, -1.5])
MEANS = {
    "none": (None, (), lambda X: np.zeros(5)),
    "constant": (0.7, (), lambda X: np.full(5, 0.7)),
    "constants": (VARIANCES, (3,), lambda X: VARIANCES[:, None] * np.ones(5)),
    "list": ([1.0, 2.0], (2,), lambda X: np.array([[1.0] * 5, [2.0] * 5])),
    "lambda": (lambda X: jnp.sin(X[:, 0]), (), lambda X: np.sin(X[:, 0])),
    "one value": (lambda X: jnp.full((1,), 2.0), (), lambda X: np.full(5, 2.0)),
    "batch lambda": (lambda X: X.T, (2,), lambda X: X.T),
    "linear": (means.Linear(WEIGHTS, 0.3), (), lambda X: X @ WEIGHTS + 0.3),
    "linear batch": (
        means.Linear(np.stack([WEIGHTS, -WEIGHTS]), np.array([0.3, 0.0])),
        (2,),
        lambda X: np.stack([X @ WEIGHTS + 0.3, -X @ WEIGHTS]),
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MEANS)
def test_means_shift_the_process(name):
    mean, batch, expected = MEANS[name]
    X = inputs(5)
    gp = process(mean=mean)
    assert gp.batch_shape == batch
    shift = expected(X)
    assert_allclose(gp.mean, shift, rtol=1e-12)
    zero = process().expand(batch)
    value = np.random.default_rng(0).normal(size=(*batch, 5))
    assert_allclose(log_prob(gp, value + shift), log_prob(zero, value), rtol=1e-9)
    key = jax.random.key(0)
    drawn = sample(zero, key) + shift
    assert_allclose(sample(gp, key), drawn, rtol=1e-9, atol=1e-12)


# ---- conditioning -------------------------------------------------------------------


def textbook_condition(value, mean, variance, lengthscale, X, X_new):
    inverse = np.linalg.inv(dense(variance, lengthscale, X))
    cross = rbf(variance, lengthscale, X_new, X)
    loc = mean + cross @ inverse @ (value - mean)
    covariance = dense(variance, lengthscale, X_new) - cross @ inverse @ cross.T
    return loc, covariance


@given(seeds)
def test_condition_is_the_textbook_formula(seed):
    rng = np.random.default_rng(seed)
    X, value = inputs(5, seed=seed), rng.normal(size=5)
    X_new = inputs(3, seed=seed + 1)
    loc, covariance = condition(process(X=X, mean=0.4), value, X_new)
    m, V = textbook_condition(value, 0.4, 1.3, 0.7, X, X_new)
    assert_allclose(loc, m, rtol=1e-9, atol=1e-12)
    # Where a new point is near an old one, the small variance is a difference.
    assert_allclose(covariance, V, rtol=1e-9, atol=1e-12)


def test_condition_of_an_expanded_process_is_that_of_each_function():
    value, X_new = np.random.default_rng(0).normal(size=(3, 5)), inputs(3, seed=1)
    loc, covariance = condition(process(mean=0.4).expand([3]), value, X_new)
    assert loc.shape == (3, 3)
    covariance = np.broadcast_to(covariance, (3, 3, 3))
    for q in range(3):
        m, V = textbook_condition(value[q], 0.4, 1.3, 0.7, inputs(5), X_new)
        assert_allclose(loc[q], m, rtol=1e-9, atol=1e-12)
        assert_allclose(covariance[q], V, rtol=1e-9, atol=1e-12)


def test_condition_takes_the_mean_function_to_the_new_inputs():
    X_new = inputs(3, seed=1)
    linear = means.Linear(WEIGHTS, 0.3)
    at_mean = process(mean=linear).condition(inputs(5) @ WEIGHTS + 0.3, X_new)
    assert_allclose(at_mean.mean, X_new @ WEIGHTS + 0.3, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_far_out_leave_what_is_known_of_others_as_it_is(dtype):
    """Their variance raised the jitter of all: an sd of .2 where it is next to zero."""
    X = np.linspace(-1.0, 1.0, 20, dtype=dtype)[:, None]
    gp = GaussianProcess(kernels.Linear(1.0), X)
    near, far = np.array([[0.5]], dtype), np.full((20, 1), 100.0, dtype)
    alone = gp.condition(2.0 * X[:, 0], near)
    together = gp.condition(2.0 * X[:, 0], np.concatenate([near, far]))
    sd, sd_far = np.sqrt(np.asarray(together.variance)[[0, -1]])
    assert_allclose(sd, np.sqrt(alone.variance[0]), rtol=0.01)
    # The root of the jitter, of one and of a hundred.
    limit = 2.0 * np.sqrt(1e-5 if dtype == np.float32 else 1e-8)
    assert sd < limit and sd_far < 100.0 * limit
    assert_allclose(together.mean[-1], 200.0, atol=100.0 * limit)


def test_at_other_inputs_it_is_the_same_process():
    gp = process(mean=means.Linear(WEIGHTS)).expand([2]).at(inputs(3, seed=1))
    assert (gp.batch_shape, gp.event_shape, gp.jitter) == ((2,), (3,), JITTER)
    assert_allclose(gp.mean[1], inputs(3, seed=1) @ WEIGHTS, rtol=1e-12)


# ---- inputs -------------------------------------------------------------------------


def test_whole_numbers_are_inputs():
    X = np.array([[0, 1], [2, 3], [4, 5]])
    gp = process(X=X)
    assert gp.X.dtype == jnp.float64
    value = np.array([0.1, -0.2, 0.3])
    expected = log_prob(process(X=X.astype(float)), value)
    assert_allclose(log_prob(gp, value), expected, rtol=1e-12)
    loc, _ = condition(gp, value, np.array([[1, 1]]))
    m, _ = textbook_condition(value, 0.0, 1.3, 0.7, X, np.array([[1, 1]]))
    assert_allclose(loc, m, rtol=1e-9)


def test_a_constant_column_changes_nothing():
    X, value = inputs(5), np.random.default_rng(0).normal(size=5)
    constant = np.column_stack([X, np.full(5, 1e3)])
    assert_allclose(
        log_prob(process(X=constant), value), log_prob(process(X=X), value), rtol=1e-9
    )


def test_equal_rows_have_equal_values_up_to_the_jitter():
    X = np.repeat(inputs(2), 3, axis=0)
    gp = GaussianProcess(RBF(1.0, 0.7), X)
    f = np.asarray(sample(gp, jax.random.key(0)))
    assert np.isfinite(log_prob(gp, f))
    # Differences have the standard deviation sqrt(2e-8) = 1.4e-4.
    assert 0 < np.ptp(f.reshape(2, 3), axis=1).max() < 1e-3
    loc, covariance = condition(gp, f, inputs(2))
    assert_allclose(loc, f.reshape(2, 3).mean(axis=1), atol=1e-6)
    assert np.isfinite(covariance).all()


def test_float32_stays_float32():
    X = inputs(5).astype(np.float32)
    gp = GaussianProcess(RBF(1.3, 0.7), X, 0.4)
    f = sample(gp, jax.random.key(0))
    got = log_prob(gp, f)
    moments = condition(gp, f, X[:2] + np.float32(0.1))
    for value in (f, got, *moments, gp.mean, gp.variance, gp.covariance_matrix):
        assert value.dtype == jnp.float32
    K = rbf(1.3, 0.7, inputs(5), inputs(5)) + 1.3e-5 * np.eye(5)
    expected = scipy.stats.multivariate_normal(np.full(5, 0.4), K).logpdf(f)
    # Rounding is 6e-8, the condition number some tens.
    assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("X", "match"),
    [
        (np.zeros(4), r"shape \(N, D\).*got the shape \(4,\).*Use X\[:, None\]"),
        (np.zeros(()), r"shape \(N, D\).*got the shape \(\)"),
    ],
)
def test_inputs_that_are_no_table_are_an_error(X, match):
    with pytest.raises(ValueError, match=match):
        GaussianProcess(RBF(), X)


@pytest.mark.parametrize(
    "mean", [lambda X: jnp.zeros(4), lambda X: jnp.zeros(()), lambda X: X]
)
def test_a_mean_of_another_length_is_an_error(mean):
    with pytest.raises(ValueError, match=r"one value for each row of X, .*\(\.\.\., 5\)"):
        GaussianProcess(RBF(), inputs(5), mean)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_inputs_of_half_precision_are_an_error(dtype):
    with pytest.raises(TypeError, match=r"X of .* float32 or float64 numbers, got \w*16"):
        GaussianProcess(RBF(), jnp.ones((3, 1), dtype))


def test_a_condition_on_values_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"5 rows must have the shape \(5,\), got \(3,\)"):
        process().condition(np.ones(3), inputs(2))


def test_a_condition_at_inputs_of_other_columns_is_an_error():
    with pytest.raises(ValueError, match=r"X_new must have the 2 columns of X, got .*3\)"):
        process().condition(np.ones(5), np.ones((4, 3)))


@pytest.mark.parametrize("shape", [(5,), (2, 5), (5, 1)])
def test_a_constant_mean_for_each_row_is_an_error(shape):
    with pytest.raises(ValueError, match=r"X has 5 rows.*means.Linear.*f \+ b \*"):
        process(X=inputs(5), mean=np.zeros(shape))


def test_constant_means_of_as_many_processes_as_rows_are_none():
    three = inputs(3)
    assert process(VARIANCES, LENGTHSCALES, three, np.zeros(3)).batch_shape == (3,)
    column = process(VARIANCES[:, None], LENGTHSCALES[:, None], three, np.zeros((3, 1)))
    assert column.batch_shape == (3, 1)
    assert process(X=three, mean=means.Constant(np.zeros(3))).at(three).batch_shape == (3,)
    assert process(X=inputs(1), mean=np.zeros(1)).batch_shape == (1,)


def test_batches_that_do_not_broadcast_are_an_error():
    with pytest.raises(ValueError, match=r"batch shape \(3,\).*mean function \(2,\)"):
        process(VARIANCES, LENGTHSCALES, mean=np.zeros(2))


@pytest.mark.parametrize("shape", [(2,), (3, 1), ()])
def test_an_expand_that_does_not_fit_is_an_error(shape):
    gp = process(VARIANCES, LENGTHSCALES)
    with pytest.raises(ValueError, match=r"batch shape \(3,\) cannot be expanded to"):
        gp.expand(shape)


def test_a_kernel_that_is_none_is_an_error():
    with pytest.raises(TypeError):
        GaussianProcess(object(), inputs(5))


def test_kernels_of_every_kind_make_a_process():
    X, value = inputs(5), np.random.default_rng(0).normal(size=5)
    kernel = kernels.Linear() + kernels.Constant(0.5) + kernels.White(0.3)
    K = X @ X.T + 0.5 + 0.3 * np.eye(5)
    K += JITTER * np.mean(np.diag(K)) * np.eye(5)
    got = GaussianProcess(kernel, X, jitter=JITTER).log_prob(value)
    expected = scipy.stats.multivariate_normal(np.zeros(5), K).logpdf(value)
    assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .* values of a GaussianProcess")
def test_a_site_inside_scan_has_the_density_and_slope_of_a_loop():
    # A state that decays, with innovations from a process of its own size each step.
    T, X = 3, jnp.linspace(0.0, 1.0, 4)[:, None]
    y = jnp.sin(jnp.arange(12.0)).reshape(T, 4)

    def step(state, y_t, name, variance):
        size = variance * (1.0 + jnp.mean(state**2))
        process = sgp.GaussianProcess(sgp.kernels.Matern32(size, 0.5), X)
        state = 0.8 * state + numpyro.sample(f"innovation{name}", process)
        numpyro.sample(f"y{name}", dist.Normal(state, 0.3).to_event(1), obs=y_t)
        return state, None

    def scanned():
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        scan(lambda c, y_t: step(c, y_t, "", variance), jnp.zeros(4), y)

    def unrolled():
        state, variance = jnp.zeros(4), numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        for t in range(T):
            state, _ = step(state, y[t], t, variance)

    def energy(params):
        return potential_energy(scanned, (), {}, params)

    def reference(params):
        steps = {f"innovation{t}": params["innovation"][t] for t in range(T)}
        params = {"variance": params["variance"], **steps}
        return potential_energy(unrolled, (), {}, params)

    params = {"variance": jnp.array(0.3), "innovation": 0.5 * jnp.cos(y)}
    found, slope = jax.jit(jax.value_and_grad(energy))(params)
    expected, expected_slope = jax.jit(jax.value_and_grad(reference))(params)
    assert_allclose(found, expected, rtol=1e-10)
    for name in params:
        assert_allclose(slope[name], expected_slope[name], rtol=1e-8, atol=1e-10)
    start = initialize_model(jax.random.key(0), scanned).param_info.z  # as NUTS starts
    assert start["innovation"].shape == (T, 4)

    guide = sgp.AutoSparseGP(scanned, sgp.SVGP(2))
    with pytest.raises(ValueError, match="'innovation' is inside control_flow.scan"):
        SVI(scanned, guide, optax.adam(0.1), sgp.TraceGP_ELBO()).init(jax.random.key(0))

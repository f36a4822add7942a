"""Likelihoods that are only a function to call: values, batches, errors, draws."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI, Predictive

import numpyro_sgp as sgp

N = 4
rng = np.random.default_rng(0)
Y = jnp.asarray(rng.normal(size=N))
F = jnp.asarray(rng.normal(size=(2, 3, N)))


class Counted:
    """A function that notes the shapes it is called with."""

    def __init__(self, function):
        self.function = function
        self.__name__ = function.__name__
        self.shapes = []

    def __call__(self, y, f, *parameters):
        assert all(isinstance(a, np.ndarray) for a in (y, f, *parameters))
        self.shapes.append((y.shape, f.shape, *(p.shape for p in parameters)))
        return self.function(y, f, *parameters)


def cubic(y, f):
    return y * f - f**3


def log_prob(function, y, f, *parameters, **options):
    return sgp.BlackBox(function, f, *parameters, **options).log_prob(y)


def test_values_are_those_of_the_function_in_and_out_of_jit():
    function = Counted(cubic)
    expected = cubic(np.asarray(Y), np.asarray(F[0, 0]))
    assert_array_equal(log_prob(function, Y, F[0, 0]), expected)
    assert_array_equal(jax.jit(lambda f: log_prob(function, Y, f))(F[0, 0]), expected)
    assert function.shapes == [((N,), (N,))] * 2


def test_all_batches_of_vmap_are_one_call():
    function = Counted(cubic)
    expected = cubic(np.asarray(Y), np.asarray(F))
    once = jax.jit(jax.vmap(lambda f: log_prob(function, Y, f)))
    assert_array_equal(once(F[0]), expected[0])
    assert function.shapes == [((3 * N,), (3 * N,))]
    twice = jax.vmap(jax.vmap(lambda f: log_prob(function, Y, f)))
    assert_array_equal(jax.jit(twice)(F), expected)
    assert_array_equal(twice(F), expected)
    assert function.shapes[1:] == [((6 * N,), (6 * N,))] * 2


def test_data_may_be_batched_too():
    function = Counted(cubic)
    y = jnp.asarray(rng.normal(size=(3, N)))
    outer = jax.vmap(lambda f: jax.vmap(lambda y, f: log_prob(function, y, f))(y, f))
    assert_array_equal(jax.jit(outer)(F), cubic(np.asarray(y), np.asarray(F)))
    over_y = jax.jit(jax.vmap(lambda y: log_prob(function, y, F[0, 0])))
    assert_array_equal(over_y(y), cubic(np.asarray(y), np.asarray(F[0, 0])))
    assert function.shapes == [((6 * N,), (6 * N,)), ((3 * N,), (3 * N,))]


def test_rows_of_data_and_several_latent_functions_keep_their_axes():
    def likelihood(y, f, weights, power):
        return (y @ weights) * f[0] - f[1] ** power

    y = jnp.asarray(rng.normal(size=(N, 2)))
    weights = jnp.array([1.0, -2.0])
    f = jnp.asarray(rng.normal(size=(3, 2, N)))  # two latent functions

    def evaluate(function):
        return jax.vmap(lambda f: log_prob(function, y, f, weights, 2, event_shape=(2,)))

    function = Counted(likelihood)
    expected = [likelihood(*map(np.asarray, (y, part, weights, 2))) for part in f]
    assert_allclose(jax.jit(evaluate(function))(f), expected, rtol=1e-14)
    assert function.shapes == [((3 * N, 2), (2, 3 * N), (2,), ())]
    fn = sgp.BlackBox(likelihood, f[0], weights, 2, event_shape=(2,))
    assert fn.batch_shape == (N,) and fn.event_shape == (2,)


def test_batched_parameters_are_one_call_each():
    function = Counted(lambda y, f, a: a * y * f)
    a = jnp.array([1.0, 2.0, 3.0])
    over_a = jax.jit(jax.vmap(lambda a, f: log_prob(function, Y, f, a)))
    assert_allclose(over_a(a, F[0]), a[:, None] * Y * F[0], rtol=1e-14)
    assert function.shapes == [((N,), (N,), ())] * 3
    nested = jax.vmap(lambda f: jax.vmap(lambda a: log_prob(function, Y, f, a))(a))
    expected = a[:, None] * Y * F[:, 0, None]
    assert_allclose(jax.jit(nested)(F[:, 0]), expected, rtol=1e-14)


def test_float32_stays_float32():
    got = log_prob(cubic, Y.astype("float32"), F[0, 0].astype("float32"))
    assert got.dtype == jnp.float32


def model(function, X, y=None, **options):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", sgp.BlackBox(function, f, **options), obs=y)


# ---- draws ------------------------------------------------------------------------------


def test_draws_are_those_of_the_function_sample():
    def sample(rng, f, scale):
        assert f.shape == (N,)
        return f + scale * rng.normal(size=f.shape)

    X = jnp.arange(4.0)[:, None]
    fn = sgp.BlackBox(lambda y, f, scale: f, F[0, 0], 1e-3, sample=sample)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        draws = jax.jit(lambda key: fn.sample(key, (2, 3)))(key)
        assert draws.shape == (2, 3, N)
        assert_allclose(draws, jnp.broadcast_to(F[0, 0], draws.shape), atol=6e-3)
        assert len(np.unique(draws)) == draws.size
    other = fn.sample(jax.random.key(1), (2, 3))
    assert len(np.unique(np.concatenate([draws, other]))) == 2 * draws.size

    def noise_free(X):
        model(cubic, X, sample=lambda rng, f: f)

    found = Predictive(noise_free, num_samples=2)(jax.random.key(0), X)
    assert_array_equal(found["y"], found["f"])


def test_draws_of_several_outputs_have_the_shape_of_the_data():
    def sample(rng, f):
        return np.stack([f, -f], axis=-1)

    fn = sgp.BlackBox(cubic, F[0, 0], event_shape=(2,), sample=sample)
    assert_array_equal(fn.sample(jax.random.key(0)), jnp.stack([F[0, 0], -F[0, 0]], -1))


def test_draws_without_a_function_are_nan():
    fn = sgp.BlackBox(cubic, F[0, 0], event_shape=(2,))
    found = fn.sample(jax.random.key(0), (3,))
    assert found.shape == (3, *F[0, 0].shape, 2) and np.isnan(found).all()


class Undrawable(dist.Normal):
    """A response of the user's with a log density and no draws."""

    def sample(self, key, sample_shape=()):
        raise NotImplementedError


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["black box", "no sample"])
def test_f_is_predicted_where_the_response_cannot_be_drawn(kind):
    def log_prob(y, f):
        return -((y - f) ** 2)

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.deterministic("square", f**2)
        with numpyro.plate("data", X.shape[0]):
            fn = sgp.BlackBox(log_prob, f) if kind == "black box" else Undrawable(f, 1.0)
            numpyro.sample("y", fn, obs=y)

    X = jnp.linspace(-1.0, 1.0, 6)[:, None]
    X_new = X[:4] + 0.1
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    elbo = sgp.TraceGP_ELBO(sgp.ScoreFunction(10))
    svi = SVI(model, guide, optax.adam(0.1), elbo)
    result = svi.run(jax.random.key(0), 3, X, X[:, 0], progress_bar=False)
    q = guide.posterior(result.params, X_new)["f"]
    # The posterior is the one that a response which can be drawn from gives.
    expected = guide.posterior(result.params, X_new, jnp.zeros(4))["f"]
    assert_array_equal(q.mean, expected.mean)
    assert guide.median(result.params, X_new)["f"].shape == (4,)
    draws = guide.sample_posterior(
        jax.random.key(1), result.params, X_new, sample_shape=(5,)
    )
    assert draws["f"].shape == (5, 4) and set(draws) == {"f", "square"}
    assert_array_equal(draws["square"], draws["f"] ** 2)
    if kind == "black box":
        predictive = Predictive(
            model,
            guide=guide,
            params=result.params,
            num_samples=5,
            return_sites=["f", "y"],
        )
        found = predictive(jax.random.key(1), X_new)
        assert np.isfinite(found["f"]).all() and np.isnan(found["y"]).all()
        samples = {"f": jnp.zeros((2, 6))}
        found = sgp.GPPredictive(model, samples, train_args=(X, X[:, 0]))(
            jax.random.key(1), X_new
        )
        assert np.isfinite(found["f"]).all() and np.isnan(found["y"]).all()


# ---- errors -----------------------------------------------------------------------------

BAD = F.at[1, 0, 2].set(100.0)  # one batch, row 2


def raises(y, f):
    if (f > 50).any():
        raise ZeroDivisionError("no such event")
    return f


def returns_nan(y, f):
    return np.where(f > 50, np.nan, f)


def returns_inf(y, f):
    return np.where(f > 50, np.inf, f)


WHERE = re.escape(f"y = {Y[2]}, f = 100.0)")


@pytest.mark.parametrize(
    "function, what",
    [
        (raises, f"'raises' raised ZeroDivisionError: no such event .row 2 .*: {WHERE}"),
        (returns_nan, rf"'returns_nan' returned nan in 1 of 4 .*\[2\]; row 2 has {WHERE}"),
        (
            returns_inf,
            rf"'returns_inf' returned inf in 1 of 4 .*{WHERE}. Return -inf where",
        ),
    ],
)
def test_errors_name_function_row_y_and_f(function, what):
    twice = jax.vmap(jax.vmap(lambda f: log_prob(function, Y, f)))
    assert np.isfinite(twice(F)).all()
    for call in (twice, jax.jit(twice)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=what):
            jax.block_until_ready(call(BAD))
    with pytest.raises(jax.errors.JaxRuntimeError, match=what):
        jax.block_until_ready(log_prob(function, Y, BAD[1, 0]))


def needs_all(y, f):
    return np.arange(N) + f


def test_errors_say_how_many_evaluations_are_in_a_call():
    what = r"y of shape \(24,\) and f of shape \(24,\) \(6 evaluations of 4 rows\)"
    for function in (needs_all, lambda y, f: f[:N]):
        twice = jax.vmap(jax.vmap(lambda f, fn=function: log_prob(fn, Y, f)))
        with pytest.raises(jax.errors.JaxRuntimeError, match=what):
            jax.block_until_ready(twice(F))


def raises_not_finite(y, f):
    if not np.isfinite(f).all():
        raise ZeroDivisionError
    return f


@pytest.mark.parametrize("function", [cubic, raises_not_finite])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_latent_values_that_are_not_finite_are_not_the_functions_fault(function, value):
    f = F.at[1, 0, 2].set(value).at[0, 1, 2:].set(value)
    twice = jax.jit(jax.vmap(jax.vmap(lambda f: log_prob(function, Y, f))))
    what = r"f that is not finite in 2 of 4 .*\[2, 3\]\): training has diverged"
    with pytest.raises(jax.errors.JaxRuntimeError, match=what):
        jax.block_until_ready(twice(f))


@pytest.mark.parametrize(
    "values, what",
    [
        (lambda f: f > 0, "booleans; return the log of the density"),
        (lambda f: f + 0j, "complex numbers; return"),
        (lambda f: f.astype(str), "no numbers .dtype"),
        (lambda f: np.array([None] * N), "no numbers .dtype object"),
    ],
)
def test_results_that_are_not_real_numbers_are_an_error(values, what):
    def function(y, f):
        return values(f)

    what = f"likelihood 'function' returned {what}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=what):
        jax.block_until_ready(log_prob(function, Y, F[0, 0]))


def test_whole_numbers_are_real_numbers():
    values = log_prob(lambda y, f: np.arange(N), Y, F[0, 0])
    assert_array_equal(values, np.arange(N))


def test_a_density_of_zero_is_not_an_error():
    values = log_prob(lambda y, f: np.full(f.shape, -np.inf), Y, F[0, 0])
    assert_array_equal(values, -np.inf)


@pytest.mark.parametrize(
    "function", [lambda y, f: f.sum(), lambda y, f: None, lambda y, f: f[:, None]]
)
def test_a_result_of_another_shape_is_an_error(function):
    with pytest.raises(Exception, match=r"returned an array of shape .*shape \(4,\), and"):
        jax.block_until_ready(log_prob(function, Y, F[0, 0]))


def test_the_gradient_is_refused_by_a_message_with_the_ways_out():
    for of in (
        lambda f: log_prob(cubic, Y, f),
        lambda f: jax.jit(lambda f: log_prob(cubic, Y, f))(f),
        lambda f: jax.vmap(lambda f: log_prob(cubic, Y, f))(f[None]),
        lambda f: log_prob(lambda y, f, a: a * f, Y, F[0, 0], f[0]),
        lambda f: log_prob(cubic, f, F[0, 0]),
    ):
        with pytest.raises(TypeError, match=r"(?s)has no gradient.*ScoreFunction.*Ellipt"):
            jax.eval_shape(jax.grad(lambda f, of=of: of(f).sum()), F[0, 0])


def test_stopped_gradients_are_zero():
    def stopped(f):
        a = jax.lax.stop_gradient(f[0])
        part = log_prob(lambda y, f, a: a * f, Y, jax.lax.stop_gradient(f), a)
        return part.sum() + f.sum()

    assert_array_equal(jax.grad(stopped)(F[0, 0]), 1.0)


@pytest.mark.parametrize("shape", [(3,), (N, 1), ()])
def test_data_of_another_shape_are_an_error(shape):
    with pytest.raises(ValueError, match=r"of 4 rows needs y of shape \(4,\), got \("):
        log_prob(cubic, jnp.zeros(shape), F[0, 0])


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="log_prob must be a function .*, got ArrayImpl"):
        sgp.BlackBox(F, cubic)
    with pytest.raises(ValueError, match="f must have the rows of data along its last"):
        sgp.BlackBox(cubic, 0.0)


def test_several_data_sets_are_one_call_for_samples_and_expansions():
    function = Counted(cubic)
    y = jnp.asarray(rng.normal(size=(2, 3, N)))
    expected = cubic(np.asarray(y), np.asarray(F[0, 0]))
    likelihood = sgp.BlackBox(function, F[0, 0])
    assert_array_equal(likelihood.log_prob(y), expected)
    assert_array_equal(likelihood.expand((3, N)).log_prob(y), expected)
    assert function.shapes == [((6 * N,), (6 * N,))] * 2
    assert likelihood.expand((3, N)).log_prob(y[0, 0]).shape == (3, N)
    assert not likelihood.has_rsample
    with pytest.raises(ValueError, match="rows of f"):
        likelihood.expand((3, N + 1))

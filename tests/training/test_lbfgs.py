"""L-BFGS: exact optima, blocks, fixed random numbers, NaN next to the optimum, stops."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_sgp as sgp
from tests import helpers

KEY = random.key(0)
Z = jnp.linspace(-1.8, 1.8, 4)[:, None]


def fit(svi, *args, **options):
    return sgp.fit_lbfgs(svi, KEY, *args, **{"progress_bar": False, **options})


def no_latents(*args):
    """The guide of a model with parameters only."""


def plain_svi(loss, start, dtype=None):
    """Minimises ``loss`` of the parameter ``x``."""

    def model():
        x = numpyro.param("x", jnp.asarray(start, dtype))
        numpyro.factor("loss", -loss(x))

    return SVI(model, no_latents, optax.adam(0.01), Trace_ELBO())


def learnt_model(X, y=None):
    """GP regression with hyperparameters to learn."""
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=constraints.positive)
    noise = numpyro.param("noise", 0.5, constraint=constraints.positive)
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def sparse_svi(model, approximation=None, loss=None, **options):
    approximation = approximation or sgp.SVGP(inducing=Z, train_inducing=False)
    guide = sgp.AutoSparseGP(model, approximation, **options)
    loss = loss or sgp.TraceGP_ELBO(sgp.GaussHermite(2))
    return SVI(model, guide, optax.adam(0.01), loss)


# ---- optima -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regression():
    X, y = helpers.regression_data()
    svi = sparse_svi(helpers.gaussian_model)
    return X, y, svi, fit(svi, X, y)


def test_q_of_a_gaussian_likelihood_is_the_textbook_one(regression):
    X, y, _, result = regression
    mean, covariance = helpers.optimal_whitened_q(X, y, Z, 0.3)
    sqrt = result.params["f_auto_qu_sqrt"]
    assert_allclose(result.params["f_auto_qu_mu"], mean, atol=1e-4)
    assert_allclose(sqrt @ sqrt.T, covariance, atol=1e-4)


def test_loss_at_the_end_is_the_collapsed_bound(regression):
    X, y, _, result = regression
    Kuf, Kuu = helpers.rbf(Z, X), helpers.rbf(Z, Z)
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    covariance = Q + 0.09 * np.eye(len(X))
    log_det = np.linalg.slogdet(2 * np.pi * covariance)[1]
    evidence = -0.5 * (log_det + y @ np.linalg.solve(covariance, y))
    bound = evidence - (len(X) - np.trace(Q)) / 0.18
    assert_allclose(-result.losses[-1], bound, rtol=1e-6)
    assert np.all(np.diff(result.losses) <= 0) and len(result.losses) > 5


def test_state_goes_on_where_the_fit_ended(regression):
    X, y, svi, result = regression
    evaluated = jax.jit(svi.evaluate)(result.state, X, y)
    assert_allclose(evaluated, result.losses[-1], rtol=1e-10)
    state, loss = jax.jit(svi.update)(result.state, X, y)
    assert_allclose(loss, result.losses[-1], rtol=1e-10)
    old, new = result.params["f_auto_qu_mu"], svi.get_params(state)["f_auto_qu_mu"]
    assert 0 < np.abs(new - old).max() <= 0.0101  # a first step of Adam
    run = svi.run(KEY, 3, X, y, init_state=result.state, progress_bar=False)
    assert_allclose(run.losses[0], result.losses[-1], rtol=1e-10)
    again = fit(svi, X, y, init_state=run.state)
    assert again.losses[0] > again.losses[-1]
    assert_allclose(again.losses[-1], result.losses[-1], rtol=1e-8)


def test_the_key_decides_the_random_numbers_with_a_state_too():
    svi = plain_svi(lambda x: x**2 + x * random.normal(numpyro.prng_key()), 1.0)
    first = fit(svi)
    assert_array_equal(fit(svi).losses, first.losses)
    same = fit(svi, init_state=first.state)
    assert_allclose(same.losses[0], first.losses[-1], rtol=1e-12)
    other = sgp.fit_lbfgs(svi, random.key(1), init_state=first.state, progress_bar=False)
    assert abs(other.params["x"] - first.params["x"]) > 1e-3


def test_saved_state_serves_an_svi_that_never_ran(regression):
    X, y, _, result = regression
    again = fit(sparse_svi(helpers.gaussian_model), X, y, init_state=result.state)
    assert_allclose(again.losses[0], result.losses[-1], rtol=1e-10)


@pytest.mark.slow
def test_blocks_in_turn_end_where_all_together_do():
    X, y = helpers.regression_data()
    traced = []

    def counted(X, y=None):
        traced.append(None)
        learnt_model(X, y)

    joint = fit(sparse_svi(learnt_model), X, y)
    svi = sparse_svi(counted)
    blocks = ["variational", ["kernel", "noise"]]
    limits = {"variational": 20, "kernel+noise": 5}
    first = fit(svi, X, y, blocks=blocks, max_iterations=limits, sweeps=1)
    once = len(traced)
    assert len(first.losses) <= 26
    result = fit(svi, X, y, blocks=blocks, max_iterations=limits, sweep_tol=1e-9)
    assert len(traced) - once <= once  # no tracing in later sweeps or blocks
    assert len(result.losses) > 60 and np.all(np.diff(result.losses) <= 0)
    assert_allclose(result.losses[-1], joint.losses[-1], rtol=1e-5)
    for name in ("lengthscale", "noise"):
        assert_allclose(result.params[name], joint.params[name], rtol=1e-2)


def test_parameters_in_no_block_stay():
    X, y = helpers.regression_data()
    svi = sparse_svi(learnt_model, sgp.SVGP(inducing=Z))
    # With q(u) at the prior, the bound would not depend on anything else.
    state = svi.init(KEY, X, y, init_params={"f_auto_qu_mu": jnp.ones(4)})
    start = svi.get_params(state)
    options = {"blocks": ["lengthscale", "inducing"], "max_iterations": 2, "sweeps": 1}
    params = fit(svi, X, y, init_state=state, **options).params
    moved = {name for name in params if not np.array_equal(params[name], start[name])}
    assert moved == {"lengthscale", "f_auto_Z"}


def test_initial_parameters_are_used():
    svi = plain_svi(lambda x: (x - 3.0) ** 2, 0.0)
    result = fit(svi, init_params={"x": jnp.array(7.0)})
    assert_allclose(result.losses[0], 16.0)
    assert_allclose(result.params["x"], 3.0, atol=1e-5)


# ---- random numbers, dtypes, state ------------------------------------------------------


@pytest.mark.slow
def test_random_numbers_are_fixed():
    X, y = helpers.count_data()
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(3))
    svi = sparse_svi(helpers.poisson_model, loss=loss, base_guide=AutoNormal)
    first = fit(svi, X, y, max_iterations=15)
    assert len(first.losses) == 16 and np.all(np.diff(first.losses) < 0)
    evaluate = jax.jit(svi.evaluate)
    assert_allclose(evaluate(first.state, X, y), first.losses[-1], rtol=1e-10)
    other = evaluate(first.state._replace(rng_key=random.key(1)), X, y)
    assert abs(other - first.losses[-1]) > 1e-3


def test_float32_ends_without_complaint_near_the_optimum():
    rng = np.random.default_rng(0)
    A = jnp.asarray(rng.normal(size=(20, 5)), jnp.float32)
    b = jnp.asarray(rng.normal(size=20), jnp.float32)
    svi = plain_svi(lambda x: 100 + jnp.sum((A @ x - b) ** 2), np.ones(5), jnp.float32)
    result = fit(svi)
    assert result.params["x"].dtype == jnp.float32
    best = np.linalg.lstsq(np.float64(A), np.float64(b))[0]
    assert_allclose(result.params["x"], best, atol=2e-3)


def test_mutable_state_is_fixed_and_that_of_the_end_is_returned():
    def model():
        x = numpyro.param("x", 0.0)
        state = numpyro.primitives.mutable("state", {"doubled": jnp.zeros(())})
        numpyro.factor("loss", -((x - 3.0) ** 2) - state["doubled"])
        state["doubled"] = 2.0 * x

    result = fit(SVI(model, no_latents, optax.adam(0.01), Trace_ELBO()))
    assert_allclose(result.losses[-1], 0.0, atol=1e-8)
    assert_allclose(result.state.mutable_state["state"]["doubled"], 6.0, atol=1e-4)


def test_structured_parameters_are_one_name():
    def model():
        net = numpyro.param("net", {"w": jnp.zeros((2, 2)), "b": jnp.ones(2)})
        x = numpyro.param("x", 1.0)
        total = jnp.sum((net["w"] - 1.0) ** 2) + jnp.sum((net["b"] - 2.0) ** 2)
        numpyro.factor("loss", -total - x**2)

    svi = SVI(model, no_latents, optax.adam(0.01), Trace_ELBO())
    params = fit(svi, blocks=["net"]).params
    assert params["x"] == 1.0
    assert_allclose(params["net"]["w"], np.ones((2, 2)), atol=1e-5)
    assert_allclose(params["net"]["b"], np.full(2, 2.0), atol=1e-5)


# ---- where the loss is not finite -------------------------------------------------------


def barrier(x):
    """NaN outside of the unit disc."""
    return -jnp.log(1 - x @ x) + 5 * (x[0] - 2) ** 2 + x[1]


def fenced_rosenbrock(x):
    """Optimum (1, 1), NaN not far from the curved way there."""
    value = 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
    outside = (x[0] > 1.3) | (x[1] < -0.2) | (x[1] > 1.5)
    return jnp.where(outside, jnp.nan, value)


def infinite_beyond(x):
    return jnp.where(x > 1.05, -jnp.inf, (x - 1.0) ** 2)


@pytest.mark.parametrize(
    "loss, start, optimum",
    [
        (barrier, [-0.5, 0.5], [0.90906, -0.08333]),
        (fenced_rosenbrock, [-1.2, 1.0], [1.0, 1.0]),
        (infinite_beyond, -40.0, 1.0),
    ],
)
def test_steps_go_back_from_where_the_loss_is_not_finite(loss, start, optimum):
    result = fit(plain_svi(loss, start))
    assert_allclose(result.params["x"], optimum, atol=1e-3)
    assert np.isfinite(result.losses).all() and np.all(np.diff(result.losses) <= 0)
    gradient = jax.grad(loss)(result.params["x"])
    assert_allclose(gradient, np.zeros_like(gradient), atol=1e-3)


def test_an_edge_at_which_it_must_stop_is_told():
    svi = plain_svi(lambda x: jnp.where(x < 0.3, jnp.nan, x), 2.0)
    with pytest.warns(UserWarning, match="next to parameters at which the loss or its"):
        result = fit(svi)
    assert_allclose(result.params["x"], 0.3, atol=1e-6)


def test_a_start_without_a_finite_loss_is_refused():
    svi = plain_svi(lambda x: jnp.log(x), -1.0)
    with pytest.raises(ValueError, match="loss is nan at the starting parameters"):
        fit(svi)
    svi = plain_svi(lambda x: jnp.sqrt(x), 0.0)
    with pytest.raises(ValueError, match=r"not finite for \['x'\]"):
        fit(svi)


# ---- stops ------------------------------------------------------------------------------


def fragile_svi(calls):
    """A quadratic in four numbers whose callback fails at call number ``calls``."""
    counter = []
    scales = jnp.array([1.0, 10.0, 100.0, 1000.0])

    def simulator(x):
        counter.append(None)
        if len(counter) == calls:
            raise OSError("simulator licence expired")
        return np.asarray(x)

    def loss(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        seen = jax.pure_callback(simulator, shape, jax.lax.stop_gradient(x))
        return jnp.sum(scales * (x - 1.0) ** 2) + 0.0 * jnp.sum(seen)

    return plain_svi(loss, np.zeros(4))


def test_an_error_keeps_the_best_so_far():
    # SVI.init runs the model once; the first evaluation is the second call.
    svi = fragile_svi(calls=6)
    with pytest.raises(sgp.FitInterrupted, match="simulator licence expired") as caught:
        fit(svi)
    kept = caught.value.result
    assert "licence" in str(caught.value.__cause__)
    assert kept.losses[-1] < kept.losses[0] == 1111.0
    result = fit(svi, init_state=kept.state)
    assert_allclose(result.losses[0], kept.losses[-1], rtol=1e-12)
    assert_allclose(result.params["x"], np.ones(4), atol=1e-5)
    copy = pickle.loads(pickle.dumps(sgp.FitInterrupted("stopped", kept.params)))
    assert str(copy) == "stopped" and set(copy.result) == {"x"}


def test_an_error_in_the_first_evaluation_is_raised_as_it_is():
    with pytest.raises(Exception, match="simulator licence expired") as caught:
        fit(fragile_svi(calls=2))
    assert not isinstance(caught.value, sgp.FitInterrupted)


def test_the_user_may_interrupt(monkeypatch):
    shown = []

    def show(bar, where):
        def stop(loss):
            shown.append(loss)
            if len(shown) == 2:
                raise KeyboardInterrupt

        return stop

    monkeypatch.setattr("numpyro_sgp.training.lbfgs._show", show)
    with pytest.raises(sgp.FitInterrupted, match="after 2 iterations") as caught:
        fit(fragile_svi(calls=0))
    assert "by the user (Ctrl-C).\nThe best parameters" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert_allclose(caught.value.result.losses[1:], shown)


def test_progress_bar_shows_block_and_loss(capsys):
    svi = plain_svi(lambda x: (x - 3.0) ** 2, 0.0)
    fit(svi, progress_bar=True, blocks=["x"])
    err = capsys.readouterr().err
    assert "x, loss: 0.0000" in err and "sweep" in err


# ---- options ----------------------------------------------------------------------------


@pytest.mark.slow
def test_subsampling_is_refused():
    X, y = helpers.regression_data()
    svi = sparse_svi(helpers.gaussian_model)
    with pytest.raises(ValueError, match=r"minibatch of plate 'data' \(5 of 15 rows\)"):
        fit(svi, X, y, batch_size=5)


def test_unknown_blocks_are_told_what_there_is():
    X, y = helpers.regression_data()
    svi = sparse_svi(helpers.gaussian_model)
    with pytest.raises(ValueError, match=r"\['kernels'\].*'likelihood'.*f_auto_qu_mu"):
        fit(svi, X, y, blocks=["variational", ["kernels"]])
    with pytest.raises(ValueError, match=r"No parameter is in any of the blocks \['other'"):
        fit(svi, X, y, blocks=["other"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"blocks": ["kernel"]}, r"no groups \(groups need an AutoSparseGP\).*\['x'\]"),
        ({"blocks": ["x"], "max_iterations": {"y": 3}}, r"given for \['y'\].*\['x'\]"),
        ({"max_iterations": {"x": 3}}, "blocks is None"),
        (
            {"max_iterations": 0},
            r"max_iterations \(of .all.\) must be a whole number, 1 or more, got 0",
        ),
        ({"blocks": ["x"], "sweeps": 0}, "sweeps must be a whole number, 1 or more"),
        ({"init_params": {}, "init_state": ()}, "not both"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit(plain_svi(lambda x: x**2, 1.0), **options)


def test_a_model_without_parameters_is_refused():
    def model():
        numpyro.factor("loss", 1.0)

    with pytest.raises(ValueError, match="no parameters to train"):
        fit(SVI(model, no_latents, optax.adam(0.01), Trace_ELBO()))

"""Starts and steps of the default fit, in units of the data and of latents."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.fitting.problem import Problem, constrained
from numpyro_sgp.fitting.starts import HELD, SCALES, lengthscale_starts
from numpyro_sgp.training.descent import Descent
from tests.helpers import slow

RNG = np.random.default_rng(0)
QUIET = {"progress_bar": False}


def regression(f, y):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("hours", [slow(1.0), 24.0 * 3600.0])
def test_lengthscales_of_periodic_kernels_are_of_the_period(hours):
    """Started by the spread of the inputs, they made a constant: 100 nats and more."""
    day = np.sort(RNG.uniform(0.0, 70.0, 60))
    y = 1.5 * np.sin(2 * np.pi * day / 7) + 0.1 * RNG.normal(size=60)

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 4.0))
        kernel = sgp.kernels.Periodic(2.0, lengthscale, period=7.0 * hours)
        regression(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), y)

    fitted = sgp.fit(model, sgp.SVGP(10), (day[:, None] * hours, y), **QUIET)
    assert fitted.median()["noise"] < 0.15 and fitted.median()["lengthscale"] < 5.0


@pytest.mark.slow
def test_a_constant_column_is_none():
    """Of one of .1 the standard deviation is 1e-17 or so by rounding, and not zero."""
    x = RNG.uniform(0.0, 1000.0, (60, 2))
    y = np.sin(x[:, 0] / 150.0) + 0.1 * RNG.normal(size=60)

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 3.0))
        kernel = sgp.kernels.RBF(1.0, lengthscale)
        regression(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), y)

    bounds = [
        sgp.fit(model, sgp.SVGP(8), (np.c_[x, np.full(60, c)], y), **QUIET).bound
        for c in (0.0, 0.1)
    ]
    np.testing.assert_allclose(bounds[1], bounds[0], atol=0.01)


@pytest.mark.slow
def test_many_points_on_a_line_stay_in_order():
    """They walked past each other: trained ones ended 40 nats below those at the start."""
    rng = np.random.default_rng(0)
    t = np.arange(240) / 24.0
    y = np.sin(4.0 * np.pi * t) + 0.2 * rng.normal(size=240)

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
        kernel = sgp.kernels.Matern52(variance, lengthscale)
        regression(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), y)

    fitted = sgp.fit(model, sgp.SVGP(60), (t[:, None], y), **QUIET)
    # The best of dense linear algebra with 60 points that are evenly spread, and stay.
    assert fitted.bound > -156.7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prior", "param"])
def test_a_level_of_ten_thousand_is_found(kind):
    """Steps of one hardly left the start, in float32 with a verdict of "converged"."""
    X = RNG.uniform(0.0, 6.0, (80, 1))
    y = 9_700.0 + 1_000.0 * np.sin(X[:, 0]) + 300.0 * RNG.normal(size=80)

    def model(X, y=None, raw=True):
        if not raw:
            level = 8_000.0 + 1e4 * numpyro.sample("z", dist.Normal(0.0, 1.0))
        elif kind == "prior":
            level = numpyro.sample("level", dist.Normal(8_000.0, 1e4))
        else:
            level = numpyro.param("level", 8_000.0)
        kernel = sgp.kernels.RBF(1e6, 1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=level))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 300.0), obs=y)

    with jax.enable_x64(False):
        data = X.astype(np.float32), y.astype(np.float32)
        raw = sgp.fit(model, sgp.SVGP(6), data, **QUIET)
        other = sgp.fit(model, sgp.SVGP(6), (*data, False), **QUIET)
    level = raw.median()["level"] if kind == "prior" else raw.params["level"]
    best = 8_000.0 + 1e4 * other.median()["z"]
    prior_sd = np.sqrt(1e6 / 5)  # five or so independent parts of f
    assert abs(level - best) < 0.1 * prior_sd and raw.check().converged


@pytest.mark.slow
def test_units_go_by_the_prefix_of_the_guide():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(8_000.0, 1e4))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1e6, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + f, 300.0), obs=y)

    X = np.linspace(0.0, 6.0, 8)[:, None]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3), prefix="q")
    svi = SVI(model, guide, optax.sgd(0.0), sgp.TraceGP_ELBO())
    args = X, np.full(8, 9_700.0)
    state = svi.init(jax.random.key(0), *args)
    problem = Problem(svi, state, args, {})
    assert problem.units.means == {"level_q_loc": 8_000.0}
    assert {*problem.units.sizes} == {"level_q_loc"}


@pytest.mark.slow
def test_priors_that_say_nothing_are_no_unit():
    """
    The log of a rate has a prior sd of a thousand: the median of a few draws, where NumPyro
    starts, was hundreds below zero, and bounds of batches ended at -1e5.
    """
    X = np.linspace(0.0, 6.0, 60)[:, None]
    y = RNG.poisson(np.exp(3.0 + np.sin(X[:, 0])))

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1e3))
        kernel = sgp.kernels.RBF(1.0, 1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)

    whole = sgp.fit(model, sgp.SVGP(6), (X, y), **QUIET)
    batches = sgp.fit(model, sgp.SVGP(6), (X, y), batch_size=20, **QUIET)
    assert abs(whole.median()["level"] - 3.0) < 1.5
    # Batches of twenty rows are noisy; what they miss the verdict tells.
    assert abs(batches.bound - whole.bound) < 10.0
    left = batches.check().causes["other parameters"].nats
    assert batches.bound + left > whole.bound - 0.5


@pytest.mark.slow
def test_units_of_latents_that_depend_on_each_other_are_left_alone():
    """Effects about a mean that is a latent too: their units go together."""

    def model(X, group, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 100.0))
        middle = numpyro.sample("middle", dist.Normal(0.0, 100.0))
        with numpyro.plate("groups", 3):
            b = numpyro.sample("b", dist.Normal(middle, 50.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + level + b[group], 0.3), obs=y)

    X, group = np.linspace(0.0, 6.0, 30)[:, None], np.arange(30) % 3
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    data = X, group, np.zeros(30)
    problem = Problem(svi, svi.init(jax.random.key(0), *data), data, {})
    assert set(problem.units.means) <= {"level_auto_loc"}
    assert set(problem.units.sizes) <= {"level_auto_loc"}


def test_what_is_left_is_told_where_a_line_search_went_nowhere():
    """By the curvature along the slope: 100 (x - 1)^2 / 2 has 50 left at zero."""

    class Result:
        class hess_inv:
            n_corrs = 0

    descent = Descent.__new__(Descent)
    descent.x, descent.step_scale = np.zeros(2), np.array([1.0, 2.0])
    descent.loss, descent.losses = 0.0, [0.0]
    centre = np.array([1.0, 1.0])
    descent.gradient = 100.0 * (descent.x - centre)
    descent.evaluate = lambda x: (0.0, 100.0 * (x - centre))
    found = descent.decrement(np.array([0]), Result)
    np.testing.assert_allclose(found, 50.0, rtol=1e-6)
    np.testing.assert_allclose(descent.decrement(np.array([1]), Result), 50.0, rtol=1e-6)
    descent.evaluate = lambda x: (0.0, descent.gradient)
    assert descent.decrement(np.array([0, 1]), Result) == np.inf
    descent.gradient = np.zeros(2)
    Result.hess_inv = np.eye(2).view(type("M", (np.ndarray,), {"n_corrs": 0}))
    assert descent.decrement(np.array([0, 1]), Result) == 0.0
    assert descent.losses == [0.0]


def test_a_bound_is_that_of_where_training_ended():
    """Also where what is left was told from a place that was better than the last one."""

    class Result:
        class hess_inv:
            n_corrs = 0

    descent = Descent.__new__(Descent)
    descent.x, descent.step_scale = np.zeros(1), np.ones(1)
    descent.loss, descent.losses, descent.gradient = 50.0, [60.0, 50.0], np.array([-100.0])

    def evaluate(x):
        descent.x, descent.loss = x, 50.0 * float((x[0] - 1.0) ** 2)
        return descent.loss, 100.0 * (x - 1.0)

    descent.evaluate = evaluate
    descent.decrement(np.array([0]), Result)
    assert descent.losses == [60.0, 50.0, descent.loss] and descent.loss < 50.0


def test_what_is_positive_is_no_zero():
    """In float32 a variance that the data want none of was zero, which kernels refuse."""

    class SVI:
        def constrain_fn(self, free):
            return {"variance": jnp.exp(free["variance"]), "w": free["w"]}

    svi = SVI()
    with jax.enable_x64(False):
        free = {"variance": jnp.array([-200.0, 0.0]), "w": jnp.array([0.0, -200.0])}
        found = constrained(svi, free)
    assert found["variance"][0] == np.finfo(np.float32).tiny
    assert found["variance"][1] == 1.0
    np.testing.assert_array_equal(found["w"], free["w"])


@pytest.mark.slow
def test_linear_kernels_start_where_their_functions_have_a_variance_of_one():
    """At inputs of a million a variance of one is none that exp(f) can take."""
    X = RNG.normal(size=(30, 1)) * 1e6
    y = RNG.poisson(np.exp(0.5 + X[:, 0] / 1e6))

    def model(X, y=None):
        positive = dist.constraints.positive
        slope = numpyro.param("slope", 1.0, constraint=positive)
        length = numpyro.param("length", 1.0, constraint=positive)
        kernel = sgp.kernels.RBF(1.0, length) + sgp.kernels.Linear(slope)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    with jax.enable_x64(False):
        data = X.astype(np.float32), y
        fitted = sgp.fit(model, sgp.ODVGP(10, 10), data, **QUIET)
    assert fitted.bound > np.sum(stats.poisson(y.mean()).logpmf(y))


@pytest.mark.slow
def test_levels_under_wide_priors_start_where_the_density_is_finite():
    """The median of draws, some ten thousands off, had rates that NumPyro refuses."""

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(1.0, 1e5))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(f + level), 2.0), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    X = np.linspace(0.0, 6.0, 10)[:, None]
    starts = guide.starts(jax.random.key(0), (X, np.arange(10)), {})
    assert starts["level_auto_loc"] == 1.0


def test_columns_of_linear_kernels_add_up():
    """
    Of a common variance, of columns with sds of 230 and .3: by their geometric mean
    functions had a variance of 1,000 and more at each start, and counts no finite bound.
    """
    X = RNG.normal(size=(20, 2)) * np.array([230.0, 0.3])
    y = RNG.poisson(np.exp(0.5 + 0.004 * X[:, 0]))

    def model(X, y=None):
        slope = numpyro.param("slope", 1.0, constraint=dist.constraints.positive)
        kernel = sgp.kernels.Linear(slope**2)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    problem = Problem(svi, svi.init(jax.random.key(0), X, y), (X, y), {})
    starts, _ = lengthscale_starts(problem)
    slopes = [float(np.exp(start["slope"])) for start in starts[1:]]
    size = np.sqrt(np.sum(np.mean(X**2, axis=0)))
    np.testing.assert_allclose(slopes, 1.0 / (np.array(SCALES + HELD) * size), rtol=1e-3)

"""Periods that are not known: of each number of waves there is an optimum."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp.fitting.periods import over_waves
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.starts import other_periods

PERIOD, N = 3.7, 120
RNG = np.random.default_rng(501)
X = np.sort(RNG.uniform(0.0, 20.0, N))[:, None]
WAVES = np.sin(2 * np.pi * X[:, 0] / PERIOD) + 0.5 * np.cos(4 * np.pi * X[:, 0] / PERIOD)
Y = WAVES + 0.3 * RNG.normal(size=N)


def model(X, y=None, trend=False):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    period = numpyro.sample("period", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = sgp.kernels.Periodic(variance, lengthscale, period)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    if trend:
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        f = f + slope * X[:, 0]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def dense_mode():
    """The log joint density at its best near the right period, and that, densely."""

    def loss(theta):
        v, ls, p, s = np.exp(theta)
        K = v * np.exp(-2.0 * np.sin(np.pi * (X - X.T) / p) ** 2 / ls**2)
        L = np.linalg.cholesky(K + s**2 * np.eye(N))
        z = np.linalg.solve(L, Y)
        value = 0.5 * z @ z + np.log(np.diag(L)).sum() + 0.5 * N * np.log(2 * np.pi)
        means = np.array([0.0, 0.0, 0.0, -1.0])
        prior = 0.5 * (theta - means) ** 2 + theta + 0.5 * np.log(2 * np.pi)
        return value + prior.sum()

    start = np.log([1.0, 1.0, PERIOD, 0.3])
    found = minimize(loss, start, method="L-BFGS-B")
    return -found.fun, np.exp(found.x[2])


@pytest.mark.slow
@pytest.mark.parametrize(("key", "double"), [(0, False), (2, False), (4, True), (1, True)])
def test_a_fit_finds_the_period(key, double):
    """It ended at .23, at twice and at five times the period, once "converged"."""
    best, period = dense_mode()
    with jax.enable_x64(double):
        fitted = sgp.fit(
            model, sgp.SVGP(20), (X, Y), jax.random.key(key), progress_bar=False
        )
    assert abs(fitted.bound - best) < 0.1  # the tolerance of fit; 20 points lose .001
    assert abs(fitted.params["period_auto_loc"] - period) < 1e-2


@pytest.mark.slow
def test_periods_in_one_latent_are_each_found():
    """The second was looked for with the first as at the start: 39 nats below."""
    periods, rng = np.array([7.3, 1.7]), np.random.default_rng(3)
    Y = np.sin(2.0 * np.pi * X / periods).sum(1) + 0.1 * rng.normal(size=N)

    def model(X, y=None):
        with numpyro.plate("waves", 2):
            p = numpyro.sample("period", dist.LogNormal(1.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        Periodic = sgp.kernels.Periodic
        f = numpyro.sample(
            "f", sgp.GaussianProcess(Periodic(period=p[0]) + Periodic(period=p[1]), X)
        )
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    with jax.enable_x64(True):
        fitted = sgp.fit(model, sgp.SVGP(30), (X, Y), progress_bar=False)
    found = np.sort(fitted.params["period_auto_loc"])[::-1]
    # A few sds: that of a wave of amplitude 1 over 20 with noise .1 is .003 of 7.3.
    np.testing.assert_allclose(found, periods, rtol=5e-3)


@pytest.mark.slow
def test_so_does_one_gaussian_over_f_and_effects():
    data = X, Y + 0.3 * X[:, 0]
    fitted = sgp.fit(model, sgp.SVGP(20), data, trend=True, joint=True, progress_bar=False)
    assert abs(fitted.hyperparameters["period"][0] - PERIOD) < 0.05
    assert abs(fitted.posterior(X, trend=True)["slope"].mean - 0.3) < 0.05


@pytest.mark.slow
def test_nested_integrates_about_the_right_one():
    """It had 1.84 with an sd of .04, and a log evidence 93 nats below."""
    with jax.enable_x64(False):
        found = sgp.nested(model, sgp.SVGP(20), (X, Y), progress_bar=False)
    table = found.summary().loc["period"]
    assert abs(table["mean"] - PERIOD) < 3 * table["sd"] < 0.1
    assert not found.nodes.stopped


def only_a_period(X, y=None, period=None):
    if period is None:
        period = numpyro.sample("period", dist.LogNormal(0.0, 1.0))
    kernel = sgp.kernels.Periodic(1.0, 1.0, period)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.slow
def test_where_all_that_is_open_is_a_period():
    found = sgp.nested(only_a_period, sgp.SVGP(15), (X, Y), progress_bar=False)
    assert abs(found.summary().loc["period", "mean"] - PERIOD) < 0.05


@pytest.mark.slow
def test_two_periods_are_looked_for_one_beside_the_other():
    def two(X, y=None):
        f = 0.0
        for name, middle in (("p", 1.0), ("r", 0.0)):
            period = numpyro.sample(name, dist.LogNormal(middle, 0.7))
            kernel = sgp.kernels.Periodic(1.0, 1.0, period)
            f = f + numpyro.sample(f"f_{name}", sgp.GaussianProcess(kernel, X))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 10.0, (70, 1)), axis=0)
    x = 2.0 * np.pi * X[:, 0]
    y = np.sin(x / 2.3) + 0.7 * np.sin(x / 0.87) + 0.2 * rng.normal(size=70)
    # With the periods the other way round there is another mode, with less mass.
    with pytest.warns(UserWarning, match="another mode"):
        fitted = sgp.nested(two, sgp.SVGP(20), (X, y), progress_bar=False)
    found = fitted.summary()["mean"]
    assert abs(found["p"] - 2.3) < 0.1 and abs(found["r"] - 0.87) < 0.02


def test_known_periods_are_left_alone():
    guide = sgp.AutoSparseGP(only_a_period, sgp.SVGP(4))
    guide.setup(X, Y, period=3.0)
    field = Field(guide, (X, Y), {"period": 3.0})
    assert other_periods(field, (X, Y), {"period": 3.0}, np.zeros(0)) == []
    np.testing.assert_allclose(over_waves(4, 3.0), [6.0, 3.0, 2.0, 1.5])
    assert len(over_waves(10_000, 3.0)) == 200


def test_places_have_the_periods_that_are_meant():
    guide = sgp.AutoSparseGP(only_a_period, sgp.SVGP(4))
    guide.setup(X, Y)
    field = Field(guide, (X, Y), {})
    ((places, held),) = other_periods(field, (X, Y), {}, np.zeros(1))
    width = np.sqrt(12.0) * X.std()
    np.testing.assert_allclose(np.exp(places[:, 0]), over_waves(N, width), rtol=1e-6)
    assert held.all()

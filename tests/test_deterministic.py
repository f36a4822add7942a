"""Deterministic sites in predictions, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer.autoguide import AutoNormal
from scipy.stats import norm

import numpyro_sgp as sgp

LEVELS = (0.05, 0.3, 0.95)
X = jnp.array([-1.5, -0.4, 0.7, 1.6])[:, None]
X_NEW = jnp.array([-2.1, -0.9, 0.0, 0.3, 2.0])[:, None]
Z = jnp.array([-1.0, 1.1])[:, None]
PARAMS = {
    "f_auto_Z": Z,
    "f_auto_qu_mu": jnp.array([0.4, -1.0]),
    "f_auto_qu_sqrt": jnp.array([[0.5, 0.0], [0.2, 0.6]]),
}


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    rate = numpyro.deterministic("rate", jnp.exp(0.4 * f))
    numpyro.deterministic("line", 2.0 + X[:, 0] * f)
    numpyro.deterministic("square", f**2)
    numpyro.deterministic("above", f > 0.1)
    numpyro.deterministic("table", jnp.stack([f, jnp.sin(f)], axis=-1))
    numpyro.deterministic("centred", f - f.mean())
    numpyro.deterministic("total", f.sum())
    numpyro.deterministic("turned", f[::-1])
    numpyro.deterministic("largest", jax.lax.cummax(f))
    numpyro.deterministic("name", "not a number")
    numpyro.deterministic("twice", 2.0 * X[:, 0])
    with numpyro.plate("rows", X.shape[0]):
        y = numpyro.sample("y", dist.Poisson(rate), obs=y)
    numpyro.deterministic("residual", y - f)


LEFT_OUT = "centred", "total", "turned", "largest", "name", "twice", "residual"


@pytest.fixture(scope="module")
def guide():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4))
    return guide


@pytest.fixture(scope="module")
def found(guide):
    return sgp.predict(guide, PARAMS, X_NEW, quantiles=LEVELS)


def test_values_made_of_a_row_of_f_have_its_moments_and_quantiles(guide, found):
    q = guide.posterior(PARAMS, X_NEW)["f"]
    mean, variance = np.asarray(q.mean), np.asarray(q.variance)
    sd = np.sqrt(variance)
    z = norm.ppf(LEVELS)[:, None]
    rate = found["rate"]
    of_log = 0.4 * mean + 0.5 * 0.16 * variance
    assert_allclose(rate.mean, np.exp(of_log), rtol=1e-10)
    assert_allclose(rate.sd, np.exp(of_log) * np.sqrt(np.expm1(0.16 * variance)), rtol=1e-8)
    # Between 512 points, whose levels are apart by 0.002: second order in the distance.
    assert_allclose(rate.quantiles, np.exp(0.4 * (mean + sd * z)), rtol=1e-4)
    x = np.asarray(X_NEW[:, 0])
    assert_allclose(found["line"].mean, 2.0 + x * mean, rtol=1e-12)
    assert_allclose(found["line"].sd, np.abs(x) * sd, rtol=1e-12)
    assert_allclose(
        found["line"].quantiles, 2.0 + x * mean + np.abs(x) * sd * z, rtol=1e-12
    )
    assert_allclose(found["square"].mean, mean**2 + variance, rtol=1e-10)
    spread = np.sqrt(2.0 * variance**2 + 4.0 * mean**2 * variance)
    assert_allclose(found["square"].sd, spread, rtol=1e-8)
    for level, quantile in zip(LEVELS, found["square"].quantiles, strict=True):
        root = np.sqrt(quantile)
        reached = norm.cdf((root - mean) / sd) - norm.cdf((-root - mean) / sd)
        assert_allclose(reached, level, atol=1e-3)
    probability = norm.sf((0.1 - mean) / sd)
    assert_allclose(found["above"].mean, probability, atol=1.0 / 512)
    assert_allclose(found["above"].sd, np.sqrt(probability * (1 - probability)), atol=4e-3)
    assert {*np.unique(found["above"].quantiles)} <= {0.0, 1.0}
    assert found["table"].mean.shape == (5, 2)
    assert_allclose(found["table"].mean[:, 0], mean, rtol=1e-12, atol=1e-14)
    assert_allclose(found["table"].mean[:, 1], np.sin(mean) * np.exp(-variance / 2))


def test_values_made_of_other_rows_are_left_out_and_told(found):
    for name in LEFT_OUT:
        assert name not in found
        with pytest.raises(KeyError, match=f"'{name}' is not predicted: it is not of one"):
            found[name]
    assert list(found) == ["f", "rate", "line", "square", "above", "table", "y"]
    assert found["f"].to_dataframe().shape == (5, 5)


def test_of_batches_they_are_those_of_all_rows(guide):
    few = jnp.linspace(-2.0, 2.0, 300)[:, None]
    whole = sgp.predict(guide, PARAMS, few)
    parts = sgp.predict(guide, PARAMS, few, batch_size=130)
    assert list(parts) == list(whole)
    for name in whole:
        assert_allclose(parts[name].mean, whole[name].mean, rtol=1e-10, atol=1e-12)
        assert_allclose(parts[name].quantiles, whole[name].quantiles, rtol=1e-9, atol=1e-9)


def test_what_is_scaled_by_a_mean_over_rows_is_not_of_batches():
    def scaled(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.deterministic("scaled", f * X.mean())
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(scaled, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4))
    few = jnp.linspace(-1.0, 2.0, 300)[:, None]
    found = sgp.predict(guide, PARAMS, few, batch_size=130)
    assert_allclose(found["scaled"].mean, found["f"].mean * few.mean(), rtol=1e-10)


def test_inside_of_jit_those_of_other_rows_are_nan(guide):
    @jax.jit
    def run(X):
        found = sgp.predict(guide, PARAMS, X, quantiles=())
        return found["rate"].mean, found["centred"].mean

    rate, centred = run(X_NEW)
    known = sgp.predict(guide, PARAMS, X_NEW, quantiles=())
    assert_allclose(rate, known["rate"].mean, rtol=1e-10)
    assert np.isnan(centred).all()


def test_of_drawn_latents_they_are_mixtures():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        eta = numpyro.deterministic("eta", level + X[:, 0] * f)
        rate = numpyro.deterministic("rate", jnp.exp(0.3 * eta))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z), base_guide=AutoNormal)
    guide.setup(X, jnp.ones(4))
    params = guide.known().starts | PARAMS
    params |= {"level_auto_loc": jnp.array(0.3), "level_auto_scale": jnp.array(0.5)}
    found = sgp.predict(guide, params, X_NEW, num_draws=2000, quantiles=LEVELS)
    q = guide.posterior(params, X_NEW)["f"]
    x = X_NEW[:, 0]
    mean, variance = 0.3 + x * q.mean, x**2 * q.variance + 0.25
    # Five standard errors of 2,000 draws of the level, whose sd is a half.
    assert_allclose(found["eta"].mean, mean, atol=5 * 0.5 / 2000**0.5)
    assert_allclose(found["eta"].sd, np.sqrt(variance), rtol=5 / 4000**0.5)
    assert np.isfinite(found["eta"].quantiles).all()  # also where it is the level alone
    z = norm.ppf(LEVELS)[:, None]
    expected = mean + np.sqrt(variance) * z
    assert_allclose(found["eta"].quantiles, expected, atol=0.12)  # five of its own
    assert_allclose(np.log(found["rate"].quantiles) / 0.3, expected, atol=0.15)


def test_rows_drawn_together_may_be_combined():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.deterministic("centred", f - f.mean())
        numpyro.sample("y", dist.Normal(f[1:] - f[:-1], 0.2).to_event(1), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(3))
    found = sgp.predict(guide, PARAMS, X_NEW)
    q = guide.posterior(PARAMS, X_NEW)["f"]
    centring = np.eye(5) - 0.2
    covariance = centring @ np.asarray(q.covariance_matrix) @ centring
    assert_allclose(found["centred"].mean, centring @ q.mean, atol=1e-6)  # in pairs
    assert_allclose(found["centred"].sd, np.sqrt(np.diag(covariance)), rtol=0.08)


def test_nested_results_have_them_too():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        eta = numpyro.deterministic("eta", level + f)
        numpyro.deterministic("rate", jnp.exp(eta))
        numpyro.deterministic("share", jnp.exp(f) / jnp.exp(f).sum())
        numpyro.deterministic("base", jnp.exp(level))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(eta, 0.3), obs=y)

    y = jnp.array([0.4, -0.2, 0.5, 1.0])
    result = sgp.nested(model, sgp.VGP(), (X, y), progress_bar=False)
    found = result.predict(X_NEW, quantiles=LEVELS)
    assert "share" not in found
    eta = found["eta"]
    z = norm.ppf(LEVELS)[:, None]
    assert_allclose(eta.quantiles, eta.mean + eta.sd * z, rtol=1e-6)
    # Of 2,048 draws, balanced ones: levels to 0.01.
    reached = norm.cdf((np.log(found["rate"].quantiles) - eta.mean) / eta.sd)
    assert_allclose(reached, np.asarray(LEVELS)[:, None] * np.ones(5), atol=0.015)
    log_mean = np.log(found["rate"].mean)
    assert_allclose(log_mean, eta.mean + eta.sd**2 / 2, atol=0.05)
    level = result.posterior(X)["level"]
    assert_allclose(np.log(found["base"].mean), level.mean + level.sd**2 / 2, atol=0.06)


def test_a_figure_is_of_the_response_first():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        rate = numpyro.deterministic("rate", jnp.exp(f))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    data = jnp.linspace(-1.0, 1.0, 8)[:, None], jnp.array([1, 0, 2, 1, 3, 2, 4, 3])
    fitted = sgp.fit(model, sgp.SVGP(3), data, steps=2, progress_bar=False)
    assert fitted.plot(num_points=4).get_ylabel() == "y"
    assert fitted.plot(num_points=4, site="rate").get_ylabel() == "rate"

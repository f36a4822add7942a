"""Responses of several rows of f: differences, sums over areas, running sums."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer.autoguide import AutoNormal
from scipy.special import expit
from scipy.stats import norm

import numpyro_sgp as sgp

X = jnp.linspace(-2.0, 2.0, 7)[:, None]
X_NEW = jnp.linspace(-1.5, 2.5, 6)[:, None]
LEFT, RIGHT = np.array([0, 2, 5]), np.array([3, 4, 1])
AREA = np.array([0, 0, 1, 1, 1, 1])
PARAMS = {
    "f_auto_Z": jnp.array([-1.0, 1.1])[:, None],
    "f_auto_qu_mu": jnp.array([0.4, -1.0]),
    "f_auto_qu_sqrt": jnp.array([[0.5, 0.0], [0.2, 0.6]]),
}
DRAWS = 2048


def preferences(X, left, right, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("pairs", left.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f[left] - f[right]), obs=y)


def areas(X, area, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    total = jax.ops.segment_sum(jnp.exp(f), area, num_segments=2)
    with numpyro.plate("areas", 2):
        numpyro.sample("y", dist.Poisson(total), obs=y)


def walk(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.cumsum(f), 0.5), obs=y)


def guide_of(model, *args):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=PARAMS["f_auto_Z"]))
    guide.setup(*args)
    return guide


def predicted(model, data, new, **options):
    """Predictions, and moments of f there, all rows together."""
    guide = guide_of(model, *data)
    q = guide.posterior(PARAMS, *new)["f"]
    found = sgp.predict(guide, PARAMS, *new, **options)
    assert_allclose(found["f"].mean, q.mean, rtol=1e-6)
    assert_allclose(found["f"].sd, np.sqrt(q.variance), rtol=1e-6)
    return found["y"], np.asarray(q.mean), np.asarray(q.covariance_matrix)


@pytest.mark.slow
def test_differences_have_the_variance_of_both_rows_together():
    data = X, LEFT, RIGHT, np.array([0, 1, 1])
    y, mean, covariance = predicted(preferences, data, (X_NEW, LEFT, RIGHT))
    D = np.eye(6)[LEFT] - np.eye(6)[RIGHT]
    loc, sd = D @ mean, np.sqrt(np.diag(D @ covariance @ D.T))
    grid = np.linspace(-9.0, 9.0, 201)
    weights = norm.pdf(grid) * (grid[1] - grid[0])
    exact = weights @ expit(loc + sd * grid[:, None])
    spread = np.sqrt(weights @ expit(loc + sd * grid[:, None]) ** 2 - exact**2)
    # Four standard errors of independent draws: pairs about the mean have less.
    assert np.all(np.abs(y.mean - exact) < 4.0 * spread / np.sqrt(DRAWS))
    assert_allclose(y.sd, np.sqrt(y.mean * (1.0 - y.mean)), rtol=1e-6)


@pytest.mark.slow
def test_sums_over_areas_have_the_moments_of_lognormals():
    data = X, np.array([0, 0, 0, 0, 1, 1, 1]), np.array([3, 2])
    y, mean, covariance = predicted(areas, data, (X_NEW, AREA), quantiles=[0.5])
    level = np.exp(mean + 0.5 * np.diag(covariance))
    both = level[:, None] * level * np.expm1(covariance)
    S = AREA == np.arange(2)[:, None]
    total, variance = S @ level, np.diag(S @ both @ S.T)
    assert np.all(np.abs(y.mean - total) < 4.0 * np.sqrt(variance / DRAWS))
    assert_allclose(y.sd, np.sqrt(total + variance), rtol=0.05)
    assert y.quantiles.shape == (1, 2)


@pytest.mark.slow
def test_running_sums_are_normal_and_of_all_rows():
    data = X, jnp.sin(X[:, 0])
    # Batches would begin the sum anew.
    more = {"quantiles": [0.9], "batch_size": 2}
    y, mean, covariance = predicted(walk, data, (X_NEW,), **more)
    L = np.tril(np.ones((6, 6)))
    sd = np.sqrt(np.diag(L @ covariance @ L.T) + 0.25)
    assert_allclose(y.mean, L @ mean, atol=1e-6)  # of pairs about the mean
    # Relative standard errors: 1 / sqrt(2 S) of an sd, 1.71 / sqrt(S) of this quantile.
    assert_allclose(y.sd, sd, rtol=4.0 / np.sqrt(2 * DRAWS))
    assert np.all(
        np.abs(y.quantiles[0] - norm.ppf(0.9, L @ mean, sd)) < 4 * 1.71 * sd / DRAWS**0.5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "approximation", [sgp.SVGP(4), sgp.MixtureSVGP(4, num_components=2)]
)
def test_two_functions_and_a_latent_that_is_drawn(approximation):
    """Against many joint draws of the guide itself."""

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + jnp.cumsum(f) * g, 0.5), obs=y)

    guide = sgp.AutoSparseGP(model, approximation, AutoNormal)
    svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    y = jnp.sin(X[:, 0])
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    found = sgp.predict(guide, params, X_NEW, quantiles=())["y"]
    shape = (20_000,)
    draws = guide.sample_posterior(jax.random.key(1), params, X_NEW, sample_shape=shape)
    loc = draws["level"][:, None] + np.cumsum(draws["f"], axis=-1) * draws["g"]
    sd = np.sqrt(np.var(loc, axis=0) + 0.25)
    # Of 100 draws of the level, with twenty of the functions each.
    assert np.all(np.abs(found.mean - np.mean(loc, axis=0)) < 4.0 * sd / 10.0)
    assert_allclose(found.sd, sd, rtol=4.0 * 1.5 / np.sqrt(DRAWS) + 4.0 / np.sqrt(200.0))


@pytest.mark.slow
def test_densities_of_differences_are_those_of_quadrature():
    y = np.array([1, 1, 0])
    guide = guide_of(preferences, X, LEFT, RIGHT, y)
    new = X_NEW, LEFT, RIGHT
    q = guide.posterior(PARAMS, *new)["f"]
    D = np.eye(6)[LEFT] - np.eye(6)[RIGHT]
    sd = np.sqrt(np.diag(D @ np.asarray(q.covariance_matrix) @ D.T))
    grid = np.linspace(-9.0, 9.0, 201)
    weights = norm.pdf(grid) * (grid[1] - grid[0])
    signs = 2.0 * y - 1.0
    likelihood = expit(signs * (D @ np.asarray(q.mean) + sd * grid[:, None]))
    exact = weights @ likelihood
    error = np.sqrt(weights @ likelihood**2 - exact**2) / exact / np.sqrt(DRAWS)
    found = sgp.log_predictive_density(guide, PARAMS, *new, y)["y"]
    assert found.shape == (3,)
    assert np.all(np.abs(found - np.log(exact)) < 4.0 * error)
    fitted = sgp.Fitted(guide, PARAMS, (X, LEFT, RIGHT, y))
    assert_allclose(fitted.log_score(*new, y)["y"].mean, np.mean(found), rtol=1e-6)
    with pytest.raises(ValueError, match="ties rows together"):
        sgp.log_predictive_density(guide, PARAMS, *new, y, expectation=sgp.GaussHermite(20))
    with pytest.raises(ValueError, match="no observed site"):
        sgp.log_predictive_density(guide, PARAMS, *new)


@pytest.mark.slow
def test_a_mask_leaves_areas_out():
    def seen_areas(X, area, y=None, seen=True):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        total = jax.ops.segment_sum(jnp.exp(f), area, num_segments=2)
        with numpyro.plate("areas", 2), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Poisson(total), obs=y)

    data = X, np.array([0, 0, 0, 0, 1, 1, 1]), np.array([3, 2])
    guide = guide_of(seen_areas, *data)
    seen = np.array([True, False])
    found = sgp.log_predictive_density(guide, PARAMS, *data, seen)["y"]
    whole = sgp.log_predictive_density(guide, PARAMS, *data)["y"]
    assert_allclose(found, [whole[0], np.nan])


@pytest.mark.slow
def test_figures_show_functions_of_which_responses_are_tied():
    guide = guide_of(walk, X, jnp.sin(X[:, 0]))
    fitted = sgp.Fitted(guide, PARAMS, (X, jnp.sin(X[:, 0])))
    assert fitted.plot(num_points=5).get_ylabel() == "f"
    with pytest.raises(ValueError, match="of several rows of f each"):
        fitted.plot(site="y")


@pytest.mark.slow
def test_a_fit_predicts_what_it_was_fitted_to():
    rng = np.random.default_rng(0)
    X = np.linspace(0.0, 5.0, 12)[:, None]
    left = rng.integers(0, 12, 60)
    right = (left + rng.integers(1, 12, 60)) % 12
    gap = 3.0 * (np.sin(X[left, 0]) - np.sin(X[right, 0]))
    y = (rng.uniform(size=60) < expit(gap)).astype(int)
    fitted = sgp.fit(
        preferences, sgp.SVGP(6), (X, left, right, y), steps=300, progress_bar=False
    )
    probs = np.asarray(fitted.predict(X, left, right)["y"].mean)
    assert np.mean(np.abs(probs - expit(gap))) < 0.15


@pytest.mark.slow
def test_layers_that_are_tied_are_refused():
    def deep(X, y=None):
        kernel = sgp.kernels.RBF()
        g = numpyro.sample("g", sgp.GaussianProcess(kernel, X))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, g[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.cumsum(f), 0.5), obs=y)

    guide = sgp.AutoSparseGP(deep, sgp.SVGP(3))
    guide.setup(X, jnp.sin(X[:, 0]))
    svi = numpyro.infer.SVI(deep, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, jnp.sin(X[:, 0])))
    with pytest.raises(ValueError, match="ties rows together.*deep GP"):
        sgp.predict(guide, params, X_NEW)

"""The robust-max likelihood: its density, its expectation, and both in the ELBO."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import SVI
from scipy.stats import norm

import numpyro_sgp as sgp
from numpyro_sgp.likelihoods import RobustMax, robust_max_probabilities
from tests import helpers

EPS = 0.01


def moments(C=4, N=5, seed=0):
    rng = np.random.default_rng(seed)
    mean, variance = rng.normal(size=(C, N)), rng.uniform(0.5, 2.0, size=(C, N))
    return jnp.asarray(mean), jnp.asarray(variance), jnp.asarray(rng.integers(C, size=N))


def largest(mean, variance, y):
    """Probability that f_y is the largest, by the trapezoidal rule on a fine grid."""
    mean, sd = np.asarray(mean), np.sqrt(variance)
    grid = np.linspace(-15, 15, 20_001)[:, None]  # [S, N]
    total = norm.pdf(grid, mean[y, np.arange(len(y))], sd[y, np.arange(len(y))])
    for c in range(len(mean)):
        total = total * np.where(c == np.asarray(y), 1.0, norm.cdf(grid, mean[c], sd[c]))
    return total.sum(axis=0) * (grid[1, 0] - grid[0, 0])


@pytest.mark.slow
def test_density_is_that_of_the_largest_and_sums_to_one():
    f = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)))
    likelihood = RobustMax(f, EPS)
    p = np.exp([likelihood.log_prob(jnp.full(5, c)) for c in range(4)])
    assert_allclose(p.sum(axis=0), 1.0, rtol=1e-12)
    assert_allclose(p[np.argmax(f, axis=0), np.arange(5)], 1 - EPS, rtol=1e-12)
    draws = RobustMax(f, 0.3).sample(random.key(0), (20_000,))
    share = np.mean(draws == jnp.argmax(f, axis=0), axis=0)
    assert np.all(np.abs(share - 0.7) < 5 * np.sqrt(0.3 * 0.7 / 20_000))
    assert set(np.unique(draws)) == {0, 1, 2, 3}


@pytest.mark.slow
def test_expectation_is_the_integral_and_the_mean_over_draws():
    mean, variance, y = moments()
    p = largest(mean, variance, np.asarray(y))
    expected = np.log(1 - EPS) * p + np.log(EPS / 3) * (1 - p)
    likelihood = RobustMax(mean, EPS, num_points=60)
    found = likelihood.expected_log_prob(mean, variance, y)
    assert_allclose(found, expected, atol=1e-6)
    # The default is good enough to train with.
    found = RobustMax(mean, EPS).expected_log_prob(mean, variance, y)
    assert_allclose(found, expected, atol=5e-3)

    noise = random.normal(random.key(0), (40_000, *mean.shape))
    log_prob = jax.jit(jax.vmap(lambda f: RobustMax(f, EPS).log_prob(y)))
    draws = log_prob(mean + variance**0.5 * noise)
    error = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(axis=0) - expected) < 5 * error)


@pytest.mark.slow
def test_predictive_probabilities_are_those_of_the_classes():
    mean, variance, _ = moments()
    p = robust_max_probabilities(mean, variance, EPS, num_points=60)
    assert_allclose(p.sum(axis=0), 1.0, atol=1e-5)
    for c in range(4):
        own = largest(mean, variance, np.full(5, c))
        assert_allclose(p[c], (1 - EPS) * own + EPS / 3 * (1 - own), atol=1e-6)


def test_gradients_are_finite_also_where_a_class_has_no_chance():
    mean, variance, y = moments()

    def total(mean, variance):
        return jnp.sum(RobustMax(mean, EPS).expected_log_prob(mean, variance, y))

    gradient, total = jax.jit(jax.grad(total, argnums=(0, 1))), jax.jit(total)
    for scale in (1.0, 30.0):
        slopes = gradient(scale * mean, variance)
        assert np.isfinite(slopes[0]).all() and np.isfinite(slopes[1]).all()
    step = 1e-6
    slope = gradient(mean, variance)[0][1, 2]
    up, down = (total(mean.at[1, 2].add(s), variance) for s in (step, -step))
    assert_allclose(slope, (up - down) / (2 * step), rtol=1e-5)


def model(X, y=None, observed=None, mix=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([3]))
    f = f if mix is None else mix @ f
    mask = True if observed is None else observed
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", RobustMax(f, EPS), obs=y)


def classes():
    X, _ = helpers.regression_data(12, dim=2)
    return X, (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)


def test_the_elbo_takes_the_expectation_in_closed_form():
    X, y = classes()
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    svi = SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO())
    fit = svi.run(random.key(0), 150, X, y, progress_bar=False)
    assert fit.losses[-1] < 0.4 * fit.losses[0]

    q = guide.posterior(fit.params, X)["f"]
    terms = jax.jit(RobustMax(q.mean, EPS).expected_log_prob)(q.mean, q.variance, y)
    losses = sgp.TraceGP_ELBO(sum_sites=False).loss
    loss = jax.jit(lambda key, mask: losses(key, fit.params, model, guide, X, y, mask))
    for key in random.split(random.key(0)):  # no random numbers
        assert_allclose(loss(key, jnp.ones(12, bool))["y"], -terms.sum(), rtol=1e-10)
    masked = loss(random.key(0), jnp.arange(12) < 9)
    assert_allclose(masked["y"], -terms[:9].sum(), rtol=1e-10)
    score = sgp.TraceGP_ELBO(sgp.ScoreFunction(5000), sum_sites=False).loss
    drawn = jax.jit(lambda key: score(key, fit.params, model, guide, X, y))(random.key(0))
    # A term's standard deviation is at most log(0.99) - log(0.005) = 5.3 over 2.
    assert abs(drawn["y"] + terms.sum()) < 5 * 2.65 * np.sqrt(12 / 5000)


@pytest.mark.slow
def test_mixtures_use_it_too():
    X, y = classes()
    guide = sgp.AutoSparseGP(model, sgp.MixtureSVGP(4, 2))
    svi = SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO())
    fit = svi.run(random.key(0), 100, X, y, progress_bar=False)
    assert fit.losses[-1] < 0.6 * fit.losses[0]


@pytest.mark.slow
def test_natural_gradients_use_it_too():
    X, y = classes()
    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    elbo = sgp.TraceGP_ELBO()
    svi = SVI(model, guide, optax.adam(0.05), elbo)
    params = svi.get_params(svi.init(random.key(0), X, y))
    _, found = jax.jit(
        lambda key: elbo.marginal_gradients(key, params, model, guide, X, y)
    )(random.key(0))
    q = guide.posterior(params, X)["f"]

    def total(mean, variance):
        return jnp.sum(RobustMax(mean, EPS).expected_log_prob(mean, variance, y))

    slopes = jax.jit(jax.grad(total, argnums=(0, 1)))(q.mean, q.variance)
    assert_allclose(found["f"].to_mean, slopes[0], rtol=1e-9, atol=1e-12)
    assert_allclose(found["f"].to_variance, slopes[1], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_what_it_cannot_do_is_refused():
    X, y = classes()
    with pytest.raises(ValueError, match="shape .C, N.*got .5, 3, 2."):
        RobustMax(jnp.zeros((5, 3, 2)))
    for approximation, mix in (
        (sgp.SVGP(4), jnp.ones((3, 3))),
        (sgp.SVGP(4, covariance="coupled"), None),
    ):
        guide = sgp.AutoSparseGP(model, approximation)
        svi = SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO())
        state = svi.init(random.key(0), X, y, mix=mix)
        with pytest.raises(ValueError, match="'y' has a RobustMax.*as it is"):
            svi.update(state, X, y, mix=mix)


def test_functions_that_are_integers_do_not_round_the_mistake():
    f = jnp.array([[1, 0], [0, 2]])
    p = np.exp([RobustMax(f, 0.1).log_prob(jnp.full(2, c)) for c in range(2)])
    assert_allclose(p, [[0.9, 0.1], [0.1, 0.9]], rtol=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_no_mistake_and_nothing_but_mistakes(epsilon):
    """A certain event has the log density 0, an impossible one minus infinity."""
    f = jnp.array([[50.0], [0.0], [0.0]])
    found = [RobustMax(f, epsilon).log_prob(jnp.array([c]))[0] for c in (0, 1)]
    assert_allclose(found, [-np.inf, -np.log(2.0)] if epsilon else [0.0, -np.inf])


def test_predictive_probabilities_of_functions_of_other_widths_sum_to_one():
    """With 50 nodes they were off by .003 where one sd is a ninth of another."""
    mean = jnp.array([[0.0], [0.1], [-0.1]])
    variance = jnp.array([[1.0], [0.0121], [0.0121]])
    p = robust_max_probabilities(mean, variance, 0.0)[:, 0]
    expected = [largest(mean, variance, np.array([c]))[0] for c in range(3)]
    assert_allclose(p, expected, atol=1e-6)

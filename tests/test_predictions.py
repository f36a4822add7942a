"""Predictions of f and of responses against closed forms and SciPy's quadrature."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import Adam
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import (
    gamma,
    halfnorm,
    nbinom,
    norm,
    pareto,
    poisson,
    randint,
    truncnorm,
    uniform,
    vonmises,
)

import numpyro_sgp as sgp
from numpyro_sgp.predictive.averages import weighted_sum
from numpyro_sgp.predictive.predictions import Prediction, Predictions
from numpyro_sgp.predictive.quantiles import solved
from numpyro_sgp.predictive.remarks import warn_of_angles
from tests.helpers import slow

X = jnp.array([-1.5, -0.4, 0.7, 1.6])[:, None]
X_NEW = jnp.array([-2.1, -0.9, 0.0])[:, None]
Z = jnp.array([-1.0, 1.1])[:, None]
PARAMS = {
    "f_auto_Z": Z,
    "f_auto_qu_mu": jnp.array([0.4, -1.0]),
    "f_auto_qu_sqrt": jnp.array([[0.5, 0.0], [0.2, 0.6]]),
}
# The trapezoidal rule, which is exact to rounding for smooth functions under a Gaussian.
GRID = np.linspace(-9.0, 9.0, 201)
WEIGHTS = norm.pdf(GRID) * (GRID[1] - GRID[0])


def model_of(likelihood, num_functions=None):
    def model(X, y=None):
        process = sgp.GaussianProcess(sgp.kernels.RBF(), X)
        process = process if num_functions is None else process.expand([num_functions])
        f = numpyro.sample("f", process)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model


def guide_of(likelihood, num_functions=None, y=None):
    guide = sgp.AutoSparseGP(model_of(likelihood, num_functions), sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4, int) if y is None else y)
    return guide


def moments(guide, params=PARAMS):
    q = guide.posterior(params, X_NEW)["f"]
    return np.asarray(q.mean), np.sqrt(q.variance)


@pytest.mark.slow
def test_a_latent_of_each_training_row_is_named_at_other_rows():
    def noisy(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            z = numpyro.sample("z", dist.Normal(f, 0.5))
            numpyro.sample("y", dist.Normal(z, 0.1), obs=y)

    X = jnp.linspace(0.0, 3.0, 8)[:, None]
    fitted = sgp.fit(noisy, sgp.SVGP(3), (X, X[:, 0]), steps=1, progress_bar=False)
    with pytest.raises(ValueError, match=r"'z' has the shape \(3,\).* of shape \(8,\)"):
        fitted.predict(X[:3])
    with pytest.raises(ValueError, match=r"'z' has the shape \(3,\)"):
        sgp.log_predictive_density(fitted.guide, fitted.params, X[:3], X[:3, 0])


def test_a_gaussian_response_is_its_closed_form():
    guide = guide_of(lambda f: dist.Normal(f, 0.6))
    mean, sd = moments(guide)
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=[0.1, 0.5, 0.9])
    levels = np.array([0.1, 0.5, 0.9])[:, None]
    assert_allclose(found["f"].mean, mean, rtol=1e-12)
    assert_allclose(found["f"].sd, sd, rtol=1e-12)
    assert_allclose(found["f"].quantiles, norm(mean, sd).ppf(levels), rtol=1e-12)
    total = np.sqrt(sd**2 + 0.36)
    assert_allclose(found["y"].mean, mean, rtol=1e-12)
    assert_allclose(found["y"].sd, total, rtol=1e-12)
    assert_allclose(found["y"].quantiles, norm(mean, total).ppf(levels), rtol=1e-10)
    assert found["y"].probs is None


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "likelihood",
    [
        slow(lambda f: dist.Normal(jnp.abs(f), 0.1)),
        lambda f: dist.Normal(jnp.where(f > 1.0, 1.0, f), 0.3),
        slow(lambda f: dist.Normal(f, 0.1 + 0.01 * f**2)),
        lambda f: dist.Normal(f + 0.1 * jnp.sin(f), 0.2),
    ],
    ids=["abs", "kink", "scale", "sine"],
)
def test_a_normal_response_that_is_none_by_itself_is_a_mixture(likelihood):
    guide = guide_of(likelihood)
    mean, sd = moments(guide)
    levels = [0.02, 0.5, 0.9]
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=levels)["y"].quantiles
    f = mean + sd * norm.ppf((np.arange(4000) + 0.5) / 4000)[:, None]
    given = likelihood(jnp.asarray(f))
    for level, y in zip(levels, found, strict=True):
        # Levels by 512 values of f.
        assert_allclose(np.mean(given.cdf(y), axis=0), level, atol=1e-3)


@pytest.mark.slow
def test_quantiles_of_smooth_responses_are_those_of_fine_grids():
    guide = guide_of(lambda f: dist.Gamma(3.0, 3.0 * jnp.exp(-f)), y=jnp.ones(4))
    mean, sd = moments(guide)
    levels = [0.001, 0.3, 0.99]
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=levels)["y"].quantiles
    f = mean[:, None] + sd[:, None] * GRID
    for level, y in zip(levels, found, strict=True):
        given = gamma(3.0, scale=np.exp(f) / 3.0).cdf(y[:, None])
        assert_allclose(given @ WEIGHTS, level, atol=1e-6)


@pytest.mark.slow
def test_quantiles_of_a_response_without_noise_are_those_of_f():
    """As a mixture the hardest case: of steps, where another function is known."""
    guide = guide_of(lambda f: dist.Normal(f, 1e-9))
    mean, sd = moments(guide)
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=[0.05, 0.95])["y"]
    levels = np.array([0.05, 0.95])[:, None]
    assert_allclose(found.quantiles, norm(mean, sd).ppf(levels), rtol=1e-8)
    guide = guide_of(lambda f: dist.TruncatedNormal(f, 1e-9, low=-1e3))
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=[0.05, 0.95])["y"]
    got = norm(mean, sd).cdf(found.quantiles)
    assert_allclose(got, [[0.05] * 3, [0.95] * 3], atol=1.01e-3)


def three_functions(is_scale):
    def model(X, y=None):
        X = X[:, :1]
        a, b, c = (
            numpyro.sample(k, sgp.GaussianProcess(sgp.kernels.RBF(), X)) for k in "abc"
        )
        scale = jnp.exp(0.5 * c - 1.0) if is_scale else 0.4
        mean = a + 2.0 * b if is_scale else a + 2.0 * b - c
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(2))
    guide.setup(X_NEW, jnp.zeros(3))
    params = guide.known().starts
    for name in "abc":
        params[f"{name}_auto_qu_mu"] = jnp.array([0.5, -0.7])
    return guide, params


@pytest.mark.slow
def test_a_sum_of_functions_is_normal_however_many_there_are():
    guide, params = three_functions(is_scale=False)
    q = guide.posterior(params, X_NEW)
    mean = q["a"].mean + 2.0 * q["b"].mean - q["c"].mean
    variance = q["a"].variance + 4.0 * q["b"].variance + q["c"].variance + 0.16
    levels = np.array([0.02, 0.7])
    found = sgp.predict(guide, params, X_NEW, quantiles=levels)["y"]
    assert_allclose(found.mean, mean, rtol=1e-10)
    assert_allclose(found.sd, np.sqrt(variance), rtol=1e-10)
    known = norm(mean, np.sqrt(variance)).ppf(levels[:, None])
    assert_allclose(found.quantiles, known, rtol=1e-10)


@pytest.mark.slow
def test_noise_that_is_a_function_is_averaged_over():
    guide, params = three_functions(is_scale=True)
    q, levels = guide.posterior(params, X_NEW), np.array([0.02, 0.7])
    mean = q["a"].mean + 2.0 * q["b"].mean
    variance = q["a"].variance + 4.0 * q["b"].variance
    c = q["c"].mean + jnp.sqrt(q["c"].variance) * GRID[:, None]
    total = np.sqrt(variance + jnp.exp(0.5 * c - 1.0) ** 2)
    found = sgp.predict(guide, params, X_NEW, quantiles=levels)["y"].quantiles
    for level, y in zip(levels, found, strict=True):
        # Levels by 2048 values of the functions.
        assert_allclose(WEIGHTS @ norm(mean, total).cdf(y), level, atol=5e-3)


@pytest.mark.slow
def test_draws_of_hyperparameters_are_of_a_mixture_of_normals():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + level, 0.1), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z), AutoNormal)
    guide.setup(X, jnp.zeros(4))
    params = guide.known().starts | PARAMS
    params |= {"level_auto_loc": jnp.array(0.7), "level_auto_scale": jnp.array(0.5)}
    mean, sd = moments(guide, params)
    levels = np.array([0.05, 0.5, 0.95])
    found = sgp.predict(guide, params, X_NEW, quantiles=levels, num_draws=2000)["y"]
    # Of 2000 draws: five standard errors of their mean, and of a level.
    total = np.sqrt(sd**2 + 0.01 + 0.25)
    assert_allclose(found.mean, mean + 0.7, atol=5 * 0.5 / 2000**0.5)
    got = norm(mean + 0.7, total).cdf(found.quantiles)
    assert_allclose(got, np.broadcast_to(levels[:, None], got.shape), atol=5 * 0.5 / 45)


def poisson_counts(f):
    return dist.Poisson(jnp.exp(f + 1.0))


def dispersed_counts(f):
    # NumPyro's cdf of these is continuous between whole numbers.
    return dist.NegativeBinomial2(jnp.exp(f + 1.0), 3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likelihood", "known"),
    [
        (poisson_counts, poisson),
        pytest.param(
            dispersed_counts,
            lambda rate: nbinom(3.0, 3.0 / (3.0 + rate)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_counts_have_the_moments_and_quantiles_of_their_mixture(likelihood, known):
    guide = guide_of(likelihood)
    mean, sd = moments(guide)
    found = sgp.predict(guide, PARAMS, X_NEW)["y"]
    rate = np.exp(mean + 1.0 + sd**2 / 2)
    assert_allclose(found.mean, rate, rtol=1e-10)
    # E[var] + var[E], with the variance quadratic in the rate.
    square = rate**2 * np.exp(sd**2)
    variance = rate + square * (likelihood is dispersed_counts) / 3.0 + square - rate**2
    assert_allclose(found.sd, np.sqrt(variance), rtol=1e-8)
    rates = known(np.exp(mean[:, None] + 1 + sd[:, None] * GRID))
    cdf = np.array([np.sum(WEIGHTS * rates.cdf(y), axis=1) for y in range(100)])
    for level, got in zip([0.05, 0.95], found.quantiles, strict=True):
        assert_allclose(got, np.argmax(cdf >= level, axis=0), rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_infinite_values_count_where_their_weight_is_something(dtype):
    values = jnp.array([[1.0, 2.0], [3.0, jnp.inf], [jnp.inf, 1.0]], dtype)
    weights = jnp.array([0.5, 0.25, jnp.finfo(dtype).tiny], dtype)
    assert weighted_sum(weights, values).tolist() == [1.25, jnp.inf]


def test_a_factor_is_no_response():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.factor("smooth", -0.1 * jnp.sum(f**2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4))
    assert sorted(sgp.predict(guide, PARAMS, X_NEW)) == ["f", "y"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["probs", "logits"])
def test_two_classes_have_the_probabilities_of_quadrature(kind):
    link = {
        "probs": lambda f: dist.Bernoulli(probs=jax.scipy.special.ndtr(f)),
        "logits": lambda f: dist.Bernoulli(logits=f),
    }[kind]
    guide = guide_of(link)
    mean, sd = moments(guide)
    found = sgp.predict(guide, PARAMS, X_NEW)["y"]
    expected = norm.cdf(mean / np.sqrt(1 + sd**2))
    if kind == "logits":
        expected = [
            quad(lambda x, m=m, s=s: norm.pdf(x) / (1 + np.exp(-m - s * x)), -9, 9)[0]
            for m, s in zip(mean, sd, strict=True)
        ]
    assert_allclose(found.probs, expected, rtol=1e-8)
    assert_allclose(found.mean, found.probs)
    assert found.quantiles is None


def test_two_classes_that_vary_by_many_logits():
    """100 nodes of Gauss-Hermite have more than four logits between them."""
    guide = guide_of(lambda f: dist.Bernoulli(logits=20.0 * f))
    mean, sd = moments(guide)
    assert 15.0 < 20.0 * sd.max() < 40.0
    x = np.linspace(-9.0, 9.0, 40_001)
    weights = norm.pdf(x) / norm.pdf(x).sum()
    chance = 1.0 / (1.0 + np.exp(-20.0 * (mean[:, None] + sd[:, None] * x)))
    expected = chance @ weights
    found = sgp.predict(guide, PARAMS, X_NEW)["y"]
    assert_allclose(found.probs, expected, atol=2e-4)
    score = sgp.log_predictive_density(guide, PARAMS, X_NEW, jnp.ones(len(expected)))["y"]
    assert_allclose(np.exp(score), expected, atol=2e-4)


@pytest.mark.slow
def test_many_classes_have_probabilities_in_a_last_axis():
    softmax = guide_of(lambda f: dist.Categorical(logits=f.T), 2)
    params = {**PARAMS, "f_auto_qu_mu": jnp.array([[0.4, -1.0], [0.1, 0.3]])}
    params["f_auto_qu_sqrt"] = jnp.stack([PARAMS["f_auto_qu_sqrt"]] * 2)
    mean, sd = moments(softmax, params)
    found = sgp.predict(softmax, params, X_NEW)["y"]
    # The difference of the two functions is Gaussian.
    m, s = mean[1] - mean[0], np.sqrt(sd[0] ** 2 + sd[1] ** 2)
    expected = [
        quad(lambda x, m=m, s=s: norm.pdf(x) / (1 + np.exp(-m - s * x)), -9, 9)[0]
        for m, s in zip(m, s, strict=True)
    ]
    assert found.probs.shape == (3, 2) and found.mean is None
    assert_allclose(found.probs[:, 1], expected, rtol=1e-6)
    assert "probs[1]" in repr(found)

    largest = guide_of(lambda f: sgp.likelihoods.RobustMax(f, 0.01), 3)
    params = {**params, "f_auto_qu_mu": jnp.array([[0.4, -1.0], [0.1, 0.3], [0.0, 0.9]])}
    params["f_auto_qu_sqrt"] = jnp.stack([PARAMS["f_auto_qu_sqrt"]] * 3)
    q = largest.posterior(params, X_NEW)["f"]
    found = sgp.predict(largest, params, X_NEW)["y"].probs
    known = sgp.likelihoods.robust_max_probabilities(q.mean, q.variance, 0.01, 60)
    # 2048 quasi-random values of a step function.
    assert_allclose(found, known.T, atol=5e-3)
    assert_allclose(found.sum(axis=1), 1.0)


@pytest.mark.slow
def test_random_latents_are_averaged():
    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal())
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z), AutoNormal)
    guide.setup(X, jnp.ones(4))
    params = {**PARAMS, "noise_auto_loc": -0.2, "noise_auto_scale": 0.3}
    mean, sd = moments(guide, params)
    D = 2000
    found = sgp.predict(guide, params, X_NEW, num_draws=D, quantiles=[0.9])["y"]
    assert_allclose(found.mean, mean, rtol=1e-8)
    # E[noise^2], within five standard errors of its mean over the draws.
    square = np.exp(-0.4 + 0.18)
    error = square * np.sqrt(np.expm1(4 * 0.09) / D)
    assert (np.abs(found.sd**2 - sd**2 - square) < 5 * error).all()

    def level(y, row):
        total = np.hypot(sd[row], np.exp(-0.2 + 0.3 * GRID))
        return WEIGHTS @ norm.cdf((y - mean[row]) / total)

    for row, y in enumerate(found.quantiles[0]):
        known = brentq(lambda y, row=row: level(y, row) - 0.9, -9, 9)
        assert abs(y - known) < 0.05
        assert abs(known - norm(mean[row], np.hypot(sd[row], np.exp(-0.2))).ppf(0.9)) < 0.1


@pytest.mark.slow
def test_a_mixture_of_gaussians_has_the_quantiles_of_its_parts():
    guide = sgp.AutoSparseGP(
        model_of(lambda f: dist.Normal(f, 0.5)), sgp.MixtureSVGP(2, 2, inducing=Z)
    )
    guide.setup(X, jnp.ones(4))
    params = {
        "f_auto_Z": Z,
        "f_auto_qu_mu": jnp.array([[2.0, 1.0], [-2.0, -1.0]]),
        "f_auto_qu_sqrt": jnp.full((2, 2), 0.3),
        "f_auto_qu_logits": jnp.array([0.5, -1.0]),
    }
    q = guide.posterior(params, X_NEW)["f"]
    weights = np.exp(np.asarray(q.log_weights))
    found = sgp.predict(guide, params, X_NEW, quantiles=[0.2, 0.7])
    for name, noise, tolerance in (("f", 0.0, 1e-10), ("y", 0.5, 1e-3)):
        total = sum(
            w * norm(m, np.sqrt(v + noise**2)).cdf(found[name].quantiles)
            for w, (m, v) in zip(weights, map(q.marginals, range(2)), strict=True)
        )
        assert_allclose(total, [[0.2] * 3, [0.7] * 3], atol=tolerance)
    assert_allclose(found["f"].mean, q.mean, rtol=1e-12)


def shifted(f):
    transform = dist.transforms.AffineTransform(f, 2.0)
    return dist.TransformedDistribution(dist.Gamma(2.0, 1.0), [transform])


def of_two_parts(f):
    """A mixture of which one part has no values below 0."""
    parts = [dist.HalfNormal(jnp.ones_like(f)), dist.Normal(f, 1.0)]
    halves = dist.Categorical(jnp.full(2, 0.5))
    return dist.MixtureGeneral(halves, parts, support=dist.constraints.real)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likelihood", "known", "observed"),
    [
        (
            lambda f: dist.Uniform(f - 0.1, f + 0.1),
            lambda y, f: uniform(f - 0.1, 0.2).cdf(y),
            0.0,
        ),
        (
            lambda f: dist.Pareto(jnp.exp(f), 3.0),
            lambda y, f: pareto(3.0, scale=np.exp(f)).cdf(y),
            9.0,
        ),
        (shifted, lambda y, f: gamma(2.0, f, 2.0).cdf(y), 3.0),
        (of_two_parts, lambda y, f: 0.5 * (halfnorm.cdf(y) + norm(f, 1.0).cdf(y)), 1.0),
        (
            lambda f: dist.DiscreteUniform(jnp.floor(f), jnp.floor(f) + 3),
            lambda y, f: randint(np.floor(f), np.floor(f) + 4).cdf(y),
            1,
        ),
    ],
    ids=["uniform", "pareto", "shifted", "of two parts", "discrete"],
)
def test_quantiles_where_the_support_depends_on_f(likelihood, known, observed):
    guide = guide_of(likelihood, y=jnp.full(4, observed))
    mean, sd = moments(guide)
    levels = np.array([0.05, 0.5, 0.95])
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=levels)["y"].quantiles
    grid = np.linspace(-9.0, 9.0, 4001)  # fine: integrands have kinks and steps
    f = mean[:, None] + sd[:, None] * grid

    def cdf(y):
        return known(y[..., None], f) @ norm.pdf(grid) * (grid[1] - grid[0])

    levels = np.broadcast_to(levels[:, None], found.shape)
    if isinstance(observed, int):
        assert (cdf(found) >= levels).all() and (cdf(found - 1.0) < levels).all()
    else:
        assert_allclose(cdf(found), levels, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("high", [None, slow(1.5)])
def test_a_truncation_may_be_far_above_f(high):
    """Some values of f are thirty standard deviations of the response below zero."""
    noise, top = 0.1, np.inf if high is None else high
    guide = guide_of(lambda f: dist.TruncatedNormal(f, noise, low=0.0, high=high))
    mean, sd = moments(guide)
    levels = np.array([0.05, 0.5, 0.95])
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=levels)["y"]
    f = mean[:, None] + sd[:, None] * GRID
    known = truncnorm(-f / noise, (top - f) / noise, f, noise)
    got = known.cdf(np.asarray(found.quantiles)[..., None]) @ WEIGHTS
    assert_allclose(got, np.broadcast_to(levels[:, None], got.shape), atol=2e-3)
    if high is None:
        expected = known.mean() @ WEIGHTS
        square = (known.var() + known.mean() ** 2) @ WEIGHTS
        # A hundred nodes, three to a standard deviation, for what nearly has a kink.
        assert_allclose(found.mean, expected, rtol=5e-3)
        assert_allclose(found.sd, np.sqrt(square - expected**2), rtol=5e-3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_quantiles_of_many_orders_of_magnitude(dtype):
    """Halves of what is between 0 and an sd of 1e30 do not lead to 1 in 60 steps."""
    levels, m, s = np.array([0.05, 0.5, 0.95]), np.array([-30.0, 0.0, 6.0, 20.0]), 9.0
    log = lambda y: jnp.log(jnp.maximum(y, jnp.finfo(dtype).tiny))  # noqa: E731
    below = lambda y: jnp.where(y > 0, jax.scipy.special.ndtr((log(y) - m) / s), 0.0)  # noqa: E731
    expected = m + s * norm.ppf(levels)[:, None]
    mean = jnp.full(4, 1e15, dtype)
    sd = jnp.full(4, 1e30, dtype)
    asked = jnp.asarray(levels, dtype)
    for end in 0.0, -np.inf:
        found = solved(lambda y, _: below(y).astype(dtype), asked, mean, sd, (end, np.inf))
        assert_allclose(np.log(found), expected, atol=2e-4 if dtype == np.float32 else 1e-7)
    # As large ones of the other sign, and whole numbers.
    found = solved(
        lambda y, _: (1.0 - below(-y)).astype(dtype), asked, mean, sd, (-np.inf, 0.0)
    )
    assert_allclose(np.log(-found[::-1]), expected, atol=2e-4)
    whole = lambda y, _: below(jnp.floor(y) + 1.0).astype(dtype)  # noqa: E731
    found = solved(whole, asked, mean, sd, (0.0, np.inf), discrete=True)
    assert_allclose(found, np.ceil(np.exp(expected)) - 1.0, rtol=1e-3)


@pytest.mark.slow
def test_quantiles_are_not_numbers_where_the_cdf_is_none():
    nan = jnp.array([1.0, jnp.nan])
    found = solved(
        lambda y, _: norm.cdf(0.0) + 0.0 * y + jnp.minimum(y, 0.4) * nan,
        jnp.array([0.6]),
        jnp.zeros(2),
        jnp.ones(2),
    )
    assert np.isfinite(found[0, 0]) and np.isnan(found[0, 1])


@pytest.mark.slow
def test_angles_have_the_moments_of_numbers():
    guide = guide_of(lambda f: dist.VonMises(f, 2.0))
    mean, sd = moments(guide)
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=())["y"]
    y = np.linspace(-np.pi, np.pi, 2001)
    f = mean[:, None, None] + sd[:, None, None] * GRID
    density = vonmises(2.0, f).pdf(y[:, None]) @ WEIGHTS
    density /= density.sum(axis=1, keepdims=True)
    known = density @ y
    spread = np.sqrt(density @ y**2 - known**2)
    # 2048 draws or so: five standard errors.
    assert_allclose(found.mean, known, atol=5 * spread.max() / 45)
    assert_allclose(found.sd, spread, rtol=0.07)


@pytest.mark.slow
def test_what_has_no_cdf_is_drawn():
    guide = guide_of(lambda f: dist.NegativeBinomial2(jnp.exp(f + 2.0), 3.0))
    mean, sd = moments(guide)
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=[0.5])["y"]
    assert_allclose(found.mean, np.exp(mean + 2.0 + sd**2 / 2), rtol=1e-10)
    rng = np.random.default_rng(0)
    rate = np.exp(mean + 2.0 + sd * rng.normal(size=(40_000, 3)))
    y = nbinom(3.0, 3.0 / (3.0 + rate)).rvs(random_state=rng)
    # 2048 draws: the level has a standard error of 0.011 at most.
    assert (np.mean(y <= found.quantiles[0], axis=0) > 0.5 - 0.055).all()
    assert (np.mean(y < found.quantiles[0], axis=0) < 0.5 + 0.055).all()


@pytest.mark.slow
def test_without_levels_there_are_no_quantiles():
    guide = guide_of(lambda f: dist.Poisson(jnp.exp(f)))
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=())
    known = sgp.predict(guide, PARAMS, X_NEW)
    for name in ("f", "y"):
        assert found[name].quantiles.shape == (0, 3)
        assert_allclose(found[name].mean, known[name].mean, rtol=1e-12)
        assert_allclose(found[name].sd, known[name].sd, rtol=1e-12)


@pytest.mark.slow
def test_rows_in_batches_are_the_rows_at_once():
    def model(X, offset, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            fn = dist.Normal(f.T + offset[:, None], 0.3).to_event(1)
            numpyro.sample("y", fn, obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.zeros(4), jnp.zeros((4, 2)))
    params = {**PARAMS, "f_auto_qu_mu": jnp.array([[0.4, -1.0], [0.1, 0.3]])}
    params["f_auto_qu_sqrt"] = jnp.stack([PARAMS["f_auto_qu_sqrt"]] * 2)
    args = jnp.linspace(-2.0, 2.0, 5)[:, None], jnp.arange(5.0)
    whole = sgp.predict(guide, params, *args)
    parts = sgp.predict(guide, params, *args, batch_size=3)
    assert whole["f"].mean.shape == (2, 5) and whole["y"].quantiles.shape == (2, 5, 2)
    for name in whole:
        assert_allclose(parts[name].mean, whole[name].mean, rtol=1e-12)
        # Quasi-random numbers are those of the shape of a batch.
        assert_allclose(parts[name].quantiles, whole[name].quantiles, atol=2e-2)
        frame = whole[name].to_dataframe()
        by_row = whole[name].mean.T if name == "f" else whole[name].mean
        assert_allclose(frame["mean[1]"], by_row[:, 1])
    frame = whole.to_dataframe()
    assert frame.shape == (5, 16) and list(frame["y"])[:2] == ["mean[0]", "mean[1]"]


def test_one_table_is_of_the_same_rows():
    def of(number):
        return Prediction(np.zeros(number), np.ones(number), None, (), None, -1)

    frame = Predictions({"f": of(4), "level": of(1), "y": of(4)}).to_dataframe()
    assert frame.shape == (4, 6)
    with pytest.raises(ValueError, match="4 of 'f', 2 of 'y'.*one for each"):
        Predictions({"f": of(4), "y": of(2)}).to_dataframe()


def test_digits_beside_an_offset_are_shown():
    """Of a pressure of 101325 with an sd of a half, mean and quantiles were 1.013e+05."""
    mean, sd = np.array([101325.14, 99.0]), np.array([0.5, np.nan])
    levels = np.array([[101324.3, 1.0]])
    found = Prediction(mean, sd, levels, (0.05,), probs=None, row_axis=-1)
    assert "101325.14 0.5 101324.3" in " ".join(repr(found).split())


def test_a_table_of_the_first_rows_is_shown():
    guide = guide_of(lambda f: dist.Normal(f, 0.6))
    lines = repr(sgp.predict(guide, PARAMS, jnp.linspace(0, 1, 9)[:, None])).splitlines()
    assert lines[0] == "f" and lines[1].split() == ["mean", "sd", "5%", "95%"]
    assert lines[2].split()[0] == "0" and lines[7] == "... 9 rows" and lines[8] == "y"


@pytest.mark.slow
def test_deep_gps_are_averaged_over_their_inner_layers():
    def model(X, y=None):
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), h[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4))
    params = {**PARAMS, **{k.replace("f_", "h_"): 0.9 * v for k, v in PARAMS.items()}}
    D = 4000
    found = sgp.predict(guide, params, X_NEW, num_draws=D)
    q = guide.posterior(params, X_NEW)["h"]
    assert_allclose(found["h"].mean, q.mean, rtol=1e-12)
    for row in range(3):

        def moment(x, power, row=row):
            h = q.mean[row] + np.sqrt(q.variance[row]) * x
            inner = sgp.SparsePosterior(
                sgp.GaussianProcess(sgp.kernels.RBF(), h.reshape(-1, 1)),
                (Z,),
                guide.posterior(params, X_NEW)["f"].given_q,
            )
            return inner.mean**power if power else inner.variance + 0.04

        x, w = np.polynomial.hermite_e.hermegauss(60)
        w = w / w.sum()
        mean = w @ moment(x, 1)
        spread = w @ moment(x, 2) - mean**2
        # Five standard errors of the mean over draws of h.
        assert abs(found["y"].mean[row] - mean) < 5 * np.sqrt(spread / D) + 1e-12
        assert_allclose(found["y"].sd[row] ** 2, spread + w @ moment(x, 0), rtol=0.05)


@pytest.mark.slow
def test_what_cannot_be_predicted_is_refused_or_left_out():
    def chained(X, y=None, z=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            y = numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
            numpyro.sample("z", dist.Normal(f + y, 0.3), obs=z)

    guide = sgp.AutoSparseGP(chained, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4), jnp.ones(4))
    with pytest.raises(ValueError, match=r"\['z'\] depend on the value of response 'y'"):
        sgp.predict(guide, PARAMS, X_NEW)
    known = sgp.predict(guide, PARAMS, X_NEW, jnp.full(3, 2.0))
    assert_allclose(known["z"].mean, known["f"].mean + 2.0, rtol=1e-12)

    black_box = guide_of(partial(sgp.BlackBox, lambda y, f: y * f - np.exp(f)))
    found = sgp.predict(black_box, PARAMS, X_NEW, jnp.ones(3))
    assert list(found) == ["f"]
    with pytest.raises(KeyError, match="'y' is not predicted.*BlackBox"):
        found["y"]
    with pytest.raises(KeyError, match="'nowhere'"):
        found["nowhere"]
    with pytest.raises(ValueError, match="between 0 and 1"):
        sgp.predict(black_box, PARAMS, X_NEW, quantiles=[5, 95])
    for wrong in (jnp.nan, jnp.inf):  # infinitely far away is the prior, without a word
        X_wrong = X_NEW.at[0].set(wrong)
        with pytest.raises(ValueError, match="NaN or infinite"):
            sgp.predict(black_box, PARAMS, X_wrong, jnp.ones(3))
        with pytest.raises(ValueError, match="NaN or infinite"):
            sgp.Predictor(black_box, PARAMS)(X_wrong, jnp.ones(3))
        with pytest.raises(ValueError, match="NaN or infinite"):
            sgp.log_predictive_density(black_box, PARAMS, X_wrong, jnp.ones(3))


class OnlyDensity(dist.Distribution):
    """A user's own, as some are written."""

    support = dist.constraints.real

    def __init__(self, f):
        self.f = f
        super().__init__(jnp.shape(f))

    def log_prob(self, value):
        return -jnp.logaddexp(0.0, (value - self.f) ** 2)


class WithCdf(OnlyDensity):
    def cdf(self, value):
        return jax.scipy.special.ndtr(value - self.f)


def test_what_is_left_out_is_told():
    guide = guide_of(OnlyDensity, y=jnp.ones(4))
    with pytest.warns(UserWarning, match="'y' is not predicted.*OnlyDensity.* no cdf"):
        found = sgp.predict(guide, PARAMS, X_NEW)
    assert list(found) == ["f"]
    with pytest.raises(KeyError, match="'y' is not predicted"):
        found["y"]


def test_options_of_others_are_told():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        rate = numpyro.deterministic("rate", jnp.exp(f))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(2))
    svi = SVI(model, guide, Adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X_NEW, jnp.ones(len(X_NEW))))
    key = jax.random.key(0)
    with pytest.raises(TypeError, match=r"'num_samples' is no option.*sample_shape"):
        guide.sample_posterior(key, params, X_NEW, num_samples=3)
    for wrong, near in ("key", "rng_key"), ("quantile", "quantiles"):
        with pytest.raises(TypeError, match=f"'{wrong}' is no option.*Is {near}=..."):
            sgp.predict(guide, params, X_NEW, **{wrong: 0})
    draws = guide.sample_posterior(key, params, X_NEW, sample_shape=(3,))
    assert draws["rate"].shape == (3, len(X_NEW))


@pytest.mark.slow
def test_what_has_only_a_cdf_has_quantiles():
    found = sgp.predict(guide_of(WithCdf, y=jnp.ones(4)), PARAMS, X_NEW)
    f, y = found["f"], found["y"]
    assert np.isnan(y.mean).all() and np.isnan(y.sd).all()
    known = f.mean + np.sqrt(f.sd**2 + 1.0) * norm.ppf([[0.05], [0.95]])
    assert_allclose(y.quantiles, known, atol=3e-3)  # 512 values of f


def test_second_predictions_compile_nothing(count_compiled):
    guide = guide_of(lambda f: dist.Normal(f, 0.6))
    sgp.predict(guide, PARAMS, X_NEW)
    moved, X_moved = jax.tree.map(lambda v: 1.1 * v, PARAMS), X_NEW + 0.1
    count_compiled()
    sgp.predict(guide, moved, X_moved, rng_key=jax.random.key(1))
    assert count_compiled() == 0


def of_two(f):
    """Logits of two classes."""
    return jnp.stack([f, jnp.zeros_like(f)], axis=-1)


VECTORS = {
    "multinomial": (
        lambda f, n: dist.Multinomial(n, logits=of_two(f)),
        lambda f, n: dist.Binomial(n, logits=f),
        jnp.array([[2, 1], [4, 0], [0, 6], [3, 2]]),
    ),
    "dirichlet": (
        lambda f, n: dist.Dirichlet(jnp.exp(of_two(f)) + n[:, None]),
        lambda f, n: dist.Beta(jnp.exp(f) + n, 1.0 + n),
        jnp.full((4, 2), 0.5),
    ),
    "dirichlet-multinomial": (
        lambda f, n: dist.DirichletMultinomial(jnp.exp(of_two(f)), n),
        lambda f, n: dist.BetaBinomial(jnp.exp(f), 1.0, n),
        jnp.array([[2, 1], [4, 0], [0, 6], [3, 2]]),
    ),
    "normal": (
        lambda f, n: dist.MultivariateNormal(of_two(f), jnp.array([[0.5, 0.3], [0.3, 1]])),
        lambda f, n: dist.Normal(f, jnp.sqrt(0.5)),
        jnp.zeros((4, 2)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k == "multinomial" else slow(k) for k in VECTORS])
def test_entries_of_vectors_have_the_predictions_of_numbers(kind):
    """Of multinomial counts too, whose totals are an argument: NumPyro draws no such."""
    vector, number, y = VECTORS[kind]

    def predicted(likelihood, y):
        def model(X, n, y=None):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", likelihood(f, n), obs=y)

        guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
        guide.setup(X, jnp.array([3, 4, 6, 5]), y)
        levels = 0.05, 0.5, 0.9
        return sgp.predict(guide, PARAMS, X_NEW, jnp.array([7, 2, 9]), quantiles=levels)

    found, expected = (predicted(*p)["y"] for p in ((vector, y), (number, y[:, 0])))
    assert found.mean.shape == (3, 2) and found.quantiles.shape == (3, 3, 2)
    assert_allclose(found.mean[:, 0], expected.mean, rtol=1e-8)
    assert_allclose(found.sd[:, 0], expected.sd, rtol=1e-8)
    # Those of beta-binomials are of draws.
    atol = 1.0 if kind == "dirichlet-multinomial" else 1e-6
    assert_allclose(found.quantiles[..., 0], expected.quantiles, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.Normal(f, 0.3),
        slow(lambda f: dist.StudentT(4.0, f, 0.3)),
        slow(lambda f: dist.Gamma(3.0, 3.0 * jnp.exp(-f))),
    ],
)
def test_predictions_inside_of_jit_have_derivatives(likelihood):
    guide = guide_of(likelihood, y=jnp.ones(4))

    def at(X):
        found = sgp.predict(guide, PARAMS, X)
        parts = [jnp.stack([p.mean, p.sd, *p.quantiles]) for p in found.values()]
        return jnp.stack(parts)

    along = jnp.array([0.3, -0.5, 1.0])[:, None]
    by_row = jax.jit(jax.vmap(at))(X_NEW[:, None])[..., 0]
    assert_allclose(np.moveaxis(by_row, 0, -1), at(X_NEW), rtol=1e-9)
    step = 1e-5
    known = (at(X_NEW + step * along) - at(X_NEW - step * along)) / (2 * step)
    slopes = jax.jit(jax.jacrev(at))(X_NEW)  # of central differences, right to 1e-8 or so
    assert_allclose(jnp.sum(slopes * along, (-2, -1)), known, atol=1e-5)


@pytest.mark.slow
def test_means_have_derivatives_where_quantiles_have_none():
    for likelihood, value in (
        (lambda f: dist.Poisson(jnp.exp(f)), 2.0),
        (lambda f: dist.Beta(2.0, 2.0 + f**2), 0.5),
    ):
        guide = guide_of(likelihood, y=jnp.full(4, value))

        def mean(X, guide=guide):
            return sgp.predict(guide, PARAMS, X)["y"].mean.sum()

        slope = jax.jit(jax.grad(mean))(X_NEW)[1, 0]
        ends = mean(X_NEW.at[1, 0].add(1e-5)), mean(X_NEW.at[1, 0].add(-1e-5))
        assert_allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-5)


def test_angles_that_may_be_beyond_the_cut_are_told():
    """A mean of zero of what is about pi."""
    guide = guide_of(lambda f: dist.VonMises(f, 20.0))
    trace = guide.prototype_trace

    def predicted(mean, sd):
        found = Prediction(np.array([mean]), np.array([sd]), None, (), None, 0)
        return {"y": found, "f": found}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_angles(trace, predicted(2.7, 0.22))
    with pytest.warns(UserWarning, match="'y' is an angle, and 1 predicted ones"):
        warn_of_angles(trace, predicted(0.1, 3.0))

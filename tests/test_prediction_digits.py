"""Predictions where nodes or JAX's functions have too few digits, beside SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal
from scipy.integrate import quad
from scipy.stats import (
    binom,
    chi2,
    gamma,
    invgamma,
    nbinom,
    norm,
    poisson,
    truncnorm,
    weibull_min,
)
from scipy.stats import t as student

import numpyro_sgp as sgp
from numpyro_sgp.likelihoods import RobustMax, robust_max_probabilities
from numpyro_sgp.predictive import cumulative

Z = np.array([[0.0], [1.0], [2.0]])
LEVELS = np.array([0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99])


def at(likelihood, sd, y, mean=0.0, functions=()):
    """A guide and parameters with q(f) = N(mean, sd^2) at the inducing points."""

    def model(X, y=None):
        prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X, mean=mean)
        f = numpyro.sample("f", prior.expand(list(functions)))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z, train_inducing=False))
    guide.setup(jnp.asarray(Z), y)
    root = jnp.broadcast_to(sd * jnp.eye(3), (*functions, 3, 3))
    return guide, {"f_auto_qu_mu": jnp.zeros((*functions, 3)), "f_auto_qu_sqrt": root}


@pytest.mark.slow
def test_tails_of_responses_have_the_nodes_of_all_draws():
    """Little noise, far from the data: y is as wide as f, whose sd is one."""

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.01))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.05), obs=y)

    X = jnp.linspace(0.0, 3.0, 20)[:, None]
    data, options = (X, jnp.sin(X[:, 0])), {"steps": 20, "progress_bar": False}
    fitted = sgp.fit(model, sgp.SVGP(8), data, base_guide=AutoNormal, **options)
    found = fitted.predict(jnp.array([[9.0]]), quantiles=LEVELS)["y"].quantiles[:, 0]
    reached = norm.cdf(found, scale=np.sqrt(1.0 + 0.05**2))
    np.testing.assert_allclose(reached, LEVELS, atol=1e-3)  # a midpoint's probability


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(0.0, 1.0), (None, 0.6), (0.0, None)])
def test_truncated_responses_are_integrals(limits):
    """With f some sds on either side of the limits, beside sums over a fine grid."""
    low, high = limits
    given = {k: v for k, v in {"low": low, "high": high}.items() if v is not None}

    def likelihood(f):
        return dist.TruncatedNormal(f, 0.1, **given)

    guide, params = at(likelihood, 1.0, jnp.full(3, 0.5), mean=0.5)
    X = jnp.asarray(Z)
    found = sgp.predict(guide, params, X, quantiles=())["y"]
    density = sgp.log_predictive_density(guide, params, X, jnp.full(3, 0.5))["y"]
    f = 0.5 + np.linspace(-8.0, 8.0, 4001)
    weights = norm.pdf(f - 0.5) * (f[1] - f[0])
    ends = [-np.inf if low is None else low, np.inf if high is None else high]
    exact = truncnorm(*((end - f) / 0.1 for end in ends), loc=f, scale=0.1)
    mean, second = (weights @ cumulative_moment(likelihood, f, k) for k in (1, 2))
    # Rules of 100 nodes over functions with bends at the limits: some 1e-3.
    np.testing.assert_allclose(found.mean, mean, atol=2e-3)
    np.testing.assert_allclose(found.sd, np.sqrt(second - mean**2), atol=5e-3)
    expected = np.log(weights @ np.exp(exact.logpdf(0.5)))
    np.testing.assert_allclose(density, expected, atol=1e-2)


def cumulative_moment(likelihood, f, power):
    """Moments that `tests/distributions/test_truncated.py` compares with integrals."""
    mean, variance = map(np.asarray, cumulative.moments(likelihood(jnp.asarray(f))))
    return mean if power == 1 else variance + mean**2


@pytest.mark.quick(2)
@pytest.mark.parametrize("df", [1.0, 1.5, 2.5, 6.0])
@pytest.mark.parametrize("limits", [(-1.0, None), (3.0, None), (None, -2.0), (-1.0, 2.0)])
def test_truncated_student_responses_are_integrals(limits, df):
    """Which NumPyro neither draws (without TensorFlow Probability) nor has moments of."""
    low, high = limits
    base = dist.StudentT(df, 0.3, 0.5)
    fn = {
        (True, False): lambda: dist.LeftTruncatedDistribution(base, low=low),
        (False, True): lambda: dist.RightTruncatedDistribution(base, high=high),
        (True, True): lambda: dist.TwoSidedTruncatedDistribution(base, low=low, high=high),
    }[low is not None, high is not None]()
    whole = student(df, 0.3, 0.5)
    ends = -np.inf if low is None else low, np.inf if high is None else high

    def integral(g):
        middle = np.clip(0.3, *ends)
        of_y = lambda y: g(y) * whole.pdf(y)  # noqa: E731
        parts = (ends[0], middle), (middle, ends[1])
        return sum(quad(of_y, *part, epsrel=1e-11)[0] for part in parts)

    found, variance = cumulative.moments(fn)
    if df == 1.0 and None in limits:
        assert found == (np.inf if high is None else -np.inf)
        return
    total = integral(lambda y: 1.0)
    mean = integral(lambda y: y) / total
    np.testing.assert_allclose(found, mean, rtol=1e-7)
    if df > 2.0:
        known = integral(lambda y: (y - mean) ** 2) / total
        np.testing.assert_allclose(variance, known, rtol=1e-6)
    else:
        assert np.isnan(variance) if None not in limits else np.isposinf(variance)


def test_near_limits_of_a_student_response_keep_their_digits():
    base = dist.StudentT(1.5, 0.0, 2.0)
    fn = dist.TwoSidedTruncatedDistribution(base, low=5.0, high=5.002)
    mean, variance = cumulative.moments(fn)
    # The density is next to a straight line there: a uniform one, but for its slope.
    np.testing.assert_allclose(mean, 5.001, atol=1e-6)
    np.testing.assert_allclose(variance, 0.002**2 / 12.0, rtol=1e-5)


@pytest.mark.slow
def test_a_truncated_student_response_is_predicted():
    likelihood = lambda f: dist.LeftTruncatedDistribution(  # noqa: E731
        dist.StudentT(5.0, f, 0.5), low=-1.0
    )
    guide, params = at(likelihood, 1e-6, jnp.ones(3), mean=0.3)
    found = sgp.predict(guide, params, jnp.asarray(Z), quantiles=LEVELS)["y"]
    whole = student(5.0, 0.3, 0.5)
    below = whole.cdf(-1.0)
    known = whole.ppf(below + (1.0 - below) * LEVELS)
    np.testing.assert_allclose(found.quantiles[:, 0], known, rtol=1e-2)
    assert np.isfinite(found.mean).all() and np.isfinite(found.sd).all()


@pytest.mark.slow
def test_a_truncated_likelihood_can_be_fitted():
    """Nodes of f far outside of the limits were infinitely likely."""

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.TruncatedNormal(f, noise, low=0.0, high=1.0), obs=y)

    rng = np.random.default_rng(0)
    X = np.linspace(0.0, 3.0, 30)[:, None]
    y = np.clip(0.5 + 0.4 * np.sin(2.0 * X[:, 0]) + 0.05 * rng.normal(size=30), 0.01, 0.99)
    fitted = sgp.fit(model, sgp.SVGP(8), (X, y), progress_bar=False)
    assert np.isfinite(fitted.bound)
    assert np.abs(fitted.predict(X, quantiles=())["y"].mean - y).mean() < 0.08


@pytest.mark.slow
def test_of_two_classes_the_larger_function_is_no_tie_of_nodes():
    """Far from the data both functions are alike: each is the larger in half of cases."""
    guide, params = at(RobustMax, 0.5, jnp.array([0, 1, 0]), functions=(2,))
    X = jnp.array([[0.5], [40.0]])
    found = sgp.predict(guide, params, X)["y"].probs
    q = guide.posterior(params, X)["f"]
    exact = robust_max_probabilities(q.mean, q.variance).T
    np.testing.assert_allclose(exact, 0.5, atol=1e-12)
    np.testing.assert_allclose(found, exact, atol=5e-3)  # of 2,048 Sobol points
    density = sgp.log_predictive_density(guide, params, X, jnp.zeros(2, int))["y"]
    np.testing.assert_allclose(density, np.log(exact[:, 0]), atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_labels_of_masked_rows_are_no_numbers_of_the_bound(classes):
    mean, variance = jnp.zeros((classes, 2)), jnp.ones((classes, 2))

    def total(mean):
        found = RobustMax(mean).expected_log_prob(mean, variance, jnp.array([0, -1]))
        return jnp.sum(jnp.where(jnp.array([True, False]), found, 0.0))

    assert np.isfinite(jax.grad(total)(mean)).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("sds", [(1.0, 0.1), (1.0, 0.1, 0.3), (1.0, 1.0, 1.0)])
def test_the_largest_of_functions_of_unlike_variances(sds):
    """Beside a Riemann sum over the label's function."""
    mean, sds = np.array([0.5, 0.0, 0.2])[: len(sds)], np.array(sds)
    found = robust_max_probabilities(mean[:, None], sds[:, None] ** 2, 0.0)[:, 0]
    for own in range(len(sds)):
        f = mean[own] + sds[own] * np.linspace(-9.0, 9.0, 20_001)
        below = norm.cdf((f[:, None] - mean) / sds)
        below[:, own] = 1.0
        total = np.sum(norm.pdf(f, mean[own], sds[own]) * below.prod(1)) * (f[1] - f[0])
        assert abs(found[own] - total) < (1e-9 if len(sds) == 2 else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exact", "fn"),
    [
        (nbinom(5.0, 5.0 / (5.0 + 1e6)), lambda: dist.NegativeBinomial2(1e6, 5.0)),
        (nbinom(50.0, 50.0 / (50.0 + 1e5)), lambda: dist.NegativeBinomial2(1e5, 50.0)),
        (nbinom(3e3, 0.5), lambda: dist.NegativeBinomial2(3e3, 3e3)),
        (nbinom(0.3, 0.3 / (0.3 + 1e6)), lambda: dist.NegativeBinomial2(1e6, 0.3)),
        (poisson(9e3), lambda: dist.Poisson(9e3)),
        (poisson(1e6), lambda: dist.Poisson(1e6)),
        (poisson(50.0), lambda: dist.Poisson(50.0)),
        (gamma(6e4, scale=0.7 / 6e4), lambda: dist.Gamma(6e4, 6e4 / 0.7)),
        (gamma(1e8, scale=0.7 / 1e8), lambda: dist.Gamma(1e8, 1e8 / 0.7)),
        (gamma(40.0, scale=0.1), lambda: dist.Gamma(40.0, 10.0)),
        (invgamma(6e4, scale=4e4), lambda: dist.InverseGamma(6e4, 4e4)),
        (invgamma(1e7, scale=7e6), lambda: dist.InverseGamma(1e7, 7e6)),
        (chi2(1e6), lambda: dist.Chi2(1e6)),
        (binom(500, 0.02), lambda: dist.Binomial(500, 0.02)),
        (binom(10**6, 0.3), lambda: dist.Binomial(10**6, 0.3)),
        (binom(20, 0.3), lambda: dist.Binomial(20, logits=np.log(0.3 / 0.7))),
    ],
)
def test_levels_of_large_counts_and_shapes_in_float32(exact, fn):
    with jax.enable_x64(False):
        y = exact.ppf(LEVELS).astype(np.float32)
        found = cumulative.cdf(fn(), jnp.asarray(y))
    assert found.dtype == jnp.float32
    # Of a shape of 1e8 y is known to a thousandth of its sd.
    np.testing.assert_allclose(found, exact.cdf(y.astype(float)), atol=6e-4)


@pytest.mark.slow
def test_gamma_responses_of_next_to_no_noise_in_float32():
    with jax.enable_x64(False):
        shape, level = 1e7, 0.3
        likelihood = lambda f: dist.Gamma(shape, shape * jnp.exp(-f))  # noqa: E731
        guide, params = at(likelihood, 1e-6, jnp.ones(3), mean=level)
        f = guide.posterior(params, jnp.asarray(Z, jnp.float32))["f"]
        options = {"quantiles": LEVELS}
        found = sgp.predict(guide, params, jnp.asarray(Z, jnp.float32), **options)["y"]
    scale = np.sqrt(f.variance + 1.0 / shape)[0]  # log-normal, but for what is a millionth
    known = np.exp(norm(f.mean[0], scale).ppf(LEVELS))
    np.testing.assert_allclose(found.quantiles[:, 0], known, rtol=0.05 * scale)


@pytest.mark.slow
def test_censored_responses_are_predicted_without_draws():
    """As what would be seen without a limit, which is what NumPyro draws."""

    def likelihood(f):
        plain = dist.Weibull(jnp.exp(f), 2.0)
        return dist.RightCensoredDistribution(plain, jnp.array([True, False, True]))

    guide, params = at(likelihood, 1e-6, jnp.array([1.0, 2.0, 0.5]), mean=0.3)
    guide_found = sgp.predict(guide, params, jnp.asarray(Z), quantiles=LEVELS)["y"]
    exact = weibull_min(2.0, scale=np.exp(0.3))
    # q(f) is a point but for the jitter of K_uu.
    np.testing.assert_allclose(guide_found.mean, exact.mean(), rtol=1e-3)
    np.testing.assert_allclose(guide_found.sd, exact.std(), rtol=1e-3)
    np.testing.assert_allclose(guide_found.quantiles[:, 0], exact.ppf(LEVELS), rtol=1e-2)


@pytest.mark.parametrize("size", [1e12, 1e24])
def test_levels_of_huge_shapes_are_found_at_once_in_float64(size):
    """JAX's series has as many terms as the square root of the shape."""
    z = np.array([-2.0, 0.0, 1.0])
    values = size + np.sqrt(size) * z
    for fn in (dist.Gamma(size, 1.0), dist.Poisson(size)):
        found = cumulative.cdf(fn, values)
        # Such values have some 2e-16 sqrt(size) digits of a standard deviation.
        np.testing.assert_allclose(found, norm.cdf(z), atol=1e-6 + 1e-15 * np.sqrt(size))

"""Truncated normal distributions whose limits are far away, beside SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.integrate import quad
from scipy.stats import truncnorm

from numpyro_sgp.distributions.truncated import with_digits
from numpyro_sgp.predictive import cumulative

#: Mode, scale, limits, and a value.
CASES = [
    (0.0, 1.0, 0.0, None, 0.5),
    (-5.0, 0.1, 0.0, None, 0.001),
    (3.0, 0.1, 0.0, None, 2.9),
    (5.0, 0.1, None, 0.0, -0.002),
    (0.5, 0.1, 0.0, 1.0, 0.4),
    (-1.0, 0.1, 0.0, 1.0, 0.01),
    (3.0, 0.1, 0.0, 1.0, 0.99),
    (3.0, 1.0, 0.0, 1.0, 0.5),
    (0.0, 10.0, 0.0, 1.0, 0.3),
]


def both(loc, scale, low, high):
    """NumPyro's, and SciPy's."""
    given = {k: v for k, v in {"low": low, "high": high}.items() if v is not None}
    ends = [-np.inf if low is None else low, np.inf if high is None else high]
    a, b = ((end - loc) / scale for end in ends)
    fn = dist.TruncatedNormal(jnp.array([loc]), scale, **given)
    return fn, truncnorm(a, b, loc=loc, scale=scale)


@pytest.mark.parametrize(("loc", "scale", "low", "high", "value"), CASES)
def test_densities_and_levels_are_those_of_scipy(loc, scale, low, high, value):
    fn, exact = both(loc, scale, low, high)
    found = with_digits(fn).log_prob(jnp.array([value]))
    np.testing.assert_allclose(found, exact.logpdf([value]), rtol=1e-7)
    level = cumulative.cdf(fn, jnp.array([value]))
    np.testing.assert_allclose(level, exact.cdf([value]), rtol=1e-6)


@pytest.mark.parametrize(("loc", "scale", "low", "high", "value"), CASES)
def test_moments_are_integrals(loc, scale, low, high, value):
    """Of the density over where it is not next to nothing, by adaptive quadrature."""
    fn, exact = both(loc, scale, low, high)
    ends = exact.ppf([1e-14, 1 - 1e-14])
    ends = [e if np.isfinite(e) else loc for e in ends]

    def integral(g):
        return quad(lambda y: g(y) * np.exp(exact.logpdf(y)), *ends, epsabs=0, limit=200)[0]

    mean = integral(lambda y: y)
    variance = integral(lambda y: (y - mean) ** 2)
    found = cumulative.moments(fn)
    # Quadrature's own errors, and of variances 15 scales outside 5e-5 of a series.
    np.testing.assert_allclose(found[0], mean, rtol=1e-6)
    np.testing.assert_allclose(found[1], variance, rtol=1e-4)


def test_infinite_limits_are_none():
    """Of arrays some may be."""

    def density(loc, low, high):
        fn = dist.TruncatedNormal(loc, 2.0, low=low, high=high)
        return with_digits(fn).log_prob(0.5)

    for low, high in ((0.0, jnp.inf), (-jnp.inf, 1.0), (-jnp.inf, jnp.inf)):
        for loc in (-9.0, 0.3, 40.0):
            given = dist.TruncatedNormal(jnp.array(loc), 2.0, low=low, high=high)
            exact = truncnorm((low - loc) / 2.0, (high - loc) / 2.0, loc=loc, scale=2.0)
            np.testing.assert_allclose(
                density(loc, low, high), exact.logpdf(0.5), rtol=1e-7
            )
            assert np.isfinite(jax.grad(density)(loc, low, high))
            mean, variance = cumulative.moments(given)
            np.testing.assert_allclose(mean, exact.mean(), rtol=1e-5)
            np.testing.assert_allclose(variance, exact.var(), rtol=1e-3)


def test_wrappers_stay_and_gradients_are_finite():
    fn, _ = both(-30.0, 1.0, 0.0, None)
    wrapped = with_digits(
        fn.expand([3, 1]).to_event(1).mask(jnp.array([True, False, True]))
    )
    found = wrapped.log_prob(jnp.full((3, 1), 0.01))
    assert found.shape == (3,) and found[1] == 0.0 and np.isfinite(found).all()

    def density(loc, **limits):
        return with_digits(dist.TruncatedNormal(loc, 1.0, **limits)).log_prob(0.5)

    for limits in ({"low": 0.0}, {"high": 1.0}, {"low": 0.0, "high": 1.0}):
        slope = jax.vmap(jax.grad(lambda loc, limits=limits: density(loc, **limits)))
        assert np.isfinite(slope(jnp.array([-60.0, -1.0, 0.5, 2.0, 60.0]))).all()
    other = dist.Normal(0.0, 1.0).expand([2])
    assert with_digits(other) is other

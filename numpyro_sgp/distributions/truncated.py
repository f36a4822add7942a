r"""
Normal distributions cut off far from where they have their mass.

NumPyro takes the log of :math:`\Phi(b) - \Phi(a)`, which is :math:`-\infty`, and a log
density of :math:`+\infty`, where limits are some scales away: integrals over f go there.
Here it is taken of logs, on the side where both numbers are small.
"""

import copy
import functools
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import log_ndtr
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro.distributions.util import validate_sample

_WRAPPERS = dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution
# Scales from the mode to a limit from which moments are those of an exponential
# distribution: the differences of large numbers that they are lose too many digits.
_FAR = {"float32": 12.0, "float64": 15.0}
_NOWHERE = 1e9
_KINDS = (
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TwoSidedTruncatedDistribution,
)


def is_truncated_normal(fn) -> bool:
    """Whether a distribution, with no wrapper around it, is one of these."""
    return isinstance(fn, _KINDS) and isinstance(fn.base_dist, dist.Normal)


def with_digits(fn):
    """
    The same distribution, in its wrappers; a truncated normal one has a log density that is
    right however far away its limits are.
    """
    if isinstance(fn, _WRAPPERS):
        base = with_digits(fn.base_dist)
        if base is fn.base_dist:
            return fn
        new = copy.copy(fn)
        new.base_dist = base
        return new
    if not is_truncated_normal(fn):
        return fn
    new = copy.copy(fn)
    new.__class__ = _kind_with_digits(type(fn))
    return new


@functools.cache
def _kind_with_digits(kind):
    @validate_sample
    def log_prob(self, value):
        return self.base_dist.log_prob(value) - _log_between(*_limits(self))

    made: Any = type(kind.__name__, (kind,), {"log_prob": log_prob})
    return made


def _limits(fn) -> Any:
    """In scales from the mode of the whole distribution; None where there is none."""
    base = fn.base_dist

    def scaled(limit):
        if limit is None:
            return None
        found = jnp.asarray((limit - base.loc) / base.scale, jnp.result_type(float))
        # Infinite ones as far away as makes no difference, for derivatives.
        return jnp.where(jnp.isinf(found), jnp.sign(found) * _NOWHERE, found)

    return scaled(getattr(fn, "low", None)), scaled(getattr(fn, "high", None))


def _log_between(low: Any, high: Any) -> Array:
    """The log probability of a standard normal number between limits."""
    if low is None:
        return log_ndtr(high)
    if high is None:
        return log_ndtr(-low)
    above = low + high > 0.0  # where the upper tail is the smaller one
    low, high = jnp.where(above, -high, low), jnp.where(above, -low, high)
    most = log_ndtr(high)
    return most + _log1mexp(log_ndtr(low) - most)


def _log1mexp(x):
    """``log(1 - exp(x))`` for ``x <= 0``."""
    near = x > -0.693
    small, large = jnp.where(near, x, -1.0), jnp.where(near, -1.0, x)
    return jnp.where(near, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))


def cdf(fn, y: Array) -> Array:
    """Of a truncated normal distribution, at values inside of its limits."""
    low, high = _limits(fn)
    y = (y - fn.base_dist.loc) / fn.base_dist.scale
    return jnp.exp(_log_between(low, y) - _log_between(low, high))


def moments(fn) -> tuple[Array, Array]:
    """Mean and variance of a truncated normal distribution."""
    base = fn.base_dist
    low, high = _limits(fn)
    log_all = _log_between(low, high)
    # By reflection, if need be, the mass is near the lower limit.
    sign: ArrayLike = 1.0
    if low is None:
        sign, low, high, limit = -1.0, -high, None, fn.high
    elif high is None:
        limit = fn.low
    else:
        above = low + high > 0.0
        sign, limit = jnp.where(above, 1.0, -1.0), jnp.where(above, fn.low, fn.high)
        low, high = jnp.where(above, low, -high), jnp.where(above, high, -low)
    at_low = jnp.exp(norm.logpdf(low) - log_all)
    at_high = 0.0 if high is None else jnp.exp(norm.logpdf(high) - log_all)
    drop = at_low - at_high  # the mean, in scales
    # Where the mode is outside, the mean is as good as the limit: by how far it is not.
    outside = low > 0.0
    away = drop - jnp.where(outside, low, 0.0)
    width = None if high is None else high - low
    apart = 0.0 if width is None else width * at_high
    variance = jnp.maximum(1.0 - apart - drop * (drop - low), 0.0)
    far = low > _FAR[jnp.dtype(low.dtype).name]
    of_far = _exponential(jnp.where(far, low, 1.0), width)
    away, variance = (
        jnp.where(far, one, other)
        for one, other in zip(of_far, (away, variance), strict=True)
    )
    mean = jnp.where(outside, limit, base.loc) + sign * base.scale * away
    variance = base.scale**2 * variance
    return jnp.broadcast_to(mean, fn.shape()), jnp.broadcast_to(variance, fn.shape())


def _exponential(low, width):
    """Distance of the mean from a limit far outside, and the variance, in scales."""
    part = 1.0 / low**2
    away = (1.0 - 2.0 * part + 10.0 * part**2) / low
    variance = (1.0 - 6.0 * part + 50.0 * part**2) * part
    if width is not None:  # which may be less than its scale
        rates = jnp.minimum(low * width, 80.0)
        away = away - width / jnp.expm1(rates)
        variance = variance - (0.5 * width / jnp.sinh(0.5 * rates)) ** 2
    return away, jnp.maximum(variance, 0.0)

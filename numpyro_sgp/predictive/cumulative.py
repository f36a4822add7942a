"""Moments and distribution functions of NumPyro, and what values lie between."""

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr
from jax.scipy.stats import norm

from numpyro_sgp.tracing.messages import innermost

_TRUNCATED = dist.LeftTruncatedDistribution, dist.TwoSidedTruncatedDistribution


def moments(fn) -> tuple:
    """
    Mean and variance. Those of NumPyro's normal distributions that are truncated below are
    infinite or NaN where nearly all of the normal one is below.

    :raises NotImplementedError: if it has none.
    """
    inner = innermost(fn)
    if not isinstance(inner, dist.LeftTruncatedDistribution):
        return fn.mean, fn.variance
    base = inner.base_dist
    if not isinstance(base, dist.Normal):
        return fn.mean, fn.variance
    below = (inner.low - base.loc) / base.scale
    hazard = jnp.exp(norm.logpdf(below) - log_ndtr(-below))
    mean = jnp.where(below > 0.0, inner.low, base.loc) + base.scale * jnp.where(
        below > 0.0, hazard - below, hazard
    )
    variance = base.scale**2 * jnp.maximum(1.0 - hazard * (hazard - below), 0.0)
    return jnp.broadcast_to(mean, fn.shape()), jnp.broadcast_to(variance, fn.shape())


def cdf(fn, y):
    """
    The cdf of a distribution of numbers, 0 or 1 outside of its support: NumPyro's are for
    values inside, and may be anything elsewhere.

    :raises NotImplementedError: if it has none.
    """
    fn = innermost(fn)
    if type(fn).cdf is dist.TransformedDistribution.cdf:  # as that does
        sign, value = 1, y
        for transform in reversed(fn.transforms):
            sign, value = sign * transform.sign, transform.inv(value)
        found = cdf(fn.base_dist, value)
        found = jnp.where(sign < 0, 1.0 - found, found)
    elif isinstance(fn, dist.MixtureGeneral):  # whose parts may have other supports
        parts = jnp.stack([cdf(part, y) for part in fn.component_distributions], axis=-1)
        found = jnp.sum(fn.mixing_distribution.probs * parts, axis=-1)
    elif isinstance(fn, _TRUNCATED):
        found = _of_truncated(fn, y)
    else:
        found = fn.cdf(y)
    lower, upper = bounds(fn)
    found = jnp.clip(found, 0.0, 1.0)
    return jnp.where(y < lower, 0.0, jnp.where(y >= upper, 1.0, found))


def _of_truncated(fn, y):
    """Where all of it is in the upper tail, by the lower one, which keeps its digits."""
    base, low, high = fn.base_dist, fn.low, getattr(fn, "high", None)
    is_above = base.loc < low

    def below(value):
        return base.cdf(jnp.where(is_above, 2.0 * base.loc - value, value))

    least = below(low)
    most = jnp.where(is_above, 0.0, 1.0) if high is None else below(high)
    return (below(y) - least) / (most - least)


def bounds(fn) -> tuple:
    """Least and largest value, of single numbers: arrays where they depend on arguments."""
    support = _of_numbers(fn)
    lower = getattr(support, "lower_bound", -jnp.inf)
    return lower, getattr(support, "upper_bound", jnp.inf)


def is_circular(fn) -> bool:
    """Whether values are angles, whose moments are none of numbers in NumPyro."""
    return isinstance(_of_numbers(fn), type(dist.constraints.circular))


def _of_numbers(fn):
    """The support of single numbers."""
    support = innermost(fn).support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support

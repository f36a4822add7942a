"""Cumulative distribution functions where NumPyro has them, and what values lie between."""

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_sgp.tracing.messages import innermost


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
    else:
        found = fn.cdf(y)
    lower, upper = bounds(fn)
    found = jnp.clip(found, 0.0, 1.0)
    return jnp.where(y < lower, 0.0, jnp.where(y >= upper, 1.0, found))


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

r"""
Logs of cdfs and of what is above, far into the tails.

NumPyro takes logs of cdfs, which are zero or one there: a limit some scales away has the
log probability :math:`-\infty`, or that of the last digit, and no slope.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import log_ndtr
from numpyro.distributions.util import log1mexp

NOWHERE = 1e9  # scales away from where infinite limits make no difference


class Tails(NamedTuple):
    """
    Of a distribution of numbers.

    :param below: from values to the log of the cdf.
    :param above: from values to the log of one minus the cdf.
    """

    below: Callable[[Any], Array]
    above: Callable[[Any], Array]

    def between(self, low: Any, high: Any) -> Array:
        """The log probability between limits, on the side where both numbers are small."""
        if low is None:
            return self.below(high)
        if high is None:
            return self.above(low)
        below, above = self.below(high), self.above(low)
        upper = above < below
        most = jnp.where(upper, above, below)
        least = jnp.where(upper, self.above(high), self.below(low))
        return most + _log1mexp(least - most)


def tails(fn: Any) -> Tails | None:
    """Those of a distribution, with no wrapper around it; None where they are not here."""
    for kind, log_cdf in _SYMMETRIC.items():
        if isinstance(fn, kind):
            return _symmetric(log_cdf, lambda y: scaled(y, fn.loc, fn.scale))
    if isinstance(fn, dist.LogNormal):
        return _symmetric(log_ndtr, lambda y: _scaled_log(y, fn.loc, fn.scale))
    if isinstance(fn, dist.Exponential):
        return _positive(lambda y: fn.rate * y)
    if isinstance(fn, dist.Weibull):
        return _positive(lambda y: (y / fn.scale) ** fn.concentration)
    return None


def scaled(value, loc, scale) -> Array:
    """In scales from ``loc``; infinite values as far away as makes no difference."""
    value = jnp.asarray(value, jnp.result_type(float))
    none = jnp.isinf(value)
    found = (jnp.where(none, 0.0, value) - loc) / scale
    return jnp.where(none, jnp.sign(value) * NOWHERE, found)


def _scaled_log(value, loc, scale):
    value = jnp.asarray(value, jnp.result_type(float))
    none = (value <= 0.0) | jnp.isinf(value)
    found = (jnp.log(jnp.where(none, 1.0, value)) - loc) / scale
    return jnp.where(none, jnp.where(value <= 0.0, -NOWHERE, NOWHERE), found)


def _symmetric(log_cdf, score) -> Tails:
    return Tails(lambda y: log_cdf(score(y)), lambda y: log_cdf(-score(y)))


def _positive(hazard) -> Tails:
    """Of a cumulative hazard."""

    def above(y):
        y = jnp.asarray(y, jnp.result_type(float))
        inside = (y > 0.0) & (y < jnp.inf)
        found = -hazard(jnp.where(inside, y, 1.0))
        return jnp.where(inside, found, jnp.where(y > 0.0, -(NOWHERE**2), 0.0))

    return Tails(lambda y: _log1mexp(above(y)), above)


def _laplace(z):
    """Of Laplace's distribution."""
    upper = z > 0.0
    of_upper = jnp.log1p(-0.5 * jnp.exp(-jnp.where(upper, z, 0.0)))
    return jnp.where(upper, of_upper, z - jnp.log(2.0))


def _soft_laplace(z):
    low = z < -15.0
    found = jnp.log(2.0 / jnp.pi * jnp.arctan(jnp.exp(jnp.clip(z, -15.0, 15.0))))
    return jnp.where(low, z + jnp.log(2.0 / jnp.pi), found)


_SYMMETRIC: dict[Any, Callable] = {
    dist.Normal: log_ndtr,
    dist.Laplace: _laplace,
    dist.Logistic: jax.nn.log_sigmoid,
    dist.SoftLaplace: _soft_laplace,
}


def _log1mexp(x):
    """``log(1 - exp(x))`` for ``x <= 0``; at zero that of the least number."""
    return log1mexp(jnp.minimum(x, -jnp.finfo(jnp.result_type(x)).tiny))

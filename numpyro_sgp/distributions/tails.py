r"""
Logs of cdfs and of what is above, far into the tails.

NumPyro takes logs of cdfs, which are zero or one there: a limit some scales away has the
log probability :math:`-\infty`, or that of the last digit, and no slope.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import betainc, betaln, log_ndtr

from numpyro_sgp.distributions.gamma_tails import log_gammainc, log_gammaincc

_TERMS = 60  # of a series whose terms fall to a half each
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
    for kind, hazard in _HAZARDS.items():
        if isinstance(fn, kind):
            return _positive(functools.partial(hazard, fn))
    if isinstance(fn, dist.StudentT):
        return _symmetric(
            lambda z: _student(fn.df, z), lambda y: scaled(y, fn.loc, fn.scale)
        )
    if isinstance(fn, dist.Gumbel):
        return _gumbel(fn)
    if isinstance(fn, dist.Gamma):
        return _between_zero(
            lambda y: log_gammainc(fn.concentration, fn.rate * y),
            lambda y: log_gammaincc(fn.concentration, fn.rate * y),
        )
    if isinstance(fn, dist.InverseGamma):
        return _between_zero(
            lambda y: log_gammaincc(fn.concentration, fn.rate / y),
            lambda y: log_gammainc(fn.concentration, fn.rate / y),
        )
    if isinstance(fn, dist.Dagum):
        return _dagum(fn)
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


def _between_zero(below, above) -> Tails:
    """Of positive numbers, from logs at these."""

    def at(log, first, last):
        def found(y):
            y = jnp.asarray(y, jnp.result_type(float))
            inside = (y > 0.0) & (y < jnp.inf)
            ends = jnp.where(y > 0.0, last, first)
            return jnp.where(inside, log(jnp.where(inside, y, 1.0)), ends)

        return found

    return Tails(at(below, -(NOWHERE**2), 0.0), at(above, 0.0, -(NOWHERE**2)))


def _gumbel(fn) -> Tails:
    def below(y):
        return -jnp.exp(jnp.minimum(-scaled(y, fn.loc, fn.scale), 80.0))

    return Tails(below, lambda y: _log1mexp(below(y)))


def _dagum(fn) -> Tails:
    def below(y):
        logs = fn.sharpness * jnp.log(y / fn.scale)
        return -fn.concentration * jax.nn.softplus(-logs)

    return _between_zero(below, lambda y: _log1mexp(below(y)))


def _student(df, z):
    """Of Student's t: logs of an incomplete beta function that may be next to zero."""
    a, beyond = 0.5 * df, z**2 / (df + z**2)
    x = df / (df + z**2)
    outer, inner, middle = x < 0.5, jnp.abs(z) < 1.0, jnp.abs(z) < 1e-2
    # DLMF 8.17.8, of terms that fall by more than x each.
    few, total, last = jnp.where(outer, x, 0.25), 1.0, 1.0
    for k in range(_TERMS):
        last = last * few * (a + 0.5 + k) / (a + 1.0 + k)
        total = total + last
    series = a * jnp.log(few) + 0.5 * jnp.log1p(-few) - jnp.log(a) - betaln(a, 0.5)
    outermost = series + jnp.log(total) - jnp.log(2.0)
    easy = a / (a + 0.5)  # of which the function is not next to zero
    at = jnp.where(outer | inner, easy, x)
    # Of many degrees of freedom: Wallace's normal number.
    tiny = 0.5 * betainc(a, 0.5, jax.lax.stop_gradient(at)) < 1e-8
    known = 0.5 * betainc(a, 0.5, jnp.where(tiny, easy, at))
    share = (8.0 * df + 1.0) / (8.0 * df + 3.0)
    normal = share * jnp.sqrt(df * jnp.log1p(jnp.where(tiny, z, 1.0) ** 2 / df))
    between = jnp.where(tiny, log_ndtr(-normal), jnp.log(known))
    near = jnp.where(inner & ~middle, beyond, 1.0 - easy)
    innermost = jnp.log(0.5 - 0.5 * betainc(0.5, a, near))
    log_tail = jnp.where(outer, outermost, jnp.where(inner, innermost, between))
    found = jnp.where(z > 0.0, jnp.log1p(-jnp.exp(log_tail)), log_tail)
    small = jnp.where(middle, z, 0.0)
    rise = small - (df + 1.0) / (6.0 * df) * small**3
    about = jnp.log(0.5 + rise * jnp.exp(-betaln(a, 0.5)) / jnp.sqrt(df))
    return jnp.where(middle, about, found)


def _cauchy(z):
    """Of Cauchy's distribution."""
    far = z < -1.0
    tail = jnp.arctan(-1.0 / jnp.where(far, z, -1.0))
    near = 0.5 * jnp.pi + jnp.arctan(jnp.where(far, 0.0, z))
    return jnp.log(jnp.where(far, tail, near) / jnp.pi)


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
    dist.Cauchy: _cauchy,
}

#: Cumulative hazards, of a distribution at positive numbers.
_HAZARDS: dict[Any, Callable] = {
    dist.Exponential: lambda fn, y: fn.rate * y,
    dist.Weibull: lambda fn, y: (y / fn.scale) ** fn.concentration,
    dist.Gompertz: lambda fn, y: (
        fn.concentration * jnp.expm1(jnp.minimum(fn.rate * y, 80.0))
    ),
    dist.Pareto: lambda fn, y: fn.alpha * jnp.log(jnp.maximum(y / fn.scale, 1.0)),
    dist.HalfNormal: lambda fn, y: -jnp.log(2.0) - log_ndtr(-y / fn.scale),
    dist.HalfCauchy: lambda fn, y: -jnp.log(2.0) - _cauchy(-y / fn.scale),
}


def _log1mexp(x):
    """
    ``log(1 - exp(x))`` for ``x <= 0``; at zero that of the least number. NumPyro's has
    second derivatives that are NaN.
    """
    tiny = jnp.finfo(jnp.result_type(x)).tiny
    near = x > -0.693
    small = jnp.where(near, jnp.minimum(x, -tiny), -1.0)
    large = jnp.where(near, -1.0, x)
    return jnp.where(near, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))

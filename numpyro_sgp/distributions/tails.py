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
from jax.custom_derivatives import SymbolicZero
from jax.scipy.special import betainc, erf, gammaln, log_ndtr

from numpyro_sgp.distributions.gamma_tails import log_gammainc, log_gammaincc

_MOST = 80.0  # whose exponential float32 holds
_MANY = 20.0  # degrees of freedom
_TERMS = 60  # of a series whose terms fall to a half each
NOWHERE = 1e9  # scales away from where infinite limits make no difference


class Tails(NamedTuple):
    """
    Of a distribution of numbers.

    :param below: from values to the log of the cdf.
    :param above: from values to the log of one minus the cdf.
    :param inside: a value at which the density is neither zero nor infinite.
    """

    below: Callable[[Any], Array]
    above: Callable[[Any], Array]
    inside: Any

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
            return _symmetric(log_cdf, lambda y: scaled(y, fn.loc, fn.scale), fn.loc)
    if isinstance(fn, dist.LogNormal):
        scores = lambda y: _scaled_log(y, fn.loc, fn.scale)  # noqa: E731
        return _symmetric(log_ndtr, scores, _in_reach(jnp.exp(fn.loc)))
    for kind, (log_hazard, inside) in _HAZARDS.items():
        if isinstance(fn, kind):
            start = fn.scale if isinstance(fn, dist.Pareto) else 0.0
            return _positive(functools.partial(log_hazard, fn), inside(fn), start)
    if isinstance(fn, dist.StudentT):
        scores = lambda y: scaled(y, fn.loc, fn.scale)  # noqa: E731
        return _symmetric(lambda z: _student(fn.df, z), scores, fn.loc)
    if isinstance(fn, dist.Gumbel):
        return _gumbel(fn)
    if isinstance(fn, dist.Gamma):
        return _between_zero(
            lambda y: log_gammainc(fn.concentration, fn.rate * y),
            lambda y: log_gammaincc(fn.concentration, fn.rate * y),
            1.0 / fn.rate,
        )
    if isinstance(fn, dist.InverseGamma):
        return _between_zero(
            lambda y: log_gammaincc(fn.concentration, fn.rate / y),
            lambda y: log_gammainc(fn.concentration, fn.rate / y),
            fn.rate,
        )
    if isinstance(fn, dist.Dagum):
        return _dagum(fn)
    if isinstance(fn, dist.HalfNormal):
        return _between_zero(
            lambda y: jnp.log(erf(y / (jnp.sqrt(2.0) * fn.scale))),
            lambda y: jnp.log(2.0) + log_ndtr(-scaled(y, 0.0, fn.scale)),
            fn.scale,
        )
    if isinstance(fn, dist.HalfCauchy):
        return _between_zero(
            lambda y: jnp.log(2.0 / jnp.pi * jnp.arctan(y / fn.scale)),
            lambda y: jnp.log(2.0) + _cauchy(-y / fn.scale),
            fn.scale,
        )
    return None


def scaled(value, loc, scale) -> Array:
    """In scales from ``loc``; infinite values as far away as makes no difference."""
    value = jnp.asarray(value, jnp.result_type(float))
    none = jnp.isinf(value)
    found = (jnp.where(none, 0.0, value) - loc) / scale
    found = jnp.where(none, jnp.sign(value) * NOWHERE, found)
    return jnp.clip(found, -NOWHERE, NOWHERE)  # 1e20 for infinity has a slope of NaN


def _scaled_log(value, loc, scale):
    value = jnp.asarray(value, jnp.result_type(float))
    none = (value <= 0.0) | jnp.isinf(value)
    found = (jnp.log(jnp.where(none, 1.0, value)) - loc) / scale
    return jnp.where(none, jnp.where(value <= 0.0, -NOWHERE, NOWHERE), found)


def _symmetric(log_cdf, score, inside) -> Tails:
    return Tails(lambda y: log_cdf(score(y)), lambda y: log_cdf(-score(y)), inside)


def _in_reach(value):
    """A positive number that float32 can work with, without a slope."""
    return jnp.clip(jax.lax.stop_gradient(value), 1e-37, 1e37)


def _positive(log_hazard, inside, start) -> Tails:
    """Of the log of a cumulative hazard, which is none up to ``start``."""
    inside = _in_reach(inside)

    def at(y):
        y = jnp.asarray(y, jnp.result_type(float))
        within = (y > start) & (y < jnp.inf)
        found = jnp.minimum(log_hazard(jnp.where(within, y, inside)), _MOST)
        return within, found, y > start

    def above(y):
        within, found, beyond = at(y)
        return jnp.where(within, -jnp.exp(found), jnp.where(beyond, -(NOWHERE**2), 0.0))

    def below(y):
        within, found, beyond = at(y)
        return jnp.where(within, _log1mexp_of(found), jnp.where(beyond, 0.0, -(NOWHERE**2)))

    return Tails(below, above, inside)


def _between_zero(below, above, inside) -> Tails:
    """Of positive numbers, from logs at these."""
    inside = _in_reach(inside)

    def at(log, first, last):
        def found(y):
            y = jnp.asarray(y, jnp.result_type(float))
            within = (y > 0.0) & (y < jnp.inf)
            ends = jnp.where(y > 0.0, last, first)
            return jnp.where(within, log(jnp.where(within, y, inside)), ends)

        return found

    return Tails(at(below, -(NOWHERE**2), 0.0), at(above, 0.0, -(NOWHERE**2)), inside)


def _gumbel(fn) -> Tails:
    def below(y):
        return -jnp.exp(jnp.minimum(-scaled(y, fn.loc, fn.scale), _MOST))

    def above(y):
        return _log1mexp_of(jnp.minimum(-scaled(y, fn.loc, fn.scale), _MOST))

    return Tails(below, above, fn.loc)


def _dagum(fn) -> Tails:
    def below(y):
        logs = fn.sharpness * jnp.log(y / fn.scale)
        return -fn.concentration * jax.nn.softplus(-logs)

    return _between_zero(below, lambda y: _log1mexp(below(y)), fn.scale)


def _student(df, z):
    """
    The log cdf of Student's t: of many degrees of freedom, and as many standard deviations
    at most, by that of a normal number (Hill 1970, Algorithm 395, right to 1e-9 from 20
    on), which is smooth; else by an incomplete beta function.
    """
    df, z = jnp.broadcast_arrays(df, z)
    many = (df > _MANY) & (z**2 <= df)
    found = _incomplete(jnp.where(many, 0.5 * _MANY, df), jnp.where(many, 0.0, z))
    normal = _hill(jnp.where(many, df, 2.0 * _MANY), jnp.where(many, z, 0.0))
    return jnp.where(many, log_ndtr(normal), found)


def _hill(df, z):
    """The normal number of which the cdf is that of Student's t."""
    df = jnp.minimum(df, 1e8)  # whose powers float32 holds
    a, w = df - 0.5, z**2 / df
    b, small = 48.0 * a**2, w < 1e-3
    share = jnp.log1p(jnp.where(small, 1.0, w)) / jnp.where(small, 1.0, w)
    share = jnp.where(small, 1.0 - w / 2.0 + w**2 / 3.0 - w**3 / 4.0 + w**4 / 5.0, share)
    s = a * w * share  # the square of a first number
    first = z * jnp.sqrt(a / df * share)
    rest = ((4.0 * s + 33.0) * s + 240.0) * s + 855.0
    return first * (1.0 + (s + 3.0) / b - rest / (10.0 * b * (b + 0.8 * s**2 + 100.0)))


@jax.custom_jvp
def _incomplete(df, z):
    """
    The same by an incomplete beta function, that may be next to zero.

    Of its derivatives that by z is in closed form. That by the degrees of freedom, which
    JAX has none of, is by differences: by its log right to 1e-4 times the larger of one and
    the log cdf in float32, and to 1e-8 in float64.
    """
    df, z = jnp.broadcast_arrays(df, z)
    a, beyond = 0.5 * df, z**2 / (df + z**2)
    x = df / (df + z**2)
    outer, inner = x < 0.5, jnp.abs(z) < 1.0
    few = jnp.where(outer, x, 0.25)
    series = a * jnp.log(few) + 0.5 * jnp.log1p(-few) - jnp.log(a) - _betaln(a)
    outermost = series + jnp.log(_student_total(a, few)) - jnp.log(2.0)
    between = jnp.log(0.5 * betainc(a, 0.5, jnp.where(outer, 0.5, x)))
    innermost = jnp.log(0.5 - 0.5 * betainc(0.5, a, jnp.where(inner, beyond, 0.0)))
    log_tail = jnp.where(outer, outermost, jnp.where(inner, innermost, between))
    return jnp.where(z > 0.0, jnp.log1p(-jnp.exp(log_tail)), log_tail)


def _betaln(a):
    """That of a and one half. Of JAX's the seventh digit is wrong, in float64 too."""
    large = a > 8.0
    b, a = jnp.where(large, a, 8.0), jnp.where(large, 1.0, a)
    w = 1.0 / b**2  # DLMF 5.11.13
    terms = 1 / 192 - w * (1 / 640 - w * (17 / 14336 - w * 31 / 18432))
    ratio = 0.5 * jnp.log(b) + (w * terms - 1 / 8) / b
    ratio = jnp.where(large, ratio, gammaln(a + 0.5) - gammaln(a))
    return 0.5 * jnp.log(jnp.pi) - ratio


def _student_total(a, x):
    """DLMF 8.17.8, of terms that fall by more than x each, up to a half."""

    def term(k, state):
        total, last = state
        last = last * x * (a + 0.5 + k) / (a + 1.0 + k)
        return total + last, last

    return jax.lax.fori_loop(0, _TERMS, term, (jnp.ones_like(x),) * 2)[0]


def _incomplete_jvp(primals, tangents):
    (df, z), (ddf, dz) = primals, tangents
    found = _incomplete(df, z)
    change = jnp.zeros_like(found)
    if not isinstance(dz, SymbolicZero):
        x = df / (df + z**2)
        outer = (x < 0.5) & (z < 0.0)
        total = _student_total(0.5 * df, jnp.where(outer, x, 0.25))
        slope = df / (jnp.where(outer, -z, 1.0) * total)  # both are of the same series
        log_pdf = dist.StudentT(df).log_prob(z)
        slope = jnp.where(outer, slope, jnp.exp(jnp.where(outer, 0.0, log_pdf - found)))
        change = change + slope * dz
    if not isinstance(ddf, SymbolicZero):
        step = 0.1 if jnp.finfo(found.dtype).bits == 32 else 4e-3
        near, far = (
            _student(df * (1.0 + k * step), z) - _student(df * (1.0 - k * step), z)
            for k in (1, 2)
        )
        change = change + (8.0 * near - far) / (12.0 * step * df) * ddf
    return found, change


_incomplete.defjvp(_incomplete_jvp, symbolic_zeros=True)


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


def _log_expm1(x, log):
    """``log(exp(x) - 1)`` with the log of x, for up to ``_MOST``."""
    small = x < 1e-3
    x = jnp.minimum(x, _MOST)
    found = jnp.log(jnp.expm1(jnp.where(small, 1.0, x)))
    return jnp.where(small, log + 0.5 * x + x**2 / 24.0, found)


#: Logs of cumulative hazards, of a distribution at positive numbers, and a value of it.
_HAZARDS: dict[Any, tuple[Callable, Callable]] = {
    dist.Exponential: (
        lambda fn, y: _log(fn.rate) + jnp.log(y),
        lambda fn: 1.0 / fn.rate,
    ),
    dist.Weibull: (
        lambda fn, y: fn.concentration * (jnp.log(y) - _log(fn.scale)),
        lambda fn: fn.scale,
    ),
    dist.Gompertz: (
        lambda fn, y: (
            _log(fn.concentration) + _log_expm1(fn.rate * y, _log(fn.rate) + jnp.log(y))
        ),
        lambda fn: 1.0 / fn.rate,
    ),
    dist.Pareto: (
        lambda fn, y: _log(fn.alpha) + _log(jnp.log1p((y - fn.scale) / fn.scale)),
        lambda fn: 2.0 * fn.scale,
    ),
}


def _log1mexp_of(log):
    """``log(1 - exp(-h))`` with the log of h, where h may be too small for 1 / h**2."""
    rare = log < jnp.log(1e-3)
    h = jnp.exp(log)
    near = log - 0.5 * h + h**2 / 24.0
    return jnp.where(rare, near, _log1mexp(jnp.where(rare, -1.0, -h)))


def _log(x):
    """The log of a positive number, which may be less than the least that there is."""
    return jnp.log(jnp.maximum(x, jnp.finfo(jnp.result_type(x, float)).tiny))


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

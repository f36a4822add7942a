r"""
Distributions cut off, censored or in classes, far from where they have their mass.

NumPyro takes the log of :math:`F(b) - F(a)`, which is :math:`-\infty`, and a log density of
:math:`+\infty`, where limits are some scales away: integrals over f go there. Here it is
taken of logs, on the side where both numbers are small.
"""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro.distributions.util import validate_sample

from numpyro_sgp.distributions.tails import NOWHERE, Tails, scaled, tails

_WRAPPERS = dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution
_MADE_OF = dist.HurdleProbs, dist.TransformedDistribution
# Scales from the mode to a limit from which, and width in scales up to which, moments are
# sums over the mass: the differences that they are elsewhere lose too many digits.
_TAIL, _NEAR = 1.0, 1.0
# Nats that the density falls by over these nodes, at most; they are right to 1e-13.
_FALL = 40.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(30)
_TRUNCATED = (
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TwoSidedTruncatedDistribution,
)


def is_truncated_normal(fn) -> bool:
    """Whether a distribution, with no wrapper around it, is one of these."""
    return isinstance(fn, _TRUNCATED) and isinstance(fn.base_dist, dist.Normal)


def is_truncated_student(fn) -> bool:
    """Whether a distribution, with no wrapper around it, is one of these."""
    return isinstance(fn, _TRUNCATED) and isinstance(fn.base_dist, dist.StudentT)


def has_digits(fn) -> bool:
    """Whether :func:`cdf` is for a distribution, with no wrapper around it."""
    return isinstance(fn, _TRUNCATED) and tails(fn.base_dist) is not None


def with_digits(fn):
    """
    The same distribution, in its wrappers; a truncated or censored one has a log density
    that is right however far away its limits are, where that of its base is known.
    """
    if isinstance(fn, (*_WRAPPERS, *_MADE_OF)):
        base = with_digits(fn.base_dist)
        if base is fn.base_dist:
            return fn
        new = copy.copy(fn)
        new.base_dist = base
        return new
    if isinstance(fn, dist.MixtureGeneral):
        parts = [with_digits(part) for part in fn.component_distributions]
        if all(a is b for a, b in zip(parts, fn.component_distributions, strict=True)):
            return fn
        new = copy.copy(fn)
        new._component_distributions = parts
        return new
    if type(fn) not in _LOG_PROBS:
        return fn
    if isinstance(fn, dist.OrderedLogistic):
        known = hasattr(fn, "predictor")  # which goes where JAX takes it apart
    else:
        known = tails(fn.base_dist) is not None
    if not known:
        return fn
    new = copy.copy(fn)
    new.__class__ = _kind_with_digits(type(fn))
    return new


@functools.cache
def _kind_with_digits(kind):
    log_prob = validate_sample(_LOG_PROBS[kind])
    made: Any = type(kind.__name__, (kind,), {"log_prob": log_prob})
    return made


def _known_tails(fn) -> Tails:
    found = tails(fn)
    assert found is not None
    return found


def _tails(fn) -> Tails:
    return _known_tails(fn.base_dist)


def _truncated(fn, value):
    low, high = getattr(fn, "low", None), getattr(fn, "high", None)
    return fn.base_dist.log_prob(value) - _tails(fn).between(low, high)


def _observed(fn, value, censored):
    """The log density where it counts, and something finite elsewhere."""
    # Where the density is neither zero nor infinite: its slope would be NaN.
    inside = jax.lax.stop_gradient(_tails(fn).inside)
    return fn.base_dist.log_prob(jnp.where(censored, inside, value))


def _left_censored(fn, value):
    seen = _observed(fn, value, fn.censored)
    return jnp.where(fn.censored, _tails(fn).below(value), seen)


def _right_censored(fn, value):
    seen = _observed(fn, value, fn.censored)
    return jnp.where(fn.censored, _tails(fn).above(value), seen)


def _interval_censored(fn, value):
    low, high = value[..., 0], value[..., 1]
    left, right, within, beyond, point = fn._get_censoring_masks(value)
    found, of = _tails(fn), jnp.where
    probability = found.between(of(within, low, -jnp.inf), of(within, high, jnp.inf))
    outside = jnp.logaddexp(found.below(low), found.above(high))
    probability = of(point, _observed(fn, low, ~point), probability)
    probability = of(left, found.below(high), of(right, found.above(low), probability))
    return of(beyond, outside, probability)


def _ordered(fn, value):
    """Of a class between two cut points."""
    ends = jnp.full((*fn.cutpoints.shape[:-1], 1), jnp.inf)
    cuts = jnp.concatenate([-ends, fn.cutpoints, ends], axis=-1)
    value = jnp.asarray(value, int)
    shape = jnp.broadcast_shapes(jnp.shape(value), fn.batch_shape)
    value, cuts = (
        jnp.broadcast_to(value, shape),
        jnp.broadcast_to(cuts, (*shape, cuts.shape[-1])),
    )
    low, high = (
        jnp.take_along_axis(cuts, (value + i)[..., None], axis=-1)[..., 0] for i in (0, 1)
    )
    return _known_tails(dist.Logistic(fn.predictor, 1.0)).between(low, high)


_LOG_PROBS = {
    dist.OrderedLogistic: _ordered,
    **dict.fromkeys(_TRUNCATED, _truncated),
    dist.LeftCensoredDistribution: _left_censored,
    dist.RightCensoredDistribution: _right_censored,
    dist.IntervalCensoredDistribution: _interval_censored,
}


def cdf(fn, y: Array) -> Array:
    """Of a truncated distribution that has digits, at values inside of its limits."""
    low, high = getattr(fn, "low", None), getattr(fn, "high", None)
    found = _tails(fn)
    return jnp.exp(found.between(low, y) - found.between(low, high))


def _limits(fn) -> Any:
    """In scales from the mode of the whole distribution; None where there is none."""
    base = fn.base_dist
    limits = getattr(fn, "low", None), getattr(fn, "high", None)
    return (None if v is None else scaled(v, base.loc, base.scale) for v in limits)


def moments(fn) -> tuple[Array, Array]:
    """Mean and variance of a truncated normal distribution."""
    base = fn.base_dist
    low, high = _limits(fn)
    log_all = _tails(fn).between(getattr(fn, "low", None), getattr(fn, "high", None))
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
    in_tail = low > _TAIL
    if width is not None:
        # Of the limits themselves: their scores have lost digits.
        width = jnp.where(jnp.abs(width) < NOWHERE, (fn.high - fn.low) / base.scale, width)
        in_tail = in_tail | (width < _NEAR)
    low = jnp.where(in_tail, low, 0.0)
    reach = 2.0 * _FALL / (jnp.sqrt(low**2 + 2.0 * _FALL) + low)
    reach = reach if width is None else jnp.minimum(jnp.where(in_tail, width, reach), reach)
    of_tail = _by_nodes(low, reach)
    away, variance = (
        jnp.where(in_tail, one, other)
        for one, other in zip(of_tail, (away, variance), strict=True)
    )
    outside = outside | in_tail
    mean = jnp.where(outside, limit, base.loc) + sign * base.scale * away
    variance = base.scale**2 * variance
    return jnp.broadcast_to(mean, fn.shape()), jnp.broadcast_to(variance, fn.shape())


def _share_below(x: Array) -> Array:
    """(1 - exp(-x)) / x."""
    is_zero = jnp.abs(x) < jnp.finfo(x.dtype).eps
    return jnp.where(is_zero, 1.0 - 0.5 * x, -jnp.expm1(-x) / jnp.where(is_zero, 1.0, x))


def cauchy_moments(fn) -> tuple[Array, Array]:
    """Mean and variance of a Cauchy distribution between two limits, for NumPyro's NaN."""
    base, (low, high) = fn.base_dist, _limits(fn)
    width = jnp.arctan2(high - low, 1.0 + low * high)
    mean = 0.5 * jnp.log1p((high - low) * (high + low) / (1.0 + low**2)) / width
    variance = (high - low) / width - 1.0 - mean**2
    return base.loc + base.scale * mean, base.scale**2 * jnp.maximum(variance, 0.0)


def student_moments(fn) -> tuple[Array, Array]:
    """
    Mean and variance of a truncated Student's t distribution, which NumPyro neither has nor
    draws. Infinite where they are; of two limits and two degrees of freedom or less the
    variance is NaN, unless the limits are near.
    """
    base, df = fn.base_dist, jnp.asarray(fn.base_dist.df)
    low, high = (None if v is None else jnp.asarray(v) for v in _limits(fn))
    plain = dist.StudentT(df)

    def at(limit):
        return (
            0.0
            if limit is None
            else (1.0 + limit**2 / df) * jnp.exp(plain.log_prob(limit) - log_all)
        )

    log_all = _known_tails(plain).between(low, high)
    if low is None or high is None:
        unknown, far = jnp.inf, jnp.inf if high is None else -jnp.inf
        mean = df / jnp.where(df > 1.0, df - 1.0, 1.0) * (at(low) - at(high))
        mean = jnp.where(df > 1.0, mean, far)
    else:  # df / (df - 1) times a difference that is zero where df is one
        unknown = jnp.nan
        apart = 0.5 * (jnp.log1p(high**2 / df) - jnp.log1p(low**2 / df))
        nearer = jnp.where(apart > 0.0, at(low), at(high))
        mean = df * apart * nearer * _share_below((df - 1.0) * jnp.abs(apart))
    # t^2 times the density is two densities, one of them with two degrees of freedom less.
    many = df > 2.0
    less = jnp.where(many, df - 2.0, 1.0)
    ratio = jnp.sqrt(less / df)
    scores = (None if v is None else v * ratio for v in (low, high))
    log_ratio = _known_tails(dist.StudentT(less)).between(*scores) - log_all
    square = df * ((df - 1.0) / less * jnp.exp(log_ratio) - 1.0)
    variance = jnp.where(many, jnp.maximum(square - mean**2, 0.0), unknown)
    if low is not None and high is not None:
        width = high - low
        near = width < _NEAR
        part = 0.5 * (_NODES + 1.0) * jnp.where(near, width, 1.0)[..., None]
        logs = dist.StudentT(df[..., None]).log_prob(low[..., None] + part)
        weights = _WEIGHTS * jnp.exp(logs - jnp.max(logs, axis=-1, keepdims=True))
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        away = jnp.sum(weights * part, axis=-1)
        of_near = jnp.sum(weights * (part - away[..., None]) ** 2, axis=-1)
        mean = jnp.where(near, low + away, mean)
        variance = jnp.where(near, of_near, variance)
    mean, variance = base.loc + base.scale * mean, base.scale**2 * variance
    return jnp.broadcast_to(mean, fn.shape()), jnp.broadcast_to(variance, fn.shape())


def _by_nodes(low, width):
    """Distance of the mean from the lower limit, and the variance, in scales."""
    part = jnp.asarray(0.5 * (_NODES + 1.0), jnp.result_type(low))
    low, width = low[..., None], width[..., None]
    logs = -width * part * (low + 0.5 * width * part)
    weights = jnp.asarray(_WEIGHTS, logs.dtype) * jnp.exp(logs)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    away = jnp.sum(weights * part, axis=-1, keepdims=True)
    variance = jnp.sum(weights * (part - away) ** 2, axis=-1)
    return (width * away)[..., 0], width[..., 0] ** 2 * variance

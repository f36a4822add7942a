"""Quantiles of a cdf, for all rows and levels at once."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtri

_MOST_DOUBLED = 64  # reaches until values are on both sides
_MORE_THAN_DIGITS = 24  # steps inside, of which those after so many
_LINEARLY = 8  # go by digits where both sides are not of one order of magnitude
_NORMALLY = 0.25  # standard deviations that normal quantiles are off by, about,
_NEARBY = 0.0625  # and those by few points
_ROUGHLY = 0.01  # of a level, by few points,
_AGREED = 1e-4  # and where others agree with them
ROUGH, OTHERS, ALL = 0, 1, 2  #: which points: few, as many others, or all


class _State(NamedTuple):
    """
    Where it looks, and what is known on both sides.

    :param y: where to look next.
    :param at_low: what the function is at ``low``; infinite where there is no such yet.
    :param at_high: likewise at ``high``, -inf where there is none.
    :param reach: how far to go where one side is not known.
    :param whole: how far both were apart at first; zero before.
    :param inside: steps since.
    """

    step: Array | int
    y: Array
    low: Array
    high: Array
    at_low: Array
    at_high: Array
    reach: Array
    whole: Array
    inside: Array

    @property
    def is_between(self):
        """Whether there are values on both sides."""
        return (self.at_low < jnp.inf) & (self.at_high > -jnp.inf)


def solved(
    cdf: Callable[[Array, Array | None], Array],
    levels: Array,
    mean: Array,
    sd: Array,
    bounds: tuple = (-jnp.inf, jnp.inf),
    discrete: bool = False,
    phases: tuple[int, ...] = (ALL,),
) -> Array:
    """
    Smallest y with ``cdf(y) >= level``: by bisection of whole numbers, and else by the ITP
    method (Oliveira and Takahashi 2020), which needs no more steps than bisection and, of a
    smooth cdf, some six. The cdf is in the program once, as it is most of it.

    Derivatives are those of the root, by the slope of the cdf there.

    :param cdf: from values of shape ``(levels, *shape)``, and which points it is averaged
        over: a number of Python, `ROUGH` or `ALL`, where derivatives are taken.
    :param mean: where to begin to look, of shape ``shape``; where it is not finite, at 0.
    :param sd: how far at first, likewise.
    :param bounds: what values lie between.
    :param discrete: whether they are whole numbers.
    :param phases: by which points it looks in turn. Where `OTHERS` find at the root of
        `ROUGH` ones what these do there, it stays.
    :return: shape ``(levels, *shape)``; NaN where the cdf is.
    """
    places = ndtri(levels).reshape(-1, *(1,) * mean.ndim)
    levels = levels.reshape(-1, *(1,) * mean.ndim)
    lowest = bounds[0] - 1 if discrete else bounds[0]  # where the cdf is 0
    width = jnp.where(jnp.isfinite(sd) & (sd > 0), sd, 1.0)
    near = max(16 * jnp.finfo(mean.dtype).eps, 1e-9)
    roughly = near if OTHERS in phases else _ROUGHLY

    def over(y, which):
        # NumPyro's cdf may be continuous between whole numbers.
        found = cdf(y, which) - levels
        return jnp.where(y <= lowest, -levels, jnp.where(y >= bounds[1], 1 - levels, found))

    def look(state, which):
        start, at, is_known = state
        is_rough, is_check = which == ROUGH, which == OTHERS
        is_first = is_rough if len(phases) > 1 else True
        reach = width * jnp.where(is_first, _NORMALLY, _NEARBY)
        close = 0.0 if discrete else jnp.where(is_rough, roughly, near)
        most = jnp.where(is_check, 1, _MOST_DOUBLED + _most_inside(mean.dtype))
        where = start, reach, (lowest, bounds[1]), close, discrete, most, is_known
        found, at_found = _searched(partial(over, which=which), *where)
        agrees = is_check & (jnp.abs(at_found - at) <= _AGREED)
        found = jnp.where(is_check | is_known, start, found)
        kept = jnp.where(jnp.isfinite(found), found, start)
        return (kept, at_found, is_known | agrees), found

    def solve(_, start):
        start, _ = start
        nothing = jnp.full_like(start, jnp.nan), jnp.zeros(start.shape, bool)
        last, found = jax.lax.scan(look, (start, *nothing), jnp.array(phases))
        return found[-1] + 0.0, last[2].astype(start.dtype)  # no -0

    def at_root(root):
        y, is_rough = root
        if OTHERS not in phases:
            return over(y, ALL), is_rough
        return jnp.where(is_rough > 0.0, over(y, ROUGH), over(y, ALL)), is_rough

    centre = jnp.where(jnp.isfinite(mean), mean, 0.0) + width * places
    start = jax.lax.stop_gradient(jnp.clip(centre, lowest, bounds[1]))
    first = start, jnp.zeros_like(start)
    if discrete:  # steps, whose derivatives are zero
        return jax.lax.stop_gradient(solve(None, first)[0])
    return jax.lax.custom_root(at_root, first, solve, _over_slope)[0]


def _over_slope(change, value):
    """
    Of a function of each number by itself, zero where it is flat, as at an end; and of
    what says by which points it is.
    """
    value, which = value
    slope, _ = change((jnp.ones_like(value), jnp.zeros_like(which)))
    steep = jnp.where(slope > 0.0, slope, 1.0)
    return jnp.where(slope > 0.0, value / steep, 0.0), which


def _most_inside(dtype) -> int:
    """Steps with values on both sides."""
    return jnp.finfo(dtype).nmant + _MORE_THAN_DIGITS


def _searched(over, start, reach, ends, near, discrete, most, is_known):
    """
    The least value where a function is not below zero, NaN where it is; and what it is
    there, or, where there is none on that side, at the last value.

    :param most: steps in all.
    :param is_known: where there is nothing to look for.
    """

    def is_done(state):
        if discrete:
            found = state.is_between & (state.high - state.low <= 1.0)
        else:
            found = jnp.abs(state.at_high) <= near
        is_last = state.inside > _most_inside(start.dtype)
        return found | is_last | jnp.isnan(state.at_high) | is_known

    def go_on(state):
        return (state.step < most) & ~jnp.all(is_done(state))

    def look(state):
        found, done = over(state.y), is_done(state)
        below = found < -near
        is_low, is_high = below & ~done, ~below & ~done
        state = state._replace(
            step=state.step + 1,
            low=jnp.where(is_low, state.y, state.low),
            at_low=jnp.where(is_low, found, state.at_low),
            high=jnp.where(is_high, state.y, state.high),
            at_high=jnp.where(is_high, found, state.at_high),
        )
        middle = 0.5 * (state.low + state.high) if discrete else _by_itp(state)
        size = jnp.maximum(jnp.abs(state.low), jnp.abs(state.high))
        is_far = (state.high - state.low > 0.5 * size) & (state.inside >= _LINEARLY)
        middle = jnp.where(is_far, _by_digits(state.low, state.high), middle)
        if discrete:
            middle = jnp.maximum(jnp.floor(middle), state.low + 1.0)
        no_low, between = state.at_low == jnp.inf, state.is_between
        y = jnp.where(
            no_low,
            jnp.maximum(state.high - state.reach, ends[0]),
            jnp.minimum(state.low + state.reach, ends[1]),
        )
        is_first = between & (state.whole == 0.0)
        return state._replace(
            y=jnp.where(is_done(state), state.high, jnp.where(between, middle, y)),
            reach=jnp.where(between, state.reach, 2.0 * state.reach),
            whole=jnp.where(is_first, state.high - state.low, state.whole),
            inside=state.inside + between,
        )

    reach = jnp.broadcast_to(jnp.ceil(reach) if discrete else reach, start.shape)
    start = jnp.floor(start) if discrete else start
    zero = jnp.zeros_like(start)
    unknown = zero + jnp.inf, zero - jnp.inf
    state = _State(0, start, start, start, *unknown, reach, zero, zero.astype(int))
    state = jax.lax.while_loop(go_on, look, state)
    is_found = state.at_high > -jnp.inf
    found = jnp.where(is_found, state.high, state.y)
    found = jnp.where(jnp.isnan(state.at_high), jnp.nan, found)
    return found, jnp.where(is_found, state.at_high, state.at_low)


def _by_itp(state):
    """
    Between both sides: interpolation, by a little towards the middle, and no further from
    it than what bisection would have left.
    """
    low, length = state.low, state.high - state.low
    whole = jnp.where(state.whole > 0.0, state.whole, length)
    middle = low + 0.5 * length
    rise = state.at_high - state.at_low
    falsi = low - state.at_low * length / jnp.where(rise > 0.0, rise, 1.0)
    towards = jnp.sign(middle - falsi)
    least = 0.2 * length**2 / jnp.where(whole > 0.0, whole, 1.0)
    moved = jnp.where(least <= jnp.abs(middle - falsi), falsi + towards * least, middle)
    halved = (0.5**state.inside).astype(low.dtype)
    most = jnp.maximum(whole * halved - 0.5 * length, 0.0)
    moved = jnp.where(jnp.abs(moved - middle) <= most, moved, middle - towards * most)
    return jnp.clip(moved, low, state.high)


def _by_digits(low, high):
    """
    In the middle of all floating point numbers between both: after some steps they are of
    one order of magnitude, as is far from so by halves where the sd is 1e20 times what is
    looked for, of responses whose logarithm has a wide Gaussian.
    """
    kind = {4: jnp.int32, 8: jnp.int64}[low.dtype.itemsize]
    least = jnp.iinfo(kind).min

    def other(number):  # in the order of the numbers; its own inverse
        return jnp.where(number < 0, least - number, number)

    a, b = (other(jax.lax.bitcast_convert_type(y, kind)) for y in (low, high))
    middle = (a & b) + ((a ^ b) >> 1)  # of which the sum would overflow
    found = jax.lax.bitcast_convert_type(other(middle), low.dtype)
    return jnp.where(jnp.abs(found) < jnp.finfo(low.dtype).tiny, 0.0, found)

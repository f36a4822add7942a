"""Quantiles of a cdf, for all rows and levels at once."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_MOST_DOUBLED = 64  # reaches until values are on both sides
_MORE_THAN_DIGITS = 8  # steps inside
_NEARBY = 0.0625  # standard deviations that few points are off by, about
_ROUGHLY = 0.01  # of a level, by few points


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
    by_few: bool = False,
) -> Array:
    """
    Smallest y with ``cdf(y) >= level``: by bisection of whole numbers, and else by the ITP
    method (Oliveira and Takahashi 2020), which needs no more steps than bisection and, of a
    smooth cdf, some six. The cdf is in the program once, as it is most of it.

    Derivatives are those of the root, by the slope of the cdf there.

    :param cdf: from values of shape ``(levels, *shape)``, and whether few points do; None
        where derivatives are taken, by all of them.
    :param mean: where to begin to look, of shape ``shape``; where it is not finite, at 0.
    :param sd: how far at first, likewise.
    :param bounds: what values lie between.
    :param discrete: whether they are whole numbers.
    :param by_few: whether to look by few points first, from where less is left to do.
    :return: shape ``(levels, *shape)``; NaN where the cdf is.
    """
    levels = levels.reshape(-1, *(1,) * mean.ndim)
    lowest = bounds[0] - 1 if discrete else bounds[0]  # where the cdf is 0
    width = jnp.where(jnp.isfinite(sd) & (sd > 0), sd, 1.0)
    near = max(16 * jnp.finfo(mean.dtype).eps, 1e-9)

    def over(y, few):
        # NumPyro's cdf may be continuous between whole numbers.
        found = cdf(y, few) - levels
        return jnp.where(y <= lowest, -levels, jnp.where(y >= bounds[1], 1 - levels, found))

    def look(start, few):
        reach = jnp.where(few, width, width * (_NEARBY if by_few else 1.0))
        close = 0.0 if discrete else jnp.where(few, _ROUGHLY, near)
        where = start, reach, (lowest, bounds[1]), close, discrete
        found = _searched(partial(over, few=few), *where)
        return jnp.where(jnp.isfinite(found), found, start), found

    def solve(_, start):
        phases = jnp.array([True, False] if by_few else [False])
        return jax.lax.scan(look, start, phases)[1][-1] + 0.0  # no -0

    centre = jnp.where(jnp.isfinite(mean), mean, 0.0)
    start = jnp.clip(centre, lowest, bounds[1]) + jnp.zeros((len(levels), *mean.shape))
    start = jax.lax.stop_gradient(start)
    if discrete:  # steps, whose derivatives are zero
        return jax.lax.stop_gradient(solve(None, start))
    return jax.lax.custom_root(partial(over, few=None), start, solve, _over_slope)


def _over_slope(change, value):
    """Of a function of each number by itself; zero where it is flat, as at an end."""
    slope = change(jnp.ones_like(value))
    return jnp.where(slope > 0.0, value / jnp.where(slope > 0.0, slope, 1.0), 0.0)


def _searched(over, start, reach, ends, near, discrete):
    """The least value where a function is not below zero; NaN where it is."""
    most = jnp.finfo(start.dtype).nmant + _MORE_THAN_DIGITS

    def is_done(state):
        if discrete:
            found = state.is_between & (state.high - state.low <= 1.0)
        else:
            found = jnp.abs(state.at_high) <= near
        return found | (state.inside > most) | jnp.isnan(state.at_high)

    def go_on(state):
        return (state.step < _MOST_DOUBLED + most) & ~jnp.all(is_done(state))

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
        middle = jnp.floor(0.5 * (state.low + state.high)) if discrete else _by_itp(state)
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
    found = jnp.where(state.at_high > -jnp.inf, state.high, state.y)
    return jnp.where(jnp.isnan(state.at_high), jnp.nan, found)


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
    most = jnp.maximum(whole * 0.5**state.inside - 0.5 * length, 0.0)
    moved = jnp.where(jnp.abs(moved - middle) <= most, moved, middle - towards * most)
    return jnp.clip(moved, low, state.high)

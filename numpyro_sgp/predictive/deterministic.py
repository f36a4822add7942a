"""Deterministic sites in predictions: those whose rows are made of one row of f each."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import mapped
from numpyro_sgp.predictive.averages import (
    FEW_POINTS,
    average,
    moments,
    normal_parts,
    of_gaussians,
)
from numpyro_sgp.predictive.quantiles import solved
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.by_row import rows_of_values
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.program import Program, opening
from numpyro_sgp.tracing.trees import is_number

_ROUNDING = 1e-6  # of a level
_FEW = 16  # points, of which some have the same values where there are steps
_FAR = 2.0  # times as far from others as halves of these are, where there is a jump
_AGREED = 1e-4  # of a standard deviation
_MOST_SORTED = 1e7  # numbers at all points


@jax.tree_util.register_dataclass
@dataclass
class OfRows:
    """What is predicted at a site whose rows are along a known axis."""

    values: dict
    row_axis: int = field(metadata={"static": True})


class Site(NamedTuple):
    """A deterministic site that can be predicted."""

    shape: tuple[int, ...]
    row_axis: int
    is_linear: bool


def numbers_of(trace, names: Collection[str] | None = None) -> dict[str, Array]:
    """Values of deterministic sites that are real numbers, in floating point."""
    return {
        name: jnp.asarray(site["value"], jnp.result_type(float))
        for name, site in trace.items()
        if site["type"] == "deterministic" and _is_real(site["value"])
        if names is None or name in names
    }


def _is_real(value):
    if not is_number(value) or not np.size(value):
        return False
    kinds, dtype = (jnp.floating, jnp.integer, jnp.bool_), jax.dtypes.result_type(value)
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in kinds)


def sites_of_rows(
    run: Callable[[dict, dict], dict],
    f: dict[str, Array],
    last: Collection[str],
    responses: dict[str, Array],
    data: list | None,
) -> dict[str, Site]:
    """
    The deterministic sites that are made, row by row, of rows of GP sites.

    :param run: from values of GP sites and of responses to the model's trace.
    :param f: values of all GP sites.
    :param last: names of those that feed no other.
    :param responses: values of those that are not given, whatever they are.
    :param data: see :func:`~numpyro_sgp.tracing.by_row.rows_of_values`.
    """

    def values():
        opened = {k: opening(k, v.shape, v.dtype) for k, v in f.items()}
        drawn = {k: opening(("", k), v.shape, v.dtype) for k, v in responses.items()}
        found = numbers_of(run(opened, drawn))
        return {name: value for name, value in found.items() if name not in f}

    program = Program(values)
    rows = rows_of_values(program, last, data)
    linear = LinearProgram.of(program, last)
    return {
        name: Site(value.aval.shape, rows[name].axis, linear.kind(value).is_linear)
        for name, value in linear.outputs.items()
        if rows[name] is not None and linear.labels(value)
    }


def of_deterministic(
    parts, points, levels, gaussians=0, others=None, data=None, skip=(), only=None
) -> dict[str, OfRows]:
    """
    What is predicted at deterministic sites that are made of rows of GP sites.

    :param points: weighted ones, for moments, for what is linear, and for quantiles.
    :param gaussians: of how many Gaussians in turn the points are; 0 where they are of
        something else.
    :param others: points of another rule for moments, by which jumps and kinks are told.
    :param data: see :func:`sites_of_rows`.
    :param skip: names of sites that are not wanted.
    :param only: names of those that may be, if not all may.
    """
    for_moments, units, for_quantiles, *_ = points
    middle = parts.middle(for_moments)
    trace = parts.run(middle["f"], middle["others"], middle["key"])
    if not numbers_of(trace).keys() - {*skip, *parts.posteriors}:
        return {}
    responses = {
        name: messages.zeros_like(trace[name]["fn"])
        for name in parts.responses
        if name in trace and not trace[name]["is_observed"]
    }

    def run(f, drawn):
        f = {**middle["f"], **f}
        return parts.run(f, middle["others"], middle["key"], drawn)

    means = {name: q.mean for name, q in parts.posteriors.items()}
    found = sites_of_rows(run, means, parts.last, responses, data)
    found = {
        name: site
        for name, site in found.items()
        if name not in skip and (only is None or name in only)
    }
    linear = {k: site for k, site in found.items() if site.is_linear and gaussians}
    if gaussians * sum(int(np.prod(site.shape)) for site in linear.values()) > _MOST_SORTED:
        linear = {}
    curved = {k: site for k, site in found.items() if k not in linear}

    def numbers_at(point, sites):
        values = numbers_of(parts.run(point["f"], point["others"], point["key"]), sites)
        return jnp.concatenate([values[name].reshape(-1) for name in sites])

    def at(point, sites):
        value = numbers_at(point, sites)
        return value, jnp.zeros_like(value)

    out = {}
    if linear:
        made_of = normal_parts(partial(at, sites=linear), units, gaussians)
        weights, locs, variances = made_of
        least = jnp.finfo(variances.dtype).tiny  # of what is zero times f
        values = of_gaussians(weights, locs, jnp.maximum(variances, least), levels)
        is_known = values["sd"] <= 2.0 * jnp.sqrt(least)
        values["sd"] = jnp.where(is_known, 0.0, values["sd"])
        out |= split(values, linear)
    if curved:
        of_curved, some = partial(numbers_at, sites=curved), numbers_at(middle, curved)
        where = partial(at, sites=curved), jnp.where(jnp.isfinite(some), some, 0.0)
        mean, variance = moments(where[0], for_moments, where[1])
        if others is not None:
            again = moments(where[0], others, where[1])
            last = (parts.posteriors[name] for name in parts.last)
            several = sum(int(np.prod(q.batch_shape)) for q in last) > 1
            size = None
            if several and gaussians:
                size = len(for_quantiles["weight"]) // gaussians
            few = jax.tree.map(lambda v: v[:_FEW], for_quantiles)
            ordered = jnp.sort(mapped(of_curved, few, FEW_POINTS), axis=0)
            steps = jnp.any(ordered[1:] == ordered[:-1], axis=0)
            half, other = (
                moments(where[0], _half(for_quantiles, first, size), where[1])
                for first in (True, False)
            )
            mean, variance = chosen((mean, variance), again, half, other, steps)
        sd = jnp.sqrt(jnp.maximum(variance, 0.0))
        quantiles = _quantiles(of_curved, for_quantiles, levels, mean, sd)
        values = {"mean": mean, "sd": sd, "quantiles": quantiles, "probs": None}
        out |= split(values, curved)
    return out


def _quantiles(at, points, levels, mean, sd):
    """By sorting, or where that takes too much memory, by looking for them."""
    if not levels.size:
        return jnp.zeros((0, *mean.shape), mean.dtype)
    if mean.size * len(points["weight"]) > _MOST_SORTED:

        def cdf(y, few):
            return average(lambda point: (at(point) <= y).astype(y.dtype), points)

        return solved(cdf, levels, mean, sd)
    values = mapped(at, points, FEW_POINTS)
    return of_sorted(points["weight"], values, levels)


def split(found: dict, sites: dict[str, Site]) -> dict[str, OfRows]:
    """What is predicted of all numbers of some sites together, by site."""
    out, end = {}, 0
    for name, site in sites.items():
        begin, end = end, end + int(np.prod(site.shape))
        values = {
            k: v if v is None else v[..., begin:end].reshape(*v.shape[:-1], *site.shape)
            for k, v in found.items()
        }
        out[name] = OfRows(values, site.row_axis)
    return out


def _half(points, first, size=None):
    """
    Half of weighted points: of each four in a row both ends, or both between them, which
    have the same mean where points are evenly spaced.

    :param size: of sequences of quasi-random points, of which the first halves, or the last
        ones, are taken, each of which is such a sequence; None for evenly spaced points.
    """
    index = np.arange(len(points["weight"]))
    if size is None:
        chosen = np.isin(index % 4, (0, 3))
    else:
        chosen = index % size < size // 2
    half = jax.tree.map(lambda v: v[index[chosen == first]], points)
    return {**half, "weight": half["weight"] / jnp.sum(half["weight"])}


def chosen(rule, again, half, other, steps=False) -> tuple[Array, Array]:
    """
    Means and variances by a rule for smooth functions, or where it is off by more than
    others are, because of a jump or a kink, by those: of smooth ones that have long tails
    these have less.

    :param rule: means and variances.
    :param again: those by a rule as good.
    :param half: by one half of the other points, see :func:`_half`.
    :param other: by the other one.
    :param steps: whether values are the same at many points, so that they have no tails.
    """
    mean = 0.5 * (half[0] + other[0])
    parts = (v + (m - mean) ** 2 for m, v in (half, other))
    variance = 0.5 * sum(parts)
    error, of_halves = _apart(rule, again), _apart(half, other)
    size = jnp.sqrt(jnp.maximum(rule[1], 0.0))
    # Rules of products may be off alike: where functions are equal, both have nodes.
    far = _apart(rule, (mean, variance)) > _FAR * of_halves
    off = (error > _AGREED * size) & ((error > of_halves) | (steps & far))
    return jnp.where(off, mean, rule[0]), jnp.where(off, variance, rule[1])


def _apart(a, b):
    sd, other = (jnp.sqrt(jnp.maximum(variance, 0.0)) for _, variance in (a, b))
    return jnp.maximum(jnp.abs(a[0] - b[0]), jnp.abs(sd - other))


def of_sorted(weights: Array, values: Array, levels: Array) -> Array:
    """
    Quantiles of values at weighted points, between these but where they are steps.

    :param weights: shape ``(S,)``.
    :param values: shape ``(S, n)``.
    :return: shape ``(levels, n)``.
    """
    weights = jnp.broadcast_to(weights[:, None], values.shape).astype(values.dtype)
    values, weights = jax.lax.sort((values, weights), dimension=0, num_keys=1)
    has_steps = jnp.mean(values[1:] == values[:-1], axis=0) > 0.5
    reached = jnp.cumsum(weights, axis=0)
    reached = reached / reached[-1]
    middles = reached - 0.5 * weights

    def of_level(level):
        place = jnp.argmax(reached >= level - _ROUNDING, axis=0)
        step = jnp.take_along_axis(values, place[None], axis=0)[0]
        between = jax.vmap(jnp.interp, (None, 1, 1))(level, middles, values)
        return jnp.where(has_steps | ~jnp.isfinite(between), step, between)

    return jax.lax.map(of_level, levels)

"""Deterministic sites as responses that have no noise, where each row is of a row of f."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_sgp.linalg import einsum
from numpyro_sgp.predictive.entries import are_mixed
from numpyro_sgp.tracing.rows import sites_on_f
from numpyro_sgp.tracing.trees import is_number

_ROUNDING = 1e-6  # of a level


def without_noise(trace, gp_sites) -> dict:
    """Deterministic sites of numbers, each as a site with a distribution at its value."""
    return {
        name: {"fn": dist.Delta(jnp.asarray(site["value"], jnp.result_type(float)))}
        for name, site in trace.items()
        if site["type"] == "deterministic" and name not in gp_sites and _is_real(site)
    }


def _is_real(site):
    if not is_number(site["value"]):
        return False
    dtype = jax.dtypes.result_type(site["value"])
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in kinds)


def mixed(
    values_at: Callable[[dict, dict | None], dict],
    names: set[str],
    points: dict,
    means: dict[str, Array],
    responses: dict[str, Array],
) -> dict[str, Array]:
    """
    Whether rows of deterministic sites are made of other rows of f than their own, by
    moving these: a sum over rows, differences, what is sorted.

    :param values_at: from values of GP sites, and of responses, to those of the sites.
    :param names: of the sites, those that depend on f.
    :param points: weighted values of GP sites, by which is known what moves are small.
    :param means: of GP sites, ``batch_shape + (N,)``.
    :param responses: any values of those that are not given.
    :return: by site, without those that have no axis of rows, or several that may be, and
        those that depend on a response.
    """
    counts = sorted({v.shape[-1] for v in means.values()}, reverse=True)
    drawn = sites_on_f(lambda y: values_at(means, y), responses) if responses else set()
    axes, here = {}, values_at(means, None)
    for name in sorted(names - drawn):
        shape = jnp.shape(here[name])
        number = next((n for n in counts if n in shape), 0)
        if number == 1 or shape.count(number) == 1:
            axes[name] = number, -1 - shape[::-1].index(number)
    scales = {name: _spread(points["f"][name], points["weight"]) for name in means}

    def of_axes(f):
        found = values_at(f, None)
        return {name: found[name] for name in axes}

    return are_mixed(of_axes, means, scales, axes)


def of_values(weights, values, levels) -> tuple[Array, Array]:
    """
    Whether values at weighted points are steps, as most are equal to the next one; and
    their quantiles, between points where they are not.

    :param values: ``(S, *shape)``.
    :return: shapes ``shape`` and ``(levels, *shape)``.
    """
    shape, flat = values.shape[1:], values.reshape(len(values), -1)
    weights = jnp.broadcast_to(weights[:, None], flat.shape).astype(flat.dtype)
    ordered, weights = jax.lax.sort((flat, weights), dimension=0, num_keys=1)
    has_steps = jnp.mean(ordered[1:] == ordered[:-1], axis=0) > 0.5
    reached = jnp.cumsum(weights, axis=0)
    reached = reached / reached[-1]

    def of_level(level):
        step = jnp.argmax(reached >= level - _ROUNDING, axis=0)
        step = jnp.take_along_axis(ordered, step[None], axis=0)[0]
        middles = reached - 0.5 * weights
        between = jax.vmap(jnp.interp, (None, 1, 1))(level, middles, ordered)
        return jnp.where(has_steps, step, between).reshape(shape)

    found = jax.lax.map(of_level, levels) if levels.size else jnp.zeros((0, *shape))
    return has_steps.reshape(shape), found.astype(values.dtype)


def _spread(values, weights):
    """Standard deviations, but where these are next to nothing."""
    mean = einsum("s,s...->...", weights, values)
    sd = jnp.sqrt(einsum("s,s...->...", weights, (values - mean) ** 2))
    least = jnp.where(jnp.max(sd) > 0.0, 1e-2 * jnp.max(sd), 1.0)
    return jnp.maximum(sd, least)

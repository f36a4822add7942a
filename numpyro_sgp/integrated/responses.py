"""Responses at draws of all latents: their moments, and densities of observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_sgp._programs import join_static, mapped, shared, split_static
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.marginals import given
from numpyro_sgp.integrated.views import Parts
from numpyro_sgp.predictive.predictions import read_rows
from numpyro_sgp.predictive.responses import of_responses
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.rows import by_row

_MAX_NUMBERS = 3e6  # of rows and draws, held at one time


def at_draws(field: Field, run: Callable, free, values: dict, args, kwargs, *more) -> Any:
    """
    By one program ``run(free, values, (args, kwargs), *more)``.

    :param free: unconstrained hyperparameters, ``(S, p)``.
    :param values: of the other latents by name, each ``(S, *shape)``.
    """
    arrays, static = split_static((args, kwargs))

    def program(free, values, arrays, *more):
        return run(free, values, join_static(arrays, static), *more)

    free = jnp.asarray(free, field.dtype)
    values, arrays = jax.tree.map(jnp.asarray, (values, arrays))
    return shared(program)(free, values, arrays, *more)


def predicted(
    field: Field, free, values: dict, args, kwargs, levels, rng_key: Array
) -> dict:
    """
    Means, standard deviations and quantiles of responses, averaged over draws.

    :param free: unconstrained hyperparameters, ``(S, p)``.
    :param values: of the other latents by name, each ``(S, *shape)``.
    :param levels: of the quantiles.
    :param rng_key: of what is drawn.
    :return: by site.
    """
    number, num_rows = len(free), _num_rows(field, values)

    def run(free, values, where, rng_key):
        parts = Parts(field, values, free, *where)
        points = {
            "f": {k: values[k] for k in field.sites},
            "others": {k: values[k] for k in field.effects} | {"": free},
            "weight": jnp.full(number, 1.0 / number, field.dtype),
            "key": jax.random.split(rng_key, number),
        }
        found = jnp.asarray(levels, field.dtype)
        return of_responses(parts, (points, points), rng_key, found, every=True)

    found = at_draws(field, run, free, values, args, kwargs, rng_key)
    return read_rows(found, field.sites, num_rows, 1.0, levels)


def densities(field: Field, free, values: dict, args, kwargs) -> dict[str, Array]:
    """
    Log predictive density of each row of each observed site, NaN where a mask leaves a row
    out; draws are as for :func:`predicted`.
    """
    number, num_rows = len(free), _num_rows(field, values)

    def run(free, values, where):
        def one(inputs):
            free, values = inputs
            trace = given(field, free, values, *where, jax.random.key(0))
            checks.check_observations(trace)
            found = {}
            for name, site in trace.items():
                if not messages.is_response(site):
                    continue
                density = by_row(messages.log_prob(site, scaled=False), num_rows)
                count = by_row(messages.counted(site), num_rows)
                if density is None:  # of other rows than those of the GP site
                    density = messages.log_prob(site, scaled=False)
                    count = messages.counted(site)
                found[name] = jnp.where(count > 0, density, jnp.nan)
            return found

        chunk = int(np.clip(_MAX_NUMBERS / num_rows, 1, number))
        each = mapped(one, (free, values), chunk)
        return {k: logsumexp(v, axis=0) - np.log(number) for k, v in each.items()}

    return at_draws(field, run, free, values, args, kwargs)


def _num_rows(field, values) -> int:
    return max(values[name].shape[-1] for name in field.sites)

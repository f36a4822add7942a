"""How values of a model are made of the numbers of its field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.integrated.groups import limit, rows_of
from numpyro_sgp.integrated.predictors import Grouped, Linear

if TYPE_CHECKING:
    from numpyro_sgp.integrated.field import Field

_SIGNS = 24  # draws of them


def combined(linear: Callable[[Array | None], Linear]) -> Array:
    """
    How far variances of values, ``(J, N)``, are from those of values of one row each.

    What is left open at a row is apart from other rows: where several make a value (a mean
    over rows), its variance is not that of their sum, whatever their signs. Of two rows at
    least half of all signs show another square, so that one value's rows are not seen in
    one of 2^24 cases.

    :param linear: from a key of signs, or None, to the values; see :meth:`Field.linear`.
    """
    left = linear(None).left

    def away(signs):
        return jnp.sum(jnp.abs(linear(signs).left ** 2 - left**2), axis=0)

    keys = jax.random.split(jax.random.key(0), _SIGNS)
    return jnp.max(jax.lax.map(away, keys), axis=0)


def linear_maps(
    field: Field, program, known, targets, joined, signs: Array | None, grouped: bool
) -> Linear:
    """See :meth:`Field.linear`."""
    groups, outputs = field.groups, program.outputs

    def of_field(openings):
        return joined(program.evaluate(targets, known, openings))

    shapes = list(field.gp_shapes_of(outputs))
    zeros = {("gp", k): jnp.zeros(s, field.dtype) for k, s in shapes}
    zeros |= {("effect", k): jnp.zeros(field.shapes[k], field.dtype) for k in field.effects}
    base, linear = jax.linearize(of_field, zeros)
    labels = frozenset().union(*map(program.labels, targets))
    maps, left = [], []
    for name, shape in shapes:
        A, sd = known[outputs["projections"][name]], known[outputs["left"][name]]
        A = jnp.broadcast_to(A, (*shape[:-1], *A.shape[-2:]))
        A = A.reshape(-1, *A.shape[-2:])
        sd = jnp.broadcast_to(sd, shape).reshape(-1, shape[-1])
        if ("gp", name) not in labels:
            maps.append(jnp.zeros((len(A) * A.shape[1], *base.shape), field.dtype))
            left.extend([jnp.zeros_like(base)] * len(A))
            continue
        if signs is not None:
            sd = sd * jax.random.rademacher(signs, sd.shape, sd.dtype)
        for q in range(len(A)):

            def of_function(values, q=q, name=name, shape=shape):
                full = jnp.zeros((math.prod(shape[:-1]), shape[-1]), field.dtype)
                full = full.at[q].set(values).reshape(shape)
                return linear({**zeros, ("gp", name): full})

            maps.append(jax.vmap(of_function)(A[q]))
            left.append(of_function(sd[q]))
    for name in field.apart():
        shape = field.shapes[name]

        def of_effect(values, name=name, shape=shape):
            return linear({**zeros, ("effect", name): values.reshape(shape)})

        maps.append(jax.vmap(of_effect)(jnp.eye(math.prod(shape), dtype=field.dtype)))
    sds = jnp.stack(left)
    if groups is None:
        return Linear(base, jnp.concatenate(maps), sds)

    def of_groups(numbers):
        values = groups.parts(numbers)
        return linear({**zeros, **{("effect", k): v for k, v in values.items()}})

    if not grouped:
        numbers = jnp.eye(groups.number * groups.each, dtype=field.dtype)
        maps.append(jax.vmap(of_groups)(numbers))
        return Linear(base, jnp.concatenate(maps), sds)
    found = rows_of(groups, of_groups, field.dtype)
    # NaN tells of rows of several groups where those that were looked at have one.
    base = jnp.where(found.away <= limit(field.dtype), base, jnp.nan)
    given = found.index, found.weights, groups.number, found.away
    return Grouped(base, jnp.concatenate(maps), sds, *given)

"""Covariances of inducing variables, over the union of the sets of a family."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_sgp.inducing.variables import InducingVariables, covariance


def union(inducing: Sequence[Any]) -> Array:
    """
    All inducing points as one set.

    :param inducing: points of each set, shapes ``(M_l, D)`` or ``(*batch, M_l, D)``.
    :return: shape ``(*batch, sum(M_l), D)``.
    :raises NotImplementedError: if a set is not of points.
    """
    for points in inducing:
        if isinstance(points, InducingVariables):
            raise NotImplementedError(
                "This needs inducing points among the inputs, not "
                f"{type(points).__name__}. For draws of f at given inputs use sample(), "
                "which is joint over them."
            )
    if len(inducing) == 1:
        return inducing[0]
    batch = jnp.broadcast_shapes(*(points.shape[:-2] for points in inducing))
    sets = [jnp.broadcast_to(p, (*batch, *p.shape[-2:])) for p in inducing]
    return jnp.concatenate(sets, axis=-2)


def inducing_covariance(kernel, inducing: tuple[Array | InducingVariables, ...]) -> Array:
    """
    K_uu over the union of the sets.

    :param kernel: a kernel.
    :param inducing: points or other inducing variables of each set, shapes
        ``(*batch, M_l, D)``.
    :return: shape ``(*batch, M, M)`` with M the number of points in all sets.
    """
    if not _inter_domain(inducing):
        Z = union(inducing)
        return kernel(Z, Z)
    rows = []
    for i, first in enumerate(inducing):
        blocks = [jnp.swapaxes(row[i], -1, -2) for row in rows]
        rows.append(blocks + [covariance(kernel, first, other) for other in inducing[i:]])
    return _concatenate([_concatenate(blocks, -1) for blocks in rows], -2)


def cross_covariance(
    kernel, inducing: tuple[Array | InducingVariables, ...], X: Array
) -> Array:
    """
    K_uf between the union of the sets and f(X).

    :param kernel: a kernel.
    :param inducing: points or other inducing variables of each set, shapes
        ``(*batch, M_l, D)``.
    :param X: inputs, shape ``(*batch, N, D)``.
    :return: shape ``(*batch, M, N)``.
    """
    if not _inter_domain(inducing):
        return kernel(union(inducing), X)
    return _concatenate([covariance(kernel, points, X) for points in inducing], -2)


def _inter_domain(inducing):
    return any(isinstance(points, InducingVariables) for points in inducing)


def _concatenate(blocks, axis):
    """Blocks side by side, each for the same batch."""
    batch = jnp.broadcast_shapes(*(block.shape[:-2] for block in blocks))
    blocks = [jnp.broadcast_to(block, (*batch, *block.shape[-2:])) for block in blocks]
    return jnp.concatenate(blocks, axis)

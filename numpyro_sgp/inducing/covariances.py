"""Covariances of inducing variables, over the union of the sets of a family."""

import jax.numpy as jnp
from jax import Array


def union(inducing: tuple[Array, ...]) -> Array:
    """
    All inducing points as one set.

    :param inducing: points of each set, shapes ``(M_l, D)`` or ``(*batch, M_l, D)``.
    :return: shape ``(*batch, sum(M_l), D)``.
    """
    if len(inducing) == 1:
        return inducing[0]
    batch = jnp.broadcast_shapes(*(points.shape[:-2] for points in inducing))
    sets = [jnp.broadcast_to(p, (*batch, *p.shape[-2:])) for p in inducing]
    return jnp.concatenate(sets, axis=-2)


def inducing_covariance(kernel, inducing: tuple[Array, ...]) -> Array:
    """
    K_uu over the union of the sets.

    :param kernel: a kernel.
    :param inducing: points of each set, shapes ``(*batch, M_l, D)``.
    :return: shape ``(*batch, M, M)`` with M the number of points in all sets.
    """
    Z = union(inducing)
    return kernel(Z, Z)


def cross_covariance(kernel, inducing: tuple[Array, ...], X: Array) -> Array:
    """
    K_uf between the union of the sets and f(X).

    :param kernel: a kernel.
    :param inducing: points of each set, shapes ``(*batch, M_l, D)``.
    :param X: inputs, shape ``(*batch, N, D)``.
    :return: shape ``(*batch, M, N)``.
    """
    return kernel(union(inducing), X)

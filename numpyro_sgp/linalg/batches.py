"""LAPACK's calls for batches of matrices, which can wait for each other for ever."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgp._threads import few_cores


def by_matrix(fn: Callable[..., Array], *matrices: Array) -> Array:
    """
    A function of matrices, by LAPACK, of each of a batch. With few cores they are
    taken one after another: a call for a whole batch waits in a thread for tasks of a pool
    that this thread is of, and as many calls side by side as it has threads never end
    (jaxlib 0.10). Under ``vmap`` it is a batch all the same.

    :param fn: of matrices to a matrix, which takes batches too.
    :param matrices: of one batch shape.
    """
    batch = matrices[0].shape[:-2]
    if math.prod(batch) == 1 or not few_cores():
        return fn(*matrices)
    each = tuple(m.reshape(-1, *m.shape[-2:]) for m in matrices)
    out = lax.map(lambda given: fn(*given), each)
    return out.reshape(*batch, *out.shape[-2:])


def cholesky(A: Array) -> Array:
    """Lower factors of positive definite matrices, NaN where there is none."""
    return by_matrix(lambda A: lax.linalg.cholesky(A, symmetrize_input=False), A)


def triangular_solve(A: Array, B: Array, **options) -> Array:
    """:func:`jax.lax.linalg.triangular_solve`, batch dimensions broadcast."""
    batch = jnp.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A, B = (jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in (A, B))
    return by_matrix(lambda A, B: lax.linalg.triangular_solve(A, B, **options), A, B)

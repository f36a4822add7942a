"""LAPACK's calls for batches of matrices, which can wait for each other for ever."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from numpyro_sgp._threads import few_cores
from numpyro_sgp.linalg.products import matmul


def _one_by_one(fn: Callable[..., Array], along: int | None = None) -> Callable[..., Array]:
    """
    A function of matrices, by LAPACK, that takes those of a batch one after another, under
    ``vmap`` too: a call for a whole batch waits in a thread for tasks of a pool that this
    thread is of, and as many calls side by side as it has threads never end (jaxlib 0.10).
    Its derivatives are to be given beside it.

    :param along: of two matrices, the axis of what is solved for in the second one, which
        has them all where the first one is the same in a batch.
    """

    @custom_vmap
    def of_one(*matrices):
        return fn(*matrices)

    @of_one.def_vmap
    def of_batch(axis_size, in_batched, *matrices):
        if along is not None and not in_batched[0]:
            A, B = matrices
            shape = list(B.shape[1:])
            shape[along] *= axis_size
            B = jnp.moveaxis(B, 0, along)
            out = of_one(A, B.reshape(shape)).reshape(B.shape)
            return jnp.moveaxis(out, along, 0), True
        pairs = zip(matrices, in_batched, strict=True)
        each = [
            m if batched else jnp.broadcast_to(m, (axis_size, *m.shape))
            for m, batched in pairs
        ]
        return lax.map(lambda given: of_one(*given), tuple(each)), True

    @functools.wraps(fn)
    def call(*matrices):
        batch = matrices[0].shape[:-2]
        number = math.prod(batch)
        each = tuple(m.reshape(number, *m.shape[-2:]) for m in matrices)
        if number == 1:
            out = of_one(*(m[0] for m in each))
        else:
            out = lax.map(lambda given: of_one(*given), each)
        return out.reshape(*batch, *out.shape[-2:])

    return call


def _in_turn() -> bool:
    """Whether matrices are to be taken so; not inside of ``shard_map``, by devices."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return few_cores() and AxisType.Manual not in types


def cholesky(A: Array) -> Array:
    """Lower factors of positive definite matrices, NaN where there is none."""
    if not _in_turn():
        return lax.linalg.cholesky(A, symmetrize_input=False)
    return _factor(A)


_factors = _one_by_one(functools.partial(lax.linalg.cholesky, symmetrize_input=False))


@jax.custom_jvp
def _factor(A):
    return _factors(A)


@_factor.defjvp
def _factor_jvp(primals, tangents):
    (A,), (dA,) = primals, tangents
    L = _factor(A)
    half = triangular_solve(L, dA, left_side=False, lower=True, transpose_a=True)
    phi = jnp.tril(triangular_solve(L, half, left_side=True, lower=True))
    phi = phi - 0.5 * phi * jnp.eye(L.shape[-1], dtype=L.dtype)
    return L, matmul(L, phi)


def eigh(A: Array) -> tuple[Array, Array]:
    """Rising eigenvalues and eigenvectors of symmetric matrices; without derivatives."""
    if not _in_turn():
        return jnp.linalg.eigh(A)
    both = _eigen(A)
    return both[..., 0, :], both[..., 1:, :]


def _eigen_of_one(A):
    values, vectors = jnp.linalg.eigh(A)
    return jnp.concatenate([values[None], vectors])


_eigen = _one_by_one(_eigen_of_one)


def triangular_solve(
    A: Array,
    B: Array,
    *,
    left_side: bool,
    lower: bool = False,
    transpose_a: bool = False,
) -> Array:
    """:func:`jax.lax.linalg.triangular_solve`, batch dimensions broadcast."""
    batch = jnp.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A, B = (jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in (A, B))
    if not _in_turn():
        options = {"left_side": left_side, "lower": lower, "transpose_a": transpose_a}
        return lax.linalg.triangular_solve(A, B, **options)

    def product(X):
        triangle = jnp.tril(A) if lower else jnp.triu(A)
        triangle = triangle.mT if transpose_a else triangle
        return matmul(triangle, X) if left_side else matmul(X, triangle)

    def solved(transpose):
        solve = _solver(left_side, lower, transpose)
        return lambda _, B: solve(A, B)

    return lax.custom_linear_solve(product, B, solved(transpose_a), solved(not transpose_a))


@functools.cache
def _solver(left_side, lower, transpose_a):
    options = {"left_side": left_side, "lower": lower, "transpose_a": transpose_a}
    solve = functools.partial(lax.linalg.triangular_solve, **options)
    return _one_by_one(solve, along=1 if left_side else 0)

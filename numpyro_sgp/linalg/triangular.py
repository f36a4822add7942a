"""Products and solves with triangular matrices, by blocks where that is faster."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.linalg.batches import triangular_solve
from numpyro_sgp.linalg.products import einsum, matmul

# On a CPU, larger matrices are taken in blocks, at most four a side and, but for those,
# no larger than `_BLOCK`. Measured on one core at 1024, in units of one product of two
# dense matrices, in float32 (float64): the transpose of `half_congruence` 1.6 (1.5),
# by blocks of 256 1.1 (1.0); `triangular_product` 0.76 (0.9), its derivative with respect
# to the triangle 0.77 (0.7). Smaller blocks gain no more and take longer to compile; two
# a side compile in .6 s where four take .95, and a step takes 8.9 (9.9) where it takes 7.9
# (8.7). At 512 what a step has of both gains a fifth. Solves gain little (a tenth in
# float32, nothing in float64, by products with the inverses of diagonal blocks), and
# derivatives in float32 have errors some times larger: they are LAPACK's.
_BLOCK = 384
# Inverses are taken by halves down to this size.
_SMALLEST = 128


def diagonal_of(A: Array) -> Array:
    """
    The diagonal of square matrices, shape ``(*batch, M)``: by a mask, which compiles in
    half of the time that :func:`jax.numpy.diagonal` and its derivative, a scatter, take.

    :param A: shape ``(*batch, M, M)``.
    """
    return jnp.sum(jnp.where(jnp.eye(A.shape[-1], dtype=bool), A, 0), axis=-1)


def half_log_det(L: Array) -> Array:
    """
    Half the log-determinant of ``L @ L.mT``, shape ``batch``.

    :param L: lower triangular, shape ``(*batch, M, M)``.
    """
    return jnp.sum(jnp.log(diagonal_of(L)), axis=-1)


def solve_lower(L: Array, B: Array, transpose: bool = False) -> Array:
    """
    ``inv(L) @ B`` for lower triangular ``L``, batch dimensions broadcast.

    :param L: shape ``(*batch, M, M)``.
    :param B: shape ``(*batch, M, K)``.
    :param transpose: whether to solve with the transpose of ``L``.
    :return: shape ``(*batch, M, K)``.
    """
    dtype = jnp.promote_types(L.dtype, B.dtype)
    L, B = L.astype(dtype), B.astype(dtype)
    # LAPACK orders matrices by columns and XLA by rows: solving for the transpose, with the
    # transpose of L, costs nothing, and spares copies that cost as much as the solve.
    batch = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    if L.ndim == 2 and B.ndim > 2:
        # One solve with all right-hand sides rather than a copy of L for each.
        rows = B.mT.reshape(-1, B.shape[-2])
    else:
        L = jnp.broadcast_to(L, (*batch, *L.shape[-2:]))
        rows = jnp.broadcast_to(B, (*batch, *B.shape[-2:])).mT
    out = triangular_solve(L.mT, rows, left_side=False, transpose_a=transpose)
    return out.reshape(*batch, B.shape[-1], B.shape[-2]).mT


def gaussian_log_prob(centred: Array, L: Array) -> Array:
    """
    Log density of ``N(0, L L')``, batch dimensions broadcast.

    :param centred: shape ``(*batch, N)``.
    :param L: lower factor, shape ``(*batch, N, N)``.
    """
    white = solve_lower(L, centred[..., None])[..., 0]
    constant = 0.5 * centred.shape[-1] * jnp.log(2 * jnp.pi).astype(L.dtype)
    return -0.5 * jnp.sum(white**2, axis=-1) - half_log_det(L) - constant


def triangular_product(L: Array, B: Array, transpose: bool = False) -> Array:
    """
    ``L @ B`` for lower triangular ``L``, batch dimensions broadcast. Derivatives with
    respect to the upper triangle of L are not defined.

    :param L: shape ``(*batch, M, M)``.
    :param B: shape ``(*batch, M, K)``.
    :param transpose: whether to multiply by the transpose of ``L``.
    :return: shape ``(*batch, M, K)``.
    """
    return _product(L, B, transpose, _block_size(B))


def half_congruence(L: Array, K: Array) -> Array:
    r"""
    :math:`\Phi(L^{-1} K L^{-\top})` for lower triangular L and symmetric K; Phi: the
    lower triangle with half the diagonal (Murray 2016, arXiv 1602.07527). Where K is
    divided, a gradient with respect to it lies in diagonal blocks and one triangle alone:
    that of what K is made from is right.

    :param L: shape ``(*batch, M, M)``.
    :param K: the shape of L.
    :return: the shape of L.
    """
    return _half_congruence(L, K, _block_size(K))


def lower_inverse(L: Array) -> Array:
    """
    The inverse of lower triangular matrices, by halves: mostly products.

    :param L: shape ``(*batch, M, M)``.
    :return: the shape of L.
    """
    M = L.shape[-1]
    if M <= _SMALLEST:
        return solve_lower(L, jnp.eye(M, dtype=L.dtype))
    L1, L12, L21, L2 = _quarters(L)
    W1, W2 = lower_inverse(L1), lower_inverse(L2)
    W21 = -matmul(W2, matmul(L21, W1))
    top = jnp.concatenate([W1, jnp.zeros_like(L12)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([W21, W2], axis=-1)], axis=-2)


def row_strips(A: Array) -> list[tuple[int, int]]:
    """Begin and end of rows in strips: four for large matrices on a CPU, or one."""
    M = A.shape[-1]
    number = 1 if _block_size(A) == M else 4
    edges = [M * k // number for k in range(number + 1)]
    return list(zip(edges, edges[1:], strict=False))


def _block_size(B):
    """Size up to which matrices are not divided in what is done with B."""
    rows, columns = B.shape[-2:]
    if min(rows, columns) <= _BLOCK or jax.default_backend() != "cpu":
        return rows
    return max(_BLOCK, -(-rows // 4))


def _product(L, B, transpose, size):
    if L.shape[-1] <= size:
        return _transpose_product(L if transpose else L.mT, B)
    (L1, _, L21, L2), (B1, B2) = _quarters(L), _halves(B)
    C1, C2 = _product(L1, B1, transpose, size), _product(L2, B2, transpose, size)
    if transpose:
        return jnp.concatenate([C1 + _transpose_product(L21, B2), C2], axis=-2)
    return jnp.concatenate([C1, matmul(L21, B1) + C2], axis=-2)


def _transpose_product(A, B):
    """``A.mT @ B``, with derivatives with respect to A that need no transpose."""
    return einsum("...km,...kn->...mn", A, B)


def _half_congruence(L, K, size):
    """
    With G the symmetric result and V = L21 G11 / 2, G21 = L2^-1 (K21 L1^-T - 2 V) and
    G22 = L2^-1 (K22 - W - W^T) L2^-T, W = L21 (K21 L1^-T - V)^T: half of the arithmetic
    of two solves (LAPACK's sygst).
    """
    if L.shape[-1] <= size:
        # The order of sides and transposes that needs no copies, as in `solve_lower`.
        solve = partial(triangular_solve, L.mT)
        G = solve(solve(K.mT, left_side=False), left_side=True, transpose_a=True).mT
        return (jnp.triu(G) - 0.5 * G * jnp.eye(L.shape[-1], dtype=L.dtype)).mT
    (L1, _, L21, L2), (K1, K12, _, K2) = _quarters(L), _quarters(K)
    G1 = _half_congruence(L1, K1, size)
    V = 0.5 * matmul(L21, G1 + G1.mT)
    U = solve_lower(L1, K12) - V.mT
    W = matmul(L21, U)
    G2 = _half_congruence(L2, K2 - W - W.mT, size)
    G21 = solve_lower(L2, U.mT - V)
    top = jnp.concatenate([G1, jnp.zeros_like(G21.mT)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([G21, G2], axis=-1)], axis=-2)


def _halves(A, axis=-2):
    return jnp.split(A, [A.shape[axis] // 2], axis=axis)


def _quarters(A):
    """Blocks 11, 12, 21 and 22 of square matrices."""
    top, bottom = _halves(A)
    return *_halves(top, -1), *_halves(bottom, -1)

"""Covariances of latent functions that are dependent under q: in a row, and of all rows."""

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.families import Block
from numpyro_sgp.linalg import einsum, matmul
from numpyro_sgp.linalg.batches import cholesky


def with_variances(covariance: Array | float, variances: Array) -> Array:
    """
    The functions' covariances in each row with variances of their own added.

    :param covariance: shape ``(N, Q, Q)``.
    :param variances: shape ``(*batch, N)``, Q functions in all.
    """
    variances = variances.reshape(-1, variances.shape[-1])
    identity = jnp.eye(len(variances), dtype=variances.dtype)
    return covariance + identity * variances.T[..., None]


def row_covariance(block: Block, projection: Array, residual: Array) -> Array:
    """
    Covariances of the functions in each row, shape ``(N, Q, Q)``.

    :param block: the whitened q(u) of all functions together.
    :param projection: A, shape ``(*batch, M, N)``.
    :param residual: variances that inducing variables leave open, ``(*batch, N)``.
    """
    factor = _joint_factor(block, projection)
    return with_variances(einsum("qnk,pnk->nqp", factor, factor), residual)


def joint_covariance(block: Block, projection: Array, residual: Array) -> Array:
    """
    The covariance of all functions at all rows, shape ``(QN, QN)``.

    :param block: as in :func:`row_covariance`.
    :param projection: as there.
    :param residual: covariances that inducing variables leave open, ``(*batch, N, N)``.
    """
    factor = _joint_factor(block, projection)
    num, rows, _ = factor.shape
    F = factor.reshape(num * rows, -1)
    each = residual.reshape(num, rows, rows)
    return matmul(F, F.T) + jax.scipy.linalg.block_diag(*each)


def place(x: Array, covariance: Array) -> Array:
    """
    What has these covariances in each row where x is standard normal.

    :param x: shape ``(*batch, N)``.
    :param covariance: shape ``(N, Q, Q)``.
    """
    L = cholesky(covariance)
    return einsum("nqp,pn->qn", L, x.reshape(L.shape[-1], -1)).reshape(x.shape)


def _joint_factor(block, projection):
    """``A_q' R_q``, what the joint factor of q(u) adds at each row: ``(Q, N, QM)``."""
    rows = einsum("...mk,...mn->...nk", block.sqrt, projection)
    return rows.reshape(-1, *rows.shape[-2:])

"""q(f(X)) with what does not depend on X computed once."""

import copy
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import Array

from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.families import QU, Block, BlockGaussian
from numpyro_sgp.linalg import einsum, matmul, solve_lower, triangular_product

_SMALLEST = 128  # rows that a triangular matrix is divided into


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["chol", "jitter", "inverse", "q", "weights", "root", "more"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Kept:
    r"""
    What marginals at all inputs have in common, with :math:`L L^\top = K_{uu}` and whitened
    :math:`q(w) = N(w, S)`.

    :param chol: L, shape ``(*batch, M, M)``.
    :param jitter: what was added to the diagonal of K_uu.
    :param inverse: :math:`L^{-1}`.
    :param q: whitened.
    :param weights: :math:`L^{-\top} w`, shape ``(*batch, M)``; None where means are more
        than that.
    :param root: R, without entries below its diagonal; None where functions depend on each
        other.
    :param more: V, likewise, with
        :math:`L^{-\top} (I - S) L^{-1} = R^\top R - V^\top V`: of shapes
        ``(*batch, r, M)``, a row for each direction in which q(w) is narrower than the
        prior in R, and wider in V, and rows of zeros up to a power of two.
    """

    chol: Array
    jitter: Array
    inverse: Array
    q: Any
    weights: Array | None
    root: Array | None
    more: Array | None


def keep(chol: Array, jitter: Array, q: QU) -> Kept:
    r"""
    What a posterior keeps for other inputs. Variances are then
    :math:`k(x, x) - |R k_u(x)|^2 + |V k_u(x)|^2`: one product with a triangular matrix, and
    what V needs, in the place of a factorisation, a solve and a product. Both are made in
    double precision, and used in that of the posterior. (Rounding errors of
    :math:`k^\top W k` with :math:`W = R^\top R - V^\top V` would be those of the condition
    of K_uu, in single precision some 1e-3, rather than of its root.)

    :param chol: known lower factor of K_uu, shape ``(*batch, M, M)``.
    :param jitter: what was added to its diagonal.
    :param q: in whitened coordinates.
    """
    eye = jnp.broadcast_to(jnp.eye(chol.shape[-1], dtype=chol.dtype), chol.shape)
    weights, root, more = None, None, None
    if isinstance(q, BlockGaussian) and _is_plain(q):
        mu = jnp.concatenate([block.mu for block in q.blocks], axis=-1)
        weights = solve_lower(chol, mu[..., None], transpose=True)[..., 0]
        roots = _roots(np.asarray(chol, float), [_left(block) for block in q.blocks])
        root, more = (jnp.asarray(part.astype(chol.dtype)) for part in roots)
    return Kept(chol, jitter, solve_lower(chol, eye), q, weights, root, more)


def _is_plain(q) -> bool:
    """Whether q(w) is made of a Gaussian for each set and function, and of nothing else."""
    blocks = all(type(block) is Block for block in q.blocks)
    return type(q) is BlockGaussian and blocks and q.independent_latents


def _left(block) -> np.ndarray:
    """I - S of a block."""
    eye = np.eye(block.size)
    if block.is_prior:
        return np.zeros_like(eye)
    sqrt = np.asarray(block.sqrt, float)
    return eye - (
        sqrt[..., None] ** 2 * eye
        if block.is_diagonal
        else sqrt @ np.swapaxes(sqrt, -1, -2)
    )


def _roots(L, left) -> tuple[np.ndarray, np.ndarray]:
    """R and V."""
    size = L.shape[-1]
    batch = np.broadcast_shapes(L.shape[:-2], *(part.shape[:-2] for part in left))
    L = np.broadcast_to(L, (*batch, size, size))
    left = [np.broadcast_to(part, (*batch, *part.shape[-2:])) for part in left]
    found: tuple[dict, dict] = {}, {}
    for index in np.ndindex(batch):
        parts = _split_root(scipy.linalg.block_diag(*(part[index] for part in left)))
        for rows, part in zip(found, parts, strict=True):
            part = scipy.linalg.solve_triangular(L[index], part, lower=True, trans="T").T
            rows[index] = np.linalg.qr(part, mode="r")
    return _filled_up(found[0], batch, size), _filled_up(found[1], batch, size)


def _filled_up(matrices, batch, size) -> np.ndarray:
    """By rows of zeros, to a power of two of them, so that few programs do."""
    rank = max(map(len, matrices.values()), default=0)
    rank = min(1 << (rank - 1).bit_length(), size) if rank else 0
    out = np.zeros((*batch, rank, size))
    for index, rows in matrices.items():
        out[index][: len(rows)] = rows
    return out


def _split_root(left) -> tuple[np.ndarray, np.ndarray]:
    """T and U with T T' - U U' = I - S, of no more columns together where U has any."""
    size = len(left)
    # What is added or left out is a part in 1e12 of a prior variance.
    with suppress(np.linalg.LinAlgError):
        return np.linalg.cholesky(left + 1e-12 * np.eye(size)), np.zeros((size, 0))
    values, vectors = np.linalg.eigh(left)
    vectors = vectors * np.sqrt(np.abs(values))
    return vectors[:, values > 1e-12], vectors[:, values < -1e-12]


class KeptPosterior(SparsePosterior):
    """
    A :class:`SparsePosterior` at other inputs.

    :param posterior: at these inputs.
    :param kept: of :func:`keep`, for the same parameters.
    """

    in_programs = False  # which would not have what is kept

    def __init__(self, posterior: SparsePosterior, kept: Kept):
        self.__dict__ |= copy.copy(posterior).__dict__
        self.__dict__.pop("_kept_factors", None)
        self.kept = kept

    def _factors(self):
        factors = self.__dict__.get("_kept_factors")
        if factors is None:
            kept = self.kept
            projection = triangular_product(kept.inverse, self._cross_here())
            factors = kept.chol, kept.jitter, projection, kept.q
            self._kept_factors = factors
        return factors

    def _cross_here(self) -> Array:
        """K_uf at the inputs, made once."""
        if "_kept_cross" not in self.__dict__:
            self._kept_cross = self._cross(self.prior.X)
        return self._kept_cross

    @property
    def q(self) -> QU:
        return self.kept.q

    @property
    def chol(self) -> Array:
        return self.kept.chol

    @property
    def jitter_used(self) -> Array:
        return self.kept.jitter

    def _whole(self):
        return self._residual and len(self._sets) == len(self.inducing)

    def _mean(self, blocks):
        if self.kept.weights is None or not self._whole():
            return super()._mean(blocks)
        mean = einsum("...m,...mn->...n", self.kept.weights, self._cross_here())
        return jnp.broadcast_to(mean + self.prior.mean, self.shape())

    def _variance(self, blocks, relaxation=None):
        if self.kept.root is None or relaxation is not None or not self._whole():
            return super()._variance(blocks, relaxation)
        prior = self.prior.kernel.diag(self.prior.X)
        cross = self._cross_here()
        variance = prior - _squared_norms(self.kept.root, cross)
        if self.kept.more.shape[-2]:
            variance = variance + _squared_norms(self.kept.more, cross)
        return self._above_zero(variance, prior)


def _squared_norms(R, K, more=0.0):
    """
    Sums of squares of the columns of ``R @ K + more``, of R without entries below its
    diagonal: by halves, for which XLA copies less of K than for strips.
    """
    half = R.shape[-2] // 2
    if half < _SMALLEST or jax.default_backend() != "cpu":
        return jnp.sum((matmul(R, K) + more) ** 2, axis=-2)
    batch = jnp.broadcast_shapes(R.shape[:-2], K.shape[:-2])
    more = jnp.broadcast_to(more, (*batch, R.shape[-2], K.shape[-1]))
    above = matmul(R[..., :half, half:], K[..., half:, :]) + more[..., :half, :]
    below = _squared_norms(R[..., half:, half:], K[..., half:, :], more[..., half:, :])
    return _squared_norms(R[..., :half, :half], K[..., :half, :], above) + below

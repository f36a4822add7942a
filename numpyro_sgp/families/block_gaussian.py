"""Gaussian q(u) with one independent block for each set of inducing variables."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.linalg import solve_lower, triangular_product


@partial(
    jax.tree_util.register_dataclass, data_fields=["mu", "sqrt"], meta_fields=["upper"]
)
@dataclass(frozen=True)
class Block:
    """
    A Gaussian over one set of inducing variables, ``N(mu, S)``.

    :param mu: mean, shape ``(*batch, M)``.
    :param sqrt: the triangular factor of S, shape ``(*batch, M, M)`` (or its rows of a
        larger factor, ``(*batch, M, K)``, without a KL of their own); the standard
        deviations where S is diagonal, shape ``(*batch, M)``; None where S is the prior's.
    :param upper: whether the factor is upper triangular, and not lower.
    """

    mu: Array
    sqrt: Array | None
    upper: bool = False

    @property
    def size(self) -> int:
        """Number M of inducing variables."""
        return self.mu.shape[-1]

    @property
    def is_prior(self) -> bool:
        """Whether S is fixed to the prior covariance (the second block of ODVGP)."""
        return self.sqrt is None

    @property
    def is_diagonal(self) -> bool:
        """Whether S is diagonal."""
        return self.sqrt is not None and self.sqrt.ndim == self.mu.ndim

    def whitened(self, L: Array) -> "Block":
        r"""
        The same Gaussian in the coordinates :math:`L^{-1}u`: :math:`a = L^{-1}\mu` and
        :math:`P = L^{-1}\mathrm{sqrt}` of Algorithm 1, line 10 [1].

        :param L: lower factor of the prior covariance of the set, ``(*batch, M, M)``.

        **References:**

        1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for
           Gaussian Processes. AISTATS. https://arxiv.org/abs/1910.10596
        """
        mu = solve_lower(L, self.mu[..., None])[..., 0]
        if self.is_prior:
            return Block(mu, None)
        sqrt = self.sqrt
        if self.is_diagonal:
            sqrt = sqrt[..., None] * jnp.eye(self.size, dtype=sqrt.dtype)
        return Block(mu, solve_lower(L, sqrt))

    def project(self, A: Array) -> Array | None:
        """
        ``sqrt.T @ A``, whose squared column sums are the variances that S adds.

        :param A: shape ``(*batch, M, N)``.
        :return: shape ``(*batch, M, N)``.
        """
        if self.is_diagonal:
            return self.sqrt[..., None] * A
        if self.sqrt.shape[-1] != self.size:
            return jnp.einsum("...mk,...mn->...kn", self.sqrt, A)
        if self.upper:
            return triangular_product(self.sqrt.mT, A)
        return triangular_product(self.sqrt, A, transpose=True)

    def kl(self) -> Array:
        r"""
        :math:`\mathrm{KL}[N(\mu, S) \| N(0, I)]`, shape ``(*batch,)``: eq. (35) and (36)
        of Shi et al. (2020), appendix F, in whitened coordinates.
        """
        mahalanobis = jnp.sum(self.mu**2, axis=-1)
        if self.is_prior:
            return 0.5 * mahalanobis
        if self.is_diagonal:
            diagonal, trace = self.sqrt, jnp.sum(self.sqrt**2, axis=-1)
        else:
            diagonal = jnp.diagonal(self.sqrt, axis1=-2, axis2=-1)
            trace = jnp.sum(self.sqrt**2, axis=(-2, -1))
        log_det = jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1)
        return 0.5 * (trace + mahalanobis - self.size) - log_det


@partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=["whiten"])
@dataclass(frozen=True)
class BlockGaussian:
    r"""
    :math:`q(u) = \prod_l N(\mu_l, S_l)` over L sets of inducing variables.

    The sets are those of an orthogonal decomposition: the variables of set *l* are the
    values of the process at its points *minus* what the sets before it explain. One set
    is SVGP; two are SOLVE-GP (Shi et al. 2020, eq. 8); two with the second covariance
    fixed to the prior's are ODVGP (their section 5). In whitened coordinates this
    equals a block-diagonal Gaussian over the union of the sets, because the Cholesky
    factor of the union's covariance is

    .. math::

        \begin{bmatrix} L_u^0 & 0 \\ A^\top & L_v^0 \end{bmatrix}, \qquad
        L_u^0 L_u^{0\top} = K_{uu}, \quad A = (L_u^0)^{-1} K_{uv}, \quad
        L_v^0 L_v^{0\top} = C_{vv} = K_{vv} - A^\top A .

    :param blocks: one :class:`Block` a set, in order.
    :param whiten: whether the blocks are in whitened coordinates (appendix F).
    """

    blocks: tuple[Block, ...]
    whiten: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables in each set."""
        return tuple(block.size for block in self.blocks)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where each set lies in the union."""
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        return tuple(slice(e - m, e) for e, m in zip(ends, self.sizes, strict=True))

    def whitened(self, L: Array, cross=None) -> "BlockGaussian":
        """
        The same q in whitened coordinates.

        :param L: Cholesky factor of the union's covariance, ``(*batch, M, M)``; its
            diagonal blocks are the factors of the sets' covariances.
        :param cross: not used.
        """
        del cross
        if self.whiten:
            return self
        blocks = tuple(
            block.whitened(L[..., s, s])
            for block, s in zip(self.blocks, self.slices, strict=True)
        )
        return replace(self, blocks=blocks, whiten=True)

    def kl(self) -> Array:
        """KL of whitened q(u) from ``N(0, I)``, summed over the sets: ``(*batch,)``."""
        if not self.whiten:
            raise ValueError("Give the KL a whitened q: call `.whitened(L)` first.")
        return sum(block.kl() for block in self.blocks)

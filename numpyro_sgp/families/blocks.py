"""Gaussian q(u) with one independent block for each set: full, diagonal or the prior's."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from numpyro.distributions import biject_to, constraints

from numpyro_sgp.families.base import QU, Factors, Family, Param, Sets, Shape, Start
from numpyro_sgp.families.constraint import lower_triangular
from numpyro_sgp.linalg import (
    diagonal_of,
    einsum,
    matmul,
    solve_lower,
    triangular_product,
)
from numpyro_sgp.linalg.batches import cholesky, triangular_solve

_HALVINGS = 20
_MOST_GROWTH = 4.0  # of a variance in one natural step


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

    @property
    def _root(self) -> Array:
        assert self.sqrt is not None, "the prior's covariance has no factor here"
        return self.sqrt

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
        sqrt = self._root
        if self.is_diagonal:
            sqrt = sqrt[..., None] * jnp.eye(self.size, dtype=sqrt.dtype)
        return Block(mu, solve_lower(L, sqrt))

    def project(self, A: Array) -> Array:
        """
        ``sqrt.T @ A``, whose squared column sums are the variances that S adds.

        :param A: shape ``(*batch, M, N)``.
        :return: shape ``(*batch, M, N)``.
        """
        if self.is_diagonal:
            return self._root[..., None] * A
        if self._root.shape[-1] != self.size:
            return einsum("...mk,...mn->...kn", self._root, A)
        if self.upper:
            return triangular_product(self._root.mT, A)
        return triangular_product(self._root, A, transpose=True)

    def spread(self, noise: Array) -> Array:
        """
        Standard normal numbers as draws around the mean.

        :param noise: shape ``(..., *batch, K)`` with K columns of ``sqrt``.
        """
        if self.is_prior:
            return noise
        if self.is_diagonal:
            return self._root * noise
        return einsum("...mk,...k->...m", self._root, noise)

    def kl(self) -> Array:
        r"""
        :math:`\mathrm{KL}[N(\mu, S) \| N(0, I)]`, shape ``(*batch,)``: eq. (35) and (36)
        of Shi et al. (2020), appendix F, in whitened coordinates.
        """
        mahalanobis = jnp.sum(self.mu**2, axis=-1)
        if self.is_prior:
            return 0.5 * mahalanobis
        if self.is_diagonal:
            diagonal, trace = self._root, jnp.sum(self._root**2, axis=-1)
        else:
            diagonal = diagonal_of(self._root)
            trace = jnp.sum(self._root**2, axis=(-2, -1))
        log_det = jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1)
        return 0.5 * (trace + mahalanobis - self.size) - log_det


@partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=["whiten"])
@dataclass(frozen=True)
class BlockGaussian(QU):
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

    def whitened(self, factors: Factors) -> "BlockGaussian":
        """See :meth:`QU.whitened`: by the diagonal blocks of L, the factors of the sets."""
        if self.whiten:
            return self
        blocks = tuple(
            block.whitened(factors.chol[..., s, s])
            for block, s in zip(self.blocks, self.slices, strict=True)
        )
        return replace(self, blocks=blocks, whiten=True)

    def draw(self, key: Array, sample_shape: Shape, batch_shape: Shape) -> Array:
        draws = []
        keys = jax.random.split(key, len(self.blocks))
        for key_l, block in zip(keys, self.blocks, strict=True):
            shape = (*sample_shape, *batch_shape, block.size)
            noise = jax.random.normal(key_l, shape, block.mu.dtype)
            draws.append(block.mu + block.spread(noise))
        return jnp.concatenate(draws, axis=-1)

    def kl(self, rng_key: Array | None = None, sets: Sets | None = None) -> Array:
        """KL of whitened q(u) from ``N(0, I)``, summed over the sets: ``(*batch,)``."""
        if not self.whiten:
            raise ValueError("Give the KL a whitened q: call `.whitened(...)` first.")
        blocks = self.blocks if sets is None else [self.blocks[i] for i in sets]
        return sum((block.kl() for block in blocks), jnp.zeros((), self.dtype))

    @property
    def dtype(self) -> Any:
        """Of all numbers."""
        return self.blocks[0].mu.dtype

    @property
    def parts(self) -> tuple[Block, ...] | None:
        """See :attr:`QU.parts`: the blocks, if each has a mean and a factor."""
        plain = (type(block) is Block and not block.is_prior for block in self.blocks)
        return self.blocks if all(plain) else None

    def with_parts(self, parts: tuple) -> "BlockGaussian":
        return BlockGaussian(tuple(parts))


# ---- the families ---------------------------------------------------------------------


@dataclass(frozen=True)
class Full(Family):
    """A full covariance for each set and latent function, by its lower factor."""

    name = "full"
    several_sets = True
    has_all_gaussians = True
    whitened_only = False
    #: Dimensions of the square root of the covariance of one set and function.
    root_ndim: ClassVar[int] = 2

    def root(self, size: int, factor: Array | None, dtype: Any) -> Array | None:
        """
        Square root of the prior's covariance of a set.

        :param factor: its lower factor; None in whitened coordinates.
        """
        return jnp.eye(size, dtype=dtype) if factor is None else factor

    @property
    def constraint(self) -> constraints.Constraint:
        """Of the square root."""
        return lower_triangular

    def of_set(self, index: int) -> "Full | Diagonal | Prior":
        """The kind of covariance of a set."""
        return self

    def start(self, at: Start) -> dict[str, Param]:
        params, end = {}, 0
        L = None if at.whiten else at.factor()
        for i, size in enumerate(at.sizes):
            start, end = end, end + size
            factor = None if L is None else L[..., start:end, start:end]
            name, kind = block_name(i), self.of_set(i)
            params[f"{name}_mu"] = Param(jnp.zeros((*at.batch_shape, size), at.dtype))
            if (root := kind.root(size, factor, at.dtype)) is not None:
                root = at.scale * root
                shape = (*at.batch_shape, *root.shape[-kind.root_ndim :])
                root = jnp.broadcast_to(root, shape)
                params[f"{name}_sqrt"] = Param(root, kind.constraint)
        return params

    def build(self, params: dict, whiten: bool) -> BlockGaussian:
        every = map(block_name, itertools.count())
        names = itertools.takewhile(lambda name: f"{name}_mu" in params, every)
        blocks = (Block(params[f"{k}_mu"], params.get(f"{k}_sqrt")) for k in names)
        return BlockGaussian(tuple(blocks), whiten)

    def takes_natural_steps(self, names: Iterable[str]) -> tuple[str, ...]:
        """See :meth:`Family.takes_natural_steps`: all but means of sets like the prior."""
        roots = [name for name in names if name.endswith("_sqrt")]
        return tuple(k for root in roots for k in (root.replace("_sqrt", "_mu"), root))

    def natural_step(self, free: dict, slopes: dict, rate: Array) -> dict:
        """See :meth:`Family.natural_step`; the sets side by side."""
        steps = {}
        for root in (name for name in free if name.endswith("_sqrt")):
            mu = root.replace("_sqrt", "_mu")
            steps[mu], steps[root] = gaussian_step(
                free[mu], free[root], slopes[mu], slopes[root], rate
            )
        return steps

    def gaussian_optimum(
        self, free: dict, A: Array, linear: Array, precision: Array
    ) -> dict | None:
        """See :meth:`Family.gaussian_optimum`; in whitened coordinates."""
        scaled = A * jnp.sqrt(precision)[..., None, :]
        P = inverse_root(scaled)
        mean = jnp.zeros(P.shape[:-1], P.dtype)
        for _ in range(2):  # the second time for what rounding left
            rest = linear - precision * einsum("...mn,...m->...n", A, mean)
            pull = einsum("...mn,...n->...m", A, rest) - mean
            mean = mean + einsum("...mk,...lk,...l->...m", P, P, pull)
        found, end = {}, 0
        for name in (block_name(i) for i in itertools.count()):
            if f"{name}_mu" not in free:
                return {key: value.astype(free[key].dtype) for key, value in found.items()}
            start, end = end, end + free[f"{name}_mu"].shape[-1]
            found[f"{name}_mu"] = mean[..., start:end]
            if (root := free.get(f"{name}_sqrt")) is None:
                continue
            own = scaled[..., start:end, :]
            if root.ndim == mean.ndim:
                sd = (1.0 + jnp.sum(own**2, axis=-1)) ** -0.5
                found[f"{name}_sqrt"] = biject_to(constraints.softplus_positive).inv(sd)
            else:
                sqrt = P if own.shape == scaled.shape else inverse_root(own)
                found[f"{name}_sqrt"] = biject_to(lower_triangular).inv(sqrt)
        raise AssertionError


@dataclass(frozen=True)
class Diagonal(Full):
    """A diagonal covariance for each set and latent function, by standard deviations."""

    name = "diagonal"
    has_all_gaussians = False
    root_ndim = 1

    def root(self, size: int, factor: Array | None, dtype: Any) -> Array:
        """Standard deviations of the diagonal Gaussian nearest to the prior."""
        if factor is None:
            return jnp.ones(size, dtype)
        # Its variances are 1 / (K^-1)_mm.
        inverse = solve_lower(factor, jnp.eye(size, dtype=dtype))
        return jnp.sum(inverse**2, axis=-2) ** -0.5

    @property
    def constraint(self) -> constraints.Constraint:
        """Of the standard deviations."""
        return constraints.softplus_positive


@dataclass(frozen=True)
class Prior(Full):
    """The prior's covariance: a mean alone."""

    name = "prior"
    has_all_gaussians = False

    def root(self, size: int, factor: Array | None, dtype: Any) -> None:
        """There is none."""
        del size, factor, dtype


@dataclass(frozen=True)
class PriorAfterFirst(Full):
    """
    The prior's covariance for all sets but the first: ODVGP (Shi et al. 2020, section 5).

    :param first: the kind of covariance of the first set.
    """

    first: Full

    def of_set(self, index: int) -> Full:
        return self.first if index == 0 else Prior()


def block_name(index: int) -> str:
    """What the parameters of a set of inducing variables begin with."""
    return "qu" if index == 0 else "qv" if index == 1 else f"qv{index}"


# ---- natural gradients ----------------------------------------------------------------


def gaussian_step(mu, free, to_mu, to_free, rate):
    r"""
    Additive steps of mu and of the unconstrained factor of S along the natural gradient,
    :math:`S^{-1} \leftarrow S^{-1} + 2 \rho\, \partial L / \partial S` and
    :math:`\mu \leftarrow \mu - \rho\, S \partial L / \partial \mu` with the new S
    (Salimbeni, Eleftheriadis & Hensman 2018), halved until that makes no variance more than
    fourfold.

    :param mu: shape ``(*batch, M)``; all functions together for coupled covariances.
    :param free: the factor, unconstrained, ``(*batch, M, M)``, or the standard deviations,
        ``(*batch, M)``; positive entries go through softplus.
    """
    rate = jnp.asarray(rate, free.dtype)
    if free.shape == mu.shape:
        transform = biject_to(constraints.softplus_positive)
        sqrt = transform(free)
        # As below, for each coordinate: phi + phi'.
        phi = sqrt * to_free / jax.nn.sigmoid(free)

        def shrunk(rate):
            return sqrt / jnp.sqrt(1.0 + rate * phi)

        rate, new = _safe(rate, sqrt, shrunk, jnp.square)
        return -rate * new**2 * to_mu, transform.inv(new) - free
    transform = biject_to(lower_triangular)
    P = transform(free)
    eye = jnp.eye(free.shape[-1], dtype=free.dtype)
    diagonal = diagonal_of(free)
    slope = diagonal_of(to_free) / jax.nn.sigmoid(diagonal)
    to_P = jnp.tril(to_free, -1) + slope[..., None] * eye
    # With P P' = S: P' (dL/dS) P = (phi + phi') / 2, phi the lower triangle of P' dL/dP
    # with half the diagonal, so the new precision is P^-T (I + rate (phi + phi')) P^-1.
    phi = jnp.tril(einsum("...km,...kn->...mn", P, to_P)) * (1.0 - 0.5 * eye)
    phi = phi + jnp.swapaxes(phi, -1, -2)

    def stepped(rate):
        """P U^-T with upper U U' = I + rate (phi + phi'): lower triangular again."""
        flipped = jnp.flip(eye + rate * phi, (-2, -1))
        U = jnp.flip(cholesky(flipped), (-2, -1))
        return triangular_solve(U, P, left_side=False, lower=False, transpose_a=True)

    rate, new = _safe(rate, P, stepped, lambda P: jnp.sum(P**2, axis=-1))
    to_mu = to_mu.reshape(free.shape[:-1])
    to_mu = einsum("...mk,...nk,...n->...m", new, new, to_mu)
    return -rate * to_mu.reshape(mu.shape), transform.inv(new) - free


def inverse_root(A: Array) -> Array:
    r"""
    Lower P with :math:`P P^\top = (I + A A^\top)^{-1}`.

    In 32 bits rounding would be more than I where A is large (rows with little noise): then
    by shifted Cholesky QR twice [1], of which the second time sees A P, that has no large
    numbers left.

    :param A: shape ``(*batch, M, N)``.

    **References:**

    1. Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa (2020). Shifted Cholesky QR for
       Computing the QR Factorization of Ill-Conditioned Matrices. SIAM Journal on
       Scientific Computing 42(1).
    """
    eye = jnp.eye(A.shape[-2], dtype=A.dtype)
    B = eye + matmul(A, A.mT)
    if jnp.finfo(A.dtype).bits == 64:
        return triangular_solve(_upper(B), jnp.broadcast_to(eye, B.shape), **_TRANSPOSED)
    shift = len(eye) * jnp.finfo(A.dtype).eps * jnp.trace(B, axis1=-2, axis2=-1)
    B = B + shift[..., None, None] * eye
    P = triangular_solve(_upper(B), jnp.broadcast_to(eye, B.shape), **_TRANSPOSED)
    AP = matmul(A.mT, P)
    U = _upper(matmul(P.mT, P) + matmul(AP.mT, AP))
    return triangular_solve(U, P, left_side=False, lower=False, transpose_a=True)


_TRANSPOSED = {"left_side": True, "lower": False, "transpose_a": True}


def _upper(B: Array) -> Array:
    """Upper U with U U' = B."""
    return jnp.flip(cholesky(jnp.flip(B, (-2, -1))), (-2, -1))


def _safe(rate, sqrt, stepped, variance):
    """
    The rate, halved until the new variances are not too large (nor NaN), and the factor
    ``stepped(rate)``; zero and ``sqrt`` if that never is.

    :param variance: from a factor to variances.
    """

    def fits(new):
        return jnp.all(variance(new) <= _MOST_GROWTH * variance(sqrt))

    def go_on(carry):
        count, _, new = carry
        return (count <= _HALVINGS) & ~fits(new)

    def halve(carry):
        count, rate, _ = carry
        return count + 1, 0.5 * rate, stepped(0.5 * rate)

    # The first attempt is in the loop too: the program has one.
    start = jnp.zeros((), jnp.int32), 2.0 * rate, jnp.full_like(sqrt, jnp.nan)
    _, rate, new = lax.while_loop(go_on, halve, start)
    done = fits(new)
    return jnp.where(done, rate, 0.0), jnp.where(done, new, sqrt)

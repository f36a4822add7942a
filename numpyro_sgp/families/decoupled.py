"""ODVGP at scale: a mean of thousands of points O, without their Cholesky factor."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.families.base import QU, Factors, Family, Param, Sets, Shape, Start
from numpyro_sgp.families.blocks import BlockGaussian, Full
from numpyro_sgp.inducing.covariances import union
from numpyro_sgp.linalg import einsum, solve_lower
from numpyro_sgp.linalg.row_blocks import consecutive_blocks

_COLUMNS = 1024  # columns of K_vv held in memory where all of them are used


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "points", "weights", "factors", "pulled"],
    meta_fields=["num_columns"],
)
@dataclass(frozen=True)
class DecoupledGaussian(QU):
    r"""
    q(u) of one set Z, with a mean of its own by orthogonal points O: that of q(f(X)) has
    the part :math:`c(X, O)\, a` with
    :math:`c(x, x') = k(x, x') - k(x, Z) K_{uu}^{-1} k(Z, x')` [1, 2], the posterior of
    ODVGP with :math:`q(v) = N(C_{vv} a, C_{vv})`.

    Its KL divergence from the prior has the term

    .. math::

        \tfrac12 a^\top C_{vv} a
        = \tfrac12 a^\top K_{vv} a - \tfrac12 \| L^{-1} K_{uv} a \|^2 ,

    of which :math:`K_{vv}` alone has as many rows and columns as there are points O. With
    ``num_columns`` it is estimated without bias from that many random columns,
    :math:`\frac{M_2}{b} \sum_{j \in \mathrm{batch}} a_j K_{v v_j}^\top a`. A step costs
    O(M^2 (B + M_2) + M_2 (B + b)), and no matrix of size M_2 is factorised.

    :param first: q(u), of one block.
    :param points: O, shape ``(M2, D)`` or ``(*batch, M2, D)``.
    :param weights: a, shape ``(*batch, M2)``; None leaves the part by O out.
    :param num_columns: number b of columns; all if None.
    :raises ValueError: if shapes do not fit together.

    **References:**

    1. Salimbeni, Cheng, Boots, Deisenroth (2018). Orthogonally Decoupled Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/1809.08820
    2. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes, section 5. AISTATS. https://arxiv.org/abs/1910.10596
    """

    first: BlockGaussian
    points: Array
    weights: Any  # None where the part by O is left out
    num_columns: int | None = None
    # In whitened coordinates: the kernel and L, and inv(L) K_uv a, shape (*batch, M).
    factors: Any = field(default=None, repr=False)
    pulled: Any = field(default=None, repr=False)

    def check_batch(self, batch_shape: Shape) -> None:
        num_points = jnp.shape(self.points)[-2]
        if jnp.shape(self.weights)[-1:] != (num_points,):
            raise ValueError(
                f"The orthogonal points must have the shape (M2, D) and the weights "
                f"(*batch, M2), got {jnp.shape(self.points)} and {jnp.shape(self.weights)}."
            )
        b = self.num_columns
        if b is not None and not 1 <= b <= num_points:
            raise ValueError(f"num_columns must be between 1 and {num_points}, got {b}.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables of Z."""
        return self.first.sizes

    def whitened(self, factors: Factors) -> "DecoupledGaussian":
        """See :meth:`QU.whitened`; keeps what products with O need."""
        A = solve_lower(factors.chol, factors.cross(self.points))
        return replace(
            self,
            first=self.first.whitened(factors),
            factors=(factors.kernel, factors.chol),
            pulled=einsum("...mn,...n->...m", A, self.weights),
        )

    def component(self, k: Any) -> BlockGaussian:
        """q(u)."""
        return self.first

    def draw(self, key: Array, sample_shape: Shape, batch_shape: Shape) -> Array:
        return self.first.draw(key, sample_shape, batch_shape)

    def keep(self, sets: Sets, residual: bool) -> "DecoupledGaussian":
        """The part by O belongs to what Z leaves open."""
        return self if residual else replace(self, weights=None)

    def mean_shift(self, X: Array, A: Array) -> Array | float:
        """See :meth:`QU.mean_shift`: c(X, O) a."""
        if self.weights is None:
            return 0.0
        kernel, _ = self.factors
        shift = einsum("...nm,...m->...n", kernel(X, self.points), self.weights)
        return shift - einsum("...mn,...m->...n", A, self.pulled)

    def kl(self, rng_key: Array | None = None, sets: Sets | None = None) -> Array:
        r"""
        :math:`\mathrm{KL}[q(u) \| p(u)] + \frac12 a^\top C_{vv} a`, shape ``(*batch,)``.

        :param rng_key: which columns of K_vv are taken; all where None.
        """
        kl = self.first.kl(sets=sets)
        if self.weights is None:
            return kl
        num_points = self.points.shape[-2]
        if self.num_columns is None or rng_key is None:
            blocks = consecutive_blocks(num_points, min(num_points, _COLUMNS))
            parts = jax.lax.map(jax.checkpoint(self._product), jnp.asarray(blocks))
            product = jnp.sum(parts, axis=0)
        else:
            columns = jax.random.choice(
                rng_key, num_points, (self.num_columns,), replace=False
            )
            product = self._product(columns) * (num_points / self.num_columns)
        return kl + 0.5 * (product - jnp.sum(self.pulled**2, axis=-1))

    def _product(self, columns):
        """sum_j a_j K_vv[:, j]' a over some columns, ``(*batch,)``; -1 for no column."""
        kernel, _ = self.factors
        K = kernel(self.points[..., columns, :], self.points)
        each = einsum("...jm,...m->...j", K, self.weights)
        return jnp.sum((columns >= 0) * self.weights[..., columns] * each, axis=-1)

    def kernel_functions(self, points: Array, weights: Array) -> tuple[Array, Array]:
        if self.weights is None:
            return points, weights
        # c(x, O) a = k(x, O) a - k(x, Z) L^-T inv(L) K_uv a.
        _, chol = self.factors
        back = solve_lower(chol, self.pulled[..., None], transpose=True)[..., 0]
        shape = (*weights.shape[:-1], self.weights.shape[-1])
        fixed = jnp.broadcast_to(self.weights, shape)
        weights = jnp.concatenate([weights - back, fixed], axis=-1)
        return union((points, self.points)), weights


@dataclass(frozen=True)
class Decoupled(Family):
    """
    A mean by thousands of orthogonal points, whose covariance is the prior's.

    :param first: the covariance of the first set.
    :param num_columns: of K_vv in each step.
    """

    first: Full
    num_columns: int

    name = "decoupled"
    several_sets = True
    whitened_only = False

    def start(self, at: Start) -> dict[str, Param]:
        """See :meth:`Family.start`; O is no set that is factorised."""
        Z, O = at.points
        weights = jnp.zeros((*at.batch_shape, O.shape[-2]), at.dtype)
        params = self.first.start(at._replace(points=(Z,)))
        return params | {"qv_weights": Param(weights)}

    def build(self, params: dict, whiten: bool) -> DecoupledGaussian:
        first = self.first.build(params, whiten)
        points = jnp.asarray(params["O"])  # of which columns are taken
        return DecoupledGaussian(first, points, params["qv_weights"], self.num_columns)

    def takes_natural_steps(self, names: Iterable[str]) -> tuple[str, ...]:
        return self.first.takes_natural_steps(names)

    def natural_step(self, free: dict, slopes: dict, rate: Array) -> dict:
        return self.first.natural_step(free, slopes, rate)

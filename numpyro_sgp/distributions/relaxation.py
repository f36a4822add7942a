"""How p(f | u) is relaxed in a bound, and what that leaves of its trace term."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints

from numpyro_sgp.families import Param
from numpyro_sgp.linalg import at_least, einsum, half_log_det, jittered_cholesky
from numpyro_sgp.linalg.row_blocks import (
    check_block_size,
    check_partition,
    consecutive_blocks,
)


class Relaxation:
    r"""
    A conditional :math:`q(f \mid u) = N(K_{fu} K_{uu}^{-1} u, D^{1/2} V D^{1/2})` with a V
    of its own in place of the prior's V = I, which tightens a bound [1, 2]. D is what the
    inducing variables leave of the prior's covariance, with the diagonal :math:`d_n`.

    With a Gaussian likelihood of precisions :math:`\lambda_n`, the best V has a closed
    form, and :math:`\frac12 \sum_n \lambda_n d_n` in the bound becomes the smaller
    :meth:`cost`. For other likelihoods V = v I with a learned v for each latent function.
    Relaxations are pytrees, one's own too (``jax.tree_util.register_dataclass``).

    **References:**

    1. Titsias (2025). New Bounds for Sparse Variational Gaussian Processes. ICML.
       https://arxiv.org/abs/2502.08730
    2. Bui, Titsias (2025). Sparse Gaussian Processes: Structured Approximations and
       Power-EP Revisited. https://arxiv.org/abs/2507.02377
    """

    #: Its name as an option, ``tight=...``.
    name: ClassVar[str]
    #: Whether it is for Gaussian likelihoods only.
    is_gaussian: ClassVar[bool] = True

    @property
    def factor(self) -> Array | float:
        """What multiplies residual variances in the expected log likelihood."""
        return 0.0

    def start(self, batch_shape: tuple[int, ...], dtype) -> dict[str, Param]:
        """The parameters that it has, as they start."""
        return {}

    def at(self, params: dict) -> "Relaxation":
        """The same with values of its parameters."""
        return self

    def check(self, num_rows: int) -> None:
        """
        :raises ValueError: if it does not fit that many rows.
        """

    def cost(self, prior, A: Array, residual: Array, precision: Array | None) -> Array:
        r"""
        What the relaxation costs, for the rows at hand.

        :param prior: the process at these rows.
        :param A: what inducing variables explain, :math:`L^{-1} K_{uf}`; None where they
            are not factorised.
        :param residual: the variances :math:`d_n` that they leave, ``(*batch, N)``.
        :param precision: :math:`\lambda_n` of a Gaussian likelihood, ``(*batch, N)``.
        :return: shape ``batch``.
        """
        raise NotImplementedError


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class Diagonal(Relaxation):
    r"""
    The best diagonal V for Gaussian likelihoods:
    :math:`\frac12 \sum_n \log(1 + \lambda_n d_n)` (Titsias 2025).
    """

    name = "diagonal"

    def cost(self, prior, A, residual, precision):
        return 0.5 * jnp.sum(jnp.log1p(at_least(precision * residual, 0.0)), axis=-1)


@partial(jax.tree_util.register_dataclass, data_fields=["partition"], meta_fields=["size"])
@dataclass(frozen=True, eq=False)
class Blocks(Relaxation):
    r"""
    The best block diagonal V for Gaussian likelihoods: tighter than :class:`Diagonal`, by
    :math:`\frac12 \sum_b \log |I + \Lambda_b D_{bb}|` (Bui & Titsias 2025). O(N b^2) for
    blocks of b rows, of which one is held in memory at a time.

    :param size: rows in a block, in their order; all rows of the (mini)batch if None.
    :param partition: in place of ``size`` the row numbers of each block, shape
        ``(num_blocks, rows)``, filled up with -1. Blocks of neighbours are tightest:
        :func:`~numpyro_sgp.neighbour_blocks`.
    :raises ValueError: when used, if the blocks do not fit the rows.
    """

    size: int | None = None
    partition: Array | None = None

    name = "block"

    def check(self, num_rows):
        if self.partition is not None:
            check_partition(self.partition, num_rows)
        elif self.size is not None:
            check_block_size(self.size, num_rows)

    def _rows(self, num_rows) -> Array:
        self.check(num_rows)
        if self.partition is not None:
            return jnp.asarray(self.partition)
        return jnp.asarray(consecutive_blocks(num_rows, self.size or num_rows))

    def cost(self, prior, A, residual, precision):
        seen = precision > 0  # where not, the slope of the root is infinite
        root = jnp.where(seen, jnp.sqrt(jnp.where(seen, precision, 1.0)), 0.0)
        A = A * root[..., None, :]
        kernel, X = prior.kernel, prior.X

        def one(rows):
            there = rows >= 0
            scale = jnp.where(there, root[..., rows], 0.0)
            own = X[..., rows, :]  # as one array, which a White kernel sees
            K = kernel(own, own)
            K = K * scale[..., :, None] * scale[..., None, :]
            part = jnp.where(there, A[..., rows], 0.0)
            I_D = K - einsum("...mi,...mj->...ij", part, part)
            I_D = I_D + jnp.eye(rows.shape[0], dtype=K.dtype)
            # Jitter only where rounding has left it indefinite; it makes the bound lower.
            L, _ = jittered_cholesky(I_D, 0.0)
            return half_log_det(L)

        blocks = self._rows(residual.shape[-1])
        return jnp.sum(jax.lax.map(jax.checkpoint(one), blocks), axis=0)


@partial(jax.tree_util.register_dataclass, data_fields=["scale"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Scalar(Relaxation):
    r"""
    V = v I with a learned v for each latent function, for any likelihood: the bound has
    the residual variances :math:`v d_n` and costs :math:`\frac N2 (v - \log v - 1)`. At
    v = 1 it is the plain bound.

    :param scale: v, shape ``batch``; the parameter ``qf_scale`` in a guide.
    """

    scale: Array | None = None

    name = "scalar"
    is_gaussian = False

    @property
    def factor(self):
        return self.scale[..., None]

    def start(self, batch_shape, dtype):
        ones = jnp.ones(batch_shape, dtype)
        return {"qf_scale": Param(ones, constraints.softplus_positive)}

    def at(self, params):
        return Scalar(params["qf_scale"])

    def cost(self, prior, A, residual, precision):
        v = self.scale
        return 0.5 * residual.shape[-1] * (v - jnp.log(v) - 1.0)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class Conditional(Relaxation):
    r"""
    The exact :math:`q(u \mid f_\perp)`, of :class:`~numpyro_sgp.CollapsedSVGP` only:
    :math:`\frac12 \mathrm{tr}[(Q + s^2 I)^{-1} D]` (Shi et al. 2020, eq. 14 and 15).
    """

    name = "conditional"


_NAMES = {kind.name: kind for kind in (Diagonal, Blocks, Scalar, Conditional)}


def relaxation_of(tight, owner: str, allowed: tuple) -> Relaxation | None:
    """
    An option ``tight=...`` as an object.

    :param tight: a :class:`Relaxation`, its name, or ``"none"``.
    :param owner: whose option it is, for messages.
    :param allowed: which of the classes here it may be of (or one of a user's own).
    :raises ValueError: if it is something else.
    """
    names = ("none", *(kind.name for kind in allowed))
    if isinstance(tight, str) and tight in names:
        return None if tight == "none" else _NAMES[tight]()
    refused = tuple(kind for kind in _NAMES.values() if kind not in allowed)
    if tight is None or isinstance(tight, Relaxation) and not isinstance(tight, refused):
        return tight
    objects = [f"numpyro_sgp.relaxation.{kind.__name__}()" for kind in allowed]
    raise ValueError(
        f"{owner}: tight must be one of {names}, or an object such as "
        f"{' or '.join(objects)}, got {tight!r}."
    )

"""What a relaxed p(f | u) leaves of the trace term of a bound (Titsias 2025)."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import not_jax_tracer

from numpyro_sgp.linalg import jittered_cholesky


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale"],
    meta_fields=["kind", "block_size"],
)
@dataclass(frozen=True)
class Relaxation:
    r"""
    A conditional :math:`q(f \mid u) = N(K_{fu} K_{uu}^{-1} u, D^{1/2} V D^{1/2})` with a V
    of its own in place of the prior's V = I, which tightens a bound [1, 2].

    With a Gaussian likelihood of precisions :math:`\lambda_n`, the best V has a closed
    form, and :math:`\frac12 \sum_n \lambda_n d_n` in the bound becomes the smaller
    :meth:`cost`. For other likelihoods V = v I with a learned v for each latent function.

    :param kind: ``"diagonal"``, ``"block"`` or ``"scalar"``.
    :param scale: for ``"scalar"``, v, shape ``batch``.
    :param block_size: for ``"block"``, rows in a block, in their order; all rows if None.

    **References:**

    1. Titsias (2025). New Bounds for Sparse Variational Gaussian Processes. ICML.
       https://arxiv.org/abs/2502.08730
    2. Bui, Titsias (2025). Sparse Gaussian Processes: Structured Approximations and
       Power-EP Revisited. https://arxiv.org/abs/2507.02377
    """

    kind: str
    scale: Array | None = None
    block_size: int | None = None

    @property
    def is_gaussian(self) -> bool:
        """Whether it is for Gaussian likelihoods only."""
        return self.kind != "scalar"

    @property
    def factor(self) -> Array | float:
        """What multiplies residual variances in the expected log likelihood."""
        return 0.0 if self.is_gaussian else self.scale[..., None]

    def cost(self, prior, A: Array, residual: Array, precision: Array | None) -> Array:
        r"""
        What the relaxation costs, for the rows at hand.

        :param prior: the process at these rows.
        :param A: what inducing variables explain, :math:`L^{-1} K_{uf}`.
        :param residual: the variances :math:`d_n` that they leave, ``(*batch, N)``.
        :param precision: :math:`\lambda_n` of a Gaussian likelihood, ``(*batch, N)``.
        :return: for a Gaussian likelihood :math:`\frac12 \log |I + \Lambda D|` of the
            diagonal or the blocks of D, else :math:`\frac N2 (v - \log v - 1)`; shape
            ``batch``.
        """
        if self.kind == "scalar":
            v = self.scale
            return 0.5 * residual.shape[-1] * (v - jnp.log(v) - 1.0)
        if self.kind == "diagonal":
            return diagonal_cost(precision * residual)
        num_rows = residual.shape[-1]
        blocks = consecutive_blocks(num_rows, self.block_size or num_rows)
        seen = precision > 0  # where not, the slope of the root is infinite
        root = jnp.where(seen, jnp.sqrt(jnp.where(seen, precision, 1.0)), 0.0)
        return block_cost(prior.kernel, prior.X, A * root[..., None, :], root, blocks)


def neighbour_blocks(X: Array, size: int) -> np.ndarray:
    """
    Rows of X in blocks of neighbours, for ``tight="block"``: the rows are halved along
    the widest column until there are no more than ``size`` in each part.

    :param X: inputs, shape ``(N, D)``.
    :param size: the most rows in a block.
    :return: row numbers, shape ``(num_blocks, rows)`` with ``rows <= size``; -1 where a
        block has fewer.
    :raises ValueError: if X is not a table, or ``size`` not between 1 and N.

    >>> import numpy as np
    >>> neighbour_blocks(np.array([[0.0], [5.0], [1.0], [4.0]]), 2)
    array([[0, 2],
           [3, 1]])
    """
    X = np.asarray(X)
    if X.ndim != 2:
        raise ValueError(
            f"neighbour_blocks needs inputs X of shape (N, D), got {X.shape}."
            + (" Use X[:, None] for one input dimension." if X.ndim == 1 else "")
        )
    check_block_size(size, len(X))

    def split(rows):
        if len(rows) <= size:
            return [rows]
        widest = np.argmax(np.ptp(X[rows], axis=0))
        rows = rows[np.argsort(X[rows, widest], kind="stable")]
        # Whole blocks to the left, so that few are short.
        num_blocks = -(-len(rows) // size)
        middle = len(rows) * (num_blocks // 2) // num_blocks
        return split(rows[:middle]) + split(rows[middle:])

    return _padded(split(np.arange(len(X))))


def consecutive_blocks(num_rows: int, size: int) -> np.ndarray:
    """
    Rows in blocks of ``size`` in their order, the last one filled up with -1.

    :raises ValueError: if ``size`` is not between 1 and ``num_rows``.
    """
    check_block_size(size, num_rows)
    return _padded(np.split(np.arange(num_rows), np.arange(size, num_rows, size)))


def check_block_size(size: int, num_rows: int) -> None:
    """
    :raises ValueError: if ``size`` is not a whole number between 1 and ``num_rows``.
    """
    whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if not whole or not 1 <= size <= num_rows:
        raise ValueError(
            f"Blocks of {size!r} rows do not fit {num_rows} rows: give a whole number "
            f"between 1 and {num_rows}. (Blocks need not divide the rows evenly.)"
        )


def check_partition(blocks, num_rows: int) -> None:
    """
    :raises ValueError: if known blocks do not have each row once.
    """
    try:
        ndim = np.ndim(blocks)
    except ValueError:
        ndim = 0  # lists of different lengths
    if ndim != 2:
        raise ValueError(
            "blocks is a number of rows, or an array of row numbers of shape "
            f"(num_blocks, rows), filled up with -1; got {type(blocks).__name__}."
        )
    if not not_jax_tracer(blocks):
        return
    rows = np.asarray(blocks).ravel()
    rows = np.sort(rows[rows != -1])
    if not np.array_equal(rows, np.arange(num_rows)):
        raise ValueError(
            f"blocks must have each of the row numbers 0 to {num_rows - 1} once (and -1 "
            f"where a block is short), but it has {rows.size} entries, "
            f"{np.unique(rows).size} different ones, from {rows.min(initial=0)} to "
            f"{rows.max(initial=0)}. See numpyro_sgp.neighbour_blocks(X, size)."
        )


def _padded(blocks):
    longest = max(map(len, blocks))
    return np.stack([np.pad(b, (0, longest - len(b)), constant_values=-1) for b in blocks])


def diagonal_cost(residual: Array) -> Array:
    r"""
    :math:`\frac12 \sum_n \log(1 + d_n)`: the best diagonal V of
    :math:`q(f \mid u) = N(\cdot, D^{1/2} V D^{1/2})`, in place of
    :math:`\frac12 \sum_n d_n` (Titsias 2025).

    :param residual: :math:`d_n`, in units of the noise variance, shape ``(..., N)``.
    """
    return 0.5 * jnp.sum(jnp.log1p(jnp.maximum(residual, 0.0)), axis=-1)


def block_cost(kernel, X: Array, A: Array, root: Array, blocks: Array) -> Array:
    r"""
    :math:`\frac12 \sum_b \log |I + D_{bb}|` with :math:`D = K_{ff} - A^\top A` in units of
    the noise (Bui & Titsias 2025). One block at a time is held in memory.

    :param kernel: a kernel.
    :param X: inputs, shape ``(N, D)`` or ``(*batch, N, D)``.
    :param A: what inducing variables explain, in units of the noise, ``(*batch, M, N)``.
    :param root: 1 / noise, ``(*batch, N)``; zero where a row has no observation.
    :param blocks: row numbers, shape ``(num_blocks, rows)``, -1 for no row.
    :return: shape ``batch``.
    """

    def one(rows):
        there = rows >= 0
        scale = jnp.where(there, root[..., rows], 0.0)
        K = kernel(X[..., rows, :], X[..., rows, :])
        K = K * scale[..., :, None] * scale[..., None, :]
        part = jnp.where(there, A[..., rows], 0.0)
        I_D = K - jnp.einsum("...mi,...mj->...ij", part, part)
        I_D = I_D + jnp.eye(rows.shape[0], dtype=K.dtype)
        # Jitter only where rounding has left it indefinite; it makes the bound lower.
        L, _ = jittered_cholesky(I_D, 0.0)
        return jnp.sum(jnp.log(jnp.diagonal(L, axis1=-2, axis2=-1)), axis=-1)

    return jnp.sum(jax.lax.map(jax.checkpoint(one), jnp.asarray(blocks)), axis=0)

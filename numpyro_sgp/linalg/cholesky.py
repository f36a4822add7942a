"""The one place where jitter enters a covariance matrix."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from numpyro_sgp.linalg.batches import cholesky
from numpyro_sgp.linalg.products import einsum, matmul
from numpyro_sgp.linalg.triangular import (
    diagonal_of,
    half_congruence,
    lower_inverse,
    row_strips,
    solve_lower,
    triangular_product,
)

# First jitter tried, and the largest, both relative to the kernel's mean diagonal. In
# float32 the rounding error of a kernel matrix of a few hundred points is near 1e-5.
_JITTER_RANGE = {"float32": (1e-5, 1e-2), "float64": (1e-8, 1e-3)}


def default_jitter(dtype: DTypeLike) -> float:
    """First relative jitter tried for matrices of ``dtype``."""
    return _jitter_range(dtype)[0]


def max_jitter(dtype: DTypeLike) -> float:
    """Largest relative jitter tried for matrices of ``dtype``."""
    return _jitter_range(dtype)[1]


def _jitter_range(dtype):
    name = jnp.dtype(dtype).name
    if name not in _JITTER_RANGE:
        raise TypeError(f"Gaussian processes need float32 or float64 numbers, got {name}.")
    return _JITTER_RANGE[name]


def _checked_range(jitter, dtype):
    """First relative jitter, the default one if None, and the largest."""
    first, largest = _jitter_range(dtype)
    if jitter is None:
        return first, largest
    if not 0 <= jitter < 1:
        raise ValueError(
            f"jitter is relative to the mean of a diagonal, a number from 0 to 1 or None "
            f"(for {first}, with {jnp.dtype(dtype).name}), got {jitter}."
        )
    return jitter, largest


def _size(K: Array) -> Array:
    """What jitter is relative to: the mean of the diagonal, if there is any."""
    return _some(jnp.mean(diagonal_of(K), axis=-1))


def _some(scale: ArrayLike) -> Array:
    return jnp.where(jnp.equal(scale, 0.0), 1e-20, scale)


def with_jitter(K: Array, jitter: float | None = None) -> Array:
    """
    K with its diagonal raised by a multiple of its mean, where nothing is factorised.

    :param K: shape ``(*batch, M, M)``.
    :param jitter: that multiple; :func:`default_jitter` of the dtype if None.
    :return: the shape of K.

    >>> print(with_jitter(jnp.ones((2, 2)), 0.5))
    [[1.5 1. ]
     [1.  1.5]]
    """
    jitter, _ = _checked_range(jitter, K.dtype)
    if jitter == 0:
        return K
    scale = jitter * _size(K)
    return K + scale[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)


def jittered_cholesky(
    K: Array, jitter: float | None = None, scale: Array | None = None
) -> tuple[Array, Array]:
    r"""
    Lower Cholesky factor of :math:`K + \epsilon s I`, with the smallest
    :math:`\epsilon` on a grid of powers of ten for which it exists.

    The first :math:`\epsilon` is ``jitter``; each matrix of the batch that has no factor
    is tried again with ten times as much, up to :func:`max_jitter`, in one compiled
    loop which costs one factorisation where the first attempt succeeds. What cannot be
    mended is NaN. Derivatives are those of the Cholesky factor of the matrix that was
    factorised, and do not factorise again.

    :param K: symmetric matrices, shape ``(*batch, M, M)``, whose derivatives are too.
    :param jitter: first relative jitter; :func:`default_jitter` of the dtype if None.
    :param scale: the size :math:`s` that jitter is relative to, shape ``(*batch,)``; the
        mean diagonal of ``K`` if None. Residual covariances, whose diagonal may vanish,
        pass the diagonal of the covariance that they came from.
    :return: the factor, shape ``(*batch, M, M)``, and the jitter added to the diagonal,
        :math:`\epsilon s`, shape ``(*batch,)``.

    >>> import jax.numpy as jnp
    >>> L, jitter = jittered_cholesky(jnp.ones((2, 2)))  # a singular matrix
    >>> bool(jnp.isfinite(L).all() and jitter > 0)
    True
    """
    jitter, largest = _checked_range(jitter, K.dtype)
    scale = _size(K) if scale is None else _some(scale)
    scale = jnp.broadcast_to(scale, K.shape[:-2]).astype(K.dtype)
    L, level = _cholesky_retry(K, scale, jitter, largest)
    return L, level * scale


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _cholesky_retry(K, scale, jitter, largest):
    return _search(K, scale, jitter, largest)


@_cholesky_retry.defjvp
def _cholesky_retry_jvp(jitter, largest, primals, tangents):
    K, scale = primals
    dK, dscale = tangents
    # dL = L Phi(L^-1 dA L^-T), Phi: the lower triangle with half the diagonal (Murray 2016,
    # Differentiation of the Cholesky decomposition, arXiv 1602.07527). Not `_search`:
    # derivatives of this rule must not go through the loop either.
    L, level = _cholesky_retry(K, scale, jitter, largest)
    djitter = level * dscale
    dA = dK + djitter[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)
    return (L, level), (matmul(L, half_congruence(L, dA)), jnp.zeros_like(level))


def _T(A):
    """
    The transpose. LAPACK and BLAS order matrices by columns and XLA by rows; around the
    calls below it costs nothing, and spares copies that cost as much as the calls.
    """
    return jnp.swapaxes(A, -1, -2)


def factor_product(K: Array, v: Array, jitter: float | None = None) -> Array:
    r"""
    :math:`L v` with the factor L of :func:`jittered_cholesky`: draws of a process from
    whitened values.

    The derivative :math:`L (dv + \Phi(L^{-1} dK L^{-\top}) v)` does not go through that of
    L: a gradient takes the inverse of L and half of a product of matrices.

    :param K: symmetric matrices, shape ``(*batch, M, M)``, whose derivatives are too.
    :param v: shape ``(*batch, M)``, batch dimensions broadcast.
    :param jitter: first relative jitter; :func:`default_jitter` of the dtype if None.
    :return: shape ``(*batch, M)``.

    >>> import jax.numpy as jnp
    >>> print(factor_product(4.0 * jnp.eye(2), jnp.array([1.0, 3.0]), jitter=0.0))
    [2. 6.]
    """
    jitter, largest = _checked_range(jitter, K.dtype)
    scale = _size(K)
    return _factor_product(K, scale, v.astype(K.dtype), jitter, largest)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _factor_product(K, scale, v, jitter, largest):
    return _times(_search(K, scale, jitter, largest)[0], v)


@_factor_product.defjvp
def _factor_product_jvp(jitter, largest, primals, tangents):
    K, scale, v = primals
    dK, dscale, dv = tangents
    L, level = _cholesky_retry(K, scale, jitter, largest)
    djitter = level * dscale
    dK = dK + djitter[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)
    # Row i of Phi(L^-1 dK L^-T) v is that of L^-1 dK times the sum of v_j row_j(L^-1) over
    # j <= i, half of the last: one product, of which a row needs i columns. Solves from
    # both sides take longer; by blocks (`half_congruence`) they take as long as this, and
    # lose one or two digits more of a gradient where K is nearly singular.
    inverse = lower_inverse(L)
    weighted = v[..., None] * inverse
    sums = jnp.cumsum(weighted, axis=-2) - 0.5 * weighted
    rows = [
        jnp.sum(
            matmul(inverse[..., i:j, :j], dK[..., :j, :j]) * sums[..., i:j, :j], axis=-1
        )
        for i, j in row_strips(K)
    ]
    return _times(L, v), _times(L, dv + jnp.concatenate(rows, axis=-1))


def _times(L, v):
    """Products of matrices with vectors, batch dimensions broadcast."""
    return einsum("...ij,...j->...i", L, v)


def whitened_solve(
    K: Array, B: Array, jitter: float | None = None
) -> tuple[Array, Array, Array]:
    r"""
    :func:`jittered_cholesky` of K, and :math:`A = L^{-1} B` with it: for
    :math:`K = K_{uu}` and :math:`B = K_{uf}` those of Alg. 1 of Shi, Titsias and Mnih 2020.

    The derivative of A is :math:`L^{-1} dB - \Phi(L^{-1} dK L^{-\top}) A`, which does not
    go through L: a gradient by way of A alone saves the product of L with a matrix of its
    size, the largest of the reverse pass.

    Where a mesh of devices is set (``jax.set_mesh``), over which the columns of B can be
    split evenly, each device solves for its own.

    :param K: symmetric matrices, shape ``(*batch, M, M)``, whose derivatives are too.
    :param B: shape ``(*batch, M, N)``, batch dimensions broadcast.
    :param jitter: first relative jitter; :func:`default_jitter` of the dtype if None.
    :return: the factor L and the jitter, as :func:`jittered_cholesky`, and A, of shape
        ``(*batch, M, N)``.

    >>> import jax.numpy as jnp
    >>> L, _, A = whitened_solve(4.0 * jnp.eye(2), jnp.ones((2, 3)))
    >>> bool(jnp.allclose(L @ A, 1.0))
    True
    """
    jitter, largest = _checked_range(jitter, K.dtype)
    scale = _size(K)
    L, level, A = _whitened(K, scale, B, jitter, largest)
    return L, level * scale, A


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _whitened(K, scale, B, jitter, largest):
    L, level = _search(K, scale, jitter, largest)
    return L, level, _solve_columns(L, B)


@_whitened.defjvp
def _whitened_jvp(jitter, largest, primals, tangents):
    K, scale, B = primals
    dK, dscale, dB = tangents
    L, level, A = _whitened(K, scale, B, jitter, largest)
    djitter = level * dscale
    dK = dK + djitter[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)
    phi = half_congruence(L, dK)
    dA = _solve_columns(L, dB) - triangular_product(phi, A)
    return (L, level, A), (matmul(L, phi), jnp.zeros_like(level), dA)


@partial(jax.jit, static_argnums=(2, 3))
def _search(K, scale, jitter, largest):
    eye = jnp.eye(K.shape[-1], dtype=K.dtype)
    first = default_jitter(K.dtype)

    def factor(level):
        A = K + (level * scale)[..., None, None] * eye
        return cholesky(_T(A))

    def failed(L):
        return ~jnp.all(jnp.isfinite(diagonal_of(L)), axis=-1)

    def again(state):
        L, level, _ = state
        return jnp.any(failed(L) & (level < 0.99 * largest))

    def attempt(state):
        L, level, following = state
        level = jnp.where(failed(L), following, level)
        more = jnp.minimum(jnp.maximum(10 * level, first), largest)
        return factor(level), level, more.astype(level.dtype)

    # The first attempt is in the loop too: the program has one factorisation.
    level = jnp.full(scale.shape, jitter, K.dtype)
    begin = jnp.full(K.shape, jnp.nan, K.dtype), jnp.zeros_like(level), level
    return lax.while_loop(again, attempt, begin)[:2]


def _solve_columns(L, B):
    """
    :func:`solve_lower` with the columns of B, the rows of the data, split over the mesh
    that is set. XLA splits all else by itself, but would gather B on each device here.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in types if kind == AxisType.Auto)
    if not axes or B.shape[-1] % math.prod(mesh.shape[name] for name in axes):
        return solve_lower(L, B)
    columns = PartitionSpec(*[None] * (B.ndim - 1), axes)
    specs = {"in_specs": (PartitionSpec(), columns), "out_specs": columns}
    return jax.shard_map(solve_lower, axis_names=set(axes), **specs)(L, B)

"""Kernels of the inner product, and those that do not look at the inputs."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from numpyro_sgp.kernels.base import (
    Features,
    InputKernel,
    Shape,
    append_axes,
    no_features,
)
from numpyro_sgp.kernels.distances import inner_products
from numpyro_sgp.kernels.pytrees import frozen_pytree, static_field
from numpyro_sgp.linalg import einsum

__all__ = ["Constant", "Linear", "Polynomial", "White"]


@frozen_pytree
class Linear(InputKernel):
    r"""
    The linear kernel

    .. math::

        k(x, x') = \sigma^2 \sum_d x_d x'_d / \ell_d^2 ,

    the covariance of :math:`f(x) = \sum_d w_d x_d` with independent weights of variance
    :math:`\sigma^2 / \ell_d^2`. Its matrices have rank D at most.

    :param variance: :math:`\sigma^2`, shape ``batch``.
    :param lengthscale: :math:`\ell`, a scalar or of shape ``batch`` or ``(*batch, D)``
        (see :class:`~numpyro_sgp.kernels.Stationary` for batches and ARD).
    :param active_dims: the columns of the inputs that the kernel sees; None for all.

    >>> from numpyro_sgp.kernels import Linear
    >>> print(Linear(variance=2.0)([[1.0, 2.0], [3.0, 4.0]]))
    [[10. 22.]
     [22. 50.]]
    """

    _per_column: ClassVar[tuple[str, ...]] = ("lengthscale",)

    variance: ArrayLike = 1.0
    lengthscale: ArrayLike = 1.0
    active_dims: tuple[int, ...] | None = static_field(default=None, kw_only=True)

    def _of_inner(self, inner: Array, axes: int) -> Array:
        """The unscaled kernel of inner products that end in ``axes`` axes of points."""
        return inner

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        X1, X2 = self._inputs(X1, X1 if X2 is None else X2)
        inner = inner_products(self._scaled(X1), self._scaled(X2))
        return append_axes(self.variance, 2) * self._of_inner(inner, 2)

    def diag(self, X: ArrayLike) -> Array:
        (X,) = self._inputs(X)
        inner = jnp.sum(self._scaled(X) ** 2, axis=-1)
        return append_axes(self.variance, 1) * self._of_inner(inner, 1)

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        shape = (*shape, self._num_scaled(dim, dtype))
        return Partial(_linear, self, jax.random.rademacher(rng_key, shape, dtype))


def _linear(kernel, slopes, X):
    X = kernel._scaled(*kernel._inputs(X))
    values = einsum("...fd,...nd->...fn", slopes, X)
    return jnp.sqrt(append_axes(kernel.variance, 2)) * values


@frozen_pytree
class Polynomial(Linear):
    r"""
    The polynomial kernel

    .. math::

        k(x, x') = \sigma^2 \left(\sum_d x_d x'_d / \ell_d^2 + c\right)^p .

    The other parameters are those of :class:`Linear`.

    :param offset: :math:`c`, non-negative, a scalar or of shape ``batch``.
    :param int degree: :math:`p`, at least 1; static.

    >>> from numpyro_sgp.kernels import Polynomial
    >>> print(Polynomial(offset=1.0, degree=3)([[1.0], [2.0]]))
    [[  8.  27.]
     [ 27. 125.]]
    """

    _per_kernel: ClassVar[tuple[str, ...]] = ("offset",)

    offset: ArrayLike = 1.0
    degree: int = static_field(default=2)

    def __post_init__(self):
        super().__post_init__()
        try:
            degree = operator.index(self.degree)
        except TypeError:
            degree = 0
        if degree < 1:
            raise ValueError(
                f"Polynomial: degree must be a Python int of at least 1, got "
                f"{self.degree!r}."
            )
        object.__setattr__(self, "degree", degree)

    def _of_inner(self, inner: Array, axes: int) -> Array:
        return (inner + append_axes(self.offset, axes)) ** self.degree

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        # One random line for each factor of the power.
        key, key_level = jax.random.split(rng_key)
        shape = (*shape, self.degree)
        slopes = (*shape, self._num_scaled(dim, dtype))
        return Partial(
            _polynomial,
            self,
            jax.random.rademacher(key, slopes, dtype),
            jax.random.rademacher(key_level, shape, dtype),
        )


def _polynomial(kernel, slopes, levels, X):
    X = kernel._scaled(*kernel._inputs(X))
    lines = einsum("...fpd,...nd->...fpn", slopes, X)
    lines = lines + jnp.sqrt(append_axes(kernel.offset, 3)) * levels[..., None]
    return jnp.sqrt(append_axes(kernel.variance, 2)) * jnp.prod(lines, axis=-2)


@frozen_pytree
class Constant(InputKernel):
    r"""
    The constant kernel :math:`k(x, x') = \sigma^2`, the covariance of an unknown level.

    :param variance: :math:`\sigma^2`, shape ``batch``.

    >>> from numpyro_sgp.kernels import Constant
    >>> print(Constant(2.0)([[0.0], [1.0]], [[5.0]]))
    [[2.]
     [2.]]
    """

    variance: ArrayLike = 1.0

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        X1, X2 = self._inputs(X1, X1 if X2 is None else X2)
        variance = self._full(append_axes(self.variance, 2), X1, (1, 1))
        batch = np.broadcast_shapes(variance.shape[:-2], X2.shape[:-2])
        dtype = jnp.result_type(variance, X2)
        shape = (*batch, X1.shape[-2], X2.shape[-2])
        return jnp.broadcast_to(variance.astype(dtype), shape)

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        return Partial(_constant, self, jax.random.rademacher(rng_key, shape, dtype))


def _constant(kernel, sign, X):
    (X,) = kernel._inputs(X)
    level = jnp.sqrt(append_axes(kernel.variance, 2)) * sign[..., None]
    return jnp.broadcast_to(level, (*level.shape[:-1], X.shape[-2]))


@frozen_pytree
class White(InputKernel):
    r"""
    White noise: :math:`\sigma^2` for a point with itself, zero otherwise.

    Points are told apart by their row, not by their coordinates (as in scikit-learn):
    ``White()(X)`` and ``White()(X, X)`` with one object ``X`` are
    :math:`\sigma^2 I` even if rows of ``X`` are equal, and ``White()(X1, X2)`` of two
    arrays is zero even if they hold equal rows. Inside ``jax.jit``, two arguments are
    two arrays, whatever was passed to them.

    :param variance: :math:`\sigma^2`, shape ``batch``.

    >>> from numpyro_sgp.kernels import White
    >>> print(White(2.0)([[0.0], [1.0]]))
    [[2. 0.]
     [0. 2.]]
    >>> print(White(2.0)([[0.0], [1.0]], [[0.0]]))
    [[0.]
     [0.]]
    """

    variance: ArrayLike = 1.0

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        same = X2 is None or X2 is X1
        X1, X2 = self._inputs(X1, X1 if X2 is None else X2)
        variance = self._full(append_axes(self.variance, 2), X1, (1, 1))
        if same:
            return variance * jnp.eye(X1.shape[-2], dtype=variance.dtype)
        batch = np.broadcast_shapes(variance.shape[:-2], X2.shape[:-2])
        dtype = jnp.result_type(variance, X2)
        return jnp.zeros((*batch, X1.shape[-2], X2.shape[-2]), dtype)

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        raise no_features(self, ": its independent values at each point are no function")

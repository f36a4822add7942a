"""Kernels of other libraries (tinygp, GPJax) and kernels by protocol."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_sgp.kernels.base import (
    Kernel,
    batch_shape_of,
    features_of,
    frozen_pytree,
    static_field,
)

__all__ = ["GPJaxKernel", "ObjectKernel", "TinygpKernel", "as_kernel"]


def as_kernel(kernel: Any) -> Any:
    """
    Make a kernel of what may be another library's.

    - Kernels of this package are returned as they are.
    - tinygp and GPJax kernels are wrapped (:class:`TinygpKernel`,
      :class:`GPJaxKernel`); the hyperparameters in them stay leaves of the pytree. Wrap
      before adding to a kernel of this package: ``as_kernel(theirs) + RBF()``.
    - Any object with ``kernel(X1, X2)``, the covariance matrix, and ``kernel.diag(X)``,
      its diagonal, is a kernel. It is returned as it is if it is registered as a
      pytree; otherwise it is wrapped (:class:`ObjectKernel`) and JAX sees no leaves in
      it.

    :param kernel: a kernel.
    :return: an object with ``__call__(X1, X2)`` and ``diag(X)`` that is a pytree.
    :raises TypeError: if ``kernel`` is none of these.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.kernels import RBF, as_kernel
    >>> class Brownian:
    ...     def __call__(self, X1, X2):
    ...         return jnp.minimum(X1, jnp.swapaxes(X2, -1, -2))
    ...
    ...     def diag(self, X):
    ...         return X[..., 0]
    >>> k = as_kernel(Brownian()) + RBF()
    >>> print(k(jnp.array([[1.0], [2.0]])).round(4))
    [[2.     1.6065]
     [1.6065 3.    ]]
    """
    if isinstance(kernel, Kernel):
        return kernel
    # An instance can only exist if its library is imported already.
    tinygp = sys.modules.get("tinygp")
    if tinygp is not None and isinstance(kernel, tinygp.kernels.Kernel):
        return TinygpKernel(kernel)
    gpjax = sys.modules.get("gpjax")
    if gpjax is not None and isinstance(kernel, gpjax.kernels.AbstractKernel):
        return GPJaxKernel(kernel)
    is_class = isinstance(kernel, type)
    if not is_class and callable(kernel) and callable(getattr(kernel, "diag", None)):
        is_leaf = jax.tree_util.all_leaves([kernel])
        return ObjectKernel(_Same(kernel)) if is_leaf else kernel
    got = f"the class {kernel.__name__}" if is_class else f"a {type(kernel).__name__}"
    mend = " Make an instance of it." if is_class and issubclass(kernel, Kernel) else ""
    raise TypeError(
        f"Not a kernel: {got}. A kernel is one of numpyro_sgp.kernels, a tinygp or "
        "GPJax kernel, or an object with __call__(X1, X2), which returns the "
        "covariance matrix of shape (N1, N2), and diag(X), which returns its diagonal "
        f"of shape (N,).{mend}"
    )


def _matrix(function: Any, X1: ArrayLike, X2: ArrayLike | None) -> Array:
    """``function(X1, X2)`` of two-dimensional inputs, over the inputs' batches."""
    function = jnp.vectorize(function, signature="(n,d),(m,d)->(n,m)")
    X1 = jnp.asarray(X1)
    return function(X1, X1 if X2 is None else jnp.asarray(X2))


@frozen_pytree
class TinygpKernel(Kernel):
    """
    A tinygp kernel; :func:`as_kernel` makes it.

    :param kernel: a ``tinygp.kernels.Kernel``; it sees each point as a row, of shape
        ``(D,)``.
    """

    kernel: Any

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        return _matrix(self.kernel, X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        # With one argument, a tinygp kernel is its diagonal.
        return jnp.vectorize(self.kernel, signature="(n,d)->(n)")(jnp.asarray(X))


@frozen_pytree
class GPJaxKernel(Kernel):
    """
    A GPJax kernel; :func:`as_kernel` makes it.

    :param kernel: a ``gpjax.kernels.AbstractKernel``.
    """

    kernel: Any

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        return _matrix(self.kernel.cross_covariance, X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        def at_point(x):
            return jnp.reshape(self.kernel(x, x), ())

        return jnp.vectorize(at_point, signature="(d)->()")(jnp.asarray(X))


class _Same:
    """A box that is equal only to a box of the same object (which need not hash)."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


@frozen_pytree
class ObjectKernel(Kernel):
    """
    An object with ``__call__(X1, X2)`` and ``diag(X)`` that is not a pytree;
    :func:`as_kernel` makes it.

    The object is part of the tree's structure: gradients with respect to arrays in it
    are not taken, and it must not be changed after a function was compiled with it. To
    learn its hyperparameters, register its class as a pytree.
    """

    box: _Same = static_field()

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return batch_shape_of(self.box.value)

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        return self.box.value(X1, X1 if X2 is None else X2)

    def diag(self, X: ArrayLike) -> Array:
        return self.box.value.diag(X)

    def features(self, rng_key, shape, dim, dtype):
        return features_of(self.box.value, rng_key, shape, dim, dtype)

"""Kernels of other libraries (tinygp, GPJax) and kernels by protocol."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import numbers
from numpyro_sgp.kernels.base import (
    Features,
    Kernel,
    Product,
    Scaled,
    Shape,
    Sum,
    batch_shape_of,
    features_of,
)
from numpyro_sgp.kernels.pytrees import frozen_pytree, static_field

__all__ = ["GPJaxKernel", "ObjectKernel", "TinygpKernel", "as_kernel"]


_INPUTS = "The inputs of a kernel"


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
    if isinstance(kernel, Kernel):  # of which a subclass may be no pytree
        is_leaf = jax.tree_util.all_leaves([kernel])
        return ObjectKernel(_Same(kernel)) if is_leaf else kernel
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
    if not is_class and hasattr(kernel, "shape") and hasattr(kernel, "dtype"):
        got, mend = "an array", " GaussianProcess(kernel, X) takes the kernel first."
    raise TypeError(
        f"Not a kernel: {got}. A kernel is one of numpyro_sgp.kernels, a tinygp or "
        "GPJax kernel, or an object with __call__(X1, X2), which returns the "
        "covariance matrix of shape (N1, N2), and diag(X), which returns its diagonal "
        f"of shape (N,).{mend}"
    )


def check_kernel(name: str, kernel: Any, X: Array) -> None:
    """
    Check a kernel that is not of this package at a few of its inputs: that ``diag`` is the
    diagonal of the matrix, and that the matrix has its shape and is symmetric. Sparse
    approximations take variances from ``diag`` alone, so that a wrong one shows nowhere.

    :param name: of the GP site, for the message.
    :param kernel: a kernel, with known hyperparameters.
    :param X: known inputs, shape ``(*b, N, D)``.
    :raises ValueError: naming the kernel, what it returned and the mend.
    """
    if isinstance(kernel, Scaled):
        return check_kernel(name, kernel.kernel, X)
    if isinstance(kernel, Sum | Product):
        check_kernel(name, kernel.left, X)
        return check_kernel(name, kernel.right, X)
    if _is_ours(kernel):
        return
    rows = np.unique(np.linspace(0, X.shape[-2] - 1, 4).astype(int))
    num = max(1, len(rows) - 1)
    some, fewer = X[..., rows, :], X[..., rows[:num], :]
    own = f"The kernel {_own_name(kernel)} of GP site '{name}'"
    K, cross, diag = kernel(some, some), kernel(some, fewer), kernel.diag(some)
    for what, found, shape in (
        ("kernel(X1, X2)", cross, (len(rows), num)),
        ("kernel(X, X)", K, (len(rows), len(rows))),
        ("kernel.diag(X)", diag, (len(rows),)),
    ):
        if jnp.shape(found)[-len(shape) :] != shape:
            raise ValueError(
                f"{own}: {what} returned the shape {jnp.shape(found)} where it must end in "
                f"{shape}, with X and X1 of {len(rows)} rows and X2 of {num}."
            )
    if not all(map(not_jax_tracer, (K, cross, diag))):
        return  # hyperparameters that are sampled, in an object that is no pytree
    tolerance = np.sqrt(jnp.finfo(K.dtype).eps) * np.max(np.abs(K))

    def differ(a, b):
        difference = np.abs(np.asarray(a) - np.asarray(b))
        return bool(np.any(difference > tolerance))

    diagonal = jnp.diagonal(K, axis1=-2, axis2=-1)
    if differ(diag, diagonal):
        raise ValueError(
            f"{own}: kernel.diag(X) is {np.asarray(diag).tolist()} at the rows "
            f"{rows.tolist()} of X, but the diagonal of kernel(X, X) is "
            f"{np.asarray(diagonal).tolist()}. Make diag return the latter: the variance "
            "k(x, x) at each row."
        )
    if differ(K, jnp.swapaxes(K, -1, -2)) or differ(
        cross, jnp.swapaxes(kernel(fewer, some), -1, -2)
    ):
        raise ValueError(
            f"{own} is not symmetric: kernel(X1, X2) must be the transpose of "
            f"kernel(X2, X1); at the rows {rows.tolist()} of X the matrix is "
            f"{np.asarray(K).tolist()}."
        )


def _is_ours(kernel: Any) -> bool:
    """Whether a kernel, and those that it is made of, are of this package."""
    if type(kernel).__module__.split(".")[0] != __name__.split(".")[0]:
        return False
    parts = (getattr(kernel, name, None) for name in ("base", "locations"))
    foreign = isinstance(kernel, ObjectKernel | TinygpKernel | GPJaxKernel)
    return not foreign and all(_is_ours(part) for part in parts if part is not None)


def _own_name(kernel: Any) -> str:
    boxed = kernel.box.value if isinstance(kernel, ObjectKernel) else kernel
    return type(boxed).__name__


def _matrix(function: Any, X1: ArrayLike, X2: ArrayLike | None) -> Array:
    """``function(X1, X2)`` of two-dimensional inputs, over the inputs' batches."""
    function = jnp.vectorize(function, signature="(n,d),(m,d)->(n,m)")
    X1 = numbers(X1, _INPUTS)
    return function(X1, X1 if X2 is None else numbers(X2, _INPUTS))


@frozen_pytree
class TinygpKernel(Kernel):
    """
    A tinygp kernel; :func:`as_kernel` makes it.

    :param kernel: a ``tinygp.kernels.Kernel``; it sees each point as a row, of shape
        ``(D,)``, and a quasiseparable one, which is for one column, as a number.
    """

    kernel: Any

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        return _matrix(self._seen, X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        # With one argument, a tinygp kernel is its diagonal.
        return jnp.vectorize(self._seen, signature="(n,d)->(n)")(numbers(X, _INPUTS))

    def _seen(self, *inputs):
        quasisep = sys.modules.get("tinygp.kernels.quasisep")
        if quasisep is None or not isinstance(self.kernel, quasisep.Quasisep):
            return self.kernel(*inputs)
        if inputs[0].shape[-1] != 1:
            raise ValueError(
                f"A {type(self.kernel).__name__} of tinygp.kernels.quasisep is for inputs "
                f"of one column, but these have {inputs[0].shape[-1]}. Use its namesake in "
                "tinygp.kernels, or one of numpyro_sgp.kernels."
            )
        return self.kernel(*(X[:, 0] for X in inputs))


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

        return jnp.vectorize(at_point, signature="(d)->()")(numbers(X, _INPUTS))


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

    The object is part of the tree's structure, and must not be changed after a function was
    compiled with it. Gradients reach hyperparameters that a model samples and makes such an
    object of; they are not leaves of a kernel that is itself an argument of ``jax.grad`` or
    ``jax.jit``. For that, register its class as a pytree.
    """

    box: _Same = static_field()

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return batch_shape_of(self.box.value)

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        return self.box.value(X1, X1 if X2 is None else X2)

    def diag(self, X: ArrayLike) -> Array:
        return self.box.value.diag(X)

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        return features_of(self.box.value, rng_key, shape, dim, dtype)

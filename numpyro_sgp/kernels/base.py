"""What all kernels share: the pytree registration, the checks and the arithmetic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import numbers, real
from numpyro_sgp.kernels.pytrees import frozen_pytree

__all__ = ["Kernel", "Product", "Scaled", "Sum"]

Shape = tuple[int, ...]
Features = Callable[[Array], Array]


class Kernel:
    r"""
    A covariance function :math:`k(x, x')`, and the base class of the kernels here.

    A kernel is an immutable pytree whose leaves are its hyperparameters, so it can be
    built inside a model from sampled values, differentiated, and passed through
    ``jax.jit`` and ``jax.vmap``. Kernels add and multiply: ``k1 + k2``, ``k1 * k2``,
    ``sum([k1, k2, k3])``, and ``2.0 * k`` (or ``k * scales``, a scale for each kernel
    of a batch).

    Subclasses define :meth:`__call__`, :meth:`diag` and, where it is not ``()``,
    :attr:`batch_shape`. Other libraries' kernels are made into one by
    :func:`~numpyro_sgp.kernels.as_kernel`.
    """

    # Lets ``numpy_array * kernel`` reach __rmul__ (else: an object array of kernels).
    __array_ufunc__: ClassVar[None] = None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch of kernels, ``()`` for a single one."""
        return ()

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        """
        The covariance matrix between two sets of points.

        :param X1: points, shape ``(*b1, N1, D)``.
        :param X2: points, shape ``(*b2, N2, D)``. ``None``, or the very object ``X1``,
            means that the two sets are the same points.
        :return: shape ``(*broadcast(batch_shape, b1, b2), N1, N2)``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__.")

    def diag(self, X: ArrayLike) -> Array:
        """
        The diagonal of ``self(X)``, without the matrix.

        :param X: points, shape ``(*b, N, D)``.
        :return: shape ``(*broadcast(batch_shape, b), N)``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define diag.")

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        r"""
        Independent random functions :math:`\phi` with
        :math:`E[\phi(x) \phi(x')] = k(x, x')`, exactly.

        With standard normal weights, :math:`F^{-1/2} \sum_{i=1}^F w_i \phi_i` has the
        covariance :math:`k` too, and is a draw from the process as F grows (Rahimi &
        Recht 2007, "Random Features for Large-Scale Kernel Machines").

        :param shape: how many, ``(*batch, F)``; the kernel's batch shape broadcasts to
            ``batch``.
        :param dim: number D of columns of the inputs.
        :param dtype: of the random numbers.
        :return: a pytree to be called with points of shape ``(*b, N, D)``, ``b``
            broadcastable to ``batch``, for the values, ``(*batch, F, N)``.
        :raises NotImplementedError: for a kernel that has none (:class:`White`, those of
            other libraries).

        >>> import jax
        >>> from numpyro_sgp.kernels import RBF
        >>> phi = RBF().features(jax.random.key(0), (2, 100), 1, float)
        >>> phi(jax.numpy.zeros((5, 1))).shape
        (2, 100, 5)
        """
        raise no_features(self)

    def __add__(self, other: Any) -> Kernel:
        return _pair(Sum, self, other)

    def __radd__(self, other: Any) -> Kernel:
        if isinstance(other, int) and other == 0:  # the start of sum([...])
            return self
        return _pair(Sum, other, self)

    def __mul__(self, other: Any) -> Kernel:
        return _scaled(self, other) if _is_array(other) else _pair(Product, self, other)

    def __rmul__(self, other: Any) -> Kernel:
        return _scaled(self, other) if _is_array(other) else _pair(Product, other, self)


def _is_array(value: Any) -> bool:
    return isinstance(value, (int, float, list, tuple, np.number, np.ndarray, jax.Array))


def _scaled(kernel: Any, scale: Any) -> Scaled:
    from numpyro_sgp.kernels.adapters import as_kernel

    return Scaled(as_kernel(kernel), scale)


def _pair(kind: type, *operands: Any) -> Any:
    """A sum or product; NotImplemented where something is not a kernel."""
    from numpyro_sgp.kernels.adapters import as_kernel

    for other in operands:
        if _is_array(other):
            raise TypeError(
                f"A kernel and a number ({other!r}) do not add; for a constant covariance "
                "add Constant(variance)."
            )
    try:
        left, right = map(as_kernel, operands)
    except TypeError:
        return NotImplemented
    return kind(left, right)


def batch_shape_of(kernel: Any) -> tuple[int, ...]:
    """``kernel.batch_shape``; ``()`` for foreign kernels, which need not have one."""
    return tuple(getattr(kernel, "batch_shape", ()))


def no_features(kernel: Any, reason: str = "") -> NotImplementedError:
    """The error of a kernel that has no random features."""
    return NotImplementedError(
        f"{type(kernel).__name__} has no random features{reason}. RBF, Matern12, "
        "Matern32, Matern52, RationalQuadratic, Periodic, Linear, Polynomial, Constant "
        "and their sums, products and multiples have; a kernel of your own may define "
        "features(rng_key, shape, dim, dtype). Joint draws at given inputs need none: "
        "guide.posterior(params, X)[site].sample(rng_key, (num,)) is exact, in O(N^3)."
    )


def features_of(kernel: Any, *args: Any) -> Features:
    """``kernel.features(*args)``, which not every foreign kernel has."""
    if not callable(getattr(kernel, "features", None)):
        raise no_features(kernel)
    return kernel.features(*args)


def broadcast_batches(owner: Kernel, shapes: dict[str, tuple[int, ...]]) -> None:
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        got = " and ".join(f"{shape} ({name})" for name, shape in shapes.items())
        raise ValueError(
            f"{type(owner).__name__}: the batch shapes {got} do not broadcast. Give "
            "both the same batch shape, or none to one of them."
        ) from None


def check_range(owner: Kernel, name: str, zero: bool) -> None:
    """
    :param zero: whether zero is allowed.
    :raises ValueError: if this hyperparameter is known and negative, NaN or zero.
    """
    value = getattr(owner, name)
    if value is None or not not_jax_tracer(value):
        return
    value = np.asarray(real(value, f"{type(owner).__name__}: {name}"))
    valid = value >= 0 if zero else value > 0
    if name in ("variance", "scale"):
        valid = valid & (value < np.inf)  # a lengthscale may be: of no influence
    if not valid.all():
        need = "non-negative" if zero else "positive"
        need += ", and finite" if np.isposinf(value).any() else ""
        raise ValueError(
            f"{type(owner).__name__}: {name} must be {need}, got {value[~valid].flat[0]}"
            + (f" in an array of shape {value.shape}." if value.ndim else ".")
            + " Numbers that are learned need a constraint or a prior, as LogNormal."
        )


@frozen_pytree
class _Pair(Kernel):
    """What sums and products share."""

    _operator: ClassVar[Any]
    left: Any
    right: Any

    def __post_init__(self):
        left, right = batch_shape_of(self.left), batch_shape_of(self.right)
        broadcast_batches(self, {"left": left, "right": right})

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(batch_shape_of(self.left), batch_shape_of(self.right))

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        X2 = X1 if X2 is None else X2
        return self._operator(self.left(X1, X2), self.right(X1, X2))

    def diag(self, X: ArrayLike) -> Array:
        return self._operator(self.left.diag(X), self.right.diag(X))


@frozen_pytree
class Sum(_Pair):
    """
    The sum of two kernels, written ``left + right``; their batch shapes broadcast.

    :param left: a kernel.
    :param right: a kernel.

    >>> from numpyro_sgp.kernels import RBF, Linear
    >>> print((RBF(variance=2.0) + Linear()).diag([[0.0], [3.0]]))
    [ 2. 11.]
    """

    _operator = operator.add

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        key_left, key_right, sign = jax.random.split(rng_key, 3)
        left = features_of(self.left, key_left, shape, dim, dtype)
        right = features_of(self.right, key_right, shape, dim, dtype)
        return Partial(_sum, left, right, jax.random.rademacher(sign, shape, dtype))


@frozen_pytree
class Product(_Pair):
    """
    The product of two kernels, written ``left * right``; their batch shapes broadcast.

    :param left: a kernel.
    :param right: a kernel.

    >>> from numpyro_sgp.kernels import RBF, Linear
    >>> print((RBF(variance=2.0) * Linear()).diag([[0.0], [3.0]]))
    [ 0. 18.]
    """

    _operator = operator.mul

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        key_left, key_right = jax.random.split(rng_key)
        left = features_of(self.left, key_left, shape, dim, dtype)
        right = features_of(self.right, key_right, shape, dim, dtype)
        return Partial(_product, left, right)


@frozen_pytree
class Scaled(Kernel):
    """
    A kernel times a non-negative number, written ``scale * kernel``.

    :param kernel: a kernel.
    :param scale: the factor of the covariance (not of the function's values), a number
        or one for each kernel of a batch; broadcasts with the kernel's batch shape.

    >>> from numpyro_sgp.kernels import RBF
    >>> print((3.0 * RBF(variance=2.0)).diag([[0.0], [3.0]]))
    [6. 6.]
    """

    kernel: Any
    scale: ArrayLike

    def __post_init__(self):
        if isinstance(self.scale, list | tuple):
            object.__setattr__(self, "scale", jnp.stack([*map(jnp.asarray, self.scale)]))
        batch, scale = batch_shape_of(self.kernel), np.shape(self.scale)
        broadcast_batches(self, {"kernel": batch, "scale": scale})
        check_range(self, "scale", zero=True)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(batch_shape_of(self.kernel), np.shape(self.scale))

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        X2 = X1 if X2 is None else X2
        return append_axes(self.scale, 2) * self.kernel(X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        return append_axes(self.scale, 1) * self.kernel.diag(X)

    def features(self, rng_key: Array, shape: Shape, dim: int, dtype: Any) -> Features:
        features = features_of(self.kernel, rng_key, shape, dim, dtype)
        return Partial(_times, features, self.scale)


def _sum(left, right, sign, X):
    # The random sign makes their product zero on average.
    return left(X) + sign[..., None] * right(X)


def _product(left, right, X):
    return left(X) * right(X)


def _times(features, scale, X):
    return jnp.sqrt(append_axes(scale, 2)) * features(X)


def append_axes(value: ArrayLike, n: int) -> Any:
    """Append ``n`` axes of size one; a scalar stays as it is (and weakly typed)."""
    shape = np.shape(value)
    return jnp.reshape(value, shape + (1,) * n) if shape else value


def normalise_active_dims(name: str, active_dims: Any) -> tuple[int, ...] | None:
    """``active_dims`` as a tuple of ints; ``name`` is the kernel's, for the errors."""
    if active_dims is None:
        return None
    if isinstance(active_dims, slice):
        start, step = active_dims.start or 0, active_dims.step or 1
        if active_dims.stop is None or active_dims.stop < 0 or start < 0:
            raise ValueError(
                f"{name}: active_dims={active_dims} depends on the number of columns "
                "of the inputs. Give a slice with a non-negative start and stop, or a "
                "tuple."
            )
        dims = tuple(range(start, active_dims.stop, step))
    else:
        if not isinstance(active_dims, Iterable):
            active_dims = (active_dims,)
        try:
            if any(isinstance(d, (bool, np.bool_)) for d in active_dims):
                raise TypeError("a bool is not a column")
            dims = tuple(operator.index(d) for d in active_dims)
        except TypeError:
            raise ValueError(
                f"{name}: active_dims must be column numbers (a tuple or list of ints, "
                f"or a slice), got {active_dims!r}."
            ) from None
    if not dims:
        raise ValueError(
            f"{name}: active_dims={active_dims!r} selects no column. Leave it None to "
            "use all columns."
        )
    return dims


class InputKernel(Kernel):
    """
    A kernel with a ``variance`` and other hyperparameters shaped after it (the common
    base of the kernels that are not made of others).

    Subclasses list the hyperparameters of shape ``batch`` in ``_per_kernel``, and those
    of shape ``batch`` or ``(*batch, D)`` in ``_per_column``.

    :raises ValueError: if shapes do not fit together, or known hyperparameters are not
        positive. Traced ones cannot be looked at: give them priors on positive numbers.
    """

    _per_kernel: ClassVar[tuple[str, ...]] = ()
    _per_column: ClassVar[tuple[str, ...]] = ()
    variance: ArrayLike
    active_dims: tuple[int, ...] | None = None

    def __post_init__(self):
        for name in self._hyperparameters:
            if isinstance(getattr(self, name), (list, tuple)):
                # A list would be a subtree, not a leaf.
                what = f"{type(self).__name__}: {name}"
                object.__setattr__(self, name, numbers(getattr(self, name), what))
        if self.active_dims is not None:
            dims = normalise_active_dims(type(self).__name__, self.active_dims)
            object.__setattr__(self, "active_dims", dims)
        self._check()
        if any(getattr(self, name) is None for name in self._hyperparameters):
            return  # the axes of a vmap
        for name in self._hyperparameters:
            check_range(self, name, zero=name == "offset")

    @property
    def _hyperparameters(self) -> tuple[str, ...]:
        return ("variance", *self._per_kernel, *self._per_column)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.variance))

    def _check(self, D: int | None = None) -> None:
        """Check the hyperparameters' shapes, and given ``D`` also the ARD axis."""
        batch = np.shape(self.variance)
        for name in self._per_kernel:
            shape = np.shape(getattr(self, name))
            if not broadcasts_to(shape, batch):
                raise ValueError(
                    f"{type(self).__name__}: {name} has shape {shape} and variance "
                    f"{batch}; expected {name} to be a scalar or to have variance's "
                    f"shape. {_mend(name, shape)}"
                )
        for name in self._per_column:
            shape = np.shape(getattr(self, name))
            own, columns = shape[: len(batch)], shape[len(batch) :]
            known = D is None or columns in ((), (1,), (D,))
            if not (broadcasts_to(own, batch) and len(columns) <= 1 and known):
                sizes = (*map(str, batch), "D" if D is None else str(D))
                ard = f"({', '.join(sizes)}{',' * (not batch)})"
                inputs = "" if D is None else f" and the inputs {D} (active) column(s)"
                raise ValueError(
                    f"{type(self).__name__}: {name} has shape {shape}, variance {batch}"
                    f"{inputs}; expected {name} to have the shape {batch} (one for "
                    f"each kernel) or {ard} (one for each column). {_mend(name, shape)}"
                )

    def _inputs(self, *Xs: ArrayLike) -> list[Array]:
        """Check the inputs (and the hyperparameters against them); select columns."""
        own = type(self).__name__
        given = [numbers(X, f"{own}: the inputs") for X in Xs]
        for X in given:
            if X.ndim < 2:
                raise ValueError(
                    f"{own}: the inputs have shape {X.shape}, expected (*batch, N, D). "
                    "For N points with one column give X[:, None]."
                )
        D = given[0].shape[-1]
        if not D:
            raise ValueError(f"{own}: the inputs have no columns, shape {given[0].shape}.")
        if given[-1].shape[-1] != D:
            raise ValueError(
                f"{own}: X1 and X2 must have the same number of columns, got shapes "
                f"{given[0].shape} and {given[-1].shape}."
            )
        dims = self.active_dims
        if dims is not None:
            if not all(-D <= d < D for d in dims):
                raise ValueError(
                    f"{own}: active_dims={dims} is out of range for inputs with D={D} "
                    f"column(s), which are numbered 0 to {D - 1}."
                )
            # An index array with -1 in it would cost a select; make them non-negative.
            columns = np.array([d % D for d in dims])
            given = [X[..., columns] for X in given]
        self._check(given[0].shape[-1])
        return [X if jnp.issubdtype(X.dtype, jnp.floating) else X * 1.0 for X in given]

    def _full(self, value: ArrayLike, X: Array, shape: tuple[int, ...]) -> Array:
        """``value`` on the batch of ``self(X)``, with the axes ``shape`` at the end."""
        hyperparameters = (getattr(self, name) for name in self._hyperparameters)
        dtype = jnp.result_type(X, *hyperparameters)
        batch = np.broadcast_shapes(self.batch_shape, X.shape[:-2])
        return jnp.broadcast_to(jnp.asarray(value, dtype), batch + shape)

    def _num_scaled(self, dim: int, dtype: Any) -> int:
        """Number of columns of ``_scaled`` inputs with ``dim`` columns."""
        X = jax.ShapeDtypeStruct((1, dim), dtype)
        return jax.eval_shape(lambda X: self._scaled(*self._inputs(X)), X).shape[-1]

    def diag(self, X: ArrayLike) -> Array:
        (X,) = self._inputs(X)
        return self._full(append_axes(self.variance, 1), X, (X.shape[-2],))

    def _scaled(self, X: Array) -> Array:
        return X / self._per_point("lengthscale")

    def _per_point(self, name: str) -> Any:
        """A ``_per_column`` hyperparameter, shaped to meet inputs ``(*b, N, D)``."""
        value = getattr(self, name)
        shape = np.shape(value)
        if len(shape) > len(np.shape(self.variance)):
            return jnp.reshape(value, (*shape[:-1], 1, shape[-1]))
        return append_axes(value, 2)


def broadcasts_to(shape: Shape, batch: Shape) -> bool:
    try:
        return np.broadcast_shapes(shape, batch) == batch
    except ValueError:
        return False


def _mend(name: str, shape: tuple[int, ...]) -> str:
    """What to do about a hyperparameter that is meant to be one for each kernel."""
    batch, each = (shape, "each") if len(shape) == 1 else (shape[:-1], "for each column")
    return (
        f"For {math.prod(batch)} kernels with one {name} {each}, give variance the shape "
        f"{batch} too."
    )

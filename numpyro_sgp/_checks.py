"""What arguments must be, with messages that name them."""

import operator
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return f"an array of {value.dtype} of shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def numbers(value: Any, what: str) -> Array:
    """
    Real numbers as a JAX array; see :func:`real`.
    """
    return jnp.asarray(real(value, what))


def real(value: Any, what: str) -> Any:
    """
    Real numbers as an array, of NumPy if they are none of JAX.

    :param what: what they are, the beginning of a message.
    :raises TypeError: if they are none.
    """
    dtype: Any = getattr(value, "dtype", None)
    if not isinstance(value, jax.Array) and not hasattr(value, "__jax_array__"):
        try:
            found = np.asarray(value)
        except (TypeError, ValueError):  # rows of several lengths
            found = np.empty((), object)
        if found.dtype.kind in "iu" and np.any(np.abs(found.astype(float)) >= 2**31):
            found = found.astype(jnp.result_type(float))  # what int32 does not hold
        dtype = found.dtype
        value = found if found.dtype.kind in "biuf" or dtype == jnp.bfloat16 else value
    known = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if dtype is not None and not known and dtype != np.dtype(bool):
        mend = " Give it as an array, .toarray()." if is_sparse(value) else ""
        raise TypeError(f"{what} must be real numbers, got {shown(value)}.{mend}")
    return value


def array_shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; () of all else, as of a class with a method of that name."""
    shape = getattr(value, "shape", ())
    return shape if isinstance(shape, tuple) else ()


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse matrix of SciPy, which is not imported for it."""
    return type(value).__module__.startswith("scipy.sparse")


def deviations(rows: Any) -> Any:
    """
    Standard deviations of columns, zero for constant ones, of which ``np.std`` may be
    what the mean was rounded by.
    """
    return np.where(np.ptp(rows, axis=0) > 0.0, np.std(rows, axis=0, dtype=float), 0.0)


def check_key(rng_key: Any, name: str = "rng_key") -> None:
    """
    :raises TypeError: if it is not one random key.
    """
    dtype = getattr(rng_key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    raw = dtype == jnp.uint32 and jnp.shape(rng_key) in ((2,), (4,))  # Threefry's, RBG's
    if not raw and not (typed and jnp.shape(rng_key) == ()):
        raise TypeError(
            f"{name} must be one random key, such as jax.random.key(0), got "
            f"{shown(rng_key)}."
        )


def check_sample_shape(sample_shape: Any) -> tuple[int, ...]:
    """
    :return: it as a tuple.
    :raises TypeError: if it is not a tuple of whole numbers that are not negative.
    """
    try:
        if isinstance(sample_shape, str | dict | set):
            raise TypeError
        found = tuple(operator.index(size) for size in sample_shape)
    except TypeError:
        found = (-1,)
    if any(size < 0 for size in found):
        raise TypeError(
            "sample_shape must be a tuple of whole numbers, such as (100,), got "
            f"{shown(sample_shape)}."
        )
    return found


def check_path(path: Any) -> Path:
    """
    :raises TypeError: if it is no path.
    """
    if not isinstance(path, str | os.PathLike) or path == "":
        raise TypeError(f"path must be that of a file, as a string, got {shown(path)}.")
    return Path(path)


def check_guide(guide: Any) -> None:
    """
    :raises TypeError: if it is no guide whose predictions are in closed form.
    """
    if not callable(getattr(guide, "check_params", None)):
        raise TypeError(
            f"guide must be an AutoSparseGP that is set up, got {shown(guide)}."
        )


def check_model(model: Any) -> None:
    """
    :raises TypeError: if it is no function.
    """
    if not callable(model) or isinstance(model, type):
        raise TypeError(f"model must be a NumPyro model, a function, got {shown(model)}.")


def check_whole(value: Any, name: str, least: int = 0) -> int:
    """
    :raises ValueError: if it is no whole number, or less than ``least``.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < least:
        raise ValueError(
            f"{name} must be a whole number, {least} or more, got {shown(value)}."
        )
    return number


def check_positive(value: Any, name: str) -> None:
    """
    :raises ValueError: if it is no finite number above zero.
    """
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and 0.0 < value < np.inf):
        raise ValueError(f"{name} must be a positive number, got {shown(value)}.")


def check_not_negative(value: Any, name: str) -> None:
    """
    :raises ValueError: if it is no finite number, or below zero.
    """
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (number and 0.0 <= value < np.inf):
        raise ValueError(f"{name} must be a number, zero or above, got {shown(value)}.")


def check_levels(quantiles: Any) -> tuple[float, ...]:
    """
    :return: levels as a tuple.
    :raises ValueError: if they are not a sequence of numbers between 0 and 1.
    """
    try:
        levels = tuple(float(level) for level in quantiles)
    except (TypeError, ValueError):
        levels = (np.nan,)
    if isinstance(quantiles, str | dict | set) or not all(0 < v < 1 for v in levels):
        raise ValueError(
            "quantiles must be a sequence of levels between 0 and 1, such as "
            f"(0.05, 0.95), got {shown(quantiles)}."
        )
    return levels


def check_args(args) -> None:
    """
    :raises TypeError: if arguments of a model are neither a tuple nor None.
    """
    if not (args is None or isinstance(args, tuple | list)):
        raise TypeError(
            "args must be the tuple of the model's arguments, such as (X, y), got "
            f"{type(args).__name__}."
        )


def floating(value: ArrayLike) -> Array:
    """``value`` as an array of floats: Python numbers and integers get the default type."""
    value = jnp.asarray(value)
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(float)

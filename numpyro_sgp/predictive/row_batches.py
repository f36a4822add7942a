"""Rows of a model's arguments in batches of few sizes, so that few programs do for all."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.distributions.arguments import as_arrays, is_frame

_AS_THEY_ARE = 128  # rows that are not filled up
_FEW = 2  # rows that do for a model to be run
_SMALL = 10_000  # numbers in arrays without rows, which are kept whole


def number_of_rows(leaves) -> int:
    """Length of the first argument that is an array."""
    return next((shape[0] for leaf in leaves if (shape := np.shape(leaf))), 0)


def row_batches(arrays: list, batch_size: int) -> Iterator[tuple[list, int, int]]:
    """
    Batches of all arrays that have as many rows as the first one, the last one filled up by
    its last row: to ``batch_size`` rows, or, of fewer in all, to a power of two.

    :return: arrays, how many of the rows count, and how many there are.
    """
    num_rows = number_of_rows(arrays)
    size = batch_size
    if num_rows <= batch_size:
        size = num_rows
        if num_rows > _AS_THEY_ARE:
            size = min(1 << (num_rows - 1).bit_length(), batch_size)
    if size == num_rows:
        yield arrays, num_rows, num_rows
        return
    arrays = [_on_host(a) if np.shape(a)[:1] == (num_rows,) else a for a in arrays]
    for start in range(0, num_rows, size):
        count = min(size, num_rows - start)
        rows: Any = slice(start, start + size)
        if count < size:
            rows = np.minimum(np.arange(start, start + size), num_rows - 1)
        batch = [a[rows] if np.shape(a)[:1] == (num_rows,) else a for a in arrays]
        yield batch, count, size


def _on_host(array):
    """
    As NumPy's where JAX has it on the host too, which copies nothing: a part of an array of
    JAX takes a program, and some tenths of a millisecond.
    """
    known = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
    if not known or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    devices = array.devices()
    here = len(devices) == 1 and all(device.platform == "cpu" for device in devices)
    return np.asarray(array) if here else array


def by_batches(
    run: Callable[[list], Any], arrays: list, batch_size: int
) -> list[tuple[Any, int, int]]:
    """
    What ``run`` returns for each of :func:`row_batches`, with the two numbers of the batch.
    Models that do not take more rows than there are, because a plate has a size of its own,
    get them as they are.

    :param run: a function of arrays.
    """
    num_rows = number_of_rows(arrays)
    if not _AS_THEY_ARE < num_rows < batch_size:
        return [(run(batch), *told) for batch, *told in row_batches(arrays, batch_size)]
    with suppress(TypeError, ValueError, UserWarning), warnings.catch_warnings():
        warnings.filterwarnings("error", "subsample_size does not match")
        ((batch, *told),) = row_batches(arrays, batch_size)
        return [(run(batch), *told)]
    return [(run(arrays), num_rows, num_rows)]


def first_rows(model: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """
    Arguments of a model with two rows of its data: of arrays that have as many rows (or
    columns) as the first one, the first two; others, if small, as they are.

    :raises ValueError: if they are not small.
    """
    given = as_arrays(model, args, kwargs)
    num_rows = count_rows(*given)

    def cut(leaf):
        if is_frame(leaf):
            return leaf.iloc[:_FEW] if len(leaf) == num_rows else leaf
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        if num_rows in leaf.shape:
            rows = (slice(None),) * leaf.shape.index(num_rows) + (slice(_FEW),)
            # Known inside of jit, as `as_arrays` makes it, but for its class.
            return np.asarray(leaf)[rows] if isinstance(leaf, np.ndarray) else leaf[rows]
        if leaf.size > _SMALL:
            raise ValueError(
                f"an array of shape {leaf.shape} has not the {num_rows} rows of the data, "
                "and is too large for a file"
            )
        return leaf

    return jax.tree.map(cut, given)


def count_rows(args: tuple, kwargs: dict) -> int | None:
    """Rows of the first array in arguments of a model; None where there is none."""
    shapes = map(np.shape, jax.tree.leaves([*args, *kwargs.values()]))
    return next((shape[0] for shape in shapes if shape), None)

"""Rows of a model's arguments in batches of few sizes, so that few programs do for all."""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._programs import join_static
from numpyro_sgp.distributions.arguments import (
    as_arrays,
    columns_in,
    is_frame,
    with_columns,
)
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.row_axes import (
    RowAxes,
    is_number,
    row_axes,
    rows_apart,
    site_shapes,
)
from numpyro_sgp.tracing.rows import sites_on_f
from numpyro_sgp.tracing.state import FirstShapes, kind_of, running

_AS_THEY_ARE = 128  # rows that are not filled up
_FEW = 2  # rows that do for a model to be run
_SMALL = 10_000  # numbers in arrays without rows, which are kept whole
_KINDS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by guide
_FIRST: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # shapes, by guide
_MOST_KINDS = 128  # of one guide


def rows_of(guide, arrays: list, static: tuple, batch_size: int) -> RowAxes | None:
    """
    Where the rows are, found once for each guide and kind of arguments.

    :param arrays: arrays among the model's arguments.
    :param static: what else there is, of
        :func:`~numpyro_sgp._programs.split_static`.
    :param batch_size: of :func:`by_batches`.
    :return: None where the rows cannot be told, where what depends on f has none of them
        (``f[index]`` of other numbers of rows, a total), or where GP sites have other
        inputs in batches, as they have if a model standardises its inputs.
    """
    kinds, sites = _KINDS.setdefault(guide, {}), guide.approximations

    def run(arrays, at_site=messages.above_prior_mean):
        where = guide.model, *join_static(arrays, static)
        return messages.trace_of(*where, at_site=at_site)

    def look(of, kind, fn):
        if (of, kind) not in kinds:
            found = None
            with suppress(Exception):  # which the model raises again, in earnest
                found = fn()
            if len(kinds) >= _MOST_KINDS:
                kinds.clear()
            kinds[of, kind] = found
        return kinds[of, kind]

    with running(guide.model) as states:
        first = _FIRST.setdefault(guide, FirstShapes())
        kind = static, kind_of(arrays), first.state(states, arrays, static)
        axes = look("axes", kind, lambda: row_axes(run, arrays, sites))
        if axes is None or axes.count(arrays) <= min(batch_size, _AS_THEY_ARE):
            return axes
        apart = look("apart", kind, lambda: rows_apart(run, axes, sites))
        rest = look("rest", kind, lambda: _without_rows(run, arrays, sites, axes))
        with suppress(Exception):  # a model of more rows than are looked at, for one
            if not rest and apart(arrays):
                return axes
        return None


def _without_rows(run, arrays, gp_sites, axes) -> bool:
    """Whether what is to be predicted depends on f, and has not its rows."""
    dtype, shapes = jnp.result_type(float), site_shapes(run, arrays)
    f = {name: jnp.zeros(shapes[name], dtype) for name in gp_sites}

    def made_of(f):
        trace = run(arrays, messages.at_values(f))
        return {
            name: [v for v in jax.tree.leaves(site["fn"]) if is_number(v)]
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"] and name not in f
        }

    return bool(sites_on_f(made_of, f) - set(axes.sites))


def row_batches(
    arrays: list, batch_size: int, rows: RowAxes
) -> Iterator[tuple[list, int, int]]:
    """
    Batches of the rows of arrays, the last one filled up by its last row: to ``batch_size``
    rows, or, of fewer in all, to a power of two.

    :return: arrays, how many of the rows count, and how many there are.
    """
    num_rows = rows.count(arrays)
    size = batch_size
    if num_rows <= batch_size:
        size = num_rows
        if num_rows > _AS_THEY_ARE:
            size = min(1 << (num_rows - 1).bit_length(), batch_size)
    if size == num_rows:
        yield arrays, num_rows, num_rows
        return
    pairs = zip(arrays, rows.arguments, strict=True)
    arrays = [a if axis is None else _on_host(a) for a, axis in pairs]
    for start in range(0, num_rows, size):
        count = min(size, num_rows - start)
        index: Any = slice(start, start + size)
        if count < size:
            index = np.minimum(np.arange(start, start + size), num_rows - 1)
        yield rows.take(arrays, index), count, size


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
    run: Callable[[list], Any], arrays: list, batch_size: int, rows: RowAxes | None
) -> list[tuple[Any, int, int]]:
    """
    What ``run`` returns for each of :func:`row_batches`, with the two numbers of the batch.
    Models that do not take more rows than there are, because a plate has a size of its own,
    get them as they are.

    :param run: a function of arrays.
    :param rows: of :func:`rows_of`; None where there are no batches.
    """
    if rows is None:
        return [(run(arrays), 1, 1)]
    num_rows = rows.count(arrays)
    if not _AS_THEY_ARE < num_rows < batch_size:
        parts = row_batches(arrays, batch_size, rows)
        return [(run(batch), *told) for batch, *told in parts]
    with suppress(TypeError, ValueError, UserWarning), warnings.catch_warnings():
        warnings.filterwarnings("error", "subsample_size does not match")
        ((batch, *told),) = row_batches(arrays, batch_size, rows)
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
            found = np.asarray(leaf)[rows] if isinstance(leaf, np.ndarray) else leaf[rows]
            columns = columns_in(leaf)
            return with_columns(found, columns) if columns else found
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

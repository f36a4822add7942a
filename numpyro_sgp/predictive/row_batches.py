"""Rows of a model's arguments in batches of few sizes, so that few programs do for all."""

import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._programs import FEW, forget, join_static
from numpyro_sgp.distributions.arguments import (
    as_arrays,
    columns_in,
    is_frame,
    with_columns,
)
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.row_axes import (
    RowAxes,
    deterministic_apart,
    inputs_are_untouched,
    row_axes,
    rows_apart,
    site_shapes,
)
from numpyro_sgp.tracing.rows import sites_on_f
from numpyro_sgp.tracing.state import Epochs, kind_of, running
from numpyro_sgp.tracing.trees import is_number

AS_THEY_ARE = 128  #: Rows that are not filled up.
_FEW = 2  # rows that do for a model to be run
_SMALL = 10_000  # numbers in arrays without rows, which are kept whole
_PLANS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by guide
_MOST_KINDS = 128  # of one guide


def rows_of(guide, arrays: list, static: tuple, batch_size: int) -> RowAxes | None:
    """
    :meth:`RowPlan.rows` of :func:`plan_of`.

    :param arrays: arrays among the model's arguments.
    :param static: what else there is, of
        :func:`~numpyro_sgp._programs.split_static`.
    :param batch_size: of :func:`by_batches`.
    """
    return plan_of(guide, arrays, static, batch_size).rows(arrays, batch_size)


def plan_of(guide, arrays: list, static: tuple, batch_size: int) -> "RowPlan":
    """
    The :class:`RowPlan` of a guide for this kind of arguments, made anew where the model
    computes something else than before. What it computes is looked at for as many rows as
    a batch has, so that a call traces the model once.
    """
    plans, epochs = _PLANS.setdefault(guide, ({}, Epochs()))
    kind = static, kind_of(arrays)
    plan, epoch = plans.get(kind, (None, None))
    with running(guide.model) as states:
        now = object()
        if plan is not None and plan.axes is not None:
            like = plan.axes.resized(arrays, _batch_of(plan.axes.count(arrays), batch_size))
            now = epochs.at(states, like, static)
        if now is not epoch:
            now = epochs.at(states, arrays, static)
        if plan is None or now is not epoch:
            if len(plans) >= _MOST_KINDS:
                plans.clear()
            plan = RowPlan(guide, arrays, static)
            plans[kind] = plan, now
    return plan


class RowPlan:
    """
    How rows of a kind of arguments may be done apart, whatever their number.

    :param guide: with the model, as it is now.
    :param arrays: of :func:`rows_of`.
    :param static: of :func:`rows_of`.
    """

    def __init__(self, guide, arrays, static):
        guide = weakref.ref(guide)  # which keeps the plan

        def run(arrays, at_site=messages.above_prior_mean):
            where = guide().model, *join_static(arrays, static)
            return messages.trace_of(*where, at_site=at_site)

        self._run, self._sites = run, list(guide().approximations)
        self._found: OrderedDict = OrderedDict()
        self._are_apart: bool | None = None
        #: Where rows are; None where that cannot be told.
        self.axes: RowAxes | None = None
        with suppress(Exception):  # which the model raises again, in earnest
            self.axes = row_axes(run, arrays, self._sites)

    def rows(self, arrays: list, batch_size: int, only_f: bool = False) -> RowAxes | None:
        """
        :param only_f: whether marginals of f are all that is wanted.
        :return: None where the rows cannot be told, where what depends on f has none of
            them (``f[index]`` of other numbers of rows, a total), or where GP sites have
            other inputs in batches, as they have if a model standardises its inputs.
        """
        axes = self.axes
        if axes is None or axes.count(arrays) <= min(batch_size, AS_THEY_ARE):
            return axes
        with suppress(Exception):  # a model of more rows than are looked at, for one
            if only_f and self._once(inputs_are_untouched, arrays):
                if self._are_apart is None:  # which no other numbers change
                    self._are_apart = self._apart(arrays)
                return axes if self._are_apart else None
            if not self._once(_has_others, arrays) and self._apart(arrays):
                return axes
        return None

    @functools.cached_property
    def deterministic(self) -> Callable[[list], frozenset[str]]:
        """Deterministic sites whose rows may be done apart: :func:`deterministic_apart`."""
        assert self.axes is not None  # as :meth:`rows` tells
        return deterministic_apart(self._run, self.axes, self._sites)

    @functools.cached_property
    def _apart(self):
        return rows_apart(self._run, self.axes, self._sites)

    def _once(self, fn, arrays):
        """What a function of model, sites and rows found for so many rows."""
        key = fn, self.axes.count(arrays)
        if key not in self._found:
            found = fn(self._run, self.axes, self._sites, arrays)
            forget(self._found, FEW)
            self._found[key] = found
        return self._found[key]


def _has_others(run, axes, gp_sites, arrays) -> bool:
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
    size = _batch_of(num_rows, batch_size)
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


def _batch_of(num_rows: int, batch_size: int) -> int:
    """Rows of a batch."""
    if num_rows > batch_size:
        return batch_size
    if num_rows <= AS_THEY_ARE:
        return num_rows
    return min(1 << (num_rows - 1).bit_length(), batch_size)


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
    if not AS_THEY_ARE < num_rows < batch_size:
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

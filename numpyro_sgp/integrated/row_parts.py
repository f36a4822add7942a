"""What sums over rows of the data, a block of rows at a time where they are many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import join_static, shared, split_static
from numpyro_sgp.fitting.problem import data_plates, rows_of_sites
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.groups import candidates, generic, limit, others
from numpyro_sgp.integrated.placing import check_size
from numpyro_sgp.integrated.predictors import Terms
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.given_rows import GivenRows

#: Bytes of the maps of all rows, and what is made of them, above which rows are in blocks.
LARGEST = 2**30
_BLOCK = 2**27  # bytes of that, of a block
# Numbers of a row and predictor beside its map, quadrature's for the most part; and where
# the likelihood has kinks.
_MORE, _MORE_OF_KINKS = 40, 800
_POINTS = 8  # looked at for slopes


class RowParts:
    """
    The rows of a model's data: all at once, or a block after the other where they would
    take more than a GiB and each observation is in a plate of the length of the data, with
    one row of each GP site (as for minibatches).

    The model runs with the rows of a block as its data, which the plate takes for a batch:
    its observations count N / B times, which is divided out.

    :param field: the model.
    :param args: its arguments, with the data.
    :param kwargs: its keyword arguments.
    :param whole: whether rows are to meet a dense covariance, whether or not groups are
        apart.
    """

    def __init__(self, field: Field, args: tuple, kwargs: dict, whole: bool = False):
        self.field = field
        arrays, self._static = split_static((args, kwargs))
        #: Arrays among the arguments.
        self.arrays: list[Array] = [jnp.asarray(a) for a in arrays]
        #: Rows of a block; None where all are taken at once.
        self.size: int | None = None
        layouts = [layout for layout in field.candidates if not layout.apart]
        if not layouts:  # responses have rows of their own, which no block is of
            return
        number = min(layout.number for layout in layouts)
        size = field.size if whole else field.row_size
        more = _MORE_OF_KINKS if field.kinked else _MORE
        each = np.dtype(field.dtype).itemsize * number * (2 * size + more)
        rows = max(layout.num_rows for layout in layouts)
        if rows * each <= LARGEST:
            return
        guide = field.guide
        self.num_rows = N = rows_of_sites(guide, args, kwargs)
        self._plates, self._axes = data_plates(guide, self.arrays, self._static, N)
        if self._plates:
            self.size = int(np.clip(_BLOCK // each, 1, self.num_rows - 1))
            self.size = self.size if self._runs_on_blocks() else None

    def _runs_on_blocks(self) -> bool:
        """Not where the model's code has the number of rows in it."""

        def run():
            args, kwargs = self.first()
            at_mean = messages.at_prior_mean
            trace = messages.trace_of(self.field.model, args, kwargs, at_site=at_mean)
            for site in trace.values():
                if site["type"] == "sample" and site["is_observed"]:
                    messages.log_prob(site)
            return ()

        try:
            with GivenRows(self.size or 0, self.num_rows, self._plates):
                jax.eval_shape(run)
        except Exception:  # of the model's code, which may raise anything
            return False
        return True

    def first(self) -> tuple[tuple, dict]:
        """The model's arguments with the first block's rows."""
        index = np.arange(self.size or 0)
        return join_static(self._rows(self.arrays, index), self._static)

    def _rows(self, arrays, index):
        return arrays if self._axes is None else self._axes.take(arrays, index)

    def terms(self, free, points: dict, arrays: list) -> Terms:
        """:meth:`Field.terms` of all rows at once."""
        return self.field.terms(free, points, *join_static(arrays, self._static))

    def total(self, part: Callable[[Terms], Any], free, points: dict, arrays: list) -> Any:
        """
        The sum over blocks of something that is linear in the log likelihood.

        :param part: from the terms of some rows to a tree of arrays; what does not depend
            on rows, such as the prior, is counted once.
        :param arrays: in the place of :attr:`arrays`.
        """
        if self.size is None:
            return part(self.terms(free, points, arrays))
        N, B = self.num_rows, self.size
        count = N // B

        @jax.checkpoint
        def of_rows(index):
            with GivenRows(len(index), N, self._plates):
                found = part(self.terms(free, points, self._rows(arrays, index)))
            return jax.tree.map(lambda leaf: leaf * (len(index) / N), found)

        def add(total, index):
            return jax.tree.map(jnp.add, total, of_rows(index)), None

        rest = jnp.arange(count * B, N)
        index = jnp.arange(count * B).reshape(count, B)
        shapes = jax.eval_shape(of_rows, index[0])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, index)
        return jax.tree.map(jnp.add, total, of_rows(rest)) if len(rest) else total


def choose_layout(
    field: Field, free: Array, args: tuple, kwargs: dict, grouped: bool = False
) -> None:
    """
    :meth:`Field.choose_layout`, by the first block where rows are in blocks.

    :param grouped: whether to look for effects of groups that are independent given the
        rest, :attr:`Field.groups`.
    :raises ValueError: for too large a field.
    """
    if grouped:
        find_groups(field, free, args, kwargs)
    check_size(field)
    first = field.layout
    _choose_layout(field, free, args, kwargs)
    if grouped and field.layout.number != first.number:
        find_groups(field, free, args, kwargs)
        check_size(field)


def _choose_layout(field, free, args, kwargs):
    rows = RowParts(field, args, kwargs)
    if rows.size is None:
        field.choose_layout(free, args, kwargs)
        check_slopes(field, free, args, kwargs)
        return
    shapes = field.candidates[0].shapes
    few = rows.first()
    with GivenRows(rows.size, rows.size):
        field.look(*few)
        field.choose_layout(free, *few)
        check_slopes(field, free, *few)
    field.layout = field.layout.of_shapes(shapes)
    field.candidates = [field.layout]


def check_slopes(field: Field, free: Array, args: tuple, kwargs: dict) -> None:
    """
    :param free: unconstrained hyperparameters, ``(p,)``.
    :raises ValueError: where the log likelihood of a site has no slope at random values of
        its predictors, but differs between them: it is flat but for jumps.
    """
    arrays, static = split_static((args, kwargs))

    def look(free, points, arrays, drawn):
        terms = field.terms(free, points, *join_static(arrays, static))
        scale = jnp.sqrt(terms.linear.prior_variance())

        def at(x):
            rows = terms.linear.base + scale * x
            slopes = jax.jacrev(terms.of_sites)(rows)
            return terms.of_sites(rows), {k: jnp.max(jnp.abs(v)) for k, v in slopes.items()}

        return jax.lax.map(at, drawn)

    shape = _POINTS, field.layout.number, field.layout.num_rows
    drawn = jnp.asarray(np.random.default_rng(0).normal(size=shape), field.dtype)
    found = shared(look, briefly=True)(free, field.points, arrays, drawn)
    values, slopes = jax.tree.map(np.asarray, found)
    for name, value in values.items():
        if np.any(slopes[name] != 0.0) or np.all(value == value[0]):
            continue
        raise ValueError(
            f"Observed site '{name}' has a log likelihood that is flat in f but for jumps "
            "(a threshold, the largest of several), and the steps to one Gaussian over all "
            "sites (sgp.nested, joint=True) are made of its slopes. Use sgp.fit without "
            "joint, for RobustMax as it is and for others with "
            "expectation=ScoreFunction(1000), or MCMC(EllipticalSlice(model))."
        )


def need_layout(field: Field, free: np.ndarray, args: tuple, kwargs: dict) -> None:
    """:func:`choose_layout`, if there is none yet, as of a file, which has no data."""
    if not field.candidates:
        field.look(args, kwargs)
        choose_layout(field, jnp.asarray(free, field.dtype), args, kwargs)


# ---- groups -------------------------------------------------------------------------


def find_groups(field: Field, free: Array, args: tuple, kwargs: dict) -> None:
    """
    Sets :attr:`Field.groups`: the effects of most groups of which each row has the numbers
    of one at most, as a random function of groups tells, and with them others of the same
    groups.

    :param free: unconstrained hyperparameters, ``(p,)``.
    """

    def holds(groups):
        field.groups = groups
        return rows_have_one_group(field, free, args, kwargs)

    field.groups = None
    shapes = {name: field.shapes[name] for name in field.effects}
    found = next(filter(holds, candidates(shapes)), None)
    if found is not None:
        for name, axis in others(found, shapes):
            if (name, axis) in others(found, shapes):  # still
                more = found.with_effect(name, axis, shapes[name])
                found = more if holds(more) else found
    field.groups = found


def rows_have_one_group(field: Field, free: Array, args: tuple, kwargs: dict) -> bool:
    """
    Whether each row has numbers of one of :attr:`Field.groups` at most.

    :param free: as for :func:`find_groups`.
    """
    rows = RowParts(field, args, kwargs)

    def away(free, points, arrays):
        def part(here):
            right = here.linear.away <= limit(field.dtype)
            return jnp.sum(1.0 - right.astype(field.dtype))

        return rows.total(part, free, points, arrays)

    free = generic(free, field.dtype)
    return float(shared(away, briefly=True)(free, field.points, rows.arrays)) == 0.0

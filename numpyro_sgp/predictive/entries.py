"""
Observations that are of one row of f each, where rows have several of them, or none: which
row that is, by slopes, and what there is for one a row for any number of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_PLACES = 4  # values of f where slopes are looked at, which may be flat at some
_ROUNDED = 0.1  # of a number of a row
_UNLIKE = 1e-3  # of weights of rows between 1 and 2
_NONE = -1  # the row of an entry that does not depend on a function


class NotOfARow(ValueError):
    """An entry is of several rows of a function, or slopes do not tell."""


class Entries(NamedTuple):
    """
    Rows of the entries of an observed site.

    :param rows: the row of each, ``(n,)``.
    :param turn: whether it is the first (0), second, ... of its row, ``(n,)``.
    """

    rows: Array | np.ndarray
    turn: Array | np.ndarray


def slopes_of_entries(
    log_prob: Callable[[dict], dict[str, Array]], f: dict[str, Array]
) -> dict[str, Array]:
    """
    Slopes of log densities along ones, row numbers and weights of each function's rows, at
    some values.

    :param log_prob: from values of GP sites by name, ``batch_shape + (N,)``, to log
        densities of any shape.
    :param f: values to look at.
    :return: for each log density of n numbers an array ``(F, 4, 3, n)``, of F functions.
    """
    rng = np.random.default_rng(0)
    places = [
        {
            k: v + place * jnp.asarray(rng.normal(size=v.shape), v.dtype)
            for k, v in f.items()
        }
        for place in range(_PLACES)
    ]

    def along(at, name, index, values):
        tangent = {k: jnp.zeros_like(v) for k, v in f.items()}
        tangent[name] = tangent[name].at[index].set(values)
        return jax.jvp(log_prob, (at,), (tangent,))[1]

    found = [
        [[along(at, k, index, row) for row in _along(v.shape[-1])] for at in places]
        for k, v in f.items()
        for index in np.ndindex(v.shape[:-1])
    ]
    flat = [jax.tree.map(jnp.ravel, x) for each in found for y in each for x in y]
    return {
        name: jnp.stack([x[name] for x in flat]).reshape(len(found), _PLACES, 3, -1)
        for name in flat[0]
    }


def _along(number):
    """What slopes of a function with so many rows are taken along."""
    weights = np.random.default_rng(1).uniform(1.0, 2.0, number)
    return np.ones(number), np.arange(number) / number, weights


def entries_of(
    slopes: np.ndarray, counts: list[int], left_out: np.ndarray
) -> Entries | None:
    """
    What slopes tell of rows: those of one row are in the proportions of what they are
    along.

    :param slopes: of one log density, as :func:`slopes_of_entries` has them.
    :param counts: rows of each function.
    :param left_out: which entries a mask leaves out, ``(n,)``; they may be of any row.
    :return: None where functions have unlike rows.
    :raises NotOfARow: if an entry is of several rows of a function.
    """
    slopes = np.asarray(slopes, float)
    each = [_rows(own, number) for own, number in zip(slopes, counts, strict=True)]
    rows = np.max(each, axis=0)
    if np.any((rows == _NONE) & ~left_out):
        raise NotOfARow  # flat wherever it was looked at
    same = all(np.all((own == rows) | (own == _NONE)) for own in each)
    if not same or len(set(counts)) > 1:
        return None
    rows = np.maximum(rows, 0)
    order = np.argsort(rows, kind="stable")
    ordered, turn = rows[order], np.empty(len(rows), int)
    turn[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return Entries(rows, turn)


def _rows(slopes, number):
    """Of one function, ``(4, 3, n)``."""
    weights = _along(number)[2]
    found = np.full(slopes.shape[-1], _NONE)
    for plain, numbered, weighted in slopes:
        with np.errstate(all="ignore"):  # where it is flat
            row, weight = number * numbered / plain, weighted / plain
        known = np.isfinite(row) & (plain != 0.0)
        nearest = np.clip(np.round(np.where(known, row, 0.0)), 0, number - 1).astype(int)
        off = np.abs(row - nearest) > _ROUNDED
        off |= np.abs(weight - weights[nearest]) > _UNLIKE
        if np.any(known & off):
            raise NotOfARow
        found = np.where(known, nearest, found)
    return found


def by_entry(
    of_rows: Callable[[Callable[[Array], Array]], Array],
    entries: Entries,
    turns: int,
    number: int,
) -> Array:
    """
    What there is for one entry a row, for several: for those that are first of their row,
    those that are second, and so on.

    :param of_rows: what is computed by row, ``(number,)``, of log densities
        ``(n,) -> (number,)``, zero where a row has none.
    :param turns: how many entries a row has at most.
    :return: shape ``(n,)``.
    """

    def of_turn(which):
        def spread(values):
            own = jnp.where(entries.turn == which, values.reshape(-1), 0.0)
            return jnp.zeros(number, own.dtype).at[entries.rows].add(own)

        return of_rows(spread)

    return jax.lax.map(of_turn, jnp.arange(turns))[entries.turn, entries.rows]

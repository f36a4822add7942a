"""
Observations that are of one row of f each, where rows have several of them, or none: which
row that is, and what there is for one a row for any number of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

#: Standard deviations from the mean, where rows are moved: entries may be flat at most, as
#: what is clipped.
PLACES = tuple(np.linspace(-3.0, 3.0, 13).tolist())
_NONE = -1  # the row of an entry that does not depend on a function


class NotOfARow(ValueError):
    """An entry is of several rows of a function, or flat wherever it was looked at."""


class Entries(NamedTuple):
    """
    Rows of the entries of an observed site.

    :param rows: the row of each, ``(n,)``.
    :param turn: whether it is the first (0), second, ... of its row, ``(n,)``.
    """

    rows: Array | np.ndarray
    turn: Array | np.ndarray

    @property
    def turns(self) -> int:
        """How many a row has at most, or some more: programs are of a power of two."""
        most = int(np.max(self.turn, initial=0)) + 1
        return 1 << (most - 1).bit_length()


def halves(number: int) -> np.ndarray:
    """Rows whose number has a bit, or not, for each bit: ``(2, bits, number)``."""
    bits = np.arange(max(number - 1, 1).bit_length())
    has = (np.arange(number) >> bits[:, None]) & 1 == 1
    return np.stack([has, ~has])


def changed(
    log_prob: Callable[[dict], dict], f: dict, sds: dict, moving: dict, places=PLACES
) -> dict:
    """
    Whether entries of log densities change where half of the rows of sites are moved.

    :param log_prob: from values of GP sites to log densities by name.
    :param f: where rows are moved from, ``batch_shape + (N,)``.
    :param sds: standard deviations of f, what rows are moved by.
    :param moving: by site which functions are moved together, of ``batch_shape + (1,)``; of
        sites with as many rows.
    :param places: where they are moved, in standard deviations.
    :return: shape ``(places, 2, bits, *shape)`` of each log density.
    """
    half = halves(f[next(iter(moving))].shape[-1])
    rng = np.random.default_rng(0)
    steps = {k: rng.uniform(0.1, 0.4, v.shape).astype(v.dtype) for k, v in f.items()}

    def of_place(away):
        at = {k: v + away.astype(v.dtype) * sds[k] for k, v in f.items()}
        here = log_prob(at)

        def of_half(rows):
            moved = dict(at)
            for name, functions in moving.items():
                moved[name] += jnp.where(functions & rows, sds[name] * steps[name], 0.0)
            return jax.tree.map(_differ, here, log_prob(moved))

        return jax.lax.map(lambda rows: jax.lax.map(of_half, rows), half)

    return jax.lax.map(of_place, jnp.asarray(places))


def _differ(a, b):
    return ~((a == b) | (jnp.isnan(a) & jnp.isnan(b)))


def of_functions(log_prob: Callable[[dict], dict], f: dict, sds: dict) -> dict:
    """
    :func:`changed` where each function is moved alone.

    :return: by log density a list of arrays ``(functions, 13, 2, bits, n)``, one a site.
    """
    found = []
    for name, value in f.items():
        functions = np.eye(int(np.prod(value.shape[:-1])), dtype=bool)

        def alone(which, name=name, batch=value.shape[:-1]):
            return changed(log_prob, f, sds, {name: which.reshape(*batch, 1)})

        found.append(jax.lax.map(alone, functions))
    return {k: [v[k].reshape(*v[k].shape[:4], -1) for v in found] for k in found[0]}


def are_in_an_order(changes: list) -> bool:
    """
    Whether there is one entry for each row of each function, in some order.

    :param changes: see :func:`entries_of`.
    :raises NotOfARow: as that.
    """
    each = [_rows(own) for site in changes for own in np.asarray(site)]
    counted = [rows[rows != _NONE] for rows in each]
    return all(len(np.unique(rows)) == len(rows) for rows in counted)


def entries_of(changes: list, counts: list[int], left_out: np.ndarray) -> Entries | None:
    """
    Rows of entries, by which halves of the rows they change with.

    :param changes: of each site, see :func:`of_functions`.
    :param counts: rows of each site.
    :param left_out: which entries have no density that rows could change, ``(n,)``: what a
        mask leaves out.
    :return: None where functions have unlike rows.
    :raises NotOfARow: if an entry is of several rows of a function, or of none.
    """
    each = [_rows(own) for site in changes for own in np.asarray(site)]
    rows = np.max(each, axis=0)
    if np.any((rows == _NONE) & ~left_out):
        raise NotOfARow
    same = all(np.all((own == rows) | (own == _NONE)) for own in each)
    if not same or len(set(counts)) > 1:
        return None
    counted = rows != _NONE
    turn, kept = np.zeros(len(rows), int), rows[counted]
    order = np.argsort(kept, kind="stable")
    ordered, own = kept[order], np.empty(len(kept), int)
    own[order] = np.arange(len(kept)) - np.searchsorted(ordered, ordered)
    turn[counted] = own
    return Entries(np.maximum(rows, 0), turn)


def _rows(changes):
    """Of one function, ``(13, 2, bits, n)``."""
    found = np.full(changes.shape[-1], _NONE)
    for has, has_not in changes:
        one = np.all(has ^ has_not, axis=0)  # of one row: in one half for each bit
        if np.any(~one & (has | has_not).any(axis=0)):
            raise NotOfARow
        number = np.sum(has << np.arange(len(has))[:, None], axis=0)
        if np.any(one & (found != _NONE) & (found != number)):
            raise NotOfARow
        found = np.where(one, number, found)
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

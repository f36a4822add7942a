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

#: Standard deviations from the mean, where rows are moved, and by how much: entries may be
#: flat at most places, as what is clipped.
PLACES, STEP = tuple(np.linspace(-3.0, 3.0, 13).tolist()), 0.25
_ULPS = 8  # of a log density, by which it may be rounded otherwise
_MOST_TURNS = 256  # entries of a row, with nodes of their own
_NONE, _SEVERAL = -1, -2  # rows of an entry that changes with none, or with several


class NotOfARow(ValueError):
    """An entry is of several rows of a function."""


class Entries(NamedTuple):
    """
    Where the entries of an observed site are.

    :param which: for each turn the entry of each row, n of them for none, ``(turns, N)``.
    :param loose: not None where there are others, that do not change with rows as far as
        was looked.
    """

    which: Array | np.ndarray
    loose: Array | np.ndarray | None


def num_bits(number: int) -> int:
    """Bits of the numbers of so many rows, one at least."""
    return max(number - 1, 1).bit_length()


def halves(number: int) -> Array:
    """Rows whose number has a bit, and those that do not, ``(2, bits, number)``."""
    has = (jnp.arange(number) >> jnp.arange(num_bits(number))[:, None]) & 1 == 1
    return jnp.stack([has, ~has])


def changed(
    log_prob: Callable[[dict], dict],
    f: dict,
    scales: dict,
    moving: dict,
    places: tuple[float, ...] = PLACES,
    step: float = STEP,
) -> dict:
    """
    Whether entries of log densities change where half of the rows of sites are moved.

    :param log_prob: from values of GP sites to log densities by name.
    :param f: where rows are moved from, ``batch_shape + (N,)``.
    :param scales: of f, in units of which they are.
    :param moving: by site which functions are moved together, of ``batch_shape + (1,)``; of
        sites with as many rows.
    :param places: from where, in these units.
    :param step: by about how much.
    :return: shape ``(places, 2, bits, *shape)`` of each log density.
    """
    number = f[next(iter(moving))].shape[-1]
    index, bits = jnp.arange(number), num_bits(number)

    def of_place(away):
        at = {k: v + away.astype(v.dtype) * scales[k] for k, v in f.items()}

        def of_half(half):
            # Nothing is moved in the same program too, which others would round otherwise.
            has = (index >> ((half - 1) % bits)) & 1 == 1
            rows = jnp.where(half > bits, ~has, has) & (half > 0)
            moved = dict(at)
            for name, functions in moving.items():
                sizes = step * (1.0 + 0.5 * jnp.cos(12.9898 * index))
                by = scales[name] * sizes.astype(at[name].dtype)
                moved[name] = at[name] + jnp.where(functions & rows, by, 0.0)
            return log_prob(moved)

        found = jax.lax.map(of_half, jnp.arange(2 * bits + 1))
        return jax.tree.map(
            lambda v: _differ(v[0], v[1:]).reshape(2, bits, *v.shape[1:]), found
        )

    return jax.lax.map(of_place, jnp.asarray(places))


def _differ(a, b):
    """
    Which of several arrays differ from another by more than its rounding, and than that of
    the largest change that an entry has among them: compiled loops round the first turn
    otherwise than later ones.

    :param b: with one axis more, the first.
    """
    is_same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    finite = jnp.isfinite(a) & jnp.isfinite(b)
    change = jnp.where(finite & ~is_same, jnp.abs(b - a), 0.0)
    eps = jnp.finfo(change.dtype).eps
    rounding = jnp.where(jnp.isfinite(a), _ULPS * eps * jnp.abs(a), 0.0)
    least = jnp.maximum(jnp.sqrt(eps) * jnp.max(change, axis=0), rounding)
    return ~is_same & (~finite | (change > least))


def of_functions(log_prob: Callable[[dict], dict], f: dict, scales: dict) -> dict:
    """
    Rows of a function that entries change with, where each function is moved alone.

    :return: by log density a list of arrays ``(functions, 13, n)``, one a site: the row, -1
        for none, -2 for several.
    """
    found = []
    for name, value in f.items():
        functions = np.eye(int(np.prod(value.shape[:-1])), dtype=bool)

        def alone(which, name=name, batch=value.shape[:-1]):
            seen = changed(log_prob, f, scales, {name: which.reshape(*batch, 1)})
            return jax.tree.map(_row, seen)

        found.append(jax.lax.map(alone, functions))
    return {k: [v[k] for v in found] for k in found[0]}


def _row(seen):
    """Of ``(13, 2, bits, *shape)``."""
    has, has_not = jnp.moveaxis(seen.reshape(*seen.shape[:3], -1), 1, 0)
    number = jnp.sum(has * (1 << jnp.arange(has.shape[1]))[:, None], axis=1)
    one = jnp.all(has ^ has_not, axis=1)  # in one half for each bit
    any_row = jnp.any(has | has_not, axis=1)
    return jnp.where(one, number, jnp.where(any_row, _SEVERAL, _NONE))


def rows_of_entries(changes: list, counts: list[int]) -> list[tuple[np.ndarray, int]]:
    """
    For each function the rows of entries, ``(n,)``, -1 of what does not change with it, and
    how many rows it has.

    :param changes: of each site, see :func:`of_functions`.
    :param counts: rows of each site.
    :raises NotOfARow: if an entry is of several rows of a function.
    """
    found = []
    for site, number in zip(changes, counts, strict=True):
        for places in np.asarray(site):
            rows = places.max(axis=0)
            if np.any((places != _NONE) & (places != rows) | (places == _SEVERAL)):
                raise NotOfARow
            found.append((rows, number))
    return found


def are_by_row(each: list[tuple[np.ndarray, int]], own: np.ndarray, number: int) -> bool:
    """
    Whether entries of one row of a table are of one row of each function, and of functions
    with as many rows those of other rows of others: rows in some order.

    :param each: see :func:`rows_of_entries`.
    :param own: rows of the entries in their table.
    :param number: how many it has.
    """
    for rows, count in each:
        seen = rows != _NONE
        pairs = np.unique(np.stack([own[seen], rows[seen]]), axis=1)
        if len(np.unique(pairs[0])) < pairs.shape[1]:
            return False
        if count == number and len(np.unique(pairs[1])) < pairs.shape[1]:
            return False
    return True


def entries_of(each: list[tuple[np.ndarray, int]], left_out: np.ndarray) -> Entries | None:
    """
    Where entries are; None where functions have unlike rows, or rows very many entries.

    :param each: see :func:`rows_of_entries`.
    :param left_out: which entries are not looked for, ``(n,)``: what a mask leaves out.
    """
    rows, number = np.max([own for own, _ in each], axis=0), each[0][1]
    same = all(np.all((own == rows) | (own == _NONE)) for own, _ in each)
    if not same or any(count != number for _, count in each):
        return None
    (places,) = np.nonzero(rows != _NONE)
    order = places[np.argsort(rows[places], kind="stable")]
    turn = np.arange(len(order)) - np.searchsorted(rows[order], rows[order])
    turns = 1 << int(np.max(turn, initial=0)).bit_length()  # programs serve again
    if turns > _MOST_TURNS:
        return None
    which = np.full((turns, number), len(rows))
    which[turn, rows[order]] = order
    loose = np.any((rows == _NONE) & ~left_out)
    return Entries(which, np.ones(1) if loose else None)


def by_entry(
    of_rows: Callable[[Callable[[Array], Array]], Array], which: Array, others: Array
) -> Array:
    """
    What there is for one entry a row, for several: for those that are first of their row,
    those that are second, and so on.

    :param of_rows: what is computed by row, ``(N,)``, of log densities ``(n,) -> (N,)``,
        zero where a row has none.
    :param which: see :class:`Entries`.
    :param others: of entries that are of no row, ``(n,)``.
    """

    def of_turn(own):
        return of_rows(lambda values: jnp.append(values.reshape(-1), 0.0)[own])

    return others.at[which].set(jax.lax.map(of_turn, which), mode="drop")

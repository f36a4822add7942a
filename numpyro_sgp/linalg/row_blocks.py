"""Rows of the data in blocks."""

import numpy as np
from jax.typing import ArrayLike
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import real


def neighbour_blocks(X: ArrayLike, size: int) -> np.ndarray:
    """
    Rows of X in blocks of neighbours, for a tight bound: the rows are halved along the
    widest column until there are no more than ``size`` in each part.

    :param X: inputs, shape ``(N, D)``.
    :param size: the most rows in a block.
    :return: row numbers, shape ``(num_blocks, rows)`` with ``rows <= size``; -1 where a
        block has fewer.
    :raises ValueError: if X is not a table, or ``size`` not between 1 and N.

    >>> import numpy as np
    >>> neighbour_blocks(np.array([[0.0], [5.0], [1.0], [4.0]]), 2)
    array([[0, 2],
           [3, 1]])
    """
    X = np.asarray(real(X, "X of neighbour_blocks"), float)
    if X.ndim != 2 or not X.shape[1]:
        raise ValueError(
            f"neighbour_blocks needs inputs X of shape (N, D), got {X.shape}."
            + (" Use X[:, None] for one input dimension." if X.ndim == 1 else "")
        )
    check_block_size(size, len(X))

    def split(rows):
        if len(rows) <= size:
            return [rows]
        widest = np.argmax(np.ptp(X[rows], axis=0))
        rows = rows[np.argsort(X[rows, widest], kind="stable")]
        # Whole blocks to the left, so that few are short.
        num_blocks = -(-len(rows) // size)
        middle = len(rows) * (num_blocks // 2) // num_blocks
        return split(rows[:middle]) + split(rows[middle:])

    return _padded(split(np.arange(len(X))))


def consecutive_blocks(num_rows: int, size: int) -> np.ndarray:
    """
    Rows in blocks of ``size`` in their order, the last one filled up with -1.

    :raises ValueError: if ``size`` is not between 1 and ``num_rows``.
    """
    check_block_size(size, num_rows)
    return _padded(np.split(np.arange(num_rows), np.arange(size, num_rows, size)))


def check_block_size(size: int, num_rows: int) -> None:
    """
    :raises ValueError: if ``size`` is not a whole number between 1 and ``num_rows``.
    """
    whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if not whole or not 1 <= size <= num_rows:
        raise ValueError(
            f"Blocks of {size!r} rows do not fit {num_rows} rows: give a whole number "
            f"between 1 and {num_rows}. (Blocks need not divide the rows evenly.)"
        )


def check_partition(blocks, num_rows: int) -> None:
    """
    :raises ValueError: if known blocks do not have each row once.
    """
    try:
        ndim = np.ndim(blocks)
    except ValueError:
        ndim = 0  # lists of different lengths
    if ndim != 2:
        raise ValueError(
            "The partition of a tight bound is an array of row numbers of shape "
            f"(num_blocks, rows), filled up with -1; got {type(blocks).__name__}."
        )
    if not not_jax_tracer(blocks):
        return
    rows = np.asarray(blocks).ravel()
    rows = np.sort(rows[rows != -1])
    if not np.array_equal(rows, np.arange(num_rows)):
        raise ValueError(
            f"A partition must have each of the row numbers 0 to {num_rows - 1} once (and "
            f"-1 where a block is short), but it has {rows.size} entries, "
            f"{np.unique(rows).size} different ones, from {rows.min(initial=0)} to "
            f"{rows.max(initial=0)}. See numpyro_sgp.neighbour_blocks(X, size)."
        )


def _padded(blocks):
    longest = max(map(len, blocks))
    return np.stack([np.pad(b, (0, longest - len(b)), constant_values=-1) for b in blocks])

"""Reading of tables from a folder that the user names, and what is done to them."""

import gzip
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Warp(NamedTuple):
    """
    Parameters of a warp, in the order of `numpyro_sgp.likelihoods.TanhWarp`: use
    ``TanhWarp(*data.warp)`` and ``WarpedNormal(f, sigma, *data.warp)``.
    """

    a: np.ndarray
    """Heights, shape ``(I,)``; their exponentials were taken."""

    b: np.ndarray
    """Steepness, shape ``(I,)``; their exponentials were taken."""

    c: np.ndarray
    """Minus the places, shape ``(I,)``."""


class RegressionSplit(NamedTuple):
    """
    A regression problem for a model, in float64; the way back to original units is
    ``y_offset + y_scale * y``.

    An error or a standard deviation in original units is ``y_scale`` times that of y, and
    a negative log density in original units is that of y plus ``log(y_scale)`` (for
    several outputs at once, plus the sum of the logs).
    """

    X_train: np.ndarray
    """Training inputs, shape ``(N, D)``."""

    y_train: np.ndarray
    """Training targets, shape ``(N,)``, or ``(P, N)`` for P outputs."""

    X_test: np.ndarray
    """Test inputs, shape ``(N_test, D)``."""

    y_test: np.ndarray
    """Test targets, on the scale of ``y_train``."""

    y_offset: np.ndarray
    """What y = 0 is in original units, shape ``()``, or ``(P, 1)`` for P outputs."""

    y_scale: np.ndarray
    """Original units in one unit of y, shaped as ``y_offset``."""

    warp: Warp | None = None
    """The fixed warp of the published experiment, where it had one."""


class ClassificationSplit(NamedTuple):
    """A classification problem; inputs are floating, labels integers from 0."""

    X_train: np.ndarray
    """Training inputs, shape ``(N, D)``."""

    y_train: np.ndarray
    """Training labels, shape ``(N,)``."""

    X_test: np.ndarray
    """Test inputs, shape ``(N_test, D)``."""

    y_test: np.ndarray
    """Test labels, shape ``(N_test,)``."""


def locate(folder: str | Path, filename: str, source: str) -> Path:
    """
    Path of ``folder/filename``.

    :param source: where the file can be had and what is in it, for the message.
    :raises FileNotFoundError: if it is not there; names the file and ``source``.
    """
    path = Path(folder) / filename
    if not path.is_file():
        raise FileNotFoundError(
            f"No file {filename} in the folder {str(folder)!r} (looked for {path}). The "
            f"package does not ship it. Put it there: {source}"
        )
    return path


def read_table(
    path: Path, columns: Sequence[str] | None = None, without: Sequence[str] = ()
) -> np.ndarray:
    """
    Columns of a gzipped, comma-separated table with a header row.

    :param columns: names of the columns wanted; None for all that the table has.
    :param without: names of columns to leave out.
    :return: float64, shape ``(rows, columns)``.
    :raises ValueError: if a column is missing; names the file and the columns it has.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        names = lines.readline().strip().split(",")
        wanted = [x for x in (names if columns is None else columns) if x not in without]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ValueError(f"{path} lacks the columns {missing}; it has {names}.")
        places = [names.index(name) for name in wanted]
        return np.loadtxt(lines, delimiter=",", usecols=places, ndmin=2)


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """
    Arrays of an ``.npz`` file.

    :raises ValueError: if an array is missing; names the file and the arrays it has.
    """
    with np.load(path) as arrays:
        missing = [name for name in names if name not in arrays]
        if missing:
            raise ValueError(f"{path} lacks the arrays {missing}; it has {arrays.files}.")
        return [arrays[name] for name in names]


def read_split(path: Path, split: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Rows for training and for testing, 0-based, of one of the splits of a file.

    :raises ValueError: if there is no such split.
    """
    train, test = read_arrays(path, "train_idx", "test_idx")
    split = operator.index(split)
    if not 0 <= split < len(train):
        raise ValueError(f"split must be 0 to {len(train) - 1}, got {split} for {path}.")
    return train[split], test[split]


def random_split(
    num: int, test_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    A seeded permutation of ``num`` rows, cut into training and test rows.

    >>> train, test = random_split(10, 0.2, seed=0)
    >>> len(train), len(test), sorted([*train, *test]) == list(range(10))
    (8, 2, True)
    """
    num_test = round(num * test_fraction)
    if not 0 < num_test < num:
        raise ValueError(
            f"test_fraction must leave both parts of {num} rows non-empty, got "
            f"{test_fraction}."
        )
    rows = np.random.default_rng(seed).permutation(num)
    return rows[num_test:], rows[:num_test]


def standardise(
    train: np.ndarray, *others: np.ndarray, ddof: int = 0
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """
    Columns with mean 0 and standard deviation 1 over the training rows.

    :param train: rows that the statistics are of; a column that is constant there is
        centred only.
    :param others: rows to treat alike.
    :param ddof: 1 divides by N - 1 in the variance, 0 by N.
    :return: the arrays, then the means and the standard deviations divided by.

    >>> import numpy as np
    >>> parts, mean, scale = standardise(np.array([[1.0], [3.0]]), np.array([[4.0]]))
    >>> parts[0].tolist(), parts[1].tolist()
    ([[-1.0], [1.0]], [[2.0]])
    """
    mean, scale = train.mean(axis=0), train.std(axis=0, ddof=ddof)
    scale = np.where(scale > 0, scale, 1.0)
    return [(array - mean) / scale for array in (train, *others)], mean, scale

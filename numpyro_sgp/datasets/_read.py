"""Reading of the tables that ship with the package."""

from importlib.resources import files

import numpy as np


def read_columns(filename: str, *columns: str) -> list[np.ndarray]:
    """
    Numeric columns of ``data/filename``, a comma-separated table with a header row.

    :return: one float64 array for each name in ``columns``, in that order.
    """
    table = files(__package__).joinpath("data", filename).read_text(encoding="utf-8")
    header, *rows = table.splitlines()
    names = header.split(",")
    wanted = [names.index(column) for column in columns]
    values = np.loadtxt(rows, delimiter=",", usecols=wanted, ndmin=2)
    return list(values.T)

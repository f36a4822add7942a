"""What inputs are called."""

from collections.abc import Iterator

import jax
import numpy as np


def leaves(named: list) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of all arguments of a model that are arrays, frames' matrices too."""
    for argument, value in named:
        for leaf in jax.tree.leaves(value):
            if np.shape(leaf):
                yield argument, np.asarray(leaf)


def named_as(x: np.ndarray, site: str, named: list) -> str:
    """
    What a column of inputs is called, if it is one of an argument of the model.

    :param x: the column, shape ``(N,)``.
    :param site: the GP site that it is an input of.
    :param named: pairs of name and value of the model's arguments.
    """
    for argument, leaf in leaves(named):
        if leaf.dtype.kind not in "biuf" or len(leaf) != len(x) or leaf.ndim > 2:
            continue
        columns = leaf.reshape(len(leaf), -1).T
        for c, column in enumerate(columns):
            if np.allclose(column, x):
                return argument if len(columns) == 1 else f"{argument}[:, {c}]"
    return f"input of {site}"

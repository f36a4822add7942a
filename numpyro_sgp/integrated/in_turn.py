"""What is computed at each of many nodes, some of them by each call of one program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from numpyro_sgp._programs import shared
from numpyro_sgp.integrated.profile import Node

_TOGETHER = 32  # by one call
_MOST_NUMBERS = 1e7  # that are handed to one call


def q_of(node: Node, dtype: Any) -> tuple:
    """Unconstrained hyperparameters, and the mean and the factor of q(w)."""
    q = node.weighed
    return np.asarray(node.free, dtype), q.mean, q.factor


def in_turn(run: Callable, tasks: Iterable[Any], *more: Any) -> Iterator[Any]:
    """
    ``run(*task, *more)`` of each task, one after another.

    :param run: a function of trees of arrays.
    :param tasks: trees of arrays, of the same structure and shapes for the most part; of
        others there is a call for each.
    :param more: trees of arrays that are the same for all.
    :return: what some tasks in a row return, stacked, as NumPy arrays; then of the next.
    """

    def several(each, *more):
        return jax.lax.map(lambda task: run(*task, *more), each)

    program, tasks = shared(several), iter(tasks)
    some = list(itertools.islice(tasks, 1))
    numbers = sum(map(np.size, jax.tree.leaves(some)))
    most = int(np.clip(_MOST_NUMBERS / max(numbers, 1), 1, _TOGETHER))
    some += itertools.islice(tasks, most - 1)
    most = min(most, len(some))
    while some:
        alike = len(set(map(_kind, some))) == 1
        for part in [some] if alike else [[task] for task in some]:
            # Filled up, for one program.
            padded = part + part[-1:] * (most - len(part)) if alike else part
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *padded)
            yield _first(len(part), program(stacked, *more))
        some = list(itertools.islice(tasks, most))


def _kind(task):
    leaves, structure = jax.tree.flatten(task)
    return structure, tuple(map(np.shape, leaves))


def _first(number, found):
    return jax.tree.map(lambda leaves: np.asarray(leaves)[:number], found)

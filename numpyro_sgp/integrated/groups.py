"""Effects of groups, which are independent of each other given the rest of the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

#: Fewest numbers of groups that are set apart: for fewer dense products are as fast.
FEWEST = 64
_MOST_EACH = 8  # numbers of a group
_ROUNDED = 30.0  # eps of the largest weight that rounding may leave


@dataclass(frozen=True, eq=False)
class Groups:
    """
    Effects whose numbers fall into G groups, K in each, such that a row of the data has to
    do with one group at most.

    :param axes: of each effect the axis that is the groups'.
    :param shapes: of these effects.
    """

    axes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]

    @property
    def number(self) -> int:
        """G."""
        name, axis = next(iter(self.axes.items()))
        return self.shapes[name][axis]

    @property
    def each(self) -> int:
        """K, of all effects together."""
        return sum(math.prod(shape) for shape in self.shapes.values()) // self.number

    def parts(self, numbers: Array) -> dict[str, Array]:
        """
        Effects by name.

        :param numbers: of the groups, those of one after another, ``(G K,)``.
        """
        rows, found, end = numbers.reshape(self.number, self.each), {}, 0
        for name, axis in self.axes.items():
            shape = self.shapes[name]
            start, end = end, end + math.prod(shape) // self.number
            rest = (*shape[:axis], *shape[axis + 1 :])
            values = rows[:, start:end].reshape(self.number, *rest)
            found[name] = jnp.moveaxis(values, 0, axis)
        return found

    def with_effect(self, name: str, axis: int, shape: tuple[int, ...]) -> Groups:
        """These and a further effect of the same groups."""
        return Groups({**self.axes, name: axis}, {**self.shapes, name: shape})


def candidates(shapes: dict[str, tuple[int, ...]]) -> Iterator[Groups]:
    """
    Single effects of many groups, those of most first.

    :param shapes: of effects.
    """
    pairs = [(name, axis) for name, shape in shapes.items() for axis in range(len(shape))]
    for name, axis in sorted(pairs, key=lambda pair: -shapes[pair[0]][pair[1]]):
        found = Groups({name: axis}, {name: shapes[name]})
        if found.number * found.each >= FEWEST and found.each <= _MOST_EACH:
            yield found


def others(groups: Groups, shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """
    Further effects and axes that may be of the same groups.

    :param shapes: of effects.
    """
    most = _MOST_EACH - groups.each
    return [
        (name, axis)
        for name, shape in shapes.items()
        for axis in range(len(shape))
        if name not in groups.axes
        and shape[axis] == groups.number
        and math.prod(shape) <= most * groups.number
    ]


@dataclass(frozen=True, eq=False)
class Found:
    """
    Which group rows have to do with; as in :class:`Grouped`.

    :param index: shape ``(N,)``.
    :param weights: shape ``(K, J, N)``.
    :param away: shape ``(J, N)``.
    """

    index: Array
    weights: Array
    away: Array


def rows_of(groups: Groups, values: Callable[[Array], Array], dtype) -> Found:
    """
    Which group each row has to do with, told by what values there are for numbers of groups
    that say which they are, digit by digit in binary. Each of the K numbers of a group is
    looked at by itself: a row that multiplies one of them by thousands hides nothing of
    the others.

    :param values: the rows' values ``(J, N)``, linear in numbers of groups ``(G K,)``.
    """
    G, K = groups.number, groups.each
    bits = max((G - 1).bit_length(), 1)
    digits = (np.arange(G) >> np.arange(bits)[:, None]) & 1
    drawn = np.random.default_rng(0).normal(size=(2, G))
    asked = np.concatenate([np.ones((1, G)), digits, drawn])
    of_each = (asked[:, None, :, None] * np.eye(K)[:, None]).reshape(-1, G * K)
    found = jax.vmap(values)(jnp.asarray(of_each, dtype))
    found = found.reshape(len(asked), K, *found.shape[1:])
    weights, told, seen = found[0], found[1 : 1 + bits], found[1 + bits :]
    # Of the values in a row, that with the largest weight tells best.
    flat = weights.reshape(-1, weights.shape[-1])
    best = jnp.argmax(jnp.abs(flat), axis=0)[None]
    total = jnp.take_along_axis(flat, best, axis=0)[0]
    told = jnp.take_along_axis(told.reshape(bits, *flat.shape), best[None], axis=1)[:, 0]
    ones = told / jnp.where(total == 0, 1.0, total) > 0.5
    index = jnp.sum(ones * 2 ** jnp.arange(bits)[:, None], axis=0)
    index = jnp.clip(index, 0, G - 1)
    # With one group only, the row's values are those of its numbers.
    away = jnp.abs(seen - weights * jnp.asarray(drawn, dtype)[:, None, None, index])
    # Weights near zero may be what rounding leaves of larger ones.
    most = jnp.max(jnp.abs(weights), axis=(1, 2), keepdims=True)
    size = jnp.abs(seen) + jnp.abs(weights) + _ROUNDED * limit(dtype) * most
    away = away / jnp.where(size == 0, 1.0, size)
    return Found(index, weights, jnp.max(away, axis=(0, 1)))


def limit(dtype) -> float:
    """Of :attr:`Found.away`, for rows with one group."""
    return float(jnp.finfo(dtype).eps) ** 0.5


def generic(free: Array | np.ndarray, dtype) -> Array:
    """
    Hyperparameters near some, at which rows have to do with all groups that they may have
    to do with: not at numbers such as zero.

    :param free: unconstrained, ``(p,)``.
    """
    moved = np.random.default_rng(0).normal(size=np.shape(free))
    return jnp.asarray(free, dtype) + jnp.asarray(0.1 * moved, dtype)

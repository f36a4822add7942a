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
    r"""
    Which group each row has to do with, told by what values there are for numbers of groups
    that say which they are, digit by digit in binary.

    :param values: the rows' values ``(J, N)``, linear in numbers of groups ``(G K,)``.
    """
    G, K = groups.number, groups.each
    bits = max((G - 1).bit_length(), 1)
    rng = np.random.default_rng(0)
    mixed = rng.uniform(1.0, 2.0, K)
    digits = (np.arange(G) >> np.arange(bits)[:, None]) & 1
    single = np.broadcast_to(np.eye(K)[:, None], (K, G, K))
    drawn = rng.normal(size=(2, G, K))
    asked = np.concatenate([single, digits[..., None] * mixed, drawn])
    found = jax.vmap(values)(jnp.asarray(asked.reshape(-1, G * K), dtype))
    weights, told, seen = found[:K], found[K : K + bits], found[K + bits :]
    total = jnp.tensordot(jnp.asarray(mixed, dtype), weights, 1)
    # Of the values in a row, that with the largest weight tells best.
    best = jnp.argmax(jnp.abs(total), axis=0)[None]
    total = jnp.take_along_axis(total, best, axis=0)[0]
    told = jnp.take_along_axis(told, best[None], axis=1)[:, 0]
    ones = told / jnp.where(total == 0, 1.0, total) > 0.5
    index = jnp.sum(ones * 2 ** jnp.arange(bits)[:, None], axis=0)
    index = jnp.clip(index, 0, G - 1)
    numbers = jnp.asarray(drawn, dtype)
    # With one group only, the row's values are those of its numbers.
    each = jnp.einsum("kjn,snk->sjn", weights, numbers[:, index])
    size = jnp.abs(seen) + jnp.sum(jnp.abs(weights), axis=0)
    away = jnp.abs(seen - each) / jnp.where(size == 0, 1.0, size)
    return Found(index, weights, jnp.max(away, axis=0))


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

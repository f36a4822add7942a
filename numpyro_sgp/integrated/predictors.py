"""Linear predictors: how they are made of the field, and how rows share them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.linalg import matmul


@dataclass(frozen=True, eq=False)
class Layout:
    """
    How the numbers of the linear predictors share terms of the likelihood: row ``n`` has
    ``J`` of them, integrated together.

    :param shapes: of the predictors.
    :param axes: the axis of the rows in each; None where each number is a row of its own.
    :param num_rows: N.
    """

    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[int | None, ...]
    num_rows: int

    @property
    def number(self) -> int:
        """J, of all predictors together."""
        return sum(math.prod(shape) // self.num_rows for shape in self.shapes)

    def of_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> Layout:
        """The same for predictors of another number of rows, a minibatch's."""
        if shapes == self.shapes:
            return self
        shape, axis = shapes[0], self.axes[0]
        return Layout(shapes, self.axes, math.prod(shape) if axis is None else shape[axis])

    def joined(self, values: list[Array]) -> Array:
        """Predictors as an array of shape ``(J, N)``."""
        rows = []
        for value, axis in zip(values, self.axes, strict=True):
            value = value if axis is None else jnp.moveaxis(value, axis, -1)
            rows.append(value.reshape(-1, self.num_rows))
        return jnp.concatenate(rows)

    def split(self, rows: Array) -> list[Array]:
        """The inverse of :meth:`joined`."""
        values, end = [], 0
        for shape, axis in zip(self.shapes, self.axes, strict=True):
            start, end = end, end + math.prod(shape) // self.num_rows
            if axis is None:
                values.append(rows[start:end].reshape(shape))
            else:
                rest = (*shape[:axis], *shape[axis + 1 :], self.num_rows)
                values.append(jnp.moveaxis(rows[start:end].reshape(rest), -1, axis))
        return values


@dataclass(frozen=True, eq=False)
class Linear:
    r"""
    Values that are linear in the field, :math:`\eta = b_0 + B^\top w + r`, where w are the
    numbers of the field, :math:`w \sim N(0, I)` a priori, and r what inducing points leave
    open at a GP site.

    :param base: :math:`b_0`, shape ``(J, N)``.
    :param maps: :math:`B`, shape ``(m, J, N)``.
    :param left: standard deviations that each latent function leaves open, ``(F, J, N)``.
    """

    base: Array
    maps: Array
    left: Array

    def moments(self, mean: Array, factor: Array) -> tuple[Array, Array]:
        """
        Means ``(J, N)`` and covariances ``(J, J, N)`` where w has this mean and covariance.

        :param mean: shape ``(m,)``.
        :param factor: a square root of the covariance, ``(m, m)``.
        """
        m = len(mean)
        flat = self.maps.reshape(m, -1)
        V = matmul(factor.T, flat).reshape(self.maps.shape)
        covariance = jnp.einsum("krn,ksn->rsn", V, V)
        covariance += jnp.einsum("frn,fsn->rsn", self.left, self.left)
        return self.base + (mean @ flat).reshape(self.base.shape), covariance


jax.tree_util.register_dataclass(Linear, ["base", "maps", "left"], [])


def row_factors(covariance: Array) -> Array:
    """
    Lower factors of a covariance for each row, number by number: they are small and many,
    which a loop of LAPACK's calls is slow for, and variances of zero are allowed.

    :param covariance: shape ``(J, J, N)``.
    :return: shape ``(J, J, N)``.
    """
    number, zero = len(covariance), jnp.zeros_like(covariance[0, 0])
    eps, tiny = jnp.finfo(covariance.dtype).eps, jnp.finfo(covariance.dtype).tiny
    rows: list[list[Array]] = []
    for i in range(number):
        row: list[Array] = []
        for j in range(i):
            known = sum((a * b for a, b in zip(row, rows[j][:j], strict=True)), zero)
            row.append((covariance[i, j] - known) / rows[j][j])
        left = covariance[i, i] - sum((a**2 for a in row), zero)
        floor = jnp.maximum(10 * eps * covariance[i, i], tiny**0.5)
        rows.append([*row, jnp.sqrt(jnp.maximum(left, floor))])
    full = [row + [zero] * (number - len(row)) for row in rows]
    return jnp.stack([jnp.stack(row) for row in full])

"""Linear predictors: how they are made of the field, and how rows share them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp.integrated.precision import (
    Arrow,
    Dense,
    Factor,
    Precision,
    Square,
)
from numpyro_sgp.linalg import einsum, matmul


class NotByRow(ValueError):
    """Predictors, or what is observed, are not of the rows of GP sites."""


@dataclass(frozen=True, eq=False)
class Layout:
    """
    How the numbers of the linear predictors share terms of the likelihood: row ``n`` has
    ``J`` of them, integrated together.

    :param shapes: of the predictors.
    :param axes: the axis of the rows in each; None where each number is a row of its own.
    :param num_rows: N.
    :param apart: indices of the predictors that share rows, where others have rows of their
        own, one set after the other (responses of other rows); empty if all share them. A
        set of fewer than J is filled up by zeros.
    """

    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[int | None, ...]
    num_rows: int
    apart: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of_apart(shapes, apart: tuple[tuple[int, ...], ...]) -> Layout:
        """That of sets of predictors with rows of their own."""
        num_rows = sum(math.prod(shapes[some[0]]) for some in apart)
        return Layout(shapes, (None,) * len(shapes), num_rows, apart)

    @property
    def number(self) -> int:
        """J, of all predictors together."""
        if self.apart:
            return max(map(len, self.apart))
        return sum(math.prod(shape) // self.num_rows for shape in self.shapes)

    def of_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> Layout:
        """The same for predictors of another number of rows, a minibatch's."""
        if shapes == self.shapes:
            return self
        if self.apart:
            return Layout.of_apart(shapes, self.apart)
        shape, axis = shapes[0], self.axes[0]
        return Layout(shapes, self.axes, math.prod(shape) if axis is None else shape[axis])

    def joined(self, values: list[Array]) -> Array:
        """Predictors as an array of shape ``(J, N)``."""
        if self.apart:
            return jnp.concatenate([self._filled(values, some) for some in self.apart], 1)
        rows = []
        for value, axis in zip(values, self.axes, strict=True):
            value = value if axis is None else jnp.moveaxis(value, axis, -1)
            rows.append(value.reshape(-1, self.num_rows))
        return jnp.concatenate(rows)

    def split(self, rows: Array) -> list[Array]:
        """The inverse of :meth:`joined`."""
        if self.apart:
            ends = np.cumsum([math.prod(self.shapes[some[0]]) for some in self.apart])
            parts = zip(self.apart, jnp.split(rows, ends[:-1], axis=1), strict=True)
            found = {i: part[j] for some, part in parts for j, i in enumerate(some)}
            return [found[i].reshape(shape) for i, shape in enumerate(self.shapes)]
        values, end = [], 0
        for shape, axis in zip(self.shapes, self.axes, strict=True):
            start, end = end, end + math.prod(shape) // self.num_rows
            if axis is None:
                values.append(rows[start:end].reshape(shape))
            else:
                rest = (*shape[:axis], *shape[axis + 1 :], self.num_rows)
                values.append(jnp.moveaxis(rows[start:end].reshape(rest), -1, axis))
        return values

    def _filled(self, values, some):
        rows = jnp.stack([values[i].reshape(-1) for i in some])
        return jnp.pad(rows, ((0, self.number - len(some)), (0, 0)))


def layout_of_rows(
    shapes: tuple[tuple[int, ...], ...], num_rows: int, known: list[Layout], trained: int
) -> Layout:
    """
    The layout in which rows are those of the arguments, as GP sites have them. Where a
    predictor has several axes of that length, rows have the axis of the training.

    :param shapes: of the predictors.
    :param num_rows: of GP sites with these arguments.
    :param known: layouts of the training.
    :param trained: rows of GP sites in the training.
    :raises NotByRow: if a predictor has no such axis, or it is not known which it is.
    """
    before = [
        layout.axes
        for layout in known
        if layout.num_rows == trained and len(layout.shapes) == len(shapes)
        if not layout.apart
        if all(shape.count(trained) == 1 for shape in layout.shapes)
    ]
    axes: list[int | None] = []
    for i, shape in enumerate(shapes):
        fits: list[int | None] = [k for k, size in enumerate(shape) if size == num_rows]
        if len(fits) > 1 and num_rows > 1:
            fits = [each[i] for each in before if each[i] in fits]
        if not fits:
            raise NotByRow
        axes.append(fits[0])
    return Layout(shapes, tuple(axes), num_rows)


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

    def moments(self, mean: Array, factor: Factor) -> tuple[Array, Array]:
        """
        Means ``(J, N)`` and covariances ``(J, J, N)`` where w has this mean and covariance.

        :param mean: shape ``(m,)``.
        :param factor: a square root of the covariance.
        """
        flat = self.maps.reshape(len(self.maps), -1)
        V = factor.transposed(flat).reshape(self.maps.shape)
        covariance = einsum("krn,ksn->rsn", V, V) + self.left_open()
        return self.at(mean), covariance

    def left_open(self) -> Array:
        """Covariances of what inducing points leave open, ``(J, J, N)``."""
        return einsum("frn,fsn->rsn", self.left, self.left)

    def prior_variance(self) -> Array:
        """Variances a priori, ``(J, N)``."""
        return jnp.sum(self.maps**2, axis=0) + jnp.sum(self.left**2, axis=0)

    def at(self, w: Array) -> Array:
        """The values ``(J, N)`` without what is left open, at numbers ``(m,)``."""
        flat = self.maps.reshape(len(self.maps), -1)
        return self.base + matmul(w, flat).reshape(self.base.shape)

    def slope(self, g: Array) -> Array:
        """:math:`B g`, shape ``(m,)``, of slopes ``(J, N)``."""
        return matmul(self.maps.reshape(len(self.maps), -1), g.reshape(-1))

    def curvature(self, curvature: Array) -> Precision:
        r"""
        What rows add to the precision of the field, :math:`B \Lambda B^\top`.

        :param curvature: :math:`\Lambda`, symmetric, shape ``(J, J, N)``.
        """
        return Dense(self._product(self._weighted(curvature)))

    def _weighted(self, curvature):
        return einsum("krn,rsn->ksn", self.maps, curvature)

    def _product(self, weighted):
        flat = self.maps.reshape(len(self.maps), -1)
        return matmul(weighted.reshape(flat.shape), flat.T)


@dataclass(frozen=True, eq=False)
class Grouped(Linear):
    """
    The same where the last numbers of the field are those of G groups, K of each, and the
    values of a row have to do with one group at most.

    :param maps: those of the rest of the field, shape ``(R, J, N)``.
    :param index: the group of each row, shape ``(N,)``.
    :param weights: what its numbers count there, shape ``(K, J, N)``.
    :param number: G.
    :param away: how far a row is from having one group only: about zero, or one or more.
    """

    index: Array
    weights: Array
    number: int
    away: Array

    def moments(self, mean: Array, factor: Factor) -> tuple[Array, Array]:
        if isinstance(factor, Square):
            return self.at(mean), self._of_square(factor.matrix) + self.left_open()
        moved = einsum("kjn,nkr->rjn", self.weights, factor.moved[self.index])
        maps = self.maps + moved
        V = matmul(factor.rest.T, maps.reshape(len(maps), -1)).reshape(maps.shape)
        own = einsum("nkl,kjn->ljn", factor.own[self.index], self.weights)
        covariance = einsum("krn,ksn->rsn", V, V)
        covariance += einsum("krn,ksn->rsn", own, own) + self.left_open()
        return self.at(mean), covariance

    def _of_square(self, matrix):
        """Covariances ``(J, J, N)``, of a square root of the covariance of all numbers."""
        size = len(self.maps)
        groups = matrix[size:].reshape(self.number, -1, len(matrix))[self.index]
        V = matmul(matrix[:size].T, self.maps.reshape(size, -1))
        V = V.reshape(-1, *self.base.shape)
        V += einsum("kjn,nkm->mjn", self.weights, groups)
        return einsum("krn,ksn->rsn", V, V)

    def prior_variance(self) -> Array:
        return super().prior_variance() + jnp.sum(self.weights**2, axis=0)

    def at(self, w: Array) -> Array:
        groups = w[len(self.maps) :].reshape(self.number, -1)
        own = einsum("kjn,nk->jn", self.weights, groups[self.index])
        return super().at(w[: len(self.maps)]) + own

    def slope(self, g: Array) -> Array:
        own = self._by_group(einsum("kjn,jn->nk", self.weights, g))
        return jnp.concatenate([super().slope(g), own.reshape(-1)])

    def curvature(self, curvature: Array) -> Precision:
        weighted = self._weighted(curvature)
        across = einsum("kjn,rjn->nkr", self.weights, weighted)
        own = einsum("kin,ijn,ljn->nkl", self.weights, curvature, self.weights)
        return Arrow(self._product(weighted), self._by_group(across), self._by_group(own))

    def _by_group(self, values):
        """Sums over the rows of each group."""
        return jax.ops.segment_sum(values, self.index, self.number)


_PARTS = ["base", "maps", "left"]
jax.tree_util.register_dataclass(Linear, _PARTS, [])
_PARTS = [*_PARTS, "index", "weights", "away"]
jax.tree_util.register_dataclass(Grouped, _PARTS, ["number"])


@dataclass(frozen=True, eq=False)
class Terms:
    """
    Parts of the bound at some hyperparameters.

    :param log_prior: of the unconstrained hyperparameters.
    :param linear: the predictors of the likelihood.
    :param each: from predictors ``(J, N)`` to log likelihoods of each observed site, in its
        shape.
    """

    log_prior: Array
    linear: Linear
    each: Any

    def of_sites(self, rows: Array) -> dict[str, Array]:
        """The log likelihood of each observed site at predictors ``(J, N)``."""
        return {name: jnp.sum(v) for name, v in self.each(rows).items()}

    def log_likelihood(self, rows: Array) -> Array:
        """The log likelihood at predictors ``(J, N)``."""
        return sum(self.of_sites(rows).values(), jnp.zeros((), rows.dtype))


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

"""Inner products and distances between points, with the digits that kernels need."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType
from jax.typing import ArrayLike

from numpyro_sgp.linalg import matmul

__all__ = ["inner_products", "safe_sqrt", "squared_distances"]


def inner_products(X1: Array, X2: Array) -> Array:
    """``x · y`` for all pairs, shape ``(*b, N1, N2)``, in full precision."""
    # As an array of its own, since a product that contracts the first axes of both factors
    # (the derivative with respect to X2, if XLA folds the transpose into the product) takes
    # ten times as long where one has few columns.
    columns = jax.lax.optimization_barrier(jnp.swapaxes(X2, -1, -2))
    return matmul(X1, columns)


# Up to so many columns, differences cost about as much as a matrix product; and columns in
# one pass over the differences of more.
_COLUMNS = 16
# A squared distance from a matrix product has an error of a few units in the last place of
# the squared norms: below this share of them, it has lost a digit.
_NEAR = 0.1
# Where these are no more, in squared lengthscales, that is no more than what smooth kernels
# are rounded by, and no pair is too near.
_SMALL = 4.0
# Share of the pairs up to which those that are near are differenced by themselves, so many
# at a time, and columns from which finding them takes no more time than differencing all,
# or a third of it without XLA's fusion emitters: a step of ``fit`` with 600 points beside
# 1024 of 784 columns took .19 s, and takes .05.
_FEW, _AT_ONCE, _LONG = 1 / 64, 256, 256
_MANY = 2**31  # pairs, which are counted in 32 bits
# Of matrix products, the derivative by a lengthscale has an error of some units in the last
# place of the squared norms, in squared lengthscales: where these are large, more than
# kernels are rounded by; and more than all of it below the second share of them.
_FAR = 256.0
_NEARER = 0.01
# About as many rows have the median from which all are then counted.
_CENTRE_ROWS = 100


def squared_distances(
    X1: Array, X2: Array | None = None, lengthscale: ArrayLike = 1.0, steep: bool = False
) -> Array:
    r"""
    Scaled squared distances :math:`\sum_d (x_d - x'_d)^2 / \ell_d^2` between all pairs of
    points, right to a few units in their last place, also where points (nearly) coincide
    and are far from the origin: the square root of a distance of matrix products, as
    Matérn kernels take it, keeps half of the digits at most.

    Up to 16 columns are differenced. More columns go through

    .. math::

        \|x - y\|^2 = \|x\|^2 + \|y\|^2 - 2\, x \cdot y

    for centred points. Where pairs are so near that this has lost a digit (that kernels
    could see), all are differenced, which takes some times as long; of 256 columns and
    more, and points without a batch, they alone unless they are many. Lengthscales of a
    batch of kernels scale the distances in the end: these are computed once for all.
    Derivatives by points are those of this
    formula, whose cost is that of matrix products; those by lengthscales are of
    differences too where points are near beside the norms, but for one lengthscale for each
    of more than 16 columns. :math:`O(N_1 N_2 D)` time and
    :math:`O(N_1 N_2)` memory: no array of shape ``(N1, N2, D)`` is formed.

    :param X1: points, shape ``(*b1, N1, D)``.
    :param X2: points, shape ``(*b2, N2, D)``; None means the points ``X1`` themselves.
    :param lengthscale: broadcastable to ``(*batch, 1, D)``.
    :param steep: whether slopes of what is made of it grow without bound near zero, as
        those of its root do: then distances, and derivatives by lengthscales, are of
        differences wherever points are near.
    :return: shape ``(*broadcast(b1, b2, batch), N1, N2)``.
    """
    same = X2 is None
    X2 = X1 if same else X2
    dtype = jnp.result_type(X1, X2, lengthscale)
    X1, X2, lengthscale = (jnp.asarray(value, dtype) for value in (X1, X2, lengthscale))
    if X1.shape[-1] == 1:
        return ((X1 - jnp.swapaxes(X2, -1, -2)) / lengthscale) ** 2
    inverse = jnp.atleast_2d(1.0 / lengthscale)
    points = np.broadcast_shapes(X1.shape[:-2], X2.shape[:-2])
    if inverse.shape[-1] > 1 or np.broadcast_shapes(points, inverse.shape[:-2]) == points:
        return _compiled(same, steep, X1, X2, inverse)
    # Kernels of a batch with a lengthscale each: once for all, in units of the shortest.
    most = jax.lax.stop_gradient(jnp.max(inverse))
    most = jnp.where(most > 0.0, most, 1.0)  # all may be without end
    # One that is next to nothing must not make the others infinite.
    most = jnp.minimum(most, jnp.finfo(dtype).max ** 0.25)
    ratio = inverse / most
    return _compiled(same, steep, X1, X2, most.reshape(1, 1)) * ratio * ratio


# Of its own branches JAX would compile each anew in every call that is not compiled itself.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _compiled(same, steep, X1, X2, inverse):
    return _squared_distances(same, steep, X1, X2, inverse)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _squared_distances(same, steep, X1, X2, inverse):
    if X1.shape[-1] <= _COLUMNS or 0 in (X1.shape[-2], X2.shape[-2]):
        return _by_differences(X1, X2, inverse)
    r2, norms = _by_products(X1, X2, inverse)
    near = r2 < _NEAR * norms
    if not steep:
        r2, near = jnp.maximum(r2, 0.0), near & (norms > _SMALL)
    if same:
        itself = jnp.eye(X1.shape[-2], dtype=bool)
        r2, near = jnp.where(itself, 0.0, r2), near & ~itself
    types = jax.sharding.get_abstract_mesh().axis_types
    long = X1.shape[-1] >= _LONG and near.ndim == 2 and AxisType.Explicit not in types
    few = long and 1 / _FEW <= near.size < _MANY
    return (_with_some_differences if few else _with_differences)(r2, near, X1, X2, inverse)


@_squared_distances.defjvp
def _squared_distances_jvp(same, steep, primals, tangents):
    X1, X2, inverse = primals
    r2 = _squared_distances(same, steep, *primals)

    by_points = jax.jvp(
        lambda X1, X2: _by_products(X1, X2, inverse)[0], (X1, X2), tangents[:2]
    )[1]
    if inverse.shape[-1] == 1:
        # Of an infinite lengthscale all distances are zero.
        nonzero = jnp.where(inverse == 0.0, 1.0, inverse)
        return r2, by_points + 2.0 * r2 * (tangents[2] / nonzero)

    left, right = _centre(X1, X2)
    change = 2.0 * inverse * tangents[2]
    if X1.shape[-1] > _COLUMNS:
        return r2, by_points + _slopes_of_products(left, right, change)
    # First by the points alone: of all pairs it takes as long as the derivative.
    sides = _norms(left * inverse), _norms(right * inverse)
    least = 0.0 if steep else _FAR

    def any_near():
        norms = _of_pairs(*sides)
        # Where points are the same, no slope is steep.
        near = (norms > least) & (r2 < _NEARER * norms) & (r2 > 0.0 if steep else True)
        return jnp.any(near)

    far = sum(jnp.max(side, initial=0.0) for side in sides) > least
    near = jax.lax.cond(far, any_near, lambda: jnp.array(False))
    # Linear in the change: the rest is computed again, or the one that is not taken would
    # be filled with zeros.
    by_scale = jax.lax.cond(
        near,
        jax.checkpoint(partial(_slopes_of_differences, X1, X2)),
        jax.checkpoint(partial(_slopes_of_products, left, right)),
        change,
    )
    return r2, by_points + by_scale


def _by_differences(X1, X2, inverse):
    D = X1.shape[-1]
    inverse = jnp.broadcast_to(inverse, (*inverse.shape[:-1], D))
    # Rows of their own, which are read one after the other, in half of the time: XLA drops
    # a barrier on a CPU and then reads columns, but keeps what a product gives.
    X2 = matmul(jnp.eye(D, dtype=X2.dtype), jnp.swapaxes(X2, -1, -2))

    def add(r2, X1, X2, inverse):
        for d in range(X1.shape[-1]):
            scaled = (X1[..., d, None] - X2[..., None, d, :]) * inverse[..., d, None]
            r2 = r2 + scaled**2
        return r2

    first = D % _COLUMNS or min(D, _COLUMNS)
    r2 = add(0.0, X1[..., :first], X2[..., :first, :], inverse[..., :first])
    if first == D:
        return r2

    def step(i, r2):
        def part(array, axis):
            return jax.lax.dynamic_slice_in_dim(array, first + i * _COLUMNS, _COLUMNS, axis)

        return add(r2, part(X1, -1), part(X2, -2), part(inverse, -1))

    return jax.lax.fori_loop(0, D // _COLUMNS - (first == _COLUMNS), step, r2)


def _with_differences(r2, near, X1, X2, inverse):
    """Squared distances, or all by differences if there is a pair that is near."""

    def differences():
        return _by_differences(X1, X2, inverse)

    return jax.lax.cond(jnp.any(near), differences, lambda: r2)


@custom_vmap
def _with_some_differences(r2, near, X1, X2, inverse):
    """The same of matrices, but of pairs that are near alone where these are few."""
    number, most = jnp.sum(near), int(_FEW * near.size)
    size = -(-most // _AT_ONCE) * _AT_ONCE

    def some():
        pairs = jnp.nonzero(near, size=size, fill_value=max(near.shape))  # no rows
        left, right = (places.astype(jnp.int32) for places in pairs)

        def step(k, values):
            i, j = (
                jax.lax.dynamic_slice_in_dim(places, k * _AT_ONCE, _AT_ONCE)
                for places in (left, right)
            )
            scaled = (X1.at[i].get(mode="clip") - X2.at[j].get(mode="clip")) * inverse
            found = jnp.sum(scaled**2, axis=-1)
            return jax.lax.dynamic_update_slice_in_dim(values, found, k * _AT_ONCE, 0)

        values = jnp.zeros(size, r2.dtype)
        values = jax.lax.fori_loop(0, -(-number // _AT_ONCE), step, values)
        return r2.at[left, right].set(values, mode="drop")

    which = jnp.where(number > most, 2, jnp.where(number > 0, 1, 0))
    ways = [lambda: r2, some, lambda: _by_differences(X1, X2, inverse)]
    return jax.lax.switch(which, ways)


@_with_some_differences.def_vmap
def _of_batch(axis_size, in_batched, *given):
    # All ways are gone in a batch: then one fewer.
    axes = [0 if batched else None for batched in in_batched]
    return jax.vmap(_with_differences, axes, axis_size=axis_size)(*given), True


def _slopes_of_differences(X1, X2, change):
    """
    Squared differences of each column times the change of its inverse squared lengthscale,
    summed. Of matrix products it would be wrong by the rounding of squared norms, which is
    more than all of it between near points, where kernels have steep slopes.
    """
    columns = jax.lax.optimization_barrier(jnp.swapaxes(X2, -1, -2))
    # One change for each point of X2, so that its derivative is a sum over the first axis,
    # which XLA has for many columns at once.
    change = jnp.broadcast_to(change, (*change.shape[:-1], X1.shape[-1]))
    change = jnp.swapaxes(change, -1, -2)
    shape = *change.shape[:-1], X2.shape[-2]
    change = jax.lax.optimization_barrier(jnp.broadcast_to(change, shape))
    total = 0.0
    for d in range(X1.shape[-1]):
        difference = X1[..., d, None] - columns[..., None, d, :]
        total = total + difference**2 * change[..., None, d, :]
    return jax.lax.optimization_barrier(total)


def _slopes_of_products(X1, X2, change):
    """The same of centred points by a matrix product."""
    scaled = X1 * change
    norms = _of_pairs(jnp.sum(X1 * scaled, axis=-1), jnp.sum(X2**2 * change, axis=-1))
    return norms - 2.0 * inner_products(scaled, X2)


def _by_products(X1, X2, inverse):
    """Squared distances, and the sums of the squared norms that they are made of."""
    X1, X2 = _centred(X1, X2, inverse)
    norms = _of_pairs(*map(_norms, (X1, X2)))
    return norms - 2.0 * inner_products(X1, X2), norms


def _norms(X):
    return jnp.sum(X**2, axis=-1)


def _of_pairs(left, right):
    return left[..., :, None] + right[..., None, :]


def _centred(X1, X2, inverse):
    """Both about one centre, in lengthscales."""
    X1, X2 = _centre(X1, X2)
    return X1 * inverse, X2 * inverse


def _centre(X1, X2):
    """Both about one centre."""
    # Of the fewer points: those of one device, where rows are split over several.
    few, other = sorted((X1, X2), key=lambda X: X.shape[-2])
    if few.ndim > other.ndim:  # one centre for all of a batch, or ``other`` were copied
        few = few.reshape(-1, few.shape[-1])
    if few.shape[-2] > 0:  # the median of no points is NaN, and so would be the gradient
        # The distances do not depend on the centre, so its gradient may be dropped. A mean
        # may be far from all points but an outlier; of some rows, since this is a sort.
        some = few[..., :: max(1, few.shape[-2] // _CENTRE_ROWS), :]
        # Of known points it is not for the compiler, which takes seconds for a sort.
        some = jax.lax.optimization_barrier(jax.lax.stop_gradient(some))
        centre = jax.lax.stop_gradient(jnp.median(some, axis=-2, keepdims=True))
        X1, X2 = X1 - centre, X2 - centre
    return X1, X2


@jax.custom_jvp
def safe_sqrt(r2: Array) -> Array:
    """Square root whose derivative at zero is zero (a subgradient) instead of inf."""
    return jnp.sqrt(r2)


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals, tangents):
    # In terms of the root alone: XLA computes cheap terms again for each of their uses, and
    # counts the sum of many squares as cheap, but not a root.
    r = safe_sqrt(*primals)
    positive = r > 0.0
    slope = jnp.where(positive, 0.5 / jnp.where(positive, r, 1.0), 0.0)
    return r, slope * tangents[0]

r"""
The precision of q(w), and what is made of it: dense, or with the numbers of groups set
apart.

Groups are independent given the rest of the field, so that P has the shape of an arrow: in
the order (groups, rest), with D block diagonal, a block for each group,

.. math::

    P = \begin{pmatrix} D & C^\top \\ C & A \end{pmatrix}
      = L L^\top, \qquad
    L = \begin{pmatrix} L_D & 0 \\ C L_D^{-\top} & L_S \end{pmatrix}, \qquad
    L_S L_S^\top = A - C D^{-1} C^\top ,

at a cost of :math:`O(G R^2 + R^3)` for G groups beside R other numbers. As a distribution:
the rest is N(m, S^-1), and each group given the rest has the mean
:math:`m_g - D^{-1} C^\top (w - m)` and the precision D.

The numbers of the field are in the order (rest, groups): the last G K are those of groups,
K of each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.linalg import einsum, matmul, solve_lower
from numpyro_sgp.linalg.batches import cholesky

_HALVINGS = 6


# ---- dense --------------------------------------------------------------------------


class Dense(NamedTuple):
    """
    A precision, or a part of one.

    :param matrix: shape ``(m, m)``.
    """

    matrix: Array

    def identity(self) -> Dense:
        """I, of this shape."""
        return Dense(jnp.eye(len(self.matrix), dtype=self.matrix.dtype))

    def symmetric(self) -> Dense:
        """Without what rounding makes it differ from its transpose by."""
        return Dense(0.5 * (self.matrix + self.matrix.T))

    def times(self, v: Array) -> Array:
        """Its product with a vector ``(m,)``."""
        return matmul(self.matrix, v)

    def dense(self) -> Array:
        """As a matrix, ``(m, m)``."""
        return self.matrix

    def root(self) -> DenseRoot:
        """Lower factor; NaN if it has none."""
        return DenseRoot(cholesky(self.matrix))


class DenseRoot(NamedTuple):
    """
    Lower factor L of a precision.

    :param matrix: shape ``(m, m)``.
    """

    matrix: Array

    def solve(self, shift: Array) -> Array:
        """The mean of a shift P m, ``(m,)``."""
        half = solve_lower(self.matrix, shift[:, None])
        return solve_lower(self.matrix, half, transpose=True)[:, 0]

    def log_diagonal(self) -> Array:
        """Logarithms of the diagonal of L, ``(m,)``."""
        return jnp.log(jnp.diagonal(self.matrix))

    def transposed(self, v: Array) -> Array:
        """L' v, of a vector ``(m,)``."""
        return matmul(self.matrix.T, v)

    def ratio(self, other: DenseRoot) -> Array:
        """The sum of squares of inv(L) times another factor."""
        return jnp.sum(solve_lower(self.matrix, other.matrix) ** 2)

    def spread(self) -> Square:
        """
        A square root of the covariance. P is one or more in every direction, so that the
        inverse is a mild one, and products with it run on all cores, where solves run on
        one.
        """
        eye = jnp.eye(len(self.matrix), dtype=self.matrix.dtype)
        return Square(solve_lower(self.matrix, eye).T)


class Square(NamedTuple):
    """
    A square root of a covariance.

    :param matrix: shape ``(m, m)``.
    """

    matrix: Array

    def draw(self, x: Array) -> Array:
        """Of standard normal numbers ``(..., m)`` such with this covariance."""
        return matmul(x, self.matrix.T)

    def transposed(self, maps: Array) -> Array:
        """The transpose times ``(m, T)``, whose columns' squares sum to variances."""
        return matmul(self.matrix.T, maps)

    def squares(self) -> Array:
        """The trace of the covariance."""
        return jnp.sum(self.matrix**2)

    def reweighed(self, x: Array, weights: Array, shift: Array) -> Square:
        """
        The root of the covariance of weighed draws.

        :param x: standard normal numbers of draws, ``(S, m)``.
        :param weights: of the draws, ``(S,)``.
        :param shift: weighed mean of x, ``(m,)``.
        """
        return Square(matmul(self.matrix, _changed(x, weights, shift)))


# ---- an arrow -----------------------------------------------------------------------


class Arrow(NamedTuple):
    """
    A precision, or a part of one, where groups are independent given the rest.

    :param rest: A, shape ``(R, R)``.
    :param across: C by groups, shape ``(G, K, R)``.
    :param own: D, shape ``(G, K, K)``.
    """

    rest: Array
    across: Array
    own: Array

    def identity(self) -> Arrow:
        """I, of this shape."""
        number, each, size = self.across.shape
        return arrow_identity(size, number, each, self.rest.dtype)

    def symmetric(self) -> Arrow:
        """Without what rounding makes it differ from its transpose by."""
        rest = 0.5 * (self.rest + self.rest.T)
        return Arrow(rest, self.across, 0.5 * (self.own + self.own.mT))

    def times(self, v: Array) -> Array:
        """Its product with a vector ``(m,)``."""
        w, groups = _parts(v, self.across)
        rest = matmul(self.rest, w) + einsum("gkr,gk->r", self.across, groups)
        return _joined(rest, matmul(self.across, w) + _each(self.own, groups))

    def root(self) -> ArrowRoot:
        """Lower factor; NaN if it has none."""
        own = _cholesky(self.own)
        across = _solve(own, self.across)
        flat = across.reshape(-1, across.shape[-1])
        schur = self.rest - matmul(flat.T, flat)
        rest = cholesky(schur)
        return ArrowRoot(rest, across, own)

    def dense(self) -> Array:
        """As a matrix, ``(m, m)``."""
        flat = self.across.reshape(-1, self.across.shape[-1])
        own = jax.scipy.linalg.block_diag(*self.own)
        return jnp.block([[self.rest, flat.T], [flat, own]])


class ArrowRoot(NamedTuple):
    """
    Lower factor L of a precision.

    :param rest: L_S, shape ``(R, R)``.
    :param across: C inv(L_D)' by groups, shape ``(G, K, R)``.
    :param own: L_D, shape ``(G, K, K)``.
    """

    rest: Array
    across: Array
    own: Array

    def solve(self, shift: Array) -> Array:
        """The mean of a shift P m, ``(m,)``."""
        rest, groups = _parts(shift, self.across)
        half = _solve(self.own, groups[..., None])[..., 0]
        rest = rest - einsum("gkr,gk->r", self.across, half)
        w = DenseRoot(self.rest).solve(rest)
        groups = _solve_transposed(self.own, (half - matmul(self.across, w))[..., None])
        return _joined(w, groups[..., 0])

    def log_diagonal(self) -> Array:
        """Logarithms of the diagonal of L, ``(m,)``."""
        own = jnp.diagonal(self.own, axis1=1, axis2=2)
        return jnp.log(_joined(jnp.diagonal(self.rest), own))

    def transposed(self, v: Array) -> Array:
        """L' v, of a vector ``(m,)``."""
        w, groups = _parts(v, self.across)
        own = _each(self.own.mT, groups)
        return _joined(matmul(self.rest.T, w), own + matmul(self.across, w))

    def ratio(self, other: ArrowRoot) -> Array:
        """The sum of squares of inv(L) times another factor."""
        own = _solve(self.own, other.own)
        across = other.across - einsum("gkr,gkl->glr", self.across, own)
        across = across.reshape(-1, across.shape[-1])
        rest = DenseRoot(self.rest)
        found = rest.ratio(DenseRoot(other.rest)) + jnp.sum(own**2)
        return found + jnp.sum(matmul(across, rest.spread().matrix) ** 2)

    def spread(self) -> Conditional:
        """A square root of the covariance."""
        rest = DenseRoot(self.rest).spread().matrix
        eye = jnp.eye(self.own.shape[-1], dtype=rest.dtype)
        own = _solve_transposed(self.own, jnp.broadcast_to(eye, self.own.shape))
        return Conditional(rest, -_solve_transposed(self.own, self.across), own)


class Conditional(NamedTuple):
    r"""
    A square root of a covariance: :math:`w = m + F x` of the rest, and given it
    :math:`w_g = m_g + T_g (w - m) + U_g x_g` of each group.

    :param rest: F, shape ``(R, R)``.
    :param moved: T, shape ``(G, K, R)``.
    :param own: U, shape ``(G, K, K)``.
    """

    rest: Array
    moved: Array
    own: Array

    def draw(self, x: Array) -> Array:
        """Of standard normal numbers ``(..., m)`` such with this covariance."""
        x, groups = _parts(x, self.moved)
        w = matmul(x, self.rest.T)
        flat = self.moved.reshape(-1, self.moved.shape[-1])
        moved = matmul(w, flat.T).reshape(groups.shape)
        return _joined(w, moved + _each(self.own, groups))

    def transposed(self, maps: Array) -> Array:
        """The transpose times ``(m, T)``, whose columns' squares sum to variances."""
        number, each, size = self.moved.shape
        groups = maps[size:].reshape(number, each, -1)
        rest = maps[:size] + einsum("gkr,gkt->rt", self.moved, groups)
        own = einsum("gkl,gkt->glt", self.own, groups)
        return jnp.concatenate([matmul(self.rest.T, rest), own.reshape(number * each, -1)])

    def squares(self) -> Array:
        """The trace of the covariance."""
        flat = matmul(self.moved.reshape(-1, self.moved.shape[-1]), self.rest)
        return jnp.sum(self.rest**2) + jnp.sum(flat**2) + jnp.sum(self.own**2)

    def reweighed(self, x: Array, weights: Array, shift: Array) -> Conditional:
        """
        The root of the covariance of weighed draws: that of the rest, and of each group
        given the rest. What weights say of groups beyond that is left out, which is noise
        where groups are many.

        :param x: standard normal numbers of draws, ``(S, m)``.
        :param weights: of the draws, ``(S,)``.
        :param shift: weighed mean of x, ``(m,)``.
        """
        x, groups = _parts(x, self.moved)
        shift, shifts = _parts(shift, self.moved)
        rest = matmul(self.rest, _changed(x, weights, shift))
        each = jax.vmap(_changed, (1, None, 0))(groups, weights, shifts)
        return Conditional(rest, self.moved, matmul(self.own, each))


Precision = Dense | Arrow
Root = DenseRoot | ArrowRoot
Factor = Square | Conditional


def arrow_identity(rest: int, number: int, each: int, dtype) -> Arrow:
    """
    The precision of the prior.

    :param rest: R.
    :param number: G.
    :param each: K.
    """
    own = jnp.broadcast_to(jnp.eye(each, dtype=dtype), (number, each, each))
    across = jnp.zeros((number, each, rest), dtype)
    return Arrow(jnp.eye(rest, dtype=dtype), across, own)


# ---- parts --------------------------------------------------------------------------


def _parts(v, across):
    """The rest ``(..., R)`` and groups ``(..., G, K)`` of numbers of the field."""
    number, each, size = across.shape
    return v[..., :size], v[..., size:].reshape(*v.shape[:-1], number, each)


def _joined(rest, groups):
    """The inverse of :func:`_parts`."""
    flat = groups.reshape(*groups.shape[:-2], -1)
    return jnp.concatenate([rest, flat], axis=-1)


def _each(matrices, groups):
    """The product of each group's matrix with its numbers ``(..., G, K)``."""
    # No sum over an axis: compiled with a product of matrices that it is added to, XLA 0.10
    # makes wrong numbers of it on a CPU in float32.
    return einsum("gkl,...gl->...gk", matrices, groups)


def _cholesky(own):
    """Lower factors of small matrices, many of them: a loop of LAPACK's calls is slow."""
    size = own.shape[-1]
    rows: list[list[Array]] = []
    for i in range(size):
        row: list[Array] = []
        for j in range(i):
            known = [a * b for a, b in zip(row, rows[j][:j], strict=True)]
            row.append((own[:, i, j] - sum(known)) / rows[j][j])
        rows.append([*row, jnp.sqrt(own[:, i, i] - sum(a**2 for a in row))])
    zero = jnp.zeros_like(own[:, 0, 0])
    full = [jnp.stack(row + [zero] * (size - len(row)), axis=-1) for row in rows]
    return jnp.stack(full, axis=-2)


def _solve(lower, B):
    """inv(L) B of small matrices, many of them: ``(G, K, K)`` and ``(G, K, T)``."""
    rows: list[Array] = []
    for i in range(lower.shape[-1]):
        known = sum((lower[:, i, j, None] * rows[j] for j in range(i)), 0.0)
        rows.append((B[:, i] - known) / lower[:, i, i, None])
    return jnp.stack(rows, axis=1)


def _solve_transposed(lower, B):
    """inv(L)' B, likewise."""
    return _solve(lower[:, ::-1, ::-1].mT, B[:, ::-1])[:, ::-1]


def _changed(x, weights, shift):
    """Lower factor of the covariance of weighed numbers ``(S, m)``."""
    # That of the draws themselves, which is not I either, is taken off.
    change = matmul(x.T * (weights - 1.0 / len(x)), x) - jnp.outer(shift, shift)
    return _root_of(jnp.eye(len(shift), dtype=x.dtype), change)


def _root_of(eye, change):
    """Lower factor of I + change, halved until it has one."""

    def attempt(state):
        count, rate, _ = state
        root = cholesky(eye + 0.5 * rate * change)
        return count + 1, 0.5 * rate, root

    def go_on(state):
        count, _, root = state
        return (count <= _HALVINGS) & ~jnp.all(jnp.isfinite(root))

    start = 0, jnp.full((), 2.0, eye.dtype), jnp.full_like(eye, jnp.nan)
    root = jax.lax.while_loop(go_on, attempt, start)[2]
    return jnp.where(jnp.all(jnp.isfinite(root)), root, eye)

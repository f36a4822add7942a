"""Where the density of the observations of each row is, as a function of f."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp.linalg import einsum, matmul

_MOST_STEPS = 40
_CLOSE = 0.05  # standard deviations from the mode that are near enough
_MOST_LOWER = 1.5  # of the integrand's log one standard deviation away; 0.5 of a Gaussian
_LOG_SHARE = float(np.log(1e6))
_TOLERANCE = 1e-3  # of slopes, that rows are apart


class Centre(NamedTuple):
    """
    A Gaussian about the mode of each row's integrand, in coordinates in which q(f) is
    N(0, I).

    :param mode: of D latent functions, shape ``(D, N)``.
    :param root: lower factors of its precisions, ``(D, D, N)``.
    :param spread: the transposes of their inverses, likewise.
    :param is_there: whether a row has one, ``(N,)``.
    """

    mode: Array
    root: Array
    spread: Array
    is_there: Array

    def place(self, z: Array) -> tuple[Array, Array]:
        """
        Values where z is standard normal, and the log density of these less that of N(0, I)
        there, -inf where there is no such Gaussian.

        :param z: shape ``(D, N)`` or ``(D, 1)``.
        """
        z = jnp.broadcast_to(z, self.mode.shape)
        x = self.mode + einsum("ijn,jn->in", self.spread, z)
        return x, self._log_ratio(x, z)

    def log_ratio(self, x: Array) -> Array:
        """The latter at any values."""
        away = x - self.mode
        z = einsum("ijn,in->jn", self.root, away)
        return self._log_ratio(x, z)

    def _log_ratio(self, x, z):
        found = 0.5 * (jnp.sum(x**2, axis=0) - jnp.sum(z**2, axis=0))
        found = found + sum(jnp.log(self.root[i, i]) for i in range(len(self.root)))
        return jnp.where(self.is_there, found, -jnp.inf)


def log_shares(log_ratio: Array) -> tuple[Array, Array]:
    """
    Logs of the shares that nodes of a :class:`Centre`, and those of N(0, I), have in an
    integral: the latter of a millionth where both densities are the same, so that they are
    for what is more than five standard deviations from the mode.

    :param log_ratio: of :class:`Centre`, at some values.
    """
    far = _LOG_SHARE + log_ratio
    return jax.nn.log_sigmoid(far), jax.nn.log_sigmoid(-far)


def centre_of(log_prob: Callable[[Array], Array], start: Array) -> Centre:
    """
    By damped Newton steps. A row has no centre where there is no maximum with a curvature,
    or where its log density depends on f at other rows.

    :param log_prob: from f, ``(D, N)`` in coordinates in which it is standard normal, to
        log densities of the rows.
    :param start: where to begin.
    """
    D, N = start.shape
    dtype = start.dtype

    def value(x):
        return log_prob(x) - 0.5 * jnp.sum(x**2, axis=0)

    def slopes(x, weights):
        return jax.grad(lambda x: matmul(weights, log_prob(x)))(x)

    def expanded(x):
        """Slopes and minus second derivatives of the integrand's log."""

        def along(direction):
            moved = jnp.broadcast_to(direction[:, None], x.shape)
            return jax.jvp(lambda x: slopes(x, jnp.ones(N, dtype)), (x,), (moved,))

        of_one, second = jax.vmap(along)(jnp.eye(D, dtype=dtype))
        return of_one[0], jnp.eye(D, dtype=dtype)[..., None] - second

    def go_on(state):
        step, *_, moving = state
        return (step < _MOST_STEPS) & jnp.any(moving)

    def improve(state):
        step, x, height, damping, moving = state
        slope, A = expanded(x)
        root = _cholesky(A + damping * jnp.eye(D, dtype=dtype)[..., None])
        white = _solve_lower(root, slope - x)
        new = x + jnp.where(moving, _solve_transposed(root, white), 0.0)
        new_height = value(new)
        better = moving & (new_height > height)
        moving = moving & ~(jnp.sum(white**2, axis=0) < _CLOSE**2) & (damping < 1e12)
        damping = jnp.where(better, damping / 16.0, jnp.maximum(16.0 * damping, 1.0))
        damping = jnp.where(damping < 0.1, 0.0, damping)
        x, height = jnp.where(better, new, x), jnp.where(better, new_height, height)
        return step + 1, x, height, damping, moving

    still, moving = jnp.zeros(N, dtype), jnp.ones(N, bool)
    first = 0, start, value(start), still, moving
    x = jax.lax.while_loop(go_on, improve, first)[1]
    height, root = value(x), _cholesky(expanded(x)[1])

    def is_wide(root):
        """Whether the integrand is far lower a standard deviation away, as about kinks."""
        ends = jax.vmap(lambda z: value(x + _solve_transposed(root, z[:, None])))
        lowest = jnp.min(ends(jnp.concatenate([jnp.eye(D), -jnp.eye(D)])), axis=0)
        return height - lowest > _MOST_LOWER

    def narrow(state):
        step, root, wide = state
        root = jnp.where(wide, 2.0 * root, root)
        return step + 1, root, is_wide(root)

    root = jax.lax.while_loop(go_on, narrow, (0, root, is_wide(root)))[1]
    is_there = jnp.all(jnp.isfinite(root), axis=(0, 1)) & _are_apart(slopes, start)
    eye = jnp.broadcast_to(jnp.eye(D, dtype=dtype)[..., None], root.shape)
    root = jnp.where(is_there, root, eye)
    return Centre(x, root, _solve_transposed(root, eye), is_there)


def order_of(log_prob: Callable[[Array], Array], x: Array) -> Array:
    """
    Of each row of each function the row of the observations that depends on it, where each
    depends on another one (``f[index]``): by slopes of their sum and of a weighted one.
    Rows without a slope (of a mask) have what is left. As they are where nothing is told.

    :param log_prob: as that of :func:`centre_of`.
    :param x: where to look, shape ``(D, N)``.
    :return: the same shape.
    """
    N = x.shape[-1]
    rows = jnp.arange(N)
    weights = 1.0 + rows.astype(x.dtype) / N

    def slopes(weights):
        return jax.grad(lambda x: matmul(weights, log_prob(x)))(x)

    plain, weighted = slopes(jnp.ones_like(weights)), slopes(weights)
    number = jnp.round((weighted / plain - 1.0) * N)

    def of_one(number):
        is_known = jnp.isfinite(number) & (number >= 0) & (number < N)
        found = jnp.where(is_known, number, N).astype(int)
        times = jnp.zeros(N, int).at[found].add(1, mode="drop")
        (left,) = jnp.nonzero(times == 0, size=N, fill_value=0)
        found = jnp.where(is_known, found, left[jnp.cumsum(~is_known) - 1])
        return jnp.where(jnp.all(times <= 1), found, rows)

    return jax.vmap(of_one)(number)


def _are_apart(slopes, x):
    """
    Whether each log density depends on f at its own row: its slope then has its weight.

    :param slopes: from f and weights of the rows to slopes of the weighted sum.
    """
    weights = 2.0 + jnp.cos(jnp.arange(x.shape[-1], dtype=x.dtype))
    plain, weighted = slopes(x, jnp.ones_like(weights)), slopes(x, weights)
    is_known = jnp.isfinite(plain) & jnp.isfinite(weighted)
    off = jnp.where(is_known, jnp.abs(weighted - weights * plain), 0.0)
    largest = jnp.max(jnp.where(is_known, jnp.abs(plain), 0.0))
    return jnp.max(off) <= _TOLERANCE * largest


# Not by LAPACK, since there are many matrices of a row or a few.


def _cholesky(A):
    """Of ``(D, D, N)``; NaN where there is none."""
    L = jnp.zeros_like(A)
    for j in range(len(A)):
        column = A[j:, j] - jnp.sum(L[j:, :j] * L[j, :j], axis=1)
        L = L.at[j:, j].set(column / jnp.sqrt(column[0]))
    return L


def _solve_lower(L, b):
    rows: list[Array] = []
    for i in range(len(L)):
        rows.append((b[i] - sum(L[i, j] * rows[j] for j in range(i))) / L[i, i])
    return jnp.stack(rows)


def _solve_transposed(L, b):
    rows: list[Array] = []  # from the last one on
    D = len(L)
    for i in reversed(range(D)):
        after = sum(L[j, i] * rows[D - 1 - j] for j in range(i + 1, D))
        rows.append((b[i] - after) / L[i, i])
    return jnp.stack(rows[::-1])

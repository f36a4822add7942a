"""
Inverses from matrix products: no Cholesky factor, no solve.

Products are taken in full precision: what is computed here is small differences of them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_sgp.linalg import matmul

# Row sums of L^T K L up to which a step of `inverse_root` needs no watching: the
# eigenvalues, which are no larger, converge from below 3.
_SAFE_ROW_SUM = 2.5
# Below this distance ||L^T K L - I||_F a step at least halves it, but for rounding.
_NEAR = 0.25
# Above that distance, from eigenvalues below 2, a step takes more than this from the KL
# divergence, but for rounding. A start with larger ones costs a step or two that do not;
# of more the iteration ends.
_DESCENT, _PATIENCE = 0.01, 3


class InverseRoot(NamedTuple):
    """What :func:`inverse_root` found."""

    root: Array
    """Lower triangular L, positive on the diagonal; shape ``(*batch, M, M)``."""
    residual: Array
    r""":math:`\|L^\top K L - I\|_F / \sqrt M` of that L; shape ``(*batch,)``."""
    num_steps: Array
    """Steps taken, integers; shape ``(*batch,)``."""


def inverse_root(
    K: Array, start: Array | None = None, tol: float = 1e-6, max_steps: int = 100
) -> InverseRoot:
    r"""
    Lower triangular L with :math:`L L^\top \approx K^{-1}`, by matrix products only.

    Newton's iteration for a triangular root,

    .. math:: L \leftarrow L - L\, \Phi(L^\top K L), \qquad
        \Phi(G) = \mathrm{tril}(G, -1) + \tfrac12 \mathrm{diag}(G) - \tfrac12 I,

    which is natural-gradient descent of :math:`KL[N(0, LL^\top) \| N(0, K^{-1})]` with
    step size one (Cortinovis et al. 2026, arXiv 2604.00697, in their R-SVGP). An
    eigenvalue of :math:`L^\top K L` far below one grows by 9/4 a step and the end is
    quadratic, so from the cold start :math:`I / \sqrt{\|K\|_\infty}` there are about
    :math:`6 + 1.25 \ln(\mathrm{cond} K)` steps, and two or three from a root of a
    matrix nearby.

    A step takes three products of M x M matrices, :math:`L \Phi`, :math:`K L` and
    :math:`L^\top (K L)`, a start two more. Steps converge where eigenvalues are below 3.
    A step that does not lower the KL divergence, from an L whose :math:`L^\top K L` has
    an absolute row sum (a bound on the eigenvalues, loose by up to :math:`\sqrt M`) above
    2.5, is undone, and the next one starts from that L over the root of the row sum.

    Each matrix of a batch ends at ``tol``, or where rounding ends all progress: where
    the distance :math:`\|L^\top K L - I\|_F` is below 1/4 and a step does not halve it
    (without rounding, a step from F goes to :math:`F^2 (1.21 + F / 2)` at most), or where
    it is above and three steps have not lowered the KL divergence by 0.01. Rounding leaves
    a residual of about the condition number times the precision of the dtype, or near one
    where that is large; the root returned is the one of least residual.

    K and ``start`` count as constants: derivatives of the result are zero.

    :param K: symmetric positive definite matrices, shape ``(*batch, M, M)``.
    :param start: lower triangular matrices to start from, shape ``(*batch, M, M)``, batch
        dimensions broadcast. Only its shape counts, not its scale. The cold start takes
        its place wherever that is nearer in KL divergence, and wherever ``start`` is not
        finite or not positive on the diagonal.
    :param tol: residual to reach.
    :param max_steps: most steps taken.
    :return: :class:`InverseRoot`.
    :raises ValueError: if K is not square, or ``start`` not of its size.

    >>> import jax.numpy as jnp
    >>> K = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    >>> L, residual, num_steps = inverse_root(K, tol=1e-5)
    >>> bool(jnp.allclose(L @ L.T, jnp.linalg.inv(K), atol=1e-4))
    True
    >>> int(inverse_root(1.1 * K, start=L, tol=1e-5).num_steps)  # the scale is set anew
    0
    """
    if K.ndim < 2 or K.shape[-1] != K.shape[-2]:
        raise ValueError(f"K must be a square matrix, got shape {K.shape}.")
    if start is None:
        return _cold_newton(lax.stop_gradient(K), tol, max_steps)
    if start.shape[-2:] != K.shape[-2:]:
        raise ValueError(
            f"K has shape {K.shape}, so start must have shape (..., {K.shape[-1]}, "
            f"{K.shape[-1]}), got {start.shape}."
        )
    start = lax.stop_gradient(start).astype(K.dtype)
    return _warm_newton(lax.stop_gradient(K), start, tol, max_steps)


@partial(jnp.vectorize, excluded=(1, 2), signature="(m,m)->(m,m),(),()")
def _cold_newton(K, tol, max_steps):
    return _newton(K, *_cold_start(K), tol, max_steps)


@partial(jnp.vectorize, excluded=(2, 3), signature="(m,m),(m,m)->(m,m),(),()")
def _warm_newton(K, start, tol, max_steps):
    return _newton(K, *_warm_start(K, start), tol, max_steps)


def _cold_start(K):
    """``I / sqrt(||K||_inf)``, and the product L^T K L."""
    size = jnp.max(jnp.sum(jnp.abs(K), axis=-1))
    return jnp.eye(K.shape[-1], dtype=K.dtype) / jnp.sqrt(size), K / size


def _warm_start(K, start):
    """``start`` at its best scale or the cold start, the nearer, and L^T K L."""
    L = jnp.tril(start)
    L = L / jnp.max(jnp.abs(L))
    G = matmul(L.T, matmul(K, L))
    # Of the multiples of L, the one with trace M has the least KL divergence.
    square = K.shape[-1] / jnp.trace(G)
    L, G = L * jnp.sqrt(square), G * square
    L_cold, G_cold = _cold_start(K)
    ratio = jnp.diagonal(L) / jnp.diagonal(L_cold)
    # False where anything is not a number, or the logarithm of none.
    nearer = _kl_difference(G, G_cold, ratio) < 0
    return jnp.where(nearer, L, L_cold), jnp.where(nearer, G, G_cold)


def _kl_difference(G, G_old, ratio):
    """
    Of KL = 1/2 (tr G - log|G| - M) at two roots, from their L^T K L, and the ratio of
    their diagonals: log|G| = log|K| + 2 sum_i log L_ii.
    """
    trace = jnp.sum(jnp.diagonal(G) - jnp.diagonal(G_old))
    return 0.5 * trace - jnp.sum(jnp.log(ratio))


class _State(NamedTuple):
    L: Array
    G: Array  # L^T K L
    distance: Array  # ||G - I||_F
    best: Array  # the L of least distance so far, and that distance
    least: Array
    step: Array
    idle: Array  # steps without descent


def _newton(K, L, G, tol, max_steps):
    eye = jnp.eye(K.shape[-1], dtype=K.dtype)
    root_size = K.shape[-1] ** 0.5

    def distance(G):
        return jnp.linalg.norm(G - eye)

    def goes_on(state):
        # False where K has no numbers.
        unmet = state.least >= tol * root_size
        return unmet & (state.step < max_steps) & (state.idle < _PATIENCE)

    def step(state):
        L, G, old = state.L, state.G, state.distance
        phi = jnp.tril(G, -1) + 0.5 * (jnp.diag(jnp.diagonal(G)) - eye)
        L_new = L - matmul(L, phi)
        G_new = matmul(L_new.T, matmul(K, L_new))
        new = distance(G_new)

        # L_new has the diagonal of L times (3 - diag G) / 2. Not a number if negative.
        fall = -_kl_difference(G_new, G, 0.5 * (3.0 - jnp.diagonal(G)))
        row_sum = jnp.max(jnp.sum(jnp.abs(G), axis=-1))
        good = jnp.isfinite(new) & ((fall > 0) | (row_sum <= _SAFE_ROW_SUM))
        L_next = jnp.where(good, L_new, L / jnp.sqrt(row_sum))
        G_next = jnp.where(good, G_new, G / row_sum)

        stuck = (old < _NEAR) & ~(new <= 0.5 * old)
        idle = state.idle + ((old >= _NEAR) & ~(fall > _DESCENT))
        better = good & (new < state.least)
        return _State(
            L_next,
            G_next,
            distance(G_next),
            jnp.where(better, L_new, state.best),
            jnp.where(better, new, state.least),
            state.step + 1,
            jnp.where(stuck, _PATIENCE, idle),
        )

    start, none = distance(G), jnp.zeros((), int)  # of no weak type
    state = _State(L, G, start, L, start, none, none)
    state = lax.while_loop(goes_on, step, state)
    return InverseRoot(state.best, state.least / root_size, state.step)


def ulisse(
    rng_key: Array,
    K: Array,
    rhs: Array,
    preconditioner: Array | None = None,
    first: int = 1,
    keep: float = 0.7,
    max_steps: int | None = None,
) -> Array:
    r"""
    A random matrix whose mean is :math:`K^{-1} B`: conjugate gradients, ended at random.

    Conjugate gradients give the solution as a sum of terms :math:`s_i = \alpha_i p_i`.
    With a random number of terms :math:`I`, and :math:`q_i = P(I \ge i)`,

    .. math:: \hat s = \sum_{i \le I} s_i / q_i, \qquad
        q_i = \mathtt{keep}^{\max(0, i - \mathtt{first})},

    has the solution for its mean (ULISSE: Filippone and Engler 2015; eq. 13 of van der
    Wilk et al. 2019). There is one draw of :math:`I` a call, for all columns: sums over
    columns are unbiased too, but their errors are correlated. The expected number of
    steps is ``first + keep / (1 - keep)`` at most, each a product of K and the columns.

    Weights grow as ``keep ** -i``: where terms fall more slowly than
    ``keep ** (i / 2)`` the variance is large, and a preconditioner, or larger ``first``
    and ``keep``, are needed. What terms beyond ``max_steps`` would have added is a bias;
    it is zero in exact arithmetic from M on, but conjugate gradients of
    ill-conditioned matrices take more steps in floating point: give them a preconditioner.

    K, B and the preconditioner count as constants: derivatives are zero.

    :param rng_key: key of the draw of :math:`I`.
    :param K: symmetric positive definite, shape ``(M, M)``; batches by :func:`jax.vmap`.
    :param rhs: right-hand sides B, shape ``(M, H)``.
    :param preconditioner: lower triangular :math:`L_T` with
        :math:`L_T L_T^\top \approx K^{-1}`, shape ``(M, M)``. The terms are then those of
        :math:`L_T^\top K L_T s' = L_T^\top B`, and the result :math:`L_T \hat s'`; an
        exact root solves it in one step (Prop. 6).
    :param first: number of terms that are always taken, at least 1.
    :param keep: probability of each further one, in (0, 1]; 1 for plain conjugate
        gradients.
    :param max_steps: most terms taken; 3 M if None.
    :return: shape ``(M, H)``.
    :raises ValueError: for shapes that do not match, or ``first`` and ``keep`` out of
        range.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> K, rhs = jnp.array([[2.0, 1.0], [1.0, 2.0]]), jnp.array([[3.0], [0.0]])
    >>> keys = jax.random.split(jax.random.key(0), 1000)
    >>> draws = jax.vmap(lambda key: ulisse(key, K, rhs))(keys)
    >>> bool(jnp.allclose(draws.mean(0), jnp.linalg.inv(K) @ rhs, atol=0.1))
    True
    """
    check_one_matrix(K, preconditioner)
    if rhs.ndim != 2 or rhs.shape[0] != K.shape[0]:
        raise ValueError(
            f"K has shape {K.shape}, so rhs must have shape ({K.shape[0]}, H), got "
            f"{rhs.shape}."
        )
    if first < 1 or not 0 < keep <= 1:
        raise ValueError(
            "ulisse takes at least one term and further ones with a probability in "
            f"(0, 1], got first={first} and keep={keep}."
        )
    K, rhs, L = lax.stop_gradient((K, rhs, preconditioner))
    if max_steps is None:
        max_steps = 3 * K.shape[0]
    # One uniform number a term, not the inverse of the distribution function: that has
    # no values of probability below the spacing of uniform numbers, which in float32
    # would lose terms that have large weights.
    more = jax.random.uniform(rng_key, (max(max_steps - first, 0),), K.dtype) < keep
    last = jnp.minimum(first + jnp.sum(jnp.cumprod(more)), max_steps)
    if L is None:
        return _weighted_cg(partial(matmul, K), rhs, first, keep, last)
    rhs = matmul(L.T, rhs)
    return matmul(L, _weighted_cg(preconditioned(K, L), rhs, first, keep, last))


def check_one_matrix(K, preconditioner):
    if K.ndim != 2 or K.shape[0] != K.shape[1]:
        raise ValueError(
            f"K must be one square matrix, got shape {K.shape}; use jax.vmap for batches."
        )
    if preconditioner is not None and preconditioner.shape != K.shape:
        raise ValueError(
            f"K has shape {K.shape}, and preconditioner must have the same, got "
            f"{preconditioner.shape}."
        )


def preconditioned(K, L):
    """Product with L^T K L, without the matrix itself."""
    return lambda v: matmul(L.T, matmul(K, matmul(L, v)))


def _weighted_cg(product, rhs, first, keep, last):
    """The first ``last`` terms of conjugate gradients, over their probabilities."""
    # Terms of columns at rounding level are left out whatever their weights.
    square = jnp.sum(jnp.square(rhs), axis=0)
    floor = square * jnp.finfo(rhs.dtype).eps ** 2

    def goes_on(state):
        i, *_, square = state
        return (i <= last) & jnp.any(square > floor)

    def step(state):
        i, weight, total, residual, p, square = state
        Kp = product(p)
        curvature = jnp.sum(p * Kp, axis=0)
        live = (square > floor) & (curvature > 0)
        alpha = jnp.where(live, square / jnp.where(live, curvature, 1.0), 0.0)
        total = total + weight * alpha * p
        residual = residual - alpha * Kp
        square_new = jnp.where(live, jnp.sum(jnp.square(residual), axis=0), 0.0)
        p = residual + square_new / jnp.where(live, square, 1.0) * p
        weight = jnp.where(i < first, weight, weight / keep)
        return i + 1, weight, total, residual, p, square_new

    one = jnp.ones((), rhs.dtype)
    state = (jnp.asarray(1), one, jnp.zeros_like(rhs), rhs, rhs, square)
    return lax.while_loop(goes_on, step, state)[2]

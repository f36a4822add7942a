"""Inducing points that are exchanged for others while that explains more."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from numpyro_sgp.inducing._host import host_inputs, kernel_matrix
from numpyro_sgp.inducing.initialise import prior_variances

_TURNS = 2
_MOST_INPUTS, _MOST_POINTS = 1000, 200
_GAIN = 1e-6  # of what a point explains: less is rounding


def exchanged(kernel: Any, X: NDArray, Z: NDArray) -> NDArray:
    r"""
    Inducing points, each in turn exchanged for the input that explains most of what the
    others leave of the prior variance of all inputs, :math:`\sum_n (K - Q)_{nn}`: until
    none is, or all had two turns. Each exchange costs :math:`O(N^2 M)`. Of more than 1000
    distinct inputs (of a part of which they were worse than greedy ones of 1500), or more
    than 200 points, they stay where they are.

    :param kernel: a kernel.
    :param X: inputs, shape ``(N, D)``.
    :param Z: points, shape ``(M, D)``.
    :return: shape ``(M, D)``, of the dtype of Z; Z itself where no others explain more.
    """
    X, _ = host_inputs(X, "X")
    rows, counts = np.unique(X, axis=0, return_counts=True)
    if len(rows) > _MOST_INPUTS or len(Z) > _MOST_POINTS:
        return Z
    both = np.vstack([np.asarray(Z, rows.dtype), rows])
    counts = np.concatenate([np.zeros(len(Z)), counts])
    K = kernel_matrix(kernel, both, both)
    try:
        chosen, gained = _exchange(K, counts, len(Z), *prior_variances(kernel, both)[1:])
    except np.linalg.LinAlgError:  # points that nearly coincide
        return Z
    return both[chosen].astype(np.asarray(Z).dtype) if gained else Z


def _exchange(K, counts, size, jitter, tie) -> tuple[NDArray, bool]:
    """Indices of the points, of which the first ones are those that there are."""
    chosen, moved = np.arange(size), True
    R, along, squares = _residual(K, counts, chosen, jitter)
    before = counts @ np.diag(R)
    for turn in range(_TURNS * size):
        m = turn % size
        if m == 0 and not moved:
            break
        moved = moved and m > 0
        g = along[:, m]  # without the point R is R + g g'
        without = squares + g * (2.0 * (R @ (counts * g)) + (counts @ g**2) * g)
        left = np.diag(R) + g**2
        others = np.delete(chosen, m)
        open_ones = left > jitter
        open_ones[others] = False
        if not open_ones[chosen[m]]:
            continue
        falls = np.where(open_ones, without, 0.0) / np.where(open_ones, left, 1.0)
        best = int(np.argmax(falls))
        if falls[best] > (1.0 + _GAIN) * falls[chosen[m]] + tie:
            chosen[m], moved = best, True
            R, along, squares = _residual(K, counts, chosen, jitter)
    return chosen, bool(counts @ np.diag(R) < before)


def _residual(K, counts, chosen, jitter) -> tuple[NDArray, NDArray, NDArray]:
    """
    R = K - Q; for each point the vector g by which R is R + g g' without it, as columns;
    and the sums over n of c_n R_nj^2.
    """
    L = np.linalg.cholesky(K[np.ix_(chosen, chosen)] + jitter * np.eye(len(chosen)))
    A = solve_triangular(L, K[chosen], lower=True)
    inverse = solve_triangular(L, np.eye(len(chosen)), lower=True)
    R = K - A.T @ A
    along = A.T @ inverse / np.linalg.norm(inverse, axis=0)
    return R, along, counts @ R**2

"""Inducing points that are exchanged for others while that explains more."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numpyro_sgp.inducing._host import host_inputs, kernel_matrix
from numpyro_sgp.inducing.initialise import prior_variances

_TURNS = 2
_MOST = 1000  # distinct inputs


def exchanged(kernel: Any, X: NDArray, Z: NDArray) -> NDArray:
    r"""
    Inducing points, each in turn exchanged for the input that explains most of what the
    others leave of the prior variance of all inputs, :math:`\sum_n (K - Q)_{nn}`: until
    none is, or all had two turns, at a cost of :math:`O(N^2 M)`. What is explained never
    falls. Of more than 1000 distinct inputs points stay where they are (those of a part of
    the inputs were worse than greedy ones of 1500).

    :param kernel: a kernel.
    :param X: inputs, shape ``(N, D)``.
    :param Z: points, shape ``(M, D)``.
    :return: shape ``(M, D)``.
    """
    X, _ = host_inputs(X, "X")
    rows, counts = np.unique(X, axis=0, return_counts=True)
    if len(rows) > _MOST:
        return Z
    both = np.vstack([np.asarray(Z, rows.dtype), rows])
    counts = np.concatenate([np.zeros(len(Z)), counts])
    K = kernel_matrix(kernel, both, both)
    _, jitter, tie = prior_variances(kernel, both)
    chosen, moved = np.arange(len(Z)), True
    inverse = _inverse(K, chosen, jitter)
    R = K - K[:, chosen] @ inverse @ K[chosen]  # K - Q
    squares = counts @ R**2  # Σ_n c_n R_nj²
    for turn in range(_TURNS * len(Z)):
        m = turn % len(Z)
        if m == 0 and not moved:
            break
        moved = moved and m > 0
        # Without the point R is R + g gᵀ.
        g = K[:, chosen] @ inverse[:, m] / np.sqrt(inverse[m, m])
        along = R @ (counts * g)
        without = squares + g * (2.0 * along + (counts @ g**2) * g)
        left = np.diag(R) + g**2 + jitter
        left[np.delete(chosen, m)] = np.inf
        falls = without / left
        best = int(np.argmax(falls))
        if not falls[best] > falls[chosen[m]] + tie:
            continue
        chosen[m], moved = best, True
        inverse = _inverse(K, chosen, jitter)
        row = (R[best] + g[best] * g) / np.sqrt(left[best])
        R += np.outer(g, g) - np.outer(row, row)
        squares = counts @ R**2
    return both[chosen]


def _inverse(K, chosen, jitter) -> NDArray:
    """Of K_uu."""
    Kuu = K[np.ix_(chosen, chosen)] + jitter * np.eye(len(chosen))
    return np.linalg.inv(Kuu)

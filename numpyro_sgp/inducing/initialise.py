"""Where inducing points start: K-means, greedily by what the kernel says, or at random."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray
from scipy.sparse import csr_array

from numpyro_sgp.inducing._host import host_inputs, kernel_diagonal, kernel_matrix
from numpyro_sgp.inducing.verdict import InducingVerdict, assess_inducing, verdict_rows
from numpyro_sgp.linalg import default_jitter

_METHODS = ("kmeans", "greedy", "explained", "random")
_BY_KERNEL = ("greedy", "explained")
_KMEANS_ITERATIONS = 20
# K-means stops when an iteration lowers its loss by less than this share.
_KMEANS_TOLERANCE = 1e-4
# Candidates of "explained", of whose kernel matrix each step takes a product: 18 MiB.
_CANDIDATES = 1500
# Entries of a block of the distance matrix of K-means: 16 MiB.
_BLOCK_ENTRIES = 2**21


@dataclass(frozen=True, eq=False)
class InducingStart:
    """
    Inducing points to start from, made by :func:`initial_inducing`.

    >>> import numpy as np
    >>> from numpyro_sgp.inducing import initial_inducing
    >>> X = np.random.default_rng(0).normal(size=(100, 2))
    >>> start = initial_inducing(X, 8, num_orthogonal=4)
    >>> start.Z.shape, [points.shape for points in start.O]
    ((8, 2), [(4, 2)])

    :param Z: inducing points, shape ``(M, D)``, in the dtype of the inputs.
    :param O: sets of orthogonal inducing points, each of shape ``(M2, D)``.
    :param method: the method that chose them.
    :param X: the rows of the inputs over which a verdict is taken, at most 2000.
    :param kernel: the kernel they were chosen with, if any.
    """

    Z: NDArray
    O: tuple[NDArray, ...]
    method: str
    X: NDArray = field(repr=False)
    kernel: Any = field(default=None, repr=False)

    def verdict(self, kernel: Any = None) -> InducingVerdict:
        """
        How good a start this is: see :func:`assess_inducing`.

        :param kernel: kernel at concrete hyperparameters; by default the one that was
            given to :func:`initial_inducing`.
        :return: an :class:`InducingVerdict`.
        """
        kernel = self.kernel if kernel is None else kernel
        if kernel is None:
            raise ValueError(
                "A verdict needs a kernel, and initial_inducing was given none. "
                "Use start.verdict(kernel)."
            )
        return assess_inducing(kernel, self.X, self.Z, self.O)


def initial_inducing(
    X: ArrayLike,
    num_inducing: int,
    method: str = "kmeans",
    kernel: Any = None,
    num_orthogonal: int | Sequence[int] = (),
    seed: int = 0,
    max_rows: int = 20_000,
) -> InducingStart:
    r"""
    Choose inducing points, and orthogonal inducing points, from the inputs.

    * ``"kmeans"``: the centres of a joint K-means with :math:`M + \sum M_2` centres,
      split at random into ``Z`` and the sets of ``O``, as SOLVE-GP starts [1]. Columns
      are standardised inside, unless ``kernel`` has one lengthscale for all of them
      (``kernel.is_isotropic``), to which their scales matter. K-means++ seeding and at
      most 20 iterations of Lloyd's algorithm; a centre that is left without rows, or
      that repeats another, is replaced by a random input. Costs :math:`O(N M D)` an
      iteration.
    * ``"greedy"``: each point is the input of the largest prior variance given the
      points before it [2], by a pivoted Cholesky factorisation that costs
      :math:`O(N M^2)` time and :math:`O(N M)` memory and needs ``kernel``. The sets
      of ``O`` continue where ``Z`` ends, so they are greedy given ``Z``, and the first
      rows of ``Z`` are what a smaller ``num_inducing`` gives. Ties, up to rounding, go
      to the input that is first in lexicographic order, so the order of the rows of
      ``X`` does not matter. Once all conditional variances are below the jitter, the
      points that are left to choose are each the input farthest from those chosen.
    * ``"explained"``: each point is the input by which most of the prior variance of all
      inputs is explained, given the points before it: where many inputs are, rather than
      where one is alone. It needs ``kernel``, and of more than 1500 distinct inputs takes
      a random part (:math:`C` of them), at a cost of :math:`O(C^2 M)`. Else as
      ``"greedy"``.
    * ``"random"``: distinct inputs, uniformly at random.

    The points are distinct. Where ``X`` has more than ``max_rows`` rows, a random
    subset of ``max_rows`` of them is used in its place (enlarged where it has fewer
    distinct inputs than points to choose); then the greedy methods too depend on
    ``seed`` and on the order of the rows.

    **References:**

    1. Shi, J., Titsias, M., Mnih, A. (2020). Sparse Orthogonal Variational Inference
       for Gaussian Processes. AISTATS. https://arxiv.org/abs/1910.10596
    2. Burt, D., Rasmussen, C., van der Wilk, M. (2020). Convergence of Sparse
       Variational Inference in Gaussian Processes Regression. JMLR 21(131).
       https://arxiv.org/abs/2008.00323

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from numpyro_sgp.inducing import initial_inducing
    >>> class Exponential:
    ...     def __call__(self, X1, X2=None):
    ...         return jnp.exp(-jnp.abs(X1 - (X1 if X2 is None else X2).T))
    ...     def diag(self, X):
    ...         return jnp.ones(len(X))
    >>> X = np.linspace(0.0, 1.0, 5)[:, None]
    >>> start = initial_inducing(X, 3, method="greedy", kernel=Exponential())
    >>> start.Z.ravel()
    array([0. , 1. , 0.5])
    >>> print(f"{start.verdict().variance_explained:.2f}")
    0.90

    :param X: concrete inputs, shape ``(N, D)``.
    :param num_inducing: number of inducing points M.
    :param method: ``"kmeans"``, ``"greedy"``, ``"explained"`` or ``"random"``.
    :param kernel: kernel at concrete hyperparameters, for the greedy methods, units of
        K-means and verdicts; ``kernel(X1, X2)`` is the matrix, ``kernel.diag(X)`` its
        diagonal.
    :param num_orthogonal: number of orthogonal inducing points: one for each set, or a
        number for one set (0 for none).
    :param seed: seed of NumPy's generator.
    :param max_rows: number of rows above which a random subset is used.
    :return: an :class:`InducingStart`.
    """
    X, dtype = host_inputs(X, "X")
    sizes = [index(num_inducing), *_orthogonal_sizes(num_orthogonal)]
    if sizes[0] < 1:
        raise ValueError(f"num_inducing must be at least 1, got {num_inducing}.")
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
    if method not in _METHODS:
        raise ValueError(
            f"Unknown method {method!r}. Choose one of "
            f"{', '.join(repr(choice) for choice in _METHODS)}."
        )
    if method in _BY_KERNEL and kernel is None:
        raise ValueError(
            f"The method {method!r} chooses by the kernel's conditional variance, so it "
            "needs a kernel. Pass kernel=..., or use method='kmeans', which needs none."
        )

    rng = np.random.default_rng(seed)
    rows, counts = _distinct_rows(X, sizes, max_rows, rng)
    total = sum(sizes)
    if method == "greedy":
        chosen = rows[_greedy(kernel, rows, total)]
    elif method == "explained":
        if len(rows) > max(_CANDIDATES, total):
            few = rng.choice(len(rows), max(_CANDIDATES, total), replace=False)
            rows, counts = rows[np.sort(few)], counts[np.sort(few)]
        chosen = rows[_most_explained(kernel, rows, counts, total)]
    elif method == "random":
        chosen = rows[rng.choice(len(rows), total, replace=False)]
    else:
        scaled = _standardise(rows, alike=getattr(kernel, "is_isotropic", False))
        chosen = _kmeans(rows, scaled, counts, total, dtype, rng)
    Z, *O = np.split(chosen.astype(dtype), np.cumsum(sizes)[:-1])
    return InducingStart(Z, tuple(O), method, verdict_rows(X), kernel)


def _orthogonal_sizes(num_orthogonal: int | Sequence[int]) -> list[int]:
    given: Any = num_orthogonal
    if np.ndim(given) == 0:
        given = () if given == 0 else (given,)
    sizes = [index(size) for size in given]
    if any(size < 1 for size in sizes):
        raise ValueError(
            f"Every set of orthogonal inducing points must have at least 1 point, got "
            f"num_orthogonal={given}. For none, pass ()."
        )
    return sizes


def _distinct_rows(
    X: NDArray, sizes: list[int], max_rows: int, rng: np.random.Generator
) -> tuple[NDArray, NDArray]:
    """Distinct rows of (a subset of) X, lexicographically, and how often each is."""
    total = sum(sizes)
    sample = X
    if len(X) > max_rows:
        sample = X[rng.choice(len(X), max_rows, replace=False)]
    rows, counts = np.unique(sample, axis=0, return_counts=True)
    if len(rows) >= total:
        return rows, counts
    every = rows if sample is X else np.unique(X, axis=0)
    if len(every) < total:
        raise ValueError(
            f"X has {len(every)} distinct inputs in {len(X)} rows, but {total} points "
            f"were asked for (num_inducing={sizes[0]}, "
            f"num_orthogonal={tuple(sizes[1:])}). Ask for at most {len(every)} in all, "
            f"or pass an array of inducing points, which may repeat points."
        )
    spare = _rows_not_in(every, rows)
    spare = spare[rng.choice(len(spare), total - len(rows), replace=False)]
    return np.unique(np.vstack([sample, spare]), axis=0, return_counts=True)


def _rows_not_in(rows: NDArray, others: NDArray) -> NDArray:
    """Those of ``rows``, which are distinct, that are not rows of ``others``."""
    # The first occurrence in the stack tells where a row comes from.
    _, first = np.unique(np.vstack([others, rows]), axis=0, return_index=True)
    return rows[np.sort(first[first >= len(others)]) - len(others)]


def _standardise(rows: NDArray, alike: bool = False) -> NDArray:
    """
    Columns of mean zero and standard deviation one, or of zeros where constant.

    :param alike: whether all columns have the same factor: the largest deviation is one.
    """
    # Scaled by the largest entry first, so that squares neither overflow nor underflow
    # and a constant column becomes exactly constant.
    largest = np.abs(rows).max(axis=None if alike else 0)
    Y = rows / np.where(largest > 0.0, largest, 1.0)
    Y = Y - Y.mean(axis=0)
    varies, deviation = np.ptp(rows, axis=0) > 0.0, Y.std(axis=0)
    if alike:
        deviation = deviation.max()
    return Y / np.where(varies, deviation, np.inf)


def _greedy(kernel: Any, rows: NDArray, num: int) -> NDArray:
    """
    Pivots of the Cholesky factorisation of ``K(rows, rows)``, the largest entry of
    ``diag(K_ff - Q_ff)`` first.

    :param rows: distinct candidates, shape ``(N, D)``.
    :param num: number of pivots, at most N.
    :return: their indices in the order of choice, shape ``(num,)``.
    """
    residual, negligible, tie = prior_variances(kernel, rows)  # diag(K - Q), [N]
    factor = np.zeros((num, len(rows)))  # rows of Lᵀ, [M, N]
    chosen = np.zeros(num, dtype=int)
    for m in range(num):
        best = residual.max()
        if best <= negligible:
            return _farthest(_standardise(rows), chosen[:m], num)
        # In float32 the tolerance may exceed the residuals; a pivot must be positive.
        pivot = int(np.argmax(residual >= max(best - tie, 0.5 * best)))
        column = kernel_matrix(kernel, rows, rows[pivot : pivot + 1])[:, 0]
        # l_m = (k(X, x_m) - Σ_i<m l_i l_im) / sqrt(residual_m)
        column -= factor[:m, pivot] @ factor[:m]
        factor[m] = column / np.sqrt(residual[pivot])
        residual -= factor[m] ** 2
        residual[pivot] = -np.inf
        chosen[m] = pivot
    return chosen


def points_instead(
    kernel: Any, X: NDArray, Z: NDArray, moved: NDArray, seed: int
) -> NDArray:
    """
    Inputs in the place of some points: those that explain most of what the others leave of
    the variance of all.

    :param X: inputs, shape ``(N, D)``.
    :param Z: points, shape ``(M, D)``.
    :param moved: indices of some of them, shape ``(K,)``.
    :return: shape ``(K, D)``.
    :raises ValueError: if there are fewer distinct inputs.
    """
    X, _ = host_inputs(X, "X")
    rng = np.random.default_rng(seed)
    rows, counts = _distinct_rows(X, [len(moved)], _CANDIDATES, rng)
    # All points, so that programs of the kernel are of one shape.
    both = np.vstack([Z.astype(rows.dtype), rows])
    counts = np.concatenate([np.zeros(len(Z)), counts])
    kept = np.setdiff1d(np.arange(len(Z)), moved)
    found = _most_explained(kernel, both, counts, len(Z), kept, never=moved)
    return both[found[len(kept) :]]


def _most_explained(
    kernel: Any,
    rows: NDArray,
    counts: NDArray,
    num: int,
    first: Sequence[int] | NDArray = (),
    never: Sequence[int] | NDArray = (),
) -> NDArray:
    """
    Indices of rows, each by which Σ_n c_n (K - Q)_nn falls most: where R = K - Q of those
    before, Σ_n c_n R_nj² / R_jj.

    :param rows: candidates, shape ``(N, D)``.
    :param counts: their multiplicities c, shape ``(N,)``.
    :param num: number of indices, at most N.
    :param first: of these, which are taken before all others.
    :param never: those that are not taken.
    :return: in the order of choice, shape ``(num,)``.
    """
    residual, negligible, tie = prior_variances(kernel, rows)
    residual[list(never)] = -np.inf
    K = kernel_matrix(kernel, rows, rows)
    squares = counts @ K**2  # Σ_n c_n R_nj², [N]
    factor = np.zeros((num, len(rows)))  # rows of Lᵀ, [M, N]
    chosen = np.zeros(num, dtype=int)
    for m in range(num):
        some = residual > negligible
        if m < len(first):
            pivot = chosen[m] = first[m]
            if not some[pivot]:  # explained by the ones before
                residual[pivot] = -np.inf
                continue
        elif some.any():
            falls = np.where(some, squares / np.where(some, residual, 1.0), -np.inf)
            pivot = chosen[m] = int(np.argmax(falls >= falls.max() - tie))
        else:
            return _farthest(_standardise(rows), chosen[:m], num, never)
        row = K[pivot] - factor[:m, pivot] @ factor[:m]
        row = factor[m] = row / np.sqrt(residual[pivot])
        # R becomes R - l lᵀ, of which only sums are kept.
        weighted = counts * row
        along = K @ weighted - (factor[:m] @ weighted) @ factor[:m]
        squares += row * ((weighted @ row) * row - 2.0 * along)
        residual -= row**2
        residual[pivot] = -np.inf
    return chosen


def prior_variances(kernel: Any, rows: NDArray) -> tuple[NDArray, float, float]:
    """
    Prior variances; below which one adds nothing that the model could see, which is the
    jitter; and by how much rounding sets two apart.
    """
    variances, precision = kernel_diagonal(kernel, rows)
    scale = variances.mean()
    if not scale > 0.0:
        raise ValueError(
            "The kernel has no variance at X (the mean of kernel.diag(X) is not "
            "positive), so there is nothing to choose by. Check its hyperparameters."
        )
    return (
        variances,
        default_jitter(precision) * scale,
        100.0 * np.finfo(precision).eps * scale,
    )


def _farthest(
    Y: NDArray, chosen: NDArray, num: int, never: Sequence[int] | NDArray = ()
) -> NDArray:
    """Continue ``chosen`` to ``num`` rows of Y, each the farthest from those before."""
    squared = np.full(len(Y), np.inf)
    for row in chosen:
        squared = np.minimum(squared, np.sum((Y - Y[row]) ** 2, axis=1))
    # Rows whose standardised values coincide are distinct all the same.
    squared[[*chosen, *never]] = -np.inf
    found = list(chosen)
    while len(found) < num:
        row = int(np.argmax(squared))
        squared = np.minimum(squared, np.sum((Y - Y[row]) ** 2, axis=1))
        squared[row] = -np.inf
        found.append(row)
    return np.array(found)


def _kmeans(
    rows: NDArray,
    scaled: NDArray,
    counts: NDArray,
    num: int,
    dtype: np.dtype,
    rng: np.random.Generator,
) -> NDArray:
    """
    Centres of K-means, distinct also in ``dtype``, in random order.

    :param rows: distinct inputs, shape ``(N, D)``.
    :param scaled: the same in units in which distances are taken.
    :param counts: their multiplicities, shape ``(N,)``.
    :param num: number of centres, at most N.
    :return: centres in float64, shape ``(num, D)``.
    """
    if num == len(rows):
        return rng.permutation(rows)
    labels = _lloyd(scaled, counts, num, rng)
    occupied, labels, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    lowest, highest = rows.min(axis=0), rows.max(axis=0)
    means = _label_means(rows - lowest, counts, labels, len(occupied)) + lowest
    # Rounding must not move a constant column, nor a centre that is a single input.
    means = np.clip(means, lowest, highest)
    alone = sizes[labels] == 1
    means[labels[alone]] = rows[alone]
    centres = np.unique(means.astype(dtype).astype(np.float64), axis=0)
    spare = _rows_not_in(rows, centres)
    spare = spare[rng.choice(len(spare), num - len(centres), replace=False)]
    return rng.permutation(np.vstack([centres, spare]))


def _lloyd(Y: NDArray, counts: NDArray, num: int, rng: np.random.Generator) -> NDArray:
    """Lloyd's algorithm on weighted rows; returns the label of each, shape ``(N,)``."""
    centres = Y[_kmeans_plus_plus(Y, counts, num, rng)]
    labels, loss = _assign(Y, counts, centres)
    for _ in range(_KMEANS_ITERATIONS - 1):
        means = _label_means(Y, counts, labels, len(centres))
        occupied = np.bincount(labels, minlength=len(centres)) > 0
        centres = np.where(occupied[:, None], means, centres)
        previous_labels, previous_loss = labels, loss
        labels, loss = _assign(Y, counts, centres)
        if np.array_equal(labels, previous_labels):
            break
        if loss >= (1.0 - _KMEANS_TOLERANCE) * previous_loss:
            break
    return labels


def _kmeans_plus_plus(
    Y: NDArray, counts: NDArray, num: int, rng: np.random.Generator
) -> NDArray:
    """
    Indices of rows, drawn in proportion to squared distance from those before (Arthur and
    Vassilvitskii 2007, k-means++).

    :return: shape ``(num,)``, or fewer where the rest coincide with rows that are drawn.
    """
    chosen = np.zeros(num, dtype=int)
    norms = np.sum(Y**2, axis=1)
    squared = np.ones(len(Y))
    for m in range(num):
        weights = counts * squared
        if not weights.sum() > 0.0:
            return chosen[:m]
        cumulative = np.cumsum(weights)
        # The first entry above a uniform draw has positive weight; a draw that rounds
        # to the total itself is caught by the minimum.
        row = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
        row = min(int(row), int(np.flatnonzero(weights)[-1]))
        chosen[m] = row
        # ‖y - y_row‖², up to rounding, which matters little to a draw
        distance = np.maximum(norms - 2.0 * (Y @ Y[row]) + norms[row], 0.0)
        squared = distance if m == 0 else np.minimum(squared, distance)
        squared[row] = 0.0
    return chosen


def _assign(Y: NDArray, counts: NDArray, centres: NDArray) -> tuple[NDArray, float]:
    """Nearest centre of each row, and the sum of squared distances to it."""
    labels = np.zeros(len(Y), dtype=int)
    norms = np.sum(centres**2, axis=1)
    step = max(1, _BLOCK_ENTRIES // len(centres))
    for start in range(0, len(Y), step):
        block = slice(start, start + step)
        # ‖y - c‖² less ‖y‖², which does not matter to the minimum
        scores = Y[block] @ (-2.0 * centres.T)
        scores += norms
        labels[block] = np.argmin(scores, axis=1)
    loss = float(counts @ np.sum((Y - centres[labels]) ** 2, axis=1))
    return labels, loss


def _label_means(Y: NDArray, counts: NDArray, labels: NDArray, num: int) -> NDArray:
    """Weighted mean of the rows of each label, zero where there is none, [num, D]."""
    entries = (counts.astype(float), (labels, np.arange(len(Y))))
    membership = csr_array(entries, shape=(num, len(Y)))
    weights = np.bincount(labels, weights=counts, minlength=num)
    return (membership @ Y) / np.maximum(weights, 1.0)[:, None]

"""How good a set of inducing points is, before any fit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.spatial import KDTree

from numpyro_sgp._checks import shown
from numpyro_sgp.inducing._host import host_inputs, kernel_diagonal, kernel_matrix
from numpyro_sgp.linalg import default_jitter

# Rows of X over which the explained variance is taken. For a stationary kernel its
# standard error is then at most 0.5 / sqrt(2000), about 0.01.
_VERDICT_ROWS = 2000
_ENOUGH_EXPLAINED = 0.9
# K_uu is taken without jitter. In float32, rounding alone moves the small eigenvalues
# by 1e-7 of the largest.
_CONDITION_LIMIT = {"float64": 1e10, "float32": 1e6}


class NearestPair(NamedTuple):
    """The closest two points of a set."""

    distance: float
    """Euclidean distance, in the units of the inputs."""
    first: int
    """Row of the one point in ``Z`` stacked over the sets of ``O``."""
    second: int
    """Row of the other point, larger than ``first``."""


class InducingVerdict(NamedTuple):
    """
    What can be said of inducing points before a fit, made by :func:`assess_inducing`.

    ``str(verdict)`` is a short paragraph; ``verdict.advice`` is what to change, if
    anything.
    """

    num_inducing: int
    """Number of inducing points ``Z``."""
    num_orthogonal: tuple[int, ...]
    """Number of points in each orthogonal set ``O``."""
    variance_explained: float
    """Share of the prior variance at ``X`` that ``f(Z)`` explains."""
    variance_explained_union: float
    """The same for ``Z`` and all of ``O``; equal to the above without ``O``."""
    condition_number: float
    """Condition number of ``K_uu`` before jitter; infinite if not positive definite."""
    condition_number_orthogonal: tuple[float, ...]
    """Condition number of each ``C_vv``, after jitter."""
    nearest_pair: NearestPair | None
    """The closest two of all points; None where there is one point only."""
    precision: str
    """What the kernel was evaluated in, ``"float64"`` or ``"float32"``."""

    @property
    def advice(self) -> tuple[str, ...]:
        """A sentence for each thing that is poor; empty where nothing is."""
        advice = []
        if self.variance_explained_union < _ENOUGH_EXPLAINED:
            advice.append(
                f"Less than {_ENOUGH_EXPLAINED:.0%} of the prior variance is "
                f"explained: use more points, or start from a longer lengthscale."
            )
        limit = _CONDITION_LIMIT[self.precision]
        if self.condition_number > limit:
            advice.append(
                f"K_uu is ill-conditioned (above {limit:.0e}): points are too close "
                f"together for this kernel, or its lengthscale is too long; use fewer "
                f"points or a shorter lengthscale."
            )
        # After jitter the smallest eigenvalue is at least the jitter; a number near its
        # inverse says that some eigenvalue is nothing but jitter.
        limit = 0.1 / default_jitter(np.dtype(self.precision))
        if any(number > limit for number in self.condition_number_orthogonal):
            advice.append(
                f"C_vv is ill-conditioned (above {limit:.0e}, so held up by jitter): "
                f"orthogonal points are too close to inducing points or to one another "
                f"for this kernel; use fewer of them or a shorter lengthscale."
            )
        if self.nearest_pair is not None and self.nearest_pair.distance == 0.0:
            advice.append(
                f"Points {self.nearest_pair.first} and {self.nearest_pair.second} are "
                f"duplicates: drop or move one of them."
            )
        return tuple(advice)

    def __str__(self) -> str:
        facts = [
            f"{_count(self.num_inducing, 'inducing point')} "
            f"{'explains' if self.num_inducing == 1 else 'explain'} "
            f"{_percent(self.variance_explained)} of the prior variance at the inputs"
        ]
        if self.num_orthogonal:
            sizes = " + ".join(str(number) for number in self.num_orthogonal)
            facts[0] += (
                f", {_percent(self.variance_explained_union)} with {sizes} orthogonal "
                f"{'point' if self.num_orthogonal == (1,) else 'points'}"
            )
        facts[0] += "."
        conditions = f"Condition number: {self.condition_number:.1e} for K_uu"
        if self.num_orthogonal:
            numbers = [f"{number:.1e}" for number in self.condition_number_orthogonal]
            conditions += f", {' and '.join(numbers)} for C_vv"
        facts.append(conditions + ".")
        if (pair := self.nearest_pair) is not None:
            closest = f"The closest points, {pair.first} and {pair.second}, are"
            facts.append(f"{closest} {pair.distance:.2g} apart.")
        return " ".join([*facts, *self.advice])


def assess_inducing(
    kernel: Any, X: ArrayLike, Z: ArrayLike, O: ArrayLike | Sequence[ArrayLike] = ()
) -> InducingVerdict:
    r"""
    Judge inducing points at given hyperparameters, before any fit.

    The share of the prior variance that :math:`\mathbf{u} = f(Z)` explains is

    .. math::

        1 - \frac{\mathrm{tr}(K_{ff} - Q_{ff})}{\mathrm{tr}(K_{ff})}, \qquad
        Q_{ff} = K_{fu} K_{uu}^{-1} K_{uf} ,

    whose numerator is the trace that loosens Titsias's bound [1; 2, eq. 3]. With
    orthogonal points it is also taken with :math:`Z \cup O` for :math:`Z`; their
    covariance is the residual :math:`C_{vv} = K_{vv} - K_{vu} K_{uu}^{-1} K_{uv}`
    [2, eq. 22], given ``Z`` and, for later sets, the sets before.

    ``K_uu`` gets jitter before it is factorised, 1e-8 of the kernel's mean diagonal
    (1e-5 where the kernel's values are float32; tenfold more where that is too little),
    and so does ``C_vv``, after the subtraction. The condition number of ``K_uu`` is the
    one *before* jitter, which would hide what the number is to show; that of ``C_vv``
    is the one after jitter, because without it the small eigenvalues of a difference
    are rounding errors.

    The traces are taken over ``X``, or over a random subset of 2000 of its rows (the
    same at every call) where it has more. Costs :math:`O(N M^2 + M^3)` with N at most
    2000 and M the number of all points; the linear algebra is in float64 on the host.

    **References:**

    1. Titsias, M. (2009). Variational Learning of Inducing Variables in Sparse
       Gaussian Processes. AISTATS.
    2. Shi, J., Titsias, M., Mnih, A. (2020). Sparse Orthogonal Variational Inference
       for Gaussian Processes. AISTATS. https://arxiv.org/abs/1910.10596

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from numpyro_sgp.inducing import assess_inducing
    >>> class Exponential:
    ...     def __call__(self, X1, X2=None):
    ...         return jnp.exp(-jnp.abs(X1 - (X1 if X2 is None else X2).T))
    ...     def diag(self, X):
    ...         return jnp.ones(len(X))
    >>> X = np.linspace(0.0, 1.0, 101)[:, None]
    >>> Z, O = np.array([[0.0], [0.5]]), np.array([[0.5], [1.0]])
    >>> verdict = assess_inducing(Exponential(), X, Z, O)
    >>> print(f"{verdict.variance_explained:.2f}")
    0.73
    >>> verdict.nearest_pair
    NearestPair(distance=0.0, first=1, second=2)
    >>> verdict.advice[-1]
    'Points 1 and 2 are duplicates: drop or move one of them.'

    :param kernel: kernel at concrete hyperparameters; ``kernel(X1, X2)`` is the matrix,
        ``kernel.diag(X)`` its diagonal.
    :param X: inputs, shape ``(N, D)``, N at least 1.
    :param Z: inducing points, shape ``(M, D)``, M at least 1.
    :param O: orthogonal inducing points: a sequence of sets, or one set, each of shape
        ``(M2, D)``.
    :return: an :class:`InducingVerdict`.
    """
    if not callable(kernel) or not callable(getattr(kernel, "diag", None)):
        raise TypeError(
            "kernel must be a kernel, with kernel(X1, X2) and kernel.diag(X), got "
            f"{shown(kernel)}."
        )
    X, _ = host_inputs(X, "X")
    if len(X) == 0:
        raise ValueError(f"X must have at least one row, got shape {X.shape}.")
    sets = [_points(Z, "Z", X.shape[1])]
    # An array of three dimensions is sets of equal size; of two, one set.
    others: Any = O
    if not isinstance(O, list | tuple) and np.ndim(others) == 2:
        others = (O,)
    sets += [_points(points, f"O[{i}]", X.shape[1]) for i, points in enumerate(others)]
    X = verdict_rows(X)

    diagonal, precision = kernel_diagonal(kernel, X)
    if not diagonal.sum() > 0.0:
        raise ValueError(
            "The kernel has no variance at X (the sum of kernel.diag(X) is not "
            "positive), so there is none to explain. Check its hyperparameters."
        )
    jitter = default_jitter(precision)

    points = sets[0][:0]  # the union so far, [M, D]
    L = np.zeros((0, 0))  # chol(K) of the union so far, [M, M]
    A = np.zeros((0, len(X)))  # L⁻¹ K(union, X), [M, N]
    explained, conditions = [], []
    for new in sets:
        K = kernel_matrix(kernel, new, new)
        # The jitter of a residual is relative to the kernel, not to the residual: what
        # the points before have explained leaves rounding errors of the kernel's size.
        scale = np.mean(np.diagonal(K))
        # [2, Alg. 1] with this B for its A, and A for its B and D of all sets.
        B = solve_triangular(L, kernel_matrix(kernel, points, new), lower=True)
        C = K - B.T @ B  # K_uu for Z, else C_vv
        factor = _cholesky(C, jitter * scale)
        shift = jitter * scale if explained else 0.0
        conditions.append(_condition_number(C + shift * np.eye(len(C))))
        residual = kernel_matrix(kernel, new, X) - B.T @ A
        A = np.vstack([A, solve_triangular(factor, residual, lower=True)])
        L = np.block([[L, np.zeros(B.shape)], [B.T, factor]])
        points = np.vstack([points, new])
        # tr(Q) = ‖A‖²
        explained.append(float(np.sum(A**2) / diagonal.sum()))
    return InducingVerdict(
        num_inducing=len(sets[0]),
        num_orthogonal=tuple(len(points) for points in sets[1:]),
        variance_explained=explained[0],
        variance_explained_union=explained[-1],
        condition_number=conditions[0],
        condition_number_orthogonal=tuple(conditions[1:]),
        nearest_pair=_nearest_pair(points),
        precision=str(precision),
    )


def verdict_rows(X: NDArray) -> NDArray:
    """``X``, or the subset of its rows that stands for it in a verdict."""
    if len(X) <= _VERDICT_ROWS:
        return X
    rng = np.random.default_rng(0)
    return X[np.sort(rng.choice(len(X), _VERDICT_ROWS, replace=False))]


def _points(points: ArrayLike, name: str, num_columns: int) -> NDArray:
    points, _ = host_inputs(points, name)
    if len(points) == 0 or points.shape[1] != num_columns:
        raise ValueError(
            f"{name} must have at least one row and as many columns as X, that is "
            f"shape (M, {num_columns}), got {points.shape}."
        )
    return points


def _cholesky(C: NDArray, jitter: float) -> NDArray:
    """Cholesky factor of ``C`` with jitter, tenfold more where that is too little."""
    for growth in range(6):
        try:
            return np.linalg.cholesky(C + jitter * 10.0**growth * np.eye(len(C)))
        except np.linalg.LinAlgError:
            continue
    raise ValueError(
        f"A kernel matrix of {len(C)} inducing points is not positive definite, even "
        f"with jitter {jitter * 1e5:.1e}. Check that the kernel is a covariance."
    )


def _condition_number(C: NDArray) -> float:
    values = np.linalg.eigvalsh(C)
    return float(values[-1] / values[0]) if values[0] > 0.0 else float("inf")


def _nearest_pair(points: NDArray) -> NearestPair | None:
    if len(points) == 1:
        return None
    distances, neighbours = KDTree(points).query(points, k=2)
    first = int(np.argmin(distances[:, 1]))
    # Among coinciding points, a point may be listed after its twin, or not at all.
    second = int(next(row for row in neighbours[first] if row != first))
    return NearestPair(float(distances[first, 1]), *sorted((first, second)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _percent(share: float) -> str:
    # Not "100.0%" while something is left to explain.
    return f"{share:.1%}" if share < 0.999 else f"{share:.4%}"

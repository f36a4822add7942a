"""How inducing points are given, checked and chosen at the start."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.inducing import InducingVariables, initial_inducing
from numpyro_sgp.inducing.variables import PointKernel
from numpyro_sgp.kernels.stationary import Stationary

METHODS = ("kmeans", "greedy", "explained", "random")
#: The number of points that :func:`~numpyro_sgp.fit` chooses by itself.
AUTO = "auto"


def check_set(name: str, index: int, size, start) -> None:
    """
    :param name: of the approximation, for messages.
    :param index: number of the set.
    :param size: how many points were asked for.
    :param start: an array of points, or the method that chooses them.
    :raises TypeError: if the number is no whole number.
    :raises ValueError: if number and points do not fit together.
    """
    what = point_name(index)
    if isinstance(size, str) and size == AUTO and isinstance(start, str):
        size = 1
    if np.ndim(size) > 0:
        raise TypeError(
            f"{name}: the number of inducing points {what} is an array. Pass "
            f"points by name: {'inducing' if index == 0 else 'orthogonal'}=..."
        )
    if size is not None and (
        isinstance(size, bool) or not isinstance(size, int | np.integer)
    ):
        raise TypeError(
            f"{name}: the number of inducing points {what} must be a whole number (or "
            f"'auto', where a method chooses them, for sgp.fit), got {size!r}."
        )
    if isinstance(start, str) and start not in METHODS:
        raise ValueError(
            f"{name}: inducing points {what} start by one of {METHODS} or from an "
            f"array, got {start!r}."
        )
    if isinstance(start, str):
        if size is None:
            raise ValueError(
                f"{name}: give the number of inducing points {what}, or the "
                "points themselves as an array."
            )
    elif np.ndim(start) < 2:
        raise ValueError(
            f"{name}: the inducing points {what} must have the shape (M, D), got "
            f"{np.shape(start)}."
        )
    elif size is not None and size != np.shape(start)[-2]:
        raise ValueError(
            f"{name}: {size} inducing points {what} were asked for, but the "
            f"array given has {np.shape(start)[-2]} rows."
        )
    if size is not None and size < 1:
        raise ValueError(
            f"{name}: the number of inducing points {what} must be positive, got {size}."
        )


def choose_points(
    sets: list, prior: GaussianProcess, X: np.ndarray, share: bool, seed: int
) -> tuple[Array | InducingVariables, ...]:
    """
    Starting inducing points of each set.

    :param sets: size and start of each set.
    :param prior: the process at the site with its initial hyperparameters.
    :param X: inputs to choose from, shape ``(N, D)``.
    :param share: whether latent functions share points.
    :param seed: of the initialiser.
    :return: arrays of shape ``(M_l, D)``, or ``(*batch, M_l, D)`` where each latent
        function has its own; inter-domain sets as their objects.
    :raises ValueError: if X has fewer distinct rows than points asked for, or a given
        array has another number of columns.
    """
    points: list = [points_of(start) for _, start in sets]
    kinds = [_kind(start) for _, start in sets]
    # Sets of one kind are chosen together, so that they differ.
    for kind in dict.fromkeys(kinds):
        chosen = [
            i for i, p in enumerate(points) if kinds[i] == kind and isinstance(p, str)
        ]
        methods = {points[i] for i in chosen}
        if not chosen:
            continue
        if len(methods) > 1:
            raise ValueError(
                f"Choose all sets of inducing points by one method, got {methods}."
            )
        rows = X
        kernel: MeanKernel | PointKernel = MeanKernel(prior.kernel)
        if kind is not None:
            example = sets[chosen[0]][1]
            rng = np.random.default_rng(seed)
            rows = example.candidates(prior.kernel, X, rng)
            kernel = PointKernel(prior.kernel, example)
        start = initial_inducing(
            rows,
            sets[chosen[0]][0],
            methods.pop(),
            kernel=kernel,
            num_orthogonal=tuple(sets[i][0] for i in chosen[1:]),
            seed=seed,
        )
        for i, new in zip(chosen, (start.Z, *start.O), strict=True):
            points[i] = new
    dim = prior.X.shape[-1]
    for i, given in enumerate(points):
        if kinds[i] is None and np.shape(given)[-1] != dim:
            raise ValueError(
                f"the inducing points {point_name(i)} have {np.shape(given)[-1]} "
                f"columns, but the inputs X have {dim}."
            )
    points = [jnp.asarray(p, prior.X.dtype) for p in points]
    if not share:
        batch = prior.batch_shape
        points = [jnp.broadcast_to(p, (*batch, *p.shape[-2:])) for p in points]
    return tuple(of_kind(start, p) for (_, start), p in zip(sets, points, strict=True))


def of_kind(start, points) -> Array | InducingVariables:
    """The points of a set as inducing variables of its kind."""
    return start.with_points(points) if isinstance(start, InducingVariables) else points


@jax.tree_util.register_pytree_node_class
class MeanKernel:
    """
    The mean of a batch of kernels, for choosing points that serve all of them.

    :param kernel: a kernel of any batch shape.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def tree_flatten(self):
        return (self.kernel,), None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)

    @property
    def is_isotropic(self) -> bool:
        """Whether all stationary parts have one lengthscale for all columns."""
        parts = jax.tree.leaves(self.kernel, is_leaf=lambda k: isinstance(k, Stationary))
        found = [part for part in parts if isinstance(part, Stationary)]
        return bool(found) and all(part.is_isotropic for part in found)

    def __call__(self, X1, X2=None):
        """Matrix of shape ``(N1, N2)``."""
        same = X2 is None or X2 is X1
        X1 = jnp.asarray(X1)
        K = self.kernel(X1, X1 if same else jnp.asarray(X2))
        return _mean_of(K, K.ndim - 2)

    def diag(self, X):
        """Diagonal of shape ``(N,)``."""
        variance = self.kernel.diag(jnp.asarray(X))
        return _mean_of(variance, variance.ndim - 1)


def _mean_of(values, num_axes: int):
    """The mean over the first axes; without any, no program of a mean over none."""
    return values.mean(axis=tuple(range(num_axes))) if num_axes else values


def points_of(start):
    """The points of a set, or the method that chooses them."""
    return start.points if isinstance(start, InducingVariables) else start


def _kind(start):
    """What sets of inducing variables that are chosen together share; None for points."""
    if not isinstance(start, InducingVariables):
        return None
    fixed = (f"{k}={v}" for k, v in sorted(vars(start).items()) if k != "points")
    return type(start), *fixed


def point_name(index: int) -> str:
    """What a set of inducing points is called."""
    return "Z" if index == 0 else "O" if index == 1 else f"O{index}"

"""Inducing variables that are not values of f: what a kind of them must tell."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_sgp._checks import numbers
from numpyro_sgp.kernels import Convolutional, Scaled, Sum
from numpyro_sgp.kernels.base import append_axes
from numpyro_sgp.kernels.pytrees import frozen_pytree, static_field

__all__ = ["InducingPatches", "InducingVariables", "covariance"]

# What inducing patches are chosen from: as many as initialisers look at.
_IMAGES, _PATCHES_OF_AN_IMAGE = 2_000, 10


@frozen_pytree
class InducingVariables:
    r"""
    Inter-domain inducing variables, and the base class of their kinds: linear functionals
    :math:`u_m = L(z_m)[f]` of the process, one for each row of ``points``.

    Any approximation takes an object of a kind where it takes points, as in
    ``SVGP(inducing=InducingPatches(Z))``, or, to choose rows by a method,
    ``SVGP(50, inducing=InducingPatches("kmeans"))``; sets of SOLVE-GP may be of different
    kinds, or ordinary points, which are plain arrays. ``points`` becomes the parameter of
    the set (``{site}_auto_Z``); what else the object holds is fixed.

    A new kind is a subclass (a frozen dataclass and a pytree by itself) with a method
    :meth:`covariance`::

        class Slopes(InducingVariables):
            "Derivatives f'(z) of functions of one variable."

            def covariance(self, kernel, other):
                k = lambda x, y: kernel(x[None, None], y[None, None])[0, 0]
                if isinstance(other, Slopes):
                    k = jax.grad(jax.grad(k), argnums=1)
                    other = other.points
                elif isinstance(other, InducingVariables):
                    return NotImplemented
                else:
                    k = jax.grad(k)
                rows = jax.vmap(k, (None, 0))
                return jax.vmap(rows, (0, None))(self.points[:, 0], other[:, 0])

    It may define :meth:`candidates` too, if rows to start from are not rows of X.

    What needs points among the inputs (verdicts on a start, ``sample_functions``) refuses
    other kinds.

    :param points: what the functionals are at, one in each row, shape ``(*batch, M, E)``;
        or the method that chooses them: ``"kmeans"``, ``"greedy"``, ``"explained"`` or
        ``"random"``.

    **References:**

    1. Lazaro-Gredilla, Figueiras-Vidal (2009). Inter-domain Gaussian Processes for Sparse
       Inference using Inducing Features. NeurIPS.
    2. van der Wilk, Dutordoir, John, Artemev, Adam, Hensman (2020). A Framework for
       Interdomain and Multioutput Gaussian Processes. https://arxiv.org/abs/2003.01115

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> Z = sgp.SmoothedPoints(jnp.linspace(0.0, 3.0, 4)[:, None], width=0.2)
    >>> isinstance(Z, sgp.InducingVariables), Z.covariance(sgp.kernels.RBF(), Z).shape
    (True, (4, 4))
    """

    points: ArrayLike | str

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        frozen_pytree(cls)

    def __post_init__(self):
        if isinstance(self.points, list | tuple):
            points = numbers(self.points, f"{type(self).__name__}: points")
            object.__setattr__(self, "points", points)
        if 0 in np.shape(self.points):
            raise ValueError(
                f"{type(self).__name__}: there are no points in an array of shape "
                f"{np.shape(self.points)}. Give at least one row and one column."
            )

    def covariance(
        self, kernel: Any, other: InducingVariables | Array
    ) -> Array:  # or NotImplemented
        """
        Covariance of these variables with others.

        :param kernel: the kernel of f.
        :param other: variables of this kind (the very object ``self`` for K_uu); an array
            of inputs, shape ``(*b, N, D)``, for f there; or variables of another kind, for
            which a kind that does not know it returns ``NotImplemented``, and is asked in
            turn.
        :return: shape ``(*batch, M, M2)`` or ``(*batch, M, N)``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define covariance.")

    def candidates(
        self, kernel: Any, X: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """
        Rows to choose the starting points from; rows of X if not overridden.

        :param kernel: the kernel of f with its initial hyperparameters.
        :param X: inputs of the data, shape ``(N, D)``.
        :param rng: for candidates that are drawn.
        :return: shape ``(num, E)``.
        """
        return X

    def with_points(self, points: ArrayLike | str) -> InducingVariables:
        """The same kind with other points."""
        new = object.__new__(type(self))
        for name, value in vars(self).items():
            object.__setattr__(new, name, value)
        object.__setattr__(new, "points", points)
        return new

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``points``."""
        return np.shape(self.points)

    @property
    def ndim(self) -> int:
        """Number of axes of ``points``."""
        return len(self.shape)

    def __len__(self):
        return self.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of ``points``."""
        return self.points.dtype  # type: ignore[union-attr]


def covariance(kernel: Any, first: Any, second: Any) -> Array:
    """
    Covariance between two sets of inducing variables, by their kinds and the kernel.

    :param kernel: the kernel of f.
    :param first: an :class:`InducingVariables`, or an array of inputs for values of f.
    :param second: likewise; the very object ``first`` for the same variables.
    :return: shape ``(*batch, M1, M2)``.
    :raises TypeError: if neither kind knows the other.
    """
    if isinstance(first, InducingVariables):
        found = first.covariance(kernel, second)
        if found is not NotImplemented:
            return found
    elif not isinstance(second, InducingVariables):
        return kernel(first, second)
    if isinstance(second, InducingVariables):
        found = second.covariance(kernel, first)
        if found is not NotImplemented:
            return jnp.swapaxes(found, -1, -2)
    kinds = [type(x).__name__ for x in (first, second)]
    raise TypeError(
        f"There is no covariance between inducing variables {kinds[0]} and {kinds[1]} "
        f"under {type(kernel).__name__}: teach {kinds[0]}.covariance about {kinds[1]}, or "
        "use one kind for all sets."
    )


class PointKernel:
    """
    The covariance of one kind as a kernel of its points, to choose them by; averaged over
    a batch of kernels.

    :param kernel: the kernel of f.
    :param kind: an :class:`InducingVariables`.
    """

    def __init__(self, kernel: Any, kind: InducingVariables):
        self.kernel = kernel
        self.kind = kind

    def __call__(self, Z1, Z2=None):
        """Matrix of shape ``(M1, M2)``."""
        first = self.kind.with_points(jnp.asarray(Z1))
        same = Z2 is None or Z2 is Z1
        second = first if same else self.kind.with_points(jnp.asarray(Z2))
        K = covariance(self.kernel, first, second)
        return K.mean(axis=tuple(range(K.ndim - 2)))

    def diag(self, Z):
        """Diagonal of shape ``(M,)``."""
        return jax.lax.map(lambda z: self(z[None])[0, 0], jnp.asarray(Z), batch_size=1024)


class InducingPatches(InducingVariables):
    r"""
    Values :math:`u_m = g(z_m)` of the patch function of a
    :class:`~numpyro_sgp.kernels.Convolutional` kernel (van der Wilk et al. 2017, eq. 15),

    .. math::

        K_{uu} = k_g(Z, Z), \qquad
        K_{uf} = \frac{1}{P} \sum_p w_p\, k_g(z_m, x_n^{[p]}) .

    The kernel may be a multiple of a convolutional one, or a sum with one convolutional
    summand, whose patch function is meant. Chosen by a method, they start from random
    patches of the data.

    :param points: patches, shape ``(*batch, M, h * w * C)``, the channel running fastest;
        for a kernel with ``locations``, ``(*batch, M, h * w * C + 2)``, row and column
        of their places in the last two columns. Or the method that chooses them.
    :param places: where chosen patches are in a kernel with ``locations``: ``"own"``,
        where they come from, or ``"uniform"``, anywhere.
    :raises TypeError: when used with a kernel that has no convolutional part, or several.

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.inducing.covariances import cross_covariance
    >>> kernel = sgp.kernels.Convolutional(sgp.kernels.RBF(), (4, 4), 3)
    >>> Z = sgp.InducingPatches(jnp.zeros((5, 9)))
    >>> cross_covariance(kernel, (Z,), jnp.ones((2, 16))).shape
    (5, 2)
    >>> sgp.SOLVEGP(50, 50, inducing=sgp.InducingPatches("kmeans")).num_points
    100
    """

    places: str = static_field(default="own")

    def __post_init__(self):
        super().__post_init__()
        if self.places not in ("own", "uniform"):
            raise ValueError(
                f"InducingPatches: places must be 'own' or 'uniform', got {self.places!r}."
            )

    def covariance(self, kernel: Any, other: InducingVariables | Array) -> Array:
        if isinstance(other, InducingPatches):
            kernel, scale = _convolutional(kernel)
            points = self.points if other is self else other.points
            return scale * kernel.patch_covariance(self.points, points)
        if isinstance(other, InducingVariables):
            return NotImplemented
        kernel, scale = _convolutional(kernel)
        return scale * kernel.patch_image_covariance(self.points, other)

    def candidates(
        self, kernel: Any, X: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Random patches of the rows of X."""
        kernel, _ = _convolutional(kernel)
        images = X[rng.integers(len(X), size=min(_IMAGES, 10 * len(X)))]
        patches = np.asarray(kernel.patches(images), X.dtype)  # [num, P, D]
        which = rng.integers(kernel.num_patches, size=(len(images), _PATCHES_OF_AN_IMAGE))
        chosen = np.take_along_axis(patches, which[..., None], axis=1)
        chosen = chosen.reshape(-1, patches.shape[-1])
        if kernel.locations is None:
            return chosen
        places = kernel.places[which.ravel()].astype(X.dtype)
        if self.places == "uniform":
            places = rng.uniform(size=places.shape) * kernel.places.max(axis=0)
        return np.hstack([chosen, places.astype(X.dtype)])


def _convolutional(kernel: Any) -> tuple[Convolutional, ArrayLike]:
    """The convolutional kernel in a kernel, and what it is multiplied by."""
    found = list(_parts(kernel, 1.0))
    if len(found) != 1:
        raise TypeError(
            "InducingPatches need a kernels.Convolutional, a multiple of one, or a sum "
            f"with exactly one, but the kernel is a {type(kernel).__name__} with "
            f"{len(found)}. Use points of the inputs in their place."
        )
    return found[0]


def _parts(kernel, scale):
    if isinstance(kernel, Convolutional):
        yield kernel, scale
    elif isinstance(kernel, Scaled):
        yield from _parts(kernel.kernel, scale * append_axes(kernel.scale, 2))
    elif isinstance(kernel, Sum):
        yield from _parts(kernel.left, scale)
        yield from _parts(kernel.right, scale)

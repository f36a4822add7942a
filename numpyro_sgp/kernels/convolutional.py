"""The convolutional kernel: one function over the patches of an image."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from numpyro_sgp.kernels.adapters import as_kernel
from numpyro_sgp.kernels.base import Kernel, batch_shape_of, broadcast_batches
from numpyro_sgp.kernels.pytrees import frozen_pytree, static_field

__all__ = ["Convolutional", "extract_patches"]

# Pairs of patches whose covariances are held at one time: what fits into the cache of a
# processor's core, which is three times as fast as all at once, or what fills a GPU.
_MAX_PAIRS_CPU, _MAX_PAIRS = 2**18, 2**26


def extract_patches(
    images: ArrayLike,
    image_shape: tuple[int, ...],
    patch_size: int | tuple[int, int],
    stride: int = 1,
) -> Array:
    """
    All patches of images, row by row from the top left.

    For a hidden layer of a deep convolutional GP, which is a function over patches with
    an image of its values as output, reshape them to a table of inputs and its values to
    images; its inducing points are then ordinary points, of the size of a patch::

        patches = extract_patches(X, (28, 28), 5)               # (N, 576, 25)
        g = numpyro.sample("g", GaussianProcess(RBF(), patches.reshape(-1, 25)))
        X = g.reshape(-1, 24 * 24)                              # images of (24, 24)

    :param images: flat images, shape ``(*b, N, H * W * C)``, the channel running fastest.
    :param image_shape: ``(H, W)`` or ``(H, W, C)``.
    :param patch_size: height and width of a patch, or one number for both.
    :param stride: pixels from one patch to the next.
    :return: shape ``(*b, N, P, h * w * C)``, with
        ``P = ((H - h) / stride + 1) * ((W - w) / stride + 1)``; the channel runs fastest
        in a patch, then the column, then the row.
    :raises ValueError: if patches and stride do not cover the image exactly, or
        ``images`` has another number of columns than ``image_shape`` has pixels.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.kernels import extract_patches
    >>> print(extract_patches(jnp.arange(9)[None], (3, 3), 2)[0])
    [[0 1 3 4]
     [1 2 4 5]
     [3 4 6 7]
     [4 5 7 8]]
    """
    (H, W, C), (h, w), stride = _sizes(image_shape, patch_size, stride)
    images = jnp.asarray(images)
    if images.ndim < 2 or images.shape[-1] != H * W * C:
        raise ValueError(
            f"Images of {H} x {W} pixels with {C} channel(s) are rows of {H * W * C} "
            f"numbers, shape (N, {H * W * C}), got {images.shape}."
        )
    batch = images.shape[:-1]
    images = images.reshape(*batch, H, W, C)
    rows, columns = patch_grid(image_shape, patch_size, stride)
    end_row, end_column = (rows - 1) * stride + 1, (columns - 1) * stride + 1
    # A slice for each pixel of a patch: its transpose is a pad, not a scatter.
    pixels = [
        images[..., i : i + end_row : stride, j : j + end_column : stride, :]
        for i in range(h)
        for j in range(w)
    ]
    return jnp.stack(pixels, axis=-2).reshape(*batch, rows * columns, h * w * C)


def patch_grid(
    image_shape: tuple[int, ...], patch_size: int | tuple[int, int], stride: int = 1
) -> tuple[int, int]:
    """
    How many patches an image has, down and across; arguments as :func:`extract_patches`
    has them.

    >>> patch_grid((28, 28), 6, 2)
    (12, 12)
    """
    (H, W, _), (h, w), stride = _sizes(image_shape, patch_size, stride)
    return (H - h) // stride + 1, (W - w) // stride + 1


@frozen_pytree
class Convolutional(Kernel):
    r"""
    The convolutional kernel [1], of a function of images that is the mean of one function
    of their patches, :math:`g \sim GP(0, k_g)`,

    .. math::

        f(x) = \frac{1}{P} \sum_{p=1}^P w_p\, g(x^{[p]}), \qquad
        k(x, x') = \frac{1}{P^2} \sum_{p, p'} w_p w_{p'} k_g(x^{[p]}, x'^{[p']}) .

    With ``locations`` the patch kernel is translation insensitive (TICK, [2]):
    :math:`k_g` times a kernel of where the two patches are, in pixels from the top left.

    Use it with :class:`~numpyro_sgp.inducing.InducingPatches`, which need
    :math:`O(N M P)` patch covariances for N images and M inducing patches.
    :meth:`diag` needs :math:`O(N P^2)`, and the matrix :math:`O(N^2 P^2)`; at most
    ``batch_size`` images are at work at one time, also for gradients.

    :param base: kernel of patches, with ``h * w * C`` columns.
    :param image_shape: ``(H, W)`` or ``(H, W, C)``; inputs are flat images, shape
        ``(*b, N, H * W * C)``, the channel running fastest.
    :param patch_size: height and width of a patch, or one number for both.
    :param stride: pixels from one patch to the next.
    :param weights: :math:`w`, shape ``(P,)`` or ``(*batch, P)``; None for ones.
    :param locations: kernel of the places of patches, two columns (row and column in
        pixels); None for a translation invariant function.
    :param batch_size: images for which patch covariances are held at one time; None for
        as many as suit the device.
    :raises ValueError: if patches and stride do not cover the image exactly, or weights
        or inputs have another shape.

    **References:**

    1. van der Wilk, Rasmussen, Hensman (2017). Convolutional Gaussian Processes. NeurIPS.
       https://arxiv.org/abs/1709.01894
    2. Dutordoir, van der Wilk, Artemev, Hensman (2020). Bayesian Image Classification with
       Deep Convolutional Gaussian Processes. AISTATS. https://arxiv.org/abs/1902.05888

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.kernels import RBF, Convolutional, Matern32
    >>> image = jnp.zeros((8, 8)).at[2:4, 2:4].set(1.0)
    >>> X = jnp.stack([image, jnp.roll(image, 2, axis=1)]).reshape(2, 64)
    >>> print(Convolutional(RBF(), (8, 8), 3)(X).round(3))
    [[0.543 0.543]
     [0.543 0.543]]
    >>> print(Convolutional(RBF(), (8, 8), 3, locations=Matern32(1.0, 3.0))(X).round(3))
    [[0.281 0.265]
     [0.265 0.281]]
    """

    base: Any
    image_shape: tuple[int, ...] = static_field()
    patch_size: int | tuple[int, int] = static_field()
    stride: int = static_field(default=1)
    weights: ArrayLike | None = None
    locations: Any = None
    batch_size: int | None = static_field(default=None)

    def __post_init__(self):
        object.__setattr__(self, "base", as_kernel(self.base))
        if self.locations is not None:
            object.__setattr__(self, "locations", as_kernel(self.locations))
        shape, patch, stride = _sizes(self.image_shape, self.patch_size, self.stride)
        object.__setattr__(self, "image_shape", shape)
        object.__setattr__(self, "patch_size", patch)
        object.__setattr__(self, "stride", stride)
        if self.weights is not None:
            object.__setattr__(self, "weights", jnp.asarray(self.weights))
            if self.weights.shape[-1:] != (self.num_patches,):
                raise ValueError(
                    f"Convolutional: weights has shape {self.weights.shape}, but there "
                    f"are {self.num_patches} patches: give it the shape "
                    f"({self.num_patches},), or None for ones."
                )
        if self.batch_size is not None and not self.batch_size >= 1:
            raise ValueError(
                f"Convolutional: batch_size must be positive or None, got "
                f"{self.batch_size!r}."
            )
        broadcast_batches(self, self._batches)

    @property
    def _batches(self) -> dict[str, tuple[int, ...]]:
        weights = () if self.weights is None else np.shape(self.weights)[:-1]
        place = () if self.locations is None else batch_shape_of(self.locations)
        return {"base": batch_shape_of(self.base), "weights": weights, "locations": place}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*self._batches.values())

    @property
    def patch_dim(self) -> int:
        """Columns of an inducing patch: ``h * w * C``, and two of its place, if it has."""
        (h, w), C = self._patch, self.image_shape[2]
        return h * w * C + self._place_dim

    @property
    def _patch(self) -> tuple[int, int]:
        return cast(tuple[int, int], self.patch_size)  # since `__post_init__`

    @property
    def _place_dim(self) -> int:
        return 0 if self.locations is None else 2

    @property
    def num_patches(self) -> int:
        """Number P of patches of an image."""
        return len(self.places)

    @property
    def places(self) -> np.ndarray:
        """Top left pixel of each patch, row and column, shape ``(P, 2)``."""
        grid = patch_grid(self.image_shape, self.patch_size, self.stride)
        return np.indices(grid).reshape(2, -1).T * self.stride

    def patches(self, X: ArrayLike) -> Array:
        """
        The patches of images, without their places.

        :param X: flat images, shape ``(*b, N, H * W * C)``.
        :return: shape ``(*b, N, P, h * w * C)``.
        """
        patches = extract_patches(X, self.image_shape, self.patch_size, self.stride)
        if jnp.issubdtype(patches.dtype, jnp.floating):
            return patches
        return patches * 1.0

    def patch_covariance(self, Z1: Array, Z2: Array) -> Array:
        """
        Covariance of g between two sets of patches, k_g: K_uu of inducing patches.

        :param Z1: patches (and places), shape ``(*b1, M1, patch_dim)``.
        :param Z2: likewise; the very object ``Z1`` for the same patches.
        :return: shape ``(*batch, M1, M2)``.
        """
        patch1, place1 = self._split(Z1)
        patch2, place2 = (patch1, place1) if Z2 is Z1 else self._split(Z2)
        K = self.base(patch1, patch2)
        return K if self.locations is None else K * self.locations(place1, place2)

    def patch_image_covariance(self, Z: Array, X: ArrayLike) -> Array:
        """
        Covariance of g at patches with f, the mean over p of w_p k_g(z, x[p]): K_uf of
        inducing patches.

        :param Z: patches (and places), shape ``(*b, M, patch_dim)``.
        :param X: flat images, shape ``(*b, N, H * W * C)``.
        :return: shape ``(*batch, M, N)``.
        """
        patch, place = self._split(Z)
        weights = self._weights(patch.dtype)[..., :, None]  # [P, 1]
        if self.locations is not None:
            weights = weights * self.locations(self._places(patch.dtype), place)

        def covariance(image):
            """[P, patch_dim] -> [M]"""
            return jnp.sum(self.base(image, patch) * weights, axis=-2)

        pairs = patch.shape[-2] * math.prod(patch.shape[:-2])
        return self._over_images(covariance, self.patches(X), pairs)

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        patches1 = self.patches(X1)
        patches2 = patches1 if X2 is None or X2 is X1 else self.patches(X2)
        weights = self._pair_weights(patches1.dtype)

        def row(image):
            """[P, patch_dim] -> [N2]"""

            def entry(other):
                return jnp.sum(self.base(image, other) * weights, axis=(-2, -1))

            return self._over_images(entry, patches2, self.num_patches)

        rows = lax.map(row, jnp.moveaxis(patches1, -3, 0))
        return jnp.moveaxis(rows, 0, -2)

    def diag(self, X: ArrayLike) -> Array:
        patches = self.patches(X)
        weights = self._pair_weights(patches.dtype)

        def variance(image):
            """[P, patch_dim] -> []"""
            copied = image + 0.0  # another array, of which a White kernel is zero as above
            return jnp.sum(self.base(image, copied) * weights, axis=(-2, -1))

        return self._over_images(variance, patches, self.num_patches)

    def _over_images(self, fn: Callable, patches: Array, pairs: int) -> Array:
        """
        ``fn`` of the patches of each image, in chunks, computed again for gradients.

        :param patches: shape ``(*b, N, P, D)``.
        :param pairs: with how many others each patch is paired.
        :return: the values of ``fn`` along a new last axis.
        """
        images = jnp.moveaxis(patches, -3, 0)
        pairs = pairs * math.prod(images.shape[1:-1]) * math.prod(self.batch_shape)
        limit = _MAX_PAIRS_CPU if jax.default_backend() == "cpu" else _MAX_PAIRS
        size = self.batch_size or max(1, limit // pairs)
        fn = jax.checkpoint(fn)
        if len(images) <= size:
            values = jax.vmap(fn)(images)
        else:
            values = lax.map(fn, images, batch_size=size)
        return jnp.moveaxis(values, 0, -1)

    def _weights(self, dtype) -> Array:
        """w / P, shape ``(*batch, P)``."""
        if self.weights is None:
            return jnp.full(self.num_patches, 1.0 / self.num_patches, dtype)
        return jnp.asarray(self.weights) / self.num_patches

    def _pair_weights(self, dtype) -> Array:
        """w_p w_p' / P^2, times TICK's covariance of places; shape ``(*batch, P, P)``."""
        weights = self._weights(dtype)
        weights = weights[..., :, None] * weights[..., None, :]
        if self.locations is None:
            return weights
        places = self._places(dtype)
        return weights * self.locations(places, places)

    def _places(self, dtype) -> Array:
        return jnp.asarray(self.places, dtype)

    def _split(self, Z: ArrayLike) -> tuple[Array, Array]:
        """Patches and their places."""
        Z = jnp.asarray(Z)
        if Z.ndim < 2 or Z.shape[-1] != self.patch_dim:
            (h, w), C = self._patch, self.image_shape[2]
            place = ", and row and column of its place" if self._place_dim else ""
            raise ValueError(
                f"Inducing patches for {h} x {w} pixels with {C} channel(s){place} have "
                f"the shape (M, {self.patch_dim}), got {Z.shape}."
            )
        end = self.patch_dim - self._place_dim
        return Z[..., :end], Z[..., end:]


def _sizes(image_shape, patch_size, stride):
    """(H, W, C), (h, w) and the stride as ints, checked."""
    try:
        shape = tuple(operator.index(n) for n in image_shape)
        if not isinstance(patch_size, tuple | list):
            patch_size = (patch_size, patch_size)
        patch, step = tuple(operator.index(n) for n in patch_size), operator.index(stride)
    except TypeError:
        shape, patch, step = (), (), 0
    shape = (*shape, 1) if len(shape) == 2 else shape
    if len(shape) != 3 or len(patch) != 2 or min(*shape, *patch, step) < 1:
        raise ValueError(
            "Give image_shape as (H, W) or (H, W, C), patch_size as a number or (h, w), "
            f"and stride as a number, all positive Python ints; got {image_shape!r}, "
            f"{patch_size!r} and {stride!r}."
        )
    for size, length in zip(shape[:2], patch, strict=True):
        if length > size or (size - length) % step or (step > length and size > length):
            fits = [n for n in range(step, size + 1) if (size - n) % step == 0]
            raise ValueError(
                f"Patches of {patch[0]} x {patch[1]} pixels with stride {step} do not "
                f"cover an image of {shape[0]} x {shape[1]} exactly: sizes that do for "
                f"{size} pixels are {fits[:6]}. Choose another patch_size or stride, or "
                "pad the images."
            )
    return shape, patch, step

"""Prior mean functions: any callable, and those that most models use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import floating, real
from numpyro_sgp.linalg import matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constant:
    """
    The same mean at every input.

    :param value: shape ``(*batch,)``, one for each latent function.

    >>> import jax.numpy as jnp
    >>> Constant(2.0)(jnp.zeros((3, 1))).tolist()
    [2.0, 2.0, 2.0]
    """

    value: ArrayLike = 0.0

    def __call__(self, X: Array) -> Array:
        """Mean at ``X``, shape ``(*batch, N)``."""
        X = floating(X)
        value = jnp.asarray(self.value, X.dtype)[..., None]
        batch = jnp.broadcast_shapes(value.shape[:-1], X.shape[:-2])
        return jnp.broadcast_to(value, (*batch, X.shape[-2]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Linear:
    """
    ``X @ weights + bias``.

    :param weights: shape ``(*batch, D)``.
    :param bias: shape ``(*batch,)``.

    >>> import jax.numpy as jnp
    >>> Linear(jnp.array([1.0, 2.0]), 0.5)(jnp.ones((3, 2))).tolist()
    [3.5, 3.5, 3.5]
    """

    weights: Array
    bias: ArrayLike = 0.0

    def __call__(self, X: Array) -> Array:
        """Mean at ``X``, shape ``(*batch, N)``."""
        X = floating(X)
        weights = jnp.asarray(self.weights, X.dtype)
        if weights.shape[-1] != X.shape[-1]:
            raise ValueError(
                f"A Linear mean with weights of shape {weights.shape} is for inputs with "
                f"{weights.shape[-1]} columns, but X has {X.shape[-1]}."
            )
        linear = matmul(X, weights[..., None])[..., 0]
        return linear + jnp.asarray(self.bias, X.dtype)[..., None]


def identity(X: Array) -> Array:
    """
    The inputs themselves, one latent function for each column: the mean of an inner layer
    of a deep GP that is as wide as its input (Salimbeni & Deisenroth 2017).

    :param X: inputs, shape ``(N, D)``.
    :return: shape ``(D, N)``.

    >>> import jax.numpy as jnp
    >>> identity(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).tolist()
    [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    """
    return jnp.swapaxes(X, -1, -2)


def pca(X: ArrayLike, num_components: int) -> Linear:
    """
    Principal components of the inputs, the largest first: the mean of an inner layer that
    is narrower than its input (Salimbeni & Deisenroth 2017).

    :param X: all inputs, shape ``(N, D)``, known (not a traced minibatch).
    :param num_components: number Q, at most D.
    :return: a mean with batch shape ``(Q,)``, with the components centred and in the units
        of X; each points to where its largest loading is positive.
    :raises ValueError: if X is not a table of known, finite numbers, or there are fewer
        columns than components.

    >>> import numpy as np
    >>> X = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> print(pca(X, 1)(X).round(3))
    [[-1.414  0.     1.414]]
    """
    if not not_jax_tracer(X):
        raise ValueError(
            "pca needs known inputs, but X is traced (a minibatch, or inside jit). Make "
            "the mean once, outside the model: mean = means.pca(X, num_components)."
        )
    X = np.asarray(X)
    if X.ndim != 2 or not 1 <= num_components <= X.shape[1]:
        raise ValueError(
            f"pca needs inputs of shape (N, D) and from 1 to D components, got the shape "
            f"{X.shape} and {num_components} components."
        )
    if not np.isfinite(X).all():
        raise ValueError("pca needs finite inputs, but X has NaN or infinite values.")
    dtype, X = floating(X).dtype, X.astype(np.float64)
    centre = X.mean(axis=0)
    _, axes = np.linalg.eigh((X - centre).T @ (X - centre))
    axes = axes.T[::-1][:num_components]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    return Linear(jnp.asarray(axes, dtype), jnp.asarray(-axes @ centre, dtype))


def random_filters(
    patch_shape: tuple[int, int, int], num_channels: int, seed: int = 0
) -> Linear:
    """
    Linear filters of patches with random weights, uniform as Glorot & Bengio (2010) have
    them: the mean of an image-valued layer of a deep convolutional GP.

    :param patch_shape: height, width and channels ``(h, w, C)`` of a patch.
    :param num_channels: of the image that the filters make.
    :param seed: of the weights.
    :return: a mean of patches, shape ``(num, h * w * C)``, with batch shape
        ``(num_channels,)``.
    :raises ValueError: if ``patch_shape`` is not three numbers, or one is not positive.

    >>> random_filters((5, 5, 3), 10).weights.shape
    (10, 75)
    """
    sizes = (*patch_shape, num_channels)
    if len(sizes) != 4 or min(sizes) < 1:
        raise ValueError(
            f"random_filters needs a patch_shape (h, w, C) and num_channels, all positive, "
            f"got {patch_shape!r} and {num_channels!r}."
        )
    h, w, C = patch_shape
    limit = np.sqrt(6.0 / (h * w * (C + num_channels)))
    rng = np.random.default_rng(seed)
    return Linear(jnp.asarray(rng.uniform(-limit, limit, (num_channels, h * w * C))))


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["function"])
@dataclass(frozen=True)
class _Function:
    """A plain Python callable, static where a distribution is traced."""

    function: Callable[[Array], Array]

    def __call__(self, X: Array) -> Array:
        return self.function(X)


def as_mean(mean: Any) -> Callable[[Array], Array]:
    """
    A mean function that is a JAX pytree.

    :param mean: None (zero), a constant of shape ``(*batch,)``, or a callable from
        inputs ``(N, D)`` to means ``(*batch, N)``.
    """
    if mean is None:
        return Constant(0.0)
    if isinstance(mean, type):
        raise TypeError(
            f"The mean is the class {mean.__name__}: give an instance of it, such as "
            f"{mean.__name__}(...)."
        )
    if callable(mean):
        is_leaf = jax.tree_util.all_leaves([mean])
        return _Function(mean) if is_leaf else mean
    real(mean, "A mean that is no function")
    return Constant(mean)

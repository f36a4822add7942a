"""Prior mean functions: any callable, and the two that most models use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


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
        weights = jnp.asarray(self.weights, X.dtype)
        linear = jnp.matmul(X, weights[..., None])[..., 0]
        return linear + jnp.asarray(self.bias, X.dtype)[..., None]


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["function"])
@dataclass(frozen=True)
class _Function:
    """A plain Python callable, static where a distribution is traced."""

    function: Callable[[Array], Array]

    def __call__(self, X: Array) -> Array:
        return self.function(X)


def as_mean(mean) -> Callable[[Array], Array]:
    """
    A mean function that is a JAX pytree.

    :param mean: None (zero), a constant of shape ``(*batch,)``, or a callable from
        inputs ``(N, D)`` to means ``(*batch, N)``.
    """
    if mean is None:
        return Constant(0.0)
    if callable(mean):
        is_leaf = jax.tree_util.all_leaves([mean])
        return _Function(mean) if is_leaf else mean
    return Constant(mean)

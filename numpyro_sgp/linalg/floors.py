"""Floors under numbers that rounding takes below them."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

__all__ = ["at_least"]


def at_least(x: Array, floor: ArrayLike) -> Array:
    """
    The larger of both, NaN where ``x`` is. As :func:`jax.numpy.maximum`, whose derivative
    asks where ``x`` equals the result: where XLA computes ``x`` again for that question
    and rounds it otherwise, the derivative is lost.
    """
    return jnp.where(x < floor, floor, x)

"""
Products of arrays in the full precision of their dtype. The default of accelerators rounds
the factors of a float32 product to TF32 or bfloat16, which leaves two or three digits.

Floors under numbers that rounding takes below them.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike


def matmul(A: ArrayLike, B: ArrayLike) -> Array:
    """``A @ B`` in the full precision of the dtype, on accelerators too."""
    return jnp.matmul(A, B, precision=lax.Precision.HIGHEST)


def einsum(subscripts: str, *operands: ArrayLike) -> Array:
    """:func:`jax.numpy.einsum` in the full precision of the dtype, on accelerators too."""
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)


def at_least(x: Array, floor: ArrayLike) -> Array:
    """
    The larger of both, NaN where ``x`` is. As :func:`jax.numpy.maximum`, whose derivative
    asks where ``x`` equals the result: where XLA computes ``x`` again for that question
    and rounds it otherwise, the derivative is lost.
    """
    return jnp.where(x < floor, floor, x)

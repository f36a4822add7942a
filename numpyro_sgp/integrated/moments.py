"""Small covariances of the predictors of each row."""

import jax.numpy as jnp
from jax import Array


def row_factors(covariance: Array) -> Array:
    """
    Lower factors of a covariance for each row; variances of zero are allowed.

    :param covariance: shape ``(J, J, N)``.
    :return: shape ``(J, J, N)``.
    """
    number, zero = len(covariance), jnp.zeros_like(covariance[0, 0])
    eps, tiny = jnp.finfo(covariance.dtype).eps, jnp.finfo(covariance.dtype).tiny
    rows: list[list[Array]] = []
    for i in range(number):
        row: list[Array] = []
        for j in range(i):
            known = sum((a * b for a, b in zip(row, rows[j][:j], strict=True)), zero)
            row.append((covariance[i, j] - known) / rows[j][j])
        left = covariance[i, i] - sum((a**2 for a in row), zero)
        floor = jnp.maximum(10 * eps * covariance[i, i], tiny**0.5)
        rows.append([*row, jnp.sqrt(jnp.maximum(left, floor))])
    full = [row + [zero] * (number - len(row)) for row in rows]
    return jnp.stack([jnp.stack(row) for row in full])

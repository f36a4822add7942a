"""Moments and quantiles of mixtures of Gaussians, from those of their components."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array


def average(log_weights: Array, values: Sequence[Array]) -> Array:
    """The weighted mean over the components."""
    return sum(w * v for w, v in zip(jnp.exp(log_weights), values, strict=True))


def variance(log_weights: Array, means: Sequence[Array], within: Sequence[Array]) -> Array:
    """Variances of a mixture: those within components and that between their means."""
    mean, both = average(log_weights, means), zip(within, means, strict=True)
    return average(log_weights, [own + (m - mean) ** 2 for own, m in both])


def covariance(
    log_weights: Array, means: Sequence[Array], within: Sequence[Array]
) -> Array:
    """Covariances of a mixture, shape ``(..., N, N)``, as :func:`variance`."""
    mean = average(log_weights, means)
    away = [m - mean for m in means]
    between = [a[..., :, None] * a[..., None, :] for a in away]
    both = zip(within, between, strict=True)
    return average(log_weights, [own + b for own, b in both])


def quantile(
    level: Array, log_weights: Array, means: Sequence[Array], variances: Sequence[Array]
) -> Array:
    """
    Marginal quantiles of a mixture, by bisection of its cdf.

    :param level: between 0 and 1, of any shape.
    :return: shape ``level.shape`` and that of each mean.
    """
    centres, scales = jnp.stack(means), jnp.sqrt(jnp.stack(variances))
    weights = jnp.exp(log_weights).astype(centres.dtype)
    weights = weights.reshape(-1, *(1,) * (centres.ndim - 1))
    level = jnp.asarray(level, centres.dtype)
    target = level.reshape(*level.shape, *(1,) * (centres.ndim - 1))
    axis = level.ndim
    z = jax.scipy.stats.norm.ppf(level).reshape(*level.shape, *(1,) * centres.ndim)
    ends = centres + scales * z

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        below = jax.scipy.stats.norm.cdf((jnp.expand_dims(middle, axis) - centres) / scales)
        left = jnp.sum(weights * below, axis=axis) < target
        return jnp.where(left, middle, low), jnp.where(left, high, middle)

    # The quantile of a mixture lies among those of its components.
    bounds = jnp.min(ends, axis=axis), jnp.max(ends, axis=axis)
    low, high = jax.lax.fori_loop(0, 60, halve, bounds)
    return 0.5 * (low + high)

"""Score-function gradients of expected log likelihoods (SAVIGP, sections 4 and F)."""

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient


def surrogate(
    mean: Array, variance: Array, x: Array, values: Array, control_variate: bool
) -> Array:
    r"""
    A number that is zero and whose gradient with respect to ``mean`` and ``variance`` is
    the score-function estimate of that of :math:`\sum_n E[\ell_n(\mu_n + \sigma_n x)]`
    (SAVIGP, eq. 25 and 74-75 by the marginals).

    :param mean: marginal means, shape ``(*batch, N)``.
    :param variance: marginal variances, of the same shape.
    :param x: standard normal draws in two independent halves, ``(S, *batch, N)``.
    :param values: log likelihoods :math:`\ell_n` at the draws, shape ``(S, N)``.
    :param control_variate: whether to use the control variate of appendix F.
    """
    x, values = stop_gradient(x), stop_gradient(values)
    values = values.reshape(values.shape[0], *(1,) * (x.ndim - 2), values.shape[-1])
    scale = stop_gradient(variance)
    to_mean = _gradient(x, values, control_variate) / jnp.sqrt(scale)
    to_variance = _gradient(x**2 - 1, values, control_variate) / (2 * scale)
    return jnp.sum(
        to_mean * (mean - stop_gradient(mean))
        + to_variance * (variance - stop_gradient(variance))
    )


def _gradient(h, values, control_variate):
    """:math:`E[h \\ell]` for each data point and latent function, ``(*batch, N)``."""
    if not control_variate:
        return jnp.mean(h * values, axis=0)
    half = h.shape[0] // 2
    halves = [(h[:half], values[:half]), (h[half:], values[half:])]
    # Var(h) a = Cov(h l, h): a is the coefficient of h in eq. (102) of the paper.
    coefficients = [jnp.sum(g**2 * v, axis=0) / jnp.sum(g**2, axis=0) for g, v in halves]
    parts = [
        jnp.mean(g * (v - a), axis=0)
        for (g, v), a in zip(halves, coefficients[::-1], strict=True)
    ]
    return 0.5 * (parts[0] + parts[1])

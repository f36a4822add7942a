r"""
From the best Gaussian q(w) towards the posterior of the field, by importance weights.

At any hyperparameters :math:`\log \int p(w) \exp E_r[\log p(y \mid w, r)]\, dw` is the
largest bound that inducing points allow, over all q(w), with r what they leave open; for
Gaussian likelihoods a Gaussian reaches it, and for others weights of draws from it do.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_sgp.integrated.predictors import Linear, row_factors
from numpyro_sgp.linalg import matmul, solve_lower

_CHUNK = 3e6  # numbers of draws held at one time
_HALVINGS = 6


class Weighed(NamedTuple):
    """
    What weights tell.

    :param gain: nats by which the bound rises.
    :param effective: effective share of the draws, between 0 and 1.
    :param mean: of the field, shape ``(m,)``.
    :param factor: whose square is the covariance, shape ``(m, m)``.
    """

    gain: Array
    effective: Array
    mean: Array
    factor: Array


def unweighed(mean: Array, factor: Array) -> Weighed:
    """q(w) as it is."""
    one = jnp.ones((), mean.dtype)
    return Weighed(0.0 * one, one, mean, factor)


def draws(
    log_likelihood, linear: Linear, mean: Array, root: Array, key: Array, number: int
) -> tuple[Array, Array]:
    """
    Draws from q(w), in pairs around its mean, and their log weights.

    :param mean: of q(w).
    :param root: lower factor of its precision.
    :param number: of draws.
    :return: standardised, ``(number, m)``, and the logarithms of weights whose mean is the
        largest bound.
    """
    size, dtype = len(mean), mean.dtype
    x = jax.random.normal(key, (number // 2, size), dtype)
    x = jnp.concatenate([x, -x])
    w = mean + matmul(x, spread(root).T)
    flat = linear.maps.reshape(size, -1)
    predictors = len(linear.base)
    # Points with the mean and the covariance of what is left open, two for each predictor.
    left = jnp.einsum("frn,fsn->rsn", linear.left, linear.left)
    steps = jnp.sqrt(jnp.asarray(predictors, dtype)) * jnp.moveaxis(row_factors(left), 1, 0)
    steps = jnp.concatenate([steps, -steps])

    def one(w):
        rows = linear.base + (w @ flat).reshape(linear.base.shape)
        return jnp.mean(jax.vmap(lambda step: log_likelihood(rows + step))(steps))

    chunk = max(int(_CHUNK // max(steps.size, 1)), 1)
    found = jax.lax.map(one, w, batch_size=min(chunk, number))
    log_det = jnp.sum(jnp.log(jnp.diagonal(root)))
    return x, found + 0.5 * jnp.sum(x**2 - w**2, axis=-1) - log_det


def spread(root: Array) -> Array:
    """
    A square root of the covariance, of the lower factor of a precision. That is one or more
    in every direction, so that the inverse is a mild one, and products with it run on all
    cores, where solves run on one.
    """
    return solve_lower(root, jnp.eye(len(root), dtype=root.dtype)).T


def weigh(
    log_likelihood,
    linear: Linear,
    mean: Array,
    root: Array,
    value: Array,
    key: Array,
    number: int,
) -> Weighed:
    """
    Weights draws from q(w), in pairs around its mean; large weights are cut off at the mean
    times the root of their number, which keeps their variance.

    :param mean: of q(w).
    :param root: lower factor of its precision.
    :param value: its bound.
    :param number: of draws.
    """
    dtype = mean.dtype
    eye, root_of = jnp.eye(len(mean), dtype=dtype), spread(root)
    x, found = draws(log_likelihood, linear, mean, root, key, number)
    found = found - value
    found = jnp.where(jnp.isfinite(found), found, -1e4)
    top = logsumexp(found) - 0.5 * jnp.log(jnp.asarray(float(number), dtype))
    found = jnp.minimum(found, top)
    gain = logsumexp(found) - jnp.log(jnp.asarray(float(number), dtype))
    weights = jax.nn.softmax(found)
    shift = weights @ x
    # That of the draws themselves, which is not I either, is taken off.
    change = matmul(x.T * (weights - 1.0 / number), x) - jnp.outer(shift, shift)
    factor = matmul(root_of, _factor(eye, change))
    effective = 1.0 / (number * jnp.sum(weights**2))
    return Weighed(gain, effective, mean + root_of @ shift, factor)


def _factor(eye, change):
    """Lower factor of I + change, halved until it has one."""

    def attempt(state):
        count, rate, _ = state
        root = jnp.linalg.cholesky(eye + 0.5 * rate * change, symmetrize_input=False)
        return count + 1, 0.5 * rate, root

    def go_on(state):
        count, _, root = state
        return (count <= _HALVINGS) & ~jnp.all(jnp.isfinite(root))

    start = 0, jnp.full((), 2.0, eye.dtype), jnp.full_like(eye, jnp.nan)
    root = jax.lax.while_loop(go_on, attempt, start)[2]
    return jnp.where(jnp.all(jnp.isfinite(root)), root, eye)

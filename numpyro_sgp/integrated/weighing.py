r"""
From the best Gaussian q(w) towards the posterior of the field, by importance weights.

At any hyperparameters :math:`\log \int p(w) \exp E_r[\log p(y \mid w, r)]\, dw` is the
largest bound that inducing points allow, over all q(w), with r what they leave open; for
Gaussian likelihoods a Gaussian reaches it, and for others weights of draws from it do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_sgp.integrated.precision import Factor, Root
from numpyro_sgp.integrated.predictors import Linear, row_factors
from numpyro_sgp.linalg import einsum, gauss_hermite, matmul, tensor_grid

_CHUNK = 3e6  # numbers of draws held at one time
_NODES = {1: 5, 2: 3}  # of each predictor for what is left open, by their number


class Weighed(NamedTuple):
    """
    What weights tell.

    :param gain: nats by which the bound rises.
    :param effective: effective share of the draws, between 0 and 1.
    :param mean: of the field, shape ``(m,)``.
    :param factor: a square root of the covariance.
    """

    gain: Array
    effective: Array
    mean: Array
    factor: Factor


def unweighed(mean: Array, factor: Factor) -> Weighed:
    """q(w) as it is."""
    one = jnp.ones((), mean.dtype)
    return Weighed(0.0 * one, one, mean, factor)


def over_left(log_likelihood: Callable, linear: Linear) -> tuple[Callable, int]:
    """
    The log likelihood, averaged over what inducing points leave open: by few nodes, as it
    is asked for at each draw.

    :return: from predictors ``(J, N)`` without what is left open to a number; and how many
        numbers it holds at one time.
    """
    number, dtype = len(linear.base), linear.base.dtype
    if number in _NODES:
        nodes, weights = tensor_grid(*gauss_hermite(_NODES[number]), number)
    else:  # two for each predictor, with the mean and the covariance
        nodes = np.sqrt(number) * np.concatenate([np.eye(number), -np.eye(number)])
        weights = np.full(2 * number, 0.5 / number)
    factors, each = row_factors(linear.left_open()), jnp.asarray(weights, dtype)
    steps = einsum("rjn,sj->srn", factors, jnp.asarray(nodes, dtype))

    def averaged(rows):
        return matmul(each, jax.vmap(lambda step: log_likelihood(rows + step))(steps))

    return averaged, steps.size


def draws(
    log_likelihood, linear: Linear, mean: Array, root: Root, key: Array, number: int
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
    w = mean + root.spread().draw(x)
    averaged, numbers = over_left(log_likelihood, linear)
    chunk = max(int(_CHUNK // max(numbers, 1)), 1)
    found = jax.lax.map(lambda w: averaged(linear.at(w)), w, batch_size=min(chunk, number))
    log_det = jnp.sum(root.log_diagonal())
    return x, found + 0.5 * jnp.sum(x**2 - w**2, axis=-1) - log_det


def weigh(
    log_likelihood,
    linear: Linear,
    mean: Array,
    root: Root,
    value: Array,
    key: Array,
    number: int,
) -> Weighed:
    """
    Weights draws from q(w), in pairs around its mean; large weights are cut off at the mean
    times the root of their number, which keeps their variance.

    :param mean: of q(w).
    :param root: lower factor of its precision.
    :param value: its bound, by the nodes of :func:`over_left` too: what these miss of an
        expectation is no gain.
    :param number: of draws.
    """
    dtype = mean.dtype
    factor = root.spread()
    x, found = draws(log_likelihood, linear, mean, root, key, number)
    found = found - value
    found = jnp.where(jnp.isfinite(found), found, -1e4)
    top = logsumexp(found) - 0.5 * jnp.log(jnp.asarray(float(number), dtype))
    found = jnp.minimum(found, top)
    gain = logsumexp(found) - jnp.log(jnp.asarray(float(number), dtype))
    weights = jax.nn.softmax(found)
    shift = matmul(weights, x)
    effective = 1.0 / (number * jnp.sum(weights**2))
    moved = mean + factor.draw(shift)
    return Weighed(gain, effective, moved, factor.reweighed(x, weights, shift))

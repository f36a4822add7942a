"""Draws of whole functions from a posterior at a GP site, by Matheron's rule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from numpyro_sgp._programs import at_once
from numpyro_sgp.distributions.gaussian_process import _as_inputs
from numpyro_sgp.inducing.covariances import union
from numpyro_sgp.kernels.base import features_of
from numpyro_sgp.linalg import einsum
from numpyro_sgp.linalg.batches import triangular_solve

_SMALL = 2**22  # numbers that are made in some hundredths of a second


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # hashable, for jax.jit(samples)
class FunctionSamples:
    r"""
    Functions :math:`f(x) = m(x) + f_0(x) + k(x, u)\, \alpha` drawn from a posterior by
    :meth:`GPPosterior.sample_functions`: a pytree to be called.

    :param kernel: the kernel k.
    :param mean_function: the prior mean m, or None.
    :param points: all inducing points, shape ``(M, D)`` or ``(*batch, M, D)``.
    :param weights: :math:`\alpha`, shape ``sample_shape + batch_shape + (M,)``.
    :param prior: the draws :math:`f_0` of the prior without its mean, or None.

    >>> import jax, jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> bound = sgp.CollapsedSVGP(sgp.kernels.RBF(), X, X[::3], 0.1)
    >>> posterior = bound.posterior(jnp.sin(X[:, 0]), X)
    >>> f = posterior.sample_functions(jax.random.key(0), (2,))
    >>> f(jnp.array([[0.5], [4.0], [9.0]])).shape
    (2, 3)
    """

    kernel: Any
    mean_function: Callable[[Array], Array] | None
    points: Array
    weights: Array
    prior: Callable[[Array], Array] | None

    def __call__(self, X: Array) -> Array:
        """
        Values of the same functions at any inputs, O(N (M + F)) for each.

        :param X: inputs, shape ``(N, D)``; or ``(*b, N, D)`` with ``b`` broadcastable to
            ``sample_shape + batch_shape``, for inputs of each function's own.
        :return: shape ``sample_shape + batch_shape + (N,)``.
        :raises ValueError: if X does not have the shape of a table.
        """
        X = _as_inputs(X)
        arrays = [leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "shape")]
        numbers = max((leaf.size for leaf in arrays), default=1) * X.shape[-2]
        return _values(self, X, briefly=numbers < _SMALL)


@at_once
def _values(samples, X):
    K = samples.kernel(samples.points, X)
    f = einsum("...mn,...m->...n", K, samples.weights)
    if samples.prior is not None:
        f = f + samples.prior(X)
    if samples.mean_function is not None:
        f = f + samples.mean_function(X)
    return f


def draw_functions(
    posterior, rng_key, sample_shape, num_features, whitened=None
) -> FunctionSamples:
    """
    See :meth:`GPPosterior.sample_functions`.

    :param whitened: draws of q in whitened coordinates, ``sample_shape + batch_shape +
        (M,)``, in the place of the posterior's own.
    """
    if num_features < 1:
        raise ValueError(f"num_features must be at least 1, got {num_features}.")
    key_q, key_f, key_jitter = jax.random.split(rng_key, 3)
    process, L = posterior.prior, posterior.chol
    points = union(posterior.inducing)
    shape = (*sample_shape, *posterior.batch_shape)
    if whitened is None:
        weights = posterior._sample_whitened(key_q, sample_shape)
    else:
        weights = jnp.asarray(whitened, L.dtype)
    prior = None
    if posterior._residual:
        features = (process.kernel, shape, num_features, points.shape[-1], L.dtype)
        prior = _prior_draws(key_f, *features)
        noise = jax.random.normal(key_jitter, weights.shape, L.dtype)
        # The jitter in L is noise on the values at the inducing points.
        u = prior(points) + jnp.sqrt(posterior.jitter_used)[..., None] * noise
        weights = weights - _solve(L, u, len(sample_shape))
    weights = _solve(L, weights, len(sample_shape), transpose=True)
    points, weights = posterior._with_fixed_part(points, weights)
    mean = process.mean_function if posterior._has_mean else None
    return FunctionSamples(process.kernel, mean, points, weights, prior)


def _prior_draws(rng_key, kernel, shape, num_features, dim, dtype):
    """Functions with the kernel's covariance, each by random features of its own."""
    key, key_weights = jax.random.split(rng_key)
    shape = (*shape, num_features)
    features = features_of(kernel, key, shape, dim, dtype)
    weights = jax.random.normal(key_weights, shape, dtype) / math.sqrt(num_features)
    return Partial(_combine, features, weights)


def _combine(features, weights, X):
    return einsum("...f,...fn->...n", weights, features(X))


def _solve(L, values, sample_ndim, transpose=False):
    """
    ``inv(L)``, or ``inv(L.T)``, times each of many vectors.

    :param L: shape ``(*batch, M, M)``.
    :param values: shape ``sample_shape + batch_shape + (M,)``.
    :param sample_ndim: number of axes of the sample shape.
    """
    # The samples are the columns of one solve, rather than each with a copy of L.
    sample_shape, batch_shape = values.shape[:sample_ndim], values.shape[sample_ndim:-1]
    columns = values.reshape(-1, *values.shape[sample_ndim:])
    columns = jnp.moveaxis(columns, 0, -1)
    L = jnp.broadcast_to(L, (*batch_shape, *L.shape[-2:]))
    out = triangular_solve(L, columns, left_side=True, lower=True, transpose_a=transpose)
    return jnp.moveaxis(out, -1, 0).reshape(*sample_shape, *values.shape[sample_ndim:])

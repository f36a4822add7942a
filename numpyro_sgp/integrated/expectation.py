"""The expected log likelihood of rows under Gaussian linear predictors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import ndtri

from numpyro_sgp.elbo.quadrature import nodes_at_kinks
from numpyro_sgp.integrated.precision import Factor
from numpyro_sgp.integrated.predictors import row_factors
from numpyro_sgp.integrated.weighing import over_left
from numpyro_sgp.linalg import einsum, gauss_hermite, matmul, tensor_grid, trapezoid

# Nodes of each predictor, by the number of predictors; and where there are many rows, of
# which each says little.
_GRIDS = {1: (24, 12), 2: (16, 10), 3: (9, 7)}
_MANY = 5_000
_OTHERS = {1: 33, 2: 19, 3: 11}  # of the rule that tells whether those are enough
_MAY_DIFFER = 3.0  # nats, from where on one rule is not believed
_DRAWS = 256  # of more predictors than that


def quadrature(
    number: int, num_rows: int, dtype, kinked: bool = False
) -> tuple[Array, Array]:
    """
    Nodes for standard normals: a product of Gauss-Hermite rules for up to three, or of
    trapezoidal ones for up to two where the likelihood has kinks; else Sobol points, moved
    such that their mean is 0 and their covariance I: expectations of quadratics, and with
    them Gaussian likelihoods' bounds, are exact.

    :param number: J, of predictors in a row.
    :param num_rows: N.
    :param kinked: whether the likelihood has kinks.
    :return: nodes of shape ``(S, J)``, and weights ``(S,)``.
    """
    if kinked and number <= 2:
        each = nodes_at_kinks(number, num_rows)
        nodes, weights = tensor_grid(*trapezoid(each), number)
    elif number in _GRIDS:
        each = _GRIDS[number][num_rows > _MANY]
        nodes, weights = tensor_grid(*gauss_hermite(each), number)
    else:
        from scipy.stats import qmc  # slow to import

        points = qmc.Sobol(number, rng=0).random(_DRAWS // 2)
        nodes = ndtri(np.clip(points, 1e-9, 1 - 1e-9))
        nodes = np.concatenate([nodes, -nodes])
        nodes = np.linalg.solve(np.linalg.cholesky(nodes.T @ nodes / _DRAWS), nodes.T).T
        weights = np.full(_DRAWS, 1.0 / _DRAWS)
    return jnp.asarray(nodes, dtype), jnp.asarray(weights, dtype)


def expected(
    log_likelihood: Callable[[Array], Array],
    mean: Array,
    covariance: Array,
    num_rows: int | None = None,
    kinked: bool = False,
    other: bool = False,
) -> Array:
    """
    The expected log likelihood.

    :param log_likelihood: of predictors of shape ``(J, N)``.
    :param mean: shape ``(J, N)``.
    :param covariance: shape ``(J, J, N)``.
    :param num_rows: of all rows, of which these are a part.
    :param kinked: whether the likelihood has kinks.
    :param other: whether by another Gauss-Hermite rule, of up to three predictors.
    """
    num_rows = num_rows or mean.shape[-1]
    if other:
        rule = tensor_grid(*gauss_hermite(_OTHERS[len(mean)]), len(mean))
        nodes, weights = (jnp.asarray(part, mean.dtype) for part in rule)
    else:
        nodes, weights = quadrature(len(mean), num_rows, mean.dtype, kinked)
    root = row_factors(covariance)

    def at(node):
        return log_likelihood(mean + einsum("rsn,s->rn", root, node))

    return matmul(weights, jax.vmap(at)(nodes))


def not_seen(
    log_likelihood: Callable[[Array], Array],
    mean: Array,
    covariance: Array,
    found: Array,
    kinked: bool = False,
) -> Array:
    """
    By how many nats more than a few an expected log likelihood is above what another rule
    gives: of a q that is far wider than the likelihood's waves, as of directions, where
    all nodes may be on crests.

    :param mean: shape ``(J, N)``.
    :param covariance: shape ``(J, J, N)``.
    :param found: what :func:`expected` gave.
    :param kinked: whether that was by its rule of many nodes, for kinks.
    """
    if kinked or len(mean) not in _OTHERS:
        return jnp.zeros_like(found)
    again = expected(log_likelihood, mean, covariance, other=True)
    # Its outermost nodes are farther out, where a likelihood may have no value.
    return jnp.where(
        jnp.isfinite(again), jnp.maximum(found - again - _MAY_DIFFER, 0.0), 0.0
    )


def without_left(
    log_likelihood, linear, mean: Array, factor: Factor, kinked: bool = False
) -> Array:
    """:func:`expected`, where what is left open is averaged over as at draws."""
    averaged, _ = over_left(log_likelihood, linear)
    at, covariance = linear.moments(mean, factor)
    return expected(averaged, at, covariance - linear.left_open(), kinked=kinked)

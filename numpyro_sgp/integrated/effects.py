"""Latents with Gaussian priors, of their standardised values."""

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.util import cholesky_of_inverse

from numpyro_sgp.linalg import einsum
from numpyro_sgp.tracing import messages

_GAUSSIAN = dist.Normal, dist.MultivariateNormal, dist.GaussianRandomWalk, dist.CAR


def is_gaussian(fn) -> bool:
    """Whether a latent has a Gaussian prior that may be part of the field."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist  # and not a masked one
    if type(fn) is dist.TransformedDistribution:
        kinds = {type(transform) for transform in fn.transforms}
        return kinds <= {dist.transforms.AffineTransform} and is_gaussian(fn.base_dist)
    return isinstance(fn, _GAUSSIAN)


def of_standardised(fn, standardised: Any) -> tuple[Array, list[Array]]:
    """
    A Gaussian latent, affine in its standardised values; and what its scale is made of,
    which must not be of the field.

    :param fn: its prior, of which :func:`is_gaussian` is true.
    :param standardised: independent standard normals, of its shape.
    """
    shape, base = jnp.shape(standardised), messages.innermost(fn)
    if isinstance(base, dist.MultivariateNormal | dist.CAR):
        is_car = isinstance(base, dist.CAR)
        tril = cholesky_of_inverse(base.precision_matrix) if is_car else base.scale_tril
        moved = einsum("...ij,...j->...i", tril, standardised)
        return jnp.broadcast_to(base.loc, shape) + moved, [tril]
    if isinstance(base, dist.GaussianRandomWalk):
        steps = jnp.broadcast_to(jnp.expand_dims(base.scale, -1), shape) * standardised
        return jnp.cumsum(steps, axis=-1), [jnp.asarray(base.scale)]
    if isinstance(base, dist.Normal):
        scale = jnp.broadcast_to(base.scale, shape)
        value = jnp.broadcast_to(base.loc, shape) + scale * standardised
        return value, [jnp.asarray(base.scale)]
    value, scales = of_standardised(base.base_dist, standardised)
    for transform in base.transforms:
        value = transform.loc + transform.scale * value
        scales = [*scales, jnp.asarray(transform.scale)]
    return value, scales

"""Coordinates of hyperparameters: unconstrained, or standardised by their priors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    LowerCholeskyAffine,
)

from numpyro_sgp.fitting.hierarchies import ONE_TO_ONE
from numpyro_sgp.integrated.units_of_data import made_of_arguments
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins

if TYPE_CHECKING:
    from numpyro_sgp.integrated.field import Field

_LOCATED = dist.Normal, dist.StudentT, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel


def coordinates(field: Field, name: str, fn):
    """
    The transform from coordinates, all real, to values of a hyperparameter.

    :param field: knows which coordinates are standardised.
    :param fn: the hyperparameter's prior.
    :return: NumPyro's transform.
    """
    parts = _parts(fn) if name in field.standardised else None
    return biject_to(fn.support) if parts is None else parts[0]


def hierarchical(field: Field, args: tuple, kwargs: dict) -> frozenset[str]:
    r"""
    Names of hyperparameters with a location and a scale of which the scale is made of other
    hyperparameters.

    Of :math:`\log l_k \sim N(\mu, \tau^2)` the density grows as :math:`\tau^{-K}` where
    :math:`\tau` and :math:`\log l_k - \mu` go to zero together, which is a funnel without a
    mode. That of :math:`(\mu, \tau, (\log l_k - \mu) / \tau)` has no such end.

    Those with a location or a scale that is made of the data are left out: at other data
    their values would be others.

    :param args: the model's arguments.
    :param kwargs: its keyword arguments.
    """
    trace = field.guide.known().trace
    values = {name: trace[name]["value"] for name in field.thetas}

    def parts(args, kwargs, values):
        at_mean = messages.at_prior_mean
        trace = messages.trace_of(field.model, args, kwargs, data=values, at_site=at_mean)
        found = {name: _parts(trace[name]["fn"]) for name in values}
        return {name: part for name, part in found.items() if part is not None}

    def scales(values):
        return {name: scale for name, (_, scale) in parts(args, kwargs, values).items()}

    found = {name for name, others in origins(scales, values).items() if others}
    if not found:
        return frozenset()

    def made(args, kwargs):
        each = parts(args, kwargs, values).items()
        return {name: jax.tree.leaves(transform) for name, (transform, _) in each}

    return frozenset(found.difference(made_of_arguments(made, args, kwargs)))


def informed(field: Field, axes: np.ndarray, share: float) -> frozenset[str]:
    r"""
    Of the hyperparameters that are standardised, those that the data say so much of, by
    the posterior at its mode, that the others may bend with them: of what is known,
    :math:`(\log l_k - \mu) / \tau` goes as the inverse of the scale.

    :param axes: columns are standard deviations at the mode, ``(p, p)``.
    :param share: of the prior's variance the data leave less, on average.
    """
    if not field.standardised:
        return frozenset()
    # Variances given all others; those of the prior are about one.
    left = 1.0 / np.sum(np.linalg.inv(axes) ** 2, axis=0)
    parts = field.unravel(jnp.asarray(left)).items()
    known = {name: np.mean(np.asarray(part)) for name, part in parts}
    return frozenset(name for name in field.standardised if known[name] < share)


def _parts(fn):
    """
    The transform from a standardised latent to its values and what the scale of these is
    made of; None for priors of other kinds.
    """
    base, outer = messages.innermost(fn), []
    while isinstance(base, dist.TransformedDistribution):
        outer = [*base.transforms, *outer]
        base = messages.innermost(base.base_dist)
    if isinstance(base, _LOCATED):
        inner, scale = AffineTransform(base.loc, base.scale), base.scale
    elif isinstance(base, dist.MultivariateNormal):
        inner, scale = LowerCholeskyAffine(base.loc, base.scale_tril), base.scale_tril
    else:
        return None
    if not all(isinstance(each, ONE_TO_ONE) for each in outer):
        return None
    scales = [each.scale for each in outer if isinstance(each, AffineTransform)]
    return ComposeTransform([inner, *outer]), [scale, *scales]

"""The bound of a model and a guide on data."""

import copy
from dataclasses import replace

import jax
import numpy as np
from jax import Array

from numpyro_sgp._programs import on_data
from numpyro_sgp.distributions.arguments import as_arrays
from numpyro_sgp.elbo import MonteCarlo, ScoreFunction, TraceGP_ELBO

_NUM_KEYS = 10


def bound_of(
    svi, params, args, kwargs, rng_key: Array | None = None
) -> tuple[float, float]:
    """
    The bound with these arguments, and its standard error, by draws that are others than
    those of its training, and with exact KLs where training draws these.
    """
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    args, kwargs = as_arrays(svi.model, args, kwargs)
    loss = as_reported(svi.loss)

    def bounds(args, kwargs, params, keys):
        def bound(key):
            found = loss.loss(key, params, svi.model, svi.guide, *args, **kwargs)
            return -sum(jax.tree.leaves(found))  # by site where it has sum_sites=False

        return jax.lax.map(bound, keys)

    keys = jax.random.split(rng_key, _NUM_KEYS)
    found = np.asarray(on_data(bounds, args, kwargs, params, keys[:2]), float)
    if found[0] == found[1]:
        return float(found[0]), 0.0
    found = np.append(found, on_data(bounds, args, kwargs, params, keys[2:]))
    return float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(len(found)))


def differs_from_training(svi) -> bool:
    """Whether :func:`bound_of` has other draws than the losses of a training."""
    options = getattr(svi.guide, "approximations", {}).values()
    return _has_seed(svi.loss) or any(option.draws_kl for option in options)


def as_reported(loss):
    """A loss with new draws at each evaluation, and exact KLs."""
    loss = with_exact_kl(loss)
    if isinstance(loss, TraceGP_ELBO) and _has_seed(loss):
        loss.expectation = replace(loss.expectation, seed=None)
    return loss


def with_exact_kl(loss):
    """A loss that draws no KL; of another kind than :class:`TraceGP_ELBO`, as it is."""
    if not isinstance(loss, TraceGP_ELBO):
        return loss
    loss = copy.copy(loss)
    loss.draws_kl = False
    return loss


def _has_seed(loss):
    rule = getattr(loss, "expectation", None)
    return isinstance(rule, MonteCarlo | ScoreFunction) and rule.seed is not None

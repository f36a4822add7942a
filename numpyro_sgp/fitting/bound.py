"""The bound of a model and a guide on data."""

import jax
import numpy as np

from numpyro_sgp._programs import on_data
from numpyro_sgp.distributions.arguments import as_arrays

_NUM_KEYS = 10


def bound_of(svi, params, args, kwargs) -> tuple[float, float]:
    """The bound with these arguments, and its standard error."""
    args, kwargs = as_arrays(svi.model, args, kwargs)

    def bounds(args, kwargs, params, keys):
        def bound(key):
            loss = svi.loss.loss(key, params, svi.model, svi.guide, *args, **kwargs)
            return -sum(jax.tree.leaves(loss))  # by site where it has sum_sites=False

        return jax.lax.map(bound, keys)

    keys = jax.random.split(jax.random.key(0), _NUM_KEYS)
    found = np.asarray(on_data(bounds, args, kwargs, params, keys[:2]), float)
    if found[0] == found[1]:
        return float(found[0]), 0.0
    found = np.append(found, on_data(bounds, args, kwargs, params, keys[2:]))
    return float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(len(found)))

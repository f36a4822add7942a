"""Where hyperparameters begin."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to

from numpyro_sgp._programs import join_static, shared, split_static
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.tracing import messages

_STARTS = 8


def starting_hyperparameters(field: Field, rng_key: Array, args, kwargs) -> np.ndarray:
    """Unconstrained hyperparameters to begin from: medians and draws of the prior."""
    arrays, static = split_static((args, kwargs))

    def draw(arrays, keys):
        args, kwargs = join_static(arrays, static)

        def one(key):
            at_mean = messages.at_prior_mean
            trace = messages.trace_of(field.model, args, kwargs, key, at_site=at_mean)
            values = []
            for name in field.thetas:
                site = trace[name]
                free = biject_to(site["fn"].support).inv(site["value"])
                values.append(jnp.ravel(free))
            return jnp.concatenate([jnp.zeros(0), *values])

        return jax.lax.map(one, keys)

    keys = jax.random.split(rng_key, 15)
    draws = np.asarray(shared(draw, briefly=True)(arrays, keys), float)
    return np.concatenate([np.median(draws, axis=0)[None], draws[: _STARTS - 1]])

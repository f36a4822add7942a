"""Likelihoods without slopes, of which natural steps know nothing."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import join_static, shared, split_static
from numpyro_sgp.integrated.field import Field

_POINTS = 8  # looked at


def check_slopes(field: Field, free: Array, args: tuple, kwargs: dict) -> None:
    """
    :param free: unconstrained hyperparameters, ``(p,)``.
    :raises ValueError: where the log likelihood of a site has no slope at random values of
        its predictors, but differs between them: it is flat but for jumps.
    """
    arrays, static = split_static((args, kwargs))

    def look(free, points, arrays, drawn):
        terms = field.terms(free, points, *join_static(arrays, static))
        scale = jnp.sqrt(terms.linear.prior_variance())

        def at(x):
            rows = terms.linear.base + scale * x
            slopes = jax.jacrev(terms.of_sites)(rows)
            return terms.of_sites(rows), {k: jnp.max(jnp.abs(v)) for k, v in slopes.items()}

        return jax.lax.map(at, drawn)

    shape = _POINTS, field.layout.number, field.layout.num_rows
    drawn = jnp.asarray(np.random.default_rng(0).normal(size=shape), field.dtype)
    found = shared(look, briefly=True)(free, field.points, arrays, drawn)
    values, slopes = jax.tree.map(np.asarray, found)
    for name, value in values.items():
        if np.any(slopes[name] != 0.0) or np.all(value == value[0]):
            continue
        raise ValueError(
            f"Observed site '{name}' has a log likelihood that is flat in f but for jumps "
            "(a threshold, the largest of several), and the steps to one Gaussian over all "
            "sites (sgp.nested, joint=True) are made of its slopes. Use sgp.fit without "
            "joint, for RobustMax as it is and for others with "
            "expectation=ScoreFunction(1000), or MCMC(EllipticalSlice(model))."
        )

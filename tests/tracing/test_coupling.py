"""Which rows a likelihood ties together, in single precision too."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_sgp.tracing.coupling import mixes_rows

N = 30_000
Y = jnp.asarray(np.random.default_rng(0).normal(size=N), jnp.float32)


def student(f):
    """Among so many rows some are near an inflection, with a curvature of rounding."""
    scale = jnp.float32(0.37)
    return jnp.sum(dist.StudentT(jnp.float32(4.0), f["f"], scale).log_prob(Y))


def test_rounding_of_small_curvatures_ties_no_rows():
    assert not mixes_rows(student, {"f": (N,)}, jnp.float32)


def test_two_rows_that_are_tied_are_found_among_many():
    def tied(f):
        return student(f) - 0.1 * (f["f"][3] * f["f"][7]) ** 2

    assert mixes_rows(tied, {"f": (N,)}, jnp.float32)


def counts(f):
    """Terms as large as the counts cancel in the curvature, which is exp(f)."""
    large = jnp.full(12, 1e6, jnp.float32)
    return jnp.sum(dist.Poisson(jnp.exp(f["f"])).log_prob(large))


def test_rounding_of_large_counts_ties_no_rows():
    assert not mixes_rows(counts, {"f": (12,)}, jnp.float32)


def test_two_rows_that_are_tied_are_found_among_large_counts():
    def tied(f):
        return counts(f) - (f["f"][10] * f["f"][11]) ** 2

    assert mixes_rows(tied, {"f": (12,)}, jnp.float32)

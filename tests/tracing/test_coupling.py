"""Which rows a likelihood ties together, in single precision too."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
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


def laplace(x):
    return jnp.sum(dist.Laplace(x, 0.1).log_prob(0.0))


def normal(x):
    return jnp.sum(dist.Normal(x, 0.3).log_prob(jnp.linspace(0.0, 1.0, x.size)))


OVER_KINKS = {
    "differences": lambda f: laplace(jnp.diff(f)),
    "far differences": lambda f: laplace(jnp.diff(f) - 200.0),
    "running maximum": lambda f: normal(jax.lax.cummax(f)),
    "rate of the running maximum": lambda f: jnp.sum(
        dist.Poisson(jnp.exp(jax.lax.cummax(f))).log_prob(3)
    ),
    "maximum": lambda f: normal(jnp.max(f)[None]),
    "order": lambda f: normal(jnp.sort(f)),
    "comparisons": lambda f: jnp.sum(jnp.where(jnp.diff(f) > 0, -0.1, -2.3)),
}
BY_ROW = {
    "absolute errors": lambda f: jnp.sum(dist.Laplace(f, 0.1).log_prob(0.2)),
    "steps": lambda f: jnp.sum(jnp.where(f > 0.1, -0.1, -2.3)),
    "three of each": lambda f: laplace(f[jnp.arange(3 * f.size) % f.size]),
    "beta": lambda f: jnp.sum(
        dist.Beta(9.0 * jax.nn.sigmoid(f), 9.0 * jax.nn.sigmoid(-f)).log_prob(0.3)
    ),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("size", [6, 3000])
@pytest.mark.parametrize("name", OVER_KINKS)
def test_rows_tied_at_kinks_alone_are_found(name, size):
    """Where there are second derivatives, they are diagonal."""
    assert mixes_rows(lambda f: OVER_KINKS[name](f["f"]), {"f": (size,)}, jnp.float32)


@pytest.mark.quick(3)
@pytest.mark.parametrize("size", [6, 3000])
@pytest.mark.parametrize("name", BY_ROW)
def test_kinks_of_single_rows_tie_none(name, size):
    assert not mixes_rows(lambda f: BY_ROW[name](f["f"]), {"f": (size,)}, jnp.float32)


def test_kinks_that_tie_independent_functions_tie_no_rows():
    def across(f):
        return laplace(f["f"][0] * f["f"][1, ::-1])

    def within(f):
        return laplace(f["f"][0] * jax.lax.cummax(f["f"][1]))

    assert not mixes_rows(across, {"f": (2, 5)}, jnp.float32)
    assert mixes_rows(across, {"f": (2, 5)}, jnp.float32, coupled={"f"})
    assert mixes_rows(within, {"f": (2, 5)}, jnp.float32)


def increments(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.3), X))
    with numpyro.plate("data", len(X) - 1):
        numpyro.sample("y", dist.Laplace(jnp.diff(f), 0.1), obs=y)


def test_marginals_are_refused_under_absolute_errors_of_increments():
    X, y = jnp.linspace(0.0, 3.0, 6)[:, None], jnp.zeros(5)
    guide = sgp.AutoSparseGP(increments, sgp.SVGP(6))
    guide.setup(X, y)
    assert guide.couples_rows
    with pytest.raises(ValueError, match="ties rows of X together"):
        sgp.sparsify(increments, sgp.SVGP(6)).setup(X, y)

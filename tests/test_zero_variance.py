"""Rows at which f has no variance, as of a line or a Wiener process at zero."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.kernels import RBF, Linear
from numpyro_sgp.linalg import factor_product, jittered_cholesky, whitened_solve
from tests.helpers import slow

X = np.arange(8.0)[:, None] / 4.0
Y = np.array([1, 0, 2, 3, 1, 4, 3, 6])
GROUPS = np.c_[X[:, 0], np.arange(8) % 2]


def counts(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = Linear(variance)
    if X.shape[-1] == 2:  # an effect of treatment alone
        kernel = RBF(variance, active_dims=[0]) * Linear(active_dims=[1])
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.parametrize(
    ("approximation", "X"),
    [
        slow(sgp.SVGP(2), X),
        slow(sgp.VGP(), GROUPS),
        slow(sgp.SOLVEGP(2, 2), GROUPS),
        slow(sgp.InverseFreeSVGP(2), X),
    ],
)
def test_the_bound_has_slopes(approximation, X):
    """Of the square root at zero they were infinite, and all parameters NaN in a step."""
    guide = sgp.AutoSparseGP(counts, approximation)
    svi = SVI(counts, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    state = svi.init(jax.random.key(0), X, Y)
    losses = []
    for _ in range(3):
        state, loss = svi.update(state, X, Y)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow
def test_draws_are_the_mean_where_no_row_has_a_variance():
    prior = sgp.GaussianProcess(RBF(active_dims=[0]) * Linear(active_dims=[1]), GROUPS[::2])
    assert np.abs(prior.sample(jax.random.key(0))).max() < 1e-6
    guide = sgp.AutoSparseGP(counts, sgp.SVGP(3))
    guide.setup(GROUPS, Y)
    f = guide.posterior(guide.known().starts, GROUPS[::2])["f"]
    assert np.abs(f.sample(jax.random.key(0))).max() < 1e-6
    zeros = jnp.zeros((3, 3))
    assert np.isfinite(jittered_cholesky(zeros)[0]).all()
    assert np.isfinite(factor_product(zeros, jnp.ones(3))).all()
    assert np.isfinite(whitened_solve(zeros, jnp.zeros((3, 2)))[2]).all()

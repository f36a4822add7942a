"""Counts of ten thousands, of which rows say far more than the prior."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy.special import gammaln

import numpyro_sgp as sgp

N, LEVEL, WIDE = 40, 5.0, 5.0
RNG = np.random.default_rng(9)
X = np.sort(RNG.uniform(0.0, 6.0, N))[:, None]
COUNTS = RNG.poisson(np.exp(9.0 + 1.5 * np.sin(2.0 * X[:, 0]))).astype(float)


def model(X, y=None):
    level = numpyro.sample("level", dist.Normal(LEVEL, WIDE))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(3.0, 1.1), X, mean=level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def laplace():
    """Log evidence and sds of f under a Gaussian at the mode, which is close where counts
    are large: by dense algebra, the level integrated."""
    K = 3.0 * np.exp(-0.5 * (X - X.T) ** 2 / 1.1**2) + WIDE**2
    f = np.log(COUNTS)
    for _ in range(50):
        rates = np.exp(f)
        root = np.sqrt(rates)
        B = np.eye(N) + root[:, None] * K * root
        target = rates * (f - LEVEL) + COUNTS - rates
        solved = np.linalg.solve(B, root * (K @ target))
        weights = target - root * solved
        f = LEVEL + K @ weights
    rates = np.exp(f)
    B = np.eye(N) + np.sqrt(rates)[:, None] * K * np.sqrt(rates)
    likelihood = np.sum(COUNTS * f - rates - gammaln(COUNTS + 1.0))
    evidence = likelihood - 0.5 * (f - LEVEL) @ weights - 0.5 * np.linalg.slogdet(B)[1]
    A = np.linalg.solve(np.linalg.cholesky(B), np.sqrt(rates)[:, None] * K)
    return evidence, f, np.sqrt(np.diag(K) - np.sum(A**2, axis=0))


@pytest.mark.slow
def test_natural_steps_arrive_from_a_prior_that_says_little():
    """They were never short enough: the evidence was minus two millions."""
    evidence, mode, sd = laplace()
    found = sgp.nested(model, sgp.VGP(), (X, COUNTS), progress_bar=False)
    # Skewness at counts of hundreds and more: some thousandths of an sd, and of a nat.
    assert abs(found.log_evidence - evidence) < 0.05
    f = found.posterior(X)["f"]
    assert_allclose(f.sd, sd, rtol=0.01)
    assert np.abs((f.mean - mode) / sd).max() < 0.05


@pytest.mark.slow
def test_sites_are_not_said_to_be_apart():
    """They were, with sds of a third."""
    fitted = sgp.fit(model, sgp.SVGP(14), (X, COUNTS), progress_bar=False)
    row = fitted.check().causes["sites apart"]
    assert not row.headline and "1.00 of those under one Gaussian" in row.told

"""Modes of the hyperparameters to which no start leads by itself."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp

N = 90
RNG = np.random.default_rng(101)
X = np.sort(RNG.uniform(0.0, 10.0, N))[:, None]
Y = np.sin(0.7 * X[:, 0]) + 0.35 * np.sin(9.0 * X[:, 0]) + 0.1 * RNG.normal(size=N)
NAMES, LOCATIONS = ("variance", "lengthscale", "noise"), np.array([0.0, 0.0, -1.0])


def model(X, y=None):
    variance, lengthscale, noise = (
        numpyro.sample(name, dist.LogNormal(loc, 1.0))
        for name, loc in zip(NAMES, LOCATIONS, strict=True)
    )
    kernel = sgp.kernels.RBF(variance, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def log_density(logs):
    """Of responses and logs of hyperparameters, by dense algebra."""
    variance, lengthscale, noise = np.exp(logs)
    K = variance * np.exp(-0.5 * ((X - X.T) / lengthscale) ** 2) + noise**2 * np.eye(N)
    L = np.linalg.cholesky(K)
    white = np.linalg.solve(L, Y)
    found = -0.5 * (white @ white + N * np.log(2 * np.pi)) - np.log(np.diag(L)).sum()
    return found - 0.5 * np.sum((logs - LOCATIONS) ** 2) - 1.5 * np.log(2 * np.pi)


def evidence_at(start, number=3000):
    """Log evidence and median lengthscale around a mode, by weights of Gaussian draws."""
    mode = minimize(lambda z: -log_density(z), start, method="Nelder-Mead").x
    steps = 0.05 * np.eye(3)
    at = [[log_density(mode + a + b) for b in (*steps, *-steps)] for a in (*steps, *-steps)]
    at = np.array(at)
    hessian = -(at[:3, :3] - at[:3, 3:] - at[3:, :3] + at[3:, 3:]) / (4 * 0.05**2)
    q = multivariate_normal(mode, 1.5 * np.linalg.inv(hessian), seed=0)
    draws = q.rvs(number)
    weights = np.array([log_density(z) for z in draws]) - q.logpdf(draws)
    total = logsumexp(weights)
    shares = np.exp(weights - total)
    order = np.argsort(draws[:, 1])
    median = draws[order[np.searchsorted(np.cumsum(shares[order]), 0.5)], 1]
    return total - np.log(number), np.exp(median), 1.0 / np.sum(shares**2)


@pytest.mark.parametrize(
    "approximation",
    [
        pytest.param(sgp.VGP(), id="VGP", marks=pytest.mark.slow),
        pytest.param(sgp.SVGP(45), id="SVGP", marks=pytest.mark.slow),
    ],
)
def test_a_wiggle_on_a_trend_is_no_noise(approximation):
    """All nodes were at the mode where it is, which has e^-40 of the mass."""
    evidence, lengthscale, effective = evidence_at([-0.5, np.log(0.25), -2.2])
    other, _, _ = evidence_at([0.0, np.log(2.0), -1.2])
    assert effective > 500 and evidence > other + 10.0  # errors of .05 at most
    found = sgp.nested(model, approximation, (X, Y), progress_bar=False)
    lost = evidence - found.log_evidence
    assert abs(lost) < 0.1 if isinstance(approximation, sgp.VGP) else 0.0 < lost < 5.0
    median = np.median(found.hyperparameters["lengthscale"])
    assert_allclose(median, lengthscale, rtol=0.05)

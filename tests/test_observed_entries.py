"""Densities of observations in other numbers than rows of f, each of one row of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.polynomial.hermite import hermgauss
from numpy.testing import assert_allclose
from numpyro import handlers
from scipy.special import logsumexp
from scipy.stats import norm, poisson

import numpyro_sgp as sgp
from tests.helpers import slow

# Narrow beside q(f), so that nodes have to be moved for each observation; what is left to
# those that are not moved is wrong in the seventh digit.
NOISE = 0.02
RNG = np.random.default_rng(0)
X = np.linspace(0.0, 3.0, 6)[:, None]
INDEX = np.array([4, 0, 4, 4, 2, 1, 5, 4, 0, 2])  # and not 3
Y = np.sin(X[INDEX, 0]) + 0.5 * RNG.normal(size=10)


def posterior(fit, *args):
    found = fit.guide.posterior(fit.params, *args)
    return {k: (np.asarray(q.mean), np.asarray(q.variance)) for k, q in found.items()}


def untrained(model, *data):
    """A fit with a q(u) that is not the prior's."""
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=X[::2]))
    guide.setup(*data)
    params = guide.starts(jax.random.key(0), data, {})
    keys = zip(
        sorted(params), jax.random.split(jax.random.key(1), len(params)), strict=True
    )
    moved = {k: 0.3 * jax.random.normal(key, params[k].shape) for k, key in keys}
    params = {k: v + moved[k] * k.endswith("qu_mu") for k, v in params.items()}
    return sgp.Fitted(guide, params, data)


def indexed(X, index, y=None, mask=True):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(index)), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f[index], NOISE), obs=y)


@pytest.mark.parametrize("masked", [False, slow(True)])
def test_several_observations_of_a_row_have_a_density_each(masked):
    fitted = untrained(indexed, X, INDEX, Y)
    mask = np.arange(10) % 3 > 0 if masked else np.ones(10, bool)
    found = fitted.log_score(X, INDEX, Y, mask=mask)["y"]
    mean, variance = posterior(fitted, X, INDEX)["f"]
    exact = norm.logpdf(Y, mean[INDEX], np.sqrt(variance[INDEX] + NOISE**2))
    assert_allclose(found.rows, np.where(mask, exact, np.nan), rtol=1e-6)
    assert_allclose(found.mean, exact[mask].mean(), rtol=1e-6)
    other = np.array([3, 3, 1])  # and for others again
    found = fitted.log_score(X, other, Y[:3])["y"].rows
    exact = norm.logpdf(Y[:3], mean[other], np.sqrt(variance[other] + NOISE**2))
    assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.slow
def test_a_grid_and_two_sites_of_parts_of_the_rows():
    def model(X, y=None, z=None, counts=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("a", 3, dim=-2), numpyro.plate("b", 2, dim=-1):
            numpyro.sample("y", dist.Normal(f.reshape(2, 3).T, NOISE), obs=y)
        with numpyro.plate("first", 4):
            numpyro.sample("z", dist.Normal(2.0 * f[:4], 0.5), obs=z)
        with numpyro.plate("last", 2):
            numpyro.sample("counts", dist.Poisson(jnp.exp(f[4:])), obs=counts)

    y, z, counts = RNG.normal(size=(3, 2)), RNG.normal(size=4), np.array([2, 0])
    fitted = untrained(model, X, y, z, counts)
    found = fitted.log_score(X, y, z, counts)
    mean, variance = posterior(fitted, X)["f"]
    spread = np.sqrt(variance + NOISE**2)
    exact = norm.logpdf(y, mean.reshape(2, 3).T, spread.reshape(2, 3).T)
    assert_allclose(found["y"].rows, exact, rtol=1e-6)
    exact = norm.logpdf(z, 2.0 * mean[:4], np.sqrt(4.0 * variance[:4] + 0.25))
    assert_allclose(found["z"].rows, exact, rtol=1e-6)
    nodes, weights = hermgauss(100)
    f = mean[4:] + np.sqrt(2.0 * variance[4:]) * nodes[:, None]
    exact = logsumexp(
        poisson.logpmf(counts, np.exp(f)), b=weights[:, None] / np.sqrt(np.pi), axis=0
    )
    assert_allclose(found["counts"].rows, exact, rtol=1e-6)


@pytest.mark.slow
def test_functions_of_other_rows():
    """Those of f and g have other numbers, and sums have nodes of both."""
    W, at = np.linspace(0.0, 2.0, 4)[:, None], np.array([0, 1, 2, 3, 3, 2, 1, 0, 0, 1])

    def model(X, W, index, at, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5), W))
        with numpyro.plate("data", len(index)):
            numpyro.sample("y", dist.Normal(f[index] - g[at], 0.3), obs=y)

    fitted = untrained(model, X, W, INDEX, at, Y)
    found = fitted.log_score(X, W, INDEX, at, Y)["y"].rows
    both = posterior(fitted, X, W, INDEX, at)
    mean = both["f"][0][INDEX] - both["g"][0][at]
    variance = both["f"][1][INDEX] + both["g"][1][at]
    assert_allclose(found, norm.logpdf(Y, mean, np.sqrt(variance + 0.09)), rtol=1e-6)


def test_one_event_of_several_rows_is_none_of_a_row():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", 3):
            pairs = f.reshape(3, 2)
            numpyro.sample("y", dist.Normal(pairs, NOISE).to_event(1), obs=y)

    y = RNG.normal(size=(3, 2))
    fitted = untrained(model, X, y)
    with pytest.raises(ValueError, match=r"shape \(3,\), not one for each of the 6 rows"):
        fitted.log_score(X, y)

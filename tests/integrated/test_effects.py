"""Effects of Gaussian priors of other kinds than Normal are part of the field."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy.sparse import csr_matrix

import numpyro_sgp as sgp
from numpyro_sgp.integrated.effects import is_gaussian, of_standardised

N, G, NOISE = 30, 5, 0.3
RNG = np.random.default_rng(4)
X = np.linspace(0.0, 5.0, N)[:, None]
GROUP = np.arange(N) % G
Y = np.sin(X[:, 0]) + 0.3 * GROUP + NOISE * RNG.normal(size=N)
# Neighbours of each of five areas in a ring.
RING = np.roll(np.eye(G), 1, axis=0) + np.roll(np.eye(G), -1, axis=0)
AFFINE = dist.transforms.AffineTransform

PRIORS = {
    "walk": lambda: dist.GaussianRandomWalk(0.5, G),
    "affine": lambda: dist.TransformedDistribution(
        dist.Normal(0.1, 1.0).expand([G]).to_event(1), [AFFINE(0.5, 2.0), AFFINE(-1.0, 0.5)]
    ),
    "affine of several": lambda: dist.TransformedDistribution(
        dist.MultivariateNormal(jnp.arange(float(G)), 0.5 * jnp.eye(G) + 0.5),
        AFFINE(0.5, -2.0),
    ),
    "areas": lambda: dist.CAR(0.3, 0.9, 2.0, RING),
    "sparse areas": lambda: dist.CAR(0.3, 0.9, 2.0, csr_matrix(RING), is_sparse=True),
}
# Means and covariances of these, by hand.
LOWER = np.tril(np.ones((G, G)))
MOMENTS = {
    "walk": (np.zeros(G), 0.25 * LOWER @ LOWER.T),
    "affine": (np.full(G, -1.0 + 0.5 * (0.5 + 2.0 * 0.1)), np.eye(G)),
    "affine of several": (0.5 - 2.0 * np.arange(G), 4.0 * (0.5 * np.eye(G) + 0.5)),
    "areas": (np.full(G, 0.3), np.linalg.inv(2.0 * (2.0 * np.eye(G) - 0.9 * RING))),
}
MOMENTS["sparse areas"] = MOMENTS["areas"]


def model_of(name):
    def model(X, group, y=None):
        b = numpyro.sample("b", PRIORS[name]())
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + b[group], NOISE), obs=y)

    return model


def exact(name):
    """Log evidence, and moments of f and b, by dense algebra."""
    mean, S = MOMENTS[name]
    K, B = np.exp(-0.5 * (X - X.T) ** 2), np.eye(G)[GROUP]
    total = K + B @ S @ B.T + NOISE**2 * np.eye(N)
    left = Y - B @ mean
    evidence = -0.5 * (left @ np.linalg.solve(total, left) + N * np.log(2 * np.pi))
    evidence -= 0.5 * np.linalg.slogdet(total)[1]
    moments = []
    for prior, cross, own in ((np.zeros(N), K, K), (mean, S @ B.T, S)):
        weights = np.linalg.solve(total, cross.T).T
        moments.append((prior + weights @ left, np.diag(own - weights @ cross.T)))
    return evidence, moments


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIORS)
def test_one_gaussian_is_exact(name):
    """They were at points: sds of f a fifth to a half of what they are."""
    found = sgp.fit(
        model_of(name), sgp.VGP(), (X, GROUP, Y), joint=True, progress_bar=False
    )
    evidence, (f, b) = exact(name)
    # VGP leaves out jitter alone.
    assert abs(found.bound - evidence) < 1e-3
    posterior = found.posterior(X, GROUP)
    assert_allclose(posterior["f"].mean, f[0], atol=1e-4)
    assert_allclose(posterior["f"].variance, f[1], rtol=1e-3)
    assert_allclose(posterior["b"].mean, b[0], atol=1e-4)
    assert_allclose(posterior["b"].variance, b[1], rtol=1e-3)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PRIORS)
def test_values_have_the_prior_s_moments(name):
    fn, mean = PRIORS[name](), MOMENTS[name][0]
    value, _ = of_standardised(fn, jnp.zeros(G))
    J = jax.jacobian(lambda e: of_standardised(fn, e)[0])(jnp.zeros(G))
    assert_allclose(value, mean, atol=1e-12)
    assert_allclose(J @ J.T, MOMENTS[name][1], atol=1e-12)


def test_a_walk_in_a_plate_has_one_for_each():
    fn = dist.GaussianRandomWalk(jnp.array([1.0, 2.0]), 3).expand([4, 2])
    e = RNG.normal(size=(4, 2, 3))
    value, _ = of_standardised(fn, e)
    assert_allclose(value, np.cumsum(e * np.array([1.0, 2.0])[:, None], axis=-1))


def test_what_is_no_gaussian_is_none():
    assert not is_gaussian(dist.LogNormal(0.0, 1.0))
    assert not is_gaussian(dist.Normal(0.0, 1.0).mask(False))
    assert not is_gaussian(PRIORS["affine"]().mask(False))
    exp = dist.transforms.ExpTransform()
    assert not is_gaussian(dist.TransformedDistribution(dist.Normal(0.0, 1.0), exp))
    assert is_gaussian(dist.Normal(0.0, 1.0).expand([3]).to_event(1))


@pytest.mark.slow
def test_draws_of_functions_have_them_too():
    found = sgp.nested(model_of("walk"), sgp.VGP(), (X, GROUP, Y), progress_bar=False)
    _, (f, _) = exact("walk")
    draws = np.asarray(found.sample(jax.random.key(0), X, GROUP, sample_shape=(2000,))["f"])
    # Standard errors of 1 / sqrt(2000) sds; four of them at each of thirty rows.
    assert np.abs((draws.mean(axis=0) - f[0]) / np.sqrt(f[1])).max() < 0.1
    assert_allclose(draws.std(axis=0), np.sqrt(f[1]), rtol=0.08)

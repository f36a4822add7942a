"""Posteriors that are mixtures of Gaussians, against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp
from numpyro_sgp.families import Block, BlockGaussian, MixtureGaussian
from tests.helpers import rbf

K, Q, N, M = 2, 2, 4, 3
X = np.array([-1.7, -0.4, 0.9, 2.2])[:, None]
Z = np.array([-1.5, 0.1, 1.4])[:, None]
VARIANCES, LENGTHSCALES, LEVEL = (1.3, 0.6), (0.7, 1.1), 0.4
S = 20_000
rng = np.random.default_rng(0)
MU = rng.normal(size=(K, Q, M)) + np.array([1.0, -1.0])[:, None, None]
SQRT = 0.3 * np.tril(rng.normal(size=(K, Q, M, M)), -1) + 0.5 * np.eye(M)
LOGITS = np.array([0.3, -0.5])
WEIGHTS = np.exp(LOGITS) / np.exp(LOGITS).sum()


def make(entropy="pairwise"):
    kernel = sgp.kernels.RBF(jnp.array(VARIANCES), jnp.array(LENGTHSCALES))
    prior = sgp.GaussianProcess(kernel, jnp.asarray(X), LEVEL)
    q = BlockGaussian((Block(jnp.asarray(MU), jnp.asarray(SQRT)),))
    q = MixtureGaussian(q, jnp.asarray(LOGITS), entropy)
    return sgp.SparsePosterior(prior, (jnp.asarray(Z),), q, 0.0)


def dense():
    """Means ``(K, Q, N)`` and covariances ``(K, Q, N, N)`` of each component at X."""
    means, covariances = np.zeros((K, Q, N)), np.zeros((K, Q, N, N))
    for q, parameters in enumerate(zip(VARIANCES, LENGTHSCALES, strict=True)):
        Kuu, Kfu = rbf(Z, Z, *parameters), rbf(X, Z, *parameters)
        projection = Kfu @ np.linalg.inv(Kuu)
        residual = rbf(X, X, *parameters) - projection @ Kfu.T
        L = np.linalg.cholesky(Kuu)
        for k in range(K):
            means[k, q] = LEVEL + projection @ L @ MU[k, q]
            root = projection @ L @ SQRT[k, q]
            covariances[k, q] = residual + root @ root.T
    return means, covariances


def joint_moments():
    """Mean and covariance of the mixture over latent functions and rows together."""
    means, covariances = dense()
    flat = means.reshape(K, Q * N)
    mean = WEIGHTS @ flat
    covariance = (flat - mean).T @ (WEIGHTS[:, None] * (flat - mean))
    for q in range(Q):
        own = slice(q * N, (q + 1) * N)
        covariance[own, own] += np.tensordot(WEIGHTS, covariances[:, q], axes=1)
    return mean, covariance


@pytest.fixture(scope="module")
def computed():
    """What the posterior says, in one compiled program."""

    @jax.jit
    def everything(value):
        posterior = make()
        keys = jax.random.split(jax.random.key(0))
        return {
            "components": [posterior.marginals(k) for k in range(K)],
            "places": [posterior.place(jnp.full((Q, N), 2.0), k) for k in range(K)],
            "mean": posterior.mean,
            "variance": posterior.variance,
            "covariance": posterior.covariance_matrix,
            "log_prob": posterior.log_prob(value),
            "draws": posterior.sample(keys[0], (S,)),
            "parametric": posterior.sample_parametric(keys[1], (S,)),
            "kl": {e: make(e).prior_kl() for e in ("pairwise", "jensen")},
        }

    return jax.tree.map(np.asarray, everything(values()))


def values():
    return np.random.default_rng(1).normal(size=(5, Q, N))


@pytest.mark.slow
def test_marginals_of_a_component_are_its_own(computed):
    means, covariances = dense()
    for k in range(K):
        mean, variance = computed["components"][k]
        sd = np.sqrt(np.diagonal(covariances[k], axis1=-2, axis2=-1))
        assert_allclose(mean, means[k], rtol=1e-10)
        assert_allclose(variance, sd**2, rtol=1e-10)
        assert_allclose(computed["places"][k], means[k] + 2.0 * sd, rtol=1e-10)


def test_moments_are_those_of_the_mixture(computed):
    mean, covariance = joint_moments()
    assert_allclose(computed["mean"].ravel(), mean, rtol=1e-10)
    assert_allclose(computed["variance"].ravel(), np.diag(covariance), rtol=1e-10)
    for q in range(Q):
        own = slice(q * N, (q + 1) * N)
        assert_allclose(computed["covariance"][q], covariance[own, own], rtol=1e-10)


def test_log_prob_is_joint_over_latent_functions(computed):
    means, covariances = dense()
    log_prob = [
        sum(
            multivariate_normal(means[k, q], covariances[k, q]).logpdf(values()[:, q])
            for q in range(Q)
        )
        for k in range(K)
    ]
    expected = logsumexp(np.array(log_prob) + np.log(WEIGHTS)[:, None], axis=0)
    assert computed["log_prob"].shape == (5, Q)  # shared out among the functions
    # The default jitter of the factor of the covariance is 1e-8.
    assert_allclose(computed["log_prob"].sum(axis=1), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["draws", "parametric"])
def test_draws_have_the_moments_of_the_mixture(computed, kind):
    mean, covariance = joint_moments()
    if kind == "parametric":  # without what the inducing variables leave open
        for q, parameters in enumerate(zip(VARIANCES, LENGTHSCALES, strict=True)):
            own = slice(q * N, (q + 1) * N)
            Kuu, Kfu = rbf(Z, Z, *parameters), rbf(X, Z, *parameters)
            residual = rbf(X, X, *parameters) - Kfu @ np.linalg.solve(Kuu, Kfu.T)
            covariance[own, own] -= residual
    draws = computed[kind].reshape(S, Q * N)
    centred = draws - mean
    error = centred.std(axis=0) / np.sqrt(S)
    assert (np.abs(centred.mean(axis=0)) < 5 * error).all()
    # Also between latent functions, which share the component. 44 numbers within five
    # standard errors: one key in 4e4 fails.
    products = centred[:, :, None] * centred[:, None, :]
    error = products.std(axis=0) / np.sqrt(S)
    assert (np.abs(products.mean(axis=0) - covariance) < 5 * error).all()
    assert np.abs(covariance[:N, N:]).max() > 0.3


def test_kl_is_one_number_over_all_latent_functions(computed):
    within, entropies = 0.0, {"pairwise": 0.0, "jensen": 0.0}
    flat = MU.reshape(K, Q * M)
    covariances = np.zeros((K, Q * M, Q * M))
    for q in range(Q):
        own = slice(q * M, (q + 1) * M)
        covariances[:, own, own] = SQRT[:, q] @ np.swapaxes(SQRT[:, q], -1, -2)
    log_det = np.linalg.slogdet(covariances)[1]
    for k, weight in enumerate(WEIGHTS):
        trace, square = np.trace(covariances[k]), flat[k] @ flat[k]
        within += 0.5 * weight * (trace + square + Q * M * np.log(2 * np.pi))
        overlap, affinity = 0.0, 0.0
        for l in range(K):
            d, total = flat[k] - flat[l], covariances[k] + covariances[l]
            overlap += WEIGHTS[l] * multivariate_normal(0 * d, total).pdf(d)
            distance = d @ np.linalg.solve(total, d) / 4
            distance += 0.5 * np.linalg.slogdet(total / 2)[1]
            affinity += WEIGHTS[l] * np.exp(-distance + (log_det[k] + log_det[l]) / 4)
        own = 0.5 * (log_det[k] + Q * M * np.log(2 * np.pi * np.e))
        entropies["jensen"] -= weight * np.log(overlap)
        entropies["pairwise"] += weight * (own - np.log(affinity))
    for name, entropy in entropies.items():
        assert computed["kl"][name].shape == ()
        assert_allclose(computed["kl"][name], within - entropy, rtol=1e-10)


def test_weights_are_those_of_the_logits():
    posterior = make()
    assert posterior.num_components == K
    assert_allclose(posterior.log_weights, np.log(WEIGHTS), rtol=1e-12)


def test_bad_arguments_are_refused():
    posterior = make()
    q = MixtureGaussian(posterior.q.components, jnp.zeros(3))
    with pytest.raises(ValueError, match="There are 3 logits, but q.u. has 2 components"):
        sgp.SparsePosterior(posterior.prior, (jnp.asarray(Z),), q)
    with pytest.raises(ValueError, match="entropy must be one of .*, got 'exact'"):
        make("exact")

"""Posteriors with one Gaussian over all latent functions, against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.linalg import block_diag
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp
from numpyro_sgp.families import CoupledGaussian
from tests.helpers import rbf

Q, N, M = 2, 4, 3
X = np.array([-1.7, -0.4, 0.9, 2.2])[:, None]
Z = np.array([-1.5, 0.1, 1.4])[:, None]
VARIANCES, LENGTHSCALES, LEVEL = (1.3, 0.6), (0.7, 1.1), 0.4
S = 20_000
rng = np.random.default_rng(0)
MU = rng.normal(size=(Q, M))
SQRT = 0.4 * np.tril(rng.normal(size=(Q * M, Q * M)), -1) + 0.5 * np.eye(Q * M)
VALUES = rng.normal(size=(5, Q, N))


def make(sqrt):
    kernel = sgp.kernels.RBF(jnp.array(VARIANCES), jnp.array(LENGTHSCALES))
    prior = sgp.GaussianProcess(kernel, jnp.asarray(X), LEVEL)
    q = CoupledGaussian(jnp.asarray(MU), sqrt)
    return sgp.SparsePosterior(prior, (jnp.asarray(Z),), q, jitter=0.0)


def dense(sqrt=SQRT):
    """Mean ``(Q N,)`` and covariance over latent functions and rows together."""
    projections, residuals = [], []
    for parameters in zip(VARIANCES, LENGTHSCALES, strict=True):
        Kuu, Kfu = rbf(Z, Z, *parameters), rbf(X, Z, *parameters)
        projections.append(Kfu @ np.linalg.inv(Kuu) @ np.linalg.cholesky(Kuu))
        residuals.append(rbf(X, X, *parameters) - Kfu @ np.linalg.solve(Kuu, Kfu.T))
    P = block_diag(*projections)
    return LEVEL + P @ MU.ravel(), block_diag(*residuals) + P @ sqrt @ sqrt.T @ P.T


@jax.jit
def everything(sqrt):
    posterior = make(sqrt)
    keys = jax.random.split(jax.random.key(0))
    units = jnp.eye(Q)[:, :, None] * jnp.ones(N)  # one latent function's node at a time
    return {
        "mean": posterior.mean,
        "variance": posterior.variance,
        "covariance": posterior.covariance_matrix,
        "row_covariance": posterior.row_covariance,
        "place": jnp.stack([posterior.place(unit) for unit in units]) - posterior.mean,
        "kl": posterior.prior_kl(),
        "log_prob": posterior.log_prob(VALUES),
        "draws": posterior.sample(keys[0], (S,)),
    }


@pytest.fixture(scope="module")
def computed():
    return jax.tree.map(np.asarray, everything(SQRT))


def test_moments_are_those_of_the_joint_gaussian(computed):
    mean, covariance = dense()
    assert_allclose(computed["mean"].ravel(), mean, rtol=1e-10)
    assert_allclose(computed["variance"].ravel(), np.diag(covariance), rtol=1e-10)
    by_function = covariance.reshape(Q, N, Q, N)
    for q in range(Q):
        assert_allclose(computed["covariance"][q], by_function[q, :, q], rtol=1e-10)
    rows = np.einsum("qnpn->nqp", by_function)
    assert computed["row_covariance"].shape == (N, Q, Q)
    assert_allclose(computed["row_covariance"], rows, rtol=1e-10)
    assert np.abs(rows[:, 0, 1]).max() > 0.1


def test_values_at_nodes_have_the_covariance_of_their_row(computed):
    root = np.moveaxis(computed["place"], -1, 0)  # row, node, function
    assert_allclose(
        np.swapaxes(root, 1, 2) @ root, computed["row_covariance"], rtol=1e-10, atol=1e-12
    )


def test_kl_is_one_number_over_all_latent_functions(computed):
    trace, square = np.trace(SQRT @ SQRT.T), np.sum(MU**2)
    log_det = np.linalg.slogdet(SQRT @ SQRT.T)[1]
    assert computed["kl"].shape == ()
    assert_allclose(computed["kl"], 0.5 * (trace + square - Q * M - log_det), rtol=1e-12)


def test_log_prob_is_joint_over_latent_functions(computed):
    expected = multivariate_normal(*dense()).logpdf(VALUES.reshape(5, -1))
    assert computed["log_prob"].shape == (5, Q)  # shared out among the functions
    assert_allclose(computed["log_prob"].sum(axis=1), expected, rtol=1e-6)


def test_draws_have_the_joint_moments(computed):
    mean, covariance = dense()
    centred = computed["draws"].reshape(S, -1) - mean
    variance = np.diag(covariance)
    # 44 numbers within five standard errors: one key in 4e4 fails.
    assert (np.abs(centred.mean(axis=0)) < 5 * np.sqrt(variance / S)).all()
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / S)
    assert (np.abs(centred.T @ centred / S - covariance) < 5 * error).all()


def test_latent_functions_are_known_not_to_be_independent():
    assert not make(SQRT).independent_latents


def test_a_factor_of_another_size_is_refused():
    with pytest.raises(
        ValueError, match=r"2 latent functions with 3 .*\(6, 6\), got \(3, 3"
    ):
        make(np.eye(M))

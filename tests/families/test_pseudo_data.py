"""q(u) by pseudo-data, Theorem 2 of SAVIGP, against eq. (34-35) with dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import numpyro_sgp as sgp
from numpyro_sgp.families import DualGaussian, PseudoDataGaussian
from tests.helpers import rbf

X = np.linspace(-2.0, 2.0, 6)[:, None]
Z = np.array([-1.5, 0.1, 1.4])[:, None]
X_NEW = np.array([-0.7, 2.5])[:, None]
LENGTHSCALES = (0.8, 1.5)
rng = np.random.default_rng(0)
LINEAR = rng.normal(size=(2, 6))
SITES = rng.uniform(-0.4, 1.2, size=(2, 6))


def equation_34(sites, lengthscale):
    """S by its formula, of one latent function."""
    Kzz, Kzx = rbf(Z, Z, 1.0, lengthscale), rbf(Z, X, 1.0, lengthscale)
    return Kzz @ np.linalg.inv(Kzz + Kzx @ np.diag(sites) @ Kzx.T) @ Kzz


@jax.jit
def posterior_moments(linear, sites):
    """Whitened square root, and the posterior of two latent functions at new inputs."""
    prior = sgp.GaussianProcess(
        sgp.kernels.RBF(jnp.ones(2), jnp.array(LENGTHSCALES)), X_NEW
    )
    q = PseudoDataGaussian(linear, sites, jnp.asarray(X), 3)
    posterior = sgp.SparsePosterior(prior, (jnp.asarray(Z),), q, jitter=0.0)
    (block,) = posterior.q.blocks
    moments = posterior.mean, posterior.variance, posterior.covariance_matrix
    return block.sqrt, posterior.chol, moments, posterior.prior_kl()


def test_moments_are_those_of_equation_34_with_sites_of_either_sign():
    assert (SITES.min(axis=1) < -0.2).all()
    sqrt, chol, (mean, variance, covariance), kl = posterior_moments(LINEAR, SITES)
    for q, lengthscale in enumerate(LENGTHSCALES):
        S = equation_34(SITES[q], lengthscale)
        root = chol[q] @ sqrt[q]
        # The condition number of K_zz is below 20.
        assert_allclose(root @ root.T, S, rtol=1e-10, atol=1e-12)
        Kzz, Knz = rbf(Z, Z, 1.0, lengthscale), rbf(X_NEW, Z, 1.0, lengthscale)
        A = Knz @ np.linalg.inv(Kzz)
        m = S @ np.linalg.solve(Kzz, rbf(Z, X, 1.0, lengthscale) @ LINEAR[q])
        dense = rbf(X_NEW, X_NEW, 1.0, lengthscale) - A @ Knz.T + A @ S @ A.T
        assert_allclose(mean[q], A @ m, rtol=1e-10)
        assert_allclose(covariance[q], dense, rtol=1e-10, atol=1e-12)
        assert_allclose(variance[q], np.diag(dense), rtol=1e-10)
        log_dets = np.linalg.slogdet(Kzz)[1] - np.linalg.slogdet(S)[1]
        quadratic = np.trace(np.linalg.solve(Kzz, S)) + m @ np.linalg.solve(Kzz, m)
        assert_allclose(kl[q], 0.5 * (quadratic - 3 + log_dets), rtol=1e-10)


def test_result_is_nan_where_there_is_no_such_gaussian():
    sites = SITES.copy()
    sites[1] = -5.0  # of one function only
    assert np.linalg.eigvalsh(equation_34(sites[1], LENGTHSCALES[1])).min() < 0
    sqrt, _, (_, variance, _), kl = posterior_moments(LINEAR, sites)
    assert np.isnan(kl[1]) and np.isnan(variance[1]).all()
    assert np.isfinite(kl[0]) and np.isfinite(variance[0]).all()
    assert np.isfinite(sqrt[0]).all()


def test_gaussian_sites_give_the_posterior_of_sparse_gp_regression():
    noise, y = 0.5, LINEAR
    given = y / noise**2, np.full((2, 6), noise**-2)
    _, _, (mean, _, covariance), _ = posterior_moments(*given)
    for q, lengthscale in enumerate(LENGTHSCALES):
        # Titsias (2009): S = K_zz (K_zz + K_zx K_xz / noise^2)^-1 K_zz.
        Kzz, Kzx = rbf(Z, Z, 1.0, lengthscale), rbf(Z, X, 1.0, lengthscale)
        Knz = rbf(X_NEW, Z, 1.0, lengthscale)
        residual = rbf(X_NEW, X_NEW, 1.0, lengthscale) - Knz @ np.linalg.solve(Kzz, Knz.T)
        precision = Kzz + Kzx @ Kzx.T / noise**2
        expected = residual + Knz @ np.linalg.solve(precision, Knz.T)
        assert_allclose(covariance[q], expected, rtol=1e-10, atol=1e-12)
        expected = Knz @ np.linalg.solve(precision, Kzx @ y[q]) / noise**2
        assert_allclose(mean[q], expected, rtol=1e-10)


@pytest.mark.slow
def test_variances_of_many_inducing_points_are_dense_ones_for_every_upper_factor():
    # Products with factors of more than 512 rows are made by blocks.
    M, rows, noise = 520, 390, 0.3
    Z = np.linspace(0.0, 60.0, M)[:, None]
    X_new = np.linspace(0.05, 60.0, rows)[:, None]

    def matern12(A, B):
        return np.exp(-np.abs(A - B.T))

    A = np.linalg.solve(np.linalg.cholesky(matern12(Z, Z)), matern12(Z, X_new))
    S = np.linalg.inv(np.eye(M) + A @ A.T / noise**2)
    expected = 1.0 - np.sum(A**2, axis=0) + np.sum(A * (S @ A), axis=0)
    prior = sgp.GaussianProcess(sgp.kernels.Matern12(), jnp.asarray(X_new))
    precision = np.full(rows, noise**-2)
    by_sites = PseudoDataGaussian(np.zeros(rows), precision, jnp.asarray(X_new), M)
    # The same Gaussian as one site on u: L^-T (S^-1 - I) L^-1.
    B = np.linalg.solve(matern12(Z, Z), matern12(Z, X_new))
    by_dual = DualGaussian(jnp.zeros(M), jnp.asarray(B @ B.T / noise**2))
    collapsed = sgp.CollapsedSVGP(
        sgp.kernels.Matern12(), jnp.asarray(X_new), jnp.asarray(Z), noise, jitter=0.0
    )
    for q in (by_sites, by_dual, collapsed.optimal_q(jnp.zeros(rows))):
        posterior = sgp.SparsePosterior(prior, (jnp.asarray(Z),), q, jitter=0.0)
        assert_allclose(posterior.variance, expected, rtol=1e-7)

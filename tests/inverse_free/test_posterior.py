"""The posterior of inverse-free bounds as a distribution, and its estimated KL."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose
from numpyro.distributions.kl import kl_divergence

import numpyro_sgp as sgp
from tests import helpers

KEY = random.key(0)
N, M, JITTER = 7, 6, 1e-6
X = jnp.linspace(-2.0, 2.0, N)[:, None]
Z = jnp.linspace(-1.8, 1.9, M)[:, None]
K = helpers.rbf(Z, Z, 1.3, 0.8) + 1.3 * JITTER * np.eye(M)
KINDS = ["relaxed", "diagonal", "lc", "fr"]


def factors(kind, seed=0):
    """m_hat, a factor of T, and that of S_hat or of the pseudo-noise."""
    rng = np.random.default_rng(seed)
    near = np.eye(M) + np.tril(0.2 * rng.normal(size=(M, M)))
    noise = np.eye(M) + np.tril(0.3 * rng.normal(size=(M, M)))
    if kind in ("relaxed", "diagonal"):
        R = np.diag(np.diag(noise)) if kind == "diagonal" else noise
        goal, factor = K + R @ R.T, np.diag(R) if kind == "diagonal" else R
    else:
        goal, factor = K, 0.5 * np.linalg.cholesky(np.linalg.inv(K)) @ noise
    root = np.linalg.cholesky(np.linalg.inv(goal)) @ near
    return tuple(jnp.asarray(v) for v in (rng.normal(size=M), root, factor))


def posterior(kind, values=None, Z=Z, variance=1.3, num_probes=None, batch=()):
    bound = "relaxed" if kind == "diagonal" else kind
    prior = sgp.GaussianProcess(sgp.kernels.RBF(jnp.full(batch, variance), 0.8), X, 0.5)
    values = factors(kind) if values is None else values
    values = [jnp.broadcast_to(v, (*batch, *v.shape)) for v in values]
    return sgp.InverseFreePosterior(prior, Z, *values, bound, num_probes, JITTER)


def dense(kind):
    """Mean and covariance of f(X), by eq. (10) and the conditional of f given u."""
    weights, root, factor = (np.asarray(v) for v in factors(kind))
    T = root @ root.T
    R = np.diag(factor) if kind == "diagonal" else factor
    S_hat = T @ R @ R.T @ T if kind in ("relaxed", "diagonal") else R @ R.T
    S = K + K @ T @ K @ T @ K - 2 * K @ T @ K + K @ S_hat @ K
    A = np.linalg.solve(K, helpers.rbf(Z, X, 1.3, 0.8))
    covariance = helpers.rbf(X, X, 1.3, 0.8) + A.T @ (S - K) @ A
    return 0.5 + A.T @ K @ weights, covariance, K @ weights, S


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_moments_are_those_of_the_dense_formulas(kind, batch):
    q, (mean, covariance, _, _) = posterior(kind, batch=batch), dense(kind)
    assert q.mean.shape == (*batch, N) and q.covariance_matrix.shape == (*batch, N, N)
    same = lambda a, b: assert_allclose(a, np.broadcast_to(b, a.shape), atol=1e-9)  # noqa: E731
    same(q.mean, mean)
    same(q.variance, np.diag(covariance))
    same(q.covariance_matrix, covariance)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_sparse_posterior_in_other_parameters(kind):
    q, (_, _, m, S) = posterior(kind), dense(kind)
    plain = q.as_sparse_posterior()
    assert_allclose(plain.mean, q.mean, atol=1e-9)
    assert_allclose(plain.covariance_matrix, q.covariance_matrix, atol=1e-6)
    known = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1] - M
    known = 0.5 * (known + np.trace(np.linalg.solve(K, S)) + m @ np.linalg.solve(K, m))
    assert_allclose(plain.prior_kl(), known, rtol=1e-7)
    # The bound's own is that, or more: of lc it is of another q(u).
    if kind == "fr":
        assert_allclose(q.prior_kl(), known, rtol=1e-7)
    elif kind != "lc":
        assert q.prior_kl() > known
        # log|S*| and log|K| leave it for tr(Kt T) - M - log|T| (Cortinovis et al. 2026).
        weights, root, R = (np.asarray(v) for v in factors(kind))
        R = np.diag(R) if kind == "diagonal" else R
        T, noise = root @ root.T, R @ R.T
        Kt = K + noise
        known = weights @ K @ weights + np.trace((T @ Kt @ T - 2 * T) @ K) - M
        known += np.trace(Kt @ T) - np.linalg.slogdet(T)[1] - np.linalg.slogdet(noise)[1]
        assert_allclose(q.prior_kl(), 0.5 * known, rtol=1e-9)
    if kind == "fr":
        assert_allclose(kl_divergence(q, q.prior), known, rtol=1e-7)
    else:
        with pytest.raises(ValueError, match=f"bound='{q.bound}'.* Use TraceGP_ELBO"):
            kl_divergence(q, q.prior)
    parts = q.parallel(), q.orthogonal()
    assert_allclose(sum(p.mean for p in parts), q.mean, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [helpers.slow("relaxed"), "fr"])
def test_draws_have_its_moments(kind):
    q = posterior(kind)
    num = 4000
    draws = {
        "joint": q.sample(KEY, (num,)),
        "functions": q.sample_functions(KEY, (num,), num_features=16)(X),
    }
    for f in draws.values():
        # Seven means and 49 products at five standard errors: wrong once in 30,000.
        error = f.std(0) / num**0.5
        assert jnp.all(jnp.abs(f.mean(0) - q.mean) < 5 * error)
        products = (f - q.mean)[:, :, None] * (f - q.mean)[:, None, :]
        error = products.std(0) / num**0.5
        assert jnp.all(jnp.abs(products.mean(0) - q.covariance_matrix) < 5 * error)
    assert q.sample_parametric(KEY, (2,)).shape == (2, N)
    assert jnp.isfinite(q.log_prob(draws["joint"][0]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_estimated_kl_has_no_bias(kind):
    """Of its gradient, and for the relaxed bound of its value."""
    values = (*factors(kind), Z, jnp.asarray(1.3))
    flat, unravel = ravel_pytree(values)

    def kl(flat, key=None):
        *values, Z, variance = unravel(flat)
        return posterior(kind, values, Z, variance, num_probes=2).prior_kl(key)

    exact, slope = jax.jit(jax.value_and_grad(kl))(flat)
    keys = random.split(KEY, 3000)
    found, slopes = jax.jit(jax.vmap(jax.value_and_grad(kl), (None, 0)))(flat, keys)
    # Some 60 derivatives at five standard errors: wrong once in 30,000.
    error = slopes.std(axis=0) / len(keys) ** 0.5
    assert np.all(np.abs(slopes.mean(axis=0) - slope) < 5 * error + 1e-8 * abs(slope).max())
    assert error.max() > 0 and found.std() > 0
    if kind in ("relaxed", "diagonal"):
        assert abs(found.mean() - exact) < 5 * found.std() / len(keys) ** 0.5
    else:  # near the exact one, and no surrogate
        assert abs(found.mean() - exact) < 0.2 * abs(exact)


def test_bad_arguments():
    prior, (weights, root, R) = posterior("fr").prior, factors("relaxed")
    with pytest.raises(ValueError, match=r"bound must be one of .*'sv'"):
        sgp.InverseFreePosterior(prior, Z, weights, root, R, "sv")
    for bad in [(weights[1:], root, R), (weights, root[1:], R), (weights, root, R[1:])]:
        with pytest.raises(ValueError, match=r"6 inducing points.*\(6, 6\)"):
            sgp.InverseFreePosterior(prior, Z, *bad)

"""Dense posteriors, and q(u) by sites and coupled: exact cases, optima, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.distributions import constraints
from numpyro.infer import SVI
from scipy.special import gammaln
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp
from tests import helpers

KEY = random.key(0)
N = 5
X = jnp.array([-1.8, -0.9, 0.1, 0.8, 1.9])[:, None]
Y = jnp.array([0.3, 1.1, -0.4, 0.2, -0.9])
COUNTS = jnp.array([0.0, 2.0, 1.0, 4.0, 3.0])
Z = jnp.array([-1.2, 0.3, 1.5])[:, None]
NOISE = 0.3


def poisson(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def fit(model, approximation, y, num_points=20):
    """The bound at the optimum, mean and variance of f there, and the parameters."""
    guide = sgp.AutoSparseGP(model, approximation)
    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(num_points))
    svi = SVI(model, guide, optax.adam(0.01), elbo)
    result = sgp.fit_lbfgs(svi, KEY, X, y, progress_bar=False)
    return -result.losses[-1], guide.posterior(result.params, X, y)["f"], result.params


# ---- VGP --------------------------------------------------------------------------------


def test_inducing_points_are_the_distinct_inputs():
    repeated = jnp.concatenate([X, X[1:3]])
    guide = sgp.AutoSparseGP(helpers.gaussian_model, sgp.VGP())
    guide.setup(repeated, jnp.concatenate([Y, Y[1:3]]))
    assert_allclose(guide.setup_state()["initial"]["f"]["Z"], X)
    assert guide.setup_state()["initial"]["f"]["qu_sqrt"].shape == (N, N)


@pytest.fixture(scope="module")
def unwhitened():
    """The loss of VGP(whiten=False) and its terms' gradients at a q away from the prior."""

    def model(X, y):
        lengthscale = numpyro.param("lengthscale", 0.9, constraint=constraints.positive)
        variance = numpyro.param("variance", 1.3, constraint=constraints.positive)
        kernel = sgp.kernels.RBF(variance, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    rng = np.random.default_rng(0)
    sqrt = np.tril(0.2 * rng.normal(size=(N, N)), -1) + 0.4 * np.eye(N)
    params = {
        "f_auto_qu_mu": jnp.asarray(rng.normal(size=N)),
        "f_auto_qu_sqrt": jnp.asarray(sqrt),
        "lengthscale": 0.9,
        "variance": 1.3,
    }
    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(20), sum_sites=False)

    def terms(approximation, differentiate=False):
        guide = sgp.AutoSparseGP(model, approximation)
        guide.setup(X, COUNTS)

        def of(params):
            return elbo.loss(KEY, params, model, guide, X, COUNTS)

        at = (lambda p: (of(p), jax.jacrev(of)(p))) if differentiate else of
        return jax.jit(at)(params)

    return params, terms, terms(sgp.VGP(whiten=False, jitter=0.0), differentiate=True)


def test_vgp_is_svgp_with_inducing_points_at_the_data(unwhitened):
    _, terms, (expected, _) = unwhitened
    options = {"inducing": X, "whiten": False, "jitter": 0.0}
    got = terms(sgp.SVGP(**options, train_inducing=False))
    for name, value in expected.items():
        assert_allclose(got[name], value, rtol=1e-10)


def test_hyperparameters_of_the_unwhitened_posterior_are_in_the_kl_alone(unwhitened):
    params, _, (values, gradients) = unwhitened
    m, S = params["f_auto_qu_mu"], params["f_auto_qu_sqrt"] @ params["f_auto_qu_sqrt"].T
    m, S = np.asarray(m), np.asarray(S)
    # E[y f - e^f - log y!] under N(m, S), whatever the kernel.
    rate = np.exp(m + np.diag(S) / 2)
    factorials = np.array([0, np.log(2), 0, np.log(24), np.log(6)])
    assert_allclose(-values["y"], np.sum(np.asarray(COUNTS) * m - rate - factorials))

    def kl(variance, lengthscale):
        K = helpers.rbf(X, X, variance, lengthscale)
        quadratic = np.trace(np.linalg.solve(K, S)) + m @ np.linalg.solve(K, m)
        return 0.5 * (quadratic - N + np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1])

    assert_allclose(values["f"], kl(1.3, 0.9), rtol=1e-9)
    step = 1e-5
    by_difference = {
        "variance": (kl(1.3 + step, 0.9) - kl(1.3 - step, 0.9)) / (2 * step),
        "lengthscale": (kl(1.3, 0.9 + step) - kl(1.3, 0.9 - step)) / (2 * step),
    }
    for name, expected in by_difference.items():
        # The condition number of K is below 100; steps of 1e-5 leave an error of 1e-9.
        assert_allclose(gradients["y"][name], 0.0, atol=1e-10)
        assert_allclose(gradients["f"][name], expected, rtol=1e-6)


# ---- covariance by sites ----------------------------------------------------------------


def free_form_optimum(Z):
    """
    Bound, mean and variance at the data of the best Gaussian q(u) for counts, by Newton's
    method in the mean and fixed points in the covariance.
    """
    Kzz, Kzx, y = helpers.rbf(Z, Z), helpers.rbf(Z, X), np.asarray(COUNTS)
    A = np.linalg.solve(np.linalg.cholesky(Kzz), Kzx)  # whitened
    residual = 1.0 - np.sum(A**2, axis=0)
    w, rate = np.zeros(len(Z)), np.ones(N)
    for _ in range(200):
        precision = np.eye(len(Z)) + A @ np.diag(rate) @ A.T
        S = np.linalg.inv(precision)
        w = w + 0.5 * S @ (A @ (y - rate) - w)
        mean, variance = A.T @ w, residual + np.sum(A * (S @ A), axis=0)
        rate = np.exp(mean + variance / 2)
    assert np.abs(A @ (y - rate) - w).max() < 1e-10
    kl = 0.5 * (np.trace(S) + w @ w - len(Z) - np.linalg.slogdet(S)[1])
    return np.sum(y * mean - rate - gammaln(y + 1)) - kl, mean, variance


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "points, approximation",
    [
        (X, sgp.VGP(covariance="pseudo_data")),
        (Z, sgp.SVGP(inducing=Z, train_inducing=False, covariance="pseudo_data")),
    ],
)
def test_sites_reach_the_free_form_optimum(points, approximation):
    bound, mean, variance = free_form_optimum(np.asarray(points))
    by_sites, q, params = fit(poisson, approximation, COUNTS)
    # The jitter of 1e-8 is far below what is asked for.
    assert_allclose(by_sites, bound, atol=1e-4)
    assert_allclose(q.mean, mean, atol=5e-3)
    assert_allclose(q.variance, variance, atol=5e-3)
    assert params["f_auto_qu_precision"].shape == (N,)
    if len(points) == N:  # else other sites have the same q(u)
        # lambda = -2 dE/dv and l = dE/dm + lambda m, with E = y m - exp(m + v / 2).
        rate = np.exp(mean + variance / 2)
        assert_allclose(params["f_auto_qu_precision"], rate, rtol=0.05)
        linear = np.asarray(COUNTS) - rate + rate * mean
        assert_allclose(params["f_auto_qu_linear"], linear, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_sites_are_negative_where_the_likelihood_is_convex():
    def student(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.StudentT(2.0, f, 0.2), obs=y)

    outlier = Y.at[2].set(4.0)
    _, q, params = fit(student, sgp.VGP(covariance="pseudo_data"), outlier, 40)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    mean, sd = np.asarray(q.mean), np.sqrt(np.asarray(q.variance))
    # 2 dE/dv is the expected second derivative of the log density.
    r = np.asarray(outlier) - mean - sd * nodes[:, None]
    second = 3 * (r**2 - 2 * 0.2**2) / (r**2 + 2 * 0.2**2) ** 2
    expected = -weights @ second / weights.sum()
    assert expected[2] < -0.1 and (np.delete(expected, 2) > 0.5).all()
    assert_allclose(params["f_auto_qu_precision"], expected, rtol=0.02)


# ---- coupled latent functions -----------------------------------------------------------


def test_coupled_posterior_of_a_sum_of_functions_is_exact():
    def model(X, y):
        kernel = sgp.kernels.RBF(jnp.ones(2), jnp.array([0.6, 1.5]))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f.sum(0), NOISE), obs=y)

    kernels = [helpers.rbf(X, X, 1.0, 0.6), helpers.rbf(X, X, 1.0, 1.5)]
    C = sum(kernels) + NOISE**2 * np.eye(N)
    evidence = multivariate_normal(np.zeros(N), C).logpdf(Y)
    bound, q, _ = fit(model, sgp.VGP(covariance="coupled"), Y, 2)
    assert_allclose(bound, evidence, atol=1e-5)
    gain = [K @ np.linalg.inv(C) for K in kernels]
    for i in range(2):
        assert_allclose(q.mean[i], gain[i] @ Y, atol=1e-3)
        for j in range(2):
            expected = (i == j) * kernels[i] - gain[i] @ kernels[j]
            got = q.row_covariance[:, i, j]
            assert_allclose(got, np.diag(expected), atol=1e-3)
    # The best independent q has the same means and the covariances
    # (K_i^-1 + I / noise^2)^-1; its bound is lower.
    means = [g @ np.asarray(Y) for g in gain]
    independent = multivariate_normal(sum(means), NOISE**2 * np.eye(N)).logpdf(Y)
    for K, m in zip(kernels, means, strict=True):
        S = np.linalg.inv(np.linalg.inv(K) + np.eye(N) / NOISE**2)
        quadratic = np.trace(np.linalg.solve(K, S)) + m @ np.linalg.solve(K, m)
        log_dets = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1]
        independent -= 0.5 * (np.trace(S) / NOISE**2 + quadratic - N + log_dets)
    assert bound > independent + 0.5


# ---- refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["coupled", "pseudo_data"])
def test_coupled_covariances_and_sites_are_whitened(covariance):
    with pytest.raises(ValueError, match=f"covariance='{covariance}' is whitened; leave"):
        sgp.SVGP(3, covariance=covariance, whiten=False)
    with pytest.raises(ValueError, match="SOLVEGP: covariance must be one of"):
        sgp.SOLVEGP(3, 3, covariance=covariance)


@pytest.mark.parametrize("covariance", ["coupled", "full"])
def test_rows_of_different_functions_are_tied_where_these_are_coupled(covariance):
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0] * f[1][::-1], 0.5), obs=y)

    X = jnp.linspace(0.0, 2.0, 4)[:, None]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3, covariance=covariance))
    guide.setup(X, jnp.ones(4))
    assert guide.couples_rows == (covariance == "coupled")


def test_derivatives_by_marginals_are_not_those_of_coupled_functions():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0] * f[1], 0.5), obs=y)

    X, y = jnp.linspace(0.0, 2.0, 4)[:, None], jnp.ones(4)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3, covariance="coupled"))
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    with pytest.raises(ValueError, match="GP site 'f' has a mixture, coupled"):
        svi.loss.marginal_gradients(jax.random.key(0), params, model, guide, X, y)

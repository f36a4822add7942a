"""Natural gradients on q(u) by sites: exact, robust, and the optimum of L-BFGS."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.special import roots_hermitenorm

import numpyro_sgp as sgp
from numpyro_sgp.training.natural_gradients import natural_steps
from tests.helpers import rbf

N, NOISE = 12, 0.3
X = np.linspace(0.0, 3.0, N)[:, None]
Y = np.sin(2.0 * X[:, 0]) + 0.1 * np.cos(9.0 * X[:, 0])
COUNTS = np.array([0, 1, 2, 4, 6, 9, 5, 3, 2, 0, 0, 1.0])
Z = X[::3] + 0.1


def model(X, y=None, poisson=False):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        if poisson:
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        else:
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def make_svi(approximation, rule=None):
    guide = sgp.AutoSparseGP(model, approximation)
    return SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO(rule))


def sites(**options):
    return sgp.SVGP(inducing=Z, train_inducing=False, covariance="pseudo_data", **options)


def test_one_step_is_the_optimum_of_a_gaussian_likelihood():
    svi = make_svi(sites())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    moved, _ = natural_steps(svi, jax.random.key(0), params, 1, 0.0, (X, Y), {})
    loss = svi.loss.loss(jax.random.key(0), moved, model, svi.guide, X, Y)
    # Titsias (2009), eq. (9), by dense matrices; the jitter of K_uu is 2e-8.
    Kzz, Kzx = rbf(Z, Z, 2.0, 1.0), rbf(Z, X, 2.0, 1.0)
    Q = Kzx.T @ np.linalg.solve(Kzz, Kzx)
    A = Q + NOISE**2 * np.eye(N)
    evidence = -0.5 * (
        N * np.log(2 * np.pi) + np.linalg.slogdet(A)[1] + Y @ np.linalg.solve(A, Y)
    )
    assert_allclose(-loss, evidence - (2.0 * N - np.trace(Q)) / (2 * NOISE**2), rtol=1e-6)
    assert_allclose(moved["f_auto_qu_precision"], NOISE**-2, rtol=1e-10)
    assert_allclose(moved["f_auto_qu_linear"], Y / NOISE**2, rtol=1e-8, atol=1e-8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("poisson", [False, True])
@pytest.mark.parametrize("mean", [3.0, sgp.means.Linear(np.array([0.7]), 1.0)])
def test_steps_are_to_the_optimum_whatever_the_mean_of_the_prior(mean, poisson):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2.0), X, mean))
        with numpyro.plate("data", N):
            if poisson:
                numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
            else:
                numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    y = COUNTS if poisson else Y
    guide = sgp.AutoSparseGP(model, sgp.VGP(covariance="pseudo_data"))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    moved, _ = natural_steps(svi, jax.random.key(0), params, 30, 1e-12, (X, y), {})
    at = f = (3.0 if mean == 3.0 else 1.0 + 0.7 * X[:, 0]) + np.zeros(N)
    K = rbf(X, X, 2.0, 1.0) + 2e-8 * np.eye(N)
    if not poisson:
        wanted = f + K @ np.linalg.solve(K + NOISE**2 * np.eye(N), y - f)
        variance = np.diag(K - K @ np.linalg.solve(K + NOISE**2 * np.eye(N), K))
    else:  # Opper and Archambeau (2009), by steps halved
        variance = np.diag(K)
        for _ in range(200):
            rate = np.exp(at + variance / 2)
            wanted = f + K @ (y - rate)
            B = np.linalg.inv(np.linalg.inv(K) + np.diag(rate))
            at, variance = at + 0.5 * B @ np.linalg.solve(K, wanted - at), np.diag(B)
        wanted = at
    q = guide.posterior(moved, X)["f"]
    assert_allclose(q.mean, wanted, rtol=0, atol=1e-5)
    assert_allclose(q.variance, variance, rtol=0, atol=1e-5)


def test_derivatives_by_marginals_are_those_of_the_expected_log_likelihood():
    svi = make_svi(sites(), sgp.GaussHermite(20))
    params = svi.get_params(svi.init(jax.random.key(0), X, COUNTS, poisson=True))
    _, slopes = svi.loss.marginal_gradients(
        jax.random.key(0), params, model, svi.guide, X, COUNTS, poisson=True
    )
    mean, to_mean, to_variance, prior_mean = slopes["f"]
    # q is the prior: E[y f - exp(f)] with N(0, 2), by a rule of SciPy's.
    nodes, weights = roots_hermitenorm(60)
    rate = np.sum(weights * np.exp(np.sqrt(2.0) * nodes)) / weights.sum()
    assert_allclose(mean, 0.0, atol=1e-12)
    assert_allclose(prior_mean, 0.0)
    assert_allclose(to_mean, COUNTS - rate, rtol=1e-6)
    assert_allclose(to_variance, -0.5 * rate, rtol=1e-6)


@pytest.mark.slow
def test_lbfgs_on_the_optimal_q_finds_the_joint_optimum_in_fewer_iterations():
    fits = {}
    for natural in (True, False):
        svi = make_svi(sites(), sgp.GaussHermite(20))
        options = {"natural": natural, "progress_bar": False, "max_iterations": 300}
        fits[natural] = sgp.fit_lbfgs(
            svi, jax.random.key(0), X, COUNTS, poisson=True, **options
        )
    a, b = fits[True], fits[False]
    assert_allclose(a.losses[-1], b.losses[-1], rtol=1e-6)
    assert_allclose(a.params["lengthscale"], b.params["lengthscale"], rtol=1e-2)
    assert len(a.losses) < len(b.losses) / 2


@pytest.mark.slow
def test_a_full_covariance_goes_to_its_optimum_before_each_evaluation():
    points = sgp.SVGP(inducing=Z, train_inducing=False)
    options = {"progress_bar": False, "max_iterations": 300}
    fits = [
        sgp.fit_lbfgs(make_svi(a), jax.random.key(0), X, Y, natural=n, **options)
        for a, n in ((points, True), (points, False), (sites(), True))
    ]
    assert_allclose(fits[0].losses[-1], [f.losses[-1] for f in fits[1:]], rtol=1e-5)
    assert len(fits[0].losses) < len(fits[1].losses) / 2


def test_natural_gradients_need_a_gaussian():
    svi = make_svi(sgp.MixtureSVGP(3, 2))
    with pytest.raises(ValueError, match="for Gaussian q.u., but GP site 'f' has a mix"):
        sgp.fit_lbfgs(svi, jax.random.key(0), X, Y, natural=True, progress_bar=False)
    svi = make_svi(sites())
    with pytest.raises(ValueError, match="leave out blocks"):
        options = {"natural": True, "blocks": ["kernel"]}
        sgp.fit_lbfgs(svi, jax.random.key(0), X, Y, progress_bar=False, **options)


@pytest.mark.slow
def test_a_scaled_model_has_the_same_optimum():
    scaled = handlers.scale(model, 1.0 / N)
    losses = []
    for family in (sites(), sgp.SVGP(inducing=Z, train_inducing=False)):
        guide = sgp.AutoSparseGP(scaled, family)
        svi = SVI(scaled, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
        fit = sgp.fit_lbfgs(svi, jax.random.key(0), X, Y, progress_bar=False)
        losses.append(fit.losses[-1])
    assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_where_natural_gradients_do_not_apply_lbfgs_trains_all():
    svi = make_svi(sites())
    svi.loss = sgp.TraceGP_ELBO(num_particles=2)
    fit = sgp.fit_lbfgs(svi, jax.random.key(0), X, Y, progress_bar=False, max_iterations=2)
    assert fit.losses[-1] < fit.losses[0]
    svi.loss = TraceMeanField_ELBO()
    with pytest.raises(ValueError, match="TraceGP_ELBO as the loss, not TraceMeanField"):
        sgp.fit_lbfgs(svi, jax.random.key(0), X, Y, natural=True, progress_bar=False)


def test_sites_of_no_gaussian_are_left_for_the_prior():
    svi = make_svi(sites())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    params = {**params, "f_auto_qu_precision": jnp.full(N, -50.0)}
    moved, _ = natural_steps(svi, jax.random.key(0), params, 2, 0.0, (X, Y), {})
    assert_allclose(moved["f_auto_qu_precision"], NOISE**-2, rtol=1e-10)

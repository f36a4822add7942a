"""q(u) by dual sites: t-SVGP (Adam et al. 2021) with natural gradients in minibatches."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive
from scipy.special import expit

import numpyro_sgp as sgp
from numpyro_sgp.families import DualGaussian, Factors
from tests.helpers import count_data, gaussian_model, rbf, regression_data

KEY = jax.random.key(0)
Z = jnp.array([[-1.5], [0.5], [1.2]])
JITTER = 1e-8
POINTS = {"inducing": Z, "train_inducing": False}
SITES = ("f_auto_qu_linear", "f_auto_qu_precision")


def make(model, option, rate, expectation=None, others=0.01):
    guide = sgp.AutoSparseGP(model, option)
    optimiser = sgp.natural_gradients(guide, rate, optax.adam(others))
    return SVI(model, guide, optimiser, sgp.TraceGP_ELBO(expectation)), guide


def bernoulli(X, y=None, batch_size=None, learn=False):
    lengthscale = 1.0
    if learn:
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=constraints.positive)
    data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
    with data as rows:
        X, y = X[rows], None if y is None else y[rows]
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with data:
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def classes(num_rows=20):
    X, y = count_data(num_rows)
    return X, jnp.minimum(y, 1.0)


def dense(linear, precision, X, y, lengthscale=1.0):
    """
    Marginals of f and the Bernoulli bound, with the slopes of its expectations by
    marginal means and variances, by explicit inverses and 40 nodes.
    """
    K = rbf(Z, Z, 1.0, lengthscale) + JITTER * np.eye(len(Z))
    Kuf = rbf(Z, X, 1.0, lengthscale)
    S = np.linalg.inv(np.linalg.inv(K) + precision)
    m, W = S @ linear, np.linalg.solve(K, Kuf)
    mean = W.T @ m
    variance = 1.0 - np.sum(Kuf * W, axis=0) + np.sum(W * (S @ W), axis=0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    f = mean[:, None] + np.sqrt(variance)[:, None] * nodes
    p = expit(f)
    score = np.asarray(y)[:, None] * np.log(p) + (1 - np.asarray(y)[:, None]) * np.log1p(-p)
    g1 = (np.asarray(y)[:, None] - p) @ weights
    g2 = -0.5 * (p * (1 - p)) @ weights
    kl = 0.5 * (
        np.trace(np.linalg.solve(K, S))
        + m @ np.linalg.solve(K, m)
        - len(Z)
        + np.linalg.slogdet(K)[1]
        - np.linalg.slogdet(S)[1]
    )
    return mean, W, g1, g2, np.sum(score @ weights) - kl


def test_one_step_is_the_collapsed_optimum():
    X, y = regression_data(15)
    svi, guide = make(gaussian_model, sgp.SVGP(covariance="dual", **POINTS), 1.0)
    result = svi.run(KEY, 1, X, y, progress_bar=False)
    best = sgp.CollapsedSVGP(sgp.kernels.RBF(), X, Z, 0.3)
    loss = jax.jit(svi.evaluate)(result.state, X, y)
    assert_allclose(-loss, best.log_prob(y), rtol=1e-8)
    q, known = guide.posterior(result.params, X)["f"], best.posterior(y, X)
    assert_allclose(q.mean, known.mean, rtol=1e-8, atol=1e-8)
    assert_allclose(q.variance, known.variance, rtol=1e-8, atol=1e-8)
    # K^-1 K_uf K_fu K^-1 / noise^2.
    W = np.linalg.solve(rbf(Z, Z) + JITTER * np.eye(3), rbf(Z, X))
    assert_allclose(result.params[SITES[1]], W @ W.T / 0.3**2, rtol=1e-6)
    assert_allclose(result.params[SITES[0]], W @ y / 0.3**2, rtol=1e-6)


@pytest.mark.slow
def test_steps_average_the_targets_of_their_slopes():
    """Against the targets by explicit inverses, at sites that are no optimum."""
    X, y = classes()
    svi, _ = make(bernoulli, sgp.SVGP(covariance="dual", **POINTS), 0.3)
    state, update = svi.init(KEY, X, y), jax.jit(svi.update)
    for _ in range(3):
        linear, precision = (np.asarray(svi.get_params(state)[k]) for k in SITES)
        mean, W, g1, g2, bound = dense(linear, precision, X, y)
        state, loss = update(state, X, y)
        # 20 nodes against 40.
        assert_allclose(-loss, bound, rtol=1e-7)
        params = svi.get_params(state)
        target = W @ (g1 - 2 * g2 * mean)
        assert_allclose(params[SITES[0]], 0.7 * linear + 0.3 * target, rtol=1e-4)
        target = W @ np.diag(-2 * g2) @ W.T
        assert_allclose(params[SITES[1]], 0.7 * precision + 0.3 * target, rtol=1e-4)
        assert jnp.array_equal(params[SITES[1]], params[SITES[1]].T)


@pytest.mark.slow
def test_same_optimum_as_full_and_its_fixed_point():
    X, y = classes()
    found = {}
    for covariance in ("full", "dual"):
        svi, guide = make(bernoulli, sgp.SVGP(covariance=covariance, **POINTS), 1.0)
        result = svi.run(KEY, 40, X, y, progress_bar=False)
        found[covariance] = result.losses[-1], guide.posterior(result.params, X)["f"]
    assert_allclose(found["dual"][0], found["full"][0], rtol=1e-10)
    assert_allclose(found["dual"][1].mean, found["full"][1].mean, rtol=1e-6)
    assert_allclose(found["dual"][1].variance, found["full"][1].variance, rtol=1e-6)
    linear, precision = (result.params[name] for name in SITES)
    mean, W, g1, g2, _ = dense(linear, precision, X, y)
    assert_allclose(precision, W @ np.diag(-2 * g2) @ W.T, rtol=1e-4)
    assert_allclose(linear, W @ (g1 - 2 * g2 * mean), rtol=1e-4)


@pytest.mark.slow
def test_hyperparameters_descend_at_fixed_sites():
    X, y = classes()
    svi, _ = make(bernoulli, sgp.SVGP(covariance="dual", **POINTS), 0.5)
    params = svi.run(KEY, 3, X, y, progress_bar=False).params
    linear, precision = (np.asarray(params[name]) for name in SITES)

    def loss(lengthscale):
        given = {**params, "lengthscale": lengthscale}
        return svi.loss.loss(KEY, given, bernoulli, svi.guide, X, y, learn=True)

    slope = jax.jit(jax.grad(loss))(jnp.array(1.1))
    h = 1e-5
    up, down = (dense(linear, precision, X, y, 1.1 + s * h)[-1] for s in (1, -1))
    assert_allclose(-slope, (up - down) / (2 * h), rtol=1e-5)


@pytest.mark.parametrize("indefinite", [pytest.param(False, marks=pytest.mark.slow), True])
def test_derivative_by_the_factor_is_the_plain_one(indefinite):
    """Against finite differences, where a site is cut too: of what is left of it."""
    rng = np.random.default_rng(0)
    L = np.linalg.cholesky(np.cov(rng.normal(size=(4, 20))) + 0.1 * np.eye(4))
    precision = np.cov(rng.normal(size=(4, 20))) - (3.0 if indefinite else 0.0) * np.eye(4)
    linear, dL = rng.normal(size=4), np.tril(rng.normal(size=(4, 4)))
    to_w, to_P = rng.normal(size=4), rng.normal(size=(4, 4))
    given = np.eye(4) + L.T @ precision @ L
    values, V = np.linalg.eigh(given)
    assert (values.min() < 0) == indefinite
    inverse = np.linalg.inv(L)
    kept = (V * np.maximum(values, 0.1)) @ V.T if indefinite else given
    kept = inverse.T @ (kept - np.eye(4)) @ inverse

    def reference(L):
        C = np.linalg.cholesky(np.eye(4) + L.T @ kept @ L)
        P = np.linalg.inv(C).T
        return P @ P.T @ L.T @ linear, P

    def score(L):
        q = DualGaussian(jnp.asarray(linear), jnp.asarray(precision), 1.0)
        (block,) = q.whitened(Factors(L)).blocks
        return to_w @ block.mu + jnp.sum(to_P * block.sqrt), block

    (value, block), slope = jax.jit(jax.value_and_grad(score, has_aux=True))(jnp.asarray(L))
    w, P = reference(L)
    assert_allclose(block.mu, w, rtol=1e-10)
    assert_allclose(block.sqrt, P, rtol=1e-10, atol=1e-12)
    h, ends = 1e-6, []
    for sign in (1, -1):
        w, P = reference(L + sign * h * dL)
        ends.append(to_w @ w + np.sum(to_P * P))
    assert_allclose(np.sum(slope * dL), (ends[0] - ends[1]) / (2 * h), rtol=1e-6)


def test_slopes_by_sites_are_those_by_expectation_parameters():
    """Of a function of the moments of u, by finite differences; two functions share L."""
    rng = np.random.default_rng(1)
    L = np.linalg.cholesky(np.cov(rng.normal(size=(3, 20))) + 0.1 * np.eye(3))
    R = rng.normal(size=(2, 3, 6))
    q = DualGaussian(rng.normal(size=(2, 3)), R @ np.swapaxes(R, -1, -2), 1e-3)
    a, G = rng.normal(size=3), np.cov(rng.normal(size=(3, 9)))

    def of_moments(m, S):
        return jnp.sin(m @ a) + m @ G @ m + jnp.log(jnp.trace(G @ S) + 1.0)

    def score(q):
        (block,) = q.whitened(Factors(jnp.asarray(L))).blocks
        root = L @ block.sqrt
        return sum(of_moments(L @ block.mu[i], root[i] @ root[i].T) for i in range(2))

    slopes = jax.jit(jax.grad(score))(q)
    for i in range(2):
        S = np.linalg.inv(np.linalg.inv(L @ L.T) + q.precision[i])
        m = S @ q.linear[i]

        def of_expectations(m, second):
            return of_moments(m, second - jnp.outer(m, m))

        slope = jax.jit(jax.grad(of_expectations, (0, 1)))
        to_m, to_second = slope(m, S + np.outer(m, m))
        assert_allclose(slopes.linear[i], to_m, rtol=1e-8)
        symmetric = 0.5 * (to_second + to_second.T)
        assert_allclose(slopes.precision[i], -2.0 * symmetric, rtol=1e-8)


@pytest.mark.slow
def test_minibatches_with_learned_points_and_scan():
    X, y = classes(60)
    svi, guide = make(bernoulli, sgp.SVGP(5, covariance="dual"), 0.2, others=0.02)
    state = svi.init(KEY, X, y, batch_size=20, learn=True)

    @jax.jit
    def bound(state):
        params = svi.get_params(state)
        return svi.loss.loss(KEY, params, bernoulli, guide, X, y, learn=True)

    @jax.jit
    def train(state):
        def step(state, _):
            return svi.update(state, X, y, batch_size=20, learn=True)

        return jax.lax.scan(step, state, length=100)

    before = bound(state)
    state, losses = train(state)
    assert jnp.isfinite(losses).all()
    assert bound(state) < before - 3.0
    precision = svi.get_params(state)[SITES[1]]
    assert np.linalg.eigvalsh(precision).min() > -1e-6 * jnp.max(jnp.abs(precision))
    f = Predictive(guide, params=svi.get_params(state), num_samples=2)(KEY, X, y)["f"]
    assert f.shape == (2, 60)


def student(X, y, scale=0.1, degrees=2.0, learn=False):
    lengthscale = 1.0
    if learn:
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=constraints.positive)
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.StudentT(degrees, f, scale), obs=y)


@pytest.mark.slow
def test_likelihoods_that_are_not_log_concave_stay_gaussian():
    X, y = regression_data(15)
    svi, _ = make(student, sgp.SVGP(6, covariance="dual"), 1.0, others=0.05)
    losses = svi.run(KEY, 60, X, y.at[3].set(8.0), learn=True, progress_bar=False).losses
    assert jnp.isfinite(losses).all() and losses[-1] < losses[0]


@pytest.mark.slow
def test_variances_above_the_prior_are_found():
    """One far response in which the likelihood is convex: as full finds it."""
    X, y = jnp.array([[0.0], [4.0]]), jnp.array([5.0, 0.0])
    found = {}
    for covariance in ("full", "dual"):
        option = sgp.SVGP(inducing=X, train_inducing=False, covariance=covariance)
        svi, guide = make(student, option, 0.5)
        result = svi.run(KEY, 80, X, y, 1.0, 1.0, progress_bar=False)
        found[covariance] = guide.posterior(result.params, X, y)["f"].variance
    assert found["full"][0] > 1.02
    assert_allclose(found["dual"], found["full"], rtol=1e-5)


@pytest.mark.slow
def test_sites_that_make_no_gaussian_fade():
    X, y = regression_data(15)
    svi, guide = make(gaussian_model, sgp.SVGP(covariance="dual", **POINTS), 0.5)
    start = {SITES[0]: jnp.ones(3), SITES[1]: -50.0 * jnp.eye(3)}
    result = svi.run(KEY, 40, X, y, init_params=start, progress_bar=False)
    best = sgp.CollapsedSVGP(sgp.kernels.RBF(), X, Z, 0.3).log_prob(y)
    assert jnp.isfinite(result.losses).all()
    assert_allclose(-result.losses[-1], best, rtol=1e-8)


@pytest.mark.slow
def test_close_points_in_float32():
    X, y = (a.astype(jnp.float32) for a in regression_data(200))
    grid = jnp.linspace(-2.0, 2.0, 50, dtype=jnp.float32)[:, None]

    def model(X, y):
        noise = numpyro.param("noise", jnp.float32(0.1), constraint=constraints.positive)
        scale = numpyro.param("scale", jnp.float32(1.0), constraint=constraints.positive)
        kernel = sgp.kernels.RBF(jnp.float32(1.0), scale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", 200, subsample_size=len(X)):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    option = sgp.SVGP(inducing=grid, covariance="dual")
    svi, guide = make(model, option, 0.3, others=0.02)
    state = svi.init(KEY, X[:50], y[:50])

    def step(state, key):
        rows = jax.random.choice(key, 200, (50,), replace=False)
        return svi.update(state, X[rows], y[rows])

    state, losses = jax.jit(lambda s, k: jax.lax.scan(step, s, k))(
        state, jax.random.split(KEY, 150)
    )
    assert jnp.isfinite(losses).all()
    params = svi.get_params(state)
    loss = jax.jit(lambda p: svi.loss.loss(KEY, p, model, guide, X, y))(params)
    assert params[SITES[1]].dtype == jnp.float32
    assert loss < losses[0]


@pytest.mark.slow
def test_two_functions_with_kernels_and_points_of_their_own():
    X, y = regression_data(12)

    def two(X, y):
        kernel = sgp.kernels.RBF(jnp.ones(2), jnp.array([0.8, 1.5]))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(0.3 * f[1])), obs=y)

    losses = {}
    for covariance in ("full", "dual"):
        option = sgp.SVGP(covariance=covariance, share_inducing=False, **POINTS)
        svi, _ = make(two, option, 0.5, sgp.GaussHermite(5))
        losses[covariance] = svi.run(KEY, 30, X, y, progress_bar=False).losses[-1]
    assert_allclose(losses["dual"], losses["full"], rtol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("tight", ["diagonal", "scalar"])
def test_tight_bounds(tight):
    X, y = regression_data(15)
    option = sgp.SVGP(covariance="dual", tight=tight, **POINTS)
    svi, _ = make(gaussian_model, option, 1.0, others=0.1)
    losses = svi.run(KEY, 60, X, y, progress_bar=False).losses
    best = [
        sgp.CollapsedSVGP(sgp.kernels.RBF(), X, Z, 0.3, tight=kind).log_prob(y)
        for kind in ("none", "diagonal")
    ]
    if tight == "diagonal":
        assert_allclose(-losses[-1], best[1], rtol=1e-8)
    else:
        assert best[0] + 0.1 < -losses[-1] < best[1]


@pytest.mark.slow
def test_deep_model_with_random_hyperparameters():
    X, y = regression_data(12)

    def deep(X, y):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
        kernel = sgp.kernels.RBF(1.0, scale)
        h = numpyro.sample("h", sgp.GaussianProcess(kernel, X))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, h[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(
        deep, sgp.SVGP(3, covariance="dual"), numpyro.infer.autoguide.AutoNormal
    )
    optimiser = sgp.natural_gradients(guide, 0.3, optax.adam(0.01))
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(5), num_particles=2)
    svi = SVI(deep, guide, optimiser, loss)
    losses = svi.run(KEY, 60, X, y, progress_bar=False).losses
    assert jnp.isfinite(losses).all() and losses[-10:].mean() < losses[:3].mean()


def test_the_largest_rate_of_a_schedule_is_found():
    X, y = regression_data(10)
    guide = sgp.AutoSparseGP(gaussian_model, sgp.SVGP(3, covariance="dual"))
    for schedule, largest in [
        (0.3, 0.3),
        (optax.cosine_decay_schedule(0.5, 100), 0.5),
        (lambda n: 2.0 * n, 1.0),
        (lambda n: jnp.where((n > 300) & (n < 400), 0.9, 0.01), 0.9),
    ]:
        guide = sgp.AutoSparseGP(gaussian_model, sgp.SVGP(3, covariance="dual"))
        sgp.natural_gradients(guide, schedule, optax.adam(0.01))
        assert guide.natural_rate == pytest.approx(largest)
    with pytest.raises(ValueError, match="rate 0.9[0-9]* already, and another .* has 0.1"):
        sgp.natural_gradients(guide, 0.1, optax.adam(0.01))


def test_bad_input_is_told():
    for make_option in (sgp.SOLVEGP, sgp.MixtureSVGP):
        with pytest.raises(ValueError, match="covariance must be one of"):
            make_option(3, 2, covariance="dual")
    with pytest.raises(ValueError, match="covariance must be one of"):
        sgp.VGP(covariance="dual")
    with pytest.raises(ValueError, match="is whitened"):
        sgp.SVGP(3, covariance="dual", whiten=False)
    with pytest.raises(ValueError, match="would ignore the q"):
        sgp.sparsify(gaussian_model, sgp.SVGP(3, covariance="dual"))

"""Natural gradients as an optimiser of SVI."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.families.blocks import gaussian_step
from numpyro_sgp.fitting.problem import Problem
from numpyro_sgp.training.natural_gradients import natural_descent
from tests.helpers import count_data, gaussian_model, poisson_model, regression_data

KEY = jax.random.key(0)
KERNEL = sgp.kernels.RBF(1.0, 1.0)
Z = jnp.array([[-1.5], [0.5], [1.2]])


def make(model, option, rate, expectation=None, others=0.01):
    guide = sgp.AutoSparseGP(model, option)
    optimiser = sgp.natural_gradients(guide, rate, optax.adam(others))
    return SVI(model, guide, optimiser, sgp.TraceGP_ELBO(expectation)), guide


@pytest.mark.quick(1)
@pytest.mark.parametrize("whiten", [True, False])
def test_one_step_is_the_collapsed_optimum(whiten):
    X, y = regression_data(15)
    svi, guide = make(
        gaussian_model, sgp.SVGP(inducing=Z, train_inducing=False, whiten=whiten), 1.0
    )
    result = svi.run(KEY, 1, X, y, progress_bar=False)
    best = sgp.CollapsedSVGP(KERNEL, X, Z, 0.3)
    loss = svi.loss.loss(KEY, result.params, gaussian_model, guide, X, y)
    np.testing.assert_allclose(-loss, best.log_prob(y), rtol=1e-8)
    q, known = guide.posterior(result.params, X)["f"], best.posterior(y, X)
    np.testing.assert_allclose(q.mean, known.mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(q.variance, known.variance, rtol=1e-8, atol=1e-8)


def test_one_look_at_a_gaussian_likelihood_before_its_step_and_none_after():
    """What a step would gain tells that q(u) has arrived; with counts there are more."""
    counts = []
    for model, data in [
        (gaussian_model, regression_data(12)),
        (poisson_model, count_data()),
    ]:
        guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
        guide.take_natural_gradients(1.0)
        svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        problem = Problem(svi, svi.init(KEY, *data), data, {})

        @jax.jit
        def descend(free, problem=problem):
            loss = lambda free: problem.loss(free, KEY, problem.arrays)  # noqa: E731
            return natural_descent(loss, problem.natural, free, 50, 1e-6)

        q, loss, count = descend({**problem.free})
        there = {**problem.free, **q}
        _, again, none = descend(there)
        counts.append((int(count), int(none)))
        slopes = jax.grad(problem.loss)(there, KEY, problem.arrays)
        assert max(float(jnp.abs(slopes[name]).max()) for name in q) < 2e-3
        assert abs(loss - again) < 1e-6
    assert counts[0] == (1, 0)
    assert counts[1][0] > 2
    assert counts[1][1] <= 1


@pytest.mark.slow
def test_natural_derivatives_are_no_nats():
    """Of f of any size steps on dual parameters go as far as those on the covariance."""
    size, ends = 1e4, []
    rng = np.random.default_rng(0)
    X = np.linspace(0.0, 4.0, 60)[:, None]
    y = size * (np.sin(2.0 * X[:, 0]) + 0.1 * rng.standard_t(3.0, size=60))

    def student(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(size**2, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.StudentT(3.0, f, 0.1 * size), obs=y)

    for covariance in "full", "dual":
        guide = sgp.AutoSparseGP(student, sgp.SVGP(8, covariance=covariance))
        guide.take_natural_gradients(1.0)
        svi = SVI(student, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        problem = Problem(svi, svi.init(KEY, X, y), (X, y), {})

        @jax.jit
        def descend(free, problem=problem):
            loss = lambda free: problem.loss(free, KEY, problem.arrays)  # noqa: E731
            return natural_descent(loss, problem.natural, free, 200, 1e-6)

        _, loss, count = descend(problem.free)
        assert count > 2
        ends.append(float(loss))
    assert abs(ends[0] - ends[1]) < 1e-3


@pytest.mark.slow
def test_two_sets_arrive_and_odvgp_leaves_its_second_mean_to_the_other():
    X, y = regression_data(15)
    O = jnp.array([[-0.5], [1.9]])
    points = {"inducing": Z, "orthogonal": O, "train_inducing": False}
    svi, _ = make(gaussian_model, sgp.SOLVEGP(**points), 1.0)
    result = svi.run(KEY, 60, X, y, progress_bar=False)
    best = sgp.CollapsedSOLVEGP(KERNEL, X, Z, O, 0.3).log_prob(y)
    np.testing.assert_allclose(-result.losses[-1], best, rtol=1e-6)
    svi, _ = make(gaussian_model, sgp.ODVGP(**points), 1.0, others=0.1)
    result = svi.run(KEY, 300, X, y, progress_bar=False)
    best = sgp.CollapsedODVGP(KERNEL, X, Z, O, 0.3).log_prob(y)
    np.testing.assert_allclose(-result.losses[-1], best, rtol=1e-3)


@given(st.integers(0, 10_000), st.sampled_from([0.3, 1.0]), st.booleans())
def test_a_step_is_that_of_the_natural_parameters(seed, rate, diagonal):
    """Against S^-1 + 2 rho dL/dS by explicit inverses, with any slope."""
    rng = np.random.default_rng(seed)
    M = 4
    S = np.eye(M) + 0.3 * np.cov(rng.normal(size=(M, 20)))
    G = np.cov(rng.normal(size=(M, 20)))
    if diagonal:
        S, G = np.diag(np.diag(S)), np.diag(np.diag(G))
    mu, g = rng.normal(size=(2, M))
    P = np.linalg.cholesky(S)
    free = np.tril(P, -1) + np.diag(np.log(np.expm1(np.diag(P))))
    free = jnp.asarray(np.diag(free) if diagonal else free)

    def loss(free):
        if diagonal:
            return jnp.sum(np.diag(G) * jax.nn.softplus(free) ** 2)
        L = jnp.tril(free, -1) + jnp.diag(jax.nn.softplus(jnp.diag(free)))
        return jnp.sum(G * (L @ L.T))

    to_mu, to_free = gaussian_step(
        jnp.asarray(mu), free, jnp.asarray(g), jax.grad(loss)(free), rate
    )
    new = free + to_free
    L = np.diag(jax.nn.softplus(new if diagonal else jnp.diag(new)))
    L = L if diagonal else L + np.tril(new, -1)
    expected = np.linalg.inv(np.linalg.inv(S) + 2 * rate * G)
    np.testing.assert_allclose(L @ L.T, expected, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(to_mu, -rate * expected @ g, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.booleans())
def test_no_slope_makes_an_indefinite_covariance(seed, diagonal):
    rng = np.random.default_rng(seed)
    mu, g, d = rng.normal(size=(3, 3))
    big = 10.0 ** rng.integers(-2, 6)
    slope = d if diagonal else np.tril(rng.normal(size=(3, 3)))
    free = np.zeros(3) if diagonal else np.zeros((3, 3))
    for dtype in (jnp.float32, jnp.float64):
        args = (jnp.asarray(a, dtype) for a in (mu, free, big * g, big * slope))
        steps = gaussian_step(*args, 1.0)
        assert all(jnp.isfinite(step).all() and step.dtype == dtype for step in steps)


def bernoulli(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@pytest.mark.slow
def test_black_box_slopes_and_monte_carlo_find_the_optimum_of_quadrature():
    X, y = count_data(12)
    y = jnp.minimum(y, 1.0)
    option = sgp.SVGP(inducing=Z, train_inducing=False)
    svi, guide = make(bernoulli, option, 1.0)
    best = svi.run(KEY, 30, X, y, progress_bar=False)
    # Converged: the last ten steps change nothing.
    np.testing.assert_allclose(best.losses[-1], best.losses[-10], rtol=1e-9)
    exact = svi.loss.loss
    for rule in (sgp.ScoreFunction(2000), sgp.MonteCarlo(500)):
        noisy, _ = make(bernoulli, option, 0.2, rule)
        params = noisy.run(KEY, 40, X, y, progress_bar=False).params
        found = exact(KEY, params, bernoulli, guide, X, y)
        # Noise of the rule: a few thousandths of a nat around the optimum.
        assert best.losses[-1] - 1e-9 <= found < best.losses[-1] + 0.02


def test_likelihoods_that_are_not_log_concave_stay_gaussian():
    X, y = regression_data(15)
    y = y.at[3].set(8.0)

    def student(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.StudentT(2.0, f, 0.1), obs=y)

    svi, _ = make(student, sgp.SVGP(6), 1.0)
    losses = svi.run(KEY, 50, X, y, progress_bar=False).losses
    assert jnp.isfinite(losses).all() and losses[-1] < losses[0]


@pytest.mark.slow
def test_coupled_and_diagonal_covariances_and_hyperparameters():
    X, y = regression_data(12)

    def two(X, y):
        lengthscale = numpyro.param(
            "lengthscale", 1.0, constraint=dist.constraints.positive
        )
        kernel = sgp.kernels.RBF(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X).expand([2]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f.sum(0), 0.3), obs=y)

    for covariance in ("coupled", "full", "diagonal"):
        option = sgp.SVGP(inducing=Z, train_inducing=False, covariance=covariance)
        # Two functions side by side: half a step each.
        svi, guide = make(two, option, 0.5, sgp.GaussHermite(2))
        if covariance == "coupled":
            svi, guide = make(two, option, 0.5, sgp.MonteCarlo(4, antithetic=True))
        result = svi.run(KEY, 40, X, y, progress_bar=False)
        assert result.losses[-1] < result.losses[0] - 5
        assert result.params["lengthscale"] != 1.0


@pytest.mark.slow
def test_schedules_and_minibatches_and_float32():
    X, y = (a.astype(jnp.float32) for a in regression_data(20))
    guide = sgp.AutoSparseGP(gaussian_model, sgp.SVGP(4))
    schedule = optax.linear_schedule(0.1, 0.5, 10)
    optimiser = sgp.natural_gradients(guide, schedule, optax.adam(0.01))
    svi = SVI(gaussian_model, guide, optimiser, sgp.TraceGP_ELBO(), batch_size=10)
    result = svi.run(KEY, 20, X, y, progress_bar=False)
    assert jnp.isfinite(result.losses).all()
    assert result.params["f_auto_qu_sqrt"].dtype == jnp.float32


@pytest.mark.slow
def test_bad_input_is_told():
    guide = sgp.AutoSparseGP(gaussian_model, sgp.SVGP(3, covariance="pseudo_data"))
    for rate in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
            sgp.natural_gradients(guide, rate, optax.adam(0.01))
    with pytest.raises(TypeError, match="needs the AutoSparseGP"):
        sgp.natural_gradients(gaussian_model, 0.5, optax.adam(0.01))
    with pytest.raises(TypeError, match="others must be an optax"):
        sgp.natural_gradients(guide, 0.5, numpyro.optim.Adam(0.01))
    X, y = regression_data(10)
    other = sgp.AutoSparseGP(gaussian_model, sgp.SVGP(3))
    optimiser = sgp.natural_gradients(other, 0.5, optax.adam(0.01))
    svi = SVI(gaussian_model, guide, optimiser, sgp.TraceGP_ELBO())
    with pytest.raises(ValueError, match="not the one that SVI trains"):
        svi.init(KEY, X, y)
    for option, what in [
        (sgp.SVGP(3, covariance="pseudo_data"), "covariance='pseudo_data'.*fit_lbfgs"),
        (sgp.MixtureSVGP(3), "'f' has a mixture"),
    ]:
        svi, _ = make(gaussian_model, option, 0.5)
        with pytest.raises(ValueError, match=what):
            svi.init(KEY, X, y)


def test_optimisers_that_ask_for_the_loss():
    X, y = regression_data(12)
    guide = sgp.AutoSparseGP(gaussian_model, sgp.SVGP(3))
    others = optax.chain(optax.adam(0.01), optax.contrib.reduce_on_plateau(patience=2))
    optimiser = sgp.natural_gradients(guide, 0.5, others)
    svi = SVI(gaussian_model, guide, optimiser, sgp.TraceGP_ELBO())
    assert np.isfinite(svi.run(KEY, 3, X, y, progress_bar=False).losses).all()

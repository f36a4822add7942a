"""Inverse-free bounds against plain linear algebra, their programs, and training."""

import pickle
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import random
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoNormal
from scipy.special import gammaln
from scipy.stats import multivariate_normal, norm
from scipy.stats import t as student_t

import numpyro_sgp as sgp
from tests import helpers

KEY = random.key(0)
N, M, NOISE, ELL, JITTER = 20, 6, 0.3, 0.9, 1e-6
X = jnp.linspace(-2.0, 2.0, N)[:, None]
Z = jnp.linspace(-1.8, 1.9, M)[:, None]
K = helpers.rbf(Z, Z, 1.0, ELL) + JITTER * np.eye(M)
KUF = helpers.rbf(Z, X, 1.0, ELL)
Y = {
    "gaussian": np.sin(2.0 * np.asarray(X[:, 0])),
    "bernoulli": (np.arange(N) % 3 == 0).astype(float),
    "poisson": np.arange(N) % 4 * 1.0,
    "student": np.sin(2.0 * np.asarray(X[:, 0])),
}
LIKELIHOODS = {
    "gaussian": lambda f: dist.Normal(f, NOISE),
    "bernoulli": lambda f: dist.Bernoulli(logits=f),
    "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    "student": lambda f: dist.StudentT(3.0, f, NOISE),
}
LOG_DENSITIES = {
    "gaussian": lambda y, f: norm.logpdf(y, f, NOISE),
    "bernoulli": lambda y, f: y * f - np.logaddexp(0.0, f),
    "poisson": lambda y, f: y * f - np.exp(f) - gammaln(y + 1.0),
    "student": lambda y, f: student_t.logpdf(y, 3.0, f, NOISE),
}
RULE = sgp.GaussHermite(20)


def model(X, y=None, likelihood="gaussian", batch_size=None):
    ell = numpyro.param("ell", ELL)
    data = numpyro.plate("data", len(X), subsample_size=batch_size)
    with data as rows:
        pass
    kernel = sgp.kernels.RBF(1.0, ell)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X[rows]))
    with data:
        obs = None if y is None else y[rows]
        numpyro.sample("y", LIKELIHOODS[likelihood](f), obs=obs)


def option(bound="relaxed", **options):
    if bound != "relaxed":
        options.setdefault("jitter", JITTER)
    return sgp.InverseFreeSVGP(inducing=Z, bound=bound, **options)


@cache
def bound_at(likelihood, bound, rule=RULE, batch_size=None, **options):
    """The bound as a compiled function of parameters and a key, and the guide."""
    program = partial(model, likelihood=likelihood, batch_size=batch_size)
    guide = sgp.AutoSparseGP(program, option(bound, **options))
    y = jnp.asarray(Y[likelihood])
    guide.setup(X, y)
    loss = sgp.TraceGP_ELBO(rule).loss
    return jax.jit(lambda params, key=KEY: -loss(key, params, program, guide, X, y)), guide


def named(**values):
    params = {f"f_auto_qu_{name}": jnp.asarray(v) for name, v in values.items()}
    return {**params, "f_auto_Z": Z, "ell": jnp.asarray(ELL)}


def free_q(seed):
    """m_hat, a factor of S_hat, and one of a T near the inverse of K."""
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(np.linalg.inv(K))
    near = np.eye(M) + np.tril(0.2 * rng.normal(size=(M, M)))
    weights = rng.normal(size=M)
    return (
        weights,
        0.6 * root @ np.tril(near * near),
        np.linalg.cholesky(root @ near @ near.T @ root.T),
    )


def svgp_bound(likelihood, mean, S):
    """The bound of SVGP with q(u) = N(mean, S): textbook formulas, explicit inverses."""
    inverse = np.linalg.inv(K)
    mu = KUF.T @ inverse @ mean
    variance = 1.0 + np.sum(KUF * (inverse @ (S - K) @ inverse @ KUF), axis=0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(RULE.num_points)
    f = mu + np.sqrt(variance) * nodes[:, None]
    log_p = LOG_DENSITIES[likelihood](Y[likelihood], f)
    expected = weights @ log_p.sum(axis=1) / weights.sum()
    log_dets = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1]
    return expected - 0.5 * (np.trace(inverse @ S) + mean @ inverse @ mean - M + log_dets)


@pytest.mark.quick(2)
@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "poisson"])
@given(seed=st.integers(0, 10**6))
def test_lc_is_below_svgp_and_meets_it_at_the_inverse(likelihood, seed):
    bound, _ = bound_at(likelihood, "lc")
    weights, root, T = free_q(seed)
    known = svgp_bound(likelihood, K @ weights, K @ root @ root.T @ K)
    found = bound(named(weights=weights, root=root, T=T))
    assert found < known + 1e-8 * abs(known)
    T = np.linalg.cholesky(np.linalg.inv(K))
    # K has a condition number near 1e4, whose inverse both sides take.
    assert_allclose(bound(named(weights=weights, root=root, T=T)), known, rtol=1e-8)


@pytest.mark.quick(2)
@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "poisson", "student"])
@given(seed=st.integers(0, 10**6))
def test_fr_is_svgp_in_other_parameters(likelihood, seed):
    bound, _ = bound_at(likelihood, "fr")
    weights, root, T_root = free_q(seed)
    T = T_root @ T_root.T
    S = K + K @ T @ K @ T @ K - 2 * K @ T @ K + K @ root @ root.T @ K
    found = bound(named(weights=weights, root=root, T=T_root))
    assert_allclose(found, svgp_bound(likelihood, K @ weights, S), rtol=1e-8)


def relaxed_q(seed):
    rng = np.random.default_rng(seed)
    R = 0.3 * np.eye(M) + np.tril(0.1 * rng.normal(size=(M, M)))
    return rng.normal(size=M), R * np.sign(np.diag(R))


@pytest.mark.quick(2)
@pytest.mark.parametrize("likelihood", ["gaussian", "poisson", "student"])
@given(seed=st.integers(0, 10**6))
def test_relaxed_is_svgp_where_the_iteration_has_converged(likelihood, seed):
    bound, _ = bound_at(likelihood, "relaxed", tol=1e-12, precondition=False, jitter=JITTER)
    weights, R = relaxed_q(seed)
    S = K - K @ np.linalg.inv(K + R @ R.T) @ K
    known = svgp_bound(likelihood, K @ weights, S)
    assert_allclose(bound(named(weights=weights, noise=R)), known, rtol=1e-8)
    C = helpers.rbf(X, X, 1.0, ELL) + NOISE**2 * np.eye(N)
    if likelihood == "gaussian":
        assert known <= multivariate_normal(np.zeros(N), C).logpdf(Y[likelihood])


@given(seed=st.integers(0, 10**6), is_diagonal=st.booleans())
def test_relaxed_is_a_bound_for_any_inverse(seed, is_diagonal):
    """For each of any T: below SVGP with q* of T, and with the q of the best T."""
    weights, R = relaxed_q(seed)
    if is_diagonal:
        R = np.diag(np.diag(R))
    rng = np.random.default_rng(seed)
    Kt = K + R @ R.T
    best = np.linalg.inv(Kt)
    root = np.linalg.cholesky(best) @ (np.eye(M) + np.tril(0.2 * rng.normal(size=(M, M))))
    root = root * np.sign(np.diag(root))
    T = root @ root.T
    prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, ELL), X)
    factor = np.diag(R) if is_diagonal else R
    q = sgp.InverseFreePosterior(
        prior,
        Z,
        jnp.asarray(weights),
        jnp.asarray(root),
        jnp.asarray(factor),
        jitter=JITTER,
    )
    # Of a Gaussian likelihood the expectation has a closed form.
    y = Y["gaussian"]
    expected = np.sum(norm.logpdf(y, q.mean, NOISE) - q.variance / (2 * NOISE**2))
    found = expected - q.prior_kl()
    S = K + K @ (T @ Kt @ T - 2 * T) @ K
    assert found <= svgp_bound("gaussian", K @ weights, S) + 1e-7
    assert found <= svgp_bound("gaussian", K @ weights, K - K @ best @ K) + 1e-7


def test_gradients_are_those_with_the_inverse_itself():
    """The envelope theorem: T is a constant, and yet nothing is lost."""
    bound, _ = bound_at("gaussian", "relaxed", tol=1e-12, precondition=True, jitter=JITTER)
    mu, R = (jnp.asarray(v) for v in relaxed_q(0))
    y = Y["gaussian"]

    def known(params):
        kernel = sgp.kernels.RBF(1.0, params["ell"])
        points, R = params["f_auto_Z"], params["f_auto_qu_noise"]
        Kuu = kernel(points, points) + JITTER * jnp.eye(M)
        k, S = kernel(points, X), R @ R.T
        weights = jnp.linalg.solve(Kuu + S, params["f_auto_qu_pseudo"])
        inverse = jnp.linalg.inv(Kuu + S)
        variance = 1.0 - jnp.sum(k * (inverse @ k), axis=0)
        expected = jnp.sum(norm_logpdf(y, k.T @ weights) - variance / (2 * NOISE**2))
        log_dets = jnp.linalg.slogdet(Kuu + S)[1] - jnp.linalg.slogdet(S)[1]
        return expected - 0.5 * (
            weights @ Kuu @ weights - jnp.trace(inverse @ Kuu) + log_dets
        )

    params = named(pseudo=mu, noise=R)
    value, slopes = jax.jit(jax.value_and_grad(bound))(params)
    known_value, known_slopes = jax.jit(jax.value_and_grad(known))(params)
    assert_allclose(value, known_value, rtol=1e-9)
    for name in params:
        assert_allclose(
            jnp.tril(slopes[name]) if name.endswith("noise") else slopes[name],
            jnp.tril(known_slopes[name]) if name.endswith("noise") else known_slopes[name],
            rtol=1e-6,
            atol=1e-6,
        )


def norm_logpdf(y, mean):
    return jax.scipy.stats.norm.logpdf(y, mean, NOISE)


@pytest.mark.slow
def test_gradients_of_T_have_no_variance_at_the_inverse():
    """Prop. 5: whatever the minibatch and the draws of f."""
    bound, _ = bound_at("bernoulli", "lc", sgp.MonteCarlo(2), batch_size=4)
    weights, root, T = free_q(3)
    slope = jax.jit(jax.vmap(jax.grad(bound), (None, 0)))
    keys = random.split(KEY, 8)
    elsewhere = slope(named(weights=weights, root=root, T=T), keys)["f_auto_qu_T"]
    T = np.linalg.cholesky(np.linalg.inv(K))
    there = slope(named(weights=weights, root=root, T=T), keys)["f_auto_qu_T"]
    size = np.abs(elsewhere).max()
    assert elsewhere.std(axis=0).max() > 1e-2 * size
    assert np.abs(there).max() < 1e-8 * size


# ---- programs --------------------------------------------------------------------


FACTORISING = {"cholesky", "triangular_solve", "lu", "qr", "geqrf", "eigh", "eig", "svd"}


def factorisations(approximation, likelihood="gaussian"):
    """What factorises or solves in a training step: primitives, and calls of libraries."""
    program = partial(model, likelihood=likelihood, batch_size=5)
    y = jnp.asarray(Y[likelihood])
    guide = sgp.AutoSparseGP(program, approximation)
    svi = SVI(program, guide, optax.adam(0.01), sgp.TraceGP_ELBO(sgp.GaussHermite(7)))
    state = svi.init(KEY, X, y)
    traced = jax.jit(svi.update).trace(state, X, y)
    # No copy of T for each of the seven nodes.
    assert f"7,{M},{M}]" not in str(traced.jaxpr)
    names = {name for name, _ in helpers.primitives(traced.jaxpr.jaxpr)}
    text = traced.lower().as_text()
    assert "dot_general" in names
    called = re.findall(r"custom_call @(\w+)|stablehlo\.(cholesky|triangular_solve)", text)
    return names & FACTORISING, {name for pair in called for name in pair if name}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kl", "likelihood"),
    [
        ("exact", "gaussian"),
        ("stochastic", "student"),
        pytest.param("exact", "student", marks=pytest.mark.slow),
        pytest.param("stochastic", "gaussian", marks=pytest.mark.slow),
    ],
)
def test_a_relaxed_step_factorises_nothing(likelihood, kl):
    assert factorisations(option(kl=kl), likelihood) == (set(), set())


@pytest.mark.quick(1)
@pytest.mark.parametrize("bound", ["lc", "fr"])
def test_a_stochastic_step_factorises_nothing_but_tridiagonal_matrices(bound):
    names, called = factorisations(option(bound, kl="stochastic", num_probes=3))
    # Lanczos' quadrature takes the eigenvalues of small tridiagonal matrices, one for
    # each random vector.
    assert names == {"eigh"}
    assert len(called) == 1 and "syevd" in called.pop()


def test_the_search_for_factorisations_finds_those_of_svgp():
    names, called = factorisations(sgp.SVGP(inducing=Z))
    assert names == {"cholesky", "triangular_solve"}
    assert any("potrf" in c or c == "cholesky" for c in called)
    assert any("trsm" in c or c == "triangular_solve" for c in called)


# ---- training --------------------------------------------------------------------


def run(program, approximation, *args, num_steps=10, rule=None, lr=0.05, base=None, **elbo):
    """A guide trained by a scan over updates: parameters, states of T, losses."""
    options = {} if base is None else {"base_guide": base}
    guide = sgp.AutoSparseGP(program, approximation, **options)
    svi = SVI(program, guide, optax.adam(lr), sgp.TraceGP_ELBO(rule, **elbo))
    state = svi.init(KEY, *args)

    @jax.jit
    def train(state):
        def step(state, _):
            state, loss = svi.update(state, *args)
            return state, (loss, state.mutable_state)

        return jax.lax.scan(step, state, None, num_steps)

    state, (losses, found) = train(state)
    return guide, svi.get_params(state), losses, found, state


@pytest.mark.slow
def test_relaxed_training_reaches_the_collapsed_bound():
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(np.sort(rng.uniform(-3, 3, (40, 1)), axis=0))
    y = jnp.asarray(np.sin(2 * inputs[:, 0]) + NOISE * rng.normal(size=40))
    points = jnp.linspace(-2.8, 2.8, 8)[:, None]
    approximation = sgp.InverseFreeSVGP(inducing=points, train_inducing=False)

    def program(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.7), X))
        with numpyro.plate("data", 40):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    best = sgp.CollapsedSVGP(sgp.kernels.RBF(1.0, 0.7), inputs, points, NOISE)
    guide, params, losses, found, *_ = run(
        program, approximation, inputs, y, num_steps=300, rule=sgp.GaussHermite(2)
    )
    gap = best.log_prob(y) + losses[-1]
    assert -1e-6 < gap < 0.05
    state = found["f_auto_T"]
    assert state["num_steps"].max() <= 3 and state["residual"].max() < 1e-3
    # Without the state: from a cold start to the same posterior.
    q = guide.posterior(params, inputs, y)["f"]
    known = best.posterior(y, inputs)
    assert_allclose(q.mean, known.mean, atol=0.02)
    assert_allclose(q.variance, known.variance, rtol=0.05)


@pytest.mark.slow
def test_minibatches_two_functions_and_a_cold_start():
    def program(X, y=None):
        data = numpyro.plate("data", N, subsample_size=None if y is None else 5)
        with data as rows:
            pass
        kernel = sgp.kernels.RBF(jnp.array([1.0, 0.5]), numpyro.param("ell", ELL))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X[rows]))
        with data:
            obs = None if y is None else y[rows]
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=obs)

    y = jnp.asarray(Y["gaussian"])
    approximation = option(share_inducing=False, covariance="diagonal")
    guide, params, losses, found, state = run(
        program, approximation, X, y, rule=sgp.MonteCarlo(2)
    )
    assert np.isfinite(losses).all() and params["f_auto_Z"].shape == (2, M, 1)
    assert found["f_auto_T"]["root"].shape == (10, 2, M, M)
    # The start of SVI.init is at the first parameters.
    assert found["f_auto_T"]["num_steps"].max() <= 3
    cold = guide.posterior(params, X)["f"]
    values = {**params, **state.mutable_state}
    seeded = handlers.seed(handlers.substitute(guide, values), KEY)
    warm = handlers.trace(seeded).get_trace(X)["f"]["fn"]
    assert warm.iteration.num_steps.max() < cold.iteration.num_steps.min()
    assert_allclose(warm.variance, cold.variance, rtol=1e-4)
    draws = Predictive(program, guide=guide, params=params, num_samples=3)(KEY, X)
    assert draws["y"].shape == (3, N) and np.isfinite(draws["y"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["relaxed", "lc"])
def test_functions_that_share_points(bound):
    """As many bounds as functions, with the kernel of both."""

    def program(X, y):
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, ELL), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f.sum(0), NOISE), obs=y)

    y = jnp.asarray(Y["gaussian"])
    guide = sgp.AutoSparseGP(program, option(bound))
    guide.setup(X, y)
    weights, R = relaxed_q(0)
    own = {"noise": R} if bound == "relaxed" else {"root": R, "T": free_q(0)[2]}
    params = named(**{"pseudo" if bound == "relaxed" else "weights": weights}, **own)
    shapes = {k: v.shape for k, v in guide.setup_state()["initial"]["f"].items()}
    if bound == "lc":  # one kernel has one inverse
        assert shapes["qu_T"] == (M, M) and shapes["qu_root"] == (2, M, M)
    both = {
        k: jnp.broadcast_to(v, shapes[k.removeprefix("f_auto_")])
        for k, v in params.items()
        if k != "ell"
    }
    q = guide.posterior(both, X, y)["f"]
    assert q.mean.shape == q.variance.shape == (2, N) and q.prior_kl().shape == (2,)
    one = bound_at("gaussian", bound)[1].posterior(params, X)["f"]
    assert_allclose(q.variance[1], one.variance, rtol=1e-6)
    assert_allclose(q.prior_kl()[0], one.prior_kl(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["relaxed", "fr"])
def test_two_layers(bound):
    def program(X, y=None):
        f1 = numpyro.sample("f1", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        f2 = numpyro.sample("f2", sgp.GaussianProcess(sgp.kernels.RBF(), f1[:, None]))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f2, NOISE), obs=y)

    y = jnp.asarray(Y["gaussian"])
    approximation = sgp.InverseFreeSVGP(4, bound=bound)
    guide, params, losses, found, *_ = run(
        program, approximation, X, y, rule=sgp.MonteCarlo(3)
    )
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    if bound == "relaxed":
        assert set(found) == {"f1_auto_T", "f2_auto_T"}
        assert found["f2_auto_T"]["num_steps"].max() <= 5
    assert set(guide.posterior(params, X)) == {"f1", "f2"}


@pytest.mark.slow
def test_several_particles_keep_the_state():
    def program(X, y):
        ell = numpyro.sample("ell", dist.LogNormal(0.0, 0.3))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, ell), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    y = jnp.asarray(Y["gaussian"])
    _, _, losses, found, _ = run(
        program, option(), X, y, num_steps=3, base=AutoNormal, num_particles=2
    )
    assert np.isfinite(losses).all() and found["f_auto_T"]["root"].shape == (3, M, M)


@pytest.mark.slow
def test_a_bound_of_classes_is_negative_in_float32():
    """
    Without jitter it was 16 nats off, and training followed such to +1e6: of one that is
    next to constant, so that K_uu has a rank of one to rounding, with little pseudo-noise.
    """

    def classes(X, y):
        kernel = sgp.kernels.RBF(300.0, 1e4)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    rng = np.random.default_rng(0)
    rows, y = rng.normal(size=(500, 1)), np.ones(500)

    def bound(dtype, **options):
        guide = sgp.AutoSparseGP(classes, sgp.InverseFreeSVGP(20, seed=1, **options))
        data = rows.astype(dtype), y.astype(dtype)
        svi = SVI(classes, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
        params = svi.get_params(svi.init(KEY, *data))
        params["f_auto_qu_noise"] = 1e-5 * params["f_auto_qu_noise"]
        params["f_auto_qu_pseudo"] = jnp.full(20, -7.0, dtype)
        return -svi.evaluate(svi.init(KEY, *data, init_params=params), *data)

    double = bound("float64", jitter=1e-5)
    with jax.enable_x64(False):
        single = bound("float32")
    assert single < 0.0
    assert_allclose(single, double, rtol=1e-3)


@pytest.mark.slow
def test_a_step_compiles_once_in_float32_and_lbfgs_trains():
    with jax.enable_x64(False):
        inputs, y = X.astype(jnp.float32), jnp.asarray(Y["gaussian"], jnp.float32)
        approximation = sgp.InverseFreeSVGP(6)
        guide = sgp.AutoSparseGP(model, approximation)
        svi = SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO(sgp.GaussHermite(2)))
        state = svi.init(KEY, inputs, y)
        count = []

        @jax.jit
        def update(state):
            count.append(1)
            return svi.update(state, inputs, y)

        losses = []
        for _ in range(30):
            state, loss = update(state)
            losses.append(float(loss))
        assert len(count) == 1 and losses[-1] < losses[0] and np.isfinite(losses).all()
        assert state.mutable_state["f_auto_T"]["root"].dtype == jnp.float32
        variance = guide.posterior(svi.get_params(state), inputs)["f"].variance
        assert (variance > 0).all() and variance.dtype == jnp.float32
        result = sgp.fit_lbfgs(
            svi, KEY, inputs, y, max_iterations=5, init_state=state, progress_bar=False
        )
        assert result.losses[-1] < losses[-1]
    assert pickle.loads(pickle.dumps(approximation)).num_points == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "start"), [("lc", "scaled"), ("lc", "random"), ("fr", "small")]
)
def test_stochastic_training_of_free_T(bound, start):
    approximation = option(bound, T_start=start, kl="stochastic", num_probes=4)
    y = jnp.asarray(Y["gaussian"])
    *_, losses, state, _ = run(model, approximation, X, y, rule=sgp.GaussHermite(2))
    assert np.isfinite(losses).all() and state is None
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_starts_of_T():
    y = jnp.asarray(Y["gaussian"])
    norm_K = np.abs(K).sum(axis=1).max()
    known = {
        "inverse": np.linalg.inv(K),
        "scaled": np.eye(M) / norm_K,
        "small": 1e-6 * np.eye(M),
    }
    for start in (*known, "random", K):
        guide = sgp.AutoSparseGP(model, option("lc", T_start=start))
        guide.setup(X, y)
        values = guide.setup_state()["initial"]["f"]
        T = values["qu_T"] @ values["qu_T"].T
        name = start if isinstance(start, str) else None
        if name == "random":
            assert 0 < np.linalg.eigvalsh(T).min() and np.abs(T).max() < 10 / norm_K
        else:
            assert_allclose(T, known.get(name, K), rtol=1e-6, atol=1e-9 * np.abs(T).max())
        # q(u) is at the prior.
        S = values["qu_root"] @ values["qu_root"].T
        assert_allclose(K @ S @ K, K, atol=1e-9)


# ---- tight bounds, and what is refused ---------------------------------------------


@pytest.mark.slow
def test_tight_bounds_of_lc():
    """Between the plain bound and the evidence; the diagonal one has a closed form."""
    y = Y["gaussian"]
    weights, root, T_root = free_q(1)
    T = T_root @ T_root.T
    params = named(weights=weights, root=root, T=T_root)
    plain = bound_at("gaussian", "lc")[0](params)
    diagonal = bound_at("gaussian", "lc", tight="diagonal")[0](params)
    rest = 1.0 + np.sum(KUF * ((T @ K @ T - 2 * T) @ KUF), axis=0)
    F = root.T @ KUF
    kl = 0.5 * (
        np.trace(K @ root @ root.T)
        + weights @ K @ weights
        - M
        - np.linalg.slogdet(K)[1]
        - np.linalg.slogdet(root @ root.T)[1]
    )
    expected = norm.logpdf(y, KUF.T @ weights, NOISE) - np.sum(F**2, 0) / (2 * NOISE**2)
    known = np.sum(expected) - 0.5 * np.sum(np.log1p(rest / NOISE**2)) - kl
    assert_allclose(diagonal, known, rtol=1e-9)
    assert plain < diagonal
    scalar = bound_at("gaussian", "lc", tight="scalar")[0]
    assert_allclose(scalar({**params, "f_auto_qf_scale": jnp.ones(())}), plain, rtol=1e-9)
    v = 1.0 / (1.0 + rest.mean() / NOISE**2)
    found = scalar({**params, "f_auto_qf_scale": jnp.asarray(v)})
    assert plain < found < diagonal


def mixture(f):
    parts = dist.Normal(jnp.stack([f, f + 2.0], -1), NOISE)
    return dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.5, 0.5])), parts)


@pytest.mark.parametrize("likelihood", [LIKELIHOODS["student"], mixture])
def test_lc_refuses_likelihoods_that_are_not_log_concave(likelihood):
    def program(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihood(f), obs=y)

    y = jnp.asarray(Y["student"])
    with pytest.raises(ValueError, match=r"GP site 'f': .* curvature .*bound='fr'"):
        sgp.AutoSparseGP(program, option("lc")).setup(X, y)
    sgp.AutoSparseGP(program, option("fr")).setup(X, y)


def additive(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
    numpyro.sample("y", dist.StudentT(3.0, f.sum(axis=0), NOISE).to_event(1), obs=y)


def difference_of_sites(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    numpyro.sample("y", dist.StudentT(3.0, f - g, NOISE).to_event(1), obs=y)


@pytest.mark.parametrize("program", [additive, difference_of_sites])
def test_lc_looks_at_functions_apart(program):
    """Curvature that shows where functions do not cancel."""
    with pytest.raises(ValueError, match=r"GP site 'f': .* curvature .*bound='fr'"):
        sgp.AutoSparseGP(program, option("lc")).setup(X, jnp.asarray(Y["student"]))


def test_lc_refuses_rows_tied_together():
    def program(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(jnp.diff(f), NOISE).to_event(1), obs=y[1:])

    with pytest.raises(ValueError, match="'f': the likelihood ties rows .*'relaxed'"):
        sgp.AutoSparseGP(program, option("lc")).setup(X, jnp.asarray(Y["gaussian"]))


def test_lc_takes_a_concave_likelihood_without_curvature():
    def program(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Laplace(f, NOISE).to_event(1), obs=y)

    sgp.AutoSparseGP(program, option("lc")).setup(X, jnp.asarray(Y["gaussian"]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("observed", [False, True])
def test_lc_refuses_a_layer_below_another_one(observed):
    def program(X, y):
        f1 = numpyro.sample("f1", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        if observed:
            numpyro.sample("y1", dist.Normal(f1, 5.0).to_event(1), obs=y)
        f2 = numpyro.sample("f2", sgp.GaussianProcess(sgp.kernels.RBF(), f1[:, None]))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f2, NOISE), obs=y)

    guide = sgp.AutoSparseGP(program, sgp.InverseFreeSVGP(3, bound="lc"))
    with pytest.raises(ValueError, match=r"'f1' feeds another GP site.*bound='fr'"):
        guide.setup(X, jnp.asarray(Y["gaussian"]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bound": "sv"}, "bound must be one of"),
        ({"covariance": "coupled"}, "covariance must be one of"),
        ({"tight": "diagonal"}, "tight='diagonal' is for bound='lc'"),
        ({"tight": "scalar", "bound": "fr"}, "tight='scalar' is for bound='lc'"),
        ({"tight": "block", "bound": "lc"}, "tight must be one of"),
        ({"kl": "mc"}, "kl must be one of"),
        ({"num_probes": 0}, "num_probes must be a positive whole number, got 0"),
        ({"max_steps": 1.5}, "max_steps must be a positive whole number"),
        ({"tol": 0.0}, "tol must be a Python number above 0 and at most 0.1"),
        ({"tol": 0.9}, "tol must be a Python number above 0 and at most 0.1"),
        ({"jitter": -1.0}, "jitter is relative"),
        ({"precondition": "P"}, "precondition must be True or False"),
        ({"T_start": "scaled"}, "T_start is for bound='lc' and bound='fr'"),
        ({"bound": "lc", "covariance": "diagonal"}, "are for bound='relaxed'"),
        ({"bound": "lc", "precondition": False}, "are for bound='relaxed'"),
        ({"bound": "lc", "T_start": "zero"}, "T_start must be one of"),
        ({"bound": "lc", "T_start": np.eye(3)}, r"T_start must have the shape \(5, 5\)"),
        ({"bound": "lc", "T_start": -np.eye(5)}, "symmetric and positive definite"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        sgp.InverseFreeSVGP(5, **options)


def test_sparsify_refuses_it():
    with pytest.raises(ValueError, match="would ignore the q"):
        sgp.sparsify(model, option())


def test_an_iteration_that_has_not_converged_is_reported():
    y = jnp.asarray(Y["gaussian"])
    guide = sgp.AutoSparseGP(model, option(max_steps=2))
    guide.setup(X, y)
    params = named(pseudo=np.zeros(M), noise=0.01 * np.eye(M))
    with pytest.warns(UserWarning, match="GP site 'f' ended at a residual of"):
        guide.posterior(params, X)


@pytest.mark.slow
def test_lbfgs_refuses_a_drawn_kl():
    guide = sgp.AutoSparseGP(additive_normal, option("relaxed", kl="stochastic"))
    svi = SVI(additive_normal, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    with pytest.raises(ValueError, match="'f' estimates its KL .* kl='exact'"):
        sgp.fit_lbfgs(svi, jax.random.key(0), X, jnp.asarray(Y["gaussian"]))


def additive_normal(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
    numpyro.sample("y", dist.Normal(f.sum(axis=0), NOISE).to_event(1), obs=y)


def test_starts_of_T_for_each_function():
    T = np.stack([np.eye(M), 2.0 * np.eye(M)])
    y = jnp.asarray(Y["gaussian"])
    guide = sgp.AutoSparseGP(additive_normal, option("lc", T_start=T))
    guide.setup(X, y)
    svi = SVI(additive_normal, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    assert_allclose(params["f_auto_qu_T"] ** 2, T)
    with pytest.raises(ValueError, match=r"T_start has the shape \(3, .*batch shape \(2,"):
        other = option("lc", T_start=np.stack([np.eye(M)] * 3))
        sgp.AutoSparseGP(additive_normal, other).setup(X, y)


@pytest.mark.slow
def test_a_point_without_prior_variance_gets_pseudo_noise():
    """A linear kernel has none at zero, and log|S| would be infinite."""

    def program(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Linear(1.0), X))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

    points = jnp.arange(-2.0, 3.0)[:, None]
    guide = sgp.AutoSparseGP(program, sgp.InverseFreeSVGP(inducing=points))
    svi = SVI(program, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    state = svi.init(jax.random.key(0), X, jnp.asarray(Y["gaussian"]))
    assert (jnp.diagonal(svi.get_params(state)["f_auto_qu_noise"]) > 0.1).all()
    assert jnp.isfinite(svi.evaluate(state, X, jnp.asarray(Y["gaussian"])))

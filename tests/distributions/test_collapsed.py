"""Collapsed bounds against plain dense algebra, their order, and what they give."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp
from numpyro_sgp.distributions.relaxation import Blocks
from numpyro_sgp.families import Block
from tests.helpers import exact_gp, rbf, regression_data, slow

JITTER = 1e-10  # below the differences that the order of bounds is tested to
KERNEL = sgp.kernels.RBF(1.3, 0.7)


class Dense:
    """The matrices of the paper by explicit inverses, in float64 NumPy."""

    def __init__(self, X, y, Z, O, noise, variance=1.3, lengthscale=0.7):
        X, y, Z, O = map(np.asarray, (X, y, Z, O))
        k = lambda a, b: rbf(a, b, variance, lengthscale)  # noqa: E731
        nugget = JITTER * variance
        self.y, self.s2, self.N = y, noise**2, len(X)
        self.Kff, Kuf, Kvf = k(X, X), k(Z, X), k(O, X)
        Kuu, Kvv = k(Z, Z) + nugget * np.eye(len(Z)), k(O, O) + nugget * np.eye(len(O))
        Kuv = k(Z, O)
        self.Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
        self.Cvv = Kvv - Kuv.T @ np.linalg.solve(Kuu, Kuv)
        self.Cvf = Kvf - Kuv.T @ np.linalg.solve(Kuu, Kuf)
        self.Cff = self.Kff - self.Q
        self.A = self.Q + self.s2 * np.eye(self.N)
        self.B = self.Cvf.T @ np.linalg.solve(self.Cvv, self.Cvf)

    def normal(self, covariance, mean=0.0):
        return multivariate_normal(np.zeros(self.N), covariance).logpdf(self.y - mean)

    def eq_3(self):
        return self.normal(self.A) - np.trace(self.Cff) / (2 * self.s2)

    def eq_9(self, m, S):
        """Collapsed over q(u), for any N(m, S) of v."""
        pull = np.linalg.solve(self.Cvv, self.Cvf)
        S_f = self.Cff + pull.T @ (S - self.Cvv) @ pull
        solved = np.linalg.solve(self.Cvv, S)
        kl = np.trace(solved) + m @ np.linalg.solve(self.Cvv, m) - len(m)
        kl -= np.linalg.slogdet(solved)[1]
        return self.normal(self.A, pull.T @ m) - np.trace(S_f) / (2 * self.s2) - kl / 2

    def optimal_v(self):
        """Eq. (28) and (29)."""
        solved = np.linalg.solve(self.A, self.Cvf.T)
        m = self.Cvv @ np.linalg.solve(self.Cvv + self.Cvf @ solved, solved.T @ self.y)
        S = self.Cvv @ np.linalg.solve(self.Cvv + self.Cvf @ self.Cvf.T / self.s2, self.Cvv)
        return m, S

    def log_det(self, D):
        return np.linalg.slogdet(np.eye(len(D)) + D / self.s2)[1]

    def exact(self):
        return self.normal(self.Kff + self.s2 * np.eye(self.N))


@st.composite
def problems(draw):
    """A small regression problem with distinct inducing points Z and O."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    # Few shapes, since each is compiled anew.
    N, M, M2, dim = draw(st.sampled_from([(6, 1, 3, 1), (11, 4, 2, 2)]))
    noise = draw(st.sampled_from([0.1, 0.5]))
    X = rng.uniform(-2, 2, size=(N, dim))
    y = np.sin(2 * X).sum(axis=1) + noise * rng.normal(size=N)
    # Not nearer to each other than a tenth: bounds are compared to 1e-7.
    points = rng.permutation(np.linspace(-2, 2, M + M2))[:, None]
    points = points + np.zeros((1, dim))
    return X, y, points[:M], points[M:], noise


def bound(cls, problem, **options):
    X, y, Z, O, noise = map(jnp.asarray, problem)
    sets = (Z,) if cls in (sgp.CollapsedSVGP, sgp.CollapsedCG) else (Z, O)
    return cls(KERNEL, X, *sets, noise, jitter=JITTER, **options)


@partial(jax.jit, static_argnums=(0, 2))
def compiled(cls, problem, options):
    return bound(cls, problem, **dict(options)).log_prob(problem[1])


def value(cls, problem, **options):
    return float(compiled(cls, problem, tuple(options.items())))


@given(problems())
def test_bounds_are_the_papers(problem):
    dense = Dense(*problem)
    m, S = dense.optimal_v()
    agree = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7)  # noqa: E731
    agree(value(sgp.CollapsedSVGP, problem), dense.eq_3())
    # The closed form (30) is the definition (9) at (28) and (29); (10) keeps S = C_vv.
    agree(value(sgp.CollapsedSOLVEGP, problem), dense.eq_9(m, S))
    agree(value(sgp.CollapsedODVGP, problem), dense.eq_9(m, dense.Cvv))
    # Eq. (14), and (15) as the paper writes it, by K_uu.
    D = dense.Cff
    eq_14 = dense.normal(dense.A) - 0.5 * np.trace(np.linalg.solve(dense.A, D))
    agree(value(sgp.CollapsedSVGP, problem, tight="conditional"), eq_14)
    X, _, Z, _, _ = problem
    Kuu = rbf(Z, Z, 1.3, 0.7) + 1.3 * JITTER * np.eye(len(Z))
    Kuf = rbf(Z, X, 1.3, 0.7)
    inner = np.linalg.solve(Kuu + Kuf @ Kuf.T / dense.s2, Kuf)
    eq_15 = dense.eq_3() + np.trace(Kuf.T @ inner @ D) / (2 * dense.s2**2)
    agree(eq_15, eq_14)


@pytest.mark.slow
@given(problems(), st.sampled_from([2, 5]))
def test_tight_bounds_are_their_formulas(problem, size):
    dense = Dense(*problem)
    parts = [np.arange(i, min(i + size, dense.N)) for i in range(0, dense.N, size)]
    m, S = dense.optimal_v()
    cases = [
        (sgp.CollapsedSVGP, dense.eq_3(), dense.Cff),
        (sgp.CollapsedSOLVEGP, dense.eq_9(m, S), dense.Cff - dense.B),
        # O explains no variance, so all that Z leaves is relaxed.
        (sgp.CollapsedODVGP, dense.eq_9(m, dense.Cvv), dense.Cff),
    ]
    for cls, plain, R in cases:
        plain = plain + np.trace(R) / (2 * dense.s2)
        diagonal = plain - 0.5 * np.log1p(np.diag(R) / dense.s2).sum()
        block = plain - 0.5 * sum(dense.log_det(R[np.ix_(p, p)]) for p in parts)
        np.testing.assert_allclose(value(cls, problem, tight="diagonal"), diagonal, 1e-7)
        found = value(cls, problem, tight=sgp.relaxation.Blocks(size))
        np.testing.assert_allclose(found, block, 1e-7)


@pytest.mark.slow
@given(problems())
def test_order_of_the_bounds(problem):
    X, y, Z, O, noise = problem
    union = X, y, np.concatenate([Z, O]), O, noise
    exact = Dense(*problem).exact()
    for tight in ("none", "diagonal", "block"):
        values = [
            value(sgp.CollapsedSVGP, problem, tight=tight),
            value(sgp.CollapsedODVGP, problem, tight=tight),
            value(sgp.CollapsedSOLVEGP, problem, tight=tight),
            value(sgp.CollapsedSVGP, union, tight=tight),
            exact,
        ]
        # Relaxed, ODVGP may be above SOLVE-GP; all else keeps its order.
        orders = [values] if tight == "none" else [values[:2] + [exact], values[2:]]
        slack = 1e-7 * max(1.0, abs(exact))
        for order in orders:
            assert all(a <= b + slack for a, b in zip(order, order[1:], strict=False)), (
                values
            )
    for cls in (sgp.CollapsedSVGP, sgp.CollapsedODVGP, sgp.CollapsedSOLVEGP):
        each = [
            value(cls, problem, tight="none"),
            value(cls, problem, tight="diagonal"),
            value(cls, problem, tight=sgp.relaxation.Blocks(2)),
            value(cls, problem, tight=sgp.relaxation.Blocks(len(X))),
            exact,
        ]
        assert all(a <= b + slack for a, b in zip(each, each[1:], strict=False)), each
    conditional = value(sgp.CollapsedSVGP, problem, tight="conditional")
    assert value(sgp.CollapsedSVGP, problem) <= conditional + slack
    assert conditional <= exact + slack


@given(problems())
def test_conjugate_gradients_bound_the_quadratic_term(problem):
    dense = Dense(*problem)
    exact = dense.exact()
    slack = 1e-7 * max(1.0, abs(exact))
    few = value(sgp.CollapsedCG, problem, max_iterations=1, tol=1e-12)
    full = value(sgp.CollapsedCG, problem, tol=1e-12)
    assert max(few, full) <= exact + slack
    # Converged, only the log-determinant is a bound.
    log_det = np.linalg.slogdet(dense.A)[1]
    log_det += np.log1p(np.diag(dense.Cff) / dense.s2).sum()
    K = dense.Kff + dense.s2 * np.eye(dense.N)
    quadratic = dense.y @ np.linalg.solve(K, dense.y)
    expected = -0.5 * (dense.N * np.log(2 * np.pi) + log_det + quadratic)
    np.testing.assert_allclose(full, expected, rtol=1e-7)


@pytest.mark.slow
def test_any_partition_is_a_bound_and_neighbours_are_tighter():
    X, y = regression_data(40, noise=0.1)
    Z, exact = X[::10], float(sgp.MarginalGP(KERNEL, X, 0.1).log_prob(y))
    blocks = sgp.neighbour_blocks(X, 7)
    assert sorted(blocks[blocks >= 0].tolist()) == list(range(40))

    def tight(*blocks):
        relaxation = sgp.relaxation.Blocks(*blocks)
        svgp = sgp.CollapsedSVGP(KERNEL, X, Z, 0.1, tight=relaxation)
        return float(svgp.log_prob(y))

    shuffled = np.random.default_rng(0).permutation(40).reshape(8, 5)
    assert tight(None, shuffled) < tight(None, blocks) < exact
    assert tight(1) < tight(None, blocks)


def test_inducing_points_at_the_inputs_are_exact():
    X, y = regression_data(12)
    X_new = jnp.linspace(-2.5, 2.5, 7)[:, None]
    log_evidence, mean, covariance = exact_gp(X, y, X_new, 0.3, 1.3, 0.7)
    options = {"mean": None, "jitter": 1e-12}
    for marginal in [
        sgp.MarginalGP(KERNEL, X, 0.3, **options),
        sgp.CollapsedSVGP(KERNEL, X, X, 0.3, **options),
        sgp.CollapsedCG(KERNEL, X, X[:3], 0.3, tol=1e-14, **options),
    ]:
        if not isinstance(marginal, sgp.CollapsedCG):
            np.testing.assert_allclose(marginal.log_prob(y), log_evidence, rtol=1e-7)
            posterior = marginal.posterior(y, X_new)
            np.testing.assert_allclose(posterior.mean, mean, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(
                posterior.covariance_matrix, covariance, rtol=1e-6, atol=1e-7
            )
        else:
            np.testing.assert_allclose(marginal.posterior_mean(y, X_new), mean, 1e-6)


@pytest.mark.slow
def test_posterior_is_the_best_of_the_uncollapsed_bound():
    X, y = regression_data(15)
    Z, O = X[:3], X[3:7]
    collapsed = sgp.CollapsedSOLVEGP(KERNEL, X, Z, O, 0.3)
    q = collapsed.posterior(y, X)
    expected = dist.Normal(q.mean, 0.3).log_prob(y) - 0.5 * q.variance / 0.3**2
    elbo = jnp.sum(expected) - q.prior_kl()
    np.testing.assert_allclose(elbo, collapsed.log_prob(y), rtol=1e-9)
    # Eq. (9) at the optimum, and below it at another q(v).
    best = collapsed.optimal_q(y).blocks[1]
    np.testing.assert_allclose(
        collapsed.log_prob_given(y, best), collapsed.log_prob(y), rtol=1e-9
    )
    other = Block(best.mu + 0.1, jnp.eye(4))
    dense = Dense(X, y, Z, O, 0.3)
    L = np.linalg.cholesky(dense.Cvv)
    np.testing.assert_allclose(
        collapsed.log_prob_given(y, other),
        dense.eq_9(L @ np.asarray(other.mu), dense.Cvv),
        rtol=1e-6,
    )


@pytest.mark.slow
def test_several_sets_functions_means_and_noise_of_each_row():
    X, y = regression_data(12)
    Y = jnp.stack([y, -2.0 * y])
    kernel = sgp.kernels.RBF(jnp.array([1.3, 0.5]), jnp.array([0.7, 0.4]))
    noise = jnp.linspace(0.2, 0.5, 12)
    mean = sgp.means.Constant(jnp.array([0.3, -1.0]))
    sets = X[:2], (X[2:4], X[4:7])
    batch = sgp.CollapsedSOLVEGP(
        kernel, X, *sets, noise, mean, tight=sgp.relaxation.Blocks(5)
    )
    assert batch.log_prob(Y).shape == (2,)
    for i, (variance, lengthscale, m) in enumerate([(1.3, 0.7, 0.3), (0.5, 0.4, -1.0)]):
        one = sgp.CollapsedSOLVEGP(
            sgp.kernels.RBF(variance, lengthscale),
            X,
            *sets,
            noise,
            m,
            sgp.relaxation.Blocks(5),
        )
        np.testing.assert_allclose(batch.log_prob(Y)[i], one.log_prob(Y[i]), rtol=1e-9)
        np.testing.assert_allclose(
            batch.posterior(Y, X[:4]).mean[i], one.posterior(Y[i], X[:4]).mean, rtol=1e-7
        )
    # Noise of each row: the exact GP with all inducing points at the inputs.
    exact = multivariate_normal(
        np.full(12, 0.3), rbf(X, X, 1.3, 0.7) + np.diag(np.asarray(noise) ** 2)
    ).logpdf(np.asarray(y))
    every = sgp.CollapsedSVGP(KERNEL, X, X, noise, 0.3, jitter=1e-12)
    np.testing.assert_allclose(every.log_prob(y), exact, rtol=1e-7)
    with pytest.raises(ValueError, match="noise differs by row"):
        every.predictive(y, X)
    np.testing.assert_allclose(
        every.predictive(y, X[:2], 0.1).variance, every.posterior(y, X[:2]).variance + 0.01
    )


def regression(X, y, Z, O, X_new=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    marginal = sgp.CollapsedSOLVEGP(kernel, X, Z, O, noise, tight="diagonal")
    numpyro.sample("y", marginal, obs=y)
    if X_new is not None:
        numpyro.sample("f_new", marginal.posterior(y, X_new))
        numpyro.deterministic("mean", marginal.predictive(y, X_new).mean)


@pytest.mark.slow
def test_gradients_and_jit_and_float32():
    X, y = regression_data(15)

    def log_prob(Z, lengthscale, X, y, tight):
        kernel = sgp.kernels.RBF(1.0, lengthscale)
        if tight == "conditional":
            return sgp.CollapsedSVGP(kernel, X, Z, 0.3, tight=tight).log_prob(y)
        # Converged, where the slope by v vanishes and that of v fixed is the whole one.
        return sgp.CollapsedCG(kernel, X, Z, 0.3, tight=tight, tol=1e-12).log_prob(y)

    for tight in ("diagonal", "block", "conditional"):
        slope = jax.jit(jax.grad(log_prob, argnums=(0, 1)), static_argnums=4)
        to_Z, to_lengthscale = slope(X[:4], 0.6, X, y, tight)
        assert jnp.isfinite(to_Z).all() and jnp.isfinite(to_lengthscale)
        up, down = (log_prob(X[:4], 0.6 + h, X, y, tight) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(to_lengthscale, (up - down) / 2e-5, rtol=1e-5)
        small = [a.astype(jnp.float32) for a in (X[:4], X, y)]
        single = log_prob(small[0], jnp.float32(0.6), *small[1:], tight)
        assert single.dtype == jnp.float32
        np.testing.assert_allclose(single, log_prob(X[:4], 0.6, X, y, tight), rtol=1e-3)


@pytest.mark.slow
def test_the_bound_at_a_given_q_v_of_odvgp_is_its_own():
    X, y = regression_data(15)
    for tight in ("none", "diagonal"):
        odvgp = sgp.CollapsedODVGP(KERNEL, X, X[:3], X[3:7], 0.3, tight=tight)
        best = odvgp.optimal_q(y).blocks[1]
        np.testing.assert_allclose(
            odvgp.log_prob_given(y, best), odvgp.log_prob(y), rtol=1e-9
        )
    with pytest.raises(ValueError, match="q\\(v\\) has the prior's covariance"):
        odvgp.log_prob_given(y, Block(best.mu, jnp.eye(4)))


@pytest.mark.slow
def test_expanded_ones_have_a_posterior_of_each_function():
    X, y = regression_data(10)
    Y = jnp.stack([y, 2.0 * y])
    for marginal in (
        sgp.MarginalGP(KERNEL, X, 0.3),
        sgp.CollapsedSOLVEGP(KERNEL, X, X[:3], [X[3:5], X[5:7]], 0.3),
    ):
        both = marginal.expand([2])
        np.testing.assert_allclose(both.log_prob(Y)[1], marginal.log_prob(Y[1]))
        np.testing.assert_allclose(
            both.posterior(Y, X[:2]).mean[1], marginal.posterior(Y[1], X[:2]).mean
        )


@pytest.mark.slow
def test_mixed_and_single_precision():
    X, y = regression_data(15)
    small = X.astype(jnp.float32)
    for cls in (sgp.CollapsedSVGP, sgp.CollapsedCG):
        assert jnp.isfinite(cls(KERNEL, small, small[:3], 0.3).log_prob(y))
    # Noise near the rounding of float32: finite, and not above the evidence.
    kernel = sgp.kernels.RBF(jnp.float32(1.0), jnp.float32(0.5))
    exact = sgp.MarginalGP(sgp.kernels.RBF(1.0, 0.5), X, 1e-3).log_prob(y)
    for tight in ("block", "conditional", "diagonal"):
        fn = sgp.CollapsedSVGP(kernel, small, small[:5], jnp.float32(1e-3), tight=tight)
        found = fn.log_prob(y.astype(jnp.float32))
        assert found.dtype == jnp.float32
        assert jnp.isfinite(found) and found < exact


def test_bad_input_is_told():
    X, y = regression_data(10)
    svgp = sgp.CollapsedSVGP(KERNEL, X, X[:3], 0.1)
    with pytest.raises(ValueError, match="outside the data plate"):
        svgp.expand([10]).log_prob(y)
    with pytest.raises(ValueError, match="y is None"):
        svgp.posterior(None, X)
    with pytest.raises(
        ValueError, match=r"NaN or infinite values in 1 rows \(first: \[4\]\)"
    ):
        svgp.log_prob(y.at[4].set(jnp.nan))
    with pytest.raises(ValueError, match="jax.vmap for several"):
        svgp.posterior(jnp.stack([y, y]), X)
    with pytest.raises(ValueError, match="points Z of shape .* are for a batch"):
        sgp.CollapsedSVGP(KERNEL, X, jnp.zeros((2, 3, 1)), 0.1)
    with pytest.raises(ValueError, match=r"use \[:, 0\]"):
        sgp.MarginalGP(KERNEL, X, 0.1, lambda X: 2.0 * X)
    with pytest.raises(ValueError, match="must be positive"):
        svgp.predictive(y, X, noise=-1.0)
    for noise in (jnp.ones(3), jnp.ones((10, 1))):
        with pytest.raises(ValueError, match=r"noise at X_new .* \(10,\), one for each"):
            svgp.predictive(y, X, noise=noise)
    with pytest.raises(ValueError, match="count once for each entry"):
        svgp.mask(jnp.ones(10, bool))
    with pytest.raises(ValueError, match="count once for each entry"):
        svgp.expand([1]).mask(jnp.ones(10, bool))
    assert svgp.mask(False).log_prob(y) == 0.0
    for noise in ([jnp.inf] * 10, jnp.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            svgp.predictive(y, X, noise=noise)
    with pytest.raises(ValueError, match="positive and finite, got inf"):
        sgp.MarginalGP(KERNEL, X, jnp.full(10, 0.1).at[2].set(jnp.inf))
    with pytest.raises(ValueError, match="filled up with -1"):
        sgp.CollapsedSVGP(
            KERNEL, X, X[:3], 0.1, tight=sgp.relaxation.Blocks(partition=[[0], [1, 2]])
        )
    with pytest.raises(ValueError, match=r"Use X\[:, None\]"):
        sgp.neighbour_blocks(X[:, 0], 3)
    with pytest.raises(ValueError, match=r"10 rows of X, but y has the shape \(10, 1\)"):
        svgp.log_prob(y[:, None])
    with pytest.raises(ValueError, match="must be positive and finite, got -0.1"):
        sgp.MarginalGP(KERNEL, X, -0.1)
    with pytest.raises(ValueError, match=r"noise has the shape \(3,\)"):
        sgp.MarginalGP(KERNEL, X, jnp.ones(3))
    with pytest.raises(ValueError, match=r"points O must have the shape \(M, 1\)"):
        sgp.CollapsedSOLVEGP(KERNEL, X, X[:3], jnp.ones((2, 2)), 0.1)
    with pytest.raises(ValueError, match="tight must be one of"):
        sgp.CollapsedSOLVEGP(KERNEL, X, X[:3], X[3:5], 0.1, tight="conditional")
    for size in (0, 11, 2.5, True):
        with pytest.raises(ValueError, match="whole number between 1 and 10"):
            sgp.CollapsedSVGP(KERNEL, X, X[:3], 0.1, tight=sgp.relaxation.Blocks(size))
    for blocks in ([[0, 1, 2]], [[*range(9), 8]], [[*range(9), 11]]):
        with pytest.raises(ValueError, match="each of the row numbers 0 to 9 once"):
            sgp.CollapsedSVGP(
                KERNEL,
                X,
                X[:3],
                0.1,
                tight=sgp.relaxation.Blocks(partition=np.array(blocks)),
            )
    with pytest.raises(ValueError, match="positive"):
        sgp.CollapsedCG(KERNEL, X, X[:3], 0.1, tol=0.0)
    with pytest.raises(ValueError, match="jitter is relative.*from 0 to 1.*got 5"):
        sgp.CollapsedSVGP(KERNEL, X, X[:3], 0.1, None, "block", 5).log_prob(y)


def with_white_noise(seed=3, N=60, s=0.3, w=0.5):
    """Data, and dense K_ff and Q of a kernel with noise in it."""
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(0, 6, (N, 1)), axis=0)
    Z = X[::3]
    k = lambda a, b: rbf(a, b, 1.0, 0.5)  # noqa: E731
    K = k(X, X) + w * np.eye(N)
    Q = k(X, Z) @ np.linalg.solve(k(Z, Z) + w * np.eye(len(Z)), k(Z, X))
    y = np.linalg.cholesky(K + s**2 * np.eye(N)) @ rng.normal(size=N)
    kernel = sgp.kernels.RBF(1.0, 0.5) + sgp.kernels.White(w)
    return (kernel, X, Z, s), y, K, Q, s**2 * np.eye(N)


@pytest.mark.parametrize("tight", [slow("diagonal"), "block", slow("conditional")])
def test_noise_in_the_kernel_keeps_bounds_below_the_evidence(tight):
    """Of K_ff between arrays of rows a White kernel would be missing, but not of diag."""
    parts, y, K, Q, noise = with_white_noise()
    tight = Blocks(60) if tight == "block" else tight
    bound = float(sgp.CollapsedSVGP(*parts, tight=tight, jitter=JITTER).log_prob(y))
    zeros = np.zeros(len(y))
    assert bound < multivariate_normal(zeros, K + noise).logpdf(y)
    if isinstance(tight, Blocks):
        lost = 0.5 * np.linalg.slogdet(np.eye(len(y)) + (K - Q) / noise[0, 0])[1]
        expected = multivariate_normal(zeros, Q + noise).logpdf(y) - lost
        assert_allclose(bound, expected, rtol=1e-7)


def test_conjugate_gradients_know_noise_in_the_kernel():
    parts, y, K, Q, noise = with_white_noise()
    lost = 0.5 * np.linalg.slogdet(np.eye(len(y)) + (K - Q) / noise[0, 0])[1]
    lost += 0.5 * np.linalg.slogdet(2 * np.pi * (Q + noise))[1]
    expected = -0.5 * y @ np.linalg.solve(K + noise, y) - lost
    bound = sgp.CollapsedCG(*parts, tight=Blocks(60), tol=1e-8, jitter=JITTER).log_prob(y)
    assert_allclose(bound, expected, rtol=1e-7)

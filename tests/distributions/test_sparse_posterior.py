"""q(f(X)) against Algorithm 1 of SOLVE-GP."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpyro.distributions.kl import kl_divergence

from numpyro_sgp import GaussianProcess, SparsePosterior
from numpyro_sgp.families import Block, BlockGaussian
from numpyro_sgp.kernels import RBF
from numpyro_sgp.means import Linear
from tests import helpers

# Large and in every reference, so that nine digits show whether and where it is added.
JITTER = 1e-4
VARIANCE, LENGTHSCALE = 1.3, 0.8
WEIGHTS = np.array([0.5, -1.5])  # of the prior mean
N = 6
seeds = st.integers(0, 2**32 - 1)
rbf = partial(helpers.rbf, variance=VARIANCE, lengthscale=LENGTHSCALE)

# Sizes of the sets and kind of covariance of each.
CASES = {
    "SVGP": ((5,), ("full",)),
    "SVGP diagonal": ((5,), ("diagonal",)),
    "SOLVE-GP": ((4, 3), ("full", "full")),
    "SOLVE-GP diagonal": ((4, 3), ("diagonal", "diagonal")),
    "SOLVE-GP of three sets": ((3, 2, 2), ("full", "diagonal", "full")),
    "ODVGP": ((4, 3), ("full", "prior")),
    "ODVGP of three sets": ((3, 2, 2), ("full", "prior", "full")),
}
cases = pytest.mark.parametrize(
    ("case", "whiten"), [(case, whiten) for case in CASES for whiten in (True, False)]
)


def points(rng, n):
    """Points on different cells of a grid, so that no two are close."""
    cells = rng.permutation(25)[:n]
    return np.stack([cells // 5, cells % 5], axis=1) + rng.uniform(-0.2, 0.2, (n, 2))


def block(rng, kind, M, batch=()):
    mu = rng.normal(size=(*batch, M))
    if kind == "prior":
        return Block(mu, None)
    sd = rng.uniform(0.3, 1.2, (*batch, M))
    if kind == "diagonal":
        return Block(mu, sd)
    below = 0.3 * np.tril(rng.normal(size=(*batch, M, M)), -1)
    return Block(mu, below + sd[..., None] * np.eye(M))


def problem(case, whiten, seed):
    """Inputs, inducing points and q(u)."""
    rng = np.random.default_rng(seed)
    sizes, kinds = CASES[case]
    everything = points(rng, N + sum(sizes))
    X, *sets = np.split(everything, np.cumsum((N, *sizes))[:-1])
    blocks = tuple(block(rng, k, M) for k, M in zip(kinds, sizes, strict=True))
    return X, tuple(sets), BlockGaussian(blocks, whiten)


@jax.jit
def _moments(kernel, X, sets, q):
    mean = Linear(WEIGHTS.astype(X.dtype), 0.3)
    posterior = SparsePosterior(GaussianProcess(kernel, X, mean), sets, q, JITTER)
    parts = {
        "all": posterior,
        "parallel": posterior.parallel(),
        "orthogonal": posterior.orthogonal(),
    }
    return {
        name: (part.mean, part.variance, part.covariance_matrix, part.prior_kl())
        for name, part in parts.items()
    }


def moments(X, sets, q):
    """Mean, variance, covariance and KL, of the whole and of its two parts."""
    return _moments(RBF(VARIANCE, LENGTHSCALE), X, sets, q)


def union_covariance(sets):
    K = rbf(np.concatenate(sets), np.concatenate(sets))
    return K + JITTER * VARIANCE * np.eye(len(K))


def algorithm_1(X, sets, q):
    """
    Eq. (33) to (36) and (38), with explicit inverses, set after set: the mean, the
    covariance and the KL that each adds, and what is left of K_ff.
    """
    union = np.concatenate(sets)
    J = rbf(np.concatenate([union, X]), np.concatenate([union, X]))
    J[: len(union), : len(union)] = union_covariance(sets)
    terms = []
    for b in q.blocks:
        M = len(b.mu)
        C, C_rest = J[:M, :M], J[:M, M:]  # c(O, O) and c(O, later sets and X)
        J = J[M:, M:] - C_rest.T @ np.linalg.inv(C) @ C_rest
        A = C_rest[:, -len(X) :].T @ np.linalg.inv(C)
        L = np.linalg.cholesky(C) if q.whiten else np.eye(M)
        if b.is_prior:
            S = C
        else:
            sqrt = np.diag(b.sqrt) if b.is_diagonal else b.sqrt
            S = L @ sqrt @ sqrt.T @ L.T
        m = L @ b.mu
        terms.append((A @ m, A @ S @ A.T, helpers.dense_kl(m, S, C)))
    return terms, J


def assert_moments(got, mean, covariance, kl):
    assert_allclose(got[0], mean, rtol=1e-9, atol=1e-11)
    # A small variance is a difference of numbers near one.
    assert_allclose(got[1], np.diag(covariance), rtol=1e-9, atol=1e-11)
    assert_allclose(got[2], covariance, rtol=1e-9, atol=1e-11)
    assert_allclose(got[3], kl, rtol=1e-9)


@pytest.mark.quick(3)
@cases
@given(seed=seeds)
def test_moments_and_kl_are_those_of_algorithm_1(case, whiten, seed):
    X, sets, q = problem(case, whiten, seed)
    terms, residual = algorithm_1(X, sets, q)
    got = moments(X, sets, q)
    means, covariances, kls = zip(*terms, strict=True)
    prior_mean = X @ WEIGHTS + 0.3
    whole = (prior_mean + sum(means), residual + sum(covariances), sum(kls))
    assert_moments(got["all"], *whole)
    assert_moments(got["parallel"], prior_mean + means[0], covariances[0], kls[0])
    later = (sum(means[1:]) + np.zeros(N), sum(covariances[1:]) + residual, sum(kls[1:]))
    assert_moments(got["orthogonal"], *later)
    # The floor under the variance is for rounding errors; here it does nothing.
    assert got["all"][1].min() > 1e-6


# ---- draws --------------------------------------------------------------------------


def assert_covariance(draws, covariance):
    """Within five standard errors."""
    S = len(draws)
    variance = np.diag(covariance)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / S)
    assert (np.abs(np.cov(draws.T) - covariance) < 5 * error + 1e-12).all()


def test_draws_have_the_joint_moments():
    # 54 numbers, each within five standard errors: these fail for one key in 3e4.
    X, sets, q = problem("ODVGP of three sets", True, 0)
    prior = GaussianProcess(RBF(VARIANCE, LENGTHSCALE), X, Linear(WEIGHTS, 0.3))
    posterior = SparsePosterior(prior, sets, q, JITTER)
    terms, residual = algorithm_1(X, sets, q)
    S, parametric = 20_000, sum(covariance for _, covariance, _ in terms)
    mean = X @ WEIGHTS + 0.3 + sum(mean for mean, _, _ in terms)

    sample = jax.jit(lambda posterior, key: posterior.sample(key, (S,)))
    draws = np.asarray(sample(posterior, jax.random.key(0)))
    covariance = parametric + residual
    assert (np.abs(draws.mean(0) - mean) < 5 * np.sqrt(np.diag(covariance) / S)).all()
    assert_covariance(draws, covariance)

    sample = jax.jit(lambda posterior, key: posterior.sample_parametric(key, (S,)))
    draws = np.asarray(sample(posterior, jax.random.key(1)))
    assert (np.abs(draws.mean(0) - mean) < 5 * np.sqrt(np.diag(parametric) / S)).all()
    assert_covariance(draws, parametric)


def test_draws_of_the_parts_have_their_moments():
    # 54 numbers, as above: these fail for one key in 3e4.
    X, sets, q = problem("SOLVE-GP", True, 0)
    prior = GaussianProcess(RBF(VARIANCE, LENGTHSCALE), X, Linear(WEIGHTS, 0.3))
    posterior = SparsePosterior(prior, sets, q, JITTER)
    (first, second), residual = algorithm_1(X, sets, q)
    sample = jax.jit(lambda posterior, key: posterior.sample(key, (20_000,)))
    for part, mean, covariance in [
        (posterior.parallel(), X @ WEIGHTS + 0.3 + first[0], first[1]),
        (posterior.orthogonal(), second[0], second[1] + residual),
    ]:
        draws = np.asarray(sample(part, jax.random.key(0)))
        error = np.sqrt(np.diag(covariance) / 20_000)
        assert (np.abs(draws.mean(0) - mean) < 5 * error).all()
        assert_covariance(draws, covariance)


# ---- batches ------------------------------------------------------------------------

VARIANCES, LENGTHSCALES = np.array([1.3, 0.4, 2.0]), np.array([0.7, 1.1, 0.5])


@pytest.mark.parametrize(
    ("separate", "batch_kernel", "whiten"),
    [
        (True, True, False),
        (False, True, True),
        pytest.param(True, False, True, marks=pytest.mark.slow),
        pytest.param(False, False, False, marks=pytest.mark.slow),
    ],
)
def test_each_function_of_a_batch_is_as_if_alone(separate, batch_kernel, whiten):
    rng = np.random.default_rng(0)
    X, _, _ = problem("SOLVE-GP", True, 0)
    Q = (3,)
    rows = [np.split(points(rng, 7), [4]) for _ in range(3)]
    Z, O = (np.stack(sets) for sets in zip(*rows, strict=True))
    sets = (Z, O) if separate else (Z[0], O[0])
    q = BlockGaussian((block(rng, "full", 4, Q), block(rng, "diagonal", 3, Q)), whiten)
    kernel = RBF(VARIANCES, LENGTHSCALES) if batch_kernel else RBF(1.3, 0.7)

    def everything(kernel, sets, q, batch):
        prior = GaussianProcess(kernel, X, 0.3).expand(batch)
        p = SparsePosterior(prior, sets, q, JITTER)
        return p.mean, p.variance, p.covariance_matrix, p.prior_kl()

    together = jax.jit(everything, static_argnums=3)(kernel, sets, q, Q)
    assert [x.shape for x in together] == [(3, N), (3, N), (3, N, N), (3,)]
    alone = jax.jit(everything, static_argnums=3)
    for i in range(3):
        own = alone(
            RBF(VARIANCES[i], LENGTHSCALES[i]) if batch_kernel else kernel,
            (Z[i], O[i]) if separate else sets,
            jax.tree.map(lambda x, i=i: x[i], q),
            (),
        )
        for got, expected in zip(together, own, strict=True):
            assert_allclose(got[i], expected, rtol=1e-9, atol=1e-11)


def test_expanded_functions_are_drawn_independently():
    X, sets, q = problem("SOLVE-GP", True, 0)
    prior = GaussianProcess(RBF(VARIANCE, LENGTHSCALE), X)
    posterior = SparsePosterior(prior, sets, q).expand((2,))
    assert posterior.batch_shape == posterior.prior.batch_shape == (2,)
    assert posterior.mean.shape == (2, N) and posterior.prior_kl().shape == (2,)
    sample = jax.jit(lambda p, key: [p.sample(key, (3,)), p.sample_parametric(key, (3,))])
    for draws in sample(posterior, jax.random.key(0)):
        assert draws.shape == (3, 2, N)
        assert len(np.unique(np.asarray(draws).round(6))) == 6 * N


# ---- edges --------------------------------------------------------------------------


def test_orthogonal_points_on_top_of_inducing_points_stay_finite():
    X, (Z, O), q = problem("SOLVE-GP", False, 0)
    O = np.concatenate([Z[:2], O[:1]])

    def total(sets):
        prior = GaussianProcess(RBF(VARIANCE, LENGTHSCALE), X)
        p = SparsePosterior(prior, sets, q)
        return jnp.sum(p.mean) + jnp.sum(jnp.sqrt(p.variance)) + p.prior_kl()

    value, gradient = jax.jit(jax.value_and_grad(total))((Z, O))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_a_q_that_knows_the_values_exactly_keeps_positive_variances():
    X, _, _ = problem("SVGP", True, 0)
    q = BlockGaussian((Block(np.zeros(N), np.full(N, 1e-12)),))
    prior = GaussianProcess(RBF(VARIANCE, LENGTHSCALE), X)
    posterior = SparsePosterior(prior, (X,), q, jitter=0.0)
    assert (posterior.variance >= np.finfo(float).eps * VARIANCE).all()
    assert (posterior.variance < 1e-14).all()


def test_numpyros_kl_divergence_finds_the_kl():
    X, sets, q = problem("SOLVE-GP", True, 0)
    prior = GaussianProcess(RBF(VARIANCE, LENGTHSCALE), X)
    posterior = SparsePosterior(prior, sets, q, JITTER)
    (*_, first), (*_, second) = algorithm_1(X, sets, q)[0]
    assert_allclose(kl_divergence(posterior, prior), first + second, rtol=1e-9)
    pair = (d.expand((2,)).to_event(1) for d in (posterior, prior))
    assert_allclose(kl_divergence(*pair), 2 * (first + second), rtol=1e-9)


@pytest.mark.slow
def test_log_prob_is_the_joint_density_and_refuses_to_be_trained_on():
    X, sets, q = problem("SVGP", True, 0)
    prior = GaussianProcess(RBF(), X)
    posterior = SparsePosterior(prior, sets, q, 1e-6)
    f = jnp.linspace(-1.0, 1.0, N)
    covariance = posterior.covariance_matrix + 1e-6 * jnp.eye(N)
    dense = jax.scipy.stats.multivariate_normal.logpdf(f, posterior.mean, covariance)
    assert_allclose(posterior.log_prob(f), dense, rtol=1e-6)
    with pytest.raises(TypeError, match="TraceGP_ELBO"):
        jax.jit(jax.grad(lambda f: posterior.log_prob(f).sum()))(f)


def test_sets_and_blocks_must_have_the_same_sizes():
    X, sets, q = problem("SOLVE-GP", True, 0)
    prior = GaussianProcess(RBF(), X)
    with pytest.raises(ValueError, match=r"\(3, 4\) inducing points.*\(4, 3\)"):
        SparsePosterior(prior, sets[::-1], q)


def test_float32_stays_float32():
    X, sets, q = problem("SOLVE-GP", False, 0)
    narrow = jax.tree.map(lambda x: np.asarray(x, np.float32), (X, sets, q))
    got = moments(*narrow)["all"]
    assert {x.dtype for x in got} == {jnp.dtype("float32")}

    def draws(X, sets, q):
        prior = GaussianProcess(RBF(VARIANCE, LENGTHSCALE), X)
        p = SparsePosterior(prior, sets, q)
        return p.sample(jax.random.key(0)), p.sample_parametric(jax.random.key(0))

    for draw in jax.eval_shape(draws, *narrow):
        assert draw.dtype == jnp.float32
    for x, expected in zip(got, moments(X, sets, q)["all"], strict=True):
        # Rounding is 6e-8 and the condition number some tens.
        assert_allclose(x, expected, rtol=1e-4, atol=1e-5)


def test_a_posterior_tells_what_it_is_made_of():
    X = jnp.linspace(0.0, 1.0, 9)[:, None]
    q = BlockGaussian((Block(jnp.zeros((2, 3)), None), Block(jnp.zeros((2, 2)), None)))
    prior = GaussianProcess(RBF() + RBF(), X).expand([2])
    posterior = SparsePosterior(prior, (X[:3], X[3:5]), q)
    assert repr(posterior) == (
        "<SparsePosterior with batch shape (2,) and event shape (9,): 3 + 2 inducing "
        "points, kernel Sum, q(u) BlockGaussian>"
    )

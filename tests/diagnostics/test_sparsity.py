"""What inducing points lose, and the bracket of the evidence: against dense algebra."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from scipy.spatial.distance import cdist
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp
from examples.low_rank import LowRank
from numpyro_sgp.datasets import snelson
from numpyro_sgp.diagnostics import sparsity
from numpyro_sgp.diagnostics.evidence import bracket_of, evidence_bracket
from numpyro_sgp.diagnostics.moved_bound import MovedBound
from numpyro_sgp.diagnostics.orthogonal_points import add_points
from numpyro_sgp.diagnostics.sparsity import SparsityCurve, curve_of, sparsity_curve
from tests.helpers import gaussian_model, slow

N, M, D = 24, 4, 2
JITTER = 1e-8


# ---- regression, all numbers of which are parameters: one program for every problem ----


def regression(X, y=None):
    X = numpyro.param("X", X)
    y = numpyro.param("responses", y)
    kernel = numpyro.param("kernel", jnp.ones(4))
    noise = numpyro.param("noise", 0.3 * jnp.ones(len(X)))
    offset = numpyro.param("offset", jnp.zeros(()))
    smooth = sgp.kernels.RBF(kernel[0], kernel[1])
    rough = sgp.kernels.Matern32(kernel[2], kernel[3])
    f = numpyro.sample("f", sgp.GaussianProcess(smooth + rough, X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f + offset, noise), obs=y)


def compiled(num_rows, num_inducing, dim):
    """Its bound, compiled when first used."""
    X = jnp.asarray(np.random.default_rng(0).normal(size=(num_rows, dim)))
    guide = sgp.AutoSparseGP(regression, sgp.SVGP(num_inducing))
    args = X, X[:, 0]
    bound = MovedBound(guide, sgp.TraceGP_ELBO(sgp.GaussHermite(3)), args, {})
    svi = SVI(regression, guide, optax.sgd(0.0), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *args))
    assert not bound.why_unknown(params, N * 100)
    return bound


@pytest.fixture(scope="module")
def small():
    return compiled(N, M, D)


class Problem:
    """One regression, and its dense algebra."""

    def __init__(self, X, y, Z, kernel, noise, offset=0.0):
        self.X, self.Z, self.kernel, self.offset = X, Z, kernel, offset
        self.y, self.noise = y, np.broadcast_to(noise, y.shape)
        Kuu = self.K(Z, Z) + JITTER * self.K(Z[:1], Z[:1]) * np.eye(len(Z))
        self.A = np.linalg.solve(np.linalg.cholesky(Kuu), self.K(Z, X))
        self.left = np.diag(self.K(X, X)) - np.sum(self.A**2, axis=0)
        self.evidence = self._log_normal(self.K(X, X))
        self.best_bound = self._log_normal(self.A.T @ self.A)
        self.best_bound -= 0.5 * np.sum(self.left / self.noise**2)
        self.S = np.linalg.inv(np.eye(len(Z)) + self.A / self.noise**2 @ self.A.T)
        self.m = self.S @ self.A @ ((y - offset) / self.noise**2)

    @classmethod
    def random(cls, seed, noisy_rows=True):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(N, D))
        kernel = np.exp(rng.normal([0, 0, -2, 0], [0.7, 0.7, 2.0, 0.7]))
        sds = np.exp(rng.normal(-1.0, 0.7)) * np.exp(0.5 * rng.normal(size=N) * noisy_rows)
        y = np.sin(rng.normal() * 2 * X[:, 0]) + rng.normal(size=N) * sds + rng.normal()
        Z = X[:M] if rng.uniform() < 0.5 else rng.normal(size=(M, D))
        return cls(X, y, Z, kernel, sds, rng.normal())

    def K(self, X1, X2):
        v1, l1, v2, l2 = self.kernel
        r, z = cdist(X1, X2) / l1, np.sqrt(3.0) * cdist(X1, X2) / l2
        return v1 * np.exp(-0.5 * r**2) + v2 * (1 + z) * np.exp(-z)

    def _log_normal(self, Q):
        C = Q + np.diag(self.noise**2)
        return multivariate_normal(np.full(len(C), self.offset), C).logpdf(self.y)

    def bound(self, m, S):
        """The ELBO by its formula."""
        mean = self.A.T @ m + self.offset
        variance = self.left + np.sum(self.A * (S @ self.A), axis=0)
        fit = np.sum(
            -0.5 * np.log(2 * np.pi * self.noise**2)
            - 0.5 * ((self.y - mean) ** 2 + variance) / self.noise**2
        )
        kl = np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1]
        return fit - 0.5 * kl

    def params(self, m, S):
        given = {
            "X": self.X,
            "responses": self.y,
            "kernel": self.kernel,
            "noise": self.noise,
            "offset": self.offset,
            "f_auto_Z": self.Z,
            "f_auto_qu_mu": m,
            "f_auto_qu_sqrt": np.linalg.cholesky(S),
        }
        return {name: jnp.asarray(value) for name, value in given.items()}


@given(seed=st.integers(0, 2**32 - 1), at_optimum=st.booleans())
@settings(max_examples=40)
def test_no_more_is_said_to_be_lost_than_is_lost(small, seed, at_optimum):
    problem = Problem.random(seed)
    m, S = problem.m, problem.S
    if not at_optimum:
        rng = np.random.default_rng(seed)
        P = np.linalg.cholesky(S) @ (np.eye(M) + 0.3 * np.tril(rng.normal(size=(M, M))))
        m, S = m + rng.normal() * P @ rng.normal(size=M), P @ P.T
    bound = problem.bound(m, S)
    assert bound <= problem.best_bound + 1e-6
    left = problem.best_bound - bound
    curve = curve_of(small, problem.params(m, S), left=left)
    size = 1e-9 * abs(problem.evidence) + 1e-7
    assert curve.lost <= problem.evidence - problem.best_bound + size
    assert all(g <= problem.evidence - bound + size for g in curve.gained)
    assert list(curve.gained) == sorted(curve.gained)


@pytest.mark.slow
def test_most_of_what_is_lost_is_seen():
    bound = compiled(200, 6, 1)
    rng = np.random.default_rng(3)
    data = snelson()
    problems = [
        Problem(np.array(data.X), np.array(data.y), Z, (0.8, 0.6, 1e-6, 1.0), 0.28)
        for Z in [np.linspace(0.3, 5.7, 6)[:, None]]
    ]
    for lengthscale, noise in ((0.4, 0.2), (0.7, 0.1), (1.0, 0.05), (0.5, 1.0), (1.2, 0.3)):
        X = rng.uniform(-3, 3, size=(200, 1))
        y = np.sin(2 * X[:, 0]) + noise * rng.normal(size=200)
        Z = np.linspace(-2.7, 2.7, 6)[:, None]
        problems.append(Problem(X, y, Z, (1.0, lengthscale, 0.01, 0.5), noise))
    for problem in problems:
        loss = problem.evidence - problem.best_bound
        assert loss > 1.0
        curve = curve_of(bound, problem.params(problem.m, problem.S))
        assert 0.5 * loss <= curve.lost <= loss
        assert curve.added[0] == 8 and len(curve.added) > 1
        gains = np.array([0.0, *curve.gained])
        per_point = np.diff(gains) / np.diff([0, *curve.added])
        if curve.needed is None:
            assert np.all(per_point >= 0.1)
        else:
            at = [0, *curve.added].index(curve.needed - 6)
            assert np.all(per_point[:at] >= 0.1) and np.all(per_point[at : at + 1] < 0.1)


def check_brackets(bound, seeds):
    widths = []
    for seed in seeds:
        problem = Problem.random(seed, noisy_rows=seed % 2 == 0)
        lower, upper, unknown, _ = bracket_of(
            bound, problem.params(0.5 * problem.m, problem.S)
        )
        assert not unknown
        size = 1e-9 * abs(problem.evidence) + 1e-7
        assert problem.best_bound - size <= lower <= problem.evidence + size
        assert problem.evidence - size <= upper
        widths.append(upper - lower)
    return np.array(widths)


def test_the_evidence_is_in_its_bracket(small):
    assert np.median(check_brackets(small, range(100))) < 1.0


@pytest.mark.slow
def test_the_evidence_is_in_its_bracket_in_a_thousand_problems(small):
    assert np.median(check_brackets(small, range(100, 1100))) < 1.0


# ---- other likelihoods -----------------------------------------------------------------

rng = np.random.default_rng(0)
X = jnp.asarray(np.sort(rng.uniform(-2, 2, size=(30, 1)), axis=0))
Z = jnp.asarray([[-1.5], [-0.4], [0.5], [1.6]])
wave = np.sin(4 * X[:, 0])
y = jnp.asarray(wave + 0.3 * rng.normal(size=30))
counts = jnp.asarray(rng.poisson(np.exp(1.5 * wave)))
signs = jnp.asarray(1 * (rng.uniform(size=30) < 1 / (1 + np.exp(-4 * wave))))
OPTIONS = {"inducing": Z, "train_inducing": False}


def model(X, y=None, kind="normal"):
    lengthscale = 0.4
    if kind == "drawn":
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.2))
    prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X)
    if kind == "site":
        f = numpyro.sample("f", prior.expand([2])).sum(0)
    elif kind == "sites":
        rough = sgp.GaussianProcess(sgp.kernels.RBF(0.5, 0.2), X)
        f = numpyro.sample("f", prior) + numpyro.sample("g", rough)
    else:
        f = numpyro.sample("f", prior)
    with numpyro.plate("data", X.shape[0]):
        if kind == "poisson":
            fn = dist.Poisson(jnp.exp(f))
        elif kind == "bernoulli":
            fn = dist.Bernoulli(logits=3.0 * f)
        elif kind == "student":
            fn = dist.StudentT(2.5, f, 0.1)
        else:
            fn = dist.Normal(f, 0.3)
        numpyro.sample("y", fn, obs=y)


def trained(approximation, y, steps=60, loss=None, **kwargs):
    """A guide and parameters after some steps of natural gradients, or of Adam."""
    base = {"drawn": {"base_guide": AutoNormal}}.get(kwargs.get("kind"), {})
    guide = sgp.AutoSparseGP(model, approximation, **base)
    loss = sgp.TraceGP_ELBO() if loss is None else loss
    optimiser = optax.adam(0.05)
    if approximation.family.takes_natural_steps(["qu_mu", "qu_sqrt", "qu_precision"]):
        optimiser = sgp.natural_gradients(guide, 0.5, optimiser)
    svi = SVI(model, guide, optimiser, loss)
    run = partial(svi.run, jax.random.key(0), steps, X, y, progress_bar=False)
    result = run(**kwargs)
    evaluate = jax.jit(partial(svi.evaluate, **kwargs))
    return guide, result.params, -float(evaluate(result.state, X, y))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poisson", slow("bernoulli"), slow("student")])
def test_the_gain_is_that_of_solve_gp_and_less_than_that_of_all_points(kind):
    values = {"poisson": counts, "bernoulli": signs, "student": y}[kind]
    guide, params, now = trained(sgp.SVGP(M, **OPTIONS), values, kind=kind)
    bound = MovedBound(guide, sgp.TraceGP_ELBO(), (X, values), {"kind": kind})
    assert not bound.why_unknown(params, 1000)
    found = add_points(bound, params, jax.random.key(0), max_points=5)
    ((order,), (P,), gains) = found.orders.values(), found.q.P.values(), found.gains
    solve = sgp.AutoSparseGP(model, sgp.SOLVEGP(M, 5, orthogonal=X[order[:, 0]], **OPTIONS))
    both = {
        **params,
        "f_auto_qv_mu": jnp.asarray(found.q.mean("f")[0]),
        "f_auto_qv_sqrt": jnp.linalg.cholesky(jnp.linalg.inv(P[0])),
    }

    def loss(m):
        where = {**both, "f_auto_qv_mu": m}, model, solve, X, values
        return sgp.TraceGP_ELBO().loss(jax.random.key(0), *where, kind=kind)

    built, slope = jax.jit(jax.value_and_grad(loss))(both["f_auto_qv_mu"])
    assert gains[-1, 0] > 1.0
    assert_allclose(gains[-1, 0], -built - now, rtol=1e-6)
    # What a further step would gain.
    assert 0.5 * slope @ np.linalg.solve(P[0], slope) < 2e-3
    curve = sparsity_curve(guide, params, X, values, kind=kind)
    *_, all_points = trained(
        sgp.SVGP(30, inducing=X, train_inducing=False), values, 150, kind=kind
    )
    assert 0.5 * (all_points - now) < curve.lost < all_points - now
    assert "not Gaussian" in evidence_bracket(guide, params, X, values, kind=kind).unknown


CASES = {
    "unwhitened": (sgp.SVGP(M, whiten=False, **OPTIONS), "normal"),
    "diagonal": (sgp.SVGP(M, covariance="diagonal", **OPTIONS), "normal"),
    "sites": (sgp.SVGP(M, covariance="pseudo_data", **OPTIONS), "normal"),
    "dual": (sgp.SVGP(M, covariance="dual", **OPTIONS), "normal"),
    "low rank": (sgp.SVGP(M, covariance=LowRank(2), **OPTIONS), "normal"),
    "SOLVE-GP": (sgp.SOLVEGP(M, 2, orthogonal=X[3:5], **OPTIONS), "normal"),
    "ODVGP": (sgp.ODVGP(M, 2, orthogonal=X[3:5], **OPTIONS), "normal"),
    "mixture": (sgp.MixtureSVGP(M, 2, **OPTIONS), "normal"),
    "two functions": (sgp.SVGP(M, **OPTIONS), "site"),
    "coupled": (sgp.SVGP(M, covariance="coupled", **OPTIONS), "site"),
    "two sites": (sgp.SVGP(M, **OPTIONS), "sites"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case",
    [name if name in ("SOLVE-GP", "two functions") else slow(name) for name in CASES],
)
def test_every_gaussian_posterior_takes_further_points(case):
    approximation, kind = CASES[case]
    guide, params, now = trained(approximation, y, kind=kind)
    bound = MovedBound(guide, sgp.TraceGP_ELBO(), (X, y), {"kind": kind})
    assert not bound.why_unknown(params, 1000)
    # Where nothing is moved it is the bound, coupled or not.
    key = jax.random.key(0)
    assert_allclose(bound.look(key, params, bound.no_shift())[0], now, rtol=1e-9)
    curve = curve_of(bound, params)
    K = {"site": 2.0, "sites": 1.0}.get(kind, 1.0) * rbf(1.0, 0.4)
    if kind == "sites":
        K = K + rbf(0.5, 0.2)
    evidence = multivariate_normal(np.zeros(30), K + 0.09 * np.eye(30)).logpdf(y)
    assert 1.0 < curve.lost <= evidence - now
    # q(u) and q(v), and those of several functions, stay independent.
    assert curve.gained[-1] > 0.4 * (evidence - now)


def rbf(variance, lengthscale):
    return variance * np.exp(-0.5 * cdist(X, X, "sqeuclidean") / lengthscale**2)


@pytest.mark.slow
def test_inducing_variables_of_other_domains_take_further_points():
    waves = [[0.5, 0.0], [1.5, 0.0], [1.5, 1.6], [3.0, 0.0], [3.0, 1.6]]
    approximation = sgp.SVGP(
        inducing=sgp.FourierFeatures(jnp.array(waves), 1.2), train_inducing=False
    )
    guide, params, now = trained(approximation, y)
    evidence = multivariate_normal(np.zeros(30), rbf(1.0, 0.4) + 0.09 * np.eye(30))
    evidence = evidence.logpdf(y)
    curve = sparsity_curve(guide, params, X, y)
    assert 1.0 < 0.5 * (evidence - now) < curve.lost <= evidence - now
    lower, upper, *_ = evidence_bracket(guide, params, X, y)
    assert lower <= evidence <= upper


@pytest.mark.slow
@pytest.mark.parametrize("tight", ["diagonal", "scalar"])
def test_the_gain_of_a_tight_bound_is_that_of_a_tight_solve_gp(tight):
    options = {**OPTIONS, "tight": tight}
    guide, params, now = trained(sgp.SVGP(M, **options), y)
    bound = MovedBound(guide, sgp.TraceGP_ELBO(), (X, y), {})
    assert not bound.why_unknown(params, 1000)
    found = add_points(bound, params, jax.random.key(0), max_points=5)
    order, P = found.orders["f"], found.q.P["f"]
    solve = sgp.AutoSparseGP(model, sgp.SOLVEGP(M, 5, orthogonal=X[order[:, 0]], **options))
    both = {
        **params,
        "f_auto_qv_mu": jnp.asarray(found.q.mean("f")[0]),
        "f_auto_qv_sqrt": jnp.linalg.cholesky(jnp.linalg.inv(P[0])),
    }
    loss = sgp.TraceGP_ELBO()
    bound_at = jax.jit(lambda p: -loss.loss(jax.random.key(0), p, model, solve, X, y))
    built = float(bound_at(both))
    assert found.gains[-1, 0] > 1.0
    assert_allclose(found.gains[-1, 0], built - now, rtol=1e-6)
    evidence = multivariate_normal(np.zeros(30), rbf(1.0, 0.4) + 0.09 * np.eye(30))
    evidence = evidence.logpdf(y)
    lower, upper, *_ = evidence_bracket(guide, params, X, y)
    assert now <= lower <= evidence <= upper


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "drawn"])
def test_random_bounds_are_scored_with_other_keys(kind):
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(10) if kind == "normal" else None)
    guide, params, _ = trained(sgp.SVGP(M, **OPTIONS), y, kind=kind)
    curve = sparsity_curve(guide, params, X, y, loss=loss, kind=kind)
    assert min(curve.se) > 0.0 and "±" in str(curve)
    if kind == "normal":
        known = sparsity_curve(guide, params, X, y, kind=kind)
        assert set(known.se) == {0.0}
        gap = curve.gained[-1] - known.gained[-1]
        assert abs(gap) < 4 * curve.se[-1] + 0.02 * known.gained[-1]
    else:
        # One draw at a time, with kernels and rows of its own, is the same on average.
        assert curve.gained[-1] > 1.0
        bracket = evidence_bracket(guide, params, X, y, kind=kind)
        assert bracket.unknown == "hyperparameters are drawn by the guide"


@pytest.mark.slow
def test_float32_tells_the_same():
    guide, params, _ = trained(sgp.SVGP(M, **OPTIONS), y)
    known = sparsity_curve(guide, params, X, y)
    lower, upper, *_ = evidence_bracket(guide, params, X, y)
    with jax.enable_x64(False):
        guide = sgp.AutoSparseGP(model, sgp.SVGP(M, **{**OPTIONS, "inducing": np.array(Z)}))
        args = jnp.asarray(X, "float32"), jnp.asarray(y, "float32")
        guide.setup(*args)
        params = {k: jnp.asarray(np.array(v), "float32") for k, v in params.items()}
        single = sparsity_curve(guide, params, *args)
        bracket = evidence_bracket(guide, params, *args)
    assert_allclose(single.lost, known.lost, rtol=1e-3)
    assert_allclose(bracket[:2], (lower, upper), atol=0.05)


@pytest.mark.slow
def test_priors_of_points_are_no_part_of_the_evidence():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(M, **OPTIONS), base_guide=AutoDelta)
    guide.setup(X, y, kind="drawn")
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y, kind="drawn"))
    params["lengthscale_auto_loc"] = jnp.asarray(0.4)
    lower, upper, *_ = evidence_bracket(guide, params, X, y, kind="drawn")
    C = rbf(1.0, 0.4) + 0.09 * np.eye(30)
    evidence = multivariate_normal(np.zeros(30), C).logpdf(y)
    assert lower <= evidence <= upper < lower + 1.0


def test_functions_of_their_own_and_masked_rows_are_in_the_bracket():
    seen = np.arange(30) % 5 != 0
    noise = np.array([[0.2], [0.5]])
    Y = np.stack([wave, np.cos(2 * X[:, 0])])

    def two(X, Y=None):
        kernel = sgp.kernels.RBF(jnp.array([1.0, 0.5]), jnp.array([0.4, 0.8]))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, lambda X: X[..., 0]))
        with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(f.T, noise.T).to_event(1), obs=Y.T)

    guide = sgp.AutoSparseGP(two, sgp.SVGP(M, **OPTIONS))
    svi = SVI(two, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    lower, upper, unknown, _ = evidence_bracket(guide, params, X, Y)
    assert not unknown
    evidence = 0.0
    for y_q, s, K in zip(Y, noise, (rbf(1.0, 0.4), rbf(0.5, 0.8)), strict=True):
        C = (K + s**2 * np.eye(30))[np.ix_(seen, seen)]
        evidence += multivariate_normal(np.array(X)[seen, 0], C).logpdf(y_q[seen])
    assert lower <= evidence <= upper < lower + 2.0


@pytest.mark.slow
def test_more_patches_than_rows_may_lose_all_the_same():
    """Points that are added are rows, of which there are twelve, not twelve minus 18."""
    rng = np.random.default_rng(0)
    images, y = rng.normal(size=(12, 12)), rng.normal(size=12)
    base = sgp.kernels.RBF(2.0, 0.8)
    kernel = 10.0 * sgp.kernels.Convolutional(base, (4, 3), 2)

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    patches = sgp.SVGP(18, sgp.InducingPatches("kmeans"))
    guide = sgp.AutoSparseGP(model, patches)
    step = sgp.natural_gradients(guide, 1.0, optax.sgd(0.0))
    svi = SVI(model, guide, step, sgp.TraceGP_ELBO())
    params = svi.run(jax.random.key(0), 1, images, y, progress_bar=False).params
    key, run = jax.random.key(0), (model, guide, images, y)
    bound = -float(sgp.TraceGP_ELBO().loss(key, params, *run))
    # By hand: patches of all images, the mean of the base kernel over pairs of them.
    rows = images.reshape(12, 4, 3)
    parts = [rows[:, i : i + 2, j : j + 2] for i in range(3) for j in range(2)]
    flat = np.stack(parts, axis=1).reshape(-1, 4)
    pairs = 2.0 * np.exp(-0.5 * cdist(flat, flat, "sqeuclidean") / 0.8**2)
    K = 10.0 * pairs.reshape(12, 6, 12, 6).mean(axis=(1, 3))
    evidence = multivariate_normal(np.zeros(12), K + 0.25 * np.eye(12)).logpdf(y)
    found = evidence_bracket(guide, params, images, y)
    assert found.lower - 1e-6 <= evidence <= found.upper + 1e-6 < found.lower + 1e-3
    assert evidence - bound > 0.5
    assert_allclose(found.gain, evidence - bound, rtol=1e-3)
    curve = sparsity_curve(guide, params, images, y)
    assert 0.05 < curve.lost <= evidence - bound


# ---- what is refused, and what it says ---------------------------------------------------


@pytest.mark.slow
def test_with_points_at_all_rows_nothing_is_lost():
    guide, params, _ = trained(sgp.VGP(), y, 1)
    curve = sparsity_curve(guide, params, X, y)
    assert (curve.lost, curve.needed, curve.added) == (0.0, 30, ())
    assert str(curve) == "30 inducing points lose nothing that can be seen"
    guide, params, _ = trained(sgp.SVGP(30, inducing=X, train_inducing=False), y)
    assert sparsity_curve(guide, params, X, y).lost < 1e-3


@pytest.mark.slow
def test_what_is_not_known_has_a_reason(monkeypatch):
    def deep(X, y=None):
        inner = numpyro.sample("inner", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        model(inner[:, None], y)

    def scaled(X, y=None):
        with numpyro.handlers.scale(scale=0.1):
            model(X, y)

    def tied(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(f[0] * f[1], 0.3), obs=y[0])

    for program, approximation, reason in (
        (deep, sgp.SVGP(3), "feed others"),
        (scaled, sgp.SVGP(3), "scaled"),
        (tied, sgp.SVGP(3), "tie"),
        (model, sgp.InverseFreeSVGP(3), "InverseFreeSVGP"),
        (model, sgp.SVGP(3, tight="block"), "tight by Blocks"),
        (model, sgp.ODVGP(3, 2, tight="diagonal"), "tight, of a mixture or ODVGP"),
        (model, sgp.SVGP(3), "30 rows, more than 29"),
    ):
        guide = sgp.AutoSparseGP(program, approximation)
        svi = SVI(program, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        params = svi.get_params(svi.init(jax.random.key(0), X, y))
        if "rows" in reason:
            monkeypatch.setattr(sparsity, "MAX_ROWS", 29)
        curve = sparsity_curve(guide, params, X, y)
        assert np.isnan(curve.lost) and reason in curve.unknown
        assert reason in str(curve)


def test_errors():
    guide = sgp.AutoSparseGP(gaussian_model, sgp.SVGP(M))
    svi = SVI(gaussian_model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    with pytest.raises(
        ValueError, match=r"max_points must be a whole number, 1 or more, got 0"
    ):
        sparsity_curve(guide, params, X, y, max_points=0)
    with pytest.raises(ValueError, match=r"minibatch of plate 'data'"):
        sparsity_curve(guide, params, X, y, batch_size=5)
    for function in (sparsity_curve, evidence_bracket):
        with pytest.raises(ValueError, match=r"params lack \['f_auto_qu_mu'"):
            function(guide, {}, X, y)
        with pytest.raises(TypeError, match="needs an AutoSparseGP .* got AutoNormal"):
            function(AutoNormal(model), {}, X, y)


def test_it_says_what_it_found():
    curve = SparsityCurve(64, (8, 16), (2.6, 3.1), (0.0, 0.0), 3.1, 72, 0.0)
    assert repr(curve) == (
        "<SparsityCurve: 64 inducing points lose at least 3.1 nats at these "
        "hyperparameters, which would move with more of them; 8 more gain 2.6, 16 more "
        "gain 3.1; from about 72 on a further one gains less than 0.1>"
    )
    curve = SparsityCurve(64, (8,), (3.1,), (0.2,), 3.1, None, 0.0)
    assert "at least 3.1 nats (± 0.2) at these" in str(curve)

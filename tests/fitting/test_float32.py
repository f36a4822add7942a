"""What verdicts tell of fits in float32: the same bound in float64, and nothing moved."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_array_equal
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics.bound import bound_of
from numpyro_sgp.fitting.check import _of_q, problem_at
from numpyro_sgp.fitting.float32 import _told, begin_float32
from numpyro_sgp.fitting.problem import Problem
from numpyro_sgp.fitting.rounds import descent_of
from numpyro_sgp.fitting.verdict import Cause

NOISE = 1e-3
X = np.linspace(0.0, 3.0, 40)[:, None].astype(np.float32)
Y = (np.sin(2.0 * X[:, 0]) + NOISE * np.cos(50.0 * X[:, 0])).astype(np.float32)
Z = X[::5]


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def known(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def best_bound(Z, lengthscale, jitter=1e-8):
    """Of the best q(u), in dense float64 (Titsias 2009, eq. 9)."""

    def kernel(A, B):
        return np.exp(-0.5 * ((A - B.T) / lengthscale) ** 2)

    X, y, Z = (np.asarray(part, float) for part in (globals()["X"], Y, Z))
    L = np.linalg.cholesky(kernel(Z, Z) + jitter * np.eye(len(Z)))
    A = np.linalg.solve(L, kernel(Z, X)) / NOISE
    B = np.eye(len(Z)) + A @ A.T
    fit = y @ y / NOISE**2 - (A @ y) @ np.linalg.solve(B, A @ y) / NOISE**2
    log_det = np.linalg.slogdet(B)[1] + len(X) * np.log(2.0 * np.pi * NOISE**2)
    left = len(X) / NOISE**2 - np.sum(A**2)
    return -0.5 * (log_det + fit + left)


@pytest.fixture(scope="module")
def single():
    with jax.enable_x64(False):
        return sgp.fit(model, sgp.SVGP(6), (X, Y), progress_bar=False)


@pytest.fixture(scope="module")
def verdict(single):
    with jax.enable_x64(False):
        return single.check()


@pytest.mark.slow
def test_the_row_is_the_bound_of_float64_at_the_same_parameters(single, verdict):
    params = {name: np.asarray(value, float) for name, value in single.params.items()}
    ell = float(params["lengthscale_auto_loc"])
    here = best_bound(params["f_auto_Z"], ell) - single.bound
    here += -0.5 * np.log(ell) ** 2 - np.log(ell) - 0.5 * np.log(2.0 * np.pi)
    row = verdict.causes["float32"]
    assert here > 100.0 and row.nats > here - 0.1
    assert f"the bound is {here:.0f} nats higher at these parameters" in row.told
    assert "numpyro.enable_x64()" in row.mend and "SVGP(..., jitter=1e-6)" in row.mend


@pytest.mark.slow
def test_a_bound_that_rounding_moves_is_not_converged_without_a_word(single):
    assert "as far as float32 goes: rounding moves the bound by" in single.stopped
    assert "numpyro.enable_x64()" in single.stopped


@pytest.mark.slow
def test_a_bound_that_rounding_hardly_moves_is_converged():
    def noisy(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    with jax.enable_x64(False):
        fitted = sgp.fit(noisy, sgp.SVGP(5), (X, Y), progress_bar=False)
    assert fitted.stopped == "converged"


@pytest.mark.slow
@pytest.mark.slow
def test_what_more_iterations_gain_there_is_told_up_to_the_optimum(single, verdict):
    wide = sgp.fit(model, sgp.SVGP(6), (X.astype(float), Y), progress_bar=False)
    assert verdict.causes["float32"].nats < wide.bound - single.bound + 0.1


@pytest.mark.slow
def test_its_first_line_does_not_call_it_converged_without_a_word(verdict):
    assert verdict.summary.startswith("converged in float32 alone: ")
    assert "float32 costs at least" in verdict.summary
    assert verdict.attrs["float32_loses"] == verdict.causes["float32"].nats


@pytest.mark.slow
def test_it_leaves_the_guide_and_what_it_computes_as_they_were(single):
    def arrays(tree, path="", seen=None):
        """What arrays there are in an object, by where they are."""
        seen = {} if seen is None else seen
        if id(tree) in seen or callable(tree):
            return {}
        seen[id(tree)] = tree
        if isinstance(tree, np.ndarray | jax.Array):
            return {path: tree.dtype}
        parts = getattr(tree, "__dict__", {})
        if isinstance(tree, tuple | list):
            parts = dict(enumerate(tree))
        found = {}
        for name, part in (tree if isinstance(tree, dict) else parts).items():
            found |= arrays(part, f"{path}.{name}", seen)
        return found

    def kept():
        return arrays((vars(single.guide), vars(single.guide.base_guide), single.params))

    def computed():
        sites = single.predict(X[:7])
        q = single.guide.posterior(single.params, X)["f"]
        given = single.svi, single.params, single.args, single.kwargs
        bound = np.float32(bound_of(*given)[0])
        return sites["y"].mean, sites["y"].sd, q.covariance_matrix, bound

    with jax.enable_x64(False):
        before, dtypes, setup = computed(), kept(), single.guide.known()
        verdict = single.check()
        assert not jax.config.jax_enable_x64 and "float32" in verdict.causes
        assert single.guide.known() is setup
        assert kept() == dtypes and np.dtype("float32") in dtypes.values()
        assert np.dtype("float64") not in dtypes.values()
        for old, new in zip(before, computed(), strict=True):
            assert_array_equal(old, new)
            assert np.asarray(new).dtype == np.float32


@pytest.mark.slow
def test_points_and_kernels_that_are_known_numbers_are_of_64_bits_too():
    """They are of the set-up, which was in float32."""
    with jax.enable_x64(False):
        points = sgp.SVGP(inducing=Z, train_inducing=False)
        fitted = sgp.fit(known, points, (X, Y), progress_bar=False)
        row = fitted.check(X, Y).causes["float32"]
    here = best_bound(Z, 1.0) - fitted.bound
    assert here > 1.0 and abs(row.nats - here) < 0.01 * here
    assert "iterations" not in row.told  # there is nothing else to train


@pytest.mark.slow
@pytest.mark.parametrize("outside", [jnp.zeros(1, np.float32), np.zeros(1)])
def test_distributions_that_a_model_closes_over_are_of_64_bits_too(outside):
    with jax.enable_x64(False):
        prior = dist.LogNormal(outside, 1.0).to_event(1)

        def closed(X, y=None):
            scales = numpyro.sample("scales", prior)
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, scales), X))
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

        row = sgp.fit(closed, sgp.SVGP(4), (X, Y), progress_bar=False).check()
    assert np.isfinite(row.causes["float32"].nats)


@pytest.mark.slow
def test_a_jitter_of_its_own_is_not_told_to_be_smaller():
    with jax.enable_x64(False):
        points = sgp.SVGP(inducing=Z, train_inducing=False, jitter=1e-5)
        row = sgp.fit(known, points, (X, Y), progress_bar=False).check().causes["float32"]
    assert "jitter" not in row.mend


@pytest.mark.slow
def test_a_model_that_takes_32_bits_only_leaves_it_unknown():
    def narrow(X, y=None):
        if X.dtype != np.float32:
            raise TypeError("32 bits only.")
        return known(X, y)

    with jax.enable_x64(False):
        points = sgp.SVGP(inducing=Z, train_inducing=False)
        verdict = sgp.fit(narrow, points, (X, Y), progress_bar=False).check()
        assert not jax.config.jax_enable_x64
    row = verdict.causes["float32"]
    assert np.isnan(row.nats) and row.told == "unknown: TypeError: 32 bits only."
    assert not row.mend and verdict.summary.startswith("converged: ")
    assert "float32_loses" not in verdict.attrs


def test_there_is_no_row_of_random_bounds_of_many_rows_or_in_float64():
    random, plain = (SimpleNamespace(random=r, guide=None) for r in (True, False))
    assert begin_float32(plain, 10) is None
    with jax.enable_x64(False):
        assert begin_float32(random, 10) is None and begin_float32(plain, 0) is None
        assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.parametrize("left, nats", [(0.0, 8.0), (6.0, 3.0), (np.nan, 3.0)])
def test_what_iterations_gain_in_float32_too_is_not_counted(left, nats):
    guide = SimpleNamespace(approximations={})
    row = _told(3.0, 8.0, 50, Cause("other parameters", left), guide)
    assert row.nats == nats
    assert " 3 nats higher at these" in row.told and ", 8 after 50 more" in row.told


def close(X, y=None):
    def positive(name, location, sd):
        return numpyro.sample(name, dist.LogNormal(location, sd))

    kernel = sgp.kernels.RBF(positive("variance", 0.0, 1.0), positive("ls", -4.0, 1.5))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    noise = positive("noise", -3.0, 1.5)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
def test_a_fit_whose_slopes_are_rounded_goes_on_in_float64():
    """A dense q(f) of close rows stopped 1.9 nats short; the maximum is by SciPy."""
    rng = np.random.default_rng(3)
    X = np.sort(rng.uniform(0.0, 0.05, 150))[:, None] + 1.0
    y = np.sin(100.0 * X[:, 0]) + np.sqrt(1e-3) * rng.normal(size=150)
    priors = np.array([[0.0, 1.0], [-4.0, 1.5], [-3.0, 1.5]])

    def loss(logs):
        v, ls, s = logs
        K = np.exp(v - 0.5 * (X - X.T) ** 2 * np.exp(-2.0 * ls)) + np.exp(2 * s) * np.eye(
            150
        )
        L = np.linalg.cholesky(K)
        white = np.linalg.solve(L, y)
        z = (logs - priors[:, 0]) / priors[:, 1]
        density = -0.5 * z**2 - logs - np.log(priors[:, 1] * np.sqrt(2 * np.pi))
        log_det = 2.0 * np.log(np.diag(L)).sum() + 150 * np.log(2 * np.pi)
        return 0.5 * (white @ white + log_det) - density.sum()

    best = -minimize(loss, [-0.5, -4.2, -3.5], method="L-BFGS-B").fun
    with jax.enable_x64(False):
        fitted = sgp.fit(close, sgp.VGP(), (X, y), progress_bar=False)
        assert fitted.stopped.startswith("converged")
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(fitted.params))
    assert abs(fitted.bound - best) < 0.1  # the tolerance of fit


@pytest.mark.slow
def test_slopes_are_compared_with_differences_of_the_loss():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(6))
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.01), sgp.TraceGP_ELBO())
    problem = Problem(svi, svi.init(jax.random.key(0), X, Y), (X, Y), {})
    descent = descent_of(problem, jax.random.key(0))
    descent.start()
    index = descent.index(set(descent.free) - set(descent.profiled))
    steep = abs(descent.gradient[index]).max()
    right = descent.slope_error(index)
    assert right < 0.02 * steep
    descent.gradient = 2.0 * descent.gradient
    assert descent.slope_error(index) > 0.02 * steep


@pytest.mark.slow
def test_rounding_is_not_told_of_as_nats_for_q_or_as_its_family():
    """A Gaussian likelihood, whose q(u) is exact; slopes told of 12 nats, weights of 18."""
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(0.0, 10.0, 100)).astype(np.float32)
    y = (285.0 + np.sin(x) + rng.normal(size=100)).astype(np.float32)

    def model(X, y=None):
        sd = numpyro.sample("sd", dist.HalfNormal(300.0))
        scale = numpyro.sample("scale", dist.LogNormal(1.0, 1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(5.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(sd**2, scale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    with jax.enable_x64(False):
        fitted = sgp.fit(model, sgp.VGP(), (x[:, None], y), progress_bar=False)
        verdict = fitted.check()
        # As slopes told, with some ways of rounding.
        problem = problem_at(fitted.svi, fitted.params, (x[:, None], y), {})
        told = _of_q(lambda: (12.0, ""), jax.random.key(0), problem)
    assert told.nats < 0.1 and "one tells of 12" in told.told
    causes = verdict.causes
    assert causes["q(u)"].nats < 0.1
    assert np.isnan(causes["family"].nats) and "rounding" in causes["family"].told
    assert "family" not in verdict.summary and "train longer" not in repr(verdict)

"""Other lengthscales to train from, where the race's ends all take a wiggle for noise."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp.fitting.problem import Problem, constrained
from numpyro_sgp.fitting.scales import ALONE, FACTORS, Scales
from numpyro_sgp.fitting.whole import descent_of

N, KEY = 90, jax.random.key(0)
RNG = np.random.default_rng(100)
X = np.sort(RNG.uniform(0.0, 10.0, N))[:, None]
Y = np.sin(0.7 * X[:, 0]) + 0.35 * np.sin(7.0 * X[:, 0]) + 0.1 * RNG.normal(size=N)


def positive(name, location=0.0):
    return numpyro.sample(name, dist.LogNormal(location, 1.0))


def one(X, y=None):
    kernel = sgp.kernels.RBF(positive("variance"), positive("lengthscale"))
    noise = positive("noise", -1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def two(X, y=None):
    RBF = sgp.kernels.RBF
    kernel = RBF(positive("v1"), positive("l1")) + RBF(positive("v2"), positive("l2"))
    noise = positive("noise", -1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def fixed(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, positive("noise")), obs=y)


def dense_mode(starts, kernels=1):
    """The largest log density of responses and hyperparameters, by SciPy."""
    squares = (X - X.T) ** 2
    locations = np.array([0.0, 0.0] * kernels + [-1.0])

    def loss(logs):
        *pairs, noise = logs
        K = np.exp(2.0 * noise) * np.eye(N)
        for v, log_l in zip(pairs[::2], pairs[1::2], strict=True):
            K += np.exp(v - 0.5 * squares * np.exp(-2.0 * log_l))
        L = np.linalg.cholesky(K)
        white = np.linalg.solve(L, Y)
        likelihood = -0.5 * white @ white - np.log(np.diag(L)).sum()
        likelihood -= 0.5 * N * np.log(2 * np.pi)
        prior = -0.5 * (logs - locations) ** 2 - logs - 0.5 * np.log(2 * np.pi)
        return -likelihood - prior.sum()

    return max(-minimize(loss, np.array(s), method="L-BFGS-B").fun for s in starts)


def test_a_wiggle_on_a_trend_is_no_noise():
    """It was, 30 nats below: from all starts of the race."""
    best = dense_mode([(0.0, np.log(ls), -2.0) for ls in (0.15, 0.3, 1.0, 3.0)])
    far = dense_mode([(0.0, np.log(3.0), -1.0)])
    assert best > far + 10.0  # so that there is something to find
    fitted = sgp.fit(one, sgp.VGP(), (X, Y), progress_bar=False)
    assert abs(fitted.bound - best) < 0.1  # the tolerance of fit


@pytest.mark.slow
def test_each_kernel_of_a_sum_finds_its_own():
    short, long = (-1.0, np.log(0.2)), (-0.5, np.log(1.7))
    best = dense_mode([(*short, *long, -2.3), (*long, *long, -1.0)], kernels=2)
    fitted = sgp.fit(two, sgp.VGP(), (X, Y), progress_bar=False)
    assert abs(fitted.bound - best) < 0.1


def begun(model):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(8))
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.01), sgp.TraceGP_ELBO())
    given = Problem(svi, svi.init(KEY, X, Y), (X, Y), {})
    descent = descent_of(given, KEY)
    descent.start()
    return given, descent, Scales(given, descent, seed=0)


def test_a_move_holds_the_lengthscale_and_trains_the_rest():
    given, descent, scales = begun(one)
    before = constrained(given.svi, descent.free_now())
    moves = [*scales.moves()]
    assert len(moves) == len(FACTORS)
    free, at = descent.free_now(), descent.loss
    assert moves[1](free) > 0
    after = constrained(given.svi, descent.free_now())
    ratio = after["lengthscale_auto_loc"] / before["lengthscale_auto_loc"]
    assert_allclose(ratio, FACTORS[1], rtol=1e-6)
    assert abs(after["noise_auto_loc"] - before["noise_auto_loc"]) > 1e-3
    assert descent.losses[-1] < descent.losses[0] and descent.loss != at


@pytest.mark.slow
def test_kernels_of_a_sum_move_by_themselves_and_together():
    _, _, scales = begun(two)
    assert len([*scales.moves()]) == len(FACTORS) + 2 * len(ALONE)


def test_a_model_without_trained_lengthscales_has_no_moves():
    _, _, scales = begun(fixed)
    assert [*scales.moves()] == []


def test_steps_count_what_is_held():
    fitted = sgp.fit(one, sgp.SVGP(8), (X, Y), steps=6, progress_bar=False)
    assert len(fitted.losses) <= 6 and jnp.isfinite(fitted.bound)

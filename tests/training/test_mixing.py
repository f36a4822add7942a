"""Steps side by side that are mixed, and means of functions that add up."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.fitting.problem import Problem, constrained
from numpyro_sgp.training.mixing import Mixing
from numpyro_sgp.training.natural_gradients import natural_descent, natural_steps
from tests.helpers import slow

RNG = np.random.default_rng(4)
N, NOISE = 40, 0.05
X = np.sort(RNG.uniform(0.0, 5.0, N))[:, None]
Y = np.sin(X[:, 0]) + 0.4 * np.sin(5.0 * X[:, 0]) + NOISE * RNG.normal(size=N)
KERNELS = (1.0, 1.5), (0.5, 0.4)  # variances and lengthscales


def dense(variance, lengthscale):
    squares = (X - X.T) ** 2 / lengthscale**2
    return variance * np.exp(-0.5 * squares) + 1e-9 * np.eye(N)


def sum_of_functions(X):
    return sum(
        numpyro.sample(name, sgp.GaussianProcess(sgp.kernels.RBF(*kernel), X))
        for name, kernel in zip("fg", KERNELS, strict=True)
    )


def model(X, y=None):
    total = sum_of_functions(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(total, NOISE), obs=y)


def begun(size):
    """Steps of a plain vector, by its own derivatives."""
    mixing = Mixing(["x"], lambda given, slopes: (given["x"], slopes["x"]))
    zeros = {"x": jnp.zeros(size)}
    return mixing, mixing.none_yet(zeros, zeros), zeros


@pytest.mark.slow
def test_on_a_quadratic_they_are_there_after_as_many_as_there_are_directions():
    """Jacobi's iteration of this system runs away."""
    size = 6
    root = RNG.normal(size=(size, size))
    A = root @ root.T + 0.5 * np.eye(size)
    b = RNG.normal(size=size)
    assert np.abs(np.linalg.eigvals(np.eye(size) - A / np.diag(A)[:, None])).max() > 1.5
    mixing, places, given = begun(size)
    for _ in range(size + 1):
        slope = A @ given["x"] - b
        new = {"x": given["x"] - slope / np.diag(A)}
        given, places = mixing(places, given, {"x": slope}, new, 1.0)
    slope = A @ given["x"] - b
    step = slope / np.diag(A)
    # It is one step away, as the last one is always added.
    last, _ = mixing(places, given, {"x": slope}, {"x": given["x"] - step}, 1.0)
    assert_allclose(A @ last["x"], b, atol=1e-8)


@pytest.mark.slow
def test_the_oldest_places_give_way():
    mixing, places, _ = begun(2)
    for i in range(70):
        given = {"x": jnp.full(2, float(i))}
        _, places = mixing(places, given, given, given, 1.0)
    kept = np.sort(np.asarray(places.at[:, 0]))
    assert_allclose(kept, np.arange(70 - len(kept), 70))


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["full", slow("pseudo_data")])
def test_means_of_functions_that_add_up_arrive(covariance):
    """
    They are those of the exact posterior; the bound is a dense formula. Steps side by side
    are slow here: the noise is a tenth of the functions. (Unmixed, 40 of them end 3.2 nats
    lower.)
    """
    guide = sgp.AutoSparseGP(model, sgp.VGP(covariance=covariance))
    guide.take_natural_gradients(1.0)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    state = svi.init(jax.random.key(0), X, Y)
    problem = Problem(svi, state, (X, Y), {})
    params, key = svi.get_params(state), jax.random.key(0)
    if covariance == "full":

        def loss(free):
            return problem.loss(free, key, problem.arrays)

        descend = jax.jit(lambda f: natural_descent(loss, problem.natural, f, 40, 1e-8))
        q, _, count = descend(problem.free)
        params = constrained(svi, {**problem.free, **q})
    else:
        params, count = jax.jit(
            lambda params: natural_steps(svi, key, params, 40, 1e-10, (X, Y), {})
        )(params)
    assert count < 40
    matrices = [dense(*kernel) for kernel in KERNELS]
    weights = np.linalg.solve(sum(matrices) + NOISE**2 * np.eye(N), Y)
    residual = Y - sum(K @ weights for K in matrices)
    bound = -0.5 * N * np.log(2 * np.pi * NOISE**2)
    bound -= 0.5 * residual @ residual / NOISE**2
    for K in matrices:
        # S = (K^-1 + 1/noise^2)^-1, the same whatever the others.
        B = np.eye(N) + K / NOISE**2
        S = K @ np.linalg.inv(B)
        bound -= 0.5 * np.trace(S) / NOISE**2
        bound -= 0.5 * (np.linalg.slogdet(B)[1] + np.trace(np.linalg.inv(B)) - N)
        bound -= 0.5 * weights @ K @ weights
    value = svi.loss.loss(key, params, model, guide, X, Y)
    assert abs(value + bound) < 0.01  # the jitter of 1e-6 counts for some of it
    mean = guide.posterior(params, X)["f"].mean
    assert_allclose(mean, matrices[0] @ weights, atol=2e-3)


def counts(X, y=None):
    total = sum_of_functions(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(3.0 + total)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["full", "pseudo_data"])
def test_mixed_steps_of_other_likelihoods_end_lower_than_unmixed_ones(
    covariance, monkeypatch
):
    """In data of 32 bits beside a loss of 64, too; mixed ones are there after 40 steps."""
    X32 = X.astype(np.float32)
    y = np.round(np.exp(3.0 + Y))
    guide = sgp.AutoSparseGP(counts, sgp.VGP(covariance=covariance, jitter=1e-6))
    guide.take_natural_gradients(1.0)
    svi = SVI(counts, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    state, key = svi.init(jax.random.key(0), X32, y), jax.random.key(0)
    problem = Problem(svi, state, (X32, y), {})
    params = svi.get_params(state)

    def ends(steps):
        if covariance == "full":

            def loss(free):
                return problem.loss(free, key, problem.arrays)

            descend = jax.jit(
                lambda f: natural_descent(loss, problem.natural, f, steps, 1e-7)
            )
            return descend(problem.free)[1]
        run = jax.jit(
            lambda params: natural_steps(svi, key, params, steps, 1e-9, (X32, y), {})
        )
        return svi.loss.loss(key, run(params)[0], counts, guide, X32, y)

    soon, late = ends(40), ends(80)
    module = importlib.import_module("numpyro_sgp.training.natural_gradients")
    monkeypatch.setattr(module, "_side_by_side", alone)
    unmixed = ends(40)
    assert soon < late + 0.01
    assert soon < unmixed - 0.01


def alone(params, means):
    """As if nothing were beside."""
    return False

"""Functions drawn from posteriors: their moments, and that they are functions."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import block_diag
from numpy.testing import assert_allclose

import numpyro_sgp as sgp
from numpyro_sgp.distributions import FunctionSamples
from numpyro_sgp.families import (
    Block,
    BlockGaussian,
    CoupledGaussian,
    MixtureGaussian,
    PseudoDataGaussian,
)
from numpyro_sgp.kernels import RBF, Linear, Matern32, Periodic, White

# Large, so that draws that forget it are found out.
JITTER = 0.1
N, S = 5, 20_000
X = np.linspace(-2.0, 2.0, N)[:, None]
Z, O = np.array([-1.5, 0.1, 1.4])[:, None], np.array([-0.6, 0.7])[:, None]
KERNEL = RBF(1.3, 0.8)
KERNELS = RBF(np.array([1.3, 0.6]), np.array([0.7, 1.1]))
MEAN = sgp.means.Linear(np.array([0.5]), 0.3)


def block(kind, M, *batch):
    rng = np.random.default_rng(M)
    mu = rng.normal(size=(*batch, M))
    if kind == "prior":
        return Block(mu, None)
    if kind == "diagonal":
        return Block(mu, rng.uniform(0.3, 0.9, (*batch, M)))
    below = 0.3 * np.tril(rng.normal(size=(*batch, M, M)), -1)
    return Block(mu, below + 0.5 * np.eye(M))


def sparse(*blocks, kernel=KERNEL, sets=(Z, O), whiten=True, batch=None, mean=None):
    prior = sgp.GaussianProcess(kernel, X, mean)
    prior = prior if batch is None else prior.expand(batch)
    q = BlockGaussian(blocks, whiten)
    return sgp.SparsePosterior(prior, sets[: len(blocks)], q, JITTER)


def pseudo_data():
    rng = np.random.default_rng(0)
    q = PseudoDataGaussian(rng.normal(size=4), rng.uniform(0.5, 2.0, 4), X[:4] + 0.1, 3)
    return sgp.SparsePosterior(sgp.GaussianProcess(KERNEL, X), (Z,), q, JITTER)


def mixture():
    q = BlockGaussian((block("full", 3, 2, 2),))
    prior = sgp.GaussianProcess(KERNELS, X, 0.4)
    q = MixtureGaussian(q, np.array([0.3, -0.5]))
    return sgp.SparsePosterior(prior, (Z,), q, jitter=JITTER)


def coupled():
    rng = np.random.default_rng(0)
    sqrt = 0.4 * np.tril(rng.normal(size=(6, 6)), -1) + 0.5 * np.eye(6)
    prior = sgp.GaussianProcess(KERNELS, X, 0.4)
    q = CoupledGaussian(rng.normal(size=(2, 3)), sqrt)
    return sgp.SparsePosterior(prior, (Z,), q, JITTER)


CASES = {
    "one block": partial(sparse, block("full", 3), mean=MEAN),
    "another kernel": partial(
        sparse, block("full", 3), kernel=Matern32(0.9) * Periodic(1.0, 1.0, 3.0) + Linear()
    ),
    "pseudo-data": pseudo_data,
    "SOLVE-GP": partial(sparse, block("full", 3), block("diagonal", 2)),
    "unwhitened": partial(sparse, block("diagonal", 3), block("full", 2), whiten=False),
    "ODVGP": partial(sparse, block("full", 3), block("prior", 2)),
    "parallel": lambda: sparse(block("full", 3), block("full", 2), mean=MEAN).parallel(),
    "orthogonal": lambda: sparse(
        block("full", 3), block("full", 2), mean=MEAN
    ).orthogonal(),
    "expanded": partial(sparse, block("full", 3), block("prior", 2, 2), batch=(2,)),
    "batch": partial(
        sparse, block("full", 3, 2), kernel=KERNELS, sets=(np.stack([Z, Z[::-1] - 0.2]),)
    ),
    "mixture": mixture,
    "coupled": coupled,
}


def joint_moments(posterior):
    """Mean and covariance over latent functions and rows together."""
    covariance = block_diag(*posterior.covariance_matrix.reshape(-1, N, N))
    if posterior.num_components > 1:
        means = jnp.stack([posterior.marginals(k)[0].reshape(-1) for k in range(2)])
        weights = jnp.exp(posterior.log_weights)
        centred = means - weights @ means
        between = centred.T @ (weights[:, None] * centred)
        covariance = jnp.where(covariance == 0, between, covariance)
    if not posterior.independent_latents:
        P = block_diag(*jnp.swapaxes(posterior.projection, -1, -2))
        shared = P @ posterior.q.sqrt @ posterior.q.sqrt.T @ P.T
        covariance = jnp.where(covariance == 0, shared, covariance)
    return posterior.mean.reshape(-1), covariance


@partial(jax.jit, static_argnums=(0, 1, 2))
def sample(make, shape, num_features):
    # Made inside: as an argument, its leaves change places from run to run, which the
    # compilation cache would not survive.
    return make().sample_functions(jax.random.key(0), shape, num_features)


@pytest.mark.quick(4)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_draws_have_the_moments_of_the_posterior(make):
    # 480 numbers in all within five standard errors: one key in 3e3 fails. Whatever the
    # number of features, the moments are exact.
    @jax.jit
    def draw():
        posterior = make()
        f = posterior.sample_functions(jax.random.key(0), (S,), num_features=3)
        return f(X), *joint_moments(posterior)

    draws, mean, covariance = map(np.asarray, draw())
    assert draws.shape == make().shape((S,))
    centred = draws.reshape(S, -1) - mean
    error = centred.std(axis=0) / np.sqrt(S)
    assert (np.abs(centred.mean(axis=0)) < 5 * error).all()
    products = centred[:, :, None] * centred[:, None, :]
    error = products.std(axis=0) / np.sqrt(S)
    assert (np.abs(products.mean(axis=0) - covariance) < 5 * error).all()


@pytest.mark.slow
def test_with_many_features_draws_are_gaussian():
    # The fourth moment of N(0, 1) is 3, that of one feature's draws 4.5.
    @jax.jit
    def draw():
        posterior = sparse(block("full", 3))
        f = posterior.sample_functions(jax.random.key(0), (5_000,), 100)(X)
        return (f - posterior.mean) / jnp.sqrt(posterior.variance)

    fourth = np.mean(np.asarray(draw()) ** 4, axis=0)
    # Five standard errors, sqrt(96 / S), and the features' own 1.5 / 100.
    assert_allclose(fourth, 3.0, atol=5 * math.sqrt(96 / 5_000) + 0.015)


call = jax.jit(lambda f, X: f(X))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["SOLVE-GP", "mixture"])
def test_a_draw_is_one_function(name):
    f = sample(CASES[name], (2,), 16)
    assert isinstance(f, FunctionSamples)
    values = f(X)  # not compiled
    assert values.shape == CASES[name]().shape((2,))

    @jax.jit
    def again(f):
        one_by_one = jax.vmap(lambda x: f(x[None])[..., 0], out_axes=-1)
        return f(X), f(X[[3, 1]]), one_by_one(X)

    whole, rows, one_by_one = again(f)
    assert_allclose(whole, values, rtol=1e-9, atol=1e-11)
    assert_allclose(rows, values[..., [3, 1]], rtol=1e-9, atol=1e-11)
    assert_allclose(one_by_one, values, rtol=1e-9, atol=1e-11)
    # Every sample is a function of its own.
    assert (np.abs(values[0] - values[1]) > 1e-6).all()


def test_each_function_can_have_inputs_of_its_own():
    f = sample(CASES["batch"], (3,), 16)
    own = X + np.arange(6.0).reshape(3, 2, 1, 1)
    values = call(f, own)
    assert values.shape == (3, 2, N)
    for s in range(3):
        for q in range(2):
            expected = call(f, own[s, q])[s, q]
            assert_allclose(values[s, q], expected, rtol=1e-9, atol=1e-11)


def test_gradients_are_those_of_the_function():
    make = partial(sparse, block("full", 3), kernel=Matern32(1.3, 0.8))
    f = jax.jit(sample(make, (), 16))
    slope = jax.jit(jax.grad(lambda x: f(x[None])[0]))
    # At an inducing point too, where the distance has no derivative.
    for x in (Z[0], X[1]):
        difference = (f((x + 1e-5)[None]) - f((x - 1e-5)[None])) / 2e-5
        assert_allclose(slope(x), difference, rtol=1e-4, atol=1e-4)


def test_at_the_inducing_points_a_certain_q_fixes_the_values():
    mu = np.array([1.0, -2.0, 0.5])

    def make():
        q = BlockGaussian((Block(mu, np.zeros(3)),), whiten=False)
        prior = sgp.GaussianProcess(KERNEL, X, 0.7)
        return sgp.SparsePosterior(prior, (Z,), q, jitter=1e-12)

    values = call(sample(make, (4,), 8), Z)
    assert_allclose(values, np.tile(mu + 0.7, (4, 1)), atol=1e-4)


def test_float32_stays_float32():
    narrow = partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    for name in ("one block", "SOLVE-GP", "another kernel", "mixture", "coupled"):
        posterior = narrow(CASES[name]())

        def draw(posterior, X):
            return posterior.sample_functions(jax.random.key(0), (2,), 8)(X)

        values = jax.eval_shape(draw, posterior, np.asarray(X, np.float32))
        assert values.dtype == jnp.float32, name


def test_what_cannot_be_drawn_is_refused():
    posterior = sparse(block("full", 3), kernel=KERNEL + White(0.1))
    with pytest.raises(NotImplementedError, match="White has no random features"):
        jax.eval_shape(posterior.sample_functions, jax.random.key(0))
    # What the inducing variables say alone needs no features.
    f = jax.eval_shape(posterior.parallel().sample_functions, jax.random.key(0))
    assert jax.eval_shape(lambda f: f(X), f).shape == (N,)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sparse(block("full", 3)).sample_functions(jax.random.key(0), num_features=0)
    with pytest.raises(ValueError, match=r"shape \(N, D\)"):
        jax.eval_shape(lambda f: f(X[:, 0]), f)

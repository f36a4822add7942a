"""Dense linear algebra, small models and the like that several tests share."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.extend.core import jaxprs_in_params
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp


def slow(*values):
    """Values of a parameter that only `make slow` has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rbf(X1, X2, variance=1.0, lengthscale=1.0):
    """RBF kernel matrix by a plain double sum, independent of the package."""
    difference = (np.asarray(X1)[:, None, :] - np.asarray(X2)[None, :, :]) / lengthscale
    return variance * np.exp(-0.5 * np.sum(difference**2, axis=-1))


def dense_kl(m, S, K):
    """KL[N(m, S) || N(0, K)] with explicit inverses."""
    inverse = np.linalg.inv(K)
    log_dets = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1]
    return 0.5 * (np.trace(inverse @ S) + m @ inverse @ m - len(m) + log_dets)


def exact_gp(X, y, X_new, noise, variance=1.0, lengthscale=1.0):
    """Log evidence, and posterior mean and covariance of f(X_new), by explicit inverses."""
    C = rbf(X, X, variance, lengthscale) + noise**2 * np.eye(len(X))
    Ks = rbf(X_new, X, variance, lengthscale)
    inverse = np.linalg.inv(C)
    mean = Ks @ inverse @ y
    covariance = rbf(X_new, X_new, variance, lengthscale) - Ks @ inverse @ Ks.T
    return multivariate_normal(np.zeros(len(X)), C).logpdf(y), mean, covariance


def optimal_whitened_q(X, y, Z, noise, variance=1.0, lengthscale=1.0, jitter=1e-8):
    """The best whitened q(u) for a Gaussian likelihood: mean and covariance."""
    Kuu = rbf(Z, Z, variance, lengthscale) + jitter * variance * np.eye(len(Z))
    A = np.linalg.solve(np.linalg.cholesky(Kuu), rbf(Z, X, variance, lengthscale))
    S = np.linalg.inv(np.eye(len(Z)) + A @ A.T / noise**2)
    return S @ A @ y / noise**2, S


def gaussian_model(X, y=None, noise=0.3, batch_size=None, kernel=None):
    """GP regression with known hyperparameters."""
    kernel = sgp.kernels.RBF() if kernel is None else kernel
    data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
    with data as idx:
        X_batch, y_batch = X[idx], None if y is None else y[idx]
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X_batch))
    with data:
        numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)


def poisson_model(X, y=None, batch_size=None):
    """Log-Gaussian Cox process with a prior on the lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
    with data as idx:
        X_batch, y_batch = X[idx], None if y is None else y[idx]
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X_batch))
    with data:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y_batch)


def regression_data(num_rows=15, dim=1, noise=0.3, seed=0):
    """Inputs of shape (N, D) and responses of shape (N,)."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, size=(num_rows, dim))
    y = np.sin(2 * X).sum(axis=1) + noise * rng.normal(size=num_rows)
    return jnp.asarray(X), jnp.asarray(y)


def count_data(num_rows=12, seed=0):
    """Inputs of shape (N, 1) and counts of shape (N,)."""
    rng = np.random.default_rng(seed)
    X = np.linspace(-2, 2, num_rows)[:, None]
    return jnp.asarray(X), jnp.asarray(rng.poisson(np.exp(np.sin(2 * X[:, 0]) + 0.5)))


def load_example(name):
    """An example as a module."""
    path = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def primitives(jaxpr, but=()):
    """Name and operand shapes of all primitives of a program; none nested in ``but``."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name, tuple(v.aval.shape for v in eqn.invars)
        if eqn.primitive.name not in but:
            for inner in jaxprs_in_params(eqn.params):
                yield from primitives(inner, but)


def factorised(jaxpr):
    """Sizes of the matrices that a program factorises; in loops, in each turn."""
    found = primitives(jaxpr)
    return [shapes[0][-1] for name, shapes in found if name == "cholesky"]


def few_large_counts(N=60):
    """Days, counts of which four are large, and which these are."""
    rng = np.random.default_rng(3)
    large = np.sort(rng.choice(N, 4, replace=False))
    y = rng.poisson(1.0, N)
    y[large] = [30, 50, 80, 150]
    return np.arange(float(N))[:, None], y, large


def counts(X, y=None):
    """Of a function that has forgotten a day on the next one."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(4.0, 0.3), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

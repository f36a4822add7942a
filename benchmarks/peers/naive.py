"""Worker of a whitened SVGP as a textbook has it, in JAX and optax alone."""

import time

begin = time.perf_counter()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.nn import softplus  # noqa: E402
from jax.scipy.linalg import solve_triangular  # noqa: E402

IMPORT_S = time.perf_counter() - begin

from jax_steps import JaxModel  # noqa: E402
from serve import serve  # noqa: E402


def matern32(X1, X2, variance, lengthscale):
    """Kernel matrix."""
    X1, X2 = X1 / lengthscale, X2 / lengthscale
    r2 = jnp.sum(X1**2, -1)[:, None] + jnp.sum(X2**2, -1)[None] - 2 * X1 @ X2.T
    r = jnp.sqrt(3.0 * jnp.maximum(r2, 1e-12))
    return variance * (1 + r) * jnp.exp(-r)


def unpack(params):
    """Positive parameters."""
    names = ("variance", "lengthscale", "noise")
    return (softplus(params[name]) for name in names)


def marginals(params, X):
    """Mean and variance of q(f), and the factor of q(u)."""
    variance, lengthscale, _ = unpack(params)
    Z, S = params["Z"], jnp.tril(params["S"])
    eye = jnp.eye(len(Z), dtype=Z.dtype)
    jitter = 1e-5 if Z.dtype == jnp.float32 else 1e-8
    L = jnp.linalg.cholesky(matern32(Z, Z, variance, lengthscale) + jitter * eye)
    A = solve_triangular(L, matern32(Z, X, variance, lengthscale), lower=True)
    F = S.T @ A
    return A.T @ params["mu"], variance - jnp.sum(A**2, 0) + jnp.sum(F**2, 0), S


def loss(params, X, y, N):
    """Negative evidence lower bound."""
    mean, variance, S = marginals(params, X)
    *_, noise = unpack(params)
    terms = jnp.log(2 * jnp.pi * noise) + ((y - mean) ** 2 + variance) / noise
    log_det = jnp.sum(jnp.log(jnp.diagonal(S) ** 2))
    kl = 0.5 * (jnp.sum(S**2) + jnp.sum(params["mu"] ** 2) - len(mean) - log_det)
    return 0.5 * N * jnp.mean(terms) + kl


class Model(JaxModel):
    """Trained by Adam."""

    def __init__(self, problem):
        jax.config.update("jax_enable_x64", problem.dtype == "float64")
        self.X, self.y = jnp.asarray(problem.X), jnp.asarray(problem.y)

        def free(value, shape=()):
            return jnp.full(shape, np.log(np.expm1(value)), problem.dtype)

        params = {
            "variance": free(1.0),
            "lengthscale": free(problem.lengthscale, (problem.D,)),
            "noise": free(problem.noise),
            "Z": jnp.asarray(problem.Z),
            "mu": jnp.zeros(len(problem.Z), problem.dtype),
            "S": jnp.eye(len(problem.Z), dtype=problem.dtype),
        }
        optimiser = optax.adam(problem.rate)
        self.state = params, optimiser.init(params)

        def train(state, rows, X, y):
            def step(state, rows):
                params, inner = state
                value, slopes = jax.value_and_grad(loss)(
                    params, X[rows], y[rows], problem.N
                )
                updates, inner = optimiser.update(slopes, inner)
                return (optax.apply_updates(params, updates), inner), value

            return jax.lax.scan(step, state, rows)

        self.compile(train, lambda params, X: marginals(params, X)[:2])

    def noise_variance(self):
        """Of the Gaussian likelihood."""
        return softplus(self.state[0]["noise"])


if __name__ == "__main__":
    serve(Model, IMPORT_S)

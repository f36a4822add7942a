"""
Worker of GPJax: WhitenedVariationalGaussian with the step of ``gpjax.fit``, in a loop that
is compiled once (``fit`` itself compiles at each call).
"""

import time

begin = time.perf_counter()
import equinox as eqx  # noqa: E402
import gpjax as gpx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

IMPORT_S = time.perf_counter() - begin

from jax_steps import JaxModel  # noqa: E402
from serve import serve  # noqa: E402


class Model(JaxModel):
    """Whitened SVGP trained by Adam."""

    def __init__(self, problem):
        jax.config.update("jax_enable_x64", problem.dtype == "float64")
        dtype = problem.dtype
        self.X, self.y = jnp.asarray(problem.X), jnp.asarray(problem.y)[:, None]
        kernel = gpx.kernels.Matern32(
            lengthscale=jnp.full(problem.D, problem.lengthscale, dtype),
            variance=jnp.asarray(1.0, dtype),
        )
        jitter = 1e-4 if dtype == "float32" else 1e-6
        mean = gpx.mean_functions.Zero()
        prior = gpx.gps.Prior(kernel=kernel, mean_function=mean, jitter=jitter)
        if problem.likelihood == "gaussian":
            noise = jnp.asarray(problem.noise**0.5, dtype)
            likelihood = gpx.likelihoods.Gaussian(obs_stddev=noise)
        else:
            likelihood = gpx.likelihoods.Bernoulli()
        M = len(problem.Z)
        model = gpx.variational_families.WhitenedVariationalGaussian(
            model=prior * likelihood,
            inducing_inputs=jnp.asarray(problem.Z),
            variational_mean=jnp.zeros((M, 1), dtype),
            variational_root_covariance=jnp.eye(M, dtype=dtype),
        )
        optimiser = optax.adam(problem.rate)
        arrays, static = eqx.partition(model, eqx.is_array)
        # Without weak types, which the steps would turn into strong ones, and compile anew.
        state = arrays, optimiser.init(arrays)
        self.state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
        self._static = static

        def objective(model, X, y):
            batch = gpx.Dataset(X=X, y=y, n_total=problem.N)
            return -gpx.objectives.elbo(model, batch)

        def train(state, rows, X, y):
            def step(state, rows):
                arrays, inner = state
                model = eqx.combine(arrays, static)
                value, slopes = eqx.filter_value_and_grad(objective)(
                    model, X[rows], y[rows]
                )
                updates, inner = optimiser.update(slopes, inner, arrays)
                return (eqx.apply_updates(arrays, updates), inner), value

            return jax.lax.scan(step, state, rows)

        def moments(arrays, X):
            q = eqx.combine(arrays, static).condition(None)(X, covariance="diagonal")
            return q.mean, q.variance

        self.compile(train, moments)

    def noise_variance(self):
        """Of the Gaussian likelihood."""
        likelihood = eqx.combine(self.state[0], self._static).model.likelihood
        if not hasattr(likelihood, "obs_stddev"):
            return np.nan
        return gpx.parameters.val(likelihood.obs_stddev) ** 2


if __name__ == "__main__":
    serve(Model, IMPORT_S)

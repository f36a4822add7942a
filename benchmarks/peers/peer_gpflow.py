"""
Worker of GPflow: SVGP (whitened by default), its training loss and Adam in one
``tf.function``, and predictions by its cached posterior.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
begin = time.perf_counter()
import gpflow  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

IMPORT_S = time.perf_counter() - begin

from serve import serve  # noqa: E402


class Model:
    """Whitened SVGP trained by Adam."""

    def __init__(self, problem):
        gpflow.config.set_default_float(np.dtype(problem.dtype).type)
        gpflow.config.set_default_jitter(1e-5 if problem.dtype == "float32" else 1e-6)
        X, y = tf.constant(problem.X), tf.constant(problem.y[:, None])
        kernel = gpflow.kernels.Matern32(
            variance=1.0, lengthscales=np.full(problem.D, problem.lengthscale)
        )
        if problem.likelihood == "gaussian":
            likelihood = gpflow.likelihoods.Gaussian(problem.noise)
        else:
            likelihood = gpflow.likelihoods.Bernoulli()
        self.model = gpflow.models.SVGP(
            kernel, likelihood, problem.Z.copy(), num_data=problem.N
        )
        optimiser = tf_keras.optimizers.Adam(problem.rate)
        variables = self.model.trainable_variables
        optimiser.build(variables)

        @tf.function
        def step(rows):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                loss = self.model.training_loss((tf.gather(X, rows), tf.gather(y, rows)))
            slopes = tape.gradient(loss, variables)
            optimiser.apply_gradients(zip(slopes, variables, strict=True))
            return loss

        self._step, self._predict = step, None

    def steps(self, rows):
        """Trains; the last loss."""
        self._predict = None
        for some in rows:
            loss = self._step(tf.constant(some))
        return float(loss.numpy())

    def predict(self, X):
        """Mean and variance of f."""
        if self._predict is None:
            self._predict = tf.function(self.model.posterior().predict_f)
        mean, variance = self._predict(tf.constant(X))
        return mean.numpy()[:, 0], variance.numpy()[:, 0]

    def noise_variance(self):
        """Of the Gaussian likelihood."""
        if not hasattr(self.model.likelihood, "variance"):
            return np.nan
        return self.model.likelihood.variance.numpy()


if __name__ == "__main__":
    serve(Model, IMPORT_S)

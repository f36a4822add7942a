"""What the workers of libraries on JAX have in common."""

import jax
import jax.numpy as jnp


class JaxModel:
    """
    Steps and predictions by the compiled ``_train(state, rows, X, y)`` and
    ``_moments(params, X)`` of a model with data ``X`` and ``y`` and a ``state``.
    """

    def compile(self, train, moments=None):
        """Keeps the two programs; a model may predict in another way."""
        self._train = jax.jit(train, donate_argnums=0)
        self._moments = None if moments is None else jax.jit(moments)

    @property
    def params(self):
        """What predictions need of the state."""
        return self.state[0]

    def steps(self, rows):
        """Trains; the last loss."""
        self.state, losses = self._train(self.state, jnp.asarray(rows), self.X, self.y)
        return jax.block_until_ready(losses)[-1]

    def predict(self, X):
        """Mean and variance of f."""
        return jax.block_until_ready(self._moments(self.params, jnp.asarray(X)))

"""Distributions with a leading axis that ``jax.vmap`` or ``lax.scan`` gave them."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.batch_util import promote_batch_shape


class Stacked(dist.Distribution):
    """
    Independent distributions of one structure, one for each entry of the leading axis that
    all arrays of ``base`` have beyond those of a single one.

    ``promote_batch_shape``, and so ``numpyro.contrib.control_flow.scan``, makes it of the
    distributions that are registered by :func:`register_stacked`: kernels, means and
    parameters do not line up as batches where each of their leaves gets an axis in front.

    :param base: the distribution that came out of ``vmap`` or ``scan``.
    :param size: length of the leading axis.
    """

    arg_constraints = {}
    reparametrized_params = []
    pytree_data_fields = ("base",)

    def __init__(self, base: dist.Distribution, size: int):
        self.base = base
        inner = jax.eval_shape(_first, base)
        batch_shape = (size, *inner.batch_shape)
        super().__init__(batch_shape, inner.event_shape, validate_args=False)

    @property
    def support(self):
        """That of each distribution."""
        return self.base.support

    @property
    def has_rsample(self) -> bool:
        """That of each distribution."""
        return self.base.has_rsample

    def sample(self, key, sample_shape=()) -> Array:
        """Draws, of shape ``sample_shape + batch_shape + event_shape``."""

        def draw(base, key):
            return promote_batch_shape(base).sample(key, sample_shape)

        keys = jax.random.split(key, self.batch_shape[0])
        return jax.vmap(draw, out_axes=len(sample_shape))(self.base, keys)

    def log_prob(self, value, intermediates=None) -> Array:
        """
        Log densities.

        :param value: shape ``(..., *batch_shape, *event_shape)``.
        :return: shape ``(..., *batch_shape)``.
        """
        shape = jnp.broadcast_shapes(jnp.shape(value), self.shape())
        axis = len(shape) - len(self.shape())

        def one(base, value):
            return promote_batch_shape(base).log_prob(value)

        value = jnp.broadcast_to(value, shape)
        return jax.vmap(one, in_axes=(0, axis), out_axes=axis)(self.base, value)

    @property
    def mean(self) -> Array:
        """Means, of shape ``batch_shape + event_shape``."""
        return jax.vmap(lambda base: promote_batch_shape(base).mean)(self.base)

    @property
    def variance(self) -> Array:
        """Variances, of shape ``batch_shape + event_shape``."""
        return jax.vmap(lambda base: promote_batch_shape(base).variance)(self.base)


def _first(base):
    return promote_batch_shape(jax.tree.map(lambda leaf: leaf[0], base))


def register_stacked(cls, array) -> None:
    """
    Let ``promote_batch_shape`` make :class:`Stacked` of the distributions of a class.

    :param cls: the class, whose instances have the number of axes of one of their arrays
        as the static field ``_rank``.
    :param array: function of an instance to this array.
    """

    @promote_batch_shape.register(cls)
    def promote(d):
        found = array(d)
        return Stacked(d, found.shape[0]) if found.ndim > d._rank else d

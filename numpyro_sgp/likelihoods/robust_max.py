"""The class with the largest latent function, and its expectation in closed form."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import ndtr
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_sgp._checks import floating
from numpyro_sgp._stacked import register_stacked
from numpyro_sgp.linalg import matmul

_REACH = 6.5  # sds, beyond which there are 1e-10 of a Gaussian


class RobustMax(dist.Distribution):
    r"""
    The class with the largest latent function, or another one by mistake [1],

    .. math::
        p(y \mid f) = 1 - \epsilon \text{ if } y = \arg\max_c f_c, \text{ else }
        \epsilon / (C - 1) .

    Its density is flat in f, so that drawing f gives no gradient; but its expectation under
    independent Gaussians is a one-dimensional integral, :meth:`expected_log_prob`, which
    :class:`~numpyro_sgp.TraceGP_ELBO` takes in place of an average over its nodes. For
    that, ``f`` must be the value of a GP site itself. Other ELBOs do not: use
    :class:`~numpyro_sgp.TraceGP_ELBO`; and for MCMC :class:`~numpyro_sgp.EllipticalSlice`.

    :param f: latent functions, shape ``(C, N)``.
    :param epsilon: probability of a mistake.
    :param num_points: nodes of the expectation where there are more than two classes. Its
        probability is right to 1e-3 with 50 where no function has an sd a fifth of
        another's, and to 1e-2 where none has a tenth; with 100 to 1e-3 there.
    :raises ValueError: if ``f`` is not of at least two functions.

    >>> import jax.numpy as jnp
    >>> f = jnp.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    >>> print(jnp.exp(RobustMax(f, epsilon=0.1).log_prob(jnp.array([0, 0]))))
    [0.90 0.05]
    >>> mean, variance = jnp.zeros((3, 2)), jnp.ones((3, 2))
    >>> expected = RobustMax(f).expected_log_prob(mean, variance, jnp.array([0, 1]))
    >>> print(expected.round(3))
    [-5.068 -5.068]

    **References:**

    1. Hernandez-Lobato, Hernandez-Lobato, Dupont (2011). Robust Multi-Class Gaussian
       Process Classification. NIPS 24.
    """

    arg_constraints = {
        "f": constraints.independent(constraints.real, 2),
        "epsilon": constraints.unit_interval,
    }
    reparametrized_params = []
    pytree_data_fields = ("f", "epsilon")
    pytree_aux_fields = ("num_points",)
    _rank = 2  # axes of f

    def __init__(
        self,
        f: Array,
        epsilon: ArrayLike = 1e-3,
        num_points: int = 50,
        *,
        validate_args: bool | None = None,
    ):
        if jnp.ndim(f) != 2 or jnp.shape(f)[0] < 2:
            raise ValueError(
                "RobustMax takes f of shape (C, N), a latent function for each of C >= 2 "
                f"classes, got {jnp.shape(f)}. Use .expand([C]) on the process, and f as "
                "it is, without f.T."
            )
        self.f, self.epsilon, self.num_points = f, epsilon, num_points
        super().__init__(jnp.shape(f)[1:], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        """The classes, 0 to C - 1."""
        return constraints.integer_interval(0, self.f.shape[-2] - 1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of classes, of shape ``sample_shape + (N,)``."""
        shape, num = sample_shape + self.batch_shape, self.f.shape[0]
        key_wrong, key_other = jax.random.split(key)
        wrong = jax.random.bernoulli(key_wrong, self.epsilon, shape)
        other = jax.random.randint(key_other, shape, 1, num)
        return (jnp.argmax(self.f, axis=0) + jnp.where(wrong, other, 0)) % num

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates=None) -> Array:
        """log p(y | f), of the shape of ``value`` broadcast with ``batch_shape``."""
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        right = jnp.argmax(self.f, axis=0) == value
        return self._log_prob(jnp.broadcast_to(right, shape))

    @classmethod
    def infer_shapes(
        cls, f: tuple[int, ...], epsilon: Any = None, num_points: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the distribution of an ``f`` of this shape."""
        return tuple(f[1:]), ()

    def expand(self, batch_shape: tuple[int, ...]) -> dist.Distribution:
        """
        The same likelihood for several sets of labels; nothing is copied.

        :param batch_shape: ends in the number of rows.
        """
        batch_shape = tuple(batch_shape)
        if not self.batch_shape == batch_shape[len(batch_shape) - len(self.batch_shape) :]:
            return super().expand(batch_shape)
        expanded = copy.copy(self)
        expanded._batch_shape = batch_shape
        return expanded

    def _log_prob(self, probability: Array) -> Array:
        """Its mean where the largest function is that of the class with a probability."""
        dtype = floating(self.f).dtype
        probability, epsilon = (jnp.asarray(v, dtype) for v in (probability, self.epsilon))
        right, wrong = jnp.log1p(-epsilon), jnp.log(epsilon / (self.f.shape[0] - 1))
        return _times(probability, right) + _times(
            jnp.maximum(1.0 - probability, 0.0), wrong
        )

    def expected_log_prob(self, mean: Array, variance: Array, value: ArrayLike) -> Array:
        r"""
        :math:`E[\log p(y \mid f)]` with independent :math:`f_c \sim N(\mu_c, v_c)`, by
        quadrature of :math:`E_{f_y}[\prod_{c \ne y} \Phi((f_y - \mu_c) / \sqrt{v_c})]`;
        of two classes in closed form.

        :param mean: shape ``(C, N)``.
        :param variance: shape ``(C, N)``.
        :param value: classes, shape ``(..., *batch_shape)``.
        :return: shape ``(..., *batch_shape)``.
        """
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        labels = jnp.broadcast_to(jnp.asarray(value, int), shape).reshape(-1, shape[-1])
        largest = jax.vmap(_largest_probability, (None, None, 0, None))(
            mean, variance, labels, self.num_points
        )
        return self._log_prob(largest).reshape(shape)


register_stacked(RobustMax, lambda likelihood: likelihood.f)


def robust_max_probabilities(
    mean: ArrayLike, variance: ArrayLike, epsilon: ArrayLike = 1e-3, num_points: int = 200
) -> Array:
    """
    Predictive probabilities of the classes of :class:`RobustMax` under independent
    Gaussian latent functions.

    :param mean: their means, shape ``(C, N)``, of ``guide.posterior(...)["f"]``, say.
    :param variance: their variances, likewise.
    :param epsilon: probability of a mistake.
    :param num_points: nodes, as of :class:`RobustMax`.
    :return: shape ``(C, N)``.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.likelihoods import robust_max_probabilities
    >>> print(robust_max_probabilities(jnp.array([[1.0], [0.0]]), jnp.ones((2, 1)))[:, 0])
    [0.760 0.240]
    """
    mean, variance = floating(mean), floating(variance)
    num_classes, num_rows = mean.shape

    def largest(label):
        labels = jnp.full(num_rows, label)
        return _largest_probability(mean, variance, labels, num_points)

    p = jax.vmap(largest)(jnp.arange(num_classes))
    return (1 - epsilon) * p + epsilon / (num_classes - 1) * (1 - p)


def _largest_probability(mean, variance, label, num_points):
    """Probability that the function of the label is the largest, shape ``(N,)``."""
    label = jnp.clip(label, 0, len(mean) - 1)  # of masked rows it may be anything
    own_mean = jnp.take_along_axis(mean, label[None], axis=0)
    own_variance = jnp.take_along_axis(variance, label[None], axis=0)
    if len(mean) == 2:
        away = own_mean - jnp.take_along_axis(mean, 1 - label[None], axis=0)
        return ndtr(away / jnp.sqrt(jnp.sum(variance, axis=0)))[0]
    # Evenly spaced nodes: where other functions have small sds, the product has steps,
    # which no polynomial follows, and Gaussian sums of smooth functions are right to all
    # digits by the trapezoidal rule.
    nodes = np.linspace(-_REACH, _REACH, num_points)
    weights = np.exp(-0.5 * nodes**2)
    nodes, weights = (jnp.asarray(x, mean.dtype) for x in (nodes, weights / weights.sum()))
    own = own_mean + jnp.sqrt(own_variance) * nodes[:, None]  # [S, N]
    below = _ndtr((own[:, None, :] - mean) / jnp.sqrt(variance))  # [S, C, N]
    others = jnp.arange(len(mean))[:, None] != label
    return matmul(weights, jnp.prod(jnp.where(others, below, 1.0), axis=1))


def _times(weight, log):
    """A weight times a logarithm: of log 0 no multiple is nothing, with a slope too."""
    none = (weight == 0.0) & jnp.isinf(log)
    return jnp.where(none, 0.0, weight * jnp.where(none, 0.0, log))


def _ndtr(z):
    """
    The normal distribution function, to absolute digits, in a fifth of the time that JAX's
    takes in float64; that of its logarithm takes ten times as long.
    """
    if z.dtype == jnp.float64:
        return 0.5 * jax.lax.erfc(-z * np.sqrt(0.5))
    return ndtr(z)

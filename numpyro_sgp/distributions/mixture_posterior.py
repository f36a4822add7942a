"""q(f(X)) of a sparse Gaussian process whose q(u) is a mixture of Gaussians (SAVIGP)."""

import copy
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.posterior import GPPosterior, gaussian_log_prob
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.families import BlockGaussian
from numpyro_sgp.families.mixture import ENTROPIES, mixture_kl


class MixturePosterior(GPPosterior):
    r"""
    :math:`q(f(X)) = \sum_k \pi_k \int p(f(X) \mid u) N(u; m_k, S_k)\, du` [1, eq. 7, 8]:
    a mixture over all latent functions together, each component of which is a
    :class:`SparsePosterior` with independent latent functions.

    :param prior: the process at X, with ``batch_shape`` Q (or none).
    :param inducing: the inducing points, shape ``(M, D)`` or ``(*batch, M, D)``.
    :param q: the components: blocks with ``mu`` of shape ``(K, *batch, M)``.
    :param logits: log weights up to a constant, shape ``(K,)``.
    :param entropy: how the KL is bounded, see
        :func:`~numpyro_sgp.families.mixture.mixture_kl`.
    :param jitter: relative jitter of the inducing covariance.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> from numpyro_sgp.families import Block, BlockGaussian
        >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
        >>> mu = jnp.stack([jnp.ones(4), -jnp.ones(4)])
        >>> q = BlockGaussian((Block(mu, jnp.ones((2, 4))),))
        >>> prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X)
        >>> posterior = sgp.MixturePosterior(prior, X[::14], q, jnp.zeros(2))
        >>> posterior.marginals(0)[0].shape, posterior.variance.shape
        ((50,), (50,))
    """

    pytree_data_fields = ("components", "logits", "prior", "relaxation")
    pytree_aux_fields = ("entropy_bound",)
    has_rsample = False  # no derivative by the weights

    def __init__(
        self,
        prior: GaussianProcess,
        inducing: Array,
        q: BlockGaussian,
        logits: Array,
        entropy: str = "pairwise",
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        if entropy not in ENTROPIES:
            raise ValueError(f"entropy must be one of {ENTROPIES}, got {entropy!r}.")
        K = jnp.shape(logits)[0]
        for block in q.blocks:
            if block.mu.shape[0] != K:
                raise ValueError(
                    f"There are {K} logits, but q(u) has {block.mu.shape[0]} components."
                )
        self.prior = prior
        self.logits = logits
        self.entropy_bound = entropy
        expanded = prior.expand((K, *prior.batch_shape))
        self.components = SparsePosterior(expanded, (inducing,), q, jitter)
        super().__init__(prior.batch_shape, prior.event_shape, validate_args=validate_args)

    @property
    def num_components(self) -> int:
        """Number K of components."""
        return jnp.shape(self.logits)[0]

    @property
    def log_weights(self) -> Array:
        r"""Log weights :math:`\log \pi_k`, shape ``(K,)``."""
        return jax.nn.log_softmax(self.logits)

    @property
    def weights(self) -> Array:
        r"""Weights :math:`\pi_k`, shape ``(K,)``."""
        return jax.nn.softmax(self.logits)

    @property
    def inducing(self) -> tuple[Array, ...]:
        """The inducing points."""
        return self.components.inducing

    @property
    def chol(self) -> Array:
        """Lower factor of K_uu."""
        return self.components.chol

    @property
    def jitter_used(self) -> Array:
        """What was added to the diagonal of K_uu."""
        return self.components.jitter_used

    @property
    def jitter(self) -> float | None:
        """Relative jitter asked for."""
        return self.components.jitter

    def marginals(self, component=0) -> tuple[Array, Array]:
        """See :meth:`GPPosterior.marginals`."""
        return self.components.mean[component], self.components.variance[component]

    def relaxed(self, relaxation) -> "MixturePosterior":
        """See :meth:`GPPosterior.relaxed`; all components share q(f | u)."""
        new = super().relaxed(relaxation)
        new.components = self.components.relaxed(relaxation)
        return new

    def bound_marginals(self, component=0) -> tuple[Array, Array]:
        """See :meth:`GPPosterior.bound_marginals`."""
        means, variances = self.components.bound_marginals()
        return means[component], variances[component]

    def relaxation_cost(self, precision=None) -> Array:
        """See :meth:`GPPosterior.relaxation_cost`."""
        return self.components.relaxation_cost(precision)[0]

    def _average(self, values):
        return jnp.tensordot(self.weights.astype(values.dtype), values, axes=1)

    @property
    def mean(self) -> Array:
        """Marginal means of the mixture, shape ``batch_shape + (N,)``."""
        return self._average(self.components.mean)

    @property
    def variance(self) -> Array:
        """Marginal variances of the mixture, shape ``batch_shape + (N,)``."""
        means = self.components.mean
        between = self._average((means - self._average(means)) ** 2)
        return self._average(self.components.variance) + between

    def quantile(self, level) -> Array:
        """See :meth:`GPPosterior.quantile`; by bisection of the distribution function."""
        means, scales = self.components.mean, jnp.sqrt(self.components.variance)
        level = jnp.asarray(level, means.dtype)
        target = level.reshape(*level.shape, *(1,) * (means.ndim - 1))
        axis = level.ndim
        z = jax.scipy.stats.norm.ppf(level).reshape(*level.shape, *(1,) * means.ndim)
        each = means + scales * z

        def halve(_, bounds):
            low, high = bounds
            middle = 0.5 * (low + high)
            z = (jnp.expand_dims(middle, axis) - means) / scales
            weights = self.weights.astype(means.dtype).reshape(-1, *(1,) * (means.ndim - 1))
            below = jnp.sum(weights * jax.scipy.stats.norm.cdf(z), axis=axis) < target
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        # The quantile of a mixture lies among those of its components.
        bounds = jnp.min(each, axis=axis), jnp.max(each, axis=axis)
        low, high = jax.lax.fori_loop(0, 60, halve, bounds)
        return 0.5 * (low + high)

    @property
    def covariance_matrix(self) -> Array:
        """Joint covariance over X, shape ``batch_shape + (N, N)``."""
        means = self.components.mean
        centred = means - self._average(means)
        between = jnp.einsum("...i,...j->...ij", centred, centred)
        return self._average(self.components.covariance_matrix + between)

    def sample(self, key, sample_shape=()) -> Array:
        """
        Joint draws of f(X), O(N^3).

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        key_u, key_f = jax.random.split(key)
        f = self.sample_parametric(key_u, sample_shape)
        return self._with_residual(key_f, f, self.components._residual_covariance())

    def sample_parametric(self, key, sample_shape=()) -> Array:
        """
        Draws of E[f(X) | u] with u from q(u), O(N M).

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        key_k, key_u = jax.random.split(key)
        return self._choose(key_k, self.components.sample_parametric(key_u, sample_shape))

    def _sample_whitened(self, key, sample_shape) -> Array:
        """See :meth:`GPPosterior._sample_whitened`."""
        key_k, key_u = jax.random.split(key)
        return self._choose(key_k, self.components._sample_whitened(key_u, sample_shape))

    def _choose(self, key, draws) -> Array:
        """One of ``draws`` from each component, all latent functions from the same."""
        axis = draws.ndim - len(self.batch_shape) - 2
        k = jax.random.categorical(key, self.logits, shape=draws.shape[:axis])
        index = k.reshape(*k.shape, *(1,) * (draws.ndim - k.ndim))
        return jnp.take_along_axis(draws, index, axis=axis).squeeze(axis=axis)

    def prior_kl(self, rng_key=None) -> Array:
        r"""
        An upper bound of :math:`\mathrm{KL}[q(u) \| p(u)]` (exact for K = 1, unbiased for
        ``entropy="monte_carlo"``), over all latent functions together: shape ``()``.

        :param rng_key: for ``entropy="monte_carlo"``.
        """
        (block,) = self.components.q.blocks
        if rng_key is None:
            rng_key = jax.random.key(0)
        mu = jnp.broadcast_to(
            block.mu, (self.num_components, *self.batch_shape, block.mu.shape[-1])
        )
        block = replace(block, mu=mu)
        return mixture_kl(block, self.log_weights, self.entropy_bound, rng_key)

    def _joint_log_prob(self, value):
        """Over all latent functions together: the batch shape is in the mixture."""
        components = self.components
        L = self._scale_tril(components.covariance_matrix)
        lead = jnp.shape(value)[: jnp.ndim(value) - 1 - len(self.batch_shape)]
        value = jnp.reshape(value, (*lead, 1, *self.shape()))
        log_prob = gaussian_log_prob(value - components.mean, L)
        log_prob = log_prob.reshape(*lead, self.num_components, -1).sum(-1)
        total = logsumexp(log_prob + self.log_weights, axis=-1)
        # One number for all latent functions, shared out among the batch.
        total = total.reshape(*lead, *(1,) * len(self.batch_shape))
        count = math.prod(self.batch_shape)
        return jnp.broadcast_to(total / count, (*lead, *self.batch_shape))

    def expand(self, batch_shape) -> "MixturePosterior":
        """Refused but for the same shape: components are shared by the latents."""
        if tuple(batch_shape) == self.batch_shape:
            return copy.copy(self)
        raise ValueError(
            f"A mixture posterior of batch shape {self.batch_shape} cannot be expanded to "
            f"{tuple(batch_shape)}: its weights belong to all latent functions together."
        )

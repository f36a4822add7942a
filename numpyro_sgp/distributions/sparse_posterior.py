"""q(f(X)) of a sparse Gaussian process, for every q(u) of the families."""

import copy
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from numpyro.distributions.kl import kl_divergence
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_key, check_sample_shape
from numpyro_sgp.distributions import components, dependent, posterior_programs
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.posterior import GPPosterior
from numpyro_sgp.families import QU, Block
from numpyro_sgp.inducing.covariances import cross_covariance
from numpyro_sgp.linalg import at_least, einsum, gaussian_log_prob, jittered_cholesky


class SparsePosterior(GPPosterior):
    r"""
    :math:`q(f(X)) = \int p(f(X) \mid u)\, q(u)\, du` with q(u) of one of the
    :mod:`~numpyro_sgp.families`: a Gaussian of independent blocks, one for each set of
    inducing points (Shi, Titsias & Mnih 2020, eq. 32-34, 37 and 38; one set is the
    posterior of Titsias 2009 and Hensman et al. 2013), or a mixture of such.

    With :math:`L L^\top = K` over the union of the sets, :math:`A = L^{-1} K_{\cdot f}`
    and whitened blocks :math:`N(w_l, P_l P_l^\top)`,

    .. math::

        \mu = m(X) + \sum_l A_l^\top w_l, \qquad
        \Sigma = K_{ff} + \sum_l A_l^\top (P_l P_l^\top - I) A_l .

    Marginals cost :math:`O(N M^2)` and one :math:`M \times M` factorisation, done once,
    when first needed; nothing of size N x N is formed but by
    :attr:`covariance_matrix` and :meth:`sample`, which are joint over X.

    Where latent functions are dependent under q (:class:`~numpyro_sgp.families.Coupled`),
    :attr:`variance` and :attr:`covariance_matrix` are those of each function, and
    :attr:`row_covariance` has the rest.

    The KL divergence from the prior process is :meth:`prior_kl`, registered with NumPyro
    as ``kl_divergence(SparsePosterior, GaussianProcess)``.

    :param prior: the process at X, with ``batch_shape`` Q (or none).
    :param inducing: points of each set, shapes ``(M_l, D)`` or ``(*batch, M_l, D)``.
    :param q: q(u), one of :mod:`~numpyro_sgp.families`.
    :param jitter: relative jitter of the inducing covariance.
    :raises ValueError: if q and the inducing points, or the process, do not fit together.

    **References:**

    1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596
    2. Hensman, Fusi, Lawrence (2013). Gaussian Processes for Big Data. UAI.
       https://arxiv.org/abs/1309.6835

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.families import Block, BlockGaussian
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> q = BlockGaussian((Block(jnp.zeros(4), jnp.eye(4)),))
    >>> prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X)
    >>> posterior = sgp.SparsePosterior(prior, (X[::14],), q)
    >>> posterior.variance.shape, float(posterior.prior_kl())
    ((50,), 0.0)
    """

    pytree_data_fields = ("prior", "inducing", "given_q", "relaxation")
    pytree_aux_fields = ("jitter", "joint_rows", "_sets", "_residual")
    in_programs = True

    def __init__(
        self,
        prior: GaussianProcess,
        inducing: tuple[Array, ...],
        q: QU,
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        self.prior = prior
        self.inducing = tuple(inducing)
        sizes = tuple(points.shape[-2] for points in self.inducing)
        if sizes != q.sizes:
            raise ValueError(
                f"There are {sizes} inducing points in the sets, but q(u) has blocks for "
                f"{q.sizes}."
            )
        q.check_batch(prior.batch_shape)
        self.jitter = jitter
        self._sets = tuple(range(len(sizes)))
        self._residual = True
        self.given_q = q
        super().__init__(prior.batch_shape, prior.event_shape, validate_args=validate_args)

    def _factors(self):
        """
        Factor of K_uu, its jitter, projection and whitened q: made once, when first asked
        for. What an inner trace made of known arrays is not kept beyond it.
        """
        factors = self.__dict__.get("_kept_factors")
        if factors is None:
            factors = posterior_programs.factors_of(self)
            made_of = self.prior, self.inducing, self.given_q
            known = map(not_jax_tracer, jax.tree.leaves(made_of))
            if not_jax_tracer(factors[2]) or not all(known):
                self._kept_factors = factors
        return factors

    def _cross(self, X) -> Array:
        """K_uf at some inputs."""
        return cross_covariance(self.prior.kernel, self.inducing, X)

    @property
    def chol(self) -> Array:
        """Lower factor of K_uu over the union of the sets, ``(*batch, M, M)``."""
        return self._factors()[0]

    @property
    def jitter_used(self) -> Array:
        """What was added to the diagonal of K_uu, shape ``(*batch,)``."""
        return self._factors()[1]

    @property
    def projection(self) -> Array:
        """A = inv(L) K_uf, shape ``(*batch, M, N)``."""
        return self._factors()[2]

    @property
    def q(self) -> QU:
        """q(u) in whitened coordinates."""
        return self._factors()[3]

    def with_parts(self, parts: tuple[Block, ...]) -> "SparsePosterior":
        """
        The same with other Gaussians in the place of ``q.parts``.

        :param parts: whitened blocks of the same sizes.
        """
        q = self.q.with_parts(parts)
        new = copy.copy(self)
        new.given_q, new._kept_factors = q, (*self._factors()[:3], q)
        return new

    # ---- components -----------------------------------------------------------------

    @property
    def num_components(self) -> int:
        """Number K of Gaussian components of q(u)."""
        return self.given_q.num_components

    @property
    def log_weights(self) -> Array:
        """Log weights of the components, shape ``(K,)``."""
        return self.given_q.log_weights.astype(self.prior.X.dtype)

    @property
    def independent_latents(self) -> bool:
        """Whether rows of different latent functions are independent under q."""
        return self.given_q.independent_latents

    @property
    def has_rsample(self) -> bool:
        """Draws of a mixture have no derivative by the weights."""
        return self.num_components == 1

    def marginals(self, component=0) -> tuple[Array, Array]:
        """See :meth:`GPPosterior.marginals`: eq. (33) and (34)."""
        blocks = self.q.component(component).blocks
        return self._mean(blocks), self._variance(blocks)

    def _mean(self, blocks):
        """Eq. (33)."""
        shift = self.q.mean_shift(self.prior.X, self.projection)
        mean = jnp.zeros((), self.projection.dtype) + shift
        for i in self._sets:
            A = self.projection[..., self.q.slices[i], :]
            mean = mean + einsum("...mn,...m->...n", A, blocks[i].mu)
        if self._has_mean:
            mean = mean + self.prior.mean
        return jnp.broadcast_to(mean, self.shape())

    def _variance(self, blocks, relaxation=None):
        """Eq. (34), with what is left open relaxed or not."""
        prior = self.prior.kernel.diag(self.prior.X)
        variance = self._left_open(blocks) if self._residual else jnp.zeros_like(prior)
        if relaxation is not None:
            variance = relaxation.factor * at_least(variance, 0.0)
        for i in self._sets:
            # A set with the prior's covariance is part of what others leave open.
            if not self._cancels(i, blocks[i]):
                A = self.projection[..., self.q.slices[i], :]
                F = A if blocks[i].is_prior else blocks[i].project(A)
                variance = variance + jnp.sum(F**2, axis=-2)
        return self._above_zero(variance, prior)

    def _cancels(self, index, block):
        return self._residual and block.is_prior and index in self._sets

    def _explaining(self, blocks):
        """Rows of the projection of the sets whose covariance is not the prior's."""
        rows = enumerate(self.q.slices)
        kept = [s for i, s in rows if not self._cancels(i, blocks[i])]
        if len(kept) == len(blocks):
            return self.projection
        chosen = np.concatenate([np.arange(s.start, s.stop) for s in kept] or [[]])
        return self.projection[..., chosen.astype(int), :]

    def _left_open(self, blocks):
        """Prior variances that :meth:`_explaining` leaves."""
        explained = jnp.sum(self._explaining(blocks) ** 2, axis=-2)
        return self.prior.kernel.diag(self.prior.X) - explained

    def bound_marginals(self, component=0):
        blocks = self.q.component(component).blocks
        return self._mean(blocks), self._variance(blocks, self.relaxation)

    def relaxation_cost(self, precision=None):
        """See :meth:`GPPosterior.relaxation_cost`; all components share q(f | u)."""
        blocks = self.q.component(0).blocks
        left = at_least(self._left_open(blocks), 0.0)
        cost = self.relaxation.cost(self.prior, self._explaining(blocks), left, precision)
        return jnp.broadcast_to(cost, self.batch_shape)

    def _covariance(self, blocks, rows=slice(None)):
        """Joint covariance over some rows of X, eq. (38)."""
        total = self._residual_covariance(rows) if self._residual else 0.0
        for i in self._sets:
            A = self.projection[..., self.q.slices[i], :][..., rows]
            F = A if blocks[i].is_prior else blocks[i].project(A)
            total = total + einsum("...mi,...mj->...ij", F, F)
        return total

    def _residual_covariance(self, rows=slice(None)):
        """K_ff - A' A: the prior covariance that no set explains."""
        X = self.prior.X[..., rows, :]
        A = self.projection[..., rows]
        return self.prior.kernel(X, X) - einsum("...mi,...mj->...ij", A, A)

    # ---- moments of all components ----------------------------------------------------

    def _of_components(self, combine, *functions) -> Array:
        """Of one component the last function of its blocks, of several all combined."""
        each = [self.q.component(k).blocks for k in range(self.num_components)]
        if len(each) == 1:
            return functions[-1](each[0])
        found = ([function(blocks) for blocks in each] for function in functions)
        return combine(self.log_weights, *found)

    @property
    @posterior_programs.in_one_program
    def mean(self) -> Array:
        """Marginal means, shape ``batch_shape + (N,)``."""
        return self._of_components(components.average, self._mean)

    @property
    @posterior_programs.in_one_program
    def variance(self) -> Array:
        """Marginal variances, shape ``batch_shape + (N,)``."""
        return self._of_components(components.variance, self._mean, self._variance)

    @property
    @posterior_programs.in_one_program
    def covariance_matrix(self) -> Array:
        """Joint covariance over X, shape ``batch_shape + (N, N)``."""
        moments = self._mean, self._covariance
        covariance = self._of_components(components.covariance, *moments)
        return jnp.broadcast_to(covariance, (*self.shape(), *self.event_shape))

    def quantile(self, level) -> Array:
        """See :meth:`GPPosterior.quantile`; by bisection of the cdf of a mixture."""
        if self.num_components == 1:
            return super().quantile(level)
        quantile = partial(components.quantile, level)
        return self._of_components(quantile, self._mean, self._variance)

    # ---- dependent latent functions ---------------------------------------------------

    @property
    def row_covariance(self) -> Array:
        """Covariance of the Q latent functions at each row, shape ``(N, Q, Q)``."""
        if self.independent_latents:
            return dependent.with_variances(0.0, self.variance)
        (block,) = blocks = self.q.component(0).blocks
        prior = self.prior.kernel.diag(self.prior.X)
        left = self._above_zero(self._left_open(blocks), prior)
        return dependent.row_covariance(block, self.projection, left)

    def place(self, x: Array, component=0, added: Array | None = None) -> Array:
        """
        See :meth:`GPPosterior.place`; dependent functions are correlated in a row.

        :param added: to the variances of dependent functions, ``batch_shape + (N,)``.
        """
        if self.independent_latents:
            return super().place(x, component)
        covariance = self.row_covariance
        if added is not None:
            covariance = dependent.with_variances(covariance, added)
        return self.mean + dependent.place(jnp.broadcast_to(x, self.shape()), covariance)

    @property
    def _draws_groups(self):
        return self.independent_latents and self.num_components == 1

    def _joint_noise(self, x: Array) -> Array:
        """
        Draws around the mean whose rows are correlated within groups of ``joint_rows``;
        the covariance of one group is held at a time.

        :param x: standard normal numbers, shape ``batch_shape + (N,)``.
        """
        size = jnp.mean(self.prior.kernel.diag(self.prior.X), axis=-1)
        blocks = self.q.component(0).blocks

        def one(rows):
            covariance = self._covariance(blocks, rows)
            L, _ = jittered_cholesky(covariance, self.prior.jitter, size)
            return einsum("...ij,...j->...i", L, x[..., rows])

        groups = jnp.arange(x.shape[-1]).reshape(-1, self.joint_rows)
        noise = jax.lax.map(jax.checkpoint(one), groups)  # [G, *batch, rows]
        return jnp.moveaxis(noise, 0, -2).reshape(x.shape)

    # ---- draws ------------------------------------------------------------------------

    def sample(self, key, sample_shape=()) -> Array:
        """
        Joint draws of f(X): smooth functions, O(N^3).

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        check_key(key, "key")
        return self._sample(key, static=(check_sample_shape(sample_shape),))

    @posterior_programs.in_one_program
    def _sample(self, key, sample_shape):
        key_u, key_f = jax.random.split(key)
        f = self.sample_parametric(key_u, sample_shape)
        if not self._residual:
            return f
        return self._with_residual(key_f, f, self._residual_covariance())

    def residual_factor(self) -> Array:
        """
        Lower factor of the covariance of f(X) given u, :math:`K_{ff} - A^\\top A`, O(N^3).

        :return: shape ``(*batch, N, N)``.
        """
        return self._scale_tril(self._residual_covariance())

    def sample_parametric(self, key, sample_shape=()) -> Array:
        """
        Draws of E[f(X) | u] with u from q(u): a smooth part of :meth:`sample` that costs
        only O(N M).

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        u = self._sample_whitened(key, sample_shape)
        f = einsum("...mn,...m->...n", self.projection, u)
        f = f + self.q.mean_shift(self.prior.X, self.projection)
        if self._has_mean:
            f = f + self.prior.mean
        return jnp.broadcast_to(f, self.shape(sample_shape))

    @property
    def _has_mean(self) -> bool:
        return 0 in self._sets

    def _sample_whitened(self, key, sample_shape) -> Array:
        """See :meth:`GPPosterior._sample_whitened`; zero for the sets left out."""
        u = self.q.draw(key, sample_shape, self.batch_shape)
        for i, rows in enumerate(self.q.slices):
            u = u if i in self._sets else u.at[..., rows].set(0.0)
        return u

    def _with_fixed_part(self, points, weights):
        return self.q.kernel_functions(points, weights)

    # ---- densities and parts ------------------------------------------------------------

    def prior_kl(self, rng_key=None) -> Array:
        r"""
        :math:`\mathrm{KL}[q(f, u) \| p(f, u)] = \mathrm{KL}[q(u) \| p(u)]`, the sum of
        eq. (35) and (36), or what the family has in its place (a bound for mixtures);
        shape ``batch_shape``, or ``()`` where latent functions belong together.

        :param rng_key: for the families whose KL is drawn.
        """
        kl = self.q.kl(rng_key, self._sets)
        if self._belong_together:
            return kl
        return jnp.broadcast_to(kl, self.batch_shape)

    @property
    def _belong_together(self):
        """Whether q(u) is not a product over the latent functions."""
        return self.num_components > 1 or not self.independent_latents

    def _joint_log_prob(self, value):
        if not self._belong_together:
            return super()._joint_log_prob(value)
        lead = jnp.shape(value)[: jnp.ndim(value) - 1 - len(self.batch_shape)]
        log_prob = [
            log_weight + self._log_prob_of(self.q.component(k).blocks, value, lead)
            for k, log_weight in enumerate(self.log_weights)
        ]
        # One number for all latent functions, shared out among the batch.
        total = logsumexp(jnp.stack(log_prob), axis=0) / math.prod(self.batch_shape)
        total = total.reshape(*lead, *(1,) * len(self.batch_shape))
        return jnp.broadcast_to(total, (*lead, *self.batch_shape))

    def _log_prob_of(self, blocks, value, lead):
        """Log density of all latent functions under one component, shape ``lead``."""
        centred = value - self._mean(blocks)
        if self.independent_latents:
            L = self._scale_tril(self._covariance(blocks))
            return gaussian_log_prob(centred, L).reshape(*lead, -1).sum(-1)
        (block,), shape = blocks, (*self.shape(), *self.event_shape)
        residual = jnp.broadcast_to(self._residual_covariance(), shape)
        total = dependent.joint_covariance(block, self.projection, residual)
        size = jnp.mean(self.prior.kernel.diag(self.prior.X))
        L, _ = jittered_cholesky(total, self.prior.jitter, size)
        return gaussian_log_prob(centred.reshape(*lead, -1), L)

    def parallel(self) -> "SparsePosterior":
        r"""
        The part :math:`f_\parallel = m(X) + K_{fu} K_{uu}^{-1} u` of the first set alone
        (eq. 4-6): a distribution over its values at X.

        :raises NotImplementedError: if latent functions do not have a q(u) of their own.
        """
        return self._part((0,), residual=False)

    def orthogonal(self) -> "SparsePosterior":
        r"""
        The part :math:`f_\perp` that is independent of the first set a priori (eq. 7).

        :raises NotImplementedError: as :meth:`parallel`.
        """
        return self._part(self._sets[1:], residual=True)

    def _part(self, sets, residual):
        if self._belong_together:
            raise NotImplementedError(
                "parallel() and orthogonal() are for latent functions with a Gaussian q(u) "
                "of their own."
            )
        part = copy.copy(self)
        part._sets, part._residual = tuple(sets), residual
        *factors, q = self._factors()
        part.given_q = part.given_q.keep(sets, residual)
        part._kept_factors = (*factors, q.keep(sets, residual))
        return part

    def expand(self, batch_shape) -> "SparsePosterior":
        """
        Independent posteriors with the same parameters; nothing is copied.

        :raises ValueError: if latent functions do not have a q(u) of their own.
        """
        if tuple(batch_shape) == self.batch_shape:
            return copy.copy(self)
        if self._belong_together:
            raise ValueError(
                f"A posterior of batch shape {self.batch_shape} cannot be expanded to "
                f"{tuple(batch_shape)}: its q(u) is over all latent functions together."
            )
        return super().expand(batch_shape)


@kl_divergence.register(SparsePosterior, GaussianProcess)
def _kl_sparse_posterior_prior(q: SparsePosterior, p: GaussianProcess) -> Array:
    """KL[q(f, u) || p(f, u)]; q was made from p, so that their kernels agree."""
    if q.num_components > 1:
        raise NotImplementedError("The KL divergence of a mixture has no closed form.")
    return q.prior_kl()

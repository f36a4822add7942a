"""q(f(X)) of a sparse Gaussian process: one class for SVGP, ODVGP and SOLVE-GP."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions.kl import kl_divergence
from numpyro.util import not_jax_tracer

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.posterior import GPPosterior
from numpyro_sgp.families import Block, BlockGaussian, DualGaussian, SiteGaussian
from numpyro_sgp.inducing.covariances import cross_covariance, inducing_covariance
from numpyro_sgp.linalg import jittered_cholesky, whitened_solve


class SparsePosterior(GPPosterior):
    r"""
    :math:`q(f(X)) = \int p(f(X) \mid u)\, q(u)\, du` with q(u) a Gaussian of independent
    blocks, one for each set of inducing points (Shi, Titsias & Mnih 2020, eq. 32-34, 37
    and 38; one set is the posterior of Titsias 2009 and Hensman et al. 2013).

    With :math:`L L^\top = K` over the union of the sets, :math:`A = L^{-1} K_{\cdot f}`
    and whitened blocks :math:`N(w_l, P_l P_l^\top)`,

    .. math::

        \mu = m(X) + \sum_l A_l^\top w_l, \qquad
        \Sigma = K_{ff} + \sum_l A_l^\top (P_l P_l^\top - I) A_l .

    Marginals cost :math:`O(N M^2)` and one :math:`M \times M` factorisation, done once,
    when first needed; nothing of size N x N is formed but by
    :attr:`covariance_matrix` and :meth:`sample`, which are joint over X.

    The KL divergence from the prior process is :meth:`prior_kl`, registered with NumPyro
    as ``kl_divergence(SparsePosterior, GaussianProcess)``.

    :param prior: the process at X, with ``batch_shape`` Q (or none).
    :param inducing: points of each set, shapes ``(M_l, D)`` or ``(*batch, M_l, D)``.
    :param q: q(u), one block for each set; or, for one set, by the sites of Theorem 2 of
        SAVIGP or by dual parameters.
    :param jitter: relative jitter of the inducing covariance.

    **References:**

    1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596
    2. Hensman, Fusi, Lawrence (2013). Gaussian Processes for Big Data. UAI.
       https://arxiv.org/abs/1309.6835

    **Example:**

    .. doctest::

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

    _draws_groups = True

    pytree_data_fields = ("prior", "inducing", "given_q", "relaxation")
    pytree_aux_fields = ("jitter", "joint_rows", "_sets", "_residual")

    def __init__(
        self,
        prior: GaussianProcess,
        inducing: tuple[Array, ...],
        q: BlockGaussian | DualGaussian | SiteGaussian,
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
            prior = self.prior
            # The block factorisation of Algorithm 1, lines 2-4, is that of the union.
            Kuu = inducing_covariance(prior.kernel, self.inducing)
            Kuf = cross_covariance(prior.kernel, self.inducing, prior.X)
            chol, jitter, projection = whitened_solve(Kuu, Kuf, self.jitter)
            q = self.given_q.whitened(chol, self._cross)
            factors = chol, jitter, projection, q
            made_of = prior, self.inducing, self.given_q
            known = map(not_jax_tracer, jax.tree.leaves(made_of))
            if not_jax_tracer(factors[2]) or not all(known):
                self._kept_factors = factors
        return factors

    def _cross(self, X) -> Array:
        """K_uf at other inputs."""
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
    def q(self) -> BlockGaussian:
        """q(u) in whitened coordinates."""
        return self._factors()[3]

    @property
    def independent_blocks(self) -> tuple[Block, ...]:
        """q(u) in whitened coordinates as Gaussians that are independent of each other."""
        return self.q.blocks

    def with_blocks(self, blocks: tuple[Block, ...]) -> "SparsePosterior":
        """
        The same with other Gaussians in the place of :attr:`independent_blocks`.

        :param blocks: whitened blocks of the same sizes.
        """
        q = BlockGaussian(tuple(blocks))
        new = copy.copy(self)
        new.given_q, new._kept_factors = q, (*self._factors()[:3], q)
        return new

    def _blocks(self):
        """(A_l, block l) of the sets that this distribution is made of."""
        for i in self._sets:
            yield self.projection[..., self.q.slices[i], :], self.q.blocks[i]

    @property
    def mean(self) -> Array:
        """Marginal means, eq. (33), shape ``batch_shape + (N,)``."""
        mean = jnp.zeros(self.event_shape, self.projection.dtype)
        for A, block in self._blocks():
            mean = mean + jnp.einsum("...mn,...m->...n", A, block.mu)
        if self._has_mean:
            mean = mean + self.prior.mean
        return jnp.broadcast_to(mean, self.shape())

    @property
    def variance(self) -> Array:
        """Marginal variances, eq. (34), shape ``batch_shape + (N,)``."""
        prior = self.prior.kernel.diag(self.prior.X)
        # Exact arithmetic stays above zero; the floor takes the square root's rounding
        # errors where the data pin f down to the last digits.
        floor = jnp.finfo(prior.dtype).eps * prior
        variance = prior if self._residual else jnp.zeros_like(prior)
        if self._residual:
            # What the sets explain a priori; the parts of a set that keeps its prior
            # covariance come back below and cancel, so they are left out.
            variance = variance - jnp.sum(self._explaining**2, axis=-2)
        for i in self._sets:
            block = self.q.blocks[i]
            if self._cancels(i, block):
                continue
            A = self.projection[..., self.q.slices[i], :]
            F = A if block.is_prior else block.project(A)
            variance = variance + jnp.sum(F**2, axis=-2)
        return jnp.broadcast_to(jnp.maximum(variance, floor), self.shape())

    @property
    def _explaining(self):
        """Rows of the projection of the sets whose covariance is not the prior's."""
        blocks = enumerate(self.q.blocks)
        kept = [self.q.slices[i] for i, b in blocks if not self._cancels(i, b)]
        if len(kept) == len(self.q.blocks):
            return self.projection
        rows = np.concatenate([np.arange(s.start, s.stop) for s in kept] or [[]])
        return self.projection[..., rows.astype(int), :]

    def bound_marginals(self, component=0):
        """See :meth:`GPPosterior.bound_marginals`."""
        if self.relaxation is None:
            return self.marginals(component)
        prior = self.prior.kernel.diag(self.prior.X)
        variance = self.relaxation.factor * self._residual_variance
        for A, block in self._blocks():
            if not block.is_prior:  # else it is part of what is relaxed
                variance = variance + jnp.sum(block.project(A) ** 2, axis=-2)
        floor = jnp.finfo(prior.dtype).eps * prior
        return self.mean, jnp.broadcast_to(jnp.maximum(variance, floor), self.shape())

    @property
    def _residual_variance(self):
        """Prior variances that :attr:`_explaining` leaves open."""
        prior = self.prior.kernel.diag(self.prior.X)
        return jnp.maximum(prior - jnp.sum(self._explaining**2, axis=-2), 0.0)

    def relaxation_cost(self, precision=None):
        """See :meth:`GPPosterior.relaxation_cost`."""
        cost = self.relaxation.cost(
            self.prior, self._explaining, self._residual_variance, precision
        )
        return jnp.broadcast_to(cost, self.batch_shape)

    def _cancels(self, index, block):
        return self._residual and block.is_prior and index in self._sets

    @property
    def covariance_matrix(self) -> Array:
        """Joint covariance over X, eq. (38), shape ``batch_shape + (N, N)``."""
        num_rows = self.event_shape[0]
        shape = (*self.batch_shape, num_rows, num_rows)
        return jnp.broadcast_to(self._covariance(), shape)

    def _covariance(self, rows=slice(None)):
        """Joint covariance over some rows of X."""
        total = self._residual_covariance(rows) if self._residual else 0.0
        for A, block in self._blocks():
            A = A[..., rows]
            F = A if block.is_prior else block.project(A)
            total = total + jnp.einsum("...mi,...mj->...ij", F, F)
        return total

    def _residual_covariance(self, rows=slice(None)):
        """K_ff - A' A: the prior covariance that no set explains."""
        X = self.prior.X[..., rows, :]
        A = self.projection[..., rows]
        return self.prior.kernel(X, X) - jnp.einsum("...mi,...mj->...ij", A, A)

    def _joint_noise(self, x: Array) -> Array:
        """
        Draws around the mean whose rows are correlated within groups of ``joint_rows``;
        the covariance of one group is held at a time.

        :param x: standard normal numbers, shape ``batch_shape + (N,)``.
        """
        size = jnp.mean(self.prior.kernel.diag(self.prior.X), axis=-1)

        def one(rows):
            L, _ = jittered_cholesky(self._covariance(rows), self.prior.jitter, size)
            return jnp.einsum("...ij,...j->...i", L, x[..., rows])

        groups = jnp.arange(x.shape[-1]).reshape(-1, self.joint_rows)
        noise = jax.lax.map(jax.checkpoint(one), groups)  # [G, *batch, rows]
        return jnp.moveaxis(noise, 0, -2).reshape(x.shape)

    def sample(self, key, sample_shape=()) -> Array:
        """
        Joint draws of f(X): smooth functions, O(N^3).

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        key_u, key_f = jax.random.split(key)
        f = self.sample_parametric(key_u, sample_shape)
        if not self._residual:
            return f
        return self._with_residual(key_f, f, self._residual_covariance())

    def sample_parametric(self, key, sample_shape=()) -> Array:
        """
        Draws of E[f(X) | u] with u from q(u): a smooth part of :meth:`sample` that costs
        only O(N M).

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        f = jnp.broadcast_to(self.mean, self.shape(sample_shape))
        keys = jax.random.split(key, len(self.q.blocks))
        for i, (A, block) in zip(self._sets, self._blocks(), strict=True):
            shape = (*sample_shape, *self.batch_shape, block.size)
            noise = jax.random.normal(keys[i], shape, f.dtype)
            F = A if block.is_prior else block.project(A)
            f = f + jnp.einsum("...mn,...m->...n", F, noise)
        return f

    @property
    def _has_mean(self) -> bool:
        return 0 in self._sets

    def _sample_whitened(self, key, sample_shape) -> Array:
        """See :meth:`GPPosterior._sample_whitened`; zero for the sets left out."""
        draws = []
        keys = jax.random.split(key, len(self.q.blocks))
        for i, block in enumerate(self.q.blocks):
            shape = (*sample_shape, *self.batch_shape, block.size)
            if i not in self._sets:
                draws.append(jnp.zeros(shape, block.mu.dtype))
                continue
            noise = jax.random.normal(keys[i], shape, block.mu.dtype)
            if block.is_diagonal:
                noise = block.sqrt * noise
            elif not block.is_prior:
                noise = jnp.einsum("...mk,...k->...m", block.sqrt, noise)
            draws.append(block.mu + noise)
        return jnp.concatenate(draws, axis=-1)

    def prior_kl(self, rng_key=None) -> Array:
        r"""
        :math:`\mathrm{KL}[q(f, u) \| p(f, u)] = \mathrm{KL}[q(u) \| p(u)]`, the sum of
        eq. (35) and (36); shape ``batch_shape``.
        """
        kl = jnp.zeros((), self.projection.dtype)
        for _, block in self._blocks():
            kl = kl + block.kl()
        return jnp.broadcast_to(kl, self.batch_shape)

    def parallel(self) -> "SparsePosterior":
        r"""
        The part :math:`f_\parallel = m(X) + K_{fu} K_{uu}^{-1} u` of the first set alone
        (eq. 4-6): a distribution over its values at X.
        """
        return self._part((0,), residual=False)

    def orthogonal(self) -> "SparsePosterior":
        r"""
        The part :math:`f_\perp` that is independent of the first set a priori (eq. 7).
        """
        return self._part(self._sets[1:], residual=True)

    def _part(self, sets, residual):
        self._factors()  # kept by the copy
        part = copy.copy(self)
        part._sets, part._residual = tuple(sets), residual
        return part

    def expand(self, batch_shape) -> "SparsePosterior":
        """Independent posteriors with the same parameters; nothing is copied."""
        expanded = copy.copy(self)
        expanded.prior = self.prior.expand(batch_shape)
        expanded._batch_shape = tuple(batch_shape)
        return expanded


@kl_divergence.register(SparsePosterior, GaussianProcess)
def _kl_sparse_posterior_prior(q: SparsePosterior, p: GaussianProcess) -> Array:
    """KL[q(f, u) || p(f, u)]; q was made from p, so that their kernels agree."""
    return q.prior_kl()

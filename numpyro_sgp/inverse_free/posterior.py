"""q(f(X)) without a factor of K_uu: the posteriors of inverse-free bounds."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions.kl import kl_divergence
from numpyro.util import not_jax_tracer

from numpyro_sgp.distributions.function_samples import FunctionSamples
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.posterior import GPPosterior
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.families import Block, BlockGaussian
from numpyro_sgp.inducing import InducingVariables
from numpyro_sgp.inducing.covariances import cross_covariance, inducing_covariance
from numpyro_sgp.inverse_free.iterations import InverseRoot, inverse_root
from numpyro_sgp.inverse_free.log_det import log_det
from numpyro_sgp.linalg import (
    at_least,
    half_log_det,
    jittered_cholesky,
    matmul,
    with_jitter,
)

BOUNDS = ("relaxed", "lc", "fr")
# What preconditions determinants need not be accurate, but better than any start of T:
# conjugate gradients must arrive within their steps for gradients to have no bias.
_inverse_root = partial(inverse_root, tol=0.1, max_steps=30)


class InverseFreePosterior(GPPosterior):
    r"""
    :math:`q(f(X)) = \int p(f(X) \mid u)\, q^*(u)\, du` in a parameterisation that needs
    products with :math:`K = K_{uu} + \epsilon I` only [1]: with a symmetric T in the place
    of :math:`K^{-1}` (eq. 5, 7 and 10 of [1]),

    .. math::

        \mu = m(X) + K_{fu} \hat m, \qquad
        \Sigma = K_{ff} + K_{fu} C K_{uf}, \qquad
        C = T K T - 2 T + \hat S, \qquad
        q^*(u) = N(K \hat m, K + K C K) .

    T is given by a lower triangular root, :math:`T = L_T L_T^\top`. Marginals take four
    products of an M x M with an M x N matrix: with :math:`L_T^\top`, :math:`L_T`, K, and
    the factor of :math:`\hat S` (where :math:`\tilde S` is diagonal: three).

    What ``bound`` says is what :math:`\hat S` is, and how the KL from the prior is taken:

    - ``"lc"``, for log-concave likelihoods: :math:`\hat S = L L^\top` is free. The KL is
      that of :math:`N(K \hat m, K \hat S K)`, eq. (12), which is not :math:`q^*`: a bound
      because larger variances lower the expectation of a concave function.
    - ``"fr"``, for all likelihoods: the same with the KL of :math:`q^*(u)`, eq. (11).
    - ``"relaxed"`` [2], for all likelihoods: :math:`\hat S = T \tilde S T` with T near the
      inverse of :math:`\tilde K = K + \tilde S`, so that
      :math:`C = T \tilde K T - 2 T \approx -\tilde K^{-1}`. With :math:`G = L_T^\top K L_T`
      and :math:`H = L_T^\top R`, :math:`\tilde S = R R^\top`, the KL of :math:`q^*` is at
      most

      .. math::

          \tfrac12 \bigl[ \hat m^\top K \hat m + \mathrm{tr}(G^2 + G H H^\top)
              - \mathrm{tr}(G) + \mathrm{tr}(H H^\top) - M
              - \log |T| - \log |\tilde S| \bigr] ,

      with equality where :math:`T = \tilde K^{-1}`. No determinant is taken but those of
      triangular matrices.

    :param prior: the process at X, with ``batch_shape`` Q (or none).
    :param inducing: points Z, shape ``(M, D)`` or ``(*batch, M, D)``.
    :param weights: :math:`\hat m`, shape ``(*batch, M)``.
    :param root: :math:`L_T`, shape ``(*batch, M, M)``.
    :param factor: L, or R where ``bound`` is ``"relaxed"``, lower triangular,
        ``(*batch, M, M)``; a diagonal one as ``(*batch, M)``.
    :param bound: one of the above.
    :param num_probes: number of random vectors in :meth:`prior_kl` with a key; None to
        take traces and determinants exactly.
    :param jitter: relative jitter of K_uu; by dtype if None.
    :param iteration: how the iteration for ``root`` ended, where there was one; the next
        one starts there.
    :raises ValueError: if ``bound`` is not known or shapes do not fit together.

    **References:**

    1. van der Wilk, John, Artemev, Hensman (2019). Variational Gaussian Process Models
       without Matrix Inverses. AABI.
    2. Cortinovis, Aitchison, Eleftheriadis, van der Wilk (2026). Inverse-Free Sparse
       Variational Gaussian Processes. AISTATS. https://arxiv.org/abs/2604.00697

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X)
    >>> root = 0.3 * jnp.eye(4)  # any T gives a posterior, and a bound
    >>> posterior = sgp.InverseFreePosterior(
    ...     prior, X[::14], jnp.ones(4), root, 0.2 * jnp.ones(4), "relaxed"
    ... )
    >>> posterior.variance.shape, bool(posterior.prior_kl() > 0)
    ((50,), True)
    """

    pytree_data_fields = (
        "prior",
        "inducing",
        "weights",
        "root",
        "factor",
        "iteration",
        "relaxation",
    )
    pytree_aux_fields = ("bound", "num_probes", "jitter")

    def __init__(
        self,
        prior: GaussianProcess,
        inducing: Array | InducingVariables,
        weights: Array,
        root: Array,
        factor: Array,
        bound: str = "relaxed",
        num_probes: int | None = None,
        jitter: float | None = None,
        iteration: InverseRoot | None = None,
        *,
        validate_args: bool | None = None,
    ):
        if bound not in BOUNDS:
            raise ValueError(f"bound must be one of {BOUNDS}, got {bound!r}.")
        num_points = jnp.shape(inducing)[-2]
        square = (num_points, num_points)
        shapes = [jnp.shape(value) for value in (weights, root, factor)]
        is_diagonal = len(shapes[2]) == len(shapes[0])
        if (
            shapes[0][-1:] != square[1:]
            or shapes[1][-2:] != square
            or shapes[2][-1 if is_diagonal else -2 :] != square[is_diagonal:]
        ):
            raise ValueError(
                f"There are {num_points} inducing points, so weights, root and factor must "
                f"end in the shapes ({num_points},), {square} and {square} (or "
                f"({num_points},)), got {shapes[0]}, {shapes[1]} and {shapes[2]}."
            )
        self.prior = prior
        self.inducing: tuple[Any, ...] = (inducing,)
        self.weights = weights
        self.root = root
        self.factor = factor
        self.bound = bound
        self.num_probes = num_probes
        self.jitter = jitter
        self.iteration = iteration
        super().__init__(prior.batch_shape, prior.event_shape, validate_args=validate_args)

    def _covariances(self):
        """
        K_uu with its jitter, ``(*batch, M, M)``, and K_uf, ``(*batch, M, N)``: made once,
        when first asked for. What an inner trace made of known arrays is not kept.
        """
        kept = self.__dict__.get("_kept")
        if kept is None:
            kernel, X = self.prior.kernel, self.prior.X
            K = with_jitter(inducing_covariance(kernel, self.inducing), self.jitter)
            kept = K, cross_covariance(kernel, self.inducing, X)
            known = map(not_jax_tracer, jax.tree.leaves((self.prior, self.inducing)))
            if not_jax_tracer(kept[1]) or not all(known):
                self._kept = kept
        return kept

    @property
    def mean(self) -> Array:
        """Marginal means, eq. (7), shape ``batch_shape + (N,)``."""
        _, k = self._covariances()
        mean = matmul(self.weights[..., None, :], k)[..., 0, :]
        return jnp.broadcast_to(mean + self.prior.mean, self.shape())

    def _parts(self):
        """``L_T' k``, ``T k``, ``K T k`` and the factor of ``k' S_hat k``."""
        K, k = self._covariances()
        P = matmul(self.root.mT, k)
        a = matmul(self.root, P)
        F = self._factor_times(a if self.bound == "relaxed" else k)
        return P, a, matmul(K, a), F

    def _factor_times(self, A, transpose=True):
        """``factor' A``, or ``factor A``."""
        if self._is_diagonal:
            return self.factor[..., None] * A
        return matmul(self.factor.mT if transpose else self.factor, A)

    @property
    def _is_diagonal(self):
        return jnp.ndim(self.factor) == jnp.ndim(self.weights)

    @property
    def _log_factor(self):
        """log|factor|."""
        if self._is_diagonal:
            return jnp.sum(jnp.log(self.factor), axis=-1)
        return half_log_det(self.factor)

    def _variances(self):
        """
        What T leaves of the prior variances, at least what Z leaves of them, eq. (5), and
        what S_hat adds to that, eq. (7).
        """
        prior = self.prior.kernel.diag(self.prior.X)
        P, a, Ka, F = self._parts()
        rest = prior - 2.0 * jnp.sum(P**2, axis=-2) + jnp.sum(a * Ka, axis=-2)
        return rest, jnp.sum(F**2, axis=-2)

    @property
    def variance(self) -> Array:
        """Marginal variances, eq. (5) and (7), shape ``batch_shape + (N,)``."""
        prior = self.prior.kernel.diag(self.prior.X)
        return self._above_zero(sum(self._variances()), prior)

    def bound_marginals(self, component: ArrayLike = 0) -> tuple[Array, Array]:
        if self.relaxation is None:
            return self.marginals(component)
        rest, added = self._variances()
        rest = at_least(rest, 0.0)
        variance = self.relaxation.factor * rest + added
        prior = self.prior.kernel.diag(self.prior.X)
        return self.mean, self._above_zero(variance, prior)

    def relaxation_cost(self, precision: Array | None = None) -> Array:
        """See :meth:`GPPosterior.relaxation_cost`; of eq. (5) in the place of d_n."""
        rest = at_least(self._variances()[0], 0.0)
        relaxation: Any = self.relaxation
        cost = relaxation.cost(self.prior, None, rest, precision)
        return jnp.broadcast_to(cost, self.batch_shape)

    @property
    def covariance_matrix(self) -> Array:
        """Joint covariance over X, shape ``batch_shape + (N, N)``."""
        P, a, Ka, F = self._parts()
        total = self.prior.kernel(self.prior.X, self.prior.X)
        total = total - 2.0 * matmul(P.mT, P) + matmul(a.mT, Ka) + matmul(F.mT, F)
        num_rows = self.event_shape[0]
        return jnp.broadcast_to(total, (*self.batch_shape, num_rows, num_rows))

    # ---- the KL -------------------------------------------------------------------

    def prior_kl(self, rng_key: Array | None = None) -> Array:
        """
        The KL of the bound, see the class; shape ``batch_shape``.

        With a key and ``num_probes`` it is estimated, by products alone. Gradients have no
        bias, nor has the value of ``"relaxed"``; that of ``"lc"`` and ``"fr"`` has the
        error of :func:`~numpyro_sgp.inverse_free.log_det`. Else it is exact, and
        ``"lc"`` and ``"fr"`` factorise K.

        :param rng_key: of the random vectors.
        """
        num_points, dtype = self.weights.shape[-1], self.weights.dtype
        if rng_key is not None and self.num_probes is not None:
            key_trace, key_det = jax.random.split(rng_key)
            # Hutchinson's estimate of a trace; eq. (12) ff. of [1] leave out its 1/H.
            r = jax.random.rademacher(key_trace, (num_points, self.num_probes), dtype)
            r = r / math.sqrt(self.num_probes)
        elif self.bound == "relaxed":
            r = jnp.eye(num_points, dtype=dtype)  # the traces themselves
        else:
            return jnp.broadcast_to(self._exact_kl(), self.batch_shape)
        K, L = self._covariances()[0], self.root
        total = jnp.sum(self.weights * matmul(K, self.weights[..., None])[..., 0], axis=-1)
        if self.bound != "lc":
            v = matmul(L, r)
            g = matmul(L.mT, matmul(K, v))  # G r
        if self.bound == "relaxed":
            h = self._factor_times(v)  # H' r
            total = total + _sum(g * g - r * g + h * h) - num_points
            total = total + _sum(g * matmul(L.mT, self._factor_times(h, transpose=False)))
            total = total - 2.0 * (half_log_det(L) + self._log_factor)
        else:
            v = self._factor_times(r, transpose=False)
            total = total + _sum(v * matmul(K, v))
        if self.bound == "lc":
            # T itself may be far from the inverse, and conjugate gradients then too slow.
            L = _inverse_root(K, L).root
            total = total - _drawn_log_det(key_det, K, L, self.num_probes)
            total = total - num_points - 2.0 * self._log_factor
        if self.bound == "fr":
            S, P = self._optimal_covariance()
            # The same random vectors, so that errors cancel where q(u) is near the prior.
            K, L = jnp.broadcast_to(K, S.shape), _inverse_root(K, L).root
            total = total - _drawn_log_det(key_det, S, P, self.num_probes)
            total = total + _drawn_log_det(key_det, K, L, self.num_probes)
            total = total + _sum(g * (g - 2.0 * r))
        return jnp.broadcast_to(0.5 * total, self.batch_shape)

    def _optimal_covariance(self):
        """The covariance of q*(u), eq. (10), and a preconditioner for it."""
        K, _ = self._covariances()
        B = matmul(self.root.mT, K)
        a = matmul(self.root, B)  # T K
        F = self._factor_times(K)
        S = K - 2.0 * matmul(B.mT, B) + matmul(a.mT, matmul(K, a)) + matmul(F.mT, F)
        return S, _inverse_root(S, self.root).root

    def _exact_kl(self):
        """Eq. (12), or the KL of q*(u)."""
        if self.bound == "fr":
            return self.as_sparse_posterior().prior_kl()
        L = self.chol
        F, m = self._factor_times(L), matmul(L.mT, self.weights[..., None])
        total = _sum(F**2) + _sum(m**2) - self.weights.shape[-1]
        return 0.5 * total - half_log_det(L) - self._log_factor

    # ---- joint draws, by way of a factor of K_uu ------------------------------------

    @property
    def chol(self) -> Array:
        """Lower factor of K_uu, ``(*batch, M, M)``: not used in training."""
        Kuu = inducing_covariance(self.prior.kernel, self.inducing)
        return jittered_cholesky(Kuu, self.jitter)[0]

    def as_sparse_posterior(self) -> SparsePosterior:
        r"""
        The same distribution over functions, with whitened :math:`q^*(u)` in its usual
        parameters, :math:`N(L^\top \hat m, (I - L^\top T L)^2 + L^\top \hat S L)` where
        :math:`L L^\top = K`.

        Its KL is that of :math:`q^*(u)`: for ``"fr"`` that of the bound, for the others
        another one.
        """
        L = self.chol
        P = matmul(self.root.mT, L)
        rest = jnp.eye(L.shape[-1], dtype=L.dtype) - matmul(P.mT, P)
        F = self._factor_times(matmul(self.root, P) if self.bound == "relaxed" else L)
        S = matmul(rest, rest) + matmul(F.mT, F)
        # Jitter only where rounding has left S without a factor; it is relative to I.
        sqrt, _ = jittered_cholesky(S, 0.0, jnp.ones(S.shape[:-2], S.dtype))
        mean = matmul(L.mT, self.weights[..., None])[..., 0]
        q = BlockGaussian((Block(mean, sqrt),))
        return SparsePosterior(self.prior, self.inducing, q, self.jitter)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.as_sparse_posterior().sample(key, sample_shape)

    def sample_parametric(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.as_sparse_posterior().sample_parametric(key, sample_shape)

    def sample_functions(self, *args, **kwargs) -> FunctionSamples:
        return self.as_sparse_posterior().sample_functions(*args, **kwargs)

    def parallel(self) -> SparsePosterior:
        return self.as_sparse_posterior().parallel()

    def orthogonal(self) -> SparsePosterior:
        return self.as_sparse_posterior().orthogonal()


@kl_divergence.register(InverseFreePosterior, GaussianProcess)
def _kl_inverse_free_prior(q: InverseFreePosterior, p: GaussianProcess) -> Array:
    """
    The KL of q*(u), which is that of the bound for ``"fr"``; q was made from p, so that
    their kernels agree.
    """
    if q.bound != "fr":
        raise ValueError(
            f"What bound={q.bound!r} takes from the expectation is not the KL of the "
            "posterior, but of another one or more than it. Use TraceGP_ELBO, for whose "
            "bound it is, or as_sparse_posterior(), whose KL is that of the posterior."
        )
    return q.prior_kl()


def _sum(A):
    return jnp.sum(A, axis=(-2, -1))


def _drawn_log_det(key, K, preconditioner, num_probes):
    """:func:`log_det` of each matrix of a batch, with random vectors of its own."""
    batch = jnp.broadcast_shapes(K.shape[:-2], preconditioner.shape[:-2])
    each = [jnp.broadcast_to(A, (*batch, *A.shape[-2:])) for A in (K, preconditioner)]
    draw = partial(log_det, num_probes=num_probes)
    for _ in batch:
        draw = jax.vmap(draw)
    return draw(jax.random.split(key, batch) if batch else key, *each)

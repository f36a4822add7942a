"""GP regression with q(u) at its optimum: bounds of the evidence as distributions of y."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import numbers
from numpyro_sgp.distributions.regression import GPRegression, square_norm
from numpyro_sgp.distributions.relaxation import (
    Blocks,
    Conditional,
    Diagonal,
    Relaxation,
    relaxation_of,
)
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.families import Block, BlockGaussian
from numpyro_sgp.inducing.covariances import cross_covariance, inducing_covariance
from numpyro_sgp.kernels.base import broadcasts_to
from numpyro_sgp.linalg import at_least, einsum, half_log_det, solve_lower, whitened_solve
from numpyro_sgp.linalg.batches import cholesky
from numpyro_sgp.linalg.row_blocks import consecutive_blocks

_ROWS = 512  # rows of K_ff held in memory where a bound streams them


class Collapsed(GPRegression):
    """A bound with inducing points in one or more orthogonal sets."""

    pytree_data_fields = ("inducing", "tight")

    _relaxations: ClassVar[tuple] = (Diagonal, Blocks)

    #: Whether sets beside the first keep the prior covariance.
    _prior_covariance = False

    def __init__(self, kernel, X, inducing, noise, mean, tight, jitter, validate_args):
        name = type(self).__name__
        tight = relaxation_of(tight, name, self._relaxations)
        super().__init__(kernel, X, noise, mean, jitter, validate_args=validate_args)
        self.inducing = tuple(
            numbers(points, "Inducing points").astype(self.prior.X.dtype)
            for points in inducing
        )
        num_rows, dim = self.prior.X.shape[-2:]
        for what, points in zip("ZO" + "O" * len(inducing), self.inducing, strict=False):
            if points.ndim < 2 or points.shape[-1] != dim or not points.shape[-2]:
                raise ValueError(
                    f"{name}: inducing points {what} must have the shape (M, {dim}), as X "
                    f"has {dim} columns, got {points.shape}."
                )
            if not broadcasts_to(points.shape[:-2], self.batch_shape):
                raise ValueError(
                    f"{name}: inducing points {what} of shape {points.shape} are for a "
                    f"batch of functions, but the batch shape is {self.batch_shape}."
                )
        if isinstance(tight, Blocks) and tight.size is None and tight.partition is None:
            size = max(points.shape[-2] for points in self.inducing)
            tight = Blocks(min(num_rows, size))
        if tight is not None:
            tight.check(num_rows)
        self.tight = tight

    def _factors(self):
        """
        A = inv(L) K_uf diag(1/s), the factor of I + A A' over all sets, and those of
        each set alone.
        """
        prior = self.prior
        Kuu = inducing_covariance(prior.kernel, self.inducing)
        Kuf = cross_covariance(prior.kernel, self.inducing, prior.X)
        _, _, A = whitened_solve(Kuu, Kuf, self.jitter)
        A = A / self._rows_noise[..., None, :]
        total = jnp.eye(A.shape[-2], dtype=A.dtype) + einsum("...mn,...kn->...mk", A, A)
        union = cholesky(total)
        # The first diagonal block of the union's factor is that of the first set.
        each = [
            union[..., s, s] if s.start == 0 else cholesky(total[..., s, s])
            for s in self._slices
        ]
        return A, union, each

    @property
    def _slices(self):
        ends = np.cumsum([points.shape[-2] for points in self.inducing]).tolist()
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def log_prob(self, value: Array, intermediates=None) -> Array:
        residual = self._residual(value)
        A, union, each = self._factors()
        return (
            self._normaliser()
            - self._log_det_cost(A, each)
            - 0.5 * self._quadratic(residual, A, union)
        )

    def _log_det_cost(self, A, each):
        """Half the log-determinants, and what relaxation leaves of half the trace."""
        cost = half_log_det(each[0])
        if self._prior_covariance:  # these sets explain a mean, but no variance
            A = A[..., self._slices[0], :]
        else:
            cost = cost + sum(half_log_det(factor) for factor in each[1:])
        noise = self._rows_noise
        A = A * noise[..., None, :]
        residual = self.prior.variance - jnp.sum(A**2, axis=-2)
        if self.tight is not None:
            return cost + self.tight.cost(self.prior, A, residual, noise**-2)
        return cost + 0.5 * jnp.sum(at_least(residual, 0.0) / noise**2, axis=-1)

    def _quadratic(self, residual, A, union):
        """(y - m)' (Q + s^2 I)^-1 (y - m) over the union, by Woodbury's identity."""
        pulled = einsum("...mn,...n->...m", A, residual)
        return jnp.sum(residual**2, axis=-1) - square_norm(union, pulled)

    def _over_rows(self, fn) -> Array:
        """
        What ``fn`` returns of blocks of rows: of their numbers (-1: none) and their K_ff.
        """
        prior, num_rows = self.prior, self.event_shape[0]
        blocks = consecutive_blocks(num_rows, min(_ROWS, num_rows))

        def one(rows):
            X = prior.X[..., rows, :]
            own = jnp.arange(len(rows)), rows
            # A White kernel is nothing between two arrays.
            K = prior.kernel(X, prior.X).at[(..., *own)].set(prior.kernel.diag(X))
            return fn(rows, K)

        return jax.lax.map(jax.checkpoint(one), jnp.asarray(blocks))

    def optimal_q(self, y: Array) -> BlockGaussian:
        """
        The optimal q(u) in whitened coordinates: the means of all sets together, eq. (28),
        and the covariance of each, eq. (29) of Shi et al. (2020).

        :param y: the responses, shape ``batch_shape + (N,)``.
        :raises ValueError: if y has another shape.
        """
        residual = self._residual(y)
        if residual.shape != self.shape():
            raise ValueError(
                f"{type(self).__name__}: a posterior is that of one y of shape "
                f"{self.shape()}, got {jnp.shape(y)}. Use jax.vmap for several."
            )
        A, union, each = self._factors()
        pulled = einsum("...mn,...n->...m", A, residual)
        white = solve_lower(union, pulled[..., None])
        mu = solve_lower(union, white, transpose=True)[..., 0]
        blocks = []
        for i, (s, factor) in enumerate(zip(self._slices, each, strict=True)):
            sqrt = None
            if i == 0 or not self._prior_covariance:
                identity = jnp.broadcast_to(
                    jnp.eye(factor.shape[-1], dtype=mu.dtype), factor.shape
                )
                sqrt = jnp.swapaxes(solve_lower(factor, identity), -1, -2)
            blocks.append(Block(mu[..., s], sqrt, upper=True))
        return BlockGaussian(tuple(blocks))

    def posterior(self, y: Array, X_new: Array) -> SparsePosterior:
        """See :meth:`~numpyro_sgp.MarginalGP.posterior`; relaxation does not change it."""
        new = self.prior.at(X_new)
        return SparsePosterior(new, self.inducing, self.optimal_q(y), self.jitter)


class CollapsedSVGP(Collapsed):
    r"""
    The collapsed bound of Titsias [1],
    :math:`\log N(y \mid m, Q + s^2 I) - \frac{1}{2 s^2} \mathrm{tr}(D)` with
    :math:`Q = K_{fu} K_{uu}^{-1} K_{uf}` and :math:`D = K_{ff} - Q` (eq. 3 of [2]), as a
    distribution of y. O(N M^2).

    :param kernel: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param X: inputs, shape ``(N, D)``.
    :param Z: inducing points, shape ``(M, D)``.
    :param noise: as in :class:`~numpyro_sgp.MarginalGP`.
    :param mean: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param tight: a tighter bound with the same posterior, one of
        :mod:`numpyro_sgp.relaxation` or its name:

        - ``"none"``;
        - ``"diagonal"``: :math:`\frac12 \sum_n \log(1 + d_n / s^2)` in place of
          :math:`\frac12 \sum_n d_n / s^2` [3], at the same cost;
        - ``"block"`` or ``Blocks(b)``:
          :math:`\frac12 \sum_b \log |I + D_{bb} / s^2|` [4], tighter still; O(N b^2) for
          blocks of b rows, M if not said;
        - ``"conditional"``: :math:`\frac12 \mathrm{tr}[(Q + s^2 I)^{-1} D]`, the bound
          with the exact q(u | f_perp) of appendix A of [2] (eq. 14, 15), O(N^2 M) time
          and, streamed over columns of K_ff, O(N M) memory; best in float64.
    :param jitter: relative jitter of K_uu; by dtype if None.
    :raises ValueError: if shapes or blocks do not fit together.

    **References:**

    1. Titsias (2009). Variational Learning of Inducing Variables in Sparse Gaussian
       Processes. AISTATS.
    2. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596
    3. Titsias (2025). New Bounds for Sparse Variational Gaussian Processes. ICML.
       https://arxiv.org/abs/2502.08730
    4. Bui, Titsias (2025). Sparse Gaussian Processes: Structured Approximations and
       Power-EP Revisited. https://arxiv.org/abs/2507.02377

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
    >>> y, kernel = jnp.sin(2.0 * X[:, 0]), sgp.kernels.RBF(1.0, 0.3)
    >>> plain = sgp.CollapsedSVGP(kernel, X, X[::10], 0.1).log_prob(y)
    >>> tight = sgp.CollapsedSVGP(kernel, X, X[::10], 0.1, tight="diagonal").log_prob(y)
    >>> bool(plain < tight)
    True
    """

    _relaxations: ClassVar[tuple] = (Diagonal, Blocks, Conditional)

    def __init__(
        self,
        kernel,
        X: Array,
        Z: Array,
        noise: Array,
        mean=None,
        tight: str | Relaxation = "none",
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        super().__init__(kernel, X, (Z,), noise, mean, tight, jitter, validate_args)

    def _log_det_cost(self, A, each):
        if not isinstance(self.tight, Conditional):
            return super()._log_det_cost(A, each)
        # Eq. (14): (I + A'A)^-1 = I - W'W, so tr[(I + A'A)^-1 D] = tr(D) - tr(W D W').
        W = solve_lower(each[0], A)
        trace = self.prior.variance / self._rows_noise**2 - jnp.sum(A**2, axis=-2)
        AW = einsum("...kn,...mn->...km", W, A)
        gain = self._trace_with_prior(W) - jnp.sum(AW**2, axis=(-2, -1))
        trace = jnp.sum(at_least(trace, 0.0), axis=-1) - gain
        return half_log_det(each[0]) + 0.5 * at_least(trace, 0.0)

    def _trace_with_prior(self, W):
        """tr(W K_ff W') in units of the noise, over column blocks of K_ff."""
        scaled = W / self._rows_noise[..., None, :]

        def one(rows, K):
            part = jnp.where(rows >= 0, scaled[..., rows], 0.0)
            both = part * einsum("...mn,...bn->...mb", scaled, K)
            return jnp.sum(both, axis=(-2, -1))

        return jnp.sum(self._over_rows(one), axis=0)


class CollapsedSOLVEGP(Collapsed):
    r"""
    The collapsed bound of SOLVE-GP [1], eq. (30), as a distribution of y: inducing points Z
    and orthogonal inducing points O with q(u) and q(v) at their optimum, in the form

    .. math::

        \log N(y \mid m, Q_{Z \cup O} + s^2 I) + \tfrac12 \log |Q_{Z \cup O} + s^2 I|
        - \tfrac12 \log |Q_Z + s^2 I| - \tfrac12 \log |I + B / s^2|
        - \tfrac{1}{2 s^2} \mathrm{tr}(R)

    with :math:`B = C_{fv} C_{vv}^{-1} C_{vf}` and :math:`R = K_{ff} - Q_{Z \cup O}`. It
    lies between the bounds of Titsias with Z and with Z and O together.

    :param kernel: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param X: inputs, shape ``(N, D)``.
    :param Z: inducing points, shape ``(M, D)``.
    :param O: orthogonal inducing points, shape ``(M2, D)``; a tuple for several sets.
    :param noise: as in :class:`~numpyro_sgp.MarginalGP`.
    :param mean: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param tight: ``"none"``, ``"diagonal"`` or ``"block"``, as in :class:`CollapsedSVGP`,
        for what both sets leave unexplained.
    :param jitter: relative jitter of the inducing covariance; by dtype if None.
    :raises ValueError: if shapes or blocks do not fit together.

    **References:**

    1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
    >>> y, kernel = jnp.sin(2.0 * X[:, 0]), sgp.kernels.RBF(1.0, 0.5)
    >>> Z, O = X[::10], X[5::10]
    >>> solve = sgp.CollapsedSOLVEGP(kernel, X, Z, O, 0.1)
    >>> bool(sgp.CollapsedSVGP(kernel, X, Z, 0.1).log_prob(y) < solve.log_prob(y))
    True
    >>> solve.predictive(y, X[:3]).mean.shape
    (3,)
    """

    def __init__(
        self,
        kernel,
        X: Array,
        Z: Array,
        O: Array | tuple[Array, ...],
        noise: Array,
        mean=None,
        tight: str | Relaxation = "none",
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        sets = O if isinstance(O, tuple | list) else (O,)
        super().__init__(kernel, X, (Z, *sets), noise, mean, tight, jitter, validate_args)

    def log_prob_given(self, y: Array, *q_v: Block) -> Array:
        """
        The bound collapsed over q(u) alone, eq. (9) and (27).

        :param y: the responses, shape ``(..., *batch_shape, N)``.
        :param q_v: q(v) of each orthogonal set, in whitened coordinates.
        :return: shape ``(..., *batch_shape)``.
        """
        residual = self._residual(y)
        A, union, each = self._factors()
        first, *others = self._slices
        cost = jnp.zeros((), A.dtype)
        for s, block in zip(others, q_v, strict=True):
            part = A[..., s, :]
            residual = residual - einsum("...mn,...m->...n", part, block.mu)
            cost = cost + block.kl()
            if self._prior_covariance:  # whose variance is among what Z leaves
                if not block.is_prior:
                    raise ValueError("CollapsedODVGP: q(v) has the prior's covariance.")
                continue
            F = part if block.is_prior else block.project(part)
            cost = cost + 0.5 * jnp.sum(F**2, axis=(-2, -1))
        quadratic = self._quadratic(residual, A[..., first, :], each[0])
        # What all sets leave, relaxed or not; the sets' own parts are counted above.
        left = Collapsed._log_det_cost(self, A, [each[0]])
        return self._normaliser() - left - 0.5 * quadratic - cost


class CollapsedODVGP(CollapsedSOLVEGP):
    """
    The collapsed bound of ODVGP, eq. (10) of Shi et al. (2020): SOLVE-GP with the
    covariance of q(v) fixed to the prior's. Parameters as in :class:`CollapsedSOLVEGP`, but
    that ``tight`` relaxes all that Z leaves unexplained.

    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
    >>> y, kernel = jnp.sin(2.0 * X[:, 0]), sgp.kernels.RBF(1.0, 0.5)
    >>> args = kernel, X, X[::10], X[5::10], 0.1
    >>> odvgp, solve = sgp.CollapsedODVGP(*args), sgp.CollapsedSOLVEGP(*args)
    >>> bool(odvgp.log_prob(y) <= solve.log_prob(y))
    True
    """

    _prior_covariance = True

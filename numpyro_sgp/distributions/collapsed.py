"""GP regression with q(u) at its optimum: bounds of the evidence as distributions of y."""

import copy
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import numbers
from numpyro_sgp._stacked import register_stacked
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
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
from numpyro_sgp.linalg import diagonal_of, jittered_cholesky, solve_lower, whitened_solve
from numpyro_sgp.linalg.row_blocks import consecutive_blocks

_COLUMNS = 512  # columns of K_ff held in memory where a bound streams them


class MarginalGP(dist.Distribution):
    r"""
    Exact GP regression with f integrated out:
    :math:`y \sim N(m(X), K(X, X) + \mathrm{diag}(s^2))`, eq. (1) of [1].

    An event is the vector of N responses: all rows, outside of any data plate. Q functions
    by a kernel with a batch or by ``.expand([Q])`` take y of shape ``(Q, N)``.

    O(N^3); the collapsed bounds (:class:`CollapsedSVGP`, :class:`CollapsedSOLVEGP`,
    :class:`CollapsedCG`) are lower bounds of its ``log_prob`` that cost less, and are used
    in the same way: under NUTS or SVI, with any prior of the hyperparameters.

    :param kernel: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param X: inputs, shape ``(N, D)``.
    :param noise: standard deviation s of y given f, broadcastable to
        ``batch_shape + (N,)``: a number, or one for each row.
    :param mean: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param jitter: relative jitter of factorised covariances; by dtype if None.
    :raises ValueError: if shapes do not fit together, or known noise is not positive.

    **References:**

    1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS, Predictive
        >>> import numpyro_sgp as sgp
        >>> def model(X, y, X_new=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        ...     kernel = sgp.kernels.RBF(1.0, lengthscale)
        ...     marginal = sgp.MarginalGP(kernel, X, noise=0.1)
        ...     numpyro.sample("y", marginal, obs=y)
        ...     if X_new is not None:
        ...         numpyro.sample("f_new", marginal.posterior(y, X_new))
        >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
        >>> mcmc = MCMC(NUTS(model), num_warmup=20, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, jnp.sin(2.0 * X[:, 0]))
        >>> predictive = Predictive(model, mcmc.get_samples())
        >>> new = predictive(jax.random.key(1), X, jnp.sin(2.0 * X[:, 0]), X[:3] + 0.1)
        >>> new["f_new"].shape
        (20, 3)
    """

    arg_constraints = {}
    support = constraints.real_vector
    reparametrized_params = []
    pytree_data_fields = ("prior", "noise")
    pytree_aux_fields: ClassVar[tuple] = ("jitter",)

    def __init__(
        self,
        kernel,
        X: Array,
        noise: Array,
        mean=None,
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        self.prior = GaussianProcess(kernel, X, mean, jitter)
        self.jitter = jitter
        self.noise = noise
        shape = self.prior.shape()
        if not broadcasts_to(jnp.shape(noise), shape):
            raise ValueError(
                f"{type(self).__name__}: noise has the shape {jnp.shape(noise)}, which "
                f"does not broadcast to {shape}, one for each row (and latent function). "
                "Give a number, or for Q functions the shape (Q, 1)."
            )
        if not_jax_tracer(noise) and not np.all(np.asarray(noise) > 0):
            raise ValueError(
                f"{type(self).__name__}: noise is the standard deviation of y given f and "
                f"must be positive, got {np.asarray(noise).min()}."
            )
        super().__init__(
            self.prior.batch_shape, self.prior.event_shape, validate_args=validate_args
        )

    @property
    def _rank(self) -> int:
        return self.prior._rank

    def expand(self, batch_shape) -> "MarginalGP":
        """
        Independent responses of functions with the same prior; nothing is copied.

        :param batch_shape: the new batch shape; the old one must broadcast to it.
        """
        expanded = copy.copy(self)
        expanded.prior = self.prior.expand(batch_shape)
        expanded._batch_shape = expanded.prior.batch_shape
        return expanded

    @property
    def _rows_noise(self) -> Array:
        """Noise of each row, ``batch_shape + (N,)``."""
        noise = jnp.asarray(self.noise, self.prior.X.dtype)
        return jnp.broadcast_to(noise, self.shape())

    @property
    def mean(self) -> Array:
        """Prior means of y, shape ``batch_shape + (N,)``."""
        return self.prior.mean

    @property
    def variance(self) -> Array:
        """Prior variances of y, shape ``batch_shape + (N,)``."""
        return self.prior.variance + self._rows_noise**2

    def sample(self, key, sample_shape=()) -> Array:
        """
        Draws of y from the exact process, O(N^3); also for the bounds, which have no
        draws of their own.

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        key_f, key_y = jax.random.split(key)
        f = self.prior.sample(key_f, sample_shape)
        return f + self._rows_noise * jax.random.normal(key_y, f.shape, f.dtype)

    def _residual(self, y) -> Array:
        """(y - m) / s, after a check of y."""
        if y is None:
            raise ValueError(
                f"{type(self).__name__}: y is None, but a posterior needs the responses. "
                "In a model: `if y is not None:`, or condition on draws of the prior."
            )
        if jnp.ndim(y) - 1 < len(self.batch_shape):
            raise ValueError(
                f"{type(self).__name__} has the batch shape {self.batch_shape}, but y has "
                f"the shape {jnp.shape(y)}. All rows are one event: sample it outside the "
                "data plate. (Q latent functions need y of shape (Q, N).)"
            )
        if jnp.shape(y)[-1:] != self.event_shape:
            raise ValueError(
                f"{type(self).__name__} has {self.event_shape[0]} rows of X, but y has the "
                f"shape {jnp.shape(y)}. Give one response for each row, of shape (N,)"
                + (" (use y[:, 0])." if jnp.shape(y)[-1:] == (1,) else ".")
            )
        if not_jax_tracer(y) and (bad := ~np.isfinite(np.asarray(y))).any():
            rows = np.unique(np.nonzero(bad)[-1])
            raise ValueError(
                f"{type(self).__name__}: y has NaN or infinite values in {rows.size} rows "
                f"(first: {rows[:5].tolist()}). Leave these rows out of X and y."
            )
        dtype = jax.eval_shape(self.prior.kernel.diag, self.prior.X).dtype
        return (jnp.asarray(y, dtype) - self.prior.mean) / self._rows_noise

    def _normaliser(self) -> Array:
        """log of the density of unit noise, and of the change of scale, ``batch_shape``."""
        noise = self._rows_noise
        constant = 0.5 * self.event_shape[0] * jnp.log(2 * jnp.pi).astype(noise.dtype)
        return -jnp.sum(jnp.log(noise), axis=-1) - constant

    def log_prob(self, value: Array, intermediates=None) -> Array:
        """
        The log evidence, or its lower bound, in nats.

        :param value: y, shape ``(..., *batch_shape, N)``.
        :return: shape ``(..., *batch_shape)``.
        :raises ValueError: if y does not have a response for each row.
        """
        del intermediates
        residual = self._residual(value)
        scale = 1.0 / self._rows_noise
        K = self.prior.kernel(self.prior.X, self.prior.X)
        K = K * scale[..., :, None] * scale[..., None, :]
        L, _ = jittered_cholesky(K + jnp.eye(K.shape[-1], dtype=K.dtype), 0.0)
        return self._normaliser() - _log_det(L) - 0.5 * _square(L, residual)

    def posterior(self, y: Array, X_new: Array) -> SparsePosterior:
        """
        q(f(X_new)) given y: exact here (but for the jitter of K(X, X), which matters where
        the noise variance is as small), with the optimal q(u) for the bounds.

        :param y: the responses, shape ``batch_shape + (N,)``.
        :param X_new: inputs, shape ``(N_new, D)``.
        :return: a distribution with ``mean``, ``variance``, ``covariance_matrix``,
            ``sample`` and so on.
        :raises ValueError: if y does not have a response for each row.
        """
        self._residual(y)
        same = CollapsedSVGP(
            self.prior.kernel,
            self.prior.X,
            self.prior.X,
            self.noise,
            self.prior.mean_function,
            jitter=self.jitter,
        )
        return same.expand(self.batch_shape).posterior(y, X_new)

    def predictive(self, y: Array, X_new: Array, noise: Array | None = None) -> dist.Normal:
        """
        Marginal predictive distribution of new responses.

        :param y: the responses, shape ``batch_shape + (N,)``.
        :param X_new: inputs, shape ``(N_new, D)``.
        :param noise: standard deviation of the noise there; that of the data if it is the
            same for all rows.
        :return: normals of batch shape ``batch_shape + (N_new,)``.
        :raises ValueError: if y does not have a response for each row, or the noise at
            ``X_new`` is not known.
        """
        f = self.posterior(y, X_new)
        if noise is None:
            noise = jnp.asarray(self.noise)
            if noise.ndim and noise.shape[-1] != 1:
                raise ValueError(
                    f"The noise differs by row (shape {noise.shape}); give predictive its "
                    "values at X_new: noise=..."
                )
        elif not_jax_tracer(noise) and not np.all(np.asarray(noise) > 0):
            raise ValueError(
                f"noise is a standard deviation and must be positive, got {noise}."
            )
        return dist.Normal(f.mean, jnp.sqrt(f.variance + jnp.asarray(noise) ** 2))


register_stacked(MarginalGP, lambda marginal: marginal.prior.X)


class _Collapsed(MarginalGP):
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
        total = jnp.eye(A.shape[-2], dtype=A.dtype) + jnp.einsum("...mn,...kn->...mk", A, A)
        union = jnp.linalg.cholesky(total)
        # The first diagonal block of the union's factor is that of the first set.
        each = [
            union[..., s, s] if s.start == 0 else jnp.linalg.cholesky(total[..., s, s])
            for s in self._slices
        ]
        return A, union, each

    @property
    def _slices(self):
        ends = np.cumsum([points.shape[-2] for points in self.inducing]).tolist()
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def log_prob(self, value: Array, intermediates=None) -> Array:
        """See :meth:`MarginalGP.log_prob`."""
        del intermediates
        residual = self._residual(value)
        A, union, each = self._factors()
        return (
            self._normaliser()
            - self._log_det_cost(A, each)
            - 0.5 * self._quadratic(residual, A, union)
        )

    def _log_det_cost(self, A, each):
        """Half the log-determinants, and what relaxation leaves of half the trace."""
        cost = _log_det(each[0])
        if self._prior_covariance:  # these sets explain a mean, but no variance
            A = A[..., self._slices[0], :]
        else:
            cost = cost + sum(_log_det(factor) for factor in each[1:])
        noise = self._rows_noise
        A = A * noise[..., None, :]
        residual = self.prior.variance - jnp.sum(A**2, axis=-2)
        if self.tight is not None:
            return cost + self.tight.cost(self.prior, A, residual, noise**-2)
        return cost + 0.5 * jnp.sum(jnp.maximum(residual, 0.0) / noise**2, axis=-1)

    def _quadratic(self, residual, A, union):
        """(y - m)' (Q + s^2 I)^-1 (y - m) over the union, by Woodbury's identity."""
        pulled = jnp.einsum("...mn,...n->...m", A, residual)
        return jnp.sum(residual**2, axis=-1) - _square(union, pulled)

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
        pulled = jnp.einsum("...mn,...n->...m", A, residual)
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
        """See :meth:`MarginalGP.posterior`; relaxation does not change it."""
        new = self.prior.at(X_new)
        return SparsePosterior(new, self.inducing, self.optimal_q(y), self.jitter)


class CollapsedSVGP(_Collapsed):
    r"""
    The collapsed bound of Titsias [1],
    :math:`\log N(y \mid m, Q + s^2 I) - \frac{1}{2 s^2} \mathrm{tr}(D)` with
    :math:`Q = K_{fu} K_{uu}^{-1} K_{uf}` and :math:`D = K_{ff} - Q` (eq. 3 of [2]), as a
    distribution of y. O(N M^2).

    :param kernel: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param X: inputs, shape ``(N, D)``.
    :param Z: inducing points, shape ``(M, D)``.
    :param noise: as in :class:`MarginalGP`.
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

    **Example:**

    .. doctest::

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
        AW = jnp.einsum("...kn,...mn->...km", W, A)
        gain = self._trace_with_prior(W) - jnp.sum(AW**2, axis=(-2, -1))
        trace = jnp.sum(jnp.maximum(trace, 0.0), axis=-1) - gain
        return _log_det(each[0]) + 0.5 * jnp.maximum(trace, 0.0)

    def _trace_with_prior(self, W):
        """tr(W K_ff W') in units of the noise, over column blocks of K_ff."""
        prior, noise = self.prior, self._rows_noise
        scaled = W / noise[..., None, :]

        def one(rows):
            K = prior.kernel(prior.X, prior.X[..., rows, :])
            part = jnp.where(rows >= 0, scaled[..., rows], 0.0)
            return jnp.sum(
                part * jnp.einsum("...mn,...nb->...mb", scaled, K), axis=(-2, -1)
            )

        num_rows = self.event_shape[0]
        blocks = consecutive_blocks(num_rows, min(_COLUMNS, num_rows))
        return jnp.sum(jax.lax.map(jax.checkpoint(one), jnp.asarray(blocks)), axis=0)


class CollapsedSOLVEGP(_Collapsed):
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
    :param noise: as in :class:`MarginalGP`.
    :param mean: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param tight: ``"none"``, ``"diagonal"`` or ``"block"``, as in :class:`CollapsedSVGP`,
        for what both sets leave unexplained.
    :param jitter: relative jitter of the inducing covariance; by dtype if None.
    :raises ValueError: if shapes or blocks do not fit together.

    **References:**

    1. Shi, Titsias, Mnih (2020). Sparse Orthogonal Variational Inference for Gaussian
       Processes. AISTATS. https://arxiv.org/abs/1910.10596

    **Example:**

    .. doctest::

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
            residual = residual - jnp.einsum("...mn,...m->...n", part, block.mu)
            cost = cost + block.kl()
            if self._prior_covariance:  # whose variance is among what Z leaves
                if not block.is_prior:
                    raise ValueError("CollapsedODVGP: q(v) has the prior's covariance.")
                continue
            F = part if block.is_prior else block.project(part)
            cost = cost + 0.5 * jnp.sum(F**2, axis=(-2, -1))
        quadratic = self._quadratic(residual, A[..., first, :], each[0])
        # What all sets leave, relaxed or not; the sets' own parts are counted above.
        left = _Collapsed._log_det_cost(self, A, [each[0]])
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


class CollapsedCG(CollapsedSVGP):
    r"""
    The bound of Artemev, Burt & van der Wilk [1] as a distribution of y, for medium N:
    the log-determinant is bounded by inducing points, and the quadratic term by conjugate
    gradients with :math:`P = Q + s^2 I` as the preconditioner,

    .. math::

        y^\top (K + s^2 I)^{-1} y \le
        r^\top P^{-1} r + 2 y^\top v - v^\top (K + s^2 I) v,
        \qquad r = y - (K + s^2 I) v,

    for any v. K is never stored: products with it are made in blocks of rows. Each
    evaluation costs O(N M^2) and O(N^2) for each step of conjugate gradients.

    Where the steps end depends on the hyperparameters, so that the bound has small jumps,
    of at most ``tol``; lower ``tol`` for NUTS. :meth:`predictive` has the means of
    conjugate gradients (:meth:`posterior_mean`); :meth:`posterior` is that of Z.

    :param kernel: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param X: inputs, shape ``(N, D)``.
    :param Z: inducing points, shape ``(M, D)``.
    :param noise: as in :class:`MarginalGP`.
    :param mean: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param tight: how the log-determinant is bounded: ``"none"``, ``"diagonal"`` or
        ``"block"``, as in :class:`CollapsedSVGP`.
    :param max_iterations: of conjugate gradients.
    :param tol: stop where :math:`\frac12 \|r\|^2 / s^2`, more than what is lost, is below,
        in nats.
    :param jitter: relative jitter of K_uu; by dtype if None.
    :raises ValueError: if shapes or blocks do not fit together, or ``tol`` or
        ``max_iterations`` are not positive.

    **References:**

    1. Artemev, Burt, van der Wilk (2021). Tighter Bounds on the Log Marginal Likelihood of
       Gaussian Process Regression Using Conjugate Gradients. ICML.
       https://arxiv.org/abs/2102.08314

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> import numpyro_sgp as sgp
        >>> X = jnp.linspace(0.0, 3.0, 40)[:, None]
        >>> y, kernel = jnp.sin(2.0 * X[:, 0]), sgp.kernels.RBF(1.0, 0.3)
        >>> cg = sgp.CollapsedCG(kernel, X, X[::10], 0.1, tight="diagonal").log_prob(y)
        >>> tight = sgp.CollapsedSVGP(kernel, X, X[::10], 0.1, tight="diagonal").log_prob(y)
        >>> bool(tight < cg)
        True
    """

    pytree_aux_fields: ClassVar[tuple] = ("max_iterations", "tol")
    _relaxations = (Diagonal, Blocks)

    def __init__(
        self,
        kernel,
        X: Array,
        Z: Array,
        noise: Array,
        mean=None,
        tight: str | Relaxation = "diagonal",
        max_iterations: int = 100,
        tol: float = 1.0,
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        if max_iterations < 1 or not tol > 0:
            raise ValueError(
                "CollapsedCG: max_iterations and tol must be positive, got "
                f"{max_iterations} and {tol}."
            )
        self.max_iterations, self.tol = max_iterations, tol
        super().__init__(
            kernel, X, Z, noise, mean, tight, jitter, validate_args=validate_args
        )

    def _quadratic(self, residual, A, union):
        """The upper bound above, at what conjugate gradients give for v."""
        frozen, *given = jax.lax.stop_gradient((self, residual, A, union))
        v = frozen._solve(*given)
        product = self._times(v)
        within = super()._quadratic(residual - product, A, union)
        return within + jnp.sum(v * (2.0 * residual - product), axis=-1)

    def _times(self, v):
        """(K / s s' + I) v, by blocks of rows of K."""
        prior, noise = self.prior, self._rows_noise
        num_rows = self.event_shape[0]
        blocks = consecutive_blocks(num_rows, min(_COLUMNS, num_rows))
        scaled = v / noise

        def one(rows):
            K = prior.kernel(prior.X[..., rows, :], prior.X)
            return jnp.einsum("...bn,...n->...b", K, scaled)

        parts = jax.lax.map(jax.checkpoint(one), jnp.asarray(blocks))
        product = jnp.moveaxis(parts, 0, -2).reshape(*parts.shape[1:-1], -1)
        return v + product[..., :num_rows] / noise

    def _solve(self, residual, A, union):
        """v near (K / s s' + I)^-1 (y - m) / s."""

        def precondition(r):
            pulled = jnp.einsum("...mn,...n->...m", A, r)[..., None]
            back = solve_lower(union, solve_lower(union, pulled), transpose=True)
            return r - jnp.einsum("...mn,...m->...n", A, back[..., 0])

        v, _ = jax.scipy.sparse.linalg.cg(
            self._times,
            residual,
            tol=0.0,
            atol=(2.0 * self.tol) ** 0.5,
            maxiter=self.max_iterations,
            M=precondition,
        )
        return v

    def predictive(self, y, X_new, noise=None) -> dist.Normal:
        """See :meth:`MarginalGP.predictive`; with the means of :meth:`posterior_mean`."""
        plain = super().predictive(y, X_new, noise)
        return dist.Normal(self.posterior_mean(y, X_new), plain.scale)

    def posterior_mean(self, y: Array, X_new: Array) -> Array:
        """
        Predictive means of f by conjugate gradients [1]: those of :meth:`posterior` for
        what v leaves of y, and :math:`K_{*f} v`.

        :param y: the responses, shape ``batch_shape + (N,)``.
        :param X_new: inputs, shape ``(N_new, D)``.
        :return: shape ``batch_shape + (N_new,)``.
        """
        residual = self._residual(y)
        A, union, _ = self._factors()
        v = self._solve(residual, A, union)
        left = (residual - self._times(v)) * self._rows_noise + self.prior.mean
        new = self.prior.at(X_new)
        K = self.prior.kernel(new.X, self.prior.X)
        explained = jnp.einsum("...bn,...n->...b", K, v / self._rows_noise)
        return self.posterior(left, X_new).mean + explained


def _log_det(L) -> Array:
    """Half the log-determinant of L L'."""
    return jnp.sum(jnp.log(diagonal_of(L)), axis=-1)


def _square(L, x) -> Array:
    """x' (L L')^-1 x, with leading dimensions of x broadcast."""
    if L.ndim == 2:
        x2 = x.reshape(-1, x.shape[-1])
        return jnp.sum(solve_lower(L, x2.T) ** 2, axis=0).reshape(x.shape[:-1])
    return jnp.sum(solve_lower(L, x[..., None]) ** 2, axis=(-2, -1))

"""A Gaussian process as a NumPyro distribution."""

import copy
import warnings

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_key, check_sample_shape, numbers
from numpyro_sgp._numpyro import HMC_HANDLERS, handler_stack
from numpyro_sgp._stacked import register_stacked
from numpyro_sgp.distributions.arguments import as_numbers, warn_of_rounding
from numpyro_sgp.kernels import as_kernel
from numpyro_sgp.kernels.base import broadcasts_to
from numpyro_sgp.linalg import (
    diagonal_of,
    einsum,
    gaussian_log_prob,
    jittered_cholesky,
    solve_lower,
)
from numpyro_sgp.means import Constant, as_mean


class GaussianProcess(dist.Distribution):
    r"""
    The values :math:`f(X)` of a Gaussian process at the inputs X.

    An event is the vector of N values. Q independent functions are a batch: by
    ``.expand([Q])``, by a :class:`numpyro.plate` around the site, or by a kernel, mean or
    inputs with a batch of their own (each function then has its own hyperparameters).

    :math:`K(X, X)` is built only by :meth:`sample`, :meth:`log_prob` and
    :attr:`covariance_matrix`; under sparse variational inference never.

    :param kernel: one of :mod:`numpyro_sgp.kernels`, a tinygp or GPJax kernel, or any
        object with ``k(X1, X2)`` (the matrix) and ``k.diag(X)`` (its diagonal).
    :param X: inputs, shape ``(N, D)`` or ``(*batch, N, D)``.
    :param mean: None for zero, a constant of shape ``(*batch,)``, or a callable from
        ``(N, D)`` to ``(*batch, N)`` (:class:`numpyro_sgp.means.Linear`, say). A constant
        of N entries needs a kernel of as many processes, or
        :class:`numpyro_sgp.means.Constant`: it may be meant for the rows.
    :param jitter: added to the diagonal of :math:`K(X, X)` before it is factorised,
        relative to its mean; 1e-5 in float32 and 1e-8 in float64 if None.
    :raises ValueError: if X does not have the shape of a table, or if the batch shapes of
        kernel, X and mean do not fit together.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpyro_sgp as sgp
    >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
    >>> gp = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X).expand([2])
    >>> gp.batch_shape, gp.event_shape
    ((2,), (5,))
    >>> f = gp.sample(jax.random.key(0))
    >>> gp.log_prob(f).shape
    (2,)
    """

    arg_constraints = {}
    reparametrized_params = []
    pytree_data_fields = ("kernel", "X", "mean_function")
    pytree_aux_fields = ("jitter", "_rank")

    def __init__(
        self,
        kernel,
        X: Array,
        mean=None,
        jitter: float | None = None,
        *,
        validate_args: bool | None = None,
    ):
        self.kernel = as_kernel(kernel)
        self.X = _as_inputs(X)
        self._rank = self.X.ndim
        self.mean_function = as_mean(mean)
        self.jitter = jitter
        kernel_shape = jax.eval_shape(self.kernel.diag, self.X).shape
        mean_shape = jax.eval_shape(self.mean_function, self.X).shape
        num_rows = self.X.shape[-2]
        if kernel_shape[-1:] != (num_rows,):
            raise ValueError(
                "The kernel's diag must return one variance for each row of X, shape "
                f"(..., {num_rows}), but it returned the shape {kernel_shape}."
                + (" Use [:, 0]." if kernel_shape[-1:] == (1,) else "")
            )
        if not mean_shape or mean_shape[-1] not in (1, num_rows):
            raise ValueError(
                "The mean function must return one value for each row of X, shape "
                f"(..., {num_rows}), but it returned the shape {mean_shape}."
            )
        if mean is not None and not callable(mean) and num_rows > 1:
            _check_constant(mean_shape[:-1], kernel_shape)
        if num_rows > 1 and mean_shape[-2:] == (num_rows, 1) and callable(mean):
            if not isinstance(mean, Constant):
                raise ValueError(
                    f"The mean function returned the shape {mean_shape}, which would be a "
                    f"batch of {num_rows} processes. Return one value for each row of X, "
                    f"shape ({num_rows},): use [:, 0]."
                )
        try:
            batch_shape = jnp.broadcast_shapes(kernel_shape[:-1], mean_shape[:-1])
        except ValueError:
            raise ValueError(
                f"The kernel (with these inputs) has batch shape {kernel_shape[:-1]} and "
                f"the mean function {mean_shape[:-1]}; they do not broadcast. Give both "
                "one entry for each latent function."
            ) from None
        super().__init__(batch_shape, (num_rows,), validate_args=validate_args)

    def expand(self, batch_shape) -> "GaussianProcess":
        """
        Independent functions with the same prior; nothing is copied.

        :param batch_shape: the new batch shape; the old one must broadcast to it.
        """
        batch_shape = tuple(batch_shape)
        if not broadcasts_to(self.batch_shape, batch_shape):
            raise ValueError(
                f"A Gaussian process with batch shape {self.batch_shape} cannot be "
                f"expanded to {batch_shape}."
            )
        expanded = copy.copy(self)
        expanded._batch_shape = batch_shape
        return expanded

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self):
        """Any vector; with a warning where HMC or an autoguide takes f as it is."""
        if any(
            isinstance(handler, HMC_HANDLERS)
            and self.shape() in [jnp.shape(value) for value in handler.params.values()]
            for handler in handler_stack
        ):
            warnings.warn(
                f"The {self.event_shape[0]} values of a GaussianProcess are taken as they "
                "are, strongly correlated and tied to hyperparameters that are sampled: "
                "HMC and NUTS seldom mix there, and NumPyro's autoguides are far off. Use "
                "NUTS(numpyro_sgp.whiten(model)) or numpyro_sgp.AutoSparseGP(model, "
                "numpyro_sgp.SVGP(50)).",
                stacklevel=1,  # of one place, so that Python shows it once
            )
        return constraints.real_vector

    @property
    def mean(self) -> Array:
        """Prior means, shape ``batch_shape + (N,)``."""
        return jnp.broadcast_to(self.mean_function(self.X), self.shape())

    @property
    def variance(self) -> Array:
        """Prior variances, shape ``batch_shape + (N,)``."""
        return jnp.broadcast_to(self.kernel.diag(self.X), self.shape())

    @property
    def covariance_matrix(self) -> Array:
        """Prior covariance without jitter, shape ``batch_shape + (N, N)``."""
        num_rows = self.event_shape[0]
        K = self.kernel(self.X, self.X)
        return jnp.broadcast_to(K, (*self.batch_shape, num_rows, num_rows))

    def scale_tril(self) -> Array:
        """Lower factor of K(X, X) + jitter, shape broadcastable to the covariance's."""
        return jittered_cholesky(self.kernel(self.X, self.X), self.jitter)[0]

    def at(self, X: Array) -> "GaussianProcess":
        """
        The same process at other inputs.

        :param X: inputs, shape ``(N, D)``.
        """
        process = GaussianProcess(self.kernel, X, self.mean_function, self.jitter)
        return process.expand(jnp.broadcast_shapes(self.batch_shape, process.batch_shape))

    def sample(self, key, sample_shape=()) -> Array:
        """
        Joint draws of f(X), O(N^3).

        :return: shape ``sample_shape + batch_shape + (N,)``.
        """
        check_key(key, "key")
        sample_shape = check_sample_shape(sample_shape)
        L = self.scale_tril()
        noise = jax.random.normal(key, self.shape(sample_shape), L.dtype)
        return self.mean + einsum("...ij,...j->...i", L, noise)

    def log_prob(self, value: Array, intermediates=None) -> Array:
        """
        Joint log density of f(X), O(N^3).

        :param value: shape ``(..., *batch_shape, N)``.
        :return: shape ``(..., *batch_shape)``.
        """
        return self._log_prob(self._as_value(value))

    def _as_value(self, value) -> Array:
        value = numbers(value, "The value of a GaussianProcess")
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"The value of a GaussianProcess with {self.event_shape[0]} rows must have "
                f"the shape {self.shape()}, got {value.shape}."
            )
        return value

    @validate_sample
    def _log_prob(self, value: Array) -> Array:
        return gaussian_log_prob(value - self.mean, self.scale_tril())

    def condition(self, value: Array, X_new: Array) -> dist.MultivariateNormal:
        r"""
        :math:`p(f(X_\mathrm{new}) \mid f(X))`.

        :param value: the values at X, shape ``batch_shape + (N,)``.
        :param X_new: new inputs, shape ``(N_new, D)``.
        :return: the joint normal over the new values, ``batch_shape``, ``(N_new,)``.
        :raises ValueError: if the columns of X_new, or the shape of value, are not its.
        """
        num_rows, X_new = self.event_shape[0], _as_inputs(X_new)
        if X_new.shape[-1] != self.X.shape[-1]:
            raise ValueError(
                f"X_new must have the {self.X.shape[-1]} columns of X, got the shape "
                f"{X_new.shape}."
            )
        value = self._as_value(value)
        inputs = jnp.broadcast_to(X_new, (*self.X.shape[:-2], *X_new.shape[-2:]))
        joint = self.at(jnp.concatenate([self.X, inputs], axis=-2))
        # One factor of both: of a residual K - A'A, what rounding errors leave in float32
        # may have no factor with any jitter. That of a row is relative to its own variance:
        # rows far out, of a linear kernel, leave that of the others as it is.
        K = joint.kernel(joint.X, joint.X)
        variances = diagonal_of(K)
        size = jnp.mean(variances[..., :num_rows], axis=-1, keepdims=True)
        of_new = jnp.maximum(variances[..., num_rows:], size)
        of_old = jnp.broadcast_to(size, (*size.shape[:-1], num_rows))
        sizes = jnp.concatenate([of_old, of_new], axis=-1)
        sds = jnp.sqrt(jnp.where(sizes > 0.0, sizes, 1.0))
        K = K / sds[..., None, :] / sds[..., None]
        L = sds[..., None] * jittered_cholesky(K, self.jitter, jnp.ones((), K.dtype))[0]
        old, A = L[..., :num_rows, :num_rows], L[..., num_rows:, :num_rows]
        white = solve_lower(old, (value - self.mean)[..., None])
        mean = joint.mean[..., num_rows:]
        loc = mean + einsum("...nm,...m->...n", A, white[..., 0])
        tril = L[..., num_rows:, num_rows:]
        return dist.MultivariateNormal(loc, scale_tril=tril, validate_args=False)


register_stacked(GaussianProcess, lambda process: process.X)


def _check_constant(shape, kernel_shape) -> None:
    """
    Refuses a constant of as many entries as X has rows, unless the kernel (or X) has as
    many processes: a mean for each row would make N processes of N values each.
    """
    *batch, num_rows = kernel_shape
    axis = -2 if shape[-2:] == (num_rows, 1) else -1
    if len(shape) >= -axis and shape[axis] == num_rows and batch[axis:][:1] != [num_rows]:
        raise ValueError(
            f"mean has the shape {shape}, and X has {num_rows} rows: as a constant it "
            f"would be one for each of {num_rows} processes. For a mean of each row give a "
            "function of X, which is taken to new inputs too (mean=means.Linear(b), or "
            "lambda X: b * X[:, 0]), or add it in the likelihood (f + b * X[:, 0]). For "
            "that many processes give means.Constant(mean)."
        )


_INPUTS = "X of GaussianProcess"


def _as_inputs(X) -> Array:
    if not_jax_tracer(X):
        # Known inputs stay known inside of jit: `whiten` factorises their kernel once.
        with jax.ensure_compile_time_eval():
            return _as_table(X)
    return _as_table(X)


def _as_table(X) -> Array:
    X = as_numbers(X, _INPUTS)
    warn_of_rounding(X, _INPUTS)
    X = numbers(X, _INPUTS)
    if X.ndim < 2:
        raise ValueError(
            "GaussianProcess needs inputs X of shape (N, D), one row for each value of f, "
            f"but got the shape {X.shape}. "
            + ("Use X[:, None] for one input dimension." if X.ndim == 1 else "")
        )
    if X.shape[-1] == 0:
        raise ValueError(
            f"GaussianProcess needs inputs X with at least one column, got {X.shape}."
        )
    if not jnp.issubdtype(X.dtype, jnp.floating):
        X = X.astype(jnp.result_type(float))
    if X.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"{_INPUTS} must be float32 or float64 numbers, got {X.dtype}. Give "
            "X.astype('float32')."
        )
    return X

"""GP regression with f integrated out, as a distribution of y: what all forms share."""

import copy
from contextlib import suppress
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import real
from numpyro_sgp._stacked import register_stacked
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.kernels.base import broadcasts_to
from numpyro_sgp.linalg import solve_lower


class GPRegression(dist.Distribution):
    """
    Base class of :class:`~numpyro_sgp.MarginalGP` and its lower bounds: responses with the
    prior of f and known noise, their checks and predictions. An event is the vector of N
    responses; parameters are those of :class:`~numpyro_sgp.MarginalGP`.
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
        of_functions, rows = jnp.shape(noise)[:-1], self.prior.event_shape
        if of_functions and jnp.shape(noise) != (*rows, 1):  # which is a column of rows
            with suppress(ValueError):
                batch = jnp.broadcast_shapes(self.prior.batch_shape, of_functions)
                self.prior = self.prior.expand(batch)
        shape = self.prior.shape()
        if not broadcasts_to(jnp.shape(noise), shape):
            raise ValueError(
                f"{type(self).__name__}: noise has the shape {jnp.shape(noise)}, which "
                f"does not broadcast to {shape}, one for each row (and latent function). "
                "Give a number, or for Q functions the shape (Q, 1)."
            )
        real(noise, f"{type(self).__name__}: noise")
        if not_jax_tracer(noise):
            known = np.asarray(noise)
            if not np.all(_is_positive(known)):
                wrong = known.min() if not np.all(known > 0) else known.max()
                raise ValueError(
                    f"{type(self).__name__}: noise is the standard deviation of y given f "
                    f"and must be positive and finite, got {wrong}. Leave rows that are "
                    "not observed out of X and y."
                )
        super().__init__(
            self.prior.batch_shape, self.prior.event_shape, validate_args=validate_args
        )

    @property
    def _rank(self) -> int:
        return self.prior._rank

    def expand(self, batch_shape) -> Self:
        """
        Independent responses of functions with the same prior; nothing is copied.

        :param batch_shape: the new batch shape; the old one must broadcast to it.
        """
        expanded = copy.copy(self)
        expanded.prior = self.prior.expand(batch_shape)
        expanded._batch_shape = expanded.prior.batch_shape
        return expanded

    def mask(self, mask) -> dist.Distribution:
        """
        :raises ValueError: for a mask of rows, of which there is no density each.
        """
        if not broadcasts_to(np.shape(mask), self.batch_shape):
            raise ValueError(
                f"{type(self).__name__} has one log density for all rows (batch shape "
                f"{self.batch_shape}), which a mask of shape {np.shape(mask)} would count "
                "once for each entry. Leave rows that are not observed out of X and y."
            )
        return super().mask(mask)

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
        """The log evidence, or a lower bound of it."""
        raise NotImplementedError

    def posterior(self, y: Array, X_new: Array) -> SparsePosterior:
        """q(f(X_new)) given y."""
        raise NotImplementedError

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
        elif not_jax_tracer(noise) and not np.all(_is_positive(np.asarray(noise))):
            raise ValueError(
                "noise is a standard deviation and must be positive and finite, got "
                f"{noise}."
            )
        elif not broadcasts_to(jnp.shape(noise), f.mean.shape):
            raise ValueError(
                f"The noise at X_new has the shape {jnp.shape(noise)}, which does not "
                f"broadcast to {f.mean.shape}, one for each row of X_new (and function)."
            )
        return dist.Normal(f.mean, jnp.sqrt(f.variance + jnp.asarray(noise) ** 2))


def _is_positive(noise):
    return (noise > 0.0) & (noise < np.inf)


register_stacked(GPRegression, lambda marginal: marginal.prior.X)


def square_norm(L: Array, x: Array) -> Array:
    """x' (L L')^-1 x, with leading dimensions of x broadcast."""
    if L.ndim == 2:
        x2 = x.reshape(-1, x.shape[-1])
        return jnp.sum(solve_lower(L, x2.T) ** 2, axis=0).reshape(x.shape[:-1])
    return jnp.sum(solve_lower(L, x[..., None]) ** 2, axis=(-2, -1))

"""Exact GP regression as a distribution of y."""

import jax.numpy as jnp
from jax import Array

from numpyro_sgp.distributions.collapsed import CollapsedSVGP
from numpyro_sgp.distributions.regression import GPRegression, square_norm
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.linalg import half_log_det, jittered_cholesky


class MarginalGP(GPRegression):
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

    def log_prob(self, value: Array, intermediates=None) -> Array:
        """
        The log evidence, or its lower bound, in nats.

        :param value: y, shape ``(..., *batch_shape, N)``.
        :return: shape ``(..., *batch_shape)``.
        :raises ValueError: if y does not have a response for each row.
        """
        residual = self._residual(value)
        scale = 1.0 / self._rows_noise
        K = self.prior.kernel(self.prior.X, self.prior.X)
        K = K * scale[..., :, None] * scale[..., None, :]
        L, _ = jittered_cholesky(K + jnp.eye(K.shape[-1], dtype=K.dtype), 0.0)
        return self._normaliser() - half_log_det(L) - 0.5 * square_norm(L, residual)

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

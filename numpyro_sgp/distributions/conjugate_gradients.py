"""A bound for regression whose quadratic term is by conjugate gradients."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from numpyro_sgp._checks import check_positive, check_whole
from numpyro_sgp.distributions.collapsed import CollapsedSVGP
from numpyro_sgp.distributions.relaxation import Blocks, Diagonal, Relaxation
from numpyro_sgp.linalg import einsum, solve_lower


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
    :param noise: as in :class:`~numpyro_sgp.MarginalGP`.
    :param mean: as in :class:`~numpyro_sgp.GaussianProcess`.
    :param tight: how the log-determinant is bounded: ``"none"``, ``"diagonal"`` or
        ``"block"``, as in :class:`~numpyro_sgp.CollapsedSVGP`.
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
        check_whole(max_iterations, "CollapsedCG: max_iterations", least=1)
        check_positive(tol, "CollapsedCG: tol")
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
        noise = self._rows_noise
        scaled = v / noise
        parts = self._over_rows(lambda _, K: einsum("...bn,...n->...b", K, scaled))
        product = jnp.moveaxis(parts, 0, -2).reshape(*parts.shape[1:-1], -1)
        return v + product[..., : self.event_shape[0]] / noise

    def _solve(self, residual, A, union):
        """v near (K / s s' + I)^-1 (y - m) / s."""

        def precondition(r):
            pulled = einsum("...mn,...n->...m", A, r)[..., None]
            back = solve_lower(union, solve_lower(union, pulled), transpose=True)
            return r - einsum("...mn,...m->...n", A, back[..., 0])

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
        """As of :class:`~numpyro_sgp.MarginalGP`, with means by :meth:`posterior_mean`."""
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
        explained = einsum("...bn,...n->...b", K, v / self._rows_noise)
        return self.posterior(left, X_new).mean + explained

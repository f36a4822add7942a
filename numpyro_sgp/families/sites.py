"""Gaussian q(u) with the covariance of Theorem 2 of SAVIGP: one number a data point."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.families.block_gaussian import Block, BlockGaussian
from numpyro_sgp.linalg import solve_lower


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SiteGaussian:
    r"""
    q(u) over one set of inducing variables with

    .. math::

        S = K_{zz} (K_{zz} + K_{zx} \Lambda K_{xz})^{-1} K_{zz}, \qquad
        \Lambda = \mathrm{diag}(\lambda_1, \ldots, \lambda_N),

    which has the form of the optimal covariance for any likelihood that factorises over
    the data (Bonilla, Krauth & Dezfouli 2018, eq. 34-35 and Theorem 2): there
    :math:`\lambda_n = -2\, \partial E_n / \partial \sigma_n^2`, negative where the
    log likelihood is convex in f. In whitened coordinates
    :math:`P P^\top = (I + A \Lambda A^\top)^{-1}` with :math:`A = L^{-1} K_{zx}`.

    :param mu: whitened mean, shape ``(*batch, M)``.
    :param sites: :math:`\lambda`, of any sign, shape ``(*batch, N)``.
    :param X: the inputs of the N data points, shape ``(N, D)``.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577
    """

    mu: Array
    sites: Array
    X: Array

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables."""
        return (self.mu.shape[-1],)

    def whitened(self, L: Array, cross: Callable[[Array], Array]) -> BlockGaussian:
        """
        The same q by mean and square root of its covariance.

        Where :math:`I + A \\Lambda A^\\top` is not positive definite there is no such
        Gaussian, and the result is NaN.

        :param L: lower factor of K_uu, ``(*batch, M, M)``.
        :param cross: from inputs X to K_uX.
        """
        A = solve_lower(L, cross(self.X))
        precision = jnp.einsum("...mn,...n,...kn->...mk", A, self.sites, A)
        identity = jnp.eye(A.shape[-2], dtype=A.dtype)
        C = jnp.linalg.cholesky(identity + precision)
        inverse = solve_lower(C, jnp.broadcast_to(identity, C.shape))
        return BlockGaussian((Block(self.mu, jnp.swapaxes(inverse, -1, -2)),))

"""Gaussian q(u) by pseudo-data, two numbers a data point: Theorem 2 of SAVIGP."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_sgp.families.base import QU, Factors, Family, Param, Start
from numpyro_sgp.families.blocks import Block, BlockGaussian
from numpyro_sgp.linalg import einsum, solve_lower
from numpyro_sgp.linalg.batches import cholesky


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["linear", "precision", "X"],
    meta_fields=["num_inducing"],
)
@dataclass(frozen=True)
class PseudoDataGaussian(QU):
    r"""
    q(u) over one set of inducing variables with

    .. math::

        S = K_{zz} (K_{zz} + K_{zx} \Lambda K_{xz})^{-1} K_{zz}, \qquad
        m = K_{zz} (K_{zz} + K_{zx} \Lambda K_{xz})^{-1} K_{zx} \ell, \qquad
        \Lambda = \mathrm{diag}(\lambda_1, \ldots, \lambda_N).

    It is the posterior under Gaussian pseudo-likelihoods
    :math:`\exp(\ell_n g_n - \lambda_n g_n^2 / 2)` of f less the prior's mean,
    :math:`g_n = f_n - m(x_n)`. The optimal covariance for
    any likelihood that factorises over the data has this form (Bonilla, Krauth &
    Dezfouli 2018, eq. 34-35 and Theorem 2), with
    :math:`\lambda_n = -2\, \partial E_n / \partial \sigma_n^2`, negative where the log
    likelihood is convex in f, and so has the optimal mean [2], with
    :math:`\ell_n = \partial E_n / \partial \mu_n + \lambda_n (\mu_n - m(x_n))`. In whitened
    coordinates :math:`P P^\top = (I + A \Lambda A^\top)^{-1}` with
    :math:`A = L^{-1} K_{zx}`. A mean by pseudo-data rather than free moves with the kernel,
    and is far better conditioned.

    :param linear: :math:`\ell`, shape ``(*batch, N)``.
    :param precision: :math:`\lambda`, of any sign, shape ``(*batch, N)``.
    :param X: the inputs of the N data points, shape ``(N, D)``.
    :param num_inducing: number M of inducing variables.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577
    2. Adam, Chang, Khan, Solin (2021). Dual Parameterization of Sparse Variational
       Gaussian Processes. NeurIPS. https://arxiv.org/abs/2111.03412
    """

    linear: Array
    precision: Array
    X: Array
    num_inducing: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing variables."""
        return (self.num_inducing,)

    def whitened(self, factors: Factors) -> BlockGaussian:
        """
        The same q by its mean and a square root of its covariance.

        Where :math:`I + A \\Lambda A^\\top` is not positive definite there is no such
        Gaussian, and the result is NaN.

        :param factors: L and K_uX.
        """
        A = solve_lower(factors.chol, factors.cross(self.X))
        identity = jnp.eye(A.shape[-2], dtype=A.dtype)
        B = identity + einsum("...mn,...n,...kn->...mk", A, self.precision, A)
        C = cholesky(B)
        sqrt = solve_lower(C, jnp.broadcast_to(identity, C.shape))
        pull = einsum("...mk,...kn,...n->...m", sqrt, A, self.linear)
        mu = einsum("...km,...k->...m", sqrt, pull)
        return BlockGaussian((Block(mu, sqrt.mT, upper=True),))


@dataclass(frozen=True)
class PseudoData(Family):
    """The posterior under one Gaussian pseudo-observation of each data point."""

    name = "pseudo_data"
    has_all_gaussians = True
    needs_all_rows = True
    has_scale = False
    no_natural_step = (
        "covariance='pseudo_data'. Train pseudo-data by fit_lbfgs, which takes natural "
        "gradients by itself."
    )

    def start(self, at: Start) -> dict[str, Param]:
        zeros = Param(jnp.zeros((*at.batch_shape, at.num_rows), at.dtype))
        return {"qu_linear": zeros, "qu_precision": zeros}

    def build(self, params: dict, whiten: bool) -> PseudoDataGaussian:
        linear, X = params["qu_linear"], params["X"]
        size = params["Z"].shape[-2]
        return PseudoDataGaussian(
            linear, params["qu_precision"], X.astype(linear.dtype), size
        )

    def gaussian_optimum(
        self, free: dict, A: Array, linear: Array, precision: Array
    ) -> dict | None:
        """See :meth:`Family.gaussian_optimum`: they are the pseudo-data."""
        del A
        found = {"qu_linear": linear, "qu_precision": precision}
        return {name: value.astype(free[name].dtype) for name, value in found.items()}

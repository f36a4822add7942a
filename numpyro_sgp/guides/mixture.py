"""SAVIGP's approximation at a GP site: a mixture of Gaussians over inducing variables."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import constraints

from numpyro_sgp.distributions import GaussianProcess, MixturePosterior
from numpyro_sgp.families import Block, BlockGaussian
from numpyro_sgp.families.mixture import ENTROPIES
from numpyro_sgp.guides.approximations import SVGP, Inducing, points_of
from numpyro_sgp.inducing.covariances import inducing_covariance
from numpyro_sgp.linalg import jittered_cholesky, solve_lower


class MixtureSVGP(SVGP):
    r"""
    One set of inducing points Z with a mixture of K Gaussians over the inducing variables
    of all latent functions of the site [1],
    :math:`q(u) = \sum_k \pi_k \prod_j N(u_j; m_{kj}, S_{kj})` (eq. 7), with learned
    weights.

    For :class:`~numpyro_sgp.TraceGP_ELBO` only: NumPyro's ELBOs would draw a component and
    lose the gradient of the weights, so they are refused.

    Where components have collapsed into one, ``guide.posterior`` warns.

    :param num_inducing: as in :class:`SVGP`.
    :param num_components: number K of components.
    :param inducing: as in :class:`SVGP`.
    :param covariance: ``"diagonal"`` or ``"full"`` for each component and latent function.
    :param entropy: how the KL is bounded: ``"pairwise"``, the tighter of two bounds;
        ``"jensen"``, the paper's (eq. 18); ``"monte_carlo"``, unbiased and noisy. All are
        exact for K = 1. See :func:`~numpyro_sgp.families.mixture.mixture_kl`.
    :param spread: how far apart components start: their means are the prior mean shifted by
        constants of about this many prior standard deviations (and some noise). Equal
        components would stay equal.
    :param whiten: as in :class:`SVGP`; the paper's is ``False``.
    :param train_inducing: as in :class:`SVGP`.
    :param share_inducing: as in :class:`SVGP`.
    :param tight: ``"none"`` or ``"scalar"``, as in :class:`SVGP`.
    :param jitter: relative jitter of K_uu; by dtype if None.
    :param seed: of the initialiser and of the starting means.
    :raises ValueError: if the options contradict each other.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic Inference in Latent Gaussian Process
       Models. https://arxiv.org/abs/1609.00577

    >>> import numpyro_sgp as sgp
    >>> sgp.MixtureSVGP(20, 2).num_components
    2
    """

    _covariances = ("diagonal", "full")
    _tights = ("none", "scalar")

    def __init__(
        self,
        num_inducing: int | None = None,
        num_components: int = 2,
        inducing: Inducing = "kmeans",
        *,
        covariance: Literal["diagonal", "full"] = "diagonal",
        entropy: Literal["pairwise", "jensen", "monte_carlo"] = "pairwise",
        spread: float = 0.5,
        whiten: bool = True,
        train_inducing: bool = True,
        share_inducing: bool = True,
        tight: Literal["none", "scalar"] = "none",
        jitter: float | None = None,
        seed: int = 0,
    ):
        if (
            isinstance(num_components, bool)
            or not isinstance(num_components, int | np.integer)
            or num_components < 1
        ):
            raise ValueError(
                f"MixtureSVGP: num_components must be a positive whole number, got "
                f"{num_components!r}."
            )
        if entropy not in ENTROPIES:
            raise ValueError(
                f"MixtureSVGP: entropy must be one of {ENTROPIES}, got {entropy!r}."
            )
        if not spread > 0 and num_components > 1:
            raise ValueError(
                f"MixtureSVGP: spread must be positive, got {spread}: components that "
                "start equal stay equal."
            )
        self.num_components = int(num_components)
        self.entropy = entropy
        self.spread = spread
        super().__init__(
            num_inducing,
            inducing,
            whiten=whiten,
            covariance=covariance,
            train_inducing=train_inducing,
            share_inducing=share_inducing,
            tight=tight,
            jitter=jitter,
            seed=seed,
        )

    def initial_params(
        self, prior: GaussianProcess, points: tuple[Array, ...]
    ) -> dict[str, Array]:
        """See :meth:`SVGP.initial_params`; q(u) is near the prior."""
        K = self.num_components
        params = super().initial_params(prior.expand((K, *prior.batch_shape)), points)
        # Inducing points belong to latent functions, not to components.
        params["Z"] = points_of(points[0])
        if "qf_scale" in params:
            params["qf_scale"] = params["qf_scale"][0]
        if K > 1:
            mu = params["qu_mu"]
            Kuu = inducing_covariance(prior.kernel, points)
            L, _ = jittered_cholesky(Kuu, self.jitter)
            variance = jnp.diagonal(Kuu, axis1=-2, axis2=-1)[..., None]
            shift = self.spread * jnp.sqrt(variance) * jnp.ones((*L.shape[:-1], 1), L.dtype)
            shift = solve_lower(L, shift) if self.whiten else shift
            key_k, key_noise = jax.random.split(jax.random.key(self.seed))
            levels = jax.scipy.stats.norm.ppf((jnp.arange(K) + 0.5) / K).astype(mu.dtype)
            levels = jnp.broadcast_to(
                levels.reshape(K, *(1,) * len(prior.batch_shape)), mu.shape[:-1]
            )
            # Latent functions go up and down in different orders.
            levels = jax.random.permutation(key_k, levels, axis=0, independent=True)
            noise = 0.1 * self.spread * jax.random.normal(key_noise, mu.shape, mu.dtype)
            if not self.whiten:
                noise = jnp.einsum("...mk,...k->...m", L, noise)
            params["qu_mu"] = mu + levels[..., None] * shift[..., 0] + noise
        params["qu_logits"] = jnp.zeros(K, params["qu_mu"].dtype)
        return params

    def _constraint(self, name):
        if name.endswith("_logits"):
            return constraints.real
        return super()._constraint(name)

    def posterior(self, prior: GaussianProcess, params: dict) -> MixturePosterior:
        """See :meth:`SVGP.posterior`."""
        q = BlockGaussian((Block(params["qu_mu"], params["qu_sqrt"]),), self.whiten)
        Z = self._inducing(0, params["Z"])
        return MixturePosterior(prior, Z, q, params["qu_logits"], self.entropy, self.jitter)

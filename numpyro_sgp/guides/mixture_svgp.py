"""A mixture of Gaussians at a GP site."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from numpyro_sgp.distributions.relaxation import Scalar
from numpyro_sgp.families import Mixture
from numpyro_sgp.families.mixture import ENTROPIES
from numpyro_sgp.guides.approximations import SVGP
from numpyro_sgp.guides.base import Approximation, Inducing, check_blocks


@dataclass(eq=False, repr=False)
class MixtureSVGP(Approximation):
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
        components would stay equal. (:func:`~numpyro_sgp.fit` has them start around a
        Gaussian that was trained, at about half as many of its standard deviations.)
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
    _relaxations = (Scalar,)

    num_inducing: int | Literal["auto"] | None = None
    num_components: int = 2
    inducing: Inducing = "kmeans"
    covariance: Literal["diagonal", "full"] = field(default="diagonal", kw_only=True)
    entropy: Literal["pairwise", "jensen", "monte_carlo"] = field(
        default="pairwise", kw_only=True
    )
    spread: float = field(default=0.5, kw_only=True)

    def __post_init__(self):
        if (
            isinstance(self.num_components, bool)
            or not isinstance(self.num_components, int | np.integer)
            or self.num_components < 1
        ):
            raise ValueError(
                f"MixtureSVGP: num_components must be a positive whole number, got "
                f"{self.num_components!r}."
            )
        if self.entropy not in ENTROPIES:
            raise ValueError(
                f"MixtureSVGP: entropy must be one of {ENTROPIES}, got {self.entropy!r}."
            )
        if not self.spread > 0 and self.num_components > 1:
            raise ValueError(
                f"MixtureSVGP: spread must be positive, got {self.spread}: components that "
                "start equal stay equal."
            )
        super().__post_init__()

    @property
    def gaussian(self) -> SVGP:
        """A component for itself."""
        return SVGP(**{f.name: getattr(self, f.name) for f in fields(SVGP)})

    def at_gaussian(
        self, modes: list[dict], bounds: list[float], factor: Callable[[], np.ndarray]
    ) -> dict:
        """See the base class; components at its modes or around it."""
        return self.family.around(modes, bounds)

    def _family(self, name, covariance):
        each = super()._family(name, covariance)
        check_blocks(name, each)
        return Mixture(self.num_components, each, self.entropy, self.spread, self.seed)

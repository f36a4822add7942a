"""The prior at a GP site, its posteriors, and the KL between them."""

from numpyro_sgp.distributions.black_box import BlackBox, BlackBoxError
from numpyro_sgp.distributions.collapsed import (
    CollapsedODVGP,
    CollapsedSOLVEGP,
    CollapsedSVGP,
)
from numpyro_sgp.distributions.conjugate_gradients import CollapsedCG
from numpyro_sgp.distributions.function_samples import FunctionSamples
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.kept_posterior import Kept, KeptPosterior, keep
from numpyro_sgp.distributions.marginal import MarginalGP
from numpyro_sgp.distributions.posterior import GPPosterior
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior

__all__ = [
    "BlackBox",
    "BlackBoxError",
    "CollapsedCG",
    "CollapsedODVGP",
    "CollapsedSOLVEGP",
    "CollapsedSVGP",
    "FunctionSamples",
    "GPPosterior",
    "GaussianProcess",
    "Kept",
    "KeptPosterior",
    "MarginalGP",
    "SparsePosterior",
    "keep",
]

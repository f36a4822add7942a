"""The prior at a GP site, its posteriors, and the KL between them."""

from numpyro_sgp.distributions.black_box import BlackBox, BlackBoxError
from numpyro_sgp.distributions.collapsed import (
    CollapsedCG,
    CollapsedODVGP,
    CollapsedSOLVEGP,
    CollapsedSVGP,
    MarginalGP,
)
from numpyro_sgp.distributions.coupled_posterior import CoupledPosterior
from numpyro_sgp.distributions.decoupled_posterior import DecoupledPosterior
from numpyro_sgp.distributions.function_samples import FunctionSamples
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.mixture_posterior import MixturePosterior
from numpyro_sgp.distributions.posterior import GPPosterior
from numpyro_sgp.distributions.relaxation import neighbour_blocks
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior

__all__ = [
    "BlackBox",
    "BlackBoxError",
    "CollapsedCG",
    "CollapsedODVGP",
    "CollapsedSOLVEGP",
    "CollapsedSVGP",
    "CoupledPosterior",
    "DecoupledPosterior",
    "FunctionSamples",
    "GPPosterior",
    "GaussianProcess",
    "MarginalGP",
    "MixturePosterior",
    "SparsePosterior",
    "neighbour_blocks",
]

"""Sparse Gaussian processes inside NumPyro programs."""

from numpyro_sgp import datasets, kernels, likelihoods, means
from numpyro_sgp.diagnostics import (
    Calibration,
    Comparison,
    calibrate,
    compare,
    to_arviz,
)
from numpyro_sgp.distributions import (
    BlackBox,
    BlackBoxError,
    CollapsedCG,
    CollapsedODVGP,
    CollapsedSOLVEGP,
    CollapsedSVGP,
    CoupledPosterior,
    DecoupledPosterior,
    FunctionSamples,
    GaussianProcess,
    MarginalGP,
    MixturePosterior,
    SparsePosterior,
    neighbour_blocks,
)
from numpyro_sgp.elbo import GaussHermite, MonteCarlo, ScoreFunction, TraceGP_ELBO
from numpyro_sgp.fit import FitInterrupted, fit_lbfgs, natural_gradients
from numpyro_sgp.guides import ODVGP, SOLVEGP, SVGP, VGP, AutoSparseGP, MixtureSVGP
from numpyro_sgp.inducing import assess_inducing, initial_inducing
from numpyro_sgp.mcmc import EllipticalSlice, WhitenReparam, sparsify, whiten
from numpyro_sgp.predict import GPPredictive, log_predictive_density

__all__ = [
    "AutoSparseGP",
    "BlackBox",
    "BlackBoxError",
    "Calibration",
    "CollapsedCG",
    "CollapsedODVGP",
    "CollapsedSOLVEGP",
    "CollapsedSVGP",
    "Comparison",
    "CoupledPosterior",
    "DecoupledPosterior",
    "EllipticalSlice",
    "FitInterrupted",
    "FunctionSamples",
    "GPPredictive",
    "GaussHermite",
    "GaussianProcess",
    "MarginalGP",
    "MixturePosterior",
    "MixtureSVGP",
    "MonteCarlo",
    "ODVGP",
    "SOLVEGP",
    "SVGP",
    "ScoreFunction",
    "SparsePosterior",
    "TraceGP_ELBO",
    "VGP",
    "WhitenReparam",
    "assess_inducing",
    "calibrate",
    "compare",
    "datasets",
    "fit_lbfgs",
    "initial_inducing",
    "kernels",
    "likelihoods",
    "log_predictive_density",
    "means",
    "natural_gradients",
    "neighbour_blocks",
    "sparsify",
    "to_arviz",
    "whiten",
]

"""Sparse Gaussian processes inside NumPyro programs."""

from numpyro_sgp import datasets, families, kernels, likelihoods, means
from numpyro_sgp._version import __version__
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
    FunctionSamples,
    GaussianProcess,
    MarginalGP,
    SparsePosterior,
    relaxation,
)
from numpyro_sgp.elbo import GaussHermite, MonteCarlo, ScoreFunction, TraceGP_ELBO
from numpyro_sgp.fitting import Fitted, fit, load
from numpyro_sgp.guides import (
    ODVGP,
    SOLVEGP,
    SVGP,
    VGP,
    AutoSparseGP,
    MixtureSVGP,
)
from numpyro_sgp.inducing import (
    FourierFeatures,
    InducingPatches,
    InducingVariables,
    SmoothedPoints,
    assess_inducing,
    initial_inducing,
)
from numpyro_sgp.integrated import AutoJointGP, Mixture, Nested, nested
from numpyro_sgp.inverse_free import InverseFreePosterior, InverseFreeSVGP
from numpyro_sgp.layers import convolutional_layer, layer
from numpyro_sgp.linalg.row_blocks import neighbour_blocks
from numpyro_sgp.mcmc import EllipticalSlice, WhitenReparam, sparsify, whiten
from numpyro_sgp.predictive import (
    GPPredictive,
    Marginals,
    Prediction,
    Predictions,
    Predictor,
    log_predictive_density,
    predict,
)
from numpyro_sgp.training import (
    FitInterrupted,
    TrainResult,
    fit_lbfgs,
    natural_gradients,
    pad_rows,
    train,
)

__all__ = [
    "ODVGP",
    "SOLVEGP",
    "SVGP",
    "VGP",
    "AutoJointGP",
    "AutoSparseGP",
    "BlackBox",
    "BlackBoxError",
    "Calibration",
    "CollapsedCG",
    "CollapsedODVGP",
    "CollapsedSOLVEGP",
    "CollapsedSVGP",
    "Comparison",
    "EllipticalSlice",
    "FitInterrupted",
    "Fitted",
    "FourierFeatures",
    "FunctionSamples",
    "GPPredictive",
    "GaussHermite",
    "GaussianProcess",
    "InducingPatches",
    "InducingVariables",
    "InverseFreePosterior",
    "InverseFreeSVGP",
    "MarginalGP",
    "Marginals",
    "Mixture",
    "MixtureSVGP",
    "MonteCarlo",
    "Nested",
    "Prediction",
    "Predictions",
    "Predictor",
    "ScoreFunction",
    "SmoothedPoints",
    "SparsePosterior",
    "TraceGP_ELBO",
    "TrainResult",
    "WhitenReparam",
    "__version__",
    "assess_inducing",
    "calibrate",
    "compare",
    "convolutional_layer",
    "datasets",
    "families",
    "fit",
    "fit_lbfgs",
    "initial_inducing",
    "kernels",
    "layer",
    "likelihoods",
    "load",
    "log_predictive_density",
    "means",
    "natural_gradients",
    "neighbour_blocks",
    "nested",
    "pad_rows",
    "predict",
    "relaxation",
    "sparsify",
    "to_arviz",
    "train",
    "whiten",
]

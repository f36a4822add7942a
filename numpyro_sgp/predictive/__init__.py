"""Predictive densities, moments and quantiles, and predictions from samples of MCMC."""

from numpyro_sgp.predictive.conditional import GPPredictive
from numpyro_sgp.predictive.densities import log_predictive_density
from numpyro_sgp.predictive.marginals import Marginals, Predictor
from numpyro_sgp.predictive.predictions import Prediction, Predictions, predict

__all__ = [
    "GPPredictive",
    "Marginals",
    "Prediction",
    "Predictions",
    "Predictor",
    "log_predictive_density",
    "predict",
]

"""The objective, and rules for expectations under a sparse posterior."""

from numpyro_sgp.elbo.expectation import Expectation, MonteCarlo, ScoreFunction
from numpyro_sgp.elbo.predictor import AlongPredictors
from numpyro_sgp.elbo.quadrature import GaussHermite, Trapezoid
from numpyro_sgp.elbo.trace_gp import TraceGP_ELBO

__all__ = [
    "AlongPredictors",
    "Expectation",
    "GaussHermite",
    "MonteCarlo",
    "ScoreFunction",
    "TraceGP_ELBO",
    "Trapezoid",
]

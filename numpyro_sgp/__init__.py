"""Sparse Gaussian processes inside NumPyro programs."""

from numpyro_sgp import datasets, kernels, means
from numpyro_sgp.diagnostics import Comparison, compare, to_arviz
from numpyro_sgp.distributions import GaussianProcess, SparsePosterior
from numpyro_sgp.elbo import GaussHermite, MonteCarlo, TraceGP_ELBO
from numpyro_sgp.guides import ODVGP, SOLVEGP, SVGP, AutoSparseGP
from numpyro_sgp.inducing import assess_inducing, initial_inducing
from numpyro_sgp.mcmc import WhitenReparam, whiten
from numpyro_sgp.predict import GPPredictive

__all__ = [
    "AutoSparseGP",
    "Comparison",
    "GPPredictive",
    "GaussHermite",
    "GaussianProcess",
    "MonteCarlo",
    "ODVGP",
    "SOLVEGP",
    "SVGP",
    "SparsePosterior",
    "TraceGP_ELBO",
    "WhitenReparam",
    "assess_inducing",
    "compare",
    "datasets",
    "initial_inducing",
    "kernels",
    "means",
    "to_arviz",
    "whiten",
]

"""Training: L-BFGS on fixed random numbers, and natural gradients for q(u)."""

from numpyro_sgp.fit.lbfgs import FitInterrupted, fit_lbfgs
from numpyro_sgp.fit.natural_gradients import natural_gradients

__all__ = ["FitInterrupted", "fit_lbfgs", "natural_gradients"]

"""Training on all data: L-BFGS on fixed random numbers, natural gradients for q(u)."""

from numpyro_sgp.fit.lbfgs import FitInterrupted, fit_lbfgs

__all__ = ["FitInterrupted", "fit_lbfgs"]

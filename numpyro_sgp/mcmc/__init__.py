"""Running the same model by Markov chain Monte Carlo."""

from numpyro_sgp.mcmc.elliptical_slice import EllipticalSlice
from numpyro_sgp.mcmc.sparsify import sparsify
from numpyro_sgp.mcmc.whiten import WhitenReparam, whiten

__all__ = ["EllipticalSlice", "WhitenReparam", "sparsify", "whiten"]

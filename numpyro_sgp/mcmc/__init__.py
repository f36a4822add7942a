"""Running the same model by Markov chain Monte Carlo."""

from numpyro_sgp.mcmc.whiten import WhitenReparam, whiten

__all__ = ["WhitenReparam", "whiten"]

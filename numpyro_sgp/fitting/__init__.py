"""What a fit gives: predictions, draws, figures, and files of it."""

from numpyro_sgp.fitting.fitted import Fitted, LogScore, load

__all__ = ["Fitted", "LogScore", "load"]

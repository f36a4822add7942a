"""From a model and data to a trained guide: training without tuning, and its result."""

from numpyro_sgp.fitting.default import fit
from numpyro_sgp.fitting.fitted import Fitted, LogScore, load

__all__ = ["Fitted", "LogScore", "fit", "load"]

"""From a model and data to a trained guide: training without tuning, and its result."""

from numpyro_sgp.fitting.default import fit
from numpyro_sgp.fitting.fitted import Fitted
from numpyro_sgp.fitting.loading import load
from numpyro_sgp.fitting.log_score import LogScore

__all__ = ["Fitted", "LogScore", "fit", "load"]

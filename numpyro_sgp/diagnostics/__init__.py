"""Results as ArviZ data, and fits side by side."""

from numpyro_sgp.diagnostics.arviz import to_arviz
from numpyro_sgp.diagnostics.calibration import Calibration, calibrate
from numpyro_sgp.diagnostics.compare import compare
from numpyro_sgp.diagnostics.comparison import Comparison

__all__ = ["Calibration", "Comparison", "calibrate", "compare", "to_arviz"]

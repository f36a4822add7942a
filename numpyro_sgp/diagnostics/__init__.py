"""Results as ArviZ data, and fits side by side."""

from numpyro_sgp.diagnostics.arviz import to_arviz
from numpyro_sgp.diagnostics.calibration import Calibration, calibrate
from numpyro_sgp.diagnostics.compare import Comparison, compare

__all__ = ["Calibration", "Comparison", "calibrate", "compare", "to_arviz"]

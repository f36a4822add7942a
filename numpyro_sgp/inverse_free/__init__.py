"""
Bounds and posteriors from matrix products alone, for SVGP without a factor of K_uu.

:class:`InverseFreeSVGP` is the approximation that a user writes; the rest of the package
knows nothing of it.
"""

from numpyro_sgp.inverse_free.approximation import InverseFreeSVGP
from numpyro_sgp.inverse_free.iterations import InverseRoot, inverse_root, ulisse
from numpyro_sgp.inverse_free.log_det import log_det
from numpyro_sgp.inverse_free.posterior import InverseFreePosterior

__all__ = [
    "InverseFreePosterior",
    "InverseFreeSVGP",
    "InverseRoot",
    "inverse_root",
    "log_det",
    "ulisse",
]

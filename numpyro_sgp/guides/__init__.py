"""Sparse approximations and the guide that puts them at the GP sites of a model."""

from numpyro_sgp.guides.approximations import ODVGP, SOLVEGP, SVGP, VGP, MixtureSVGP
from numpyro_sgp.guides.auto_sparse_gp import AutoSparseGP

__all__ = [
    "ODVGP",
    "SOLVEGP",
    "SVGP",
    "VGP",
    "AutoSparseGP",
    "MixtureSVGP",
]

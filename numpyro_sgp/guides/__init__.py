"""Sparse approximations and the guide that puts them at the GP sites of a model."""

from numpyro_sgp.guides.approximations import ODVGP, SOLVEGP, SVGP, VGP
from numpyro_sgp.guides.auto_sparse_gp import AutoSparseGP
from numpyro_sgp.guides.mixture_svgp import MixtureSVGP

__all__ = [
    "ODVGP",
    "SOLVEGP",
    "SVGP",
    "VGP",
    "AutoSparseGP",
    "MixtureSVGP",
]

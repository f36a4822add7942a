"""Variational families q(u) over inducing variables: one file has one."""

from numpyro_sgp.families.base import QU, Factors, Family, Param, Start
from numpyro_sgp.families.blocks import (
    Block,
    BlockGaussian,
    Diagonal,
    Full,
    PriorAfterFirst,
)
from numpyro_sgp.families.coupled import Coupled, CoupledGaussian
from numpyro_sgp.families.decoupled import Decoupled, DecoupledGaussian
from numpyro_sgp.families.dual import Dual, DualGaussian
from numpyro_sgp.families.mixture import Mixture, MixtureGaussian
from numpyro_sgp.families.pseudo_data import PseudoData, PseudoDataGaussian

__all__ = [
    "QU",
    "Block",
    "BlockGaussian",
    "Coupled",
    "CoupledGaussian",
    "Decoupled",
    "DecoupledGaussian",
    "Diagonal",
    "Dual",
    "DualGaussian",
    "Factors",
    "Family",
    "Full",
    "Mixture",
    "MixtureGaussian",
    "Param",
    "PriorAfterFirst",
    "PseudoData",
    "PseudoDataGaussian",
    "Start",
]

"""Inducing variables: their kinds, where they start, and how good a start that is."""

from numpyro_sgp.inducing.initialise import InducingStart, initial_inducing
from numpyro_sgp.inducing.variables import (
    InducingPatches,
    InducingVariables,
)
from numpyro_sgp.inducing.verdict import InducingVerdict, NearestPair, assess_inducing
from numpyro_sgp.inducing.windowed import FourierFeatures, SmoothedPoints

__all__ = [
    "FourierFeatures",
    "InducingPatches",
    "InducingStart",
    "InducingVariables",
    "InducingVerdict",
    "NearestPair",
    "SmoothedPoints",
    "assess_inducing",
    "initial_inducing",
]

"""Inducing points: where they start, and how good a start that is."""

from numpyro_sgp.inducing.initialise import InducingStart, initial_inducing
from numpyro_sgp.inducing.verdict import InducingVerdict, NearestPair, assess_inducing

__all__ = [
    "InducingStart",
    "InducingVerdict",
    "NearestPair",
    "assess_inducing",
    "initial_inducing",
]

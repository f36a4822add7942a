"""
Two small sets that ship with the package; ``SOURCES.md`` beside this file says where
each comes from.
"""

from numpyro_sgp.datasets._coal import CoalMining, coal_mining, days_to_year
from numpyro_sgp.datasets._snelson import Snelson, snelson, snelson_subset

__all__ = [
    "CoalMining",
    "Snelson",
    "coal_mining",
    "days_to_year",
    "snelson",
    "snelson_subset",
]

"""
Data: two small sets that ship with the package (``SOURCES.md`` beside this file says where
each comes from), and readers of nine more from a folder that the caller names. No reader
downloads anything.
"""

from numpyro_sgp.datasets._classification import breast_cancer, mnist, usps
from numpyro_sgp.datasets._coal import CoalMining, coal_mining, days_to_year
from numpyro_sgp.datasets._folder import ClassificationSplit, RegressionSplit, Warp
from numpyro_sgp.datasets._regression import abalone, airline, boston, creep, sarcos
from numpyro_sgp.datasets._seismic import Seismic, seismic
from numpyro_sgp.datasets._snelson import Snelson, snelson, snelson_subset

__all__ = [
    "ClassificationSplit",
    "CoalMining",
    "RegressionSplit",
    "Seismic",
    "Snelson",
    "Warp",
    "abalone",
    "airline",
    "boston",
    "breast_cancer",
    "coal_mining",
    "creep",
    "days_to_year",
    "mnist",
    "sarcos",
    "seismic",
    "snelson",
    "snelson_subset",
    "usps",
]

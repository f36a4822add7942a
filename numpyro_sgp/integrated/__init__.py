"""Hyperparameters integrated over nodes, GP sites and effects as one Gaussian at each."""

from numpyro_sgp.integrated.marginals import Mixture
from numpyro_sgp.integrated.nested import nested
from numpyro_sgp.integrated.result import Nested

__all__ = ["Mixture", "Nested", "nested"]

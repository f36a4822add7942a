"""The prior at a GP site, its sparse posterior, and the KL between them."""

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior

__all__ = ["GaussianProcess", "SparsePosterior"]

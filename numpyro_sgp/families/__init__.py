"""Variational families over inducing variables: q(u), its moments and its KL."""

from numpyro_sgp.families.block_gaussian import Block, BlockGaussian
from numpyro_sgp.families.dual import DualGaussian
from numpyro_sgp.families.sites import SiteGaussian

__all__ = ["Block", "BlockGaussian", "DualGaussian", "SiteGaussian"]

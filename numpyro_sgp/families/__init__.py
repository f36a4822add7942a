"""Variational families over inducing variables: q(u), its moments and its KL."""

from numpyro_sgp.families.block_gaussian import Block, BlockGaussian

__all__ = ["Block", "BlockGaussian"]

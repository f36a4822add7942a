"""
NumPyro's private names that are used, in one place: where a version of NumPyro lacks one,
it is here that another is to be found.
"""

from numpyro import primitives
from numpyro.distributions import MaskedDistribution
from numpyro.infer import util as infer_util
from numpyro.util import _validate_model as validate_model

__all__ = ["HMC_HANDLERS", "arguments_of", "handler_stack", "mask_of", "validate_model"]

# What HMC and autoguides put around a model, and the handlers that are at work: for a
# hint only, so neither need be there.
HMC_HANDLERS = getattr(infer_util, "_unconstrain_params", ())
handler_stack = getattr(primitives, "_PYRO_STACK", ())


def arguments_of(mcmc) -> tuple[tuple, dict]:
    """The arguments of the model of an MCMC that has run."""
    return mcmc._args, mcmc._kwargs


def mask_of(fn: MaskedDistribution):
    """The mask of a distribution that has one, a bool or an array."""
    return fn._mask

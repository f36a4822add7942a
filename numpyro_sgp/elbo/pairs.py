"""Whether a guide is one of a model: of the same GP sites, plates and priors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.util import not_jax_tracer

from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins


def check_sites(model_trace: dict, guide_trace: dict, gp_sites) -> None:
    """
    :param gp_sites: names of the guide's sparse posteriors.
    :raises ValueError: if GP sites or plates are not those of the model.
    """
    if not gp_sites:
        raise ValueError(
            "The guide has no sparse posterior at any site. Use AutoSparseGP(model, ...) "
            "as the guide, or one of NumPyro's ELBOs with this one."
        )
    for name, site in model_trace.items():
        if messages.is_latent_gp(site) and name not in gp_sites:
            raise ValueError(f"The guide has no sparse posterior at GP site '{name}'.")
    for name in subsample_plate_sizes(model_trace):
        if name not in guide_trace:
            raise ValueError(
                f"The model subsamples plate '{name}', but the guide does not open it, so "
                "that each would see a minibatch of its own. Open "
                f"numpyro.plate('{name}', ...) with the same sizes in the guide."
            )


_ARRAYS = jax.Array, np.ndarray, np.number, float, int


def is_own(model, guide) -> bool:
    """Whether a guide makes its posteriors with the priors of this very model."""
    return hasattr(guide, "approximations") and guide.model == model


def check_priors(run_guide, run_model, params: dict) -> None:
    """
    Checks a guide that is not :func:`is_own`, such as an ``AutoGuideList`` or a function,
    whose parts may have been made of a model in which others are hidden: what these are
    there is a draw of the prior, and no value of the guide.

    :param run_guide: runs the guide, given parameters.
    :param run_model: runs the model, given them and the guide's trace.
    :param params: constrained parameters.
    :raises ValueError: if kernels or means of q(f) are made of other parameters than those
        of the model's prior, or of other numbers.
    """
    numbers: dict[str, tuple] = {}

    def priors(params):
        of_guide: dict[str, Any] = {}

        def at_site(site):
            fn = site["fn"]
            of_guide[site["name"]] = messages.unwrap(fn)[0].prior
            return fn, jnp.zeros(fn.shape(), messages.unwrap(fn)[0].prior.X.dtype)

        at_sites = messages.AtGPSites(at_site, are=messages.is_sparse_posterior)
        with handlers.trace() as guide_trace, at_sites:
            run_guide(params)
        with handlers.trace() as model_trace:
            run_model(params, guide_trace)
        found = {}
        for name, prior in of_guide.items():
            if name in model_trace:
                pair = _parts(prior), _parts(messages.unwrap(model_trace[name]["fn"])[0])
                numbers[name] = tuple([_known(leaf) for leaf in part] for part in pair)
                found |= {f"{name} of guide": pair[0], f"{name} of model": pair[1]}
        return found

    made_of = origins(priors, params)
    for name, (guide, model) in numbers.items():
        ours, theirs = made_of[f"{name} of guide"], made_of[f"{name} of model"]
        if ours != theirs:
            raise ValueError(
                f"At GP site '{name}' q(f) is made with another prior than the model's, "
                f"whose kernel and mean depend on {sorted(theirs) or 'no parameter'} and "
                f"those of q(f) on {sorted(ours) or 'none'}: latents that are hidden from "
                "it (numpyro.handlers.block) are drawn. Make one guide of the whole "
                "model, with yours of the other latents in it: AutoSparseGP(model, "
                "approximation, base_guide=lambda model: yours)."
            )
        same = len(guide) == len(model) and all(map(_may_be_same, guide, model))
        if not same:
            raise ValueError(
                f"At GP site '{name}' q(f) is made with another kernel or mean than the "
                "model's. Make the guide of the model that is trained: "
                "AutoSparseGP(model, approximation)."
            )


def _parts(prior) -> list:
    leaves = jax.tree.leaves((prior.kernel, prior.mean_function))
    return [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]


def _known(leaf):
    """A number, or None where it is traced."""
    return np.asarray(leaf) if not_jax_tracer(leaf) else None


def _may_be_same(a, b) -> bool:
    return a is None or b is None or (a.shape == b.shape and bool(np.all(a == b)))

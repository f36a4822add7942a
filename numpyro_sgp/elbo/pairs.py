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
from numpyro_sgp.tracing.trees import is_number


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


_LABELS = "{} of guide", "{} of model"


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
    numbers: dict[str, list] = {}
    same: dict[str, bool] = {}

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
                other = messages.unwrap(model_trace[name]["fn"])[0]
                pairs = [(prior.kernel, other.kernel)]
                if _kinds(prior.mean_function) == _kinds(other.mean_function):
                    pairs.append((prior.mean_function, other.mean_function))
                numbers[name] = [tuple(map(_numbers, pair)) for pair in pairs]
                for label, parts in zip(_LABELS, zip(*pairs, strict=True), strict=True):
                    found[label.format(name)] = list(map(_arrays, parts))
                same[name] = _kinds(prior.kernel) == _kinds(other.kernel)
        return found

    made_of = origins(priors, params)
    for name, pairs in numbers.items():
        ours, theirs = (made_of[label.format(name)] for label in _LABELS)
        if ours != theirs:
            raise ValueError(
                f"At GP site '{name}' q(f) is made with another prior than the model's, "
                f"whose kernel and mean depend on {sorted(theirs) or 'no parameter'} and "
                f"those of q(f) on {sorted(ours) or 'none'}: latents that are hidden from "
                "it (numpyro.handlers.block) are drawn. Make one guide of the whole "
                "model, with yours of the other latents in it: AutoSparseGP(model, "
                "approximation, base_guide=lambda model: yours)."
            )
        if not (same[name] and all(_may_be_same(*pair) for pair in pairs)):
            raise ValueError(
                f"At GP site '{name}' q(f) is made with another kernel or mean than the "
                "model's. Make the guide of the model that is trained: "
                "AutoSparseGP(model, approximation)."
            )


def _kinds(part):
    """Classes of what a kernel or mean is made of; functions are of one."""

    def of(structure):
        kind, _ = structure.node_data() or (None, None)
        return kind, *map(of, structure.children())

    return type(part), of(jax.tree.structure(part))


def _arrays(part) -> list:
    return [leaf for leaf in jax.tree.leaves(part) if is_number(leaf)]


def _numbers(part) -> list:
    """Arrays, None where they are traced."""
    return [np.asarray(v) if not_jax_tracer(v) else None for v in _arrays(part)]


def _may_be_same(some, others) -> bool:
    """Whether numbers are equal but for what is not known, and for rounding to float32."""

    def agree(a, b):
        return a is None or b is None or np.allclose(a, b, rtol=1e-5, atol=0.0)

    return len(some) == len(others) and all(map(agree, some, others))

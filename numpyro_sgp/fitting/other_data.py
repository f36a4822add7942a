"""Data that a guide was not set up with, where a training goes on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_sgp._programs import Data, on_data
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.row_latents import other_rows, row_latents
from numpyro_sgp.tracing import messages


def inputs_of(guide: Any, args: tuple, kwargs: dict) -> dict[str, np.ndarray]:
    """
    Inputs of GP sites with these arguments of the model, ``(N, D)`` by name; those that the
    set-up knows where it was with these data, or with minibatches.

    :param guide: set up.
    """
    setup = guide.known()
    if setup.subsampled or _are_those(setup, args, kwargs):  # else they are looked up
        return {name: np.asarray(site.X) for name, site in setup.sites.items()}

    def run(args, kwargs):
        where = guide.model, args, kwargs
        trace = messages.trace_of(*where, at_site=messages.at_prior_mean)
        return [messages.unwrap(trace[name]["fn"])[0].X for name in setup.sites]

    found = _among_arguments(run, args, kwargs) or on_data(run, args, kwargs)
    pairs = zip(setup.sites, map(np.asarray, found), strict=True)
    return {name: X.reshape(-1, X.shape[-1]) for name, X in pairs}


def guide_for(guide: AutoSparseGP, args: tuple, kwargs: dict) -> AutoSparseGP | None:
    """
    A guide with the inducing points of another one that is set up with these data, where
    that matters: where latents have an entry for each row, or supports of their priors are
    made of the data. None where the guide itself does, and where it is not set up.

    :raises ValueError: if the data do not fit the guide.
    """
    if not guide.is_set_up or not _is_of_others(guide, args, kwargs):
        return None
    setup = guide.known()
    other = guide.instead(guide.approximation)
    other.setup_from(setup.state, setup.description, *args, **kwargs)
    other.remember((args, kwargs), None)
    return other


def check_joint_data(guide: Any, args: tuple, kwargs: dict) -> None:
    """
    :raises ValueError: if a training of a joint guide would go on with data for which
        :func:`guide_for` has another one.
    """
    if getattr(guide, "prototype_trace", None) is None:
        return
    if _is_of_others(guide.known().field.guide, args, kwargs):
        raise ValueError(
            "This joint fit has a latent for each row, or priors that are made of the "
            "data, and these are other data than it was set up with. Fit them anew: "
            "fit(model, approximation, data, joint=True)."
        )


def _is_of_others(guide: AutoSparseGP, args, kwargs) -> bool:
    """Whether something of a guide that is set up would be another with these data."""
    setup = guide.known()
    if setup.subsampled:
        return False
    if names := row_latents(setup):
        where = guide.model, args, kwargs
        if setup.arguments is None or other_rows(setup, names, *where):
            return True
    return _has_other_supports(guide, args, kwargs)


def inside(values: dict, starts: dict) -> dict:
    """
    Unconstrained values, with starting ones in the place of those outside of a support.

    :param values: by name.
    :param starts: for at least these names.
    """
    return {
        name: jax.tree.map(lambda v, w: jnp.where(jnp.isfinite(v), v, w), v, starts[name])
        for name, v in values.items()
    }


def _are_those(setup, args, kwargs) -> bool:
    """Whether a guide was set up with these very arguments; equal ones may be others."""
    if setup.arguments is None:
        return False
    pair = (args, kwargs), setup.arguments
    given, known = map(jax.tree.leaves, pair)
    same = len({*map(jax.tree.structure, pair)}) == 1
    return same and all(a is b for a, b in zip(given, known, strict=True))


def _among_arguments(run, args, kwargs) -> list | None:
    """What ``run(args, kwargs)`` returns where that is among its arguments: no program."""
    data = Data(args, kwargs)
    traced = jax.make_jaxpr(lambda arrays: run(*data.filled(arrays)))(data.arrays).jaxpr
    arrays = dict(zip(traced.invars, data.arrays, strict=True))
    if any(isinstance(v, Literal) or v not in arrays for v in traced.outvars):
        return None
    return [arrays[v] for v in traced.outvars]


def _has_other_supports(guide, args, kwargs) -> bool:
    """Whether a latent's support is another one than with the data of the set-up."""
    setup = guide.known()

    def ends(fn):
        return jax.tree.leaves(biject_to(fn.support))

    named = [name for name in setup.latents if ends(setup.trace[name]["fn"])]
    if not named or setup.arguments is None:  # files ask for data of which these are made
        return False

    def supports(arguments):
        at = messages.at_prior_mean
        with handlers.block():
            trace = messages.trace_of(guide.model, *arguments, at_site=at)
        return [end for name in named for end in ends(trace[name]["fn"])]

    known, given = supports(setup.arguments), supports((args, kwargs))
    if len(known) != len(given):
        return True
    return not all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-6, atol=0.0)
        for a, b in zip(known, given, strict=True)
    )

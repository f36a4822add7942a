"""Latents with an entry for each row of the data, which say nothing of other rows."""

import jax
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_sgp.distributions.arguments import as_numbers, named_leaves
from numpyro_sgp.tracing import messages

#: What to do about them.
DRAW_ANEW = (
    "GPPredictive draws it anew: sgp.GPPredictive(model, samples, train_args=(X, y))(key, "
    "X_new), with samples = fitted.sample(key, sample_shape=(1000,)) or those of MCMC."
)

#: Of another number of rows, by site, its shape with these arguments, and that of before.
OTHER_ROWS = (
    "Latent site '{}' has the shape {} with these arguments, but the guide has values of "
    "shape {}, those of the rows that it was trained on: they say nothing of other rows. "
    f"{DRAW_ANEW} Of f alone there is posterior; a Normal latent is best a part of a "
    "Normal likelihood: dist.Normal(f, sqrt(s**2 + noise**2))."
)


class NoMarginals(ValueError):
    """Responses cannot be predicted row by row, or one by one; f can."""


def check_row_latents(setup, model, args, kwargs) -> None:
    """
    :param setup: of the guide, with the arguments that it was set up with.
    :raises NoMarginals: if there are such latents, which the model has with these arguments
        too, of another number of rows.
    :raises ValueError: if they are of as many other rows.
    """
    if not (names := row_latents(setup)):
        return
    found = _shapes(model, args, kwargs)
    names = names if found is None else [name for name in names if name in found]
    for name in names:
        before = np.shape(setup.trace[name]["value"])
        if found is not None and found[name] != before:
            raise NoMarginals(OTHER_ROWS.format(name, found[name], before))
    if names and (other := other_rows(setup, names, model, args, kwargs)):
        raise ValueError(
            f"Latent site '{names[0]}' has an entry for each row of the training data, and "
            f"argument '{other}' has other rows, of which these values say nothing. "
            f"{DRAW_ANEW}"
        )


def values_of_groups(setup) -> dict:
    """Starting values of the latents beside f, but for those with an entry for each row."""
    if not setup.latents:
        return {}
    of_rows = row_latents(setup)
    names = (name for name in setup.latents if name not in of_rows)
    return {name: setup.trace[name]["value"] for name in names}


def _shapes(model, args, kwargs) -> dict[str, tuple] | None:
    """Of the latents that a model has; None where it does not run."""
    found = {}

    def run():
        trace = messages.trace_of(model, args, kwargs, at_site=messages.at_prior_mean)
        latents = (s for s in trace.values() if s["type"] == "sample")
        found.update((s["name"], np.shape(s["value"])) for s in latents)
        return 0

    try:
        jax.eval_shape(run)
    except Exception:  # of the model's own code, which says so when it is run
        return None
    return found


def row_latents(setup) -> list[str]:
    """Latents beside f in a plate of the likelihood, of as many as a GP site has rows."""
    plates, trace = row_plates(setup), setup.trace
    return [
        name
        for name in setup.latents
        if any(frame.name in plates for frame in trace[name]["cond_indep_stack"])
    ]


def row_plates(setup) -> frozenset[str]:
    """Plates of the likelihood of as many as a GP site has rows."""
    rows = {np.shape(site.X)[-2] for site in setup.sites.values()}
    responses = filter(messages.is_response, setup.trace.values())
    frames = [frame for site in responses for frame in site["cond_indep_stack"]]
    return frozenset(frame.name for frame in frames if frame.size in rows)


def other_rows(setup, names, model, args, kwargs) -> str:
    """
    The first argument of as many rows as it had, or one, whose rows are others: of those
    that are inputs of GP sites, or, if none is as it is, of all but observations.
    """
    if setup.arguments is None:
        return ""
    before, sites = named_leaves(model, *setup.arguments), setup.trace.values()
    sizes = {f.size for name in names for f in setup.trace[name]["cond_indep_stack"]}
    observed = [s["value"] for s in sites if s["type"] == "sample" and s["is_observed"]]
    for name, value in named_leaves(model, args, kwargs).items():
        known = before.get(name)
        if known is None or not np.shape(value):
            continue
        if setup.inputs and name not in setup.inputs:
            continue
        if np.shape(known) != np.shape(value):
            # Values of all rows go with a single one by broadcasting.
            if setup.inputs and np.shape(value)[0] == 1 and np.shape(known)[0] in sizes:
                return name
            continue
        if not (not_jax_tracer(known) and not_jax_tracer(value)):
            continue
        try:
            known, value = as_numbers(known, ""), as_numbers(value, "")
        except TypeError:  # of strings
            continue
        if setup.inputs or not any(_are_same(known, y) for y in observed):
            if not _are_same(known, value):
                return name
    return ""


def _are_same(a, b) -> bool:
    """But for the digits that JAX takes."""
    if np.shape(a) != np.shape(b) or not not_jax_tracer(b):
        return False
    return np.allclose(a, b, rtol=1e-6, atol=0.0, equal_nan=True)

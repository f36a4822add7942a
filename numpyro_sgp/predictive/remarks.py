"""What to say of observed rows without a density, and of predicted angles."""

import warnings

import numpy as np
from numpyro.distributions import constraints
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp.tracing import messages


def warn_of_angles(trace, predictions) -> None:
    """
    Warns of means, standard deviations and quantiles of angles that may be at the cut: two
    standard deviations from their mean is beyond.

    :param trace: of the model, by name.
    :param predictions: by name.
    """
    for name, found in predictions.items():
        site = trace.get(name)
        if site is None or site["type"] != "sample" or messages.is_latent_gp(site):
            continue
        support = messages.support_of(messages.innermost(site["fn"]))
        known = found.mean is not None and not_jax_tracer(found.mean)
        if not known or not isinstance(support, type(constraints.circular)):
            continue
        rows = np.abs(found.mean) + 2.0 * np.asarray(found.sd) > np.pi
        if rows.any():
            warnings.warn(
                f"'{name}' is an angle, and {rows.sum()} predicted ones may be beyond pi "
                "or -pi, where one goes on from the other: their means, standard "
                "deviations and quantiles, of numbers between -pi and pi, say little. "
                "Look at f, which is on no circle, or at draws: numpyro.infer.Predictive("
                f"model, guide=guide, params=params, num_samples=1000)(key, X)['{name}'], "
                "and average their sines and cosines.",
                stacklevel=find_stack_level(),
            )


def warn_of_rows(name, log_density, counts):
    """
    Warns of rows without a density.

    :param name: of an observed site.
    :param counts: which rows have an observation.
    """
    rows = np.isneginf(log_density) & counts
    if np.any(rows):
        warnings.warn(
            f"The density of {np.sum(rows)} observed rows of site '{name}' (first: "
            f"{np.argmax(rows)}) is zero: they are outside of the support of the "
            "likelihood (classes go from 0, counts to their total), or too far from it. "
            "The mean over rows is -inf.",
            stacklevel=find_stack_level(),
        )
    rows = np.isnan(log_density) & counts
    if np.any(rows):
        warnings.warn(
            f"The log density of {np.sum(rows)} observed rows of site '{name}' (first: "
            f"{np.argmax(rows)}) is NaN: the likelihood is none at some values of f that "
            "the posterior has. Means over rows leave these rows out.",
            stacklevel=find_stack_level(),
        )

"""Values that observed sites can have."""

import inspect
import warnings
from contextlib import suppress

import jax
import numpy as np
from numpyro.distributions import constraints
from numpyro.util import not_jax_tracer

from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.checks import POSITIVE, places_of


def check_support(name, site, validated: bool) -> None:
    """
    Of values that are an argument of the model, of numbers one by one without a mask. Of
    numbers between whole ones nothing is said where the distribution does not validate
    what it is given (averages of counts), so that they have a density.

    :param validated: whether it does, as NumPyro's do by default.
    :raises ValueError: if known values are outside of a support that does not move with
        latents, or at its ends or between whole numbers where there is no density.
    """
    fn, value = messages.innermost(site["fn"]), site["value"]
    own = inspect.getattr_static(type(fn), "support", None)
    if fn.event_dim or type(own) is property or messages.is_masked(site["fn"]):
        return
    support = messages.support_of(fn)
    counted = getattr(support, "is_discrete", False)
    low, high = (getattr(support, f"{end}_bound", None) for end in ("lower", "upper"))
    if isinstance(support, type(constraints.boolean)):
        low, high = 0, 1
    ends = [end for end in (low, high) if end is not None]
    moves = not counted and constraints.is_dependent(type(fn).support)
    moves = moves or isinstance(support, type(constraints.circular))
    parts = value, *ends, *jax.tree.leaves(site["fn"])
    is_bounded = ends or isinstance(support, type(constraints.real))
    if moves or not is_bounded or not all(map(not_jax_tracer, parts)):
        return
    weight = 1.0 if site["scale"] is None else site["scale"]
    value, least = np.asarray(value), np.asarray(-np.inf if low is None else low)
    most = np.asarray(np.inf if high is None else high)
    outside, wrong = (value < least) | (value > most), "outside of"
    if not outside.any() and not counted:
        at_end = (value == least) | (value == most)
        if at_end.any():  # of some there is a density, as at zero of an exponential one
            with jax.ensure_compile_time_eval(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is told here
                outside = at_end & ~np.isfinite(np.asarray(fn.log_prob(value)))
            wrong = "at the end of" if ends else "outside of"
    if outside.any() and not_jax_tracer(weight) and not np.all(weight):
        with jax.ensure_compile_time_eval():  # by zero it counts for nothing, if finite
            finite = np.isfinite(np.asarray(fn.log_prob(value)))
        outside = outside & ~((np.asarray(weight) == 0) & finite)
    if outside.any():
        told = f"{least.min():g} to {most.max():g}"
        told = f"from {least.min():g}" if high is None else told
        told = f"up to {most.max():g}" if low is None else told
        told = told if ends else "finite numbers"
        first = np.broadcast_to(value, outside.shape)[outside][0]
        from_zero = "Classes are counted from 0; look" if counted else "Look"
        raise ValueError(
            f"Observed site '{name}' has values {wrong} what its {type(fn).__name__} can "
            f"be ({told}), in {places_of(np.atleast_1d(outside))}, as {first:g}. "
            f"{from_zero} for other units, and for codes of missing values."
        )
    weight = np.asarray(weight) if not_jax_tracer(weight) else 1.0
    broken = np.atleast_1d((value != np.floor(value)) & (weight != 0))
    if counted and validated and broken.any():
        first = np.broadcast_to(value, broken.shape)[broken][0]
        mend = "the exposure goes into the likelihood: Poisson(exposure * jnp.exp(f))"
        if high is not None:
            mend = "of shares, of how many: Binomial(number, logits=f)"
        raise ValueError(
            f"Observed site '{name}' has values that are no whole numbers, which its "
            f"{type(fn).__name__} counts, in {places_of(broken)}, as "
            f"{first:g}. Give counts as they are ({mend}), or take a likelihood of real "
            "numbers; where such values are meant, validate_args=False."
        )


def may_move(site) -> bool:
    """Whether a site's support, of numbers that are not counted, has ends of its own."""
    fn = messages.innermost(site["fn"])
    return bool(constraints.is_dependent(type(fn).support) and not fn.support.is_discrete)


def has_probabilities(site) -> bool:
    """Whether a site is a response with a probability for each of its entries."""
    if not messages.is_response(site):
        return False
    ranges = messages.innermost(site["fn"]).arg_constraints
    return ranges.get("probs") is constraints.unit_interval


def is_inside(site) -> np.ndarray:
    """Which known values are inside of a support, or masked."""
    inside = messages.support_of(messages.innermost(site["fn"]))(site["value"])
    return np.asarray(inside) | ~np.asarray(messages.counted(site))


def without_density(model, args: tuple, kwargs: dict) -> str:
    """
    Which observations have no finite density with functions at their prior means, or one
    above them, as what is to be said of them beside another error; empty if all have, or
    if that is not known.
    """
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPyro's, of a support
        for at_site in (messages.at_prior_mean, messages.above_prior_mean):
            trace = messages.trace_of(model, args, kwargs, at_site=at_site)
            for name, site in trace.items():
                if messages.is_response(site) and (told := _without_density(site)):
                    near = "near" if at_site is messages.above_prior_mean else "at"
                    return f"With functions {near} their prior means '{name}' has {told}. "
    return ""


def _without_density(site) -> str:
    density = np.asarray(messages.log_prob(site, scaled=False))
    bad = ~np.isfinite(density) & np.asarray(messages.counted(site))
    if not bad.any():
        return ""
    kind, value = type(messages.innermost(site["fn"])).__name__, np.asarray(site["value"])
    told = ""
    if value.ndim <= density.ndim:  # of numbers, not events
        told = f", as {np.broadcast_to(value, bad.shape)[bad][0]:g}"
    fn = messages.innermost(site["fn"])
    for argument, number in fn.get_args().items():
        constraint = fn.arg_constraints.get(argument)
        is_positive = constraint in (constraints.positive, constraints.nonnegative)
        if is_positive and np.all(np.asarray(number) <= 0.0):
            told += f", where its {argument} is {np.max(number):g}.{POSITIVE[:-1]}"
    places = places_of(np.atleast_1d(bad))
    return f"no finite log density under its {kind} in {places}{told}"

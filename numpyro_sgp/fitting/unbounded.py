"""Positive parameters that ran to zero, as the bound rises without end there."""

import warnings
from contextlib import suppress

import jax
import numpy as np

from numpyro_sgp.fitting.problem import unconstrained

# Shares of the start below which a parameter has gone to zero, and what the bound still
# rises by, in nats, for each power of e; others are not looked at.
_NEXT_TO_ZERO, _RISES, _SMALL = 1e-9, 0.1, 1e-4


def unbounded(fitted) -> dict[str, float]:
    """
    Hyperparameters next to zero at which the bound rises the smaller they are, as of the
    noise of responses that are all alike: it has no maximum.

    :param fitted: a fit that ended.
    :return: by name the smallest value; none for fits on minibatches or random bounds.
    """
    descent, now = fitted.descent, fitted.params
    if descent is None:
        return {}
    names = now.keys() & descent.free.keys() - fitted.guide.known().roles.keys()
    if not any(_is_small(now[n]) for n in names):  # most often, and nothing is compiled
        return {}
    left = {n: _left(descent.start_params[n], now[n]) for n in names}
    if not min(left.values()) < _NEXT_TO_ZERO:
        return {}
    tiny = {n for n, share in left.items() if share < _SMALL}  # what goes with it too
    with suppress(ValueError):  # an end at which the gradient is not finite
        descent.start_at(unconstrained(fitted.svi, now))
        slopes = {n: descent.gradient[descent.index({n})] for n in tiny}
        tiny = {n for n in tiny if np.max(slopes[n]) > _RISES}
    return {n: min(np.min(v) for v in jax.tree.leaves(now[n])) for n in sorted(tiny)}


def _is_small(values) -> bool:
    each = map(np.asarray, jax.tree.leaves(values))
    return any(np.any((v >= 0.0) & (v < _SMALL)) for v in each)


def _left(start, end) -> float:
    """Of positive numbers at the start the least share that is left."""
    shares = [np.inf]
    for first, last in zip(*map(jax.tree.leaves, (start, end)), strict=True):
        first, last = np.asarray(first), np.asarray(last)
        found = (first > 0.0) & (last >= 0.0)
        shares += [np.min(last[found] / first[found], initial=np.inf)]
    return float(min(shares))


def told_of(gone: dict[str, float]) -> str:
    """What is wrong with them."""
    some = " and ".join(f"'{name}' ({value:.1g})" for name, value in gone.items())
    return f"{some} ran to zero, where the bound has no maximum"


def warn_of(gone: dict[str, float]) -> None:
    """The same, to who called the caller, with what to do about it."""
    warnings.warn(
        f"{told_of(gone)}. Are all responses alike, or explained to the last digit? Give "
        "priors with no mass at zero (dist.LogNormal, say), or fix what is known.",
        stacklevel=4,
    )

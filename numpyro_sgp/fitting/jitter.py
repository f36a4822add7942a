"""What a fit loses to the jitter of its covariances."""

import copy
from contextlib import suppress
from dataclasses import replace

import jax
import numpy as np

from numpyro_sgp.fitting.float32 import DEAR
from numpyro_sgp.fitting.problem import Problem
from numpyro_sgp.fitting.rounds import descent_of
from numpyro_sgp.fitting.verdict import ENOUGH_NATS, Cause
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.linalg.cholesky import default_jitter
from numpyro_sgp.training.descent import Descent

#: Nats of another cause from which on it may be the jitter that it sees.
MAY_BE_JITTER = 1.0
_LESS = 100.0  # by so many times it is tried
_LEAST = 1e-12  # below which factors of float64 may be none


def of_jitter(
    problem: Problem, descent: Descent | None, others: list[Cause]
) -> list[Cause]:
    """
    The row of what a smaller jitter gains in float64, at the fit's parameters and with q(u)
    at its optimum: where a prior variance is a million times that of the noise, what is
    added to covariances for their factors is no more small. Then inducing points at all
    rows lose nats, and other causes take these for theirs. In float32 its row has them.

    :param descent: that of the problem, or None.
    :param others: causes that may see it.
    :return: the row, empty where little is gained or that is not known.
    """
    in_float64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    seen = any(cause.nats > MAY_BE_JITTER for cause in others)
    if not (in_float64 and seen and problem.natural) or problem.random:
        return []
    if not isinstance(problem.guide, AutoSparseGP) or problem.work(problem.num_rows) > DEAR:
        return []
    with suppress(Exception):  # a factor that there is none of, for one
        least, other = _with_less(problem)
        descent = descent or descent_of(problem, jax.random.key(0))
        descent.start_at(problem.free)
        smaller = descent_of(other, jax.random.key(0))
        smaller.start_at(problem.free)
        gained = float(descent.loss - smaller.loss)
        if gained > ENOUGH_NATS:
            told = f"with one of {least:.0e} the bound is {gained:.2g} nats higher at "
            told += "these hyperparameters, which may move then; causes above see it too"
            mend = f"jitter={least:.0e} of the approximation before all else; and a mean "
            mend += "and scales of the model that suit the data, so that the noise is not "
            mend += "a thousandth of the prior sd"
            return [Cause("jitter", gained, told=told, mend=mend)]
    return []


def _with_less(problem: Problem) -> tuple[float, Problem]:
    """The smallest jitter, and the same problem with it."""
    guide = copy.copy(problem.guide)
    setup, sites, least = guide.known(), {}, np.inf
    for name, site in setup.sites.items():
        option = copy.copy(site.approximation)
        jitter = default_jitter(np.float64) if option.jitter is None else option.jitter
        jitter = max(jitter / _LESS, _LEAST)
        # replace() makes one by what its class is given, and VGP is given no points.
        object.__setattr__(option, "jitter", jitter)
        sites[name] = replace(site, approximation=option)
        least = min(least, jitter)
    guide._setup = replace(setup, sites=sites)
    svi = copy.copy(problem.svi)
    svi.guide = guide
    return least, problem.in_place_of(svi, problem.state, problem.args, problem.kwargs)

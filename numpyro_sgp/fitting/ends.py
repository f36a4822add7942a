"""What the ends of several trainings tell of the best of them."""

import numpy as np

from numpyro_sgp.fitting.progress import CONVERGED, Trained
from numpyro_sgp.fitting.rounds import BEHIND, TIMES, remaining

OTHERS = "other inducing points may do better: the last ones did"
AGAIN = "trainings end apart, and other inducing points may gain {:.2g} nats or more"
ALONE = "trainings from other starts end {:.3g} nats lower or more, and one may end higher"
NOT_ALL = "other starts and inducing points were not all looked at ({})"
#: Nats between ends that are told.
APART = 1.0
_BEST = 4  # gaps between the best ends that tell of others


def could_be(found: Trained, bound: float) -> float:
    """Where one ended, or could come to: up to a bound, if it was left for being behind."""
    was_left = len(found.losses) >= BEHIND and found.bound < bound
    left = remaining([found.first_loss, *found.losses]) if was_left else 0.0
    return max(found.bound, min(found.bound + TIMES * left, bound))


def alone(apart: float) -> str:
    """Why a training ended that others ended so many nats lower than; 0 for not known."""
    if not apart:
        return CONVERGED
    return f"{CONVERGED}, to one of several optima: {ALONE.format(apart)}"


def among_many(expected: float) -> str:
    """Why a training ended where as many again would gain so many nats, about."""
    return f"{CONVERGED}, to one of many optima: {AGAIN.format(expected)}"


def expected_gain(ends: list[float]) -> float:
    """
    What the best of as many trainings again would gain, about. If bounds at which they end
    have a tail that falls off exponentially, gaps between the best of them, the i-th times
    i, have the mean of its scale, of which the gain is log 2 times as much.

    :param ends: where trainings ended; of few nothing is told.
    """
    best = np.sort(ends)[::-1][: _BEST + 1]
    gaps = -np.diff(best) * np.arange(1, len(best))
    return float(np.log(2.0) * gaps.mean()) if len(gaps) == _BEST else 0.0

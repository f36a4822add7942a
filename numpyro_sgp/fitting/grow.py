"""As many inducing points as pay."""

import time

import numpy as np
from tqdm import tqdm

from numpyro_sgp.diagnostics.sparsity import sparsity_curve

FIRST, LARGEST = 32, 512
_ENOUGH_NATS = 1.0
_MOST_GROWTH = 4
_FEW_STEPS = 60  # with each number before it is known whether that is enough


def with_points(approximation, number: int):
    """An approximation, or a dict of them, with a number in the place of ``"auto"``."""
    if isinstance(approximation, dict):
        return {name: with_points(option, number) for name, option in approximation.items()}
    return approximation.with_points(number) if approximation.is_auto else approximation


def grow(begin, go_on, args: tuple, kwargs: dict, until: float | None, progress_bar):
    """
    Trains with more and more inducing points, until those that there are lose less than a
    nat (or a further one gains less than 0.1), 512 are reached, or time is up; a few steps
    with each number, and with the last one to the end.

    Hyperparameters and other latents go on from the training before.

    :param begin: from a number, starting parameters and a number of steps to a fit.
    :param go_on: from a fit to one that has converged.
    :param until: time on the monotonic clock.
    :return: the last fit; its ``grown`` has number of points, nats lost and seconds of each
        number.
    """
    # There cannot be more points than distinct rows.
    rows = len(np.unique(next(a for a in args if np.ndim(a)), axis=0))
    number, start, grown = min(FIRST, rows), None, []
    while True:
        begun = time.monotonic()
        fitted = begin(number, start, _FEW_STEPS)
        guide, params = fitted.guide, fitted.params
        curve = sparsity_curve(guide, params, *args, loss=fitted.loss, **kwargs)
        grown.append((number, curve.lost, time.monotonic() - begun))
        if progress_bar:
            tqdm.write(f"{number} inducing points: {curve}")
        enough = not curve.lost > _ENOUGH_NATS or curve.needed == curve.num_inducing
        if enough or number >= min(LARGEST, rows):
            break
        if until is not None and time.monotonic() >= until:
            break
        sites = max(1, len(guide.approximations))
        wanted = curve.needed // sites if curve.needed else _MOST_GROWTH * number
        number = int(min(max(wanted, 2 * number), _MOST_GROWTH * number, LARGEST, rows))
        roles = guide.roles()
        start = {name: value for name, value in params.items() if name not in roles}
    if until is None or time.monotonic() < until:
        fitted = go_on(fitted)
    fitted.grown = tuple(grown)
    if curve.unknown:
        fitted.stopped += f"; {curve}"
    return fitted

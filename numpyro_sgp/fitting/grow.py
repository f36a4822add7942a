"""As many inducing points as pay."""

import time

import numpy as np
from tqdm import tqdm

from numpyro_sgp.diagnostics.sparsity import sparsity_curve
from numpyro_sgp.fitting.progress import INTERRUPTED, Limits
from numpyro_sgp.fitting.verdict import ENOUGH_BY_POINTS
from numpyro_sgp.guides.checks import assigned

FIRST, LARGEST = 32, 512
_ENOUGH_EACH = 0.1  # that a further point gains
_CHEAP = 128  # points up to which gaining ENOUGH_BY_POINTS in all is enough
_NOTHING_LOST = 0.1
_MOST_GROWTH = 4
_FEW_STEPS = 60  # with each number before it is known whether that is enough


def with_points(approximation, number: int, most: dict[str, int] | None = None):
    """
    An approximation, or a dict of them, with a number in the place of ``"auto"``.

    :param most: of :func:`most_points`: a dict by site then, with no more than that.
    """
    if most is not None:
        options = assigned(approximation, [*most])
        numbers = {name: min(number, limit) for name, limit in most.items()}
        return {name: with_points(options[name], numbers[name]) for name in most}
    if isinstance(approximation, dict):
        return {name: with_points(option, number) for name, option in approximation.items()}
    return approximation.with_points(number) if approximation.is_auto else approximation


def most_points(approximation, guide) -> dict[str, int]:
    """
    The most inducing points that ``"auto"`` may be at each GP site; 0 where a number is
    given already.

    :param guide: one with any number of them, which is set up.
    """
    # Rows of the sites' own inputs, which the model may make of any of its arguments.
    inputs = {name: site.X for name, site in guide.known().sites.items()}
    options = assigned(approximation, [*inputs])
    return {
        name: options[name].most_points(len(np.unique(X, axis=0)))
        if options[name].is_auto
        else 0
        for name, X in inputs.items()
    }


def grow(begin, go_on, most: int, args: tuple, kwargs: dict, limits: Limits, progress_bar):
    """
    Trains with more and more inducing points, until those that there are lose less than a
    nat (or a further one gains less than 0.1), 512 are reached, or limits are; a few steps
    with each number, and with those that seem enough to the end. Where the user stops one
    of these trainings, its fit is the last.

    What is lost is told at the hyperparameters of so few points, which make noise larger
    and functions smoother until few do: at 32 points for 308 rows 1.7 nats, where 64 gain
    22 and 128 another 19. So where there seem to be enough, and they lose more than 0.1,
    twice as many are tried for a few steps from where the training ended. That trial is
    kept where it gains a nat, and 0.1 for each point beyond 128; where it fails or is
    stopped, the fit before it is the last.

    Hyperparameters and other latents go on from the training before.

    :param begin: from a number, starting parameters and limits to a fit.
    :param go_on: from a fit and limits to one that has converged.
    :param most: points that there may be, 512 excepted.
    :param limits: of all trainings together.
    :return: the last fit; its ``grown`` has number of points, nats lost and seconds of each
        number.
    """
    most, grown, unknown = min(LARGEST, most), [], ""
    number, begun = min(FIRST, most), time.monotonic()
    fitted = begin(number, None, limits.at_most(_FEW_STEPS))

    def curve_of(fitted):
        where = fitted.guide, fitted.params, *args
        return sparsity_curve(*where, loss=fitted.loss, **kwargs)

    def with_more(number):
        roles = fitted.guide.roles()
        start = {name: v for name, v in fitted.params.items() if name not in roles}
        return begin(number, start, limits.at_most(_FEW_STEPS))

    while True:
        limits = limits.after(len(fitted.losses))
        if fitted.stopped == INTERRUPTED:
            unknown = ""
            break
        curve = curve_of(fitted)
        unknown = str(curve) if curve.unknown else ""
        grown.append((number, curve.lost, time.monotonic() - begun))
        if progress_bar:
            tqdm.write(f"{number} inducing points: {curve}")
        if told := limits.reached(0):
            fitted.stopped = told
            break
        sites = max(1, len(fitted.guide.approximations))
        enough = not curve.lost > ENOUGH_BY_POINTS or curve.needed == curve.num_inducing
        if enough or number >= most:
            fitted = go_on(fitted, limits)
            limits = limits.after(len(fitted.losses))
            if number >= most or fitted.stopped == INTERRUPTED or limits.reached(0):
                break
            wanted, begun = min(2 * number, most), time.monotonic()
            why, more = "", None
            try:  # what there is is not lost by a trial
                if curve_of(fitted).lost > _NOTHING_LOST:
                    more = with_more(wanted)
                    why = INTERRUPTED if more.stopped == INTERRUPTED else ""
            except (Exception, KeyboardInterrupt) as error:
                why = type(error).__name__
            if why:
                told = f"whether {wanted} inducing points gain more is not known"
                fitted.stopped += f"; {told}: {why}"
            if why or more is None:
                break
            gained = more.bound - fitted.bound - 2 * (more.bound_se + fitted.bound_se)
            if progress_bar:
                tqdm.write(f"{wanted} inducing points gain {gained:.1f} nats at first")
            beyond = wanted - max(number, min(wanted, _CHEAP))
            if not gained > max(ENOUGH_BY_POINTS, _ENOUGH_EACH * sites * beyond):
                break
        else:
            wanted = curve.needed // sites if curve.needed else _MOST_GROWTH * number
            wanted = min(max(wanted, 2 * number), _MOST_GROWTH * number)
            wanted, begun = int(min(wanted, most)), time.monotonic()
            more = with_more(wanted)
        fitted, number = more, wanted
    fitted.grown = tuple(grown)
    fitted.stopped += f"; {unknown}" if unknown else ""
    return fitted

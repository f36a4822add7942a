"""Training on all data without noise: L-BFGS over what natural steps do not train."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

import jax
import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_sgp._programs import without_leaks
from numpyro_sgp.fitting.periods import Periods
from numpyro_sgp.fitting.progress import (
    AT_EDGE,
    CONVERGED,
    INTERRUPTED,
    NO_HIGHER,
    Limits,
    Trained,
)
from numpyro_sgp.fitting.scales import Scales
from numpyro_sgp.fitting.starts import (
    with_drawn_means,
    with_explained_points,
    with_moved_latents,
    with_other_points,
)
from numpyro_sgp.fitting.swaps import Swaps
from numpyro_sgp.tracing.state import state_of
from numpyro_sgp.training.descent import Descent
from numpyro_sgp.training.lbfgs import suits_natural

_ROUNDS = 6  # of L-BFGS, each with a fresh memory
_HOPS = 4 * (0.1, 0.3, 0.6)  # shares of the inducing points drawn anew, in turns
_MOVED = 0.25  # how far other latents are moved, in steps of a usual size
_RUGGED = 5.0  # times as much work, where swaps of single points raise the bound
_GAIN = 0.1  # nats by such a turn for which as many are made again,
_LEAST_HOPS, _MOST_HOPS = 3, 36  # so many
_EVALUATIONS = 300  # of the bound, of one such training, about
OTHERS = "other inducing points may do better: the last ones did"
AGAIN = "trainings end apart, and other inducing points may gain {:.2g} nats or more"
ALONE = "trainings from other starts end {:.3g} nats lower or more, and one may end higher"
NOT_ALL = "other starts and inducing points were not all looked at ({})"
_APART, _BEST = 1.0, 4  # nats of such a gain that are told, and gaps that tell them
_ELSEWHERE = 0.1  # nats between optima of q(u)
_TRIES = 3  # trainings from other means of q(u), whose ends say little beforehand
_CHEAP = 4e6  # products of all rows with M x M matrices up to which there are any,
# and trainings from other lengthscales where these are no better at first
_FEWEST = 10  # iterations before what is left can be told from them
_TIMES = 5.0  # how much further than its losses say a training may fall
_PATIENT = 1_000  # iterations after which it may fall as far as they say
_BEHIND = 30  # iterations before one that will not overtake the best is left
_TURN = 1e10  # products as above, summed over evaluations, before others are looked at
_PAUSED = "its turn is over"  # where there is more to gain
#: Products of rows with M x M matrices, summed over evaluations, up to which inducing
#: points are drawn anew.
ANEW = 2e9
#: The same up to which there are trainings from several starts.
TRAININGS = 4e10
_AGREEING = 2  # of these that end as high as the best, after which there are no more
_SAME = 0.5  # nats between such ends
#: The same up to which there are trainings from other lengthscales.
_SCALES = 1e11


def descent_of(problem, key) -> Descent:
    """The loss of all rows as a function of one vector, q(u) at its optimum."""
    svi = problem.svi
    kwargs = {**svi.static_kwargs, **problem.kwargs}
    descent = Descent(
        svi,
        SVIState(problem.state.optim_state, None, key),
        problem.args,
        kwargs,
        natural=bool(problem.natural) or suits_natural(svi),
        families=problem.natural,
        scales=problem.scales(),
        briefly=problem.is_small,
        often=True,
    )
    computed = state_of(svi.model, problem.args, kwargs)
    has_64_bits = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    descent.computed = has_64_bits, computed
    return descent


def train_whole(
    problem,
    starts: list[dict],
    key,
    limits: Limits,
    show,
    seed: int | None = None,
    descent: Descent | None = None,
    number: int = 1,
    least: int = 1,
    elsewhere: float = _SCALES,
) -> Trained:
    """
    Minimises the loss over all parameters, with q(u) at its optimum for the others wherever
    it takes natural steps; from some starts, by one program, of which the best is kept.
    Then some of its inducing points are drawn anew, time after time: of bounds as functions
    of them there are many optima, some nats from each other. So there may be of q(u), where
    the likelihood is not log-concave: means are then drawn anew too.

    :param problem: a :class:`~numpyro_sgp.fitting.problem.Problem` whose loss has no noise.
    :param starts: unconstrained starting values, the best first; later ones are for where
        the loss or its slopes are not finite at earlier ones.
    :param key: of the loss.
    :param limits: when to stop.
    :param show: called with the number of iterations and the loss after each.
    :param seed: of inducing points that are drawn anew, where all of q(u) takes natural
        steps and evaluations are cheap; None for none of that.
    :param descent: that of a training before, of the same problem.
    :param number: of starts to train from, at most: until two more end at the same, or
        it takes as long as :data:`TRAININGS`.
    :param least: so many however long it takes.
    :param elsewhere: products of rows with M x M matrices up to which there are trainings
        from other lengthscales, however long the first one took.
    :raises ValueError: if it can begin at none of them.
    """
    descent = descent or descent_of(problem, key)
    began = descent.work
    is_cheap = problem.work(problem.num_rows) <= _CHEAP
    # One may take a hundred times as long as others that end higher.
    turn, paused = np.inf, []
    if is_cheap and seed is not None and problem.all_natural and limits.in_all:
        turn = _TURN / problem.work(problem.num_rows)

    def train(wanted: float = np.inf, turn: float = np.inf) -> tuple[Trained, bool]:
        nonlocal limits
        stopped, limited = _iterate(descent, limits, show, wanted, turn)
        losses = np.asarray(descent.losses)
        limits = limits.after(len(losses) - 1)
        place = descent.free_now(), float(losses[0]), losses[1:]
        limited = limited or bool(limits.reached(0))
        if limited and stopped == _PAUSED:
            stopped = limits.reached(0)
        found = Trained(*place, -float(losses[-1]), 0.0, stopped, descent)
        paused.extend([found] if _is_paused(found) else [])
        return found, limited

    starts = _begin(descent, starts)
    best, limited = train(turn=turn)
    affordable = TRAININGS / problem.work(problem.num_rows)
    made, agreeing, seen = 1, 0, [best]
    for i, free in enumerate(starts[: number - 1], 1):
        if limited:
            return _as_limited(best, limits)
        longer = (descent.work - began) * (1 + 1 / made) > affordable
        if i >= least and (agreeing >= _AGREEING or longer):
            break
        try:
            descent.start_at(free)
        except KeyboardInterrupt:
            return replace(best, stopped=INTERRUPTED)
        except ValueError:  # no finite bound there
            continue
        found, limited = train(-best.bound, turn)
        seen.append(found)
        near = could_be(found, best.bound) >= best.bound - _SAME
        made, agreeing = made + 1, agreeing + near
        agreeing *= found.bound <= best.bound + _SAME and not _is_paused(best)
        best = max(best, found, key=lambda trained: trained.bound)
        best = _told(best, found)
    if limited or seed is None or not problem.all_natural:
        return _as_limited(best, limits)
    allowed = ANEW / problem.work(problem.num_rows) - _FEWEST
    # As long as it took so far, or longer where that is soon; and as long for periods.
    soon = elsewhere / problem.work(problem.num_rows)
    work = max(descent.work - began, soon)
    places = (kind(problem, descent, seed, work).moves() for kind in (Periods, Scales))
    for begin in chain.from_iterable(places):
        limited = limited or bool(limits.reached(0))
        if limited:
            break
        try:
            limits = limits.after(begin(best.free, limits))
        except KeyboardInterrupt:
            return replace(best, stopped=INTERRUPTED)
        except ValueError:  # no finite bound there
            continue
        if not is_cheap and descent.loss > -best.bound:
            continue  # most often it goes back to where it came from
        found, limited = train(-best.bound - _GAIN, turn)
        seen.append(found)
        best = _told(_better(best, found), found)
    # The best that had its turn goes on, and then those that may overtake it.
    for early in sorted(paused, key=lambda trained: -trained.bound):
        if limited or limits.reached(0):
            break
        is_best = _is_paused(best)
        may_overtake = len(early.losses) < _BEHIND  # of which losses do not tell
        may_overtake |= could_be(early, np.inf) >= best.bound + _GAIN
        if not (is_best or may_overtake):
            continue
        try:
            descent.start_at(best.free if is_best else early.free)
        except KeyboardInterrupt:
            return replace(best, stopped=INTERRUPTED)
        except ValueError:  # not finite any more
            continue
        found, limited = train(np.inf if is_best else -best.bound - _GAIN)
        seen = [found if trained is early else trained for trained in seen]
        if is_best:
            best = replace(best, stopped=found.stopped)
        best = _told(_better(best, found), found)
    if limited or limits.reached(0) or _is_paused(best):
        return _as_limited(best, limits)
    own, helps, share, several = best.bound, False, 0.0, made
    swaps = Swaps(problem, descent, seed)

    def search(work: float) -> float:
        return swaps.search(descent.work + work, lambda: bool(limits.reached(0)))

    if allowed > 0.0:
        descent.start_at(best.free)
        gained = search(allowed)
        helps = gained > _GAIN
        share = allowed
        allowed *= _RUGGED if gained > _APART else 1.0
    if helps and not swaps.interrupted:
        found, limited = train()
        best = _told(_better(best, found), found)
    most, in_vain, made = descent.work + allowed, 0, 0
    best, ends = replace(best, own=own), [best.bound]
    # A single training may take all of the work, and says little of others.
    least = _LEAST_HOPS if allowed > _EVALUATIONS else 0
    for move, is_of_means in _moves(problem, best, descent, seed):
        # Where trainings end far apart, a better one may be among more of them.
        patience = _MOST_HOPS if expected_gain(ends) > _APART else len(_HOPS)
        enough = in_vain >= patience or (descent.work >= most and made >= least)
        if limited or swaps.interrupted or (enough and not is_of_means):
            break
        moved, before = move(best.free), descent.work
        if moved is None:  # inducing points that are not trained
            break
        in_vain, made = in_vain + (not is_of_means), made + (not is_of_means)
        with suppress(ValueError):
            try:
                descent.start_at(moved)
            except KeyboardInterrupt:
                return replace(best, stopped=INTERRUPTED)
            if helps and not is_of_means:
                search(share)
            if swaps.interrupted:
                break
            found, limited = train(-best.bound - _GAIN)
            others, own = best.others, best.own
            if is_of_means:
                others = *others, found.bound
            else:
                ends.append(could_be(found, best.bound))
            in_vain *= found.bound < best.bound + _GAIN
            best = _told(replace(_better(best, found), others=others, own=own), found)
        most += (descent.work - before) * is_of_means
    if swaps.interrupted:
        return replace(best, stopped=INTERRUPTED)
    tops = sorted(could_be(trained, best.bound) for trained in seen)
    apart = 0.0 if made or several == 1 else best.bound - tops[-2]
    apart *= apart > _APART
    best = replace(best, expected=expected_gain(ends), apart=apart)
    if best.stopped != CONVERGED:
        return best
    if best.apart:
        return replace(best, stopped=alone(best.apart))
    if best.expected > _APART:
        told = f"{CONVERGED}, to one of many optima: {AGAIN.format(best.expected)}"
        return replace(best, stopped=told)
    if limited or limits.reached(0):
        return _as_limited(best, limits)
    if made and in_vain < min(_LEAST_HOPS, made):
        return replace(best, stopped=f"{CONVERGED}, and {OTHERS}")
    return best


def _better(best: Trained, found: Trained) -> Trained:
    """The one whose bound is higher, with all that was trained so far."""
    if found.bound <= best.bound:
        return best
    losses = np.append(best.losses, found.losses)
    return replace(found, first_loss=best.first_loss, losses=losses)


def could_be(found: Trained, bound: float) -> float:
    """Where one ended, or could come to: up to a bound, if it was left for being behind."""
    was_left = len(found.losses) >= _BEHIND and found.bound < bound
    left = remaining([found.first_loss, *found.losses]) if was_left else 0.0
    return max(found.bound, min(found.bound + _TIMES * left, bound))


def _as_limited(best: Trained, limits: Limits) -> Trained:
    """The same, which tells of the limit if it, or others, were to go on."""
    reached = limits.reached(0)
    if best.stopped == CONVERGED and reached:
        return replace(best, stopped=f"{CONVERGED}, but {NOT_ALL.format(reached)}")
    return replace(best, stopped=reached or NO_HIGHER) if _is_paused(best) else best


def _is_paused(trained: Trained) -> bool:
    return trained.stopped == _PAUSED


def alone(apart: float) -> str:
    """Why a training ended that others ended so many nats lower than; 0 for not known."""
    if not apart:
        return CONVERGED
    return f"{CONVERGED}, to one of several optima: {ALONE.format(apart)}"


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


def _told(best: Trained, last: Trained) -> Trained:
    """The best training, which tells of a Ctrl-C in a later one that did not better it."""
    return replace(best, stopped=INTERRUPTED) if last.stopped == INTERRUPTED else best


def _begin(descent, starts) -> list[dict]:
    """Begins at the first start at which that can be; those after it."""
    for i, free in enumerate(starts):
        try:
            descent.start_at(free)
            break
        except ValueError:
            if i + 1 == len(starts):
                raise
    return starts[i + 1 :]


def _moves(problem, best, descent, seed):
    """
    Functions from a place to another one to train from, and whether they are of the means
    of q(u): these only where natural steps from drawn means end at another bound.
    """
    means = partial(with_drawn_means, problem, rng=np.random.default_rng((seed, 1)))
    if problem.work(problem.num_rows) <= _CHEAP:
        with suppress(ValueError):
            descent.start_at(means(best.free))
            if abs(descent.loss + best.bound) > _ELSEWHERE:
                yield from _TRIES * [(means, True)]
    rng = np.random.default_rng(seed)

    def explained(free, share):
        with suppress(Exception):  # of a kernel's own code, or of few distinct rows
            return without_leaks(with_explained_points, problem, free, rng, share)

    def hop(free, share, size):
        # Rows that explain most, or any: what a likelihood needs is more than variance.
        found = None if size else explained(free, share)
        found = found or with_other_points(problem, free, rng, share)
        return found and with_moved_latents(problem, found, rng, size)

    yield partial(hop, share=1.0, size=0.0), False
    # Every second time of hyperparameters too, of which there may be other optima as well.
    for i in range(_MOST_HOPS):
        share, size = _HOPS[i % len(_HOPS)], _MOVED * (i % 2)
        yield partial(hop, share=share, size=size), False


def _iterate(descent, limits, show, wanted=np.inf, turn=np.inf) -> tuple[str, bool]:
    """
    Rounds of L-BFGS; why they ended, and whether by a limit.

    :param wanted: a loss; where it falls so slowly that it will not come there, it has
        converged for the purpose.
    :param turn: evaluations after which it is to let others go on.
    """
    index = descent.index(set(descent.free) - set(descent.profiled))
    if not index.size:
        return CONVERGED, False
    limit, began, little_left, behind, ends = "", 0, False, False, descent.work + turn

    def at_step(loss):
        nonlocal limit, little_left, behind
        count = len(descent.losses) - 1
        show(count, loss)
        limit = limits.reached(count)
        # Of this round: a fresh memory may go on where the one before had come to nothing.
        # Where q(u) is among what L-BFGS trains, there may be plateaus: not before its end.
        if descent.profiled and count - began >= _FEWEST and count % 5 == 0:
            left = remaining(descent.losses[began:])
            more = _TIMES if count - began < _PATIENT else 1.0
            little_left = more * left < limits.tolerance
            behind = count - began >= _BEHIND and loss - more * left > wanted
        if limit or little_left or behind or descent.work >= ends:
            raise StopIteration

    for _ in range(_ROUNDS):
        before, began, little_left = descent.loss, len(descent.losses) - 1, False
        try:
            result = descent.run(index, 100_000, 1e-15, at_step)
        except KeyboardInterrupt:
            return INTERRUPTED, True
        if limit or behind:
            return limit or CONVERGED, bool(limit)
        if descent.work >= ends and not little_left:
            return _PAUSED, False
        decrement = descent.decrement(index, result)
        little_left = little_left or before - descent.loss < 0.5 * limits.tolerance
        if little_left and decrement < limits.tolerance:
            return CONVERGED, False
    return AT_EDGE if descent.at_edge else NO_HIGHER, False


def remaining(losses) -> float:
    """
    What a loss that falls as it did would still fall by: the falls over the second quarter
    of all steps and over the second half, continued as a geometric series.

    :param losses: at the start and after each step.
    """
    losses = np.asarray(losses, float)
    n = len(losses) - 1
    if n < _FEWEST:
        return float("inf") if n else 0.0
    first = losses[n // 4] - losses[n // 2]
    last = losses[n // 2] - losses[n]
    if last <= 0.0:
        return 0.0
    ratio = min(last / max(first, 1e-300), 0.95)
    return float(last * ratio / (1.0 - ratio))

"""Training on all data without noise: L-BFGS over what natural steps do not train."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from numpyro_sgp._programs import without_leaks
from numpyro_sgp.fitting.ends import (
    APART,
    NOT_ALL,
    OTHERS,
    alone,
    among_many,
    could_be,
    expected_gain,
)
from numpyro_sgp.fitting.periods import Periods
from numpyro_sgp.fitting.progress import (
    CONVERGED,
    INTERRUPTED,
    NO_HIGHER,
    Limits,
    Trained,
)
from numpyro_sgp.fitting.rounds import BEHIND, FEWEST, PAUSED, descent_of, iterate
from numpyro_sgp.fitting.scales import Scales
from numpyro_sgp.fitting.starts import (
    with_drawn_means,
    with_explained_points,
    with_moved_latents,
    with_other_points,
)
from numpyro_sgp.fitting.swaps import Swaps
from numpyro_sgp.fitting.variances import Variances
from numpyro_sgp.training.descent import Descent

_HOPS = 4 * (0.1, 0.3, 0.6)  # shares of the inducing points drawn anew, in turns
_MOVED = 0.25  # how far other latents are moved, in steps of a usual size
_RUGGED = 5.0  # times as much work, where swaps of single points raise the bound
_GAIN = 0.1  # nats by such a turn for which as many are made again,
_LEAST_HOPS, _MOST_HOPS = 3, 36  # so many
_EVALUATIONS = 300  # of the bound, of one such training, about
_ELSEWHERE = 0.1  # nats between optima of q(u)
_TRIES = 3  # trainings from other means of q(u), whose ends say little beforehand
_CHEAP = 4e6  # products of all rows with M x M matrices up to which there are any,
# and trainings from other lengthscales where these are no better at first
# The same of a training in all, as where inducing points stay: the best optimum of 1,000
# wines, by 3.9 nats, is found from such lengthscales alone.
_SOON = 2e9
_TURN = 1e10  # products as above, summed over evaluations, before others are looked at
#: Products of rows with M x M matrices, summed over evaluations, up to which inducing
#: points are drawn anew.
ANEW = 2e9
#: The same up to which there are trainings from several starts.
TRAININGS = 4e10
_AGREEING = 2  # of these that end as high as the best, after which there are no more
_SAME = 0.5  # nats between such ends
#: The same up to which there are trainings from other lengthscales.
_SCALES = 1e11


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
    has_turns = seed is not None and problem.all_natural and limits.in_all
    trainings = _Trainings(problem, descent, limits, show, has_turns)
    try:
        trainings.from_starts(starts, number, least)
        if seed is not None and problem.all_natural:
            trainings.at_other_scales(seed, elsewhere)
            trainings.of_paused()
            trainings.at_other_points(seed)
    except KeyboardInterrupt:
        if not trainings.seen:
            raise
        trainings.best = replace(trainings.best, stopped=INTERRUPTED)
    return trainings.found()


class _Trainings:
    """
    Trainings of a problem by one program, in four turns that follow each other: from some
    starts, from other lengthscales, those that were paused, and from other inducing points.

    :param problem: as for :func:`train_whole`, and so are others.
    :param has_turns: whether one that takes long is paused, where evaluations are cheap.
    """

    best: Trained

    def __init__(
        self,
        problem,
        descent: Descent,
        limits: Limits,
        show: Callable[[int, float], None],
        has_turns: bool,
    ):
        self._problem, self._descent = problem, descent
        self._limits, self._show = limits, show
        self._work = problem.work(problem.num_rows)  # products of one evaluation
        self._is_cheap = self._work <= _CHEAP
        self._first = descent.work
        # One may take a hundred times as long as others that end higher.
        self._turn = _TURN / self._work if has_turns and self._is_cheap else np.inf
        #: What was found from starts and lengthscales.
        self.seen: list[Trained] = []
        self._several = 0  # of these from starts
        self._paused: list[Trained] = []
        self._is_limited = False  # by limits, or by Ctrl-C in L-BFGS
        # Of the last turn: where it began, ends from other means and points of q(u).
        self._own = -np.inf
        self._others: list[float] = []
        self._ends: list[float] = []
        self._made = self._in_vain = 0

    # ---- what all turns do ------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._is_limited or bool(self._limits.reached(0))

    def _begin(self, free: dict) -> bool:
        """Begins there; whether it can, where the bound may be not finite."""
        try:
            self._descent.start_at(free)
        except ValueError:
            return False
        return True

    def _train(self, wanted: float = np.inf, turn: float = np.inf) -> Trained:
        """
        From where the descent has begun.

        :param wanted: a loss; one that will not come there ends early.
        :param turn: evaluations after which it is paused.
        """
        descent = self._descent
        stopped, limited = iterate(descent, self._limits, self._show, wanted, turn)
        losses = np.asarray(descent.losses)
        self._limits = self._limits.after(len(losses) - 1)
        self._is_limited = limited or bool(self._limits.reached(0))
        if self._is_limited and stopped == PAUSED:
            stopped = self._limits.reached(0)
        place = descent.free_now(), float(losses[0]), losses[1:]
        found = Trained(*place, -float(losses[-1]), 0.0, stopped, descent)
        if _is_paused(found):
            self._paused.append(found)
        return found

    def _keep(self, found: Trained) -> None:
        """The better one, with all that was trained so far; a Ctrl-C is told by either."""
        best = self.best
        if found.bound > best.bound:
            losses = np.append(best.losses, found.losses)
            best = replace(found, first_loss=best.first_loss, losses=losses)
        self.best = _told(best, found)

    # ---- the turns --------------------------------------------------------------------

    def from_starts(self, starts: list[dict], number: int, least: int) -> None:
        """From the first that has a finite bound, and then from others."""
        *others, last = starts
        first = next((i for i, free in enumerate(others) if self._begin(free)), None)
        if first is None:
            self._descent.start_at(last)  # or raises
            first = len(others)
        self.best = self._train(turn=self._turn)
        self.seen, agreeing = [self.best], 0
        affordable = TRAININGS / self._work
        for i, free in enumerate(starts[first + 1 :][: number - 1], 1):
            made = len(self.seen)
            longer = (self._descent.work - self._first) * (1 + 1 / made) > affordable
            if self._is_over or (i >= least and (agreeing >= _AGREEING or longer)):
                break
            if not self._begin(free):
                continue
            best = self.best
            found = self._train(-best.bound, self._turn)
            self.seen.append(found)
            agreeing += could_be(found, best.bound) >= best.bound - _SAME
            agreeing *= found.bound <= best.bound + _SAME and not _is_paused(best)
            best = max(best, found, key=lambda trained: trained.bound)
            self.best = _told(best, found)
        self._several = len(self.seen)

    def at_other_scales(self, seed: int, elsewhere: float) -> None:
        """
        From other periods and lengthscales: as long as it took so far, or longer where that
        is soon; and as long for periods.
        """
        work = max(self._descent.work - self._first, elsewhere / self._work)
        each = (self._descent.work - self._first) / len(self.seen) * self._work
        is_soon = self._is_cheap or each <= _SOON
        given = self._problem, self._descent, seed
        moves = (kind(*given, work).moves() for kind in (Variances, Periods, Scales))
        for begin in chain.from_iterable(() if self._is_over else moves):
            if self._is_over:
                break
            try:
                self._limits = self._limits.after(begin(self.best.free, self._limits))
            except ValueError:  # no finite bound there
                continue
            if not is_soon and self._descent.loss > -self.best.bound:
                continue  # most often it goes back to where it came from
            found = self._train(-self.best.bound - _GAIN, self._turn)
            self.seen.append(found)
            self._keep(found)

    def of_paused(self) -> None:
        """The best that had its turn goes on, and then those that may overtake it."""
        for early in sorted(self._paused, key=lambda trained: -trained.bound):
            if self._is_over:
                break
            best = self.best
            is_best = _is_paused(best)
            may_overtake = len(early.losses) < BEHIND  # of which losses do not tell
            may_overtake |= could_be(early, np.inf) >= best.bound + _GAIN
            if not (is_best or may_overtake):
                continue
            if not self._begin(best.free if is_best else early.free):
                continue
            found = self._train(np.inf if is_best else -best.bound - _GAIN)
            self.seen = [found if trained is early else trained for trained in self.seen]
            if is_best:
                self.best = replace(best, stopped=found.stopped)
            self._keep(found)

    def at_other_points(self, seed: int) -> None:
        """
        From other inducing points, single ones and shares of them, and from other means of
        q(u) where it has several optima.
        """
        if self._is_over or _is_paused(self.best):
            return
        descent, self._own = self._descent, self.best.bound
        allowed = ANEW / self._work - FEWEST
        swaps = Swaps(self._problem, descent, seed)
        helps, share = False, 0.0
        if allowed > 0.0:
            descent.start_at(self.best.free)
            gained, share = self._search(swaps, allowed), allowed
            helps = gained > _GAIN
            allowed *= _RUGGED if gained > APART else 1.0
        if helps:
            self._keep(self._train())
        most = descent.work + allowed
        self._ends = [self.best.bound]
        # A single training may take all of the work, and says little of others.
        least = _LEAST_HOPS if allowed > _EVALUATIONS else 0
        for move, is_of_means in _moves(self._problem, self.best, descent, seed):
            # Where trainings end far apart, a better one may be among more of them.
            patience = _MOST_HOPS if expected_gain(self._ends) > APART else len(_HOPS)
            enough = descent.work >= most and self._made >= least
            enough |= self._in_vain >= patience
            if self._is_over or (enough and not is_of_means):
                break
            moved, before = move(self.best.free), descent.work
            if moved is None:  # inducing points that are not trained
                break
            self._in_vain += not is_of_means
            self._made += not is_of_means
            with suppress(ValueError):  # no finite bound there
                descent.start_at(moved)
                if helps and not is_of_means:
                    self._search(swaps, share)
                found, best = self._train(-self.best.bound - _GAIN), self.best
                if is_of_means:
                    self._others.append(found.bound)
                else:
                    self._ends.append(could_be(found, best.bound))
                self._in_vain *= found.bound < best.bound + _GAIN
                self._keep(found)
            most += (descent.work - before) * is_of_means

    def _search(self, swaps: Swaps, work: float) -> float:
        """Nats by swaps of single points, for so much work."""
        until = self._descent.work + work
        gained = swaps.search(until, lambda: bool(self._limits.reached(0)))
        if swaps.interrupted:
            raise KeyboardInterrupt
        return gained

    # ---- what came of them ------------------------------------------------------------

    def found(self) -> Trained:
        """The best, with what the others tell of it."""
        others, looked = tuple(self._others), bool(self._ends)
        best = replace(self.best, others=others, own=self._own)
        reached = self._limits.reached(0)
        if looked:
            best = replace(best, expected=expected_gain(self._ends), apart=self._apart())
            if best.stopped == CONVERGED and best.apart:
                return replace(best, stopped=alone(best.apart))
            if best.stopped == CONVERGED and best.expected > APART:
                return replace(best, stopped=among_many(best.expected))
        if best.stopped == CONVERGED and reached:
            return replace(best, stopped=f"{CONVERGED}, but {NOT_ALL.format(reached)}")
        if _is_paused(best):
            return replace(best, stopped=reached or NO_HIGHER)
        helped_lately = self._made and self._in_vain < min(_LEAST_HOPS, self._made)
        if best.stopped == CONVERGED and helped_lately:
            return replace(best, stopped=f"{CONVERGED}, and {OTHERS}")
        return best

    def _apart(self) -> float:
        """Nats by which the best ended above all others, where that is much."""
        if self._made or self._several == 1:
            return 0.0
        best = self.best.bound
        second = sorted(could_be(trained, best) for trained in self.seen)[-2]
        return best - second if best - second > APART else 0.0


def _told(best: Trained, last: Trained) -> Trained:
    """The best training, which tells of a Ctrl-C in a later one that did not better it."""
    return replace(best, stopped=INTERRUPTED) if last.stopped == INTERRUPTED else best


def _is_paused(trained: Trained) -> bool:
    return trained.stopped == PAUSED


def _moves(
    problem, best: Trained, descent: Descent, seed: int
) -> Iterator[tuple[Callable[[dict], dict | None], bool]]:
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

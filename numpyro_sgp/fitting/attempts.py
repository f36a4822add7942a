"""Trainings that try to better a fit, and what they tell of it."""

import itertools
import warnings
from contextlib import suppress
from dataclasses import replace

import jax
import numpy as np

from numpyro_sgp.diagnostics.optimality import believed, loss_drop
from numpyro_sgp.fitting.ends import AGAIN, ALONE
from numpyro_sgp.fitting.progress import CONVERGED, INTERRUPTED, Limits, Trained
from numpyro_sgp.fitting.rounds import remaining
from numpyro_sgp.fitting.stepper import CHUNK, Stepper
from numpyro_sgp.fitting.verdict import ENOUGH_NATS, OTHER_OPTIMA, Cause, unknown
from numpyro_sgp.fitting.whole import train_whole

#: Products of all rows with M x M matrices up to which the other parameters are trained
#: some iterations more, to see what that gains.
LARGEST_ATTEMPT = 1e10
_FEWEST, _MOST = 5, 500  # iterations
_DRAWS = 20  # keys over which a random bound is averaged
_RATE = 0.03  # of Adam
_APART = 1.0  # nats between two optima
_MOST_SIGNS = 3  # functions whose signs are tried, in all combinations
# Prior sds between means of mirror images, and as a share of that from where natural steps
# began; nats between bounds.
_FAR, _NEAR, _SAME = 2.0, 0.1, 0.1
_LONGER = "train longer: more steps, or seconds, of sgp.fit"
_ELSEWHERE = "sgp.fit(..., restarts=10), other keys, or more inducing points"
_RESTARTS = "sgp.fit(..., restarts=10), the best of ten starts"
_SAID = "what it says, and a check again"


class Attempts:
    """
    Trainings of a problem that go on from a fit.

    :param problem: a :class:`~numpyro_sgp.fitting.problem.Problem` at the fit's parameters.
    :param rng_key: key of what is drawn.
    :param descent: that of the fit's training on all rows, or None.
    """

    def __init__(self, problem, rng_key, descent):
        self.problem, self.descent = problem, descent
        self._for_training, self._for_gain = jax.random.split(rng_key)
        self._best: Trained | None = None
        work = problem.work(problem.num_rows) * (_DRAWS if problem.random else 1)
        #: Iterations of a training; 0 where rows are too many.
        self.steps = 0
        if work <= LARGEST_ATTEMPT:
            self.steps = int(np.clip(LARGEST_ATTEMPT / (4.0 * work), _FEWEST, _MOST))

    def of_others(self, losses) -> Cause:
        """
        What some iterations of L-BFGS gain for the parameters beside q(u), or where rows
        are too many the trend of the losses.

        :param losses: of the training, or None.
        """
        name, problem = "other parameters", self.problem
        if set(problem.free) == set(problem.profiled):
            return Cause(name, 0.0, told="there are none")
        mend = _LONGER
        if self.steps:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    nats, se, told = self._gain()
            except Exception as error:
                return Cause(name, np.nan, told=unknown(error), mend=_SAID)
            best = self._best
            of_others = 0.0 if best is None else best.bound - best.own
            if max(0.5 * nats, 2.0 * se) < of_others < np.inf:  # infinite: none was made
                told, mend = f"{told}, {self._elsewhere()}", _ELSEWHERE
            wanted = nats > max(ENOUGH_NATS, 2.0 * se)
            return Cause(name, nats, se, told, mend if wanted else "")
        losses = believed([] if losses is None else losses)
        drop, se = loss_drop(losses)
        if np.isnan(drop):
            few = "too few" if losses.size else "no"
            told = f"unknown: there are {few} losses to see a trend in"
            return Cause(name, drop, told=told, mend=mend)
        told = "the losses' fall over the last tenth of the steps, maybe too short a part"
        left = max(drop, 0.0)
        wanted = left > max(ENOUGH_NATS, 3.0 * se)
        return Cause(name, left, se, told, mend if wanted else "")

    def _train(self, problem, free, seed=None) -> Trained:
        limits = Limits(1e-3, self.steps, None, in_all=False)
        given = [free], self._for_training, limits, lambda *_: None
        options = {"descent": self.descent, "elsewhere": LARGEST_ATTEMPT}
        found = train_whole(problem, *given, seed=seed, **options)
        if found.stopped == INTERRUPTED:
            # An attempt that was cut short would be told as one that gained little.
            raise KeyboardInterrupt
        return found

    def _gain(self):
        """
        What some iterations of L-BFGS gain (from other inducing points too, where these
        are cheap) and would go on to gain where they did not end, and its standard error:
        of a random bound that of its mean over some keys, told by its mean over others.
        """
        problem = self.problem
        seen = problem.averaged(_DRAWS) if problem.random else problem
        found = self._train(seen, problem.free, seed=1)
        if not (problem.random or problem.all_natural or len(found.losses) >= self.steps):
            found = self._past_plateau(found)
        self._best, self.descent = found, found.descent
        losses = [found.first_loss, *found.losses]
        gained, se = found.first_loss + found.bound, 0.0
        if problem.random:
            gained, se = problem.gain(found.free, self._for_gain, 2 * _DRAWS)
        number = f"{gained:.2g} were" if gained > 0.0 else "nothing was"
        told = f"{number} gained by {len(found.losses)} more iterations"
        nats = max(gained, 0.0)
        has_ended = found.stopped.startswith(CONVERGED)  # of several trainings, maybe
        if gained > 2.0 * se and len(found.losses) >= self.steps and not has_ended:
            more = remaining(losses)
            if np.isfinite(more):
                nats += min(more, nats)  # of a series that is cut short there is no more
            else:  # too few to tell
                told = f"at least {told}"
        return nats, se, told

    def _elsewhere(self) -> str:
        """Where the trainings that gained began."""
        free = self.problem.free.keys()
        points = {k for k, v in self.problem.guide.roles().items() if v == "inducing"}
        return "from other " + ("inducing points" if points & free else "means of q(u)")

    def _past_plateau(self, found: Trained) -> Trained:
        """
        The same after steps of Adam, which go on where L-BFGS over q(u) and all others
        together comes to nothing.
        """
        stepper = Stepper(self.problem, None)
        state = stepper.start(found.free, self._for_training)
        for _ in range(self.steps // CHUNK):
            rates = np.zeros(CHUNK), np.full(CHUNK, _RATE)
            state, _ = stepper(state, None, *rates)
        with suppress(ValueError):  # no finite bound there
            after = self._train(self.problem, state.good.free)
            if after.bound > found.bound:
                losses = np.append(found.losses, after.losses)
                return replace(after, first_loss=found.first_loss, losses=losses)
        return found

    def of_optima(self, below: float) -> list[Cause]:
        """
        Where the trainings of :meth:`of_others` from other means of q(u), or other inducing
        points, ended: the row of how far apart they are, empty where they ended together or
        there were none.

        :param below: nats by which those of the fit from other starts ended lower; 0 if
            that is not known.
        """
        best = self._best
        apart = [] if best is None else [best.bound - bound for bound in best.others]
        if apart and max(apart) >= _APART:
            told = (
                "the likelihood is not log-concave: from other means of q(u) trainings end "
                f"{min(apart):.2g} to {max(apart):.2g} nats below the best, so that there "
                "may be better ones"
            )
            mend = _RESTARTS
        elif best is not None and best.expected >= _APART:
            told, mend = AGAIN.format(best.expected), _ELSEWHERE
        elif below:
            return [ended_alone(below)]
        elif number := self._mirrored():
            told = (
                f"{number + 1} optima as high, of f and -f: the sign makes no difference "
                "to the likelihood, and q(u) is about one of them"
            )
            nats, mend = float(np.log(number + 1.0)), "a prior that chooses it, or MCMC"
            return [Cause(OTHER_OPTIMA, nats, told=told, mend=mend)]
        else:
            return []
        return [Cause(OTHER_OPTIMA, np.nan, told=told, mend=mend)]

    def _mirrored(self) -> int:
        """
        How many mirror images the optimum has: where natural steps from q(u) with means of
        other signs, of some functions, stay there at the same bound.
        """
        best, problem = self._best, self.problem
        if best is None or best.descent is None or not problem.all_natural:
            return 0
        means = {k: np.asarray(best.free[k]) for k in problem.profiled if k.endswith("_mu")}
        functions = {(_site(k), i) for k in means for i in np.ndindex(means[k].shape[:-1])}
        if not 0 < len(functions) <= _MOST_SIGNS:
            return 0
        number = 0
        for signs in itertools.product((1.0, -1.0), repeat=len(functions)):
            sign = dict(zip(sorted(functions), signs, strict=True))
            moved = {}
            for name, mu in means.items():
                each = [sign[_site(name), i] for i in np.ndindex(mu.shape[:-1])]
                moved[name] = mu * np.reshape(each, (*mu.shape[:-1], 1)).astype(mu.dtype)
            if _distance(moved, means) < _FAR:
                continue
            with suppress(ValueError):
                best.descent.start_at({**best.free, **moved})
                ended = best.descent.free_now()
                stayed = _distance(ended, moved) < _NEAR * _distance(moved, means)
                number += stayed and abs(best.descent.loss + best.bound) < _SAME
        return number


def ended_alone(below: float) -> Cause:
    """The row of a fit that trainings from other starts ended lower than."""
    return Cause(OTHER_OPTIMA, np.nan, told=ALONE.format(below), mend=_RESTARTS)


def _site(name: str) -> str:
    """The GP site of a parameter."""
    return name.partition("_auto_")[0]


def _distance(a: dict, b: dict) -> float:
    """Between means by name, those that both have."""
    ways = [np.ravel(np.asarray(a[k]) - np.asarray(b[k])) for k in a.keys() & b.keys()]
    return float(np.linalg.norm(np.concatenate(ways)))

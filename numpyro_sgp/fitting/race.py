"""
A race between starts, and in which order L-BFGS trains from where they end.

Steps of Adam of 0.1 beside natural ones pass by the optimum at which all is noise, where
L-BFGS from the same starts ends: with 30 columns of which three count, hundreds of nats
above it, most often after a plateau of some 200 steps.
"""

import numpy as np

from numpyro_sgp._flat import Flat
from numpyro_sgp.fitting.progress import Limits
from numpyro_sgp.fitting.stepper import CHUNK, State, Stepper

_RATE = 0.1  # of Adam
_ROWS = 1_000  # that the race is on, where batches have fewer or training is on all
_CHUNKS = 6  # of steps, at most
_FEWEST = 10  # steps
_WORK = 1.5e10  # multiplications of M x M matrices with all rows, over steps and candidates
_NOTHING = 5.0  # nats that means of q(u) are away from the prior's, at most
_SETTLING = 200  # steps on all rows after it, at most
_SETTLING_RATE = 0.06  # of Adam in these, which falls
_SOON = 8.0  # seconds to the end in which they are not worth their compilation


class Race:
    """
    Trains starts for some hundred steps (fewer where these are long), by one program.

    :param stepper: of the training, whose program is that of the race too where it has
        enough rows and not too many; all batches are the same.
    :param whole: whether training is on all rows without steps of this kind.
    """

    def __init__(self, stepper: Stepper, whole: bool):
        problem, size, self._rows = stepper.problem, stepper.num_rows, None
        self._whole = whole
        more = problem.num_rows > _ROWS if whole else size is not None and size < _ROWS
        if more and problem.plates:
            stepper = Stepper(problem, _ROWS if problem.num_rows > _ROWS else None)
        self.stepper = stepper
        if stepper.num_rows is not None:
            rng = np.random.default_rng(0)
            rows = rng.choice(problem.num_rows, stepper.num_rows, replace=False)
            self._rows = np.broadcast_to(rows, (CHUNK, stepper.num_rows))
        self._natural = 0.3 if problem.random else 1.0

    def prepare(self, key) -> None:
        """Begins to compile beside what else is done."""
        self.stepper.prepare(self.stepper.start(self.stepper.problem.free, key))

    def __call__(
        self,
        starts: list[dict],
        key,
        keep: int,
        limits: Limits,
        held: dict[int, tuple[str, ...]] | None = None,
    ) -> list[dict]:
        """
        Where unconstrained starting values end, the best first (for a training on all rows
        the others :meth:`_in_turns`); those without a finite loss are left out, unless
        there are no others.

        :param keep: how many go all the way; of the others the worse half is left behind
            in each round.
        :param limits: of the training; after half of the time (or steps) that is left no
            round begins but the first.
        :param held: parameters that stay in the first round, by the number of the start.
        """
        limits = limits.half()
        states = [self.stepper.start(free, key) for free in starts]
        losses, going = np.full(len(starts), np.nan), list(range(len(starts)))
        order: list[int] = []
        rounds, gone = self._counts(len(starts)), np.zeros(len(starts), int)
        for count in rounds:
            for i in going:
                still = () if gone[i] else (held or {}).get(i, ())
                states[i], losses[i] = self._some(states[i], count, still)
                gone[i] += 1
            finite = [i for i in going if np.isfinite(losses[i])]
            going = sorted(finite, key=lambda i: losses[i])
            # Those that went on are before those that were left behind.
            order = [*going, *(i for i in order if i not in going)]
            if not going or limits.reached(0):
                break
            going = going[: max(keep, (len(going) + 1) // 2)]
        if going and self._explains_nothing(states[order[0]].good.free):
            # The first to arrive where all is noise are before those on the plateau.
            for i in order[1:]:
                for count in rounds[gone[i] : gone[order[0]]]:
                    if not limits.reached(0):
                        states[i], losses[i] = self._some(states[i], count)
                        gone[i] += 1
            order.sort(key=lambda i: np.inf if np.isnan(losses[i]) else losses[i])
        ends, order = [state.good.free for state in states], order or [0]
        if self._whole:
            # Those whose parameters were held all the time are not where these suit them.
            early = [i for i in order[1:] if i in (held or {}) and gone[i] < 2]
            order = self._in_turns(ends, [i for i in order if i not in early]) + early
        return [ends[i] for i in order]

    def _in_turns(self, ends: list[dict], order: list[int]) -> list[int]:
        """
        After the best, in turns the one whose hyperparameters are farthest from those
        before it and the best that is left. Losses of a race are not those to which L-BFGS
        comes, and what is near ends at the same: of 800 rows with 30 columns, the best
        three after 200 steps (987, 977 and 977) go to 1178, one that was sixth after 50 of
        them to 1195.
        """
        sizes, roles = self.stepper.problem.scales(), self.stepper.problem.guide.roles()
        sizes = {name: size for name, size in sizes.items() if name not in roles}
        flat = Flat(sizes)
        unit = flat.ravel(sizes)
        places = [flat.ravel({name: end[name] for name in sizes}) / unit for end in ends]
        taken, left = order[:1], order[1:]
        while left:
            far = [min(np.sum((places[i] - places[j]) ** 2) for j in taken) for i in left]
            taken.append(left.pop(int(np.argmax(far)) if len(taken) % 2 else 0))
        return taken

    def _explains_nothing(self, free: dict) -> bool:
        """Whether means of q(u) are near those of the prior, so that all is noise."""
        names = [n for n in self.stepper.problem.profiled if n.endswith("_mu")]
        size = sum(float(np.sum(np.square(free[n], dtype=float))) for n in names)
        return bool(names) and 0.5 * size < _NOTHING

    def _counts(self, number: int) -> list[int]:
        """Steps of each round."""
        count = _WORK / (number * self.stepper.work)
        count = int(np.clip(count, _FEWEST, _CHUNKS * CHUNK))
        size = min(CHUNK, (count + 1) // 2)
        return [size] * (count // size)

    def _some(self, state, count, held=()) -> tuple[State, float]:
        """So many steps, and the loss after them."""
        # One after another: side by side costs as much, and batches of LAPACK's calls can
        # block each other on two cores (jaxlib 0.10).
        rows = None if self._rows is None else self._rows[:count]
        natural, others = np.full(count, self._natural), np.full(count, _RATE)
        state, found = self.stepper(state, rows, natural, others, held)
        last = found[-5:]
        return state, np.nan if np.isnan(last).all() else float(np.nanmean(last))


class Settling:
    """
    Steps of Adam beside natural ones on all rows, between a race on some rows and L-BFGS:
    of bounds of many rows with few inducing points there are many optima, and L-BFGS ends
    at one near to where it begins. With them it ended 279 nats higher for 5,000 rows of
    roads (100 points), 72 for 3,000 of bike (80), 36 for 3,000 of elevators (100), and 1 to
    5 lower for 4,000 of KEGG (60), 5,000 of kin40k (100) and 2,066 of creep (100).

    :param stepper: of all rows.
    """

    def __init__(self, stepper: Stepper):
        self._stepper = stepper
        self._count = int(np.clip(_WORK / stepper.work, CHUNK, _SETTLING))

    @classmethod
    def wanted(cls, problem, limits: Limits) -> bool:
        """Whether the race was on some rows, and there is time for more than it."""
        return problem.num_rows > _ROWS and not limits.reached(4 * CHUNK, _SOON)

    def prepare(self, free: dict, key) -> None:
        """Begins to compile beside what else is done."""
        self._stepper.prepare(self._stepper.start(free, key))

    def __call__(self, free: dict, key, limits: Limits) -> tuple[dict, np.ndarray]:
        """Where unconstrained parameters go, and the losses on the way."""
        state, losses, count = self._stepper.start(free, key), np.zeros(0), self._count
        if limits.left is not None:  # L-BFGS needs some too
            count = min(count, limits.left // 2)
        rates = _SETTLING_RATE * np.linspace(1.0, 0.05, count)
        for some in np.split(rates, range(CHUNK, count, CHUNK)):
            if limits.reached(len(losses), _SOON):
                break
            state, found = self._stepper(state, None, np.ones(len(some)), some)
            losses = np.append(losses, found)
        return state.good.free, losses

"""Training where the loss is random or the data are many: natural steps beside Adam."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._programs import shared
from numpyro_sgp.diagnostics.optimality import loss_drop
from numpyro_sgp.fitting.progress import INTERRUPTED, NO_HIGHER, TIME_USED, Limits, Trained
from numpyro_sgp.fitting.rounds import descent_of, remaining
from numpyro_sgp.fitting.stepper import CHUNK, Stepper
from numpyro_sgp.training.natural_gradients import natural_descent
from numpyro_sgp.training.rows import Order

_RATE = 0.03  # of Adam
_FIRST_RATE = 0.1  # at the beginning
_EARLY = 100  # steps over which that goes down
_NATURAL = 0.1  # of natural steps on batches
_HASTE = 1.8  # what both rates are multiplied by, where there is time for few steps
_NATURAL_WHOLE = 0.3  # of those on all rows with a random loss
_LAST_NATURAL = 0.02
_FEWEST, _FEW_EPOCHS = 200, 16  # steps and epochs before rates begin to fall
_MOST, _EPOCHS = 1000, 20  # of both, what is more, before rates fall all the same
_DOWN = 2  # steps with falling rates for each one before
_BY_ROW = 1e-4  # nats a row that are little beside what a longer training costs
_SLOW = 0.01  # share of the loss of all rows by which it falls where it goes on falling
_GROUP = 10  # steps whose mean loss is looked at where there are no epochs
_POLISH = 8  # natural steps on all rows in the end, at most
# Of a limit of time: steps between looks at the clock at first, share of what is left that
# those later on take, seconds that these take at least, how many of them tell how long a
# step takes, and epochs from which on a natural step on all rows is worth its time.
_FIRST_CHUNKS, _PART, _MOMENT, _LATE, _WORTH = (1, 4), 0.03, 0.3, 9, 5
_LOOK = 1.25  # epochs that the loss of all rows with its slopes takes
_KEY = 0.4  # share of that which the loss alone takes
_MANY = 200  # natural steps that show what q(u) has to gain, at most
# Keys for the mean of a random bound: one of all rows for so many epochs of training (which
# take some times as long, with their slopes), of so many at least and at most.
_FOR_EPOCHS, _FEWEST_KEYS, _MOST_KEYS = 4.0, 8, 50
# Rows, and :meth:`Problem.work` of all of them, up to which L-BFGS follows batches: an
# evaluation is some tenths of a second then, and takes some hundred megabytes.
_ROWS, _AFFORDABLE = 200_000, 2e9
# Evaluations for each epoch of batches; and at most, where the last quarter of them gained
# such a share of what was gained from the start.
_AS_MANY, _LONGEST, _WORTHWHILE = 1.0, 8.0, 1e-3
_SOME_LOOKS = 10  # and at least, if time is limited
_UNLIMITED = 10**9  # steps


def train_batches(stepper: Stepper, free: dict, key, limits: Limits, show) -> Trained:
    """
    Natural steps for q(u) and Adam for the rest, with rates that stay until the loss falls
    no more than its noise, and then go down; in the end, if the loss of all rows is not
    random, natural steps on all of them, and L-BFGS where these are affordable.

    :param stepper: what makes the steps, of batches or of all rows.
    :param free: unconstrained starting values.
    :param key: of batches and of what is drawn.
    :param limits: when to stop.
    :param show: called with the number of steps and the loss.
    """
    problem, batch_size = stepper.problem, stepper.num_rows
    run = _Run(stepper, free, key, limits, show)
    loss = whole_loss(problem, batch_size)
    polish = _polish(problem, loss, key, 0.1 * limits.tolerance)
    if not problem.random:
        polish.prepare(free, problem.arrays, np.int32(_POLISH))

    def whole():
        if problem.random or batch_size is None:
            return np.nan
        return float(polish(run.state.good.free, problem.arrays, np.int32(0))[1])

    try:
        stopped = _keep_rates(run, limits, whole)
        stopped = _lower_rates(run, limits, stopped == TIME_USED) or stopped
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    free = run.state.good.free
    goes_on = stopped not in (INTERRUPTED, TIME_USED)
    if goes_on and _Finish.wanted(problem, batch_size, limits, run):
        found = _Finish(problem, key, limits, run)(free, stopped)
        if found is not None:
            return found
    if problem.random:
        epochs = run.count * run.share
        number = int(np.clip(epochs / _FOR_EPOCHS, _FEWEST_KEYS, _MOST_KEYS))
        if limits.until is not None:
            number = int(np.clip(run.looks(limits) / _KEY, _FEWEST_KEYS, number))
        bound, se = _mean_bound(loss, free, key, problem.arrays, number)
    else:
        most = _POLISH
        if limits.until is not None:
            most = int(np.clip(run.looks(limits) - 1.0, 0, _POLISH))
        q, value = polish(free, problem.arrays, np.int32(most))
        free, bound, se = {**free, **q}, -float(value), 0.0
    losses = run.losses
    first = float(losses[0]) if losses.size else np.nan
    return Trained(free, first, losses, bound, se, stopped)


def train_best(stepper: Stepper, starts: list[dict], key, limits: Limits, show) -> Trained:
    """
    :func:`train_batches` from each of some starts, of the first alone if the number of
    steps is limited, and the best of what is found.
    """
    best = last = train_batches(stepper, starts[0], key, limits, show)
    for free in starts[1:]:
        if last.stopped == INTERRUPTED or limits.steps is not None or limits.reached(0):
            break
        last = train_batches(stepper, free, key, limits, show)
        best = max(best, last, key=lambda found: np.nan_to_num(found.bound, nan=-np.inf))
    return replace(best, stopped=INTERRUPTED) if last.stopped == INTERRUPTED else best


class _Run:
    """
    Steps one after another, by one program.

    :param stepper: of what is trained.
    :param free: where it starts.
    :param limits: when to stop.
    """

    def __init__(self, stepper, free, key, limits, show):
        self.num_rows, self.batch_size = stepper.problem.num_rows, stepper.num_rows
        #: Share of all rows in a batch.
        self.share = 1.0 if self.batch_size is None else self.batch_size / self.num_rows
        self.state, self.count = stepper.start(free, key), 0
        self._hastens = False
        self._losses: list[np.ndarray] = []
        self._each: list[float] = []
        self._left = limits.seconds_left
        seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
        self._order = Order(self.num_rows, 1, tuple(seed))
        self._stepper, self._show = stepper, show

    def __call__(self, natural, others):
        """A step for each rate of natural steps and of Adam."""
        began = time.monotonic()
        rows = self._rows(len(natural))
        self.state, losses = self._stepper(self.state, rows, natural, others)
        if self.count:
            self._each.append((time.monotonic() - began) / len(natural))
        self.count += len(natural)
        self._losses.append(losses)
        believed = losses[np.isfinite(losses)][-10:]
        self._show(self.count, float(np.mean(believed)) if believed.size else np.nan)

    def _rows(self, count):
        if self.batch_size is None:
            return None
        ends = self.batch_size * self.count, self.batch_size * (self.count + count)
        return self._order(*ends).reshape(count, self.batch_size)

    @property
    def seconds_a_step(self) -> float:
        """Of late, without what was compiled at first; 0 where that is not known yet."""
        return float(np.median(self._each[-_LATE:])) if self._each else 0.0

    @property
    def seconds_a_look(self) -> float:
        """Of the loss of all rows with its slopes: what is kept is made again, in parts."""
        return _LOOK * self.seconds_a_step / self.share

    @property
    def seconds_at_end(self) -> float:
        """
        About what the loss of all rows takes after the steps, and its slopes, and again
        after a natural step with them; of random ones a mean. No more than half of the
        time is left for it.
        """
        looks = 2.0 if self.count * self.share >= _WORTH else 1.0
        if self._stepper.problem.random:
            looks = _FEWEST_KEYS * _KEY
        most = np.inf if self._left is None else 0.5 * self._left
        return min(looks * self.seconds_a_look, most)

    def looks(self, limits) -> float:
        """How often the loss of all rows can be had with its slopes in the time left."""
        return limits.seconds_left / self.seconds_a_look if self.seconds_a_step else 0.0

    def chunk(self, limits) -> int:
        """How many steps are made before the clock is looked at."""
        number = _period(limits)
        if limits.until is None:
            return number
        if (done := len(self._losses)) < len(_FIRST_CHUNKS):
            return min(number, _FIRST_CHUNKS[done])
        a_moment = _MOMENT / max(self.seconds_a_step, 1e-9)
        return int(np.clip(max(_PART * self.affordable(limits), a_moment), 1, number))

    def affordable(self, limits) -> int:
        """Steps, at least one, for which there is time."""
        left = limits.seconds_left - self.seconds_at_end
        return max(1, int(left / max(self.seconds_a_step, 1e-9)))

    def show(self, more: int, loss: float):
        """Tells of so many more steps than these."""
        self._show(self.count + more, loss)

    @property
    def losses(self) -> np.ndarray:
        """Of all steps."""
        return np.concatenate([np.zeros(0), *self._losses])

    @property
    def first_rate(self) -> float:
        """Of natural steps."""
        if self.batch_size is None:
            return _NATURAL_WHOLE
        return max(_NATURAL * self._haste, min(self.share, 0.5))

    @property
    def rate(self) -> float:
        """Of Adam."""
        return _RATE * self._haste

    @property
    def _haste(self) -> float:
        return _HASTE if self._hastens else 1.0

    def hasten_for(self, limits, number: int) -> None:
        """Takes longer steps if there is no time for so many."""
        wait = self.seconds_a_step * (number - self.count) + self.seconds_at_end
        short = bool(limits.reached(number - 1, wait))
        self._hastens = short and self.batch_size is not None


def _keep_rates(run, limits, whole) -> str:
    """
    Steps at the same rates, until the loss falls no more than its noise, or those with
    falling rates need the time or steps that are left; why they ended.

    With batches, means over epochs are looked at, in which each row is once: they have a
    small part of the noise. One row may have nearly all of it, and then the loss of all
    rows, which has none, may go on falling.

    :param whole: gives that loss; NaN where it is not known.
    """
    fewest, most, group = _FEWEST, _MOST, _GROUP
    if run.batch_size is not None:
        group = round(1.0 / run.share)
        fewest, most = max(_FEWEST, _FEW_EPOCHS * group), max(_MOST, _EPOCHS * group)
    before = now = np.inf
    looked, period = 0, _period(limits)
    little = max(limits.tolerance, _BY_ROW * run.num_rows)
    while not (reason := limits.reached(0)):
        chunk = run.chunk(limits)
        at = np.arange(run.count, run.count + chunk)
        rates = run.rate + (_FIRST_RATE - run.rate) * np.exp(-at / _EARLY)
        run(np.full(chunk, run.first_rate), rates)
        # Those with falling rates are to be had too.
        ahead = (1 + _DOWN) * (run.count + chunk)
        wait = run.seconds_a_step * (ahead - run.count) + run.seconds_at_end
        run.hasten_for(limits, (1 + _DOWN) * fewest)
        if reason := limits.reached(ahead - 1, wait):
            return reason
        if run.count - looked < period:
            continue
        looked = run.count
        if run.count >= fewest - period:
            before, now = now, whole()
        if run.count < fewest:
            continue
        losses = run.losses
        drop, se = loss_drop(losses[np.isfinite(losses)], 0.25, group)
        goes_on = before - now >= max(10.0 * little, _SLOW * abs(now))
        if drop < max(little, 2.0 * se) and not goes_on:
            return "the loss fell no more than its noise"
        if limits.steps is None and run.count >= most:
            return f"the most steps, {(1 + _DOWN) * run.count}, were done"
    return reason


def _lower_rates(run, limits, use_all: bool) -> str:
    """
    Twice as many steps with falling rates, if there is time for them; why they ended too
    early, if they did.

    :param use_all: whether there are as many as there is time for, be it more.
    """
    held, done = run.count, 0
    most = number = _UNLIMITED if use_all else _DOWN * held
    if limits.left is not None:
        most = number = min(number, max(limits.left - held, 0))
    while done < most:
        if limits.until is not None:
            if reason := limits.reached(0, run.seconds_at_end):
                return reason
            number = min(most, done + run.affordable(limits))
        end = min(done + run.chunk(limits), number)
        part = np.arange(done, end) / number
        done = end
        last = min(run.share, _LAST_NATURAL)
        natural = run.first_rate ** (1.0 - part) * last**part
        run(natural, run.rate * 0.5 * (1.0 + np.cos(np.pi * part)))
    return ""


class _Finish:
    """
    L-BFGS on all rows after batches, whose noise hides a part of what is left: of 100,000
    rows (100 points) 120 nats, in twice the time. It goes on for longer where it gains a
    good part of all: of 10,000 rows of 784 columns (50 points) 100 nats, of 5,000.

    :param run: the steps before it.
    """

    def __init__(self, problem, key, limits, run):
        self._descent, self._run = descent_of(problem, key), run
        self._limits, self._epochs = limits, run.count * run.share
        # What is little of that many rows may be left, as before.
        self._little = max(limits.tolerance, _BY_ROW * problem.num_rows)
        self._works: list[int] = []
        self._stopped = ""

    @classmethod
    def wanted(cls, problem, batch_size, limits, run) -> bool:
        """
        Whether there is one: not of random bounds, or of a number of steps, and where
        there is time for some.
        """
        if problem.random or batch_size is None or not problem.natural:
            return False
        few = problem.num_rows <= _ROWS and problem.work(problem.num_rows) <= _AFFORDABLE
        some = _SOME_LOOKS * run.seconds_a_look
        return few and limits.steps is None and not limits.reached(0, some)

    def __call__(self, free: dict, stopped: str) -> Trained | None:
        """Where it ends; None if it cannot begin."""
        descent = self._descent
        index = descent.index(set(descent.free) - set(descent.profiled))
        try:
            descent.start_at(free)
            if index.size:
                descent.run(index, 100_000, 1e-15, self._at_step)
                self._stopped = self._stopped or NO_HIGHER
        except ValueError:  # the loss of all rows is not finite
            return None
        except KeyboardInterrupt:
            stopped = INTERRUPTED
        losses = np.append(self._run.losses, descent.losses[1:])
        first = float(losses[0])
        bound, stopped = -float(descent.loss), self._stopped or stopped
        return Trained(descent.free_now(), first, losses, bound, 0.0, stopped)

    def _at_step(self, loss):
        descent = self._descent
        count = len(descent.losses) - 1
        self._run.show(count, loss)
        self._works.append(descent.work)
        if count % 5 == 0 and remaining(descent.losses) < self._little:
            self._stopped = f"less than {self._little:.3g} nats seemed left"
            raise StopIteration
        if descent.work >= _AS_MANY * self._epochs and not self._is_worthwhile():
            self._stopped = f"the most passes over all rows, {descent.work}, were made"
            self._stopped += "; fit(model, fitted, data) goes on"
            raise StopIteration
        if reason := self._limits.reached(0):
            self._stopped = reason
            raise StopIteration

    def _is_worthwhile(self) -> bool:
        """Whether it goes on for longer than the batches took."""
        losses, work = self._descent.losses[1:], self._descent.work
        before = losses[np.searchsorted(self._works, 0.75 * work)]
        gained = self._run.losses[0] - losses[-1]
        return work < _LONGEST * self._epochs and before - losses[-1] > _WORTHWHILE * gained


def _period(limits) -> int:
    """Steps between looks at the loss."""
    if limits.left is None:
        return CHUNK
    return max(1, min(CHUNK, limits.left // (1 + _DOWN)))


# ---- all rows -------------------------------------------------------------------------


def whole_loss(problem, batch_size: int | None):
    """
    The loss of all rows, in parts of at most so many rows, as a function of unconstrained
    parameters, a key and the data.
    """
    N = problem.num_rows
    if batch_size is None or not problem.plates or N <= batch_size:
        return problem.loss
    count = N // batch_size
    index = jnp.arange(count * batch_size).reshape(count, batch_size)
    rest = jnp.arange(count * batch_size, N)

    def loss(free, key, arrays):
        @jax.checkpoint
        def part(rows):
            return problem.loss(free, key, problem.rows(arrays, rows))

        total = batch_size / N * jnp.sum(jax.lax.map(part, index))
        return total + (len(rest) / N * part(rest) if len(rest) else 0.0)

    return loss


def _polish(problem, loss, key, tolerance) -> shared:
    """
    A program of natural steps on all rows, until one gains little: from unconstrained
    parameters, the data and how many steps at most to q(u) and the loss.
    """

    def polish(free, arrays, most):
        def here(free):
            return loss(free, key, arrays)

        if not problem.natural:
            return {}, here(free)
        return natural_descent(here, problem.natural, free, most, tolerance)[:2]

    return shared(polish, problem.is_small)


def gain_in_q(problem, key) -> float:
    """What natural steps on all rows gain, the other parameters as they are."""
    arrays = problem.arrays

    def gain(free, arrays):
        def here(free):
            return problem.loss(free, key, arrays)

        lowest = natural_descent(here, problem.natural, free, _MANY, 0.0)[1]
        return here(free) - lowest

    return float(shared(gain, problem.is_small)(problem.free, arrays))


def _mean_bound(loss, free, key, arrays, number: int) -> tuple[float, float]:
    """The mean of a random bound with all rows by so many keys, and its standard error."""

    def values(free, arrays, key, number):
        keys = jax.random.split(key, _MOST_KEYS)
        found = jnp.zeros(_MOST_KEYS, jnp.result_type(float))

        def one(i, found):
            return found.at[i].set(loss(free, keys[i], arrays).astype(found.dtype))

        return jax.lax.fori_loop(0, number, one, found)

    found = np.asarray(shared(values)(free, arrays, key, np.int32(number)), float)
    found = found[:number]
    return -float(found.mean()), float(found.std(ddof=1) / np.sqrt(number))

"""The race between starts, and what training does where time is short."""

import time
from contextlib import suppress
from types import SimpleNamespace

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting import batches, progress, rounds, training, whole
from numpyro_sgp.fitting.batches import (
    _FEWEST,
    _HASTE,
    _NATURAL,
    _RATE,
    _keep_rates,
    _lower_rates,
    _Run,
)
from numpyro_sgp.fitting.progress import CONVERGED, Limits
from numpyro_sgp.fitting.race import Race, Settling
from numpyro_sgp.fitting.rounds import iterate
from numpyro_sgp.fitting.starts import random_starts
from numpyro_sgp.training.descent import Descent
from tests.helpers import gaussian_model

NO_LIMITS = Limits(0.1, None, None)


class Falling:
    """
    Stands for a stepper: the loss of a start, ``(level, slope)``, falls by its slope in
    each step, down to its level.
    """

    work, num_rows = 1e5, None

    def __init__(self):
        self.problem = SimpleNamespace(
            plates=False, random=False, num_rows=10_000, profiled=[]
        )
        self.steps, self.rates = {}, []

    def start(self, free, key):
        return SimpleNamespace(good=SimpleNamespace(free=free), at=0)

    def __call__(self, state, rows, natural, others, held=()):
        level, slope = free = state.good.free
        slope = 0.0 if held else slope
        at = state.at + np.arange(len(natural))
        self.steps[free] = self.steps.get(free, 0) + len(natural)
        self.rates.append((natural, others))
        moved = SimpleNamespace(good=state.good, at=state.at + len(natural))
        return moved, level + np.maximum(100.0 - slope * at, 0.0)


STARTS = [(5.0, 9.0), (1.0, 1.0), (2.0, 9.0), (3.0, 9.0), (np.nan, 9.0), (4.0, 9.0)]


def test_what_is_held_is_so_in_the_first_round():
    stepper = Falling()
    ends = Race(stepper, whole=False)(STARTS, None, 6, NO_LIMITS, {1: ("lengthscale",)})
    # 250 of 300 steps without what is held, at a slope that takes 100.
    assert ends[0] == (1.0, 1.0) and stepper.steps[1.0, 1.0] == 300
    fast = Race(Falling(), whole=False)(STARTS, None, 2, NO_LIMITS, {2: ("lengthscale",)})
    assert (2.0, 9.0) not in fast[:2]  # which it was behind of after the first round


@pytest.mark.parametrize("keep", [2, 6])
def test_the_race_puts_the_best_first_and_what_has_no_loss_nowhere(keep):
    stepper = Falling()
    ends = Race(stepper, whole=False)(STARTS, None, keep, NO_LIMITS)
    assert ends[:2] == [(1.0, 1.0), (2.0, 9.0)] if keep == 6 else ends[0] == (2.0, 9.0)
    assert sorted(ends) == sorted(STARTS[:4] + STARTS[5:])
    assert stepper.steps[2.0, 9.0] == 300
    # With two to be kept, three go on after the first round and two after the second.
    assert (
        sorted(stepper.steps.values())
        == {
            2: [50, 50, 50, 100, 300, 300],
            6: [50, 300, 300, 300, 300, 300],
        }[keep]
    )


class Clocked(Falling):
    """Where each step takes a second."""

    now = 0.0

    def __call__(self, state, rows, *args, **kwargs):
        state, losses = super().__call__(state, rows, *args, **kwargs)
        self.now += len(losses)
        return state, losses


def test_the_race_leaves_half_of_the_time_to_the_training(monkeypatch):
    stepper = Clocked()
    monkeypatch.setattr(progress.time, "monotonic", lambda: stepper.now)
    ends = Race(stepper, whole=False)(STARTS, None, 6, Limits(0.1, None, 1500.0))
    # A round of five starts takes 250 s, after the first 300 s.
    assert stepper.now == 800.0 and ends[0] == (1.0, 1.0)
    stepper = Clocked()
    Race(stepper, whole=False)(STARTS, None, 6, Limits(0.1, None, 10.0))
    assert stepper.now == 300.0


class Plateau(Falling):
    """Where the rest falls for long, and the first to arrive has nothing in q(u)."""

    def __init__(self, mean):
        super().__init__()
        self.problem.profiled, self._mean = ["f_auto_qu_mu", "f_auto_qu_sqrt"], mean

    def start(self, free, key):
        free = {"f_auto_qu_mu": np.full(3, self._mean), "start": free}
        return SimpleNamespace(good=SimpleNamespace(free=free), at=0)

    def __call__(self, state, rows, natural, others, held=()):
        level, slope = free = state.good.free["start"]
        at = state.at + np.arange(len(natural))
        self.steps[free] = self.steps.get(free, 0) + len(natural)
        moved = SimpleNamespace(good=state.good, at=state.at + len(natural))
        return moved, np.where(at < 150, 100.0 + slope, level)


@pytest.mark.parametrize(("mean", "goes_on"), [(0.1, True), (10.0, False)])
def test_those_left_behind_go_on_where_the_first_explains_nothing(mean, goes_on):
    stepper = Plateau(mean)
    starts = [(50.0, 0.0), (50.0, 1.0), (50.0, 2.0), (20.0, 3.0), (10.0, 4.0)]
    ends = Race(stepper, whole=False)(starts, None, 2, NO_LIMITS)
    assert ends[0]["start"] == ((10.0, 4.0) if goes_on else (50.0, 0.0))
    assert (set(stepper.steps.values()) == {300}) is goes_on


@pytest.mark.slow
def test_a_function_of_three_columns_of_thirty_is_found():
    """Where all is noise the bound is 410 nats lower, and the race was there first."""
    rng = np.random.default_rng(13)
    X = rng.normal(size=(800, 30))
    w = rng.normal(size=(30, 3)) * (np.arange(30) < 3)[:, None]
    y = np.sin(1.5 * X @ w).sum(1) / 1.5 + 0.2 * rng.normal(size=800)

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        each = dist.LogNormal(np.zeros(30), 1.0).to_event(1)
        kernel = sgp.kernels.RBF(variance, numpyro.sample("lengthscale", each))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(100), (X, y), progress_bar=False)
    assert fitted.bound > -500.0  # -495.0; 20,000 tuned steps ended at -906.8


def test_steps_that_take_long_are_few_and_in_two_rounds():
    stepper = Falling()
    stepper.work = 1e12
    Race(stepper, whole=False)(STARTS[:4], None, 1, NO_LIMITS)
    assert sorted(stepper.steps.values()) == [5, 5, 10, 10]


def test_the_race_ends_after_a_round_where_time_is_up():
    stepper = Falling()
    Race(stepper, whole=False)(STARTS, None, 2, Limits(0.1, None, -1.0))
    assert set(stepper.steps.values()) == {50} and len(stepper.steps) == len(STARTS)


def test_where_no_start_has_a_loss_there_is_the_first():
    ends = Race(Falling(), whole=False)([(np.nan, 1.0)] * 2, None, 2, NO_LIMITS)
    assert len(ends) == 1


def unknown():
    """The loss of all rows."""
    return np.nan


@pytest.mark.parametrize("goes_on", [True, False])
def test_rates_stay_while_the_loss_of_all_rows_falls(goes_on):
    """Whatever the noise of the batches is, of which one row may have all."""
    stepper = Falling()
    stepper.num_rows = 1_000
    limits = Limits(100.0, None, None)
    run = _Run(stepper, (0.0, 0.3), jax.random.key(0), limits, lambda *_: None)
    looks = iter(np.geomspace(1e6, 1.0, 1000) if goes_on else np.ones(1000))
    stopped = _keep_rates(run, limits, lambda: next(looks))
    assert stopped.startswith("the most steps") == goes_on


@pytest.mark.parametrize("most, factor", [(3 * _FEWEST - 1, _HASTE), (None, 1.0)])
def test_rates_are_higher_where_there_is_time_for_few_steps(most, factor):
    stepper = Falling()
    stepper.num_rows = 1_000
    limits = Limits(0.1, most, None)
    run = _Run(stepper, (0.0, 0.3), jax.random.key(0), limits, lambda *_: None)
    _keep_rates(run, limits, unknown)
    natural, others = stepper.rates[-1]
    assert np.allclose(natural, max(_NATURAL * factor, 0.1))
    assert others[-1] == pytest.approx(_RATE * factor, rel=0.5)
    assert run.rate == _RATE * factor


def test_no_step_begins_where_time_is_up():
    over = Limits(0.1, None, time.monotonic())
    run = _Run(Falling(), (0.0, 0.3), jax.random.key(0), over, lambda *_: None)
    assert _keep_rates(run, over, unknown) == "the time was used up" and run.count == 0
    _keep_rates(run, Limits(0.1, 150, None), unknown)
    held = run.count
    for use_all in (False, True):
        assert _lower_rates(run, over, use_all) == "the time was used up"
        assert run.count == held > 0


def test_random_starts_have_other_numbers_for_means_than_for_hyperparameters():
    free = {"hyper": np.zeros(4), "f_auto_qu_mu": np.zeros(4)}
    guide = SimpleNamespace(roles=lambda: {"f_auto_qu_mu": "mean"})
    problem = SimpleNamespace(
        free=free,
        guide=guide,
        profiled=["f_auto_qu_mu"],
        scales=lambda: {"hyper": np.ones(4)},
    )
    starts = random_starts(problem, jax.random.key(0), 2)
    drawn = [np.asarray(start[name]) for start in starts for name in free]
    assert len(np.unique(drawn)) == 16


# ---- trainings from where the race ends --------------------------------------------------


class Apart(Falling):
    """Starts, ``(loss, lengthscale)``, with inducing points that are all far apart."""

    def __init__(self):
        super().__init__()
        self.problem.scales = lambda: {"lengthscale": np.full(1, 0.5), "Z": np.ones(1)}
        self.problem.guide = SimpleNamespace(roles=lambda: {"Z": "inducing"})

    def start(self, free, key):
        loss, lengthscale = free
        Z = np.array([1e3 * loss])
        free = {"lengthscale": np.array([lengthscale]), "Z": Z, "start": free}
        return SimpleNamespace(good=SimpleNamespace(free=free), at=0)

    def __call__(self, state, rows, natural, others, held=()):
        return state, np.full(len(natural), state.good.free["start"][0])


@pytest.mark.parametrize("whole", [True, False])
def test_those_far_apart_are_trained_in_turns_with_the_best(whole):
    starts = [(3.0, 0.2), (1.0, 0.0), (2.0, 0.1), (5.0, -2.0), (4.0, 1.0), (9.0, -9.0)]
    # The last one is left behind while its lengthscale is held.
    race = Race(Apart(), whole)
    ends = race(starts, None, 2, NO_LIMITS, {5: ("lengthscale",)})
    losses = [end["start"][0] for end in ends]
    by_loss = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]
    assert losses == ([1.0, 5.0, 2.0, 4.0, 3.0, 9.0] if whole else by_loss)


class Ends:
    """Stands for a descent: from a start, its end, it goes there in so many evaluations."""

    def __init__(self, evaluations):
        self.work, self.trained, self._evaluations = 0, [], evaluations

    def start_at(self, end):
        if np.isnan(end):
            raise ValueError
        self.losses, self._end = [end + 100.0], end

    def go(self, *_):
        falls = np.append(0.5 ** np.arange(self._evaluations), 0.0)
        self.losses = [*self._end + 100.0 * falls]
        self.trained.append(self._end)
        self.work += self._evaluations
        return CONVERGED, False

    def free_now(self):
        return self._end


@pytest.mark.parametrize("evaluations", [8, 100])  # of few nothing is extrapolated
@pytest.mark.parametrize(
    ("starts", "options", "trained"),
    [
        # Two more end within half a nat of the best.
        ([5.0, 7.0, 5.2, 4.9, 1.0], {}, [5.0, 7.0, 5.2, 4.9]),
        # Those before do not count where one is better.
        ([5.0, 5.0, 3.0, 3.0, 5.0, np.nan, 3.0, 1.0], {}, [5.0, 5.0, 3.0, 3.0, 5.0, 3.0]),
        # A second training is within the work, a third one is not, unless it is to be.
        ([5.0, 7.0, 1.0], {"work": 0.4}, [5.0, 7.0]),
        ([5.0, 7.0, 1.0], {"work": 0.6}, [5.0]),
        ([5.0, 7.0, 1.0], {"work": 0.6, "least": 3}, [5.0, 7.0, 1.0]),
        ([5.0, 7.0, 1.0], {"number": 2}, [5.0, 7.0]),
    ],
)
def test_starts_are_trained_until_some_end_alike_or_it_takes_long(
    starts, options, trained, evaluations, monkeypatch
):
    descent, options = Ends(evaluations), {"number": len(starts), **options}
    work = whole.TRAININGS * options.pop("work", 1e-3) / evaluations
    problem = SimpleNamespace(work=lambda _: work, num_rows=10)
    monkeypatch.setattr(whole, "iterate", descent.go)
    given = None, NO_LIMITS, lambda *_: None
    best = whole.train_whole(problem, starts, *given, descent=descent, **options)
    assert descent.trained == trained and best.bound == -min(trained)


@pytest.mark.parametrize(
    ("starts", "below"),
    [([5.0, 7.0, 5.2], 0.2), ([5.0, 7.0], 2.0), ([5.0], 0.0), ([9.0, 5.0, 7.5], 2.5)],
)
@pytest.mark.parametrize("moves", [0, 1, 2])
def test_it_is_told_where_the_best_ends_alone(starts, below, moves, monkeypatch):
    descent = Ends(100)
    problem = SimpleNamespace(work=lambda _: 1e6, num_rows=10, all_natural=True)
    move = [lambda free, limits: descent.start_at(min(starts) - 10.0) or 0]
    nothing = SimpleNamespace(moves=lambda: moves * move)
    for kind in "Variances", "Periods":
        monkeypatch.setattr(whole, kind, lambda *_: SimpleNamespace(moves=list))
    monkeypatch.setattr(whole, "Scales", lambda *_: nothing)
    monkeypatch.setattr(whole, "iterate", descent.go)
    monkeypatch.setattr(whole, "_moves", lambda *_: [])
    swaps = SimpleNamespace(search=lambda *_: 0.0, interrupted=False)
    monkeypatch.setattr(whole, "Swaps", lambda *_: swaps)
    given = None, NO_LIMITS, lambda *_: None
    options = {"descent": descent, "number": len(starts), "seed": 0}
    best = whole.train_whole(problem, starts, *given, **options)
    if moves:  # the second one ends at the same
        below = 10.0 if moves == 1 and len(starts) > 1 else 0.0
    below *= below > 1.0
    assert best.apart == pytest.approx(below)
    assert best.bound == -min(starts) + 10.0 * (moves > 0)
    assert (" other starts end " in best.stopped) == (below > 0.0)
    assert best.stopped.startswith(CONVERGED)


# ---- steps on all rows between the race and L-BFGS ---------------------------------------


def test_settling_takes_some_hundred_steps_with_falling_rates():
    stepper = Falling()
    free, losses = Settling(stepper)((1.0, 1.0), None, NO_LIMITS)
    assert free == (1.0, 1.0) and len(losses) == 200 and losses[-1] < losses[0]
    natural, others = (np.concatenate(rates) for rates in zip(*stepper.rates, strict=True))
    assert (natural == 1.0).all() and (np.diff(others) < 0).all() and others[0] == 0.06


@pytest.mark.parametrize(
    ("rows", "limits", "wanted"),
    [
        (1_001, NO_LIMITS, True),
        (1_000, NO_LIMITS, False),  # the race was on all of them
        (1_001, Limits(0.1, 200, None), False),
        (1_001, Limits(0.1, None, time.monotonic() + 2.0), False),
        (1_001, Limits(0.1, 5000, time.monotonic() + 1e5), True),
    ],
)
def test_settling_is_for_more_rows_than_the_race_had_and_where_there_is_time(
    rows, limits, wanted
):
    assert Settling.wanted(SimpleNamespace(num_rows=rows), limits) is wanted


def test_settling_ends_where_time_is_up():
    _, losses = Settling(Falling())((1.0, 1.0), None, Limits(0.1, None, -1.0))
    assert not losses.size


@pytest.mark.slow
def test_many_rows_with_few_points_settle_first(monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.uniform(0.0, 3.0, (1_100, 1))
    y = np.sin(9.0 * X[:, 0]) + 0.3 * rng.normal(size=1_100)
    taken = []
    call = Settling.__call__

    def counted(self, *args):
        free, losses = call(self, *args)
        taken.append(losses)
        return free, losses

    monkeypatch.setattr(Settling, "__call__", counted)
    fitted = sgp.fit(gaussian_model, sgp.SVGP(8), (X, y), steps=230, progress_bar=False)
    (early,) = taken
    assert len(early) == 115 and early[-1] < early[0]  # half of the steps
    assert np.array_equal(fitted.losses[:115], early) and len(fitted.losses) <= 230
    assert fitted.bound >= -np.nanmin(early)  # L-BFGS begins where they end


@pytest.mark.slow
def test_where_there_is_no_race_each_start_is_trained(monkeypatch):
    rng = np.random.default_rng(0)
    X = np.linspace(0.0, 6.0, 40)[:, None]
    y = np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=40)
    started = []
    start_at = Descent.start_at

    def counted(self, free):
        started.append(free)
        start_at(self, free)

    monkeypatch.setattr(Descent, "start_at", counted)
    monkeypatch.setattr(training, "SEVERAL", 1.0)  # as if evaluations took long
    bounds = []
    for restarts, number in (1, 1), (4, 4):
        started.clear()
        guide = sgp.AutoSparseGP(gaussian_model, sgp.InverseFreeSVGP(4))
        guide.setup(X, y)  # so that it does not begin at a Gaussian
        options = {"restarts": restarts, "progress_bar": False}
        fitted = sgp.fit(gaussian_model, guide, (X, y), **options)
        assert len(started) == number
        bounds.append(fitted.bound)
    assert bounds[1] >= bounds[0]


def test_a_ctrl_c_at_a_later_start_keeps_what_there_is(monkeypatch):
    class Stopped(Ends):
        def start_at(self, end):
            if end == 3.0:
                raise KeyboardInterrupt
            super().start_at(end)

    descent = Stopped(100)
    problem = SimpleNamespace(work=lambda _: 1e6, num_rows=10)
    monkeypatch.setattr(whole, "iterate", descent.go)
    given = [5.0, 4.0, 3.0, 1.0], None, NO_LIMITS, lambda *_: None
    best = whole.train_whole(problem, *given, descent=descent, number=4)
    assert best.bound == -4.0 and best.stopped == progress.INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize("stays", [False, True])
def test_how_many_are_trained_where_evaluations_take_long(stays, monkeypatch):
    X = np.linspace(0.0, 6.0, 40)[:, None]
    y = np.sin(2.0 * X[:, 0])
    own, told = training.train_whole, []

    def train_whole(problem, starts, *args, least, number, **options):
        told.append((least, number, len(starts) - 2))
        return own(problem, starts[:1], *args, **options)

    monkeypatch.setattr(training, "train_whole", train_whole)
    monkeypatch.setattr(training, "SEVERAL", 1.0)
    option = sgp.SVGP(inducing=X[::10], train_inducing=not stays)
    for restarts in 1, 3, 5, 9:
        options = {"restarts": restarts, "steps": 4, "progress_bar": False}
        sgp.fit(gaussian_model, option, (X, y), **options)
    assert [least for least, *_ in told] == [1, 2, 3, 3]
    assert all(number == (all_ if stays else least) for least, number, all_ in told)


def test_limits_are_of_all_trainings_together_or_of_each():
    limits = Limits(0.1, 10, None).after(6)
    assert not limits.reached(3) and limits.reached(4) == "at the limit of 10 steps in all"
    assert not Limits(0.1, 10, None, in_all=False).after(6).reached(9)


class Slow:
    """Stands for a descent whose loss falls ever more slowly, by `rate` less each step."""

    free, profiled, work = {"a": 0.0}, ("q",), 0.0

    def __init__(self, start, end, rate):
        self.losses, self._end, self._rate = [start], end, rate

    @property
    def loss(self):
        return self.losses[-1]

    def index(self, names):
        return np.arange(1)

    def decrement(self, index, result):
        return 0.0

    def run(self, index, most, tolerance, at_step):
        with suppress(StopIteration):
            for _ in range(most):
                self.losses.append(self._end + self._rate * (self.loss - self._end))
                at_step(self.loss)


def test_a_training_that_will_not_overtake_the_best_one_is_left():
    """Falls of a hundredth of the rest each: 5 times as much as is told is never left."""
    counts = {}
    for wanted in (np.inf, 10.0, 40.0):
        descent = Slow(100.0, 30.0, 0.99)
        stopped, limited = iterate(descent, NO_LIMITS, lambda *_: None, wanted)
        assert (stopped, limited) == (CONVERGED, False)
        counts[wanted] = len(descent.losses)
    assert counts[10.0] < 0.5 * counts[np.inf] and counts[40.0] == counts[np.inf]


def test_a_ctrl_c_after_the_iterations_ends_the_training():
    class Stopped(Slow):
        def decrement(self, index, result):
            raise KeyboardInterrupt

    descent = Stopped(100.0, 30.0, 0.5)
    assert iterate(descent, NO_LIMITS, lambda *_: None) == (progress.INTERRUPTED, True)
    assert descent.loss < 31.0


def test_long_trainings_may_leave_all_of_the_tolerance(monkeypatch):
    """Falls that become less as the square of the number of steps, for ever."""

    class Tail(Slow):
        def run(self, index, most, tolerance, at_step):
            with suppress(StopIteration):
                for n in range(1, most):
                    self.losses.append(200.0 / n)
                    at_step(self.loss)

    counts = []
    for patient in (rounds._PATIENT, 10**6):
        monkeypatch.setattr(rounds, "_PATIENT", patient)
        descent = Tail(300.0, 0.0, 0.0)
        iterate(descent, NO_LIMITS, lambda *_: None)
        counts.append(len(descent.losses))
    assert 1_000 < counts[0] < 0.5 * counts[1]


@pytest.mark.slow
def test_all_rows_come_after_batches_where_they_are_affordable(monkeypatch):
    """Up to an accuracy that the noise of batches hides, and no more work than is told."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3.0, 3.0, (600, 1))
    y = np.sin(3.0 * X[:, 0]) + 0.3 * rng.normal(size=600)
    bounds, counts = {}, []
    for affordable in (0.0, 2e9):
        monkeypatch.setattr(batches, "_AFFORDABLE", affordable)
        given = gaussian_model, sgp.SVGP(6), (X, y)
        fitted = sgp.fit(*given, batch_size=100, progress_bar=False)
        bounds[affordable] = fitted.bound
        counts.append(len(fitted.losses))
    again = sgp.fit(*given, batch_size=100, progress_bar=False)
    assert again.bound == fitted.bound  # whatever the time that it took
    assert bounds[2e9] > bounds[0.0] and counts[1] > counts[0]
    whole_rows = sgp.fit(*given, progress_bar=False).bound
    assert bounds[2e9] > whole_rows - 0.5
    few = sgp.fit(*given, batch_size=100, steps=30, progress_bar=False)
    assert len(few.losses) == 30  # nothing after the steps that were asked for

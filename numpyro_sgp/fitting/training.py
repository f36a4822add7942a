"""One training of one guide: its starts, the race between them, and the way to the end."""

import copy
import functools
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.util import find_stack_level
from tqdm import tqdm

from numpyro_sgp._programs import on_data, split
from numpyro_sgp.diagnostics.bound import bound_of, differs_from_training
from numpyro_sgp.elbo import MonteCarlo, TraceGP_ELBO
from numpyro_sgp.fitting.arguments import check_sites
from numpyro_sgp.fitting.batches import train_best
from numpyro_sgp.fitting.common_draws import with_common_draws
from numpyro_sgp.fitting.fitted import Fitted
from numpyro_sgp.fitting.float32 import stopped_as, with_true_slopes
from numpyro_sgp.fitting.integration import Excess, begin_excess, told_of
from numpyro_sgp.fitting.other_data import inside
from numpyro_sgp.fitting.problem import (
    Problem,
    constrained,
    data_as_arguments,
    unconstrained,
)
from numpyro_sgp.fitting.progress import INTERRUPTED, Limits, Trained
from numpyro_sgp.fitting.race import Race, Settling
from numpyro_sgp.fitting.rounds import descent_of
from numpyro_sgp.fitting.starts import (
    generator,
    lengthscale_starts,
    random_starts,
    with_drawn_means,
    with_narrow_q,
)
from numpyro_sgp.fitting.stepper import Stepper
from numpyro_sgp.fitting.verdict import ENOUGH_NATS
from numpyro_sgp.fitting.whole import train_whole
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.checks import check_reach, check_support_stays

#: Products of all rows with M x M matrices up to which training sees all rows at once,
#: in numbers multiplied.
WHOLE = 4e8
#: The same number, times that of starts, up to which these are all trained to the end (up
#: to three).
SEVERAL = 4e6
#: Rows of a batch above that.
BATCH = 1024
# Of layers, where outer functions wave between the few nodes of inner ones.
_DRAWS = MonteCarlo(16, antithetic=True, sequence="sobol")
_OF_LAYERS = (
    "{}: outer functions wave between the values that inner ones have there. Use "
    "expectation=sgp.MonteCarlo(16), whose bound is right and random, or "
    "sgp.Trapezoid(40), which takes far longer."
)
_CALL = "fit(model, approximation, (X, group, y), num_groups=8)"


@dataclass(frozen=True, eq=False)
class Training:
    """
    How guides are trained, by the arguments of :func:`~numpyro_sgp.fit`.

    :param args: of the model.
    :param kwargs: of the model.
    :param rng_key: of starts, batches and draws.
    :param loss: whose bound it is.
    :param limits: of all trainings together.
    :param batch_size: rows of a batch, or None.
    :param restarts: number of starts that are drawn, the first one excepted.
    :param progress_bar: whether the bound is shown while it rises.
    """

    args: tuple
    kwargs: dict
    rng_key: Array
    loss: TraceGP_ELBO
    limits: Limits
    batch_size: int | None
    restarts: int
    progress_bar: bool

    def __call__(
        self, guide, start=None, *, limits=None, raced=False, before=None, descent=None
    ) -> Any:
        """
        One training.

        :param guide: that is trained.
        :param start: values of parameters that are known already, in place of the race.
        :param limits: of this training, if others.
        :param raced: whether there is a race nevertheless, by all rows.
        :param before: a fit of this guide to go on from.
        :param descent: that of a fit with the same data, or None.
        :return: the fit.
        """
        with data_as_arguments(_CALL):
            limits = self.limits if limits is None else limits
            run = _Run(self, guide, limits, start, raced, before, descent)
            found = run.fitted(run.train(*run.starts()))
            if run.too_high is None:
                return found
            (cause,), left = told_of(*run.too_high), limits.after(len(found.losses))
            if self.loss.expectation is None and not left.reached(0):
                loss = copy.copy(self.loss)
                loss.expectation = _DRAWS
                again = replace(self, loss=loss)(guide, start, limits=left, raced=raced)
                if again.bound > found.bound - run.too_high.nats:
                    if again.stopped != INTERRUPTED:
                        why = f"by draws, since by nodes {cause.told}"
                        again.stopped = f"{again.stopped} ({why})"
                    return again
            warnings.warn(_OF_LAYERS.format(cause.told), stacklevel=find_stack_level())
            found.stopped = f"{cause.told}; {found.stopped}"
            return found


class _Run:
    """A training, which compiles beside what comes before: of :class:`Training`."""

    def __init__(self, how: Training, guide, limits, start, raced, before, descent):
        self._how, self._guide, self._limits, self._before = how, guide, limits, before
        self._goes_on = before is not None and descent is not None  # with the same data
        keys = split(how.rng_key, 5)
        for_init, for_guide, self._for_starts, self._for_race, self._for_training = keys
        svi, state, self._kwargs = self._begun(for_init, for_guide)
        check_sites(guide)
        problem = Problem(svi, state, how.args, self._kwargs)
        self._problem = problem = with_common_draws(problem, how.batch_size)
        self._size = _batch_size(problem, how.batch_size)
        self._is_whole = not problem.random and self._size is None
        self._known = []  # parameters that are known already
        if start is not None:
            known = {name: v for name, v in start.items() if name in problem.free}
            free = inside(unconstrained(problem.svi, known), problem.free)
            self._known = [{**problem.free, **free}]
        anew = raced and self._is_whole and bool(problem.natural)
        self._is_raced = before is None and (start is None or anew)
        #: How far the bound of layers was too high in the end, None if it was not.
        self.too_high: Excess | None = None
        self._early = np.zeros(0)  # losses before those of the training itself
        self._stepper, self._race, self._settling = Stepper(problem, self._size), None, None
        self._descent = descent
        self._prepare()

    def _begun(self, for_init, for_guide):
        """SVI, its state and the keyword arguments, anew or where a fit ended."""
        how, guide, before = self._how, self._guide, self._before
        if before is not None:
            free = unconstrained(before.svi, before.params)
            state = SVIState(before.svi.optim.init(free), None, for_init)
            return before.svi, state, {**before.svi.static_kwargs, **how.kwargs}
        guide.take_natural_gradients(1.0)
        svi = SVI(guide.model, guide, optax.adam(0.01), how.loss)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"GP site '.*' is scaled by")
            state = _initial_state(svi, for_init, for_guide, how.args, how.kwargs)
        if isinstance(guide, AutoSparseGP):  # one Gaussian over all looks by itself
            check_support_stays(guide, how.args, how.kwargs)
            check_reach(guide, svi.get_params(state), how.args, how.kwargs)
        return svi, state, how.kwargs

    def _prepare(self):
        """Begins to compile, in the order in which programs are needed."""
        problem = self._problem
        if self._is_raced and problem.natural:
            # Fast steps of Adam make components of a mixture, which has none, collapse.
            self._race = Race(self._stepper, self._is_whole)
            self._race.prepare(self._for_race)
            if self._is_whole and Settling.wanted(problem, self._limits):
                self._settling = Settling(self._stepper)
                self._settling.prepare(problem.free, self._for_race)
        if self._is_whole and self._descent is None:
            self._descent = descent_of(problem, self._for_training)
            self._descent.prepare()

    def starts(self) -> tuple[list[dict], int, int]:
        """
        Where to train from, the best first; from how many at most, and from how many
        however long it takes.
        """
        problem, restarts, held = self._problem, self._how.restarts, {}
        if self._before is not None:
            starts = [problem.free]
        elif not self._is_raced:
            starts = self._known
        else:
            starts, held = lengthscale_starts(problem)
            starts += random_starts(problem, self._for_starts, restarts - 1)
        affordable = SEVERAL / problem.work(problem.num_rows)
        few = int(np.clip(affordable, 1, 3))
        number = least = max(few, min((restarts + 1) // 2, 3))
        if self._race is not None:
            drawn = generator(self._for_race)
            starts.append(with_drawn_means(problem, problem.free, drawn))
            keep = 2 if affordable < 1 else len(starts)
            starts = self._race(starts, self._for_race, keep, self._limits, held)
            # Where inducing points are trained there are other optima for each of these.
            roles = self._guide.roles()
            has_trained_points = any(roles.get(name) == "inducing" for name in problem.free)
            number = least if has_trained_points else len(starts) + len(self._known)
            # Another first, as that hardly moves and is what others are left for.
            starts[min(few - 1, 1) : 0] = self._known
        elif restarts > 1:  # that nothing else chooses from
            number = least = few = len(starts)
        if not self._is_whole:
            number = few if restarts > 1 and self._size is None else 1
        return starts, number, least

    def train(self, starts: list[dict], number: int, least: int) -> Trained:
        """The best of trainings from some starts."""
        problem, limits = self._problem, self._limits
        if self._settling is not None:
            starts[0], self._early = self._settling(starts[0], self._for_race, limits)
            limits = limits.after(len(self._early))
        with tqdm(disable=not self._how.progress_bar) as bar:

            def show(count, loss):
                bar.update(len(self._early) + count - bar.n)
                bar.set_postfix_str(f"ELBO: {-loss:.6g}", refresh=False)

            rest = self._for_training, limits, show
            if not self._is_whole:
                return train_best(self._stepper, starts[:number], *rest)
            number = min(number, len(starts))
            starts = [*starts, problem.free, with_narrow_q(problem, starts[0])]
            options = {"number": number, "least": least, "descent": self._descent}
            found = train_whole(problem, starts, *rest, seed=0, **options)
        return with_true_slopes(found, problem, limits.after(len(found.losses)))

    def fitted(self, found: Trained) -> Any:
        """The guide with what was found."""
        self.too_high = self._of_nodes(found)
        svi, guide, how = self._problem.svi, self._guide, self._how
        given = constrained(svi, found.free), how.args, self._kwargs
        bound = found.bound, found.bound_se
        if self._size is None and differs_from_training(svi):
            bound = bound_of(svi, *given)
        make = getattr(guide, "fitted", functools.partial(Fitted, guide))
        return make(
            *given,
            loss=svi.loss,
            losses=np.append(self._early, found.losses),
            bound=bound[0],
            bound_se=bound[1],
            stopped=stopped_as(found, self._problem),
            svi=svi,
            descent=found.descent,
            apart=found.apart or (self._before.apart if self._goes_on else 0.0),
        )

    def _of_nodes(self, found: Trained) -> Excess | None:
        """How far a bound of layers is too high, if it is."""
        problem = copy.copy(self._problem)
        if found.stopped == INTERRUPTED or not (self._is_whole and problem.inner_layers):
            return None
        problem.free, excess = found.free, None
        with suppress(Exception):  # of a rule of one's own
            excess = begin_excess(problem, self._for_training)()
        is_much = excess is not None and ENOUGH_NATS < excess.nats < np.inf
        return excess if is_much else None


def _initial_state(svi, init_key, guide_key, args, kwargs) -> SVIState:
    """``svi.init(init_key, *args, **kwargs)`` by a few programs."""
    starts = svi.guide.starts(guide_key, args, kwargs)

    def run(args, kwargs, key, starts):
        return svi.init(key, *args, init_params=starts, **kwargs)

    state = on_data(run, args, kwargs, init_key, starts)
    if any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(svi.constrain_fn.args)):
        return svi.init(init_key, *args, init_params=starts, **kwargs)
    return state


def _batch_size(problem, batch_size) -> int | None:
    """Rows of a batch; None for all rows."""
    N = problem.num_rows
    if batch_size is not None and problem.guide.known().subsampled:
        raise ValueError(
            f"batch_size={batch_size}, but a plate of the model draws batches of its own "
            "(subsample_size). Leave batch_size out; or leave subsample_size out, and fit "
            "takes batches of all rows by itself."
        )
    if batch_size is not None and batch_size < N and not problem.plates:
        raise ValueError(
            f"batch_size={batch_size}, but the model has no plate of the {N} rows of the "
            "data that has all observations (with one row of each GP site for each, and no "
            "other latents), so that a batch cannot stand for all; or rows are others in a "
            "batch, as where it standardises X by X.mean(). Write the likelihood inside "
            "numpyro.plate('data', X.shape[0]), give data that are standardised, or leave "
            "batch_size out."
        )
    if batch_size is not None:
        return batch_size if batch_size < N else None
    if N <= 2 * BATCH or not problem.plates:
        return None
    return BATCH if problem.random or problem.work(N) > WHOLE else None

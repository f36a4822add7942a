"""
Trainings from other lengthscales, with all else where it is best for these.

Of a trend with a fast wiggle on it there is an optimum that takes the wiggle for noise. The
race's shorter lengthscales end there too, as they begin beside so much noise that it pays
to lengthen them: 65 nats below, for 150 rows. With the lengthscale held until noise and
variance are what suits it, they do not.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import jax
import numpy as np

from numpyro_sgp._programs import without_leaks
from numpyro_sgp.fitting.problem import Problem, constrained, unconstrained
from numpyro_sgp.fitting.progress import Limits
from numpyro_sgp.fitting.starts import Scaled, newton, scaled_of, with_explained_points
from numpyro_sgp.training.descent import Descent

#: How many times as long lengthscales become, and whether each by itself or all together.
MOVES = (0.35, False), (0.12, True), (0.12, False), (0.04, False), (2.5, False), (6.0, True)
_EACH = 3  # lengthscales up to which each is moved by itself
_HELD = 20  # iterations with lengthscales held, at most
_SETTLED = 0.1  # nats by an iteration below which it has come to nothing


class Scales:
    """
    Places to train from with lengthscales that are others by a factor: each by itself,
    where there are few parameters that they are made of, and all together.

    :param problem: whose lengthscales they are.
    :param descent: of its loss, with q(u) at its optimum.
    :param seed: of inducing points that are drawn anew.
    :param work: evaluations after which there are no more places.
    """

    def __init__(
        self, problem: Problem, descent: Descent, seed: int, work: float = math.inf
    ):
        self._problem, self._descent = problem, descent
        self._until = descent.work + work
        self._rng = np.random.default_rng((seed, 3))
        names = [name for name in problem.free if name not in problem.guide.roles()]
        self._every = self._find(names)

    def _find(self, names: list[str]) -> list[Scaled]:
        return scaled_of(self._problem, names)

    def moves(self) -> Iterator[Callable[[dict, Limits], int]]:
        """
        Functions from unconstrained parameters and limits, which begin the descent anew at
        other ones and return the number of iterations that this took.

        :raises ValueError: by such a function, where the loss is not finite.
        """
        every = self._every
        few = [[one] for one in every] if 1 < len(every) <= _EACH else []
        for factor, alone in MOVES if every else ():
            for scaled in few if alone else [every]:
                if self._descent.work >= self._until:
                    return
                yield partial(self._begin, scaled=scaled, factor=factor)

    def _begin(self, free: dict, limits: Limits, scaled: list[Scaled], factor) -> int:
        return self._from(self._with_factor(free, scaled, factor), scaled, limits)

    def _from(self, moved: dict, scaled: list[Scaled], limits: Limits) -> int:
        """Begins at parameters of which some are held at first; the iterations of that."""
        with suppress(Exception):  # of a kernel's own code, or of few distinct rows
            where = self._problem, moved, self._rng, 1.0
            moved = without_leaks(with_explained_points, *where) or moved
        descent = self._descent
        descent.start_at(moved)
        held = {one.name for one in scaled}
        index = descent.index(set(descent.free) - {*descent.profiled, *held})

        def at_step(loss):
            settled = descent.losses[-2] - loss < _SETTLED
            if settled or limits.reached(len(descent.losses) - 1):
                raise StopIteration

        if index.size:
            descent.run(index, _HELD, 1e-15, at_step)
        return len(descent.losses) - 1

    def _with_factor(self, free: dict, scaled: list[Scaled], factor: float) -> dict:
        """The same with some lengthscales so many times as long."""
        svi, moved, stepped = self._problem.svi, {}, {}
        params = constrained(svi, free)
        for name, lengthscale, _, slope in scaled:
            if slope is None:
                moved[name] = np.asarray(params[name]) * factor
            else:
                step = newton(slope, np.log(factor), lengthscale.size)
                here = stepped.get(name, free[name])
                stepped[name] = here + np.asarray(step, free[name].dtype)
        return {**free, **unconstrained(svi, moved), **jax.device_put(stepped)}

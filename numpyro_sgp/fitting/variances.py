"""
Training from other variances of kernels, where all that was trained is taken for noise.

A response in units of its own (of some ten thousand, with a variance that begins at one) is
noise first: its scale grows to that of the response in a few steps, and then the slope by a
kernel's variance, a millionth of what would be seen, is next to nothing.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from numpyro_sgp.fitting.progress import Limits
from numpyro_sgp.fitting.scales import Scales
from numpyro_sgp.fitting.starts import SCALES, Scaled, at_scales, scaled_of

_LESS = 1e-6  # times the variances with which nothing is explained
_LITTLE = 1.0  # nats by what is
_MORE = 10.0 ** np.arange(1, 17)  # times the variances that are looked at
_GAIN = 0.5  # nats for the sake of which there is a training


class Variances(Scales):
    """
    Where functions explain nothing, a place with the variances of all kernels so many times
    as large that the bound is highest. See :class:`~numpyro_sgp.fitting.scales.Scales`.
    """

    def _find(self, names: list[str]) -> list[Scaled]:
        return scaled_of(self._problem, names, length=lambda kernel: kernel.variance)

    def moves(self) -> Iterator[Callable[[dict, Limits], int]]:
        if self._every:
            yield self._grown

    def _grown(self, free: dict, limits: Limits) -> int:
        every = self._every
        here = self._loss(free)
        if self._loss(self._with_factor(free, every, _LESS)) > here + _LITTLE:
            raise ValueError("Something is explained.")
        best, found = here - _GAIN, None
        for place, factor in product(self._lengthscales(free), _MORE):
            if limits.reached(0):
                break
            moved = self._with_factor(place, every, factor)
            if (loss := self._loss(moved)) < best:
                best, found = loss, moved
        if found is None:
            raise ValueError("No other variance explains more.")
        return self._from(found, every, limits)

    def _lengthscales(self, free: dict) -> Iterator[dict]:
        """As at the start, and by the spread of the inputs: what they are tells nothing."""
        problem = self._problem
        names = [name for name in problem.free if name not in problem.guide.roles()]
        scaled = scaled_of(problem, names)
        yield {**free, **{one.name: problem.free[one.name] for one in scaled}}
        for scale in SCALES if scaled else ():
            scales = [np.full(one.functions, scale) for one in scaled]
            yield {**free, **at_scales(problem, free, scaled, scales)}

    def _loss(self, free: dict) -> float:
        try:
            self._descent.start_at(free)
        except ValueError:  # no finite bound there
            return np.inf
        return self._descent.loss

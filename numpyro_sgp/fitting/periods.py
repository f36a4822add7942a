"""
Trainings from other periods, where these are parameters.

As a function of a period the bound has optima wherever one wave more or less goes into all
inputs, and high ones at whole multiples of the right period: no slope leads from one to
another. So periods are looked at one by one, with all else as it was at the start.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from numpyro_sgp.fitting.progress import Limits
from numpyro_sgp.fitting.scales import Scales
from numpyro_sgp.fitting.starts import Scaled, periodic_kernels, scaled_of

_MOST = 200  # periods that are looked at, two for each wave over all inputs
_TRAINED = 4  # of the best of them


def over_waves(num_rows: int, width: float) -> np.ndarray:
    """
    Periods with half a wave over all inputs, one, and so on.

    :param width: from the first input to the last.
    """
    return 2.0 * width / np.arange(1, min(num_rows, _MOST) + 1)


class Periods(Scales):
    """
    Places to train from with other periods: those of which the bound is highest with all
    else as at the start. See :class:`~numpyro_sgp.fitting.scales.Scales`.
    """

    def _find(self, names: list[str]) -> list[Scaled]:
        return scaled_of(
            self._problem, names, periodic_kernels, lambda kernel: kernel.period
        )

    def moves(self) -> Iterator[Callable[[dict, Limits], int]]:
        for scaled in self._every:
            ranked: list[dict] = []
            for rank in range(_TRAINED):
                if self._descent.work >= self._until:
                    return
                yield partial(self._at_rank, scaled=scaled, ranked=ranked, rank=rank)

    def _at_rank(self, free, limits, scaled, ranked, rank) -> int:
        if not rank:
            ranked += self._looked_at(free, scaled, limits)[:_TRAINED]
        if rank >= len(ranked):
            raise ValueError("There are no more periods.")
        return self._from(ranked[rank], [scaled], limits)

    def _looked_at(self, free: dict, scaled: Scaled, limits: Limits) -> list[dict]:
        """Parameters with each of some periods, the best ones first."""
        # As at the start, but for other periods, which are better now.
        others = {one.name for one in self._every} - {scaled.name}
        base = {**self._problem.free, **{name: free[name] for name in others}}
        for one in self._every:  # other entries of the same parameter
            if one is not scaled and one.name == scaled.name and one.slope is not None:
                is_of_it = one.slope != 0.0
                base[one.name] = np.where(is_of_it, free[one.name], base[one.name])
        descent, found = self._descent, []
        width = np.sqrt(12.0) * np.max(scaled.sd)  # of even inputs
        for period in over_waves(self._problem.num_rows, width):
            if limits.reached(0) or descent.work >= self._until:
                break
            moved = self._with_factor(base, [scaled], period / np.mean(scaled.value))
            with suppress(ValueError):  # no finite bound there
                descent.start_at(moved)
                found.append((descent.loss, moved))
        order = np.argsort([loss for loss, _ in found], kind="stable")
        return [found[i][1] for i in order]

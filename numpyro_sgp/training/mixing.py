"""
Natural steps that each go as if all others stood still, mixed with those before.

Where functions add up (a trend and a season, two sets of SOLVE-GP), natural steps of their
means side by side are Jacobi's iteration: what one takes the other takes too. The less
noise there is, the slower it is; three or more may run away. On a quadratic loss the mixed
steps are those of conjugate gradients, with the natural ones as their preconditioner: they
begin where the loss is least among all places that those before lead to.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp.linalg import matmul

_KEPT = 20  # places


class Places(NamedTuple):
    """The last places, each a row, and their number."""

    at: Array  # (_KEPT, n), as the step is
    steps: Array  # (_KEPT, n)
    means: Array  # (_KEPT, m), by which the slopes are
    slopes: Array  # (_KEPT, m)
    number: Array


class Mixing:
    """
    Mixes the steps of some parameters.

    :param names: of these parameters.
    :param dual: from parameters, and what a step is made of, to vectors of means, in which
        these parameters are linear, and of the derivatives of the loss by them.
    """

    def __init__(self, names: list[str], dual: Callable[[dict, dict], tuple[Array, Array]]):
        self.names, self._dual = names, dual

    def none_yet(self, given: dict, slopes: dict) -> Places:
        """Where there were no places, given parameters and slopes of the right shapes."""
        at, (means, by_means) = vector(given, self.names), self._dual(given, slopes)
        zeros = [jnp.zeros((_KEPT, v.size), v.dtype) for v in (at, at, means, by_means)]
        return Places._make([*zeros, jnp.zeros((), int)])

    def __call__(
        self, places: Places, given: dict, slopes: dict, new: dict, rate: Array
    ) -> tuple[dict, Places]:
        """
        Where a mixed step leads, and the places with this one.

        :param places: that were met before; of none, the step is as it was.
        :param given: this place.
        :param slopes: what the step was made of.
        :param new: where it leads by itself.
        :param rate: its size, 1 for a whole one.
        """
        at = vector(given, self.names)
        rate = jnp.asarray(rate, at.dtype)  # that of the loss may have 64 bits
        step = (vector(new, self.names) - at) / rate
        here = (at, step, *self._dual(given, slopes))
        mixed = jnp.where(places.number > 0, _mixed(places, *here), rate * step)
        ends = np.cumsum([given[name].size for name in self.names])[:-1]
        parts = zip(self.names, jnp.split(mixed, ends), strict=True)
        by = {n: part.reshape(given[n].shape).astype(given[n].dtype) for n, part in parts}
        new = {**new, **{name: given[name] + move for name, move in by.items()}}
        slot = places.number % _KEPT
        rows = [kept.at[slot].set(v) for kept, v in zip(places[:4], here, strict=True)]
        return new, Places._make([*rows, places.number + 1])


def vector(params: dict, names: list[str]) -> Array:
    """Some parameters, one after another."""
    return jnp.concatenate([params[name].ravel() for name in names])


def _mixed(places: Places, at, step, means, slope) -> Array:
    """The step to where the loss is least in the span of all, and from there."""
    there = (jnp.arange(_KEPT) < places.number)[:, None]
    here = at, step, means, slope
    moves, changes, by, bends = (
        jnp.where(there, now - before, 0.0)
        for now, before in zip(here, places[:4], strict=True)
    )
    curvature = matmul(by, bends.T)
    diagonal = jnp.diag(curvature)
    bent = diagonal > 0.0
    scale = jnp.where(bent, 1.0 / jnp.sqrt(jnp.where(bent, diagonal, 1.0)), 0.0)
    unit = 0.5 * scale[:, None] * (curvature + curvature.T) * scale
    ridge = _KEPT * float(np.finfo(unit.dtype).eps)
    eye = jnp.eye(_KEPT, dtype=unit.dtype)
    down = scale * matmul(by, slope)
    weights = scale * jnp.linalg.solve(unit + ridge * eye, down)
    return step - matmul(weights, moves + changes)

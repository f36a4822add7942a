"""Natural steps for q(u) beside steps of Adam for the rest, by one program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.training.natural_gradients import natural_update

CHUNK = 50  # steps that the program does at most
_FEW = 2e5  # products (Stepper.work) below which a race takes less than to compile
_SMOOTH = 0.1  # weight of the latest loss in the running mean
_ADAM = optax.scale_by_adam()


class Place(NamedTuple):
    """Parameters, and the state of what moves them."""

    free: dict
    adam: optax.OptState


class State(NamedTuple):
    """
    Where training is, where it can go back to, and how much its steps are damped.

    :param here: where the next loss is taken.
    :param good: the last place whose loss was believed.
    :param loss: a running mean of the losses that were, and of their distances from it,
        which begins at half of the first.
    :param damping: what rates are multiplied by.
    """

    here: Place
    good: Place
    loss: tuple[Array, Array]
    damping: Array
    key: Array


def _zeros(like) -> Array:
    return jax.device_put(np.zeros(like.shape, like.dtype))


class Stepper:
    """
    Steps of a problem on batches or on all rows: a program that the race and the training
    after it have in common, whatever the number of steps.

    :param problem: a :class:`~numpyro_sgp.fitting.problem.Problem`.
    :param num_rows: rows of each batch; None for all rows.
    """

    def __init__(self, problem, num_rows: int | None):
        self.problem, self.num_rows = problem, num_rows
        self._data = problem.arrays, problem.scales()
        self._dtype = jnp.result_type(float)
        few = self.work < _FEW and not problem.random  # steps: those of the race
        self._steps = shared(self._several, briefly=few)

    @property
    def work(self) -> float:
        """:meth:`Problem.work` of a step."""
        return self.problem.work(self.num_rows or self.problem.num_rows)

    def start(self, free: dict, key: Array) -> State:
        """A state at unconstrained parameters."""
        rest = {name: v for name, v in free.items() if name not in self.problem.profiled}
        zeros = jax.tree.map(_zeros, jax.eval_shape(_ADAM.init, rest))
        here = Place(free, zeros)  # with which Adam begins; nothing is compiled for them
        far = jnp.asarray(np.inf, self._dtype)
        return State(here, here, (far, far), jnp.asarray(1.0, self._dtype), key)

    def prepare(self, state: State) -> None:
        """Begins to compile beside what else is done."""
        none = np.zeros(0)
        rows = None if self.num_rows is None else np.zeros((0, self.num_rows), np.int32)
        self._steps.prepare(*self._given(state, rows, none, none))

    def __call__(
        self, state: State, index, natural, others, held=()
    ) -> tuple[State, np.ndarray]:
        """
        A step for each rate, at most :data:`CHUNK`. Where a loss is not finite, or ten
        times as far above its running mean as losses are on average, the step that led
        there is undone, and the next ones are shorter; but not where that batch's loss was
        half as far above before the step.

        :param index: rows of each batch, shape ``(steps, B)``; None for all rows.
        :param natural: rates of natural steps, shape ``(steps,)``.
        :param others: rates of Adam, shape ``(steps,)``.
        :param held: names of parameters that stay where they are.
        :return: the state after them, and the loss of each; NaN where it was not believed.
        """
        state, losses = self._steps(*self._given(state, index, natural, others, held))
        return state, np.asarray(losses, float)[: len(natural)]

    def _given(self, state, index, natural, others, held=()):
        count, (arrays, scales) = len(natural), self._data
        still = {name: jax.tree.map(np.zeros_like, scales[name]) for name in held}

        def filled(values, dtype):
            full = np.zeros((CHUNK, *values.shape[1:]), dtype)
            full[:count] = values
            return full

        rates = filled(natural, self._dtype), filled(others, self._dtype)
        rows = None if index is None else filled(index, np.int32)
        return state, arrays, {**scales, **still}, rows, *rates, np.int32(count)

    def _several(self, state, arrays, scales, index, natural, others, count):
        def one(i, carry):
            state, losses = carry
            rows = None if index is None else index[i]
            batch = arrays if rows is None else self.problem.rows(arrays, rows)
            state, loss = self._one(state, batch, scales, natural[i], others[i])
            return state, losses.at[i].set(loss)

        losses = jnp.full(natural.shape, jnp.nan, self._dtype)
        return jax.lax.fori_loop(0, count, one, (state, losses))

    def _one(self, state, batch, scales, natural_rate, rate):
        problem = self.problem
        key, own = jax.random.split(state.key)
        here, (mean, spread) = state.here, state.loss

        def loss(free):
            return problem.loss(free, own, batch)

        value, slopes = jax.value_and_grad(loss)(here.free)
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((value, slopes))]
        begins = ~jnp.isfinite(mean)
        near = begins | (value <= mean + 10.0 * spread)
        if self.num_rows is not None:
            # A step is not to blame for a batch with a row that is far off anyway.
            before = jax.lax.cond(near, lambda: value, lambda: loss(state.good.free))
            near = near | (value - mean <= 2.0 * (before - mean))
        good = jnp.all(jnp.array(finite)) & near

        damping = state.damping
        rest = {name: slopes[name] for name in scales}
        moves, adam = _ADAM.update(rest, here.adam)
        new = dict(here.free)
        for name, move in moves.items():
            new[name] = jax.tree.map(
                lambda p, m, s: (p - damping * rate * s * m).astype(p.dtype),
                here.free[name],
                move,
                scales[name],
            )
        by_site, natural_rate = problem.natural, damping * natural_rate
        for name, move in natural_update(by_site, here.free, slopes, natural_rate).items():
            new[name] = here.free[name] + move.astype(here.free[name].dtype)
        after = Place(new, adam)

        def either(yes, no):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), yes, no)

        value = value.astype(mean.dtype)
        distance = jnp.abs(value - mean)
        told = (
            jnp.where(begins, value, mean + _SMOOTH * (value - mean)),
            jnp.where(begins, 0.5 * jnp.abs(value), spread + _SMOOTH * (distance - spread)),
        )
        state = State(
            here=either(after, state.good),
            good=either(here, state.good),
            loss=either(told, state.loss),
            damping=jnp.where(good, jnp.minimum(1.2 * damping, 1.0), 0.3 * damping),
            key=key,
        )
        return state, jnp.where(good, value, jnp.nan)

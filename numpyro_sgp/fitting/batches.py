"""Training where the loss is random or the data are many: natural steps beside Adam."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_sgp.fitting.progress import Limits, Trained
from numpyro_sgp.training.natural_gradients import natural_update

CHUNK = 50  # steps in one program
_RATE = 0.03  # of Adam
_FIRST_RATE = 0.1  # at the beginning
_EARLY = 100  # steps over which that goes down
_NATURAL = 0.1  # of natural steps on batches
_NATURAL_WHOLE = 0.3  # of those on all rows with a random loss
_LAST_NATURAL = 0.02
_FEWEST = 200  # steps before rates begin to fall
_MOST, _EPOCHS = 1000, 15  # of both, what is more, before rates fall all the same
_DOWN = 2  # steps with falling rates for each one before
_BY_ROW = 5e-4  # nats a row that are little beside what a longer training costs
_POLISH = 8  # natural steps on all rows in the end, at most
_KEYS = 50  # for the mean of a random bound

_SMOOTH = 0.1  # weight of the latest loss in the running mean
_ADAM = optax.scale_by_adam()


class Place(NamedTuple):
    """Parameters, and the state of what moves them."""

    free: dict
    adam: optax.OptState
    mutable: Any


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


def start(problem, free: dict, key: Array) -> State:
    """A state at unconstrained parameters."""
    rest = {name: v for name, v in free.items() if name not in problem.profiled}
    here = Place(free, _ADAM.init(rest), problem.mutable)
    far = jnp.asarray(jnp.inf, jnp.result_type(float))
    return State(here, here, (far, far), jnp.ones_like(far), key)


def steps(problem, state: State, arrays, index, natural, others, scales):
    """
    A step for each rate. Where a loss is not finite, or ten times as far above its running
    mean as losses are on average, the step that led there is undone, and the next ones are
    shorter.

    :param index: rows of each batch, shape ``(steps, B)``; None for all rows.
    :param natural: rates of natural steps, shape ``(steps,)``.
    :param others: rates of Adam, shape ``(steps,)``.
    :param scales: of :meth:`Problem.scales`.
    :return: the state after them, and the loss of each; NaN where it was not believed.
    """

    def step(state, now):
        rows, natural_rate, rate = now
        batch = arrays if rows is None else problem.rows(arrays, rows)
        key, own = jax.random.split(state.key)
        here, (mean, spread) = state.here, state.loss

        def loss(free):
            return problem.loss(free, own, batch, here.mutable or {})

        (value, mutable), slopes = jax.value_and_grad(loss, has_aux=True)(here.free)
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((value, slopes))]
        begins = ~jnp.isfinite(mean)
        near = begins | (value <= mean + 10.0 * spread)
        good = jnp.all(jnp.array(finite)) & near

        damping = state.damping
        rest = {name: slopes[name] for name in scales}
        moves, adam = _ADAM.update(rest, here.adam)
        new = dict(here.free)
        for name, move in moves.items():
            new[name] = jax.tree.map(
                lambda p, m, s=scales[name]: (p - damping * rate * s * m).astype(p.dtype),
                here.free[name],
                move,
            )
        by_site, natural_rate = problem.natural, damping * natural_rate
        for name, move in natural_update(by_site, here.free, slopes, natural_rate).items():
            new[name] = here.free[name] + move.astype(here.free[name].dtype)
        after = Place(new, adam, mutable if here.mutable else here.mutable)

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

    return jax.lax.scan(step, state, (index, natural, others))


def train_batches(
    problem, free: dict, key, limits: Limits, batch_size: int | None, show
) -> Trained:
    """
    Natural steps for q(u) and Adam for the rest, with rates that stay until the loss falls
    no more than its noise, and then go down; in the end, if the loss of all rows is not
    random, natural steps on all of them.

    :param problem: a :class:`~numpyro_sgp.fitting.problem.Problem`.
    :param free: unconstrained starting values.
    :param key: of batches and of what is drawn.
    :param limits: when to stop.
    :param batch_size: rows of a batch; None for all.
    :param show: called with the number of steps and the loss.
    """
    run = jax.jit(lambda *given: steps(problem, *given))
    scales = problem.scales()
    share = 1.0 if batch_size is None else batch_size / problem.num_rows
    first = _NATURAL_WHOLE if batch_size is None else max(_NATURAL, min(share, 0.5))
    last = min(share, _LAST_NATURAL)
    order = _Order(problem.num_rows, batch_size, key)
    state, losses, count = start(problem, free, key), [], 0

    third = limits.steps and limits.steps // (1 + _DOWN)
    chunk = CHUNK if third is None else max(1, min(CHUNK, third))

    def go(natural, others):
        nonlocal state, count
        index = order.take(len(natural))
        state, found = run(
            state, problem.arrays, index, jnp.asarray(natural), jnp.asarray(others), scales
        )
        found = np.asarray(found, float)
        losses.append(found)
        count += len(natural)
        show(count, float(np.nanmean(found[-10:])))

    fewest = max(_FEWEST, round(2.0 / share)) if batch_size else _FEWEST
    most = max(_MOST, round(_EPOCHS / share))
    dtype = jnp.result_type(float)
    reason = ""
    while not reason:
        at = np.arange(count, count + chunk)
        rate = _RATE + (_FIRST_RATE - _RATE) * np.exp(-at / _EARLY)
        go(np.full(chunk, first, dtype), rate.astype(dtype))
        # Those with falling rates are to be had too.
        ahead = (1 + _DOWN) * (count + chunk)
        reason = limits.reached(ahead - 1)
        if not reason and count >= fewest:
            drop, se = falling(np.concatenate(losses))
            if drop < max(limits.tolerance, 2.0 * se, _BY_ROW * problem.num_rows):
                reason = "converged"
            elif limits.steps is None and count >= most:
                reason = f"the most steps, {(1 + _DOWN) * count}, were done"
    held, fell = count, falling(np.concatenate(losses))[0]
    down = _DOWN * held
    if limits.steps is not None:
        down = min(down, max(limits.steps - held, 0))
    for begin in range(0, down, chunk):
        part = np.arange(begin, min(begin + chunk, down)) / down
        fall = 0.5 * (1.0 + np.cos(np.pi * part))
        natural = first ** (1.0 - part) * last**part
        go(natural.astype(dtype), (_RATE * fall).astype(dtype))
        if limits.until is not None and limits.reached(0):
            reason = limits.reached(0)
            break
    free, mutable = state.good.free, state.good.mutable
    if problem.natural and not problem.random:
        free = polished(problem, free, batch_size, limits.tolerance)
    return Trained(
        free=free,
        mutable=mutable,
        losses=np.concatenate(losses),
        steps=count,
        others_left=max(fell, 0.0),
        stopped=reason,
    )


def falling(losses) -> tuple[float, float]:
    """
    How much the mean loss fell from the third quarter of the steps to the last, and its
    standard error by means of ten.
    """
    losses = losses[np.isfinite(losses)]
    n = len(losses) // 4
    if n < 20:
        return float("inf"), float("inf")
    before, after = losses[-2 * n : -n], losses[-n:]

    def mean_and_variance(part):
        means = part[: len(part) // 10 * 10].reshape(-1, 10).mean(1)
        return means.mean(), means.var(ddof=1) / len(means)

    (a, va), (b, vb) = mean_and_variance(before), mean_and_variance(after)
    return float(a - b), float(np.sqrt(va + vb))


class _Order:
    """Rows of batches: shuffled anew in each epoch."""

    def __init__(self, num_rows, batch_size, key):
        seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
        self._rng = np.random.default_rng(seed)
        self.num_rows, self.batch_size = num_rows, batch_size
        self._left = np.zeros(0, int)

    def take(self, count):
        """Of so many batches; None if there are none."""
        if self.batch_size is None:
            return None
        wanted = count * self.batch_size
        while len(self._left) < wanted:
            self._left = np.append(self._left, self._rng.permutation(self.num_rows))
        rows, self._left = np.split(self._left, [wanted])
        return jnp.asarray(rows.reshape(count, self.batch_size))


# ---- all rows -------------------------------------------------------------------------


def whole_loss(problem, batch_size: int | None):
    """
    The loss of all rows, in parts of at most so many rows, as a function of unconstrained
    parameters and a key.
    """
    N = problem.num_rows
    if batch_size is None or not problem.plates or N <= batch_size:
        return lambda free, key, arrays: problem.loss(free, key, arrays)
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


def polished(problem, free: dict, batch_size, tolerance: float) -> dict:
    """Natural steps on all rows, until one gains less than a tenth of the tolerance."""
    loss = whole_loss(problem, batch_size)
    names, key = problem.profiled, jax.random.key(0)

    @jax.jit
    def look(q, free, arrays):
        return jax.value_and_grad(lambda q: loss({**free, **q}, key, arrays))(q)

    @jax.jit
    def move(q, slopes, rate):
        found = natural_update(problem.natural, q, slopes, rate)
        return {name: q[name] + found[name].astype(q[name].dtype) for name in q}

    q, rate = {name: free[name] for name in names}, 1.0
    value, slopes = look(q, free, problem.arrays)
    for _ in range(_POLISH):
        new = move(q, slopes, jnp.asarray(rate, value.dtype))
        new_value, new_slopes = look(new, free, problem.arrays)
        if not new_value < value:
            rate *= 0.5
            continue
        gained = float(value - new_value)
        q, value, slopes, rate = new, new_value, new_slopes, min(1.0, 2.0 * rate)
        if gained < 0.1 * tolerance:
            break
    return {**free, **q}


def bound_of(problem, free: dict, batch_size, key) -> tuple[float, float]:
    """
    The bound with all rows and its standard error: of the mean over 50 keys where it is
    random, 0 where it is not.
    """
    loss = whole_loss(problem, batch_size)
    if not problem.random:
        value = jax.jit(loss)(free, key, problem.arrays)
        return -float(value), 0.0

    @jax.jit
    def mean(free, arrays):
        keys = jax.random.split(key, _KEYS)
        return jax.lax.map(lambda key: loss(free, key, arrays), keys)

    values = np.asarray(mean(free, problem.arrays), float)
    return -float(values.mean()), float(values.std(ddof=1) / np.sqrt(_KEYS))

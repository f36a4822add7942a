"""Rounds of L-BFGS, and what a loss that falls as it did would still fall by."""

import jax
import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_sgp.fitting.progress import AT_EDGE, CONVERGED, INTERRUPTED, NO_HIGHER
from numpyro_sgp.tracing.state import state_of
from numpyro_sgp.training.descent import Descent
from numpyro_sgp.training.lbfgs import suits_natural

#: Iterations before what is left can be told from losses.
FEWEST = 10
#: Iterations before a training that will not overtake the best is left.
BEHIND = 30
#: How much further a training may fall than its losses say.
TIMES = 5.0
_PATIENT = 1_000  # iterations after which it falls no further than they say
_ROUNDS = 6  # of L-BFGS, each with a fresh memory
#: Why one ended where there is more to gain.
PAUSED = "its turn is over"


def descent_of(problem, key) -> Descent:
    """The loss of all rows as a function of one vector, q(u) at its optimum."""
    svi = problem.svi
    kwargs = {**svi.static_kwargs, **problem.kwargs}
    descent = Descent(
        svi,
        SVIState(problem.state.optim_state, None, key),
        problem.args,
        kwargs,
        natural=bool(problem.natural) or suits_natural(svi),
        families=problem.natural,
        scales=problem.scales(),
        briefly=problem.is_small,
        often=True,
    )
    computed = state_of(svi.model, problem.args, kwargs)
    has_64_bits = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    descent.computed = has_64_bits, computed
    return descent


def iterate(descent, limits, show, wanted=np.inf, turn=np.inf) -> tuple[str, bool]:
    """
    Rounds of L-BFGS; why they ended, and whether by a limit.

    :param wanted: a loss; where it falls so slowly that it will not come there, it has
        converged for the purpose.
    :param turn: evaluations after which it is to let others go on.
    """
    index = descent.index(set(descent.free) - set(descent.profiled))
    if not index.size:
        return CONVERGED, False
    limit, began, little_left, behind, ends = "", 0, False, False, descent.work + turn

    def at_step(loss):
        nonlocal limit, little_left, behind
        count = len(descent.losses) - 1
        show(count, loss)
        limit = limits.reached(count)
        # Of this round: a fresh memory may go on where the one before had come to nothing.
        # Where q(u) is among what L-BFGS trains, there may be plateaus: not before its end.
        if descent.profiled and count - began >= FEWEST and count % 5 == 0:
            left = remaining(descent.losses[began:])
            more = TIMES if count - began < _PATIENT else 1.0
            little_left = more * left < limits.tolerance
            behind = count - began >= BEHIND and loss - more * left > wanted
        if limit or little_left or behind or descent.work >= ends:
            raise StopIteration

    for _ in range(_ROUNDS):
        before, began, little_left = descent.loss, len(descent.losses) - 1, False
        try:
            result = descent.run(index, 100_000, 1e-15, at_step)
        except KeyboardInterrupt:
            return INTERRUPTED, True
        if limit or behind:
            return limit or CONVERGED, bool(limit)
        if descent.work >= ends and not little_left:
            return PAUSED, False
        try:
            decrement = descent.decrement(index, result)
        except KeyboardInterrupt:
            return INTERRUPTED, True
        little_left = little_left or before - descent.loss < 0.5 * limits.tolerance
        if little_left and decrement < limits.tolerance:
            return CONVERGED, False
    return AT_EDGE if descent.at_edge else NO_HIGHER, False


def remaining(losses) -> float:
    """
    What a loss that falls as it did would still fall by: the falls over the second quarter
    of all steps and over the second half, continued as a geometric series.

    :param losses: at the start and after each step.
    """
    losses = np.asarray(losses, float)
    n = len(losses) - 1
    if n < FEWEST:
        return float("inf") if n else 0.0
    first = losses[n // 4] - losses[n // 2]
    last = losses[n // 2] - losses[n]
    if last <= 0.0:
        return 0.0
    ratio = min(last / max(first, 1e-300), 0.95)
    return float(last * ratio / (1.0 - ratio))

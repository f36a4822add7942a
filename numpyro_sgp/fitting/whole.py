"""Training on all data without noise: L-BFGS over what natural steps do not train."""

import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_sgp.fitting.progress import INTERRUPTED, Limits, Trained
from numpyro_sgp.training.descent import Descent
from numpyro_sgp.training.lbfgs import suits_natural

_ROUNDS = 6  # of L-BFGS, each with a fresh memory
_FEWEST = 10  # iterations before what is left can be told from them


def train_whole(problem, starts: list[dict], key, limits: Limits, show) -> Trained:
    """
    Minimises the loss over all parameters, with q(u) at its optimum for the others wherever
    it takes natural steps; from each of some starts, by one program, of which the best is
    kept.

    :param problem: a :class:`~numpyro_sgp.fitting.problem.Problem` whose loss has no noise.
    :param starts: unconstrained starting values, the best first.
    :param key: of the loss.
    :param limits: when to stop.
    :param show: called with the number of iterations and the loss after each.
    """
    svi = problem.svi
    descent = Descent(
        svi,
        SVIState(svi.optim.init(starts[0]), None, key),
        problem.args,
        {**problem.kwargs, **svi.static_kwargs},
        natural=bool(problem.natural) or suits_natural(svi),
        families=problem.natural,
        scales=problem.scales(),
    )
    found: list[Trained] = []
    for free in starts:
        try:
            descent.start_at(free)
        except ValueError:
            if found:
                continue
            raise
        stopped, limited = _iterate(descent, limits, show)
        losses = np.asarray(descent.losses)
        place = descent.free_now(), float(losses[0]), losses[1:]
        found.append(Trained(*place, -float(losses[-1]), 0.0, stopped))
        if limited:
            break
    return max(found, key=lambda trained: trained.bound)


def _iterate(descent, limits, show) -> tuple[str, bool]:
    """Rounds of L-BFGS; why they ended, and whether by a limit."""
    index = descent.index(set(descent.free) - set(descent.profiled))
    if not index.size:
        return "converged", False
    limit, little_left = "", False

    def at_step(loss):
        nonlocal limit, little_left
        count = len(descent.losses) - 1
        show(count, loss)
        limit = limits.reached(count)
        # Where q(u) is among what L-BFGS trains, there may be plateaus: not before its end.
        if descent.profiled and count >= _FEWEST and count % 5 == 0:
            little_left = remaining(descent.losses) < 0.2 * limits.tolerance
        if limit or little_left:
            raise StopIteration

    for _ in range(_ROUNDS):
        before, little_left = descent.loss, False
        try:
            result = descent.run(index, 100_000, 1e-15, at_step)
        except KeyboardInterrupt:
            return INTERRUPTED, True
        if limit:
            return limit, True
        slope = descent.gradient[index] * descent.step_scale[index]
        decrement = 0.5 * float(slope @ (result.hess_inv @ slope))
        little_left = little_left or before - descent.loss < 0.5 * limits.tolerance
        if little_left and decrement < limits.tolerance:
            return "converged", False
    return "the bound stopped rising", False


def remaining(losses) -> float:
    """
    What a loss that falls as it did would still fall by: the falls over the second quarter
    of all steps and over the second half, continued as a geometric series.

    :param losses: at the start and after each step.
    """
    losses = np.asarray(losses, float)
    n = len(losses) - 1
    if n < _FEWEST:
        return float("inf") if n else 0.0
    first = losses[n // 4] - losses[n // 2]
    last = losses[n // 2] - losses[n]
    if last <= 0.0:
        return 0.0
    ratio = min(last / max(first, 1e-300), 0.95)
    return float(last * ratio / (1.0 - ratio))

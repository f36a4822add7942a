"""Training on all data without noise: L-BFGS over what natural steps do not train."""

import numpy as np
from numpyro.infer.svi import SVIState

from numpyro_sgp.fitting.progress import Limits, Trained
from numpyro_sgp.training.lbfgs import Descent

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
    state = SVIState(svi.optim.init(starts[0]), problem.mutable, key)
    descent = Descent(
        svi,
        state,
        problem.args,
        {**problem.kwargs, **svi.static_kwargs},
        bool(problem.natural),
        {name: np.asarray(scale) for name, scale in problem.scales().items()},
    )
    index = descent.index(set(descent.free) - set(descent.profiled))
    best: Trained | None = None
    for number, free in enumerate(starts):
        try:
            descent.start_at(free)
        except ValueError:
            if number:
                continue
            raise
        stopped, decrement = "converged", 0.0
        if index.size:
            stopped, decrement = _iterate(descent, index, limits, show)
        losses = np.asarray(descent.losses)
        if best is None or losses[-1] < best.losses[-1]:
            left = max(remaining(losses), decrement) if index.size else 0.0
            best = Trained(
                free=descent.free_now(),
                mutable=descent.mutable,
                losses=losses,
                steps=len(losses) - 1,
                others_left=left,
                stopped=stopped,
            )
        if stopped != "converged" and limits.reached(len(losses) - 1):
            break
    assert best is not None
    return best


def _iterate(descent, index, limits, show) -> tuple[str, float]:
    """Rounds of L-BFGS; why they ended, and half of the decrement there."""
    reason, decrement = "", 0.0

    def at_step(loss):
        nonlocal reason
        show(len(descent.losses) - 1, loss)
        reason = limits.reached(len(descent.losses) - 1)
        count = len(descent.losses) - 1
        # Where q(u) is among what L-BFGS trains, there may be plateaus: not before its end.
        if not reason and descent.profiled and count >= _FEWEST and count % 5 == 0:
            if remaining(descent.losses) < 0.2 * limits.tolerance:
                reason = "converged"
        if reason:
            raise StopIteration

    for _ in range(_ROUNDS):
        before = descent.loss
        try:
            result = descent.run(index, 100_000, 1e-15, at_step)
        except KeyboardInterrupt:
            return "the user stopped it (Ctrl-C)", np.inf
        g = descent.gradient[index] * descent.step_scale[index]
        decrement = 0.5 * float(g @ (result.hess_inv @ g))
        if reason and reason != "converged":
            return reason, decrement
        gained = before - descent.loss
        if gained < 0.5 * limits.tolerance or reason == "converged":
            if decrement < limits.tolerance:
                return "converged", decrement
        reason = ""
    return "the bound stopped rising", decrement


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

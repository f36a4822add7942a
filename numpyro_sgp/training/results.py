"""What trainings return, and raise where they are stopped."""

from typing import NamedTuple

import numpy as np
from jax import Array
from numpyro.infer.svi import SVIRunResult, SVIState


class TrainResult(NamedTuple):
    """
    What :func:`~numpyro_sgp.train` returns; printed, it is a summary.

    >>> import numpy as np
    >>> from numpyro_sgp import TrainResult
    >>> losses, nlpd = np.array([9.0, 4.0, 3.0]), np.array([1.5])
    >>> TrainResult({}, None, losses, nlpd, np.array([2]), 0.5, "all steps done")
    TrainResult: 3 steps in 0.5 s (all steps done)
      loss: 9 at first, 3 at last
      held-out NLPD: 1.5 at best, after 2 steps, whose parameters these are
    """

    params: dict
    """Parameters as ``svi.run`` returns them: with ``validation`` those of the smallest
    NLPD, and of the last step without."""
    state: SVIState
    """State after the last step, from which ``svi.update``, ``svi.run`` and
    ``train(..., init_state=...)`` go on."""
    losses: Array
    """Loss of each step, shape ``(num_steps,)`` or shorter."""
    nlpd: np.ndarray
    """Held-out negative log predictive densities, means over the rows that no mask leaves
    out."""
    nlpd_steps: np.ndarray
    """After how many steps each of these was taken."""
    seconds: float
    """Wall-clock time of this call, compilation included."""
    stopped: str
    """Why training ended: all steps were done, patience ran out, or what interrupted it."""

    def __repr__(self):
        steps = len(self.losses)
        lines = [f"TrainResult: {steps} steps in {self.seconds:.1f} s ({self.stopped})"]
        if steps:
            first, last = float(self.losses[0]), float(self.losses[-1])
            lines.append(f"  loss: {first:.6g} at first, {last:.6g} at last")
        if np.isfinite(self.nlpd).any():
            best = np.nanargmin(np.where(np.isfinite(self.nlpd), self.nlpd, np.nan))
            lines.append(
                f"  held-out NLPD: {self.nlpd[best]:.5g} at best, after "
                f"{self.nlpd_steps[best]} steps, whose parameters these are"
            )
        return "\n".join(lines)


class FitInterrupted(RuntimeError):
    """
    Training stopped half-way, by an error in the loss (of a likelihood that calls other
    software, say) or by the user; ``__cause__`` is what stopped it.

    :param message: what happened.
    :param result: the :class:`~numpyro.infer.svi.SVIRunResult` at the best parameters
        so far; go on with ``init_state=error.result.state``.

    >>> from numpyro_sgp import FitInterrupted
    >>> issubclass(FitInterrupted, RuntimeError)
    True
    """

    def __init__(self, message: str, result: SVIRunResult | None = None):
        super().__init__(message)
        self.result = result


def cause(error: BaseException) -> str:
    """What stopped a training, the end of a sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "the user (Ctrl-C)."
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__}."

"""When training stops, and what it returns."""

import time
from dataclasses import dataclass, replace

import numpy as np

from numpyro_sgp.training.descent import Descent

#: Why one ended that had nothing left to gain where it was.
CONVERGED = "converged"
#: Why a training ended that the user stopped.
INTERRUPTED = "the user stopped it (Ctrl-C)"

#: Why one ended that had no more of it.
TIME_USED = "the time was used up"

#: Why one ended whose line search failed.
NO_HIGHER = "the bound stopped rising"

#: Why one ended that had nowhere to go.
AT_EDGE = "the bound stopped rising next to parameters at which it is not finite"


@dataclass(frozen=True)
class Limits:
    """
    When to stop.

    :param tolerance: nats that may be left.
    :param steps: how many at most; None for no limit.
    :param until: time on the monotonic clock; None for no limit.
    :param taken: steps that were made before those that are counted.
    :param in_all: whether the number of steps is of several trainings together.
    """

    tolerance: float
    steps: int | None
    until: float | None
    taken: int = 0
    in_all: bool = True

    @property
    def left(self) -> int | None:
        """How many steps may be made."""
        return None if self.steps is None else max(self.steps - self.taken, 0)

    @property
    def seconds_left(self) -> float | None:
        """How long there is time."""
        return None if self.until is None else max(self.until - time.monotonic(), 0.0)

    def reached(self, steps: int, seconds: float = 0.0) -> str:
        """Which limit is reached after so many steps, so long from now; empty if none."""
        if self.steps is not None and self.taken + steps >= self.steps:
            return f"at the limit of {self.steps} steps in all"
        if self.until is not None and time.monotonic() + seconds >= self.until:
            return TIME_USED
        return ""

    def after(self, steps: int) -> "Limits":
        """The same, of which so many steps more are made."""
        return replace(self, taken=self.taken + steps) if self.in_all else self

    def at_most(self, steps: int) -> "Limits":
        """The same with no more steps than that from here on."""
        left = steps if self.left is None else min(steps, self.left)
        return replace(self, steps=self.taken + left)

    def half(self) -> "Limits":
        """The same with half of the steps and of the time that is left."""
        now = time.monotonic()
        steps = None if self.left is None else self.taken + self.left // 2
        until = None if self.until is None else 0.5 * (now + self.until)
        return replace(self, steps=steps, until=until)


@dataclass(frozen=True, eq=False)
class Trained:
    """
    What training found.

    :param free: unconstrained parameters.
    :param first_loss: the loss at the start.
    :param losses: of each step.
    :param bound: the bound with all rows, where it ended.
    :param bound_se: its standard error, 0 where it is not random.
    :param stopped: why it ended.
    :param descent: the :class:`~numpyro_sgp.training.descent.Descent` that went there, with
        its compiled program; None if there was none.
    :param others: bounds at which trainings from other means of q(u) ended.
    :param own: the bound at which that from the start ended.
    :param expected: what as many trainings from other inducing points again would gain.
    :param apart: nats by which it is above where trainings from other starts ended; 0 if
        one came near or there were none.
    """

    free: dict
    first_loss: float
    losses: np.ndarray
    bound: float
    bound_se: float
    stopped: str
    descent: Descent | None = None
    others: tuple[float, ...] = ()
    own: float = float("-inf")
    expected: float = 0.0
    apart: float = 0.0

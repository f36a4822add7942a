"""When training stops, and what it returns."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Limits:
    """
    When to stop.

    :param tolerance: nats that may be left.
    :param steps: how many at most; None for no limit.
    :param until: time on the monotonic clock; None for no limit.
    """

    tolerance: float
    steps: int | None
    until: float | None

    def reached(self, steps: int) -> str:
        """Which limit is reached after so many steps; empty if none."""
        if self.steps is not None and steps >= self.steps:
            return f"at the limit of {self.steps} steps"
        if self.until is not None and time.monotonic() >= self.until:
            return "the time was used up"
        return ""


@dataclass(frozen=True, eq=False)
class Trained:
    """
    What training found.

    :param free: unconstrained parameters.
    :param mutable: mutable state.
    :param losses: of all steps.
    :param steps: how many there were.
    :param others_left: nats that parameters without natural steps may still gain.
    :param stopped: why it ended.
    """

    free: dict
    mutable: Any
    losses: np.ndarray
    steps: int
    others_left: float
    stopped: str

"""The nats between a fit and the truth, by cause, with what to do about each."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from numpyro_sgp.diagnostics.evidence import EvidenceBracket

#: Nats that may be left where a fit is said to have converged.
ENOUGH_NATS = 0.5
#: Those that inducing points may lose where a fit is to choose their number.
ENOUGH_BY_POINTS = 1.0
_MOST_NOISE, _MOST_SHARE = 1.0, 1e-3  # of that, in nats and of the bound
_LEFT = "q(u)", "other parameters"
#: What is told of q(u) where there are too many rows.
NOT_LOOKED_AT = "too many rows to tell: check part of them"
#: How the mend of a row begins that has the rows above it in its nats.
IF_MORE = "if more than the causes above: "
#: The row of trainings from other starts.
OTHER_OPTIMA = "other optima"
#: The row of what numbers of 32 bits cost.
FLOAT32 = "float32"


class Cause(NamedTuple):
    """
    A row of a :class:`Verdict`.

    :param name: what is looked at.
    :param nats: how many nats are left or lost by it; NaN where that is not known,
        infinite where it cannot be bounded.
    :param error: standard error of that, or zero.
    :param told: what was found, or why nothing was.
    :param mend: what to do about it; empty where nothing needs to be done.
    :param headline: what is told with the verdict, and the mend beside it, whatever the
        nats.
    :param at_least: whether there may be more, so that the error says nothing.
    """

    name: str
    nats: float
    error: float = 0.0
    told: str = ""
    mend: str = ""
    headline: str = ""
    at_least: bool = False

    @property
    def number(self) -> str:
        """The nats as text, with their standard error where they are not a lower end."""
        if np.isnan(self.nats):
            return "?"
        if np.isinf(self.nats):
            return "many"
        text = f"{self.nats:.2g}" if self.nats < 100 else f"{self.nats:.0f}"
        text = "<0.01" if 0.0 <= self.nats < 0.01 else text
        if self.at_least and self.nats >= 0.01:
            return f"≥{text}"
        return f"{text} ± {self.error:.1g}" if self.error else text


def unknown(error: Exception) -> str:
    """What a cause says where an attempt failed."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"unknown: {first}"


def held_at_points(names: list[str], blind: str, mend: str) -> Cause:
    """The row of latents that are held at points, of which ``blind`` does not know."""
    if not names:
        return Cause("point estimates", 0.0, told="there are none")
    return Cause("point estimates", np.nan, told=f"{', '.join(names)}: {blind}", mend=mend)


@dataclass(frozen=True, repr=False)
class Verdict:
    """
    What a fit misses; see :meth:`~numpyro_sgp.Fitted.check`. Printed, it is a table.

    :param causes: by name: ``q(u)``, ``other parameters``, ``inducing points``,
        ``family``, ``point estimates``, ``float32`` where JAX computes in it,
        ``quadrature`` where the bound has too few nodes, and ``other optima`` where
        trainings from elsewhere end elsewhere.
    :param evidence: bracket of the log evidence at the fit's hyperparameters, for Gaussian
        likelihoods.
    :param bound: the bound of the fit.
    """

    causes: dict[str, Cause]
    evidence: EvidenceBracket | None = None
    bound: float = float("nan")
    #: Nats that may be left where a fit is said to have converged.
    enough: ClassVar[float] = ENOUGH_NATS

    @property
    def converged(self) -> bool:
        """
        Whether less than half a nat (or the noise of what is measured, if that is a nat or
        a thousandth of the bound at most) is left for q(u) and for the other parameters
        together, trainings from other starts do not end elsewhere, and float32, if the
        training was in it, does not cost half a nat.
        """
        return self._has_trained and not self._is_rounded

    @property
    def _is_rounded(self) -> bool:
        digits = self.causes.get(FLOAT32)
        return digits is not None and digits.nats > ENOUGH_NATS

    @property
    def _has_trained(self) -> bool:
        """Whether training has converged, as far as its precision sees."""
        for name in _LEFT:
            cause = self.causes.get(name)
            if cause is not None and np.isnan(cause.nats) and cause.mend:
                return False
        if self._has_other_optima:
            return False
        left = sum(cause.nats for cause in self._left)
        return bool(left <= max(ENOUGH_NATS, self._noise)) and not self._is_lost_in_noise

    @property
    def _has_other_optima(self) -> bool:
        """Whether there may be better ones, or others of much mass."""
        cause = self.causes.get(OTHER_OPTIMA)
        return cause is not None and not cause.nats < ENOUGH_NATS

    @property
    def _left(self) -> list[Cause]:
        """What training has left, as far as it is known."""
        causes = [self.causes[name] for name in _LEFT]
        return [cause for cause in causes if not np.isnan(cause.nats)]

    @property
    def _noise(self) -> float:
        return max((2.0 * cause.error for cause in self._left), default=0.0)

    @property
    def _is_lost_in_noise(self) -> bool:
        size = 0.0 if np.isnan(self.bound) else abs(self.bound)
        return bool(self._noise > max(_MOST_NOISE, _MOST_SHARE * size))

    @property
    def summary(self) -> str:
        """One sentence."""
        told = " and ".join(f"{c.number} nats for {c.name}" for c in self._left)
        text = "converged" if self._has_trained else "not converged"
        if not self._has_trained and not self._left:
            text = "not known to have converged"
        if self._is_lost_in_noise and sum(c.nats for c in self._left) <= self._noise:
            text = "not known to have converged"
        if self._has_other_optima:
            text = "at one of several optima"
        if self._is_rounded and self._has_trained:
            text += " in float32 alone"
        if told:
            text += f": left are about {told}"
        if self.causes["q(u)"].told == NOT_LOOKED_AT:
            text += "; q(u) was not looked at"
        for cause in map(self.causes.get, _LEFT):
            if cause is not None and np.isnan(cause.nats) and cause.mend:
                text += f"; how many for {cause.name} is not known ({cause.mend})"
        if self._is_rounded:
            digits = self.causes[FLOAT32]
            text += f"; float32 costs at least {digits.number} nats ({digits.mend})"
        points = self.causes["inducing points"]
        if points.nats >= 0.05:
            text += f"; the inducing points lose at least {points.number} nats"
            text += " at these hyperparameters"
            if points.nats >= ENOUGH_NATS:
                text += ", and may lose several times as much by what they make of these"
        told_already = *_LEFT, "inducing points", FLOAT32
        for name, cause in self.causes.items():
            if name in told_already or not cause.mend:
                continue
            known = 0.0
            if cause.mend.startswith(IF_MORE):
                known = np.nansum([c.nats for c in (*self._left, points)])
            if cause.nats - known >= ENOUGH_NATS:
                text += f"; {name} {cause.number} nats"
            if cause.headline:
                text += f"; {cause.headline} ({cause.mend})"
        return text

    @property
    def attrs(self) -> dict[str, float | str]:
        """
        What :meth:`~numpyro_sgp.Fitted.to_arviz` keeps of it for
        :func:`~numpyro_sgp.diagnostics.compare`, without what is not known.
        """
        others, points = self.causes["other parameters"], self.causes["inducing points"]
        found: dict[str, float | str] = {"others_left": others.nats}
        found |= {"others_left_se": others.error, "points_lose": points.nats}
        if np.isnan(others.nats):
            del found["others_left"], found["others_left_se"]
        if np.isnan(points.nats):
            del found["points_lose"]
        if FLOAT32 in self.causes and not np.isnan(self.causes[FLOAT32].nats):
            found["float32_loses"] = self.causes[FLOAT32].nats
        return found | ({"points_mend": points.mend} if points.mend else {})

    def to_dataframe(self):
        """A :class:`pandas.DataFrame` with a row for each cause."""
        import pandas as pd

        found = pd.DataFrame(self.causes.values()).set_index("name")
        return found.drop(columns="headline")

    def __repr__(self):
        lines = [self.summary]
        width = max(len(name) for name in self.causes)
        for cause in self.causes.values():
            lines.append(f"  {cause.name:<{width}}  {cause.number:>8}  {cause.told}")
            if cause.mend:
                lines.append(f"  {'':<{width}}  {'':>8}  -> {cause.mend}")
        if self.evidence is not None and not self.evidence.unknown:
            lower, upper = self.evidence.lower, self.evidence.upper
            lines.append(
                f"  log evidence at these hyperparameters: {lower:.6g} to {upper:.6g}"
            )
        return "\n".join(lines)

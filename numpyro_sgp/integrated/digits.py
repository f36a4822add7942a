"""What nested inference loses to float32: the same bound, at the same nodes, in float64."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array

from numpyro_sgp.distributions.arguments import in_float64
from numpyro_sgp.fitting.float32 import Wide, of_64_bits, wider_numbers
from numpyro_sgp.fitting.verdict import ENOUGH_NATS, FLOAT32, Cause, unknown
from numpyro_sgp.guides.prepared import guide_in_float64
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.profile import Node, Profile

#: What follows where nodes lose unlike numbers of nats.
LEAN = (
    "; hyperparameters lean to where less is lost, by this difference in their log density"
)


def of_digits(
    profile: Profile,
    points: dict,
    found: list[Node],
    means: list[Array],
    args: tuple,
    kwargs: dict,
) -> Cause | None:
    """
    The row of float32; None where JAX has 64 bits.

    :param found: nodes, without weights.
    :param means: of q(w) there.
    """
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return None
    try:
        with of_64_bits():
            points, args, kwargs = in_float64((points, args, kwargs))
            wide = Profile(_in_float64(profile.field), args, kwargs, points)
            ends = [
                wide(node.free, wide.about(mean))[0]
                for node, mean in zip(found, means, strict=True)
            ]
            ends = [(end.value, np.asarray(end.weighed.mean)) for end in ends]
    except Exception as error:  # a model that knows of 32 bits, or a device
        return Cause(FLOAT32, np.nan, told=unknown(error))
    gains = []
    for node, (value, mean) in zip(found, ends, strict=True):
        base = node.value
        if value > base + ENOUGH_NATS:  # maybe of another optimum
            base = max(base, profile(node.free, profile.about(mean))[0].value)
        gains.append(value - base)
    gains = [gain for gain in gains if np.isfinite(gain)]
    if not gains:
        return Cause(FLOAT32, np.nan, told="unknown: the bound is not finite in float64")
    low, high = min(gains), max(gains)
    nats, mend = max(-low, high, high - low), ""
    by = (
        f"{low:.2g} to {high:.2g} higher"
        if high > 0.0
        else f"{-high:.2g} to {-low:.2g} lower"
    )
    told = f"in float64 the bound is {by} at {len(gains)} nodes"
    if nats > ENOUGH_NATS:
        told += LEAN if high - low > ENOUGH_NATS else ""
        when = "at the beginning of the program"
        mend = wider_numbers(profile.field.guide, when, jitter=low > -ENOUGH_NATS)
    return Cause(FLOAT32, nats, told=told, mend=mend)


def _in_float64(field: Field) -> Field:
    """The same for arguments and points of 64 bits, where it has been found in 32."""
    found = field.running(Wide(field.model))
    found.guide = guide_in_float64(field.guide)
    found.sites = found.guide.known().sites
    found.points, found.dtype = in_float64(field.points), np.dtype("float64")
    return found

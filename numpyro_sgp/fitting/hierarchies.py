r"""
Latents at points whose priors depend on others that are, as effects on their scale.

Of :math:`b_k \sim N(0, \tau^2)` and :math:`\tau` the joint density grows as
:math:`\tau^{-K}` where all go to zero, whatever the data say: it has no best values there,
unless the prior of :math:`\tau` has next to no mass near zero, and then not those of
:math:`\tau` alone.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions.transforms import (
    AffineTransform,
    ExpTransform,
    SigmoidTransform,
    SoftplusTransform,
)
from numpyro.infer.autoguide import AutoDelta

from numpyro_sgp._programs import on_data
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins, union

# Of where it started is a scale that went to zero, and of this how far latents are from
# their means; at other optima that is about one.
_NEXT_TO_ZERO, _AT_MEANS = 0.1, 0.5
#: Transforms of a latent with a location and a scale under which it can be found again.
ONE_TO_ONE = AffineTransform, ExpTransform, SigmoidTransform, SoftplusTransform
#: What is to be done about it.
MEND = (
    "sgp.nested, or base_guide=AutoNormal (or sgp.fit with joint=True, of normal effects "
    "that are added to f)"
)


def tied(
    model, args: tuple, kwargs: dict, values: dict[str, Array]
) -> dict[str, frozenset]:
    """
    The latents whose priors depend on other latents, with these, by name.

    :param args: tuple of the model's arguments.
    :param kwargs: dict of its keyword arguments.
    :param values: of latents; nothing is computed.
    :return: by name of a latent, names of those that its prior depends on.
    """

    def priors(values):
        where = model, args, kwargs
        trace = messages.trace_of(*where, data=values, at_site=messages.at_prior_mean)
        return {name: jax.tree.leaves(trace[name]["fn"]) for name in values}

    found = {
        name: union(origin) - {name} for name, origin in origins(priors, values).items()
    }
    return {name: others for name, others in found.items() if others}


def vanished(guide, params: dict, args: tuple, kwargs: dict) -> dict[str, float]:
    """
    The latents at points that are at the means of their priors, as seen by the scales of
    these, which are next to zero and depend on other latents: by name what is left of these
    scales.

    :param guide: an :class:`~numpyro_sgp.AutoSparseGP` that is set up.
    :param params: its parameters, constrained.
    :param args: tuple of the arguments of the model, with the training data.
    :param kwargs: dict of its keyword arguments.
    """
    base = getattr(guide, "base_guide", None)
    if not isinstance(base, AutoDelta):
        return {}
    now = at_points(guide, params)
    others = tied(guide.model, args, kwargs, now)
    others = {name: known for name, known in others.items() if name in now}
    if not others:
        return {}
    names = frozenset().union(*others.values())
    starts = guide.known().starts
    first = {k: v for k, v in at_points(guide, starts).items() if k in names}

    def looked_at(args, kwargs, values):
        where = guide.model, args, kwargs
        trace = messages.trace_of(*where, data=values, at_site=messages.at_prior_mean)
        priors = {name: trace[name]["fn"] for name in others}
        return {name: _moments(fn, now[name]) for name, fn in priors.items()}

    # With parameters of the model, as LocScaleReparam has them.
    known = on_data(looked_at, args, kwargs, {**params, **now})
    before = on_data(looked_at, args, kwargs, {**params, **starts, **now, **first})
    left = {name: _left(known[name], before[name]) for name in others}
    return {name: share for name, share in left.items() if share is not None}


def at_points(guide, params: dict) -> dict[str, Array]:
    """
    Values of latents that parameters are, but for those of rows of which the model draws
    some.
    """
    setup, found = guide.known(), {}
    for name in getattr(setup, "latents", ()):
        value, site = params.get(f"{name}_{guide.prefix}_loc"), setup.trace.get(name)
        if value is not None and site is not None:
            if jnp.shape(value) == jnp.shape(site["value"]):
                found[name] = value
    return found


def _has_no_scale(transform) -> bool:
    """Whether a transform is one to one, with neither location nor scale."""
    return isinstance(transform, ONE_TO_ONE) and not jax.tree.leaves(transform)


def _moments(fn, value):
    """
    Values, and mean and standard deviation of their prior, where it is of real numbers or
    of such that are transformed, as a log-normal one.
    """
    base = messages.innermost(fn)
    affine: list[AffineTransform] = []
    while isinstance(base, dist.TransformedDistribution):
        fn, outer = base.base_dist, list(base.transforms)
        while outer and not affine and _has_no_scale(outer[-1]):
            value = outer.pop().inv(value)
        if not all(isinstance(each, AffineTransform) for each in outer):
            return None
        affine, base = outer + affine, messages.innermost(fn)
    if not messages.is_real(fn):
        return None
    try:
        mean, sd = fn.mean, fn.variance**0.5
    except (AttributeError, NotImplementedError, ValueError):
        return None  # of no number
    for each in affine:
        mean, sd = each(mean), jnp.abs(each.scale) * sd
    try:
        return tuple(jnp.broadcast_to(part, value.shape) for part in (value, mean, sd))
    except ValueError:
        return None  # of other rows than those of a minibatch


def _left(known, before) -> float | None:
    """Of scales that shrank the least share; None where values are not at their means."""
    if known is None:
        return None
    (value, mean, sd), (*_, wide) = (map(np.asarray, found) for found in (known, before))
    shrunk = sd < _NEXT_TO_ZERO * wide
    away, scale = (value - mean)[shrunk], sd[shrunk]
    if not away.size or np.sqrt(np.mean(away**2)) > _AT_MEANS * scale.max():
        return None
    return float(np.min(scale / wide[shrunk]))


def told_of(left: dict[str, float]) -> str:
    """What became of latents."""
    some = " and ".join(map(repr, left))
    return (
        f"{some} went to the mean of the prior together with its scale (to "
        f"{min(left.values()):.1g} of where that began), as their joint density favours "
        "whatever the data"
    )


def warn_of(left: dict[str, float]) -> None:
    """The same, to who called the caller."""
    warnings.warn(f"Latents {told_of(left)}. Use {MEND}.", stacklevel=4)

"""What a step of length one is for latents and parameters in units of their own."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoDelta

from numpyro_sgp._programs import shared
from numpyro_sgp.fitting.hierarchies import at_points, tied
from numpyro_sgp.tracing import messages

#: Sizes between these are one: so are those of most models, and starts and rates are for
#: these.
_USUAL = 0.1, 10.0
#: Standard deviations of what one row tells of a latent beyond which no step goes.
_ROWS_TELL = 3.0
_MOST_ROWS = 1000  # that are asked


class Units(NamedTuple):
    """
    Of latents and parameters far from one, by name.

    :param means: of real latents at points with priors that are wide: the median of a few
        draws, where NumPyro's guides start, may be hundreds away from it.
    :param sizes: of real latents at points, and of real parameters of the model, as far as
        they are far from one (a level of ten thousand): the standard deviation of the
        prior, or how large a parameter is at the start; no more than some of the standard
        deviations that a latent would have by a row alone, for priors that say nothing.
    """

    means: dict[str, np.ndarray]
    sizes: dict[str, np.ndarray]


def units(problem) -> Units:
    """Those of a :class:`~numpyro_sgp.fitting.problem.Problem`."""
    latents = _real_latents(problem)
    means = _prior_means(problem, latents)
    told = {full: sd for full, (_, sd) in latents.items()} | _of_parameters(problem)
    unusual = {name: sizes for name, sizes in told.items() if _is_unusual(sizes)}
    return Units(means, _at_most_of_a_row(problem, means, unusual))


def _prior_means(problem, latents) -> dict[str, np.ndarray]:
    if getattr(problem.guide, "base_guide_given", None) is not AutoDelta:
        return {}  # which starts elsewhere
    found = {}
    for full, (fn, sd) in latents.items():
        if np.any(sd > _USUAL[1]):
            value = problem.free[full]
            mean = np.asarray(fn.mean, value.dtype)
            found[full] = np.broadcast_to(mean, value.shape)
    return found


def _real_latents(problem) -> dict:
    """
    Prior and its standard deviations, of those that are held at points and neither depend
    on other latents nor have such that do: units of these go together.
    """
    setup, names, found = problem.guide.known(), {}, {}
    for name in getattr(setup, "latents", ()):
        full, site = f"{name}_{problem.guide.prefix}_loc", setup.trace.get(name)
        if full in problem.free and site is not None:
            sd = _prior_sd(site["fn"], np.shape(problem.free[full]))
            if sd is not None:
                names[full], found[full] = name, (site["fn"], sd)
    if not any(_is_unusual(sd) for _, sd in found.values()):
        return found
    values = at_points(problem.guide, problem.params)
    others = tied(problem.guide.model, problem.args, problem.kwargs, values)
    together = others.keys() | frozenset().union(*others.values())
    return {full: told for full, told in found.items() if names[full] not in together}


def _of_parameters(problem) -> dict[str, np.ndarray]:
    """How large real parameters of the model are at the start."""
    guide = problem.guide
    starts, found = getattr(guide.known(), "starts", {}), {}
    for name, value in problem.free.items():
        if name not in starts and isinstance(value, jax.Array):
            same = np.array_equal(value, problem.params[name])  # no constraint
            if name not in guide.roles() and same:
                found[name] = np.abs(np.asarray(value))
    return found


def _at_most_of_a_row(problem, means, sizes) -> dict[str, np.ndarray]:
    """Sizes, none far beyond what a row alone would tell."""
    if not sizes:
        return {}
    rows = min(problem.num_rows, _MOST_ROWS)
    arrays = problem.rows(problem.arrays, jnp.arange(rows))
    curvature = shared(partial(_curvatures, problem.loss), briefly=True)
    free = {**problem.free, **jax.device_put(means)}
    names = {name: free[name] for name in sizes}
    bent, found = curvature(names, free, arrays), {}
    for name, size in sizes.items():
        information = float(bent[name]) / problem.num_rows
        most = _ROWS_TELL / information**0.5 if information > 0.0 else np.inf
        large = np.minimum(size, max(1.0, most))
        found[name] = np.where(size > 1.0, large, size).astype(names[name].dtype)
    return found


def _prior_sd(fn, shape) -> np.ndarray | None:
    """Of a distribution of real numbers; None for others."""
    if not messages.is_real(fn):
        return None
    try:
        sd = np.sqrt(np.asarray(fn.variance, float))
    except (AttributeError, NotImplementedError):
        return None
    if not np.isfinite(sd).all():
        return None
    try:
        return np.broadcast_to(sd, shape)
    except ValueError:  # of rows of a minibatch, or of more than there are
        return None


def _is_unusual(sizes) -> bool:
    low, high = _USUAL
    return sizes.size > 0 and bool(np.any((sizes < low) | (sizes > high)) and sizes.all())


def _curvatures(loss, names, free, arrays):
    """The mean second derivative of a loss by the entries of each of these."""
    key = jax.random.key(0)

    def at(moved):
        return loss({**free, **moved}, key, arrays)

    found = {}
    for name, value in names.items():
        signs = jax.random.rademacher(key, value.shape, value.dtype)
        along = {k: signs if k == name else jnp.zeros_like(v) for k, v in names.items()}
        bent = jax.jvp(jax.grad(at), (names,), (along,))[1][name]
        found[name] = jnp.sum(bent * signs) / value.size
    return found

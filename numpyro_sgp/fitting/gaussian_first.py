"""
What natural gradients do not train begins where a Gaussian that they train has arrived,
and variances alone where a full covariance has.

From the prior, mixtures and inverse-free bounds end at other optima of inducing points and
hyperparameters than a Gaussian does, which some hundred evaluations find: for five large
counts among eighty rows, 1,400 nats below.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_sgp._programs import on_data
from numpyro_sgp.families import Diagonal
from numpyro_sgp.fitting.ends import alone
from numpyro_sgp.fitting.fitted import Fitted
from numpyro_sgp.fitting.problem import constrained, unconstrained
from numpyro_sgp.fitting.progress import CONVERGED, INTERRUPTED, Limits
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.checks import assigned

_DRAWS = 3  # means of q(u) from which other modes are looked for
_WORSE = 3.0  # nats below the best at which a mode adds next to nothing
_WORK = 0.25  # of that of the training, for other modes at most


def gaussian_of(approximation) -> Any:
    """
    The approximation, or the dict of them by site, with Gaussians that natural gradients
    train wherever there is one for it; None where there is none.
    """
    if isinstance(approximation, dict):
        found = {name: gaussian_of(option) for name, option in approximation.items()}
        if not any(found.values()):
            return None
        return {name: found[name] or option for name, option in approximation.items()}
    return getattr(approximation, "gaussian", None)  # one's own may have none


def train_from_gaussian(
    approximation,
    train_gaussian: Callable[[Any, Limits], Fitted],
    make: Callable[[Any], AutoSparseGP],
    train: Callable[..., Fitted],
    limits: Limits,
) -> Fitted | None:
    """
    A fit that begins at that of a Gaussian, which has half of the steps and of the time;
    its losses are those of its own training. None where there is no such Gaussian, or no
    training of it.

    :param approximation: of the fit, or a dict of them by site; None for nothing of this.
    :param train_gaussian: from an approximation and limits to the fit of the Gaussian.
    :param make: from an approximation to a guide.
    :param train: from a guide, starting parameters, limits, and whether these are raced
        against others, to a fit.
    :param limits: of both together.
    """
    gaussian = None if approximation is None else gaussian_of(approximation)
    if gaussian is None or limits.steps == 1:
        return None
    try:
        with warnings.catch_warnings():  # which the second training has too
            warnings.simplefilter("ignore")
            first = train_gaussian(gaussian, limits.half())
    except (ValueError, NotImplementedError):  # of a likelihood that it is not for
        return None
    options = _of_this_size(approximation, first.guide)
    start, made = _begun(first, options), len(first.losses)
    interrupted = first.stopped == INTERRUPTED
    rest = replace(limits, until=0.0) if interrupted else limits
    # Variances alone may have a better optimum elsewhere (3.5 nats of 830).
    raced = any(isinstance(option.family, Diagonal) for option in options.values())
    fitted = train(make(options), start, limits=rest.after(made), raced=raced)
    fitted.grown = first.grown
    if not raced:
        fitted.apart = first.apart
        if fitted.stopped == CONVERGED:
            fitted.stopped = alone(first.apart)
    if interrupted:
        fitted.stopped = INTERRUPTED
    return fitted


def _of_this_size(approximation, guide) -> dict:
    """By site, with as many inducing points as the guide has in the place of "auto"."""
    gaussians = guide.approximations
    options = assigned(approximation, [*gaussians])
    return {
        name: option.with_points(gaussians[name].num_inducing) if option.is_auto else option
        for name, option in options.items()
    }


def _begun(first: Fitted, options: dict) -> dict:
    """Parameters at the Gaussians that were trained, but for what starts by itself."""
    guide = first.guide
    sites, roles = guide.known().sites, guide.roles()

    def factors(args, kwargs, params):
        posteriors, _ = guide.posterior_at(params, args, kwargs)
        return {
            name: sites[name].approximation.inducing_factor(q.prior.kernel, q.inducing)
            for name, q in posteriors.items()
        }

    @functools.cache
    def known_factors() -> dict:
        return on_data(factors, first.args, first.kwargs, first.params)

    def own(params, name):
        names = sites[name].names.items()
        return {short: np.asarray(params[full]) for short, full in names if full in params}

    numbers = [getattr(option.family, "num_components", 1) for option in options.values()]
    modes, bounds = _modes(first, max(numbers))
    start = {name: value for name, value in first.params.items() if name not in roles}
    for name, option in options.items():
        found = own(first.params, name)
        if gaussian_of(option) is not None:
            means = [k for k in sites[name].names.values() if k.endswith("_mu")]
            kept: list[int] = []  # those that are apart at this site
            for i, params in enumerate(modes):
                if all(_are_apart(params, modes[j], means) for j in kept):
                    kept.append(i)
            at, of = [own(modes[i], name) for i in kept], [bounds[i] for i in kept]
            factor = functools.partial(lambda at: np.asarray(known_factors()[at]), name)
            found = option.at_gaussian(at, of, factor)
        prefix = sites[name].prefix
        start |= {f"{prefix}_{short}": jnp.asarray(v) for short, v in found.items()}
    return start


def _modes(first: Fitted, most: int) -> tuple[list[dict], list[float]]:
    """
    Parameters of a Gaussian that was trained, and of others at optima of their own for its
    hyperparameters and inducing points, where the likelihood has several (as where f and -f
    explain the data alike): where natural steps lead from means of the other sign, or from
    drawn ones. With their bounds, the best first.

    :param most: how many.
    """
    descent, svi, modes, bounds = first.descent, first.svi, [first.params], [first.bound]
    if descent is None or most == 1:
        return modes, bounds
    # Of families with a covariance for each mean.
    profiled = [n.removesuffix("_mu") for n in descent.profiled if n.endswith("_mu")]
    means = [f"{n}_mu" for n in profiled if f"{n}_sqrt" in first.params]
    free, rng = unconstrained(svi, first.params), np.random.default_rng(0)
    flips = [means, *([name] for name in means if len(means) > 1)][:most]
    moved = [{name: -free[name] for name in flip} for flip in flips]
    for _ in range(_DRAWS):
        moved.append({name: _drawn(rng, free[name]) for name in means})
    enough = (1.0 + _WORK) * descent.work
    for means_of in moved:
        if len(modes) == most or descent.work > enough:
            break
        with suppress(ValueError):  # no finite bound there
            descent.start_at({**free, **means_of})
            found = constrained(svi, descent.free_now())
            near = -descent.loss > bounds[0] - _WORSE
            if near and all(_are_apart(found, other, means) for other in modes):
                modes.append(found)
                bounds.append(-descent.loss)
    return modes, bounds


def _drawn(rng, value):
    return jnp.asarray(rng.normal(size=value.shape), value.dtype)


def _are_apart(one: dict, other: dict, means: list[str]) -> bool:
    """Whether means of two q(u) are further away than the larger standard deviation."""
    for name in means:
        sds = []
        for params in one, other:
            root = np.asarray(params[name.removesuffix("_mu") + "_sqrt"])
            full = root.ndim > np.ndim(params[name])
            sds.append(np.linalg.norm(root, axis=-1) if full else np.abs(root))
        if np.any(np.abs(one[name] - other[name]) > np.maximum(*sds)):
            return True
    return False

"""Where hyperparameters begin, and q(w)."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._checks import deviations
from numpyro_sgp._programs import join_static, on_data, shared, split_static
from numpyro_sgp.fitting.periods import over_waves
from numpyro_sgp.fitting.starts import length_of, periodic_kernels, scaled_kernels
from numpyro_sgp.integrated.coordinates import coordinates
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.marginals import given
from numpyro_sgp.integrated.profile import ASTRAY, Node, Profile
from numpyro_sgp.tracing import messages

_STARTS, _OF_FEW = 8, 16  # and of one or two hyperparameters
_DRAWS = 15, 255  # and of one, whose quantiles are even
_BETTER = 0.1  # nats, for which another q(w) is taken
_NEAR = 0.5  # prior standard deviations between means of one optimum
_FEW = 3  # means of it that all end together are enough
_NEWTON = 8  # steps to a period, of which there is need of one where it is exp


def starting_hyperparameters(field: Field, rng_key: Array, args, kwargs) -> np.ndarray:
    """
    Unconstrained hyperparameters to begin from: medians and draws of the prior, of one
    quantiles.
    """
    number = field.num_hyperparameters
    arrays, static = split_static((args, kwargs))

    def draw(arrays, keys):
        args, kwargs = join_static(arrays, static)

        def one(key):
            at_mean = messages.at_prior_mean
            trace = messages.trace_of(field.model, args, kwargs, key, at_site=at_mean)
            values = []
            for name in field.thetas:
                site = trace[name]
                free = coordinates(field, name, site["fn"]).inv(site["value"])
                values.append(jnp.ravel(free))
            return jnp.concatenate([jnp.zeros(0), *values])

        return jax.lax.map(one, keys)

    keys = jax.random.split(rng_key, _DRAWS[number == 1])
    draws = np.asarray(shared(draw, briefly=True)(arrays, keys), float)
    median = np.median(draws, axis=0)[None]
    if number == 0:
        return median
    if number == 1:
        levels = (np.arange(_OF_FEW - 1) + 0.5) / (_OF_FEW - 1)
        return np.concatenate([median, np.quantile(draws, levels, axis=0)])
    more = (_OF_FEW if number == 2 else _STARTS) - 1
    return np.concatenate([median, draws[:more]])


def moved(
    field: Field, other: Field, free: np.ndarray, args: tuple, kwargs: dict
) -> np.ndarray:
    """
    Hyperparameters in the coordinates of another field, which has the same model.

    :param free: ``(S, p)``.
    """

    def move(args, kwargs, free):
        def one(free):
            trace = given(field, free, {}, args, kwargs, jax.random.key(0))
            values = {name: trace[name]["value"] for name in field.thetas}
            return other.ravel(values, args, kwargs)

        return jax.lax.map(one, free)

    found = on_data(move, args, kwargs, jnp.asarray(free, field.dtype))
    return np.asarray(found, float)


def _logs(field, numbers_of):
    """
    The mean logs of some numbers of the kernels, and their derivatives, as functions of
    unconstrained hyperparameters.
    """

    def logs(free, args, kwargs):
        found = [
            jnp.mean(jnp.log(number))
            for kernel in field.kernels_at(free, args, kwargs).values()
            for number in numbers_of(kernel)
        ]
        return jnp.stack(found) if found else jnp.zeros(0)

    def slopes(args, kwargs, free):
        return jax.jacobian(logs)(free, args, kwargs)

    return logs, slopes


def lengthscale_slopes(field: Field, args, kwargs, free: np.ndarray) -> np.ndarray:
    """
    Derivatives of the log lengthscale of each kernel that has one (its mean over columns)
    by unconstrained hyperparameters, ``(kernels, p)``.
    """
    _, slopes = _logs(field, lambda kernel: map(length_of, scaled_kernels(kernel)))
    return np.asarray(on_data(slopes, args, kwargs, jnp.asarray(free, field.dtype)), float)


def other_periods(
    field: Field, args, kwargs, free: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """
    Of each periodic kernel whose period is not known: hyperparameters with others, of half
    a wave over all inputs, one and so on, ``(K, p)``, and which of them it is made of.

    :param free: unconstrained hyperparameters to begin from.
    """
    logs, slopes = _logs(field, lambda kernel: [k.period for k in periodic_kernels(kernel)])

    def reached(args, kwargs, free, which, targets):
        def one(target):
            def step(_, free):
                value, pull = jax.vjp(lambda free: logs(free, args, kwargs)[which], free)
                (slope,) = pull(jnp.ones_like(value))
                return free + slope * (target - value) / jnp.sum(slope**2)

            return jax.lax.fori_loop(0, _NEWTON, step, free)

        return jax.lax.map(one, targets)

    at, out, seen = jnp.asarray(free, field.dtype), [], set()
    width = max(
        np.sqrt(12.0) * np.max(deviations(np.asarray(site.X)))
        for site in field.sites.values()
    )
    for which, slope in enumerate(np.asarray(on_data(slopes, args, kwargs, at))):
        if not np.any(slope) or tuple(slope) in seen:  # known, or that of another kernel
            continue
        seen.add(tuple(slope))
        periods = over_waves(field.layout.num_rows, width)
        more = at, jnp.asarray(which), jnp.asarray(np.log(periods), field.dtype)
        found = np.asarray(on_data(reached, args, kwargs, *more), float)
        out.append((found[np.all(np.isfinite(found), axis=1)], slope != 0.0))
    return out


def ends_elsewhere(profile: Profile, node: Node, until: float | None = None) -> list[Node]:
    """
    What natural steps come to from other q(w), at a node's hyperparameters: from the prior
    itself, and from about some means drawn from it; from about many where ends differ. Of
    likelihoods that are not log-concave what is uphill of the prior's mean may be a poor
    optimum, or a saddle, as where they are even.

    :param until: time on the monotonic clock at which to end; None for no limit.
    """
    ends: list[Node] = []
    for count, start in enumerate(profile.other_starts()):
        late = until is not None and time.monotonic() > until
        if late or (count > _FEW and len(distinct([node, *ends])) == 1):
            break
        found, _ = profile(node.free, start)
        if np.isfinite(found.value) and found.left < ASTRAY:
            ends.append(found)
    return ends


def distinct(ends: list[Node]) -> list[Node]:
    """
    Of nodes with the same hyperparameters one of each optimum, by its value and mean (of
    functions whose sign makes no difference values are the same), the highest first.
    """
    found: list[Node] = []
    for end in sorted(ends, key=lambda end: -end.value):
        if not any(_are_one(end, other) for other in found):
            found.append(end)
    return found


def _are_one(a: Node, b: Node) -> bool:
    way = np.asarray(a.weighed.mean, float) - np.asarray(b.weighed.mean, float)
    limit = _NEAR + 2.0 * np.sqrt(max(a.left, 0.0) + max(b.left, 0.0))
    return abs(a.value - b.value) < _BETTER and float(np.linalg.norm(way)) < limit


def from_elsewhere(profile: Profile, node: Node, until: float | None) -> Node:
    """A node, or the best of :func:`ends_elsewhere` where that is better."""
    ends = ends_elsewhere(profile, node, until)
    best = max(ends, key=lambda end: end.value, default=node)
    return best if best.value > node.value + _BETTER else node

"""Values of f by which predictions of responses are averaged."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jax.typing import ArrayLike

from numpyro_sgp.elbo import GaussHermite, MonteCarlo
from numpyro_sgp.predictive.mixture import components, shapes_and_dtype

_TOGETHER = 2048  # draws of f whose rows are tied together


@dataclass(frozen=True)
class _Midpoints:
    """
    Values of one latent function of equal probability, as an expectation rule.

    :param shift: where they are in intervals of equal probability, between 0 and 1. Those
        of several draws are at other places, so that tails have as many as all together.
    """

    num_points: int
    shift: ArrayLike = 0.5

    def nodes(self, rng_key, shapes, dtype):
        shift = jnp.asarray(self.shift, dtype)
        x = ndtri((jnp.arange(self.num_points, dtype=dtype) + shift) / self.num_points)
        nodes = {name: x.reshape(-1, *(1,) * len(shape)) for name, shape in shapes.items()}
        return nodes, jnp.full(self.num_points, 1.0 / self.num_points, dtype)


@dataclass(frozen=True)
class _Trapezoids:
    """
    Evenly spaced values of one latent function, as an expectation rule: of functions that
    are smooth over a fourth of its sd all digits.

    :param shift: 0 or 0.5, of the spacing: as good a rule, with errors of the other sign.
    """

    shift: float
    num_points: ClassVar[int] = 64

    def nodes(self, rng_key, shapes, dtype):
        x = (np.arange(self.num_points) + self.shift) / 4 - 8.0
        weights = np.exp(-0.5 * x**2)
        nodes = {
            name: jnp.asarray(x.reshape(-1, *(1,) * len(shape)), dtype)
            for name, shape in shapes.items()
        }
        return nodes, jnp.asarray(weights / weights.sum(), dtype)


@dataclass(frozen=True)
class _Units:
    """
    The centre, and one away from it in each function in turn, as an expectation rule: what
    is linear in f is known by these, whatever their weights.
    """

    def nodes(self, rng_key, shapes, dtype):
        counts = [int(np.prod(shape[:-1])) for shape in shapes.values()]
        x = np.concatenate([np.zeros((1, sum(counts))), np.eye(sum(counts))])
        parts = np.split(x, np.cumsum(counts)[:-1], axis=1)
        nodes = {
            name: jnp.asarray(part.reshape(-1, *shape[:-1], 1), dtype)
            for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }
        return nodes, jnp.full(len(x), 1.0 / len(x), dtype)


def rules(num_functions, num_draws, shift=0.5):
    """
    Rules for moments, for what is linear, for quantiles, coarser where there are draws, and
    two more by which these are looked for first, or none.

    :param shift: of this draw's values.
    """
    drawn = num_draws > 1
    each = max(2048 // num_draws, 16)
    several = MonteCarlo(each, sequence="sobol")
    if num_functions == 1 and drawn:
        return GaussHermite(20), _Units(), _Midpoints(max(1024 // num_draws, 8), shift)
    if num_functions == 1:
        first = _Trapezoids(0.0), _Trapezoids(0.5)
        return GaussHermite(100), _Units(), _Midpoints(512, shift), *first
    if num_functions == 2:
        return GaussHermite(10 if drawn else 30), _Units(), several
    if num_functions == 3 and (size := _of_three(each)):
        return GaussHermite(size), _Units(), several
    return several, _Units(), several


def another(num_functions, num_draws):
    """As good a rule for moments, by which jumps and kinks are told: these it has apart."""
    drawn = num_draws > 1
    if num_functions == 1:
        return GaussHermite(21 if drawn else 101)
    if num_functions == 2:
        return GaussHermite(11 if drawn else 31)
    each = max(2048 // num_draws, 16)
    if num_functions == 3 and (size := _of_three(each)):
        return GaussHermite(size - 1)
    return MonteCarlo(each, sequence="sobol")


def _of_three(number) -> int:
    """Nodes for each of three functions, of so many in all; 0 where these are too few."""
    size = int(round(number ** (1 / 3), 9))
    return size if size >= 5 else 0


def points_of(posteriors, rule, key, given, others) -> dict:
    """Weighted values of all GP sites and other latents, under one draw."""
    nodes, weights = rule.nodes(key, *shapes_and_dtype(posteriors))
    values, all_weights = [], []
    for component, log_weight in components(posteriors):
        values.append(
            {
                name: jax.vmap(partial(q.place, component=component[name]))(nodes[name])
                for name, q in posteriors.items()
            }
        )
        all_weights.append(weights * jnp.exp(log_weight))
    f = jax.tree.map(lambda *v: jnp.concatenate(v), *values)
    return _with_others(f, jnp.concatenate(all_weights), key, given, others)


def points_together(posteriors, num_draws, key, given, others) -> dict:
    """
    The same where rows of f are drawn together; of one Gaussian in pairs about its mean.

    :param num_draws: of what q(f) is given, which share the draws of f.
    """
    number = max(_TOGETHER // num_draws, 2)
    keys = jax.random.split(key, len(posteriors))
    in_pairs = all(q.num_components == 1 for q in posteriors.values())
    f = {}
    for own, (name, q) in zip(keys, posteriors.items(), strict=True):
        f[name] = q.sample(own, (number // 2 if in_pairs else number,))
        if in_pairs:
            f[name] = jnp.concatenate([f[name], 2.0 * q.mean - f[name]])
    size = len(f[name])
    return _with_others(f, jnp.full(size, 1.0 / size, f[name].dtype), key, given, others)


def _with_others(f, weight, key, given, others) -> dict:
    repeated = jax.tree.map(
        lambda v: jnp.broadcast_to(v, (len(weight), *jnp.shape(v))), (given, others)
    )
    return {
        "f": {**f, **repeated[0]},
        "others": repeated[1],
        "weight": weight,
        "key": jax.random.split(key, len(weight)),
    }

"""Averages over weighted points, a chunk of these at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr, ndtri

from numpyro_sgp._programs import mapped
from numpyro_sgp.linalg import einsum
from numpyro_sgp.predictive.quantiles import ROUGH, solved

_MAX_NUMBERS = 3e6  # of rows, quantiles and nodes held at one time
FEW_POINTS = 64  # by which quantiles are looked for first


def weighted_sum(weights, values):
    """
    The weighted sum over the first axis. Of exponentials of f squares may be infinite, or
    NaN, at the outermost nodes, whose weights are next to nothing: these are left out.
    """
    info = jnp.finfo(values.dtype)
    nothing = jnp.expand_dims(weights < info.eps**2, range(1, values.ndim))
    values = jnp.where(nothing & ~jnp.isfinite(values), 0, values)
    return einsum("s,s...->...", weights, values)


def average(of, points, which=None, first=()):
    """
    The weighted mean of ``of(point)``, a chunk of the points at a time.

    :param which: `ROUGH`, `OTHERS` or `ALL`, which is traced; None for all.
    :param first: the first two of these, or none: those are a few of all then.
    """

    def add(total, values, weights):
        sums = jax.tree.map(partial(weighted_sum, weights), values)
        return jax.tree.map(jnp.add, total, (sums, jnp.sum(weights)))

    total, weight = over_chunks(of, points, add, 0.0, which, first, weigh=True)
    return total if which is None else jax.tree.map(lambda v: v / weight, total)


def moments(of, points, centre):
    """
    Means and variances.

    :param of: from a point to these, given what is there.
    :param centre: some values, near the means at best.
    """

    def shifted(point):
        mean, variance = of(point)
        shift = mean - centre
        return shift, variance + shift**2

    shift, square = average(shifted, points)
    return centre + shift, square - shift**2


def normal_parts(at, units, number):
    """
    Weights, means and variances of the normal distributions, each by its units.

    :param at: from a point to means and variances there.
    """

    def of_part(part):
        locs, variances = mapped(at, part, FEW_POINTS)
        variance = variances[0] + jnp.sum((locs[1:] - locs[0]) ** 2, axis=0)
        return jnp.sum(part["weight"]), locs[0], variance

    parts = jax.tree.map(lambda v: v.reshape(number, -1, *v.shape[1:]), units)
    return mapped(of_part, parts, 1)


def over_chunks(of, points, add, start, which=None, first=(), weigh=False):
    """
    What is made of ``of(point)``, a chunk of the points at a time, each with some of all.

    :param add: from what there is, values of a chunk and its weights to what there is then.
    :param start: what there is at first, everywhere.
    :param which: as of :func:`average`.
    :param first: as of :func:`average`.
    :param weigh: whether there is a number beside, such as the sum of weights.
    """
    shapes = jax.eval_shape(of, jax.tree.map(lambda v: v[0], points))
    numbers = max(int(np.prod(s.shape)) for s in jax.tree.leaves(shapes))
    most = len(points["weight"]) if which is None else FEW_POINTS
    chunk = int(np.clip(_MAX_NUMBERS / numbers, 1, most))
    sets = [len(p["weight"]) for p in (*first, points)]
    rows, counts, ends = [], [], np.cumsum([0, *(-(-n // chunk) for n in sets)])
    for n, before in zip(sets, np.cumsum([0, *sets]), strict=False):
        num_chunks = -(-n // chunk)
        spread = np.arange(num_chunks * chunk).reshape(chunk, num_chunks).T
        counts.append(spread < n)
        rows.append(before + np.minimum(spread, n - 1))
    rows, counts = (jnp.asarray(np.concatenate(v)) for v in (rows, counts))
    points = jax.tree.map(lambda *v: jnp.concatenate(v), *first, points)

    def go_on(i, total):
        of_chunk = jax.tree.map(lambda v: v[rows[i]], points)
        chunk_weights = jnp.where(counts[i], of_chunk["weight"], 0.0)
        return add(total, jax.vmap(of)(of_chunk), chunk_weights)

    total = jax.tree.map(lambda s: jnp.full(s.shape, start, s.dtype), shapes)
    total = (total, jnp.zeros((), points["weight"].dtype)) if weigh else total
    begin, end = 0, len(rows)
    if first:
        begin, end = jnp.asarray(ends[:-1])[which], jnp.asarray(ends[1:])[which]
    elif which is not None:
        end = jnp.where(which == ROUGH, 1, end)
    return jax.lax.fori_loop(begin, end, go_on, total)


def of_gaussians(weights, means, variances, levels):
    """A mixture of Gaussians at each row."""
    weights = weights.reshape(-1, *(1,) * (means.ndim - 1))
    mean = jnp.sum(weights * means, axis=0)
    variance = jnp.sum(weights * (variances + (means - mean) ** 2), axis=0)
    sd, sds = jnp.sqrt(variance), jnp.sqrt(variances)

    def cdf(y, few):
        return jnp.sum(weights * ndtr((y[:, None] - means) / sds), axis=1)

    if len(means) == 1 or not levels.size:
        quantiles = mean + sd * ndtri(levels).reshape(-1, *(1,) * mean.ndim)
    else:
        quantiles = solved(cdf, levels, mean, sd)
    return {"mean": mean, "sd": sd, "quantiles": quantiles, "probs": None}

"""Moments, quantiles and class probabilities of responses, in one compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.util import not_jax_tracer

from numpyro_sgp._programs import join_static
from numpyro_sgp.guides.row_latents import NoMarginals
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.linalg import einsum
from numpyro_sgp.predictive import cumulative
from numpyro_sgp.predictive.averages import (
    FEW_POINTS,
    average,
    moments,
    normal_parts,
    of_gaussians,
    over_chunks,
)
from numpyro_sgp.predictive.deterministic import of_deterministic
from numpyro_sgp.predictive.mixture import MixtureParts, components
from numpyro_sgp.predictive.nodes import another, points_of, points_together, rules
from numpyro_sgp.predictive.quantiles import ALL, OTHERS, ROUGH, solved
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.messages import can_draw, innermost, zeros_like
from numpyro_sgp.tracing.program import opening
from numpyro_sgp.tracing.rows import sites_on_f

_CLASSES = (
    dist.BernoulliProbs,
    dist.BernoulliLogits,
    dist.CategoricalProbs,
    dist.CategoricalLogits,
    RobustMax,
)
_DRAWS = 4  # of a response that has no cdf, at each value of f


def predict_rows(guide, params, rng_key, arrays, kept=None, *, static):
    """
    Mean, sd, quantiles and probabilities by site, each an array or None; of deterministic
    sites as :class:`~numpyro_sgp.predictive.deterministic.OfRows`.

    :param kept: of :func:`~numpyro_sgp.predictive.marginals.kept_of`.
    :param static: what of the model's arguments is no array, levels of the quantiles, the
        number of draws; and where rows are some of all their axis in each array, and names
        of deterministic sites that are the same in other company.
    """
    static, levels, num_draws, some = static
    args, kwargs = join_static(arrays, static)
    made_of = guide, params, args, kwargs, rng_key, num_draws, kept
    parts = MixtureParts(*made_of, may_tie=True)
    last = [parts.posteriors[name] for name in parts.last]
    functions = sum(int(np.prod(q.batch_shape)) for q in last)
    total = len(parts.keys)

    def given_draw(keys, shift):
        found, given, others = parts.at(keys)
        marginals = {name: _components(q) for name, q in found.items()}
        ends = {name: found[name] for name in parts.last}
        if parts.tied:
            points = points_together(ends, total, keys[2], given, others)
            return marginals, 4 * [points]
        chosen = *rules(functions, total, shift), another(functions, total)
        points = [points_of(ends, rule, keys[2], given, others) for rule in chosen]
        return marginals, points

    shifts = (np.arange(total) + 0.5) / total
    marginals, points = parts.map(given_draw, shifts)
    flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), (marginals, points))
    marginals, points = flat
    levels = jnp.asarray(levels, jnp.result_type(float))
    out = {
        name: of_gaussians(weights / total, *moments, levels)
        for name, (weights, *moments) in marginals.items()
    }
    points = [{**p, "weight": p["weight"] / total} for p in points]
    each = sum(1 for _ in components({name: parts.posteriors[name] for name in parts.last}))
    each *= total * (not parts.tied)
    *points, others = points
    axes, only = some or (None, None)
    data = None if axes is None else list(zip(arrays, axes, strict=True))
    out |= of_deterministic(parts, points, levels, each, others, data, only=only)
    return out | of_responses(parts, points, rng_key, levels, gaussians=each)


def _components(q):
    """Weights, means and variances of the components of a posterior."""
    moments = [q.marginals(k) for k in range(q.num_components)]
    means, variances = (jnp.stack(v) for v in zip(*moments, strict=True))
    return jnp.exp(q.log_weights), means, variances


def of_responses(parts, points, rng_key, levels, every=False, gaussians=0) -> dict:
    """
    What is predicted at each response that the model has with these arguments; None for
    what cannot be.

    :param points: of :func:`~numpyro_sgp.predictive.nodes.rules`.
    :param every: whether at those too that do not depend on f, but on other latents; what
        cannot be predicted is not there then.
    :param gaussians: of how many Gaussians in turn the points are, as many of each; 0 where
        they are of something else.
    """
    for_moments = points[0]

    def run(point, values=None):
        trace = parts.run(point["f"], point["others"], point["key"], values)
        return {name: trace[name] for name in parts.responses if name in trace}

    middle = parts.middle(for_moments)
    known = run(middle)

    def made_of(f):
        found = run({**middle, "f": {**middle["f"], **f}})
        return {name: _made_of(site) for name, site in found.items()}

    on_f = set(known)
    if not every:
        on_f = sites_on_f(made_of, {name: q.mean for name, q in parts.posteriors.items()})
    _check_apart(run, middle, {name: known[name] for name in known if name in on_f})
    normal = set()
    if gaussians:
        last = {name: parts.posteriors[name] for name in parts.last}
        normal = _linear_in_f(run, middle, last, sorted(on_f))
    out = {}
    for name, site in known.items():
        if name in on_f:
            found = _of_response(
                lambda point, name=name: cumulative.marginal(run(point)[name]["fn"]),
                cumulative.marginal(site["fn"]),
                points,
                rng_key,
                levels,
                gaussians if name in normal else 0,
            )
            if found is not None or not every:
                out[name] = found
    return out


def _linear_in_f(run, point, posteriors, names) -> set[str]:
    """Normal responses whose mean is linear in f, and whose scale does not depend on it."""

    def made_of():
        f = {k: opening(k, q.mean.shape, q.mean.dtype) for k, q in posteriors.items()}
        found = run({**point, "f": {**point["f"], **f}})
        fns = {name: innermost(cumulative.marginal(found[name]["fn"])) for name in names}
        return {k: (fn.loc, fn.scale) for k, fn in fns.items() if type(fn) is dist.Normal}

    program = LinearProgram(made_of, posteriors)
    return {
        name
        for name, (loc, scale) in program.outputs.items()
        if program.kind(loc).is_linear and not program.labels(scale)
    }


def _made_of(site):
    # A class of one's own may not say which of its attributes JAX is to see.
    parts = site["fn"], list(vars(innermost(site["fn"])).values())
    leaves = [leaf for leaf in jax.tree.leaves(parts) if _has_numbers(leaf)]
    return sum(jnp.sum(leaf) for leaf in leaves) if leaves else 0.0


def _has_numbers(leaf):
    if not isinstance(leaf, jax.Array | np.ndarray | np.number):
        return False
    return any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_))


def _check_apart(run, point, responses):
    """Refuses a response whose distribution depends on the value of another one."""
    if len(responses) < 2:
        return
    for name, site in responses.items():
        value = zeros_like(site["fn"])

        def others(values, name=name):
            found = run(point, values)
            return {k: _made_of(v) for k, v in found.items() if k != name}

        if found := sites_on_f(others, {name: value}):
            raise NoMarginals(
                f"Responses {sorted(found)} depend on the value of response '{name}', so "
                "that they cannot be predicted one by one. Draw them together by "
                "numpyro.infer.Predictive(model, guide=guide, params=params, "
                "num_samples=...)."
            )


def _of_response(fn_at, fn, points, rng_key, levels, normals):
    """
    Of a response.

    :param fn_at: from values of all latents to its distribution.
    :param fn: its distribution at some values.
    :param normals: how many normal distributions it is a mixture of; 0 for others.
    :return: a dict, or None if it can be neither integrated nor drawn.
    """
    for_moments, units, for_quantiles, *first = points
    if normals:

        def normal_at(point):
            fn = fn_at(point)
            loc, shape = innermost(fn).loc, fn.shape()
            return tuple(jnp.broadcast_to(v, shape) for v in (loc, fn.variance))

        return of_gaussians(*normal_parts(normal_at, units, normals), levels)
    if isinstance(innermost(fn), _CLASSES):
        # Nodes of a product rule are where functions are equal, and a step has its edge.
        sets = [for_quantiles if isinstance(innermost(fn), RobustMax) else for_moments]
        if first:  # of one function, evenly spaced: closer, where f varies by many logits
            sets = first
        probs = sum(average(lambda p: _probs(fn_at(p)), few) for few in sets) / len(sets)
        is_number = isinstance(innermost(fn), _CLASSES[:2])
        sd = jnp.sqrt(probs * (1.0 - probs)) if is_number else None
        mean = probs if is_number else None
        return {"mean": mean, "sd": sd, "quantiles": None, "probs": probs}
    try:
        centre, variance = cumulative.moments(fn)
        has_moments = variance is not None and not cumulative.is_circular(fn)
        centre = jnp.where(jnp.isfinite(centre), centre, 0.0)
    except NotImplementedError:
        has_moments = False
    has_cdf = not fn.event_shape or fn is not innermost(fn)
    try:
        cumulative.cdf(fn, jnp.zeros(fn.shape()))
    except NotImplementedError:
        has_cdf = False
    draws = None
    if not (has_moments and has_cdf):
        if can_draw(fn):
            draws, weights = _draws(fn_at, for_quantiles, rng_key)
        elif not has_cdf:
            return None
    if has_moments:
        where = for_moments, centre
        mean, variance = moments(lambda point: cumulative.moments(fn_at(point)), *where)
    elif draws is None:
        mean = variance = jnp.full(fn.shape(), jnp.nan)
    else:
        mean = einsum("s,s...->...", weights, draws)
        variance = einsum("s,s...->...", weights, (draws - mean) ** 2)
    sd = jnp.where(jnp.isinf(mean), jnp.inf, jnp.sqrt(jnp.maximum(variance, 0.0)))
    if not levels.size:
        quantiles = jnp.zeros((0, *mean.shape), mean.dtype)
    elif has_cdf:

        def cdf(y, which):
            at = lambda point: cumulative.cdf(fn_at(point), y)  # noqa: E731
            if not isinstance(which, int):
                return average(at, for_quantiles, which, first)
            return average(at, for_quantiles if which == ALL else first[which])

        bounds = _widest(fn_at, fn, for_quantiles)
        is_discrete = bool(fn.support.is_discrete)
        phases = (ROUGH, OTHERS, ALL) if first else (ROUGH, ALL)
        if len(for_quantiles["weight"]) < 2 * FEW_POINTS:
            phases = (ALL,)
        quantiles = solved(cdf, levels, mean, sd, bounds, is_discrete, phases)
    else:
        order = jnp.argsort(draws, axis=0)
        reached = jnp.cumsum(weights[order], axis=0)
        ordered = jnp.take_along_axis(draws, order, axis=0)
        first = jax.vmap(lambda level: jnp.argmax(reached >= level, axis=0))(levels)
        quantiles = jnp.take_along_axis(ordered, first, axis=0)
    return {"mean": mean, "sd": sd, "quantiles": quantiles, "probs": None}


def _probs(fn):
    """Probabilities of the classes, in a last axis but for Bernoulli."""
    inner = innermost(fn)
    if not isinstance(inner, RobustMax):
        classes = () if isinstance(inner, _CLASSES[:2]) else inner.probs.shape[-1:]
        return jnp.broadcast_to(inner.probs, (*fn.shape(), *classes))
    return jnp.stack([jnp.exp(inner.log_prob(c)) for c in range(len(inner.f))], axis=-1)


def _draws(fn_at, points, rng_key):
    """Draws of a response, a few at each point, and their weights."""

    def draw(inputs):
        key, point = inputs
        return jnp.asarray(fn_at(point).sample(key, (_DRAWS,)), jnp.result_type(float))

    keys = jax.random.split(rng_key, len(points["weight"]))
    draws = jax.vmap(draw)((keys, points))
    weights = jnp.repeat(points["weight"] / _DRAWS, _DRAWS)
    return draws.reshape(-1, *draws.shape[2:]), weights


def _widest(fn_at, fn, points) -> tuple:
    """
    What values of a response lie between, whatever the point.

    :param fn: its distribution at some point.
    """
    known = cumulative.bounds(fn)
    if all(map(not_jax_tracer, known)):
        return known

    def of(point):
        lower, upper = (jnp.asarray(v, float) for v in cumulative.bounds(fn_at(point)))
        return -lower, upper

    def widen(found, values, weights):
        del weights  # of a last point that is repeated too
        return jax.tree.map(lambda f, v: jnp.fmax(f, v.max(axis=0)), found, values)

    lower, upper = over_chunks(of, points, widen, -jnp.inf)
    return -lower, upper

"""Moments, quantiles and class probabilities of responses, in one compiled program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import ndtr, ndtri
from numpyro.util import not_jax_tracer

from numpyro_sgp._programs import join_static, mapped
from numpyro_sgp.guides.row_latents import NoMarginals
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.linalg import einsum
from numpyro_sgp.predictive import cumulative
from numpyro_sgp.predictive.deterministic import mixed, of_values, without_noise
from numpyro_sgp.predictive.mixture import MixtureParts, components
from numpyro_sgp.predictive.nodes import points_of, points_together, rules
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
_MAX_NUMBERS = 3e6  # of rows, quantiles and nodes held at one time
_FEW_POINTS = 64  # by which quantiles are looked for first
_DRAWS = 4  # of a response that has no cdf, at each value of f


def predict_rows(guide, params, rng_key, arrays, kept=None, *, static):
    """
    Mean, sd, quantiles and probabilities by site, each an array or None; of deterministic
    sites also whether their rows are "mixed", which they are NaN where it is so.

    :param kept: of :func:`~numpyro_sgp.predictive.marginals.kept_of`.
    :param static: what of the model's arguments is no array, levels of the quantiles and
        the number of draws.
    """
    static, levels, num_draws = static
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
            return marginals, 3 * [points]
        chosen = rules(functions, total, shift)
        points = [points_of(ends, rule, keys[2], given, others) for rule in chosen]
        return marginals, points

    shifts = (np.arange(total) + 0.5) / total
    marginals, points = parts.map(given_draw, shifts)
    flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), (marginals, points))
    marginals, points = flat
    levels = jnp.asarray(levels, jnp.result_type(float))
    out = {
        name: _of_gp(weights / total, *moments, levels)
        for name, (weights, *moments) in marginals.items()
    }
    points = [{**p, "weight": p["weight"] / total} for p in points]
    each = sum(1 for _ in components({name: parts.posteriors[name] for name in parts.last}))
    each *= total * (not parts.tied)
    return out | of_responses(parts, points, rng_key, levels, gaussians=each)


def _components(q):
    """Weights, means and variances of the components of a posterior."""
    moments = [q.marginals(k) for k in range(q.num_components)]
    means, variances = (jnp.stack(v) for v in zip(*moments, strict=True))
    return jnp.exp(q.log_weights), means, variances


def _of_gp(weights, means, variances, levels):
    """A mixture of Gaussians at each row."""
    weights = weights.reshape(-1, *(1,) * (means.ndim - 1))
    mean = jnp.sum(weights * means, axis=0)
    variance = jnp.sum(weights * (variances + (means - mean) ** 2), axis=0)
    least = jnp.finfo(variances.dtype).tiny  # of what is zero times f
    sd, sds = jnp.sqrt(variance), jnp.sqrt(jnp.maximum(variances, least))

    def cdf(y, few):
        return jnp.sum(weights * ndtr((y[:, None] - means) / sds), axis=1)

    if len(means) == 1 or not levels.size:
        quantiles = mean + sd * ndtri(levels).reshape(-1, *(1,) * mean.ndim)
    else:
        quantiles = solved(cdf, levels, mean, sd)
    return {"mean": mean, "sd": sd, "quantiles": quantiles, "probs": None}


def of_responses(parts, points, rng_key, levels, every=False, gaussians=0) -> dict:
    """
    What is predicted at each response that the model has with these arguments, and at
    deterministic sites whose rows are those of f; None for what cannot be.

    :param points: of :func:`~numpyro_sgp.predictive.nodes.rules`.
    :param every: whether at those too that do not depend on f, but on other latents; what
        cannot be predicted is not there then.
    :param gaussians: of how many Gaussians in turn the points are, as many of each; 0 where
        they are of something else.
    """
    for_moments = points[0]

    def run(point, values=None):
        trace = parts.run(point["f"], point["others"], point["key"], values)
        responses = {name: trace[name] for name in parts.responses if name in trace}
        return without_noise(trace, parts.posteriors) | responses

    middle = jax.tree.map(lambda v: v[0], for_moments)
    middle["f"] |= {name: q.mean for name, q in parts.posteriors.items()}
    middle["others"] = parts.others
    known = run(middle)

    def made_of(f):
        found = run({**middle, "f": {**middle["f"], **f}})
        return {name: _made_of(site) for name, site in found.items()}

    means = {name: q.mean for name, q in parts.posteriors.items()}
    on_f = sites_on_f(made_of, means)
    responses = {k: site for k, site in known.items() if k in parts.responses}
    if not every:
        responses = {k: site for k, site in responses.items() if k in on_f}
    _check_apart(run, middle, responses)

    def values_at(f, values):
        found = run({**middle, "f": {**middle["f"], **f}}, values)
        return {name: found[name]["fn"].v for name in known.keys() - parts.responses}

    unknown = {k: zeros_like(s["fn"]) for k, s in responses.items() if not s["is_observed"]}
    names = on_f - set(parts.responses)
    is_mixed: dict = dict.fromkeys(names, False)
    if not parts.tied:
        is_mixed = mixed(values_at, names, for_moments, means, unknown)
    if every:
        is_mixed |= dict.fromkeys(_of_others(run, middle) - names - set(responses), False)
    normal = set()
    if gaussians:
        last = {name: parts.posteriors[name] for name in parts.last}
        normal = _linear_in_f(run, middle, last, [*responses, *is_mixed])
    out = {}
    for name, site in known.items():
        if name in responses or name in is_mixed:
            found = _of_response(
                lambda point, name=name: cumulative.marginal(run(point)[name]["fn"]),
                cumulative.marginal(site["fn"]),
                points,
                rng_key,
                levels,
                gaussians if name in normal else 0,
            )
            if name in is_mixed:
                wrong = is_mixed[name]
                found = {
                    k: v if v is None else jnp.where(wrong, jnp.nan, v)
                    for k, v in found.items()
                }
                found["mixed"] = wrong
            if found is not None or not every:
                out[name] = found
    return out


def _of_others(run, point) -> set[str]:
    """Sites that depend on other latents; the entry without a name are hyperparameters."""

    def made_of(others):
        found = run({**point, "others": {**point["others"], **others}})
        return {name: _made_of(site) for name, site in found.items()}

    return sites_on_f(made_of, {k: v for k, v in point["others"].items() if k})


def _linear_in_f(run, point, posteriors, names) -> set[str]:
    """
    Normal responses whose mean is linear in f, and whose scale does not depend on it, and
    values that are linear in f.
    """

    def made_of():
        f = {k: opening(k, q.mean.shape, q.mean.dtype) for k, q in posteriors.items()}
        found = run({**point, "f": {**point["f"], **f}})
        fns = {name: innermost(cumulative.marginal(found[name]["fn"])) for name in names}
        normal = {k: (f.loc, f.scale) for k, f in fns.items() if type(f) is dist.Normal}
        return normal | {k: (f.v, 0.0) for k, f in fns.items() if type(f) is dist.Delta}

    program = LinearProgram(made_of, posteriors)
    return {
        name
        for name, (loc, scale) in program.outputs.items()
        if program.kind(loc).is_linear and not program.labels(scale)
        if program.labels(loc)
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
        return _of_gp(*_normal_parts(fn_at, units, normals), levels)
    if isinstance(innermost(fn), dist.Delta):
        return _of_values(fn_at, fn.mean, for_moments, for_quantiles, levels)
    if isinstance(innermost(fn), _CLASSES):
        # Nodes of a product rule are where functions are equal, and a step has its edge.
        points = for_quantiles if isinstance(innermost(fn), RobustMax) else for_moments
        probs = _average(lambda point: _probs(fn_at(point)), points)
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
        mean, variance = _moments(lambda point: cumulative.moments(fn_at(point)), *where)
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
                return _average(at, for_quantiles, which, first)
            return _average(at, for_quantiles if which == ALL else first[which])

        bounds = _widest(fn_at, fn, for_quantiles)
        is_discrete = bool(fn.support.is_discrete)
        phases = (ROUGH, OTHERS, ALL) if first else (ROUGH, ALL)
        if len(for_quantiles["weight"]) < 2 * _FEW_POINTS:
            phases = (ALL,)
        quantiles = solved(cdf, levels, mean, sd, bounds, is_discrete, phases)
    else:
        order = jnp.argsort(draws, axis=0)
        reached = jnp.cumsum(weights[order], axis=0)
        ordered = jnp.take_along_axis(draws, order, axis=0)
        first = jax.vmap(lambda level: jnp.argmax(reached >= level, axis=0))(levels)
        quantiles = jnp.take_along_axis(ordered, first, axis=0)
    return {"mean": mean, "sd": sd, "quantiles": quantiles, "probs": None}


def _moments(of, points, centre):
    """
    Mean and variance.

    :param of: from a point to these, given what is there.
    :param centre: some value, near the mean at best.
    """

    def moments(point):
        mean, variance = of(point)
        shift = mean - centre
        return shift, variance + shift**2

    shift, square = _average(moments, points)
    return centre + shift, square - shift**2


def _of_values(value_at, some, for_moments, for_quantiles, levels):
    """
    Of what has no noise given f. Of steps, such as what is above a threshold, nodes of a
    rule for smooth functions have next to nothing between them.

    :param value_at: from values of all latents to its distribution, at a point.
    :param some: one of its values.
    """
    at = lambda point: value_at(point).mean  # noqa: E731
    centre = jnp.where(jnp.isfinite(some), some, 0.0)
    chunk = int(np.clip(_MAX_NUMBERS / max(some.size, 1), 1, len(for_quantiles["weight"])))
    values = mapped(at, for_quantiles, chunk)
    has_steps, quantiles = of_values(for_quantiles["weight"], values, levels)
    each = [
        _moments(lambda p: (at(p), 0.0), p, centre) for p in (for_moments, for_quantiles)
    ]
    mean, variance = (jnp.where(has_steps, b, a) for a, b in zip(*each, strict=True))
    sd = jnp.sqrt(jnp.maximum(variance, 0.0))
    return {"mean": mean, "sd": sd, "quantiles": quantiles, "probs": None}


def _normal_parts(fn_at, units, number):
    """Weights, means and variances of the normal distributions, each by its units."""

    def at(point):
        fn = fn_at(point)
        return tuple(jnp.broadcast_to(v, fn.shape()) for v in (fn.mean, fn.variance))

    def of_part(part):
        locs, variances = mapped(at, part, _FEW_POINTS)
        variance = variances[0] + jnp.sum((locs[1:] - locs[0]) ** 2, axis=0)
        return jnp.sum(part["weight"]), locs[0], variance

    parts = jax.tree.map(lambda v: v.reshape(number, -1, *v.shape[1:]), units)
    return mapped(of_part, parts, 1)


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


def _sum(weights, values):
    """
    The weighted sum over the first axis. Of exponentials of f squares may be infinite, or
    NaN, at the outermost nodes, whose weights are next to nothing: these are left out.
    """
    info = jnp.finfo(values.dtype)
    nothing = jnp.expand_dims(weights < info.eps**2, range(1, values.ndim))
    values = jnp.where(nothing & ~jnp.isfinite(values), 0, values)
    return einsum("s,s...->...", weights, values)


def _average(of, points, which=None, first=()):
    """
    The weighted mean of ``of(point)``, a chunk of the points at a time.

    :param which: `ROUGH`, `OTHERS` or `ALL`, which is traced; None for all.
    :param first: the first two of these, or none: those are a few of all then.
    """

    def add(total, values, weights):
        sums = jax.tree.map(partial(_sum, weights), values)
        return jax.tree.map(jnp.add, total, (sums, jnp.sum(weights)))

    total, weight = _over_chunks(of, points, add, 0.0, which, first, weigh=True)
    return total if which is None else jax.tree.map(lambda v: v / weight, total)


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

    lower, upper = _over_chunks(of, points, widen, -jnp.inf)
    return -lower, upper


def _over_chunks(of, points, add, start, which=None, first=(), weigh=False):
    """
    What is made of ``of(point)``, a chunk of the points at a time, each with some of all.

    :param add: from what there is, values of a chunk and its weights to what there is then.
    :param start: what there is at first, everywhere.
    :param which: as of :func:`_average`.
    :param first: as of :func:`_average`.
    :param weigh: whether there is a number beside, such as the sum of weights.
    """
    shapes = jax.eval_shape(of, jax.tree.map(lambda v: v[0], points))
    numbers = max(int(np.prod(s.shape)) for s in jax.tree.leaves(shapes))
    most = len(points["weight"]) if which is None else _FEW_POINTS
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

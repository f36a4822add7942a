"""Means, intervals and class probabilities at new inputs, for any likelihood."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import ndtr, ndtri

from numpyro_sgp._programs import (
    NEEDS_KNOWN_DATA,
    all_static,
    join_static,
    program,
    split_static,
)
from numpyro_sgp.distributions.arguments import as_arrays, is_frame
from numpyro_sgp.elbo import GaussHermite, MonteCarlo
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.predictive import MixtureParts
from numpyro_sgp.tracing.messages import can_draw, innermost
from numpyro_sgp.tracing.rows import sites_on_f

_CLASSES = (
    dist.BernoulliProbs,
    dist.BernoulliLogits,
    dist.CategoricalProbs,
    dist.CategoricalLogits,
    RobustMax,
)
_MAX_NUMBERS = 3e6  # of rows, quantiles and nodes held at one time
_DRAWS = 4  # of a response that has no cdf, at each value of f
_SHOWN = 5  # rows in a repr


@dataclass(frozen=True, eq=False)
class Prediction:
    """
    The predictive distribution at one site, by row; part of what :func:`predict` returns.
    The shapes are those of the site's values.

    :param mean: the mean; None for Categorical and RobustMax.
    :param sd: the standard deviation; None likewise.
    :param quantiles: with a leading axis of the levels; None for classes.
    :param levels: of the quantiles.
    :param probs: of classes: P(y = 1) for Bernoulli, in the shape of the site; for others
        the probability of each class, in a last axis. None for all other distributions.
    :param row_axis: the axis of the site's values along which the rows of X are.
    """

    mean: Array | None
    sd: Array | None
    quantiles: Array | None
    levels: tuple[float, ...]
    probs: Array | None
    row_axis: int

    def to_dataframe(self):
        """A :class:`pandas.DataFrame` with a row for each row of X."""
        import pandas as pd

        return pd.DataFrame(self._columns())

    def _columns(self) -> dict[str, np.ndarray]:
        found = {"mean": self.mean, "sd": self.sd}
        if self.quantiles is not None:
            names = [f"{100 * level:g}%" for level in self.levels]
            found |= dict(zip(names, self.quantiles, strict=True))
        found["probs"] = self.probs
        columns = {}
        for name, values in found.items():
            if values is None:
                continue
            values = np.moveaxis(np.asarray(values), self.row_axis, 0)
            for index in np.ndindex(values.shape[1:]):
                label = "" if not index else f"[{', '.join(map(str, index))}]"
                columns[name + label] = values[(slice(None), *index)]
        return columns

    def __repr__(self):
        columns = self._columns()
        num_rows = len(next(iter(columns.values())))
        shown = min(_SHOWN, num_rows)
        cells = [["", *map(str, range(shown))]] + [
            [name, *(f"{value:.4g}" for value in values[:shown])]
            for name, values in columns.items()
        ]
        widths = [max(map(len, column)) for column in cells]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in zip(*cells, strict=True)
        ]
        if shown < num_rows:
            lines.append(f"... {num_rows} rows")
        return "\n".join(lines)


class Predictions(dict):
    """A dict of :class:`Prediction` by site, which shows itself as tables."""

    def to_dataframe(self):
        """
        A :class:`pandas.DataFrame` with a row for each row of X, and columns by site and
        name.
        """
        import pandas as pd

        return pd.concat({name: p.to_dataframe() for name, p in self.items()}, axis=1)

    def __repr__(self):
        return "\n".join(f"{name}\n{prediction!r}" for name, prediction in self.items())


def predict(
    guide,
    params: dict,
    *args,
    quantiles: Sequence[float] = (0.05, 0.95),
    num_draws: int = 100,
    rng_key: Array | None = None,
    batch_size: int = 10_000,
    **kwargs,
) -> Predictions:
    r"""
    Means, standard deviations and quantiles of f and of the responses at new inputs, under
    an :class:`~numpyro_sgp.AutoSparseGP`, in O(N M^2); of Bernoulli, Categorical and
    :class:`~numpyro_sgp.likelihoods.RobustMax` responses the class probabilities.

    The marginals of f at each row are integrated out of the moments, the probabilities and
    the cdf that the response's distribution has in the model's code. Moments and
    probabilities are by Gauss-Hermite quadrature for one or two latent functions, and by
    2048 quasi-random numbers for more. Quantiles solve :math:`E[F(y \mid f)] = p`, with
    512 values of f of equal probability (2048 quasi-random ones for several functions), so
    that levels are right to about 0.001; of a discrete response they are the smallest
    values that reach the level. A response whose distribution has no cdf (or no moments) is
    drawn instead, and one that cannot be drawn (:class:`~numpyro_sgp.BlackBox` without
    ``sample``) is left out.

    What q(f) is given is drawn ``num_draws`` times, as in
    :func:`~numpyro_sgp.log_predictive_density`: other latents where the base guide is a
    distribution of them, and the inner layers of a deep GP. Masks do not matter: a response
    is predicted where it was not observed.

    :param guide: the guide, trained or loaded.
    :param params: its parameters.
    :param args: arguments of the model with the new inputs, and ``y=None``. A response that
        is given all the same is predicted as if it were not, and what depends on it is
        predicted given its value.
    :param quantiles: levels between 0 and 1.
    :param num_draws: number of draws of other latents and of inner layers; without effect
        if there are none.
    :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
    :param batch_size: rows done at a time: where arguments of the model are arrays with
        more rows, all that have as many as the first one are cut.
    :return: a :class:`Prediction` for each GP site and each response.
    :raises ValueError: if the likelihood ties rows together, a response depends on another
        one that is not given, levels are not between 0 and 1, or ``guide.posterior`` raises
        it.

    **Example:**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
        >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
        >>> predictions = sgp.predict(guide, result.params, X)
        >>> predictions["y"].mean.shape, predictions["y"].quantiles.shape
        ((5,), (2, 5))
    """
    levels = tuple(float(level) for level in quantiles)
    if not all(0.0 < level < 1.0 for level in levels):
        raise ValueError(f"quantiles must be between 0 and 1, got {quantiles}.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}.")
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    guide.check_params(params)
    args, kwargs = as_arrays(guide.model, args, kwargs)
    if any(is_frame(leaf) for leaf in jax.tree.leaves((args, kwargs))):
        found = _predict_known(guide, params, rng_key, (args, kwargs), levels, num_draws)
        return _checked(found, guide, params, args, kwargs)
    arrays, static = split_static((args, kwargs))
    run = program(guide, _predict)
    static = static, levels, num_draws
    num_rows = next((len(a) for a in arrays if np.ndim(a)), 0)
    cut = num_rows > batch_size
    parts = []
    for start in range(0, num_rows, batch_size) if cut else [0]:
        batch = arrays
        if cut:
            rows = np.minimum(np.arange(start, start + batch_size), num_rows - 1)
            batch = [a[rows] if np.shape(a)[:1] == (num_rows,) else a for a in arrays]
        try:
            found = run(params, rng_key, batch, static=static)
        except NEEDS_KNOWN_DATA:  # a model that counts groups, say
            given = args, kwargs
            found = _predict_known(guide, params, rng_key, given, levels, num_draws)
            return _checked(found, guide, params, args, kwargs)
        keep = min(batch_size, num_rows - start) / batch_size if cut else 1.0
        size = batch_size if cut else num_rows
        parts.append(_read(found, guide.approximations, size, keep, levels))
    found = {name: _joined([p[name] for p in parts]) for name in parts[0]}
    return _checked(found, guide, params, args, kwargs)


def _predict_known(guide, params, rng_key, given, levels, num_draws):
    """All rows at once, by a program of these arguments of the model alone."""
    static = all_static(given), levels, num_draws
    run = jax.jit(lambda params, key: _predict(guide, params, key, [], static=static))
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(given)]
    num_rows = next((shape[0] for shape in shapes if shape), 0)
    return _read(run(params, rng_key), guide.approximations, num_rows, 1.0, levels)


def _checked(found, guide, params, args, kwargs):
    out = Predictions(found)
    if not all(np.isfinite(p.mean).all() for p in out.values() if p.mean is not None):
        guide.posterior(params, *args, **kwargs)  # which says why, if it is f
    return out


def _read(found, gp_sites, num_rows, keep, levels) -> dict[str, Prediction]:
    """
    Predictions of a batch of rows.

    :param found: what :func:`_predict` returns.
    :param keep: which part of the rows counts; the others fill the batch up.
    """
    out = {}
    for name, values in found.items():
        has_mean = values["mean"] is not None
        shape = jnp.shape(values["mean"]) if has_mean else values["probs"].shape[:-1]
        axis = len(shape) - 1
        if name not in gp_sites and num_rows in shape:
            axis = shape.index(num_rows)
        if keep < 1.0:
            count = round(keep * shape[axis])
            for key, value in values.items():
                if value is not None:
                    lead = axis + (key == "quantiles")
                    values[key] = jax.lax.slice_in_dim(value, 0, count, axis=lead)
        out[name] = Prediction(**values, levels=levels, row_axis=axis)
    return out


def _joined(parts) -> Prediction:
    """One prediction of those of several batches."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def join(name):
        values = [getattr(p, name) for p in parts]
        if values[0] is None:
            return None
        return jnp.concatenate(values, axis=first.row_axis + (name == "quantiles"))

    joined = {name: join(name) for name in ("mean", "sd", "quantiles", "probs")}
    return replace(first, **joined)


# ---- compiled -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Midpoints:
    """Values of one latent function of equal probability, as an expectation rule."""

    num_points: int

    def nodes(self, rng_key, shapes, dtype):
        del rng_key
        x = ndtri((jnp.arange(self.num_points, dtype=dtype) + 0.5) / self.num_points)
        nodes = {name: x.reshape(-1, *(1,) * len(shape)) for name, shape in shapes.items()}
        return nodes, jnp.full(self.num_points, 1.0 / self.num_points, dtype)


def _rules(num_functions, num_draws):
    """Rules for moments and for quantiles, the latter coarser where there are draws."""
    drawn = num_draws > 1
    each = max(2048 // num_draws, 16)
    several = MonteCarlo(each, sequence="sobol")
    if num_functions == 1:
        return GaussHermite(20 if drawn else 100), _Midpoints(
            max(1024 // num_draws, 8) if drawn else 512
        )
    if num_functions == 2:
        return GaussHermite(10 if drawn else 30), several
    return several, several


def _predict(guide, params, rng_key, arrays, *, static):
    """
    Mean, sd, quantiles and probabilities by site, each an array or None.

    :param static: what of the model's arguments is no array, levels of the quantiles and
        the number of draws.
    """
    static, levels, num_draws = static
    args, kwargs = join_static(arrays, static)
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws)
    last = [parts.posteriors[name] for name in parts.last]
    functions = sum(int(np.prod(q.batch_shape)) for q in last)
    rules = _rules(functions, len(parts.keys))

    def given_draw(keys):
        found, given, others = parts.at(keys)
        marginals = {name: _components(q) for name, q in found.items()}
        ends = {name: found[name] for name in parts.last}
        points = [_points(ends, rule, keys[2], given, others) for rule in rules]
        return marginals, points

    marginals, points = parts.map(given_draw)
    total = len(parts.keys)
    flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), (marginals, points))
    marginals, points = flat
    levels = jnp.asarray(levels, jnp.result_type(float))
    out = {
        name: _of_gp(weights / total, *moments, levels)
        for name, (weights, *moments) in marginals.items()
    }
    points = [{**p, "weight": p["weight"] / total} for p in points]
    return out | _of_responses(parts, points, rng_key, levels)


def _components(q):
    """Weights, means and variances of the components of a posterior."""
    moments = [q.marginals(k) for k in range(q.num_components)]
    means, variances = (jnp.stack(v) for v in zip(*moments, strict=True))
    return jnp.exp(q.log_weights), means, variances


def _points(posteriors, rule, key, given, others) -> dict:
    """Weighted values of all GP sites and other latents, under one draw."""
    shapes = {name: q.shape() for name, q in posteriors.items()}
    dtype = jnp.result_type(*(q.mean.dtype for q in posteriors.values()))
    nodes, weights = rule.nodes(key, shapes, dtype)
    components = [range(q.num_components) for q in posteriors.values()]
    values, all_weights = [], []
    for ks in product(*components):
        log_weight, f = 0.0, {}
        for (name, q), k in zip(posteriors.items(), ks, strict=True):
            log_weight = log_weight + q.log_weights[k]
            f[name] = jax.vmap(lambda x, q=q, k=k: q.place(x, k))(nodes[name])
        values.append(f)
        all_weights.append(weights * jnp.exp(log_weight))
    f = jax.tree.map(lambda *v: jnp.concatenate(v), *values)
    weight = jnp.concatenate(all_weights)
    repeated = jax.tree.map(
        lambda v: jnp.broadcast_to(v, (len(weight), *jnp.shape(v))), (given, others)
    )
    return {
        "f": {**f, **repeated[0]},
        "others": repeated[1],
        "weight": weight,
        "key": jax.random.split(key, len(weight)),
    }


def _of_gp(weights, means, variances, levels):
    """A mixture of Gaussians at each row."""
    weights = weights.reshape(-1, *(1,) * (means.ndim - 1))
    mean = jnp.sum(weights * means, axis=0)
    variance = jnp.sum(weights * (variances + (means - mean) ** 2), axis=0)
    sd, sds = jnp.sqrt(variance), jnp.sqrt(variances)

    def cdf(y):
        return jnp.sum(weights * ndtr((y[:, None] - means) / sds), axis=1)

    if len(means) == 1:
        quantiles = mean + sd * ndtri(levels).reshape(-1, *(1,) * mean.ndim)
    else:
        quantiles = _solved(cdf, levels, mean, sd, dist.constraints.real)
    return {"mean": mean, "sd": sd, "quantiles": quantiles, "probs": None}


def _of_responses(parts, points, rng_key, levels) -> dict:
    """What is predicted at each response that the model has with these arguments."""
    for_moments, for_quantiles = points

    def run(point, values=None):
        trace = parts.run(point["f"], point["others"], point["key"], values)
        return {name: trace[name] for name in parts.responses if name in trace}

    middle = jax.tree.map(lambda v: v[0], for_moments)
    middle["f"] |= {name: q.mean for name, q in parts.posteriors.items()}
    middle["others"] = parts.others
    known = run(middle)

    def made_of(f):
        found = run({**middle, "f": {**middle["f"], **f}})
        return {name: _made_of(site) for name, site in found.items()}

    on_f = sites_on_f(made_of, {name: q.mean for name, q in parts.posteriors.items()})
    _check_apart(run, middle, {name: known[name] for name in known if name in on_f})
    out = {}
    for name, site in known.items():
        if name in on_f:
            found = _of_response(
                lambda point, name=name: run(point)[name]["fn"],
                site["fn"],
                for_moments,
                for_quantiles,
                rng_key,
                levels,
            )
            out |= {} if found is None else {name: found}
    return out


def _made_of(site):
    leaves = [leaf for leaf in jax.tree.leaves(site["fn"]) if hasattr(leaf, "dtype")]
    return sum(jnp.sum(leaf) for leaf in leaves) if leaves else 0.0


def _check_apart(run, point, responses):
    """Refuses a response whose distribution depends on the value of another one."""
    if len(responses) < 2:
        return
    for name, site in responses.items():
        value = jnp.zeros(site["fn"].shape())

        def others(values, name=name):
            found = run(point, values)
            return {k: _made_of(v) for k, v in found.items() if k != name}

        if found := sites_on_f(others, {name: value}):
            raise ValueError(
                f"Responses {sorted(found)} depend on the value of response '{name}', so "
                "that they cannot be predicted one by one. Draw them together by "
                "numpyro.infer.Predictive(model, guide=guide, params=params, "
                "num_samples=...)."
            )


def _of_response(fn_at, fn, for_moments, for_quantiles, rng_key, levels):
    """
    Of a response.

    :param fn_at: from values of all latents to its distribution.
    :param fn: its distribution at some values.
    :return: a dict, or None if it can be neither integrated nor drawn.
    """
    if isinstance(innermost(fn), _CLASSES):
        probs = _average(lambda point: _probs(fn_at(point)), for_moments)
        is_number = isinstance(innermost(fn), _CLASSES[:2])
        sd = jnp.sqrt(probs * (1.0 - probs)) if is_number else None
        mean = probs if is_number else None
        return {"mean": mean, "sd": sd, "quantiles": None, "probs": probs}
    try:
        centre = fn.mean
        has_moments = fn.variance is not None
    except NotImplementedError:
        has_moments = False
    has_cdf = not fn.event_shape or fn is not innermost(fn)
    try:
        innermost(fn).cdf(jnp.zeros(fn.shape()))
    except NotImplementedError:
        has_cdf = False
    draws = None
    if not (has_moments and has_cdf):
        if not can_draw(fn):
            return None
        draws, weights = _draws(fn_at, for_quantiles, rng_key)
    if has_moments:

        def moments(point):
            at = fn_at(point)
            shift = at.mean - centre
            return shift, at.variance + shift**2

        shift, square = _average(moments, for_moments)
        mean, variance = centre + shift, square - shift**2
    else:
        mean = jnp.tensordot(weights, draws, 1)
        variance = jnp.tensordot(weights, (draws - mean) ** 2, 1)
    sd = jnp.sqrt(jnp.maximum(variance, 0.0))
    if has_cdf:

        def cdf(y):
            return _average(lambda point: innermost(fn_at(point)).cdf(y), for_quantiles)

        quantiles = _solved(cdf, levels, mean, sd, fn.support)
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
        return jnp.broadcast_to(inner.probs, (*fn.shape(), *_class_axis(inner)))
    return jnp.stack([jnp.exp(inner.log_prob(c)) for c in range(len(inner.f))], axis=-1)


def _class_axis(inner):
    """The shape of the axis of the classes, if there is one."""
    return inner.probs.shape[-1:] if not isinstance(inner, _CLASSES[:2]) else ()


def _draws(fn_at, points, rng_key):
    """Draws of a response, a few at each point, and their weights."""

    def draw(inputs):
        key, point = inputs
        return jnp.asarray(fn_at(point).sample(key, (_DRAWS,)), jnp.result_type(float))

    keys = jax.random.split(rng_key, len(points["weight"]))
    draws = jax.vmap(draw)((keys, points))
    weights = jnp.repeat(points["weight"] / _DRAWS, _DRAWS)
    return draws.reshape(-1, *draws.shape[2:]), weights


def _average(of, points):
    """The weighted sum of ``of(point)``, a chunk of the points at a time."""
    weights = points["weight"]
    shapes = jax.eval_shape(of, jax.tree.map(lambda v: v[0], points))
    numbers = max(int(np.prod(s.shape)) for s in jax.tree.leaves(shapes))
    chunk = int(np.clip(_MAX_NUMBERS / numbers, 1, len(weights)))
    num_chunks = -(-len(weights) // chunk)
    rows = jnp.minimum(jnp.arange(num_chunks * chunk), len(weights) - 1)
    weights = jnp.where(jnp.arange(num_chunks * chunk) < len(weights), weights[rows], 0.0)

    def add(total, inputs):
        rows, weights = inputs
        values = jax.vmap(of)(jax.tree.map(lambda v: v[rows], points))
        sums = jax.tree.map(lambda v: jnp.tensordot(weights, v, 1), values)
        return jax.tree.map(jnp.add, total, sums), None

    total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    inputs = rows.reshape(-1, chunk), weights.reshape(-1, chunk)
    return jax.lax.scan(add, total, inputs)[0]


def _solved(cdf, levels, mean, sd, support):
    """
    Smallest y with ``cdf(y) >= level``, by bisection.

    :param cdf: from values of shape ``(levels, *shape)``.
    :param mean: where to begin to look, of shape ``shape``; where it is not finite, at 0.
    :param sd: how far at first, likewise.
    :return: shape ``(levels, *shape)``.
    """
    if discrete := bool(support.is_discrete):
        of_numbers = cdf  # NumPyro's may be continuous between whole numbers

        def cdf(y):
            return of_numbers(jnp.floor(y))

    levels = levels.reshape(-1, *(1,) * mean.ndim)
    centre = jnp.where(jnp.isfinite(mean), mean, 0.0)
    width = jnp.where(jnp.isfinite(sd) & (sd > 0), sd, 1.0)
    shape = (len(levels), *mean.shape)
    bounds = _bounds(support)
    lowest = bounds[0] - 1 if discrete else bounds[0]  # where the cdf is 0

    def go_on(state):
        step, _, _, found = state
        return (step < 64) & ~jnp.all(found)

    def widen(state):
        step, low, high, _ = state
        reach = width * 2.0**step
        wider = jnp.maximum(centre - reach, lowest), jnp.minimum(centre + reach, bounds[1])
        low = jnp.where((low > lowest) & ~(cdf(low) < levels), wider[0], low)
        high = jnp.where((high < bounds[1]) & ~(cdf(high) >= levels), wider[1], high)
        is_below = (low <= lowest) | (cdf(low) < levels)
        return step + 1, low, high, is_below & ((high >= bounds[1]) | (cdf(high) >= levels))

    def halve(_, state):
        low, high = state
        middle = 0.5 * (low + high)
        below = cdf(middle) < levels
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    start = jnp.broadcast_to(jnp.clip(centre, lowest, bounds[1]), shape)
    low, high = jax.lax.while_loop(go_on, widen, (0, start, start, jnp.zeros(shape, bool)))[
        1:3
    ]
    steps = jnp.finfo(low.dtype).nmant + 8
    high = jax.lax.fori_loop(0, steps, halve, (low, high))[1]
    return jnp.round(high) + 0.0 if discrete else high  # no -0


def _bounds(support):
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    lower = getattr(support, "lower_bound", -jnp.inf)
    return lower, getattr(support, "upper_bound", jnp.inf)

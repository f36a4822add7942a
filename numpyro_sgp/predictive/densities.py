"""Predictive densities of a guide."""

import warnings
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp._checks import check_guide, check_key
from numpyro_sgp._kept import program
from numpyro_sgp._programs import (
    NEEDS_KNOWN_DATA,
    NoHash,
    all_static,
    join_static,
    mapped,
    split_static,
)
from numpyro_sgp._threads import alone
from numpyro_sgp.distributions.arguments import has_no_numbers
from numpyro_sgp.elbo import GaussHermite, MonteCarlo, Trapezoid
from numpyro_sgp.elbo.expectation import check_expectation
from numpyro_sgp.guides.row_latents import check_row_latents, row_plates
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.predictive.centres import centre_of, log_shares, order_of
from numpyro_sgp.predictive.mixture import (
    TIED,
    MixtureParts,
    components,
    shapes_and_dtype,
)
from numpyro_sgp.predictive.nodes import points_together
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.tracing.rows import by_row, sites_on_f
from numpyro_sgp.tracing.state import state_of

_MAX_NODE_NUMBERS = 3e6  # of rows and nodes, held at one time
MOST_FUNCTIONS = 20  # of which second derivatives are taken
RULES = GaussHermite(100), GaussHermite(30), MonteCarlo(2000)
OF_KINKS = Trapezoid(400)  # for the first of these, if the likelihood has kinks
_NO_OBSERVATIONS = (
    "The model has no observed site with these arguments. Pass observations too: "
    "log_predictive_density(guide, params, X_new, y_new)."
)
_RULES_OF_A_DRAW = GaussHermite(100), GaussHermite(30), MonteCarlo(100)


@alone
def log_predictive_density(
    guide,
    params: dict,
    *args,
    expectation=None,
    rng_key=None,
    num_draws: int = 100,
    **kwargs,
) -> dict:
    r"""
    Log predictive density of observations at new inputs under an
    :class:`~numpyro_sgp.AutoSparseGP`,

    .. math::

        \log p(y_n) = \log \sum_k \pi_k \sum_s w_s \, p(y_n \mid f_n = \mu_{kn}
        + \sigma_{kn} x_s),

    with the nodes of an expectation rule and, for a mixture, its components, in O(N M^2).
    Nodes are both where q(f) is and, if ``expectation`` is None, about the mode of each
    row's integrand, so that the density is right too where the likelihood is narrow beside
    q(f) (little noise, large counts, many outputs); of several modes far apart which are as
    narrow, it is about the highest one. That takes two derivatives of the likelihood, of up
    to 20 latent functions at the same rows.
    What q(f) is given is drawn ``num_draws`` times, and the densities are averaged: the
    latents beside f where the base guide is a distribution of them (``AutoNormal``; they
    stay at the points of ``AutoDelta``), and GP sites that feed others (the inner layers of
    a deep GP), from their marginals. Rows then have the same draws.

    It is compiled once for each guide, kind of arguments and rule, and again where the
    model computes something else (as a global number that it reads has changed).

    A row whose observations are all masked (:class:`numpyro.handlers.mask`) has NaN, and
    one of which some are masked has the density of the others. So the NLPD of the data
    that are there is ``-jnp.nanmean(density)``.

    :param guide: the guide.
    :param params: its parameters.
    :param args: arguments of the model: new inputs and observations.
    :param expectation: a rule for the GP sites that feed no other; None for
        ``GaussHermite(100)`` with one latent function (``Trapezoid(400)`` if the likelihood
        has kinks), ``GaussHermite(30)`` with two, and
        ``MonteCarlo(2000)`` with more (``MonteCarlo(100)`` where there are draws).
    :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
    :param num_draws: number of draws of other latents and inner layers; without effect if
        there are none.
    :return: for each observed site an array of shape ``(N,)``, NaN where a mask leaves a
        row out; the negative mean of the rest is the NLPD. Of observations that are of
        several rows of f each (differences, sums over areas) one density each, in the batch
        shape of the site, by 2048 joint draws of f in O(N^3).
    :raises ValueError: if the arguments have no observations, an observed site has no
        value for each row, rows are tied together and there is an ``expectation`` (or a
        deep GP), or ``num_draws`` is not positive.

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
    >>> sgp.log_predictive_density(guide, result.params, X, y)["y"].shape
    (5,)
    """
    check_guide(guide)
    check_expectation(expectation)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    args, kwargs = guide.as_set_up(args, kwargs)
    check_row_indices(guide.model, args, kwargs)
    check_row_latents(guide.known(), guide.model, args, kwargs)
    guide.check_finite(params, args, kwargs)
    told = expectation, num_draws
    leaves = jax.tree.leaves((args, kwargs))
    if not any(has_no_numbers(leaf) for leaf in leaves) and _has_hash(expectation):
        with suppress(*NEEDS_KNOWN_DATA, NoHash):  # a model that counts groups, say
            arrays, static = split_static((args, kwargs))
            run = program(guide, _by_row)
            more = {"static": (static, *told), "state": state_of(guide.model, args, kwargs)}
            found, is_fine, nan = run(params, rng_key, arrays, **more)
            if not all(not_jax_tracer(v) for v in is_fine.values()):
                return found
            for name, rows in nan.items():
                checks.refuse_missing(name, np.asarray(rows))
            if not any(np.any(np.isnan(v) & ~is_fine[k]) for k, v in found.items()):
                for name, rows in is_fine.items():
                    warn_of_rows(name, found[name], ~rows)
                return found
    # Operation by operation: what is wrong with values is told where they are known.
    static = all_static((args, kwargs))
    found, is_fine, nan = _by_row(guide, params, rng_key, [], static=(static, *told))
    for name, rows in is_fine.items():
        if not_jax_tracer(rows):
            checks.refuse_missing(name, np.asarray(nan[name]))
            warn_of_rows(name, found[name], ~rows)
    return found


def warn_of_rows(name, log_density, counts):
    """
    Warns of rows without a density.

    :param name: of an observed site.
    :param counts: which rows have an observation.
    """
    rows = np.isneginf(log_density) & counts
    if np.any(rows):
        warnings.warn(
            f"The density of {np.sum(rows)} observed rows of site '{name}' (first: "
            f"{np.argmax(rows)}) is zero: they are outside of the support of the "
            "likelihood (classes go from 0, counts to their total), or too far from it. "
            "The mean over rows is -inf.",
            stacklevel=find_stack_level(),
        )
    rows = np.isnan(log_density) & counts
    if np.any(rows):
        warnings.warn(
            f"The log density of {np.sum(rows)} observed rows of site '{name}' (first: "
            f"{np.argmax(rows)}) is NaN: the likelihood is none at some values of f that "
            "the posterior has. Means over rows leave these rows out.",
            stacklevel=find_stack_level(),
        )


def _by_row(guide, params, rng_key, arrays, *, static) -> tuple[dict, dict, dict]:
    """
    The density of each row, NaN where all of it is masked; whether that is so or it is
    finite; and whether it has an observation of NaN that is not masked.
    """
    given, expectation, num_draws = static
    args, kwargs = join_static(arrays, given)
    if guide.couples_rows and expectation is None:
        density, observed, nan = _tied(guide, params, args, kwargs, rng_key, num_draws)
    else:
        options = expectation, rng_key, num_draws, True
        density, observed, nan = by_site_and_row(guide, params, args, kwargs, *options)
    found = {name: jnp.where(observed[name], v, jnp.nan) for name, v in density.items()}
    return found, {k: jnp.isfinite(v) | ~observed[k] for k, v in found.items()}, nan


def _tied(guide, params, args, kwargs, rng_key, num_draws) -> tuple[dict, dict, dict]:
    """The same of observations that are of several rows of f each, by joint draws."""
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws, may_tie=True)
    means = {name: q.mean for name, q in parts.posteriors.items()}
    trace = _checked(parts.run(means, parts.others), whole=True)

    def of_sites(f, others=parts.others):
        return _by_site(parts.run(f, others))

    sites = {name: trace[name] for name in sorted(sites_on_f(of_sites, means))}
    if not sites:
        raise ValueError(_NO_OBSERVATIONS)

    def given_draw(keys):
        found, given, others = parts.at(keys)
        points = points_together(found, len(parts.keys), keys[2], given, others)

        def at(point):
            density = of_sites(point["f"], point["others"])
            return {name: density[name] for name in sites}

        numbers = sum(int(np.prod(jnp.shape(mean))) for mean in means.values())
        limit = int(np.clip(_MAX_NODE_NUMBERS / numbers / parts.chunk, 1, 2048))
        each = mapped(at, points, limit)
        return {k: logsumexp(v, axis=0) - np.log(len(v)) for k, v in each.items()}

    values = parts.map(given_draw)
    density = {k: logsumexp(v, axis=0) - np.log(len(v)) for k, v in values.items()}
    counted = {k: messages.counted(site) for k, site in sites.items()}
    nan = {
        k: jnp.broadcast_to(messages.missing(s["fn"], s["value"]), counted[k].shape)
        for k, s in sites.items()
    }
    return density, {k: v > 0 for k, v in counted.items()}, nan


def _has_hash(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def by_site_and_row(
    guide, params, args, kwargs, expectation, rng_key, num_draws, whole
) -> tuple[dict, dict, dict]:
    """
    What :func:`log_predictive_density` does.

    :param whole: whether to refuse subsampled plates; not where a batch of rows is given
        from outside.
    :return: log densities by row, whether a row has any observation that is not masked, and
        whether it has a NaN that is not masked.
    """
    if getattr(expectation, "joint", False):
        raise ValueError(TIED.format("Leave the expectation out."))
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws)

    def of_sites(f):
        return _by_site(_checked(parts.run(f, parts.others), whole))

    means = {name: q.mean for name, q in parts.posteriors.items()}
    trace = parts.run(means, parts.others)
    on_f = {k: _axis(guide, trace[k]) for k in sites_on_f(of_sites, means)}
    counts = sorted({parts.posteriors[k].event_shape[0] for k in parts.last}, reverse=True)
    observed, nan = _observed(trace, counts, on_f)
    # A step has its edge where nodes of a product rule are (functions are equal), and no
    # mode.
    kinds = {type(messages.innermost(trace[name]["fn"])) for name in on_f}
    if expectation is None and RobustMax in kinds:
        expectation = MonteCarlo(128 if parts.drawn else 2048, sequence="sobol")
    kinked = guide.known().coupling.kinked
    if not parts.drawn:
        run = partial(parts.run, others=parts.others)
        rules, limit = (OF_KINKS, *RULES[1:]) if kinked else RULES, _MAX_NODE_NUMBERS
        last = parts.posteriors
        found = _density(run, last, on_f, expectation, parts.key, rules, limit)
        return found, observed, nan

    def given_draw(keys):
        found, given, others = parts.at(keys)
        last = {name: found[name] for name in parts.last}

        def run(f):
            return parts.run({**given, **f}, others)

        rules, limit = _RULES_OF_A_DRAW, _MAX_NODE_NUMBERS / parts.chunk
        return _density(run, last, on_f, expectation, keys[2], rules, limit)

    values = parts.map(given_draw)
    densities = jax.tree.map(
        lambda v: logsumexp(v, axis=0) - np.log(len(parts.keys)), values
    )
    return densities, observed, nan


def _density(run, posteriors, on_f, expectation, rng_key, rules, limit) -> dict:
    """
    Log density of observed sites by row, with GP sites integrated under their marginals.

    :param run: from values of all GP sites to the model's trace.
    :param posteriors: of the sites that are integrated.
    :param rules: where ``expectation`` is None, by the number of latent functions; the
        last one for more.
    :param limit: numbers of rows and nodes held at one time.
    """
    shapes, dtype = shapes_and_dtype(posteriors)
    functions = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    counts = sorted({shape[-1] for shape in shapes.values()}, reverse=True)
    about_modes = expectation is None and len(counts) == 1
    about_modes &= functions <= MOST_FUNCTIONS
    if expectation is None:
        expectation = rules[min(functions, len(rules)) - 1]

    def at(node, component):
        f = {name: q.place(node[name], component[name]) for name, q in posteriors.items()}
        return _observed_rows(run(f), counts, on_f)

    nodes, weights = expectation.nodes(rng_key, shapes, dtype)
    chunk = int(np.clip(limit / (counts[0] * functions), 1, len(weights)))
    total = []
    for component, log_weight in components(posteriors):
        of_component = partial(at, component=component)
        found = log_integrals(of_component, nodes, weights, chunk, about_modes)
        total.append({name: log_weight + v for name, v in found.items()})
    return jax.tree.map(lambda *parts: logsumexp(jnp.stack(parts), axis=0), *total)


def log_integrals(at, nodes: dict, weights: Array, chunk: int, about_modes: bool) -> dict:
    """
    Logs of integrals of densities by row, under N(0, I).

    :param at: from standard normal values by site to log densities ``(N,)`` by name.
    :param nodes: of a rule, ``(S, *batch, N)`` or ``(S, *batch, 1)`` by site.
    :param weights: its weights, ``(S,)``.
    :param chunk: how many nodes are taken at one time.
    :param about_modes: whether nodes are about the mode of each row too.
    """
    log_weights = jnp.log(weights)[:, None]
    # Exponentials of f may be infinite, and densities NaN, at the outermost nodes.
    is_nothing = (weights < jnp.finfo(weights.dtype).eps ** 2)[:, None]

    def of_name(node, name):
        return at(node)[name]

    found = {}
    for name, values in mapped(at, nodes, chunk).items():
        parts = [_without_nothing(values, is_nothing)]
        if about_modes:
            with suppress(Exception):  # of a likelihood that has no derivatives
                parts = _with_modes(partial(of_name, name=name), parts[0], nodes, chunk)
                parts = [_without_nothing(part, is_nothing) for part in parts]
        each = [logsumexp(part + log_weights, axis=0) for part in parts]
        found[name] = logsumexp(jnp.stack(each), axis=0)
    return found


def _without_nothing(values, is_nothing):
    """Without what is NaN, or infinite, where weights are next to nothing."""
    return jnp.where(is_nothing & ~(values < jnp.inf), -jnp.inf, values)


def _with_modes(of, values, nodes, chunk) -> list[Array]:
    """
    Log densities at the nodes of a rule, and at these nodes moved to where the integrand of
    each row is: the rule itself may have none there, where the likelihood is narrower than
    nodes are apart. Each integral is divided among both (multiple importance sampling).

    :param of: from standard normal values by site to log densities of the rows.
    :param values: what it is at the nodes, ``(S, N)``.
    :return: two of this shape, with what the nodes' weights are to be multiplied by.
    """
    sizes = [(name, v.shape[1:-1]) for name, v in nodes.items()]
    ends = np.cumsum([int(np.prod(batch)) for _, batch in sizes])[:-1]

    def joined(node):
        parts = [node[name].reshape(-1, node[name].shape[-1]) for name, _ in sizes]
        return jnp.concatenate(parts)

    def by_name(x):
        pairs = zip(sizes, jnp.split(x, ends), strict=True)
        return {name: v.reshape(*batch, -1) for (name, batch), v in pairs}

    flat = jax.vmap(joined)(nodes)  # (S, D, N), or (S, D, 1) where rows have the same
    # In the order of the observations, which may be of rows of f in another one.
    whole = jnp.full((flat.shape[1], values.shape[-1]), 0.5, flat.dtype)
    order = order_of(lambda x: of(by_name(x)), whole)
    back = jnp.argsort(order, axis=-1)

    def of_rows(x):
        return of(by_name(jnp.take_along_axis(x, order, axis=-1)))

    def in_order(x):  # (..., D, N), or (..., D, 1)
        return jnp.take_along_axis(x, back, axis=-1) if x.shape[-1] > 1 else x

    flat = jax.vmap(in_order)(flat)
    heights = values - 0.5 * jnp.sum(flat**2, axis=1)
    best = jnp.argmax(jnp.where(jnp.isnan(heights), -jnp.inf, heights), axis=0)
    rows = jnp.arange(len(best)) if flat.shape[-1] > 1 else 0
    centre = centre_of(of_rows, flat[best, :, rows].T)

    def moved(node):
        x, log_ratio = centre.place(in_order(joined(node)))
        found = of_rows(x) - log_ratio + log_shares(log_ratio)[0]
        return jnp.where(centre.is_there, found, -jnp.inf)

    def share(node):
        return log_shares(centre.log_ratio(in_order(joined(node))))[1]

    return [values + mapped(share, nodes, chunk), mapped(moved, nodes, chunk)]


def _checked(trace, whole):
    """A trace whose data plates are whole and whose observations have the right shape."""
    if whole:
        checks.check_whole_plates(trace, "the predictive density is of every row")
    checks.check_observations(trace)
    return trace


def _by_site(trace) -> dict:
    """Log densities of observed sites."""
    return {
        name: messages.log_prob(site, scaled=False)
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def _observed(trace, counts, on_f) -> tuple[dict, dict]:
    """Which rows of observed sites have what is not masked, and NaN that is not."""
    # It says what is wrong with shapes.
    names = _observed_rows(trace, counts, on_f)
    found: tuple[dict, dict] = {}, {}
    for name in names:
        site = trace[name]
        counted = messages.counted(site)
        nan = messages.missing(site["fn"], site["value"])
        for of_rows, entries in zip(found, (counted, nan), strict=True):
            entries = jnp.broadcast_to(entries, counted.shape)
            rows = _rows_of(entries, counts, on_f[name])
            if rows is not None:
                of_rows[name] = rows > 0
    return found


def _observed_rows(trace, counts, on_f) -> dict:
    """
    Log likelihood of each observed site that depends on f, by row.

    :param counts: numbers of rows of GP sites, the largest first.
    :param on_f: the axis of the rows, by the name of each of these sites.
    """
    values = {}
    for name, site in trace.items():
        if name not in on_f:
            continue
        log_prob = messages.log_prob(site, scaled=False)
        values[name] = _rows_of(log_prob, counts, on_f[name])
        if values[name] is None:
            raise ValueError(
                f"Observed site '{name}' has log likelihoods of shape "
                f"{jnp.shape(messages.log_prob(site))}, not one for each of the "
                f"{' or '.join(map(str, counts))} rows. One event of all rows has one "
                "density: give it a plate of the rows in the place of to_event, and each "
                "row its own distribution. A response of some rows alone has a plate of "
                "all too, and numpyro.handlers.mask where it is not there."
            )
    if not values:
        raise ValueError(_NO_OBSERVATIONS)
    return values


def _axis(guide, site) -> int | None:
    """That of the plate that had the rows of the set-up, where one had."""
    plates = row_plates(guide.known())
    dims = [frame.dim for frame in site["cond_indep_stack"] if frame.name in plates]
    return dims[0] if len(dims) == 1 else None


def _rows_of(log_prob, counts, axis) -> Array | None:
    """:func:`by_row` for the largest number of rows that it has an axis of."""
    found = (by_row(log_prob, number, axis) for number in counts)
    return next((rows for rows in found if rows is not None), None)

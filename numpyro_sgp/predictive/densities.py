"""Predictive densities of a guide."""

import math
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_guide, check_key
from numpyro_sgp._kept import FEW_ROWS, program
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
from numpyro_sgp.guides.row_latents import check_row_latents, values_of_groups
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.linalg import trapezoid
from numpyro_sgp.predictive.entries import (
    Entries,
    NotOfARow,
    are_by_row,
    by_entry,
    entries_of,
    rows_of_entries,
)
from numpyro_sgp.predictive.integrals import integrated, row_counts
from numpyro_sgp.predictive.mixture import (
    TIED,
    MixtureParts,
)
from numpyro_sgp.predictive.nodes import points_together
from numpyro_sgp.predictive.observed import (
    axis_of,
    by_site,
    checked,
    probed,
    rows_of,
    strays,
)
from numpyro_sgp.predictive.remarks import warn_of_rows
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.tracing.rows import sites_on_f
from numpyro_sgp.tracing.state import state_of

_MAX_NODE_NUMBERS = 3e6  # of rows and nodes, held at one time


class _Evenly(Trapezoid):
    """
    The trapezoidal rule over fourteen standard deviations, closer at the centre than as
    many nodes of Gauss-Hermite: right where f varies by thirty logits, too.
    """

    def _rule(self):
        return trapezoid(self.num_points, side=14.0)


RULES = _Evenly(300), GaussHermite(30), MonteCarlo(2000)
OF_KINKS = Trapezoid(400)  # for the first of these, if the likelihood has kinks
_NO_OBSERVATIONS = (
    "The model has no observed site with these arguments. Pass observations too: X_new, "
    "y_new."
)
_SEVERAL = (
    "Observations of site '{}' are of several rows of f each (differences, sums) with "
    "these arguments, and were of one when the guide was set up. Set it up, or fit, with "
    "such data."
)
_RULES_OF_A_DRAW = GaussHermite(100), GaussHermite(30), MonteCarlo(100)


class NotByRow(ValueError):
    """An observed site has no log density for each row."""


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
        300 evenly spaced nodes with one latent function (``Trapezoid(400)`` if the
        likelihood has kinks, ``GaussHermite(100)`` where there are draws),
        ``GaussHermite(30)`` with two, and ``MonteCarlo(2000)`` with more
        (``MonteCarlo(100)`` where there are draws).
    :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
    :param num_draws: number of draws of other latents and inner layers; without effect if
        there are none.
    :return: for each observed site an array of shape ``(N,)``, NaN where a mask leaves a
        row out; the negative mean of the rest is the NLPD. Of observations that are not of
        the rows of f in turn, but each of one row (``f[index]``, some of the rows, a grid),
        a density for each, in their shape. Of observations that are of
        several rows of f each (differences, sums over areas) one density each, in the batch
        shape of the site, by 2048 joint draws of f in O(N^3).
    :raises ValueError: if the arguments have no observations, an observed site has one
        density for several rows, rows are tied together and there is an ``expectation`` (or
        a deep GP), or ``num_draws`` is not positive.

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
    check_row_indices(guide.model, args, kwargs, values_of_groups(guide.known()))
    check_row_latents(guide.known(), guide.model, args, kwargs)
    guide.check_finite(params, args, kwargs)
    given = guide, params, rng_key, args, kwargs
    is_known = all(map(not_jax_tracer, jax.tree.leaves((params, args, kwargs))))
    options = expectation, num_draws, is_known
    stray: set = set()
    apart: dict = {}
    while True:
        found, is_fine, seen, told = None, {}, set(), ""
        try:
            found, is_fine, seen = _of_known(given, options, apart)
        except NotByRow as error:
            if not is_known or apart:
                raise
            told = str(error)
        if found is not None and seen <= stray:
            break
        stray |= seen
        before, apart = apart, _apart(given, num_draws, stray, told)
        if found is not None and apart.keys() == before.keys():  # in an order of their own
            break
    for name, rows in is_fine.items():
        if not_jax_tracer(rows):
            warn_of_rows(name, found[name], ~rows)
    return found


def _of_known(given, options, apart) -> tuple[dict, dict, set]:
    """
    What :func:`log_predictive_density` returns, with what is wrong with values told; where
    it is masked or finite; and sites by row whose rows are of other rows of f.

    :param apart: :class:`~numpyro_sgp.predictive.entries.Entries` of sites that are not by
        row, or None where functions have unlike rows.
    """

    def are_fine(results):
        found, is_fine, nan, _ = results
        if not all(not_jax_tracer(v) for v in is_fine.values()):
            return True
        for name, rows in nan.items():
            checks.refuse_missing(name, np.asarray(rows))
        return not any(np.any(np.isnan(v) & ~is_fine[k]) for k, v in found.items())

    found, is_fine, nan, stray = _run(_by_row, given, apart, options, are_fine)
    for name, rows in is_fine.items():
        if not_jax_tracer(rows):
            checks.refuse_missing(name, np.asarray(nan[name]))
    return found, is_fine, {name for name, v in stray.items() if v}


def _apart(given, num_draws, stray, told) -> dict[str, Entries | None]:
    """
    Sites that are not by row, or stray, and where their entries are; not those whose rows
    are in an order of their own, which are known as they are.

    :param told: what is wrong with those that are not by row.
    :raises NotByRow: if an entry is of several rows of a function.
    """
    options = num_draws, tuple(sorted(stray))
    changes, nan, left_out, tables, sizes = _run(probed, given, {}, options, bool)
    for name, entries in nan.items():
        checks.refuse_missing(name, np.asarray(entries))
    sizes, found = np.asarray(sizes).tolist(), {}
    for name, (own, number) in tables.items():
        try:
            each = rows_of_entries(changes[name], sizes)
        except NotOfARow:
            raise NotByRow(told if told and not number else _SEVERAL.format(name)) from None
        if not number or not are_by_row(each, np.asarray(own), int(number)):
            found[name] = entries_of(each, np.asarray(left_out[name]))
    return found


def _run(fn, given, apart, options, are_fine):
    """
    A function of a guide, parameters, a key, arrays and what is static, compiled; operation
    by operation where a model has to know its data, or results are not fine, so that what
    is wrong with values is told.
    """
    guide, params, rng_key, args, kwargs = given
    leaves = jax.tree.leaves((args, kwargs))
    if not any(has_no_numbers(leaf) for leaf in leaves) and _has_hash(options):
        with suppress(*NEEDS_KNOWN_DATA, NoHash):  # a model that counts groups, say
            arrays, static = split_static((args, kwargs))
            rows = (len(array) for array in jax.tree.leaves(arrays) if np.ndim(array))
            more = {
                "static": (static, *options),
                "state": state_of(guide.model, args, kwargs),
                "briefly": max(rows, default=0) <= FEW_ROWS,
            }
            found = program(guide, fn)(params, rng_key, (arrays, apart), **more)
            if are_fine(found):
                return found
    static = all_static((args, kwargs))
    if fn is _by_row:  # it would be compiled in each call
        options = *options[:-1], False
    return fn(guide, params, rng_key, ([], apart), static=(static, *options))


def _by_row(guide, params, rng_key, arrays, *, static) -> tuple[dict, dict, dict, dict]:
    """
    The density of each row, NaN where all of it is masked; whether that is so or it is
    finite; whether it has an observation of NaN that is not masked; and whether rows of a
    site are of other rows of f.
    """
    given, expectation, num_draws, is_known = static
    arrays, apart = arrays
    args, kwargs = join_static(arrays, given)
    if guide.couples_rows and expectation is None:
        density, observed, nan = _tied(guide, params, args, kwargs, rng_key, num_draws)
        stray: dict = {}
    else:
        options = expectation, rng_key, num_draws, True
        where = guide, params, args, kwargs, *options
        of_rows = by_site_and_row(*where, apart, look=is_known)
        density, observed, nan, stray = of_rows
    found = {name: jnp.where(observed[name], v, jnp.nan) for name, v in density.items()}
    is_fine = {k: jnp.isfinite(v) | ~observed[k] for k, v in found.items()}
    return found, is_fine, nan, stray


def _tied(guide, params, args, kwargs, rng_key, num_draws) -> tuple[dict, dict, dict]:
    """The same of observations that are of several rows of f each, by joint draws."""
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws, may_tie=True)
    means = {name: q.mean for name, q in parts.posteriors.items()}
    trace = checked(parts.run(means, parts.others), whole=True)

    def of_sites(f, others=parts.others):
        return by_site(parts.run(f, others))

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
    guide,
    params,
    args,
    kwargs,
    expectation,
    rng_key,
    num_draws,
    whole,
    apart=None,
    look=False,
) -> tuple[dict, dict, dict, dict]:
    """
    What :func:`log_predictive_density` does.

    :param whole: whether to refuse subsampled plates; not where a batch of rows is given
        from outside.
    :param apart: :class:`~numpyro_sgp.predictive.entries.Entries` of sites that have a
        density of each entry, or None where functions have unlike rows.
    :param look: whether to look if rows of others are of other rows of f.
    :raises NotByRow: if others have none.
    :return: log densities by row, whether a row has any observation that is not masked,
        whether it has a NaN that is not masked, and whether rows are of other rows of f.
    """
    if getattr(expectation, "joint", False):
        raise ValueError(TIED.format("Leave the expectation out."))
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws)

    def of_sites(f):
        return by_site(checked(parts.run(f, parts.others), whole))

    means = {name: q.mean for name, q in parts.posteriors.items()}
    trace = parts.run(means, parts.others)
    on_f = {k: axis_of(guide, trace[k]) for k in sites_on_f(of_sites, means)}
    counts = row_counts({k: parts.posteriors[k] for k in parts.last})
    apart = apart or {}
    observed, nan = _observed(trace, counts, on_f, apart)
    on_f = {k: axis for k, axis in on_f.items() if k not in apart}
    stray = strays(parts, trace, on_f, counts) if look else {}
    # A step has its edge where nodes of a product rule are (functions are equal), and no
    # mode.
    kinds = {type(messages.innermost(trace[name]["fn"])) for name in (*on_f, *apart)}
    if expectation is None and RobustMax in kinds:
        expectation = MonteCarlo(128 if parts.drawn else 2048, sequence="sobol")
    kinked = guide.known().coupling.kinked
    if not parts.drawn:
        run = partial(parts.run, others=parts.others)
        rules, limit = (OF_KINKS, *RULES[1:]) if kinked else RULES, _MAX_NODE_NUMBERS
        last = parts.posteriors
        found = _density(run, last, on_f, apart, expectation, parts.key, rules, limit)
        return found, observed, nan, stray

    def given_draw(keys):
        found, given, others = parts.at(keys)
        last = {name: found[name] for name in parts.last}

        def run(f):
            return parts.run({**given, **f}, others)

        rules, limit = _RULES_OF_A_DRAW, _MAX_NODE_NUMBERS / parts.chunk
        return _density(run, last, on_f, apart, expectation, keys[2], rules, limit)

    values = parts.map(given_draw)
    densities = jax.tree.map(
        lambda v: logsumexp(v, axis=0) - np.log(len(parts.keys)), values
    )
    return densities, observed, nan, stray


def _density(run, posteriors, on_f, apart, expectation, rng_key, rules, limit) -> dict:
    """
    Log density of observed sites by row, or by entry, with GP sites integrated under their
    marginals.

    :param run: from values of all GP sites to the model's trace.
    :param posteriors: of the sites that are integrated.
    :param on_f: the axis of the rows, by the name of each site that has one.
    :param apart: of sites that have none, see :func:`by_site_and_row`.
    :param rules: see :func:`~numpyro_sgp.predictive.integrals.integrated`.
    """
    counts, found = row_counts(posteriors), {}
    where = posteriors, expectation, rng_key, rules, limit
    values = {k: q.mean for k, q in posteriors.items()}
    if on_f:
        found = integrated(lambda f: _observed_rows(run(f), counts, on_f), *where)
    for name, entries in apart.items():
        log_prob = partial(_entries, run, name)
        shape = jax.eval_shape(log_prob, values).shape
        fewer = limit / max(math.prod(shape) / counts[0], 1.0)
        options = *where[:-1], fewer
        flat = jnp.full(math.prod(shape), -jnp.inf)
        if entries is None or entries.loose is not None:  # by the same nodes in all rows
            flat = _of_flat(log_prob, options, False, jnp.ravel)
        if entries is not None:
            of_rows = partial(_of_flat, log_prob, options, True)
            flat = by_entry(of_rows, entries.which, flat)
        found[name] = flat.reshape(shape)
    return found


def _entries(run, name, f):
    return messages.log_prob(run(f)[name], scaled=False)


def _of_flat(log_prob, options, by_row, reduced):
    found = integrated(lambda f: {"": reduced(log_prob(f))}, *options, by_row)
    return found[""]


def _observed(trace, counts, on_f, apart) -> tuple[dict, dict]:
    """
    Which rows, or entries, of observed sites have what is not masked, and NaN that is not.
    """
    # It says what is wrong with shapes.
    rows = {k: axis for k, axis in on_f.items() if k not in apart}
    names = _observed_rows(trace, counts, rows) if rows or not apart else {}
    found: tuple[dict, dict] = {}, {}
    for name in (*names, *apart):
        site = trace[name]
        counted = messages.counted(site)
        nan = messages.missing(site["fn"], site["value"])
        for of_rows, entries in zip(found, (counted, nan), strict=True):
            entries = jnp.broadcast_to(entries, counted.shape)
            if name not in apart:
                entries = rows_of(entries, counts, on_f[name])
            if entries is not None:
                of_rows[name] = entries > 0
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
        values[name] = rows_of(log_prob, counts, on_f[name])
        if values[name] is None:
            raise NotByRow(
                f"Observed site '{name}' has log likelihoods of shape "
                f"{jnp.shape(messages.log_prob(site))}, not one for each of the "
                f"{' or '.join(map(str, counts))} rows of f, nor is each entry of one row. "
                "One event of several rows has one density: give it a plate in the place "
                "of to_event, and each row, or observation, its own distribution. Inside "
                "of jax.jit, there has to be one for each row."
            )
    if not values:
        raise ValueError(_NO_OBSERVATIONS)
    return values

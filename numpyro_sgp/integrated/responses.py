"""Responses at draws of all latents: their moments, and densities of observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from numpyro.primitives import Messenger

from numpyro_sgp._programs import join_static, mapped, shared, split_static
from numpyro_sgp.guides.row_latents import row_plates
from numpyro_sgp.integrated.expectation import quadrature
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.groups import limit
from numpyro_sgp.integrated.in_turn import in_turn, q_of
from numpyro_sgp.integrated.marginals import given, gp_shapes, kept_nodes, marginals
from numpyro_sgp.integrated.nodes import Nodes, systematic
from numpyro_sgp.integrated.predictors import NotByRow, row_factors
from numpyro_sgp.integrated.views import Parts
from numpyro_sgp.linalg import einsum
from numpyro_sgp.predictive.densities import (
    OF_KINKS,
    RULES,
)
from numpyro_sgp.predictive.deterministic import of_deterministic
from numpyro_sgp.predictive.integrals import MOST_FUNCTIONS, log_integrals
from numpyro_sgp.predictive.predictions import read_rows
from numpyro_sgp.predictive.remarks import warn_of_rows
from numpyro_sgp.predictive.responses import of_responses
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.rows import by_row

_MOST_NODES = 512  # drawn ones
_MAX_NUMBERS = 3e6  # of rows and draws, held at one time
_STEP, _LITTLE = 0.5, 2.0  # standard deviations, and nats that they change


def at_draws(field: Field, run: Callable, free, values: dict, args, kwargs, *more) -> Any:
    """
    By one program ``run(free, values, (args, kwargs), *more)``.

    :param free: unconstrained hyperparameters, ``(S, p)``.
    :param values: of the other latents by name, each ``(S, *shape)``.
    """
    arrays, static = split_static((args, kwargs))

    def program(free, values, arrays, *more):
        return run(free, values, join_static(arrays, static), *more)

    free = jnp.asarray(free, field.dtype)
    values, arrays = jax.tree.map(jnp.asarray, (values, arrays))
    return shared(program)(free, values, arrays, *more)


def predicted(
    field: Field, free, values: dict, args, kwargs, levels, rng_key: Array, known=()
) -> dict:
    """
    Means, standard deviations and quantiles of responses, and of deterministic sites that
    are made of rows of GP sites, averaged over draws.

    :param free: unconstrained hyperparameters, ``(S, p)``.
    :param values: of the other latents by name, each ``(S, *shape)``.
    :param levels: of the quantiles.
    :param rng_key: of what is drawn.
    :param known: names of sites that are left out.
    :return: by site.
    """
    number, num_rows = len(free), _num_rows(field, values)

    def run(free, values, where, rng_key):
        parts = Parts(field, values, free, *where)
        points = {
            "f": {k: values[k] for k in field.sites},
            "others": {k: values[k] for k in field.effects} | {"": free},
            "weight": jnp.full(number, 1.0 / number, field.dtype),
            "key": jax.random.split(rng_key, number),
        }
        found = jnp.asarray(levels, field.dtype)
        of_sites = of_deterministic(parts, 3 * (points,), found, skip=known)
        return of_sites | of_responses(parts, 3 * (points,), rng_key, found, every=True)

    found = at_draws(field, run, free, values, args, kwargs, rng_key)
    return read_rows(found, field.sites, num_rows, 1.0, levels, _row_axes(field))


def _row_axes(field: Field) -> dict[str, int]:
    """The axis of a response that is that of a plate of as many rows as a GP site has."""
    setup, found = field.guide.known(), {}
    plates = row_plates(setup)
    for name in field.responses:
        site = setup.trace[name]
        axes = [frame.dim for frame in site["cond_indep_stack"] if frame.name in plates]
        if len(axes) == 1:
            found[name] = len(site["fn"].batch_shape) + axes[0]
    return found


def loose(field: Field, nodes: Nodes, known: tuple[tuple, dict] | None) -> np.ndarray:
    """
    Which hyperparameters may be others than those of the node that a field is of: where
    half a standard deviation of them changes the density of the observations, given the
    field, by little. That of kernels does not, and noise's by tenths of a nat.

    :param known: ``(args, kwargs)`` with the observations; None where they are not known.
    :return: booleans, ``(p,)``, False where that is not known.
    """
    p = len(nodes.mode)
    if known is None or not p or nodes.are_few:
        return np.zeros(p, bool)
    (args, kwargs), names = known, (*field.sites, *field.effects)
    means = {k: q.mean for k, q in marginals(field, nodes, args, kwargs, names).items()}
    steps = _STEP * np.diag(np.sqrt(np.sum(nodes.axes**2, axis=1)))
    best = nodes.free[np.argmax(nodes.values)]
    free = best + np.concatenate([np.zeros((1, p)), steps, -steps])
    values = {k: np.broadcast_to(means[k], (len(free), *means[k].shape)) for k in names}

    def run(free, values, where):
        def one(inputs):
            trace = given(field, *inputs, *where, jax.random.key(0))
            seen = (s for s in trace.values() if s["type"] == "sample" and s["is_observed"])
            return sum(jnp.sum(messages.log_prob(site)) for site in seen)

        return jax.lax.map(one, (free, values))

    found = np.asarray(at_draws(field, run, free, values, args, kwargs), float)
    return np.all(np.abs(found[1:] - found[0]).reshape(2, p) < _LITTLE, axis=0)


def densities(
    field: Field, nodes: Nodes, draw: Callable, num_draws: int, args, kwargs
) -> dict[str, Array]:
    """
    Log predictive density of each row of each observed site, NaN where a mask leaves a row
    out; empty if nothing is observed.

    :param draw: from a number of draws to these, as for :func:`predicted`.
    :param num_draws: of them, where densities are averages over draws.
    """
    free, values = draw(1)
    _, seen = _at_draws(field, free, values, args, kwargs)
    found = _at_nodes(field, nodes, args, kwargs) if seen else {}
    if seen.keys() - found.keys():
        free, values = draw(num_draws)
        found = {**_at_draws(field, free, values, args, kwargs)[0], **found}
    for name, rows in seen.items():
        warn_of_rows(name, found[name], np.asarray(rows))
    return {name: jnp.where(rows, found[name], jnp.nan) for name, rows in seen.items()}


def _at_draws(field: Field, free, values: dict, args, kwargs) -> tuple[dict, dict]:
    """Averages over draws, and whether a row has any observation that is not masked."""
    number, num_rows = len(free), _num_rows(field, values)

    def run(free, values, where):
        def one(inputs):
            free, values = inputs
            trace = given(field, free, values, *where, jax.random.key(0))
            checks.check_observations(trace)
            found, seen, axes = {}, {}, _row_axes(field)
            for name, site in trace.items():
                if site["type"] != "sample" or not site["is_observed"]:
                    continue
                along = num_rows, axes.get(name)
                density = by_row(messages.log_prob(site, scaled=False), *along)
                count = by_row(messages.counted(site), *along)
                if density is None and not messages.is_response(site):
                    continue  # a factor of no rows
                if density is None:  # of other rows than those of the GP site
                    density = messages.log_prob(site, scaled=False)
                    count = messages.counted(site)
                found[name], seen[name] = density, count > 0
            return found, seen

        chunk = int(np.clip(_MAX_NUMBERS / num_rows, 1, number))
        each, seen = mapped(one, (free, values), chunk)
        found = {k: logsumexp(v, axis=0) - np.log(number) for k, v in each.items()}
        return found, {k: v[0] for k, v in seen.items()}

    return at_draws(field, run, free, values, args, kwargs)


def _at_nodes(field: Field, nodes: Nodes, args, kwargs) -> dict[str, Array]:
    """
    Without draws: given a node the predictors of a row are Gaussian, so that its density is
    an integral, by nodes of a rule where these are and about the mode of each row's
    integrand.

    :return: by site; none where rows are not of predictors of their own, or of many, and
        without the sites that have no density for each row.
    """
    arrays, static = split_static((args, kwargs))
    arrays = [jnp.asarray(a) for a in arrays]
    shapes = gp_shapes(field, nodes.points, args, kwargs)
    num_rows = max(shape[-1] for shape in shapes.values())
    plain, axes = field.running(_Unscaled(field.model)), _row_axes(field)

    def run(free, mean, factor, points, arrays):
        where = points, *join_static(arrays, static)
        terms = plain.terms(free, *where, num_rows=num_rows)
        mean, covariance = terms.linear.moments(mean, factor)
        root = row_factors(covariance)
        if len(mean) > MOST_FUNCTIONS:
            raise NotByRow

        def at(node):
            x = jnp.broadcast_to(node[""], mean.shape)
            rows = mean + einsum("rsn,sn->rn", root, x)
            each = terms.each(rows).items()
            found = {k: by_row(v, num_rows, axes.get(k)) for k, v in each}
            return {k: v for k, v in found.items() if v is not None}

        z, weights = _rule(len(mean), num_rows, mean.dtype, field.kinked)
        chunk = int(np.clip(_MAX_NUMBERS / mean.size, 1, len(weights)))
        found = log_integrals(at, {"": z[..., None]}, weights, chunk, True)
        away = getattr(terms.linear, "away", jnp.zeros(1))
        return found, jnp.max(away) <= limit(field.dtype)

    weights, kept = kept_nodes(nodes)
    if len(kept) > _MOST_NODES:
        places = systematic(weights, _MOST_NODES, np.random.default_rng(0))
        places, counts = np.unique(places, return_counts=True)
        weights, kept = counts / counts.sum(), [kept[i] for i in places]
    tasks, found = [q_of(node, field.dtype) for node in kept], []
    try:
        for densities, is_grouped in in_turn(run, tasks, nodes.points, arrays):
            if not np.all(is_grouped):
                return {}
            found.append(densities)
    except NotByRow:
        return {}
    each = {k: jnp.concatenate([part[k] for part in found]) for k in found[0]}
    return {k: logsumexp(v, axis=0, b=weights[:, None]) for k, v in each.items()}


class _Unscaled(Messenger):
    """Observations count once each."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["scale"] = None


def _rule(number, num_rows, dtype, kinked):
    """Nodes ``(S, J)`` for J predictors, and weights."""
    if number > len(RULES) - 1:
        return quadrature(number, num_rows, dtype)
    rule = OF_KINKS if kinked and number == 1 else RULES[number - 1]
    nodes, weights = rule.nodes(None, {"": (number, 1)}, dtype)
    return nodes[""][..., 0], weights


def _num_rows(field, values) -> int:
    return max(values[name].shape[-1] for name in field.sites)

"""Integrals of densities over f, by row."""

from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from numpyro_sgp._programs import mapped
from numpyro_sgp.elbo import MonteCarlo, Trapezoid
from numpyro_sgp.predictive.centres import centre_of, log_shares, order_of
from numpyro_sgp.predictive.mixture import components, shapes_and_dtype

MOST_FUNCTIONS = 20  # of which second derivatives are taken
# Of nodes that are not moved to where a row's density is.
_IN_ALL_ROWS = Trapezoid(1600), Trapezoid(120), MonteCarlo(8192, sequence="sobol")


def row_counts(posteriors) -> list[int]:
    """Numbers of rows of GP sites, the largest first."""
    return sorted({q.event_shape[0] for q in posteriors.values()}, reverse=True)


def integrated(
    log_density, posteriors, expectation, rng_key, rules, limit, by_row: bool = True
) -> dict:
    """
    Logs of integrals under the marginals of f.

    :param log_density: from values of the sites to log densities of rows by name.
    :param rules: where ``expectation`` is None, by the number of latent functions; the
        last one for more.
    :param limit: numbers of rows and nodes held at one time.
    :param by_row: whether there is one for each row, which nodes may be moved for.
    """
    shapes, dtype = shapes_and_dtype(posteriors)
    functions = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    counts = row_counts(posteriors)
    about_modes = by_row and expectation is None and len(counts) == 1
    about_modes &= functions <= MOST_FUNCTIONS
    if expectation is None:
        rules = rules if by_row and len(counts) == 1 else _IN_ALL_ROWS
        expectation = rules[min(functions, len(rules)) - 1]

    def at(node, component):
        return log_density(
            {k: q.place(node[k], component[k]) for k, q in posteriors.items()}
        )

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

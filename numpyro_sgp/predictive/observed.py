"""Observed sites on f: their log densities, and of which rows of f entries are."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import join_static
from numpyro_sgp.guides.row_latents import row_plates
from numpyro_sgp.predictive.entries import changed, halves, of_functions
from numpyro_sgp.predictive.integrals import row_counts
from numpyro_sgp.predictive.mixture import MixtureParts
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.rows import by_row, row_axis, sites_on_f


def checked(trace, whole):
    """A trace whose data plates are whole and whose observations have the right shape."""
    if whole:
        checks.check_whole_plates(trace, "the predictive density is of every row")
    checks.check_observations(trace)
    return trace


def by_site(trace) -> dict:
    """Log densities of observed sites."""
    return {
        name: messages.log_prob(site, scaled=False)
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }


def axis_of(guide, site) -> int | None:
    """That of the plate that had the rows of the set-up, where one had."""
    plates = row_plates(guide.known())
    dims = [frame.dim for frame in site["cond_indep_stack"] if frame.name in plates]
    return dims[0] if len(dims) == 1 else None


def rows_of(log_prob, counts, axis) -> Array | None:
    """:func:`by_row` for the largest number of rows that it has an axis of."""
    found = (by_row(log_prob, number, axis) for number in counts)
    return next((rows for rows in found if rows is not None), None)


def around(parts, whole):
    """
    Means of all GP sites; those, and in what units they are moved, of the last ones; and
    log densities of observed sites at values of these.
    """
    means = {name: q.mean for name, q in parts.posteriors.items()}
    last = {name: means[name] for name in parts.last}
    scales = {name: _scales(parts.posteriors[name]) for name in parts.last}

    def of_sites(f):
        return by_site(checked(parts.run({**means, **f}, parts.others), whole))

    return means, last, scales, of_sites


def _scales(q):
    """Standard deviations, but where these are next to nothing."""
    sd = jnp.sqrt(jnp.maximum(q.variance, 0.0))
    least = jnp.where(jnp.max(sd) > 0.0, 1e-2 * jnp.max(sd), 1.0)
    rounded = jnp.finfo(sd.dtype).eps ** 0.5 * jnp.abs(q.mean)
    return jnp.maximum(jnp.maximum(sd, least), rounded)


def strays(parts, trace, on_f, counts) -> dict[str, Array]:
    """
    Whether rows of sites by row are not of one row of f each: entries change with other
    rows of sites with as many, or with several rows of others.
    """
    _, last, scales, of_sites = around(parts, False)
    axes = {}
    for name, known in on_f.items():
        shape = jnp.shape(messages.log_prob(trace[name]))
        for number in counts:
            if (axis := row_axis(shape, number, known)) is not None:
                axes[name] = number, axis - len(shape)
                break
    found = {name: jnp.asarray(False) for name in axes}

    def of_axes(f):
        densities = of_sites(f)
        return {name: densities[name] for name in axes}

    for number in counts if axes else ():
        moving = {k: np.True_ for k, v in last.items() if v.shape[-1] == number}
        seen = changed(of_axes, last, scales, moving, places=(-1.0, 1.0), step=1.0)
        for name, (size, axis) in axes.items():
            rows = jnp.moveaxis(seen[name], axis, 3)
            rows = jnp.any(rows.reshape(*rows.shape[:4], -1), axis=-1)
            several = rows[:, 0] & rows[:, 1]
            if size == number:
                several = rows & ~halves(number)
            found[name] |= jnp.any(several)
    return found


def probed(
    guide, params, rng_key, arrays, *, static
) -> tuple[dict, dict, dict, dict, Array]:
    """
    Of sites that are not by row, or named: which rows entries change with, which have an
    observation of NaN that is not masked, which have no density that rows could change, and
    rows of the table that they are in, with how many it has; and how many rows sites have.
    """
    given, num_draws, stray = static
    args, kwargs = join_static(arrays[0], given)
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws)
    means, last, scales, of_sites = around(parts, True)
    trace = parts.run(means, parts.others)
    counts = row_counts({k: parts.posteriors[k] for k in last})
    here, tables = of_sites(means), {}
    for name in sites_on_f(of_sites, means):
        shape, known = here[name].shape, axis_of(guide, trace[name])
        found = (n for n in counts if row_axis(shape, n, known) is not None)
        number = next(found, 0)
        if number and name in stray:
            axis = row_axis(shape, number, known)
            ones = [-1 if i == axis else 1 for i in range(len(shape))]
            own = jnp.broadcast_to(jnp.arange(number).reshape(ones), shape)
            tables[name] = own.reshape(-1), number
        elif not number:
            tables[name] = jnp.zeros(here[name].size, int), 0
    changes = of_functions(lambda f: {k: of_sites(f)[k] for k in tables}, last, scales)
    nan = {k: messages.missing(trace[k]["fn"], trace[k]["value"]) for k in tables}
    left_out = {
        k: (messages.counted(trace[k]).reshape(-1) == 0) | jnp.isneginf(here[k]).reshape(-1)
        for k in tables
    }
    sizes = jnp.asarray([value.shape[-1] for value in last.values()])
    return changes, nan, left_out, tables, sizes

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
    Means of all GP sites; those, and standard deviations, of the last ones; and log
    densities of observed sites at values of these.
    """
    means = {name: q.mean for name, q in parts.posteriors.items()}
    last = {name: means[name] for name in parts.last}
    sds = {name: jnp.sqrt(parts.posteriors[name].variance) for name in parts.last}

    def of_sites(f):
        return by_site(checked(parts.run({**means, **f}, parts.others), whole))

    return means, last, sds, of_sites


def strays(parts, trace, on_f, counts) -> dict[str, Array]:
    """Whether entries of sites by row change with other rows of f than their own."""
    _, last, sds, of_sites = around(parts, False)
    found = {}
    for number in counts:
        sites = {k: np.True_ for k, v in last.items() if v.shape[-1] == number}
        axes = {}
        for name in on_f.keys() - found.keys():
            shape = jnp.shape(messages.log_prob(trace[name]))
            if (axis := row_axis(shape, number, on_f[name])) is not None:
                axes[name] = axis - len(shape)
        if not axes:
            continue

        def chosen(f, names=tuple(axes)):
            densities = of_sites(f)
            return {name: densities[name] for name in names}

        for name, moved in changed(chosen, last, sds, sites, places=(1.0,)).items():
            half, axis = halves(number), moved.ndim + axes[name] - 1
            ones = [number if i == axis else 1 for i in range(2, moved.ndim - 1)]
            own = half.reshape(*half.shape[:2], *ones)
            found[name] = jnp.any(moved[0] & ~own)
    return found


def probed(guide, params, rng_key, arrays, *, static) -> tuple[dict, dict, dict, Array]:
    """
    Of sites that are not by row, or named: which entries change with which rows, which have
    an observation of NaN that is not masked, which have no density that rows could change,
    and how many rows sites have.
    """
    given, num_draws, stray = static
    args, kwargs = join_static(arrays[0], given)
    parts = MixtureParts(guide, params, args, kwargs, rng_key, num_draws)
    means, last, sds, of_sites = around(parts, True)
    trace = parts.run(means, parts.others)
    counts = row_counts({k: parts.posteriors[k] for k in last})
    here = of_sites(means)
    names = [
        name
        for name in sites_on_f(of_sites, means)
        if name in stray or rows_of(here[name], counts, axis_of(guide, trace[name])) is None
    ]
    changes = of_functions(lambda f: {k: of_sites(f)[k] for k in names}, last, sds)
    nan = {k: messages.missing(trace[k]["fn"], trace[k]["value"]) for k in names}
    left_out = {
        k: (messages.counted(trace[k]).reshape(-1) == 0) | jnp.isneginf(here[k]).reshape(-1)
        for k in names
    }
    each = [v.shape[-1] for v in last.values()]
    return changes, nan, left_out, jnp.asarray(each)

"""Where the rows of the data are: in arguments of a model, and in what its sites have."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.ops.provenance import track_deps_jaxpr

from numpyro_sgp._programs import shared
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.given_rows import GivenRows
from numpyro_sgp.tracing.program import watched
from numpyro_sgp.tracing.trees import is_number, is_plain

_FEW = 16  # rows that are looked at by themselves,
_MANY = 256  # of so many


class RowAxes(NamedTuple):
    """
    What has as many entries along an axis as there are rows, and other ones if there are
    others.

    :param arguments: that axis of each array among the arguments; None of those without.
    :param sites: and of the values of sites, by name.
    """

    arguments: tuple[int | None, ...]
    sites: dict[str, int]

    def count(self, arrays) -> int:
        """Rows of such arguments."""
        pairs = zip(arrays, self.arguments, strict=True)
        return next(np.shape(a)[axis] for a, axis in pairs if axis is not None)

    def resized(self, arrays, number: int) -> list:
        """Shapes of such arguments of another number of rows."""
        return list(map(_resized(number), arrays, self.arguments))

    def take(self, arrays, index) -> list:
        """Arguments with some of their rows."""
        pairs = zip(arrays, self.arguments, strict=True)
        return [
            a if axis is None else a[(*(slice(None),) * axis, index)] for a, axis in pairs
        ]


def row_axes(run: Callable[[list], dict], arrays, gp_sites) -> RowAxes | None:
    """
    Rows by what changes where there is one fewer.

    :param run: from arrays among a model's arguments to its trace; it is only traced.
    :param arrays: of one number of rows.
    :param gp_sites: names of the GP sites, which all have one value for each row.
    :return: None where they have different numbers of rows, or none of the arguments has
        them, or the model does not run with others.
    """
    here = site_shapes(run, arrays)
    counts = {here[name][-1] for name in gp_sites}
    if len(counts) != 1:
        return None
    (N,) = counts
    for axes in _candidates(arrays, N):
        sites = {}
        other = N - 1 if N > 2 else N + 1
        with suppress(Exception):  # of the model's code, which may raise anything
            there = site_shapes(run, list(map(_resized(other), arrays, axes)))
            for name, shape in here.items():
                moved = there[name]
                if len(shape) == len(moved) and shape != moved:
                    sites[name] = next(i for i, n in enumerate(shape) if n != moved[i])
            if all(sites.get(name) == len(here[name]) - 1 for name in gp_sites):
                return RowAxes(axes, sites)
    return None


def site_shapes(run: Callable[[list], dict], arrays) -> dict[str, tuple[int, ...]]:
    """
    Shapes of the values of sites.

    :param run: from arrays among a model's arguments to its trace; it is only traced.
    """

    def values(arrays):
        found = {}
        for name, site in run(arrays).items():
            if site["type"] == "sample":
                found[name] = site["value"]
                if site["is_observed"]:  # which tells observations of another shape
                    messages.log_prob(site)
        return found

    like = [jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.result_type(a)) for a in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of plates: where it is run in earnest it is told
        found = jax.eval_shape(values, like)
    return {name: value.shape for name, value in found.items()}


def _candidates(arrays, N) -> Iterator[tuple[int | None, ...]]:
    """Axes of that length: leading ones, or the first of each."""
    shapes = [np.shape(a) for a in arrays]
    leading = tuple(0 if shape[:1] == (N,) else None for shape in shapes)
    anywhere = tuple(shape.index(N) if N in shape else None for shape in shapes)
    for axes in dict.fromkeys((leading, anywhere)):
        if any(axis is not None for axis in axes):
            yield axes


def _resized(size):
    def resized(array, axis):
        shape = list(np.shape(array))
        if axis is not None:
            shape[axis] = size
        return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.result_type(array))

    return resized


def inputs_are_untouched(run, axes: RowAxes, gp_sites, arrays) -> bool:
    """
    Whether the inputs of GP sites are arguments as they are, and nothing else that these
    are made of depends on what has rows: rows are apart then, whatever their numbers.

    :param run: as of :func:`rows_apart`.
    """
    like = [jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.result_type(a)) for a in arrays]
    are_known = []

    def at_site(site):
        fn, value = messages.above_prior_mean(site)
        return fn, watched("f", value)

    def made_of(arrays):
        trace = run(arrays, at_site)
        found = [trace[name]["fn"] for name in gp_sites]
        are_known.append(all(map(is_plain, found)))
        return [leaf for leaf in jax.tree.leaves(found) if is_number(leaf)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in :func:`site_shapes`
        program = jax.make_jaxpr(made_of)(like).jaxpr
    has_rows = [axis is not None for axis in axes.arguments]
    labels = [frozenset([i]) if rows else frozenset() for i, rows in enumerate(has_rows)]
    origins = track_deps_jaxpr(program, labels)
    pairs = zip(program.outvars, origins, strict=True)
    are_apart = all(not of or out in program.invars for out, of in pairs)
    return all(are_known) and are_apart


def rows_apart(run: Callable[..., dict], axes: RowAxes, gp_sites) -> Callable[[list], bool]:
    """
    A function of arrays: whether GP sites have the same inputs, mean and kernel at some
    rows where these are alone, observations the same density, and what is not observed the
    same distribution. They have others where a model computes statistics of its arguments,
    such as their mean, numbers its rows, takes the value of the row before or rows of f in
    another order. It is asked for the numbers of each call: a largest value may be one that
    the model looks at, or not. Of many rows some are looked at, among them the largest and
    the smallest.

    :param run: from arrays, and what GP sites are to be (:class:`messages.AtGPSites`), to
        the model's trace.
    """

    def agree(arrays):
        N = axes.count(arrays)
        drawn = np.random.default_rng(0).permutation(np.arange(N // 2, N))
        sets = drawn[:_FEW], drawn[_FEW : 2 * _FEW]  # one has not the largest of all
        found = [_agree_at(run, axes, gp_sites, arrays, np.sort(s)[::-1]) for s in sets]
        return jnp.all(jnp.stack(found))

    program = shared(agree, briefly=True)

    def apart(arrays):
        return axes.count(arrays) <= 2 or bool(program(_some_rows(axes, arrays)))

    return apart


def _some_rows(axes, arrays) -> list:
    """Arguments with some of their rows, those with the largest numbers among them."""
    pairs = zip(arrays, axes.arguments, strict=True)
    # On the host, where what is known stays so inside of another program.
    given = [a if axis is None or _is_key(a) else np.asarray(a) for a, axis in pairs]
    return axes.take(given, _largest_first(given, axes))


def deterministic_apart(
    run: Callable[..., dict], axes: RowAxes, gp_sites
) -> Callable[[list], frozenset[str]]:
    """
    A function of arrays: the names of deterministic sites that have rows, and are at some
    of these what they are where these are alone, as :func:`rows_apart` asks of others.
    """

    def values_of(trace):
        sites = {k: s["value"] for k, s in trace.items() if s["type"] == "deterministic"}
        return {k: jnp.asarray(v) for k, v in sites.items() if is_number(v)}

    def agree(arrays):
        N = axes.count(arrays)
        rows = np.sort(np.random.default_rng(0).permutation(np.arange(N // 2, N))[:_FEW])
        rows = rows[::-1]
        whole = values_of(run(arrays, _at_rows_of(N)))
        with GivenRows(len(rows), N):
            some = values_of(run(axes.take(arrays, rows), _at_rows_of(N, rows)))
        found = {}
        for name in whole.keys() & some.keys():
            pairs = enumerate(zip(whole[name].shape, some[name].shape, strict=False))
            places = [i for i, (a, b) in pairs if a != b]
            same = whole[name].ndim == some[name].ndim and len(places) == 1
            if same and whole[name].shape[places[0]] == N:
                found[name] = _agree(jnp.take(whole[name], rows, places[0]), some[name])
        return found

    program, has_any = shared(agree, briefly=True), []

    def names(arrays):
        given = _some_rows(axes, arrays)
        if not has_any:
            has_any.append(bool(jax.eval_shape(agree, given)))
        if not has_any[0]:
            return frozenset()
        return frozenset(k for k, same in program(given).items() if same)

    return names


def _is_key(array) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _agree_at(run, axes, gp_sites, arrays, rows):
    """
    Whether these rows, none at the place that it has where they are alone, are there what
    they are among all.
    """
    N = axes.count(arrays)
    if not len(rows):
        return jnp.array(True)
    pairs = zip(arrays, axes.arguments, strict=True)
    arrays = [_varied(a, axis, rows) for a, axis in pairs]
    whole = _of_rows(run(arrays, _at_rows_of(N)), axes, gp_sites, rows)
    with GivenRows(len(rows), N):
        some = run(axes.take(arrays, rows), _at_rows_of(N, rows))
    some = _of_rows(some, axes, gp_sites, np.arange(len(rows)))
    return jnp.all(jnp.stack(list(map(_agree, whole, some))))


def _largest_first(arrays, axes) -> np.ndarray:
    """Some of the rows, those with the largest and smallest numbers among the first."""
    N = axes.count(arrays)
    number = min(1 << N.bit_length() - 1, _MANY)  # a power of two, for a few programs
    ends = [np.zeros(0, int)]
    for array, axis in zip(arrays, axes.arguments, strict=True):
        if axis is not None and jax.dtypes.issubdtype(array.dtype, np.number):
            columns = np.moveaxis(np.asarray(array), axis, 0).reshape(N, -1)
            ends += [columns.argmin(0), columns.argmax(0)]
    first = np.unique(np.concatenate(ends))[: number // 2]
    others = np.setdiff1d(np.arange(N), first)
    evenly = np.linspace(0, len(others) - 1, number - len(first)).astype(int)
    return np.concatenate([first, others[evenly]])


def _at_rows_of(number, rows=slice(None)):
    """For GP sites: values, other ones at each of so many rows, at some of these."""

    def at_site(site):
        fn = messages.unwrap(site["fn"])[0]
        draws = np.random.default_rng(1).uniform(0.5, 1.5, (*fn.batch_shape, number))
        above = jnp.asarray(draws[..., rows].astype(fn.X.dtype))
        return site["fn"], messages.prior_mean(site) + above.reshape(site["fn"].shape())

    return at_site


def _varied(array, axis, rows):
    """
    The same with other numbers at all but these rows where all rows are alike, as those of
    an exposure of 1 are: their mean would be that of some.
    """
    if axis is None or not jnp.issubdtype(jax.dtypes.result_type(array), jnp.floating):
        return array
    values = jnp.moveaxis(jnp.asarray(array), axis, 0)
    are_alike = jnp.all(values == values[:1])
    is_other = ~np.isin(np.arange(len(values)), rows)
    other = values + 0.01 * jnp.where(values == 0.0, 1.0, values)
    changed = is_other.reshape(-1, *(1,) * (values.ndim - 1)) & are_alike
    return jnp.moveaxis(jnp.where(changed, other, values), 0, axis)


def _of_rows(trace, axes, gp_sites: Collection[str], rows) -> list:
    """What GP sites and observations have at these."""
    found = []
    for name, site in sorted(trace.items()):
        if name in gp_sites:
            prior = messages.unwrap(site["fn"])[0]
            X = prior.X[..., rows, :]
            leaves = [v for v in jax.tree.leaves(prior.kernel) if is_number(v)]
            found += [X, prior.mean[..., rows], *leaves]
            found += [prior.kernel(X, X), prior.variance[..., rows]]
        elif site["type"] == "sample" and site["is_observed"] and name in axes.sites:
            log_prob, axis = messages.log_prob(site, scaled=False), axes.sites[name]
            if axis < log_prob.ndim:
                found.append(log_prob[(*(slice(None),) * axis, rows)])
        elif site["type"] == "sample" and name in axes.sites:
            fn, axis = site["fn"], axes.sites[name]
            number = fn.shape()[axis]
            leaves = [v for v in jax.tree.leaves(fn) if is_number(v)]
            found += [_at_rows(v, number, rows) for v in leaves]
            with suppress(Exception):  # of one that has none
                log_prob = fn.log_prob(jnp.ones(fn.shape(), site["value"].dtype))
                found.append(_at_rows(log_prob, number, rows))
    return found


def _at_rows(leaf, number, rows):
    """The entries of some rows along the axes that have the number of all rows."""
    for axis, size in enumerate(jnp.shape(leaf)):
        leaf = jnp.take(jnp.asarray(leaf), rows, axis) if size == number else leaf
    return leaf


def _agree(a, b):
    """Whether two arrays are equal but for rounding, those of other rows at the first."""
    if jnp.ndim(a) != jnp.ndim(b):
        return jnp.array(True)
    least = tuple(map(slice, map(min, jnp.shape(a), jnp.shape(b))))
    a, b = jnp.asarray(a)[least], jnp.asarray(b)[least]
    a, b = (jnp.asarray(v, jnp.result_type(float)) for v in (a, b))
    size = jnp.maximum(jnp.abs(a), jnp.abs(b)).max(initial=0.0)
    close = jnp.abs(a - b) <= 1e3 * jnp.finfo(a.dtype).eps * size
    return jnp.all(close | (jnp.isnan(a) & jnp.isnan(b)) | (a == b))

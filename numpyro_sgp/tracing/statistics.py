"""Inputs of GP sites that a model makes of all rows: standardised inside of it."""

import warnings
from collections.abc import Collection
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp._programs import shared
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.by_row import BY_NUMBER

# What keeps the numbers of a row together, or copies those of another array.
_SHAPES = frozenset("broadcast_in_dim concatenate reshape squeeze transpose".split())
_CALLS = frozenset("closed_call custom_jvp_call custom_vjp_call jit pjit".split())
_FEWEST = 4  # rows that tell all of them from some


def warn_of_statistics(model, args, kwargs, gp_sites: Collection[str]) -> None:
    """Warns of :func:`made_of_all_rows`."""
    for name in made_of_all_rows(model, args, kwargs, gp_sites):
        warnings.warn(
            f"The inputs of GP site '{name}' at almost all rows change with one row of the "
            "data: the model computes a statistic of the rows that it is given (X.mean(0), "
            "X.std(0), X.max(), t[0]). At new rows it would be that of these, and "
            "predictions at other inputs than meant. Compute it outside of the model, of "
            "the training data, and give the model X that is standardised by it, there and "
            "in predictions.",
            stacklevel=find_stack_level(),
        )


def made_of_all_rows(model, args, kwargs, gp_sites: Collection[str]) -> list[str]:
    """
    GP sites with inputs that change at nine of ten other rows, or more, with the numbers of
    a single row of the data: the first one, the one in the middle or the last one. Inputs
    of the row before, say, are not such.

    Programs whose inputs go by operations number by number are not run.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    rows: set[int] = set()

    def run(arrays):
        given = [*leaves]
        for i, array in arrays.items():
            given[i] = array
        where = jax.tree.unflatten(structure, given)
        trace = messages.trace_of(model, *where, at_site=messages.at_prior_mean)
        found = {name: messages.unwrap(trace[name]["fn"])[0].X for name in gp_sites}
        rows.update(X.shape[-2] for X in found.values())
        return found

    real = {i: leaf for i, leaf in enumerate(leaves) if _is_real(leaf)}
    with warnings.catch_warnings(), suppress(Exception):  # of a model that needs its data
        warnings.simplefilter("ignore")
        program = jax.make_jaxpr(run)(real).jaxpr
        mixed = _mixed(program, program.invars)
        names = sorted(gp_sites)  # as outputs are
        names = [k for k, v in zip(names, program.outvars, strict=True) if v in mixed]
        with_rows = {i: a for i, a in real.items() if len(a) in rows and len(a) >= _FEWEST}
        if names and len(rows) == 1 and with_rows:
            return [name for name in names if _moves(shared(run, True), with_rows, name)]
    return []


def _is_real(leaf) -> bool:
    if not isinstance(leaf, np.ndarray | jax.Array) or not not_jax_tracer(leaf):
        return False
    return leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.floating)


def _mixed(jaxpr, given) -> set:
    """Variables that are made of these by other operations than those number by number."""
    moved, mixed = {*given}, set()
    for eqn in jaxpr.eqns:
        made_of = {v for v in eqn.invars if not isinstance(v, Literal)}
        if made_of & mixed or (made_of & moved and not _is_by_row(eqn)):
            mixed.update(eqn.outvars)
        elif made_of & moved:
            moved.update(eqn.outvars)
    return mixed


def _is_by_row(eqn) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "slice":  # of columns
        size = eqn.invars[0].aval.shape[0]
        return params["start_indices"][0] == 0 and params["limit_indices"][0] == size
    if name in _CALLS:
        inner = jaxprs_in_params(params)
        return all(_is_by_row(each) for jaxpr in inner for each in jaxpr.eqns)
    return name in BY_NUMBER or name in _SHAPES


def _moves(program, arrays: dict, name: str) -> bool:
    """Whether other numbers in one row change inputs at nine of ten others, or more."""
    before = np.asarray(program(arrays)[name])
    N = before.shape[-2]
    for row in (0, N // 2, N - 1):
        given = {i: _with_far_row(np.array(a), row) for i, a in arrays.items()}
        after = np.asarray(program(given)[name])
        same = np.isclose(after, before, rtol=1e-4, atol=0.0, equal_nan=True)
        changed = np.delete(~same.all(-1).reshape(-1, N).all(0), row)
        if np.mean(changed) >= 0.9:
            return True
    return False


def _with_far_row(array, row):
    """A row far above the others."""
    low, high = array.min(0), array.max(0)
    array[row] = 2.0 * high - low + np.where(low == high, 1.0 + np.abs(high), 0.0)
    return array

"""Inputs of GP sites that a model makes of all rows: standardised inside of it."""

import itertools
import warnings
from collections.abc import Collection
from contextlib import suppress

import jax
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp._programs import NEEDS_KNOWN_DATA, shared
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.by_row import BY_NUMBER
from numpyro_sgp.tracing.plates import FirstRows

# What keeps the numbers of a row together, or copies those of another array.
_SHAPES = frozenset("broadcast_in_dim concatenate reshape squeeze transpose".split())
_CALLS = frozenset("closed_call custom_jvp_call custom_vjp_call jit pjit".split())
_FEWEST = 4  # rows that tell all of them from some
_MOST = 256  # that are looked at, unless the model has a plate of another size
_LARGE = 20_000  # of which all are


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
    a single row of an argument: the first one, the one in the middle or the last one, far
    above or below the others. Inputs of the row before, say, are not such. Nor are those
    made of an argument that may have other rows than the data (``X - X_train.mean(0)``).

    Programs whose inputs go by operations number by number are not run. Others are, with
    256 of the rows, or all of up to 20,000 if the model takes no others.
    """
    found = []
    with warnings.catch_warnings(), suppress(Exception):  # of a model that needs its data
        warnings.simplefilter("ignore")
        inputs = _Inputs(model, args, kwargs)
        for name, number in inputs.not_by_row(gp_sites).items():
            rows = inputs.with_rows(name, number)
            if number >= _FEWEST and rows and inputs.move(name, rows):
                found.append(name)
    return found


class _Inputs:
    """
    Inputs of the GP sites of a model, as a function of the arrays among its arguments.

    :param model: whose subsampled plates take their first rows.
    """

    def __init__(self, model, args, kwargs):
        self.model = FirstRows(model)
        self._leaves, self._structure = jax.tree.flatten((args, kwargs))
        self.arrays = {i: leaf for i, leaf in enumerate(self._leaves) if _is_data(leaf)}
        self._drawn: list[int] = []  # sizes of subsampled plates, of the last run

    def __call__(self, arrays: dict) -> dict:
        """Inputs by site."""
        given = [*self._leaves]
        for i, array in arrays.items():
            given[i] = array
        where = jax.tree.unflatten(self._structure, given)
        trace = messages.trace_of(self.model, *where, at_site=messages.at_prior_mean)
        plates = (s["args"] for s in trace.values() if s["type"] == "plate")
        self._drawn = [size for size, some in plates if some not in (None, size)]
        sites = {name: s for name, s in trace.items() if messages.is_latent_gp(s)}
        return {name: messages.unwrap(s["fn"])[0].X for name, s in sites.items()}

    def not_by_row(self, gp_sites) -> dict[str, int]:
        """Sites whose inputs are made otherwise than number by number, with their rows."""
        try:
            program, shapes = jax.make_jaxpr(self, return_shape=True)(self.arrays)
        except NEEDS_KNOWN_DATA:  # codes of groups, most often
            kinds = {i: a for i, a in self.arrays.items() if a.dtype.kind == "f"}
            self.arrays = kinds
            program, shapes = jax.make_jaxpr(self, return_shape=True)(self.arrays)
        mixed = _mixed(program.jaxpr, program.jaxpr.invars)
        outputs = zip(sorted(shapes), program.jaxpr.outvars, strict=True)  # as of a dict
        return {k: shapes[k].shape[-2] for k, v in outputs if v in mixed and k in gp_sites}

    def with_rows(self, name: str, number: int) -> dict:
        """Arrays with the rows that a site has, or draws its rows from, by their place."""
        jax.eval_shape(self, self.arrays)
        sizes, found = self._drawn, {}
        for i, array in self.arrays.items():
            if len(array) not in (number, *sizes):
                continue
            shorter = jax.ShapeDtypeStruct((len(array) - 1, *array.shape[1:]), array.dtype)
            try:
                shapes = jax.eval_shape(self, {**self.arrays, i: shorter})
            except Exception:  # it goes with the others
                found[i] = array
            else:
                if shapes[name].shape[-2] != number or self._drawn != sizes:
                    found[i] = array
        return found

    def move(self, name: str, rows: dict) -> bool:
        """Whether other numbers in one row change nine of ten others, or more."""
        number = max(len(a) for a in rows.values())
        if number > _MOST:
            with suppress(Exception):  # of a plate whose size is a number in the model
                return self._move(name, rows, np.linspace(0, number - 1, _MOST).astype(int))
        return number <= _LARGE and self._move(name, rows, slice(None))

    def _move(self, name, rows, some):
        given = {i: np.asarray(a) for i, a in self.arrays.items()}
        given |= {i: given[i][some] for i in rows}
        number = max(len(given[i]) for i in rows)
        program = shared(lambda arrays: self(arrays)[name], True)
        before = np.asarray(program(given))
        rounding = 100 * np.finfo(before.dtype).eps * np.abs(before)
        for i, row, sign in itertools.product(rows, (0, number // 2, number - 1), (1, -1)):
            after = np.asarray(program({**given, i: _with_far_row(given[i], row, sign)}))
            far = np.abs(after - before) > rounding
            far = (far | (np.isnan(after) != np.isnan(before))).any(-1)
            others = np.arange(far.shape[-1]) != row
            if np.mean(far.reshape(-1, far.shape[-1]).any(0)[others]) >= 0.9:
                return True
        return False


def _is_data(leaf) -> bool:
    if not isinstance(leaf, np.ndarray | jax.Array) or not not_jax_tracer(leaf):
        return False
    return leaf.ndim > 0 and leaf.dtype.kind in "fi"


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


def _with_far_row(array, row, sign):
    """A row that is as many times further away than the others as there are rows."""
    array, kind = np.array(array), array.dtype
    low, high = array.min(0), array.max(0)
    size = np.maximum(high.astype(float) - low, 1.0) * len(array)
    far = (high if sign > 0 else low) + sign * size
    if kind.kind == "i":
        far = np.clip(far, -(2.0**30), 2.0**30)
    array[row] = far.astype(kind)
    return array

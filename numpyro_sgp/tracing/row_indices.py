"""
Whether what a model indexes has as many entries as the index asks for: arrays that it takes
rows of, ``y[idx]``, as many as their plate, and effects, ``b[group]``, as many as groups.
"""

import functools
import warnings
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive, jaxprs_in_params
from numpyro import handlers
from numpyro.infer import init_to_sample
from numpyro.primitives import Messenger
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp._programs import NEEDS_KNOWN_DATA
from numpyro_sgp.distributions.arguments import has_no_numbers, is_frame, named_arguments
from numpyro_sgp.tracing import messages

_PLATE_INDEX = Primitive("plate_index")  # marks the index of a plate in a program
_PLATE_INDEX.def_abstract_eval(
    lambda _, *, plate, size, length: jax.core.ShapedArray((length,), jnp.result_type(int))
)
_OF_GP = Primitive("value_of_gp")  # marks values of GP sites
_OF_GP.def_abstract_eval(lambda value: value)
# What leaves numbers as they are.
_SAME = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call")
_ARITHMETIC = ("add", "sub", "mul", "min", "max", "clamp", "rem", "select_n")
_NEVER = object()  # whether an index is negative
_COMPUTED = object()  # an index that is computed from that of a plate, idx + 1
_MADE = object()  # an array made of data


class _Index(NamedTuple):
    """The index of a plate."""

    plate: str
    size: int
    length: int


class _Codes(NamedTuple):
    """Whole numbers of the data, and which leaf of the arguments they are."""

    values: np.ndarray
    leaf: int | None


class _FromEnd(NamedTuple):
    """The same as they count from the end of an array."""

    codes: _Codes


class TakenRows(NamedTuple):
    """
    What a model takes by the index of a plate.

    :param any: whether there are arrays of which rows are taken so.
    :param drawn: plates that draw a minibatch of the rows by themselves: name, number of
        rows, and size.
    :param inputs: whether GP sites are at rows that one of these draws.
    :param loops: beside that, whether values of GP sites go through loops that may not end
        (solvers).
    """

    any: bool = False
    drawn: tuple[tuple[str, int, int], ...] = ()
    inputs: bool = False
    loops: bool = False


def check_row_indices(model, args, kwargs, held: dict | None = None) -> TakenRows:
    """
    JAX clamps indices: in ``y[idx]`` a y that is shorter than the plate repeats its last
    value, and of a longer one the tail is never used. So the model's program is looked at
    for arrays that are indexed by the index of a plate, as it is, and have another length;
    one may be longer that is taken by ``idx + 1`` too. So are codes of groups that are an
    argument: ``b[group]`` with codes from 1 is without an error too. Nothing is compiled.

    :param held: values that latents beside f are given, by name: of fewer groups, maybe,
        than the model has with these arguments.
    :raises ValueError: naming the array, its length, the plate and its size; or the codes.
    """
    found = _look(model, args, kwargs, held) if held else None
    if found is None:  # it may not run with these values
        found = _look(model, args, kwargs)
    return TakenRows() if found is None else found


def check_codes(model, args, kwargs, held: dict | None = None) -> None:
    """
    :func:`check_row_indices` of arguments to predict at, if any may be codes of groups.
    """
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_frame)
    if any(is_frame(leaf) or _codes(leaf, None) is not None for leaf in leaves):
        check_row_indices(model, args, kwargs, held)


def _look(model, args, kwargs, held: dict | None = None) -> TakenRows | None:
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {
        i: leaf
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array | np.ndarray) and not has_no_numbers(leaf)
    }
    # Codes may be made of these, as g - 1: they are known.
    whole = {i for i, leaf in arrays.items() if _is_whole(leaf)}

    def run(flag, arrays, known=nullcontext):
        given = [*leaves]
        for i, array in arrays.items():
            given[i] = array
        args, kwargs = jax.tree.unflatten(structure, given)
        at_mean = messages.AtGPSites(messages.at_prior_mean)
        with handlers.block(), at_mean, handlers.substitute(substitute_fn=start):
            with handlers.seed(rng_seed=0), _Mark(flag, inputs), known():
                model(*args, **kwargs)

    def start(site):
        return held[site["name"]] if held and site["name"] in held else _start(site)

    def traced(arrays, **options):
        inputs.clear()
        return jax.make_jaxpr(functools.partial(run, **options))(True, arrays)

    inputs: set[int] = set()
    traced_arrays = {i: v for i, v in arrays.items() if i not in whole}
    try:
        try:
            closed = traced(traced_arrays)
        except NEEDS_KNOWN_DATA:  # of what it computes from its data
            traced_arrays = {}
            try:
                closed = traced(traced_arrays)
            except NEEDS_KNOWN_DATA:
                closed = traced(traced_arrays, known=jax.ensure_compile_time_eval)
    except Exception:  # it runs with known indices only, or will fail and tell why
        return None
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    codes = {var: _codes(value, None) for var, value in constants.items()}
    # The first input is what marks.
    constants |= zip(closed.jaxpr.invars[1:], traced_arrays.values(), strict=True)
    codes = {var: value for var, value in codes.items() if value is not None}
    taken = list(_taken(closed.jaxpr, codes, constants))
    of_plates = [found for found in taken if isinstance(found[0], _Index)]
    of_codes = [found for found in taken if isinstance(found[0], _Codes)]
    lagged = [array for index, array, *_ in taken if index is _COMPUTED]
    for index, _, shape, axis in of_codes:
        _check_codes(index, shape[axis], model, args, kwargs)
    for index, array, shape, axis in of_plates:
        # More rows than a plate has are a mistake of data only.
        longer = shape[axis] > index.size and array is not None
        longer = longer and not any(array is known for known in lagged)
        if shape[axis] < index.size or longer:
            raise ValueError(
                _told(index, shape, axis, _name(model, args, kwargs, array, shape))
            )
    drawn = {(i.plate, i.length, i.size) for i, *_ in of_plates if i.length < i.size}
    return TakenRows(
        any=bool(of_plates),
        drawn=(*drawn,),
        inputs=any(number in inputs for _, number, _ in drawn),
        loops=_loops(closed.jaxpr, set()),
    )


def _is_whole(leaf) -> bool:
    """Whether codes may be made of an array."""
    if not not_jax_tracer(leaf) or not leaf.ndim or leaf.dtype.kind == "b":
        return False
    if leaf.dtype.kind in "iu" or leaf.ndim > 1:
        return leaf.dtype.kind in "iu"
    values = np.asarray(leaf)
    return bool(np.all(values == np.floor(values)))


def _codes(value, leaf) -> _Codes | None:
    """Whole numbers of an array that is known; of no single number, as ``f[-1]`` has."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind not in ("i", "u") or not not_jax_tracer(value) or not np.ndim(value):
        return None
    return _Codes(np.asarray(value), leaf) if np.size(value) else None


def _check_codes(codes, size, model, args, kwargs):
    """
    Warns of codes below zero that are an argument: they count from the end, as in Python.

    :raises ValueError: if codes are beyond the entries that there are.
    """
    values = codes.values
    low, high = int(values.min()), int(values.max())
    if 0 <= low and high < size:
        return
    leaves = _named_leaves(model, args, kwargs)
    names = [name for name, leaf in leaves if np.array_equal(leaf, values)]
    if high < size:
        if names:
            warnings.warn(
                f"Codes of argument '{names[0]}' go from {low} to {high}, and the model "
                f"takes entries of an array with {size} of them by these: those below zero "
                "are counted from its end. pandas has -1 for missing categories; an entry "
                "for these is b.at[codes].get(mode='fill', fill_value=0.0, "
                "wrap_negative_indices=False).",
                stacklevel=find_stack_level(),
            )
        return
    what = f"argument '{names[0]}'" if names else "an array of the model"
    raise ValueError(
        f"The model takes entries of an array with {size} of them by {what}, whose codes "
        f"go from {low} to {high}. They are counted from 0 to {size - 1}, and JAX would "
        "take the last entry for what is beyond, without an error. names, group = "
        "np.unique(codes, return_inverse=True) makes such codes of any. Where some are "
        "beyond on purpose (a new group, filled neighbours): b.at[codes].get(mode='fill', "
        "fill_value=0.0)."
    )


def _told(index, shape, axis, name):
    what = f"an array of shape {shape}" if name is None else f"argument '{name}'"
    length = f"{shape[axis]} rows" if axis == 0 else f"length {shape[axis]} in axis {axis}"
    wrong = (
        "its last value would be repeated"
        if shape[axis] < index.size
        else f"all after the first {index.size} would be left out"
    )
    return (
        f"The model takes rows of {what} by the index of plate '{index.plate}', which has "
        f"the size {index.size}, but {what} has {length}: {wrong}, without an error from "
        "JAX. Give data with as many rows as the plate has (of lags y[:-1], say). (Where "
        "the model is given batches of rows, as by fit, it needs no index.)"
    )


def _name(model, args, kwargs, array, shape):
    """The name of the argument that an array is, or may be by its shape."""
    leaves = _named_leaves(model, args, kwargs)
    same = [n for n, v in leaves if array is not None and getattr(v, "_in_jax", v) is array]
    alike = [n for n, v in leaves if np.shape(v) == shape]
    return same[0] if same else alike[0] if len(alike) == 1 else None


def _named_leaves(model, args, kwargs):
    return [
        (name, leaf)
        for name, value in named_arguments(model, args, kwargs)
        for leaf in jax.tree.leaves(value)
    ]


class _Mark(Messenger):
    """
    Marks the indices of plates, and hides the values of parameters and latents, so that
    what is known in the program is data.

    :param flag: what is traced.
    :param inputs: numbers of rows of GP sites; added to.
    """

    def __init__(self, flag, inputs):
        self.flag, self.inputs = flag, inputs
        super().__init__()

    def process_message(self, msg):
        if msg["type"] != "plate":
            return
        size, length = msg["args"]
        length = size if length is None else length
        if length == size or msg["value"] is None:  # or a handler chose the rows
            msg["value"] = _PLATE_INDEX.bind(
                self.flag, plate=msg["name"], size=int(size), length=int(length)
            )

    def postprocess_message(self, msg):
        if messages.is_latent_gp(msg):
            self.inputs.add(messages.unwrap(msg["fn"])[0].event_shape[0])
            msg["value"] = _OF_GP.bind(msg["value"])
        if msg["type"] == "param" or (msg["type"] == "sample" and not msg["is_observed"]):
            msg["value"] = jax.tree.map(lambda v: jnp.where(self.flag, v, v), msg["value"])


def _start(site):
    """Values of latents beside GPs."""
    latent = site["type"] == "sample" and not site["is_observed"]
    return init_to_sample(site) if latent and not messages.is_latent_gp(site) else None


def _taken(jaxpr, known, constants):
    """
    Index, array (if it is known), its shape and the axis, wherever entries of an array are
    taken by a plate's index.

    :param known: what is known of the variables: an :class:`_Index`, :data:`_NEVER`, or a
        list of what is known of the columns; added to.
    :param constants: arrays by variable, :data:`_MADE` for those made of others; added to.
    """

    def of(atom):
        return None if isinstance(atom, Literal) else known.get(atom)

    def value(atom):
        return atom.val if isinstance(atom, Literal) else constants.get(atom)

    for eqn in jaxpr.eqns:
        name, params, inputs = eqn.primitive.name, eqn.params, eqn.invars
        found = [of(atom) for atom in inputs]
        if name == _PLATE_INDEX.name:
            known[eqn.outvars[0]] = _Index(**params)
        elif not any(v is not None for v in found):
            if all(value(atom) is not None for atom in inputs):
                constants |= dict.fromkeys(eqn.outvars, _MADE)
            continue
        elif name in _SAME and not isinstance(found[0], list):
            known[eqn.outvars[0]] = found[0]
        elif name == "lt" and isinstance(found[0], _Index | _Codes):
            zero = value(inputs[1])
            if zero is not None and zero is not _MADE and not np.any(zero):
                known[eqn.outvars[0]] = _NEVER
        elif name == "add" and isinstance(found[0], _Codes):
            known[eqn.outvars[0]] = _FromEnd(found[0])
        elif name == "select_n" and _is_index(found):
            known[eqn.outvars[0]] = found[1]
        elif name in _ARITHMETIC and any(_is_of_plate(v) for v in found):
            known[eqn.outvars[0]] = _COMPUTED
        elif name == "concatenate" and all(v.aval.shape[-1:] == (1,) for v in inputs):
            if params["dimension"] == len(inputs[0].aval.shape) - 1:
                known[eqn.outvars[0]] = found
        elif name in ("gather", "dynamic_slice"):
            if name == "gather":
                axes = params["dimension_numbers"].start_index_map
                indices = found[1] if isinstance(found[1], list) else [found[1]]
                if params["mode"] != jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS:
                    # What is beyond has been thought of.
                    indices = [None if isinstance(i, _Codes) else i for i in indices]
            else:
                axes, indices = range(len(found) - 1), found[1:]
            if len(axes) == len(indices):
                shape = inputs[0].aval.shape
                for axis, index in zip(axes, indices, strict=True):
                    taken = isinstance(index, _Codes) or _is_of_plate(index)
                    if taken and params["slice_sizes"][axis] == 1:
                        yield index, value(inputs[0]), shape, axis
        elif name in _CALLS or name in ("scan", "cond"):
            yield from _taken_inside(eqn, found, [value(a) for a in inputs], known)


def _is_of_plate(index) -> bool:
    return isinstance(index, _Index) or index is _COMPUTED


def _is_index(found) -> bool:
    """Whether a choice is between an index and the same counted from the end."""
    if isinstance(found[1], _Codes):
        return isinstance(found[2], _FromEnd) and found[2].codes is found[1]
    return found[0] is _NEVER


def _taken_inside(eqn, found, values, known):
    """The same of a program inside of the program."""
    name, params = eqn.primitive.name, eqn.params
    atoms = eqn.invars
    if name == "cond":
        atoms, found, values = atoms[1:], found[1:], values[1:]
    for inner in jaxprs_in_params(params):
        if len(inner.invars) != len(found):
            continue
        seen, arrays = {}, {}
        for var, outer, told, array in zip(inner.invars, atoms, found, values, strict=True):
            sliced = var.aval.shape != outer.aval.shape
            if told is not None and (sliced or name != "scan"):  # what is carried changes
                seen[var] = told
            if array is not None and not sliced:
                arrays[var] = array
        yield from _taken(inner, seen, arrays)
        if name in _CALLS:
            for out, atom in zip(eqn.outvars, inner.outvars, strict=True):
                if not isinstance(atom, Literal) and atom in seen:
                    known[out] = seen[atom]


def _loops(jaxpr, of_gp: set) -> bool:
    """
    Whether values of GP sites go through loops whose end depends on numbers.

    :param of_gp: variables that are made of them; added to.
    """
    for eqn in jaxpr.eqns:
        is_of_gp = [not isinstance(v, Literal) and v in of_gp for v in eqn.invars]
        inner = list(jaxprs_in_params(eqn.params))
        if eqn.primitive is not _OF_GP and not any(is_of_gp):
            if any(_loops(part, set()) for part in inner):  # sites inside of it
                return True
            continue
        if eqn.primitive.name == "while":
            return True
        for part in inner:
            made = part.invars
            if len(made) == len(is_of_gp):
                made = [v for v, is_one in zip(made, is_of_gp, strict=True) if is_one]
            if _loops(part, set(made)):
                return True
        of_gp.update(eqn.outvars)
    return False

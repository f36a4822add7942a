"""What a model computes now: whether programs that were made of it before are still its."""

import dataclasses
import functools
import hashlib
import inspect
import re
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpyro.primitives import Messenger

from numpyro_sgp._programs import forget, join_static
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.trees import is_number, is_plain

# Of distributions of others, what predictions and scores ask for.
_ASKED = "mean", "variance", "probs", "cdf", "icdf"
_MOST = 128  # shapes of arguments of one model
_PLAIN = bool, int, float, complex, str, bytes, np.generic, type(None)
_ARRAYS = jax.Array | np.ndarray | jax.ShapeDtypeStruct
_DEEPEST = 8  # objects inside of each other
_RUNNING: ContextVar[tuple] = ContextVar("running", default=())
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MANY = 10_000  # numbers of an array of JAX from which on its digest is kept
_DIGESTS: dict[int, tuple] = {}  # of such arrays, by identity, with what knows them


def state_of(model: Callable, args: tuple, kwargs: dict) -> Hashable:
    """
    Something that is another one where the model computes other things of arguments of
    these shapes than it did before, whatever it reads beside them: globals, what it closes
    over, objects and files. The model is traced for that, and nothing is compiled: the
    operations, and the numbers in them, are what this is a digest of.

    :param model: a function of ``args`` and ``kwargs``, whose arrays may be shapes alone.
    :return: bytes; an object that is equal to itself alone where the model cannot be
        traced, as it asks for numbers in its arguments.
    """
    try:
        return _digest(*_traced(model, args, kwargs))
    except Exception:  # which the model raises again, in earnest
        return object()


def _traced(model, args, kwargs) -> tuple[ClosedJaxpr, list]:
    """Its program, and what tells it from others beside that."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, _ARRAYS) for leaf in leaves]
    arrays = [leaf for leaf, known in zip(leaves, is_array, strict=True) if known]
    like = [jax.ShapeDtypeStruct(*shape_of(a)) for a in arrays]
    notes: list = []

    def computed(arrays):
        notes.clear()
        given = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        found = [next(given) if known else leaf for leaf, known in pairs]
        given = jax.tree.unflatten(structure, found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what runs it in earnest tells of them
            at_site = messages.at_prior_mean
            trace = messages.trace_of(_Drawn(model), *given, at_site=at_site)
            return [_parts(site, notes) for site in trace.values()]

    return jax.make_jaxpr(computed)(like), notes


class States:
    """
    :func:`state_of` a model at some arguments, looked at once for each of their shapes.

    :param model: the model.
    """

    def __init__(self, model: Callable):
        self._model, self._known = model, {}

    def __call__(self, arrays: list, static: tuple) -> Hashable:
        """
        :param arrays: arrays among the model's arguments, or shapes.
        :param static: what else there is, of
            :func:`~numpyro_sgp._programs.split_static`.
        """
        shapes = tuple(map(shape_of, arrays))
        found = self._known.get((shapes, static))
        if found is None:
            found = state_of(self._model, *join_static(arrays, static))
            self._known[shapes, static] = found
        return found


@contextmanager
def running(model: Callable) -> Iterator[States]:
    """While a model is used by one call: its :class:`States`, the same for all within."""
    which = id(getattr(model, "__self__", model)), getattr(model, "__func__", None)
    known = next((states for other, states in _RUNNING.get() if other == which), None)
    if known is not None:
        yield known
        return
    states = States(model)
    token = _RUNNING.set((*_RUNNING.get(), (which, states)))
    try:
        yield states
    finally:
        _RUNNING.reset(token)


class Epochs:
    """
    Since when a model computes what it computes now, at shapes at which it was seen before.
    """

    def __init__(self):
        self._seen: OrderedDict = OrderedDict()  # states since then, the last seen last
        self._epoch = object()

    def at(self, states: States, arrays: list, static: tuple) -> Hashable:
        """
        The same as in the call before, whatever the shapes were there, if the model
        computes at these what it did, or, at new ones, at those seen last; else another
        one. An object that is equal to itself alone where the model cannot be traced.

        :param arrays: arrays among the model's arguments, or shapes.
        :param static: what else there is, of
            :func:`~numpyro_sgp._programs.split_static`.
        """
        found = states(arrays, static)
        if not isinstance(found, bytes):
            return found
        shapes = tuple(map(shape_of, arrays))
        before = self._seen.pop((shapes, static), None)
        now: Hashable = found
        if before is None and self._seen:
            (last, beside), before = next(reversed(self._seen.items()))
            now = states([jax.ShapeDtypeStruct(*s) for s in last], beside)
        if before not in (None, now):
            self._seen.clear()
            self._epoch = object()
        self._seen[shapes, static] = found
        forget(self._seen, _MOST)
        return self._epoch


def shape_of(array) -> tuple:
    """Shape and dtype."""
    return np.shape(array), jax.dtypes.result_type(array)


def kind_of(arrays) -> tuple:
    """Shapes but for the numbers in them: which axes are as long as which others."""
    seen: dict[int, int] = {}
    shapes = [(jax.dtypes.result_type(a), np.shape(a)) for a in arrays]
    return tuple(
        (dtype, *(seen.setdefault(n, len(seen)) for n in shape)) for dtype, shape in shapes
    )


class _Drawn(Messenger):
    """
    Values of what is not observed: of distributions of others, whose draws may read what
    only they know, draws; zeros of those of NumPyro and of what cannot be drawn.
    """

    def process_message(self, msg):
        has_value = msg["type"] != "sample" or msg["value"] is not None
        if has_value or messages.is_latent_gp(msg):
            return
        fn, given = msg["fn"], {**msg["kwargs"], "rng_key": jax.random.key(0)}
        given.pop("sample_intermediates", None)
        if not is_plain(fn):
            with suppress(Exception):
                msg["value"] = fn(*msg["args"], **given)
                return
        is_discrete = getattr(fn.support, "is_discrete", False)
        dtype = jnp.result_type(int if is_discrete else float)
        msg["value"] = jnp.zeros(fn.shape(msg["kwargs"]["sample_shape"]), dtype)


def _parts(site, notes: list) -> list:
    """Numbers of a site; what else tells it from others is noted."""
    frames = [(f.name, f.dim, f.size) for f in site.get("cond_indep_stack", ())]
    notes.append((site["type"], site["name"], site.get("is_observed"), frames))
    leaves = jax.tree.leaves((site["value"], site.get("fn"), site.get("scale")))
    found = [leaf for leaf in leaves if is_number(leaf)]
    if site["type"] != "sample":
        return found
    beside: list = []
    are_known = is_plain(site["fn"], beside)
    notes.append(beside)
    if are_known:  # by their numbers and options
        return found
    if messages.is_latent_gp(site):
        prior = messages.unwrap(site["fn"])[0]
        return [*found, prior.mean, prior.kernel(prior.X, prior.X), prior.variance]
    found.append(messages.log_prob(site))
    fn = messages.innermost(site["fn"])
    for name in _ASKED:
        with suppress(Exception):  # which it may not have
            part = getattr(fn, name)
            found.append(part(site["value"]) if callable(part) else part)
    return found


def _digest(closed: ClosedJaxpr, notes: list) -> bytes:
    found = hashlib.blake2b(_ADDRESS.sub("", f"{closed.jaxpr} {notes}").encode())
    for part in _constants(closed):
        if callable(part):
            found.update(repr(_told(part)).encode())
            continue
        if jax.dtypes.issubdtype(jax.dtypes.result_type(part), jax.dtypes.prng_key):
            part = jax.random.key_data(part)
        found.update(_digest_of(part))
    return found.digest()


def _told(part, depth=0) -> Any:
    """
    What tells a function that a program calls back from another one: its code and what that
    closes over. Globals and attributes are looked up when it is called.

    :raises TypeError: if that is not known.
    """
    if isinstance(part, _PLAIN):
        return type(part), repr(part)
    if isinstance(part, jax.Array | np.ndarray):
        return _digest_of(part)
    if depth > _DEEPEST:
        raise TypeError
    inside = functools.partial(_told, depth=depth + 1)
    if isinstance(part, tuple | list):
        return type(part), *map(inside, part)
    if isinstance(part, dict):
        return [(inside(key), inside(value)) for key, value in part.items()]
    if isinstance(part, functools.partial):
        return "partial", *map(inside, (part.func, part.args, part.keywords))
    if inspect.ismethod(part):
        return "method", inside(part.__func__), inside(part.__self__)
    if inspect.isfunction(part):
        closed = [cell.cell_contents for cell in part.__closure__ or ()]
        given = closed, part.__defaults__, part.__kwdefaults__
        return inside(part.__code__), inside(given)
    if isinstance(part, CodeType):
        return part.co_code, part.co_names, inside(part.co_consts)
    if isinstance(part, jax.tree_util.PyTreeDef | type):
        return str(part)
    names = [field.name for field in dataclasses.fields(part)] if is_dataclass(part) else []
    return type(part), inside({k: getattr(part, k) for k in names} or vars(part))


def _constants(part: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """What is known in a program, and in those within: arrays, and what it calls back."""
    jaxpr = part
    if isinstance(part, ClosedJaxpr):
        jaxpr = part.jaxpr
        yield from part.consts
    literals = [*jaxpr.outvars]
    for eqn in jaxpr.eqns:
        literals += eqn.invars
        if "callback" in eqn.primitive.name and "debug" not in eqn.primitive.name:
            yield eqn.params["callback"]
        for within in jax.tree.leaves([*eqn.params.values()], is_leaf=_is_program):
            if _is_program(within):
                yield from _constants(within)
    yield from (v.val for v in literals if isinstance(v, Literal))


def _is_program(part) -> bool:
    return isinstance(part, ClosedJaxpr | Jaxpr)


def _digest_of(array) -> bytes:
    """Of the numbers in an array; of one of JAX, whose never change, looked at once."""
    is_kept = isinstance(array, jax.Array) and array.size > _MANY
    known = _DIGESTS.get(id(array)) if is_kept else None
    if known is not None and known[0]() is array:
        return known[1]
    values = np.ascontiguousarray(array)
    head = f"{values.dtype} {values.shape}".encode()
    found = hashlib.blake2b(head + values.tobytes()).digest()
    if is_kept:
        place = id(array)
        gone = weakref.ref(array, lambda _: _DIGESTS.pop(place, None))
        _DIGESTS[place] = gone, found
    return found

"""What a model computes now: whether programs that were made of it before are still its."""

import hashlib
import re
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from numpyro_sgp._programs import forget, join_static, split_static
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.row_axes import is_number

#: Packages whose distributions are known by their numbers and options,
_KNOWN = __package__.split(".")[0], "numpyro", "builtins", "jax", "jaxlib", "numpy"
# and of those of others, what predictions and scores ask for.
_ASKED = "mean", "variance", "probs", "cdf", "icdf"
_FIRST: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # shapes, by model
_MOST = 128  # kinds of arguments of one model
_RUNNING: ContextVar[tuple] = ContextVar("running", default=())
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MANY = 10_000  # numbers of an array of JAX from which on its digest is kept
_DIGESTS: dict[int, tuple] = {}  # of such arrays, by identity, with what knows them


def state_of(model: Callable, args: tuple, kwargs: dict) -> Hashable:
    """
    Something that is another one where the model computes other things of its arguments
    than it did before, whatever it reads beside them: globals, what it closes over, objects
    and files. The model is traced for that, at the shapes that its first arguments of this
    kind had, and nothing is compiled: the operations, and the numbers in them, are what
    this is a digest of.

    :param model: a function of ``args`` and ``kwargs``.
    :return: something that is equal to itself alone where the model cannot be traced, as it
        asks for numbers in its arguments.
    """
    try:
        return _digest(*_traced(model, args, kwargs))
    except Exception:  # which the model raises again, in earnest
        return object()


def _traced(model, args, kwargs) -> tuple[ClosedJaxpr, list]:
    """Its program, and what tells it from others beside that."""
    arrays, static = split_static((args, kwargs))
    like = [jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.result_type(a)) for a in arrays]
    with suppress(TypeError):  # a model without a hash, or weak references
        which, owner = _which(model), getattr(model, "__self__", model)
        first = _FIRST.setdefault(owner, OrderedDict())
        like = first.setdefault((which[1], static, kind_of(arrays)), like)
        forget(first, _MOST)
    notes: list = []

    def computed(arrays):
        notes.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what runs it in earnest tells of them
            trace = messages.trace_of(
                model, *join_static(arrays, static), at_site=messages.at_prior_mean
            )
            return [_parts(site, notes) for site in trace.values()]

    return jax.make_jaxpr(computed)(like), notes


@contextmanager
def running(
    model: Callable | None, args: tuple = (), kwargs: dict | None = None, state=None
) -> Iterator[Hashable]:
    """
    While the model may be run: its :func:`state_of`, looked at once, for all within.

    :param model: None for none.
    :param state: if it is known.
    """
    known = current(model)
    if model is None or known is not None:
        yield known
        return
    state = state_of(model, args, kwargs or {}) if state is None else state
    token = _RUNNING.set((*_RUNNING.get(), (_which(model), state)))
    try:
        yield state
    finally:
        _RUNNING.reset(token)


def current(model: Callable | None) -> Hashable:
    """The state of a model that is :func:`running`; None if it is not."""
    which = _which(model)
    return next((state for other, state in _RUNNING.get() if other == which), None)


def kind_of(arrays) -> tuple:
    """Shapes but for the numbers in them: which axes are as long as which others."""
    seen: dict[int, int] = {}
    shapes = [(jax.dtypes.result_type(a), np.shape(a)) for a in arrays]
    return tuple(
        (dtype, *(seen.setdefault(n, len(seen)) for n in shape)) for dtype, shape in shapes
    )


def _which(model) -> tuple:
    """Which model that is: bound methods are made at each access."""
    return id(getattr(model, "__self__", model)), getattr(model, "__func__", None)


def _parts(site, notes: list) -> list:
    """Numbers of a site; what else tells it from others is noted."""
    frames = [(f.name, f.dim, f.size) for f in site.get("cond_indep_stack", ())]
    notes.append((site["type"], site["name"], site.get("is_observed"), frames))
    leaves = jax.tree.leaves((site["value"], site.get("fn"), site.get("scale")))
    found = [leaf for leaf in leaves if is_number(leaf)]
    if site["type"] != "sample":
        return found
    beside: list = []
    are_known = _look_beside(jax.tree.structure(site["fn"]), beside)
    notes.append(beside)
    if messages.is_latent_gp(site):
        prior = messages.unwrap(site["fn"])[0]
        return [*found, prior.mean, prior.kernel(prior.X, prior.X), prior.variance]
    if are_known:  # by their numbers and options
        return found
    found.append(messages.log_prob(site))
    fn = messages.innermost(site["fn"])
    for name in _ASKED:
        with suppress(Exception):  # which it may not have
            part = getattr(fn, name)
            found.append(part(site["value"]) if callable(part) else part)
    return found


def _look_beside(structure, notes: list) -> bool:
    """
    Notes what a tree is made of beside its leaves, classes and plain options; whether all
    of it is NumPyro's or of this package, and no function.
    """
    kind, beside = structure.node_data() or (None, None)
    options = jax.tree.leaves(beside)
    notes.append((kind, [part for part in options if isinstance(part, bool | int | str)]))
    of = getattr(kind, "__module__", "builtins").split(".")[0]
    are_known = of in _KNOWN and not any(map(_is_others, options))
    return all([are_known, *(_look_beside(c, notes) for c in structure.children())])


def _is_others(part) -> bool:
    """Whether an option is code, or an object, of a user."""
    module = getattr(part, "__module__", None) or type(part).__module__
    return module.split(".")[0] not in _KNOWN


def _digest(closed: ClosedJaxpr, notes: list) -> bytes:
    found = hashlib.blake2b(_ADDRESS.sub("", f"{closed.jaxpr} {notes}").encode())
    for constant in _constants(closed):
        if jax.dtypes.issubdtype(jax.dtypes.result_type(constant), jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
        found.update(_digest_of(constant))
    return found.digest()


def _constants(part: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """Arrays that are known in a program, and in those within."""
    jaxpr = part
    if isinstance(part, ClosedJaxpr):
        jaxpr = part.jaxpr
        yield from part.consts
    literals = [*jaxpr.outvars]
    for eqn in jaxpr.eqns:
        literals += eqn.invars
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

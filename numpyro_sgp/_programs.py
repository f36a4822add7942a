"""Compiled programs, shared by all that does the same."""

import functools
import hashlib
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro.distributions import Distribution

from numpyro_sgp._equality import computed_once
from numpyro_sgp._threads import few_cores

_COMPILED: OrderedDict = OrderedDict()  # by what they are compiled from
_KEPT = 256  # of these, those used last
FEW = 64  # of the programs of one function
_NUMBERS = jax.Array | np.ndarray | np.number | float
_CONTAINERS = None, type(None), tuple, list, dict, jax.tree_util.Partial
_BESIDE = ThreadPoolExecutor(2, "compile")
_BY_OPERATION: ContextVar[bool] = ContextVar("by_operation", default=False)

# Compiles in half of the time on a CPU what then runs as fast.
_PLAIN = "xla_cpu_use_fusion_emitters", False
# Programs that run once, or a few times for a moment, are compiled in a quarter of that.
_QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# Those that run a thousand times for a moment: in half of their time, for a third more.
_OFTEN = _QUICK | {"xla_backend_optimization_level": 1}
# Each part of a program brings its own functions: one part takes a fifth less in all.
_WHOLE = "xla_cpu_parallel_codegen_split_count", 1

# Calls of LAPACK for a batch of matrices wait in a thread of a pool for tasks that the same
# pool has: side by side, as many of them as it has threads wait for ever (jaxlib 0.10).
_IN_TURN = "xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
_BATCH = re.compile(r"custom_call @lapack_[^\n]*: \(tensor<\d+x\d+x\d+x")


def _options(briefly: bool, often: bool, batches: bool) -> dict[str, Any] | None:
    """
    Options of the compiler, None for none.

    :param batches: whether LAPACK may be called for batches of matrices.
    """
    if not _on_cpu():
        return None
    found = _if_known(_PLAIN) | (_if_known(_IN_TURN) if batches else {})
    if briefly:
        found |= (_OFTEN if often else _QUICK) | (_if_known(_WHOLE) if few_cores() else {})
    return found or None


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


@functools.cache
def _if_known(options: tuple) -> dict[str, Any]:
    """One option, if this jaxlib has it (not all versions do)."""
    try:
        jax.jit(lambda: 0).lower().compile(dict([options]))
    except jax.errors.JaxRuntimeError:
        return {}
    return dict([options])


class shared:  # noqa: N801, as jax.jit
    """
    ``fn`` compiled, as by :func:`jax.jit`, but not again where a program that does the same
    has been compiled for whatever function: closures of another guide, with other data of
    the same shapes, are traced and find their program here.

    :param fn: a function of trees of arrays.
    :param briefly: whether it is to be compiled soon rather than to run fast.
    :param often: whether it runs a thousand times for all that.
    """

    def __init__(self, fn, briefly=False, often=False):
        self._fn = fn
        self._haste = briefly, often
        self._programs = OrderedDict()

    def __call__(self, *args):
        leaves, structure = jax.tree.flatten(args)
        if any(map(_is_traced, leaves)):
            return self._fn(*args)
        with jax.disable_jit(False):  # or what is compiled could not be called
            program, out = self._known(leaves, structure)
            return jax.tree.unflatten(out, program.result()(*leaves))

    def prepare(self, *args) -> None:
        """Traces the program for such arguments; a thread beside this one compiles it."""
        leaves, structure = jax.tree.flatten(args)
        if not any(map(_is_traced, leaves)):
            with jax.disable_jit(False):
                self._known(leaves, structure, beside=True)

    def _known(self, leaves, structure, beside=False):
        key = structure, tuple(map(_seen, leaves)), _where()
        known = self._programs.pop(key, None) or self._compile(leaves, structure, beside)
        self._programs[key] = known  # as the one used last
        forget(self._programs, FEW)
        return known

    def _compile(self, leaves, structure, beside):
        out = None

        def run(*leaves):
            nonlocal out
            found, out = jax.tree.flatten(self._fn(*jax.tree.unflatten(structure, leaves)))
            return found

        traced = jax.jit(run, keep_unused=True).trace(*leaves)
        same = used_alone(traced.jaxpr)
        same = computed_once(same) if _on_cpu() else same
        if same is not traced.jaxpr:
            traced = jax.jit(jaxpr_as_fun(same), keep_unused=True).trace(*leaves)
        lowered = traced.lower()
        text = lowered.as_text()
        options = _options(*self._haste, bool(_BATCH.search(text)))
        main = text[text.index("@main(") :].split("->")[0]
        # What is not in the text cannot be told apart by it.
        if "callback" in text or "__elided__" in text or main.count("%arg") != len(leaves):
            return _start(lowered, options, beside), out
        seen = *map(_seen, leaves), options, jax.config.jax_default_device
        key = hashlib.sha256(repr((text, *seen)).encode()).digest()
        known = _COMPILED.pop(key, None)
        if known is None or (known.done() and known.exception() is not None):
            known = _start(lowered, options, beside)
        _COMPILED[key] = known  # as the one used last
        forget(_COMPILED, _KEPT)
        return known, out


def forget(programs: OrderedDict, most: int) -> None:
    """Those that were used longest ago, where there are more."""
    while len(programs) > most:
        programs.popitem(last=False)


def used_alone(closed: ClosedJaxpr) -> ClosedJaxpr:
    """
    The same program without what no result is made of. XLA leaves it out by itself, but JAX
    would lower it first: a key that is split for a value that is there already takes 20 ms.
    """
    jaxpr = closed.jaxpr
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return closed if len(used.eqns) == len(jaxpr.eqns) else closed.replace(jaxpr=used)


def _start(lowered, options, beside) -> Future:
    """Begins to compile, in this thread or in one beside it."""
    if beside:
        return _BESIDE.submit(lowered.compile, options)
    done: Future = Future()
    done.set_result(lowered.compile(options))
    return done


def _where() -> tuple:
    """What a program is compiled for beside its arguments."""
    config: Any = jax.config
    return (
        config.jax_default_device,
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
        config.jax_threefry_partitionable,
        config.jax_default_prng_impl,
        jax.sharding.get_abstract_mesh(),
    )


def _seen(leaf):
    """What a program is compiled for of an argument."""
    if isinstance(leaf, jax.Array):
        return leaf.aval, leaf.sharding
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))


def without_leaks(fn, *args):
    """
    ``fn(*args)``, in which :func:`one_program` may return objects that hide traced values
    where JAX does not see them (kernels of other classes, functions): then operation by
    operation.
    """
    try:
        return fn(*args)
    except jax.errors.UnexpectedTracerError:
        token = _BY_OPERATION.set(True)
        try:
            return fn(*args)
        finally:
            _BY_OPERATION.reset(token)


def one_program(fn, *trees, briefly=True):
    """
    ``fn(*trees)`` by one :class:`shared` program; operation by operation where it needs to
    know values.

    :param trees: trees of arrays.
    :param briefly: whether it is to be compiled soon rather than to run fast.
    :return: what ``fn`` returns, which may have distributions and anything else in it.
    """
    return begun(fn, *trees, briefly=briefly, beside=False)()


def begun(fn, *trees, briefly=True, beside=True) -> Callable:
    """
    :func:`one_program`, to be called for what it returns; until then it is compiled beside
    what else is done.
    """
    if _BY_OPERATION.get():
        return functools.partial(fn, *trees)
    program = shared(lambda *trees: _Filled(fn(*trees)), briefly)

    def finish():
        try:
            return program(*trees).whole()
        except NEEDS_KNOWN_DATA:
            return fn(*trees)

    if beside:
        with suppress(*NEEDS_KNOWN_DATA):
            program.prepare(*trees)
    return finish


def split(key, number: int) -> list:
    """Keys of ``jax.random.split``, by a program that is compiled soon."""
    return one_program(lambda key: list(jax.random.split(key, number)), key)


@jax.tree_util.register_pytree_node_class
class _Filled:
    """What a function returned, whose children are what was traced of it."""

    def __init__(self, found):
        self._leaves, self._structure = jax.tree.flatten(found, is_leaf=_is_known)

    def tree_flatten(self):
        traced = [leaf for leaf in self._leaves if _is_traced(leaf)]
        fixed = [None if _is_traced(leaf) else (leaf,) for leaf in self._leaves]
        return traced, (fixed, self._structure)

    @classmethod
    def tree_unflatten(cls, rest, values):
        new, values = object.__new__(cls), iter(values)
        fixed, new._structure = rest
        new._leaves = [next(values) if leaf is None else leaf[0] for leaf in fixed]
        return new

    def whole(self):
        """
        What the function returned.

        :raises NotImplementedError: if there is a distribution that JAX cannot put together
            again.
        """
        try:
            return jax.tree.unflatten(self._structure, self._leaves)
        except AttributeError as error:  # HurdleNegativeBinomial2 of NumPyro 0.22
            raise NotImplementedError(
                "A distribution of the model is none that jax.jit can return: as a pytree "
                f"it cannot be put together again ({error}). Use another that is the same, "
                "such as HurdleDistribution(NegativeBinomial2(mean, concentration), "
                "gate=gate) for HurdleNegativeBinomial2."
            ) from error


class at_once:  # noqa: N801, as jax.jit
    """
    ``fn`` by one program where all that it is given is known arrays and numbers, in objects
    of this package and containers of Python. By operation otherwise: where it has to know
    values, and where code of others is run, which may read what a program would not see
    change, or hide traced values (kernels and mean functions of one's own).

    :param fn: a function of trees, and of what else can be hashed (``static``); what it
        returns may have anything in it.
    """

    def __init__(self, fn):
        self._fn, self._kept = fn, OrderedDict()

    def __call__(self, *trees, static=(), briefly=True):
        leaves, structure = jax.tree.flatten(trees)
        is_array = [isinstance(leaf, _NUMBERS) for leaf in leaves]  # not sizes, options
        given = zip(leaves, is_array, strict=True)
        fixed = tuple(None if known else leaf for leaf, known in given)
        by_operation = _BY_OPERATION.get() or jax.config.jax_disable_jit
        # Of a mesh that is set its devices are not known inside of a program's trace.
        by_operation = by_operation or not jax.sharding.get_abstract_mesh().empty
        plain = all(map(_is_plain, fixed)) and _is_plain(structure)
        if by_operation or not plain or any(map(_is_traced, leaves)):
            return self._fn(*trees, *static)
        arrays, places = _each_once(
            [leaf for leaf, known in zip(leaves, is_array, strict=True) if known]
        )
        run = self._run(structure, fixed, static, briefly, places)
        try:
            return run(arrays).whole()
        except NEEDS_KNOWN_DATA:
            return self._fn(*trees, *static)

    def _run(self, structure, fixed, static, briefly, places):
        key = structure, fixed, static, briefly, places
        run = self._kept.pop(key, None)
        if run is None:

            def filled(arrays):
                given = (arrays[place] for place in places)
                leaves = [next(given) if leaf is None else leaf for leaf in fixed]
                return _Filled(self._fn(*jax.tree.unflatten(structure, leaves), *static))

            run = shared(filled, briefly)
        self._kept[key] = run  # as the one used last
        forget(self._kept, FEW)
        return run


def _each_once(arrays: list) -> tuple[list, tuple[int, ...]]:
    """
    Arrays without those that are the same object as one before, as code may ask
    (``X2 is X1``), and where each of them is.
    """
    where: dict[int, int] = {}
    places = []
    for i, array in enumerate(arrays):
        places.append(where.setdefault(id(array) if np.ndim(array) else -i - 1, len(where)))
    found = dict(zip(places, arrays, strict=True))
    return [found[place] for place in range(len(where))], tuple(places)


def _is_plain(part) -> bool:
    """Whether a part of a tree that is no array is of this package, or of Python's own."""
    if isinstance(part, jax.tree_util.PyTreeDef):
        kind, rest = part.node_data() or (None, None)
        ours = kind in _CONTAINERS or _is_ours(kind)
        return ours and _is_plain(rest) and all(map(_is_plain, part.children()))
    if isinstance(part, dict):
        return all(map(_is_plain, part.values()))
    if isinstance(part, tuple | list):
        return all(map(_is_plain, part))
    if inspect.isfunction(part):
        return _is_ours(part) and part.__closure__ is None
    plain = str | type | np.dtype | np.number | bool | int | float
    return part is None or isinstance(part, plain)


def _is_ours(part) -> bool:
    return part.__module__.split(".")[0] == __package__


def on_data(fn, args, kwargs, *trees, briefly=True):
    """
    ``fn(args, kwargs, *trees)`` by :func:`one_program`, where ``args`` and ``kwargs`` are a
    model's, of which arrays are arguments of the program and all else is as it is.
    """
    return begun_on_data(fn, args, kwargs, *trees, briefly=briefly, beside=False)()


def begun_on_data(fn, args, kwargs, *trees, briefly=True, beside=True) -> Callable:
    """:func:`on_data`, to be called for what it returns, as :func:`begun`."""
    data = Data(args, kwargs)

    def run(arrays, *trees):
        return fn(*data.filled(arrays), *trees)

    return begun(run, data.arrays, *trees, briefly=briefly, beside=beside)


class Data:
    """
    Arguments of a model, of which arrays are arguments of programs too: as constants they
    take long to compile, and the program is of these numbers only.

    :param args: positional ones.
    :param kwargs: those by name.
    :param known: whether arrays are constants all the same, for models that look at them.
    """

    def __init__(self, args, kwargs, known=False):
        self._leaves, self._structure = jax.tree.flatten((args, kwargs))
        pairs = enumerate(self._leaves)
        self._places = [] if known else [i for i, leaf in pairs if is_data(leaf)]

    @property
    def arrays(self) -> list:
        """What a program is given."""
        return [self._leaves[i] for i in self._places]

    @property
    def size(self) -> int:
        """How many numbers they have."""
        return sum(map(np.size, self.arrays))

    def filled(self, arrays):
        """The arguments, ``(args, kwargs)``, with these arrays in them."""
        values = dict(enumerate(self._leaves))
        values |= dict(zip(self._places, arrays, strict=True))
        return jax.tree.unflatten(self._structure, values.values())


def _is_traced(leaf) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _is_known(node) -> bool:
    """Whether a distribution has nothing traced in it; some lose what is no array."""
    is_fn = isinstance(node, Distribution)
    return is_fn and not any(map(_is_traced, jax.tree.leaves(node)))


def is_data(leaf) -> bool:
    """Whether an argument of a model is an array of numbers, and no number."""
    numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    return (numbers or isinstance(leaf, jax.Array)) and np.ndim(leaf) > 0


def mapped(fn, inputs, chunk: int):
    """``fn`` of each entry along the leading axis of ``inputs``, so many at a time."""
    if chunk < len(jax.tree.leaves(inputs)[0]):
        return jax.lax.map(fn, inputs, batch_size=chunk)
    return jax.vmap(fn)(inputs)  # a loop is compiled anew in each call


#: What JAX raises where a program asks for the values of its arguments.
NEEDS_KNOWN_DATA = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def all_static(tree) -> tuple:
    """As the second of :func:`split_static` with nothing traced, and without a hash."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((type(leaf), leaf) for leaf in leaves)


class NoHash(TypeError):
    """An argument is neither an array nor something that can be compared."""


def split_static(tree) -> tuple[list, tuple]:
    """
    The arrays of a tree, and all else in it as something that can be hashed.

    :raises TypeError: if something that is not an array has no hash.
    """
    leaves, structure = jax.tree.flatten(tree)
    fixed = [None if _is_array(leaf) else _static(leaf) for leaf in leaves]
    for leaf, value in zip(fixed, leaves, strict=True):
        try:
            hash(leaf)
        except TypeError:
            raise NoHash(
                f"An argument of the model has a {type(value).__name__}, which is neither "
                "an array nor hashable, so that it could not be seen whether a compiled "
                "program fits it. Pass arrays, numbers, strings, functions or tuples."
            ) from None
    return [leaf for leaf in leaves if _is_array(leaf)], (structure, tuple(fixed))


def join_static(arrays: list, static: tuple):
    """The inverse of :func:`split_static`."""
    structure, fixed = static
    given = iter(arrays)
    leaves = [next(given) if leaf is None else _of_static(*leaf) for leaf in fixed]
    return jax.tree.unflatten(structure, leaves)


def _is_array(leaf) -> bool:
    """Whether JAX takes it as an array."""
    known = isinstance(leaf, np.ndarray) and leaf.dtype.kind != "b"
    is_text = known and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.number)
    return isinstance(leaf, jax.Array | np.ndarray) and not is_text


def _static(leaf) -> tuple:
    """Its type, and a value with a hash: of an array of texts, these and its shape."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind != "O":
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
    return type(leaf), leaf


def _of_static(kind, value, shape=None, content=b""):
    """The inverse of :func:`_static`."""
    return value if shape is None else np.frombuffer(content, value).reshape(shape)

"""What a function reads beside its arguments, to see whether it has changed."""

import dis
import functools
import hashlib
import inspect
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import jax
import numpy as np
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import Messenger

_MOST = 1_000  # parts that are looked at, of each name
_DEEPEST = 50  # inside of each other
_ALIASES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model, of states
_MOST_ALIASES = 64
_RUNNING: ContextVar[tuple] = ContextVar("running", default=())
_MANY = 10_000  # numbers of an array, of which those of larger ones are not
_CONTAINERS = (dict, tuple, list, set, frozenset, deque)
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


def read_beside(fn: Callable) -> tuple:
    """
    Something that can be hashed, and is another where numbers, arrays or objects that
    ``fn`` reads have other values: globals and what it closes over, attributes of objects,
    and those of functions that it calls of its own module. Of arrays with more than 10,000
    entries it is told that they are others, not that numbers in them are; nor is what lies
    deeper than 50 objects, or beyond the first 1,000 parts of what a name stands for.

    :param fn: a function, a method, a partial or an object that is called.
    """
    return _Reader().of_function(fn)


@contextmanager
def running(model: Callable | None) -> Iterator[Any]:
    """
    While ``model`` may be run: what stands for what it reads beside its arguments. What
    itself changes of that meanwhile (a list of calls) is no other state.

    :param model: a function as in :func:`read_beside`; None for none.
    """
    if model is None:
        yield ()
        return
    owner = getattr(model, "__self__", model)  # bound methods are made at each access
    which = id(owner), getattr(model, "__func__", None)
    for other, state in _RUNNING.get():
        if other == which:  # run by what asks for this
            yield state
            return
    try:
        aliases = _ALIASES.setdefault(owner, {})
    except TypeError:  # without a hash, or weak references
        aliases = {}
    now = read_beside(model)
    state = aliases.get(now, now)
    token = _RUNNING.set((*_RUNNING.get(), (which, state)))
    try:
        yield state
    finally:
        _RUNNING.reset(token)
        now = read_beside(model)
        if now != state and aliases.get(now) != state:
            aliases[now] = state
            if len(aliases) > _MOST_ALIASES:
                del aliases[next(iter(aliases))]


class _Reader:
    """Looks at each part once, and at no more than some of each name."""

    def __init__(self):
        self._seen: dict[Any, tuple] = {}  # by identity, in which order, and the part
        self._most, self._depth = _MOST, 0

    def of_function(self, fn: Any) -> tuple:
        if isinstance(fn, functools.partial):
            parts = fn.args, fn.keywords
            return "partial", self.of_function(fn.func), *map(self.told, parts)
        if inspect.ismethod(fn):
            return "method", self._of_method(fn.__func__, fn.__self__)
        if inspect.isfunction(fn):
            return "function", self._of_code(fn)
        # Handlers read theirs in methods that nothing names.
        is_ours = type(fn).__module__.startswith(__package__)
        every = self.told(fn) if is_ours or isinstance(fn, Messenger) else ()
        return "object", type(fn), self._of_method(type(fn).__call__, fn), every

    def _of_code(self, fn) -> Any:
        if (known := self._known(fn)) is not None:
            return fn.__code__, known
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        closed = tuple((name, self._of_name(_in_cell(cell), fn)) for name, cell in cells)
        within, read = fn.__globals__, _globals_of(fn.__code__)
        found = tuple((k, self._of_name(within[k], fn)) for k in read if k in within)
        given = map(self.told, (fn.__defaults__, fn.__kwdefaults__, fn.__dict__))
        return fn.__code__, closed, found, *given

    def _of_name(self, value, fn) -> Any:
        """What a name of a function stands for; of a module of the user's what it names."""
        before, self._most = self._most, len(self._seen) + _MOST
        if isinstance(value, ModuleType) and _is_users(value.__name__):
            of = vars(value)
            names = sorted(_names(fn.__code__).intersection(of))
            found: Any = _Same(value), *((k, self.told(of[k], of)) for k in names)
        else:
            found = self.told(value, fn.__globals__)
        self._most = before
        return found

    def _of_method(self, fn, itself) -> Any:
        """What a method reads of its object, and the methods that it names."""
        if not inspect.isfunction(fn):
            return _Same(itself)
        if (fn.__code__, id(itself)) in self._seen:
            return fn.__code__
        self._seen[fn.__code__, id(itself)] = len(self._seen), itself
        own, found = _attributes(itself), []
        names = own if _hands_on(fn.__code__) else own.keys() & _names(fn.__code__)
        for name in sorted(names):
            found.append((name, self._of_name(own[name], fn)))
        for name in sorted(_names(fn.__code__) - own.keys()):
            part = inspect.getattr_static(type(itself), name, None)
            part = part.fget if isinstance(part, property) else part
            if inspect.isfunction(part):
                found.append((name, self._of_method(part, itself)))
            elif part is not None and not callable(part):
                found.append((name, self.told(part)))
        return self._of_code(fn), tuple(found), self._of_class(type(itself))

    def _of_class(self, kind: type) -> Any:
        """Attributes and methods of a class of the user's, and of its bases."""
        found = []
        for each in kind.__mro__:
            if _is_users(each.__module__) and self._known(each) is None:
                within = vars(sys.modules.get(each.__module__, kind))
                for name, part in list(vars(each).items()):
                    part = part.fget if isinstance(part, property) else part
                    part = getattr(part, "__func__", part)  # of static and class methods
                    if name in ("__call__", "__getitem__") or not name.startswith("__"):
                        found.append((name, self.told(part, within)))
        return (kind, *found)

    def told(self, value: Any, within: dict | None = None) -> Any:
        if self._depth >= _DEEPEST:
            return _Same(value)
        self._depth += 1
        try:
            return self._told(value, within)
        finally:
            self._depth -= 1

    def _told(self, value, within) -> Any:
        kind = type(value)
        if isinstance(value, type):
            return _Same(value), self._of_class(value)
        if isinstance(value, _PLAIN):
            return kind, repr(value)
        if isinstance(value, jax.Array | np.ndarray):
            return _of_array(value)
        if isinstance(value, ModuleType) or _is_result(value):
            return _Same(value)
        if (known := self._known(value)) is not None:
            return known
        if isinstance(value, functools.partial):
            return self.of_function(value)
        if inspect.isfunction(value) or inspect.ismethod(value):
            ours = within is None or getattr(value, "__globals__", None) is within
            del self._seen[id(value)]
            return self.of_function(value) if ours else _Same(value)
        if hasattr(kind, "to_numpy"):  # columns of pandas and the like
            columns = value.columns if hasattr(kind, "columns") else ()
            each = (value[k] for k in columns) if len(columns) else (value,)
            parts = tuple(self.told(np.asarray(part.to_numpy())) for part in each)
            return kind, tuple(map(str, columns)), parts
        own = _attributes(value)
        of_class = self._of_class(kind)
        every = () if kind in _CONTAINERS else (of_class, self.told(own))
        if isinstance(value, dict):
            pairs = ((self.told(k), self.told(v, within)) for k, v in value.items())
            return kind, tuple(pairs), every
        if isinstance(value, tuple | list | set | frozenset | deque):
            return kind, tuple(self.told(part, within) for part in value), every
        return every if own or len(of_class) > 1 else _Same(value)

    def _known(self, value) -> Any:
        """What stands for a part that was looked at, or is one too many; else None."""
        if id(value) in self._seen:
            return "seen", self._seen[id(value)][0]
        if len(self._seen) >= self._most:
            return _Same(value)
        # Held, so that no other one has its place.
        self._seen[id(value)] = len(self._seen), value
        return None


class _Same:
    """Equal to itself alone, and to nothing once the object is gone."""

    def __init__(self, value):
        self._hash = hash((type(value), id(value)))
        try:
            self._get = weakref.ref(value)
        except TypeError:
            self._get = functools.partial(_itself, value)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        if not isinstance(other, _Same):
            return NotImplemented
        mine = self._get()
        return self is other or (mine is not None and mine is other._get())


def _itself(value):
    return value


def _is_result(value) -> bool:
    """A guide or a fit, which is looked at by what asks for it."""
    rooms = f"{__package__}.fitting", f"{__package__}.integrated"
    return isinstance(value, AutoGuide) or type(value).__module__.startswith(rooms)


@functools.lru_cache(1000)
def _is_users(module: str) -> bool:
    """Whether a module is neither of Python nor installed, nor of this package."""
    if module.split(".")[0] == __package__:
        return False
    if module in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    installed = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return not any(Path(file).is_relative_to(path) for path in installed)


def _of_array(value) -> Any:
    is_gone = isinstance(value, jax.core.Tracer) or (
        isinstance(value, jax.Array) and value.is_deleted()
    )
    if is_gone or value.size > _MANY or value.dtype == object:
        return _Same(value)
    kind = type(value), str(value.dtype), np.shape(value)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, np.ma.MaskedArray):
        return *kind, _of_array(value.data), _of_array(np.ma.getmaskarray(value))
    return *kind, hashlib.sha256(np.asarray(value).tobytes()).digest()


def _attributes(value: Any) -> dict:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


@functools.lru_cache(1000)
def _names(code: CodeType) -> frozenset[str]:
    """Names that a function, or one inside of it, may look up."""
    return frozenset(code.co_names).union(*map(_names, _inside(code)))


@functools.lru_cache(1000)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Those that it looks up among globals."""
    steps = dis.get_instructions(code)
    found = {i.argval for i in steps if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return tuple(sorted(found.union(*map(_globals_of, _inside(code)))))


@functools.lru_cache(1000)
def _hands_on(code: CodeType) -> bool:
    """Whether a method has its object for more than attributes that it names."""
    if not code.co_argcount:
        return False
    itself, steps = code.co_varnames[0], list(dis.get_instructions(code))
    if itself in code.co_cellvars:  # for functions inside of it
        return True
    for step, after in zip(steps, steps[1:], strict=False):
        told = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith("LOAD_FAST") and itself in told:
            if not after.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")):
                return True
            if isinstance(step.argval, tuple) and told[-1] != itself:
                return True
    return False


def _inside(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _in_cell(cell):
    try:
        return cell.cell_contents
    except ValueError:  # nothing as yet
        return None

"""What a function reads beside its arguments, to see whether it has changed."""

import dis
import functools
import hashlib
import inspect
import weakref
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import jax
import numpy as np
from numpyro.primitives import Messenger

_MOST = 2_000  # parts that are looked at
_MANY = 10_000  # numbers of an array, of which those of larger ones are not
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None), type)


def read_beside(fn: Callable) -> tuple:
    """
    Something that can be hashed, and is another where numbers, arrays or objects that
    ``fn`` reads have other values: globals and what it closes over, attributes of objects,
    and those of functions that it calls of its own module. Of arrays with more than 10,000
    entries it is told that they are others, not that numbers in them are.

    :param fn: a function, a method, a partial or an object that is called.
    """
    return _Reader().of_function(fn)


class _Reader:
    """Looks at each part once, and at no more than some."""

    def __init__(self):
        self._seen = {}

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
        if self._is_known(fn):
            return fn.__code__
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        closed = tuple((name, self.told(_in_cell(cell))) for name, cell in cells)
        within, read = fn.__globals__, _globals_of(fn.__code__)
        found = ((k, self.told(within[k], within)) for k in read if k in within)
        given = map(self.told, (fn.__defaults__, fn.__kwdefaults__))
        return fn.__code__, closed, tuple(found), *given

    def _of_method(self, fn, itself) -> Any:
        """What a method reads of its object, and the methods that it names."""
        if not inspect.isfunction(fn):
            return _Same(itself)
        if (fn.__code__, id(itself)) in self._seen:
            return fn.__code__
        self._seen[fn.__code__, id(itself)] = itself
        own, found = _attributes(itself), []
        for name in sorted(_names(fn.__code__)):
            if name in own:
                found.append((name, self.told(own[name], fn.__globals__)))
                continue
            part = inspect.getattr_static(type(itself), name, None)
            part = part.fget if isinstance(part, property) else part
            if inspect.isfunction(part):
                found.append((name, self._of_method(part, itself)))
            elif part is not None and not callable(part):
                found.append((name, self.told(part)))
        return self._of_code(fn), tuple(found)

    def told(self, value: Any, within: dict | None = None) -> Any:
        kind = type(value)
        if isinstance(value, _PLAIN):
            return kind, repr(value)
        if isinstance(value, jax.Array | np.ndarray):
            return _of_array(value)
        if isinstance(value, ModuleType) or self._is_known(value):
            return _Same(value)
        if isinstance(value, dict):
            pairs = ((self.told(k), self.told(v, within)) for k, v in value.items())
            return kind, tuple(pairs)
        if isinstance(value, tuple | list | set | frozenset):
            return kind, tuple(self.told(part, within) for part in value)
        if isinstance(value, functools.partial):
            return self.of_function(value)
        if inspect.isfunction(value) or inspect.ismethod(value):
            ours = within is None or getattr(value, "__globals__", None) is within
            del self._seen[id(value)]
            return self.of_function(value) if ours else _Same(value)
        own = _attributes(value)
        return (kind, self.told(own)) if own else _Same(value)

    def _is_known(self, value) -> bool:
        """Whether a part has been looked at, or is one too many."""
        if id(value) in self._seen or len(self._seen) >= _MOST:
            return True
        self._seen[id(value)] = value  # held, so that no other one has its place
        return False


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


def _of_array(value) -> Any:
    is_gone = isinstance(value, jax.core.Tracer) or (
        isinstance(value, jax.Array) and value.is_deleted()
    )
    if is_gone or value.size > _MANY or value.dtype == object:
        return _Same(value)
    kind = type(value), str(value.dtype), np.shape(value)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
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


def _inside(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _in_cell(cell):
    try:
        return cell.cell_contents
    except ValueError:  # nothing as yet
        return None

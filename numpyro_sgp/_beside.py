"""What a function reads beside its arguments, to see whether it has changed."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import jax
import numpy as np

_DEEP = 6  # functions, objects and containers within others
_MANY = 10_000  # numbers of an array, or entries of a container, that are looked at
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None), type)


def read_beside(fn: Callable) -> tuple:
    """
    Something that can be hashed, and is another where numbers, arrays or objects that
    ``fn`` reads have other values: globals and what it closes over, attributes of objects,
    and those of functions that it calls of its own module. Of arrays with more than 10,000
    entries it is told that they are others, not that numbers in them are.

    :param fn: a function, a method, a partial or an object that is called.
    """
    return _of_function(fn, _DEEP)


def _of_function(fn: Any, deep: int) -> tuple:
    if isinstance(fn, functools.partial):
        return "partial", _of_function(fn.func, deep), _told((fn.args, fn.keywords), deep)
    if inspect.ismethod(fn):
        return "method", _of_function(fn.__func__, deep), _told(fn.__self__, deep)
    if not inspect.isfunction(fn):
        return "object", type(fn), _told(fn, deep)
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    found = {name: _in_cell(cell) for name, cell in cells}
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            found[name] = fn.__globals__[name]
    found["defaults"] = fn.__defaults__, fn.__kwdefaults__
    within = fn.__globals__
    told = ((k, _told(v, deep, within)) for k, v in sorted(found.items()))
    return fn.__code__, tuple(told)


def _names(code: CodeType) -> set[str]:
    """Names that a function, or one inside of it, may look up among globals."""
    found = set(code.co_names)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found |= _names(part)
    return found


def _in_cell(cell):
    try:
        return cell.cell_contents
    except ValueError:  # nothing as yet
        return None


def _told(value: Any, deep: int, within: dict | None = None) -> tuple:
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, repr(value)
    if isinstance(value, ModuleType) or isinstance(value, jax.core.Tracer):
        return kind, id(value)
    if isinstance(value, jax.Array | np.ndarray):
        if value.size > _MANY or value.dtype == object:
            return kind, id(value), np.shape(value)
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        numbers = np.asarray(value)
        digest = hashlib.sha256(numbers.tobytes()).digest()
        return kind, numbers.shape, str(numbers.dtype), digest
    if deep == 0:
        return kind, id(value)
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, tuple | list | set | frozenset):
        if len(value) > _MANY:
            return kind, id(value), len(value)
        return kind, tuple(_told(part, deep - 1, within) for part in value)
    if inspect.isfunction(value) or inspect.ismethod(value):
        if within is None or getattr(value, "__globals__", None) is within:
            return kind, _of_function(value, deep - 1)
        return kind, id(value)
    return kind, _of_object(value, deep - 1)


def _of_object(value: Any, deep: int) -> tuple | int:
    if not hasattr(value, "__dict__"):
        return id(value)
    return _told(vars(value), deep)

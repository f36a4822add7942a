"""Model code as a program that is traced once and run with values given later."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal, Primitive
from numpyro.ops.provenance import track_deps_jaxpr, track_deps_rules

#: Where a value may be given.
OPENING = Primitive("opening")
OPENING.def_abstract_eval(lambda *_, shape, dtype, **__: jax.core.ShapedArray(shape, dtype))
track_deps_rules[OPENING] = lambda eqn, origins: [
    frozenset([eqn.params["key"]] if eqn.invars else []).union(*origins)
]


def opening(key, shape: tuple[int, ...], dtype) -> Array:
    """A value that is to be given under ``key`` when the :class:`Program` is run."""
    return OPENING.bind(key=key, shape=tuple(shape), dtype=dtype)


def watched(key, value: Array) -> Array:
    """
    The same value, in whose place another may be given under ``key``; what depends on it is
    known (:attr:`Program.origins`).
    """
    return OPENING.bind(value, key=key, shape=value.shape, dtype=value.dtype)


class Program:
    """
    What Python code computes, with its openings: Python runs once, however often the
    program is run, under whichever transformations.

    :param run: a function without arguments, which may use outer tracers.
    """

    def __init__(self, run: Callable[[], Any]):
        closed, shapes = jax.make_jaxpr(run, return_shape=True)()
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        self._structure = jax.tree.structure(shapes)
        origins = track_deps_jaxpr(self._jaxpr, [])
        #: For each output the keys of the watched values that it depends on.
        self.origins = jax.tree.unflatten(self._structure, origins)
        # What an equation is the last to use need not be kept after it.
        self._done = []
        last = {v for v in self._jaxpr.outvars if not isinstance(v, Literal)}
        for eqn in reversed(self._jaxpr.eqns):
            used = {v for v in eqn.invars if not isinstance(v, Literal)}
            self._done.append(used - last)
            last |= used
        self._done.reverse()

    def __call__(self, given: dict):
        """
        :param given: values by the keys of openings; those left out are zero.
        :return: what ``run`` returned, with these.
        """
        known = dict(zip(self._jaxpr.constvars, self._consts, strict=True))

        def read(atom):
            return atom.val if isinstance(atom, Literal) else known[atom]

        for eqn, done in zip(self._jaxpr.eqns, self._done, strict=True):
            values = [read(atom) for atom in eqn.invars]
            if eqn.primitive is OPENING:
                found = [_fitting(given.get(eqn.params["key"]), *values, **eqn.params)]
            else:
                found = bound(eqn.primitive, eqn.params, values)
            known.update(zip(eqn.outvars, found, strict=True))
            for var in done:
                del known[var]
        return jax.tree.unflatten(self._structure, map(read, self._jaxpr.outvars))


def bound(primitive, params: dict, values) -> list:
    """What an operation of a traced program returns for some values."""
    found = primitive.bind(*values, **primitive.get_bind_params(params))
    return found if primitive.multiple_results else [found]


def _fitting(given, *own, shape, dtype, **_):
    if given is None:
        return own[0] if own else jnp.zeros(shape, dtype)
    given = jnp.broadcast_to(given, shape)
    return given if given.dtype == dtype else given.astype(dtype)

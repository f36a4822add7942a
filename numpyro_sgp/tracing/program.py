"""Model code as a program that is traced once and run with values given later."""

from collections.abc import Callable, Hashable, Iterable
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
        self.closed, self.structure = closed, jax.tree.structure(shapes)
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        origins = track_deps_jaxpr(self._jaxpr, [])
        #: For each output the keys of the watched values that it depends on.
        self.origins = jax.tree.unflatten(self.structure, origins)
        # What an equation is the last to use need not be kept after it.
        self._done = []
        last = {v for v in self._jaxpr.outvars if not isinstance(v, Literal)}
        for eqn in reversed(self._jaxpr.eqns):
            used = _variables(eqn)
            self._done.append(used - last)
            last |= used
        self._done.reverse()

    def __call__(self, given: dict):
        """
        :param given: values by the keys of openings; those left out are zero.
        :return: what ``run`` returned, with these.
        """
        return self.begun(given)({})

    def begun(self, given: dict, later: Iterable[Hashable] = ()) -> Callable[[dict], Any]:
        """
        The rest of the program, with all computed that some openings are not needed for.

        :param given: values by the keys of openings; those left out are zero.
        :param later: keys of the openings whose values are given to what is returned, which
            returns what ``run`` returned.
        """
        keys, waiting, unknown = frozenset(later), set(), set()
        for number, eqn in enumerate(self._jaxpr.eqns):
            is_late = eqn.primitive is OPENING and eqn.params["key"] in keys
            if is_late or not unknown.isdisjoint(_variables(eqn)):
                waiting.add(number)
                unknown.update(eqn.outvars)
        kept = set().union(*(_variables(self._jaxpr.eqns[number]) for number in waiting))
        known = dict(zip(self._jaxpr.constvars, self._consts, strict=True))

        def run(known, given, numbers, kept):
            for number in numbers:
                eqn = self._jaxpr.eqns[number]
                values = [_read(atom, known) for atom in eqn.invars]
                if eqn.primitive is OPENING:
                    found = [_fitting(given.get(eqn.params["key"]), *values, **eqn.params)]
                else:
                    found = bound(eqn.primitive, eqn.params, values)
                known.update(zip(eqn.outvars, found, strict=True))
                for var in self._done[number] - kept:
                    del known[var]

        numbers = range(len(self._jaxpr.eqns))
        run(known, given, [n for n in numbers if n not in waiting], kept)

        def rest(given):
            values = dict(known)
            run(values, given, sorted(waiting), kept - unknown)
            found = [_read(atom, values) for atom in self._jaxpr.outvars]
            return jax.tree.unflatten(self.structure, found)

        return rest


def _variables(eqn) -> set:
    return {v for v in eqn.invars if not isinstance(v, Literal)}


def _read(atom, known: dict):
    return atom.val if isinstance(atom, Literal) else known[atom]


def bound(primitive, params: dict, values) -> list:
    """What an operation of a traced program returns for some values."""
    found = primitive.bind(*values, **primitive.get_bind_params(params))
    return found if primitive.multiple_results else [found]


def _fitting(given, *own, shape, dtype, **_):
    if given is None:
        return own[0] if own else jnp.zeros(shape, dtype)
    given = jnp.broadcast_to(given, shape)
    return given if given.dtype == dtype else given.astype(dtype)

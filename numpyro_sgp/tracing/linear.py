"""Where a program stops being linear in some of its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Literal

from numpyro_sgp.tracing.program import OPENING, Program, bound

#: Calls whose program is a part of the one that calls.
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint"})
#: Linear in all of their operands together.
_LINEAR = frozenset(
    "add sub neg add_any concatenate convert_element_type copy copy_p squeeze reshape "
    "broadcast_in_dim transpose rev slice reduce_sum cumsum expand_dims pad "
    "reduce_precision real split stack unstack".split()
)
#: Linear in the first operand, where the others are known.
_LINEAR_IN_FIRST = frozenset("div gather dynamic_slice".split())
#: Linear in each of two operands, where the other is known.
_BILINEAR = frozenset("mul dot_general".split())
#: Each of the numbers that come out is made of one number of the operand that is not known.
_BY_NUMBER = frozenset(
    "add sub neg add_any mul div select_n convert_element_type copy copy_p squeeze reshape "
    "broadcast_in_dim expand_dims reduce_precision".split()
)


@dataclass(eq=False)
class _Value:
    """A value of the program; known by identity."""

    aval: Any
    known: Any = None  # where it is a constant
    is_known: bool = False


@dataclass(eq=False)
class _Step:
    """One operation; known by identity."""

    primitive: Any
    params: dict
    operands: list
    results: list


class _Kind(NamedTuple):
    """How a value depends on the field: not at all, linearly or otherwise; and on what."""

    is_linear: bool
    labels: frozenset


class LinearProgram:
    """
    What Python code computes, traced once, and how it depends on the *field*: values that
    are opened under the keys ``field`` (:func:`~numpyro_sgp.tracing.program.opening`).

    :param run: a function without arguments, which may use outer tracers.
    :param field: keys of the openings that are the field.
    """

    def __init__(self, run: Callable[[], Any], field: Iterable[Hashable]):
        closed, shapes = jax.make_jaxpr(run, return_shape=True)()
        self._begin(closed, jax.tree.structure(shapes), field)

    @classmethod
    def of(cls, program: Program, field: Iterable[Hashable]) -> LinearProgram:
        """Of a program that was traced before."""
        new = cls.__new__(cls)
        new._begin(program.closed, program.structure, field)
        return new

    def _begin(self, closed, structure, field):
        self._structure = structure
        self._steps: list[_Step] = []
        constants = [_Value(v.aval, c, True) for v, c in _pairs(closed)]
        self._outputs = self._inline(closed.jaxpr, constants, [])
        self._kinds: dict[_Value, _Kind] = {}
        self._made_by: dict[_Value, _Step] = {}
        self._look(frozenset(field))

    # ---- reading ------------------------------------------------------------------

    def _inline(self, jaxpr, constants, operands) -> list[_Value]:
        """Adds the steps of a program; its outputs."""
        env = dict(zip(jaxpr.constvars, constants, strict=True))
        env |= dict(zip(jaxpr.invars, operands, strict=True))

        def read(atom):
            return (
                _Value(atom.aval, atom.val, True)
                if isinstance(atom, Literal)
                else env[atom]
            )

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            inner = _inner(eqn)
            if inner is not None:
                own = [_Value(v.aval, c, True) for v, c in _pairs(inner)]
                found = self._inline(inner.jaxpr, own, values)
            else:
                found = [_Value(v.aval) for v in eqn.outvars]
                self._steps.append(_Step(eqn.primitive, eqn.params, values, found))
            env.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _look(self, field):
        free = _Kind(True, frozenset())
        for step in self._steps:
            kinds = [self._kinds.get(v, free) for v in step.operands]
            labels = frozenset().union(*(k.labels for k in kinds))
            if step.primitive is OPENING and step.params["key"] in field:
                labels |= {step.params["key"]}
            is_linear = not labels or _is_linear(step, kinds)
            for value in step.results:
                self._kinds[value] = _Kind(is_linear, labels)
                self._made_by[value] = step

    # ---- what is known of it --------------------------------------------------------

    @property
    def outputs(self) -> Any:
        """The values that ``run`` returned, in its structure, for the methods below."""
        return jax.tree.unflatten(self._structure, self._outputs)

    def kind(self, value: _Value) -> _Kind:
        """Whether a value is linear in the field, and which keys of it it depends on."""
        return self._kinds.get(value, _Kind(True, frozenset()))

    def labels(self, value: _Value) -> frozenset:
        """Keys of the field that a value depends on."""
        return self.kind(value).labels

    def made_by(self, value: _Value) -> _Step:
        """The operation that a value which depends on the field is a result of."""
        return self._made_by[value]

    def steps_to(self, targets: Iterable[_Value]) -> list[_Step]:
        """The operations that targets need, in their order."""
        needed = self._needed(targets, {})
        return [step for step in self._steps if step in needed]

    def predictors(self, outputs: Iterable[_Value]) -> list[_Value]:
        """
        The values, linear in the field, from which all else follows that outputs need: the
        linear predictors of a model. A value that is made number by number of another one
        (shifted, scaled, given a further axis) is counted as that.
        """
        needed = self._needed(outputs, {})
        found: dict[_Value, None] = {}
        for step in self._steps:
            if step not in needed or self._kinds[step.results[0]].is_linear:
                continue
            for value in step.operands:
                kind = self._kinds.get(value)
                if kind is not None and kind.labels and kind.is_linear:
                    found[self._root(value)] = None
        for value in outputs:
            kind = self._kinds.get(value)
            if kind is not None and kind.labels and kind.is_linear:
                found[self._root(value)] = None
        # What is linear in others, a sum of them say, is none of its own.
        for value in reversed(list(found)):
            others = {other for other in found if other is not value}
            if not self._opens(value, others):
                del found[value]
        return list(found)

    def feeding(self, values: dict[str, _Value], outputs: Iterable[_Value]) -> list[str]:
        """Names of the values that outputs are computed from."""
        needed = self._needed(outputs, {})
        return [k for k, v in values.items() if self._made_by.get(v) in needed]

    def _opens(self, value, given) -> bool:
        """Whether a value needs openings of the field beside what is given."""
        needed = self._needed([value], given)
        return any(
            step in needed and step.primitive is OPENING and self.labels(step.results[0])
            for step in self._steps
        )

    def _root(self, value):
        while True:
            step = self._made_by[value]
            unknown = [v for v in step.operands if self.labels(v)]
            by_number = step.primitive.name in _BY_NUMBER and len(unknown) == 1
            if not by_number or step.primitive is OPENING:
                return value
            (operand,) = unknown
            if _numbers(operand) < 2 and _numbers(value) > 1:
                # One number for many: it stays what it is, and is told by its size.
                return operand
            value = operand

    # ---- running --------------------------------------------------------------------

    def _needed(self, targets, given) -> set[_Step]:
        """Steps that targets need beside what is given."""
        wanted, steps = set(targets), set()
        for step in reversed(self._steps):
            if any(v in wanted and v not in given for v in step.results):
                steps.add(step)
                wanted.update(v for v in step.operands if v not in given)
        return steps

    def boundary(self, outputs: Iterable[_Value], given: Iterable[_Value]) -> list[_Value]:
        """
        The values that do not depend on the field and are all that outputs need beside
        ``given``.
        """
        given = set(given)
        needed, found = self._needed(outputs, given), {}
        for step in self._steps:
            if step in needed and self.labels(step.results[0]):
                for value in step.operands:
                    if not value.is_known and value not in given and not self.labels(value):
                        found[value] = None
        for value in outputs:
            if not value.is_known and not self.labels(value):
                found[value] = None
        return list(found)

    def constants(self, targets: Iterable[_Value]) -> list[_Value]:
        """The numbers that targets are computed from, but for whole ones."""
        needed = self._needed(targets, {})
        found = {v: None for step in self._steps if step in needed for v in step.operands}
        return [
            value
            for value in found
            if value.is_known and jnp.issubdtype(value.aval.dtype, jnp.floating)
        ]

    def evaluate(
        self, targets: list[_Value], given: dict[_Value, Array], openings: dict
    ) -> list[Array]:
        """
        Values of the program.

        :param targets: which.
        :param given: values in the place of what the program would compute.
        :param openings: values by the keys of openings; those left out are zero.
        """
        known = dict(given)
        needed = self._needed(targets, known)

        def read(value):
            return known[value] if value in known else value.known

        for step in self._steps:
            if step not in needed:
                continue
            key = step.params.get("key")
            if step.primitive is OPENING and step.operands and key not in openings:
                found = [read(step.operands[0])]
            elif step.primitive is OPENING:
                shape, dtype = step.params["shape"], step.params["dtype"]
                value = openings.get(key, 0.0)
                found = [jnp.broadcast_to(jnp.asarray(value, dtype), shape)]
            else:
                found = bound(step.primitive, step.params, map(read, step.operands))
            for result, value in zip(step.results, found, strict=True):
                known.setdefault(result, value)
        return [read(value) for value in targets]


def _pairs(closed):
    return zip(closed.jaxpr.constvars, closed.consts, strict=True)


def _inner(eqn):
    """The program that a call stands for, None if it is an operation."""
    if eqn.primitive.name not in _INLINED:
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return inner if hasattr(inner, "consts") else None


def _numbers(value) -> int:
    return math.prod(value.aval.shape)


def _is_linear(step, kinds) -> bool:
    """Whether an operation on linear values gives linear ones."""
    if step.primitive is OPENING:
        return True
    name, unknown = step.primitive.name, [i for i, k in enumerate(kinds) if k.labels]
    if not all(kinds[i].is_linear for i in unknown):
        return False
    if not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in step.results):
        return False
    if name in _LINEAR:
        return True
    if name in _LINEAR_IN_FIRST:
        return unknown == [0]
    if name in _BILINEAR:
        return len(unknown) == 1
    if name == "select_n":
        return 0 not in unknown
    if name in ("scatter-add", "scatter_add"):
        return 1 not in unknown
    return False

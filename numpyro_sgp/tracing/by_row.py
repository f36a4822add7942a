"""Which values of a program are made, row by row, of rows of GP sites alone."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from numpyro_sgp.tracing.program import OPENING, Program

#: Each of the numbers that come out is made of the numbers there of all operands.
BY_NUMBER = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil "
    "clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp "
    "exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le lgamma "
    "log log1p logistic lt max min mul ne neg nextafter not or polygamma population_count "
    "pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor zeta".split()
)
_REDUCING = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
    "reduce_xor".split()
)
_RUNNING = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())
#: Calls of programs that compute what they return.
_CALLS = frozenset(
    "checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit "
    "remat remat2".split()
)
_DRAWING = ("random_", "threefry")


class Rows(NamedTuple):
    """How many rows a value has, and along which axis."""

    number: int
    axis: int


#: Of values that are made of other rows than their own, or of what is drawn.
MIXED = Rows(0, 0)


def rows_of_values(program: Program, given: Collection, data: list | None = None) -> Any:
    """
    Rows of values that have them, each made of the same row of openings (and of known
    numbers), by the operations that the program has; None of others. What is not known to
    be so, such as ``f[index]``, loops and what is drawn, has none.

    :param program: in which the last axis of openings under ``given`` is that of rows; what
        is made of other openings has none.
    :param given: keys of openings.
    :param data: arrays that have as many rows, with the axis of these, or None, where the
        rows may be some of all there are: other numbers for each row may be those of other
        rows then. None where the rows are all.
    :return: as what the program returns.
    """
    reader = _Reader(frozenset(given), data)
    closed = program.closed
    found = reader.read(closed.jaxpr, map(reader.constant, closed.consts), [])
    rows = [None if cell.rows == MIXED else cell.rows for cell in found]
    return jax.tree.unflatten(program.structure, rows)


@dataclass(eq=False)
class _Cell:
    """A value, and how it is made."""

    shape: tuple[int, ...]
    rows: Rows | None = None
    eqn: Any = None
    operands: tuple[_Cell, ...] = ()


class _Reader:
    def __init__(self, given, data):
        self._given, self._data = given, data

    def constant(self, value) -> _Cell:
        """Of a known array."""
        shape = jnp.shape(value)
        for array, axis in self._data or ():
            if array is value and axis is not None:
                return _Cell(shape, Rows(shape[axis], axis))
        return _Cell(shape)

    def read(self, jaxpr, constants, operands) -> list[_Cell]:
        """What a program returns."""
        cells = dict(zip(jaxpr.constvars, constants, strict=True))
        cells |= dict(zip(jaxpr.invars, operands, strict=True))

        def cell_of(atom):
            return _Cell(jnp.shape(atom.val)) if isinstance(atom, Literal) else cells[atom]

        for eqn in jaxpr.eqns:
            given = tuple(map(cell_of, eqn.invars))
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if eqn.primitive.name in _CALLS and inner is not None:
                consts = getattr(inner, "consts", ())
                of_call = getattr(inner, "jaxpr", inner)
                found = self.read(of_call, map(self.constant, consts), given)
            else:
                shapes = [v.aval.shape for v in eqn.outvars]
                found = [_Cell(shape, None, eqn, given) for shape in shapes]
                for cell in found:
                    cell.rows = self._of(cell)
            cells.update(zip(eqn.outvars, found, strict=True))
        return list(map(cell_of, jaxpr.outvars))

    def _of(self, cell) -> Rows | None:
        """None where no operand has rows."""
        name, params = cell.eqn.primitive.name, cell.eqn.params
        if cell.eqn.primitive is OPENING:
            last = len(cell.shape) - 1
            return Rows(cell.shape[-1], last) if params["key"] in self._given else MIXED
        if name.startswith(_DRAWING):
            return MIXED
        operands = [operand.rows for operand in cell.operands]
        if MIXED in operands:
            return MIXED
        if not any(operands):
            return None
        if name in BY_NUMBER:
            return self._by_number(cell, operands)
        if name in _REDUCING:
            return _reduced(params["axes"], operands[0])
        if name in _RUNNING:
            return MIXED if params["axis"] == operands[0].axis else operands[0]
        rule = getattr(self, f"_{name}", None)
        return MIXED if rule is None else rule(cell, operands)

    def _fits(self, cell, axis) -> bool:
        """Whether a known value goes with any rows along an axis of it."""
        return self._data is None or _is_uniform(cell, axis)

    # ---- by operation ---------------------------------------------------------------

    def _by_number(self, cell, operands):
        rows = {r for r in operands if r is not None}
        if len(rows) > 1:
            return MIXED
        (found,) = rows
        others = [c for c, r in zip(cell.operands, operands, strict=True) if r is None]
        return found if all(self._fits(c, found.axis) for c in others) else MIXED

    def _broadcast_in_dim(self, cell, operands):
        number, axis = operands[0]
        place = cell.eqn.params["broadcast_dimensions"][axis]
        return Rows(number, place) if cell.shape[place] == number else MIXED

    def _reshape(self, cell, operands):
        if cell.eqn.params.get("dimensions") is not None:
            return MIXED
        number, axis = operands[0]
        before = math.prod(cell.operands[0].shape[:axis])
        for place, size in enumerate(cell.shape):
            if size == number and math.prod(cell.shape[:place]) == before:
                return Rows(number, place)
        return MIXED

    def _squeeze(self, cell, operands):
        return _reduced(cell.eqn.params["dimensions"], operands[0])

    def _transpose(self, cell, operands):
        number, axis = operands[0]
        return Rows(number, cell.eqn.params["permutation"].index(axis))

    def _rev(self, cell, operands):
        turned = cell.eqn.params["dimensions"]
        return MIXED if operands[0].axis in turned else operands[0]

    def _slice(self, cell, operands):
        number, axis = operands[0]
        return operands[0] if cell.shape[axis] == number else MIXED

    def _dynamic_slice(self, cell, operands):
        number, axis = operands[0] or MIXED
        is_known = operands[0] is not None and not any(operands[1:])
        return operands[0] if is_known and cell.shape[axis] == number else MIXED

    def _pad(self, cell, operands):
        if operands[0] is None or operands[1] is not None:
            return MIXED
        none = cell.eqn.params["padding_config"][operands[0].axis] == (0, 0, 0)
        return operands[0] if none else MIXED

    def _concatenate(self, cell, operands):
        found = self._by_number(cell, operands)
        return MIXED if cell.eqn.params["dimension"] == found.axis else found

    def _stack(self, cell, operands):
        number, axis = self._by_number(cell, operands)
        return Rows(number, axis + (axis >= cell.eqn.params["axis"])) if number else MIXED

    def _unstack(self, cell, operands):
        return _reduced((cell.eqn.params["axis"],), operands[0])

    def _split(self, cell, operands):
        return MIXED if cell.eqn.params["axis"] == operands[0].axis else operands[0]

    def _sort(self, cell, operands):
        return self._concatenate(cell, operands)

    def _dot_general(self, cell, operands):
        contracted, batch = cell.eqn.params["dimension_numbers"]
        if all(operands) and any(r.axis not in batch[k] for k, r in enumerate(operands)):
            return MIXED  # each row of one with each row of the other
        places = set()
        for k, rows in enumerate(operands):
            if rows is None:
                continue
            if rows.axis in contracted[k]:
                return MIXED
            if rows.axis in batch[k]:
                place = list(batch[k]).index(rows.axis)
                other = cell.operands[1 - k]
                if operands[1 - k] is None and not self._fits(other, batch[1 - k][place]):
                    return MIXED
            else:
                taken = {*contracted[k], *batch[k]}
                before = sum(i not in taken for i in range(rows.axis))
                other = {*contracted[1 - k], *batch[1 - k]}
                first = len(cell.operands[0].shape) - len(other) if k else 0
                place = len(batch[k]) + first + before
            places.add(Rows(rows.number, place))
        return places.pop() if len(places) == 1 else MIXED


def _reduced(axes, rows):
    """Rows of what has some axes no more."""
    if rows.axis in axes:
        return MIXED
    return Rows(rows.number, rows.axis - sum(a < rows.axis for a in axes))


def _is_uniform(cell, axis) -> bool:
    """Whether a value is the same along an axis, by how it is made."""
    if not cell.shape or cell.shape[axis] == 1:
        return True
    if cell.eqn is None:
        return False
    if cell.eqn.primitive.name == "broadcast_in_dim":
        places = cell.eqn.params["broadcast_dimensions"]
        if axis not in places:
            return True
        return _is_uniform(cell.operands[0], places.index(axis))
    by_number = cell.eqn.primitive.name in BY_NUMBER
    return by_number and all(_is_uniform(c, axis) for c in cell.operands)

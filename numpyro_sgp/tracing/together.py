"""Which latent functions are in one term of a likelihood together."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.linalg import matmul
from numpyro_sgp.tracing.by_row import BY_NUMBER
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.program import OPENING, bound, opening

_MOST = 2**24  # numbers that are looked at
#: The sum of what is added up is that of its terms.
_SUMS = frozenset(
    "add sub neg add_any reduce_sum convert_element_type copy copy_p squeeze reshape "
    "broadcast_in_dim expand_dims concatenate".split()
)
#: A known factor leaves terms apart, and so does a known choice.
_SCALED = frozenset("mul div".split())
_BY_NUMBER = BY_NUMBER | {"add_any"}
#: Numbers are moved, or added up, as they are.
_MOVED = frozenset(
    "squeeze reshape broadcast_in_dim expand_dims transpose rev slice reduce_sum cumsum "
    "concatenate split stack unstack".split()
)
_REDUCED = frozenset("reduce_max reduce_min reduce_prod reduce_and reduce_or".split())
#: References, through which values go unseen.
_STATE = frozenset("get swap addupdate".split())
_CALLS = frozenset("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split())


def axes_of_functions(
    log_density: Callable[[dict[str, Array]], Array], shapes: dict[str, tuple], dtype
) -> tuple[tuple[int, ...], ...]:
    r"""
    An axis for each latent function, such that no two functions of a term share one,

    .. math::

        \log p(y \mid f) = \sum_t h_t(f_{k_1 n}, f_{k_2 n}, \dots)

    as all have one axis where each response has a function of its own: then nodes along
    that axis, the same for all functions, give every expectation. It is told by the
    program alone, and by no numbers, which may be zero now and others later.

    :param log_density: from values of GP sites, of the given shapes, to a number.
    :param shapes: ``batch_shape + (N,)`` of each site.
    :param dtype: dtype of the values.
    :return: the axis of each function, by site in their order; nothing where it cannot be
        told.
    """
    counts = {name: int(np.prod(shape[:-1])) for name, shape in shapes.items()}
    number = sum(counts.values())

    def run():
        return log_density({k: opening(k, shape, dtype) for k, shape in shapes.items()})

    if number * sum(map(np.prod, shapes.values())) > _MOST:
        return ()
    program = LinearProgram(run, shapes)
    if any(step.primitive.name in _STATE for step in program.steps_to(_leaves(program))):
        return ()
    terms = _terms(program)
    units = np.split(np.eye(number, dtype=bool), np.cumsum([*counts.values()])[:-1], axis=1)
    fields = {
        name: np.broadcast_to(unit.reshape(-1, *shape[:-1], 1), (number, *shape))
        for (name, shape), unit in zip(shapes.items(), units, strict=True)
    }

    def together(fields):
        masks = jax.vmap(lambda field: _Masks(program, field).of(terms))(fields)
        flat = [jnp.reshape(mask, (number, -1)).astype(jnp.float32) for mask in masks]
        return sum((matmul(mask, mask.T) for mask in flat), jnp.zeros((number, number)))

    pairs = np.asarray(shared(together, briefly=True)(fields)) > 0
    axes: list[int] = []
    for k in range(number):
        taken = {axes[j] for j in range(k) if pairs[k, j]}
        axes.append(next(axis for axis in range(number) if axis not in taken))
    ends = np.cumsum([0, *counts.values()])
    return tuple(tuple(axes[i:j]) for i, j in zip(ends[:-1], ends[1:], strict=True))


def _leaves(program) -> list:
    return list(jax.tree.leaves(program.outputs))


def _terms(program) -> list:
    """The values of whose numbers the output is a sum, with known factors."""
    terms, left = {}, _leaves(program)
    while left:
        value = left.pop()
        if not program.labels(value):
            continue
        step = program.made_by(value)
        name, unknown = step.primitive.name, [v for v in step.operands if program.labels(v)]
        # Of whole numbers sums and quotients are no sums of terms: they overflow, are cut.
        real = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (value, *unknown))
        is_sum = name in _SUMS or (name in _SCALED and unknown == step.operands[:1])
        is_sum = is_sum or (name == "mul" and len(unknown) == 1)
        is_sum = is_sum or (name == "select_n" and not program.labels(step.operands[0]))
        if is_sum and real:
            left.extend(unknown)
        else:
            terms[value] = None
    return list(terms)


class _Masks:
    """
    Which numbers of a program depend on a part of the field.

    :param field: by the keys of openings, where they are that part.
    """

    def __init__(self, program, field):
        self._program, self._field, self._found = program, field, {}

    def of(self, values) -> list[Array]:
        """A mask for each value."""
        for step in self._program.steps_to(values):
            operands = [self._at(v) for v in step.operands]
            if step.primitive is OPENING and step.params["key"] in self._field:
                found = [self._field[step.params["key"]]]
            elif not any(self._program.labels(v) for v in step.operands):
                found = [None] * len(step.results)
            else:
                found = self._through(step, operands)
            self._found.update(zip(step.results, found, strict=True))
        return [self._at(v) for v in values]

    def _at(self, value):
        found = self._found.get(value)
        return jnp.zeros(value.aval.shape, bool) if found is None else found

    def _through(self, step, masks):
        shapes = [v.aval.shape for v in step.results]
        unknown = [bool(self._program.labels(v)) for v in step.operands]
        return _through(step.primitive, step.params, masks, unknown, shapes)


def _through(primitive, params, masks, unknown, shapes) -> list[Array]:
    """Masks of the results of an operation, from those of its operands."""
    name = primitive.name
    if name in _BY_NUMBER:
        return [_union([jnp.broadcast_to(m, shapes[0]) for m in masks])]
    if name in _MOVED:
        found = bound(primitive, params, [m.astype(jnp.float32) for m in masks])
        return [value > 0 for value in found]
    if name in _REDUCED:
        return [jnp.any(masks[0], axis=params["axes"])]
    if name == "dot_general":
        known = [jnp.ones(m.shape, jnp.float32) for m in masks]
        parts = [m.astype(jnp.float32) for m in masks]
        params = {**params, "preferred_element_type": jnp.float32}
        pairs = [(parts[0], known[1])] * unknown[0] + [(known[0], parts[1])] * unknown[1]
        return [_union([bound(primitive, params, pair)[0] > 0 for pair in pairs])]
    if name in _CALLS:
        inner = params.get("call_jaxpr", params.get("fun_jaxpr"))
        if hasattr(inner, "jaxpr"):
            return _inside(inner.jaxpr, masks)
    # Of anything else all of the operands: also of indices, which are data.
    moved = _union([jnp.zeros((), bool), *map(jnp.any, masks)])
    return [jnp.broadcast_to(moved, shape) for shape in shapes]


def _inside(jaxpr, masks) -> list[Array]:
    """The same of a program, all of whose operands may depend on the field."""
    found = dict(zip(jaxpr.invars, masks, strict=True))

    def at(atom):
        known = None if hasattr(atom, "val") else found.get(atom)
        return jnp.zeros(jnp.shape(atom.aval), bool) if known is None else known

    for eqn in jaxpr.eqns:
        shapes = [v.aval.shape for v in eqn.outvars]
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name in ("jit", "pjit") and hasattr(inner, "jaxpr"):
            results = _inside(inner.jaxpr, [at(v) for v in eqn.invars])
        else:
            masks = [at(v) for v in eqn.invars]
            unknown = [True] * len(masks)
            results = _through(eqn.primitive, eqn.params, masks, unknown, shapes)
        found.update(zip(eqn.outvars, results, strict=True))
    return [at(v) for v in jaxpr.outvars]


def _union(masks):
    found = masks[0]
    for mask in masks[1:]:
        found = found | mask
    return found

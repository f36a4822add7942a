"""
Programs that ask whether two results are equal, as derivatives of ``maximum``, ``clip`` and
``max`` do of a result and what it may be.
"""

import jax
import jax.numpy as jnp
from jax.extend import core

_ASKING = {"eq", "ne"}
# What gives one of its operands as it is, wherever that is done.
_CHOOSING = {
    "broadcast_in_dim",
    "clamp",
    "copy",
    "max",
    "min",
    "reduce_max",
    "reduce_min",
    "reshape",
    "squeeze",
    "transpose",
}


def computed_once(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """
    The same program with what it compares for equality in arrays of their own. Else XLA
    may compute it again for each use, and round a sum with a product once here and twice
    there: then a maximum is equal to nothing that it is of, and has no derivative.

    :param closed: a program; it is itself returned where it compares no floats that it has
        computed.
    """
    jaxpr = _held(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def _held(jaxpr: core.Jaxpr) -> core.Jaxpr:
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    asked: set[core.Var] = set().union(*(_compared(eqn, made) for eqn in jaxpr.eqns))
    eqns, now, changed = [], {}, bool(asked)

    def hold(variables):
        for var in variables:
            if var in asked and var.aval.size:
                now[var] = core.Var(var.aval)
                hidden = jax.make_jaxpr(_itself)(var.aval).eqns[0]
                eqns.append(hidden.replace(invars=[var], outvars=[now[var]]))

    def current(atoms):
        return [v if isinstance(v, core.Literal) else now.get(v, v) for v in atoms]

    hold([*jaxpr.constvars, *jaxpr.invars])
    for eqn in jaxpr.eqns:
        params = {name: _within(value) for name, value in eqn.params.items()}
        changed |= any(params[name] is not value for name, value in eqn.params.items())
        eqns.append(eqn.replace(invars=current(eqn.invars), params=params))
        hold(eqn.outvars)
    if not changed:
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=current(jaxpr.outvars))


def _within(value):
    """A parameter of an operation, with the programs that are in it."""
    if isinstance(value, core.ClosedJaxpr):
        return computed_once(value)
    if isinstance(value, core.Jaxpr):
        return _held(value)
    if isinstance(value, tuple):
        parts = tuple(map(_within, value))
        if any(a is not b for a, b in zip(parts, value, strict=True)):
            return parts
    return value


def _compared(eqn, made) -> set:
    """What two results are computed from by choices alone that an operation compares."""
    if eqn.primitive.name not in _ASKING:
        return set()
    a, b = eqn.invars
    if a is b or not jnp.issubdtype(a.aval.dtype, jnp.floating):
        return set()
    sides = [_sources(atom, made) for atom in (a, b)]
    return set().union(*sides) if all(sides) else set()


def _sources(atom, made) -> set:
    """The variables that an operand is one of; none if it is a constant."""
    if isinstance(atom, core.Literal):
        return set()
    eqn = made.get(atom)
    if eqn is None or eqn.primitive.name not in _CHOOSING:
        return {atom}
    return set().union(*(_sources(operand, made) for operand in eqn.invars))


@jax.jit
def _itself(x):
    """
    ``x``, which the compiler cannot know: it takes barriers out before it joins operations,
    but not a branch.
    """
    some = x[(0,) * x.ndim]

    def the_same(x):
        return jnp.where(x == x, x, 2.0 * x)

    return jax.lax.cond(some == some, lambda x: x, the_same, x)

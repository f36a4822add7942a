"""What the nodes of a bound's own quadrature cost, by more of them."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from numpyro_sgp._programs import shared
from numpyro_sgp.elbo import (
    AlongPredictors,
    Expectation,
    GaussHermite,
    TraceGP_ELBO,
    Trapezoid,
)
from numpyro_sgp.elbo.quadrature import SharedAxes
from numpyro_sgp.fitting.batches import whole_loss
from numpyro_sgp.fitting.float32 import of_64_bits, problem_in_float64
from numpyro_sgp.fitting.problem import Problem
from numpyro_sgp.fitting.verdict import Cause

_NODES = {1: 400, 2: 60}  # for each variable of a finer rule, by the number of variables
_TIMES = 3  # times the nodes of the rule that is given, if that is more
# Nodes of all rows, of which a program may have a few thousand rows at once, or has to.
_MOST, _AT_ONCE, _OF_ALL = 2e7, 5e5, 2e6
_TOLD = 0.1  # nats that are told of


class Excess(NamedTuple):
    """
    :param nats: by which a bound is higher than by the finer rule.
    :param own: the rule of the bound.
    :param rule: the finer one.
    """

    nats: float
    own: Expectation
    rule: Expectation


def of_nodes(problem: Problem, key) -> Callable[[], list[Cause]]:
    """
    The row of :func:`begin_excess`, to be called for; empty if there is nothing to tell.
    """
    begun = begin_excess(problem, key)

    def finish() -> list[Cause]:
        found = begun()
        return [] if found is None else told_of(*found)

    return finish


def begin_excess(problem: Problem, key) -> Callable[[], Excess | None]:
    """
    How far the bound is from that by :func:`finer`, of the same random numbers and in
    float64; compiles beside.

    :param problem: what was trained, at the fit's parameters.
    :param key: of the loss.
    :return: to be called for it; None where there is no finer rule.
    """
    single = not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    joint = hasattr(problem.guide, "bound_terms")  # which integrates by itself
    if joint or not isinstance(problem.svi.loss, TraceGP_ELBO):
        return lambda: None
    with of_64_bits() if single else nullcontext():
        wide = problem_in_float64(problem) if single else problem
        other, (own, rule) = _by_finer(wide, key)
        if rule is None:
            return lambda: None
        size = _rows_at_once(rule, problem)
        by_own, by_other = (whole_loss(of, size) for of in (wide, other))

        def losses(free, key, arrays):
            return by_own(free, key, arrays), by_other(free, key, arrays)

        program, given = shared(losses, briefly=True), (wide.free, key, wide.arrays)
        program.prepare(*given)

    def finish() -> Excess:
        with of_64_bits() if single else nullcontext():
            by_own, by_other = map(float, program(*given))
        return Excess(by_other - by_own, own, rule)

    return finish


def _by_finer(problem, key):
    """The same with the finer rule, and which rules these are."""
    loss = problem.svi.loss
    other, most = copy.copy(loss), _MOST if problem.plates else _OF_ALL
    rules: list[tuple[Expectation, Expectation | None]] = []

    def rule_for(shapes, *told):
        own = loss.rule_for(shapes, *told)
        rules.append((own, finer(own, shapes, most)))
        return rules[-1][1] or own

    other.rule_for = rule_for
    found = problem.as_random_with(other)
    jax.eval_shape(found.loss, problem.free, key, problem.arrays)  # which is kept
    return found, rules[-1]  # of all sites, after those of each


def finer(
    rule: Expectation, shapes: dict[str, tuple[int, ...]], most: float = _MOST
) -> Expectation | None:
    """
    A rule of many more nodes, where that is affordable.

    :param rule: quadrature, perhaps along predictors or of shared axes.
    :param shapes: ``batch_shape + (N,)`` of each GP site.
    :param most: nodes of all rows.
    :return: None of draws, of more than two variables, or of more nodes than that.
    """
    number, points = _variables(rule, shapes), _points(rule)
    if not points or number not in _NODES:
        return None
    each = max(_NODES[number], _TIMES * points)
    rows = max(shape[-1] for shape in shapes.values())
    if rows * each**number > most:
        return None
    if isinstance(rule, AlongPredictors | SharedAxes):
        return replace(rule, rule=Trapezoid(each))
    return Trapezoid(each)


def _points(rule) -> int:
    """Nodes of one variable, 0 of a rule that is not made of these."""
    rule = rule.rule if isinstance(rule, AlongPredictors | SharedAxes) else rule
    return rule.num_points if isinstance(rule, GaussHermite | Trapezoid) else 0


def _variables(rule, shapes) -> int:
    if isinstance(rule, AlongPredictors):
        return rule.number
    if isinstance(rule, SharedAxes):
        return 1 + max(rule.axes)
    return sum(int(np.prod(shape[:-1])) for shape in shapes.values())


def _rows_at_once(rule, problem) -> int:
    each = _points(rule) ** _variables(rule, problem.shapes)
    particles = getattr(problem.svi.loss, "num_particles", 1)
    options = problem.guide.approximations.values()
    components = np.prod([getattr(o.family, "num_components", 1) for o in options])
    return max(int(_AT_ONCE / (each * particles * components)), 1)


def told_of(excess: float, own: Expectation, rule: Expectation) -> list[Cause]:
    """
    The row.

    :param excess: nats by which the bound is higher than by the finer rule.
    :param own: the rule of the bound.
    :param rule: the finer one.
    """
    if not _TOLD <= abs(excess) < np.inf:
        return []
    before, after = _points(own), _points(rule)
    way = "high" if excess > 0.0 else "low"
    told = f"the bound is {abs(excess):.2g} nats too {way} by its {before} nodes at each "
    told += f"row, as {after} tell"
    mend = "more inducing points, with which sds of f are smaller"
    written = "" if isinstance(rule, SharedAxes) else f"sgp.Trapezoid({after})"
    if isinstance(rule, AlongPredictors):
        written = f"sgp.AlongPredictors({written}, {rule.number})"
    mend += f", or expectation={written}" if written else ""
    return [Cause("quadrature", abs(excess), told=told, mend=f"{mend}, and a fit again")]

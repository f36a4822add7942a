"""What the nodes of a bound's own quadrature cost, by more of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from numpyro_sgp._programs import begun_on_data
from numpyro_sgp.diagnostics.bound import with_exact_kl
from numpyro_sgp.elbo import (
    AlongPredictors,
    Expectation,
    GaussHermite,
    TraceGP_ELBO,
    Trapezoid,
)
from numpyro_sgp.elbo.quadrature import SharedAxes

_NODES = {1: 400, 2: 60}  # for each variable of a finer rule, by their number
_TIMES = 3  # as many as a trapezoidal rule has that is asked for
_ROUNDING = 50.0  # units in the last place of the bound
_MOST = 4e6  # nodes of all rows


class Finer(NamedTuple):
    """
    :param excess: nats by which the bound is higher than by the finer rule.
    :param rounding: nats that may be that of the bounds.
    :param own: the rule of the bound.
    :param rule: the finer one.
    """

    excess: float
    rounding: float
    own: Expectation
    rule: Expectation

    @property
    def written(self) -> str:
        """The finer rule as a user has it, empty if there is no public name for it."""
        if isinstance(self.rule, Trapezoid):
            return f"sgp.Trapezoid({self.rule.num_points})"
        if isinstance(self.rule, AlongPredictors):
            base = f"sgp.Trapezoid({self.rule.rule.num_points})"
            return f"sgp.AlongPredictors({base}, {self.rule.number})"
        return ""


class _FinerBound(TraceGP_ELBO):
    """The same bound by the finer rule; keeps which rules these are."""

    def rule_for(self, shapes, *told):
        own = super().rule_for(shapes, *told)
        self.rules = own, finer(own, shapes)
        return self.rules[1] or own


def finer(rule: Expectation, shapes: dict[str, tuple[int, ...]]) -> Expectation | None:
    """
    A rule of many more nodes, where that is affordable.

    :param rule: quadrature, perhaps along predictors or of shared axes.
    :param shapes: ``batch_shape + (N,)`` of each GP site.
    :return: None of draws, of more than two variables, or of so many rows that their nodes
        are more than four million.
    """
    if isinstance(rule, AlongPredictors):
        number = rule.number
    elif isinstance(rule, SharedAxes):
        number = 1 + max(rule.axes)
    elif isinstance(rule, GaussHermite | Trapezoid):
        number = sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    else:
        return None
    base = rule if isinstance(rule, GaussHermite | Trapezoid) else rule.rule
    each = _NODES.get(number, 0)
    if isinstance(base, Trapezoid):
        each = max(each, _TIMES * base.num_points) if each else 0
    rows = max(shape[-1] for shape in shapes.values())
    if not each or rows * each**number > _MOST:
        return None
    return Trapezoid(each) if base is rule else replace(rule, rule=Trapezoid(each))


def begin_finer(guide, params, args, kwargs, loss, rng_key) -> Callable[[], Finer | None]:
    """
    The bound beside that by :func:`finer`, with the same random numbers; compiles beside.

    :param loss: of the training.
    :return: to be called for what it finds; None where there is no finer rule.
    """
    if not isinstance(loss, TraceGP_ELBO) or hasattr(guide, "bound_terms"):
        return lambda: None
    own = with_exact_kl(loss)
    other = _FinerBound(loss.expectation, loss.num_particles, loss.vectorize_particles)
    other.draws_kl = False

    def bounds(args, kwargs, params, key):
        given = key, params, guide.model, guide, *args
        found = own.loss(*given, **kwargs), other.loss(*given, **kwargs)
        return [sum(jax.tree.leaves(loss)) for loss in found]

    begun = begun_on_data(bounds, args, kwargs, params, rng_key)
    rules = getattr(other, "rules", (None, None))
    if rules[1] is None:
        return lambda: None

    def finish():
        by_own, by_other = begun()
        rounding = _ROUNDING * np.finfo(by_own.dtype).eps * abs(float(by_own))
        return Finer(float(by_other) - float(by_own), rounding, *rules)

    return finish

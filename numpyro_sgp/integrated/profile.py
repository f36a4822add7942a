r"""
The best Gaussian of the field at given hyperparameters, and the bound that it reaches.

With linear predictors :math:`\eta = b_0 + B^\top w + r` and :math:`q(w) = N(m, P^{-1})`,
the expected log density's slopes :math:`g = dE/d\mu` and
:math:`\Lambda = -2\, dE/d\Sigma` of each row give the natural step

.. math::

    \hat P = I + B \Lambda B^\top, \qquad
    \hat P \hat m = B g + (\hat P - I) m,

whose fixed point is the optimum, reached at once for Gaussian likelihoods. What a step of
length one would gain is close to :math:`KL[q \| N(\hat m, \hat P^{-1})]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.families.blocks import Block
from numpyro_sgp.integrated.expectation import expected, not_seen, without_left
from numpyro_sgp.integrated.field import Field, Terms
from numpyro_sgp.integrated.precision import (
    Dense,
    Factor,
    Precision,
    Root,
    Square,
    arrow_identity,
)
from numpyro_sgp.integrated.row_parts import RowParts
from numpyro_sgp.integrated.weighing import Weighed, unweighed, weigh
from numpyro_sgp.linalg import matmul
from numpyro_sgp.tracing.supports import without_density

_MAX_STEPS = 100
_LEAST_RATE = 1e-9
_NARROW = 100.0  # times the prior's, is the precision that q(w) starts with
_DRAWN = 3, 64  # other means that it starts with at most, by the work of a node
_WORK_OF_DRAWN = 1e9
# Draws that are weighed: at one node, at some twenty, as of one hyperparameter (where rows
# are few), and at many.
_ONE_NODE, _SOME_NODES, _MANY_NODES = 4096, 2048, 256
_FEW_ROWS = 500
# Work at a node, and hyperparameters, which make many nodes: below both all nodes take less
# time than to compile them well.
_SMALL, _MANY_HYPERPARAMETERS = 2e7, 4
_MOST_WEIGHED = 1e7  # of draws and rows
_NOTHING = 0.02  # nats that weights gain where a Gaussian is all that there is
_TOO_FEW = 0.04  # effective share of draws
ASTRAY = 1.0  # nats that natural steps leave where they do not arrive
_BETTER = 0.01  # nats for which inducing points are moved
#: Nats that may be left at a node, where means are then .014 sds off at most; and where
#: slopes are taken, whose errors are of the order of the root of that, by dtype.
AT_NODES = 1e-4
AT_SLOPES = {"float32": 1e-3, "float64": 1e-7}


class Gaussian(NamedTuple):
    """
    q(w).

    :param shift: :math:`P m`, shape ``(m,)``.
    :param precision: P.
    """

    shift: Array
    precision: Precision

    @staticmethod
    def prior(size: int, dtype, groups: tuple[int, int] | None = None) -> Gaussian:
        """
        The standard normal.

        :param groups: G and K, if the last numbers are those of groups that are apart.
        """
        precision: Precision = Dense(jnp.eye(0 if groups else size, dtype=dtype))
        if groups:
            precision = arrow_identity(size - math.prod(groups), *groups, dtype)
        return Gaussian(jnp.zeros(size, dtype), precision)

    def root(self) -> Root:
        """Lower factor of P; NaN if it has none."""
        return self.precision.root()

    def mean(self, root: Root) -> Array:
        """m."""
        return root.solve(self.shift)


def divergence(mean: Array, root: Root) -> Array:
    """KL[q(w) || N(0, I)]."""
    trace = root.spread().squares()
    return 0.5 * (trace + matmul(mean, mean) - len(mean)) + jnp.sum(root.log_diagonal())


class Gathered(NamedTuple):
    r"""
    What natural steps need of the rows, sums over them.

    :param value: the expected log likelihood.
    :param slope: :math:`B g`, shape ``(m,)``.
    :param curvature: :math:`B \Lambda B^\top`.
    :param open: about how many nats are lost to what inducing points leave open at the
        rows, half the sum of :math:`\Lambda` times its covariances.
    """

    value: Array
    slope: Array
    curvature: Precision
    open: Array


def gathered(
    terms: Terms, mean: Array, factor: Factor, num_rows: int, kinked: bool = False
) -> Gathered:
    """
    :param terms: of some rows.
    :param mean: of q(w).
    :param factor: a square root of its covariance.
    :param num_rows: N, of all rows.
    :param kinked: whether the likelihood has kinks.
    """
    linear = terms.linear
    value, (g, slope) = jax.value_and_grad(
        lambda m, c: expected(terms.log_likelihood, m, c, num_rows, kinked), argnums=(0, 1)
    )(*linear.moments(mean, factor))
    curvature = -(slope + jnp.swapaxes(slope, 0, 1))
    lost = -jnp.sum(slope * linear.left_open())
    return Gathered(value, linear.slope(g), linear.curvature(curvature), lost)


class Optimum(NamedTuple):
    """
    The best q(w), its bound, about how many nats it is from there, and
    :attr:`Gathered.open`.
    """

    q: Gaussian
    value: Array
    left: Array
    open: Array


def optimum(
    gather: Callable[[Array, Factor], Gathered], start: Gaussian, tolerance: Array
) -> Optimum:
    """
    The best q(w), by natural steps that are halved where the bound would fall.

    :param gather: from the mean of q(w) and a square root of its covariance to what rows
        say there.
    :param start: where to begin; at the prior, if the bound is not finite there.
    :param tolerance: nats that may be left.
    """
    dtype, eye = start.shift.dtype, start.precision.identity()

    def evaluate(q):
        root = q.root()
        mean = q.mean(root)
        rows = gather(mean, root.spread())
        added = rows.curvature.symmetric()
        target = Gaussian(rows.slope + added.times(mean), jax.tree.map(jnp.add, eye, added))
        value = rows.value - divergence(mean, root)
        return Optimum(q, value, _left(mean, root, target), rows.open), target

    def go_on(state):
        step, rate, (at, _), _ = state
        # NaN, where the step's precision is none, is not small.
        return (step < _MAX_STEPS) & ~(at.left < tolerance) & (rate > _LEAST_RATE)

    def step(state):
        count, rate, before, candidate = state
        new = evaluate(candidate)
        value = before[0].value
        better = new[0].value >= value - 8 * jnp.finfo(dtype).eps * jnp.abs(value)
        at, target = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, before)
        rate = jnp.where(better, jnp.minimum(2 * rate, 1.0), 0.5 * rate)
        return count + 1, rate.astype(dtype), (at, target), _between(at.q, target, rate)

    # The start counts as a step from the prior at minus infinity: the program has one
    # evaluation.
    prior = Gaussian(jnp.zeros_like(start.shift), eye)
    nothing = jnp.asarray(-jnp.inf, dtype)
    at = Optimum(prior, nothing, -nothing, -nothing)
    begin = (0, jnp.ones((), dtype), (at, prior), start)
    return jax.lax.while_loop(go_on, step, begin)[2][0]


def _between(q, target, rate):
    return jax.tree.map(lambda a, b: (1 - rate) * a + rate * b, q, target)


def _left(mean, root, target):
    """KL[q || target], NaN if the target has no factor."""
    other = target.root()
    away = other.transposed(target.mean(other) - mean)
    log_det = jnp.sum(other.log_diagonal() - root.log_diagonal())
    return 0.5 * (root.ratio(other) - len(mean) + matmul(away, away)) - log_det


class Node(NamedTuple):
    """
    What is known at some hyperparameters.

    :param free: unconstrained, ``(p,)``.
    :param value: log prior and bound, log p(theta) + ELBO*(theta); and what weights gain.
    :param q: the best q(w).
    :param left: nats that it is about from the best.
    :param weighed: moments of the field, by weights of draws from q(w) or of q(w) itself.
    :param open: nats that are about lost to what inducing points, or the jitter where each
        row has one, leave open at the rows; NaN where that is not known.
    """

    free: np.ndarray
    value: float
    q: Gaussian
    left: float
    weighed: Weighed
    open: float = math.nan


class Profile:
    """
    The bound at its best q(w), as a function of unconstrained hyperparameters.

    :param field: the model.
    :param args: its arguments, with the data.
    :param kwargs: its keyword arguments.
    :param points: values at GP sites in the place of :attr:`Field.points`.
    :param whole: see :class:`RowParts`.
    :param one_node: whether it is for one node, at which more draws are weighed.
    """

    def __init__(
        self,
        field: Field,
        args: tuple,
        kwargs: dict,
        points: dict | None = None,
        whole: bool = False,
        one_node: bool = False,
    ):
        self.field = field
        #: Values at GP sites, inducing points for the most part.
        self.points: dict[str, dict] = field.points if points is None else points
        self._args, self._kwargs = args, kwargs
        #: Rows of the data, in blocks where they are many.
        self.rows = RowParts(field, args, kwargs, whole)
        N, rows, kinked = field.layout.num_rows, self.rows, field.kinked

        def value_at(free, mean, factor, *given):
            def part(here):
                moments = here.linear.moments(mean, factor)
                return expected(here.log_likelihood, *moments, N, kinked) + here.log_prior

            return rows.total(part, free, *given)

        def node(free, start, with_slope, tolerance, with_weights, key, *given):
            here = None if rows.size else rows.terms(free, *given)

            def gather(mean, factor):
                def part(terms):
                    return gathered(terms, mean, factor, N, kinked)

                return rows.total(part, free, *given) if here is None else part(here)

            best = optimum(gather, start, tolerance)
            q, value = best.q, best.value
            root = q.root()
            mean = q.mean(root)
            factor = root.spread()

            def total(free):  # at the same q: by the envelope theorem its slope is that
                return value_at(free, mean, factor, *given) - divergence(mean, root)

            slope = jax.lax.cond(with_slope, jax.grad(total), jnp.zeros_like, free)
            if here is None:
                log_prior = rows.total(lambda here: here.log_prior, free, *given)
                return (
                    best._replace(value=value + log_prior),
                    slope,
                    unweighed(mean, factor),
                )

            found = value + divergence(mean, root)
            moments = here.linear.moments(mean, factor)
            value = value - not_seen(here.log_likelihood, *moments, found, kinked)

            def weighed_here():
                rows = here.log_likelihood, here.linear
                bound = without_left(*rows, mean, factor, kinked) - divergence(mean, root)
                return weigh(*rows, mean, root, bound, key, self.draws)

            weighed = jax.lax.cond(
                with_weights, weighed_here, lambda: unweighed(mean, factor)
            )
            return best._replace(value=value + here.log_prior), slope, weighed

        #: Draws that are weighed at a node.
        one_node = one_node or field.num_hyperparameters == 0
        is_few = field.num_hyperparameters == 1 and N <= _FEW_ROWS
        self.draws = _ONE_NODE if one_node else _SOME_NODES if is_few else _MANY_NODES
        #: Whether the field is more than its best Gaussian, so that draws are weighed.
        self.weighs = self.draws * N * field.layout.number**2 < _MOST_WEIGHED
        self.weighs = self.weighs and not rows.size
        #: Multiplications of one product of all rows with the field's covariance.
        self.work = float(N) * field.layout.number * field.row_size**2
        few = field.num_hyperparameters < _MANY_HYPERPARAMETERS
        self._node = shared(node, briefly=few and self.work < _SMALL)
        self._value_at = shared(value_at)
        #: How often it was asked for.
        self.count = 0

    def start(self) -> Gaussian:
        """
        Where q(w) starts: at the mean of the prior, with a tenth of its standard
        deviations. Under the prior itself, expectations of exponentials of f may be
        infinite, and natural steps have no precision.
        """
        groups = self.field.groups
        apart = None if groups is None else (groups.number, groups.each)
        prior = Gaussian.prior(self.field.size, self.field.dtype, apart)
        narrow = jax.tree.map(lambda part: _NARROW * part, prior.precision)
        return prior._replace(precision=narrow)

    def other_starts(self) -> Iterator[Gaussian]:
        """
        The prior itself, and narrow ones about means drawn from it: more of these where
        steps from each take little time.
        """
        narrow = self.start()
        wide = jax.tree.map(lambda part: part / _NARROW, narrow.precision)
        yield narrow._replace(precision=wide)
        rng, (few, many) = np.random.default_rng(0), _DRAWN
        for _ in range(int(np.clip(_WORK_OF_DRAWN / self.work, few, many))):
            yield self.about(rng.normal(size=self.field.size))

    def about(self, mean) -> Gaussian:
        """As :meth:`start`, about a mean ``(m,)``: steps lead to what is near."""
        shift = _NARROW * jnp.asarray(mean, self.field.dtype)
        return self.start()._replace(shift=shift)

    def __call__(
        self, free, start: Gaussian, with_slope: bool = False, to_weigh: bool = False
    ):
        """
        :param free: unconstrained hyperparameters ``(p,)``.
        :param start: the q(w) of a neighbour.
        :param to_weigh: whether draws are to be weighed, where that is of use.
        :return: :class:`Node` and the slope of its value, zero if not asked for.
        """
        found = self._at(free, start, with_slope, to_weigh and self.weighs)
        if not to_weigh or found[0].left < ASTRAY:  # NaN is not
            return found
        # Of a neighbour far away, from where natural steps have no precision.
        again = self._at(free, self.start(), with_slope, self.weighs)
        if again[0].left < ASTRAY:
            return again
        best = again if not found[0].value >= again[0].value else found
        return self._at(free, best[0].q, with_slope, False)

    def _at(self, free, start, with_slope, to_weigh):
        self.count += 1
        dtype = self.field.dtype
        at = jnp.asarray(free, dtype)
        limit = AT_SLOPES[jnp.dtype(dtype).name]
        if not with_slope and at.size:
            limit = max(limit, AT_NODES)
        options = jnp.asarray(with_slope), jnp.asarray(limit, dtype), jnp.asarray(to_weigh)
        key = jax.random.key(self.count)
        found = self._node(at, start, *options, key, self.points, self.rows.arrays)
        best, slope, weighed = found
        left = float(best.left)
        # Draws say nothing around what is no optimum.
        value = float(best.value) + (float(weighed.gain) if left < ASTRAY else 0.0)
        node = Node(np.asarray(at, float), value, best.q, left, weighed, float(best.open))
        return node, np.asarray(slope, float)

    def value_at(self, free, mean: Array, factor: Square) -> float:
        """
        Log prior and bound, as :attr:`Node.value`, at another q(w).

        :param free: unconstrained hyperparameters ``(p,)``.
        :param mean: of q(w).
        :param factor: lower factor of its covariance.
        """
        where = jnp.asarray(free, self.field.dtype), mean, factor
        value = self._value_at(*where, self.points, self.rows.arrays)
        return float(value - Block(mean, factor.matrix).kl())

    def without_density(self) -> str:
        """See :func:`~numpyro_sgp.tracing.supports.without_density`."""
        return without_density(self.field.model, self._args, self._kwargs)

    def choose_points(self, mode: Node) -> Node | None:
        """
        Chooses inducing points anew for the kernels at a mode, where that is better.

        :return: the mode with them; None where nothing changed.
        """
        before, free = self.points, jnp.asarray(mode.free, self.field.dtype)
        points = self.field.points_at(free, self._args, self._kwargs)
        if points is None:
            return None
        self.points = points
        node, _ = self(mode.free, self.start())
        if node.value > mode.value + _BETTER:
            return node
        self.points = before
        return None

    def settle(self, mode: Node, places: Iterable[np.ndarray] = ()) -> Node:
        """
        The mode, weighed; and sees whether to weigh other nodes: not where a Gaussian is
        all that there is at the mode and elsewhere, nor where draws from it are too far
        from the posterior, or the best Gaussian is not known.

        :param places: hyperparameters that nodes may be at, away from the mode.
        """
        node, _ = self(mode.free, mode.q, to_weigh=True)
        if np.isnan(node.left) or not float(node.weighed.effective) > _TOO_FEW:
            self.weighs = False
        elif abs(float(node.weighed.gain)) < _NOTHING:
            self.weighs = self.weighs and any(self._gains(at, mode.q) for at in places)
        return node if self.weighs else self(mode.free, mode.q)[0]

    def _gains(self, free, q) -> bool:
        """Whether weights say that there is more than a Gaussian."""
        node, _ = self(free, q, to_weigh=True)
        gain, enough = float(node.weighed.gain), node.weighed.effective > _TOO_FEW
        return bool(np.isfinite(node.value) and abs(gain) >= _NOTHING and enough)

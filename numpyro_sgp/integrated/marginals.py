"""Marginals and draws of what is linear in the field, at any inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from scipy.special import ndtr, ndtri

from numpyro_sgp._programs import join_static, shared, split_static
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.groups import generic, limit
from numpyro_sgp.integrated.in_turn import in_turn, q_of
from numpyro_sgp.integrated.maps import combined
from numpyro_sgp.integrated.nodes import Nodes, balanced
from numpyro_sgp.integrated.placing import AtValues, Unconstrained
from numpyro_sgp.linalg import einsum
from numpyro_sgp.predictive.deterministic import numbers_of
from numpyro_sgp.predictive.predictions import axis_of_rows
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.plates import WholeIfFew
from numpyro_sgp.tracing.rows import origins

_KEPT_MASS = 0.999
_COMBINED = 1e-2  # of a variance, by which it may be wrong
_TOGETHER = 16  # draws of a node that share its factors
_BISECTIONS, _NEWTON = 60, 12  # at most, the second of steps that need not be half
_MANY = 256  # draws, whose mean is to be that of the mixture
_STILL = 1e-12  # step of a quantile, of its size, that is none


@dataclass(frozen=True, eq=False)
class Mixture:
    """
    A mixture of Gaussians at each place: the posterior of something that is linear in the
    field, with hyperparameters integrated.

    :param weights: of the K nodes, ``(K,)``.
    :param means: given each node's hyperparameters, ``(K, *shape)``.
    :param variances: likewise.

    >>> import numpy as np
    >>> import numpyro_sgp as sgp
    >>> f = sgp.Mixture(np.full(2, 0.5), np.array([[-1.0], [1.0]]), np.ones((2, 1)))
    >>> f.variance
    array([2.])
    >>> f.quantile([0.05, 0.95]).shape
    (2, 1)
    """

    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """The mean, shape ``shape``."""
        return np.tensordot(self.weights, self.means, 1)

    @property
    def variance(self) -> np.ndarray:
        """The variance, shape ``shape``: that within nodes and that between them."""
        away = self.means - self.mean
        return np.tensordot(self.weights, self.variances + away**2, 1)

    @property
    def sd(self) -> np.ndarray:
        """The standard deviation."""
        return np.sqrt(self.variance)

    def quantile(self, level: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """
        Quantiles of each number by itself.

        :param level: between 0 and 1, a number or an array.
        :return: shape ``level.shape + shape``.
        """
        level = np.asarray(level, float)
        if np.any((level <= 0) | (level >= 1)):
            raise ValueError(f"Quantiles are at levels between 0 and 1, got {level}.")
        found = np.stack([self._one(v) for v in level.ravel()])
        return found.reshape((*level.shape, *self.means.shape[1:]))

    def _one(self, level):
        # One level at a time: K times all places are held at once.
        sds = np.sqrt(np.maximum(self.variances, 1e-300))
        ends = self.means + sds * ndtri(level)
        low, high = ends.min(axis=0), ends.max(axis=0)
        at = np.clip(self.mean + self.sd * ndtri(level), low, high)
        for i in range(_BISECTIONS):
            z = (at - self.means) / sds
            off = np.tensordot(self.weights, ndtr(z), 1) - level
            low, high = np.where(off < 0, at, low), np.where(off < 0, high, at)
            before, at = at, 0.5 * (low + high)
            if i < _NEWTON:
                density = np.exp(-0.5 * np.clip(z, -40.0, 40.0) ** 2)
                slope = np.tensordot(self.weights, density / sds, 1)
                step = before - off * np.sqrt(2.0 * np.pi) / np.maximum(slope, 1e-300)
                at = np.where((low <= step) & (step <= high), step, at)
                if np.all(np.abs(at - before) <= _STILL * (np.abs(at) + self.sd)):
                    break
        return at

    def __repr__(self):
        return f"Mixture(shape={self.means.shape[1:]}, nodes={len(self.weights)})"


def marginals(
    field: Field,
    nodes: Nodes,
    args: tuple,
    kwargs: dict,
    names: Collection[str] | None = None,
) -> dict[str, Mixture]:
    """
    Of each GP site, effect and deterministic site that is linear in the field (sums of
    sites, say), in the shape of the site; without those that combine rows of a GP site
    between its inducing points, whose variances would be wrong, and those that depend on
    responses which are not given.

    :param args: arguments of the model, at any inputs.
    :param names: of sites, if not all are wanted.
    """
    arrays, static = split_static((args, kwargs))
    batch = [jnp.asarray(a) for a in arrays]
    weights, kept = kept_nodes(nodes)
    free = jnp.asarray(kept[0].free, field.dtype)
    open_ones = made_of_responses(field, free, args, kwargs)
    # What groups have to do with is told first: sums over many are no rows of one group.
    several: dict[str, bool] = {}
    shapes: dict = {}

    def chosen(program) -> dict:
        found = {}
        for name, value in program.outputs["values"].items():
            kind = program.kind(value)
            wanted = (names is None or name in names) and name not in open_ones
            if wanted and kind.labels and kind.is_linear:
                found[name] = value
        return found

    def look(free, points, batch):
        program = field.program(field.unravel(free), points, *join_static(batch, static))
        targets = chosen(program)
        known, away = known_at_edge(program, list(targets.values())), {}
        for name, value in targets.items():
            away[name] = jnp.max(field.linear(program, known, [value], flat).away)
        return away

    def moments(free, mean, factor, points, batch):
        program = field.program(field.unravel(free), points, *join_static(batch, static))
        targets = chosen(program)
        known, found = known_at_edge(program, list(targets.values())), []
        for grouped in (True, False):
            own = {k: v for k, v in targets.items() if several.get(k, False) != grouped}
            if not own:
                continue
            shapes.update({k: tuple(v.aval.shape) for k, v in own.items()})
            where = program, known, list(own.values()), flat
            linear = field.linear(*where, grouped=grouped)
            mean_here, variance = linear.moments(mean, factor)

            def signed(signs, where=where, grouped=grouped):
                return field.linear(*where, signs=signs, grouped=grouped)

            wrong = combined(signed)[0] > _COMBINED * variance[0, 0]
            found.append((mean_here[0], variance[0, 0], wrong))
        return tuple(map(jnp.concatenate, zip(*found, strict=True)))

    if field.groups is not None:
        free = generic(kept[0].free, field.dtype)
        away = shared(look, briefly=True)(free, nodes.points, batch)
        several.update({k: not v <= limit(field.dtype) for k, v in away.items()})
    tasks = [q_of(node, field.dtype) for node in kept]
    found = list(in_turn(moments, tasks, nodes.points, batch))
    means, variances, wrong = map(np.concatenate, zip(*found, strict=True))
    out, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape))
        if not np.any(wrong[:, start:end]):
            out[name] = Mixture(
                weights,
                means[:, start:end].reshape(-1, *shape),
                variances[:, start:end].reshape(-1, *shape),
            )
    return out


def known_at_edge(program, targets, parts=("projections", "left")) -> dict:
    """
    Values of a program that targets are made of and that do not depend on the field.

    :param parts: outputs whose values are wanted too.
    """
    leaves = jax.tree.leaves([program.outputs[k] for k in parts])
    edge = [*program.boundary(targets, []), *leaves]
    return dict(zip(edge, program.evaluate(edge, {}, {}), strict=True))


def flat(values: list[Array]) -> Array:
    """All numbers as rows with one predictor each, ``(1, N)``."""
    return jnp.concatenate([v.reshape(-1) for v in values])[None]


def kept_nodes(nodes: Nodes):
    """Weights and nodes that have all but a thousandth of the mass."""
    order = np.argsort(-nodes.weights)
    number = int(np.searchsorted(np.cumsum(nodes.weights[order]), _KEPT_MASS)) + 1
    order = order[:number]
    weights = nodes.weights[order]
    return weights / weights.sum(), [nodes.nodes[i] for i in order]


# ---- draws ----------------------------------------------------------------------------


def draw_field(
    field: Field,
    nodes: Nodes,
    which: np.ndarray,
    seed: int,
    args: tuple,
    kwargs: dict,
    joint: bool,
) -> dict[str, np.ndarray]:
    """
    Draws of GP sites and effects.

    :param which: the node of each draw, ``(S,)``.
    :param joint: whether rows are drawn together, O(N^3) for each node; by independent
        numbers then. Where each row is for itself the numbers are :func:`balanced`.
    :return: values by site, each ``(S, *shape)``.
    """
    arrays, static = split_static((args, kwargs))
    arrays = [jnp.asarray(a) for a in arrays]

    def values(free, mean, factor, own, noise, points, arrays):
        w = mean + factor.draw(own)
        where = points, *join_static(arrays, static)
        return field_values(field, field.unravel(free), w, noise, *where, joint=joint)

    shapes = gp_shapes(field, nodes.points, args, kwargs)
    rng = np.random.default_rng(seed)
    sizes = [field.size, *(int(np.prod(shape)) for shape in shapes.values())]
    rows = {shape[-1] for shape in shapes.values()}
    num_rows = rows.pop() if len(rows) == 1 else sum(sizes[1:])  # of one site after another
    apart = sum(sizes[1:]) // num_rows, num_rows
    numbers = None if joint else balanced(len(which), sizes[0], apart, rng)
    dtype = np.dtype(field.dtype)
    used, counts = np.unique(which, return_counts=True)
    together = int(np.clip(-(-len(which) // len(used)), 1, _TOGETHER))
    lengths: list[int] = []

    def tasks():
        end = 0
        for k, count in zip(used, counts, strict=True):
            for start in range(0, count, together):
                length = min(together, count - start)
                x = np.zeros((together, sum(sizes)))
                x[:length] = (
                    rng.normal(size=(length, sum(sizes)))
                    if numbers is None
                    else numbers[end : end + length]
                )
                end += length
                lengths.append(length)
                own, *left = np.split(x.astype(dtype), np.cumsum(sizes)[:-1], axis=1)
                noise = {
                    name: v.reshape(-1, *shape)
                    for v, (name, shape) in zip(left, shapes.items(), strict=True)
                }
                yield *q_of(nodes.nodes[k], dtype), own, noise

    parts = []
    for some in in_turn(values, tasks(), nodes.points, arrays):
        for i in range(len(next(iter(some.values())))):
            length = lengths[len(parts)]
            parts.append({name: v[i, :length] for name, v in some.items()})
    back = np.argsort(np.argsort(which, kind="stable"))
    return {name: np.concatenate([p[name] for p in parts])[back] for name in parts[0]}


def centred(draws: np.ndarray, q: Mixture) -> np.ndarray:
    """Draws of each number, ``(S, *shape)``, moved to the mean that is known of it."""
    return draws + (q.mean - draws.mean(axis=0)) if len(draws) >= _MANY else draws


def field_values(
    field: Field, thetas, w: Array, noise: dict, points: dict, args, kwargs, joint: bool
) -> dict[str, Array]:
    """
    Values of GP sites and effects, of numbers of the field; under jit.

    :param thetas: hyperparameters, as :meth:`Field.run` takes them.
    :param w: shape ``(S, m)``.
    :param noise: by GP site standard normal numbers for what inducing points leave open,
        ``(S, *shape)``.
    :param joint: whether that is drawn for all rows together.
    :return: by site, each ``(S, *shape)``.
    """
    program = field.program(thetas, points, args, kwargs, joint=joint)
    outputs = program.outputs
    names = [*field.sites, *field.effects]
    targets = [outputs["values"][name] for name in names]
    known = known_at_edge(program, targets, ("projections", "left", "joint"))

    def one(w, noise):
        openings = {("effect", k): v for k, v in field.effect_parts(w).items()}
        end = 0
        for name, shape in field.gp_shapes_of(outputs):
            A = known[outputs["projections"][name]]
            A = jnp.broadcast_to(A, (*shape[:-1], *A.shape[-2:]))
            start, end = end, end + field.gp_sizes()[name]
            own = w[start:end].reshape(*shape[:-1], -1)
            g = einsum("...mn,...m->...n", A, own)
            x = noise[name]
            if joint:
                L = known[outputs["joint"][name]]
                g = g + einsum("...ij,...j->...i", L, x)
            else:
                g = g + known[outputs["left"][name]] * x
            openings["gp", name] = g
        found = program.evaluate(targets, known, openings)
        return dict(zip(names, found, strict=True))

    return jax.vmap(one)(w, noise)


def gp_shapes(field: Field, points: dict, args, kwargs) -> dict[str, tuple[int, ...]]:
    """Shapes of GP sites at some arguments."""
    found = {}

    def look():
        zeros = {k: jnp.zeros(s) for k, s in field.free_shapes.items()}
        thetas = Unconstrained(zeros)
        program = field.program(thetas, points, args, kwargs)
        found.update(field.gp_shapes_of(program.outputs))
        return ()

    jax.eval_shape(look)
    return found


def given(field: Field, free: Array, values: dict, args, kwargs, rng_key, drawn=()) -> dict:
    """
    The model's trace at unconstrained hyperparameters and values of all other latents.

    :param free: shape ``(p,)``.
    :param values: of GP sites and effects, in their shapes.
    :param drawn: names of responses that are drawn; others are zero, where not given.
    """
    placed = AtValues(field, field.unravel(free), values, drawn)
    with handlers.block(), handlers.trace() as trace, placed:
        handlers.seed(WholeIfFew(field.model), rng_key)(*args, **kwargs)
    return trace


def made_of_responses(field: Field, free: Array, args, kwargs) -> dict[str, bool]:
    """
    Deterministic sites that depend on responses which these arguments do not give, and
    whether these can be drawn.

    :param free: any unconstrained hyperparameters.
    """
    shapes, can_draw = {}, {}

    def run(values):
        trace = given(field, free, values, args, kwargs, jax.random.key(0))
        for name in field.responses:
            if name in trace and not trace[name]["is_observed"]:
                value, fn = trace[name]["value"], trace[name]["fn"]
                shapes[name] = jax.ShapeDtypeStruct(jnp.shape(value), value.dtype)
                can_draw[name] = messages.can_draw(fn)
        return numbers_of(trace)

    if not jax.eval_shape(run, {}) or not shapes:
        return {}
    found = origins(run, dict(shapes))
    return {k: all(can_draw[r] for r in of) for k, of in found.items() if of}


def axes_of_rows(field: Field, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """
    The axis of the rows: the last one of a GP site; of a sum that of as many as there were
    at the set-up, where it is one, or as GP sites have now.

    :param shapes: by site, with the rows that there are now.
    """
    trace = field.guide.known().trace
    now = max(shapes[name][-1] for name in field.sites)
    then = max(shape[-1] for shape in field.gp_shapes.values())

    def axis(name, shape):
        if name in field.sites:
            return len(shape) - 1
        before = np.shape(trace[name]["value"]) if name in trace else ()
        is_known = len(before) == len(shape) and before.count(then) == 1
        return before.index(then) if is_known else axis_of_rows(shape, now)

    return {name: axis(name, shape) for name, shape in shapes.items()}

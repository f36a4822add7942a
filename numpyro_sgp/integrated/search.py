"""The mode of the hyperparameters, nodes around it, and their weights."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.spatial import KDTree
from scipy.special import logsumexp

from numpyro_sgp.fitting.progress import TIME_USED
from numpyro_sgp.fitting.scales import MOVES
from numpyro_sgp.integrated.nodes import (
    AT_LIMIT,
    MIRRORED,
    NO_MODE,
    OTHER_MODE,
    Drawn,
    Grid,
    Nodes,
    One,
)
from numpyro_sgp.integrated.profile import Gaussian, Node, Profile
from numpyro_sgp.integrated.proposals import (
    ROUND,
    WIDER,
    next_proposal,
    student_draws,
    weights_of,
)
from numpyro_sgp.integrated.starts import from_elsewhere

Slopes = Callable[[np.ndarray], np.ndarray]
Periods = Callable[[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]

# Nats below the highest from where a grid does not go on, by its dimension; the second is
# for problems that take long. It has the neighbours of all points above that.
_DROP = {1: (9.0, 9.0), 2: (8.0, 6.0), 3: (7.5, 6.0)}
_AS_LOW = 6.0  # nats below the highest, are modes that are told
# Distance of a grid's points, in standard deviations at the mode: at 1.4 sums over them
# are those of a Gaussian to 1e-4; densities that are none need more. The second is for
# problems that take long.
_SPACING = {1: (0.5, 1.0), 2: (0.75, 1.2), 3: (1.0, 1.4)}
_LONG = 5e8  # rows times numbers of the field squared
_ENOUGH = 1000.0, 300.0  # effective number of nodes; of problems that take long
_FAR = 12.0  # from where an ascent begins it goes in each coordinate
_NEAR = 0.2  # nearer it does not begin again
_ASCENTS = 6
_TURNS = 2  # of several periods
_CLIMBED = 3  # starts, the best ones
_LARGEST = 3.0  # standard deviation of a direction at the mode: twenty times in a scale
# Steps that slopes at a mode are taken at, in float32 and float64: in coordinates, and in
# standard deviations.
_STEPS, _OF_SD = (0.1, 1e-2), (0.5, 0.1)
# Nats that values fall by a standard deviation away from a mode, of a Gaussian .5.
_FLAT, _STEEP = 0.1, 2.0
_ROUNDS, _LENGTHS = 4, 20  # of axes, and of lengths of one
_STILL = 1e-6  # slope of what does not move with a hyperparameter
_EACH, _HELD_STEPS = 3, 20  # lengthscales that are moved one by one; steps with them held
_AS_HIGH = 0.02  # nats below a mode, is what mirrors it
_RISE = 0.1  # nats uphill of what is no mode
_LOOK = 1.5  # sds away from the mode, where it is seen whether draws are weighed


class Interrupted(Exception):
    """Time is used up."""


class Search:
    """
    Looks for the mode and lays nodes around it.

    :param profile: log density and best q(w) at hyperparameters.
    :param max_nodes: most nodes.
    :param until: time on the monotonic clock at which to end; None for no limit.
    :param progress: called with a text and the number of nodes after each.
    """

    def __init__(self, profile: Profile, max_nodes: int, until: float | None, progress):
        self.profile, self.max_nodes, self.until = profile, max_nodes, until
        self._progress = progress
        #: Of ascents, with nats below the best.
        self.ends: list[tuple[np.ndarray, float]] = []
        self._single = np.dtype(profile.field.dtype).itemsize < 8

    def _evaluate(self, free, start: Gaussian, to_weigh=False):
        """A node, of those around the mode, which is found however long that takes."""
        if self._is_late():
            raise Interrupted
        return self.profile(free, start, to_weigh=to_weigh)

    def _is_late(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    # ---- the mode -------------------------------------------------------------------

    def around(
        self,
        starts: np.ndarray,
        slopes: Slopes | None = None,
        periods: Periods | None = None,
    ) -> tuple[Node, np.ndarray]:
        """
        The mode, and its axes: standard deviations, the columns of an array ``(p, p)``.

        :param slopes: from hyperparameters to slopes of log lengthscales, ``(kernels, p)``.
        :param periods: from hyperparameters to the same with other periods, ``(K, p)``, of
            each kernel whose period is open, and which of them a period is made of,
            ``(p,)``.
        """
        mode = self.mode(starts, slopes, periods)
        return mode, self.axes(mode) if len(mode.free) else np.eye(0)

    def mode(
        self,
        starts: np.ndarray,
        slopes: Slopes | None = None,
        periods: Periods | None = None,
    ) -> Node:
        """
        The highest of what is uphill of the best of some starts, and then of other periods
        and lengthscales with all else where it suits these.

        :param starts: hyperparameters to begin from, ``(S, p)``.
        :param slopes: derivatives of log lengthscales, see :meth:`around`.
        :param periods: see :meth:`around`.
        :raises ValueError: if no start has a finite density.
        """
        q = self.profile.start()
        tried = [self.profile(start, q)[0] for start in starts]
        finite = [node for node in tried if np.isfinite(node.value)]
        finite.sort(key=lambda node: -node.value)
        if not finite:
            raise ValueError(
                "The bound is not finite at any of the starting values of the "
                "hyperparameters, at their prior's medians and draws. "
                f"{self.profile.without_density()}Look at data and scales of priors (or "
                "of responses: exp(f) may overflow; with Uniform(f - 1, f + 1) none is)."
            )
        finite[0] = from_elsewhere(self.profile, finite[0], self.until)
        if not finite[0].free.size:
            return self.profile.choose_points(finite[0]) or finite[0]
        ends = [self._uphill(finite[0])]
        ends += [self._uphill(at) for at in finite[1:_CLIMBED] if not self._is_late()]
        best = max(ends, key=lambda node: node.value)
        if periods is not None:
            ends += self._other_periods(best, periods)
            best = max(ends, key=lambda node: node.value)
        if slopes is not None and best.free.size > 1:
            ends += self._other_scales(best, np.atleast_2d(slopes(best.free)))
            best = max(ends, key=lambda node: node.value)
        if (other := from_elsewhere(self.profile, best, self.until)) is not best:
            ends.append(best := self._uphill(other))
        self.ends = [(end.free, best.value - end.value) for end in ends]
        moved = self.profile.choose_points(best)
        return best if moved is None else self._uphill(moved)

    def _other_periods(self, best: Node, periods: Periods) -> list[Node]:
        """What is uphill of other periods, each beside what the others have come to."""
        found: list[Node] = []
        for _ in range(_TURNS):
            number = len(places := periods(best.free))
            for which in range(number):
                places = periods(best.free) if which else places
                for place in places[which : which + 1]:  # none where a slope vanishes
                    found += self._climbed(*place)
                best = max([best, *found], key=lambda node: node.value)
            if number < 2:
                break
        return found

    def _climbed(self, starts: np.ndarray, held: np.ndarray) -> list[Node]:
        """
        What is uphill of the best of some starts.

        :param held: which coordinates stay at first.
        """
        q, timely = self.profile.start(), (at for at in starts if not self._is_late())
        tried = [self.profile(start, q)[0] for start in timely]
        tried = [node for node in tried if np.isfinite(node.value)]
        tried.sort(key=lambda node: -node.value)
        begun = [self._ascent(node, _FAR, held)[0] for node in tried[:_CLIMBED]]
        return [self._uphill(node) for node in begun]

    def _other_scales(self, best: Node, slopes: np.ndarray) -> list[Node]:
        """
        What is uphill where lengthscales are others by a factor, each by itself (where they
        are few) or all together, and are held at first: of noise that takes a wiggle of f
        with it there is an optimum from which nothing leads to the wiggle.

        :param slopes: of log lengthscales, ``(kernels, p)``.
        """
        known = np.all(np.isfinite(slopes), axis=1)
        moving = slopes[known & np.any(np.abs(slopes) > _STILL, axis=1)]
        few = 1 < len(moving) <= _EACH
        each: list[np.ndarray] = np.split(moving, len(moving)) if few else []
        found: list[Node] = []
        for factor, alone in MOVES if len(moving) else ():
            for rows in each if alone else [moving]:
                if self._is_late():
                    return found
                step = np.linalg.pinv(rows) @ np.full(len(rows), np.log(factor))
                start = self.profile(best.free + step, self.profile.start())[0]
                if np.isfinite(start.value):
                    held = np.any(np.abs(rows) > _STILL, axis=0)
                    begun, _ = self._ascent(start, _FAR, held)
                    found.append(self._uphill(begun))
        return found

    def _uphill(self, best: Node) -> Node:
        """
        The mode that is uphill of a node, however far; in smaller boxes where SciPy met a
        bound that is not finite, which its line search has no way back from.
        """
        far = _FAR
        for _ in range(2 * _ASCENTS):
            before, (best, astray) = best, self._ascent(best, far)
            moved = np.abs(best.free - before.free).max()
            if moved >= 0.99 * far:
                continue
            if not astray or far < _NEAR:
                break
            far /= 4.0
        return best

    def _ascent(
        self, best: Node, far: float, held: np.ndarray | None = None
    ) -> tuple[Node, bool]:
        """
        The best node uphill within a box, and whether the bound was not finite somewhere
        on a way that did not end where it is flat.

        :param held: which coordinates stay, on a way of some steps.
        """
        state: dict[str, Any] = {"q": best.q, "best": best, "astray": False}

        def loss(free):
            node, slope = self.profile(free, state["q"], True)
            self._progress("mode", node.value)
            if not (np.isfinite(node.value) and np.all(np.isfinite(slope))):
                state["astray"] = True
                return 1e10, np.zeros_like(free)
            if node.value >= state["best"].value:
                state["q"], state["best"] = node.q, node
            return -node.value, -slope

        tolerance = 0.05 if self._single else 1e-3
        limits = {"gtol": tolerance, "ftol": 1e-10, "maxiter": 200}
        reach = np.full(best.free.shape, far)
        if held is not None:
            if held.all():
                return best, False
            reach[held], limits["maxiter"] = 0.0, _HELD_STEPS
        bounds = [*zip(best.free - reach, best.free + reach, strict=True)]
        found = minimize(
            loss, best.free, jac=True, method="L-BFGS-B", bounds=bounds, options=limits
        )
        is_flat = np.abs(found.jac).max() <= tolerance
        return state["best"], state["astray"] and not is_flat

    def _on_slope(self, mode: Node, axes: np.ndarray) -> str:
        """What to say of a mode from where it goes up, a standard deviation or more."""
        along = self.profile(mode.free, mode.q, True)[1] @ axes
        size = np.linalg.norm(along)
        if not size > 1.0:
            return ""
        uphill = axes @ along / size  # of a kink slopes say nothing
        higher = max(self._value(mode, step * uphill) for step in (0.1, 0.3, 1.0))
        return NO_MODE if higher > mode.value + _RISE else ""

    def _value(self, mode, step) -> float:
        return self.profile(mode.free + step, mode.q)[0].value

    def axes(self, mode: Node) -> np.ndarray:
        """
        Standard deviations of a Gaussian at the mode along its principal axes, none longer
        than three: from differences of slopes, taken again nearer to the mode (or farther
        away) where values there say that these were of something else.
        """
        directions = _STEPS[not self._single] * np.eye(len(mode.free))
        for _ in range(_ROUNDS):
            axes = self._principal_axes(mode, directions)
            lengths = np.array([self._length(mode, axis) for axis in axes.T])
            axes = axes * lengths
            if np.all((lengths > 0.5) & (lengths < 2.0)):
                break
            directions = _OF_SD[not self._single] * axes
        return axes

    def _principal_axes(self, mode, directions):
        """By slopes a step away in each direction, which are the columns."""
        hessian = np.zeros((len(mode.free),) * 2)
        for i, step in enumerate(directions.T):
            up = self.profile(mode.free + step, mode.q, True)[1]
            down = self.profile(mode.free - step, mode.q, True)[1]
            hessian[i] = 0.5 * (down - up) @ directions
        hessian = 0.5 * (hessian + hessian.T)
        if not np.all(np.isfinite(hessian)):
            raise ValueError(
                "The bound has no finite curvature at the mode of the hyperparameters "
                f"({mode.free} in their coordinates). Look at the priors."
            )
        curvature, vectors = np.linalg.eigh(hessian)
        along = directions @ vectors
        least = (np.linalg.norm(along, axis=0) / _LARGEST) ** 2
        return along / np.sqrt(np.maximum(curvature, least))

    def _length(self, mode, axis) -> float:
        """How much longer an axis is to be, so that values fall by about half a nat."""
        length, longest = 1.0, _LARGEST / np.linalg.norm(axis)
        for _ in range(_LENGTHS):
            ends = [self._value(mode, sign * length * axis) for sign in (-1.0, 1.0)]
            fall = mode.value - np.mean(ends)
            if not np.isfinite(fall):
                length *= 0.3
            elif fall > _STEEP:
                length *= max(0.1, np.sqrt(0.5 / fall))
            elif 0.0 < fall < _FLAT and 1.0 <= length < 0.99 * longest:
                length *= min(3.0, np.sqrt(0.5 / fall), longest / length)
            else:
                break
        return length

    # ---- nodes ----------------------------------------------------------------------

    def nodes(self, mode: Node, axes: np.ndarray) -> Nodes:
        """
        Nodes around the mode.

        :param axes: as :meth:`around` has them.
        """
        dim = len(mode.free)
        astray = self._on_slope(mode, axes) if dim else ""
        ways = [sign * axis for axis in axes.T[::-1] for sign in (-1.0, 1.0)]
        places = [mode.free + _LOOK * way for way in ways if self.max_nodes > 1]
        mode = self.profile.settle(mode, places)
        if dim == 0 or self.max_nodes == 1:
            found = self._one(mode, axes)
        elif dim in _SPACING:
            found = self._grid(mode, axes)
        else:
            found = self._drawn(mode, axes)
        told = [astray, found.stopped]
        for free, below in self.ends:
            if not (below < _AS_LOW and found.is_beside(free)):
                continue
            if below < _AS_HIGH:
                told.append(MIRRORED)
            else:
                told.append(f"{OTHER_MODE}, {below:.2g} nats lower, has no nodes")
            break
        return replace(found, stopped="; ".join(filter(None, told)))

    def _one(self, mode, axes, stopped=""):
        dim = len(mode.free)
        log_evidence = mode.value
        if dim:  # Laplace's term
            log_evidence += 0.5 * dim * np.log(2 * np.pi) + np.linalg.slogdet(axes)[1]
        return One(
            (mode,),
            np.ones(1),
            log_evidence,
            0.0,
            mode.free,
            axes,
            self.profile.points,
            stopped,
        )

    def _grid(self, mode, axes):
        """
        All points of a grid along the axes that are neighbours of points connected with the
        mode by such no more than some nats below it.
        """
        dim, is_long = len(mode.free), self.profile.work > _LONG
        spacing, drop = _SPACING[dim][is_long], _DROP[dim][is_long]
        origin = (0,) * dim
        known, waiting, at, stopped = {origin: mode}, {origin}, origin, ""
        try:
            while waiting:
                at = max(waiting, key=lambda k: known[k].value)
                waiting.remove(at)
                top = max(node.value for node in known.values())
                if known[at].value < top - drop:
                    break
                for axis, sign in itertools.product(range(dim), (-1, 1)):
                    index = (*at[:axis], at[axis] + sign, *at[axis + 1 :])
                    if index in known:
                        continue
                    if len(known) >= self.max_nodes:
                        stopped = AT_LIMIT.format(self.max_nodes)
                        raise Interrupted
                    free = mode.free + spacing * (axes @ np.array(index, float))
                    node, _ = self._evaluate(free, known[at].q, to_weigh=True)
                    known[index] = node
                    if np.isfinite(node.value):
                        waiting.add(index)
                    self._progress("nodes", len(known))
        except Interrupted:
            stopped = stopped or TIME_USED
            waiting.add(at)  # of which not all neighbours were seen
            if len(known) == 1:
                return self._one(mode, axes, stopped)
        finite = {k: node for k, node in known.items() if np.isfinite(node.value)}
        values = np.array([node.value for node in finite.values()])
        total = logsumexp(values)
        weights = np.exp(values - total)
        cell = dim * np.log(spacing) + np.linalg.slogdet(axes)[1]
        top = values.max() - drop
        open_ = [k in waiting and node.value > top for k, node in finite.items()]
        border = float(weights[np.array(open_, bool)].sum())
        found = tuple(finite.values()), weights, float(total + cell), border
        return Grid(*found, mode.free, axes, self.profile.points, stopped)

    def _drawn(self, mode, axes):
        """
        Quasi-random nodes from a Student t at the mode, then from such with the mean and
        covariance found, all weighted by the mixture of what they were drawn from.
        """
        dim = len(mode.free)
        nodes, z, proposals, stopped = [], np.zeros((0, dim)), [], ""
        centre, root = np.zeros(dim), WIDER * np.eye(dim)
        enough = _ENOUGH[self.profile.work > _LONG]
        weights, log_mean = np.zeros(0), -np.inf
        try:
            while True:
                number = min(ROUND, self.max_nodes - len(nodes))
                if number < 1:
                    stopped = AT_LIMIT.format(self.max_nodes)
                    break
                proposals.append((centre, root))
                new = student_draws(centre, root, number, seed=len(proposals))
                tree = KDTree(z) if len(z) else None
                for point in new:
                    near = mode if tree is None else nodes[tree.query(point)[1]]
                    free = mode.free + axes @ point
                    node, _ = self._evaluate(free, near.q, to_weigh=True)
                    if not np.isfinite(node.value):
                        node = node._replace(value=-np.inf, q=mode.q)
                    nodes.append(node)
                    z = np.concatenate([z, point[None]])
                    self._progress("nodes", len(nodes))
                weights, log_mean = weights_of(z, nodes, proposals, mode.value)
                effective = 1.0 / np.sum(weights**2)
                if effective > enough:
                    break
                centre, root = next_proposal(z, weights, root)
        except Interrupted:
            stopped = TIME_USED
            if not nodes:
                return self._one(mode, axes, stopped)
            weights, log_mean = weights_of(z[: len(nodes)], nodes, proposals, mode.value)
        kept = [i for i in range(len(nodes)) if np.isfinite(nodes[i].value)]
        weights = weights[kept] / weights[kept].sum()
        log_evidence = float(mode.value + log_mean + np.linalg.slogdet(axes)[1])
        found = tuple(nodes[i] for i in kept), weights, log_evidence, 0.0
        return Drawn(*found, mode.free, axes, self.profile.points, stopped)

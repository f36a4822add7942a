"""Settings of the hyperparameters with weights, and draws between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.interpolate import RBFInterpolator
from scipy.linalg import solve_triangular
from scipy.spatial import KDTree
from scipy.special import ndtri

from numpyro_sgp.fitting.progress import TIME_USED
from numpyro_sgp.fitting.verdict import ENOUGH_NATS
from numpyro_sgp.integrated.profile import Node

_SMOOTH = 0.05  # how far draws are from nodes that were drawn, in standard deviations
_CANDIDATES = 20_000
_BORDER, _MUCH = 0.01, 0.2  # of the mass
_FEW, _ENOUGH = 100.0, 500.0  # effective nodes of those that were drawn
_HOPELESS = 25.0  # of so few, among many, as many nodes more would be no cure
_MANY = 1000  # nodes that were drawn
_FEW_OF_GRID = 2.0  # as spaced as they are at most, they are 3.5 and more
_FAR_DOWN = 6.0  # nats below the highest up to where all grids go on
_LEAST_FALL = 0.1  # nats from node to node, of tails
_LOW = 40.0  # nats below the highest from where nodes hold no spline
_SEEN = 1e-6  # weight of nodes that count
_UNEVEN = 0.25  # nats: sd of what is left open from which on it is told
_LARGEST = 0.01  # share of one candidate
_ROWS_PER_COLUMN = 4  # at least, for a second moment that is far from singular
_ALIKE = 0.1  # standard deviations, and their logarithm, that draws are from nodes
#: What :attr:`Nodes.stopped` begins with where nodes are around no mode.
NO_MODE = "the ascent of hyperparameters ended on a slope, before any mode"
_LIMITED = "at the limit of"
#: What is there where there are as many as may be.
AT_LIMIT = f"{_LIMITED} {{}} nodes"
#: What is to be done where there are as many as may be.
LARGER = "a larger max_nodes"
#: What is to be done where more nodes would not help.
_OTHERWISE = (
    "narrower priors, hierarchies of priors with a location and a scale, or NUTS on "
    "sgp.whiten(model)"
)
#: What is there where there is mass that nodes are not around.
OTHER_MODE = "another mode"
#: What is there where signs, or an order, of latents make no difference.
MIRRORED = (
    "a mode as high has no nodes (signs or an order that make no difference?), and the log "
    "evidence does not count it"
)


@dataclass(frozen=True, eq=False)
class Nodes:
    """
    Hyperparameters with weights.

    :param nodes: K of them.
    :param weights: shape ``(K,)``, which sum to one.
    :param log_evidence: log of the integral of exp(value) over unconstrained
        hyperparameters: a lower bound on the log evidence, but for the error of the nodes
        and of weighed draws. Of too few nodes that were drawn it is an estimate that may be
        anywhere.
    :param border: share of the mass that is at the border of a grid, from where no further
        nodes were looked at; zero where nodes are drawn.
    :param mode: the mode, ``(p,)``.
    :param axes: columns are standard deviations at the mode, ``(p, p)``.
    :param points: values at GP sites, inducing points for the most part, which all nodes
        have (:attr:`Field.points`, or those that were chosen at the mode).
    :param stopped: why there are no more nodes.
    """

    kind: ClassVar[str]
    #: Standard deviations at the mode from the nearest node where there is another mode.
    apart: ClassVar[float] = 3.0

    nodes: tuple[Node, ...]
    weights: np.ndarray
    log_evidence: float
    border: float
    mode: np.ndarray
    axes: np.ndarray
    points: dict[str, dict]
    stopped: str

    @property
    def effective(self) -> float:
        r"""Effective number of nodes, :math:`1 / \sum_k \pi_k^2`."""
        return float(1.0 / np.sum(self.weights**2))

    @property
    def too_few(self) -> bool:
        """Whether more nodes would say more."""
        return self.border > _BORDER

    @property
    def more_would_do(self) -> bool:
        """Whether more nodes of the same kind might be enough, where they are too few."""
        return TIME_USED in self.stopped or _LIMITED in self.stopped

    @property
    def mend(self) -> str:
        """What to do where they are too few, or elsewhere; empty where they are not."""
        if self.cut_off:
            return "NUTS, of sgp.whiten(model): the posterior is far wider than nodes reach"
        if self.astray:
            return "priors nearer to the data, or other units of these"
        if self.several:
            return "priors that choose one of them, or MCMC"
        if not self.too_few:
            return ""
        if not self.more_would_do:
            return _OTHERWISE
        return "more seconds" if TIME_USED in self.stopped else LARGER

    @property
    def lacks_more(self) -> bool:
        """Whether more of them are all that is to be done."""
        elsewhere = self.astray or self.several or self.cut_off
        return self.too_few and self.more_would_do and not elsewhere

    @property
    def at_limit(self) -> bool:
        """Whether there are as many as may be, before enough of them count."""
        return _LIMITED in self.stopped

    @property
    def cut_off(self) -> bool:
        """Whether much of the mass is where many nodes end, so that most may be beyond."""
        return self.border > _MUCH and len(self.nodes) >= _MANY

    @property
    def beyond(self) -> float:
        """Mass beyond nodes that are far down, as tails go on, relative to all."""
        return 0.0

    @property
    def error(self) -> float:
        """Standard error of the log evidence, as a sum over these nodes; zero of a grid."""
        return 0.0

    @property
    def few_of_many(self) -> bool:
        """
        Whether there are as many as may be, of which so few count that others would have
        mass that these do not meet.
        """
        return False

    @property
    def is_bound(self) -> bool:
        """Whether the log evidence is a lower bound, but for small errors."""
        return True

    @property
    def astray(self) -> bool:
        """Whether no mode was found for them to be around."""
        return self.stopped.startswith(NO_MODE)

    @property
    def several(self) -> bool:
        """Whether there is another mode, that they are not around."""
        return OTHER_MODE in self.stopped

    @property
    def left(self) -> float:
        """Nats that q(w) is from the best, on average; NaN where that is not known."""
        each = np.array([node.left for node in self.nodes])
        seen = self.weights > _SEEN
        return float(self.weights[seen] @ np.maximum(each[seen], 0.0))

    @property
    def open(self) -> np.ndarray:
        """Nats that inducing points leave open at each, ``(K,)``."""
        return np.array([node.open for node in self.nodes])

    def told_of_evidence(self) -> list[str]:
        """A line on the log evidence, if it is known."""
        if np.isnan(self.log_evidence):
            return []
        return [f"  log evidence: {self.log_evidence:.7g} ({self._told_of_evidence()})"]

    def _told_of_evidence(self) -> str:
        if len(self.nodes) == 1 and self.mode.size:
            return "by Laplace's approximation"
        if self.cut_off:
            return "far too low: nodes end where much of their mass is"
        return "a lower bound, nearly" if self.is_bound else "not known"

    def told_of_doubts(self) -> list[str]:
        """A line for each thing that is known to be wrong."""
        told = []
        if not self.left <= ENOUGH_NATS:
            told.append(f"  q(w) is about {self.left:.2g} nats from the best: see check()")
        if self.too_few:
            what = "more nodes are needed" if self.lacks_more else "too few nodes count"
            told.append(f"  {what}: {self.mend}")
        mean = self.weights @ self.open
        sd = np.sqrt(self.weights @ (self.open - mean) ** 2)  # NaN is not large
        if sd > _UNEVEN:
            told.append(
                f"  inducing points (and jitter) leave {mean:.2g} ± {sd:.1g} nats open, by "
                "the nodes: hyperparameters lean to where it is less: see check()"
            )
        return told

    def warning(self) -> str:
        """What to say where they are too few, or elsewhere; empty where they are not."""
        if OTHER_MODE in self.stopped and not self.too_few:
            return (
                f"Nested inference has nodes around one mode alone ({self.stopped}): what "
                f"it says is of the hyperparameters there. Try {self.mend}."
            )
        if not self.too_few:
            return ""
        why = f" ({self.stopped})" if self.stopped else ""
        if self.cut_off:
            return (
                f"Nodes of nested inference end where {self.border:.0%} of their mass is: "
                f"hyperparameters and log evidence are wrong. Try {self.mend}."
            )
        effective = (
            f"{self.effective:.3g}" if self.effective < 100 else round(self.effective)
        )
        return (
            f"Nested inference has {effective} effective nodes of "
            f"{len(self.nodes)}{why}: too few for the hyperparameters and the log "
            f"evidence. Try {self.mend}."
        )

    def is_beside(self, free: np.ndarray) -> bool:
        """Whether hyperparameters are far from all nodes."""
        away = self.standardised(self.free) - self.standardised(free[None])
        return bool(np.min(np.linalg.norm(away, axis=1)) > self.apart)

    @property
    def free(self) -> np.ndarray:
        """Unconstrained hyperparameters, ``(K, p)``."""
        return np.stack([node.free for node in self.nodes])

    @property
    def values(self) -> np.ndarray:
        """Their log densities, not normalised, ``(K,)``."""
        return np.array([node.value for node in self.nodes])

    def standardised(self, free: np.ndarray) -> np.ndarray:
        """In standard deviations from the mode."""
        return np.linalg.solve(self.axes, (free - self.mode).T).T

    @property
    def are_few(self) -> bool:
        """Whether there are too few for anything between them."""
        return len(self.nodes) < len(self.mode) + 3

    def places(self, number: int, seed: int = 0) -> np.ndarray:
        """Indices of nodes, drawn by their weights."""
        rng = np.random.default_rng(seed)
        return rng.permutation(systematic(self.weights, number, rng))

    def draws(self, number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """
        Draws of hyperparameters, and for each the node that is nearest.

        :return: unconstrained, ``(number, p)``, and indices of nodes, ``(number,)``.
        """
        if self.are_few:
            places = self.places(number, seed)
            return self.free[places], places
        return self._between(number, np.random.default_rng(seed))

    def draws_beside(self, loose: np.ndarray | bool, number: int, seed: int = 0) -> tuple:
        """
        The same for a field that is drawn from that of the node: with others than those of
        the node its sum with a level, or its product with an amplitude, would be off by
        more than its own standard deviation.

        :param loose: which hyperparameters may be others, ``(p,)``.
        """
        if not np.any(loose):
            places = self.places(number, seed)
            return self.free[places], places
        free, places = self.draws(number, seed)
        return np.where(loose, free, self.free[places]), places

    def _near(self, number, rng):
        """Draws near nodes, with the mean and covariance of these."""
        z, dim = self.standardised(self.free), len(self.mode)
        places = rng.permutation(systematic(self.weights, number, rng))
        mean, spread = _moments(z, self.weights)
        root = np.linalg.cholesky(spread + 1e-6 * np.eye(dim))
        near = np.sqrt(1 - _SMOOTH**2) * (z[places] - mean) + mean
        near = near + _SMOOTH * rng.normal(size=(number, dim)) @ root.T
        return self.mode + near @ self.axes.T, places

    def _between(self, number, rng):
        raise NotImplementedError


class One(Nodes):
    """The mode alone."""

    kind = "one"

    @property
    def too_few(self) -> bool:
        return TIME_USED in self.stopped


class Drawn(Nodes):
    """Nodes that were drawn; draws are near them, with their mean and covariance."""

    kind = "drawn"

    @property
    def too_few(self) -> bool:
        return self.effective < _FEW

    @property
    def more_would_do(self) -> bool:
        """See :attr:`Nodes.more_would_do`: not where nearly all of many count nothing."""
        return len(self.nodes) < _MANY or self.effective > _HOPELESS

    @property
    def error(self) -> float:
        """See :attr:`Nodes.error`: of importance weights, at best."""
        return float(np.sqrt(max(1.0 / self.effective - 1.0 / len(self.nodes), 0.0)))

    @property
    def few_of_many(self) -> bool:
        return self.at_limit and self.effective < _ENOUGH

    @property
    def is_bound(self) -> bool:
        return not self.too_few

    def _told_of_evidence(self) -> str:
        if self.is_bound:
            return super()._told_of_evidence()
        known = f"no bound, known to ± {self.error:.1g} at best"
        return f"of {self.effective:.3g} effective nodes: {known}"

    def _between(self, number, rng):
        return self._near(number, rng)


class Grid(Nodes):
    """
    Nodes on a grid; draws are from the density that goes through their values, in the
    cells around nodes. Where that is none that the nodes have, as between nodes whose
    values jump, they are near nodes as those of :class:`Drawn`.
    """

    kind = "grid"
    apart = 1.5

    @property
    def too_few(self) -> bool:
        return super().too_few or self.effective < _FEW_OF_GRID

    @property
    def is_bound(self) -> bool:
        """See :attr:`Nodes.is_bound`: sums over points too far apart may be anything."""
        return self.effective >= _FEW_OF_GRID

    @property
    def beyond(self) -> float:
        """
        See :attr:`Nodes.beyond`: along each axis values go on to fall as between the last
        two nodes. It is within a factor of three of what is there, or so.
        """
        if len(self.nodes) < 2:
            return 0.0
        z = self.standardised(self.free)
        apart = np.median(KDTree(z).query(z, k=2)[0][:, 1])
        places = map(tuple, np.round(z / apart).astype(int))
        known = dict(zip(places, self.values - self.values.max(), strict=True))
        mass = 0.0
        for place, value in known.items():
            if value > -_FAR_DOWN:
                continue
            for step in (*np.eye(len(place), dtype=int), *-np.eye(len(place), dtype=int)):
                inner = known.get(tuple(np.subtract(place, step)))
                if inner is not None and tuple(np.add(place, step)) not in known:
                    ratio = np.exp(min(value - inner, -_LEAST_FALL))
                    mass += np.exp(value) * ratio / (1.0 - ratio)
        lines = len(self.mode)  # that pass the same mass
        return float(mass / lines / sum(map(np.exp, known.values())))

    def _between(self, number, rng):
        z, dim = self.standardised(self.free), len(self.mode)
        if np.sum(self.values > self.values.max() - _LOW) <= dim:
            return self._near(number, rng)  # no spline goes through so few
        tree = KDTree(z)
        apart = np.median(tree.query(z, k=2)[0][:, 1])
        # Evenly in the cells around nodes: beyond them nothing holds the spline.
        heavy = 0.9 * self.weights + 0.1 / len(z)
        heavy /= heavy.sum()
        centres = systematic(heavy, _CANDIDATES, rng)
        candidates = z[centres] + apart * rng.uniform(-0.5, 0.5, (_CANDIDATES, dim))
        log_weight = _interpolated(z, self.values, tree, apart)(candidates)
        log_weight = log_weight - np.log(heavy[centres])
        weight = np.exp(log_weight - log_weight.max())
        weight /= weight.sum()
        if weight.max() > _LARGEST or not self._alike(z, candidates, weight):
            return self._near(number, rng)
        places = rng.permutation(systematic(weight, number, rng))
        return self.mode + candidates[places] @ self.axes.T, centres[places]

    def _alike(self, z, candidates, weight) -> bool:
        """Whether candidates have about the moments of the nodes."""
        (mean, spread), (own, wide) = (
            _moments(z, self.weights),
            _moments(candidates, weight),
        )
        sd = np.sqrt(np.diag(spread)) + 1e-9
        ratio = np.sqrt(np.diag(wide)) / sd
        near = np.all(np.abs(own - mean) < _ALIKE * sd)
        return bool(near and np.all(np.abs(np.log(ratio)) < _ALIKE))


def _moments(z, weights):
    """Mean and covariance."""
    mean = weights @ z
    return mean, (z - mean).T * weights @ (z - mean)


def _interpolated(z, values, tree, apart) -> Callable:
    """
    A smooth function through log densities: a quadratic and a spline of the rest, nowhere
    above all of the nodes around, where a spline overshoots.
    """
    top = values.max()
    kept = values > top - _LOW
    dim = z.shape[1]
    least = (dim + 1) * (dim + 2) // 2
    degree = 2 if kept.sum() > 2 * least else 1
    smooth = RBFInterpolator(z[kept], values[kept] - top, kernel="cubic", degree=degree)
    padded = np.append(values - top, -np.inf)  # what the tree finds where no node is

    def at(points):
        reach = apart * (1 + 1e-3)  # nodes are rounded
        around = tree.query(points, 2**dim, p=np.inf, distance_upper_bound=reach)[1]
        highest = padded[around.reshape(len(points), -1)].max(axis=1)
        return np.minimum(smooth(points), highest)

    return at


def systematic(weights, number, rng):
    """Indices drawn with these probabilities, evenly."""
    places = (rng.uniform() + np.arange(number)) / number
    return np.minimum(np.searchsorted(np.cumsum(weights), places), len(weights) - 1)


def balanced(
    number: int, size: int, apart: tuple[int, int], rng: np.random.Generator
) -> np.ndarray:
    """
    Standard normal numbers ``(number, size + J N)``, each second row the negative of the
    one before. Where ``number`` is eight times ``size + J`` and more, and even, the first
    columns are quasi-random, with the identity as their second moment, and so are the J of
    each row, which have no correlation with the first: means and variances of what is
    linear in the first and in those of one row have no noise.

    :param size: columns that go together.
    :param apart: (J, N), columns of each of N rows, which are beside the first ones alone.
    """
    from scipy.stats import qmc  # slow to import

    half = -(-number // 2)
    rows = rng.normal(size=(half, *apart))
    if half >= _ROWS_PER_COLUMN * (size + apart[0]):
        uniform = qmc.Sobol(size, rng=rng).random_base2(max(half - 1, 1).bit_length())
        x = ndtri(np.clip(uniform[:half], 1e-12, 1 - 1e-12))
        L = np.linalg.cholesky(x.T @ x / half)
        x = solve_triangular(L, x.T, lower=True).T
        rows -= (x @ (x.T @ rows.reshape(half, -1)) / half).reshape(rows.shape)
        by_row = rows.transpose(2, 1, 0)
        L = np.linalg.cholesky(by_row @ by_row.transpose(0, 2, 1) / half)
        rows = np.linalg.solve(L, by_row).transpose(2, 1, 0)
    else:
        x = rng.normal(size=(half, size))
    x = np.concatenate([x, rows.reshape(half, -1)], axis=1)
    return np.stack([x, -x], axis=1).reshape(-1, x.shape[1])[:number]


#: By what a file calls them.
KINDS: dict[str, type[Nodes]] = {kind.kind: kind for kind in (One, Drawn, Grid)}

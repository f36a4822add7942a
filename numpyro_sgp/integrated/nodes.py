"""Settings of the hyperparameters with weights, and draws between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.interpolate import RBFInterpolator
from scipy.spatial import KDTree
from scipy.special import logsumexp

from numpyro_sgp.integrated.profile import Node

_SMOOTH = 0.2  # how far draws are from nodes that were drawn, in standard deviations
_CANDIDATES = 20_000
_BORDER = 0.01  # of the mass
_FEW = 100.0  # effective nodes of those that were drawn


@dataclass(frozen=True, eq=False)
class Nodes:
    """
    Hyperparameters with weights.

    :param nodes: K of them.
    :param weights: shape ``(K,)``, which sum to one.
    :param log_evidence: log of the integral of exp(value) over unconstrained
        hyperparameters: a lower bound on the log evidence, but for the error of the nodes
        and of weighed draws.
    :param border: share of the mass that is at the border of a grid, from where no further
        nodes were looked at; zero where nodes are drawn.
    :param mode: the mode, ``(p,)``.
    :param axes: columns are standard deviations at the mode, ``(p, p)``.
    :param points: values at GP sites, inducing points for the most part, which all nodes
        have (:attr:`Field.points`, or those that were chosen at the mode).
    :param stopped: why there are no more nodes.
    """

    kind: ClassVar[str]

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

    def draws(self, number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """
        Draws of hyperparameters, and for each the node that is nearest.

        :return: unconstrained, ``(number, p)``, and indices of nodes, ``(number,)``.
        """
        rng = np.random.default_rng(seed)
        if len(self.nodes) < len(self.mode) + 3:  # too few for anything between them
            return self._at_nodes(number, rng)
        return self._between(number, rng)

    def _at_nodes(self, number, rng):
        places = rng.permutation(_systematic(self.weights, number, rng))
        return self.free[places], places

    def _between(self, number, rng):
        raise NotImplementedError


class One(Nodes):
    """The mode alone."""

    kind = "one"


class Drawn(Nodes):
    """Nodes that were drawn; draws are near them, with their mean and covariance."""

    kind = "drawn"

    @property
    def too_few(self) -> bool:
        """See :attr:`Nodes.too_few`."""
        return self.effective < _FEW

    def _between(self, number, rng):
        z, dim = self.standardised(self.free), len(self.mode)
        places = rng.permutation(_systematic(self.weights, number, rng))
        mean = self.weights @ z
        spread = (z - mean).T * self.weights @ (z - mean) + 1e-6 * np.eye(dim)
        root = np.linalg.cholesky(spread)
        near = np.sqrt(1 - _SMOOTH**2) * (z[places] - mean) + mean
        near = near + _SMOOTH * rng.normal(size=(number, dim)) @ root.T
        return self.mode + near @ self.axes.T, places


class Grid(Nodes):
    """Nodes on a grid; draws are from the density that goes through their values."""

    kind = "grid"

    def _between(self, number, rng):
        z, dim = self.standardised(self.free), len(self.mode)
        tree = KDTree(z)
        smooth = _interpolated(z, self.values)
        # Candidates are around nodes, as wide as nodes are apart.
        apart = np.median(tree.query(z, k=2)[0][:, 1])
        width = 0.7 * max(apart, 0.25)
        heavy = 0.9 * self.weights + 0.1 / len(z)
        heavy /= heavy.sum()
        centres = rng.choice(len(z), _CANDIDATES, p=heavy)
        candidates = z[centres] + width * rng.normal(size=(_CANDIDATES, dim))
        distance, nearest = tree.query(candidates)
        log_proposal = np.concatenate(
            [
                logsumexp(
                    -0.5 * ((part[:, None] - z) ** 2).sum(-1) / width**2, b=heavy, axis=1
                )
                for part in np.array_split(candidates, 40)
            ]
        )
        log_weight = smooth(candidates) - log_proposal
        log_weight[distance > 2.5 * max(apart, 1.0)] = -np.inf
        weight = np.exp(log_weight - log_weight.max())
        places = _systematic(weight / weight.sum(), number, rng)
        order = rng.permutation(number)
        free = self.mode + candidates[places] @ self.axes.T
        return free[order], nearest[places][order]


def _interpolated(z, values) -> Callable:
    """A smooth function through log densities: a quadratic and a spline of the rest."""
    top = values.max()
    kept = values > top - 40.0
    dim = z.shape[1]
    least = (dim + 1) * (dim + 2) // 2
    degree = 2 if kept.sum() > 2 * least else 1
    smooth = RBFInterpolator(z[kept], values[kept] - top, kernel="cubic", degree=degree)

    def at(points):
        return np.minimum(smooth(points), 3.0)

    return at


def _systematic(weights, number, rng):
    """Indices drawn with these probabilities, evenly."""
    places = (rng.uniform() + np.arange(number)) / number
    return np.minimum(np.searchsorted(np.cumsum(weights), places), len(weights) - 1)


#: By what a file calls them.
KINDS: dict[str, type[Nodes]] = {kind.kind: kind for kind in (One, Drawn, Grid)}

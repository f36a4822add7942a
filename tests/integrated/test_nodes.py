"""The mode of hyperparameters, a grid around it and draws between, in plain NumPy."""

import itertools

import numpy as np
import pytest
from scipy.special import expit, logsumexp
from scipy.stats import beta, expon

from numpyro_sgp.integrated import nodes
from numpyro_sgp.integrated.check import _of_nodes
from numpyro_sgp.integrated.profile import Node
from numpyro_sgp.integrated.search import Search

X = np.linspace(0.0, 4.0, 15)
Y = np.array([-0.428, 0.5, 0.679, 0.563, 0.833, 0.11, -0.592, -1.07, -0.91, -0.801])
Y = np.append(Y, [-0.142, -0.002, 0.856, 1.332, 1.334])
D = (X[:, None] - X) ** 2
MODE = np.array([0.99, -1.56])
AXES = np.array([[-0.065, 0.631], [0.265, 0.033]])


def regression(free):
    """Log posterior of a lengthscale in (0, 1) and the noise, at ``(..., 2)``."""
    scale, noise = expit(free[..., 0]), np.exp(free[..., 1])
    values, vectors = np.linalg.eigh(np.exp(-0.5 * D / scale[..., None, None] ** 2))
    variances = np.maximum(values, 0.0) + noise[..., None] ** 2
    found = np.log(2 * np.pi * variances) + (Y @ vectors) ** 2 / variances
    slope = np.log(scale * (1.0 - scale)) + free[..., 1]
    prior = beta(2, 2).logpdf(scale) + expon.logpdf(noise) + slope
    return prior - 0.5 * found.sum(axis=-1)


def grid(log_density, mode, axes, spacing):
    """All points that are neighbours of points six nats below the best, connected."""
    dim = len(mode)
    known = {(0,) * dim: log_density(mode)}
    waiting = set(known)
    while waiting:
        at = waiting.pop()
        if known[at] < max(known.values()) - 6.0:
            continue
        for step in itertools.chain(np.eye(dim, dtype=int), -np.eye(dim, dtype=int)):
            index = tuple(np.add(at, step))
            if index not in known:
                known[index] = log_density(mode + spacing * axes @ np.array(index))
                waiting.add(index)
    values = np.array(list(known.values()))
    found = [
        Node(mode + spacing * axes @ np.array(index), value, None, 0.0, None)
        for index, value in known.items()
    ]
    weights = np.exp(values - logsumexp(values))
    return nodes.Grid(tuple(found), weights, 0.0, 0.0, mode, axes, {}, "")


def moments(free, weights):
    mean = weights @ free
    return mean, np.sqrt(weights @ (free - mean) ** 2)


def alike(draws, weights, free, tolerance):
    """Whether draws have the moments of weighted points, in their sds and relatively."""
    (mean, sd), wanted = moments(free, weights), draws.astype(float)
    away = np.abs(wanted.mean(0) - mean) / sd
    return np.all(away < tolerance) and np.all(np.abs(wanted.std(0) / sd - 1) < tolerance)


def test_draws_have_the_moments_of_dense_quadrature():
    """
    Where the density ends in a valley with walls, of which a spline through it knows
    nothing. 8,000 draws have means to .01 sd; the grid's points are .75 sds apart.
    """
    found = grid(regression, MODE, AXES, 0.75)
    drawn, nearest = found.draws(8000, 0)
    ends = np.linspace(-4.0, 6.0, 120), np.linspace(-6.0, 0.5, 120)
    dense = np.array(list(itertools.product(*ends)))
    values = regression(dense)
    weights = np.exp(values - logsumexp(values))
    assert alike(drawn, weights, dense, 0.05)
    noise, exact = np.exp(drawn[:, 1]), weights @ np.exp(dense[:, 1])
    assert abs(noise.mean() / exact - 1) < 0.02
    away = found.standardised(drawn) - found.standardised(found.free[nearest])
    assert np.abs(away).max() < 0.5 * 0.75 + 1e-6


@pytest.mark.parametrize(("dim", "spacing"), [(1, 1.0), (2, 0.75), (3, 1.4)])
def test_draws_of_a_gaussian_are_its_own(dim, spacing):
    """Which a grid has to 2e-3 of the mass, and 8,000 draws to .01."""
    found = grid(lambda z: -0.5 * z @ z, np.zeros(dim), np.eye(dim), spacing)
    drawn, _ = found.draws(8000, 0)
    assert np.all(np.abs(drawn.mean(0)) < 0.05)
    assert np.all(np.abs(np.cov(drawn.T) - np.eye(dim)) < 0.05)


def test_nothing_between_nodes_is_above_all_that_are_around():
    """Of a density with a wall between two nodes, beside which a spline overshoots."""
    found = grid(lambda z: -0.5 * z @ z - 30.0 * (z[0] > 1.2), np.zeros(2), np.eye(2), 0.75)
    z = found.free
    at = nodes._interpolated(z, found.values, nodes.KDTree(z), 0.75)
    points = np.random.default_rng(0).uniform(-2.2, 2.2, (2000, 2))
    away = np.abs(points[:, None] - z).max(axis=-1)
    around = np.where(away <= 0.75, found.values - found.values.max(), -np.inf)
    assert np.all(at(points) <= around.max(axis=1) + 1e-12)


def test_nodes_that_nothing_goes_through_are_drawn_near():
    """One node beside which all are low: a spike has no density between nodes."""
    found = grid(
        lambda z: -5.0 * (np.abs(z).max() > 0.1) - 0.02 * z @ z, np.zeros(1), np.eye(1), 0.5
    )
    drawn, nearest = found.draws(8000, 0)
    assert alike(drawn, found.weights, found.free, 0.03)
    shares = np.bincount(nearest, minlength=len(found.nodes)) / 8000
    np.testing.assert_allclose(shares, found.weights, atol=2e-4)


# ---- the mode ---------------------------------------------------------------------------


class Known:
    """A profile whose log density and its slope are known."""

    points, work = {}, 0.0

    def __init__(self, value, slope):
        self.value, self.slope, self.field = value, slope, self
        self.dtype = np.float64

    def start(self):
        return None

    def choose_points(self, mode):
        return None

    def settle(self, mode):
        return mode

    def __call__(self, free, start, with_slope=False, to_weigh=False):
        free = np.asarray(free, float)
        return Node(free, float(self.value(free)), None, 0.0, None), self.slope(free)


def search(value, slope, start, max_nodes=200):
    found = Search(Known(value, slope), max_nodes, None, lambda *_: None)
    return found.nodes(np.array([[start]]))


def test_a_mode_is_found_however_far_from_the_starts():
    """As that of noise in units of a millionth of the prior's, unconstrained."""
    found = search(lambda z: -np.sum((z - 40.0) ** 2) / 8, lambda z: (40.0 - z) / 4, 0.0)
    np.testing.assert_allclose(found.mode, 40.0, atol=1e-2)
    assert found.stopped == "" and not found.astray
    np.testing.assert_allclose(found.weights @ found.free, 40.0, atol=1e-2)
    assert not _of_nodes(found).mend


def test_a_mode_is_found_where_long_steps_overflow():
    """
    SciPy tries a step of the whole slope first; in float32 the bound is not finite there,
    and its line search ended where it began, "converged".
    """

    def value(free):
        return -0.5 * (free[0] - 1.0) ** 2 * 30.0 if free[0] < 3.0 else -np.inf

    found = search(value, lambda free: -30.0 * (free - 1.0), 0.0, max_nodes=1)
    np.testing.assert_allclose(found.mode, 1.0, atol=0.01)


@pytest.mark.parametrize("max_nodes", [1, 200])
def test_where_there_is_no_mode_the_check_knows_of_nothing(max_nodes):
    found = search(np.sum, np.ones_like, 0.0, max_nodes)
    assert found.astray and "on a slope, before any mode" in found.stopped
    cause = _of_nodes(found)
    assert np.isnan(cause.nats) and "on a slope" in cause.told and "units" in cause.mend

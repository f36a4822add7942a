"""The mode of hyperparameters, a grid around it and draws between, in plain NumPy."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import expit, gammaln, logsumexp
from scipy.stats import beta, expon, multivariate_t

from numpyro_sgp.integrated import nodes
from numpyro_sgp.integrated.check import _of_nodes
from numpyro_sgp.integrated.profile import Node
from numpyro_sgp.integrated.proposals import next_proposal
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
    drawn, _ = found.draws(8000, 0)
    ends = np.linspace(-4.0, 6.0, 120), np.linspace(-6.0, 0.5, 120)
    dense = np.array(list(itertools.product(*ends)))
    values = regression(dense)
    weights = np.exp(values - logsumexp(values))
    assert alike(drawn, weights, dense, 0.05)
    noise, exact = np.exp(drawn[:, 1]), weights @ np.exp(dense[:, 1])
    assert abs(noise.mean() / exact - 1) < 0.02
    z = found.standardised(drawn)[:, None] - found.standardised(found.free)
    assert np.abs(z).max(axis=-1).min(axis=1).max() < 0.5 * 0.75 + 1e-6


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
    assert alike(found.draws(8000, 0)[0], found.weights, found.free, 0.03)
    shares = np.bincount(found.places(8000, 0), minlength=len(found.nodes)) / 8000
    np.testing.assert_allclose(shares, found.weights, atol=2e-4)


# ---- the mode ---------------------------------------------------------------------------


class Known:
    """A profile whose log density and its slope are known."""

    points, work = {}, 0.0

    def __init__(self, value, slope, dtype=np.float64):
        self.value, self.slope, self.field = value, slope, self
        self.dtype = dtype

    def start(self):
        return None

    def other_starts(self):
        return iter(())

    def choose_points(self, mode):
        return None

    def settle(self, mode, places=()):
        return mode

    def __call__(self, free, start, with_slope=False, to_weigh=False):
        free = np.asarray(free, float)
        return Node(free, float(self.value(free)), None, 0.0, None), self.slope(free)


def search(value, slope, *starts, max_nodes=200, until=None, dtype=np.float64):
    found = Search(Known(value, slope, dtype), max_nodes, until, lambda *_: None)
    return found.nodes(*found.around(np.array(starts).reshape(len(starts), -1)))


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
    found = search(np.sum, np.ones_like, 0.0, max_nodes=max_nodes)
    assert found.astray and "on a slope, before any mode" in found.stopped
    cause = _of_nodes(found)
    assert np.isnan(cause.nats) and "on a slope" in cause.told and "units" in cause.mend


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("lobes", [1e-3, 0.03])
def test_a_posterior_far_narrower_than_steps_is_as_wide_as_it_is(lobes, dtype):
    """
    As that of a period: slopes a step away are those of other lobes. All of the mass was at
    one node, "converged".
    """
    envelope = lobes / 6.0

    def value(z):
        return 20.0 * np.cos(2 * np.pi * z[0] / lobes) - 0.5 * (z[0] / envelope) ** 2

    def slope(z):
        turn = 2 * np.pi / lobes
        return -20.0 * turn * np.sin(turn * z) - z / envelope**2

    found = search(value, slope, 0.1 * lobes, dtype=dtype)
    z = np.linspace(-0.5, 0.5, 4001)[:, None] * lobes
    values = np.array([value(one) for one in z])
    weights = np.exp(values - logsumexp(values))
    (mean, sd), expected = (
        moments(found.free[:, 0], found.weights),
        moments(z[:, 0], weights),
    )
    np.testing.assert_allclose([mean, sd], expected, rtol=0.01, atol=0.01 * sd)
    evidence = logsumexp(values) + np.log(lobes / 4000)
    np.testing.assert_allclose(found.log_evidence, evidence, atol=0.01)
    assert not _of_nodes(found).mend


def test_a_posterior_far_wider_than_at_its_mode_is_as_wide_as_it_is():
    def value(z):
        return -0.5 * z[0] ** 2 - 0.02 * np.tanh(np.abs(z[0]) / 0.02)

    def slope(z):
        return -z - np.sign(z) / np.cosh(z / 0.02) ** 2

    found = search(value, slope, 0.3)
    np.testing.assert_allclose(moments(found.free[:, 0], found.weights)[1], 1.0, rtol=0.02)


def two_modes(below):
    """Of sds .1 and 1, six apart; where the second is lower by so many nats."""

    def parts(z):
        return np.array(
            [-0.5 * ((z[0] - 2.0) / 0.1) ** 2, -0.5 * (z[0] - 8.0) ** 2 - below]
        )

    def slope(z):
        shares = np.exp(parts(z) - logsumexp(parts(z)))
        return shares[0] * (2.0 - z) / 0.01 + shares[1] * (8.0 - z)

    return lambda z: logsumexp(parts(z)), slope


def test_the_best_start_need_not_be_below_the_mode():
    """Of three that are climbed; only the first was."""
    found = search(*two_modes(20.0), 8.5, 7.5, 2.2)
    np.testing.assert_allclose(found.mode, 2.0, atol=1e-3)
    assert found.stopped == "" and not found.several


def test_another_mode_that_was_met_is_told():
    found = search(*two_modes(3.0), 8.5, 7.5, 2.2)
    assert found.several and "another mode, 3 nats lower" in found.stopped
    cause = _of_nodes(found)
    assert np.isnan(cause.nats) and "MCMC" in cause.mend
    told = found.warning()
    assert "around one mode alone" in told and "another mode, 3 nats" in told


@pytest.mark.parametrize("effective, limited", [(300, True), (900, True), (300, False)])
def test_few_of_many_nodes_may_miss_mass(effective, limited):
    """Of twelve hyperparameters with 380 effective nodes .45 nats, for an error of .05."""
    heavy = np.zeros(3000)
    heavy[:effective] = 1.0 / effective
    node = Node(np.zeros(4), 0.0, None, 0.0, None)
    why = nodes.AT_LIMIT.format(3000) if limited else ""
    found = nodes.Drawn((node,) * 3000, heavy, 0.0, 0.0, np.zeros(4), np.eye(4), {}, why)
    cause = _of_nodes(found)
    assert ("larger max_nodes" in cause.mend) == (effective < 500 and limited)
    assert "none of them meets" in cause.told and cause.nats < 0.01


def test_a_mode_that_mirrors_another_is_no_fault_of_the_nodes():
    """As of loadings, of which the signs make no difference."""

    def value(z):
        return np.logaddexp(
            -0.5 * ((z[0] - 3.0) / 0.2) ** 2, -0.5 * ((z[0] + 3.0) / 0.2) ** 2
        )

    def slope(z):
        return -(np.abs(z) - 3.0) * np.sign(z) / 0.04

    found = search(value, slope, -2.5, 2.5)
    assert "a mode as high has no nodes" in found.stopped and not found.several
    assert _of_nodes(found).nats < 0.01


def test_slopes_of_kinks_are_no_slope():
    found = search(lambda z: -0.5 * z @ z, lambda z: 1.5 - z, 0.0)
    assert found.stopped == "" and not found.astray


@pytest.mark.parametrize("limit", [{"max_nodes": 2}, {"max_nodes": 4}, {"until": 0.0}])
def test_what_is_beyond_nodes_that_are_too_few_is_not_known(limit):
    found = search(lambda z: -0.5 * z @ z, lambda z: -z, 0.3, **limit)
    cause = _of_nodes(found)
    assert found.too_few and np.isnan(cause.nats) and "more nodes" in cause.mend
    if "until" in limit:  # Laplace's
        assert found.kind == "one"
        np.testing.assert_allclose(found.log_evidence, 0.5 * np.log(2 * np.pi), atol=1e-6)


def test_nodes_without_weight_say_nothing_of_what_is_left():
    each = [Node(np.zeros(1), 0.0, None, left, None) for left in (0.2, np.nan)]
    rest = 0.0, 0.0, np.zeros(1), np.eye(1), {}, ""
    assert nodes.Grid(tuple(each), np.array([1.0, 0.0]), *rest).left == 0.2
    assert np.isnan(nodes.Grid(tuple(each), np.array([0.5, 0.5]), *rest).left)


# ---- how many they are ------------------------------------------------------------------


def log_gammas(shapes):
    """Logarithms of Gamma variables, with their modes at zero, and the slope."""
    constant = np.sum(shapes * np.log(shapes) - gammaln(shapes))
    return (
        lambda z: np.sum(shapes * (z - np.exp(z))) + constant,
        lambda z: shapes * (1.0 - np.exp(z)),
    )


def test_one_draw_that_has_most_of_the_weight_is_no_reason_to_draw_ever_farther():
    """Of skewed tails: effective were 15 of 1,900, the evidence .2 nats above itself."""
    shapes = np.where(np.arange(8) % 2, 4.0, 0.3)
    found = search(*log_gammas(shapes), np.full(8, 0.3), max_nodes=3000)
    assert found.effective > 500 and not found.too_few and found.is_bound
    np.testing.assert_allclose(found.log_evidence, 0.0, atol=0.1)  # of draws


def test_the_next_proposal_is_as_wide_as_what_counts():
    z = np.random.default_rng(0).normal(size=(128, 6))
    z[0] = 10.0
    weights = np.append(0.9, np.full(127, 0.1 / 127))
    centre, root = next_proposal(z, weights, np.eye(6))
    sds = np.sqrt(np.diag(root @ root.T))
    assert np.all(centre < 5.0) and np.all((sds > 1.0) & (sds < 8.0))
    even = np.full(128, 1 / 128)
    centre, root = next_proposal(z, even, np.eye(6))
    spread = np.cov(z.T, bias=True) + 1e-3 * np.eye(6)
    np.testing.assert_allclose(centre, z.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(root @ root.T, 1.2**2 * spread, rtol=1e-9)


def test_proposals_are_narrower_where_no_draw_had_a_density():
    nothing = np.full(128, np.nan)
    centre, root = next_proposal(np.ones((128, 2)), nothing, np.eye(2))
    np.testing.assert_array_equal(centre, np.zeros(2))
    np.testing.assert_array_equal(root, 0.5 * np.eye(2))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_grid_has_exponential_tails_and_knows_what_it_lacks_of_them(dim):
    """As of logarithms of half-Cauchy scales: up to .012 nats were lost."""

    def value(z):
        return np.sum(z + np.log(2.0 / np.pi) - np.log1p(np.exp(2.0 * z)))

    start = np.full(dim, 0.3)
    found = search(value, lambda z: -np.tanh(z), start, max_nodes=3000)
    lost = -found.log_evidence
    assert 0.0 < lost < 0.004 and found.stopped == ""
    assert found.beyond / 3 < lost < 3 * found.beyond


def test_what_a_grid_lacks_of_heavy_tails_is_in_its_row():
    """Of a Student t, as far as six nats down."""
    density = multivariate_t(np.zeros(2), df=3.0).logpdf
    found = grid(density, np.zeros(2), np.eye(2) / np.sqrt(1 + 2 / 3), 0.75)
    lost = -logsumexp(found.values) - np.log(0.75**2 / (1 + 2 / 3))
    cause = _of_nodes(found)
    assert lost > 0.01 and lost / 3 < cause.nats < 3 * lost
    assert "of it beyond them" in cause.told


def test_walls_are_no_tails():
    """Points where nothing is are not among nodes: values do not go on there."""
    found = grid(lambda z: -0.5 * z @ z, np.zeros(1), np.eye(1), 0.5)
    kept = found.free[:, 0] > -0.7
    each = [node for node, is_kept in zip(found.nodes, kept, strict=True) if is_kept]
    weights = found.weights[kept] / found.weights[kept].sum()
    cut = nodes.Grid(tuple(each), weights, 0.0, 0.0, found.mode, found.axes, {}, "")
    assert cut.beyond < 1e-3


def some(kind, effective, number, stopped):
    """Nodes of which about so many are effective."""
    weights = np.full(number, 1e-9)
    weights[:effective] = 1.0 / effective
    each = [Node(np.array([i, 0.0]), 0.0, None, 0.0, None) for i in range(number)]
    rest = -49.4, 0.0, np.zeros(2), np.eye(2), {}, stopped
    return kind(tuple(each), weights / weights.sum(), *rest)


@pytest.mark.parametrize(
    ("kind", "effective", "number", "stopped", "mend"),
    [
        (nodes.Drawn, 14, 3000, "at the limit of 3000 nodes", "a location and"),
        (nodes.Drawn, 14, 500, "at the limit of 500 nodes", "a larger max_nodes"),
        (nodes.Drawn, 60, 3000, "at the limit of 3000 nodes", "a larger max_nodes"),
        (nodes.Drawn, 60, 2000, nodes.TIME_USED, "more seconds"),
        (nodes.Drawn, 14, 3000, f"{nodes.NO_MODE}; at the limit of 3000 nodes", "units"),
        (nodes.Grid, 1, 40, "", "sgp.whiten"),
        (nodes.One, 1, 1, nodes.TIME_USED, "more seconds"),
    ],
)
def test_too_few_nodes_are_told_with_what_helps(kind, effective, number, stopped, mend):
    found = some(kind, effective, number, stopped)
    told = f"has {effective} effective nodes of {number}"
    assert told in found.warning() and stopped in found.warning()
    for text in (found.warning(), *found.told_of_doubts(), _of_nodes(found).mend):
        assert mend in text and ("max_nodes" in text) == ("max_nodes" in mend)
    (evidence,) = found.told_of_evidence()
    assert "lower bound" not in evidence
    if kind is nodes.Drawn:
        assert f"of {effective} effective nodes: no bound, known to ± 0." in evidence


def test_many_nodes_that_end_amid_their_mass_are_not_said_to_be_few():
    """Of 2,997 effective ones it was that they are too few, and "a larger max_nodes"."""
    found = replace(some(nodes.Grid, 2997, 3000, "at the limit of 3000 nodes"), border=0.5)
    assert found.cut_off and not found.lacks_more
    assert "end where 50% of their mass" in found.warning()
    assert "sgp.whiten(model)" in found.warning() and "max_nodes" not in found.warning()
    assert "far too low" in found.told_of_evidence()[0]
    few = replace(some(nodes.Grid, 30, 40, "at the limit of 40 nodes"), border=0.5)
    assert not few.cut_off and "max_nodes" in few.warning()


def test_enough_nodes_are_no_reason_to_warn():
    found = some(nodes.Drawn, 1000, 1500, "")
    assert found.warning() == "" and found.told_of_doubts() == []
    assert "a lower bound, nearly" in found.told_of_evidence()[0]


@pytest.mark.parametrize("effective", [100, 1000])
def test_the_error_of_weights_is_in_the_row(effective):
    """With 100 of 1500 a sum of weights has a relative error of some 0.1."""
    found = _of_nodes(some(nodes.Drawn, effective, 1500, ""))
    # The others have a weight too, together some 1e-6.
    np.testing.assert_allclose(found.error, np.sqrt(1 / effective - 1 / 1500), rtol=1e-4)
    assert found.number == ("<0.01 ± 0.1" if effective == 100 else "<0.01 ± 0.02")


@pytest.mark.parametrize(("number", "size"), [(256, 8), (2048, 60), (256, 100), (7, 3)])
def test_balanced_numbers_have_no_noise_where_they_are_enough(number, size):
    """Else they are as good as random ones: five standard errors of correlations."""
    x = nodes.balanced(number, size, (2, 5), np.random.default_rng(0))
    assert x.shape == (number, size + 10)
    first, apart = x[:, :size], x[:, size:]
    if number >= 8 * size:
        np.testing.assert_allclose(first.T @ first / number, np.eye(size), atol=1e-10)
        np.testing.assert_allclose(first.T @ apart / number, 0.0, atol=1e-10)
        of_rows = apart.reshape(number, 2, 5)
        squares = np.einsum("sjn,skn->njk", of_rows, of_rows) / number
        np.testing.assert_allclose(squares, np.tile(np.eye(2), (5, 1, 1)), atol=1e-10)
        np.testing.assert_allclose(x.mean(axis=0), 0.0, atol=1e-10)
    off = np.abs(np.corrcoef(x.T) - np.eye(size + 10))
    assert off.max() < 5.0 / np.sqrt(-(-number // 2)) or number < 10


def test_a_period_whose_slope_vanishes_where_another_one_led_is_left():
    search, climbed = object.__new__(Search), []

    def climb(starts, held):
        climbed.append(starts)
        return [SimpleNamespace(free=np.ones(2), value=float(len(climbed)))]

    def periods(free):  # of two kernels at first, and then of one
        return [("first", None), ("second", None)][: 2 - int(free[0])]

    search._climbed = climb
    found = search._other_periods(SimpleNamespace(free=np.zeros(2), value=0.0), periods)
    assert climbed == ["first", "first"] and len(found) == 2

"""Hyperparameters whose priors have scales that are hyperparameters."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.distributions.transforms import (
    AffineTransform,
    ExpTransform,
    ReshapeTransform,
)
from scipy.special import logsumexp
from scipy.stats import multivariate_t

import numpyro_sgp as sgp
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.integrated.coordinates import hierarchical, informed
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.proposals import student_draws, weights_of
from tests.helpers import slow

QUIET = {"progress_bar": False}


def curves(groups, rows, seed=0):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(0, 6, rows))[:, None]
    y = np.stack([np.sin((1 + 0.2 * g) * X[:, 0]) for g in range(groups)])
    return X, y + 0.3 * rng.normal(size=y.shape)


def lengthscales_of_groups(X, y=None, groups=3):
    tau = numpyro.sample("tau", dist.HalfNormal(0.5))
    with numpyro.plate("groups", groups):
        scales = numpyro.sample("l", dist.LogNormal(0.2, tau))
    kernel = sgp.kernels.RBF(jnp.ones(groups), scales)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("outputs", groups, dim=-2), numpyro.plate("data", len(X), dim=-1):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def by_importance(X, y, draws=400_000):
    """
    Log evidence, and means and sds of tau and of lengthscales, by draws from the prior:
    each group's density is a table over its lengthscale. Errors are below .003.
    """
    at = np.linspace(-4, 5, 901)
    squares = (X - X.T) ** 2
    tables = np.zeros((len(y), len(at)))
    for j, log_l in enumerate(at):
        S = np.exp(-0.5 * squares / np.exp(2 * log_l)) + 0.09 * np.eye(len(X))
        _, log_det = np.linalg.slogdet(2 * np.pi * S)
        tables[:, j] = -0.5 * np.sum(y.T * np.linalg.solve(S, y.T), axis=0) - 0.5 * log_det
    rng = np.random.default_rng(1)
    tau = np.abs(rng.normal(0, 0.5, draws))
    log_l = 0.2 + tau * rng.normal(size=(len(y), draws))
    log_w = sum(np.interp(row, at, table) for row, table in zip(log_l, tables, strict=True))
    weights = np.exp(log_w - logsumexp(log_w))
    values = np.stack([tau, *np.exp(log_l)])
    mean = values @ weights
    sd = np.sqrt((values - mean[:, None]) ** 2 @ weights)
    return logsumexp(log_w) - np.log(draws), mean, sd


def compared(found):
    draws = found.hyperparameters
    each = np.column_stack([draws["tau"], draws["l"]])
    return each.mean(axis=0), each.std(axis=0)


@pytest.fixture(scope="module")
def of_two():
    X, y = curves(2, 12)
    return X, y, sgp.nested(lengthscales_of_groups, sgp.VGP(), (X, y), groups=2, **QUIET)


def check_beside_importance_sampling(X, y, found):
    """
    Nodes are on a grid of three numbers, or some thousand that count, whose means and sds
    have errors of about .03 sds.
    """
    assert found.field.standardised == {"l"}
    log_evidence, mean, sd = by_importance(X, y)
    assert abs(found.log_evidence - log_evidence) < 0.03
    own_mean, own_sd = compared(found)
    assert_allclose(own_mean, mean, atol=0.08 * sd.min())
    assert_allclose(own_sd, sd, rtol=0.08)


@pytest.mark.slow
def test_lengthscales_of_groups_are_those_of_importance_sampling(of_two):
    """In a funnel, in whose end the ascent went without a mode."""
    check_beside_importance_sampling(*of_two)


@pytest.mark.slow
def test_of_more_groups_they_are_too():
    X, y = curves(3, 12)
    found = sgp.nested(lengthscales_of_groups, sgp.VGP(), (X, y), groups=3, **QUIET)
    check_beside_importance_sampling(X, y, found)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "standardised"), [(100, False), (5, True)])
def test_of_noise_that_data_know_coordinates_stay(rows, standardised):
    """With 100 rows a group, the noise of each is known to 7 %."""

    def model(X, group, y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 5):
            noise = numpyro.sample("noise", dist.LogNormal(-1.0, tau))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise[group]), obs=y)

    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 6, 5 * rows))[:, None]
    group, noise = np.arange(5 * rows) % 5, np.exp(-1.2 + 0.4 * rng.normal(size=5))
    y = np.sin(X[:, 0]) + noise[group] * rng.normal(size=5 * rows)
    found = sgp.nested(model, sgp.SVGP(10), (X, group, y), **QUIET)
    assert bool(found.field.standardised) == standardised
    assert found.nodes.effective > 900 and not found.nodes.astray


@pytest.mark.slow
def test_a_file_keeps_coordinates(of_two, tmp_path):
    found = of_two[-1]
    found.save(tmp_path / "saved")
    loaded = sgp.load(tmp_path / "saved", lengthscales_of_groups)
    assert loaded.field.standardised == {"l"}
    for name, draws in found.hyperparameters.items():
        np.testing.assert_array_equal(loaded.hyperparameters[name], draws)


@pytest.mark.slow
def test_a_joint_fit_that_holds_them_at_points_has_not_converged():
    X, y = curves(3, 30)
    given = lengthscales_of_groups, sgp.SVGP(12), (X, y)
    with jax.enable_x64(False):
        with pytest.warns(UserWarning, match="'l' went to the mean"):
            fitted = sgp.fit(*given, joint=True, groups=3, **QUIET)
        others = fitted.check().causes["other parameters"]
    assert "together with its scale" in others.told and "sgp.nested" in others.mend


@pytest.mark.slow
def test_what_points_lose_is_of_the_same_hyperparameters():
    """Of more points coordinates were taken for others: 100 nats where some are lost."""
    X, y = curves(2, 12)
    given = lengthscales_of_groups, sgp.SVGP(5), (X, y)
    found = sgp.nested(*given, max_nodes=1, groups=2, **QUIET)
    (node,) = found.nodes.nodes
    where = jnp.asarray(node.free), found.nodes.points, (X, y), {"groups": 2}
    bound = node.value - found.field.terms(*where).log_prior
    exact = 0.0
    for scale, row in zip(found.hyperparameters["l"][0], y, strict=True):
        S = np.exp(-0.5 * (X - X.T) ** 2 / scale**2) + 0.09 * np.eye(12)
        log_det = np.linalg.slogdet(2 * np.pi * S)[1]
        exact -= 0.5 * (row @ np.linalg.solve(S, row) + log_det)
    told = found.check().causes["inducing points"].nats
    assert 0.0 < told < exact - bound + 1e-6 and told > 0.5 * (exact - bound)


DATA = jnp.linspace(0.0, 3.0, 6)[:, None], jnp.linspace(0.0, 3.0, 6)


def field_of(prior):
    """
    With hyperparameters m, s, one of a known scale, and one that :func:`hierarchical` may
    find: of a prior that is made of m, s and the inputs.
    """

    def model(X, y=None):
        m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        numpyro.sample("known", dist.LogNormal(m, 0.3))
        l = numpyro.sample("l", prior(m, s, X))
        kernel = sgp.kernels.RBF(1.0, 1.0 + 0.1 * jnp.sum(jnp.abs(l)))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = AutoSparseGP(model, sgp.VGP())
    guide.setup(*DATA)
    field = Field(guide, DATA, {})
    field.standardised = hierarchical(field, DATA, {})
    return field


PRIORS = {
    "lognormal": lambda m, s, X: dist.LogNormal(m, s),
    "expanded": lambda m, s, X: dist.StudentT(4.0, m, s).expand([3]).to_event(1),
    "transformed": lambda m, s, X: dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), [AffineTransform(m, s), ExpTransform()]
    ),
    "correlated": lambda m, s, X: dist.MultivariateNormal(
        m * jnp.ones(2), scale_tril=s * jnp.array([[1.0, 0.0], [0.5, 0.8]])
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRIORS))
def test_coordinates_have_a_density_without_the_scale(name):
    """That of (m, log s, z) is the prior of m and s times that of standardised z."""
    field = field_of(PRIORS[name])
    assert field.standardised == {"l"}

    def log_prior(free):
        return field.terms(free, field.points, DATA, {}).log_prior

    free = jnp.asarray(np.random.default_rng(0).normal(size=field.num_hyperparameters))
    at = field.unravel(free)
    base = dist.StudentT(4.0) if name == "expanded" else dist.Normal()
    expected = sum(dist.Normal().log_prob(at[k]) for k in "ms")  # of log s
    expected += dist.Normal(at["m"], 0.3).log_prob(at["known"])
    expected += jnp.sum(base.log_prob(at["l"]))
    assert_allclose(jax.jit(log_prior)(free), expected, rtol=1e-10)


NOT = {
    "folded": lambda m, s, X: dist.FoldedDistribution(dist.Normal(m * jnp.ones(2), s)),
    "of another shape": lambda m, s, X: dist.TransformedDistribution(
        dist.Normal(m, s).expand([4]).to_event(1), ReshapeTransform((2, 2), (4,))
    ),
    "a location": lambda m, s, X: dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), [AffineTransform(m, 1.0), ExpTransform()]
    ),
    "of the data": lambda m, s, X: dist.LogNormal(jnp.log(jnp.std(X)), s),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", sorted(NOT))
def test_what_is_not_standardised(name):
    """Of a location that is made of the data values would be others at new inputs."""
    assert field_of(NOT[name]).standardised == frozenset()


class FakeSearch:
    """Of the coordinates that the field says."""

    def __init__(self, profile, found):
        self.profile, self.ends = profile, []
        self.found = found[bool(profile.field.standardised)]
        self.asked = found["asked"]

    def around(self, starts, *_):
        return SimpleNamespace(free=np.zeros(2)), np.eye(2)

    def nodes(self, mode, axes):
        self.asked.append(bool(self.profile.field.standardised))
        return self.found


def some(effective, at_limit=True, astray=False):
    return SimpleNamespace(effective=effective, at_limit=at_limit, astray=astray)


@pytest.mark.parametrize(
    "share, standardised, others, taken, asked",
    [
        (0.5, some(400), some(900), True, [True]),
        (0.03, some(1000, at_limit=False), some(1100), True, [True]),  # enough, or no time
        (0.03, some(400), some(900), False, [True, False]),
        (0.03, some(400), some(300), True, [True, False]),
        (0.03, some(400), some(900, astray=True), True, [True, False]),
        (0.005, some(400), some(900), False, [False]),
        (0.005, some(400), some(900, astray=True), True, [False, True]),
    ],
)
def test_coordinates_that_are_taken(monkeypatch, share, standardised, others, taken, asked):
    room = sys.modules["numpyro_sgp.integrated.nested"]
    found = {True: standardised, False: others, "asked": []}
    field = SimpleNamespace(standardised=frozenset({"l"}))

    def informed(field, axes, limit):
        return frozenset({"l"}) if share < limit else frozenset()

    def profile(field, *_, **__):
        return SimpleNamespace(field=field, points={})

    monkeypatch.setattr(room, "Search", lambda profile, *_: FakeSearch(profile, found))
    monkeypatch.setattr(room, "Profile", profile)
    monkeypatch.setattr(room, "informed", informed)
    monkeypatch.setattr(room, "moved", lambda field, other, free, *_: free)
    kept, nodes = room._in_best_coordinates(field, (), {}, None, (3000, None, None))
    assert bool(kept.standardised) == taken and found["asked"] == asked
    assert nodes is found[taken]


def test_nothing_is_looked_at_without_hierarchies():
    singular = np.diag([1e-200, 1.0])
    assert not informed(SimpleNamespace(standardised=frozenset()), singular, 0.5)


def test_proposals_that_are_as_good_as_singular_have_weights():
    root = np.diag([1e4, 1.0, 1e-4])
    z = student_draws(np.zeros(3), root, 64, seed=0)

    class Flat:
        value = 0.0

    weights, log_mean = weights_of(z, [Flat()] * 64, [(np.zeros(3), root)], 0.0)
    assert np.all(np.isfinite(weights)) and np.isfinite(log_mean)


def test_weights_are_by_the_density_of_what_was_drawn():
    rng = np.random.default_rng(0)
    root, centre = np.tril(rng.normal(size=(4, 4))) + 3.0 * np.eye(4), rng.normal(size=4)
    z = student_draws(centre, root, 16, seed=0)
    values = rng.normal(size=16)
    each = [SimpleNamespace(value=value + 2.0) for value in values]
    weights, log_mean = weights_of(z, each, [(centre, root)], 2.0)
    log_w = values - multivariate_t(centre, root @ root.T, df=5.0).logpdf(z)
    assert_allclose(log_mean, logsumexp(log_w) - np.log(16), rtol=1e-10)
    assert_allclose(weights, np.exp(log_w - logsumexp(log_w)), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, slow(True)])
def test_two_lengthscales_may_be_all_that_is_open(several):
    """Both are held where others are tried, so that nothing is left to climb."""

    def model(X, y=None):
        if several:
            l = [numpyro.sample(k, dist.LogNormal(0.0, 0.5)) for k in "ab"]
            kernels = [
                sgp.kernels.RBF(1.0, each, active_dims=(i,)) for i, each in enumerate(l)
            ]
        else:
            l = numpyro.sample("l", dist.LogNormal(0.0, 0.5).expand([2]).to_event(1))
            kernels = [sgp.kernels.RBF(1.0, l)]
        f = 0.0
        for i, kernel in enumerate(kernels):
            f = f + numpyro.sample(f"f{i}", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    rng = np.random.default_rng(0)
    X = rng.uniform(0, 4, (20, 2))
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * rng.normal(size=20)
    found = sgp.nested(model, sgp.VGP(), (X, y), max_nodes=1, **QUIET)
    assert np.isfinite(found.log_evidence)

"""One Gaussian over GP sites and effects, beside dense linear algebra in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import numpyro_sgp as sgp
from numpyro_sgp.integrated.expectation import quadrature
from tests.integrated.dense import (
    assert_is,
    conditional,
    log_evidence,
    matern12,
    options,
    rbf,
    rows,
)


@pytest.mark.slow
def test_two_sites_and_effects_are_exact():
    rng, X = rows(30, 0)
    day = np.arange(30) % 4
    y = np.sin(X[:, 0]) + 0.5 * day + 0.2 * rng.normal(size=30)

    def model(X, day, y=None):
        level = numpyro.sample("level", dist.Normal(1.0, 2.0))
        with numpyro.plate("days", 4):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.3))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.5, 2.0), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern12(0.4, 0.3), X))
        total = numpyro.deterministic("total", level + f + g)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(total + effect[day], 0.3), obs=y)

    posterior = sgp.nested(model, options(X), (X, day, y), progress_bar=False)
    prior = [matern12(X, 1.5, 2.0), matern12(X, 0.4, 0.3), 1.69 * np.eye(4), [[4.0]]]
    prior = [np.asarray(block) for block in prior]
    maps = [np.eye(30), np.eye(30), np.eye(4)[day], np.ones((30, 1))]
    means, covariances, joint = conditional(prior, maps, y - 1.0, 0.3)
    means[3] = means[3] + 1.0
    found = posterior.posterior(X, day)
    for i, name in enumerate(("f", "g", "effect")):
        assert_is(found[name], means[i], covariances[i])
    assert_is(found["level"], means[3][0], covariances[3])
    H = np.concatenate([np.eye(30), np.eye(30), np.zeros((30, 4)), np.ones((30, 1))], 1)
    assert_is(found["total"], means[0] + means[1] + means[3], H @ joint @ H.T)
    exact = log_evidence(prior, maps, y - 1.0, 0.3)
    np.testing.assert_allclose(posterior.log_evidence, exact, atol=1e-5)


@pytest.mark.slow
def test_three_sites_are_exact():
    rng, X = rows(24, 1)
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=24)
    kernels = [(1.0, 3.0), (0.5, 0.5), (0.3, 0.1)]

    def model(X, y=None):
        sites = [
            numpyro.sample(f"f{i}", sgp.GaussianProcess(sgp.kernels.Matern12(*kernel), X))
            for i, kernel in enumerate(kernels)
        ]
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample(
                "y", dist.Normal(sites[0] + 2.0 * sites[1] - sites[2], 0.2), obs=y
            )

    posterior = sgp.nested(model, options(X), (X, y), progress_bar=False)
    maps = [np.eye(24), 2 * np.eye(24), -np.eye(24)]
    prior = [matern12(X, *kernel) for kernel in kernels]
    means, covariances, _ = conditional(prior, maps, y, 0.2)
    found = posterior.posterior(X)
    for i in range(3):
        assert_is(found[f"f{i}"], means[i], covariances[i])


@pytest.mark.slow
def test_a_site_and_300_groups_are_exact():
    rng, X = rows(40, 2)
    at, group = rng.integers(0, 40, 700), rng.integers(0, 300, 700)
    y = np.sin(X[at, 0]) + 0.5 * rng.normal(size=300)[group] + 0.2 * rng.normal(size=700)

    def model(X, at, group, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.0, 2.0), X))
        with numpyro.plate("groups", 300):
            b = numpyro.sample("b", dist.Normal(0.0, 0.5))
        with numpyro.plate("data", len(at)):
            numpyro.sample("y", dist.Normal(f[at] + b[group], 0.2), obs=y)

    posterior = sgp.nested(model, options(X), (X, at, group, y), progress_bar=False)
    maps = [np.eye(40)[at], np.eye(300)[group]]
    prior = [matern12(X, 1.0, 2.0), 0.25 * np.eye(300)]
    means, covariances, _ = conditional(prior, maps, y, 0.2)
    found = posterior.posterior(X, at, group)
    assert_is(found["f"], means[0], covariances[0])
    assert_is(found["b"], means[1], covariances[1])


@pytest.mark.slow
def test_few_points_are_near_exact():
    """M = 25 of 300 rows: sds within 3 %, means within .05 sd."""
    rng, X = rows(300, 3)
    y = np.sin(2 * X[:, 0]) + 0.3 * X[:, 0] + 0.3 * rng.normal(size=300)

    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.8), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.3), obs=y)

    posterior = sgp.nested(model, sgp.SVGP(25), (X, y), progress_bar=False)
    means, covariances, _ = conditional(
        [rbf(X, 1.0, 0.8), np.eye(1)], [np.eye(300), X], y, 0.3
    )
    found = posterior.posterior(X)
    for name, mean, covariance in zip(("f", "slope"), means, covariances, strict=True):
        sd = np.sqrt(np.diag(covariance))
        assert np.all(np.abs(found[name].mean - mean) < 0.05 * sd)
        assert np.all(np.abs(found[name].sd / sd - 1.0) < 0.03)


@pytest.mark.slow
def test_hyperparameters_are_integrated_exactly():
    """Beside a dense grid over lengthscale and noise, in NumPy."""
    rng, X = rows(20, 4)
    y = np.sin(X[:, 0]) + 0.3 * rng.normal(size=20)

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.7))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        kernel = sgp.kernels.Matern12(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    posterior = sgp.nested(model, options(X), (X, y), progress_bar=False)
    lengths, noises = np.linspace(-3, 3.5, 66), np.linspace(-3, 1, 61)
    logs = np.array(
        [
            [
                log_evidence([matern12(X, 1.0, np.exp(a))], [np.eye(20)], y, np.exp(b))
                - 0.5 * ((a / 0.7) ** 2 + ((b + 1) / 0.5) ** 2)
                - np.log(2 * np.pi * 0.7 * 0.5)
                for b in noises
            ]
            for a in lengths
        ]
    )
    area = (lengths[1] - lengths[0]) * (noises[1] - noises[0])
    weights = np.exp(logs - logs.max())
    exact = np.log(weights.sum() * area) + logs.max()
    # Of the mass a grid that ends 7.5 nats below the mode leaves some thousandths.
    np.testing.assert_allclose(posterior.log_evidence, exact, atol=0.02)
    weights /= weights.sum()
    draws = posterior.hyperparameters
    for name, values, axis in (("lengthscale", lengths, 1), ("noise", noises, 0)):
        share = weights.sum(axis)
        mean = share @ values
        sd = np.sqrt(share @ (values - mean) ** 2)
        found = np.log(draws[name])
        assert abs(found.mean() - mean) < 0.05 * sd
        assert abs(found.std() / sd - 1.0) < 0.05
        for level in (0.05, 0.95):
            at = np.interp(level, np.cumsum(share) - 0.5 * share, values)
            assert abs(np.quantile(found, level) - at) < 0.1 * sd
    q = posterior.posterior(X)["f"]
    means, variances = [], []
    for a in lengths:
        for b in noises:
            (mean,), (covariance,), _ = conditional(
                [matern12(X, 1.0, np.exp(a))], [np.eye(20)], y, np.exp(b)
            )
            means.append(mean)
            variances.append(np.diag(covariance))
    flat = weights.ravel()
    mean = flat @ np.array(means)
    sd = np.sqrt(flat @ (np.array(variances) + (np.array(means) - mean) ** 2))
    assert np.all(np.abs(q.mean - mean) < 0.02 * sd)
    assert np.all(np.abs(q.sd / sd - 1.0) < 0.02)


def two_sites_and_a_level(X, noise, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.0, 2.0), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern12(0.5, 0.4), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + f + g, noise), obs=y)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from([3, 12]), st.floats(0.05, 1.0))
def test_the_bound_is_one(seed, number, noise):
    """Below the evidence with any number of inducing points, of two sites and an effect."""
    rng, X = rows(16, seed)
    y = np.sin(X[:, 0]) + noise * rng.normal(size=16)

    Z = np.linspace(0.0, 5.0, 12)[:number, None]
    data = X, jnp.asarray(noise), y
    approximation = sgp.SVGP(inducing=Z)
    posterior = sgp.nested(two_sites_and_a_level, approximation, data, progress_bar=False)
    prior = [matern12(X, 1.0, 2.0), matern12(X, 0.5, 0.4), np.eye(1)]
    exact = log_evidence(prior, [np.eye(16), np.eye(16), np.ones((16, 1))], y, noise)
    assert posterior.log_evidence <= exact + 1e-6 * abs(exact)


@pytest.mark.slow
def test_it_is_above_the_factorised_bound():
    rng, X = rows(40, 5)
    y = rng.poisson(np.exp(1.0 + np.sin(X[:, 0])))

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)

    Z = np.linspace(0.0, 5.0, 8)[:, None]
    option = sgp.SVGP(inducing=Z, train_inducing=False)
    joint = sgp.nested(model, option, (X, y), progress_bar=False)
    apart = sgp.fit(
        model,
        option,
        (X, y),
        base_guide=numpyro.infer.autoguide.AutoNormal,
        steps=600,
        progress_bar=False,
    )
    assert joint.log_evidence > apart.bound - 3 * apart.bound_se


def simple_monte_carlo(log_likelihood, number, seed):
    """Log evidence by draws from the prior, and its standard error."""
    found = np.array(log_likelihood(np.random.default_rng(seed), number))
    top = found.max()
    weights = np.exp(found - top)
    return top + np.log(weights.mean()), weights.std() / weights.mean() / np.sqrt(number)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["counts", "classes", "outliers"])
def test_the_evidence_is_that_of_draws_from_the_prior(likelihood):
    """Of eight rows, by 400,000 draws of all latents: to .1 nats and their error."""
    rng, X = rows(8, 6)
    eta = 1.5 * np.sin(X[:, 0])
    y = {
        "counts": rng.poisson(np.exp(eta)),
        "classes": (eta > 0).astype(int),
        "outliers": eta + np.array([0.1, -0.2, 3.0, 0.1, 0.0, -0.1, 0.2, 0.1]),
    }[likelihood]
    likelihoods = {
        "counts": lambda eta: dist.Poisson(jnp.exp(eta)),
        "classes": lambda eta: dist.Bernoulli(logits=eta),
        "outliers": lambda eta: dist.StudentT(3.0, eta, 0.3),
    }

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        level = numpyro.sample("level", dist.Normal(0.0, 0.5))
        kernel = sgp.kernels.Matern12(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihoods[likelihood](level + f), obs=y)

    def draw(rng, number):
        found, each = [], 1000
        for _ in range(number // each):
            length = np.exp(0.5 * rng.normal(size=20))
            K = np.exp(-np.abs(X - X.T) / length[:, None, None]) + 1e-9 * np.eye(8)
            L = np.linalg.cholesky(K)
            f = np.einsum("kij,kjs->ksi", L, rng.normal(size=(20, 8, each // 20)))
            level = 0.5 * rng.normal(size=(each, 1))
            found.append(f.reshape(-1, 8) + level)
        values = jnp.asarray(np.concatenate(found))
        return likelihoods[likelihood](values).log_prob(jnp.asarray(y)).sum(-1)

    exact, error = simple_monte_carlo(draw, 400_000, 0)
    assert error < 0.06
    posterior = sgp.nested(model, options(X), (X, y), progress_bar=False)
    assert abs(posterior.log_evidence - exact) < 0.1 + 3 * error


@pytest.mark.slow
def test_differences_of_rows_are_exact_with_a_point_for_each():
    rng, X = rows(9, 3)
    left = rng.integers(0, 9, 25)
    right = (left + rng.integers(1, 9, 25)) % 9
    y = np.sin(X[left, 0]) - np.sin(X[right, 0]) + 0.3 * rng.normal(size=25)

    def model(X, left, right, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.0, 0.7), X))
        with numpyro.plate("pairs", len(left)):
            numpyro.sample("y", dist.Normal(f[left] - f[right], 0.3), obs=y)

    data = X, left, right, y
    found = sgp.nested(model, sgp.VGP(jitter=1e-10), data, progress_bar=False)
    K = np.exp(-np.abs(X - X.T) / 0.7)
    D = np.eye(9)[left] - np.eye(9)[right]
    C = D @ K @ D.T + 0.09 * np.eye(25)
    exact = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2.0 * np.pi * C)[1])
    np.testing.assert_allclose(found.log_evidence, exact, atol=1e-5)
    gain = np.linalg.solve(C, D @ K).T
    f = found.posterior()["f"]
    np.testing.assert_allclose(f.mean, gain @ y, atol=1e-5)
    np.testing.assert_allclose(f.variance, np.diag(K - gain @ D @ K), atol=1e-5)
    with pytest.raises(
        ValueError, match=r"several rows of a GP site.*they are with VGP\(\)"
    ):
        sgp.nested(model, sgp.SVGP(4), data, progress_bar=False)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 20])
def test_quadrature_has_the_first_moments_of_a_normal(number):
    nodes, weights = map(np.asarray, quadrature(number, 10, float))
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-12)
    np.testing.assert_allclose(weights @ nodes, 0.0, atol=1e-12)
    second = nodes.T * weights @ nodes
    np.testing.assert_allclose(second, np.eye(number), atol=1e-10)


@pytest.mark.slow
def test_what_jitter_takes_is_told_in_single_precision():
    """Of a noise whose variance is that of the jitter; log s was 3 sds off, "converged"."""
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(0.0, 5.0, 40)).astype(np.float32)
    y = (np.sin(2.0 * x) + 0.003 * rng.normal(size=40)).astype(np.float32)

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-4.0, 2.0))
        kernel = sgp.kernels.Matern32(1.0, scale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    with jax.enable_x64(False):
        found = sgp.nested(model, sgp.VGP(), (x[:, None], y), progress_bar=False)
        verdict = found.check()
    cause = verdict.causes["inducing points"]
    assert cause.nats > 1.0 and "jitter" in cause.told and "enable_x64" in cause.mend
    assert "hyperparameters lean" in repr(found)
    assert verdict.causes["float32"].nats > 1.0 and not verdict.converged
    found = sgp.nested(model, sgp.VGP(), (x[:, None], y), progress_bar=False)
    cause = found.check().causes["inducing points"]
    # 20 * 1e-8 / noise ** 2, at most at the 5 % quantile of the noise.
    low = found.quantiles([0.05])["noise"][0]
    assert cause.nats < 1.1 * 20 * 1e-8 / low**2 < 0.1 and not cause.mend


@pytest.mark.slow
def test_points_are_exchanged_where_there_is_nothing_to_integrate():
    """Those five of twelve rows are found that lose least, by dense algebra."""
    X = np.linspace(0.0, 6.0, 12)[:, None]
    y = np.sin(X[:, 0])
    K = np.exp(-0.5 * (X - X.T) ** 2)

    def bound(rows):
        Q = K[:, rows] @ np.linalg.solve(K[np.ix_(rows, rows)] + 1e-8 * np.eye(5), K[rows])
        density = scipy.stats.multivariate_normal(np.zeros(12), Q + 0.01 * np.eye(12))
        return density.logpdf(y) - 0.5 * np.trace(K - Q) / 0.01

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    best = max(bound(list(rows)) for rows in itertools.combinations(range(12), 5))
    found = sgp.nested(model, sgp.SVGP(5), (X, y), progress_bar=False)
    assert found.log_evidence == pytest.approx(best, abs=0.1)


@pytest.mark.slow
def test_what_float32_costs_is_that_of_dense_algebra():
    """
    At each node, of data far from zero beside their noise: its jitter of 1e-5 is a third of
    the noise's variance there.
    """
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0.0, 6.0, 12)).astype(np.float32)
    y = (285.0 + 5.0 * np.sin(x) + rng.normal(size=12)).astype(np.float32)

    def model(X, y=None):
        sd = numpyro.sample("sd", dist.HalfNormal(300.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(sd**2, 3.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    with jax.enable_x64(False):
        found = sgp.nested(model, sgp.VGP(), (x[:, None], y), progress_bar=False)
        verdict = found.check()
    exact = [
        log_evidence(
            [rbf(x[:, None].astype(float), np.exp(2 * t), 3.0)], [np.eye(12)], y, 1.0
        )
        + dist.HalfNormal(300.0).log_prob(np.exp(t))
        + t
        for t in found.nodes.free[:, 0]
    ]
    lost = np.array(exact) - found.nodes.values
    cause = verdict.causes["float32"]
    # Of some of the nodes.
    seen = found.nodes.weights > 0.01
    assert 0.5 < cause.nats < lost.max() + 0.05
    assert cause.nats > lost[seen].mean() and "lean" in cause.told
    assert not verdict.converged and "enable_x64" in verdict.summary


def test_what_points_leave_open_is_that_of_dense_algebra():
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(0.0, 6.0, (30, 1)), axis=0)
    y, Z = np.sin(X[:, 0]) + 0.3 * rng.normal(size=30), X[::6]

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2.0, scale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    points = sgp.SVGP(inducing=Z, jitter=1e-8)
    found = sgp.nested(model, points, (X, y), progress_bar=False)
    for node in found.nodes.nodes[:5]:
        scale = np.exp(node.free[0])
        K = rbf(np.concatenate([X, Z]), 2.0, scale)
        q = K[:30, 30:] @ np.linalg.solve(K[30:, 30:] + 2e-8 * np.eye(5), K[30:, :30])
        assert node.open == pytest.approx((60.0 - np.trace(q)) / 0.18, rel=1e-5)
    assert "hyperparameters lean to where it is less" in repr(found)


@pytest.mark.slow
def test_two_responses_of_other_rows_are_exact():
    """Some of f under one noise, some under another with a slope and a level."""
    rng, X = rows(20, 5)
    y, z = rng.normal(size=14), 1.0 + rng.normal(size=10)

    def model(X, y=None, z=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.5))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.0, 2.0), X))
        with numpyro.plate("first", 14):
            numpyro.sample("y", dist.Normal(f[:14], 0.3), obs=y)
        with numpyro.plate("last", 10):
            numpyro.sample("z", dist.Normal(level + 2.0 * f[10:], 0.2), obs=z)

    found = sgp.nested(model, options(X), (X, y, z), progress_bar=False)
    assert found.field.layout.number == 1 and found.field.layout.num_rows == 24
    # In units of each noise.
    maps = [np.concatenate([np.eye(20)[:14] / 0.3, 2.0 * np.eye(20)[10:] / 0.2])]
    maps += [np.concatenate([np.zeros(14), np.full(10, 1 / 0.2)])[:, None]]
    prior, both = [matern12(X, 1.0, 2.0), [[2.25]]], np.concatenate([y / 0.3, z / 0.2])
    means, covariances, _ = conditional(list(map(np.asarray, prior)), maps, both, 1.0)
    q = found.posterior(X)
    assert_is(q["f"], means[0], covariances[0])
    assert_is(q["level"], means[1][0], covariances[1])
    units = 14 * np.log(0.3) + 10 * np.log(0.2)
    exact = log_evidence(list(map(np.asarray, prior)), maps, both, 1.0) - units
    np.testing.assert_allclose(found.log_evidence, exact, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_responses_of_other_rows_are_those_of_all_rows_under_masks(joint):
    """One of two functions a row, the other one of one."""
    rng, X = rows(24, 6)
    y, counts, first = rng.normal(size=15), rng.poisson(1.5, size=9), np.arange(24) < 15

    def sites(X):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, scale), X))
        return f, numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.1, 2.0), X))

    def model(X, y=None, counts=None):
        f, g = sites(X)
        with numpyro.plate("first", 15):
            numpyro.sample("y", dist.Normal(f[:15], jnp.exp(g[:15])), obs=y)
        with numpyro.plate("last", 9):
            numpyro.sample("counts", dist.Poisson(jnp.exp(f[15:])), obs=counts)

    def masked(X, y=None, counts=None):
        f, g = sites(X)
        with numpyro.plate("data", 24):
            with numpyro.handlers.mask(mask=first):
                numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)
            with numpyro.handlers.mask(mask=~first):
                numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    full = X, np.concatenate([y, np.zeros(9)]), np.concatenate([np.zeros(15, int), counts])
    run = sgp.nested if not joint else lambda *a, **k: sgp.fit(*a, joint=True, **k)
    found, known = (
        run(m, sgp.SVGP(8), data, progress_bar=False)
        for m, data in ((model, (X, y, counts)), (masked, full))
    )
    assert found.field.layout.number == 2 and found.field.layout.num_rows == 24
    bounds = [q.bound if joint else q.log_evidence for q in (found, known)]
    np.testing.assert_allclose(*bounds, atol=1e-4)
    a, b = (q.posterior(X)["f"] for q in (found, known))
    np.testing.assert_allclose(a.mean, b.mean, atol=1e-4)
    np.testing.assert_allclose(a.sd, b.sd, rtol=1e-3)
    scores = found.log_score(X, y, counts)
    assert scores["y"].rows.shape == (15,) and scores["counts"].rows.shape == (9,)

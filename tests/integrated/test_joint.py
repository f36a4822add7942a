"""The guide with one Gaussian over GP sites and effects."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Predictive, Trace_ELBO, autoguide

import numpyro_sgp as sgp
from tests.integrated.dense import (
    assert_is,
    conditional,
    log_evidence,
    matern12,
    options,
    rows,
)


def additive(X, day, y=None, num_rows=None):
    """Two GP sites, a level and effects of days; rows may be a batch of more."""
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    with numpyro.plate("days", 4):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.5, 2.0), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern12(0.4, 0.3), X))
    total = numpyro.deterministic("total", level + f + g)
    size = X.shape[0]
    with numpyro.plate("data", num_rows or size, subsample_size=size):
        numpyro.sample("y", dist.Normal(total + effect[day], 0.3), obs=y)


@pytest.fixture(scope="module")
def data():
    rng, X = rows(30, 0)
    day = np.arange(30) % 4
    return X, day, np.sin(X[:, 0]) + 0.5 * day + 0.2 * rng.normal(size=30)


@pytest.fixture(scope="module")
def trained(data):
    """At the optimum after one natural step, as the likelihood is Gaussian."""
    X, *_ = data
    guide = sgp.AutoJointGP(additive, options(X))
    optimiser = sgp.natural_gradients(guide, 1.0, optax.adam(0.01))
    svi = SVI(additive, guide, optimiser, sgp.TraceGP_ELBO())
    return svi, guide, svi.run(jax.random.key(0), 2, *data, progress_bar=False)


@pytest.fixture(scope="module")
def exact(data):
    X, day, y = data
    prior = [matern12(X, 1.5, 2.0), matern12(X, 0.4, 0.3), 1.69 * np.eye(4), [[4.0]]]
    prior = [np.asarray(block) for block in prior]
    maps = [np.eye(30), np.eye(30), np.eye(4)[day], np.ones((30, 1))]
    return prior, maps, y - 1.0


@pytest.mark.slow
def test_two_sites_and_effects_are_exact(data, trained, exact):
    X, day, _ = data
    _, guide, result = trained
    means, covariances, joint = conditional(*exact, 0.3)
    means[3] = means[3] + 1.0
    found = guide.result(result.params, *data).posterior(X, day)
    for i, name in enumerate(("f", "g", "effect")):
        assert_is(found[name], means[i], covariances[i])
    assert_is(found["level"], means[3][0], covariances[3])
    H = np.concatenate([np.eye(30), np.eye(30), np.zeros((30, 4)), np.ones((30, 1))], 1)
    assert_is(found["total"], means[0] + means[1] + means[3], H @ joint @ H.T)
    np.testing.assert_allclose(-result.losses[-1], log_evidence(*exact, 0.3), atol=1e-5)


def bound(guide, params, *args):
    terms = guide.bound_terms(jax.random.key(0), params, args, {})
    return sum(terms.values())


def moved(params, seed, size):
    """Other values of q(w)."""
    rng, names = np.random.default_rng(seed), ("auto_field_mu", "auto_field_sqrt")
    mu, root = (np.asarray(params[name]) for name in names)
    mu = mu + size * rng.normal(size=mu.shape)
    root = root + size * np.tril(rng.uniform(0.0, 0.2, size=root.shape))
    return params | dict(zip(names, (jnp.asarray(mu), jnp.asarray(root)), strict=True))


@pytest.mark.slow
def test_other_gaussians_have_less(data, trained, exact):
    """By the KL to the best one, for a Gaussian likelihood."""
    _, guide, result = trained
    evidence = log_evidence(*exact, 0.3)
    best = np.asarray(result.params["auto_field_mu"])
    P = np.asarray(result.params["auto_field_sqrt"])
    value = jax.jit(lambda params: bound(guide, params, *data))
    for seed, size in enumerate((0.01, 0.1, 1.0)):
        params = moved(result.params, seed, size)
        mu, root = (
            np.asarray(params["auto_field_mu"]),
            np.asarray(params["auto_field_sqrt"]),
        )
        ratio, away = np.linalg.solve(P, root), np.linalg.solve(P, mu - best)
        kl = 0.5 * (np.sum(ratio**2) + away @ away - len(mu))
        kl -= np.sum(np.log(np.diag(ratio)))
        np.testing.assert_allclose(value(params), evidence - kl, rtol=1e-6, atol=1e-4)


@pytest.mark.slow
def test_batches_average_to_the_bound(data, trained):
    X, day, y = data
    _, guide, result = trained
    params = moved(result.params, 0, 0.1)
    full = bound(guide, params, *data)
    value = jax.jit(lambda *batch: bound(guide, params, *batch, 30))
    parts = [value(X[i : i + 10], day[i : i + 10], y[i : i + 10]) for i in (0, 10, 20)]
    np.testing.assert_allclose(np.mean(parts), full, rtol=1e-10)


@pytest.mark.slow
def test_its_result_goes_through_a_file(data, trained, tmp_path):
    X, day, _ = data
    _, guide, result = trained
    posterior = guide.result(result.params, *data)
    posterior.save(tmp_path / "joint.npz")
    loaded = sgp.load(tmp_path / "joint.npz", additive)
    for name, q in posterior.posterior(X, day).items():
        again = loaded.posterior(X, day)[name]
        assert np.array_equal(again.mean, q.mean) and np.array_equal(again.sd, q.sd)


def test_draws_have_its_moments(data, trained):
    """Means of 4000 draws within 4.5 standard errors: wrong once in some thousands."""
    X, day, _ = data
    _, guide, result = trained
    posterior = guide.posterior(result.params, X[:3], day[:3])
    sites = ["f", "g", "level", "total"]
    draw = Predictive(
        additive, guide=guide, params=result.params, num_samples=4000, return_sites=sites
    )
    found = draw(jax.random.key(1), jnp.asarray(X[:3]), jnp.asarray(day[:3]))
    for name in sites:
        q, draws = posterior[name], np.asarray(found[name])
        assert np.all(np.abs(draws.mean(0) - q.mean) < 4.5 * q.sd / np.sqrt(4000))
        assert np.all(np.abs(draws.std(0) / q.sd - 1.0) < 4.5 / np.sqrt(2 * 4000))


@pytest.mark.slow
def test_float32_hyperparameters_and_subsampling(data):
    """Trained on batches of a plate, with a distribution of the noise and a parameter."""
    X, day, y = (jnp.asarray(a, jnp.float32 if a.ndim == 2 else None) for a in data)

    def model(X, day, y=None, batch_size=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
        rows = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with rows as idx:
            X, y = X[idx], None if y is None else y[idx]
        kernel = sgp.kernels.RBF(variance, 1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with rows:
            numpyro.sample("y", dist.Normal(level + f, noise), obs=y)

    guide = sgp.AutoJointGP(model, sgp.SVGP(6), autoguide.AutoNormal)
    optimiser = sgp.natural_gradients(guide, 0.2, optax.adam(0.02))
    svi = SVI(model, guide, optimiser, sgp.TraceGP_ELBO())
    run = svi.run(jax.random.key(0), 200, X, day, y, batch_size=10, progress_bar=False)
    losses = np.asarray(run.losses)
    assert losses[-50:].mean() < losses[:10].mean() - 10.0
    posterior = guide.result(run.params, X, day, y)
    summary = posterior.summary()
    assert list(summary.index) == ["noise", "level"] and summary.loc["noise", "sd"] > 0.0
    assert "evidence" not in repr(posterior)
    assert np.isfinite(posterior.log_score(X, day, y)["y"].mean)
    drawn = guide.sample_posterior(jax.random.key(0), run.params, X, day, sample_shape=(3,))
    assert drawn["f"].shape == (3, 30) and drawn["noise"].shape == (3,)
    with pytest.raises(
        ValueError, match="parameters .numpyro.param., which are not in files"
    ):
        posterior.save("never.npz")
    assert guide.median(run.params, X, day)["level"].shape == ()
    assert guide.quantiles(run.params, [0.1, 0.9], X, day)["f"].shape == (2, 30)


@pytest.mark.slow
def test_what_is_refused(data, trained):
    _, guide, result = trained
    with pytest.raises(ValueError, match="Leave the expectation out"):
        loss = sgp.TraceGP_ELBO(sgp.GaussHermite(5))
        loss.loss(jax.random.key(0), result.params, additive, guide, *data)
    with pytest.raises(NotImplementedError, match="TraceGP_ELBO"):
        Trace_ELBO().loss(jax.random.key(0), result.params, additive, guide, *data)
    with pytest.raises(ValueError, match="not been set up"):
        sgp.AutoJointGP(additive, sgp.SVGP(3)).result(result.params)
    with pytest.raises(ValueError, match="MixtureSVGP"):
        sgp.AutoJointGP(additive, sgp.MixtureSVGP(3)).setup(*data)


# ---- what a fit with sites apart is told ----------------------------------------------


@pytest.mark.slow
def test_a_fit_is_told_what_sites_apart_lose(data):
    """Nats between the bounds, for a Gaussian likelihood; and how narrow sds are."""
    X, day, y = data

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.5, 2.0), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern12(0.4, 0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, 0.3), obs=y)

    option = options(X)
    fitted = sgp.fit(model, option, (X, y), progress_bar=False)
    joint = sgp.nested(model, option, (X, y), progress_bar=False)
    verdict = fitted.check()
    cause = verdict.causes["sites apart"]
    np.testing.assert_allclose(cause.nats, joint.log_evidence - fitted.bound, rtol=1e-3)
    assert cause.nats > 1.0 and "sgp.nested" in cause.mend
    apart = fitted.posterior(X)["f"].variance
    ratio = np.sqrt(np.mean(apart) / np.mean(joint.posterior(X)["f"].variance))
    for told in (cause.told, verdict.summary):
        assert f"sds of 'f' are {ratio:.2f} of those under one Gaussian" in told


@pytest.mark.slow
@pytest.mark.parametrize("of_mean", [True, False])
def test_sds_of_a_site_have_the_level_of_its_mean(data, of_mean):
    """A level as the mean of f is in f; beside f it is not. As dense algebra has it."""
    X, _, y = data

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 5.0))
        mean = {"mean": level} if of_mean else {}
        prior = sgp.GaussianProcess(sgp.kernels.Matern12(1.5, 2.0), X, **mean)
        f = numpyro.sample("f", prior)
        with numpyro.plate("data", X.shape[0]):
            fn = dist.Normal(f if of_mean else level + f, 0.3)
            numpyro.sample("y", fn, obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=X, train_inducing=False))
    guide.setup(X, y)
    told = sgp.integrated.sites_apart(guide, guide.known().starts, (X, y), {}).told
    N = len(X)
    K = 1.5 * np.exp(-np.abs(X - X.T) / 2.0)
    A = np.concatenate([np.eye(N), np.ones((N, 1))], axis=1)  # of g and of the level
    prior = np.zeros((N + 1, N + 1))
    prior[:N, :N], prior[N, N] = K + 1e-8 * 1.5 * np.eye(N), 25.0
    S = np.linalg.inv(np.linalg.inv(prior) + A.T @ A / 0.3**2)
    together = np.trace(A @ S @ A.T) if of_mean else np.trace(S[:N, :N])
    alone = np.linalg.inv(np.linalg.inv(prior[:N, :N]) + np.eye(N) / 0.3**2)
    assert f"sds of 'f' are {np.sqrt(np.trace(alone) / together):.2f} of" in told


@pytest.mark.slow
def test_a_likelihood_without_derivatives_is_told_as_unknown(data):
    X, _, y = data

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.1), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", sgp.BlackBox(lambda y, f: -((y - f) ** 2), f + g), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, y)
    cause = sgp.integrated.sites_apart(guide, guide.known().starts, (X, y), {})
    assert np.isnan(cause.nats) and cause.told.startswith("unknown")


def test_a_single_site_is_told_nothing_of_it(data):
    X, _, y = data

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, y)
    assert sgp.integrated.sites_apart(guide, guide.known().starts, (X, y), {}) is None


@pytest.mark.slow
def test_hyperparameters_whose_support_another_latent_sets():
    """Beyond the support that the set-up had, of a uniform below 2.7."""

    def model(X, y=None):
        most = numpyro.sample("most", dist.LogNormal(1.0, 0.5))
        noise = numpyro.sample("noise", dist.Uniform(0.0, most))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    x = np.linspace(0.0, 3.0, 6)[:, None]
    guide = sgp.AutoJointGP(model, sgp.SVGP(2))
    guide.setup(x, np.sin(x[:, 0]))
    trained = {"most_auto_loc": jnp.asarray(6.0), "noise_auto_loc": jnp.asarray(5.0)}
    found = guide.result({**guide.known().starts, **trained})
    np.testing.assert_allclose(found.hyperparameters["most"], 6.0, rtol=1e-9)
    np.testing.assert_allclose(found.hyperparameters["noise"], 5.0, rtol=1e-9)

"""`fit` with one Gaussian over GP sites and effects."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal
from scipy.linalg import block_diag

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics.arviz import as_tree
from tests.integrated.dense import (
    assert_is,
    conditional,
    log_evidence,
    matern12,
    options,
    rows,
)

RNG, X = rows(40, 0)
DAY = np.arange(40) % 4
Y = np.sin(X[:, 0]) + 0.5 * DAY + 0.2 * RNG.normal(size=40)
X_NEW, DAY_NEW = np.linspace(0.0, 5.0, 5)[:, None], np.zeros(5, int)


def fit(model, approximation, data, **more):
    return sgp.fit(model, approximation, data, progress_bar=False, **more)


def observe(eta, y, noise=0.3):
    with numpyro.plate("data", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


def known(X, day, y=None):
    """Two GP sites, a level and effects of days, all of a known prior."""
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    with numpyro.plate("days", 4):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(1.5, 2.0), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern12(0.4, 0.3), X))
    observe(level + f + g + effect[day], y)


def learned(X, y=None):
    """Two GP sites with hyperparameters."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    slow = numpyro.sample("slow", dist.LogNormal(0.5, 0.3))
    fast = numpyro.sample("fast", dist.LogNormal(-1.0, 0.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.5, slow), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.4, fast), X))
    observe(f + g, y, noise)


@pytest.mark.slow
def test_linear_gaussian_models_are_exact():
    prior = [matern12(X, 1.5, 2.0), matern12(X, 0.4, 0.3), 1.69 * np.eye(4), [[4.0]]]
    prior = [np.asarray(block) for block in prior]
    exact = prior, [np.eye(40), np.eye(40), np.eye(4)[DAY], np.ones((40, 1))], Y - 1.0
    means, covariances, _ = conditional(*exact, 0.3)
    fitted = fit(known, options(X), (X, DAY, Y), joint=True)
    found = fitted.posterior(X, DAY)
    for i, name in enumerate(("f", "g", "effect")):
        assert_is(found[name], means[i], covariances[i])
    assert_is(found["level"], means[3][0] + 1.0, covariances[3])
    np.testing.assert_allclose(fitted.bound, log_evidence(*exact, 0.3), atol=1e-5)
    # Draws for responses are balanced: their moments have no noise.
    y = fitted.predict(X, DAY)["y"]
    B = np.hstack([np.asarray(b) for b in exact[1]])
    K = block_diag(*exact[0])
    gain = np.linalg.solve(B @ K @ B.T + 0.09 * np.eye(40), B @ K)
    variance = np.einsum("ij,jk,ik->i", B, K - K @ B.T @ gain, B)
    mean = B @ np.concatenate([np.ravel(m) for m in means]) + 1.0
    np.testing.assert_allclose(y.mean, mean, atol=1e-4)
    np.testing.assert_allclose(y.sd, np.sqrt(variance + 0.09), rtol=1e-4)


@pytest.fixture(scope="module")
def fitted():
    return fit(learned, sgp.SVGP(8), (X, Y), joint=True)


@pytest.mark.slow
def test_its_bound_is_above_that_of_sites_apart(fitted):
    """And that is what the verdict on those tells of it."""
    apart = fit(learned, sgp.SVGP(8), (X, Y))
    assert fitted.bound > apart.bound + 0.5
    assert "sgp.fit with joint=True" in apart.check().causes["sites apart"].mend


@pytest.mark.slow
def test_batches_end_at_the_optimum_of_all_rows(fitted):
    """Within .1 nat, the tolerance of both; means to .1 sd and sds to 5 %."""
    batches = fit(learned, sgp.SVGP(8), (X, Y), joint=True, batch_size=10)
    assert abs(batches.bound - fitted.bound) < 0.1
    q, other = fitted.posterior(X_NEW), batches.posterior(X_NEW)
    for name in ("f", "g"):
        assert np.all(np.abs(other[name].mean - q[name].mean) < 0.1 * q[name].sd)
        assert np.all(np.abs(other[name].sd / q[name].sd - 1.0) < 0.05)
    verdict = batches.check()
    assert verdict.converged and verdict.causes["q(u)"].nats < 0.05


@pytest.mark.slow
def test_it_is_asked_what_a_fit_is_asked(fitted, tmp_path):
    assert f"bound: {fitted.bound:.7g}" in repr(fitted)
    assert "at points: noise, slow, fast" in repr(fitted)
    assert fitted.predict(X_NEW)["y"].mean.shape == (5,)
    assert np.isfinite(fitted.log_score(X, Y)["y"].mean)
    drawn = fitted.sample(jax.random.key(0), X_NEW, sample_shape=(3,))
    assert drawn["g"].shape == (3, 5)
    verdict = fitted.check()
    assert verdict.converged and verdict.bound == fitted.bound
    assert "noise" in verdict.causes["point estimates"].told
    tree = as_tree(fitted.to_arviz(num_samples=20))
    assert tree.attrs["method"] == "fit"
    assert tree.attrs["log_joint_bound"] == fitted.bound and "elbo" not in tree.attrs
    assert tree.attrs["point_estimates"] == "fast, noise, slow"  # which LOO cannot move
    assert "log_likelihood" not in tree.children
    assert "of log p(y, points)" in repr(fitted)
    fitted.save(tmp_path / "joint.npz")
    loaded = sgp.load(tmp_path / "joint.npz", learned)
    assert isinstance(loaded, sgp.JointFit) and loaded.bound == fitted.bound
    np.testing.assert_array_equal(loaded.losses, fitted.losses)
    q, other = fitted.posterior(X_NEW)["f"], loaded.posterior(X_NEW)["f"]
    assert np.array_equal(q.mean, other.mean) and np.array_equal(q.sd, other.sd)
    told = loaded.check(X, Y).causes["other parameters"].told
    assert "the training is not here" in told
    copied = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(q.mean, copied.posterior(X_NEW)["f"].mean)
    for other in (loaded, copied):
        with pytest.raises(ValueError, match="of this process only, not from others"):
            fit(learned, other, (X, Y))


@pytest.mark.slow
def test_a_verdict_tells_of_a_training_that_was_too_short():
    short = fit(learned, sgp.SVGP(8), (X, Y), joint=True, batch_size=10, steps=2)
    few = sgp.AutoJointGP(learned, sgp.SVGP(8))
    few.setup(X, Y)
    start = few.result(few.known().starts).check()
    assert start.causes["q(u)"].nats > 1.0 and "train longer" in start.causes["q(u)"].mend
    assert not start.converged
    assert short.check().causes["other parameters"].nats > 0.5


@pytest.mark.slow
def test_it_goes_on_from_a_fit(fitted):
    further = fit(learned, fitted, (X, Y))
    assert isinstance(further, sgp.JointFit)
    assert further.bound > fitted.bound - 1e-6
    guide = sgp.AutoJointGP(learned, sgp.SVGP(8))
    np.testing.assert_allclose(fit(learned, guide, (X, Y)).bound, fitted.bound, atol=0.1)


@pytest.mark.slow
def test_counts_with_a_distribution_of_hyperparameters():
    """Its draws are those of the base guide, and its bound is random."""
    y = RNG.poisson(np.exp(1.0 + np.sin(X[:, 0])))

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + slope * X[:, 0])), obs=y)

    found = fit(model, sgp.SVGP(6), (X, y), joint=True, base_guide=AutoNormal, steps=300)
    assert found.bound_se > 0.0 and "at draws of the base guide" in repr(found)
    tree = as_tree(found.to_arviz(num_samples=20))
    assert tree.attrs["elbo"] == found.bound and "log_likelihood" in tree.children
    assert found.summary().loc["lengthscale", "sd"] > 0.1
    nested = sgp.nested(model, sgp.SVGP(6), (X, y), progress_bar=False)
    slope, other = (r.posterior(X_NEW)["slope"] for r in (found, nested))
    assert abs(slope.mean - other.mean) < 0.3 * other.sd
    assert "on average" in found.check().causes["q(u)"].told


def test_what_is_refused():
    def deep(X, y=None):
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), h[:, None]))
        observe(f, y)

    with pytest.raises(ValueError, match="depends on GP site 'h'"):
        fit(deep, sgp.SVGP(3), (X, Y), joint=True)
    with pytest.raises(ValueError, match="Leave the expectation out"):
        rule = sgp.GaussHermite(5)
        fit(learned, sgp.SVGP(3), (X, Y), joint=True, expectation=rule)
    with pytest.raises(ValueError, match="Leave pad out"):
        fit(learned, sgp.SVGP(3), (X, Y), joint=True, pad=True)
    with pytest.raises(ValueError, match="needs the number of inducing points"):
        fit(learned, sgp.SVGP("auto"), (X, Y), joint=True)
    with pytest.raises(ValueError, match="with a q for each site"):
        guide = sgp.AutoSparseGP(learned, sgp.SVGP(3))
        fit(learned, guide, (X, Y), joint=True)
    with pytest.raises(ValueError, match="of another model"):
        fit(learned, sgp.AutoJointGP(known, sgp.SVGP(3)), (X, Y))


@pytest.mark.slow
def test_spreads_of_what_is_at_a_point_are_not_known(fitted):
    """They were 3e-17."""
    table = fitted.summary()
    assert table["mean"].notna().all()
    assert table.loc["noise"].drop("mean").isna().all()

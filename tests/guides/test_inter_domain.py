"""Guides with inter-domain inducing variables: bounds, training, results and errors."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.infer import SVI, Predictive

import numpyro_sgp as sgp
from numpyro_sgp.inducing.covariances import cross_covariance, inducing_covariance
from numpyro_sgp.kernels import RBF, Convolutional, Matern32
from numpyro_sgp.likelihoods import RobustMax, robust_max_probabilities
from tests import helpers

NOISE = 0.3


def images(num_images=5, size=6, seed=0, dtype=float):
    """Images with a bright stroke, along rows (label 0) or columns (label 1)."""
    rng = np.random.default_rng(seed)
    X, y = np.zeros((num_images, size, size)), rng.integers(2, size=num_images)
    for image, label in zip(X, y, strict=True):
        i, j = rng.integers(1, size - 3, size=2)
        image[(slice(i, i + 1), slice(j, j + 3))[:: 1 if label == 0 else -1]] = 1.0
    X = X + 0.05 * rng.normal(size=X.shape)
    return jnp.asarray(X.reshape(num_images, -1), dtype), jnp.asarray(y)


def conv(size=6, locations=True):
    return Convolutional(
        RBF(30.0, 1.0), (size, size), 3, locations=Matern32(1.0, 3.0) if locations else None
    )


def problem(name):
    """A kernel, inputs and responses."""
    if name == "patches":
        X, y = images()
        return conv(), X, 2.0 * y - 1.0
    X, y = helpers.regression_data(8)
    return RBF(1.0, 0.7), X, y


def bound(approximation, kernel, X, y):
    """A short fit: the guide, the result and the bound at each step."""
    guide = sgp.AutoSparseGP(helpers.gaussian_model, approximation)
    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(2))
    svi = SVI(helpers.gaussian_model, guide, optax.adam(0.05), elbo)
    options = {"noise": NOISE, "kernel": kernel}
    fit = svi.run(random.key(0), 60, X, y, progress_bar=False, **options)
    return guide, fit, -np.asarray(fit.losses)


CASES = {
    "patches": ("patches", sgp.SVGP(4, sgp.InducingPatches("kmeans"))),
    "patches twice": ("patches", sgp.SOLVEGP(3, 3, sgp.InducingPatches("random"))),
    "patches, images": (
        "patches",
        sgp.SOLVEGP(3, 2, sgp.InducingPatches("greedy"), orthogonal="greedy"),
    ),
    "smoothed, points": (
        "line",
        sgp.SOLVEGP(4, 3, sgp.SmoothedPoints("kmeans", 0.2), orthogonal="kmeans"),
    ),
    "Fourier, points": (
        "line",
        sgp.SOLVEGP(4, 3, sgp.FourierFeatures("greedy", 1.5), orthogonal="kmeans"),
    ),
}
SLOW = (
    "patches",
    "patches twice",
    "patches, images",
    "smoothed, points",
    "Fourier, points",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES],
)
def test_bounds_rise_and_stay_below_the_evidence(case):
    name, approximation = CASES[case]
    kernel, X, y = problem(name)
    guide, fit, bounds = bound(approximation, kernel, X, y)
    C = np.asarray(kernel(X)) + NOISE**2 * np.eye(len(X))
    evidence = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1])
    assert bounds[0] + 1.0 < bounds[-1] and bounds.max() < evidence + 1e-6

    q = guide.posterior(fit.params, X, noise=NOISE, kernel=kernel)["f"]
    Kuu = inducing_covariance(kernel, q.inducing)
    L = np.linalg.cholesky(Kuu + 1e-8 * np.mean(np.diag(Kuu)) * np.eye(len(Kuu)))
    A = np.linalg.solve(L, cross_covariance(kernel, q.inducing, X))
    mu = np.concatenate([block.mu for block in q.q.blocks])
    assert_allclose(q.mean, A.T @ mu, rtol=1e-6, atol=1e-8)
    assert {name.rpartition("_")[2] for name in fit.params} <= {"Z", "O", "mu", "sqrt"}


@pytest.mark.slow
def test_an_object_with_points_is_the_start():
    kernel, X, y = problem("patches")
    Z = np.random.default_rng(0).normal(size=(4, 11))
    approximation = sgp.SOLVEGP(inducing=sgp.InducingPatches(Z), num_orthogonal=2)
    guide = sgp.AutoSparseGP(helpers.gaussian_model, approximation)
    guide.setup(X, y, kernel=kernel)
    start = guide.setup_state()["initial"]["f"]
    assert_allclose(start["Z"], Z)
    assert start["O"].shape == (2, 11)
    assert approximation.num_points == 6


@pytest.mark.slow
def test_points_that_stay_and_points_of_each_function():
    X, y = images()

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(conv(), X).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    for options, shape in (
        ({"train_inducing": False}, None),
        ({"share_inducing": False}, (2, 3, 11)),
    ):
        patches = sgp.InducingPatches("random", places="uniform")
        guide = sgp.AutoSparseGP(model, sgp.SVGP(3, patches, **options))
        svi = SVI(model, guide, optax.adam(0.02), sgp.TraceGP_ELBO(sgp.MonteCarlo(4)))
        params = svi.get_params(svi.init(random.key(0), X, y))
        assert ("f_auto_Z" in params) == (shape is not None)
        if shape:
            assert params["f_auto_Z"].shape == shape
        assert guide.posterior(params, X[:2])["f"].mean.shape == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("orthogonal", [0, 4])
def test_training_in_single_precision_learns_classes(orthogonal):
    X, y = images(24, size=8, dtype=jnp.float32)

    def model(X, y=None, batch_size=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X_batch, y_batch = X[idx], None if y is None else y[idx]
        weights = numpyro.param("weights", jnp.ones(36, jnp.float32))
        base = RBF(jnp.float32(30.0), numpyro.param("lengthscale", jnp.float32(1.0)))
        kernel = Convolutional(base, (8, 8), 3, weights=weights)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X_batch).expand([2]))
        with data:
            numpyro.sample("y", RobustMax(f), obs=y_batch)

    patches = sgp.InducingPatches("kmeans")
    approximation = sgp.SVGP(6, patches)
    if orthogonal:
        approximation = sgp.SOLVEGP(6, orthogonal, patches)
    guide = sgp.AutoSparseGP(model, approximation)
    svi = SVI(model, guide, optax.adam(0.03), sgp.TraceGP_ELBO())
    fit = svi.run(random.key(0), 120, X, y, batch_size=12, progress_bar=False)
    losses = np.asarray(fit.losses)
    assert losses.dtype == np.float32 and np.isfinite(losses).all()
    assert losses[-20:].mean() < 0.7 * losses[:5].mean()
    if not orthogonal:
        return
    X_new, y_new = images(40, size=8, seed=1, dtype=jnp.float32)
    q = guide.posterior(fit.params, X_new)["f"]
    p = robust_max_probabilities(q.mean, q.variance)
    assert np.mean(p.argmax(axis=0) == y_new) > 0.65
    predictive = Predictive(model, guide=guide, params=fit.params, num_samples=3)
    assert predictive(random.key(1), X_new)["y"].shape == (3, 40)


@pytest.mark.parametrize(
    "approximation",
    [
        pytest.param(
            sgp.MixtureSVGP(3, 2, inducing=sgp.InducingPatches("kmeans")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sgp.InverseFreeSVGP(3, inducing=sgp.InducingPatches("kmeans")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sgp.ODVGP(3, 4, sgp.InducingPatches("kmeans"), "random", num_columns=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda a: type(a).__name__,
)
def test_every_family_takes_them(approximation):
    kernel, X, y = problem("patches")
    guide = sgp.AutoSparseGP(helpers.gaussian_model, approximation)
    svi = SVI(helpers.gaussian_model, guide, optax.adam(0.02), sgp.TraceGP_ELBO())
    options = {"noise": NOISE, "kernel": kernel}
    state = svi.init(random.key(0), X, y, **options)
    assert np.isfinite(svi.evaluate(state, X, y, **options))
    params = svi.get_params(state)
    q = guide.posterior(params, X[:2], **options)["f"]
    assert q.mean.shape == (2,) and np.all(q.variance > 0)


@pytest.mark.slow
def test_a_hidden_layer_is_a_gp_of_patches():
    X, y = images(3, size=6)

    def model(X, y=None):
        patches = sgp.kernels.extract_patches(X, (6, 6), 3)
        hidden = sgp.GaussianProcess(RBF(), patches.reshape(-1, 9), mean=lambda p: p[:, 4])
        g = numpyro.sample("g", hidden).reshape(-1, 16)
        f = numpyro.sample("f", sgp.GaussianProcess(conv(4, False), g).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", RobustMax(f), obs=y)

    patches = sgp.InducingPatches("kmeans")
    guide = sgp.AutoSparseGP(model, {"g": sgp.SVGP(4), "f": sgp.SVGP(3, patches)})
    elbo = sgp.TraceGP_ELBO(sgp.MonteCarlo(2))
    svi = SVI(model, guide, optax.adam(0.02), elbo)
    fit = svi.run(random.key(0), 20, X, y, progress_bar=False)
    assert fit.params["g_auto_Z"].shape == (4, 9)
    assert fit.params["f_auto_Z"].shape == (3, 9)
    assert fit.losses[-5:].mean() < fit.losses[0]


@pytest.mark.slow
def test_what_has_no_meaning_is_refused():
    kernel, X, y = problem("patches")
    patches = sgp.InducingPatches("kmeans")
    guide = sgp.AutoSparseGP(helpers.gaussian_model, sgp.SVGP(3, patches))
    svi = SVI(helpers.gaussian_model, guide, optax.adam(0.02), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(random.key(0), X, y, kernel=kernel))
    for verdict in (
        lambda: guide.initial_verdicts,
        lambda: guide.assess(params, X, kernel=kernel),
    ):
        with pytest.raises(NotImplementedError, match="'f': verdicts are of"):
            verdict()
    q = guide.posterior(params, X, kernel=kernel)["f"]
    with pytest.raises(NotImplementedError, match="not InducingPatches"):
        q.sample_functions(random.key(0))
    assert q.sample(random.key(0), (2,)).shape == (2, 5)
    with pytest.raises(ValueError, match="rows of 36 numbers"):
        guide.posterior(params, X[:, :-1], kernel=kernel)


@pytest.mark.parametrize(
    ("approximation", "error", "message"),
    [
        (sgp.SVGP(2, sgp.InducingPatches(np.ones((2, 9)))), ValueError, r"\(M, 11\)"),
        (
            sgp.SOLVEGP(2, 2, sgp.InducingPatches("random"), sgp.InducingPatches("kmeans")),
            ValueError,
            "'f': Choose all sets",
        ),
        (
            sgp.SVGP(2, sgp.SmoothedPoints("kmeans")),
            TypeError,
            "not for Convolutional",
        ),
    ],
)
def test_bad_starts_are_refused_at_the_set_up(approximation, error, message):
    kernel, X, y = problem("patches")
    guide = sgp.AutoSparseGP(helpers.gaussian_model, approximation)
    with pytest.raises(error, match=message):
        guide.setup(X, y, kernel=kernel)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgp.SVGP(inducing=sgp.InducingPatches("kmeans")), "give the number"),
        (lambda: sgp.SVGP(3, sgp.InducingPatches("middle")), "start by one of"),
        (lambda: sgp.SVGP(3, sgp.InducingPatches(np.ones((2, 9)))), "has 2 rows"),
        (lambda: sgp.SVGP(9, sgp.InducingPatches(np.ones(9))), r"shape \(M, D\)"),
        (
            lambda: sgp.ODVGP(3, 4, sgp.InducingPatches("kmeans"), num_columns=2),
            "orthogonal points among the inputs",
        ),
    ],
)
def test_contradictions_are_refused_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Rows of f that observations take by an index: ``np.unique(t, return_inverse=True)``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy.stats import norm

import numpyro_sgp as sgp
from numpyro_sgp._programs import split_static
from numpyro_sgp.predictive.row_batches import rows_of

Z = jnp.linspace(0.0, 5.0, 6)[:, None]
SHARP = 0.01


def model(times, index, y=None, noise=SHARP):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), times[:, None]))
    with numpyro.plate("data", index.shape[0]):
        numpyro.sample("y", dist.Normal(f[index], noise), obs=y)


@pytest.fixture(scope="module")
def fitted():
    """Of an arbitrary q(u), about which all is known."""
    rng = np.random.default_rng(0)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    times = np.linspace(0.0, 5.0, 12)
    guide.setup(times, np.arange(12), np.zeros(12))
    root = np.tril(0.1 * rng.normal(size=(6, 6)), -1) + 0.3 * np.eye(6)
    params = {"f_auto_qu_mu": rng.normal(size=6), "f_auto_qu_sqrt": root}
    return sgp.Fitted(
        guide, {"f_auto_Z": Z} | {k: jnp.asarray(v) for k, v in params.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("number, batch_size", [(310, None), (150, None), (180, 60)])
def test_responses_are_as_many_as_there_are_and_at_their_rows(fitted, number, batch_size):
    times = np.linspace(0.0, 5.0, 180)
    rng = np.random.default_rng(1)
    index = rng.permutation(180) if number == 180 else rng.integers(0, 180, number)
    options = {} if batch_size is None else {"batch_size": batch_size}
    found = fitted.predict(times, index, **options)
    f = fitted.posterior(times, np.arange(180))["f"]
    assert_allclose(found["y"].mean, f.mean[index], rtol=1e-9, atol=1e-12)
    variance = f.variance[index] + SHARP**2
    assert_allclose(found["y"].sd, np.sqrt(variance), rtol=1e-6)
    assert found["f"].mean.shape == (180,)


@pytest.mark.slow
def test_an_order_is_looked_at_each_time(fitted):
    """Not kept from rows of as many in their own order."""
    times = np.linspace(0.0, 5.0, 200)
    in_order = np.arange(200)
    index = np.random.default_rng(5).permutation(200)
    f = fitted.posterior(times, in_order)["f"]
    for rows in (in_order, index, in_order):
        found = fitted.predict(times, rows, batch_size=60)["y"].mean
        assert_allclose(found, f.mean[rows], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_scores_of_sharp_likelihoods_are_those_of_their_rows(fitted):
    rng = np.random.default_rng(2)
    times, index = np.sort(rng.uniform(0.0, 5.0, 30)), rng.permutation(30)
    f = fitted.posterior(times, index)["f"]
    mean, sd = np.asarray(f.mean)[index], np.sqrt(np.asarray(f.variance)[index] + SHARP**2)
    y = mean + 1.5 * sd * rng.normal(size=30)
    found = fitted.log_score(times, index, y)["y"].rows
    assert_allclose(found, norm(mean, sd).logpdf(y), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "one of two"])
def test_scores_of_rows_in_orders_of_their_own(kind):
    """Far from the mean with little noise, where nodes of q(f) alone find nothing."""
    rng = np.random.default_rng(6)
    times, index = np.sort(rng.uniform(0.0, 5.0, 30)), rng.permutation(30)
    counts = rng.uniform(size=30) < 0.7

    def by_index(times, index, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), times[:, None]))
        if kind == "masked":
            with numpyro.handlers.mask(mask=jnp.asarray(counts)):
                numpyro.sample("y", dist.Normal(f[index], SHARP), obs=y)
        else:
            g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), times[:, None]))
            numpyro.sample("y", dist.Normal(f[index] + g, SHARP), obs=y)

    guide = sgp.AutoSparseGP(by_index, sgp.SVGP(inducing=Z))
    guide.setup(times, index, np.zeros(30))
    sites = ["f"] if kind == "masked" else ["f", "g"]
    params = {f"{name}_auto_Z": Z for name in sites}
    for name in sites:
        root = np.tril(0.1 * rng.normal(size=(6, 6)), -1) + 0.3 * np.eye(6)
        params |= {f"{name}_auto_qu_mu": rng.normal(size=6), f"{name}_auto_qu_sqrt": root}
    fitted = sgp.Fitted(guide, {k: jnp.asarray(v) for k, v in params.items()})
    q = fitted.posterior(times, index)
    mean, variance = np.asarray(q["f"].mean)[index], np.asarray(q["f"].variance)[index]
    if kind == "one of two":
        mean, variance = mean + q["g"].mean, variance + q["g"].variance
    sd = np.sqrt(variance + SHARP**2)
    y = mean + 3.0 * sd * rng.normal(size=30)
    found = np.asarray(fitted.log_score(times, index, y)["y"].rows)
    expected = np.asarray(norm(mean, sd).logpdf(y))
    kept = counts if kind == "masked" else np.full(30, True)
    assert_allclose(found if len(found) < 30 else found[kept], expected[kept], atol=1e-5)


@pytest.mark.slow
def test_batches_of_rows_in_another_order_are_refused():
    rng = np.random.default_rng(3)
    t = rng.uniform(0.0, 5.0, 40)
    times, index = np.unique(t, return_inverse=True)
    with pytest.raises(ValueError, match="a batch cannot stand for all"):
        data = times, index, np.sin(t)
        sgp.fit(model, sgp.SVGP(4), data, batch_size=10, steps=2, progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_many_columns_and_of_features_are_apart(dtype):
    """However products of them are rounded."""
    rng = np.random.default_rng(4)
    W = (rng.normal(size=(60, 8)) / 8.0).astype(dtype)

    def features(X, y=None):
        kernel = sgp.kernels.RBF(1.0, 3.0)
        inner = jnp.tanh(jnp.tanh(X @ W) @ W[:8])
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, jnp.concatenate([X, inner], 1)))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    with jax.enable_x64(dtype == np.float64):
        X = rng.normal(size=(200, 60)).astype(dtype)
        guide = sgp.AutoSparseGP(features, sgp.SVGP(3))
        guide.setup(X, X[:, 0])
        given = split_static(((X,), {}))
        assert rows_of(guide, *given, 100) is not None

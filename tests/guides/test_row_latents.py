"""Latents with an entry for each row, which say nothing of as many other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_sgp as sgp

N = 12
RNG = np.random.default_rng(0)
X = np.linspace(0.0, 5.0, N)[:, None]
Y = RNG.poisson(np.exp(1.0 + np.sin(X[:, 0]) + 0.5 * RNG.normal(size=N)))
OTHER = np.full((N, 1), 3.0)


def nugget(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + f + 0.5 * e)), obs=y)


def uncertain(x, y=None):
    with numpyro.plate("data", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(x, 0.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), z[:, None]))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def areas(X, area, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("areas", 3):
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
        total = jax.ops.segment_sum(jnp.exp(f), area, num_segments=3)
        numpyro.sample("y", dist.Poisson(total * jnp.exp(e)), obs=y)


@pytest.fixture(scope="module")
def results():
    given = nugget, sgp.SVGP(5), (X, Y)
    fitted = sgp.fit(*given, steps=5, progress_bar=False)
    return fitted, sgp.nested(*given, progress_bar=False)


@pytest.mark.slow
def test_as_many_other_rows_are_refused(results):
    """Twelve copies of one place had the means of the twelve rows of the training."""
    told = "'e' has an entry for each row.*argument 'X' has other rows.*GPPredictive"
    for result in results:
        with pytest.raises(ValueError, match=told):
            result.predict(OTHER)
        with pytest.raises(ValueError, match=told):
            result.log_score(X[::-1], Y[::-1])  # the same data in another order
        assert result.predict(X)["y"].mean.shape == (N,)
        assert np.isfinite(result.log_score(X, Y)["y"].mean)
        for rows in (3, N + 1):
            with pytest.raises(ValueError, match=r"'e' has the shape.*GPPredictive"):
                result.predict(np.full((rows, 1), 3.0))


@pytest.mark.slow
def test_what_is_told_to_do_draws_it_anew(results):
    for result in results:
        samples = result.sample(jax.random.key(0), sample_shape=(4000,))
        predictive = sgp.GPPredictive(nugget, samples, train_args=(X, Y))
        y = np.asarray(predictive(jax.random.key(1), OTHER)["y"])
        # Copies of one place are alike. Of a lognormal f + e / 2 with counts:
        f = result.posterior(X)["f"] if result is results[0] else None
        assert np.std(y.mean(axis=0)) < 4.0 * np.mean(y.std(axis=0)) / np.sqrt(4000)
        if f is not None:
            at = result.posterior(OTHER[:1])["f"]
            spread = float(at.variance[0]) + 0.25
            mean = np.exp(1.0 + float(at.mean[0]) + 0.5 * spread)
            variance = mean + mean**2 * np.expm1(spread)
            assert abs(y[:, 0].mean() - mean) < 5.0 * np.sqrt(variance / 4000)


@pytest.mark.slow
def test_a_point_for_each_row_is_in_the_headline(results):
    """Of t * e with both at points f went to nothing, and all that was checked was fine."""
    verdict = results[0].check()
    assert "e, with an entry for each row, held at points, may take from f" in repr(verdict)
    assert "joint=True" in verdict.summary
    assert "entry for each row" not in results[1].check().summary


@pytest.mark.slow
def test_inputs_that_are_latents_are_those_of_the_training():
    x = X[:, 0]
    given = uncertain, sgp.SVGP(5), (x, np.sin(x))
    fitted = sgp.fit(*given, steps=5, progress_bar=False)
    assert fitted.predict(x)["f"].mean.shape == (N,)
    with pytest.raises(ValueError, match="'z' has an entry for each row.*argument 'x'"):
        fitted.predict(x + 1.0)


@pytest.mark.slow
def test_inputs_with_errors_are_told_of_and_may_be_left_out():
    """Before the model's own code fails, which adds up arrays of different rows."""

    def model(x, y=None, measured=True):
        if measured:
            with numpyro.plate("data", x.shape[0]):
                x = x + 0.3 * numpyro.sample("z", dist.Normal())
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), x[:, None]))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    x = X[:, 0]
    fitted = sgp.fit(model, sgp.SVGP(5), (x, np.sin(x)), steps=5, progress_bar=False)
    with pytest.raises(
        ValueError, match=r"'z' has the shape \(7,\) with.*of shape \(12,\)"
    ):
        fitted.predict(np.linspace(0.0, 5.0, 7))
    for rows in (7, N):  # as many others too
        found = fitted.predict(np.linspace(1.0, 4.0, rows), measured=False)
        assert found["f"].mean.shape == (rows,)


@pytest.mark.slow
def test_latents_of_areas_are_of_no_row():
    area = np.arange(N) % 3
    data = X, area, np.array([5, 3, 4])
    fitted = sgp.fit(areas, sgp.SVGP(4), data, steps=3, progress_bar=False)
    # Cells in another order, of which the areas have the same totals.
    whole = fitted.predict(X, area)["y"]
    other = fitted.predict(X[::-1], area[::-1])["y"]
    assert_allclose(whole.mean, other.mean, atol=6.0 * np.max(whole.sd) / np.sqrt(2048))

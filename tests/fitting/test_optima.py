"""Bounds with many optima are told."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting.ends import expected_gain
from tests.helpers import slow


@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_the_gain_of_as_many_trainings_again(scale):
    """The mean of many sets of draws; of each one its standard deviation is half of it."""
    rng = np.random.default_rng(0)
    told, gained = [], []
    for _ in range(2000):
        ends = -500.0 + scale * rng.exponential(size=26)
        told.append(expected_gain([*ends[:13]]))
        gained.append(max(ends[13:].max() - ends[:13].max(), 0.0))
    # Of 13 draws: log 2 for where the means of the largest of 26 and 13 are apart.
    exact = scale * sum(1.0 / n for n in range(14, 27))
    assert abs(np.mean(gained) - exact) < 0.05 * scale
    assert abs(np.mean(told) - exact) < 0.05 * scale


def test_few_trainings_or_such_that_agree_tell_of_none():
    assert expected_gain([-3.0, -7.0, -9.0, -12.0]) == 0.0
    assert expected_gain(6 * [-3.0]) == 0.0


@pytest.mark.slow
def test_a_fit_and_its_check_tell_of_many_optima():
    """Counts far wider than Poisson, of which few points take some."""
    rng = np.random.default_rng(1)
    X = np.arange(120.0)[:, None]
    y = rng.poisson(1000.0 * np.exp(0.8 * rng.normal(size=120)))

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(-1.0, 1.0))
        level = numpyro.sample("level", dist.Normal(0.0, 3.0))
        kernel = sgp.kernels.RBF(variance, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=level))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(1000.0 * jnp.exp(f)), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(12), (X, y), progress_bar=False)
    assert "to one of many optima: trainings end apart" in fitted.stopped
    found = fitted.check()
    assert not found.converged
    told = found.causes["other parameters"], found.causes.get("other optima")
    assert any(cause is not None and "restarts=10" in cause.mend for cause in told)


@pytest.mark.slow
@pytest.mark.parametrize("even", [slow(True), False])
def test_mirror_images_are_told(even):
    """Of f**2 there is -f as well, far from f where that is nowhere near zero."""
    X = np.linspace(0.0, 6.0, 40)[:, None]
    f = 1.0 + 0.3 * np.sin(X[:, 0])
    y = (f**2 if even else f) + 0.1 * np.random.default_rng(0).normal(size=40)

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2.0, 2.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f**2 if even else f, 0.1), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(8), (X, y), progress_bar=False)
    found = fitted.check()
    assert found.converged != even and ("other optima" in found.causes) == even
    if even:
        assert np.isclose(found.causes["other optima"].nats, np.log(2.0))
        assert "several optima" in found.summary
    else:
        fitted.apart = 3.0  # as where other starts end lower
        found = fitted.check()
        assert not found.converged and "restarts=10" in found.causes["other optima"].mend

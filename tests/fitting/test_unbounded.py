"""Bounds without a maximum are told."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

import numpyro_sgp as sgp

X = np.random.default_rng(0).uniform(0.0, 3.0, (8, 1))
QUIET = {"progress_bar": False}


def model(X, y=None):
    variance = numpyro.param("variance", 1.0, constraint=constraints.positive)
    noise = numpyro.param("noise", 0.3, constraint=constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(variance, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.slow
def test_noise_that_runs_to_zero_is_told():
    """Of zeros the density rises for ever as noise and variance fall, either one first."""
    words = "'(noise|variance)' .* ran to zero, where the bound"
    with pytest.warns(UserWarning, match=words) as told:
        fitted = sgp.fit(model, sgp.SVGP(5), (X, np.zeros(8)), **QUIET)
    assert len(told) == 1
    assert "the bound has no maximum" in fitted.stopped
    assert "converged" not in fitted.stopped
    assert min(fitted.params["noise"], fitted.params["variance"]) < 1e-12


@pytest.mark.slow
def test_a_component_that_is_not_needed_is_not_told():
    """Its variance may go to zero: the bound has a limit there."""

    def additive(X, y=None):
        extra = numpyro.param("extra", 1.0, constraint=constraints.positive)
        kernel = sgp.kernels.RBF(1.0, 0.7) + sgp.kernels.Matern12(extra, 0.1)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = sgp.fit(additive, sgp.SVGP(5), (X, jnp.sin(X[:, 0])), **QUIET)
    assert "no maximum" not in fitted.stopped

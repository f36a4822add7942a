"""Latents by which nothing has a derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting.still import still

X = np.linspace(0.0, 10.0, 20)[:, None]
Y = np.where(X[:, 0] < 4.0, 1.0, -1.0)


def model(X, y=None, *, smooth=False):
    """Its latents: a change point, levels, a kernel's, a hyperprior's, and one unused."""
    tau = numpyro.sample("tau", dist.Uniform(0.0, 10.0))
    steps = numpyro.sample("steps", dist.Normal(2.5, 1.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    levels = numpyro.sample("levels", dist.Normal(0.0, scale).expand([2]).to_event(1))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    numpyro.sample("unused", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(0.1, lengthscale), X))
    share = jax.nn.sigmoid(5.0 * (tau - X[:, 0])) if smooth else X[:, 0] < tau
    mean = jnp.where(share, *levels) if not smooth else levels[1] + share * levels[0]
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + mean + jnp.floor(steps).sum(), 0.5), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("smooth", [False, True])
def test_what_is_compared_with_alone_is_told(smooth):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, Y, smooth=smooth)
    found = still(guide, guide.known().starts, (X, Y), {"smooth": smooth})
    assert found == (["steps"] if smooth else ["steps", "tau"])


@pytest.mark.slow
def test_a_fit_warns_of_it():
    with pytest.warns(UserWarning, match="'steps' and 'tau' are where the prior puts them"):
        fitted = sgp.fit(model, sgp.SVGP(3), (X, Y), steps=2, progress_bar=False)
    assert "nothing else has a derivative" in fitted.stopped


@pytest.mark.parametrize("warped", [False, True])
def test_inputs_of_a_gp_are_looked_at(warped):
    """A warped input moves a latent that the likelihood compares with; a jump does not."""

    def model(X, y=None):
        tau = numpyro.sample("tau", dist.Uniform(0.0, 10.0))
        later = jnp.where(X < tau, X, X * tau if warped else X + 100.0)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), later))
        level = jnp.where(X[:, 0] < tau, 1.0, -1.0)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + level, 0.5), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, Y)
    found = still(guide, guide.known().starts, (X, Y), {})
    assert found == ([] if warped else ["tau"])

"""Training that goes on with data that the guide was not set up with."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting.other_data import check_joint_data
from tests.helpers import slow

rng = np.random.default_rng(0)
X = np.linspace(0.0, 1.0, 24)[:, None]
Y = np.sin(9.0 * X[:, 0]) + 0.1 * rng.standard_normal(24)


def gp(lengthscale, inputs):
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    return numpyro.sample("f", sgp.GaussianProcess(kernel, inputs))


def model(inputs, y=None, shift=0.0):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 0.1))
    f = gp(lengthscale, inputs + shift)
    with numpyro.plate("data", inputs.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def fit(*args, **kwargs):
    return sgp.fit(*args, progress_bar=False, **kwargs)


@pytest.fixture(scope="module")
def first():
    return fit(model, sgp.SVGP(8), (X, Y))


class TestInputs:
    """Inducing points go to where the data are now."""

    @pytest.mark.slow
    @pytest.mark.parametrize("shift", [slow(0.0), 4.0])
    def test_points_follow(self, first, shift):
        second = fit(model, first, (X + 4.0 - shift, Y), shift=shift)
        Z = np.asarray(second.params["f_auto_Z"])
        assert Z.min() > 3.8 and Z.max() < 5.2
        # A shift changes nothing but which optimum of Z is found.
        assert second.bound == pytest.approx(first.bound, abs=0.3)

    @pytest.mark.slow
    def test_programs_serve_again(self, first, count_compiled):
        fit(model, first, (X + 4.0, Y))
        count_compiled()
        fit(model, first, (X + 6.0, Y[::-1].copy()))
        assert count_compiled() <= 2


class TestEdges:
    """Supports that are made of the data are those of the data now."""

    def model(self, inputs, y=None):
        wide = dist.Uniform(0.05, inputs.max() - inputs.min())
        f = gp(numpyro.sample("lengthscale", wide), inputs)
        with numpyro.plate("data", inputs.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    @pytest.mark.slow
    def test_latents_pass_the_edge(self):
        wave = np.sin(0.4 * 10.0 * X[:, 0])
        first = fit(self.model, sgp.SVGP(6), (X, Y))
        second = fit(self.model, first, (10.0 * X, wave))
        fresh = fit(self.model, sgp.SVGP(6), (10.0 * X, wave))
        assert second.params["lengthscale_auto_loc"] > 1.5
        assert second.bound == pytest.approx(fresh.bound, abs=0.1)

    @pytest.mark.slow
    def test_values_beyond_an_edge_begin_anew(self):
        wave = np.sin(0.4 * 10.0 * X[:, 0])
        first = fit(self.model, sgp.SVGP(6), (10.0 * X, wave))
        second = fit(self.model, first, (X, Y))
        fresh = fit(self.model, sgp.SVGP(6), (X, Y))
        assert second.bound == pytest.approx(fresh.bound, abs=0.1)


class TestRows:
    """Latents of each row are those of the rows that were trained last."""

    def model(self, inputs, y=None):
        f = gp(0.2, inputs)
        with numpyro.plate("data", inputs.shape[0]):
            e = numpyro.sample("e", dist.Normal(0.0, 0.5))
            numpyro.sample("y", dist.Poisson(jnp.exp(f + e)), obs=y)

    @pytest.mark.slow
    def test_predictions_are_of_these(self):
        counts = np.round(np.exp(Y + 1.0))
        first = fit(self.model, sgp.SVGP(6), (X, counts), steps=2)
        second = fit(self.model, first, (X + 0.3, counts[::-1].copy()), steps=2)
        second.predict(X + 0.3)
        first.predict(X)
        for fitted, other in [(first, X + 0.3), (second, X)]:
            with pytest.raises(ValueError, match="has other rows"):
                fitted.predict(other)

    @pytest.mark.slow
    def test_a_joint_guide_is_of_its_rows(self):
        guide = sgp.AutoJointGP(self.model, sgp.SVGP(4))
        check_joint_data(guide, (X, Y), {})  # which is not set up
        guide.setup(X, np.ones(24))
        check_joint_data(guide, (X, np.ones(24)), {})
        check_joint_data(guide, (jnp.asarray(X, jnp.float32), 2 * np.ones(24)), {})
        check_joint_data(guide, (X,), {"y": np.ones(24, int)})
        with pytest.raises(ValueError, match="latent for each row.*Fit them anew"):
            check_joint_data(guide, (X + 0.3, np.ones(24)), {})

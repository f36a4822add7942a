"""Priors that are made of the data, at other data."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp

X = np.linspace(0.0, 6.0, 12)[:, None]
Y = np.sin(X[:, 0]) + 2.0 * X[:, 0]


def sloped(X, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 10.0 / (X.max() - X.min())))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.1), obs=y)


def bounded(X, y=None):
    longest = X.max() - X.min()
    lengthscale = numpyro.sample("lengthscale", dist.Uniform(0.05, longest))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(4.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


def centred(X, y=None, shift=0.0):
    """Means may be made of the data, and scales of what is the same for all of them."""
    slope = numpyro.sample("slope", dist.Normal(shift, 1.0 + shift))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X - X.mean()))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.1), obs=y)


@pytest.mark.parametrize(
    ("model", "name", "joint"),
    [
        (sloped, "slope", True),
        (sloped, "slope", False),
        (bounded, "lengthscale", False),
    ],
)
@pytest.mark.slow
def test_a_prior_of_other_units_is_refused(model, name, joint, tmp_path):
    """A slope of 1.96 was one of 18.6 at three of the rows."""
    run = sgp.fit if joint else sgp.nested
    options = {"joint": True, "steps": 3} if joint else {}
    found = run(model, sgp.VGP(), (X, Y), progress_bar=False, **options)
    assert found.predict(X)["y"].mean.shape == (12,)
    with pytest.raises(ValueError, match=f"prior of '{name}' is made of the data"):
        found.predict(X[:3])
    path = tmp_path / "found.npz"
    with pytest.warns(UserWarning, match=f"prior of '{name}' is made of more"):
        found.save(path)
    with pytest.raises(ValueError, match=r"args=\(X, y\)"):
        sgp.load(path, model)
    again = sgp.load(path, model, (X, Y))
    np.testing.assert_allclose(again.predict(X)["y"].mean, found.predict(X)["y"].mean)


@pytest.mark.filterwarnings("ignore:The inputs of GP site")
@pytest.mark.slow
def test_what_is_the_same_for_all_data_is_not(tmp_path):
    data = X, Y, 0.5
    found = sgp.fit(centred, sgp.VGP(), data, joint=True, steps=3, progress_bar=False)
    found.save(tmp_path / "found.npz")
    found = sgp.load(tmp_path / "found.npz", centred)
    assert found.predict(X[:3], shift=0.5)["y"].mean.shape == (3,)
    with pytest.raises(ValueError, match="prior of 'slope'"):
        found.predict(X[:3], shift=1.0)


@pytest.mark.slow
def test_a_scale_that_is_a_latent_may_have_any_prior():
    """It is known itself; drawn from its prior it would be another one with other data."""

    def model(X, y=None):
        spread = 1.0 if y is None else y.std()
        tau = numpyro.sample("tau", dist.HalfNormal(spread))
        slope = numpyro.sample("slope", dist.Normal(0.0, tau))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.1), obs=y)

    found = sgp.fit(model, sgp.VGP(), (X, Y), joint=True, steps=3, progress_bar=False)
    known = found.predict()["y"].mean
    np.testing.assert_allclose(found.predict(X)["y"].mean, known, rtol=1e-6)
    np.testing.assert_allclose(found.predict(X[:3])["y"].mean, known[:3], rtol=1e-4)


@pytest.mark.slow
def test_a_minibatch_is_refused_where_predictions_are_of_all_rows():
    def model(X, y=None, size=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0], subsample_size=size) as rows:
            seen = None if y is None else y[rows]
            numpyro.sample("y", dist.Normal(f[rows], 0.1), obs=seen)

    guide = sgp.AutoJointGP(model, sgp.SVGP(4))
    guide.setup(X, Y)
    found = guide.result(guide.known().starts, X, Y)
    assert found.predict(X)["y"].mean.shape == (12,)
    with pytest.raises(ValueError, match="minibatch of plate 'data'"):
        found.predict(X, size=5)


@pytest.mark.slow
def test_base_guides_begin_near_the_prior_and_may_return_nothing():
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(5.0, 0.3))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = sgp.AutoJointGP(model, sgp.SVGP(4), numpyro.infer.autoguide.AutoNormal)
    guide.setup(100.0 * X, Y)
    assert abs(guide.known().starts["lengthscale_auto_loc"] - 5.0) < 0.3

    def of_model(model):
        def base(*args, **kwargs):
            numpyro.sample("lengthscale", dist.LogNormal(5.0, 0.1))

        return base

    guide = sgp.AutoJointGP(model, sgp.SVGP(4), of_model)
    guide.setup(100.0 * X, Y)
    loss = sgp.TraceGP_ELBO().loss
    starts = guide.known().starts
    assert np.isfinite(loss(jax.random.key(0), starts, model, guide, 100.0 * X, Y))

"""Predictions of all rows, and fits that go on with other data or from a file."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_sgp as sgp
from tests.helpers import slow

RNG = np.random.default_rng(0)
X = RNG.uniform(-2.0, 2.0, (60, 1))
Y = np.sin(3.0 * X[:, 0]) + 0.2 * RNG.normal(size=60)
QUIET = {"steps": 6, "progress_bar": False}


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)


def drawn(X, y=None):
    """Its plate draws the rows of a minibatch."""
    data = numpyro.plate("data", X.shape[0], subsample_size=20)
    with data as i:
        X, y = X[i], None if y is None else y[i]
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
    with data:
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)


@pytest.mark.slow
def test_predictions_of_rows_that_a_plate_draws_are_refused():
    """They were of a minibatch at random, whatever rows were given."""
    guide = sgp.AutoSparseGP(drawn, sgp.SVGP(6))
    svi = SVI(drawn, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).params
    calls = [
        lambda X: sgp.predict(guide, params, X),
        lambda X: guide.posterior(params, X),
        sgp.Predictor(guide, params),
    ]
    for call in calls:
        call(X[:20])  # all of them
        with pytest.raises(ValueError, match="minibatch of plate 'data'"):
            call(X[:30])
    fitted = sgp.fit(drawn, sgp.SVGP(6), (X, Y), **QUIET)
    assert "minibatches that the model makes, of 20 rows" in repr(fitted)
    verdict = fitted.check()
    family, others = (verdict.causes[name] for name in ("family", "other parameters"))
    assert np.isnan(family.nats) and "minibatch" in family.told
    assert "not known to have converged" in verdict.summary
    assert "train longer" not in others.mend


@pytest.mark.slow
def test_a_guide_that_was_set_up_with_all_rows_tells_of_a_batch_too(tmp_path):
    """As one from a file, which two rows are an example for."""

    def model(X, y=None, batch=20):
        size = len(X) if batch is None else min(batch, len(X))
        data = numpyro.plate("data", len(X), subsample_size=size)
        with data as i:
            X, y = X[i], None if y is None else y[i]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
        with data:
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(6), (X, Y), **QUIET)
    fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", model)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(6))
    guide.setup(X, Y, batch=None)
    for call in (
        loaded.posterior,
        loaded.predict,
        loaded.predictor(),
        lambda X: guide.posterior(fitted.params, X),
        lambda X: guide.sample_posterior(jax.random.key(0), fitted.params, X),
    ):
        with pytest.raises(ValueError, match="minibatch of plate 'data'"):
            call(X)
    assert guide.posterior(fitted.params, X, batch=None)["f"].mean.shape == (60,)


@pytest.mark.slow
def test_f_of_all_rows_is_known_where_a_plate_draws_responses():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
        with numpyro.plate("data", len(X), subsample_size=20) as i:
            numpyro.sample("y", dist.Normal(f[i], 0.2), obs=None if y is None else y[i])

    guide = sgp.AutoSparseGP(model, sgp.SVGP(6))
    guide.setup(X, Y)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).params
    assert guide.posterior(params, X)["f"].mean.shape == (60,)
    with pytest.raises(ValueError, match="minibatch of plate 'data'"):
        sgp.predict(guide, params, X)


@pytest.mark.slow
def test_a_fit_from_a_file_goes_on_in_batches(tmp_path):
    fitted = sgp.fit(model, sgp.SVGP(6), (X, Y), batch_size=20, **QUIET)
    fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", model)
    onwards = sgp.fit(model, loaded, (X, Y), batch_size=20, **QUIET)
    assert np.isfinite(onwards.bound)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, slow({"covariance": "pseudo_data"})])
def test_what_has_a_part_for_each_row_goes_on_with_these_rows_alone(options, tmp_path):
    first = sgp.fit(model, sgp.VGP(**options), (X[:12], Y[:12]), **QUIET)
    first.save(tmp_path / "fit.npz")
    for fitted in (first, sgp.load(tmp_path / "fit.npz", model)):
        onwards = sgp.fit(model, fitted, (X[:12], Y[:12]), **QUIET)
        assert onwards.bound > first.bound - 1e-6
        for rows in (slice(2, 14), slice(0, 15)):
            with pytest.raises(ValueError, match="part for each row.*other inputs"):
                sgp.fit(model, fitted, (X[rows], Y[rows]), **QUIET)


@pytest.mark.slow
def test_inputs_that_a_latent_scales_are_the_same_rows():
    def scaled(X, y=None):
        size = numpyro.sample("size", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X / size))
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    fitted = sgp.fit(scaled, sgp.VGP(), (X[:12], Y[:12]), **QUIET)
    sgp.fit(scaled, fitted, (X[:12], Y[:12]), **QUIET)
    with pytest.raises(ValueError, match="part for each row.*other inputs"):
        sgp.fit(scaled, fitted, (X[:9], Y[:9]), **QUIET)


@pytest.mark.slow
def test_losses_that_are_not_believed_show_nothing(recwarn):
    """Of three steps none may be: NumPy warned of the mean of an empty slice."""

    def steep(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1e-4), obs=y)

    options = {"steps": 3, "batch_size": 10, "progress_bar": False}
    sgp.fit(steep, sgp.SVGP(6), (X, 1e3 * jnp.asarray(Y)), **options)
    assert not [w for w in recwarn if "empty slice" in str(w.message)]

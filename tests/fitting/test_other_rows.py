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
    family = fitted.check().causes["family"]
    assert np.isnan(family.nats) and "minibatch" in family.told


def test_a_fit_from_a_file_goes_on_in_batches(tmp_path):
    fitted = sgp.fit(model, sgp.SVGP(6), (X, Y), batch_size=20, **QUIET)
    fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", model)
    onwards = sgp.fit(model, loaded, (X, Y), batch_size=20, **QUIET)
    assert np.isfinite(onwards.bound)


@pytest.mark.parametrize("options", [{}, {"covariance": "pseudo_data"}])
def test_what_has_a_part_for_each_row_goes_on_with_these_rows_alone(options):
    fitted = sgp.fit(model, sgp.VGP(**options), (X[:12], Y[:12]), **QUIET)
    sgp.fit(model, fitted, (X[:12], Y[:12]), **QUIET)
    for rows in (slice(2, 14), slice(0, 15)):
        with pytest.raises(ValueError, match="part for each row.*other inputs"):
            sgp.fit(model, fitted, (X[rows], Y[rows]), **QUIET)


def test_losses_that_are_not_believed_show_nothing(recwarn):
    """Of three steps none may be: NumPy warned of the mean of an empty slice."""

    def steep(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1e-4), obs=y)

    options = {"steps": 3, "batch_size": 10, "progress_bar": False}
    sgp.fit(steep, sgp.SVGP(6), (X, 1e3 * jnp.asarray(Y)), **options)
    assert not [w for w in recwarn if "empty slice" in str(w.message)]

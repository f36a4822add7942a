"""Keyword arguments of a fit that predictions remember, and those that they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI

import numpyro_sgp as sgp

N = 12
X = np.linspace(-2.0, 2.0, N)[:, None]
Y = np.sin(2.0 * X[:, 0])


def untrained(model, args, **kwargs):
    """A fit of starting values, but for q(u)."""
    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    svi = SVI(model, guide, optax.sgd(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))
    params["f_auto_qu_mu"] = params["f_auto_qu_mu"] + 0.5
    return sgp.Fitted(guide, params, args, kwargs)


def function(X, scale=1.0):
    return numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, scale), X))


def seen(f, y, family=dist.Normal):
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", family(f, 0.3), obs=y)


def flagged(
    X, y=None, *, scale=1.0, link=None, level=0.0, shifts=(0.0, 0.0), family=dist.Normal
):
    f = function(X, 0.5 * scale)
    seen((link or (lambda f: f))(f) + level + sum(shifts), y, family)


OPTIONS = {
    "scale": 2.0,
    "link": jnp.exp,
    "level": 7.0,
    "shifts": (1.0, 2.0),
    "family": dist.Laplace,  # whose shape is a method
}


def test_options_of_the_fit_are_those_of_predictions():
    """Flags and numbers were the model's own again where arguments were given."""
    fitted = untrained(flagged, (X, Y), **OPTIONS)
    known, score = fitted.predict()["y"].mean, fitted.log_score()["y"].mean
    assert_allclose(fitted.predict(X)["y"].mean, known, rtol=1e-10)
    assert_allclose(fitted.predict(X[:3])["y"].mean, known[:3], rtol=1e-10)
    assert_allclose(fitted.predict(X, level=9.0)["y"].mean, known + 2.0)
    assert_allclose(fitted.log_score(X, Y)["y"].mean, score, rtol=1e-10)
    assert not np.allclose(fitted.predict(X, link=jnp.sin)["y"].mean, known)


@pytest.mark.slow
def test_options_are_those_of_draws_and_in_files(tmp_path):
    fitted = untrained(flagged, (X, Y), **OPTIONS)
    known = fitted.predict()["y"].mean
    drawn = fitted.to_arviz(X, Y, num_samples=2)["posterior_predictive"]["y"]
    assert float(drawn.mean()) > 9.0
    del fitted.kwargs["link"], fitted.kwargs["family"]  # neither is in a file
    fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", flagged)
    assert_array_equal(loaded.predict(X)["y"].mean, fitted.predict(X)["y"].mean)
    assert_allclose(loaded.predict(X, link=jnp.exp, family=dist.Laplace)["y"].mean, known)


def counted(X, y=None, num_rows=None):
    """As examples have it, for batches."""
    f, num_rows = function(X), num_rows or X.shape[0]
    with numpyro.plate("data", num_rows, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def batched(X, y=None, size=None):
    data = numpyro.plate("data", X.shape[0], subsample_size=size)
    with data as rows:
        X, y = X[rows], None if y is None else y[rows]
    f = function(X)
    with data:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.parametrize(
    "model, options", [(counted, {"num_rows": N}), (batched, {"size": 5})]
)
def test_sizes_of_the_data_are_no_options(model, options):
    fitted = untrained(model, (X, Y), **options)
    more = np.concatenate([X, X + 4.0])
    assert fitted.predict(more)["y"].mean.shape == (2 * N,)
    assert fitted.log_score(X[:3], Y[:3])["y"].rows.shape == (3,)


def test_data_by_keyword_are_no_options():
    def model(X, y=None, total=None):
        f = function(X)
        numpyro.sample("total", dist.Normal(f.sum(), 0.3), obs=total)
        seen(f, y)

    fitted = untrained(model, (X,), y=Y, total=3.0)
    with pytest.raises(ValueError, match="no observ"):
        fitted.log_score(X)
    assert fitted.predict(X[:3])["y"].mean.shape == (3,)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "option",
    [[2.5], np.array([2.5]), ["name", 2.5], {"a": 1.0, "b": np.array([2.5])}],
    ids=["list", "array", "names", "dict"],
)
def test_arrays_of_another_size_are_options(option):
    def model(X, y=None, shifts=(0.0,)):
        parts = shifts.values() if isinstance(shifts, dict) else shifts
        seen(function(X) + sum(np.sum(s) for s in parts if not isinstance(s, str)), y)

    fitted = untrained(model, (X, Y), shifts=option)
    known_shift = 3.5 if isinstance(option, dict) else 2.5
    known = fitted.predict()["y"].mean
    assert_allclose(fitted.predict(X, shifts=())["y"].mean, known - known_shift)
    assert_allclose(fitted.predict(X[:5])["y"].mean, known[:5], rtol=1e-10)


def test_arrays_with_rows_on_another_axis_are_data():
    def model(X, y=None, index=None, shifts=None):
        f = function(X)
        f = f if shifts is None else f + shifts[0]
        f = f if index is None else f[index]
        numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)

    index = np.array([2, 4, 6])
    fitted = untrained(model, (X,), y=Y[index], index=index, shifts=np.ones((2, N)))
    found = fitted.posterior(X[:5])["f"]
    assert found.mean.shape == (5,)
    drawn = fitted.sample(jax.random.key(0), X[:5], sample_shape=(2,))
    assert drawn["f"].shape == (2, 5)


def test_keys_and_texts_of_numpy_are_options():
    def model(X, y=None, *, key=None, name="one"):
        shift = 0.0 if key is None else jax.random.normal(key)
        seen(function(X) + shift + 3.0 * (str(name) == "two"), y)

    fitted = untrained(model, (X, Y), key=jax.random.key(1), name=np.array("two"))
    known = fitted.predict()["y"].mean
    assert_allclose(fitted.predict(X)["y"].mean, known, rtol=1e-10)
    assert_allclose(fitted.predict(X, name="one")["y"].mean, known - 3.0)


def test_names_that_a_method_has_are_its_own():
    def model(X, y=None, *, quantiles=0.0, level=0.0):
        seen(function(X) + quantiles + level, y)

    fitted = untrained(model, (X, Y), quantiles=5.0, level=5.0)
    found = fitted.predict(X, quantiles=(0.5,))
    assert found["y"].quantiles.shape == (1, N)
    assert_allclose(found["y"].mean, found["f"].mean + 5.0)

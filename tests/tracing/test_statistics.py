"""Inputs that a model makes of all rows are told of; those made row by row are not."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.tracing.statistics import made_of_all_rows

X = np.random.default_rng(0).normal(size=(12, 3))
Y = X[:, 0]


def using(inputs):
    def model(X, y=None):
        kernel = sgp.kernels.RBF(1.0, 1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, inputs(X)))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return model


STATISTICS = {
    "standardised": lambda X: (X - X.mean(0)) / X.std(0),
    "from the first row": lambda X: X - X[0],
    "from the last row": lambda X: X - X[-1],
    "by the largest": lambda X: X / jnp.abs(X).max(0),
    "median": lambda X: X - jnp.median(X, 0),
    "times of steps": lambda X: jnp.cumsum(X, 0),
}
BY_ROW = {
    "as they are": lambda X: X,
    "functions": lambda X: jnp.log1p(X**2),
    "columns": lambda X: X[:, :2],
    "some columns": lambda X: X[:, jnp.array([0, 2])],
    "one column": lambda X: X[:, 1][:, None],
    "stacked": lambda X: jnp.stack([X[:, 0], jnp.sin(X[:, 1])], -1),
    "products": lambda X: X @ np.arange(6.0).reshape(3, 2),
    "unit length": lambda X: X / jnp.linalg.norm(X, axis=1, keepdims=True),
    "of the row before": lambda X: jnp.concatenate([X[:1], X[:-1]]),
    "numbers of rows": lambda X: jnp.arange(1.0 * len(X))[:, None],
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_seen(name):
    assert made_of_all_rows(using(STATISTICS[name]), (X, Y), {}, ["f"]) == ["f"]


@pytest.mark.parametrize("name", BY_ROW)
def test_what_goes_by_row_is_not_told(name):
    assert made_of_all_rows(using(BY_ROW[name]), (X, Y), {}, ["f"]) == []


def test_the_site_that_has_them_is_named():
    def model(X, y=None):
        kernel, centred = sgp.kernels.RBF(1.0, 1.0), X - X.mean(0)
        plain = numpyro.sample("plain", sgp.GaussianProcess(kernel, X))
        other = numpyro.sample("other", sgp.GaussianProcess(kernel, centred))
        numpyro.sample("y", dist.Normal(plain + other, 0.3), obs=y)

    assert made_of_all_rows(model, (X, Y), {}, ["plain", "other"]) == ["other"]


def test_a_guide_warns_at_its_set_up():
    guide = sgp.AutoSparseGP(using(STATISTICS["standardised"]), sgp.SVGP(3))
    with pytest.warns(UserWarning, match="GP site 'f' .* statistic of the rows"):
        guide.setup(X, Y)


def test_prior_scales_of_the_data_are_no_inputs():
    def model(X, y=None):
        ell = numpyro.sample("ell", dist.LogNormal(jnp.log(X.std()), 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, ell), X))
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, Y)  # warnings are errors here

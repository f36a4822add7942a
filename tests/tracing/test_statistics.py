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
    "by the smallest": lambda X: X - X.min(0),
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
    """Also where another one has rows of its own."""

    def model(X, weeks, week, y=None):
        kernel, centred = sgp.kernels.RBF(1.0, 1.0), X - X.mean(0)
        plain = numpyro.sample("plain", sgp.GaussianProcess(kernel, weeks))
        other = numpyro.sample("other", sgp.GaussianProcess(kernel, centred))
        numpyro.sample("y", dist.Normal(plain[week] + other, 0.3), obs=y)

    data = X, np.arange(5.0)[:, None], np.arange(12) % 5, Y
    assert made_of_all_rows(model, data, {}, ["plain", "other"]) == ["other"]


@pytest.mark.parametrize("number", [40, 300, 100_000])
def test_statistics_of_many_rows_are_seen(number):
    X = np.random.default_rng(1).uniform(size=(number, 1))
    for inputs in (STATISTICS["standardised"], STATISTICS["by the smallest"]):
        assert made_of_all_rows(using(inputs), (X, X[:, 0]), {}, ["f"]) == ["f"]


def test_whole_numbers_are_looked_at():
    years = np.arange(1950, 2000)
    model = using(lambda years: ((years - years[0]) / 10.0)[:, None])
    assert made_of_all_rows(model, (years, np.zeros(50)), {}, ["f"]) == ["f"]


LARGE = np.random.default_rng(1).normal(size=(300, 1))


def test_plates_may_have_a_size_of_their_own():
    """So that the model does not run with some of the rows."""

    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X - X.mean(0)))
        with numpyro.plate("data", 300):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    assert made_of_all_rows(model, (LARGE, LARGE[:, 0]), {}, ["f"]) == ["f"]


def test_plates_may_draw_rows():
    def model(X, y):
        rows = numpyro.plate("data", X.shape[0], subsample_size=20)
        with rows as i:
            centred, y = (X - X.mean(0))[i], y[i]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), centred))
        with rows:
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    assert made_of_all_rows(model, (LARGE, LARGE[:, 0]), {}, ["f"]) == ["f"]


def test_statistics_of_an_argument_with_other_rows_stay_what_they_are():
    def model(X, X_train, y=None):
        f = using(lambda X: (X - X_train.mean(0)) / X_train.std(0))
        return f(X, y)

    assert made_of_all_rows(model, (X, X.copy(), Y), {}, ["f"]) == []


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

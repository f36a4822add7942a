"""Inputs whose rows single precision does not set apart."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp

SECONDS = (1.7e9 + 20.0 * np.arange(60))[:, None]  # since 1970


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 100.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


Y = np.sin(np.arange(60.0) / 4.0)


@pytest.fixture
def single_precision():
    with jax.enable_x64(False):
        yield


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize(
    "run",
    [
        lambda X: sgp.GaussianProcess(sgp.kernels.RBF(), X),
        lambda X: sgp.AutoSparseGP(model, sgp.SVGP(4)).setup(X, Y),
        lambda X: sgp.AutoSparseGP(model, sgp.SVGP(4)).setup(X.astype(int), Y),
    ],
    ids=["distribution", "guide", "whole numbers"],
)
def test_rows_that_rounding_makes_one_are_told_of(run):
    with pytest.warns(UserWarning, match=r"X.* is rounded by up to .* Subtract an offset"):
        run(SECONDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(SECONDS - SECONDS[0])


@pytest.mark.usefixtures("single_precision")
def test_whole_numbers_that_are_exact_are_told_of_beside_an_offset():
    """What is computed with them is rounded: bounds were above the evidence."""
    X = 1e7 + np.arange(60.0)[:, None]  # whose half unit in the last place is 0.6
    with pytest.warns(UserWarning, match="rounded by up to"):
        sgp.GaussianProcess(sgp.kernels.RBF(), X)


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize(
    "X",
    [
        1990.0 + np.arange(60)[:, None] / 12,
        5e5 + np.linspace(0.0, 1e3, 60)[:, None],  # metres of a grid
        np.full((60, 1), 1.7e9),
        jnp.asarray(np.linspace(0.0, 1.0, 60)[:, None], jnp.float32),
    ],
    ids=["years", "metres", "constant", "JAX"],
)
def test_digits_that_are_enough_are_not_spoken_of(X):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sgp.GaussianProcess(sgp.kernels.RBF(), X)


def test_double_precision_keeps_them():
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        sgp.GaussianProcess(sgp.kernels.RBF(), SECONDS)

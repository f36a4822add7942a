"""The example of deep GPs: its functions with a few steps, and (slow) what it shows."""

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.testing import assert_allclose

from tests.helpers import load_example


@pytest.fixture(scope="module")
def deep_gp():
    return load_example("deep_gp")


@pytest.mark.slow
def test_both_run_with_a_few_steps(deep_gp):
    args = deep_gp.parse(["--layers", "2", "--steps", "20", "--num-inducing", "4"])
    axes = Figure().subplots(2, 1)
    fits = deep_gp.run_regression(args, axes[:1])
    assert np.isfinite([fits[2]["ELBO"], fits[2]["LL"]]).all()
    mean, variance = deep_gp.predictive(*fits[2]["fit"], deep_gp.stripes(3, 0)[0][:, :1], 2)
    assert mean.shape == (2, 3) and np.all(variance > 0)


@pytest.mark.slow
def test_the_data_are_as_said(deep_gp):
    X, y = deep_gp.rough_data(1000, 3)
    assert_allclose(y - deep_gp.jump(np.asarray(X[:, 0])), 0.0, atol=0.3)
    X, y = deep_gp.stripes(1000, 3)
    left = X[:, 0] < 0
    assert np.array_equal(y[left], X[left, 1] > 0)
    # Five standard errors of a share of about 500 rows: the two agree on half the right.
    assert abs(np.mean(y[~left] == (X[~left, 1] > 0)) - 0.5) < 5 * 0.5 / 480**0.5


@pytest.mark.slow
def test_two_layers_are_better_than_one(deep_gp, tmp_path):
    args = ["--layers", "1", "2", "--steps", "2000", "--output", str(tmp_path)]
    fits = deep_gp.main(deep_gp.parse(args))
    for found in fits.values():
        assert found[2]["LL"] > found[1]["LL"]
        assert found[2]["ELBO"] > found[1]["ELBO"]
    assert (tmp_path / "deep_gp.png").exists()
    jax.clear_caches()

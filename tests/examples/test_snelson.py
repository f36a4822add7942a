"""The Snelson example: its functions with a few steps, and (slow) its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpyro.infer.util import log_density

import numpyro_sgp as sgp
from tests.helpers import load_example

DATA = sgp.datasets.snelson_subset()


@pytest.fixture(scope="module")
def snelson():
    return load_example("snelson")


@pytest.fixture(scope="module")
def exact(snelson):
    return snelson.fit_exact(*DATA, progress=False)


def test_exact_gp_reaches_the_known_evidence_and_optimum(exact):
    assert_allclose(exact.elbo, -41.655, atol=1e-3)
    optimum = [exact.noise, exact.lengthscale, exact.variance]
    assert_allclose(optimum, [0.0896, 0.609, 0.777], atol=1e-3)


def test_exact_gp_predicts_by_the_textbook_formula(exact):
    X, y, X_test = map(np.asarray, DATA)

    def kernel(A, B):
        return exact.variance * np.exp(-0.5 * ((A - B.T) / exact.lengthscale) ** 2)

    noisy = kernel(X, X) + exact.noise * np.eye(100)
    cross = kernel(X_test, X)
    assert_allclose(exact.mean, cross @ np.linalg.solve(noisy, y), atol=1e-6)
    variance = exact.variance - np.sum(cross * np.linalg.solve(noisy, cross.T).T, -1)
    assert_allclose(exact.sd**2, variance, atol=1e-6)


@pytest.mark.slow
def test_sparse_and_exact_model_are_one_model(snelson):
    X, y, _ = DATA
    f = jnp.sin(X[:, 0])
    joint, _ = log_density(snelson.model, (X, y), {}, {"f": f})
    prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X).log_prob(f)
    residual = np.asarray(y - f)
    likelihood = -0.5 * np.sum(residual**2 / 0.1 + np.log(2 * np.pi * 0.1))
    assert_allclose(joint, prior + likelihood, rtol=1e-10)
    evidence, _ = log_density(snelson.exact_model, (X, y), {}, {})
    covariance = np.exp(-0.5 * np.asarray(X - X.T) ** 2) + 0.1 * np.eye(100)
    fit = y @ np.linalg.solve(covariance, y)
    log_det = np.linalg.slogdet(covariance)[1]
    assert_allclose(evidence, -0.5 * (fit + log_det + 100 * np.log(2 * np.pi)), rtol=1e-9)


@pytest.mark.parametrize("name", ["svgp5", "odvgp", "solvegp", "svgp10"])
def test_approximations_have_the_points_of_their_panel(snelson, name):
    method = snelson.METHODS[name]
    points = snelson.approximation(name, DATA.X, "greedy").num_points
    assert points == method.num_inducing + method.num_orthogonal


@pytest.mark.slow
def test_a_few_steps_of_lbfgs_raise_a_bound_below_the_evidence(snelson, exact):
    short = snelson.FULL_BATCH._replace(steps=8)
    fitted = snelson.fit("solvegp", *DATA, protocol=short, progress=False)
    assert -889.0 < fitted.elbo < exact.elbo  # -889.004 is the bound at the prior
    assert fitted.Z.shape == fitted.O.shape == (5,)
    assert fitted.mean.shape == fitted.sd.shape == (301,)
    assert np.isfinite(fitted.mean).all() and (fitted.sd > 0).all()
    figure = snelson.draw([fitted, fitted, fitted, fitted], exact, *DATA)
    titles = [axis.get_title() for axis in figure.axes]
    assert len(titles) == 4 and all("M = 5 + 5" in title for title in titles)
    line = snelson.table([("L-BFGS", fitted)], exact).splitlines()[-1]
    assert f"{fitted.elbo:.3f}" in line and f"{snelson.rmse(fitted, exact):.4f}" in line


@pytest.mark.slow
def test_command_line_with_minibatches(snelson, tmp_path, capsys):
    options = ["--method", "svgp5", "--optimiser", "adam", "--batch-size", "20"]
    options += ["--steps", "5", "--output", str(tmp_path / "new"), "--no-progress"]
    snelson.main(snelson.parse(options))
    assert (tmp_path / "new" / "snelson.png").stat().st_size > 10_000
    lines = capsys.readouterr().out.splitlines()
    (exact,) = [line.split() for line in lines if line.startswith("exact GP  ")]
    assert "-41.655" in exact
    (svgp,) = [line.split() for line in lines if line.startswith("SVGP")]
    assert svgp[1:4] == ["Adam", "5", "-"] and float(svgp[4]) > -900.0
    assert jax.config.jax_enable_x64


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch-size", "20"], "--batch-size needs --optimiser adam"),
        (["--steps", "0"], "--steps must be positive"),
        (["--optimiser", "adam", "--batch-size", "-1"], "--batch-size must be positive"),
        (["--method", "svgp7"], "invalid choice"),
    ],
)
def test_command_line_refuses(snelson, options, message, capsys):
    with pytest.raises(SystemExit):
        snelson.parse(options)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svgp5", "solvegp", "svgp10", "odvgp"])
def test_default_fit_reaches_the_optimum(snelson, exact, name):
    fitted = snelson.fit(name, *DATA, progress=False)
    assert fitted.elbo < exact.elbo
    # No bound was known for ODVGP: -58.49 is where this fit ended from several starts.
    target = fitted.target or -58.49
    assert_allclose(fitted.elbo, target, atol=0.05)

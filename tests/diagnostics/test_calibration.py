"""``calibrate``: ranks of exact and of wrong guides, the tests of them, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.calibration import VSBCResult, vsbc_diagnostic
from numpyro.infer.svi import SVIRunResult
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import Calibration
from numpyro_sgp.diagnostics.calibration import _symmetry_p_value, calibrate

N, NOISE = 4, 0.6
X = jnp.linspace(-1.5, 1.5, N)[:, None]
y = jnp.zeros(N)
SMALL = dict(num_simulations=2, num_svi_steps=2, num_samples=5)


def make_model(variance=1.0, mean=0.0):
    def model(X, y=None, batch_size=None):
        kernel = sgp.kernels.RBF(variance, 0.8)
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X_batch, y_batch = X[idx], None if y is None else y[idx]
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X_batch, mean))
        with data:
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y_batch)

    return model


def make_svi(model, guide_model=None, base_guide=None):
    """NumPyro's ELBO where the guide is of another model, which our own refuses."""
    options = {} if base_guide is None else {"base_guide": base_guide}
    approximation = sgp.SVGP(N, train_inducing=False)
    guide = sgp.AutoSparseGP(guide_model or model, approximation, **options)
    loss = TraceMeanField_ELBO() if guide_model else sgp.TraceGP_ELBO()
    return SVI(model, guide, optax.adam(0.1), loss)


def run(svi, **options):
    options = {"num_simulations": 60, "num_svi_steps": 200, "num_samples": 100, **options}
    return calibrate(svi, X, y, rng_key=jax.random.key(1), **options)


@pytest.fixture(scope="module")
def exact():
    svi = make_svi(make_model())
    return svi, run(svi)


def test_exact_guide_is_calibrated(exact):
    _, calibration = exact
    # The adjusted p value of a calibrated guide is below 1e-3 with probability 1e-3.
    assert calibration.p_value > 1e-3
    assert calibration.num_simulations == 60
    row = calibration.summary().loc["f"]
    assert row["components"] == N
    # Of means of 60 uniform variables the largest of four: 5 standard errors.
    assert abs(row["bias"]) < 5 / np.sqrt(12 * 60)
    assert "60 simulations, p = " in str(calibration)


@pytest.mark.slow
def test_numpyros_own_call_gives_the_same_ranks(exact):
    svi, calibration = exact
    guide = make_svi(svi.model).guide  # set up by it, with data of its own
    result = vsbc_diagnostic(
        jax.random.PRNGKey(1),
        svi.model,
        guide,
        optax.adam(0.1),
        sgp.TraceGP_ELBO(),
        X,
        None,
        observed_sites=["y"],
        num_simulations=60,
        num_svi_steps=200,
        num_samples=100,
    )
    assert_array_equal(result.ranks["f"], calibration.result.ranks["f"])


@pytest.mark.slow
def test_guide_of_a_smaller_variance_is_too_narrow():
    calibration = run(make_svi(make_model(), make_model(variance=0.05)))
    row = calibration.summary().loc["f"]
    assert calibration.p_value < 1e-3 and row["spread"] > 1.2
    assert "too narrow" in calibration.verdict


@pytest.mark.slow
def test_guide_of_a_higher_mean_is_too_high():
    calibration = run(make_svi(make_model(), make_model(mean=3.0)))
    row = calibration.summary().loc["f"]
    assert calibration.p_value < 1e-3 and row["bias"] < -0.2
    assert "f: too high" in calibration.verdict


@pytest.mark.slow
def test_the_test_of_symmetry_is_exact_and_numpyros_is_not():
    n, rng = 25, np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(4000, n))
    p = np.array([_symmetry_p_value(row) for row in x])
    numpyros = stats.ks_2samp(x, -x, axis=1, method="asymp").pvalue
    for level in (0.02, 0.1):
        reached = p[p <= level].max()  # p values are discrete
        se = np.sqrt(reached * (1 - reached) / len(x))
        assert abs(np.mean(p <= level) - reached) < 4 * se
    assert np.mean(numpyros <= 0.05) > 0.07
    # Two steps the same way have probability 1/2; a tie of opposite signs cancels.
    assert _symmetry_p_value(np.array([1.0, 2.0])) == 0.5
    assert _symmetry_p_value(np.array([-1.0, 1.0])) == 1.0


def of_ranks(points=(), num_samples=100, **ranks):
    ranks = {name: np.asarray(value) for name, value in ranks.items()}
    probabilities = {name: value / num_samples for name, value in ranks.items()}
    result = VSBCResult(probabilities, {}, {}, ranks, tuple(sorted(ranks)))
    return Calibration(result, num_samples, 10, tuple(points))


def test_summary_of_given_ranks():
    rng = np.random.default_rng(0)
    good = rng.integers(0, 101, size=(200, 3))
    calibration = of_ranks(
        good=good,
        narrow=np.where(good < 50, good // 4, 100 - (100 - good) // 4),
        wide=25 + good // 2,
        low=100 - good // 2,
        high=good // 2,
        point=np.where(good < 50, 0, 100),
        points=["point"],
    )
    table = calibration.summary()
    words = {
        "good": "no sign of miscalibration",
        "narrow": "too narrow",
        "wide": "too wide",
        "low": "too low",
        "high": "too high",
        "point": "point estimate, not tested",
    }
    assert table["verdict"].to_dict() == words
    assert_allclose(table.loc["low", "bias"], 0.25, atol=0.05)
    assert_allclose(table.loc["wide", "spread"], 0.5, atol=0.05)
    assert np.isnan(table.loc["point", "p_value"])
    assert calibration.p_value < 1e-10
    assert "good" not in calibration.verdict and "point" not in calibration.verdict
    assert of_ranks(good=good).p_value == table.loc["good", "p_value"]
    only = of_ranks(point=good, points=["point"])
    assert np.isnan(only.p_value) and only.verdict == "no site was tested"


@pytest.mark.slow
def test_points_are_told_from_draws_and_counts_from_other_data():
    def model(inputs, counts=None, scale=None):
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), inputs))
        with numpyro.plate("data", inputs.shape[0]):
            numpyro.sample("obs", dist.Poisson(jnp.exp(scale * f + shift)), obs=counts)

    counts, scale = jnp.array([1, 0, 2, 1]), jnp.array(0.5)
    point = calibrate(make_svi(model), X, counts, scale=scale, **SMALL)
    assert point.points == ("shift",)
    drawn = make_svi(model, base_guide=AutoNormal)
    drawn = calibrate(drawn, X, counts, scale=scale, **SMALL)
    assert drawn.points == ()
    assert drawn.result.ranks["shift"].shape == (2,)


@pytest.mark.slow
def test_to_arviz_and_compare_report_it(exact):
    svi, calibration = exact
    state = svi.init(jax.random.key(0), X, y)
    result = SVIRunResult(svi.get_params(state), state, np.array([2.0, 1.0]))
    wrong = of_ranks(f=np.zeros((30, N), int))
    fits = {
        name: sgp.to_arviz(
            svi, X, y, result=result, num_samples=200, khat=False, calibration=given
        )
        for name, given in (("good", calibration), ("wrong", wrong), ("none", None))
    }
    comparison = sgp.compare(fits)
    table = comparison.table["sbc_p"]
    assert table["good"] == calibration.p_value and np.isnan(table["none"])
    assert "wrong: not calibrated in 30 simulations (f: too high" in str(comparison)
    assert "good: not" not in str(comparison)


@pytest.mark.slow
def test_errors():
    model = make_model()
    svi = make_svi(model)
    with pytest.raises(TypeError, match=r"svi must be a numpyro\.infer\.SVI.* function"):
        calibrate(model, X, y)
    with pytest.raises(ValueError, match=r"minibatch of plate 'data' \(2 of 4 rows\)"):
        calibrate(svi, X, y, batch_size=2, **SMALL)

    def factor(X, y=None):
        model(X, y)
        numpyro.factor("penalty", 1.0)

    with pytest.raises(ValueError, match=r"'penalty' is a numpyro\.factor"):
        calibrate(make_svi(factor), X, y, **SMALL)

    def constant(X, y=None):
        model(X, y)
        numpyro.sample("z", dist.Normal(0.0, 1.0), obs=0.5)

    with pytest.raises(ValueError, match=r"data of the sites \['z'\].*'X', 'y'"):
        calibrate(make_svi(constant), X, y, **SMALL)

    def other(X, data=None):
        model(X, data)

    with pytest.raises(ValueError, match="no observed site. Pass the data too"):
        calibrate(make_svi(other), X, **SMALL)

    def container(X, data):
        model(X, data["y"])

    svi = make_svi(container)
    with pytest.raises(ValueError, match="or give a function simulated_data_to_args"):
        calibrate(svi, X, {"y": y}, **SMALL)
    put = lambda sim, X, data: ((X, sim), {})  # noqa: E731
    found = calibrate(svi, X, {"y": y}, simulated_data_to_args=put, **SMALL)
    assert found.result.ranks["f"].shape == (2, N)

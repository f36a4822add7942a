"""The coal-mining example runs through, at a size where nothing converges."""

import jax.numpy as jnp
import numpy as np
import numpyro
import pytest

import numpyro_sgp as sgp
from tests.helpers import load_example


@pytest.fixture(scope="module")
def coal_mining():
    return load_example("coal_mining")


TINY = "--num-bins 40 --sparsity 0.1 --num-steps 20 --quiet --num-draws 30"
TINY += " --num-warmup 5 --num-samples 20 --num-slice-steps 40 --output"


@pytest.mark.slow
def test_example_prints_its_tables_and_saves_its_figures(coal_mining, tmp_path, capsys):
    options = [*TINY.split(), str(tmp_path), "--methods", "natural", "mog1"]
    coal_mining.main(coal_mining.parse_args(options))
    printed = capsys.readouterr().out
    for text in [
        "NUTS (reference)",
        "MoG1 4",
        "SVGP 4, natural",
        "mean sd ratio",
        "NUTS = 1",
    ]:
        assert text in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "coal_mining.png",
        "coal_mining_comparison.png",
    ]


@pytest.mark.slow
def test_example_runs_by_all_methods(coal_mining, tmp_path, capsys):
    coal_mining.main(coal_mining.parse_args([*TINY.split(), str(tmp_path), "--all"]))
    printed = capsys.readouterr().out
    for text in ["HMC = 1", "ESS", "sparse NUTS 4", "SVGP 4", "MoG2 4", "MoG1 4, white"]:
        assert text in printed
    assert "ELBO of black box 4" in printed


@pytest.mark.slow
def test_example_learns_hyperparameters(coal_mining, tmp_path, capsys):
    options = [*TINY.split(), str(tmp_path), "--learn", "--learn-bins", "20"]
    coal_mining.main(coal_mining.parse_args(options))
    assert "SVGP 2, variational" in capsys.readouterr().out
    assert (tmp_path / "coal_mining_learned.png").exists()


def test_nuts_is_always_run(coal_mining):
    assert coal_mining.parse_args(["--methods", "svgp"]).methods == ["nuts", "svgp"]
    assert coal_mining.parse_args(["--all"]).methods == list(coal_mining.METHODS)


class Mixture:
    """Marginals of two components at two bins."""

    log_weights = np.log([0.3, 0.7])
    mean = np.array([[0.1, 1.0], [0.6, 0.2]])
    variance = np.array([[0.2, 0.05], [0.1, 0.3]])

    def marginals(self, k):
        return self.mean[k], self.variance[k]


def test_closed_form_intensities_are_those_of_the_draws(coal_mining):
    q, rng = Mixture(), np.random.default_rng(0)
    moments = coal_mining.intensity_moments({"q": None}, {"q": q}, 191)
    k = rng.choice(2, size=400_000, p=np.exp(q.log_weights))
    f = q.mean[k] + np.sqrt(q.variance[k]) * rng.normal(size=(400_000, 2))
    draws = np.exp(f)
    # Standard errors are below 0.2 % of each moment; five of them are 1 %.
    np.testing.assert_allclose(moments["q"][0], draws.mean(axis=0), rtol=0.01)
    np.testing.assert_allclose(moments["q"][1], draws.std(axis=0), rtol=0.01)


def test_the_numpy_likelihood_is_the_one_of_the_model(coal_mining):
    f, y = jnp.array([0.3, -1.0, 2.0]), jnp.array([0, 2, 1])
    (values,) = numpyro.infer.log_likelihood(
        coal_mining.model, {"f": f[None]}, jnp.arange(3.0)[:, None], y
    ).values()
    found = coal_mining.poisson_log_prob(np.asarray(y), np.asarray(f), 3)
    np.testing.assert_allclose(found, values[0], rtol=1e-12)


@pytest.mark.slow
def test_control_variate_divides_the_variance_by_ten_at_the_optimum(coal_mining):
    coal = sgp.datasets.coal_mining(81)
    X = jnp.asarray(coal.bin_centre_day, float)[:, None]
    factors = coal_mining.control_variate_factors(X, coal.count, 10)
    # Measured: 40.3 and 17.0, with standard errors of 2.8 and 0.8.
    for name, (factor, error) in factors.items():
        assert factor - 4 * error > 10, (name, factor, error)

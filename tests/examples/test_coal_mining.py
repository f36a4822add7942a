"""The coal-mining example runs through, at a size where nothing converges."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def coal_mining():
    spec = importlib.util.spec_from_file_location(
        "coal_mining", EXAMPLES / "coal_mining.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = "--num-bins 40 --sparsity 0.1 --num-steps 20 --quiet --num-draws 30"
TINY += " --num-warmup 5 --num-samples 20 --output"


def test_example_prints_its_tables_and_saves_its_figures(coal_mining, tmp_path, capsys):
    coal_mining.main(coal_mining.parse_args([*TINY.split(), str(tmp_path)]))
    printed = capsys.readouterr().out
    for text in ["NUTS (reference)", "SVGP 4", "SOLVE-GP 2+2", "mean sd ratio"]:
        assert text in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "coal_mining.png",
        "coal_mining_comparison.png",
    ]


@pytest.mark.slow
def test_example_learns_hyperparameters(coal_mining, tmp_path, capsys):
    options = [*TINY.split(), str(tmp_path), "--learn", "--learn-bins", "20"]
    coal_mining.main(coal_mining.parse_args(options))
    assert "SVGP 2, variational" in capsys.readouterr().out
    assert (tmp_path / "coal_mining_learned.png").exists()


def test_closed_form_intensities_are_those_of_the_draws(coal_mining):
    class Marginals:
        mean, variance = np.array([0.1, 1.0]), np.array([0.2, 0.05])

    moments = coal_mining.intensity_moments({"q": None}, {"q": Marginals}, 191)
    f = np.random.default_rng(0).normal(size=(200_000, 2))
    draws = np.exp(Marginals.mean + np.sqrt(Marginals.variance) * f)
    # Standard errors are below 0.2 % of each moment; five of them are 1 %.
    np.testing.assert_allclose(moments["q"][0], draws.mean(axis=0), rtol=0.01)
    np.testing.assert_allclose(moments["q"][1], draws.std(axis=0), rtol=0.01)

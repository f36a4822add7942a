"""The example of bounds without inverses."""

import numpy as np
import pytest

from tests.helpers import load_example


@pytest.fixture(scope="module")
def example():
    return load_example("inverse_free")


@pytest.mark.slow
def test_every_start_of_T_ends_at_the_inverse(example, tmp_path, capsys):
    options = ["--experiments", "toy", "--output", str(tmp_path)]
    fits = example.main(example.parse(options))["toy"]
    assert "max|K T - I|" in capsys.readouterr().out
    assert (tmp_path / "inverse_free_toy.png").exists()
    for start in example.STARTS:
        fitted = fits[f"L_lc, T {start}"]
        assert np.abs(example.kernel_times_T(fitted) - np.eye(8)).max() < 1e-2
        assert abs(fitted["ELBO"] - fits["SVGP"]["ELBO"]) < 0.5


@pytest.mark.slow
def test_the_other_experiments_run(example, tmp_path, capsys):
    options = ["--experiments", "step", "snelson", "--steps", "5", "--output"]
    fits = example.main(example.parse([*options, str(tmp_path)]))["step"]
    assert len(fits) == 9 and "relaxed, diagonal" in capsys.readouterr().out
    assert (tmp_path / "inverse_free_snelson.png").exists()

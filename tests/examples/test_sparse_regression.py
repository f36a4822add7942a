"""The example of fully Bayesian sparse regression."""

import pytest

from tests.helpers import load_example


@pytest.mark.slow
def test_example_prints_its_table_and_saves_its_figure(tmp_path, capsys):
    example = load_example("sparse_regression")
    options = "--num-warmup 20 --num-samples 20 --num-chains 2 --quiet --output"
    example.main(example.parse([*options.split(), str(tmp_path)]))
    printed = capsys.readouterr().out
    assert "SOLVE-GP 6 + 6, diagonal" in printed and "R-hat" in printed
    assert (tmp_path / "sparse_regression.png").exists()

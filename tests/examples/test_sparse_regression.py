"""The example of fully Bayesian sparse regression."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sparse_regression.py"


@pytest.mark.slow
def test_example_prints_its_table_and_saves_its_figure(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("sparse_regression", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = "--num-warmup 20 --num-samples 20 --num-chains 2 --quiet --output"
    example.main(example.parse([*options.split(), str(tmp_path)]))
    printed = capsys.readouterr().out
    assert "SOLVE-GP 6 + 6, diagonal" in printed and "R-hat" in printed
    assert (tmp_path / "sparse_regression.png").exists()

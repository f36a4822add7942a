"""The script for accelerators runs, at small sizes on a CPU."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "accelerator.py"
    spec = importlib.util.spec_from_file_location("accelerator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(script, part, tmp_path, **options):
    given = {"small": True, "sizes": (8,), "dtype": "float64", "data": None}
    options = SimpleNamespace(**given | options, left=lambda: 100.0)
    return dict(script.PARTS[part](options))


@pytest.mark.slow
def test_steps_predictions_and_agreement(script, tmp_path):
    steps = measured(script, "steps", tmp_path)
    assert set(steps) == {f"M = 8, {m}" for m in ("SVGP M", "SVGP 2M", "SOLVE-GP M + M")}
    assert all(np.isfinite(r["loss"]) and r["step_s"] > 0.0 for r in steps.values())
    rows = measured(script, "prediction", tmp_path)
    assert all(r["rows_per_s"] > 0.0 for r in rows.values()) and len(rows) == 2
    single, double = (
        measured(script, "agreement", tmp_path, dtype=dtype)["numbers"]
        for dtype in ("float32", "float64")
    )
    # Rounding times the condition of K_uu; with TF32 in the factors it would be 1e-3.
    np.testing.assert_allclose(single["left"], double["left"], rtol=1e-4)
    found = {dtype: {"steps": steps, "prediction": rows} for dtype in ("a", "b")}
    assert "SOLVE-GP M + M" in script.table(found)

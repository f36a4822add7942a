"""A small part of each campaign, with fixed seeds."""

import json

import pytest

from campaigns import bounds, inputs
from campaigns._table import FOLDER, Found, Table


@pytest.mark.quick(1)
@pytest.mark.parametrize("block", ["SVGP, small", "mixture of two, wide"])
def test_bounds_are_bounds(block):
    found = bounds.look(block, "float64", each=5)
    assert found.cases >= 5 and not found.failed


def test_a_bound_above_the_evidence_is_seen(monkeypatch):
    monkeypatch.setattr(bounds, "log_evidence", lambda *_: (-1e9, 0.0))
    assert len(bounds.look("SVGP diagonal, small", "float64", each=2).failed) == 2


@pytest.mark.parametrize("name", ["RBF", "RBF()", "SVGP", "GaussianProcess.sample"])
def test_bad_input_is_refused_by_name(name):
    targets = inputs.cheap()
    found = inputs.look(name, *targets[name])
    assert found.cases >= len(inputs.BAD) and not found.failed


def test_an_error_of_others_and_a_changed_input_are_seen():
    def changes(X):
        X[:] = 1.0

    array = inputs.BAD["vector"].copy()
    assert inputs.judged(changes, {"X": array}) == ("foreign", "changed its input 'X'")
    verdict, told = inputs.judged(lambda X: X.nothing, {"X": 1.0})
    assert verdict == "foreign" and "AttributeError" in told


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path):
    asked = []

    def look(block):
        asked.append(block)
        return Found(2, ["wrong"] if block == "b" else [], {})

    Table("one", tmp_path).run(["a"], look)
    table = Table("one", tmp_path)
    table.run(["a", "b"], look)
    assert asked == ["a", "b"] and table.cases == 4 and table.failed == ["b: wrong"]


@pytest.mark.parametrize("precision", bounds.EPS)
def test_what_is_told_of_bounds(precision):
    kept = json.loads((FOLDER / f"bounds_{precision}.json").read_text())
    assert set(kept) == set(bounds.blocks())
    assert not any(found["failed"] for found in kept.values())


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_what_is_told_of_bad_input(precision):
    kept = json.loads((FOLDER / f"inputs_{precision}.json").read_text())
    assert set(inputs.cheap()) < set(kept)
    assert sum(found["cases"] for found in kept.values()) >= 5000
    assert not any(found["failed"] for found in kept.values())


def test_what_is_told_of_calibration():
    kept = json.loads((FOLDER / "calibration.json").read_text())
    assert sum(found["cases"] for found in kept.values()) >= 15_000
    assert not any(found["failed"] for found in kept.values())
    numbers = [found["numbers"] for found in kept.values() if "told" in found["numbers"]]
    misses, told = (sum(found[name] for found in numbers) for name in ("misses", "told"))
    assert misses > 1000 and told >= 0.95 * misses

"""A small part of the campaign of what is known exactly, and its table."""

import json

import pytest

from campaigns import bounds, exact
from campaigns._table import FOLDER


@pytest.mark.quick(1)
@pytest.mark.parametrize("block", ["SVGP tight block, small", "bracket, small"])
def test_what_is_known_exactly_is_told(block):
    found = exact.look(block, "float64", each=3)
    assert found.cases == 3 and not found.failed


@pytest.mark.slow
def test_losses_are_told_exactly():
    found = exact.look("verdict, wide", "float64", each=3)
    assert found.cases == 6 and not found.failed


def test_what_is_told_wrongly_is_seen(monkeypatch):
    kernel = exact.kernel
    monkeypatch.setattr(exact, "kernel", lambda *given: 1.01 * kernel(*given))
    assert len(exact.look("SVGP, small", "float64", each=2).failed) == 2


@pytest.mark.parametrize("precision", bounds.EPS)
def test_what_is_told_of_exact_answers(precision):
    kept = json.loads((FOLDER / f"exact_{precision}.json").read_text())
    assert set(kept) == set(exact.blocks())
    assert not any(found["failed"] for found in kept.values())

"""A small part of the campaigns of a soak and of versions."""

import json

import numpy as np
import pytest

from campaigns import soak, versions
from campaigns._table import FOLDER


@pytest.mark.slow
def test_threads_that_fit_and_predict_at_once_find_what_one_by_one_do(monkeypatch):
    monkeypatch.setattr(soak, "THREADS", 2)
    found = soak.in_threads(1)
    assert found.cases == 2 and not found.failed


def test_threads_that_differ_or_fail_are_seen(monkeypatch):
    answers = iter([np.zeros(2), np.zeros(2), np.ones(2)])
    monkeypatch.setattr(soak, "THREADS", 2)
    monkeypatch.setattr(soak, "answers", lambda number: next(answers))
    found = soak.in_threads(1)
    assert "differ by 1" in found.failed[0] and "StopIteration" in found.failed[1]


def test_memory_that_grows_and_rounds_that_slow_down_are_seen():
    rounds = np.arange(30.0)
    flat, even = 100.0 + 0.0 * rounds, 1.0 + 0.0 * rounds
    assert not soak.judged(flat, even).failed
    (grown,) = soak.judged(flat + 0.5 * rounds, even).failed
    assert "grows by 0.50 MiB" in grown
    (slowed,) = soak.judged(flat, even + (rounds >= 20)).failed
    assert "2.00 times" in slowed


def test_failed_tests_are_counted():
    out = "FAILED tests/a.py::b - why\n1 failed, 30 passed, 2 skipped in 10.58s (0:00:10)\n"
    assert versions.counted(out) == (30, ["tests/a.py::b - why"])


def test_what_is_told_of_threads_and_memory():
    kept = json.loads((FOLDER / "soak.json").read_text())
    assert not kept["threads"]["failed"]
    told = kept["same"]["numbers"]["MiB a round"]
    assert (told > soak.GROWTH) == bool(kept["same"]["failed"])

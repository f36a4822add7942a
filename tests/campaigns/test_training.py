"""A small part of the campaign of trainings, and that it sees what is wrong."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from campaigns import _by_hand, training
from campaigns._models import KERNELS, dense_log_evidence, simulated, written
from campaigns._table import Found, Table

BLOCK = "Normal, RBF, SVGP, five, sampled"


@pytest.fixture(scope="module")
def case():
    X, y = simulated(np.random.default_rng(0), "Normal", "five", "plain", "plain")
    return training.Case(BLOCK, written("Normal", "RBF", "sampled"), X, y)


def test_a_fit_is_right(case):
    assert case.wrong() == [] and list(case.wrong_responses()) == []


@pytest.mark.parametrize("change", [100.0, -100.0])
def test_a_bound_that_is_another_one_is_seen(case, monkeypatch, change):
    monkeypatch.setattr(case.fitted, "bound", case.fitted.bound + change)
    told = " ".join(case.wrong())
    assert "is said to be" in told
    assert ("where the evidence is" in told) == (change > 0.0)
    assert ("at the start" in told and "on the way" in told) == (change < 0.0)


def test_what_is_not_finite_is_seen(case, monkeypatch):
    broken = {**case.fitted.params, "f_auto_qu_mu": jnp.full(3, jnp.nan)}
    monkeypatch.setattr(case.fitted, "params", broken)
    monkeypatch.setattr(case.fitted, "bound", np.nan)
    told = " ".join(case.wrong())
    assert "f_auto_qu_mu is not finite" in told and "the bound is nan" in told


def test_predictions_that_are_wrong_are_seen(case, monkeypatch):
    nothing = SimpleNamespace(mean=np.full(4, np.nan), variance=np.zeros(4))
    monkeypatch.setattr(case.fitted, "posterior", lambda X: {"f": nothing})
    told = " ".join(case.wrong())
    assert "means of f are" in told and "variances of f are" in told


def test_errors_are_failures_and_right_refusals_are_none(monkeypatch):
    def refuses(*_):
        raise ValueError("X has 1 distinct inputs in 5 rows")

    monkeypatch.setattr(training, "Case", refuses)
    found = training.look(BLOCK, "float64", each=5)
    assert found.cases == 5 and found.numbers["refused"] == 1  # one place
    assert len(found.failed) == 4


def test_bounds_of_two_precisions_are_compared(tmp_path):
    tables = Table("one", tmp_path), Table("other", tmp_path)
    for table, lower in zip(tables, (3.0, 0.0), strict=True):
        numbers = {"bound 0 (X plain, y plain)": -1.0 - lower, "ended: converged": 2}
        numbers["bound 1 (X of 1e6, y plain)"] = -1.0
        table.run(["a"], lambda _, numbers=numbers: Found(2, [], numbers))
    count, apart = training.compared(*tables)
    assert count["sound"] == count["sound, apart"] == count["hard"] == 1
    assert count["hard, apart"] == 0 and len(apart) == count["the first is lower"] == 1


@pytest.mark.parametrize("name", KERNELS)
def test_dense_kernels_are_those_of_the_package(name):
    rng, given = np.random.default_rng(1), {}

    def value(name, shape=()):
        return given.setdefault(name, rng.uniform(0.5, 2.0, shape))

    X1, X2 = rng.normal(size=(2, 4, 3))
    kernel = KERNELS[name].make(value, 3)
    found = KERNELS[name].dense(given, X1, X2)
    np.testing.assert_allclose(found, kernel(X1, X2), rtol=1e-9, atol=1e-12)


def test_the_bound_by_hand_is_the_evidence_at_all_rows():
    rng, logs = np.random.default_rng(2), np.log([1.5, 0.7, 0.3])
    X = rng.normal(size=(8, 2))
    y = np.sin(X[:, 0])
    given = dict(zip(("variance", "length", "noise"), np.exp(logs), strict=True))
    exact = dense_log_evidence("RBF", given, X, y)[0]
    # The jitter of 1e-8 is all that is between them.
    np.testing.assert_allclose(_by_hand.collapsed(logs, X, X, y), exact, atol=1e-5)
    assert _by_hand.collapsed(logs, X[:3], X, y) < exact

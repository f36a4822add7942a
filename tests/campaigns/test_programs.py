"""A small part of the campaign of programs, with fixed seeds."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import multivariate_normal

import numpyro_sgp as sgp
from campaigns import _bound, _bounded, _dense, programs
from campaigns._case import EPS, differences
from campaigns._table import FOLDER

# Densities of f as it is are asked for, which HMC is warned of, and GP sites are scaled.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .* values of a GaussianProcess"),
    pytest.mark.filterwarnings("ignore:GP site .* is scaled"),
]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("density", marks=pytest.mark.slow),
        "handlers",
        pytest.param("draws", marks=pytest.mark.slow),
    ],
)
def test_programs_are_their_dense_twins(kind):
    found = programs.look(f"{kind}, 1000", each=1)
    assert found.cases >= 3 and not found.failed


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [1e-8, 1e-5])
def test_the_bound_is_the_one_by_hand_and_another_is_seen(monkeypatch, jitter):
    monkeypatch.setattr(_bound, "JITTER", jitter)
    for name, value in (("MORE", 1), ("GRADIENTS", 0.0), ("SPARSIFIED", 0.0)):
        monkeypatch.setattr(_bounded, name, value)
    found = programs.look("bound, 1000", each=1)
    assert found.cases >= 2 and bool(found.failed) == (jitter != 1e-8)


@pytest.mark.slow
def test_a_process_with_another_density_is_seen(monkeypatch):
    plain = sgp.GaussianProcess.log_prob
    monkeypatch.setattr(
        sgp.GaussianProcess, "log_prob", lambda self, f: (1 + 1e-6) * plain(self, f)
    )
    found = programs.look("density, 1000", each=1)
    assert any("log density: f0 is" in sentence for sentence in found.failed)


@pytest.mark.slow
def test_draws_that_are_too_wide_are_seen(monkeypatch):
    plain = sgp.GaussianProcess.scale_tril
    monkeypatch.setattr(sgp.GaussianProcess, "scale_tril", lambda self: 1.2 * plain(self))
    found = programs.look("draws, 1000", each=1)
    assert any("covariances are" in sentence for sentence in found.failed)


def test_an_error_is_a_failure(monkeypatch):
    def raises(case):
        raise KeyError("nothing")

    monkeypatch.setitem(programs.KINDS, "density", (raises, {}, 1, 1))
    assert "KeyError" in programs.look("density, 0").failed[0]


def test_kernels_by_hand_are_covariances():
    """Of each kind: symmetric, and a multivariate normal's density needs no more jitter."""
    X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
    hypers = {"v": 1.3, "l": 0.9}
    for kind in ("RBF", "Matern12", "Matern52", "Periodic", "Polynomial", "White"):
        K = _dense.matrix((kind, "v", "l", ""), hypers, X, X, same=True)
        assert np.allclose(K, K.T, atol=0, rtol=1e-14)
        K = K + 1e-8 * jnp.eye(5)
        assert np.isfinite(multivariate_normal.logpdf(jnp.ones(5), jnp.zeros(5), K))


def test_numbers_are_compared_by_name_shape_and_size():
    same = {"a": np.full(2, 1e3)}
    assert not differences("x", {"a": same["a"] * (1 + 0.5 * EPS)}, same)
    assert differences("x", {"a": same["a"] * (1 + 2 * EPS)}, same)
    assert "shape" in differences("x", {"a": np.ones(3)}, same)[0]
    assert "in one of them" in differences("x", {"b": same["a"]}, same)[0]
    assert differences("x", {"a": np.full(2, np.nan)}, same)


def test_what_is_told_of_programs():
    kept = json.loads((FOLDER / "programs.json").read_text())
    assert set(kept) <= set(programs.blocks())
    assert not any(found["failed"] for found in kept.values())

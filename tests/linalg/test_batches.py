"""Batches of LAPACK's calls, on few cores and many."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_sgp import _programs, _threads
from numpyro_sgp.linalg import batches, jittered_cholesky, solve_lower, whitened_solve
from numpyro_sgp.linalg.triangular import half_congruence

BATCH = re.compile(r"custom_call @lapack_[^\n]*: \(tensor<\d+x\d+x\d+x")


@pytest.fixture
def matrices():
    A = np.random.default_rng(0).normal(size=(2, 3, 5, 5))
    return jnp.asarray(A @ np.swapaxes(A, -1, -2) + np.eye(5))


@pytest.mark.parametrize("few", [True, False])
def test_they_are_those_of_numpy(matrices, few, monkeypatch):
    monkeypatch.setattr(batches, "few_cores", lambda: few)
    L = batches.cholesky(matrices)
    np.testing.assert_allclose(L, np.linalg.cholesky(matrices), rtol=1e-12, atol=1e-14)
    options = {"left_side": True, "lower": True}
    B = matrices[:, :1, :, :2]
    found = batches.triangular_solve(L, B, **options)
    np.testing.assert_allclose(found, np.linalg.solve(L, B), rtol=1e-10, atol=1e-12)
    assert batches.cholesky(matrices[0, 0]).shape == (5, 5)
    assert batches.cholesky(matrices[:0]).shape == (0, 3, 5, 5)
    of = jax.vmap(batches.cholesky)(matrices)
    np.testing.assert_allclose(of, L, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_on_few_cores_no_batch_is_given_to_lapack(matrices, monkeypatch):
    """Forwards and backwards: side by side such calls would wait for each other."""

    def value(K):
        L, _, A = whitened_solve(K, K[..., :3])
        M = jittered_cholesky(K)[0]
        return jnp.sum(A) + jnp.sum(solve_lower(M, half_congruence(L, K)))

    texts, gradients = [], []
    for few in (True, False):
        monkeypatch.setattr(batches, "few_cores", lambda few=few: few)
        jax.clear_caches()
        program = jax.jit(jax.grad(value))
        texts.append(program.lower(matrices[0]).as_text())
        gradients.append(program(matrices[0]))
    assert [bool(BATCH.search(text)) for text in texts] == [False, True]
    np.testing.assert_allclose(*gradients, rtol=1e-9, atol=1e-11)
    jax.clear_caches()


def test_programs_with_batches_take_thunks_in_turn(monkeypatch):
    asked = []
    start = _programs._start
    monkeypatch.setattr(_programs, "_start", lambda *a: asked.append(a[1]) or start(*a))
    eye = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))
    in_turn, _ = _programs._IN_TURN
    for fn, batch in ((jnp.linalg.cholesky, True), (lambda A: A + 1.0, False)):
        _programs.shared(fn)(eye)
        known = bool(_programs._if_known(_programs._IN_TURN))
        assert (in_turn in (asked[-1] or {})) == (batch and known)


def test_many_batches_side_by_side_end():
    """On two cores they did not, most often in the first call."""

    def many(x):
        places = jnp.arange(40)
        apart = (places[:, None] - places) ** 2
        total = 0.0
        for i in range(6):
            K = jnp.exp(-apart / (1 + (x[:, None, None] + i) ** 2)) + 0.01 * jnp.eye(40)
            total = total + jnp.sum(jnp.linalg.cholesky(K))
        return total

    program = _programs.shared(many)
    for i in range(5):
        assert np.isfinite(program(jnp.linspace(0.1, 1.0 + i, 100)))


def test_cores_are_counted(monkeypatch):
    monkeypatch.setattr(_threads.os, "sched_getaffinity", lambda _: range(2), raising=False)
    assert _threads.few_cores()
    monkeypatch.setattr(_threads.os, "sched_getaffinity", lambda _: range(16))
    assert not _threads.few_cores()

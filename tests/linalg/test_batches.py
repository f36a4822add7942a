"""Batches of LAPACK's calls, on few cores and many."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy

import numpyro_sgp as sgp
from numpyro_sgp import _programs, _threads
from numpyro_sgp.distributions import dependent
from numpyro_sgp.families import dual
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


@pytest.mark.parametrize("few", [True, False])
def test_eigenvectors_are_those_of_the_matrices(matrices, few, monkeypatch):
    monkeypatch.setattr(batches, "few_cores", lambda: few)
    for find in (batches.eigh, jax.jit(jax.vmap(batches.eigh))):
        values, V = find(matrices)
        assert values.shape == (2, 3, 5) and bool((jnp.diff(values) > 0).all())
        made = np.einsum("...ik,...k,...jk->...ij", V, values, V)
        np.testing.assert_allclose(made, matrices, rtol=1e-11, atol=1e-12)


def test_no_batch_goes_to_lapack_where_several_functions_have_sites(monkeypatch):
    """Two of them side by side, of functions with one Gaussian, wait for each other."""
    monkeypatch.setattr(batches, "few_cores", lambda: True)
    covariance = jnp.eye(3) + jnp.zeros((40, 3, 3))
    place = jax.jit(partial(dependent.place, covariance=covariance))
    assert not BATCH.search(place.lower(jnp.ones((3, 40))).as_text())
    np.testing.assert_allclose(place(jnp.ones((3, 40))), np.ones((3, 40)))
    L = jnp.linalg.cholesky(jnp.eye(4) + jnp.zeros((2, 4, 4)))

    def mean(linear):
        return dual._whitened(1.0, L, linear, -2.0 * jnp.eye(4) + 0.0 * L)[0]

    assert not BATCH.search(jax.jit(mean).lower(jnp.ones((2, 4))).as_text())


SIDES = [(left, lower, turned) for left in (0, 1) for lower in (0, 1) for turned in (0, 1)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("left, lower, turned", SIDES)
def test_values_and_derivatives_of_solves_are_those_of_jax(
    left, lower, turned, monkeypatch
):
    rng = np.random.default_rng(3)
    A = jnp.asarray(rng.normal(size=(2, 4, 4)) + 4.0 * np.eye(4))
    B = jnp.asarray(rng.normal(size=(2, 4, 4)))
    options = {"left_side": bool(left), "lower": bool(lower), "transpose_a": bool(turned)}

    def value(A, B):
        return jnp.sum(jnp.sin(batches.triangular_solve(A, B, **options)))

    def found():
        slopes = jax.grad(value, (0, 1))
        one = jax.vmap(slopes, (None, 0))(A[0], B), jax.vmap(slopes, (0, None))(A, B[0])
        turns = jax.jvp(slopes, (A, B), (0.3 * B, A))
        return jax.jit(lambda: (value(A, B), slopes(A, B), one, turns))()

    each = []
    for few in (True, False):
        monkeypatch.setattr(batches, "few_cores", lambda few=few: few)
        each.append(found())
    for a, b in zip(*map(jax.tree.leaves, each), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_matrices_without_entries_are_taken(monkeypatch):
    monkeypatch.setattr(batches, "few_cores", lambda: True)
    none = jnp.zeros((4, 3, 0))
    assert solve_lower(jnp.eye(3), none[0]).shape == (3, 0)
    assert jax.vmap(lambda B: solve_lower(jnp.eye(3), B))(none).shape == (4, 3, 0)
    assert batches.cholesky(jnp.zeros((0, 0))).shape == (0, 0)


@pytest.mark.slow
def test_derivatives_of_factors_are_those_of_jax(matrices, monkeypatch):
    """By symmetric matrices: which half of them counts differs between versions."""

    def value(A):
        return jnp.sum(jnp.sin(batches.cholesky(A)))

    each = []
    for few in (True, False):
        monkeypatch.setattr(batches, "few_cores", lambda few=few: few)
        slopes = jax.grad(value)
        of = matrices[0], matrices[0, 0]
        curved = jax.jit(lambda A: jax.jvp(jax.grad(value), (A,), (A,))[1])
        each.append((slopes(of[0]), jax.vmap(slopes)(of[0]), curved(of[1])))
    for a, b in zip(*map(jax.tree.leaves, each), strict=True):
        a, b = (v + v.mT for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_vectorised_chains_end(monkeypatch):
    """Gradients of two chains of 60 points waited for each other, in nearly every call."""
    monkeypatch.setattr(batches, "few_cores", lambda: True)
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.uniform(0.0, 4.0, (1500, 2)))
    y = jnp.asarray(rng.poisson(2.0, len(X)))

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0, scale), X))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    sparse = sgp.sparsify(model, sgp.SVGP(inducing=X[:60]))
    sparse.setup(X, y)

    def energy(z):
        return potential_energy(sparse, (X, y), {}, z)

    z = {"scale": jnp.array([0.1, 0.2]), "f_u_white": 0.1 * jnp.ones((2, 60))}
    slopes = jax.jit(jax.vmap(jax.grad(energy)))
    text = slopes.lower(z).as_text()
    assert "lapack" in text and not BATCH.search(text)
    alone = jax.grad(energy)(jax.tree.map(lambda v: v[1], z))
    for _ in range(20):
        found = slopes(z)
    np.testing.assert_allclose(found["scale"][1], alone["scale"], rtol=1e-9)


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

"""Products and congruences by blocks, against the formulas of dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp.linalg import triangular, whitened_solve
from numpyro_sgp.linalg.triangular import half_congruence, triangular_product

SIZE = 19  # two levels of blocks, of unequal sizes


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(triangular, "_BLOCK", 6)


def matrices(*batch, columns=SIZE, seed=0):
    """A lower triangular, a symmetric positive and a rectangular matrix."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(*batch, SIZE, SIZE))
    K = A @ A.swapaxes(-1, -2) + SIZE * np.eye(SIZE)
    B = rng.normal(size=(*batch, SIZE, columns))
    return tuple(map(jnp.asarray, (np.linalg.cholesky(K), A + A.swapaxes(-1, -2), B)))


def dense_congruence(L, K):
    inverse = jnp.linalg.inv(L)
    G = inverse @ K @ inverse.mT
    return jnp.tril(G) - 0.5 * G * jnp.eye(SIZE)


def dense_whitened(K, B):
    L = jnp.linalg.cholesky(K)
    return L, jnp.linalg.solve(L, B)


def test_large_matrices_are_divided_to_at_most_four_blocks_a_side():
    assert triangular._block_size(jnp.ones((SIZE, SIZE))) == 6
    assert triangular._block_size(jnp.ones((400, 300))) == 100
    assert triangular._block_size(jnp.ones((SIZE, 6))) == SIZE  # few columns


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("left", "right"), [((), ()), ((2,), (2,)), ((), (3,))])
def test_products_and_gradients_are_those_of_dense_matrices(transpose, left, right):
    L, B = matrices(*left)[0], matrices(*right, columns=11)[2]

    def dense(L, B):
        return (jnp.tril(L).mT if transpose else jnp.tril(L)) @ B

    def product(L, B):
        return triangular_product(L, B, transpose)

    @jax.jit
    def value_and_gradients(L, B):
        def value(L, B, f):
            C = f(L, B)
            return jnp.sum(jnp.sin(C)), C

        return [jax.grad(value, (0, 1), True)(L, B, f) for f in (product, dense)]

    (gradients, C), (want, dense_C) = value_and_gradients(L, B)
    assert_allclose(C, dense_C, atol=1e-12)
    assert_allclose(jnp.tril(gradients[0]), want[0], atol=1e-11)
    assert_allclose(gradients[1], want[1], atol=1e-11)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_half_congruence_is_that_of_inverses(batch):
    L, K, _ = matrices(*batch)
    want = jax.jit(dense_congruence)(L, K)
    assert_allclose(jax.jit(half_congruence)(L, K), want, atol=1e-13)


def test_half_congruence_under_vmap():
    L, K, _ = matrices(3)
    got, want = (
        jax.jit(jax.vmap(f, (None, 0)))(L[0], K)
        for f in (half_congruence, dense_congruence)
    )
    assert_allclose(got, want, atol=1e-13)


def of_points(whitened):
    """A function of points by way of their whitened covariances, factor included."""

    def value(X):
        # Symmetric, as covariances are.
        K = jnp.exp(-0.5 * (X[:, None] - X) ** 2) + jnp.eye(SIZE)
        L, A = whitened(K, jnp.exp(-0.5 * (X[:, None] - jnp.linspace(-1, 1, 11)) ** 2))
        return jnp.sum(jnp.sin(A)) + jnp.sum(jnp.cos(3 * L))

    return value


def blocked(K, B):
    L, _, A = whitened_solve(K, B, 0.0)
    return L, A


@pytest.mark.slow
def test_gradients_of_the_whitened_solve_and_their_derivatives():
    X, V = np.random.default_rng(1).normal(size=(2, SIZE))
    got, want = (
        jax.jvp(jax.jit(jax.grad(of_points(f))), (X,), (V,))
        for f in (blocked, dense_whitened)
    )
    assert_allclose(got[0], want[0], atol=1e-11)
    assert_allclose(got[1], want[1], atol=1e-10)


@pytest.mark.slow
def test_gradients_of_a_batch_of_whitened_solves():
    X = np.random.default_rng(2).normal(size=(3, SIZE))
    got, want = (
        jax.jit(jax.vmap(jax.grad(of_points(f))))(X) for f in (blocked, dense_whitened)
    )
    assert_allclose(got, want, atol=1e-11)

"""L v with a derivative of its own, against JAX's derivative of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp.linalg import factor_product
from numpyro_sgp.linalg.triangular import _BLOCK
from tests.helpers import factorised

JITTER = 1e-3


def kernel(theta, N, dtype="float64"):
    X = jnp.linspace(0.0, 3.0, N, dtype=dtype)[:, None]
    return theta[0] * jnp.exp(-0.5 * (X - X.T) ** 2 / theta[1] ** 2)


def plain(K, v):
    """JAX's own factor and derivatives."""
    scale = jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)
    A = K + JITTER * scale[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)
    return jnp.einsum("...ij,...j->...i", jnp.linalg.cholesky(A), v)


def ours(K, v):
    return factor_product(K, v, JITTER)


def loss(product, weights):
    """Of hyperparameters and whitened values, as a log likelihood is."""

    def of(theta, v):
        u = product(kernel(theta, v.shape[-1], v.dtype), v)
        return jnp.sum(weights * jnp.sin(u))

    return of


@pytest.mark.parametrize("N", [7, _BLOCK + 17])  # as a whole, and in blocks
def test_value_and_gradients_are_those_of_the_plain_product(N):
    weights, v = np.random.default_rng(N).normal(size=(2, N))
    theta = jnp.array([1.3, 0.4])
    got, expected = (
        jax.jit(jax.value_and_grad(loss(product, weights), (0, 1)))(theta, v)
        for product in (ours, plain)
    )
    assert_allclose(got[0], expected[0], rtol=1e-9)
    for a, b in zip(got[1], expected[1], strict=True):
        # Condition numbers of 1e5.
        assert_allclose(a, b, rtol=1e-8, atol=1e-9 * np.abs(b).max())


@pytest.mark.quick(1)
@pytest.mark.parametrize("N", [30, _BLOCK + 17])
def test_gradients_in_float32_are_as_right_as_the_plain_products(N):
    weights, v = np.random.default_rng(N).normal(size=(2, N))
    theta = jnp.array([1.3, 0.4])

    def gradient(product, dtype):
        of = loss(product, weights.astype(dtype))
        arguments = theta.astype(dtype), v.astype(dtype)
        found = jax.jit(jax.grad(of, (0, 1)))(*arguments)
        assert all(leaf.dtype == dtype for leaf in found)
        return np.concatenate([np.asarray(leaf, float) for leaf in found])

    exact = gradient(plain, "float64")
    error, others = (
        np.linalg.norm(gradient(product, "float32") - exact) for product in (ours, plain)
    )
    # Both are rounding errors of a matrix with a condition number of 1e5.
    assert error < 5 * others + 1e-5 * np.linalg.norm(exact)


@pytest.mark.quick(2)
@pytest.mark.parametrize("shapes", [((), (3,)), ((3,), (3,)), ((3,), ()), ((1,), (2, 3))])
def test_batches_broadcast(shapes):
    rng = np.random.default_rng(0)
    A = rng.normal(size=(*shapes[0], 4, 4))
    K, v = A @ A.swapaxes(-1, -2) + np.eye(4), rng.normal(size=(*shapes[1], 4))
    weights = rng.normal(size=np.broadcast_shapes(shapes[0], shapes[1]) + (4,))

    def gradient(product):
        # Symmetric in K, as covariances are.
        total = lambda K, v: jnp.sum(weights * product((K + K.mT) / 2, v))  # noqa: E731
        return jax.jit(jax.value_and_grad(total, (0, 1)))(K, v)

    assert ours(K, v).shape == weights.shape
    for a, b in zip(*map(jax.tree.leaves, map(gradient, (ours, plain))), strict=True):
        assert a.shape == b.shape
        assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_and_forward_mode(outer):
    weights, v = np.random.default_rng(1).normal(size=(2, 5))
    theta = jnp.array([1.3, 0.4])

    def derivatives(product):
        of = loss(product, weights)
        return jax.jit(outer(of, (0, 1))), jax.jit(outer(jax.grad(of, (0, 1)), (0, 1)))

    for a, b in zip(derivatives(ours), derivatives(plain), strict=True):
        for got, expected in zip(
            jax.tree.leaves(a(theta, v)), jax.tree.leaves(b(theta, v)), strict=True
        ):
            assert_allclose(got, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_several_chains_are_vmapped():
    weights, *v = np.random.default_rng(2).normal(size=(4, 6))
    theta, v = jnp.array([[1.3, 0.4], [0.7, 1.1], [2.0, 0.2]]), jnp.array(v)
    of = jax.grad(loss(ours, weights), (0, 1))
    together = jax.jit(jax.vmap(of))(theta, v)
    for i in range(3):
        for got, expected in zip(together, of(theta[i], v[i]), strict=True):
            assert_allclose(got[i], expected, rtol=1e-9, atol=1e-12)


def test_a_gradient_factorises_once():
    v = jnp.ones(9)
    step = jax.make_jaxpr(jax.value_and_grad(lambda K: jnp.sum(ours(K, v) ** 2)))
    assert factorised(step(jnp.eye(9)).jaxpr) == [9]


@pytest.mark.slow
def test_gradients_of_a_nearly_singular_matrix_keep_the_digits_of_the_plain_product():
    # Against central differences in longer numbers: h**4, and rounding of 1e-19 / h. By
    # half_congruence in blocks, errors are 20 to 100 times those of the plain product.
    N, jitter = _BLOCK + 17, 1e-6
    X = np.linspace(0.0, 3.0, N).astype(np.longdouble)
    r2 = (X[:, None] - X) ** 2
    g, v = np.random.default_rng(0).normal(size=(2, N))

    def exact(lengthscale):
        A = np.exp(-r2 / (2 * lengthscale**2))
        A[np.diag_indices(N)] += np.longdouble(jitter)
        for k in range(N):
            A[k, k] = np.sqrt(A[k, k])
            A[k + 1 :, k] /= A[k, k]
            A[k + 1 :, k + 1 :] -= np.outer(A[k + 1 :, k], A[k + 1 :, k])
        return g @ (np.tril(A) @ v)

    def slope(h):
        return (exact(1 + h) - exact(1 - h)) / (2 * h)

    expected = float((4 * slope(np.longdouble(5e-4)) - slope(np.longdouble(1e-3))) / 3)

    def of(lengthscale, product):
        return g @ product(jnp.exp(-jnp.asarray(r2, float) / (2 * lengthscale**2)))

    error, others = (
        abs(float(jax.jit(jax.grad(of), static_argnums=1)(1.0, product)) - expected)
        for product in (
            lambda K: factor_product(K, v, jitter),
            lambda K: jnp.linalg.cholesky(K + jitter * jnp.eye(N)) @ v,
        )
    )
    assert error < 5 * others + 1e-9


def test_a_singular_matrix_gets_the_jitter_of_the_factor():
    v = jnp.array([1.0, -2.0, 0.5])
    got, slope = jax.value_and_grad(lambda K: jnp.sum(factor_product(K, v)))(
        jnp.ones((3, 3))
    )
    assert np.isfinite(got) and np.isfinite(slope).all()
    assert_allclose(got, 3 * v[0], atol=1e-3)

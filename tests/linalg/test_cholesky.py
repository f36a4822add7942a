"""The jittered factor and its derivatives, against NumPy and plain automatic ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from numpyro_sgp.linalg import (
    default_jitter,
    jittered_cholesky,
    max_jitter,
    solve_lower,
    with_jitter,
)

factor = jax.jit(jittered_cholesky, static_argnames="jitter")


def positive(rng, *shape):
    """Symmetric matrices with eigenvalues above one."""
    A = rng.normal(size=shape)
    return A @ np.swapaxes(A, -1, -2) + np.eye(shape[-1])


def with_smallest_eigenvalue(smallest, seed=0):
    """A symmetric 3 x 3 matrix with eigenvalues 1, 1 and ``smallest``."""
    Q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return Q @ np.diag([1.0, 1.0, smallest]) @ Q.T


def mean_diagonal(K):
    return np.trace(K, axis1=-2, axis2=-1) / K.shape[-1]


def count_cholesky(jaxpr, in_loop=False):
    """Cholesky primitives outside and inside while loops, in all nested programs."""
    counts = np.zeros(2, int)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cholesky":
            counts[int(in_loop)] += 1
        inside = in_loop or eqn.primitive.name == "while"
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):  # a jaxpr, closed or open
                counts += count_cholesky(getattr(inner, "jaxpr", inner), inside)
    return counts


@given(st.integers(0, 2**32 - 1))
def test_factor_is_numpys_of_the_matrix_with_jitter(seed):
    K = positive(np.random.default_rng(seed), 4, 4)
    L, jitter = factor(K, jitter=1e-3)  # large, so that it shows in the digits compared
    assert_allclose(jitter, 1e-3 * mean_diagonal(K), rtol=1e-12)
    assert_allclose(
        L, np.linalg.cholesky(K + 1e-3 * mean_diagonal(K) * np.eye(4)), atol=1e-11
    )


def test_matrices_of_a_batch_have_jitter_of_their_own_size():
    K = positive(np.random.default_rng(0), 2, 3, 4, 4)
    K[1] *= 1e3
    L, jitter = factor(K, jitter=1e-3)
    assert jitter.shape == (2, 3)
    for i in np.ndindex(2, 3):
        assert_allclose(jitter[i], 1e-3 * mean_diagonal(K[i]), rtol=1e-12)
        expected = np.linalg.cholesky(K[i] + float(jitter[i]) * np.eye(4))
        assert_allclose(L[i], expected, rtol=1e-9, atol=1e-12)


def test_the_first_jitter_is_the_default_of_the_dtype():
    K = positive(np.random.default_rng(0), 4, 4)
    _, jitter = factor(K)
    assert_allclose(jitter, default_jitter("float64") * mean_diagonal(K), rtol=1e-12)


def test_no_jitter_is_added_where_none_is_asked_for_and_none_is_needed():
    K = positive(np.random.default_rng(0), 4, 4)
    L, jitter = factor(K, jitter=0.0)
    assert jitter == 0.0
    assert_allclose(L, np.linalg.cholesky(K), rtol=1e-12, atol=1e-14)


def test_jitter_is_relative_to_the_scale_given():
    K = positive(np.random.default_rng(0), 2, 4, 4)
    scale = np.array([1.0, 100.0])
    L, jitter = factor(K, jitter=1e-3, scale=scale)
    assert_allclose(jitter, 1e-3 * scale, rtol=1e-12)
    expected = np.linalg.cholesky(K + 1e-3 * scale[:, None, None] * np.eye(4))
    assert_allclose(L, expected, rtol=1e-9, atol=1e-12)
    _, jitter = factor(K, jitter=1e-3, scale=jnp.asarray(5.0))
    assert_allclose(jitter, [5e-3, 5e-3], rtol=1e-12)


def test_only_the_failing_matrices_of_a_batch_get_more_jitter():
    # The mean diagonal is 2/3: 1e-5 and 1e-3 are the first powers of ten that exceed
    # the negative eigenvalues.
    K = np.stack([np.eye(3), with_smallest_eigenvalue(-3e-6), 5 * np.ones((3, 3))])
    K = np.concatenate([K, with_smallest_eigenvalue(-5e-4)[None]])
    L, jitter = factor(K)
    levels = np.array([1e-8, 1e-5, 1e-8, 1e-3])
    assert_allclose(jitter, levels * mean_diagonal(K), rtol=1e-12)
    A = K + np.asarray(jitter)[:, None, None] * np.eye(3)
    # The condition numbers reach 1e8, so the factor keeps eight digits.
    assert_allclose(L, np.linalg.cholesky(A), rtol=1e-6, atol=1e-12)


def test_a_first_jitter_below_the_default_is_raised_to_it_when_it_fails():
    _, jitter = factor(with_smallest_eigenvalue(-1e-10), jitter=1e-14)
    assert_allclose(jitter, 1e-8 * 2 / 3, rtol=1e-9)


def test_what_cannot_be_mended_is_nan_and_its_neighbour_is_not():
    lost = with_smallest_eigenvalue(-2 * max_jitter("float64"))
    L, jitter = factor(np.stack([lost, np.full((3, 3), np.nan), np.eye(3)]))
    assert np.isnan(np.asarray(L[:2])).any(axis=(1, 2)).all()
    assert np.isfinite(L[2]).all()
    assert_allclose(jitter[0], 1e-3 * mean_diagonal(lost), rtol=1e-12)
    assert_allclose(jitter[2], 1e-8, rtol=1e-12)


def test_float32_stays_float32_and_has_a_range_of_its_own():
    K = positive(np.random.default_rng(0), 3, 3).astype(np.float32)
    L, jitter = factor(K)
    assert L.dtype == jitter.dtype == jnp.float32
    assert_allclose(jitter, 1e-5 * mean_diagonal(K), rtol=1e-6)
    L, jitter = factor(K, scale=jnp.ones((), jnp.float64))
    assert L.dtype == jitter.dtype == jnp.float32
    assert (default_jitter("float32"), max_jitter("float32")) == (1e-5, 1e-2)


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_other_numbers_are_refused(dtype):
    with pytest.raises(TypeError, match=f"float32 or float64 numbers, got {dtype}"):
        jittered_cholesky(jnp.eye(2, dtype=dtype))


# ---- derivatives -------------------------------------------------------------------

B0, B1, SHIFT = np.random.default_rng(3).normal(size=(3, 3, 3))


def kernel_like(theta):
    """Positive definite for theta[1] >= 0, with the smallest eigenvalue near it."""
    A = B0[:, :2] + theta[0] * B1[:, :2]
    return A @ A.T + theta[1] * jnp.eye(3)


def plain(theta, level):
    """JAX's own factor of the same matrix, at a known level of jitter."""
    K = kernel_like(theta)
    scale = jnp.mean(jnp.diagonal(K, axis1=-2, axis2=-1), axis=-1)
    return jnp.linalg.cholesky(K + level * scale * jnp.eye(3)), level * scale


def test_derivatives_are_those_of_the_factor_of_the_same_matrix():
    # The second and third matrices are indefinite, and get their jitter in the loop.
    thetas = jnp.array([[0.3, 0.5], [-0.7, -1e-5], [1.1, -1e-4]])
    levels = []
    for theta in thetas:
        K = kernel_like(theta)
        levels.append(float(factor(K)[1] / mean_diagonal(K)))
    assert levels[0] < 2e-8 and min(levels[1:]) > 1e-6

    def ours(theta):
        return jittered_cholesky(kernel_like(theta))

    expected = jax.jit(jax.vmap(jax.jacfwd(plain)))(thetas, jnp.array(levels))
    both = jax.jit(
        lambda thetas: [jax.vmap(j(ours))(thetas) for j in (jax.jacfwd, jax.jacrev)]
    )
    for got in both(thetas):
        # The matrices have condition numbers up to 1e6.
        assert_allclose(got[0], expected[0], rtol=1e-7, atol=1e-9)
        assert_allclose(got[1], expected[1], rtol=1e-7)  # the jitter's own derivative


def test_derivatives_are_finite_differences():
    theta, step = jnp.array([0.3, 0.5]), 1e-5
    ours = jax.jit(lambda t: jittered_cholesky(kernel_like(t), 1e-2)[0])
    got = jax.jit(jax.jacrev(ours))(theta)
    for i in range(2):
        h = step * np.eye(2)[i]
        slope = (ours(theta + h) - ours(theta - h)) / (2 * step)
        # Central differences: an error of step**2, beside rounding of 1e-16 / step.
        assert_allclose(got[..., i], slope, atol=1e-8)


def test_derivative_with_respect_to_the_scale():
    K = positive(np.random.default_rng(0), 3, 3)

    def plain_scale(scale):
        return jnp.linalg.cholesky(K + 1e-2 * scale * jnp.eye(3))

    got = jax.jit(jax.jacfwd(lambda s: jittered_cholesky(K, 1e-2, s)[0]))(2.0)
    expected = jax.jit(jax.jacfwd(plain_scale))(2.0)
    assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_those_of_the_factor(outer):
    theta = jnp.array([0.3, 0.5])

    def second(f):
        total = lambda t: jnp.sum(jnp.sin(f(t)))  # noqa: E731
        return jax.jit(outer(jax.grad(total)))(theta)

    got = second(lambda t: jittered_cholesky(kernel_like(t), 1e-2)[0])
    assert_allclose(got, second(lambda t: plain(t, 1e-2)[0]), rtol=1e-9)


def test_value_and_gradient_factorise_once():
    def loss(theta):
        L, jitter = jittered_cholesky(kernel_like(theta))
        return jnp.sum(jnp.log(jnp.diagonal(L))) + jitter

    value = jax.make_jaxpr(loss)(jnp.array([0.3, 0.5]))
    both = jax.make_jaxpr(jax.value_and_grad(loss))(jnp.array([0.3, 0.5]))
    # In a loop, which has one turn where the first attempt succeeds.
    assert_array_equal(count_cholesky(value.jaxpr), [0, 1])
    assert_array_equal(count_cholesky(both.jaxpr), [0, 1])


# ---- triangular solves ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((), ()),
        ((), (2,)),
        ((), (5, 2)),
        ((2,), ()),
        ((2,), (2,)),
        ((1,), (2,)),
        ((2,), (1,)),
        ((2,), (5, 2)),
        ((5, 1), (2,)),
        ((5, 2), (5, 1)),
    ],
)
def test_solve_lower_broadcasts_batches(left, right):
    rng = np.random.default_rng(0)
    L = np.tril(rng.normal(size=(*left, 3, 3))) + 3 * np.eye(3)
    B = rng.normal(size=(*right, 3, 4))
    upper = np.triu(np.full((3, 3), 7.0), 1)  # must not be read
    assert_allclose(
        solve_lower(jnp.asarray(L + upper), jnp.asarray(B)),
        np.linalg.inv(L) @ B,
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize("jitter", [-1e-6, 5, math.nan, math.inf])
def test_a_jitter_that_is_no_size_is_refused(jitter):
    for function in (with_jitter, jittered_cholesky):
        with pytest.raises(ValueError, match="jitter is relative.*number from 0 to 1"):
            function(jnp.eye(2), jitter)

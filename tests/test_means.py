"""Mean functions: values, batches and pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp.means import Constant, Linear, as_mean, pca

X = np.random.default_rng(0).normal(size=(4, 2))
W = np.array([[0.5, -1.5], [2.0, 1.0], [0.0, 3.0]])
B = np.array([0.3, -0.3, 1.0])


def test_constant_is_the_same_at_every_input():
    assert_allclose(Constant(2.5)(X), np.full(4, 2.5))
    assert_allclose(Constant(B)(X), B[:, None] * np.ones(4))


def test_constant_takes_the_batch_and_the_dtype_of_the_inputs():
    mean = Constant(2.5)(jnp.zeros((3, 4, 2), jnp.float32))
    assert mean.shape == (3, 4) and mean.dtype == jnp.float32
    assert Constant(B)(jnp.zeros((3, 4, 2))).shape == (3, 4)


@pytest.mark.parametrize("bias", [0.0, 0.7])
def test_linear_is_a_sum_over_columns(bias):
    expected = [sum(x[d] * W[0][d] for d in range(2)) + bias for x in X]
    assert_allclose(Linear(W[0], bias)(X), expected, rtol=1e-12)


def test_each_linear_mean_of_a_batch_has_its_own_weights_and_bias():
    got = Linear(W, B)(X)
    assert_allclose(got, [X @ w + b for w, b in zip(W, B, strict=True)], rtol=1e-12)
    assert_allclose(Linear(W[0], B)(X), [X @ W[0] + b for b in B], rtol=1e-12)
    own = Linear(W, B)(np.stack([X, 2 * X, 3 * X]))
    expected = [(i + 1) * X @ W[i] + B[i] for i in range(3)]
    assert_allclose(own, expected, rtol=1e-12)


def test_none_is_zero_and_a_number_is_a_constant():
    assert_allclose(as_mean(None)(X), np.zeros(4))
    assert_allclose(as_mean(1.5)(X), np.full(4, 1.5))
    assert_allclose(as_mean(B)(X), B[:, None] * np.ones(4))


def test_a_pytree_stays_itself_and_its_leaves_are_parameters():
    linear = Linear(W[0], 0.7)
    assert as_mean(linear) is linear
    gradient = jax.grad(lambda mean: jnp.sum(mean(X)))(linear)
    assert_allclose(gradient.weights, X.sum(0), rtol=1e-12)
    assert_allclose(gradient.bias, 4.0)


def test_a_plain_function_is_static():
    mean = as_mean(np.sin)
    assert jax.tree.leaves(mean) == []
    assert as_mean(mean) is mean
    assert_allclose(mean(X), np.sin(X))
    again = jax.tree.unflatten(jax.tree.structure(mean), [])
    assert_allclose(again(X), np.sin(X))


def test_a_class_is_not_a_mean():
    with pytest.raises(
        TypeError, match=r"class Linear: give an instance.*Linear\(\.\.\.\)"
    ):
        as_mean(Linear)


def test_tables_of_integers_round_no_parameters():
    table = np.array([[1, 1], [2, 2], [3, 3]])
    assert_allclose(Constant(0.5)(table), 0.5)
    assert_allclose(Linear(np.array([0.5, 0.0]), 0.25)(table), [0.75, 1.25, 1.75])
    assert_allclose(np.abs(pca(table, 1)(table)), [[2**0.5, 0.0, 2**0.5]], atol=1e-12)
    assert_allclose(Constant(0.5)([[1.0], [2.0]]), 0.5)

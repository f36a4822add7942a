"""Gauss-Hermite rules against the moments of the normal distribution."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp.linalg import gauss_hermite, tensor_grid


def normal_moment(power):
    """E[x**power] for standard normal x."""
    return 0.0 if power % 2 else float(math.prod(range(1, power, 2)))


@pytest.mark.parametrize("num_points", [1, 2, 5, 20])
def test_polynomials_up_to_degree_2S_minus_1_are_exact(num_points):
    nodes, weights = gauss_hermite(num_points)
    assert nodes.shape == weights.shape == (num_points,)
    for power in range(2 * num_points):
        terms = weights * nodes**power
        # Odd moments are sums of large terms of both signs.
        atol = 1e-14 * np.abs(terms).sum()
        assert_allclose(terms.sum(), normal_moment(power), rtol=1e-9, atol=atol)


def test_the_degree_2S_is_not_exact():
    nodes, weights = gauss_hermite(3)
    assert weights @ nodes**6 < normal_moment(6) - 1


def test_grid_has_the_product_weight_at_each_node():
    nodes, weights = np.array([1.0, 2.0, 4.0]), np.array([0.2, 0.3, 0.5])
    grid, product = tensor_grid(nodes, weights, 2)
    assert grid.shape == (9, 2) and product.shape == (9,)
    weight_of = dict(zip(nodes, weights, strict=True))
    assert len({tuple(x) for x in grid}) == 9
    for (x, y), weight in zip(grid, product, strict=True):
        assert_allclose(weight, weight_of[x] * weight_of[y], rtol=1e-12)


def test_grid_integrates_products_of_three_variables():
    grid, product = tensor_grid(*gauss_hermite(4), 3)
    got = product @ (grid[:, 0] ** 2 * grid[:, 1] ** 4 * grid[:, 2] ** 6)
    assert_allclose(got, 1 * 3 * 15, rtol=1e-9)


def test_grid_of_one_variable_is_the_rule_itself():
    nodes, weights = gauss_hermite(4)
    grid, product = tensor_grid(nodes, weights, 1)
    assert_allclose(grid[:, 0], nodes)
    assert_allclose(product, weights)

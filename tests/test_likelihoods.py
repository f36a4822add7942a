"""Warped GPs against other routes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer.util import log_density

from numpyro_sgp.likelihoods import (
    TanhWarp,
    WarpedNormal,
    warped_moments,
)

RNG = np.random.default_rng(0)
A, B, C = np.array([1.0, 0.4]), np.array([2.0, 5.0]), np.array([0.3, -1.0])
WARP = TanhWarp(A, B, C)
# Steep, wide and far apart, as fitted to the creep data.
STEEP = TanhWarp(np.exp([3.87, 3.89]), np.exp([1.59, -1.34]), np.array([0.79, -4.19]))


def t_by_loop(y, a, b, c):
    return y + sum(a[i] * np.tanh(b[i] * (y + c[i])) for i in range(len(a)))


# --- the warp


def test_warp_is_its_formula():
    y = RNG.normal(size=(4, 3))
    assert_allclose(WARP(y), t_by_loop(y, A, B, C), rtol=1e-12)


@settings(max_examples=30)
@given(
    log_a=st.lists(st.floats(-5, 5), min_size=3, max_size=3),
    log_b=st.lists(st.floats(-5, 5), min_size=3, max_size=3),
    c=st.lists(st.floats(-10, 10), min_size=3, max_size=3),
    sign=st.sampled_from([-1.0, 1.0]),
    y=st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5),
)
def test_inverse_undoes_the_warp(log_a, log_b, c, sign, y):
    warp = TanhWarp(sign * np.exp(log_a), sign * np.exp(log_b), np.array(c))
    y = np.array(y)
    z = warp(y)
    back = warp.inv(z)
    # t' >= 1: an error of rounding in z, whose terms are as large as this, bounds it.
    scale = np.abs(y) + np.exp(log_a).sum()
    assert np.all(np.abs(back - y) <= 20 * np.finfo(float).eps * scale)
    assert np.all(np.abs(warp(back) - z) <= 1e-9 * scale * (1 + np.exp(10)))


@pytest.mark.parametrize("warp", [WARP, STEEP, TanhWarp(0.0, 1.0, 0.0)])
def test_inverse_by_bisection(warp):
    z = np.linspace(-120.0, 120.0, 41)
    low, high = z - 200, z + 200
    for _ in range(80):
        middle = (low + high) / 2
        below = np.asarray(warp(middle)) < z
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    assert_allclose(warp.inv(z), middle, rtol=1e-12, atol=1e-12)


def test_inverse_leaves_what_is_not_finite():
    z = np.array([np.inf, -np.inf, np.nan, 0.5])
    got = WARP.inv(z)
    assert_array_equal(got[:3], z[:3])
    assert_allclose(WARP(got[3]), 0.5)


def test_inverse_in_float32():
    warp = TanhWarp(*(jnp.asarray(x, jnp.float32) for x in (A, B, C)))
    y = jnp.linspace(-5, 5, 50, dtype=jnp.float32)
    back = warp.inv(warp(y))
    assert back.dtype == jnp.float32
    assert_allclose(back, y, atol=1e-5)


@pytest.mark.slow
def test_gradients_through_the_inverse():
    z = 0.7

    def inverse(z, a, b, c):
        return TanhWarp(a, b, c).inv(z)

    check_grads(jax.jit(inverse), (z, A, B, C), 2, ["rev"], atol=1e-4, rtol=1e-4)
    # And by the inverse function's own derivative.
    y = float(WARP.inv(z))
    slope = np.gradient(t_by_loop(y + np.array([-1e-5, 0, 1e-5]), A, B, C), 1e-5)[1]
    assert_allclose(jax.jacfwd(inverse)(z, A, B, C), 1 / slope, rtol=1e-6)


def test_gradient_of_an_inverse_that_took_bisection_steps():
    z, step = np.linspace(-100, 100, 9), 1e-5
    got = jax.vmap(jax.grad(STEEP.inv))(z)
    difference = (STEEP.inv(z + step) - STEEP.inv(z - step)) / (2 * step)
    assert_allclose(got, difference, rtol=1e-5)


def test_jacobian_is_the_derivative():
    y = RNG.normal(size=5)
    expected = np.log(jax.vmap(jax.grad(WARP))(y))
    assert_allclose(WARP.log_abs_det_jacobian(y, None), expected, rtol=1e-12)
    assert_allclose(WARP.inv.log_abs_det_jacobian(WARP(y), y), -expected, rtol=1e-12)


def test_a_number_is_one_term_and_a_batch_has_a_warp_each():
    y = RNG.normal(size=3)
    assert_allclose(TanhWarp(1, 2, 0.5)(y), y + np.tanh(2 * (y + 0.5)), rtol=1e-12)
    a = np.stack([A, 2 * A, 3 * A])
    each = TanhWarp(a, B, C)
    assert each.batch_shape == (3,) and each.forward_shape((4, 1)) == (4, 3)
    expected = [t_by_loop(y[i], a[i], B, C) for i in range(3)]
    assert_allclose(each(y), expected, rtol=1e-12)
    assert_allclose(each.inv(np.array(expected)), y, rtol=1e-12)
    assert each.inv(0.3).shape == (3,)


def test_equality_and_pytree():
    leaves, tree = jax.tree.flatten(WARP)
    assert [leaf.shape for leaf in leaves] == [(2,)] * 3
    assert jax.tree.unflatten(tree, leaves) == WARP
    assert WARP != dist.transforms.ExpTransform()
    assert jax.jit(lambda warp, y: warp(y))(WARP, 0.3) == WARP(0.3)


@pytest.mark.parametrize(
    ("a", "b", "c", "message"),
    [
        (-1.0, 1.0, 0.0, "a \\* b >= 0 in every term"),
        (A, -B, C, "give their exponentials"),
        (np.nan, 1.0, 0.0, "a \\* b >= 0"),
        (np.ones(2), np.ones(3), 0.0, "do not broadcast"),
    ],
)
def test_bad_warps(a, b, c, message):
    for make in (TanhWarp, lambda a, b, c: WarpedNormal(0.0, 1.0, a, b, c)):
        with pytest.raises(ValueError, match=message):
            make(a, b, c)
    if message != "do not broadcast":
        with pytest.raises(ValueError, match=message):  # constants in a jitted model
            jax.jit(lambda y: TanhWarp(a, b, c)(y))(0.0)


# --- the likelihood


@pytest.mark.parametrize("loc", [-1.0, 0.7])
def test_density_by_a_numerical_change_of_variables(loc):
    y, step = np.linspace(-4, 4, 9), 1e-5
    z = t_by_loop(y, A, B, C)
    slope = (t_by_loop(y + step, A, B, C) - t_by_loop(y - step, A, B, C)) / (2 * step)
    expected = -0.5 * ((z - loc) / 0.8) ** 2 - np.log(0.8 * np.sqrt(2 * np.pi))
    got = WarpedNormal(loc, 0.8, A, B, C).log_prob(y)
    assert_allclose(got, expected + np.log(slope), rtol=1e-7)


def test_predictive_density_is_exact_where_f_is_gaussian():
    mean, variance, sigma, y = 0.3, 0.5, 0.4, np.linspace(-2, 2, 5)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    f = mean + np.sqrt(variance) * nodes[:, None]
    conditional = np.exp(WarpedNormal(f, sigma, A, B, C).log_prob(y))
    expected = np.log(weights @ conditional / weights.sum())
    got = WarpedNormal(mean, np.sqrt(variance + sigma**2), A, B, C).log_prob(y)
    assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.slow
def test_samples_cdf_and_quantiles_agree():
    warped = WarpedNormal(0.4, 0.8, A, B, C)
    q = np.array([0.01, 0.3, 0.5, 0.9])
    assert_allclose(warped.cdf(warped.icdf(q)), q, rtol=1e-10)
    draws = warped.sample(jax.random.key(0), (4000,))
    share = np.mean(np.asarray(draws)[:, None] <= np.asarray(warped.icdf(q)), axis=0)
    assert_allclose(share, q, atol=4 * 0.5 / np.sqrt(4000))
    assert_allclose(draws.mean(), warped.mean, atol=4 * np.sqrt(warped.variance / 4000))
    assert warped.has_rsample


def test_batch_shapes_broadcast():
    warped = WarpedNormal(np.zeros((4, 1)), np.ones(3), np.ones((3, 2)), B, C)
    assert warped.batch_shape == (4, 3) and warped.event_shape == ()
    log_prob = jax.eval_shape(warped.log_prob, np.zeros((2, 4, 3)))
    draws = jax.eval_shape(lambda key: warped.sample(key, (5,)), jax.random.key(0))
    moments = jax.eval_shape(lambda: (warped.mean, warped.variance))
    assert log_prob.shape == (2, 4, 3) and draws.shape == (5, 4, 3)
    assert [moment.shape for moment in moments] == [(4, 3), (4, 3)]
    assert warped.expand((2, 4, 3)).batch_shape == (2, 4, 3)
    assert WarpedNormal(0, 1, 1, 1, 0).log_prob(0).shape == ()


def test_arguments_are_validated_on_request():
    with pytest.raises(ValueError, match="scale"):
        WarpedNormal(0.0, -1.0, A, B, C, validate_args=True)


def test_warp_is_learnable_in_a_model():
    y = RNG.normal(size=6)

    def model(y):
        a = numpyro.sample("a", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", 6):
            numpyro.sample("y", WarpedNormal(0.1, 0.5, a, B, C), obs=y)

    def joint(a):
        return log_density(model, (y,), {}, {"a": a})[0]

    prior = dist.LogNormal(0.0, 1.0).log_prob(A).sum()
    likelihood = WarpedNormal(0.1, 0.5, A, B, C).log_prob(y).sum()
    assert_allclose(joint(A), prior + likelihood, rtol=1e-12)
    step = np.array([0.0, 1e-6])
    difference = (joint(A + step) - joint(A - step)) / 2e-6
    assert_allclose(jax.jit(jax.grad(joint))(A)[1], difference, rtol=1e-6)


def test_moments_by_a_fine_rule():
    mean, variance = np.array([-0.5, 1.0, 2.0]), np.array([0.2, 0.5, 1.0])
    got = warped_moments(mean, variance, WARP, num_points=64)
    z = np.linspace(-9, 9, 2001)[:, None]
    y = np.asarray(WARP.inv(mean + np.sqrt(variance) * z))
    weights = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    expected = (weights * y).sum(0)
    assert_allclose(got.mean, expected, rtol=1e-3)
    assert_allclose(got.variance, (weights * (y - expected) ** 2).sum(0), rtol=1e-2)
    upper, lower = (WARP.inv(mean + x * np.sqrt(variance)) for x in (1.2815516, -1.2815516))
    assert_allclose(got.quantile_variance, ((upper - lower) / 4) ** 2, rtol=1e-6)


def test_moments_of_no_warp_are_the_gaussian_ones():
    moments = warped_moments(1.5, np.array([0.3, 0.8]), TanhWarp(0.0, 1.0, 0.0))
    assert_allclose(moments.mean, [1.5, 1.5])
    assert_allclose(moments.variance, [0.3, 0.8])
    assert_allclose(moments.quantile_variance, np.array([0.3, 0.8]) * 0.4106, rtol=1e-4)


def test_moments_of_a_batch_of_warps():
    a = np.stack([A, 2 * A, 3 * A])
    mean, variance = np.array([[0.1], [0.7]]), np.array([0.2, 0.4, 0.6])
    got = warped_moments(mean, variance, TanhWarp(a, B, C))
    assert got.mean.shape == (2, 3)
    for i, k in np.ndindex(2, 3):
        one = warped_moments(mean[i, 0], variance[k], TanhWarp(a[k], B, C))
        assert_allclose([moment[i, k] for moment in got], one, rtol=1e-12)

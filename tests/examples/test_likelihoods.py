"""Regression networks, travel times and intensities, against loops and quadrature."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from examples.likelihoods import (
    gprn_mean,
    lgcp_intensity_moments,
    seismic_travel_times,
)

RNG = np.random.default_rng(0)


def test_regression_network_by_a_loop():
    P, Q, N = 3, 2, 4
    f = RNG.normal(size=(5, P * Q + Q, N))
    expected = np.zeros((5, P, N))
    for s, p, n in np.ndindex(5, P, N):
        for q in range(Q):
            expected[s, p, n] += f[s, p * Q + q, n] * f[s, P * Q + q, n]
    assert_allclose(gprn_mean(f, P, Q), expected, rtol=1e-12)
    assert_allclose(gprn_mean(f[0], P, Q), expected[0], rtol=1e-12)


@pytest.mark.parametrize("shape", [(7, 4), (8,), (4, 8)])
def test_regression_network_names_the_shape(shape):
    with pytest.raises(ValueError, match=r"f of shape \(\.\.\., 8, N\), 6 weights"):
        gprn_mean(np.zeros(shape), 3, 2)


@pytest.mark.parametrize("chain", ["noise_free", "observed"])
def test_travel_times_by_a_loop(chain):
    P, N = 4, 3
    depth = np.cumsum(RNG.uniform(100, 500, size=(2, P, N)), axis=1)
    velocity = RNG.uniform(1900, 3700, size=(P, N))
    times = RNG.uniform(0.1, 2.0, size=(P, N))
    expected = np.zeros((2, P, N))
    for s, p, n in np.ndindex(2, P, N):
        if p == 0:
            expected[s, p, n] = 2 * depth[s, p, n] / velocity[p, n]
        else:
            before = expected[s, p - 1, n] if chain == "noise_free" else times[p - 1, n]
            thickness = depth[s, p, n] - depth[s, p - 1, n]
            expected[s, p, n] = before + 2 * thickness / velocity[p, n]
    observed = times if chain == "observed" else None
    got = seismic_travel_times(depth, velocity, chain, observed)
    assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(chain="other"), "chain must be 'noise_free' or 'observed', got 'other'"),
        (dict(chain="observed"), "give times"),
        (dict(times=np.ones((2, 3))), "give times"),
        (dict(depth=np.ones(3), velocity=1.0), r"shape \(\.\.\., P, N\)"),
    ],
)
def test_bad_travel_times(arguments, message):
    arguments = dict(depth=np.ones((2, 3)), velocity=np.ones((2, 3))) | arguments
    with pytest.raises(ValueError, match=message):
        seismic_travel_times(**arguments)


def test_intensity_moments_by_quadrature():
    mean, variance, offset = np.array([-1.0, 0.5]), np.array([0.2, 0.7]), np.log(0.3)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    intensity = np.exp(mean + np.sqrt(variance) * nodes[:, None] + offset)
    got_mean, got_variance = lgcp_intensity_moments(mean, variance, offset)
    assert_allclose(got_mean, weights @ intensity, rtol=1e-10)
    expected = weights @ (intensity - weights @ intensity) ** 2
    assert_allclose(got_variance, expected, rtol=1e-10)
    # A small variance does not cancel.
    assert_allclose(lgcp_intensity_moments(0.0, 1e-18)[1], 1e-18)

"""Snelson's set, and the part of it that SOLVE-GP was shown on."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from numpyro_sgp.datasets import snelson, snelson_subset


def test_shapes_and_ranges():
    X, y, X_test = snelson()
    assert X.shape == (200, 1)
    assert y.shape == (200,)
    assert X_test.shape == (301, 1)
    assert_allclose([X.min(), X.max()], [0.059, 5.966], atol=5e-4)
    assert_allclose(X_test[:, 0], np.linspace(-3, 10, 301), atol=1e-6)
    assert_allclose([X[0, 0], y[0]], [5.7007757, -0.4536778], rtol=1e-12)


def test_subset_is_the_hundred_points_of_the_authors_in_their_order():
    data, part = snelson(), snelson_subset()
    chosen = np.random.RandomState(1234).permutation(200)[:100]
    # First indices written out: they stand for the generator's stream.
    assert_array_equal(chosen[:5], [197, 157, 31, 48, 63])
    assert_array_equal(part.X, np.asarray(data.X)[chosen])
    assert_array_equal(part.y, np.asarray(data.y)[chosen])
    assert_array_equal(part.X_test, data.X_test)


def test_exact_evidence_of_the_subset():
    X, y, _ = map(np.asarray, snelson_subset())
    # Optimum of an exact GP with a squared-exponential kernel, found independently:
    # lengthscale 0.609, variance 0.777, noise variance 0.0896, evidence -41.655.
    covariance = 0.777 * np.exp(-0.5 * ((X - X.T) / 0.609) ** 2) + 0.0896 * np.eye(100)
    _, logdet = np.linalg.slogdet(covariance)
    fit = y @ np.linalg.solve(covariance, y)
    evidence = -0.5 * (fit + logdet + 100 * np.log(2 * np.pi))
    assert_allclose(evidence, -41.655, atol=1e-3)

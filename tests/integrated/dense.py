"""Dense linear algebra in NumPy, which knows nothing of the package."""

import numpy as np

import numpyro_sgp as sgp

JITTER = 1e-10  # relative; of K_uu, so that sds are right to some 1e-8


def rbf(X, variance, lengthscale):
    return variance * np.exp(-0.5 * (X - X.T) ** 2 / lengthscale**2)


def matern12(X, variance, lengthscale):
    return variance * np.exp(-np.abs(X - X.T) / lengthscale)


def conditional(prior, maps, y, noise):
    """
    Mean and covariance of parts of a Gaussian vector given y = sum of maps of it and noise.

    :param prior: covariance of all, a list of blocks.
    :param maps: matrices from each block to the rows.
    """
    K = np.zeros((sum(map(len, prior)),) * 2)
    ends = np.cumsum([0, *map(len, prior)])
    for block, start, end in zip(prior, ends, ends[1:], strict=False):
        K[start:end, start:end] = block
    H = np.concatenate(maps, axis=1)
    gain = np.linalg.solve(H @ K @ H.T + noise**2 * np.eye(len(y)), H @ K).T
    mean, covariance = gain @ y, K - gain @ H @ K
    parts = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    return [mean[p] for p in parts], [covariance[p, p] for p in parts], covariance


def log_evidence(prior, maps, y, noise):
    covariance = noise**2 * np.eye(len(y))
    for block, part in zip(prior, maps, strict=True):
        covariance += part @ block @ part.T
    sign, log_det = np.linalg.slogdet(2 * np.pi * covariance)
    return -0.5 * (log_det + y @ np.linalg.solve(covariance, y))


def options(X, **more):
    return sgp.SVGP(inducing=X, train_inducing=False, jitter=JITTER, **more)


def rows(number, seed):
    rng = np.random.default_rng(seed)
    return rng, np.sort(rng.uniform(0.0, 5.0, (number, 1)), axis=0)


def assert_is(q, mean, covariance, tolerance=1e-6):
    np.testing.assert_allclose(q.mean, mean, atol=tolerance)
    np.testing.assert_allclose(q.sd, np.sqrt(np.diag(covariance)), atol=tolerance)

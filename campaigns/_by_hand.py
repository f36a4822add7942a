"""
Sparse regression by hand: the collapsed bound (Titsias 2009) in plain NumPy, and SciPy's
L-BFGS over its hyperparameters and inducing points with differences for derivatives.
"""

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import minimize

#: Relative jitter, that of the package in float64.
JITTER = 1e-8
#: Lengthscales that it starts from, in standard deviations of the inputs.
STARTS = 1.0, 0.4, 2.5, 0.15


def log_priors(values) -> float:
    """Log density of standard log-normal variables, by their logarithms."""
    return float(np.sum(-0.5 * values**2 - values - 0.5 * np.log(2.0 * np.pi)))


def collapsed(logs, Z, X, y) -> float:
    """
    The bound with an RBF kernel.

    :param logs: logarithms of variance, lengthscale and noise.
    """
    variance, length, noise = np.exp(logs)

    def kernel(A, B):
        return variance * np.exp(-0.5 * (((A[:, None] - B) / length) ** 2).sum(-1))

    N, M = len(X), len(Z)
    L = np.linalg.cholesky(kernel(Z, Z) + JITTER * variance * np.eye(M))
    A = solve_triangular(L, kernel(Z, X), lower=True) / noise
    LB = np.linalg.cholesky(np.eye(M) + A @ A.T)
    c = solve_triangular(LB, A @ y, lower=True) / noise
    bound = -0.5 * N * np.log(2.0 * np.pi * noise**2) - np.log(np.diag(LB)).sum()
    bound += 0.5 * (c @ c - y @ y / noise**2)
    return bound - 0.5 * (N * variance / noise**2 - (A**2).sum())


def best(X, y, M, rng) -> float:
    """The best collapsed bound, priors counted, from some starts."""
    D, found = X.shape[1], -np.inf

    def loss(x):
        try:
            return -collapsed(x[:3], x[3:].reshape(M, D), X, y) - log_priors(x[:3])
        except np.linalg.LinAlgError:
            return 1e10

    for scale in STARTS:
        Z = X[rng.choice(len(X), M, replace=False)]
        begin = np.array([0.0, np.log(scale * X.std()), -1.0])
        with np.errstate(all="ignore"):
            result = minimize(
                loss,
                np.concatenate([begin, Z.ravel()]),
                method="L-BFGS-B",
                bounds=[(-12.0, 12.0)] * 3 + [(None, None)] * M * D,
                options={"maxiter": 500, "maxfun": 20_000},
            )
        found = max(found, -float(result.fun))
    return found

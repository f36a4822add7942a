"""Student distributions that nodes are drawn from, and the weights of these."""

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import gammaincinv, gammaln, logsumexp, ndtri

ROUND = 128  #: nodes of a round
_FREEDOM = 5.0  # of the Student t that nodes are drawn from
WIDER = 1.2  #: than what was found, are standard deviations of the next round
_HELD = 4  # nodes for each hyperparameter hold a covariance
_LEAST_POWER = 1e-2  # of weights


def next_proposal(z, weights, root):
    """
    Mean and root of the covariance of nodes, by their weights; by a power of these where so
    few count that they would hold no covariance.

    :param root: of the proposal before.
    """
    dim = z.shape[1]
    if not np.all(np.isfinite(weights)):  # no node has a density
        return np.zeros(dim), 0.5 * root
    power, tempered = 1.0, weights
    while np.sum(tempered**2) * _HELD * dim > 1.0 and power > _LEAST_POWER:
        power *= 0.8
        tempered = weights**power / np.sum(weights**power)
    centre = tempered @ z
    spread = (z - centre).T * tempered @ (z - centre)
    return centre, WIDER * np.linalg.cholesky(spread + 1e-3 * np.eye(dim))


def student_draws(centre, root, number, seed):
    """Quasi-random draws from a Student t."""
    from scipy.stats import qmc  # slow to import

    power = (number - 1).bit_length()  # of two: SciPy warns of other numbers of points
    points = qmc.Sobol(len(root) + 1, rng=seed).random_base2(power)[:number]
    points = np.clip(points, 1e-9, 1 - 1e-9)
    chi2 = 2.0 * gammaincinv(0.5 * _FREEDOM, points[:, 0])
    return centre + np.sqrt(_FREEDOM / chi2)[:, None] * (ndtri(points[:, 1:]) @ root.T)


def weights_of(z, nodes, proposals, top):
    """Weights of nodes drawn from several proposals, and the log of their mean."""
    log_q = np.full(len(z), -np.inf)
    counts = [ROUND] * len(proposals)
    counts[-1] = len(z) - sum(counts[:-1])  # the last one may have ended early
    for (centre, root), count in zip(proposals, counts, strict=True):
        if count == 0:
            continue
        log_q = np.logaddexp(log_q, np.log(count / len(z)) + _log_student(z, centre, root))
    values = np.array([node.value for node in nodes]) - top
    log_weights = values - log_q
    total = logsumexp(log_weights)
    return np.exp(log_weights - total), total - np.log(len(z))


def _log_student(z, centre, root):
    """Log density, by the root: SciPy refuses covariances that are as good as singular."""
    dim, half = len(root), 0.5 * (_FREEDOM + len(root))
    away = solve_triangular(root, (z - centre).T, lower=True)
    log_scale = np.sum(np.log(np.diag(root))) + 0.5 * dim * np.log(np.pi * _FREEDOM)
    constant = gammaln(half) - gammaln(0.5 * _FREEDOM) - log_scale
    return constant - half * np.log1p(np.sum(away**2, axis=0) / _FREEDOM)

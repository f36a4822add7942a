"""Parameters of inverse-free posteriors at a Gaussian q(u) that is known, in NumPy."""

import numpy as np

#: Relative to the prior's, the variances of q(u) that pseudo-noise stands for.
_MOST, _LEAST = 1.0 - 1e-4, 1e-10


def pseudo_observations(factor, mu, sqrt) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""
    The pseudo-noise :math:`\tilde S = (S^{-1} - K^{-1})^{-1}` of which :math:`N(m, S)` is
    the posterior, as far as S is below K, with :math:`(K + \tilde S) \hat m` and
    :math:`\hat m = K^{-1} m`.

    :param factor: lower factor of K, ``(*batch, M, M)``.
    :param mu: whitened mean, ``(*batch, M)``.
    :param sqrt: whitened root of S, ``(*batch, M, M)``.
    :return: the lower factor of the noise, what is observed, and the weights.
    """
    L, mu, sqrt = _doubles(factor, mu, sqrt)
    # In whitened coordinates S = V diag(s) V', and the noise has s / (1 - s) for s.
    V, roots, _ = np.linalg.svd(sqrt)
    s = np.clip(roots**2, _LEAST, _MOST)
    root = L @ (V * np.sqrt(s / (1.0 - s))[..., None, :])
    observed = L @ (V @ ((V.mT @ mu[..., None]) / (1.0 - s)[..., None]))
    return _lower(root), observed[..., 0], weights_of(L, mu)


def with_diagonal_noise(factor, noise, weights) -> tuple[np.ndarray, np.ndarray]:
    r"""
    Independent pseudo-noise of the same precisions, and what is observed under it.

    :param noise: lower factor of pseudo-noise.
    :return: variances, ``(*batch, M)``, and :math:`(K + \tilde S) \hat m`.
    """
    L, inverse = np.asarray(factor, float), np.linalg.inv(noise)
    variances = 1.0 / np.sum(inverse**2, axis=-2)
    return variances, (L @ (L.mT @ weights[..., None]))[..., 0] + variances * weights


def precisions(factor, mu, sqrt) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""
    :math:`\hat m = K^{-1} m`, the lower factor of :math:`\hat S = K^{-1} S K^{-1}`, and
    that of :math:`T = K^{-1}`, of the same parameters.
    """
    L, mu, sqrt = _doubles(factor, mu, sqrt)
    eye = np.broadcast_to(np.eye(L.shape[-1]), L.shape)
    inverse = np.linalg.solve(L.mT, eye)
    return weights_of(L, mu), _lower(inverse @ sqrt), _lower(inverse)


def weights_of(factor, mu) -> np.ndarray:
    r""":math:`\hat m = L^{-\top} \mu`."""
    return np.linalg.solve(factor.mT, mu[..., None])[..., 0]


def _doubles(factor, mu, sqrt):
    """In 64 bits, with the factor of K for each latent function."""
    mu, sqrt = np.asarray(mu, float), np.asarray(sqrt, float)
    return np.broadcast_to(np.asarray(factor, float), sqrt.shape), mu, sqrt


def _lower(root) -> np.ndarray:
    """The lower factor, of positive diagonal, of the same matrix ``root @ root.T``."""
    R = np.asarray(np.linalg.qr(root.mT, mode="r"))
    signs = np.where(np.diagonal(R, axis1=-2, axis2=-1) < 0.0, -1.0, 1.0)
    return (R * signs[..., :, None]).mT

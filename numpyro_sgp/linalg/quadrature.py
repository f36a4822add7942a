"""Rules for expectations under independent standard normals."""

import numpy as np

_STABLE = 150  # nodes from which on NumPy's lose digits, and all from 372 on
_SIDE = 8.0  # standard deviations, beyond which there is less than rounding


def gauss_hermite(num_points: int) -> tuple[np.ndarray, np.ndarray]:
    r"""
    Nodes and weights with :math:`E[g(x)] \approx \sum_s w_s g(x_s)`,
    :math:`x \sim N(0, 1)`; exact for polynomials of degree ``2 num_points - 1``.

    :param num_points: number of nodes S.
    :return: nodes and weights, each of shape ``(S,)``, in float64.

    >>> nodes, weights = gauss_hermite(3)
    >>> round(float(weights @ nodes**4), 6)
    3.0
    """
    # 25.4.46 of Abramowitz and Stegun, of the weight exp(-x^2 / 2).
    if num_points > _STABLE:
        from scipy.special import roots_hermitenorm

        nodes, weights = roots_hermitenorm(num_points)
    else:
        nodes, weights = np.polynomial.hermite_e.hermegauss(num_points)
    return nodes, weights / weights.sum()


def trapezoid(num_points: int, side: float = _SIDE) -> tuple[np.ndarray, np.ndarray]:
    """
    Evenly spaced nodes over some standard deviations to either side, and their weights.

    :param num_points: number of nodes S; a single one is at zero.
    :param side: so many; eight by default.
    :return: as :func:`gauss_hermite`.

    >>> nodes, weights = trapezoid(40)
    >>> round(float(weights @ nodes**4), 6)
    3.0
    """
    spacing = 2.0 * side / num_points
    nodes = (np.arange(num_points) - 0.5 * (num_points - 1)) * spacing
    weights = np.exp(-0.5 * nodes**2)
    return nodes, weights / weights.sum()


def tensor_grid(
    nodes: np.ndarray, weights: np.ndarray, dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    The product rule for ``dim`` independent variables.

    :param nodes: nodes of the rule for one variable, shape ``(S,)``.
    :param weights: its weights, shape ``(S,)``.
    :param dim: number of variables.
    :return: nodes of shape ``(S**dim, dim)`` and weights of shape ``(S**dim,)``.
    """
    grid = np.stack(np.meshgrid(*[nodes] * dim, indexing="ij"), axis=-1)
    product = np.prod(np.meshgrid(*[weights] * dim, indexing="ij"), axis=0)
    return grid.reshape(-1, dim), product.reshape(-1)

"""Snelson's one-dimensional regression set."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp.datasets._read import read_columns


class Snelson(NamedTuple):
    """A one-dimensional regression problem; see `snelson`."""

    X: Array
    """Training inputs, shape ``(N, 1)``."""

    y: Array
    """Training targets, shape ``(N,)``."""

    X_test: Array
    """Inputs at which to predict, evenly spaced from -3 to 10, shape ``(301, 1)``."""


def snelson() -> Snelson:
    """
    Snelson's one-dimensional set [1], on which sparse Gaussian processes are drawn.

    200 noisy values of a smooth function at inputs between 0.06 and 5.97, in no order,
    and 301 test inputs that reach well beyond; test targets were never published. There
    are no units, and nothing is standardised. No licence is stated.

    .. code-block:: pycon

        >>> from numpyro_sgp.datasets import snelson
        >>> X, y, X_test = snelson()
        >>> X.shape, y.shape, X_test.shape
        ((200, 1), (200,), (301, 1))

    **References:**

    1. Snelson, E., Ghahramani, Z. (2005). Sparse Gaussian processes using
       pseudo-inputs. NIPS 18. Files as in https://github.com/thjashin/solvegp
       (``data/snelson``).

    :return: a :class:`Snelson` with ``N = 200``.
    """
    x, y = read_columns("snelson_train.csv", "x", "y")
    (x_test,) = read_columns("snelson_test_inputs.csv", "x")
    return Snelson(jnp.asarray(x[:, None]), jnp.asarray(y), jnp.asarray(x_test[:, None]))


def snelson_subset() -> Snelson:
    """
    The 100 training points of :func:`snelson` on which SOLVE-GP was shown [1].

    They are the first hundred of ``numpy.random.RandomState(1234).permutation(200)``,
    in the order of the permutation.

    **References:**

    1. Shi, J., Titsias, M. K., Mnih, A. (2020). Sparse orthogonal variational inference
       for Gaussian processes. AISTATS. https://arxiv.org/abs/1910.10596 (Figure 2; the
       permutation is that of the authors' code).

    :return: a :class:`Snelson` with ``N = 100`` and all test inputs.
    """
    X, y, X_test = snelson()
    chosen = np.random.RandomState(1234).permutation(200)[:100]
    return Snelson(X[chosen], y[chosen], X_test)

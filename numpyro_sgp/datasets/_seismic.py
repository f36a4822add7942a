"""Seismic inversion in the Otway basin, read from a folder that the user names."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from numpyro_sgp.datasets._folder import locate, read_table

COLUMNS = ("t1", "t2", "t3", "t4", "x")
TABLE = (
    "the 113 rows of data.csv (https://github.com/Karl-Krauth/Sparse-GP, "
    "experiments/data/seismic) with the header t1,t2,t3,t4,x."
)


def _constants(values, factor=1.0):
    """An array that all surveys share, so that none may write to it."""
    array = factor * np.array(values)
    array.flags.writeable = False
    return array


DEPTHS = (200.0, 500.0, 1600.0, 2200.0)
VELOCITIES = (1950.0, 2300.0, 2750.0, 3650.0)


class Seismic(NamedTuple):
    """Travel times at sites along a line, and the published prior; see `seismic`."""

    X: np.ndarray
    """Position along the line in metres, shape ``(113, 1)``."""

    times: np.ndarray
    """Two-way travel times to the four interfaces in seconds, shape ``(4, 113)``."""

    depth_mean: np.ndarray = _constants(DEPTHS)
    """Prior means of the depths of the interfaces in metres, shape ``(4,)``."""

    depth_sd: np.ndarray = _constants(DEPTHS, 0.15)
    """Prior standard deviations of the depths in metres, shape ``(4,)``."""

    velocity_mean: np.ndarray = _constants(VELOCITIES)
    """Prior means of the velocities of the layers in metres per second, shape ``(4,)``."""

    velocity_sd: np.ndarray = _constants(VELOCITIES, 0.1)
    """Prior standard deviations of the velocities, shape ``(4,)``."""

    noise_sd: np.ndarray = _constants((0.025, 0.05, 0.075, 0.1))
    """Standard deviations of the noise of the times in seconds, shape ``(4,)``."""


def seismic(folder: str | Path) -> Seismic:
    """
    Two-way travel times of sound to four interfaces at 113 sites, 400 m apart, in the
    Otway basin, with prior and noise of the published experiment [1, 2].

    The task is to find depths and velocities from the times, by
    ``seismic_travel_times`` of ``examples/likelihoods.py``; there is no test set. Prior
    standard deviations are 15 % of a mean depth and 10 % of a mean velocity. In [2] the
    kernel has lengthscale 1 on positions in metres, so that its sites are independent:
    standardise ``X``, or let the lengthscale be hundreds of metres, to tie them together.

    Reads ``seismic/seismic.csv.gz`` (columns t1, t2, t3, t4 in seconds, x in metres).

    >>> from numpyro_sgp.datasets import seismic
    >>> seismic("no_such_folder")
    Traceback (most recent call last):
    FileNotFoundError: No file seismic/seismic.csv.gz in the folder 'no_such_folder' ...

    **References:**

    1. Bonilla, E. V., Steinberg, D., Reid, A. (2016). Extended and unscented kitchen
       sinks. ICML.
    2. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63.

    :param folder: the folder that holds ``seismic``.
    :return: a :class:`Seismic` in float64.
    :raises FileNotFoundError: if the file is missing; says what it holds and its source.
    :raises ValueError: if a column is missing.
    """
    values = read_table(locate(folder, "seismic/seismic.csv.gz", TABLE), COLUMNS)
    return Seismic(X=values[:, 4:], times=values[:, :4].T)

"""How well observations were predicted."""

from dataclasses import dataclass

import numpy as np
from jax import Array


@dataclass(frozen=True, eq=False)
class LogScore:
    """
    How well the values of one observed site were predicted.

    :param mean: mean log predictive density of a row, over the rows that are observed.
    :param rows: log predictive density of each row, shape ``(N,)``, of all that a row has
        (several numbers in a row together); NaN where a mask leaves all of it out.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.fitting import LogScore
    >>> LogScore(-1.5, jnp.array([-1.0, -2.0, jnp.nan]))
    -1.5 (mean log predictive density of 2 rows)
    """

    mean: float
    rows: Array

    def __repr__(self):
        number = int((~np.isnan(np.asarray(self.rows))).sum())
        return f"{self.mean:.6g} (mean log predictive density of {number} rows)"

"""The British coal-mining disasters, 1851-1962."""

import operator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_sgp.datasets._read import read_columns

NUM_DAYS = 40_550  # 15 March 1851 is day 1, 22 March 1962 the last


class CoalMining(NamedTuple):
    """Dates of the disasters and their counts in equal bins; see `coal_mining`."""

    events_day: Array
    """Day of each event, whole numbers in increasing order, shape ``(191,)``."""

    bin_centre_day: Array
    """Middle of each bin in days, shape ``(num_bins,)``."""

    count: Array  # type: ignore[assignment]
    """Number of events in each bin, integers, shape ``(num_bins,)``."""

    @property
    def bin_width_day(self) -> float:
        """Width of a bin in days; ``count / bin_width_day`` is a rate per day."""
        return NUM_DAYS / len(self.count)


def coal_mining(num_bins: int = 811) -> CoalMining:
    """
    The 191 explosions in British coal mines that killed ten or more men, from
    15 March 1851 (day 1) to 22 March 1962 (day 40550) [1].

    The 40550 days are cut into ``num_bins`` bins of equal width. The default gives bins
    of 50 days, as in [2] and [3], which fit a log-Gaussian Cox process to the counts.

    The dates are facts; the repository that they were taken from [4] states no licence.

    .. code-block:: pycon

        >>> from numpyro_sgp.datasets import coal_mining, days_to_year
        >>> coal = coal_mining()
        >>> coal.count.shape, int(coal.count.sum()), int(coal.count.max())
        ((811,), 191, 4)
        >>> print(days_to_year(coal.bin_centre_day)[:3])
        [1851.27 1851.41 1851.55]

    **References:**

    1. Jarrett, R. G. (1979). A note on the intervals between coal-mining disasters.
       Biometrika 66(1), 191-193.
    2. Murray, I., Adams, R. P., MacKay, D. J. C. (2010). Elliptical slice sampling.
       AISTATS.
    3. Bonilla, E. V., Krauth, K., Dezfouli, A. (2019). Generic inference in latent
       Gaussian process models. Journal of Machine Learning Research 20(117), 1-63.
    4. https://github.com/Karl-Krauth/Sparse-GP

    :param num_bins: how many bins.
    :return: a :class:`CoalMining` of JAX arrays. Two events fell on 6 December 1875, so
        one day occurs twice.
    """
    num_bins = operator.index(num_bins)
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}.")
    (events,) = read_columns("coal_events.csv", "day")
    # Day d lasts from d - 1/2 to d + 1/2: an event lies inside a bin, not on an edge.
    edges = np.linspace(0.5, NUM_DAYS + 0.5, num_bins + 1)
    count, _ = np.histogram(events, edges)
    return CoalMining(
        events_day=jnp.asarray(events),
        bin_centre_day=jnp.asarray((edges[:-1] + edges[1:]) / 2),
        count=jnp.asarray(count),
    )


def days_to_year(day: ArrayLike) -> Array:
    """
    Calendar year of a day of :func:`coal_mining`, as a decimal number, for plots.

    ``day / 365 + 1851.2026``, which is the axis of the figure in reference 3 there. It
    passes over the leap days, so that it runs ahead of the calendar by up to a month:
    the last day, 22 March 1962, becomes 1962.30 where the calendar has 1962.22.

    :param day: days, with 15 March 1851 as day 1; any shape.
    :return: years, of the same shape.
    """
    return jnp.asarray(day) / 365 + 1851.2026

"""What to say of observed rows without a density."""

import warnings

import numpy as np
from numpyro.util import find_stack_level


def warn_of_rows(name, log_density, counts):
    """
    Warns of rows without a density.

    :param name: of an observed site.
    :param counts: which rows have an observation.
    """
    rows = np.isneginf(log_density) & counts
    if np.any(rows):
        warnings.warn(
            f"The density of {np.sum(rows)} observed rows of site '{name}' (first: "
            f"{np.argmax(rows)}) is zero: they are outside of the support of the "
            "likelihood (classes go from 0, counts to their total), or too far from it. "
            "The mean over rows is -inf.",
            stacklevel=find_stack_level(),
        )
    rows = np.isnan(log_density) & counts
    if np.any(rows):
        warnings.warn(
            f"The log density of {np.sum(rows)} observed rows of site '{name}' (first: "
            f"{np.argmax(rows)}) is NaN: the likelihood is none at some values of f that "
            "the posterior has. Means over rows leave these rows out.",
            stacklevel=find_stack_level(),
        )

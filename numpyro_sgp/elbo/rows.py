"""Log densities of sites by row of the data."""

import jax.numpy as jnp
from jax import Array
from numpyro.distributions.util import scale_and_mask


def log_prob_array(site, scaled: bool = True) -> Array:
    """
    Log density of the value at a site, scaled as plates say and masked, of the site's
    batch shape.

    :param scaled: whether plates scale it.
    """
    if site["intermediates"]:
        log_prob = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        log_prob = site["fn"].log_prob(site["value"])
    return scale_and_mask(log_prob, site["scale"]) if scaled else log_prob


def by_row(log_prob: Array, num_rows: int) -> Array | None:
    """
    A log density summed over all axes but that of the rows of X, the last of their length.

    :return: shape ``(num_rows,)``, or None if there is no such axis.
    """
    axes = [i for i, size in enumerate(log_prob.shape) if size == num_rows]
    if not axes:
        return None
    return jnp.sum(log_prob, axis=tuple(i for i in range(log_prob.ndim) if i != axes[-1]))

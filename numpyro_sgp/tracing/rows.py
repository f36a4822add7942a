"""Log densities of sites by row of the data."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from numpyro.ops.provenance import eval_provenance


def by_row(log_prob: Array, num_rows: int) -> Array | None:
    """
    A log density summed over all axes but that of the rows of X.

    :return: shape ``(num_rows,)``, or None if no axis has that length.
    :raises ValueError: if several axes have.
    """
    axes = [i for i, size in enumerate(log_prob.shape) if size == num_rows]
    if not axes:
        return None
    if len(axes) > 1 and num_rows > 1:
        raise ValueError(
            f"A log density of shape {log_prob.shape} has {len(axes)} axes that may be the "
            f"{num_rows} rows of X. Put the others into the event: fn.to_event(1), with "
            "the data plate outermost."
        )
    return jnp.sum(log_prob, axis=tuple(i for i in range(log_prob.ndim) if i != axes[-1]))


def sites_on_f(
    log_probs: Callable[[dict[str, Array]], dict[str, Array]], f: dict[str, Array]
) -> set[str]:
    """
    Names of the sites whose log density depends on the values of GP sites.

    :param log_probs: from values of GP sites to log densities by site; it is only traced.
    :param f: values of GP sites, or their shapes and dtypes.
    """
    values = {f"f{i}": jnp.zeros(v.shape, v.dtype) for i, v in enumerate(f.values())}

    def run(**values):
        return log_probs(dict(zip(f, values.values(), strict=True)))

    return {name for name, origin in eval_provenance(run, **values).items() if origin}

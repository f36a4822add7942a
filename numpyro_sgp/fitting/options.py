"""Which keyword arguments of a fit are options of the model, and which are data."""

import inspect
from collections.abc import Callable, Sized
from numbers import Number

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.distributions.arguments import named_arguments
from numpyro_sgp.predictive.row_batches import count_rows


def with_options(
    guide,
    known: tuple | None,
    args: tuple,
    kwargs: dict,
    *methods: Callable,
    num_rows: int | None = None,
) -> dict:
    """
    Keyword arguments with those of a fit that are no data: flags, names, functions, numbers
    such as that of groups, without which the model would be another one; and arrays and
    lists, but for those with as many rows, or entries along another axis, as the data have.

    :param guide: that was trained.
    :param known: ``(args, kwargs)`` of the fit.
    :param args: of now; what is given by place is not taken from the fit.
    :param kwargs: of now, which go before those of the fit.
    :param methods: which take them, beside arguments of their own.
    :param num_rows: rows of the data of the fit; those of its first array if None.
    :return: keyword arguments for the model.
    """
    if not known or not known[1]:
        return kwargs
    given = {name for name, _ in named_arguments(guide.model, args, {})}
    given.update(*(inspect.signature(method).parameters for method in methods))
    setup = guide.known()
    observed = [s["value"] for s in setup.trace.values() if s.get("is_observed")]
    numbers = [float(value) for value in observed if np.ndim(value) == 0]
    rows = count_rows(*known)  # of a file two, of all arrays that had those of the data
    num_rows = num_rows or rows
    sizes = {num_rows, rows}.union(*map(np.shape, observed)) - {1}

    def is_data(value) -> bool:
        if isinstance(value, bool | np.bool_ | str | None):
            return False
        shape = getattr(value, "shape", () if isinstance(value, Number) else None)
        if shape == ():
            dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
            if jnp.issubdtype(dtype, jnp.integer):
                return bool(setup.subsampled or value == num_rows) or int(value) in numbers
            return jnp.issubdtype(dtype, jnp.floating) and float(value) in numbers
        if isinstance(shape, tuple):
            return bool(sizes.intersection(shape))
        return isinstance(value, Sized) and len(value) == num_rows

    def has_data(value) -> bool:
        return any(map(is_data, [value, *jax.tree.leaves(value, is_leaf=_is_list)]))

    options = {k: v for k, v in known[1].items() if k not in given and not has_data(v)}
    return {**options, **kwargs}


def _is_list(value) -> bool:
    return isinstance(value, list | tuple)

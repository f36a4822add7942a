"""Which columns arguments of a model have, by their names and by their number."""

from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_sgp._programs import NEEDS_KNOWN_DATA
from numpyro_sgp.distributions.arguments import (
    as_numbers,
    columns_in,
    is_frame,
    named_leaves,
)


def columns_of(model, args, kwargs) -> dict[str, tuple] | None:
    """
    Names of the columns of arguments that were frames; None where there is one still, of
    which the model knows the names.
    """
    leaves = named_leaves(model, args, kwargs)
    if any(map(is_frame, leaves.values())):
        return None
    return {name: columns_in(v) for name, v in leaves.items() if columns_in(v)}


def check_columns(model, columns: dict[str, tuple] | None, args, kwargs) -> None:
    """
    Frames are matrices for a model that was given such: what their columns are is known by
    names alone.

    :param columns: of what was given before: :func:`columns_of`.
    :raises ValueError: if a frame has columns of these names in other places. One that has
        none of these names is taken as it is.
    """
    for name, value in named_leaves(model, args, kwargs).items():
        names = (columns or {}).get(name)
        if names is None or not is_frame(value):
            continue
        known, given = ([*map(str, labels)] for labels in (names, value.columns))
        if given != known and not set(known).isdisjoint(given):
            raise ValueError(
                f"Argument '{name}' has the columns {', '.join(given)}, where it had "
                f"{', '.join(known)}: a matrix of them is taken by place. Give "
                f"{name}[{list(names)}], or {name}.to_numpy() if places are right."
            )


def inputs_among(model, args, kwargs, inputs: dict) -> dict[str, tuple[str, int]]:
    """
    Arguments that are inputs of a GP site as they are.

    :param inputs: of GP sites, ``(N, D)`` by name.
    :return: the site and its number of columns D, by the name of the argument.
    """
    found = {}
    for name, value in named_leaves(model, args, kwargs).items():
        for site, X in inputs.items():
            if np.ndim(X) != 2 or np.shape(value) != np.shape(X):
                continue
            if not (not_jax_tracer(value) and not_jax_tracer(X)):
                continue
            try:
                known = as_numbers(value, "")
            except TypeError:  # of strings, which a model encodes
                continue
            if np.allclose(known, X, rtol=1e-6, atol=0.0):  # rounded to JAX's digits
                found.setdefault(name, (site, np.shape(X)[1]))
    return found


def told_of_columns(model, among: dict, args, kwargs) -> str:
    """
    What to say of a model that failed where an argument has not the columns that it had;
    empty where all have.

    :param among: of :func:`inputs_among`.
    """
    for name, value in named_leaves(model, args, kwargs).items():
        site, columns = among.get(name, ("", 0))
        shape = np.shape(value)
        if not columns or (len(shape) == 2 and shape[1] == columns):
            continue
        mend = f"Give a table of shape (N, {columns})"
        if shape == (columns,):
            mend += f": one row as {name}[None]"
        elif len(shape) == 1 and columns == 1:
            mend += f": one column as {name}[:, None]"
        return (
            f"Argument '{name}' has the shape {shape}, but the inputs of GP site '{site}' "
            f"had {columns} column{'s' * (columns > 1)}. {mend}."
        )
    return ""


@contextmanager
def telling_columns(model, among: Callable[[], dict], args, kwargs):
    """
    Around a run of a model: says what :func:`told_of_columns` does with an error of it.

    :param among: which makes what :func:`inputs_among` returns, where it is needed.
    :raises ValueError: in the place of a ``TypeError`` or ``ValueError``, if there is
        something to say.
    """
    try:
        yield
    except NEEDS_KNOWN_DATA:
        raise
    except (TypeError, ValueError) as error:
        told = told_of_columns(model, among(), args, kwargs)
        if not told:
            raise
        first = str(error).splitlines()[:1]
        raise ValueError(" ".join([told, *(f"({line})" for line in first)])) from error

"""Log densities of sites by row of the data."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.ops.provenance import eval_provenance


def by_row(log_prob: Array, num_rows: int, axis: int | None = None) -> Array | None:
    """
    A log density summed over all axes but that of the rows of X.

    :param axis: the one to take of several; None where it is not known.
    :return: shape ``(num_rows,)``, or None if no axis has that length.
    :raises ValueError: if several axes have, and which one is not known.
    """
    found = row_axis(log_prob.shape, num_rows, axis)
    if found is None:
        return None
    return jnp.sum(log_prob, axis=tuple(i for i in range(log_prob.ndim) if i != found))


def row_axis(shape: tuple[int, ...], num_rows: int, axis: int | None = None) -> int | None:
    """That of the rows of X; the arguments, and errors, are those of :func:`by_row`."""
    axes = [i for i, size in enumerate(shape) if size == num_rows]
    if axis is not None and (axis := axis % max(len(shape), 1)) in axes:
        axes = [axis]
    if len(axes) > 1 and num_rows > 1:
        raise ValueError(
            f"A log density of shape {shape} has {len(axes)} axes that may be the "
            f"{num_rows} rows of X. Put the others into the event: fn.to_event(1), with "
            "the data plate outermost."
        )
    return axes[-1] if axes else None


def origins(fn: Callable[[dict], dict], values: dict) -> dict[str, frozenset]:
    """
    For each entry of a dict that a function returns, the names of the values that it
    depends on.

    :param fn: a function of a dict of values by name; it is only traced.
    :param values: trees of arrays, or of their shapes and dtypes, by name.
    """
    names = list(values)

    def known(x):
        is_shape = isinstance(x, jax.ShapeDtypeStruct)
        return jnp.zeros(x.shape, x.dtype) if is_shape else x

    def run(**numbered):  # names need not be valid for a keyword
        return fn({names[int(k[1:])]: v for k, v in numbered.items()})

    numbered = {f"v{i}": values[name] for i, name in enumerate(names)}
    found = eval_provenance(run, **jax.tree.map(known, numbered))
    return {
        name: frozenset(names[int(label[1:])] for label in union(labels))
        for name, labels in found.items()
    }


def union(labels) -> frozenset:
    """All that is in a tree of sets of labels."""
    sets = jax.tree.leaves(labels, is_leaf=lambda x: isinstance(x, frozenset))
    return frozenset().union(*sets)


def sites_on_f(
    of_sites: Callable[[dict[str, Array]], dict], f: dict[str, Array]
) -> set[str]:
    """Names of the entries of :func:`origins` that depend on the values of GP sites."""
    return {name for name, found in origins(of_sites, f).items() if found}

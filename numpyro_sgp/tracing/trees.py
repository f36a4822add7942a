"""What trees, of kernels and distributions, are made of beside arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Packages whose classes are known by their numbers and options; objects of this package
# among the options may hold those of others.
_PLAIN = "numpyro", "builtins", "jax", "jaxlib", "numpy"
_KNOWN = __package__.split(".")[0], *_PLAIN
_OPTIONS = bool | int | float | str


def is_number(leaf: Any) -> bool:
    """Whether a leaf of a tree is an array or a number."""
    return isinstance(leaf, jax.Array | np.ndarray | np.number | float | int)


def is_plain(tree: Any, notes: list | None = None) -> bool:
    """
    Whether all of a tree is NumPyro's or of this package, and no function: its numbers and
    options are all there is to know of it.

    :param notes: gets classes and options.
    """
    leaves, structure = jax.tree.flatten(tree)
    are_known = _look(structure, [] if notes is None else notes)
    return are_known and all(map(is_number, leaves))


def _look(structure, notes):
    kind, beside = structure.node_data() or (None, None)
    options = jax.tree.leaves(beside)
    notes.append((kind, [part for part in options if isinstance(part, _OPTIONS)]))
    of = getattr(kind, "__module__", "builtins").split(".")[0]
    are_known = of in _KNOWN and not any(map(_is_others, options))
    return all([are_known, *(_look(child, notes) for child in structure.children())])


def _is_others(part):
    """Whether an option is code, or an object, of a user, or may be; or numbers."""
    if isinstance(part, jax.Array | np.ndarray):
        return True
    if callable(part) and not isinstance(part, type):  # np.vectorize(...), jnp.add
        return True
    module = getattr(part, "__module__", None) or type(part).__module__
    return module.split(".")[0] not in _PLAIN

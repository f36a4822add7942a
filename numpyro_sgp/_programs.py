"""Compiled programs that live as long as the object that they belong to."""

import weakref

import jax
import numpy as np

_PROGRAMS = weakref.WeakKeyDictionary()


def program(owner, fn):
    """
    ``fn(owner, *arrays, static=...)``, compiled once for each shape of the arrays and each
    ``static``, whoever asks for it and how often.

    :param owner: what the program is kept with, an SVI or a guide.
    :param fn: a function at the top of a module.
    :return: a function of ``*arrays, static=...``.
    """
    programs = _PROGRAMS.setdefault(owner, {})
    if fn not in programs:
        itself = weakref.ref(owner)  # or the program would keep its own key alive

        def call(*arrays, static):
            return fn(itself(), *arrays, static=static)

        programs[fn] = jax.jit(call, static_argnames="static")
    return programs[fn]


def mapped(fn, inputs, chunk: int):
    """``fn`` of each entry along the leading axis of ``inputs``, so many at a time."""
    if chunk < len(jax.tree.leaves(inputs)[0]):
        return jax.lax.map(fn, inputs, batch_size=chunk)
    return jax.vmap(fn)(inputs)  # a loop is compiled anew in each call


#: What JAX raises where a program asks for the values of its arguments.
NEEDS_KNOWN_DATA = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def all_static(tree) -> tuple:
    """As the second of :func:`split_static` with nothing traced, and without a hash."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((type(leaf), leaf) for leaf in leaves)


def split_static(tree) -> tuple[list, tuple]:
    """
    The arrays of a tree, and all else in it as something that can be hashed.

    :raises TypeError: if something that is not an array has no hash.
    """
    leaves, structure = jax.tree.flatten(tree)
    fixed = [None if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves]
    for leaf, value in zip(fixed, leaves, strict=True):
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"An argument of the model has a {type(value).__name__}, which is neither "
                "an array nor hashable, so that it could not be seen whether a compiled "
                "program fits it. Pass arrays, numbers, strings, functions or tuples."
            ) from None
    return [leaf for leaf in leaves if _is_array(leaf)], (structure, tuple(fixed))


def join_static(arrays: list, static: tuple):
    """The inverse of :func:`split_static`."""
    structure, fixed = static
    given = iter(arrays)
    leaves = [next(given) if leaf is None else leaf[1] for leaf in fixed]
    return jax.tree.unflatten(structure, leaves)


def _is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)

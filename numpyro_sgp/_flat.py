"""Trees of arrays as one vector, without a program for each operation."""

import math

import jax
import jax.numpy as jnp
import numpy as np


class Flat:
    """
    What :func:`jax.flatten_util.ravel_pytree` does, in NumPy: without a compilation.

    :param tree: a tree of arrays.
    """

    def __init__(self, tree):
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._ends = np.cumsum([math.prod(shape) for shape in self._shapes], dtype=int)
        #: That of the vector.
        self.dtype = jnp.result_type(*self._dtypes) if leaves else np.dtype(float)

    def ravel(self, tree) -> np.ndarray:
        """The vector of another tree like the first."""
        leaves = map(np.ravel, jax.tree.leaves(tree))
        # Of one type first: NumPy does not join all that JAX does.
        parts = [leaf.astype(self.dtype) for leaf in leaves]
        return np.concatenate([np.zeros(0, self.dtype), *parts])

    def unravel(self, vector):
        """The tree of a vector, which may be traced."""
        found, start = [], 0
        kinds = zip(self._ends, self._shapes, self._dtypes, strict=True)
        for end, shape, dtype in kinds:
            found.append(vector[start:end].reshape(shape).astype(dtype))
            start = end
        return jax.tree.unflatten(self._structure, found)

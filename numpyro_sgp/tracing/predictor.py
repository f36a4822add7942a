"""How many linear combinations of its latent functions a likelihood takes at each row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.program import opening

_MOST = 2**24  # numbers that are looked at


def num_predictors(
    log_density: Callable[[dict[str, Array]], Array], shapes: dict[str, tuple], dtype
) -> int:
    r"""
    The number P of linear combinations of several latent functions that are all that a
    likelihood takes of them at each row, by matrices :math:`A_n` of shape (P, K),

    .. math::

        \log p(y \mid f) = \sum_n h_n(A_n f_n + b_n)

    as one where a response has the sum of functions, times covariates perhaps, and two
    where such sums are its mean and its scale. It is told by the program, and by what that
    makes of random values; with others in the place of its numbers, since parameters and
    covariates may be zero now and not later.

    :param log_density: from values of GP sites, of the given shapes, to a number.
    :param shapes: ``batch_shape + (N,)`` of each site.
    :param dtype: dtype of the values.
    :return: 0 for a single function, and where it cannot be told; more than it takes
        where it has one combination in several places.
    """
    counts = {name: int(np.prod(shape[:-1])) for name, shape in shapes.items()}
    number, rows = sum(counts.values()), {shape[-1] for shape in shapes.values()}
    if number < 2 or len(rows) > 1:
        return 0
    (num_rows,) = rows

    def run():
        return log_density({k: opening(k, shape, dtype) for k, shape in shapes.items()})

    program = LinearProgram(run, shapes)
    predictors = program.predictors([program.outputs])
    sizes = [int(np.prod(value.aval.shape)) for value in predictors]
    if not sizes or any(num_rows not in (*value.aval.shape, 1) for value in predictors):
        return 0
    if number * sum(sizes) > _MOST:
        return 0
    rng = np.random.default_rng(0)
    constants = program.constants(predictors)
    others = [_other(v.known, rng) for v in constants]

    def at(f, others):
        ends = np.cumsum(list(counts.values()))[:-1]
        parts = zip(shapes.items(), jnp.split(f, ends), strict=True)
        openings = {name: part.reshape(shape) for (name, shape), part in parts}
        moved = dict(zip(constants, others, strict=True))
        found = program.evaluate(predictors, moved, openings)
        return jnp.concatenate([by_row(value, num_rows) for value in found])

    signs = rng.choice([-1.0, 1.0], size=(2, num_rows))
    draws = (signs * rng.uniform(0.5, 1.5, signs.shape)).astype(dtype)
    # Each function by itself; f is zero first.
    f = np.einsum("jk,dn->djkn", np.eye(number), draws).reshape(-1, number, num_rows)
    f = np.concatenate([np.zeros_like(f[:1]), f]).astype(dtype)
    run = shared(jax.vmap(at, in_axes=(0, None)), briefly=True)
    values = np.asarray(run(f, others), float)
    if not np.isfinite(values).all():  # a matrix that has no factor any more
        values = np.asarray(run(f, [v.known for v in constants]), float)
    eps = float(jnp.finfo(dtype).eps)
    return min(sum(sizes) // num_rows, number) if _are_by_row(values, draws, eps) else 0


def _other(constant, rng):
    """Numbers near those of a constant, none of them zero; what is infinite stays so."""
    values = np.asarray(constant)
    moved = values + (0.1 + np.abs(values)) * rng.uniform(0.1, 0.3, values.shape)
    return np.where(np.isfinite(values), moved, values).astype(values.dtype)


def by_row(value: Array, num_rows: int) -> Array:
    """A predictor as an array ``(P, N)``: rows are its last axis of that length."""
    if num_rows > 1:
        axis = value.ndim - 1 - value.shape[::-1].index(num_rows)
        value = jnp.moveaxis(value, axis, -1)
    return value.reshape(-1, num_rows)


def _are_by_row(values, draws, eps) -> bool:
    """
    Whether numbers of predictors at a row are made of f there.

    :param values: at zero, and at each of two draws of each of K functions, each (P, N).
    :param draws: of shape ``(2, N)``.
    """
    slopes = (values[1:] - values[0]).reshape(2, -1, *values.shape[1:])
    slopes = slopes / draws[:, None, None]
    # A number that is made of other rows than its own moves as these do.
    largest = np.max(np.abs(values), axis=0) + np.max(np.abs(slopes), axis=(0, 1))
    return bool(np.all(np.abs(slopes[0] - slopes[1]) <= 1e3 * eps * largest))


class NodeProgram:
    """
    A program of values at nodes, in which all is computed once that needs none.

    :param program: whose field are the nodes, by ``("node", name)``.
    :param given: values by the keys of other openings.
    :param outputs: of the program, those whose predictors are meant.
    """

    def __init__(self, program: LinearProgram, given: dict, outputs):
        self._program, self._given = program, given
        self._predictors = program.predictors(outputs)
        self._all = jax.tree.leaves(program.outputs)
        self._structure = jax.tree.structure(program.outputs)
        boundary = program.boundary(self._all, ())
        found = program.evaluate(boundary, {}, given)
        self._known = dict(zip(boundary, found, strict=True))

    @classmethod
    def of(
        cls, run: Callable[[dict], Array], shapes: dict[str, tuple], dtype
    ) -> "NodeProgram":
        """Of a function of nodes that returns a number."""
        keys = {name: ("node", name) for name in shapes}

        def opened():
            return run({k: opening(key, shapes[k], dtype) for k, key in keys.items()})

        program = LinearProgram(opened, keys.values())
        return cls(program, {}, [program.outputs])

    def __call__(self, nodes: dict[str, Array]):
        """What the program returns, with nodes by GP sites."""
        return jax.tree.unflatten(self._structure, self._at(self._all, nodes))

    def slopes(self, shapes: dict[str, tuple], dtype) -> Array:
        """
        Those of linear predictors by the nodes of K functions, ``(K, P, N)``.

        :param shapes: of the nodes.
        """
        counts = [int(np.prod(shape[:-1])) for shape in shapes.values()]
        (num_rows,) = {shape[-1] for shape in shapes.values()}
        units = jnp.split(jnp.eye(sum(counts), dtype=dtype), np.cumsum(counts)[:-1], axis=1)
        units = [
            u.reshape(-1, *shape[:-1], 1)
            for u, shape in zip(units, shapes.values(), strict=True)
        ]

        def at(nodes):
            found = self._at(self._predictors, dict(zip(shapes, nodes, strict=True)))
            none = jnp.zeros((0, num_rows), dtype)
            return jnp.concatenate([none, *(by_row(value, num_rows) for value in found)])

        zeros = [jnp.zeros(shape, dtype) for shape in shapes.values()]

        def along(units):
            moved = [
                jnp.broadcast_to(u, z.shape) for u, z in zip(units, zeros, strict=True)
            ]
            return jax.jvp(at, (zeros,), (moved,))[1]

        return jax.vmap(along)(units)

    def _at(self, targets, nodes):
        given = self._given | {("node", name): x for name, x in nodes.items()}
        return self._program.evaluate(targets, self._known, given)

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
    if not sizes or any(size % num_rows for size in sizes):
        return 0
    if number * sum(sizes) > _MOST:
        return 0
    rng = np.random.default_rng(0)
    others = {v: _other(v.known, rng) for v in program.constants(predictors)}

    def at(f):
        ends = np.cumsum(list(counts.values()))[:-1]
        parts = zip(shapes.items(), jnp.split(f, ends), strict=True)
        openings = {name: part.reshape(shape) for (name, shape), part in parts}
        found = program.evaluate(predictors, others, openings)
        return jnp.concatenate([value.ravel() for value in found])

    signs = rng.choice([-1.0, 1.0], size=(2, num_rows))
    draws = (signs * rng.uniform(0.5, 1.5, signs.shape)).astype(dtype)
    # Each function by itself; f is zero first.
    f = np.einsum("jk,dn->djkn", np.eye(number), draws).reshape(-1, number, num_rows)
    f = np.concatenate([np.zeros_like(f[:1]), f]).astype(dtype)
    values = np.asarray(shared(jax.vmap(at), briefly=True)(f), float)
    rounding = 1e3 * float(jnp.finfo(dtype).eps)
    parts = np.split(values, np.cumsum(sizes)[:-1], axis=1)
    by_row = all(_is_by_row(part, draws, rounding) for part in parts)
    return min(sum(sizes) // num_rows, number) if by_row else 0


def _other(constant, rng):
    """Numbers near those of a constant, none of them zero; what is infinite stays so."""
    values = np.asarray(constant)
    moved = values + (0.1 + np.abs(values)) * rng.uniform(0.1, 0.3, values.shape)
    return np.where(np.isfinite(values), moved, values).astype(values.dtype)


def _is_by_row(values, draws, rounding) -> bool:
    """
    Whether numbers of a predictor at a row are made of f there.

    :param values: at zero, and at each of two draws of each of K functions.
    :param draws: of shape ``(2, N)``.
    """
    num_rows = draws.shape[-1]
    for found in (
        values.reshape(len(values), -1, num_rows),
        np.swapaxes(values.reshape(len(values), num_rows, -1), 1, 2),
    ):
        slopes = (found[1:] - found[0]).reshape(2, -1, *found.shape[1:])
        slopes = slopes / draws[:, None, None]
        # A number that is made of other rows than its own moves as these do.
        largest = np.max(np.abs(found), axis=0) + np.max(np.abs(slopes), axis=(0, 1))
        if np.all(np.abs(slopes[0] - slopes[1]) <= rounding * largest):
            return True
    return False

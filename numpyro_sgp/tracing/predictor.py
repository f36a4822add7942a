"""Whether a likelihood depends on its latent functions by one number a row."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.program import opening

_MOST = 2**24  # numbers that are looked at


def has_one_predictor(
    log_density: Callable[[dict[str, Array]], Array], shapes: dict[str, tuple], dtype
) -> bool:
    r"""
    Whether all that a likelihood takes of two or more latent functions is one linear
    combination of them at each row,

    .. math::

        \log p(y \mid f) = \sum_n h_n(a_n^T f_n + b_n)

    as where a response has the sum of several functions, times covariates perhaps: told by
    the program, and by what it makes of random values.

    :param log_density: from values of GP sites, of the given shapes, to a number.
    :param shapes: ``batch_shape + (N,)`` of each site.
    :param dtype: dtype of the values.
    """
    counts = {name: int(np.prod(shape[:-1])) for name, shape in shapes.items()}
    number, rows = sum(counts.values()), {shape[-1] for shape in shapes.values()}
    if number < 2 or len(rows) > 1:
        return False
    (num_rows,) = rows

    def run():
        return log_density({k: opening(k, shape, dtype) for k, shape in shapes.items()})

    program = LinearProgram(run, shapes)
    predictors = program.predictors([program.outputs])
    sizes = {int(np.prod(value.aval.shape)) for value in predictors}
    if sizes != {num_rows} or number**2 * num_rows * len(predictors) > _MOST:
        return False

    def at(f):
        ends = np.cumsum(list(counts.values()))[:-1]
        parts = zip(shapes.items(), jnp.split(f, ends), strict=True)
        openings = {name: part.reshape(shape) for (name, shape), part in parts}
        found = program.evaluate(predictors, {}, openings)
        return jnp.stack([value.reshape(num_rows) for value in found])

    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(2, num_rows))
    draws = (signs * rng.uniform(0.5, 1.5, signs.shape)).astype(dtype)
    # Each function by itself; f is zero first.
    f = np.einsum("jk,dn->djkn", np.eye(number), draws).reshape(-1, number, num_rows)
    f = np.concatenate([np.zeros_like(f[:1]), f]).astype(dtype)
    values = np.asarray(shared(jax.vmap(at), briefly=True)(f), float)
    slopes = (values[1:] - values[0]).reshape(2, number, -1, num_rows) / draws[
        :, None, None
    ]
    rounding = 1e3 * float(jnp.finfo(dtype).eps)
    # A number that is made of other rows than its own moves as these do.
    largest = np.max(np.abs(values), axis=0) + np.max(np.abs(slopes), axis=(0, 1))
    if not np.all(np.abs(slopes[0] - slopes[1]) <= rounding * largest):
        return False
    a, first = slopes[0], slopes[0][:, :1]  # (number, predictors, rows)
    cross = np.einsum("ipn,jn->ijpn", a, first[:, 0])
    scale = np.linalg.norm(a, axis=0) * np.linalg.norm(first, axis=0)
    return bool(np.all(np.abs(cross - np.swapaxes(cross, 0, 1)) <= rounding * scale))

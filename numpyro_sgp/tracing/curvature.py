"""The curvature of a likelihood at each row, read off model code."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.linalg import matmul

_AWAY = 1.0, 30.0  # that f is moved by, in sds of what rows know of it
_DRAWN = 1021  # random numbers for a function, which are constants of a program
_ROUNDING = 1e3  # up to which curvatures are the same, of the dtype


def row_curvature(
    log_density: Callable[[dict[str, Array]], Array],
    f: dict[str, Array],
    name: str,
) -> Array:
    r"""
    Sums of the rows of the Hessian of each latent function of a site, by one product each:
    its diagonal where it has nothing else.

    :param log_density: from values of GP sites to a number.
    :param f: values of GP sites, shapes ``batch_shape + (N,)``.
    :return: shape ``(num_functions, N)``.
    """
    value = f[name]
    num_functions = int(np.prod(value.shape[:-1]))
    each_row = jnp.ones(value.shape[-1:], value.dtype)

    def along(function):
        direction = jnp.reshape(function[:, None] * each_row, value.shape)
        slope = jax.grad(lambda v: log_density({**f, name: v}))
        Hs = jax.jvp(slope, (value,), (direction,))[1].reshape(num_functions, -1)
        return matmul(function, Hs)

    return jax.vmap(along)(jnp.eye(num_functions, dtype=value.dtype))


def row_precisions(log_density, f, names: Iterable[str]) -> dict[str, Array]:
    r"""
    :math:`\lambda_{jn} = -\partial^2 \log p / \partial f_{jn}^2` at each row n and latent
    function j: :math:`\sigma^{-2}` of Titsias 2025 where the likelihood is Gaussian. Rows
    must not be mixed.

    :param log_density: as in :func:`row_curvature`.
    :param names: of the sites whose precisions are wanted.
    :return: arrays of the shapes of ``f``.
    """
    return {k: -row_curvature(log_density, f, k).reshape(f[k].shape) for k in names}


def is_gaussian(slope: Callable[[dict], dict], f: dict[str, Array]) -> Array:
    """
    Whether a log density has the same curvature wherever f is, in each value alone, none
    of them positive; traceable.

    :param slope: from values of GP sites to the derivatives by them.
    :param f: such values, ``batch_shape + (N,)``, from which others are tried: up to 30 sds
        of what a row knows of them away.
    """
    rng = np.random.default_rng(0)

    def numbers(draw):
        """By site, of each function others; those of many rows come again."""

        def of_site(value):
            functions, rows = int(np.prod(value.shape[:-1])), value.shape[-1]
            drawn = draw((functions, min(rows, _DRAWN)))
            each = jnp.asarray(drawn, value.dtype)[:, jnp.arange(rows) % _DRAWN]
            return each.reshape(value.shape)

        return {name: of_site(value) for name, value in f.items()}

    def signed(shape):
        return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)

    def precisions(at):
        along = numbers(signed)
        product = jax.jvp(slope, (at,), (along,))[1]
        return {name: -product[name] / along[name] for name in f}

    first = precisions(f)
    largest = jnp.max(jnp.array([jnp.max(v) for v in first.values()]))
    units = {k: jnp.where(v > 0.0, v, largest) ** -0.5 for k, v in first.items()}
    found = [(largest > 0.0) & jnp.isfinite(largest)]
    for away in _AWAY:
        z = numbers(lambda shape: rng.normal(size=shape))
        again = precisions({k: f[k] + away * units[k] * z[k] for k in f})
        for k, v in first.items():
            tolerance = _ROUNDING * jnp.finfo(v.dtype).eps
            found.append(jnp.all((jnp.abs(again[k] - v) <= tolerance * v) & (v >= 0.0)))
    return jnp.all(jnp.array(found))


def check_gaussian(log_density, shapes: dict[str, tuple], dtype, names) -> None:
    r"""
    Whether tight bounds have the closed form of Titsias 2025: :math:`\lambda_n` must not
    depend on f.

    :param log_density: as in :func:`row_curvature`.
    :param shapes: ``batch_shape + (N,)`` of each GP site.
    :param dtype: dtype of the values.
    :param names: sites at which the likelihood must be Gaussian.
    :raises ValueError: naming a site at which it is not.
    """
    rng = np.random.default_rng(0)

    precisions = shared(lambda f: row_precisions(log_density, f, names), briefly=True)

    def found():
        f = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}
        return precisions(f)

    try:
        first, second = found(), found()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"tight='diagonal' and tight='block' at GP sites {sorted(names)} need a "
            "likelihood that JAX can differentiate. Use tight='scalar'."
        ) from error
    tolerance = 1e4 * float(jnp.finfo(dtype).eps)
    for name in names:
        a, b = np.asarray(first[name]), np.asarray(second[name])
        if not np.any(a) and not np.any(b):
            raise ValueError(
                f"GP site '{name}': no observed site is Gaussian in its values, so there "
                "is nothing for tight='diagonal' or tight='block' (does it feed another "
                "GP site?). Use tight='scalar'."
            )
        size = np.maximum(np.abs(a), np.abs(b))
        if np.any(np.abs(a - b) > tolerance * size + size.max() * jnp.finfo(dtype).eps):
            raise ValueError(
                f"GP site '{name}': tight='diagonal' and tight='block' are for Gaussian "
                "likelihoods, whose precision does not depend on f, but here it does. Use "
                "tight='scalar', which learns one number for each latent function, for any "
                "likelihood."
            )
        if np.min(a) < 0:
            raise ValueError(
                f"GP site '{name}': the log likelihood is convex in f, so tight='diagonal' "
                "and tight='block' are not for it. Use tight='none'."
            )

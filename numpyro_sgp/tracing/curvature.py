"""The curvature of a likelihood at each row, read off model code."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.linalg import einsum, matmul

_AWAY = 1.0, 30.0  # that f is moved by, in sds of what rows know of it
_MOST_FUNCTIONS = 4  # of which terms with two are looked for
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


class Quadratic(NamedTuple):
    r"""
    A log density of values of GP sites about some of them, at row n
    :math:`\sum_j \ell_{jn} g_{jn} - \frac12 \sum_{jk} \lambda_{jkn} g_{jn} g_{kn}`.

    :param linear: :math:`\ell`, by site, ``batch_shape + (N,)``.
    :param precision: :math:`\lambda_{jj}`, by site, of that shape.
    :param cross: :math:`\lambda`, ``(J, J, N)``, of all functions one after another; None
        of one function, of more than four, or where sites have other numbers of rows.
    :param is_one: whether it is such a density, none of these curvatures negative.
    :param apart: whether no term has two functions (where there is no ``cross``, one that
        has is none of ``is_one``).
    """

    linear: dict[str, Array]
    precision: dict[str, Array]
    cross: Array | None
    is_one: Array
    apart: Array


def quadratic_of(density: Callable[[dict], Array], f: dict[str, Array]) -> Quadratic:
    """
    A log density of values of GP sites, looked at near by, up to 30 sds of what a row knows
    of them away, and about where rows would have them; traceable.

    :param density: from values of GP sites to the log density.
    :param f: values, ``batch_shape + (N,)``.
    :return: its slopes and curvatures at f, and whether it has the same ones elsewhere.
    """
    look = jax.value_and_grad(density)
    rng, shapes = np.random.default_rng(0), {k: v.shape for k, v in f.items()}
    numbers = {k: int(np.prod(shape[:-1])) for k, shape in shapes.items()}
    rows = {shape[-1] for shape in shapes.values()}
    several = len(rows) == 1 and 1 < sum(numbers.values()) <= _MOST_FUNCTIONS
    height, linear = look(f)

    def flat(tree):
        return jnp.concatenate([tree[k].reshape(n, -1) for k, n in numbers.items()])

    def by_site(values):
        ends = np.cumsum([0, *numbers.values()])
        each = zip(shapes.items(), ends, ends[1:], strict=False)
        return {name: values[a:b].reshape(shape) for (name, shape), a, b in each}

    def bent(at, along):
        """Density and slopes, and the product of minus the Hessian."""
        found, (_, product) = jax.jvp(look, (at,), (along,))
        return *found, jax.tree.map(jnp.negative, product)

    cross = None
    if several:
        dtype, N = jnp.result_type(*f.values()), *rows

        def of_function(one):
            along = by_site(jnp.broadcast_to(one[:, None], (len(one), N)))
            along = {k: v.astype(f[k].dtype) for k, v in along.items()}
            return flat(bent(f, along)[-1])

        cross = jax.vmap(of_function)(jnp.eye(sum(numbers.values()), dtype=dtype))
        precision = by_site(jnp.diagonal(cross).T)
    else:
        precision = bent(f, jax.tree.map(jnp.ones_like, f))[-1]

    def times(values):
        """The product of the curvatures with values, and what is rounded in it."""
        if cross is None:
            found = {k: precision[k] * v for k, v in values.items()}
            return found, jax.tree.map(jnp.abs, found)
        parts = flat(values)
        size = einsum("jkn,kn->jn", jnp.abs(cross), jnp.abs(parts))
        return by_site(einsum("jkn,kn->jn", cross, parts)), by_site(size)

    def numbered(draw):
        """By site, of each function others; those of many rows come again."""

        def of_site(value):
            functions, N = int(np.prod(value.shape[:-1])), value.shape[-1]
            drawn = jnp.asarray(draw((functions, min(N, _DRAWN))), value.dtype)
            return drawn[:, jnp.arange(N) % _DRAWN].reshape(value.shape)

        return {name: of_site(value) for name, value in f.items()}

    def signed(shape):
        return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)

    largest = jnp.max(jnp.array([jnp.max(v) for v in precision.values()]))
    units = {k: jnp.where(v > 0.0, v, largest) ** -0.5 for k, v in precision.items()}
    found = [(largest > 0.0) & jnp.isfinite(largest)]

    def same(a, b, size):
        tolerance = _ROUNDING * jnp.finfo(jnp.result_type(a)).eps
        found.append(jnp.all(jnp.abs(a - b) <= tolerance * size))

    # Where each row alone would have it, and as far as any row would: a sensor's limits.
    wishes = {k: linear[k] * units[k] ** 2 for k in f}
    farthest = {k: jnp.max(jnp.abs(v), axis=-1, keepdims=True) for k, v in wishes.items()}
    sizes = [jax.tree.map(lambda unit, away=away: away * unit, units) for away in _AWAY]
    for size in (None, *sizes, wishes, farthest):
        z, along = numbered(lambda shape: rng.normal(size=shape)), numbered(signed)
        g = {k: jnp.zeros_like(v) if size is None else size[k] * z[k] for k, v in f.items()}
        value, slope, product = bent({k: f[k] + g[k] for k in f}, along)
        (wanted, most), (pulled, pull) = times(along), times(g)
        changes, rounded = [], [jnp.abs(height) + jnp.abs(value)]
        for k, ell in linear.items():
            same(product[k], wanted[k], most[k])
            # Jumps have no curvature.
            same(slope[k], ell - pulled[k], jnp.abs(ell) + pull[k])
            changes.append(jnp.sum(g[k] * (ell - 0.5 * pulled[k])))
            rounded.append(jnp.sum(jnp.abs(g[k]) * (jnp.abs(ell) + pull[k])))
        same(value - height, sum(changes), sum(rounded))
    found += [jnp.all(v >= 0.0) for v in precision.values()]
    apart = jnp.array(True)
    if cross is not None:
        own = jnp.diagonal(cross).T
        most = _ROUNDING * jnp.finfo(cross.dtype).eps * jnp.sqrt(own[:, None] * own)
        off = ~np.eye(len(own), dtype=bool)[..., None]
        apart = jnp.all((jnp.abs(cross) <= most) | ~off)
    return Quadratic(linear, precision, cross, jnp.all(jnp.array(found)), apart)


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

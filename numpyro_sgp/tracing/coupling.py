"""Whether a likelihood ties the latent values at different rows together."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import shared
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.kinks import has_kinks
from numpyro_sgp.tracing.predictor import num_predictors
from numpyro_sgp.tracing.rows import origins
from numpyro_sgp.tracing.together import axes_of_functions

_PLACES = 3  # values of f at which rows are looked at
# Of the steps that rows are moved by, up and down: a maximum moves with half of either.
_SIZES = 2 * (3.0, 0.3) + 2 * (30.0, 3.0) + 2 * (300.0, 30.0)
_ALIKE = 1e-3  # relative change of curvatures that may be rounding
# Far away a solver of differential equations may never end.
_SMALL_SIZES = (0.3, 1.0, 3.0)


class Coupling(NamedTuple):
    """What a guide tells of a model's rows, in the ``infer`` of its GP sites."""

    couples: bool = False  # the likelihood ties rows of X together
    combines: bool = False  # several rows of a site become one row of another
    kinked: bool = False  # slopes of the likelihood jump, as a Laplace distribution's do
    predictors: int = 0  # linear combinations of functions that it takes a row, at most
    # By site an axis for each function, such that no term has two of one axis.
    axes: tuple[tuple[int, ...], ...] = ()
    quadratic: bool = False  # perhaps Gaussian: curvatures are the same at two places


def find_coupling(
    trace_at: Callable[[dict[str, Array]], dict],
    shapes: dict[str, tuple[int, ...]],
    dtype,
    coupled: Iterable[str] = (),
    chosen: Iterable[str] = (),
    near: bool = False,
) -> Coupling:
    """
    Whether the likelihood of a model, or the prior of one of its GP sites, mixes two rows
    of X in one latent function of another; whether a row of the inputs of a GP site is
    made of several rows of another one, as images are of patches; how many linear
    combinations of functions a likelihood takes at each row at most; and whether one of one
    or two functions, or combinations, has kinks.

    :param trace_at: from values of the GP sites to the model's trace.
    :param shapes: ``batch_shape + (N,)`` of each GP site.
    :param dtype: dtype of the values.
    :param coupled: sites whose latent functions are dependent, so that rows of different
        functions must not be mixed either.
    :param chosen: sites whose model says how their rows are drawn for the next layer
        (``joint_rows``), so that a prior may mix them.
    :param near: whether values of f far from zero are left out: solvers may not end there.
    """

    def log_density(f):
        return log_likelihood(trace_at(f), shapes)

    programs = _programs(log_density, shapes)
    where = log_density, shapes, dtype, frozenset(coupled)
    couples = mixes_rows(*where, near=near, programs=programs)
    feeds = len(shapes) > 1 and bool(feeding(trace_at, shapes, dtype))
    number = 0 if couples or feeds else num_predictors(log_density, shapes, dtype)
    axes: tuple[tuple[int, ...], ...] = ()
    several = number or sum(int(np.prod(shape[:-1])) for shape in shapes.values())
    if several > 2 and not (couples or feeds or coupled):
        with suppress(Exception):  # of an operation that is not known: there are draws
            axes = axes_of_functions(log_density, shapes, dtype)
        if axes:
            several = 1 + max(map(max, axes))
    kinked = not (couples or near) and _kinked(programs, shapes, dtype, several)
    quadratic = not (couples or feeds or kinked) and _bends_alike(programs, shapes, dtype)
    found = Coupling(couples, False, kinked, number, axes, quadratic)
    if len(shapes) == 1:
        return found
    # Mixed second derivatives where inputs of a GP site mix rows of f, or have several
    # rows of f in different columns.
    by_rows = _of_priors(trace_at, shapes, by_rows=True)
    if not mixes_rows(by_rows, shapes, dtype):
        return found
    rest = [name for name in shapes if name not in set(chosen)]
    priors = _of_priors(trace_at, shapes)
    couples = couples or mixes_rows(priors, shapes, dtype, names=rest)
    return Coupling(couples, combines=True, kinked=kinked)


def feeding(trace_at, shapes: dict[str, tuple[int, ...]], dtype) -> frozenset[str]:
    """
    The GP sites that the prior of another one depends on; the arguments are those of
    :func:`find_coupling`.
    """

    def of_priors(f):
        trace = trace_at(f)
        return {name: made_of(messages.unwrap(trace[name]["fn"])[0]) for name in shapes}

    f = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return frozenset().union(*origins(of_priors, f).values())


def made_of(prior) -> list[Array]:
    """All that a GP prior is made of."""
    return jax.tree.leaves((prior.kernel, prior.X, prior.mean))


def _of_priors(trace_at, shapes, by_rows=False):
    """
    A number that depends on all that the priors of GP sites are made of.

    :param by_rows: whether the columns of a row of X are taken together.
    """

    def features(f):
        trace = trace_at(f)
        priors = [messages.unwrap(trace[name]["fn"])[0] for name in shapes]
        total = sum(jnp.sum(jnp.sin(leaf)) for p in priors for leaf in made_of(p))
        if by_rows:
            total = total + sum(jnp.sum(jnp.sin(jnp.sum(p.X, axis=-1))) for p in priors)
        return total

    return features


def log_likelihood(trace, gp_sites: Iterable[str]) -> Array | int:
    """Log density of all sites of a trace but the GP sites."""
    return sum(
        jnp.sum(messages.log_prob(site))
        for name, site in trace.items()
        if site["type"] == "sample" and name not in gp_sites
    )


def mixes_rows(
    log_density: Callable[[dict[str, Array]], Array],
    shapes: dict[str, tuple],
    dtype,
    coupled=frozenset(),
    names: Iterable[str] | None = None,
    near: bool = False,
    programs: dict | None = None,
) -> bool:
    r"""
    Whether ``log_density`` mixes two rows of X in one latent function: is no sum of terms
    that have one of them each.

    If it is such a sum, its expectation needs only the marginals of f: values of different
    functions are independent anyhow. With a number s for each row and the Hessian H of one
    function, :math:`(H s) / s` does not depend on s exactly when H is diagonal, so two
    draws of s decide. Each row is judged by its own curvature, at several values of f: at
    one of them it may be as small as rounding errors are (a Student t near its inflection).
    Where it is at all of them (terms of a Poisson count of a million cancel), it is asked
    whether rows move by what the others do.

    Second derivatives do not see what happens at kinks between them (differences under a
    Laplace distribution, running maxima, sorted values); steps over these do
    (:func:`_moved_by_steps`).

    :param log_density: from values of GP sites, of the given shapes, to a number.
    :param shapes: ``batch_shape + (N,)`` of each site.
    :param dtype: dtype of the values.
    :param coupled: sites whose latent functions are dependent, so that rows of different
        functions must not be mixed either.
    :param names: sites whose rows are looked at; all if None.
    :param near: whether steps are small.
    :param programs: of derivatives by the values at each site; made if None.
    :return: True if rows are mixed; False also where no derivative is to be had. Where
        there are first derivatives only (solvers of differential equations), these are
        looked at for steps.
    """
    rng = np.random.default_rng(0)

    def values():
        return {k: np.asarray(0.3 * rng.normal(size=s), dtype) for k, s in shapes.items()}

    places = [values() for _ in range(_PLACES)]
    programs = _programs(log_density, shapes) if programs is None else programs
    eps = float(jnp.finfo(dtype).eps)
    tolerance = max(1e3 * eps, 1e-9)
    for name, shape in shapes.items():
        if names is not None and name not in names:
            continue
        number = int(np.prod(shape[:-1]))
        moved = np.ones((1, number)) if name in coupled else np.eye(number)
        program = programs[name]

        def product(f, s, moved=moved, program=program):
            along = (np.asarray(np.outer(m, s), dtype) for m in moved)
            found = [np.asarray(program(f, direction)[-1]) for direction in along]
            return np.concatenate([Hs[m > 0] for Hs, m in zip(found, moved, strict=True)])

        mixed: np.ndarray | bool = True
        rounding, slopes = tolerance, program
        sizes = _SMALL_SIZES if near else _SIZES
        for f in places:
            try:
                signs = rng.choice([-1.0, 1.0], size=(2, shape[-1]))
                draws = signs * rng.uniform(0.5, 1.5, signs.shape)
                a, b = (product(f, s) / s for s in draws)
            except (TypeError, ValueError, NotImplementedError):
                # Not twice differentiable. Solvers have errors of their own.
                mixed, rounding = False, max(tolerance, 1e3 * eps**0.5)
                sizes = _SMALL_SIZES
                slopes = shared(partial(_slopes, log_density, name), briefly=True)
                break
            size = np.maximum(np.abs(a), np.abs(b))
            with np.errstate(invalid="ignore"):  # what is not finite tells nothing
                mixed = mixed & ~(np.abs(a - b) <= tolerance * size)
            if not np.any(mixed):
                break
        if np.any(mixed) and any(_moved_by_others(product, f, mixed) for f in places):
            return True

        def slope(value, f=places[0], name=name, slopes=slopes):
            value = np.asarray(value, dtype)
            at = {**f, name: value.reshape(shapes[name])}
            total, slope, *_ = slopes(at, np.zeros_like(value))
            return float(total), np.asarray(slope, float)

        options = shape[-1], rounding, sizes

        def moves(functions, slope=slope, options=options):
            return _moved_by_steps(slope, functions, *options)

        # All functions at once are a quick no, but may depend on each other.
        alone = [np.ones(number)] if number == 1 or name in coupled else np.eye(number)
        try:
            if moves(np.ones(number)) and any(map(moves, alone)):
                return True
        except (TypeError, ValueError, NotImplementedError):
            return False  # not differentiable: a callback, integer code
    return False


def _programs(log_density, shapes) -> dict[str, shared]:
    """By the values at each site."""
    return {k: shared(partial(_derivatives, log_density, k), briefly=True) for k in shapes}


def _kinked(programs, shapes, dtype, several) -> bool:
    """
    Whether a likelihood has kinks.

    :param several: functions, combinations or axes of them, that it takes at a time.
    """
    sizes = {name: (int(np.prod(shape[:-1])), shape[-1]) for name, shape in shapes.items()}
    if several > 2:
        return False
    f = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}

    def found(name):
        still = np.zeros(sizes[name], dtype)

        def slope(value):
            value = np.asarray(value, dtype).reshape(shapes[name])
            return programs[name]({**f, name: value}, still)[1]

        return has_kinks(slope, sizes[name], dtype)

    try:
        return any(map(found, shapes))
    except (TypeError, ValueError, NotImplementedError):
        return False  # not twice differentiable


def _bends_alike(programs, shapes, dtype) -> bool:
    """Whether the curvature of a likelihood is the same at two places."""
    rng = np.random.default_rng(3)
    places = [{k: np.asarray(rng.normal(size=s), dtype) for k, s in shapes.items()}]
    places.append({name: np.zeros(shape, dtype) for name, shape in shapes.items()})
    try:
        for name, shape in shapes.items():
            along = np.ones((int(np.prod(shape[:-1])), shape[-1]), dtype)
            a, b = (np.asarray(programs[name](f, along)[-1]) for f in places)
            with np.errstate(invalid="ignore"):  # what is not finite tells nothing
                if not np.all(np.abs(a - b) <= _ALIKE * np.maximum(np.abs(a), np.abs(b))):
                    return False
    except (TypeError, ValueError, NotImplementedError):
        return False  # not twice differentiable
    return True


def _with_slope(log_density, name, f):
    """The log density and its gradient as functions of a site's values, in any shape."""
    return jax.value_and_grad(
        lambda value: log_density({**f, name: value.reshape(f[name].shape)})
    )


def _derivatives(log_density, name, f, direction):
    """
    The log density, its gradient in the values of a site, and the Hessian's product with a
    direction, the last two of the direction's shape ``(num_functions, N)``.
    """
    value = f[name].reshape(direction.shape)
    found = _with_slope(log_density, name, f)
    first, (_, second) = jax.jvp(found, (value,), (direction,))
    return *first, second


def _slopes(log_density, name, f, direction):
    """The log density and its gradient, of the shape of ``direction``."""
    return _with_slope(log_density, name, f)(f[name].reshape(direction.shape))


def _moved_by_others(product, f, rows) -> bool:
    """
    Whether the gradient at some rows moves where only other rows do: by no rounding error,
    since derivatives along zero are zero.

    :param product: from values and a number for each row to :math:`H s`.
    :param rows: which ones, of the shape of what that returns.
    """
    index = np.arange(np.shape(rows)[-1])
    # Any two rows differ in a digit.
    for digit in range(max(len(index) - 1, 0).bit_length()):
        for still in (0, 1):
            stays = (index >> digit) % 2 == still
            if np.any(rows & stays & (np.abs(product(f, ~stays)) > 0.0)):
                return True
    return False


def _moved_by_steps(slope, functions, num_rows: int, tolerance: float, sizes) -> bool:
    """
    Whether the gradient at rows that are held still moves with the other rows, by steps of
    sizes from a part of a unit to hundreds of them: kinks may be where data are.

    :param slope: from values ``(num_functions, N)`` to the log density and its gradient.
    :param functions: 1 for those that are moved, and whose gradient is looked at.
    :param tolerance: relative to the gradient, for rounding.
    :param sizes: of the steps.
    """
    rng = np.random.default_rng(1)
    functions = np.asarray(functions, bool)[:, None]
    f = 0.3 * rng.normal(size=(len(functions), num_rows))

    def step(size):
        return np.where(functions, size * rng.normal(size=f.shape), f)

    # Steps may leave the likelihood's support: what is no number there tells nothing.
    with jax.debug_nans(False), jax.debug_infs(False), np.errstate(invalid="ignore"):
        total, at = slope(f)
        totals, flat = [total], not np.any(at)
        for size in sizes:
            still = rng.permutation(num_rows) < num_rows // 2
            f = np.where(still, f, step(size))
            before, (total, at) = at, slope(f)
            scale = np.maximum(np.abs(before), np.abs(at))
            # Terms of a row that cancel, in another order: a few times that of the largest.
            largest = np.max(scale, where=scale < np.inf, initial=0.0)
            rounding = tolerance * (scale + 0.01 * largest)
            if np.any(functions & still & (np.abs(at - before) > rounding)):
                return True
            totals.append(total)
            flat = flat and not np.any(at)
        if not flat or len(set(totals)) == 1:
            return False
        # Steps (comparisons of rows) have no gradient anywhere, but second differences.
        for size in sizes:
            first, last = step(size), step(size)
            still = rng.permutation(num_rows) < num_rows // 2
            mixes = np.where(still, first, last), np.where(still, last, first)
            a, b, c, d = (slope(f)[0] for f in (first, last, *mixes))
            if abs(a + b - c - d) > tolerance * max(map(abs, (a, b, c, d))):
                return True
    return False

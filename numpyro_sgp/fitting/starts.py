"""Where training starts: some lengthscales, and random starts."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._checks import deviations
from numpyro_sgp._flat import Flat
from numpyro_sgp._programs import on_data
from numpyro_sgp.fitting.problem import constrained, unconstrained
from numpyro_sgp.guides.points import MeanKernel, point_name
from numpyro_sgp.inducing.initialise import points_instead
from numpyro_sgp.kernels.other import Linear, Polynomial
from numpyro_sgp.kernels.stationary import Periodic, Stationary
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins, union

#: Lengthscales that are tried, in units of the columns' standard deviations times sqrt(D).
SCALES = (1.0, 0.4, 2.5, 0.15)
#: Those that are held at first, while noise and all else become what suits them.
HELD = (0.15, 0.05)
#: From the first to the last of several functions, and the other way round: where all are
#: alike and functions that add up have the same priors, none becomes other than the others;
#: that of a noise ended 8 nats lower than where it began with other lengthscales.
APART = (1.0, 0.1)


def lengthscale_starts(problem) -> tuple[list[dict], dict[int, tuple[str, ...]]]:
    """
    The start with the lengthscales of stationary kernels (of linear ones, how far away
    their functions have a variance of one) at each of :data:`SCALES` and :data:`HELD`, as
    far as they are parameters of their own; of several functions at scales :data:`APART`
    too; beside the start itself, which is the first. Where priors of latents are wide they
    start at their means.

    :return: these, and the names of what is held at first, by the number of the start.
    """
    free = {**problem.free, **jax.device_put(problem.units.means)}
    names = [n for n in free if n not in problem.guide.roles()]
    scaled = scaled_of(problem, names)
    fed = list(dict.fromkeys(one.name for one in scaled))
    found, held = [free], {}
    if not fed:
        return found, held
    shapes = [one.functions for one in scaled]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    alike = [[np.full(shape, scale) for shape in shapes] for scale in SCALES + HELD]
    apart = []
    for between in (APART, APART[::-1]) if ends[-1] > 1 else ():
        parts = np.split(np.geomspace(*between, ends[-1]), ends[:-1])
        apart.append([a.reshape(shape) for a, shape in zip(parts, shapes, strict=True)])
    places: list[list] = []  # others than these, as where functions share a parameter
    for i, scales in enumerate(alike + apart):
        start = {**free, **at_scales(problem, free, scaled, scales)}
        here = [start[name] for name in fed]
        seen = i >= len(alike) and any(all(map(np.array_equal, here, at)) for at in places)
        if not seen and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(start)):
            places.append(here)
            if len(SCALES) <= i < len(alike):
                held[len(found)] = tuple(fed)
            found.append(start)
    return found, held


class Scaled(NamedTuple):
    """
    A lengthscale of a kernel, or another number of it, that one parameter makes.

    :param name: of the parameter.
    :param value: the lengthscale, in the shape of the functions, with an axis of columns
        if each has its own.
    :param sd: standard deviations of the columns that it is of, ``(D,)`` or, for one of
        all columns, ``(1, D)``.
    :param slope: of the sum of its logs by the unconstrained parameter, in its shape; None
        where it is the parameter itself.
    """

    name: str
    value: np.ndarray
    sd: np.ndarray
    slope: np.ndarray | None

    @property
    def is_moved(self) -> bool:
        """Whether the parameter moves it, which may be clipped where it is."""
        slope = self.slope
        return slope is None or bool(np.isfinite(slope).all() and np.any(slope))

    @property
    def functions(self) -> tuple[int, ...]:
        """The shape of the functions that have one of their own."""
        has_columns = self.value.shape[-1:] == self.sd.shape
        return self.value.shape[:-1] if has_columns else self.value.shape


def at_scales(problem, free, scaled: list[Scaled], scales) -> dict:
    """
    What lengthscales are made of, where they are so many deviations of the columns.

    :param scales: of each lengthscale, in the shape of its functions.
    """
    moved, stepped = {}, {}
    for scale, (name, lengthscale, sd, slope) in zip(scales, scaled, strict=True):
        active = sd[sd > 0.0]
        target = np.sqrt(len(active)) * np.where(sd > 0.0, sd, 1.0)
        value = np.asarray(problem.params[name])  # of lengthscales, no real latents
        if value.shape[-1:] == sd.shape and lengthscale.shape[-1:] == sd.shape:
            ratio = scale[..., None] * target / lengthscale
        else:
            by_function = scale if lengthscale.shape == scale.shape else scale[..., None]
            ratio = by_function * np.exp(np.mean(np.log(target))) / lengthscale
        if slope is None:
            moved[name] = np.asarray(value * ratio, free[name].dtype)
        else:
            step = newton(slope, np.log(ratio), lengthscale.size)
            here = stepped.get(name, free[name])
            stepped[name] = np.asarray(here + step, free[name].dtype)
    # Arrays of JAX as they were: with NumPy's a program is another one.
    return {**unconstrained(problem.svi, moved), **jax.device_put(stepped)}


def newton(slope, change, number: int):
    """
    What to add to a parameter so that logs of lengthscales change by so much.

    :param slope: of their sum, by the parameter.
    :param change: of each, or of all.
    :param number: of lengthscales.
    """
    shape, some = np.shape(slope), np.not_equal(slope, 0.0)
    if np.all(some) and shape == np.shape(change):
        return change / slope * (number if np.ndim(slope) == 0 else 1.0)
    if np.all(some) and shape and len(shape) == np.ndim(change):
        # One for all columns, of functions.
        axes = tuple(i for i, size in enumerate(shape) if size == 1)
        total = np.sum(change, axis=axes, keepdims=True)
        if total.shape == shape:
            return total / slope
    if 1 < np.sum(some) == np.size(change):  # some entries, one for each
        step = np.zeros(shape)
        step[some] = np.ravel(change) / slope[some]
        return step
    # Of several latents in one vector, those that move them.
    return slope * np.mean(change) * number / np.sum(slope**2)


def scaled_of(problem, names, kernels=None, length=None) -> list[Scaled]:
    """
    Lengthscales that one parameter makes, and nothing else: one for each parameter, and
    each of several that have entries of it for themselves.

    :param names: of parameters.
    :param kernels: from a kernel to those that it is made of and that have one;
        :func:`scaled_kernels` if None.
    :param length: from such a one to what it has; :func:`length_of` if None.
    """
    kernels, length = kernels or scaled_kernels, length or length_of
    guide, params, places = problem.guide, problem.params, {}
    trace = getattr(guide.known(), "trace", {})
    at_setup = {k: jnp.shape(s["value"]) for k, s in trace.items() if s["type"] == "sample"}

    def run(args, kwargs, given):
        data, seen = {**params, **given}, {}

        def at_site(site):
            prior = messages.unwrap(site["fn"])[0]
            for i, kernel in enumerate(kernels(prior.kernel)):
                label = f"{site['name']} {i}"
                seen[label], places[label] = length(kernel), (site["name"], kernel)
            return messages.at_prior_mean(site)

        for name, value in guide.others_at(data, args, kwargs).items():
            # Not those of all rows where the model draws some of these.
            if name not in at_setup or at_setup[name] == jnp.shape(value):
                data[name] = value
        messages.trace_of(guide.model, args, kwargs, 0, data=data, at_site=at_site)
        return seen

    rest = {name: params[name] for name in names}
    try:
        labels = origins(partial(run, problem.args, problem.kwargs), rest)
        values = on_data(run, problem.args, problem.kwargs, rest)
    except NotImplementedError:  # a base guide without a median
        return []
    fed = {}
    for label, origin in labels.items():
        site, kernel = places[label]
        X, dims = problem.inputs[site], kernel.active_dims
        X = X if dims is None else X[:, dims]
        if isinstance(kernel, Linear):  # whose values grow from zero
            sd = np.sqrt(np.mean(np.square(X, dtype=float), axis=0))
            if np.shape(values[label])[-1:] != sd.shape:  # the columns add up
                sd = np.full_like(sd, np.sqrt(np.mean(sd**2)))
        else:
            sd = deviations(X)
        if np.ndim(values[label]) <= np.ndim(kernel.variance):
            sd = sd[None]  # each function has one for all columns
        if len(union(origin)) != 1 or not np.any(sd > 0.0):  # equal rows tell no scale
            continue
        (name,) = union(origin)
        if isinstance(params[name], jax.Array):  # and no tree, as modules have
            fed[label] = name, np.asarray(values[label]), sd
    number = Counter(name for name, *_ in fed.values())
    itself = {
        label
        for label, (name, value, _) in fed.items()
        # Of a linear kernel's variance, a value of one is as that of a lengthscale.
        if not isinstance(places[label][1], Linear) and _is(params[name], value)
    }
    made = [k for k, (name, *_) in fed.items() if k not in itself or number[name] > 1]

    def slopes(args, kwargs, free):
        def logs(free):
            found = run(args, kwargs, {**rest, **problem.svi.constrain_fn(free)})
            return {label: jnp.sum(jnp.log(found[label])) for label in made}

        return jax.jacrev(logs)(free)

    others = {fed[label][0]: problem.free[fed[label][0]] for label in made}
    found = on_data(slopes, problem.args, problem.kwargs, others) if made else {}
    slope = {label: np.asarray(found[label][fed[label][0]]) for label in made}
    scaled = {label: Scaled(*told, slope.get(label)) for label, told in fed.items()}
    return list(_apart(scaled, itself))


def _apart(scaled: dict[str, Scaled], itself: set[str]) -> Iterator[Scaled]:
    """
    Those without entries of a parameter in common, of others the last one; and none that
    its parameter does not move, as one that is clipped.

    :param itself: those that are their parameter.
    """
    moved = {label: one for label, one in scaled.items() if one.is_moved}
    for name in dict.fromkeys(one.name for one in moved.values()):
        same = {label: one for label, one in moved.items() if one.name == name}
        slopes = [one.slope for one in same.values() if one.slope is not None]
        shared = sum(np.not_equal(slope, 0.0).astype(int) for slope in slopes)
        if len(same) > 1 and np.max(shared) == 1:
            yield from same.values()
        else:
            label, last = [*same.items()][-1]
            yield last._replace(slope=None) if label in itself else last


def _is(value, lengthscale) -> bool:
    return np.shape(value) == lengthscale.shape and np.allclose(value, lengthscale)


def scaled_kernels(kernel) -> list[Stationary | Linear]:
    """
    The kernels with a lengthscale in units of the inputs that one is made of: those of
    periodic ones are relative to the period.
    """
    leaves = jax.tree.leaves(
        kernel, is_leaf=lambda part: isinstance(part, Stationary | Linear)
    )
    kinds, others = Stationary | Linear, Periodic | Polynomial
    return [k for k in leaves if isinstance(k, kinds) and not isinstance(k, others)]


def periodic_kernels(kernel) -> list[Periodic]:
    """The periodic kernels that one is made of."""
    leaves = jax.tree.leaves(kernel, is_leaf=lambda part: isinstance(part, Periodic))
    return [part for part in leaves if isinstance(part, Periodic)]


def length_of(kernel):
    """The lengthscale; of a linear kernel, where its functions have a variance of one."""
    if not isinstance(kernel, Linear):
        return kernel.lengthscale
    root = jnp.sqrt(kernel.variance)
    per_column = np.ndim(kernel.lengthscale) > np.ndim(kernel.variance)
    return kernel.lengthscale / (root[..., None] if per_column else root)


def with_drawn_means(problem, free: dict, rng) -> dict:
    """
    The same with means of q(u) drawn from the prior: off the saddle at which natural steps
    stay where a likelihood is the same for f and -f.

    :param rng: a NumPy generator.
    """
    free = dict(free)
    for name in problem.profiled:
        if name.endswith("_mu"):
            draw = rng.normal(size=free[name].shape)
            free[name] = jax.device_put(draw.astype(free[name].dtype))
    return free


def with_narrow_q(problem, free: dict) -> dict:
    """
    The same with a tenth of the standard deviations of q(u): under a wide prior
    expectations of exponentials of f may be infinite.
    """
    narrow = {
        name: 0.1 * np.asarray(value)
        for name, value in problem.params.items()
        if name in problem.guide.roles() and name.endswith("_sqrt")
    }
    return {**free, **unconstrained(problem.svi, narrow)} if narrow else free


def generator(key) -> np.random.Generator:
    """NumPy's, for which nothing is compiled, by a key."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())


def random_starts(problem, key, number: int) -> list[dict]:
    """
    The start with means of q(u) drawn from the prior, and all that has no natural steps
    moved at random: by factors around e, and inducing points by a tenth of the columns'
    standard deviations.
    """
    sizes, roles, found = problem.scales(), problem.guide.roles(), []
    inducing = {name: sizes[name] for name in sizes if roles.get(name) == "inducing"}
    sizes |= jax.tree.map(lambda sd: 0.1 * sd, inducing)
    flat = Flat(sizes)
    flat_sizes = flat.ravel(sizes)
    for own in jax.random.split(key, number) if number else ():
        rng = generator(own)  # one of both, for numbers that are independent
        draw = rng.normal(size=flat_sizes.shape)
        moves = flat.unravel(flat_sizes * draw.astype(flat_sizes.dtype))
        start = with_drawn_means(problem, problem.free, rng)
        for name, move in moves.items():
            start[name] = jax.tree.map(
                lambda p, m: p + m.astype(p.dtype), start[name], move
            )
        found.append(start)
    return found


def with_other_points(
    problem, free: dict, rng, share: float, weights: dict | None = None
) -> dict | None:
    """
    The same with some inducing points at rows of the inputs that are drawn at random.

    :param rng: a NumPy generator.
    :param share: how many of the points; one at least.
    :param weights: of the rows by site, ``(N,)``; None for all alike.
    :return: None where no inducing points are trained.
    """
    guide, found = problem.guide, {}
    roles = guide.roles()
    for site_name, site in guide.known().sites.items():
        X, drawn = problem.inputs[site_name], {}
        wanted = (weights or {}).get(site_name, np.zeros(0))
        if len(wanted) == len(X) and 0.0 < wanted.sum() < np.inf:
            drawn["p"] = wanted / wanted.sum()
        for full in site.names.values():
            if roles.get(full) != "inducing" or full not in free:
                continue
            if free[full].shape[-1:] != X.shape[1:]:
                continue
            Z = np.array(free[full]).reshape(-1, X.shape[1])
            moved = rng.choice(len(Z), max(1, round(share * len(Z))), replace=False)
            Z[moved] = X[rng.choice(len(X), size=len(moved), **drawn)]
            found[full] = jnp.asarray(Z.reshape(free[full].shape), free[full].dtype)
    return {**free, **found} if found else None


def with_explained_points(problem, free: dict, rng, share: float) -> dict | None:
    """
    The same with some inducing points where they explain most of what the others leave of
    the variance of all rows, under the kernels there: better than where they were before
    anything was known of kernels, and than some where they are trained to.

    :param rng: a NumPy generator.
    :param share: how many of the points.
    :return: None where no points that a method chose are trained.
    :raises ValueError: if there are fewer distinct rows than points.
    """
    guide, found = problem.guide, {}
    roles = guide.roles()
    if not hasattr(guide, "posterior_at"):  # one Gaussian over all sites
        return None

    def run(args, kwargs, params):
        posteriors, _ = guide.posterior_at(params, args, kwargs)
        return {name: q.prior.kernel for name, q in posteriors.items()}

    kernels = None
    for name, site in guide.known().sites.items():
        full = [site.names.get(point_name(i)) for i in range(len(site.points))]
        option, X = site.approximation, problem.inputs[name]
        trained = [k for k in full if k in free and roles.get(k) == "inducing"]
        is_chosen = isinstance(getattr(option, "inducing", None), str)
        if len(trained) < len(full) or not is_chosen or option.inter_domain:
            continue
        if any(free[k].shape[-1:] != X.shape[1:] for k in trained):
            continue
        if kernels is None:
            params = constrained(problem.svi, free)
            kernels = on_data(run, problem.args, problem.kwargs, params)
        sets = [np.asarray(free[k]) for k in trained]  # [*batch, M, D]
        both, kernel = np.concatenate(sets, axis=-2), MeanKernel(kernels[name])
        for index in np.ndindex(both.shape[:-2]):  # each function with points of its own
            Z = both[index]
            moved = rng.choice(len(Z), max(1, round(share * len(Z))), replace=False)
            seed = int(rng.integers(2**31))
            both[(*index, moved)] = points_instead(kernel, X, Z, moved, seed)
        ends = np.cumsum([Z.shape[-2] for Z in sets])[:-1]
        for k, new in zip(trained, np.split(both, ends, axis=-2), strict=True):
            found[k] = jnp.asarray(new.astype(free[k].dtype))
    return {**free, **found} if found else None


def with_moved_latents(problem, free: dict, rng, size: float) -> dict:
    """
    The same with parameters that are neither of q(u) nor inducing points moved at random.

    :param rng: a NumPy generator.
    :param size: how far, in units of :meth:`Problem.scales`.
    """
    own = problem.guide.roles()

    def step(value, scale):
        step = size * scale * rng.normal(size=scale.shape)
        return (np.asarray(value) + step).astype(value.dtype)

    scales = {k: v for k, v in problem.scales().items() if size and k not in own}
    moved = {name: jax.tree.map(step, free[name], v) for name, v in scales.items()}
    return {**free, **moved}

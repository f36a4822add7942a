"""A model, a guide and data as a loss of unconstrained parameters, whole or by batches."""

import copy
import functools
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer.svi import SVI, SVIState
from numpyro.ops.provenance import eval_provenance

from numpyro_sgp._checks import deviations
from numpyro_sgp._kept import program
from numpyro_sgp._programs import (
    NEEDS_KNOWN_DATA,
    join_static,
    on_data,
    shared,
    split_static,
)
from numpyro_sgp.distributions.arguments import as_arrays, frames_as_arrays
from numpyro_sgp.elbo import MonteCarlo, ScoreFunction
from numpyro_sgp.families import Family
from numpyro_sgp.fitting.other_data import inputs_of
from numpyro_sgp.fitting.units import Units, units
from numpyro_sgp.guides import AutoSparseGP
from numpyro_sgp.guides.points import points_of
from numpyro_sgp.predictive.row_batches import count_rows
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.coupling import feeding
from numpyro_sgp.tracing.given_rows import GivenRows
from numpyro_sgp.tracing.row_axes import RowAxes, row_axes, rows_apart, site_shapes


def as_plain_arrays(model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments of a model as :func:`as_arrays` has them, frames as matrices too."""
    return frames_as_arrays(as_arrays(model, args, kwargs))


@contextmanager
def data_as_arguments(call: str):
    """
    Where a model is compiled with its data as arguments, whose values it does not know.

    :param call: how it is given a number that it would compute from them.
    :raises ValueError: if it needs to know them.
    """
    try:
        yield
    except (*NEEDS_KNOWN_DATA, TypeError) as error:
        if not isinstance(error, NEEDS_KNOWN_DATA) and _NO_SHAPE not in str(error):
            raise
        if isinstance(error, jax.errors.TracerBoolConversionError):
            raise ValueError(_BRANCH) from error
        raise ValueError(
            "The model needs to know values of its data while it is compiled, such as "
            "the number of groups by int(group.max()) + 1, or by jax.ops.segment_sum "
            f"without num_segments. Give it that number as an argument: {call}."
        ) from error


def constrained(svi: SVI, free: dict) -> dict:
    """
    Constrained parameters, by one program. What is positive is no zero: where a number has
    less than the least exponent (a variance that the data want none of), it is the least.
    """
    return program(svi, _constrained)(free, static=(), briefly=True)


def _constrained(svi, free, *, static):
    def nearest(value, free):
        if value.shape != free.shape or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        least = jnp.finfo(value.dtype).tiny
        return jnp.where((value == 0.0) & (free < jnp.log(least)), least, value)

    return jax.tree.map(nearest, svi.constrain_fn(free), free)


def unconstrained(svi: SVI, params: dict) -> dict:
    """The inverse of :func:`constrained`, of some parameters."""
    return program(svi, _unconstrained)(params, static=(), briefly=True)


def _unconstrained(svi, params, *, static):
    return svi.constrain_fn(params, invert=True)


_BRANCH = (
    "The model takes a branch of Python (if, while, and, not) by a value that is not known "
    "while it is compiled, which those of latents, of parameters and of f never are: write "
    "jnp.where(condition, a, b) or jax.lax.cond. Where it is of the data, give the model a "
    "flag or a number as an argument: fit(model, approximation, (X, y), flag=True)."
)
_NO_SHAPE = "sequences of concrete values"  # in JAX's error for a size that is traced
#: Work of all rows (:meth:`Problem.work`) below which programs are compiled briefly.
_SMALL = 3e5
#: What a likelihood at a draw costs, with its slopes, in multiplications of matrices.
_AT_A_NODE = 100
#: What a step of length one is of inducing points, in distances between neighbours: of a
#: standard deviation points in one column walk past each other, and do not come back.
SPACINGS = 3.0


class Problem:
    """
    What is to be trained.

    :param svi: model, guide and loss, initialised.
    :param state: where it starts.
    :param args: arguments of the model, with all data.
    :param kwargs: its keyword arguments.
    """

    def __init__(self, svi: SVI, state: SVIState, args: tuple, kwargs: dict):
        self._set(svi, state, args, kwargs)
        #: Number N of rows.
        self.num_rows: int = rows_of_sites(self.guide, args, kwargs)
        #: Families of q(u) that natural steps train, with names of what they are for.
        self.natural: list[tuple[Family, dict[str, str]]] = _natural(self)
        #: Whether the loss of all rows is random.
        self.random: bool = self._is_random()

    def _set(self, svi, state, args, kwargs):
        self.svi, self.guide, self.state = svi, svi.guide, state
        #: Unconstrained starting values.
        self.free: dict = svi.optim.get_params(state.optim_state)
        arrays, self._static = split_static((args, {**svi.static_kwargs, **kwargs}))
        #: Arrays among the arguments.
        self.arrays: list[Array] = jax.device_put(arrays)
        self.args, self.kwargs = args, kwargs
        self._trace_once()

    def in_place_of(self, svi: SVI, state: SVIState, args: tuple, kwargs: dict):
        """The same of other numbers of the same shapes, as of another precision."""
        other = copy.copy(self)
        for name in "params", "inputs":  # which are of these numbers
            other.__dict__.pop(name, None)
        other._set(svi, state, args, kwargs)
        return other

    @functools.cached_property
    def params(self) -> dict:
        """Constrained starting values."""
        return constrained(self.svi, self.free)

    @functools.cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        """Inputs of GP sites, ``(N, D)``: of a guide from a file not the few rows there."""
        return inputs_of(self.guide, self.args, self.kwargs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """``batch_shape + (N,)`` of each GP site."""
        trace = self.guide.prototype_trace
        sites = {name: trace[name]["fn"] for name in self.guide.approximations}
        found = {name: messages.unwrap(fn)[0].shape() for name, fn in sites.items()}
        # A guide from a file was set up with a few rows.
        few = max(shape[-1] for shape in found.values())
        return {
            name: (*shape[:-1], self.num_rows if shape[-1] == few else shape[-1])
            for name, shape in found.items()
        }

    @functools.cached_property
    def inner_layers(self) -> frozenset[str]:
        """GP sites that others depend on."""
        if len(self.guide.approximations) == 1:
            return frozenset()

        def trace_at(f):
            where = self.guide.model, self.args, self.kwargs
            return messages.trace_of(*where, at_site=messages.at_values(f))

        return feeding(trace_at, self.shapes, jnp.result_type(float))

    @functools.cached_property
    def _data_rows(self) -> tuple[frozenset[str], RowAxes | None]:
        return data_plates(self.guide, self.arrays, self._static, self.num_rows)

    @property
    def plates(self) -> frozenset[str]:
        """The plates whose rows a batch may be of, or none."""
        return self._data_rows[0]

    @property
    def is_small(self) -> bool:
        """Whether to compile a program of all rows takes longer than to run it."""
        return self.work(self.num_rows) < _SMALL

    @property
    def all_natural(self) -> bool:
        """Whether natural steps train all of q(u)."""
        own = {full for full, role in self.guide.roles().items() if role == "variational"}
        return own <= set(self.profiled)

    @property
    def profiled(self) -> list[str]:
        """Parameters that natural steps train."""
        return [full for _, names in self.natural for full in names.values()]

    def loss(self, free: dict, key: Array, arrays: list[Array]) -> Array:
        """
        The loss at unconstrained parameters, of all rows or of a batch of them.

        :param arrays: in the place of :attr:`arrays`.
        """
        return self._traced(free, key, arrays)

    def _trace_once(self):
        """Traces the loss once for data of a shape, however often programs have it."""
        svi = self.svi

        def loss(free, key, arrays):
            args, kwargs = join_static(arrays, self._static)
            params = svi.constrain_fn(free)
            size = self._batch_size(arrays)
            plates = self.plates if size < self.num_rows else frozenset()
            with GivenRows(size, self.num_rows, plates):
                found = svi.loss.loss(key, params, svi.model, svi.guide, *args, **kwargs)
            return sum(jax.tree.leaves(found))  # by site where it has sum_sites=False

        self._traced = jax.jit(loss)

    def averaged(self, number: int) -> "Problem":
        """The same with the mean of a random loss over so many keys, always the same."""
        other = self.as_random_with(_Mean(self.svi.loss, number))
        other.natural = []
        return other

    def with_loss(self, loss) -> "Problem":
        """The same with another loss."""
        other = self.as_random_with(loss)
        other.random = other._is_random()
        return other

    def as_random_with(self, loss) -> "Problem":
        """The same with another loss that is random if this one is."""
        other = copy.copy(self)
        other.svi = copy.copy(self.svi)
        other.svi.loss = loss
        other._trace_once()
        return other

    def _is_random(self) -> bool:
        def loss(key):
            return self.loss(self.free, key, self.arrays)

        return bool(eval_provenance(loss, key=jax.random.key(0)))

    def gain(self, free: dict, key: Array, number: int) -> tuple[float, float]:
        """
        How much lower a random loss is at other parameters than at :attr:`free`, and the
        standard error of that: by the mean over so many keys.
        """

        def gains(before, after, arrays):
            def one(key):
                return self.loss(before, key, arrays) - self.loss(after, key, arrays)

            return jax.lax.map(one, jax.random.split(key, number))

        found = np.asarray(shared(gains)(self.free, free, self.arrays), float)
        return float(found.mean()), float(found.std(ddof=1) / np.sqrt(number))

    def _batch_size(self, arrays) -> int:
        """Rows of what is in the place of the data."""
        pairs = zip(self.arrays, arrays, strict=True)
        axes = self._data_rows[1] if any(a.shape != b.shape for a, b in pairs) else None
        return self.num_rows if axes is None else axes.count(arrays)

    def work(self, num_rows: int) -> float:
        """
        Multiplications of M x M matrices with so many rows, and of columns for kernel
        matrices, of all latent functions; and what draws that stay the same cost.
        """
        known = self.guide.known()
        if hasattr(known, "work"):  # one Gaussian over all sites
            return known.work(num_rows)
        total = 0.0
        for name, site in known.sites.items():
            fn = self.guide.prototype_trace[name]["fn"]
            size = sum(points_of(p).shape[-2] for p in site.points)
            functions = int(np.prod(fn.shape()[:-1]))
            total += functions * (num_rows + size) * float(size) * (size + site.X.shape[-1])
            total += functions * num_rows * _AT_A_NODE * self._draws
        return total

    @property
    def _draws(self) -> int:
        """The same at each step, which are many; 0 where they are others."""
        rule = getattr(self.svi.loss, "expectation", None)
        if not isinstance(rule, MonteCarlo | ScoreFunction) or rule.seed is None:
            return 0
        return rule.num_samples

    def rows(self, arrays, index: Array) -> list[Array]:
        """Arrays with some rows of the data only."""
        axes = self._data_rows[1]
        return list(arrays) if axes is None else axes.take(arrays, index)

    def scales(self) -> dict[str, Any]:
        """
        What a step of length one is for each parameter that has no natural steps, an array
        (or a tree of them) like the parameter: for inducing points the standard deviations
        of the inputs, or :data:`SPACINGS` between neighbours where these are less, for
        latents those of :class:`~numpyro_sgp.fitting.units.Units`, for all others one.
        """
        scales = {
            name: jax.tree.map(lambda v: np.ones(v.shape, v.dtype), value)
            for name, value in self.free.items()
            if name not in self.profiled
        }
        roles = self.guide.roles()
        for name, site in self.guide.known().sites.items():
            sd = deviations(self.inputs[name])
            columns = max(1, np.sum(sd > 0.0))
            sd = np.where(sd > 0.0, sd, 1.0)
            for full in site.names.values():
                if full not in scales or roles.get(full) != "inducing":
                    continue
                ones = np.asarray(scales[full])
                if ones.shape[-1:] == sd.shape:
                    near = min(1.0, SPACINGS * ones.shape[-2] ** (-1.0 / columns))
                    scales[full] = (near * ones * sd).astype(ones.dtype)
        return scales | {k: v for k, v in self.units.sizes.items() if k in scales}

    @functools.cached_property
    def units(self) -> Units:
        """Those of its latents and parameters."""
        return units(self)


class _Mean:
    """A loss averaged over keys that are split from the one that it is given."""

    def __init__(self, loss, number):
        self._loss, self._number = loss, number

    def loss(self, rng_key, *args, **kwargs):
        keys = jax.random.split(rng_key, self._number)
        losses = jax.lax.map(lambda key: self._loss.loss(key, *args, **kwargs), keys)
        return jnp.mean(losses)


def _natural(problem):
    """
    The families that natural steps are for: those of every Gaussian q(u) but of inner
    layers, whose loss is too noisy and too far from a quadratic.
    """
    guide, found = problem.guide, []
    for site, full in guide.parameter_names().items():
        family = guide.approximations[site].family
        taken = family.takes_natural_steps(full)
        if family.no_natural_step is None and taken and site not in problem.inner_layers:
            found.append((family, {name: full[name] for name in taken}))
    return found


def rows_of_sites(guide, args: tuple, kwargs: dict) -> int:
    """
    Rows of the GP site that has most with these arguments of the model; where it cannot be
    traced, of the first array.
    """
    with suppress(Exception):  # of the model's code, which it raises in earnest too
        arrays, static = split_static((args, kwargs))
        shapes = site_shapes(partial(_trace, guide, static), arrays)
        return max(shapes[name][-1] for name in guide.known().sites)
    return count_rows(args, kwargs) or 0


def _trace(guide, static, arrays, at_site=messages.above_prior_mean) -> dict:
    """The model's trace."""
    where = guide.model, *join_static(arrays, static)
    return messages.trace_of(*where, at_site=at_site)


def data_plates(
    guide, arrays, static, num_rows: int
) -> tuple[frozenset[str], RowAxes | None]:
    """
    The plates of which a batch may be taken, and where their rows are: none unless each
    observation is in one of them, each row of the data has one of each GP site, with the
    same inputs in a batch, and no other latent is in them.

    :param arrays: arrays among the model's arguments.
    :param static: what else there is.
    :param num_rows: of :func:`rows_of_sites`.
    """
    setup, none = guide.known(), (frozenset(), None)
    if setup.coupling.couples or setup.coupling.combines or setup.subsampled:
        return none
    if any(site.approximation.needs_all_rows for site in setup.sites.values()):
        return none
    sizes, sites, trace = {}, [], partial(_trace, guide, static)

    def run(arrays):
        for name, site in trace(arrays).items():
            if site["type"] == "plate":
                sizes[name] = site["args"][0]
            elif site["type"] == "sample":
                sites.append((name, site))

    jax.eval_shape(run, arrays)
    plates = frozenset(name for name, size in sizes.items() if size == num_rows)
    for name, site in sites:
        inside = any(frame.name in plates for frame in site["cond_indep_stack"])
        if name in setup.sites:
            fits = messages.unwrap(site["fn"])[0].shape()[-1] == num_rows
        else:
            fits = inside == site["is_observed"]
        if not fits:
            return none
    axes = row_axes(trace, arrays, setup.sites)
    if axes is None or not rows_apart(trace, axes, setup.sites)(arrays):
        return none
    return plates, axes


def check_same_rows(guide, args, kwargs):
    """
    :raises ValueError: if a guide has a part for each row, and was set up with others.
    """
    if not isinstance(guide, AutoSparseGP) or guide.prototype_trace is None:
        return
    setup = guide.known()
    if not any(option.needs_all_rows for option in setup.approximations.values()):
        return

    def inputs(args, kwargs, seed):
        where = guide.model, args, kwargs, seed
        trace = messages.trace_of(*where, at_site=messages.at_prior_mean)
        return {name: messages.unwrap(trace[name]["fn"])[0].X for name in setup.sites}

    found, other = (on_data(inputs, args, kwargs, jax.random.key(i)) for i in range(2))
    for name, site in setup.sites.items():
        if not site.approximation.needs_all_rows:
            continue
        X = np.asarray(found[name]).reshape(-1, np.shape(found[name])[-1])
        # Of a fit from a file there are these alone.
        rows = np.asarray(site.constants.get("X", site.points[0]))
        same = X.shape == rows.shape
        if np.array_equal(found[name], other[name]):  # they depend on no other latent
            same = same and np.allclose(X, rows, rtol=1e-6, atol=0.0)
        if not same:
            raise ValueError(
                f"{site.approximation} has a part for each row of the data that it was set "
                f"up with, and GP site '{name}' has other inputs here. Give fit the "
                "approximation again, in the place of a guide or a fit."
            )

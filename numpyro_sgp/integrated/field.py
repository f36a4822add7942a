"""A model as one Gaussian field with hyperparameters: GP sites and effects together."""

from __future__ import annotations

import math
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from numpyro_sgp._programs import NEEDS_KNOWN_DATA, on_data, shared, without_leaks
from numpyro_sgp.guides import VGP, AutoSparseGP
from numpyro_sgp.guides.points import point_name, points_of
from numpyro_sgp.linalg import matmul
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.program import opening

#: Most hyperparameters that are integrated.
MAX_HYPERPARAMETERS = 15
#: Most numbers of the field.
MAX_FIELD = 5_000
_MOST_IN_A_ROW = 20  # linear predictors, integrated together


@dataclass(frozen=True, eq=False)
class Layout:
    """
    How the numbers of the linear predictors share terms of the likelihood: row ``n`` has
    ``J`` of them, integrated together.

    :param shapes: of the predictors.
    :param axes: the axis of the rows in each; None where each number is a row of its own.
    :param num_rows: N.
    """

    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[int | None, ...]
    num_rows: int

    @property
    def number(self) -> int:
        """J, of all predictors together."""
        return sum(math.prod(shape) // self.num_rows for shape in self.shapes)

    def joined(self, values: list[Array]) -> Array:
        """Predictors as an array of shape ``(J, N)``."""
        rows = []
        for value, axis in zip(values, self.axes, strict=True):
            value = value if axis is None else jnp.moveaxis(value, axis, -1)
            rows.append(value.reshape(-1, self.num_rows))
        return jnp.concatenate(rows)

    def split(self, rows: Array) -> list[Array]:
        """The inverse of :meth:`joined`."""
        values, end = [], 0
        for shape, axis in zip(self.shapes, self.axes, strict=True):
            start, end = end, end + math.prod(shape) // self.num_rows
            if axis is None:
                values.append(rows[start:end].reshape(shape))
            else:
                rest = (*shape[:axis], *shape[axis + 1 :], self.num_rows)
                values.append(jnp.moveaxis(rows[start:end].reshape(rest), -1, axis))
        return values


@dataclass(frozen=True, eq=False)
class Linear:
    r"""
    Values that are linear in the field, :math:`\eta = b_0 + B^\top w + r`, where w are the
    numbers of the field, :math:`w \sim N(0, I)` a priori, and r what inducing points leave
    open at a GP site.

    :param base: :math:`b_0`, shape ``(J, N)``.
    :param maps: :math:`B`, shape ``(m, J, N)``.
    :param left: standard deviations that each latent function leaves open, ``(F, J, N)``.
    """

    base: Array
    maps: Array
    left: Array

    def moments(self, mean: Array, factor: Array) -> tuple[Array, Array]:
        """
        Means ``(J, N)`` and covariances ``(J, J, N)`` where w has this mean and covariance.

        :param mean: shape ``(m,)``.
        :param factor: a square root of the covariance, ``(m, m)``.
        """
        m = len(mean)
        flat = self.maps.reshape(m, -1)
        V = matmul(factor.T, flat).reshape(self.maps.shape)
        covariance = jnp.einsum("krn,ksn->rsn", V, V)
        covariance += jnp.einsum("frn,fsn->rsn", self.left, self.left)
        return self.base + (mean @ flat).reshape(self.base.shape), covariance


jax.tree_util.register_dataclass(Linear, ["base", "maps", "left"], [])


class Field:
    """
    What is known of a model with its data: which latents are the field and which are
    hyperparameters.

    :param guide: set up with the data; for the GP sites and their inducing points.
    :param args: arguments of the model.
    :param kwargs: its keyword arguments.
    :param effects: names of the latents that are part of the field, where they are known.
    :raises ValueError: if the model's likelihood is not one of linear predictors by row.
    """

    def __init__(
        self,
        guide: AutoSparseGP,
        args: tuple,
        kwargs: dict,
        effects: tuple[str, ...] | None = None,
    ):
        self.guide, self.model = guide, guide.model
        setup = guide.known()
        _check(guide, setup)
        self.sites = setup.sites
        #: Values at GP sites, inducing points for the most part.
        self.points: dict[str, dict] = {
            name: {key: p.value for key, p in site.initial.items()} | site.constants
            for name, site in setup.sites.items()
        }
        #: Observed sites.
        self.responses = tuple(k for k, s in setup.trace.items() if messages.is_response(s))
        fns = {name: setup.trace[name]["fn"] for name in setup.latents}
        self.gp_shapes = {
            name: messages.unwrap(setup.trace[name]["fn"])[0].shape() for name in self.sites
        }
        self.dtype = jnp.result_type(float)
        #: Names of latents that are part of the field, beside GP sites.
        self.effects: tuple[str, ...] = tuple(k for k, fn in fns.items() if _is_normal(fn))
        self.shapes = {name: tuple(fn.shape()) for name, fn in fns.items()}
        self._fns = fns
        self.layout: Layout
        if effects is not None:
            self.effects = effects
        else:
            while (wrong := self._look(args, kwargs)) is not None:
                self.effects = tuple(name for name in self.effects if name not in wrong)
        #: Names of the hyperparameters.
        self.thetas = tuple(name for name in fns if name not in self.effects)
        #: Their shapes in unconstrained space.
        self.free_shapes: dict[str, tuple[int, ...]] = {
            name: tuple(biject_to(fns[name].support).inverse_shape(self.shapes[name]))
            for name in self.thetas
        }
        _check_sizes(self)

    # ---- sizes --------------------------------------------------------------------

    @property
    def latents(self) -> frozenset[str]:
        """Names of all latents."""
        return frozenset((*self.sites, *self.shapes))

    @property
    def size(self) -> int:
        """Number m of the field's numbers."""
        return sum(self.gp_sizes().values()) + self.num_effects

    @property
    def num_effects(self) -> int:
        """How many of them are effects."""
        return sum(math.prod(self.shapes[name]) for name in self.effects)

    def gp_sizes(self) -> dict[str, int]:
        """Inducing variables of each GP site, of all of its latent functions."""
        return {
            name: math.prod(self.gp_shapes[name][:-1])
            * sum(points_of(points).shape[-2] for points in site.points)
            for name, site in self.sites.items()
        }

    @property
    def num_hyperparameters(self) -> int:
        """Number p of hyperparameters in unconstrained space."""
        return sum(math.prod(shape) for shape in self.free_shapes.values())

    def unravel(self, free: Array) -> dict[str, Array]:
        """Unconstrained hyperparameters by name, from a vector ``(p,)``."""
        found, end = {}, 0
        for name, shape in self.free_shapes.items():
            start, end = end, end + math.prod(shape)
            found[name] = free[start:end].reshape(shape)
        return found

    def effect_parts(self, w: Array) -> dict[str, Array]:
        """Standardised effects by name, from the last numbers of the field."""
        found, end = {}, len(w) - self.num_effects
        for name in self.effects:
            start, end = end, end + math.prod(self.shapes[name])
            found[name] = w[start:end].reshape(self.shapes[name])
        return found

    # ---- the model as a program ---------------------------------------------------

    @property
    def keys(self) -> list:
        """Keys of the field's openings."""
        return [("gp", name) for name in self.sites] + [("effect", k) for k in self.effects]

    def run(self, free: dict, points: dict, args, kwargs, joint: bool = False) -> dict:
        """
        Runs the model with openings in the place of the field; what it came to.

        :param free: unconstrained hyperparameters by name.
        :param points: as :attr:`points`.
        :param joint: whether covariances of what inducing points leave open are wanted.
        """
        placed = _Placed(self, free, points, joint)
        trace_here = handlers.seed(self.model, jax.random.key(0))
        with handlers.block(), handlers.trace() as trace, placed:
            trace_here(*args, **kwargs)
        likelihood = {
            name: messages.log_prob(site)
            for name, site in trace.items()
            if site["type"] == "sample" and site["is_observed"]
        }
        values = {
            name: site["value"]
            for name, site in trace.items()
            if site["type"] == "deterministic" or name in self.latents
        }
        return {
            "likelihood": likelihood,
            "values": values,
            "log_prior": placed.log_prior,
            "known": placed.known,
            "projections": placed.projections,
            "left": placed.left,
            "joint": placed.joint,
        }

    def program(
        self, free: dict, points: dict, args, kwargs, joint: bool = False
    ) -> LinearProgram:
        """:meth:`run`, traced."""
        return LinearProgram(lambda: self.run(free, points, args, kwargs, joint), self.keys)

    def _look(self, args, kwargs):
        """Finds the layout; returns names that are no effects after all, if any."""
        wrong: set | None = None

        def look():
            nonlocal wrong
            thetas = [name for name in self.shapes if name not in self.effects]
            free = {k: jnp.zeros(_free_shape(self._fns[k])) for k in thetas}
            program = self.program(free, self.points, args, kwargs)
            wrong = self._read(program)
            return ()

        jax.eval_shape(look)
        return wrong

    def _read(self, program):
        outputs = program.outputs
        for name, known in outputs["known"].items():
            labels = frozenset().union(*map(program.labels, jax.tree.leaves(known)))
            fed = [label[1] for label in labels if label[0] == "gp"]
            if fed:
                raise ValueError(
                    f"Site '{name}' has a prior that depends on GP site '{fed[0]}' "
                    "otherwise than by its mean (a deep GP, or hyperparameters that are "
                    "functions). Nested inference is for GP sites beside one another: use "
                    "sgp.fit, or NUTS."
                )
            if labels:
                return {label[1] for label in labels}
        likelihood = list(outputs["likelihood"].values())
        roots = program.predictors(likelihood)
        on_gp = {root: any(k == "gp" for k, _ in program.labels(root)) for root in roots}
        sizes = [math.prod(r.aval.shape) for r in roots if on_gp[r]]
        if not sizes:
            raise ValueError(
                "The likelihood does not depend on any GP site, so that there is nothing "
                "to infer of it."
            )
        shapes = {tuple(r.aval.shape) for r in roots if on_gp[r]}
        for root in roots:
            if not on_gp[root] and tuple(root.aval.shape) not in shapes:
                # Effects that are not of rows, as predictors are: a scale, weights.
                return {name for _, name in program.labels(root)}
        found = [each for each in self._layouts(roots) if each.number <= _MOST_IN_A_ROW]
        if not found:
            raise ValueError(_TIED)
        self._candidates = found
        self.layout = found[0]
        return None

    def _layouts(self, roots) -> list[Layout]:
        """Ways in which predictors may share rows, those with few in a row first."""
        shapes = tuple(tuple(root.aval.shape) for root in roots)
        found = []
        sizes = {math.prod(shape) for shape in shapes}
        if len(sizes) == 1:
            found.append(Layout(shapes, (None,) * len(shapes), sizes.pop()))
        for num_rows in sorted({n for n in shapes[0] if n > 1}, reverse=True):
            if all(num_rows in shape for shape in shapes):
                axes = tuple(shape.index(num_rows) for shape in shapes)
                layout = Layout(shapes, axes, num_rows)
                if all(layout.number < other.number for other in found):
                    found.append(layout)
                elif all(layout.number != other.number for other in found):
                    found.append(layout)
        return sorted(found, key=lambda layout: layout.number)

    def choose_layout(self, free: Array, args, kwargs) -> None:
        """
        Takes the first layout under which rows are apart: the log likelihood has no mixed
        second derivative between them.

        :raises ValueError: if none is.
        """
        rng = np.random.default_rng(0)
        for layout in self._candidates:
            self.layout = layout
            if layout.num_rows == 1:
                return
            shape = layout.number, layout.num_rows

            def product(free, points, args, kwargs, signs, start):
                terms = self.terms(free, points, args, kwargs)

                def slope(rows):
                    return jax.grad(terms.log_likelihood)(terms.linear.base + rows)

                # Not the same for all predictors of a row: probabilities of classes do not
                # change with what is added to all.
                along = jnp.cos(jnp.arange(float(len(start))))[:, None] * signs
                here, second = jax.jvp(slope, (start,), (along,))
                # Some rows moved far: what is tied by steps has no second derivative.
                moved = signs > 0.0
                there = slope(jnp.where(moved, start + 2.0, start))
                change = jnp.where(moved, 0.0, there - here)
                return second / signs, change, jnp.max(jnp.abs(here))

            product = shared(product, briefly=True)
            apart = True
            for _ in range(2):
                start = jnp.asarray(rng.normal(size=shape), self.dtype)
                found = []
                for _ in range(2):
                    signs = rng.choice([-1.0, 1.0], shape[1])
                    signs = jnp.asarray(signs * rng.uniform(0.5, 1.5, shape[1]), self.dtype)
                    where = free, self.points, args, kwargs
                    found.append(product(*where, signs, start))
                (a, change, steep), (b, other, _) = jax.tree.map(np.asarray, found)
                eps = jnp.finfo(self.dtype).eps
                size = 1e4 * np.maximum(np.abs(a), np.abs(b)).max() + 1e3 * steep
                apart = apart and bool(np.all(np.abs(a - b) <= eps * size + 1e-30))
                moved = max(np.abs(change).max(), np.abs(other).max())
                apart = apart and bool(moved <= 1e3 * eps * steep + 1e-30)
            if apart:
                return
        raise ValueError(_TIED)

    # ---- inducing points ------------------------------------------------------------

    def points_at(self, free: Array, args, kwargs) -> dict[str, dict] | None:
        """:meth:`chosen`, where kernels hide traced values too."""
        return without_leaks(self.chosen, free, args, kwargs)

    def chosen(self, free: Array, args, kwargs) -> dict[str, dict] | None:
        """
        :attr:`points` where those that a method chooses are chosen greedily, for the
        kernels at some hyperparameters; None where there is nothing to choose.

        :param free: unconstrained hyperparameters, ``(p,)``.
        """
        new, kernels = {}, self._kernels(free, args, kwargs)
        for name, site in self.sites.items():
            option = site.approximation
            method = getattr(option, "inducing", None)
            all_rows = isinstance(option, VGP)
            if option.inter_domain or all_rows or not isinstance(method, str):
                continue
            prior = copy(messages.unwrap(self.guide.known().trace[name]["fn"])[0])
            prior.kernel = kernels[name]
            greedy = replace(option, inducing="greedy")
            if isinstance(getattr(option, "orthogonal", None), str):
                greedy = replace(greedy, orthogonal="greedy")
            with suppress(ValueError):  # as few distinct rows as points
                found = greedy.initial_points(prior, np.asarray(site.X))
                new[name] = {point_name(i): points_of(p) for i, p in enumerate(found)}
        if not new:
            return None
        return {name: {**own, **new.get(name, {})} for name, own in self.points.items()}

    def _kernels(self, free, args, kwargs) -> dict:
        """The kernel of each GP site at some hyperparameters, in known numbers."""
        free = self.unravel(free)
        zeros = {name: jnp.zeros(shape) for name, shape in self.gp_shapes.items()}
        zeros |= {name: jnp.zeros(self.shapes[name]) for name in self.effects}

        def run(args, kwargs, free):
            placed = AtValues(self, free, zeros)
            with handlers.block(), handlers.trace() as trace, placed:
                handlers.seed(self.model, jax.random.key(0))(*args, **kwargs)
            return {k: messages.unwrap(trace[k]["fn"])[0].kernel for k in self.sites}

        return on_data(run, args, kwargs, free)

    # ---- what inference needs -------------------------------------------------------

    def terms(self, free: Array, points: dict, args, kwargs) -> Terms:
        """The bound's parts at unconstrained hyperparameters ``(p,)``; under jit."""
        program = self.program(self.unravel(free), points, args, kwargs)
        outputs = program.outputs
        likelihood = list(outputs["likelihood"].values())
        roots = program.predictors(likelihood)
        parts = [*jax.tree.leaves((outputs["projections"], outputs["left"]))]
        prior = outputs["log_prior"]
        edge = program.boundary(roots, []) + program.boundary(likelihood, roots)
        targets = [*edge, *parts, prior]
        values = program.evaluate(targets, {}, {})
        known = dict(zip(targets, values, strict=True))
        linear = self.linear(program, known, roots, self.layout.joined)

        def log_likelihood(rows):
            given = {**known, **dict(zip(roots, self.layout.split(rows), strict=True))}
            return sum(jnp.sum(v) for v in program.evaluate(likelihood, given, {}))

        return Terms(known[prior], linear, log_likelihood)

    def linear(self, program, known, targets, joined, signs: bool = False) -> Linear:
        """
        Targets that are linear in the field, as :class:`Linear`.

        :param signs: whether what rows leave open has signs drawn at random.
        """
        outputs = program.outputs

        def of_field(field):
            return joined(program.evaluate(targets, known, field))

        zeros = {("gp", k): jnp.zeros(s, self.dtype) for k, s in self.gp_shapes_of(outputs)}
        zeros |= {
            ("effect", k): jnp.zeros(self.shapes[k], self.dtype) for k in self.effects
        }
        base, linear = jax.linearize(of_field, zeros)
        labels = frozenset().union(*map(program.labels, targets))
        maps, left = [], []
        for name, shape in self.gp_shapes_of(outputs):
            A, sd = known[outputs["projections"][name]], known[outputs["left"][name]]
            A = jnp.broadcast_to(A, (*shape[:-1], *A.shape[-2:]))
            A = A.reshape(-1, *A.shape[-2:])
            sd = jnp.broadcast_to(sd, shape).reshape(-1, shape[-1])
            if ("gp", name) not in labels:
                maps.append(jnp.zeros((len(A) * A.shape[1], *base.shape), self.dtype))
                left.extend([jnp.zeros_like(base)] * len(A))
                continue
            if signs:
                sd = sd * jax.random.rademacher(jax.random.key(0), sd.shape, sd.dtype)
            for q in range(len(A)):

                def of_function(values, q=q, name=name, shape=shape):
                    full = jnp.zeros((math.prod(shape[:-1]), shape[-1]), self.dtype)
                    full = full.at[q].set(values).reshape(shape)
                    return linear({**zeros, ("gp", name): full})

                maps.append(jax.vmap(of_function)(A[q]))
                left.append(of_function(sd[q]))
        for name in self.effects:
            shape = self.shapes[name]

            def of_effect(values, name=name, shape=shape):
                return linear({**zeros, ("effect", name): values.reshape(shape)})

            maps.append(jax.vmap(of_effect)(jnp.eye(math.prod(shape), dtype=self.dtype)))
        return Linear(base, jnp.concatenate(maps), jnp.stack(left))

    def gp_shapes_of(self, outputs):
        """Names and shapes of GP sites with the rows of these arguments."""
        for name, shape in self.gp_shapes.items():
            yield name, (*shape[:-1], outputs["left"][name].aval.shape[-1])


@dataclass(frozen=True, eq=False)
class Terms:
    """
    Parts of the bound at some hyperparameters.

    :param log_prior: of the unconstrained hyperparameters.
    :param linear: the predictors of the likelihood.
    :param log_likelihood: from predictors ``(J, N)`` to a number.
    """

    log_prior: Array
    linear: Linear
    log_likelihood: Any


_TIED = (
    "The likelihood ties rows of the data together, or uses several rows of a GP site in "
    "one term. Nested inference is for likelihoods of one row of linear predictors at a "
    "time: use NUTS(sgp.whiten(model)), or sgp.fit with "
    "expectation=MonteCarlo(num_samples, joint=True)."
)


class _Placed(Messenger):
    """Puts openings at the field's sites, and hyperparameters at theirs."""

    def __init__(self, field, free, points, joint):
        self.field, self.free, self.points, self._joint = field, free, points, joint
        self.log_prior = jnp.zeros((), field.dtype)
        self.known, self.projections, self.left, self.joint = {}, {}, {}, {}
        super().__init__()

    def process_message(self, msg):
        name, field = msg.get("name"), self.field
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
            return
        if msg["scale"] is not None and (name in field.sites or name in field.effects):
            raise ValueError(
                f"Latent site '{name}' is scaled (numpyro.handlers.scale, or a subsampled "
                "plate), but as part of the field it has its own prior. Scale observed "
                "sites alone."
            )
        if name in field.effects and tuple(msg["fn"].shape()) != field.shapes[name]:
            raise ValueError(
                f"Latent site '{name}' has the shape {msg['fn'].shape()} with these "
                f"arguments, but had {field.shapes[name]} with the training data: it is "
                "one number for each row of those. Its values at other rows are not "
                "inferred."
            )
        if name in field.sites:
            prior, _ = messages.unwrap(msg["fn"])
            posterior = field.sites[name].approximation.posterior(prior, self.points[name])
            A = posterior.projection
            variance = prior.kernel.diag(prior.X) - jnp.sum(A**2, axis=-2)
            self.projections[name] = A
            if self._joint:
                L = posterior.residual_factor()
                self.joint[name] = jnp.broadcast_to(L, (*prior.shape(), L.shape[-1]))
            positive = variance > 0
            self.left[name] = jnp.where(
                positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0
            )
            # Not the kernel's leaves: one of another class may have none.
            self.known[name] = [prior.X, A, variance]
            g = opening(("gp", name), prior.shape(), field.dtype)
            msg["value"] = jnp.reshape(prior.mean + g, msg["fn"].shape())
        elif name in field.effects:
            msg["value"], self.known[name] = _effect(msg["fn"], name, field.dtype)
        elif name in self.free:
            transform, free = biject_to(msg["fn"].support), self.free[name]
            msg["value"] = value = transform(free)
            density = jnp.sum(messages.log_prob({**msg, "intermediates": []}))
            slope = jnp.sum(transform.log_abs_det_jacobian(free, value))
            self.log_prior = self.log_prior + density + slope
            self.known[name] = density
        elif name in field.responses:
            msg["value"] = jnp.zeros(msg["fn"].shape())
        else:
            raise ValueError(
                f"Latent site '{name}' was not in the model when it was set up. The "
                "latents of a model must be the same in each run."
            )


class AtValues(Messenger):
    """
    Puts hyperparameters and all other latents at known values.

    :param free: unconstrained hyperparameters by name.
    :param values: of the other latents; of responses too, zero for those left out.
    """

    def __init__(self, field: Field, free: dict, values: dict):
        self.field, self.free, self.values = field, free, values
        super().__init__()

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
            return
        name = msg["name"]
        if name in self.free:
            msg["value"] = biject_to(msg["fn"].support)(self.free[name])
        elif name in self.values:
            msg["value"] = jnp.reshape(self.values[name], msg["fn"].shape())
        elif name in self.field.responses:
            msg["value"] = jnp.zeros(msg["fn"].shape())


class _Refusing(Messenger):
    """Refuses what has no density over all rows, before anything is drawn."""

    def process_message(self, msg):
        name = msg.get("name")
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            if subsample_size not in (None, size):
                raise ValueError(
                    f"Plate '{name}' takes a subsample of {subsample_size} of its {size} "
                    "rows, but nested inference sees all rows. Leave subsample_size out."
                )
        elif msg["type"] == "param":
            raise ValueError(
                f"The model has a parameter '{name}' (numpyro.param), which has no prior "
                "to be integrated over. Sample it: numpyro.sample(...)."
            )
        elif msg["type"] == "sample" and not msg["is_observed"]:
            if isinstance(messages.innermost(msg["fn"]), dist.ImproperUniform):
                raise ValueError(
                    f"Latent site '{name}' has an improper prior, under which the evidence "
                    "is not defined. Give it a proper one, such as dist.Normal(0, 10)."
                )


def check_model(model, args: tuple, kwargs: dict) -> None:
    """
    :raises ValueError: if a model has parameters, improper priors or subsampled plates.
    """

    def look():
        at_mean = messages.at_prior_mean
        messages.trace_of(_Refusing(model), args, kwargs, at_site=at_mean)
        return ()

    # What else is wrong is told when the guide is set up.
    with suppress(*NEEDS_KNOWN_DATA):
        jax.eval_shape(look)


def _is_normal(fn) -> bool:
    """Whether a latent has a Gaussian prior that may be part of the field."""
    fn, _ = messages.unwrap(fn)
    if isinstance(fn, dist.ExpandedDistribution):
        fn = fn.base_dist
    return isinstance(fn, dist.Normal | dist.MultivariateNormal)


def _effect(fn, name, dtype):
    """A Gaussian latent by its standardised values; and what must not be of the field."""
    base = messages.innermost(fn)
    e = opening(("effect", name), fn.shape(), dtype)
    if isinstance(base, dist.Normal):
        loc, scale = base.loc, base.scale
        value = jnp.broadcast_to(loc, fn.shape()) + jnp.broadcast_to(scale, fn.shape()) * e
        return value, [jnp.asarray(scale)]
    moved = jnp.einsum("...ij,...j->...i", base.scale_tril, e)
    return jnp.broadcast_to(base.loc, fn.shape()) + moved, [base.scale_tril]


def _free_shape(fn):
    return biject_to(fn.support).inverse_shape(fn.shape())


def _check(guide, setup):
    """Refuses what is not one Gaussian field."""
    for name, site in setup.sites.items():
        option = site.approximation
        family, kind = option.family, type(option).__name__
        if not family.has_all_gaussians:
            raise ValueError(
                f"GP site '{name}': nested inference has one full Gaussian over all sites "
                f"and effects, and {kind} with q(u) {family.name!r} is another "
                "approximation. Use SVGP, SOLVEGP or VGP with covariance='full'."
            )
        if option.relaxation is not None:
            raise ValueError(
                f"GP site '{name}': tight bounds are not for nested inference; leave "
                "tight='none'."
            )
    if setup.coupling.combines:
        raise ValueError(_TIED)
    for name in setup.latents:
        fn = setup.trace[name]["fn"]
        if isinstance(messages.unwrap(fn)[0], dist.MaskedDistribution):
            raise ValueError(
                f"Latent site '{name}' is masked, which leaves it without a prior. Put "
                "numpyro.handlers.mask around observed sites alone."
            )
        if fn.support.is_discrete:
            raise ValueError(
                f"Latent site '{name}' is discrete. Sum it out (dist.MixtureSameFamily, "
                "say), or use NumPyro's samplers for discrete latents."
            )


def _check_sizes(field):
    if field.num_hyperparameters > MAX_HYPERPARAMETERS:
        sizes = {name: math.prod(shape) for name, shape in field.free_shapes.items()}
        shown = ", ".join(f"'{name}': {size}" for name, size in sizes.items())
        raise ValueError(
            f"There are {field.num_hyperparameters} hyperparameters ({shown}), more than "
            f"nodes can cover (at most {MAX_HYPERPARAMETERS}). Latents with Normal priors "
            "on which the likelihood depends linearly are integrated as part of the field; "
            "give those such a prior, fix some, or use NUTS(sgp.whiten(model))."
        )
    if field.size > MAX_FIELD:
        sizes = field.gp_sizes() | {k: math.prod(field.shapes[k]) for k in field.effects}
        shown = ", ".join(f"'{name}': {size}" for name, size in sizes.items())
        raise ValueError(
            f"The field has {field.size} numbers ({shown}), and a covariance over all of "
            f"them; at most {MAX_FIELD}. Use fewer inducing points."
        )

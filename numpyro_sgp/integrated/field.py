"""A model as one Gaussian field with hyperparameters: GP sites and effects together."""

from __future__ import annotations

import math
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from numpyro_sgp._programs import join_static, on_data, shared, split_static, without_leaks
from numpyro_sgp.guides import VGP, AutoSparseGP
from numpyro_sgp.guides.points import MeanKernel, point_name, points_of
from numpyro_sgp.inducing.exchange import exchanged
from numpyro_sgp.integrated.coordinates import coordinates
from numpyro_sgp.integrated.effects import is_gaussian
from numpyro_sgp.integrated.groups import Groups
from numpyro_sgp.integrated.maps import combined, linear_maps
from numpyro_sgp.integrated.placing import (
    NOT_FINITE,
    TIED,
    AtValues,
    Placed,
    Unconstrained,
    check_setup,
    free_shape,
)
from numpyro_sgp.integrated.predictors import Layout, Linear, Terms, layout_of_rows
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.kinks import has_kinks
from numpyro_sgp.tracing.linear import LinearProgram
from numpyro_sgp.tracing.plates import WholeIfFew
from numpyro_sgp.tracing.reach import NO_F

_MOST_IN_A_ROW = 20  # linear predictors, integrated together
_COMBINED = 1e-2  # of a predictor's variance, that rows which it combines leave open


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

    #: Hyperparameters whose coordinates are standardised, see :mod:`.coordinates`.
    standardised: frozenset[str] = frozenset()

    def __init__(
        self,
        guide: AutoSparseGP,
        args: tuple,
        kwargs: dict,
        effects: tuple[str, ...] | None = None,
    ):
        self.guide, self.model = guide, guide.model
        setup = guide.known()
        check_setup(setup)
        self.sites = setup.sites
        #: Values at GP sites, inducing points for the most part.
        self.points: dict[str, dict] = {
            name: {key: p.value for key, p in site.initial.items()} | site.constants
            for name, site in setup.sites.items()
        }
        #: Deterministic sites that the likelihood is made of, its predictors first.
        self.sums: tuple[str, ...] = ()
        #: Observed sites.
        self.responses = tuple(k for k, s in setup.trace.items() if messages.is_response(s))
        fns = {name: setup.trace[name]["fn"] for name in setup.latents}
        self.gp_shapes = {
            name: messages.unwrap(setup.trace[name]["fn"])[0].shape() for name in self.sites
        }
        self.dtype = jnp.result_type(float)
        #: Names of latents that are part of the field, beside GP sites.
        self.effects: tuple[str, ...] = tuple(k for k, fn in fns.items() if is_gaussian(fn))
        self.shapes = {name: tuple(fn.shape()) for name, fn in fns.items()}
        self._fns = fns
        #: Effects of groups that are independent given the rest, if they are many.
        self.groups: Groups | None = None
        self.layout: Layout
        self.kinked = False  #: whether the likelihood has kinks
        #: How rows may share predictors; empty where the data are not known yet.
        self.candidates: list[Layout] = []
        if effects is not None:
            self.effects = effects
        else:
            while (wrong := self.look(args, kwargs)) is not None:
                self.effects = tuple(name for name in self.effects if name not in wrong)
        #: Latents whose priors are made of the data; None where that was not asked.
        self.of_data: tuple[str, ...] | None = None
        #: Names of the hyperparameters.
        self.thetas = tuple(name for name in fns if name not in self.effects)
        #: Their shapes in unconstrained space.
        self.free_shapes = {name: tuple(free_shape(fns[name])) for name in self.thetas}

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

    @property
    def row_size(self) -> int:
        """How many of the field's numbers a row may have to do with."""
        groups = self.groups
        return self.size - (groups.number - 1) * groups.each if groups else self.size

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

    def unravel(self, free: Array) -> Unconstrained:
        """Unconstrained hyperparameters by name, from a vector ``(p,)``."""
        found, end = Unconstrained(), 0
        for name, shape in self.free_shapes.items():
            start, end = end, end + math.prod(shape)
            found[name] = free[start:end].reshape(shape)
        return found

    def ravel(self, values: dict, args, kwargs) -> Array:
        """
        Hyperparameters in their own space as an unconstrained vector ``(p,)``, by the
        supports that their priors have at these values: one may depend on another latent.
        """
        trace = self._trace_at({}, values, args, kwargs)
        found = [jnp.zeros(0)]
        for name in self.thetas:
            site = trace[name]
            free = coordinates(self, name, site["fn"]).inv(site["value"])
            found.append(jnp.ravel(free))
        return jnp.concatenate(found).astype(self.dtype)

    def _trace_at(self, free: dict, values: dict, args, kwargs) -> dict:
        """The model's trace at hyperparameters, with the field at zero."""
        thetas = {name: values[name] for name in self.thetas if name in values}
        placed = AtValues(self, free, thetas)
        with handlers.block(), handlers.trace() as trace, placed:
            handlers.seed(WholeIfFew(self.model), jax.random.key(0))(*args, **kwargs)
        return trace

    def effect_parts(self, w: Array) -> dict[str, Array]:
        """Standardised effects by name, from the last numbers of the field."""
        found, end = {}, len(w) - self.num_effects
        for name in self.apart():
            start, end = end, end + math.prod(self.shapes[name])
            found[name] = w[start:end].reshape(self.shapes[name])
        return found if self.groups is None else found | self.groups.parts(w[end:])

    def apart(self) -> list[str]:
        """Effects beside those of :attr:`groups`."""
        own = self.groups.axes if self.groups else {}
        return [name for name in self.effects if name not in own]

    # ---- the model as a program ---------------------------------------------------

    @property
    def keys(self) -> list:
        """Keys of the field's openings."""
        return [("gp", name) for name in self.sites] + [("effect", k) for k in self.effects]

    def running(self, model) -> Field:
        """The same with its model inside of handlers."""
        found = copy(self)
        found.model = model
        return found

    def run(self, thetas, points: dict, args, kwargs, joint: bool = False) -> dict:
        """
        Runs the model with openings in the place of the field; what it came to.

        :param thetas: hyperparameters, :class:`Unconstrained` or :class:`Constrained`.
        :param points: as :attr:`points`.
        :param joint: whether covariances of what inducing points leave open are wanted.
        """
        placed = Placed(self, thetas, points, joint)
        trace_here = handlers.seed(WholeIfFew(self.model), jax.random.key(0))
        with handlers.block(hide_fn=_is_own), handlers.trace() as trace, placed:
            trace_here(*args, **kwargs)
        # Known arrays as JAX's, which supports are compared with that depend on the field.
        likelihood = {
            name: messages.log_prob({**site, "value": jnp.asarray(site["value"])})
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
        self, thetas, points: dict, args, kwargs, joint: bool = False
    ) -> LinearProgram:
        """:meth:`run`, traced."""
        given = thetas, points, args, kwargs, joint
        return LinearProgram(lambda: self.run(*given), self.keys)

    def look(self, args, kwargs) -> set | None:
        """Finds the layout; returns names that are no effects after all, if any."""
        wrong: set | None = None

        def look():
            nonlocal wrong
            thetas = [name for name in self.shapes if name not in self.effects]
            shapes = {name: free_shape(self._fns[name]) for name in thetas}
            free = Unconstrained({k: jnp.zeros(shape) for k, shape in shapes.items()})
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
                    "functions). One Gaussian over all sites (sgp.nested, joint=True) is "
                    "for GP sites beside one another: use sgp.fit without joint, or "
                    "NUTS(sgp.whiten(model))."
                )
            if labels:
                return {label[1] for label in labels}
        likelihood = list(outputs["likelihood"].values())
        roots = program.predictors(likelihood)
        on_gp = {root: any(k == "gp" for k, _ in program.labels(root)) for root in roots}
        sizes = [math.prod(r.aval.shape) for r in roots if on_gp[r]]
        if not sizes:
            raise ValueError(NO_F)
        shapes = {tuple(r.aval.shape) for r in roots if on_gp[r]}
        for root in roots:
            if not on_gp[root] and tuple(root.aval.shape) not in shapes:
                # Effects that are not of rows, as predictors are: a scale, weights.
                return {name for _, name in program.labels(root)}
        values = {k: v for k, v in outputs["values"].items() if k not in self.latents}
        fed = program.feeding(values, likelihood)
        self.sums = tuple(sorted(fed, key=lambda name: values[name] not in roots))
        found = [each for each in self._layouts(roots) if each.number <= _MOST_IN_A_ROW]
        if not found:
            raise ValueError(TIED)
        self.candidates = found
        self.layout = found[0]
        return None

    def _layouts(self, roots) -> list[Layout]:
        """Ways in which they may share rows, with few in a row first, or have their own."""
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
        return sorted(found, key=lambda layout: layout.number) + _apart(shapes)

    def choose_layout(self, free: Array, args, kwargs) -> None:
        """
        Takes the first layout under which rows are apart: the log likelihood has no mixed
        second derivative between them.

        :raises ValueError: if none is, or a predictor is made of several rows of a GP site.
        """
        rng = np.random.default_rng(0)
        arrays, static = split_static((args, kwargs))

        def away(free, points, arrays):
            where = free, points, *join_static(arrays, static)
            total = self.terms(*where).linear.prior_variance()
            found = combined(lambda signs: self.terms(*where, signs).linear)
            return jnp.max(found / jnp.maximum(total, jnp.finfo(self.dtype).tiny))

        if shared(away, briefly=True)(free, self.points, arrays) > _COMBINED:
            raise ValueError(TIED)
        finite = True
        for layout in self.candidates:
            self.layout = layout
            if layout.num_rows == 1:
                return
            shape = layout.number, layout.num_rows

            def product(free, points, arrays, signs, start):
                terms = self.terms(free, points, *join_static(arrays, static))

                def slope(rows):
                    return jax.grad(terms.log_likelihood)(terms.linear.base + rows)

                # Not the same for all of a row: classes do not see what is added to all.
                along = jnp.cos(jnp.arange(float(len(start))))[:, None] * signs
                here, second = jax.jvp(slope, (start,), (along,))
                moved = signs > 0.0  # far: what is tied by steps has no second derivative
                there = slope(jnp.where(moved, start + 2.0, start))
                change = jnp.where(moved, 0.0, there - here)
                return second / signs, change, here

            product = shared(product, briefly=True)
            apart = True
            for _ in range(2):
                start = jnp.asarray(rng.normal(size=shape), self.dtype)
                found = []
                for _ in range(2):
                    drawn = rng.choice([-1.0, 1.0], shape[1])
                    drawn = drawn * rng.uniform(0.5, 1.5, shape[1])
                    signs = jnp.asarray(drawn, self.dtype)
                    found.append(product(free, self.points, arrays, signs, start))
                (a, change, here), (b, other, _) = jax.tree.map(np.asarray, found)
                steep = np.abs(here).max()
                finite = finite and bool(np.isfinite([a, b, change, other]).all())
                eps = jnp.finfo(self.dtype).eps
                size = 1e4 * np.maximum(np.abs(a), np.abs(b)).max() + 1e3 * steep
                apart = apart and bool(np.all(np.abs(a - b) <= eps * size + 1e-30))
                moved = max(np.abs(change).max(), np.abs(other).max())
                apart = apart and bool(moved <= 1e3 * eps * steep + 1e-30)

            def slope(rows, product=product, signs=signs):
                return product(free, self.points, arrays, signs, rows)[2]

            if apart:
                self.kinked = shape[0] <= 2 and has_kinks(slope, shape, self.dtype)
                return
        raise ValueError(TIED if finite else NOT_FINITE)

    # ---- inducing points ------------------------------------------------------------

    def points_at(self, free: Array, args, kwargs) -> dict[str, dict] | None:
        """:meth:`chosen`, where kernels hide traced values too."""
        return without_leaks(self.chosen, free, args, kwargs)

    def chosen(self, free: Array, args, kwargs) -> dict[str, dict] | None:
        """
        :attr:`points` where those that a method chooses are chosen by what they explain,
        greedily and then exchanged one by one, for the kernels at some hyperparameters;
        None where there is nothing to choose.

        :param free: unconstrained hyperparameters, ``(p,)``.
        """
        here = args, kwargs, free
        new, kernels = {}, on_data(lambda a, k, free: self.kernels_at(free, a, k), *here)
        for name, site in self.sites.items():
            option = site.approximation
            method = getattr(option, "inducing", None)
            all_rows = isinstance(option, VGP)
            if option.inter_domain or all_rows or not isinstance(method, str):
                continue
            prior = copy(messages.unwrap(self.guide.known().trace[name]["fn"])[0])
            prior.kernel = kernels[name]
            chosen = replace(option, inducing="explained")
            if isinstance(getattr(option, "orthogonal", None), str):
                chosen = replace(chosen, orthogonal="explained")
            with suppress(ValueError):  # as few distinct rows as points
                found = chosen.initial_points(prior, np.asarray(site.X))
                if len(found) == 1 and np.ndim(found[0]) == 2:
                    kernel = MeanKernel(prior.kernel)
                    found = (exchanged(kernel, np.asarray(site.X), found[0]),)
                # As they were, of which programs are compiled.
                found = (jnp.asarray(points_of(p), self.dtype) for p in found)
                new[name] = {point_name(i): points for i, points in enumerate(found)}
        if not new:
            return None
        return {name: {**own, **new.get(name, {})} for name, own in self.points.items()}

    def kernels_at(self, free, args, kwargs) -> dict:
        """The kernel of each GP site at unconstrained hyperparameters ``(p,)``."""
        trace = self._trace_at(dict(self.unravel(free)), {}, args, kwargs)
        return {k: messages.unwrap(trace[k]["fn"])[0].kernel for k in self.sites}

    # ---- what inference needs -------------------------------------------------------

    def terms(
        self,
        thetas,
        points: dict,
        args,
        kwargs,
        signs: Any = None,
        num_rows: int | None = None,
    ) -> Terms:
        """
        The bound's parts; under jit.

        :param thetas: hyperparameters as :meth:`run` takes them, or as an unconstrained
            vector ``(p,)``.
        :param signs: as in :meth:`linear`.
        :param num_rows: how many the predictors are to be of, if not as in the bound, which
            may have those of a row apart.
        """
        thetas = thetas if isinstance(thetas, dict) else self.unravel(thetas)
        program = self.program(thetas, points, args, kwargs)
        outputs = program.outputs
        likelihood = list(outputs["likelihood"].values())
        roots = program.predictors(likelihood)
        parts = [*jax.tree.leaves((outputs["projections"], outputs["left"]))]
        prior = outputs["log_prior"]
        edge = program.boundary(roots, []) + program.boundary(likelihood, roots)
        targets = [*edge, *parts, prior]
        values = program.evaluate(targets, {}, {})
        known = dict(zip(targets, values, strict=True))
        if num_rows is None:
            layout = self.layout.of_shapes(tuple(tuple(r.aval.shape) for r in roots))
        else:
            shapes = tuple(tuple(root.aval.shape) for root in roots)
            trained = max(shape[-1] for shape in self.gp_shapes.values())
            layout = layout_of_rows(shapes, num_rows, self.candidates, trained)
        linear = self.linear(program, known, roots, layout.joined, signs)

        def each(rows):
            given = {**known, **dict(zip(roots, layout.split(rows), strict=True))}
            found = program.evaluate(likelihood, given, {})
            return dict(zip(outputs["likelihood"], found, strict=True))

        return Terms(known[prior], linear, each)

    def linear(
        self, program, known, targets, joined, signs: Any = None, grouped: bool = True
    ) -> Linear:
        """
        Targets that are linear in the field, as :class:`Linear`.

        :param program: :meth:`program`, of which targets are values.
        :param known: values of the program that do not depend on the field, with those of
            projections and of what they leave open.
        :param joined: from values of the targets to an array ``(J, N)``.
        :param signs: key of signs, drawn at random, of what rows leave open; None for none.
        :param grouped: whether targets are of one group at most, where there are groups.
        """
        given = program, known, targets, joined
        return linear_maps(self, *given, signs, grouped)

    def gp_shapes_of(self, outputs):
        """Names and shapes of GP sites with the rows of these arguments."""
        for name, shape in self.gp_shapes.items():
            yield name, (*shape[:-1], outputs["left"][name].aval.shape[-1])


def _apart(shapes) -> list[Layout]:
    """Ways in which predictors of unlike numbers of entries have rows of their own."""
    by_size: dict[int, list[int]] = {}
    for i, shape in enumerate(shapes):
        by_size.setdefault(math.prod(shape), []).append(i)
    if len(by_size) == 1:
        return []
    sets = tuple((i,) for i in range(len(shapes))), tuple(map(tuple, by_size.values()))
    return [Layout.of_apart(shapes, apart) for apart in dict.fromkeys(sets)]


def _is_own(site) -> bool:
    """Whether nobody outside is to see a site: all but plates and what is observed."""
    return site["type"] != "plate" and not site.get("is_observed", False)

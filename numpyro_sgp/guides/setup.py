"""What a guide finds out about a model before it first runs."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.util import not_jax_tracer

from numpyro_sgp._programs import on_data, one_program
from numpyro_sgp._threads import one_thread
from numpyro_sgp.distributions.arguments import in_float64
from numpyro_sgp.distributions.columns import columns_of, inputs_among
from numpyro_sgp.families import Param
from numpyro_sgp.guides.checks import (
    assigned,
    check_likelihood,
    check_rows,
    checked_trace,
)
from numpyro_sgp.guides.identity import describe, shape_and_dtype
from numpyro_sgp.guides.messengers import (
    WithoutGPs,
    drawn_by,
    run_model,
)
from numpyro_sgp.guides.point_guide import near_means
from numpyro_sgp.guides.reports import check_cholesky
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.coupling import Coupling
from numpyro_sgp.tracing.plates import FirstRows
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.tracing.statistics import warn_of_statistics

_MAX_SETUP_BATCHES = 64


@dataclass(frozen=True, eq=False)
class SiteSetup:
    """
    What is put at a GP site, and where it starts.

    :param approximation: the approximation.
    :param prefix: of the full names of its values.
    :param points: starting inducing points of each set.
    :param initial: its :class:`~numpyro_sgp.families.Param` by name.
    :param constants: what the posterior needs beside parameters.
    :param kernel: the kernel at the starting hyperparameters.
    :param X: the inputs that points were chosen from, shape ``(N, D)``.
    """

    approximation: Any
    prefix: str
    points: tuple
    initial: dict[str, Param]
    constants: dict
    kernel: object
    X: np.ndarray

    @property
    def names(self) -> dict[str, str]:
        """Full names of its values by their names in the approximation."""
        return {name: f"{self.prefix}_{name}" for name in self.initial}

    def values(self, trained: bool) -> dict[str, Array]:
        """
        Starting values by full name.

        :param trained: those of parameters, or those that stay where they start.
        """
        return {
            self.names[name]: param.value
            for name, param in self.initial.items()
            if trained == self.approximation.is_trained(param)
        }

    def in_float64(self) -> "SiteSetup":
        """The same with its real numbers in 64 bits, where JAX has these."""
        initial = {
            name: replace(param, value=in_float64(param.value))
            for name, param in self.initial.items()
        }
        points, constants = in_float64((self.points, self.constants))
        return replace(self, points=points, initial=initial, constants=constants)


@dataclass(frozen=True, eq=False)
class Setup:
    """
    What :func:`prepare` found out.

    :param sites: the GP sites in the order of the model.
    :param latents: names of the other latents.
    :param base_guide: their guide; None if there are none.
    :param trace: sample and deterministic sites of the model.
    :param shapes: :class:`jax.ShapeDtypeStruct` (or trees of them) of all parameters.
    :param starts: starting values of the guide's parameters.
    :param arguments: the model's ``(args, kwargs)``; None where they are of a minibatch.
    :param columns: names of the columns of arguments that were frames; None where there is
        one still.
    :param inputs: of :func:`~numpyro_sgp.distributions.columns.inputs_among`.
    :param subsampled: whether a plate of the model has a minibatch of its rows.
    :param takes_rows: whether rows of arrays are taken by the index of a plate.
    :param coupling: which rows the likelihood, and other GP sites, tie together.
    :param description: what model and guide are made of.
    """

    sites: dict[str, SiteSetup]
    latents: tuple[str, ...]
    base_guide: object
    trace: dict
    shapes: dict
    starts: dict
    arguments: tuple | None
    columns: dict[str, tuple[str, ...]] | None
    inputs: dict[str, tuple[str, int]]
    subsampled: bool
    takes_rows: bool
    coupling: Coupling
    description: dict

    @property
    def fingerprint(self) -> str:
        """Of the description, 16 hexadecimal digits."""
        text = json.dumps(self.description, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def approximations(self) -> dict:
        """By GP site."""
        return {name: site.approximation for name, site in self.sites.items()}

    @property
    def state(self) -> dict:
        """What :func:`prepare` takes in place of choosing points, arrays by name."""
        return {
            "initial": {
                name: {key: param.value for key, param in site.initial.items()}
                for name, site in self.sites.items()
            },
            "constants": {name: site.constants for name, site in self.sites.items()},
        }

    @property
    def roles(self) -> dict[str, str]:
        """What the values of GP sites are for, by full name."""
        return {
            site.names[name]: param.role
            for site in self.sites.values()
            for name, param in site.initial.items()
        }

    def posteriors(self, natural_rate: float | None):
        """
        Declares the parameters of all GP sites; outside of the model, whose handlers are
        not for them.

        :param natural_rate: largest step of natural gradients, where begun.
        :return: from a GP site's message to its posterior.
        """
        declared = {
            name: site.approximation.declare(site.prefix, site.initial)
            for name, site in self.sites.items()
        }

        def posterior_at(message):
            name = message["name"]
            if name not in self.sites:
                raise ValueError(
                    f"GP site '{name}' was not in the model when this guide was set up. "
                    "Make a new guide for this model."
                )
            prior, reinterpreted = messages.unwrap(message["fn"])
            start, values = self.sites[name], declared[name]
            approximation, columns = start.approximation, start.initial["Z"].value.shape[-1]
            if prior.X.shape[-1] != columns and not approximation.inter_domain:
                raise ValueError(
                    f"GP site '{name}' has inputs with {prior.X.shape[-1]} columns, but "
                    f"its inducing points have {columns}. Make a new AutoSparseGP for "
                    "other inputs."
                )
            constants = {**start.constants, "natural_rate": natural_rate}
            posterior = approximation.posterior(prior, {**values, **constants})
            approximation.keep_state(values, posterior)
            if (num_rows := message["infer"].get("joint_rows", 1)) != 1:
                try:
                    posterior = posterior.drawn_together(num_rows)
                except (ValueError, NotImplementedError) as error:
                    raise type(error)(f"GP site '{name}': {error}") from None
            message["infer"] = {**message["infer"], "coupling": self._coupling_at(name)}
            return messages.rewrap(posterior, reinterpreted)

        return posterior_at

    def _coupling_at(self, name) -> Coupling:
        """With the axes of the functions at a GP site alone."""
        if not self.coupling.axes:
            return self.coupling
        axes = dict(zip(self.sites, self.coupling.axes, strict=True))
        return self.coupling._replace(axes=(axes[name],))


def prepare(
    model, approximation, make_base, prefix: str, rng_key, args, kwargs, saved=None
) -> Setup:
    """
    Checks a model, makes the base guide and chooses inducing points.

    :param make_base: from a model to a guide for the latents beside GP sites.
    :param prefix: of the names of parameters.
    :param rng_key: key of the first run of the base guide.
    :param saved: of :meth:`~numpyro_sgp.AutoSparseGP.setup_state`; None to choose points.
    :raises ValueError: as :class:`~numpyro_sgp.AutoSparseGP` says.
    """
    if not all(not_jax_tracer(leaf) for leaf in jax.tree.leaves((args, kwargs))):
        raise ValueError(
            "AutoSparseGP chooses its inducing points from known inputs, but the "
            "model's arguments are traced by jit or vmap. Call guide.setup(...) with "
            "them first."
        )
    one_thread()
    if rng_key is None or not not_jax_tracer(rng_key):
        rng_key = jax.random.key(0)
    with handlers.block(), messages.known_inside_jit():
        rows = check_row_indices(model, args, kwargs)
        start = getattr(make_base, "keywords", {}).get("init_loc_fn")
        start = None if start is near_means else start  # of what is drawn
        start = init_to_uniform if saved is not None else start  # which are not looked at
        trace = checked_trace(model, args, kwargs, start)
        gp_sites = [name for name, site in trace.items() if messages.is_latent_gp(site)]
        approximations = assigned(approximation, gp_sites)
        others = tuple(name for name in messages.latents(trace) if name not in gp_sites)
        base_guide, values, base_params = _new_base(
            model, make_base, gp_sites, others, rng_key, args, kwargs
        )
        subsampled, found = bool(subsample_plate_sizes(trace)), {}
        for name in gp_sites:
            option = approximations[name]
            check_rows(name, messages.unwrap(trace[name]["fn"])[0], option, subsampled)
            num = _num_batches(name, trace, option) if subsampled else 0
            if values or found or num:
                prior, X = _prior(model, name, values, found, args, kwargs, num)
            else:  # that of the trace
                prior = messages.unwrap(trace[name]["fn"])[0]
                X = prior.X.reshape(-1, prior.X.shape[-1])
            found[name] = _start(name, prior, np.asarray(X), option, prefix, saved)
        if saved is None:
            warn_of_statistics(model, args, kwargs, gp_sites)
        near = rows.loops
        coupling = check_likelihood(model, trace, found, values, args, kwargs, near)
    of_model = {name: s["value"] for name, s in trace.items() if s["type"] == "param"}
    starts = dict(base_params)
    for site in found.values():
        starts |= site.values(trained=True)
    shapes = jax.tree.map(shape_and_dtype, of_model | starts)
    points = {name: site.points for name, site in found.items()}
    return Setup(
        sites=found,
        latents=others,
        base_guide=base_guide,
        # What pickles, and what NumPyro's tools ask of a guide.
        trace={k: s for k, s in trace.items() if s["type"] in ("sample", "deterministic")},
        shapes=shapes,
        starts=starts,
        arguments=None if subsampled else (args, kwargs),
        columns=columns_of(model, args, kwargs),
        inputs=inputs_among(model, args, kwargs, {k: site.X for k, site in found.items()}),
        subsampled=subsampled,
        takes_rows=rows.any,
        coupling=coupling,
        description=describe(trace, approximations, points, shapes),
    )


def starting_values(setup: Setup, model, make_base, rng_key, args, kwargs) -> dict:
    """
    The starting values that a new guide would have with this key (at the inducing points
    that were chosen), by full name; none where the arguments have no data.
    """
    first_rows = FirstRows(model)
    trace = messages.trace_of(
        first_rows, args, kwargs, rng_key, at_site=messages.at_prior_mean
    )
    if {*messages.latents(trace)} != {*setup.latents, *setup.sites}:
        return {}
    _, values, starts = _new_base(
        first_rows, make_base, [*setup.sites], setup.latents, rng_key, args, kwargs
    )
    plates = {name: s["value"] for name, s in trace.items() if s["type"] == "plate"}
    given, found = {**values, **plates}, {}
    for name, site in setup.sites.items():
        prior, _ = _prior(model, name, given, found, args, kwargs)
        initial, _ = _begin(site.approximation, prior, site.points)
        found[name] = replace(site, initial=initial)
        starts |= {site.names[k]: param.value for k, param in initial.items()}
    return starts


def _new_base(model, make_base, gp_sites, others, rng_key, args, kwargs):
    """A guide for the latents beside f, their values in a first run, its parameters."""
    if not others:
        return None, {}, {}
    guide = make_base(WithoutGPs(model, gp_sites))
    if not callable(guide):
        raise TypeError(
            "base_guide must return a guide, a function of the model's arguments, got "
            f"{guide!r}."
        )
    with handlers.block(), handlers.trace() as trace, handlers.seed(rng_seed=rng_key):
        values = drawn_by(guide, others, args, kwargs)
    params = {name: s["value"] for name, s in trace.items() if s["type"] == "param"}
    return guide, values, params


def _prior(model, name, values, before: dict[str, SiteSetup], args, kwargs, num_batches=0):
    """
    The prior of a GP site, by one program.

    :param values: of the other latents.
    :param before: the GP sites before it.
    :param num_batches: of subsampled rows that inducing points are chosen from; zero for
        all rows.
    :return: the process, and the inputs to choose from, shape ``(N, D)``.
    """
    starts = {
        k: ({name: param.value for name, param in start.initial.items()}, start.constants)
        for k, start in before.items()
    }

    def run(args, kwargs, values, starts):
        found = {}

        def at_site(site):
            if site["name"] in before:
                approximation = before[site["name"]].approximation
                prior, reinterpreted = messages.unwrap(site["fn"])
                params, constants = starts[site["name"]]
                posterior = approximation.posterior(prior, {**params, **constants})
                draw = posterior.sample_parametric(jax.random.key(1))
                return messages.rewrap(posterior, reinterpreted), draw
            if site["name"] == name:
                found["prior"] = messages.unwrap(site["fn"])[0]
            return site["fn"], messages.prior_mean(site)

        def prior_at(rng_key):
            with handlers.block():
                run_model(model, at_site, values, rng_key, args, kwargs)
            return found["prior"]

        prior = prior_at(jax.random.key(0))
        if not num_batches:
            return prior, prior.X
        keys = jax.random.split(jax.random.key(0), num_batches)
        return prior, jax.lax.map(lambda key: prior_at(key).X, keys)

    prior, X = on_data(run, args, kwargs, values, starts)
    return prior, X.reshape(-1, X.shape[-1])


def _num_batches(name, trace, approximation) -> int:
    """How many batches of rows inducing points are chosen from."""
    num_rows = np.prod(messages.unwrap(trace[name]["fn"])[0].X.shape[:-1])
    wanted = max(10 * approximation.num_points, 2_000)
    return int(np.clip(-(-wanted // num_rows), 1, _MAX_SETUP_BATCHES))


def _start(name, prior, X, approximation, prefix, saved) -> SiteSetup:
    """A GP site, with inducing points that are chosen among X if none are saved."""
    if saved is None:
        try:
            points = approximation.initial_points(prior, X)
        except ValueError as error:
            raise ValueError(f"GP site '{name}': {error}") from error
        constants = approximation.constants(X)
        initial, factor = _begin(approximation, prior, points)
        check_cholesky(name, factor)
    else:
        values, constants = _saved_at(name, prior, approximation, saved)
        points = approximation.points_in(values)
        initial, _ = _begin(approximation, prior, points)
        if initial.keys() != values.keys():
            raise ValueError(
                f"GP site '{name}' was saved with the values {sorted(values)}, but "
                f"{approximation} has {sorted(initial)}. Use the approximation that was "
                "trained."
            )
        initial = {k: replace(param, value=values[k]) for k, param in initial.items()}
    return SiteSetup(
        approximation=approximation,
        prefix=f"{name}_{prefix}",
        points=points,
        initial=initial,
        constants=constants,
        kernel=prior.kernel,
        X=X,
    )


def _begin(approximation, prior, points):
    """How the values of a site start, and the factor of K_uu."""

    def run(prior, points):
        started = approximation.start(prior, points)
        initial = {name: (p.value, p.constraint, p.role) for name, p in started.items()}
        return initial, approximation.inducing_factor(prior.kernel, points)

    initial, factor = one_program(run, prior, points)
    return {name: Param(*parts) for name, parts in initial.items()}, factor


def _saved_at(name, prior, approximation, saved):
    """Starting values and constants of a GP site that were saved."""
    if name not in saved["initial"]:
        raise ValueError(
            f"The model has a GP site '{name}', but the guide that was saved had only "
            f"{sorted(saved['initial'])}."
        )
    initial = saved["initial"][name]
    columns = initial["Z"].shape[-1] if "Z" in initial else prior.X.shape[-1]
    if prior.X.shape[-1] != columns and not approximation.inter_domain:
        raise ValueError(
            f"GP site '{name}' has inputs with {prior.X.shape[-1]} columns, but the "
            f"inducing points that were saved have {columns}."
        )
    return initial, saved["constants"][name]

"""What a guide asks of a model: its sites, and a likelihood that suits the bounds."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.util import find_stack_level, not_jax_tracer

from numpyro_sgp._programs import NEEDS_KNOWN_DATA, on_data
from numpyro_sgp.guides.messengers import (
    ProperPriors,
    PutInside,
)
from numpyro_sgp.kernels import White
from numpyro_sgp.tracing import checks, messages, supports
from numpyro_sgp.tracing.coupling import Coupling, find_coupling, log_likelihood
from numpyro_sgp.tracing.curvature import check_gaussian
from numpyro_sgp.tracing.plates import FirstRows, OnePlateEach
from numpyro_sgp.tracing.reach import KEYS, NO_F, reach_of

_Setup = TypeVar("_Setup")
_FAR = 4.0  # prior sds of f, at which supports are looked at


def check_set_up(setup: _Setup | None) -> _Setup:
    """
    What a guide's set-up found.

    :raises ValueError: if the guide is not set up.
    """
    if setup is None:
        raise ValueError(
            "This guide has not been set up: run svi.init, svi.run or guide.setup with "
            "the training data first."
        )
    return setup


def checked_trace(model, args, kwargs, start=None) -> dict:
    """
    A model's trace with GP sites at their prior means.

    :param start: of :class:`~numpyro_sgp.guides.messengers.ProperPriors`.
    :raises ValueError: if no guide can be made for it.
    """

    def run(args, kwargs):
        model_here = ProperPriors(OnePlateEach(FirstRows(PutInside(model))), start)
        at_mean = messages.at_prior_mean
        trace = messages.trace_of(model_here, args, kwargs, at_site=at_mean)
        checks.check_kernels(trace)
        leaves = jax.tree.leaves((args, kwargs))
        sites = {k: s for k, s in trace.items() if s["type"] == "sample"}
        given = [k for k, s in sites.items() if any(s["value"] is v for v in leaves)]
        return trace, checks.valid_arguments(trace), given

    trace, valid, given = on_data(run, args, kwargs)
    checks.check_arguments(trace, valid)
    sample_sites = [s for s in trace.values() if s["type"] == "sample"]
    gp_sites = [s for s in sample_sites if messages.is_latent_gp(s)]
    observed = [s["name"] for s in sample_sites if messages.is_observed_gp(s)]
    if observed and not gp_sites:
        raise ValueError(
            f"GP site '{observed[0]}' is observed, so there is nothing to approximate. "
            "Sample the process without obs, and observe its values with noise: "
            "dist.Normal(f, noise)."
        )
    if not gp_sites:
        names = [s["name"] for s in sample_sites if not s["is_observed"]]
        raise ValueError(
            "The model has no latent GP site for AutoSparseGP (its latent sites: "
            f"{names or 'none'}). Sample a numpyro_sgp.GaussianProcess in it, or use "
            "one of NumPyro's own autoguides."
        )
    mutable = [name for name, s in trace.items() if s["type"] == "mutable"]
    if mutable:
        raise ValueError(
            f"The model has mutable state {mutable}. AutoSparseGP runs the model in "
            "the guide as well, which would update it twice in a step; use layers "
            "without running statistics."
        )
    for site in gp_sites:
        checks.check_inputs(site["name"], messages.unwrap(site["fn"])[0])
    checks.check_plates(trace)
    checks.check_imputed(trace)
    if not any(s["is_observed"] for s in sample_sites):
        raise ValueError(
            "The model has no observed site. Give fit and nested all of the data, (X, y). "
            "A guide is set up when it first runs, which must be with the data: call "
            "svi.init, svi.run or guide.setup with y, not y=None, before Predictive or "
            "guide.posterior."
        )
    checks.check_latents(trace)
    checks.check_observations(trace)
    if told := scaled_alone(trace):
        warnings.warn(
            f"{told} The KL of q(f) has that scale too, as where it is annealed: unless "
            "that is one at last, q is of no model that NUTS samples. Scale observed sites "
            "alone.",
            stacklevel=find_stack_level(),
        )
    checks.warn_of_single(trace, given)
    for name in given:
        supports.check_support(name, trace[name], name in valid)
    return trace


def check_support_stays(guide, args, kwargs) -> None:
    """
    :param guide: one that is to be trained.
    :raises ValueError: if observations have no density at some values of GP sites, with
        which a guide may predict, but has no bound to be trained by.
    """
    trace = guide.known().trace
    model = OnePlateEach(FirstRows(PutInside(guide.model)))
    moving = [
        name
        for name, site in trace.items()
        if messages.is_response(site) and supports.may_move(site)
    ]
    _warn_of_probabilities(model, trace, args, kwargs)
    if not moving:
        return
    inside: list[list] = []
    with suppress(*NEEDS_KNOWN_DATA), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPyro's, of what is outside
        for away in (-_FAR, 0.0, _FAR):
            there = messages.trace_of(model, args, kwargs, at_site=partial(_away, by=away))
            inside.append([supports.is_inside(there[name]) for name in moving])
    for name, *seen in zip(moving, *inside, strict=True):
        if any(np.any(each != seen[0]) for each in seen):
            kind = type(messages.innermost(trace[name]["fn"])).__name__
            raise ValueError(
                f"The support of observed site '{name}' ({kind}) moves with a GP site, "
                "which may leave observations outside: under any Gaussian q the bound is "
                "minus infinity. Give it tails (dist.Normal, dist.StudentT), or use "
                "NUTS(sgp.whiten(model))."
            )


def check_reach(guide, params, args, kwargs) -> None:
    """
    Warns of random numbers that are no latent site, which are drawn anew in each step.

    :param guide: one that is to be trained.
    :param params: where it starts.
    :raises ValueError: if the likelihood does not depend on its GP sites.
    """
    latents = {name: guide.known().trace[name]["value"] for name in guide.known().latents}
    model = FirstRows(guide.model)
    found = reach_of(model, args, kwargs, {**params, **latents})
    if found is None:
        return
    if not found.of_f:
        raise ValueError(NO_F)
    if found.of_key:
        warnings.warn(
            f"{KEYS} They are drawn anew in each step, as those of dropout, and the fit "
            "learns nothing of them. What it is to learn is sampled by numpyro.sample, and "
            "not hidden.",
            stacklevel=find_stack_level(),
        )


def _away(site, by):
    """For :class:`messages.AtGPSites`: the process at so many sds from its mean."""
    prior, _ = messages.unwrap(site["fn"])
    sd = jnp.reshape(jnp.sqrt(prior.variance), site["fn"].shape())
    return site["fn"], messages.prior_mean(site) + by * sd


def _warn_of_probabilities(model, trace, args, kwargs) -> None:
    """Warns of probabilities that are f itself, of which NumPyro takes the nearest."""
    named = [name for name, site in trace.items() if supports.has_probabilities(site)]
    if not named:
        return

    def run(args, kwargs):
        found: dict[str, list] = {name: [] for name in named}
        for by in (0.0, -_FAR, _FAR):
            with numpyro.validation_enabled(False):
                at_site = partial(_away, by=by)
                there = messages.trace_of(model, args, kwargs, at_site=at_site)
            for name, each in found.items():
                probs = messages.innermost(there[name]["fn"]).probs
                each.append(jnp.all(constraints.unit_interval(probs)))
        return found

    with suppress(*NEEDS_KNOWN_DATA):
        for name, seen in on_data(run, args, kwargs).items():
            if seen[0] and not np.all(seen):
                warnings.warn(
                    f"Site '{name}': the probs of "
                    f"{type(messages.innermost(trace[name]['fn'])).__name__} are outside "
                    "of 0 to 1 at values of f, where NumPyro takes what is nearest inside. "
                    "Is logits=f meant, or jax.nn.sigmoid(f)?",
                    stacklevel=find_stack_level(),
                )


def put_inside(trace) -> str:
    """What to say of latents that a model has values for by itself; empty of none."""
    names = [name for name, site in trace.items() if site.get("put_inside")]
    if not names:
        return ""
    return (
        f"Latent site '{names[0]}' is put at a value inside of the model "
        "(numpyro.handlers.substitute), which the guide's values would replace. Fix it by "
        "numpyro.handlers.condition(model, data), which makes it an observation."
    )


def scaled_alone(trace) -> str:
    """
    What to say of a GP site that :class:`numpyro.handlers.scale` scales otherwise than the
    likelihood; empty where none is. Of all sites alike, q is that without it.
    """
    if subsample_plate_sizes(trace):  # which scale observed sites too
        return ""
    sites = [site for site in trace.values() if site["type"] == "sample"]
    likelihood = {_known_scale(site) for site in sites if site["is_observed"]}
    for name, scale in _scaled_sites(trace):
        if likelihood != {scale}:
            return f"GP site '{name}' is scaled by {scale:.3g}."
    return ""


def scaled_with_all(trace) -> str:
    """What to say of a model that is scaled as a whole; empty where none is."""
    batches = subsample_plate_sizes(trace)
    for name, scale in _scaled_sites(trace):
        if not any(frame.name in batches for frame in trace[name]["cond_indep_stack"]):
            return f"GP site '{name}' is scaled by {scale:.3g}, as the likelihood is."
    return ""


def _scaled_sites(trace) -> Iterator[tuple[str, float]]:
    """GP sites with a scale, and that."""
    for name, site in trace.items():
        if messages.is_latent_gp(site) and (scale := _known_scale(site)) != 1.0:
            yield name, scale


def _known_scale(site) -> float:
    """What a site is scaled by, one where that is not known; of several, not one."""
    scale = site["scale"]
    if scale is None or not not_jax_tracer(scale):
        return 1.0
    numbers = np.ravel(scale)
    return float(numbers[np.argmax(numbers != 1.0)])


def assigned(approximation, gp_sites: list[str]) -> dict:
    """
    The approximation of each GP site.

    :raises ValueError: if a dict of them does not match the sites.
    """
    if not isinstance(approximation, dict):
        return dict.fromkeys(gp_sites, approximation)
    unknown = sorted(set(approximation) - set(gp_sites))
    missing = sorted(set(gp_sites) - set(approximation))
    if unknown or missing:
        raise ValueError(
            f"The approximations do not match the GP sites {sorted(gp_sites)} of the "
            "model: "
            + (f"unknown sites {unknown}. " if unknown else "")
            + (f"no approximation for {missing}." if missing else "")
        )
    return dict(approximation)


def check_rows(name: str, prior, approximation, subsampled: bool) -> None:
    """
    :raises ValueError: if an approximation needs all rows of one table, and the GP site has
        not; or if its number of inducing points is ``"auto"``, for
        :func:`~numpyro_sgp.fit` to choose.
    """
    is_white = lambda part: isinstance(part, White)  # noqa: E731
    if any(map(is_white, jax.tree.leaves(prior.kernel, is_leaf=is_white))):
        warnings.warn(
            f"The kernel of GP site '{name}' has noise of its own for each row (White), of "
            "which inducing points tell nothing: q(f) keeps the prior of it, the bound is "
            "far below the evidence, and its variance is learned as none. Put the noise "
            "into the likelihood, as in Normal(f, sigma), or give each row a latent in the "
            "data plate.",
            stacklevel=find_stack_level(),
        )
    if approximation.is_auto:
        raise ValueError(
            f"GP site '{name}': the number of inducing points of {approximation} is "
            "'auto', which sgp.fit(model, approximation, data) replaces by one. Give a "
            "number here."
        )
    if prior.X.ndim > 2 and approximation.constants(np.zeros((1, 1))):
        raise ValueError(
            f"GP site '{name}': {approximation} needs one table of inputs (N, D) for "
            f"all latent functions, but X has the shape {prior.X.shape}. Use "
            "covariance='full'."
        )
    if subsampled and approximation.needs_all_rows:
        raise ValueError(
            f"GP site '{name}': {approximation} has parameters for each row of the "
            "data, so it needs all rows in every step. Train without minibatches, or "
            "use SVGP(num_inducing)."
        )


def check_likelihood(
    model, trace: dict, starts: dict, values: dict, args, kwargs, near: bool
) -> Coupling:
    """
    Checks that the likelihood suits the bounds asked for.

    :param trace: the model's, at the prior means of GP sites.
    :param starts: :class:`~numpyro_sgp.guides.setup.SiteSetup` by GP site.
    :param values: of the other latents.
    :param near: whether the likelihood is looked at for values of f near zero alone.
    :return: what :func:`~numpyro_sgp.tracing.coupling.find_coupling` does.
    :raises ValueError: naming a GP site whose bound the likelihood does not suit.
    """
    approximations = {name: start.approximation for name, start in starts.items()}
    priors = {name: copy.copy(messages.unwrap(trace[name]["fn"])[0]) for name in starts}
    shapes = {name: prior.shape() for name, prior in priors.items()}
    dtype = jnp.result_type(*(prior.X.dtype for prior in priors.values()))

    def trace_at(f):
        at_site = messages.at_values(f)
        return messages.trace_of(model, args, kwargs, data=values, at_site=at_site)

    coupled = {
        name for name, a in approximations.items() if not a.family.independent_latents
    }
    chosen = [name for name in shapes if "joint_rows" in trace[name]["infer"]]
    coupling = find_coupling(trace_at, shapes, dtype, coupled, chosen, near)
    tight = {k: a.relaxation for k, a in approximations.items() if a.relaxation is not None}
    if tight and coupling.couples:
        raise ValueError(
            f"GP sites {sorted(tight)} have a tight bound, which is for likelihoods of "
            "one row at a time, but this one ties rows of X together. Use tight='none'."
        )
    gaussian = [name for name, relaxation in tight.items() if relaxation.is_gaussian]
    if gaussian:

        def log_density(f):
            return log_likelihood(trace_at(f), shapes)

        check_gaussian(log_density, shapes, dtype, gaussian)
    for name, prior in priors.items():
        prior.kernel = starts[name].kernel  # with starting hyperparameters
    for name, approximation in approximations.items():
        approximation.check_likelihood(name, trace_at, priors, coupling.couples)
    for name in gaussian:
        tight[name].check(shapes[name][-1])
    return coupling

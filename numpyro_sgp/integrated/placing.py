"""What runs a model for nested inference, and what is refused of it."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from numpyro_sgp._programs import NEEDS_KNOWN_DATA
from numpyro_sgp.distributions import BlackBox
from numpyro_sgp.distributions.columns import (
    check_columns,
    columns_of,
    inputs_among,
    telling_columns,
)
from numpyro_sgp.fitting.problem import as_plain_arrays
from numpyro_sgp.guides.row_latents import DRAW_ANEW, check_row_latents
from numpyro_sgp.integrated.coordinates import coordinates
from numpyro_sgp.integrated.effects import of_standardised
from numpyro_sgp.integrated.units_of_data import check_units
from numpyro_sgp.kernels.base import broadcasts_to
from numpyro_sgp.tracing import checks, messages
from numpyro_sgp.tracing.program import opening
from numpyro_sgp.tracing.reach import KEYS, reach_of
from numpyro_sgp.tracing.row_indices import check_codes
from numpyro_sgp.training.descent import LOOK_FOR

if TYPE_CHECKING:
    from numpyro_sgp.integrated.field import Field

#: Most hyperparameters that are integrated.
MAX_HYPERPARAMETERS = 15
#: Most numbers of the field.
MAX_FIELD = 5_000

TIED = (
    "The likelihood ties rows of the data together, or uses several rows of a GP site in "
    "one term. sgp.nested and joint=True are for likelihoods of one row of linear "
    "predictors at a time. Of sums and differences of rows (f[i] - f[j]) they are with "
    "VGP(), which leaves nothing open between rows (but jitter, where rows nearly "
    "coincide: use float64, or a smaller jitter=); else use sgp.fit without joint=True, "
    "or NUTS(sgp.whiten(model))."
)

NOT_FINITE = (
    "The derivatives of the log likelihood are not finite at values of f that are like the "
    f"prior's. {LOOK_FOR}."
)


class Unconstrained(dict):
    """Hyperparameters by name in unconstrained space, where their density is."""

    def place(self, msg, field):
        """The value at a site, and its log density."""
        free = self[msg["name"]]
        transform = coordinates(field, msg["name"], msg["fn"])
        value = transform(free)
        slope = jnp.sum(transform.log_abs_det_jacobian(free, value))
        return value, _density(msg, value) + slope


class Constrained(dict):
    """Hyperparameters by name, where the model has them."""

    def place(self, msg, field):
        """The value at a site, and its log density."""
        value = self[msg["name"]]
        return value, _density(msg, value)


def _density(msg, value):
    given = {**msg, "value": value, "intermediates": []}
    return jnp.sum(messages.log_prob(given))


class Placed(Messenger):
    """
    Puts openings at the field's sites, and hyperparameters at theirs.

    :param thetas: :class:`Unconstrained` or :class:`Constrained`.
    """

    def __init__(self, field, thetas, points, joint):
        self.field, self.thetas, self.points, self._joint = field, thetas, points, joint
        self.log_prior = jnp.zeros((), field.dtype)
        self.known, self.projections, self.left, self.joint = {}, {}, {}, {}
        super().__init__()

    def process_message(self, msg):
        name, field = msg.get("name"), self.field
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        if msg["value"] is not None:
            if name in field.latents and "_scan_current_index" in msg["infer"]:
                raise ValueError(
                    f"Latent site '{name}' is drawn inside of control_flow.scan, of which "
                    "one Gaussian over all sites does not see what the likelihood makes of "
                    "it. Write it without (dist.GaussianRandomWalk, or a Python loop), or "
                    "use sgp.fit without joint=True, or NUTS."
                )
            if name in field.latents:
                raise ValueError(
                    f"Latent site '{name}' is put at a value inside of the model "
                    "(numpyro.handlers.substitute, or a branch of control_flow.cond), and "
                    "would be integrated as if it were open. Fix it by "
                    "numpyro.handlers.condition(model, data), which makes it an "
                    "observation; draw it outside of the branches and choose by jnp.where; "
                    "or use NUTS."
                )
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
                "one number for each row or group of those, and says nothing of others. "
                f"{DRAW_ANEW}"
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
            e = opening(("effect", name), msg["fn"].shape(), field.dtype)
            msg["value"], self.known[name] = of_standardised(msg["fn"], e)
        elif name in self.thetas:
            msg["value"], density = self.thetas.place(msg, field)
            self.log_prior = self.log_prior + density
            self.known[name] = density
        elif name in field.responses:
            msg["value"] = messages.zeros_like(msg["fn"])
        else:
            raise ValueError(
                f"Latent site '{name}' was not in the model when it was set up. The "
                "latents of a model must be the same in each run."
            )


class ShownResponses(Messenger):
    """Zeros at responses that have no value."""

    def __init__(self, fn, responses):
        self.responses = responses
        super().__init__(fn)

    def process_message(self, msg):
        is_open = msg["type"] == "sample" and msg["value"] is None
        if is_open and msg["name"] in self.responses:
            msg["value"] = messages.zeros_like(msg["fn"])


class AtValues(Messenger):
    """
    Puts hyperparameters and all other latents at known values.

    :param free: unconstrained hyperparameters by name.
    :param values: of the other latents and of responses, zero for those left out.
    :param drawn: names of responses that are drawn instead.
    """

    def __init__(self, field: Field, free: dict, values: dict, drawn: Collection[str] = ()):
        self.field, self.free, self.values, self.drawn = field, free, values, drawn
        super().__init__()

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
            return
        name = msg["name"]
        if name in self.free:
            msg["value"] = coordinates(self.field, name, msg["fn"])(self.free[name])
        elif name in self.values:
            msg["value"] = jnp.reshape(self.values[name], msg["fn"].shape())
        elif name in self.drawn and messages.can_draw(msg["fn"]):
            return
        elif name in self.field.responses or name in self.field.latents:
            msg["value"] = messages.zeros_like(msg["fn"])


_UNWRAPPED = (
    " If it is of CircularReparam, leave that out: nodes need no help with circles."
)


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
                    + (_UNWRAPPED if name.endswith("_unwrapped") else "")
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


def _check_seen(model, args: tuple, kwargs: dict) -> None:
    anywhere = messages.Anywhere(model)
    found = reach_of(anywhere, args, kwargs)
    if found is not None and found.of_key and not anywhere.drawn:
        raise ValueError(
            f"{KEYS} One draw of them would be taken for known. Leave the block out, or "
            "use NUTS."
        )


def arguments_at(field, own: tuple, examples, args: tuple, kwargs: dict) -> tuple:
    """
    Arguments of a model as arrays, as given or those of the inference.

    :param own: ``(args, kwargs)`` of the inference.
    :param examples: a few rows of these; None where ``own`` has all of them.
    :raises ValueError: if there are none, and as :func:`new_arguments` does.
    """
    if args or kwargs:
        return new_arguments(field, examples or own, args, kwargs)
    if examples is not None:
        raise ValueError(
            "The training data are not in the file that this came from. Say at which "
            "inputs: pass the model's arguments."
        )
    return new_arguments(field, own, *own) if field.guide.known().subsampled else own


def new_arguments(field, known: tuple, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """
    Arguments of a model as arrays.

    :param field: of the inference, with the model and the inputs of its GP sites.
    :param known: ``(args, kwargs)`` of it.
    :raises ValueError: if inputs or observations are not finite, or do not fit the model,
        codes of groups are none of its, or columns of a frame are in other places.
    """
    model, inputs = field.model, {name: site.X for name, site in field.sites.items()}
    check_columns(model, columns_of(model, *known), args, kwargs)
    args, kwargs = as_plain_arrays(model, args, kwargs)
    check_codes(model, args, kwargs)

    def look():
        # Responses are not drawn: a distribution of one's own may have no sample.
        shown = ShownResponses(model, field.responses)
        trace = messages.trace_of(shown, args, kwargs, at_site=messages.at_prior_mean)
        for name, site in trace.items():
            if messages.is_latent_gp(site):
                prior = messages.unwrap(site["fn"])[0]
                checks.check_inputs(name, prior)
                here, before = prior.X.shape[-1], inputs[name].shape[-1]
                if here != before:
                    told = f"GP site '{name}' has inputs with {here} columns"
                    raise ValueError(f"{told} here, where it had {before}.")
        _check_own_data(field.guide.known().trace, trace, (args, kwargs))
        checks.check_observations(trace)
        checks.check_whole_plates(trace, "predictions are of every row")
        return ()

    def among():
        return inputs_among(model, *known, inputs=inputs)

    with suppress(*NEEDS_KNOWN_DATA), telling_columns(model, among, args, kwargs):
        jax.eval_shape(look)
    check_row_latents(field.guide.known(), model, args, kwargs)
    check_units(field, known, args, kwargs)
    return args, kwargs


def _check_own_data(before: dict, trace: dict, arguments) -> None:
    """
    :raises ValueError: if responses have the model's own values, as of
        ``handlers.condition``, which stay those of the training data at other inputs.
    """
    given = [id(leaf) for leaf in jax.tree.leaves(arguments)]
    for name, site in trace.items():
        if not messages.is_response(site) or name not in before:
            continue
        value, shape = site["value"], tuple(site["fn"].shape())
        own = value is before[name]["value"] and id(value) not in given
        if own and (size := jnp.shape(value)) and not broadcasts_to(shape, size):
            raise ValueError(
                f"Observed site '{name}' has values of the model's own (by "
                f"handlers.condition, or an array in its code), of shape {size} at any "
                f"inputs; here its distribution has the shape {shape}. Give them as an "
                "argument instead, model(X, y=None) with obs=y, and fit that: predictions "
                "at new inputs leave it out."
            )


def free_shape(fn) -> tuple[int, ...]:
    """The shape of a latent in unconstrained space."""
    return biject_to(fn.support).inverse_shape(fn.shape())


def check_setup(setup) -> None:
    """
    :param setup: of the guide, :class:`~numpyro_sgp.guides.setup.Setup`.
    :raises ValueError: for approximations and latents of which no Gaussian field is made.
    """
    for name, site in setup.sites.items():
        option = site.approximation
        family, kind = option.family, type(option).__name__
        if not family.has_all_gaussians:
            raise ValueError(
                f"GP site '{name}': sgp.nested and joint=True have one full Gaussian over "
                f"all sites and effects, and {kind} with q(u) {family.name!r} is another "
                "approximation. Use SVGP, SOLVEGP or VGP with covariance='full', or "
                "sgp.fit without joint."
            )
        if option.relaxation is not None:
            raise ValueError(
                f"GP site '{name}': tight bounds are not for sgp.nested and joint=True; "
                "leave tight='none', or use sgp.fit without joint."
            )
    if setup.coupling.combines:
        raise ValueError(TIED)
    for name in setup.latents:
        fn = setup.trace[name]["fn"]
        if messages.is_masked(fn):
            raise ValueError(
                f"Latent site '{name}' is masked, which leaves it without a prior. Put "
                "numpyro.handlers.mask around observed sites alone."
            )
        if fn.support.is_discrete:
            raise ValueError(
                f"Latent site '{name}' is discrete. Sum it out (dist.MixtureSameFamily, "
                "say), or use NumPyro's samplers for discrete latents."
            )


def check_likelihood(guide, args: tuple, kwargs: dict) -> None:
    """
    :raises ValueError: for likelihoods without derivatives, or of what is drawn and is no
        latent site.
    """
    setup = guide.known()
    if not setup.subsampled:
        _check_seen(guide.model, args, kwargs)
    for name, site in setup.trace.items():
        if not messages.is_response(site):
            continue
        fn = messages.innermost(site["fn"])
        if isinstance(fn, BlackBox):
            raise ValueError(
                f"Observed site '{name}' is a BlackBox, which has no derivatives, and the "
                "steps to one Gaussian over all sites (sgp.nested, joint=True) are made of "
                "them. Use sgp.fit with expectation=ScoreFunction(1000) and without joint, "
                "or MCMC(EllipticalSlice(model))."
            )


def check_hyperparameters(field: Field) -> None:
    """
    :raises ValueError: for more hyperparameters than nodes can cover.
    """
    if field.num_hyperparameters > MAX_HYPERPARAMETERS:
        sizes = {name: math.prod(shape) for name, shape in field.free_shapes.items()}
        shown = ", ".join(f"'{name}': {size}" for name, size in sizes.items())
        raise ValueError(
            f"There are {field.num_hyperparameters} hyperparameters ({shown}), more than "
            f"nodes can cover (at most {MAX_HYPERPARAMETERS}). Latents with Normal priors "
            "on which the likelihood depends linearly are integrated as part of the field; "
            "give those such a prior, fix some, or use NUTS(sgp.whiten(model))."
        )


def check_size(field: Field, whole: bool = False) -> None:
    """
    :param whole: whether the covariance is dense, whether or not groups are apart.
    :raises ValueError: for too large a field.
    """
    most = MAX_FIELD
    if field.groups is not None and not whole:
        most = MAX_FIELD**2 // field.row_size  # whose memory is that of the covariance
    if field.size > most:
        sizes = field.gp_sizes() | {k: math.prod(field.shapes[k]) for k in field.effects}
        shown = ", ".join(f"'{name}': {size}" for name, size in sizes.items())
        few = sum(field.gp_sizes().values()) < field.size - most
        mend = "NUTS(sgp.whiten(model))" if few else "fewer inducing points"
        raise ValueError(
            f"The field has {field.size} numbers ({shown}), and a covariance over all of "
            f"them; at most {most}. Use {mend}."
        )

"""What a message tells about the Gaussian process at a site, and what is put there."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.util import scale_and_mask
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

from numpyro_sgp._numpyro import mask_of
from numpyro_sgp._stacked import Stacked
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.posterior import GPPosterior
from numpyro_sgp.distributions.truncated import with_digits
from numpyro_sgp.tracing.errors import telling_arguments
from numpyro_sgp.tracing.plates import WholeIfFew


def unwrap(fn):
    """
    The distribution inside ``.to_event`` wrappers.

    :return: the innermost distribution, and how many batch dimensions were taken.
    """
    reinterpreted = 0
    while isinstance(fn, dist.Independent):
        reinterpreted += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, reinterpreted


def innermost(fn):
    """The distribution inside of all wrappers: events, expansions and masks."""
    wrappers = dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution
    while isinstance(fn, wrappers):
        fn = fn.base_dist
    return fn


def can_draw(fn) -> bool:
    """Whether a distribution can be drawn from; a black box without ``sample`` cannot."""
    if getattr(innermost(fn), "sampler", True) is None:
        return False
    try:
        jax.eval_shape(lambda key: fn(rng_key=key), jax.random.key(0))
    except (NotImplementedError, ImportError):  # TensorFlow Probability, for some
        return False
    except ValueError as error:
        if "total_count_max" not in str(error):
            raise
        return False  # numbers of trials that are not known here
    return True


def is_response(site) -> bool:
    """Whether a site is observed, and not of :func:`numpyro.factor`."""
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    is_factor = isinstance(innermost(site["fn"]), dist.Unit)
    return not is_factor and not site["infer"].get("is_auxiliary")


def rewrap(fn, reinterpreted: int):
    """The opposite of :func:`unwrap`."""
    return fn.to_event(reinterpreted) if reinterpreted else fn


def is_latent_gp(site) -> bool:
    """Whether ``site`` is an unobserved :class:`GaussianProcess`."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    fn, _ = unwrap(site["fn"])
    if isinstance(fn, dist.MaskedDistribution):
        if isinstance(unwrap(fn.base_dist)[0], GaussianProcess):
            raise ValueError(
                f"GP site '{site['name']}' is masked. Put numpyro.handlers.mask around "
                "the observed sites only: the prior of f does not depend on which "
                "observations are missing."
            )
    is_gp, mend = isinstance(fn, GaussianProcess), ""
    if isinstance(fn, Stacked) and isinstance(fn.base, GaussianProcess):
        mend = "scan (or vmap), where each step has a process of its own. Write the steps "
        mend += "as a Python loop with a site name for each"
    elif is_gp and site.get("_control_flow_done", False):
        mend = "cond, where it takes no value from a guide. Draw f before, and choose by "
        mend += "jnp.where"
    if mend:
        raise ValueError(
            f"GP site '{site['name']}' is inside control_flow.{mend}, or sample the model "
            "as it is by NUTS, without whiten or sparsify."
        )
    shape = site.get("kwargs", {}).get("sample_shape", ())
    if shape and is_gp:
        raise ValueError(
            f"GP site '{site['name']}' has sample_shape={tuple(shape)}. Independent "
            f"functions are written on the process: GaussianProcess(kernel, X).expand("
            f"{list(shape)}), or in a plate."
        )
    return is_gp


def is_observed_gp(site) -> bool:
    """Whether ``site`` is an observed :class:`GaussianProcess`."""
    return site["is_observed"] and isinstance(unwrap(site["fn"])[0], GaussianProcess)


def is_sparse_posterior(site) -> bool:
    """Whether ``site`` draws from a :class:`GPPosterior`."""
    return site["type"] == "sample" and isinstance(unwrap(site["fn"])[0], GPPosterior)


def factors_of_rows(trace: dict) -> list[str]:
    """Names of the sites of :func:`numpyro.factor` that have terms of several rows."""
    return sorted(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and isinstance(innermost(site["fn"]), dist.Unit)
        if np.prod(site["fn"].batch_shape) > 1
    )


def weighted_responses(trace: dict) -> list[str]:
    """Names of observed sites that :class:`numpyro.handlers.scale` gives weights."""
    return sorted(
        name
        for name, site in trace.items()
        if is_response(site) and site["scale"] is not None
        if np.any(np.asarray(site["scale"]) != 1.0)
    )


def log_prob(site, scaled: bool = True):
    """
    Log density of the value at a site, masked, of the site's batch shape.

    :param scaled: whether plates and :class:`numpyro.handlers.scale` scale it.
    """
    if site["intermediates"]:
        found = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        found = with_digits(site["fn"]).log_prob(site["value"])
    return scale_and_mask(found, site["scale"]) if scaled else found


def counted(site):
    """
    Whether each of the log densities of :func:`log_prob` counts: False where a mask leaves
    out all that it is of.
    """
    return jnp.broadcast_to(unmasked(site["fn"]), jnp.shape(log_prob(site, scaled=False)))


def zeros_like(fn):
    """A value in the place of one of a distribution: whole numbers where it has these."""
    is_discrete = fn.support is not None and fn.support.is_discrete
    return jnp.zeros(fn.shape(), int if is_discrete else float)


def unmasked(fn):
    """Which entries of its batch shape a distribution does not mask; of events, any."""
    if isinstance(fn, dist.MaskedDistribution):
        return jnp.logical_and(mask_of(fn), unmasked(fn.base_dist))
    if isinstance(fn, dist.Independent):
        inner = jnp.broadcast_to(unmasked(fn.base_dist), fn.base_dist.batch_shape)
        return jnp.any(inner, axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    if isinstance(fn, dist.ExpandedDistribution):
        return jnp.broadcast_to(unmasked(fn.base_dist), fn.batch_shape)
    return jnp.ones(fn.batch_shape, bool)


def is_masked(fn) -> bool:
    """Whether a mask leaves out some of a distribution, in plates or around them."""
    while not isinstance(fn, dist.MaskedDistribution):
        if not isinstance(fn, dist.Independent | dist.ExpandedDistribution):
            return False
        fn = fn.base_dist
    return True


def missing(fn, value):
    """Which entries of its batch shape have a value of NaN that no mask leaves out."""
    if isinstance(fn, dist.MaskedDistribution):
        return jnp.logical_and(mask_of(fn), missing(fn.base_dist, value))
    if isinstance(fn, dist.Independent):
        inner = missing(fn.base_dist, value)
        return jnp.any(inner, axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    if isinstance(fn, dist.ExpandedDistribution):
        return missing(fn.base_dist, value)
    nan = jnp.broadcast_to(
        jnp.isnan(value), jnp.broadcast_shapes(jnp.shape(value), fn.shape())
    )
    return jnp.any(nan, axis=tuple(range(-fn.event_dim, 0)))


def prior_mean(site):
    """The prior mean at a GP site, in the shape of its value."""
    prior, _ = unwrap(site["fn"])
    return jnp.reshape(prior.mean, site["fn"].shape())


def is_inside_jit() -> bool:
    """Whether what is computed now becomes part of a program."""
    return not not_jax_tracer(jnp.zeros(()))


def known_inside_jit():
    """Keeps known arrays known inside of jit; outside, it would only cost compilations."""
    return jax.ensure_compile_time_eval() if is_inside_jit() else nullcontext()


class AtGPSites(Messenger):
    """
    Gives GP sites another distribution and a value.

    :param at_site: from a GP site's message to its new distribution and its value, or
        None to have it drawn (or left at the value that it has).
    :param are: which messages are those of GP sites; by default of latent processes.
    :param hide_others: whether to hide all but GP sites, parameters and plates.
    """

    def __init__(self, at_site, are=is_latent_gp, hide_others=False):
        self.at_site = at_site
        self.are = are
        self.hide_others = hide_others
        self.values = {}  # that posteriors got
        self._name = None  # in the model; handlers outside (a scope) may change it
        super().__init__()

    def process_message(self, msg):
        if self.are(msg):
            self._name = msg["name"]
            msg["fn"], value = self.at_site(msg)
            if value is not None:
                msg["value"] = jnp.reshape(value, msg["fn"].shape())
        elif self.hide_others and msg["type"] in ("sample", "deterministic"):
            draw(msg)
            msg["stop"] = True

    def postprocess_message(self, msg):
        if is_sparse_posterior(msg):
            self.values[self._name] = msg["value"]


def trace_of(fn, args, kwargs, rng_key=0, *, data=None, at_site=None) -> dict:
    """
    The trace of a model or guide, which no handler outside of it sees.

    :param args: tuple of its arguments, and ``kwargs``, dict of those by keyword.
    :param rng_key: key, or seed.
    :param data: values by name, of parameters most often.
    :param at_site: of :class:`AtGPSites`, if anything is to be put there.
    """
    fn = handlers.substitute(handlers.seed(WholeIfFew(fn), rng_key), data=data or {})
    at_sites = nullcontext() if at_site is None else AtGPSites(at_site)
    with handlers.block(), handlers.trace() as trace, at_sites, _Improper():
        with telling_arguments(args, kwargs, fn):
            fn(*args, **kwargs)
    return trace


class Anywhere(Messenger):
    """
    Puts latents and parameters at some value, for which no key is needed.

    :param fn: the model.
    """

    #: Sites that are drawn all the same.
    drawn: frozenset[str] = frozenset()

    def process_message(self, msg):
        if msg["type"] == "control_flow":  # latents inside of it
            self.drawn |= {msg["type"]}
        if msg["value"] is not None or msg["type"] not in ("sample", "param"):
            return
        if msg["type"] == "sample" and is_latent_gp(msg):
            return
        try:
            if msg["type"] == "sample":
                shape = msg["fn"].shape(msg["kwargs"].get("sample_shape", ()))
                msg["value"] = _at_zero(msg["fn"].support, shape)
                return
            with handlers.block(), handlers.seed(rng_seed=0):  # it may start at random
                start = jax.eval_shape(msg["fn"], *msg["args"])
            support = msg["kwargs"].get("constraint", dist.constraints.real)
            msg["value"] = jax.tree.map(lambda v: _at_zero(support, jnp.shape(v)), start)
        except NotImplementedError:  # of a discrete one
            self.drawn |= {msg["name"]}


def _at_zero(support, shape):
    """Where unconstrained numbers are zero."""
    transform = dist.biject_to(support)
    return transform(jnp.zeros(transform.inverse_shape(shape)))


class _Improper(Messenger):
    """Some value at a latent site that has none and cannot be drawn, for what is around."""

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        if isinstance(innermost(msg["fn"]), dist.ImproperUniform):
            zeros = jnp.zeros(msg["fn"].shape(msg["kwargs"]["sample_shape"]))
            msg["value"] = msg["fn"].support.feasible_like(zeros)


def latents(trace) -> dict:
    """The sample sites of a trace that are not observed."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def drawn(trace) -> dict:
    """Values of the latents of a guide, but for its sparse posteriors."""
    found = latents(trace).items()
    return {name: s["value"] for name, s in found if not is_sparse_posterior(s)}


def mutable(trace) -> dict:
    """Mutable state, by name."""
    return {k: v["value"] for k, v in trace.items() if v["type"] == "mutable"}


def support_of(fn):
    """The support of single numbers of a distribution, with no wrapper around it."""
    support = fn.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def is_real(fn) -> bool:
    """Whether a distribution is of real numbers, without limits."""
    return isinstance(support_of(innermost(fn)), type(dist.constraints.real))


def at_prior_mean(site):
    """For :class:`AtGPSites`: the process at its mean, which is no joint draw."""
    return site["fn"], prior_mean(site)


def above_prior_mean(site):
    """Likewise, one above it: of multiples of f nothing is seen at zero."""
    return site["fn"], prior_mean(site) + 1.0


def at_values(f):
    """For :class:`AtGPSites`: values by name, of shape ``batch_shape + (N,)``."""
    return lambda site: (site["fn"], f[site["name"]])


def draw(msg) -> None:
    """A value at a sample site that has none, NaN where there is none to be drawn."""
    if msg["type"] != "sample" or msg["value"] is not None:
        return
    try:
        found = msg["fn"](*msg["args"], sample_intermediates=True, **msg["kwargs"])
        msg["value"], msg["intermediates"] = found
    except NotImplementedError:
        msg["value"] = jnp.full(msg["fn"].shape(msg["kwargs"]["sample_shape"]), jnp.nan)

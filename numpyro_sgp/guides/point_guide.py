"""The guide for latents beside GP sites that are held at points."""

import functools
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_median
from numpyro.infer.util import potential_energy
from numpyro.primitives import Messenger
from numpyro.util import not_jax_tracer

from numpyro_sgp._programs import on_data
from numpyro_sgp.tracing import messages


class PointGuide(AutoDelta):
    """
    ``AutoDelta``, of which the first run (values of latents at which density and gradient
    are finite) is one compiled program instead of one for each operation. Where the median
    of draws is too far off for that (of a prior with a standard deviation of 1,000), real
    latents start at their prior means. Where that finds no such values either, or rows of
    latents are subsampled, it is that of ``AutoDelta``.
    """

    def _setup_prototype(self, *args, **kwargs):
        key = numpyro.prng_key()
        with handlers.block():
            trace, fine = on_data(self._first_run, args, kwargs, key)
            if not _holds(fine) and self.init_loc_fn is init_to_median:
                first_run = functools.partial(self._first_run, start_at=at_means)
                trace, fine = on_data(first_run, args, kwargs, key)
        sampled = messages.latents(trace)
        frames = {f.name: f for s in sampled.values() for f in s["cond_indep_stack"]}
        sizes = {k: s["args"][0] for k, s in trace.items() if s["type"] == "plate"}
        if not _holds(fine) or any(sizes[k] != f.size for k, f in frames.items()):
            try:
                with _Key(key):
                    return super()._setup_prototype(*args, **kwargs)
            except RuntimeError as error:
                where = self._told(args, kwargs, key)
                raise ValueError(
                    "The model's density or its gradient is not finite at any of the "
                    f"starting values of its latents that were tried{where}. "
                    "Look for priors or likelihoods that leave their range, and for "
                    "observations that are infinite, far too large, or impossible (counts "
                    "that are not whole, a rate of zero), and for logs of zero (as of a "
                    "difference of two cdfs)."
                ) from error
        self.prototype_trace = trace
        self._prototype_frames, self._prototype_frame_full_sizes = frames, sizes
        self._init_locs = {name: site["value"] for name, site in sampled.items()}
        self._event_dims = {name: site["fn"].event_dim for name, site in sampled.items()}
        return None

    def _first_run(self, args, kwargs, key, start_at=None):
        """The model's trace at the starting values, and whether they are fine."""
        seeded, start = self._started(key, start_at)
        trace = messages.trace_of(start, args, kwargs, key)
        sampled = messages.latents(trace)
        free = {
            name: biject_to(site["fn"].support).inv(site["value"])
            for name, site in sampled.items()
        }
        energy = jax.value_and_grad(
            lambda free: potential_energy(seeded, args, kwargs, free)
        )
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(energy(free))]
        for name in set(trace) - set(sampled):
            if trace[name]["type"] != "plate":
                del trace[name]
        return trace, jnp.stack(finite)

    def _started(self, key, start_at=None):
        """The model, seeded, and with starting values."""
        # The key that NumPyro's search would begin with.
        seeded = handlers.seed(self.model, jax.random.split(key)[1])
        start_at = start_at or self.init_loc_fn
        return seeded, handlers.substitute(seeded, substitute_fn=start_at)

    def _told(self, args, kwargs, key) -> str:
        """Where observations have no finite density or slope, as far as that is known."""
        with suppress(Exception):  # of the model, at values that it does not take
            trace = messages.trace_of(self._started(key)[1], args, kwargs, key)
            for name, site in trace.items():
                if site["type"] != "sample" or not site["is_observed"]:
                    continue
                rows = _not_finite(site)
                if rows.any():
                    first = ", ".join(map(str, np.flatnonzero(rows)[:3]))
                    return f": not at {rows.sum()} rows of site '{name}' (first: {first})"
        return ""


def _not_finite(site) -> np.ndarray:
    """Which entries of an observed site have no finite log density, or slope of it."""
    leaves, structure = jax.tree.flatten(site["fn"])
    numbers = [
        i for i, v in enumerate(leaves) if jnp.issubdtype(jnp.result_type(v), jnp.floating)
    ]

    def log_prob(given):
        some = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, some).log_prob(site["value"])

    given = {i: jnp.asarray(leaves[i]) for i in numbers}
    found = ~np.isfinite(site["fn"].log_prob(site["value"]))  # with its support
    for slope in jax.grad(lambda given: jnp.sum(log_prob(given)))(given).values():
        if slope.shape == found.shape:
            found |= ~np.isfinite(slope)
    return np.ravel(found)


def _holds(fine) -> bool:
    return not_jax_tracer(fine) and bool(np.asarray(fine).all())


def at_means(site):
    """Where latents start: real ones at their prior means, others at a median of draws."""
    start = init_to_median(site)
    if start is None or not messages.is_real(site["fn"]):
        return start
    try:
        mean = jnp.broadcast_to(site["fn"].mean, start.shape).astype(start.dtype)
    except NotImplementedError:
        return start
    return jnp.where(jnp.isfinite(mean), mean, start)


def near_means(site=None):
    """
    As a strategy of NumPyro: the median of a few draws from the prior, a third of its
    standard deviation from the middle; of real latents with a wide one, less than that.
    """
    if site is None:
        return functools.partial(near_means)
    start = init_to_median(site)
    if start is None or not messages.is_real(site["fn"]):
        return start
    try:
        mean, variance = site["fn"].mean, site["fn"].variance
    except NotImplementedError:
        return start
    near = mean + (start - mean) / jnp.maximum(1.0, jnp.sqrt(variance))
    return jnp.where(jnp.isfinite(near), near, start).astype(start.dtype)


def by_one_program(base_guide):
    """What makes a :class:`PointGuide` where ``base_guide`` would make an ``AutoDelta``."""
    if base_guide is AutoDelta:
        return PointGuide
    is_partial = isinstance(base_guide, functools.partial)
    if is_partial and base_guide.func is AutoDelta and not base_guide.args:
        return functools.partial(PointGuide, **base_guide.keywords)
    return base_guide


class _Key(Messenger):
    """Gives the next key."""

    def __init__(self, key):
        self.key = key
        super().__init__()

    def process_message(self, msg):
        if msg["type"] == "prng_key":
            msg["value"] = self.key

"""What watches and changes the messages of model and guide."""

import functools
from contextlib import nullcontext

import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_sgp.distributions import sites
from numpyro_sgp.guides.identity import check_shapes


def trace_of(fn, args, kwargs, rng_key=0, *, data=None, at_site=None) -> dict:
    """
    The trace of a model or guide, which no handler outside of it sees.

    :param args: tuple of its arguments.
    :param kwargs: dict of its keyword arguments.
    :param rng_key: key, or seed.
    :param data: values by name, of parameters most often.
    :param at_site: from a site's message to a value for it, or None.
    """
    fn = handlers.substitute(handlers.seed(fn, rng_key), data=data or {})
    if at_site is not None:
        fn = handlers.substitute(fn, substitute_fn=at_site)
    with handlers.block():
        return handlers.trace(fn).get_trace(*args, **kwargs)


def latents(trace) -> dict:
    """The sample sites of a trace that are not observed."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def place(f):
    """``at_site`` of :func:`trace_of` for values of GP sites by name, of any shape."""

    def at_site(site):
        if sites.is_latent_gp(site):
            return jnp.reshape(f[site["name"]], site["fn"].shape())
        return None

    return at_site


def at_prior_mean(site):
    """``at_site`` of :func:`trace_of` for GP sites at their prior means."""
    return sites.prior_mean(site) if sites.is_latent_gp(site) else None


def run_model(model, at_site, given, rng_key, args, kwargs) -> dict:
    """
    Runs a model with ``at_site`` at its GP sites; shows only these, parameters and plates.

    :param at_site: from a GP site's message to its new distribution and its value, or
        None to have it drawn.
    :param given: values of the other latents, and indices of plates.
    :param rng_key: key, or None where a handler outside has one.
    :return: the values that posteriors got.
    """
    at_sites = AtGPSites(at_site, hide_others=True)
    with at_sites, handlers.substitute(data=given), seeded(rng_key):
        model(*args, **kwargs)
    return at_sites.values


class AtGPSites(Messenger):
    """
    Gives GP sites another distribution and a value.

    :param at_site: from a GP site's message to its new distribution and its value, or
        None to have it drawn.
    :param hide_others: whether to hide all but GP sites, parameters and plates.
    """

    def __init__(self, at_site, hide_others=False):
        self.at_site = at_site
        self.hide_others = hide_others
        self.values = {}
        self._name = None  # in the model; handlers outside (a scope) may change it
        super().__init__()

    def process_message(self, msg):
        if msg["type"] == "sample" and sites.is_latent_gp(msg):
            self._name = msg["name"]
            msg["fn"], value = self.at_site(msg)
            if value is not None:
                msg["value"] = value
        elif self.hide_others and msg["type"] in ("sample", "deterministic"):
            _draw(msg)
            msg["stop"] = True

    def postprocess_message(self, msg):
        if sites.is_sparse_posterior(msg):
            self.values[self._name] = msg["value"]


class Drawn(Messenger):
    """Puts NaN where a distribution cannot be drawn from, which stops nothing else."""

    def process_message(self, msg):
        _draw(msg)


def _draw(msg):
    if msg["type"] != "sample" or msg["value"] is not None:
        return
    try:
        draw = msg["fn"](*msg["args"], sample_intermediates=True, **msg["kwargs"])
        msg["value"], msg["intermediates"] = draw
    except NotImplementedError:
        msg["value"] = jnp.full(msg["fn"].shape(msg["kwargs"]["sample_shape"]), jnp.nan)


class Plates(Messenger):
    """The indices of plates by their names here, whatever handlers outside call them."""

    def __init__(self):
        self.values = {}
        super().__init__()

    def process_message(self, msg):
        self._name = msg.get("name")

    def postprocess_message(self, msg):
        if msg["type"] == "plate":
            self.values[self._name] = msg["value"]


class Params(Messenger):
    """
    Checks the shapes of parameters, and says where those that nobody gives start.

    :param shapes: of the set-up, by name.
    :param starts: a function that returns starting values by name; None for the starts
        that the statements have.
    """

    def __init__(self, shapes, starts):
        self.shapes = shapes
        self.starts = starts
        self.started = set()
        self._asked = set()
        super().__init__()

    def __enter__(self):
        super().__enter__()
        return self

    def process_message(self, msg):
        if msg["type"] != "param":
            return
        self._name = name = msg["name"]
        # Starts by a function, and those of modules, which ask for parameters before they
        # make any, are drawn with the key of this run anyway.
        if msg["args"] and msg["args"][0] is None:
            self._asked.add(name)
        elif msg["args"] and name not in self._asked:
            msg["fn"] = functools.partial(self._start, name)

    def _start(self, name, start, **_):
        self.started.add(name)
        return start if self.starts is None else self.starts().get(name, start)

    def postprocess_message(self, msg):
        if msg["type"] != "param" or msg["value"] is None:
            return
        if self._name in self.shapes:
            check_shapes(self._name, msg["value"], self.shapes[self._name])


class FirstRows(Messenger):
    """
    Gives a subsampled plate its first rows, which do for starting values: outside of a
    compiled program, a draw is from an array of all of them.
    """

    def process_message(self, msg):
        if msg["type"] == "plate" and msg["value"] is None:
            size, subsample_size = msg["args"]
            if subsample_size not in (None, size):
                numpyro.prng_key()  # that of the draw, so that later ones have theirs
                msg["value"] = jnp.arange(subsample_size)


class OnePlateEach(Messenger):
    """Refuses a subsampled plate that is made twice, which draws two minibatches."""

    def __enter__(self):
        self.seen = set()
        return super().__enter__()

    def process_message(self, msg):
        if msg["type"] != "plate":
            return
        name, (size, subsample_size) = msg["name"], msg["args"]
        if name in self.seen and subsample_size not in (None, size):
            raise ValueError(
                f"The model makes the subsampled plate '{name}' twice, and each draws a "
                "minibatch of its own, so that rows of X and y would not match. Make it "
                f"once and enter it as often as needed: data = numpyro.plate('{name}', "
                f"{size}, subsample_size={subsample_size}); with data as idx: ...; with "
                "data: ..."
            )
        self.seen.add(name)


class WithoutGPs:
    """The model for the base guide: GP sites hidden, at their prior means."""

    def __init__(self, model, gp_sites):
        self.model = model
        self.gp_sites = gp_sites

    def __call__(self, *args, **kwargs):
        model = handlers.substitute(self.model, substitute_fn=at_prior_mean)
        with handlers.block(hide_fn=self._hides):
            return model(*args, **kwargs)

    def _hides(self, site):
        return site["type"] == "deterministic" or site.get("name") in self.gp_sites


def seeded(rng_key):
    """The handler that seeds with a key, or none where that is None."""
    return nullcontext() if rng_key is None else handlers.seed(rng_seed=rng_key)

"""What the log densities of a model are made of, beside what is known."""

from contextlib import suppress
from typing import NamedTuple

import jax
import jax.numpy as jnp
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_sgp._programs import NEEDS_KNOWN_DATA
from numpyro_sgp.tracing import messages

#: Random numbers that are no latent site.
KEYS = (
    "The model depends on random numbers that are no latent site of it: those of a site "
    "that numpyro.handlers.block hides, or of numpyro.prng_key()."
)
#: A likelihood that leaves GP sites as they are.
NO_F = "The likelihood does not depend on any GP site, so that there is nothing to infer."


class Reach(NamedTuple):
    """
    What log densities depend on.

    :param of_f: whether the likelihood depends on the values at GP sites.
    :param of_key: whether it, or a prior of a GP site, depends on random numbers that are
        no latent site; False with ``scan`` or ``cond``, where that is not known.
    """

    of_f: bool
    of_key: bool


def reach_of(model, args: tuple, kwargs: dict, data: dict | None = None) -> Reach | None:
    """
    :param data: values of latents beside f, of parameters and of the indices of plates by
        name; the others are drawn.
    :return: None where that cannot be told before data are known.
    """

    flows = _Flows(model)

    def log_densities(key, f):
        def at_site(site):
            return site["fn"], messages.prior_mean(site) + f

        trace = messages.trace_of(flows, args, kwargs, key, data=data, at_site=at_site)
        sites = [site for site in trace.values() if site["type"] == "sample"]
        gps = [site for site in sites if messages.is_latent_gp(site)]
        priors = [messages.unwrap(site["fn"])[0] for site in gps]
        observed = [messages.log_prob(site) for site in sites if site["is_observed"]]
        # Of a latent around f, as an error of each row: what it tells reaches f too.
        beside = [s for s in sites if not (s["is_observed"] or messages.is_latent_gp(s))]
        around = [messages.log_prob(site) for site in beside]
        of_priors = [jnp.sum(p.mean) + jnp.sum(p.kernel(p.X, p.X)) for p in priors]
        return *(sum(map(jnp.sum, terms)) for terms in (observed, around)), sum(of_priors)

    with suppress(*NEEDS_KNOWN_DATA):
        found = eval_provenance(log_densities, key=jax.random.key(0), f=0.0)
        # All that comes out of control flow is taken to be made of all that goes in.
        of_key = not flows.seen and any("key" in each for each in (found[0], found[2]))
        return Reach(any("f" in each for each in found[:2]), of_key)
    return None


class _Flows(Messenger):
    """Sees NumPyro's ``scan`` and ``cond``, which take a key whatever they do."""

    seen = False

    def process_message(self, msg):
        self.seen = self.seen or msg["type"] == "control_flow"

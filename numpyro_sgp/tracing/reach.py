"""What the log densities of a model are made of, beside what is known."""

from contextlib import suppress

import jax
import jax.numpy as jnp
from numpyro.ops.provenance import eval_provenance

from numpyro_sgp._programs import NEEDS_KNOWN_DATA
from numpyro_sgp.tracing import messages

#: Random numbers that are no latent site.
KEYS = (
    "The model depends on random numbers that are no latent site of it: those of a site "
    "that numpyro.handlers.block hides, or of numpyro.prng_key()."
)
#: A likelihood that leaves GP sites as they are.
NO_F = "The likelihood does not depend on any GP site, so that there is nothing to infer."


def reached_by(model, args: tuple, kwargs: dict) -> frozenset[str] | None:
    """
    Which of ``"f"``, the values at GP sites, and ``"key"``, random numbers that are no
    latent site, the log densities of observed sites and the priors of GP sites depend on;
    None where that cannot be told before data are known, or where latents must be drawn.
    """
    anywhere = messages.Anywhere(model)

    def log_densities(key, f):
        def at_site(site):
            return site["fn"], messages.prior_mean(site) + f

        trace = messages.trace_of(anywhere, args, kwargs, key, at_site=at_site)
        sites = [site for site in trace.values() if site["type"] == "sample"]
        priors = [messages.unwrap(s["fn"])[0] for s in sites if messages.is_latent_gp(s)]
        total = sum(jnp.sum(p.mean) + jnp.sum(p.kernel(p.X, p.X)) for p in priors)
        return total + sum(
            jnp.sum(messages.log_prob(site)) for site in sites if site["is_observed"]
        )

    with suppress(*NEEDS_KNOWN_DATA):
        found = eval_provenance(log_densities, key=jax.random.key(0), f=0.0)
        return None if anywhere.drawn else frozenset(found)
    return None

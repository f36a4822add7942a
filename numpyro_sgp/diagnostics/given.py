"""The model at draws of its latents."""

import warnings

import jax.numpy as jnp
from numpyro import handlers
from numpyro.primitives import Messenger
from numpyro.util import find_stack_level

from numpyro_sgp.diagnostics.layout import WHITE
from numpyro_sgp.mcmc.sparsify import EXPECTED
from numpyro_sgp.tracing import messages


class _Given(Messenger):
    """Puts draws at their sites; refuses ``bad`` sites and draws of another shape."""

    def __init__(self, values, bad=()):
        self.values = values
        self.bad = bad
        super().__init__()

    def process_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"]:
            name = msg["name"]
            if name not in self.values:
                return
            if name in self.bad:
                raise ValueError(
                    f"Draws of site '{name}' are NaN. The fit has failed (did the loss "
                    "diverge?); lower the step size, or look at the data."
                )
            value, shape = self.values[name], tuple(msg["fn"].shape())
            if jnp.shape(value) != shape:
                raise ValueError(
                    f"The draws of site '{name}' have shape {jnp.shape(value)}, but "
                    f"with these arguments the model gives it {shape}. Pass the "
                    "arguments that the model was fitted with, all of the data."
                )
            msg["value"] = value
        elif msg["type"] == "deterministic" and f"{msg['name']}{WHITE}" in self.values:
            # f of a whitened site: given, it need not be made from a Cholesky factor.
            msg["value"] = self.values[msg["name"]]


class _Forget(Messenger):
    """Takes the data from observed sites, so that they are drawn."""

    def __init__(self, names):
        self.names = names
        super().__init__()

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["value"], msg["is_observed"] = None, False


def trace_given(found, rng_key, values, *, forget=(), bad=()):
    """
    The trace of a model at draws.

    :param values: one of each latent; others are drawn from their priors.
    :param forget: observed sites that are drawn too.
    :param bad: sites with draws that are NaN.
    """
    with handlers.block(), handlers.trace() as trace, _Given(values, bad):
        with handlers.substitute(data=found.params), handlers.seed(rng_seed=rng_key):
            with _Forget(forget):
                found.model(*found.args, **found.kwargs)
    return trace


def warned_of_undrawn(trace, draws) -> bool:
    """
    Whether observations have no log likelihood: where a latent has no draws, as one that
    is summed out (``infer={"enumerate": ...}``), or f, of a sparsified model:
    with a value from its prior in each draw, what the data score is no log likelihood.
    """
    names = [
        name
        for name, site in messages.latents(trace).items()
        if name not in draws and not messages.is_latent_gp(site)
    ]
    if names:
        warnings.warn(
            f"Latent site '{names[0]}' has no draws (it is summed out, most often), so "
            "that the log likelihood of observations is not known: it is left out, and LOO "
            "with it. Write what is summed out as a distribution, such as "
            "numpyro.distributions.MixtureSameFamily, to have them.",
            stacklevel=find_stack_level(),
        )
    elif EXPECTED in trace:
        warnings.warn(
            "A sparsified model has the expected log likelihood of all observations under "
            "p(f | u), and neither draws of f nor a log likelihood of each: there is no "
            "LOO, and no posterior_predictive. For these take NUTS on sgp.whiten(model), "
            "sgp.nested, or Predictive of the sparsified model without its data.",
            stacklevel=find_stack_level(),
        )
    return bool(names)

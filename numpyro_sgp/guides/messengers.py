"""What watches and changes the messages of model and guide."""

import functools
from contextlib import nullcontext

import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_sgp.distributions.truncated import with_digits
from numpyro_sgp.guides.identity import check_shapes
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.errors import telling_arguments
from numpyro_sgp.tracing.plates import WholeIfFew


def run_model(model, at_site, given, rng_key, args, kwargs) -> dict:
    """
    Runs a model with ``at_site`` at its GP sites; shows only these, parameters and plates.

    :param at_site: from a GP site's message to its new distribution and its value, or
        None to have it drawn.
    :param given: values of the other latents, and indices of plates.
    :param rng_key: key, or None where a handler outside has one.
    :return: the values that posteriors got.
    """
    at_sites = messages.AtGPSites(at_site, hide_others=True)
    told = telling_arguments(args, kwargs, model)
    with told, at_sites, WholeIfFew(), handlers.substitute(data=given), seeded(rng_key):
        model(*args, **kwargs)
    return at_sites.values


def drawn_by(base_guide, names, args, kwargs) -> dict:
    """
    Values of latents by a base guide: what it returns, or, of a function that returns
    nothing of the kind, its sample sites.

    :param names: of the latents.
    :raises ValueError: if it has no value for one of them.
    """
    with handlers.trace() as trace:
        returned = base_guide(*args, **kwargs)
    found = {name: site["value"] for name, site in messages.latents(trace).items()}
    if isinstance(returned, dict):
        found |= returned
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"The base guide has no value of the latent sites {missing} beside f. It must "
            "sample each of them, at a site of its name, or return a dict with all."
        )
    return {name: found[name] for name in names}


class PutInside(Messenger):
    """Marks latents that have values inside of the model, by a handler there."""

    def process_message(self, msg):
        is_open = msg["type"] == "sample" and not msg["is_observed"]
        if is_open and msg["value"] is not None:
            # Of scan and cond values have come from within.
            msg["put_inside"] = not msg.get("_control_flow_done", False)


class Drawn(Messenger):
    """Puts NaN where a distribution cannot be drawn from, which stops nothing else."""

    def process_message(self, msg):
        messages.draw(msg)


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


class ProperPriors(Messenger):
    """
    Refuses latents that cannot be drawn, unless they have a start: no guide begins without
    values of them.

    :param start: what a base guide starts latents by, ``init_loc_fn``; None for draws.
    """

    def __init__(self, fn=None, start=None):
        self._start = start
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["is_observed"] or msg["value"] is not None:
            return
        if not isinstance(messages.innermost(msg["fn"]), dist.ImproperUniform):
            return
        if self._start is not None:
            if msg["kwargs"]["rng_key"] is None:
                msg["kwargs"]["rng_key"] = numpyro.prng_key()
            msg["value"] = self._start(msg)
        if msg["value"] is None:
            raise ValueError(
                f"Latent site '{msg['name']}' has an improper prior, of which no values "
                "can be drawn to begin with. Give it a proper one, such as "
                "dist.Normal(0, 10), a start by AutoSparseGP(..., init_loc_fn="
                f"numpyro.infer.init_to_value(values={{'{msg['name']}': ...}})), or sample "
                "the model by NUTS."
            )


class WithoutGPs:
    """The model for the base guide: GP sites hidden, at their prior means."""

    def __init__(self, model, gp_sites):
        self.model = model
        self.gp_sites = gp_sites

    def __call__(self, *args, **kwargs):
        with handlers.block(hide_fn=self._hides), _WithDigits():
            with messages.AtGPSites(messages.at_prior_mean):
                return self.model(*args, **kwargs)

    def _hides(self, site):
        return site["type"] == "deterministic" or site.get("name") in self.gp_sites


class _WithDigits(Messenger):
    """Likelihoods whose density is finite far away too."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["fn"] = with_digits(msg["fn"])


def seeded(rng_key):
    """The handler that seeds with a key, or none where that is None."""
    return nullcontext() if rng_key is None else handlers.seed(rng_seed=rng_key)

"""Nested results as predictions and figures of fits see them."""

from typing import Any

import jax

from numpyro_sgp.integrated.marginals import given
from numpyro_sgp.predictive.mixture import MixtureParts


class Shown:
    """What a figure asks of a fit."""

    def __init__(self, result: Any):
        self.guide, self.model, self.predict = result.guide, result.model, result.predict
        self.examples, self.params = result.examples, self.guide.known().starts
        self.args = None if self.examples is not None else result.args
        self.kwargs, self.effects = result.kwargs, result.field.effects
        self.responses, self.sums = result.field.responses, result.field.sums
        self.quantiles, self.posterior = result.quantiles, result.posterior
        #: Inducing points, which may be others than those of the guide.
        self.points = {
            name: self.guide.approximations[name].points_in(values)
            for name, values in result.nodes.points.items()
        }


class Parts(MixtureParts):
    """What predictions of responses ask of draws of all latents."""

    def __init__(self, field, values, free, args, kwargs):
        self.field, self.args, self.kwargs = field, args, kwargs
        self.responses, self.last = list(field.responses), list(field.sites)
        self.posteriors = {k: _Mean(values[k].mean(axis=0)) for k in field.sites}
        self.others = {k: values[k].mean(axis=0) for k in field.effects}
        self.others[""] = free[0]

    def run(self, f, others, rng_key=0, responses=None):
        """See :meth:`MixtureParts.run`; the entry without a name are hyperparameters."""
        values = {**f, **others, **(responses or {})}
        key = jax.random.key(rng_key) if isinstance(rng_key, int) else rng_key
        return given(self.field, others[""], values, self.args, self.kwargs, key)


class _Mean:
    def __init__(self, mean):
        self.mean = mean

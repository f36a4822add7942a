"""Draws of whole functions with hyperparameters drawn from nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from numpyro_sgp._programs import on_data
from numpyro_sgp.distributions import FunctionSamples
from numpyro_sgp.distributions.function_samples import draw_functions
from numpyro_sgp.integrated.effects import of_standardised
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.nodes import Nodes
from numpyro_sgp.integrated.placing import AtValues, Unconstrained
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.plates import WholeIfFew
from numpyro_sgp.tracing.trees import is_plain

_TOGETHER = 16  # draws of a node that are made by one call


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class MixtureFunctions:
    """
    Functions drawn from a :class:`~numpyro_sgp.Nested` at one of its GP sites, by
    :meth:`Nested.functions`: a pytree to be called. Those of one node of the
    hyperparameters share its kernel.

    :param parts: functions of some node each.
    :param order: where among those of all parts each draw is, ``shape``.
    :param means: prior mean of each draw, where that is not the part's; None else.

    >>> import jax
    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> posterior = sgp.nested(model, sgp.SVGP(4), data, progress_bar=False)
    >>> f = posterior.functions(jax.random.key(0), (5,))["f"]
    >>> f(jnp.linspace(0.0, 9.0, 7)[:, None]).shape
    (5, 7)
    """

    parts: tuple[FunctionSamples, ...]
    order: Array
    means: tuple[Callable[[Array], Array], ...] | None = None

    def __call__(self, X: Array) -> Array:
        """
        Values of the same functions at any inputs.

        :param X: inputs, shape ``(N, D)``.
        :return: shape ``shape + batch_shape + (N,)``.
        :raises ValueError: if X does not have the shape of a table.
        """
        found = jnp.concatenate([part(X) for part in self.parts])[self.order]
        if not self.means:
            return found
        each = [jnp.broadcast_to(m(X), found.shape[self.order.ndim :]) for m in self.means]
        return found + jnp.stack(each).reshape(found.shape)


def functions(
    field: Field,
    nodes: Nodes,
    key: Array,
    shape: tuple,
    num_features: int,
    args: tuple,
    kwargs: dict,
) -> dict[str, MixtureFunctions]:
    """
    Functions of each GP site; see :meth:`~numpyro_sgp.Nested.functions`.

    :param args: arguments of the model, at any inputs.
    """
    number = math.prod(shape)
    for_nodes, key = jax.random.split(key)
    seed = int(jax.random.randint(for_nodes, (), 0, 2**31 - 1))
    which = nodes.places(max(number, 1), seed)
    rng = np.random.default_rng(seed + 1)
    moved = _moved_by_effects(field, nodes, args, kwargs)
    together = min(_TOGETHER, len(which))
    parts: dict[str, list] = {name: [] for name in field.sites}
    means: dict[str, dict] = {name: {} for name in moved}
    order, end = np.zeros(len(which), int), 0
    for k in np.unique(which):
        node, at = nodes.nodes[k], np.flatnonzero(which == k)
        mean, factor = node.weighed.mean, node.weighed.factor
        priors = _priors(field, node.free, mean, args, kwargs)
        posteriors = {
            name: site.approximation.posterior(priors[name], nodes.points[name])
            for name, site in field.sites.items()
        }
        for start in range(0, len(at), together):
            drawn = at[start : start + together]
            x = rng.normal(size=(together, len(mean)))
            w = mean + factor.draw(jnp.asarray(x, field.dtype))
            key, *own = jax.random.split(key, 1 + len(priors))
            found = _of_node(field, posteriors, w, own, num_features)
            for name, samples in found.items():
                here = replace(samples, mean_function=None) if name in moved else samples
                parts[name].append(here)
            if moved:
                chosen = {name: priors[name].mean_function for name in moved}
                there = _means(field, chosen, node.free, w, args, kwargs)
                for name in moved:
                    means[name] |= dict(zip(drawn, there[name], strict=False))
            order[drawn] = end + np.arange(len(drawn))
            end += together
    places = jnp.asarray(order[:number].reshape(shape))
    return {
        name: MixtureFunctions(
            tuple(each),
            places,
            tuple(means[name][i] for i in range(number)) if name in moved else None,
        )
        for name, each in parts.items()
    }


def _of_node(field, posteriors, w, keys, num_features):
    """Functions of draws ``(S, m)`` of the field that share hyperparameters."""
    found, end = {}, 0
    for key, (name, posterior) in zip(keys, posteriors.items(), strict=True):
        start, end = end, end + field.gp_sizes()[name]
        own = w[:, start:end].reshape(len(w), *posterior.batch_shape, -1)
        found[name] = draw_functions(posterior, key, (len(w),), num_features, own)
    return found


def _means(field, known, free, w, args, kwargs) -> dict[str, list]:
    """
    The prior means of some GP sites at each of several draws of the field.

    :param known: those at one of them.
    """
    if not is_plain(known):
        each = [_priors(field, free, row, args, kwargs) for row in w]
        return {name: [prior[name].mean_function for prior in each] for name in known}

    def run(args, kwargs, free, w):
        def one(w):
            priors = _run(field, free, w, args, kwargs)
            return {name: priors[name].mean_function for name in known}

        return jax.vmap(one)(w)

    found = on_data(run, args, kwargs, jnp.asarray(free, field.dtype), w)
    found = jax.tree.map(np.asarray, found)
    return {
        name: [jax.tree.map(lambda leaf, i=i: leaf[i], mean) for i in range(len(w))]
        for name, mean in found.items()
    }


def _priors(field, free, w, args, kwargs) -> dict:
    """The prior process at each GP site, at hyperparameters and effects."""

    def run(args, kwargs, free, w):
        return _run(field, free, w, args, kwargs)

    free = jnp.asarray(free, field.dtype)
    found = on_data(run, args, kwargs, free, w)
    if all(is_plain((prior.kernel, prior.mean_function)) for prior in found.values()):
        return found
    # A function or an object of the user may hold numbers of that program.
    return run(args, kwargs, free, w)


def _run(field, free, w, args, kwargs):
    placed = AtStandardised(field, dict(field.unravel(free)), field.effect_parts(w))
    with handlers.block(), handlers.trace() as trace, placed:
        handlers.seed(WholeIfFew(field.model), jax.random.key(0))(*args, **kwargs)
    return {name: messages.unwrap(trace[name]["fn"])[0] for name in field.sites}


class AtStandardised(AtValues):
    """Effects by their standardised values, and GP sites at zero."""

    def process_message(self, msg):
        name = msg.get("name")
        if msg["type"] == "sample" and not msg["is_observed"]:
            if name in self.field.sites:
                msg["value"] = jnp.zeros(msg["fn"].shape())
            elif name in self.field.effects:
                msg["value"], _ = of_standardised(msg["fn"], self.values[name])
        super().process_message(msg)


def _moved_by_effects(field, nodes, args, kwargs) -> set[str]:
    """GP sites whose prior mean depends on effects."""
    found = set()

    def look():
        zeros = {k: jnp.zeros(s) for k, s in field.free_shapes.items()}
        program = field.program(Unconstrained(zeros), nodes.points, args, kwargs)
        for name in field.sites:
            labels = program.labels(program.outputs["values"][name])
            if any(kind == "effect" for kind, _ in labels):
                found.add(name)
        return ()

    jax.eval_shape(look)
    return found

"""Latents that the model depends on by comparisons alone: training cannot move them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal
from numpyro.infer.autoguide import AutoDelta

from numpyro_sgp.fitting.hierarchies import at_points
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins
from numpyro_sgp.tracing.trees import is_number

_COPIES = "broadcast_in_dim", "convert_element_type"


def still(guide, params: dict, args: tuple, kwargs: dict) -> list[str]:
    """
    The latents at points that the model depends on, but for which no density, and no
    kernel, mean or input of a GP, has a derivative, as of a change point by
    ``jnp.where(X < tau, a, b)``.

    :param guide: a guide that is set up.
    :param params: its parameters, constrained.
    :param args: tuple of the arguments of the model, with the training data.
    :param kwargs: dict of its keyword arguments.
    """
    if not isinstance(getattr(guide, "base_guide", None), AutoDelta):
        return []
    values = at_points(guide, params)
    values = {k: v for k, v in values.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def made(values: dict) -> dict[str, Array]:
        where = guide.model, args, kwargs
        trace = messages.trace_of(*where, data=values, at_site=messages.at_prior_mean)
        return {"total": sum((_sum(site) for site in trace.values()), jnp.zeros(()))}

    try:
        names = origins(made, values)["total"] if values else frozenset()
        slopes = jax.grad(lambda values: made(values)["total"])
        closed = jax.make_jaxpr(slopes)(values) if names else None
    except Exception:  # of a model's own code, for which no fit is to be lost
        return []
    if closed is None:
        return []
    # Of what it has no derivative by, JAX writes a zero.
    made_by = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}

    def is_zero(var):
        while not isinstance(var, Literal):
            eqn = made_by.get(var)
            if eqn is None or eqn.primitive.name not in _COPIES:
                return False
            var = eqn.invars[0]
        return not np.any(var.val)

    slopes_of = zip(sorted(values), closed.jaxpr.outvars, strict=True)
    return [name for name, var in slopes_of if name in names and is_zero(var)]


def _sum(site) -> Array:
    """Of all numbers at a site that a density depends on."""
    if site["type"] != "sample":
        return jnp.zeros(())
    if site["is_observed"]:
        return jnp.sum(messages.log_prob(site))
    fn = messages.unwrap(site["fn"])[0]
    is_gp = messages.is_latent_gp(site)
    leaves = jax.tree.leaves((fn.kernel, fn.mean, fn.X) if is_gp else fn)
    numbers = (jnp.asarray(v) for v in leaves if is_number(v))
    real = (v for v in numbers if jnp.issubdtype(v.dtype, jnp.floating))
    return sum(map(jnp.sum, real), jnp.zeros(()))


def told_of(names: list[str]) -> str:
    """What is wrong with latents."""
    some = " and ".join(map(repr, names))
    are, them = ("are", "them") if len(names) > 1 else ("is", "it")
    return (
        f"{some} {are} where the prior puts {them}: nothing else has a derivative by {them}"
    )


def warn_of(names: list[str]) -> None:
    """The same, to who called the caller, with what to do about it."""
    warnings.warn(
        f"Latent {told_of(names)} (a comparison, floor or whole number): training cannot "
        "move that. Write something smooth, such as jax.nn.sigmoid((X - tau) / width) in "
        "the place of X > tau; or compare fits at several values.",
        stacklevel=4,
    )

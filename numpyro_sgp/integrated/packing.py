"""Nodes as arrays and numbers, for files."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.nodes import KINDS, Nodes
from numpyro_sgp.integrated.precision import Conditional, Factor, Square
from numpyro_sgp.integrated.profile import Gaussian, Node
from numpyro_sgp.integrated.weighing import Weighed

_AS_THEY_ARE = "weights", "mode", "axes", "points", "stopped"


def packed(field: Field, nodes: Nodes) -> dict[str, Any]:
    """
    Names of effects, and all of the nodes but the q(w) from which other nodes would start.

    :return: a tree of arrays, numbers and strings.
    """
    each = nodes.nodes
    weighed = zip(*(jax.tree.leaves(node.weighed) for node in each), strict=True)
    groups = field.groups
    return {
        "effects": list(field.effects),
        "standardised": sorted(field.standardised),
        "kinked": bool(field.kinked),
        "groups": [] if groups is None else [list(pair) for pair in groups.axes.items()],
        "kind": nodes.kind,
        "free": nodes.free,
        "values": nodes.values,
        "left": np.array([node.left for node in each]),
        "open": nodes.open,
        "weighed": [np.stack(parts) for parts in weighed],
        "numbers": np.array([nodes.log_evidence, nodes.border]),
        **{name: getattr(nodes, name) for name in _AS_THEY_ARE},
    }


def unpacked(found: dict[str, Any], dtype) -> Nodes:
    """The inverse of :func:`packed`."""
    # Taken apart by NumPy: JAX compiles a program for each array.
    parts = (map(jnp.asarray, np.asarray(part)) for part in found["weighed"])
    gains, shares, means, *factors = parts
    factor: Callable[..., Factor] = Square if len(factors) == 1 else Conditional
    weighed = map(Weighed, gains, shares, means, map(factor, *factors))
    nothing = Gaussian.prior(0, dtype)
    free, values, left = (np.asarray(found[k]) for k in ("free", "values", "left"))
    # Files of former versions do not have it.
    open_here = np.asarray(found.get("open", np.full(len(left), np.nan)))
    each = zip(free, values, left, weighed, open_here, strict=True)
    log_evidence, border = map(float, found["numbers"])
    return KINDS[found["kind"]](
        nodes=tuple(
            Node(np.asarray(free), float(value), nothing, float(left), moments, float(lost))
            for free, value, left, moments, lost in each
        ),
        log_evidence=log_evidence,
        border=border,
        points=found["points"],
        stopped=found["stopped"],
        **{name: np.asarray(found[name]) for name in ("weights", "mode", "axes")},
    )

"""Nested results and joint fits from files."""

from __future__ import annotations

from typing import Any

from numpyro_sgp.fitting import Fitted
from numpyro_sgp.fitting.loading import RESULTS
from numpyro_sgp.fitting.problem import as_plain_arrays
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.groups import Groups
from numpyro_sgp.integrated.joint_fit import JointFit
from numpyro_sgp.integrated.packing import unpacked
from numpyro_sgp.integrated.result import Nested


def _read(kind: Any, fitted: Fitted, more: dict, **options) -> Any:
    """A result of some class, of a file."""
    args, kwargs = fitted.examples or (fitted.args or (), fitted.kwargs)
    args, kwargs = as_plain_arrays(fitted.model, args, kwargs)
    field = Field(fitted.guide, args, kwargs, tuple(more["effects"]))
    if axes := dict(more.get("groups", [])):  # files of former versions have none
        field.groups = Groups(axes, {name: field.shapes[name] for name in axes})
    field.standardised = frozenset(more.get("standardised", ()))
    field.kinked = bool(more.get("kinked", False))
    nodes = unpacked(more, field.dtype)
    found = kind(field, nodes, args, kwargs, fitted.seconds, **options)
    if fitted.args is None:
        found.examples = args, kwargs
    return found


def _nested(fitted: Fitted, more: dict) -> Nested:
    return _read(Nested, fitted, more)


def _joint(fitted: Fitted, more: dict) -> JointFit:
    names = "losses", "bound", "bound_se", "stopped", "apart"
    return _read(JointFit, fitted, more, **{k: getattr(fitted, k) for k in names})


RESULTS |= {"nested": _nested, "joint": _joint}

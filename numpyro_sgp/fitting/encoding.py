"""Options, arguments and parameters as JSON and arrays, which run nothing when read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp import families
from numpyro_sgp.distributions import relaxation
from numpyro_sgp.distributions.arguments import columns_in, is_frame, with_columns
from numpyro_sgp.elbo import (
    GaussHermite,
    MonteCarlo,
    ScoreFunction,
    TraceGP_ELBO,
    Trapezoid,
)
from numpyro_sgp.guides import ODVGP, SOLVEGP, SVGP, VGP, MixtureSVGP
from numpyro_sgp.inducing import FourierFeatures, InducingPatches, SmoothedPoints
from numpyro_sgp.inverse_free import InverseFreeSVGP

#: The classes of which a file may have objects, by their names there.
_CLASSES: dict[str, type] = {
    **{kind.__name__: kind for kind in (SVGP, VGP, SOLVEGP, ODVGP, MixtureSVGP)},
    "InverseFreeSVGP": InverseFreeSVGP,
    **{
        kind.__name__: kind for kind in (GaussHermite, MonteCarlo, ScoreFunction, Trapezoid)
    },
    "TraceGP_ELBO": TraceGP_ELBO,
    **{kind.__name__: kind for kind in (InducingPatches, SmoothedPoints, FourierFeatures)},
    **{
        f"families.{name}": getattr(families, name)
        for name in ("Full", "Diagonal", "Coupled", "PseudoData", "Dual")
    },
    **{
        f"relaxation.{name}": getattr(relaxation, name)
        for name in ("Diagonal", "Blocks", "Scalar")
    },
}
#: Options of those that are not dataclasses, or take others than their fields.
_OPTIONS: dict[type, tuple[str, ...]] = {
    VGP: ("covariance", "whiten", "jitter"),
    TraceGP_ELBO: ("expectation", "num_particles", "vectorize_particles", "sum_sites"),
}
_NAMES = {kind: name for name, kind in _CLASSES.items()}
_NUMBERS, _DATA = "biufc", "biufcSUMm"  # kinds of dtypes, of parameters and of arguments
_WIDE = {"float64", "int64", "uint64", "complex128"}


class NotInFile(ValueError):
    """What was asked for could not be written; the text says what it was."""


def encode(value: Any, name: str, arrays: dict[str, np.ndarray], *, strict=False) -> dict:
    """
    A tree of dicts, lists and tuples as JSON has it; its arrays are added to ``arrays``.

    :param value: its leaves may be arrays, numbers, strings, None and objects of the
        package's classes (approximations, families, relaxations, expectation rules,
        inducing variables), in arguments of models frames of numbers too.
    :param name: of the value, what the names of its arrays begin with.
    :param strict: whether there may be nothing else, and arrays become those of JAX. If
        not, something else leaves a note of its class, which :func:`decode` refuses.
    :raises TypeError: if ``strict``, and there is something else.
    """

    def part(value, key):
        return encode(value, f"{name}/{key}", arrays, strict=strict)

    def refused(what, mend=""):
        if strict:
            raise TypeError(f"{name} is {what}, which a file cannot have.{mend}")
        return {"absent": f"{name} is {what}"}

    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: part(v, k) for k, v in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [part(v, i) for i, v in enumerate(value)]}
    if isinstance(value, np.generic) and not strict:
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return refused("a random key")
        is_jax = strict or isinstance(value, jax.Array)
        array = np.asarray(value)
        if array.dtype.kind not in (_NUMBERS if is_jax else _DATA):
            return refused(f"an array with the dtype {array.dtype}")
        if strict:
            array = np.asarray(jnp.asarray(array))
        if labels := [c if isinstance(c, int) else str(c) for c in columns_in(value)]:
            return {"matrix": [_added(array, name, arrays), labels]}
        return {"jax" if is_jax else "numpy": _added(array, name, arrays)}
    if is_frame(value) and not strict:
        columns = [
            [part(label, "label"), part(np.asarray(value[label]), i)]
            for i, label in enumerate(value.columns)
        ]
        return {"frame": columns}
    if type(value) in _NAMES and not strict:
        options = {k: part(getattr(value, k), k) for k in _options(type(value))}
        return {"object": [_NAMES[type(value)], options]}
    mend = (
        " Keep the fit by pickle.dump(fitted, file), or write the module as functions of "
        "arrays in dicts, lists and tuples: numpyro.module(name, (initialise, apply))."
    )
    return refused(f"a {type(value).__name__}", mend)


def decode(structure: Any, arrays: dict[str, np.ndarray]) -> Any:
    """
    The inverse of :func:`encode`.

    :raises NotInFile: if there is something that could not be written.
    :raises ValueError: if there are arrays that JAX would round.
    """
    ((kind, content),) = structure.items()
    if kind == "dict":
        return {name: decode(part, arrays) for name, part in content.items()}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(decode(part, arrays) for part in content)
    if kind == "value":
        return content
    if kind == "numpy":
        return arrays[content]
    if kind == "matrix":
        content, columns = content
        return with_columns(arrays[content], columns)
    if kind == "jax":
        dtype = arrays[content].dtype.name
        if dtype in _WIDE and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ValueError(
                f"array '{content}' is of {dtype}, which JAX would round: call "
                "numpyro.enable_x64() before"
            )
        return jnp.asarray(arrays[content])
    if kind == "frame":
        import pandas as pd

        return pd.DataFrame({decode(k, arrays): decode(v, arrays) for k, v in content})
    if kind == "object":
        name, options = content
        chosen = _CLASSES[name]
        if {*options} != {*_options(chosen)}:
            raise ValueError(f"the options of {name} are others than those of this version")
        return chosen(**{k: decode(v, arrays) for k, v in options.items()})
    if kind == "absent":
        raise NotInFile(content)
    raise ValueError(f"there is no kind {kind!r}")


def _options(kind: Any) -> tuple[str, ...]:
    if kind in _OPTIONS:
        return _OPTIONS[kind]
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _added(array, name, arrays) -> str:
    """Puts an array under its name, or another one if that will not do for a member."""
    if not name.isprintable() or "\\" in name or len(name) > 200 or name in arrays:
        name = f"array {len(arrays)}"
    arrays[name] = array
    return name

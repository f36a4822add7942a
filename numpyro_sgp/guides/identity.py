"""What a guide and its model are made of, and whether parameters are theirs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.kernels import ObjectKernel
from numpyro_sgp.tracing import messages

# Options of approximations that only say how parameters start, or show in their shapes.
_STARTS = (
    "T_start",
    "inducing",
    "initial_scale",
    "num_inducing",
    "num_orthogonal",
    "orthogonal",
    "seed",
    "spread",
)
_WHOSE = "Are these the parameters of another guide?"


def check_params(params: dict, expected: dict, fixed: dict) -> None:
    """
    :param params: parameters by name.
    :param expected: :class:`jax.ShapeDtypeStruct` (or trees of them) by name.
    :param fixed: values that may be there as well, but must not differ.
    :raises ValueError: if names, shapes or kinds of numbers differ, or a value is not
        finite.
    """
    if not isinstance(params, dict):
        raise ValueError(
            "params must be the dict of parameters by name that svi.run returns "
            f"(result.params), got {type(params).__name__}."
        )
    missing = sorted(set(expected) - set(params))
    extra = sorted(set(params) - set(expected) - set(fixed))
    if missing or extra:
        raise ValueError(
            "The names of params are not those of this guide and its model: "
            + (f"{missing} are missing. " if missing else "")
            + (f"{extra} are unknown. " if extra else "")
            + (_scoped(missing, params) or _WHOSE)
        )
    for name, value in params.items():
        if name in fixed:
            _check_fixed(name, value, fixed[name])
            continue
        check_shapes(name, value, expected[name])
        for leaf in jax.tree.leaves(value):
            if not_jax_tracer(leaf) and not np.isfinite(np.asarray(leaf)).all():
                raise ValueError(
                    f"Parameter '{name}' is not finite. Training has diverged: look at "
                    "the losses, lower the learning rate, or, in float32, try "
                    "numpyro.enable_x64()."
                )


def _scoped(missing, params) -> str:
    """What to do with the names of a guide inside of a scope."""
    for name in params:
        for own in missing:
            prefix = name.removesuffix(own)
            if name != prefix and prefix and all(prefix + k in params for k in missing):
                return (
                    f"All are there with the prefix {prefix!r}, of a guide inside "
                    "numpyro.handlers.scope: take it off, {name.removeprefix("
                    f"{prefix!r}): value for name, value in params.items()}}."
                )
    return ""


def check_shapes(name: str, value, expected) -> None:
    """
    :param expected: a tree of :class:`jax.ShapeDtypeStruct`.
    :raises ValueError: if ``value`` has other shapes, or another kind of numbers.
    """
    try:
        found = jax.tree.map(shape_and_dtype, value)
    except TypeError:
        raise ValueError(f"Parameter '{name}' is no array of numbers: {value!r}.") from None
    if jax.tree.structure(found) != jax.tree.structure(expected):  # type: ignore[operator]
        raise ValueError(f"Parameter '{name}' is another tree than this guide's. {_WHOSE}")
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for got, wanted in pairs:
        if got.shape != wanted.shape:
            raise ValueError(
                f"Parameter '{name}' has shape {got.shape}, but this guide's has "
                f"{wanted.shape}. {_WHOSE}"
            )
        if jnp.result_type(got.dtype, wanted.dtype).kind != wanted.dtype.kind:
            raise ValueError(
                f"Parameter '{name}' has the dtype {got.dtype}, but this guide's has "
                f"{wanted.dtype}. {_WHOSE}"
            )


def _check_fixed(name, value, expected):
    if jnp.shape(value) != expected.shape or (
        not_jax_tracer(value) and not np.allclose(value, expected, rtol=1e-5, atol=1e-6)
    ):
        raise ValueError(
            f"'{name}' is not trained by this guide (train_inducing=False), and the values "
            "in params are others than those that it was set up with. Set the guide up "
            "with the data of the training, or give it these points by name: inducing=..."
        )


def shape_and_dtype(x) -> jax.ShapeDtypeStruct:
    """
    :raises TypeError: if ``x`` is no array of numbers.
    """
    if not isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
        raise TypeError(f"{type(x).__name__} is no array.")
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def describe(trace: dict, approximations: dict, points: dict, params: dict) -> dict:
    """
    What a model and its guide are made of, without values; see
    :meth:`~numpyro_sgp.AutoSparseGP.fingerprint`.

    :param trace: the model's trace with data.
    :param approximations: by GP site.
    :param points: inducing points of each set, by GP site.
    :param params: :class:`jax.ShapeDtypeStruct` (or trees of them) by name.
    """
    found: dict[str, dict] = {}
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        fn = messages.innermost(site["fn"])
        kind = "observed" if site["is_observed"] else "latent"
        found[name] = {"kind": kind, "distribution": type(fn).__name__}
        if isinstance(fn, GaussianProcess):
            parts = {"kernel": fn.kernel, "mean": fn.mean_function}
            found[name] |= {key: _made_of(part) for key, part in parts.items()}
        if name in approximations:
            approximation = approximations[name]
            options = {
                k: _made_of(v, fixed=True)
                for k, v in vars(approximation).items()
                if k not in _STARTS
            }
            found[name] |= {
                "approximation": [type(approximation).__name__, options],
                "inducing": [_made_of(p) for p in points[name]],
            }
    shapes = {
        name: [list(leaf.shape) for leaf in jax.tree.leaves(value)]
        for name, value in params.items()
    }
    return {"sites": found, "parameters": shapes}


def difference(saved, own, where: tuple[str, ...] = ()) -> str:
    """
    Where two descriptions are first apart, in words; empty where they are the same.

    :param saved: of :func:`describe`, out of a file.
    :param own: that of the guide at hand.
    """
    told = " of ".join(reversed(where))
    if isinstance(saved, dict) and isinstance(own, dict):
        for name in (*saved, *own):
            if name not in own:
                return f"'{name}' is in the {told} of what was saved, and not here"
            if name not in saved:
                return f"'{name}' is in the {told} here, and not of what was saved"
            if found := difference(saved[name], own[name], (*where, str(name))):
                return found
        return ""
    saved, own = json.loads(json.dumps([saved, own]))
    return "" if saved == own else f"the {told} was {saved} and is {own} here"


def _made_of(x, fixed=False):
    """
    Classes and options of a kernel, say, without the numbers that can be learned.

    :param fixed: whether numbers are options.
    """
    if isinstance(x, ObjectKernel):
        x = x.box.value
    if isinstance(x, bool | int | float | np.generic | np.ndarray | jax.Array):
        return x if fixed and isinstance(x, bool | int | float) else None
    if x is None or isinstance(x, str):
        return x
    if isinstance(x, tuple | list):
        return [_made_of(v, fixed) for v in x]
    name = getattr(x, "__name__", type(x).__name__)  # of a function, or the class
    if not dataclasses.is_dataclass(x):
        return name
    parts = {
        f.name: _made_of(getattr(x, f.name, None), f.metadata.get("static", False))
        for f in dataclasses.fields(x)
    }
    return [name, parts]

"""Frozen dataclasses that are pytrees: what kernels are, and inducing variables."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

__all__ = ["frozen_pytree", "static_field"]

T = TypeVar("T", bound=type)


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree's structure, not a leaf."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, eq_default=False)
def frozen_pytree(cls: T) -> T:
    """
    Make ``cls`` a frozen dataclass and a pytree (static fields: :func:`static_field`).

    Unlike :func:`jax.tree_util.register_dataclass`, unflattening does not call
    ``__init__``: JAX unflattens with placeholders, with axes and with the blocks of a
    Jacobian, whose shapes are not those of hyperparameters and must not be checked.
    """
    dataclasses.dataclass(frozen=True, eq=False)(cls)
    static = [f.name for f in dataclasses.fields(cls) if f.metadata.get("static")]
    data = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]

    def flatten(kernel):
        return (
            tuple(getattr(kernel, name) for name in data),
            tuple(getattr(kernel, name) for name in static),
        )

    def flatten_with_keys(kernel):
        children, aux = flatten(kernel)
        keys = map(jax.tree_util.GetAttrKey, data)
        return tuple(zip(keys, children, strict=True)), aux

    def unflatten(aux, children):
        kernel = object.__new__(cls)
        for name, value in zip([*data, *static], [*children, *aux], strict=True):
            object.__setattr__(kernel, name, value)
        return kernel

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls

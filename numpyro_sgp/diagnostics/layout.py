"""Names of the axes of sites in ArviZ data, and where masked values lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from numpyro_sgp.tracing import messages

if TYPE_CHECKING:
    from xarray import Dataset

WHITE = "_white"


def white_sites(trace, draws) -> set[str]:
    """Names of the white values behind f of whitened models."""
    return {
        name
        for name in draws
        if name.endswith(WHITE) and any(map(_is_whitened, _behind(trace, name)))
    }


def _behind(trace, name):
    """Sites that may be whitened there: prefixes of a scope may be in the name twice."""
    parts = name.removesuffix(WHITE).split("/")
    return (trace.get("/".join(parts[i:])) for i in range(len(parts)))


def _is_whitened(site) -> bool:
    """Whether a site is f of a whitened model, or of one that its sampler whitens."""
    return site is not None and (
        site["type"] == "deterministic" or messages.is_latent_gp(site)
    )


def places(whole, masks) -> dict:
    """
    Indices by site and dimension of what masks leave; None where they leave nothing. On a
    grid if it is one and no other site is at odds with it, else along one new dimension.

    :param whole: log likelihood of all sites.
    :param masks: of those that have masked entries, arrays of the batch shape.
    """
    grids = {name: _grid(whole[name], masks.get(name)) for name in whole}

    def at_odds(grid):
        return any(
            dim in other and not np.array_equal(where, other[dim])
            for other in grids.values()
            for dim, where in grid.items()
        )

    found = {}
    for name, mask in masks.items():
        found[name] = grids[name] if mask.any() else None
        if mask.any() and (not grids[name] or at_odds(grids[name])):
            found[name] = along(f"{name}_obs", whole[name], mask)
    return found


def _grid(values, mask) -> dict:
    """Indices by dimension, empty where those of the mask are not a grid."""
    mask = np.ones(values.shape[2:], bool) if mask is None else mask
    axes = range(mask.ndim)
    where = [np.flatnonzero(mask.any(axis=(*axes[:i], *axes[i + 1 :]))) for i in axes]
    is_grid = mask[np.ix_(*where)].all()
    return dict(zip(values.dims[2:], where, strict=True)) if is_grid else {}


def along(dim, values, mask) -> dict:
    """Indices of the true entries of a mask, along one dimension."""
    from xarray import DataArray

    where = np.nonzero(mask) if mask.ndim else ()
    return {d: DataArray(i, dims=dim) for d, i in zip(values.dims[2:], where, strict=True)}


def at_places(dataset, places: dict) -> Dataset:
    """The variables of a group at these places, and labels of these."""
    from xarray import Dataset

    found = {}
    for name, values in dataset.items():
        where = places.get(name, {})
        if where is None:
            continue
        values = values.isel(where)
        new = {dim for i in where.values() for dim in getattr(i, "dims", ())}
        for line in new:
            values = values.rename({dim: f"{line}_{dim}" for dim in where})
            values = values.assign_coords({line: np.arange(values.sizes[line])})
        found[name] = values
    return Dataset(found, attrs=dataset.attrs)


def named_dims(trace, draws, given) -> dict[str, list]:
    """Names of the axes of each site, those of plates where they are not given."""
    given = dict(given or {})
    known = {k for k, s in trace.items() if s["type"] in ("sample", "deterministic")}
    unknown = sorted(set(given) - known - set(draws))
    if unknown:
        raise ValueError(
            f"dims names sites {unknown}, which are not in the model; it has "
            f"{sorted(known)}."
        )
    for name, axes in given.items():
        if isinstance(axes, str) or not isinstance(axes, Iterable):
            raise TypeError(
                f"dims of '{name}' must be a list of names, one for each axis but those of "
                f"chains and draws, such as ['row'], got {axes!r}."
            )
        given[name] = list(axes)
        if name in draws:
            shape = np.shape(draws[name])[2:]
        elif trace[name]["type"] == "sample":
            shape = trace[name]["fn"].shape()
        else:
            shape = np.shape(trace[name]["value"])
        if len(given[name]) > len(shape):
            raise ValueError(
                f"dims of '{name}' has {len(given[name])} names {given[name]}, but it has "
                f"the shape {shape} beside chains and draws."
            )
    named = {name: _axes(trace, name) for name in known}
    for white in white_sites(trace, draws) - known:  # of a sampler that whitens
        named[white] = [*named[white.removesuffix(WHITE)][:-1], None]
    return {**named, **given}


def _axes(trace, name) -> list:
    """Names of the axes of a site, None where it has no plate."""
    site = trace[name]
    frames = site["cond_indep_stack"]
    if site["type"] == "sample":
        shape, num_batch = site["fn"].shape(), len(site["fn"].batch_shape)
    else:
        shape = jnp.shape(site["value"])
        num_batch = _num_batch(shape, frames, trace.get(f"{name}{WHITE}"))
    axes = [None] * len(shape)
    for frame in frames:
        axis = num_batch + frame.dim
        if 0 <= axis and shape[axis] == frame.size:
            axes[axis] = frame.name
    event = list(site.get("infer", {}).get("event_dims", ()))
    if event:
        axes[len(axes) - len(event) :] = event
    return axes


def _num_batch(shape, frames, white) -> int:
    """
    How many axes of a deterministic value are batch axes. It does not say; f of a
    whitened model has those of its white values, and other values as few as their plates
    leave, which is how ``arviz.from_numpyro`` reads them.
    """
    if white is not None and white["type"] == "sample" and white["fn"].shape() == shape:
        return len(white["fn"].batch_shape)
    depth = max((-frame.dim for frame in frames), default=0)
    for num_batch in range(depth, len(shape) + 1):
        if all(shape[num_batch + frame.dim] == frame.size for frame in frames):
            return num_batch
    return len(shape)


def without_slashes(dataset) -> Dataset:
    """In a DataTree "/" divides groups; numpyro.handlers.scope puts it into names."""
    names = {str(k) for k in (*dataset.variables, *dataset.dims) if "/" in str(k)}
    return dataset.rename({name: name.replace("/", ".") for name in names})

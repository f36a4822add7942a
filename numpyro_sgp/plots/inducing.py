"""Inducing points over the data, where they began and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgp.distributions.arguments import named_arguments
from numpyro_sgp.plots.names import named_as
from numpyro_sgp.plots.scene import (
    arrays_of,
    as_rows,
    few_rows,
    gp_sites,
    ink,
    new_axes,
    observed,
    shown,
    trace_with_data,
    training_arguments,
)
from numpyro_sgp.tracing import messages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SETS = ("inducing points", "orthogonal points")
_START, _END = 0.09, 0.04  # of the height of the axes, where points are over one column
_ROOM = 0.14  # of the height of the data, for each set


def plot_inducing(
    result: Any,
    ax: Axes | None = None,
    *,
    site: str | None = None,
    columns: Sequence[int] | int | None = None,
) -> Axes:
    """
    Inducing points of a GP site over its data: hollow where the guide was set up with them,
    filled where they are now, in a colour for each orthogonal set.

    Over one column the data are drawn with the first response, and points at the bottom;
    over two, all of them are where they are. :func:`~numpyro_sgp.fit` draws some points
    anew as it goes, so that a filled point need not come from the hollow one beside it.
    Points that are not trained are where they began.

    :param result: what :func:`~numpyro_sgp.fit` or :func:`~numpyro_sgp.nested` returned.
    :param ax: axes to draw into; new ones if None.
    :param site: the GP site; the first one with points among its inputs if None.
    :param columns: one or two columns of the inputs to draw over; needed where there are
        more than two.
    :return: the axes.
    :raises TypeError: if ``result`` is something else.
    :raises ValueError: if there is no such site or column, more than two columns and none
        chosen, or the points are no inputs (inter-domain ones).

    >>> import jax.numpy as jnp, matplotlib.pyplot as plt, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> fitted = sgp.fit(model, sgp.SVGP(3), (X, y), progress_bar=False)
    >>> ax = sgp.plots.plot_inducing(fitted)
    >>> [line.get_label() for line in ax.get_lines()]
    ['data', 'inducing points, at first', 'inducing points']
    >>> plt.close(ax.figure)
    """
    fitted = shown(result)
    args, kwargs = training_arguments(fitted)
    found = gp_sites(fitted, *few_rows(fitted, args, kwargs))
    trained = {name: as_rows(sets) for name, (_, sets) in found.items()}
    if site is not None and site not in trained:
        raise ValueError(f"There is no GP site '{site}'; there are {sorted(trained)}.")
    site = site or next((name for name, sets in trained.items() if sets), None)
    if site is None or not trained[site]:
        raise ValueError(
            "The inducing variables are no inputs of a GP site (inter-domain ones, say), "
            "and so have no place among the data."
        )
    ends = trained[site]
    starts = as_rows(arrays_of(fitted.guide.known().sites[site].points))
    D = ends[0].shape[1]
    columns = _checked(columns, D, site)
    X, trace = None, None
    if fitted.args is not None:
        trace = trace_with_data(fitted, args, kwargs)
        X = np.asarray(messages.unwrap(trace[site]["fn"])[0].X)
        X = X.reshape(-1, D)[:, columns]  # of all functions, where each has its own
    if ax is None:
        ax = new_axes()
    if X is not None:
        _draw_data(ax, X, trace)
    if len(columns) == 1:  # room for the points below the data
        low, high = ax.get_ylim()
        ax.set_ylim(low - (high - low) * _ROOM * len(ends), high)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        what = _SETS[min(i, 1)] + (f", set {i}" if len(ends) > 2 and i else "")
        hollow: dict[str, Any] = {
            "color": f"C{i}",
            "mfc": "none",
            "alpha": 0.7,
            "ls": "none",
        }
        filled: dict[str, Any] = {"color": f"C{i}", "ls": "none", "label": what}
        hollow["label"] = f"{what}, at first"
        start, end = start[:, columns], end[:, columns]
        if len(columns) == 1:
            at: dict[str, Any] = {"transform": ax.get_xaxis_transform()}
            height = 0.11 * i
            ax.plot(start[:, 0], np.full(len(start), _START + height), "o", **at, **hollow)
            ax.plot(end[:, 0], np.full(len(end), _END + height), "^", **at, **filled)
        else:
            ax.plot(*start.T, "o", **hollow)
            ax.plot(*end.T, "X", mec=ink(), mew=0.4, **filled)
    labels = [f"input of {site}" + (f"[:, {c}]" if D > 1 else "") for c in columns]
    if X is not None:
        named = list(named_arguments(fitted.model, args, kwargs))
        labels = [named_as(x, site, named) for x in X.T]
    ax.set_xlabel(labels[0])
    if len(columns) == 2:
        ax.set_ylabel(labels[1])
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return ax


def _checked(columns, number, site) -> list[int]:
    """The columns to draw over."""
    if columns is None:
        if number > 2:
            raise ValueError(
                f"'{site}' has inputs with {number} columns: say which one or two to draw "
                "over, plot_inducing(result, columns=(0, 1))."
            )
        return list(range(number))
    found = [columns] if np.ndim(columns) == 0 else list(columns)
    if len(found) not in (1, 2) or any(not 0 <= c < number for c in found):
        raise ValueError(
            f"columns must be one or two numbers from 0 to {number - 1}, got {columns}."
        )
    return found


def _draw_data(ax, X, trace):
    if X.shape[1] == 2:
        ax.plot(*X.T, ".", color=ink(), ms=3, alpha=0.4, label="data")
        return
    for name, site in trace.items():
        if site["type"] != "sample" or not messages.is_response(site):
            continue
        y = observed(trace, name, len(X), 0)
        if y is not None and y.shape[1] == 1:
            ax.plot(X[:, 0], y, ".", color=ink(), ms=4, alpha=0.5, label="data")
            ax.set_ylabel(name)
            return
    at = {"transform": ax.get_xaxis_transform(), "label": "data"}
    ax.plot(X[:, 0], np.full(len(X), 0.96), "|", color=ink(), alpha=0.5, **at)
    ax.set_yticks([])

"""Posterior draws of compared fits, a panel for each variable and fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numpyro_sgp._checks import shown
from numpyro_sgp.plots.scene import ink

_BAND = (0.05, 0.95)
_MAX_LINES = 10
_MAX_COLUMNS = 4  # panels side by side


def plot_panels(
    comparison: Any,
    x: Any = None,
    *,
    var_names: Sequence[str] | str | None = None,
    axes: Any = None,
) -> np.ndarray:
    """
    Posterior means and 90 % bands of compared variables, a panel for each variable and fit
    with the reference's dotted, and the ELPD of all fits with a standard error to each
    side, in a last panel (none where no fit has a log likelihood).

    :param comparison: what :func:`~numpyro_sgp.compare` returned.
    :param x: values of the horizontal axis, shape ``(N,)`` or ``(N, 1)`` with N the last
        axis of the variables; their index if None.
    :param var_names: names of some of the compared variables; all if None.
    :param axes: axes to draw into, one for each variable and fit (fits change first) and
        one for the ELPD; new ones if None.
    :return: the axes, an array with one axis.
    :raises TypeError: if ``comparison`` is something else.
    :raises ValueError: if a variable was not compared, ``x`` has another shape, or there
        are too few axes.

    >>> import arviz_base, matplotlib.pyplot as plt, numpy as np
    >>> import numpyro_sgp as sgp
    >>> f = np.random.default_rng(0).normal(size=(2, 1, 100, 5))
    >>> fits = {name: {"posterior": {"f": f[i]}} for i, name in enumerate("ab")}
    >>> fits = {name: arviz_base.from_dict(draws) for name, draws in fits.items()}
    >>> axes = sgp.plots.plot_panels(sgp.compare(fits))
    >>> [ax.get_title() for ax in axes]
    ['a', 'b']
    >>> plt.close(axes[0].figure)
    """
    if not hasattr(comparison, "draws"):
        raise TypeError(
            f"plot_panels draws what sgp.compare returned, got {shown(comparison)}."
        )
    if var_names is None:
        var_names = comparison.var_names
    var_names = [var_names] if isinstance(var_names, str) else list(var_names)
    if unknown := [v for v in var_names if v not in comparison.var_names]:
        raise ValueError(
            f"Variables {unknown} were not compared, only {list(comparison.var_names)}."
        )
    names, reference = list(comparison.draws), comparison.draws[comparison.reference]
    places = {v: _positions(x, v, reference[v].shape[1:]) for v in var_names}
    with_elpd = bool(comparison.table["elpd_loo"].notna().any())
    number = len(var_names) * len(names) + with_elpd
    if axes is None:
        axes = _new_axes(len(var_names), len(names), with_elpd)
    axes = np.ravel(np.asarray(axes, dtype=object))
    if len(axes) < number:
        raise ValueError(f"There are {number} panels to draw, but {len(axes)} axes.")
    axes = axes[:number]
    panels = iter(axes)
    for v in var_names:
        for j, name in enumerate(names):
            ax = next(panels)
            _draw_panel(ax, places[v], comparison.draws[name][v], reference[v])
            ax.set_title(name)
            ax.set_xlabel("x" if x is not None else "index")
            if j == 0:
                ax.set_ylabel(v)
    if with_elpd:
        _draw_elpd(next(panels), comparison)
    return axes


def _new_axes(num_variables, num_fits, with_elpd) -> np.ndarray:
    import matplotlib.pyplot as plt

    num_columns = min(num_fits, _MAX_COLUMNS)
    lines = -(-num_fits // num_columns)  # of panels for each variable
    num_rows = num_variables * lines + with_elpd
    size = (3.2 * max(num_columns, 2), 2.6 * num_rows)
    figure = plt.figure(figsize=size, layout="constrained")
    grid, axes = figure.add_gridspec(num_rows, num_columns), []
    for i in range(num_variables):
        first = None
        for j in range(num_fits):
            line, column = divmod(j, num_columns)
            ax = figure.add_subplot(grid[i * lines + line, column], sharey=first)
            first = first or ax
            axes.append(ax)
    if with_elpd:
        axes.append(figure.add_subplot(grid[-1, :]))
    return np.array(axes)


def _positions(x, name, shape) -> np.ndarray:
    N = shape[-1] if shape else 1
    if x is None:
        return np.arange(N)
    x = np.asarray(x)
    flat = x[:, 0] if x.ndim == 2 and x.shape[1] == 1 else x
    if flat.shape != (N,):
        raise ValueError(
            f"x must have the shape ({N},), the last axis of '{name}' {shape}, got "
            f"{x.shape}."
        )
    return flat


def _draw_panel(ax, x, draws, reference):
    order = np.argsort(x)
    x = x[order]
    draws = draws.reshape(len(draws), -1, len(x))[..., order]
    reference = reference.reshape(len(reference), -1, len(x))[..., order]
    marker = "o" if len(x) == 1 else None
    for i in range(min(draws.shape[1], _MAX_LINES)):
        lower, upper = np.quantile(draws[:, i], _BAND, axis=0)
        color = f"C{i}"
        ax.fill_between(x, lower, upper, alpha=0.3, color=color, linewidth=0)
        ax.plot(x, draws[:, i].mean(axis=0), color=color, marker=marker)
        for line in (
            reference[:, i].mean(axis=0),
            *np.quantile(reference[:, i], _BAND, axis=0),
        ):
            ax.plot(x, line, linestyle=":", color=ink(), linewidth=1)


def _draw_elpd(ax, comparison):
    names = list(comparison.draws)
    elpd, se = comparison.table["elpd_loo"], comparison.table["se"]
    ax.errorbar(elpd, range(len(names)), xerr=se, fmt="o", capsize=3, color=ink())
    ax.axvline(elpd[comparison.reference], linestyle=":", color=ink())
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel("ELPD by LOO, ± 1 standard error")

"""Figures of fits side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAND = (0.05, 0.95)
_MAX_LINES = 10
_MAX_COLUMNS = 4  # panels side by side


def draw_comparison(comparison, x, var_names: list[str]) -> Figure:
    """What :meth:`~numpyro_sgp.Comparison.plot` shows."""
    import matplotlib.pyplot as plt

    names, reference = list(comparison.draws), comparison.draws[comparison.reference]
    with_elpd = bool(comparison.table["elpd_loo"].notna().any())
    num_columns = min(len(names), _MAX_COLUMNS)
    lines = -(-len(names) // num_columns)  # of panels for each variable
    num_rows = len(var_names) * lines + with_elpd
    size = (3.2 * max(num_columns, 2), 2.6 * num_rows)
    figure = plt.figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(num_rows, num_columns)
    for i, v in enumerate(var_names):
        where = _positions(x, v, reference[v].shape[1:])
        first = None
        for j, name in enumerate(names):
            line, column = divmod(j, num_columns)
            ax = figure.add_subplot(grid[i * lines + line, column], sharey=first)
            first = first or ax
            _draw_panel(ax, where, comparison.draws[name][v], reference[v])
            ax.set_title(name)
            ax.set_xlabel("x" if x is not None else "index")
        first.set_ylabel(v)
    if with_elpd:
        ax = figure.add_subplot(grid[-1, :])
        elpd, se = comparison.table["elpd_loo"], comparison.table["se"]
        ax.errorbar(elpd, range(len(names)), xerr=se, fmt="o", capsize=3, color="k")
        ax.axvline(elpd[comparison.reference], linestyle=":", color="k")
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel("ELPD by LOO, ± 1 standard error")
    return figure


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
            ax.plot(x, line, linestyle=":", color="k", linewidth=1)

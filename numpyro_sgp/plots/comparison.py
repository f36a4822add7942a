"""Fits of the same data over each other, in one pair of axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgp.plots.posterior import draw_data
from numpyro_sgp.plots.scene import (
    by_row,
    chosen,
    grid_of,
    in_order,
    is_classes,
    new_axes,
    predictions_of,
    scene_of,
    shown,
    tails,
    which,
)
from numpyro_sgp.predictive import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_comparison(
    fits: Mapping[str, Any],
    ax: Axes | None = None,
    *,
    site: str | None = None,
    X: Any = None,
    level: float = 0.9,
    index: int | None = None,
    num_points: int | None = None,
    **kwargs,
) -> Axes:
    """
    Predictions of several fits over one input column, in the same axes: the mean of each
    with a band whose edges are dashed, and the training data.

    Draws, by NUTS most often, may be among them: as a dict of arrays by site, ``(S, N)``,
    at the inputs ``X``, such as what :class:`~numpyro_sgp.GPPredictive` returns for ``X``.
    (:func:`~numpyro_sgp.compare` has the numbers, and
    :func:`~numpyro_sgp.plots.plot_panels` a panel for each fit.)

    :param fits: what :func:`~numpyro_sgp.fit` and :func:`~numpyro_sgp.nested` returned, or
        draws, by the names to show. The first one that is no dict of draws says what the
        inputs are.
    :param ax: axes to draw into; new ones if None.
    :param site: what to show; if None, the first response of the first fit that has a mean.
    :param X: inputs to predict at, shape ``(N,)`` or ``(N, 1)``; the range of the training
        inputs and a little more if None. Needed with draws, which are at these inputs.
    :param level: probability inside of the bands.
    :param index: which one of several values in each row to show.
    :param num_points: how many inputs, where ``X`` is None.
    :param kwargs: keyword arguments of the models beside the inputs.
    :return: the axes.
    :raises TypeError: if ``fits`` is no dict, or a value is neither a fit nor draws.
    :raises ValueError: for more than one input column, classes, a site that some fit does
        not have, draws without ``X`` or of another number of rows, or if there is no fit.

    >>> import jax.numpy as jnp, matplotlib.pyplot as plt, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> data = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> fitted = sgp.fit(model, sgp.SVGP(3), data, progress_bar=False)
    >>> ax = sgp.plots.plot_comparison({"M = 3": fitted}, site="f", num_points=20)
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['M = 3']
    >>> plt.close(ax.figure)
    """
    if not isinstance(fits, Mapping):
        raise TypeError(
            f"fits must be a dict such as {{'SVGP': fitted}}, got {type(fits).__name__}."
        )
    levels = tails(level)
    results = {k: shown(v) for k, v in fits.items() if not isinstance(v, Mapping)}
    if not results:
        raise ValueError(
            "There is no fit among these, only draws or nothing: give at least one that "
            "sgp.fit or sgp.nested returned."
        )
    if len(results) < len(fits) and X is None:
        raise ValueError(
            "Say at which inputs the draws are: plot_comparison(fits, X=X_new)."
        )
    first = next(iter(results.values()))
    scene = scene_of(first)
    grid, columns = grid_of(scene, X, num_points)
    if columns != 1:
        raise ValueError(
            "Fits are drawn over each other for one input column. With two, draw each into "
            "axes of its own: plot_posterior(fitted, ax)."
        )
    new = grid[:, 0] if scene.flat else grid
    order = np.argsort(grid[:, 0], kind="stable")
    grid = grid[order]
    found = {
        label: in_order(predictions_of(fit, new, levels, kwargs, site), order)
        for label, fit in results.items()
    }
    if site is None:
        site = chosen(first, found[next(iter(results))], None, len(grid))
    drawn = {}
    for label, fit in fits.items():
        if label not in found:
            drawn[label] = _of_draws(label, fit, site, order, levels)
            continue
        if site not in found[label]:
            raise ValueError(
                f"Fit '{label}' has no prediction of '{site}', only of "
                f"{sorted(found[label])}."
            )
        drawn[label] = found[label][site]
    if ax is None:
        ax = new_axes()
    for label, p in drawn.items():
        if is_classes(p):
            raise ValueError(
                f"'{site}' has classes. Draw each fit into axes of its own: "
                "plot_posterior(fitted, ax)."
            )
        mean = by_row(p.mean, p.row_axis)
        i = which(mean.shape[1], index, site)
        (line,) = ax.plot(grid[:, 0], mean[:, i], label=label)
        if p.quantiles is not None:
            low, high = (by_row(q, p.row_axis)[:, i] for q in p.quantiles)
            color = line.get_color()
            ax.fill_between(grid[:, 0], low, high, alpha=0.12, color=color, lw=0)
            for edge in (low, high):
                ax.plot(grid[:, 0], edge, "--", color=color, lw=0.8)
    p = drawn[next(iter(results))]
    draw_data(ax, scene, p, index, site)
    ax.set(xlabel=scene.name, ylabel=site)
    lines = [line for line in ax.get_lines() if line.get_label() in drawn]
    ax.legend(handles=lines, title=f"mean, {100 * level:g} %")
    return ax


def _of_draws(label, draws, site, order, levels) -> Prediction:
    """Of an array of draws ``(S, ..., N)``."""
    if site not in draws:
        raise ValueError(f"Draws '{label}' have no site '{site}', only {sorted(draws)}.")
    values = np.asarray(draws[site], float)
    if values.ndim < 2 or values.shape[-1] != len(order):
        raise ValueError(
            f"Draws '{label}' of '{site}' must have the shape (S, {len(order)}) for these "
            f"inputs X, got {values.shape}."
        )
    values = values[..., order]
    mean, sd = values.mean(axis=0), values.std(axis=0)
    quantiles = np.quantile(values, levels, axis=0)
    return Prediction(mean, sd, quantiles, levels, None, mean.ndim - 1)

"""Predictions over one or two input columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgp._threads import methods_alone
from numpyro_sgp.plots.scene import (
    MAX_LEGEND,
    by_row,
    chosen,
    grid_of,
    in_order,
    ink,
    is_classes,
    new_axes,
    observed,
    predictions_of,
    scene_of,
    shown,
    tails,
    which,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STATISTICS = ("mean", "sd")


def plot_posterior(
    result: Any,
    ax: Axes | None = None,
    *,
    site: str | None = None,
    X: Any = None,
    statistic: str = "mean",
    level: float = 0.9,
    index: int | None = None,
    num_points: int | None = None,
    **kwargs,
) -> Axes:
    """
    Predictions over one or two input columns, with the training data and, where GP sites
    have the inputs themselves, their inducing points.

    Over one column: the mean and a band of each response (of f where there is none that has
    a mean), or the class probabilities; inducing points as ticks below. Over two: colours
    of the mean, of the standard deviation, of P(y = 1), or of the likeliest class, paler
    where it is less likely; inducing points as crosses, those inside of the range.

    :param result: what :func:`~numpyro_sgp.fit` or :func:`~numpyro_sgp.nested` returned.
    :param ax: axes to draw into; new ones if None.
    :param site: what to show: a GP site, a response, of nested inference a sum of sites; if
        None, the first response that has a mean or classes, or a sum of sites that the
        likelihood is made of, or the first GP site.
    :param X: inputs to predict at, for one column of any number and order; for two, their
        range is drawn. If None, the range of the training inputs and a little more (of the
        inducing points, where data are not at hand).
    :param statistic: what colours tell over two columns, ``"mean"`` (P(y = 1), classes) or
        ``"sd"``, the standard deviation.
    :param level: probability inside of the band.
    :param index: which one of several values in each row (outputs, latent functions) to
        show; all if None, for one column.
    :param num_points: inputs along each column; 100 for one, 60 for two.
    :param kwargs: arguments of the model beside the inputs, by name, also those that the
        model takes by position: one value, or one for each row of ``X``, over two columns
        one for each point of the map.
    :return: the axes.
    :raises TypeError: if ``result`` is something else, or the model needs arguments that
        are not given.
    :raises ValueError: for inputs with more than two columns, a site that is not there,
        several values in each row over two columns without ``index``, a level that is not
        between 0 and 1, or the ``statistic="sd"`` of classes or of one column.

    **Example:** mean and standard deviation over two columns.

    .. doctest::

        >>> import jax.numpy as jnp, matplotlib.pyplot as plt, numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        ...     with numpyro.plate("data", X.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
        >>> X = jnp.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.5]])
        >>> data = X, jnp.array([1, 2, 4, 2, 1])
        >>> fitted = sgp.fit(model, sgp.SVGP(3), data, progress_bar=False)
        >>> figure, (left, right) = plt.subplots(1, 2, layout="constrained")
        >>> options = {"site": "f", "num_points": 10}
        >>> ax = sgp.plots.plot_posterior(fitted, left, **options)
        >>> ax = sgp.plots.plot_posterior(fitted, right, statistic="sd", **options)
        >>> ax is right, [a.get_ylabel() for a in figure.axes[2:]]
        (True, ['mean of f', 'sd of f'])
        >>> plt.close(figure)
    """
    fitted, band = shown(result), tails(level)
    if statistic not in _STATISTICS:
        raise ValueError(f"statistic must be one of {_STATISTICS}, got {statistic!r}.")
    scene = scene_of(fitted)
    grid, columns = grid_of(scene, X, num_points)
    if columns == 1 and statistic == "sd":
        raise ValueError(
            "statistic='sd' is for inputs with two columns. Over one the band shows it; "
            "fitted.predict(X_new)['f'].sd has the numbers."
        )
    new = grid[:, 0] if scene.flat else grid
    levels = band if columns == 1 else ()  # a map has no band
    predictions = predictions_of(fitted, new, levels, kwargs, site)
    name = chosen(fitted, predictions, site, len(grid))
    if columns == 1:
        order = np.argsort(grid[:, 0], kind="stable")
        grid, predictions = grid[order], in_order(predictions, order)
    p = predictions[name]
    if columns == 2 and statistic == "sd" and is_classes(p):
        raise ValueError(f"'{name}' has classes, which have no standard deviation.")
    if ax is None:
        ax = new_axes()
    Z = scene.inducing.get(name)
    if Z is None and name not in fitted.guide.approximations:
        Z = next(iter(scene.inducing.values()), None)
    if Z is not None:
        inside = (Z >= grid.min(axis=0)) & (Z <= grid.max(axis=0))
        Z = Z[inside.all(axis=1)]
    if columns == 1:
        _draw_line(ax, grid[:, 0], p, level, index, name)
        draw_data(ax, scene, p, index, name)
        if Z is not None:
            below: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "ms": 10}
            below |= {"color": ink(), "label": "inducing points"}
            ax.plot(Z[:, 0], np.full(len(Z), 0.02), "|", **below)
        ax.set(xlabel=scene.name, ylabel=name)
        if len(ax.get_legend_handles_labels()[0]) <= MAX_LEGEND:
            ax.legend()
        return ax
    _draw_map(ax, grid, p, statistic, index, name)
    if scene.X is not None:
        inside = (scene.X >= grid.min(axis=0)) & (scene.X <= grid.max(axis=0))
        x, y = scene.X[inside.all(axis=1)].T
        ax.plot(x, y, ".", color="k", ms=3, alpha=0.5, label="data")
    if Z is not None:
        ax.plot(*Z.T, "x", color="w", ms=7, mew=3)
        ax.plot(*Z.T, "x", color="k", ms=6, mew=1.2, label="inducing points")
    ax.set(xlabel=f"{scene.name}[:, 0]", ylabel=f"{scene.name}[:, 1]")
    return ax


@methods_alone
class Plotted:
    """A result with :func:`~numpyro_sgp.plots.plot_posterior` as its method."""

    def plot(
        self,
        ax: Axes | None = None,
        *,
        site: str | None = None,
        X: Any = None,
        statistic: str = "mean",
        level: float = 0.9,
        index: int | None = None,
        num_points: int | None = None,
        **kwargs,
    ) -> Axes:
        """
        Predictions over one or two input columns, with the training data and, of a fit,
        inducing points; see :func:`~numpyro_sgp.plots.plot_posterior`, whose options these
        are.

        :param ax: axes to draw into; new ones if None.
        :param site: what to show: a GP site, a response, of nested inference a sum of them.
        :param X: inputs to predict at; the range of the training inputs if None.
        :param statistic: what colours tell over two columns, ``"mean"`` or ``"sd"``.
        :param level: probability inside of the band.
        :param index: which one of several values in each row to show.
        :param num_points: inputs along each column.
        :param kwargs: arguments of the model beside the inputs, by name: one value, or
            one for each row of ``X``.
        :return: the axes.
        :raises ValueError: as :func:`~numpyro_sgp.plots.plot_posterior` does.
        """
        options = {"site": site, "X": X, "statistic": statistic, "level": level}
        options |= {"index": index, "num_points": num_points}
        return plot_posterior(self, ax, **options, **kwargs)


def _class_probs(p, index, name) -> np.ndarray:
    """Of one value in each row, shape ``(N, C)``."""
    probs = np.moveaxis(np.asarray(p.probs), p.row_axis, 0)
    probs = probs.reshape(len(probs), -1, probs.shape[-1])
    return probs[:, which(probs.shape[1], index, name)]


def _drawn(number, index, name) -> range | list[int]:
    return range(number) if index is None else [which(number, index, name)]


def _draw_line(ax, x, p, level, index, name):
    if is_classes(p):
        probs = _class_probs(p, index, name)
        for c in range(probs.shape[1]):
            ax.plot(x, probs[:, c], label=f"P({name} = {c})")
        ax.set_ylim(-0.05, 1.05)
        return
    mean = by_row(p.mean, p.row_axis)
    for i in _drawn(mean.shape[1], index, name):
        label = f"[{i}]" if mean.shape[1] > 1 else ""
        what = f"P({name}{label} = 1)" if p.probs is not None else f"mean of {name}{label}"
        (line,) = ax.plot(x, mean[:, i], label=what)
        if p.quantiles is not None:
            low, high = (by_row(q, p.row_axis)[:, i] for q in p.quantiles)
            what = f"{100 * level:g} % of {name}{label}"
            color = line.get_color()
            ax.fill_between(x, low, high, alpha=0.25, color=color, lw=0, label=what)


def draw_data(ax, scene, p, index, name):
    """Observed values that no mask hides; those of classes at the probabilities 0 and 1."""
    if scene.X is None:
        return
    value = observed(scene.trace, name, len(scene.X), p.row_axis)
    if value is None:
        return
    x = scene.X[:, 0]
    if is_classes(p):
        value = value[:, which(value.shape[1], index, name)]
        for c in np.unique(value[np.isfinite(value)]).astype(int):
            here = x[value == c]
            ax.plot(here, np.ones_like(here), ".", color=f"C{c}", ms=5, alpha=0.6)
        return
    for i in _drawn(value.shape[1], index, name):
        color = ink() if value.shape[1] == 1 else f"C{i}"
        label = "data" if value.shape[1] == 1 else None
        ax.plot(x, value[:, i], ".", color=color, ms=4, alpha=0.6, label=label)


def _draw_map(ax, grid, p, statistic, index, name):
    number = int(round(len(grid) ** 0.5))
    x, y = np.unique(grid[:, 0]), np.unique(grid[:, 1])
    if is_classes(p):
        _draw_classes(ax, x, y, _class_probs(p, index, name), name)
        return
    values = by_row(getattr(p, statistic), p.row_axis)
    values = values[:, which(values.shape[1], index, name)].reshape(number, number).T
    limits, what = {}, f"{statistic} of {name}"
    if p.probs is not None and statistic == "mean":
        limits, what = {"vmin": 0.0, "vmax": 1.0}, f"P({name} = 1)"
    colours = ax.pcolormesh(x, y, values, shading="nearest", rasterized=True, **limits)
    ax.figure.colorbar(colours, ax=ax, label=what)


def _draw_classes(ax, x, y, probs, name):
    """The likeliest class by colour, paler towards the probability of one among C."""
    import matplotlib.patches as patches
    from matplotlib.colors import to_rgb

    C = probs.shape[1]
    colours = np.array([to_rgb(f"C{c}") for c in range(C)])
    best = probs.argmax(axis=1)
    strength = np.clip((probs.max(axis=1) - 1.0 / C) / (1.0 - 1.0 / C), 0.0, 1.0)
    image = 1.0 - strength[:, None] * (1.0 - colours[best])
    image = image.reshape(len(x), len(y), 3).transpose(1, 0, 2)
    ax.pcolormesh(x, y, image, shading="nearest", rasterized=True)
    entries = [patches.Patch(color=colours[c], label=f"{name} = {c}") for c in range(C)]
    ax.legend(handles=entries[:MAX_LEGEND])

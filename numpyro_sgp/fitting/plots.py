"""Figures of a fit over one or two input columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from numpyro_sgp.distributions.arguments import as_arrays, named_arguments
from numpyro_sgp.fitting.files import first_rows
from numpyro_sgp.predictive import Prediction
from numpyro_sgp.tracing import messages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN = 0.05  # of the range of the inputs, on each side
_NUM_POINTS = {1: 100, 2: 60}
_MAX_LEGEND = 10
_MANY = 10_000  # rows, all of which are not needed to find the inducing points


class _Scene(NamedTuple):
    """
    What there is to be drawn.

    :param X: training inputs, shape ``(N, D)``, or None.
    :param flat: whether the model takes inputs of shape ``(N,)``.
    :param name: of the inputs.
    :param trace: the model's with the training data, or None.
    :param inducing: inducing points at GP sites that have the inputs themselves.
    """

    X: np.ndarray | None
    flat: bool
    name: str
    trace: dict | None
    inducing: dict


def draw(
    fitted, ax, *, site, X, level, index, num_points: int | None, model_kwargs: dict
) -> Axes:
    """See :meth:`~numpyro_sgp.Fitted.plot`."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be between 0 and 1, got {level}.")
    scene = _scene(fitted)
    grid, columns = _grid(scene, X, num_points)
    new = grid[:, 0] if scene.flat else grid
    tails = ((1.0 - level) / 2.0, (1.0 + level) / 2.0)
    levels = tails if columns == 1 else ()  # a map has no band
    predictions = _predictions(fitted, new, levels, model_kwargs)
    name = _chosen(predictions, site, fitted.guide.approximations)
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(layout="constrained")
    Z = scene.inducing.get(name)
    if Z is None and name not in fitted.guide.approximations:
        Z = next(iter(scene.inducing.values()), None)
    if Z is not None:
        Z = _inside(Z, grid)
    if columns == 1:
        _draw_line(ax, grid[:, 0], predictions[name], level, index, name)
        _draw_data(ax, scene, predictions[name], index, name)
        if Z is not None:
            below = {"transform": ax.get_xaxis_transform(), "label": "inducing points"}
            ax.plot(Z[:, 0], np.full(len(Z), 0.02), "|", color="k", ms=10, **below)
        ax.set(xlabel=scene.name, ylabel=name)
        if len(ax.get_legend_handles_labels()[0]) <= _MAX_LEGEND:
            ax.legend()
        return ax
    _draw_map(ax, grid, predictions[name], index, name)
    if scene.X is not None:
        ax.plot(*_inside(scene.X, grid).T, ".", color="k", ms=3, alpha=0.5, label="data")
    if Z is not None:
        ax.plot(*Z.T, "x", color="w", ms=7, mew=3)
        ax.plot(*Z.T, "x", color="k", ms=6, mew=1.2, label="inducing points")
    ax.set(xlabel=f"{scene.name}[:, 0]", ylabel=f"{scene.name}[:, 1]")
    return ax


def _scene(fitted) -> _Scene:
    given = fitted.examples if fitted.args is None else (fitted.args, fitted.kwargs)
    if given is None:
        raise ValueError(
            "This fit has no arguments of the model, so that it is not known what its "
            "inputs look like. Make it with them: Fitted(guide, params, (X, y))."
        )
    args, kwargs = as_arrays(fitted.model, *given)
    argument, X = next(
        (argument, leaf)
        for argument, value in named_arguments(fitted.model, args, kwargs)
        for leaf in jax.tree.leaves(value)
        if np.shape(leaf)
    )
    X = np.asarray(X)
    if X.ndim > 2 or (X.ndim == 2 and X.shape[1] > 2):
        raise ValueError(
            f"plot draws inputs with one or two columns, but argument '{argument}' of the "
            f"model, its first array, has the shape {X.shape}. Predict along what you want "
            "to see and draw that: fitted.predict(X_new), with all columns but one or two "
            "held fixed."
        )
    flat, X = X.ndim == 1, X.reshape(len(X), -1)
    few, inputs = (args, kwargs), X
    if len(X) > _MANY:
        few, inputs = first_rows(fitted.model, args, kwargs), X[:2]
    # With a key, since not every base guide has a median; points do not depend on it.
    posteriors = fitted.posterior(*few[0], rng_key=jax.random.key(0), **few[1])
    inducing = {
        name: np.asarray(points).reshape(-1, X.shape[1])
        for name, q in posteriors.items()
        if np.shape(q.prior.X) == inputs.shape and np.allclose(q.prior.X, inputs)
        for points in [_points(q)]
        if points is not None
    }
    trace = None
    if fitted.args is not None:
        trace = messages.trace_of(
            fitted.model, args, kwargs, data=fitted.params, at_site=messages.at_prior_mean
        )
    return _Scene(X if trace is not None else None, flat, argument, trace, inducing)


def _points(q):
    """Points of all sets that are among the inputs."""
    found = [np.reshape(Z, (-1, np.shape(Z)[-1])) for Z in q.inducing if hasattr(Z, "at")]
    return np.concatenate(found) if found else None


def _grid(scene, X, num_points) -> tuple[np.ndarray, int]:
    """Inputs to predict at, shape ``(num, D)``, and D."""
    seen = scene.X
    if seen is None and scene.inducing:
        seen = np.concatenate(list(scene.inducing.values()))
    if X is not None:
        X = np.asarray(X)
        X = X.reshape(len(X), -1)
        if seen is not None and X.shape[1] != seen.shape[1]:
            raise ValueError(
                f"X has {X.shape[1]} columns, but the inputs of the model {seen.shape[1]}."
            )
        columns, low, high = X.shape[1], X.min(axis=0), X.max(axis=0)
        if columns == 1:
            return np.sort(X, axis=0), 1
    elif seen is None:
        raise ValueError(
            "This fit has neither its training data nor inducing points among the inputs: "
            "say over which inputs, fitted.plot(X=...)."
        )
    else:
        columns, low, high = seen.shape[1], seen.min(axis=0), seen.max(axis=0)
        margin = _MARGIN * np.where(high > low, high - low, 1.0)
        low, high = low - margin, high + margin
    number = _NUM_POINTS[columns] if num_points is None else num_points
    axes = [np.linspace(a, b, number) for a, b in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, columns)
    return grid.astype(low.dtype if low.dtype.kind == "f" else float), columns


def _inside(points, grid) -> np.ndarray:
    """Those points that lie where predictions are drawn."""
    inside = (points >= grid.min(axis=0)) & (points <= grid.max(axis=0))
    return points[inside.all(axis=1)]


def _predictions(fitted, X, levels, kwargs) -> dict[str, Prediction]:
    try:
        return fitted.predict(X, quantiles=levels, **kwargs)
    except ValueError:
        # Responses of rows that are tied together, say, have no marginals; f has.
        posteriors = fitted.posterior(X, **kwargs)
    found = {}
    for name, q in posteriors.items():
        mean, sd = q.mean, jnp.sqrt(q.variance)
        quantiles = jnp.stack([mean + sd * ndtri(p) for p in levels]) if levels else None
        axis = mean.ndim - 1
        found[name] = Prediction(mean, sd, quantiles, levels, None, axis)
    return found


def _chosen(predictions, site, gp_sites) -> str:
    if site is not None:
        if site not in predictions:
            raise ValueError(
                f"There is no prediction of '{site}'; there are {sorted(predictions)}."
            )
        return site

    def can_be_shown(p):
        return p.probs is not None or np.isfinite(np.asarray(p.mean)).all()

    responses = [name for name in predictions if name not in gp_sites]
    found = [name for name in responses if can_be_shown(predictions[name])]
    return found[0] if found else next(name for name in predictions if name in gp_sites)


def _by_row(values, row_axis) -> np.ndarray:
    """Values with the rows first, and all else in one axis."""
    values = np.moveaxis(np.asarray(values), row_axis, 0)
    return values.reshape(len(values), -1)


def _is_classes(p) -> bool:
    """Whether there is a probability of each class, and not P(y = 1) alone."""
    return p.probs is not None and p.mean is None


def _class_probs(p, index, name) -> np.ndarray:
    """Of one value in each row, shape ``(N, C)``."""
    probs = np.moveaxis(np.asarray(p.probs), p.row_axis, 0)
    probs = probs.reshape(len(probs), -1, probs.shape[-1])
    return probs[:, _one(probs.shape[1], index, name)]


def _one(number, index, name) -> int:
    if index is None and number == 1:
        return 0
    if index is None or not 0 <= index < number:
        raise ValueError(
            f"'{name}' has {number} values in each row: say which one to show, "
            f"plot(index=...) from 0 to {number - 1}, got {index}."
        )
    return index


def _shown(number, index, name) -> range | list[int]:
    return range(number) if index is None else [_one(number, index, name)]


def _draw_line(ax, x, p, level, index, name):
    if _is_classes(p):
        probs = _class_probs(p, index, name)
        for c in range(probs.shape[1]):
            ax.plot(x, probs[:, c], label=f"P({name} = {c})")
        ax.set_ylim(-0.05, 1.05)
        return
    mean = _by_row(p.mean, p.row_axis)
    for i in _shown(mean.shape[1], index, name):
        label = f"[{i}]" if mean.shape[1] > 1 else ""
        what = f"P({name}{label} = 1)" if p.probs is not None else f"mean of {name}{label}"
        (line,) = ax.plot(x, mean[:, i], label=what)
        if p.quantiles is not None:
            low, high = (_by_row(q, p.row_axis)[:, i] for q in p.quantiles)
            what = f"{100 * level:g} % of {name}{label}"
            color = line.get_color()
            ax.fill_between(x, low, high, alpha=0.25, color=color, lw=0, label=what)


def _draw_data(ax, scene, p, index, name):
    """Observed values that no mask hides; those of classes at the probabilities 0 and 1."""
    if scene.trace is None or name not in scene.trace:
        return
    site = scene.trace[name]
    if not site.get("is_observed", False):
        return
    fn = site["fn"]
    value = np.broadcast_to(np.asarray(site["value"], float), fn.shape())
    events = (1,) * len(fn.event_shape)
    seen = np.asarray(messages.unmasked(fn)).reshape(*fn.batch_shape, *events)
    value = np.where(np.broadcast_to(seen, value.shape), value, np.nan)
    axis = p.row_axis if p.row_axis < value.ndim else value.ndim - 1
    if value.ndim == 0 or value.shape[axis] != len(scene.X):
        return
    value, x = _by_row(value, axis), scene.X[:, 0]
    if _is_classes(p):
        value = value[:, _one(value.shape[1], index, name)]
        for c in np.unique(value[np.isfinite(value)]).astype(int):
            here = x[value == c]
            ax.plot(here, np.ones_like(here), ".", color=f"C{c % 10}", ms=5, alpha=0.6)
        return
    for i in _shown(value.shape[1], index, name):
        color = "k" if value.shape[1] == 1 else f"C{i % 10}"
        label = "data" if value.shape[1] == 1 else None
        ax.plot(x, value[:, i], ".", color=color, ms=4, alpha=0.6, label=label)


def _draw_map(ax, grid, p, index, name):
    number = int(round(len(grid) ** 0.5))
    x, y = np.unique(grid[:, 0]), np.unique(grid[:, 1])
    if _is_classes(p):
        _draw_classes(ax, x, y, _class_probs(p, index, name), name)
        return
    mean = _by_row(p.mean, p.row_axis)
    mean = mean[:, _one(mean.shape[1], index, name)].reshape(number, number).T
    limits = {"vmin": 0.0, "vmax": 1.0} if p.probs is not None else {}
    colours = ax.pcolormesh(x, y, mean, shading="nearest", rasterized=True, **limits)
    what = f"P({name} = 1)" if p.probs is not None else f"mean of {name}"
    ax.figure.colorbar(colours, ax=ax, label=what)


def _draw_classes(ax, x, y, probs, name):
    """The likeliest class by colour, paler towards the probability of one among C."""
    import matplotlib.patches as patches
    from matplotlib.colors import to_rgb

    C = probs.shape[1]
    colours = np.array([to_rgb(f"C{c % 10}") for c in range(C)])
    best = probs.argmax(axis=1)
    strength = np.clip((probs.max(axis=1) - 1.0 / C) / (1.0 - 1.0 / C), 0.0, 1.0)
    image = 1.0 - strength[:, None] * (1.0 - colours[best])
    image = image.reshape(len(x), len(y), 3).transpose(1, 0, 2)
    ax.pcolormesh(x, y, image, shading="nearest", rasterized=True)
    shown = [patches.Patch(color=colours[c], label=f"{name} = {c}") for c in range(C)]
    ax.legend(handles=shown[:_MAX_LEGEND])

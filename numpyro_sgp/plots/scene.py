"""What there is to be drawn of a result: inputs, data, inducing points, predictions."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from numpyro_sgp import _checks
from numpyro_sgp._programs import on_data, without_leaks
from numpyro_sgp.distributions import GaussianProcess
from numpyro_sgp.distributions.arguments import as_arrays, named_arguments
from numpyro_sgp.guides.row_latents import NoMarginals
from numpyro_sgp.predictive import Prediction
from numpyro_sgp.predictive.row_batches import count_rows, first_rows
from numpyro_sgp.tracing import messages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN = 0.05  # of the range of the inputs, on each side
_NUM_POINTS = {1: 100, 2: 60}
_MANY = 10_000  # rows, all of which are not needed to find the inducing points
#: Most entries of a legend.
MAX_LEGEND = 10


class Scene(NamedTuple):
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


def shown(result: Any) -> Any:
    """
    What figures ask of a result: itself, or what it shows in its place.

    :raises TypeError: if it is neither of ``fit`` nor of ``nested``.
    """
    found = result.shown() if hasattr(result, "shown") else result
    if not (hasattr(found, "guide") and hasattr(found, "predict")):
        raise TypeError(
            "Give what sgp.fit or sgp.nested returned (of a training by hand, "
            f"sgp.Fitted.from_svi(svi, result, X, y)), got {type(result).__name__}."
        )
    return found


def new_axes() -> Axes:
    """Axes of a figure of their own."""
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]


def ink() -> str:
    """The colour of data, black or white by the style in use."""
    import matplotlib.pyplot as plt

    return plt.rcParams["text.color"]


def tails(level: float) -> tuple[float, float]:
    """
    The two levels between which a probability lies.

    :raises ValueError: if ``level`` is no probability.
    """
    level = level.item() if np.ndim(level) == 0 and hasattr(level, "item") else level
    if not (isinstance(level, int | float) and 0.0 < level < 1.0):
        raise ValueError(f"level must be between 0 and 1, got {_checks.shown(level)}.")
    return (1.0 - level) / 2.0, (1.0 + level) / 2.0


def training_arguments(fitted) -> tuple[tuple, dict]:
    """Arguments of the model as arrays, with all of the data or with two rows of them."""
    given = fitted.examples if fitted.args is None else (fitted.args, fitted.kwargs)
    if given is None:
        raise ValueError(
            "This fit has no arguments of the model, so that it is not known what its "
            "inputs look like. Make it with them: Fitted(guide, params, (X, y))."
        )
    return as_arrays(fitted.model, *given)


def scene_of(fitted) -> Scene:
    """
    :raises ValueError: if the inputs have more than two columns.
    """
    args, kwargs = training_arguments(fitted)
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
    points = gp_sites(fitted, *few_rows(fitted, args, kwargs))
    inputs = X[:2] if len(X) > _MANY else X
    inducing = {
        name: np.concatenate(sets).reshape(-1, X.shape[1])
        for name, (prior, found) in points.items()
        if np.shape(prior.X) == inputs.shape and np.allclose(prior.X, inputs)
        if (sets := as_rows(found))
    }
    trace = None
    if fitted.args is not None:
        trace = trace_with_data(fitted, args, kwargs)
    return Scene(X if trace is not None else None, flat, argument, trace, inducing)


def few_rows(fitted, args, kwargs) -> tuple[tuple, dict]:
    """Arguments of the model, of many rows two: inducing points do not depend on them."""
    if (count_rows(args, kwargs) or 0) > _MANY:
        return first_rows(fitted.model, args, kwargs)
    return args, kwargs


def gp_sites(fitted, args, kwargs) -> dict[str, tuple[GaussianProcess, list]]:
    """At each GP site its prior, and the sets of inducing points that are arrays."""
    # With keys, since not every base guide has a median; neither depends on them.
    keys = jax.random.key(0), jax.random.key(1)

    def run(args, kwargs, params):
        found, _ = fitted.guide.posterior_at(params, args, kwargs, *keys)
        return {name: (q.prior, arrays_of(q.inducing)) for name, q in found.items()}

    found = without_leaks(on_data, run, args, kwargs, fitted.params)
    own = getattr(fitted, "points", {})
    return {k: (fn, arrays_of(own.get(k, sets))) for k, (fn, sets) in found.items()}


def trace_with_data(fitted, args, kwargs) -> dict:
    """The trace of the model, its GP sites at their means."""
    where = fitted.model, args, kwargs
    return messages.trace_of(*where, data=fitted.params, at_site=messages.at_prior_mean)


def arrays_of(sets) -> list:
    """The sets of inducing points that are arrays: the others are no inputs."""
    return [Z for Z in sets if isinstance(Z, jax.Array | np.ndarray)]


def as_rows(sets) -> list[np.ndarray]:
    """Inducing points of each set, ``(M, D)``, those of all latent functions together."""
    return [np.reshape(Z, (-1, np.shape(Z)[-1])) for Z in sets]


def grid_of(scene: Scene, X, num_points: int | None) -> tuple[np.ndarray, int]:
    """Inputs to predict at, shape ``(num, D)``, in the order of X if given, and D."""
    seen = scene.X
    if seen is None and scene.inducing:
        seen = np.concatenate(list(scene.inducing.values()))
    if X is not None:
        X = np.atleast_1d(np.asarray(X))
        X = X.reshape(len(X), -1)
        if seen is not None and X.shape[1] != seen.shape[1]:
            raise ValueError(
                f"X has {X.shape[1]} columns, but the inputs of the model {seen.shape[1]}."
            )
        columns, low, high = X.shape[1], X.min(axis=0), X.max(axis=0)
        if columns == 1:
            return X, 1
        if not (high > low).all():
            c = int(np.argmin(high > low))
            raise ValueError(
                f"With two columns the range of X is drawn as a map, but X[:, {c}] is "
                f"{low[c]:g} in every row. Along a line: fitted.predict(X)."
            )
    elif seen is None:
        raise ValueError(
            "This fit has neither its training data nor inducing points among the inputs: "
            "say over which inputs, fitted.plot(X=...)."
        )
    else:
        columns, low, high = seen.shape[1], seen.min(axis=0), seen.max(axis=0)
        margin = _MARGIN * np.where(high > low, high - low, 1.0)
        low, high = low - margin, high + margin
    number = _NUM_POINTS[columns]
    if num_points is not None:
        number = _checks.check_whole(num_points, "num_points", least=1)
    axes = [np.linspace(a, b, number) for a, b in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, columns)
    return grid.astype(low.dtype if low.dtype.kind == "f" else float), columns


_TIED = (
    "Responses are of several rows of f each, and those of a figure's inputs are other "
    "rows: take predict at rows that belong together, or plot a GP site."
)


def predictions_of(fitted, X, levels, kwargs, site) -> dict[str, Prediction]:
    """
    Predictions with quantiles, of GP sites alone where responses have no marginals.

    :param site: what is asked for; None for anything.
    :raises TypeError: if the model needs arguments that are not given.
    """
    if absent := _absent(fitted.model, kwargs):
        given = ", ".join(f"{name}=..." for name in absent)
        raise TypeError(
            f"The model needs {', '.join(map(repr, absent))} beside its inputs. Give what "
            "to draw at by name, one value or one for each row of X: "
            f"plot(X=X_new, {given})."
        )
    try:
        if getattr(getattr(fitted, "guide", None), "couples_rows", False):
            raise NoMarginals(_TIED)
        return fitted.predict(X, quantiles=levels, **kwargs)
    except NoMarginals:
        posteriors = fitted.posterior(X, **kwargs)
        if site is not None and site not in posteriors:
            raise
    found = {}
    for name, q in posteriors.items():
        mean, sd = q.mean, jnp.sqrt(q.variance)
        quantiles = jnp.stack([mean + sd * ndtri(p) for p in levels]) if levels else None
        axis = mean.ndim - 1
        found[name] = Prediction(mean, sd, quantiles, levels, None, axis)
    return found


def in_order(predictions: dict[str, Prediction], order) -> dict[str, Prediction]:
    """The same with rows in another order; what has none stays as it is."""

    def moved(value, axis):
        return None if value is None else jnp.take(value, order, axis)

    found = {}
    for name, p in predictions.items():
        if not has_rows(p, len(order)):
            found[name] = p
            continue
        values = {k: moved(getattr(p, k), p.row_axis) for k in ("mean", "sd", "probs")}
        values["quantiles"] = moved(p.quantiles, p.row_axis + 1)
        found[name] = replace(p, **values)
    return found


def has_rows(p: Prediction, number: int) -> bool:
    """Whether a prediction has so many rows."""
    values: Any = p.probs if p.mean is None else p.mean
    shape = np.shape(values)
    return shape[p.row_axis : p.row_axis + 1] == (number,)


def _absent(model, kwargs) -> list[str]:
    """Arguments behind the inputs that have no default and are not given."""
    try:
        parameters = list(inspect.signature(model).parameters.values())[1:]
    except (TypeError, ValueError):  # it has none to look at
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = (p.name for p in parameters if p.kind in by_name and p.default is p.empty)
    return [name for name in needed if name not in kwargs]


def chosen(fitted, predictions: dict, site: str | None, num_rows: int) -> str:
    """
    The site to draw, if not told: the first response that has a mean or classes, or of
    nested inference a sum that the likelihood is made of, or the first GP site; of those
    with a number for each row.
    """
    of_rows = [name for name, p in predictions.items() if has_rows(p, num_rows)]
    if site in predictions and site not in of_rows:
        raise ValueError(
            f"'{site}' has no number for each row of the inputs; there are {of_rows}."
        )
    if site is not None:
        if site not in predictions:
            reason = getattr(predictions, "left_out", {}).get(site)
            raise ValueError(
                reason
                or f"There is no prediction of '{site}'; there are {sorted(predictions)}."
            )
        return site

    def can_be_shown(name):
        p = predictions[name]
        is_known = p.probs is not None or np.isfinite(np.asarray(p.mean)).all()
        return name in of_rows and is_known

    gp_sites, trace = fitted.guide.approximations, fitted.guide.prototype_trace
    observed = [name for name, site in trace.items() if messages.is_response(site)]
    responses = getattr(fitted, "responses", observed)  # of nested inference
    first = [name for name in responses if name in predictions]
    first += [name for name in getattr(fitted, "sums", ()) if name in predictions]
    found = [name for name in first if can_be_shown(name)]
    return found[0] if found else next(name for name in predictions if name in gp_sites)


def by_row(values, row_axis) -> np.ndarray:
    """Values with the rows first, and all else in one axis."""
    values = np.moveaxis(np.asarray(values), row_axis, 0)
    return values.reshape(len(values), -1)


def is_classes(p: Prediction) -> bool:
    """Whether there is a probability of each class, and not P(y = 1) alone."""
    return p.probs is not None and p.mean is None


def which(number: int, index: int | None, name: str) -> int:
    """The one of several values in each row that is shown."""
    if index is None and number == 1:
        return 0
    if index is None or not 0 <= index < number:
        raise ValueError(
            f"'{name}' has {number} values in each row: say which one to show, "
            f"plot(index=...) from 0 to {number - 1}, got {index}."
        )
    return index


def observed(trace: dict | None, name: str, num_rows: int, row_axis: int):
    """
    Observed values at a site by row, ``(N, K)``, NaN where a mask hides them; None where
    there are none for each row.
    """
    if trace is None or name not in trace:
        return None
    site = trace[name]
    if not site.get("is_observed", False):
        return None
    fn = site["fn"]
    value = np.broadcast_to(np.asarray(site["value"], float), fn.shape())
    events = (1,) * len(fn.event_shape)
    seen = np.asarray(messages.unmasked(fn)).reshape(*fn.batch_shape, *events)
    value = np.where(np.broadcast_to(seen, value.shape), value, np.nan)
    axis = row_axis if row_axis < value.ndim else value.ndim - 1
    if value.ndim == 0 or value.shape[axis] != num_rows:
        return None
    return by_row(value, axis)

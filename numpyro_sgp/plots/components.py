"""The parts of an additive model, each in axes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpyro.distributions import constraints

from numpyro_sgp.distributions.arguments import as_arrays, named_arguments
from numpyro_sgp.plots.names import leaves, named_as
from numpyro_sgp.plots.scene import gp_sites, shown, tails
from numpyro_sgp.tracing import messages

_ROWS = 20  # of the inputs, that tell which columns a kernel reads
_MOST_COLUMNS = 20  # that are looked at
_MOST_BARS = 60  # of an effect; a band of more


def plot_components(
    result: Any,
    *args,
    sites: Sequence[str] | None = None,
    axes: Any = None,
    level: float = 0.9,
    **kwargs,
) -> np.ndarray:
    """
    Each GP site and each effect of an additive model, with its median and a band.

    A GP site is drawn over the column of its inputs that its kernel and mean read, or, if
    there are two, as points in the colours of its median; an effect (an intercept, a slope,
    one for each group) as a point with a bar for each of its numbers. Values are those of
    the site: of the linear predictor, not of the responses.

    Under :func:`~numpyro_sgp.fit` an effect that is held at a point has no bar, and bands
    of GP sites are those given the medians of the other latents;
    :func:`~numpyro_sgp.nested` knows how they depend on each other.

    :param result: what :func:`~numpyro_sgp.fit` or :func:`~numpyro_sgp.nested` returned.
    :param args: arguments of the model to draw components at; the training data if left
        out.
    :param sites: what to draw; all GP sites and effects (other latents that may be any real
        numbers) if None. Sums of sites that nested inference has are drawn too, if named.
    :param axes: as many axes as sites, or more; new ones if None.
    :param level: probability inside of bands and bars.
    :param kwargs: keyword arguments of the model.
    :return: the axes, an array with one for each site.
    :raises TypeError: if ``result`` is something else.
    :raises ValueError: if a site is not there or reads more than two columns, there are too
        few axes, or the training data are not at hand and no arguments are given.

    >>> import jax.numpy as jnp, matplotlib.pyplot as plt, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> posterior = sgp.nested(model, sgp.SVGP(3), (X, y), progress_bar=False)
    >>> axes = sgp.plots.plot_components(posterior)
    >>> [ax.get_ylabel() for ax in axes]
    ['f', 'level']
    >>> plt.close(axes[0].figure)
    """
    fitted, (low, high) = shown(result), tails(level)
    if not (args or kwargs):
        if fitted.args is None:
            raise ValueError(
                "This result does not have its training data: say where to draw its "
                "components, plot_components(result, X)."
            )
        args, kwargs = fitted.args, fitted.kwargs
    args, kwargs = as_arrays(fitted.model, args, kwargs)
    found = fitted.quantiles([low, 0.5, high], *args, **kwargs)
    priors = {name: prior for name, (prior, _) in gp_sites(fitted, args, kwargs).items()}
    if sites is None:
        sites = [*priors, *_effects(fitted)]
    elif isinstance(sites, str):
        sites = [sites]
    if unknown := [name for name in sites if name not in found]:
        raise ValueError(f"There are no sites {unknown}; there are {sorted(found)}.")
    named = list(named_arguments(fitted.model, args, kwargs))
    places = {name: _place(name, priors, found[name], named) for name in sites}
    axes = _axes(axes, len(sites))
    for ax, name in zip(axes, sites, strict=True):
        values = np.asarray(found[name], float)
        if places[name] is None:
            _draw_effect(ax, values, level)
        else:
            x, labels = places[name]
            values = values.reshape(3, -1, values.shape[-1])
            draw = _draw_function if x.shape[1] == 1 else _draw_points
            draw(ax, x, values, labels, name, level)
        if not ax.get_ylabel():
            ax.set_ylabel(name)
    return axes


def _effects(fitted) -> list[str]:
    """Latents that may be any real numbers, hyperparameters among them under `fit`."""
    if hasattr(fitted, "effects"):
        return list(fitted.effects)
    setup = fitted.guide.known()
    real = constraints.real, constraints.real_vector
    return [
        name
        for name in setup.latents
        if messages.innermost(setup.trace[name]["fn"]).support in real
    ]


def _axes(axes, number) -> np.ndarray:
    if axes is None:
        import matplotlib.pyplot as plt

        columns = 2 if number in (2, 4) else min(number, 3)
        rows = -(-number // columns)
        size = (max(3.2 * columns, 4.5), 2.7 * rows)
        figure = plt.figure(figsize=size, layout="constrained")
        places = range(1, number + 1)
        return np.array([figure.add_subplot(rows, columns, i) for i in places])
    axes = np.ravel(np.asarray(axes, dtype=object))
    if len(axes) < number:
        raise ValueError(f"There are {number} sites to draw, but {len(axes)} axes.")
    return axes[:number]


def _place(name, priors, values, named):
    """Inputs, ``(N, 1)`` or ``(N, 2)``, and their names; None for what has none."""
    if name in priors:
        prior = priors[name]
        X = np.asarray(prior.X)
        if X.ndim > 2:
            raise ValueError(
                f"Each function of '{name}' has inputs of its own (shape {X.shape}): there "
                "is no one axis for all. Name others, plot_components(result, sites=[...])."
            )
        X = X.reshape(len(X), -1)
        read = _columns_read(prior, X)
        if len(read) > 2:
            raise ValueError(
                f"'{name}' reads {len(read)} columns of its inputs, and can be drawn over "
                "one or two: name others, plot_components(result, sites=[...])."
            )
        return X[:, read], [named_as(X[:, c], name, named) for c in read]
    arrays = [(argument, np.shape(leaf)) for argument, leaf in leaves(named)]
    shape = arrays[0][1] if arrays else ()
    of_rows = np.ndim(values) > 1 and shape and np.shape(values)[-1] == shape[0]
    if of_rows and (len(shape) == 1 or shape[1] == 1):
        argument, leaf = next(leaves(named))
        return np.reshape(leaf, (-1, 1)), [argument]
    return None


def _columns_read(prior, X) -> list[int]:
    """Columns on which the kernel or the mean depends, as they are seen at some rows."""
    varying = [c for c in range(X.shape[1]) if np.ptp(X[:, c]) > 0]
    if len(varying) < 2 or len(varying) > _MOST_COLUMNS:
        return varying or [0]
    rows = np.random.default_rng(0).permutation(len(X))[:_ROWS]
    # And the ends of each column: most rows may have the same value.
    ends = [at(X[:, c]) for c in varying for at in (np.argmin, np.argmax)]
    some = X[np.unique([*rows, *ends])]

    def made_of(inputs):
        return np.asarray(prior.kernel(inputs, inputs)), np.asarray(prior.at(inputs).mean)

    known, found = made_of(some), []
    for c in varying:
        flat = some.copy()
        flat[:, c] = some[0, c]
        (K, mean), (known_K, known_mean) = made_of(flat), known
        size = float(np.max(np.abs(known_mean)))
        same_mean = np.allclose(known_mean, mean, rtol=0.0, atol=1e-6 * size)
        if not (same_mean and np.allclose(known_K, K, rtol=1e-6, atol=0.0)):
            found.append(c)
    return found or [0]


def _draw_function(ax, x, values, labels, name, level):
    x, first = np.unique(x[:, 0], return_index=True)
    low, median, high = values[..., first]
    for i in range(len(median)):
        of = f" of {name}[{i}]" if len(median) > 1 else ""
        (line,) = ax.plot(x, median[i], label=f"median{of}")
        band = {"alpha": 0.25, "color": line.get_color(), "lw": 0}
        ax.fill_between(x, low[i], high[i], label=f"{100 * level:g} %{of}", **band)
    ax.set_xlabel(labels[0])


def _draw_points(ax, x, values, labels, name, level):
    if values.shape[1] > 1:
        raise ValueError(
            f"'{name}' has {values.shape[1]} functions of two columns, which cannot be "
            "drawn into one axes: name others, plot_components(result, sites=[...])."
        )
    shown = ax.scatter(*x.T, c=values[1, 0], s=14)
    ax.figure.colorbar(shown, ax=ax, label=f"median of {name}")
    ax.set(xlabel=labels[0], ylabel=labels[1])


def _draw_effect(ax, values, level):
    low, median, high = values.reshape(3, -1)
    place = np.arange(len(median))
    what = f"{100 * level:g} %"
    if len(median) > _MOST_BARS:
        ax.plot(place, median, label="median")
        ax.fill_between(place, low, high, alpha=0.25, color="C0", lw=0, label=what)
    else:
        bars = np.maximum([median - low, high - median], 0.0)  # of points, but for rounding
        ax.errorbar(place, median, yerr=bars, fmt="o", capsize=3, label=what)
    if len(median) == 1:
        ax.set(xlim=(-1.0, 1.0), xticks=[])
        return
    if values.ndim == 2:
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("index")
    elif len(median) <= 12:
        names = [", ".join(map(str, i)) for i in np.ndindex(values.shape[1:])]
        ax.set_xticks(place, names)
        ax.set_xlabel("indices")
    else:
        ax.set_xlabel("number, in C order")

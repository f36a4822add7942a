"""What a fit misses, in nats by cause."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgp.plots.scene import ink, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINEAR = 1.0  # nats up to which the axis is linear; logarithmic beyond
_WIDTH = 60  # of the title
_FAR = 10.0  # nats, from which on there is need for that
_ROOM = 1.35  # to the right of the longest bar, for its number


def plot_verdict(verdict: Any, ax: Axes | None = None) -> Axes:
    """
    The nats between a fit and the truth, a bar for each cause of its verdict.

    Bars are in the first colour up to half a nat, with which a fit is said to have
    converged (the dotted line), and in the second beyond; with ten nats or more the axis is
    linear up to one nat and logarithmic from there. What is not known has no bar and says
    so; a hatched bar has no end.

    :param verdict: what ``fitted.check()`` returned, or a fit, whose check is then run.
    :param ax: axes to draw into; new ones if None.
    :return: the axes.
    :raises TypeError: if ``verdict`` is neither.

    >>> import jax.numpy as jnp, matplotlib.pyplot as plt, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> fitted = sgp.fit(model, sgp.SVGP(3), (X, y), progress_bar=False)
    >>> ax = sgp.plots.plot_verdict(fitted.check())
    >>> [label.get_text() for label in ax.get_yticklabels()][:3]
    ['q(u)', 'other parameters', 'inducing points']
    >>> plt.close(ax.figure)
    """
    if not hasattr(verdict, "causes"):
        if not hasattr(verdict, "check"):
            raise TypeError(
                "plot_verdict takes what fitted.check() returned, or a fit, got "
                f"{type(verdict).__name__}."
            )
        verdict = verdict.check()
    if ax is None:
        ax = new_axes()
    causes = list(verdict.causes.values())
    longest = max([_LINEAR, *(c.nats + c.error for c in causes if np.isfinite(c.nats))])
    for i, cause in enumerate(causes):
        text, place = cause.number, 0.0
        if np.isnan(cause.nats):
            text = "not known"
        else:
            endless = np.isinf(cause.nats)
            place = longest if endless else cause.nats
            color = "C1" if cause.nats > verdict.enough else "C0"
            ax.barh(i, place, color=color, hatch="//" if endless else None)
            if cause.error and not endless:
                ax.errorbar(place, i, xerr=cause.error, color=ink(), capsize=3)
                place += cause.error
        at: dict[str, Any] = {
            "xytext": (5, 0),
            "textcoords": "offset points",
            "va": "center",
        }
        ax.annotate(text, (place, i), **at)
    ax.axvline(verdict.enough, linestyle=":", color=ink(), lw=1)
    if longest < _FAR:
        ax.set_xlim(0.0, _ROOM * longest)
    else:
        ax.set_xscale("symlog", linthresh=_LINEAR)
        ax.set_xlim(0.0, 2.0 * longest**_ROOM)
        ax.xaxis.set_major_formatter("{x:g}")
    ax.set_yticks(range(len(causes)), [c.name for c in causes])
    ax.set_ylim(len(causes) - 0.4, -0.6)
    ax.set_xlabel("nats")
    ax.set_title(fill(verdict.summary, _WIDTH), fontsize="medium")
    return ax

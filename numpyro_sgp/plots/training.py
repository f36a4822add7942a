"""The losses of a training, and where it ended."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_sgp._checks import real
from numpyro_sgp.plots.scene import ink, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINEAR = 1.0  # nats about the end between which the axis is linear
_FAR = 10.0  # nats, beyond which there is need for that
_SMOOTHED = 50  # steps, more than which have a running mean if they are noisy
_SHARE = 25  # of the steps, one part of which a running mean is over
_WIDTH = 60  # of the title


def plot_training(result: Any, ax: Axes | None = None) -> Axes:
    """
    The losses of a training above where it ended, in nats, and why it ended.

    The end is the bound of the fit with all of the data, which noisy losses of batches
    scatter about; without one (of a training by hand) it is the mean of the last twentieth
    of the losses. Where losses began more than ten nats above it, the axis is linear up to
    one nat (or twice the noise) and logarithmic beyond. Noisy losses have a running mean
    over a 25th of the steps. What is shown of :func:`~numpyro_sgp.fit` is the training that
    it went on with, not the race between its starts; losses rise at once where it tried
    other inducing points.

    A flat end says that the steps gained nothing more; whether there is something left to
    gain is what :meth:`fitted.check() <numpyro_sgp.Fitted.check>` tells.

    :param result: a fit, what :func:`~numpyro_sgp.train`, ``svi.run`` or
        :func:`~numpyro_sgp.fit_lbfgs` returned, or an array of losses.
    :param ax: axes to draw into; new ones if None.
    :return: the axes.
    :raises ValueError: if there are no losses.

    >>> import matplotlib.pyplot as plt, numpy as np
    >>> import numpyro_sgp as sgp
    >>> ax = sgp.plots.plot_training(np.array([120.0, 31.0, 12.5, 12.1, 12.0]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('step', 'loss above the end, nats')
    >>> plt.close(ax.figure)
    """
    from matplotlib.ticker import MaxNLocator

    losses = getattr(result, "losses", result)
    losses = np.zeros(0) if losses is None else np.ravel(real(losses, "Losses"))
    if not np.isfinite(losses).any():
        raise ValueError(
            "There are no losses to draw. What sgp.fit, sgp.train and svi.run return has "
            "them, unless it began at the optimum (0 steps); nested inference has none."
        )
    end = -float(getattr(result, "bound", np.nan))
    if not np.isfinite(end):
        end = float(np.nanmean(losses[-max(len(losses) // 20, 1) :]))
    if ax is None:
        ax = new_axes()
    steps, above = np.arange(1, len(losses) + 1), losses - end
    noisy = len(losses) > _SMOOTHED and np.nanmean(np.diff(losses) > 0) > 0.2
    (line,) = ax.plot(steps, above, alpha=0.4 if noisy else 1.0, lw=1.0, label="loss")
    if noisy:
        width = max(len(losses) // _SHARE, 2)
        smooth = np.convolve(above, np.full(width, 1.0 / width), mode="valid")
        middle = steps[width - 1 :] - (width - 1) / 2.0
        what = f"mean over {width} steps"
        ax.plot(middle, smooth, color=line.get_color(), label=what)
    ax.axhline(0.0, linestyle=":", color=ink(), lw=1, label=f"end: {end:.6g}")
    if np.nanmax(np.abs(above)) > _FAR:
        noise = np.nanstd(above[-max(len(above) // 4, 1) :]) if noisy else 0.0
        ax.set_yscale("symlog", linthresh=max(_LINEAR, 2.0 * noise))
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="step", ylabel="loss above the end, nats")
    ax.set_xlim(0.5, len(losses) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    told = str(getattr(result, "stopped", "") or "")
    seconds = float(getattr(result, "seconds", np.nan))
    if np.isfinite(seconds):
        told = f"{seconds:.1f} s" + (f": {told}" if told else "")
    if told:
        ax.set_title(fill(told, _WIDTH), fontsize="medium")
    ax.legend()
    return ax

"""The table of a comparison, printed and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numpyro_sgp.plots import plot_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_WIDTH = 96


class _Column(NamedTuple):
    """
    A column as it is printed.

    :param text: what it is, for the legend.
    :param decimals: how many are shown.
    :param error: the column of its errors.
    """

    text: str
    decimals: int = 1
    error: str | None = None


#: What is printed together, in this order.
FIT = {
    "elpd_loo": _Column(
        "expected log predictive density by PSIS-LOO ± its standard error", error="se"
    ),
    "elpd_diff": _Column(
        "elpd_loo minus the reference's ± the standard error of that", error="se_diff"
    ),
    "p_loo": _Column("effective number of parameters"),
    "k_max": _Column("largest Pareto k of an observation", 2),
    "k_bad": _Column(
        "share of observations whose k is too large for LOO, by the number of draws"
    ),
    "elbo": _Column("bound on the log evidence"),
    "log_joint_bound": _Column(
        "bound on log p(y, point) where latents are held at points, which tells nothing "
        "of the evidence"
    ),
    "seconds": _Column("how long the fit took, as to_arviz was told"),
}
CONVERGENCE = {
    "r_hat": _Column("largest R-hat of all variables, MCMC only", 3),
    "ess_bulk": _Column(
        "smallest effective sample size, MCMC only (ess_tail: that of the tails)", 0
    ),
    "ess_tail": _Column("", 0),
    "divergences": _Column("number of divergent transitions", 0),
    "nats_left": _Column("about what the bound would gain if q(u) went to its optimum", 2),
    "others_left": _Column(
        "what hyperparameters, inducing points and other latents would gain, if "
        "fitted.check() was called before fitted.to_arviz()",
        2,
        "others_left_se",
    ),
    "points_lose": _Column(
        "what the inducing points lose at least, beside more of them (as others_left)", 2
    ),
    "float32_loses": _Column(
        "what the bound would gain in float64 at least (as others_left)", 2
    ),
    "guide_khat": _Column(
        "PSIS k-hat of the guide's joint draws of all latents (k_max is of single "
        "observations)",
        2,
    ),
    "sbc_p": _Column("p value of simulation-based calibration, adjusted for all tests", 3),
}
DISTANCES = {
    "mean_diff": _Column(
        "mean |difference of posterior means| ± the Monte Carlo standard error of one "
        "such difference",
        error="mean_diff_mcse",
    ),
    "mean_diff_sd": _Column("that in sds of the reference", 3, "mean_diff_sd_mcse"),
    "sd_ratio": _Column(
        "mean of posterior sd / reference sd ± the Monte Carlo standard error of one "
        "such ratio",
        3,
        "sd_ratio_mcse",
    ),
    "w1_sd": _Column(
        "mean 1-Wasserstein distance of the marginals in sds of the reference", 3
    ),
}
_COLUMNS = {**FIT, **CONVERGENCE, **DISTANCES}


@dataclass(frozen=True)
class Comparison:
    """
    Fits side by side, made by :func:`compare`.

    Printed, it shows the columns that some fit has a number in, errors behind what they are
    errors of, and the remarks. :meth:`legend` explains the columns.

    :param table: a :class:`pandas.DataFrame` with a row for each fit; for its columns see
        :func:`compare`.
    :param reference: name of the fit that distances are measured from.
    :param var_names: names of the compared variables.
    :param draws: for each fit, draws of these by name, shape ``(S, ...)``.
    :param remarks: sentences on what is wrong with fits; none where nothing is.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> fitted = sgp.fit(model, sgp.SVGP(4), data, progress_bar=False)
    >>> found = sgp.compare({"SVGP": fitted.to_arviz(num_samples=200)})
    >>> list(found.table.index), float(found.table["nats_left"].iloc[0]) < 0.1
    (['SVGP'], True)
    """

    table: DataFrame
    reference: str
    var_names: tuple[str, ...]
    draws: dict[str, dict[str, np.ndarray]] = field(repr=False)
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self._shown(*block).to_string() for block in self._blocks()]
        if self.remarks:
            bullet = partial(
                fill, width=_WIDTH, initial_indent="- ", subsequent_indent="  "
            )
            parts.append("\n".join(map(bullet, self.remarks)))
        return "\n\n".join([*parts, "The columns are explained by .legend()."])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        tables = [self._shown(*block).to_html() for block in self._blocks()]
        remarks = "".join(f"<li>{escape(remark)}</li>" for remark in self.remarks)
        return "".join([*tables, f"<ul>{remarks}</ul>" if remarks else ""])

    def legend(self) -> str:
        """What the printed columns are, a line or two for each."""
        shown = {c.partition("[")[0] for _, columns in self._blocks() for c in columns}
        width = max(map(len, shown))
        return "\n".join(
            fill(
                text,
                _WIDTH,
                initial_indent=name.ljust(width + 2),
                subsequent_indent=" " * (width + 2),
            )
            for name, (text, *_) in _COLUMNS.items()
            if text and name in shown
        )

    def _blocks(self):
        """Headings, and the columns under them that some fit has a number in."""
        blocks = [("fit", [*FIT]), ("convergence", [*CONVERGENCE])]
        blocks += [
            (f"{v} against {self.reference}", [f"{c}[{v}]" for c in DISTANCES])
            for v in self.var_names
        ]
        for heading, columns in blocks:
            if columns := [c for c in columns if self.table[c].notna().any()]:
                yield heading, columns

    def _shown(self, heading, columns):
        """Some columns as text, with their errors."""
        shown = self.table[columns].astype(object)
        for column in columns:
            short, bracket, rest = column.partition("[")
            errors = [np.nan] * len(shown)
            if error := _COLUMNS[short].error:
                errors = self.table[error + bracket + rest]
            pairs = zip(self.table[column], errors, strict=True)
            shown[column] = [_format(short, value, error) for value, error in pairs]
        shown.columns = [c.partition("[")[0] for c in columns]
        shown.columns.name = heading
        return shown.rename(index={self.reference: f"{self.reference} (reference)"})

    def plot(self, x=None, *, var_names: Sequence[str] | str | None = None) -> Figure:
        """
        Posterior means and 90 % bands of the variables, a panel for each variable and
        fit with the reference's dotted, and the ELPD of all fits with a standard error
        to each side, in a last panel (none where no fit has a log likelihood); see
        :func:`~numpyro_sgp.plots.plot_panels`, which draws into axes of one's own.

        :param x: values of the horizontal axis, shape ``(N,)`` or ``(N, 1)`` with N the
            last axis of the variables; their index if None.
        :param var_names: names of some of the compared variables; all if None.
        :return: a Matplotlib figure.
        :raises ValueError: if a variable was not compared, or ``x`` has another shape.
        """
        return plot_panels(self, x, var_names=var_names)[0].figure


def _format(column: str, value: float, error: float = np.nan) -> str:
    if np.isnan(value):
        return "-"
    if column == "k_bad":
        return f"{100 * value:.0f}%"
    if column == "mean_diff":
        text, with_error = f"{value:.3g}", f"{error:.1g}"
    else:
        decimals = _COLUMNS[column].decimals
        text, with_error = f"{value:.{decimals}f}", f"{error:.{decimals}f}"
    return text if np.isnan(error) else f"{text} ± {with_error}"

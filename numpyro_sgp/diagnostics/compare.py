"""Several fits of one model to the same data, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from numpyro_sgp.diagnostics.arviz import as_tree, convergence, leave_one_out

if TYPE_CHECKING:
    from arviz import InferenceData
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from xarray import DataArray, Dataset, DataTree

_BAD_K = 0.7
_SMALL_P = 0.05
_GUIDE_COLUMNS = ("guide_khat", "sbc_p")
_BAND = (0.05, 0.95)
_MAX_LINES = 10
_MAX_COLUMNS = 4  # panels side by side
_NUM_DECIMALS = {
    "k_max": 2,
    "r_hat": 3,
    "ess_bulk": 0,
    "guide_khat": 2,
    "sbc_p": 3,
    "mean_diff_sd": 3,
    "sd_ratio": 3,
    "w1_sd": 3,
}
_LEGEND = {
    "elpd_loo": "expected log predictive density by PSIS-LOO (se: its standard error)",
    "elpd_diff": "elpd_loo minus the reference's (se_diff: standard error of that)",
    "p_loo": "effective number of parameters",
    "k_max": f"largest Pareto k (k_bad: share above {_BAD_K}, where LOO is unreliable)",
    "elbo": "bound on the log evidence",
    "r_hat": "largest R-hat (ess_bulk: smallest effective sample size), MCMC only",
    "guide_khat": "PSIS k-hat of the guide's joint draws of all latents (k_max is of "
    "single observations)",
    "sbc_p": "p value of simulation-based calibration, adjusted for all tests",
    "mean_diff": "mean |difference of posterior means|",
    "mean_diff_sd": "that in sds of the reference",
    "sd_ratio": "mean of posterior sd / reference sd",
    "w1_sd": "mean 1-Wasserstein distance of the marginals in sds of the reference",
}


def compare(
    fits: dict[str, DataTree | InferenceData],
    *,
    reference: str | None = None,
    var_names: Sequence[str] | str | None = None,
    transform: dict[str, Callable[[Dataset], DataArray]] | None = None,
) -> Comparison:
    r"""
    Compares fits to the same data: how well they predict, and how far their posteriors
    are from that of a reference, MCMC most often.

    The table has a row for each fit, with the columns

    - ``elpd_loo, se, p_loo``: leave-one-out cross-validation by Pareto-smoothed
      importance sampling, each value of each observed site left out on its own;
      ``elpd_diff, se_diff``: the paired difference to the reference; ``k_max, k_bad``:
      largest Pareto k, and the share above 0.7. NaN without a log likelihood. For a
      variational fit this is the cross-validation of q(f) as if it were the posterior;
    - ``elbo, seconds``: as :func:`to_arviz` was told or computed them;
    - ``r_hat, ess_bulk``: the worst of all variables in the posterior; NaN for SVI;
    - ``guide_khat``: PSIS k-hat of a guide, if :func:`to_arviz` computed it. Above 0.7 the
      guide is too far from the joint posterior of all latents for importance weights to
      mend it, which the text then says; ``sbc_p``: p value of simulation-based
      calibration, from :func:`~numpyro_sgp.calibrate` by way of :func:`to_arviz`;
    - for each compared variable, say f: ``mean_diff[f]``, the absolute difference of
      the posterior means; ``mean_diff_sd[f]``, that in standard deviations of the
      reference; ``sd_ratio[f]``, standard deviation over the reference's; ``w1_sd[f]``,
      the 1-Wasserstein distance of the marginals in the reference's standard
      deviations. All are means over the entries of f; entries that do not vary in the
      reference are left out of the last three.

    All are of finite draws. Two sets of S independent draws from one normal
    distribution have ``w1_sd`` of about :math:`1.8 / \sqrt{S}`, ``mean_diff_sd`` of
    :math:`1.1 / \sqrt{S}`.

    :param fits: ArviZ data by name, from :func:`to_arviz`, ``arviz.from_numpyro`` or a
        file; without the attributes of the former, a fit is taken to be by MCMC.
    :param reference: name of the fit to measure distances from; the first by MCMC if
        None, or the first at all.
    :param var_names: names of the variables to compare; if None, all that the fits
        share and that have more than one entry, such as GP sites.
    :param transform: new variables by name, each a function of the posterior (a
        :class:`xarray.Dataset`), such as ``{"rate": lambda p: np.exp(p["f"])}``.
    :return: the comparison; print it, or look at ``.table`` and ``.plot()``.
    :raises TypeError: if ``fits`` is not a dict of ArviZ data, or a transform does not
        give a DataArray.
    :raises ValueError: if it is empty, the reference or a variable is not there, fits
        have other data or shapes than the reference, or there is no variable to
        compare.

    **Example:**

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_sgp.diagnostics import compare
        >>> rng = np.random.default_rng(0)
        >>> def fit(sd):
        ...     f = sd * rng.standard_normal((2, 500, 4))
        ...     return arviz_base.from_dict({"posterior": {"f": f}})
        >>> comparison = compare({"exact": fit(1.0), "narrow": fit(0.5)})
        >>> comparison.reference, comparison.var_names
        ('exact', ('f',))
        >>> round(float(comparison.table.loc["narrow", "sd_ratio[f]"]), 1)
        0.5
    """
    from pandas import DataFrame

    fits = _checked(fits)
    if reference is None:
        reference = next((k for k, v in fits.items() if _is_mcmc(v)), next(iter(fits)))
    elif reference not in fits:
        raise ValueError(f"The reference '{reference}' is not in fits {list(fits)}.")
    _check_same_data(fits, reference)
    posteriors = {
        name: _transformed(name, tree["posterior"].to_dataset(), transform or {})
        for name, tree in fits.items()
    }
    var_names = _variables(posteriors, var_names)
    draws = {
        name: {v: _draws(posterior[v]) for v in var_names}
        for name, posterior in posteriors.items()
    }
    for name in fits:
        for v in var_names:
            shape, expected = draws[name][v].shape[1:], draws[reference][v].shape[1:]
            if shape != expected:
                raise ValueError(
                    f"Variable '{v}' has shape {shape} in fit '{name}', but {expected} "
                    f"in the reference '{reference}'. Compare fits at the same inputs."
                )
    loo = {name: leave_one_out(tree) for name, tree in fits.items()}
    rows = {
        name: {
            **_fit_columns(tree, loo[name], loo[reference]),
            **{
                f"{column}[{v}]": value
                for v in var_names
                for column, value in _distances(draws[name][v], draws[reference][v]).items()
            },
        }
        for name, tree in fits.items()
    }
    table = DataFrame.from_dict(rows, orient="index", dtype=float)
    remarks = tuple(
        remark for name, tree in fits.items() for remark in _remarks(name, tree)
    )
    return Comparison(table, reference, tuple(var_names), draws, remarks)


def _checked(fits) -> dict[str, DataTree]:
    if not isinstance(fits, dict):
        raise TypeError(
            "fits must be a dict from a name to the ArviZ data of a fit, got "
            f"{type(fits).__name__}."
        )
    if not fits:
        raise ValueError("fits is empty; give at least one, such as {'NUTS': tree}.")
    trees = {name: as_tree(data) for name, data in fits.items()}
    for name, tree in trees.items():
        if tree is None:
            raise TypeError(
                f"Fit '{name}' is not ArviZ data (an xarray.DataTree or an "
                f"arviz.InferenceData) but {type(fits[name]).__name__}. Convert it with "
                "to_arviz first."
            )
        if "posterior" not in tree.children:
            raise ValueError(
                f"Fit '{name}' has no group 'posterior', only {sorted(tree.children)}."
            )
    return trees


def _check_same_data(fits, reference):
    def data(tree):
        if "observed_data" not in tree.children:
            return None
        return {k: v.values for k, v in tree["observed_data"].data_vars.items()}

    expected = data(fits[reference])
    for name, tree in fits.items():
        found = data(tree)
        if found is None or expected is None:
            continue
        if sorted(found) != sorted(expected):
            raise ValueError(
                f"Fit '{name}' has the observed sites {sorted(found)}, but the "
                f"reference '{reference}' has {sorted(expected)}."
            )
        for site, values in found.items():
            if values.shape != expected[site].shape:
                raise ValueError(
                    f"Observed site '{site}' has shape {values.shape} in fit '{name}', "
                    f"but {expected[site].shape} in the reference '{reference}'."
                )
            # One fit may be in float32.
            if not np.allclose(values, expected[site], rtol=1e-5, equal_nan=True):
                raise ValueError(
                    f"The data of site '{site}' in fit '{name}' differ from those in "
                    f"the reference '{reference}'. Only fits to the same data, in the "
                    "same order, can be compared."
                )


def _transformed(name, posterior, transform) -> Dataset:
    from xarray import DataArray

    new = {}
    for v, function in transform.items():
        values = function(posterior)
        if not isinstance(values, DataArray) or not {"chain", "draw"} <= {*values.dims}:
            raise TypeError(
                f"The transform '{v}' must give an xarray.DataArray with the "
                f"dimensions chain and draw, got {type(values).__name__} for fit "
                f"'{name}'. Apply NumPy functions to variables of the posterior: "
                f"{{'{v}': lambda posterior: np.exp(posterior['f'])}}."
            )
        new[v] = values
    return posterior.assign(new)


def _variables(posteriors, var_names) -> list[str]:
    if var_names is None:
        first = next(iter(posteriors.values()))
        found = [
            str(v)
            for v in first.data_vars
            if all(v in p and _draws(p[v])[0].size > 1 for p in posteriors.values())
        ]
        if not found:
            raise ValueError(
                "The fits share no variable with more than one entry. They have "
                + "; ".join(f"'{k}': {sorted(p)}" for k, p in posteriors.items())
                + ". Name the variables to compare: var_names=[...]."
            )
        return found
    var_names = [var_names] if isinstance(var_names, str) else list(var_names)
    if not var_names:
        raise ValueError("var_names is empty; name a variable, or leave it out.")
    for name, posterior in posteriors.items():
        missing = [v for v in var_names if v not in posterior]
        if missing:
            raise ValueError(
                f"Fit '{name}' has no variable {missing}; it has {sorted(posterior)}."
            )
    return var_names


def _draws(values: DataArray) -> np.ndarray:
    """Draws of all chains, shape ``(S, ...)``."""
    values = values.transpose("chain", "draw", ...).values
    return values.reshape(-1, *values.shape[2:])


def _is_mcmc(tree) -> bool:
    return tree.attrs.get("method", "MCMC") == "MCMC"


def _fit_columns(tree, loo, reference_loo) -> dict[str, float]:
    nan = float("nan")
    row = dict.fromkeys(
        ["elpd_loo", "se", "elpd_diff", "se_diff", "p_loo", "k_max", "k_bad"], nan
    )
    if loo is not None:
        row.update(elpd_loo=loo.elpd, se=loo.se, p_loo=loo.p_loo)
        row["k_max"] = float(np.max(loo.pareto_k))
        row["k_bad"] = float(np.mean(loo.pareto_k > _BAD_K))
        if reference_loo is not None and loo.pointwise.shape == (
            reference_loo.pointwise.shape
        ):
            diff = loo.pointwise - reference_loo.pointwise
            row["elpd_diff"] = float(np.sum(diff))
            row["se_diff"] = float(
                np.sqrt(diff.size) * np.std(diff, ddof=int(diff.size > 1))
            )
    row["elbo"] = tree.attrs.get("elbo", nan)
    row["seconds"] = tree.attrs.get("seconds", nan)
    row["r_hat"], row["ess_bulk"] = nan, nan
    if _is_mcmc(tree):
        row["r_hat"], row["ess_bulk"] = convergence(tree["posterior"].to_dataset())
    row["guide_khat"] = tree.attrs.get("khat", nan)
    row["sbc_p"] = tree.attrs.get("sbc_p", nan)
    return row


def _remarks(name, tree):
    """Verdicts on a guide, in words."""
    if tree.attrs.get("khat", 0.0) > _BAD_K:
        yield (
            f"{name}: guide k-hat {tree.attrs['khat']:.2f} is above {_BAD_K}, so the guide "
            "is too far from the joint posterior for importance weights to mend it; "
            "marginals may still be good."
        )
    if tree.attrs.get("sbc_p", 1.0) <= _SMALL_P:
        yield (
            f"{name}: not calibrated in {tree.attrs['sbc_num_simulations']} simulations "
            f"({tree.attrs['sbc_verdict']})."
        )


def _distances(draws: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """How far two posteriors of an array are apart, averaged over its entries."""
    from scipy.stats import wasserstein_distance

    draws = draws.reshape(len(draws), -1).astype(float)
    reference = reference.reshape(len(reference), -1).astype(float)
    sd = np.std(reference, axis=0, ddof=1)
    diff = np.abs(np.mean(draws, axis=0) - np.mean(reference, axis=0))
    columns = {"mean_diff": float(np.mean(diff))}
    # A constant's sd is rounding error only.
    varies = sd > 1e-10 * np.max(np.abs(reference), axis=0)
    if not varies.any():
        nan = float("nan")
        return {**columns, "mean_diff_sd": nan, "sd_ratio": nan, "w1_sd": nan}
    w1 = [
        wasserstein_distance(x, y)
        for x, y in zip(draws.T[varies], reference.T[varies], strict=True)
    ]
    sd = sd[varies]
    return {
        **columns,
        "mean_diff_sd": float(np.mean(diff[varies] / sd)),
        "sd_ratio": float(np.mean(np.std(draws[:, varies], axis=0, ddof=1) / sd)),
        "w1_sd": float(np.mean(np.asarray(w1) / sd)),
    }


@dataclass(frozen=True)
class Comparison:
    """
    Fits side by side, made by :func:`compare`.

    :param table: a :class:`pandas.DataFrame` with a row for each fit; for its columns
        see
        :func:`compare`.
    :param reference: name of the fit that distances are measured from.
    :param var_names: names of the compared variables.
    :param draws: for each fit, draws of these by name, shape ``(S, ...)``.
    :param remarks: sentences on guides that are far from the posterior.
    """

    table: DataFrame
    reference: str
    var_names: tuple[str, ...]
    draws: dict[str, dict[str, np.ndarray]] = field(repr=False)
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        of_guides = {*_GUIDE_COLUMNS}
        blocks = [self._text("fit", lambda c: not c.endswith("]") and c not in of_guides)]
        if self.table[[*_GUIDE_COLUMNS]].notna().any(axis=None):
            blocks.append(self._text("guide", lambda c: c in of_guides))
        blocks += [
            self._text(f"{v} against {self.reference}", lambda c, v=v: f"[{v}]" in c)
            for v in self.var_names
        ]
        blocks += [fill(remark, 96) for remark in self.remarks]
        return "\n\n".join([*blocks, fill(self._legend(), 96)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        shown = self._rounded(self.table)
        text = "".join(f"<p>{escape(part)}</p>" for part in (*self.remarks, self._legend()))
        return shown.to_html() + text

    def _text(self, heading, wanted) -> str:
        part = self.table[[c for c in self.table.columns if wanted(c)]]
        shown = self._rounded(part)
        shown.columns = [c.partition("[")[0] for c in shown.columns]
        shown.columns.name = heading
        return shown.to_string()

    def _rounded(self, table):
        """The same as text."""
        shown = table.astype(object)
        for column in table.columns:
            short = column.partition("[")[0]
            shown[column] = [_format(short, value) for value in table[column]]
        return shown.rename(index={self.reference: f"{self.reference} (reference)"})

    def _legend(self) -> str:
        return "; ".join(f"{column}: {text}" for column, text in _LEGEND.items()) + "."

    def plot(self, x=None, *, var_names: Sequence[str] | str | None = None) -> Figure:
        """
        Posterior means and 90 % bands of the variables, a panel for each variable and
        fit with the reference's dotted, and the ELPD of all fits with a standard error
        to each side, in a last panel (none where no fit has a log likelihood).

        :param x: values of the horizontal axis, shape ``(N,)`` or ``(N, 1)`` with N the
            last axis of the variables; their index if None.
        :param var_names: names of some of the compared variables; all if None.
        :return: a Matplotlib figure.
        :raises ValueError: if a variable was not compared, or ``x`` has another shape.
        """
        import matplotlib.pyplot as plt

        if var_names is None:
            var_names = self.var_names
        var_names = [var_names] if isinstance(var_names, str) else list(var_names)
        unknown = [v for v in var_names if v not in self.var_names]
        if unknown:
            raise ValueError(
                f"Variables {unknown} were not compared, only {list(self.var_names)}."
            )
        names = list(self.draws)
        with_elpd = bool(self.table["elpd_loo"].notna().any())
        num_columns = min(len(names), _MAX_COLUMNS)
        lines = -(-len(names) // num_columns)  # of panels for each variable
        num_rows = len(var_names) * lines + with_elpd
        size = (3.2 * max(num_columns, 2), 2.6 * num_rows)
        figure = plt.figure(figsize=size, layout="constrained")
        grid = figure.add_gridspec(num_rows, num_columns)
        for i, v in enumerate(var_names):
            where = _positions(x, v, self.draws[self.reference][v].shape[1:])
            first = None
            for j, name in enumerate(names):
                line, column = divmod(j, num_columns)
                ax = figure.add_subplot(grid[i * lines + line, column], sharey=first)
                first = first or ax
                _draw_panel(ax, where, self.draws[name][v], self.draws[self.reference][v])
                ax.set_title(name)
                ax.set_xlabel("x" if x is not None else "index")
            first.set_ylabel(v)
        if with_elpd:
            ax = figure.add_subplot(grid[-1, :])
            elpd, se = self.table["elpd_loo"], self.table["se"]
            ax.errorbar(elpd, range(len(names)), xerr=se, fmt="o", capsize=3, color="k")
            ax.axvline(elpd[self.reference], linestyle=":", color="k")
            ax.set_yticks(range(len(names)), names)
            ax.set_ylim(len(names) - 0.5, -0.5)
            ax.set_xlabel("ELPD by LOO, ± 1 standard error")
        return figure


def _format(column: str, value: float) -> str:
    if np.isnan(value):
        return "-"
    if column == "k_bad":
        return f"{100 * value:.0f}%"
    if column == "mean_diff":
        return f"{value:.3g}"
    return f"{value:.{_NUM_DECIMALS.get(column, 1)}f}"


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

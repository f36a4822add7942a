"""Several fits of one model to the same data, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from numpyro_sgp.diagnostics.arviz import (
    as_tree,
    convergence,
    leave_one_out,
    mean_and_sd_errors,
)
from numpyro_sgp.diagnostics.khat import NUM_DRAWS, good_k
from numpyro_sgp.diagnostics.optimality import ENOUGH_NATS

if TYPE_CHECKING:
    from arviz import InferenceData
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from xarray import DataArray, Dataset, DataTree

_LARGEST_R_HAT, _SMALLEST_ESS = 1.01, 100
_SMALL_P = 0.05
_NUM_ERRORS = 3  # a fall of the loss by so many standard errors is one
_WIDTH = 96
_BAND = (0.05, 0.95)
_MAX_LINES = 10
_MAX_COLUMNS = 4  # panels side by side
#: What is printed together, and the columns that are printed as the errors of others.
_BLOCKS = {
    "fit": (
        "elpd_loo",
        "elpd_diff",
        "p_loo",
        "k_max",
        "k_bad",
        "elbo",
        "log_joint_bound",
        "seconds",
    ),
    "convergence": (
        "r_hat",
        "ess_bulk",
        "ess_tail",
        "divergences",
        "nats_left",
        "guide_khat",
        "sbc_p",
    ),
}
_DISTANCES = ("mean_diff", "mean_diff_sd", "sd_ratio", "w1_sd")
_ERRORS = {
    "elpd_loo": "se",
    "elpd_diff": "se_diff",
    "mean_diff": "mean_diff_mcse",
    "mean_diff_sd": "mean_diff_sd_mcse",
    "sd_ratio": "sd_ratio_mcse",
}
_NUM_DECIMALS = {
    "k_max": 2,
    "r_hat": 3,
    "ess_bulk": 0,
    "ess_tail": 0,
    "divergences": 0,
    "nats_left": 2,
    "guide_khat": 2,
    "sbc_p": 3,
    "mean_diff_sd": 3,
    "sd_ratio": 3,
    "w1_sd": 3,
}
_LEGEND = {
    "elpd_loo": "expected log predictive density by PSIS-LOO ± its standard error",
    "elpd_diff": "elpd_loo minus the reference's ± the standard error of that",
    "p_loo": "effective number of parameters",
    "k_max": "largest Pareto k of an observation",
    "k_bad": "share of observations whose k is too large for LOO, by the number of draws",
    "elbo": "bound on the log evidence",
    "log_joint_bound": "bound on log p(y, point) where latents are held at points, which "
    "tells nothing of the evidence",
    "seconds": "how long the fit took, as to_arviz was told",
    "r_hat": "largest R-hat of all variables, MCMC only",
    "ess_bulk": "smallest effective sample size, MCMC only (ess_tail: that of the tails)",
    "divergences": "number of divergent transitions",
    "nats_left": "about what the bound would gain if q(u) went to its optimum",
    "guide_khat": "PSIS k-hat of the guide's joint draws of all latents (k_max is of "
    "single observations)",
    "sbc_p": "p value of simulation-based calibration, adjusted for all tests",
    "mean_diff": "mean |difference of posterior means| ± the Monte Carlo standard error of "
    "one such difference",
    "mean_diff_sd": "that in sds of the reference",
    "sd_ratio": "mean of posterior sd / reference sd ± the Monte Carlo standard error of "
    "one such ratio",
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
      largest Pareto k, and the share above what is reliable for the number S of draws,
      :math:`\min(1 - 1 / \log_{10} S, 0.7)`. NaN without a log likelihood, and where
      latents are held at points (which LOO cannot move). For a variational fit this is the
      cross-validation of q(f) as if it were the posterior, given those hyperparameters that
      are numbers or :func:`numpyro.param`;
    - ``elbo, seconds``: as :func:`to_arviz` was told or computed them; ``log_joint_bound``
      in the place of ``elbo`` where latents are held at points: a bound on log p(y, point),
      not on the evidence;
    - ``r_hat, ess_bulk, ess_tail``: the worst of all variables in the posterior, and
      ``divergences``, the number of divergent transitions; NaN for SVI;
    - ``nats_left``: about what the bound of an SVI would gain if q(u) went to its optimum
      (:func:`~numpyro_sgp.diagnostics.optimality.nats_left`);
    - ``guide_khat``: PSIS k-hat of a guide, if :func:`to_arviz` computed it, from 1000
      draws. Above 0.67 the guide is too far from the joint posterior of all latents for
      importance weights to mend it; ``sbc_p``: p value of simulation-based calibration,
      from :func:`~numpyro_sgp.calibrate` by way of :func:`to_arviz`;
    - for each compared variable, say f: ``mean_diff[f]``, the absolute difference of
      the posterior means; ``mean_diff_sd[f]``, that in standard deviations of the
      reference; ``sd_ratio[f]``, standard deviation over the reference's; ``w1_sd[f]``,
      the 1-Wasserstein distance of the marginals in the reference's standard
      deviations. All are means over the entries of f; entries that do not vary in the
      reference are left out of the last three. ``mean_diff_mcse[f]``,
      ``mean_diff_sd_mcse[f]`` and ``sd_ratio_mcse[f]`` are Monte Carlo standard errors of
      one entry's number, of the draws of both fits, averaged in the same way: means that
      differ by no more than these do not differ.

    What is wrong with a fit is said in sentences, ``.remarks``: R-hat above 1.01, effective
    sample sizes below 100, divergences, bad Pareto k, q(u) with more than half a nat left
    to gain, a loss that still falls, latents held at points, a guide far from the
    posterior, one that is not calibrated; and a reference of which such is true.

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
    chains = {
        name: convergence(tree["posterior"].to_dataset())
        for name, tree in fits.items()
        if _is_mcmc(tree)
    }
    errors = {
        name: {v: mean_and_sd_errors(posterior[v]) for v in var_names}
        for name, posterior in posteriors.items()
    }

    def distances(name, v):
        found = _distances(*((draws[k][v], errors[k][v]) for k in (name, reference)))
        if name == reference:  # no error from itself
            found |= {k: float("nan") for k in found if k.endswith("_mcse")}
        return found

    rows = {
        name: {
            **_fit_columns(tree, loo[name], loo[reference], chains.get(name)),
            **{
                f"{column}[{v}]": value
                for v in var_names
                for column, value in distances(name, v).items()
            },
        }
        for name, tree in fits.items()
    }
    table = DataFrame.from_dict(rows, orient="index", dtype=float)
    remarks = tuple(
        f"{name}: {remark}"
        for name, tree in fits.items()
        for remark in _remarks(tree, loo[name], chains.get(name), name == reference)
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


def _fit_columns(tree, loo, reference_loo, chains) -> dict[str, float]:
    nan = float("nan")
    row = dict.fromkeys(
        ["elpd_loo", "se", "elpd_diff", "se_diff", "p_loo", "k_max", "k_bad"], nan
    )
    if loo is not None:
        row.update(elpd_loo=loo.elpd, se=loo.se, p_loo=loo.p_loo)
        row["k_max"] = float(np.max(loo.pareto_k))
        row["k_bad"] = float(np.mean(loo.pareto_k > loo.good_k))
        if reference_loo is not None and loo.pointwise.shape == (
            reference_loo.pointwise.shape
        ):
            diff = loo.pointwise - reference_loo.pointwise
            row["elpd_diff"] = float(np.sum(diff))
            row["se_diff"] = float(
                np.sqrt(diff.size) * np.std(diff, ddof=int(diff.size > 1))
            )
    for name in ("elbo", "log_joint_bound", "seconds"):
        row[name] = tree.attrs.get(name, nan)
    for name in ("r_hat", "ess_bulk", "ess_tail"):
        row[name] = nan if chains is None else getattr(chains, name)
    row["divergences"] = nan if chains is None else _divergences(tree)
    row["nats_left"] = tree.attrs.get("nats_left", nan)
    row["guide_khat"] = tree.attrs.get("khat", nan)
    row["sbc_p"] = tree.attrs.get("sbc_p", nan)
    return row


def _divergences(tree) -> float:
    if "sample_stats" not in tree.children or "diverging" not in tree["sample_stats"]:
        return float("nan")
    return float(np.sum(tree["sample_stats"]["diverging"].values))


def _remarks(tree, loo, chains, is_reference):
    """What is wrong with a fit, in words."""
    attrs = tree.attrs
    wrong = [*_of_chains(tree, chains)] if chains is not None else [*_of_training(attrs)]
    yield from wrong
    if wrong and is_reference:
        yield "this is the reference, so that differences from it are as unreliable."
    if why := attrs.get("nats_left_unknown"):
        yield f"whether q(u) has converged is not known: {why}."
    if points := attrs.get("point_estimates"):
        yield (
            f"held at points: {points}. So it has no LOO, no k-hat and no bound "
            "on the evidence (log_joint_bound is on log p(y, point)), and all its "
            "draws are given these values. Use base_guide=AutoNormal or "
            "AutoMultivariateNormal, or NUTS."
        )
    if loo is not None and (bad := int(np.sum(loo.pareto_k > loo.good_k))):
        yield (
            f"Pareto k of {bad} of {loo.pareto_k.size} observations is above "
            f"{loo.good_k:.2f}, where PSIS-LOO is unreliable, too high most often."
        )
    if attrs.get("khat", 0.0) > (limit := good_k(NUM_DRAWS)):
        yield (
            f"guide k-hat {attrs['khat']:.2f} is above {limit:.2f}, so the guide is too "
            "far from the joint posterior for importance weights to mend it"
            + ("." if wrong else "; marginals may still be good.")
        )
    if attrs.get("sbc_p", 1.0) <= _SMALL_P:
        yield (
            f"not calibrated in {attrs['sbc_num_simulations']} simulations "
            f"({attrs['sbc_verdict']})."
        )


def _of_chains(tree, chains):
    if chains.r_hat > _LARGEST_R_HAT:
        yield (
            f"R-hat {chains.r_hat:.3f} of {chains.where['r_hat']} is above "
            f"{_LARGEST_R_HAT}: the chains have not mixed; run them longer."
        )
    for name, what in (("ess_bulk", "bulk"), ("ess_tail", "tails")):
        if (size := getattr(chains, name)) < _SMALLEST_ESS:
            yield (
                f"effective sample size {size:.0f} in the {what} of "
                f"{chains.where[name]} is below {_SMALLEST_ESS}; draw more."
            )
    if (number := _divergences(tree)) > 0:
        yield (
            f"{number:.0f} divergent transitions: part of the posterior may be missed; "
            "raise target_accept_prob, or whiten the model."
        )


def _of_training(attrs):
    nats = attrs.get("nats_left", 0.0)
    mend = "not converged; train longer, or with natural_gradients."
    if np.isinf(nats):
        yield f"q(u) is far from an optimum, where the bound is not concave: {mend}"
    elif nats > ENOUGH_NATS:
        size = f"{nats:.2g}" if nats < 100 else f"{nats:.0f}"
        yield f"about {size} nats are left for q(u): {mend}"
    drop, se = attrs.get("loss_drop", 0.0), attrs.get("loss_drop_se", 0.0)
    if drop > max(ENOUGH_NATS, _NUM_ERRORS * se):
        yield (
            f"the mean loss still fell by {drop:.2g} ± {se:.1g} over the last tenth of the "
            "steps: not converged; train longer."
        )


def _distances(fit, reference) -> dict[str, float]:
    """
    How far two posteriors of an array are apart, averaged over its entries.

    :param fit: draws, shape ``(S, ...)``, and the errors of their means and of their sds.
    :param reference: the same of the reference.
    """
    from scipy.stats import wasserstein_distance

    nan = float("nan")
    (draws, errors), (base, base_errors) = fit, reference
    draws, base = (x.reshape(len(x), -1).astype(float) for x in (draws, base))
    # Entries that do not vary have no error.
    errors, base_errors = (
        np.nan_to_num(np.reshape(e, (2, -1))) for e in (errors, base_errors)
    )
    sd, base_sd = np.std(draws, axis=0, ddof=1), np.std(base, axis=0, ddof=1)
    diff = np.abs(np.mean(draws, axis=0) - np.mean(base, axis=0))
    mcse = np.hypot(errors[0], base_errors[0])
    columns = {"mean_diff": np.mean(diff), "mean_diff_mcse": np.mean(mcse)}
    # A constant's sd is rounding error only.
    varies = base_sd > 1e-10 * np.max(np.abs(base), axis=0)
    if varies.any():
        of, to = sd[varies], base_sd[varies]
        w1 = [
            wasserstein_distance(x, y)
            for x, y in zip(draws.T[varies], base.T[varies], strict=True)
        ]
        ratio_mcse = np.hypot(errors[1][varies], of / to * base_errors[1][varies]) / to
        columns |= {
            "mean_diff_sd": np.mean(diff[varies] / to),
            "mean_diff_sd_mcse": np.mean(mcse[varies] / to),
            "sd_ratio": np.mean(of / to),
            "sd_ratio_mcse": np.mean(ratio_mcse),
            "w1_sd": np.mean(np.asarray(w1) / to),
        }
    names = [*_DISTANCES, *(_ERRORS[c] for c in _DISTANCES if c in _ERRORS)]
    return {name: float(columns.get(name, nan)) for name in names}


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
    """

    table: DataFrame
    reference: str
    var_names: tuple[str, ...]
    draws: dict[str, dict[str, np.ndarray]] = field(repr=False)
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self._text(*block) for block in self._blocks()]
        if self.remarks:
            parts.append("\n".join(_bullet(remark) for remark in self.remarks))
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
            for name, text in _LEGEND.items()
            if name in shown
        )

    def _blocks(self):
        """Headings, and the columns under them that some fit has a number in."""
        blocks = [(heading, [*columns]) for heading, columns in _BLOCKS.items()]
        blocks += [
            (f"{v} against {self.reference}", [f"{c}[{v}]" for c in _DISTANCES])
            for v in self.var_names
        ]
        for heading, columns in blocks:
            if columns := [c for c in columns if self.table[c].notna().any()]:
                yield heading, columns

    def _text(self, heading, columns) -> str:
        return self._shown(heading, columns).to_string()

    def _shown(self, heading, columns):
        """Some columns as text, with their errors."""
        shown = self.table[columns].astype(object)
        for column in columns:
            short, bracket, rest = column.partition("[")
            error = _ERRORS.get(short, short) + bracket + rest
            errors = self.table[error] if error != column else [np.nan] * len(shown)
            pairs = zip(self.table[column], errors, strict=True)
            shown[column] = [_format(short, value, error) for value, error in pairs]
        shown.columns = [c.partition("[")[0] for c in columns]
        shown.columns.name = heading
        return shown.rename(index={self.reference: f"{self.reference} (reference)"})

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


def _format(column: str, value: float, error: float = np.nan) -> str:
    if np.isnan(value):
        return "-"
    if column == "k_bad":
        return f"{100 * value:.0f}%"
    if column == "mean_diff":
        text, with_error = f"{value:.3g}", f"{error:.1g}"
    else:
        decimals = _NUM_DECIMALS.get(column, 1)
        text, with_error = f"{value:.{decimals}f}", f"{error:.{decimals}f}"
    return text if np.isnan(error) else f"{text} ± {with_error}"


def _bullet(remark: str) -> str:
    return fill(remark, _WIDTH, initial_indent="- ", subsequent_indent="  ")


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

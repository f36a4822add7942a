"""Several fits of one model to the same data, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from numpyro_sgp._threads import alone
from numpyro_sgp.diagnostics.arviz import as_tree
from numpyro_sgp.diagnostics.comparison import CONVERGENCE, DISTANCES, FIT, Comparison
from numpyro_sgp.diagnostics.remarks import divergences, remarks_on
from numpyro_sgp.diagnostics.summaries import (
    convergence,
    leave_one_out,
    mean_and_sd_errors,
)

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import DataArray, Dataset, DataTree


@alone
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

    The table has a row for each fit; :meth:`Comparison.legend` tells its columns.

    - LOO, by Pareto-smoothed importance sampling, leaves out each value of each observed
      site on its own; ``elpd_diff, se_diff`` are the paired difference to the reference,
      and ``k_bad`` counts Pareto k above what is reliable for the number S of draws,
      :math:`\min(1 - 1 / \log_{10} S, 0.7)`. NaN without a log likelihood, and where
      latents are held at points (which LOO cannot move). For a variational fit this is the
      cross-validation of q(f) as if it were the posterior, given those hyperparameters that
      are numbers or :func:`numpyro.param`.
    - ``others_left, points_lose, float32_loses`` are of
      :meth:`~numpyro_sgp.Fitted.check`, where it was called before
      :meth:`~numpyro_sgp.Fitted.to_arviz`.
    - ``elbo, seconds, nats_left, guide_khat, sbc_p`` are as :func:`to_arviz` was told or
      computed them, with ``log_joint_bound`` in the place of ``elbo`` where latents are
      held at points; ``r_hat``, sample sizes and ``divergences`` are of MCMC only.
      Where ``guide_khat`` is above 0.67, the guide is too far from the joint posterior of
      all latents for importance weights to mend it.
    - For each compared variable, say f, ``mean_diff[f]``, ``mean_diff_sd[f]``,
      ``sd_ratio[f]`` and ``w1_sd[f]`` are means over the entries of f; entries that do not
      vary in the reference are left out of the last three. ``mean_diff_mcse[f]``,
      ``mean_diff_sd_mcse[f]`` and ``sd_ratio_mcse[f]`` are Monte Carlo standard errors of
      one entry's number, of the draws of both fits, averaged in the same way: means that
      differ by no more than these do not differ.

    What is wrong with a fit is said in sentences, ``.remarks``; and a reference of which
    such is true.

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
    loo, without = {}, {}
    for name, tree in fits.items():
        try:
            loo[name] = leave_one_out(tree)
        except ValueError as error:  # of draws that repeat each other
            loo[name], without[name] = None, str(error)
    errors = {
        name: {v: mean_and_sd_errors(posterior[v]) for v in var_names}
        for name, posterior in posteriors.items()
    }
    rows, remarks = {}, []
    for name, tree in fits.items():
        is_reference, chains = name == reference, None
        if _is_mcmc(tree):
            chains = convergence(tree["posterior"].to_dataset())
        rows[name] = _fit_columns(tree, loo[name], loo[reference], chains)
        for v in var_names:
            found = _distances(*((draws[k][v], errors[k][v]) for k in (name, reference)))
            for column, value in found.items():
                no_error = is_reference and column.endswith("_mcse")  # from itself
                rows[name][f"{column}[{v}]"] = float("nan") if no_error else value
        why = without.get(name, "")
        wrong = remarks_on(tree, loo[name], chains, is_reference, why)
        remarks += [f"{name}: {remark}" for remark in wrong]
    table = DataFrame.from_dict(rows, orient="index", dtype=float)
    return Comparison(table, reference, tuple(var_names), draws, tuple(remarks))


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
            # One fit may be in float32, whatever the units.
            finite = np.abs(expected[site][np.isfinite(expected[site])])
            limits = {"rtol": 1e-5, "atol": 1e-6 * float(np.max(finite, initial=0))}
            if not np.allclose(values, expected[site], **limits, equal_nan=True):
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
    nan, row = float("nan"), {}
    attrs = {**tree.attrs, "guide_khat": tree.attrs.get("khat", nan)}
    for name, column in {**FIT, **CONVERGENCE}.items():
        row[name] = attrs.get(name, nan)
        if column.error:
            row[column.error] = attrs.get(column.error, nan)
    if loo is not None:
        k, pointwise = loo.pareto_k.values, loo.elpd_i.values
        row.update(elpd_loo=loo.elpd, se=loo.se, p_loo=loo.p)
        row.update(k_max=np.max(k), k_bad=np.mean(k > loo.good_k))
        if reference_loo is not None and pointwise.shape == reference_loo.elpd_i.shape:
            diff = pointwise - reference_loo.elpd_i.values
            row["elpd_diff"] = np.sum(diff)
            row["se_diff"] = np.sqrt(diff.size) * np.std(diff, ddof=int(diff.size > 1))
    if chains is not None:
        row.update(r_hat=chains.r_hat, ess_bulk=chains.ess_bulk, ess_tail=chains.ess_tail)
        row["divergences"] = divergences(tree)
    return row


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
    names = [*DISTANCES, *(c.error for c in DISTANCES.values() if c.error)]
    return {name: float(columns.get(name, nan)) for name in names}

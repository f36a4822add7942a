"""What ArviZ tells of a fit: leave-one-out cross-validation, and whether chains mixed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numpyro_sgp.diagnostics.arviz import as_tree

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData
    from xarray import Dataset, DataTree

_FEWEST_IN_TAIL = 5  # draws that a Pareto distribution is fitted to


def leave_one_out(tree: DataTree) -> ELPDData | None:
    """
    LOO by Pareto-smoothed importance sampling, over all observations of all observed
    sites, each left out on its own.

    Observations whose log likelihood is 0 in every draw are masked ones, and not
    counted.

    :param tree: ArviZ data with the groups posterior and log_likelihood.
    :return: what ``arviz.loo`` returns, pointwise; None without a log likelihood, or where
        latents are held at points (``point_estimates`` in ``tree.attrs``), which weights
        cannot move.
    """
    tree = as_tree(tree)
    if (
        tree.attrs.get("point_estimates")
        or "log_likelihood" not in tree.children
        or not tree["log_likelihood"].data_vars
    ):
        return None
    import arviz_stats
    from xarray import DataArray, Dataset, DataTree

    parts = []
    for values in tree["log_likelihood"].data_vars.values():
        values = values.transpose("chain", "draw", ...).values
        parts.append(values.reshape(*values.shape[:2], -1))
    values = np.concatenate(parts, axis=-1)
    values = values[..., (values != 0).any(axis=(0, 1))]
    if not values.shape[-1]:
        return None
    both = {
        "posterior": tree["posterior"].to_dataset(),
        "log_likelihood": Dataset(
            {"all": DataArray(values, dims=("chain", "draw", "observation"))}
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # high values of k are shown in the table
        try:
            return arviz_stats.loo(DataTree.from_dict(both), pointwise=True)
        except ValueError as error:
            if not _ties(values):
                raise
            raise ValueError(
                "LOO cannot be computed: the draws of this fit repeat each other, so that "
                "importance weights tie. A chain has not moved; run it longer, or look at "
                "its acceptance and step size."
            ) from error


def _ties(values) -> bool:
    """Whether the largest importance weights of an observation are all the same."""
    lowest = np.sort(values.reshape(-1, values.shape[-1]), axis=0)[:_FEWEST_IN_TAIL]
    return bool(np.any(lowest[0] == lowest[-1]))


class Convergence(NamedTuple):
    """
    The worst of all variables of a posterior by MCMC; NaN where there are too few draws or
    chains.

    :param r_hat: largest R-hat.
    :param ess_bulk: smallest effective sample size of the bulk.
    :param ess_tail: smallest effective sample size of the tails.
    :param where: the entries that they are of, by the names of these.
    """

    r_hat: float
    ess_bulk: float
    ess_tail: float
    where: dict[str, str]


def convergence(posterior: Dataset) -> Convergence:
    """
    R-hat and effective sample sizes of the worst entry of all variables.

    :param posterior: draws with the dimensions ``chain`` and ``draw``.
    """
    import arviz_stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one chain gives NaN
        found = {
            "r_hat": _worst(arviz_stats.rhat(posterior), np.nanargmax),
            "ess_bulk": _worst(arviz_stats.ess(posterior, method="bulk"), np.nanargmin),
            "ess_tail": _worst(arviz_stats.ess(posterior, method="tail"), np.nanargmin),
        }
    where = {name: entry for name, (_, entry) in found.items()}
    return Convergence(**{name: value for name, (value, _) in found.items()}, where=where)


def _worst(found: Dataset, which) -> tuple[float, str]:
    """Its value, and the entry's name such as ``f[3]``."""
    parts = {str(name): np.asarray(v, dtype=float) for name, v in found.data_vars.items()}
    values = np.concatenate([np.ravel(v) for v in parts.values()])
    if np.isnan(values).all():
        return float("nan"), ""
    at = index = int(which(values))
    for name, part in parts.items():
        if index < part.size:
            place = ", ".join(map(str, np.unravel_index(index, part.shape)))
            return float(values[at]), f"{name}[{place}]" if place else name
        index -= part.size


def mean_and_sd_errors(values) -> tuple[np.ndarray, np.ndarray]:
    """
    Monte Carlo standard errors of the mean and of the standard deviation of each entry.

    :param values: a :class:`xarray.DataArray` with the dimensions ``chain`` and ``draw``.
    :return: two arrays of the shape of an entry; NaN where it does not vary.
    """
    import arviz_stats

    dataset = values.transpose("chain", "draw", ...).to_dataset(name="values")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # entries that do not vary
        return tuple(
            np.asarray(arviz_stats.mcse(dataset, method=method)["values"], dtype=float)
            for method in ("mean", "sd")
        )

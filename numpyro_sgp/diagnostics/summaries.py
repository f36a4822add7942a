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
    counted. Of those where it is another number in every draw that number is the density
    with the observation left out too.

    :param tree: ArviZ data with the groups posterior and log_likelihood.
    :return: what ``arviz.loo`` returns, pointwise; None without a log likelihood, where
        latents are held at points (``point_estimates`` in ``tree.attrs``), which weights
        cannot move, and where a log likelihood has few values, so that weights tie
        (:func:`ties`).
    :raises ValueError: where they tie because draws repeat each other.
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

    values = _log_likelihoods(tree)
    if not values.shape[-1]:
        return None
    posterior = tree["posterior"].to_dataset()
    varies = np.ptp(values, axis=(0, 1)) > 0
    if not varies.any():
        _refuse_repeated(posterior, _tied(values))
        return None
    observed = DataArray(values[..., varies], dims=("chain", "draw", "observation"))
    both = {"posterior": posterior, "log_likelihood": Dataset({"all": observed})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # high values of k are shown in the table
        try:
            found = arviz_stats.loo(DataTree.from_dict(both), pointwise=True)
        except ValueError:
            tied = _tied(values[..., varies])
            if not tied.shape[-1]:
                raise
            _refuse_repeated(posterior, tied)
            return None
    return found if varies.all() else _with_constants(found, values, varies)


def ties(tree: DataTree) -> bool:
    """Whether log likelihoods have so few values that importance weights tie."""
    tree = as_tree(tree)
    has = "log_likelihood" in tree.children and tree["log_likelihood"].data_vars
    return bool(has) and _tied(_log_likelihoods(tree)).shape[-1] > 0


def _tied(values) -> np.ndarray:
    """
    The draws with the largest importance weights of each observation where these are all
    the same, ``(5, observations)``.
    """
    flat = values.reshape(-1, values.shape[-1])
    order = np.argsort(flat, axis=0, kind="stable")[:_FEWEST_IN_TAIL]
    lowest = np.take_along_axis(flat, order, axis=0)
    return order[:, lowest[0] == lowest[-1]]


def _refuse_repeated(posterior: Dataset, tied) -> None:
    """
    :raises ValueError: where these draws of an observation are one draw of all variables.
    """
    draws = [v.transpose("chain", "draw", ...).values for v in posterior.values()]
    draws = [v.reshape(v.shape[0] * v.shape[1], -1) for v in draws]
    if any(all(np.all(v[each] == v[each[:1]]) for v in draws) for each in tied.T):
        raise ValueError(
            "LOO cannot be computed: the draws of this fit repeat each other, so that "
            "importance weights tie. A chain has not moved; run it longer, or look at "
            "its acceptance and step size."
        )


def _with_constants(found, values, varies):
    """LOO with observations whose log likelihood is one number, which is its density."""
    from xarray import DataArray

    constant = values[0, 0]
    parts = {"elpd_i": constant.copy(), "pareto_k": np.zeros(len(constant))}
    for name, each in parts.items():
        each[varies] = getattr(found, name).values
        setattr(found, name, DataArray(each, dims=("observation",)))
    found.elpd, found.n_data_points = float(parts["elpd_i"].sum()), len(constant)
    found.se = float(np.sqrt(len(constant)) * np.std(parts["elpd_i"]))
    return found


def _log_likelihoods(tree) -> np.ndarray:
    """
    Of all observations that are not masked, ``(chains, draws, observations)``, sites in the
    order of their names: those of two fits are compared one by one.
    """
    parts = []
    for _, values in sorted(tree["log_likelihood"].data_vars.items()):
        values = values.transpose("chain", "draw", ...).values
        parts.append(values.reshape(*values.shape[:2], -1))
    values = np.concatenate(parts, axis=-1)
    return values[..., (values != 0).any(axis=(0, 1))]


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

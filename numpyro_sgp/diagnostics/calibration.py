"""Simulation-based calibration of a guide: fits to data whose latents are known."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.calibration import VSBCResult, vsbc_diagnostic

from numpyro_sgp._checks import check_key
from numpyro_sgp._threads import alone
from numpyro_sgp.guides.point_latents import point_latents
from numpyro_sgp.tracing import checks, messages

if TYPE_CHECKING:
    from pandas import DataFrame

_LEVEL = 0.05


@alone
def calibrate(
    svi,
    *args,
    rng_key=None,
    num_simulations: int = 100,
    num_svi_steps: int = 1000,
    num_samples: int = 1000,
    chain_method: str = "sequential",
    simulated_data_to_args=None,
    **kwargs,
) -> Calibration:
    r"""
    Simulation-based calibration of a model, guide, optimiser and number of steps, by
    :func:`numpyro.infer.calibration.vsbc_diagnostic`: latents and data are drawn from the
    model, the guide is fitted to the data from its starting parameters, and the rank of
    the true latents among draws from the guide is recorded. Over many simulations ranks
    are uniform if the fits are exact.

    The model must draw its data where it gets None for them. Give the arguments of
    ``svi.run``, with the data, which tell what is observed and are not used otherwise;
    with None in their place the observed sites are those that are named like an argument.
    Inducing points are those of the guide's set-up, from X. Each :func:`numpyro.param` of
    the model has its starting value in the simulations.

    Ranks of single components see neither a posterior that is too often the prior (which
    is calibrated) nor wrong correlations, and with simulations enough no approximation
    passes: read ``bias`` and ``spread`` of :meth:`Calibration.summary` too. A fit that
    ends in NaN counts as one that lies too high.

    :param svi: a :class:`numpyro.infer.SVI`; its own state is not changed.
    :param args: arguments of the model, such as ``X, y``; all of the data.
    :param rng_key: random key; ``jax.random.key(0)`` if None.
    :param num_simulations: number of data sets, and of fits.
    :param num_svi_steps: steps of each fit.
    :param num_samples: draws from the guide after each fit.
    :param chain_method: "sequential", "vectorized" or "parallel".
    :param simulated_data_to_args: where data are not arguments of their own: a function
        ``(data_by_site, *args, **kwargs) -> (args, kwargs)`` that puts them (or None for
        each) into the arguments.
    :param kwargs: keyword arguments of the model.
    :return: the ranks, and what they say.
    :raises TypeError: if ``svi`` is no SVI.
    :raises ValueError: if the model cannot draw its data, takes a minibatch, or it is not
        clear which argument is the data of a site; a latent is discrete.

    **References:**

    1. Yao, Vehtari, Simpson, Gelman (2018). Yes, but Did It Work?: Evaluating Variational
       Inference. ICML. https://arxiv.org/abs/1802.02538
    2. Talts, Betancourt, Simpson, Vehtari, Gelman (2018). Validating Bayesian Inference
       Algorithms with Simulation-Based Calibration. https://arxiv.org/abs/1804.06788

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X, y = jnp.arange(3.0)[:, None], jnp.zeros(3)
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(3, train_inducing=False))
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    >>> calibration = sgp.calibrate(
    ...     svi, X, y, num_simulations=10, num_svi_steps=100, num_samples=50
    ... )
    >>> calibration.result.ranks["f"].shape
    (10, 3)
    """
    if not all(hasattr(svi, name) for name in ("model", "guide", "optim", "loss")):
        raise TypeError(
            f"svi must be a numpyro.infer.SVI object, got {type(svi).__name__}."
        )
    kwargs = {**svi.static_kwargs, **kwargs}
    given = messages.trace_of(svi.model, args, kwargs)
    checks.check_whole_plates(given, "calibration needs whole data sets")
    observed = _observed_sites(svi.model, given, args, kwargs)
    put = simulated_data_to_args
    if put is None:
        put = _injector(svi.model, given, observed, args, kwargs)
    cleared_args, cleared_kwargs = put(dict.fromkeys(observed), *args, **kwargs)
    _check_generative(messages.trace_of(svi.model, cleared_args, cleared_kwargs))
    has_data = all(given[name]["is_observed"] for name in observed)
    if has_data and hasattr(svi.guide, "setup"):
        svi.guide.setup(*args, **kwargs)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        rng_key = jax.random.key_data(rng_key)  # vsbc_diagnostic reshapes its keys
    result = vsbc_diagnostic(
        rng_key,
        svi.model,
        svi.guide,
        svi.optim,
        svi.loss,
        *cleared_args,
        observed_sites=observed,
        simulated_data_to_args=put,
        num_simulations=num_simulations,
        num_svi_steps=num_svi_steps,
        num_samples=num_samples,
        chain_method=chain_method,
        **cleared_kwargs,
    )
    points = point_latents(svi.guide, {}, cleared_args, cleared_kwargs)
    points = tuple(sorted(points & {*result.param_names}))
    return Calibration(result, num_samples, num_svi_steps, points)


@dataclass(frozen=True)
class Calibration:
    r"""
    What :func:`calibrate` found.

    Two tests are made of each component: whether the probabilities
    :math:`p_j = \Pr_q(\theta < \theta_j^*)` lie symmetrically about 1/2 (they do not where
    the guide is biased), and whether ranks are uniform (they are not either where it is
    too narrow or too wide). Both are exact for any number of simulations, and p values are
    multiplied by the number of tests (Bonferroni). The p values in ``result`` are too
    small: they take :math:`p` and :math:`1 - p` for independent samples, and at 0.05 are
    below it in about one of nine calibrated components.

    :param result: ranks and so on, as NumPyro gives them.
    :param num_samples: draws that ranks are among.
    :param num_svi_steps: steps of each fit.
    :param points: sites that the guide puts at a point; they have no ranks to speak of
        and are not tested.

    >>> import numpy as np
    >>> from numpyro.infer.calibration import VSBCResult
    >>> from numpyro_sgp.diagnostics import Calibration
    >>> ranks = np.arange(0, 50, 2) + 50  # the truth is above the median of q always
    >>> result = VSBCResult({"a": ranks / 100}, {}, {}, {"a": ranks}, ("a",))
    >>> Calibration(result, 100, 1000).verdict
    'a: too low'
    """

    result: VSBCResult = field(repr=False)
    num_samples: int
    num_svi_steps: int
    points: tuple[str, ...] = ()

    @property
    def num_simulations(self) -> int:
        """Number of simulated data sets."""
        return len(next(iter(self.result.ranks.values())))

    @property
    def p_value(self) -> float:
        """
        The smallest p value of all tested sites, adjusted for all tests; NaN if there is
        none.
        """
        rows = [row for row in self._rows().values() if row["tests"]]
        if not rows:
            return float("nan")
        tests = sum(row["tests"] for row in rows)
        return float(min([1.0, *(tests * row["smallest"] for row in rows)]))

    @property
    def verdict(self) -> str:
        """What is wrong, by site, in a line."""
        wrong = [
            f"{name}: {row['verdict']}"
            for name, row in self._rows().items()
            if row["tests"] and row["p_value"] <= _LEVEL
        ]
        tested = set(self.result.param_names) - set(self.points)
        if not tested:
            return "no site was tested"
        return "; ".join(wrong) or "no sign of miscalibration"

    def summary(self) -> DataFrame:
        """
        A :class:`pandas.DataFrame` with a row for each site: number of ``components``;
        ``p_value`` (the smallest, adjusted for the site's tests) and those of the two
        tests, ``p_symmetric`` and ``p_uniform``; ``bias``, the mean of
        :math:`p_j - 1/2` at the component where it is largest (positive: the truth lies
        above the guide's draws); ``spread``, standard deviation of :math:`p_j` over that
        of a uniform variable, where it is farthest from 1 (above 1: the guide is too
        narrow); and a ``verdict``.
        """
        from pandas import DataFrame

        hidden = ("smallest", "tests")
        rows = {
            name: {k: v for k, v in row.items() if k not in hidden}
            for name, row in self._rows().items()
        }
        return DataFrame.from_dict(rows, orient="index")

    def __str__(self) -> str:
        text = self.summary().to_string(float_format="{:.3g}".format)
        return f"{self.num_simulations} simulations, p = {self.p_value:.3g}\n{text}"

    def _rows(self) -> dict[str, dict]:
        return {name: self._row(name) for name in self.result.param_names}

    def _row(self, name) -> dict:
        from scipy import stats  # slow to import

        ranks = np.asarray(self.result.ranks[name])
        ranks = ranks.reshape(len(ranks), -1)
        size = ranks.shape[1]
        p = ranks / self.num_samples
        nan = float("nan")
        if name in self.points or not size:
            row = dict.fromkeys(
                ["p_value", "p_symmetric", "p_uniform", "bias", "spread"], nan
            )
            verdict = "point estimate, not tested" if size else "empty"
            verdict = {"verdict": verdict, "smallest": nan, "tests": 0}
            return {"components": size, **row, **verdict}
        symmetric = np.array(
            [_symmetry_p_value(2 * column - self.num_samples) for column in ranks.T]
        )
        # Ranks are uniform on 0, ..., num_samples: with a fraction added, on an interval.
        fraction = np.random.default_rng(0).uniform(size=ranks.shape)
        uniform = np.array(
            [
                stats.kstest(column, "uniform").pvalue
                for column in ((ranks + fraction) / (self.num_samples + 1)).T
            ]
        )
        tests = 2 * size
        smallest = float(min(symmetric.min(), uniform.min()))
        bias = p.mean(axis=0) - 0.5
        spread = p.std(axis=0, ddof=1) * np.sqrt(12)
        row = {
            "components": size,
            "p_value": min(1.0, tests * smallest),
            "p_symmetric": min(1.0, tests * float(symmetric.min())),
            "p_uniform": min(1.0, tests * float(uniform.min())),
            "bias": float(bias[np.argmax(np.abs(bias))]),
            "spread": float(spread[np.argmax(np.abs(spread - 1))]),
        }
        verdict = _verdict(row, symmetric, uniform, bias, spread)
        return {**row, "verdict": verdict, "smallest": smallest, "tests": tests}


def _verdict(row, symmetric, uniform, bias, spread) -> str:
    if row["p_value"] > _LEVEL:
        return "no sign of miscalibration"
    words = []
    if row["p_symmetric"] <= _LEVEL:
        words.append("too low" if bias[np.argmin(symmetric)] > 0 else "too high")
    worst = int(np.argmin(uniform))
    if row["p_uniform"] <= _LEVEL and abs(spread[worst] - 1) > 2 * abs(bias[worst]):
        # Bias alone makes the spread smaller, never larger.
        if spread[worst] > 1:
            words.append("too narrow")
        elif not words:
            words.append("too wide")
    return ", ".join(words) or "ranks are not uniform"


def _symmetry_p_value(x: np.ndarray) -> float:
    r"""
    Test of symmetry about 0 by :math:`\max_t |\#\{x \ge t\} - \#\{x \le -t\}|`, exact: in
    the order of |x|, signs are a fair coin's, so that the statistic is the maximum of a
    random walk (Butler 1969, Annals of Mathematical Statistics 40, 2209). It is that of
    the Kolmogorov-Smirnov test of x and -x, but those are not independent. Ties make it
    conservative.

    :param x: numbers, shape ``(n,)``.
    """
    size, n = np.abs(x), len(x)
    order = np.argsort(-size, kind="stable")
    walk = np.cumsum(np.sign(x[order]))
    ends = np.append(np.diff(size[order]) != 0, True)  # of ties
    m = int(np.abs(walk[ends]).max())
    if m == 0:
        return 1.0
    # Probabilities of a walk of n steps that has stayed in -m + 1, ..., m - 1.
    inside = np.zeros(2 * m - 1)
    inside[m - 1] = 1.0
    left = 0.0
    for _ in range(n):
        left += 0.5 * (inside[0] + inside[-1])
        moved = np.zeros_like(inside)
        moved[1:] += 0.5 * inside[:-1]
        moved[:-1] += 0.5 * inside[1:]
        inside = moved
    return min(1.0, float(left))


def _check_generative(trace):
    for name, site in trace.items():
        if site["type"] == "sample" and site["is_observed"]:
            factor = site["infer"].get("is_auxiliary")
            raise ValueError(
                f"Site '{name}' is "
                + ("a numpyro.factor" if factor else "observed even without its data")
                + ", so the model cannot draw its data, which calibration needs. "
                + (
                    "Write it as a numpyro.sample with a distribution that can be sampled."
                    if factor
                    else "Make its observed value an argument of the model that may be "
                    f"None: numpyro.sample('{name}', ..., obs={name})."
                )
            )


def _observed_sites(model, trace, args, kwargs) -> list[str]:
    """Sites with data, and those that an argument without a value is named after."""
    unset = {k for k, v in _arguments(model, args, kwargs).items() if v is None}
    found = [
        name
        for name, site in trace.items()
        if site["type"] == "sample"
        and not site["infer"].get("is_auxiliary")
        and (site["is_observed"] or name in unset)
    ]
    if not found:
        raise ValueError(
            "With these arguments the model has no observed site. Pass the data too: "
            "calibrate(svi, X, y)."
        )
    return found


def _arguments(model, args, kwargs) -> dict:
    """Values of the model's arguments by name, None where they have none."""
    signature = inspect.signature(model)
    bound = signature.bind_partial(*args, **kwargs)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: bound.arguments.get(name)
        for name, parameter in signature.parameters.items()
        if parameter.kind in named
    }


def _injector(model, trace, observed, args, kwargs):
    """A function that puts data of the observed sites into the arguments."""
    arguments = _arguments(model, args, kwargs)
    place = {name: name for name in observed if name in arguments}
    rest = [name for name in observed if name not in place]
    if rest:
        shape = jnp.shape(trace[rest[0]]["value"])
        free = [
            name
            for name, value in arguments.items()
            if name not in place.values() and value is not None and np.shape(value) == shape
        ]
        if len(rest) > 1 or len(free) != 1:
            raise ValueError(
                f"Which arguments of the model are the data of the sites {rest}? Name "
                f"them alike (the model has the arguments {sorted(arguments)}), or give a "
                "function simulated_data_to_args."
            )
        place[rest[0]] = free[0]

    def put(data, *args, **kwargs):
        bound = inspect.signature(model).bind_partial(*args, **kwargs)
        for site, argument in place.items():
            bound.arguments[argument] = data[site]
        return bound.args, bound.kwargs

    return put


def calibration_attrs(calibration: Calibration) -> dict[str, Any]:
    """
    What :func:`~numpyro_sgp.to_arviz` keeps of it.

    :raises TypeError: if it is something else.
    """
    if not isinstance(calibration, Calibration):
        raise TypeError(
            "calibration must be what numpyro_sgp.calibrate returned, got "
            f"{type(calibration).__name__}."
        )
    return {
        "sbc_p": calibration.p_value,
        "sbc_verdict": calibration.verdict,
        "sbc_num_simulations": calibration.num_simulations,
    }

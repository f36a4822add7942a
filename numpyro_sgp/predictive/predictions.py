"""Means, intervals and class probabilities at new inputs, for any likelihood."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.util import not_jax_tracer

from numpyro_sgp._checks import check_guide, check_key, check_levels, check_whole
from numpyro_sgp._kept import FEW_ROWS, program
from numpyro_sgp._programs import (
    NEEDS_KNOWN_DATA,
    all_static,
    join_static,
    split_static,
)
from numpyro_sgp._threads import alone
from numpyro_sgp.distributions import BlackBox
from numpyro_sgp.distributions.arguments import has_no_numbers, refuse_sparse
from numpyro_sgp.predictive.deterministic import OfRows
from numpyro_sgp.predictive.marginals import kept_of
from numpyro_sgp.predictive.remarks import warn_of_angles
from numpyro_sgp.predictive.responses import predict_rows
from numpyro_sgp.predictive.row_batches import AS_THEY_ARE, by_batches, plan_of
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.state import running

_SHOWN = 5  # rows in a repr


@dataclass(frozen=True, eq=False)
class Prediction:
    """
    The predictive distribution at one site, by row; part of what :func:`predict` returns.
    The shapes are those of the site's values.

    :param mean: the mean; None for Categorical and RobustMax.
    :param sd: the standard deviation; None likewise.
    :param quantiles: with a leading axis of the levels; None for classes.
    :param levels: of the quantiles.
    :param probs: of classes: P(y = 1) for Bernoulli, in the shape of the site; for others
        the probability of each class, in a last axis. None for all other distributions.
    :param row_axis: the axis of the site's values along which the rows of X are.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> fitted = sgp.fit(model, sgp.SVGP(4), data, progress_bar=False)
    >>> y = fitted.predict(X[:3], quantiles=[0.1, 0.9])["y"]
    >>> y.mean.shape, y.quantiles.shape
    ((3,), (2, 3))
    """

    mean: Array | None
    sd: Array | None
    quantiles: Array | None
    levels: tuple[float, ...]
    probs: Array | None
    row_axis: int

    def to_dataframe(self):
        """
        A :class:`pandas.DataFrame` with a row for each row of X; of a number that has none,
        such as an intercept, there is one.
        """
        import pandas as pd

        found = {"mean": self.mean, "sd": self.sd}
        if self.quantiles is not None:
            names = [f"{100 * level:g}%" for level in self.levels]
            found |= dict(zip(names, self.quantiles, strict=True))
        found["probs"] = self.probs
        columns = {}
        for name, values in found.items():
            if values is None:
                continue
            values = np.moveaxis(np.atleast_1d(values), self.row_axis, 0)
            for index in np.ndindex(values.shape[1:]):
                label = "" if not index else f"[{', '.join(map(str, index))}]"
                columns[name + label] = values[(slice(None), *index)]
        return pd.DataFrame(columns)

    def __repr__(self):
        frame = self.to_dataframe()
        form = f"{{:.{self._digits()}g}}".format
        text = frame.head(_SHOWN).to_string(float_format=form)
        return text if len(frame) <= _SHOWN else f"{text}\n... {len(frame)} rows"

    def _digits(self) -> int:
        """Four, or as many as show a tenth of the standard deviations of the rows shown."""
        if self.mean is None or self.sd is None:
            return 4
        shown = (
            np.moveaxis(np.atleast_1d(v), self.row_axis, 0) for v in (self.mean, self.sd)
        )
        mean, sd = (np.abs(v[:_SHOWN], dtype=float) for v in shown)
        is_shown = np.isfinite(mean) & (sd > 0.0)
        ratio = np.max(mean[is_shown] / sd[is_shown], initial=1.0)
        return int(np.clip(np.log10(ratio) + 3.0, 4.0, 12.0))


class Predictions(dict):
    """
    A dict of :class:`Prediction` by site, which shows itself as tables.

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
    >>> X = jnp.linspace(0.0, 3.0, 12)[:, None]
    >>> data = X, jnp.sin(X[:, 0])
    >>> fitted = sgp.fit(model, sgp.SVGP(4), data, progress_bar=False)
    >>> found = fitted.predict(X[:3])
    >>> list(found), found.to_dataframe().shape
    (['f', 'y'], (3, 8))
    """

    #: Why a response or deterministic site of the model is not there, by its name.
    left_out: dict[str, str] = {}

    def __missing__(self, name):
        known = f"{name!r} is not among what is predicted: {', '.join(self)}."
        raise KeyError(self.left_out.get(name, known))

    def to_dataframe(self):
        """
        A :class:`pandas.DataFrame` with a row for each row of X, and columns by site and
        name.

        :raises ValueError: if sites have numbers of rows that differ, and so are of other
            rows; each has a table of its own.
        """
        import pandas as pd

        frames = {name: p.to_dataframe() for name, p in self.items()}
        lengths = {name: len(f) for name, f in frames.items() if len(f) > 1}
        if len({*lengths.values()}) > 1:
            found = ", ".join(f"{number} of '{name}'" for name, number in lengths.items())
            raise ValueError(
                f"One table has the same rows for all sites, but there are {found}. Make "
                f"one for each: predictions['{min(lengths)}'].to_dataframe()."
            )
        return pd.concat(frames, axis=1)

    def __repr__(self):
        return "\n".join(f"{name}\n{prediction!r}" for name, prediction in self.items())


@alone
def predict(
    guide,
    params: dict,
    *args,
    quantiles: Sequence[float] = (0.05, 0.95),
    num_draws: int = 100,
    rng_key: Array | None = None,
    batch_size: int = 10_000,
    kept: dict | None = None,
    **kwargs,
) -> Predictions:
    r"""
    Means, standard deviations and quantiles of f, of deterministic sites and of the
    responses at new inputs, under an :class:`~numpyro_sgp.AutoSparseGP`, in O(N M^2); of
    Bernoulli, Categorical and :class:`~numpyro_sgp.likelihoods.RobustMax` responses the
    class probabilities.

    The marginals of f at each row are integrated out of the moments, the probabilities and
    the cdf that the response's distribution has in the model's code. Moments and
    probabilities are by Gauss-Hermite quadrature for one to three latent functions, and by
    2048 quasi-random numbers for more. Quantiles solve :math:`E[F(y \mid f)] = p`, with 64
    evenly spaced values of f where as many others agree, and levels are right to about
    0.0001; with 512 values of equal probability where they do not (2048 quasi-random ones
    for several functions), and to about 0.001. Of a discrete response they are the smallest
    values that reach the level. A response that is normal whatever f is (a mean that is
    linear in f, a scale that is not of f) has those of a normal distribution, or of a
    mixture of such, and exact moments. One whose distribution has no cdf (or no moments) is
    drawn instead. One that has no cdf and cannot be drawn is left out, with a warning but
    for a :class:`~numpyro_sgp.BlackBox` without ``sample``.

    Deterministic sites that are linear in f are exact too. Of others moments are by the
    same nodes, and where a rule with one node more or fewer has others, because of a jump
    or a kink, by those of quantiles: a probability ``f > c`` is right to about 0.001, one
    of several functions (``f > g``) to about 0.005. Their quantiles
    are between the values at these, to about 0.001 of a level (0.005 at single rows of
    what is made of several functions), and none beyond the outermost.

    What q(f) is given is drawn ``num_draws`` times, as in
    :func:`~numpyro_sgp.log_predictive_density`: other latents where the base guide is a
    distribution of them, and the inner layers of a deep GP. Where a response is of several
    rows of f (a difference, a sum over areas), all are drawn together instead, 2048 times,
    in O(N^3). Masks do not matter: a response is predicted where it was not observed.

    It may be called inside of :func:`jax.jit`, :func:`jax.vmap` and :func:`jax.grad`, as an
    acquisition function does, with ``quantiles=()`` where none are used: they take most of
    the time. Quantiles of a discrete response have derivatives of zero, and those of a beta
    one derivatives forwards alone (:func:`jax.jacfwd`).

    :param guide: the guide, trained or loaded.
    :param params: its parameters.
    :param args: arguments of the model with the new inputs, and ``y=None``. A response that
        is given all the same is predicted as if it were not, and what depends on it is
        predicted given its value.
    :param quantiles: levels between 0 and 1; none, ``()``, saves most of the time.
    :param num_draws: number of draws of other latents and of inner layers; without effect
        if there are none.
    :param rng_key: key of what is drawn; ``jax.random.key(0)`` if None.
    :param batch_size: rows done at a time: where arguments of the model are arrays with
        more rows, all that have as many as the first one are cut.
    :param kept: of a :class:`~numpyro_sgp.Predictor` of the same guide and parameters,
        ``predictor.kept``, and of a model that computes the same as then: what need not be
        computed again.
    :return: a :class:`Prediction` for each GP site, each response that depends on one, and
        each deterministic site whose rows are made of one row of GP sites and of the
        arguments each, by operations of numbers, such as a rate
        ``numpyro.deterministic("rate", jnp.exp(f))``; others are left out.
    :raises ValueError: if the likelihood of a deep GP ties rows together, a response
        depends on another one that is not given, levels are not between 0 and 1, or
        ``guide.posterior`` raises it.

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> def model(X, y=None):
    ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
    >>> X, y = jnp.arange(5.0)[:, None], jnp.array([1, 2, 4, 2, 1])
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
    >>> predictions = sgp.predict(guide, result.params, X)
    >>> predictions["y"].mean.shape, predictions["y"].quantiles.shape
    ((5,), (2, 5))
    """
    levels = check_levels(quantiles)
    check_whole(batch_size, "batch_size", least=1)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_key(rng_key)
    check_guide(guide)
    guide.check_params(params)
    args, kwargs = guide.as_set_up(args, kwargs)
    refuse_sparse(guide.model, args, kwargs)
    with running(guide.model) as states:
        options = levels, num_draws
        more = options, batch_size, kept, states
        return _predict(guide, params, args, kwargs, rng_key, *more)


def _predict(guide, params, args, kwargs, rng_key, options, *more):
    guide.check_rows(args, kwargs, of_responses=True)
    guide.check_finite(params, args, kwargs)
    found = None
    if not any(has_no_numbers(leaf) for leaf in jax.tree.leaves((args, kwargs))):
        found = _in_batches(guide, params, rng_key, (args, kwargs), options, *more)
    if found is None:
        try:
            found = _all_at_once(guide, params, rng_key, (args, kwargs), options)
        except NEEDS_KNOWN_DATA:
            guide.posterior(params, *args, **kwargs)  # which says why, if X is strings
            raise
    absent = [name for name, p in found.items() if p is None]
    found = {name: p for name, p in found.items() if p is not None}
    means = [p.mean for p in found.values() if p.mean is not None]
    if not all(np.isfinite(mean).all() for mean in means if not_jax_tracer(mean)):
        guide.posterior(params, *args, **kwargs)  # which says why, if it is f
    return with_reasons(guide, found, absent)


def with_reasons(guide, found, absent) -> Predictions:
    """Predictions that say why others are not there; with a warning but for black boxes."""
    places = {name: place for place, name in enumerate(guide.prototype_trace)}
    names = sorted(found, key=lambda name: places.get(name, len(places)))
    predictions = Predictions((name, found[name]) for name in names)
    warn_of_angles(guide.prototype_trace, predictions)
    predictions.left_out = {
        name: f"Deterministic site '{name}' is not predicted: a row of it has to be made "
        "of one row of GP sites (and, of many rows, of the model's arguments alone) by "
        "operations of numbers. Sums over rows, f[index], draws, responses and what is not "
        "of GP sites are left out. Joint draws have it: "
        f"fitted.sample(key, X, sample_shape=(500,))['{name}']."
        for name in {**guide.prototype_trace, **dict.fromkeys(absent)}
        if name not in found and _is_deterministic(guide, name)
    }
    for name in absent:
        if name in predictions.left_out:
            continue
        fn = messages.innermost(guide.prototype_trace[name]["fn"])
        predictions.left_out[name] = told = (
            f"Response '{name}' is not predicted: its distribution "
            f"({type(fn).__name__}) has no cdf and cannot be drawn from. Give it a method "
            "sample, or average over draws of f by guide.sample_posterior."
        )
        if not isinstance(fn, BlackBox):
            warnings.warn(told, stacklevel=1)  # of one place, so shown once
    return predictions


def _is_deterministic(guide, name):
    """Whether a site was so at the set-up, or is new."""
    site = guide.prototype_trace.get(name)
    return site is None or site["type"] == "deterministic"


def _in_batches(guide, params, rng_key, given, options, batch_size, kept, states):
    """By a program of so many rows; None if the model needs known data."""
    arrays, static = split_static(given)
    plan = None if guide.couples_rows else plan_of(guide, arrays, static, batch_size)
    rows = None if plan is None else plan.rows(arrays, batch_size)
    several = rows is not None and rows.count(arrays) > batch_size
    briefly = rows is not None and rows.count(arrays) <= FEW_ROWS
    axes = {} if rows is None else rows.sites
    sites, levels, parts = guide.approximations, options[0], []
    are_all = rows is None or rows.count(arrays) <= min(batch_size, AS_THEY_ARE)
    options = *options, None if are_all else (rows.arguments, plan.deterministic(arrays))
    program_of_rows = program(guide, predict_rows)

    def run(batch):
        nonlocal kept
        if several and kept is None:
            where, kept = join_static(batch, static), {}
            if not guide.draws_others(params, *where):
                kept = kept_of(guide, params, *where)[0]
        told = {"static": (static, *options), "briefly": briefly}
        state = states(batch, static)
        return program_of_rows(params, rng_key, batch, kept, state=state, **told)

    try:
        found = by_batches(run, arrays, batch_size, rows)
    except NEEDS_KNOWN_DATA:  # a model that counts groups, say
        return None
    absent = dict.fromkeys(k for k, v in found[0][0].items() if v is None)
    for each, count, size in found:
        share = count / max(size, 1)
        parts.append(read_rows(each, sites, _longest(each, sites), share, levels, axes))
    return {name: _joined([p[name] for p in parts]) for name in parts[0]} | absent


def _all_at_once(guide, params, rng_key, given, options):
    """By a program of these arguments of the model alone."""
    static = all_static(given), *options, None
    run = jax.jit(lambda params, key: predict_rows(guide, params, key, [], static=static))
    found, sites = run(params, rng_key), guide.approximations
    absent = dict.fromkeys(k for k, v in found.items() if v is None)
    return read_rows(found, sites, _longest(found, sites), 1.0, options[0]) | absent


def _longest(found, gp_sites) -> int:
    """Rows of the GP site that has most."""
    return max(_shape(found[name])[-1] for name in gp_sites)


def read_rows(found, gp_sites, num_rows, keep, levels, axes=None) -> dict[str, Prediction]:
    """
    Predictions of a batch of rows.

    :param found: what :func:`predict_rows` returns.
    :param num_rows: of GP sites.
    :param keep: which part of the rows counts; the others fill the batch up.
    :param axes: of the rows, by site; of others by their number.
    """
    out, axes = {}, axes or {}
    for name, values in found.items():
        if values is None:
            continue
        known = values if isinstance(values, OfRows) else None
        values = values if known is None else known.values
        shape = _shape(values)
        axis = axis_of_rows(shape, shape[-1] if name in gp_sites else num_rows)
        axis = axes.get(name, axis) if known is None else known.row_axis
        if keep < 1.0 and (name in axes or name in gp_sites or known is not None):
            count = round(keep * shape[axis])
            for key, value in values.items():
                if value is not None:
                    lead = axis + (key == "quantiles")
                    values[key] = jax.lax.slice_in_dim(value, 0, count, axis=lead)
        out[name] = Prediction(**values, levels=levels, row_axis=axis)
    return out


def axis_of_rows(shape: tuple[int, ...], num_rows: int) -> int:
    """The last axis of so many, or the last one of all."""
    last = max(len(shape) - 1, 0)
    return last - shape[::-1].index(num_rows) if num_rows in shape else last


def _shape(values) -> tuple[int, ...]:
    """That of a site's values."""
    has_mean = values["mean"] is not None
    return jnp.shape(values["mean"]) if has_mean else values["probs"].shape[:-1]


def _joined(parts) -> Prediction:
    """One prediction of those of several batches."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def join(name):
        values = [getattr(p, name) for p in parts]
        if values[0] is None:
            return None
        return jnp.concatenate(values, axis=first.row_axis + (name == "quantiles"))

    joined = {name: join(name) for name in ("mean", "sd", "quantiles", "probs")}
    return replace(first, **joined)

"""The Pareto k-hat of a guide: can its draws be reweighted to the posterior?"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_sgp._programs import begun_on_data, mapped
from numpyro_sgp.guides.point_latents import point_latents
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.coupling import feeding

#: Rows of X up to which k-hat is computed unasked, where the joint covariance of f(X) is
#: factorised once, and where each draw has its own (or numbers have 7 digits only).
MAX_ROWS, MAX_ROWS_EACH = 1000, 200
#: Draws that k-hat is made of.
NUM_DRAWS = 1000
_FEWEST = 3  # effective draws
_EQUAL = 1e-3  # by which the logs of weights differ that are equal but for rounding
_CHUNK_NUMBERS = 3e7
_MATRICES = 8  # of N x N numbers that a draw needs at the same time


def guide_khat(
    rng_key,
    params: dict,
    model,
    guide,
    *args,
    num_particles: int = NUM_DRAWS,
    given_points: bool = False,
    **kwargs,
) -> float:
    r"""
    PSIS k-hat of a guide [1, 2], as ArviZ fits it, in bounded memory; NaN with a warning
    where the guide has no density over all latents.

    The weights :math:`p(y, f(X), \theta) / q(f(X), \theta)` are those of joint draws of
    all latent sites. Below 0.5 they have a variance; above :func:`good_k` (0.67 for 1000
    draws) the guide is too far from the posterior for them to mend it. That is strict: the
    marginals, and predictions, may still be good, and where N is large most approximations
    are above it. A guide that holds a latent at a point (``AutoDelta``) has no density that
    weights could be made of: no draw is away from that point, so that weights would say
    nothing about the posterior of this latent; with ``given_points`` they are about that of
    the other latents, given it. Hyperparameters that are numbers or
    :func:`numpyro.param` are part of the model, and k-hat is given them.

    Cost :math:`O(N^3)`, of each draw if the guide draws the kernel's hyperparameters. In
    float32 rounding adds noise to the weights of N in the hundreds, which makes k-hat
    larger: of a guide that is exact it was 0.3 at N = 200, 1.0 at N = 600.

    :param rng_key: random key.
    :param params: parameters, ``result.params`` of ``svi.run``.
    :param model: the model.
    :param guide: the guide.
    :param args: arguments of both, with all of the data.
    :param num_particles: number of draws.
    :param given_points: whether latents at points are taken for known.
    :param kwargs: keyword arguments of both.
    :return: k-hat; infinite if a few draws have all the weight, NaN where latents are held
        at points that are not taken for known.

    **References:**

    1. Yao, Vehtari, Simpson, Gelman (2018). Yes, but Did It Work?: Evaluating Variational
       Inference. ICML. https://arxiv.org/abs/1802.02538
    2. Vehtari, Simpson, Gelman, Yao, Gabry (2024). Pareto Smoothed Importance Sampling.
       JMLR 25(72). https://arxiv.org/abs/1507.02646

    >>> import jax, jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> from numpyro_sgp.diagnostics.khat import guide_khat
    >>> def model(y):
    ...     x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> guide = AutoNormal(model)
    >>> _ = numpyro.handlers.seed(guide, 0)(1.0)  # sets it up
    >>> params = {"x_auto_loc": 0.5, "x_auto_scale": 0.8}  # a bit too wide
    >>> guide_khat(jax.random.key(0), params, model, guide, 1.0) < 0.7
    True
    """
    try:
        points = point_latents(guide, params, args, kwargs)
        if points and not given_points:
            raise ValueError(
                f"it holds the latents {sorted(points)} at points. Draw them: "
                "base_guide=AutoNormal or AutoMultivariateNormal"
            )
        options = {"num_particles": num_particles, **kwargs}
        return weigh(rng_key, params, model, guide, *args, **options).khat
    except Exception as error:
        warnings.warn(
            f"The guide has no k-hat, as its draws could not be weighted: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return float("nan")


class Weighed(NamedTuple):
    """
    What importance weights of a guide's draws tell.

    :param khat: as :func:`guide_khat`; zero where there is no tail, as all weights, or the
        largest ones, are the same.
    :param gap: what they see of the KL divergence from the guide to the posterior, in nats.
    :param error: standard error of that.
    :param moments: of GP values, by site: how far means and standard deviations are off.
    :param spread: standard deviation of the weights' logs.
    """

    khat: float
    gap: float
    error: float
    moments: dict[str, "Moments"]
    spread: float = 0.0


class Moments(NamedTuple):
    """
    What weighted draws say of unweighted ones, for each number of a site.

    :param shift: the weighted mean less the plain one, in weighted standard deviations.
    :param shift_error: its standard error.
    :param spread: log of the plain standard deviation over the weighted one.
    :param spread_error: its standard error.
    """

    shift: np.ndarray
    shift_error: np.ndarray
    spread: np.ndarray
    spread_error: np.ndarray


def weigh(
    rng_key, params: dict, model, guide, *args, num_particles: int = NUM_DRAWS, **kwargs
) -> Weighed:
    r"""
    Weights draws of a guide, latents at points taken for known.

    The log of the weights' mean less the mean of their logs is less than
    :math:`\mathrm{KL}[q \| p(\cdot \mid y)]` on average, and far less where k-hat is large.

    The arguments are those of :func:`guide_khat`.

    :raises Exception: as the model and the guide do, where either has no density.
    """
    return begin_weigh(rng_key, params, model, guide, args, kwargs, num_particles)()


def begin_weigh(
    rng_key, params, model, guide, args, kwargs, num_particles: int = NUM_DRAWS
) -> Callable[[], Weighed]:
    """What is to be called for :func:`weigh`; compiles beside."""
    rows, each = _size(params, model, guide, args, kwargs)
    chunk = num_particles
    if each:
        chunk = int(np.clip(_CHUNK_NUMBERS // (_MATRICES * rows**2), 1, chunk))

    def log_weights(args, kwargs, params, key):
        def of_draw(key):
            return log_weight(key, params, model, guide, args, kwargs)

        return mapped(of_draw, jax.random.split(key, num_particles), chunk)

    program = begun_on_data(log_weights, args, kwargs, params, rng_key)

    def finish():
        found, values = program()
        values = {name: np.asarray(value, float) for name, value in values.items()}
        return weighed(np.asarray(found, float), values)

    return finish


def log_weight(
    rng_key, params: dict, model, guide, args: tuple, kwargs: dict
) -> tuple[Array, dict[str, Array]]:
    """
    The log weight of one draw of the guide, and its values at GP sites.

    The arguments are those of :func:`guide_khat`.
    """
    model_key, guide_key = jax.random.split(rng_key)
    seeded = handlers.seed(guide, guide_key)
    log_q, drawn = log_density(seeded, args, kwargs, params)
    given = handlers.substitute(model, data=messages.drawn(drawn))
    replayed = handlers.replay(handlers.seed(given, model_key), drawn)
    log_p, trace = log_density(replayed, args, kwargs, params)
    latents = messages.latents(trace).items()
    return log_p - log_q, {k: s["value"] for k, s in latents if messages.is_latent_gp(s)}


def weighed(
    log_weights: np.ndarray, values: dict[str, np.ndarray] | None = None
) -> Weighed:
    """
    What the log weights of draws tell.

    :param log_weights: of S draws.
    :param values: of the draws by site, ``(S, ...)``.
    """
    from arviz_stats.base import array_stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few draws in the tail: k-hat is infinite
        if _has_no_tail(log_weights):
            smoothed, khat = log_weights, 0.0
        else:
            smoothed, khat = array_stats.psislw(-log_weights)
    top = log_weights.max()
    weights = np.exp(log_weights - top)
    gap = np.log(weights.mean()) + top - log_weights.mean()
    if weights.sum() ** 2 < _FEWEST * np.sum(weights**2):  # too few in the tail to fit it
        khat = np.inf
    # By first derivatives of both means, which are of the same draws and move together.
    terms = weights / weights.mean() - log_weights
    error = float(np.std(terms, ddof=1) / np.sqrt(len(log_weights)))
    moments = {k: moments_of(smoothed, v) for k, v in (values or {}).items()}
    spread = float(np.std(log_weights))
    return Weighed(float(khat), float(gap), error, moments, spread)


def _has_no_tail(log_weights) -> bool:
    """Whether weights are equal but for rounding, or those that PSIS fits are equal."""
    largest = np.sort(log_weights)
    number = min(0.2 * len(largest), 3.0 * np.sqrt(len(largest)))
    tail = largest[-int(np.ceil(number)) :]
    if not np.isfinite(tail).all():
        return False
    return bool(largest[-1] - largest[0] < _EQUAL or len(tail) > 1 and tail[0] == tail[-1])


def moments_of(log_weights: np.ndarray, values: np.ndarray) -> Moments:
    """
    How far moments of draws are from those of weighted ones. Errors are those of ratios of
    means, where both moments are of the same draws.

    :param log_weights: of S draws, smoothed.
    :param values: of the draws, ``(S, ...)``.
    :return: the moments; NaN where all draws are the same.
    """
    weights = np.exp(log_weights - log_weights.max())
    weights = (weights / weights.mean()).reshape(-1, *(1,) * (values.ndim - 1))
    with np.errstate(divide="ignore", invalid="ignore"):  # where draws are all the same
        return _moments_of(weights, values)


def _moments_of(weights, values):
    plain, mean = values.mean(0), (weights * values).mean(0)
    from_plain, from_mean = (values - plain) ** 2, (values - mean) ** 2
    variance, weighted = from_plain.mean(0), (weights * from_mean).mean(0)
    rounding = 100 * np.finfo(values.dtype).eps * np.abs(values).max(0)
    weighted = np.where(weighted > rounding**2, weighted, np.nan)
    sd = np.sqrt(weighted)
    moved = weights * (values - mean) - (values - plain)
    bent = weights * (from_mean / weighted - 1.0) - (from_plain / variance - 1.0)
    root = np.sqrt(len(values))
    return Moments(
        (mean - plain) / sd,
        moved.std(0) / sd / root,
        0.5 * np.log(variance / weighted),
        0.5 * bent.std(0) / root,
    )


def too_many_rows(params: dict, model, guide, *args, **kwargs) -> tuple[str, bool] | None:
    """
    Why k-hat is not to be computed unasked, as it is for at most 1000 rows of f(X), 200
    where the guide draws other latents or in float32; and whether it would be in float64.
    None where it is.
    """
    try:
        rows, each = _size(params, model, guide, args, kwargs)
    except Exception:
        return None  # guide_khat says what is wrong
    single = jax.numpy.result_type(float) == jax.numpy.float32
    limit = MAX_ROWS_EACH if each or single else MAX_ROWS
    if rows <= limit:
        return None
    told = f"{rows} rows, more than {limit}, are too many for the joint density of f(X)"
    in_float64 = single and rows <= (MAX_ROWS_EACH if each else MAX_ROWS)
    return told + (" in float32" if in_float64 else ""), in_float64


def good_k(num_draws: int) -> float:
    """
    The largest Pareto k at which importance weights of so many draws are to be relied on,
    :math:`\\min(1 - 1 / \\log_{10} S, 0.7)`, as ArviZ has it.

    :param num_draws: number S of draws.
    """
    return min(1.0 - 1.0 / np.log10(max(num_draws, 2)), 0.7)


def _size(params, model, guide, args, kwargs) -> tuple[int, bool]:
    """Rows of the largest GP site, and whether each draw has a covariance of its own."""
    found = {}

    def run(params):
        found.update(messages.trace_of(model, args, kwargs, jax.random.key(0), data=params))

    jax.eval_shape(run, params)
    rows = [
        s["fn"].shape()[-1]
        for s in messages.latents(found).values()
        if messages.is_latent_gp(s) or (s["fn"].event_dim and s["fn"].shape())
    ]
    latents = messages.latents(found)
    gps = {k: s["fn"].shape() for k, s in latents.items() if messages.is_latent_gp(s)}
    each = bool(latents.keys() - gps - point_latents(guide, params, args, kwargs))
    if len(gps) > 1 and not each:

        def trace_at(f):
            at = messages.at_values(f)
            return messages.trace_of(model, args, kwargs, data=params, at_site=at)

        each = bool(feeding(trace_at, gps, jax.numpy.result_type(float)))
    return max([1, *rows]), each

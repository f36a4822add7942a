"""What a fit misses: attempts to better it, each of which tells how much it gains."""

import functools
import warnings
from collections.abc import Callable

import jax
import numpy as np
from numpyro.infer.svi import SVIState
from numpyro.util import find_stack_level

from numpyro_sgp.diagnostics.bound import with_exact_kl
from numpyro_sgp.diagnostics.evidence import begin_bracket
from numpyro_sgp.diagnostics.khat import (
    NUM_DRAWS,
    Weighed,
    begin_weigh,
    good_k,
    too_many_rows,
)
from numpyro_sgp.diagnostics.optimality import begin_nats_left
from numpyro_sgp.diagnostics.sparsity import begin_curve
from numpyro_sgp.families import Diagonal
from numpyro_sgp.fitting.attempts import Attempts
from numpyro_sgp.fitting.batches import gain_in_q
from numpyro_sgp.fitting.float32 import begin_float32, is_rounded
from numpyro_sgp.fitting.hierarchies import MEND, told_of, vanished
from numpyro_sgp.fitting.integration import of_nodes
from numpyro_sgp.fitting.jitter import of_jitter
from numpyro_sgp.fitting.problem import (
    Problem,
    as_plain_arrays,
    data_as_arguments,
    unconstrained,
)
from numpyro_sgp.fitting.verdict import (
    ENOUGH_BY_POINTS,
    ENOUGH_NATS,
    IF_MORE,
    NOT_LOOKED_AT,
    Cause,
    Verdict,
    held_at_points,
    unknown,
)
from numpyro_sgp.guides.point_latents import point_latents
from numpyro_sgp.guides.row_latents import row_latents
from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.checks import check_observations, check_whole_plates
from numpyro_sgp.tracing.state import state_of

#: Sds by which a mean, and logs of a ratio by which an sd, may be off without a remark.
FAR_MEAN, FAR_LOG_SD = 0.2, 0.15
_NO_MEAN = 1.0  # k-hat above which weights have no mean
_ROUNDED = 20.0  # nats: sd of weights above which those of float32 are not believed
_HARDLY = 5e-3  # of which nothing is said
_NUM_ERRORS = 3  # at least, that such a difference is one
_MAY_DIFFER = 0.05  # share of the nats of one natural step, from which on more tell
_LARGEST = 2e8  # rows times inducing points of one pass over all data
_OTHER = (
    "The model computes something else than when it was fitted: a number or an object that "
    "it reads has changed. The check is of the fit's parameters in the model as it is now."
)
#: Further causes, from the guide, its parameters and the model's arguments; None where one
#: does not apply.
MORE_CAUSES: list[Callable[..., Cause | None]] = []


def check(
    guide, params, args, kwargs, *, svi, loss, losses, bound, descent, grown, apart, rng_key
) -> Verdict:
    """
    The verdict on a fit; see :meth:`~numpyro_sgp.Fitted.check`, whose attributes these are.
    """
    args, kwargs = as_plain_arrays(guide.model, args, kwargs)
    plates = _check_observed(guide, args, kwargs)
    given = guide, params, args, kwargs
    with data_as_arguments("svi.run(key, steps, X, group, y, num_groups=8)"):
        problem = problem_at(svi, params, args, kwargs)
    if descent is not None and _is_other(descent.computed, svi, problem):
        warnings.warn(_OTHER, stacklevel=find_stack_level())
        descent = None
    points = sum(option.num_points for option in guide.approximations.values())
    small = problem.num_rows * points <= _LARGEST
    attempts = Attempts(problem, rng_key, descent)
    left = weights = curve = bracket = None
    # Their programs are compiled while the attempts go on.
    if problem.natural and small:
        left = functools.cache(_begun(begin_nats_left, *given, loss, rng_key))
    too_many = too_many_rows(params, guide.model, guide, *args, **kwargs)
    if not too_many:
        weights = _begun(_weigh, plates, rng_key, params, guide, args, kwargs)
    if small:
        curve = _begun(begin_curve, *given, loss, rng_key, left=left)
    if small and len(guide.approximations) == 1:
        bracket = _begun(begin_bracket, *given)
    digits = begin_float32(problem, attempts.steps)
    others = attempts.of_others(losses)
    if gone := vanished(guide, params, args, kwargs):
        others = Cause(others.name, np.nan, told=told_of(gone), mend=MEND)
    if bracket is not None:
        try:
            bracket = bracket()
        except Exception:  # a likelihood without derivatives, for one
            bracket = None
    of_q = _of_q(left, rng_key, problem)
    is_gaussian = bracket is not None and not bracket.unknown
    nodes = None if is_gaussian else _begun(of_nodes, problem, rng_key)
    beside, narrow = np.nan, _is_narrow(guide)
    if bracket is not None and not narrow and not _is_single():
        beside = bracket.gain - of_q.nats  # which has what jitter costs in float32
    of_digits = None if digits is None else digits(attempts.descent, others)
    rounded = of_digits is not None and of_digits.nats > ENOUGH_NATS
    found = [
        of_q,
        others,
        _of_points(curve, points, beside, len(guide.approximations), narrow, bool(grown)),
        _within(
            bracket,
            _of_family(weights, given, too_many, rounded or is_rounded(attempts.descent)),
        ),
        _of_latents(given),
    ]
    found += [of_digits] if of_digits is not None else []
    found += of_jitter(problem, attempts.descent, found[2:4])
    found += _of_nodes(nodes)
    if not rounded:  # by which trainings end apart too
        found += attempts.of_optima(apart)
    found += [cause for more in MORE_CAUSES if (cause := more(*given)) is not None]
    return Verdict({cause.name: cause for cause in found}, bracket, bound)


def _is_other(computed, svi, problem) -> bool:
    """Whether a model computes something else than it did; False where it is not known."""
    kwargs, (has_64_bits, before) = {**svi.static_kwargs, **problem.kwargs}, computed
    with jax.enable_x64(has_64_bits):  # as it had then
        now = state_of(svi.model, problem.args, kwargs)
    return isinstance(now, bytes) and before not in (None, now)


def _begun(begin, *args, **kwargs) -> Callable:
    """What ``begin`` returns, a function, with its own errors raised when it is called."""

    def quietly(fn, *args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args, **kwargs)

    try:
        return functools.partial(quietly, quietly(begin, *args, **kwargs))
    except Exception as error:
        failed = error

    def fail():
        raise failed

    return fail


def _weigh(plates, rng_key, params, guide, args, kwargs):
    """Weights of draws, where a model has all of its rows."""
    check_whole_plates(plates, "weights of draws are of every row")
    return begin_weigh(rng_key, params, guide.model, guide, args, kwargs)


def _check_observed(guide, args, kwargs) -> dict:
    """The plates of the model, whose messages are checked for observations."""
    observed, plates = [], {}

    def run():
        where = guide.model, args, kwargs
        trace = messages.trace_of(*where, at_site=messages.at_prior_mean)
        check_observations(trace)
        observed.extend(s for s in trace.values() if s["type"] == "sample")
        plates.update({k: s for k, s in trace.items() if s["type"] == "plate"})
        return 0

    jax.eval_shape(run)
    if not any(site["is_observed"] for site in observed):
        raise ValueError(
            "The model has no observed site with these arguments. Give all of the data: "
            "fitted.check(X, y)."
        )
    return plates


def problem_at(svi, params, args, kwargs) -> Problem:
    """What was trained, at some parameters."""
    if getattr(svi.guide, "natural_rate", 1.0) is None:  # of one from a file
        svi.guide.take_natural_gradients(1.0)
    if svi.constrain_fn is None:
        svi.init(jax.random.key(0), *args, **kwargs)
    free = unconstrained(svi, params)
    state = SVIState(svi.optim.init(free), None, jax.random.key(0))
    problem = Problem(svi, state, args, kwargs)
    options = getattr(svi.guide, "approximations", {}).values()
    drawn = any(option.draws_kl for option in options)
    return problem.with_loss(with_exact_kl(svi.loss)) if drawn else problem


def _of_q(left, rng_key, problem):
    """KL from q(u) to where a natural step leads."""
    name = "q(u)"
    if not problem.natural:
        return Cause(name, np.nan, told="is trained with the other parameters")
    if left is None:
        return Cause(name, np.nan, told=NOT_LOOKED_AT)
    try:
        nats, why = left()
    except Exception as error:  # a likelihood without derivatives, for one
        return Cause(name, np.nan, told=unknown(error))
    if np.isnan(nats):
        return Cause(name, nats, told=f"unknown: {why}")
    told = "by one natural step"
    if np.isinf(nats):
        told = "the bound is not concave in q(u) here"
        if not problem.random:
            nats, told = gain_in_q(problem, rng_key), f"by natural steps: {told}"
    elif nats > ENOUGH_NATS and not problem.random:
        # One step tells much of likelihoods that are nearly Gaussian; and of slopes that
        # rounding makes dozens, where steps find nothing to gain.
        gained = gain_in_q(problem, rng_key)
        if abs(gained - nats) > _MAY_DIFFER * nats:
            told = f"by natural steps; one tells of {nats:.2g}"
            nats = max(gained, 0.0)
    mend = "train longer: natural gradients (sgp.fit) end this in some steps"
    return Cause(name, nats, told=told, mend=mend if nats > ENOUGH_NATS else "")


def _of_nodes(nodes) -> list[Cause]:
    """What more nodes than the bound's own say, where it is enough to be told."""
    try:
        return [] if nodes is None else nodes()
    except Exception as error:
        return [Cause("quadrature", np.nan, told=unknown(error))]


def _within(bracket, of_family: Cause) -> Cause:
    """No more than a bracket of the evidence leaves between the bound and its upper end."""
    most = np.nan if bracket is None else bracket.upper - bracket.lower + bracket.gain
    if not of_family.nats > max(most, 0.0):
        return of_family
    told = f"{of_family.told}; the bracket of the evidence leaves no more"
    mend = of_family.mend if most > ENOUGH_NATS else ""
    return Cause(of_family.name, max(most, 0.0), told=told, mend=mend)


def _of_points(curve, points, beside, sites, narrow=False, grown=False):
    """
    What orthogonal points would gain.

    :param points: inducing points of all GP sites.
    :param beside: what they do with the best q(u) beside them, where that is known.
    :param sites: number of GP sites.
    :param narrow: whether a best q(u) would be another family's.
    :param grown: whether a fit has chosen their number.
    """
    name = "inducing points"
    if curve is None:
        return Cause(name, np.nan, told="unknown: too many rows")
    try:
        curve = curve()
    except Exception as error:
        return Cause(name, np.nan, told=unknown(error))
    if curve.unknown:
        return Cause(name, np.nan, told=f"unknown: {curve.unknown}")
    se = float(curve.se[-1]) if curve.se else 0.0
    told, mend, lost = str(curve), "", curve.lost
    told += ", with q(u) as it is" if narrow else ""
    if beside > max(lost, ENOUGH_NATS):
        told = f"{beside:.2g} where q(u) moves with further points; as it is: {told}"
        lost = beside
    if lost > (ENOUGH_BY_POINTS if grown else ENOUGH_NATS):
        each = further = max(curve.added, default=points // sites)  # at each site
        if curve.needed == curve.num_inducing:  # as far as these hyperparameters know
            each = min(points // sites, further)
        elif curve.needed:
            each = -(-(curve.needed - points) // sites)
        number = f"{each} more" if sites > 1 else str(points + each)
        number = number if curve.needed else f"more than {number}"
        where = " at each GP site" if sites > 1 else ""
        auto = (
            "more than 'auto' took" if grown else "num_inducing='auto' looks for a number"
        )
        mend = f"{number} inducing points{where} ({auto}), and a check again: trained with "
        mend += "more of them, hyperparameters may gain several times as much"
    return Cause(name, lost, se, told, mend)


def _of_family(weights, given, too_many, rounded):
    """
    All that is between q and the posterior, as importance weights see it.

    :param rounded: whether rounding to float32 may be all that they see.
    """
    name = "family"
    if weights is None:
        told, in_float64 = too_many
        mend = "numpyro.enable_x64() at the beginning of the program" if in_float64 else ""
        return Cause(name, np.nan, told=f"unknown: {told}", mend=mend)
    try:
        found = weights()
    except Exception as failed:  # a distribution without a density, for one
        return Cause(name, np.nan, told=unknown(failed))
    guide = given[0]
    cause = family(found, point_latents(*given), _has_uncoupled(guide), _is_narrow(guide))
    if rounded and cause.nats > ENOUGH_NATS:
        return _may_be_rounding(f"weights of draws tell of {cause.number} nats")
    return cause


def _may_be_rounding(what: str) -> Cause:
    """The row of weights where rounding may be what they are made of."""
    mend = "numpyro.enable_x64() before the fit"
    return Cause(
        "family", np.nan, told=f"unknown: {what}, which may be rounding", mend=mend
    )


def _is_single() -> bool:
    """Whether JAX computes in float32."""
    return not jax.config.jax_enable_x64  # type: ignore[attr-defined]


def _has_uncoupled(guide) -> bool:
    """Whether a GP site has several latent functions with a q(u) of their own."""
    for name, option in guide.approximations.items():
        functions = messages.unwrap(guide.prototype_trace[name]["fn"])[0].batch_shape
        if np.prod(functions) > 1 and option.family.independent_latents:
            return True
    return False


def _is_narrow(guide) -> bool:
    """Whether a GP site has a diagonal covariance."""
    return any(isinstance(o.family, Diagonal) for o in guide.approximations.values())


def family(found: Weighed, points, uncoupled=True, narrow=False) -> Cause:
    """
    The row of importance weights.

    :param found: what weights of draws tell.
    :param points: latents that they are given.
    :param uncoupled: whether there are functions that may be coupled.
    :param narrow: whether covariances have less than all entries.
    """
    name, limit = "family", good_k(NUM_DRAWS)
    if not np.isfinite(found.gap):
        return Cause(name, np.nan, told="unknown: draws of q have no weights")
    single = _is_single()
    if single and found.spread > _ROUNDED:
        return _may_be_rounding(f"weights of draws have an sd of {found.spread:.2g} nats")
    told = "what is between q and the posterior near it, with the causes above"
    if single:
        told += " and rounding to float32"
    told += f" (given {', '.join(sorted(points))})" if points else ""
    told += f": by weights of k-hat {found.khat:.2f}"
    told += "" if found.khat <= limit else f", above {limit:.2f}, so at least"
    mend = ""
    off = []
    if found.khat <= _NO_MEAN:  # above, moments are those of a few draws
        off = [_moments(site, moments) for site, moments in found.moments.items()]
    told += "".join(words for words, _ in off)
    if found.gap > max(1.0, 3.0 * found.error) or any(far for _, far in off):
        coupled = "covariance='coupled', " if uncoupled else ""
        full = "covariance='full' (of SVGP or VGP), " if narrow else ""
        mend = f"{IF_MORE}{full}{coupled}a mixture, or MCMC"
    lower = bool(found.khat > limit)  # and its error is of what was drawn
    return Cause(name, max(found.gap, 0.0), found.error, told, mend, at_least=lower)


def _moments(site, found):
    """
    What weights say of means and standard deviations, and whether they are far off. Of many
    rows the one that is farthest off is so by its error too: two of these are taken off.
    """
    far, least = False, []
    pairs = (found.shift, found.shift_error), (found.spread, found.spread_error)
    for (value, error), enough in zip(pairs, (FAR_MEAN, FAR_LOG_SD), strict=True):
        known = np.where(np.isfinite(value) & np.isfinite(error), np.abs(value), 0.0)
        far = far or bool(np.any((known > enough) & (known > _NUM_ERRORS * error)))
        least.append(np.sign(value) * np.maximum(known - 2.0 * error, 0.0))
    shift = np.nanmax(np.abs(least[0]), initial=0.0)
    low, high = (np.exp(f(least[1], initial=0.0)) for f in (np.nanmin, np.nanmax))
    if max(shift, 1.0 - low, high - 1.0) < _HARDLY:
        return f"; by them mean and sd of {site} are right within their errors", far
    words = f"; by them the mean of {site} is off by about {shift:.2g} sd or more "
    words += f"somewhere, and its sd is {low:.2g} to {high:.2g} of theirs or further off"
    return words, far


def _of_latents(given):
    """Latents at points, and those with a q of their own beside that of f."""
    guide, params, args, kwargs = given
    points = sorted(point_latents(guide, params, args, kwargs))
    beside = sorted({*guide.known().latents} - {*points})
    apart = f"q of {', '.join(beside)} is apart from that of f: standard deviations may be "
    apart += "far too small"
    if beside and not points:
        told = f"there are none, but {apart}"
        return Cause("point estimates", np.nan, told=told, mend="sgp.nested, or MCMC")
    blind = "LOO, evidence and intervals do not know their spread"
    if of_rows := [name for name in row_latents(guide.known()) if name in points]:
        # Whose joint density is highest where they explain what f and the noise should.
        told = f"{', '.join(of_rows)}, with an entry for each row, held at points, may"
        told += " take from f and from the noise what is theirs"
        mend = "sgp.fit with joint=True, sgp.nested, base_guide=AutoNormal, or MCMC"
        whole = f"{', '.join(points)}: {blind}; {told}"
        return Cause("point estimates", np.nan, told=whole, mend=mend, headline=told)
    return held_at_points(
        points,
        f"{blind}; {apart}" if beside else blind,
        "sgp.nested, sgp.fit with joint=True for effects beside f, or MCMC",
    )

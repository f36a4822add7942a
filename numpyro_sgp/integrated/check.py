"""What nested inference misses, in nats, at a few of its nodes."""

from __future__ import annotations

import math
import warnings
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_sgp._programs import join_static, shared, split_static
from numpyro_sgp.diagnostics.khat import NUM_DRAWS, good_k
from numpyro_sgp.diagnostics.khat import weighed as weighed_draws
from numpyro_sgp.fitting.other_data import inputs_of
from numpyro_sgp.fitting.verdict import (
    ENOUGH_NATS,
    FLOAT32,
    OTHER_OPTIMA,
    Cause,
    Verdict,
    held_at_points,
    unknown,
)
from numpyro_sgp.guides import SVGP, AutoSparseGP
from numpyro_sgp.guides.points import point_name, points_of
from numpyro_sgp.integrated.digits import LEAN, of_digits
from numpyro_sgp.integrated.field import Field
from numpyro_sgp.integrated.nodes import LARGER, Nodes
from numpyro_sgp.integrated.profile import Node, Profile
from numpyro_sgp.integrated.row_parts import need_layout, rows_have_one_group
from numpyro_sgp.integrated.starts import distinct, ends_elsewhere
from numpyro_sgp.integrated.weighing import draws
from numpyro_sgp.tracing import messages

_LOOKED_AT = 5
_ENDS, _COORDINATES = (0.05, 0.95), 10  # of the mass, of so many coordinates
_TOLD_BEYOND = 5e-3  # of the mass
_AS_FAR = 0.1  # nats from the best, is an end that is there
# Of ends of natural steps, where they are so many, such a share at the best says that there
# is none better.
_MANY_ENDS, _SHARE = 40, 0.25
_SHARE_LOST = 0.05  # of the mass, with which sds are far larger than those of one optimum


def check(field: Field, nodes: Nodes, args: tuple, kwargs: dict) -> Verdict:
    """The verdict; see :meth:`~numpyro_sgp.Nested.check`, whose attributes these are."""
    need_layout(field, nodes.nodes[0].free, args, kwargs)
    profile = Profile(field, args, kwargs, nodes.points)
    # As they are without weights, and of a file, which has no q(w).
    places = spread_out(nodes)
    outer = [node for node in at_quantiles(nodes) if not any(node is p for p in places)]
    # Where a likelihood is not log-concave, steps from elsewhere may lead to other optima.
    means = [node.weighed.mean for node in places + outer]
    found = [
        profile(node.free, profile.about(mean))[0]
        for node, mean in zip(places + outer, means, strict=True)
    ]
    chosen = found[: len(places)]
    if not all(np.isfinite(node.value) for node in chosen):
        _check_groups(field, nodes, args, kwargs)
    weighed = any(float(node.weighed.effective) < 1.0 for node in nodes.nodes)
    digits = of_digits(profile, nodes.points, found, means, args, kwargs)
    rounded = digits is not None and digits.nats > ENOUGH_NATS
    causes = {
        "q(u)": _of_q(nodes),
        "other parameters": _of_nodes(nodes, rounded),
        "inducing points": _of_points(
            profile, nodes.points, found, means, args, kwargs, rounded
        ),
        "family": _of_family(profile, chosen, args, kwargs, weighed),
        "point estimates": _of_latents(field, nodes),
    }
    if digits is not None:
        causes[FLOAT32] = digits
    if not rounded:
        highest = max(chosen, key=lambda node: node.value)
        causes |= _of_optima(highest, ends_elsewhere(profile, highest))
    return Verdict(causes, None, nodes.log_evidence)


def _check_groups(field, nodes, args, kwargs):
    """
    :raises ValueError: where rows of these data are not of one group each.
    """
    if field.groups is None:
        return
    if not rows_have_one_group(field, nodes.nodes[0].free, args, kwargs):
        names = " and ".join(f"'{name}'" for name in field.groups.axes)
        raise ValueError(
            f"Rows of these data have effects of several groups of {names}, where those of "
            "the inference had one each. Infer with such rows among the data."
        )


def spread_out(nodes: Nodes) -> list:
    """The mode, and nodes at even shares of the mass along the widest direction."""
    values = nodes.values
    if len(values) <= _LOOKED_AT:
        return list(nodes.nodes)
    order = np.argsort(nodes.standardised(nodes.free)[:, -1], kind="stable")
    mass = np.cumsum(nodes.weights[order])
    shares = (np.arange(_LOOKED_AT - 1) + 0.5) / (_LOOKED_AT - 1)
    places = {int(np.argmax(values)), *(order[np.searchsorted(mass, s)] for s in shares)}
    return [nodes.nodes[i] for i in sorted(places)]


def at_quantiles(nodes: Nodes) -> list:
    """
    Nodes at both ends of the mass along each coordinate, where inducing points may lose
    most.
    """
    found: dict[int, None] = {}
    for values in nodes.free.T[:_COORDINATES]:
        order = np.argsort(values, kind="stable")
        mass = np.cumsum(nodes.weights[order])
        for share in _ENDS:
            place = min(int(np.searchsorted(mass, share)), len(order) - 1)
            found[int(order[place])] = None
    return [nodes.nodes[i] for i in sorted(found)]


def _of_q(nodes):
    left = nodes.left
    if np.isnan(left):
        return Cause("q(w)", left, told="no natural step is known", mend=no_digits())
    mend = f"{no_digits()} (or it is not concave there: see `family`)"
    mend = mend if left > ENOUGH_NATS else ""
    return Cause("q(w)", left, told="by one natural step, averaged over nodes", mend=mend)


def no_digits() -> str:
    """What to do where precisions have no factor."""
    single = not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    first = "numpyro.enable_x64() at the beginning of the program, or " if single else ""
    return first + "covariates about their means and in other units, or other priors"


def _of_nodes(nodes, rounded=False):
    beyond, told = nodes.beyond, f"{len(nodes.nodes)}, effective {nodes.effective:.0f}"
    told += f", {nodes.border:.1%} of the mass at their border" if nodes.border else ""
    told += f", about {beyond:.1%} of it beyond them" if beyond > _TOLD_BEYOND else ""
    told += f" ({nodes.stopped})" if nodes.stopped else ""
    told += ", and mass that none of them meets adds to the error" if nodes.error else ""
    mend = f"more nodes: {nodes.mend}" if nodes.lacks_more else nodes.mend
    few = nodes.few_of_many and not mend
    single = not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    if mend and single and (rounded or not (nodes.several or nodes.astray)):
        # Of many rows a value is rounded by more than nodes differ.
        mend += "; or numpyro.enable_x64() at the beginning of the program"
    mend = f"{LARGER}, which shows what these miss" if few else mend
    lost = float(-np.log1p(-min(nodes.border + beyond, 0.999)))
    if nodes.too_few and (nodes.stopped or not nodes.border):
        lost = np.nan  # what is beyond, or between, is open
    if nodes.several or nodes.astray:
        lost = np.nan
    return Cause("nodes", lost, nodes.error, told, mend)


def _of_points(profile, points, chosen, means, args, kwargs, rounded):
    """
    What up to three times as many inducing points gain.

    :param chosen: nodes.
    :param means: of q(w) there.
    :param rounded: whether float32 costs so much that they may gain by their jitter alone.
    """
    name = "inducing points"
    try:
        larger = _larger(profile.field, points, args, kwargs)
        if larger is None:
            return _of_jitter(name, [node.open for node in chosen])
        richer = Profile(larger, args, kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [
                _gain(profile, richer, node, mean)
                for node, mean in zip(chosen, means, strict=True)
            ]
    except _NotTried as error:
        mend = "nested with more of them, and its log_evidence"
        return Cause(name, np.nan, told=f"unknown: {error}", mend=mend)
    except Exception as error:
        return Cause(name, np.nan, told=unknown(error))
    found = [gain for gain in found if gain > -ENOUGH_NATS]  # NaN is not
    if not found:
        told = (
            "unknown: with more of them the bound has not been found (it cannot be lower)"
        )
        return Cause(name, np.nan, told=told)
    low, high = min(found), max(found)
    number = larger.size - larger.num_effects
    told = f"{low:.2g} to {high:.2g} are gained with {number} at {len(found)} nodes"
    mend = ""
    if high - low > ENOUGH_NATS:  # half a nat may halve the sd of one
        told += LEAN
        mend = "use more inducing points, or VGP(), and see whether summary() changes"
    elif high > 1.0:
        mend = "use more inducing points"
    if mend and rounded:
        mend = f"float32 first, see below; if as much is gained then: {mend}"
    return Cause(name, max(high, 0.0), told=told, mend=mend)


def _of_jitter(name, lost):
    """What rows with a point each lose."""
    low, high = min(lost), max(lost)
    told, mend = "there is one for each row", ""
    if high > 1.0 or high - low > ENOUGH_NATS:
        told += f"; their jitter takes {low:.2g} to {high:.2g} at {len(lost)} nodes"
        mend = "a smaller jitter of the approximation: SVGP(M, jitter=...)"
        if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            mend = "numpyro.enable_x64() at the beginning of the program"
    return Cause(name, max(high, 0.0), told=told, mend=mend)


class _NotTried(Exception):
    """More points of this kind are not looked at."""


def _larger(field, points, args, kwargs) -> Field | None:
    """The same field with twice as many inducing points more at each site."""
    options: dict[str, Any] = {}
    grown, inputs = False, inputs_of(field.guide, args, kwargs)
    for name, site in field.sites.items():
        names = map(point_name, range(len(site.points)))
        own = [np.asarray(points[name][key]) for key in names]
        if any(Z.ndim > 2 for Z in own) or site.approximation.inter_domain:
            raise _NotTried(
                f"those at '{name}' are of each latent function, or inter-domain ones"
            )
        Z = np.concatenate(own)
        rows = np.unique(inputs[name], axis=0)
        number = min(2 * len(Z), len(rows))
        more = SVGP(number, seed=site.approximation.seed + 1)
        chosen = np.asarray(points_of(more.initial_points(_at(field, name), rows)[0]))
        away = np.abs(chosen[:, None] - Z).max(axis=-1).min(axis=-1)
        chosen = chosen[away > 1e-6 * (np.ptp(rows, axis=0).max() + 1e-30)]
        grown = grown or len(chosen) > 0
        jitter = site.approximation.jitter
        options[name] = SVGP(inducing=np.concatenate([Z, chosen]), jitter=jitter)
    if not grown:
        return None
    guide = AutoSparseGP(field.model, options)
    guide.setup(*args, **kwargs)
    larger = Field(guide, args, kwargs)
    larger.layout, larger.candidates = field.layout, field.candidates
    larger.groups, larger.kinked = field.groups, field.kinked
    larger.standardised = field.standardised
    return larger


def _of_optima(node: Node, ends: list[Node]) -> dict[str, Cause]:
    """
    The row of where natural steps from other means of q(w) end, at the highest node.

    :param ends: of these.
    """
    optima = distinct([node, *ends])
    if len(optima) == 1:
        return {}
    best = optima[0].value
    there = len([end for end in ends if end.value > best - _AS_FAR])
    as_high = len([end for end in optima if end.value > best - _AS_FAR])
    came = (
        f"from {len(ends)} other means of q(w) natural steps end {there} times at the best"
    )
    if as_high > 1:
        came += (
            f" of {as_high} optima as high (signs, or an order, that make no difference?)"
        )
    lower = [best - end.value for end in optima[as_high:]]
    is_it = best <= node.value + _AS_FAR
    if is_it and there >= _SHARE * max(len(ends), _MANY_ENDS):
        nats = float(np.log(sum(np.exp(end.value - best) for end in optima)))
        told = f"{came}, and else {lower[0]:.2g} nats below or more" if lower else came
        mend, headline, share = "", "", -np.expm1(-nats)
        if share > _SHARE_LOST:
            mend = "MCMC: q(w) is about one of them"
            headline = f"about {share:.0%} of the mass of f is about other optima"
        cause = Cause(OTHER_OPTIMA, nats, told=told, mend=mend, headline=headline)
        return {OTHER_OPTIMA: cause}
    told = f"the likelihood is not log-concave, or rounding is in the way: {came}"
    if lower:
        told += f", and else up to {lower[-1]:.2g} nats below"
    told += ", so that there may be better ones"
    higher = ""
    if not is_it:
        higher = f"another optimum is {best - node.value:.2g} nats higher"
        told = f"{higher}: {told}"
    mend = "sgp.fit(..., joint=True, restarts=10) and its bound, or MCMC"
    cause = Cause(OTHER_OPTIMA, np.nan, told=told, mend=mend, headline=higher)
    return {OTHER_OPTIMA: cause}


def _gain(profile: Profile, richer: Profile, node: Node, mean: Array) -> float:
    """What more inducing points gain at a node, of one optimum."""
    at = _resized(profile.field, richer.field, mean)
    best = richer(node.free, richer.about(at))[0]
    if best.value - node.value < _AS_FAR:
        return best.value - node.value
    # Much: maybe of another optimum, which there is without them too.
    back = _resized(richer.field, profile.field, best.weighed.mean)
    again = profile(node.free, profile.about(back))[0].value
    return best.value - max(node.value, again)


def _resized(field: Field, other: Field, mean: Array) -> np.ndarray:
    """
    The mean of q(w) with other numbers of inducing points, of which those that there are
    in both come first: where there are more, of the same process.
    """
    parts, end, sizes = [], 0, other.gp_sizes()
    for name, size in field.gp_sizes().items():
        start, end = end, end + size
        batch = field.gp_shapes[name][:-1]
        own = np.reshape(mean[start:end], (*batch, -1))
        number = sizes[name] // math.prod(batch)
        more = max(number - own.shape[-1], 0)
        own = np.pad(own, [(0, 0)] * len(batch) + [(0, more)])
        parts.append(own[..., :number].ravel())
    return np.concatenate([*parts, mean[end:]])


def _at(field, name):
    """The process at a site, at the hyperparameters that the set-up had."""
    prior = copy(messages.unwrap(field.guide.known().trace[name]["fn"])[0])
    prior.kernel = field.sites[name].kernel
    return prior


def _of_family(profile, chosen, args, kwargs, weighed):
    """Importance weights of draws from q(w) at each node."""
    name, field = "family", profile.field
    if profile.rows.size is not None:
        return Cause(name, np.nan, told="unknown: too many rows")
    arrays, static = split_static((args, kwargs))

    def log_weights(free, q, key, points, arrays):
        here = field.terms(free, points, *join_static(arrays, static))
        root = q.root()
        where = here.log_likelihood, here.linear, q.mean(root), root, key
        return draws(*where, NUM_DRAWS)[1]

    run = shared(log_weights)
    arrays = [jnp.asarray(a) for a in arrays]
    each = []
    try:
        for i, node in enumerate(chosen):
            free = jnp.asarray(node.free, field.dtype)
            key = jax.random.key(i)
            found = np.asarray(run(free, node.q, key, profile.points, arrays), float)
            each.append(weighed_draws(found))
    except Exception as error:
        return Cause(name, np.nan, told=unknown(error))
    low, high = (f(found.gap for found in each) for f in (min, max))
    khat, limit = max(found.khat for found in each), good_k(NUM_DRAWS)
    told = f"{low:.2g} to {high:.2g} between q(w) and the posterior at {len(chosen)} nodes"
    told += f": by weights of k-hat {khat:.2f}"
    told += "" if khat <= limit else f", above {limit:.2f}, so at least"
    told += "; nodes and moments are weighed by them" if weighed else ""
    mend = ""
    if khat > limit and any(w.gap > max(1.0, 3.0 * w.error) for w in each):
        mend = "compare with MCMC"
    elif high - low > ENOUGH_NATS and not weighed:
        mend = "it differs between nodes, so that their weights are off: compare with MCMC"
    elif not weighed and any(w.gap > ENOUGH_NATS + 3.0 * w.error for w in each):
        mend = "by as much intervals may be off: compare with MCMC"
    return Cause(name, max(high, 0.0), told=told, mend=mend)


def _of_latents(field, nodes):
    """Hyperparameters at a point, as those of one node are."""
    return held_at_points(
        [] if len(nodes.nodes) > 1 else sorted(field.thetas),
        "intervals do not know their spread",
        "sgp.nested with max_nodes above 1, another base_guide, or MCMC",
    )

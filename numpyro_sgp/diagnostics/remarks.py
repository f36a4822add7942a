"""What is wrong with a fit, in words."""

import numpy as np

from numpyro_sgp.diagnostics.khat import NUM_DRAWS, good_k
from numpyro_sgp.diagnostics.optimality import ENOUGH_NATS
from numpyro_sgp.diagnostics.summaries import ties

_LARGEST_R_HAT, _SMALLEST_ESS = 1.01, 100
_SMALL_P = 0.05
_NUM_ERRORS = 3  # a fall of the loss by so many standard errors is one


def divergences(tree) -> float:
    """Number of divergent transitions; NaN where it is not known."""
    if "sample_stats" not in tree.children or "diverging" not in tree["sample_stats"]:
        return float("nan")
    return float(np.sum(tree["sample_stats"]["diverging"].values))


def remarks_on(tree, loo, chains, is_reference, why_no_loo=""):
    """
    What is wrong with a fit, in words.

    :param tree: its ArviZ data.
    :param loo: of :func:`~numpyro_sgp.diagnostics.summaries.leave_one_out`, or None.
    :param chains: of :func:`~numpyro_sgp.diagnostics.summaries.convergence`; None for SVI.
    :param why_no_loo: why LOO was refused, if it was.
    """
    attrs = tree.attrs
    wrong = [*_of_chains(tree, chains)] if chains is not None else [*_of_training(attrs)]
    yield from wrong
    if wrong and is_reference:
        yield "this is the reference, so that differences from it are as unreliable."
    if why := attrs.get("nats_left_unknown"):
        yield f"whether q(u) has converged is not known: {why}."
    if (lost := attrs.get("points_lose", 0.0)) > ENOUGH_NATS:
        mend = attrs.get("points_mend", "")
        yield f"its inducing points lose at least {lost:.2g} nats" + (
            f": {mend}." if mend else "."
        )
    if (lost := attrs.get("float32_loses", 0.0)) > ENOUGH_NATS:
        size = f"{lost:.2g}" if lost < 100 else f"{lost:.0f}"
        yield f"float32 costs it at least {size} nats: numpyro.enable_x64() before the fit."
    if points := attrs.get("point_estimates"):
        yield (
            f"held at points: {points}. So it has no LOO, no k-hat and no bound "
            "on the evidence (log_joint_bound is on log p(y, point)), and all its "
            "draws are given these values. Use sgp.nested, "
            "base_guide=AutoMultivariateNormal, or NUTS."
        )
    elif why_no_loo:
        yield why_no_loo
    elif loo is None and ties(tree):
        yield (
            "no LOO: the log likelihood of an observation has few values in all draws, so "
            "that importance weights tie."
        )
    if loo is not None and (factors := attrs.get("factors")):
        yield (
            f"LOO leaves out the terms of factors ({factors}), which no data belong to: it "
            "is of the other observations alone. log_score counts them; so does LOO where "
            "they are written as distributions, as RightCensoredDistribution."
        )
    if weighted := attrs.get("weighted"):
        yield (
            f"no LOO of sites with weights ({weighted}, by handlers.scale): it would take "
            "each row out once, and the posterior has it as often as its weight says. "
            "Compare them by log_score at rows that were held out."
        )
    if loo is not None and (bad := int(np.sum(loo.pareto_k.values > loo.good_k))):
        # Tails of q are in the weights too, which a posterior's draws do not have.
        way = "too high most often"
        if attrs.get("method", "MCMC") != "MCMC":
            way = "too low or too high, maybe by more than its se and that of elpd_diff"
        yield (
            f"Pareto k of {bad} of {loo.pareto_k.size} observations is above "
            f"{loo.good_k:.2f}, where PSIS-LOO is unreliable, {way}."
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
    if (number := divergences(tree)) > 0:
        yield (
            f"{number:.0f} divergent transitions: part of the posterior may be missed; "
            "raise target_accept_prob, or whiten the model if it is not."
        )


def _of_training(attrs):
    nats = attrs.get("nats_left", 0.0)
    mend = "not converged; train longer, or with natural_gradients."
    if np.isinf(nats):
        yield f"q(u) is far from an optimum, where the bound is not concave: {mend}"
    elif nats > ENOUGH_NATS:
        size = f"{nats:.2g}" if nats < 100 else f"{nats:.0f}"
        yield f"about {size} nats are left for q(u): {mend}"
    left, se = attrs.get("others_left"), attrs.get("others_left_se", 0.0)
    if left is not None:
        if left > max(ENOUGH_NATS, 2.0 * se):
            yield (
                f"about {left:.2g} nats are left for hyperparameters, inducing points "
                "and other latents: not converged; train longer."
            )
        return
    drop, se = attrs.get("loss_drop", 0.0), attrs.get("loss_drop_se", 0.0)
    if drop > max(ENOUGH_NATS, _NUM_ERRORS * se):
        yield (
            f"the mean loss still fell by {drop:.2g} ± {se:.1g} over the last tenth of the "
            "steps: not converged; train longer."
        )

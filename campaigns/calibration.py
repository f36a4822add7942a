"""
Posteriors are calibrated, and where a family is known to be too narrow, `check` says so.

    python -m campaigns.calibration                 # some tens of minutes
    python -m campaigns.calibration --model counts

A block is a method and a model; its data are drawn from the model. Three rows of f(X), two
sums and the hyperparameters are ranked among draws of each posterior. Over the simulations
ranks are uniform where a method is exact: two tests of each quantity, p values times the
number of such tests in the campaign. A fit *misses* where at any row its mean is more than
0.3 sd from that of :mod:`campaigns._problems`, or its sd off by more than 20 %. It is
*told* if the row `family` of `check` has a mend or a k-hat that is too large, or if latents
are held at points, which `check` names; of a few fits of a block all of `check` is run.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import HMC, MCMC, NUTS, SVI, Predictive
from numpyro.infer.gibbs import Gibbs
from scipy.stats import chi2, kstest, norm

import numpyro_sgp as sgp
from campaigns._problems import LOG_SDS, MODELS, Problem, X, problem, quantities
from campaigns._table import Found, Table
from numpyro_sgp.diagnostics.khat import NUM_DRAWS, log_weight, weighed
from numpyro_sgp.fitting.check import family

#: Simulations of a block, and of methods that are run one fit after another.
EACH, FEWER = 200, 60
#: Of all tests of uniformity together.
LEVEL = 1e-3
#: A miss: means by so many sds, sds by such a share.
FAR, NARROW = 0.3, 0.2
#: Share of the fits that miss that are to be told, and fits that `check` looks at.
TOLD, CHECKED = 0.95, 2
#: Draws of a posterior, of which every tenth is ranked among.
DRAWS, APART = 1000, 10

FEW, OTHERS = X[2::4], X[::4]
HALF, OTHER_HALF = X[::2], X[1::2]
FIXED: dict[str, Any] = {"train_inducing": False}
FAMILIES = {
    "VGP": sgp.VGP(),
    "VGP pseudo-data": sgp.VGP(covariance="pseudo_data"),
    "SVGP": sgp.SVGP(inducing=X, **FIXED),
    "SVGP unwhitened": sgp.SVGP(inducing=X, whiten=False, **FIXED),
    "SVGP dual": sgp.SVGP(inducing=X, covariance="dual", **FIXED),
    "inverse-free": sgp.InverseFreeSVGP(inducing=X, tol=1e-8, **FIXED),
    "SVGP diagonal": sgp.SVGP(inducing=X, covariance="diagonal", **FIXED),
    "SVGP of 5": sgp.SVGP(inducing=FEW, **FIXED),
    "SVGP coupled, of 5": sgp.SVGP(inducing=FEW, covariance="coupled", **FIXED),
    "SOLVE-GP of 5 and 5": sgp.SOLVEGP(inducing=FEW, orthogonal=OTHERS, **FIXED),
    "SOLVE-GP of halves": sgp.SOLVEGP(inducing=HALF, orthogonal=OTHER_HALF, **FIXED),
    "ODVGP of 5 and 5": sgp.ODVGP(inducing=FEW, orthogonal=OTHERS, **FIXED),
    "ODVGP of halves": sgp.ODVGP(inducing=HALF, orthogonal=OTHER_HALF, **FIXED),
    "mixture of two": sgp.MixtureSVGP(inducing=X, covariance="full", **FIXED),
    "mixture of two, diagonal": sgp.MixtureSVGP(inducing=X, **FIXED),
}
#: Whose q(u) is trained by Adam, in part or all.
BY_ADAM = "pseudo-data", "inverse-free", "mixture", "diagonal"
ONE_BY_ONE = "nested", "AutoJointGP"
SAMPLERS = "NUTS", "HMC", "elliptical slices", "NUTS sparsified"
#: What has the posterior in it: all of these there, some of them elsewhere.
EXACT = {"conjugate": (*list(FAMILIES)[:6], *ONE_BY_ONE, *SAMPLERS)}
EXACT |= dict.fromkeys(("counts", "classes", "hierarchical"), ("nested", *SAMPLERS))
_QUANTITIES = {name: 5 + (3 if name == "hierarchical" else 0) for name in MODELS}
#: Tests of uniformity in the campaign.
TESTS = sum(2 * _QUANTITIES[name] * len(EXACT[name]) for name in MODELS)


class Posterior(NamedTuple):
    """
    What a method found, for each simulation along a leading axis.

    :param mean: of f(X).
    :param sd: of f(X).
    :param ranked: draws by latent, to be ranked among.
    :param told: whether `check` has something to say; None for MCMC.
    :param numbers: more to be kept.
    """

    mean: np.ndarray
    sd: np.ndarray
    ranked: dict
    told: np.ndarray | None = None
    numbers: dict = {}  # noqa: RUF012


# ---- by variational inference --------------------------------------------------------


def _optimiser(method, guide, steps):
    rate = 0.5 if "pseudo" in method else 0.05
    adam = optax.adam(optax.cosine_decay_schedule(rate, steps))
    if any(word in method for word in BY_ADAM):
        return adam
    return sgp.natural_gradients(guide, 0.5, adam)


def trained(method: str, known: Problem, ys) -> Posterior:
    """A family's fits, by one program."""
    args = [jnp.asarray(a) for a in known.args]
    guide = sgp.AutoSparseGP(known.model, FAMILIES[method])
    guide.setup(*args, ys[0])
    simple = len(args) == 1 and not any(w in method for w in (*BY_ADAM, "ODVGP"))
    steps = 60 if simple else 1000
    svi = SVI(known.model, guide, _optimiser(method, guide, steps), sgp.TraceGP_ELBO())

    def fit(y, key):
        state = svi.init(key, *args, y)

        def step(state, _):
            return svi.update(state, *args, y)

        state, losses = jax.lax.scan(step, state, None, length=steps)
        params, keys = svi.get_params(state), jax.random.split(key, NUM_DRAWS)
        q = guide.posterior(params, *args)["f"]
        shape = (DRAWS // APART - 1,)
        drawn = guide.sample_posterior(keys[0], params, *args, sample_shape=shape)
        weights = jax.vmap(
            lambda k: log_weight(k, params, known.model, guide, (*args, y), {})
        )(keys)
        return params, losses[-1], q.mean, jnp.sqrt(q.variance), drawn, weights

    keys = jax.random.split(jax.random.key(0), len(ys))
    params, losses, mean, sd, drawn, weights = jax.jit(jax.vmap(fit))(ys, keys)
    points = sorted(set(drawn) - {"f"})
    log_weights, values = (jax.tree.map(np.asarray, w) for w in weights)
    found = [
        weighed(log_weights[i], {k: v[i] for k, v in values.items()})
        for i in range(len(ys))
    ]
    causes = [family(each, points) for each in found]
    told = np.array([bool(c.mend or ", above" in c.told) or bool(points) for c in causes])
    numbers = {"median k-hat": float(np.median([each.khat for each in found]))}
    if not points:
        before = [
            w.gap > max(1.0, 3.0 * w.error) or ", above" in c.told
            for w, c in zip(found, causes, strict=True)
        ]
        numbers["told by nats or k-hat"] = before
    fitted = [
        sgp.Fitted(
            guide,
            {k: v[i] for k, v in params.items()},
            (*args, ys[i]),
            loss=svi.loss,
            svi=svi,
            bound=-losses[i],
        )
        for i in range(min(CHECKED, len(ys)))
    ]
    for i, each in enumerate(fitted):
        rows = each.check().causes.values()
        numbers[f"all of check, {i}"] = float(
            any(c.mend or ", above" in c.told for c in rows)
        )
    return Posterior(np.asarray(mean), np.asarray(sd), drawn, told, numbers)


def one_by_one(method: str, known: Problem, ys) -> Posterior:
    """Fits whose search is led by Python."""
    args = [jnp.asarray(a) for a in known.args]
    train = partial(_joint, known, args, ys) if method == "AutoJointGP" else None
    results = (
        train()
        if train
        else (
            sgp.nested(known.model, sgp.VGP(), (*args, y), progress_bar=False) for y in ys
        )
    )
    means, sds, drawn, told = [], [], [], []
    for i, result in enumerate(results):
        q = result.posterior(*args)["f"]
        means.append(np.asarray(q.mean))
        sds.append(np.asarray(q.sd))
        key = jax.random.key(i)
        drawn.append(result.sample(key, *args, sample_shape=(DRAWS // APART - 1,)))
        off = result.check().causes.values()
        told.append(any(c.mend or ", above" in c.told for c in off))
    ranked = {k: np.stack([np.asarray(d[k]) for d in drawn]) for k in drawn[0]}
    return Posterior(np.stack(means), np.stack(sds), ranked, np.array(told))


def _joint(known, args, ys):
    guide = sgp.AutoJointGP(known.model, sgp.VGP())
    guide.setup(*args, ys[0])
    steps = 60 if len(args) == 1 else 1000
    svi = SVI(known.model, guide, _optimiser("", guide, steps), sgp.TraceGP_ELBO())

    def fit(y):
        state = svi.init(jax.random.key(0), *args, y)

        def step(state, _):
            return svi.update(state, *args, y)

        return svi.get_params(jax.lax.scan(step, state, None, length=steps)[0])

    params = jax.jit(jax.vmap(fit))(ys)
    for i, y in enumerate(ys):
        yield guide.result({k: v[i] for k, v in params.items()}, *args, y)


# ---- by MCMC -------------------------------------------------------------------------


def _kernel(method, model, hierarchical):
    """A kernel, and thinning that leaves draws that are nearly independent."""
    if method == "NUTS sparsified":
        return NUTS(model, target_accept_prob=0.9), 2
    white = sgp.whiten(model)
    if method == "NUTS":
        return NUTS(white, target_accept_prob=0.9), 2
    if method == "HMC":
        return HMC(white, trajectory_length=2.0, target_accept_prob=0.9), 2
    slices = sgp.EllipticalSlice(white)
    if not hierarchical:
        return slices, 20
    return Gibbs([(slices, ["f_white"]), (NUTS(white), None)]), 10


def sampled(method: str, known: Problem, ys) -> Posterior:
    """Chains for all simulations, side by side in one program."""
    args = [jnp.asarray(a) for a in known.args]
    model = known.model
    if method == "NUTS sparsified":
        model = sgp.sparsify(known.model, sgp.VGP())
        model.setup(*args, ys[0])
    kernel, thinning = _kernel(method, model, len(args) > 1)

    def run(y, key):
        mcmc = MCMC(
            kernel,
            num_warmup=500,
            num_samples=DRAWS * thinning,
            thinning=thinning,
            progress_bar=False,
        )
        mcmc.run(key, *args, y)
        draws = mcmc.get_samples()
        if "f" not in draws:
            predictive = Predictive(model, draws, return_sites=["f"])
            draws["f"] = predictive(key, *args)["f"]
        return {k: v for k, v in draws.items() if not k.endswith("_white")}

    keys = jax.random.split(jax.random.key(1), len(ys))
    draws = jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(ys, keys))
    ranked = {k: v[:, APART::APART] for k, v in draws.items()}
    return Posterior(draws["f"].mean(1), draws["f"].std(1), ranked)


# ---- judging -------------------------------------------------------------------------


def shares(ranked: dict, truths: list, rng) -> dict[str, np.ndarray]:
    """Ranks of true quantities as numbers in (0, 1), which are uniform if they are."""
    below = quantities({k: np.asarray(v) for k, v in ranked.items()})
    true = quantities({k: np.stack([t[k] for t in truths]) for k in truths[0]})
    found = {}
    for name, at in true.items():
        rank = np.sum(below[name] < at[:, None], axis=1)
        found[name] = (rank + rng.uniform(size=len(at))) / (below[name].shape[1] + 1)
    return found


def p_values(share) -> dict[str, float]:
    """
    Of uniformity: by Kolmogorov and Smirnov, and of the sum of squares of normal scores,
    which sees posteriors that are too narrow or too wide.
    """
    squares = np.sum(norm.ppf(share) ** 2)
    tail = chi2.cdf(squares, len(share))
    return {"ranks": float(kstest(share, "uniform").pvalue),
            "spread": float(2.0 * min(tail, 1.0 - tail))}  # fmt: skip


def judged(block: str, found: Posterior, references: list, truths: list) -> Found:
    """What came of a block."""
    method, model = block.rsplit(", ", 1)
    rng = np.random.default_rng(sum(map(ord, block)))
    failed, smallest = [], 1.0
    for name, share in shares(found.ranked, truths, rng).items():
        if name in LOG_SDS and method not in EXACT[model]:
            continue  # at a point
        for test, p in p_values(share).items():
            smallest = min(smallest, p)
            if method in EXACT[model] and p * TESTS < LEVEL:
                failed.append(f"{name}: {test} have p = {p:.1e} times {TESTS} tests")
    mean, sd = (np.stack([getattr(r, k) for r in references]) for k in ("mean", "sd"))
    shift, ratio = np.abs(found.mean - mean) / sd, found.sd / sd
    wrong = np.abs(ratio - 1.0)
    misses = (shift > FAR).any(-1) | (wrong > NARROW).any(-1)
    numbers = {
        "smallest p": smallest,
        "mean sd ratio": float(ratio.mean()),
        "largest shift": float(shift.max()),
        "misses": int(misses.sum()),
    }
    if found.told is not None:
        told = int((found.told & misses).sum())
        numbers |= {"told": told, "told of others": int((found.told & ~misses).sum())}
        if told < TOLD * misses.sum():
            failed.append(f"{told} are told of {misses.sum()} that miss")
    for name, value in found.numbers.items():
        each = np.asarray(value)
        numbers[name] = int((each & misses).sum()) if each.ndim else value
    return Found(len(truths), failed, numbers)


_KNOWN: dict = {}


def simulated(model: str, each: int) -> tuple:
    """A problem, and its truths, data and references."""
    if (model, each) not in _KNOWN:
        known = problem(model)
        pairs = [known.simulate(np.random.default_rng((7, i))) for i in range(each)]
        references = [known.reference(y, truth) for truth, y in pairs]
        truths, ys = zip(*pairs, strict=True)
        _KNOWN[model, each] = known, list(truths), jnp.asarray(np.stack(ys)), references
    return _KNOWN[model, each]


def look(block: str, each: int | None = None) -> Found:
    """Fits of a block, named ``method, model``."""
    method, model = block.rsplit(", ", 1)
    run: Callable = trained if method in FAMILIES else sampled
    run = one_by_one if method in ONE_BY_ONE else run
    each = each or (FEWER if method in ONE_BY_ONE else EACH)
    known, truths, ys, references = simulated(model, each)
    return judged(block, run(method, known, ys), references, truths)


def blocks(models=MODELS) -> list[str]:
    """Their names."""
    methods = (*SAMPLERS, *FAMILIES, *ONE_BY_ONE)
    return [f"{method}, {model}" for model in models for method in methods]


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--model", choices=MODELS)
    model = parser.parse_args().model
    jax.config.update("jax_enable_x64", True)
    table = Table("calibration")
    table.run(blocks([model] if model else MODELS), look)
    print(f"{table.cases} fits, {len(table.failed)} findings")


if __name__ == "__main__":
    main()

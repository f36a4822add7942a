"""
Training never breaks: random models and data that are hard on it, by the default `fit`.

    python -m campaigns.training                     # 2,000 fits in float32, two hours
    python -m campaigns.training --precision float64
    python -m campaigns.training --compare           # those that both have, side by side
    python -m campaigns.training --seconds 600       # no block begins after that

A block is a likelihood, a kernel, an approximation, a size of the problem, and whether its
hyperparameters are sampled or params: what is compiled once. Its cases are data of the same
shapes. A fit has failed where it raises, has anything in its parameters, bound or
predictions that is not finite, an sd that is not positive, a bound below that of its start,
below the best of its own losses or other than the one at its parameters; and in regression
one above the exact log evidence, which NumPy computes densely in float64. Data with fewer
distinct rows than inducing points are refused, which is right; of bounds without a maximum
(responses that are all zero, no priors) it has to be told.

Beside that each block keeps the bounds, how fits ended, and how many were rescued: losses
that were not believed, whose steps were undone, and warnings.
"""

import argparse
import time
import warnings
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_sgp as sgp
from campaigns import _by_hand
from campaigns._models import (
    KERNELS,
    LIKELIHOODS,
    SIZES,
    dense_log_evidence,
    kinds_of,
    simulated,
    written,
)
from campaigns._table import Found, Table
from campaigns.bounds import EPS
from numpyro_sgp._programs import shared

#: Cases of a block.
EACH = 25
#: Every so many of them predict responses, for which each guide compiles a program.
PREDICT = 5
#: The block beside SciPy.
HAND = "by hand"
#: Nats by which bounds of forty rows in NumPy may be others, by rounding and jitter.
BY_HAND = {"float32": 0.1, "float64": 1e-3}
#: Keys over which a random bound is averaged.
KEYS = 8
#: Kinds of inputs and responses of which float32 loses nothing.
SOUND = {"plain", "rows twice", "integers", "constant column", "noise alone"}

APPROXIMATIONS = {
    "SVGP": sgp.SVGP,
    "unwhitened": lambda M: sgp.SVGP(M, whiten=False),
    "diagonal": lambda M: sgp.SVGP(M, covariance="diagonal"),
    "pseudo-data": lambda M: sgp.SVGP(M, covariance="pseudo_data"),
    "dual": lambda M: sgp.SVGP(M, covariance="dual"),
    "tight": lambda M: sgp.SVGP(M, tight="diagonal"),
    "VGP": lambda M: sgp.VGP(),
    "SOLVE-GP": lambda M: sgp.SOLVEGP(M - M // 2, M // 2),
    "ODVGP": lambda M: sgp.ODVGP(M - M // 2, M // 2),
    "mixture": lambda M: sgp.MixtureSVGP(M, num_components=2),
    "inverse-free": lambda M: sgp.InverseFreeSVGP(M),
}


def blocks(count=80):
    """Their names: the usual ones first, then random ones."""
    found = [
        "Normal, RBF, SVGP, some, sampled",
        HAND,
        "Poisson, Matern32, SVGP, some, sampled",
        "Normal, ARD, SVGP, wide, params",
        "Bernoulli, RBF, SVGP, near, params",
        "Normal, Matern32 + Periodic, SVGP, five, params",
        "StudentT, RBF + Linear, SOLVE-GP, some, sampled",
        "Normal, RBF, VGP, near, sampled",
        "Categorical, RBF, SVGP, some, sampled",
        "Gamma, Matern52, unwhitened, some, params",
        "Normal, RBF, mixture, five, sampled",
        "NegativeBinomial, RBF, diagonal, near, sampled",
        "Normal, RBF + Linear, SVGP, thousand, sampled",
        "two functions, RBF, SVGP, some, params",
        "Bernoulli, ARD, pseudo-data, some, sampled",
        "Normal, Matern12, tight, some, sampled",
        "Poisson, RBF, SVGP, thousands, params",
    ]
    rng = np.random.default_rng(0)
    sizes = [0.25, 0.2, 0.25, 0.1, 0.1, 0.05, 0.05]
    while len(found) < count:
        size = str(rng.choice(list(SIZES), p=sizes))
        likelihood = str(rng.choice(list(LIKELIHOODS)))
        approximation = str(rng.choice(list(APPROXIMATIONS)))
        if approximation == "tight":  # for Gaussian likelihoods
            likelihood = "Normal"
        if approximation == "VGP" and size.startswith("thousand"):  # M is N
            continue
        kernel, given = rng.choice(list(KERNELS)), rng.choice(["sampled", "params"])
        name = f"{likelihood}, {kernel}, {approximation}, {size}, {given}"
        if name not in found:
            found.append(name)
    return found


class Case:
    """
    A fit and what is told of it.

    :param block: whose it is.
    :param X: inputs.
    :param y: responses.
    """

    def __init__(self, block, model, X, y):
        likelihood, self.kernel, family, size, self.given = block.split(", ")
        self.is_normal, self.is_gamma = likelihood == "Normal", likelihood == "Gamma"
        self.is_count = likelihood in ("Poisson", "NegativeBinomial")
        self.X, self.y = X, y
        self.eps = EPS[jnp.result_type(float).name]
        approximation = APPROXIMATIONS[family](SIZES[size][1])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.fitted = sgp.fit(model, approximation, (X, y), progress_bar=False)
        self.warned = [str(w.message).split(".")[0][:80] for w in told]
        self.losses = np.asarray(self.fitted.losses, float)
        self.undone = int(np.isnan(self.losses).sum())

    def bound_at(self, params):
        """The bound with all of the data at parameters, and its standard error."""
        svi = self.fitted.svi

        def bounds(params, data, keys):
            def one(key):
                return -svi.loss.loss(key, params, svi.model, svi.guide, *data)

            return jax.lax.map(one, keys)

        keys = jax.random.split(jax.random.key(1), KEYS)
        data = [jnp.asarray(a) for a in self.fitted.args]
        found = np.asarray(shared(bounds, briefly=True)(params, data, keys), float)
        return found.mean(), found.std(ddof=1) / np.sqrt(KEYS)

    def hyperparameters(self):
        """By name, at their fitted values, with the log density of those with a prior."""
        params, log_prior = self.fitted.params, 0.0
        if self.given == "params":
            return {k: v for k, v in params.items() if not k.startswith("f_")}, log_prior
        found = {
            name.removesuffix("_auto_loc"): np.asarray(value, float)
            for name, value in params.items()
            if name.endswith("_auto_loc")
        }
        for value in found.values():
            log_value = np.log(value)
            density = -0.5 * log_value**2 - log_value - 0.5 * np.log(2.0 * np.pi)
            log_prior += density.sum()
        return found, log_prior

    def wrong(self):
        """Sentences of what is wrong with the fit."""
        found = list(self._not_finite())
        if found:  # which predictions refuse
            return found
        return [
            *self._wrong_bound(),
            *self._above_evidence(),
            *self._wrong_predictions(),
        ]

    def _not_finite(self):
        fitted = self.fitted
        for name, value in fitted.params.items():
            if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(value)):
                yield f"{name} is not finite"
        if not np.isfinite(fitted.bound):
            yield f"the bound is {fitted.bound}"

    def _wrong_bound(self):
        fitted, bound, se = self.fitted, self.fitted.bound, self.fitted.bound_se
        if "the bound has no maximum" in fitted.stopped:  # next to zero, of any value
            return
        here, here_se = self.bound_at(fitted.params)
        start, start_se = self.bound_at(fitted.guide.known().starts)
        noise = 5.0 * (se + here_se)
        # What is rounded are terms at least as large as the bound, N, and at a good fit of
        # noise-free data the rows' residuals in units of the noise, N again.
        size = self.eps * 10.0 * (abs(bound) + len(self.y))
        if self.is_normal:
            size = max(size, self.eps * self._evidence()[1])
        if self.is_gamma:  # of shape a, with terms a log(a) that cancel; 5e4 at constant y
            shape = float(self.hyperparameters()[0]["noise"])
            ulp = float(jnp.finfo(jnp.result_type(float)).eps)
            size += ulp * len(self.y) * shape * (1.0 + abs(np.log(shape)))
        if self.is_count:  # of counts y, with terms y log(y) that cancel
            ulp = float(jnp.finfo(jnp.result_type(float)).eps)
            size += ulp * float(np.sum(self.y * (1.0 + np.log1p(self.y))))
        if not abs(here - bound) <= noise + size:
            yield f"the bound is said to be {bound:.7g}, and is {here:.7g}"
        if start > bound + 5.0 * (se + start_se) + size + self.eps * abs(start):
            yield f"the bound is {bound:.7g}, and was {start:.7g} at the start"
        if se == 0.0 and self.losses.size and not self.undone:
            best = -self.losses.min()
            if best > bound + size and fitted.descent is not None:
                yield f"the bound is {bound:.7g}, and was {best:.7g} on the way"

    def _evidence(self):
        given, log_prior = self.hyperparameters()
        dtype = jnp.result_type(float)
        X, y = (np.asarray(a, dtype) for a in (self.X, self.y))
        found, terms = dense_log_evidence(self.kernel, given, X, y)
        return found + log_prior, terms + abs(log_prior)

    def _above_evidence(self):
        if not self.is_normal:
            return
        exact, terms = self._evidence()
        if self.fitted.bound > exact + self.eps * terms:
            yield (
                f"the bound is {self.fitted.bound:.7g} where the evidence is {exact:.7g} "
                f"(terms of {terms:.3g})"
            )

    def new_inputs(self):
        """Some of the rows, and one far away."""
        far = self.X[:1] + 100.0 * np.maximum(self.X.std(axis=0), 1e-6)
        return np.concatenate([self.X[:3], far])

    def _wrong_predictions(self):
        q = self.fitted.posterior(self.new_inputs())["f"]
        mean, variance = np.asarray(q.mean), np.asarray(q.variance)
        if not np.isfinite(mean).all():
            yield f"means of f are {mean.ravel()}"
        if not (np.isfinite(variance) & (variance > 0.0)).all():
            yield f"variances of f are {variance.ravel()}"

    def wrong_responses(self):
        """Sentences of what is wrong with predicted responses."""
        found = self.fitted.predict(self.new_inputs())
        f, y = found["f"], found["y"]
        # Of exponentials of f, moments may be beyond the largest number.
        limit = np.log(float(jnp.finfo(jnp.result_type(float)).max))
        if np.max(np.abs(f.mean) + 12.0 * f.sd) > 0.5 * limit and y.probs is None:
            return
        for name in ("mean", "sd", "quantiles", "probs"):
            value = getattr(y, name)
            if value is not None and not np.isfinite(value).all():
                yield f"{name} of responses: {np.asarray(value).ravel()}"


def is_right_refusal(error, block, X):
    """Whether there are fewer distinct rows than inducing points, and the error says so."""
    few = len(np.unique(X, axis=0)) < SIZES[block.split(", ")[3]][1]
    return few and isinstance(error, ValueError) and "distinct inputs" in str(error)


def look_by_hand(precision, each=EACH):
    """Regression beside the collapsed bound in NumPy, trained by SciPy from some starts."""
    model, rng, failed = written("Normal", "RBF", "sampled"), np.random.default_rng(1), []
    gained = []
    for number in range(each):
        X = rng.uniform(-2.0, 2.0, (40, 1)).astype(precision)
        noise = 10 ** rng.uniform(-1.5, 0.0)
        y = (np.sin(2.0 * X[:, 0]) + noise * rng.normal(size=40)).astype(precision)
        fitted = sgp.fit(model, sgp.SVGP(6), (X, y), progress_bar=False)
        given = {name: np.asarray(v, float) for name, v in fitted.params.items()}
        names = "variance", "length", "noise"
        logs = np.log([float(given[f"{name}_auto_loc"]) for name in names])
        X, y = np.asarray(X, float), np.asarray(y, float)
        here = _by_hand.collapsed(logs, given["f_auto_Z"], X, y) + _by_hand.log_priors(logs)
        # What is left to natural steps, and jitter: that of float32 is a thousand times
        # NumPy's.
        if not -BY_HAND[precision] < here - fitted.bound < 0.1 + BY_HAND[precision]:
            failed.append(f"{number}: the bound {fitted.bound:.7g} is {here:.7g} by hand")
        best = _by_hand.best(X, y, 6, rng)
        gained.append(fitted.bound - best)
        if fitted.bound < best - 1.0 - 1e-3 * abs(best):
            failed.append(f"{number}: the bound {fitted.bound:.7g} is below {best:.7g}")
    return Found(each, failed, {"least gained": min(gained), "most gained": max(gained)})


def look(block, precision, each=EACH):
    """Cases of a block."""
    if block == HAND:
        return look_by_hand(precision, each)
    likelihood, kernel, _, size, given = block.split(", ")
    rng = np.random.default_rng(sum(map(ord, block)))
    model = written(likelihood, kernel, given)
    failed, numbers = [], Counter()
    for number, kinds in enumerate(kinds_of(likelihood, each, rng)):
        X, y = simulated(rng, likelihood, size, *kinds)
        X, y = (a.astype(precision) if a.dtype.kind == "f" else a for a in (X, y))
        where = f"{number} (X {kinds[0]}, y {kinds[1]})"
        try:
            case = Case(block, model, X, y)
            wrong = case.wrong()
            if number % PREDICT == 0:
                wrong += list(case.wrong_responses())
        except Exception as error:
            if is_right_refusal(error, block, X):
                numbers["refused"] += 1
                continue
            first = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            failed.append(f"{where}: {first}")
            continue
        failed += [f"{where}: {sentence}" for sentence in wrong]
        numbers[f"bound {where}"] = case.fitted.bound
        numbers[f"ended: {case.fitted.stopped}"] += 1
        numbers["undone steps"] += case.undone
        numbers["with undone steps"] += case.undone > 0
        for sentence in case.warned:
            numbers[f"warned: {sentence}"] += 1
    return Found(each, failed, dict(numbers))


def compared(one, other):
    """
    Bounds of two tables, case by case: how many there are of both, and of those whose data
    lose nothing in float32, sentences on which ones differ by more than a nat and a
    thousandth.
    """
    count, apart = Counter(), []
    for block in one.blocks.keys() & other.blocks.keys():
        numbers = [table.blocks[block]["numbers"] for table in (one, other)]
        for name in numbers[0].keys() & numbers[1].keys():
            if not name.startswith("bound "):
                continue
            first, second = (found[name] for found in numbers)
            kinds = name[name.index("(") + 1 : -1].removeprefix("X ").split(", y ")
            is_sound = set(kinds) <= SOUND
            count["sound" if is_sound else "hard"] += 1
            if abs(first - second) > 1.0 + 1e-3 * abs(second):
                count["sound, apart" if is_sound else "hard, apart"] += 1
                count["the first is lower"] += first < second
                if is_sound:
                    apart.append(f"{block}: {name}: {first:.7g} and {second:.7g}")
    return count, sorted(apart)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=EPS, default="float32")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        count, apart = compared(*(Table(f"training_{name}") for name in EPS))
        print(*apart, dict(count), sep="\n")
        return
    jax.config.update("jax_enable_x64", options.precision == "float64")
    table = Table(f"training_{options.precision}")
    until = time.monotonic() + options.seconds
    wanted = (block for block in blocks() if time.monotonic() < until)
    table.run(wanted, partial(look, precision=options.precision))
    print(f"{table.cases} fits, {len(table.failed)} sentences on failures")


if __name__ == "__main__":
    main()

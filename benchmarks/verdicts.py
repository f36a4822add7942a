"""
What `fitted.check()` tells beside the truth, on the problems of `defaults.py`.

    python benchmarks/verdicts.py        # about an hour
    python benchmarks/verdicts.py --table

Each problem is trained by `fit` and by 3,000 steps of Adam, and looked at after 10, 50 and
100 % of the steps. True is what long L-BFGS and natural gradients gain in q(u), all else
held fixed; what the best known bound (of `defaults.py`, with float64) is above this one;
and, for regression, what the bound with its best q(u) is below the evidence by dense linear
algebra. In float64.
"""

import argparse
import warnings

import defaults
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from _results import FOLDER, Results
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from scipy.linalg import cho_factor, cho_solve

import numpyro_sgp as sgp
from numpyro_sgp.fitting.problem import Problem
from numpyro_sgp.training.natural_gradients import natural_descent

STAGES = (0.1, 0.5, 1.0)
ADAM = 3000
RANDOM = ("softmax", "regression_network")
REGRESSION = ("gaussian_20_rows", "snelson", "columns_30")
TOO_MANY = ("rows_100_000",)


def trainings(name):
    """A fit for each training and stage."""
    model, approximation, data, options = defaults.PROBLEMS[name](None)
    whole = sgp.fit(model, approximation, data, progress_bar=False, **options)
    for stage in STAGES[:-1]:
        steps = max(1, round(stage * len(whole.losses)))
        part = {"steps": steps, "progress_bar": False}
        yield "fit", stage, sgp.fit(model, approximation, data, **part, **options)
    yield "fit", 1.0, whole
    if name in TOO_MANY:
        return
    guide = sgp.AutoSparseGP(model, approximation)
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    result, done = None, 0
    for stage in STAGES:
        steps = round(stage * ADAM)
        state = None if result is None else result.state
        result = svi.run(
            jax.random.key(0), steps - done, *data, init_state=state, progress_bar=False
        )
        done = steps
        yield "Adam", stage, sgp.Fitted.from_svi(svi, result, *data)


def gain_in_q(fitted):
    """What the best q(u) is above this one, other parameters as they are."""
    svi = SVI(fitted.model, fitted.guide, optax.sgd(0.0), sgp.TraceGP_ELBO())
    key, args = jax.random.key(0), tuple(jnp.asarray(a) for a in fitted.args)
    settings = {"sweeps": 1, "tol": 1e-14, "progress_bar": False, "max_iterations": 5000}
    found = sgp.fit_lbfgs(
        svi, key, *args, init_params=fitted.params, blocks=["variational"], **settings
    )
    best = -float(found.losses[-1])
    for params in (fitted.params, found.params):
        free = svi.constrain_fn(params, invert=True)
        problem = Problem(svi, SVIState(svi.optim.init(free), None, key), args, {})
        if not problem.natural:
            continue

        def loss(free, problem=problem):
            return problem.loss(free, key, problem.arrays)

        _, lowest, _ = jax.jit(
            lambda free, loss=loss, problem=problem: natural_descent(
                loss, problem.natural, free, 500, 1e-9
            )
        )(free)
        best = max(best, -float(lowest))
    return best + float(found.losses[0])


def lost_to_points(fitted):
    """The evidence less the best bound with these points and hyperparameters."""
    X, y = (np.asarray(a, float) for a in fitted.args)
    values = {k: np.asarray(v) for k, v in fitted.median().items()}
    variance, scale = values["f/variance"], values["f/lengthscale"]
    s2 = values["noise"] ** 2
    Z = np.asarray(fitted.params["f_auto_Z"])

    def kernel(A, B):
        d = ((A[:, None] - B[None]) / scale) ** 2
        return variance * np.exp(-0.5 * d.sum(-1))

    def log_normal(C):
        L = cho_factor(C, lower=True)
        quadratic = y @ cho_solve(L, y)
        return (
            -0.5 * quadratic - np.log(np.diag(L[0])).sum() - len(y) / 2 * np.log(2 * np.pi)
        )

    K, Kzx = kernel(X, X), kernel(Z, X)
    Kzz = kernel(Z, Z) + 1e-10 * variance * np.eye(len(Z))
    Q = Kzx.T @ cho_solve(cho_factor(Kzz, lower=True), Kzx)
    noise = s2 * np.eye(len(y))
    bound = log_normal(Q + noise) - 0.5 * np.trace(K - Q) / s2
    return log_normal(K + noise) - bound


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="*", default=list(defaults.PROBLEMS))
    parser.add_argument("--results", default=FOLDER / "verdicts.json")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = Results(args.results, ["problem", "training", "stage"])
    if args.table:
        table(results)
        return
    numpyro.enable_x64()
    warnings.simplefilter("ignore")
    for name in args.problems:
        last = "fit" if name in TOO_MANY else "Adam"
        if results.has(problem=name, training=last, stage=1.0):
            continue
        for training, stage, fitted in trainings(name):
            verdict = fitted.check()
            told = {cause: verdict.causes[cause].nats for cause in verdict.causes}
            row = {"problem": name, "training": training, "stage": stage}
            row |= {"bound": fitted.bound, "se": fitted.bound_se, "told": told}
            row |= {"converged": verdict.converged, "true q(u)": None, "true points": None}
            if name not in (*RANDOM, *TOO_MANY):
                row["true q(u)"] = gain_in_q(fitted)
            if name in REGRESSION:
                row["true points"] = lost_to_points(fitted)
            results.add(row)
            print(row, flush=True)


def table(results):
    """The rows of docs/records/fit.md, and what they come to."""
    best = {}
    for row in Results(FOLDER / "defaults.json", ["problem", "method", "float64"]).rows():
        best[row["problem"]] = max(row["bound"], best.get(row["problem"], -np.inf))
    heads = (
        "problem",
        "training",
        "told q(u)",
        "true",
        "told others",
        "below best",
        "verdict",
    )
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    ratios, wrong, missed = [], [], []
    rows = results.rows()
    for row in rows:
        told, true = row["told"], row["true q(u)"]
        below = max(best.get(row["problem"], np.nan) - row["bound"], 0.0)
        if true is not None and 0.05 <= true <= 100 and np.isfinite(told["q(u)"]):
            ratios.append((told["q(u)"] / true, row))
        if row["converged"] and below > 1.0:
            wrong.append((below, row))
        if row["true points"] is not None:
            missed.append(told["inducing points"] / row["true points"])
        cells = [row["problem"], f"{row['training']}, {100 * row['stage']:.0f} %"]
        numbers = told["q(u)"], true, told["other parameters"], below
        cells += ["" if n is None or np.isnan(n) else f"{n:.3g}" for n in numbers]
        cells.append("converged" if row["converged"] else "not converged")
        print(f"| {' | '.join(cells)} |")
    inside = [1 / 1.3 <= ratio <= 1.3 for ratio, _ in ratios]
    print(f"\nq(u), true nats from 0.05 to 100: {sum(inside)} of {len(inside)} within 1.3")
    for ratio, row in ratios:
        if not 1 / 1.3 <= ratio <= 1.3:
            print(f"  {row['problem']}, {row['training']} {row['stage']}: {ratio:.2f}")
    print(f"converged with more than 1 nat below the best: {len(wrong)} of {len(rows)}")
    for below, row in wrong:
        print(f"  {row['problem']}, {row['training']} {row['stage']}: {below:.2f}")
    print("told of what is lost to points:", np.round(missed, 2).tolist())


if __name__ == "__main__":
    main()

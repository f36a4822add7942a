"""
Fig. 5 of SAVIGP (Bonilla, Krauth and Dezfouli 2018): intensities of 811 bins of coal-mining
disasters by each approximation, beside NUTS on all of f.

    python benchmarks/mining.py           # some ten minutes; goes on where it was stopped
    python benchmarks/mining.py --table

Of each method `mae`, the mean over bins of |mean - NUTS's|, and `sd ratio`, the mean over
bins of its sds over those of NUTS. FG is `fit` with inducing inputs that are not trained,
MoG1 and MoG2 are the paper's diagonal mixtures with its unwhitened u, its bound and its
nugget, by L-BFGS. Hyperparameters are the paper's, fixed. In double precision.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from _results import FOLDER, Results
from numpyro.infer import HMC, NUTS

import numpyro_sgp as sgp

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import coal_mining  # noqa: E402

BINS = 811
FACTORS = 0.1, 0.2, 0.5, 1.0
CHAINS = "NUTS", "HMC", "ESS"
#: The paper's, beside its HMC, from the authors' stored results: MAE and mean ratio of sds.
#: Of the mixtures only ranges are known: .0006 to .0018, and .22 to .23.
PUBLISHED = {
    "FG": ((0.0005, 0.0011, 0.0011, 0.0003), (1.04, 1.06, 1.01, 1.04)),
    "MoG1": ((0.0018,) * 4, (0.23,) * 4),
    "MoG2": ((0.0018,) * 4, (0.23,) * 4),
}
#: Its elliptical slices.
PUBLISHED_ESS = 0.00015, 1.002
RESULTS = FOLDER / "mining.json"
SETTINGS = SimpleNamespace(
    num_warmup=500,
    num_samples=2000,
    num_chains=2,
    num_draws=10,
    num_steps=0,  # of Adam: L-BFGS it is
    seed=0,
    quiet=True,
)


def chains(name, X, y):
    """Moments of the intensities by MCMC, with R-hat and effective draws of f."""
    white = sgp.whiten(coal_mining.model)
    kernel = {
        "NUTS": lambda: NUTS(white),
        "HMC": lambda: HMC(white, trajectory_length=2.0),
        "ESS": lambda: sgp.EllipticalSlice(white),
    }[name]()
    steps = 20_000 if name == "ESS" else None
    fit = coal_mining.run_mcmc(kernel, X, y, SETTINGS, num_steps=steps)
    r_hat, worst, _ = coal_mining.mixing(fit)
    (moments,) = coal_mining.intensity_moments({name: fit}, {}, BINS).values()
    return moments, {"r-hat": float(r_hat), "ess": float(worst)}


def fitted(name, factor, X, y):
    """The same of a sparse approximation, in closed form."""
    M, nugget = round(factor * BINS), 0.0
    if name == "FG":
        approximation = sgp.SVGP(M, train_inducing=False)
        fit = sgp.fit(coal_mining.model, approximation, (X, y), progress_bar=False)
        q, bound = fit.posterior(X)["f"], fit.bound
    else:
        ((_, approximation, options),) = coal_mining.sparse_fits(M, [name.lower()])
        tree, q = coal_mining.run_svi(approximation, X, y, SETTINGS, **options)
        nugget, bound = coal_mining.NUGGET, float(tree.attrs["elbo"])
    marginals = {name: q}
    found = coal_mining.intensity_moments({name: None}, marginals, BINS, nugget)
    return found[name], {"bound": float(bound)}


def main(args):
    results = Results(args.results, ["method", "factor"])
    if args.table:
        print(table(results.rows()))
        return
    numpyro.enable_x64()
    coal = sgp.datasets.coal_mining(BINS)
    X, y = jnp.asarray(coal.bin_centre_day, float)[:, None], np.asarray(coal.count)
    jobs = [(name, None) for name in CHAINS]
    jobs += [(name, factor) for factor in FACTORS for name in PUBLISHED]
    for name, factor in jobs:
        if results.has(method=name, factor=factor):
            continue
        found, told = chains(name, X, y) if factor is None else fitted(name, factor, X, y)
        mean, sd = (np.round(part, 5).tolist() for part in found)
        row = {"method": name, "factor": factor, "mean": mean, "sd": sd, **told}
        results.add(row)
        jax.clear_caches()
        print(table(results.rows()).splitlines()[-1], file=sys.stderr, flush=True)


def compared(rows):
    """By method and factor: MAE and mean ratio of sds beside NUTS."""
    by = {(row["method"], row["factor"]): row for row in rows}
    if ("NUTS", None) not in by:
        return {}
    mean, sd = (np.array(by["NUTS", None][part]) for part in ("mean", "sd"))
    return {
        key: (float(np.mean(np.abs(row["mean"] - mean))), float(np.mean(row["sd"] / sd)))
        for key, row in by.items()
    }


def table(rows):
    """What was found beside the paper's."""
    lines = ["| method | SF | MAE [paper] | ratio of sds [paper] |", "|---|---|---|---|"]
    for (name, factor), (mae, ratio) in compared(rows).items():
        told = PUBLISHED_ESS if name == "ESS" else (None, None)
        if name in PUBLISHED:
            told = tuple(part[FACTORS.index(factor)] for part in PUBLISHED[name])
        cells = [
            f"{value:.{digits}f}" + ("" if paper is None else f" [{paper:g}]")
            for value, paper, digits in zip((mae, ratio), told, (5, 3), strict=True)
        ]
        lines.append(f"| {name} | {factor or ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there, and end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

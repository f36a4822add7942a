"""
Fully Bayesian sparse regression: NUTS on collapsed bounds
==========================================================

Snelson's 100 points with priors on lengthscale, variance and noise. The response is one
site, whose distribution is the exact marginal likelihood or a collapsed bound with f and
q(u) integrated out: NUTS runs over three numbers. Prints what each bound makes of the
hyperparameters, with R-hat, and draws the predictions.

    python examples/sparse_regression.py
    python examples/sparse_regression.py --num-inducing 8 --tight block
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib.figure import Figure
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS, Predictive

import numpyro_sgp as sgp

SITES = ("lengthscale", "variance", "noise")


def model(X, y, marginal, X_new=None):
    """GP regression whose evidence is that of ``marginal(kernel, X, noise)``."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    fn = marginal(sgp.kernels.RBF(variance, lengthscale), X, noise)
    numpyro.sample("y", fn, obs=y)
    if X_new is not None:
        new = fn.predictive(y, X_new)
        numpyro.deterministic("mean", new.mean)
        numpyro.deterministic("sd", new.scale)


def marginals(Z, O, tight):
    """The distributions of y to compare, by name."""

    def svgp(points, tight="none"):
        return lambda kernel, X, s: sgp.CollapsedSVGP(kernel, X, points, s, tight=tight)

    def solve(tight):
        return lambda kernel, X, s: sgp.CollapsedSOLVEGP(kernel, X, Z, O, s, tight=tight)

    M, M2 = len(Z), len(O)
    return {
        "exact": sgp.MarginalGP,
        f"SVGP {M}": svgp(Z),
        f"SVGP {M}, {tight}": svgp(Z, tight),
        f"SOLVE-GP {M} + {M2}": solve("none"),
        f"SOLVE-GP {M} + {M2}, {tight}": solve(tight),
        f"SVGP {M + M2}": svgp(jnp.concatenate([Z, O])),
    }


def fit(marginal, X, y, X_new, args, seed):
    """Samples by NUTS: their summary, predictions at X_new, and seconds."""
    mcmc = MCMC(
        NUTS(model),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="sequential",
        progress_bar=not args.quiet,
    )
    begin = time.perf_counter()
    mcmc.run(jax.random.key(seed), X, y, marginal)
    seconds = time.perf_counter() - begin
    predictive = Predictive(model, mcmc.get_samples(), return_sites=["mean", "sd"])
    found = predictive(jax.random.key(1), X, y, marginal, X_new)
    mean = found["mean"].mean(axis=0)
    sd = jnp.sqrt(jnp.mean(found["sd"] ** 2, axis=0) + found["mean"].var(axis=0))
    draws = {
        name: np.asarray(mcmc.get_samples(group_by_chain=True)[name]) for name in SITES
    }
    return {"summary": summary(draws), "mean": mean, "sd": sd, "s": seconds, "draws": draws}


def table(fits):
    """Posterior means and standard deviations of the hyperparameters."""
    lines = [
        "".join(["", *(f"{name:>20s}" for name in ("", *SITES))]) + "   R-hat   seconds"
    ]
    for name, fitted in fits.items():
        cells = [
            f"{fitted['summary'][s]['mean']:9.3f} ± {fitted['summary'][s]['std']:.3f}"
            for s in SITES
        ]
        worst = max(float(fitted["summary"][s]["r_hat"]) for s in SITES)
        lines.append(
            f"{name:>20s}"
            + "".join(f"{c:>20s}" for c in cells)
            + f"{worst:8.3f}{fitted['s']:10.1f}"
        )
    return "\n".join(lines)


def draw(fits, X, y, X_new, Z, O):
    """Predictions of each fit over the exact GP's, and the noise that each finds."""
    figure = Figure(figsize=(11.0, 6.5), layout="constrained")
    axes = figure.subplot_mosaic(
        [[*range(3), "noise"], [*range(3, 6), "noise"]], width_ratios=[1, 1, 1, 1.1]
    )
    exact = fits["exact"]
    x = X_new[:, 0]
    for i, (name, fitted) in enumerate(fits.items()):
        axis = axes[i]
        axis.plot(X[:, 0], y, ".", color="0.6", markersize=3)
        low, high = (fitted["mean"] + s * 2 * fitted["sd"] for s in (-1, 1))
        axis.fill_between(x, low, high, color="C0", alpha=0.25, linewidth=0)
        axis.plot(x, fitted["mean"], color="C0", label="mean ± 2 sd of y")
        if name != "exact":
            for sign in (-1, 0, 1):
                line = exact["mean"] + sign * 2 * exact["sd"]
                axis.plot(
                    x, line, "k:", linewidth=0.9, label="exact GP" if not sign else None
                )
            axis.plot(Z[:, 0], jnp.full(len(Z), -3.1), "k|", label="Z")
            if name == f"SVGP {len(Z) + len(O)}":
                axis.plot(O[:, 0], jnp.full(len(O), -3.1), "k|")
            if "SOLVE" in name:
                axis.plot(O[:, 0], jnp.full(len(O), -3.3), "r|", label="O")
        axis.set_title(name, fontsize=10)
        axis.set_ylim(-3.5, 2.5)
    handles = axes[4].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=9)
    for i, fitted in enumerate(fits.values()):
        noise = fitted["draws"]["noise"].ravel()
        part = np.quantile(noise, [0.05, 0.25, 0.5, 0.75, 0.95])
        axes["noise"].plot(part[[0, 4]], [i, i], color="C0", linewidth=1)
        axes["noise"].plot(part[[1, 3]], [i, i], color="C0", linewidth=4)
        axes["noise"].plot(part[2], i, "o", color="white", markersize=3)
    axes["noise"].axvline(float(np.median(exact["draws"]["noise"])), color="k", ls=":")
    axes["noise"].set_yticks(range(len(fits)), list(fits), fontsize=8)
    axes["noise"].invert_yaxis()
    axes["noise"].set_xlabel("noise: 50 % and 90 % intervals")
    return figure


def main(args):
    """Runs all, prints the table, saves the figure."""
    numpyro.enable_x64()
    X, y, X_new = (jnp.asarray(a) for a in sgp.datasets.snelson_subset())
    order = jnp.argsort(X[:, 0])  # neighbours in one block
    X, y = X[order], y[order]
    M = args.num_inducing
    start = sgp.initial_inducing(np.asarray(X), M, "kmeans", num_orthogonal=(M,))
    Z, O = jnp.asarray(start.Z), jnp.asarray(start.O[0])
    fits = {}
    for i, (name, marginal) in enumerate(marginals(Z, O, args.tight).items()):
        fits[name] = fit(marginal, X, y, X_new, args, seed=i)
    print(table(fits))
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "sparse_regression.png"
    draw(fits, X, y, X_new, Z, O).savefig(path, dpi=120)
    print(f"saved {path}")


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-inducing", type=int, default=6, help="of Z, and of O")
    parser.add_argument("--tight", choices=("diagonal", "block"), default="diagonal")
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-samples", type=int, default=1000, help="of each chain")
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--output", type=Path, default=Path("figures"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

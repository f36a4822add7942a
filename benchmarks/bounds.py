"""
Bounds of the evidence of GP regression, and the noise that they learn.

    python benchmarks/bounds.py
    python benchmarks/bounds.py --data FOLDER             # with concrete.npz
    python benchmarks/bounds.py --table > docs/records/bounds.md

First all collapsed bounds of one problem with known hyperparameters, then hyperparameters
and inducing points learned by L-BFGS with each bound, on Snelson's 100 points and, where
``--data`` is given, on the UCI set concrete. What is computed is kept in ``--results``.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from _results import FOLDER, write
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

import numpyro_sgp as sgp
from numpyro_sgp import relaxation


def toy():
    """All bounds of one draw of a GP at its own hyperparameters, in nats."""
    rng = np.random.default_rng(1)
    X = jnp.asarray(np.sort(rng.uniform(-5.0, 5.0, 120))[:, None])
    kernel, noise = sgp.kernels.RBF(1.0, 0.6), 0.1
    y = sgp.MarginalGP(kernel, X, noise).sample(jax.random.key(0))
    points = jnp.linspace(-5.0, 5.0, 15)[:, None]
    Z, O = points[::2], points[1::2]
    svgp = lambda Z, **o: sgp.CollapsedSVGP(kernel, X, Z, noise, **o)  # noqa: E731
    solve = lambda **o: sgp.CollapsedSOLVEGP(kernel, X, Z, O, noise, **o)  # noqa: E731
    # With the default tol of one nat, rounding decides in which step the iteration ends.
    cg = lambda Z, **o: sgp.CollapsedCG(kernel, X, Z, noise, tol=0.01, **o)  # noqa: E731
    rows = {
        "Titsias 2009, Z (eq. 3)": svgp(Z),
        "appendix A of SOLVE-GP, Z (eq. 14)": svgp(Z, tight="conditional"),
        "diagonal, Z": svgp(Z, tight="diagonal"),
        "12 blocks of 10, Z": svgp(Z, tight=relaxation.Blocks(10)),
        "3 blocks of 40, Z": svgp(Z, tight=relaxation.Blocks(40)),
        "ODVGP, Z + O (eq. 10)": sgp.CollapsedODVGP(kernel, X, Z, O, noise),
        "SOLVE-GP, Z + O (eq. 30)": solve(),
        "SOLVE-GP and diagonal": solve(tight="diagonal"),
        "SOLVE-GP and 6 blocks of 20": solve(tight=relaxation.Blocks(20)),
        "Titsias 2009, Z and O together": svgp(points),
        "diagonal, Z and O together": svgp(points, tight="diagonal"),
        "conjugate gradients, no relaxation, Z": cg(Z, tight="none"),
        "conjugate gradients and diagonal, Z": cg(Z, tight="diagonal"),
        "conjugate gradients and 3 blocks of 40, Z": cg(Z, tight=relaxation.Blocks(40)),
        "exact": sgp.MarginalGP(kernel, X, noise),
    }
    return {name: float(fn.log_prob(y)) for name, fn in rows.items()}


def positive(name, start):
    """A positive parameter."""
    return numpyro.param(name, jnp.asarray(start), constraint=constraints.positive)


def learn(X, y, Z, O, kind, tight, size, starts):
    """Hyperparameters and inducing points by L-BFGS: bound and noise variance."""

    def model(X, y):
        kernel = sgp.kernels.RBF(
            positive("variance", 1.0), positive("lengthscale", starts["lengthscale"])
        )
        noise = positive("noise", starts["noise"])
        if kind == "exact":
            fn = sgp.MarginalGP(kernel, X, noise)
        else:
            option = {"tight": relaxation.Blocks(size) if tight == "block" else tight}
            points = numpyro.param("Z", Z)
            if kind == "SVGP":
                fn = sgp.CollapsedSVGP(kernel, X, points, noise, **option)
            else:
                fn = sgp.CollapsedSOLVEGP(
                    kernel, X, points, numpyro.param("O", O), noise, **option
                )
        numpyro.sample("y", fn, obs=y)

    svi = SVI(model, lambda X, y: None, optax.adam(0.01), Trace_ELBO())
    result = sgp.fit_lbfgs(
        svi, jax.random.key(0), X, y, max_iterations=1000, progress_bar=False
    )
    return -float(result.losses[-1]), float(result.params["noise"]) ** 2


def learned(X, y, cases, size, starts):
    """Bound and noise variance by each bound, the exact GP first; blocks of ``size``."""
    bound, noise = learn(X, y, None, None, "exact", "none", None, starts)
    rows = [{"method": "exact GP", "tight": "", "bound": bound, "noise_variance": noise}]
    for kind, M, M2 in cases:
        start = sgp.initial_inducing(
            np.asarray(X), M, "kmeans", num_orthogonal=(M2,) if M2 else ()
        )
        Z, O = jnp.asarray(start.Z), jnp.asarray(start.O[0]) if M2 else None
        for tight in ("none", "diagonal", "block"):
            bound, noise = learn(X, y, Z, O, kind, tight, size, starts)
            name = f"SVGP {M}" if kind == "SVGP" else f"SOLVE-GP {M} + {M2}"
            rows.append(
                {"method": name, "tight": tight, "bound": bound, "noise_variance": noise}
            )
    return rows


def snelson():
    """The same on Snelson's points, in blocks of neighbours."""
    X, y, *_ = sgp.datasets.snelson_subset()
    X, y = jnp.asarray(X), jnp.asarray(y)
    order = jnp.argsort(X[:, 0])
    cases = [("SVGP", 5, 0), ("SVGP", 10, 0), ("SOLVE", 5, 5)]
    starts = {"lengthscale": 0.6, "noise": 0.3}
    return learned(X[order], y[order], cases, 10, starts)


HEAD = """\
# Bounds of the evidence

Made by `python benchmarks/bounds.py --table` from what that script computed.

One draw of a GP (RBF, lengthscale 0.6, noise 0.1) at 120 points of [-5, 5], at the
hyperparameters that made it; 8 inducing points Z and 7 orthogonal ones O between them.
The relaxed bounds (diagonal, blocks) are those of Titsias (2025) and Bui & Titsias
(2025), here with SOLVE-GP too; they have the posterior of the bound that they relax.
Conjugate gradients end 0.01 nats from their limit or nearer.

| bound | nats |
|---|---|"""

NOISE = """
## The noise that they learn

A bound that charges for what the inducing points leave unexplained by tr(D) / (2 s^2)
learns too much noise. Hyperparameters and inducing points by L-BFGS, in float64."""

TITLES = {
    "snelson": "Snelson, 100 points",
    "concrete": "Concrete (UCI), 1030 rows, 8 inputs, standardised",
}


def page(results):
    """docs/records/bounds.md."""
    lines = [HEAD]
    lines += [f"| {name} | {value:.1f} |" for name, value in results["toy"].items()]
    lines.append(NOISE)
    for name, title in TITLES.items():
        if name not in results:
            continue
        lines += [
            f"\n### {title}\n",
            "| | relaxed | evidence or bound, nats | noise variance "
            "| over the exact GP's |",
            "|---|---|---|---|---|",
        ]
        exact = results[name][0]["noise_variance"]
        for row in results[name]:
            tight, noise = row["tight"], row["noise_variance"]
            lines.append(
                f"| {row['method']} |{tight and f' {tight}'} | {row['bound']:.2f} "
                f"| {noise:.4f} | {noise / exact:.2f} |"
            )
    return "\n".join(lines)


def main(args):
    """Computes what the data allow, and prints the page."""
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.table:
        print(page(results))
        return
    numpyro.enable_x64()
    results["toy"] = toy()
    results["snelson"] = snelson()
    if args.data is not None:
        with np.load(args.data / "concrete.npz") as file:
            X, y = file["X"].astype(float), file["y"].astype(float)
        X, y = (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()
        rows = sgp.neighbour_blocks(X, 52).ravel()
        rows = rows[rows >= 0]
        starts = {"lengthscale": 2.0, "noise": 0.3}
        cases = [("SVGP", 50, 0), ("SVGP", 100, 0), ("SOLVE", 50, 50)]
        X, y = jnp.asarray(X[rows]), jnp.asarray(y[rows])
        results["concrete"] = learned(X, y, cases, 50, starts)
    write(args.results, json.dumps(results, indent=1).encode())
    print(page(results))


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with concrete.npz")
    parser.add_argument("--results", type=Path, default=FOLDER / "bounds.json")
    parser.add_argument("--table", action="store_true", help="print what is there, and end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

"""
Deep GP regression (Salimbeni & Deisenroth 2017), with SVGP and with SOLVE-GP in every layer
(Shi, Titsias & Mnih 2020, section 4): one to three layers.

    python benchmarks/deep.py --data FOLDER
    python benchmarks/deep.py --table

FOLDER has ``NAME.npz`` for each set, with arrays ``X`` (N, D) and ``y`` (N,).

Splits and standardisation are those of ``regression.py``. Inner layers are as wide as the
input, with the identity for their mean, q(u) near zero variance and one RBF kernel with a
lengthscale for each column; shared inducing points; Adam, whose rate decays to a hundredth
on a cosine; the test log likelihood (LL) and RMSE, in standardised units, are those of a
mixture over draws of the inner layers. SVGP has M points in each layer, SOLVE M + M.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _results import FOLDER, Results
from numpyro.distributions import constraints
from numpyro.infer import SVI
from regression import load, median_distance

import numpyro_sgp as sgp

RESULTS = FOLDER / "deep.json"
COLUMNS = ("set", "layers", "method", "inducing")
OPTIONS = ("steps", "batch_size", "rate", "draws")


def make_model(num_layers, lengthscale):
    """GP regression by a number of layers, on a batch of rows out of ``num_rows``."""

    def positive(name, start):
        start = jnp.asarray(start, jnp.result_type(float))
        return numpyro.param(name, start, constraint=constraints.softplus_positive)

    def model(X, y=None, num_rows=None):
        h, D = X, X.shape[1]
        for i in range(num_layers):
            last = i == num_layers - 1
            kernel = sgp.kernels.RBF(
                positive(f"variance{i}", 1.0 if last else 0.1),
                positive(f"lengthscale{i}", jnp.full(D, lengthscale)),
            )
            if last:
                f = sgp.layer(f"f{i}", kernel, h, 1, mean=None)[:, 0]
            else:
                h = sgp.layer(f"f{i}", kernel, h)
        with numpyro.plate("data", num_rows or len(X), subsample_size=len(X)):
            numpyro.sample("y", dist.Normal(f, positive("noise", 0.3)), obs=y)

    return model


def approximations(method, num_layers, M):
    """What is put at each layer."""

    def option(scale):
        if method == "SOLVE":
            return sgp.SOLVEGP(M, M, initial_scale=scale)
        return sgp.SVGP(M, initial_scale=scale)

    inner = {f"f{i}": option(1e-5) for i in range(num_layers - 1)}
    return {**inner, f"f{num_layers - 1}": option(1.0)}


def run(name, num_layers, method, split, args):
    """One fit: its errors and seconds."""
    X, y, X_test, y_test = load(args.data, name, split)
    model = make_model(num_layers, median_distance(X))
    guide = sgp.AutoSparseGP(model, approximations(method, num_layers, args.inducing))
    rate = optax.cosine_decay_schedule(args.rate, args.steps, 0.01)
    rule = sgp.GaussHermite(2) if num_layers == 1 else sgp.MonteCarlo(args.draws)
    svi = SVI(model, guide, optax.adam(rate), sgp.TraceGP_ELBO(rule))
    guide.setup(X[:4000], y[:4000], len(X))
    begin = time.perf_counter()
    fitted = sgp.train(
        svi,
        jax.random.key(split),
        (X, y),
        args.steps,
        num_rows=len(X),
        batch_size=args.batch_size,
    )
    seconds = time.perf_counter() - begin
    params, draws = fitted.params, args.test_draws if num_layers > 1 else 1

    @jax.jit
    def predict(X, y):
        """Log density, and the mean over draws."""
        key = jax.random.key(1)
        density = sgp.log_predictive_density(
            guide, params, X, y, rng_key=key, num_draws=draws
        )

        def mean(key):
            return guide.posterior(params, X, rng_key=key)[f"f{num_layers - 1}"].mean[0]

        return density["y"], jax.lax.map(mean, jax.random.split(key, draws)).mean(axis=0)

    parts = [
        predict(X_test[i : i + 500], y_test[i : i + 500])
        for i in range(0, len(X_test), 500)
    ]
    density, mean = (np.concatenate(part) for part in zip(*parts, strict=True))
    return {
        "set": name,
        "layers": num_layers,
        "method": method,
        "inducing": args.inducing,
        "split": split,
        "LL": float(density.mean()),
        "RMSE": float(np.sqrt(np.mean((mean - y_test) ** 2))),
        "steps": args.steps,
        "batch_size": args.batch_size,
        "rate": args.rate,
        "draws": args.draws,
        "bound": -float(np.mean(fitted.losses[-200:])),
        "fit_s": seconds,
        "noise": float(params["noise"]),
        "device": jax.devices()[0].device_kind,
    }


def table(rows):
    """A table of all fits in Markdown, means over splits."""
    lines = [
        "| set | layers | method | M | LL | RMSE | bound / 1000 | splits | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    names = COLUMNS + OPTIONS
    keys = sorted({tuple(row[k] for k in names) for row in rows})
    for key in sorted(keys, key=lambda k: (k[0], k[1], k[2] == "SOLVE")):
        same = [row for row in rows if tuple(row[k] for k in names) == key]
        means = {k: np.mean([row[k] for row in same]) for k in ("LL", "RMSE", "bound")}
        seconds = np.mean([row["fit_s"] for row in same])
        spread = ""
        if len(same) > 1:
            spread = f" ± {np.std([row['LL'] for row in same], ddof=1):.3f}"
        size = f"{key[3]} + {key[3]}" if key[2] == "SOLVE" else key[3]
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {size} | {means['LL']:.3f}{spread} | "
            f"{means['RMSE']:.3f} | {means['bound'] / 1000:.2f} | {len(same)} | "
            f"{seconds:.0f} |"
        )
    return "\n".join(lines)


def main(args):
    """Runs what is missing, or prints the table."""
    results = Results(args.results, (*COLUMNS, *OPTIONS, "split"))
    if args.table:
        print(table(results.rows()))
        return
    for split in args.splits:
        for name in args.sets:
            for num_layers in args.layers:
                for method in args.methods:
                    settings = {"set": name, "layers": num_layers, "method": method}
                    settings |= {"split": split, "inducing": args.inducing}
                    settings |= {k: getattr(args, k) for k in OPTIONS}
                    if not results.has(**settings):
                        row = run(name, num_layers, method, split, args)
                        results.add(row)
                        print({k: row[k] for k in (*COLUMNS, "split", "LL", "RMSE")})


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with the data")
    add("--table", action="store_true", help="print a table of the results")
    add("--sets", nargs="+", default=["kin40k", "protein"])
    add("--methods", nargs="+", default=["SVGP", "SOLVE"], choices=["SVGP", "SOLVE"])
    add("--layers", nargs="+", type=int, default=[1, 2, 3])
    add("--splits", nargs="+", type=int, default=[0])
    add("--inducing", type=int, default=100, help="M")
    add("--steps", type=int, default=6000)
    add("--batch-size", type=int, default=500)
    add("--rate", type=float, default=0.01)
    add("--draws", type=int, default=3, help="of all layers in a step")
    add("--test-draws", type=int, default=50, help="of inner layers")
    add("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if not args.table and args.data is None:
        parser.error("give --data FOLDER, or --table")
    return args


if __name__ == "__main__":
    main(parse())

"""
The regression benchmark of SOLVE-GP (Shi, Titsias & Mnih 2020, section 6.1) beside the
paper's numbers.

    python benchmarks/regression.py --data FOLDER --sets kin40k --methods SOLVE
    python benchmarks/regression.py --data FOLDER --inducing 256 --splits 0
    python benchmarks/regression.py --table      # the table of docs/records/regression.md

FOLDER has ``NAME.npz`` for each set, with arrays ``X`` (N, D) and ``y`` (N,).

The protocol is the paper's: 64 % of the rows train, 16 % are set aside (and not used),
20 % test, in random splits; X and y standardised by the training rows; Matern 3/2 kernel
with one lengthscale; whitened q(u); inducing points started by k-means; Adam with rate 0.01
on batches of 1024 rows for 100 epochs; test log likelihood (LL) and RMSE in standardised
units. Hyperparameters, which the paper does not say how to start, start at the median
distance (lengthscale), 1 (variance) and 0.1 (noise variance).

With M inducing points the methods are SVGP (M), SVGP1.5 (1.5 M), SVGP2 (2 M), ODVGP
(M + M) and SOLVE (M + M). ``--tight`` uses the tighter bounds of Titsias (2025) and Bui &
Titsias (2025), ``--natural`` trains q(u) by natural gradients.

Each fit is a row of ``--results``, and is not computed again; while it runs, its state is
kept in a folder beside it, so that a run that was stopped goes on from the last epochs.
"""

import argparse
import os
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
from tqdm import trange

import numpyro_sgp as sgp

SETS = ("kin40k", "protein", "keggdirected", "keggundirected", "elevators", "bike", "pol")
METHODS = ("SVGP", "SVGP1.5", "SVGP2", "ODVGP", "SOLVE")
BATCH = 1024
RESULTS = FOLDER / "regression.json"
# What a row is a mean over splits of, and what the rows of one fit have in common.
GROUP = ("set", "inducing", "method", "tight", "natural", "epochs", "rate", "dtype")

# Test log likelihood and RMSE with M = 1024: Tables 2, 6 and 7 of the paper.
PUBLISHED = {
    "kin40k": {
        "SVGP": (0.094, 0.193),
        "SVGP1.5": (0.129, 0.182),
        "SVGP2": (0.137, 0.177),
        "ODVGP": (0.137, 0.183),
        "SOLVE": (0.187, 0.172),
    },
    "protein": {
        "SVGP": (-0.963, 0.630),
        "SVGP1.5": (-0.949, 0.621),
        "SVGP2": (-0.940, 0.615),
        "ODVGP": (-0.956, 0.625),
        "SOLVE": (-0.943, 0.618),
    },
    "keggdirected": {
        "SVGP": (0.967, 0.098),
        "SVGP1.5": (0.944, 0.098),
        "SVGP2": (0.907, 0.100),
        "ODVGP": (-0.199, 0.176),
        "SOLVE": (0.973, 0.095),
    },
    "keggundirected": {
        "SVGP": (0.678, 0.123),
        "SVGP1.5": (0.673, 0.123),
        "SVGP2": (0.665, 0.124),
        "ODVGP": (0.105, 0.156),
        "SOLVE": (0.680, 0.123),
    },
    "elevators": {
        "SVGP": (-0.516, 0.398),
        "SVGP1.5": (-0.511, 0.396),
        "SVGP2": (-0.507, 0.395),
        "ODVGP": (-0.518, 0.397),
        "SOLVE": (-0.509, 0.395),
    },
    "bike": {
        "SVGP": (-0.218, 0.283),
        "SVGP1.5": (-0.203, 0.279),
        "SVGP2": (-0.193, 0.276),
        "ODVGP": (-0.191, 0.272),
        "SOLVE": (-0.189, 0.272),
    },
}


def load(folder, name, split):
    """Training and test rows of one split, standardised by the training rows."""
    with np.load(folder / f"{name}.npz") as file:
        X, y = file["X"].astype(float), file["y"].astype(float)
    order = np.random.default_rng(split).permutation(len(X))
    num_train, num_test = int(0.64 * len(X)), int(0.2 * len(X))
    train, test = order[:num_train], order[len(X) - num_test :]
    x_mean, x_scale = X[train].mean(axis=0), X[train].std(axis=0)
    x_scale[x_scale == 0] = 1.0
    X = (X - x_mean) / x_scale
    y = (y - y[train].mean()) / y[train].std()
    dtype = jnp.result_type(float)
    return tuple(jnp.asarray(a, dtype) for a in (X[train], y[train], X[test], y[test]))


def median_distance(X):
    """Between pairs of a thousand rows."""
    some = np.asarray(X[:1000])
    squared = ((some[:, None] - some[None]) ** 2).sum(axis=-1)
    return float(np.median(np.sqrt(squared[np.triu_indices(len(some), 1)])))


def make_model(lengthscale):
    """GP regression on a batch of rows out of ``num_rows``."""

    def positive(name, start):
        start = jnp.asarray(start, jnp.result_type(float))
        return numpyro.param(name, start, constraint=constraints.softplus_positive)

    def model(X, y=None, num_rows=None):
        kernel = sgp.kernels.Matern32(
            positive("variance", 1.0), positive("lengthscale", lengthscale)
        )
        noise = positive("noise", 0.1**0.5)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", num_rows or len(X), subsample_size=len(X)):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    return model


def approximation(method, num_inducing, tight):
    """What a method puts at the GP site."""
    options = {} if tight == "none" else {"tight": tight}
    M = num_inducing
    if method == "SOLVE":
        return sgp.SOLVEGP(M, M, **options)
    if method == "ODVGP":
        return sgp.ODVGP(M, M, **options)
    return sgp.SVGP(round(M * {"SVGP": 1, "SVGP1.5": 1.5, "SVGP2": 2}[method]), **options)


def run(name, method, split, args, kept):
    """One fit: its errors and seconds. ``kept`` is a file for its state meanwhile."""
    X, y, X_test, y_test = load(args.data, name, split)
    num_rows, num_batches = len(X), len(X) // BATCH
    model = make_model(median_distance(X))
    guide = sgp.AutoSparseGP(model, approximation(method, args.inducing, args.tight))
    optimiser = optax.adam(args.rate)
    if args.natural:
        optimiser = sgp.natural_gradients(guide, args.natural, optimiser)
    svi = SVI(model, guide, optimiser, sgp.TraceGP_ELBO(sgp.GaussHermite(2)))
    begin = time.perf_counter()
    guide.setup(X, y)
    state = svi.init(jax.random.key(split), X[:BATCH], y[:BATCH], num_rows)
    init_s = time.perf_counter() - begin

    @jax.jit
    def epoch(state, key):
        order = jax.random.permutation(key, num_rows)[: num_batches * BATCH]

        def step(state, rows):
            return svi.update(state, X[rows], y[rows], num_rows)

        return jax.lax.scan(step, state, order.reshape(num_batches, BATCH))

    start, times, losses = 0, [], []
    if kept.exists():
        state, times, losses = restore(kept, state)
        start = len(losses)
    for i in (bar := trange(start, args.epochs, desc=kept.stem, mininterval=10)):
        begin = time.perf_counter()
        state, loss = epoch(state, jax.random.fold_in(jax.random.key(split), i))
        losses.append(float(loss.mean()))
        times.append(time.perf_counter() - begin)
        bar.set_postfix_str(
            f"bound {-losses[-1]:.1f}, {times[-1] / num_batches:.3f} s/step"
        )
        if i % 5 == 4:
            save(kept, state, times, losses)
    params = svi.get_params(state)
    predict = jax.jit(lambda X: moments(guide, params, X))
    found = [predict(X_test[i : i + BATCH]) for i in range(0, len(X_test), BATCH)]
    mean, variance = (jnp.concatenate(part) for part in zip(*found, strict=True))
    noise = params["noise"]
    log_density = dist.Normal(mean, jnp.sqrt(variance + noise**2)).log_prob(y_test)
    row = {
        "set": name,
        "method": method,
        "inducing": args.inducing,
        "tight": args.tight,
        "natural": args.natural,
        "split": split,
        "epochs": args.epochs,
        "rate": args.rate,
        "dtype": X.dtype.name,
        "device": jax.devices()[0].device_kind,
        "LL": float(log_density.mean()),
        "RMSE": float(jnp.sqrt(jnp.mean((mean - y_test) ** 2))),
        "bound": -losses[-1],
        "noise_variance": float(noise**2),
        "variance": float(params["variance"]),
        "lengthscale": float(params["lengthscale"]),
        "init_s": init_s,
        "train_s": sum(times),
        "step_s": float(np.median(times)) / num_batches,  # not the epoch that compiled
        "bounds": [round(-value, 2) for value in losses],
    }
    if not np.isfinite(row["LL"]):
        raise FloatingPointError(f"{kept.stem}: the fit is not finite: {row}")
    return row


def moments(guide, params, X):
    """Marginal moments of f."""
    posterior = guide.posterior(params, X)["f"]
    return posterior.mean, posterior.variance


def save(path, state, times, losses):
    """Keep what a stopped run needs."""
    state = state._replace(rng_key=jax.random.key_data(state.rng_key))
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    part = path.with_suffix(".part.npz")
    np.savez(part, times=times, losses=losses, **leaves)
    os.replace(part, path)


def restore(path, like):
    """State, and seconds and loss of each epoch, that :func:`save` kept."""
    as_data = like._replace(rng_key=jax.random.key_data(like.rng_key))
    with np.load(path) as file:
        leaves = [jnp.asarray(file[str(i)]) for i in range(len(jax.tree.leaves(as_data)))]
        times, losses = file["times"].tolist(), file["losses"].tolist()
    state = jax.tree.unflatten(jax.tree.structure(as_data), leaves)
    key = jax.random.wrap_key_data(state.rng_key)
    return state._replace(rng_key=key), times, losses


def label(method, tight, natural):
    """How a fit is called."""
    parts = [method]
    if tight != "none":
        parts.append(tight)
    if natural:
        parts.append("natural")
    return "-".join(parts)


def table(rows):
    """All results as a table in Markdown, means over splits and their standard errors."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in GROUP), []).append(row)
    lines = [
        "| set | M | method | splits | LL | RMSE | paper (M = 1024) | noise variance |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def order(item):
        name, M, method, tight, natural, *_ = item[0]
        return SETS.index(name), M, METHODS.index(method), tight, natural

    def cell(rows, key):
        values = np.array([row[key] for row in rows])
        error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.3f}" if len(rows) > 1 else ""
        return f"{values.mean():.3f}{error}"

    for group, rows in sorted(groups.items(), key=order):
        name, M, method, tight, natural, epochs, rate, dtype = group
        told = PUBLISHED.get(name, {}).get(method) if M == 1024 else None
        paper = f"{told[0]}, {told[1]}" if told else ""
        called = label(method, tight, natural)
        if epochs != 100:
            called += f", {epochs} epochs"
        called += f", rate {rate:g}" if rate != 0.01 else ""
        called += f", {dtype}" if dtype != "float32" else ""
        lines.append(
            f"| {name} | {M} | {called} | {len(rows)} | {cell(rows, 'LL')} "
            f"| {cell(rows, 'RMSE')} | {paper} | {cell(rows, 'noise_variance')} |"
        )
    return "\n".join(lines)


def main(args):
    """Runs what is missing, then prints the table."""
    results = Results(args.results, (*GROUP, "split"))
    if args.table:
        print(table(results.rows()))
        return
    if args.data is None:
        raise SystemExit("--data FOLDER is needed, the folder with NAME.npz for each set.")
    if args.float64:
        numpyro.enable_x64()
    # Accelerators would round the factors of float32 products to 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    for name in args.sets:
        if not (args.data / f"{name}.npz").exists():
            raise SystemExit(f"There is no {name}.npz in {args.data}.")
        for split in args.splits:
            for method in args.methods:
                settings = {"set": name, "method": method, "split": split}
                settings |= {k: getattr(args, k) for k in GROUP if hasattr(args, k)}
                settings["dtype"] = jnp.result_type(float).name
                if results.has(**settings):
                    continue
                stem = "-".join(f"{value}" for value in settings.values())
                kept = results.piece(f"{stem}.npz")
                row = run(name, method, split, args, kept)
                results.add(row)
                kept.unlink(missing_ok=True)
                row.pop("bounds")
                print(row, flush=True)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with NAME.npz")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--splits", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--inducing", type=int, default=1024, help="M")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.01, help="of Adam")
    parser.add_argument("--tight", choices=("none", "diagonal", "block"), default="none")
    parser.add_argument(
        "--natural", type=float, default=0.0, help="rate of natural gradients; 0: Adam"
    )
    parser.add_argument("--float64", action="store_true", help="double precision")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there, and end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

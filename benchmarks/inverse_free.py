"""
Steps without inverses against steps with a Cholesky factor
===========================================================

Seconds per training step of whitened SVGP, which factorises K_uu, and of InverseFreeSVGP,
in minibatches of kin40k; the same in units of one M x M matrix product of that precision;
and how many such products each step has by count: those in the step's program, with the
loop of T counted as often as it ran. With ``--train SECONDS``, the bound that each
reaches over time.

    python benchmarks/inverse_free.py --data FOLDER --inducing 256 512 1024
    python benchmarks/inverse_free.py --data FOLDER --dtypes float64 --train 60
    python benchmarks/inverse_free.py --table > docs/records/inverse_free.md

FOLDER has ``kin40k.npz`` with arrays ``X`` and ``y``. Results go to ``--results`` by
device; what is there is not measured again.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _results import FOLDER, write
from jax.extend.core import jaxprs_in_params
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_sgp as sgp

AFTER = (2, 5, 10, 20)  # seconds of training
RESULTS = FOLDER / "inverse_free.json"
METHODS = {
    "SVGP": lambda M: sgp.SVGP(M, inducing="random"),
    "relaxed": lambda M: sgp.InverseFreeSVGP(M, inducing="random"),
    "relaxed, stochastic KL": lambda M: sgp.InverseFreeSVGP(
        M, inducing="random", kl="stochastic"
    ),
    "relaxed, diagonal, stochastic KL": lambda M: sgp.InverseFreeSVGP(
        M, inducing="random", covariance="diagonal", kl="stochastic"
    ),
    "lc, stochastic KL": lambda M: sgp.InverseFreeSVGP(
        M, inducing="random", bound="lc", kl="stochastic"
    ),
}


def make_model(dtype):
    """GP regression on a batch of rows out of ``num_rows``."""

    def positive(name, start):
        return numpyro.param(
            name, jnp.asarray(start, dtype), constraint=constraints.softplus_positive
        )

    def model(X, y, num_rows):
        kernel = sgp.kernels.Matern32(
            positive("variance", 1.0), positive("lengthscale", 3.0)
        )
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", num_rows, subsample_size=len(X)):
            numpyro.sample("y", dist.Normal(f, positive("noise", 0.3)), obs=y)

    return model


def load(folder, dtype):
    """All rows, standardised."""
    with np.load(folder / "kin40k.npz") as file:
        X, y = file["X"].astype(float), file["y"].astype(float)
    X, y = (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()
    return jnp.asarray(X, dtype), jnp.asarray(y, dtype)


def products(jaxpr, M, loop):
    """
    Arithmetic of a program in units of an M x M product: in products, and in factors and
    triangular solves.

    :param loop: how often a while loop runs.
    """
    dense = solves = 0.0
    for equation in jaxpr.eqns:
        name, shapes = equation.primitive.name, [v.aval.shape for v in equation.invars]
        if name == "dot_general":
            (left, _), _ = equation.params["dimension_numbers"]
            inner = np.prod([shapes[0][i] for i in left])
            dense += np.prod(equation.outvars[0].aval.shape) * inner / M**3
        elif name == "cholesky":
            solves += shapes[0][-1] ** 3 / (6 * M**3)
        elif name == "triangular_solve":
            solves += np.prod(shapes[1]) * shapes[0][-1] / (2 * M**3)
        times = loop if name == "while" else equation.params.get("length", 1)
        params = equation.params
        if name == "custom_linear_solve":  # beside the product that it is the inverse of
            params = {"solve": params["jaxprs"].solve}
        for inside in jaxprs_in_params(params):
            more = products(inside, M, loop)
            # Adaptive jitter is a loop that does not run, beside that of T.
            dense += times * more[0]
            solves += (0 if name == "while" else times) * more[1]
    return dense, solves


def measure(method, M, dtype, args):
    """Seconds and products of a step, and the bound over time."""
    X, y = load(args.data, dtype)
    num_rows, B = len(X), args.batch
    model = make_model(dtype)
    guide = sgp.AutoSparseGP(model, METHODS[method](M))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO(sgp.GaussHermite(2)))
    guide.setup(X[: 4 * M], y[: 4 * M], num_rows)
    state = svi.init(jax.random.key(0), X[:B], y[:B], num_rows)

    def step(state, key):
        rows = jax.random.choice(key, num_rows, (B,), replace=False)
        state, loss = svi.update(state, X[rows], y[rows], num_rows)
        steps = 0.0
        if state.mutable_state:
            steps = jnp.asarray(state.mutable_state["f_auto_T"]["num_steps"], float)
        return state, (loss, steps)

    run = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys))
    losses, loops, seconds = [], [], []
    keys = jax.random.split(jax.random.key(1), 100_000)
    begin = time.perf_counter()
    state, _ = run(state, keys[: args.chunk])
    jax.block_until_ready(state)
    compiled = time.perf_counter() - begin
    done, spent = args.chunk, 0.0
    while len(seconds) < 5 or (args.train and spent < args.train):
        begin = time.perf_counter()
        state, (loss, steps) = run(state, keys[done : done + args.chunk])
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - begin) / args.chunk)
        spent, done = spent + seconds[-1] * args.chunk, done + args.chunk
        losses.append(round(float(jnp.mean(loss)), 1))
        loops.append(float(jnp.mean(steps)))
    program = jax.make_jaxpr(step)(state, keys[0]).jaxpr
    dense, solves = products(program, M, loops[-1])
    return {
        "step_s": float(np.median(seconds)),
        "first_s": compiled,
        "T_steps": loops[-1],
        "products": dense,
        "solves": solves,
        "chunk": args.chunk,
        "bounds": [-loss for loss in losses],
        "seconds": [round(s * args.chunk, 3) for s in seconds],
    }


def product_seconds(M, dtype):
    """Of one M x M matrix product."""
    A = jax.random.normal(jax.random.key(0), (M, M), dtype)
    times = max(3, int(2e11 / M**3))

    @jax.jit
    def many(A):
        def body(i, B):
            return jnp.tanh(A @ B) * 1e-3

        return jax.lax.fori_loop(0, times, body, A)

    many(A).block_until_ready()
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        many(A).block_until_ready()
        found.append((time.perf_counter() - begin) / times)
    return min(found)


def page(results):
    """docs/records/inverse_free.md."""
    lines = [
        "# Steps without inverses\n",
        "Made by `python benchmarks/inverse_free.py --table`: training steps on kin40k in",
        "minibatches, medians. A *product* is one M x M matrix product of the same",
        "precision on the same device. *Counted*: products in the step's program, the loop",
        "of T as often as it ran, and in brackets Cholesky factors and triangular solves",
        "in the same unit of arithmetic. *T steps* are those of the loop in each step,",
        "early in training, where hyperparameters move most.\n",
        "All times are older than SVGP's present step, for which [speed.md](speed.md) has",
        "94 ms on two cores of a CPU at M = 1024 in float32 where the table below has 178:",
        "steps of `InverseFreeSVGP` now take more of SVGP's than the tables say. What is",
        "counted for `InverseFreeSVGP` is as it was; SVGP's on a CPU is less",
        "([operations](speed.md#operations-of-a-step)). On the GPU, float32 steps of",
        "`InverseFreeSVGP` were measured without the autotuning of XLA only.",
    ]
    for title, rows in results.items():
        lines += [
            f"\n{title}\n",
            "| M | method | ms a step | products | counted | T steps |",
            "|---|---|---|---|---|---|",
        ]
        for key in sorted(rows, key=lambda key: int(key.split()[0])):
            (M, method), row = key.split(" ", 1), rows[key]
            if method == "product":
                continue
            unit = rows[f"{M} product"]
            lines.append(
                f"| {M} | {method} | {1e3 * row['step_s']:.1f} "
                f"| {row['step_s'] / unit:.1f} | {row['products']:.1f} "
                f"({row['solves']:.1f}) | {row['T_steps']:.1f} |"
            )
        trained = {
            key: row
            for key, row in rows.items()
            if not key.endswith(" product") and sum(row["seconds"]) > AFTER[-1]
        }
        if trained:
            lines += [
                "\nMinibatch bounds after seconds of training (without compilation)\n",
                "| M | method | " + " | ".join(f"{s} s" for s in AFTER) + " |",
                "|---|---|" + "---|" * len(AFTER),
            ]
        for key, row in trained.items():
            spent = np.cumsum(row["seconds"])
            found = [row["bounds"][int(np.searchsorted(spent, s))] for s in AFTER]
            told = " | ".join(f"{bound:.0f}" for bound in found)
            lines.append(f"| {' | '.join(key.split(' ', 1))} | {told} |")
    return "\n".join(lines)


def main(args):
    """Measures what is missing, and prints the table."""
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.table:
        print(page(results))
        return
    if args.data is None:
        raise SystemExit("--data FOLDER is needed, the folder with kin40k.npz.")
    numpyro.enable_x64()
    jax.config.update("jax_default_matmul_precision", "highest")
    for dtype in args.dtypes:
        title = f"{jax.devices()[0].device_kind}, {dtype}, batches of {args.batch}"
        rows = results.setdefault(title, {})
        for M in args.inducing:
            rows.setdefault(f"{M} product", product_seconds(M, jnp.dtype(dtype)))
            for method in args.methods:
                if f"{M} {method}" in rows:
                    continue
                rows[f"{M} {method}"] = row = measure(method, M, jnp.dtype(dtype), args)
                write(args.results, json.dumps(results).encode())
                unit = rows[f"{M} product"]
                print(
                    f"{title} M={M} {method}: {1e3 * row['step_s']:.2f} ms = "
                    f"{row['step_s'] / unit:.1f} products, counted {row['products']:.1f} + "
                    f"{row['solves']:.1f}, T steps {row['T_steps']:.1f}, bound "
                    f"{row['bounds'][-1]}, first {row['first_s']:.1f} s",
                    flush=True,
                )


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with kin40k.npz")
    parser.add_argument("--inducing", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=10, help="steps timed together")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--train", type=float, default=0.0, help="seconds of training")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there, and end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

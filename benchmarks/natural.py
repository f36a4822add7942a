"""
Steps to the same bound: natural gradients and Adam against Adam alone
======================================================================

SVGP with learned hyperparameters and inducing points (``--fix-inducing``: points stay where
k-means puts them) on minibatches of 1024 rows, both optimisers from the same start: Adam
with each of ``--rates`` for everything, or natural gradients for q(u) and the same Adam for
the rest (``--dual``: and q(u) by dual sites, at rates of their own). The bound of all rows
is taken every 10 steps; printed is how many steps each needs to the highest bound that Adam
at the same rate reaches in ``--steps`` steps, and to that of the best Adam.

    python benchmarks/natural.py --data FOLDER                # kin40k, and its signs
    python benchmarks/natural.py --data FOLDER --problems kin40k --steps 500
    python benchmarks/natural.py --data FOLDER --problems banana --inducing 32 --batch 5300
    python benchmarks/natural.py --table > docs/records/natural.md

FOLDER has ``kin40k.npz`` with arrays ``X`` and ``y``, or ``banana_5300.csv.gz`` with
columns x1, x2 and y (-1 or 1). The problems: ``kin40k``, regression on 10,000 of its rows;
``sign``, whether y is above its median, by a Bernoulli likelihood, on the same rows;
``banana``, the 5300 rows of two classes of Raetsch et al. (2001), by a Bernoulli
likelihood.
"""

import argparse
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _results import FOLDER, write
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_sgp as sgp

EVERY = 10
RESULTS = FOLDER / "natural.json"

HEAD = """\
# Natural gradients

Made by `python benchmarks/natural.py --table`: steps to the bound that Adam alone
reaches in all its steps (2000, or as many as the rates decay over), in float32. `kin40k`
is regression on 10,000 rows; `sign` and `banana` are classification.

Natural gradients put q(u) at its optimum within some steps; hyperparameters and inducing
points are left to Adam and set the pace from then on. So the gain is large where Adam's
rate is low (0.003 and 0.01 are those of Shi, Titsias & Mnih 2020) and where rates decay,
which takes the noise of minibatches out of the natural steps, and small where Adam's
rate is tuned to be large. Where rates stay as they are and inducing points do not move,
that noise can leave a run below the most of Adam alone: *not reached* in the first column
of numbers."""


def make_model(problem):
    """A model on a batch of rows out of ``num_rows``."""

    def positive(name, start):
        return numpyro.param(
            name, jnp.float32(start), constraint=constraints.softplus_positive
        )

    def model(X, y, num_rows):
        kernel = sgp.kernels.Matern32(
            positive("variance", 1.0), positive("lengthscale", 2.0)
        )
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        if problem == "kin40k":
            fn = dist.Normal(f, positive("noise", 0.3))
        else:
            fn = dist.Bernoulli(logits=f)
        with numpyro.plate("data", num_rows, subsample_size=len(X)):
            numpyro.sample("y", fn, obs=y)

    return model


def load(folder, problem):
    """At most ten thousand rows, standardised."""
    if problem == "banana":
        table = np.loadtxt(folder / "banana_5300.csv.gz", delimiter=",", skiprows=1)
        X, y = table[:, :2], table[:, 2]
    else:
        with np.load(folder / "kin40k.npz") as file:
            rows = np.random.default_rng(0).permutation(len(file["X"]))[:10_000]
            X, y = file["X"][rows].astype(float), file["y"][rows].astype(float)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    y = (y - y.mean()) / y.std()
    if problem == "sign":
        y = y > np.median(y)
    if problem == "banana":
        y = y > 0
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def bounds(problem, X, y, args, rate, natural, covariance):
    """The bound of all rows every 10 steps."""
    model, num_rows = make_model(problem), len(X)
    option = sgp.SVGP(
        args.inducing, covariance=covariance, train_inducing=not args.fix_inducing
    )
    guide = sgp.AutoSparseGP(model, option)
    if args.decay:
        rate = optax.cosine_decay_schedule(rate, args.steps, 0.1)
        natural = natural and optax.cosine_decay_schedule(natural, args.steps, 0.1)
    optimiser = optax.adam(rate)
    if natural:
        optimiser = sgp.natural_gradients(guide, natural, optimiser)
    svi = SVI(model, guide, optimiser, sgp.TraceGP_ELBO())
    guide.setup(X, y, num_rows)
    state = svi.init(jax.random.key(0), X[: args.batch], y[: args.batch], num_rows)

    @jax.jit
    def train(state, key):
        def step(state, key):
            rows = jax.random.choice(key, num_rows, (args.batch,), replace=False)
            return svi.update(state, X[rows], y[rows], num_rows)[0], None

        return jax.lax.scan(step, state, jax.random.split(key, EVERY))[0]

    @jax.jit
    def bound(state):
        params = svi.get_params(state)

        def part(rows):
            return svi.loss.loss(
                jax.random.key(0), params, model, guide, X[rows], y[rows], num_rows
            )

        parts = jax.lax.map(part, jnp.arange(num_rows).reshape(10, -1))
        return -jnp.mean(parts)

    found = []
    for i in range(args.steps // EVERY):
        state = train(state, jax.random.key(i + 1))
        found.append(round(float(bound(state)), 2))
    return found


def main(args):
    """Prints the table and keeps the curves."""
    # Accelerators would round the factors of float32 products to 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if args.table:
        print(page(results))
        return
    if args.data is None:
        raise SystemExit("--data FOLDER is needed, the folder with kin40k.npz.")
    for problem in args.problems:
        X, y = load(args.data, problem)
        title = f"{problem}, M = {args.inducing}, batches of {args.batch}"
        title += ", inducing points fixed" if args.fix_inducing else ""
        kept = results.setdefault(title, {})
        for rate in args.rates:
            ways = [("natural", rho) for rho in (0.0, *args.natural)]
            for kind, natural in ways + [("dual", rho) for rho in args.dual]:
                name = f"Adam {rate:g}" + (f" + {kind} {natural:g}" if natural else "")
                name += f", decaying over {args.steps} steps" if args.decay else ""
                if name not in kept:
                    covariance = "dual" if kind == "dual" else "full"
                    found = bounds(problem, X, y, args, rate, natural, covariance)
                    kept[name] = {"bounds": found}
                    write(args.results, json.dumps(results).encode())
        print("\n" + table(title, kept))


def page(results):
    """docs/records/natural.md."""
    return "\n\n".join([HEAD, *(table(title, kept) for title, kept in results.items())])


def steps_to(run, goal):
    """Steps to a bound, if it is reached."""
    reached = np.asarray(run["bounds"]) >= goal
    return EVERY * (1 + int(np.argmax(reached))) if reached.any() else None


def table(title, kept):
    """Markdown: steps to the most of Adam at the same rate, and of the best Adam."""
    alone = {name: run for name, run in kept.items() if " + " not in name}
    best = max(alone, key=lambda name: max(alone[name]["bounds"]))
    goals = {name: max(run["bounds"]) for name, run in alone.items()}
    lines = [
        f"{title}: steps to the most of Adam at the same rate, and to that of {best} "
        f"({goals[best]:.1f})\n",
        "| | same rate | times fewer | best rate | bound at the end |",
        "|---|---|---|---|---|",
    ]
    for name, run in kept.items():
        own = re.sub(r" \+ [^,]*", "", name)
        here, there = steps_to(run, goals[own]), steps_to(run, goals[best])
        ratio = ""
        if own != name and here is not None:
            ratio = f"{steps_to(kept[own], goals[own]) / here:.1f}"
        lines.append(
            f"| {name} | {here or 'not reached'} | {ratio} | {there or 'not reached'} "
            f"| {run['bounds'][-1]:.1f} |"
        )
    return "\n".join(lines)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with kin40k.npz")
    problems = ["kin40k", "sign", "banana"]
    parser.add_argument("--problems", nargs="+", choices=problems, default=problems[:2])
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--fix-inducing", action="store_true")
    parser.add_argument(
        "--decay", action="store_true", help="let all rates fall to a tenth"
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01])
    parser.add_argument("--natural", nargs="+", type=float, default=[0.1])
    parser.add_argument("--dual", nargs="+", type=float, default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there, and end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

"""
Effective samples of f a second, with sampled hyperparameters, beside NumPyro by hand.

    python benchmarks/sampling.py                    # float64; long
    python benchmarks/sampling.py --precision float32 --jitter 1e-5
    python benchmarks/sampling.py --table

The log-Gaussian Cox process of `examples/coal_mining.py`, whose kernel has a LogNormal
variance and lengthscale, by NUTS:

* *hand-written*: K, its factor and ``f = cholesky(K) @ z`` in NumPyro and plain JAX,
* *whiten*: :func:`numpyro_sgp.whiten` of the model with a GP site, the same density,
* *sparsify*: :func:`numpyro_sgp.sparsify` of it; f is drawn for each draw of u.

Two things are measured. The seconds of one gradient of the potential energy, all methods
in turn in one process, in a compiled loop as NUTS has it. And the effective samples of f
that a gradient brings, by a chain each of `whiten` and `sparsify`: the hand-written model
has the density of `whiten` (the script compares values and gradients), and so its chain.
Their quotient is the table's rate; so a chain that takes an hour by hand need not be run.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import FOLDER, Results
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, Predictive, init_to_median
from numpyro.infer.util import initialize_model

import numpyro_sgp as sgp

SETTINGS = ("precision", "bins", "method")
HYPER = ("variance", "lengthscale")


def hyperparameters():
    """Those of the coal-mining example, sampled."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(13516.0), 1.0))
    return variance, lengthscale


def observe(f, y):
    """Counts in equal bins."""
    with numpyro.plate("bins", f.shape[-1]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f) * 191 / f.shape[-1]), obs=y)


def models(jitter, num_inducing):
    """The three by name."""

    def cox(X, y=None):
        kernel = sgp.kernels.RBF(*hyperparameters())
        observe(numpyro.sample("f", sgp.GaussianProcess(kernel, X, jitter=jitter)), y)

    def by_hand(X, y=None):
        variance, lengthscale = hyperparameters()
        K = variance * jnp.exp(-0.5 * ((X - X.T) / lengthscale) ** 2)
        K = K + jitter * variance * jnp.eye(len(X))
        z = numpyro.sample("f_white", dist.Normal().expand([len(X)]).to_event(1))
        observe(numpyro.deterministic("f", jnp.linalg.cholesky(K) @ z), y)

    sparse = sgp.sparsify(cox, sgp.SVGP(num_inducing, jitter=jitter))
    return {"hand-written": by_hand, "whiten": sgp.whiten(cox), "sparsify": sparse}


def potentials(found, data):
    """Potential energies and unconstrained points, all the same where sites are."""
    energies = {}
    for name, model in found.items():
        key, start = jax.random.key(0), init_to_median
        info = initialize_model(key, model, init_strategy=start, model_args=data)
        energies[name] = info.potential_fn, info.param_info.z
    return energies


def largest_difference(energies):
    """Of value and gradient of the hand-written density and of `whiten`'s, relative."""
    (one, z), (two, _) = energies["hand-written"], energies["whiten"]
    pair = [jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(z)) for fn in (one, two)]
    found = [jnp.abs(a - b).max() / jnp.abs(a).max() for a, b in zip(*pair, strict=True)]
    return float(jnp.max(jnp.array(found)))


def gradients(energies, rounds, budget=0.3):
    """Seconds of a gradient by method, one number a round: of a clock and of all cores."""
    loops, seconds = {}, {name: {"wall": [], "cores": []} for name in energies}
    for name, (energy, z) in energies.items():

        @jax.jit
        def loop(z, times, energy=energy):
            def step(_, z):
                slope = jax.grad(energy)(z)
                return jax.tree.map(lambda a, d: a - 1e-9 * d, z, slope)

            return jax.lax.fori_loop(0, times, step, z)

        jax.block_until_ready(loop(z, 1))
        begin = time.perf_counter()
        jax.block_until_ready(loop(z, 1))
        times = max(1, round(budget / (time.perf_counter() - begin)))
        loops[name] = loop, z, times
    for _ in range(rounds):
        for name, (loop, z, times) in loops.items():
            begin = time.perf_counter(), time.process_time()
            jax.block_until_ready(loop(z, times))
            seconds[name]["wall"].append((time.perf_counter() - begin[0]) / times)
            seconds[name]["cores"].append((time.process_time() - begin[1]) / times)
    return seconds


def chain(model, data, warmup, samples, seed=0):
    """One chain: what it took, and its effective samples of f and the hyperparameters."""
    kernel = NUTS(model, init_strategy=init_to_median)
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=samples, progress_bar=False)
    begin = time.perf_counter()
    mcmc.run(jax.random.key(seed), *data, extra_fields=("num_steps", "diverging"))
    draws, extra = mcmc.get_samples(), mcmc.get_extra_fields()
    if "f" not in draws:
        f = Predictive(model, draws, return_sites=["f"])(jax.random.key(1), data[0])
        draws = draws | f
    seconds = time.perf_counter() - begin
    f = np.asarray(draws["f"], float)
    ess = effective_sample_size(f[None])
    return {
        "warmup": warmup,
        "samples": samples,
        "seconds": seconds,
        "gradients": int(extra["num_steps"].sum()),
        "divergences": int(extra["diverging"].sum()),
        "median ess of f": float(np.median(ess)),
        "min ess of f": float(ess.min()),
        "ess": {k: float(effective_sample_size(draws[k][None])) for k in HYPER},
        "mean f": f.mean(0)[:: max(1, f.shape[1] // 10)].tolist(),
        "sd f": f.std(0)[:: max(1, f.shape[1] // 10)].tolist(),
        "mean log": {k: float(np.log(np.asarray(draws[k])).mean()) for k in HYPER},
        "sd log": {k: float(np.log(np.asarray(draws[k])).std()) for k in HYPER},
    }


def measure(args):
    """Adds a row for each method."""
    numpyro.enable_x64(args.precision == "float64")
    coal = sgp.datasets.coal_mining(args.bins)
    data = jnp.asarray(coal.bin_centre_day, float)[:, None], jnp.asarray(coal.count)
    found = models(args.jitter, args.inducing)
    energies = potentials(found, data)
    difference = largest_difference(energies)
    seconds = gradients(energies, args.rounds)
    study = Results(args.results, SETTINGS)
    sizes = {
        "sparsify": (args.sparse_samples, args.sparse_samples),
        "whiten": (args.warmup, args.samples),
    }
    for name in found:
        row = {"precision": args.precision, "bins": args.bins, "method": name}
        row |= {"jitter": args.jitter, "gradient_s": seconds[name]["wall"]}
        row["gradient_core_s"] = seconds[name]["cores"]
        if name == "sparsify":
            row["inducing"] = args.inducing
        if name in sizes and sizes[name][1]:
            row |= chain(found[name], data, *sizes[name])
        if name == "hand-written":
            row["largest difference"] = difference
        study.add(row)


def rate(row, rows, which):
    """
    Effective samples of f in a second of one core, whatever else the machine does; None
    where no chain was run.
    """
    of = "whiten" if row["method"] == "hand-written" else row["method"]
    told = next((r for r in rows if r["method"] == of and same(r, row)), {})
    if "gradients" not in told:
        return None
    each = told[f"{which} ess of f"] / told["gradients"]
    return each / np.median(row["gradient_core_s"])


def same(one, other):
    """Whether two rows are of one experiment."""
    return all(one[name] == other[name] for name in ("precision", "bins"))


def table(rows):
    """Lines of the table of docs/records/sampling.md."""
    lines = [
        "| | method | gradient, core ms | times faster | gradients a draw | divergences "
        "| f, worst bin, ESS/s | f, median, ESS/s | times the hand-written |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        hand = next(r for r in rows if r["method"] == "hand-written" and same(r, row))
        cost, by_hand = (np.median(r["gradient_core_s"]) for r in (row, hand))
        steps = f"{row['gradients'] / row['samples']:.1f}" if "samples" in row else ""
        worst, middle, unit = (
            rate(row, rows, "min"),
            rate(row, rows, "median"),
            rate(hand, rows, "median"),
        )
        told = [
            f"{row['precision']}, {row['bins']} bins",
            row["method"] + (f", M = {row['inducing']}" if "inducing" in row else ""),
            f"{1e3 * cost:.2f}",
            f"{by_hand / cost:.2f}",
            steps,
            str(row.get("divergences", "")),
            "" if worst is None else f"{worst:.2f}",
            "" if middle is None else f"{middle:.2f}",
            "" if None in (middle, unit) else f"{middle / unit:.1f}",
        ]
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--precision", choices=["float32", "float64"], default="float64")
    parser.add_argument("--bins", type=int, default=811)
    parser.add_argument("--jitter", type=float, default=1e-6, help="relative to variance")
    parser.add_argument("--inducing", type=int, default=40, help="M of sparsify")
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--samples", type=int, default=200, help="0: gradients alone")
    parser.add_argument("--sparse-samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15, help="of timed gradients")
    parser.add_argument("--results", type=Path, default=FOLDER / "sampling.json")
    parser.add_argument("--table", action="store_true", help="print the table, and end")
    return parser.parse_args(argv)


def main(args):
    """What the options ask for."""
    if args.table:
        print(table(Results(args.results, SETTINGS).rows()))
    else:
        measure(args)


if __name__ == "__main__":
    main(parse())

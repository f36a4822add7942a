"""
Time and memory of sparse SVI against the number of rows
========================================================

Set-up, ``SVI.init`` and a training step on N rows (D = 9, M = 256, batches of 1024,
float64), each N in a process of its own. Only the data themselves may grow with N.

    python benchmarks/rows.py
    python benchmarks/rows.py --rows 10000 100000 1000000 --num-inducing 512
"""

import argparse
import json
import resource
import subprocess
import sys
import time


def measure(num_rows, num_inducing, batch_size, num_steps):
    """Seconds and MiB on ``num_rows`` rows, as a dict."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    import optax

    import numpyro_sgp as sgp

    numpyro.enable_x64()

    def model(X, y=None, batch_size=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X_batch, y_batch = X[idx], None if y is None else y[idx]
        kernel = sgp.kernels.Matern32(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X_batch))
        with data:
            numpyro.sample("y", dist.Normal(f, noise), obs=y_batch)

    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.normal(size=(num_rows, 9)))
    y = jnp.asarray(np.sin(np.asarray(X)).sum(axis=1) + 0.1 * rng.normal(size=num_rows))
    jax.block_until_ready((X, y))
    data_peak = peak_mib()

    guide = sgp.AutoSparseGP(model, sgp.SVGP(num_inducing))
    svi = numpyro.infer.SVI(
        model, guide, optax.adam(0.01), sgp.TraceGP_ELBO(), batch_size=batch_size
    )
    begin = time.perf_counter()
    state = svi.init(jax.random.key(0), X, y)
    jax.block_until_ready(state)
    init = time.perf_counter() - begin
    update = jax.jit(svi.update)
    begin = time.perf_counter()
    state, loss = update(state, X, y)
    loss.block_until_ready()
    first = time.perf_counter() - begin
    steps = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        state, loss = update(state, X, y)
        loss.block_until_ready()
        steps.append(time.perf_counter() - begin)
    return {
        "rows": num_rows,
        "data_mib": (X.nbytes + y.nbytes) / 2**20,
        "init_s": init,
        "compile_s": first,
        "step_ms": 1e3 * float(np.median(steps)),
        "peak_above_data_mib": peak_mib() - data_peak,
    }


def peak_mib():
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--num-inducing", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(
            json.dumps(
                measure(args.one, args.num_inducing, args.batch_size, args.num_steps)
            )
        )
        return
    columns = ["rows", "data_mib", "init_s", "compile_s", "step_ms", "peak_above_data_mib"]
    print("  ".join(f"{c:>19s}" for c in columns))
    for rows in args.rows:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", str(rows)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        result = json.loads(output.splitlines()[-1])
        print("  ".join(f"{result[c]:19.1f}" for c in columns), flush=True)


if __name__ == "__main__":
    main()

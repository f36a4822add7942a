"""
What an accelerator does with the package, in one run of under nine minutes
============================================================================

On whatever device JAX has: gradient steps of SVGP, SOLVE-GP M + M and SVGP 2M in both
precisions, set-up and compilation, prediction, a whole ``fit``, NUTS and elliptical slices
with vectorised chains, how far single precision is from double, and peak memory.

    python benchmarks/accelerator.py                      # all, in nine minutes
    python benchmarks/accelerator.py --data FOLDER        # fit on FOLDER/uci/kin40k.npz
    python benchmarks/accelerator.py --small              # seconds, on any machine
    python benchmarks/accelerator.py --table              # the table of what was measured

Each precision is a process of its own. What there is no time left for is skipped, and the
table says so. Without data ``fit`` is on 40,000 simulated rows with eight columns.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
DIM = 9


def clock(function, seconds=2.0):
    """Median seconds of a call that is repeated for some time, after one not counted."""
    import jax

    jax.block_until_ready(function())
    found, end = [], time.perf_counter() + seconds
    while not found or (time.perf_counter() < end and len(found) < 50):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        found.append(time.perf_counter() - begin)
    return float(np.median(found))


def peak_mib():
    """Of the device's memory, or of the process's where the device does not tell."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def regression(N, dtype, seed=0):
    """Rows of a function of nine columns with noise."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, DIM))
    y = np.sin(X[:, 0]) + np.cos(X[:, 1] * X[:, 2]) + 0.3 * rng.normal(size=N)
    return X.astype(dtype), y.astype(dtype)


def model_of(num_rows, dtype):
    """GP regression of a batch of rows."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.distributions import constraints

    import numpyro_sgp as sgp

    def positive(name, start):
        start = np.asarray(start, dtype)
        return numpyro.param(name, start, constraint=constraints.softplus_positive)

    def model(X, y=None):
        lengthscale = positive("lengthscale", np.full(DIM, 3.0))
        kernel = sgp.kernels.Matern32(positive("variance", 1.0), lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", num_rows, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, positive("noise", 0.3)), obs=y)

    return model


def approximations(M, dtype):
    """The methods beside each other."""
    import numpyro_sgp as sgp

    Z = np.random.default_rng(1).normal(size=(2 * M, DIM)).astype(dtype)
    return {
        "SVGP M": sgp.SVGP(inducing=Z[:M]),
        "SVGP 2M": sgp.SVGP(inducing=Z),
        "SOLVE-GP M + M": sgp.SOLVEGP(inducing=Z[:M], orthogonal=Z[M:]),
    }


def steps(options):
    """Seconds of a step, and of what comes before the first one."""
    import jax
    import jax.numpy as jnp
    import optax
    from numpyro.infer import SVI

    import numpyro_sgp as sgp

    for M in options.sizes:
        B = min(M, 4096)
        X, y = map(jnp.asarray, regression(B, options.dtype))
        if options.left() < 60 * (M >= 4096):
            yield f"M = {M}", {"skipped": "no time left"}
            continue
        matrix = jnp.ones((M, M), options.dtype) / M
        product = clock(
            jax.jit(lambda A=matrix: jnp.matmul(A, A, precision="highest")), 0.5
        )
        for name, approximation in approximations(M, options.dtype).items():
            begin = time.perf_counter()
            model = model_of(8 * B, options.dtype)
            guide = sgp.AutoSparseGP(model, approximation)
            rule = sgp.TraceGP_ELBO(sgp.GaussHermite(2))
            svi = SVI(model, guide, optax.adam(0.01), rule)
            guide.setup(X, y)
            set_up = time.perf_counter() - begin
            state = svi.init(jax.random.key(0), X, y)
            update = jax.jit(svi.update)
            begin = time.perf_counter()
            compiled = update.lower(state, X, y).compile()
            result = {
                "set_up_s": set_up,
                "compile_s": time.perf_counter() - begin,
                "step_s": clock(partial(compiled, state, X, y), 1.0),
                "product_s": product,
                "loss": float(compiled(state, X, y)[1]),
                "peak_mib": peak_mib(),
            }
            yield f"M = {M}, {name}", result


def prediction(options):
    """Rows a second of a predictor."""
    import jax.numpy as jnp

    import numpyro_sgp as sgp

    M = options.sizes[min(1, len(options.sizes) - 1)]
    X, y = map(jnp.asarray, regression(2 * M, options.dtype))
    model = model_of(100_000, options.dtype)
    guide = sgp.AutoSparseGP(model, approximations(M, options.dtype)["SVGP M"])
    guide.setup(X, y)
    params = guide.known().starts | {
        "variance": np.asarray(1.0, options.dtype),
        "lengthscale": np.full(DIM, 3.0, options.dtype),
        "noise": np.asarray(0.3, options.dtype),
    }
    rows = jnp.asarray(regression(50 * M, options.dtype, seed=2)[0])
    for batch_size in (1000, 10_000):
        predictor = sgp.Predictor(guide, params, batch_size)
        seconds = clock(lambda p=predictor: p(rows)["f"].variance, 1.0)
        told = {"rows_per_s": len(rows) / seconds, "peak_mib": peak_mib()}
        yield f"M = {M}, batches of {batch_size}", told


def whole_fit(options):
    """``sgp.fit`` by default, and what it predicts."""
    import numpyro
    import numpyro.distributions as dist

    import numpyro_sgp as sgp

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 1.0).expand([D]))
        kernel = sgp.kernels.Matern32(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    data = options.data / "uci" / "kin40k.npz" if options.data else None
    if data is not None and data.exists():
        with np.load(data) as file:
            X, y = file["X"], file["y"]
        X, y = (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()
    else:
        X, y = regression(2000 if options.small else 40_000, float)
    D, test = X.shape[1], np.arange(len(X)) % 5 == 0
    X, y = X.astype(options.dtype), y.astype(options.dtype)
    M = 32 if options.small else 512
    seconds = min(120.0, max(5.0, options.left() - 60.0))
    begin = time.perf_counter()
    train = X[~test], y[~test]
    fitted = sgp.fit(model, sgp.SVGP(M), train, seconds=seconds, progress_bar=False)
    taken = time.perf_counter() - begin
    nlpd = -fitted.log_score(X[test], y[test])["y"].mean
    told = {"seconds": taken, "bound": fitted.bound, "nlpd": float(nlpd)}
    yield f"{len(X)} rows, M = {M}", told | {"stopped": fitted.stopped, "M": M}


def sampling(options):
    """Effective samples a second of f, several chains side by side."""
    import arviz_base
    import arviz_stats
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    import numpyro_sgp as sgp

    coal = sgp.datasets.coal_mining(40 if options.small else 200)
    X = jnp.asarray(np.asarray(coal.bin_centre_day)[:, None] / 1e4, options.dtype)
    y = jnp.asarray(coal.count)

    def cox(X, y=None, learn=False):
        lengthscale = (
            numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0)) if learn else 1.3
        )
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
        with numpyro.plate("bins", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f) * 191 / X.shape[0]), obs=y)

    chains, draws = (2, 50) if options.small else (8, 500)
    kernels = {
        "NUTS": (NUTS(sgp.whiten(cox)), {}),
        "NUTS, lengthscale learned": (NUTS(sgp.whiten(cox)), {"learn": True}),
        "elliptical slices": (sgp.EllipticalSlice(cox), {}),
    }
    for name, (kernel, keywords) in kernels.items():
        if options.left() < 45:
            yield name, {"skipped": "no time left"}
            continue
        mcmc = MCMC(
            kernel,
            num_warmup=draws,
            num_samples=draws,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        begin = time.perf_counter()
        mcmc.warmup(jax.random.key(0), X, y, **keywords)
        warmup = time.perf_counter() - begin
        begin = time.perf_counter()
        mcmc.run(jax.random.key(1), X, y, **keywords)
        seconds = time.perf_counter() - begin
        f = np.asarray(mcmc.get_samples(group_by_chain=True)["f"], float)
        ess = arviz_stats.ess(arviz_base.from_dict({"posterior": {"f": f}}), method="bulk")
        worst = float(np.min(ess["f"].to_numpy()))
        told = {"warmup_s": warmup, "seconds": seconds, "ess_per_s": worst / seconds}
        yield f"{name}, {chains} chains, {X.shape[0]} bins", told


def agreement(options):
    """Factors, marginals and gradients, for the comparison of both precisions."""
    import jax
    import jax.numpy as jnp

    from numpyro_sgp.kernels import Matern32
    from numpyro_sgp.linalg import whitened_solve

    M = 64 if options.small else 1024
    Z, X = (regression(M, options.dtype, seed)[0] for seed in (3, 4))

    def value(lengthscale):
        kernel = Matern32(jnp.asarray(1.0, options.dtype), lengthscale)
        Zj, Xj = jnp.asarray(Z), jnp.asarray(X)
        L, _, A = whitened_solve(kernel(Zj, Zj), kernel(Zj, Xj), 1e-5)
        left = 1.0 - jnp.sum(A**2, axis=0)
        return jnp.sum(jnp.log1p(left)), (L, left)

    of = jax.jit(jax.value_and_grad(value, has_aux=True))
    (number, (L, left)), slope = of(jnp.full(DIM, 3.0, options.dtype))
    told = {"value": float(number), "gradient": np.asarray(slope, float).tolist()}
    told |= {"left": np.asarray(left[:50], float).tolist()}
    yield "numbers", told | {"factor": np.asarray(L[-1, ::97], float).tolist()}


PARTS = {
    "agreement": agreement,
    "prediction": prediction,
    "fit": whole_fit,
    "sampling": sampling,
    "steps": steps,
}


def measure(options):
    """All parts in this process; writes the results after each one."""
    if options.dtype == "float64":
        import numpyro

        numpyro.enable_x64()
    import jax

    end = time.monotonic() + options.seconds
    options.left = lambda: end - time.monotonic()
    device = jax.devices()[0]
    found = {"device": device.device_kind, "platform": device.platform}
    for name, part in PARTS.items():
        found[name] = {}
        if options.left() < 20 and not options.small:
            found[name] = {"all": {"skipped": "no time left"}}
            continue
        for title, result in part(options):
            found[name][title] = result
            print(f"{options.dtype}: {name}: {title}: {brief(result)}", flush=True)
            options.out.write_text(json.dumps(found, indent=1))


def brief(result):
    """Numbers of a result in a line."""
    shown = {k: v for k, v in result.items() if not isinstance(v, list)}
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()
    )


def table(found):
    """What both processes found, in Markdown."""
    lines = []
    device = next(iter(found.values()), {})
    lines.append(f"On {device.get('device')} ({device.get('platform')}).\n")
    for name in ("steps", "prediction", "fit", "sampling"):
        lines += [f"## {name.capitalize()}\n", "| precision | | |", "|---|---|---|"]
        for dtype, parts in found.items():
            rows = parts.get(name, {})
            lines += [f"| {dtype} | {title} | {brief(r)} |" for title, r in rows.items()]
        lines.append("")
    numbers = [parts.get("agreement", {}).get("numbers") for parts in found.values()]
    if len(numbers) == 2 and all(numbers):
        lines.append("## Single precision beside double\n")
        for key in ("value", "gradient", "left", "factor"):
            a, b = (np.asarray(n[key], float) for n in numbers)
            off = np.max(np.abs(a - b)) / np.max(np.abs(b))
            lines.append(f"- {key}: largest difference {off:.1e} of the largest")
    return "\n".join(lines) + "\n"


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--small", action="store_true", help="seconds, on any machine")
    parser.add_argument("--seconds", type=float, default=520.0, help="for all of it")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results" / "accelerator.json"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sizes = (16, 32) if options.small else (512, 1024, 2048, 4096, 8192)
    if options.dtype:
        return measure(options)
    if options.table:
        print(table(json.loads(options.results.read_text())))
        return None
    found, begin = {}, time.monotonic()
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    for dtype, share in (("float32", 0.55), ("float64", 1.0)):
        out = options.results.with_suffix(f".{dtype}.part")
        out.parent.mkdir(parents=True, exist_ok=True)
        left = share * (options.seconds - (time.monotonic() - begin))
        command = [sys.executable, __file__, "--dtype", dtype, "--out", out]
        command += ["--seconds", str(left)] + ["--small"] * options.small
        command += ["--data", options.data] if options.data else []
        subprocess.run([str(word) for word in command], check=True, env=environment)
        found[dtype] = json.loads(out.read_text())
        out.unlink()
    options.results.write_text(json.dumps(found, indent=1))
    print(table(found))
    return None


if __name__ == "__main__":
    main()

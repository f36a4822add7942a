"""
Images in ten classes: convolutional GPs (van der Wilk, Rasmussen & Hensman 2017) and deep
ones (Blomqvist, Kaski & Heinonen 2018; Shi, Titsias & Mnih 2020, section 6.2 and G.2)
beside a GP of whole images.

    python benchmarks/images.py --data FOLDER --minutes 10
    python benchmarks/images.py --data FOLDER --set cifar --methods conv solve
    python benchmarks/images.py --data FOLDER --layers 2 --patch 6 4 --stride 2 2
    python benchmarks/images.py --table
    python benchmarks/images.py --memory --table

FOLDER has the files named below, with arrays x_train, y_train, x_test, y_test of bytes.

Methods: ``rbf``, an SVGP with M points and an RBF kernel of whole images; ``conv``, an SVGP
with M inducing patches; ``conv2``, with 2M; ``solve``, a SOLVE-GP with M + M; in each
layer. Ten latent functions share kernel and inducing variables, in single precision; pixels
are from 0 to 1. Inner layers have ten channels. Each fit is a row of ``--results``, and is
not computed again.

The sizes of the paper, for an accelerator (its inner layers are not whitened):

    --locations --places uniform --decay-every 50000    and, by layers,
    --layers 1 --patch 5 --stride 1 --inducing 1000
    --layers 2 --patch 5 4 --stride 1 2 --inducing 384 1000 --unwhitened
    --layers 3 --patch 5 4 5 --stride 1 2 1 --inducing 384 384 1000 --unwhitened

Published (Tables 8 to 10), on all of CIFAR-10 with robust-max and 300,000 steps (accuracy
in %, LL, s/step; M = 1000 in the last layer and 384 in each inner one):
one layer, conv 66.07, -1.59, .241; solve 68.19, -1.51, .370; conv2 68.06, -1.48, .474;
two layers, conv 76.35, -1.04, .392; solve 77.80, -.98, .657; conv2 77.46, -.98, 1.104;
three layers, conv 78.76, -.88, .418; solve 80.30, -.79, .752; conv2 80.33, -.82, 1.246.
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
from _results import FOLDER, Results
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.kernels import RBF, Convolutional, Matern32
from numpyro_sgp.likelihoods import RobustMax, robust_max_probabilities

FILES = {
    "mnist": ("mnist/mnist.npz", (28, 28, 1)),
    "fashion": ("fashion_mnist_subset/fashion_mnist_10k_2k.npz", (28, 28, 1)),
    "cifar": ("cifar10_subset/cifar10_4k_1k.npz", (32, 32, 3)),
}
CLASSES = CHANNELS = 10
NO_SETTINGS = ("data", "table", "again", "memory", "methods", "results")
STEPS_AT_ONCE = 20


def load(args):
    """Images as rows of numbers from 0 to 1, and classes."""
    arrays = np.load(args.data / FILES[args.set][0])
    found = []
    for part, num in (("train", args.num_train), ("test", None)):
        X, y = arrays[f"x_{part}"][:num], arrays[f"y_{part}"][:num]
        found.append(jnp.asarray(X.reshape(len(X), -1) / 255.0, jnp.float32))
        found.append(jnp.asarray(y.ravel(), jnp.int32))
    return found


def positive(name, start):
    """A positive parameter."""
    return numpyro.param(name, jnp.float32(start), constraint=constraints.positive)


def make_model(method, args):
    """Classes by the kernel of the method and the likelihood of the options."""
    shape = FILES[args.set][1]

    def convolutional(shape, base, patch, stride):
        weights = places = None
        if args.weights:
            num = np.prod([(n - patch) // stride + 1 for n in shape[:2]])
            weights = numpyro.param("weights", jnp.ones(num, jnp.float32))
        if args.locations:
            places = Matern32(jnp.float32(1.0), positive("place_lengthscale", 3.0))
        return Convolutional(base, shape, patch, stride, weights, places)

    def layers(X):
        """The kernel of the last layer, and its inputs."""
        base = RBF(
            positive("variance", args.variance), positive("lengthscale", args.lengthscale)
        )
        if method == "rbf":
            return base, X
        h = X.reshape(-1, *shape)
        for i in range(args.layers - 1):
            kernel = RBF(
                positive(f"variance{i}", args.inner_variance),
                positive(f"lengthscale{i}", args.lengthscale),
            )
            options = {"joint_patches": args.joint_patches, "seed": i}
            size = CHANNELS, args.patch[i], args.stride[i]
            h = sgp.convolutional_layer(f"h{i}", kernel, h, *size, **options)
        kernel = convolutional(h.shape[1:], base, args.patch[-1], args.stride[-1])
        return kernel, h.reshape(len(h), -1)

    def model(X, y=None, batch_size=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X_batch, y_batch = X[idx], None if y is None else y[idx]
        f = numpyro.sample("f", sgp.GaussianProcess(*layers(X_batch)).expand([CLASSES]))
        with data:
            robust = args.likelihood == "robust"
            classes = RobustMax(f) if robust else dist.Categorical(logits=f.T)
            numpyro.sample("y", classes, obs=y_batch)

    return model


def approximations(method, args):
    """What is put at each layer."""
    whiten = {"whiten": not args.unwhitened}

    def option(M, start, **options):
        options |= whiten
        if method == "solve":
            return sgp.SOLVEGP(M, M, start, **options)
        return sgp.SVGP(2 * M if method == "conv2" else M, start, **options)

    if method == "rbf":
        return {"f": option(args.inducing[-1], args.start)}
    patches = sgp.InducingPatches(args.start, places=args.places)
    found = {"f": option(args.inducing[-1], patches)}
    for i, M in enumerate(args.inducing[:-1]):
        found[f"h{i}"] = option(M, args.start, initial_scale=args.inner_scale)
    return found


def evaluate(guide, params, X, y, args):
    """Error rate and mean log density on the test set, over draws of inner layers."""

    def given_draw(key, params, X):
        q = guide.posterior(params, X, rng_key=key)["f"]
        if args.likelihood == "robust":
            return robust_max_probabilities(q.mean, q.variance)
        noise = jax.random.normal(key, (500, *q.mean.shape))
        return jnp.mean(jax.nn.softmax(q.mean + jnp.sqrt(q.variance) * noise, 1), axis=0)

    @jax.jit
    def probabilities(params, X):
        keys = jax.random.split(jax.random.key(0), args.test_draws * (args.layers > 1) or 1)
        return jax.lax.map(lambda key: given_draw(key, params, X), keys).mean(axis=0)

    parts = [probabilities(params, X[i : i + 100]) for i in range(0, len(X), 100)]
    p, y = np.concatenate(parts, axis=1), np.asarray(y)
    ll = np.log(p[y, np.arange(len(y))] + 1e-10)
    return {"error": float(np.mean(p.argmax(axis=0) != y)), "ll": float(ll.mean())}


def fit(method, data, args):
    """One fit: training for a number of steps or minutes, and its errors."""
    X, y, X_test, y_test = data
    model = make_model(method, args)
    guide = sgp.AutoSparseGP(model, approximations(method, args))
    # Robust-max has an expectation of its own; softmax is averaged over draws of f.
    elbo = sgp.TraceGP_ELBO(sgp.MonteCarlo(1 if args.layers > 1 else 10))
    decay = (args.decay_every, args.decay, 0, True)
    rate = optax.exponential_decay(args.learning_rate, *decay)
    svi = SVI(model, guide, optax.adam(rate), elbo)
    state = svi.init(jax.random.key(args.seed), X, y, batch_size=args.batch_size)

    @jax.jit
    def advance(state, X, y):
        def step(state, _):
            return svi.update(state, X, y, batch_size=args.batch_size)

        return jax.lax.scan(step, state, length=STEPS_AT_ONCE)

    if args.memory:
        return step_memory(method, advance, state, X, y, args)
    losses, seconds, minutes = [], 0.0, args.minutes or np.inf
    while len(losses) * STEPS_AT_ONCE < args.steps and seconds < 60 * minutes:
        start = time.perf_counter()
        state, loss = advance(state, X, y)
        losses.append(float(loss.mean()))
        if len(losses) > 1:  # the first has the compilation
            seconds += time.perf_counter() - start
        if len(losses) % 50 == 1:
            print(
                f"{method} {len(losses) * STEPS_AT_ONCE} {losses[-1]:.0f} {seconds:.1f} s"
            )
    params = svi.get_params(state)
    return {
        **settings(method, args),
        **evaluate(guide, params, X_test, y_test, args),
        "steps_done": len(losses) * STEPS_AT_ONCE,
        "seconds": seconds,
        "seconds_per_step": seconds / max(len(losses) - 1, 1) / STEPS_AT_ONCE,
        "device": jax.devices()[0].device_kind,
        "fitted": {k: float(v) for k, v in params.items() if v.ndim == 0},
        "loss": float(np.mean(losses[-10:])),
        "losses": [round(x, 1) for x in losses[:: max(len(losses) // 100, 1)]],
    }


def settings(method, args):
    """What tells a fit apart."""
    options = {k: v for k, v in vars(args).items() if k not in NO_SETTINGS}
    return {"method": method, **options}


def step_memory(method, advance, state, X, y, args):
    """What the compiled steps hold, in megabytes."""
    used = advance.lower(state, X, y).compile().memory_analysis()
    return {
        **settings(method, args),
        "temporary_mb": used.temp_size_in_bytes / 1e6,
        "data_and_state_mb": used.argument_size_in_bytes / 1e6,
        "rows": len(X),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def memory_table(rows):
    """What compiled steps hold, in Markdown."""
    lines = ["| set | rows | layers | batch | method | M | patches | MB |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row['set']} | {row['rows']} | {row['layers']} | {row['batch_size']} "
            f"| {row['method']} | {size(row)} | {patches(row)} "
            f"| {row['temporary_mb']:.0f} |"
        )
    return "\n".join(lines)


def size(row):
    """Inducing points of each layer, or of all if they have as many."""
    form = {"solve": "{0} + {0}", "conv2": "{1}"}.get(row["method"], "{0}")
    sizes = [form.format(M, 2 * M) for M in row["inducing"]]
    return sizes[0] if len(set(sizes)) == 1 else ", ".join(sizes)


def patches(row):
    """Size and stride of the patches of each layer, and what the last kernel learns."""
    if row["method"] == "rbf":
        return "whole images"
    parts = zip(row["patch"], row["stride"], strict=True)
    extras = [k for k in ("locations", "weights") if row[k]]
    return ", ".join([*(f"{patch}/{stride}" for patch, stride in parts), *extras])


def table(rows):
    """A table of all fits in Markdown, means over seeds."""
    names = ("set", "layers", "inducing", "likelihood", "patch", "stride", "num_train")
    names += ("locations", "weights", "batch_size")

    def key(row):
        options = tuple(str(row[name]) for name in names)
        return options + (row["steps_done"], row["device"], row["method"])

    lines = [
        "| set | layers | method | M | patches | error % | LL | s/step | steps | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group in sorted({key(row) for row in rows}, key=lambda k: (k[:2], k[-1], k[2:])):
        same = [row for row in rows if key(row) == group]
        option = same[0]
        steps, device, method = group[-3:]
        errors = [100 * row["error"] for row in same]
        lls = [row["ll"] for row in same]
        spreads = ["", ""]
        if len(same) > 1:
            spreads = [f" ± {np.std(x, ddof=1):.2g}" for x in (errors, lls)]
        kind = "" if option["likelihood"] == "robust" else ", softmax"
        seconds = np.mean([row["seconds_per_step"] for row in same])
        where = "" if device == "cpu" else f" ({device.split(' 80')[0]})"
        lines.append(
            f"| {option['set']} | {option['layers']} | {method}{kind} | {size(option)} "
            f"| {patches(option)} | {np.mean(errors):.2f}{spreads[0]} "
            f"| {np.mean(lls):.3f}{spreads[1]} "
            f"| {seconds:.3f}{where} | {steps} | {len(same)} |"
        )
    return "\n".join(lines)


def main(args):
    """Fits each method and adds its row, or prints the table."""
    # Accelerators would round the factors of float32 products to 10 bits.
    jax.config.update("jax_default_matmul_precision", "highest")
    path = args.results
    if args.memory:
        path = path.with_name(f"{path.stem}_memory.json")
    results = Results(path, settings(None, args))
    if args.table:
        print((memory_table if args.memory else table)(results.rows()))
        return
    data = load(args)
    for method in args.methods:
        if not args.again and results.has(**settings(method, args)):
            print(f"{method} is there")
            continue
        row = fit(method, data, args)
        results.add(row)
        told = {k: row[k] for k in ("method", "error", "ll", "temporary_mb") if k in row}
        print(json.dumps(told), flush=True)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    add, names = parser.add_argument, ["rbf", "conv", "solve", "conv2"]
    add("--data", type=Path, help="folder with the data")
    add("--table", action="store_true", help="print a table of the results")
    add("--again", action="store_true", help="fit what has a row already")
    add("--memory", action="store_true", help="compile a step and say what it holds")
    add("--set", choices=list(FILES), default="mnist")
    add("--methods", nargs="+", choices=names, default=names)
    add("--layers", type=int, default=1)
    add("--patch", nargs="+", type=int, default=[5], help="size in each layer")
    add("--stride", nargs="+", type=int, default=[1], help="in each layer")
    add("--likelihood", choices=["robust", "softmax"], default="robust")
    add("--inducing", nargs="+", type=int, default=[250], help="M of all or each layer")
    add("--start", choices=["kmeans", "random"], default="kmeans")
    add("--places", choices=["own", "uniform"], default="own", help="of patches, at first")
    add("--locations", action="store_true", help="a kernel of the places of patches (TICK)")
    add("--weights", action="store_true", help="learn a weight for each patch")
    add("--unwhitened", action="store_true", help="q(u) over u itself")
    add("--joint-patches", action="store_true", help="correlated, in inner layers")
    add("--inner-scale", type=float, default=1e-5, help="of q(u) at first")
    add("--inner-variance", type=float, default=0.1, help="of inner kernels at first")
    add("--test-draws", type=int, default=10, help="of inner layers")
    add("--decay-every", type=int, default=50_000, help="steps between decays")
    add("--minutes", type=float, help="of training, at most")
    add("--num-train", type=int, help="the first training images; default all")
    add("--results", type=Path, default=FOLDER / "images.json")
    numbers = {"lengthscale": 5.0, "variance": 5.0, "learning-rate": 0.003, "decay": 0.25}
    numbers |= {"steps": 300_000, "batch-size": 64, "seed": 0}
    for name, value in numbers.items():
        add(f"--{name}", type=type(value), default=value)
    args = parser.parse_args(argv)
    if not args.table and args.data is None:
        parser.error("give --data FOLDER, or --table")
    if len(args.inducing) == 1:
        args.inducing *= args.layers
    if not args.layers == len(args.patch) == len(args.stride) == len(args.inducing):
        parser.error("give a --patch, a --stride and --inducing for each of the --layers")
    return args


if __name__ == "__main__":
    main(parse())

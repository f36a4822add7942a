"""
Images in ten classes: convolutional GPs (van der Wilk, Rasmussen & Hensman 2017; Shi,
Titsias & Mnih 2020, section 6 and G.2) beside a GP of whole images.

    python benchmarks/images.py --data FOLDER --minutes 10
    python benchmarks/images.py --data FOLDER --set cifar --methods conv solve --locations

FOLDER has the files named below, with arrays x_train, y_train, x_test, y_test of bytes.

Methods: ``rbf``, an SVGP with M points and an RBF kernel of whole images; ``conv``, an SVGP
with M inducing patches; ``conv2``, with 2M; ``solve``, a SOLVE-GP with M + M. Ten latent
functions share kernel and inducing variables, whitened, in single precision; pixels are
from 0 to 1. Each fit is written to a file of its own.

Published, on all of CIFAR-10 with M = 1000, places, robust-max and 300,000 steps (accuracy,
LL): conv 66.07 %, -1.59; solve 68.19 %, -1.51; conv2 68.06 %, -1.48.
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
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.kernels import RBF, Convolutional, Matern32
from numpyro_sgp.likelihoods import RobustMax, robust_max_probabilities

jax.config.update("jax_default_matmul_precision", "highest")

FILES = {
    "mnist": ("mnist/mnist.npz", (28, 28, 1)),
    "fashion": ("fashion_mnist_subset/fashion_mnist_10k_2k.npz", (28, 28, 1)),
    "cifar": ("cifar10_subset/cifar10_4k_1k.npz", (32, 32, 3)),
}
CLASSES = 10
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

    def kernel():
        lengthscale = positive("lengthscale", args.lengthscale)
        base = RBF(positive("variance", args.variance), lengthscale)
        if method == "rbf":
            return base
        weights = places = None
        if args.weights:
            num = np.prod([(n - args.patch) // args.stride + 1 for n in shape[:2]])
            weights = numpyro.param("weights", jnp.ones(num, jnp.float32))
        if args.locations:
            places = Matern32(jnp.float32(1.0), positive("place_lengthscale", 3.0))
        return Convolutional(base, shape, args.patch, args.stride, weights, places)

    def model(X, y=None, batch_size=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X_batch, y_batch = X[idx], None if y is None else y[idx]
        f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X_batch).expand([CLASSES]))
        with data:
            robust = args.likelihood == "robust"
            classes = RobustMax(f) if robust else dist.Categorical(logits=f.T)
            numpyro.sample("y", classes, obs=y_batch)

    return model


def evaluate(guide, params, X, y, args):
    """Error rate and mean log density on the test set."""

    @jax.jit
    def probabilities(params, X):
        q = guide.posterior(params, X)["f"]
        if args.likelihood == "robust":
            return robust_max_probabilities(q.mean, q.variance)
        noise = jax.random.normal(jax.random.key(0), (500, *q.mean.shape))
        return jnp.mean(jax.nn.softmax(q.mean + jnp.sqrt(q.variance) * noise, 1), axis=0)

    parts = [probabilities(params, X[i : i + 500]) for i in range(0, len(X), 500)]
    p, y = np.concatenate(parts, axis=1), np.asarray(y)
    ll = np.log(p[y, np.arange(len(y))] + 1e-10)
    return {"error": float(np.mean(p.argmax(axis=0) != y)), "ll": float(ll.mean())}


def fit(method, data, args):
    """One fit: training for a number of steps or minutes, and its errors."""
    X, y, X_test, y_test = data
    model, M = make_model(method, args), args.inducing
    patches = sgp.InducingPatches(args.start, places=args.places)
    approximation = {
        "rbf": sgp.SVGP(M, args.start),
        "conv": sgp.SVGP(M, patches),
        "conv2": sgp.SVGP(2 * M, patches),
        "solve": sgp.SOLVEGP(M, M, patches),
    }[method]
    guide = sgp.AutoSparseGP(model, approximation)
    # Robust-max has an expectation of its own; softmax is averaged over draws of f.
    elbo = sgp.TraceGP_ELBO(sgp.MonteCarlo(10))
    decay = (args.decay_every, args.decay, 0, True)
    rate = optax.exponential_decay(args.learning_rate, *decay)
    svi = SVI(model, guide, optax.adam(rate), elbo)
    state = svi.init(jax.random.key(args.seed), X, y, batch_size=args.batch_size)

    @jax.jit
    def advance(state, X, y):
        def step(state, _):
            return svi.update(state, X, y, batch_size=args.batch_size)

        return jax.lax.scan(step, state, length=STEPS_AT_ONCE)

    losses, seconds = [], 0.0
    while len(losses) * STEPS_AT_ONCE < args.steps and seconds < 60 * args.minutes:
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
        "method": method,
        **evaluate(guide, params, X_test, y_test, args),
        "steps_done": len(losses) * STEPS_AT_ONCE,
        "seconds": seconds,
        "seconds_per_step": seconds / max(len(losses) - 1, 1) / STEPS_AT_ONCE,
        "device": jax.devices()[0].device_kind,
        "fitted": {k: float(v) for k, v in params.items() if v.ndim == 0},
        "loss": float(np.mean(losses[-10:])),
        "losses": losses[:: max(len(losses) // 200, 1)],
        "options": {k: str(v) for k, v in vars(args).items()},
    }


def main(args):
    """Fits each method and writes its file."""
    data = load(args)
    args.results.mkdir(parents=True, exist_ok=True)
    for method in args.methods:
        row = fit(method, data, args)
        kind = f"{method}_places" if args.locations else method
        name = f"{args.set}_{kind}_{args.inducing}_{args.likelihood}_{args.seed}"
        (args.results / f"{name}.json").write_text(json.dumps(row, indent=1))
        print(json.dumps({k: row[k] for k in list(row)[:7]}))


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add, names = parser.add_argument, ["rbf", "conv", "solve", "conv2"]
    add("--data", type=Path, required=True, help="folder with the data")
    add("--set", choices=list(FILES), default="mnist")
    add("--methods", nargs="+", choices=names, default=names)
    add("--likelihood", choices=["robust", "softmax"], default="robust")
    add("--inducing", type=int, default=250, help="M")
    add("--start", choices=["kmeans", "random"], default="kmeans")
    add("--places", choices=["own", "uniform"], default="own", help="of patches, at first")
    add("--locations", action="store_true", help="a kernel of the places of patches (TICK)")
    add("--weights", action="store_true", help="learn a weight for each patch")
    add("--decay-every", type=int, default=50_000, help="steps between decays")
    add("--minutes", type=float, default=np.inf, help="of training, at most")
    add("--num-train", type=int, help="the first training images; default all")
    add("--results", type=Path, default=Path("figures/images"))
    numbers = {"lengthscale": 5.0, "variance": 5.0, "learning-rate": 0.003, "decay": 0.25}
    numbers |= {"patch": 5, "stride": 1, "steps": 300_000, "batch-size": 64, "seed": 0}
    for name, value in numbers.items():
        add(f"--{name}", type=type(value), default=value)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

"""
Deep Gaussian processes
=======================

A GP site whose inputs are the values of another one (Damianou & Lawrence 2013), trained by
the doubly stochastic bound (Salimbeni & Deisenroth 2017) with SOLVE-GP in every layer (Shi,
Titsias & Mnih 2020, section 4). One to three layers are compared on

- ``regression``: noisy values of a function that jumps and has a rough half, for which no
  single lengthscale is right;
- ``classification``: two classes, divided by a line on the left and by stripes on the
  right.

    python examples/deep_gp.py
    python examples/deep_gp.py --layers 1 2 --steps 500
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
from matplotlib.figure import Figure
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_sgp as sgp


def positive(name, start):
    """A positive parameter."""
    return numpyro.param(name, jnp.asarray(start, float), constraint=constraints.positive)


def deep(X, num_layers, lengthscale):
    """The last of ``num_layers`` layers, a single function of X."""
    h = X
    for i in range(num_layers - 1):
        kernel = sgp.kernels.RBF(
            positive(f"variance{i}", 0.3), positive(f"lengthscale{i}", lengthscale)
        )
        h = sgp.layer(f"h{i}", kernel, h)
    kernel = sgp.kernels.RBF(
        positive("variance", 1.0), positive("lengthscale", lengthscale)
    )
    return numpyro.sample("f", sgp.GaussianProcess(kernel, h))


def regression(num_layers):
    """Gaussian noise on the last layer."""

    def model(X, y=None):
        f = deep(X, num_layers, 0.3)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, positive("noise", 0.2)), obs=y)

    return model


def classification(num_layers):
    """The last layer on the logit scale."""

    def model(X, y=None):
        f = deep(X, num_layers, 0.5)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    return model


def jump(x):
    """Flat, then rough."""
    return np.where(x < 0.5, 0.0, 1.0 + 0.4 * np.sin(40.0 * x))


def rough_data(num, seed):
    """Inputs and noisy values."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(0.0, 1.0, num))
    return jnp.asarray(x)[:, None], jnp.asarray(jump(x) + 0.05 * rng.normal(size=num))


def stripes(num, seed):
    """Points of a square; the label changes once on the left, and often on the right."""
    X = np.random.default_rng(seed).uniform(-1.0, 1.0, (num, 2))
    y = np.where(X[:, 0] < 0.0, X[:, 1] > 0.0, np.sin(4 * np.pi * X[:, 1]) > 0.0)
    return jnp.asarray(X), jnp.asarray(y, float)


def train(model, num_layers, num_inducing, data, steps):
    """The guide, its parameters, ELBO and seconds."""
    M = num_inducing
    inner = {f"h{i}": sgp.SOLVEGP(M, M, initial_scale=1e-3) for i in range(num_layers - 1)}
    guide = sgp.AutoSparseGP(model, {**inner, "f": sgp.SOLVEGP(M, M)})
    rate = optax.cosine_decay_schedule(0.01, steps, 0.01)
    rule = sgp.MonteCarlo(5) if num_layers > 1 else None
    svi = SVI(model, guide, optax.adam(rate), sgp.TraceGP_ELBO(rule))
    begin = time.perf_counter()
    fitted = svi.run(jax.random.key(0), steps, *data, progress_bar=False)
    seconds = time.perf_counter() - begin
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(500)).loss
    elbo = -loss(jax.random.key(1), fitted.params, model, guide, *data)
    return guide, fitted.params, float(elbo), seconds


def predictive(guide, params, X, draws=100):
    """Mean and variance of f for each draw of the inner layers, shape (draws, N)."""

    def moments(key):
        q = guide.posterior(params, X, rng_key=key)["f"]
        return q.mean, q.variance

    return jax.vmap(moments)(jax.random.split(jax.random.key(2), draws))


def compare(name, make_model, data, test, args):
    """Fits each number of layers; a table, and what a figure needs."""
    print(f"\n{name}: {len(data[1])} rows, {args.num_inducing} + {args.num_inducing}")
    print(f"{'layers':>8s}{'ELBO':>10s}{'test LL':>10s}{'seconds':>9s}")
    fits = {}
    for num_layers in args.layers:
        model = make_model(num_layers)
        guide, params, elbo, seconds = train(
            model, num_layers, args.num_inducing, data, args.steps
        )
        density = sgp.log_predictive_density(guide, params, *test)["y"]
        ll = float(density.mean())
        print(f"{num_layers:>8d}{elbo:10.2f}{ll:10.3f}{seconds:9.1f}", flush=True)
        fits[num_layers] = {"fit": (guide, params), "ELBO": elbo, "LL": ll}
    return fits


def run_regression(args, axes):
    """Bands of the predictive mixture."""
    data, test = rough_data(80, 0), rough_data(400, 1)
    fits = compare("regression", regression, data, test, args)
    new = jnp.linspace(-0.05, 1.05, 300)[:, None]
    for axis, (num_layers, found) in zip(axes, fits.items(), strict=True):
        mean, variance = predictive(*found["fit"], new)
        noise = jax.random.normal(jax.random.key(3), mean.shape)
        draws = mean + jnp.sqrt(variance) * noise
        low, high = jnp.quantile(draws, jnp.array([0.025, 0.975]), axis=0)
        axis.fill_between(new[:, 0], low, high, color="C0", alpha=0.25, linewidth=0)
        axis.plot(new[:, 0], mean.mean(axis=0), color="C0", label="f")
        axis.plot(new[:, 0], jump(np.asarray(new[:, 0])), "k:", linewidth=1, label="truth")
        axis.plot(data[0][:, 0], data[1], "k.", markersize=3)
        axis.set(title=title(num_layers, found), ylim=(-0.8, 2.0))
    axes[0].legend(loc="upper left", fontsize=8)
    return fits


def run_classification(args, axes):
    """Probabilities of a class."""
    data, test = stripes(300, 0), stripes(1000, 1)
    fits = compare("classification", classification, data, test, args)
    side = np.linspace(-1.0, 1.0, 50)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    for axis, (num_layers, found) in zip(axes, fits.items(), strict=True):
        ones = jnp.ones(len(grid))
        density = sgp.log_predictive_density(*found["fit"], jnp.asarray(grid), ones)["y"]
        p = np.exp(density).reshape(50, 50)
        axis.imshow(
            p, extent=(-1, 1, -1, 1), origin="lower", cmap="coolwarm", vmin=0, vmax=1
        )
        axis.scatter(*data[0].T, c=data[1], s=6, cmap="coolwarm", edgecolors="k", lw=0.3)
        axis.set(title=title(num_layers, found), xticks=[], yticks=[])
    return fits


def title(num_layers, found):
    """Of a panel."""
    layers = f"{num_layers} layer{'s' * (num_layers > 1)}"
    return f"{layers}: ELBO {found['ELBO']:.1f}, test LL {found['LL']:.2f}"


def main(args):
    """Runs both and saves a figure."""
    numpyro.enable_x64()
    figure = Figure(figsize=(4.0 * len(args.layers), 7.2), layout="constrained")
    axes = figure.subplots(2, len(args.layers), squeeze=False)
    fits = {
        "regression": run_regression(args, axes[0]),
        "classification": run_classification(args, axes[1]),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output / "deep_gp.png", dpi=120)
    print(f"saved {args.output / 'deep_gp.png'}")
    return fits


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000, help="of Adam on all data")
    parser.add_argument("--num-inducing", type=int, default=15, help="M, of M + M")
    parser.add_argument("--output", type=Path, default=Path("figures"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

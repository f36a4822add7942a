"""
Snelson's data: SVGP, ODVGP and SOLVE-GP against the exact GP
=============================================================

One NumPyro model of the 100 training points on which SOLVE-GP was shown [1, Figure 2],
and four guides for it: five inducing points, five with a hundred orthogonal ones for the
mean alone (ODVGP), five with five orthogonal ones (SOLVE-GP), and ten. Hyperparameters,
inducing points and q(u) together maximise the evidence lower bound, by default with
L-BFGS on all data. Prints a table of the fits, with targets that were computed apart from
this package, and draws the posteriors, each with the exact GP's.

    python examples/snelson.py
    python examples/snelson.py --method solvegp --optimiser adam --batch-size 20
    python examples/snelson.py --paper

**References:**

1. Shi, J., Titsias, M. K., Mnih, A. (2020). Sparse orthogonal variational inference for
   Gaussian processes. AISTATS. https://arxiv.org/abs/1910.10596
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from matplotlib.figure import Figure
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

import numpyro_sgp as sgp


class Method(NamedTuple):
    """A panel of the figure."""

    title: str
    num_inducing: int
    num_orthogonal: int
    target: float | None
    """Best full-batch bound known (L-BFGS on the collapsed bound), if any."""


METHODS = {
    "svgp5": Method("SVGP", 5, 0, -73.06),
    "odvgp": Method("ODVGP", 5, 100, None),
    "solvegp": Method("SOLVE-GP", 5, 5, -43.30),
    "svgp10": Method("SVGP", 10, 0, -42.61),
}
EXACT_TARGET = -41.655
DEFAULT_STEPS = {"lbfgs": 3000, "adam": 5000}


class Protocol(NamedTuple):
    """How to fit."""

    optimiser: str = "lbfgs"
    steps: int = DEFAULT_STEPS["lbfgs"]
    learning_rate: float | optax.Schedule = 0.0
    batch_size: int | None = None
    inducing: str = "greedy"


FULL_BATCH = Protocol()
# Appendix G.1 of [1]; K-means is from the authors' code.
PAPER = Protocol("adam", 10_000, 0.01, 20, "kmeans")


class Fit(NamedTuple):
    """Where an optimiser ended."""

    title: str
    num_inducing: int
    num_orthogonal: int
    elbo: float
    target: float | None
    noise: float
    lengthscale: float
    variance: float
    mean: np.ndarray
    sd: np.ndarray
    Z: np.ndarray
    O: np.ndarray
    seconds: float


def hyperparameters():
    """Kernel and noise variance, from where the paper starts."""
    variance = numpyro.param("variance", 1.0, constraint=constraints.positive)
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=constraints.positive)
    noise = numpyro.param("noise", 0.1, constraint=constraints.positive)
    return sgp.kernels.RBF(variance, lengthscale), noise


def model(X, y=None, batch_size=None):
    """Gaussian process regression, on minibatches if asked."""
    kernel, noise = hyperparameters()
    data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
    with data as idx:
        X_batch, y_batch = X[idx], None if y is None else y[idx]
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X_batch))
    with data:
        numpyro.sample("y", dist.Normal(f, jnp.sqrt(noise)), obs=y_batch)


def exact_model(X, y=None):
    """The same with f integrated out: its log density is the log marginal likelihood."""
    kernel, noise = hyperparameters()
    noisy = kernel + sgp.kernels.White(noise)
    numpyro.sample("y", sgp.GaussianProcess(noisy, X, jitter=0.0), obs=y)


def approximation(name, X, inducing, seed=0):
    """What the guide puts at ``f``."""
    method = METHODS[name]
    if method.title == "SVGP":
        return sgp.SVGP(method.num_inducing, inducing, seed=seed)
    if method.title == "SOLVE-GP":
        sizes = method.num_inducing, method.num_orthogonal
        return sgp.SOLVEGP(*sizes, inducing, seed=seed)
    # With O at all inputs, greedy points (which are inputs) would be there twice.
    return sgp.ODVGP(method.num_inducing, inducing="kmeans", orthogonal=X, seed=seed)


def fit(name, X, y, X_test, protocol=FULL_BATCH, seed=0, progress=True):
    """
    Fit one method.

    :param name: a key of ``METHODS``.
    :param X_test: where to predict f.
    :return: a :class:`Fit`, with the bound on all data.
    """
    began = time.perf_counter()
    method = METHODS[name]
    guide = sgp.AutoSparseGP(model, approximation(name, X, protocol.inducing, seed))
    # Two nodes are exact: the log density of a normal is quadratic in f.
    loss = sgp.TraceGP_ELBO(sgp.GaussHermite(2))
    svi = SVI(model, guide, optax.adam(protocol.learning_rate), loss)
    key, steps = jax.random.key(seed), protocol.steps
    if protocol.optimiser == "lbfgs":
        result = sgp.fit_lbfgs(svi, key, X, y, max_iterations=steps, progress_bar=progress)
    else:
        result = svi.run(
            key,
            steps,
            X,
            y,
            batch_size=protocol.batch_size,
            progress_bar=progress,
            init_state=svi.init(key, X, y),
        )
    params = result.params
    elbo = -loss.loss(key, params, model, guide, X, y)
    posterior = guide.posterior(params, X_test)["f"]
    no_points = jnp.zeros((0, 1))
    return Fit(
        method.title,
        method.num_inducing,
        method.num_orthogonal,
        float(elbo),
        method.target,
        *(float(params[k]) for k in ("noise", "lengthscale", "variance")),
        np.asarray(posterior.mean),
        np.sqrt(np.asarray(posterior.variance)),
        np.asarray(params["f_auto_Z"])[:, 0],
        np.asarray(params.get("f_auto_O", no_points))[:, 0],
        time.perf_counter() - began,
    )


def fit_exact(X, y, X_test, max_steps=DEFAULT_STEPS["lbfgs"], progress=True):
    """The exact GP at its maximum likelihood, as a :class:`Fit` without points."""
    began = time.perf_counter()

    def guide(X, y=None):
        """Nothing is latent."""

    svi = SVI(exact_model, guide, optax.adam(0.0), Trace_ELBO())
    key = jax.random.key(0)
    result = sgp.fit_lbfgs(svi, key, X, y, max_iterations=max_steps, progress_bar=progress)
    params, evidence = result.params, -result.losses[-1]
    noise, lengthscale, variance = (params[k] for k in ("noise", "lengthscale", "variance"))
    kernel = sgp.kernels.RBF(variance, lengthscale) + sgp.kernels.White(noise)
    at_test = sgp.GaussianProcess(kernel, X, jitter=0.0).condition(y, X_test)
    no_points = np.zeros(0)
    return Fit(
        "exact GP",
        0,
        0,
        float(evidence),
        EXACT_TARGET,
        float(noise),
        float(lengthscale),
        float(variance),
        np.asarray(at_test.mean),
        np.sqrt(np.asarray(at_test.variance - noise)),
        no_points,
        no_points,
        time.perf_counter() - began,
    )


def rmse(fitted, exact):
    """Between two posterior means of f at the test inputs."""
    return float(np.sqrt(np.mean((fitted.mean - exact.mean) ** 2)))


def table(rows, exact):
    """
    The fits as text.

    :param rows: pairs of what to call the optimiser and a :class:`Fit`.
    :param exact: the :class:`Fit` to compare means with.
    """
    header = (
        f"{'method':<10}{'optimiser':<11}{'M':>3}{'M2':>5}{'ELBO':>10}{'target':>10}"
        f"{'noise':>8}{'length':>8}{'var':>8}{'RMSE':>8}{'seconds':>9}"
    )
    lines = [header, "-" * len(header)]
    for label, f in rows:
        target = "-" if f.target is None else f"{f.target:g}"
        num_inducing = f.num_inducing or "-"
        num_orthogonal = f.num_orthogonal or "-"
        lines.append(
            f"{f.title:<10}{label:<11}{num_inducing:>3}{num_orthogonal:>5}"
            f"{f.elbo:>10.3f}{target:>10}{f.noise:>8.4f}{f.lengthscale:>8.4f}"
            f"{f.variance:>8.4f}{rmse(f, exact):>8.4f}{f.seconds:>9.1f}"
        )
    return "\n".join(lines)


def draw(fits, exact, X, y, X_test):
    """
    One panel for each fit.

    :return: the figure.
    """
    blue, orange, red, green = "#0072B2", "#D55E00", "#A50026", "#00684B"
    single = len(fits) == 1
    rows, columns = (1, 1) if single else (-(-len(fits) // 2), 2)
    size = (7.0, 4.3) if single else (9.6, 3.0 * rows + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    x = np.asarray(X_test)[:, 0]
    low, high = -3.5, 3.5
    for axis, f in zip(axes.flat, fits, strict=True):
        band = axis.fill_between(
            x, f.mean - 3 * f.sd, f.mean + 3 * f.sd, color=blue, alpha=0.22, lw=0
        )
        (line,) = axis.plot(x, f.mean, color=blue, lw=1.8)
        (dashed,) = axis.plot(x, exact.mean, "--", color=orange, lw=1.3)
        for side in (-3, 3):
            axis.plot(x, exact.mean + side * exact.sd, "--", color=orange, lw=0.9)
        (dots,) = axis.plot(X[:, 0], y, "o", color="0.25", ms=2.6, mew=0)
        (plus,) = axis.plot(
            f.Z, np.full(len(f.Z), low + 0.3), "+", color=red, ms=9, mew=1.8
        )
        (triangle,) = axis.plot(
            f.O,
            np.full(len(f.O), high - 0.3),
            "v",
            color=green,
            ms=4.5 if len(f.O) > 20 else 6.5,
            mew=0,
            alpha=0.5 if len(f.O) > 20 else 1.0,
        )
        sizes = f"M = {f.num_inducing}"
        if f.num_orthogonal:
            sizes += f" + {f.num_orthogonal}"
        axis.set_title(f"{f.title}, {sizes}: ELBO {_number(f.elbo)}", fontsize=11)
        axis.set(xlim=(-2, 8), ylim=(low, high))
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("x")
    for axis in axes[:, 0]:
        axis.set_ylabel("f(x), y")
    figure.legend(
        [dots, (band, line), dashed, plus, triangle],
        [
            "data",
            "posterior of f: mean, ±3 sd",
            f"exact GP: mean, ±3 sd (log evidence {_number(exact.elbo)})",
            "Z",
            "O",
        ],
        loc="outside lower center",
        ncols=3 if single else 5,
        frameon=False,
        fontsize=9.5,
        columnspacing=1.4,
    )
    return figure


def _number(value):
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


def main(args):
    numpyro.enable_x64(not args.float32)
    numpyro.set_platform(args.device)
    X, y, X_test = sgp.datasets.snelson_subset()
    progress = not args.no_progress
    names = list(METHODS) if args.method == "all" else [args.method]
    steps = args.steps or DEFAULT_STEPS[args.optimiser]
    chosen = Protocol(
        args.optimiser,
        steps,
        optax.cosine_decay_schedule(args.learning_rate, steps),
        args.batch_size,
        args.inducing,
    )
    labels = {"lbfgs": "L-BFGS", "adam": "Adam"}
    runs = [(labels[args.optimiser], chosen, "snelson.png")]
    if args.paper:
        paper = PAPER._replace(steps=args.steps or PAPER.steps)
        runs.append(("paper's", paper, "snelson_paper.png"))

    print("exact GP")
    exact = fit_exact(X, y, X_test, progress=progress)
    rows = [("L-BFGS", exact)]
    for label, protocol, file_name in runs:
        fits = []
        for name in names:
            print(f"{name}, {label}")
            fits.append(fit(name, X, y, X_test, protocol, args.seed, progress))
        rows += [(label, f) for f in fits]
        save(draw(fits, exact, X, y, X_test), args.output / file_name)
    print("\n" + table(rows, exact))
    print("RMSE is that of the posterior mean at the test inputs to the exact GP's.")
    if args.paper:
        print(
            f"paper's: Adam, learning rate {PAPER.learning_rate}, batches of "
            f"{PAPER.batch_size}, {paper.steps} steps; K-means start."
        )


def parse(argv=None):
    """Command line options; `main` takes what this returns."""
    parser = argparse.ArgumentParser(
        description="Sparse GPs on Snelson's data: SVGP, ODVGP, SOLVE-GP and the exact GP.",
    )
    parser.add_argument(
        "--method", choices=["all", *METHODS], default="all", help="default: all"
    )
    parser.add_argument(
        "--optimiser", choices=list(DEFAULT_STEPS), default="lbfgs", help="default: lbfgs"
    )
    parser.add_argument(
        "--steps", type=int, help="default: 5000 with Adam; at most 3000 with L-BFGS"
    )
    parser.add_argument("--batch-size", type=int, help="of Adam; default: all data")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=0.03,
        help="of Adam, decays to 0; default: 0.03",
    )
    parser.add_argument(
        "--inducing",
        choices=["greedy", "kmeans", "random"],
        default="greedy",
        help="where Z and O start; default: greedy (ODVGP always: Z at K-means centres, O "
        "at all inputs)",
    )
    parser.add_argument(
        "--paper",
        action="store_true",
        help="also fit as in the paper: Adam, rate 0.01, batches of 20, 10000 steps",
    )
    parser.add_argument(
        "--float32", action="store_true", help="single precision, in place of double"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("figures"),
        help="folder for figures; default: figures",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of K-means and of minibatches; default: 0"
    )
    parser.add_argument(
        "--device", choices=["cpu", "gpu", "tpu"], default="cpu", help="default: cpu"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    args = parser.parse_args(argv)
    if args.optimiser == "lbfgs" and args.batch_size is not None:
        parser.error("--batch-size needs --optimiser adam: L-BFGS takes all data.")
    for option in ("steps", "batch_size"):
        value = getattr(args, option)
        if value is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} must be positive, got {value}.")
    return args


if __name__ == "__main__":
    main(parse())

"""
What `sgp.fit` reaches with nothing tuned, beside the best of long, tuned trainings.

    python benchmarks/defaults.py                        # simulated problems, some minutes
    python benchmarks/defaults.py --data FOLDER --best   # real ones too, and the bests
    python benchmarks/defaults.py --table

The best of a problem is the largest bound of L-BFGS from ten starts (where the bound is not
random) and of Adam with natural gradients at three rates, which decay over 20,000 steps.
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
from _results import FOLDER, Results
from numpyro.infer import SVI, init_to_sample

import numpyro_sgp as sgp

PROBLEMS = {}


def problem(make):
    """Keeps a function from a folder of data to model, approximation, data and options."""
    PROBLEMS[make.__name__] = make
    return make


def gp(X, kind=sgp.kernels.RBF, ard=True, name="f", **options):
    """A GP site with a learned kernel."""
    size = X.shape[1] if ard else 1
    with numpyro.handlers.scope(prefix=name, hide_types=["plate"]):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        scales = dist.LogNormal(jnp.zeros(size), 1.0).to_event(1)
        lengthscale = numpyro.sample("lengthscale", scales)
    return numpyro.sample(
        name, sgp.GaussianProcess(kind(variance, lengthscale), X, **options)
    )


def inputs(N, D, seed):
    """Random inputs, and a smooth function at them that depends on three columns."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, D))
    w = rng.normal(size=(D, 3)) * (np.arange(D) < 3)[:, None]
    return X, np.sin(1.5 * X @ w).sum(1) / 1.5, rng


def regression(noise):
    """A model of regression: from f and the noise to a distribution of y."""

    def model(X, y=None):
        f = gp(X)
        sd = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", noise(f, sd), obs=y)

    return model


def standard(X, y, rows=None):
    """Standardised columns, of some rows."""
    X, y = np.asarray(X, float), np.asarray(y, float)
    X = (X - X.mean(0)) / np.where(X.std(0) > 0, X.std(0), 1.0)
    y = (y - y.mean()) / y.std()
    return (X, y) if rows is None else (X[rows], y[rows])


@problem
def gaussian_20_rows(_):
    X, f, rng = inputs(20, 1, 0)
    return regression(dist.Normal), sgp.SVGP(10), (X, f + 0.2 * rng.normal(size=20)), {}


@problem
def snelson(_):
    d = sgp.datasets.snelson()
    X, y = np.asarray(d.X, float).reshape(-1, 1), np.asarray(d.y, float).ravel()
    return regression(dist.Normal), sgp.SVGP(12), (X, y), {}


@problem
def student(_):
    X, f, rng = inputs(300, 2, 1)
    y = f + 0.1 * rng.standard_t(2, size=300)
    model = regression(lambda f, sd: dist.StudentT(4.0, f, sd))
    return model, sgp.SVGP(40), (X, y), {}


@problem
def heteroscedastic(_):
    rng = np.random.default_rng(2)
    x = np.sort(rng.uniform(0.0, 60.0, 133))
    f = 80.0 * np.sin(x / 6.0) * np.exp(-(((x - 28.0) / 14.0) ** 2))
    y = f + (1.0 + 20.0 / (1.0 + np.exp(-(x - 15.0) / 2.0))) * rng.normal(size=133)
    X, y = standard(x[:, None], y)

    def model(X, y=None):
        f, g = gp(X), gp(X, name="g", mean=-1.0)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    return model, sgp.SVGP(25), (X, y), {}


@problem
def bernoulli(_):
    X, f, rng = inputs(400, 2, 3)
    y = (rng.random(400) < 1 / (1 + np.exp(-4.0 * f))).astype(float)

    def model(X, y=None):
        f = gp(X)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    return model, sgp.SVGP(40), (X, y), {}


@problem
def softmax(_):
    X, f, rng = inputs(250, 2, 4)
    y = np.digitize(f + 0.2 * rng.normal(size=250), [-0.4, 0.4])

    def model(X, y=None):
        with numpyro.plate("classes", 3):
            f = gp(X, ard=False)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    return model, sgp.SVGP(20), (X, y), {}


@problem
def robust_max(_):
    X, f, rng = inputs(250, 2, 5)
    y = np.digitize(f + 0.1 * rng.normal(size=250), [-0.4, 0.4])

    def model(X, y=None):
        with numpyro.plate("classes", 3):
            f = gp(X, ard=False)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", sgp.likelihoods.RobustMax(f), obs=y)

    return model, sgp.SVGP(20), (X, y), {}


@problem
def poisson(_):
    X, f, rng = inputs(300, 1, 6)
    y = rng.poisson(np.exp(4.0 + f))

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 5.0))
        f = gp(X, sgp.kernels.Matern52)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)

    return model, sgp.SVGP(25), (X, y), {}


@problem
def coal_mining(_):
    d = sgp.datasets.coal_mining()
    days, counts = np.asarray(d.bin_centre_day, float), np.asarray(d.count)
    X = days[:, None] / 10_000.0

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        f = gp(X)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + f)), obs=y)

    return model, sgp.SOLVEGP(12, 12), (X, counts), {}


@problem
def negative_binomial(_):
    X, f, rng = inputs(300, 3, 7)
    rate = np.exp(1.0 + f)
    y = rng.poisson(rng.gamma(3.0, rate / 3.0))

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 3.0))
        concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.2))
        f = gp(X)
        with numpyro.plate("data", X.shape[0]):
            fn = dist.NegativeBinomial2(jnp.exp(level + f), concentration)
            numpyro.sample("y", fn, obs=y)

    return model, sgp.SVGP(40), (X, y), {}


@problem
def ordinal(_):
    X, f, rng = inputs(300, 2, 8)
    y = np.digitize(f + 0.3 * rng.normal(size=300), [-0.7, 0.0, 0.7])

    def model(X, y=None):
        first = numpyro.sample("first", dist.Normal(0.0, 2.0))
        gaps = numpyro.sample("gaps", dist.LogNormal(jnp.zeros(2), 1.0).to_event(1))
        cuts = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
        f = gp(X)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(f, cuts), obs=y)

    return model, sgp.SVGP(30), (X, y), {}


@problem
def warped(_):
    X, f, rng = inputs(300, 2, 9)
    y = np.exp(0.5 * (f + 0.2 * rng.normal(size=300)))
    model = regression(lambda f, sd: dist.LogNormal(f, sd))
    return model, sgp.ODVGP(20, 40), (X, y), {}


@problem
def regression_network(_):
    X, f, rng = inputs(200, 1, 10)
    W = np.stack([np.cos(X[:, 0]), np.sin(2.0 * X[:, 0])])
    Y = (W * f).T + 0.1 * rng.normal(size=(200, 2))

    def model(X, Y=None):
        node = gp(X, name="node")
        with numpyro.plate("outputs", 2):
            weight = gp(X, name="weight")
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            fn = dist.Normal((weight * node).T, noise).to_event(1)
            numpyro.sample("Y", fn, obs=Y)

    return model, sgp.SVGP(15), (X, Y), {}


@problem
def mixture_of_gaussians(_):
    model, _, data, options = bernoulli(None)
    return model, sgp.MixtureSVGP(30, 2), data, options


@problem
def inverse_free(_):
    model, _, data, options = snelson(None)
    return model, sgp.InverseFreeSVGP(12), data, options


@problem
def deep(_):
    rng = np.random.default_rng(11)
    X = rng.uniform(-1.0, 1.0, (200, 1))
    y = (X[:, 0] > 0.0) - 0.5 + 0.05 * rng.normal(size=200)

    def model(X, y=None):
        ell = numpyro.sample("ell", dist.LogNormal(jnp.zeros(2), 1.0).to_event(1))
        h = sgp.layer("h", sgp.kernels.RBF(0.1, ell[0]), X)
        f = sgp.layer("f", sgp.kernels.RBF(1.0, ell[1]), h, 1, mean=None)[:, 0]
        sd = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, sd), obs=y)

    return model, {"h": sgp.SVGP(15, initial_scale=1e-2), "f": sgp.SVGP(15)}, (X, y), {}


@problem
def rows_100_000(_):
    X, f, rng = inputs(100_000, 3, 12)
    y = f + 0.3 * rng.normal(size=len(X))
    return regression(dist.Normal), sgp.SVGP(100), (X, y), {}


@problem
def columns_30(_):
    X, f, rng = inputs(800, 30, 13)
    y = f + 0.2 * rng.normal(size=800)
    return regression(dist.Normal), sgp.SVGP(100), (X, y), {}


def best_of(make, folder, num_starts, seed=0):
    """The largest bound of long trainings, and which had it."""
    model, approximation, data, options = make(folder)
    found = {}
    keys = jax.random.split(jax.random.key(seed), num_starts)
    data = tuple(jnp.asarray(a) for a in data)
    loss = sgp.TraceGP_ELBO()
    for i, key in enumerate(keys):
        guide = sgp.AutoSparseGP(model, approximation, init_loc_fn=init_to_sample)
        svi = SVI(model, guide, optax.adam(0.01), loss)
        try:
            result = sgp.fit_lbfgs(
                svi, key, *data, max_iterations=3000, progress_bar=False, **options
            )
        except ValueError:  # a random bound, or no start
            continue
        found[f"L-BFGS {i}"] = bound(svi, result.params, data)
    return max(found.items(), key=lambda item: item[1]) if found else (
        "none",
        np.nan,
    ), found


def bound(svi, params, data, draws=50):
    """ELBO, over several keys where it is random."""

    def at(key):
        return -svi.loss.loss(key, params, svi.model, svi.guide, *data)

    keys = jax.random.split(jax.random.key(123), draws)
    values = np.asarray(jax.jit(lambda keys: jax.lax.map(at, keys[:2]))(keys))
    if values[0] != values[1]:
        values = np.asarray(jax.jit(lambda keys: jax.lax.map(at, keys))(keys))
    return float(values.mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--best", action="store_true", help="long, tuned trainings too")
    parser.add_argument("--starts", type=int, default=10, help="of each best")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--results", type=Path, default=FOLDER / "defaults.json")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.float64:
        numpyro.enable_x64()
    results = Results(args.results, ["problem", "method", "float64"])
    if args.table:
        table(results)
        return
    for name in args.problems:
        row = {"problem": name, "float64": args.float64}
        if args.best and not results.has(**row, method="best"):
            start = time.perf_counter()
            (method, value), every = best_of(PROBLEMS[name], args.data, args.starts)
            seconds = time.perf_counter() - start
            results.add(
                {
                    **row,
                    "method": "best",
                    "by": method,
                    "bound": value,
                    "seconds": seconds,
                    "all": every,
                }
            )
        if results.has(**row, method="fit"):
            continue
        model, approximation, data, options = PROBLEMS[name](args.data)
        fitted = sgp.fit(model, approximation, data, progress_bar=False, **options)
        results.add(
            {
                **row,
                "method": "fit",
                "bound": fitted.bound,
                "se": fitted.bound_se,
                "seconds": fitted.seconds,
                "stopped": fitted.stopped,
            }
        )
        print(name, fitted, flush=True)


def table(results):
    """The rows of docs/fit.md."""
    rows = {(row["problem"], row["method"]): row for row in results.rows()}
    print("| problem | bound by `fit` | seconds | best known | seconds |")
    print("|---|---|---|---|---|")
    for name in PROBLEMS:
        if (name, "fit") not in rows:
            continue
        fitted, best = rows[name, "fit"], rows.get((name, "best"))
        se = f" ± {fitted['se']:.2f}" if fitted["se"] else ""
        cells = [name, f"{fitted['bound']:.2f}{se}", f"{fitted['seconds']:.0f}"]
        cells += [f"{best['bound']:.2f}", f"{best['seconds']:.0f}"] if best else ["", ""]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

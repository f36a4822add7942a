"""
What `sgp.fit` reaches with nothing tuned, beside the best of long, tuned trainings.

    python benchmarks/defaults.py                    # fit, some minutes
    python benchmarks/defaults.py --float64 --long   # fit and long trainings, some hours
    python benchmarks/defaults.py --table

Long trainings, each a row of the results: joint L-BFGS from ten random starts, where the
bound is not random and the data are few; and 20,000 steps of natural gradients with Adam
(of Adam alone where q(u) takes none) at three rates, which decay to a hundredth.
"""

import argparse
import itertools
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
from numpyro_sgp.diagnostics.bound import as_reported

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

    def model(X, y=None, num_rows=None):
        f = gp(X)
        sd = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", noise(f, sd), obs=y)

    return model


def three_classes(likelihood, seed, noise):
    """Classification by the largest of three latent functions."""
    X, f, rng = inputs(250, 2, seed)
    y = np.digitize(f + noise * rng.normal(size=250), [-0.4, 0.4])

    def model(X, y=None):
        with numpyro.plate("classes", 3):
            f = gp(X, ard=False)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model, sgp.SVGP(20), (X, y), {}


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
    return three_classes(lambda f: dist.Categorical(logits=f.T), 4, 0.2)


@problem
def robust_max(_):
    return three_classes(sgp.likelihoods.RobustMax, 5, 0.1)


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


STARTS = {f"L-BFGS {i}": i for i in range(10)}
RATES = {f"20,000 steps at {rate}": rate for rate in (0.003, 0.01, 0.03)}
MANY = 10_000  # rows that are trained on in batches
BATCH = 1024
ALONE = ("deep", "mixture_of_gaussians", "inverse_free", "regression_network")


def long_training(name, folder, method):
    """The bound that a long training ends at, and its standard error."""
    model, approximation, data, options = PROBLEMS[name](folder)
    data = tuple(jnp.asarray(a) for a in data)
    many = len(data[0]) > MANY
    if method in STARTS:
        if many or name in ("softmax", "deep"):
            return None  # nothing that L-BFGS could minimise
        return joint_lbfgs(model, approximation, data, options, STARTS[method])
    guide = sgp.AutoSparseGP(model, approximation)
    schedule = optax.cosine_decay_schedule(RATES[method], 20_000, 0.01)
    optimiser = optax.adam(schedule)
    if name not in ALONE:
        rate = optax.cosine_decay_schedule(0.1, 20_000, 0.1)
        optimiser = sgp.natural_gradients(guide, rate, optimiser)
    svi = SVI(model, guide, optimiser, sgp.TraceGP_ELBO())
    key = jax.random.key(0)
    if many:
        options = {**options, "num_rows": len(data[0])}
        result = sgp.train(
            svi, key, data, 20_000, batch_size=BATCH, progress_bar=False, **options
        )
    else:
        result = svi.run(key, 20_000, *data, progress_bar=False, **options)
    finite = jax.tree.all(jax.tree.map(lambda p: jnp.isfinite(p).all(), result.params))
    return bound(svi, result.params, data) if finite else (-np.inf, 0.0)


def joint_lbfgs(model, approximation, data, options, seed):
    """L-BFGS over all parameters, from a random start."""
    guide = sgp.AutoSparseGP(model, approximation, init_loc_fn=init_to_sample)
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    key = jax.random.split(jax.random.key(0), 10)[seed]
    settings = {"max_iterations": 3000, "progress_bar": False}
    try:
        result = sgp.fit_lbfgs(svi, key, *data, **settings, **options)
    except ValueError:  # no finite bound at the start
        return -np.inf, 0.0
    return bound(svi, result.params, data)


def bound(svi, params, data, draws=1000):
    """ELBO and its standard error, over several keys where it is random, by fresh draws."""
    loss = as_reported(svi.loss)

    @jax.jit
    def at(keys):
        def one(key):
            return -loss.loss(key, params, svi.model, svi.guide, *data)

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(123), draws)
    values = np.asarray(at(keys[:2]), float)
    if values[0] == values[1]:
        return float(values[0]), 0.0
    values = np.asarray(at(keys), float)
    return float(values.mean()), float(values.std() / np.sqrt(draws))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--long", action="store_true", help="long, tuned trainings too")
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
    methods = ["fit", *STARTS, *RATES] if args.long else ["fit"]
    for name, method in itertools.product(args.problems, methods):
        row = {"problem": name, "method": method, "float64": args.float64}
        if results.has(**row):
            continue
        begun = time.perf_counter()
        if method == "fit":
            model, approximation, data, options = PROBLEMS[name](args.data)
            fitted = sgp.fit(model, approximation, data, progress_bar=False, **options)
            found = fitted.bound, fitted.bound_se
            row["stopped"] = fitted.stopped
            if fitted.bound_se:  # by as many keys as the others
                found = bound(fitted.svi, fitted.params, [jnp.asarray(a) for a in data])
        else:
            found = long_training(name, args.data, method)
        if found is None:
            continue
        row |= {"bound": found[0], "se": found[1], "seconds": time.perf_counter() - begun}
        results.add(row)
        print(row, flush=True)


def table(results):
    """The rows of docs/records/fit.md."""
    rows = {}
    for row in results.rows():
        rows.setdefault(row["problem"], {})[row["method"], row["float64"]] = row
    print(
        "| problem | `fit`, float32 | s | `fit`, float64 | s | best of long | by | s, all |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in PROBLEMS:
        found = rows.get(name, {})
        long = [row for (method, _), row in found.items() if method != "fit"]
        cells = [name]
        for float64 in (False, True):
            cells += cells_of(found.get(("fit", float64)))
        if long:
            best = max(long, key=lambda row: row["bound"])
            total = sum(row["seconds"] for row in long)
            cells += [cells_of(best)[0], best["method"], f"{total:.0f}"]
        print(f"| {' | '.join([*cells, *[''] * (8 - len(cells))])} |")


def cells_of(row):
    """Bound, with its standard error if it has one, and seconds."""
    if row is None:
        return ["", ""]
    se = f" ± {row['se']:.2f}" if row["se"] else ""
    return [f"{row['bound']:.2f}{se}", f"{row['seconds']:.0f}"]


if __name__ == "__main__":
    main()

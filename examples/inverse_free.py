"""
Sparse GPs without inverses
===========================

The bounds of van der Wilk, John, Artemev & Hensman (2019) and their successor
(Cortinovis et al. 2026) beside SVGP, whose steps factorise K_uu:

- ``toy``: 40 points; L_lc with each start of T (the curves of fig. 3, the images of
  :math:`K_{uu} T` of fig. 4), L_fr and the relaxed bound;
- ``step``: deep GPs of one to three layers on a step function (fig. 2 and 5);
- ``snelson`` and ``banana``: the relaxed bound in minibatches, for regression and for
  classification (banana needs ``--data``, a folder with ``banana_5300.csv.gz``).

    python examples/inverse_free.py
    python examples/inverse_free.py --experiments step --steps 2000
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

STARTS = ("inverse", "scaled", "small", "random")


def positive(name, start):
    """A positive parameter."""
    return numpyro.param(name, jnp.asarray(start, float), constraint=constraints.positive)


def regression(X, y=None, num_rows=None):
    """A GP with Gaussian noise."""
    kernel = sgp.kernels.RBF(positive("variance", 1.0), positive("lengthscale", 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", num_rows or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Normal(f, positive("noise", 0.3)), obs=y)


def classification(X, y=None, num_rows=None):
    """A GP on the logit scale."""
    kernel = sgp.kernels.RBF(positive("variance", 1.0), positive("lengthscale", 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", num_rows or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def first_column(X):
    """The identity, for one column."""
    return X[..., 0]


def deep(num_layers):
    """A deep GP whose inner layers have the identity for their mean."""

    def model(X, y=None):
        h = X
        for i in range(num_layers):
            kernel = sgp.kernels.RBF(
                positive(f"variance{i}", 1.0), positive(f"lengthscale{i}", 0.2)
            )
            mean = first_column if i < num_layers - 1 else None
            h = numpyro.sample(f"f{i}", sgp.GaussianProcess(kernel, h, mean))[:, None]
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(h[:, 0], positive("noise", 0.1)), obs=y)

    return model


def train(model, approximation, X, y, steps, rate, batch=None, expectation=None):
    """Parameters, ELBO at each step and at the end, and seconds, by Adam."""
    guide = sgp.AutoSparseGP(model, approximation)
    rate = optax.cosine_decay_schedule(rate, steps, 0.01)
    svi = SVI(model, guide, optax.adam(rate), sgp.TraceGP_ELBO(expectation))
    guide.setup(X, y)
    state = svi.init(jax.random.key(0), X, y)

    def step(state, key):
        if batch is None:
            return svi.update(state, X, y)
        rows = jax.random.choice(key, len(X), (batch,), replace=False)
        return svi.update(state, X[rows], y[rows], len(X))

    run = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys))
    begin = time.perf_counter()
    state, losses = run(state, jax.random.split(jax.random.key(1), steps))
    losses.block_until_ready()
    seconds = time.perf_counter() - begin
    params = svi.get_params(state)
    final = sgp.TraceGP_ELBO(expectation and sgp.MonteCarlo(500))
    elbo = -final.loss(jax.random.key(2), params, model, guide, X, y)
    return {
        "guide": guide,
        "params": params,
        "curve": -np.asarray(losses),
        "ELBO": float(elbo),
        "s": seconds,
    }


def kernel_times_T(fitted):
    """K_uu T of an L_lc or L_fr fit at its site f."""
    params = fitted["params"]
    Z, L = params["f_auto_Z"], jnp.tril(params["f_auto_qu_T"])
    K = sgp.kernels.RBF(params["variance"], params["lengthscale"])(Z, Z)
    order = jnp.argsort(Z[:, 0])
    return np.asarray((K @ L @ L.T)[order][:, order])


def toy(args):
    """Every start of T ends at SVGP's bound, and T at the inverse."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0.0, 6.0, 40))
    y = jnp.asarray(np.sin(x) + 0.5 * np.sin(2.5 * x) + 0.2 * rng.normal(size=40))
    X, steps = jnp.asarray(x)[:, None], args.steps or 30_000
    M = args.num_inducing or 8
    fits = {"SVGP": train(regression, sgp.SVGP(M), X, y, steps, 0.05)}
    for start in STARTS:
        option = sgp.InverseFreeSVGP(M, bound="lc", T_start=start)
        fits[f"L_lc, T {start}"] = train(regression, option, X, y, steps, 0.05)
    option = sgp.InverseFreeSVGP(M, bound="fr", T_start="scaled")
    fits["L_fr, T scaled"] = train(regression, option, X, y, steps, 0.05)
    fits["relaxed"] = train(regression, sgp.InverseFreeSVGP(M), X, y, steps, 0.05)
    print(f"\ntoy: N = 40, M = {M}, {steps} steps of Adam on all data\n")
    print(f"{'':>18s}{'ELBO':>10s}{'max|K T - I|':>14s}{'seconds':>9s}")
    for name, fitted in fits.items():
        away = ""
        if name.startswith("L_"):
            away = f"{np.abs(kernel_times_T(fitted) - np.eye(M)).max():.1e}"
        print(f"{name:>18s}{fitted['ELBO']:10.3f}{away:>14s}{fitted['s']:9.1f}")
    print("(T of L_fr is not unique: another S_hat makes up for it.)")

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    axes = figure.subplot_mosaic(
        [["SVGP", "L_lc, T small", "curve", "curve"], [*STARTS]],
        height_ratios=[1.2, 1.0],
    )
    new = jnp.linspace(-1.0, 7.0, 200)[:, None]
    for name in ("SVGP", "L_lc, T small"):
        axis, fitted = axes[name], fits[name]
        band(axis, fitted, "f", new)
        axis.plot(x, y, "k.", markersize=4)
        Z = fitted["params"]["f_auto_Z"][:, 0]
        axis.plot(Z, np.full(len(Z), -2.4), "k|")
        axis.set(title=name, ylim=(-2.6, 2.6))
    for name, fitted in fits.items():
        axes["curve"].plot(fitted["curve"], label=name, linewidth=1)
    axes["curve"].set(
        xscale="log", xlabel="step", title="ELBO", ylim=(-120, fits["SVGP"]["ELBO"] + 5)
    )
    axes["curve"].legend(fontsize=8)
    for start in STARTS:
        image = axes[start].imshow(
            kernel_times_T(fits[f"L_lc, T {start}"]), vmin=-0.2, vmax=1.0
        )
        axes[start].set(title=f"$K_{{uu}} T$, T {start}", xticks=[], yticks=[])
    figure.colorbar(image, ax=[axes[start] for start in STARTS], shrink=0.8)
    save(figure, args, "inverse_free_toy.png")
    return fits


def step_data():
    """Fifty noisy values of a step."""
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(0.0, 1.0, 50))
    y = (x > 0.5) + 0.05 * rng.normal(size=50)
    return jnp.asarray(x)[:, None], jnp.asarray(y)


def step(args):
    """Deep GPs of one to three layers."""
    X, y = step_data()
    steps, M = args.steps or 10_000, args.num_inducing or 20
    new = jnp.linspace(-0.1, 1.1, 200)[:, None]
    truth = (new[:, 0] > 0.5) * 1.0
    options = {
        "SVGP": sgp.SVGP(M),
        "L_fr": sgp.InverseFreeSVGP(M, bound="fr", T_start="scaled"),
        "relaxed": sgp.InverseFreeSVGP(M),
    }
    print(f"\nstep: N = 50, M = {M} in each layer, {steps} steps of Adam on all data\n")
    print(f"{'layers':>18s}{'':>10s}{'ELBO':>12s}{'RMSE of f':>11s}{'seconds':>9s}")
    figure = Figure(figsize=(11.0, 8.0), layout="constrained")
    axes = figure.subplots(3, 3, sharex=True, sharey=True)
    fits = {}
    for i, num_layers in enumerate((1, 2, 3)):
        for j, (name, option) in enumerate(options.items()):
            model = deep(num_layers)
            rule = sgp.MonteCarlo(10) if num_layers > 1 else None
            fitted = train(model, option, X, y, steps, 0.01, expectation=rule)
            fits[num_layers, name] = fitted
            draws = values(fitted, f"f{num_layers - 1}", new)
            mean = draws.mean(axis=0)
            error = float(jnp.sqrt(jnp.mean((mean - truth) ** 2)))
            print(
                f"{num_layers:>18d}{name:>10s}{fitted['ELBO']:12.2f}{error:11.3f}"
                f"{fitted['s']:9.1f}",
                flush=True,
            )
            axis = axes[i, j]
            low, high = jnp.quantile(draws, jnp.array([0.025, 0.975]), axis=0)
            axis.fill_between(new[:, 0], low, high, color="C0", alpha=0.25, linewidth=0)
            axis.plot(new[:, 0], mean, color="C0")
            axis.plot(X[:, 0], y, "k.", markersize=3)
            axis.set(
                title=f"{name}, {num_layers} layer{'s' * (num_layers > 1)}: "
                f"{fitted['ELBO']:.1f}",
                ylim=(-0.5, 1.5),
            )
    save(figure, args, "inverse_free_step.png")
    return fits


def values(fitted, site, X):
    """Draws of the marginals of f at X."""
    draws = fitted["guide"].sample_posterior(
        jax.random.key(3), fitted["params"], X, sample_shape=(200,)
    )
    return draws[site]


def snelson(args):
    """Minibatches of ten points, M = 10, as in the demonstration of the successor."""
    X, y, _ = sgp.datasets.snelson()
    steps, M = args.steps or 20_000, args.num_inducing or 10
    Z = jnp.linspace(X.min(), X.max(), M)[:, None]
    compare("snelson", regression, X, y, Z, steps, 0.005, 10, args)


def banana(args):
    """Two classes in two dimensions, M = 64."""
    if args.data is None:
        raise SystemExit("banana needs --data, a folder with banana_5300.csv.gz.")
    table = np.loadtxt(args.data / "banana_5300.csv.gz", delimiter=",", skiprows=1)
    X, y = jnp.asarray(table[:, :2]), jnp.asarray(table[:, 2] > 0, float)
    steps, M = args.steps or 5_000, args.num_inducing or 64
    compare("banana", classification, X, y, M, steps, 0.01, 100, args)


def compare(name, model, X, y, inducing, steps, rate, batch, args):
    """SVGP and the relaxed bound in minibatches."""
    points = {"inducing": inducing} if np.ndim(inducing) else {"num_inducing": inducing}
    options = {
        "SVGP": sgp.SVGP(**points),
        "relaxed": sgp.InverseFreeSVGP(**points),
        "relaxed, diagonal": sgp.InverseFreeSVGP(**points, covariance="diagonal"),
    }
    print(f"\n{name}: N = {len(X)}, batches of {batch}, {steps} steps of Adam\n")
    print(f"{'':>18s}{'ELBO':>10s}{'seconds':>9s}")
    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    for axis, (label, option) in zip(figure.subplots(1, 3), options.items(), strict=True):
        fitted = train(model, option, X, y, steps, rate, batch)
        print(f"{label:>18s}{fitted['ELBO']:10.2f}{fitted['s']:9.1f}", flush=True)
        axis.set_title(f"{label}: {fitted['ELBO']:.1f}")
        if X.shape[-1] == 1:
            band(axis, fitted, "f", jnp.linspace(X.min() - 1, X.max() + 1, 200)[:, None])
            axis.plot(X[:, 0], y, "k.", markersize=3)
        else:
            sides = [np.linspace(X[:, i].min(), X[:, i].max(), 60) for i in (0, 1)]
            grid = np.stack(np.meshgrid(*sides), axis=-1)
            q = fitted["guide"].posterior(fitted["params"], grid.reshape(-1, 2))["f"]
            axis.scatter(*X.T, c=y, s=2, cmap="coolwarm", alpha=0.4)
            axis.contour(*sides, np.asarray(q.mean).reshape(60, 60), [0.0], colors="k")
    save(figure, args, f"inverse_free_{name}.png")


def band(axis, fitted, site, X):
    """Posterior mean of f, and two standard deviations."""
    q = fitted["guide"].posterior(fitted["params"], X)[site]
    sd = jnp.sqrt(q.variance)
    axis.fill_between(
        X[:, 0], q.mean - 2 * sd, q.mean + 2 * sd, color="C0", alpha=0.25, linewidth=0
    )
    axis.plot(X[:, 0], q.mean, color="C0")


def save(figure, args, name):
    """Under ``--output``."""
    args.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output / name, dpi=120)
    print(f"saved {args.output / name}")


EXPERIMENTS = {"toy": toy, "step": step, "snelson": snelson, "banana": banana}


def main(args):
    """Runs the experiments."""
    numpyro.enable_x64()
    return {name: EXPERIMENTS[name](args) for name in args.experiments}


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--experiments",
        nargs="+",
        choices=list(EXPERIMENTS),
        default=["toy", "step", "snelson"],
    )
    parser.add_argument("--steps", type=int, help="of Adam; each experiment's own if None")
    parser.add_argument("--num-inducing", type=int, help="likewise")
    parser.add_argument("--data", type=Path, help="folder with banana_5300.csv.gz")
    parser.add_argument("--output", type=Path, default=Path("figures"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

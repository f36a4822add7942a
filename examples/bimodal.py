"""
A posterior with two modes: a mixture of Gaussians against one Gaussian, and NUTS.

The data are y = f(x)^2 + noise, so that f and -f explain them equally well. One Gaussian
must choose a side, or stay between the two; a mixture of two
(:class:`~numpyro_sgp.MixtureSVGP`) has both, and a bound that is higher by up to log 2 (the
probability of the side that one Gaussian leaves out). Many short NUTS chains from the prior
show both sides, which a single chain seldom crosses.

    python examples/bimodal.py
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, init_to_sample

import numpyro_sgp as sgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NOISE = 0.3


def model(X, y=None):
    """The square of a GP, observed with noise."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f**2, NOISE), obs=y)


def data(num_rows=25, seed=0):
    """Inputs of shape ``(N, 1)``, and the squares of a function that is never near 0."""
    X = jnp.linspace(0.0, 5.0, num_rows)[:, None]
    f = 1.5 + 0.3 * jnp.sin(2.0 * X[:, 0])
    return X, f**2 + NOISE * jax.random.normal(jax.random.key(seed), (num_rows,))


def fit(approximation, X, y):
    """Guide, result and seconds."""
    guide = sgp.AutoSparseGP(model, approximation)
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO(sgp.GaussHermite(20)))
    start, init = time.perf_counter(), None
    if not isinstance(approximation, sgp.MixtureSVGP):
        # A mean of zero is a saddle point, the same on both sides: start on one of them.
        guide.setup(X, y)
        init = {"f_auto_qu_mu": jnp.ones(approximation.num_points)}
    options = {"init_params": init, "progress_bar": False}
    result = sgp.fit_lbfgs(svi, jax.random.key(0), X, y, **options)
    return guide, result, time.perf_counter() - start


def main(args):
    """Fits, prints the table and saves the figure."""
    numpyro.enable_x64()
    X, y = data()
    Z = X[::3]
    X_new = jnp.linspace(0.0, 5.0, 100)[:, None]
    families = {
        "one Gaussian": sgp.SVGP(inducing=Z, train_inducing=False),
        "mixture of two": sgp.MixtureSVGP(
            num_components=2,
            inducing=Z,
            covariance="full",
            train_inducing=False,
            spread=1.5,
        ),
    }
    fits = {name: fit(family, X, y) for name, family in families.items()}
    print(f"{'':16s}{'bound':>9s}{'weights':>16s}{'P(f > 0)':>10s}{'seconds':>9s}")
    draws = {}
    for name, (guide, result, seconds) in fits.items():
        q = guide.posterior(result.params, X_new)["f"]
        draws[name] = np.asarray(q.sample(jax.random.key(1), (500,)))
        weights = np.array2string(np.exp(np.asarray(q.log_weights)), precision=2)
        above = np.mean(draws[name].mean(axis=-1) > 0)
        bound = -float(result.losses[-1])
        print(f"{name:16s}{bound:9.3f}{weights:>16s}{above:10.2f}{seconds:9.1f}")

    start = time.perf_counter()
    kernel = NUTS(sgp.whiten(model), init_strategy=init_to_sample)
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=10,
        num_chains=args.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), X, y)
    predictive = sgp.GPPredictive(model, mcmc.get_samples(), train_args=(X, y))
    draws["NUTS"] = np.asarray(predictive(jax.random.key(3), X_new)["f"])
    above = np.mean(draws["NUTS"].mean(axis=-1) > 0)
    seconds = time.perf_counter() - start
    print(f"{'NUTS':16s}{'':9s}{'':16s}{above:10.2f}{seconds:9.1f}  ({args.chains} chains)")
    gain = float(fits["one Gaussian"][1].losses[-1] - fits["mixture of two"][1].losses[-1])
    print(f"The mixture's bound is higher by {gain:.3f} (log 2 = {np.log(2):.3f}).")

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True)
    for ax, (name, f) in zip(axes, draws.items(), strict=True):
        ax.plot(
            X_new[:, 0], f[:: len(f) // 60].T, color="tab:blue", alpha=0.15, linewidth=1
        )
        root = np.sqrt(np.maximum(y, 0.0))
        ax.plot(X[:, 0], root, ".", color="black", markersize=4)
        ax.plot(X[:, 0], -root, ".", color="black", markersize=4)
        ax.set_title(name)
        ax.set_xlabel("x")
    axes[0].set_ylabel("draws of f;  dots: $\\pm\\sqrt{y}$")
    figure.tight_layout()
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "bimodal.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"saved {path}")
    return gain


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chains", type=int, default=40, help="of NUTS; default: 40")
    parser.add_argument("--output", type=Path, default=Path("figures"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

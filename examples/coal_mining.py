"""
Coal-mining disasters: one log-Gaussian Cox process, by sparse SVI, HMC and NUTS
================================================================================

191 explosions in British coal mines between 1851 and 1962, counted in 811 bins of 50
days, with a Poisson likelihood whose log intensity is a Gaussian process (section 9.3.5
of Bonilla, Krauth & Dezfouli 2019, http://jmlr.org/papers/v20/16-472.html). The kernel
is an RBF with variance 1 and a lengthscale of 13516 days, both fixed.

``model`` is an ordinary NumPyro model. It runs unchanged

* by NUTS and HMC, whitened by ``sgp.whiten``,
* by sparse variational inference with SVGP and SOLVE-GP at several sparsities,

and ``sgp.compare`` tells how far the approximations are from NUTS. With ``--learn`` the
hyperparameters get priors and are learned as well: as point estimates, by a variational
distribution, and by NUTS (in coarser bins, since NUTS then factorises the prior
covariance in every leapfrog step).

    python examples/coal_mining.py
    python examples/coal_mining.py --learn
    python examples/coal_mining.py --sparsity 0.02 0.1 0.2 0.5 --num-steps 4000
"""

import argparse
import time
from pathlib import Path

import arviz_base
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import HMC, MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_sgp as sgp

VARIANCE, LENGTHSCALE = 1.0, 13516.0


def model(X, y=None, learn=False):
    """
    Poisson counts with a GP log intensity.

    :param X: centres of the bins in days, shape ``(N, 1)``.
    :param y: counts, shape ``(N,)``.
    :param learn: whether the hyperparameters have priors or are fixed.
    """
    variance, lengthscale = VARIANCE, LENGTHSCALE
    if learn:
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        lengthscale = numpyro.sample(
            "lengthscale", dist.LogNormal(np.log(LENGTHSCALE), 1.0)
        )
    kernel = sgp.kernels.RBF(variance, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("bins", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f) * 191 / X.shape[0]), obs=y)


def run_mcmc(kernel, X, y, args, learn=False):
    """Samples by HMC or NUTS, as ArviZ data."""
    enough_devices = jax.local_device_count() >= args.num_chains
    begin = time.time()
    mcmc = MCMC(
        kernel,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="parallel" if enough_devices else "sequential",
        progress_bar=not args.quiet,
    )
    mcmc.run(jax.random.key(args.seed), X, y, learn=learn)
    jax.block_until_ready(mcmc.get_samples())
    return sgp.to_arviz(mcmc, X, y, seconds=time.time() - begin, learn=learn)


def run_svi(approximation, X, y, args, learn=False, base_guide=AutoDelta):
    """A sparse variational fit, as ArviZ data, and the marginals q(f)."""
    guide = sgp.AutoSparseGP(model, approximation, base_guide)
    rate = optax.exponential_decay(0.03, args.num_steps, 0.03)
    svi = SVI(model, guide, optax.adam(rate), sgp.TraceGP_ELBO(), learn=learn)
    begin = time.time()
    result = svi.run(
        jax.random.key(args.seed), args.num_steps, X, y, progress_bar=not args.quiet
    )
    seconds = time.time() - begin
    fit = sgp.to_arviz(
        svi, X, y, result=result, num_samples=args.num_draws, seconds=seconds
    )
    return fit, guide.posterior(result.params, X, learn=learn)["f"]


def fixed_hyperparameters(X, y, args):
    """All fits with the kernel of the paper, and the marginals of the sparse ones."""
    fits, marginals = {}, {}
    print("NUTS")
    fits["NUTS"] = run_mcmc(NUTS(sgp.whiten(model)), X, y, args)
    print("HMC")
    hmc = HMC(sgp.whiten(model), trajectory_length=2.0)
    fits["HMC"] = run_mcmc(hmc, X, y, args)
    for sparsity in args.sparsity:
        M = max(2, round(sparsity * X.shape[0]))
        sparse = {f"SVGP {M}": sgp.SVGP(M)}
        sparse[f"SOLVE-GP {M - M // 2}+{M // 2}"] = sgp.SOLVEGP(M - M // 2, M // 2)
        for name, approximation in sparse.items():
            print(name)
            fits[name], marginals[name] = run_svi(approximation, X, y, args)
    return fits, marginals


def learned_hyperparameters(X, y, args):
    """Point estimate, variational distribution and NUTS over the hyperparameters."""
    M = max(2, round(0.1 * X.shape[0]))
    fits = {}
    print("NUTS over f and hyperparameters")
    fits["NUTS"] = run_mcmc(NUTS(sgp.whiten(model)), X, y, args, learn=True)
    for name, base_guide in {"point": AutoDelta, "variational": AutoNormal}.items():
        print(f"SVGP {M}, {name}")
        fits[f"SVGP {M}, {name}"], _ = run_svi(
            sgp.SVGP(M), X, y, args, learn=True, base_guide=base_guide
        )
    return fits


def intensity_moments(fits, marginals, num_bins):
    """Mean and standard deviation of the intensity in each bin, in closed form for q(f)."""
    offset, moments = np.log(191 / num_bins), {}
    for name, fit in fits.items():
        if name in marginals:
            q = marginals[name]
            mean = np.exp(offset + q.mean + q.variance / 2)
            moments[name] = mean, mean * np.sqrt(np.expm1(q.variance))
        else:
            draws = np.exp(offset + arviz_base.extract(fit, var_names="f").to_numpy())
            moments[name] = draws.mean(axis=-1), draws.std(axis=-1, ddof=1)
    return moments


def print_intensities(moments, reference="NUTS"):
    """How far each intensity is from the reference's."""
    mean, sd = moments[reference]
    print(f"\nIntensity per bin against {reference} (q(f) in closed form)")
    print(f"{'':18s} {'mean |difference|':>18s} {'mean sd ratio':>14s}")
    for name, (m, s) in moments.items():
        print(f"{name:18s} {np.mean(np.abs(m - mean)):18.5f} {np.mean(s / sd):14.4f}")


def print_hyperparameters(fits):
    """Posterior means and standard deviations of the kernel's hyperparameters."""
    for name, fit in fits.items():
        draws = [fit["posterior"][site] for site in ("lengthscale", "variance")]
        moments = [float(x) for d in draws for x in (d.mean(), d.std())]
        print(
            "{:22s} lengthscale {:.0f} ± {:.0f} days, variance {:.2f} ± {:.2f}".format(
                name, *moments
            )
        )


def plot(coal, moments, path):
    """Events on top, intensity bands of each method below, with that of NUTS dotted."""
    year = sgp.datasets.days_to_year(coal.bin_centre_day)
    names = list(moments)
    columns = 2
    rows = -(-len(names) // columns)
    figure = plt.figure(figsize=(10, 1.6 + 2.0 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[0.55] + [1] * rows)
    top = figure.add_subplot(grid[0, :])
    top.eventplot(sgp.datasets.days_to_year(coal.events_day), color="0.2", linewidths=0.7)
    top.set(yticks=[], title="191 coal-mining disasters", xlim=(year[0], year[-1]))
    first = None
    for i, name in enumerate(names):
        ax = figure.add_subplot(
            grid[1 + i // columns, i % columns], sharex=top, sharey=first
        )
        first = first or ax
        mean, sd = moments[name]
        colour = "C1" if name in ("NUTS", "HMC") else "C0"
        ax.fill_between(year, mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.25, lw=0)
        ax.plot(year, mean, color=colour)
        if name != "NUTS":
            mean, sd = moments["NUTS"]
            for line in (mean, mean - 2 * sd, mean + 2 * sd):
                ax.plot(year, line, ":", color="0.2", linewidth=1)
        ax.set_title(name, fontsize="medium")
        ax.label_outer()
    first.set_ylim(0, None)
    figure.supylabel("disasters per bin: mean ± 2 sd (dotted: NUTS)", fontsize="medium")
    figure.supxlabel("year", fontsize="medium")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(args):
    coal = sgp.datasets.coal_mining(args.num_bins)
    X, y = jnp.asarray(coal.bin_centre_day, float)[:, None], coal.count
    args.output.mkdir(parents=True, exist_ok=True)

    fits, marginals = fixed_hyperparameters(X, y, args)
    comparison = sgp.compare(
        fits, transform={"intensity": lambda p: np.exp(p["f"]) * 191 / args.num_bins}
    )
    print(f"\n{comparison}")
    moments = intensity_moments(fits, marginals, args.num_bins)
    print_intensities(moments)
    plot(coal, moments, args.output / "coal_mining.png")
    year = sgp.datasets.days_to_year(coal.bin_centre_day)
    figure = comparison.plot(x=year, var_names="intensity")
    figure.savefig(args.output / "coal_mining_comparison.png", dpi=120)

    if args.learn:
        coal = sgp.datasets.coal_mining(args.learn_bins)
        X, y = jnp.asarray(coal.bin_centre_day, float)[:, None], coal.count
        fits = learned_hyperparameters(X, y, args)
        comparison = sgp.compare(fits, var_names="f")
        print(f"\nLearned hyperparameters, {args.learn_bins} bins\n{comparison}")
        print_hyperparameters(fits)
        year = sgp.datasets.days_to_year(coal.bin_centre_day)
        figure = comparison.plot(x=year)
        figure.savefig(args.output / "coal_mining_learned.png", dpi=120)
    print(f"\nFigures are in {args.output}/.")


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--num-bins", type=int, default=811)
    parser.add_argument(
        "--sparsity", type=float, nargs="+", default=[0.01, 0.1], help="M / N of SVGP"
    )
    parser.add_argument("--num-steps", type=int, default=2000, help="steps of SVI")
    parser.add_argument("--num-draws", type=int, default=2000, help="draws from q(f)")
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-samples", type=int, default=2000, help="of each chain")
    parser.add_argument("--num-chains", type=int, default=2)
    parser.add_argument(
        "--learn", action="store_true", help="learn the hyperparameters too (some minutes)"
    )
    parser.add_argument("--learn-bins", type=int, default=81, help="bins for --learn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true", help="instead of float64")
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--output", type=Path, default=Path("figures"))
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse_args()
    numpyro.enable_x64(not args.float32)
    numpyro.set_platform(args.device)
    numpyro.set_host_device_count(args.num_chains)
    main(args)

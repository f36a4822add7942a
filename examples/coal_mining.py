"""
Coal-mining disasters: one log-Gaussian Cox process by ten methods of inference
===============================================================================

191 explosions in British coal mines between 1851 and 1962, counted in 811 bins of 50
days, with a Poisson likelihood whose log intensity is a Gaussian process (section 9.3.5
of Bonilla, Krauth & Dezfouli 2019, http://jmlr.org/papers/v20/16-472.html). The kernel
is an RBF with variance 1 and a lengthscale of 13516 days, both fixed.

``model`` is an ordinary NumPyro model. It runs unchanged

* by NUTS and HMC, whitened by ``sgp.whiten``,
* by elliptical slice sampling, and by NUTS on the model made sparse by ``sgp.sparsify``,
* by sparse variational inference with SVGP and SOLVE-GP at several sparsities,
* by the paper's mixtures of diagonal Gaussians over u (MoG1, MoG2), which are as good in
  the mean and far too sure of it, and by a whitened one, which is not. (The paper adds a
  nugget of 1e-3 to the variance of f; its 0.22 of the sd of HMC is hardly more than that.)
* with a likelihood that is a NumPy function without a gradient, by score functions.

Tables tell how far each is from NUTS, whether the chains agree with themselves, and what
an effective sample costs. A draw from q(f) counts as one: it is independent of the others
(but from q, not from the posterior; the distances to NUTS tell what that costs). With
``--learn`` the hyperparameters get priors and are learned as well: as point estimates, by
a variational distribution, and by NUTS (in coarser bins, since NUTS then factorises the
prior covariance in every leapfrog step).

    python examples/coal_mining.py
    python examples/coal_mining.py --all
    python examples/coal_mining.py --learn
    python examples/coal_mining.py --methods svgp mog1 --sparsity 0.02 0.1 0.2 0.5
    python examples/coal_mining.py --control-variate
"""

import argparse
import functools
import time
from importlib.util import find_spec
from pathlib import Path

import arviz_base
import arviz_stats
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from likelihoods import lgcp_intensity_moments
from numpyro.infer import HMC, MCMC, NUTS, SVI, Predictive, log_likelihood
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from scipy.special import gammaln

import numpyro_sgp as sgp

VARIANCE, LENGTHSCALE = 1.0, 13516.0
NUGGET = 1e-3  # on K_uu and k(x, x) in the code of the paper
LBFGS_ITERATIONS = 2000
COLOURS = {"NUTS": "C1", "HMC": "C1", "ESS": "C1", "spar": "C1", "MoG1": "C3", "MoG2": "C3"}

METHODS = {
    "nuts": "NUTS, the reference: always run",
    "hmc": "HMC",
    "ess": "elliptical slice sampling (needs BlackJAX)",
    "sparse": "NUTS over the values at inducing points",
    "svgp": "SVGP, full Gaussian",
    "natural": "the same at fixed inducing points, by natural gradients on sites",
    "solve": "SOLVE-GP",
    "mog1": "one diagonal Gaussian over u, as in the paper",
    "mog2": "a mixture of two",
    "mog1-white": "one diagonal Gaussian over whitened u",
    "black-box": "SVGP by score functions of a NumPy likelihood",
}
DEFAULT_METHODS = ["nuts", "hmc", "ess", "svgp", "natural", "solve", "mog1"]


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


def black_box_model(X, y=None):
    """The same with fixed hyperparameters and a likelihood that can only be evaluated."""
    kernel = sgp.kernels.RBF(VARIANCE, LENGTHSCALE)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("bins", X.shape[0]):
        fn = sgp.BlackBox(poisson_log_prob, f, X.shape[0], sample=poisson_draw)
        numpyro.sample("y", fn, obs=y)


def poisson_log_prob(y, f, num_bins):
    """In NumPy: as JAX sees it, a program that it cannot look into."""
    log_rate = f + np.log(191 / num_bins)
    return y * log_rate - np.exp(log_rate) - gammaln(y + 1.0)


def poisson_draw(rng, f, num_bins):
    """Counts for the posterior predictive distribution."""
    return rng.poisson(np.exp(f) * 191 / num_bins)


def run_mcmc(kernel, X, y, args, learn=False, num_steps=None):
    """
    Samples by MCMC, as ArviZ data.

    :param num_steps: after warm-up, of which ``args.num_samples`` are kept; all if None.
    """
    begin = time.time()
    mcmc = chains(kernel, args, num_steps)
    mcmc.run(jax.random.key(args.seed), X, y, learn=learn)
    jax.block_until_ready(mcmc.get_samples())
    return sgp.to_arviz(mcmc, X, y, seconds=time.time() - begin, learn=learn)


def chains(kernel, args, num_steps=None):
    """An MCMC that has not run yet."""
    enough_devices = jax.local_device_count() >= args.num_chains
    thinning = max(1, (num_steps or 0) // args.num_samples)
    return MCMC(
        kernel,
        num_warmup=args.num_warmup,
        num_samples=args.num_samples * thinning,
        thinning=thinning,
        num_chains=args.num_chains,
        chain_method="parallel" if enough_devices else "sequential",
        progress_bar=not args.quiet,
    )


def run_sparse_mcmc(approximation, X, y, args):
    """NUTS over the inducing values, and draws of f given these, as ArviZ data."""
    begin = time.time()
    sparse = sgp.sparsify(model, approximation)
    mcmc = chains(NUTS(sparse), args)
    mcmc.run(jax.random.key(args.seed), X, y)
    u = mcmc.get_samples(group_by_chain=True)
    predictive = Predictive(sparse, u, batch_ndims=2, return_sites=["f"], parallel=True)
    f = jax.block_until_ready(predictive(jax.random.key(args.seed + 1), X)["f"])
    seconds = time.time() - begin
    values = log_likelihood(model, {"f": f}, X, y, batch_ndims=2, parallel=True)
    groups = {
        "posterior": {"f": np.asarray(f)},
        "log_likelihood": {"y": np.asarray(values["y"])},
        "observed_data": {"y": y},
    }
    tree = arviz_base.from_dict(groups, dims={"f": ["f_dim_0"], "y": ["bins"]})
    tree.attrs.update(method="MCMC", approximation=str(approximation), seconds=seconds)
    return tree


def run_svi(
    approximation,
    X,
    y,
    args,
    learn=False,
    base_guide=AutoDelta,
    train=None,
    model=model,
    expectation=None,
):
    """
    A sparse variational fit, as ArviZ data, and the marginals q(f).

    :param train: function of the SVI, a key and the model's arguments that returns what
        ``svi.run`` would; None for Adam.
    """
    options = {"learn": True} if learn else {}
    guide = sgp.AutoSparseGP(model, approximation, base_guide)
    rate = optax.exponential_decay(0.03, args.num_steps, 0.03)
    svi = SVI(model, guide, optax.adam(rate), sgp.TraceGP_ELBO(expectation), **options)
    train_key, draw_key = jax.random.split(jax.random.key(args.seed))
    begin = time.time()
    if train is None:
        result = svi.run(train_key, args.num_steps, X, y, progress_bar=not args.quiet)
    else:
        result = train(svi, train_key, X, y, progress_bar=not args.quiet)
    q = guide.posterior(result.params, X, **options)["f"]
    jax.block_until_ready(q.sample(draw_key, (args.num_draws,)))  # to time it
    seconds = time.time() - begin
    fit = sgp.to_arviz(
        svi, X, y, result=result, num_samples=args.num_draws, seconds=seconds
    )
    return fit, q


def mixture(M, num_components, **options):
    """A mixture of diagonal Gaussians over u, with what the paper keeps fixed."""
    return sgp.MixtureSVGP(
        M,
        num_components,
        covariance="diagonal",
        entropy="jensen",
        train_inducing=False,
        **options,
    )


def sparse_fits(M, methods):
    """Name, approximation and options of :func:`run_svi` of each method, by method."""
    paper = {"whiten": False, "jitter": NUGGET}
    lbfgs = {"train": functools.partial(sgp.fit_lbfgs, max_iterations=LBFGS_ITERATIONS)}
    half = M // 2
    found = {
        "svgp": (f"SVGP {M}", sgp.SVGP(M), {}),
        "natural": (
            f"SVGP {M}, natural",
            sgp.SVGP(M, covariance="pseudo_data", train_inducing=False),
            lbfgs,
        ),
        "solve": (f"SOLVE-GP {M - half}+{half}", sgp.SOLVEGP(M - half, half), {}),
        "mog1": (f"MoG1 {M}", mixture(M, 1, **paper), lbfgs),
        "mog2": (f"MoG2 {M}", mixture(M, 2, **paper), lbfgs),
        "mog1-white": (f"MoG1 {M}, white", mixture(M, 1), lbfgs),
        "black-box": (
            f"black box {M}",
            sgp.SVGP(M),
            {"model": black_box_model, "expectation": sgp.ScoreFunction(200)},
        ),
    }
    return [found[method] for method in found if method in methods]


def fixed_hyperparameters(X, y, args):
    """All fits with the kernel of the paper, and the marginals of the sparse ones."""
    sizes = [max(2, round(sparsity * X.shape[0])) for sparsity in args.sparsity]
    white, M = sgp.whiten(model), max(sizes)
    hmc = HMC(white, trajectory_length=2.0)
    slices = args.num_slice_steps
    chain_sets = {
        "nuts": ("NUTS", lambda: run_mcmc(NUTS(white), X, y, args)),
        "hmc": ("HMC", lambda: run_mcmc(hmc, X, y, args)),
        "ess": (
            "ESS",
            lambda: run_mcmc(sgp.EllipticalSlice(white), X, y, args, num_steps=slices),
        ),
        "sparse": (f"sparse NUTS {M}", lambda: run_sparse_mcmc(sgp.SVGP(M), X, y, args)),
    }
    fits, marginals = {}, {}
    for method, (name, run) in chain_sets.items():
        if method in args.methods:
            print(name, flush=True)
            fits[name] = run()
    for size in sizes:
        methods = [m for m in args.methods if m != "black-box" or size == M]
        for name, approximation, options in sparse_fits(size, methods):
            print(name, flush=True)
            fits[name], marginals[name] = run_svi(approximation, X, y, args, **options)
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


def intensity_moments(fits, marginals, num_bins, nugget=0.0):
    """
    Mean and standard deviation of the intensity in each bin, in closed form for q(f).

    :param nugget: what is added to the variance of f under q.
    """
    offset, moments = np.log(191 / num_bins), {}
    for name, fit in fits.items():
        if name in marginals:
            q = marginals[name]
            first, second = 0.0, 0.0
            for k, weight in enumerate(np.exp(q.log_weights)):
                mean, variance = q.marginals(k)
                of_k = lgcp_intensity_moments(mean, variance + nugget, offset)
                mean_k, variance_k = map(np.asarray, of_k)
                first = first + weight * mean_k
                second = second + weight * (variance_k + mean_k**2)
            moments[name] = first, np.sqrt(second - first**2)
        else:
            draws = np.exp(offset + arviz_base.extract(fit, var_names="f").to_numpy())
            moments[name] = draws.mean(axis=-1), draws.std(axis=-1, ddof=1)
    return moments


def mixing(fit, name="f"):
    """Largest R-hat, and smallest and median bulk effective sample size, over f."""
    f = fit["posterior"][name]
    if fit.attrs["method"] == "SVI":
        return np.nan, f.sizes["draw"], f.sizes["draw"]
    r_hat = arviz_stats.rhat(f).to_numpy()
    ess = arviz_stats.ess(f, method="bulk").to_numpy()
    return r_hat.max(), ess.min(), np.median(ess)


def print_costs(fits):
    """What an effective sample costs by each method, and how much less than by HMC."""
    base = "HMC" if "HMC" in fits else "NUTS"
    rows = {name: (*mixing(fit), fit.attrs["seconds"]) for name, fit in fits.items()}
    print("\nSeconds (with compilation, and the draws of SVI) and effective samples")
    print("(of the worst bin and of the median bin; SVI: its draws, independent)")
    heads = ("R-hat", "ESS worst", "median", "seconds", "per eff. sample", f"{base} = 1")
    print(
        f"{'':18s} {heads[0]:>7s} {heads[1]:>9s}" + "".join(f"{h:>16s}" for h in heads[2:])
    )
    cost = {name: seconds / worst for name, (_, worst, _, seconds) in rows.items()}
    for name, (r_hat, worst, median, seconds) in rows.items():
        r_hat = "-" if np.isnan(r_hat) else f"{r_hat:.4f}"
        print(
            f"{name:18s} {r_hat:>7s} {worst:9.0f} {median:15.0f} {seconds:15.1f} "
            f"{cost[name]:15.5f} {cost[base] / cost[name]:14.1f}x"
        )


def print_intensities(moments, reference="NUTS"):
    """How far each intensity is from the reference's."""
    mean, sd = moments[reference]
    print(f"\nIntensity per bin against {reference} (q(f) in closed form)")
    print(f"{'':18s} {'mean |difference|':>18s} {'mean sd ratio':>14s}")
    for name, (m, s) in moments.items():
        print(f"{name:18s} {np.mean(np.abs(m - mean)):18.5f} {np.mean(s / sd):14.4f}")


def print_bounds(fits, marginals, X, y):
    """Bounds of SVGP with the likelihood in JAX and as a black box, where both are."""
    for name in [name for name in fits if name.startswith("black box")]:
        q, black_box = marginals[name], fits[name].attrs
        nodes, weights = np.polynomial.hermite_e.hermegauss(20)
        f = np.asarray(q.mean) + np.sqrt(q.variance) * nodes[:, None]
        values = poisson_log_prob(np.asarray(y), f, len(y))
        exact = weights @ values.sum(axis=-1) / weights.sum() - float(q.prior_kl())
        print(f"\nELBO of {name}: {exact:.3f} by quadrature,")
        print(
            f"  {black_box['elbo']:.3f} ± {black_box['elbo_se']:.3f} by the draws that it "
            "was trained with"
        )
        other = name.replace("black box", "SVGP")
        if other in fits:
            print(f"  (likelihood in JAX, by quadrature: {fits[other].attrs['elbo']:.3f})")


def control_variate_factors(X, y, M, num_samples=200, num_keys=400, seed=0):
    """
    What the control variate of :class:`~numpyro_sgp.ScoreFunction` divides the variance of
    the gradient by, at the optimum of SVGP with M inducing points.

    :param num_samples: draws for each gradient, with and without.
    :param num_keys: number of gradients.
    :return: for the mean and for the square root of the covariance of q(u), the trace of
        the covariance of the gradient without control variate over that with it, and the
        standard error of this.
    """
    guide = sgp.AutoSparseGP(model, sgp.SVGP(M, train_inducing=False))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    params = sgp.fit_lbfgs(svi, jax.random.key(seed), X, y, progress_bar=False).params
    keys = jax.random.split(jax.random.key(seed + 1), num_keys)

    def squares(control_variate):
        """Squared distance of each key's gradient from their mean, by parameter."""
        rule = sgp.ScoreFunction(num_samples, control_variate=control_variate)
        loss = sgp.TraceGP_ELBO(rule).loss
        gradient = jax.grad(lambda p, key: loss(key, p, model, guide, X, y))
        found = jax.jit(lambda keys: jax.lax.map(lambda k: gradient(params, k), keys))(keys)
        parts = [np.asarray(found[f"f_auto_qu_{part}"]) for part in ("mu", "sqrt")]
        parts = [part.reshape(num_keys, -1) for part in parts]
        return [np.sum((g - g.mean(axis=0)) ** 2, axis=1) for g in parts]

    factors = {}
    pairs = zip(squares(False), squares(True), strict=True)
    for name, (without, with_) in zip(("mean", "sqrt"), pairs, strict=True):
        factor = without.mean() / with_.mean()
        relative = without / without.mean() - with_ / with_.mean()
        factors[name] = factor, factor * relative.std(ddof=1) / np.sqrt(num_keys)
    return factors


def print_control_variate(X, y, args):
    """The factors with the largest number of inducing points."""
    M = max(2, round(max(args.sparsity) * X.shape[0]))
    print(f"\nVariance of score-function gradients at the optimum, SVGP {M}, 200 draws:")
    for part, (factor, error) in control_variate_factors(X, y, M).items():
        print(
            f"  {part} of q(u): divided by {factor:.1f} ± {error:.1f} with control variate"
        )


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
    columns = 3
    rows = -(-len(names) // columns)
    figure = plt.figure(figsize=(11, 1.6 + 2.0 * rows), layout="constrained")
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
        colour = COLOURS.get(name[:4], "C0")
        ax.fill_between(year, mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.25, lw=0)
        ax.plot(year, mean, color=colour)
        if name != "NUTS":
            mean, sd = moments["NUTS"]
            for line in (mean, mean - 2 * sd, mean + 2 * sd):
                ax.plot(year, line, ":", color="0.2", linewidth=1)
        ax.set_title(name, fontsize="medium")
        ax.label_outer()
        if i + columns >= len(names):  # nothing below
            ax.tick_params(labelbottom=True)
    first.set_ylim(0, None)
    figure.supylabel("disasters per bin: mean ± 2 sd (dotted: NUTS)", fontsize="medium")
    figure.supxlabel("year", fontsize="medium")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(args):
    coal = sgp.datasets.coal_mining(args.num_bins)
    X, y = jnp.asarray(coal.bin_centre_day, float)[:, None], coal.count
    if args.control_variate:
        print_control_variate(X, y, args)
        return
    args.output.mkdir(parents=True, exist_ok=True)

    fits, marginals = fixed_hyperparameters(X, y, args)
    comparison = sgp.compare(
        fits, transform={"intensity": lambda p: np.exp(p["f"]) * 191 / args.num_bins}
    )
    print(f"\n{comparison}")
    print_costs(fits)
    moments = intensity_moments(fits, marginals, args.num_bins)
    in_paper = {k: v for k, v in fits.items() if k.startswith("MoG") and "white" not in k}
    in_paper = intensity_moments(in_paper, marginals, args.num_bins, nugget=NUGGET)
    print_intensities({**moments, **{f"{k} + nugget": v for k, v in in_paper.items()}})
    print_bounds(fits, marginals, X, y)
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
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=DEFAULT_METHODS,
        help="; ".join(f"{name}: {text}" for name, text in METHODS.items()),
    )
    parser.add_argument(
        "--all", action="store_true", help="all methods (some minutes more)"
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
        "--num-slice-steps",
        type=int,
        default=20_000,
        help="of each chain of elliptical slices, of which --num-samples are kept",
    )
    parser.add_argument(
        "--control-variate",
        action="store_true",
        help="measure what the control variate of the score function does, and no more",
    )
    parser.add_argument(
        "--learn", action="store_true", help="learn the hyperparameters too (some minutes)"
    )
    parser.add_argument("--learn-bins", type=int, default=81, help="bins for --learn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float32", action="store_true", help="instead of float64")
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--output", type=Path, default=Path("figures"))
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args(arguments)
    wanted = METHODS if args.all else {"nuts", *args.methods}
    if args.methods == DEFAULT_METHODS and not find_spec("blackjax"):
        wanted = set(wanted) - {"ess"}
        print("No elliptical slices without BlackJAX: pip install blackjax")
    args.methods = [method for method in METHODS if method in wanted]
    return args


if __name__ == "__main__":
    args = parse_args()
    numpyro.enable_x64(not args.float32)
    numpyro.set_platform(args.device)
    numpyro.set_host_device_count(args.num_chains)
    main(args)

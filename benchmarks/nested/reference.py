"""
Posteriors of the ten problems by NUTS on their dense models, to compare with.

    python reference.py binomial student              # some minutes each
    python reference.py --plain binomial student      # the models as they are written
    python reference.py --plain --full-rank gaussian  # without a root of low rank either

Matrices are small: where other work shares the cores, one thread is many times faster
(``OPENBLAS_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0``).

Effects and z = L^-1 f are tightly correlated with the hyperparameters where the data say
much, and NUTS then takes long trajectories. Unless `plain`, it moves in other coordinates
(:func:`whitened`) of exactly the same posterior.

Writes NAME.npz (NAME_plain.npz, NAME_full_rank.npz, ... with these options):

* all draws of hyperparameters and effects by name, shape ``(chains * draws, ...)``,
* ``SITE_mean``, ``SITE_sd`` and ``SITE_quantiles`` (5, 50 and 95 %, shape ``(3, N)``) of
  each GP site and of "eta",
* ``seconds`` and ``cpu_seconds`` (from data to result, with compilation), ``min_ess``,
  ``max_rhat`` (over all hyperparameters and effects), ``divergences``, ``gradients``,
  ``num_chains``, ``rank`` (0: none).
"""

import argparse
import time
from pathlib import Path

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_solve, solve_triangular
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import MCMC, NUTS, init_to_median
from numpyro.primitives import Messenger
from problems import PROBLEMS

PILOTS = 3


class Sites:
    """Names of the sites of a dense model: hyperparameters, normal ones, the predictor."""

    def __init__(self, problem, data, rank):
        found = trace(seed(problem.dense, 0)).get_trace(*data, rank=rank)
        sample = [site for site in found.values() if site["type"] == "sample"]
        latent = {site["name"]: site for site in sample if not site["is_observed"]}
        self.normal = {
            name: jnp.zeros_like(site["value"])
            for name, site in latent.items()
            if isinstance(base(site["fn"]), dist.Normal)
        }
        self.hyper = [name for name in latent if name not in self.normal]
        self.latents = [name for name in latent if not name.endswith("_z")]
        self.curves = [n for n, site in found.items() if site["type"] == "deterministic"]
        self.others = [name for name in found if name not in self.hyper]
        self.predictor = "eta" if "eta" in found else "f"


class Values(Messenger):
    """Gives values to normal sites, from standardised ones, and to the predictor."""

    def __init__(self, fn, standardised, predictor=None):
        super().__init__(fn)
        self.standardised, self.predictor = standardised, predictor or {}

    def process_message(self, msg):
        if msg["name"] in self.standardised:
            normal = base(msg["fn"])
            msg["value"] = normal.loc + normal.scale * self.standardised[msg["name"]]
        elif msg["name"] in self.predictor:
            msg["value"] = self.predictor[msg["name"]]


def base(fn):
    """A distribution without its plates and event dimensions."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def whitened(problem, sites, data, rank):
    """
    The dense model in coordinates that are nearly standard normal under the posterior.

    With u the standardised normal sites (z and effects), the linear predictor is c + A u.
    The likelihood's second order at the predictor ``centre`` makes p(u | hyperparameters,
    y) a Gaussian, N(m, (R R^T)^-1), and u = m + R^-T e. The density of e has what this
    changes: any ``centre`` leads to the same posterior.
    """
    zeros, unravel = ravel_pytree(sites.normal)

    def run(u, hyper, predictor=None):
        of = Values(substitute(problem.dense, hyper), unravel(u), predictor)
        with block():
            return trace(of).get_trace(*data, rank=rank)

    def model(centre):
        with block(hide=sites.others):  # not the log Jacobians of NUTS
            found = trace(Values(problem.dense, sites.normal)).get_trace(*data, rank=rank)
        hyper = {name: found[name]["value"] for name in sites.hyper}

        def linear(u):
            return run(u, hyper)[sites.predictor]["value"]

        def log_likelihood(eta):
            site = run(zeros, hyper, {sites.predictor: eta})["y"]
            return site["fn"].log_prob(site["value"]).sum()

        ones = jnp.ones_like(centre)
        slope, curvature = jax.jvp(jax.grad(log_likelihood), (centre,), (ones,))
        weight = jnp.maximum(-curvature, 1e-3 * jnp.abs(curvature).mean())
        c, A = linear(zeros), jax.jacfwd(linear)(zeros)
        R = jnp.linalg.cholesky(jnp.eye(len(zeros)) + (A.T * weight) @ A)
        m = cho_solve((R, True), A.T @ (weight * (centre - c) + slope))
        e = numpyro.sample("e", dist.Normal(0.0, 1.0).expand(zeros.shape).to_event(1))
        u = m + solve_triangular(R, e, lower=True, trans=1)
        changed = 0.5 * (e @ e - u @ u) - jnp.log(jnp.diagonal(R)).sum()
        numpyro.factor("rest", log_likelihood(c + A @ u) + changed)
        at_u = run(u, hyper)
        for name in (*sites.normal, *sites.curves):
            numpyro.deterministic(name, at_u[name]["value"])

    return model


def chains(model, together, num_warmup, num_samples, num_chains, target_accept):
    """An MCMC that has not run yet."""
    kernel = NUTS(
        model,
        target_accept_prob=target_accept,
        dense_mass=together,
        init_strategy=init_to_median,
    )
    return MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="sequential",
        jit_model_args=num_chains == 1,  # one program for all pilots
        progress_bar=False,
    )


def run_nuts(problem, args):
    """
    Draws of all sites by name, with leading axes of chains and draws, and what they cost.

    In whitened coordinates after pilot chains, each of whose means is the next's centre.
    """
    rank = None if args.full_rank else problem.rank
    begin = time.time(), time.process_time()
    data = problem.data()
    sites = Sites(problem, data, rank)
    size = args.num_warmup, args.num_samples, args.num_chains, args.target_accept
    if args.plain:
        # The mass matrix is dense over all latents, or over all but z where z is long.
        mcmc = chains(problem.dense, True if rank else [tuple(sites.latents)], *size)
        inputs = data
    else:
        model = whitened(problem, sites, data, rank)
        pilot = chains(model, [tuple(sites.hyper)], 60, 60, 1, 0.8)
        centre = jnp.zeros(len(data[-1]))
        for number in range(PILOTS):
            pilot.run(jax.random.key(args.seed + 1 + number), centre)
            centre = pilot.get_samples()[sites.predictor].mean(0)
        mcmc = chains(model, [tuple(sites.hyper)], *size)
        inputs = (centre,)
    fields = ("num_steps", "diverging")
    key, options = jax.random.key(args.seed), {"rank": rank} if args.plain else {}
    mcmc.run(key, *inputs, extra_fields=fields, **options)
    draws = jax.device_get(mcmc.get_samples(group_by_chain=True))
    extra = mcmc.get_extra_fields()
    cost = {
        "seconds": time.time() - begin[0],
        "cpu_seconds": time.process_time() - begin[1],
        "divergences": int(extra["diverging"].sum()),
        "gradients": int(extra["num_steps"].sum()),
        "num_chains": args.num_chains,
        "rank": rank or 0,
    }
    return {name: draws[name] for name in (*sites.latents, *sites.curves)}, sites, cost


def each_number(draws, latents):
    """Every number of the named latents with its name, shape ``(chains, draws)``."""
    for name in latents:
        for index in np.ndindex(draws[name].shape[2:]):
            label = ",".join(map(str, index))
            yield f"{name}[{label}]" if label else name, draws[name][(..., *index)]


def summarise(draws, sites):
    """What is written of the draws, and lines to print."""
    ess, rhat, lines = [], [], []
    for name, x in each_number(draws, sites.latents):
        ess.append(float(arviz_stats.ess(x, method="bulk")))
        rhat.append(float(arviz_stats.rhat(x)))
        low, middle, high = np.quantile(x, [0.05, 0.5, 0.95])
        lines.append(
            f"  {name:22s} {x.mean():9.4f} ± {x.std():8.4f}  "
            f"[{low:9.4f} {middle:9.4f} {high:9.4f}]  ESS {ess[-1]:6.0f}  {rhat[-1]:.4f}"
        )
    result = {"min_ess": min(ess), "max_rhat": max(rhat)}
    for name in sites.latents:
        result[name] = draws[name].reshape(-1, *draws[name].shape[2:])
    for name in sites.curves:
        result[f"{name}_mean"] = draws[name].mean((0, 1))
        result[f"{name}_sd"] = draws[name].std((0, 1))
        quantiles = np.quantile(draws[name], [0.05, 0.5, 0.95], axis=(0, 1))
        result[f"{name}_quantiles"] = quantiles
    return result, lines


def main(args):
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        draws, sites, cost = run_nuts(PROBLEMS[name], args)
        result, lines = summarise(draws, sites)
        name += "_plain" * args.plain + "_full_rank" * args.full_rank
        np.savez(args.out / f"{name}.npz", **result, **cost)
        print(
            f"{name}: {cost['seconds']:.1f} s ({cost['cpu_seconds']:.1f} s of CPU), "
            f"min ESS {result['min_ess']:.0f}, "
            f"max R-hat {result['max_rhat']:.4f}, {cost['divergences']} divergences, "
            f"{cost['gradients']} gradients after warm-up, rank {cost['rank'] or 'N'}"
        )
        print("\n".join(lines), flush=True)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=PROBLEMS, metavar="NAME")
    parser.add_argument("--plain", action="store_true", help="the coordinates as written")
    parser.add_argument("--full-rank", action="store_true", help="no root of low rank")
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-samples", type=int, default=2000, help="of each chain")
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--target-accept", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "reference", help="folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    numpyro.enable_x64()
    numpyro.set_platform("cpu")
    main(parse_args())

"""
The small experiments of SAVIGP (Bonilla, Krauth & Dezfouli 2018, section 9) beside the
paper's numbers.

    python benchmarks/savigp.py --data FOLDER                    # all of it: some hours
    python benchmarks/savigp.py --data FOLDER --sets boston --sparsity 1 --methods FG

Every result is kept in ``--results`` (a row each) and not computed again, so a run that
was stopped goes on where it was; ``--table`` prints what is there. FOLDER has the data as
:mod:`numpyro_sgp.datasets` describes it.

The methods are the paper's families: FG is one Gaussian with a full covariance for each
latent function, in the form of the paper's Theorem 2, which contains its optimum; MoG1 and
MoG2 are mixtures of one and two Gaussians with diagonal covariances in whitened
coordinates, with the entropy bound of eq. 18 (``--unwhitened``: over u itself, as in the
paper, where a converged fit explains all by noise at large SF). Where the paper drew
samples, expectations are quadratures, and everything is trained together by L-BFGS, q(u) of
FG by natural gradients, rather than block by block. Inducing inputs are random training
inputs, nested over sparsity factors, as there; all of them at SF = 1, where more than 1000
start from the fit at SF = 0.2 and take 2 iterations more.

``fit`` is FG by the default call of :func:`numpyro_sgp.fit`, from no values of ours,
``fit-learned`` the same with inducing points that are trained, and ``fit-MoG1`` and
``fit-MoG2`` are the mixtures by the default call. ``held-MoG1`` is the first of them with
its hyperparameters held at those of ``fit``: with Gaussian noise a diagonal Gaussian then
has the mean of the full one, and what is left between them is its covariance.

Hyperparameters are found by maximum marginal likelihood, as in the paper. The methods
FG-MAP and exact-MAP give them priors, for standardised inputs: lengthscales
LogNormal(log sqrt(D), 1), the kernel variance LogNormal(log Var(y), 1) (LogNormal(0, 1) for
classes), the noise LogNormal(log(sd(y) / 3), 1).

Published numbers are means over test points and runs, from the authors' stored results.
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
from _results import FOLDER, Results
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta

import numpyro_sgp as sgp
from numpyro_sgp.datasets import abalone, boston, breast_cancer, creep, usps
from numpyro_sgp.likelihoods import TanhWarp, WarpedNormal, warped_moments

SETTINGS = ("set", "method", "factor", "split", "whiten", "float32")
FACTORS = (0.1, 0.2, 0.5, 1.0)
LARGE, LARGE_ITERATIONS = 1000, 2
HYPERPARAMETERS = ("variance", "lengthscale", "noise")
METHODS = ("FG", "FG-MAP", "MoG1", "MoG2", "exact", "exact-MAP")
METHODS += ("fit", "fit-learned", "fit-MoG1", "fit-MoG2", "held-MoG1")


class Experiment(NamedTuple):
    """
    One set of the paper.

    :param load: from the folder and a split to the data.
    :param splits: how many splits there are.
    :param ard: whether each input has a lengthscale.
    :param variance: where the kernel variance starts.
    :param lengthscale: where lengthscales start.
    :param latents: number of latent functions.
    :param standardised: whether inputs are standardised, as the priors suppose.
    :param noise: where the noise standard deviation starts, if there is one.
    :param rule: the expectation rule.
    :param metrics: names of the two errors.
    :param iterations: of L-BFGS.
    :param published: the paper's numbers by method, for the factors 0.1, 0.2, 0.5, 1.
    """

    load: object
    splits: int
    ard: bool
    variance: float
    lengthscale: float
    latents: int
    standardised: bool
    noise: float | None
    rule: object
    metrics: tuple[str, str]
    iterations: int
    published: dict


EXPERIMENTS = {
    "boston": Experiment(
        boston,
        5,
        True,
        1.0,
        1.0,
        1,
        True,
        1.0,
        sgp.GaussHermite(2),
        ("SMSE", "NLPD"),
        1000,
        {
            "FG": ((0.1746, 0.1468, 0.1220, 0.1043), (2.707, 2.619, 2.547, 2.484)),
            "MoG1": ((0.1705, 0.1346, 0.1123, 0.1279), (2.710, 2.589, 2.503, 2.615)),
            "MoG2": ((0.1742, 0.1479, 0.1058, 0.1264), (2.710, 2.623, 2.495, 2.608)),
            "exact": ((None, None, None, 0.1187), (None, None, None, 2.549)),
        },
    ),
    "cancer": Experiment(
        breast_cancer,
        5,
        False,
        1.0,
        1.0,
        1,
        True,
        None,
        sgp.GaussHermite(20),
        ("ER", "NLP"),
        500,
        {
            "FG": ((0.0360, 0.0350, 0.0345, 0.0360), (0.0934, 0.0932, 0.0932, 0.0946)),
            "MoG1": ((0.0355, 0.0339, 0.0345, 0.0339), (0.0937, 0.0957, 0.1055, 0.1263)),
            "MoG2": ((None,) * 4, (0.0937, 0.0958, 0.1049, 0.1281)),
        },
    ),
    "abalone": Experiment(
        lambda folder, split: abalone(folder),
        1,
        False,
        1.0,
        1.0,
        1,
        False,
        np.sqrt(0.1),
        sgp.GaussHermite(2),
        ("SMSE", "NLPD"),
        300,
        {
            "FG": ((0.4535, 0.4536, 0.4542, 0.4536), (2.033, 2.033, 2.033, 2.033)),
            "MoG1": ((0.464, 0.454, 0.443, 0.447), (2.038, None, None, 2.055)),
            "MoG2": ((None,) * 4, (None,) * 4),
            "exact": ((None, None, None, 0.4325), (None, None, None, 1.976)),
        },
    ),
    "creep": Experiment(
        lambda folder, split: creep(folder),
        1,
        True,
        1.0,
        1.0,
        1,
        True,
        np.sqrt(0.01),
        sgp.GaussHermite(2),
        ("SMSE", "NLPD"),
        500,
        {
            "FG": ((0.1019, 0.0738, 0.0697, 0.0639), (4.630, 4.464, 4.361, 4.208)),
            "MoG1": ((0.0889, 0.0755, 0.0613, 0.0619), (4.571, 4.465, 4.328, 4.214)),
            "MoG2": ((0.1470, 0.0762, 0.0590, 0.0616), (None,) * 4),
            "exact": ((None, None, None, 0.0624), (None, None, None, 4.198)),
        },
    ),
    "usps": Experiment(
        usps,
        5,
        False,
        2.0,
        4.0,
        3,
        True,
        None,
        sgp.GaussHermite(6),
        ("ER", "NLP"),
        150,
        {
            "FG": ((0.0304, 0.0268, 0.0255, 0.0248), (0.1148, 0.1114, 0.1225, 0.1244)),
            "MoG1": ((0.0294, 0.0250, 0.0255, 0.0367), (0.1095, 0.1018, 0.1250, 0.2285)),
            "MoG2": ((0.0271, 0.0245, 0.0266, 0.0367), (None,) * 4),
        },
    ),
}


def make_model(experiment, dim, warp, exact, priors, held=None):
    """
    The model of an experiment.

    :param exact: whether the Gaussian noise is in the covariance.
    :param priors: medians of priors by hyperparameter, or None for maximum likelihood.
    :param held: hyperparameters by name that are not trained, or None.
    """

    def positive(name, start):
        if held is not None:
            return held[name]
        start = jnp.asarray(start, jnp.result_type(float))
        if priors is None:
            return numpyro.param(name, start, constraint=constraints.positive)
        prior = dist.LogNormal(jnp.log(priors[name]), 1.0).expand(start.shape)
        return numpyro.sample(name, prior.to_event(start.ndim))

    def model(X, y=None):
        Q = experiment.latents
        batch = () if Q == 1 else (Q,)
        columns = (dim,) if experiment.ard else ()
        kernel = sgp.kernels.RBF(
            positive("variance", jnp.full(batch, experiment.variance)),
            positive("lengthscale", jnp.full(batch + columns, experiment.lengthscale)),
        )
        noise = None
        if experiment.noise is not None:
            noise = positive("noise", experiment.noise)
        if exact:
            kernel = kernel + sgp.kernels.White(noise**2)
            if warp is not None:
                transform = TanhWarp(*warp)
                z = transform(y)
                numpyro.factor("jacobian", transform.log_abs_det_jacobian(y, z).sum())
                y = z
            numpyro.sample("y", sgp.GaussianProcess(kernel, X), obs=y)
            return
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            if Q > 1:
                # As Categorical, whose gradient scatters, which is slow on a CPU.
                fn = dist.MultinomialLogits(f.T, total_count=1)
                y = None if y is None else jax.nn.one_hot(y, Q)
            elif noise is None:
                fn = dist.Bernoulli(logits=f)
            elif warp is not None:
                fn = WarpedNormal(f, noise, *warp)
            else:
                fn = dist.Normal(f, noise)
            numpyro.sample("y", fn, obs=y)

    return model


def approximation(method, X, factor, split, whiten):
    """The family at the GP site."""
    M = round(factor * len(X))
    method = method.removesuffix("-MAP")
    Z = X if factor == 1 else X[np.random.default_rng(split).permutation(len(X))[:M]]
    Z = np.unique(Z, axis=0)
    if method in ("fit", "fit-learned"):
        return sgp.SVGP(inducing=Z, train_inducing=method == "fit-learned")
    if method == "FG":
        return sgp.SVGP(inducing=Z, train_inducing=False, covariance="pseudo_data")
    return sgp.MixtureSVGP(
        num_components=int(method[-1]),
        inducing=Z,
        train_inducing=False,
        covariance="diagonal",
        entropy="jensen",
        spread=0.01,
        whiten=whiten,
    )


def run(name, method, factor, split, folder, whiten, progress, limit=None):
    """One fit: its errors on the test set, bound, iterations and seconds."""
    experiment = EXPERIMENTS[name]
    data = experiment.load(folder, split)
    X, X_test = jnp.asarray(data.X_train), jnp.asarray(data.X_test)
    y, y_test = jnp.asarray(data.y_train), jnp.asarray(data.y_test)
    if experiment.noise is None and experiment.latents == 1:
        y, y_test = y.astype(X.dtype), y_test.astype(X.dtype)
    warp = getattr(data, "warp", None)
    exact, priors = method.startswith("exact"), None
    if method.endswith("-MAP"):
        z = y if warp is None else TanhWarp(*warp)(y)
        variance = 1.0 if experiment.noise is None else z.var()
        priors = {
            "lengthscale": np.sqrt(X.shape[1]),
            "variance": variance,
            "noise": np.sqrt(variance) / 3,
        }
    kind = experiment, X.shape[1], warp, exact, priors
    model, held = make_model(*kind), {}
    start = time.perf_counter()
    if method.startswith(("fit", "held")):
        options = {"seconds": limit, "progress_bar": progress}
        if method.startswith("held"):
            family = approximation("fit", data.X_train, factor, split, whiten)
            found = sgp.fit(model, family, (X, y), **options).params
            held = {name: found[name] for name in HYPERPARAMETERS if name in found}
            model = make_model(*kind, held)
        family = approximation(method, data.X_train, factor, split, whiten)
        fit = sgp.fit(model, family, (X, y), **options)
        guide, bound = fit.guide, fit.bound
    else:
        options = {"max_iterations": experiment.iterations, "progress_bar": progress}
        guide, fit = by_lbfgs(
            experiment, model, (method, factor, split, whiten), (X, y), options
        )
        bound = -float(fit.losses[-1])
    seconds = time.perf_counter() - start
    hyper = {**fit.params, **held}
    if priors is not None:
        hyper |= (
            guide.median(fit.params) if exact else guide.others_at(fit.params, (X, y), {})
        )
    if exact:
        first, second = exact_errors(hyper, X, y, X_test, y_test, warp, data)
    else:
        posterior = guide.posterior(fit.params, X_test)["f"]
        log_density = sgp.log_predictive_density(guide, fit.params, X_test, y_test)["y"]
        if experiment.noise is None:
            first = class_error(guide, fit.params, X_test, np.asarray(data.y_test))
            second = -np.mean(log_density)
        else:
            variance = posterior.variance + hyper["noise"] ** 2
            first, second = regression_errors(
                posterior.mean, variance, log_density, y_test, y, warp, data
            )
    return {
        experiment.metrics[0]: float(first),
        experiment.metrics[1]: float(second),
        "bound": bound,
        "iterations": len(fit.losses),
        "seconds": seconds,
    }


def by_lbfgs(experiment, model, family, data, options):
    """A guide trained by L-BFGS from the experiment's values, and the result."""
    (X, y), (method, factor, split, whiten) = data, family
    batch = () if experiment.latents == 1 else (experiment.latents,)
    columns = (X.shape[1],) if experiment.ard else ()
    initial = init_to_value(
        values={
            "lengthscale": jnp.full(batch + columns, experiment.lengthscale),
            "variance": jnp.full(batch, experiment.variance),
            "noise": experiment.noise,
        }
    )
    options = {**options, "tol": 1e-8}
    if method.startswith("exact"):
        priors = method.endswith("-MAP")
        guide = AutoDelta(model, init_loc_fn=initial) if priors else lambda X, y: None
        svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
        return guide, sgp.fit_lbfgs(svi, jax.random.key(0), X, y, **options)

    def svi_of(factor):
        family = approximation(method, np.asarray(X), factor, split, whiten)
        guide = sgp.AutoSparseGP(model, family, init_loc_fn=initial)
        return SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO(experiment.rule))

    if method.startswith("FG") and factor == 1 and len(X) > LARGE:
        # Sites belong to data and not to inducing points: start from a smaller fit.
        fit = sgp.fit_lbfgs(svi_of(0.2), jax.random.key(0), X, y, **options)
        options |= {"init_params": fit.params, "max_iterations": LARGE_ITERATIONS}
    svi = svi_of(factor)
    return svi.guide, sgp.fit_lbfgs(svi, jax.random.key(0), X, y, **options)


def exact_errors(params, X, y, X_test, y_test, warp, data):
    """Of exact GP regression (on warped targets) with the fitted hyperparameters."""
    kernel = sgp.kernels.RBF(params["variance"], params["lengthscale"])
    s2 = params["noise"] ** 2
    z = y if warp is None else TanhWarp(*warp)(y)
    L = jnp.linalg.cholesky(kernel(X, X) + s2 * jnp.eye(len(X)))
    A = jax.scipy.linalg.solve_triangular(L, kernel(X, X_test), lower=True)
    mean = A.T @ jax.scipy.linalg.solve_triangular(L, z, lower=True)
    variance = kernel.diag(X_test) - jnp.sum(A**2, axis=0) + s2
    scale = jnp.sqrt(variance)
    fn = dist.Normal(mean, scale) if warp is None else WarpedNormal(mean, scale, *warp)
    return regression_errors(mean, variance, fn.log_prob(y_test), y_test, y, warp, data)


def regression_errors(mean, variance, log_density, y_test, y, warp, data):
    """SMSE, and NLPD in original units."""
    if warp is not None:
        mean = warped_moments(mean, variance, TanhWarp(*warp)).mean
    error = jnp.mean((mean - y_test) ** 2) / jnp.mean((y_test - y.mean()) ** 2)
    return error, -jnp.mean(log_density) + np.log(data.y_scale)


def class_error(guide, params, X, labels):
    """Error rate of the likeliest class."""
    values = np.unique(labels)
    log_density = [
        sgp.log_predictive_density(
            guide,
            params,
            X,
            jnp.full(len(labels), value, X.dtype if len(values) == 2 else int),
        )["y"]
        for value in values
    ]
    return np.mean(values[np.argmax(log_density, axis=0)] != labels)


def applies(method, experiment):
    """Whether a method is for an experiment: priors are for standardised inputs."""
    if method.endswith("-MAP") and not experiment.standardised:
        return False
    return experiment.noise is not None or not method.startswith("exact")


def print_table(results, name):
    """Means over splits beside the published numbers, of which those of FG are for fit."""
    experiment, kinds = EXPERIMENTS[name], {}
    for row in results:
        if row["set"] == name:
            kind = tuple(row[k] for k in SETTINGS if k not in ("set", "split"))
            kinds.setdefault(kind, []).append(row)
    print(f"\n{name}: mean over splits [published]\n")
    heads = ["method", "SF", "splits", *experiment.metrics, "bound", "iterations", "s"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for (method, factor, whiten, float32), rows in sorted(kinds.items()):
        label = (
            method + ("" if whiten else ", unwhitened") + (", float32" if float32 else "")
        )
        cells = [label, f"{factor:g}", str(len(rows))]
        family = method.removesuffix("-MAP").removeprefix("fit-").removeprefix("held-")
        family = "FG" if family in ("fit", "learned") else family
        for metric, published in zip(
            experiment.metrics, experiment.published.get(family, [{}] * 2), strict=True
        ):
            paper = published[FACTORS.index(factor)] if published else None
            told = "" if paper is None else f" [{paper:.4g}]"
            cells.append(f"{np.mean([r[metric] for r in rows]):.4f}{told}")
        for number, digits in (("bound", 1), ("iterations", 0), ("seconds", 0)):
            cells.append(f"{np.mean([r[number] for r in rows]):.{digits}f}")
        print(f"| {' | '.join(cells)} |")


def main(args):
    """Runs what is missing and prints the tables."""
    if not args.float32:
        numpyro.enable_x64()
    results = Results(args.results, SETTINGS)
    for name in args.sets:
        experiment = EXPERIMENTS[name]
        splits = args.splits if args.splits is not None else range(experiment.splits)
        for method in args.methods:
            if args.table or not applies(method, experiment):
                continue
            for factor in args.sparsity if not method.startswith("exact") else [1.0]:
                for split in splits:
                    whiten = not args.unwhitened or "MoG" not in method
                    case = name, method, factor, split, whiten, args.float32
                    settings = dict(zip(SETTINGS, case, strict=True))
                    if split >= experiment.splits or results.has(**settings):
                        continue
                    row = run(
                        *case[:4], args.data, whiten, not args.no_progress, args.seconds
                    )
                    results.add({**settings, **row})
                    print({**settings, **row}, flush=True)
        print_table(results.rows(), name)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the data")
    sets = list(EXPERIMENTS)
    parser.add_argument("--sets", nargs="+", choices=sets, default=sets)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(FACTORS))
    parser.add_argument("--splits", nargs="+", type=int, help="from 0; default: all")
    parser.add_argument(
        "--unwhitened", action="store_true", help="diagonal mixtures over u itself"
    )
    parser.add_argument("--float32", action="store_true", help="single precision")
    parser.add_argument("--seconds", type=float, help="the longest that fit may take")
    parser.add_argument("--results", type=Path, default=FOLDER / "savigp.json")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

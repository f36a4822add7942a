"""
Bad input: every public callable with wrong values, one argument after another.

    python -m campaigns.inputs                       # some thousand calls, some minutes
    python -m campaigns.inputs --precision float64
    python -m campaigns.inputs --show                # what was found, a line each

A call may return, or raise ValueError, TypeError or NotImplementedError *of this package*
(the raise stands in a file of it), with a message that names the argument. What comes from
within JAX, XLA, NumPy or NumPyro is a failure, and so is a changed input array. Calls that
return are counted by the kind of value, for a reader to judge.
"""

import argparse
import copy
import signal
import traceback
import warnings
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.handlers import seed
from numpyro.infer import SVI

import numpyro_sgp as sgp
from campaigns._table import Found, Table

ROOT = Path(sgp.__file__).parent
SECONDS = 60

X = np.linspace(0.0, 3.0, 12)[:, None]
Y = np.sin(X[:, 0])
Z = np.linspace(0.0, 3.0, 4)[:, None]


def model(X, y=None):
    """Regression with a sampled lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


#: Wrong values by what is wrong with them.
BAD = {
    "none": None,
    "text": "text",
    "empty text": "",
    "nan": float("nan"),
    "inf": float("inf"),
    "minus one": -1,
    "zero": 0,
    "half": 0.5,
    "huge": 1e38,
    "huge integer": 10**12,
    "true": True,
    "complex": 1.0 + 2.0j,
    "list": [],
    "list of text": ["a", "b"],
    "dict": {"a": 1},
    "set": {1, 2},
    "function": lambda x: x,
    "class": int,
    "empty array": np.zeros((0,)),
    "no rows": np.zeros((0, 1)),
    "no columns": np.zeros((12, 0)),
    "one row fewer": np.zeros((11, 1)),
    "three columns": np.zeros((12, 3)),
    "vector": np.zeros(12),
    "cube": np.zeros((2, 3, 4)),
    "array of nan": np.full((12, 1), np.nan),
    "array with an inf": np.where(np.arange(12)[:, None] == 3, np.inf, 1.0),
    "array of text": np.array(["a"] * 12),
    "array of objects": np.array([None] * 12, dtype=object),
    "array of booleans": np.ones((12, 1), bool),
    "array of integers": np.arange(12)[:, None],
    "array of dates": np.array(["2020-01-01"] * 12, dtype="datetime64[D]"),
    "complex array": np.ones((12, 1), complex),
    "key": jax.random.key(3),
}


def guide():
    """One that is set up, and its parameters."""
    made = sgp.AutoSparseGP(model, sgp.SVGP(4))
    made.setup(X, Y)
    return made, made.known().starts


def cheap():
    """Targets that need nothing prepared."""
    kernel, key = sgp.kernels.RBF(1.0, 1.0), jax.random.key(0)
    process = sgp.GaussianProcess(kernel, X)
    kernels = sgp.kernels
    return {
        "RBF": (kernels.RBF, {"variance": 1.0, "lengthscale": 1.0}),
        "Matern32": (kernels.Matern32, {"variance": 1.0, "lengthscale": 1.0}),
        "Periodic": (kernels.Periodic, {"variance": 1.0, "lengthscale": 1.0}),
        "RBF()": (kernel, {"X1": X, "X2": X}),
        "RBF.diag": (kernel.diag, {"X": X}),
        "Linear": (kernels.Linear, {"variance": 1.0}),
        "Polynomial": (kernels.Polynomial, {"variance": 1.0, "degree": 2}),
        "GaussianProcess": (sgp.GaussianProcess, {"kernel": kernel, "X": X, "mean": None}),
        "GaussianProcess.log_prob": (process.log_prob, {"value": Y}),
        "GaussianProcess.sample": (process.sample, {"key": key, "sample_shape": ()}),
        "SVGP": (
            sgp.SVGP,
            {"num_inducing": 4, "inducing": "kmeans", "covariance": "full"}
            | {"whiten": True, "jitter": None, "tight": "none", "seed": 0},
        ),
    }


def prepared():
    """What targets need, made once."""
    kernel = sgp.kernels.RBF(1.0, 1.0)
    made, params = guide()
    fitted = sgp.fit(model, sgp.SVGP(4), (X, Y), progress_bar=False)
    nested = sgp.nested(model, sgp.SVGP(4), (X, Y), progress_bar=False)
    small = {"progress_bar": False, "steps": 2}
    key = jax.random.key(0)
    posterior = made.posterior(params, X)["f"]
    collapsed = sgp.CollapsedSVGP(kernel, X, Z, 0.3)
    targets = cheap() | {
        "MarginalGP": (sgp.MarginalGP, {"kernel": kernel, "X": X, "noise": 0.3}),
        "CollapsedSVGP": (
            sgp.CollapsedSVGP,
            {"kernel": kernel, "X": X, "Z": Z, "noise": 0.3},
        ),
        "CollapsedSVGP.log_prob": (collapsed.log_prob, {"value": Y}),
        "CollapsedSVGP.posterior": (collapsed.posterior, {"y": Y, "X_new": X}),
        "SOLVEGP": (sgp.SOLVEGP, {"num_inducing": 4, "num_orthogonal": 4}),
        "ODVGP": (sgp.ODVGP, {"num_inducing": 4, "num_orthogonal": 4}),
        "MixtureSVGP": (sgp.MixtureSVGP, {"num_inducing": 4, "num_components": 2}),
        "InverseFreeSVGP": (sgp.InverseFreeSVGP, {"num_inducing": 4, "bound": "relaxed"}),
        "VGP": (sgp.VGP, {"covariance": "full"}),
        "AutoSparseGP": (
            sgp.AutoSparseGP,
            {"model": model, "approximation": sgp.SVGP(4), "prefix": "auto"},
        ),
        "AutoSparseGP.setup": (
            lambda X, y: sgp.AutoSparseGP(model, sgp.SVGP(4)).setup(X, y),
            {"X": X, "y": Y},
        ),
        "AutoSparseGP.posterior": (
            lambda params, X: made.posterior(params, X),
            {"params": params, "X": X},
        ),
        "AutoJointGP.setup": (
            lambda X, y: sgp.AutoJointGP(model, sgp.SVGP(4)).setup(X, y),
            {"X": X, "y": Y},
        ),
        "SparsePosterior.quantile": (posterior.quantile, {"q": 0.5}),
        "SparsePosterior.sample": (posterior.sample, {"key": key, "sample_shape": ()}),
        "TraceGP_ELBO": (
            sgp.TraceGP_ELBO,
            {"expectation": None, "num_particles": 1},
        ),
        "GaussHermite": (sgp.GaussHermite, {"num_nodes": 5}),
        "MonteCarlo": (sgp.MonteCarlo, {"num_samples": 5}),
        "ScoreFunction": (sgp.ScoreFunction, {"num_samples": 5}),
        "natural_gradients": (
            sgp.natural_gradients,
            {"guide": made, "learning_rate": 0.5, "others": optax.adam(0.1)},
        ),
        "fit": (
            lambda **given: sgp.fit(**given, **small),
            {"model": model, "approximation": sgp.SVGP(4), "data": (X, Y)}
            | {"rng_key": key, "batch_size": None, "restarts": 1, "tolerance": 0.1},
        ),
        "fit, X": (
            lambda X, y: sgp.fit(model, sgp.SVGP(4), (X, y), **small),
            {"X": X, "y": Y},
        ),
        "nested": (
            lambda **given: sgp.nested(**given, progress_bar=False),
            {"model": model, "approximation": sgp.SVGP(4), "data": (X, Y)}
            | {"max_nodes": 2, "seconds": None},
        ),
        "Fitted.predict": (
            lambda X, quantiles: fitted.predict(X, quantiles=quantiles),
            {"X": X, "quantiles": (0.1, 0.9)},
        ),
        "Fitted.posterior": (lambda X: fitted.posterior(X), {"X": X}),
        "Fitted.sample": (
            lambda key, X, sample_shape: fitted.sample(key, X, sample_shape=sample_shape),
            {"key": key, "X": X, "sample_shape": (2,)},
        ),
        "Fitted.log_score": (lambda X, y: fitted.log_score(X, y), {"X": X, "y": Y}),
        "Fitted.save": (
            lambda path: fitted.save("/nonexistent/f" if isinstance(path, str) else path),
            {"path": "/nonexistent/folder/file"},
        ),
        "load": (sgp.load, {"path": "/nonexistent/file", "model": model}),
        "Nested.posterior": (lambda X: nested.posterior(X), {"X": X}),
        "Nested.predict": (
            lambda X, quantiles: nested.predict(X, quantiles=quantiles),
            {"X": X, "quantiles": (0.1, 0.9)},
        ),
        "Nested.log_score": (lambda X, y: nested.log_score(X, y), {"X": X, "y": Y}),
        "initial_inducing": (
            sgp.initial_inducing,
            {"kernel": kernel, "X": X, "num": 4, "method": "kmeans", "seed": 0},
        ),
        "assess_inducing": (sgp.assess_inducing, {"kernel": kernel, "X": X, "Z": Z}),
        "whiten": (sgp.whiten, {"model": model}),
        "sparsify": (sgp.sparsify, {"model": model, "approximation": sgp.SVGP(4)}),
        "EllipticalSlice": (sgp.EllipticalSlice, {"model": model}),
        "to_arviz": (sgp.to_arviz, {"source": fitted}),
        "compare": (sgp.compare, {"fits": {"a": fitted.to_arviz(num_samples=20)}}),
        "pad_rows": (lambda X, y: sgp.pad_rows(X, y), {"X": X, "y": Y}),
        "neighbour_blocks": (sgp.neighbour_blocks, {"X": X, "size": 3}),
        "BlackBox": (sgp.BlackBox, {"log_prob": lambda y, f: y * f, "f": Y}),
        "FourierFeatures": (sgp.FourierFeatures, {"num": 3, "low": 0.0, "high": 3.0}),
    }
    return targets | other_kernels(kernel) | collapsed_others(kernel) | later(made, params)


def other_kernels(kernel):
    """Those that :func:`cheap` has not."""
    kinds = sgp.kernels
    one = {"variance": 1.0, "lengthscale": 1.0}
    return {
        "RationalQuadratic": (kinds.RationalQuadratic, one),
        "Matern12": (kinds.Matern12, one),
        "White": (kinds.White, {"variance": 1.0}),
        "Constant": (kinds.Constant, {"variance": 1.0}),
        "as_kernel": (kinds.as_kernel, {"kernel": kernel}),
    }


def collapsed_others(kernel):
    """Distributions of y that :func:`prepared` has not."""
    given = {"kernel": kernel, "X": X, "Z": Z, "noise": 0.3}
    return {
        "CollapsedCG": (sgp.CollapsedCG, {**given, "max_iterations": 5, "tol": 1.0}),
        "CollapsedODVGP": (sgp.CollapsedODVGP, {**given, "O": Z + 0.1}),
        "CollapsedSOLVEGP": (sgp.CollapsedSOLVEGP, {**given, "O": Z + 0.1}),
    }


def later(made, params):
    """What comes after a guide is set up."""
    key = jax.random.key(0)
    draws = {"lengthscale": np.ones(3), "f": np.zeros((3, 12))}

    def svi():
        guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
        return SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())

    def lbfgs(X, y, rng_key, **options):
        return sgp.fit_lbfgs(svi(), rng_key, X, y, progress_bar=False, **options)

    def train(rng_key, data, num_steps, **options):
        return sgp.train(svi(), rng_key, data, num_steps, progress_bar=False, **options)

    def on_smoothed(**given):
        points = sgp.SmoothedPoints(**given)
        return sgp.AutoSparseGP(model, sgp.SVGP(inducing=points)).setup(X, Y)

    return {
        "fit_lbfgs": (
            lbfgs,
            {"X": X, "y": Y, "rng_key": key, "max_iterations": 2, "tol": 1e-9},
        ),
        "train": (
            train,
            {"rng_key": key, "data": (X, Y), "num_steps": 2, "batch_size": 12}
            | {"every": 1, "patience": None, "chunk": 2},
        ),
        "Predictor": (
            sgp.Predictor,
            {"guide": made, "params": params, "batch_size": 8},
        ),
        "predict": (
            lambda X, **given: sgp.predict(made, params, X, **given),
            {"X": X, "num_draws": 2, "rng_key": key, "batch_size": 100},
        ),
        "log_predictive_density": (
            lambda X, y, **given: sgp.log_predictive_density(made, params, X, y, **given),
            {"X": X, "y": Y, "num_draws": 2, "rng_key": key, "expectation": None},
        ),
        "GPPredictive": (
            lambda X, **given: sgp.GPPredictive(train_args=(X, Y), **given)(key, X),
            {"X": X, "model": model, "posterior_samples": draws, "batch_size": None},
        ),
        "layer": (
            lambda **given: seed(lambda: sgp.layer(**given), 0)(),
            {"name": "h", "kernel": sgp.kernels.RBF(1.0, 1.0), "X": X}
            | {"num_outputs": 1, "mean": "identity"},
        ),
        "SmoothedPoints": (on_smoothed, {"points": Z, "width": 1.0}),
        "Fitted": (sgp.Fitted, {"guide": made, "params": params, "args": (X, Y)}),
    }


class _TooLong(Exception):
    pass


def _alarm(*_):
    raise _TooLong


def is_ours(error):
    """Whether the raise stands in a file of the package, or a call lacks arguments."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if ROOT in Path(frame.filename).parents:
        return True
    text = str(error)
    return isinstance(error, TypeError) and (
        "unexpected keyword" in text
        or "required positional" in text
        or "positional argument but" in text
    )


def judged(function, given):
    """What comes of a call: a verdict, and what was said."""
    arrays = {k: v.copy() for k, v in given.items() if isinstance(v, np.ndarray)}
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = function(**given)
            jax.block_until_ready(jax.tree.leaves(found))
        verdict, told = "returned", ""
    except (ValueError, TypeError, NotImplementedError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        verdict = "refused" if is_ours(error) else "foreign"
    except (OSError, KeyError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        system = isinstance(error, OSError) and error.errno is not None
        verdict = "refused" if system else "foreign"
    except _TooLong:
        verdict, told = "foreign", f"not done in {SECONDS} s"
    except Exception as error:
        verdict = "foreign"
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        signal.alarm(0)
    for key, before in arrays.items():
        if not np.array_equal(before, given[key], equal_nan=before.dtype.kind in "fc"):
            verdict, told = "foreign", f"changed its input '{key}'"
    return verdict, told


def look(target, function, given):
    """All bad values for all arguments of a target."""
    failed, counts, cases = [], Counter(), 0
    for name in given:
        for kind, value in BAD.items():
            if (target, name, kind) == ("train", "num_steps", "huge integer"):
                continue  # right, and takes years
            bad = {**given, name: copy.copy(value)}
            verdict, told = judged(function, bad)
            cases += 1
            counts[verdict] += 1
            if verdict == "foreign":
                failed.append(f"{name} = {kind}: {told}")
            elif verdict == "returned":
                counts[f"returned: {name} = {kind}"] += 1
    return Found(cases, failed, dict(counts))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--precision", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.precision == "float64")
    table = Table(f"inputs_{options.precision}")
    if not options.show:
        targets = prepared()
        table.run(targets, lambda name: look(name, *targets[name]))
    for sentence in table.failed:
        print(sentence)
    print(f"{table.cases} calls, {len(table.failed)} failed")


if __name__ == "__main__":
    main()

"""
Models as users write them, and data that are hard on training: what inputs and responses
are like, by name.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

import numpyro_sgp as sgp

#: Rows, inducing points and columns.
SIZES = {
    "five": (5, 3, 1),
    "near": (20, 18, 2),  # M near N
    "some": (60, 10, 3),
    "wide": (40, 8, 50),
    "many": (200, 20, 5),
    "thousand": (1000, 16, 2),
    "thousands": (5000, 16, 2),
}

# ---- kernels --------------------------------------------------------------------------


class Kernel(NamedTuple):
    """
    :param make: the kernel of the package, from what makes hyperparameters by name and
        shape, and the number of columns.
    :param dense: the same in plain NumPy: from hyperparameters by name and two matrices of
        inputs.
    """

    make: Callable
    dense: Callable


def _distance(given, X1, X2):
    apart = (X1[:, None] - X2) / given["length"]
    return np.sqrt((apart**2).sum(-1))


def _rbf(given, X1, X2):
    return given["variance"] * np.exp(-0.5 * _distance(given, X1, X2) ** 2)


def _matern12(given, X1, X2):
    return given["variance"] * np.exp(-_distance(given, X1, X2))


def _matern32(given, X1, X2):
    r = np.sqrt(3.0) * _distance(given, X1, X2)
    return given["variance"] * (1.0 + r) * np.exp(-r)


def _matern52(given, X1, X2):
    r = np.sqrt(5.0) * _distance(given, X1, X2)
    return given["variance"] * (1.0 + r + r**2 / 3.0) * np.exp(-r)


def _periodic(given, X1, X2):
    angle = np.pi * np.remainder(X1[:, None] - X2, given["period"]) / given["period"]
    within = (np.sin(angle) ** 2).sum(-1) / given["circle"] ** 2
    return given["swing"] * np.exp(-2.0 * within)


def _linear(given, X1, X2):
    return given["slope"] * X1 @ X2.T


def _stationary(kind):
    return lambda value, D: kind(value("variance"), value("length"))


def _periodic_of(value):
    return sgp.kernels.Periodic(value("swing"), value("circle"), value("period"))


KERNELS = {
    "RBF": Kernel(_stationary(sgp.kernels.RBF), _rbf),
    "ARD": Kernel(
        lambda value, D: sgp.kernels.RBF(value("variance"), value("length", (D,))), _rbf
    ),
    "Matern12": Kernel(_stationary(sgp.kernels.Matern12), _matern12),
    "Matern32": Kernel(_stationary(sgp.kernels.Matern32), _matern32),
    "Matern52": Kernel(_stationary(sgp.kernels.Matern52), _matern52),
    "RBF + Linear": Kernel(
        lambda value, D: (
            sgp.kernels.RBF(value("variance"), value("length"))
            + sgp.kernels.Linear(value("slope"))
        ),
        lambda given, *X: _rbf(given, *X) + _linear(given, *X),
    ),
    "Matern32 + Periodic": Kernel(
        lambda value, D: (
            sgp.kernels.Matern32(value("variance"), value("length")) + _periodic_of(value)
        ),
        lambda given, *X: _matern32(given, *X) + _periodic(given, *X),
    ),
}

# ---- likelihoods ----------------------------------------------------------------------


class Likelihood(NamedTuple):
    """
    :param respond: a distribution of the responses, from f and what makes parameters.
    :param kind: of responses: real, positive, counts or classes.
    :param functions: how many GPs it takes; 0 for one without a batch.
    """

    respond: Callable
    kind: str
    functions: int = 0


LIKELIHOODS = {
    "Normal": Likelihood(lambda f, value: dist.Normal(f, value("noise")), "real"),
    "StudentT": Likelihood(lambda f, value: dist.StudentT(4.0, f, value("noise")), "real"),
    "Poisson": Likelihood(lambda f, value: dist.Poisson(jnp.exp(f)), "counts"),
    "NegativeBinomial": Likelihood(
        lambda f, value: dist.NegativeBinomial2(jnp.exp(f), value("noise")), "counts"
    ),
    "Bernoulli": Likelihood(lambda f, value: dist.Bernoulli(logits=f), "classes"),
    "Categorical": Likelihood(
        lambda f, value: dist.Categorical(logits=f.T), "classes", functions=3
    ),
    "Gamma": Likelihood(
        lambda f, value: dist.Gamma(value("noise"), value("noise") * jnp.exp(-f)),
        "positive",
    ),
    "two functions": Likelihood(
        lambda f, value: dist.Normal(f[0], jnp.exp(f[1])), "real", functions=2
    ),
}


def written(likelihood: str, kernel: str, given: str) -> Callable:
    """
    A model as a user writes it.

    :param given: ``"sampled"`` for hyperparameters with priors, ``"params"`` without.
    """
    of = LIKELIHOODS[likelihood]

    def model(X, y=None):
        made = {}

        def value(name, shape=()):
            if name not in made and given == "sampled":
                prior = dist.LogNormal(jnp.zeros(shape), 1.0).to_event(len(shape))
                made[name] = numpyro.sample(name, prior)
            elif name not in made:
                ones = jnp.ones(shape)
                made[name] = numpyro.param(name, ones, constraint=constraints.positive)
            return made[name]

        made_kernel = KERNELS[kernel].make(value, X.shape[1])
        process = sgp.GaussianProcess(made_kernel, X)
        if of.functions:
            process = process.expand([of.functions])
        f = numpyro.sample("f", process)
        response = of.respond(f, value)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", response, obs=y)

    return model


# ---- data -----------------------------------------------------------------------------


def _with(X, rows, values):
    X = X.copy()
    X[rows] = values
    return X


#: From a generator and standard normal inputs to others.
INPUTS = {
    "plain": lambda rng, X: X,
    "of 1e-6": lambda rng, X: 1e-6 * X,
    "of 1e6": lambda rng, X: 1e6 * X,
    "rows twice": lambda rng, X: _with(
        X, slice(len(X) // 2, 2 * (len(X) // 2)), X[: len(X) // 2]
    ),
    "one place": lambda rng, X: np.repeat(X[:1], len(X), axis=0),
    "constant column": lambda rng, X: _with(X.T, -1, 3.0).T,
    "outlier": lambda rng, X: _with(X, -1, 1e4),
    "columns apart": lambda rng, X: X * 10 ** rng.uniform(-6, 6, X.shape[1]),
    "integers": lambda rng, X: np.round(2 * X),
    "two places": lambda rng, X: X[rng.integers(2, size=len(X))],
    "clusters": lambda rng, X: np.round(X) + 1e-4 * X,
    "far from zero": lambda rng, X: X + 1e3,
}


def _real(rng, f, noise=0.1):
    return f + noise * rng.normal(size=len(f))


def _spike(y, to):
    y = np.array(y, float)
    y[len(y) // 2] = to
    return y


#: From a generator and a function's values to responses.
RESPONSES = {
    "real": {
        "plain": _real,
        "of 1e-6": lambda rng, f: 1e-6 * _real(rng, f),
        "of 1e6": lambda rng, f: 1e6 * _real(rng, f),
        "outlier": lambda rng, f: _spike(_real(rng, f), 1e4),
        "constant": lambda rng, f: np.full(len(f), 2.0),
        "zero": lambda rng, f: np.zeros(len(f)),
        "noise 1e-4": lambda rng, f: _real(rng, f, 1e-4),
        "far from zero": lambda rng, f: 1e4 + _real(rng, f),
        "spike": lambda rng, f: _spike(np.zeros(len(f)), 1.0),
        "noise alone": lambda rng, f: rng.normal(size=len(f)),
    },
    "positive": {
        "plain": lambda rng, f: np.exp(_real(rng, f)),
        "of 1e-6": lambda rng, f: 1e-6 * np.exp(_real(rng, f)),
        "of 1e6": lambda rng, f: 1e6 * np.exp(_real(rng, f)),
        "outlier": lambda rng, f: _spike(np.exp(_real(rng, f)), 1e4),
        "constant": lambda rng, f: np.full(len(f), 2.0),
    },
    "counts": {
        "plain": lambda rng, f: rng.poisson(2.0 * np.exp(f)),
        "zero": lambda rng, f: np.zeros(len(f)),
        "huge": lambda rng, f: rng.poisson(1e6 * np.exp(f)),
        "one huge": lambda rng, f: _spike(rng.poisson(np.exp(f)), 1e6),
        "constant": lambda rng, f: np.full(len(f), 3.0),
        "one alone": lambda rng, f: _spike(np.zeros(len(f)), 1.0),
    },
    "classes": {
        "plain": lambda rng, f: 1.0 * (f + rng.logistic(size=len(f)) > 0),
        "separable": lambda rng, f: 1.0 * (f > np.median(f)),
        "one class": lambda rng, f: np.zeros(len(f)),
        "one alone": lambda rng, f: _spike(np.zeros(len(f)), 1.0),
    },
}


def kinds_of(likelihood: str, each: int, rng) -> list[tuple[str, str]]:
    """Inputs and responses of so many cases: each of both alone, then random pairs."""
    responses = list(RESPONSES[LIKELIHOODS[likelihood].kind])
    found = [(kind, "plain") for kind in INPUTS]
    found += [("plain", kind) for kind in responses[1:]]
    while len(found) < each:
        found.append((str(rng.choice(list(INPUTS))), str(rng.choice(responses))))
    return found[:each]


def simulated(rng, likelihood, size, inputs, responses):
    """Inputs and responses."""
    N, _, D = SIZES[size]
    X = rng.normal(size=(N, D))
    f = np.sin(2.0 * X[:, 0]) + 0.5 * X[:, -1]
    y = RESPONSES[LIKELIHOODS[likelihood].kind][responses](rng, f)
    if LIKELIHOODS[likelihood].functions == 3 and responses == "plain":
        y = y + (X[:, -1] > 0.5)
    if LIKELIHOODS[likelihood].kind in ("classes", "counts"):
        y = np.asarray(y, int)
    return INPUTS[inputs](rng, X), y


def dense_log_evidence(kernel, given, X, y):
    """
    Exact log evidence of regression, by NumPy in float64, and the size of what it is a sum
    of; minus infinity where NumPy finds no factor.

    :param given: hyperparameters by name, ``noise`` among them.
    """
    X, y = np.asarray(X, float), np.asarray(y, float)
    given = {name: np.asarray(value, float) for name, value in given.items()}
    K = KERNELS[kernel].dense(given, X, X)
    L = np.linalg.cholesky(K + given["noise"] ** 2 * np.eye(len(X)))
    away = np.linalg.solve(L, y)
    log_det = 2 * np.log(np.diag(L))
    terms = away @ away, np.abs(log_det).sum(), len(X) * np.log(2 * np.pi)
    found = -0.5 * (terms[0] + log_det.sum() + terms[2])
    # Of a bound, variances that inducing points leave and residuals are over the noise.
    return found, sum(terms) + (y @ y + np.trace(K)) / given["noise"] ** 2

"""
Bounds are bounds: random Gaussian models under every approximation and relaxation.

    python -m campaigns.bounds                   # 10,000 models in float64, some minutes
    python -m campaigns.bounds --precision float32

A block is an approximation and a size of the problem; its models have random inputs,
responses, kernel hyperparameters, noise, inducing points and q(u). No bound may be above
the exact log evidence, which NumPy computes densely in float64, by more than rounding:
`EPS` of the sum of the sizes of its terms. Beside each the best bound of the block is kept,
with q(u) moved by natural gradients where the family takes them: how near it came.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_sgp as sgp
from campaigns._table import Found, Table

#: Rounding that is allowed, of the size of the evidence's terms.
EPS = {"float32": 2e-4, "float64": 1e-9}
#: Rows, inducing points (of each set), columns.
SIZES = {"small": (6, 3, 1), "wide": (20, 4, 3), "many": (40, 12, 2)}
#: Models of a block.
EACH = 140


def one_set(make, **options):
    """An approximation at given points."""
    return lambda Z, O: make(inducing=Z, **options)


def two_sets(make, **options):
    """The same with orthogonal points."""
    return lambda Z, O: make(inducing=Z, orthogonal=(O,), **options)


FAMILIES = {
    "SVGP": one_set(sgp.SVGP),
    "SVGP unwhitened": one_set(sgp.SVGP, whiten=False),
    "SVGP diagonal": one_set(sgp.SVGP, covariance="diagonal"),
    "SVGP coupled": one_set(sgp.SVGP, covariance="coupled"),
    "SVGP pseudo-data": one_set(sgp.SVGP, covariance="pseudo_data"),
    "SVGP tight diagonal": one_set(sgp.SVGP, tight="diagonal"),
    "SVGP tight block": one_set(sgp.SVGP, tight=sgp.relaxation.Blocks(3)),
    "SVGP tight scalar": one_set(sgp.SVGP, tight="scalar"),
    "VGP": lambda Z, O: sgp.VGP(),
    "VGP pseudo-data": lambda Z, O: sgp.VGP(covariance="pseudo_data"),
    "SOLVE-GP": two_sets(sgp.SOLVEGP),
    "SOLVE-GP unwhitened": two_sets(sgp.SOLVEGP, whiten=False),
    "SOLVE-GP tight diagonal": two_sets(sgp.SOLVEGP, tight="diagonal"),
    "SOLVE-GP tight block": two_sets(sgp.SOLVEGP, tight=sgp.relaxation.Blocks(3)),
    "ODVGP": two_sets(sgp.ODVGP),
    "ODVGP tight diagonal": two_sets(sgp.ODVGP, tight="diagonal"),
    "mixture of two": one_set(sgp.MixtureSVGP),
    "mixture of three, full": one_set(sgp.MixtureSVGP, num_components=3, covariance="full"),
    "inverse-free relaxed": one_set(sgp.InverseFreeSVGP, tol=1e-8),
    "inverse-free lc": one_set(sgp.InverseFreeSVGP, bound="lc"),
}
#: Whose q(u) is not moved by natural gradients here.
OTHERS = "diagonal", "pseudo", "mixture", "inverse", "ODVGP", "scalar"
#: Where they are moved all the same.
TIGHT = ("SVGP tight diagonal",)


def model(X, y=None):
    """Regression with hyperparameters that are given."""
    kernel = sgp.kernels.RBF(numpyro.param("variance", 1.0), numpyro.param("length", 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, numpyro.param("noise", 1.0)), obs=y)


def simulated(rng, size):
    """A problem: rows, responses, variance, lengthscale and noise, over wide ranges."""
    N, M, D = SIZES[size]
    X = rng.uniform(-2.0, 2.0, (N, D))
    if rng.uniform() < 0.2:  # rows twice
        X[N // 2 : N // 2 + 2] = X[:2]
    variance, noise = 10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-1.3, 0.5)
    y = 10 ** rng.uniform(-1, 1) * np.sin(2 * X).sum(-1) + noise * rng.normal(size=N)
    return X, y, variance, 10 ** rng.uniform(-0.7, 1), noise


def log_evidence(X, y, variance, length, noise):
    """Exact, and the size of what it is a sum of."""
    X, y = np.asarray(X, float), np.asarray(y, float)
    distance = ((X[:, None] - X) / length) ** 2
    K = variance * np.exp(-0.5 * distance.sum(-1)) + noise**2 * np.eye(len(X))
    L = np.linalg.cholesky(K)
    away = np.linalg.solve(L, y)
    log_det = 2 * np.log(np.diag(L))
    terms = away @ away, np.abs(log_det).sum(), len(X) * np.log(2 * np.pi)
    found = -0.5 * (terms[0] + log_det.sum() + terms[2])
    # Of a bound, variances that inducing points leave and residuals are over the noise.
    return found, sum(terms) + (y @ y + len(X) * variance) / noise**2


class Case:
    """
    An approximation at one size, compiled once, and models of it.

    :param rng: a NumPy generator.
    :param steps: natural steps to the best q(u).
    """

    def __init__(self, family, size, precision, rng, steps=4):
        N, M, D = SIZES[size]
        self.rng, self.size, self.dtype = rng, size, jnp.dtype(precision)
        self.steps = steps
        self.points = [jnp.asarray(rng.uniform(-2, 2, (M, D)), self.dtype) for _ in "ZO"]
        X, y, *_ = (jnp.asarray(a, self.dtype) for a in simulated(rng, size))
        self.X = X
        self.guide = sgp.AutoSparseGP(model, FAMILIES[family](*self.points))
        loss = sgp.TraceGP_ELBO(sgp.GaussHermite(3))
        #: Whether q(u) is moved by natural steps.
        self.natural = not any(word in family for word in OTHERS) or family in TIGHT
        optimiser = optax.adam(0.01)
        if self.natural:
            optimiser = sgp.natural_gradients(self.guide, 1.0, optax.sgd(0.0))
        self.svi = SVI(model, self.guide, optimiser, loss)
        state = self.svi.init(jax.random.key(0), X, y)
        self.start = self.svi.optim.get_params(state.optim_state)
        self.first, self.best = jax.jit(self._first), jax.jit(self._best)

    @classmethod
    def of(cls, block, family, size, precision, **options):
        """That of a block, whose name its random numbers are by."""
        rng = np.random.default_rng(sum(map(ord, block)))
        return cls(family, size, precision, rng, **options)

    def drawn(self, same_inputs=False):
        """Data, parameters, those of the kernel and the noise, and the log evidence."""
        X, y, variance, length, noise = simulated(self.rng, self.size)
        X, y = (jnp.asarray(a, self.dtype) for a in (self.X if same_inputs else X, y))
        free = {
            name: value + jnp.asarray(0.5 * self.rng.normal(size=value.shape), value.dtype)
            for name, value in self.start.items()
        }
        for name, value in self.start.items():
            if name.endswith("precision"):
                free[name] = value + jnp.abs(free[name] - value)
        given = {"variance": variance, "length": length, "noise": noise}
        free |= {name: jnp.asarray(value, self.dtype) for name, value in given.items()}
        given = [float(free[name]) for name in given]
        return X, y, free, given, log_evidence(X, y, *given)

    def _first(self, free, X, y):
        """The bound at some parameters."""
        return -self.svi.evaluate(self._state(free, X, y), X, y)

    def _best(self, free, X, y):
        """The bound after some natural steps."""

        def step(state, _):
            return self.svi.update(state, X, y)

        state = self._state(free, X, y)
        return -jax.lax.scan(step, state, None, length=self.steps)[1][-1]

    def _state(self, free, X, y):
        state = self.svi.init(jax.random.key(0), X, y)
        return state._replace(optim_state=self.svi.optim.init(free))


def look(block, precision, each=EACH):
    """Models of a block, named ``approximation, size``."""
    case = Case.of(block, *block.rsplit(", ", 1), precision)
    failed, gaps = [], []
    for number in range(each):
        X, y, free, _, (exact, terms) = case.drawn()
        found = {"random": float(case.first(free, X, y))}
        if case.natural:
            found["best"] = float(case.best(free, X, y))
            gaps.append(exact - found["best"])
        for what, value in found.items():
            if not value <= exact + EPS[precision] * terms:
                failed.append(
                    f"{number}: {what} q(u) has {value:.9g} where the evidence is "
                    f"{exact:.9g} (terms of {terms:.3g})"
                )
    numbers = {"nearest": float(np.min(gaps))} if gaps else {}
    return Found(each * (1 + case.natural), failed, numbers)


def blocks():
    """Their names."""
    return [f"{family}, {size}" for size in SIZES for family in FAMILIES]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=EPS, default="float64")
    precision = parser.parse_args().precision
    jax.config.update("jax_enable_x64", precision == "float64")
    table = Table(f"bounds_{precision}")
    table.run(blocks(), partial(look, precision=precision))
    print(f"{table.cases} bounds, {len(table.failed)} above the evidence")


if __name__ == "__main__":
    main()

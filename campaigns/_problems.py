"""
Models of which the truth can be drawn, and posteriors of their latents that owe nothing to
the package: in closed form, by importance weights, on a grid of hyperparameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from arviz_stats.base import array_stats
from scipy.special import expit, gammaln

import numpyro_sgp as sgp

N, GROUPS = 20, 4
X = np.sort(np.random.default_rng(0).uniform(0.0, 4.0, N))[:, None]
GROUP = np.arange(N) % GROUPS
LENGTH, NOISE = 0.7, 0.5
#: Prior variance of f.
VARIANCES = {"conjugate": 1.0, "counts": 1.0, "classes": 4.0}
#: Medians and standard deviations of the logs of hyperparameters.
LOG_SDS = {"length": (0.7, 0.4), "variance": (1.0, 0.5)}
#: Draws of importance weights, and their degrees of freedom.
DRAWS, FREEDOM = 20_000, 10
#: Settings of a hyperparameter on the grid, and how many sds it reaches.
GRID, REACH = 30, 4.0


class Reference(NamedTuple):
    """
    The posterior at hand.

    :param mean: of f(X), ``(N,)``.
    :param sd: of f(X).
    :param probabilities: that a quantity is below its truth, by name.
    """

    mean: np.ndarray
    sd: np.ndarray
    probabilities: dict[str, float]


class Problem(NamedTuple):
    """
    A model and its truths.

    :param model: for NumPyro, of ``args`` and y.
    :param args: its arguments but for y.
    :param simulate: from a generator to latents by name and y.
    :param reference: from y and latents to :class:`Reference`.
    """

    model: Callable
    args: tuple
    simulate: Callable[[Any], tuple[dict, np.ndarray]]
    reference: Callable[[np.ndarray, dict], Reference]


def quantities(latents: dict) -> dict:
    """What is ranked: rows of f, sums, and all other numbers, along leading axes."""
    f = latents["f"]
    found = {f"f[{n}]": f[..., n] for n in (0, N // 2, N - 1)}
    found |= {"sum of f": f.sum(-1), "half less half": (f[..., ::2] - f[..., 1::2]).sum(-1)}
    if "effect" in latents:
        found |= {"effect[0]": latents["effect"][..., 0]}
    return found | {name: latents[name] for name in LOG_SDS if name in latents}


def covariance(variance, length):
    """Of f(X) under a Matern 3/2 kernel."""
    r = np.sqrt(3.0) * np.abs(X - X.T) / length
    return variance * (1.0 + r) * np.exp(-r)


# ---- counts, classes and responses, given hyperparameters ---------------------------


def _likelihood(name, f):
    if name == "conjugate":
        return dist.Normal(f, NOISE)
    return dist.Poisson(jnp.exp(f)) if name == "counts" else dist.Bernoulli(logits=f)


def _model_of(name):
    def model(X, y=None):
        """A function and its observations."""
        f = numpyro.sample(
            "f", sgp.GaussianProcess(sgp.kernels.Matern32(VARIANCES[name], LENGTH), X)
        )
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", _likelihood(name, f), obs=y)

    return model


def _simulated(name, rng):
    f = np.linalg.cholesky(covariance(VARIANCES[name], LENGTH)) @ rng.normal(size=N)
    if name == "conjugate":
        return {"f": f}, f + NOISE * rng.normal(size=N)
    y = rng.poisson(np.exp(f)) if name == "counts" else rng.binomial(1, expit(f))
    return {"f": f}, y.astype(float)


def _log_likelihood(name, f, y):
    """Of draws of f ``(S, N)``; its slopes and curvatures of each row too."""
    if name == "conjugate":
        away = (y - f) / NOISE
        terms = -0.5 * away**2 - np.log(NOISE) - 0.5 * np.log(2 * np.pi)
        return terms.sum(-1), away / NOISE, np.full(f.shape, NOISE**-2)
    if name == "counts":
        rate = np.exp(f)
        return (y * f - rate - gammaln(y + 1)).sum(-1), y - rate, rate
    p = expit(f)
    return (y * f - np.logaddexp(0.0, f)).sum(-1), y - p, p * (1 - p)


def _mode(name, y, K):
    """Newton's steps to the posterior's mode, halved where they do not climb."""
    inverse = np.linalg.inv(K)

    def value(f):
        return _log_likelihood(name, f, y)[0] - 0.5 * f @ inverse @ f

    f = np.zeros(N)
    for _ in range(50):
        _, slope, curvature = _log_likelihood(name, f, y)
        step = np.linalg.solve(inverse + np.diag(curvature), slope - inverse @ f)
        while value(f + step) < value(f) and np.abs(step).max() > 1e-10:
            step = 0.5 * step
        f = f + step
    return f, inverse + np.diag(_log_likelihood(name, f, y)[2])


def weighed(name, y, rng):
    """Draws of f(X) from Student's t about the mode, and Pareto-smoothed weights."""
    K = covariance(VARIANCES[name], LENGTH)
    mode, precision = _mode(name, y, K)
    L = np.linalg.cholesky(np.linalg.inv(precision))
    scale = np.sqrt(FREEDOM / rng.chisquare(FREEDOM, (DRAWS, 1)))
    z = scale * rng.normal(size=(DRAWS, N))
    f = mode + z @ L.T
    prior = -0.5 * np.sum(f * np.linalg.solve(K, f.T).T, axis=-1)
    proposal = -0.5 * (FREEDOM + N) * np.log1p(np.sum(z**2, axis=-1) / FREEDOM)
    log_weights = _log_likelihood(name, f, y)[0] + prior - proposal
    log_weights, khat = array_stats.psislw(-log_weights)
    weights = np.exp(log_weights - log_weights.max())
    return f, weights / weights.sum(), float(khat)


def _by_weights(name):
    def reference(y, truth):
        f, weights, khat = weighed(name, y, np.random.default_rng(int(1e6 * abs(y.sum()))))
        if not khat < 0.5:
            raise ArithmeticError(f"the reference has a k-hat of {khat:.2f}")
        mean = weights @ f
        sd = np.sqrt(weights @ (f - mean) ** 2)
        at, below = quantities(truth), quantities({"f": f})
        shares = {k: float(weights @ (below[k] < at[k])) for k in at}
        return Reference(mean, sd, shares)

    return reference


def _in_closed_form(y, truth):
    K = covariance(VARIANCES["conjugate"], LENGTH)
    gain = np.linalg.solve(K + NOISE**2 * np.eye(N), K).T
    mean, cov = gain @ y, K - gain @ K
    return Reference(mean, np.sqrt(np.diag(cov)), _gaussian(mean, cov, truth))


def _gaussian(mean, cov, truth):
    """Probabilities of linear quantities below their truths."""
    from scipy.stats import norm

    weights = quantities({"f": np.eye(N)})
    return {
        name: float(norm.cdf((at - w @ mean) / np.sqrt(w @ cov @ w)))
        for (name, at), w in zip(quantities(truth).items(), weights.values(), strict=True)
    }


# ---- groups, with hyperparameters ----------------------------------------------------


def _hierarchical(X, group, y=None):
    """A function with unknown scales, effects of groups, and noise."""
    values = {
        name: numpyro.sample(name, dist.LogNormal(np.log(median), sd))
        for name, (median, sd) in LOG_SDS.items()
    }
    kernel = sgp.kernels.Matern32(values["variance"], values["length"])
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + effect[group], NOISE), obs=y)


def _simulated_groups(rng):
    values = {
        name: median * np.exp(sd * rng.normal()) for name, (median, sd) in LOG_SDS.items()
    }
    K = covariance(values["variance"], values["length"])
    f, effect = np.linalg.cholesky(K) @ rng.normal(size=N), rng.normal(size=GROUPS)
    y = f + effect[GROUP] + NOISE * rng.normal(size=N)
    return {**values, "f": f, "effect": effect}, y


class _Grid:
    """Gaussian posteriors of (f, effects) at each setting of the hyperparameters."""

    def __init__(self):
        t = np.linspace(-REACH, REACH, GRID)
        settings = np.stack(np.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2)
        self.settings = {
            name: median * np.exp(sd * settings[:, i])
            for i, (name, (median, sd)) in enumerate(LOG_SDS.items())
        }
        self.log_prior = -0.5 * np.sum(settings**2, axis=-1)
        A = np.concatenate([np.eye(N), np.eye(GROUPS)[GROUP]], axis=1)
        self.gains, self.covariances, self.roots, self.log_dets = [], [], [], []
        for length, variance in zip(*self.settings.values(), strict=True):
            prior = np.eye(N + GROUPS)
            prior[:N, :N] = covariance(variance, length)
            L = np.linalg.cholesky(A @ prior @ A.T + NOISE**2 * np.eye(N))
            half = np.linalg.solve(L, A @ prior)
            self.roots.append(np.linalg.inv(L))
            self.gains.append(half.T @ self.roots[-1])
            self.covariances.append(prior - half.T @ half)
            self.log_dets.append(np.log(np.diag(L)).sum())

    def __call__(self, y, truth):
        from scipy.stats import norm

        away = np.asarray(self.roots) @ y
        weights = self.log_prior - 0.5 * np.sum(away**2, -1) - np.asarray(self.log_dets)
        weights = np.exp(weights - weights.max())
        weights /= weights.sum()
        means, covs = np.asarray(self.gains) @ y, np.asarray(self.covariances)
        mean = weights @ means
        second = weights @ (np.diagonal(covs, axis1=1, axis2=2) + means**2)
        eye = np.eye(N + GROUPS)
        linear = quantities({"f": eye[:, :N], "effect": eye[:, N:]})
        shares = {}
        for name, at in quantities(truth).items():
            if name in linear:
                w = linear[name]
                sds = np.sqrt(np.einsum("i,kij,j->k", w, covs, w))
                shares[name] = float(weights @ norm.cdf((at - means @ w) / sds))
            else:  # mass of a setting spreads to half-way to its neighbours
                order, each = np.unique(self.settings[name], return_inverse=True)
                mass = np.bincount(each, weights)
                step = np.log(order[1] / order[0])
                edges = np.log(order[0]) + step * (np.arange(GRID + 1) - 0.5)
                total = np.concatenate([[0.0], np.cumsum(mass)])
                shares[name] = float(np.interp(np.log(at), edges, total))
        sd = np.sqrt(second - mean**2)
        return Reference(mean[:N], sd[:N], shares)


def problem(name: str) -> Problem:
    """One of the four."""
    if name == "hierarchical":
        return Problem(_hierarchical, (X, GROUP), _simulated_groups, _Grid())
    by = _in_closed_form if name == "conjugate" else _by_weights(name)
    return Problem(_model_of(name), (X,), lambda rng: _simulated(name, rng), by)


#: Their names.
MODELS = (*VARIANCES, "hierarchical")

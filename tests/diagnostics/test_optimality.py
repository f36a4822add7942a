"""Nats left for q(u): against plain NumPy where exact, and converged bounds elsewhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.svi import SVIRunResult
from scipy.linalg import block_diag

import numpyro_sgp as sgp
from examples.low_rank import LowRank
from numpyro_sgp.diagnostics import compare, optimality, to_arviz
from numpyro_sgp.diagnostics.optimality import convergence_attrs, loss_drop, nats_left
from tests.helpers import optimal_whitened_q, rbf

N, M, NOISE, JITTER = 30, 4, 0.3, 1e-8
rng = np.random.default_rng(0)
X = np.sort(rng.uniform(-2, 2, size=(N, 1)), axis=0)
y = np.sin(2 * X[:, 0]) + NOISE * rng.normal(size=N)
Z = np.linspace(-2.0, 2.0, M)[:, None]
O = np.array([-1.1, 0.2, 1.3])[:, None]
OPTIONS = {"inducing": Z, "train_inducing": False}


def model(X, y=None, functions="one"):
    """Regression on one function, on the sum of two of a site, or of two sites."""
    prior = sgp.GaussianProcess(sgp.kernels.RBF(), X)
    if functions == "one":
        f = numpyro.sample("f", prior)
    elif functions == "site":
        f = numpyro.sample("f", prior.expand([2])).sum(0)
    else:
        rough = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X)
        f = numpyro.sample("f", prior) + numpyro.sample("g", rough)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def dense(points, lengthscale=1.0):
    """Factor of the inducing covariance, and the projection onto X."""
    K = rbf(points, points, 1.0, lengthscale) + JITTER * np.eye(len(points))
    L = np.linalg.cholesky(K)
    return L, np.linalg.solve(L, rbf(points, X, 1.0, lengthscale))


def bound(A, prior_variance, mean, blocks):
    """The ELBO of whitened q(u) = N(mean, block_diag(blocks)) by its formula."""
    S = block_diag(*blocks)
    mu = A.T @ mean
    variance = prior_variance - np.sum(A**2, axis=0) + np.sum(A * (S @ A), axis=0)
    fit = -0.5 * np.sum(
        np.log(2 * np.pi * NOISE**2) + ((y - mu) ** 2 + variance) / NOISE**2
    )
    kl = 0.5 * (np.trace(S) + mean @ mean - len(mean) - np.linalg.slogdet(S)[1])
    return fit - kl


def random_params(guide, *args, **kwargs):
    """Some q(u), not the optimal one; the rest as it starts."""
    svi = SVI(guide.model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))
    rng = np.random.default_rng(1)
    for name, value in params.items():
        noise = rng.normal(size=value.shape)
        if name.endswith(("_mu", "_linear")):
            params[name] = jnp.asarray(0.5 * noise)
        elif name.endswith("_sqrt") and value.shape[-1:] == value.shape[-2:-1]:
            params[name] = value * 0.7 + 0.1 * jnp.tril(jnp.asarray(noise), -1)
        elif name.endswith("_sqrt"):
            params[name] = jnp.asarray(0.4 + 0.3 * noise**2)
        elif name.endswith("_precision") and value.ndim == 2:
            params[name] = jnp.asarray(noise @ noise.T)
        elif name.endswith("_precision"):
            params[name] = jnp.asarray(noise**2)
    return {name: np.asarray(value) for name, value in params.items()}


def whitened(case, params, L, A):
    """Mean and blocks of whitened q(u), from the parameters."""
    get = lambda name: params[f"f_auto_{name}"]  # noqa: E731
    if case == "sites":
        S = np.linalg.inv(np.eye(M) + A * get("qu_precision") @ A.T)
        return S @ A @ get("qu_linear"), [S]
    if case == "dual":
        S = np.linalg.inv(np.eye(M) + L.T @ get("qu_precision") @ L)
        return S @ L.T @ get("qu_linear"), [S]
    if case == "two functions":
        return get("qu_mu").ravel(), [P @ P.T for P in get("qu_sqrt")]
    if case == "coupled":
        return get("qu_mu").ravel(), [get("qu_sqrt") @ get("qu_sqrt").T]
    if case == "two sites":
        both = [params[f"{site}_auto_qu_sqrt"] for site in "fg"]
        mean = np.concatenate([get("qu_mu"), params["g_auto_qu_mu"]])
        return mean, [P @ P.T for P in both]
    if case == "SOLVE-GP":
        both = get("qu_sqrt"), get("qv_sqrt")
        return np.concatenate([get("qu_mu"), get("qv_mu")]), [P @ P.T for P in both]
    mean, P = get("qu_mu"), get("qu_sqrt")
    if case == "unwhitened":
        mean, P = np.linalg.solve(L, mean), np.linalg.solve(L, P)
    return mean, ([P @ P.T] if case != "diagonal" else [[[p**2]] for p in P])


CASES = {
    "unwhitened": sgp.SVGP(whiten=False, num_inducing=M, **OPTIONS),
    "diagonal": sgp.SVGP(M, covariance="diagonal", **OPTIONS),
    "sites": sgp.SVGP(M, covariance="pseudo_data", **OPTIONS),
    "dual": sgp.SVGP(M, covariance="dual", **OPTIONS),
    "SOLVE-GP": sgp.SOLVEGP(M, len(O), orthogonal=O, **OPTIONS),
    "two functions": sgp.SVGP(M, **OPTIONS),
    "coupled": sgp.SVGP(M, covariance="coupled", **OPTIONS),
    "two sites": sgp.SVGP(M, **OPTIONS),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
def test_for_a_gaussian_likelihood_they_are_what_the_bound_would_gain(case):
    functions = {"two functions": "site", "coupled": "site", "two sites": "sites"}
    functions = functions.get(case, "one")
    guide = sgp.AutoSparseGP(model, CASES[case])
    params = random_params(guide, X, y, functions=functions)
    L, A = dense(np.concatenate([Z, O]) if case == "SOLVE-GP" else Z)
    mean, blocks = whitened(case, params, L, A)
    if functions == "site":
        A = np.concatenate([A, A])
    if functions == "sites":
        A = np.concatenate([A, dense(Z, 0.5)[1]])
    prior_variance = 1.0 if functions == "one" else 2.0
    # The best mean, and for each block the inverse of its part of the precision.
    precision = np.eye(len(A)) + A @ A.T / NOISE**2
    best_mean = np.linalg.solve(precision, A @ y) / NOISE**2
    ends = np.cumsum([0, *map(len, blocks)])
    best = [
        np.linalg.inv(precision[a:b, a:b]) for a, b in zip(ends, ends[1:], strict=False)
    ]
    gain = bound(A, prior_variance, best_mean, best) - bound(
        A, prior_variance, mean, blocks
    )
    found = nats_left(guide, params, X, y, functions=functions)
    assert gain > 1.0
    assert_allclose(found, gain, rtol=1e-6)


def test_they_vanish_at_the_optimum():
    mu, S = optimal_whitened_q(X, y, Z, NOISE)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(M, **OPTIONS))
    guide.setup(X, y)
    params = {"f_auto_qu_mu": mu, "f_auto_qu_sqrt": np.linalg.cholesky(S)}
    assert abs(nats_left(guide, params, X, y)) < 1e-9


def other_model(X, y=None, likelihood="bernoulli"):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2.0, 0.7), X))
    with numpyro.plate("data", X.shape[0]):
        if likelihood == "bernoulli":
            fn = dist.Bernoulli(logits=f)
        else:
            fn = dist.Poisson(jnp.exp(f))
        numpyro.sample("y", fn, obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson"])
def test_for_other_likelihoods_they_are_close_to_what_the_bound_gains(likelihood):
    rng = np.random.default_rng(2)
    X = jnp.asarray(np.sort(rng.uniform(-2, 2, size=(100, 1)), axis=0))
    f = 1.5 * np.sin(2 * X[:, 0])
    y = rng.poisson(np.exp(f)) if likelihood == "poisson" else rng.uniform(size=100) < f
    y = jnp.asarray(1 * y)
    guide = sgp.AutoSparseGP(other_model, sgp.SVGP(8, train_inducing=False))
    loss = sgp.TraceGP_ELBO()
    optimiser = sgp.natural_gradients(guide, 0.1, optax.sgd(0.0))
    svi = SVI(other_model, guide, optimiser, loss, likelihood=likelihood)
    state = svi.init(jax.random.key(0), X, y)
    step = jax.jit(lambda state: svi.update(state, X, y))
    losses, looks = [], {}
    for i in range(200):
        if i in (2, 4, 9, 14):
            looks[i] = svi.get_params(state)
        state, value = step(state)
        losses.append(float(value))
    assert abs(losses[-1] - losses[-2]) < 1e-9
    gain = np.array([losses[i] - losses[-1] for i in looks])
    assert 0.05 < gain.min() < 0.5 and 2.0 < gain.max() < 50.0
    found = [nats_left(guide, p, X, y, likelihood=likelihood) for p in looks.values()]
    # The quadratic that one step minimises is not the bound itself.
    assert_allclose(found, gain, rtol=0.15)


def heteroscedastic(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(4.0, 1.0), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


@pytest.mark.slow
def test_short_training_is_told_and_long_is_not():
    rng = np.random.default_rng(0)
    X = jnp.asarray(np.sort(rng.uniform(0, 6, size=(133, 1)), axis=0))
    sd = np.exp(-1.5 + 1.2 * np.sin(X[:, 0]))
    y = jnp.asarray(3 * np.sin(1.5 * X[:, 0]) + sd * rng.normal(size=133))
    approximation = sgp.SVGP(12, train_inducing=False)
    fits, losses = {}, {}
    for name, steps in {"short": 200, "long": 150}.items():
        guide = sgp.AutoSparseGP(heteroscedastic, approximation)
        optimiser = optax.adam(0.01)
        if name == "long":
            optimiser = sgp.natural_gradients(guide, 0.1, optimiser)
        svi = SVI(heteroscedastic, guide, optimiser, sgp.TraceGP_ELBO())
        result = svi.run(jax.random.key(0), steps, X, y, progress_bar=False)
        losses[name] = float(result.losses[-1])
        fits[name] = to_arviz(svi, X, y, result=result, num_samples=50, khat=False)
    assert losses["short"] - losses["long"] > 100
    assert fits["short"].attrs["nats_left"] > 100
    assert 0 <= fits["long"].attrs["nats_left"] < 0.01
    comparison = compare(fits, reference="long")
    text = " ".join(comparison.remarks)
    assert "short: about" in text and "nats are left for q(u): not converged" in text
    assert "short: the mean loss still fell by" in text
    assert not any("converged" in r for r in comparison.remarks if r.startswith("long"))


def test_fall_of_the_loss_is_that_of_the_last_tenths():
    losses = np.concatenate([np.full(80, 9.0), [3, 5] * 5, [1, 2] * 5])
    # Standard error: each tenth has ten values, with variances 10/9 and 2.5/9.
    assert_allclose(loss_drop(losses), (2.5, np.sqrt((10 + 2.5) / 9 / 10)))
    # By quarters and means of five: 9, 9, 9, 9, 9 and 9, 4.2, 3.8, 1.4, 1.6.
    drop, se = loss_drop(losses, 0.25, 5)
    assert_allclose(drop, 9.0 - np.mean([9, 4.2, 3.8, 1.4, 1.6]))
    assert_allclose(se, np.std([9, 4.2, 3.8, 1.4, 1.6], ddof=1) / np.sqrt(5))
    assert np.isnan(loss_drop(losses, 0.1, 6)).all()
    assert np.isnan(loss_drop(losses[:39])).all()
    assert np.isnan(loss_drop([*losses[:-1], np.nan])).all()


def draws_scale(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@pytest.mark.slow
def test_random_bounds_have_about_the_nats_of_their_average():
    # At a guide that draws the variance, whose draws are all but equal, with q(u) moved
    # from the optimum for it by one standard deviation along each axis: M / 2 nats.
    mu, S = optimal_whitened_q(X, y, Z, NOISE)
    P = np.linalg.cholesky(S)
    guide = sgp.AutoSparseGP(draws_scale, sgp.SVGP(M, **OPTIONS), AutoNormal)
    guide.setup(X, y)
    params = {"f_auto_qu_mu": mu + P @ np.ones(M), "f_auto_qu_sqrt": P}
    for scale, tolerance in ((1e-6, 1e-3), (0.05, 0.3)):
        auto = {"variance_auto_loc": 0.0, "variance_auto_scale": scale}
        found = nats_left(guide, {**params, **auto}, X, y)
        assert_allclose(found, M / 2, rtol=tolerance)


@pytest.mark.slow
def test_what_is_not_known_is_nan_with_the_reason():
    def attrs(model, approximation, X, y, params=None, **options):
        guide = sgp.AutoSparseGP(model, approximation)
        svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO(**options))
        params = svi.get_params(svi.init(jax.random.key(0), X, y))
        return convergence_attrs(svi, SVIRunResult(params, None, None), (X, y), {})

    def deep(X, y=None):
        inner = numpyro.sample("inner", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        model(inner[:, None], y)

    def scaled(X, y=None):
        with numpyro.handlers.scale(scale=0.1):
            model(X, y)

    for program, approximation, reason in (
        (model, sgp.ODVGP(3, 3), r"'f' is no Gaussian .*ODVGP"),
        (model, sgp.MixtureSVGP(3, 2), "MixtureSVGP"),
        (model, sgp.InverseFreeSVGP(3), "InverseFreeSVGP"),
        (model, sgp.SVGP(3, covariance=LowRank(2)), "'f' is no Gaussian"),
        (deep, sgp.SVGP(3), r"\['inner'\] feed others"),
        (scaled, sgp.SVGP(3), "scaled"),
    ):
        found = attrs(program, approximation, X, y)
        assert np.isnan(found["nats_left"])
        assert re.search(reason, found["nats_left_unknown"])


def test_many_rows_are_left_out_of_reports_only(monkeypatch):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(M, **OPTIONS))
    params = random_params(guide, X, y)
    monkeypatch.setattr(optimality, "MAX_ROWS", N - 1)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    found = convergence_attrs(svi, SVIRunResult(params, None, None), (X, y), {})
    assert np.isnan(found["nats_left"])
    assert "30 rows, more than 29" in found["nats_left_unknown"]


def test_errors():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(M, **OPTIONS))
    guide.setup(X, y)
    with pytest.raises(TypeError, match="needs an AutoSparseGP .* got AutoNormal"):
        nats_left(AutoNormal(model), {}, X, y)
    with pytest.raises(ValueError, match=r"params lack \['f_auto_qu_mu'"):
        nats_left(guide, {"other": 1.0}, X, y)

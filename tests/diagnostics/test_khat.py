"""k-hat of guides: NumPyro's against dense weights by hand, and in reports."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import SVI, psis_diagnostic
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.importance import _psis_khat
from numpyro.infer.svi import SVIRunResult
from scipy import stats
from scipy.stats import multivariate_normal

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import khat
from numpyro_sgp.diagnostics.khat import (
    good_k,
    guide_khat,
    too_many_rows,
    weigh,
)
from numpyro_sgp.fitting.check import family
from numpyro_sgp.guides.point_latents import point_latents
from tests.helpers import optimal_whitened_q, slow

N, NOISE, DRAWS, JITTER = 8, 0.4, 200, 1e-8
X = jnp.linspace(-3.0, 3.0, N)[:, None]
y = jnp.asarray(np.sin(2 * X[:, 0]) + 0.2 * np.random.default_rng(0).normal(size=N))


def model(X, y=None, latents=None):
    """Regression on the sum of some functions, with a prior on the lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    process = sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X)
    if latents == "expand":
        process = process.expand([2])
    if latents == "plate":
        with numpyro.plate("latents", 2):
            f = numpyro.sample("f", process)
    else:
        f = numpyro.sample("f", process)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.reshape(-1, X.shape[0]).sum(0), NOISE), obs=y)


def fixed_model(X, y=None):
    """The same with one function of lengthscale 1."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def start(model, guide, *args, **kwargs):
    """An SVI at its first parameters, q(u) moved from the prior."""
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    state = svi.init(jax.random.key(0), *args, **kwargs)
    params = svi.get_params(state)
    for name, value in params.items():
        if name.endswith("qu_mu"):
            params[name] = value + 0.5 * jnp.cos(jnp.arange(value.size)).reshape(
                value.shape
            )
        elif name.endswith("qu_sqrt"):
            params[name] = 0.8 * value
    return svi, SVIRunResult(params, state, np.array([2.0, 1.0]))


@pytest.mark.parametrize(
    ("approximation", "base_guide", "latents"),
    [
        pytest.param(sgp.SOLVEGP(4, 3), AutoNormal, "expand", marks=pytest.mark.slow),
        slow(sgp.SVGP(5), AutoDelta, "plate"),
    ],
)
def test_psis_diagnostic_has_the_weights_of_dense_densities(
    approximation, base_guide, latents
):
    guide = sgp.AutoSparseGP(model, approximation, base_guide)
    _, (params, *_) = start(model, guide, X, y, latents=latents)
    rng_key = jax.random.key(1)
    found = psis_diagnostic(
        rng_key, params, model, guide, X, y, num_particles=DRAWS, latents=latents
    )

    def draw(key):
        seeded = handlers.seed(guide, jax.random.split(key)[1])  # as psis_diagnostic does
        with handlers.block(), handlers.substitute(data=params):
            return seeded(X, y, latents=latents)

    values = jax.vmap(draw)(jax.random.split(rng_key, DRAWS))
    f = np.asarray(values["f"]).reshape(DRAWS, -1, N)
    log_weights = np.zeros(DRAWS)
    difference = np.asarray(X) - np.asarray(X).T
    for i, lengthscale in enumerate(np.asarray(values["lengthscale"])):
        K = np.exp(-0.5 * (difference / lengthscale) ** 2) + JITTER * np.eye(N)
        log_p = multivariate_normal(np.zeros(N), K).logpdf(f[i]).sum()
        log_p += stats.norm.logpdf(y, f[i].sum(axis=0), NOISE).sum()
        log_p += stats.lognorm(0.3).logpdf(lengthscale)
        mean, covariance = dense_q(params, lengthscale)
        log_q = 0.0
        for latent in range(f.shape[1]):
            log_q += multivariate_normal(mean[latent], covariance[latent]).logpdf(
                f[i, latent]
            )
        if base_guide is AutoNormal:
            loc, scale = (
                float(params["lengthscale_auto_" + name]) for name in ("loc", "scale")
            )
            log_q += stats.lognorm(scale, scale=np.exp(loc)).logpdf(lengthscale)
        log_weights[i] = log_p - log_q
    assert log_weights.std() > 0.1
    assert_allclose(found, _psis_khat(log_weights), rtol=1e-5)


def dense_q(params, lengthscale):
    """Means and covariances of q(f(X)), by inverses, of each latent function."""

    def kernel(A, B):
        return np.exp(-0.5 * ((A - B.T) / lengthscale) ** 2)

    names = [("Z", "qu"), ("O", "qv")]
    names = [pair for pair in names if f"f_auto_{pair[0]}" in params]
    Z = [np.asarray(params[f"f_auto_{n}"]) for n, _ in names]
    Z = np.concatenate([z.reshape(-1, *z.shape[-2:])[0] for z in Z])
    M = len(Z)
    L = np.linalg.cholesky(kernel(Z, Z) + JITTER * np.eye(M))
    A = np.linalg.solve(L, kernel(Z, np.asarray(X)))
    mu = [np.asarray(params[f"f_auto_{n}_mu"]) for _, n in names]
    sqrt = [np.asarray(params[f"f_auto_{n}_sqrt"]) for _, n in names]
    means, covariances = [], []
    for latent in range(mu[0].size // mu[0].shape[-1]):
        m = np.concatenate([v.reshape(-1, v.shape[-1])[latent] for v in mu])
        S, at = np.zeros((M, M)), 0
        for factors in sqrt:
            P = np.tril(factors.reshape(-1, *factors.shape[-2:])[latent])
            S[at : at + len(P), at : at + len(P)] = P @ P.T
            at += len(P)
        K = kernel(np.asarray(X), np.asarray(X)) + JITTER * np.eye(N)
        means.append(A.T @ m)
        covariances.append(K + A.T @ (S - np.eye(M)) @ A)
    return means, covariances


def conjugate_params(scale=1.0):
    """Parameters of the exact posterior, its factor times a number."""
    mu, S = optimal_whitened_q(np.asarray(X), np.asarray(y), np.asarray(X), NOISE, 1.0, 1.0)
    sqrt = scale * jnp.asarray(np.linalg.cholesky(S))
    return {"f_auto_qu_mu": jnp.asarray(mu), "f_auto_qu_sqrt": sqrt}


def exact_guide(X=X):
    guide = sgp.AutoSparseGP(fixed_model, sgp.SVGP(N, inducing=X, train_inducing=False))
    guide.setup(X, jnp.zeros(N, X.dtype))
    return guide


@pytest.mark.slow
def test_float32_tells_the_same():
    with jax.enable_x64(False):
        X32, y32 = X.astype(jnp.float32), y.astype(jnp.float32)
        guide = exact_guide(X32)
        for scale, expected in ((1.0, (-np.inf, 0.4)), (0.4, (0.7, np.inf))):
            params = {k: v.astype(jnp.float32) for k, v in conjugate_params(scale).items()}
            found = guide_khat(jax.random.key(0), params, fixed_model, guide, X32, y32)
            assert expected[0] < found < expected[1]


@pytest.mark.slow
def test_draws_with_a_covariance_each_go_in_chunks(monkeypatch):
    chunks = []

    def recording(fn, keys, chunk):
        chunks.append(chunk)
        return jnp.arange(len(keys), dtype=float), {}

    monkeypatch.setattr(khat, "mapped", recording)
    monkeypatch.setattr(khat, "_CHUNK_NUMBERS", 50 * khat._MATRICES * N**2)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5), AutoNormal)
    _, (params, *_) = start(model, guide, X, y)
    guide_khat(jax.random.key(0), params, model, guide, X, y)
    guide_khat(jax.random.key(0), conjugate_params(), fixed_model, exact_guide(), X, y)
    assert chunks == [50, 1000]


@pytest.mark.slow
def test_khat_is_about_that_of_numpyro():
    # Of the same kind of draws; ArviZ and NumPyro take other numbers of them for the tail.
    for scale in (0.6, 0.9):
        given = jax.random.key(3), conjugate_params(scale), fixed_model, exact_guide(), X, y
        assert_allclose(guide_khat(*given), psis_diagnostic(*given), atol=0.15)
    # Equal weights have no tail, where NumPyro's is that of their rounding.
    given = jax.random.key(3), conjugate_params(1.0), fixed_model, exact_guide(), X, y
    assert guide_khat(*given) == 0.0


def test_latents_at_points_have_no_khat():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5), AutoDelta)
    _, (params, *_) = start(model, guide, X, y)
    with pytest.warns(UserWarning, match=r"no k-hat.*\['lengthscale'\] at points"):
        found = guide_khat(jax.random.key(0), params, model, guide, X, y)
    assert np.isnan(found)


@pytest.mark.slow
def test_weights_see_the_kl_given_what_is_held_at_points():
    # q(u) moved by 0.3 standard deviations along each axis: KL = N 0.3^2 / 2. Its standard
    # error by 1000 draws is told; four of them: an error probability of 1e-4.
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=X, jitter=JITTER), AutoDelta)
    guide.setup(X, y)
    mu, S = optimal_whitened_q(np.asarray(X), np.asarray(y), np.asarray(X), NOISE)
    P = np.linalg.cholesky(S)
    moved = {"f_auto_qu_mu": mu + P @ np.full(N, 0.3), "f_auto_qu_sqrt": P}
    params = {**moved, "lengthscale_auto_loc": jnp.ones(()), "f_auto_Z": X}
    given = jax.random.key(1), params, model, guide, X, y
    found, gap, error, *_ = weigh(*given)
    assert 0.01 < error < 0.1
    assert abs(gap - N * 0.3**2 / 2) < 4.0 * error
    assert guide_khat(*given, given_points=True) == found < 0.7


def weighed_moments(scale, moved):
    """Of an exact q(f) whose standard deviations are scaled and whose means are moved."""
    params = conjugate_params(scale)
    mu, S = optimal_whitened_q(np.asarray(X), np.asarray(y), np.asarray(X), NOISE, 1.0, 1.0)
    K = np.exp(-0.5 * np.asarray(X - X.T) ** 2) + JITTER * np.eye(N)
    A = np.linalg.cholesky(K)
    sd = np.sqrt(np.diag(A @ S @ A.T))
    params["f_auto_qu_mu"] = jnp.asarray(mu + np.linalg.solve(A, moved * sd))
    found = weigh(jax.random.key(2), params, fixed_model, exact_guide(), X, y)
    return found


def test_weights_see_moments_that_are_off():
    # N rows, two moments each: four standard errors are an error probability of 1e-3.
    found = weighed_moments(0.8, 0.1)
    shift, shift_error, spread, spread_error = found.moments["f"]
    assert shift.shape == spread.shape == (N,)
    assert (shift_error < 0.1).all() and (spread_error < 0.1).all()
    assert_allclose(shift, -0.1, atol=4 * shift_error.max())
    assert_allclose(spread, np.log(0.8), atol=4 * spread_error.max())


def test_moments_of_an_exact_q_are_its_own():
    moments = weighed_moments(1.0, 0.0).moments
    assert max(np.abs(part).max() for part in moments["f"]) < 1e-3  # by jitter


@pytest.mark.parametrize(
    ("scale", "moved", "told"), [(1.0, 0.0, False), (0.75, 0.0, True), (1.0, 0.35, True)]
)
def test_check_says_that_moments_are_off_by_less_than_a_nat(scale, moved, told):
    found = weighed_moments(scale, moved)
    assert found.gap < 1.0 and found.khat < good_k(1000)
    cause = family(found, ())
    assert bool(cause.mend) is told
    off, right = "by them the mean of f is off by about", "are right within their errors"
    assert (off if told else right) in cause.told


def test_weights_that_one_draw_has_all_of_have_no_k_and_may_be_rounding():
    # PSIS fits a tail of zeros, to which any k belongs.
    found = khat.weighed(900.0 * np.random.default_rng(0).normal(size=1000))
    assert found.khat == np.inf and found.spread > 800.0
    assert "k-hat inf" in family(found, ()).told
    with jax.enable_x64(False):
        cause = family(found, ())
    assert np.isnan(cause.nats) and "may be rounding" in cause.told
    assert "enable_x64" in cause.mend


@pytest.mark.parametrize("k, shown", [(0.9, True), (2.0, False), (np.inf, False)])
def test_moments_of_a_few_draws_are_not_told(k, shown):
    """They were: sds of "1 to 3.8e+02 of theirs", by weights of which one draw had all."""
    found = weighed_moments(1.0, 0.35)._replace(khat=k)
    cause = family(found, ())
    assert ("by them the mean of f is off" in cause.told) is shown
    assert bool(cause.mend) is shown
    # And no error, which would be of the weights that were drawn.
    assert cause.number == f"≥{found.gap:.2g}"
    assert "±" in family(found._replace(khat=0.3), ()).number


@pytest.mark.parametrize(
    "log_weights",
    [
        np.full(1000, -3.0),
        np.resize(np.float32([1.0, 1.0 + 1e-6]), 1000),
        np.resize([0.0, -2.0], 1000),  # but the largest ones are the same
    ],
)
def test_weights_without_a_tail_have_a_k_of_zero(log_weights):
    """PSIS refuses them: "All tail values are the same"."""
    weights = np.asarray(log_weights, float)
    found = khat.weighed(weights, {"f": np.random.default_rng(0).normal(size=(1000, 2))})
    assert found.khat == 0.0
    gap = np.log(np.mean(np.exp(weights))) - np.mean(weights)
    assert_allclose(found.gap, gap, atol=1e-12)
    assert "unknown" not in family(found, ()).told


@pytest.mark.parametrize("sd", [0.1, 0.5])
def test_the_error_of_the_gap_is_its_spread_over_other_draws(sd):
    found = sd * np.random.default_rng(0).normal(size=(200, 400))
    gaps, errors = zip(*(khat.weighed(w)[1:3] for w in found), strict=True)
    # The sd of 200 numbers has a standard error of 5 %, of some more with heavy tails.
    assert_allclose(np.mean(errors), np.std(gaps), rtol=0.25)


def test_a_number_that_is_the_same_in_all_draws_has_no_moments_to_compare():
    rng = np.random.default_rng(0)
    values = np.stack([np.ones(100), rng.normal(size=100)], axis=1)
    found = khat.weighed(0.01 * rng.normal(size=100), {"f": values})
    spread = found.moments["f"].spread
    assert np.isnan(spread[0]) and 0.0 < abs(spread[1]) < 0.01  # weights are 1 % apart
    cause = family(found, ())
    assert not cause.mend and "right within their errors" in cause.told
    assert "float32" not in cause.told
    with jax.enable_x64(False):
        assert "and rounding to float32" in family(found, ()).told


def test_points_do_not_depend_on_the_random_key():
    def by_hand(X):
        loc = numpyro.param("loc", jnp.ones(2))
        with numpyro.plate("rows", len(X), subsample_size=1) as index:
            numpyro.sample("a", dist.Delta(loc[index]))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("c", dist.Delta(b + loc.sum()))

    assert point_latents(by_hand, {}, (X[:2],), {}) == {"a"}
    assert good_k(1000) == 1 - 1 / 3 and good_k(100_000) == 0.7


@pytest.mark.slow
def test_it_is_computed_unasked_where_it_is_cheap():
    def rows(number, model, guide):
        X = jnp.zeros((number, 1))
        return not too_many_rows({}, model, guide, X, jnp.zeros(number))

    points = sgp.AutoSparseGP(model, sgp.SVGP(2))
    draws = sgp.AutoSparseGP(model, sgp.SVGP(2), AutoNormal)
    fixed = sgp.AutoSparseGP(fixed_model, sgp.SVGP(2))
    for guide in (points, draws, fixed):
        guide.setup(X, y)
    assert rows(1000, model, points) and not rows(1001, model, points)
    assert rows(1000, fixed_model, fixed) and not rows(1001, fixed_model, fixed)
    assert rows(200, model, draws) and not rows(201, model, draws)
    with jax.enable_x64(False):
        assert not rows(201, fixed_model, fixed)

    def why(number, model, guide):
        X = jnp.zeros((number, 1))
        return too_many_rows({}, model, guide, X, jnp.zeros(number))

    assert why(201, model, draws)[1] is False  # each draw has a covariance of its own
    with jax.enable_x64(False):
        assert why(200, fixed_model, fixed) is None
        told, in_float64 = why(201, fixed_model, fixed)
        assert "201 rows, more than 200" in told and "in float32" in told and in_float64
        told, in_float64 = why(1001, fixed_model, fixed)
        assert "in float32" not in told and not in_float64


@pytest.mark.slow
def test_to_arviz_and_compare_report_it():
    guide = exact_guide()
    svi = SVI(fixed_model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    fits = {}
    for name, scale in (("exact", 1.0), ("narrow", 0.4)):
        result = SVIRunResult(conjugate_params(scale), None, np.array([2.0, 1.0]))
        fits[name] = sgp.to_arviz(svi, X, y, result=result, num_samples=50)
    off = sgp.to_arviz(svi, X, y, result=result, num_samples=50, khat=False)
    assert "khat" not in off.attrs
    comparison = sgp.compare({**fits, "off": off})
    assert_allclose(
        comparison.table["guide_khat"], [*(t.attrs["khat"] for t in fits.values()), np.nan]
    )
    # An exact guide and one that is too narrow.
    assert comparison.table.loc["exact", "guide_khat"] < 0.3
    assert comparison.table.loc["narrow", "guide_khat"] > 0.7
    text = str(comparison)
    assert "narrow: guide k-hat" in text and "exact: guide k-hat" not in text
    assert "is above 0.67" in comparison._repr_html_()
    assert "guide k-hat" not in str(sgp.compare({"exact": fits["exact"], "off": off}))


def test_guide_that_cannot_be_scored_is_nan_with_a_reason(monkeypatch):
    def no_density(self, value):
        raise NotImplementedError("a mixture without a density")

    monkeypatch.setattr(sgp.SparsePosterior, "_joint_log_prob", no_density)
    with pytest.warns(UserWarning, match="no k-hat.*NotImplementedError: a mixture"):
        found = guide_khat(
            jax.random.key(0), conjugate_params(), fixed_model, exact_guide(), X, y
        )
    assert np.isnan(found)


def test_errors():
    guide = exact_guide()
    svi = SVI(fixed_model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    result = SVIRunResult(conjugate_params(), None, np.array([2.0, 1.0]))
    with pytest.raises(TypeError, match="calibration must be what .* got dict"):
        sgp.to_arviz(
            svi, X, y, result=result, num_samples=2, khat=False, calibration={"a": 1}
        )

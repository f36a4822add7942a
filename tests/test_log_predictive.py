"""Log predictive densities of a guide against closed forms and quadrature by hand."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy.special import expit, logsumexp
from scipy.stats import binom, gamma, laplace, nbinom, norm, poisson, t

import numpyro_sgp as sgp
from tests.helpers import rbf, slow

X = jnp.array([-1.5, -0.4, 0.7, 1.6])[:, None]
Y = jnp.array([0.4, -0.9, 1.3, 0.2])
X_NEW = jnp.array([-2.1, -0.9, 0.0, 2.2])[:, None]
Y_NEW = np.array([0.1, -1.4, 0.8, 3.0])
Z = jnp.array([-1.0, 1.1])[:, None]
NOISE = 0.6
rng = np.random.default_rng(0)


def normal(X, y=None, mask=True):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", 4), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def two_latents(X, y=None):
    kernel = sgp.kernels.RBF(jnp.ones(2), jnp.array([1.0, 2.0]))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(f[0], jnp.exp(0.3 * f[1])), obs=y)


def params_of(*batch):
    noise = np.tril(rng.normal(size=(*batch, 2, 2)), -1)
    return {
        "f_auto_Z": Z,
        "f_auto_qu_mu": jnp.asarray(rng.normal(size=(*batch, 2))),
        "f_auto_qu_sqrt": jnp.asarray(0.5 * np.eye(2) + 0.2 * noise),
    }


def set_up(model, approximation):
    guide = sgp.AutoSparseGP(model, approximation)
    guide.setup(X, Y)
    return guide


@pytest.fixture(scope="module")
def single():
    """A guide with one Gaussian, its parameters and its posterior at the new inputs."""
    guide, params = set_up(normal, sgp.SVGP(inducing=Z)), params_of()
    return guide, params, guide.posterior(params, X_NEW)["f"]


def test_a_gaussian_likelihood_is_its_closed_form(single):
    guide, params, q = single
    got = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW)
    assert list(got) == ["y"] and got["y"].shape == (4,)
    expected = norm(q.mean, np.sqrt(q.variance + NOISE**2)).logpdf(Y_NEW)
    # A hundred nodes for a likelihood as wide as q.
    assert_allclose(got["y"], expected, rtol=1e-6)


def by_grid(log_prob, q, row):
    """Of one row, by the trapezoidal rule on a fine grid."""
    grid = np.linspace(-9.0, 9.0, 400_001)
    f = float(q.mean[row]) + float(np.sqrt(q.variance[row])) * grid
    return logsumexp(log_prob(f) + norm.logpdf(grid)) + np.log(grid[1] - grid[0])


NARROW = {
    "normal": (lambda f: dist.Normal(f, 0.02), Y_NEW, lambda y, f: norm(f, 0.02).logpdf(y)),
    "next to none": (
        lambda f: dist.Normal(f, 1e-3),
        Y_NEW,
        lambda y, f: norm(f, 1e-3).logpdf(y),
    ),
    "large counts": (
        lambda f: dist.Poisson(jnp.exp(f + 9.0)),
        np.array([9000, 2000, 20_000, 100_000]),
        lambda y, f: poisson(np.exp(f + 9.0)).logpmf(y),
    ),
    "heavy tails": (
        lambda f: dist.StudentT(4.0, f, 0.02),
        Y_NEW,
        lambda y, f: t(4.0, f, 0.02).logpdf(y),
    ),
    "kinks": (
        lambda f: dist.Laplace(f, 0.02),
        Y_NEW,
        lambda y, f: laplace(f, 0.02).logpdf(y),
    ),
    "two modes": (
        lambda f: dist.Normal(f**2, 0.5),
        np.abs(Y_NEW) + 0.5,
        lambda y, f: norm(f**2, 0.5).logpdf(y),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [slow(k) if k in ("heavy tails", "kinks") else k for k in NARROW]
)
def test_a_likelihood_may_be_narrower_than_nodes_are_apart(kind):
    """Nodes of 100 for N(0, 1) are 0.3 apart."""
    likelihood, y, log_prob = NARROW[kind]

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", 4):
            numpyro.sample("y", likelihood(f), obs=y)

    guide, params = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z)), params_of()
    guide.setup(X, jnp.asarray(y))
    q = guide.posterior(params, X_NEW)["f"]
    expected = [by_grid(partial(log_prob, y[i]), q, i) for i in range(4)]
    got = sgp.log_predictive_density(guide, params, X_NEW, jnp.asarray(y))["y"]
    exact = kind in ("normal", "next to none")
    assert_allclose(got, expected, atol=1e-6 if exact else 0.02)


def of_the_sum(f):
    return dist.Normal(f[0] + f[1], 0.01)


def of_each(f):
    return dist.Normal(f.T, 0.05).to_event(1)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("likelihood", "number"), [(of_the_sum, 2), (of_each, 5)])
def test_several_functions_have_their_closed_form(likelihood, number):
    """On a grid for two functions, and by draws for five, which find little of them."""

    def model(X, y=None):
        process = sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([number])
        f = numpyro.sample("f", process)
        with numpyro.plate("data", 4):
            numpyro.sample("y", likelihood(f), obs=y)

    y = np.stack([Y_NEW] * 5, axis=1) if likelihood is of_each else Y_NEW
    guide, params = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z)), params_of(number)
    guide.setup(X, jnp.asarray(y))
    q = guide.posterior(params, X_NEW)["f"]
    if likelihood is of_each:
        sd = np.sqrt(np.asarray(q.variance).T + 0.05**2)
        expected = norm(np.asarray(q.mean).T, sd).logpdf(y).sum(axis=1)
    else:
        sd = np.sqrt(np.asarray(q.variance).sum(axis=0) + 0.01**2)
        expected = norm(np.asarray(q.mean).sum(axis=0), sd).logpdf(y)
    got = sgp.log_predictive_density(guide, params, X_NEW, jnp.asarray(y))["y"]
    assert_allclose(got, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [NOISE, 3.0])
def test_rows_of_f_may_be_in_another_order_than_observations(noise):
    """Each value of f has an observation, but not that of its row."""

    def model(X, order, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", 4):
            numpyro.sample("y", dist.Normal(f[order], noise), obs=y)

    order = jnp.array([2, 0, 3, 1])
    guide, params = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z)), params_of()
    guide.setup(X, order, Y)
    q = guide.posterior(params, X_NEW, order)["f"]
    expected = norm(q.mean[order], np.sqrt(q.variance[order] + noise**2)).logpdf(Y_NEW)
    got = sgp.log_predictive_density(guide, params, X_NEW, order, Y_NEW)["y"]
    assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.slow
def test_densities_that_overflow_at_outer_nodes_are_numbers():
    """The rate is infinite where f is 14 standard deviations away."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2500.0), X))
        with numpyro.plate("data", 4):
            numpyro.sample("y", dist.Gamma(2.0, 2.0 * jnp.exp(-f)), obs=y)

    guide, params, y = (
        sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z)),
        params_of(),
        np.exp(Y_NEW),
    )
    guide.setup(X_NEW, y)
    q = guide.posterior(params, X_NEW + 9.0)["f"]
    expected = [
        by_grid(lambda f, y=y: gamma(2.0, scale=np.exp(f) / 2.0).logpdf(y), q, i)
        for i, y in enumerate(y)
    ]
    got = sgp.log_predictive_density(guide, params, X_NEW + 9.0, y)["y"]
    assert_allclose(got, expected, atol=0.01)


@pytest.mark.slow
def test_fewer_rows_than_a_table_of_groups_has():
    """A GP site over ten groups, and three rows of observations."""

    def model(X, group, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        times = jnp.arange(10.0)[:, None]
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), times))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + h[group], 2.0), obs=y)

    inputs, group = np.linspace(0.0, 3.0, 20)[:, None], np.arange(20) % 10
    y = np.sin(inputs[:, 0])
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(inputs, group, y)
    params = guide.known().starts
    known = sgp.log_predictive_density(guide, params, inputs, group, y)["y"]
    got = sgp.log_predictive_density(guide, params, inputs[:3], group[:3], y[:3])["y"]
    assert_allclose(got, known[:3], rtol=1e-10)


def test_rules_that_draw_depend_on_the_key(single):
    guide, params, q = single
    expected = norm(q.mean, np.sqrt(q.variance + NOISE**2)).logpdf(Y_NEW)
    rule, S = sgp.MonteCarlo(20_000), 20_000
    draws = [
        sgp.log_predictive_density(
            guide, params, X_NEW, Y_NEW, expectation=rule, rng_key=jax.random.key(seed)
        )["y"]
        for seed in range(2)
    ]
    assert np.abs(draws[0] - draws[1]).min() > 0
    # The variance of the density of one draw, by E[N(y; f, s)^2] = N(y; m, v + s^2 / 2) /
    # (2 s sqrt(pi)); eight numbers within five standard errors: one key in 2e5 fails.
    square = norm(q.mean, np.sqrt(q.variance + NOISE**2 / 2)).pdf(Y_NEW)
    square = square / (2 * NOISE * np.sqrt(np.pi))
    error = np.sqrt((square / np.exp(2 * expected) - 1) / S)
    for values in draws:
        assert (np.abs(values - expected) < 5 * error + 1e-3 * error).all()


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_mixture_is_the_mixture_of_its_components(covariance):
    guide = set_up(normal, sgp.MixtureSVGP(2, 2, inducing=Z, covariance=covariance))
    params = {**params_of(2), "f_auto_qu_logits": jnp.array([0.5, -1.0])}
    if covariance == "diagonal":
        params["f_auto_qu_sqrt"] = jnp.full((2, 2), 0.4)
    q = guide.posterior(params, X_NEW)["f"]
    parts = []
    for k, log_weight in enumerate(np.log([1, np.exp(-1.5)]) - np.log(1 + np.exp(-1.5))):
        mean, variance = q.marginals(k)
        sd = np.sqrt(variance + NOISE**2)
        parts.append(log_weight + norm(mean, sd).logpdf(Y_NEW))
    got = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW)["y"]
    assert_allclose(got, logsumexp(parts, axis=0), rtol=1e-6)


def test_two_latent_functions_are_integrated_on_a_grid():
    guide = set_up(two_latents, sgp.SVGP(inducing=Z))
    params = params_of(2)
    q = guide.posterior(params, X_NEW)["f"]
    # f[0] in closed form, and f[1] by eighty nodes.
    x, weights = np.polynomial.hermite_e.hermegauss(80)
    log_sd = 0.3 * (np.asarray(q.mean)[1] + np.sqrt(np.asarray(q.variance))[1] * x[:, None])
    sd = np.sqrt(np.asarray(q.variance)[0] + np.exp(2 * log_sd))
    expected = np.log(weights @ norm(np.asarray(q.mean)[0], sd).pdf(Y_NEW) / weights.sum())
    got = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW)["y"]
    # Thirty nodes for each function, and likelihoods about as wide as q.
    assert_allclose(got, expected, atol=1e-3)


@pytest.mark.slow
def test_coupled_functions_are_integrated_with_their_covariance():
    guide = set_up(two_latents, sgp.SVGP(inducing=Z, covariance="coupled"))
    sqrt = np.eye(4) * 0.5
    sqrt[2:, :2] = [[0.6, 0.0], [0.0, -0.6]]
    params = {**params_of(2), "f_auto_qu_sqrt": jnp.asarray(sqrt)}
    q = guide.posterior(params, X_NEW)["f"]
    mean, covariance = np.asarray(q.mean), np.asarray(q.row_covariance)
    assert (np.abs(covariance[:, 0, 1]) > 0.1).sum() >= 2
    # f[0] given f[1] is normal.
    x, weights = np.polynomial.hermite_e.hermegauss(80)
    second = mean[1] + np.sqrt(covariance[:, 1, 1]) * x[:, None]
    slope = covariance[:, 0, 1] / covariance[:, 1, 1]
    first = mean[0] + slope * (second - mean[1])
    variance = covariance[:, 0, 0] - slope * covariance[:, 0, 1] + np.exp(0.6 * second)
    expected = np.log(weights @ norm(first, np.sqrt(variance)).pdf(Y_NEW) / weights.sum())
    got = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW)["y"]
    assert_allclose(got, expected, atol=1e-3)


@pytest.mark.slow
def test_other_latents_are_at_their_median_and_data_are_not_scaled():
    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal())
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with handlers.scale(scale=2.0), numpyro.plate("data", 4):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = set_up(model, sgp.SVGP(inducing=Z))
    params = {**params_of(), "noise_auto_loc": jnp.array(0.8)}
    q = guide.posterior(params, X_NEW)["f"]
    got = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW)["y"]
    expected = norm(q.mean, np.sqrt(q.variance + 0.8**2)).logpdf(Y_NEW)
    assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.slow
def test_masked_rows_are_nan_and_do_not_count(single):
    guide, params, _ = single
    known = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW)["y"]
    mask = jnp.array([True, False, True, False])
    got = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW, mask=mask)["y"]
    assert_allclose(got, np.where(mask, known, np.nan), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plates", "event", "expanded"])
def test_a_row_has_the_density_of_the_outputs_that_are_not_masked(kind):
    mask = jnp.array([[True, True], [True, False], [False, True], [False, False]])
    noise, y = 2.0, np.stack([Y_NEW, Y_NEW[::-1]], axis=1)

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        fn = dist.Normal(f.T, noise)
        if kind == "plates":
            with numpyro.plate("data", 4, dim=-2), numpyro.plate("outputs", 2):
                with handlers.mask(mask=mask):
                    numpyro.sample("y", fn, obs=y)
        else:
            fn = fn.mask(mask)
            fn = fn.expand((4, 2)) if kind == "expanded" else fn
            with numpyro.plate("data", 4):
                numpyro.sample("y", fn.to_event(1), obs=y)

    guide, params = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z)), params_of(2)
    guide.setup(X, jnp.asarray(y))
    q = guide.posterior(params, X_NEW)["f"]
    by_output = norm(q.mean.T, np.sqrt(q.variance.T + noise**2)).logpdf(y)
    expected = np.where(mask, by_output, 0.0).sum(axis=1)
    expected[3] = np.nan
    got = sgp.log_predictive_density(guide, params, X_NEW, jnp.asarray(y))["y"]
    # Thirty nodes for each function, and a likelihood twice as wide as q or more.
    assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("base_guide", [AutoNormal, AutoMultivariateNormal])
def test_random_latents_are_averaged(base_guide):
    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal())
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        kernel = sgp.kernels.RBF(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", 4):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z), base_guide)
    guide.setup(X, Y)
    # Of the logarithms, noise before lengthscale.
    loc, sd, params = np.array([-0.4, 0.1]), np.array([0.5, 0.4]), params_of()
    if base_guide is AutoNormal:
        for i, name in enumerate(["noise", "lengthscale"]):
            params |= {f"{name}_auto_loc": loc[i], f"{name}_auto_scale": sd[i]}
    else:
        params |= {"auto_loc": jnp.asarray(loc), "auto_scale_tril": jnp.diag(sd)}
    # Both by thirty nodes, q(f) in closed form.
    x, weights = np.polynomial.hermite_e.hermegauss(30)
    weights = weights / weights.sum()
    density = square = 0.0
    m, S = params["f_auto_qu_mu"], params["f_auto_qu_sqrt"] @ params["f_auto_qu_sqrt"].T
    for node, weight in zip(x, weights, strict=True):
        lengthscale = np.exp(loc[1] + sd[1] * node)
        L = np.linalg.cholesky(rbf(Z, Z, 1.0, lengthscale))
        A = np.linalg.solve(L, rbf(Z, X_NEW, 1.0, lengthscale))
        variance = 1.0 + np.einsum("mn,mk,kn->n", A, S - np.eye(2), A)
        total = variance + np.exp(2 * (loc[0] + sd[0] * x[:, None]))
        values = norm(A.T @ m, np.sqrt(total)).pdf(Y_NEW)
        density = density + weight * weights @ values
        square = square + weight * weights @ values**2
    D = 4000
    got = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW, num_draws=D)["y"]
    # Five standard errors of the mean of the draws' densities.
    error = np.sqrt((square - density**2) / D)
    assert (np.abs(np.exp(got) - density) < 5 * error).all()
    # At the medians it would be many of them off.
    at_median = sgp.log_predictive_density(
        set_up(model, sgp.SVGP(inducing=Z)),
        {**params_of(), "noise_auto_loc": np.exp(loc[0]), "lengthscale_auto_loc": 1.1}
        | {k: v for k, v in params.items() if k.startswith("f_")},
        X_NEW,
        Y_NEW,
    )["y"]
    assert (np.abs(np.exp(at_median) - density) > 10 * error).any()


@pytest.mark.slow
def test_rows_outside_of_the_support_are_told():
    def counts(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guide = sgp.AutoSparseGP(counts, sgp.SVGP(inducing=Z))
    guide.setup(X, np.ones(len(X)))
    params, y = params_of(), np.array([1, -1, 2, 3])
    with pytest.warns(UserWarning, match=r"rows of site 'y' \(first: 1\) is zero"):
        found = sgp.log_predictive_density(guide, params, X_NEW, y)["y"]
    assert np.isneginf(found[1]) and np.isfinite(np.delete(found, 1)).all()


@pytest.mark.slow
def test_observations_of_nan_are_refused_unless_they_are_masked(single):
    guide, params, _ = single
    y, mask = (
        np.where(np.arange(4) == 1, np.nan, Y_NEW),
        jnp.array([True, False, True, True]),
    )
    for given in ({}, {"mask": ~mask}):
        with pytest.raises(ValueError, match=r"'y' has NaN in 1 rows \(first: \[1\]\)"):
            sgp.log_predictive_density(guide, params, X_NEW, y, **given)
    known = sgp.log_predictive_density(guide, params, X_NEW, Y_NEW, mask=mask)["y"]
    found = sgp.log_predictive_density(guide, params, X_NEW, y, mask=mask)["y"]
    assert_allclose(found, known, rtol=1e-12)


@pytest.mark.slow
def test_an_output_of_nan_is_refused_unless_it_is_masked():
    mask, y = np.array([[True, False], [True, True]]), np.array([[0.1, np.nan], [0.3, 0.4]])

    def model(X, y=None, mask=mask):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.T, 0.5).mask(mask).to_event(1), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X[:2], jnp.asarray(y))
    found = sgp.log_predictive_density(guide, params_of(2), X[:2], jnp.asarray(y))["y"]
    assert np.isfinite(found).all()
    with pytest.raises(ValueError, match=r"'y' has NaN in 1 rows \(first: \[0\]\)"):
        given = X[:2], jnp.asarray(y), ~mask
        sgp.log_predictive_density(guide, params_of(2), *given)


def test_missing_observations_are_an_error(single):
    guide, params, _ = single
    with pytest.raises(ValueError, match="no observed site with these arguments"):
        sgp.log_predictive_density(guide, params, X_NEW)


def test_a_site_without_rows_is_an_error():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y)

    guide = set_up(model, sgp.SVGP(inducing=Z))
    with pytest.raises(ValueError, match=r"'y' has log likelihoods of shape \(\), not one"):
        sgp.log_predictive_density(guide, params_of(), X_NEW, Y_NEW)


def test_what_marginals_cannot_give_is_refused():
    X = jnp.linspace(0.0, 3.0, 6)[:, None]
    y = jnp.sin(X[:, 0])

    def tied(X, y, batch_size=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.cumsum(f), 0.5), obs=y)

    guide = sgp.AutoSparseGP(tied, sgp.SVGP(3))
    svi = SVI(tied, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    with pytest.raises(ValueError, match="ties rows together"):
        sgp.log_predictive_density(guide, params, X, y, expectation=sgp.GaussHermite(9))


def test_a_column_of_observations_and_minibatches_are_refused():
    def model(X, y, batch_size=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X_batch, y_batch = X[idx], y[idx]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X_batch))
        with data:
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y_batch)

    X = jnp.linspace(0.0, 3.0, 6)[:, None]
    y = jnp.sin(X[:, 0])
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    with pytest.raises(ValueError, match="minibatch of plate 'data'"):
        sgp.log_predictive_density(guide, params, X, y, batch_size=3)
    with pytest.raises(ValueError, match="values of shape"):
        sgp.log_predictive_density(guide, params, X, y[:, None])


def test_other_rows_of_the_same_number_compile_nothing(single, count_compiled):
    guide, params, _ = single
    sgp.log_predictive_density(guide, params, X_NEW, Y_NEW)
    others = X_NEW + 0.1
    count_compiled()
    moved = sgp.log_predictive_density(guide, params, others, Y_NEW)
    assert count_compiled() == 0 and np.isfinite(moved["y"]).all()


def test_inputs_without_numbers_are_told(single):
    guide, params, _ = single
    with pytest.raises(ValueError, match="NaN or infinite values in 1 of 4 rows"):
        sgp.log_predictive_density(guide, params, X_NEW.at[1].set(np.nan), Y_NEW)


@pytest.mark.slow
@pytest.mark.parametrize("level", [30.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_observed_rows_without_a_density_are_told(level):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            with numpyro.handlers.mask(mask=jnp.arange(X.shape[0]) > 1):
                numpyro.sample("y", dist.Normal(jnp.log(f + level), 0.5), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    X, y = jnp.arange(6.0)[:, None], jnp.full(6, np.log(level))
    guide.setup(X, y)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = sgp.log_predictive_density(guide, guide.known().starts, X, y)["y"]
    assert np.isnan(found[:2]).all()
    if level == 30.0:  # q has no weight where the logarithm is none
        assert np.isfinite(found[2:]).all() and not told
    else:
        (warning,) = told
        assert "4 observed rows of site 'y' (first: 2) is NaN" in str(warning.message)


@pytest.mark.slow  # with all optimisations
@pytest.mark.parametrize(
    "likelihood, log_pmf",
    [
        (
            lambda f: dist.Binomial(6, logits=f),
            lambda f, y: binom.logpmf(y, 6, expit(f)),
        ),
        (
            lambda f: dist.NegativeBinomial2(jnp.exp(f), 3.0),
            lambda f, y: nbinom.logpmf(y, 3.0, 3.0 / (3.0 + np.exp(f))),
        ),
    ],
    ids=["binomial", "negative-binomial"],
)
def test_rounding_is_taken_for_no_other_row(likelihood, log_pmf):
    """Of 16 rows and up a loop's first turn may round what is not moved otherwise."""
    X = np.linspace(0.0, 6.0, 50)[:, None]
    y = np.random.default_rng(0).binomial(6, expit(np.sin(2.0 * X[:, 0])))

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(1.0, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(12), (X, y), progress_bar=False)
    q = fitted.posterior(X)["f"]
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    f = np.asarray(q.mean) + np.sqrt(np.asarray(q.variance)) * nodes[:, None]
    exact = logsumexp(log_pmf(f, y), b=weights[:, None] / np.sqrt(2.0 * np.pi), axis=0)
    assert_allclose(fitted.log_score()["y"].rows, exact, atol=1e-6)

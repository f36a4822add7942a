"""Mixtures of Gaussians as posteriors: the bound by hand, training, two modes, options."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from scipy.special import gammaln
from scipy.stats import norm

import numpyro_sgp as sgp
from tests import helpers

KEY = random.key(0)
N, M, K = 4, 2, 2
X = jnp.array([-1.5, -0.4, 0.7, 1.6])[:, None]
Z = jnp.array([-1.0, 1.1])[:, None]
COUNTS = jnp.array([0.0, 2.0, 1.0, 4.0])
Y = jnp.array([0.4, -0.9, 1.3, 0.2])


def poisson(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def q_of(seed, K=K):
    """Means ``(K, M)``, lower factors ``(K, M, M)`` and logits of components."""
    rng = np.random.default_rng(seed)
    mu = 0.7 * rng.normal(size=(K, M))
    sqrt = np.tril(0.2 * rng.normal(size=(K, M, M)), -1)
    return mu, sqrt + 0.4 * np.eye(M), 0.5 * rng.normal(size=K)


def named(site, q):
    names = ("qu_mu", "qu_sqrt", "qu_logits")
    own = {f"{site}_auto_{n}": jnp.asarray(v) for n, v in zip(names, q, strict=True)}
    return {**own, f"{site}_auto_Z": Z}


def weights_of(q):
    return np.exp(q[2]) / np.exp(q[2]).sum()


def marginals(q, X):
    """Marginal means and variances of the components at X, ``(K, N)``."""
    Kuu = helpers.rbf(Z, Z)
    A = np.linalg.solve(np.linalg.cholesky(Kuu), helpers.rbf(Z, X))
    F = np.swapaxes(q[1], -1, -2) @ A
    return q[0] @ A, 1.0 - np.sum(A**2, axis=0) + np.sum(F**2, axis=1)


def mixture_kl(q):
    """By the pairwise bound of the entropy."""
    (mu, sqrt, _), weights = q, weights_of(q)
    S = sqrt @ np.swapaxes(sqrt, -1, -2)
    total = 0.0
    for k, weight in enumerate(weights):
        affinity = 0.0
        for l, other in enumerate(weights):
            d, middle = mu[k] - mu[l], (S[k] + S[l]) / 2
            dets = [np.linalg.det(S[k]), np.linalg.det(S[l]), np.linalg.det(middle)]
            scale = (dets[0] * dets[1]) ** 0.25 / dets[2] ** 0.5
            affinity += other * scale * np.exp(-d @ np.linalg.solve(middle, d) / 8)
        own = np.trace(S[k]) + mu[k] @ mu[k] - M - np.linalg.slogdet(S[k])[1]
        total += weight * (0.5 * own + np.log(affinity))
    return total


def mixture(**options):
    return sgp.MixtureSVGP(M, K, inducing=Z, covariance="full", **options)


def value_and_gradient(model, approximation, params, y, elbo):
    guide = sgp.AutoSparseGP(model, approximation)
    guide.setup(X, y)
    loss = jax.value_and_grad(lambda p: elbo.loss(KEY, p, model, guide, X, y))
    return jax.jit(loss)(params)


def test_bound_and_gradient_of_the_weights_are_those_by_hand():
    def by_hand(logits):
        q = (mu, sqrt, logits)
        m, v = marginals(q, X)
        counts = np.asarray(COUNTS)
        likelihood = counts * m - np.exp(m + v / 2) - gammaln(counts + 1)
        return weights_of(q) @ likelihood.sum(axis=1) - mixture_kl(q)

    mu, sqrt, logits = q_of(5)
    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(20))
    params = named("f", (mu, sqrt, logits))
    value, gradient = value_and_gradient(poisson, mixture(), params, COUNTS, elbo)
    # Twenty nodes are exact to rounding for these variances; the jitter is 1e-8.
    assert_allclose(-value, by_hand(logits), rtol=1e-6)
    step = 1e-4 * np.eye(K)
    by_difference = [(by_hand(logits + s) - by_hand(logits - s)) / 2e-4 for s in step]
    assert np.abs(by_difference).max() > 0.02
    assert_allclose(-gradient["f_auto_qu_logits"], by_difference, rtol=1e-5)


@pytest.mark.slow
def test_two_sites_have_a_mixture_each():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    q = {"f": q_of(1), "g": q_of(2)}
    (m, v), (mg, vg) = marginals(q["f"], X), marginals(q["g"], X)
    expected = -mixture_kl(q["f"]) - mixture_kl(q["g"])
    for k, weight in enumerate(weights_of(q["f"])):
        for l, other in enumerate(weights_of(q["g"])):
            square = (np.asarray(Y) - m[k]) ** 2 + v[k]
            part = -mg[l] - 0.5 * square * np.exp(-2 * mg[l] + 2 * vg[l])
            expected += weight * other * np.sum(part - 0.5 * np.log(2 * np.pi))
    params = {**named("f", q["f"]), **named("g", q["g"])}
    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(24))
    guide = sgp.AutoSparseGP(model, {"f": mixture(), "g": mixture(seed=1)})
    guide.setup(X, Y)
    value = jax.jit(lambda p: elbo.loss(KEY, p, model, guide, X, Y))(params)
    # 24 nodes leave 1e-8 of exp(-2 g) with a variance of g below one.
    assert_allclose(-value, expected, rtol=1e-6)


@pytest.fixture(scope="module")
def poisson_guide():
    guide = sgp.AutoSparseGP(poisson, mixture())
    guide.setup(X, COUNTS)
    return guide


@pytest.mark.parametrize("elbo", [Trace_ELBO(), TraceMeanField_ELBO()])
def test_training_by_numpyros_bounds_is_refused(poisson_guide, elbo):
    def loss(params):
        return elbo.loss(KEY, params, poisson, poisson_guide, X, COUNTS)

    with pytest.raises(TypeError, match="Use numpyro_sgp.TraceGP_ELBO.. as the loss"):
        jax.eval_shape(jax.grad(loss), named("f", q_of(0)))


def test_collapse_is_reported(poisson_guide):
    mu, sqrt, _ = q_of(3)
    params = named("f", (mu, sqrt, np.array([0.0, 8.0])))
    with pytest.warns(UserWarning, match="at GP site 'f' has collapsed to one component"):
        poisson_guide.posterior(params, X, COUNTS)
    # A weight of one in 400 is not reported: warnings are errors here.
    poisson_guide.posterior(named("f", (mu, sqrt, np.array([0.0, 6.0]))), X, COUNTS)


def test_one_component_is_svgp(poisson_guide):
    mu, sqrt, logits = q_of(4, K=1)
    one = sgp.AutoSparseGP(poisson, sgp.MixtureSVGP(M, 1, inducing=Z, covariance="full"))
    svgp = sgp.AutoSparseGP(poisson, sgp.SVGP(M, inducing=Z))
    for guide in (one, svgp):
        guide.setup(X, COUNTS)
    got = one.posterior(named("f", (mu, sqrt, logits)), X, COUNTS)["f"]
    params = named("f", (mu[0], sqrt[0], logits))
    del params["f_auto_qu_logits"]
    expected = svgp.posterior(params, X, COUNTS)["f"]
    assert_allclose(got.mean, expected.mean, rtol=1e-12)
    assert_allclose(got.variance, expected.variance, rtol=1e-12)
    assert_allclose(got.prior_kl(), expected.prior_kl(), rtol=1e-12)
    assert got.num_components == expected.num_components == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("num_components", [1, 2])
def test_the_kl_of_several_functions_is_that_of_one_gaussian(num_components):
    """Of equal components; of one it counted as often as there were functions."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0] + f[1], 0.5), obs=y)

    rng = np.random.default_rng(0)
    mu, sqrt = rng.normal(size=(2, M)), np.tril(rng.uniform(0.5, 1.0, (2, M, M)))
    options = {"inducing": Z, "covariance": "full"}
    mixed = sgp.AutoSparseGP(model, sgp.MixtureSVGP(M, num_components, **options))
    plain = sgp.AutoSparseGP(model, sgp.SVGP(M, inducing=Z))
    y, elbo = np.sin(X[:, 0]), sgp.TraceGP_ELBO()
    losses = []
    for guide, q in (
        (mixed, [np.stack([v] * num_components) for v in (mu, sqrt)]),
        (plain, [mu, sqrt]),
    ):
        guide.setup(X, y)
        params = named("f", (*q, np.zeros(num_components)))
        if guide is plain:
            del params["f_auto_qu_logits"]
        losses.append(elbo.loss(jax.random.key(0), params, model, guide, X, y))
    assert_allclose(*losses, rtol=1e-10)


@pytest.mark.parametrize("whiten", [True, False])
def test_components_start_near_the_prior_and_apart(whiten):
    prior = sgp.GaussianProcess(sgp.kernels.RBF(4.0), X)

    def start_of(**options):
        start = mixture(whiten=whiten, **options).start(prior, (Z,))
        return {name: param.value for name, param in start.items()}

    start = start_of()
    assert start["Z"].shape == (M, 1) and start["qu_mu"].shape == (K, M)
    assert np.abs(start["qu_mu"][0] - start["qu_mu"][1]).min() > 1e-3
    size = 1.0 if whiten else 2.0  # prior standard deviation, of which spread is 0.3
    assert np.abs(start["qu_mu"]).max() < 4 * 0.3 * size
    S = start["qu_sqrt"] @ np.swapaxes(start["qu_sqrt"], -1, -2)
    expected = np.eye(M) if whiten else helpers.rbf(Z, Z, 4.0)
    assert_allclose(S, np.stack([expected] * K), rtol=1e-6)
    assert_allclose(start["qu_logits"], 0.0)
    other = start_of(seed=1)
    assert np.abs(other["qu_mu"] - start["qu_mu"]).min() > 1e-3


@pytest.mark.slow
def test_two_components_find_both_modes():
    """y = f^2 + noise does not tell f from -f."""
    X, y, noise = jnp.array([[0.0], [0.4]]), jnp.array([4.0, 3.0]), 0.3

    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2.0), X))
        with numpyro.plate("data", 2):
            numpyro.sample("y", dist.Normal(f**2, noise), obs=y)

    options = {"inducing": X, "train_inducing": False, "covariance": "full"}
    bounds, densities = {}, {}
    for name, approximation in {
        "one": sgp.SVGP(**options),
        "two": sgp.MixtureSVGP(num_components=2, **options),
    }.items():
        guide = sgp.AutoSparseGP(model, approximation)
        elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(3))  # exact: of degree four in f
        svi = SVI(model, guide, optax.adam(0.01), elbo)
        start = jnp.ones(2) if name == "one" else jnp.array([[0.5, 0.5], [-0.3, -0.3]])
        start = {"f_auto_qu_mu": start}
        result = sgp.fit_lbfgs(svi, KEY, X, y, init_params=start, progress_bar=False)
        bounds[name] = -result.losses[-1]
        q = guide.posterior(result.params, X, y)["f"]
        densities[name] = sgp.log_predictive_density(guide, result.params, X, y)["y"]
    assert_allclose(np.exp(q.log_weights), 0.5, atol=1e-3)
    assert_allclose(q.mean, 0.0, atol=1e-2)
    assert_allclose(jnp.sqrt(q.variance), jnp.sqrt(y), rtol=0.05)
    # The modes are some forty standard deviations apart, so the gain is log 2 but for
    # where L-BFGS ends.
    assert_allclose(bounds["two"] - bounds["one"], np.log(2), atol=1e-4)
    assert densities["two"].mean() > densities["one"].mean() - 1e-3
    # Below the evidence, by a sum over a grid.
    f = np.linspace(-4, 4, 801)
    K = helpers.rbf(X, X, 2.0)
    both = np.stack(np.meshgrid(f, f, indexing="ij"), axis=-1)
    prior = np.einsum("ijk,kl,ijl->ij", both, np.linalg.inv(K), both)
    prior = np.exp(-0.5 * prior) / (2 * np.pi * np.sqrt(np.linalg.det(K)))
    density = norm(both[..., 0] ** 2, noise).pdf(4.0) * norm(both[..., 1] ** 2, noise).pdf(
        3.0
    )
    evidence = np.log(np.sum(prior * density) * (f[1] - f[0]) ** 2)
    assert evidence - 0.1 < bounds["two"] < evidence


@pytest.mark.parametrize(
    "options, what",
    [
        ({"num_components": 0}, "num_components must be a positive whole number, got 0"),
        ({"num_components": 2.0}, "must be a positive whole number, got 2.0"),
        ({"num_components": True}, "must be a positive whole number, got True"),
        ({"entropy": "exact"}, "entropy must be one of .*, got 'exact'"),
        ({"spread": 0.0}, "spread must be positive, got 0.0: components that start equal"),
        ({"covariance": "coupled"}, r"one of \('diagonal', 'full'\).*, got 'coupled'"),
        ({"covariance": "dual"}, r"one of \('diagonal', 'full'\).*, got 'dual'"),
    ],
)
def test_bad_options_are_refused(options, what):
    with pytest.raises(ValueError, match=f"MixtureSVGP: .*{what}"):
        sgp.MixtureSVGP(3, **options)


def test_joint_draws_of_a_mixture_are_refused(poisson_guide):
    elbo = sgp.TraceGP_ELBO(sgp.MonteCarlo(4, joint=True))
    with pytest.raises(ValueError, match="GP site 'f' has a mixture posterior, whose comp"):
        elbo.loss(KEY, named("f", q_of(0)), poisson, poisson_guide, X, COUNTS)

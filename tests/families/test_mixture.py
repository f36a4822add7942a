"""KL of mixtures of Gaussians from the standard normal: bounds, exact cases, draws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from numpyro_sgp.families import Block
from numpyro_sgp.families.mixture import ENTROPIES, mixture_kl

M = 2
# Number of components, batch shape, kind of covariance.
CASES = [(2, (), "diagonal"), (3, (2,), "diagonal"), (2, (2,), "full"), (3, (), "full")]
KEY = jax.random.key(0)


def problem(seed, K, batch, kind, distance=1.0):
    """Whitened means, square roots of covariances and log weights of the components."""
    rng = np.random.default_rng(seed)
    mu = distance * rng.normal(size=(K, *batch, M))
    sqrt = rng.uniform(0.4, 1.5, size=(K, *batch, M))
    if kind == "full":
        sqrt = sqrt[..., None] * np.eye(M)
        sqrt = sqrt + np.tril(rng.normal(size=sqrt.shape), -1)
    return mu, sqrt, np.log(rng.dirichlet(np.full(K, 3.0)))


def dense(mu, sqrt):
    """Means ``(K, D)`` and covariances ``(K, D, D)`` over batch and M together."""
    K, size = len(mu), mu[0].size
    if sqrt.ndim == mu.ndim:
        sqrt = sqrt[..., None] * np.eye(M)
    S = (sqrt @ np.swapaxes(sqrt, -1, -2)).reshape(K, -1, M, M)
    joint = np.zeros((K, size, size))
    for b in range(S.shape[1]):
        own = slice(b * M, (b + 1) * M)
        joint[:, own, own] = S[:, b]
    return mu.reshape(K, size), joint


def monte_carlo_kl(mu, sqrt, log_weights, num=20_000, seed=0):
    """KL by draws of log q(u) / q_k(u) from each component k, and its standard error."""
    rng = np.random.default_rng(seed)
    means, covariances = dense(mu, sqrt)
    components = [multivariate_normal(*c) for c in zip(means, covariances, strict=True)]
    total, variance = 0.0, 0.0
    for k, weight in enumerate(np.exp(log_weights)):
        u = rng.multivariate_normal(means[k], covariances[k], size=num)
        parts = np.array([c.logpdf(u) for c in components])
        ratio = logsumexp(parts + log_weights[:, None], axis=0) - parts[k]
        total += weight * (gaussian_kl(means[k], covariances[k]) + ratio.mean())
        variance += weight**2 * ratio.var() / num
    return total, np.sqrt(variance)


def gaussian_kl(m, S):
    return 0.5 * (np.trace(S) + m @ m - m.size - np.linalg.slogdet(S)[1])


def bounds(mu, sqrt, log_weights):
    """The bounds by pairwise distances and by Jensen, pair by pair with dense matrices."""
    means, S = dense(mu, sqrt)
    weights, K, D = np.exp(log_weights), len(means), means.shape[1]
    cross = sum(
        w * 0.5 * (np.trace(s) + m @ m + D * np.log(2 * np.pi))
        for w, m, s in zip(weights, means, S, strict=True)
    )
    own = [0.5 * np.linalg.slogdet(2 * np.pi * np.e * s)[1] for s in S]
    jensen, pairwise = 0.0, 0.0
    for k in range(K):
        overlap, affinity = 0.0, 0.0
        for l in range(K):
            d = means[k] - means[l]
            overlap += weights[l] * multivariate_normal(d * 0, S[k] + S[l]).pdf(d)
            middle = (S[k] + S[l]) / 2
            scale = np.linalg.det(S[k]) ** 0.25 * np.linalg.det(S[l]) ** 0.25
            scale = scale / np.sqrt(np.linalg.det(middle))
            affinity += weights[l] * scale * np.exp(-d @ np.linalg.solve(middle, d) / 8)
        jensen -= weights[k] * np.log(overlap)
        pairwise += weights[k] * (own[k] - np.log(affinity))
    return {"pairwise": cross - pairwise, "jensen": cross - jensen}


@partial(jax.jit, static_argnames=("methods", "upper"))
def kl(mu, sqrt, log_weights, key=KEY, methods=("pairwise", "jensen"), upper=False):
    block = Block(jnp.asarray(mu), jnp.asarray(sqrt), upper)
    return {m: mixture_kl(block, log_weights, m, key) for m in methods}


@partial(jax.jit, static_argnames="upper")
def draws(mu, sqrt, log_weights, upper=False):
    """2000 estimates of the KL by the method that draws, with one key each."""

    def draw(key):
        return kl(mu, sqrt, log_weights, key, ("monte_carlo",), upper)["monte_carlo"]

    return jax.vmap(draw)(jax.random.split(KEY, 2_000))


@pytest.mark.parametrize("K, batch, kind", CASES)
def test_bounds_are_those_of_the_papers_and_lie_above_the_kl(K, batch, kind):
    for seed in range(6):
        parts = problem(seed, K, batch, kind, distance=[0.2, 1.0, 3.0][seed % 3])
        got, expected = kl(*parts), bounds(*parts)
        exact, error = monte_carlo_kl(*parts)
        for method in ("pairwise", "jensen"):
            assert got[method].shape == ()
            assert_allclose(got[method], expected[method], rtol=1e-9, atol=1e-9)
            # Five standard errors: where a bound is tight, one seed in 3e6 fails.
            assert got[method] > exact - 5 * error


def test_pairwise_is_never_looser_than_jensen():
    for K, batch, kind in CASES[:3]:
        for seed in range(25):
            got = bounds(*problem(seed, K, batch, kind, distance=10 ** (seed / 12 - 1)))
            assert got["pairwise"] < got["jensen"]
    # One dimension: two unit normals at a distance d of which exp(-d^2 / 8) is
    # sqrt(2) - 1, where Jensen's bound is the tighter of the two, and is taken.
    distance = np.sqrt(-8 * np.log(np.sqrt(2) - 1))
    got = kl(np.array([[0.0], [distance]]), np.ones((2, 1)), np.log([0.5, 0.5]))
    assert_allclose(got["pairwise"], got["jensen"], rtol=1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_one_component_is_exact_by_every_method(kind):
    mu, sqrt, log_weights = problem(0, 1, (2,), kind)
    (m,), (S,) = dense(mu, sqrt)
    exact = gaussian_kl(m, S)
    for value in kl(mu, sqrt, log_weights, methods=ENTROPIES).values():
        assert_allclose(value, exact, rtol=1e-12)


def test_pairwise_is_exact_for_equal_components():
    K, batch, kind = CASES[2]
    mu, sqrt, log_weights = problem(1, K, batch, kind)
    mu, sqrt = np.stack([mu[0]] * K), np.stack([sqrt[0]] * K)
    (m, *_), (S, *_) = dense(mu, sqrt)
    exact = gaussian_kl(m, S)
    got = kl(mu, sqrt, log_weights)
    assert_allclose(got["pairwise"], exact, rtol=1e-12)
    # Each of the four dimensions loses (1 - log 2) / 2.
    assert_allclose(got["jensen"], exact + 2 * (1 - np.log(2)), rtol=1e-12)


@pytest.mark.parametrize("distance", [8.0, 20.0])
def test_pairwise_is_exact_for_well_separated_components(distance):
    K, batch, kind = CASES[2]
    mu, sqrt, log_weights = problem(2, K, batch, kind)
    mu = mu + distance * np.arange(K)[:, None, None]
    means, S = dense(mu, sqrt)
    weights = np.exp(log_weights)
    parts = [gaussian_kl(m, s) for m, s in zip(means, S, strict=True)]
    separated = weights @ parts + weights @ log_weights
    d, middle = means[0] - means[1], S.mean(axis=0)
    affinity = np.exp(-d @ np.linalg.solve(middle, d) / 8)
    ratio = max(weights[0] / weights[1], weights[1] / weights[0])
    got = kl(mu, sqrt, log_weights)["pairwise"]
    # What the components overlap: at most the affinity, times the odds.
    assert_allclose(got, separated, rtol=1e-12, atol=ratio * affinity)
    if distance == 20.0:
        assert ratio * affinity < 1e-6


@pytest.mark.parametrize("K, batch, kind", [CASES[1], CASES[3]])
def test_monte_carlo_is_unbiased(K, batch, kind):
    parts = problem(3, K, batch, kind)
    exact, exact_error = monte_carlo_kl(*parts)
    values = np.asarray(draws(*parts))
    error = np.hypot(values.std() / np.sqrt(len(values)), exact_error)
    # Five standard errors: one key in 2e6 fails. The pairwise bound is further off.
    assert abs(values.mean() - exact) < 5 * error
    assert 5 * error < 0.5 * (kl(*parts)["pairwise"] - exact)


def test_square_roots_may_be_upper_factors_of_the_same_covariance():
    K, batch, kind = CASES[3]  # the shapes of a test above
    mu, sqrt, log_weights = problem(4, K, batch, kind)
    # Upper triangular, as whitening by sites gives, and with columns of another sign.
    flipped = np.linalg.cholesky((sqrt @ np.swapaxes(sqrt, -1, -2))[..., ::-1, ::-1])
    upper = flipped[..., ::-1, ::-1] * np.array([1.0, -1.0])
    assert_allclose(upper @ np.swapaxes(upper, -1, -2), sqrt @ np.swapaxes(sqrt, -1, -2))
    got, expected = kl(mu, upper, log_weights, upper=True), kl(mu, sqrt, log_weights)
    for method, value in expected.items():
        assert_allclose(got[method], value, rtol=1e-12)
    values = np.asarray(draws(mu, upper, log_weights, upper=True))
    exact, exact_error = monte_carlo_kl(mu, sqrt, log_weights)
    error = np.hypot(values.std() / np.sqrt(len(values)), exact_error)
    assert abs(values.mean() - exact) < 5 * error  # one key in 2e6 fails


def test_float32_has_the_digits_of_components_that_are_sharp():
    """Posteriors of little noise, whose covariances have a condition of 1e7."""
    Z, X, s = np.linspace(0, 6, 40)[:, None], np.linspace(0, 6, 5000)[:, None], 0.01
    kernel = lambda a, b: np.exp(-0.5 * (a - b.T) ** 2 / 0.5**2)  # noqa: E731
    A = np.linalg.solve(np.linalg.cholesky(kernel(Z, Z) + 1e-5 * np.eye(40)), kernel(Z, X))
    P = np.linalg.cholesky(np.linalg.inv(np.eye(40) + A @ A.T / s**2))
    sqrt = np.stack([P, 1.1 * P]).astype(np.float32)
    mu = np.stack([np.zeros(40), np.full(40, 1e-3)]).astype(np.float32)
    log_weights = np.log(np.array([0.5, 0.5], np.float32))
    got = kl(mu, sqrt, log_weights)
    expected = kl(*(np.asarray(part, float) for part in (mu, sqrt, log_weights)))
    for method in ("pairwise", "jensen"):
        assert got[method].dtype == jnp.float32
        # 100 nats have some 1e-5; through the sum of covariances they are .1 off.
        assert_allclose(got[method], expected[method], atol=3e-4)


def test_gradients_are_finite_where_a_weight_vanishes():
    mu, sqrt, _ = problem(5, 2, (), "diagonal")
    gradient = jax.grad(
        lambda logits: kl(mu, sqrt, jax.nn.log_softmax(logits))["pairwise"]
    )(jnp.array([0.0, -60.0]))
    assert np.isfinite(gradient).all()

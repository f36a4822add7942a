"""Layers of deep GPs: helpers against models by hand, bounds and predictions by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.families import Block, BlockGaussian
from numpyro_sgp.kernels import RBF, Convolutional, Linear, extract_patches
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.means import identity, pca, random_filters
from tests.helpers import rbf, regression_data

NOISE = 0.3
X, Y = regression_data(8, dim=2)
JITTER = 1e-8


def likelihood(f, y):
    with numpyro.plate("data", f.shape[-1]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def by_layers(X, y=None):
    h = sgp.layer("h", RBF(0.7, 1.1), X)
    f = sgp.layer("f", RBF(1.3, 0.9), h, 1, mean=None)
    likelihood(f[:, 0], y)


def by_hand(X, y=None):
    prior = sgp.GaussianProcess(RBF(0.7, 1.1), X, lambda X: X.T)
    h = numpyro.sample("h", prior).T
    f = numpyro.sample("f", sgp.GaussianProcess(RBF(1.3, 0.9), h).expand([1]))
    likelihood(f[0], y)


def disturbed(params, seed=1):
    """Parameters away from their start, factors kept lower triangular."""
    rng = np.random.default_rng(seed)

    def move(name, value):
        noise = 0.3 * rng.normal(size=value.shape)
        return value + (np.tril(noise) if name.endswith("_sqrt") else noise)

    return {name: move(name, value) for name, value in sorted(params.items())}


def start(model, approximation, X, y):
    """A guide that is set up, and parameters away from their start."""
    guide = sgp.AutoSparseGP(model, approximation)
    guide.setup(X, y)
    names = guide.parameter_names()
    params = {
        names[site][name]: value
        for site, initial in guide.setup_state()["initial"].items()
        for name, value in initial.items()
    }
    return guide, disturbed(params)


def loss(model, guide, params, X, y, rule, key=7):
    elbo = sgp.TraceGP_ELBO(rule)
    bound = jax.jit(lambda params: elbo.loss(random.key(key), params, model, guide, X, y))
    return float(bound(params))


def traced(model, X):
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        model(X)
    return trace


@pytest.mark.slow
def test_a_deep_gp_by_the_helper_is_one_by_hand():
    ours, theirs = traced(by_layers, X), traced(by_hand, X)
    for name in ("h", "f"):
        gp, other = ours[name]["fn"], theirs[name]["fn"]
        assert gp.batch_shape == other.batch_shape
        for found, expected in zip(
            (gp.X, gp.mean, gp.covariance_matrix, ours[name]["value"]),
            (other.X, other.mean, other.covariance_matrix, theirs[name]["value"]),
            strict=True,
        ):
            assert_allclose(found, expected, rtol=1e-12)

    approximation = {
        "h": sgp.SOLVEGP(3, 2, initial_scale=0.1),
        "f": sgp.SVGP(3, whiten=False),
    }
    guide, params = start(by_layers, approximation, X, Y)
    other = sgp.AutoSparseGP(by_hand, approximation)
    other.setup(X, Y)
    rule = sgp.MonteCarlo(3)
    expected = loss(by_hand, other, params, X, Y, rule)
    assert_allclose(loss(by_layers, guide, params, X, Y, rule), expected, rtol=1e-12)


def test_one_layer_is_the_shallow_model():
    def shallow(X, y=None):
        likelihood(numpyro.sample("f", sgp.GaussianProcess(RBF(), X)), y)

    def deep(X, y=None):
        likelihood(sgp.layer("f", RBF(), X, 1, mean=None)[:, 0], y)

    guide, params = start(deep, sgp.SOLVEGP(3, 2), X, Y)
    other = sgp.AutoSparseGP(shallow, sgp.SOLVEGP(3, 2))
    other.setup(X, Y)
    flat = {k: v[0] if "_q" in k else v for k, v in params.items()}
    rule = sgp.GaussHermite(5)
    expected = loss(shallow, other, flat, X, Y, rule)
    assert_allclose(loss(deep, guide, params, X, Y, rule), expected, rtol=1e-12)


def marginals(X, Z, mu, sqrt, variance, lengthscale, mean=0.0):
    """Means and variances of a whitened SVGP by explicit inverses, and its KL."""
    K = rbf(Z, Z, variance, lengthscale) + JITTER * variance * np.eye(len(Z))
    L = np.linalg.cholesky(K)
    A = np.linalg.inv(K) @ rbf(Z, X, variance, lengthscale)
    m, S = L @ mu, L @ sqrt @ sqrt.T @ L.T
    var = variance - np.sum(A * (K @ A), axis=0) + np.sum(A * (S @ A), axis=0)
    kl = 0.5 * (
        np.trace(np.linalg.inv(K) @ S)
        + m @ np.linalg.inv(K) @ m
        - len(m)
        + np.linalg.slogdet(K)[1]
        - np.linalg.slogdet(S)[1]
    )
    return mean + A.T @ m, var, kl


def dense_two_layers(params, X, node):
    """
    Marginals of f where the inner layer of `by_hand` is at a standard normal node, and KLs.

    :param node: shape ``(2, N)`` or broadcastable to it.
    """
    p = {k: np.asarray(v) for k, v in params.items()}
    h, kls = [], 0.0
    for d in range(2):
        q = p["h_auto_qu_mu"][d], p["h_auto_qu_sqrt"][d]
        mean, var, kl = marginals(X, p["h_auto_Z"], *q, 0.7, 1.1, np.asarray(X)[:, d])
        h.append(mean + np.sqrt(var) * node[d])
        kls += kl
    q = p["f_auto_qu_mu"][0], p["f_auto_qu_sqrt"][0]
    mean, var, kl = marginals(np.stack(h, 1), p["f_auto_Z"], *q, 1.3, 0.9)
    return mean, var, kls + kl


@pytest.fixture(scope="module")
def two_layers():
    return start(by_layers, sgp.SVGP(3), X, Y)


def test_the_bound_of_two_layers_is_the_integral_by_numpy(two_layers):
    guide, params = two_layers
    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    weights = weights / weights.sum()
    total = 0.0
    for i, wi in enumerate(weights):
        for j, wj in enumerate(weights):
            mean, var, kl = dense_two_layers(params, X, nodes[[i, j]][:, None])
            ll = -0.5 * np.log(2 * np.pi * NOISE**2) - ((Y - mean) ** 2 + var) / (
                2 * NOISE**2
            )
            total += wi * wj * np.sum(ll)
    # Four nodes are exact for the quadratic in the last layer also.
    found = -loss(by_layers, guide, params, X, Y, sgp.GaussHermite(4))
    assert_allclose(found, total - kl, rtol=1e-8)


@pytest.mark.slow
def test_predictions_are_mixtures_over_draws_of_the_inner_layers(two_layers):
    guide, params = two_layers
    num = 1000
    rng = np.random.default_rng(3)
    densities, means = np.zeros((num, len(X))), np.zeros((num, len(X)))
    for s in range(num):
        mean, var, _ = dense_two_layers(params, X, rng.normal(size=(2, len(X))))
        total = var + NOISE**2
        densities[s] = np.exp(-0.5 * (Y - mean) ** 2 / total) / np.sqrt(2 * np.pi * total)
        means[s] = mean
    found = sgp.log_predictive_density(guide, params, X, Y, num_draws=num)["y"]
    # Five standard errors of the difference of two such averages: an error would be
    # one of 8 rows in 2e6.
    error = 5 * np.sqrt(2) * densities.std(axis=0) / densities.mean(axis=0) / num**0.5
    assert np.all(np.abs(found - np.log(densities.mean(axis=0))) < error)

    keys = random.split(random.key(1), num)
    draws = jax.vmap(lambda key: guide.posterior(params, X, rng_key=key)["f"].mean[0])(keys)
    error = 5 * np.sqrt(2) * means.std(axis=0) / num**0.5
    assert np.all(np.abs(draws.mean(axis=0) - means.mean(axis=0)) < error)
    # A standard deviation of 1000 draws is off by 2.2 % (more where tails are heavy).
    assert_allclose(draws.std(axis=0), means.std(axis=0), rtol=0.2)
    without = guide.posterior(params, X)["f"].mean[0]
    zero = dense_two_layers(params, X, np.zeros((2, 1)))[0]
    assert_allclose(without, zero, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_inner_inducing_points_start_among_the_values_of_the_layer_before():
    wide = jnp.asarray(np.random.default_rng(0).normal(size=(12, 5)) @ np.diag(range(5)))
    mean = pca(wide, 2)

    def model(X, y=None):
        h = sgp.layer("h", RBF(1.0, 3.0), X, 2, mean=mean)
        likelihood(sgp.layer("f", RBF(), h, 1, mean=None)[:, 0], y)

    inner = sgp.SVGP(3, initial_scale=1e-5)
    guide = sgp.AutoSparseGP(model, {"h": inner, "f": sgp.SVGP(12, "random")})
    guide.setup(wide, wide[:, 0])
    Z = guide.setup_state()["initial"]["f"]["Z"]
    components = np.asarray(mean(wide)).T
    away = np.linalg.norm(Z[:, None] - components[None], axis=-1)
    assert np.max(away.min(axis=0)) < 1e-3 and np.max(away.min(axis=1)) < 1e-3


@pytest.mark.parametrize(
    ("approximation", "expected"),
    [
        (sgp.SVGP(3, initial_scale=0.1), "full"),
        (sgp.SVGP(3, initial_scale=0.1, whiten=False), "unwhitened"),
        (sgp.SVGP(3, initial_scale=0.1, covariance="diagonal"), "diagonal"),
        (sgp.SVGP(3, initial_scale=0.1, covariance="coupled"), "coupled"),
        (sgp.ODVGP(3, 4, initial_scale=0.1, num_columns=2), "full"),
    ],
)
def test_small_starts_are_multiples_of_the_prior(approximation, expected):
    prior = sgp.GaussianProcess(RBF(0.7, 1.1), X).expand([2])
    points = X[:3], X[3:7]
    params = approximation.start(prior, points[: len(approximation._sets())])
    params = {name: param.value for name, param in params.items()}
    K = np.asarray(RBF(0.7, 1.1)(X[:3])) + JITTER * 0.7 * np.eye(3)
    sqrt = {
        "full": np.broadcast_to(np.eye(3), (2, 3, 3)),
        "unwhitened": np.broadcast_to(np.linalg.cholesky(K), (2, 3, 3)),
        "diagonal": np.ones((2, 3)),
        "coupled": np.eye(6),
    }[expected]
    assert_allclose(params["qu_sqrt"], 0.1 * sqrt, rtol=1e-10, atol=1e-12)
    assert not np.any(params["qu_mu"])


@pytest.mark.slow
@pytest.mark.parametrize("prior_block", [False, True])
def test_groups_of_rows_are_drawn_with_their_joint_covariance(prior_block):
    rng = np.random.default_rng(0)
    prior = sgp.GaussianProcess(RBF(np.array([1.0, 0.5]), 0.8), X)
    mus, sqrts = rng.normal(size=(2, 2, 3)), np.tril(rng.normal(size=(2, 2, 3, 3)))
    blocks = Block(mus[0], sqrts[0]), Block(mus[1], None if prior_block else sqrts[1])
    q = sgp.SparsePosterior(prior, (X[:3], X[3:6] + 0.1), BlockGaussian(blocks))
    q = q.drawn_together(4)
    units = jnp.broadcast_to(jnp.eye(8)[:, None], (8, 2, 8))
    L = jax.vmap(q.place)(units) - q.mean  # [nodes, 2, N]
    covariance = jnp.einsum("sqi,sqj->qij", L, L)
    same = np.kron(np.eye(2), np.ones((4, 4)))
    # Apart by the jitter of the factor.
    assert_allclose(covariance, same * q.covariance_matrix, atol=1e-7)
    alone = q.drawn_together(1).place(units[0])
    assert_allclose(alone, q.mean + units[0] * q.variance**0.5, rtol=1e-12)
    with pytest.raises(ValueError, match=r"nodes of the shape \(2, 8\), got \(2, 1\)"):
        q.place(jnp.ones((2, 1)))


def weighted_patches(joint):
    """f is a linear function of an inner layer's patches."""

    def model(images, y=None):
        h = sgp.convolutional_layer(
            "h", RBF(1.0, 3.0), images, 1, 2, mean=None, joint_patches=joint
        )
        gp = sgp.GaussianProcess(Linear(1.0), h.reshape(len(h), -1))
        likelihood(numpyro.sample("f", gp), y)

    return model


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_correlations_of_patches_are_in_the_bound_or_left_out(joint):
    """f = w' h with w and the four patches h of an image Gaussian: by dense algebra."""
    images = jnp.asarray(np.random.default_rng(4).normal(size=(3, 3, 3)))
    y = jnp.array([0.5, -1.0, 0.3])
    model = weighted_patches(joint)
    patches = np.asarray(extract_patches(images.reshape(3, 9), (3, 3), 2).reshape(-1, 4))
    options = {"h": sgp.SVGP(inducing=patches[:3]), "f": sgp.SVGP(inducing=np.eye(4))}
    guide = sgp.AutoSparseGP(model, options)
    guide.setup(images, y)
    w, mu = np.array([0.4, 0.3, 0.2, 0.3]), np.array([0.3, -0.5, 0.8])
    params = {
        "h_auto_Z": patches[:3],
        "h_auto_qu_mu": jnp.asarray(mu)[None],
        "h_auto_qu_sqrt": 0.5 * jnp.eye(3)[None],
        "f_auto_Z": jnp.eye(4),
        "f_auto_qu_mu": jnp.asarray(w),
        "f_auto_qu_sqrt": 0.1 * jnp.eye(4),
    }
    K = rbf(patches[:3], patches[:3], 1.0, 3.0) + JITTER * np.eye(3)
    A = np.linalg.solve(np.linalg.cholesky(K), rbf(patches[:3], patches, 1.0, 3.0))
    mean = (A.T @ mu).reshape(3, 4)
    S = rbf(patches, patches, 1.0, 3.0) - 0.75 * A.T @ A
    blocks = np.stack([S[i : i + 4, i : i + 4] for i in (0, 4, 8)])
    correlations = blocks * (1 - np.eye(4))
    if not joint:
        blocks = blocks - correlations
    second = mean[:, :, None] * mean[:, None, :] + blocks  # E[h h']
    ww = np.outer(w, w) + 0.01 * np.eye(4)
    squares = y**2 - 2 * y * (mean @ w) + np.einsum("nij,ij->n", second, ww)
    ll = -0.5 * np.log(2 * np.pi * NOISE**2) - squares / (2 * NOISE**2)
    kl_h = 0.5 * (3 * 0.25 + mu @ mu - 3) - 3 * np.log(0.5)
    kl_f = 0.5 * (4 * 0.01 + w @ w - 4) - 4 * np.log(0.1)
    expected = np.sum(ll) - kl_h - kl_f
    num = 20_000
    found = -loss(model, guide, params, images, y, sgp.MonteCarlo(num))
    # The spread of one draw is estimated from 2000; five standard errors.
    few = sgp.TraceGP_ELBO(sgp.MonteCarlo(20)).loss
    draws = jax.vmap(lambda key: few(key, params, model, guide, images, y))(
        random.split(random.key(1), 20)
    )
    error = 5 * np.std(draws) * np.sqrt(20 / num) * 1.3
    assert abs(found - expected) < error
    # The wrong choice would be further off than that.
    assert error < 0.5 * abs(np.einsum("nij,ij->", correlations, ww)) / (2 * NOISE**2)
    with pytest.raises(ValueError, match="combines several rows.*MonteCarlo"):
        loss(model, guide, params, images, y, sgp.GaussHermite(5))
    rule = sgp.TraceGP_ELBO()
    value = -rule.loss(random.key(0), params, model, guide, images, y)
    assert abs(value - expected) < 5 * np.std(draws) * np.sqrt(2) * 1.3


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, True])
def test_a_mean_that_combines_patches_is_no_likelihood_that_ties_rows(chosen):
    """Two image-valued layers: the filters of the second sum values of the first."""

    def model(images, y=None):
        h = sgp.convolutional_layer("h", RBF(), images, 1, 2)
        if chosen:
            h = sgp.convolutional_layer("g", RBF(), h, 1, 2)
        else:
            total = numpyro.sample("g", sgp.GaussianProcess(RBF(), X[:3])).cumsum()
            h = h + total[:, None, None, None]
        table = h.reshape(len(h), -1)
        likelihood(numpyro.sample("f", sgp.GaussianProcess(RBF(), table)), y)

    images = jnp.asarray(np.random.default_rng(4).normal(size=(3, 4, 4)))
    guide = sgp.AutoSparseGP(model, sgp.SVGP(2))
    guide.setup(images, Y[:3])
    assert guide.couples_rows is not chosen  # g's running sum ties rows all the same
    assert guide._setup.coupling.combines


@pytest.mark.slow
def test_draws_of_layers_are_independent_of_those_of_other_latents():
    def model(X, y=None):
        a = numpyro.sample("a", dist.LogNormal(0.0, 1.0))
        b = numpyro.sample("b", dist.LogNormal(0.0, 1.0))
        h = sgp.layer("h", RBF(a, 1.0), X, 1, mean=None)
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(b, 1.0), h))
        likelihood(f, y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(2), AutoNormal)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO(sgp.MonteCarlo(1)))
    params = svi.get_params(svi.init(random.key(0), X, Y))

    def draw(key):
        q = guide.posterior(params, X, rng_key=key)
        h, f = q["h"], q["f"]
        noise = (f.prior.X[0, 0] - h.mean[0, 0]) / jnp.sqrt(h.variance[0, 0])
        return jnp.stack([h.prior.kernel.variance, f.prior.kernel.variance, noise])

    a, b, noise = jax.vmap(draw)(random.split(random.key(0), 400)).T
    # Five standard errors of a correlation of 400 independent pairs.
    for latent in (jnp.log(a), jnp.log(b)):
        assert abs(np.corrcoef(latent, noise)[0, 1]) < 5 / np.sqrt(400)
    assert_allclose([noise.mean(), noise.std()], [0.0, 1.0], atol=0.25)


@pytest.mark.slow
def test_a_layer_that_feeds_a_mean_is_integrated_too():
    def model(X, y=None):
        f1 = numpyro.sample("f1", sgp.GaussianProcess(RBF(), X))
        gp = sgp.GaussianProcess(RBF(1e-6), X, mean=lambda X: f1)
        likelihood(numpyro.sample("f2", gp), y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, Y)
    names = guide.parameter_names()
    start = guide.setup_state()["initial"]
    params = {names[s][k]: v for s, p in start.items() for k, v in p.items()}
    found = sgp.log_predictive_density(guide, params, X, Y, num_draws=1000)["y"]
    expected = dist.Normal(0.0, np.sqrt(1.0 + NOISE**2)).log_prob(Y)
    # 1000 draws of densities whose spread is about 1.5 times their mean.
    assert_allclose(found, expected, atol=5 * 1.5 / np.sqrt(1000))


def filters_by_convolution(images, weights, shape, stride):
    kernel = weights.reshape(-1, *shape)  # OHWI
    dims = ("NHWC", "OHWI", "NHWC")
    return lax.conv_general_dilated(
        images, kernel, (stride, stride), "VALID", dimension_numbers=dims
    )


@pytest.mark.slow
def test_a_convolutional_layer_is_a_gp_of_patches_by_hand():
    images = jnp.asarray(np.random.default_rng(1).normal(size=(3, 6, 4, 2)))
    mean = random_filters((3, 2, 2), 4, seed=5)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        h = sgp.convolutional_layer("h", RBF(), images, 4, (3, 2), seed=5)
    gp = trace["h"]["fn"]
    assert gp.batch_shape == (4,) and gp.event_shape == (3 * 4 * 3,)
    patches = extract_patches(images.reshape(3, -1), (6, 4, 2), (3, 2))
    assert_allclose(gp.X, patches.reshape(-1, 12))
    filtered = filters_by_convolution(images, mean.weights, (3, 2, 2), 1)
    assert h.shape == filtered.shape == (3, 4, 3, 4)
    expected = jnp.moveaxis(gp.mean.reshape(4, 3, 4, 3), 0, -1)
    assert_allclose(expected, filtered, atol=1e-12)
    values = trace["h"]["value"].reshape(4, 3, 4, 3)
    assert_allclose(jnp.moveaxis(values, 0, -1), h)


def deep_classes(joint=False):
    def model(X, y=None):
        h = sgp.convolutional_layer(
            "h", RBF(0.5, 2.0), X, 2, 3, stride=2, joint_patches=joint
        )
        kernel = Convolutional(RBF(1.0, 2.0), h.shape[1:], 2)
        gp = sgp.GaussianProcess(kernel, h.reshape(len(h), -1)).expand([3])
        f = numpyro.sample("f", gp)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", RobustMax(f), obs=y)

    return model


LAST = sgp.SOLVEGP(3, 2, sgp.InducingPatches("kmeans"))


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_a_deep_convolutional_gp_trains_and_predicts(joint):
    rng = np.random.default_rng(2)
    y = np.arange(12) % 3
    X = jnp.asarray(rng.normal(size=(12, 7, 7)) * 0.3)
    X = X.at[:, 1:6, 1:6].add(y[:, None, None] * 1.0)
    model = deep_classes(joint)
    inner = sgp.SVGP(3, initial_scale=1e-3)
    guide = sgp.AutoSparseGP(model, {"h": inner, "f": LAST})
    svi = SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO(sgp.MonteCarlo(1)))
    result = svi.run(random.key(0), 60, X, y, progress_bar=False)
    assert result.losses[-10:].mean() < 0.6 * result.losses[:5].mean()
    assert result.params["h_auto_Z"].shape == (3, 9)
    assert result.params["f_auto_O"].shape == (2, 2 * 2 * 2)
    density = sgp.log_predictive_density(guide, result.params, X, y, num_draws=3)["y"]
    assert density.shape == (12,) and density.mean() > np.log(1 / 3)


@pytest.mark.slow
def test_the_posterior_of_a_convolutional_layer_moves_with_the_image():
    rng = np.random.default_rng(2)
    images = jnp.zeros((2, 9, 9)).at[:, 1:4, 1:4].set(rng.normal(size=(2, 3, 3)))
    q = BlockGaussian((Block(rng.normal(size=(2, 4)), None),))
    Z = jnp.asarray(rng.normal(size=(4, 9)))

    def mean(images):
        def layer(images):
            sgp.convolutional_layer("h", RBF(0.5, 2.0), images, 2, 3, stride=2)

        prior = traced(layer, images)["h"]["fn"]
        return sgp.SparsePosterior(prior, (Z,), q).mean.reshape(2, 2, 4, 4)

    moved = mean(jnp.roll(images, 2, axis=2))
    assert_allclose(moved[..., 1:], mean(images)[..., :-1], atol=1e-10)
    assert np.max(np.abs(moved - mean(images))) > 0.01


@pytest.mark.slow
def test_memory_of_a_step_is_that_of_the_batch():
    """The largest temporary memory of the compiled step does not grow with the data."""

    def model(X, y, batch_size=4):
        data = numpyro.plate("data", len(X), subsample_size=batch_size)
        with data as rows:
            X_batch, y_batch = X[rows], y[rows]
        gp = sgp.GaussianProcess(Convolutional(RBF(1.0, 2.0), (7, 7), 3), X_batch)
        f = numpyro.sample("f", gp.expand([3]))
        with data:
            numpyro.sample("y", RobustMax(f), obs=y_batch)

    X = jnp.asarray(np.random.default_rng(0).normal(size=(40, 49)))
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3, sgp.InducingPatches("random")))
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO(sgp.MonteCarlo(1)))
    state = svi.init(random.key(0), X, jnp.arange(40) % 3)
    used = []
    for num in (40, 400):
        data = jax.ShapeDtypeStruct((num, 49), X.dtype), jax.ShapeDtypeStruct((num,), int)
        compiled = jax.jit(svi.update).lower(state, *data).compile()
        used.append(compiled.memory_analysis().temp_size_in_bytes)
    # Drawing a minibatch sorts N random numbers; nothing else depends on N.
    assert used[1] - used[0] <= 400 * 8 * 8, used


def test_means_of_layers():
    table = np.random.default_rng(0).normal(size=(30, 4)) * [3.0, 1.0, 0.3, 2.0] + 5.0
    assert_allclose(identity(table), table.T)
    found = np.asarray(pca(table, 2)(table))
    centred = table - table.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)
    axes = axes * np.sign(largest)  # the largest loading is positive
    assert_allclose(found, axes[:2] @ centred.T, atol=1e-10)
    with jax.enable_x64(False):  # without a word of the precision that NumPy has
        assert pca(table, 2).weights.dtype == jnp.float32
    filters = random_filters((3, 3, 2), 4)
    limit = np.sqrt(6 / (9 * 2 + 9 * 4))
    assert 0.8 * limit < np.abs(filters.weights).max() <= limit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sgp.layer("h", RBF(), X[:, 0]),
            r"'h' needs inputs of shape .*X\[",
        ),
        (
            lambda: sgp.layer("h", RBF(), X, 5),
            "'h' has 5 functions of 2 columns.*None",
        ),
        (lambda: sgp.layer("h", RBF(), X, 1), "'h' has 1 functions of 2 columns.*pca"),
        (lambda: sgp.layer("h", RBF(), X, 2, mean="pca"), "mean is 'identity'"),
        (
            lambda: sgp.layer("h", RBF(np.ones(3)), X, 2, mean=None),
            r"'h' is to have 2 functions, but its kernel is for \(3,\)",
        ),
        (
            lambda: sgp.convolutional_layer("h", RBF(), X, 2, 3),
            r"'h' needs images of shape \(N, H, W, C\), got \(8, 2\)",
        ),
        (
            lambda: sgp.convolutional_layer("h", RBF(), jnp.ones((2, 6, 6)), 2, 3, 2),
            "'h': Patches of 3 x 3 pixels with stride 2 do not cover",
        ),
        (
            lambda: sgp.convolutional_layer("h", RBF(), jnp.ones((2, 6, 6)), 2, 7),
            "'h': Patches of 7 x 7 pixels",
        ),
        (
            lambda: sgp.convolutional_layer(
                "h", RBF(), jnp.ones((2, 6, 6)), 2, 3, mean="linear"
            ),
            "mean is 'filters'",
        ),
        (lambda: sgp.layer("h", RBF(), X, 0, mean=None), "'h' is to have 0 functions"),
        (
            lambda: sgp.layer("h", RBF(), X, 2, mean=pca(np.c_[X, X + X**2], 2)),
            "'h': A Linear mean .* is for inputs with 4 columns, but X has 2",
        ),
        (
            lambda: sgp.layer("h", RBF(), X, 3, mean=pca(X, 2)),
            r"'h' is to have 3 functions, but its mean is for a batch of \(2,\)",
        ),
        (lambda: random_filters((3, 3), 2), r"patch_shape \(h, w, C\)"),
        (lambda: random_filters((3, 3, 1), 0), "all positive"),
        (lambda: pca(X, 3), "from 1 to D components"),
        (lambda: pca(X.at[0, 0].set(np.nan), 1), "finite"),
        (lambda: jax.jit(lambda X: pca(X, 1)(X))(X), "traced.*outside the model"),
    ],
)
def test_bad_input_of_layers_is_told(make, message):
    with pytest.raises(ValueError, match=message):
        with numpyro.handlers.seed(rng_seed=0):
            make()


def test_channels_that_disagree_are_told():
    def model(X, y=None):
        h = sgp.convolutional_layer("h", RBF(), X, 2, 3)
        kernel = Convolutional(RBF(), (4, 4, 3), 2)
        gp = sgp.GaussianProcess(kernel, h.reshape(len(h), -1)).expand([3])
        numpyro.sample("y", RobustMax(numpyro.sample("f", gp)).to_event(1), obs=y)

    guide = sgp.AutoSparseGP(model, {"h": sgp.SVGP(2), "f": LAST})
    with pytest.raises(ValueError, match=r"with 3 channel\(s\) are rows of 48 .*\(2, 32\)"):
        guide.setup(jnp.ones((2, 6, 6)), np.array([0, 1]))
    points = sgp.SVGP(inducing=np.ones((2, 18)))
    guide = sgp.AutoSparseGP(deep_classes(), {"h": points, "f": LAST})
    with pytest.raises(ValueError, match="'h': .*18 columns, but the inputs X have 9"):
        guide.setup(jnp.ones((2, 7, 7)), np.array([0, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_scale": 0.0}, "initial_scale must be a positive number"),
        ({"initial_scale": True}, "initial_scale must be a positive number"),
        ({"initial_scale": 0.1, "covariance": "dual"}, "leave initial_scale=1"),
    ],
)
def test_bad_scales_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        sgp.SVGP(3, **options)


@pytest.mark.parametrize(
    ("approximation", "size", "error", "message"),
    [
        (sgp.SVGP(3), 3, ValueError, "'f': joint_rows=3 does not divide 8 rows"),
        (sgp.MixtureSVGP(3), 4, NotImplementedError, "'f': Rows of a MixtureGaussian"),
        (
            sgp.SVGP(3, covariance="coupled"),
            4,
            NotImplementedError,
            "'f': Rows of a CoupledGaussian",
        ),
        (sgp.SVGP(3, tight="scalar"), 4, ValueError, "'f' draws groups of 4.*tight='none'"),
    ],
)
def test_groups_that_cannot_be_drawn_are_told(approximation, size, error, message):
    def model(X, y=None):
        gp = sgp.GaussianProcess(RBF(), X)
        likelihood(numpyro.sample("f", gp, infer={"joint_rows": size}), y)

    guide = sgp.AutoSparseGP(model, approximation)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO(sgp.MonteCarlo(2)))
    with pytest.raises(error, match=message):
        svi.evaluate(svi.init(random.key(0), X, Y), X, Y)


def test_layers_in_plates_are_told():
    with numpyro.handlers.seed(rng_seed=0), numpyro.plate("functions", 3):
        with pytest.raises(ValueError, match="'h' is inside a plate"):
            sgp.layer("h", RBF(), X[:, :1])


def test_the_number_of_draws_is_checked(two_layers):
    with pytest.raises(
        ValueError, match="num_draws must be a whole number, 1 or more, got 0"
    ):
        sgp.log_predictive_density(*two_layers, X, Y, num_draws=0)

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

import numpyro_sgp as sgp
from numpyro_sgp.kernels import RBF, Convolutional, extract_patches
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
    guide = sgp.AutoSparseGP(model, approximation)
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    return guide, disturbed(svi.get_params(svi.init(random.key(0), X, y)))


def loss(model, guide, params, X, y, rule, key=7):
    elbo = sgp.TraceGP_ELBO(rule)
    return float(elbo.loss(random.key(key), params, model, guide, X, y))


@pytest.mark.parametrize(
    "approximation",
    [
        {"h": sgp.SOLVEGP(3, 2, initial_scale=0.1), "f": sgp.SVGP(3, whiten=False)},
        {"h": sgp.InverseFreeSVGP(3), "f": sgp.ODVGP(2, 3)},
    ],
)
def test_a_deep_gp_by_the_helper_is_one_by_hand(approximation):
    guide, params = start(by_layers, approximation, X, Y)
    other, also = start(by_hand, approximation, X, Y)
    assert params.keys() == also.keys()
    for name in params:
        assert_allclose(params[name], also[name], rtol=1e-12)
    rule = sgp.MonteCarlo(3)
    expected = loss(by_hand, other, params, X, Y, rule)
    assert_allclose(loss(by_layers, guide, params, X, Y, rule), expected, rtol=1e-12)


def test_one_layer_is_the_shallow_model():
    def shallow(X, y=None):
        likelihood(numpyro.sample("f", sgp.GaussianProcess(RBF(), X)), y)

    def deep(X, y=None):
        likelihood(sgp.layer("f", RBF(), X, 1, mean=None)[:, 0], y)

    guide, params = start(deep, sgp.SOLVEGP(3, 2), X, Y)
    other, _ = start(shallow, sgp.SOLVEGP(3, 2), X, Y)
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


def test_the_bound_of_two_layers_is_the_integral_by_numpy():
    guide, params = start(by_layers, sgp.SVGP(3), X, Y)
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


def test_predictions_are_mixtures_over_draws_of_the_inner_layers():
    guide, params = start(by_layers, sgp.SVGP(3), X, Y)
    num = 4000
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
    assert_allclose(draws.std(axis=0), means.std(axis=0), rtol=0.15)
    without = guide.posterior(params, X)["f"].mean[0]
    zero = dense_two_layers(params, X, np.zeros((2, 1)))[0]
    assert_allclose(without, zero, rtol=1e-6, atol=1e-8)


def test_inner_inducing_points_start_among_the_values_of_the_layer_before():
    wide = jnp.asarray(np.random.default_rng(0).normal(size=(40, 5)) @ np.diag(range(5)))
    mean = pca(wide, 2)

    def model(X, y=None):
        h = sgp.layer("h", RBF(1.0, 3.0), X, 2, mean=mean)
        likelihood(sgp.layer("f", RBF(), h, 1, mean=None)[:, 0], y)

    inner = sgp.SVGP(10, initial_scale=1e-5)
    guide = sgp.AutoSparseGP(model, {"h": inner, "f": sgp.SVGP(40, "random")})
    guide.setup(wide, wide[:, 0])
    params = guide._initial
    assert_allclose(params["h"]["qu_sqrt"], 1e-5 * np.broadcast_to(np.eye(10), (2, 10, 10)))
    Z = params["f"]["Z"]
    components = np.asarray(mean(wide)).T
    away = np.linalg.norm(Z[:, None] - components[None], axis=-1)
    assert np.max(away.min(axis=0)) < 1e-3 and np.max(away.min(axis=1)) < 1e-3


@pytest.mark.parametrize("option", [sgp.SVGP, sgp.ODVGP, sgp.SOLVEGP])
def test_groups_of_rows_are_drawn_with_their_joint_covariance(option):
    sizes = (3,) if option is sgp.SVGP else (3, 2)

    def model(X, y=None):
        kernel = RBF(np.array([1.0, 0.5]), 0.8)
        gp = sgp.GaussianProcess(kernel, X)
        f = numpyro.sample("f", gp, infer={"joint_rows": 4})
        likelihood(f.sum(axis=0), y)

    guide, params = start(model, option(*sizes), X, Y)
    q = guide.posterior(params, X)["f"]
    assert q.joint_rows == 4
    units = jnp.broadcast_to(jnp.eye(8)[:, None], (8, 2, 8))
    L = jax.vmap(q.place)(units) - q.mean  # [nodes, 2, N]
    covariance = jnp.einsum("sqi,sqj->qij", L, L)
    same = np.kron(np.eye(2), np.ones((4, 4)))
    # Apart by the jitter of the factor.
    assert_allclose(covariance, same * q.covariance_matrix, atol=1e-7)


def filters_by_convolution(images, weights, shape, stride):
    kernel = weights.reshape(-1, *shape)  # OHWI
    dims = ("NHWC", "OHWI", "NHWC")
    return lax.conv_general_dilated(
        images, kernel, (stride, stride), "VALID", dimension_numbers=dims
    )


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


@pytest.mark.parametrize("joint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_deep_convolutional_gp_trains_and_predicts(joint):
    rng = np.random.default_rng(2)
    y = np.arange(12) % 3
    X = jnp.asarray(rng.normal(size=(12, 7, 7)) * 0.3)
    X = X.at[:, 1:6, 1:6].add(y[:, None, None] * 1.0)
    model = deep_classes(joint)
    inner = sgp.SOLVEGP(3, 3, initial_scale=1e-3)
    guide = sgp.AutoSparseGP(model, {"h": inner, "f": LAST})
    svi = SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO(sgp.MonteCarlo(1)))
    result = svi.run(random.key(0), 60, X, y, progress_bar=False)
    assert result.losses[-10:].mean() < 0.6 * result.losses[:5].mean()
    assert result.params["h_auto_Z"].shape == (3, 9)
    assert result.params["f_auto_O"].shape == (2, 2 * 2 * 2)
    density = sgp.log_predictive_density(guide, result.params, X, y, num_draws=3)["y"]
    assert density.shape == (12,) and density.mean() > np.log(1 / 3)


def test_the_posterior_of_a_convolutional_layer_moves_with_the_image():
    model = deep_classes()
    rng = np.random.default_rng(2)
    X = jnp.zeros((2, 9, 9)).at[:, 1:4, 1:4].set(rng.normal(size=(2, 3, 3)))
    guide, params = start(model, {"h": sgp.SVGP(4), "f": LAST}, X, np.array([0, 1]))
    mean = guide.posterior(params, X)["h"].mean.reshape(2, 2, 4, 4)
    moved = guide.posterior(params, jnp.roll(X, 2, axis=2))["h"].mean.reshape(2, 2, 4, 4)
    assert_allclose(moved[..., 1:], mean[..., :-1], atol=1e-10)
    assert np.max(np.abs(moved - mean)) > 0.01


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
    assert_allclose(identity(4)(table), table.T)
    found = np.asarray(pca(table, 2)(table))
    centred = table - table.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    assert_allclose(np.abs(found), np.abs(axes[:2] @ centred.T), atol=1e-10)
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
            r"'h' is to have 2 functions, but its kernel and mean .* batch of \(3,\)",
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
        (sgp.MixtureSVGP(3), 4, NotImplementedError, "'f': Rows of MixturePosterior"),
        (
            sgp.SVGP(3, covariance="coupled"),
            4,
            NotImplementedError,
            "'f': Rows of CoupledPosterior",
        ),
    ],
)
def test_groups_that_cannot_be_drawn_are_told(approximation, size, error, message):
    def model(X, y=None):
        gp = sgp.GaussianProcess(RBF(), X)
        likelihood(numpyro.sample("f", gp, infer={"joint_rows": size}), y)

    guide = sgp.AutoSparseGP(model, approximation)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    with pytest.raises(error, match=message):
        svi.init(random.key(0), X, Y)

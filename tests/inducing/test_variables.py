"""Inter-domain inducing variables: covariances by kind, and a kind of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp import (
    FourierFeatures,
    InducingPatches,
    InducingVariables,
    SmoothedPoints,
)
from numpyro_sgp.inducing.covariances import (
    cross_covariance,
    inducing_covariance,
    union,
)
from numpyro_sgp.kernels import RBF, Convolutional, Linear, Matern32
from tests.kernels.test_convolutional import CASES, problem


class Slopes(InducingVariables):
    """Derivatives f'(z) of functions of one variable."""

    def covariance(self, kernel, other):
        def k(x, y):
            return kernel(x[None, None], y[None, None])[0, 0]

        if isinstance(other, Slopes):
            k, points = jax.grad(jax.grad(k), argnums=1), other.points
        elif isinstance(other, InducingVariables):
            return NotImplemented
        else:
            k, points = jax.grad(k), other
        rows = jax.vmap(k, (None, 0))
        return jax.vmap(rows, (0, None))(self.points[:, 0], points[:, 0])


@jax.jit
def joint_covariance(kernel, inducing, X):
    """Of inducing variables and f(X)."""
    Kuu = inducing_covariance(kernel, inducing)
    Kuf = cross_covariance(kernel, inducing, X)
    Kff = jnp.broadcast_to(kernel(X), (*Kuf.shape[:-2], len(X), len(X)))
    top = jnp.concatenate([Kuu, Kuf], axis=-1)
    bottom = jnp.concatenate([jnp.swapaxes(Kuf, -1, -2), Kff], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def check_joint_covariance(kernel, inducing, X):
    """It is symmetric and positive semi-definite."""
    joint = np.asarray(joint_covariance(kernel, inducing, X))
    assert_allclose(joint, np.swapaxes(joint, -1, -2), atol=1e-12)
    assert np.linalg.eigvalsh(joint).min() >= -1e-9
    return joint


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_patches_have_the_covariances_of_double_sums(case):
    kernel, X, Z, Kff, Kuf, Kuu = problem(case)
    sets = (InducingPatches(Z[:2]), InducingPatches(Z[2:]))
    joint = check_joint_covariance(kernel, sets, X)
    assert_allclose(joint, np.block([[Kuu, Kuf], [Kuf.T, Kff]]), rtol=1e-10, atol=1e-12)
    joint = check_joint_covariance(2.0 * kernel + Linear(), sets, X)
    assert_allclose(joint[:3], 2 * np.hstack([Kuu, Kuf]), rtol=1e-10, atol=1e-12)


def test_patches_and_images_have_a_joint_covariance():
    kernel, X, Z, *_ = problem("plain")
    more = jnp.stack([Z, 2 * Z])  # of two latent functions
    sets = (InducingPatches(Z[:2]), X[:1] + 0.1, InducingPatches(more))
    joint = check_joint_covariance(kernel, sets, X)
    assert joint.shape == (2, 10, 10)


def test_smoothed_points_are_integrals():
    kernel = RBF(1.3, 0.7) + 2.0 * RBF(0.5, 2.0)
    Z = SmoothedPoints(jnp.array([[0.2], [1.5]]), width=0.4)
    X = jnp.array([[-0.3], [0.9]])

    def k(x, y):
        d = (x - y) ** 2
        return 1.3 * np.exp(-0.5 * d / 0.49) + np.exp(-0.5 * d / 4.0)

    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    places = np.asarray(Z.points) + 0.4 * nodes  # [2, S]
    cross = np.einsum("s,msn->mn", weights, k(places[..., None], X[:, 0]))
    square = k(places[:, None, :, None], places[None, :, None, :])
    square = np.einsum("s,t,mnst->mn", weights, weights, square)
    assert_allclose(cross_covariance(kernel, (Z,), X), cross, rtol=1e-10)
    assert_allclose(inducing_covariance(kernel, (Z,)), square, rtol=1e-10)


def test_smoothed_points_in_two_dimensions_are_those_of_each():
    kernel = RBF(jnp.array([1.0, 2.0]), jnp.array([[0.5, 1.0], [2.0, 0.7]]))
    rng = np.random.default_rng(0)
    Z, X = jnp.asarray(rng.normal(size=(3, 2))), jnp.asarray(rng.normal(size=(4, 2)))
    width = jnp.array([0.3, 0.6])
    K = cross_covariance(kernel, (SmoothedPoints(Z, width),), X)
    for q in range(2):
        expected = kernel.variance[q]
        for d in range(2):
            one = RBF(1.0, kernel.lengthscale[q, d])
            points = SmoothedPoints(Z[:, d : d + 1], width[d])
            expected = expected * cross_covariance(one, (points,), X[:, d : d + 1])
        assert_allclose(K[q], expected, rtol=1e-12)
    point = SmoothedPoints(Z, 0.0)
    assert_allclose(inducing_covariance(kernel, (point,)), kernel(Z), rtol=1e-12)
    assert_allclose(cross_covariance(kernel, (point,), X), kernel(Z, X), rtol=1e-12)


@pytest.mark.slow
def test_fourier_features_are_integrals():
    """By a quadrature in two dimensions, against batches of kernels and sums of them."""
    kernel = RBF(jnp.array([1.3, 0.4]), jnp.array([[0.7, 1.2], [2.0, 0.5]]))
    points = jnp.array([[0.0, 0.0, 0.0], [1.5, -0.5, 0.4], [0.3, 2.0, -1.0]])
    width, centre = jnp.array([0.8, 0.5]), jnp.array([0.2, -0.3])
    Z = FourierFeatures(points, width, centre)
    X = jnp.array([[-0.3, 0.4], [0.9, 0.0]])

    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    weights = np.outer(weights, weights).ravel() / weights.sum() ** 2
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    waves = weights * np.cos(points[:, :2] @ (grid * width).T + points[:, 2:])  # [M, S]
    places = jnp.asarray(grid * width + centre)
    cross = np.einsum("ms,qsn->qmn", waves, kernel(places, X))
    square = np.einsum("ms,qst,nt->qmn", waves, kernel(places), waves)
    assert_allclose(cross_covariance(kernel, (Z,), X), cross, atol=1e-9)
    assert_allclose(inducing_covariance(kernel, (Z,)), square, atol=1e-9)
    both = kernel + 2.0 * RBF(0.5, 3.0)
    one = inducing_covariance(RBF(0.5, 3.0), (Z,))
    assert_allclose(inducing_covariance(both, (Z,)), square + 2 * one, atol=1e-9)
    check_joint_covariance(kernel, (Z, X[:1] + 0.1), X)

    # Of another window: by quadrature in each.
    other = FourierFeatures(points[:2] + 0.3, jnp.array([0.4, 0.6]), 0.1)
    more = weights * np.cos(
        other.points[:, :2] @ (grid * other.width).T + other.points[:, 2:]
    )
    far = kernel(places, jnp.asarray(grid * other.width + other.centre))
    square = np.einsum("ms,qst,nt->qmn", waves, far, more)
    joint = check_joint_covariance(kernel, (Z, other), X)
    assert_allclose(joint[:, :3, 3:5], square, atol=1e-8)


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_fourier_features_without_phases_are_told(columns):
    Z = FourierFeatures(jnp.ones((3, columns)))
    with pytest.raises(ValueError, match=f"2 columns have points with 3.*{columns}"):
        cross_covariance(RBF(), (Z,), jnp.ones((4, 2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FourierFeatures("kmeans", width=0.0),
        lambda: FourierFeatures("kmeans", centre=np.nan),
        lambda: SmoothedPoints("kmeans", width=-1.0),
        lambda: SmoothedPoints("kmeans", width=np.ones((2, 2))),
    ],
)
def test_windows_that_are_none_are_told(make):
    with pytest.raises(ValueError, match="width must be positive"):
        make()


@pytest.mark.parametrize(
    "kind, name",
    [(SmoothedPoints, "width"), (FourierFeatures, "width"), (FourierFeatures, "centre")],
)
def test_windows_of_other_columns_are_told(kind, name):
    """A centre of two columns made a "bound" of one column exceed the evidence."""
    Z = kind(jnp.ones((3, 2)), **{name: jnp.ones(3)})
    columns = Z.shape[-1] - (kind is FourierFeatures)
    with pytest.raises(ValueError, match=rf"{name} must .* shape \({columns},\)"):
        inducing_covariance(RBF(), (Z,))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [SmoothedPoints, FourierFeatures])
def test_scales_of_functions_are_not_lengthscales_of_columns(kind):
    """Two scales beside two columns: as many functions as columns."""
    scales, one = jnp.array([1.0, 3.0]), RBF(1.0, jnp.array([0.7, 1.2]))
    Z = kind(jnp.ones((3, 2 + (kind is FourierFeatures))), 0.5)
    X = jnp.array([[0.3, -0.2], [1.0, 0.4]])
    for covariance in (inducing_covariance, lambda *a: cross_covariance(*a, X)):
        expected = scales[:, None, None] * covariance(one, (Z,))
        assert_allclose(covariance(one * scales, (Z,)), expected, rtol=1e-12)
    rows = Z.with_points("kmeans").candidates(one * scales, X, np.random.default_rng(0))
    assert rows.shape[-1] == Z.shape[-1]


@pytest.mark.slow
def test_fourier_features_without_frequency_are_smoothed_points():
    kernel, X = RBF(1.3, 0.7), jnp.linspace(-1.0, 1.0, 5)[:, None]
    Z = FourierFeatures(jnp.zeros((1, 2)), 0.6, 0.4)
    point = SmoothedPoints(jnp.full((1, 1), 0.4), 0.6)
    for covariance in (inducing_covariance, lambda *a: cross_covariance(*a, X)):
        assert_allclose(covariance(kernel, (Z,)), covariance(kernel, (point,)), rtol=1e-12)


@pytest.mark.parametrize("kind", [SmoothedPoints, Slopes])
def test_other_kinds_and_points_have_a_joint_covariance(kind):
    X = jnp.linspace(-1, 1, 5)[:, None]
    Z, O = jnp.array([[-0.5], [0.8]]), jnp.array([[0.1], [0.3]])
    kernel = RBF(1.3, 0.7)
    check_joint_covariance(kernel, (kind(Z), O), X)
    check_joint_covariance(kernel, (O, kind(Z), kind(O + 0.05)), X)
    batch = RBF(jnp.ones(2), jnp.array([0.5, 1.0]))
    if kind is SmoothedPoints:
        check_joint_covariance(batch, (kind(Z), O), X)


def test_a_kind_of_ones_own_has_its_closed_form():
    Z, X = jnp.array([[0.3], [1.0]]), jnp.array([[0.0], [2.0]])
    K = RBF(1.0, 0.5)(Z, X)
    expected = -(Z - X.T) / 0.25 * K
    assert_allclose(cross_covariance(RBF(1.0, 0.5), (Slopes(Z),), X), expected)
    assert_allclose(jnp.diag(inducing_covariance(RBF(1.0, 0.5), (Slopes(Z),))), 4.0)


def test_they_are_pytrees():
    Z = SmoothedPoints(jnp.zeros((2, 1)), 0.5)
    assert [np.shape(leaf) for leaf in jax.tree.leaves(Z)] == [(2, 1), ()]
    K = jax.jit(lambda Z: inducing_covariance(RBF(), (Z,)))(Z)
    assert_allclose(K, inducing_covariance(RBF(), (Z,)))
    assert Slopes([[1.0]]).shape == (1, 1)
    assert InducingPatches("random").with_points(jnp.ones((2, 9))).dtype == float


def test_errors_name_the_kinds_and_the_mend():
    kernel = Convolutional(RBF(), (4, 4), 3)
    Z, X = InducingPatches(jnp.ones((2, 9))), jnp.ones((1, 16))
    with pytest.raises(TypeError, match="need a kernels.Convolutional.*is a RBF with 0"):
        inducing_covariance(RBF(), (Z,))
    with pytest.raises(TypeError, match="with 2"):
        cross_covariance(kernel + kernel, (Z,), X)
    with pytest.raises(ValueError, match=r"have the shape \(M, 9\)"):
        inducing_covariance(kernel, (InducingPatches(jnp.ones((2, 8))),))
    with pytest.raises(ValueError, match="places must be"):
        InducingPatches("random", places="middle")
    smooth = SmoothedPoints(jnp.ones((2, 1)))
    with pytest.raises(TypeError, match="closed forms for RBF"):
        inducing_covariance(Matern32(), (smooth,))
    with pytest.raises(TypeError, match="SmoothedPoints and Slopes under RBF"):
        inducing_covariance(RBF(), (smooth, Slopes(jnp.ones((1, 1)))))
    with pytest.raises(NotImplementedError, match="not SmoothedPoints"):
        union((smooth,))
    with pytest.raises(NotImplementedError, match="does not define covariance"):
        inducing_covariance(RBF(), (InducingVariables(jnp.ones((1, 1))),))

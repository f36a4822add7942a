"""The convolutional kernel against double sums over patches."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp.kernels import RBF, Convolutional, Linear, Matern32, extract_patches
from tests.helpers import rbf

CASES = {
    "plain": ((6, 5), (3, 2), 1, False, False),
    "all": ((7, 5, 2), 3, 2, True, True),
}


def patches_by_hand(image, shape, size, stride):
    """Patches of one flat image and their places, by loops."""
    H, W, C = (*shape, 1)[:3]
    h, w = (size, size) if isinstance(size, int) else size
    image = np.asarray(image).reshape(H, W, C)
    places = [
        (i, j) for i in range(0, H - h + 1, stride) for j in range(0, W - w + 1, stride)
    ]
    patches = [image[i : i + h, j : j + w].ravel() for i, j in places]
    return np.array(patches), np.array(places, float)


def matern32(X1, X2, lengthscale):
    """Matern 3/2 matrix, independent of the package."""
    r = np.sqrt(3 * np.sum((X1[:, None] - X2[None]) ** 2, axis=-1)) / lengthscale
    return (1 + r) * np.exp(-r)


def problem(case, num_images=4, seed=0):
    """A kernel, images, inducing patches, and the covariances by double sums."""
    shape, size, stride, weighted, located = CASES[case]
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_images, int(np.prod(shape))))
    found = [patches_by_hand(x, shape, size, stride) for x in X]
    places = found[0][1]
    weights = rng.normal(size=len(places)) if weighted else np.ones(len(places))
    kernel = Convolutional(
        RBF(1.3, 1.7),
        shape,
        size,
        stride,
        weights=jnp.asarray(weights) if weighted else None,
        locations=Matern32(1.0, 3.0) if located else None,
    )
    dim = found[0][0].shape[1]
    Z = rng.normal(size=(3, dim + 2 * located))

    def patch_kernel(patch1, place1, patch2, place2):
        K = rbf(patch1, patch2, 1.3, 1.7)
        return K * matern32(place1, place2, 3.0) if located else K

    P = len(places)
    Kff = np.zeros((len(X), len(X)))
    Kuf = np.zeros((len(Z), len(X)))
    for n, (patches, _) in enumerate(found):
        for m, (others, _) in enumerate(found):
            K = patch_kernel(patches, places, others, places)
            Kff[n, m] = weights @ K @ weights / P**2
        Kuf[:, n] = patch_kernel(Z[:, :dim], Z[:, dim:], patches, places) @ weights / P
    Kuu = patch_kernel(Z[:, :dim], Z[:, dim:], Z[:, :dim], Z[:, dim:])
    return kernel, jnp.asarray(X), jnp.asarray(Z), Kff, Kuf, Kuu


@pytest.mark.parametrize("case", CASES)
def test_covariances_are_double_sums_over_patches(case):
    kernel, X, Z, Kff, Kuf, Kuu = problem(case)
    found = jax.jit(
        lambda k, X, Z: (
            k(X),
            k(X[:1], X),
            k.diag(X),
            k.patch_image_covariance(Z, X),
            k.patch_covariance(Z, Z),
        )
    )(kernel, X, Z)
    expected = Kff, Kff[:1], np.diag(Kff), Kuf, Kuu
    for a, b in zip(found, expected, strict=True):
        assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_patches_are_those_of_loops():
    X = np.random.default_rng(0).normal(size=(2, 3, 7 * 5 * 2))
    patches = extract_patches(X, (7, 5, 2), 3, 2)
    assert patches.shape == (2, 3, 6, 18)
    expected, places = patches_by_hand(X[1, 2], (7, 5, 2), 3, 2)
    assert_allclose(patches[1, 2], expected)
    assert_allclose(Convolutional(RBF(), (7, 5, 2), 3, 2).places, places)


@pytest.mark.slow
def test_chunks_change_nothing():
    kernel, X, Z, *_ = problem("all", num_images=3)
    options = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)}

    def scalar(weights, batch_size):
        new = Convolutional(**{**options, "weights": weights, "batch_size": batch_size})
        found = new.diag(X), new.patch_image_covariance(Z, X), new(X)
        return sum(jnp.sum(jnp.sin(K)) for K in found), found

    @partial(jax.jit, static_argnums=1)
    def all_of(weights, batch_size):
        return jax.value_and_grad(scalar, has_aux=True)(weights, batch_size)

    for batch_size in (1, 2):
        found, whole = all_of(kernel.weights, batch_size), all_of(kernel.weights, 9)
        jax.tree.map(
            lambda a, b: assert_allclose(a, b, rtol=1e-10, atol=1e-14), found, whole
        )


@pytest.mark.slow
def test_gradients_are_finite_differences():
    kernel, X, Z, *_ = problem("all", num_images=2)

    def scalar(kernel, Z, X):
        K = kernel.patch_image_covariance(Z, X)
        return jnp.sum(jnp.sin(K)) + jnp.sum(kernel.diag(X) ** 2)

    leaves, tree = jax.tree.flatten((kernel, Z, X))
    leaves = [jnp.asarray(leaf, float) for leaf in leaves]
    rng = np.random.default_rng(0)
    step = [jnp.asarray(rng.normal(size=leaf.shape)) for leaf in leaves]

    @jax.jit
    def along(t):
        moved = [a + t * b for a, b in zip(leaves, step, strict=True)]
        return scalar(*jax.tree.unflatten(tree, moved))

    slope = jax.grad(along)(0.0)
    assert_allclose(slope, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-6)
    blank = jax.jit(jax.grad(scalar, argnums=2))(kernel, Z, jnp.zeros_like(X))
    assert np.isfinite(blank).all()


def test_a_translated_image_has_the_same_f_without_places_only():
    image = np.zeros((8, 8))
    image[2:4, 2:4] = np.random.default_rng(0).normal(size=(2, 2))
    X = jnp.asarray(np.stack([image, np.roll(image, (1, 2), (0, 1))]).reshape(2, 64))
    K = Convolutional(RBF(), (8, 8), 3)(X)
    assert_allclose(K, np.full((2, 2), K[0, 0]), rtol=1e-12)
    K = Convolutional(RBF(), (8, 8), 3, locations=Matern32(1.0, 2.0))(X)
    assert K[0, 0] + K[1, 1] - 2 * K[0, 1] > 1e-6


def test_batches_of_kernels_weights_and_images():
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.normal(size=(3, 16)))
    weights = jnp.asarray(rng.normal(size=(2, 4)))
    lengthscales = jnp.array([0.5, 2.0])
    covariances = jax.jit(lambda k, X, Z: (k(X), k.diag(X), k.patch_image_covariance(Z, X)))
    many = Convolutional(RBF(jnp.ones(2), lengthscales), (4, 4), 3, weights=weights)
    Z = jnp.asarray(rng.normal(size=(2, 5, 9)))
    assert many.batch_shape == (2,)
    stack = jnp.stack([X, 2 * X])
    found = covariances(many, X, Z)
    for q in range(2):
        one = Convolutional(RBF(1.0, lengthscales[q]), (4, 4), 3, weights=weights[q])
        expected = covariances(one, X, Z[q])
        for a, b in zip(found, expected, strict=True):
            assert_allclose(a[q], b, rtol=1e-12)
    double = covariances(one, 2 * X, Z[1])
    for a, b in zip(covariances(one, stack, Z[1]), double, strict=True):
        assert_allclose(a[1], b, rtol=1e-12)


@pytest.mark.slow
def test_sums_products_jit_and_vmap():
    kernel, X, *_ = problem("all")
    both = jax.jit(lambda k, X: ((2.0 * k + Linear()).diag(X), k.diag(X)))(kernel, X)
    assert_allclose(both[0], 2 * both[1] + Linear().diag(X), rtol=1e-12)
    rows = jax.jit(jax.vmap(lambda x: kernel.diag(x[None])[0]))(X)
    assert_allclose(rows, both[1], rtol=1e-12)
    assert kernel.diag(jnp.ones((1, 70), int)).dtype == float


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((6, 6), 7), "sizes that do for 6 pixels"),
        (((6, 6), 3, 2), r"sizes that do for 6 pixels are \[2, 4, 6\]"),
        (((6, 6), 2, 4), "do not cover"),
        (((6,), 3), "image_shape as"),
        (((6, 6), 3.0), "positive Python ints"),
        (((6, 6), 3, 0), "positive Python ints"),
    ],
)
def test_patches_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Convolutional(RBF(), *arguments)
    with pytest.raises(ValueError, match=message):
        extract_patches(np.zeros((1, 36)), *arguments)


def test_arrays_of_other_shapes_are_refused():
    kernel = Convolutional(RBF(), (6, 6), 3, locations=Matern32())
    with pytest.raises(ValueError, match=r"rows of 36 numbers.*got \(2, 35\)"):
        kernel.diag(jnp.zeros((2, 35)))
    with pytest.raises(ValueError, match=r"its place have the shape \(M, 11\)"):
        kernel.patch_covariance(jnp.zeros((2, 9)), jnp.zeros((2, 9)))
    with pytest.raises(ValueError, match="weights has shape"):
        Convolutional(RBF(), (6, 6), 3, weights=jnp.ones(9))
    with pytest.raises(ValueError, match="batch_size"):
        Convolutional(RBF(), (6, 6), 3, batch_size=0)
    with pytest.raises(ValueError, match="broadcast"):
        Convolutional(RBF(jnp.ones(2)), (6, 6), 3, weights=jnp.ones((3, 16)))

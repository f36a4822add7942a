"""Every kernel: values, batches, shapes, gradients, dtypes and memory."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import numpyro_sgp as sgp
from numpyro_sgp.kernels import (
    RBF,
    Constant,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    Scaled,
    Sum,
    White,
)
from numpyro_sgp.kernels.distances import safe_sqrt, squared_distances

ELL = np.array([0.7, 1.3, 2.1])
PERIOD = np.array([1.7, 2.3, 3.1])


def points(N, D=3, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(N, D)).astype(dtype)


# One compilation is quicker than one for every operation.
compiled = jax.jit(lambda kernel, X1, X2: kernel(X1, X2))


def dist(x, y, ell):
    return math.sqrt(sum(((x[d] - y[d]) / ell[d]) ** 2 for d in range(len(x))))


def dot(x, y, ell):
    return sum(x[d] * y[d] / ell[d] ** 2 for d in range(len(x)))


def sines(x, y, ell, p):
    angle = [math.pi * (x[d] - y[d]) / p[d] for d in range(len(x))]
    return sum((math.sin(angle[d]) / ell[d]) ** 2 for d in range(len(x)))


# Name: kernel, and the same function of two points and of their rows in plain Python.
CASES = {
    "RBF": (
        RBF(1.5, ELL),
        lambda x, y: 1.5 * math.exp(-(dist(x, y, ELL) ** 2) / 2),
    ),
    "RBF isotropic": (
        RBF(1.5, 0.8),
        lambda x, y: 1.5 * math.exp(-(dist(x, y, [0.8] * 3) ** 2) / 2),
    ),
    "Matern12": (
        Matern12(1.5, ELL),
        lambda x, y: 1.5 * math.exp(-dist(x, y, ELL)),
    ),
    "Matern32": (
        Matern32(1.5, ELL),
        lambda x, y: (
            1.5
            * (1 + math.sqrt(3) * dist(x, y, ELL))
            * math.exp(-math.sqrt(3) * dist(x, y, ELL))
        ),
    ),
    "Matern52": (
        Matern52(1.5, ELL),
        lambda x, y: (
            1.5
            * (1 + math.sqrt(5) * dist(x, y, ELL) + 5 / 3 * dist(x, y, ELL) ** 2)
            * math.exp(-math.sqrt(5) * dist(x, y, ELL))
        ),
    ),
    "RationalQuadratic": (
        RationalQuadratic(1.5, ELL, alpha=0.6),
        lambda x, y: 1.5 * (1 + dist(x, y, ELL) ** 2 / 1.2) ** -0.6,
    ),
    "Periodic": (
        Periodic(1.5, ELL, PERIOD),
        lambda x, y: 1.5 * math.exp(-2 * sines(x, y, ELL, PERIOD)),
    ),
    "Linear": (Linear(1.5, ELL), lambda x, y: 1.5 * dot(x, y, ELL)),
    "Polynomial": (
        Polynomial(1.5, ELL, offset=0.4, degree=3),
        lambda x, y: 1.5 * (dot(x, y, ELL) + 0.4) ** 3,
    ),
    "Constant": (Constant(1.5), lambda x, y: 1.5),
    "White": (White(1.5), lambda x, y: 1.5 * (x is y)),
    "sum": (
        RBF(1.5, ELL) + Linear(0.5),
        lambda x, y: (
            1.5 * math.exp(-(dist(x, y, ELL) ** 2) / 2) + 0.5 * dot(x, y, [1.0] * 3)
        ),
    ),
    "product": (
        Matern12(1.5, ELL) * Linear(0.5),
        lambda x, y: 0.75 * math.exp(-dist(x, y, ELL)) * dot(x, y, [1.0] * 3),
    ),
    "scaled": (
        2.5 * Matern12(1.5, ELL),
        lambda x, y: 3.75 * math.exp(-dist(x, y, ELL)),
    ),
    "columns": (
        Matern12(1.5, ELL[:2], active_dims=(2, 0)) + White(0.1),
        lambda x, y: (
            1.5 * math.exp(-dist([x[2], x[0]], [y[2], y[0]], ELL[:2])) + 0.1 * (x is y)
        ),
    ),
}
STATIONARY = [
    RBF(1.5, 0.7),
    Matern12(1.5, 0.7),
    Matern32(1.5, 0.7),
    Matern52(1.5, 0.7),
    RationalQuadratic(1.5, 0.7, 0.6),
    Periodic(1.5, 0.7, 1.9),
]

over_cases = pytest.mark.parametrize(
    ("kernel", "function"), CASES.values(), ids=CASES.keys()
)
over_kernels = pytest.mark.parametrize(
    "kernel", [kernel for kernel, _ in CASES.values()], ids=CASES.keys()
)
over_stationary = pytest.mark.parametrize(
    "kernel", STATIONARY, ids=lambda k: type(k).__name__
)


@pytest.mark.quick(6)
@over_cases
def test_matrix_is_the_double_loop(kernel, function):
    X1, X2 = points(4), points(3, seed=1)
    expected = [[function(x, y) for y in list(X2)] for x in list(X1)]
    assert_allclose(kernel(X1, X2), expected, rtol=1e-11, atol=1e-14)
    rows = list(X1)
    same = [[function(x, y) for y in rows] for x in rows]
    if "White" not in repr(kernel):  # which tells two arrays of the same rows apart
        assert_allclose(kernel(X1, X1.copy()), same, rtol=1e-11, atol=1e-14)
    assert_allclose(kernel(X1), same, rtol=1e-11, atol=1e-14)
    assert_array_equal(kernel(X1, X1), kernel(X1))


@over_kernels
def test_diag_is_the_diagonal_of_the_matrix(kernel):
    X = points(4)
    assert_allclose(kernel.diag(X), np.diag(kernel(X)), rtol=1e-14)


@pytest.mark.quick(4)
@over_stationary
@pytest.mark.parametrize("D", [1, 20])
def test_variance_on_the_diagonal_is_exact(kernel, D):
    # Far from the origin, where |x|² + |y|² - 2 x·y is all rounding.
    X = 1e3 + points(5, D, dtype=np.float32)
    assert_array_equal(np.diag(kernel(X)), np.float32(1.5))
    assert_array_equal(kernel.diag(X), np.float32(1.5))
    assert_array_equal(np.diag(kernel(X, X.copy())), np.float32(1.5))


def test_far_from_the_origin_distances_keep_their_digits():
    X1, X2 = points(4), points(3, seed=1)
    near = RBF(1.0, ELL)(X1, X2)
    assert_allclose(RBF(1.0, ELL)(X1 + 1e6, X2 + 1e6), near, rtol=1e-8)


def test_an_outlier_costs_the_others_no_digits_of_their_derivatives():
    X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    X[-1] = 1e4

    def distances(length):
        return squared_distances(jnp.asarray(X), lengthscale=length)

    found = jax.jacfwd(distances)(jnp.float32(1.0))[:-1, :-1]
    apart = X[:-1, None].astype(float) - X[:-1].astype(float)
    # Sums of squares near ten: a hundred units in the last place of single precision.
    assert_allclose(found, -2.0 * (apart**2).sum(-1), atol=1e-4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [0, 2, 300, 2000], ids=str)
@pytest.mark.parametrize("same", [True, False], ids=["itself", "another"])
def test_few_near_points_of_many_columns_are_differenced_alone(number, same):
    """None, some, more than at once and too many pairs 1e-3 apart, of 260 columns."""
    rng = np.random.default_rng(0)
    X1, X2 = (rng.normal(size=(size, 260)).astype(np.float32) for size in (200, 180))
    side = int(np.ceil(np.sqrt(number)))
    for X in (X1, X2)[: 2 - same]:
        X[:side] = X1[-1] + 1e-3 * rng.normal(size=(side, 260))
    X2 = X1 if same else X2
    length = rng.uniform(0.5, 2.0, 260).astype(np.float32)
    scaled1, scaled2 = (X.astype(float) / length for X in (X1, X2))
    expected = ((scaled1[:, None] - scaled2) ** 2).sum(-1)

    def distances(length):
        given = jnp.asarray(X1), None if same else jnp.asarray(X2), length
        return squared_distances(*given, steep=True)

    # 260 squares in single precision, and products whose norms are ten times as large.
    for find in (distances, jax.jit(distances)):
        assert_allclose(find(jnp.asarray(length)), expected, rtol=1e-5)
    batch = jnp.stack([jnp.asarray(length), 2 * jnp.asarray(length)])
    assert_allclose(jax.vmap(distances)(batch)[1], expected / 4, rtol=1e-5)


@pytest.mark.quick(3)
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (63, 1), (64, 1), (8, None), (0, 3)])
def test_few_points_of_many_columns_have_distances(shape):
    rng = np.random.default_rng(0)
    X1 = rng.normal(size=(shape[0], 260))
    X2 = None
    if shape[1] is not None:
        X2 = 1e-3 * rng.normal(size=(shape[1], 260)) + X1[:1].sum(axis=0)
    expected = ((X1[:, None] - (X1 if X2 is None else X2)) ** 2).sum(-1)
    given = jnp.asarray(X1), None if X2 is None else jnp.asarray(X2)
    assert_allclose(squared_distances(*given), expected, rtol=1e-12)


@pytest.mark.parametrize("lengths", [[1.0], [1.0, 1.1]], ids=["one", "each"])
@pytest.mark.parametrize("spread", [3.0, 1e3])
def test_slopes_by_lengthscales_keep_their_digits_between_near_points(lengths, spread):
    """Pairs 0.01 apart, over a thousand lengthscales too: as a network of stations is."""
    rng = np.random.default_rng(0)
    sites = rng.uniform(0.0, spread, (40, 2))
    X = np.concatenate([sites, sites + 0.01 * rng.normal(size=sites.shape)])
    X = X.astype(np.float32)
    # As slopes of Matern12 weigh them.
    apart = X[:, None].astype(float) - X.astype(float)
    weight = np.exp(-(r := np.sqrt((apart**2).sum(-1)))) / np.where(r > 0, r, np.inf)
    length = np.asarray(lengths)
    expected = -2.0 * np.einsum("nm,nmd->d", weight, apart**2)
    expected = expected / length**3 if len(length) == 2 else expected.sum(keepdims=True)

    def weighed(length):
        r2 = squared_distances(jnp.asarray(X), lengthscale=length)
        return jnp.sum(weight.astype(np.float32) * r2)

    found = jax.grad(weighed)(jnp.asarray(length, jnp.float32))
    # Sums of 6,400 terms of one sign in single precision.
    assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_slopes_of_matern12_by_lengthscales_are_those_of_double_precision():
    """Of pairs 1e-4 apart, a lengthscale for each column, under little noise."""
    rng = np.random.default_rng(0)
    sites = rng.normal(size=(60, 2))
    X = np.concatenate([sites, sites + 1e-4 * rng.normal(size=sites.shape)])
    X = X.astype(np.float32)
    y = np.sin(2.0 * X[:, 0]) + 0.2 * X[:, 1] + 0.05 * rng.normal(size=120)

    def slope(dtype):
        def density(length):
            kernel = Matern12(jnp.asarray(1.0, dtype), length)
            prior = sgp.MarginalGP(kernel, jnp.asarray(X, dtype), 0.05)
            return prior.log_prob(jnp.asarray(y, dtype))

        return jax.grad(density)(jnp.array([1.0, 3.0], dtype))

    with jax.enable_x64(False):
        found = slope(np.float32)
    # Rounding of 6e-8, times what K + noise is of the noise, and a sum over 120 rows.
    assert_allclose(found, slope(np.float64), rtol=0.05)


@pytest.mark.quick(4)
@over_stationary
@pytest.mark.parametrize("D", [2, 20])
def test_kernels_of_a_batch_with_a_lengthscale_each_are_those_one_by_one(kernel, D):
    """Values and slopes by all, where distances are computed once for the batch."""
    X1, X2 = points(4, D), points(3, D, seed=1)
    X2[0] = X1[0]
    lengths, weights = jnp.array([0.5, 2.0, 1e3]), points(4, 3, seed=2)

    def total(length, X1, X2):
        one = replace(kernel, variance=jnp.ones(length.shape), lengthscale=length)
        return jnp.sum(weights * one(X1, X2), axis=(-1, -2)).sum()

    slopes = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    value, (by_length, by_1, by_2) = slopes(lengths, X1, X2)
    each = [slopes(length, X1, X2) for length in lengths]
    assert_allclose(value, sum(v for v, _ in each), rtol=1e-12)
    assert_allclose(by_length, [s[0] for _, s in each], rtol=1e-9, atol=1e-12)
    assert_allclose(by_1, sum(s[1] for _, s in each), rtol=1e-9, atol=1e-12)
    assert_allclose(by_2, sum(s[2] for _, s in each), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [RBF, Matern12, Matern32])
def test_an_infinite_lengthscale_has_finite_slopes(kind):
    """In several columns; derivatives forwards were 0 / 0."""
    X = jnp.array([[0.0, 1.0], [2.0, 3.0], [0.5, -1.0]])
    slopes = jax.jvp(kind(1.0, jnp.inf), (X,), (jnp.ones_like(X),))[1]
    assert_array_equal(slopes, np.zeros((3, 3)))
    assert jax.grad(lambda scale: kind(1.0, scale)(X).sum())(jnp.inf) == 0.0


def test_a_batch_of_infinite_lengthscales_is_constant():
    kernel = RBF(np.ones(2), np.full(2, np.inf))
    assert_array_equal(kernel(points(3), points(4, seed=1)), np.ones((2, 3, 4)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("D", [2, 20])
def test_a_lengthscale_next_to_nothing_leaves_the_others_of_a_batch(D):
    X = points(4, D, dtype=np.float32)

    def both(length):
        return RBF(np.ones(2, np.float32), length)(X)[1]

    length = jnp.array([1e-20, 1.0], jnp.float32)
    assert_allclose(both(length), RBF()(X), rtol=1e-5)
    slopes = jax.jacfwd(both)(length)[..., 1]
    assert_allclose(
        slopes, jax.jacfwd(lambda s: RBF(1.0, s)(X))(jnp.float32(1.0)), rtol=1e-4
    )


@pytest.mark.parametrize("kind", [RBF, Matern32, Matern52, RationalQuadratic])
def test_smooth_kernels_of_near_points_are_right_by_products_too(kind):
    """Pairs that (nearly) coincide, of norms that are little beside the lengthscale."""
    X1 = points(40, 30)
    X2 = X1 + 1e-3 * points(40, 30, seed=1)
    X2[0] = X1[0]
    kernel = kind(1.0, 8.0)
    found = kernel(X1.astype(np.float32), X2.astype(np.float32))
    assert found.dtype == np.float32
    # Sums of squared norms up to four, whose rounding of 6e-8 each is halved.
    assert_allclose(found, kernel(X1, X2), atol=1e-6)


def test_a_kernel_of_ones_own_may_have_a_steep_slope():
    class Exponential(sgp.kernels.Stationary):
        def _of_r2(self, r2):
            return jnp.exp(-safe_sqrt(r2))

    X1 = points(40, 30)
    X2 = X1 + 1e-3 * points(40, 30, seed=1)
    X1, X2 = X1.astype(np.float32), X2.astype(np.float32)
    expected = Matern12(1.0, 8.0)(X1.astype(float), X2.astype(float))
    assert_allclose(Exponential(1.0, 8.0)(X1, X2), expected, rtol=1e-6)


def test_no_points_have_no_slopes_by_lengthscales():
    def total(length):
        return jnp.sum(squared_distances(jnp.zeros((0, 2)), jnp.ones((3, 2)), length))

    assert_array_equal(jax.grad(total)(jnp.ones(2)), np.zeros(2))


# With unit variance: function of the scaled distance, and the slope over the distance.
PROFILES = {
    RBF: (lambda r: math.exp(-(r**2) / 2), lambda r: -math.exp(-(r**2) / 2)),
    Matern12: (lambda r: math.exp(-r), lambda r: -math.exp(-r) / r),
    Matern32: (
        lambda r: (1 + math.sqrt(3) * r) * math.exp(-math.sqrt(3) * r),
        lambda r: -3 * math.exp(-math.sqrt(3) * r),
    ),
    Matern52: (
        lambda r: (1 + math.sqrt(5) * r + 5 / 3 * r**2) * math.exp(-math.sqrt(5) * r),
        lambda r: -5 / 3 * (1 + math.sqrt(5) * r) * math.exp(-math.sqrt(5) * r),
    ),
    RationalQuadratic: (lambda r: 1 / (1 + r**2 / 2), lambda r: -1 / (1 + r**2 / 2) ** 2),
}


def near_pairs(seed, D, dtype, shift=0.0):
    """Two sets of points: equal rows, rows a few roundings apart, and others."""
    X = (shift + 3 * points(9, D, seed)).astype(dtype)
    near = X[3:6] * (1 + 4 * np.finfo(dtype).eps).astype(dtype)
    return X, np.concatenate([X[:3], near, X[6:] + dtype(0.5)])


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32 - 1),
    D=st.sampled_from([2, 9, 20]),
    shift=st.sampled_from([0.0, 2000.0, 1e4]),
    ell=st.floats(0.5, 20.0),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_covariance_is_right_to_rounding_where_points_almost_coincide(
    seed, D, shift, ell, dtype
):
    X1, X2 = near_pairs(seed, D, dtype, shift)
    scales, period = (ell * points(D, 1, 1)[:, 0] ** 2 + ell).astype(dtype), dtype(1.9)
    difference = X1.astype(float)[:, None, :] - X2.astype(float)
    inputs = jnp.asarray(X1), jnp.asarray(X2)
    atol = {np.float32: 1e-6, np.float64: 1e-14}[dtype]
    for cls, (profile, _) in PROFILES.items():
        r = np.sqrt(np.sum((difference / scales.astype(float)) ** 2, axis=-1))
        expected = np.vectorize(profile)(r)
        found = compiled(cls(dtype(1.0), scales), *inputs)
        assert found.dtype == dtype
        assert_allclose(found, expected, rtol=0, atol=atol, err_msg=cls.__name__)
    # IEEE's remainder has no rounding, so that the reference has all digits.
    turned = np.vectorize(math.remainder)(difference, float(period)) / float(period)
    sines = np.sin(np.pi * turned) / scales.astype(float)
    found = compiled(Periodic(dtype(1.0), scales, period), *inputs)
    assert_allclose(found, np.exp(-2 * np.sum(sines**2, -1)), rtol=0, atol=2 * atol)


@pytest.mark.quick(5)
@pytest.mark.parametrize("cls", PROFILES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("D", [2, 20])
def test_slope_is_right_where_points_almost_coincide(cls, D):
    x = points(3, D)
    z = x + 1e-6 * points(3, D, seed=1)
    z[2] = x[2]

    def covariances(x):
        return jnp.diagonal(cls(1.0, 0.7)(x, jnp.asarray(z)))

    slope = jax.jit(jax.grad(lambda x: jnp.sum(covariances(x))))(jnp.asarray(x))
    scaled = (x - z) / 0.7
    expected = [
        PROFILES[cls][1](math.sqrt(sum(d**2))) * d / 0.7 if d.any() else d for d in scaled
    ]
    # The points' own rounding is 1e-10 of their distance.
    assert_allclose(slope, expected, rtol=1e-7, atol=1e-14)


@pytest.mark.slow
def test_many_columns_take_differences_only_where_points_are_near():
    def products(kernel, X1, X2):
        text = str(jax.make_jaxpr(lambda *a: kernel(*a))(X1, X2))
        return text.count("dot_general"), text.count("cond[")

    # One of them turns columns of points to rows, for the differences.
    assert products(RBF(), points(3, 16), points(4, 16)) == (1, 0)
    assert products(RBF(), points(3, 17), points(4, 17)) == (2, 1)
    # Chunks of columns, the first of them shorter.
    for D in (17, 32, 50):
        X1, X2 = near_pairs(0, D, np.float64)
        difference = (X1[:, None] - X2) / 2.0
        expected = np.exp(-np.sqrt(np.sum(difference**2, axis=-1)))
        for rows in (slice(None), slice(6, None)):  # with near pairs, and without
            found = compiled(Matern12(1.0, 2.0), X1[rows], X2[rows])
            assert_allclose(found, expected[rows, rows], rtol=0, atol=1e-14)


@given(
    seed=st.integers(0, 2**32 - 1),
    ell=st.floats(0.05, 20.0),
    D=st.sampled_from([1, 3]),
    which=st.sampled_from(range(len(STATIONARY))),
)
def test_matrix_is_positive_semidefinite(seed, ell, D, which):
    X = points(12, D, seed)
    kernel = type(STATIONARY[which])(1.5, ell) + Linear(0.5) * Polynomial(0.3, ell)
    K = np.asarray(kernel(X))
    assert_array_equal(K, K.T)
    values = np.linalg.eigvalsh(K)
    assert values[0] >= -1e-13 * values[-1]


@pytest.mark.parametrize("kernel", [RBF(), Matern12()])
def test_no_points_give_no_columns_and_no_nan_in_the_gradient(kernel):
    X, none = jnp.asarray(points(3)), jnp.zeros((0, 3))
    assert kernel(X, none).shape == (3, 0)
    assert kernel(none, X).shape == (0, 3)
    assert kernel(none).shape == (0, 0)
    grad = jax.grad(lambda X: kernel(X, none).sum())(X)
    assert_array_equal(grad, 0.0)


def test_rational_quadratic_tends_to_rbf_in_float32():
    X = points(4, dtype=np.float32)
    K = RationalQuadratic(1.0, 0.7, alpha=1e8)(X)
    assert_allclose(K, RBF(1.0, 0.7)(X), rtol=1e-5)


def test_periodic_repeats_after_its_period():
    X1, X2 = points(4), points(3, seed=1)
    kernel = Periodic(1.5, ELL, PERIOD)
    assert_allclose(kernel(X1 + 2 * PERIOD, X2), kernel(X1, X2), rtol=1e-11)


def test_white_tells_points_apart_by_row():
    X = np.ones((3, 2))
    assert_array_equal(White(0.5)(X), 0.5 * np.eye(3))
    assert_array_equal(White(0.5)(X, X), 0.5 * np.eye(3))
    assert_array_equal(White(0.5)(X, X.copy()), np.zeros((3, 3)))
    # Through a composite, None and the same object must still mean the same points.
    k = (White(0.5) + White(0.5)) * (2.0 * White(1.0))
    assert_array_equal(k(X), 2.0 * np.eye(3))


@pytest.mark.quick(6)
@pytest.mark.parametrize("cls", [RBF, Periodic, Linear])
@pytest.mark.parametrize(
    "shape", [(), (2,), (1,), (2, 3), (2, 1), (1, 3)], ids=lambda s: f"ell{s}"
)
def test_batch_of_kernels_is_each_kernel_by_itself(cls, shape):
    variance = np.array([0.5, 1.5])
    lengthscale = 0.5 + np.random.default_rng(0).uniform(size=shape)
    X1, X2 = points(4), points(3, seed=1)
    kernel = cls(variance, lengthscale)
    assert kernel.batch_shape == (2,)
    per_column = lengthscale.ndim == 2
    each = np.broadcast_to(lengthscale, (2, 3) if per_column else (2,))
    single = [cls(v, ell) for v, ell in zip(variance, each, strict=True)]
    expected = np.stack([compiled(k, X1, X2) for k in single])
    assert_allclose(compiled(kernel, X1, X2), expected, rtol=1e-10, atol=1e-14)
    expected = np.stack([k.diag(X1) for k in single])
    assert_allclose(kernel.diag(X1), expected, rtol=1e-13)


@pytest.mark.parametrize(
    "make",
    [
        lambda v, p: RationalQuadratic(v, 0.7, alpha=p),
        lambda v, p: Periodic(v, 0.7, period=p),
        lambda v, p: Polynomial(v, 0.7, offset=p),
    ],
    ids=["alpha", "period", "offset"],
)
def test_third_hyperparameter_follows_the_batch(make):
    v, p, X = np.array([0.5, 1.5]), np.array([0.6, 1.1]), points(4)
    expected = [make(*one)(X) for one in zip(v, p, strict=True)]
    assert_allclose(make(v, p)(X), np.stack(expected), rtol=1e-12)
    expected = [make(*one).diag(X) for one in zip(v, p, strict=True)]
    assert_allclose(make(v, p).diag(X), np.stack(expected), rtol=1e-12)


def test_period_for_each_column_and_kernel():
    v, X = np.array([0.5, 1.5]), points(4)
    p = np.stack([PERIOD, PERIOD[::-1]])
    expected = np.stack([Periodic(v[q], 0.7, p[q])(X) for q in range(2)])
    assert_allclose(Periodic(v, 0.7, p)(X), expected, rtol=1e-12)


def test_scalar_variance_with_vector_lengthscale_is_ard():
    X = points(4)
    assert RBF(1.0, ELL).batch_shape == ()
    assert_allclose(RBF(1.0, ELL)(X), RBF(1.0, 1.0)(X / ELL), rtol=1e-12)


def test_two_batch_axes_and_trailing_alignment():
    X, v = points(4), np.arange(1.0, 7.0).reshape(2, 3)
    ell = np.array([0.5, 1.0, 2.0])  # one for each of the last axis of the batch
    K = RBF(v, ell)(X)
    assert K.shape == (2, 3, 4, 4)
    assert_allclose(K[1, 2], RBF(v[1, 2], ell[2])(X), rtol=1e-12)


@pytest.mark.quick(8)
@over_kernels
def test_batches_of_inputs_broadcast(kernel):
    X1, X2 = points(8).reshape(2, 1, 4, 3), points(9, seed=1).reshape(3, 3, 3)

    @jax.jit
    def evaluate(kernel):
        batches = kernel(X1, X2), kernel(X2), kernel.diag(X1)
        return batches, (kernel(X1[1, 0], X2[2]), kernel(X2[2]), kernel.diag(X1[1, 0]))

    (K12, K22, k11), expected = evaluate(kernel)
    assert K12.shape == (2, 3, 4, 3)
    assert k11.shape == (2, 1, 4)
    for K, one in zip([K12[1, 2], K22[2], k11[1, 0]], expected, strict=True):
        assert_allclose(K, one, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "kernel",
    [
        RBF(np.ones(3)),
        Linear(np.ones(3)),
        Constant(np.ones(3)),
        White(np.ones(3)),
        RBF(np.ones(3)) + RBF(np.ones((2, 1))),
        np.ones(3) * RBF() * Linear(np.ones((2, 1))),
    ],
)
def test_batches_of_kernels_and_inputs_broadcast(kernel):
    X1, X2 = points(40).reshape(2, 5, 4, 3)[:, :1], points(3, seed=1)
    batch = np.broadcast_shapes(kernel.batch_shape, (2, 1))
    assert kernel(X1, X2).shape == (*batch, 4, 3)
    assert kernel(X1).shape == (*batch, 4, 4)
    assert kernel.diag(X1).shape == (*batch, 4)


def test_scaling_by_a_batch_makes_a_batch():
    X, scales = points(4), np.array([0.5, 1.5])
    for kernel in [scales * RBF(), RBF() * scales, jnp.asarray(scales) * RBF()]:
        assert isinstance(kernel, Scaled)
        assert kernel.batch_shape == (2,)
        assert_allclose(kernel(X), RBF(scales)(X), rtol=1e-14)
        assert_allclose(kernel.diag(X), RBF(scales).diag(X), rtol=1e-14)
    assert isinstance(np.float64(2.0) * RBF(), Scaled)


def test_builtin_sum_adds_kernels():
    X = points(4)
    total = sum([RBF(), Linear(), Constant(0.5)])
    assert isinstance(total, Sum)
    assert_allclose(total(X), RBF()(X) + Linear()(X) + 0.5, rtol=1e-14)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: RBF(1.0, np.ones(2))(points(4)),
            r"RBF: lengthscale has shape \(2,\), variance \(\) and the inputs 3 .*or "
            r"\(3,\) .*For 2 kernels with one lengthscale each, give variance the "
            r"shape \(2,\) too",
        ),
        (
            lambda: RBF(1.0, np.ones(2)).diag(points(4)),
            r"RBF: lengthscale has shape \(2,\)",
        ),
        (
            lambda: Matern32(np.ones(3), np.ones(2)),
            r"Matern32: lengthscale has shape \(2,\), variance \(3,\); expected "
            r"lengthscale to have the shape \(3,\) .* or \(3, D\)",
        ),
        (
            lambda: RBF(1.0, np.ones((3, 2))),
            r"lengthscale has shape \(3, 2\), variance \(\).* or \(D,\) .*For 3 "
            r"kernels with one lengthscale for each column, give variance the shape "
            r"\(3,\) too",
        ),
        (
            lambda: Linear(np.ones(3), np.ones((2, 3))),
            r"Linear: lengthscale has shape \(2, 3\), variance \(3,\)",
        ),
        (
            lambda: RBF(np.ones(3), np.ones((3, 2)))(points(4)),
            r"RBF: lengthscale has shape \(3, 2\).*\(3, 3\)",
        ),
        (
            lambda: RBF(np.ones(1), np.ones(3)),
            r"RBF: lengthscale has shape \(3,\), variance \(1,\)",
        ),
        (
            lambda: Periodic(1.0, 1.0, np.ones(2))(points(4)),
            r"Periodic: period has shape \(2,\), variance \(\) and the inputs 3",
        ),
        (
            lambda: RationalQuadratic(1.0, 1.0, np.ones(3)),
            r"RationalQuadratic: alpha has shape \(3,\) and variance \(\).*give "
            r"variance the shape \(3,\) too",
        ),
        (
            lambda: Polynomial(np.ones(2), 1.0, np.ones((2, 3))),
            r"Polynomial: offset has shape \(2, 3\) and variance \(2,\)",
        ),
        (
            lambda: Polynomial(degree=0),
            r"Polynomial: degree must be a Python int of at least 1, got 0",
        ),
        (lambda: Polynomial(degree=1.5), r"degree must be a Python int .*got 1\.5"),
        (
            lambda: RBF(active_dims=(0, 3))(points(4)),
            r"RBF: active_dims=\(0, 3\) is out of range for inputs with D=3",
        ),
        (
            lambda: Linear(active_dims=-4).diag(points(4)),
            r"Linear: active_dims=\(-4,\) is out of range for inputs with D=3",
        ),
        (
            lambda: RBF(active_dims=slice(1, None)),
            r"active_dims=slice\(1, None, None\) depends on the number of columns",
        ),
        (lambda: RBF(active_dims=slice(0, -1)), r"non-negative start and stop"),
        (lambda: RBF(active_dims=()), r"active_dims=\(\) selects no column"),
        (lambda: RBF(active_dims=(0.5,)), r"must be column numbers .*got \(0\.5,\)"),
        (lambda: RBF(active_dims=[True, False]), r"must be column numbers"),
        (
            lambda: RBF()(np.ones(4)),
            r"RBF: the inputs have shape \(4,\), .*give X\[:, None\]",
        ),
        (lambda: White()(np.ones(4)), r"White: the inputs have shape \(4,\)"),
        (
            lambda: RBF()(points(4), points(4, D=2)),
            r"same number of columns, got shapes \(4, 3\) and \(4, 2\)",
        ),
        (
            lambda: RBF(np.ones(2)) + RBF(np.ones(3)),
            r"Sum: the batch shapes \(2,\) \(left\) and \(3,\) \(right\)",
        ),
        (
            lambda: RBF(np.ones(2)) * RBF(np.ones(3)),
            r"Product: the batch shapes \(2,\) \(left\) and \(3,\) \(right\)",
        ),
        (
            lambda: np.ones(2) * RBF(np.ones(3)),
            r"Scaled: the batch shapes \(3,\) \(kernel\) and \(2,\) \(scale\)",
        ),
    ],
)
def test_misfit_is_an_error_that_tells_the_mend(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("make", [lambda: RBF() + 2.0, lambda: 2.0 + RBF()])
def test_adding_a_number_is_an_error_that_names_constant(make):
    with pytest.raises(TypeError, match=r"add Constant\(variance\)"):
        make()


@pytest.mark.parametrize("make", [lambda: RBF() + "a", lambda: "a" * RBF()])
def test_composing_with_a_stranger_is_an_error(make):
    with pytest.raises(TypeError, match="unsupported operand|can't multiply"):
        make()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((2, 0), (2, 0)),
        ([0, 1], (0, 1)),
        (slice(1, 3), (1, 2)),
        (slice(2), (0, 1)),
        (slice(0, 3, 2), (0, 2)),
        (range(1, 3), (1, 2)),
        (np.array([1]), (1,)),
        (1, (1,)),
        ((-1,), (-1,)),
    ],
)
def test_active_dims_select_columns(given, kept):
    X1, X2 = points(4), points(3, seed=1)
    ell = ELL[: len(kept)]
    kernel = RBF(1.5, ell, active_dims=given)
    assert kernel.active_dims == kept
    expected = RBF(1.5, ell)(X1[:, list(kept)], X2[:, list(kept)])
    assert_allclose(kernel(X1, X2), expected, rtol=1e-14)
    assert_allclose(
        Linear(1.5, ell, active_dims=given).diag(X1),
        Linear(1.5, ell).diag(X1[:, list(kept)]),
    )


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("kernel", "D"),
    [(kernel, 3) for kernel, _ in CASES.values()] + [(kernel, 1) for kernel in STATIONARY],
    ids=[*CASES, *(f"{type(kernel).__name__} of one column" for kernel in STATIONARY)],
)
def test_gradient_is_finite_at_zero_distance(kernel, D, dtype):
    X = points(3, D, dtype=dtype)
    X = jnp.concatenate([X, X[:2], X[:1]])  # duplicated rows
    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), kernel)
    weights = points(6, 6, seed=3, dtype=dtype)

    @jax.jit
    def grads(kernel, X):
        def loss(kernel, X1, X2):
            return jnp.sum(weights * kernel(X1, X2))

        same = jax.grad(lambda k, X: loss(k, X, X), (0, 1))(kernel, X)
        return same, jax.grad(loss, (0, 1, 2))(kernel, X, X + 0)

    leaves = jax.tree.leaves(grads(kernel, X))
    assert len(leaves) > 4
    for leaf in leaves:
        assert leaf.dtype == dtype
        assert np.all(np.isfinite(leaf))


@over_stationary
@pytest.mark.parametrize("D", [1, 2])
def test_gradient_is_the_difference_quotient(kernel, D):
    X1, X2, h = points(3, D), points(2, D, seed=1), 1e-6
    weights, direction = points(3, 2, seed=2), points(3, D, seed=4)

    @jax.jit
    def loss(X1):
        return jnp.sum(weights * kernel(X1, X2))

    quotient = (loss(X1 + h * direction) - loss(X1 - h * direction)) / (2 * h)
    slope = np.sum(np.asarray(jax.jit(jax.grad(loss))(X1)) * direction)
    assert_allclose(slope, quotient, rtol=1e-7, atol=1e-9)


def test_gradient_through_the_centre_is_complete():
    # X2 moves the centre of both sets; dropping that path must lose nothing.
    kernel, X1, h = RBF(1.5, ELL), points(3), 1e-6
    X2, direction = points(2, seed=1), points(2, seed=4)

    @jax.jit
    def loss(X2):
        return jnp.sum(kernel(X1, X2) ** 2)

    quotient = (loss(X2 + h * direction) - loss(X2 - h * direction)) / (2 * h)
    slope = np.sum(np.asarray(jax.jit(jax.grad(loss))(X2)) * direction)
    assert_allclose(slope, quotient, rtol=1e-7)


@over_kernels
def test_is_a_pytree(kernel):
    X = points(4)
    leaves, structure = jax.tree.flatten(kernel)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(kernel)
    assert_array_equal(again(X), kernel(X))
    assert jax.tree.structure(again) == structure
    # A tree of any leaves has this structure, whatever their shapes.
    for others in [
        [object() for _ in leaves],
        [np.ones(2 + n) for n in range(len(leaves))],
    ]:
        again = jax.tree.unflatten(structure, others)
        assert all(a is b for a, b in zip(jax.tree.leaves(again), others, strict=True))


def test_paths_name_the_hyperparameters():
    paths = jax.tree_util.tree_leaves_with_path(RBF(2.0, 3.0) + Constant(4.0))
    names = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    assert names == {
        ".left.variance": 2.0,
        ".left.lengthscale": 3.0,
        ".right.variance": 4.0,
    }


def test_statics_are_in_the_structure():
    structure = jax.tree.structure
    assert structure(RBF(active_dims=(0,))) != structure(RBF(active_dims=(1,)))
    assert structure(Polynomial(degree=2)) != structure(Polynomial(degree=3))
    assert structure(Polynomial(degree=2)) == structure(Polynomial(2.0, degree=2))


def test_kernels_are_frozen():
    with pytest.raises(AttributeError, match="cannot assign"):
        RBF().variance = 2.0


def test_lists_become_array_leaves():
    kernel = RBF([1.0, 2.0], [[0.5, 0.6, 0.7], [1.0, 1.1, 1.2]])
    assert [leaf.shape for leaf in jax.tree.leaves(kernel)] == [(2,), (2, 3)]


def test_kernel_as_argument_compiles_once():
    traces = []

    @jax.jit
    def matrix(kernel, X):
        traces.append(kernel)
        return kernel(X)

    X = points(4)
    for variance in [1.0, 2.0]:
        kernel = Polynomial(variance, 0.7, degree=3) + RBF(variance, active_dims=1)
        assert_allclose(matrix(kernel, X), kernel(X), rtol=1e-12)
    assert len(traces) == 1


def test_vmap_over_hyperparameters_is_the_batch():
    X, v = points(4), np.array([0.5, 1.5])
    ells = np.stack([ELL, ELL[::-1]])
    stacked = RBF(v, ells)
    expected = stacked(X)
    assert_allclose(jax.jit(jax.vmap(lambda k: k(X)))(stacked), expected, rtol=1e-12)
    built = jax.jit(jax.vmap(lambda v, ell: RBF(v, ell)(X)))(v, ells)
    assert_allclose(built, expected, rtol=1e-12)
    axes = RBF(0, None)
    shared = jax.jit(jax.vmap(lambda k: k(X), in_axes=(axes,)))(RBF(v, 0.7))
    assert_allclose(shared, RBF(v, 0.7)(X), rtol=1e-12)


@over_kernels
def test_float32_inputs_give_float32(kernel):
    kernel = jax.tree.map(
        lambda leaf: leaf.astype(np.float32) if np.ndim(leaf) else float(leaf), kernel
    )
    X1, X2 = points(4, dtype=np.float32), points(3, seed=1, dtype=np.float32)

    def evaluate(kernel, X1, X2):
        return kernel(X1, X2), kernel(X1), kernel.diag(X1)

    def dtypes(*args):
        # The kernel's floats are arguments of a compiled function, and then constants.
        yield from (K.dtype for K in jax.eval_shape(evaluate, kernel, *args))
        yield from (K.dtype for K in jax.eval_shape(partial(evaluate, kernel), *args))

    assert set(dtypes(X1, X2)) == {np.dtype(np.float32)}
    X1, X2 = X1.astype(np.float64), X2.astype(np.float64)
    assert set(dtypes(X1, X2)) == {np.dtype(np.float64)}


def test_integer_inputs_are_made_floating():
    X = np.array([[0, 1], [2, 3]])
    assert_array_equal(RBF()(X), RBF()(X.astype(np.float64)))
    assert RBF().diag(X).dtype == White()(X, X + 1).dtype == np.float64


def avals(jaxpr):
    """All abstract values in a jaxpr and in those inside it."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in [*eqn.invars, *eqn.outvars])
        for param in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from avals(inner)


def test_walk_of_the_jaxpr_finds_a_large_array():
    def differences(X):
        return jnp.sum(jax.jit(lambda X: X[:, None] - X)(X) ** 2, -1)

    found = avals(jax.make_jaxpr(differences)(points(7)).jaxpr)
    assert max(aval.size for aval in found) == 7 * 7 * 3


@over_kernels
def test_no_array_is_larger_than_the_matrix(kernel):
    N, D = 7, 3

    def value_and_gradient(kernel, X1, X2):
        def total(kernel, X1, X2):
            return jnp.sum(kernel(X1, X2)) + jnp.sum(kernel(X1)) + sum(kernel.diag(X1))

        return jax.value_and_grad(total, (0, 1, 2))(kernel, X1, X2)

    kernel = jax.tree.map(jnp.asarray, kernel)
    args = kernel, points(N, D), points(N, D, seed=1)
    sizes = [a.size for a in avals(jax.make_jaxpr(value_and_gradient)(*args).jaxpr)]
    assert max(sizes) == N * N


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RBF(1.0, -1.0), "RBF: lengthscale must be positive, got -1.0"),
        (lambda: Matern32(1.0, np.array([1.0, 0.0])), r"got 0.0 in an array of shape \(2,"),
        (lambda: Matern12(-2), "Matern12: variance must be positive, got -2"),
        (lambda: Linear(math.nan), "Linear: variance must be positive, got nan"),
        (lambda: Periodic(period=0.0), "Periodic: period must be positive"),
        (
            lambda: RationalQuadratic(alpha=-0.5),
            "RationalQuadratic: alpha must be positive",
        ),
        (lambda: Polynomial(offset=-1.0), "Polynomial: offset must be non-negative"),
        (lambda: White(np.float64(-0.1)), "White: variance must be positive"),
        (lambda: -1.0 * RBF(), "Scaled: scale must be non-negative, got -1.0"),
    ],
)
def test_known_hyperparameters_out_of_range_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
    # Also where a model makes it of known numbers while it is traced.
    with pytest.raises(ValueError, match=match):
        jax.jit(lambda x: make()(x))(points(2))


def test_traced_hyperparameters_are_taken_as_they_are():
    assert jnp.isfinite(jax.jit(lambda ell: RBF(1.0, ell)(points(2)))(-1.0)).all()

"""Starting inducing points, against brute force and by what they must keep."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal
from scipy.cluster.vq import kmeans2, vq

import numpyro_sgp as sgp
from numpyro_sgp.guides.points import MeanKernel
from numpyro_sgp.inducing import assess_inducing, initial_inducing, initialise
from numpyro_sgp.inducing.exchange import exchanged

METHODS = ["kmeans", "greedy", "explained", "random"]


class RBF:
    """In NumPy, so that no time goes into compilation."""

    def __init__(self, lengthscale=1.0, variance=1.0):
        self.lengthscale, self.variance = lengthscale, variance

    def __call__(self, X1, X2=None):
        X1 = np.asarray(X1)
        X2 = X1 if X2 is None else np.asarray(X2)
        squared = np.sum((X1[:, None] - X2[None]) ** 2, axis=-1)
        return self.variance * np.exp(-0.5 * squared / self.lengthscale**2)

    def diag(self, X):
        return np.full(len(X), self.variance, X.dtype)


class JaxRBF(RBF):
    def __call__(self, X1, X2=None):
        X2 = X1 if X2 is None else X2
        squared = jnp.sum((X1[:, None] - X2[None]) ** 2, axis=-1)
        return self.variance * jnp.exp(-0.5 * squared / self.lengthscale**2)

    def diag(self, X):
        return jnp.full(len(X), self.variance, X.dtype)


class Linear:
    """Not stationary, and of rank D."""

    def __call__(self, X1, X2=None):
        return np.asarray(X1) @ np.asarray(X1 if X2 is None else X2).T

    def diag(self, X):
        return np.sum(np.asarray(X) ** 2, axis=1)


def inputs(N=40, D=2, seed=0):
    return np.random.default_rng(seed).normal(size=(N, D))


def start(X, num_inducing, method="kmeans", kernel=None, **settings):
    kernel = RBF() if kernel is None else kernel
    return initial_inducing(X, num_inducing, method, kernel, **settings)


def union(chosen):
    return np.vstack([chosen.Z, *chosen.O])


def row_set(X):
    return {tuple(row) for row in np.asarray(X).tolist()}


def brute_force_greedy(kernel, X, num):
    """Largest dense conditional variance at each step, the first in sorted order."""
    X = X[np.lexsort(X.T[::-1])]
    K = np.asarray(kernel(X, X))
    chosen = []
    for _ in range(num):
        S = np.array(chosen, dtype=int)
        Q = K[:, S] @ np.linalg.inv(K[np.ix_(S, S)]) @ K[S]
        conditional = np.diagonal(K - Q)
        chosen.append(int(np.argmax(conditional >= conditional.max() - 1e-13)))
    return X[chosen]


@pytest.mark.parametrize(
    ("kernel", "num"), [(RBF(1.5), 10), (RBF(1.0, 5.0), 15), (Linear(), 2)]
)
@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_brute_force_greedy(kernel, num, seed):
    X = inputs(seed=seed)
    expected = brute_force_greedy(kernel, X, num)
    assert_array_equal(start(X, num, "greedy", kernel).Z, expected)


def test_greedy_orthogonal_points_continue_after_the_inducing_points():
    X = inputs()
    chosen = start(X, 5, "greedy", num_orthogonal=(4, 3))
    assert [len(points) for points in chosen.O] == [4, 3]
    assert_array_equal(union(chosen), start(X, 12, "greedy").Z)
    assert_array_equal(union(chosen), brute_force_greedy(RBF(), X, 12))


@given(seed=st.integers(0, 1000))
def test_greedy_does_not_see_the_order_of_the_rows(seed):
    # A grid, repeated: full of ties, in the first choice and in later ones.
    grid = np.stack(np.meshgrid([-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0]), -1).reshape(-1, 2)
    X = np.vstack([grid, grid, inputs(6)])
    order = np.random.default_rng(seed).permutation(len(X))
    expected = start(X, 6, "greedy", num_orthogonal=3)
    assert_array_equal(
        union(start(X[order], 6, "greedy", num_orthogonal=3)), union(expected)
    )


def test_greedy_ties_go_to_the_lexicographic_first():
    X = np.array([[1.0, 0.0], [-1.0, 5.0], [0.0, 0.0], [-1.0, 3.0]])
    assert_array_equal(start(X, 1, "greedy").Z, [[-1.0, 3.0]])
    kernel = RBF()
    kernel.diag = lambda X: 1.0 + 1e-15 * np.asarray(X)[:, 0]  # rounding is no difference
    assert_array_equal(start(X, 1, "greedy", kernel).Z, [[-1.0, 3.0]])


def test_greedy_spreads_points_once_the_variance_is_explained():
    X = np.array([[1.0], [2.0], [2.1], [3.0], [10.0]])
    # The largest variance; then the farthest from it, and so on.
    expected = [[10.0], [1.0], [3.0], [2.0]]
    assert_array_equal(start(X, 4, "greedy", Linear()).Z, expected)
    # What is left is below the jitter, though not zero.
    kernel = Linear()
    kernel.diag = lambda X: (1.0 + 1e-9) * np.sum(np.asarray(X) ** 2, axis=1)
    assert_array_equal(start(X, 4, "greedy", kernel).Z, expected)


def test_greedy_takes_no_pivot_that_is_rounding_in_float32():
    # Nearly of low rank, so that residuals come down to what float32 resolves.
    X = np.linspace(0.0, 1.0, 200, dtype=np.float32)[:, None]
    with jax.enable_x64(False):
        Z = start(X, 60, "greedy", RBF(0.3)).Z
    assert len(row_set(Z)) == 60
    assert np.diff(np.sort(Z.ravel())).max() < 0.05  # spread out after the first few


def test_greedy_leaves_less_unexplained_than_random():
    X = np.random.default_rng(0).uniform(0.0, 10.0, size=(300, 1))
    verdicts = [start(X, 20, method).verdict() for method in ("greedy", "random")]
    greedy, random = (1.0 - verdict.variance_explained for verdict in verdicts)
    assert greedy < 0.05 * random


def brute_force_explained(kernel, X, counts, num, kept):
    """Each row by which the sum of what is left of variances falls most."""
    points = list(kept)
    for _ in range(num):
        falls = []
        for x in X:
            Z = np.array([*points, x])
            K = kernel(Z) + 1e-10 * np.eye(len(Z))
            Kzx = kernel(Z, X)
            falls.append(counts @ np.sum(Kzx * np.linalg.solve(K, Kzx), axis=0))
        points.append(X[int(np.argmax(falls))])
    return np.array(points[len(kept) :])


@pytest.mark.parametrize("num_kept", [0, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_most_explained_is_brute_force(seed, num_kept):
    rng = np.random.default_rng(seed)
    # Many rows where they say the same of few functions, few rows far apart.
    rows = np.concatenate([rng.normal(size=(25, 2)), 9.0 * rng.normal(size=(10, 2))])
    X, kernel = np.concatenate([rows, rows[:7], rows[:7]]), RBF(0.8)
    kept = rng.normal(size=(num_kept, 2))
    distinct, counts = np.unique(X, axis=0, return_counts=True)
    expected = brute_force_explained(kernel, distinct, counts, 6, kept)
    Z, moved = np.concatenate([kept, X[:6] + 0.1]), num_kept + np.arange(6)
    assert_array_equal(initialise.points_instead(kernel, X, Z, moved, seed=0), expected)
    if not num_kept:
        assert_array_equal(start(X, 6, "explained", kernel).Z, expected)
        order = rng.permutation(len(X))
        assert_array_equal(start(X[order], 6, "explained", kernel).Z, expected)


def test_points_that_explain_are_where_many_rows_are():
    X = np.concatenate([np.linspace(0.0, 1.0, 200), np.linspace(10.0, 50.0, 20)])[:, None]
    near = [(start(X, 12, m, RBF(0.1)).Z < 5.0).sum() for m in ("greedy", "explained")]
    assert near[0] < 4 and near[1] > 6


def test_points_that_explain_are_chosen_from_some_of_many_rows():
    X = np.random.default_rng(0).uniform(size=(initialise._CANDIDATES + 500, 1))
    Z = start(X, 4, "explained", RBF(0.2)).Z
    assert np.isin(Z, X).all() and np.ptp(Z) > 0.5
    moved = np.array([0, 2, 3])
    found = initialise.points_instead(Linear(), X, X[:5], moved, seed=1)  # nothing is left
    assert len(np.unique(np.vstack([X[[1, 4]], found]), axis=0)) == 5


def test_greedy_conditions_on_the_noise_of_a_white_kernel():
    """``k(X1, X2)`` of separate arguments has no noise, ``k.diag`` has it."""
    kernel = RBF()
    kernel.diag = lambda X: np.full(len(X), 1.5)
    X = inputs(6)
    Z = start(X, 6, "greedy", kernel).Z
    assert row_set(Z) == row_set(X)


def test_kmeans_finds_the_means_of_separate_clusters():
    rng = np.random.default_rng(0)
    middles = np.array([[0.0, 0.0], [50.0, 0.0], [0.0, 0.5], [50.0, 0.5]])
    # The second column counts as much as the first only when columns are standardised.
    X = np.repeat(middles, 30, axis=0) + rng.normal(size=(120, 2)) * [1.0, 0.01]
    expected = X.reshape(4, 30, 2).mean(axis=1)
    Z = start(X, 4).Z
    Z, expected = (C[np.lexsort((C[:, 1], C[:, 0] > 25.0))] for C in (Z, expected))
    assert_allclose(Z, expected, rtol=1e-12)


def test_kmeans_counts_repeated_rows():
    X = np.array([[0.0]] * 9 + [[1.0], [100.0], [101.0]])
    assert_allclose(np.sort(start(X, 2).Z.ravel()), [0.1, 100.5], rtol=1e-12)


def test_kmeans_loss_is_no_worse_than_that_of_scipy():
    X = inputs(500, 2)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    reference, _ = kmeans2(X, 20, iter=20, minit="++", rng=np.random.default_rng(0))
    loss, expected = (np.mean(vq(X, Z)[1] ** 2) for Z in (start(X, 20).Z, reference))
    # Two local optima of one loss; random rows as centres are about 1.5 times as bad.
    assert loss < 1.1 * expected


def test_kmeans_splits_one_joint_clustering_at_random():
    X = inputs(60)
    joint = start(X, 12)
    split = start(X, 7, num_orthogonal=(3, 2))
    assert [len(split.Z), *map(len, split.O)] == [7, 3, 2]
    assert row_set(union(split)) == row_set(joint.Z)
    # By chance, not by place: sorted centres would come out sorted.
    assert not np.array_equal(joint.Z, joint.Z[np.argsort(joint.Z[:, 0])])


def test_kmeans_centres_of_single_inputs_are_these_inputs():
    # All but 8 of the rows coincide; at most two distinct rows can share a centre.
    X = np.vstack([np.zeros((50, 2)), inputs(8)])
    assert len(row_set(start(X, 8).Z) & row_set(X)) >= 7


def test_kmeans_centres_do_not_leave_the_range_by_rounding():
    low, high = 0.3, 0.9
    assert low + (high - low) > high
    X = np.array([[0.0, low], [1.0, low], [100.0, high], [101.0, high]])
    assert start(X, 2).Z[:, 1].max() == high


def test_kmeans_tops_up_centres_that_coincide_after_rounding(monkeypatch):
    # Float16 has steps of 0.5 at 1000, so the means 1000.75 and 1000.83 become one.
    X = 1000.0 + 0.5 * np.array([[0], [1], [2], [2], [3]])
    monkeypatch.setattr(initialise, "_lloyd", lambda *args: np.array([0, 1, 1, 0]))
    Z = start(X, 2).Z
    assert_allclose(np.sort(Z.ravel()), [1000.75, 1000.0 + 2.5 / 3.0], rtol=1e-12)
    Z = start(X.astype(np.float16), 2).Z
    assert 1001.0 in Z and len(row_set(Z)) == 2 and row_set(Z) <= row_set(X)


@pytest.mark.parametrize("method", ["kmeans", "greedy"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_inputs_that_coincide_when_standardised_are_distinct(method, seed, sign):
    X = sign * np.array([[3.0], [2.0], [1.0], [0.0], [1e-30], [3e-30]])
    for num in (5, 6):
        Z = start(X, num, method, Linear(), seed=seed).Z
        assert len(row_set(Z)) == num
    assert row_set(Z) == row_set(X)


def test_kmeans_of_inputs_of_extreme_scales():
    # Squares overflow in the first column and underflow in the second.
    X = np.stack([np.repeat([0.0, 1e200], 6), np.tile(np.arange(6) * 1e-200, 2)], 1)
    Z = start(X, 4).Z
    assert np.isfinite(Z).all()
    # Both columns count: each centre has one value of the first, some of the second.
    assert set(np.round(Z[:, 0] / 1e200, 9)) == {0.0, 1.0}
    assert len(row_set(Z[:, 1:])) > 1


def test_kmeans_takes_columns_as_a_kernel_with_one_lengthscale_does():
    """Four groups in two columns of other scales; two centres tell which column counts."""
    rng = np.random.default_rng(0)
    groups = np.stack([np.repeat([0.0, 100.0], 40), np.tile([0.0, 1.0], 40)], axis=1)
    X = groups + [1.0, 0.01] * rng.normal(size=groups.shape)
    one, each = sgp.kernels.RBF(1.0, 2.0), sgp.kernels.RBF(1.0, jnp.ones(2))
    for kernel in (one, MeanKernel(2.0 * one + sgp.kernels.White(0.1))):
        for seed in range(5):
            Z = start(X, 2, kernel=kernel, seed=seed).Z
            assert np.ptp(Z[:, 0]) > 90.0 and np.ptp(Z[:, 1]) < 0.5
    # Of one column it is the same to the last bit.
    X = X[:, :1]
    assert np.array_equal(start(X, 5, kernel=one).Z, start(X, 5).Z)
    dims = sgp.kernels.RBF(active_dims=(0,))
    for kernel in (
        each,
        MeanKernel(one * each),
        MeanKernel(dims),
        MeanKernel(sgp.kernels.White()),
    ):
        assert not kernel.is_isotropic
    batch = sgp.kernels.Matern32(jnp.ones(3), jnp.ones(3))
    assert MeanKernel(batch).is_isotropic and batch.is_isotropic


@pytest.mark.slow
def test_kmeans_is_fast_enough_to_be_the_default():
    X = inputs(20_000, 8)
    began = time.perf_counter()
    Z = initial_inducing(X, 1024).Z
    # About 4 s on two cores.
    assert time.perf_counter() - began < 30.0
    assert Z.shape == (1024, 8)


@pytest.mark.parametrize("method", METHODS)
@given(
    X=hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 12), st.integers(1, 3)),
        # Few values: repeated rows, constant columns, both zeros.
        elements=st.sampled_from([-1.0, -0.0, 0.0, 0.1, 1e6]),
    ),
    share=st.floats(0.0, 1.0),
)
def test_as_many_distinct_points_as_asked_within_the_range(method, X, share):
    num_distinct = len(np.unique(X, axis=0))
    num = 1 + int(share * (num_distinct - 1))
    points = union(start(X, num, method, num_orthogonal=num_distinct - num))
    assert points.shape == (num_distinct, X.shape[1])
    assert row_set(points) == row_set(X)  # all there are
    points = start(X, num, method).Z
    assert len(row_set(points)) == num
    assert (points >= X.min(axis=0)).all() and (points <= X.max(axis=0)).all()
    if method != "kmeans":
        assert row_set(points) <= row_set(X)


@pytest.mark.parametrize("method", METHODS)
def test_constant_columns_stay_constant(method):
    X = np.hstack([inputs(50, 1), np.full((50, 1), 0.1), np.zeros((50, 1))])
    points = union(start(X, 6, method, num_orthogonal=4))
    assert len(row_set(points)) == 10
    assert_array_equal(points[:, 1:], np.tile([0.1, 0.0], (10, 1)))


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_decides(method):
    X = inputs(200)
    first, again, other = (
        union(start(X, 8, method, num_orthogonal=4, seed=seed)) for seed in (1, 1, 2)
    )
    assert_array_equal(first, again)
    # The greedy methods have nothing random below max_rows.
    assert np.array_equal(first, other) == (method in ("greedy", "explained"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_points_have_the_dtype_of_the_inputs(method, dtype):
    X = inputs().astype(dtype)
    for chosen in (
        start(X, 5, method, num_orthogonal=2),
        start(jnp.asarray(X), 5, method),
    ):
        assert {points.dtype for points in (chosen.Z, *chosen.O)} == {np.dtype(dtype)}
        assert type(chosen.Z) is np.ndarray
        if method != "kmeans":  # rows come back to the bit
            assert row_set(chosen.Z) <= row_set(X)


@pytest.mark.parametrize("method", METHODS)
def test_whole_numbers_become_floating(method):
    X = np.arange(20)[:, None]
    Z = start(X, 3, method).Z
    assert Z.dtype == np.float64
    with jax.enable_x64(False):
        assert start(X, 3, method).Z.dtype == np.float32


@pytest.mark.parametrize("method", METHODS)
def test_float32_without_x64(method):
    X = inputs().astype(np.float32)
    with jax.enable_x64(False):
        chosen = start(X, 6, method, num_orthogonal=3)
        verdict = chosen.verdict()
        assert_array_equal(start(X, 9, "greedy", JaxRBF()).Z, start(X, 9, "greedy").Z)
    assert len(row_set(union(chosen))) == 9
    assert verdict.precision == "float32"
    assert chosen.verdict().precision == "float64"
    expected = chosen.verdict().variance_explained
    assert_allclose(verdict.variance_explained, expected, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_many_rows_are_subsampled(method):
    X = inputs(100)
    few = start(X, 10, method, max_rows=10)
    assert row_set(few.Z) < row_set(X)  # ten points of ten rows are these rows
    other = start(X, 10, method, max_rows=10, seed=1)
    assert row_set(few.Z) != row_set(other.Z)


@pytest.mark.parametrize("method", METHODS)
def test_a_subsample_is_enlarged_to_hold_the_points(method):
    # Distinct inputs are rare, so a subset of rows seldom has them all.
    X = np.vstack([np.zeros((1000, 1)), np.arange(10.0)[:, None]])
    assert_array_equal(np.sort(start(X, 10, method, max_rows=50).Z, axis=0), X[-10:])
    assert len(row_set(start(X, 7, method, max_rows=5).Z)) == 7


@pytest.mark.parametrize("method", METHODS)
def test_no_orthogonal_points_unless_asked(method):
    assert start(inputs(), 3, method).O == ()
    assert start(inputs(), 3, method, num_orthogonal=0).O == ()
    (points,) = start(inputs(), 3, method, num_orthogonal=2).O
    assert points.shape == (2, 2)


def test_verdict_is_that_of_assess_inducing_on_all_inputs():
    X = inputs(2500)
    chosen = start(X, 10, "random", RBF(0.5), num_orthogonal=(3, 2))
    expected = assess_inducing(RBF(0.5), X, chosen.Z, chosen.O)
    assert chosen.verdict() == expected
    assert chosen.verdict(RBF(2.0)).variance_explained > expected.variance_explained


def test_verdict_without_a_kernel_is_an_error():
    with pytest.raises(ValueError, match=r"needs a kernel.*start\.verdict\(kernel\)"):
        initial_inducing(inputs(), 3).verdict()


@pytest.mark.parametrize("method", METHODS)
def test_more_points_than_distinct_inputs_is_an_error(method):
    X = np.repeat(inputs(4), 3, axis=0)
    message = (
        r"4 distinct inputs in 12 rows, but 5 points were asked for \(num_inducing=3, "
        r"num_orthogonal=\(1, 1\)\)\. Ask for at most 4 in all, or pass an array"
    )
    for max_rows in (5, 20_000):
        with pytest.raises(ValueError, match=message):
            start(X, 3, method, num_orthogonal=(1, 1), max_rows=max_rows)


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="0 distinct inputs in 0 rows"):
        start(np.zeros((0, 2)), 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_an_error_that_names_rows(value):
    X = inputs(20)
    X[[2, 5], [0, 1]] = value
    with pytest.raises(ValueError, match=r"in 2 of 20 rows: 2, 5\. Drop or fill"):
        start(X, 3)
    X[7:17, 0] = value
    with pytest.raises(ValueError, match=r"in 12 of 20 rows: 2, 5, 7, 8, 9, \.\.\.\. Drop"):
        start(X, 3)


def test_wrong_rank_is_an_error():
    with pytest.raises(ValueError, match=r"\(N, D\).*got \(40,\)\. Use X\[:, None\]"):
        start(inputs()[:, 0], 3)
    with pytest.raises(ValueError, match=r"\(N, D\).*got \(1, 40, 2\)\.$"):
        start(inputs()[None], 3)
    with pytest.raises(ValueError, match="D at least 1"):
        start(np.zeros((5, 0)), 3)


@pytest.mark.parametrize("X", [np.array([["a"], ["b"]]), np.array([[1j]])])
def test_inputs_that_are_not_real_numbers_are_an_error(X):
    with pytest.raises(TypeError, match="X must be real numbers, got an array of"):
        start(X, 1)


def test_traced_inputs_are_an_error():
    with pytest.raises(TypeError, match=r"X is traced.*outside jax\.jit"):
        jax.jit(lambda X: start(X, 3).Z)(inputs())


def test_a_traced_kernel_is_an_error():
    def points(lengthscale):
        return start(inputs(), 3, "greedy", JaxRBF(lengthscale)).Z

    with pytest.raises(TypeError, match="hyperparameters are traced"):
        jax.jit(points)(1.0)


def test_concrete_inputs_and_kernel_do_within_jit():
    X, kernel = inputs(), JaxRBF(1.0)

    @jax.jit
    def points():
        chosen = start(X, 5, "greedy", kernel)
        return chosen.Z, chosen.verdict().variance_explained

    expected = start(X, 5, "greedy", kernel)
    assert_array_equal(points()[0], expected.Z)
    assert_allclose(points()[1], expected.verdict().variance_explained, rtol=1e-12)


@pytest.mark.parametrize("method", ["k-means", None, 3])
def test_unknown_method_is_an_error_that_names_the_choices(method):
    message = r"Unknown method .*Choose one of 'kmeans', 'greedy', 'explained', 'random'\."
    with pytest.raises(ValueError, match=message):
        start(inputs(), 3, method)


def test_greedy_without_a_kernel_is_an_error():
    with pytest.raises(ValueError, match=r"needs a kernel\. Pass kernel=.*'kmeans'"):
        initial_inducing(inputs(), 3, "greedy")


@pytest.mark.parametrize("num", [0, -3])
def test_fewer_than_one_point_is_an_error(num):
    with pytest.raises(ValueError, match=f"num_inducing must be at least 1, got {num}"):
        start(inputs(), num)
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        start(inputs(), 1, max_rows=num)
    with pytest.raises(ValueError, match=r"at least 1 point, got .*For none, pass \(\)"):
        start(inputs(), 3, num_orthogonal=(2, num))
    with pytest.raises(ValueError, match="at least 1 point"):
        start(inputs(), 3, num_orthogonal=-1)


def test_a_number_of_points_that_is_no_integer_is_an_error():
    with pytest.raises(TypeError, match="integer"):
        start(inputs(), 3.5)


def test_a_kernel_without_variance_is_an_error():
    with pytest.raises(ValueError, match="no variance at X"):
        start(inputs(), 3, "greedy", RBF(1.0, 0.0))


@pytest.mark.parametrize("variance", [np.nan, np.inf])
def test_kernel_values_that_are_not_finite_are_an_error(variance):
    with pytest.raises(ValueError, match="NaN or infinite. Check the kernel's hyper"):
        start(inputs(), 3, "greedy", RBF(1.0, variance))


def test_a_batched_kernel_is_an_error():
    kernel = RBF()
    kernel.diag = lambda X: np.ones((2, len(X)))
    with pytest.raises(ValueError, match=r"shape \(40,\), got \(2, 40\).*without batch"):
        start(inputs(), 3, "greedy", kernel)


@pytest.mark.parametrize("seed", range(4))
def test_exchanged_points_are_those_that_one_by_one_search_finds(seed):
    """By the trace of K - Q, anew for each candidate; and no worse than greedy ones."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.0, 6.0, (25, 1))
    X = np.vstack([X, X[:5]])  # which count twice

    def left(Z):
        Kuu, Kuf = RBF()(Z, Z) + 1e-8 * np.eye(len(Z)), RBF()(Z, X)
        return len(X) - np.sum(Kuf * np.linalg.solve(Kuu, Kuf))

    greedy = initial_inducing(X, 5, "explained", kernel=RBF()).Z
    found = exchanged(RBF(), X, greedy)
    assert left(found) <= left(greedy) + 1e-8 and np.isin(found, X).all()
    expected = greedy.copy()
    for m in [*range(5), *range(5)]:
        others = np.delete(expected, m, axis=0)
        each = [left(np.vstack([others, x])) for x in X]
        if min(each) < left(expected) - 1e-6:
            expected[m] = X[np.argmin(each)]
    assert_allclose(left(found), left(expected), rtol=1e-3)


@pytest.mark.parametrize("N, M, lengthscale", [(200, 20, 1.0), (200, 30, 0.5), (60, 60, 1)])
def test_exchanged_points_that_explain_nearly_all(N, M, lengthscale):
    """Rounding errors of the size of the jitter are no gain."""
    X = np.random.default_rng(N).uniform(0.0, 6.0, (N, 1))
    kernel = RBF(lengthscale)
    greedy = initial_inducing(X, M, "explained", kernel=kernel).Z
    found = exchanged(kernel, X, greedy)
    assert len(np.unique(found, axis=0)) == M
    shares = [assess_inducing(kernel, X, Z).variance_explained for Z in (greedy, found)]
    assert shares[1] >= shares[0] - 1e-9


def test_exchanged_points_of_many_inputs_or_none_to_gain():
    many = np.random.default_rng(0).uniform(size=(1001, 1))
    assert_array_equal(exchanged(RBF(), many, many[:3]), many[:3])
    few = np.arange(4.0)[:, None]
    assert_array_equal(np.sort(exchanged(RBF(), few, few), axis=0), few)

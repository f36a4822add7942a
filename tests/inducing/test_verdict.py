"""Verdicts on inducing points, against dense algebra."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_sgp.inducing import InducingVerdict, NearestPair, assess_inducing


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


def inputs(N, D=2, seed=0):
    return np.random.default_rng(seed).normal(size=(N, D))


def dense_explained(kernel, X, Z):
    """The formula with an inverse, without jitter."""
    Kff, Kuf, Kuu = (np.asarray(kernel(*pair)) for pair in ((X, X), (Z, X), (Z, Z)))
    Qff = Kuf.T @ np.linalg.inv(Kuu) @ Kuf
    return 1.0 - np.trace(Kff - Qff) / np.trace(Kff)


def shares(verdict):
    """Explained variance, for Z alone and for the union."""
    return np.array([verdict.variance_explained, verdict.variance_explained_union])


@pytest.mark.parametrize("variance", [1.0, 1e6, 1e-6])
def test_variance_explained_is_the_dense_formula(variance):
    kernel, X = RBF(0.6, variance), inputs(50)
    Z, O1, O2 = inputs(6, seed=1), inputs(4, seed=2), inputs(3, seed=3)
    verdict = assess_inducing(kernel, X, Z, (O1, O2))
    expected = (
        dense_explained(kernel, X, Z),
        dense_explained(kernel, X, np.vstack([Z, O1, O2])),
    )
    # The jitter is 1e-8 of the diagonal, against condition numbers of some tens.
    assert_allclose(shares(verdict), expected, rtol=1e-6)
    assert expected[1] > expected[0] + 0.05


def test_all_variance_is_explained_at_the_inputs_themselves():
    X = inputs(20)
    assert_allclose(assess_inducing(RBF(0.3), X, X).variance_explained, 1.0, rtol=1e-7)


def test_condition_numbers_are_those_of_the_dense_matrices():
    kernel, X = RBF(0.6, 3.0), inputs(50)
    Z, O1, O2 = inputs(6, seed=1), inputs(4, seed=2), inputs(3, seed=3)
    verdict = assess_inducing(kernel, X, Z, (O1, O2))
    assert_allclose(verdict.condition_number, np.linalg.cond(kernel(Z, Z)), rtol=1e-9)
    given, expected = Z, []
    for O in (O1, O2):
        Kuu, Kuv = np.asarray(kernel(given, given)), np.asarray(kernel(given, O))
        Cvv = np.asarray(kernel(O, O)) - Kuv.T @ np.linalg.inv(Kuu) @ Kuv
        expected.append(np.linalg.cond(Cvv + 3e-8 * np.eye(len(O))))
        given = np.vstack([given, O])
    assert_allclose(verdict.condition_number_orthogonal, expected, rtol=1e-5)
    assert verdict.num_inducing == 6 and verdict.num_orthogonal == (4, 3)


def test_jitter_of_orthogonal_points_is_relative_to_the_kernel():
    """Where O repeats Z, C_vv is nothing but jitter; its own diagonal is no scale."""
    Z = inputs(5)
    O = np.vstack([Z[:1], [[9.0, 9.0]]])  # eigenvalues 0 and 1
    for variance in (1.0, 1e4):
        verdict = assess_inducing(RBF(0.3, variance), Z, Z, O)
        # One over the jitter, twice: of the repeated point given its jittered twin, and
        # of C_vv itself.
        (number,) = verdict.condition_number_orthogonal
        assert_allclose(number, 1e8 / 2, rtol=0.2)


def test_condition_number_of_repeated_points_is_infinite_or_beyond_float64():
    Z = np.zeros((2, 1))
    assert assess_inducing(RBF(), inputs(9, 1), Z).condition_number > 1e15


def test_nearest_pair_is_over_all_points():
    Z = np.array([[0.0, 0.0], [10.0, 0.0], [20.0, 0.0]])
    O1, O2 = np.array([[0.0, 7.0]]), np.array([[20.0, 30.0], [10.0, -3.0]])
    verdict = assess_inducing(RBF(), Z, Z, (O1, O2))
    assert verdict.nearest_pair == NearestPair(3.0, 1, 5)
    assert assess_inducing(RBF(), Z, Z, O1).nearest_pair == NearestPair(7.0, 0, 3)
    assert assess_inducing(RBF(), Z, Z[:1]).nearest_pair is None


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_nearest_pair_of_copies_is_two_of_them(copies):
    Z = np.vstack([inputs(3) + 50.0, np.zeros((copies, 2))])
    pair = assess_inducing(RBF(), inputs(9), Z).nearest_pair
    assert pair.distance == 0.0
    assert 3 <= pair.first < pair.second < 3 + copies


def test_one_set_of_orthogonal_points_may_be_given_bare():
    X, Z, O = inputs(20), inputs(3, seed=1), inputs(4, seed=2)
    expected = assess_inducing(RBF(), X, Z, (O,))
    assert assess_inducing(RBF(), X, Z, O) == expected
    assert assess_inducing(RBF(), X, jnp.asarray(Z), [jnp.asarray(O)]) == expected
    assert assess_inducing(RBF(), X, Z, O[None]) == expected
    none = assess_inducing(RBF(), X, Z)
    assert none.variance_explained_union == none.variance_explained


def test_many_rows_are_judged_by_a_subset():
    class CountingRBF(RBF):
        rows = 0

        def diag(self, X):
            CountingRBF.rows = max(CountingRBF.rows, len(X))
            return super().diag(X)

    X, Z = inputs(6000), inputs(5, seed=1)
    verdict = assess_inducing(CountingRBF(), X, Z)
    assert CountingRBF.rows == 2000
    # The share at one row has sd 0.3 here, so the standard error is 0.007.
    assert abs(verdict.variance_explained - dense_explained(RBF(), X[:3000], Z)) < 0.05
    assert verdict == assess_inducing(RBF(), X, Z)


def test_jitter_grows_where_float32_needs_it():
    with jax.enable_x64(False):
        X = np.linspace(0.0, 1.0, 400, dtype=np.float32)[:, None]
        verdict = assess_inducing(RBF(5.0), X, X)
    assert verdict.precision == "float32"
    assert_allclose(verdict.variance_explained, 1.0, rtol=1e-3)


GOOD = InducingVerdict(
    num_inducing=20,
    num_orthogonal=(5, 5),
    variance_explained=0.5,
    variance_explained_union=0.91,
    condition_number=1e3,
    condition_number_orthogonal=(10.0, 20.0),
    nearest_pair=NearestPair(0.1, 3, 8),
    precision="float64",
)


def test_a_good_start_has_no_advice():
    X = inputs(50)
    verdict = assess_inducing(RBF(1.5), X, X[:20], X[20:25])
    assert verdict.advice == ()
    text = str(verdict)
    assert f"20 inducing points explain {verdict.variance_explained:.1%}" in text
    assert "with 5 orthogonal points. Condition number: " in text
    assert f"{verdict.condition_number:.1e} for K_uu" in text
    assert f"{verdict.condition_number_orthogonal[0]:.1e} for C_vv" in text
    assert f"{verdict.nearest_pair.distance:.2g} apart." in text


def test_text_of_two_sets_and_of_none():
    X = inputs(30)
    two = str(assess_inducing(RBF(), X, X[:1], (X[1:3], X[3:4])))
    assert "1 inducing point explains " in two
    assert "with 2 + 1 orthogonal points" in two
    assert " and " in two.split("K_uu, ")[1].split(" for C_vv")[0]
    none = str(assess_inducing(RBF(), X, X[:1]))
    assert "C_vv" not in none and "orthogonal" not in none and "closest" not in none


def test_all_but_all_is_not_called_all():
    verdict = assess_inducing(RBF(), inputs(9), inputs(3, seed=1))
    text = str(verdict._replace(variance_explained=0.99996))
    assert "explain 99.9960% of" in text


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"variance_explained_union": 0.89}, "Less than 90% .* use more points"),
        ({"condition_number": 1.1e10}, "K_uu is ill-conditioned .* too close"),
        ({"condition_number": float("inf")}, "K_uu is .* lengthscale is too long"),
        ({"condition_number": 1.1e6, "precision": "float32"}, "K_uu is ill-cond"),
        ({"condition_number_orthogonal": (2.0, 1.1e7)}, "C_vv is ill-conditioned"),
        ({"nearest_pair": NearestPair(0.0, 3, 8)}, "Points 3 and 8 are duplicates"),
    ],
)
def test_each_fault_is_named_and_advised_on(change, advice):
    bad = GOOD._replace(**change)
    assert len(bad.advice) == 1
    assert re.search(advice, bad.advice[0])
    assert str(bad).endswith(bad.advice[0])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"condition_number": 0.9e10},
        {"condition_number": 0.9e6, "precision": "float32"},
        {"condition_number_orthogonal": (0.9e7,)},
        {"nearest_pair": NearestPair(1e-12, 3, 8)},
        {"nearest_pair": None},
        {"variance_explained": 0.1},
    ],
)
def test_nothing_is_advised_below_the_limits(change):
    assert GOOD._replace(**change).advice == ()


def test_faults_are_found_in_real_starts():
    X = np.linspace(0.0, 1.0, 50)[:, None]
    few = assess_inducing(RBF(0.01), X, X[::10])
    assert [advice.split()[0] for advice in few.advice] == ["Less"]
    long = assess_inducing(RBF(10.0), X, X[::5])
    assert [advice.split()[0] for advice in long.advice] == ["K_uu"]
    twins = assess_inducing(RBF(0.2), X, X[::5], np.vstack([X[5:6], [[5.0]]]))
    assert [advice.split()[0] for advice in twins.advice] == ["C_vv", "Points"]


@pytest.mark.parametrize("shape", [(3, 1), (0, 2)])
def test_points_of_the_wrong_shape_are_an_error(shape):
    X, bad = inputs(9), np.zeros(shape)
    for name, sets in {"Z": (bad,), r"O\[1\]": (X[:2], (X[2:4], bad))}.items():
        message = rf"{name} must have .* shape \(M, 2\), got \({shape[0]}, {shape[1]}\)"
        with pytest.raises(ValueError, match=message):
            assess_inducing(RBF(), X, *sets)


def test_points_that_are_not_finite_are_an_error():
    X = inputs(9)
    Z = X[:3].copy()
    Z[1, 0] = np.nan
    with pytest.raises(ValueError, match=r"Z has NaN or infinity in 1 of 3 rows: 1\."):
        assess_inducing(RBF(), X, Z)
    with pytest.raises(ValueError, match=r"Z must have shape \(N, D\)"):
        assess_inducing(RBF(), X, Z[0])


def test_no_inputs_is_an_error():
    with pytest.raises(ValueError, match="X must have at least one row"):
        assess_inducing(RBF(), np.zeros((0, 2)), inputs(3))


def test_a_kernel_without_variance_is_an_error():
    with pytest.raises(ValueError, match="no variance at X"):
        assess_inducing(RBF(1.0, 0.0), inputs(9), inputs(3))


def test_a_kernel_that_is_no_covariance_is_an_error():
    class Negative(RBF):
        def __call__(self, X1, X2=None):
            return -super().__call__(X1, X2)

    with pytest.raises(ValueError, match="not positive definite, even with jitter"):
        assess_inducing(Negative(), inputs(9), inputs(3))


def test_a_kernel_of_the_wrong_shape_is_an_error():
    class Batched(RBF):
        def __call__(self, X1, X2=None):
            return np.stack([super().__call__(X1, X2)] * 2)

    with pytest.raises(ValueError, match=r"shape \(3, 3\), got \(2, 3, 3\)"):
        assess_inducing(Batched(), inputs(9), inputs(3))

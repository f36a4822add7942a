"""Roots of inverses, solutions and log-determinants from products, against NumPy."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from numpyro_sgp.inverse_free import InverseRoot, inverse_root, log_det, ulisse
from tests.helpers import primitives

DTYPES = ["float32", "float64"]
root_of = jax.jit(inverse_root)


def with_spectrum(rng, spectrum):
    """Symmetric matrices of the given eigenvalues, shape (*batch, M)."""
    Q, _ = np.linalg.qr(rng.normal(size=(*spectrum.shape, spectrum.shape[-1])))
    K = (Q * spectrum[..., None, :]) @ np.swapaxes(Q, -1, -2)
    return (K + np.swapaxes(K, -1, -2)) / 2


def with_condition(rng, condition, size):
    """Matrices of largest eigenvalue one; ``condition`` has the shape of the batch."""
    condition = np.asarray(condition, float)[..., None]
    exponents = rng.uniform(size=(*condition.shape[:-1], size))
    exponents[..., :1], exponents[..., 1:2] = 0.0, 1.0
    return with_spectrum(rng, condition**-exponents)


def exact_root(K):
    """Lower triangular L with ``L L^T = inv(K)``: the factor of K from its last row."""
    U = np.linalg.cholesky(K[..., ::-1, ::-1])[..., ::-1, ::-1]
    return np.swapaxes(np.linalg.inv(U), -1, -2)


def gram(X, lengthscale, nugget, exp=np.exp):
    squares = np.sum((X[..., :, None, :] - X[..., None, :, :]) ** 2, -1)
    return exp(-0.5 * squares / lengthscale**2) + nugget * np.eye(X.shape[-2])


def true_residual(K, L, dtype=np.float64):
    K, L = np.asarray(K, dtype), np.asarray(L, dtype)
    E = np.swapaxes(L, -1, -2) @ (K @ L) - np.eye(K.shape[-1])
    return np.sqrt(np.sum(E**2, (-1, -2)) / K.shape[-1])


# ---- roots ---------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_the_root_is_lower_triangular_and_that_of_the_inverse(seed):
    K = with_condition(np.random.default_rng(seed), [10.0, 1e3, 1e5], 6)
    L, residual, _ = root_of(K, tol=1e-9)
    assert_array_equal(L, np.tril(L))
    assert_allclose(L, exact_root(K), rtol=0, atol=1e-7 * np.abs(L).max())
    assert np.all(residual < 1e-9)


def test_one_step_is_newtons():
    K = with_condition(np.random.default_rng(0), [5.0, 20.0, 80.0], 6)
    L = np.eye(6) / np.sqrt(np.abs(K).sum(-1).max(-1))[:, None, None]
    G = L @ K @ L
    phi = np.tril(G, -1) + 0.5 * (G * np.eye(6) - np.eye(6))
    got = root_of(K, max_steps=1)
    assert_allclose(got.root, L - L @ phi, rtol=1e-12, atol=1e-14)
    assert_array_equal(got.num_steps, 1)


@pytest.mark.parametrize("value", [0.25, 4.0])
def test_the_root_of_a_number(value):
    got = root_of(np.full((1, 1), value))
    assert_allclose(got.root, value**-0.5)
    assert got.num_steps == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_grow_with_the_logarithm_of_the_condition_number(dtype):
    condition = np.repeat(10.0 ** np.arange(1, 10), 10)
    K = with_condition(np.random.default_rng(1), condition, 20).astype(dtype)
    _, residual, num_steps = (np.asarray(x) for x in root_of(K))
    floor = 100 * np.finfo(dtype).eps * condition
    clear = floor < 1.0  # beyond, K need not be positive definite in its precision
    assert np.all(residual[clear] < np.maximum(1e-6, floor[clear]))
    assert np.all(num_steps[clear] <= 8 + 1.25 * np.log(condition[clear]))
    assert np.all(residual < 1.0)
    assert np.median(num_steps) < 30
    # Of those that are not, rounding may keep the residual where it is until the limit.
    definite = np.linalg.eigvalsh(K.astype(float))[:, 0] > 0
    assert np.all(definite[clear]) and num_steps[definite].max() < 100


def test_it_does_not_end_while_the_residual_stays_and_one_eigenvalue_grows():
    spectrum = np.ones((90, 20))
    spectrum[:, 0] = 1e-9
    K = with_spectrum(np.random.default_rng(0), spectrum)
    before = np.asarray(root_of(K, max_steps=12).residual)
    assert np.all(root_of(K, max_steps=20).residual > 0.95 * before)
    assert np.all(root_of(K).residual < 1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "number"), [(7, 900), (40, 100)])
def test_a_thousand_hard_problems(dtype, size, number):
    # All conditions and scales, kernels with tiny nuggets, and starts of all kinds.
    rng = np.random.default_rng(size)
    K = with_condition(rng, 10.0 ** rng.uniform(0, 12, number), size)
    X = rng.uniform(size=(number // 2, size, 2))
    nugget = 10.0 ** rng.uniform(-12, -2, (number // 2, 1, 1))
    K[::2] = gram(X, rng.uniform(0.01, 2.0, (number // 2, 1, 1)), nugget)
    K = (K * 10.0 ** rng.uniform(-20, 20, (number, 1, 1))).astype(dtype)

    kind = rng.integers(0, 6, number)[:, None, None]
    scale = 10.0 ** rng.uniform(-15, 15, (number, 1, 1))
    noise = rng.normal(size=K.shape)
    values = [
        np.full(K.shape, np.nan),
        np.abs(noise) * scale,
        noise * scale,
        np.zeros(K.shape),
        np.eye(size) * np.exp(5 * noise),
        np.where(noise > 2, np.inf, np.eye(size)),
    ]
    start = np.select([kind == i for i in range(6)], values).astype(dtype)

    L, residual, num_steps = map(np.asarray, root_of(K, start))
    assert L.dtype == residual.dtype == dtype and L.shape == K.shape
    assert np.isfinite(L).all() and np.isfinite(residual).all()
    assert np.all(np.diagonal(L, axis1=1, axis2=2) > 0)
    assert_array_equal(L, np.tril(L))
    assert np.all(num_steps <= 100)
    # Residuals are true up to the bound on rounding errors of the two products.
    wide = np.longdouble if dtype == "float64" else np.float64
    size_of = np.abs(np.swapaxes(L, 1, 2), dtype=float) @ (np.abs(K) @ np.abs(L))
    bound = 2 * size * np.finfo(dtype).eps * np.linalg.norm(size_of, axis=(1, 2))
    bound = bound / np.sqrt(size) + 4 * size * np.finfo(dtype).eps
    assert np.all(np.abs(true_residual(K, L, wide) - residual) <= bound)


def test_a_start_counts_up_to_its_scale_and_saves_the_steps():
    K = with_condition(np.random.default_rng(2), [1e2, 1e4, 1e6], 6)
    L = exact_root(K)
    junk = np.triu(np.full((6, 6), 7.0), 1)  # not read
    for start in [L, 1e-20 * L, 1e15 * L, L + junk]:
        assert_array_equal(root_of(K, start).num_steps, 0)
    noise = np.random.default_rng(3).normal(size=L.shape)
    near = root_of(K, L * (1 + 1e-4 * noise))
    assert np.all((near.num_steps > 0) & (near.num_steps < 9))
    assert np.all(near.residual < 1e-6)


def test_what_is_no_start_is_replaced_by_the_cold_one():
    K = with_condition(np.random.default_rng(2), [1e2, 1e4, 1e5], 6)
    L = exact_root(K)
    far = np.tril(np.random.default_rng(0).normal(size=L.shape)) * 1e9
    holed = L.copy()
    holed[:, 3, 3] = 0.0
    cold = root_of(K)
    for start in [np.nan + L, np.inf + L, 0 * L, -L, holed, far]:
        got = root_of(K, start)
        assert_array_equal(got.num_steps, cold.num_steps)
        assert_allclose(got.root, cold.root, rtol=1e-9)


def test_starts_and_matrices_broadcast():
    K = np.stack([2 * np.eye(2), 5 * np.eye(2)])
    assert root_of(K, np.ones((3, 1, 1, 1)) * np.eye(2)).num_steps.shape == (3, 2)


def test_a_near_start_of_large_row_sum_is_not_shrunk():
    # Eigenvalues within a fifth of one, whose many small entries add up.
    size, rng = 200, np.random.default_rng(0)
    G = with_spectrum(rng, rng.choice([0.8, 1.2], size))
    assert np.abs(G).sum(1).max() > 2.5
    assert root_of(G, np.eye(size)).num_steps <= 5


def test_a_start_of_large_eigenvalues_is_shrunk():
    # L^T K L is all ones and a little: the largest eigenvalue is the size, and a plain
    # step from there diverges.
    K = np.ones((12, 12)) + 1e-2 * np.eye(12)
    phi = np.tril(K, -1) + 0.5 * (np.diag(np.diag(K)) - np.eye(12))
    assert true_residual(K, np.eye(12) - phi) > 30 * true_residual(K, np.eye(12))
    # Rows of K of such different sizes that the cold start is the farther one.
    size = np.diag(np.r_[1e-12, np.ones(11)])
    got = root_of(size @ K @ size, np.linalg.inv(size))
    assert got.residual < 1e-6 and got.num_steps < 25


def test_members_of_a_batch_do_not_touch_each_other():
    K = with_condition(np.random.default_rng(4), [1.0, 10.0, 1e8], 6)
    K = np.stack([K, np.full_like(K, np.nan)])
    batch = root_of(K)
    mapped = jax.jit(jax.vmap(jax.vmap(inverse_root)))(K)
    for i in range(3):
        one = root_of(K[0, i])
        assert one.num_steps == batch.num_steps[0, i] == mapped.num_steps[0, i]
        assert_allclose(batch.root[0, i], one.root, rtol=1e-6, atol=1e-9)
    assert np.isnan(batch.residual[1]).all()
    assert_array_equal(batch.num_steps[1], 0)


def test_the_root_is_a_constant_to_derivatives_and_can_be_carried_by_scan():
    X = np.linspace(0, 1, 5)[:, None]

    def energy(lengthscale, start):
        K = gram(X, lengthscale, 1e-3, jnp.exp)
        found = inverse_root(K, start)
        return jnp.sum((found.root.T @ K @ found.root) ** 2), found

    def step(carry, _):
        lengthscale, start = carry
        gradient, found = jax.grad(energy, has_aux=True)(lengthscale, start)
        return (lengthscale - 1e-4 * gradient, found.root), (gradient, found)

    carry = (jnp.array(0.3), jnp.full((5, 5), jnp.nan))
    _, (gradients, found) = jax.jit(lambda c: jax.lax.scan(step, c, None, length=4))(carry)
    assert isinstance(found, InverseRoot) and np.all(found.residual < 1e-6)
    assert found.num_steps[0] > 5 and np.all(found.num_steps[1:] <= 4)

    L = np.asarray(found.root[0])  # held fixed
    expected = jax.grad(lambda s: jnp.sum((L.T @ gram(X, s, 1e-3, jnp.exp) @ L) ** 2))(0.3)
    assert_allclose(gradients[0], expected, rtol=1e-9)
    zero = jax.jit(jax.grad(lambda K, S: jnp.sum(inverse_root(K, S).root), (0, 1)))
    for got in zero(2 * np.eye(5), np.eye(5)):
        assert_array_equal(got, 0.0)


@pytest.mark.parametrize("start", [None, np.eye(3)])
def test_a_step_takes_three_products(start):
    jaxpr = jax.make_jaxpr(lambda K: inverse_root(K, start))(np.eye(3)).jaxpr
    names = Counter(name for name, _ in primitives(jaxpr))
    assert names["while"] == 1
    assert names["dot_general"] == 3 + (0 if start is None else 2)
    assert not {"cholesky", "triangular_solve", "lu", "eigh"} & set(names)


def test_root_errors():
    with pytest.raises(ValueError, match=r"K must be a square matrix, got shape \(2, 3\)"):
        inverse_root(jnp.ones((2, 3)))
    with pytest.raises(
        ValueError, match=r"start must have shape \(..., 2, 2\), got \(3, 3\)"
    ):
        inverse_root(jnp.eye(2), jnp.eye(3))


# ---- random solutions ----------------------------------------------------------------


def cg(K, rhs, steps):
    """Plain conjugate gradients for one right-hand side."""
    x, r = np.zeros_like(rhs), rhs.copy()
    p = r.copy()
    for _ in range(steps):
        alpha = r @ r / (p @ K @ p)
        x, r_new = x + alpha * p, r - alpha * K @ p
        p, r = r_new + r_new @ r_new / (r @ r) * p, r_new
    return x


def assert_means(draws, expected):
    """
    Means of normal averages within five standard errors, which are missed with
    probability 6e-7 a number, and those errors small against what is estimated.
    """
    error = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert np.all(np.abs(np.mean(draws, axis=0) - expected) <= 5 * error)
    assert np.linalg.norm(error) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_ulisse_is_unbiased(preconditioned):
    rng = np.random.default_rng(0)
    K = with_condition(rng, 30.0, 6)
    rhs = rng.normal(size=(6, 2))
    L = exact_root(K + 0.1 * np.eye(6)) if preconditioned else None
    keys = jax.random.split(jax.random.key(0), 20_000)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: ulisse(key, K, rhs, L)))(keys))
    assert_means(draws, np.linalg.solve(K, rhs))  # 12 numbers: missed with 7e-6 in all
    # One draw of the number of terms, 1 to 6, for both columns.
    assert len(np.unique(draws[:, 0, 0].round(9))) == 6
    assert len(np.unique(draws[:, 0, :].round(9), axis=0)) == 6


def test_ulisse_is_conjugate_gradients_of_a_fixed_number_of_terms():
    rng = np.random.default_rng(1)
    K, rhs = with_condition(rng, 30.0, 6), rng.normal(size=(6, 2))
    rhs[:, 1] = 0.0
    cases = [
        (3, {"first": 3, "keep": 1e-12}),  # a fourth term has no chance
        (2, {"keep": 1.0, "max_steps": 2}),
        (6, {"keep": 1.0}),
    ]
    solve = jax.jit(lambda key: [ulisse(key, K, rhs, **case) for _, case in cases])
    for (steps, _), got in zip(cases, solve(jax.random.key(0)), strict=True):
        expected = np.stack([cg(K, rhs[:, 0], steps), np.zeros(6)], 1)
        assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    assert_allclose(got, np.linalg.solve(K, rhs), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulisse_with_an_exact_root_ends_after_one_term(dtype):
    rng = np.random.default_rng(2)
    K = with_condition(rng, [30.0, 1e3], 8).astype(dtype)
    rhs = rng.normal(size=(8, 3)).astype(dtype)
    L = exact_root(K.astype(float)).astype(dtype)
    expected = np.linalg.solve(K.astype(float), rhs)

    def draw(key, K, L):
        # Further terms are at rounding level, and weights do not make them matter.
        return ulisse(key, K, rhs, L, keep=1e-30), ulisse(key, K, rhs, L, keep=0.5)

    keys = jax.random.split(jax.random.key(0), 2)  # a batch of matrices
    once, more = jax.jit(jax.vmap(draw))(keys, K, L)
    tolerance = 1e4 * np.finfo(dtype).eps * np.abs(expected).max()
    assert once.dtype == more.dtype == dtype
    assert_allclose(once, expected, rtol=0, atol=tolerance)
    assert_allclose(more, expected, rtol=0, atol=tolerance)


def test_ulisse_errors():
    key, K, rhs = jax.random.key(0), jnp.eye(3), jnp.ones((3, 1))
    with pytest.raises(ValueError, match=r"one square matrix, got shape \(2, 3, 3\)"):
        ulisse(key, jnp.ones((2, 3, 3)), rhs)
    with pytest.raises(ValueError, match=r"rhs must have shape \(3, H\), got \(3,\)"):
        ulisse(key, K, rhs[:, 0])
    with pytest.raises(ValueError, match="preconditioner must have the same"):
        ulisse(key, K, rhs, jnp.eye(2))
    for bad in [{"first": 0}, {"keep": 0.0}, {"keep": 1.5}]:
        with pytest.raises(ValueError, match="at least one term"):
            ulisse(key, K, rhs, **bad)


# ---- log-determinants ----------------------------------------------------------------

X = np.random.default_rng(5).uniform(size=(8, 2))


def kernel(lengthscale):
    return gram(X, lengthscale, 1e-2, jnp.exp)


@jax.jit
def draws_of(K, L):
    """A thousand values with four probes each."""
    keys = jax.random.split(jax.random.key(2), 1000)
    return jax.vmap(lambda key: log_det(key, K, L, 4))(keys)


@pytest.mark.quick(1)
@pytest.mark.parametrize("preconditioned", [True, False])
def test_the_gradient_of_log_det_is_unbiased(preconditioned):
    L = exact_root(np.asarray(kernel(0.44))) if preconditioned else None

    def estimate(lengthscale, key):
        first = 1 if preconditioned else 4  # of eight terms
        return log_det(key, kernel(lengthscale), L, 4, first=first)

    keys = jax.random.split(jax.random.key(1), 2000 if preconditioned else 10_000)
    draws = jax.jit(jax.vmap(jax.value_and_grad(estimate), (None, 0)))(0.4, keys)
    expected = jax.value_and_grad(lambda s: jnp.linalg.slogdet(kernel(s))[1])(0.4)
    assert_means(np.stack(draws, -1), np.array(expected))


def test_the_value_of_log_det_is_near_with_a_near_preconditioner():
    K, L = np.asarray(kernel(0.4)), exact_root(np.asarray(kernel(0.4 * 1.02)))
    G = L.T @ K @ L
    values = np.asarray(draws_of(K, L))
    # The variance of r^T E r over random signs is 2 (||E||^2 - ||diag E||^2).
    spread = np.sqrt(2 * np.sum((G - np.diag(np.diag(G))) ** 2) / 4)
    assert 0.5 * spread < np.std(values) < 2 * spread < 0.5
    assert_means(values[:, None], np.array([np.linalg.slogdet(K)[1]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_of_log_det_is_exact_with_an_exact_root(dtype):
    K, eps = np.asarray(kernel(0.4)), np.finfo(dtype).eps
    L = exact_root(K)
    values = draws_of(K.astype(dtype), L.astype(dtype))
    assert values.dtype == dtype
    # The rounding errors of L^T K L are the condition number, 4e2, times the precision.
    assert_allclose(values, np.linalg.slogdet(K)[1], rtol=0, atol=1e4 * eps)
    # Krylov spaces of one dimension leave nothing but the first term.
    eye = np.eye(8, dtype=dtype)
    assert_allclose(draws_of(eye, eye), 0.0, atol=20 * eps)


def test_the_value_of_log_det_is_exact_for_diagonal_matrices():
    # Their logarithms have nothing off the diagonal.
    d = np.array([1e-3, 0.2, 0.7, 3.0, 50.0, 51.0, 1e3, 1e5])
    for scale in [1.0, 1e-20]:
        values = draws_of(scale * np.diag(d), np.eye(8))
        assert_allclose(values, np.log(scale * d).sum(), rtol=1e-9)


def test_log_det_of_a_nearly_singular_matrix_is_finite():
    K = gram(np.linspace(0, 1, 8)[:, None], 3.0, 0.0)
    for L in [np.eye(8), exact_root(K + 1e-6 * np.eye(8))]:
        values = draws_of(K.astype(np.float32), L.astype(np.float32))
        assert np.isfinite(values).all()


def test_log_det_takes_no_factor_of_its_matrix():
    K, L = np.eye(9), np.eye(9)

    def estimate(K, L):
        return log_det(jax.random.key(0), K, L, 2, num_lanczos=4)

    both = jax.value_and_grad(estimate, (0, 1))
    jaxpr = jax.make_jaxpr(both)(K, L).jaxpr
    shapes = {}
    for name, operands in primitives(jaxpr):
        shapes.setdefault(name, []).append(operands)
    # Of Lanczos matrices alone: at once, or one after another on few cores.
    assert [shape[-2:] for (shape,) in shapes.pop("eigh")] == [(4, 4)]
    forbidden = {"cholesky", "triangular_solve", "lu", "eigh", "svd", "qr"}
    assert not forbidden & set(shapes)
    text = jax.jit(both).lower(K, L).as_text()
    for name in ["cholesky", "potrf", "triangular_solve", "trsm", "getrf", "geqrf"]:
        assert name not in text
    # No product of two 9 x 9 matrices either.
    assert ((9, 9), (9, 9)) not in shapes["dot_general"]
    assert_array_equal(jax.jit(both)(K, L)[1][1], 0.0)


def test_log_det_errors():
    for bad in [(0, 20), (4, 0)]:
        with pytest.raises(ValueError, match="at least one probe and one Lanczos step"):
            log_det(jax.random.key(0), jnp.eye(2), None, bad[0], num_lanczos=bad[1])

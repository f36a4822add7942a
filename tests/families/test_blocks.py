"""KL divergences and whitening of block Gaussians, against dense formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from numpyro_sgp.families import Block, BlockGaussian, Factors, Full
from tests.helpers import dense_kl

SIZES = (3, 2)
seeds = st.integers(0, 2**32 - 1)
whitened_kl = jax.jit(lambda q, L: q.whitened(Factors(L)).kl())
block_kl = jax.jit(lambda block: block.kl())


def lower(rng, *shape):
    """Lower triangular matrices with a positive diagonal."""
    A = 0.3 * np.tril(rng.normal(size=shape), -1)
    return A + rng.uniform(0.5, 1.5, shape[:-1])[..., None] * np.eye(shape[-1])


def covariance(rng, *shape):
    A = rng.normal(size=shape)
    return A @ np.swapaxes(A, -1, -2) + np.eye(shape[-1])


def block(rng, kind, M, batch=()):
    mu = rng.normal(size=(*batch, M))
    if kind == "prior":
        return Block(mu, None)
    if kind == "diagonal":
        return Block(mu, rng.uniform(0.5, 1.5, (*batch, M)))
    return Block(mu, lower(rng, *batch, M, M))


def dense(block, prior):
    """Mean and covariance of a block, given the prior covariance of its set."""
    if block.is_prior:
        return block.mu, prior
    sqrt = np.diag(block.sqrt) if block.is_diagonal else block.sqrt
    return block.mu, sqrt @ sqrt.T


def residual(K):
    """C_vv of the second set, with an explicit inverse."""
    (m, _), Kuu, Kuv = SIZES, K[:3, :3], K[:3, 3:]
    return K[m:, m:] - Kuv.T @ np.linalg.inv(Kuu) @ Kuv


KINDS = ["full", "diagonal", "prior"]


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
def test_kl_of_a_block_is_the_dense_kl_from_the_standard_normal(kind, seed):
    q = block(np.random.default_rng(seed), kind, 3)
    m, S = dense(q, np.eye(3))
    assert_allclose(block_kl(q), dense_kl(m, S, np.eye(3)), rtol=1e-9)


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", ["full", "diagonal"])
@given(seed=seeds)
def test_unwhitened_kl_is_the_dense_kl_of_each_set(first, second, seed):
    # Eq. (35) and (36): the first set from N(0, K_uu), the second from N(0, C_vv).
    rng = np.random.default_rng(seed)
    K = covariance(rng, 5, 5)
    priors = (K[:3, :3], residual(K))
    blocks = (block(rng, first, 3), block(rng, second, 2))
    expected = sum(
        dense_kl(*dense(b, prior), prior) for b, prior in zip(blocks, priors, strict=True)
    )
    got = whitened_kl(BlockGaussian(blocks, whiten=False), np.linalg.cholesky(K))
    assert_allclose(got, expected, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_whitening_divides_by_the_factor_of_the_set(kind):
    rng = np.random.default_rng(0)
    K = covariance(rng, 5, 5)
    blocks = (block(rng, "full", 3), block(rng, kind, 2))
    q = BlockGaussian(blocks, whiten=False).whitened(Factors(jnp.linalg.cholesky(K)))
    assert q.whiten and q.sizes == SIZES
    for b, w, prior in zip(blocks, q.blocks, (K[:3, :3], residual(K)), strict=True):
        inverse = np.linalg.inv(np.linalg.cholesky(prior))
        m, S = dense(b, prior)
        assert_allclose(w.mu, inverse @ m, rtol=1e-9, atol=1e-12)
        if b.is_prior:
            assert w.is_prior
        else:
            got = w.sqrt @ w.sqrt.T
            assert_allclose(got, inverse @ S @ inverse.T, rtol=1e-9, atol=1e-12)


def test_a_whitened_q_stays_as_it_is():
    q = BlockGaussian((block(np.random.default_rng(0), "full", 3),))
    assert q.whitened(Factors(2 * jnp.eye(3))) is q


def test_kl_of_unwhitened_coordinates_is_refused():
    q = BlockGaussian((Block(jnp.zeros(3), jnp.eye(3)),), whiten=False)
    with pytest.raises(ValueError, match=r"call `.whitened\(...\)` first"):
        q.kl()


def test_kl_does_not_depend_on_the_signs_of_the_factor():
    rng = np.random.default_rng(0)
    for kind in ("full", "diagonal"):
        q = block(rng, kind, 3)
        flipped = Block(q.mu, q.sqrt * np.array([1.0, -1.0, 1.0]))  # columns
        assert_allclose(block_kl(flipped), block_kl(q), rtol=1e-12)


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_q_of_a_batch_has_its_own_kl(kind, whiten):
    rng = np.random.default_rng(0)
    L = np.linalg.cholesky(covariance(rng, 4, 5, 5))
    blocks = (block(rng, "full", 3, (4,)), block(rng, kind, 2, (4,)))
    got = whitened_kl(BlockGaussian(blocks, whiten), L)
    assert got.shape == (4,)
    for i in range(4):
        own = jax.tree.map(lambda x, i=i: x[i], blocks)
        assert_allclose(got[i], whitened_kl(BlockGaussian(own, whiten), L[i]), rtol=1e-9)


def test_a_batch_of_q_may_share_one_factor():
    rng = np.random.default_rng(0)
    L = np.linalg.cholesky(covariance(rng, 5, 5))
    blocks = (block(rng, "full", 3, (4,)), block(rng, "diagonal", 2, (4,)))
    got = whitened_kl(BlockGaussian(blocks, False), L)
    copies = np.broadcast_to(L, (4, 5, 5))
    assert_allclose(got, whitened_kl(BlockGaussian(blocks, False), copies), rtol=1e-9)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_projection_has_the_variances_of_the_covariance(kind):
    rng = np.random.default_rng(0)
    q, A = block(rng, kind, 3), rng.normal(size=(3, 4))
    F = q.project(A)
    _, S = dense(q, None)
    assert_allclose(F.T @ F, A.T @ S @ A, rtol=1e-9, atol=1e-12)


def test_slices_are_the_places_of_the_sets_in_the_union():
    q = BlockGaussian(tuple(Block(jnp.zeros(M), None) for M in (3, 1, 2)))
    places = [np.arange(6)[s] for s in q.slices]
    assert q.sizes == (3, 1, 2)
    for got, expected in zip(places, ([0, 1, 2], [3], [4, 5]), strict=True):
        assert_array_equal(got, expected)


def test_is_a_pytree_whose_structure_holds_the_kinds():
    rng = np.random.default_rng(0)
    blocks = tuple(block(rng, kind, 3) for kind in KINDS)
    q = BlockGaussian(blocks, whiten=False)
    again = jax.tree.map(lambda x: 2 * x, q)
    assert again.whiten is False
    assert [b.is_prior for b in again.blocks] == [False, False, True]
    assert [b.is_diagonal for b in again.blocks] == [False, True, False]
    assert len(jax.tree.leaves(q)) == 5


def test_sets_go_with_their_points_whatever_the_order_of_the_parameters():
    sizes = {"qu": 3, "qv": 1, "qv2": 2}
    params = {f"{name}_mu": jnp.zeros(size) for name, size in reversed(sizes.items())}
    assert Full().build(params, whiten=True).sizes == (3, 1, 2)

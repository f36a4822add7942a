"""Rows of the data in blocks, for data whose maps do not fit into memory."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.integrated import row_parts
from tests.integrated.dense import rows

RNG, X = rows(53, 2)  # a prime: the last block is a smaller one
GROUP = np.arange(53) % 5
Y = np.sin(X[:, 0]) + 0.3 * GROUP + 0.3 * RNG.normal(size=53)


def grouped(X, group, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("groups", 5):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + b[group], noise), obs=y)


def noisy(X, group, y=None):
    """Two predictors in a row."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.1, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g - 1.0)), obs=y)


@pytest.fixture
def few_bytes(monkeypatch):
    """Some ten rows in a block."""

    def of(model):
        maps = {grouped: 8 * (2 * 11 + 40), noisy: 16 * (2 * 12 + 40)}
        monkeypatch.setattr(row_parts, "LARGEST", 1)
        monkeypatch.setattr(row_parts, "_BLOCK", 10 * maps[model])

    return of


def run(model, *data, **options):
    return sgp.nested(model, sgp.SVGP(6), data, progress_bar=False, **options)


def assert_same(found, other, X, group):
    for name, q in other.posterior(X, group).items():
        np.testing.assert_allclose(found.posterior(X, group)[name].mean, q.mean, atol=1e-6)
        np.testing.assert_allclose(found.posterior(X, group)[name].sd, q.sd, atol=1e-6)


@pytest.mark.slow
def test_blocks_give_what_all_rows_give(few_bytes):
    whole = run(grouped, X, GROUP, Y)
    few_bytes(grouped)
    blocks = run(grouped, X, GROUP, Y)
    parts = row_parts.RowParts(blocks.field, blocks.args, blocks.kwargs)
    assert parts.size == 10 and blocks.field.layout.num_rows == 53
    np.testing.assert_allclose(blocks.log_evidence, whole.log_evidence, atol=1e-5)
    assert len(blocks.nodes.nodes) == len(whole.nodes.nodes)
    assert_same(blocks, whole, X[:7], GROUP[:7])
    verdict = blocks.check()
    assert "too many rows" in verdict.causes["family"].told
    np.testing.assert_allclose(
        verdict.causes["inducing points"].nats,
        whole.check().causes["inducing points"].nats,
        atol=1e-5,
    )


@pytest.mark.slow
def test_two_predictors_in_a_row(few_bytes):
    """Draws are not weighed there, which all rows have done."""
    whole = run(noisy, X, GROUP, Y)
    gain = float(whole.nodes.nodes[0].weighed.gain)
    few_bytes(noisy)
    blocks = run(noisy, X, GROUP, Y)
    assert blocks.field.layout.number == 2
    np.testing.assert_allclose(blocks.log_evidence, whole.log_evidence - gain, atol=1e-4)


@pytest.mark.slow
def test_what_has_no_plate_or_the_number_of_rows_in_it_is_seen_at_once(few_bytes):
    def counted(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", 53):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def bare(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)

    few_bytes(grouped)
    for model in (counted, bare):
        found = run(model, X, Y)
        assert row_parts.RowParts(found.field, found.args, {}).size is None
        assert np.isfinite(found.log_evidence)


@pytest.mark.slow
def test_predictors_of_unlike_sizes_that_share_rows_are_in_blocks_too(few_bytes):
    """They might have rows of their own, which no block is of."""
    Z = Y[:, None] + np.arange(2.0)

    def model(X, y=None, z=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        kernel = sgp.kernels.RBF(jnp.ones(2), 1.0)
        g = numpyro.sample("g", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
            numpyro.sample("z", dist.Normal(f[:, None] + g.T, 0.5).to_event(1), obs=z)

    whole = run(model, X, Y, Z)
    few_bytes(grouped)
    blocks = run(model, X, Y, Z)
    parts = row_parts.RowParts(blocks.field, blocks.args, blocks.kwargs)
    assert parts.size is not None and not blocks.field.layout.apart
    np.testing.assert_allclose(blocks.log_evidence, whole.log_evidence, atol=1e-5)


def test_a_layout_is_chosen_by_a_block(few_bytes):
    def ties(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.cumsum(f), 0.3), obs=y)

    few_bytes(grouped)
    with pytest.raises(ValueError, match="ties rows"):
        run(ties, X, Y)


@pytest.mark.slow
def test_memory_is_that_of_a_block(few_bytes, monkeypatch):
    """What the compiled program of a slope holds does not grow with the rows."""

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        kernel = sgp.kernels.RBF(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def held(number):
        inputs = np.linspace(0.0, 5.0, number)[:, None]
        data, free = (inputs, np.sin(inputs[:, 0])), jnp.zeros(1)
        guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=inputs[:: number // 6]))
        guide.setup(*data)
        field = sgp.integrated.field.Field(guide, data, {})
        row_parts.choose_layout(field, free, data, {})
        parts = row_parts.RowParts(field, data, {})

        def slope(free, arrays):
            def part(here):
                return jnp.sum(here.linear.maps**2 / (1.0 + here.linear.left[:1] ** 2))

            return jax.grad(lambda v: parts.total(part, v, field.points, arrays))(free)

        compiled = jax.jit(slope).lower(free, parts.arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few_bytes(grouped)
    blocks = [held(number) for number in (600, 2400)]
    monkeypatch.setattr(row_parts, "LARGEST", 1e9)
    whole = [held(number) for number in (600, 2400)]
    # Of rows in blocks only the indices are kept.
    assert blocks[1] - blocks[0] <= 8 * 1800
    assert whole[1] - whole[0] > 20 * 1800

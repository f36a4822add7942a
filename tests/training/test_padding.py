"""Padded rows: the bound of the rows that count, and no program for a new number."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI

import numpyro_sgp as sgp

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(16, 2)), rng.normal(size=16)


def model(X, y=None, mask=True):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Laplace(f, 0.5), obs=y)


def make():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    optimiser = sgp.natural_gradients(guide, 0.3, optax.adam(0.02))
    return SVI(model, guide, optimiser, sgp.TraceGP_ELBO())


def test_the_bound_and_its_gradient_are_those_of_the_rows():
    svi = make()
    params = svi.get_params(svi.init(jax.random.key(0), X[:11], Y[:11]))

    def loss(params, *data):
        found = jax.tree.map(lambda v: 0.9 * v + 0.03, params)
        return svi.loss.loss(jax.random.key(0), found, model, svi.guide, *data)

    value_and_slopes = jax.jit(jax.value_and_grad(loss))
    known, slope = value_and_slopes(params, X[:11], Y[:11])
    padded = sgp.pad_rows(X[:11], Y[:11], size=14)
    assert padded[0].shape == (14, 2) and padded[2].sum() == 11
    got, gradient = value_and_slopes(params, *padded)
    assert_allclose(got, known, rtol=1e-10)
    for name in params:
        assert_allclose(gradient[name], slope[name], rtol=1e-9, atol=1e-10)


def test_rounds_of_growing_data_compile_nothing(count_compiled):
    svi, state, counts = make(), None, []
    for num_rows in range(9, 14):
        count_compiled()
        data = sgp.pad_rows(X[:num_rows], Y[:num_rows])
        result = sgp.train(
            svi,
            jax.random.key(num_rows),
            data,
            10,
            batch_size=16,
            shuffle=False,
            chunk=10,
            init_state=state,
            progress_bar=False,
        )
        state = result.state
        sgp.predict(svi.guide, result.params, X)
        counts.append(count_compiled())
    # The second goes on from a state, the first began.
    assert counts[0] > 0 and counts[2:] == [0, 0, 0]


def test_rows_are_filled_to_the_next_power_of_two():
    X_padded, y, mask = sgp.pad_rows(X[:5], Y[:5])
    assert_array_equal(X_padded, X[[0, 1, 2, 3, 4, 0, 1, 2]])
    assert_array_equal(y, Y[[0, 1, 2, 3, 4, 0, 1, 2]])
    assert_array_equal(mask, np.arange(8) < 5)
    assert [len(sgp.pad_rows(X[:n])[0]) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    with pytest.raises(ValueError, match="at least the 5 rows given, got 4"):
        sgp.pad_rows(X[:5], size=4)
    with pytest.raises(ValueError, match=r"same number of rows.*\(5, 2\), \(4,\)"):
        sgp.pad_rows(X[:5], Y[:4])

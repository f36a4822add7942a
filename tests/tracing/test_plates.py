"""Plates with fewer rows than their minibatches have all of them, in their order."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_sgp as sgp

X, NUMBER = jnp.linspace(0.0, 4.0, 15)[:, None], 7
OFFSETS = jnp.linspace(1.0, 2.0, 15)
Y = jnp.sin(2.0 * X[:, 0]) + 100.0 * OFFSETS


def model(X, offsets, y=None):
    rows = numpyro.plate("rows", X.shape[0], subsample_size=NUMBER)
    with rows as i:
        X, offsets, y = X[i], offsets[i], None if y is None else y[i]
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with rows:
        numpyro.deterministic("offsets", offsets)
        numpyro.sample("y", dist.Normal(f + 100.0 * offsets, 0.3), obs=y)


def exact_mean(X_new):
    def k(a, b):
        return np.exp(-0.5 * (np.asarray(a) - np.asarray(b).T) ** 2)

    centred = np.asarray(Y - 100.0 * OFFSETS)
    return k(X_new, X) @ np.linalg.solve(k(X, X) + 0.09 * np.eye(15), centred)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)])
def fitted(request):
    points = sgp.SVGP(inducing=X, train_inducing=False)
    given = {"joint": request.param, "progress_bar": False, "rng_key": jax.random.key(1)}
    return sgp.fit(model, points, (X, OFFSETS, Y), **given)


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [2, 5])
def test_few_new_rows_stay_in_their_order(fitted, number):
    new = jnp.linspace(0.2, 3.7, number)[:, None], jnp.arange(1.0, number + 1)
    mean = exact_mean(new[0])
    # The bound is of minibatches, trained by steps with noise: .02 of sds of .1 to .3,
    # where means differ by .3 and more.
    predictions = fitted.predict(*new)
    assert_allclose(predictions["f"].mean, mean, atol=0.05)
    assert_allclose(predictions["y"].mean - 100.0 * new[1], mean, atol=0.05)
    assert_allclose(fitted.posterior(*new)["f"].mean, mean, atol=0.05)
    draws = fitted.sample(jax.random.key(0), *new, sample_shape=(400,))
    assert_allclose(draws["offsets"], np.broadcast_to(new[1], (400, number)))
    assert_allclose(draws["f"].mean(0), mean, atol=0.1)  # 400 draws of an sd of .3
    scores = fitted.log_score(*new, jnp.asarray(mean) + 100.0 * new[1])["y"].rows
    assert np.all(np.asarray(scores) > -0.2)  # as of the mean; 100 off it is -50,000


def test_a_guide_is_set_up_by_fewer_rows_than_a_minibatch():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X[:5], OFFSETS[:5], Y[:5])
    with numpyro.handlers.seed(rng_seed=0):
        assert guide(X[:5], OFFSETS[:5], Y[:5])["f"].shape == (5,)

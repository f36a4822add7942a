"""Log scores of nested results where rows are few, or beside sites of no rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import condition

import numpyro_sgp as sgp
from tests.helpers import slow

RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0.0, 5.0, (40, 1)), axis=0)
KERNEL = sgp.kernels.RBF(1.0, 1.0)


def run(model, y, X=X, **options):
    return sgp.nested(model, sgp.SVGP(10), (X, y), progress_bar=False, **options)


@pytest.fixture(scope="module")
def outputs():
    """Three outputs of three functions, with little noise."""
    W = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.5], [0.3, 0.0, 1.0]])

    def model(X, Y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X).expand([3]))
        with numpyro.plate("data", X.shape[0]):
            fn = dist.Normal(jnp.einsum("pq,qn->np", W, f), 0.02)
            numpyro.sample("Y", fn.to_event(1), obs=Y)

    Y = np.stack([np.sin(X[:, 0]), np.cos(X[:, 0]), X[:, 0] / 5.0], 1)
    return run(model, Y + 0.02 * RNG.normal(size=Y.shape)), Y


@pytest.mark.slow
@pytest.mark.parametrize("number", [slow(1), slow(2), 3])
def test_a_row_has_its_score_among_however_many(outputs, number):
    """Of one row and of as many as there are functions, by nodes and not by draws."""
    posterior, Y = outputs
    X_new = np.array([[-0.5], [6.5], [2.0], [2.5]])
    together = posterior.log_score(X_new, Y[:4])["Y"].rows
    some = posterior.log_score(X_new[:number], Y[:number])["Y"].rows
    np.testing.assert_allclose(some, together[:number], atol=1e-6)


@pytest.mark.slow
def test_functions_that_are_as_many_as_rows_are_no_rows():
    """A softmax of (3, N) functions at three rows, beside drawn functions."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X).expand([3]))
        probs = jax.nn.softmax(2.0 * f, axis=0)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(probs=probs.T), obs=y)

    posterior = run(model, np.arange(40) * 3 // 40)
    X_new, y_new = X[[1, 15, 25]], np.array([0, 2, 1])
    found = posterior.log_score(X_new, y_new)["y"].rows
    draws = posterior.sample(jax.random.key(0), X_new, sample_shape=(20_000,))
    probs = np.asarray(jax.nn.softmax(2.0 * jnp.asarray(draws["f"]), axis=1))
    density = probs[:, y_new, np.arange(3)]
    # Within five standard errors of the mean of so many draws, and the rule's own error.
    error = density.std(axis=0) / np.sqrt(len(density)) / density.mean(axis=0)
    assert np.all(np.abs(found - np.log(density.mean(axis=0))) < 5.0 * error + 1e-3)


@pytest.mark.slow
def test_a_site_of_no_rows_leaves_the_others_theirs():
    """A noise that is conditioned on is an observed site; those of rows have no draws."""

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    y = np.sin(X[:, 0]) + 0.01 * RNG.normal(size=40)
    posterior = run(condition(model, {"noise": 0.01}), y)
    X_new = np.array([[-0.5], [6.5], [2.0], [2.5]])
    y_new = np.sin(X_new[:, 0])
    q = posterior.posterior(X_new)["f"]
    variance = np.asarray(q.variance) + 0.01**2
    exact = -0.5 * ((y_new - np.asarray(q.mean)) ** 2 / variance)
    exact -= 0.5 * np.log(2.0 * np.pi * variance)
    found = posterior.log_score(X_new, y_new)["y"].rows
    np.testing.assert_allclose(found, exact, atol=1e-4)


@pytest.mark.slow
def test_functions_of_single_precision_inputs_beside_double_ones():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    posterior = run(model, np.sin(X[:, 0]), X.astype(np.float32))
    drawn = posterior.functions(jax.random.key(0), (2,))["f"](X[:5])
    assert drawn.shape == (2, 5) and np.isfinite(drawn).all()


@pytest.mark.slow
def test_factors_of_each_row_are_scored_as_observations_are():
    """They were left out where there was an observed site too; fits had them."""
    y = np.sin(X[:, 0]) + 0.3 * RNG.normal(size=40)

    def model(X, y=None, by_factor=False):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.factor("of no row", -jnp.square(f[0]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("sign", dist.Bernoulli(logits=f), obs=1 * (y > 0))
            if by_factor:
                numpyro.factor("y", dist.Normal(f, 0.3).log_prob(y))
            else:
                numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    posterior = run(model, y)
    found, expected = (posterior.log_score(X, y, way) for way in (True, False))
    assert set(found) == set(expected) == {"sign", "y"}
    np.testing.assert_allclose(found["y"].rows, expected["y"].rows, atol=1e-8)

"""Functions drawn from nested results, beside their posteriors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from tests.integrated.dense import rows

RNG, X = rows(30, 1)
Y = 1.0 + np.sin(X[:, 0]) + 0.2 * RNG.normal(size=30)
X_NEW = np.array([[0.4], [2.5], [8.0]])
DRAWS = 3000


def observe(eta, y):
    with numpyro.plate("data", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.3), obs=y)


def two_sites(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern32(0.5, 0.2), X))
    numpyro.deterministic("total", f + g)
    observe(f + g, y)


def with_a_level(X, y=None):
    """In the mean of the process, so that each draw has a mean of its own."""
    level = numpyro.sample("level", dist.Normal(0.5, 2.0))
    with numpyro.plate("both", 2):
        slope = numpyro.sample("slope", dist.Normal(0.0, 0.5))
    mean = sgp.means.Linear(slope[:1], level)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X, mean))
    observe(f + slope[1], y)


def with_a_level_in_a_function(X, y=None):
    """The same by a function, in which JAX does not see it."""
    level = numpyro.sample("level", dist.Normal(0.5, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))

    def mean(X):
        return level + scale * 0.1 * X[:, 0]

    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X, mean))
    observe(f, y)


def assert_moments(values, q):
    """
    Means and standard deviations of 3,000 draws within five standard errors: wrong for
    fewer than one in 10^5 of numbers. (Of sds a Gaussian's error; mixtures of kernels have
    nearly that.)
    """
    values = np.asarray(values)
    assert np.all(np.abs(values.mean(0) - q.mean) < 5.0 * q.sd / np.sqrt(DRAWS))
    assert np.all(np.abs(values.std(0) / q.sd - 1.0) < 5.0 / np.sqrt(2 * DRAWS))


@pytest.fixture(scope="module")
def posterior():
    return sgp.nested(two_sites, sgp.SVGP(6), (X, Y), progress_bar=False)


@pytest.mark.slow
def test_their_moments_are_those_of_the_posterior(posterior):
    """Of sums too: sites are drawn together."""
    found = posterior.functions(jax.random.key(0), DRAWS, num_features=64)
    q, f, g = posterior.posterior(X_NEW), found["f"](X_NEW), found["g"](X_NEW)
    assert_moments(f, q["f"])
    assert_moments(g, q["g"])
    assert_moments(f + g, q["total"])
    assert len(found["f"].parts) > 5


@pytest.mark.slow
def test_they_are_functions(posterior):
    found = posterior.functions(jax.random.key(1), (2, 3))["f"]
    assert found(X_NEW).shape == (2, 3, 3)
    np.testing.assert_allclose(found(X_NEW)[..., 1:], found(X_NEW[1:]), atol=1e-9)
    np.testing.assert_allclose(jax.jit(lambda f, X: f(X))(found, X_NEW), found(X_NEW))
    one = posterior.functions(jax.random.key(1))["g"]
    assert one(X_NEW).shape == (3,)
    again = posterior.functions(jax.random.key(1))["g"]
    np.testing.assert_array_equal(one(X_NEW), again(X_NEW))


@pytest.mark.slow
@pytest.mark.parametrize("model", [with_a_level, with_a_level_in_a_function])
def test_means_of_processes_with_effects_in_them(model):
    """Functions of the user ended in JAX' error of a tracer that has leaked."""
    found = sgp.nested(model, sgp.SVGP(5), (X, Y), progress_bar=False)
    drawn = found.functions(jax.random.key(0), 600, num_features=16)["f"](X_NEW)
    q, values = found.posterior(X_NEW)["f"], np.asarray(drawn)
    # Five standard errors of 600 draws.
    assert np.all(np.abs(values.mean(0) - q.mean) < 5.0 * q.sd / np.sqrt(600))
    assert np.all(np.abs(values.std(0) / q.sd - 1.0) < 5.0 / np.sqrt(1200))


@pytest.mark.slow
def test_of_a_joint_fit_and_of_a_file(tmp_path):
    fitted = sgp.fit(two_sites, sgp.SVGP(4), (X, Y), joint=True, progress_bar=False)
    fitted.save(tmp_path / "joint.npz")
    loaded = sgp.load(tmp_path / "joint.npz", two_sites)
    f, other = (r.functions(jax.random.key(2), 4)["f"](X_NEW) for r in (fitted, loaded))
    assert f.shape == (4, 3)
    np.testing.assert_allclose(f, other, atol=1e-9)


@pytest.mark.slow
def test_what_is_refused(posterior):
    with pytest.raises(ValueError, match="num_features must be"):
        posterior.functions(jax.random.key(0), num_features=0)
    with pytest.raises(ValueError, match="table|shape"):
        posterior.functions(jax.random.key(0))["f"](jnp.zeros(()))


@pytest.mark.slow
def test_a_kernel_without_features_has_no_functions():
    class Kernel:
        def __call__(self, A, B):
            return jnp.exp(-0.5 * (A[:, None, 0] - B[None, :, 0]) ** 2)

        def diag(self, A):
            return jnp.ones(len(A))

    def model(X, y=None):
        observe(numpyro.sample("f", sgp.GaussianProcess(Kernel(), X)), y)

    found = sgp.nested(model, sgp.SVGP(4), (X, Y), progress_bar=False)
    with pytest.raises(NotImplementedError, match="features"):
        found.functions(jax.random.key(0))

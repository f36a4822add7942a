"""Responses far from what f says, and those that depend on each other, to their digits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.integrate
import scipy.stats
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult
from numpyro.infer.util import log_density

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import to_arviz
from numpyro_sgp.diagnostics.given import warned_of_undrawn
from numpyro_sgp.kernels import RBF, White
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.predictive import cumulative
from numpyro_sgp.predictive.mixture import NoMarginals
from tests.helpers import slow

X = np.linspace(0.0, 6.0, 8)[:, None]
Y = np.linspace(0.05, 0.95, 8)


def limited(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.TruncatedNormal(f, 0.1, low=0.0, high=1.0), obs=y)


def expected(f, y):
    """By SciPy's log cdfs: of both limits below or above the mean those of one tail."""
    a, b = (0.0 - f) / 0.1, (1.0 - f) / 0.1
    a, b = np.where(a > 0.0, -b, a), np.where(a > 0.0, -a, b)
    top, bottom = scipy.stats.norm.logcdf(b), scipy.stats.norm.logcdf(a)
    inside = top + np.log1p(-np.exp(bottom - top))
    return scipy.stats.norm.logpdf(y, f, 0.1) - inside


@pytest.mark.slow
def test_log_likelihoods_of_arviz_are_those_of_the_bound():
    """NumPyro's is infinite eight sds beyond a limit in float32, and so was LOO."""
    with jax.enable_x64(False):
        guide = sgp.AutoSparseGP(limited, sgp.SVGP(3))
        guide.setup(X, Y)  # q(u) is the prior
        svi = SVI(limited, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        result = SVIRunResult(guide.known().starts, None, np.zeros(1))
        tree = to_arviz(svi, X, Y, result=result, num_samples=50, khat=False)
    f = tree["posterior"]["f"].values[0].astype(float)
    assert np.sum(np.abs(f - 0.5) > 1.5) > 20
    found = tree["log_likelihood"]["y"].values[0]
    np.testing.assert_allclose(found, expected(f, Y), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_nuts_on_whitened_models_has_the_same_density():
    white = sgp.whiten(limited)
    with jax.enable_x64(False):
        kernel = RBF()(jnp.float32(X), jnp.float32(X)) + 1e-6 * jnp.eye(8)
        f = jnp.full(8, -0.9, jnp.float32)
        v = jnp.linalg.solve(jnp.linalg.cholesky(kernel), f)
        args = jnp.float32(X), jnp.float32(Y)
        density, trace = log_density(white, args, {}, {"f_white": v})
        density = density - jnp.sum(dist.Normal().log_prob(v))
    f = np.asarray(trace["f"]["value"], float)
    np.testing.assert_allclose(density, expected(f, Y).sum(), rtol=1e-3)


@pytest.mark.parametrize("limits", [(-1.0, 2.0), (30.0, 31.0), (-1.0, -0.99)])
def test_moments_of_cauchy_responses_between_limits(limits):
    fn = dist.TruncatedCauchy(0.3, 1.2, low=limits[0], high=limits[1])
    density = scipy.stats.cauchy(0.3, 1.2).pdf
    total, first, second = (
        scipy.integrate.quad(lambda y, k=k: y**k * density(y), *limits, epsabs=0.0)[0]
        for k in range(3)
    )
    mean, variance = cumulative.moments(fn)
    np.testing.assert_allclose(mean, first / total, rtol=1e-9)
    np.testing.assert_allclose(variance, second / total - mean**2, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sgp.MarginalGP, slow(sgp.CollapsedSVGP)])
def test_functions_with_one_prior_and_a_noise_each(kind):
    points = () if kind is sgp.MarginalGP else (X[::2],)
    y, noise = np.stack([Y, np.cos(X[:, 0])]), np.array([[0.1], [0.3]])
    both = kind(RBF(), X, *points, noise=noise)
    assert both.batch_shape == both.expand([2]).batch_shape == (2,)
    apart = [kind(RBF(), X, *points, noise=float(s)) for s in noise[:, 0]]
    each = [fn.log_prob(values) for fn, values in zip(apart, y, strict=True)]
    np.testing.assert_allclose(both.log_prob(y), each, rtol=1e-10)
    found = both.posterior(y, X[:3] + 0.1)
    each = [fn.posterior(v, X[:3] + 0.1).mean for fn, v in zip(apart, y, strict=True)]
    np.testing.assert_allclose(found.mean, each, rtol=1e-8)
    with pytest.raises(ValueError, match="does not broadcast"):
        kind(RBF(), X, *points, noise=np.full((8, 1), 0.1))


@pytest.mark.slow
def test_the_diagonal_of_patches_with_noise_is_that_of_the_matrix():
    kernel = sgp.kernels.Convolutional(RBF() + White(0.5), (3, 3), 2)
    images = np.random.default_rng(0).standard_normal((3, 9))
    matrix = kernel(images, images)
    np.testing.assert_allclose(kernel.diag(images), np.diag(matrix), rtol=1e-10)


def test_classes_of_stacked_responses():
    f = jnp.zeros((2, 3, 4))  # draws, classes, rows
    found = jax.vmap(lambda f: RobustMax(f))(f)
    assert found.support.upper_bound == 2


@pytest.mark.slow
def test_a_response_that_chooses_among_numbers_is_refused_by_its_name():
    def model(X, z=None, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            z = numpyro.sample("z", dist.Bernoulli(logits=f), obs=z)
            numpyro.sample("y", dist.Normal(f + jnp.array([0.0, 1.0])[z], 0.1), obs=y)

    z = (Y > 0.5).astype(int)
    fitted = sgp.fit(model, sgp.SVGP(3), (X, z, Y), steps=2, progress_bar=False)
    with pytest.raises(NoMarginals, match="on the value of response 'z'.* together"):
        fitted.predict(X)


def test_latents_that_are_summed_out_leave_no_log_likelihood():
    """With a class from its prior in each draw it was thousands of nats off."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            options = {"infer": {"enumerate": "parallel"}}
            k = numpyro.sample("k", dist.Bernoulli(0.1 * jnp.ones(X.shape[0])), **options)
            numpyro.sample("y", dist.Normal(f, jnp.where(k == 1, 3.0, 0.1)), obs=y)

    trace = handlers.trace(handlers.seed(model, 0)).get_trace(X, Y)
    assert not warned_of_undrawn(trace, {"f": 0, "k": 0})
    with pytest.warns(UserWarning, match="'k' has no draws .* LOO"):
        assert warned_of_undrawn(trace, {"f": 0})

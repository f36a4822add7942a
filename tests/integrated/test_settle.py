"""Whether draws are weighed is seen where hyperparameters may be, not at the mode alone."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_sgp as sgp

N, JITTER = 9, 1e-9
X = np.linspace(0.0, 4.0, N)[:, None]
CLASSES = np.array([0, 0, 0, 1, 0, 1, 1, 1, 1])


def model(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(1.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(variance, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def from_the_prior(number=2_000_000):
    """Log evidence, means and sds of f by draws from the prior, in NumPy."""
    root = np.linalg.cholesky(np.exp(-0.5 * (X - X.T) ** 2) + JITTER * np.eye(N))
    rng, total, first, second = np.random.default_rng(0), 0.0, 0.0, 0.0
    signs = np.where(CLASSES, 1.0, -1.0)
    for _ in range(10):
        scale = np.exp(0.5 + 0.5 * rng.normal(size=(number // 10, 1)))
        f = scale * (rng.normal(size=(number // 10, N)) @ root.T)
        weights = np.exp(-np.logaddexp(0.0, -signs * f).sum(axis=-1))
        total = total + weights.sum()
        first, second = first + weights @ f, second + weights @ f**2
    mean = first / total
    return np.log(total / number), mean, np.sqrt(second / total - mean**2)


@pytest.mark.slow
def test_a_tail_of_hyperparameters_in_which_f_is_no_gaussian():
    """At the mode weights gain .004 nats; by it alone sds were 4 % too small."""
    found = sgp.nested(model, sgp.VGP(), (X, CLASSES), progress_bar=False)
    evidence, mean, sd = from_the_prior()
    # The reference has a standard error of .002 by its effective number of draws, and so
    # have its sds. By ten sets of 2,048 draws at each node sds are 1.6 % too small at most
    # in the mean, with standard deviations from set to set of .3 to 1.3 %.
    assert abs(found.log_evidence - evidence) < 0.01
    f = found.posterior(X)["f"]
    assert_allclose(f.sd / sd, 1.0, atol=0.03)
    assert_allclose((f.mean - mean) / sd, 0.0, atol=0.03)

"""What weights of draws from q(w) gain, beside integrals in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import gammaln, logsumexp

import numpyro_sgp as sgp

X = np.linspace(0.0, 10.0, 30)[:, None]
Y = np.random.default_rng(0).poisson(np.exp(2.0 + np.sin(3.0 * X[:, 0])))
Z = np.array([[3.0], [7.0]])


def counts(X, y=None):
    kernel = sgp.kernels.RBF(1.0, 0.5)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=2.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def best_bound():
    """
    Log of the integral of p(u) exp E[log p(y | f) | u], whose expectation has a form of its
    own, over a grid of both inducing variables; the two are independent a priori.
    """
    A = np.exp(-0.5 * ((Z - X.T) / 0.5) ** 2)
    ends = np.linspace(-6.0, 6.0, 301)
    u = np.array(list(itertools.product(ends, ends)))
    f, left = 2.0 + u @ A, 1.0 - np.sum(A**2, axis=0)
    rates = np.exp(f + 0.5 * left)
    found = np.sum(Y * f - rates - gammaln(Y + 1.0), axis=1)
    found = found - 0.5 * np.sum(u**2, axis=1) - np.log(2 * np.pi)
    return logsumexp(found) + 2 * np.log(ends[1] - ends[0])


@pytest.mark.slow
def test_what_points_leave_open_is_no_gain():
    """
    Of few points, which leave most rows open: 256 draws have the best bound to .01, and
    gains below .02 are left out.
    """
    option = sgp.SVGP(inducing=Z, train_inducing=False, jitter=1e-10)
    found = sgp.nested(counts, option, (X, Y), progress_bar=False)
    assert abs(found.log_evidence - best_bound()) < 0.03

"""What is told of nats that jitter costs, beside dense linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from numpyro.optim import Adam

import numpyro_sgp as sgp
from numpyro_sgp.fitting.check import problem_at
from numpyro_sgp.fitting.jitter import of_jitter
from numpyro_sgp.fitting.verdict import Cause
from tests.helpers import slow

N, VARIANCE, NOISE = 12, 4e6, 0.2
X = np.linspace(0.0, 5.0, N)[:, None]
Y = np.sin(2.0 * X[:, 0]) + 300.0
SEEN = [Cause("family", 3.0)]


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(VARIANCE, 3.0), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def collapsed(jitter):
    """The bound with its best q(u) (Titsias 2009, eq. 9), inducing points at all rows."""
    values, vectors = np.linalg.eigh(np.exp(-0.5 * (X - X.T) ** 2 / 9.0))
    values = VARIANCE * np.maximum(values, 0.0)
    kept = values**2 / (values + jitter * VARIANCE)
    total = kept + NOISE**2
    fit = np.sum((vectors.T @ Y) ** 2 / total) + np.sum(np.log(2.0 * np.pi * total))
    return -0.5 * (fit + np.sum(values - kept) / NOISE**2)


def rows(approximation, causes):
    svi = SVI(model, sgp.AutoSparseGP(model, approximation), Adam(0.1), sgp.TraceGP_ELBO())
    data = X, jnp.asarray(Y)
    state = svi.init(jax.random.key(0), *data)
    return of_jitter(problem_at(svi, svi.get_params(state), data, {}), None, causes)


@pytest.mark.parametrize(
    "approximation", [sgp.VGP(), slow(sgp.SVGP(inducing=X, train_inducing=False))]
)
def test_nats_of_jitter_are_those_of_dense_bounds(approximation):
    (row,) = rows(approximation, SEEN)
    # Eigenvalues near the jitter of 1e-10 are right to 1e-6 of it.
    assert_allclose(row.nats, collapsed(1e-10) - collapsed(1e-8), rtol=1e-4)
    assert row.nats > 3.0 and "jitter=1e-10" in row.mend


def test_where_it_costs_nothing_there_is_no_row():
    assert not rows(sgp.VGP(jitter=1e-11), SEEN)
    assert not rows(sgp.VGP(jitter=1e-8), [Cause("family", 0.5)])

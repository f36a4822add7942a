"""What the nodes of a bound's quadrature cost, beside integrals of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics.integration import begin_finer, finer
from numpyro_sgp.elbo.quadrature import SharedAxes

SCALE, KEY = 0.05, jax.random.key(0)
X = np.linspace(0.0, 6.0, 30)[:, None]
Y = 1.5 * np.sin(2.0 * X[:, 0])


def student(X, y=None, scale=SCALE):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, scale), obs=y)


def at_prior(model, loss, **kwargs):
    """The finer bound of three points at the prior."""
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3, train_inducing=False))
    guide.setup(X, Y, **kwargs)
    params = {"f_auto_qu_mu": jnp.zeros(3), "f_auto_qu_sqrt": jnp.eye(3)}
    return begin_finer(guide, params, (X, Y), kwargs, loss, KEY)()


def expected(nodes, weights):
    log_probs = stats.t.logpdf(Y[:, None], 4.0, nodes, SCALE)  # f is N(0, 1) at each row
    return float(np.sum(log_probs @ weights))


@pytest.mark.quick(4)
def test_the_excess_is_that_of_the_rules_expectations():
    found = at_prior(student, sgp.TraceGP_ELBO())
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    dense = np.linspace(-9.0, 9.0, 100_001)
    own = expected(nodes, weights / weights.sum())
    right = expected(dense, stats.norm.pdf(dense) * (dense[1] - dense[0]))
    assert abs(own - right) > 0.1
    assert_allclose(found.excess, own - right, atol=1e-6)
    assert (found.own, found.rule) == (sgp.GaussHermite(20), sgp.Trapezoid(400))
    assert found.written == "sgp.Trapezoid(400)"


@pytest.mark.parametrize(
    ("rule", "rows", "finer_rule"),
    [
        (sgp.GaussHermite(20), 100, sgp.Trapezoid(400)),
        (sgp.GaussHermite(10), (2, 100), sgp.Trapezoid(60)),
        (sgp.Trapezoid(400), 100, sgp.Trapezoid(1200)),
        (
            sgp.AlongPredictors(sgp.GaussHermite(20), 1),
            (3, 100),
            sgp.AlongPredictors(sgp.Trapezoid(400), 1),
        ),
        (
            SharedAxes(sgp.GaussHermite(10), (0, 1, 0)),
            (3, 100),
            SharedAxes(sgp.Trapezoid(60), (0, 1, 0)),
        ),
        (sgp.GaussHermite(20), 20_000, None),  # too many nodes
        (sgp.GaussHermite(10), (3, 100), None),
        (sgp.MonteCarlo(10), 100, None),
    ],
)
def test_the_finer_rule(rule, rows, finer_rule):
    shape = rows if isinstance(rows, tuple) else (rows,)
    assert finer(rule, {"f": shape}) == finer_rule


def test_of_draws_there_is_none():
    assert at_prior(student, sgp.TraceGP_ELBO(sgp.MonteCarlo(4))) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_check_tells_of_too_few_nodes_and_its_mend_mends_it(number):
    """Three points that leave f a standard deviation of fifty scales of the noise."""

    def model(X, y=None):
        kernel = sgp.kernels.RBF(1.0, 0.3)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X).expand([number]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.StudentT(4.0, f.sum(axis=0), 0.02), obs=y)

    given = model, sgp.SVGP(3, train_inducing=False), (X, Y)
    fitted = sgp.fit(*given, progress_bar=False)
    verdict = fitted.check()
    cause = verdict.causes["quadrature"]
    assert cause.nats > 0.5 and "quadrature" in verdict.summary
    rule = cause.mend.removeprefix("expectation=").removesuffix(", and a fit again")
    rule = eval(rule, {"sgp": sgp})
    again = sgp.fit(*given, expectation=rule, progress_bar=False)
    assert "quadrature" not in again.check().causes


@pytest.mark.slow
def test_nothing_is_told_where_nodes_do():
    fitted = sgp.fit(student, sgp.SVGP(12), (X, Y), progress_bar=False, scale=0.5)
    assert "quadrature" not in fitted.check().causes

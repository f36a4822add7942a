"""What the nodes of a bound's quadrature cost, beside integrals of one's own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.elbo.quadrature import SharedAxes
from numpyro_sgp.fitting import integration, training
from numpyro_sgp.fitting.check import problem_at
from numpyro_sgp.fitting.integration import finer, of_nodes
from numpyro_sgp.fitting.progress import INTERRUPTED
from numpyro_sgp.training.descent import Descent

SCALE, KEY = 0.05, jax.random.key(0)
X = np.linspace(0.0, 6.0, 30)[:, None]
Y = 1.5 * np.sin(2.0 * X[:, 0])


def student(X, y=None, scale=SCALE):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, scale), obs=y)


def at_prior(model, loss, sites="f"):
    """What is told of the bound with three points at the prior."""
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3, train_inducing=False))
    svi = SVI(model, guide, optax.adam(0.1), loss)
    svi.init(KEY, X, Y)
    params = {}
    for site in sites:
        params |= {f"{site}_auto_qu_mu": jnp.zeros(3), f"{site}_auto_qu_sqrt": jnp.eye(3)}
    return of_nodes(problem_at(svi, params, (X, Y), {}), KEY)()


def expected(nodes, weights, scale=SCALE):
    log_probs = stats.t.logpdf(Y[:, None], 4.0, nodes, scale)  # f is N(0, 1) at each row
    return float(np.sum(log_probs @ weights))


def true_excess():
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    dense = np.linspace(-9.0, 9.0, 100_001)
    own = expected(nodes, weights / weights.sum())
    return own - expected(dense, stats.norm.pdf(dense) * (dense[1] - dense[0]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("at_once", [5e5, 4_000.0])  # all rows, and ten
def test_the_excess_is_that_of_the_rules_expectations(at_once, monkeypatch):
    told = []
    monkeypatch.setattr(integration, "told_of", lambda *given: told.append(given) or [])
    monkeypatch.setattr(integration, "_AT_ONCE", at_once)
    at_prior(student, sgp.TraceGP_ELBO())
    ((excess, *rules),) = told
    assert abs(true_excess()) > 0.1
    assert_allclose(excess, true_excess(), atol=1e-6)
    assert rules == [sgp.GaussHermite(20), sgp.Trapezoid(400)]


@pytest.mark.slow
def test_in_float32_it_is_as_in_float64():
    """Of terms of 1e7, whose rounding is more than what is told of."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(14.0 + f)), obs=y)

    with jax.enable_x64(False):
        y = np.random.default_rng(0).poisson(np.exp(14.0 + Y))
        fitted = sgp.fit(model, sgp.SVGP(12), (X, y), progress_bar=False, steps=20)
        causes = fitted.check().causes
    assert "quadrature" not in causes


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
        (sgp.GaussHermite(20), 60_000, None),  # too many nodes
        (sgp.Trapezoid(60), (2, 100), sgp.Trapezoid(180)),
        (sgp.GaussHermite(10), (3, 100), None),
        (sgp.MonteCarlo(10), 100, None),
    ],
)
def test_the_finer_rule(rule, rows, finer_rule):
    shape = rows if isinstance(rows, tuple) else (rows,)
    assert finer(rule, {"f": shape}) == finer_rule


@pytest.mark.slow
def test_two_sites_have_a_rule_of_two_variables(monkeypatch):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.StudentT(4.0, f, SCALE * jnp.exp(g)), obs=y)

    told = []
    monkeypatch.setattr(integration, "told_of", lambda *given: told.append(given) or [])
    at_prior(model, sgp.TraceGP_ELBO(), "fg")
    ((excess, *rules),) = told
    assert rules == [sgp.GaussHermite(10), sgp.Trapezoid(60)]
    nodes, own = np.polynomial.hermite_e.hermegauss(10)
    own = own / own.sum()

    def both(nodes, weights):
        pairs = zip(nodes, weights, strict=True)
        return sum(w * expected(nodes, weights, SCALE * np.exp(g)) for g, w in pairs)

    by_own = both(nodes, own)
    for number, rtol in (60, 1e-5), (2_001, 0.1):  # the same nodes, and as good as exact
        grid = (np.arange(number) + 0.5) * 16.0 / number - 8.0
        weights = stats.norm.pdf(grid)
        right = both(grid, weights / weights.sum())
        assert_allclose(excess, by_own - right, rtol=rtol)


def test_of_draws_there_is_none():
    assert at_prior(student, sgp.TraceGP_ELBO(sgp.MonteCarlo(4))) == []


def test_a_loss_of_ones_own_is_compared_with_itself(monkeypatch):
    class Half(sgp.TraceGP_ELBO):
        def loss(self, *args, **kwargs):
            return 0.5 * super().loss(*args, **kwargs)

    told = []
    monkeypatch.setattr(integration, "told_of", lambda *given: told.append(given) or [])
    at_prior(student, Half())
    assert_allclose(told[0][0], 0.5 * true_excess(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_check_tells_of_too_few_nodes_and_its_mend_mends_it(number, monkeypatch):
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
    rule = eval(re.search("expectation=(.*), and a fit", cause.mend)[1], {"sgp": sgp})
    again = sgp.fit(*given, expectation=rule, progress_bar=False)
    problem = problem_at(again.svi, again.params, again.args, again.kwargs)
    told = []
    monkeypatch.setattr(integration, "told_of", lambda *given: told.append(given) or [])
    of_nodes(problem, KEY)()
    assert abs(told[0][0]) < 0.1 < cause.nats  # a rule of three times the nodes says so


def layers(X, y=None):
    h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    inner = sgp.kernels.RBF(1.0, 0.5)
    f = numpyro.sample("f", sgp.GaussianProcess(inner, h[:, None]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, 0.1), obs=y)


@pytest.mark.slow
def test_layers_that_wave_between_nodes_are_trained_by_draws():
    """The bound by ten nodes of each layer ends some 200 nats above the truth."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0.0, 5.0, (40, 1)), axis=0)
    y = np.sin(2.0 * X[:, 0]) + 0.1 * rng.standard_t(4.0, size=40)
    fitted = sgp.fit(layers, sgp.SVGP(8), (X, y), progress_bar=False)
    assert "by draws, since by nodes the bound is" in fitted.stopped
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(4_000, antithetic=True))
    bound = -loss.loss(KEY, fitted.params, layers, fitted.guide, X, y)
    # Its sd is .3 of 40 rows, five of which are 1e-6.
    assert abs(fitted.bound - bound) < 2.0 and bound > -20.0


@pytest.mark.slow
def test_where_there_are_no_steps_left_it_is_told():
    with pytest.warns(UserWarning, match="nats too high by its 10 nodes.*MonteCarlo"):
        fitted = sgp.fit(layers, sgp.SVGP(8), (X, Y), progress_bar=False, steps=15)
    assert fitted.stopped.startswith("the bound is")


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_what_has_no_value_or_was_stopped_is_not_trained_again(interrupted, monkeypatch):
    started, own = [], training._Run.__init__

    def counted(self, *given):
        started.append(given)
        own(self, *given)

    def stopped(self, index, *rest):
        raise KeyboardInterrupt

    nats = 9.0 if interrupted else np.inf
    excess = integration.Excess(nats, sgp.GaussHermite(10), sgp.Trapezoid(60))
    monkeypatch.setattr(training, "begin_excess", lambda *_: lambda: excess)
    monkeypatch.setattr(training._Run, "__init__", counted)
    if interrupted:
        monkeypatch.setattr(Descent, "run", stopped)
    fitted = sgp.fit(layers, sgp.SVGP(4), (X, Y), progress_bar=False, steps=9)
    assert len(started) == 1 and (fitted.stopped == INTERRUPTED) == interrupted


@pytest.mark.slow
def test_nothing_is_told_where_nodes_do():
    fitted = sgp.fit(student, sgp.SVGP(12), (X, Y), progress_bar=False, scale=0.5)
    assert "quadrature" not in fitted.check().causes

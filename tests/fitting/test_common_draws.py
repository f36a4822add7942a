"""Bounds whose draws stay the same while they are trained."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.svi import SVIState

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics.bound import as_reported
from numpyro_sgp.fitting.common_draws import _RULE, with_common_draws
from numpyro_sgp.fitting.problem import Problem

N, C = 60, 3
rng = np.random.default_rng(0)
X = rng.uniform(-2.0, 2.0, (N, 1))
F = 3.0 * np.stack([np.sin(2.0 * X[:, 0]), np.cos(X[:, 0]), 0.0 * X[:, 0]])
Y = np.argmax(F.T + rng.gumbel(size=(N, C)), axis=1)


def classes(X, y=None, tied=False):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    kernel = sgp.kernels.RBF(4.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X).expand([C]))
    if tied:
        numpyro.factor("mean", -(jnp.mean(f) ** 2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def fit(model=classes, approximation=None, **options):
    approximation = approximation or sgp.SVGP(8)
    return sgp.fit(model, approximation, (X, Y), progress_bar=False, **options)


def bounds(fitted, number, keys=8):
    """By so many independent draws a row, for some keys."""
    loss = sgp.TraceGP_ELBO(sgp.MonteCarlo(number))
    svi = fitted.svi

    @jax.jit
    def bound(key):
        return -loss.loss(key, fitted.params, svi.model, svi.guide, X, Y)

    return np.array([bound(key) for key in jax.random.split(jax.random.key(7), keys)])


@pytest.fixture(scope="module")
def fitted():
    return fit()


@pytest.mark.slow
def test_three_classes_converge_to_the_best_bound(fitted):
    """By random draws it ended .3 to .9 nats below, on such data."""
    assert fitted.stopped.startswith("converged")
    assert fitted.svi.loss.expectation == _RULE
    # The same bound by twenty times as many draws of another sequence.
    finer = sgp.MonteCarlo(1024, antithetic=True, sequence="sobol", seed=3)
    best = fit(expectation=finer, steps=40, approximation=fitted.guide)
    found, other = bounds(fitted, 2000), bounds(best, 2000)
    # The same keys, whose errors are nearly those of both: .01 nats.
    assert np.mean(found - other) > -0.1


@pytest.mark.slow
def test_the_bound_is_that_of_other_draws_than_those_of_training(fitted):
    found = bounds(fitted, 2000)
    se = np.hypot(fitted.bound_se, found.std(ddof=1) / np.sqrt(len(found)))
    # Four standard errors: one in 16,000 by chance, of one key.
    assert 0.0 < fitted.bound_se < 0.2 and abs(fitted.bound - found.mean()) < 4.0 * se
    assert as_reported(fitted.svi.loss).expectation == replace(_RULE, seed=None)
    tree = fitted.to_arviz(khat=False)
    assert abs(tree.attrs["log_joint_bound"] - fitted.bound) < 5.0 * fitted.bound_se


@pytest.mark.slow
def test_its_verdict_and_what_goes_on_know_the_draws(fitted, tmp_path):
    verdict = fitted.check()
    assert verdict.converged and verdict.causes["q(u)"].nats < 0.05
    more = sgp.fit(classes, fitted, (X, Y), progress_bar=False)
    assert more.svi.loss.expectation == _RULE
    assert abs(more.bound - fitted.bound) < 0.2
    fitted.save(tmp_path / "fit")
    loaded = sgp.load(tmp_path / "fit", classes)
    found, expected = (f.predict(X[:3])["y"].probs for f in (loaded, fitted))
    assert_allclose(found, expected, rtol=1e-12)


def is_random(model, base_guide=AutoDelta, expectation=None, rows=N, approximation=None):
    """Whether draws of a training are others at each step."""
    guide = sgp.AutoSparseGP(model, approximation or sgp.SVGP(4), base_guide)
    svi = SVI(model, guide, optax.sgd(0.1), sgp.TraceGP_ELBO(expectation))
    data = np.resize(X, (rows, 1)), np.resize(Y, rows)
    state = svi.init(jax.random.key(0), *data)
    return with_common_draws(Problem(svi, state, data, {})).random


def two_layers(X, y=None):
    inner = numpyro.sample("inner", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    classes(X + inner[:, None], y)


@pytest.mark.slow
def test_where_draws_stay_the_same():
    assert not is_random(classes)
    assert is_random(classes, rows=6_000)  # of which there are batches


@pytest.mark.slow
def test_where_draws_are_others_all_the_same():
    assert not is_random(classes, approximation=sgp.MixtureSVGP(4, num_components=2))
    assert is_random(classes, expectation=sgp.MonteCarlo(10))
    assert is_random(classes, base_guide=AutoNormal)  # which draws too
    assert is_random(partial(classes, tied=True))  # f(X) together
    assert is_random(two_layers)  # of which inner ones have no natural steps


@pytest.mark.slow
def test_no_key_changes_the_bound_that_is_trained(fitted):
    def loss(key):
        return fitted.svi.loss.loss(key, fitted.params, classes, fitted.guide, X, Y)

    losses = [float(loss(jax.random.key(i))) for i in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_one_goes_on_with_what_suits_its_rows(fitted):
    def rule(rows, batch_size=None):
        svi, data = fitted.svi, (np.resize(X, (rows, 1)), np.resize(Y, rows))
        state = SVIState(svi.optim.init(fitted.params), None, jax.random.key(0))
        problem = Problem(svi, state, data, {})
        return with_common_draws(problem, batch_size).svi.loss.expectation

    assert rule(N) == _RULE and rule(2 * N) == _RULE
    assert rule(N, batch_size=20) is None


@pytest.mark.slow
def test_a_joint_fit_with_a_random_loss_has_none():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        s = numpyro.sample("s", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + a[0] + a[1] * X[:, 0], s), obs=y)

    options = {"joint": True, "base_guide": AutoNormal, "steps": 3}
    found = sgp.fit(model, sgp.SVGP(4), (X, 0.1 * Y), progress_bar=False, **options)
    assert np.isfinite(found.bound)


class _OfOnesOwn(sgp.elbo.Expectation):
    seed = 3  # which is none of ours

    def nodes(self, rng_key, shapes, dtype):
        x = {k: jax.random.normal(rng_key, (10, *s), dtype) for k, s in shapes.items()}
        return x, jnp.full(10, 0.1, dtype)


@pytest.mark.slow
def test_a_seed_of_ones_own_rule_is_let_be():
    loss = sgp.TraceGP_ELBO(_OfOnesOwn())
    assert as_reported(loss).expectation is loss.expectation
    assert is_random(classes, expectation=_OfOnesOwn())


@pytest.mark.parametrize("sequence", ["random", "sobol"])
def test_draws_of_a_seed_are_the_same_in_both_precisions(sequence):
    rule = sgp.MonteCarlo(4, sequence=sequence, seed=1)
    shapes = {"f": (3, 5)}
    found = [
        rule.nodes(jax.random.key(0), shapes, dtype)[0]["f"]
        for dtype in (jnp.float32, jnp.float64)
    ]
    assert found[1].dtype == jnp.float64
    assert_allclose(found[0], found[1], rtol=1e-7)

"""User code runs twice for a step, in the guide and by itself; rules of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpy.testing import assert_allclose

import numpyro_sgp as sgp
from numpyro_sgp.elbo import Expectation
from numpyro_sgp.guides import AutoSparseGP
from tests import helpers

X, Y = helpers.regression_data(6)
runs = []


def one(X, y):
    runs.append("one")
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def two(X, y):
    runs.append("two")
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def deep(X, y):
    runs.append("deep")
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), f[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(g, 0.3), obs=y)


def set_up(model, approximation):
    guide = AutoSparseGP(model, approximation)
    with numpyro.handlers.trace() as trace, numpyro.handlers.seed(rng_seed=0):
        guide(X, Y)
    return guide, {k: s["value"] for k, s in trace.items() if s["type"] == "param"}


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("model", "approximation", "options"),
    [
        (one, sgp.SVGP(3), {}),
        (one, sgp.SVGP(3), {"num_particles": 2}),
        (one, sgp.SVGP(3), {"expectation": sgp.ScoreFunction(4)}),
        (one, sgp.SVGP(3), {"expectation": sgp.MonteCarlo(4, joint=True)}),
        (one, sgp.SVGP(3, tight="diagonal"), {}),
        (one, sgp.SVGP(3, tight="scalar"), {}),
        (one, sgp.SOLVEGP(3, 2), {}),
        (one, sgp.MixtureSVGP(3, 2), {}),
        (two, sgp.SVGP(3), {}),
        (deep, sgp.SVGP(3), {}),
    ],
)
def test_the_model_runs_twice_in_a_step(model, approximation, options):
    guide, params = set_up(model, approximation)
    elbo = sgp.TraceGP_ELBO(**options)

    def loss(params):
        return elbo.loss(random.key(0), params, model, guide, X, Y)

    runs.clear()
    jax.make_jaxpr(jax.value_and_grad(loss))(params)
    assert len(runs) == 2  # by the guide, for the priors, and by the ELBO


def test_the_model_runs_twice_for_derivatives_by_the_marginals():
    guide, params = set_up(two, sgp.SVGP(3))
    elbo = sgp.TraceGP_ELBO()
    runs.clear()
    jax.eval_shape(
        lambda params: elbo.marginal_gradients(random.key(0), params, two, guide, X, Y),
        params,
    )
    assert len(runs) == 2


class ThreePoints(Expectation):
    """Gauss-Hermite quadrature with three nodes, written down."""

    def nodes(self, rng_key, shapes, dtype):
        x = jnp.array([-jnp.sqrt(3.0), 0.0, jnp.sqrt(3.0)], dtype)
        return {name: x[:, None] for name in shapes}, jnp.array([1.0, 4.0, 1.0], dtype) / 6


@pytest.mark.slow
def test_a_rule_of_ones_own_is_one_class():
    guide, params = set_up(one, sgp.SVGP(3))
    params["f_auto_qu_mu"] = params["f_auto_qu_mu"] + 0.7
    q = guide.posterior(params, X, Y)["f"]
    normal = dist.Normal(q.mean, 0.3).log_prob(Y) - 0.5 * q.variance / 0.3**2
    for rule in (ThreePoints(), sgp.GaussHermite(3)):
        value = sgp.TraceGP_ELBO(rule).loss(random.key(0), params, one, guide, X, Y)
        assert_allclose(-value, np.sum(normal) - q.prior_kl(), rtol=1e-10)


@pytest.mark.slow
def test_a_mean_that_closes_over_a_latent_may_be_any_function():
    """What is not an array, such as a closure over traced values, may hold traced ones."""

    def model(X, y):
        slope = numpyro.sample("slope", dist.Normal(0.5, 1.0))
        kernel = sgp.kernels.RBF(1.0, jnp.exp(slope))
        prior = sgp.GaussianProcess(kernel, X, mean=lambda x: slope * x[..., 0])
        f = numpyro.sample("f", prior)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide, params = set_up(model, sgp.SVGP(3))
    q = guide.posterior(params, X, Y)["f"]
    normal = dist.Normal(q.mean, 0.3).log_prob(Y) - 0.5 * q.variance / 0.3**2
    prior = dist.Normal(0.5, 1.0).log_prob(params["slope_auto_loc"])
    loss = jax.jit(
        lambda params: sgp.TraceGP_ELBO().loss(random.key(0), params, model, guide, X, Y)
    )
    assert_allclose(-loss(params), np.sum(normal) + prior - q.prior_kl(), rtol=1e-10)

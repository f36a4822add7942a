"""Models and guides under numpyro.handlers.scope."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.handlers import scope
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.svi import SVIRunResult

import numpyro_sgp as sgp
from tests.helpers import poisson_model

X = jnp.linspace(-1.0, 1.0, 6)[:, None]
Y = jnp.array([1, 2, 3, 3, 2, 1])
ELBO = sgp.TraceGP_ELBO()
BATCH = {"batch_size": 3}


def losses_of(model, guide, params):
    """The loss of all rows, and of a minibatch."""

    def losses(params):
        args = random.key(2), params, model, guide, X, Y
        return [ELBO.loss(*args), ELBO.loss(*args, **BATCH)]

    return jax.jit(losses)(params)


@pytest.fixture(scope="module")
def plain():
    """The guide of the model as it is, its parameters and losses."""
    guide = sgp.AutoSparseGP(poisson_model, sgp.SVGP(3), AutoNormal)
    svi = SVI(poisson_model, guide, optax.adam(0.05), ELBO)
    state = svi.init(random.key(0), X, Y)
    state, _ = jax.jit(svi.update)(state, X, Y)
    params = svi.get_params(state)
    return guide, params, losses_of(poisson_model, guide, params)


@pytest.mark.slow
@pytest.mark.parametrize("divider", ["/", "."])
def test_a_guide_of_a_scoped_model_is_that_of_the_model(plain, divider):
    model = scope(poisson_model, prefix="a", divider=divider)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3), AutoNormal)
    svi = SVI(model, guide, optax.adam(0.05), ELBO)
    state = svi.init(random.key(0), X, Y)
    state, _ = jax.jit(svi.update)(state, X, Y)
    params = svi.get_params(state)
    own, own_params, losses = plain
    assert set(params) == {f"a{divider}{name}" for name in own_params}
    for name, value in own_params.items():
        assert_allclose(params[f"a{divider}{name}"], value, rtol=1e-10)
    assert_allclose(losses_of(model, guide, params), losses, rtol=1e-10)
    f = f"a{divider}f"
    expected = own.posterior(own_params, X[:2])["f"].mean
    assert_allclose(guide.posterior(params, X[:2])[f].mean, expected)
    draws = guide.sample_posterior(random.key(0), params, X[:2])
    assert set(draws) == {f, f"a{divider}lengthscale"}
    predictive = Predictive(model, guide=guide, params=params, num_samples=2)
    assert predictive(random.key(0), X[:2])[f"a{divider}y"].shape == (2, 2)
    assert sgp.log_predictive_density(guide, params, X, Y)[f"a{divider}y"].shape == (6,)
    result = SVIRunResult(params, state, None)
    tree = sgp.to_arviz(svi, X, Y, result=result, num_samples=2, khat=False)
    assert {"a.f", "a.lengthscale"} == set(tree["posterior"].data_vars)
    assert tree["log_likelihood"]["a.y"].dims == ("chain", "draw", "a.data")


@pytest.mark.slow
def test_a_scoped_guide_is_the_guide(plain):
    guide, params, losses = plain
    model, scoped = scope(poisson_model, prefix="a"), scope(guide, prefix="a")
    renamed = {f"a/{name}": value for name, value in params.items()}
    assert_allclose(losses_of(model, scoped, renamed), losses, rtol=1e-10)
    predictive = Predictive(
        model, guide=scoped, params=renamed, num_samples=2, return_sites=["a/f"]
    )
    assert predictive(random.key(0), X[:2])["a/f"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"with the prefix 'a/'.*removeprefix\('a/'\)"):
        guide.posterior(renamed, X)


@pytest.mark.slow
def test_a_scoped_guide_is_set_up_and_trained_by_svi():
    model = scope(poisson_model, prefix="a")
    guide = sgp.AutoSparseGP(poisson_model, sgp.SVGP(3), AutoNormal)
    svi = SVI(model, scope(guide, prefix="a"), optax.adam(0.05), ELBO)
    result = svi.run(random.key(0), 3, X, Y, batch_size=3, progress_bar=False)
    assert np.isfinite(result.losses).all()
    params = {name.removeprefix("a/"): v for name, v in result.params.items()}
    assert guide.posterior(params, X)["f"].mean.shape == (6,)


@pytest.mark.slow
def test_a_scoped_guide_has_one_minibatch_for_all_its_parts():
    def model(X, y, batch_size):
        data = numpyro.plate("data", 6, subsample_size=batch_size)
        with data as idx:
            X, y = X[idx], y[idx]
            shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with data:
            numpyro.sample("y", dist.Normal(f + shift, 1.0), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=X[:3]))
    guide.setup(X, Y, 3)
    params = {"a/shift_auto_loc": jnp.arange(6.0)}  # the number of each row
    scoped = handlers.substitute(scope(guide, prefix="a"), data=params)
    trace = handlers.trace(handlers.seed(scoped, 0)).get_trace(X, Y, 3)
    rows = trace["a/shift"]["value"].astype(int)
    assert_allclose(trace["a/f"]["fn"].prior.X, X[rows])


@pytest.mark.slow
def test_two_scoped_copies_of_a_submodel():
    def submodel(X):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        return numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1, lengthscale), X))

    def both(X, y=None):
        f = scope(submodel, prefix="a")(X)
        g = scope(submodel, prefix="b", divider="::")(X)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    def by_hand(X, y=None):
        f, g = (
            numpyro.sample(
                f"{name}_f",
                sgp.GaussianProcess(
                    sgp.kernels.RBF(
                        1, numpyro.sample(f"{name}_lengthscale", dist.LogNormal(0.0, 1.0))
                    ),
                    X,
                ),
            )
            for name in "ab"
        )
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    y, losses = jnp.sin(X[:, 0]), []
    for model, a, b in ((both, "a/", "b::"), (by_hand, "a_", "b_")):
        own = {f"{a}f": sgp.SVGP(3), f"{b}f": sgp.SVGP(2)}
        guide = sgp.AutoSparseGP(model, own)
        svi = SVI(model, guide, optax.adam(0.05), ELBO)
        state, loss = jax.jit(svi.update)(svi.init(random.key(0), X, y), X, y)
        params = svi.get_params(state)
        assert params[f"{a}f_auto_Z"].shape == (3, 1)
        assert params[f"{b}f_auto_Z"].shape == (2, 1)
        losses += [loss, *(q.mean.sum() for q in guide.posterior(params, X[:2]).values())]
    assert_allclose(losses[:3], losses[3:], rtol=1e-10)


def test_handlers_around_a_part_of_the_model_are_not_for_the_guides_parameters():
    def model(X, y):
        with handlers.substitute(data={"f_auto_qu_mu": jnp.ones(3)}):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    svi = SVI(model, guide, optax.adam(0.05), ELBO)
    params = svi.get_params(svi.init(random.key(0), X, 1.0 * Y))
    assert_allclose(params["f_auto_qu_mu"], 0.0)

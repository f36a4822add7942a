"""Handlers around models for MCMC, and MCMC on models that are not whitened."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import HMC, MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.reparam import TransformReparam
from numpyro.infer.util import log_density, potential_energy
from numpyro.optim import Adam

from numpyro_sgp import (
    SVGP,
    AutoSparseGP,
    EllipticalSlice,
    GaussianProcess,
    GPPredictive,
    TraceGP_ELBO,
    sparsify,
    whiten,
)
from numpyro_sgp.kernels import RBF
from tests.helpers import slow

N = 6
X = jnp.linspace(0.0, 3.0, N)[:, None]
Y = jnp.sin(2 * X[:, 0]) + 0.5


def model(X, y=None):
    slope = numpyro.sample("slope", dist.LogNormal())
    f = numpyro.sample("f", GaussianProcess(RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + slope * X[:, 0], 0.5), obs=y)


def known(X, y=None):
    return handlers.condition(model, data={"slope": 0.7})(X, y)


def sparse(model=model):
    return sparsify(model, SVGP(inducing=X)).setup(X, Y)


# ---- models that are not whitened ------------------------------------------------------


def latent_functions(X, y):
    f = numpyro.sample("f", GaussianProcess(RBF(), X).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model, latent_functions])
@pytest.mark.parametrize("kernel", [NUTS, HMC])
def test_hmc_on_function_values_hints_at_whitening(kernel, model):
    mcmc = MCMC(kernel(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.warns(UserWarning, match=r"6 values .* NUTS\(numpyro_sgp.whiten\(model\)"):
        mcmc.run(jax.random.key(0), X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("autoguide", [AutoNormal, slow(AutoMultivariateNormal)])
def test_autoguides_of_function_values_hint_at_the_sparse_guide(autoguide):
    svi = SVI(model, autoguide(model), Adam(0.01), Trace_ELBO())
    with pytest.warns(UserWarning, match=r"far off. Use .* numpyro_sgp.AutoSparseGP"):
        svi.init(jax.random.key(0), X, Y)


def evidence(X, y):
    white = numpyro.sample("white", dist.Normal().expand([N]).to_event(1))
    gp = GaussianProcess(RBF(), X, validate_args=True)
    numpyro.sample("y", gp, obs=y - 0.1 * white.sum())


def svi():
    guide = AutoSparseGP(model, SVGP(3))
    SVI(model, guide, Adam(0.01), TraceGP_ELBO()).init(jax.random.key(0), X, Y)
    return Predictive(guide, params={}, num_samples=2)


def predict():
    samples = {"f": Y[None], "slope": jnp.ones(1)}
    return GPPredictive(model, samples, train_args=(X, Y))(jax.random.key(0), X)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "run",
    [
        lambda: NUTS(whiten(model)).init(jax.random.key(0), 0, None, (X, Y), {}),
        lambda: NUTS(sparse()).init(jax.random.key(0), 0, None, (X, Y), {}),
        lambda: NUTS(evidence).init(jax.random.key(0), 0, None, (X, Y), {}),
        lambda: EllipticalSlice(known).init(jax.random.key(0), 0, None, (X, Y), {}),
        svi,
        lambda: Predictive(model, num_samples=2)(jax.random.key(0), X),
        lambda: log_density(model, (X, Y), {}, {"f": Y, "slope": 1.0}),
        predict,
        lambda: GaussianProcess(RBF(), X, validate_args=True).log_prob(Y),
    ],
)
def test_other_uses_get_no_hint(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


# ---- handlers outside of whiten and sparsify ---------------------------------------------


def with_level(f_at, y):
    """A model with a parameter and a latent, for function values of either kind."""
    level = numpyro.param("level", 0.4, constraint=dist.constraints.positive)
    slope = numpyro.sample("slope", dist.LogNormal())
    loc = f_at() + level + slope * X[:, 0]
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)


def of_process(y=Y):
    gp = GaussianProcess(RBF(), X, jitter=1e-9)
    with_level(lambda: numpyro.sample("f", gp), y)


def by_hand(y=Y):
    L = jnp.linalg.cholesky(jnp.exp(-0.5 * (X - X.T) ** 2) + 1e-9 * jnp.eye(N))

    def f():
        white = numpyro.sample("f_white", dist.Normal().expand([N]).to_event(1))
        return numpyro.deterministic("f", L @ white)

    with_level(f, y)


PRIOR = {"level": dist.Gamma(2.0, 1.0)}
HANDLERS = {
    "scope": lambda m: handlers.scope(m, prefix="a"),
    "scale": lambda m: handlers.scale(m, 0.3),
    "mask": lambda m: handlers.mask(m, mask=False),
    "lift": lambda m: handlers.lift(m, PRIOR),
    "do": lambda m: handlers.do(m, data={"slope": 0.7}),
    "condition": lambda m: handlers.condition(m, data={"slope": 0.7}),
    "substitute": lambda m: handlers.substitute(m, data={"slope": 0.7, "level": 1.1}),
    "block": lambda m: handlers.block(handlers.seed(m, 0), hide=["slope"]),
    "replay": lambda m: handlers.replay(m, handlers.trace(handlers.seed(m, 0)).get_trace()),
    "reparam": lambda m: handlers.reparam(m, {"slope": TransformReparam()}),
    "scope in lift": lambda m: handlers.lift(
        handlers.scope(m, prefix="a"), {"a/level": PRIOR["level"]}
    ),
}


def sites_of(model, rng):
    """Unconstrained values of the latents."""
    trace = handlers.trace(handlers.seed(model, 0)).get_trace()
    return {
        name: jnp.asarray(rng.normal(size=(3, *jnp.shape(site["value"]))))
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


@pytest.mark.quick(4)
@pytest.mark.parametrize("handler", HANDLERS)
def test_handlers_outside_act_as_on_a_model_written_by_hand(handler):
    wrap = HANDLERS[handler]
    free = sites_of(wrap(by_hand), np.random.default_rng(0))

    def potentials(model, free):
        wrapped = handlers.seed(wrap(model), 0)
        return jax.jit(jax.vmap(lambda z: potential_energy(wrapped, (), {}, z)))(free)

    expected = potentials(by_hand, free)
    assert np.ptp(expected) > 0.1 or handler == "mask"
    assert_allclose(potentials(whiten(of_process), free), expected, rtol=1e-8)
    inducing = {name.replace("f_white", "f_u_white"): z for name, z in free.items()}
    sparse = sparsify(of_process, SVGP(inducing=X, jitter=1e-9)).setup()
    assert set(sites_of(wrap(sparse), np.random.default_rng(0))) == set(inducing)
    assert_allclose(potentials(sparse, inducing), expected, rtol=1e-6)

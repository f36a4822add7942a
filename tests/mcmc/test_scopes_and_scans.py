"""Sparsified models with handlers and scans inside, and base guides that are functions."""

import arviz_base
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.experimental.ode import odeint
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

import numpyro_sgp as sgp

X = jnp.linspace(0.0, 3.0, 8)[:, None]
Y = jnp.sin(2.0 * X[:, 0])
KERNEL = sgp.kernels.RBF(1.0, 0.7)


def scoped(X, y=None, prefix="a/"):
    with handlers.scope(prefix=prefix[:-1]) if prefix else handlers.block(hide=[]):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        kernel = sgp.kernels.RBF(1.0, lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def density(model, values):
    return float(log_density(model, (X, Y), {}, values)[0])


@pytest.mark.slow
def test_a_scope_inside_of_the_model_changes_names_alone():
    sparse = sgp.sparsify(scoped, sgp.SVGP(4)).setup(X, Y)
    plain = sgp.sparsify(lambda X, y=None: scoped(X, y, ""), sgp.SVGP(4)).setup(X, Y)
    v = jnp.array([0.3, -0.2, 0.5, 1.0])
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        sparse(X, Y)
    (name,) = (k for k in trace if k.endswith("f_u_white"))
    found = density(sparse, {"a/lengthscale": 0.8, name: v})
    expected = density(plain, {"lengthscale": 0.8, "f_u_white": v})
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.slow
def test_chains_of_a_scoped_model_are_arviz_data():
    mcmc = MCMC(NUTS(sgp.whiten(scoped)), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y, extra_fields=("potential_energy",))
    data = sgp.to_arviz(mcmc, X, Y)
    assert "a.lengthscale" in arviz_base.extract(data, combined=False)
    groups = getattr(data, "children", None) or data.groups()
    assert "sample_stats" in groups and "diverging" in data["sample_stats"]


@pytest.mark.slow
def test_latents_of_a_scan_with_responses_are_no_functions_of_f():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))

        def step(z, inputs):
            f, y = inputs
            z = numpyro.sample("z", dist.Normal(0.6 * z, 0.4))
            numpyro.sample("y", dist.Normal(f + z, 0.5), obs=y)
            return z, None

        scan(step, 0.0, (f, y), length=X.shape[0])

    sparse = sgp.sparsify(model, sgp.SVGP(inducing=np.asarray(X), train_inducing=False))
    z = jnp.linspace(-0.5, 0.5, 8)
    found = density(sparse.setup(X, Y), {"z": z, "f_u_white": jnp.zeros(8)})
    # At Z = X the inducing values are f: all is as written by hand, but for jitter.
    before = jnp.concatenate([jnp.zeros(1), z[:-1]])
    expected = dist.Normal(0.6 * before, 0.4).log_prob(z).sum()
    expected += dist.Normal(z, 0.5).log_prob(Y).sum() + 8 * dist.Normal().log_prob(0.0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_rows_are_tied_by_what_has_first_derivatives_alone():
    """A solver of differential equations: the bound of marginals was 20 nats too low."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        t = X[:, 0]

        def slope(x, s, f):
            return jnp.interp(s, t, f) - 0.3 * x

        path = odeint(slope, jnp.zeros(()), t, f)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(path, 0.1), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.VGP())
    guide.setup(X, Y)
    assert guide.couples_rows

    @jax.custom_vjp
    def cube(f):
        return f**3

    @jax.custom_vjp
    def slope(f):
        return 3.0 * f**2

    slope.defvjp(lambda f: (slope(f), f), lambda f, g: (6.0 * f * g,))
    cube.defvjp(lambda f: (cube(f), f), lambda f, g: (slope(f) * g,))

    def apart(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(cube(f), 0.1), obs=y)

    guide = sgp.AutoSparseGP(apart, sgp.SVGP(4))
    guide.setup(X, Y)
    assert not guide.couples_rows


def plain(X, y=None):
    return scoped(X, y, "")


def of_a_function(returned):
    def base(model):
        def guide(X, y=None):
            loc = numpyro.param("loc", 0.0)
            value = numpyro.sample("lengthscale", dist.LogNormal(loc, 0.1))
            return {"none": None, "value": value, "dict": {"lengthscale": value}}[returned]

        return guide

    return base


@pytest.mark.parametrize("returned", ["none", "value", "dict"])
def test_base_guides_that_are_functions_return_what_they_like(returned):
    guide = sgp.AutoSparseGP(plain, sgp.SVGP(4), of_a_function(returned))
    with handlers.seed(rng_seed=0):
        found = guide(X, Y)
    assert set(found) == {"lengthscale", "f"} and found["f"].shape == (8,)


def test_base_guides_without_a_latent_are_told():
    def nothing(model):
        return lambda X, y=None: None

    with pytest.raises(ValueError, match=r"no value of the latent sites \['lengthscale'\]"):
        sgp.AutoSparseGP(plain, sgp.SVGP(4), nothing).setup(X, Y)
    with pytest.raises(TypeError, match="must return a guide"):
        sgp.AutoSparseGP(plain, sgp.SVGP(4), lambda model: None).setup(X, Y)


@pytest.mark.slow
def test_rows_of_solvers_of_their_own_are_not_tied():
    """Rates of exp(300) would keep a solver going for ever."""

    def end(f):
        path = odeint(lambda x, t, f: -jnp.exp(f) * x, 1.0, jnp.array([0.0, 1.0]), f)
        return path[-1]

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jax.vmap(end)(f), 0.05), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    guide.setup(X, Y)
    assert not guide.couples_rows

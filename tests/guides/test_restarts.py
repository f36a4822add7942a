"""Starting values follow the key, also of a guide that is set up."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.guides import prepared
from numpyro_sgp.guides.setup import starting_values
from tests.helpers import slow

X = jnp.linspace(-1.0, 1.0, 6)[:, None]
Y = jnp.round(2.0 + jnp.sin(X[:, 0]))
KEYS = random.split(random.key(1), 3)


def model(X, y=None, batch_size=None):
    """Two latents, as one vector, for guides that need more than one dimension."""
    data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
    with data as idx:
        X, y = X[idx], None if y is None else y[idx]
    hyper = numpyro.sample("hyper", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    kernel = sgp.kernels.RBF(hyper[0], hyper[1])
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with data:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def problem(base=AutoNormal, approximation=None):
    guide = sgp.AutoSparseGP(model, approximation or sgp.SVGP(3), base)
    return guide, SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO())


def iaf(model):
    return AutoIAFNormal(model, num_flows=1, hidden_dims=[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "approximation", "batch_size"),
    [
        (AutoNormal, None, None),
        slow(AutoNormal, sgp.SVGP(inducing=X[:3]), 3),
        (AutoDelta, sgp.SVGP(3, whiten=False), None),
        slow(iaf, None, None),
    ],
)
def test_a_guide_that_is_set_up_starts_as_a_new_one(base, approximation, batch_size):
    used, svi = problem(base, approximation)
    svi.init(KEYS[0], X, Y, batch_size)
    for key in KEYS[1:]:
        expected = problem(base, approximation)[1].init(key, X, Y, batch_size)
        again = svi.init(key, X, Y, batch_size)
        jax.tree.map(assert_array_equal, again.optim_state, expected.optim_state)
        keys = random.key_data(again.rng_key), random.key_data(expected.rng_key)
        assert_array_equal(*keys)
    first, second = (svi.get_params(svi.init(k, X, Y, batch_size)) for k in KEYS[:2])
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    assert any(np.any(a != b) for a, b in pairs)
    # Inducing points are those of the set-up.
    assert_array_equal(first["f_auto_Z"], second["f_auto_Z"])


@pytest.mark.slow
def test_vmapped_runs_after_the_set_up_differ_and_the_best_can_be_picked():
    guide, svi = problem(AutoDelta)  # without draws, starts are all that can differ
    guide.setup(X, Y)
    many = jax.jit(jax.vmap(lambda key: svi.run(key, 20, X, Y, progress_bar=False)))
    runs = many(KEYS)
    assert len(np.unique(runs.losses[:, 0])) == len(np.unique(runs.losses[:, -1])) == 3
    single = svi.run(KEYS[1], 20, X, Y, progress_bar=False)
    assert_allclose(runs.losses[1], single.losses, rtol=1e-7)
    best = jnp.argmin(runs.losses[:, -5:].mean(axis=1))
    params = jax.tree.map(lambda x: x[best], runs.params)
    assert np.isfinite(guide.posterior(params, X)["f"].mean).all()


@pytest.mark.slow
def test_a_guide_first_run_inside_vmap_starts_by_the_keys():
    _, svi = problem()
    states = jax.vmap(lambda key: svi.init(key, X, Y))(KEYS)
    locs = svi.get_params(states)["hyper_auto_loc"]
    assert len(np.unique(locs[:, 0])) == 3


@pytest.mark.slow
def test_starts_of_q_and_inducing_points_are_given_by_init_params():
    def fixed(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guide = sgp.AutoSparseGP(fixed, sgp.SVGP(3))
    svi = SVI(fixed, guide, optax.adam(0.05), sgp.TraceGP_ELBO())
    guide.setup(X, Y)

    def start(key):
        key_m, key_Z = random.split(key)
        Z = random.choice(key_Z, X, (3,), replace=False)
        return {"f_auto_qu_mu": random.normal(key_m, (3,)), "f_auto_Z": Z}

    def run(key):
        return svi.run(key, 3, X, Y, progress_bar=False, init_params=start(key))

    assert len(np.unique(jax.vmap(run)(KEYS).losses[:, 0])) == 3


@pytest.mark.slow
def test_a_run_without_data_and_parameters_keeps_the_starts_of_the_set_up():
    guide, svi = problem(AutoDelta)
    params = svi.get_params(svi.init(KEYS[0], X, Y))
    seeded = numpyro.handlers.seed(guide, KEYS[1])
    assert_allclose(seeded(X[:2])["hyper"], params["hyper_auto_loc"])


@pytest.mark.slow
def test_given_parameters_are_never_started_anew(monkeypatch):
    started = []

    def count(*args):
        started.append(args)
        return starting_values(*args)

    monkeypatch.setattr(prepared, "starting_values", count)
    guide, svi = problem()
    state = svi.init(KEYS[0], X, Y)
    svi.update(state, X, Y)
    params = svi.get_params(state)
    numpyro.infer.Predictive(model, guide=guide, params=params, num_samples=2)(KEYS[0], X)
    guide.posterior(params, X)
    # Nor does the first run start twice; the next does by its key, once.
    assert started == []
    svi.init(KEYS[1], X, Y)
    assert len(started) == 1

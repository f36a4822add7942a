"""Effects at points, and their scale."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam

import numpyro_sgp as sgp
from numpyro_sgp.fitting.hierarchies import _moments, tied, vanished

RNG = np.random.default_rng(3)
G = 30
X = np.sort(RNG.uniform(0.0, 10.0, (120, 1)), axis=0)
GROUP = np.arange(120) % G
Y = np.sin(X[:, 0]) + (0.5 * RNG.normal(size=G))[GROUP] + 0.5 * RNG.normal(size=120)


def model(X, group, y=None, fixed=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0)) if fixed is None else fixed
    middle = numpyro.sample("middle", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("groups", G):
        b = numpyro.sample("b", dist.Normal(middle, tau))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f + b[group], noise), obs=y)


@pytest.fixture(scope="module")
def guide():
    found = sgp.AutoSparseGP(model, sgp.SVGP(5))
    found.setup(X, GROUP, Y)
    return found


@pytest.mark.slow
def test_what_priors_depend_on(guide):
    values = {"tau": 1.0, "middle": 0.0, "noise": 1.0, "b": jnp.zeros(G)}
    assert tied(model, (X, GROUP, Y), {}, values) == {"b": {"tau", "middle"}}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("tau", "spread", "is_nothing"),
    [
        (1e-8, 1e-9, True),
        (1e-30, 0.0, True),  # of which the variance is zero
        (1e-8, 1e-8, False),  # effects of a millimetre, in kilometres
        (0.5, 0.0, False),
        (0.5, 0.5, False),
    ],
)
def test_effects_at_their_mean_with_no_scale_are_told(guide, tau, spread, is_nothing):
    b = 0.3 + spread * np.random.default_rng(0).normal(size=G)
    values = {"tau": tau, "middle": 0.3, "b": b}
    params = guide.known().starts | {
        f"{k}_auto_loc": jnp.asarray(v) for k, v in values.items()
    }
    found = vanished(guide, params, (X, GROUP, Y), {})
    assert set(found) == ({"b"} if is_nothing else set())
    assert all(share < 1e-7 for share in found.values())


@pytest.mark.slow
def test_effects_of_a_learned_centring_are_told_too():
    """Which is a parameter of the model, of which the start was taken for its value."""
    free = reparam(model, config={"b": LocScaleReparam()})
    guide = sgp.AutoSparseGP(free, sgp.SVGP(5))
    guide.setup(X, GROUP, Y)
    values = {"tau": 1e-8, "middle": 0.3, "b_decentered": jnp.full(G, 0.3)}
    params = guide.known().starts | {
        f"{k}_auto_loc": jnp.asarray(v) for k, v in values.items()
    }
    assert set(
        vanished(guide, params | {"b_centered": jnp.ones(())}, (X, GROUP, Y), {})
    ) == {"b_decentered"}
    params["b_decentered_auto_loc"] = jnp.asarray(RNG.normal(size=G))
    assert not vanished(guide, params | {"b_centered": jnp.zeros(())}, (X, GROUP, Y), {})


@pytest.mark.quick(1)
@pytest.mark.parametrize("transformed", [False, True])
def test_positive_latents_are_seen_by_their_logarithms(transformed):
    """Noise sds of groups, of which nothing was told: their prior is not of all reals."""

    def noise_of(tau):
        if not transformed:
            return dist.LogNormal(-1.0, tau)
        to_log = dist.transforms.AffineTransform(-1.0, tau)
        to_noise = [to_log, dist.transforms.ExpTransform()]
        return dist.TransformedDistribution(dist.Normal(0.0, 1.0), to_noise)

    def model(X, group, y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("groups", 4):
            noise = numpyro.sample("noise", noise_of(tau))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, noise[group]), obs=y)

    data = X, GROUP % 4, Y
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    guide.setup(*data)
    params = guide.known().starts | {"tau_auto_loc": jnp.asarray(1e-8)}
    at_mean = params | {"noise_auto_loc": jnp.full(4, np.exp(-1.0))}
    assert set(vanished(guide, at_mean, data, {})) == {"noise"}
    away = params | {"noise_auto_loc": jnp.exp(-1.0 + 2e-8 * jnp.arange(4.0))}
    assert not vanished(guide, away, data, {})


def test_values_without_their_sign_have_no_moments():
    """Of a folded prior, at which NumPyro's inverse warns."""
    value = jnp.full(3, 0.2)
    assert _moments(dist.FoldedDistribution(dist.Normal(jnp.zeros(3), 0.1)), value) is None
    shifted = [dist.transforms.ExpTransform(), dist.transforms.AffineTransform(0.1, 1.0)]
    prior = dist.TransformedDistribution(dist.Normal(jnp.zeros(3), 0.1), shifted)
    assert _moments(prior, value) is None
    log, mean, sd = _moments(dist.LogNormal(-1.0, 0.3), value)
    np.testing.assert_allclose(log, np.log(0.2), rtol=1e-12)
    np.testing.assert_allclose([mean[0], sd[0]], [-1.0, 0.3], rtol=1e-12)


@pytest.mark.slow
def test_effects_of_a_fixed_scale_are_left_alone():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    guide.setup(X, GROUP, Y, fixed=1e-8)
    params = guide.known().starts | {"b_auto_loc": jnp.zeros(G)}
    assert not vanished(guide, params, (X, GROUP, Y), {"fixed": 1e-8})


@pytest.mark.slow
def test_a_fit_without_best_values_has_not_converged():
    """It ended at a bound of 406 nats in float32, "converged"."""
    with jax.enable_x64(False), pytest.warns(UserWarning, match="'b' went to the mean"):
        fitted = sgp.fit(model, sgp.SVGP(12), (X, GROUP, Y), progress_bar=False)
    assert "together with its scale" in fitted.stopped
    with jax.enable_x64(False):
        verdict = fitted.check()
    assert not verdict.converged
    assert "joint=True" in verdict.causes["other parameters"].mend


@pytest.mark.slow
def test_effects_that_are_integrated_over_are_no_points():
    """Of a fit with joint=True: their names are not among the parameters."""
    data = X[:20], GROUP[:20], Y[:20]
    fitted = sgp.fit(model, sgp.SVGP(4), data, joint=True, steps=2, progress_bar=False)
    assert not vanished(fitted.guide, fitted.params, data, {})
    assert np.isfinite(fitted.bound)


@pytest.mark.slow
def test_latents_of_the_rows_of_a_minibatch_are_left_alone():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        plate = numpyro.plate("data", 40, subsample_size=10)
        with plate as rows:
            e = numpyro.sample("e", dist.Normal(0.0, 0.3))
            numpyro.sample("y", dist.Normal(f[rows] + e, 0.5), obs=y[rows])

    fitted = sgp.fit(model, sgp.SVGP(4), (X[:40], Y[:40]), steps=3, progress_bar=False)
    assert np.isfinite(fitted.bound)

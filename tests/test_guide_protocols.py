"""
What of NumPyro the guide goes with: handlers, ELBOs, SVI, Predictive, copies.

``python tests/test_guide_protocols.py`` prints the table.
"""

import copy
import pickle
import sys
import warnings
from functools import partial

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
from numpyro.distributions import constraints
from numpyro.infer import (
    SVI,
    Predictive,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from numpyro.infer.reparam import LocScaleReparam
from scipy import stats
from scipy.special import logsumexp

import numpyro_sgp as sgp
from numpyro_sgp.linalg import default_jitter
from tests.helpers import rbf

rng = np.random.default_rng(0)
X = jnp.linspace(-1.0, 1.0, 6)[:, None]
Y = jnp.sin(3 * X[:, 0])
X_NEW = jnp.linspace(-0.9, 1.1, 4)[:, None]
PARAMS = {
    "lengthscale_auto_loc": jnp.array(0.7),
    "noise": jnp.array(0.5),
    "f_auto_Z": X[::2] + 0.1,
    "f_auto_qu_mu": jnp.asarray(rng.normal(size=3)),
    "f_auto_qu_sqrt": jnp.tril(jnp.asarray(0.2 * rng.normal(size=(3, 3)))) + jnp.eye(3),
}
ELBO = sgp.TraceGP_ELBO()
KEY = random.key(0)


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.param("noise", 0.5, constraint=constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    numpyro.deterministic("square", f**2)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def guide_of(model, approximation=None, **options):
    guide = sgp.AutoSparseGP(model, approximation or sgp.SVGP(3, jitter=0), **options)
    guide.setup(X, Y)
    return guide


PLAIN = guide_of(model)


def loss(model=model, guide=None, params=PARAMS, elbo=ELBO):
    guide = guide_of(model) if guide is None else guide
    return elbo.loss(KEY, params, model, guide, X, Y)


def lognormal_at(value):
    return stats.lognorm(1.0).logpdf(value)


def at_inputs(lengthscale=0.7):
    """Mean and covariance of q(f(X)), KL[q(u) || p(u)] and prior covariance of f(X)."""
    Z, m, R = (np.asarray(PARAMS[f"f_auto_{k}"]) for k in ("Z", "qu_mu", "qu_sqrt"))
    L = np.linalg.cholesky(rbf(Z, Z, 1.0, lengthscale))
    A = np.linalg.inv(L) @ rbf(Z, X, 1.0, lengthscale)
    mean, S, K = A.T @ m, R @ R.T, rbf(X, X, 1.0, lengthscale)
    kl = 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])
    return mean, K - A.T @ A + A.T @ S @ A, kl, K


def reference(lengthscale=0.7, prior=lognormal_at):
    """The negative ELBO by explicit inverses."""
    mean, covariance, kl, _ = at_inputs(lengthscale)
    expected = stats.norm(mean, 0.5).logpdf(Y).sum() - np.trace(covariance) / (2 * 0.5**2)
    return -(expected - kl + prior(lengthscale))


# ---- handlers ---------------------------------------------------------------------------


def scoped():
    scoped_model = handlers.scope(model, prefix="a")
    return loss(scoped_model, params={f"a/{k}": v for k, v in PARAMS.items()})


def lifted():
    lift = handlers.lift(model, prior={"noise": dist.LogNormal(0.0, 1.0)})
    params = {k: v for k, v in PARAMS.items() if k != "noise"}
    return loss(lift, params={**params, "noise_auto_loc": PARAMS["noise"]})


def centred(X, y=None):
    """With a latent that can be reparametrised, ``b = 1 + 2 w``."""
    b = numpyro.sample("b", dist.Normal(1.0, 2.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.7), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + b - 0.4, 0.5), obs=y)


def reparametrised():
    reparam = handlers.reparam(centred, config={"b": LocScaleReparam(0.0)})
    params = {k: v for k, v in PARAMS.items() if k.startswith("f_")}
    return loss(reparam, params={**params, "b_decentered_auto_loc": jnp.array(-0.3)})


def without(*names):
    return {k: v for k, v in PARAMS.items() if not k.startswith(names)}


def quietly(call):
    """Without NumPyro's warnings, of its autoguides or ELBOs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def on_both(handler):
    return loss(handler(model), handler(PLAIN))


OTHER = {"lengthscale": jnp.array(1.3)}

#: What is accepted around the model (with a guide of that) or the guide: the loss found,
#: and the one by hand.
HANDLERS = {
    "nothing": (loss, reference),
    "scope(model)": (scoped, reference),
    "block(model, hide_types=['deterministic'])": (
        lambda: loss(handlers.block(model, hide_fn=lambda s: s["type"] == "deterministic")),
        reference,
    ),
    "condition(model, lengthscale)": (
        lambda: loss(handlers.condition(model, data=OTHER), params=without("lengthscale")),
        lambda: reference(1.3),
    ),
    "do(model, lengthscale)": (
        lambda: loss(handlers.do(model, data=OTHER)),
        lambda: reference(1.3, prior=lambda _: lognormal_at(0.7)),
    ),
    "substitute(model, lengthscale), which the guide's value replaces": (
        lambda: quietly(lambda: loss(handlers.substitute(model, data=OTHER))),
        reference,
    ),
    "substitute(model, noise)": (
        lambda: loss(handlers.substitute(model, data={"noise": jnp.array(0.5)})),
        reference,
    ),
    "scale(model)": (
        lambda: loss(handlers.scale(model, scale=2.0)),
        lambda: 2.0 * reference(),
    ),
    "lift(model, noise)": (lifted, lambda: reference() - lognormal_at(0.5)),
    "reparam(model)": (
        reparametrised,
        lambda: reference(prior=lambda _: stats.norm.logpdf(-0.3)),
    ),
    "seed(model)": (lambda: loss(handlers.seed(model, 3)), reference),
    "trace(model)": (lambda: loss(handlers.trace(model)), reference),
    "replay(model)": (
        lambda: quietly(lambda: loss(handlers.replay(model, handlers.trace(
            handlers.seed(model, 1)).get_trace(X, Y)))),
        reference,
    ),
    "infer_config(model)": (
        lambda: loss(handlers.infer_config(model, config_fn=lambda _: {"note": 1})),
        reference,
    ),
    "block(guide, hide=['nothing'])": (
        lambda: loss(guide=handlers.block(PLAIN, hide=["nothing"])), reference),
    "substitute(guide, params)": (
        lambda: loss(
            guide=handlers.substitute(PLAIN, data=PARAMS), params={"noise": PARAMS["noise"]}
        ),
        reference,
    ),
    "scale(model), scale(guide)": (
        lambda: on_both(partial(handlers.scale, scale=2.0)),
        lambda: 2.0 * reference(),
    ),
    "seed(guide)": (lambda: loss(guide=handlers.seed(PLAIN, 3)), reference),
    "trace(guide)": (lambda: loss(guide=handlers.trace(PLAIN)), reference),
    "infer_config(guide)": (
        lambda: loss(guide=handlers.infer_config(PLAIN, config_fn=lambda _: {"note": 1})),
        reference,
    ),
}  # fmt: skip


def evaluated(elbo, guide=PLAIN):
    return lambda: elbo.loss(KEY, PARAMS, model, guide, X, Y)


def drawn(key):
    """The draw of f that NumPyro's ELBOs make, and the log likelihood there."""
    _, guide_seed = random.split(key)
    seeded = handlers.substitute(handlers.seed(PLAIN, guide_seed), data=PARAMS)
    f = np.asarray(handlers.trace(seeded).get_trace(X, Y)["f"]["value"])
    return f, stats.norm(f, 0.5).logpdf(Y).sum()


def mean_field_by_hand():
    _, likelihood = drawn(KEY)
    return -(likelihood - at_inputs()[2] + lognormal_at(0.7))


def log_weight(key):
    """log p(y, f) - log q(f) of one draw."""
    f, likelihood = drawn(key)
    mean, covariance, _, K = at_inputs()
    jitter = default_jitter(jnp.float64) * np.eye(6)
    log_p = stats.multivariate_normal(np.zeros(6), K + jitter).logpdf(f)
    log_q = stats.multivariate_normal(mean, covariance + jitter).logpdf(f)
    return likelihood + log_p - log_q + lognormal_at(0.7)


def renyi_by_hand():
    keys = random.split(random.split(KEY)[1], 2)
    return -(logsumexp([log_weight(key) for key in keys]) - np.log(2))


#: ELBOs that are accepted; NumPyro's on the joint density of f are for looking only.
ELBOS = {
    "TraceGP_ELBO": (evaluated(ELBO), reference),
    "TraceGP_ELBO, 2 particles": (evaluated(sgp.TraceGP_ELBO(num_particles=2)), reference),
    "TraceGP_ELBO, particles in a loop": (
        evaluated(sgp.TraceGP_ELBO(num_particles=2, vectorize_particles=False)),
        reference,
    ),
    "TraceMeanField_ELBO": (evaluated(TraceMeanField_ELBO()), mean_field_by_hand),
    "Trace_ELBO, its value": (evaluated(Trace_ELBO()), lambda: -log_weight(KEY)),
    "TraceGraph_ELBO, its value": (evaluated(TraceGraph_ELBO()), lambda: -log_weight(KEY)),
    "RenyiELBO, its value": (evaluated(RenyiELBO(num_particles=2)), renyi_by_hand),
}


def trained(elbo):
    """A gradient step by an ELBO."""

    def update():
        svi = SVI(model, PLAIN, optax.adam(0.01), elbo)
        svi.update(svi.init(KEY, X, Y, init_params=PARAMS), X, Y)

    return update


def by_parts():
    """As the docstring of ``AutoGuideList`` has it."""
    guide = AutoGuideList(model)
    guide.append(AutoDelta(handlers.block(handlers.seed(model, 0), hide=["f", "square"])))
    rest = handlers.block(handlers.seed(model, 1), hide=["lengthscale", "square"])
    guide.append(sgp.AutoSparseGP(rest, sgp.SVGP(3)))
    handlers.seed(guide, 0)(X, Y)
    return guide


def of_known(lengthscale, kernel=sgp.kernels.RBF, **options):
    def known(X, Y=None):
        prior = sgp.GaussianProcess(kernel(1.0, lengthscale), X, **options)
        f = numpyro.sample("f", prior)
        numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=Y)

    return known


F = jnp.zeros(6)

#: What is refused: how, the error, its message, and why it cannot be done.
REFUSALS = {
    "condition(model, f)": (
        lambda: loss(handlers.condition(model, data={"f": F})),
        ValueError, "GP site 'f' is observed",
        "nothing is left to approximate",
    ),
    "mask(model)": (
        lambda: loss(handlers.mask(model, mask=False)),
        ValueError, "GP site 'f' is masked",
        "the prior of f does not depend on which observations are missing",
    ),
    "block(guide, hide=['f'])": (
        lambda: quietly(lambda: loss(guide=handlers.block(PLAIN, hide=["f"]))),
        ValueError, "no sparse posterior",
        "the ELBO needs q(f) in the trace",
    ),
    "do(guide, lengthscale)": (
        lambda: loss(guide=handlers.do(PLAIN, data=OTHER)),
        ValueError, "made with another prior.*'lengthscale_auto_loc'.*base_guide",
        "q(f) would have a lengthscale that the model has not",
    ),
    "AutoGuideList of parts that hide each other's latents": (
        lambda: loss(guide=quietly(by_parts)),
        ValueError, "q\\(f\\) is made with another prior.*base_guide",
        "the hidden lengthscale is a draw of the prior, in q(f)",
    ),
    "a guide of a model with another kernel": (
        lambda: loss(of_known(0.7), guide=guide_of(of_known(1.3))),
        ValueError, "q\\(f\\) is made with another kernel",
        "as before, with known numbers",
    ),
    "a guide of a model with a kernel of another class": (
        lambda: loss(of_known(0.7), guide=guide_of(of_known(0.7, sgp.kernels.Matern12))),
        ValueError, "made with another kernel",
        "with equal numbers",
    ),
    "mask(guide)": (
        lambda: loss(guide=handlers.mask(PLAIN, mask=False)),
        ValueError, "no sparse posterior",
        "a masked q(f) has no KL",
    ),
    "Trace_ELBO, training": (
        trained(Trace_ELBO()), TypeError, "would train the wrong bound.*TraceGP_ELBO",
        "in minibatches the scores of f are those of another bound",
    ),
    "TraceGraph_ELBO, training": (
        trained(TraceGraph_ELBO()), TypeError, "would train the wrong bound.*TraceGP_ELBO",
        "as Trace_ELBO",
    ),
    "RenyiELBO, training": (
        trained(RenyiELBO()), TypeError, "would train the wrong bound.*TraceGP_ELBO",
        "as Trace_ELBO",
    ),
    "TraceEnum_ELBO, training": (
        trained(TraceEnum_ELBO()), (TypeError, ImportError), "wrong bound|funsor",
        "as Trace_ELBO; NumPyro itself asks for funsor first",
    ),
    "params with those of another guide": (
        lambda: PLAIN.median({**PARAMS, "w_auto_loc": 0.0}, X),
        ValueError, "unknown",
        "names of another guide's parameters are taken for a mistake",
    ),
}  # fmt: skip


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", [*HANDLERS, *ELBOS])
def test_accepted_with_the_value_by_hand(name):
    found, expected = {**HANDLERS, **ELBOS}[name]
    assert_allclose(found(), expected(), rtol=1e-7)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "other",
    [
        lambda: of_known(np.float32(0.7)),
        lambda: of_known(jnp.array(0.7)),
        lambda: of_known(0.7, mean=lambda X: jnp.zeros(X.shape[:-1])),
    ],
)
def test_a_guide_of_another_model_may_have_an_equal_prior(other):
    params = {k: v for k, v in PARAMS.items() if k.startswith("f_auto")}
    found = loss(of_known(0.7), guide=guide_of(other()), params=params)
    expected = loss(of_known(0.7), guide=guide_of(of_known(0.7)), params=params)
    assert_allclose(found, expected, rtol=1e-6)  # of a number in float32


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_name(name):
    call, error, message, _ = REFUSALS[name]
    with pytest.raises(error, match=message):
        call()


# ---- SVI, Predictive, copies: every approximation ---------------------------------------

APPROXIMATIONS = {
    "SVGP": sgp.SVGP(3),
    "coupled": sgp.SVGP(3, covariance="coupled"),
    "dual": sgp.SVGP(3, covariance="dual"),
    "sites": sgp.SVGP(3, covariance="pseudo_data"),
    "tight": sgp.SVGP(3, tight="scalar"),
    "VGP": sgp.VGP(),
    "SOLVEGP": sgp.SOLVEGP(3, 2),
    "ODVGP": sgp.ODVGP(3, 2),
    "ODVGP, columns": sgp.ODVGP(3, 2, num_columns=2),
    "MixtureSVGP": sgp.MixtureSVGP(3, 2),
    "InverseFreeSVGP": sgp.InverseFreeSVGP(3),
}


#: Which go as others do; run by `make slow`.
VARIANTS = (
    "VGP",
    "coupled",
    "ODVGP",
    "dual",
    "sites",
    "tight",
    "ODVGP, columns",
    "MixtureSVGP",
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name
        for name in APPROXIMATIONS
    ],
)
def started(request):
    """A guide after svi.init, its SVI, state and parameters."""
    guide = sgp.AutoSparseGP(model, APPROXIMATIONS[request.param], AutoNormal)
    svi = SVI(model, guide, optax.adam(0.01), ELBO)
    state = svi.init(KEY, X, Y)
    return guide, svi, state, svi.get_params(state)


@pytest.mark.slow
def test_svi_evaluates_and_summaries_agree(started):
    guide, svi, state, params = started
    assert np.isfinite(svi.evaluate(state, X, Y))
    low, middle, high = guide.quantiles(params, [0.1, 0.5, 0.9], X_NEW)["f"]
    assert_allclose(middle, guide.median(params, X_NEW)["f"], atol=1e-6)
    assert np.all(low < middle) and np.all(middle < high)
    assert set(guide.sample_posterior(KEY, params, X_NEW)) == {"lengthscale", "f", "square"}


@pytest.mark.slow
def test_predictive_with_the_guide_and_with_its_draws(started):
    guide, _, _, params = started
    options = {"num_samples": 2, "return_sites": ["f", "lengthscale", "square", "y"]}
    draws = [
        Predictive(model, guide=guide, params=params, parallel=parallel, **options)(
            KEY, X_NEW
        )
        for parallel in (True, False)
    ]
    assert_allclose(draws[0]["f"], draws[1]["f"], rtol=1e-6, atol=1e-8)
    assert_allclose(draws[0]["square"], draws[0]["f"] ** 2)
    for batch_ndims, shape in enumerate([(), (2,), (1, 2)]):
        given = guide.sample_posterior(KEY, params, X_NEW, sample_shape=shape)
        found = Predictive(model, given, batch_ndims=batch_ndims, return_sites=["f", "y"])(
            KEY, X_NEW
        )
        assert set(found) == {"f", "y"} and found["y"].shape == (*shape, 4)
        assert_allclose(found["f"], given["f"])


@pytest.mark.quick(1)
def test_copies_are_the_guide(started):
    guide, _, _, params = started
    expected = guide.posterior(params, X_NEW)["f"]
    for again in (pickle.loads(pickle.dumps((guide, params))), copy.deepcopy(started[::3])):
        found = again[0].posterior(again[1], X_NEW)["f"]
        assert_allclose(found.mean, expected.mean)
        assert_allclose(found.variance, expected.variance)
        assert again[0].fingerprint() == guide.fingerprint()


@pytest.mark.slow
def test_predictive_over_parameters_of_several_runs():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    options = {"num_samples": 3, "batch_ndims": 1, "return_sites": ["f"]}
    found = Predictive(model, guide=PLAIN, params=stacked, **options)(KEY, X_NEW)
    assert found["f"].shape == (3, 2, 4)


def test_predictive_without_exclusion_keeps_given_deterministic_values():
    given = PLAIN.sample_posterior(KEY, PARAMS, X_NEW, sample_shape=(2,))
    given["square"] = jnp.full((2, 4), -1.0)
    for condition, expected in ((False, given["f"] ** 2), (True, given["square"])):
        predictive = Predictive(
            model, given, return_sites=["square"], condition_deterministic=condition
        )
        assert_allclose(predictive(KEY, X_NEW)["square"], expected)


def test_svi_runs_updates_and_evaluates():
    guide = guide_of(model)
    svi = SVI(model, guide, optax.adam(0.01), ELBO)
    state = svi.init(KEY, X, Y, init_params=PARAMS)
    assert_allclose(svi.evaluate(state, X, Y), reference(), rtol=1e-7)
    _, value = svi.update(state, X, Y)
    assert_allclose(value, reference(), rtol=1e-7)
    result = svi.run(KEY, 2, X, Y, init_params=PARAMS, progress_bar=False)
    assert_allclose(result.losses[0], reference(), rtol=1e-7)
    _, value = svi.stable_update(state, X, Y)
    assert_allclose(value, reference(), rtol=1e-7)


if __name__ == "__main__":
    for name in [*HANDLERS, *ELBOS]:
        sys.stdout.write(f"{name:<68} accepted\n")
    for name, (_, _, _, reason) in REFUSALS.items():
        sys.stdout.write(f"{name:<68} refused: {reason}\n")

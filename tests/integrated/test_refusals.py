"""Models that are none of one Gaussian field, under `nested` and `fit(..., joint=True)`."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import cond, scan

import numpyro_sgp as sgp

X = np.linspace(0.0, 3.0, 12)[:, None]
Y = np.sin(X[:, 0])


def site(name, X):
    return numpyro.sample(name, sgp.GaussianProcess(sgp.kernels.RBF(), X))


def observe(fn, y):
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", fn, obs=y)


def plain(X, y=None):
    observe(dist.Normal(site("f", X), 0.3), y)


def black_box(X, y=None):
    def log_prob(y, f):
        return -((y - f) ** 2)

    observe(sgp.BlackBox(log_prob, site("f", X)), y)


def steps(X, y=None):
    observe(dist.Bernoulli(jnp.where(site("f", X) > 0.0, 0.95, 0.05)), y > 0.0)


def steps_beside(X, y=None):
    f = site("f", X)
    observe(dist.Normal(f, 0.3), y)
    with numpyro.plate("data", len(X)):
        numpyro.sample("z", dist.Bernoulli(jnp.where(f > 0.0, 0.95, 0.05)), obs=y > 0.0)


def largest(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([3]))
    observe(sgp.likelihoods.RobustMax(f), jnp.digitize(y, jnp.array([0.3, 0.7])))


def imputed(X, y=None):
    f = site("f", X)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y, obs_mask=np.arange(12) % 4 != 0)


@partial(numpyro.handlers.substitute, data={"noise": 0.3})
def substituted(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    observe(dist.Normal(site("f", X), noise), y)


def scanned(X, y=None):
    def step(value, _):
        z = numpyro.sample("z", dist.Normal())
        return 0.8 * value + z, value

    _, walk = scan(step, 0.0, jnp.arange(len(X)))
    observe(dist.Normal(site("f", X) + walk, 0.3), y)


def deep(X, y=None):
    h = site("h", X)
    observe(dist.Normal(site("f", h[:, None]), 0.3), y)


@pytest.mark.quick(4)
@pytest.mark.parametrize("options", [{}, {"joint": True}], ids=["nested", "joint"])
@pytest.mark.parametrize(
    ("model", "approximation", "match"),
    [
        (black_box, sgp.SVGP(4), r"'y' is a BlackBox.*ScoreFunction\(1000\)"),
        (steps, sgp.SVGP(4), "'y' has.*flat in f but for jumps.*EllipticalSlice"),
        (steps_beside, sgp.SVGP(4), "'z' has.*flat in f but for jumps"),
        (largest, sgp.SVGP(4), "'y' has.*flat in f.*RobustMax"),
        (deep, sgp.SVGP(4), "Site 'f'.*on GP site 'h'.*sgp.fit without joint"),
        (imputed, sgp.SVGP(4), "(?s)Site 'y' has an obs_mask.*handlers.mask.mask=mask"),
        pytest.param(
            substituted,
            sgp.SVGP(4),
            "'noise' is put at a value.*handlers.condition",
            marks=pytest.mark.filterwarnings("ignore:init_to_median"),  # NumPyro's own
        ),
        (scanned, sgp.SVGP(4), "'z' is drawn inside of control_flow.scan"),
        (plain, sgp.MixtureSVGP(4), "GP site 'f'.*MixtureSVGP.*covariance='full'"),
        (plain, sgp.SVGP(4, covariance="diagonal"), "GP site 'f'.*'diagonal'"),
        (plain, sgp.SVGP(4, tight="diagonal"), "GP site 'f': tight bounds"),
        (plain, sgp.InverseFreeSVGP(4), "GP site 'f'.*InverseFreeSVGP"),
    ],
)
def test_what_is_refused_by_name(model, approximation, match, options):
    run = sgp.fit if options else sgp.nested
    with pytest.raises(ValueError, match=match):
        run(model, approximation, (X, Y), progress_bar=False, **options)


@pytest.mark.slow
def test_a_mixture_as_the_likelihood_is_taken():
    """Mixtures are approximations that are refused; this is one in the data."""

    def model(X, y=None):
        f = site("f", X)
        parts = [dist.Normal(f, 0.1), dist.Normal(f, 2.0)]
        weights = dist.Categorical(probs=np.array([0.9, 0.1]))
        observe(dist.MixtureGeneral(weights, parts), y)

    found = sgp.nested(model, sgp.SVGP(6), (X, Y), progress_bar=False)
    assert np.all(np.abs(found.posterior(X)["f"].mean - Y) < 0.1)


@pytest.mark.slow
def test_slopes_on_one_side_are_enough():
    """Of a rate that is none below zero."""

    def model(X, y=None):
        observe(dist.Poisson(jnp.maximum(site("f", X), 0.0) + 0.1), y)

    counts = np.arange(12) % 3
    found = sgp.nested(model, sgp.SVGP(4), (X, counts), progress_bar=False)
    assert np.isfinite(found.log_evidence)


def test_a_support_that_depends_on_f():
    """Outside of which the density is none, however q(w) is."""

    def model(X, y=None):
        f = site("f", X)
        observe(dist.Uniform(f - 1.0, f + 1.0), y)

    with pytest.raises(ValueError, match="support of observed site .y. .Uniform. moves"):
        sgp.nested(model, sgp.SVGP(4), (X, 3.0 * Y), progress_bar=False)


@pytest.mark.slow
def test_data_that_are_the_models_own_are_told_from_arguments_at_new_inputs():
    X = np.linspace(0.0, 1.0, 6)[:, None]

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    own = numpyro.handlers.condition(model, {"y": jnp.sin(X[:, 0])})
    fitted = sgp.fit(own, sgp.VGP(), (X,), joint=True, progress_bar=False)
    assert fitted.predict(X)["y"].mean.shape == (6,)
    with pytest.raises(ValueError, match="values of the model's own .* as an argument"):
        fitted.predict(X[:2])


def hidden(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    observe(dist.Normal(site("f", X), scale), y)


def branches(X, y=None):
    f = site("f", X)

    def branch(mean):
        return lambda _: numpyro.sample("a", dist.Normal(mean, 1.0))

    observe(dist.Normal(f + cond(True, branch(0.0), branch(3.0), None), 0.3), y)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "model, words",
    [
        # Its scale was one draw, of which the evidence was, "converged".
        (
            numpyro.handlers.block(hidden, hide=["scale"]),
            "that numpyro.handlers.block hides",
        ),
        (branches, "control_flow.cond.*jnp.where"),
    ],
)
@pytest.mark.parametrize(
    "run", [sgp.nested, partial(sgp.fit, joint=True)], ids=["nested", "joint"]
)
def test_what_would_be_one_draw_is_refused(model, words, run):
    with pytest.raises(ValueError, match=words):
        run(model, sgp.VGP(), (X, Y), progress_bar=False)


def jittered(X, y=None):
    noise = dist.Normal().sample(numpyro.prng_key(), X.shape)
    observe(dist.Normal(site("f", X + noise), 0.3), y)


def test_random_inputs_are_refused():
    with pytest.raises(ValueError, match="random numbers that are no latent site"):
        sgp.nested(jittered, sgp.VGP(), (X, Y), progress_bar=False)


@pytest.mark.slow
def test_a_parameter_that_starts_at_random_is_none_of_these():
    def model(X, y=None):
        def start(key):
            return jnp.exp(0.1 * random.normal(key))

        scale = numpyro.param("scale", start, constraint=dist.constraints.positive)
        observe(dist.Normal(scale * site("f", X), 0.3), y)

    options = {"joint": True, "steps": 2, "progress_bar": False}
    assert np.isfinite(sgp.fit(model, sgp.VGP(), (X, Y), **options).bound)

"""
Densities that NUTS and elliptical slices see, for latents of every support, against the
same model written by hand in NumPyro alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.infer import MCMC, NUTS, Gibbs, init_to_median
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
from numpyro.infer.util import log_density, potential_energy

from numpyro_sgp import (
    SVGP,
    CollapsedSVGP,
    EllipticalSlice,
    GaussHermite,
    GaussianProcess,
    GPPredictive,
    MarginalGP,
    sparsify,
    whiten,
)
from numpyro_sgp.kernels import RBF
from tests.helpers import slow

N = 6
X = jnp.linspace(0.0, 3.0, N)[:, None]
Y = jnp.sin(2 * X[:, 0]) + 0.5
JITTER = 1e-9  # its traces in an expectation are near 1e-9 / noise**2
POINTS = 3  # unconstrained points of a density


def process(name, variance=1.0, lengthscale=0.7, mean=0.0, batch=()):
    """A GP site of the package."""
    gp = GaussianProcess(RBF(variance, lengthscale), X, mean, JITTER)
    return numpyro.sample(name, gp.expand(batch).to_event(len(batch)))


def by_hand(name, variance=1.0, lengthscale=0.7, mean=0.0, batch=()):
    """The same function values, whitened, without the package."""
    K = variance * jnp.exp(-0.5 * (X - X.T) ** 2 / lengthscale**2)
    L = jnp.linalg.cholesky(K + JITTER * variance * jnp.eye(N))
    normal = dist.Normal().expand((*batch, N)).to_event(1 + len(batch))
    white = numpyro.sample(f"{name}_white", normal)
    return numpyro.deterministic(name, mean + white @ L.T)


def observe(loc, noise=0.5, y=Y):
    numpyro.deterministic("loc", loc)
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(loc, noise), obs=y)


# ---- the models: latents of every kind and one likelihood -------------------------------


def untouched(gp, y=Y):
    numpyro.sample("c", dist.Gamma(4.0, 0.5))
    observe(gp("f"), y=y)


def supports(gp, y=Y):
    f = gp("f")
    total = 0.0
    for name, fn in {
        "positive": dist.Gamma(4.0, 2.0),
        "log_normal": dist.LogNormal(0.0, 0.5),
        "half_normal": dist.HalfNormal(0.8),
        "unit": dist.Beta(2.0, 3.0),
        "interval": dist.Uniform(-1.0, 2.0),
        "above": dist.TruncatedNormal(0.3, 1.0, low=-0.5),
        "simplex": dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])),
        "ordered": dist.TransformedDistribution(
            dist.Normal(0.0, jnp.ones(3)).to_event(1), transforms.OrderedTransform()
        ),
        "improper": dist.ImproperUniform(constraints.positive_ordered_vector, (), (2,)),
        "correlation": dist.LKJCholesky(3, 2.0),
        "shifted": dist.TransformedDistribution(
            dist.Exponential(), transforms.AffineTransform(1.0, 2.0)
        ),
        "angle": dist.VonMises(0.3, 2.0),
        "row": dist.MultivariateNormal(jnp.zeros(2), 0.5 * jnp.eye(2)),
    }.items():
        value = numpyro.sample(name, fn)
        weights = 1.0 + jnp.arange(value.size)
        total = total + 0.1 * jnp.ravel(value) @ weights
    with numpyro.plate("groups", 3):
        scale = numpyro.sample("scale", dist.HalfNormal())
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
    noise = numpyro.sample("noise", dist.HalfCauchy(1.0))
    observe(f + total + effect[jnp.arange(N) % 3], noise, y)


def hyperparameters(gp, y=Y):
    with numpyro.plate("latent", 2):
        lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(3.0, 2.0))
    variance = numpyro.sample("variance", dist.HalfNormal(2.0))
    level = numpyro.sample("level", dist.Normal())
    f = gp("f", variance, lengthscale[0], level)
    g = gp("g", 1.3, lengthscale[1], batch=(2,))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.3))
    observe(f + 0.5 * g[0] - 0.3 * g[1], noise, y)


def reparametrised(gp, y=Y):
    def inner():
        with numpyro.plate("groups", 2):
            effect = numpyro.sample("effect", dist.Normal(1.0, 2.0))
        affine = transforms.AffineTransform(-1.0, 0.5)
        skewed = dist.TransformedDistribution(dist.Gamma(2.0, 1.0), affine)
        skewed = numpyro.sample("skewed", skewed)
        noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.3))
        observe(gp("f") + skewed * X[:, 0] + effect[jnp.arange(N) % 2], noise, y)

    config = {
        "effect": LocScaleReparam(0.0),
        "skewed": TransformReparam(),
        "noise": TransformReparam(),
    }
    handlers.reparam(inner, config)()


def masked_and_scaled(gp, y=Y):
    c = numpyro.sample("c", dist.Gamma(2.0, 1.0))
    with handlers.mask(mask=False):
        numpyro.sample("masked", dist.Gamma(2.0, 1.0))
    with handlers.scale(scale=0.3):
        tempered = numpyro.sample("tempered", dist.Beta(2.0, 3.0))
        f = gp("f")
    with handlers.scale(scale=2.0), handlers.mask(mask=jnp.arange(N) != 2):
        observe(f + c * tempered, y=y)


def factors(gp, y=Y):
    c = numpyro.sample("c", dist.Gamma(2.0, 1.0))
    f = gp("f")
    numpyro.factor("constant", -1.5)
    numpyro.factor("of_c", -0.5 * (c - 1.0) ** 2)
    numpyro.factor("of_f", jnp.sum(-0.1 * f**2))
    numpyro.factor("of_both", -0.3 * c * f)
    numpyro.sample("prior_data", dist.Gamma(c, 1.0), obs=1.7)
    numpyro.deterministic("twice", 2 * c)
    numpyro.deterministic("rate", jnp.exp(f))
    observe(f, c, y)


def conditioned(gp, y=Y):
    def inner():
        c = numpyro.sample("c", dist.Gamma(2.0, 1.0))
        d = numpyro.sample("d", dist.Gamma(c, 1.0))
        e = numpyro.sample("e", dist.Gamma(d, 1.0))
        observe(gp("f") + c, e, y)

    handlers.condition(inner, data={"d": 1.2})()


def chain(gp, y=Y):
    def step(carry, _):
        level = numpyro.sample("level", dist.LogNormal(0.2 * carry, 0.5))
        return level, level

    _, levels = scan(step, 0.5, jnp.arange(N))
    observe(gp("f") + levels, y=y)


# Model, and its GP sites with their batch shapes.
MODELS = {
    "untouched": (untouched, {"f": ()}),
    "supports": (supports, {"f": ()}),
    "hyperparameters": (hyperparameters, {"f": (), "g": (2,)}),
    "reparametrised": (reparametrised, {"f": ()}),
    "masked and scaled": (masked_and_scaled, {"f": ()}),
    "factors": (factors, {"f": ()}),
    "conditioned": (conditioned, {"f": ()}),
    "chain": (chain, {"f": ()}),
}


def of(case, gp):
    """A model with y as its argument."""
    return lambda y=Y: MODELS[case][0](gp, y)


def points(case):
    """Unconstrained values of all latents of the model by hand, and constrained ones."""
    model = handlers.seed(of(case, by_hand), jax.random.key(0))
    model = handlers.substitute(model, substitute_fn=init_to_median)
    trace = handlers.trace(model).get_trace()
    rng = np.random.default_rng(0)
    free, values = {}, {}
    for name, site in trace.items():
        if site["type"] == "sample" and not site["is_observed"]:
            transform = biject_to(site["fn"].support)
            shape = transform.inverse_shape(jnp.shape(site["value"]))
            free[name] = jnp.asarray(0.7 * rng.normal(size=(POINTS, *shape)))
            values[name] = jax.jit(jax.vmap(transform))(free[name])
    return free, values


def potentials(model, free):
    return jax.jit(jax.vmap(lambda z: potential_energy(model, (), {}, z)))(free)


def renamed(values, case):
    """From the whitened sites to the inducing values of the sparsified model."""
    return {
        f"{name[:-6]}_u_white" if name[:-6] in MODELS[case][1] else name: value
        for name, value in values.items()
    }


@pytest.fixture(scope="module", params=[slow(m) if m == "supports" else m for m in MODELS])
def case(request):
    name = request.param
    free, values = points(name)
    return name, free, values, potentials(of(name, by_hand), free)


# ---- what NUTS, elliptical slices and predictions see -----------------------------------


@pytest.mark.quick(1)
def test_whitened_models_have_the_density_written_by_hand(case):
    name, free, _, expected = case
    assert_allclose(potentials(whiten(of(name, process)), free), expected, rtol=1e-8)


@pytest.mark.quick(2)
def test_models_sparsified_at_their_inputs_have_the_density_written_by_hand(case):
    name, free, _, expected = case
    sparse = sparsify(of(name, process), SVGP(inducing=X, jitter=JITTER)).setup()
    got = potentials(sparse, renamed(free, name))
    # What is left of the variance is the jitter, over noises of 0.1 at the least.
    assert_allclose(got, expected, rtol=1e-6)
    if name == "factors":
        trace = handlers.trace(handlers.seed(sparse, jax.random.key(0))).get_trace()
        shown = {"constant", "of_c", "prior_data", "twice", "rate", "loc"} & set(trace)
        assert shown == {"twice"}  # the others are in the expectation, or depend on f


@pytest.mark.slow
def test_elliptical_slices_and_nuts_share_a_density_in_gibbs(case):
    pytest.importorskip("blackjax")
    name, free, values, expected = case
    white = whiten(of(name, process))
    gps = [f"{site}_white" for site in MODELS[name][1]]
    if name == "masked and scaled":
        pytest.skip("a tempered prior is not N(0, I), which is refused")
    kernel = Gibbs([(EllipticalSlice(white), gps), (NUTS(white), None)])
    (slices, _), (nuts, _) = kernel.blocks
    z, rest = ({k: v[0] for k, v in values.items() if (k in gps) == w} for w in (1, 0))
    state = slices.init(jax.random.key(0), 0, z, (), {"_gibbs_sites": rest})
    hand = of(name, by_hand)
    seeded = handlers.seed(hand, 0)
    total = jax.jit(lambda v: log_density(seeded, (), {}, v)[0])({**z, **rest})
    prior = sum(dist.Normal().log_prob(value).sum() for value in z.values())
    assert_allclose(state.log_likelihood, total - prior, rtol=1e-8)
    rest = {k: v[0] for k, v in free.items() if k not in gps}
    sites = {"_gibbs_sites": z}
    got = jax.jit(lambda rest: potential_energy(nuts.model, (), sites, rest))(rest)
    assert_allclose(got, expected[0], rtol=1e-8)


@pytest.mark.quick(2)
def test_predictions_at_the_inputs_are_those_of_each_sample(case):
    name, _, values, _ = case
    hand = of(name, by_hand)

    def deterministic(values):
        model = handlers.substitute(handlers.seed(hand, 0), data=values)
        trace = handlers.trace(model).get_trace()
        sites = (*MODELS[name][1], "loc")
        return {site: trace[site]["value"] for site in sites}

    found = jax.jit(jax.vmap(deterministic))(values)
    samples = {**values, **{site: found[site] for site in MODELS[name][1]}}
    predictive = GPPredictive(of(name, process), samples, train_kwargs={"y": Y})
    draws = predictive(jax.random.key(0), y=None)
    # The jitter leaves 4e-5 of the standard deviation.
    assert_allclose(draws["loc"], found["loc"], atol=2e-3)
    assert draws["y"].shape == (POINTS, N) and not (set(draws) & set(values))


# ---- f integrated out -------------------------------------------------------------------

Z = jnp.array([[0.2], [1.4], [2.9]])


@pytest.mark.quick(1)
@pytest.mark.parametrize("collapsed", [False, True])
def test_evidence_and_its_bound_under_nuts(collapsed):
    def model(y_given):
        lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(3.0, 2.0))
        variance = numpyro.sample("variance", dist.HalfNormal(2.0))
        noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.3))
        y_given(variance, lengthscale, noise)

    def ours(variance, lengthscale, noise):
        kernel = RBF(variance, lengthscale)
        if collapsed:
            fn = CollapsedSVGP(kernel, X, Z, noise, jitter=JITTER)
        else:
            fn = MarginalGP(kernel, X, noise)
        numpyro.sample("y", fn, obs=Y)

    def hand(variance, lengthscale, noise):
        def k(a, b):
            return variance * jnp.exp(-0.5 * (a - b.T) ** 2 / lengthscale**2)

        K = k(X, X)
        if collapsed:
            Kuu = k(Z, Z) + JITTER * variance * jnp.eye(len(Z))
            Q = k(X, Z) @ jnp.linalg.inv(Kuu) @ k(Z, X)
            numpyro.factor("trace", -0.5 * jnp.trace(K - Q) / noise**2)
            K = Q
        y = dist.MultivariateNormal(jnp.zeros(N), K + noise**2 * jnp.eye(N))
        numpyro.sample("y", y, obs=Y)

    rng = np.random.default_rng(0)
    names = ("lengthscale", "variance", "noise")
    free = {name: jnp.asarray(0.7 * rng.normal(size=POINTS)) for name in names}
    got, expected = (potentials(partial(model, y), free) for y in (ours, hand))
    assert_allclose(got, expected, rtol=1e-7)


# ---- posteriors ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["untouched", "hyperparameters", "reparametrised", "factors", "chain"]
)
def test_sparsified_at_the_inputs_and_whitened_models_have_one_posterior(name):
    sparse = sparsify(of(name, process), SVGP(inducing=X, jitter=JITTER), GaussHermite(4))
    draws = []
    for i, model in enumerate([whiten(of(name, process)), sparse.setup()]):
        mcmc = MCMC(
            NUTS(model),
            num_warmup=500,
            num_samples=1500,
            num_chains=16,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(jax.random.key(i))
        draws.append(mcmc.get_samples(group_by_chain=True))
    trace = handlers.trace(handlers.seed(of(name, by_hand), 0)).get_trace()
    table, numbers = [], []
    for site in points(name)[1]:
        keys = (site, *renamed({site: 0}, name))
        pair = [found[key] for found, key in zip(draws, keys, strict=True)]
        if site == "c" and name == "untouched":
            # Its prior, Gamma(4, 0.5), in which the mean is 8 and the sd 4. Five standard
            # errors, with the excess kurtosis of 6 / 4.
            for c in pair:
                ess = effective_sample_size(np.asarray(c))
                print(f"\nc: {c.mean():.3f} +- {c.std():.3f}, ess {ess:.0f}")
                assert abs(c.mean() - 8) < 5 * 4 / np.sqrt(ess)
                assert abs(c.std() - 4) < 5 * 4 * np.sqrt(3.5 / 4 / ess)
        # Where the tails of all are light: numbers without bounds.
        free = jax.vmap(jax.vmap(biject_to(trace[site]["fn"].support).inv))
        pair = [np.reshape(free(values), (*values.shape[:2], -1)) for values in pair]
        for i in range(pair[0].shape[-1]):
            columns = [values[..., i] for values in pair]
            mean, sd = np.mean(columns, axis=(1, 2)), np.std(columns, axis=(1, 2))
            ess = np.array([effective_sample_size(c) for c in columns])
            z = (mean[0] - mean[1]) / np.sqrt(np.sum(sd**2 / ess))
            numbers.append((z, sd[1] / sd[0], ess.min()))
            table.append(
                f"{name:16} {site:12} {mean[0]:8.3f} {mean[1]:8.3f} {sd[0]:7.3f} "
                f"{sd[1]:7.3f} {z:6.2f} {sd[1] / sd[0]:6.3f} {ess[0]:7.0f} {ess[1]:7.0f}"
            )
    print("\n" + "\n".join(table))
    z, ratio, ess = np.transpose(numbers)
    assert ess.min() > 1000
    # Were they normal, one key in 16,000 would fail for each of some 60 numbers.
    assert np.abs(z).max() < 4
    # The standard error of a ratio is sqrt(1 / ess), or .012 with 7,000, and more where
    # tails are not those of a normal.
    assert 0.95 < ratio.min() and ratio.max() < 1.05

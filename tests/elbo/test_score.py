"""Score-function gradients against quadrature; rules that draw."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.distributions import constraints
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.elbo.score import surrogate
from numpyro_sgp.families import Block, BlockGaussian, CoupledGaussian

N = 4
X = jnp.array([-1.5, -0.4, 0.7, 1.6])[:, None]
Y = jnp.array([0.4, -0.9, 1.3, 0.2])
Z = jnp.array([-1.0, 1.1])[:, None]


def one_latent(X, y, black_box=None, batch_size=None):
    """A likelihood with a parameter and no closed form; also as a black box without."""
    lengthscale = numpyro.param("lengthscale", 0.9, constraint=constraints.positive)
    data = numpyro.plate("data", N, subsample_size=batch_size)
    with data as idx:
        X, y = X[idx], y[idx]
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.2, lengthscale), X))
    with data:
        if black_box is None:
            scale = numpyro.param("scale", 0.7, constraint=constraints.positive)
            numpyro.factor("y", -jnp.log1p(((y - jnp.sin(f)) / scale) ** 2))
        else:
            numpyro.sample("y", sgp.BlackBox(black_box, f), obs=y)


def two_latents(X, y):
    """A normal with a noise that varies."""
    lengthscale = numpyro.param("lengthscale", jnp.array([0.9, 1.5]))
    prior = sgp.GaussianProcess(sgp.kernels.RBF(jnp.ones(2), lengthscale), X)
    f = numpyro.sample("f", prior)
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f[0], jnp.exp(0.5 * f[1])), obs=y)


def parameters(batch):
    """q(u) near the prior, of latent functions (or components) of the given shape."""
    rng = np.random.default_rng(0)
    noise = np.tril(rng.normal(size=(*batch, 2, 2)))
    return {
        "f_auto_Z": Z,
        "f_auto_qu_mu": jnp.asarray(0.5 * rng.normal(size=(*batch, 2))),
        "f_auto_qu_sqrt": jnp.asarray(0.8 * np.eye(2) + 0.2 * noise),
    }


MIXTURE = sgp.MixtureSVGP(2, 2, inducing=Z, covariance="full")
MIXTURE_PARAMS = {
    **parameters((2,)),
    "f_auto_qu_logits": jnp.array([0.6, -0.6]),
    "lengthscale": jnp.array(0.9),
}
SCALE = {"scale": jnp.array(0.7)}


def losses_and_gradients(model, approximation, params, rule, keys, **options):
    """Of the loss of a guide, one for each key."""
    guide = sgp.AutoSparseGP(model, approximation)
    guide.setup(X, Y, **options)
    elbo = sgp.TraceGP_ELBO(rule)

    def loss(params, key):
        return elbo.loss(key, params, model, guide, X, Y, **options)

    at = jax.vmap(lambda key: jax.value_and_grad(loss)(params, key))
    return jax.tree.map(np.asarray, jax.jit(at)(keys))


def assert_mean(draws, expected):
    """Within five standard errors: a number fails for one key in 2e6."""
    error = draws.std(axis=0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - expected) < 5 * error + 1e-9).all()


def assert_unbiased(draws, quadrature):
    """The losses and gradients, and that noise does not hide the gradients."""
    (value,), gradient = quadrature
    values, gradients = draws
    assert_mean(values, value)
    for name, (expected,) in gradient.items():
        assert_mean(gradients[name], expected)
        error = gradients[name].std(axis=0) / np.sqrt(len(KEYS))
        assert np.abs(expected).max() > 7 * error.max()


QUADRATURE = sgp.GaussHermite(40)
ONE_KEY, KEYS = random.split(random.key(0), 1), random.split(random.key(1), 1000)


@pytest.fixture(scope="module")
def one():
    """One latent function with a mixture: losses and gradients by each rule."""
    params = {**MIXTURE_PARAMS, **SCALE}
    quadrature = losses_and_gradients(one_latent, MIXTURE, params, QUADRATURE, ONE_KEY)
    rule = sgp.ScoreFunction(20)
    return quadrature, losses_and_gradients(one_latent, MIXTURE, params, rule, KEYS)


def test_gradients_of_one_latent_function_are_unbiased(one):
    quadrature, draws = one
    assert_unbiased(draws, quadrature)


@pytest.mark.slow
def test_gradients_of_two_latent_functions_are_unbiased():
    given = (
        two_latents,
        sgp.SVGP(inducing=Z),
        {**parameters((2,)), "lengthscale": jnp.array([0.9, 1.5])},
    )
    rule = sgp.ScoreFunction(16, control_variate=False, antithetic=True, sequence="sobol")
    draws = losses_and_gradients(*given, rule, KEYS)
    assert_unbiased(draws, losses_and_gradients(*given, QUADRATURE, ONE_KEY))


@pytest.fixture(scope="module")
def boxed():
    """The same with the likelihood as a black box, and the shapes of its calls."""
    shapes = []

    def black_box(y, f):
        shapes.append(f.shape)
        return -np.log1p(((y - np.sin(f)) / 0.7) ** 2)

    given = (one_latent, MIXTURE, MIXTURE_PARAMS, sgp.ScoreFunction(20), KEYS)
    return losses_and_gradients(*given, black_box=black_box), shapes


@pytest.mark.slow
def test_a_black_box_is_the_same_likelihood_in_jax(one, boxed):
    (_, (values, gradients)), ((got_values, got), _) = one, boxed
    # The same draws and the same arithmetic, but for the order of sums.
    assert_allclose(got_values, values, rtol=1e-6)
    for name, value in got.items():
        assert_allclose(value, gradients[name], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_a_call_of_a_black_box_has_all_rows_nodes_components_and_keys(boxed):
    _, shapes = boxed
    assert set(shapes) == {(N * 20 * 2 * len(KEYS),)}


def test_a_black_box_is_called_once_in_a_step(boxed):
    _, shapes = boxed
    assert len(shapes) == 1


@pytest.mark.slow
def test_minibatches_are_scaled(one):
    ((value,), gradient), _ = one
    values, gradients = losses_and_gradients(
        one_latent,
        MIXTURE,
        {**MIXTURE_PARAMS, **SCALE},
        sgp.ScoreFunction(20),
        KEYS,
        batch_size=2,
    )
    assert_mean(values, value)
    for name, (expected,) in gradient.items():
        assert_mean(gradients[name], expected)
    # Without the factor of two, the likelihood's part would be half as large.
    assert values.std() / np.sqrt(len(KEYS)) < 0.02 * value


# ---- the estimator by itself ------------------------------------------------------------

MEAN, VARIANCE = np.array([0.2, 0.9, 1.5, 2.1]), np.array([0.5, 0.3, 0.2, 0.4])
COUNTS = np.array([0, 3, 7, 5])


def count_log_prob(f):
    return COUNTS * f - jnp.exp(f) - jax.scipy.special.gammaln(COUNTS + 1.0)


def count_gradients(rule):
    """Score gradients with respect to mean and variance, for 2000 keys."""

    def at(key):
        nodes, _ = rule.nodes(key, {"f": (N,)}, jnp.float64)
        x = nodes["f"]
        values = count_log_prob(MEAN + jnp.sqrt(VARIANCE) * x)
        return jax.grad(
            lambda m, v: surrogate(m, v, x, values, rule.control_variate), argnums=(0, 1)
        )(jnp.asarray(MEAN), jnp.asarray(VARIANCE))

    return [np.asarray(g) for g in jax.jit(jax.vmap(at))(random.split(KEYS[0], 2_000))]


RULES = {
    "plain": sgp.ScoreFunction(200, control_variate=False),
    "controlled": sgp.ScoreFunction(200),
    "antithetic Sobol": sgp.ScoreFunction(64, antithetic=True, sequence="sobol"),
}


@pytest.fixture(scope="module")
def counts():
    return {name: count_gradients(rule) for name, rule in RULES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_gradients_are_unbiased_by_every_rule(counts, name):
    # E[y f - e^f] = y m - e^(m + v / 2).
    rate = np.exp(MEAN + VARIANCE / 2)
    to_mean, to_variance = counts[name]
    # 24 numbers for the three rules: one key in 7e4 fails.
    assert_mean(to_mean, COUNTS - rate)
    assert_mean(to_variance, -0.5 * rate)


@pytest.mark.slow
def test_control_variate_reduces_the_variance(counts):
    for plain, controlled in zip(counts["plain"], counts["controlled"], strict=True):
        # In each row; the log likelihoods here are near zero, where it helps least.
        factors = plain.var(axis=0) / controlled.var(axis=0)
        assert (factors > 1.2).all() and factors.max() > 3


def test_value_is_zero():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(10, 2, N)))
    values = count_log_prob(x[:, 0])
    m, v = jnp.ones((2, N)), jnp.ones((2, N))
    assert surrogate(m, v, x, values, True) == 0.0


# ---- rules that draw --------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("rule", [sgp.MonteCarlo, sgp.ScoreFunction])
def test_a_seed_gives_common_random_numbers(rule):
    shapes, num = {"f": (3,), "g": (3,)}, 8 if rule is sgp.MonteCarlo else 16
    for sequence in ("random", "sobol"):
        fixed, free = rule(num, sequence=sequence, seed=3), rule(num, sequence=sequence)
        first, again = (fixed.nodes(key, shapes, jnp.float64)[0] for key in KEYS[:2])
        for name, shape in shapes.items():
            assert first[name].shape == (num, *shape)
            assert_array_equal(first[name], again[name])
            draws = [free.nodes(key, shapes, jnp.float64)[0][name] for key in KEYS[:2]]
            assert np.abs(draws[0] - draws[1]).min() > 0
        other = rule(num, sequence=sequence, seed=4).nodes(KEYS[0], shapes, jnp.float64)[0]
        assert np.abs(first["f"] - other["f"]).min() > 0


@pytest.mark.parametrize("rule", [sgp.MonteCarlo, sgp.ScoreFunction])
def test_antithetic_draws_come_in_pairs(rule):
    for sequence in ("random", "sobol"):
        # Within each half, where the rule has two.
        halves = 2 if rule is sgp.ScoreFunction else 1
        pairs = rule(16 * halves, antithetic=True, sequence=sequence)
        nodes, weights = pairs.nodes(KEYS[0], {"f": (3,), "g": (3,)}, jnp.float64)
        for half in np.split(np.asarray(nodes["f"]), halves):
            first, second = np.split(half, 2)
            assert_array_equal(first, -second)
        assert_allclose(weights, 1 / (16 * halves))


def test_sobol_draws_are_normal_and_have_a_smaller_error_on_smooth_functions():
    # 500 rows are 500 shifts.
    shapes = {"f": (2, 500)}
    errors = {}
    for sequence in ("random", "sobol"):
        rule = sgp.MonteCarlo(64, sequence=sequence)
        draw = jax.jit(lambda key, rule=rule: rule.nodes(key, shapes, jnp.float64)[0]["f"])
        x = np.asarray(draw(KEYS[0]))
        means = np.exp(0.5 * x[:, 0] - 0.3 * x[:, 1]).mean(axis=0)
        assert_mean(means, np.exp(0.5 * (0.5**2 + 0.3**2)))
        errors[sequence] = means.std()
        # Each draw by itself is standard normal: 2 x 64 x 2 numbers, one key in 8e3.
        assert (np.abs(x.mean(axis=-1)) < 5 / np.sqrt(500)).all()
        assert (np.abs((x**2).mean(axis=-1) - 1) < 5 * np.sqrt(2 / 500)).all()
    assert errors["sobol"] < 0.5 * errors["random"]


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: sgp.ScoreFunction(3), "positive multiple of 2, got 3"),
        (lambda: sgp.ScoreFunction(6, antithetic=True), "multiple of 4, got 6"),
        (lambda: sgp.ScoreFunction(0), "positive multiple of 2, got 0"),
        (lambda: sgp.MonteCarlo(0), "must be positive, got 0"),
        (lambda: sgp.MonteCarlo(3, antithetic=True), "positive multiple of 2, got 3"),
        (lambda: sgp.MonteCarlo(4, sequence="halton"), "'random' or 'sobol', got 'halton'"),
        (lambda: sgp.MonteCarlo(4, joint=True, sequence="sobol"), "draws are independent"),
    ],
)
def test_bad_options_are_refused(make, what):
    with pytest.raises(ValueError, match=what):
        make()


# ---- what cannot be done ----------------------------------------------------------------


def posterior_at(X, coupled=False):
    """A site with a posterior that is made by hand."""
    prior = sgp.GaussianProcess(sgp.kernels.RBF(), X)
    if coupled:
        q = CoupledGaussian(jnp.zeros((2, 2)), jnp.eye(4))
        return sgp.SparsePosterior(prior.expand([2]), (Z,), q)
    return sgp.SparsePosterior(prior, (Z,), BlockGaussian((Block(jnp.zeros(2), None),)))


def gp_at(X, coupled=False):
    prior = sgp.GaussianProcess(sgp.kernels.RBF(), X)
    return prior.expand([2]) if coupled else prior


def not_factorised(at):
    f = numpyro.sample("f", at(X))
    numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=Y)


def coupled(at):
    f = numpyro.sample("f", at(X, coupled=True))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=Y)


def deep(at):
    inner = numpyro.sample("inner", at(X))
    f = numpyro.sample("f", at(inner[:, None]))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=Y)


def at_other_rows(at):
    f = numpyro.sample("f", at(X))
    g = numpyro.sample("g", at(X[:3]))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g.sum())), obs=Y)


@pytest.mark.parametrize(
    "model, what",
    [
        (
            not_factorised,
            r"each of the 4 rows, but site 'y', which depends on f, .*shape \(\)",
        ),
        (coupled, "GP site 'f' has coupled latent functions, but ScoreFunction needs"),
        (deep, "inputs do not depend on another GP site; .*a deep GP.*Use MonteCarlo"),
        (at_other_rows, "at the same rows, but they have 4 rows at 'f', 3 rows at 'g'"),
    ],
)
def test_models_that_scores_do_not_serve_are_refused(model, what):
    def loss(rule):
        elbo = sgp.TraceGP_ELBO(rule)
        guide = functools.partial(model, posterior_at)
        model_of_prior = functools.partial(model, gp_at)
        return jax.eval_shape(lambda: elbo.loss(KEYS[0], {}, model_of_prior, guide))

    assert loss(sgp.MonteCarlo(2)).shape == ()
    with pytest.raises(ValueError, match=what):
        loss(sgp.ScoreFunction(2))


def gradient_of_mean(model, rule, X, y):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=X[::3], train_inducing=False))
    svi = SVI(model, guide, optax.sgd(0.1), sgp.TraceGP_ELBO(rule))
    params = svi.get_params(svi.init(jax.random.key(0), X, y))

    def loss(params):
        return svi.loss.loss(jax.random.key(1), params, model, guide, X, y)

    return jax.jit(jax.grad(loss))(params)["f_auto_qu_mu"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["factor", "latent", "conditioned"])
def test_all_that_depends_on_f_is_scored_or_refused(kind):
    X = jnp.linspace(0.0, 3.0, 9)[:, None]
    y = jnp.sin(X[:, 0])

    def model(X, y):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0), obs=0.5)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        if kind == "factor":
            numpyro.factor("lik", jnp.sum(dist.Normal(f, scale).log_prob(y)))
        elif kind == "latent":
            numpyro.sample("z", dist.Normal(f, 1.0).to_event(1))
            numpyro.factor("lik", dist.Normal(f, scale).log_prob(y))
        else:
            numpyro.factor("lik", dist.Normal(f, scale).log_prob(y))

    rule = sgp.ScoreFunction(20_000, sequence="sobol")
    if kind != "conditioned":
        with pytest.raises(ValueError, match="'(lik|z)', which depends on f"):
            gradient_of_mean(model, rule, X, y)
        return
    score = gradient_of_mean(model, rule, X, y)
    exact = gradient_of_mean(model, sgp.GaussHermite(10), X, y)
    # 20,000 quasi-random draws with a control variate: errors are below 0.01 here.
    assert_allclose(score, exact, atol=0.05)


def test_two_axes_of_the_length_of_the_data_are_refused():
    X = jnp.linspace(0.0, 3.0, 9)[:, None]
    y = jnp.ones((9, 9))

    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", 9, dim=-2), numpyro.plate("outputs", 9, dim=-1):
            numpyro.sample("y", dist.Normal(f[:, None], 0.5), obs=y)

    with pytest.raises(ValueError, match="2 axes that may be the 9 rows"):
        gradient_of_mean(model, sgp.ScoreFunction(20), X, y)

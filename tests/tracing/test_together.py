"""Functions that no term has together share nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_sgp as sgp
from numpyro_sgp.elbo.quadrature import SharedAxes
from numpyro_sgp.tracing.together import axes_of_functions

N = 12
rng = np.random.default_rng(0)
Y, COUNTS = rng.normal(size=(3, N)), rng.poisson(2.0, size=(3, N))
CODES = jnp.arange(N) % 3
ALIKE, APART, ONE = ((0, 0, 0),), ((0, 1, 2),), {"f": (3, N)}


def of(fn, y):
    return fn.log_prob(y).sum()


CASES = {
    "normal": (ONE, lambda f: of(dist.Normal(f["f"], 0.3), Y), ALIKE),
    "poisson": (ONE, lambda f: of(dist.Poisson(jnp.exp(f["f"])), COUNTS), ALIKE),
    "columns": (ONE, lambda f: of(dist.Bernoulli(logits=f["f"].T), COUNTS.T > 1), ALIKE),
    "ordered": (  # whose probabilities are taken by codes
        ONE,
        lambda f: of(dist.OrderedLogistic(f["f"], jnp.array([-1.0, 1.0])), COUNTS % 3),
        APART,
    ),
    # By codes that are data, and others elsewhere.
    "one of each row": (
        ONE,
        lambda f: of(dist.Normal(f["f"][CODES, jnp.arange(N)], 0.3), Y[0]),
        APART,
    ),
    "a part of whole numbers": (
        ONE,
        lambda f: -3.0 * ((f["f"] > 0.0).sum(axis=0) // 2).sum() - (f["f"] ** 2).sum(),
        APART,
    ),
    "any of them": (
        ONE,
        lambda f: 1.0 * (f["f"] > 0.0).sum(axis=0).astype(bool).sum(),
        APART,
    ),
    "rounded sums": (
        ONE,
        lambda f: f["f"].sum(axis=0).astype(int).astype(float).sum(),
        APART,
    ),
    "rounded": (ONE, lambda f: jnp.floor(f["f"]).sum(), ALIKE),
    "determinants": (
        {"f": (9, N)},
        lambda f: jnp.linalg.slogdet(f["f"].T.reshape(N, 3, 3))[1].sum(),
        (tuple(range(9)),),
    ),
    "masked": (
        ONE,
        lambda f: jnp.where(COUNTS > 1, dist.Normal(f["f"], 1.0).log_prob(Y), 0.0).sum(),
        ALIKE,
    ),
    "a site for each": (
        {"f": (N,), "g": (N,), "h": (N,)},
        lambda f: of(dist.Laplace(jnp.stack([f["f"], f["g"], f["h"]]), 1.0), Y),
        ((0,), (0,), (0,)),
    ),
    "scales": (
        {"f": (3, N), "g": (3, N)},
        lambda f: of(dist.NegativeBinomial2(jnp.exp(f["f"]), jnp.exp(f["g"])), COUNTS),
        ((0, 0, 0), (1, 1, 1)),
    ),
    "one scale": (
        {"f": (3, N), "g": (N,)},
        lambda f: of(dist.StudentT(4.0, f["f"], jnp.exp(f["g"])), Y),
        ((0, 0, 0), (1,)),
    ),
    "a product": (
        ONE,
        lambda f: (
            of(dist.Normal(f["f"][0] * f["f"][1], 0.3), Y[0])
            + of(dist.Normal(f["f"][2], 0.3), Y[2])
        ),
        ((0, 1, 0),),
    ),
    # Together, though no number of them says so now.
    "mixed by ones": (
        ONE,
        lambda f: of(dist.Normal(jnp.eye(3) @ f["f"], 0.3), Y),
        APART,
    ),
    "weighted by zero": (
        ONE,
        lambda f: of(dist.Normal(f["f"] + 0.0 * f["f"][::-1], 0.3), Y),
        ((0, 0, 1),),
    ),
    "classes": (ONE, lambda f: of(dist.Categorical(logits=f["f"].T), COUNTS[0] % 3), APART),
    "maxima": (ONE, lambda f: of(dist.Normal(f["f"].max(axis=0), 0.3), Y[0]), APART),
    "a switch": (
        ONE,
        lambda f: of(dist.Normal(jnp.where(f["f"][2] > 0, *f["f"][:2]), 0.3), Y[0]),
        APART,
    ),
    "sorted": (ONE, lambda f: of(dist.Normal(jnp.sort(f["f"], axis=0), 0.3), Y), APART),
    "a vector": (
        ONE,
        lambda f: of(dist.MultivariateNormal(f["f"].T, jnp.eye(3)), Y.T),
        APART,
    ),
    "of a loop": (
        ONE,
        lambda f: jax.lax.scan(lambda c, y: (c + (y * c).sum(), None), 1.0, f["f"])[0],
        APART,
    ),
}


@pytest.mark.quick(9)
@pytest.mark.parametrize("name", CASES)
def test_axes_are_those_of_terms(name):
    shapes, log_density, expected = CASES[name]
    assert axes_of_functions(log_density, shapes, jnp.float64) == expected


X = np.sort(rng.uniform(0, 4, (N, 1)), axis=0)


def model(X, y=None):
    """Counts of three functions, and a fourth that is the scale of all of them."""
    lengthscale = jnp.array([1.0, 0.7, 1.5])
    f = numpyro.sample(
        "f", sgp.GaussianProcess(sgp.kernels.RBF(0.5 * jnp.ones(3), lengthscale), X)
    )
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.1, 2.0), X))
    with numpyro.plate("responses", 3, dim=-2), numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(f), jnp.exp(1.0 + g)), obs=y)


def three(X, y=None):
    lengthscale = jnp.array([1.0, 0.7, 1.5])
    f = numpyro.sample(
        "f", sgp.GaussianProcess(sgp.kernels.RBF(0.5 * jnp.ones(3), lengthscale), X)
    )
    with numpyro.plate("responses", 3, dim=-2), numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def loss_of(model, expectation):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3, inducing="random"))
    elbo = sgp.TraceGP_ELBO(expectation)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.1), elbo)
    params = svi.get_params(svi.init(jax.random.key(0), X, COUNTS))
    draw = np.random.default_rng(1).normal
    for name, value in params.items():
        if name.endswith("_mu"):
            params[name] = value + 0.3 * draw(size=value.shape)
        elif name.endswith("_sqrt"):
            params[name] = value + 0.2 * np.tril(draw(size=value.shape))

    def loss(params, key):
        return elbo.loss(key, params, model, guide, X, COUNTS)

    return loss, params, guide


@pytest.mark.slow
def test_bound_and_slopes_are_those_of_a_grid():
    loss, params, guide = loss_of(three, SharedAxes(sgp.GaussHermite(8), (0, 0, 0)))
    assert guide.known().coupling.axes == ALIKE
    grid, _, _ = loss_of(three, sgp.GaussHermite(8))
    key = jax.random.key(0)
    found, expected = (jax.value_and_grad(f)(params, key) for f in (loss, grid))
    # Rounding: a term has the same nodes in both.
    assert_allclose(found[0], expected[0], rtol=1e-10)
    for name, slope in expected[1].items():
        assert_allclose(found[1][name], slope, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_the_bound_of_means_and_one_scale_is_that_of_many_draws():
    loss, params, guide = loss_of(model, None)
    assert guide.known().coupling.axes == ((0, 0, 0), (1,))
    drawn, _, _ = loss_of(model, sgp.MonteCarlo(200))
    keys = jax.random.split(jax.random.key(1), 20)
    values = np.asarray(jax.lax.map(lambda key: drawn(params, key), keys))
    error = values.std(ddof=1) / np.sqrt(len(values))
    # Four standard errors: one in 16,000 by chance, of one key.
    assert abs(loss(params, keys[0]) - values.mean()) < 4 * error < 0.5


@pytest.mark.slow
def test_three_responses_are_fitted_exactly(tmp_path):
    """By draws variances were up to 7 % off, and the bound above the evidence."""

    def model(X, y=None):
        kernel = sgp.kernels.RBF(jnp.ones(3), jnp.array([1.0, 0.7, 1.5]))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("responses", 3, dim=-2), numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    fitted = sgp.fit(model, sgp.VGP(), (X, Y), progress_bar=False)
    evidence, variances = 0.0, []
    for y, lengthscale in zip(Y, (1.0, 0.7, 1.5), strict=True):
        K = np.exp(-0.5 * ((X - X.T) / lengthscale) ** 2)
        S = K + 0.09 * np.eye(N)
        evidence -= 0.5 * (y @ np.linalg.solve(S, y) + np.linalg.slogdet(2 * np.pi * S)[1])
        variances.append(np.diag(K - K @ np.linalg.solve(S, K)))
    # The jitter of K(X, X), 1e-8 of it.
    assert fitted.bound_se == 0.0 and abs(fitted.bound - evidence) < 1e-4
    assert_allclose(fitted.posterior(X)["f"].variance, variances, rtol=1e-5)
    fitted.save(tmp_path / "fit")
    again = sgp.load(tmp_path / "fit", model)
    assert again.guide.known().coupling.axes == ALIKE


@pytest.mark.slow
def test_a_loaded_fit_of_two_sites_is_gone_on_from(tmp_path):
    """It knew the few rows of the file alone, and crashed."""
    fitted = sgp.fit(model, sgp.SVGP(3), (X, COUNTS), steps=5, progress_bar=False)
    fitted.save(tmp_path / "fit")
    loaded = sgp.load(tmp_path / "fit", model)
    assert loaded.guide.known().coupling.axes == ((0, 0, 0), (1,))
    more = sgp.fit(model, loaded, (X, COUNTS), steps=5, progress_bar=False)
    assert more.bound >= fitted.bound - 1e-6


def test_dependent_functions_have_draws():
    guide = sgp.AutoSparseGP(three, sgp.SVGP(3, covariance="coupled"))
    guide.setup(X, COUNTS)
    assert guide.known().coupling.axes == ()


def test_nodes_are_shared():
    rule = SharedAxes(sgp.GaussHermite(3), (0, 0, 1))
    x, weights = rule.nodes(None, {"f": (2, 5), "g": (5,)}, jnp.float64)
    assert x["f"].shape == (9, 2, 1) and x["g"].shape == (9, 1) and weights.shape == (9,)
    assert_allclose(x["f"][:, 0], x["f"][:, 1])
    assert_allclose(jnp.sum(weights * x["f"][:, 0, 0] * x["g"][:, 0]), 0.0, atol=1e-12)

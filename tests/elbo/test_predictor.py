"""Likelihoods that take few linear combinations of several functions at each row."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.optim import Adam
from scipy.special import gammaln
from scipy.stats import norm

import numpyro_sgp as sgp
from numpyro_sgp.tracing.predictor import num_predictors
from tests.helpers import slow

N, RNG = 12, np.random.default_rng(0)
X = RNG.uniform(0.0, 5.0, (N, 1))
Z = RNG.normal(size=(N, 3))
COUNTS = RNG.poisson(2.0, N)
SINE = np.sin(X[:, 0])


def functions(X, number=3):
    """Sites of their own."""
    prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.5), X)
    return [numpyro.sample(f"f{k}", prior) for k in range(number)]


def counts(X, Z, y=None):
    """Counts whose log rate has coefficients that vary, one of them with a parameter."""
    f0, f1, f2 = functions(X)
    weight = numpyro.param("weight", 0.7)
    eta = 0.3 + f0 + Z[:, 1] * f1 - weight * Z[:, 2] * f2
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def laplace(X, Z, y=None):
    """The same combination, with kinks."""
    f0, f1, f2 = functions(X)
    eta = 0.3 + f0 + Z[:, 1] * f1 - 0.7 * Z[:, 2] * f2
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Laplace(eta, 0.4), obs=y)


def trained(model, y, approximation=None, **options):
    """A guide whose q(u) is not that of the start, and its parameters."""
    guide = sgp.AutoSparseGP(model, approximation or sgp.SVGP(4))
    loss = sgp.TraceGP_ELBO(**options)
    svi = SVI(model, guide, Adam(0.1), loss)
    state = svi.init(jax.random.key(0), X, Z, y)
    update = jax.jit(svi.update)
    for _ in range(4):
        state, _ = update(state, X, Z, y)
    return guide, svi.get_params(state)


def coefficients(weight=0.7):
    """Of the three functions at each row."""
    return np.stack([np.ones(N), Z[:, 1], -float(weight) * Z[:, 2]])


def moments(guide, params, a, constant=0.0):
    """Of a combination, by sites whose functions are independent under q."""
    q = guide.posterior(params, X, Z).values()
    m, v = np.array([p.mean for p in q], float), np.array([p.variance for p in q], float)
    return constant + np.sum(a * m, axis=0), np.sum(a**2 * v, axis=0)


def terms(model, guide, params, y, **options):
    """Of each site, as the loss has them."""
    loss = sgp.TraceGP_ELBO(sum_sites=False, **options)
    found = loss.loss_with_mutable_state(jax.random.key(1), params, model, guide, X, Z, y)
    return found["loss"]


@pytest.fixture(scope="module")
def of_counts():
    return trained(counts, COUNTS)


@pytest.mark.slow
def test_the_expectation_is_that_of_a_normal_combination(of_counts):
    guide, params = of_counts
    m, v = moments(guide, params, coefficients(params["weight"]), 0.3)
    # E[log Poisson] in closed form.
    right = np.sum(COUNTS * m - np.exp(m + v / 2) - gammaln(COUNTS + 1.0))
    assert_allclose(-terms(counts, guide, params, COUNTS)["y"], right, rtol=1e-9)


@pytest.mark.slow
def test_kinks_are_integrated_on_a_fine_grid():
    guide, params = trained(laplace, SINE)
    m, v = moments(guide, params, coefficients(), 0.3)
    s, d = np.sqrt(v), SINE - m
    # E|y - s| of a folded normal; a kink between nodes .04 sds apart.
    folded = 2 * s * norm.pdf(d / s) + d * (1.0 - 2.0 * norm.cdf(-d / s))
    right = np.sum(-folded / 0.4 - np.log(0.8))
    assert_allclose(-terms(laplace, guide, params, SINE)["y"], right, rtol=3e-4)


@pytest.mark.slow
def test_gradients_by_marginals_and_parameters_are_right(of_counts):
    guide, params = of_counts
    a = coefficients(params["weight"])
    m, v = moments(guide, params, a, 0.3)
    rate = np.exp(m + v / 2)
    loss = sgp.TraceGP_ELBO()
    given = jax.random.key(1), params, counts, guide, X, Z, COUNTS
    _, found = loss.marginal_gradients(*given)
    for k in range(3):
        _, by_mean, by_variance, _ = found[f"f{k}"]
        assert_allclose(by_mean, a[k] * (COUNTS - rate), rtol=1e-8)
        assert_allclose(by_variance, -0.5 * a[k] ** 2 * rate, rtol=1e-8)

    def total(weight):
        return terms(counts, guide, {**params, "weight": weight}, COUNTS)["y"]

    slope = jax.grad(total)(params["weight"])
    step = 1e-5
    above, below = (total(params["weight"] + sign * step) for sign in (1.0, -1.0))
    # Rounding of a central difference.
    assert_allclose(slope, (above - below) / (2 * step), rtol=1e-6)

    # What a rule has that is for more combinations than there are has no part.
    rule = sgp.AlongPredictors(sgp.GaussHermite(20), 2)
    more = terms(counts, guide, params, COUNTS, expectation=rule)["y"]
    assert_allclose(more, total(params["weight"]), rtol=1e-9)


@pytest.mark.slow
def test_second_derivatives_are_right_where_they_are_needed(of_counts):
    guide, params = of_counts
    a = coefficients(params["weight"])
    m, v = moments(guide, params, a, 0.3)
    rate = np.exp(m + v / 2)
    loss = sgp.TraceGP_ELBO()
    zeros = {(kind, f"f{k}"): jnp.zeros(N) for k in range(3) for kind in ("mean", "var")}

    def expected(shift):
        given = jax.random.key(1), shift, params, counts, guide, (X, Z, COUNTS), {}
        return loss.moved(*given)[0]["y"]

    along = {key: jnp.zeros(N) for key in zeros} | {("mean", "f1"): jnp.ones(N)}
    _, bent = jax.jvp(jax.grad(expected), (zeros,), (along,))
    for k in range(3):
        assert_allclose(bent["mean", f"f{k}"], -a[k] * a[1] * rate, rtol=1e-7, atol=1e-10)
        right = -0.5 * a[k] ** 2 * a[1] * rate
        assert_allclose(bent["var", f"f{k}"], right, rtol=1e-7, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "approximation",
    [
        slow(sgp.SOLVEGP(3, 2)),
        sgp.SVGP(4, tight="scalar"),
        slow(sgp.MixtureSVGP(3, num_components=2)),
        *map(slow, (sgp.VGP(), sgp.SVGP(4, covariance="diagonal"), sgp.ODVGP(2, 3))),
    ],
    ids=repr,
)
def test_other_posteriors_agree_with_many_draws(approximation):
    guide, params = trained(counts, COUNTS, approximation)
    found = float(terms(counts, guide, params, COUNTS)["y"])
    many = sgp.MonteCarlo(2**15, sequence="sobol")
    drawn = float(terms(counts, guide, params, COUNTS, expectation=many)["y"])
    # Quasi-Monte Carlo of 2^15 points: errors are below 1e-3.
    assert_allclose(found, drawn, rtol=2e-3)


@pytest.mark.slow
def test_rows_where_a_density_is_flat_or_masked_have_their_part():
    seen = np.arange(N) % 3 > 0

    def model(X, Z, y=None):
        f0, f1, f2 = functions(X)
        eta = -2.0 + f0 + Z[:, 1] * f1 - 0.7 * Z[:, 2] * f2
        with numpyro.plate("rows", len(X)), handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(jax.nn.relu(eta), 0.3), obs=y)

    guide, params = trained(model, SINE)
    assert guide.known().coupling.kinked
    m, v = moments(guide, params, coefficients(), -2.0)
    x = np.linspace(-9.0, 9.0, 20_001)
    eta = np.maximum(m[:, None] + np.sqrt(v)[:, None] * x, 0.0)
    each = norm.logpdf(SINE[:, None], eta, 0.3) @ norm.pdf(x) * (x[1] - x[0])
    # A kink between nodes .04 sds apart.
    found = -terms(model, guide, params, SINE)["y"]
    assert_allclose(found, np.sum(each[seen]), rtol=1e-4)
    zeros = {("mean", f"f{k}"): jnp.zeros(N) for k in range(3)}

    def expected(shift):
        given = jax.random.key(1), shift, params, model, guide, (X, Z, SINE), {}
        return sgp.TraceGP_ELBO().moved(*given)[0]["y"]

    first, second = jax.jvp(jax.grad(expected), (zeros,), (zeros,))
    assert all(np.isfinite(v).all() for v in jax.tree.leaves((first, second)))
    assert np.all(np.asarray(first["mean", "f0"])[~seen] == 0.0)


@pytest.mark.slow
def test_likelihoods_that_have_first_derivatives_only():
    def model(X, Z, y=None):
        chance = jax.scipy.special.gammainc(jnp.exp(sum(functions(X))), 2.0)
        numpyro.factor("y", jnp.sum(jnp.log(chance)))

    guide, params = trained(model, None)
    assert guide.known().coupling.predictors == 1
    many = sgp.MonteCarlo(2**13, sequence="sobol")
    drawn = float(terms(model, guide, params, None, expectation=many)["y"])
    assert_allclose(terms(model, guide, params, None)["y"], drawn, rtol=2e-3)


def test_kinks_of_a_site_of_three_functions():
    def model(X, Z, y=None):
        kernel = sgp.kernels.RBF(jnp.ones(3), 1.5)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Laplace(jnp.sum(f, axis=0), 0.05), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    guide.setup(X, Z, SINE)
    assert guide.known().coupling.kinked


@pytest.mark.slow
def test_weights_that_are_zero_at_first_are_none_later():
    def model(X, Z, y=None):
        f0, f1, f2 = functions(X)
        weights = numpyro.param("weights", jnp.zeros(2))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f0 + weights[0] * f1, 0.3), obs=y)
            numpyro.sample("c", dist.Poisson(jnp.exp(f0 + weights[1] * f2)), obs=COUNTS)

    guide, params = trained(model, SINE)
    assert guide.known().coupling.predictors == 2
    params = {**params, "weights": jnp.array([0.8, -0.8])}
    found = terms(model, guide, params, SINE)
    q = guide.posterior(params, X, Z)
    (m0, v0), (m1, v1), (m2, v2) = ((q[k].mean, q[k].variance) for k in q)
    square = (SINE - m0 - 0.8 * m1) ** 2 + v0 + 0.64 * v1
    normal = np.sum(norm.logpdf(0.0, 0.0, 0.3) - 0.5 * square / 0.09)
    m, v = m0 - 0.8 * m2, v0 + 0.64 * v2
    poisson = np.sum(COUNTS * m - np.exp(m + v / 2) - gammaln(COUNTS + 1.0))
    # Ten nodes each way.
    assert_allclose([-found["y"], -found["c"]], [normal, poisson], rtol=1e-6)


@pytest.mark.slow
def test_functions_of_one_site_that_depend_on_each_other():
    def model(X, Z, y=None):
        kernel = sgp.kernels.RBF(jnp.ones(3), 1.5)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(jnp.sum(Z.T * f, axis=0))), obs=y)

    guide, params = trained(model, COUNTS, sgp.SVGP(4, covariance="coupled"))
    assert guide.known().coupling.predictors == 1
    found = float(terms(model, guide, params, COUNTS)["y"])
    many = sgp.MonteCarlo(2**15, sequence="sobol")
    drawn = float(terms(model, guide, params, COUNTS, expectation=many)["y"])
    assert_allclose(found, drawn, rtol=2e-3)


@pytest.mark.slow
def test_rows_that_are_masked_leave_the_others_right():
    observed = np.arange(N) % 3 > 0

    def model(X, Z, y=None):
        f0, f1, f2 = functions(X)
        eta = f0 + Z[:, 1] * f1 + jnp.where(observed, 1.0, 0.0) * f2
        with numpyro.plate("rows", len(X)), handlers.mask(mask=observed):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    y = (COUNTS > 1) * 1
    guide, params = trained(model, y)
    assert guide.known().coupling.predictors == 1
    m, v = moments(guide, params, np.stack([np.ones(N), Z[:, 1], observed]))
    x, w = np.polynomial.hermite_e.hermegauss(60)
    s = m[:, None] + np.sqrt(v)[:, None] * x
    each = (y[:, None] * s - np.logaddexp(0.0, s)) @ w / w.sum()
    # 20 nodes of a logistic likelihood.
    assert_allclose(-terms(model, guide, params, y)["y"], each[observed].sum(), rtol=1e-5)


@pytest.mark.slow
def test_float32():
    with jax.enable_x64(False):
        guide, params = trained(counts, COUNTS)
        found = terms(counts, guide, params, COUNTS)["y"]
        assert found.dtype == jnp.float32 and guide.known().coupling.predictors == 1
        m, v = moments(guide, params, coefficients(params["weight"]), 0.3)
    right = np.sum(COUNTS * m - np.exp(m + v / 2) - gammaln(COUNTS + 1.0))
    assert_allclose(-found, right, rtol=1e-4)


@pytest.mark.slow
def test_nuts_on_the_sparsified_model_takes_the_same_expectation():
    sparse = sgp.sparsify(laplace, sgp.SVGP(3))
    mcmc = MCMC(NUTS(sparse), num_warmup=3, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Z, SINE)
    draws = {k: v[-1] for k, v in mcmc.get_samples().items()}
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        with handlers.substitute(data=draws):
            sparse(X, Z, SINE)
    total = sum(
        float(site["fn"].log_prob(site["value"]).sum())
        for name, site in trace.items()
        if name == "expected_log_likelihood"
    )
    q = {}
    for k in range(3):
        points = np.asarray(sparse.inducing[f"f{k}"])
        K = np.exp(-0.5 * (points - points.T) ** 2 / 1.5**2) + 1e-8 * np.eye(3)
        cross = np.exp(-0.5 * (X - points.T) ** 2 / 1.5**2)
        A = np.linalg.solve(np.linalg.cholesky(K), cross.T)
        q[k] = draws[f"f{k}_u_white"] @ A, 1.0 - np.sum(A**2, axis=0)
    a = coefficients()
    m = 0.3 + sum(a[k] * q[k][0] for k in range(3))
    s = np.sqrt(sum(a[k] ** 2 * q[k][1] for k in range(3)))
    d = SINE - m
    folded = 2 * s * norm.pdf(d / s) + d * (1.0 - 2.0 * norm.cdf(-d / s))
    assert_allclose(total, np.sum(-folded / 0.4 - np.log(0.8)), rtol=1e-3)


SHAPES = {"f": (N,), "g": (2, N)}
A = RNG.normal(size=(3, N)).astype(np.float32)
GROUPS = (np.arange(N) // 2).astype(np.int32)


def _poisson(eta):
    return jnp.sum(dist.Poisson(jnp.exp(eta)).log_prob(jnp.asarray(COUNTS)))


NUMBERS = {
    "sum": (1, lambda f, g: _poisson(f + g[0] + g[1])),
    "sum over an axis": (1, lambda f, g: _poisson(f + jnp.sum(g, axis=0))),
    "coefficients": (1, lambda f, g: _poisson(A[0] * f + jnp.einsum("kn,kn->n", A[1:], g))),
    "weights": (1, lambda f, g: _poisson(f + jnp.array([0.3, -1.0]) @ g)),
    "one of them": (1, lambda f, g: _poisson(2.0 * g[1])),
    "in a column": (1, lambda f, g: _poisson((f[:, None] + g[0][:, None])[:, 0] - 1.0)),
    "stacked": (1, lambda f, g: _poisson(jnp.sum(jnp.stack([f, *g]), axis=0))),
    "kinked": (1, lambda f, g: -jnp.sum(jnp.abs(f + g[0] - A[0]))),
    "zeros": (1, lambda f, g: _poisson(f + jnp.where(GROUPS > 2, 0.0, 1.0) * g[0])),
    "vmapped": (1, lambda f, g: _poisson(jax.vmap(lambda a, b: a + b.sum())(f, g.T))),
    "twice": (
        2,
        lambda f, g: _poisson(f + g[0]) - jnp.sum((3.0 * f + 3.0 * g[0] + 1.0) ** 2),
    ),
    "no weight yet": (0, lambda f, g: _poisson(f + jnp.zeros(N) * g[0][::-1])),
    "two numbers a row": (2, lambda f, g: _poisson(f) + _poisson(g[0])),
    "scale": (2, lambda f, g: -jnp.sum(((f + g[0] - 1.0) / jnp.exp(g[1])) ** 2)),
    "not linear": (2, lambda f, g: _poisson(f + jnp.sin(g[0]))),
    "two sums": (2, lambda f, g: _poisson(f + g[0]) + _poisson(f - g[0])),
    "two columns": (2, lambda f, g: jnp.sum((jnp.stack([f, *g], -1) @ A[:, :2]) ** 2)),
    "two rows": (2, lambda f, g: jnp.sum((A[:, :2].T @ jnp.stack([f, *g])) ** 2)),
    "one or two": (2, lambda f, g: _poisson(f) + _poisson(f + (GROUPS > 2) * g[0])),
    "product": (3, lambda f, g: _poisson(f * g[0] + g[1])),
    "softmax": (3, lambda f, g: jnp.sum(f - jax.nn.logsumexp(jnp.stack([f, *g]), axis=0))),
    "other rows": (0, lambda f, g: _poisson(f + g[0][::-1])),
    "groups": (0, lambda f, g: _poisson(f + g[0][GROUPS])),
    "nothing": (0, lambda f, g: jnp.zeros(())),
    "some rows": (0, lambda f, g: jnp.sum((f + g[0])[::2] ** 2)),
}


@pytest.mark.quick(16)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NUMBERS)
def test_combinations_are_counted(name, dtype):
    number, density = NUMBERS[name]

    def log_density(f):
        return density(f["f"], f["g"])

    with jax.enable_x64(dtype == np.float64):
        assert num_predictors(log_density, SHAPES, np.dtype(dtype)) == number


def scaled(X, Z, y=None):
    """Mean and log scale are two sums, with a function in both."""
    f0, f1, f2 = functions(X)
    with numpyro.plate("rows", len(X)):
        scale = jnp.exp(0.3 * f1 + Z[:, 2] * f2)
        numpyro.sample("y", dist.Normal(f0 + Z[:, 1] * f1, scale), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [slow(np.float32), np.float64])
def test_two_sums_are_integrated_together(dtype):
    with jax.enable_x64(dtype == np.float64):
        guide, params = trained(scaled, SINE)
        assert guide.known().coupling.predictors == 2
        rule = sgp.AlongPredictors(sgp.GaussHermite(60), 2)
        found = terms(scaled, guide, params, SINE, expectation=rule)["y"]
        q = guide.posterior(params, X, Z).values()
        m = np.array([p.mean for p in q], float)
        v = np.array([p.variance for p in q], float)
    a = np.stack([np.ones(N), Z[:, 1], 0.0 * Z[:, 2]])
    b = np.stack([np.zeros(N), np.full(N, 0.3), Z[:, 2]])
    mean, scale = np.sum(a * m, axis=0), np.sum(b * m, axis=0)
    var, cov, of_scale = (np.sum(w * v, axis=0) for w in (a * a, a * b, b * b))
    # E[(y - s)^2 exp(-2 t)] of normal s and t: exp(-2 t) tilts s by twice the covariance.
    square = np.exp(2 * of_scale - 2 * scale) * ((SINE - mean + 2 * cov) ** 2 + var)
    right = np.sum(-0.5 * np.log(2 * np.pi) - scale - 0.5 * square)
    # 60 nodes of exp(-2 t), and rounding.
    assert_allclose(-found, right, rtol=1e-6 if dtype == np.float64 else 1e-3)


def test_a_layer_that_feeds_another_is_no_summand():
    def model(X, Z, y=None):
        prior = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.5), X)
        h = numpyro.sample("h", prior)
        top = sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.5), h[:, None])
        f = numpyro.sample("f", top)
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    guide.setup(X, Z, SINE)
    assert guide.known().coupling.predictors == 0


@pytest.mark.slow
def test_rules_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="so few linear combinations of several latent"):
        trained(scaled, SINE, expectation=sgp.AlongPredictors())
    with pytest.raises(TypeError, match=r"takes GaussHermite\(20\) or Trapezoid"):
        sgp.AlongPredictors(sgp.MonteCarlo(3))
    with pytest.raises(ValueError, match="number must be three or less, got 4"):
        sgp.AlongPredictors(number=4)
    with pytest.raises(ValueError, match="is for TraceGP_ELBO alone"):
        sgp.AlongPredictors().nodes(jax.random.key(0), {"f": (3,)}, jnp.float32)


@pytest.mark.slow
def test_the_fit_is_without_noise_and_converges():
    fitted = sgp.fit(counts, sgp.SVGP(4), (X, Z, COUNTS), progress_bar=False)
    assert "converged" in fitted.stopped
    again = sgp.fit(
        counts, sgp.SVGP(4), (X, Z, COUNTS), jax.random.key(5), progress_bar=False
    )
    # Two starts end at one optimum, of which neither has any noise.
    assert_allclose(fitted.bound, again.bound, atol=0.1)

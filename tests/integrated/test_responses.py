"""Log scores of nested results, beside closed forms and draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import gammaln, logsumexp
from scipy.stats import multivariate_normal, norm

import numpyro_sgp as sgp
from tests.helpers import slow
from tests.integrated.dense import options, rbf, rows

RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0.0, 4.0, (25, 1)), axis=0)
F = np.sin(2.0 * X[:, 0])
X_NEW = np.array([[0.5], [2.2], [4.5], [7.0]])
Y_NEW = np.array([0.8, -0.9, 0.4, 1.3])
NOISE = 0.01


def site(X, name="f"):
    lengthscale = numpyro.sample(f"{name}_scale", dist.LogNormal(0.0, 0.5))
    return numpyro.sample(name, sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))


def normal(X, y=None, mask=None):
    """Beside an effect, scaled, and masked."""
    mu = site(X) + numpyro.sample("level", dist.Normal(0.0, 1.0))
    mu = numpyro.deterministic("mu", mu)
    mask = jnp.ones(len(mu), bool) if mask is None else mask
    with numpyro.plate("data", len(mu)), numpyro.handlers.scale(scale=3.0):
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(mu, NOISE), obs=y)


def run(model, data):
    return sgp.nested(model, sgp.SVGP(8), data, progress_bar=False)


@pytest.fixture(scope="module")
def posterior():
    return run(normal, (X, F + NOISE * RNG.normal(size=25)))


@pytest.mark.slow
def test_log_scores_of_little_noise_are_those_of_the_marginals(posterior):
    """Noise of a hundredth of sds: draws would be off by nats."""
    q = posterior.posterior(X_NEW)["mu"]
    each = norm.logpdf(Y_NEW, q.means, np.sqrt(q.variances + NOISE**2))
    found = posterior.log_score(X_NEW, Y_NEW)["y"]
    expected = logsumexp(each, axis=0, b=q.weights[:, None])
    np.testing.assert_allclose(found.rows, expected, atol=1e-5)  # its rule's, of Gaussians
    some = posterior.log_score(X_NEW, Y_NEW, mask=jnp.array([True, False, True, True]))["y"]
    assert np.isnan(some.rows[1])
    np.testing.assert_allclose(some.mean, expected[[0, 2, 3]].mean(), atol=1e-5)


@pytest.mark.slow
def test_of_several_outputs_they_know_that_these_go_together():
    def model(X, Y=None):
        f = site(X)
        with numpyro.plate("outputs", 2):
            g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.3, 1.0), X))
        fn = dist.Normal((f + 0.1 * g).T, 0.1).to_event(1)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("Y", fn, obs=Y)

    noise = 0.1 * RNG.normal(size=(2, 25))
    found = run(model, (X, (F + noise).T))
    Y_new = np.stack([Y_NEW, Y_NEW + 0.1])
    rows = found.log_score(X_NEW, Y_new.T)["Y"].rows
    draws = found.sample(jax.random.key(0), X_NEW, sample_shape=(20_000,))
    mu = np.asarray(draws["f"][:, None] + 0.1 * draws["g"])
    # At the two far rows, where f and g are nearly as before the data, exactly so but for
    # the lengthscale of f: of these draws by a Gaussian of both outputs.
    for n in (2, 3):
        covariance = np.cov(mu[:, :, n].T) + 0.01 * np.eye(2)
        gaussian = multivariate_normal(mu[:, :, n].mean(0), covariance)
        assert abs(rows[n] - gaussian.logpdf(Y_new[:, n])) < 0.1
    density = norm.logpdf(Y_new, mu, 0.1).sum(1)
    # Of 20,000 draws: within five standard errors.
    weights = np.exp(density - density.max(0))
    error = weights.std(0) / weights.mean(0) / np.sqrt(len(weights))
    expected = logsumexp(density, axis=0) - np.log(len(density))
    assert np.all(np.abs(rows - expected) < 5.0 * error + 0.01)


@pytest.mark.slow
def test_of_counts_they_are_integrals_over_what_q_says():
    def model(X, y=None):
        f = numpyro.deterministic("eta", 5.0 + site(X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    found = run(model, (X, RNG.poisson(np.exp(5.0 + F))))
    y_new = np.array([300, 60, 200, 400])
    rows = found.log_score(X_NEW, y_new)["y"].rows
    q = found.posterior(X_NEW)["eta"]
    grid = np.linspace(-9.0, 9.0, 4001)[:, None, None]
    eta = q.means + np.sqrt(q.variances) * grid
    each = y_new * eta - np.exp(eta) - gammaln(y_new + 1.0) + norm.logpdf(grid)
    each = logsumexp(each + np.log(grid[1] - grid[0]), axis=0)
    expected = logsumexp(each, axis=0, b=q.weights[:, None])
    np.testing.assert_allclose(rows, expected, atol=2e-3)  # by some nodes about the mode


@pytest.mark.slow
def test_of_rows_with_observations_of_their_own_they_are_of_draws():
    """Five observations of four rows."""
    row = np.array([0, 0, 2, 3, 1])

    def model(X, y=None):
        f = site(X)
        with numpyro.plate("data", 5):
            numpyro.sample("y", dist.Normal(f[row], 0.5), obs=y)

    found = run(model, (X, F[row]))
    assert np.isfinite(found.log_score(X_NEW, np.zeros(5))["y"].rows).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["amplitude", slow("level")])
def test_draws_of_a_field_are_beside_the_hyperparameters_of_its_node(kind):
    """
    Of others, of the same posterior, products with an amplitude and sums with a level were
    four times as wide as they are.
    """
    rng, X = rows(30, 5)
    y = 3.0 * np.sin(X[:, 0]) + 0.1 * rng.normal(size=30)
    prior = dist.HalfNormal(3.0) if kind == "amplitude" else dist.StudentT(3.0, 0.0, 2.5)

    def model(X, y=None):
        theta = numpyro.sample("theta", prior)
        of_f = 1.0 if kind == "amplitude" else 4.0
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(of_f, 1.0), X))
        mean = theta * f if kind == "amplitude" else theta + f
        numpyro.deterministic("mean", mean)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    posterior = sgp.nested(model, options(X), (X, y), progress_bar=False)
    by_log = kind == "amplitude"
    log_weights, means, variances = [], [], []
    for free in np.linspace(-1.5, 3.5, 201) if by_log else np.linspace(-9.0, 9.0, 181):
        theta, level = (np.exp(free), 0.0) if by_log else (free, free)
        K = rbf(X, theta**2 if by_log else 4.0, 1.0)
        C = K + 0.01 * np.eye(30)
        solved = np.linalg.solve(C, K)
        density = multivariate_normal(np.full(30, level), C).logpdf(y)
        log_weights.append(density + float(prior.log_prob(theta)) + by_log * free)
        means.append(level + solved.T @ (y - level))
        variances.append(np.diag(K - K @ solved))
    weights = np.exp(log_weights - logsumexp(log_weights))
    mean = weights @ means
    sd = np.sqrt(weights @ (np.array(variances) + (means - mean) ** 2))
    drawn = posterior.sample(jax.random.key(0), X, sample_shape=(4000,))
    # 4,000 draws have sds to a hundredth; f at Z = X but for the jitter.
    np.testing.assert_allclose(np.std(drawn["mean"], 0), sd, rtol=0.06)
    found = posterior.predict(X)["y"]
    np.testing.assert_allclose(found.sd, np.sqrt(sd**2 + 0.01), rtol=0.02)
    np.testing.assert_allclose(found.mean, mean, atol=0.01)


@pytest.mark.slow
def test_hyperparameters_of_draws_have_the_quantiles_of_all():
    """Those of nodes alone are few numbers, of which intervals were too short."""
    rng, X = rows(40, 6)
    y = 2.0 + np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=40)

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        level = numpyro.sample("level", dist.StudentT(3.0, 0.0, 5.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(variance, 0.7), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + f, noise), obs=y)

    posterior = run(model, (X, y))
    drawn = posterior.sample(jax.random.key(0), X[:3], sample_shape=(4000,))
    assert sorted(posterior.field.thetas) == ["level", "noise", "variance"]
    assert {*zip(posterior.field.thetas, posterior._loose, strict=True)} == {
        ("level", False),
        ("noise", True),
        ("variance", True),
    }
    for name in ("variance", "noise"):
        expected = np.quantile(posterior.hyperparameters[name], [0.05, 0.5, 0.95])
        # 4,000 and 8,192 draws: these quantiles have errors of some hundredths.
        np.testing.assert_allclose(
            np.quantile(drawn[name], [0.05, 0.5, 0.95]), expected, rtol=0.1
        )


@pytest.mark.slow
@pytest.mark.parametrize("first", ["alike", slow("others")])
def test_rows_are_looked_at_anew_where_whole_numbers_are_no_longer_alike(first):
    """Of numbers that are all one the mean is that of any rows, of others it is not."""

    def model(X, number, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(0.3, 0.7), X))
        with numpyro.plate("data", X.shape[0]):
            rate = jnp.exp(f) * number / number.mean()
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    X, number = np.linspace(0.0, 3.0, 20)[:, None], RNG.integers(1, 9, 20)
    new, several = np.linspace(0.0, 3.0, 300)[:, None], np.arange(1, 301)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(6))
    guide.setup(X, number, np.ones(20))
    fitted = sgp.Fitted(guide, guide.known().starts)
    if first == "alike":
        fitted.predict(new, np.ones(300, int))
    found = fitted.predict(new, several)["y"].mean
    f = fitted.posterior(new, several)["f"]
    expected = np.exp(f.mean + 0.5 * f.variance) * several / several.mean()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class _Undrawn(dist.Distribution):
    """With no sample, as the tutorial has it."""

    arg_constraints = {"loc": dist.constraints.real}
    support = dist.constraints.real

    def __init__(self, loc, *, validate_args=None):
        self.loc = loc
        super().__init__(jnp.shape(loc), (), validate_args=validate_args)

    def log_prob(self, value):
        return dist.Normal(self.loc, 0.3).log_prob(value)


@pytest.mark.slow
def test_likelihoods_that_cannot_be_drawn_need_not_be():
    """An empty NotImplementedError, for posteriors of f at new inputs."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", _Undrawn(f), obs=y)

    X = np.linspace(0.0, 3.0, 8)[:, None]
    found = sgp.nested(model, sgp.SVGP(4), (X, np.sin(X[:, 0])), progress_bar=False)
    assert found.posterior(X[:3])["f"].mean.shape == (3,)
    assert found.sample(jax.random.key(0), X[:3])["f"].shape == (3,)
    with pytest.warns(UserWarning, match="Response 'y' is not predicted"):
        assert set(found.predict(X[:3])) == {"f"}


@pytest.mark.slow
def test_sums_of_rows_have_rows_apart_where_points_leave_them_open():
    """Between the points of a rough f: sds to 5 % of those of rows drawn together."""

    def areas(X, y=None):
        kernel = sgp.kernels.Matern12(1.0, 1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        total = f.reshape(4, -1).sum(axis=-1)
        with numpyro.plate("areas", 4):
            numpyro.sample("y", dist.Normal(total, 0.2), obs=y)

    X = np.linspace(0.0, 8.0, 40)[:, None]
    y = np.sin(X[:, 0]).reshape(4, -1).sum(axis=-1)
    found = sgp.nested(areas, sgp.VGP(), (X, y), progress_bar=False)
    new = X + 0.12
    f = np.asarray(found.sample(jax.random.key(0), new, sample_shape=(4000,))["f"])
    sd = np.sqrt(f.reshape(4000, 4, -1).sum(axis=-1).var(axis=0) + 0.04)
    np.testing.assert_allclose(found.predict(new)["y"].sd, sd, rtol=0.05)

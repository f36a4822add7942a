"""Deterministic sites in predictions, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer.autoguide import AutoNormal
from scipy.stats import norm

import numpyro_sgp as sgp
from numpyro_sgp._programs import split_static
from numpyro_sgp.predictive import deterministic
from numpyro_sgp.predictive.row_batches import rows_of
from tests.helpers import slow

LEVELS = (0.05, 0.3, 0.95)
X = jnp.array([-1.5, -0.4, 0.7, 1.6])[:, None]
X_NEW = jnp.array([-2.1, -0.9, 0.0, 0.3, 2.0])[:, None]
Z = jnp.array([-1.0, 1.1])[:, None]
PARAMS = {
    "f_auto_Z": Z,
    "f_auto_qu_mu": jnp.array([0.4, -1.0]),
    "f_auto_qu_sqrt": jnp.array([[0.5, 0.0], [0.2, 0.6]]),
}


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    rate = numpyro.deterministic("rate", jnp.exp(0.4 * f))
    numpyro.deterministic("line", 2.0 + X[:, 0] * f)
    numpyro.deterministic("square", f**2)
    numpyro.deterministic("above", f > 0.1)
    numpyro.deterministic("table", jnp.stack([f, jnp.sin(f)], axis=-1))
    numpyro.deterministic("centred", f - f.mean())
    numpyro.deterministic("total", f.sum())
    numpyro.deterministic("turned", f[::-1])
    numpyro.deterministic("largest", jax.lax.cummax(f))
    numpyro.deterministic("name", "not a number")
    numpyro.deterministic("twice", 2.0 * X[:, 0])
    with numpyro.plate("rows", X.shape[0]):
        y = numpyro.sample("y", dist.Poisson(rate), obs=y)
    numpyro.deterministic("residual", y - f)


LEFT_OUT = "centred", "total", "turned", "largest", "name", "twice", "residual"


@pytest.fixture(scope="module")
def guide():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4))
    return guide


@pytest.fixture(scope="module")
def found(guide):
    return sgp.predict(guide, PARAMS, X_NEW, quantiles=LEVELS)


@pytest.mark.slow
def test_values_made_of_a_row_of_f_have_its_moments_and_quantiles(guide, found):
    q = guide.posterior(PARAMS, X_NEW)["f"]
    mean, variance = np.asarray(q.mean), np.asarray(q.variance)
    sd = np.sqrt(variance)
    z = norm.ppf(LEVELS)[:, None]
    rate = found["rate"]
    of_log = 0.4 * mean + 0.5 * 0.16 * variance
    assert_allclose(rate.mean, np.exp(of_log), rtol=1e-10)
    assert_allclose(rate.sd, np.exp(of_log) * np.sqrt(np.expm1(0.16 * variance)), rtol=1e-8)
    # Between 512 points, whose levels are apart by 0.002: second order in the distance.
    assert_allclose(rate.quantiles, np.exp(0.4 * (mean + sd * z)), rtol=1e-4)
    x = np.asarray(X_NEW[:, 0])
    assert_allclose(found["line"].mean, 2.0 + x * mean, rtol=1e-12)
    assert_allclose(found["line"].sd, np.abs(x) * sd, rtol=1e-12, atol=1e-150)
    assert_allclose(
        found["line"].quantiles, 2.0 + x * mean + np.abs(x) * sd * z, rtol=1e-12
    )
    assert_allclose(found["square"].mean, mean**2 + variance, rtol=1e-10)
    spread = np.sqrt(2.0 * variance**2 + 4.0 * mean**2 * variance)
    assert_allclose(found["square"].sd, spread, rtol=1e-8)
    for level, quantile in zip(LEVELS, found["square"].quantiles, strict=True):
        root = np.sqrt(quantile)
        reached = norm.cdf((root - mean) / sd) - norm.cdf((-root - mean) / sd)
        assert_allclose(reached, level, atol=1e-3)
    probability = norm.sf((0.1 - mean) / sd)
    assert_allclose(found["above"].mean, probability, atol=1.0 / 512)
    assert_allclose(found["above"].sd, np.sqrt(probability * (1 - probability)), atol=4e-3)
    assert {*np.unique(found["above"].quantiles)} <= {0.0, 1.0}
    assert found["table"].mean.shape == (5, 2)
    assert_allclose(found["table"].mean[:, 0], mean, rtol=1e-12, atol=1e-14)
    assert_allclose(found["table"].mean[:, 1], np.sin(mean) * np.exp(-variance / 2))


@pytest.mark.slow
def test_values_made_of_other_rows_are_left_out_and_told(found):
    for name in LEFT_OUT:
        assert name not in found
        with pytest.raises(KeyError, match=f"'{name}' is not predicted: a row of it"):
            found[name]
    assert list(found) == ["f", "rate", "line", "square", "above", "table", "y"]
    assert found["f"].to_dataframe().shape == (5, 5)


def guide_of(sites, Z=Z, **known):
    def model(X, y=None, offset=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        sites(f, X, offset)
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4), **known)
    return guide


@pytest.mark.slow
def test_of_batches_they_are_those_of_all_rows():
    def sites(f, X, offset):
        numpyro.deterministic("rate", jnp.exp(f) * X[:, 0] + offset)
        numpyro.deterministic("wide", f[:, None] * jnp.linspace(0.0, 1.0, 130))
        numpyro.deterministic("shares", jax.nn.softmax(jnp.stack([f, -f, 0 * f]), axis=0))
        numpyro.deterministic("scaled", f * X.mean())
        numpyro.deterministic("numbered", f * jnp.arange(len(f)))
        numpyro.deterministic("of_number", f / len(f))
        numpyro.deterministic("of_ones", f * jnp.ones(len(f)).sum())
        numpyro.deterministic("first", f[:130])

    guide = guide_of(sites, offset=X[:, 0])
    few = np.linspace(-2.0, 2.0, 300)[:, None]
    more = {"offset": few[:, 0] ** 2}
    arrays, static = split_static(((few,), more))
    assert rows_of(guide, arrays, static, 130) is not None
    parts = sgp.predict(guide, PARAMS, few, batch_size=130, **more)
    filled = sgp.predict(guide, PARAMS, few, **more)
    assert list(parts) == list(filled) == ["f", "rate", "wide", "shares", "y"]
    assert [parts[k].row_axis for k in ("rate", "wide", "shares")] == [0, 0, 1]
    small = {"offset": more["offset"][:100]}
    small = sgp.predict(guide, PARAMS, few[:100], batch_size=40, quantiles=(), **small)
    # As these are batches too; of a hundred rows the first 130 are all.
    assert list(small) == ["f", "rate", "wide", "shares", "first", "y"]
    at = [7, 150, 299]
    whole = sgp.predict(guide, PARAMS, few[at], offset=more["offset"][at])
    assert {"scaled", "numbered"} < {*whole}  # of few rows, which are all
    for name in ("rate", "wide", "shares"):
        rows = parts[name].row_axis
        known = np.take(np.asarray(parts[name].mean), at, rows)
        assert_allclose(known, whole[name].mean, rtol=1e-10, atol=1e-12)
        assert_allclose(parts[name].mean, filled[name].mean, rtol=1e-10, atol=1e-12)
        # Sorted, and looked for: to a thousandth of a level.
        apart = np.abs(parts[name].quantiles - filled[name].quantiles)
        assert np.all(apart <= 0.03 * filled[name].sd + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.4, 0.7, 1.0, 20.0])
def test_values_of_several_rows_are_left_out_wherever_rows_are(gap):
    """The best of some, say, where one is far ahead of all others."""

    def sites(f, X, offset):
        numpyro.deterministic("is_best", f == f.max())
        numpyro.deterministic("rank", jnp.argsort(jnp.argsort(f)))
        numpyro.deterministic("running", jax.lax.cummax(f))
        numpyro.deterministic("chosen", f[jnp.array([0, 1, 2, 3])])
        numpyro.deterministic("drawn", f + jax.random.normal(numpyro.prng_key(), f.shape))
        numpyro.deterministic("kernel", jnp.exp(-jnp.abs(f[:, None] - f)))
        numpyro.deterministic("empty", f[:0])
        numpyro.deterministic("table", jnp.exp(f)[:, None] + jnp.zeros((4, 4)))

    places = 10.0 * jnp.arange(4.0)[:, None]
    params = {
        "f_auto_Z": places,
        "f_auto_qu_mu": gap * jnp.arange(4.0),
        "f_auto_qu_sqrt": 0.5 * jnp.eye(4),
    }
    found = sgp.predict(guide_of(sites, places), params, places)
    assert list(found) == ["f", "table", "y"] and found["table"].row_axis == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, slow(3), slow(4)])
def test_weights_of_as_many_rows_are_none(number):
    def sites(f, X, W):
        numpyro.deterministic("F", W @ jnp.stack([f, jnp.sin(f)]))

    guide = guide_of(sites, offset=jnp.ones((3, 2)))
    found = sgp.predict(guide, PARAMS, X_NEW[:number], offset=jnp.ones((3, 2)))
    assert found["F"].mean.shape == (3, number) and found["F"].row_axis == 1


@pytest.mark.slow
def test_jumps_and_kinks_have_the_digits_of_many_nodes():
    def sites(f, X, offset):
        numpyro.deterministic("jump", jnp.where(f > 0.1, 10.0 + f, f))
        numpyro.deterministic("kink", jnp.abs(f))
        numpyro.deterministic("over", jnp.maximum(f - 0.3, 0.0))
        numpyro.deterministic("infinite", jnp.where(f > 0.0, jnp.inf, f))

    guide = guide_of(sites)
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=(0.05, 0.95))
    mean, sd = np.asarray(found["f"].mean), np.asarray(found["f"].sd)
    above = norm.sf((0.1 - mean) / sd)
    # Nodes of a level each: a jump is off by its size times half of 1/512.
    assert_allclose(found["jump"].mean, mean + 10 * above, atol=0.011)
    x = np.linspace(-8.0, 8.0, 20_001)
    w = norm.pdf(x) * (x[1] - x[0])
    f = mean[:, None] + sd[:, None] * x
    for name, value in (("kink", np.abs(f)), ("over", np.maximum(f - 0.3, 0.0))):
        exact = value @ w
        assert_allclose(found[name].mean, exact, atol=2e-3)  # a hundred nodes, or 512
        assert_allclose(found[name].sd, np.sqrt(value**2 @ w - exact**2), atol=4e-3)
    assert np.all(found["infinite"].quantiles[1] == np.inf)
    assert np.isfinite(found["infinite"].quantiles[0]).all()


def test_smooth_functions_with_long_tails_keep_the_rule_that_has_them():
    mean, sd = np.array([0.0, 0.3, -2.0]), np.array([0.5, 2.0, 3.0])

    def by(x, w):
        values = np.exp(mean + sd * x[:, None])
        m = w @ values
        return m, w @ (values - m) ** 2

    def of_hermite(number):
        x, w = np.polynomial.hermite_e.hermegauss(number)
        return by(x, w / w.sum())

    x = norm.ppf((np.arange(1024) + 0.5) / 1024)
    outer = np.isin(np.arange(1024) % 4, (0, 3))
    halves = (by(x[outer == is_outer], np.full(512, 1 / 512)) for is_outer in (True, False))
    found = deterministic.chosen(of_hermite(20), of_hermite(21), *halves)
    exact = np.exp(mean + sd**2 / 2)
    assert_allclose(found[0], exact, rtol=1e-3)
    assert_allclose(np.sqrt(found[1]), exact * np.sqrt(np.expm1(sd**2)), rtol=0.01)


@pytest.mark.slow
def test_quantiles_by_sorting_and_by_looking_are_the_same(monkeypatch):
    def sites(f, X, offset):
        numpyro.deterministic("rate", jnp.exp(f))
        numpyro.deterministic("above", f > 0.1)

    guide = guide_of(sites)
    found = sgp.predict(guide, PARAMS, X_NEW, quantiles=LEVELS)
    monkeypatch.setattr(deterministic, "_MOST_SORTED", 0)
    other = sgp.predict(guide_of(sites), PARAMS, X_NEW, quantiles=LEVELS)
    sd = np.asarray(found["rate"].sd)
    # Between two of 512 values, by which they are apart.
    for a, b in zip(found["rate"].quantiles, other["rate"].quantiles, strict=True):
        assert_allclose(a / sd, b / sd, atol=0.06)
    assert_allclose(found["above"].quantiles, other["above"].quantiles, atol=1e-6)


@pytest.mark.slow
def test_what_depends_on_a_response_is_left_out_beside_two_of_them():
    def model(X, y=None, w=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("rows", X.shape[0]):
            y = numpyro.sample("y", dist.Normal(f, 0.5), obs=y)
            numpyro.sample("w", dist.Normal(2 * f, 0.5), obs=w)
        numpyro.deterministic("residual", y - f)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    guide.setup(X, jnp.ones(4), jnp.ones(4))
    assert list(sgp.predict(guide, PARAMS, X_NEW)) == ["f", "y", "w"]
    given = sgp.predict(guide, PARAMS, X_NEW, jnp.full(5, 2.0))
    assert_allclose(given["residual"].mean, 2.0 - given["f"].mean, rtol=1e-12)


@pytest.mark.slow
def test_minibatches_do_not_mind_them():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.deterministic("centred", f - f.mean())
        numpyro.deterministic("name", "of a model")
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    X = jnp.linspace(-2.0, 2.0, 300)[:, None]
    more = {"steps": 3, "batch_size": 50, "progress_bar": False}
    fitted = sgp.fit(model, sgp.SVGP(3), (X, jnp.sin(X[:, 0])), **more)
    assert np.isfinite(fitted.bound)


@pytest.mark.slow
def test_they_are_differentiated_inside_of_jit(guide):
    def mean(x):
        found = sgp.predict(guide, PARAMS, x.reshape(1, 1), quantiles=())
        assert "centred" in found or "rate" in found
        return found["rate"].mean[0]

    x, step = jnp.array(0.2), 1e-5
    slope = jax.jit(jax.grad(mean))(x)
    assert_allclose(slope, (mean(x + step) - mean(x - step)) / (2 * step), rtol=1e-6)
    many = jax.vmap(mean)(X_NEW[:, 0])
    known = sgp.predict(guide, PARAMS, X_NEW, quantiles=())["rate"].mean
    assert_allclose(many, known, rtol=1e-12)


@pytest.mark.slow
def test_of_drawn_latents_they_are_mixtures():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        eta = numpyro.deterministic("eta", level + X[:, 0] * f)
        rate = numpyro.deterministic("rate", jnp.exp(0.3 * eta))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z), base_guide=AutoNormal)
    guide.setup(X, jnp.ones(4))
    params = guide.known().starts | PARAMS
    params |= {"level_auto_loc": jnp.array(0.3), "level_auto_scale": jnp.array(0.5)}
    found = sgp.predict(guide, params, X_NEW, num_draws=2000, quantiles=LEVELS)
    q = guide.posterior(params, X_NEW)["f"]
    x = X_NEW[:, 0]
    mean, variance = 0.3 + x * q.mean, x**2 * q.variance + 0.25
    # Five standard errors of 2,000 draws of the level, whose sd is a half.
    assert_allclose(found["eta"].mean, mean, atol=5 * 0.5 / 2000**0.5)
    assert_allclose(found["eta"].sd, np.sqrt(variance), rtol=5 / 4000**0.5)
    assert np.isfinite(found["eta"].quantiles).all()  # also where it is the level alone
    z = norm.ppf(LEVELS)[:, None]
    expected = mean + np.sqrt(variance) * z
    assert_allclose(found["eta"].quantiles, expected, atol=0.12)  # five of its own
    assert_allclose(np.log(found["rate"].quantiles) / 0.3, expected, atol=0.15)


@pytest.mark.slow
def test_nested_results_have_them_too():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        eta = numpyro.deterministic("eta", level + f)
        numpyro.deterministic("rate", jnp.exp(eta))
        numpyro.deterministic("share", jnp.exp(f) / jnp.exp(f).sum())
        numpyro.deterministic("base", jnp.exp(level))
        with numpyro.plate("rows", X.shape[0]):
            y = numpyro.sample("y", dist.Normal(eta, 0.3), obs=y)
        numpyro.deterministic("residual", y - eta)
        numpyro.deterministic("large", (y - eta) ** 2)

    y = jnp.array([0.4, -0.2, 0.5, 1.0])
    result = sgp.nested(model, sgp.VGP(), (X, y), progress_bar=False)
    found = result.predict(X_NEW, quantiles=LEVELS)
    assert "share" not in found
    eta = found["eta"]
    z = norm.ppf(LEVELS)[:, None]
    assert_allclose(eta.quantiles, eta.mean + eta.sd * z, rtol=1e-6)
    # Of 2,048 draws, balanced ones: levels to 0.01.
    reached = norm.cdf((np.log(found["rate"].quantiles) - eta.mean) / eta.sd)
    assert_allclose(reached, np.asarray(LEVELS)[:, None] * np.ones(5), atol=0.015)
    log_mean = np.log(found["rate"].mean)
    assert_allclose(log_mean, eta.mean + eta.sd**2 / 2, atol=0.05)
    assert "residual" not in found and "large" not in found
    assert "residual" not in result.posterior(X_NEW)
    draws = result.sample(jax.random.key(0), X_NEW, sample_shape=(4000,))
    # Of noise with an sd of 0.3: five standard errors.
    assert_allclose(draws["residual"].mean(0), 0.0, atol=5 * 0.3 / 4000**0.5)
    assert_allclose(draws["residual"].std(0), 0.3, rtol=5 / 8000**0.5)
    seen = result.sample(jax.random.key(0), sample_shape=(10,))
    assert_allclose(seen["residual"], y - seen["eta"], rtol=1e-12)


class OnlyDensity(dist.Normal):
    def sample(self, key, sample_shape=()):
        raise NotImplementedError


@pytest.mark.slow
def test_sites_of_responses_that_cannot_be_drawn_are_no_draws():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("rows", X.shape[0]):
            y = numpyro.sample("y", OnlyDensity(f, 0.3), obs=y)
        numpyro.deterministic("residual", y - f)
        numpyro.deterministic("rate", jnp.exp(f))

    y = jnp.array([0.4, -0.2, 0.5, 1.0])
    result = sgp.nested(model, sgp.VGP(), (X, y), progress_bar=False)
    draws = result.sample(jax.random.key(0), X_NEW, sample_shape=(3,))
    assert "rate" in draws and "residual" not in draws


@pytest.mark.slow
def test_a_figure_is_of_the_response_first():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        rate = numpyro.deterministic("rate", jnp.exp(f))
        numpyro.deterministic("total", rate.sum())
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    data = jnp.linspace(-1.0, 1.0, 8)[:, None], jnp.array([1, 0, 2, 1, 3, 2, 4, 3])
    fitted = sgp.fit(model, sgp.SVGP(3), data, steps=2, progress_bar=False)
    assert fitted.plot(num_points=4).get_ylabel() == "y"
    assert fitted.plot(num_points=4, site="rate").get_ylabel() == "rate"
    with pytest.raises(ValueError, match="'total' is not predicted: a row of it"):
        fitted.plot(num_points=4, site="total")


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [2, 3])
def test_one_function_is_above_another_as_often_as_it_is(number):
    """By a product rule, whose nodes are where functions are equal, it was .08 off."""

    def model(X, y=None):
        kernel = sgp.kernels.RBF(jnp.full(number, 0.5), jnp.linspace(0.7, 2.0, number))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        rate = numpyro.deterministic("rate", jnp.exp(f.sum(axis=0)))
        numpyro.deterministic("above", f[0] > f[1])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    X = np.linspace(0.0, 4.0, 9)[:, None]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.1), sgp.TraceGP_ELBO())
    counts = np.array([1, 2, 0, 3, 4, 2, 1, 5, 2])
    params = svi.get_params(svi.init(jax.random.key(0), X, counts))
    params["f_auto_qu_mu"] = params["f_auto_qu_mu"] + 0.3 * jnp.arange(4)
    X_new = np.linspace(-4.0, 8.0, 7)[:, None]
    found = sgp.predict(guide, params, X_new)
    q = guide.posterior(params, X_new)["f"]
    variance = q.variance[0] + q.variance[1]
    exact = norm.cdf((q.mean[0] - q.mean[1]) / np.sqrt(variance))
    # 2,048 quasi-random numbers, of a fixed seed.
    assert_allclose(found["above"].mean, exact, atol=0.008)
    m, v = q.mean.sum(axis=0), q.variance.sum(axis=0)
    mean = np.exp(m + v / 2)
    # By products of rules, which have all digits of this.
    assert_allclose(found["rate"].sd, mean * np.sqrt(np.expm1(v)), rtol=1e-6)
    sd = np.sqrt(mean + mean**2 * np.expm1(v))
    assert_allclose(found["y"].sd, sd, rtol=1e-6)

"""Densities of observations in other numbers than rows of f, each of one row of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.polynomial.hermite import hermgauss
from numpy.testing import assert_allclose
from numpyro import handlers
from scipy.special import logsumexp
from scipy.stats import norm, poisson

import numpyro_sgp as sgp
from numpyro_sgp.predictive import entries
from tests.helpers import slow

# Narrow beside q(f), so that nodes have to be moved for each observation; what is left to
# those that are not moved is wrong in the seventh digit.
NOISE = 0.02
RNG = np.random.default_rng(0)
X = np.linspace(0.0, 3.0, 6)[:, None]
INDEX = np.array([4, 0, 4, 4, 2, 1, 5, 4, 0, 2])  # and not 3
Y = np.sin(X[INDEX, 0]) + 0.5 * RNG.normal(size=10)


def posterior(fit, *args):
    found = fit.guide.posterior(fit.params, *args)
    return {k: (np.asarray(q.mean), np.asarray(q.variance)) for k, q in found.items()}


def untrained(model, *data):
    """A fit with a q(u) that is not the prior's."""
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=X[::2]))
    guide.setup(*data)
    params = guide.starts(jax.random.key(0), data, {})
    keys = zip(
        sorted(params), jax.random.split(jax.random.key(1), len(params)), strict=True
    )
    moved = {k: 0.3 * jax.random.normal(key, params[k].shape) for k, key in keys}
    params = {k: v + moved[k] * k.endswith("qu_mu") for k, v in params.items()}
    return sgp.Fitted(guide, params, data)


def indexed(X, index, y=None, mask=True):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(index)), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f[index], NOISE), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, slow(True)])
def test_several_observations_of_a_row_have_a_density_each(masked, count_compiled):
    fitted = untrained(indexed, X, INDEX, Y)
    mask = np.arange(10) % 3 > 0 if masked else np.ones(10, bool)
    found = fitted.log_score(X, INDEX, Y, mask=mask)["y"]
    mean, variance = posterior(fitted, X, INDEX)["f"]
    exact = norm.logpdf(Y, mean[INDEX], np.sqrt(variance[INDEX] + NOISE**2))
    assert_allclose(found.rows, np.where(mask, exact, np.nan), rtol=1e-6)
    assert_allclose(found.mean, exact[mask].mean(), rtol=1e-6)
    other = np.array([3, 3, 1])  # and for others again, by the same program
    fitted.log_score(X, other[::-1], Y[:3])
    count_compiled()
    found = fitted.log_score(X, other, Y[:3])["y"].rows
    assert count_compiled() == 0
    exact = norm.logpdf(Y[:3], mean[other], np.sqrt(variance[other] + NOISE**2))
    assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.slow
def test_a_grid_and_two_sites_of_parts_of_the_rows():
    def model(X, y=None, z=None, counts=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("a", 3, dim=-2), numpyro.plate("b", 2, dim=-1):
            numpyro.sample("y", dist.Normal(f.reshape(2, 3).T, NOISE), obs=y)
        with numpyro.plate("first", 4):
            numpyro.sample("z", dist.Normal(2.0 * f[:4], 0.5), obs=z)
        with numpyro.plate("last", 2):
            numpyro.sample("counts", dist.Poisson(jnp.exp(f[4:])), obs=counts)

    y, z, counts = RNG.normal(size=(3, 2)), RNG.normal(size=4), np.array([2, 0])
    fitted = untrained(model, X, y, z, counts)
    found = fitted.log_score(X, y, z, counts)
    mean, variance = posterior(fitted, X)["f"]
    spread = np.sqrt(variance + NOISE**2)
    exact = norm.logpdf(y, mean.reshape(2, 3).T, spread.reshape(2, 3).T)
    assert_allclose(found["y"].rows, exact, rtol=1e-6)
    exact = norm.logpdf(z, 2.0 * mean[:4], np.sqrt(4.0 * variance[:4] + 0.25))
    assert_allclose(found["z"].rows, exact, rtol=1e-6)
    nodes, weights = hermgauss(100)
    f = mean[4:] + np.sqrt(2.0 * variance[4:]) * nodes[:, None]
    exact = logsumexp(
        poisson.logpmf(counts, np.exp(f)), b=weights[:, None] / np.sqrt(np.pi), axis=0
    )
    assert_allclose(found["counts"].rows, exact, rtol=1e-6)


@pytest.mark.slow
def test_functions_of_other_rows():
    """Those of f and g have other numbers, and sums have nodes of both."""
    W, at = np.linspace(0.0, 2.0, 4)[:, None], np.array([0, 1, 2, 3, 3, 2, 1, 0, 0, 1])

    def model(X, W, index, at, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5), W))
        with numpyro.plate("data", len(index)):
            numpyro.sample("y", dist.Normal(f[index] - g[at], 0.3), obs=y)

    fitted = untrained(model, X, W, INDEX, at, Y)
    found = fitted.log_score(X, W, INDEX, at, Y)["y"].rows
    both = posterior(fitted, X, W, INDEX, at)
    mean = both["f"][0][INDEX] - both["g"][0][at]
    variance = both["f"][1][INDEX] + both["g"][1][at]
    assert_allclose(found, norm.logpdf(Y, mean, np.sqrt(variance + 0.09)), rtol=1e-6)


@pytest.mark.slow
def test_one_event_of_several_rows_is_none_of_a_row():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", 3):
            pairs = f.reshape(3, 2)
            numpyro.sample("y", dist.Normal(pairs, NOISE).to_event(1), obs=y)

    y = RNG.normal(size=(3, 2))
    fitted = untrained(model, X, y)
    with pytest.raises(ValueError, match=r"shape \(3,\), not one for each of the 6"):
        fitted.log_score(X, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [
        [4, 4, 0, 0, 2, 1],  # as many as rows
        slow([[4, 0], [1, 1], [2, 2], [3, 0], [5, 5], [0, 4]]),  # with an axis of as many
        slow([5, 4, 3, 2, 1, 0]),
    ],
)
def test_other_rows_in_the_shape_of_the_rows_are_known_by_what_they_change_with(index):
    """Entries were summed as if of one row, or at nodes of other rows: up to 2779 nats."""
    index = np.array(index)
    y = np.sin(X[index, 0]) + 0.5 * RNG.normal(size=index.shape)

    def model(X, index, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate_stack("data", index.shape):
            numpyro.sample("y", dist.Normal(f[index], NOISE), obs=y)

    fitted = untrained(model, X, index, y)
    found = fitted.log_score(X, index, y)["y"].rows
    mean, variance = posterior(fitted, X, index)["f"]
    exact = norm.logpdf(y, mean[index], np.sqrt(variance[index] + NOISE**2))
    assert_allclose(found, exact, rtol=1e-6)


@pytest.mark.slow
def test_differences_beside_another_function_are_of_several_rows():
    """Slopes along both rows together were zero, as of an entry that has none."""
    A = np.eye(6)[[0, 2, 4]] - np.eye(6)[[1, 3, 5]]

    def model(X, W, A, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5), W))
        with numpyro.plate("data", 3):
            numpyro.sample("y", dist.Normal(A @ f + g[:3], NOISE), obs=y)

    W, y = np.linspace(0.0, 2.0, 4)[:, None], RNG.normal(size=3)
    fitted = untrained(model, X, W, np.eye(6)[:3], y)
    with pytest.raises(ValueError, match="nor is each entry of one row"):
        fitted.log_score(X, W, A, y)
    wide = np.concatenate([A, A])  # in the shape of rows
    W, y = np.linspace(0.0, 2.0, 6)[:, None], np.zeros(6)

    def of_rows(X, W, A, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5), W))
        with numpyro.plate("data", 6):
            numpyro.sample("y", dist.Normal(A @ f + g, NOISE), obs=y)

    fitted = untrained(of_rows, X, W, np.eye(6), y)
    with pytest.raises(ValueError, match="'y' are of several rows of f each"):
        fitted.log_score(X, W, wide, y)


@pytest.mark.slow
def test_what_has_no_value_says_so_and_what_has_no_slope_at_the_mean_is_found():
    def model(X, index, low, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        normal = dist.Normal(f[index], NOISE)
        share = normal.cdf(low + 0.05) - normal.cdf(low)
        with numpyro.plate("data", len(index)):
            numpyro.factor("rounded", jnp.log(jnp.clip(share, 1e-30)))
            numpyro.sample("y", dist.Normal(f[index], 1.0), obs=y)

    data = X, INDEX, np.floor(20.0 * Y) / 20.0, Y
    found = untrained(model, *data).log_score(*data)
    assert np.isfinite(found["y"].rows).all() and found["y"].rows.shape == (10,)
    missing = np.where(np.arange(10) % 5 == 0, np.nan, Y)
    with pytest.raises(ValueError, match="NaN in 2"):
        untrained(indexed, X, INDEX, Y).log_score(X, INDEX, missing)


def test_what_a_mask_leaves_out_takes_no_turn():
    rows = np.where(np.arange(40) % 4 > 0, -1, np.arange(40) // 4 % 6)
    found = entries.entries_of([(rows, 6)], np.arange(40) % 4 > 0)
    assert found.which.shape == (2, 6) and found.loose is None
    assert found.which[0].tolist() == [0, 4, 8, 12, 16, 20]
    assert found.which[1].tolist() == [24, 28, 32, 36, 40, 40]
    assert entries.entries_of([(rows, 6)], np.zeros(40, bool)).loose is not None


@pytest.mark.parametrize("number", [slow(1), slow(2), 5, slow(8)])
def test_rows_are_told_by_what_entries_change_with(number):
    index = np.array([0, number - 1, 0, number // 2])
    f = {"f": jnp.zeros((2, number)), "g": jnp.ones(3)}

    def log_prob(f):
        y = f["f"][0, index] ** 2 - f["f"][1, index[::-1]]
        return {"y": y, "z": f["f"][0, -1:] + f["g"][:2], "sum": f["g"][:2] - f["g"][1:]}

    found = entries.of_functions(log_prob, f, {k: jnp.ones_like(v) for k, v in f.items()})
    each = entries.rows_of_entries(found["y"], [number, 3])
    expected = index, index[::-1], np.full(4, -1)
    for (rows, count), known, size in zip(each, expected, (number, number, 3), strict=True):
        assert rows.tolist() == known.tolist() and count == size
    last, _, g = (rows for rows, _ in entries.rows_of_entries(found["z"], [number, 3]))
    assert last.tolist() == [number - 1, number - 1] and g.tolist() == [0, 1]
    with pytest.raises(entries.NotOfARow):
        entries.rows_of_entries(found["sum"], [number, 3])


@pytest.mark.parametrize("likelihood", [dist.StudentT, dist.Gamma])
def test_what_is_not_moved_does_not_change_by_rounding(likelihood):
    """As it did in nearly half of 1003 rows, where one program was beside another."""
    y = RNG.gamma(2.0, size=1003)

    def log_prob(f):
        return {"y": likelihood(3.0, jnp.exp(f["f"])).log_prob(y)}

    where = {"f": jnp.asarray(RNG.normal(size=1003))}, {"f": jnp.ones(1003)}
    seen = entries.changed(log_prob, *where, {"f": np.True_}, places=(0.5,))["y"]
    assert np.array_equal(seen[0], entries.halves(1003))


@pytest.mark.slow
def test_several_sites_of_other_orders_and_functions_of_other_numbers():
    """One in another order, one of pairs of rows, one of a row and one of four."""
    order, pairs = np.array([1, 0, 3, 2, 5, 4]), np.array([[0, 1], [2, 3], [4, 5]] * 2)
    W = np.linspace(0.0, 2.0, 2)[:, None]

    def model(X, W, a=None, b=None, c=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), W))
        with numpyro.plate("rows", 6, dim=-1):
            numpyro.sample("a", dist.Normal(f[order], 0.3), obs=a)
        with numpyro.plate_stack("table", (6, 2)):
            numpyro.sample("b", dist.Normal(f[pairs], 0.3), obs=b)
            numpyro.sample("c", dist.Normal(f[:, None] + h, 0.3), obs=c)

    a, b, c = RNG.normal(size=6), RNG.normal(size=(6, 2)), RNG.normal(size=(6, 2))
    guide = sgp.AutoSparseGP(model, {"f": sgp.SVGP(inducing=X[::2]), "h": sgp.SVGP(2)})
    guide.setup(X, W, a, b, c)
    fitted = sgp.Fitted(guide, guide.starts(jax.random.key(0), (X, W, a, b, c), {}), (X,))
    found = fitted.log_score(X, W, a, b, c)
    (f, v), (h, w) = (posterior(fitted, X, W)[name] for name in ("f", "h"))
    exact = norm.logpdf(a, f[order], np.sqrt(v[order] + 0.09))
    assert_allclose(found["a"].rows, exact, rtol=1e-6)
    exact = norm.logpdf(b, f[pairs], np.sqrt(v[pairs] + 0.09))
    assert_allclose(found["b"].rows, exact, rtol=1e-6)
    exact = norm.logpdf(c, f[:, None] + h, np.sqrt(v[:, None] + w + 0.09))
    assert_allclose(found["c"].rows, exact, rtol=1e-5)


@pytest.mark.slow
def test_what_does_not_depend_on_f_and_what_cannot_be():
    """An entry that is zero times f, and a count of -1 beside others of its row."""
    times = np.array([1.0, 0.0, 1.0, 2.0])

    def model(X, index, y=None, counts=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", 4):
            numpyro.sample("y", dist.Normal(times * f[index], 0.3), obs=y)
            numpyro.sample("counts", dist.Poisson(jnp.exp(f[index])), obs=counts)

    index, y, counts = np.array([0, 0, 2, 2]), RNG.normal(size=4), np.array([-1, 2, 0, 1])
    fitted = untrained(model, X, index, y, np.abs(counts))
    with pytest.warns(UserWarning, match="1 observed rows of site 'counts'"):
        found = fitted.log_score(X, index, y, counts)
    mean, variance = posterior(fitted, X, index)["f"]
    spread = np.sqrt(times**2 * variance[index] + 0.09)
    exact = norm.logpdf(y, times * mean[index], spread)
    assert_allclose(found["y"].rows, exact, rtol=1e-6)
    assert (
        np.isneginf(found["counts"].rows[0]) and np.isfinite(found["counts"].rows[1:]).all()
    )


@pytest.mark.slow
def test_inside_of_jit_there_has_to_be_one_for_each_row():
    fitted = untrained(indexed, X, INDEX, Y)

    @jax.jit
    def score(y):
        return sgp.log_predictive_density(fitted.guide, fitted.params, X, INDEX, y)["y"]

    with pytest.raises(ValueError, match="Inside of jax.jit"):
        score(Y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_no_change(dtype):
    """Compiled with all optimisations a loop's turns round the same numbers otherwise."""
    eps = np.finfo(dtype).eps
    a = np.array([-2.0, -2.0, -1e4, np.nan, -np.inf, 0.0, -3.0, -3.0], dtype)
    rounded = a + np.array([2, 0, 2e4, 0, 0, 0, 3, 0]) * eps
    # The last two: of one row, and of another one less, as a sum of rows may be.
    moved = np.array([-2.5, -2.0, -1e4, np.nan, -1.0, np.nan, -2.9, -2.9], dtype)
    less = np.array([-2.0, -2.0, -1e4, np.nan, -np.inf, 0.0, -3.0, -2.99], dtype)
    with np.errstate(invalid="ignore"):
        found = np.asarray(
            entries._differ(jnp.asarray(a), jnp.asarray([rounded, moved, less], dtype))
        )
    expected = np.zeros((3, 8), bool)
    expected[1, [0, 4, 5, 6, 7]] = expected[2, 7] = True
    np.testing.assert_array_equal(found, expected)

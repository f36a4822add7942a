"""
Ten problems with GPs, effects and sampled hyperparameters, each written twice: with
numpyro_sgp, and in plain NumPyro with a dense kernel matrix.

Arguments of both versions are the arrays of `data()`, the responses last. Sites have the
same names and priors in both; where there are effects, "eta" is the linear predictor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular

import numpyro_sgp as sgp

JITTER = 1e-8  # relative to the variance
PROBLEMS = {}


@dataclass(frozen=True)
class Problem:
    """
    A model, its data, and the same model in plain NumPyro.

    :param num_inducing: for a sparse method.
    :param rank: `dense(*data, rank=rank)` is the same posterior, sooner (:func:`values`).
        None where the kernel is not smooth enough or the inputs have several columns.
    """

    name: str
    model: Callable
    data: Callable
    dense: Callable
    num_inducing: int
    rank: int | None = None


def problem(name, model, data, dense, num_inducing, rank=None):
    """Adds a problem."""
    PROBLEMS[name] = Problem(name, model, data, dense, num_inducing, rank)


# Kernels in plain JAX, and f = mean + L @ z.


def distance(X1, X2, lengthscale):
    """Between all rows, in lengthscales, with a gradient at 0."""
    r2 = jnp.sum(((X1[:, None] - X2) / lengthscale) ** 2, -1)
    return jnp.where(r2 > 0, jnp.sqrt(jnp.where(r2 > 0, r2, 1.0)), 0.0)


def rbf(X1, X2, variance, lengthscale):
    """The squared exponential."""
    return variance * jnp.exp(-0.5 * jnp.sum(((X1[:, None] - X2) / lengthscale) ** 2, -1))


def matern32(X1, X2, variance, lengthscale):
    """Matérn 3/2."""
    r = np.sqrt(3.0) * distance(X1, X2, lengthscale)
    return variance * (1.0 + r) * jnp.exp(-r)


def matern52(X1, X2, variance, lengthscale):
    """Matérn 5/2."""
    r = np.sqrt(5.0) * distance(X1, X2, lengthscale)
    return variance * (1.0 + r + r**2 / 3.0) * jnp.exp(-r)


def periodic(X1, X2, variance, lengthscale):
    """Of period 1."""
    sine = jnp.sin(np.pi * (X1[:, None] - X2)) / lengthscale
    return variance * jnp.exp(-2.0 * jnp.sum(sine**2, -1))


def values(name, kernel, X, variance, lengthscale, rank=None):
    """
    Values of a GP at all rows from standard normal variables.

    :param rank: None for the Cholesky factor L of K(X, X). A number takes K(X, Z) L_Z^-T
        with so many points Z in its place, Chebyshev's over the range of X (equal steps
        over a period): for a smooth kernel in one dimension the same prior, up to rounding.
    """
    Z = X if rank is None else points(X, rank, kernel is periodic)
    K = kernel(Z, Z, variance, lengthscale) + JITTER * variance * jnp.eye(len(Z))
    L = jnp.linalg.cholesky(K)
    z = numpyro.sample(f"{name}_z", dist.Normal(0.0, 1.0).expand([len(Z)]).to_event(1))
    if rank is None:
        f = L @ z
    else:
        weights = solve_triangular(L, z, lower=True, trans=1)
        f = kernel(X, Z, variance, lengthscale) @ weights
    return numpyro.deterministic(name, f)


def points(X, rank, on_circle):
    """The points of a root of low rank."""
    if on_circle:
        return np.arange(rank)[:, None] / rank
    nodes = np.cos(np.pi * (np.arange(rank) + 0.5) / rank)
    return (X.min() + X.max()) / 2 + (X.max() - X.min()) / 2 * nodes[:, None]


def variance_and_lengthscale():
    """The priors that most problems share."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    return variance, numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))


def gp(kernel, X):
    """The site f with numpyro_sgp."""
    return numpyro.sample("f", sgp.GaussianProcess(kernel(*variance_and_lengthscale()), X))


def dense_gp(kernel, X, rank=None):
    """The same in plain NumPyro."""
    return values("f", kernel, X, *variance_and_lengthscale(), rank)


# Snelson's regression.


def gaussian_data():
    """Snelson's 200 rows."""
    X, y, _ = sgp.datasets.snelson()
    return np.asarray(X, float), np.asarray(y, float)


def gaussian_likelihood(f, y):
    """Normal noise."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def gaussian(X, y=None):
    """Regression."""
    gaussian_likelihood(gp(sgp.kernels.RBF, X), y)


def gaussian_dense(X, y=None, rank=None):
    """Regression."""
    gaussian_likelihood(dense_gp(rbf, X, rank), y)


problem("gaussian", gaussian, gaussian_data, gaussian_dense, 40, rank=50)


# Coal-mining disasters.


def coal_data():
    """Disasters in 811 bins of 50 days, by their time in decades."""
    coal = sgp.datasets.coal_mining()
    decade = (sgp.datasets.days_to_year(coal.bin_centre_day) - 1851.0) / 10.0
    return np.asarray(decade, float)[:, None], np.asarray(coal.count, int)


def coal_likelihood(f, y):
    """Poisson counts about an intercept."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    eta = numpyro.deterministic("eta", f + intercept)
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def coal(X, y=None):
    """A log-Gaussian Cox process."""
    coal_likelihood(gp(sgp.kernels.RBF, X), y)


def coal_dense(X, y=None, rank=None):
    """A log-Gaussian Cox process."""
    coal_likelihood(dense_gp(rbf, X, rank), y)


problem("coal", coal, coal_data, coal_dense, 40, rank=60)


# Binomial trials with a line.


def binomial_data():
    """25 rows of 10 to 20 trials."""
    rng = np.random.default_rng(1)
    X = np.sort(rng.uniform(-1.0, 1.0, (25, 1)), axis=0)
    total = rng.integers(10, 21, 25)
    logits = -0.3 + 1.2 * X[:, 0] + 0.8 * np.sin(5.0 * X[:, 0])
    return X, total, rng.binomial(total, 1.0 / (1.0 + np.exp(-logits)))


def binomial_likelihood(f, X, total, y):
    """Trials about a line."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    eta = numpyro.deterministic("eta", intercept + slope * X[:, 0] + f)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Binomial(total, logits=eta), obs=y)


def binomial(X, total, y=None):
    """Trials with a line and a GP."""
    binomial_likelihood(gp(sgp.kernels.Matern52, X), X, total, y)


def binomial_dense(X, total, y=None, rank=None):
    """Trials with a line and a GP."""
    binomial_likelihood(dense_gp(matern52, X, rank), X, total, y)


problem("binomial", binomial, binomial_data, binomial_dense, 25)


# Two classes, four columns of which two matter.


def bernoulli_ard_data():
    """200 rows of four columns."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(200, 4))
    logits = 3.0 * np.sin(1.5 * X[:, 0]) + 2.0 * X[:, 1]
    return X, rng.binomial(1, 1.0 / (1.0 + np.exp(-logits)))


def ard_priors():
    """Of the variance and a lengthscale for each column."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    prior = dist.LogNormal(0.0, 1.0).expand([4]).to_event(1)
    return variance, numpyro.sample("lengthscale", prior)


def bernoulli_likelihood(f, y):
    """Two classes."""
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def bernoulli_ard(X, y=None):
    """Classification."""
    kernel = sgp.kernels.RBF(*ard_priors())
    bernoulli_likelihood(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), y)


def bernoulli_ard_dense(X, y=None, rank=None):
    """Classification."""
    bernoulli_likelihood(values("f", rbf, X, *ard_priors(), rank), y)


problem("bernoulli_ard", bernoulli_ard, bernoulli_ard_data, bernoulli_ard_dense, 100)


# Overdispersed counts.


def negbinomial_data():
    """Counts of 100 years, by their time in decades."""
    rng = np.random.default_rng(3)
    X = np.arange(100)[:, None] / 10.0
    mean = np.exp(2.0 + 0.7 * np.sin(0.9 * X[:, 0]) + 0.08 * X[:, 0])
    return X, rng.poisson(mean * rng.gamma(4.0, 0.25, 100))


def negbinomial_likelihood(f, y):
    """Counts about an intercept."""
    concentration = numpyro.sample("concentration", dist.Gamma(3.0, 0.5))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    eta = numpyro.deterministic("eta", f + intercept)
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(eta), concentration), obs=y)


def negbinomial(X, y=None):
    """Counts by year."""
    negbinomial_likelihood(gp(sgp.kernels.Matern52, X), y)


def negbinomial_dense(X, y=None, rank=None):
    """Counts by year."""
    negbinomial_likelihood(dense_gp(matern52, X, rank), y)


problem("negbinomial", negbinomial, negbinomial_data, negbinomial_dense, 60)


# Ordered categories.


def ordinal_data():
    """150 rows in four categories."""
    rng = np.random.default_rng(4)
    X = np.sort(rng.uniform(0.0, 6.0, (150, 1)), axis=0)
    latent = 1.8 * np.sin(1.3 * X[:, 0]) + rng.logistic(size=150)
    return X, np.digitize(latent, [-1.5, 0.0, 1.5])


def ordinal_priors():
    """Of the variance, which the cutpoints do not leave free, and the lengthscale."""
    variance = numpyro.sample("variance", dist.LogNormal(0.5, 0.3))
    return variance, numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))


def ordinal_likelihood(f, y):
    """Four categories."""
    cutpoints = numpyro.sample(
        "cutpoints",
        dist.TransformedDistribution(
            dist.Normal(0.0, 2.0).expand([3]).to_event(1),
            dist.transforms.OrderedTransform(),
        ),
    )
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(f, cutpoints), obs=y)


def ordinal(X, y=None):
    """Ordered categories."""
    kernel = sgp.kernels.RBF(*ordinal_priors())
    ordinal_likelihood(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), y)


def ordinal_dense(X, y=None, rank=None):
    """Ordered categories."""
    ordinal_likelihood(values("f", rbf, X, *ordinal_priors(), rank), y)


problem("ordinal", ordinal, ordinal_data, ordinal_dense, 40, rank=50)


# Regression with outliers.


def student_data():
    """120 rows, of which eight are far off."""
    rng = np.random.default_rng(5)
    X = np.sort(rng.uniform(0.0, 6.0, (120, 1)), axis=0)
    y = np.sin(2.0 * X[:, 0]) + 0.5 * X[:, 0] - 1.5 + 0.2 * rng.normal(size=120)
    y[rng.choice(120, 8, replace=False)] += 2.5 * rng.choice([-1.0, 1.0], 8)
    return X, y


def student_likelihood(f, y):
    """Noise with four degrees of freedom."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, scale), obs=y)


def student(X, y=None):
    """Robust regression."""
    student_likelihood(gp(sgp.kernels.Matern32, X), y)


def student_dense(X, y=None, rank=None):
    """Robust regression."""
    student_likelihood(dense_gp(matern32, X, rank), y)


problem("student", student, student_data, student_dense, 80)


# Groups.


def groups_data():
    """300 rows in 20 groups: age in decades, group, response."""
    rng = np.random.default_rng(6)
    age = rng.uniform(2.0, 8.0, (300, 1))
    group = rng.integers(0, 20, 300)
    b = 0.6 * rng.normal(size=20)
    y = 1.0 + np.sin(1.2 * age[:, 0]) + b[group] + 0.5 * rng.normal(size=300)
    return age, group, y


def groups_likelihood(f, group, y):
    """Normal noise about an intercept and an effect of each group."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", 20):
        b = numpyro.sample("b", dist.Normal(0.0, tau))
    eta = numpyro.deterministic("eta", intercept + b[group] + f)
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


def groups(X, group, y=None):
    """A curve of age and effects of groups."""
    groups_likelihood(gp(sgp.kernels.RBF, X), group, y)


def groups_dense(X, group, y=None, rank=None):
    """A curve of age and effects of groups."""
    groups_likelihood(dense_gp(rbf, X, rank), group, y)


problem("groups", groups, groups_data, groups_dense, 40, rank=50)


# Trend, season and weekdays.


def two_sites_data():
    """400 days: time in quarters, weekday, response."""
    rng = np.random.default_rng(7)
    day = np.arange(400)
    X, weekday = day[:, None] / 91.25, day % 7
    t, effect = X[:, 0], np.array([0.2, 0.4, 0.3, 0.5, 0.1, -0.8, -0.9])
    season = 0.6 * np.sin(2.0 * np.pi * t) + 0.3 * np.cos(4.0 * np.pi * t)
    trend = 0.8 * np.sin(0.9 * t) + 0.2 * t
    return X, weekday, trend + season + effect[weekday] + 0.4 * rng.normal(size=400)


def two_sites_priors():
    """Of the two kernels."""
    trend_variance = numpyro.sample("trend_variance", dist.LogNormal(0.0, 1.0))
    trend_lengthscale = numpyro.sample("trend_lengthscale", dist.LogNormal(0.7, 0.5))
    season_variance = numpyro.sample("season_variance", dist.LogNormal(0.0, 1.0))
    season_lengthscale = numpyro.sample("season_lengthscale", dist.LogNormal(0.0, 0.5))
    return (trend_variance, trend_lengthscale), (season_variance, season_lengthscale)


def two_sites_likelihood(trend, season, weekday, y):
    """Normal noise about the sum of all effects."""
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("weekdays", 7):
        effect = numpyro.sample("weekday", dist.Normal(0.0, 1.0))
    eta = numpyro.deterministic("eta", trend + season + effect[weekday])
    with numpyro.plate("data", eta.shape[0]):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


def two_sites(X, weekday, y=None):
    """Daily values: trend, season and weekday."""
    of_trend, of_season = two_sites_priors()
    trend = sgp.GaussianProcess(sgp.kernels.RBF(*of_trend), X)
    season = sgp.GaussianProcess(sgp.kernels.Periodic(*of_season, period=1.0), X)
    trend, season = numpyro.sample("trend", trend), numpyro.sample("season", season)
    two_sites_likelihood(trend, season, weekday, y)


def two_sites_dense(X, weekday, y=None, rank=None):
    """Daily values: trend, season and weekday."""
    of_trend, of_season = two_sites_priors()
    trend = values("trend", rbf, X, *of_trend, rank)
    season = values("season", periodic, X, *of_season, rank)
    two_sites_likelihood(trend, season, weekday, y)


problem("two_sites", two_sites, two_sites_data, two_sites_dense, 40, rank=40)


# Many counts in groups.

COUNT_GROUPS = 20


def many_counts_data():
    """5,000 rows in 20 groups: time, group, counts."""
    rng = np.random.default_rng(8)
    X = np.sort(rng.uniform(0.0, 5.0, (5000, 1)), axis=0)
    group = rng.integers(0, COUNT_GROUPS, 5000)
    b = 0.4 * rng.normal(size=COUNT_GROUPS)
    f = np.sin(1.5 * X[:, 0])
    return X, group, rng.poisson(np.exp(-0.5 + f + b[group]))


def many_counts_likelihood(f, group, y):
    """Counts about an intercept and an effect of each group."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", COUNT_GROUPS):
        b = numpyro.sample("b", dist.Normal(0.0, tau))
    eta = numpyro.deterministic("eta", intercept + b[group] + f)
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def many_counts(X, group, y=None):
    """A log rate over time, and effects of groups."""
    many_counts_likelihood(gp(sgp.kernels.RBF, X), group, y)


def many_counts_dense(X, group, y=None, rank=None):
    """A log rate over time, and effects of groups."""
    many_counts_likelihood(dense_gp(rbf, X, rank), group, y)


problem("many_counts", many_counts, many_counts_data, many_counts_dense, 30, rank=24)

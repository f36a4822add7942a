"""
Nested inference: hyperparameters integrated, and one Gaussian over all of the field
====================================================================================

Three models with data simulated from them, by ``sgp.nested``:

* ``daily``: counts of each day of twenty years, 7305 of them: a trend, a season that
  repeats each year, effects of weekdays, and one of holidays;
* ``growth``: heights of 400 children by age, with an intercept for each of 30 schools;
* ``map``: a log-Gaussian Cox process in the 400 cells of a map, with a covariate.

Prints means, standard deviations and quantiles of hyperparameters and effects, and saves a
figure for each model. With ``--nuts`` NUTS runs too, and a table has both side by side:
for ``growth`` and ``map`` on the model made sparse by ``sgp.sparsify`` or whitened by
``sgp.whiten``; for ``daily`` on the sparse model of each tenth day, since a step with all
days takes too long, and nested inference then runs on these days as well.

The parts of the ``daily`` model share a level that the counts cannot tell apart: each
weekday's effect is known to a tenth, their differences to a hundredth.

    python examples/nested.py
    python examples/nested.py daily --output figures
    python examples/nested.py growth map --nuts
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib.figure import Figure
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.stats import gaussian_kde

import numpyro_sgp as sgp

YEAR = 365.25  # days
LEVEL = 3.0  # log counts a day, about which the trend is
HEIGHT = 120.0  # cm, about which the curve of growth is
SIDE = 10.0  # km, of the map
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
HOLIDAYS = ("01-01", "03-08", "05-01", "07-14", "08-15", "11-01", "12-25", "12-26")


class Simulated(NamedTuple):
    """Data and what they were made with."""

    data: tuple
    """The model's arguments, the responses last."""
    truth: dict
    """Values by site."""


# ---- models -----------------------------------------------------------------------------


def daily(days, weekday, holiday, y=None):
    """
    Counts of days.

    :param days: since the first, shape ``(N, 1)``.
    :param weekday: from 0 for Monday to 6, shape ``(N,)``.
    :param holiday: 1 for holidays, else 0, shape ``(N,)``.
    :param y: counts, shape ``(N,)``.
    """
    variance = numpyro.sample("trend_variance", dist.LogNormal(-1.5, 1.0))
    lengthscale = numpyro.sample("trend_lengthscale", dist.LogNormal(jnp.log(1500), 0.5))
    kernel = sgp.kernels.RBF(variance, lengthscale)
    trend = numpyro.sample("trend", sgp.GaussianProcess(kernel, days))

    variance = numpyro.sample("season_variance", dist.LogNormal(-2.0, 1.0))
    lengthscale = numpyro.sample("season_lengthscale", dist.LogNormal(0.0, 0.5))
    kernel = sgp.kernels.Periodic(variance, lengthscale, period=YEAR)
    season = numpyro.sample("season", sgp.GaussianProcess(kernel, days))

    with numpyro.plate("weekdays", 7):
        of_weekday = numpyro.sample("weekday", dist.Normal(0.0, 0.3))
    of_holiday = numpyro.sample("holiday", dist.Normal(0.0, 1.0))
    numpyro.deterministic("weekday_contrast", of_weekday - of_weekday.mean())
    effects = of_weekday[weekday] + of_holiday * holiday
    eta = numpyro.deterministic("eta", LEVEL + trend + season + effects)
    with numpyro.plate("data", days.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def growth(age, school, y=None):
    """
    Heights of children.

    :param age: in years, shape ``(N, 1)``.
    :param school: from 0 to 29, shape ``(N,)``.
    :param y: heights in cm, shape ``(N,)``.
    """
    variance = numpyro.sample("variance", dist.LogNormal(jnp.log(30.0**2), 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(8.0), 0.5))
    tau = numpyro.sample("tau", dist.HalfNormal(10.0))
    noise = numpyro.sample("noise", dist.HalfNormal(10.0))
    kernel = sgp.kernels.RBF(variance, lengthscale)
    curve = numpyro.sample("curve", sgp.GaussianProcess(kernel, age))
    with numpyro.plate("schools", 30):
        of_school = numpyro.sample("school", dist.Normal(0.0, tau))
    eta = numpyro.deterministic("eta", HEIGHT + curve + of_school[school])
    with numpyro.plate("data", age.shape[0]):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


def cox_map(cells, covariate, area, y=None):
    """
    Events in the cells of a map.

    :param cells: centres in km, shape ``(N, 2)``.
    :param covariate: shape ``(N,)``.
    :param area: of each cell in km², shape ``(N,)``.
    :param y: numbers of events, shape ``(N,)``.
    """
    variance = numpyro.sample("variance", dist.LogNormal(-0.7, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(2.0), 0.5))
    kernel = sgp.kernels.Matern32(variance, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, cells))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    eta = numpyro.deterministic("eta", intercept + slope * covariate + f)
    with numpyro.plate("data", cells.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(eta) * area), obs=y)


# ---- data -------------------------------------------------------------------------------


def drawn(kernel, X, seed):
    """A function of the prior at X."""
    return np.asarray(sgp.GaussianProcess(kernel, X).sample(jax.random.key(seed)))


def calendar(num_days, every=1):
    """Days since the first of January 2001, their weekdays, and whether they are holidays."""
    days = np.arange(0, num_days, every)
    dates = np.datetime64("2001-01-01") + days
    weekday = (dates.astype(int) + 3) % 7  # 1970-01-01 was a Thursday
    holiday = np.isin([str(date)[5:] for date in dates], HOLIDAYS)
    return days[:, None].astype(float), weekday, holiday.astype(float)


def simulate_daily(num_days=7305, seed=0):
    """Counts of ``num_days`` days."""
    truth = {
        "trend_variance": 0.25,
        "trend_lengthscale": 1200.0,
        "season_variance": 0.1,
        "season_lengthscale": 0.8,
        "weekday": np.array([0.05, 0.10, 0.10, 0.08, 0.12, -0.15, -0.30]),
        "holiday": -0.5,
    }
    days, weekday, holiday = calendar(num_days)
    grid = np.linspace(0.0, num_days, 200)
    kernel = sgp.kernels.RBF(truth["trend_variance"], truth["trend_lengthscale"])
    trend = np.interp(days[:, 0], grid, drawn(kernel, grid[:, None], seed))
    grid = np.linspace(0.0, YEAR, 200)
    of_season = truth["season_variance"], truth["season_lengthscale"]
    kernel = sgp.kernels.Periodic(*of_season, period=YEAR)
    season = drawn(kernel, grid[:, None], seed + 1)
    season = np.interp(days[:, 0] % YEAR, grid, season)
    effects = truth["weekday"][weekday] + truth["holiday"] * holiday
    eta = LEVEL + trend + season + effects
    y = np.random.default_rng(seed).poisson(np.exp(eta))
    truth |= {"trend": trend, "season": season, "eta": eta}
    return Simulated((days, weekday, holiday, y), truth)


def thinned(simulated, every=10):
    """Each tenth day, so that all weekdays are there."""
    data = tuple(a[::every] for a in simulated.data)
    functions = ("trend", "season", "eta")
    truth = {k: v[::every] if k in functions else v for k, v in simulated.truth.items()}
    return Simulated(data, truth)


def growth_curve(age):
    """Mean height in cm, with a spurt at thirteen."""
    return 77.0 + 5.6 * age + 8.0 * np.tanh((age - 12.5) / 2.5)


def simulate_growth(num_children=400, seed=1):
    """Heights of children between 2 and 18 years in 30 schools."""
    rng = np.random.default_rng(seed)
    truth = {"tau": 3.0, "noise": 6.0}
    age = np.sort(rng.uniform(2.0, 18.0, num_children))
    school = rng.permutation(np.arange(num_children) % 30)
    truth["school"] = truth["tau"] * rng.normal(size=30)
    truth["curve"] = growth_curve(age) - HEIGHT
    truth["eta"] = HEIGHT + truth["curve"] + truth["school"][school]
    y = truth["eta"] + truth["noise"] * rng.normal(size=num_children)
    return Simulated((age[:, None], school, y), truth)


def simulate_map(side=20, seed=2):
    """Events in ``side`` times ``side`` cells of ten kilometres by ten."""
    truth = {"variance": 0.5, "lengthscale": 2.0, "intercept": 0.5, "slope": 0.6}
    centres = (np.arange(side) + 0.5) * SIDE / side
    cells = np.stack(np.meshgrid(centres, centres), axis=-1).reshape(-1, 2)
    area = np.full(len(cells), (SIDE / side) ** 2)
    covariate = drawn(sgp.kernels.RBF(1.0, 1.5), cells, seed + 1)
    covariate = (covariate - covariate.mean()) / covariate.std()
    kernel = sgp.kernels.Matern32(truth["variance"], truth["lengthscale"])
    truth["f"] = drawn(kernel, cells, seed)
    truth["eta"] = truth["intercept"] + truth["slope"] * covariate + truth["f"]
    y = np.random.default_rng(seed).poisson(np.exp(truth["eta"]) * area)
    return Simulated((cells, covariate, area, y), truth)

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
import pandas as pd
from matplotlib.figure import Figure
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.stats import norm

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
    truth = {"variance": 0.5, "lengthscale": 2.0, "intercept": 2.0, "slope": 0.6}
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


# ---- inference --------------------------------------------------------------------------


class Run(NamedTuple):
    """What a method found."""

    title: str
    numbers: pd.DataFrame
    """Rows with mean and sd of each number."""
    draws: dict
    """Of hyperparameters, and of NUTS all sites."""
    seconds: float


def rows(name, values):
    """Labels and values of a site's numbers."""
    for index in np.ndindex(np.shape(values)):
        yield f"{name}[{', '.join(map(str, index))}]" if index else name, values[index]


def integrate(example, data, args, title="nested"):
    """Nested inference: its result, and what it found."""
    options = {"max_nodes": args.max_nodes, "progress_bar": not args.quiet}
    posterior = sgp.nested(example.model, example.approximation(args), data, **options)
    numbers = posterior.summary()
    few = posterior.posterior(*(a[:7] for a in data))
    for name in example.sums:  # of effects, which no row changes
        for label, mean in rows(name, few[name].mean):
            numbers.loc[label, "mean"] = mean
        for label, sd in rows(name, few[name].sd):
            numbers.loc[label, "sd"] = sd
        levels = few[name].quantile([0.05, 0.5, 0.95])
        for i, level in enumerate(("5%", "50%", "95%")):
            for label, value in rows(name, levels[i]):
                numbers.loc[label, level] = value
    return posterior, Run(title, numbers, posterior.hyperparameters, posterior.seconds)


def run_nuts(example, data, args, title="NUTS"):
    """NUTS on the sparse or the whitened model."""
    approximation = example.approximation(args)
    if example.whitened:
        model = sgp.whiten(example.model)
    else:
        model = sgp.sparsify(example.model, approximation, example.expectation)
    began = time.perf_counter()
    mcmc = MCMC(
        NUTS(model, dense_mass=example.dense_mass),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        progress_bar=not args.quiet,
    )
    mcmc.run(jax.random.key(args.seed), *data)
    draws = {name: np.asarray(v) for name, v in mcmc.get_samples().items()}
    seconds = time.perf_counter() - began
    found = {}
    for name, values in draws.items():
        size = effective_sample_size(values[None])
        moments = values.mean(0), values.std(0, ddof=1), np.asarray(size)
        for (label, mean), (_, sd), (_, ess) in zip(
            *(rows(name, v) for v in moments), strict=True
        ):
            found[label] = {"mean": mean, "sd": sd, "ESS": ess}
    return Run(title, pd.DataFrame.from_dict(found, orient="index"), draws, seconds)


def table(runs, truth):
    """Means and standard deviations side by side, for the rows that all have."""
    true = {label: v for name in truth for label, v in rows(name, truth[name])}
    width = max(len(label) for label in runs[0].numbers.index) + 2
    lines = [" " * (width + 10) + "".join(f"{run.title:>24s}" for run in runs)]
    lines.append(f"{'':{width}s}{'true':>10s}" + f"{'mean':>14s}{'sd':>10s}" * len(runs))
    for label in runs[0].numbers.index:
        if not all(label in run.numbers.index for run in runs):
            continue
        line = f"{label:{width}s}{true.get(label, np.nan):10.4g}"
        for run in runs:
            line += "{:14.4g}{:10.3g}".format(*run.numbers.loc[label, ["mean", "sd"]])
        lines.append(line)
    seconds = "".join(f"{run.seconds:24.1f}" for run in runs)
    lines.append(f"{'seconds':{width + 10}s}{seconds}")
    for run in runs:
        if "ESS" in run.numbers:
            least = run.numbers.loc[run.numbers.index.isin(runs[0].numbers.index), "ESS"]
            where = f"{least.min():.0f} ({least.idxmin()})"
            lines.append(f"{run.title}: smallest effective sample size {where}")
    return "\n".join(lines)


# ---- figures ----------------------------------------------------------------------------

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#00684B", "0.45"
COLOURS = {"nested": BLUE, "nested, each tenth day": GREEN}


def densities(axis, name, runs, truth, label):
    """Histograms of a number's draws, and what is true."""
    shown = [run for run in runs if name in run.draws]
    every = [run.draws[name] for run in shown]
    low, high = (f(np.quantile(d, q) for d in every) for f, q in ((min, 0.002), (max, 0.985)))
    for run, draws in zip(shown, every, strict=True):
        first = run is runs[0]
        axis.hist(
            draws,
            bins=np.linspace(low, high, 61 if len(draws) > 4000 else 31),
            density=True,
            color=COLOURS.get(run.title, ORANGE),
            histtype="stepfilled" if first else "step",
            alpha=0.4 if first else 1.0,
            lw=0 if first else 1.2,
            label=run.title,
        )
    if name in truth:
        axis.axvline(truth[name], color="k", ls="--", lw=1.0, label="true")
    axis.set(xlabel=label, xlim=(low, high), yticks=[], ylim=(0.0, None))


def band(axis, x, mean, sd, **options):
    """Mean and two standard deviations on either side."""
    axis.fill_between(x, mean - 2 * sd, mean + 2 * sd, color=BLUE, alpha=0.3, lw=0, **options)
    axis.plot(x, mean, color=BLUE, lw=1.5)


def new_figure(size, layout):
    """A figure and its axes by name."""
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    axes = figure.subplot_mosaic(layout)
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_of(figure, *axes, **options):
    """One legend for all of these axes, below."""
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    options = {"loc": "outside lower center", "ncols": len(found), "frameon": False} | options
    figure.legend(list(found.values()), list(found), **options)


def draw_daily(posterior, simulated, runs):
    """Wednesdays with their intensity, parts about their means, effects, densities."""
    (days, weekday, _, y), truth = simulated
    start = np.datetime64("2001-01-01").astype("datetime64[D]")
    figure, axes = new_figure(
        (12.0, 9.0),
        [["eta"] * 4, ["trend"] * 2 + ["season"] * 2, ["effects"] * 2 + ["a", "b"]]
        ,
    )
    return figure

"""
Nested inference: hyperparameters integrated, and one Gaussian over all of the field
====================================================================================

Three models with data simulated from them, by ``sgp.nested``:

* ``daily``: counts of each day of twenty years, 7305 of them: a trend, a season that
  repeats each year, effects of weekdays, and one of holidays;
* ``growth``: heights of 400 children by age, with an intercept for each of 30 schools;
* ``map``: a log-Gaussian Cox process in the 400 cells of a map, with a covariate.

Prints means, standard deviations and quantiles of hyperparameters and effects, and saves a
figure for each model. With ``--nuts`` NUTS runs too, on the model made sparse by
``sgp.sparsify`` with as many inducing points, and a table has both side by side. For
``daily`` it sees each tenth day, since with all of them it takes ten times as long, and
nested inference then runs on these days as well.

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
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

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
    """Days since 2001-01-01, their weekdays, and whether they are holidays."""
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
    truth["weekday_contrast"] = truth["weekday"] - truth["weekday"].mean()
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
    values = np.asarray(values)
    for index in np.ndindex(values.shape):
        yield f"{name}[{', '.join(map(str, index))}]" if index else name, values[index]


def approximation(example, args):
    """
    Inducing points by their kernels: with one that is periodic those that are evenly
    spread over twenty years may all be of one time of the year.
    """
    return sgp.SVGP(args.num_inducing or example.inducing, "greedy")


def draws_of(q, number=8192, seed=0):
    """Of a number whose posterior is a mixture of Gaussians."""
    rng = np.random.default_rng(seed)
    node = rng.choice(len(q.weights), number, p=q.weights / q.weights.sum())
    return q.means[node] + np.sqrt(q.variances[node]) * rng.normal(size=number)


def integrate(example, data, args, title="nested"):
    """Nested inference: its result, and what it found."""
    posterior = sgp.nested(
        example.model,
        approximation(example, args),
        data,
        max_nodes=args.max_nodes,
        progress_bar=not args.quiet,
    )
    numbers, draws = posterior.summary(), dict(posterior.hyperparameters)
    few = posterior.posterior(*(a[:2] for a in data))  # effects do not depend on rows
    for name in example.sums:
        q = few[name]
        columns = q.mean, q.sd, *q.quantile([0.05, 0.5, 0.95])
        for found in zip(*(rows(name, column) for column in columns), strict=True):
            numbers.loc[found[0][0]] = [value for _, value in found]
    for name in posterior.field.effects:
        if few[name].mean.ndim == 0:
            draws[name] = draws_of(few[name])
    return posterior, Run(title, numbers, draws, posterior.seconds)


def run_nuts(example, data, args):
    """NUTS on the sparse model."""
    option = approximation(example, args)
    model = sgp.sparsify(example.model, option, example.expectation)
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
        columns = values.mean(axis=0), values.std(axis=0, ddof=1), size
        for numbers in zip(*(rows(name, column) for column in columns), strict=True):
            found[numbers[0][0]] = [value for _, value in numbers]
    columns = ["mean", "sd", "ESS"]
    numbers = pd.DataFrame.from_dict(found, orient="index", columns=columns)
    return Run("NUTS", numbers, draws, seconds)


def table(runs, truth):
    """Means and standard deviations side by side, for the rows that all have."""
    true = {label: v for name in truth for label, v in rows(name, truth[name])}
    width = max(len(label) for label in runs[0].numbers.index) + 2
    lines = [" " * (width + 10) + "".join(f"{run.title:>24s}" for run in runs)]
    lines.append(f"{'':{width}s}{'true':>10s}" + f"{'mean':>14s}{'sd':>10s}" * len(runs))
    common = [k for k in runs[0].numbers.index if all(k in r.numbers.index for r in runs)]
    for label in common:
        shown = f"{true[label]:.4g}" if label in true else "-"
        line = f"{label:{width}s}{shown:>10s}"
        for run in runs:
            line += "{:14.4g}{:10.3g}".format(*run.numbers.loc[label, ["mean", "sd"]])
        lines.append(line)
    seconds = "".join(f"{run.seconds:24.1f}" for run in runs)
    lines.append(f"{'seconds':{width + 10}s}{seconds}")
    for run in runs:
        if "ESS" in run.numbers:
            least = run.numbers.loc[common, "ESS"]
            where = f"{least.min():.0f} ({least.idxmin()})"
            lines.append(f"{run.title}: smallest effective sample size {where}")
    return "\n".join(lines)


# ---- figures ----------------------------------------------------------------------------

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#00684B", "0.55"
COLOURS = {"nested": BLUE, "nested, thinned": GREEN}


def new_figure(size, layout):
    """A figure and its axes by name."""
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    axes = figure.subplot_mosaic(layout)
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def band(axis, x, mean, sd, label=None, **options):
    """Mean and two standard deviations on either side."""
    options = {"color": BLUE, "alpha": 0.3, "lw": 0} | options
    axis.fill_between(x, mean - 2 * sd, mean + 2 * sd, label=label, **options)
    axis.plot(x, mean, color=BLUE, lw=1.3)


def intervals(axis, runs, labels, truth):
    """Mean and two standard deviations of numbers by each method, and what is true."""
    x = np.arange(len(labels))
    for i, run in enumerate(runs):
        numbers = run.numbers.loc[labels]
        where = x + 0.7 / len(runs) * (i - (len(runs) - 1) / 2)
        options = {"ms": 3, "lw": 1.5, "color": COLOURS.get(run.title, ORANGE)}
        axis.errorbar(where, numbers["mean"], 2 * numbers["sd"], fmt="o", **options)
    axis.plot(x, truth, "k_", ms=11, mew=1.3)
    axis.set_xlim(-0.6, len(labels) - 0.4)


def density(axis, runs, name, truth, label):
    """Histograms of draws of a number by each method, and what is true."""
    shown = [(run, run.draws[name]) for run in runs if name in run.draws]
    low = min(np.quantile(draws, 0.001) for _, draws in shown)
    high = max(np.quantile(draws, 0.985) for _, draws in shown)
    for i, (run, draws) in enumerate(shown):
        bins = np.linspace(low, high, 36 if len(draws) > 1000 else 21)
        options = {"color": COLOURS.get(run.title, ORANGE), "histtype": "step", "lw": 1.4}
        if i == 0:
            options |= {"histtype": "stepfilled", "alpha": 0.4, "lw": 0}
        axis.hist(draws, bins, density=True, **options)
    if name in truth:
        axis.axvline(truth[name], color="k", ls="--", lw=1.1)
    axis.set(xlabel=label, xlim=(low, high), yticks=[])
    axis.spines["left"].set_visible(False)


def add_legend(figure, runs, *others):
    """What the colours are, below all axes."""
    handles = [Patch(color=COLOURS.get(run.title, ORANGE), alpha=0.7) for run in runs]
    handles.append(Line2D([], [], color="k", ls="--", lw=1.1))
    labels = [*(run.title for run in runs), "true", *(label for label, _ in others)]
    handles += [handle for _, handle in others]
    options = {"loc": "outside lower center", "ncols": len(labels), "frameon": False}
    figure.legend(handles, labels, **options)


def draw_daily(posterior, simulated, runs):
    """Wednesdays with their intensity; parts about their means; effects; densities."""
    layout = [["eta"] * 4, ["trend", "trend", "season", "season"]]
    layout += [["effects", "effects", "trend_variance", "trend_lengthscale"]]
    layout += [["effects", "effects", "season_variance", "season_lengthscale"]]
    figure, axes = new_figure((12.0, 11.0), layout)
    days, weekday, holiday, _ = simulated.data
    wednesdays = np.flatnonzero((weekday == 2) & (holiday == 0))
    of_trend = np.linspace(0, len(days) - 1, 120).astype(int)
    of_season = np.arange(0, min(366, len(days)), 4)
    parts = Parts(posterior, simulated, np.concatenate([of_trend, of_season]), wednesdays)
    parts.draw_counts(axes["eta"])
    parts.draw(axes["trend"], "trend", slice(None, 120), 2001 + of_trend / YEAR)
    axes["trend"].set(
        xlabel="year", ylabel="trend (log counts)", xlim=(2001, 2001 + len(days) / YEAR)
    )
    parts.draw(axes["season"], "season", slice(120, None), of_season)
    for name in ("eta", "trend"):
        axes[name].xaxis.set_major_locator(MaxNLocator(integer=True))
    first = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])
    axes["season"].set_xticks(first, "JFMAMJJASOND", ha="left")
    axes["season"].set(xlabel="month", ylabel="season (log counts)", xlim=(0, 366))
    labels = [f"weekday_contrast[{i}]" for i in range(7)] + ["holiday"]
    truth = [*simulated.truth["weekday_contrast"], simulated.truth["holiday"]]
    intervals(axes["effects"], runs, labels, truth)
    axes["effects"].axhline(0.0, color="0.8", lw=0.8, zorder=0)
    axes["effects"].set_xticks(range(8), [*WEEKDAYS, "holiday"])
    axes["effects"].set_ylabel("effect (log counts); weekdays about their mean")
    for name, unit in {"trend": " (days)", "season": ""}.items():
        for kind in ("variance", "lengthscale"):
            label = f"{kind} of the {name}" + (unit if kind == "lengthscale" else "")
            site = f"{name}_{kind}"
            density(axes[site], runs, site, simulated.truth, label)
    shades = [("±2 sd", 0.4), ("±2 sd with the level", 0.12)]
    others = [(label, Patch(color=BLUE, alpha=alpha, lw=0)) for label, alpha in shades]
    add_legend(figure, runs, *others)
    return figure


class Parts:
    """
    Posterior of the parts of the daily model.

    :param posterior: the result.
    :param simulated: the data.
    :param few: rows for draws of trend and season together.
    :param many: rows for the intensity.
    """

    def __init__(self, posterior, simulated, few, many):
        everywhere = np.concatenate([few, many])
        (days, *_, y), truth = simulated
        self.x, self.y = 2001 + days[many, 0] / YEAR, y[many]
        self.truth = {k: truth[k][everywhere] for k in ("trend", "season", "eta")}
        new = tuple(a[everywhere] for a in simulated.data[:-1])
        self.marginals, self.size = posterior.posterior(*new), len(few)
        new = tuple(a[few] for a in simulated.data[:-1])
        self.draws = posterior.sample(jax.random.key(0), *new, sample_shape=(400,))

    def draw(self, axis, name, rows, x):
        """A site about its mean, of joint draws, and with its level."""
        draws = np.asarray(self.draws[name])[:, rows]
        about = draws - draws.mean(axis=1, keepdims=True)
        middle, sd = about.mean(axis=0), self.marginals[name].sd[: self.size][rows]
        band(axis, x, middle, sd, alpha=0.12)
        band(axis, x, middle, about.std(axis=0), alpha=0.4)
        truth = self.truth[name][: self.size][rows]
        axis.plot(x, truth - truth.mean(), "k--", lw=1.1)

    def draw_counts(self, axis):
        """Counts and the intensity."""
        eta = self.marginals["eta"]
        low, middle, high = np.exp(eta.quantile([0.025, 0.5, 0.975])[:, self.size :])
        x, options = self.x, {"color": BLUE, "label": "posterior intensity, 95 %"}
        axis.plot(x, self.y, ".", color=GREY, ms=3, label="counts")
        axis.fill_between(x, low, high, alpha=0.4, lw=0, **options)
        axis.plot(x, middle, color=BLUE, lw=1.0)
        axis.plot(x, np.exp(self.truth["eta"][self.size :]), "k--", lw=0.7)
        axis.set(xlabel="year", ylabel="counts on Wednesdays", xlim=(x[0], x[-1]))
        axis.set_ylim(0.0, 1.25 * self.y.max())
        axis.legend(loc="upper left", frameon=False, ncols=2)


def draw_growth(posterior, simulated, runs):
    """The curve with the data, schools, and densities."""
    (age, _, y), truth = simulated
    names = ("variance", "lengthscale", "tau", "noise")
    layout = [["curve", "curve", "schools", "schools"], list(names)]
    figure, axes = new_figure((12.0, 7.0), layout)
    x = np.linspace(2.0, 18.0, 100)
    curve = posterior.posterior(x[:, None], np.zeros(100, int))["curve"]
    axes["curve"].plot(age[:, 0], y, ".", color=GREY, ms=3.5, label="children")
    label = "average school, ±2 sd"
    band(axes["curve"], x, HEIGHT + curve.mean, curve.sd, label, alpha=0.4)
    axes["curve"].plot(x, growth_curve(x), "k--", lw=1.1)
    axes["curve"].legend(loc="upper left", frameon=False)
    axes["curve"].set(xlabel="age (years)", ylabel="height (cm)", xlim=(2, 18))
    means = runs[0].numbers.loc[[f"school[{i}]" for i in range(30)], "mean"]
    order = np.argsort(means.to_numpy())
    labels = [f"school[{i}]" for i in order]
    intervals(axes["schools"], runs, labels, truth["school"][order])
    axes["schools"].axhline(0.0, color="0.8", lw=0.8, zorder=0)
    axes["schools"].set(xlabel="schools, by posterior mean", ylabel="intercept (cm), ±2 sd")
    axes["schools"].set_xticks([])
    shown = "variance (cm²)", "lengthscale (years)", "tau (cm)", "noise (cm)"
    for name, label in zip(names, shown, strict=True):
        density(axes[name], runs, name, truth, label)
    add_legend(figure, runs)
    return figure


def intensity(eta):
    """Mean and sd of exp(eta), of the mixture of Gaussians of eta."""
    each = np.exp(eta.means + 0.5 * eta.variances)
    mean = eta.weights @ each
    second = eta.weights @ (each**2 * np.exp(eta.variances))
    return mean, np.sqrt(second - mean**2)


def draw_map(posterior, simulated, runs):
    """Counts, covariate, intensities, and densities."""
    (_, covariate, area, y), truth = simulated
    layout = [["counts", "true", "mean", "sd"]]
    layout += [["covariate", "variance", "lengthscale", "slope"]]
    figure, axes = new_figure((13.0, 6.6), layout)
    mean, sd = intensity(posterior.posterior(*simulated.data)["eta"])
    true = np.exp(truth["eta"])
    top = max(mean.max(), true.max())
    image(axes["counts"], y, "events in each cell", "Greys")
    image(axes["true"], true, "true intensity (events / km²)", "viridis", top)
    image(axes["mean"], mean, "posterior mean (events / km²)", "viridis", top)
    image(axes["sd"], sd, "posterior sd (events / km²)", "magma")
    limit = np.abs(covariate).max()
    image(axes["covariate"], covariate, "covariate (standardised)", "RdBu_r", limit, -limit)
    for name in ("true", "mean", "sd"):
        axes[name].set_ylabel("")
    labels = "variance of f", "lengthscale of f (km)", "slope (log intensity)"
    for name, label in zip(("variance", "lengthscale", "slope"), labels, strict=True):
        density(axes[name], runs, name, truth, label)
    add_legend(figure, runs)
    return figure


def image(axis, values, title, colours, high=None, low=0.0):
    """Values of the cells of the map, with a scale."""
    side = int(np.sqrt(len(values)))
    shown = axis.imshow(
        values.reshape(side, side),
        origin="lower",
        extent=(0, SIDE, 0, SIDE),
        cmap=colours,
        vmin=low,
        vmax=high,
    )
    axis.set_title(title, fontsize=10)
    axis.set(xlabel="east (km)", ylabel="north (km)")
    axis.figure.colorbar(shown, ax=axis, shrink=0.8, pad=0.02)


# ---- command line -----------------------------------------------------------------------


class Example(NamedTuple):
    """A model, its data, and how it is inferred."""

    model: Callable
    simulate: Callable
    draw: Callable
    """From the result, the data and all runs to a figure."""
    inducing: int
    """Number of points of each GP site."""
    for_nuts: Callable = lambda simulated: simulated
    """What of the data NUTS sees."""
    expectation: sgp.GaussHermite | None = None
    """For the sparse model."""
    dense_mass: bool = False
    sums: tuple = ()
    """Deterministic sites to tell of."""


EXAMPLES = {
    "daily": Example(
        daily,
        simulate_daily,
        draw_daily,
        inducing=20,
        for_nuts=thinned,
        # What the inducing points leave of the functions is little.
        expectation=sgp.GaussHermite(3),
        dense_mass=True,
        sums=("weekday_contrast",),
    ),
    # Two nodes are exact: the log density of a normal is quadratic in its mean.
    "growth": Example(
        growth, simulate_growth, draw_growth, 15, expectation=sgp.GaussHermite(2)
    ),
    "map": Example(cox_map, simulate_map, draw_map, inducing=120),
}


def run(name, simulated, args):
    """
    One model: prints what was found, and saves the figure.

    :param name: a key of ``EXAMPLES``.
    :param simulated: its data.
    :return: the result of nested inference, and all runs.
    """
    example = EXAMPLES[name]
    print(f"{name}, {len(simulated.data[-1])} rows", flush=True)
    posterior, found = integrate(example, simulated.data, args)
    print(f"{posterior}\n\n{found.numbers.to_string(float_format='{:.4g}'.format)}\n")
    runs = [found]
    if args.nuts:
        fewer, beside = example.for_nuts(simulated), [found]
        if fewer is not simulated:
            _, again = integrate(example, fewer.data, args, "nested, thinned")
            runs, beside = [found, again], [again]
        sampled = run_nuts(example, fewer.data, args)
        runs, beside = [*runs, sampled], [*beside, sampled]
        print(f"{table(beside, simulated.truth)}\n")
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"nested_{name}.png"
    example.draw(posterior, simulated, runs).savefig(path, dpi=150)
    print(f"figure: {path}\n", flush=True)
    return posterior, runs


def main(args):
    """All models that were asked for."""
    numpyro.enable_x64()
    for name in args.models:
        run(name, EXAMPLES[name].simulate(), args)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description="Nested inference of three models, with simulated data."
    )
    parser.add_argument(
        "models", nargs="*", metavar="model", help=f"{', '.join(EXAMPLES)}; default: all"
    )
    parser.add_argument("--nuts", action="store_true", help="NUTS as well (some minutes)")
    parser.add_argument("--num-warmup", type=int, default=500, help="of NUTS; default: 500")
    parser.add_argument(
        "--num-samples", type=int, default=500, help="of NUTS; default: 500"
    )
    parser.add_argument(
        "--max-nodes", type=int, default=3000, help="of the hyperparameters; default: 3000"
    )
    parser.add_argument("--num-inducing", type=int, help="points of each GP site")
    parser.add_argument("--seed", type=int, default=0, help="of NUTS; default: 0")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("figures"),
        help="folder for figures; default: figures",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args(argv)
    args.models = args.models or list(EXAMPLES)
    unknown = [name for name in args.models if name not in EXAMPLES]
    if unknown:
        parser.error(f"no model {unknown[0]!r}: choose from {', '.join(EXAMPLES)}.")
    return args


if __name__ == "__main__":
    main(parse())

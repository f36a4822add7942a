"""Figures: what is drawn against what the fits say, the axes that are given, and errors."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from matplotlib.colors import to_rgba
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics.arviz import as_tree
from numpyro_sgp.fitting.verdict import Cause, Verdict
from numpyro_sgp.plots import (
    plot_comparison,
    plot_components,
    plot_inducing,
    plot_panels,
    plot_posterior,
    plot_training,
    plot_verdict,
    scene,
)

RNG = np.random.default_rng(0)
X = np.stack([np.linspace(-2.0, 2.0, 12), RNG.normal(size=12)], axis=1)
GROUP = np.arange(12) % 3
Y = np.sin(X[:, 0]) + 0.2 * GROUP
LINE = X[:, :1]


def additive(X, group, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", 3):
        of_group = numpyro.sample("of_group", dist.Normal(0.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    kernel = sgp.kernels.RBF(1.0, scale, active_dims=[1])
    season = numpyro.sample("season", sgp.GaussianProcess(kernel, X))
    trend = numpyro.sample("trend", sgp.GaussianProcess(sgp.kernels.RBF(), X[:, :1]))
    eta = numpyro.deterministic("eta", level + season + trend + of_group[group])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 0.3), obs=y)


def simple(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def untrained(model, args, approximation=None, base_guide=None):
    """A fit of a few parameters' starting values, moved."""
    options = {} if base_guide is None else {"base_guide": base_guide}
    guide = sgp.AutoSparseGP(model, approximation or sgp.SVGP(4), **options)
    svi = SVI(model, guide, optax.sgd(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *args))
    params = {
        k: v + 0.25 if "qu_mu" in k or k.endswith(("_Z", "_O")) else v
        for k, v in params.items()
    }
    return sgp.Fitted(guide, params, args)


@pytest.fixture(scope="module")
def of_additive():
    return untrained(additive, (X, GROUP, Y), base_guide=AutoNormal)


@pytest.fixture(scope="module")
def of_nested():
    data = X, GROUP, Y
    return sgp.nested(additive, sgp.SVGP(4), data, progress_bar=False)


@pytest.fixture(scope="module")
def line():
    return untrained(simple, (LINE, Y), sgp.SOLVEGP(4, 3))


@pytest.fixture(scope="module")
def plane():
    return untrained(simple, (X, Y))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def lines(ax):
    """Drawn lines by label."""
    return {line.get_label(): line.get_xydata() for line in ax.get_lines()}


def band(ax, i=0):
    """Edges of a band, low and high."""
    vertices = ax.collections[i].get_paths()[0].vertices
    return vertices[:, 1].min(), vertices[:, 1].max()


# ---- which site --------------------------------------------------------------------------


@pytest.mark.slow
def test_of_nested_inference_a_response_comes_first_then_what_the_likelihood_is_made_of():
    """A ratio of f, which comes after all, was drawn where a response has no mean."""

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.deterministic("a_ratio", f / 0.3)
        eta = numpyro.deterministic("eta", level + f)
        numpyro.deterministic("double", 2.0 * eta)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Cauchy(eta, 0.3), obs=y)

    found = sgp.nested(model, sgp.SVGP(4), (LINE, Y), progress_bar=False)
    assert found.plot(num_points=5).get_ylabel() == "eta"
    assert plot_comparison({"nested": found}, num_points=5).get_ylabel() == "eta"
    predictions, asked = found.predict(LINE), found.shown()
    assert {"a_ratio", "double"} < {*predictions}
    one = predictions["f"]
    assert scene.chosen(asked, {**predictions, "y": one}, None, len(LINE)) == "y"
    asked.sums = ()
    assert scene.chosen(asked, dict(predictions), None, len(LINE)) == "f"


# ---- posteriors -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_method_and_the_function_draw_the_same(line):
    ax, other = line.plot(num_points=7), plot_posterior(line, num_points=7)
    assert ax is not other and lines(ax).keys() == lines(other).keys()
    assert_array_equal(lines(ax)["mean of y"], lines(other)["mean of y"])


@pytest.mark.slow
def test_a_second_map_has_the_standard_deviation(plane):
    _, (left, right) = plt.subplots(1, 2)
    assert plot_posterior(plane, left, num_points=3) is left
    assert plane.plot(right, num_points=3, statistic="sd", X=X) is right
    corner = X.min(axis=0)
    known = plane.predict(corner[None])["y"].sd[0]
    found = np.asarray(right.collections[0].get_array()).reshape(3, 3)[0, 0]
    assert_allclose(found, known, rtol=1e-6)
    labels = [ax.get_ylabel() for ax in left.figure.axes[2:]]
    assert labels == ["mean of y", "sd of y"]


def test_what_cannot_be_drawn_of_a_posterior_is_told(line):
    with pytest.raises(ValueError, match="statistic must be one of .* got 'median'"):
        plot_posterior(line, statistic="median")
    with pytest.raises(ValueError, match="statistic='sd' is for inputs with two columns"):
        plot_posterior(line, statistic="sd")
    with pytest.raises(TypeError, match="what sgp.fit or sgp.nested returned.* got dict"):
        plot_posterior(line.params)


def test_a_map_of_no_area_is_refused():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    fitted = untrained(model, (np.c_[LINE, LINE**2], Y))
    with pytest.raises(ValueError, match=r"map, but X\[:, 1\] is 0.5 in every row"):
        fitted.plot(X=np.c_[LINE, np.full(len(LINE), 0.5)])


def of_offsets(X, offset, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + offset, 0.3), obs=y)


@pytest.mark.slow
def test_other_arguments_go_with_the_rows_of_inputs_in_any_order():
    fitted = untrained(of_offsets, (LINE, np.zeros(12), Y))
    new, offset = np.array([[1.0], [-1.0], [0.5]]), np.array([10.0, 20.0, 30.0])
    order = [1, 2, 0]
    want = fitted.predict(new[order], offset[order])["y"].mean
    _, (left, right) = plt.subplots(1, 2)
    fitted.plot(left, X=new, offset=offset)
    assert_allclose(lines(left)["mean of y"], np.c_[new[order], want], rtol=1e-12)
    plot_comparison({"it": fitted}, right, X=new, offset=offset)
    assert_allclose(lines(right)["it"], np.c_[new[order], want], rtol=1e-12)


def test_arguments_of_other_lengths_are_told_and_not_drawn_around():
    """Of f, which has no offset, there was a figure, under the same call."""
    fitted = untrained(of_offsets, (LINE, np.zeros(12), Y))
    with pytest.raises(ValueError, match="Arrays do not broadcast"):
        fitted.plot(X=np.linspace(-1.0, 1.0, 5)[:, None], offset=np.zeros(12))


@pytest.mark.slow
def test_a_model_that_takes_more_than_inputs_is_given_it_by_name(of_additive):
    with pytest.raises(
        TypeError, match=r"needs 'group' beside .* plot\(X=X_new, group=...\)"
    ):
        of_additive.plot(site="y")


def test_colours_are_those_of_the_style(line):
    style = {"axes.prop_cycle": plt.cycler(color=["#123456"]), "text.color": "#abcdef"}
    with plt.rc_context(style):
        ax = plot_posterior(line, num_points=3)
    colours = {drawn.get_label(): drawn.get_color() for drawn in ax.get_lines()}
    assert colours["mean of y"] == "#123456"
    assert colours["data"] == colours["inducing points"] == "#abcdef"


# ---- components -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_site_is_drawn_over_the_column_that_its_kernel_reads(of_additive):
    axes = plot_components(of_additive, level=0.8)
    assert [ax.get_ylabel() for ax in axes] == ["season", "trend", "level", "of_group"]
    assert [ax.get_xlabel() for ax in axes[:2]] == ["X[:, 1]", "X[:, 0]"]
    order = np.argsort(X[:, 1])
    x, median = lines(axes[0])["median"].T
    q = of_additive.posterior(X, GROUP)["season"]
    assert_array_equal(x, X[order, 1])
    assert_allclose(median, q.mean[order], rtol=1e-9)
    low = q.mean - 1.2815516 * jnp.sqrt(q.variance)
    assert_allclose(band(axes[0])[0], low.min(), rtol=1e-6)


@pytest.mark.slow
def test_effects_have_a_bar_for_each_number(of_additive):
    axes = plot_components(of_additive, sites=["of_group"], level=0.8)
    known = np.asarray(of_additive.quantiles([0.1, 0.5, 0.9])["of_group"])
    assert_allclose(axes[0].get_lines()[0].get_ydata(), known[1])
    (bars,) = axes[0].collections
    found = np.array([segment[:, 1] for segment in bars.get_segments()])
    assert_allclose(found, known[[0, 2]].T, rtol=1e-6)


@pytest.mark.slow
def test_components_of_nested_inference(of_nested):
    _, given = plt.subplots(2, 3)
    axes = plot_components(of_nested, axes=given)
    assert list(axes) == list(given.flat[:4])
    known = of_nested.posterior()["trend"]
    assert_allclose(lines(axes[1])["median"][:, 1], known.quantile(0.5), rtol=1e-6)
    (ax,) = plot_components(of_nested, X[:5], GROUP[:5], sites="trend")
    assert_array_equal(lines(ax)["median"][:, 0], X[:5, 0])


def test_two_columns_are_points_in_colours(plane):
    (ax,) = plot_components(plane)
    assert_array_equal(ax.collections[0].get_offsets(), X)
    assert_allclose(ax.collections[0].get_array(), plane.posterior(X)["f"].mean)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("X[:, 0]", "X[:, 1]")


def test_a_mean_of_another_column_is_drawn_over_it_too():
    def model(X, y=None):
        kernel = sgp.kernels.RBF(1.0, 1.0, active_dims=[0])
        process = sgp.GaussianProcess(kernel, X, mean=lambda X: 3.0 * X[:, 1])
        f = numpyro.sample("f", process)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    fitted = untrained(model, (X, X[:, 0]))
    (ax,) = plot_components(fitted, sites=["f"])
    assert_array_equal(ax.collections[0].get_offsets(), X)
    assert_allclose(ax.collections[0].get_array(), fitted.posterior(X)["f"].mean)


@pytest.mark.slow
def test_what_cannot_be_drawn_of_components_is_told(of_additive, plane):
    with pytest.raises(ValueError, match=r"no sites \['g'\]; there are \['level', 'of_gr"):
        plot_components(of_additive, sites=["g", "trend"])
    with pytest.raises(ValueError, match="4 sites to draw, but 1 axes"):
        plot_components(of_additive, axes=plt.figure().subplots())
    with pytest.raises(ValueError, match="not have its training data: say where"):
        plot_components(sgp.Fitted(plane.guide, plane.params))
    wide = RNG.normal(size=(12, 3))
    with pytest.raises(ValueError, match="'f' reads 3 columns of its inputs"):
        plot_components(untrained(simple, (wide, Y)))
    with pytest.raises(ValueError, match=r"Each function of 'f' has .* \(2, 12, 1\)"):
        plot_components(untrained(apart, APART))


def apart(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[1]):
        numpyro.sample("y", dist.Normal(f.sum(axis=0), 0.3), obs=y)


APART = np.stack([LINE, LINE + 1.0]), Y


# ---- inducing points --------------------------------------------------------------------


def test_inducing_points_are_drawn_where_they_began_and_are(line):
    _, ax = plt.subplots()
    assert plot_inducing(line, ax) is ax
    drawn, start = lines(ax), line.guide.known().sites["f"].points
    for i, what in enumerate(("inducing points", "orthogonal points")):
        at_first, now = drawn[f"{what}, at first"][:, 0], drawn[what][:, 0]
        assert_allclose(at_first, np.ravel(start[i]))
        assert_allclose(now, at_first + 0.25)
    assert_array_equal(drawn["data"], np.stack([LINE[:, 0], Y], axis=1))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("X", "y")


def test_inputs_of_all_functions_are_drawn_where_each_has_its_own():
    ax = plot_inducing(untrained(apart, APART, sgp.SVGP(inducing=LINE[:4])))
    assert_array_equal(lines(ax)["data"][:, 0], APART[0].ravel())


def test_of_more_columns_two_are_chosen():
    fitted = untrained(simple, (RNG.normal(size=(12, 3)), Y))
    with pytest.raises(ValueError, match="'f' has inputs with 3 columns: say which"):
        plot_inducing(fitted)
    ax = plot_inducing(fitted, columns=(2, 0))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("X[:, 2]", "X[:, 0]")
    Z = fitted.params["f_auto_Z"]
    assert_allclose(lines(ax)["inducing points"], Z[:, [2, 0]])
    assert_array_equal(lines(ax)["data"], fitted.args[0][:, [2, 0]])
    assert plot_inducing(fitted, columns=1).get_ylabel() == "y"
    with pytest.raises(ValueError, match=r"one or two numbers from 0 to 2, got \(0, 3\)"):
        plot_inducing(fitted, columns=(0, 3))
    with pytest.raises(ValueError, match="no GP site 'g'"):
        plot_inducing(fitted, site="g")


@pytest.mark.slow
def test_inducing_points_of_nested_inference_and_of_a_chosen_site(of_nested):
    ax = plot_inducing(of_nested, site="trend")
    Z = of_nested.nodes.points["trend"]["Z"]
    assert_allclose(lines(ax)["inducing points"][:, 0], np.ravel(Z))
    assert ax.get_xlabel() == "X[:, 0]"


def test_points_that_are_no_inputs_have_no_place():
    features = sgp.FourierFeatures(np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.5]]))
    fitted = untrained(simple, (LINE, Y), sgp.SVGP(inducing=features))
    with pytest.raises(ValueError, match="no inputs of a GP site"):
        plot_inducing(fitted)


# ---- verdicts and trainings -------------------------------------------------------------


def verdict(*nats):
    names = "q(u)", "other parameters", "inducing points", "family", "point estimates"
    pairs = zip(names, nats, strict=True)
    return Verdict({name: Cause(name, n, 0.1 * (n == 0.2)) for name, n in pairs})


def test_a_verdict_has_a_bar_for_each_cause_that_is_known():
    _, ax = plt.subplots()
    assert plot_verdict(verdict(0.01, 0.2, 2.5, np.inf, np.nan), ax) is ax
    widths = [bar.get_width() for bar in ax.patches]
    assert_allclose(widths, [0.01, 0.2, 2.5, 2.5])  # without an end: as the longest
    colours = [bar.get_facecolor() for bar in ax.patches]
    assert colours == [to_rgba(c) for c in ("C0", "C0", "C1", "C1")]
    assert ax.patches[3].get_hatch() and not ax.patches[2].get_hatch()
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["0.01", "0.2 ± 0.1", "2.5", "many", "not known"]
    assert ax.get_xscale() == "linear" and ax.get_xlabel() == "nats"
    assert plot_verdict(verdict(0.0, 50.0, 0.0, 0.0, 0.0)).get_xscale() == "symlog"


def test_a_fit_is_checked_for_its_verdict():
    found = verdict(0.0, 0.0, 0.0, 0.0, 0.0)
    ax = plot_verdict(SimpleNamespace(check=lambda: found))
    assert ax.get_title().replace("\n", " ") == found.summary
    with pytest.raises(TypeError, match="what fitted.check.. returned, or a fit, got int"):
        plot_verdict(3)


def test_losses_are_drawn_above_the_bound():
    losses = np.array([20.0, 9.0, 5.5, 5.0])
    told = {"bound": -4.0, "stopped": "converged", "seconds": 1.25}
    _, ax = plt.subplots()
    assert plot_training(SimpleNamespace(losses=losses, **told), ax) is ax
    assert_allclose(lines(ax)["loss"], np.stack([np.arange(1, 5), losses - 4.0], axis=1))
    assert "end: 4" in lines(ax) and ax.get_title() == "1.2 s: converged"
    assert ax.get_yscale() == "symlog"
    ax = plot_training(jnp.asarray(losses[1:]))  # without a bound: above the last one
    assert_allclose(lines(ax)["loss"][:, 1], losses[1:] - 5.0)
    assert ax.get_yscale() == "linear"


def test_noisy_losses_have_a_running_mean():
    losses = RNG.normal(size=100)
    drawn = lines(plot_training(losses))
    x, mean = drawn["mean over 4 steps"].T
    end = losses[-5:].mean()
    assert_allclose((x[0], mean[0]), (2.5, losses[:4].mean() - end))
    assert len(x) == 97


@pytest.mark.parametrize("losses", [None, [], [np.nan]])
def test_no_losses_are_told(losses):
    with pytest.raises(ValueError, match="no losses to draw"):
        plot_training(SimpleNamespace(losses=losses))


# ---- comparisons ------------------------------------------------------------------------


@pytest.mark.slow
def test_fits_and_draws_are_drawn_over_each_other(line):
    other = untrained(simple, (LINE, Y))
    new = np.linspace(2.0, -2.0, 5)[:, None]
    draws = {"f": RNG.normal(size=(50, 5))}
    fits = {"draws": draws, "SOLVE": line, "SVGP": other}
    _, ax = plt.subplots()
    assert plot_comparison(fits, ax, site="f", X=new, level=0.5) is ax
    drawn = lines(ax)
    assert_allclose(drawn["draws"][:, 1], draws["f"].mean(axis=0)[::-1])
    assert_allclose(drawn["SVGP"][:, 1], other.posterior(new[::-1])["f"].mean)
    assert_array_equal(drawn["SVGP"][:, 0], new[::-1, 0])
    low = np.quantile(draws["f"], 0.25, axis=0).min()
    assert_allclose(band(ax)[0], low)
    assert len(ax.collections) == 3
    assert [t.get_text() for t in ax.get_legend().get_texts()] == list(fits)
    ax = plot_comparison({"SOLVE": line, "SVGP": other}, num_points=4)
    assert ax.get_ylabel() == "y" and "data" in lines(ax)


@pytest.mark.slow
def test_what_cannot_be_compared_is_told(line, plane):
    draws = {"f": np.zeros((3, 5))}
    with pytest.raises(TypeError, match="fits must be a dict .* got list"):
        plot_comparison([line])
    with pytest.raises(TypeError, match="what sgp.fit or sgp.nested returned.*got ndarray"):
        plot_comparison({"a": np.zeros((3, 5))})
    with pytest.raises(ValueError, match="no fit among these"):
        plot_comparison({"a": draws})
    with pytest.raises(ValueError, match="at which inputs the draws are"):
        plot_comparison({"a": draws, "b": line})
    with pytest.raises(ValueError, match="drawn over each other for one input column"):
        plot_comparison({"a": plane})
    with pytest.raises(
        ValueError, match=r"shape \(S, 4\) for these inputs X, got \(3, 5\)"
    ):
        plot_comparison({"a": draws, "b": line}, site="f", X=np.zeros(4))
    with pytest.raises(ValueError, match=r"'a' have no site 'y', only \['f'\]"):
        plot_comparison({"a": draws, "b": line}, site="y", X=np.zeros(5))
    with pytest.raises(ValueError, match="Fit 'b' has no prediction of 'g'"):
        plot_comparison({"b": line}, site="g", num_points=3)


def test_panels_go_into_given_axes():
    import arviz_base

    f = RNG.normal(size=(2, 1, 20, 5))
    fits = {
        k: arviz_base.from_dict({"posterior": {"f": v}})
        for k, v in zip("ab", f, strict=True)
    }
    comparison = sgp.compare({k: as_tree(v) for k, v in fits.items()})
    _, given = plt.subplots(1, 3)
    axes = plot_panels(comparison, axes=given)
    assert list(axes) == list(given[:2])
    assert [ax.get_title() for ax in axes] == ["a", "b"]
    assert_allclose(axes[1].lines[0].get_ydata(), f[1, 0].mean(axis=0))
    with pytest.raises(ValueError, match="2 panels to draw, but 1 axes"):
        plot_panels(comparison, axes=given[:1])


@pytest.mark.slow
def test_a_column_with_a_few_other_values_is_read():
    """Of rows that were looked at all had the same value: drawn over another column."""
    x = np.stack([np.linspace(0.0, 10.0, 200), 1.0 * (np.arange(200) % 67 == 3)], 1)

    def model(X, y=None):
        kernel = sgp.kernels.RBF(1.0, 1.0, active_dims=(1,))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        both = sgp.GaussianProcess(sgp.kernels.RBF(1.0, (2.0, 0.5)), X)
        g = numpyro.sample("g", both)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, 0.3), obs=y)

    fitted = untrained(model, (x, np.sin(x[:, 0])))
    (ax,) = plot_components(fitted, sites=["f"])
    assert ax.get_xlabel() == "X[:, 1]"
    (ax,) = plot_components(fitted, sites=["g"])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("X[:, 0]", "X[:, 1]")


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda fit: fit.plot(num_points=10.5), ValueError, "num_points must be a whole"),
        (lambda fit: fit.plot(level="a"), ValueError, "level must be between 0 and 1"),
        (lambda fit: plot_panels(3), TypeError, "what sgp.compare returned"),
        (lambda fit: plot_training("abc"), TypeError, "Losses must be real numbers"),
    ],
)
def test_arguments_of_other_kinds_are_refused(of_additive, call, error, told):
    with pytest.raises(error, match=told):
        call(of_additive)

"""Options, limits and values at the edge of what is allowed."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.distributions.tails import tails
from numpyro_sgp.fitting.progress import Limits
from numpyro_sgp.kernels import RBF, White
from numpyro_sgp.likelihoods import RobustMax
from numpyro_sgp.plots.scene import chosen, in_order
from numpyro_sgp.predictive import Prediction
from numpyro_sgp.predictive.predictions import read_rows

X = np.linspace(0.0, 6.0, 12)[:, None]
Y = np.sin(X[:, 0])
QUIET = {"progress_bar": False}


@pytest.mark.parametrize("high", [1e10, 1e20, 3e38])
def test_limits_that_stand_for_infinity_have_slopes_in_float32(high):
    with jax.enable_x64(False):
        f, high = jnp.float32(0.3), jnp.float32(high)

        def below(f, high):
            return tails(dist.Normal(f, 0.5)).below(high)

        assert np.isfinite(jax.grad(below)(f, high)) and below(f, high) == 0.0


def test_robust_classes_without_mistakes():
    f = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    log_prob = RobustMax(f, epsilon=0.0).log_prob(jnp.array([0, 1]))
    np.testing.assert_array_equal(log_prob, [0.0, -np.inf])


def test_a_black_box_of_whole_numbers_has_fractions():
    found = sgp.BlackBox(lambda y, f: y * f - jnp.exp(f) - 0.5, jnp.array([0, 1]))
    np.testing.assert_allclose(found.log_prob(jnp.array([0.0, 1.0])), [-1.5, 0.5 - np.e])


def test_centres_of_windows_may_be_lists():
    points, kernel = jnp.ones((3, 3)), RBF(1.0, jnp.ones(2))
    lists = sgp.FourierFeatures(points, [2.0, 1.0], centre=[0.0, 1.0])
    arrays = sgp.FourierFeatures(points, jnp.array([2.0, 1.0]), jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(
        lists.covariance(kernel, X[:, [0, 0]]), arrays.covariance(kernel, X[:, [0, 0]])
    )


@pytest.mark.slow
def test_the_same_inputs_are_the_same_inside_of_jit_and_outside():
    """White noise is that of the rows where inputs are one object."""
    inputs = jnp.asarray(X)

    def moments(X):
        prior = sgp.MarginalGP(RBF() + White(0.3), X, noise=0.1)
        posterior = prior.posterior(jnp.asarray(Y), X)
        return posterior.mean, posterior.variance

    for eager, compiled in zip(moments(inputs), jax.jit(moments)(inputs), strict=True):
        np.testing.assert_allclose(eager, compiled, rtol=1e-6)


def test_rows_are_the_last_axis_of_as_many():
    values = {"mean": np.zeros((3, 3)), "sd": np.ones((3, 3)), "quantiles": None}
    values = {"y": {**values, "probs": None}}
    assert read_rows(values, (), 3, 1.0, ())["y"].row_axis == 1


def test_steps_of_a_training_before_are_counted():
    limits = Limits(0.1, 60, None).after(25)
    assert limits.left == 35 and limits.after(50).left == 0
    assert Limits(0.1, None, None).left is None


def by_area(X, areas, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
    total = jnp.zeros(4).at[areas].add(jnp.exp(f))
    with numpyro.plate("areas", 4):
        numpyro.sample("y", dist.Normal(total, 0.3), obs=y)


@pytest.mark.slow
def test_a_fit_of_areas_from_a_file_knows_that_rows_are_tied(tmp_path):
    """Its two rows are of different areas: sds were six times as large."""
    areas = np.arange(12) % 4
    totals = np.bincount(areas, np.exp(Y))
    fitted = sgp.fit(by_area, sgp.SVGP(4), (X, areas, totals), steps=2, **QUIET)
    fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", by_area)
    assert loaded.guide.couples_rows
    known, found = (f.predict(X, areas)["y"].sd for f in (fitted, loaded))
    np.testing.assert_allclose(found, known, rtol=1e-6)


@pytest.mark.slow
def test_supports_that_are_made_of_the_data_need_them_at_loading(tmp_path):
    def model(X, y=None):
        longest = X.max() - X.min()
        lengthscale = numpyro.sample("lengthscale", dist.Uniform(0.05, longest))
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(1.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    options = {"base_guide": AutoNormal, "steps": 2, **QUIET}
    fitted = sgp.fit(model, sgp.SVGP(4), (X, Y), **options)
    with pytest.warns(UserWarning, match="support of 'lengthscale'"):
        fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", model, (X, Y))
    known, found = (f.predict(X)["f"].sd for f in (fitted, loaded))
    np.testing.assert_allclose(found, known, rtol=1e-6)


def nugget(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        e = numpyro.sample("e", dist.Normal(0.0, 0.5))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + e)), obs=y)


@pytest.mark.slow
def test_latents_of_all_rows_are_not_those_of_one_nor_of_others_after_loading(tmp_path):
    data = X, np.round(np.exp(1.0 + Y))
    fitted = sgp.fit(nugget, sgp.SVGP(4), data, steps=2, **QUIET)
    with pytest.raises(ValueError, match=r"'e' has the shape \(1,\).*of shape \(12,\)"):
        fitted.predict(X[:1])
    with pytest.warns(UserWarning, match="with the training data alone"):
        fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", nugget, data)
    with pytest.raises(ValueError, match="'e' has an entry for each row"):
        loaded.predict(X + 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [sgp.GaussHermite(7), sgp.MonteCarlo(7)])
def test_what_goes_on_has_the_expectation_that_it_had(rule, tmp_path):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    data = X, np.round(np.exp(1.0 + Y))
    fitted = sgp.fit(model, sgp.SVGP(4), data, expectation=rule, steps=2, **QUIET)
    fitted.save(tmp_path / "fit.npz")
    loaded = sgp.load(tmp_path / "fit.npz", model, data)
    again = sgp.fit(model, loaded, data, steps=2, **QUIET)
    assert again.loss.expectation == fitted.loss.expectation == rule
    assert fitted.sample(jax.random.key(0), sample_shape=(0,))["f"].shape == (0, 12)


@pytest.mark.slow
def test_frames_are_taken_at_loading_of_nested_results(tmp_path):
    pd = pytest.importorskip("pandas")

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    frame = pd.DataFrame(X, columns=["x"])
    found = sgp.nested(model, sgp.SVGP(4), (frame, Y), **QUIET)
    found.save(tmp_path / "found.npz")
    loaded = sgp.load(tmp_path / "found.npz", model, (frame, Y))
    np.testing.assert_allclose(
        loaded.predict()["f"].mean, found.predict()["f"].mean, atol=1e-6
    )


def prediction(*shape, axis=0):
    values = jnp.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    levels = (0.05, 0.95)
    return Prediction(values, values, jnp.stack([values] * 2), levels, None, axis)


def test_rows_of_plots_are_put_in_order_where_there_are_any():
    order = np.array([2, 0, 1])
    given = {"f": prediction(3), "slope": prediction(), "groups": prediction(2)}
    found = in_order(given | {"logits": prediction(3, 2)}, order)
    np.testing.assert_array_equal(found["f"].mean, order)
    np.testing.assert_array_equal(found["logits"].mean[:, 0], 2 * order)
    assert found["slope"] is given["slope"] and found["groups"] is given["groups"]


def test_a_plot_of_what_has_no_rows_is_refused():
    guide = SimpleNamespace(approximations={"f": None}, prototype_trace={})
    fitted = SimpleNamespace(guide=guide)
    predictions = {"slope": prediction(), "f": prediction(3)}
    assert chosen(fitted, predictions, None, 3) == "f"
    with pytest.raises(ValueError, match=r"'slope' has no number for each row.*\['f'\]"):
        chosen(fitted, predictions, "slope", 3)


@pytest.mark.slow
def test_rows_of_transposed_functions_under_nested():
    """Logits of classes for each row, and a number without rows beside them."""

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.deterministic("twice", 2.0 * level)
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X).expand([3]))
        logits = numpyro.deterministic("logits", (f + level).T)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    found = sgp.nested(model, sgp.SVGP(4), (X, np.arange(12) % 3), **QUIET)
    predictions = found.predict(X[:5])
    assert predictions["logits"].to_dataframe().shape[0] == 5
    np.testing.assert_allclose(predictions["f"].mean.shape, (3, 5))
    ax = found.plot(site="logits", index=1)
    heights = [line.get_ydata() for line in ax.get_lines() if len(line.get_xdata()) > 50]
    assert heights and np.isfinite(np.concatenate(heights)).all()


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["fit", "nested"])
@pytest.mark.parametrize("rows_first", [False, True])
def test_scores_of_as_many_rows_as_outputs(inference, rows_first):
    """As of the same rows in other company."""

    def model(X, Y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(RBF(), X))
        scales = jnp.array([1.0, -2.0, 0.5])
        dims = (-1, -2) if rows_first else (-2, -1)
        outputs = numpyro.plate("outputs", 3, dim=dims[0])
        with outputs, numpyro.plate("data", X.shape[0], dim=dims[1]):
            mean = f[:, None] * scales if rows_first else scales[:, None] * f
            numpyro.sample("y", dist.Normal(mean, 0.2), obs=Y)

    outputs = np.stack([Y, -2.0 * Y, 0.5 * Y]) + 0.1 * np.cos(np.arange(36)).reshape(3, 12)
    data = X, (outputs.T if rows_first else outputs)
    few = X[:3], (data[1][:3] if rows_first else data[1][:, :3])
    options = {"steps": 3} if inference == "fit" else {}
    fitted = getattr(sgp, inference)(model, sgp.SVGP(4), data, **options, **QUIET)
    found, expected = (fitted.log_score(*given)["y"].rows for given in (few, data))
    np.testing.assert_allclose(found, expected[:3], rtol=1e-4)

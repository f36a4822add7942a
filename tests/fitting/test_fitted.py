"""The object that a fit gives: each method against what it is made of, and its figures."""

import copy
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.fitting.float32 import _told
from numpyro_sgp.fitting.verdict import IF_MORE, Cause, Verdict

X = np.linspace(-2.0, 2.0, 15)[:, None]
Y = np.sin(2.0 * X[:, 0])
SEEN = np.arange(15) != 4
NEW = np.array([[0.3], [5.0]])


def model(X, y=None, seen=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with (
        numpyro.plate("data", X.shape[0]),
        handlers.mask(mask=True if seen is None else seen),
    ):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def regression(columns=1, noise=0.3):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    X = np.random.default_rng(0).normal(size=(12, columns))
    return model, X, np.sin(X[:, 0])


def untrained(model, args, approximation=None, move=True, **options):
    """A fit of a few parameters' starting values."""
    guide = sgp.AutoSparseGP(model, approximation or sgp.SVGP(4))
    svi = SVI(model, guide, optax.sgd(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *args))
    if move:
        params["f_auto_qu_mu"] = params["f_auto_qu_mu"] + 0.5
    return sgp.Fitted(guide, params, args, **options)


@pytest.fixture(scope="module")
def trained():
    """An SVI and its result."""
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5), AutoNormal)
    svi = SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO())
    run = jax.jit(lambda: svi.run(jax.random.key(0), 30, X, Y, SEEN, progress_bar=False))
    guide.setup(X, Y, SEEN)
    return svi, run()


@pytest.fixture(scope="module")
def fitted(trained):
    return sgp.Fitted.from_svi(*trained, X, Y, seen=SEEN)


@pytest.fixture(scope="module")
def loaded(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("fits") / "fit.npz"
    fitted.save(path)
    return sgp.load(path, model)


@pytest.mark.slow
def test_it_is_the_guide_and_its_functions_with_the_parameters(fitted, trained):
    svi, result = trained
    guide, params = svi.guide, result.params
    q, known = fitted.posterior(NEW)["f"], guide.posterior(params, NEW)["f"]
    assert_array_equal(q.mean, known.mean)
    key = jax.random.key(3)
    drawn = fitted.posterior(NEW, rng_key=key)["f"].mean
    assert_array_equal(drawn, guide.posterior(params, NEW, rng_key=key)["f"].mean)
    options = {"quantiles": (0.2,), "num_draws": 4, "rng_key": key}
    found = fitted.predict(NEW, **options, batch_size=7)["y"]
    known = sgp.predict(guide, params, NEW, **options)["y"]
    assert_array_equal(found.quantiles, known.quantiles)
    assert found.levels == (0.2,)
    with pytest.raises(ValueError, match="batch_size must be a whole number, 1 or more"):
        fitted.predict(NEW, batch_size=0)
    assert_array_equal(fitted.median(NEW)["f"], guide.median(params, NEW)["f"])
    assert_array_equal(fitted.quantiles([0.1], NEW)["f"], q.quantile(jnp.array([0.1])))
    assert fitted.model is model and fitted.loss is svi.loss and fitted.svi is svi


@pytest.mark.parametrize("codes", [np.arange(15.0), np.array(list("abc") * 5)])
def test_codes_of_groups_that_are_no_integers_are_told(codes):
    def grouped(X, group, y=None):
        with numpyro.plate("groups", 15):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + b[group], 0.3), obs=y)

    for call in (sgp.fit, sgp.nested):
        with pytest.raises(ValueError, match="np.unique.codes, return_inverse=True"):
            call(grouped, sgp.SVGP(4), (X, codes, Y), progress_bar=False)


def test_arguments_of_other_lengths_are_named():
    def scaled(X, exposure, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f)), obs=y)

    args = X, np.ones(15), np.arange(15)
    fitted = untrained(scaled, args)
    told = "argument 1 has 2, argument 2 has 15. Give as many rows of each"
    with pytest.raises(ValueError, match=told):
        fitted.predict(X[:2], args[1])
    assert fitted.posterior(X[:2], args[1])["f"].mean.shape == (2,)  # f does not need it
    with pytest.raises(ValueError, match="argument 1 has 2, exposure has 15"):
        fitted.predict(X[:2], exposure=args[1])


def test_errors_of_a_model_with_lists_of_arrays_are_its_own():
    def shifted(X, parts, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + parts[1], 1.0), obs=y)

    with pytest.raises((TypeError, ValueError), match=r"incompatible shapes.*\(4,\)"):
        untrained(shifted, (X, [np.ones(3), np.ones(4)], np.arange(15)))


@pytest.mark.slow
def test_without_arguments_latents_are_at_the_training_inputs(fitted):
    draws = fitted.sample(jax.random.key(0), sample_shape=(3,))
    assert draws["f"].shape == (3, 15) and draws["lengthscale"].shape == (3,)
    again = fitted.sample(jax.random.key(0), X, sample_shape=(3,))
    assert_allclose(draws["f"], again["f"], rtol=1e-9)
    assert fitted.median()["f"].shape == (15,)
    assert fitted.quantiles([0.1, 0.9])["f"].shape == (2, 15)
    assert_array_equal(
        fitted.predict()["y"].mean, fitted.predict(X, Y, seen=SEEN)["y"].mean
    )
    assert fitted.log_score()["y"].mean == fitted.log_score(X, Y, seen=SEEN)["y"].mean


@pytest.mark.slow
def test_functions_have_the_moments_of_the_posterior_anywhere(fitted, loaded):
    q = fitted.posterior(NEW)["f"]
    f = fitted.functions(jax.random.key(0), 4000, num_features=64)["f"](NEW)
    assert f.shape == (4000, 2)
    # Five standard errors of the mean, and of the variance, of 4000 draws.
    error = 5 * np.sqrt(q.variance / 4000)
    assert np.all(np.abs(f.mean(axis=0) - q.mean) < error)
    assert_allclose(f.var(axis=0), q.variance, rtol=5 * np.sqrt(2 / 4000))
    again = loaded.functions(jax.random.key(0), 4000, num_features=64)["f"](NEW)
    assert_allclose(again, f, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_copies_and_pickles_are_without_the_training(fitted):
    """As processes that share the work send them to each other."""
    expected = fitted.predict(X[:3])["y"].mean
    for other in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        assert other.svi is None and fitted.svi is not None
        assert_array_equal(other.predict(X[:3])["y"].mean, expected)


@pytest.mark.slow
def test_scores_leave_out_what_a_mask_hides(fitted):
    key = jax.random.key(0)
    score = fitted.log_score(X, Y, seen=SEEN, num_draws=3, rng_key=key)["y"]
    known = sgp.log_predictive_density(
        fitted.guide, fitted.params, X, Y, SEEN, num_draws=3, rng_key=key
    )["y"]
    assert_array_equal(score.rows, known)
    assert np.isnan(score.rows[4])
    assert_allclose(score.mean, np.asarray(known)[SEEN].mean(), rtol=1e-12)
    assert repr(score).endswith("of 14 rows)")
    with pytest.raises(ValueError, match="no observed site"):
        fitted.log_score(X)


@pytest.mark.slow
def test_the_bound_is_that_of_the_given_data(fitted, trained):
    svi, result = trained
    keys = jax.random.split(jax.random.key(0), 10)

    def bound(key):
        return -svi.loss.loss(key, result.params, model, svi.guide, X, Y, SEEN)

    bounds = jax.vmap(bound)(keys)
    assert_allclose(fitted.bound, np.mean(bounds), rtol=1e-9)
    assert_allclose(fitted.bound_se, np.std(bounds, ddof=1) / np.sqrt(10), rtol=1e-6)
    assert fitted.bound_se > 0.0


@pytest.mark.slow
def test_a_bound_that_is_not_random_has_no_error():
    model, X, y = regression()
    known = untrained(model, (X, y))
    svi = SVI(model, known.guide, optax.sgd(0.1), sgp.TraceGP_ELBO())
    result = sgp.TrainResult(known.params, None, np.ones(2), None, None, 1.25, "patience")
    found = sgp.Fitted.from_svi(svi, result, X, y=y)
    loss = svi.loss.loss(jax.random.key(1), known.params, model, known.guide, X, y)
    assert_allclose(found.bound, -loss, rtol=1e-12)
    assert found.bound_se == 0.0 and found.seconds == 1.25 and found.stopped == "patience"
    assert "standard error" not in repr(found)


def test_printed_it_is_a_summary(fitted):
    assert repr(fitted).splitlines()[:2] == [
        "Fitted on 15 rows",
        "  f: SVGP(num_inducing=5)",
    ]
    assert "standard error" in repr(fitted) and "training: 30 steps" in repr(fitted)
    assert "verdict" not in repr(fitted)
    options = {"bound": -12.25, "bound_se": 0.5, "seconds": 3.0, "stopped": "all done"}
    found = sgp.Fitted(fitted.guide, fitted.params, (X, Y), losses=[2, 1], **options)
    found._verdict = "trained too short"
    assert repr(found) == (
        "Fitted on 15 rows\n"
        "  f: SVGP(num_inducing=5)\n"
        "  bound: -12.25 (standard error 0.5)\n"
        "  training: 2 steps, 3.0 s, all done\n"
        "  verdict: trained too short"
    )
    bare = sgp.Fitted(fitted.guide, fitted.params)
    assert repr(bare).splitlines() == [
        "Fitted on rows not known, which are not here",
        "  f: SVGP(num_inducing=5)",
    ]


@pytest.mark.slow
def test_arviz_data_are_those_of_the_svi(fitted, loaded):
    data = fitted.to_arviz(num_samples=4, khat=False)
    known = sgp.to_arviz(
        fitted.svi,
        X,
        Y,
        seen=SEEN,
        result=numpyro.infer.svi.SVIRunResult(fitted.params, None, fitted.losses),
        num_samples=4,
        khat=False,
    )
    assert_array_equal(data["posterior"]["f"], known["posterior"]["f"])
    assert data.attrs["elbo"] == known.attrs["elbo"] and "seconds" not in data.attrs
    assert data["sample_stats"]["loss"].shape[-1] == 30
    named = fitted.to_arviz(X=X, y=Y, num_samples=4, khat=False)
    assert_array_equal(named["posterior"]["f"], known["posterior"]["f"])
    loaded.seconds = 2.0
    again = loaded.to_arviz(X, Y, seen=SEEN, num_samples=4, khat=False)
    assert_array_equal(again["posterior"]["f"], known["posterior"]["f"])
    assert again.attrs["elbo"] == known.attrs["elbo"] and again.attrs["seconds"] == 2.0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda fitted: fitted.to_arviz(), r"to_arviz\(X, y\)"),
        (lambda fitted: fitted.sample(jax.random.key(0)), r"sample\(key, X\)"),
        (lambda fitted: fitted.median(), r"median\(X\)"),
        (lambda fitted: fitted.quantiles([0.5]), r"quantiles\(levels, X\)"),
        (lambda fitted: fitted.predict(), r"predict\(X\)"),
        (lambda fitted: fitted.log_score(), r"log_score\(X, y\)"),
    ],
)
def test_what_needs_the_data_says_so_after_loading(loaded, call, name):
    with pytest.raises(ValueError, match=f"does not have its training data.*{name}"):
        call(loaded)


@pytest.mark.slow
def test_a_model_without_arguments_needs_none_where_its_data_are_not_there():
    def model(y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(4), (Y,), steps=5, progress_bar=False)
    known = fitted.predict(quantiles=())["f"].mean
    fitted.args = None  # as of a file
    assert_array_equal(fitted.predict(quantiles=())["f"].mean, known)


def test_a_guide_from_a_file_takes_its_two_rows_for_no_training_data(loaded):
    with pytest.raises(ValueError, match="set up with minibatches, or from a file"):
        loaded.guide.sample_posterior(jax.random.key(0), loaded.params)


def test_what_is_no_fit_is_refused(fitted, trained):
    svi, result = trained
    with pytest.raises(TypeError, match="guide must be an AutoSparseGP, got AutoNormal"):
        sgp.Fitted(AutoNormal(model), {})
    with pytest.raises(TypeError, match="args must be the tuple .* got ndarray"):
        sgp.Fitted(fitted.guide, fitted.params, X)
    with pytest.raises(ValueError, match="are missing"):
        sgp.Fitted(fitted.guide, {})
    with pytest.raises(ValueError, match="not been set up"):
        sgp.Fitted(sgp.AutoSparseGP(model, sgp.SVGP(3)), {})
    with pytest.raises(TypeError, match="from_svi takes an SVI and what .* AutoSparseGP"):
        sgp.Fitted.from_svi(fitted.guide, result, X)
    with pytest.raises(TypeError, match="SVI and dict"):
        sgp.Fitted.from_svi(svi, result.params, X)
    with pytest.raises(ValueError, match=r"from_svi\(svi, result, X, y\)"):
        sgp.Fitted.from_svi(svi, result)
    bare = sgp.Fitted(fitted.guide, fitted.params)
    with pytest.raises(ValueError, match="does not have its training data"):
        bare.functions(jax.random.key(0))
    with pytest.raises(ValueError, match="not known what its inputs look like"):
        bare.plot()


# ---- figures --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_points():
    """A fit with hyperparameters at points, whose figures take less time."""
    return untrained(model, (X, Y, SEEN))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def lines(ax):
    """Drawn lines by label."""
    return {line.get_label(): line.get_xydata() for line in ax.get_lines()}


@pytest.mark.slow
def test_over_one_column_the_response_is_drawn_with_data_and_points(at_points):
    ax = at_points.plot(level=0.8, num_points=15)
    drawn = lines(ax)
    x, mean = drawn["mean of y"].T
    assert len(x) == 15 and x[0] < X.min() and x[-1] > X.max()
    known = at_points.predict(x[:, None], quantiles=((1 - 0.8) / 2, (1 + 0.8) / 2))["y"]
    assert_allclose(mean, known.mean, rtol=1e-9)
    (band,) = ax.collections
    assert band.get_label() == "80 % of y"
    low, high = (band.get_paths()[0].vertices[:, 1].min(), known.quantiles[0].min())
    assert_allclose(low, high)
    assert_array_equal(drawn["data"][:, 1][SEEN], Y[SEEN])
    assert np.isnan(drawn["data"][4, 1])  # masked
    Z = at_points.params["f_auto_Z"][:, 0]
    assert_allclose(np.sort(drawn["inducing points"][:, 0]), np.sort(Z))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("X", "y")


@pytest.mark.slow
def test_a_gp_site_is_drawn_into_given_axes_at_given_inputs(at_points):
    _, ax = plt.subplots()
    assert at_points.plot(ax, site="f", level=0.8, X=X[::-1]) is ax
    drawn = lines(ax)
    assert_array_equal(drawn["mean of f"][:, 0], X[:, 0])
    assert "data" not in drawn
    with pytest.raises(ValueError, match=r"no prediction of 'g'; there are \['f', 'y'\]"):
        at_points.plot(site="g", X=X, level=0.8)
    with pytest.raises(ValueError, match="X has 2 columns, but the inputs of the model 1"):
        at_points.plot(X=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="level must be between 0 and 1, got 90"):
        at_points.plot(level=90)


def test_without_data_the_range_is_that_of_the_inducing_points(at_points):
    of_file = sgp.Fitted(at_points.guide, at_points.params)
    of_file.examples = (X[:2], Y[:2]), {}
    drawn = lines(of_file.plot(num_points=15, level=0.8))
    Z, x = at_points.params["f_auto_Z"], drawn["mean of y"][:, 0]
    assert "data" not in drawn
    assert_allclose([x[0], x[-1]], [Z.min() - 0.05 * np.ptp(Z), Z.max() + 0.05 * np.ptp(Z)])


@pytest.mark.slow
def test_over_two_columns_colours_are_the_mean():
    model, X, y = regression(columns=2)
    fitted = untrained(model, (X, y))
    ax = fitted.plot(num_points=4)
    colours, points = ax.collections[0], lines(ax)
    corner = X.min(axis=0) - 0.05 * np.ptp(X, axis=0)
    across = corner + [1.1 * np.ptp(X[:, 0]) / 3, 0.0]
    found = np.asarray(colours.get_array()).reshape(4, 4)[0, :2]
    known = fitted.predict(np.stack([corner, across]))["y"].mean
    assert_allclose(found, known, rtol=1e-9)
    assert_array_equal(points["data"], X)
    assert len(points["inducing points"]) == 4
    assert ax.figure.axes[1].get_ylabel() == "mean of y"
    # Only what is inside of the given range.
    inside = lines(fitted.plot(X=[[0.0, 0.0], [9.0, 9.0]], num_points=3))["data"]
    assert_array_equal(inside, X[(X > 0).all(axis=1)])


def test_more_columns_are_refused_by_their_shape():
    model, X, y = regression(columns=3)
    with pytest.raises(ValueError, match=r"argument 'X' .* shape \(12, 3\).*predict"):
        untrained(model, (X, y)).plot()


@pytest.mark.quick(1)
@pytest.mark.parametrize("columns", [1, 2])
def test_classes_are_drawn_by_their_probabilities(columns):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([3]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T + jnp.arange(3.0)), obs=y)

    X, y = regression(columns)[1], np.arange(12) % 3
    fitted = untrained(model, (X, y), move=False)
    ax = fitted.plot(num_points=3)
    if columns == 1:
        drawn = lines(ax)
        x = drawn["P(y = 2)"][:, 0]
        known = fitted.predict(x[:, None])["y"].probs
        for c in range(3):
            assert_allclose(drawn[f"P(y = {c})"][:, 1], known[:, c], rtol=1e-6)
    else:
        image = np.asarray(ax.collections[0].get_array())
        assert image.shape == (3, 3, 3)
        # Everywhere class 2, in the third colour, paler than that.
        colour = np.array(plt.matplotlib.colors.to_rgb("C2"))
        pale = (1.0 - image) / (1.0 - colour)
        assert_allclose(pale, np.broadcast_to(pale[..., :1], pale.shape), rtol=1e-9)
        assert 0.0 < pale.min() <= pale.max() < 1.0


@pytest.mark.slow
def test_two_classes_are_drawn_by_one_probability():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    X = np.linspace(0.0, 1.0, 12)
    fitted = untrained(model, (X, (X > 0.4).astype(int)))
    ax = fitted.plot(num_points=3)
    drawn = lines(ax)
    assert set(drawn) == {"P(y = 1)", "data", "inducing points"}
    assert_allclose(
        drawn["P(y = 1)"][:, 1], fitted.predict(drawn["P(y = 1)"][:, 0])["y"].probs
    )
    assert len(ax.collections) == 0


@pytest.mark.slow
def test_of_several_values_in_a_row_one_can_be_chosen():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.T, 0.2).to_event(1), obs=y)

    _, X, y = regression()
    fitted = untrained(model, (X, np.stack([y, -y], axis=1)), move=False)
    names = set(lines(fitted.plot(num_points=3)))
    assert {"mean of y[0]", "mean of y[1]"} <= names
    drawn = lines(fitted.plot(num_points=3, index=1))
    assert "mean of y[0]" not in drawn and "mean of y[1]" in drawn
    with pytest.raises(ValueError, match="'y' has 2 values in each row.*got 2"):
        fitted.plot(num_points=3, index=2)


def test_rows_that_are_tied_together_leave_f_to_be_drawn():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(jnp.cumsum(f), 0.3).to_event(1), obs=y)

    _, X, y = regression()
    fitted = untrained(model, (X, y))
    ax = fitted.plot(num_points=3)
    x, mean = lines(ax)["mean of f"].T
    q = fitted.posterior(x[:, None])["f"]
    assert_allclose(mean, q.mean, rtol=1e-12)
    low = ax.collections[0].get_paths()[0].vertices[:, 1].min()
    assert_allclose(low, (q.mean - 1.6448536 * jnp.sqrt(q.variance)).min(), rtol=1e-6)


@pytest.mark.parametrize(
    "bound, error, text",
    [
        (-60.0, 9.0, "not known to have converged"),
        (-60.0, 0.3, "converged"),
        (-60_000.0, 9.0, "converged"),  # of many rows
    ],
)
def test_what_is_lost_in_noise_has_not_converged(bound, error, text):
    causes = [
        Cause("q(u)", np.nan),
        Cause("other parameters", 0.0, error),
        Cause("inducing points", 0.0),
    ]
    verdict = Verdict({cause.name: cause for cause in causes}, bound=bound)
    assert verdict.converged == (text == "converged")
    assert verdict.summary.startswith(f"{text}: left are about")


def test_what_is_told_first_has_its_mend_beside_it():
    causes = [
        Cause("q(u)", 0.0),
        Cause("other parameters", 0.0),
        Cause("inducing points", 0.0),
        Cause("sites apart", 0.1, mend="use joint=True", headline="sds are 0.16 of those"),
    ]
    verdict = Verdict({cause.name: cause for cause in causes})
    assert verdict.summary.endswith("; sds are 0.16 of those (use joint=True)")


@pytest.mark.parametrize("family, told", [(6.5, False), (7.5, True)])
def test_what_other_rows_have_told_is_not_told_again(family, told):
    causes = [
        Cause("q(u)", 0.0),
        Cause("other parameters", 0.0),
        Cause("inducing points", 6.4),
        Cause("family", family, mend=f"{IF_MORE}MCMC"),
    ]
    verdict = Verdict({cause.name: cause for cause in causes})
    assert ("family" in verdict.summary) is told


def test_a_bound_that_rounding_has_raised_is_told():
    others = Cause("other parameters", 0.0)
    guide = SimpleNamespace(approximations={})
    found = _told(-2.9, -2.9, 0, others, guide)
    assert found.nats == 2.9 and "rounding has raised" in found.told
    assert found.mend == "numpyro.enable_x64() before the fit"


@pytest.mark.parametrize("nats, told", [(0.4, False), (np.nan, False), (22.8, True)])
def test_what_float32_costs_is_told_first(nats, told):
    names = "q(u)", "other parameters", "inducing points"
    causes = {name: Cause(name, 0.0) for name in names}
    digits = Cause("float32", nats, mend="enable_x64" if told else "")
    verdict = Verdict({**causes, "float32": digits})
    assert verdict.converged is not told
    assert verdict.summary.startswith("converged in float32 alone: ") is told
    assert ("; float32 costs at least 23 nats (enable_x64)" in verdict.summary) is told

"""Predictions from posterior samples, against the exact posterior predictive."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.infer import Predictive

from numpyro_sgp import GaussianProcess, GPPredictive, whiten
from numpyro_sgp.kernels import RBF
from tests.helpers import primitives

N, S = 5, 20_000
X = np.array([0.0, 0.7, 1.5, 2.0, 3.1])[:, None]
X_NEW = np.array([0.4, 1.7, 4.0])[:, None]
Y = np.array([0.3, 1.1, 0.2, -0.5, -0.9])
VARIANCE, LENGTHSCALE, LEVEL, NOISE = 1.3, 0.8, 0.4, 0.3
KEY = jax.random.key(0)
rng = np.random.default_rng(0)


def rbf(X1, X2, variance=VARIANCE, lengthscale=LENGTHSCALE):
    return variance * np.exp(-0.5 * (X1 - X2.T) ** 2 / lengthscale**2)


def gp(X, variance=VARIANCE, lengthscale=LENGTHSCALE, mean=LEVEL):
    return GaussianProcess(RBF(variance, lengthscale), X, mean)


def observe(f, y, noise=NOISE):
    with numpyro.plate("data", f.shape[-1]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def model(X, y=None):
    observe(numpyro.sample("f", gp(X)), y)


def conditional(value, X_new, **hyperparameters):
    """Textbook p(f(X_new) | f(X)); the default jitter of 1e-8 does not show here."""
    inverse = np.linalg.inv(rbf(X, X, **hyperparameters))
    cross = rbf(X_new, X, **hyperparameters)
    covariance = rbf(X_new, X_new, **hyperparameters) - cross @ inverse @ cross.T
    return LEVEL + cross @ inverse @ (value - LEVEL), covariance


def assert_moments(draws, mean, covariance):
    """Within five standard errors: fails for one key in 2e6 per number."""
    variance = np.diag(covariance)
    error = np.sqrt(variance / len(draws))
    assert (np.abs(draws.mean(0) - mean) < 5 * error).all()
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / len(draws))
    assert (np.abs(np.cov(draws.T) - covariance) < 5 * error).all()


def test_draws_at_new_inputs_have_the_exact_posterior_predictive():
    inverse = np.linalg.inv(rbf(X, X) + NOISE**2 * np.eye(N))
    m = LEVEL + rbf(X, X) @ inverse @ (Y - LEVEL)
    V = rbf(X, X) - rbf(X, X) @ inverse @ rbf(X, X)
    f = m + rng.normal(size=(S, N)) @ np.linalg.cholesky(V).T  # exact samples
    draws = GPPredictive(model, {"f": f}, train_args=(X, Y))(KEY, X_NEW)
    assert sorted(draws) == ["f", "y"]
    mean = LEVEL + rbf(X_NEW, X) @ inverse @ (Y - LEVEL)
    covariance = rbf(X_NEW, X_NEW) - rbf(X_NEW, X) @ inverse @ rbf(X, X_NEW)
    # 18 numbers: one key in 1e5 fails.
    assert_moments(np.asarray(draws["f"]), mean, covariance)
    assert_moments(np.asarray(draws["y"]), mean, covariance + NOISE**2 * np.eye(3))


def test_draws_at_the_training_inputs_are_the_samples():
    f = rng.normal(size=(20, N))
    draws = GPPredictive(model, {"f": f}, train_args=(X, Y))(KEY, X)
    # The jitter of both factors leaves a standard deviation of sqrt(2e-8).
    assert_allclose(draws["f"], f, atol=2e-3)
    assert np.ptp(np.asarray(draws["y"]) - f) > 0.5  # new noise


def test_each_sample_is_used_with_its_own_hyperparameters():
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        noise = numpyro.sample("noise", dist.LogNormal())
        observe(numpyro.sample("f", gp(X, lengthscale=lengthscale)), y, noise)

    half = S // 2
    samples = {
        "lengthscale": np.repeat([0.5, 1.2], half),
        "noise": np.repeat([0.2, 0.7], half),
        "f": np.tile(Y, (S, 1)),
    }
    predictive = GPPredictive(model, samples, train_args=(X, Y))
    draws = predictive(KEY, X_NEW)
    assert sorted(draws) == ["f", "y"]
    for rows, lengthscale, noise in [
        (slice(half), 0.5, 0.2),
        (slice(half, None), 1.2, 0.7),
    ]:
        mean, covariance = conditional(Y, X_NEW, lengthscale=lengthscale)
        # 36 numbers in all: one key in 5e4 fails.
        assert_moments(np.asarray(draws["f"][rows]), mean, covariance)
        covariance = covariance + noise**2 * np.eye(3)
        assert_moments(np.asarray(draws["y"][rows]), mean, covariance)


def plate_latents(X, y=None):
    with numpyro.plate("latent", 2):
        f = numpyro.sample("f", gp(X))
    observe(f.sum(0), y)


def expanded_latents(X, y=None):
    observe(numpyro.sample("f", gp(X).expand([2])).sum(0), y)


def event_latents(X, y=None):
    observe(numpyro.sample("f", gp(X).expand([2]).to_event(1)).sum(0), y)


@pytest.mark.parametrize("model", [plate_latents, expanded_latents, event_latents])
def test_latent_functions_are_predicted_each_from_its_own_samples(model):
    num = 4_000
    f = np.tile(np.stack([Y, -Y]), (num, 1, 1))
    draws = GPPredictive(model, {"f": f}, train_args=(X, Y))(KEY, X_NEW)
    assert draws["f"].shape == (num, 2, 3) and draws["y"].shape == (num, 3)
    for q, values in enumerate([Y, -Y]):
        # 18 numbers: one key in 1e5 fails.
        mean, covariance = conditional(values, X_NEW)
        assert_moments(np.asarray(draws["f"][:, q]), mean, covariance)
    cross = np.cov(draws["f"][:, 0].T, draws["f"][:, 1].T)[:3, 3:]
    sd = np.sqrt(np.diag(covariance))
    assert (np.abs(cross) < 5 * np.outer(sd, sd) / np.sqrt(num)).all()


def test_each_latent_function_has_its_own_hyperparameters():
    def model(X, y=None):
        f = numpyro.sample("f", gp(X, np.array([1.3, 0.5]), np.array([0.8, 1.2])))
        observe(f.sum(0), y)

    num = 4_000
    f = np.tile(np.stack([Y, Y]), (num, 1, 1))
    draws = GPPredictive(model, {"f": f}, train_args=(X, Y))(KEY, X_NEW)
    for q, (variance, lengthscale) in enumerate([(1.3, 0.8), (0.5, 1.2)]):
        moments = conditional(Y, X_NEW, variance=variance, lengthscale=lengthscale)
        assert_moments(np.asarray(draws["f"][:, q]), *moments)


@pytest.mark.slow
def test_a_process_fed_by_a_process_follows_its_samples():
    def deep(X, y=None):
        inner = numpyro.sample("inner", gp(X, mean=lambda x: x[:, 0]))
        observe(numpyro.sample("f", gp(inner[:, None])), y)

    samples = {
        "inner": X[:, 0] + 0.3 * rng.normal(size=(20, N)),
        "f": rng.normal(size=(20, N)),
    }
    predictive = GPPredictive(deep, samples, train_args=(X, Y))
    draws = predictive(KEY, X)
    # The jitter leaves 1.4e-4 in the inner process, times the slope of the outer one
    # (which is large where two inner values are near each other).
    assert_allclose(draws["inner"], samples["inner"], atol=2e-3)
    assert np.median(np.abs(draws["f"] - samples["f"])) < 2e-3
    elsewhere = predictive(KEY, X_NEW)
    assert elsewhere["inner"].shape == elsewhere["f"].shape == (20, 3)


def test_samples_of_a_whitened_model_are_samples_of_the_model():
    # As in mcmc.get_samples(): f is a deterministic site there.
    samples = Predictive(whiten(model), num_samples=20)(KEY, X, Y)
    samples = {name: samples[name] for name in ("f", "f_white")}
    draws = GPPredictive(model, samples, train_args=(X, Y))(KEY, X)
    assert_allclose(draws["f"], samples["f"], atol=2e-3)
    assert sorted(draws) == ["f", "y"]


def with_rate(X, y=None):
    f = numpyro.sample("f", gp(X))
    rate = numpyro.deterministic("rate", jnp.exp(f))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def test_deterministic_sites_are_computed_at_the_new_inputs():
    f = rng.normal(size=(20, N))
    # get_samples() has the deterministic sites too, at the training inputs.
    for samples in ({"f": f}, {"f": f, "rate": np.exp(f)}):
        draws = GPPredictive(with_rate, samples, train_args=(X, Y))(KEY, X_NEW)
        assert draws["y"].shape == (20, 3)
        assert_allclose(draws["rate"], np.exp(draws["f"]), rtol=1e-12)


def test_return_sites_are_those_that_are_returned():
    predictive = GPPredictive(
        with_rate,
        {"f": rng.normal(size=(20, N))},
        train_args=(X, Y),
        return_sites=["rate", "y"],
    )
    draws = predictive(KEY, X_NEW)
    assert sorted(draws) == ["rate", "y"] and draws["rate"].shape == (20, 3)


@pytest.mark.slow
def test_draws_depend_on_the_key_and_the_sample_and_not_on_the_batches():
    samples = {"f": np.tile(Y, (6, 1))}  # equal samples, so only the noise differs
    whole = GPPredictive(model, samples, train_args=(X, Y))
    parts = GPPredictive(model, samples, train_args=(X, Y), batch_size=3)
    draws, again = whole(KEY, X_NEW), parts(KEY, X_NEW)
    for name in draws:
        assert_allclose(again[name], draws[name], rtol=1e-9)
    other = whole(jax.random.key(1), X_NEW)["f"]
    assert len(np.unique(np.concatenate([draws["f"], other]).round(9))) == 36


def test_covariances_of_all_sites_and_functions_count_for_the_batches():
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        f = numpyro.sample("f", gp(X, np.ones(5), lengthscale * np.ones(5)))
        g = numpyro.sample("g", gp(X, 0.5, lengthscale))
        observe(f.sum(0) + g, y)

    rows = np.linspace(0.0, 9.0, 400)[:, None]
    samples = {"f": (60, 5, 400), "g": (60, 400), "lengthscale": (60,)}
    samples = {name: np.ones(shape) for name, shape in samples.items()}
    predictive = GPPredictive(model, samples, train_args=(rows,))
    jaxpr = jax.make_jaxpr(lambda key: predictive(key, rows[:200]))(KEY)
    shapes = [s for _, operands in primitives(jaxpr.jaxpr) for s in operands]
    sizes = [np.prod(s) for s in shapes if s[-2:] == (600, 600)]
    assert 1e7 < max(sizes) <= 3e7  # of 6 x 60 x 600^2, or 1.3e8, numbers in all


def test_keyword_arguments_reach_the_model():
    def scaled(X, y=None, *, scale):
        observe(scale * numpyro.sample("f", gp(X)), y)

    samples = {"f": np.tile(Y, (20, 1))}
    predictive = GPPredictive(
        scaled, samples, train_args=(X,), train_kwargs={"y": Y, "scale": 1.0}
    )
    draws = predictive(KEY, X, scale=100.0)
    assert_allclose(draws["y"] / 100.0, draws["f"], atol=0.05)  # noise of 0.003


def test_observed_new_data_are_not_returned():
    predictive = GPPredictive(model, {"f": np.tile(Y, (3, 1))}, train_args=(X, Y))
    assert list(predictive(KEY, X_NEW, np.zeros(3))) == ["f"]


# ---- errors ---------------------------------------------------------------------------


def test_what_samples_do_not_go_with_is_told():
    samples = {"f": np.zeros((3, N)), "f_white": np.zeros((3, N))}
    white = GPPredictive(whiten(model), samples, train_args=(X, Y))
    with pytest.raises(ValueError, match="'f_white'.* the one that is not"):
        white(KEY, X_NEW)  # NumPyro's Predictive would have the values of the rows of X
    with pytest.raises(ValueError, match=r"train_args=\(X, y\)"):
        GPPredictive(model, {"f": np.zeros((3, N))})(KEY, X_NEW)
    known = GPPredictive(lambda X=X, y=Y: model(X, y), {"f": np.zeros((3, N))})
    assert known(KEY, X_NEW, None)["f"].shape == (3, len(X_NEW))
    few = GPPredictive(model, {"f": np.zeros((3, N))}, train_args=(X[:2], Y[:2]))
    with pytest.raises(ValueError, match=rf"have shape \({N},\), but.* it has \(2,\)"):
        few(KEY, X_NEW)


def test_train_args_must_be_a_tuple():
    with pytest.raises(TypeError, match=r"such as \(X, y\), got ndarray"):
        GPPredictive(model, {"f": np.zeros((3, N))}, train_args=X)


@pytest.mark.parametrize(
    "samples", [{}, {"f": np.zeros((3, N)), "noise": np.zeros(4)}, {"f": 0.0, "g": Y}]
)
def test_samples_must_have_one_leading_axis(samples):
    with pytest.raises(ValueError, match="one leading axis of the same length, got {"):
        GPPredictive(model, samples, train_args=(X, Y))


def test_no_samples_are_refused():
    with pytest.raises(
        ValueError, match=r"posterior_samples has no draws: \{'f': \(0, 5\)"
    ):
        GPPredictive(model, {"f": np.zeros((0, N))}, train_args=(X, Y))


class Scaled:
    """A kernel by its protocol, and no pytree."""

    def __init__(self, variance):
        self.variance = variance

    def __call__(self, X1, X2):
        return RBF(self.variance, LENGTHSCALE)(X1, X2)

    def diag(self, X):
        return self.variance * jnp.ones(X.shape[:-1])


@pytest.mark.slow
def test_kernels_that_are_no_pytrees_have_the_hyperparameters_of_each_sample():
    """It ended in JAX' error of a tracer that has leaked."""

    def model(X, y=None):
        variance = numpyro.sample("variance", dist.LogNormal())
        observe(numpyro.sample("f", GaussianProcess(Scaled(variance), X, LEVEL)), y)

    samples = {"variance": np.full(S, 0.4), "f": np.tile(Y, (S, 1))}
    draws = GPPredictive(model, samples, train_args=(X, Y))(KEY, X_NEW)["f"]
    assert_moments(draws, *conditional(Y, X_NEW, variance=0.4))


def test_samples_grouped_by_chain_are_refused():
    grouped = {"f": np.zeros((2, 3, N))}
    predictive = GPPredictive(model, grouped, train_args=(X, Y))
    told = r"shape \(3, 5\), but at train_args it has \(5.*without group_by_chain"
    with pytest.raises(ValueError, match=told):
        predictive(KEY, X_NEW)


@pytest.mark.parametrize("chains", [1, 2])
def test_hyperparameters_grouped_by_chain_are_refused(chains):
    def sampled(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        numpyro.sample("f", GaussianProcess(RBF(1.0, scale), X))

    grouped = {"f": np.zeros((chains, 3, N)), "scale": np.ones((chains, 3))}
    predictive = GPPredictive(sampled, grouped, train_args=(X, Y))
    told = r"'scale' have shape \(3,\), but the site has \(\).*without group_by_chain"
    with pytest.raises(ValueError, match=told):
        predictive(KEY, X_NEW)


@pytest.mark.slow
def test_axes_of_chains_are_kept():
    """As numpyro.infer.Predictive has it: the numbers are those of all in one axis."""
    samples = {"f": np.random.default_rng(0).normal(size=(2, 3, N))}
    given = {"train_args": (X, Y)}
    found = GPPredictive(model, samples, **given, batch_ndims=2)(KEY, X_NEW)
    flat = GPPredictive(model, {"f": samples["f"].reshape(6, N)}, **given)(KEY, X_NEW)
    for name, value in found.items():
        assert value.shape == (2, 3, *flat[name].shape[1:])
        assert_array_equal(value.reshape(flat[name].shape), flat[name])
    one = GPPredictive(model, {"f": samples["f"][0, 0]}, **given, batch_ndims=0)(KEY, X_NEW)
    assert {k: v.shape for k, v in one.items()} == {k: v.shape[1:] for k, v in flat.items()}
    with pytest.raises(ValueError, match="2 leading axes of the same length"):
        GPPredictive(model, {**samples, "level": np.zeros((3, 2))}, **given, batch_ndims=2)


def test_samples_of_other_inputs_are_refused():
    predictive = GPPredictive(model, {"f": np.zeros((3, N))}, train_args=(X_NEW,))
    with pytest.raises(ValueError, match=r"GP site 'f' have shape \(5,\).*it has \(3,\)"):
        predictive(KEY, X_NEW)


def test_a_site_without_samples_is_an_error():
    samples = {"noise": np.zeros(3)}
    predictive = GPPredictive(model, samples, train_args=(X, Y))
    with pytest.raises(ValueError, match=r"no values of GP site 'f', only of \['noise'\]"):
        predictive(KEY, X_NEW)


def with_latents(X, y=None):
    """One that moves the prior of f, by one that is sampled too; others that do not."""
    level = numpyro.sample("level", dist.Normal())
    scale = numpyro.sample("scale", dist.LogNormal(level))
    lengthscale = numpyro.deterministic("lengthscale", 1.0 + scale)
    f = numpyro.sample("f", gp(X, lengthscale=lengthscale))
    high = numpyro.sample("high", dist.Bernoulli(0.5))
    numpyro.sample("total", dist.Normal(f.sum()))
    with numpyro.plate("data", f.shape[-1]):
        g = numpyro.sample("g", dist.Normal(f + high))
        numpyro.sample("y", dist.Normal(g), obs=y)


@pytest.mark.parametrize("sites", [{}, {"level": np.zeros(3)}])
def test_a_hyperparameter_without_samples_is_an_error(sites):
    """f would be conditioned under a draw from its prior."""
    samples = {"f": np.zeros((3, N)), **sites}
    predictive = GPPredictive(with_latents, samples, train_args=(X, Y))
    with pytest.raises(ValueError, match="no values of 'scale', only of"):
        predictive(KEY, X_NEW)


def test_what_does_not_move_the_prior_of_f_needs_no_samples():
    """And what moves it by a latent that is sampled."""
    samples = {"f": np.zeros((3, N)), "scale": np.ones(3)}
    for given in (samples, {"f": samples["f"]}):
        model = with_latents
        if "scale" not in given:
            model = handlers.substitute(model, {"scale": jnp.array(1.0)})
        drawn = GPPredictive(model, given, train_args=(X,))(KEY, X_NEW)
        assert {k: v.shape[1:] for k, v in drawn.items() if k in "fgy"} == {
            k: (len(X_NEW),) for k in "fgy"
        }


def test_a_param_that_stays_at_its_first_value_is_told():
    def with_param(X, y=None):
        lengthscale = numpyro.param("lengthscale", 0.8)
        observe(numpyro.sample("f", gp(X, lengthscale=lengthscale)), y)

    samples = {"f": np.zeros((3, N))}
    with pytest.warns(UserWarning, match=r"not sample \['lengthscale'\].*it stays at the"):
        GPPredictive(with_param, samples, train_args=(X, Y))(KEY, X_NEW)
    with_value = handlers.substitute(with_param, {"lengthscale": jnp.array(0.7)})
    GPPredictive(with_value, samples, train_args=(X, Y))(KEY, X_NEW)  # warns of nothing


def test_a_model_without_a_process_is_an_error():
    def model(X, y=None):
        observe(numpyro.sample("level", dist.Normal()) * jnp.ones(len(X)), y)

    predictive = GPPredictive(model, {"level": np.zeros(3)}, train_args=(X, Y))
    with pytest.raises(ValueError, match=r"no latent GP site; use numpyro.infer.Pred"):
        predictive(KEY, X_NEW)


@pytest.mark.parametrize("new", [True, False])
def test_inputs_that_are_not_finite_are_refused(new):
    bad = np.array([[0.0], [np.nan], [1.0], [2.0], [3.0]])
    train, inputs = (X, bad) if new else (bad, X_NEW)
    predictive = GPPredictive(model, {"f": np.zeros((3, N))}, train_args=(train, Y))
    with pytest.raises(ValueError, match=r"GP site 'f' have NaN .*first: \[1\]"):
        predictive(KEY, inputs)


def test_unknown_return_sites_are_named():
    def model(X, y=None):
        f = numpyro.sample("f", GaussianProcess(RBF(), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    X = jnp.arange(3.0)[:, None]
    samples = {"f": jnp.zeros((2, 3))}
    predictive = GPPredictive(
        model, samples, train_args=(X, jnp.zeros(3)), return_sites=["y", "rate"]
    )
    with pytest.raises(ValueError, match=r"\['rate'\], but the model has only"):
        predictive(jax.random.key(0), X)


@pytest.mark.quick(1)
@pytest.mark.parametrize("train_args", [(X, Y), (X,)])
def test_latents_of_training_rows_are_drawn_anew_at_others(train_args):
    """They were given to other rows, if these were as many, and else did not broadcast."""

    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", gp(X))
        with numpyro.plate("data", len(X)):
            e = numpyro.sample("e", dist.Normal(level, 0.5))
            numpyro.sample("y", dist.Normal(f + e, 0.1), obs=y)

    num = 4000
    samples = {"f": np.zeros((num, N)), "e": np.full((num, N), 3.0), "level": np.ones(num)}
    predictive = GPPredictive(model, samples, train_args=train_args)
    for X_new in (X + 100.0, X_NEW):
        draws = predictive(KEY, X_new)
        rest = np.asarray(draws["y"] - draws["f"])
        assert rest.shape == (num, len(X_new)) and "e" not in draws
        # Of 12,000 draws and more: five standard errors.
        assert abs(rest.mean() - 1.0) < 5 * 0.51 / 12_000**0.5
        assert abs(rest.std() - 0.51) < 0.02
        assert abs(np.corrcoef(rest.T)[0, 1]) < 5 / num**0.5
    draws = predictive(KEY, X)  # where they are known
    assert abs(np.mean(draws["y"] - draws["f"]) - 3.0) < 0.01


@pytest.mark.slow
def test_other_rows_are_seen_however_they_are_given():
    """In dicts of other keys, by position and by name."""

    def model(data):
        f = numpyro.sample("f", gp(data["X"]))
        with numpyro.plate("data", len(data["X"])):
            e = numpyro.sample("e", dist.Normal(0.0, 0.5))
            numpyro.sample("y", dist.Normal(f + e, 0.1), obs=data.get("y"))

    samples = {"f": np.zeros((400, N)), "e": np.full((400, N), 7.0)}
    train = {"X": X, "y": Y}
    predictive = GPPredictive(model, samples, train_args=(train,))
    draws = predictive(KEY, {"X": X + 100.0})
    assert abs(np.mean(draws["y"] - draws["f"])) < 0.06
    draws = predictive(KEY, {"X": X})
    assert abs(np.mean(draws["y"] - draws["f"]) - 7.0) < 0.06
    draws = jax.jit(lambda X: predictive(KEY, {"X": X}))(X)  # which may be any
    assert abs(np.mean(draws["y"] - draws["f"])) < 0.06
    predictive = GPPredictive(
        lambda X, y=None: model({"X": X, "y": y}), samples, train_args=(X, Y)
    )
    draws = predictive(KEY, X=X + 100.0)
    assert abs(np.mean(draws["y"] - draws["f"])) < 0.06


@pytest.mark.slow
def test_samples_of_groups_and_outputs_are_kept():
    """In plates that hold the response too, they are not of rows."""

    def panel(X, y=None):
        f = numpyro.sample("f", gp(X))
        with numpyro.plate("groups", 3, dim=-1):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
            noise = numpyro.sample("noise", dist.HalfNormal(1.0))
            with numpyro.plate("times", len(X), dim=-2):
                numpyro.sample("y", dist.Normal(f[:, None] + b, noise), obs=y)

    b = np.array([5.0, -5.0, 0.0])
    samples = {"f": np.zeros((50, N)), "b": np.tile(b, (50, 1))}
    samples["noise"] = np.full((50, 3), 0.01)
    predictive = GPPredictive(panel, samples, train_args=(X, np.zeros((N, 3))))
    for X_new in (X + 100.0, X_NEW):
        draws = predictive(KEY, X_new)
        rest = draws["y"] - draws["f"][..., None]
        assert_allclose(rest, np.broadcast_to(b, rest.shape), atol=0.06)


@pytest.mark.quick(1)
@pytest.mark.parametrize("improper", [False, True])
def test_latents_of_rows_where_the_process_has_fewer_inputs(improper):
    def model(X, time, y=None):
        f = numpyro.sample("f", gp(X))
        if improper:
            numpyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("rows", len(time)):
            e = numpyro.sample("e", dist.Normal(0.0, 0.5))
            numpyro.sample("y", dist.Normal(f[time] + e, 0.1), obs=y)

    time = np.arange(12) % N
    samples = {"f": np.zeros((400, N)), "e": np.full((400, 12), 7.0)}
    samples |= {"a": np.zeros(400)} if improper else {}
    predictive = GPPredictive(model, samples, train_args=(X, time, np.zeros(12)))
    for new, mean in ((time, 7.0), ((time + 1) % N, 0.0), (time[:5], 0.0)):
        draws = predictive(KEY, X, new)
        assert abs(np.mean(draws["y"] - draws["f"][:, new]) - mean) < 0.06  # 5 errors


def test_samples_of_other_groups_are_refused():
    def model(X, group, y=None):
        f = numpyro.sample("f", gp(X))
        with numpyro.plate("groups", int(np.max(group)) + 1):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f + b[group], 0.1), obs=y)

    samples = {"f": np.zeros((4, N)), "b": np.tile([5.0, -5.0, 0.0], (4, 1))}
    predictive = GPPredictive(model, samples, train_args=(X, np.arange(N) % 3, Y))
    draws = predictive(KEY, X_NEW, np.array([0, 1, 0]))  # two of them
    assert np.all(np.abs(draws["y"] - draws["f"] - np.array([5.0, -5.0, 5.0])) < 0.6)
    with pytest.raises(ValueError, match=r"'b' has the shape \(4,\).* have \(3,\)"):
        predictive(KEY, X_NEW, np.array([0, 3, 0]))


def test_a_key_that_is_none_is_refused():
    predictive = GPPredictive(lambda X: numpyro.sample("f", gp(X)), {"f": np.zeros((4, N))})
    with pytest.raises(TypeError, match="rng_key must be one random key"):
        predictive(0, X_NEW)


def test_samples_of_a_plate_of_as_many_as_the_new_rows_are_kept():
    """Three outputs with a noise each, and three new rows."""

    def model(X, y=None):
        with numpyro.plate("outputs", 3, dim=-2):
            noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", GaussianProcess(RBF(), X))
        rows = numpyro.plate("data", X.shape[0], dim=-1)
        with numpyro.plate("outputs", 3, dim=-2), rows:
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    samples = {"f": np.zeros((50, N)), "noise": np.full((50, 3, 1), 1e-3)}
    predictive = GPPredictive(model, samples, train_args=(X, np.zeros((3, N))))
    draws = predictive(KEY, X[:3] + 0.01)
    # The largest of 450 normal numbers is above 6 with a probability of 1e-6.
    assert np.max(np.abs(draws["y"] - draws["f"][:, None])) < 6e-3


def test_latents_of_rows_outside_of_their_plate_are_not_those_of_others():
    def model(X, y=None):
        f = numpyro.sample("f", GaussianProcess(RBF(), X))
        e = numpyro.sample("e", dist.Normal(0.0, 1.0).expand([X.shape[0]]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + e, 0.1), obs=y)

    samples = {"f": np.zeros((4, N)), "e": np.ones((4, N))}
    predictive = GPPredictive(model, samples, train_args=(X, Y))
    for number in (1, N - 1):
        with pytest.raises(ValueError, match="Site 'e' has the shape"):
            predictive(KEY, X[:number] + 0.1)
    with jax.enable_x64(False):  # the same rows of another float type
        same = GPPredictive(model, samples, train_args=(jnp.asarray(X), jnp.asarray(Y)))
        draws = same(KEY, np.asarray(X, np.float64))
        assert abs(np.mean(draws["y"] - draws["f"]) - 1.0) < 0.2  # 5 standard errors

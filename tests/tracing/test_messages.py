"""What is found at the sites of a trace, and what is refused there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_sgp import GaussianProcess
from numpyro_sgp.kernels import RBF
from numpyro_sgp.tracing import checks, messages

N = 4
X = np.arange(float(N))[:, None]
Y = np.zeros(N)


def trace_of(model, *args):
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args)


def gp(inputs=X):
    return GaussianProcess(RBF(), inputs)


def shifted(f, by):
    return f + by


def observe(f, y=Y, name="data", size=N, **kwargs):
    with numpyro.plate(name, size, **kwargs) as rows:
        numpyro.sample("y", dist.Normal(f, 1.0), obs=None if y is None else y[rows])


def test_wrappers_are_taken_off_and_put_back():
    inner = gp().expand([2, 3])
    fn, reinterpreted = messages.unwrap(inner.to_event(1).to_event(1))
    assert fn is inner and reinterpreted == 2
    again = messages.rewrap(fn, 2)
    assert again.event_shape == (2, 3, N)
    assert messages.rewrap(fn, 0) is fn


def test_only_latent_processes_are_found():
    def model():
        f = numpyro.sample("f", gp())
        numpyro.sample("g", gp().expand([2]).to_event(1))
        numpyro.sample("observed", gp(), obs=jnp.zeros(N))
        numpyro.sample("scale", dist.Normal())
        numpyro.deterministic("twice", 2 * f)
        observe(f)

    found = [name for name, s in trace_of(model).items() if messages.is_latent_gp(s)]
    assert found == ["f", "g"]


@pytest.mark.parametrize("event", [0, 1])
def test_a_masked_process_is_refused(event):
    def model():
        with handlers.mask(mask=False):
            numpyro.sample("f", gp().expand([2]).to_event(event))

    with pytest.raises(ValueError, match="GP site 'f' is masked.*observed sites only"):
        messages.is_latent_gp(trace_of(model)["f"])


def test_other_masked_sites_are_left_alone():
    def model():
        with handlers.mask(mask=False):
            numpyro.sample("scale", dist.Normal())

    assert not messages.is_latent_gp(trace_of(model)["scale"])


# ---- plates -------------------------------------------------------------------------


def outside():
    observe(numpyro.sample("f", gp()))


def subsampled_outside():
    with numpyro.plate("data", 10, subsample_size=N) as rows:
        batch = X[rows % N]
    f = numpyro.sample("f", gp(batch))
    with numpyro.plate("data", 10, subsample_size=N):
        numpyro.sample("y", dist.Normal(f), obs=Y)


def latent_plate():
    with numpyro.plate("latent", N):  # as many functions as rows, but no observations
        f = numpyro.sample("f", gp())
    observe(f.sum(0))


def latent_plate_shared():
    with numpyro.plate("outputs", 3, dim=-2):
        f = numpyro.sample("f", GaussianProcess(RBF(), X).expand([1]))
        with numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(f[:, 0]), obs=jnp.zeros((3, N)))


@pytest.mark.parametrize(
    "model", [outside, subsampled_outside, latent_plate, latent_plate_shared]
)
def test_processes_outside_the_data_plate_are_accepted(model):
    checks.check_plates(trace_of(model))


def inside():
    with numpyro.plate("data", N):
        f = numpyro.sample("f", gp())
        numpyro.sample("y", dist.Normal(f.sum(-1)), obs=Y)


def inside_event():
    with numpyro.plate("data", N):
        f = numpyro.sample("f", gp().expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(f.sum((-1, -2))), obs=Y)


def inside_subsampled():
    with numpyro.plate("data", 10, subsample_size=3) as rows:
        f = numpyro.sample("f", gp(X[rows % N]))
        numpyro.sample("y", dist.Normal(f.sum(-1)), obs=jnp.zeros(3))


def inside_subsampled_without_observations():
    with numpyro.plate("data", 10, subsample_size=3):
        numpyro.sample("f", gp())


@pytest.mark.parametrize(
    "model",
    [inside, inside_event, inside_subsampled, inside_subsampled_without_observations],
)
def test_a_process_inside_the_data_plate_is_refused(model):
    match = r"GP site 'f' is inside the data plate 'data', which makes [34] independent"
    with pytest.raises(ValueError, match=match) as error:
        checks.check_plates(trace_of(model))
    assert "numpyro.plate('data', N, subsample_size=B)" in str(error.value)
    assert "numpyro.sample('f', GaussianProcess(kernel, X_batch))" in str(error.value)


# ---- inputs -------------------------------------------------------------------------


def test_finite_inputs_are_accepted():
    checks.check_inputs("f", gp())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_named(bad):
    inputs = np.zeros((8, 2))
    inputs[[1, 6], [0, 1]] = bad
    match = r"GP site 'f' have NaN or infinite values in 2 of 8 rows \(first: \[1, 6\]\)"
    with pytest.raises(ValueError, match=match):
        checks.check_inputs("f", gp(inputs))


def test_rows_of_a_batch_of_inputs_are_counted_once():
    inputs = np.zeros((2, 8, 2))
    inputs[:, 1] = np.nan
    inputs[1, 7, 0] = np.nan
    with pytest.raises(ValueError, match=r"in 2 of 8 rows \(first: \[1, 7\]\)"):
        checks.check_inputs("f", gp(inputs))


def test_unknown_inputs_are_not_looked_at():
    def traced(inputs):
        checks.check_inputs("f", gp(inputs))
        return inputs

    jax.eval_shape(traced, np.full((3, 1), np.nan))


# ---- observations and latents ---------------------------------------------------------


def columns(y):
    f = numpyro.sample("f", gp())
    numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


# NumPyro lets a distribution broadcast to its data: two sets of N observations.
@pytest.mark.parametrize("y", [np.zeros(N), 0.0, np.zeros((2, N))])
def test_observations_of_the_right_shape_are_accepted(y):
    checks.check_observations(trace_of(columns, y))


@pytest.mark.parametrize(
    ("y", "mend"),
    [
        (np.zeros((N, 1)), r"\(use y\[:, 0\]\)"),
        (np.zeros(N + 1), "one observation for each row of X"),
        (np.zeros(1), "one observation for each row of X"),
    ],
)
def test_observations_of_another_shape_are_refused(y, mend):
    match = rf"Observed site 'y'.*the shape \({N},\) \({N} rows at GP site 'f'\).*{mend}"
    with pytest.raises(ValueError, match=match):
        checks.check_observations(trace_of(columns, y))


def test_continuous_latents_are_accepted():
    def model():
        numpyro.sample("scale", dist.Gamma(1.0, 1.0))
        observe(numpyro.sample("f", gp()))
        numpyro.sample("count", dist.Poisson(1.0), obs=2)

    checks.check_latents(trace_of(model))


@pytest.mark.parametrize("kind", [dist.Normal, dist.Bernoulli])
def test_an_imputed_response_is_refused_and_an_imputed_input_is_not(kind):
    missing = jnp.arange(N) == 1

    def model(response):
        known = {"obs": jnp.ones(N), "obs_mask": ~missing}
        with numpyro.plate("inputs", N):
            numpyro.sample("x", dist.Normal(), **known)
        f = numpyro.sample("f", gp())
        with numpyro.plate("data", N):
            if response:
                numpyro.sample("y", kind(jnp.abs(f)), **known)

    checks.check_imputed(trace_of(model, False))
    match = r"(?s)Site 'y' has an obs_mask.*handlers.mask\(mask=mask\):.*sample\('y'"
    with pytest.raises(ValueError, match=match):
        checks.check_imputed(trace_of(model, True))


def test_a_discrete_latent_is_refused():
    def model():
        f = numpyro.sample("f", gp())
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Bernoulli(logits=f))

    with pytest.raises(ValueError, match=r"'y' is discrete \(Bernoulli.*y=None\?"):
        checks.check_latents(trace_of(model))


def test_a_plate_of_another_size_is_told_by_name():
    def model(X, y):
        f = numpyro.sample("f", gp(X))
        with numpyro.plate("rows", N + 1):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    told = "Site 'y' has the batch shape .4,., .* the size 5 of plate 'rows'.*X.shape.0."
    with pytest.raises(ValueError, match=told):
        messages.trace_of(model, (X, Y), {}, at_site=messages.at_prior_mean)


def test_two_sites_of_a_name_are_told():
    def model(X, y):
        numpyro.sample("f", gp(X))
        observe(numpyro.sample("f", gp(X)), y)

    with pytest.raises(ValueError, match="two sites of the name 'f'"):
        messages.trace_of(model, (X, Y), {}, at_site=messages.at_prior_mean)


@pytest.mark.parametrize(
    "use",
    [lambda f: f, lambda f: f + 1.0, lambda f: -f, lambda f: f[0], jnp.exp],
    ids=["itself", "sum", "negative", "index", "exp"],
)
def test_a_process_without_a_site_is_told(use):
    def model(X, y):
        observe(use(gp(X)), y)

    told = "a distribution as if it were values.*f = numpyro.sample\\('f', GaussianProc"
    with pytest.raises(ValueError, match=told):
        messages.trace_of(model, (X, Y), {}, at_site=messages.at_prior_mean)


def test_arguments_that_are_absent_are_told():
    def model(X, y):
        observe(numpyro.sample("f", gp(X)), y)

    told = "called without 'y'.*def model.X, y=None.*missing 1 required"
    with pytest.raises(TypeError, match=told):
        messages.trace_of(model, (X,), {})


@pytest.mark.parametrize("call", [lambda: shifted(1.0), lambda: dist.Gamma()])
def test_arguments_that_are_absent_elsewhere_stay_as_they_are(call):
    def model(X):
        call()

    with pytest.raises(TypeError, match=r"^\S+ missing 1 required"):
        messages.trace_of(model, (X,), {})


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("of mine"),
        AssertionError("weights must broadcast to one"),
        AttributeError("module 'jax.numpy' has no attribute 'broadcast'"),
        TypeError("'method' object is not iterable"),
        ValueError("an argument of GaussianProcess is wrong"),
    ],
)
def test_errors_of_the_model_itself_stay(error):
    def model(X, Y):
        gp(X)
        raise error

    with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
        messages.trace_of(model, (X, np.ones((4, 2))), {})


def test_of_functions_that_a_model_hands_on_arguments_are_not_its_own():
    def model(X):
        mean = lambda X, t: X[:, 0]  # noqa: E731
        numpyro.sample("f", GaussianProcess(RBF(), X, mean=mean))

    with pytest.raises(TypeError, match=r"^\S+ missing 1 required"):
        messages.trace_of(model, (X,), {})

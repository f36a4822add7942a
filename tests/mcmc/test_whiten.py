"""Whitened models: a change of variables, and a posterior known exactly."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.util import log_density

from numpyro_sgp import GaussianProcess, WhitenReparam, whiten
from numpyro_sgp.kernels import RBF
from tests.helpers import factorised

N = 6
X = np.linspace(0.0, 3.0, N)[:, None]
Y = np.sin(2 * X[:, 0]) + 0.5
NOISE = 0.4
JITTER = 1e-4  # in every reference


def gp(variance=1.2, lengthscale=0.6, mean=0.5, inputs=X):
    return GaussianProcess(RBF(variance, lengthscale), inputs, mean, JITTER)


def dense(variance=1.2, lengthscale=0.6):
    K = variance * np.exp(-0.5 * (X - X.T) ** 2 / lengthscale**2)
    return K + JITTER * variance * np.eye(N)


def observe(f):
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)


def known():
    observe(numpyro.sample("f", gp()))


def sampled():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    observe(numpyro.sample("f", gp(lengthscale=lengthscale)))


def sampled_mean():
    level = numpyro.sample("level", dist.Normal())
    observe(numpyro.sample("f", gp(mean=level)))


def sampled_mean_function():
    level = numpyro.sample("level", dist.Normal())
    observe(numpyro.sample("f", gp(mean=lambda x: level * x[:, 0])))


def plate():
    with numpyro.plate("latent", 2):
        f = numpyro.sample("f", gp())
    observe(f[0] * jnp.exp(f[1]))


def expanded():
    f = numpyro.sample("f", gp().expand([2]))
    observe(f[0] * jnp.exp(f[1]))


def event():
    f = numpyro.sample("f", gp(np.array([1.2, 0.5]), 0.6).to_event(1))
    observe(f[0] * jnp.exp(f[1]))


def several():
    f, g = numpyro.sample("f", gp()), numpyro.sample("g", gp(0.5, 1.0))
    observe(f * jnp.exp(g))


def in_batch_plate():
    with numpyro.plate("latent", 2):
        f = numpyro.sample("f", gp().expand([3, 2]).to_event(0))
    observe(f.sum((0, 1)))


def density(model, values):
    value, trace = log_density(model, (), {}, values)
    f = {name: trace[name]["value"] for name in ("f", "g") if name in trace}
    return value, f


# ---- change of variables --------------------------------------------------------------

# Model, other values, and (site, batch, mean, factors of the functions).
L = np.linalg.cholesky(dense())
L2 = np.linalg.cholesky(dense(0.5))
CASES = {
    "known": (known, {}, [("f", (), 0.5, L)]),
    "sampled": (
        sampled,
        {"lengthscale": 0.9},
        [("f", (), 0.5, np.linalg.cholesky(dense(1.2, 0.9)))],
    ),
    "sampled mean": (sampled_mean, {"level": 0.3}, [("f", (), 0.3, L)]),
    "sampled mean function": (
        sampled_mean_function,
        {"level": 0.3},
        [("f", (), 0.3 * X[:, 0], L)],
    ),
    "plate": (plate, {}, [("f", (2,), 0.5, np.stack([L, L]))]),
    "expanded": (expanded, {}, [("f", (2,), 0.5, np.stack([L, L]))]),
    "event": (event, {}, [("f", (2,), 0.5, np.stack([L, L2]))]),
    "several": (
        several,
        {},
        [("f", (), 0.5, L), ("g", (), 0.5, np.linalg.cholesky(dense(0.5, 1.0)))],
    ),
    "batch in a plate": (
        in_batch_plate,
        {},
        [("f", (3, 2), 0.5, np.broadcast_to(L, (3, 2, N, N)))],
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", CASES)
def test_whitening_is_a_change_of_variables(case):
    model, others, gps = CASES[case]
    others = {name: jnp.asarray(value) for name, value in others.items()}
    again = pickle.loads(pickle.dumps(whiten(model)))
    whitened = jax.jit(lambda values: density(again, values))
    centred = jax.jit(lambda values: density(model, values))
    rng = np.random.default_rng(0)
    for _ in range(3):
        eps = {name: rng.normal(size=(*batch, N)) for name, batch, *_ in gps}
        f = {n: mean + (L @ eps[n][..., None])[..., 0] for n, _, mean, L in gps}
        log_det = sum(
            np.linalg.slogdet(np.broadcast_to(L, (*batch, N, N)))[1].sum()
            for _, batch, _, L in gps
        )
        white = {f"{name}_white": value for name, value in eps.items()}
        value, got_f = whitened({**others, **white})
        for name in f:
            assert_allclose(got_f[name], f[name], rtol=1e-9, atol=1e-12)
        expected, _ = centred({**others, **f})
        assert_allclose(value, expected + log_det, rtol=1e-9)


def test_sites_of_the_whitened_model():
    def model():
        known()
        with numpyro.plate("latent", 2):
            numpyro.sample("g", gp())
        numpyro.sample("h", gp().expand([2]).to_event(1))
        numpyro.sample("other", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))

    trace = {}

    def run():
        trace.update(handlers.trace(handlers.seed(whiten(model), 0)).get_trace())

    jax.eval_shape(run)
    for name, batch, event_shape in [
        ("f", (), (N,)),
        ("g", (2,), (N,)),
        ("h", (), (2, N)),
    ]:
        white = trace[f"{name}_white"]["fn"]
        assert (white.batch_shape, white.event_shape) == (batch, event_shape)
        assert trace[name]["type"] == "deterministic"
        assert trace[name]["value"].shape == (*batch, *event_shape)
    assert trace["other"]["type"] == "sample" and "other_white" not in trace


# ---- cost -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "others", "count"),
    [
        (known, {}, 0),
        (plate, {}, 0),
        (sampled, {"lengthscale": 0.9}, 1),
    ],
)
def test_known_covariances_are_factorised_once_and_not_at_every_step(model, others, count):
    shape = (2, N) if model is plate else (N,)
    values = {**others, "f_white": jnp.zeros(shape)}
    step = jax.value_and_grad(lambda values: density(whiten(model), values)[0])
    assert len(factorised(jax.make_jaxpr(step)(values).jaxpr)) == count


# ---- errors ---------------------------------------------------------------------------


def run(model):
    handlers.seed(whiten(model), 0)()


def test_inputs_that_are_not_finite_are_refused():
    inputs = X.copy()
    inputs[2] = np.nan
    with pytest.raises(ValueError, match=r"GP site 'f' have NaN .*first: \[2\]"):
        run(lambda: numpyro.sample("f", gp(inputs=inputs)))


def test_a_process_in_the_data_plate_is_refused():
    def model():
        with numpyro.plate("data", N):
            f = numpyro.sample("f", gp())
            numpyro.sample("y", dist.Normal(f.sum(-1), 1.0), obs=Y)

    with pytest.raises(ValueError, match="GP site 'f' is inside the data plate 'data'"):
        run(model)


def test_a_process_at_the_rows_of_a_minibatch_is_refused():
    """Its whitened values would be those of other rows in each step (HMCECS)."""

    def model(X, y, at_rows):
        data = numpyro.plate("data", N, subsample_size=3)
        with data as idx:
            rows = idx
        f = numpyro.sample("f", GaussianProcess(RBF(), X[rows] if at_rows else X))
        with data:
            mean = f if at_rows else f[rows]
            numpyro.sample("y", dist.Normal(mean, 0.3), obs=y[rows])

    given = jnp.asarray(X), jnp.zeros(N)
    with handlers.seed(rng_seed=0):
        whiten(model)(*given, at_rows=False)
    with pytest.raises(ValueError, match=r"minibatch of plate 'data' \(3 of"):
        with handlers.seed(rng_seed=0):
            whiten(model)(*given, at_rows=True)


def test_enumerated_latents_may_add_axes_before_those_of_the_data():
    """As NumPyro's enumeration gives their values, with funsor."""

    def model(X, y):
        f = numpyro.sample("f", GaussianProcess(RBF(), X))
        with numpyro.plate("data", N):
            z = numpyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(f, jnp.where(z == 1, 2.0, 0.3)), obs=y)

    values = {"f_white": jnp.zeros(N), "z": jnp.array([[0], [1]])}
    given = handlers.substitute(handlers.seed(whiten(model), 0), data=values)
    trace = handlers.trace(given).get_trace(jnp.asarray(X), jnp.zeros(N))
    assert trace["y"]["fn"].shape() == (2, N)


def test_samples_at_other_inputs_are_sent_to_the_conditional():
    def at(X):
        numpyro.sample("f", gp(inputs=X))

    samples = {"f_white": jnp.zeros((3, N))}
    for other in (X[:4], np.tile(X, (2, 1))):
        with pytest.raises(ValueError, match=r"\(6,\), but .*GPPredictive\(model, "):
            Predictive(whiten(at), samples)(jax.random.key(0), other)
    assert Predictive(whiten(at), samples)(jax.random.key(0), X)["f"].shape == (3, N)


def test_an_observed_process_is_left_alone():
    trace = handlers.trace(
        handlers.seed(whiten(lambda: numpyro.sample("f", gp(), obs=Y)), 0)
    ).get_trace()
    assert list(trace) == ["f"] and trace["f"]["is_observed"]


# ---- sampling -------------------------------------------------------------------------


def test_nuts_on_the_whitened_model_finds_the_exact_posterior():
    mcmc = MCMC(
        NUTS(whiten(known)),
        num_warmup=300,
        num_samples=700,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0))
    f = np.asarray(mcmc.get_samples(group_by_chain=True)["f"])
    assert f.shape == (2, 700, N)
    inverse = np.linalg.inv(dense() + NOISE**2 * np.eye(N))
    mean = 0.5 + dense() @ inverse @ (Y - 0.5)
    variance = np.diag(dense() - dense() @ inverse @ dense())
    # Five standard errors for each of 6 means and 6 second moments: were they normal,
    # one key in 1e5 would fail.
    centred = f - mean
    for got, sd in [
        (centred, np.sqrt(variance)),
        (centred**2 - variance, np.sqrt(2) * variance),
    ]:
        ess = effective_sample_size(got)
        assert (ess > 200).all()
        error = sd / np.sqrt(ess)
        assert (np.abs(got.mean((0, 1))) < 5 * error).all()
    # The errors are small enough to see that the data were used.
    prior_shift = np.abs(mean - 0.5) / np.sqrt(variance / 200)
    assert prior_shift.max() > 10


def test_density_of_the_centred_model_is_scipys():
    # So that the comparison above rests on a density from outside of the package.
    f = np.random.default_rng(0).normal(size=N)
    prior = scipy.stats.multivariate_normal(np.full(N, 0.5), dense()).logpdf(f)
    likelihood = scipy.stats.norm(f, NOISE).logpdf(Y).sum()
    assert_allclose(density(known, {"f": f})[0], prior + likelihood, rtol=1e-9)


def test_whitening_is_for_gp_sites():
    def model():
        numpyro.sample("x", dist.Normal())

    config = {"x": WhitenReparam()}
    with pytest.raises(TypeError, match="'x' is Normal.*LocScaleReparam"):
        handlers.seed(handlers.reparam(model, config=config), 0)()

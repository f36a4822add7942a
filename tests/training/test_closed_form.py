"""q(u) in closed form for Gaussian likelihoods, within the loss that L-BFGS minimises."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.training import descent as rooms
from numpyro_sgp.training.closed_form import gaussian_optimum
from numpyro_sgp.training.descent import Descent
from tests.helpers import rbf

KEY = jax.random.key(0)
N, NOISE = 40, 0.2
rng = np.random.default_rng(0)
X = rng.uniform(0.0, 5.0, (N, 2))
Y = np.sin(X.sum(axis=1)) + NOISE * rng.normal(size=N)
POSITIVE = dist.constraints.positive
SVGP = sgp.SVGP(inducing=X[::5])


def normal(f):
    return dist.Normal(f, numpyro.param("noise", NOISE, constraint=POSITIVE))


def model(X, y=None, likelihood=normal, mean=0.0, mask=True, scale=1.0):
    variance = numpyro.param("variance", 1.3, constraint=POSITIVE)
    kernel = sgp.kernels.RBF(variance, 0.8)
    with numpyro.handlers.scale(scale=scale):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=mean))
    with numpyro.plate("data", len(X)), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", likelihood(f), obs=y)


def of_two_responses(X, y=None):
    kernel = sgp.kernels.RBF(jnp.array([1.3, 0.7]), 0.8)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("responses", 2, dim=-2), numpyro.plate("data", len(X)):
        numpyro.sample("y", normal(f), obs=jnp.stack([y, -2.0 * y]))


def of_two_sites(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.3, 0.8), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5, 2.0), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", normal(f), obs=y)
        numpyro.sample("z", dist.Normal(3.0 * g, 0.5), obs=y)


def with_priors(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    model(X, y, lambda f: dist.Normal(2.0 * f - 1.0, scale))


def added(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.3, 0.8), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5, 2.0), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", normal(f + g), obs=y)


def mixed(X, y=None):
    """Three responses are linear in two functions, from none of which they begin."""
    W = numpyro.param("W", jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    kernel = sgp.kernels.RBF(jnp.array([1.3, 0.7]), 0.8)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("responses", 3, dim=-2), numpyro.plate("data", len(X)):
        numpyro.sample("y", normal(W @ f), obs=jnp.stack([y, -2.0 * y, y**2]))


def of_a_product(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.3, 0.8), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(0.5, 2.0), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", normal(f * g), obs=y)


def bent_later(f):
    bend = numpyro.param("bend", 0.0)
    return normal(f + bend * f**2)


def jumping_later(f):
    return normal(f + numpyro.param("jump", 0.0) * jnp.sign(f))


def of_a_full_scale(f):
    """Of a sensor that ends where some of the data are, hundreds of noises away."""
    return dist.Normal(jnp.minimum(f, 1.0), 0.01)


def counted(f):
    """What has neither a slope nor a curvature, and yet moves q(u)."""
    numpyro.factor("above", 5.0 * (f > 0.3))
    return normal(f)


def begun(option=SVGP, model=model, *args, loss=None, y=Y):
    """An SVI's inference problem where it starts."""
    guide = sgp.AutoSparseGP(model, option)
    guide.take_natural_gradients(1.0)
    loss = sgp.TraceGP_ELBO() if loss is None else loss
    svi = SVI(model, guide, optax.adam(0.01), loss)
    args = (jnp.asarray(X), jnp.asarray(y), *args)
    return svi, svi.init(KEY, *args), args, {}


def descents(monkeypatch, *case):
    """With the closed form, and by natural steps."""
    given = begun(*case)
    closed = Descent(*given, natural=True, briefly=True)
    monkeypatch.setattr(rooms, "gaussian_optimum", lambda *_: None)
    return closed, Descent(*given, natural=True, briefly=True)


GAUSSIAN = {
    "svgp": (SVGP,),
    "pseudo-data": (sgp.SVGP(inducing=X[::5], covariance="pseudo_data"),),
    "vgp": (sgp.VGP(),),
    "tight": (sgp.SVGP(inducing=X[::5], tight="diagonal"),),
    "masked": (SVGP, model, normal, 0.0, np.arange(N) % 3 > 0),
    "scaled": (SVGP, model, normal, 0.0, True, 0.5),
    "mean": (SVGP, model, normal, lambda X: 2.0 * X[..., 0] - 5.0),
    "responses": (SVGP, of_two_responses),
    "sites": (SVGP, of_two_sites),
    "priors": (SVGP, with_priors),
    "a sum": (SVGP, added),
    "mixed": (SVGP, mixed),
}


@pytest.mark.filterwarnings("ignore:GP site 'f' is scaled")
@pytest.mark.quick(1)
@pytest.mark.parametrize("name", list(GAUSSIAN))
def test_it_is_where_natural_steps_lead(name, monkeypatch):
    closed, steps = descents(monkeypatch, *GAUSSIAN[name])
    # Evaluations by steps begin where those before ended.
    (loss, slope), _ = closed.evaluate(closed.x), steps.evaluate(steps.x)
    for _ in range(3):
        by_steps, slope_by_steps = steps.evaluate(steps.x)
    assert closed.work == 1 < steps.work
    np.testing.assert_allclose(loss, by_steps, rtol=1e-9, atol=1e-7)
    names = set(closed.free) - set(closed.profiled)
    assert names == set(steps.free) - set(steps.profiled)
    index = closed.index(names)
    size = np.abs(slope_by_steps).max()
    np.testing.assert_allclose(slope[index], slope_by_steps[index], atol=1e-5 * size)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "option",
    [
        sgp.SVGP(inducing=X[::5], covariance="diagonal"),
        sgp.SOLVEGP(6, 4),
        sgp.SOLVEGP(6, 4, tight="diagonal"),
    ],
    ids=str,
)
def test_it_is_not_above_where_many_steps_lead(option, monkeypatch):
    """Blocks that natural steps move side by side, each as if the others stood still."""
    closed, steps = descents(monkeypatch, option)
    for _ in range(5):
        steps.evaluate(steps.x)
    loss, _ = closed.evaluate(closed.x)
    assert steps.loss - 1e-5 < loss + 1e-5
    assert loss < steps.loss + 1e-9 * abs(loss)


def test_means_of_sets_like_the_prior_are_found_too():
    descent = Descent(*begun(sgp.ODVGP(6, 4)), natural=True, briefly=True)
    assert {name for name in descent.free if name.endswith("_mu")} <= set(descent.profiled)
    descent.start()
    free = {name: jnp.asarray(value) for name, value in descent.free_now().items()}
    slopes = jax.grad(lambda free: descent._at(free, descent._data)[0])(free)
    for name in descent.profiled:
        np.testing.assert_allclose(slopes[name], 0.0, atol=1e-6)


NOT_ONE = {
    "student": lambda f: dist.StudentT(3.0, f, 50.0),  # next to Gaussian near by
    "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    "laplace": lambda f: dist.Laplace(f, 1.0),
    "bent later": bent_later,
    "jumping later": jumping_later,
    "counted": counted,
    "full scale": of_a_full_scale,
    "heteroscedastic in f": lambda f: dist.Normal(f, 1.0 + f**2),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", list(NOT_ONE))
def test_other_likelihoods_have_none(name):
    y = np.abs(np.round(3.0 * Y))
    given = begun(SVGP, model, NOT_ONE[name], y=y)
    descent = Descent(*given, natural=True, briefly=True)
    descent.evaluate(descent.x)
    assert descent.work > 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case",
    [
        (SVGP, of_a_product),
        (sgp.SVGP(inducing=X[::5], whiten=False),),
        (sgp.SVGP(inducing=X[::5], covariance="dual"),),
    ],
    ids=["a product of two", "not whitened", "dual"],
)
def test_what_else_has_none(case):
    descent = Descent(*begun(*case), natural=True, briefly=True)
    descent.evaluate(descent.x)
    assert descent.work > 1


@pytest.mark.parametrize(
    "loss",
    [sgp.TraceGP_ELBO(sgp.GaussHermite(1)), sgp.TraceGP_ELBO(num_particles=2)],
    ids=["one node", "two particles"],
)
def test_a_bound_that_is_another_one_has_none(loss):
    def found(loss):
        svi, state, args, kwargs = begun(loss=loss)
        free = svi.optim.get_params(state.optim_state)
        where = free, args, lambda data: (data, kwargs)
        return gaussian_optimum(svi, KEY, *where, numpyro.handlers.block)

    assert found(loss) is None and found(sgp.TraceGP_ELBO()) is not None


def test_a_model_that_looks_at_its_data_has_steps():
    y = np.where(np.arange(N) % 3, Y, np.nan)

    def looking(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.3, 0.8), X))
        known = ~np.isnan(y) if isinstance(y, np.ndarray) else ~jnp.isnan(y)
        numpyro.sample("y", dist.Normal(f[known], 0.2).to_event(1), obs=y[known])

    guide = sgp.AutoSparseGP(looking, SVGP)
    svi = SVI(looking, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    found = sgp.fit_lbfgs(
        svi, KEY, X, y, natural=True, max_iterations=3, progress_bar=False
    )
    assert np.isfinite(found.losses).all()


@settings(max_examples=3)
@given(st.integers(0, 2**32 - 1))
def test_the_bound_is_that_of_dense_algebra(seed):
    """Titsias 2009, eq. 9, of random inputs, points, noise and missing rows."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(N, 2)), rng.normal(size=(6, 2))
    noise, mean = np.exp(rng.normal()), rng.normal()
    y, known = 3.0 * rng.normal(size=N), rng.random(N) < 0.7
    option = sgp.SVGP(inducing=jnp.asarray(z), jitter=1e-10)
    given = begun(option, model, normal, mean, jnp.asarray(known))
    (svi, state, args, kwargs), inputs = given, (jnp.asarray(x), jnp.asarray(y))
    free = svi.optim.get_params(state.optim_state)
    free = {**free, "noise": jnp.log(noise)}
    descent = Descent(svi, state, (*inputs, *args[2:]), kwargs, natural=True, briefly=True)
    loss, _ = descent.evaluate(descent._ravelled(free))

    x, y = x[known], y[known] - mean
    Kuu, Kuf = rbf(z, z, 1.3, 0.8), rbf(z, x, 1.3, 0.8)
    Q = Kuf.T @ np.linalg.solve(Kuu + 1e-10 * 1.3 * np.eye(6), Kuf)
    C = Q + noise**2 * np.eye(len(x))
    bound = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2.0 * np.pi * C)[1])
    bound -= 0.5 * np.sum(1.3 - np.diag(Q)) / noise**2
    assert descent.work == 1
    np.testing.assert_allclose(-loss, bound, rtol=1e-6, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("noise", [1e-1, 1e-3])
def test_float32_with_little_noise(noise, monkeypatch):
    """Rounding of I + A A' would be more than I: the bound is not below that of steps."""
    with jax.enable_x64(False):
        x = np.linspace(0.0, 1.0, 400)[:, None]
        y = np.sin(12.0 * x[:, 0]) + noise * np.random.default_rng(0).normal(size=400)
        kernel = sgp.kernels.RBF(1.0, 0.1)

        def narrow(X, y=None):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", dist.Normal(f, noise), obs=y)

        guide = sgp.AutoSparseGP(narrow, sgp.SVGP(inducing=x[::20]))
        guide.take_natural_gradients(1.0)
        svi = SVI(narrow, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
        args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
        given = svi, svi.init(KEY, *args), args, {}
        closed = Descent(*given, natural=True, briefly=True)
        monkeypatch.setattr(rooms, "gaussian_optimum", lambda *_: None)
        steps = Descent(*given, natural=True, briefly=True)
        for _ in range(3):
            steps.evaluate(steps.x)
        loss, slope = closed.evaluate(closed.x)
        assert closed.work == 1 and np.isfinite(slope).all()
        assert loss <= steps.loss + 1e-5 * abs(steps.loss)

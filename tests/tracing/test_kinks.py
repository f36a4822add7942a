"""Likelihoods whose slopes jump: that they are seen, and what their fits are worth."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import expit
from jax.scipy.stats import norm
from numpy.testing import assert_allclose
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp.tracing.kinks import has_kinks
from tests.helpers import slow

N = 30
SINE = np.sin(np.linspace(0.0, 6.0, N))
COUNTS = np.random.default_rng(0).poisson(3.0, N)
SMOOTH = {
    "Normal": (lambda f: dist.Normal(f, 0.3), SINE),
    "little noise": (lambda f: dist.Normal(f, 1e-3), SINE),
    "far away": (lambda f: dist.StudentT(3.0, f, 0.1), 1e3 + SINE),
    "Cauchy": (lambda f: dist.Cauchy(f, 0.01), SINE),
    "Poisson": (lambda f: dist.Poisson(jnp.exp(f)), COUNTS),
    "Bernoulli of logits": (lambda f: dist.Bernoulli(logits=f), SINE > 0),
    "Bernoulli": (lambda f: dist.Bernoulli(expit(f)), SINE > 0),
    "probit": (lambda f: dist.Bernoulli(norm.cdf(f)), SINE > 0),
    "TruncatedNormal": (lambda f: dist.TruncatedNormal(f, 0.3, low=0.0), np.abs(SINE)),
    "OrderedLogistic": (lambda f: dist.OrderedLogistic(f, np.arange(3.0)), COUNTS % 4),
}
KINKED = {
    "Laplace": (lambda f: dist.Laplace(f, 0.3), SINE),
    "Laplace far away": (lambda f: dist.Laplace(f, 0.3), 1e3 + SINE),
    "quantile": (lambda f: dist.AsymmetricLaplaceQuantile(f, 0.3, 0.9), SINE),
    "rectified": (lambda f: dist.Normal(jax.nn.relu(f), 0.3), np.maximum(SINE, 0)),
    "absolute": (lambda f: dist.Poisson(jnp.abs(f) + 0.1), COUNTS),
    "clipped": (lambda f: dist.Bernoulli(jnp.clip(0.5 + 0.2 * f, 0.05, 0.95)), SINE > 0),
}


@pytest.mark.quick(10)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*SMOOTH, *KINKED])
def test_kinks_are_seen_and_smooth_likelihoods_have_none(name, dtype):
    likelihood, y = {**SMOOTH, **KINKED}[name]
    with jax.enable_x64(dtype == "float64"):
        y = jnp.asarray(y * 1 if y.dtype == bool else y)

        def total(f):
            return jnp.sum(likelihood(f[0]).log_prob(y))

        found = has_kinks(jax.jit(jax.grad(total)), (1, N), np.dtype(dtype))
    assert found == (name in KINKED)


CLAMPED = {
    "survival": lambda f, y: jnp.log(jnp.maximum(norm.sf(y, f, 0.3), 1e-30)),
    "cloglog": lambda f, y: jnp.log(jnp.maximum(1.0 - jnp.exp(-jnp.exp(f)), 1e-7)),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_clamps_where_the_density_is_next_to_nothing_are_no_kinks(name):
    y = jnp.asarray(SINE)

    def total(f):
        return jnp.sum(CLAMPED[name](f[0], y))

    assert not has_kinks(jax.jit(jax.grad(total)), (1, N), np.dtype("float64"))


def test_kinks_do_not_hide_that_rows_are_combined():
    """A layer whose inputs are two rows of another one, under a Laplace likelihood."""
    X = np.linspace(0.0, 3.0, 12)[:, None]

    def model(X, y=None):
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        pairs = jnp.stack([g[0::2], g[1::2]], axis=-1)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), pairs))
        with numpyro.plate("data", len(pairs)):
            numpyro.sample("y", dist.Laplace(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    guide.setup(X, jnp.zeros(6))
    found = guide.known().coupling
    assert found.combines and found.kinked and not found.couples


RNG = np.random.default_rng(1)
X = np.sort(RNG.uniform(0.0, 10.0, (20, 1)), axis=0)
APART = np.sqrt(3.0) * np.abs(X - X.T)
K = (1.0 + APART) * np.exp(-APART)
NOISE = 0.05
Y = np.linalg.cholesky(K + 1e-9 * np.eye(20)) @ RNG.normal(size=20)
Y = Y + NOISE * RNG.laplace(size=20)


def laplace(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Laplace(f, NOISE), obs=y)


@pytest.fixture(scope="module")
def dense():
    """The best Gaussian, by E|y - f| in closed form and L-BFGS: its bound, means, sds."""
    size, root = len(Y), np.linalg.cholesky(K + 1e-8 * np.eye(20))
    lower = np.tril_indices(size)

    def moments(p):
        factor = jnp.zeros((size, size)).at[lower].set(p[size:])
        here = root @ factor
        return root @ p[:size], jnp.sqrt(jnp.sum(here**2, axis=1)), factor

    def loss(p):
        mean, sd, factor = moments(p)
        z = (Y - mean) / sd
        away = sd * (2.0 * norm.pdf(z) + z * (1.0 - 2.0 * norm.cdf(-z)))
        likelihood = jnp.sum(-away / NOISE - jnp.log(2.0 * NOISE))
        log_det = jnp.sum(jnp.log(jnp.abs(jnp.diag(factor))))
        kl = 0.5 * (jnp.sum(factor**2) + jnp.sum(p[:size] ** 2) - size) - log_det
        return kl - likelihood

    program = jax.jit(jax.value_and_grad(loss))
    p = np.concatenate([np.zeros(size), np.eye(size)[lower]])
    options = {"maxiter": 5000, "maxcor": 50, "ftol": 1e-14, "gtol": 1e-8}
    for _ in range(3):
        found = minimize(
            lambda p: [np.asarray(a, float) for a in program(p)],
            p,
            jac=True,
            method="L-BFGS-B",
            options=options,
        )
        p = found.x
    mean, sd, _ = moments(p)
    return -found.fun, np.asarray(mean), np.asarray(sd)


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, slow(True)], ids=["fit", "joint"])
def test_a_laplace_likelihood_has_the_best_gaussian(joint, dense):
    """Twenty nodes have .3 nats too much, and means .3 sds off."""
    bound, mean, sd = dense
    fitted = sgp.fit(laplace, sgp.VGP(), (X, Y), joint=joint, progress_bar=False)
    q = fitted.posterior(X)["f"]
    # A spacing of .04 sds, whose error of slopes is of its order.
    assert_allclose(q.mean, mean, atol=0.05 * sd.min())
    assert_allclose(np.sqrt(q.variance), sd, rtol=0.02)
    assert_allclose(fitted.bound, bound, atol=0.01)


def test_trapezoids_are_right_for_smooth_functions_and_close_at_kinks():
    def expected(rule, fn):
        nodes, weights = rule.nodes(jax.random.key(0), {"f": (1,)}, jnp.float64)
        return float(weights @ fn(nodes["f"][:, 0]))

    # Beyond eight sds there are 2e-12 of it.
    assert_allclose(expected(sgp.Trapezoid(64), jnp.exp), np.exp(0.5), rtol=1e-11)
    exact = 2.0 * norm.pdf(0.3) + 0.3 * (1.0 - 2.0 * norm.cdf(-0.3))
    fine, gauss = (
        abs(expected(rule, lambda x: jnp.abs(x - 0.3)) - exact)
        for rule in (sgp.Trapezoid(400), sgp.GaussHermite(400))
    )
    # A spacing squared, times the density there, over eight at most.
    assert fine < 0.04**2 * 0.4 / 4.0
    assert fine < gauss


def test_many_nodes_are_numbers():
    nodes, weights = sgp.GaussHermite(500).nodes(None, {"f": (1,)}, jnp.float64)
    assert np.isfinite(nodes["f"]).all()
    assert_allclose(weights @ nodes["f"][:, 0] ** 2, 1.0, rtol=1e-12)


@pytest.mark.slow
def test_densities_of_new_responses_keep_their_digits_at_kinks():
    """Far from the data too, where the likelihood is narrow beside q(f)."""
    fitted = sgp.fit(laplace, sgp.VGP(), (X, Y), progress_bar=False)
    X_new, y_new = np.array([[5.0], [12.0], [20.0]]), np.array([0.3, -0.5, 1.0])
    q = fitted.posterior(X_new)["f"]

    def density(y, mean, sd):
        f = np.linspace(y - 40.0 * NOISE, y + 40.0 * NOISE, 200_001)
        weights = np.exp(-np.abs(y - f) / NOISE - 0.5 * ((f - mean) / sd) ** 2)
        total = weights.sum() * (f[1] - f[0])
        return np.log(total / (2.0 * NOISE * sd * np.sqrt(2.0 * np.pi)))

    sd = np.sqrt(np.asarray(q.variance))
    expected = list(map(density, y_new, np.asarray(q.mean), sd))
    found = fitted.log_score(X_new, y_new)["y"]
    # Trapezoids of a slope that jumps: a hundred Gauss-Hermite nodes have 6e-3.
    assert_allclose(found.mean, np.mean(expected), atol=5e-4)


@pytest.mark.slow
def test_more_points_gain_nothing_where_there_is_one_for_nearly_each_row():
    """A check by another rule would find the errors of one of them."""
    fitted = sgp.fit(laplace, sgp.SVGP(19), (X, Y), joint=True, progress_bar=False)
    # One point less than rows loses .02; other nodes at the larger fit had .17.
    assert abs(fitted.check().causes["inducing points"].nats) < 0.05


@pytest.mark.slow
def test_joint_fits_from_files_have_the_same_nodes(tmp_path):
    fitted = sgp.fit(laplace, sgp.VGP(), (X, Y), joint=True, progress_bar=False)
    fitted.save(tmp_path / "fit.sgp")
    loaded = sgp.load(tmp_path / "fit.sgp", laplace)
    X_new, y_new = np.array([[5.0], [20.0]]), np.array([0.3, 1.0])
    before, after = (f.log_score(X_new, y_new)["y"].mean for f in (fitted, loaded))
    assert before == after

"""Sparsified models: densities, posteriors and predictions by dense formulas."""

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
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import log_density

from numpyro_sgp import (
    SOLVEGP,
    SVGP,
    VGP,
    EllipticalSlice,
    GaussHermite,
    GaussianProcess,
    MixtureSVGP,
    MonteCarlo,
    sparsify,
    whiten,
)
from numpyro_sgp.kernels import RBF
from tests.helpers import (
    count_data,
    exact_gp,
    gaussian_model,
    optimal_whitened_q,
    poisson_model,
    rbf,
    regression_data,
)

X, Y = regression_data(8)
Z = np.linspace(-2.0, 2.0, 4)[:, None]
NOISE = 0.3
JITTER = 1e-8


def hyper(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    numpyro.deterministic("twice", 2.0 * lengthscale)
    f = numpyro.sample("f", GaussianProcess(RBF(1.0, lengthscale), X))
    numpyro.deterministic("rate", jnp.exp(f))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def sparse(model=hyper, inducing=Z, expectation=None):
    return sparsify(model, SVGP(inducing=inducing), expectation)


def projection(X, Z, variance=1.0, lengthscale=1.0):
    """A of f = A' v + residual, and the residual's covariance."""
    Kuu = rbf(Z, Z, variance, lengthscale) + JITTER * variance * np.eye(len(Z))
    A = np.linalg.solve(np.linalg.cholesky(Kuu), rbf(Z, X, variance, lengthscale))
    return A, rbf(X, X, variance, lengthscale) - A.T @ A


# ---- the density ------------------------------------------------------------------------


def test_gaussian_likelihood_has_titsias_optimum_and_bound():
    model = sparse().setup(X, Y)
    numbers = np.asarray(X), np.asarray(Y)

    def density(v, lengthscale):
        values = {"lengthscale": lengthscale, "f_u_white": v}
        value, _ = log_density(model, (X, Y), {}, values)
        return value - dist.LogNormal(0.0, 0.3).log_prob(lengthscale)

    @jax.jit
    def taylor(lengthscale):
        at = jnp.zeros(len(Z)), lengthscale
        return density(*at), jax.grad(density)(*at), jax.hessian(density)(*at)

    for lengthscale in (0.5, 1.5):
        value, slope, hessian = taylor(lengthscale)
        S = np.linalg.inv(-hessian)
        mean = S @ slope
        expected = optimal_whitened_q(*numbers, Z, NOISE, 1.0, lengthscale)
        assert_allclose(mean, expected[0], rtol=1e-6)
        assert_allclose(S, expected[1], rtol=1e-6, atol=1e-12)
        # Integrated over v, it is exp of the collapsed bound of Titsias (2009), eq. 9.
        integral = value + 0.5 * slope @ mean + 0.5 * np.linalg.slogdet(2 * np.pi * S)[1]
        A, residual = projection(X, Z, 1.0, lengthscale)
        C = A.T @ A + NOISE**2 * np.eye(len(X))
        bound = scipy.stats.multivariate_normal(np.zeros(len(X)), C).logpdf(Y)
        bound = bound - 0.5 * np.trace(residual) / NOISE**2
        assert_allclose(integral, bound, rtol=1e-8)


@pytest.mark.slow
def test_several_latent_functions_and_sites():
    def model(X, y):
        with numpyro.plate("latent", 2):
            kernel = RBF(jnp.array([1.0, 0.5]), jnp.array([1.0, 0.7]))
            f = numpyro.sample("f", GaussianProcess(kernel, X))
        g = numpyro.sample("g", GaussianProcess(RBF(0.8), X, 0.4).expand([1]).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0] - 2.0 * f[1] + g[0], NOISE), obs=y)

    rng = np.random.default_rng(0)
    v = rng.normal(size=(3, len(Z)))
    values = {"f_u_white": jnp.asarray(v[:2]), "g_u_white": jnp.asarray(v[2:])}
    rule = GaussHermite(2)  # exact for a square
    got, trace = log_density(sparse(model, Z, rule), (X, Y), {}, values)
    assert (trace["f_u_white"]["fn"].batch_shape, "g" in trace) == ((2,), False)
    mean, variance = 0.4, 0.0
    for own, weight, options in zip(
        v, [1.0, -2.0, 1.0], [(1.0, 1.0), (0.5, 0.7), (0.8, 1.0)], strict=True
    ):
        A, residual = projection(X, Z, *options)
        mean = mean + weight * A.T @ own
        variance = variance + weight**2 * np.diag(residual)
    likelihood = scipy.stats.norm(mean, NOISE).logpdf(Y) - 0.5 * variance / NOISE**2
    prior = scipy.stats.norm.logpdf(v).sum()
    assert_allclose(got, prior + likelihood.sum(), rtol=1e-9)


def test_expectation_over_a_likelihood_that_is_not_gaussian():
    X, y = count_data()
    v = np.random.default_rng(0).normal(size=len(Z))
    values = {"lengthscale": jnp.asarray(0.8), "f_u_white": jnp.asarray(v)}
    got, trace = log_density(sparse(poisson_model), (X, y), {}, values)
    A, residual = projection(X, Z, 1.0, 0.8)
    mean, variance = A.T @ v, np.diag(residual)
    expected = y * mean - np.exp(mean + 0.5 * variance) - scipy.special.gammaln(y + 1)
    factor = trace["expected_log_likelihood"]["fn"].log_factor
    assert_allclose(factor, expected.sum(), rtol=1e-8)
    prior = scipy.stats.norm.logpdf(v).sum() + dist.LogNormal(0.0, 0.3).log_prob(0.8)
    assert_allclose(got, prior + expected.sum(), rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)]
)
def test_gradients_are_finite_where_nothing_is_left_over(dtype):
    inputs, y = jnp.asarray(X, dtype), jnp.round(jnp.exp(Y)).astype(dtype)
    inputs = jnp.concatenate([inputs, inputs[:2]])  # and with rows that repeat
    y = jnp.concatenate([y, y[:2]])
    model = sparse(poisson_model, inputs[:8]).setup(inputs, y)
    values = {"lengthscale": jnp.asarray(0.9, dtype), "f_u_white": jnp.ones(8, dtype)}

    @jax.jit
    def density(values):
        return log_density(model, (inputs, y), {}, values)[0]

    value, gradient = jax.value_and_grad(density)(values)
    assert np.isfinite(value)
    for name, slope in gradient.items():
        assert slope.dtype == dtype and np.isfinite(slope).all(), name


def test_monte_carlo_keeps_its_draws():
    model = sparse(expectation=MonteCarlo(4)).setup(X, Y)
    values = {"lengthscale": jnp.asarray(0.8), "f_u_white": jnp.ones(len(Z))}
    density = [log_density(model, (X, Y), {}, values)[0] for _ in range(2)]
    assert density[0] == density[1]


# ---- sampling and prediction ------------------------------------------------------------


def test_inducing_points_at_the_inputs_give_the_exact_posterior():
    def with_deterministic(X, y=None):
        numpyro.deterministic("sum", X.sum())
        gaussian_model(X, y)

    model = sparse(with_deterministic, np.asarray(X))
    mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    samples = mcmc.get_samples()
    assert set(samples) == {"f_u_white", "sum"}
    predictive = Predictive(model, samples, return_sites=["f"])
    everywhere = jnp.concatenate([X, jnp.array([[-1.0], [0.3], [2.6]])])
    f = np.asarray(predictive(jax.random.key(1), everywhere)["f"])[None]
    _, mean, covariance = exact_gp(np.asarray(X), np.asarray(Y), everywhere, NOISE)
    variance = np.diag(covariance)
    # Five standard errors for 11 means and second moments: were they normal, one key in
    # 8e4 would fail. The jitter of 1e-8 shifts them by far less.
    centred = f - mean
    for got, sd in [
        (centred, np.sqrt(variance)),
        (centred**2 - variance, np.sqrt(2) * variance),
    ]:
        ess = effective_sample_size(got)
        assert (ess > 200).all()
        assert (np.abs(got.mean((0, 1))) < 5 * sd / np.sqrt(ess)).all()


def test_predictions_are_joint_draws_given_inducing_values():
    model = sparse(gaussian_model).setup(X, Y)
    v = np.array([1.0, -0.5, 0.3, 2.0])
    X_new = jnp.array([[-1.5], [-1.3], [0.7], [5.0]])
    num = 4000
    samples = {"f_u_white": jnp.broadcast_to(v, (num, 4))}
    draws = Predictive(model, samples)(jax.random.key(0), X_new)
    assert set(draws) == {"f", "y"}
    A, covariance = projection(X_new, Z)
    # Five standard errors for 4 means and 10 covariances of independent draws: one key in
    # 1e5 would fail.
    f = np.asarray(draws["f"]) - A.T @ v
    assert (np.abs(f.mean(0)) < 5 * np.sqrt(np.diag(covariance) / num)).all()
    scale = np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2
    assert (np.abs(f.T @ f / num - covariance) < 5 * np.sqrt(scale / num)).all()
    assert abs(np.std(draws["y"] - draws["f"]) / NOISE - 1) < 5 / np.sqrt(8 * num)


def test_sites_with_and_without_data():
    model = sparsify(hyper, SVGP(3)).setup(X, Y)
    assert model.inducing["f"].shape == (3, 1)
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(X, Y)
    found = {name: site["type"] for name, site in trace.items() if name != "data"}
    assert found == {
        "lengthscale": "sample",
        "twice": "deterministic",
        "f_u_white": "sample",
        "expected_log_likelihood": "sample",
    }
    samples = {"f_u_white": jnp.ones((6, 3)), "lengthscale": jnp.linspace(0.5, 1.0, 6)}
    draws = Predictive(model, samples)(jax.random.key(0), X[:2])
    shapes = {name: value.shape for name, value in draws.items()}
    assert shapes == {"f": (6, 2), "rate": (6, 2), "twice": (6,), "y": (6, 2)}
    assert_allclose(draws["rate"], np.exp(draws["f"]))
    assert_allclose(draws["twice"], 2 * samples["lengthscale"])


def test_elliptical_slices_of_inducing_values():
    model = sparse(gaussian_model)
    kernel = EllipticalSlice(model)
    state = kernel.init(jax.random.key(0), 0, None, (X, Y), {})
    assert set(state.z) == {"f_u_white"}
    value, _ = log_density(model, (X, Y), {}, state.z)
    prior = scipy.stats.norm.logpdf(state.z["f_u_white"]).sum()
    assert_allclose(state.log_likelihood, value - prior)


def test_conditioned_models():
    fixed = handlers.condition(hyper, data={"lengthscale": 0.8})
    values = {"f_u_white": jnp.ones(len(Z))}
    got, _ = log_density(sparse(fixed), (X, Y), {}, values)
    with_prior = {**values, "lengthscale": jnp.asarray(0.8)}
    expected, _ = log_density(sparse(), (X, Y), {}, with_prior)
    assert_allclose(got, expected)
    data = handlers.condition(hyper, data={"y": Y})
    assert_allclose(log_density(sparse(data), (X,), {}, with_prior)[0], expected)
    # From outside, as Gibbs does.
    outside = handlers.condition(sparse(), data={"lengthscale": 0.8})
    assert_allclose(log_density(outside, (X, Y), {}, values)[0], expected)


def log_hyper(X, y=None):
    ll = numpyro.sample("ll", dist.Normal(0.5, 0.3))
    f = numpyro.sample("f", GaussianProcess(RBF(1.0, jnp.exp(ll)), X))
    numpyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y)


def test_reparametrised_from_outside():
    model = sparse(log_hyper).setup(X, Y)
    outside = handlers.reparam(model, {"ll": LocScaleReparam(0)})

    def factor(model, **values):
        values = {"f_u_white": jnp.ones(len(Z)), **values}
        _, trace = log_density(model, (X, Y), {}, values)
        return trace["expected_log_likelihood"]["fn"].log_factor

    for ll in (-1.0, 1.0):
        expected = factor(model, ll=jnp.asarray(ll))
        got = factor(outside, ll_decentered=jnp.asarray((ll - 0.5) / 0.3))
        assert_allclose(got, expected, rtol=1e-6)
    assert abs(factor(model, ll=jnp.asarray(-1.0)) - expected) > 1.0


def test_no_latent_is_put_at_its_median_in_the_likelihood():
    model = sparse(log_hyper).setup(X, Y)
    with pytest.raises(ValueError, match="no value of the latent site 'll'"):
        values = {"f_u_white": jnp.ones(len(Z))}
        model._expected_log_likelihood({"f": Y.shape}, values, (X, Y), {})


def test_a_process_on_the_values_of_another():
    def model(X, y):
        h = numpyro.sample("h", GaussianProcess(RBF(), X))
        f = numpyro.sample("f", GaussianProcess(RBF(), h[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    deep = sparsify(model, {"h": SVGP(4), "f": SVGP(3)}).setup(X, Y)
    values = {"h_u_white": jnp.ones(4), "f_u_white": jnp.ones(3)}
    got, _ = log_density(deep, (X, Y), {}, values)
    A_h, R_h = projection(X, deep.inducing["h"])
    nodes, weights = np.polynomial.hermite_e.hermegauss(10)
    nodes, weights = nodes, weights / weights.sum()
    total = scipy.stats.norm.logpdf(np.ones(7)).sum()
    for x, w in zip(nodes, weights, strict=True):
        h = A_h.T @ np.ones(4) + np.sqrt(np.diag(R_h)) * x
        A_f, R_f = projection(h[:, None], deep.inducing["f"])
        score = scipy.stats.norm(A_f.T @ np.ones(3), NOISE).logpdf(Y)
        total += w * (score - 0.5 * np.diag(R_f) / NOISE**2).sum()
    assert_allclose(got, total, rtol=1e-6)


# ---- set-up and errors ------------------------------------------------------------------


@pytest.mark.slow
def test_set_up_inside_of_jit_and_once():
    model = sparsify(gaussian_model, SVGP(3))
    density = jax.jit(lambda v: log_density(model, (X, Y), {}, {"f_u_white": v})[0])
    value = density(jnp.ones(3))
    points = model.inducing["f"]
    outside = sparsify(gaussian_model, SVGP(3)).setup(X, Y)
    assert_allclose(points, outside.inducing["f"])
    assert model.setup(X + 1.0, Y).inducing["f"] is points
    assert_allclose(log_density(outside, (X, Y), {}, {"f_u_white": jnp.ones(3)})[0], value)


def test_unknown_inputs_are_refused():
    def run(X):
        return log_density(sparse(), (X, Y), {}, {"f_u_white": jnp.ones(len(Z))})[0]

    with pytest.raises(ValueError, match=r"sparse\.setup\(X, y\)"):
        jax.jit(run)(X)


def depends_on_f(X, y):
    f = numpyro.sample("f", GaussianProcess(RBF(), X))
    w = numpyro.sample("w", dist.Normal(f[0], 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + w, NOISE), obs=y)


def coupled(X, y):
    f = numpyro.sample("f", GaussianProcess(RBF(), X))
    numpyro.sample("y", dist.Normal(jnp.sum(f), NOISE), obs=y[0])


def in_data_plate(X, y):
    with numpyro.plate("data", X.shape[0]):
        f = numpyro.sample("f", GaussianProcess(RBF(), X))
        numpyro.sample("y", dist.Normal(f.sum(-1), NOISE), obs=y)


def subsampled(X, y):
    gaussian_model(X, y, batch_size=3)


def nothing(X, y):
    numpyro.sample("y", dist.Normal(numpyro.sample("b", dist.Normal()), 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "inducing", "y", "message"),
    [
        (depends_on_f, Z, Y, r"\['w'\] depend on f"),
        (coupled, Z, Y, "ties rows of X together"),
        (in_data_plate, Z, Y, "inside the data plate"),
        (subsampled, Z, Y, "minibatch of plate 'data' .3 of 8 rows"),
        (nothing, Z, Y, "no latent GP site"),
        (whiten(hyper), Z, Y, "not whiten"),
        (hyper, Z, None, "no observed site.*sparse.setup"),
        (hyper, Z, Y[:, None], "y\\[:, 0\\]"),
        (hyper, np.ones((3, 2)), Y, "GP site 'f': .* 2 columns"),
    ],
)
def test_models_that_are_refused(model, inducing, y, message):
    with pytest.raises(ValueError, match=message):
        sparse(model, inducing).setup(X, y)


def test_joint_draws_lift_the_refusal_of_coupled_rows():
    model = sparse(coupled, np.asarray(X), MonteCarlo(3, joint=True))
    v = np.random.default_rng(0).normal(size=len(X))
    got, _ = log_density(model, (X, Y), {}, {"f_u_white": jnp.asarray(v)})
    f = np.linalg.cholesky(rbf(X, X) + JITTER * np.eye(len(X))) @ v
    expected = scipy.stats.norm(f.sum(), NOISE).logpdf(Y[0])
    # The draws have the jitter's variance, 1e-8 in each row.
    assert_allclose(got - scipy.stats.norm.logpdf(v).sum(), expected, rtol=1e-2)


def test_other_inputs_and_sites_than_at_the_set_up():
    model = sparse(gaussian_model).setup(X, Y)
    with pytest.raises(ValueError, match="inputs with 2 columns.*points have 1"):
        handlers.seed(model, 0)(np.ones((3, 2)))

    def two(X, y=None, more=False):
        gaussian_model(X, y)
        if more:
            numpyro.sample("g", GaussianProcess(RBF(), X))

    model = sparse(two).setup(X, Y)
    with pytest.raises(ValueError, match="'g' was not in the model when it was set up"):
        handlers.seed(model, 0)(X, more=True)


def test_sites_with_data_are_those_of_the_set_up():
    def model(X, y=None, more=False):
        gaussian_model(X, y)
        if more:
            numpyro.deterministic("more", X.sum())

    model = sparse(model).setup(X, Y)
    with pytest.raises(ValueError, match=r"Sites \['more'\] were not .* set up"):
        handlers.seed(model, 0)(X, Y, more=True)
    assert "more" in handlers.trace(handlers.seed(model, 0)).get_trace(X, more=True)


def test_enumerated_latents_are_refused():
    def model(X, y):
        z = numpyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        gaussian_model(X, y, noise=0.3 + z)

    model = sparse(model).setup(X, Y)
    values = {"f_u_white": jnp.ones(len(Z))}
    with pytest.raises(ValueError, match="'z' is enumerated, .*DiscreteHMCGibbs"):
        log_density(model, (X, Y), {}, {**values, "z": jnp.arange(2)})
    # As DiscreteHMCGibbs does.
    fixed = handlers.condition(model, data={"z": jnp.array(1)})
    assert np.isfinite(log_density(fixed, (X, Y), {}, values)[0])


def test_arguments_that_are_refused():
    with pytest.raises(ValueError, match="one set of inducing points"):
        sparsify(hyper, SOLVEGP(3, 2))
    for option in (
        MixtureSVGP(3),
        SVGP(3, covariance="coupled"),
        {"f": SVGP(3, covariance="pseudo_data")},
        VGP(covariance="pseudo_data"),
        VGP(whiten=False),
    ):
        with pytest.raises(ValueError, match=r"ignore the q\(u\) of .*: use SVGP\(M\)"):
            sparsify(hyper, option)
    sparsify(hyper, VGP())
    with pytest.raises(TypeError, match=r"an object such as SVGP\(50\)"):
        sparsify(hyper, SVGP)
    with pytest.raises(TypeError, match="expectation must be GaussHermite"):
        sparsify(hyper, SVGP(3), 20)
    with pytest.raises(ValueError, match=r"for the sites \['g'\], but .* \['f'\]"):
        sparsify(hyper, {"g": SVGP(3)}).setup(X, Y)

"""The evidence lower bound of models with GP sites."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.contrib.control_flow import cond
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from scipy.special import gammaln
from scipy.stats import norm, poisson

import numpyro_sgp as sgp
from numpyro_sgp.families import Block, BlockGaussian
from tests import helpers

NOISE = 0.3


def set_up(model, approximation, *args, **options):
    """A guide and its initial parameters."""
    guide = sgp.AutoSparseGP(model, approximation, **options)
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    state = svi.init(random.key(0), *args)
    return guide, svi.get_params(state)


def loss(elbo, params, model, guide, *args, seed=1, **kwargs):
    key = random.key(seed)
    return jax.jit(lambda p: elbo.loss(key, p, model, guide, *args, **kwargs))(params)


def random_params(params, seed=0):
    """The parameters moved away from the prior at random."""
    rng = np.random.default_rng(seed)
    moved = {}
    for name, value in params.items():
        noise = jnp.asarray(rng.normal(size=value.shape))
        if name.endswith("_sqrt"):
            moved[name] = 0.5 * value + 0.1 * jnp.tril(noise, -1)
        elif name.endswith("_mu"):
            moved[name] = value + 0.5 * noise
        else:
            moved[name] = value
    return moved


@pytest.fixture(scope="module")
def regression():
    X, y = helpers.regression_data()
    guide, params = set_up(helpers.gaussian_model, sgp.SVGP(6), X, y)
    return X, y, guide, params


def test_two_nodes_are_exact_for_a_gaussian_likelihood(regression):
    X, y, guide, params = regression
    params = random_params(params)
    q = guide.posterior(params, X)["f"]
    closed = norm(q.mean, NOISE).logpdf(y).sum() - 0.5 * q.variance.sum() / NOISE**2
    for num_points in [2, 3, 20]:
        elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(num_points))
        value = loss(elbo, params, helpers.gaussian_model, guide, X, y)
        assert_allclose(-value, closed - q.prior_kl(), rtol=1e-12)


def test_quadrature_of_a_poisson_likelihood_is_its_closed_form():
    X, y = helpers.count_data()
    guide, params = set_up(helpers.poisson_model, sgp.SVGP(5), X, y)
    params = random_params(params, seed=3)
    q = guide.posterior(params, X)["f"]
    rate = np.exp(q.mean + q.variance / 2)
    expected = np.sum(y * q.mean - rate - gammaln(np.asarray(y) + 1))
    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(30), sum_sites=False)
    terms = loss(elbo, params, helpers.poisson_model, guide, X, y)
    assert_allclose(-terms["y"], expected, rtol=1e-10)
    assert_allclose(terms["f"], q.prior_kl(), rtol=1e-12)
    assert_allclose(
        -terms["lengthscale"],
        dist.LogNormal(0.0, 0.3).log_prob(params["lengthscale_auto_loc"]),
        rtol=1e-12,
    )


@pytest.mark.slow
def test_monte_carlo_agrees_with_quadrature():
    X, y = helpers.count_data()
    guide, params = set_up(helpers.poisson_model, sgp.SVGP(5), X, y)
    params = random_params(params, seed=3)
    exact = loss(
        sgp.TraceGP_ELBO(sgp.GaussHermite(30)), params, helpers.poisson_model, guide, X, y
    )
    for rule in [sgp.MonteCarlo(2000), sgp.MonteCarlo(2000, joint=True)]:
        values = [
            loss(sgp.TraceGP_ELBO(rule), params, helpers.poisson_model, guide, X, y, seed=s)
            for s in range(4)
        ]
        # Four estimates: their mean is within five standard errors (error probability
        # about 0.015 with three degrees of freedom; the seeds are fixed).
        error = np.std(values, ddof=1) / 2
        assert abs(np.mean(values) - exact) < 5 * error
        assert error < 0.01 * abs(exact)


@pytest.mark.slow
def test_several_sites_masks_and_extra_latents_beside_the_gp():
    def model(X, y, counts, mask):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
            with handlers.mask(mask=mask):
                numpyro.sample("y", dist.Normal(f + offset, scale), obs=y)
            numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    X, counts = helpers.count_data(8)
    y = jnp.sin(X[:, 0])
    mask = jnp.arange(8) % 3 != 0
    args = (X, y, counts, mask)
    guide, params = set_up(model, sgp.SVGP(4), *args)
    params = random_params(params, seed=1)
    q = guide.posterior(params, *args)["f"]
    scale, offset = params["scale_auto_loc"], params["offset_auto_loc"]
    terms = loss(
        sgp.TraceGP_ELBO(sgp.GaussHermite(30), sum_sites=False), params, model, guide, *args
    )
    closed = norm(q.mean + offset, scale).logpdf(y) - 0.5 * q.variance / scale**2
    assert_allclose(-terms["y"], np.sum(np.where(mask, closed, 0.0)), rtol=1e-10)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    f = np.asarray(q.mean) + np.sqrt(np.asarray(q.variance)) * nodes[:, None]
    expected = weights @ poisson(np.exp(f)).logpmf(counts) / weights.sum()
    assert_allclose(-terms["counts"], expected.sum(), rtol=1e-10)
    assert_allclose(-terms["offset"], norm.logpdf(offset).sum(), rtol=1e-10)


@pytest.mark.slow
def test_quadrature_over_two_latent_functions_is_a_product_rule():
    def model(X, y):
        kernel = sgp.kernels.RBF(jnp.ones(2), jnp.array([1.0, 2.0]))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=y)

    X, y = helpers.regression_data(7)
    guide, params = set_up(model, sgp.SVGP(4), X, y)
    params = random_params(params, seed=2)
    q = guide.posterior(params, X, y)["f"]
    assert q.mean.shape == (2, 7)
    # E[log N(y; a, e^b)] with a and b normal and independent, in closed form.
    square = (y - q.mean[0]) ** 2 + q.variance[0]
    precision = np.exp(-2 * q.mean[1] + 2 * q.variance[1])
    expected = -0.5 * np.log(2 * np.pi) - q.mean[1] - 0.5 * square * precision
    value = loss(sgp.TraceGP_ELBO(sgp.GaussHermite(30)), params, model, guide, X, y)
    assert_allclose(-value, np.sum(expected) - np.sum(q.prior_kl()), rtol=1e-8)


@pytest.mark.slow
def test_four_latent_functions_are_too_many_for_quadrature():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([4]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    X, _ = helpers.regression_data(6)
    y = jnp.arange(6) % 4
    guide, params = set_up(model, sgp.SVGP(3), X, y)
    with pytest.raises(ValueError, match=r"4 latent functions \('f': 4\).*MonteCarlo"):
        loss(sgp.TraceGP_ELBO(sgp.GaussHermite(5)), params, model, guide, X, y)
    assert np.isfinite(loss(sgp.TraceGP_ELBO(), params, model, guide, X, y))


@pytest.mark.slow
def test_a_likelihood_that_ties_rows_needs_joint_draws():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("total", dist.Normal(jnp.sum(f), 0.5), obs=y)

    X = jnp.linspace(0, 3, 6)[:, None]
    y = jnp.array(2.0)
    guide, params = set_up(model, sgp.SVGP(inducing=X), X, y)
    assert guide.couples_rows
    with pytest.raises(ValueError, match="ties rows of X together.*joint=True"):
        loss(sgp.TraceGP_ELBO(sgp.GaussHermite(20)), params, model, guide, X, y)
    with pytest.raises(ValueError, match="ties rows of X together"):
        loss(sgp.TraceGP_ELBO(sgp.MonteCarlo(5)), params, model, guide, X, y)
    q = guide.posterior(params, X, y)["f"]
    variance = np.sum(q.covariance_matrix)
    closed = norm(np.sum(q.mean), 0.5).logpdf(2.0) - 0.5 * variance / 0.25 - q.prior_kl()
    elbo = sgp.TraceGP_ELBO(sgp.MonteCarlo(4000, joint=True))
    # sd of (y - sum f)^2 / (2 * 0.25) is about variance * sqrt(2) / 0.5 here.
    error = variance * np.sqrt(2) / 0.5 / np.sqrt(4000)
    assert abs(-loss(elbo, params, model, guide, X, y) - closed) < 5 * error


def test_rows_are_not_tied_by_likelihoods_of_one_row_each(regression):
    assert not regression[2].couples_rows


def test_mean_field_elbo_of_numpyro_is_the_same_bound(regression):
    X, y, guide, params = regression
    params = random_params(params)
    exact = loss(sgp.TraceGP_ELBO(), params, helpers.gaussian_model, guide, X, y)
    particles = 4000
    elbo = TraceMeanField_ELBO(num_particles=particles)
    sampled = loss(elbo, params, helpers.gaussian_model, guide, X, y)
    q = guide.posterior(params, X)["f"]
    # A joint draw's log likelihood has this sd, from the moments of a quadratic form.
    C = np.asarray(q.covariance_matrix) / NOISE**2
    residual = np.asarray(y - q.mean) / NOISE
    sd = np.sqrt(0.5 * np.sum(C * C.T) + residual @ C @ residual)
    assert abs(sampled - exact) < 5 * sd / np.sqrt(particles)


def test_a_scale_handler_scales_likelihood_and_kl(regression):
    X, y, guide, params = regression
    params = random_params(params)
    scaled = handlers.scale(helpers.gaussian_model, scale=0.1)
    scaled_guide, _ = set_up(scaled, sgp.SVGP(6), X, y)
    full = loss(sgp.TraceGP_ELBO(), params, helpers.gaussian_model, guide, X, y)
    value = loss(sgp.TraceGP_ELBO(), params, scaled, scaled_guide, X, y)
    assert_allclose(value, 0.1 * full, rtol=1e-12)


def test_a_scale_of_the_gp_site_alone_is_told():
    def annealed(X, y=None):
        with handlers.scale(scale=0.1):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    with pytest.warns(UserWarning, match="'f' is scaled by 0.1. The KL.*annealed"):
        set_up(annealed, sgp.SVGP(5), *helpers.count_data())


@pytest.mark.quick(1)
@pytest.mark.parametrize("rule", [sgp.GaussHermite(7), sgp.MonteCarlo(7)])
def test_a_step_factorises_K_uu_once(rule):
    X, y = helpers.count_data()
    guide, params = set_up(helpers.poisson_model, sgp.SVGP(5), X, y)

    def objective(params):
        return loss(sgp.TraceGP_ELBO(rule), params, helpers.poisson_model, guide, X, y)

    jaxpr = jax.make_jaxpr(jax.value_and_grad(objective))(params)
    sizes = helpers.factorised(jaxpr.jaxpr)
    assert sizes.count(5) == 1 and sizes.count(len(X)) == 0


def test_gradient_is_that_of_finite_differences():
    X, y = helpers.count_data()
    guide, params = set_up(helpers.poisson_model, sgp.SOLVEGP(4, 3), X, y)
    params = random_params(params)

    @jax.jit
    def objective(params):
        return loss(sgp.TraceGP_ELBO(), params, helpers.poisson_model, guide, X, y)

    gradient = jax.grad(objective)(params)
    rng = np.random.default_rng(0)
    for name, value in params.items():
        direction = rng.normal(size=value.shape)
        if name.endswith("_sqrt"):
            direction = np.tril(direction)
        step = 1e-5
        up = objective({**params, name: value + step * direction})
        down = objective({**params, name: value - step * direction})
        # Central differences: error of order step^2 times the third derivative.
        assert_allclose(
            np.sum(gradient[name] * direction),
            (up - down) / (2 * step),
            rtol=1e-6,
            atol=1e-6,
        )


@pytest.mark.slow
def test_particles_average_over_the_other_latents():
    X, y = helpers.count_data()
    guide, params = set_up(helpers.poisson_model, sgp.SVGP(5), X, y, base_guide=AutoNormal)
    one = [
        float(loss(sgp.TraceGP_ELBO(), params, helpers.poisson_model, guide, X, y, seed=s))
        for s in range(40)
    ]
    many = loss(
        sgp.TraceGP_ELBO(num_particles=200), params, helpers.poisson_model, guide, X, y
    )
    error = np.std(one, ddof=1) * np.sqrt(1 / 40 + 1 / 200)
    assert np.std(one) > 0
    # Five standard errors: error probability below 1e-5 by the normal approximation.
    assert abs(np.mean(one) - many) < 5 * error


def test_guide_of_another_minibatch_is_refused(regression):
    X, y, guide, params = regression

    def other(X, y, **kwargs):
        prior = sgp.GaussianProcess(sgp.kernels.RBF(), X[:3])
        Z = numpyro.param("f_auto_Z", X[:2])
        block = Block(jnp.zeros(2), jnp.eye(2))
        q = sgp.SparsePosterior(prior, (Z,), BlockGaussian((block,)))
        numpyro.sample("f", q)

    with pytest.raises(ValueError, match="subsamples plate 'data'.*numpyro.plate"):
        loss(sgp.TraceGP_ELBO(), {}, helpers.gaussian_model, other, X, y, batch_size=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .* values of a GaussianProcess")
def test_guide_without_sparse_posterior_is_refused(regression):
    X, y, _, _ = regression
    guide = AutoDelta(helpers.gaussian_model)
    with pytest.raises(ValueError, match="no sparse posterior.*AutoSparseGP"):
        with handlers.seed(rng_seed=0):
            guide(X, y)
        loss(sgp.TraceGP_ELBO(), {}, helpers.gaussian_model, guide, X, y)


def test_a_number_is_no_expectation_rule():
    with pytest.raises(TypeError, match=r"GaussHermite\(20\)"):
        sgp.TraceGP_ELBO(20)


@pytest.mark.slow
def test_mutable_state_of_a_model_is_that_of_the_likeliest_node():
    X, y = helpers.regression_data(4)
    block = Block(jnp.array([0.5, -0.5]), 0.3 * jnp.eye(2))

    def guide(X, y):
        prior = sgp.GaussianProcess(sgp.kernels.RBF(), X)
        numpyro.sample("f", sgp.SparsePosterior(prior, (X[:2],), BlockGaussian((block,))))

    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        state = numpyro.primitives.mutable("state", {"total": jnp.array(0.0)})
        state["total"] = jnp.sum(f)
        numpyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y)

    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(5))
    result = elbo.loss_with_mutable_state(random.key(0), {}, model, guide, X, y)
    q = sgp.SparsePosterior(
        sgp.GaussianProcess(sgp.kernels.RBF(), X), (X[:2],), BlockGaussian((block,))
    )
    # The middle node of an odd rule is at the mean.
    assert_allclose(result["mutable_state"]["state"]["total"], np.sum(q.mean), rtol=1e-12)


@pytest.mark.slow
def test_latents_of_a_branch_are_those_of_the_guide():
    """NumPyro's ``cond`` does not replay, and drew them from the prior."""

    def branched(X, y=None):
        def branch(mean):
            return lambda _: numpyro.sample("a", dist.Normal(mean, 1.0))

        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
        a = cond(jnp.sum(X) > 0.0, branch(1.0), branch(0.0), None)
        numpyro.deterministic("level", 2.0 * a)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + a, NOISE), obs=y)

    def plain(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.5), X))
        a = numpyro.sample("a", dist.Normal(jnp.where(jnp.sum(X) > 0.0, 1.0, 0.0), 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + a, NOISE), obs=y)

    X = jnp.linspace(0.0, 1.0, 5)[:, None]
    y = jnp.cos(4.0 * X[:, 0])
    guide, params = set_up(branched, sgp.SVGP(2), X, y)
    params = {**random_params(params), "a_auto_loc": jnp.asarray(0.3)}
    expected = loss(sgp.TraceGP_ELBO(), params, plain, guide_like(guide, plain, X, y), X, y)
    for seed in range(2):
        found = loss(sgp.TraceGP_ELBO(), params, branched, guide, X, y, seed=seed)
        assert_allclose(found, expected, rtol=1e-12)
    draws = guide.sample_posterior(random.key(1), params, X, y, sample_shape=(3,))
    assert_allclose(draws["a"], 0.3)
    assert_allclose(draws["level"], 0.6)


def guide_like(guide, model, X, y):
    """One of another model, whose inducing points need not be told apart."""
    return set_up(model, guide.approximations["f"], X, y)[0]

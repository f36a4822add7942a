"""The guide: what it does at GP sites, beside them, and with bad input."""

import functools

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
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, init_to_uniform
from numpyro.infer.autoguide import (
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_sgp as sgp
from numpyro_sgp.guides import memory
from tests import helpers


def start(model, approximation, *args, loss=None, svi_kwargs=None, **options):
    """A guide that is set up, its SVI and its initial state."""
    guide = sgp.AutoSparseGP(model, approximation, **options)
    svi = SVI(model, guide, optax.adam(0.02), loss or sgp.TraceGP_ELBO())
    state = svi.init(random.key(0), *args, **(svi_kwargs or {}))
    return guide, svi, state


def predict(model, guide, params, X, return_sites):
    """Four draws at new inputs by NumPyro's Predictive."""
    predictive = Predictive(
        model, guide=guide, params=params, num_samples=4, return_sites=return_sites
    )
    return predictive(random.key(0), X)


@pytest.fixture(scope="module")
def counts():
    """A short fit of the Poisson model with a variational lengthscale."""
    X, y = helpers.count_data()
    guide = sgp.AutoSparseGP(helpers.poisson_model, sgp.SOLVEGP(4, 3), AutoNormal)
    svi = SVI(helpers.poisson_model, guide, optax.adam(0.05), sgp.TraceGP_ELBO())
    result = svi.run(random.key(0), 300, X, y, progress_bar=False)
    return X, y, guide, result


# ---- results ----------------------------------------------------------------------------


def test_predictive_draws_f_and_y_at_new_inputs(counts):
    _, _, guide, result = counts
    X_new = jnp.linspace(-1, 1, 5)[:, None]
    predictive = Predictive(
        helpers.poisson_model, guide=guide, params=result.params, num_samples=2000,
        return_sites=["f", "y", "lengthscale"],
    )  # fmt: skip
    draws = predictive(random.key(1), X_new)
    assert draws["f"].shape == draws["y"].shape == (2000, 5)
    # y given f is Poisson: the difference of the means is within five standard errors.
    gap = np.asarray(draws["y"] - np.exp(draws["f"]))
    assert np.all(np.abs(gap.mean(axis=0)) < 5 * gap.std(axis=0) / np.sqrt(2000))


def test_median_and_quantiles_are_those_of_the_parts(counts):
    X, _, guide, result = counts
    median = guide.median(result.params, X)
    assert_allclose(
        median["lengthscale"], guide.base_guide.median(result.params)["lengthscale"]
    )
    quantiles = guide.quantiles(result.params, [0.05, 0.5, 0.95], X)
    assert quantiles["f"].shape == (3, 12) and quantiles["lengthscale"].shape == (3,)
    assert_allclose(quantiles["f"][1], median["f"], rtol=1e-12)
    q = guide.posterior(result.params, X)["f"]
    assert_allclose(
        quantiles["f"][2] - median["f"], 1.6448536269514722 * np.sqrt(q.variance), rtol=1e-7
    )
    # Left out, the inputs are those of the set-up.
    assert_allclose(guide.median(result.params)["f"], median["f"])


@pytest.mark.slow
def test_levels_of_other_latents_have_the_axes_of_the_levels():
    """NumPyro's `AutoNormal` has one axis of levels whatever they are."""

    def model(X, y=None):
        scales = numpyro.sample("scales", dist.LogNormal(0.0, 0.3).expand([2]).to_event(1))
        kernel = sgp.kernels.RBF(scales[0], scales[1])
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X = jnp.linspace(0.0, 1.0, 5)[:, None]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3), base_guide=AutoNormal)
    guide.setup(X, jnp.ones(5))
    params = dict(guide.known().starts)
    for levels in (0.5, [0.1, 0.5]):
        found = guide.quantiles(params, levels, X)
        shape = np.shape(levels)
        assert found["scales"].shape == (*shape, 2) and found["f"].shape == (*shape, 5)
    median = guide.median(params, X)["scales"]
    assert_allclose(found["scales"][1], median, rtol=1e-6)


@pytest.mark.parametrize("levels", [[1.5], [0.5, -1.0], 1.5, "a", ["a"], [np.nan], None])
def test_quantiles_of_what_is_no_level_are_refused(counts, levels):
    X, _, guide, result = counts
    with pytest.raises(ValueError, match="levels between 0 and 1"):
        guide.quantiles(result.params, levels, X)


def test_one_level_may_be_a_number(counts):
    X, _, guide, result = counts
    known = guide.quantiles(result.params, [0.2], X)
    for level in (0.2, jnp.array(0.2), np.float64(0.2)):
        found = guide.quantiles(result.params, level, X)
        assert_allclose(found["f"], known["f"][0], rtol=1e-12)
    found = jax.jit(lambda level: guide.quantiles(result.params, level, X)["f"])(0.2)
    assert_allclose(found, known["f"][0], rtol=1e-12)


def test_quantiles_of_point_estimates_are_the_points():
    X, y = helpers.count_data()
    guide, svi, state = start(helpers.poisson_model, sgp.SVGP(4), X, y)
    params = svi.get_params(state)
    quantiles = guide.quantiles(params, [0.1, 0.9], X)["lengthscale"]
    assert_allclose(quantiles, params["lengthscale_auto_loc"].repeat(2))


def test_posterior_can_draw_the_hyperparameters(counts):
    X, _, guide, result = counts
    at_median = guide.posterior(result.params, X)["f"].mean
    drawn = guide.posterior(result.params, X, rng_key=random.key(3))["f"].mean
    again = guide.posterior(result.params, X, rng_key=random.key(3))["f"].mean
    assert_allclose(drawn, again)
    assert np.abs(drawn - at_median).max() > 1e-6


def test_posterior_at_the_optimum_is_the_exact_one():
    X, y = helpers.regression_data(12)
    X_new = jnp.linspace(-2, 2, 7)[:, None]
    _, mean, covariance = helpers.exact_gp(X, y, X_new, 0.3)
    m, S = helpers.optimal_whitened_q(X, y, X, 0.3)
    guide, _, _ = start(helpers.gaussian_model, sgp.SVGP(inducing=X), X, y)
    params = {
        "f_auto_Z": X,
        "f_auto_qu_mu": jnp.asarray(m),
        "f_auto_qu_sqrt": jnp.linalg.cholesky(S),
    }
    q = guide.posterior(params, X_new)["f"]
    assert_allclose(q.mean, mean, atol=1e-6)
    assert_allclose(q.covariance_matrix, covariance, atol=1e-6)


# ---- models that it takes ---------------------------------------------------------------


@pytest.mark.slow
def test_hyperparameters_may_be_params_or_numbers():
    def model(X, y=None):
        lengthscale = numpyro.param("lengthscale", 0.5, constraint=constraints.positive)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(2.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X, y = helpers.regression_data()
    guide, svi, state = start(model, sgp.SVGP(5), X, y)
    for _ in range(5):
        state, _ = jax.jit(svi.update)(state, X, y)
    params = svi.get_params(state)
    assert abs(params["lengthscale"] - 0.5) > 0.01
    kernel = guide.posterior(params, X)["f"].prior.kernel
    assert_allclose(kernel.lengthscale, params["lengthscale"])


@pytest.mark.slow
def test_sites_with_approximations_of_their_own():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern32(0.5), X))
        numpyro.deterministic("noise", jnp.exp(g))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)

    X, y = helpers.regression_data()
    approximations = {"f": sgp.SOLVEGP(4, 2), "g": sgp.SVGP(3, covariance="diagonal")}
    guide, svi, state = start(model, approximations, X, y)
    state, value = jax.jit(svi.update)(state, X, y)
    assert np.isfinite(value)
    params = svi.get_params(state)
    assert params["f_auto_qv_sqrt"].shape == (2, 2)
    assert params["g_auto_qu_sqrt"].shape == (3,)
    draws = guide.sample_posterior(random.key(0), params, X, sample_shape=(3,))
    assert_allclose(draws["noise"], np.exp(draws["g"]))


@pytest.mark.slow
def test_a_gp_of_a_gp():
    def model(X, y=None):
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), h[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X, y = helpers.regression_data()
    guide, svi, state = start(model, sgp.SVGP(4), X, y)
    params = svi.get_params(state)
    # Quadrature in the order of the model is the limit of Monte Carlo.
    exact = sgp.TraceGP_ELBO(sgp.GaussHermite(30)).loss(
        random.key(0), params, model, guide, X, y
    )
    values = [
        sgp.TraceGP_ELBO(sgp.MonteCarlo(2000)).loss(
            random.key(s), params, model, guide, X, y
        )
        for s in range(4)
    ]
    error = np.std(values, ddof=1) / 2
    assert abs(np.mean(values) - exact) < 5 * error
    assert predict(model, guide, params, X[:5], ["f"])["f"].shape == (4, 5)


def latents(kind):
    """A model of two latent functions with a lengthscale each, written in several ways."""

    def model(X, y=None):
        lengthscale = jnp.array([0.5, 2.0])
        if kind == "kernel":
            kernel = sgp.kernels.RBF(jnp.ones(2), lengthscale)
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        elif kind == "plate":
            with numpyro.plate("functions", 2):
                variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.1))
                kernel = sgp.kernels.RBF(variance, lengthscale)
                f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        elif kind == "expand":
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
        else:
            prior = sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]).to_event(1)
            f = numpyro.sample("f", prior)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[0] + f[1], 0.3), obs=y)

    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("kernel", marks=pytest.mark.slow), "plate", "expand", "event"]
)
def test_batches_of_latent_functions(kind):
    X, y = helpers.regression_data()
    model = latents(kind)
    share = kind != "expand"
    guide, svi, state = start(model, sgp.SVGP(4, share_inducing=share), X, y)
    state, value = jax.jit(svi.update)(state, X, y)
    assert np.isfinite(value)
    params = svi.get_params(state)
    assert params["f_auto_qu_sqrt"].shape == (2, 4, 4)
    assert params["f_auto_Z"].shape == ((4, 1) if share else (2, 4, 1))
    assert guide.posterior(params, X[:3])["f"].mean.shape == (2, 3)
    assert predict(model, guide, params, X[:3], ["f"])["f"].shape == (4, 2, 3)
    # Two rows and two functions: a plate of functions is no data plate.
    assert guide.posterior(params, X[:2])["f"].mean.shape == (2, 2)


@pytest.mark.slow
def test_local_latents_in_the_data_plate_share_its_minibatch():
    def model(X, y=None, batch_size=None):
        data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
        with data as idx:
            X_batch, y_batch = X[idx], None if y is None else y[idx]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X_batch))
        with data:
            offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Poisson(jnp.exp(f + offset)), obs=y_batch)

    X, y = helpers.count_data(12)
    kwargs = {"batch_size": 4}
    guide, svi, state = start(
        model, sgp.SVGP(3), X, y, svi_kwargs=kwargs, base_guide=AutoNormal
    )
    params = svi.get_params(state)
    assert params["offset_auto_loc"].shape == (12,)
    seeded = handlers.seed(handlers.substitute(guide, data=params), 0)
    guide_trace = handlers.trace(seeded).get_trace(X, y, **kwargs)
    model_trace = handlers.trace(
        handlers.replay(handlers.seed(model, 1), guide_trace)
    ).get_trace(X, y, **kwargs)
    idx = guide_trace["data"]["value"]
    assert_allclose(model_trace["data"]["value"], idx)
    # The GP site of the guide saw the rows that the base guide drew offsets for.
    assert_allclose(guide_trace["f"]["fn"].prior.X, X[idx])
    state, value = svi.update(state, X, y, **kwargs)
    assert np.isfinite(value)


@pytest.mark.slow
def test_minibatch_set_up_sees_more_than_one_batch():
    X, y = helpers.regression_data(60)
    guide, _, _ = start(
        helpers.gaussian_model, sgp.SVGP(20), X, y, svi_kwargs={"batch_size": 5}
    )
    assert guide.initial_verdicts["f"].variance_explained > 0.99
    with pytest.raises(ValueError, match="pass the model's arguments"):
        guide.median({name: value for name, value in start_params(guide).items()})


def start_params(guide):
    """The starting parameters of a guide's GP sites."""
    return {
        f"{site}_auto_{name}": value
        for site, initial in guide.setup_state()["initial"].items()
        for name, value in initial.items()
    }


def test_frozen_inducing_points_are_no_parameters():
    X, y = helpers.regression_data()
    frozen = sgp.SOLVEGP(inducing=X[:3], orthogonal=X[3:5], train_inducing=False)
    guide, svi, state = start(helpers.gaussian_model, frozen, X, y)
    params = svi.get_params(state)
    assert sorted(params) == [
        "f_auto_qu_mu", "f_auto_qu_sqrt", "f_auto_qv_mu", "f_auto_qv_sqrt"
    ]  # fmt: skip
    assert_allclose(guide.posterior(params, X)["f"].inducing[1], X[3:5])


@pytest.mark.parametrize("method", ["kmeans", "greedy", "random"])
def test_initialisers_by_name_with_a_verdict(method):
    X, y = helpers.regression_data(20)
    guide, svi, state = start(helpers.gaussian_model, sgp.SOLVEGP(5, 3, method), X, y)
    verdict = guide.initial_verdicts["f"]
    assert 0 < verdict.variance_explained <= verdict.variance_explained_union <= 1
    assert verdict.condition_number > 1 and verdict.nearest_pair.distance > 0
    assert "explain" in str(verdict)
    later = guide.assess(svi.get_params(state), X)["f"]
    assert_allclose(later.variance_explained, verdict.variance_explained, rtol=1e-6)


# ---- float32, jit, and size -------------------------------------------------------------


@pytest.mark.slow
def test_float32_bernoulli_with_a_hundred_points_trains_without_nan():
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.uniform(-3, 3, size=(1000, 1)), jnp.float32)
    y = jnp.asarray(
        rng.uniform(size=1000) < 1 / (1 + np.exp(-3 * np.sin(2 * X[:, 0]))), int
    )

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    Z = jnp.linspace(-3, 3, 100, dtype=jnp.float32)[:, None]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(inducing=Z))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    result = svi.run(random.key(0), 300, X, y, progress_bar=False)
    assert result.losses.dtype == jnp.float32
    assert np.isfinite(result.losses).all()
    assert result.losses[-1] < result.losses[0] - 100


def test_the_same_shapes_are_traced_once():
    X, y = helpers.count_data()
    runs = []

    def model(X, y=None):
        runs.append(None)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guide, svi, state = start(model, sgp.SVGP(3), X, y)
    update = jax.jit(svi.update)
    state, _ = update(state, X, y)
    before = len(runs)
    for _ in range(3):
        state, _ = update(state, X, y + 1)
    assert len(runs) == before


def largest_array(jaxpr):
    """Number of elements of the largest array in a program."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape)) for v in equation.outvars]
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                sizes.append(largest_array(inner))
    return max(sizes)


def test_nothing_of_the_size_of_the_data_is_built_in_a_step():
    rows, batch, M = 5_000, 16, 8
    X = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 3)))
    y = jnp.sin(X[:, 0])
    kwargs = {"batch_size": batch}
    _, svi, state = start(helpers.gaussian_model, sgp.SVGP(M), X, y, svi_kwargs=kwargs)
    jaxpr = jax.make_jaxpr(lambda s, X, y: svi.update(s, X, y, **kwargs))(state, X, y)
    # NumPyro's subsampling shuffles the row numbers: one array of N integers.
    assert largest_array(jaxpr.jaxpr) <= rows


# ---- bad input --------------------------------------------------------------------------


def test_a_gp_inside_a_subsampled_plate():
    def model(X, y):
        with numpyro.plate("data", X.shape[0], subsample_size=4) as idx:
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X[idx]))
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y[idx])

    X, y = helpers.regression_data()
    with pytest.raises(
        ValueError, match="(?s)'f' is inside the data plate 'data'.*outside"
    ):
        start(model, sgp.SVGP(3), X, y)


def test_a_gp_inside_a_full_data_plate():
    def model(X, y):
        with numpyro.plate("data", X.shape[0]):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match="(?s)'f' is inside the data plate 'data'.*expand"):
        start(model, sgp.SVGP(3), X, y)


def test_inputs_with_nan():
    X, y = helpers.regression_data()
    with pytest.raises(
        ValueError, match=r"X of GP site 'f'.*1 of 15 rows \(first: \[2\]\)"
    ):
        start(helpers.gaussian_model, sgp.SVGP(3), X.at[2].set(jnp.nan), y)


def test_inputs_of_rank_one():
    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match=r"shape \(N, D\).*X\[:, None\]"):
        start(helpers.gaussian_model, sgp.SVGP(3), X[:, 0], y)


@pytest.mark.parametrize("take", [lambda y: y[:-1], lambda y: y[:, None], lambda y: y[:1]])
def test_another_number_of_responses_than_rows(take):
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    X, y = helpers.regression_data()
    with pytest.raises(
        ValueError, match="site 'y' has values of shape.*15 rows at GP site 'f'"
    ):
        start(model, sgp.SVGP(3), X, take(y))


def test_more_inducing_points_than_distinct_inputs():
    X, y = helpers.regression_data(6)
    X = jnp.concatenate([X, X])
    with pytest.raises(ValueError, match="GP site 'f'.*6 distinct"):
        start(helpers.gaussian_model, sgp.SVGP(7), X, jnp.concatenate([y, y]))


def test_unknown_and_missing_sites_in_the_approximations():
    X, y = helpers.regression_data()
    approximations = {"g": sgp.SVGP(3)}
    with pytest.raises(
        ValueError, match=r"unknown sites \['g'\].*no approximation for \['f'\]"
    ):
        start(helpers.gaussian_model, approximations, X, y)


def test_a_model_without_gp_sites():
    def model(X, y):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(loc, 1.0).expand(y.shape).to_event(1), obs=y)

    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match=r"no latent GP site.*\['loc'\].*GaussianProcess"):
        start(model, sgp.SVGP(3), X, y)


def test_a_model_without_data():
    X, _ = helpers.regression_data()
    with pytest.raises(ValueError, match="no observed site.*with the data"):
        start(helpers.gaussian_model, sgp.SVGP(3), X)


def test_discrete_latents():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("y", dist.Normal(f * z, 1.0), obs=y)

    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match="'z' is discrete.*MixtureSameFamily"):
        start(model, sgp.SVGP(3), X, y)


@pytest.mark.parametrize("hyper", ["variance", "lengthscale"])
@pytest.mark.parametrize("is_sum", [False, True])
def test_a_hyperparameter_of_any_sign_is_told_by_its_latent(hyper, is_sum):
    """`fit` trained to a negative lengthscale; a posterior had negative ones alone."""

    def model(X, y=None):
        with numpyro.plate("functions", 2):
            size = numpyro.sample("size", dist.Normal(0.0, 1.0))
        kernel = sgp.kernels.RBF(
            **{"variance": jnp.ones(2), "lengthscale": 1.0, hyper: size}
        )
        kernel = kernel + sgp.kernels.Matern32(jnp.ones(2)) if is_sum else kernel
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.sum(axis=0), 0.3), obs=y)

    told = f"GP site 'f': the {hyper} of RBF is the latent 'size', .*jnp.exp.size"
    X = jnp.linspace(0.0, 1.0, 9)[:, None]
    with pytest.raises(ValueError, match=told):
        sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, jnp.zeros(9))


def test_improper_priors_are_told_unless_they_have_a_value():
    def model(X, y):
        level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + level, 1.0), obs=y)

    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match="'level' has an improper prior, of which no val"):
        start(model, sgp.SVGP(3), X, y)
    start(numpyro.handlers.condition(model, {"level": 0.0}), sgp.SVGP(3), X, y)


@pytest.mark.slow
def test_an_improper_prior_with_a_start_is_a_wide_one_but_for_its_density(tmp_path):
    def model_of(prior):
        def model(X, y=None):
            level = numpyro.sample("level", prior)
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f + level, 1.0), obs=y)

        return model

    X, y = helpers.regression_data()
    start_at = numpyro.infer.init_to_value(values={"level": 0.1})
    found = []
    real = dist.constraints.real
    for prior in (dist.ImproperUniform(real, (), ()), dist.Normal(0.0, 1e4)):
        model = model_of(prior)
        guide = sgp.AutoSparseGP(model, sgp.SVGP(3), init_loc_fn=start_at)
        found.append(sgp.fit(model, guide, (X, y), progress_bar=False))
    improper, wide = found
    # The density of Normal(0, 1e4) is flat to 1e-8 here.
    at_zero = -np.log(1e4 * np.sqrt(2.0 * np.pi))
    assert_allclose(improper.bound, wide.bound - at_zero, atol=1e-4)
    means = (fitted.predict(X[:2], quantiles=())["y"].mean for fitted in found)
    assert_allclose(*means, atol=1e-3)
    improper.save(tmp_path / "fit.npz")
    again = sgp.load(tmp_path / "fit.npz", improper.model).median(X)["level"]
    assert_allclose(again, improper.median(X)["level"], rtol=1e-12)


def test_a_response_with_an_obs_mask():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y, obs_mask=y > 0)

    with pytest.raises(ValueError, match="'y' has an obs_mask"):
        start(model, sgp.SVGP(3), *helpers.regression_data())


def test_a_masked_gp_site():
    def model(X, y):
        with handlers.mask(mask=False):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match="GP site 'f' is masked.*observed sites only"):
        start(model, sgp.SVGP(3), X, y)


def test_a_covariance_that_cannot_be_factorised():
    class Negative:
        def __call__(self, X1, X2):
            return -sgp.kernels.RBF()(X1, X2)

        def diag(self, X):
            return -jnp.ones(X.shape[0])

    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(Negative(), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match="GP site 'f' has no Cholesky.*jitter of 0.001"):
        start(model, sgp.SVGP(3), X, y)


def test_parameters_that_diverged():
    X, y = helpers.count_data()
    guide, svi, state = start(helpers.poisson_model, sgp.SVGP(3), X, y)
    params = svi.get_params(state)
    bad = {**params, "f_auto_qu_mu": params["f_auto_qu_mu"] * jnp.nan}
    with pytest.raises(ValueError, match="'f_auto_qu_mu' is not finite"):
        guide.sample_posterior(random.key(0), bad, X)
    bad = {**params, "lengthscale_auto_loc": jnp.nan}
    with pytest.raises(ValueError, match="'lengthscale_auto_loc' is not finite"):
        guide.posterior(bad, X)


def test_results_before_the_set_up():
    guide = sgp.AutoSparseGP(helpers.gaussian_model, sgp.SVGP(3))
    with pytest.raises(ValueError, match="not been set up"):
        guide.posterior({}, jnp.zeros((2, 1)))


def test_new_inputs_with_another_number_of_columns():
    X, y = helpers.regression_data()
    guide, svi, state = start(helpers.gaussian_model, sgp.SVGP(3), X, y)
    with pytest.raises(ValueError, match="GP site 'f' has inputs with 2 columns"):
        guide.posterior(svi.get_params(state), jnp.zeros((4, 2)))


def test_inducing_points_with_another_number_of_columns():
    X, y = helpers.regression_data()
    with pytest.raises(ValueError, match="GP site 'f'.*2 columns, but the inputs X have 1"):
        start(helpers.gaussian_model, sgp.SVGP(inducing=jnp.zeros((3, 2))), X, y)


def test_base_guides_that_do_not_serve():
    with pytest.raises(TypeError, match="AutoLaplaceApproximation needs the density"):
        sgp.AutoSparseGP(helpers.gaussian_model, sgp.SVGP(3), AutoLaplaceApproximation)
    with pytest.raises(TypeError, match="not an instance"):
        sgp.AutoSparseGP(
            helpers.gaussian_model, sgp.SVGP(3), AutoNormal(helpers.gaussian_model)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgp.SVGP(), "give the number of inducing points Z"),
        (lambda: sgp.SVGP(0), "must be positive"),
        (lambda: sgp.SVGP(5, covariance="low"), "covariance must be one of"),
        (lambda: sgp.SVGP(5, jnp.zeros((4, 1))), "5 inducing points Z.*4 rows"),
        (lambda: sgp.SVGP(inducing=jnp.zeros(4)), r"shape \(M, D\)"),
        (lambda: sgp.SOLVEGP(5), "number of inducing points O"),
        (lambda: sgp.SOLVEGP(5, (2, 2), orthogonal=jnp.zeros((2, 1))), "2 orthogonal sets"),
    ],
)
def test_approximations_with_contradicting_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_duplicate_inducing_points_and_constant_columns_work():
    X, y = helpers.regression_data()
    X = jnp.concatenate([X, jnp.ones_like(X)], axis=1)
    Z = jnp.concatenate([X[:4], X[:4]])
    guide, svi, state = start(
        helpers.gaussian_model, sgp.SOLVEGP(inducing=Z, orthogonal=X[:2]), X, y
    )
    for _ in range(3):
        state, value = jax.jit(svi.update)(state, X, y)
    assert np.isfinite(value)
    assert all(np.isfinite(p).all() for p in svi.get_params(state).values())
    guide, svi, state = start(helpers.gaussian_model, sgp.SVGP(5), X, y)
    assert np.isfinite(svi.update(state, X, y)[1])


# ---- ways of NumPyro --------------------------------------------------------------------


def scan_model(X, y=None):
    def step(carry, _):
        return numpyro.sample("z", dist.Normal(carry, 1.0)), None

    total, _ = scan(step, 0.0, None, length=3)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X, total))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.slow
def test_latents_of_a_scan_are_those_of_the_guide():
    X, y = helpers.regression_data(6)
    guide, svi, state = start(scan_model, sgp.SVGP(3), X, y)
    params = svi.get_params(state)
    params["z_auto_loc"] = jnp.array([0.5, 1.0, 1.5])
    losses = [svi.loss.loss(random.key(i), params, scan_model, guide, X, y) for i in (0, 1)]
    assert losses[0] == losses[1]
    assert_allclose(guide.posterior(params, X)["f"].prior.mean, 1.5)


def test_a_wrapped_guide_still_knows_that_rows_are_tied():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("total", dist.Normal(jnp.sum(f), 0.5), obs=y)
        # A row known to a thousandth must not hide the coupling of the others.
        numpyro.sample("first", dist.Normal(f[0], 1e-3), obs=y)

    X, y = jnp.linspace(0, 3, 6)[:, None], jnp.array(2.0)
    guide, svi, state = start(model, sgp.SVGP(4), X, y)
    wrapped = handlers.scale(guide, scale=1.0)
    elbo = sgp.TraceGP_ELBO(sgp.GaussHermite(5))
    with pytest.raises(ValueError, match="ties rows of X together"):
        elbo.loss(random.key(0), svi.get_params(state), model, wrapped, X, y)


@pytest.mark.quick(1)
@pytest.mark.parametrize("centred", [True, False])
def test_inputs_that_mix_rows_of_another_gp_tie_rows(centred):
    def model(X, y=None):
        h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        inputs = h - h.mean() if centred else h
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), inputs[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X, y = helpers.regression_data(6)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, y)
    assert guide.couples_rows == centred


def test_terms_of_two_functions_at_different_rows_are_no_tie():
    def model(y):
        X = jnp.linspace(0, 1, 4)[:, None]
        a = numpyro.sample("a", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        b = numpyro.sample("b", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(a[:, None] + b, 0.5).to_event(2), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(jnp.zeros((4, 4)))
    assert not guide.couples_rows


@pytest.mark.slow
def test_a_failed_set_up_leaves_no_trace():
    def model(X, W, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), W))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, 0.3), obs=y)

    X, y = helpers.regression_data(8)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    with pytest.raises(ValueError, match="GP site 'g'.*distinct"):
        svi.init(random.key(0), X, jnp.zeros_like(X), y)
    svi.init(random.key(0), X, X, y)


@pytest.mark.slow
def test_set_up_by_name_serves_saved_parameters_and_compiled_init():
    X, y = helpers.count_data()
    guide, svi, state = start(helpers.poisson_model, sgp.SVGP(4), X, y)
    params = svi.get_params(state)
    fresh = sgp.AutoSparseGP(helpers.poisson_model, sgp.SVGP(4))
    # The loss sets a fresh guide up by itself.
    value = svi.loss.loss(random.key(0), params, helpers.poisson_model, fresh, X, y)
    expected = svi.loss.loss(random.key(0), params, helpers.poisson_model, guide, X, y)
    assert_allclose(value, expected)
    fresh = sgp.AutoSparseGP(helpers.poisson_model, sgp.SVGP(4))
    new = SVI(helpers.poisson_model, fresh, optax.adam(0.01), sgp.TraceGP_ELBO())
    with pytest.raises(ValueError, match=r"traced by jit or vmap. Call guide.setup"):
        jax.jit(new.init)(random.key(0), X, y)
    states = jax.vmap(lambda key: new.init(key, X, y))(random.split(random.key(0), 2))
    assert jax.tree.leaves(states)[0].shape[0] == 2
    points = fresh.setup_state()["initial"]["f"]["Z"]
    fresh.setup(X[:5], y[:5])
    assert fresh.setup_state()["initial"]["f"]["Z"] is points
    assert np.isfinite(fresh.initial_verdicts["f"].variance_explained)


@pytest.mark.slow
def test_base_guides_without_a_median_and_by_a_function():
    X, y = helpers.count_data()

    def model(X, y=None):
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        kernel = sgp.kernels.RBF(1.0, jnp.exp(loc[0]))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, loc[1]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    def base(model):
        return AutoIAFNormal(model, num_flows=1, hidden_dims=[2])

    guide, svi, state = start(model, sgp.SVGP(3), X, y, base_guide=base)
    params = svi.get_params(state)
    draws = guide.sample_posterior(random.key(0), params, X, sample_shape=(3,))
    assert draws["f"].shape == (3, 12)
    with pytest.raises(NotImplementedError, match="AutoIAFNormal has no median.*rng_key"):
        guide.posterior(params, X)
    assert np.isfinite(guide.posterior(params, X, rng_key=random.key(0))["f"].mean).all()


@pytest.mark.slow
def test_a_distribution_may_broadcast_to_its_data():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        numpyro.sample("z", dist.Normal(loc, 1.0), obs=y)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X, y = helpers.regression_data(6)
    start(model, sgp.SVGP(3), X, y)


def test_as_many_tasks_as_rows_are_no_data_plate():
    def model(X, y):
        with numpyro.plate("tasks", 4, dim=-2):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
            with numpyro.plate("data", X.shape[0], dim=-1):
                numpyro.sample("y", dist.Normal(f[:, 0], 0.3), obs=y)

    X, _ = helpers.regression_data(4)
    guide, _, _ = start(model, sgp.SVGP(3), X, jnp.zeros((4, 4)))
    assert guide.setup_state()["initial"]["f"]["qu_mu"].shape == (4, 1, 3)


@pytest.mark.slow
def test_lengthscales_that_may_be_of_columns_or_of_functions():
    def model(X, y, variance):
        with numpyro.plate("functions", 2):
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
            kernel = sgp.kernels.RBF(variance, lengthscale)
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(f.sum(0), 0.3).to_event(1), obs=y)

    X, y = helpers.regression_data(8, dim=2)
    with pytest.raises(ValueError, match=r"'f' in plate 'functions'.*may be one for each"):
        start(model, sgp.SVGP(3), X, y, 1.0)
    start(model, sgp.SVGP(3), X, y, jnp.ones(2))


def test_mutable_state_is_refused():
    def model(X, y):
        numpyro.primitives.mutable("count", {"n": 0})
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)

    X, y = helpers.regression_data(6)
    with pytest.raises(ValueError, match=r"mutable state \['count'\].*twice"):
        start(model, sgp.SVGP(3), X, y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sgp.SVGP(jnp.zeros((3, 1))),
            "is an array. Pass points by name: inducing=",
        ),
        (lambda: sgp.SVGP("5"), "whole number .or 'auto'.*got '5'"),
        (lambda: sgp.SVGP(True), "whole number"),
        (lambda: sgp.AutoSparseGP(helpers.gaussian_model, "svgp"), "SVGP.50.*got 'svgp'"),
        (lambda: sgp.AutoSparseGP(helpers.gaussian_model, {"f": sgp.SVGP}), "such as SVGP"),
        (lambda: sgp.TraceGP_ELBO("mc"), "must be a rule such as GaussHermite.20."),
    ],
)
def test_arguments_of_another_type(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_inducing_points_from_an_initialiser():
    X, y = helpers.regression_data(10)
    chosen = sgp.initial_inducing(X, 4, num_orthogonal=2)
    guide, _, _ = start(helpers.gaussian_model, sgp.SOLVEGP(inducing=chosen), X, y)
    assert_allclose(guide.setup_state()["initial"]["f"]["Z"], chosen.Z)
    assert_allclose(guide.setup_state()["initial"]["f"]["O"], chosen.O[0])


def test_a_subsampled_plate_made_twice_is_refused():
    def model(X, y):
        with numpyro.plate("data", 12, subsample_size=4) as idx:
            X_batch, y_batch = X[idx], y[idx]
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X_batch))
        with numpyro.plate("data", 12, subsample_size=4):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y_batch)

    X, y = helpers.regression_data(12)
    with pytest.raises(ValueError, match="'data' twice"):
        sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, y)


@pytest.mark.slow
def test_joint_draws_of_too_many_rows_are_refused_before_they_are_tried(monkeypatch):
    """As 60,000 rows are on most machines: 43 GB."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    X = jnp.linspace(0.0, 1.0, 1000)[:, None]
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X[:20], X[:20, 0])
    params, key = guide.known().starts, jax.random.key(0)
    assert guide.sample_posterior(key, params, X)["f"].shape == (1000,)
    monkeypatch.setattr(memory, "memory", lambda: 2e7)
    assert guide.sample_posterior(key, params, X[:500])["f"].shape == (500,)
    for shape in ((), (2,)):
        with pytest.raises(ValueError, match="'f': joint draws at 1000 rows .* fewer rows"):
            guide.sample_posterior(key, params, X, sample_shape=shape)


def test_there_is_memory():
    assert memory.memory() > 1e8


def far_away(X, y=None):
    shift = numpyro.sample("shift", dist.Normal(7.0, 0.1))
    numpyro.sample("heavy", dist.Cauchy(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(4.0, 0.1))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f + shift, scale), obs=y)


@pytest.mark.quick(1)
@pytest.mark.parametrize("base", [AutoNormal, functools.partial(AutoMultivariateNormal)])
def test_guides_with_a_spread_start_where_priors_are(base):
    """NumPyro starts them at draws from (-2, 2), here 50 standard deviations away."""
    X, y = np.linspace(0.0, 1.0, 6)[:, None], np.zeros(6)
    guide = sgp.AutoSparseGP(far_away, sgp.SVGP(3), base)
    guide.setup(X, y)
    start = guide.base_guide.median(guide.known().starts)
    # A median of 15 draws is at most .3 sd away in 63 of 100 keys, 1 sd in all but 1e-3.
    assert abs(start["shift"] - 7.0) < 0.1
    assert abs(np.log(start["scale"]) - 4.0) < 0.1 and np.isfinite(start["heavy"])
    again = guide.base_guide.median(guide.starts(random.key(1), (X, y), {}))
    assert again["shift"] != start["shift"]  # restarts by key
    other = sgp.AutoSparseGP(far_away, sgp.SVGP(3), base, init_loc_fn=init_to_uniform)
    other.setup(X, y)
    assert abs(other.base_guide.median(other.known().starts)["shift"]) <= 2.0


class Own(AutoNormal):
    """A guide that begins where it wants."""

    def __init__(self, model, *, prefix="auto"):
        super().__init__(model, prefix=prefix, init_loc_fn=init_to_uniform)


@pytest.mark.slow
def test_guides_of_ones_own_and_wide_priors_start_as_they_did():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1000.0))
        direction = numpyro.sample("v", dist.Normal().expand([2]).to_event(1))
        slope = (direction / jnp.linalg.norm(direction))[0]  # none where both are zero
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f + level + slope * X[:, 0], 1.0), obs=y)

    X, y = np.linspace(0.0, 1.0, 6)[:, None], np.zeros(6)
    for base in (Own, AutoNormal):
        guide = sgp.AutoSparseGP(model, sgp.SVGP(3), base)
        guide.setup(X, y)
        start = guide.base_guide.median(guide.known().starts)
        assert abs(start["level"]) <= 2.0 and np.any(start["v"] != 0.0)


@pytest.mark.slow
def test_inputs_that_are_uncertain_are_found_near_their_priors():
    """It ended 185 nats lower, 7 prior standard deviations away, "converged"."""
    rng = np.random.default_rng(7)
    X = np.linspace(0.0, 4.0, 12)
    y = 1.5 * np.sin(1.5 * (X + 0.25 * rng.normal(size=12))) + 0.1 * rng.normal(size=12)

    def model(X, y=None):
        with numpyro.plate("inputs", 12):
            moved = numpyro.sample("x", dist.Normal(X, 0.25))
        kernel = sgp.kernels.RBF(1.0, 1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, moved[:, None]))
        with numpyro.plate("data", 12):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(12), (X, y), base_guide=AutoNormal, progress_bar=False)
    # The log evidence is -9.6, by 1.2 million draws of the prior.
    assert -17.0 < fitted.bound < -9.6
    assert np.abs(fitted.median()["x"] - X).max() < 3.0 * 0.25

"""``to_arviz``: the same groups from MCMC and SVI fits, and what is in them."""

import subprocess
import sys

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.svi import SVIRunResult
from scipy import stats
from scipy.special import gammaln

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import to_arviz
from numpyro_sgp.diagnostics.arviz import _num_free, leave_one_out

N = 12
X = jnp.linspace(0.0, 6.0, N)[:, None]
y = np.array([1, 3, 4, 7, 6, 4, 2, 1, 0, 1, 1, 2])
GROUPS = [
    "log_likelihood",
    "observed_data",
    "posterior",
    "posterior_predictive",
    "sample_stats",
]


def model(X, y=None):
    offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    rate = numpyro.deterministic("rate", jnp.exp(f + offset))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def plain_model(X, y=None, batch_size=None):
    data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
    with data as idx:
        X_batch, y_batch = X[idx], None if y is None else jnp.asarray(y)[idx]
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X_batch))
    with data:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y_batch)


@pytest.fixture(scope="module")
def mcmc():
    kernel = NUTS(sgp.whiten(model), max_tree_depth=5)
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=100,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, y)
    return mcmc


def make_svi(model, base_guide=AutoNormal, num_inducing=5):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(num_inducing), base_guide)
    return SVI(model, guide, optax.adam(0.05), sgp.TraceGP_ELBO())


def start(model, *args, **kwargs):
    """An SVI at its first parameters, and a result that says so."""
    svi = make_svi(model)
    state = svi.init(jax.random.key(0), *args, **kwargs)
    return svi, SVIRunResult(svi.get_params(state), state, np.array([2.0, 1.0]))


@pytest.fixture(scope="module")
def svi():
    svi = make_svi(plain_model)
    return svi, svi.run(jax.random.key(0), 100, X, y, progress_bar=False)


@pytest.fixture(scope="module")
def mcmc_tree(mcmc):
    return to_arviz(mcmc, X, y, seconds=2)


@pytest.fixture(scope="module")
def svi_tree(svi):
    svi, result = svi
    return to_arviz(svi, X, y, result=result, num_samples=400, khat=False)


def test_mcmc_gives_all_groups_with_chains_apart(mcmc, mcmc_tree):
    assert sorted(mcmc_tree.children) == GROUPS
    samples = mcmc.get_samples(group_by_chain=True)
    assert sorted(mcmc_tree.posterior.data_vars) == ["f", "offset", "rate"]
    for name, values in mcmc_tree.posterior.data_vars.items():
        assert values.dims[:2] == ("chain", "draw")
        assert_array_equal(values, samples[name])
    assert mcmc_tree.sample_stats["diverging"].shape == (2, 100)
    assert mcmc_tree.attrs == {
        "method": "MCMC",
        "approximation": "NUTS",
        "num_parameters": N + 1,
        "seconds": 2.0,
    }


def test_white_site_dims_and_coords_on_demand(mcmc, mcmc_tree):
    coords = {"data": np.asarray(X)[:, 0]}
    tree = to_arviz(mcmc, keep_white=True, dims={"f": ["data"]}, coords=coords)
    assert_array_equal(
        tree.posterior["f_white"], mcmc.get_samples(group_by_chain=True)["f_white"]
    )
    assert tree.posterior["f"].dims == ("chain", "draw", "data")
    assert_array_equal(tree.log_likelihood["data"], X[:, 0])
    # The arguments of mcmc.run were used.
    assert_array_equal(tree.log_likelihood["y"], mcmc_tree.log_likelihood["y"])


def test_svi_gives_all_groups(svi, svi_tree):
    svi, result = svi
    assert sorted(svi_tree.children) == GROUPS
    assert svi_tree.posterior["f"].shape == (1, 400, N)
    assert svi_tree.sample_stats["loss"].dims == ("step",)
    assert_array_equal(svi_tree.sample_stats["loss"], result.losses)
    assert svi_tree.attrs["method"] == "SVI"
    assert "SVGP(" in svi_tree.attrs["approximation"]
    # Z, the mean, and the lower triangle of the factor, 5 inducing points in 1-D.
    assert svi_tree.attrs["num_parameters"] == 5 + 5 + 15
    assert "seconds" not in svi_tree.attrs


def test_svi_draws_have_the_moments_of_the_guide(svi, svi_tree):
    svi, result = svi
    q = svi.guide.posterior(result.params, X)["f"]
    draws = svi_tree.posterior["f"].values[0]
    se = np.sqrt(q.variance / 400)
    assert np.all(np.abs(draws.mean(0) - q.mean) < 5 * se)
    # The standard error of a variance is sqrt(2 / 400) of it.
    assert_allclose(draws.var(0), q.variance, rtol=5 * np.sqrt(2 / 400))


def test_elbo_is_that_in_closed_form(svi, svi_tree):
    svi, result = svi
    q = svi.guide.posterior(result.params, X)["f"]
    rate = np.exp(q.mean + q.variance / 2)
    elbo = np.sum(y * q.mean - rate - gammaln(y + 1.0)) - q.prior_kl()
    assert_allclose(svi_tree.attrs["elbo"], elbo, rtol=1e-8)
    assert svi_tree.attrs["elbo_se"] < 1e-10


@pytest.mark.parametrize("which", ["mcmc_tree", "svi_tree"])
def test_log_likelihood_and_data_are_the_models(which, request):
    tree = request.getfixturevalue(which)
    rate = tree.posterior.get("rate", np.exp(tree.posterior["f"])).values
    assert_allclose(tree.log_likelihood["y"], stats.poisson.logpmf(y, rate), rtol=1e-9)
    assert_array_equal(tree.observed_data["y"], y)
    for group in ("log_likelihood", "posterior_predictive"):
        assert tree[group]["y"].dims == ("chain", "draw", "data")


@pytest.mark.parametrize("which", ["mcmc_tree", "svi_tree"])
def test_predictive_draws_follow_the_draws_of_f(which, request):
    tree = request.getfixturevalue(which)
    rate = tree.posterior.get("rate", np.exp(tree.posterior["f"])).values
    # Given f, residuals are independent with mean 0 and variance 1: with 2400 or more,
    # the standard errors are 0.02 and, at rates this low, about 0.04.
    z = (tree.posterior_predictive["y"].values - rate) / np.sqrt(rate)
    assert abs(z.mean()) < 0.1
    assert abs(z.var() - 1) < 0.2


@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto:UserWarning")
def test_loss_trace_does_not_disturb_arviz(svi_tree):
    assert len(arviz_stats.summary(svi_tree, var_names=["f"])) == N
    assert leave_one_out(svi_tree).elpd == pytest.approx(
        float(arviz_stats.loo(svi_tree, pointwise=True).elpd)
    )


def several_sites(X, y=None, counts=None, mask=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([2]))
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    with numpyro.plate("data", X.shape[0]):
        with handlers.mask(mask=True if mask is None else mask):
            y = numpyro.sample("y", dist.Normal(f[0], noise), obs=y)
        numpyro.sample("counts", dist.Poisson(jnp.exp(f[1]) + y**2), obs=counts)
        with numpyro.plate("latents", 2, dim=-2):
            numpyro.sample("pair", dist.Normal(f, 1.0), obs=jnp.zeros(f.shape))


@pytest.fixture(scope="module")
def several():
    mask = np.arange(N) % 4 > 0
    data = np.sin(np.asarray(X)[:, 0])
    svi, result = start(several_sites, X, data, y, mask)
    result.params["noise"] = jnp.array(0.2)
    tree = to_arviz(svi, X, data, y, mask, result=result, num_samples=200, khat=False)
    return tree, data, mask


def test_masks_params_several_sites_and_several_latents(several):
    tree, data, mask = several
    f = tree.posterior["f"].values
    assert f.shape == (1, 200, 2, N)
    log_prob = np.where(mask, stats.norm.logpdf(data, f[:, :, 0], 0.2), 0.0)
    assert_allclose(tree.log_likelihood["y"], log_prob, rtol=1e-9)
    rate = np.exp(f[:, :, 1]) + data**2
    assert_allclose(tree.log_likelihood["counts"], stats.poisson.logpmf(y, rate), rtol=1e-9)


def test_plates_name_their_own_axis(several):
    tree, _, _ = several
    for group in ("log_likelihood", "posterior_predictive"):
        assert tree[group]["pair"].dims == ("chain", "draw", "latents", "data")
        assert tree[group]["y"].dims == ("chain", "draw", "data")


def test_predictive_of_a_site_uses_that_of_the_site_before(several):
    tree, data, _ = several
    f = tree.posterior["f"].values
    drawn = tree.posterior_predictive["y"].values
    assert np.abs(drawn - f[:, :, 0]).std() < 0.3
    rate = np.exp(f[:, :, 1]) + drawn**2
    z = (tree.posterior_predictive["counts"].values - rate) / np.sqrt(rate)
    # 2400 residuals; with the data's y in the rate their variance is far from 1.
    assert abs(z.mean()) < 0.1
    assert abs(z.var() - 1) < 0.2


def test_masked_observations_are_not_in_loo(several):
    tree, _, mask = several
    loo = leave_one_out(tree)
    assert loo.pointwise.shape == (mask.sum() + N + 2 * N,)
    assert_allclose(loo.pointwise.sum(), loo.elpd, rtol=1e-9)


class _OnlyDensity(dist.Normal):
    def sample(self, key, sample_shape=()):
        raise NotImplementedError


def test_factors_are_no_data_and_undrawable_sites_not_predicted():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.factor("penalty", -jnp.sum(f**2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", _OnlyDensity(f, 1.0), obs=y)

    svi, result = start(model, X, y)
    tree = to_arviz(svi, X, y, result=result, num_samples=3, khat=False)
    assert list(tree.log_likelihood.data_vars) == ["y"]
    assert list(tree.observed_data.data_vars) == ["y"]
    assert "posterior_predictive" not in tree.children


def test_errors(svi, mcmc):
    svi, result = svi
    with pytest.raises(TypeError, match="got dict"):
        to_arviz(result.params, X, y)
    with pytest.raises(ValueError, match=r"Call mcmc\.run"):
        to_arviz(MCMC(NUTS(model), num_warmup=1, num_samples=1), X, y)
    with pytest.raises(ValueError, match="result is for an SVI"):
        to_arviz(mcmc, X, y, result=result)
    with pytest.raises(ValueError, match=r"result=result\) with result = svi\.run"):
        to_arviz(svi, X, y)
    with pytest.raises(ValueError, match="num_samples must be positive, got 0"):
        to_arviz(svi, X, y, result=result, num_samples=0)
    with pytest.raises(ValueError, match="no 'f_auto_Z'.*another guide"):
        to_arviz(svi, X, y, result=result._replace(params={"a": jnp.zeros(2)}))
    with pytest.raises(ValueError, match=r"minibatch of plate 'data' \(4 of 12 rows\)"):
        to_arviz(svi, X, y, batch_size=4, result=result, num_samples=2)
    with pytest.raises(ValueError, match="no observed site. Pass the data too"):
        to_arviz(mcmc, X)
    with pytest.raises(ValueError, match=r"dims names sites \['F'\]"):
        to_arviz(mcmc, X, y, dims={"F": ["day"]})
    with pytest.raises(ValueError, match=r"shape \(12,\), but .* gives it \(11,\)"):
        to_arviz(mcmc, X[:-1], y[:-1])
    diverged = {**result.params, "f_auto_qu_mu": jnp.full(5, jnp.nan)}
    with pytest.raises(ValueError, match="is not finite. Training has diverged"):
        to_arviz(svi, X, y, result=result._replace(params=diverged), num_samples=2)
    by_hand = SVI(plain_model, lambda X, y: None, optax.adam(0.1), svi.loss)
    with pytest.raises(TypeError, match="no method sample_posterior"):
        to_arviz(by_hand, X, y, result=result)


def test_importing_the_package_does_not_import_arviz():
    code = (
        "import sys, numpyro_sgp.diagnostics;"
        "print([m for m in ('arviz_base', 'xarray', 'pandas', 'matplotlib') "
        "if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_white_values_of_a_sampler_that_whitens_are_left_out():
    X = jnp.arange(4.0)[:, None]
    y = jnp.array([1, 2, 4, 2])

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    kernel = sgp.EllipticalSlice(model)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y)
    tree = sgp.to_arviz(mcmc, X, y)
    assert set(tree.posterior.data_vars) == {"f"}


def test_parameters_are_counted_without_upper_triangles_of_factors():
    assert _num_free("f_qu_sqrt", np.ones((4, 4))) == 16  # 4 components with 4 points
    assert _num_free("f_qu_sqrt", np.tril(np.ones((4, 4)))) == 10
    assert _num_free("f_qu_sqrt", np.tril(np.ones((2, 4, 4)))) == 20
    assert _num_free("f_qu_sqrt", np.ones((3, 4))) == 12
    assert _num_free("f_qu_mu", np.eye(4)) == 16

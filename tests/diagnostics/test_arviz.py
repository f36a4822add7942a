"""``to_arviz``: the same groups from MCMC and SVI fits, and what is in them."""

import subprocess
import sys

import arviz as az
import arviz_base
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.infer import HMC, MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.svi import SVIRunResult
from scipy import stats
from scipy.special import gammaln

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import compare, to_arviz
from numpyro_sgp.diagnostics.arviz import _num_free, as_tree
from numpyro_sgp.diagnostics.summaries import leave_one_out

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


MASK = np.arange(N) % 4 > 0
OLD = az.__version__ < "1"
# Remarks of ArviZ and pandas, on few draws and on counts.
_REMARKS = [
    "ignore::DeprecationWarning",
    "ignore:Estimated shape parameter of Pareto:UserWarning",
    "ignore:Variables y in .* look discrete:UserWarning",
]


def model(X, y=None, mask=True):
    offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    rate = numpyro.deterministic("rate", jnp.exp(f + offset))
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def plain_model(X, y=None, batch_size=None):
    data = numpyro.plate("data", X.shape[0], subsample_size=batch_size)
    with data as idx:
        X_batch, y_batch = X[idx], None if y is None else jnp.asarray(y)[idx]
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X_batch))
    with data:
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y_batch)


def elpd_and_se(loo):
    return (loo.elpd_loo, loo.se) if OLD else (loo.elpd, loo.se)


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


def start(model, *args, num_inducing=5, **kwargs):
    """An SVI at its first parameters, and a result that says so."""
    svi = make_svi(model, num_inducing=num_inducing)
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
def masked_tree(mcmc):
    """As if every fourth row had been masked: the draws are those of all rows."""
    coords = {"data": 100 + np.arange(N)}
    return to_arviz(mcmc, X, np.where(MASK, y, 99), MASK, coords=coords)


def made(**groups):
    """ArviZ data of the installed ArviZ, by its own function."""
    return az.from_dict(**groups) if OLD else az.from_dict(groups)


@pytest.fixture(scope="module")
def svi_tree(svi):
    svi, result = svi
    return to_arviz(svi, X, y, result=result, num_samples=400, khat=False)


def test_mcmc_gives_all_groups_with_chains_apart(mcmc, mcmc_tree):
    assert sorted(as_tree(mcmc_tree).children) == GROUPS
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
    coords = {"data": pd.Index(np.asarray(X)[:, 0], name="day")}
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
    assert sorted(as_tree(svi_tree).children) == GROUPS
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


@pytest.mark.slow
def test_arguments_may_be_numpy_arrays_frames_and_lists(svi, svi_tree):
    svi, result = svi
    rows = np.asarray(X)
    expected = svi_tree["log_likelihood"]["y"].values
    for arguments in [(rows, y), (pd.DataFrame(rows), pd.Series(y)), (rows, y.tolist())]:
        data = to_arviz(svi, *arguments, result=result, num_samples=400, khat=True)
        assert_allclose(data["log_likelihood"]["y"], expected, rtol=1e-9)
        assert np.isfinite(data.attrs["khat"])


@pytest.mark.quick(1)
@pytest.mark.filterwarnings(*_REMARKS)
@pytest.mark.parametrize("which", ["mcmc_tree", "svi_tree", "masked_tree"])
def test_the_installed_arviz_takes_its_own_container(which, mcmc, request):
    data = request.getfixturevalue(which)
    assert type(data) is type(az.from_numpyro(mcmc))
    f = data["posterior"]["f"]
    num_draws = f.sizes["chain"] * f.sizes["draw"]
    assert len(az.summary(data, var_names=["f"])) == N
    assert az.extract(data, var_names="f").shape == (N, num_draws)
    for function in (az.ess, az.hdi, az.rhat):
        assert "f" in function(data)
    loo = az.loo(data)
    assert loo.n_data_points == data["observed_data"]["y"].size
    # Of several chains, ArviZ 0.23 takes a slightly longer tail.
    ours = leave_one_out(data)
    assert_allclose(elpd_and_se(loo), (ours.elpd, ours.se), rtol=1e-3)
    assert list(az.compare({"a": data, "b": data})["rank"]) == [0, 1]
    az.plot_trace(data, var_names=["f"])
    az.plot_forest(data, var_names=["f"])
    (az.plot_ppc if OLD else az.plot_ppc_dist)(data)
    (az.plot_posterior if OLD else az.plot_dist)(data, var_names=["f"])
    plt.close("all")


def test_loo_of_draws_that_repeat_each_other_says_so():
    stuck = np.full((1, 100, 3), -1.0)
    data = arviz_base.from_dict({"posterior": {"f": stuck}, "log_likelihood": {"y": stuck}})
    with pytest.raises(ValueError, match="the draws of this fit repeat each other"):
        leave_one_out(data)


@pytest.mark.quick(2)
@pytest.mark.parametrize("which", ["mcmc_tree", "svi_tree", "masked_tree"])
def test_netcdf_keeps_groups_attributes_and_comparisons(which, request, tmp_path):
    data = request.getfixturevalue(which)
    data.to_netcdf(str(tmp_path / "fit.nc"))
    loaded = az.from_netcdf(str(tmp_path / "fit.nc"))
    assert type(loaded) is type(data)
    assert loaded.attrs == data.attrs
    tree, loaded_tree = as_tree(data), as_tree(loaded)
    assert sorted(loaded_tree.children) == sorted(tree.children)
    for name, group in tree.children.items():
        assert loaded_tree[name].to_dataset().identical(group.to_dataset())
    table = compare({"fit": data, "loaded": loaded}).table
    # The reference's distances to itself have no Monte Carlo error.
    alike = table.loc[:, [c for c in table if c != "elpd_diff" and "_mcse" not in c]]
    assert alike.loc["loaded"].equals(alike.loc["fit"])
    assert table.loc["loaded", "elpd_diff"] == 0.0
    for dataset in loaded_tree.children.values():
        dataset.close()


def test_compare_takes_what_users_converted_themselves(mcmc, mcmc_tree):
    theirs = az.from_numpyro(mcmc, log_likelihood=True)
    ours = to_arviz(mcmc, keep_white=True, seconds=2)  # all of these make the mean ESS
    table = compare({"ours": ours, "theirs": theirs}, var_names=["f"]).table
    assert_allclose(table.loc["theirs", "elpd_loo"], table.loc["ours", "elpd_loo"])
    assert_allclose(table.loc["theirs", "w1_sd[f]"], 0.0, atol=1e-9)
    assert table.loc["ours", "seconds"] == 2.0
    assert np.isnan(table.loc["theirs", "seconds"])
    # az.concat makes a list of an attribute that differs.
    several = as_tree(mcmc_tree)
    several.attrs["seconds"] = [2.0, 3.0]
    assert np.isnan(compare({"a": several}).table.loc["a", "seconds"])


@pytest.mark.filterwarnings(*_REMARKS)
def test_loo_of_masked_rows_is_that_of_the_model_without_them(mcmc_tree, masked_tree):
    values = mcmc_tree["log_likelihood"]["y"].values[..., MASK]
    posterior = {k: v.values for k, v in mcmc_tree["posterior"].items()}
    without = made(posterior=posterior, log_likelihood={"y": values})
    found, expected = az.loo(masked_tree), az.loo(without)
    assert elpd_and_se(found) == elpd_and_se(expected)
    assert found.n_data_points == MASK.sum()
    table = compare({"masked": masked_tree, "without": without}, var_names=["f"]).table
    columns = ["elpd_loo", "se", "p_loo", "k_max", "k_bad"]
    assert table.loc["masked", columns].equals(table.loc["without", columns])


def test_masked_rows_are_no_data_but_predicted(masked_tree):
    for group in ("log_likelihood", "observed_data", "posterior_predictive"):
        assert_array_equal(masked_tree[group]["data"], 100 + np.flatnonzero(MASK))
    assert_array_equal(masked_tree["observed_data"]["y"], y[MASK])
    predicted = masked_tree["predictions"]["y"]
    assert_array_equal(predicted["y_masked_data"], 100 + np.flatnonzero(~MASK))
    rate = masked_tree["posterior"]["rate"].values[..., ~MASK]
    # 600 residuals of variance 1, given the draws: standard errors of .04 and about .08.
    z = (predicted.values - rate) / np.sqrt(rate)
    assert abs(z.mean()) < 0.2
    assert abs(z.var() - 1) < 0.4


def two_outputs(y, mask):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", N):
        with handlers.mask(mask=mask(w)):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)
    with numpyro.plate("groups", 3):
        rows = dist.Normal(w, 1.0).expand([3, 2]).mask(jnp.array([[1, 0], [0, 0], [1, 1]]))
        numpyro.sample("rows", rows.to_event(1), obs=jnp.ones((3, 2)))
    with handlers.mask(mask=False):
        numpyro.sample("off", dist.Normal(w, 1.0), obs=0.0)


@pytest.fixture(scope="module")
def two():
    """Draws of w, and a function from a mask to ArviZ data with them."""
    Y = np.random.default_rng(0).standard_normal((2, N))
    kernel = HMC(two_outputs, num_steps=1, trajectory_length=None)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(0), Y, lambda w: True)
    w = np.asarray(mcmc.get_samples()["w"])[None, :, None]
    return w, Y, lambda mask: to_arviz(mcmc, Y, mask)


@pytest.mark.slow
@pytest.mark.filterwarnings(*_REMARKS)
def test_single_masked_entries_are_listed_with_their_labels(two):
    w, Y, convert = two
    mask = np.random.default_rng(1).random((2, N)) < 0.6
    data = convert(lambda w: jnp.asarray(mask))
    found = data["log_likelihood"]["y"]
    expected = stats.norm.logpdf(Y[mask], w)
    assert_allclose(found, expected, rtol=1e-12)
    outputs, rows = np.nonzero(mask)
    assert found.dims == ("chain", "draw", "y_obs")
    assert_array_equal(found["y_obs_outputs"], outputs)
    assert_array_equal(found["y_obs_data"], rows)
    assert_array_equal(data["observed_data"]["y"], Y[mask])
    assert data["predictions"]["y"].shape == (1, 100, (~mask).sum())
    by_hand = made(posterior={"w": w[..., 0]}, log_likelihood={"y": expected})
    loo = az.loo(data, var_name="y")
    assert_allclose(elpd_and_se(loo), elpd_and_se(az.loo(by_hand)), rtol=1e-9)


@pytest.mark.slow
def test_a_mask_of_whole_columns_keeps_both_dimensions(two):
    w, Y, convert = two
    data = convert(lambda w: jnp.asarray(MASK))
    found = data["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "outputs", "data")
    assert_array_equal(found["data"], np.flatnonzero(MASK))
    assert_allclose(found, stats.norm.logpdf(Y[:, MASK], w[..., None]), rtol=1e-12)
    # Events count where any part is seen; a site masked whole is no data.
    rows = data["log_likelihood"]["rows"]
    assert_array_equal(rows["groups"], [0, 2])
    one = stats.norm.logpdf(1.0, w)
    assert_allclose(rows, np.concatenate([one, 2 * one], axis=-1), rtol=1e-12)
    assert "off" not in data["observed_data"]
    assert data["predictions"]["off"].shape == (1, 100)


def test_a_mask_that_depends_on_a_latent_value_gives_no_log_likelihood(two):
    w, Y, convert = two
    with pytest.warns(UserWarning, match="mask of site 'y' differs between draws"):
        data = convert(lambda w: jnp.sin(1e4 * w + jnp.arange(N)) > 0.0)
    assert list(data["log_likelihood"].data_vars) == ["rows"]
    assert_array_equal(data["observed_data"]["y"], Y)
    assert leave_one_out(data).elpd_i.shape == (2,)


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


@pytest.mark.slow
def test_masks_params_several_sites_and_several_latents(several):
    tree, data, mask = several
    f = tree.posterior["f"].values
    assert f.shape == (1, 200, 2, N)
    log_prob = stats.norm.logpdf(data, f[:, :, 0], 0.2)
    assert_allclose(tree.log_likelihood["y"], log_prob[..., mask], rtol=1e-9)
    rate = np.exp(f[:, :, 1]) + data**2
    assert_allclose(tree.log_likelihood["counts"], stats.poisson.logpmf(y, rate), rtol=1e-9)


@pytest.mark.slow
def test_plates_name_their_own_axis(several):
    tree, _, _ = several
    for group in ("log_likelihood", "posterior_predictive"):
        assert tree[group]["pair"].dims == ("chain", "draw", "latents", "data")
        # The other sites have all rows.
        assert tree[group]["y"].dims == ("chain", "draw", "y_obs")


def with_plates(X, y=None):
    with numpyro.plate("groups", 2):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("functions", X.shape[0]):  # as many as rows
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.deterministic("twice", 2 * f)
    with numpyro.plate("data", X.shape[0]):
        mean = numpyro.deterministic("mean", f.sum(0) + z.sum())
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def short_run(kernel, *args):
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), *args)
    return mcmc


def dims(data, group="posterior"):
    return {name: values.dims for name, values in data[group].items()}


@pytest.mark.slow
def test_mcmc_and_svi_name_dimensions_alike_and_as_from_numpyro():
    inputs, observed = X[:2], jnp.ones(2)
    svi, result = start(with_plates, inputs, observed, num_inducing=2)
    by_svi = to_arviz(svi, inputs, observed, result=result, num_samples=2, khat=False)
    white = HMC(sgp.whiten(with_plates), num_steps=1, trajectory_length=None)
    mcmc = short_run(white, inputs, observed)
    by_mcmc = to_arviz(mcmc, keep_white=True)
    first = ("chain", "draw")
    expected = {
        "z": (*first, "groups", "z_dim_0"),
        "f": (*first, "functions", "f_dim_0"),
        "twice": (*first, "functions", "twice_dim_0"),
        "mean": (*first, "data"),
    }
    white = {"f_white": (*first, "functions", "f_white_dim_0")}
    assert dims(by_svi) == expected
    assert dims(by_mcmc) == expected | white
    # ArviZ 0.23 numbers the axes without a name otherwise: by where they stand.
    assert dims(arviz_base.from_numpyro(mcmc)) == expected | white
    for group in ("log_likelihood", "observed_data", "posterior_predictive"):
        assert dims(by_mcmc, group) == dims(by_svi, group)


@pytest.mark.slow
def test_predictive_of_a_site_uses_that_of_the_site_before(several):
    tree, data, mask = several
    f = tree.posterior["f"].values
    drawn = np.empty(f[:, :, 0].shape)
    drawn[..., mask] = tree.posterior_predictive["y"]
    drawn[..., ~mask] = tree.predictions["y"]
    assert np.abs(drawn - f[:, :, 0]).std() < 0.3
    rate = np.exp(f[:, :, 1]) + drawn**2
    z = (tree.posterior_predictive["counts"].values - rate) / np.sqrt(rate)
    # 2400 residuals; with the data's y in the rate their variance is far from 1.
    assert abs(z.mean()) < 0.1
    assert abs(z.var() - 1) < 0.2


def test_masked_observations_are_not_in_loo(several):
    tree, _, mask = several
    loo = leave_one_out(tree)
    assert loo.elpd_i.shape == (mask.sum() + N + 2 * N,)
    assert_allclose(loo.elpd_i.sum(), loo.elpd, rtol=1e-9)


class _OnlyDensity(dist.Normal):
    def sample(self, key, sample_shape=()):
        raise NotImplementedError


@pytest.mark.slow
def test_factors_are_no_data_and_undrawable_sites_not_predicted():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.factor("penalty", -jnp.sum(f**2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", _OnlyDensity(f, 1.0), obs=y)
            numpyro.factor("rows", -(f**2))

    svi, result = start(model, X, y)
    tree = to_arviz(svi, X, y, result=result, num_samples=3, khat=False)
    assert list(tree.log_likelihood.data_vars) == ["y"]
    assert list(tree.observed_data.data_vars) == ["y"]
    assert "posterior_predictive" not in tree
    # LOO and log_score differ by what has terms of rows.
    assert tree.attrs["factors"] == "rows"


@pytest.mark.slow
def test_rows_with_weights_have_no_loo():
    """It was -8.7 for -17.7 (four times each): one of each row was left in the fit."""

    def model(X, y=None, other=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            with handlers.scale(scale=jnp.arange(1.0, 1.0 + X.shape[0])):
                numpyro.sample("y", dist.Normal(f, 1.0), obs=y)
            with handlers.scale(scale=1.0):
                numpyro.sample("other", dist.Normal(f, 1.0), obs=other)

    svi, result = start(model, X, y, y)
    tree = to_arviz(svi, X, y, y, result=result, num_samples=100, khat=False)
    assert list(tree.log_likelihood.data_vars) == ["other"]
    assert list(tree.observed_data.data_vars) == ["y", "other"]
    assert tree.attrs["weighted"] == "y"
    (remark,) = [r for r in compare({"a": tree}).remarks if "no LOO" in r]
    assert "(y, by handlers.scale)" in remark


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
    with pytest.raises(ValueError, match="num_samples must be a whole number, 1 or more"):
        to_arviz(svi, X, y, result=result, num_samples=0)
    with pytest.raises(ValueError, match="'f_auto_Z'.*missing.*another guide"):
        to_arviz(svi, X, y, result=result._replace(params={"a": jnp.zeros(2)}))
    with pytest.raises(ValueError, match=r"minibatch of plate 'data' \(4 of 12 rows\)"):
        to_arviz(svi, X, y, batch_size=4, result=result, num_samples=2)
    with pytest.raises(ValueError, match="no observed site. Pass the data too"):
        to_arviz(mcmc, X)
    with pytest.raises(ValueError, match=r"dims names sites \['F'\]"):
        to_arviz(mcmc, X, y, dims={"F": ["day"]})
    assert "day" in to_arviz(mcmc, X, y, dims={"y": ["day"]}).observed_data["y"].dims
    with pytest.raises(TypeError, match="dims of 'f' must be a list of names"):
        to_arviz(mcmc, X, y, dims={"f": "day"})
    with pytest.raises(ValueError, match=r"dims of 'f' has 2 names \['a', 'b'\]"):
        to_arviz(mcmc, X, y, dims={"f": ["a", "b"]})
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


@pytest.mark.slow
def test_white_values_of_a_sampler_that_whitens_are_left_out():
    X = jnp.arange(4.0)[:, None]
    y = jnp.array([1, 2, 4, 2])

    def model(X, y=None):
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f.sum(0))), obs=y)

    mcmc = short_run(sgp.EllipticalSlice(model), X, y)
    assert set(to_arviz(mcmc)["posterior"].data_vars) == {"f"}
    assert dims(to_arviz(mcmc, keep_white=True)) == {
        "f": ("chain", "draw", "functions", "f_dim_0"),
        "f_white": ("chain", "draw", "functions", "f_white_dim_0"),
    }


@pytest.mark.slow
def test_inducing_values_of_a_sparsified_model_have_its_plates():
    def model(X, y=None):
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f.sum(0), 1.0), obs=y)

    sparse = sgp.sparsify(model, sgp.SVGP(3))
    mcmc = short_run(HMC(sparse, num_steps=1, trajectory_length=None), X, jnp.ones(N))
    with pytest.warns(UserWarning, match="there is no LOO"):
        data = to_arviz(mcmc)
    assert dims(data) == {"f_u_white": ("chain", "draw", "functions", "f_u_white_dim_0")}
    assert dims(data) == dims(arviz_base.from_numpyro(mcmc))
    assert "observed_data" not in data  # hidden in a factor


def test_parameters_are_counted_without_upper_triangles_of_factors():
    assert _num_free("f_qu_sqrt", np.ones((4, 4))) == 16  # 4 components with 4 points
    assert _num_free("f_qu_sqrt", np.tril(np.ones((4, 4)))) == 10
    assert _num_free("f_qu_sqrt", np.tril(np.ones((2, 4, 4)))) == 20
    assert _num_free("f_qu_sqrt", np.ones((3, 4))) == 12
    assert _num_free("f_qu_mu", np.eye(4)) == 16


@pytest.mark.slow
def test_white_values_under_a_scope_are_left_out():
    """Their names have its prefix twice."""

    def model(X, y=None):
        with handlers.scope(prefix="a"):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    kernel = HMC(sgp.whiten(model), num_steps=1, trajectory_length=None)
    mcmc = short_run(kernel, jnp.arange(4.0)[:, None], jnp.ones(4))
    assert set(to_arviz(mcmc)["posterior"].data_vars) == {"a.f"}


def test_a_sampler_without_a_model_is_told():
    kernel = HMC(
        potential_fn=lambda z: 0.5 * jnp.sum(z["x"] ** 2),
        num_steps=1,
        trajectory_length=None,
    )
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.key(0), init_params={"x": jnp.zeros(2)})
    with pytest.raises(ValueError, match="has no model"):
        to_arviz(mcmc)

"""``compare``: numbers against analytic ones, errors, text and plot."""

import warnings

import arviz_base
import arviz_stats
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.svi import SVIRunResult
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import Comparison, compare
from numpyro_sgp.diagnostics.arviz import as_tree
from tests.helpers import optimal_whitened_q, rbf

S, SIZE = 1000, 20  # draws in each of two chains, entries of f
SCALE = np.linspace(0.5, 3.0, SIZE)


def make(draws, log_likelihood=None, data=None, **attrs):
    groups = {"posterior": draws}
    if log_likelihood is not None:
        groups["log_likelihood"] = {"y": log_likelihood}
    if data is not None:
        groups["observed_data"] = {"y": data}
    tree = arviz_base.from_dict(groups)
    tree.attrs.update(attrs)
    return tree


def gaussian(seed, shift=0.0, ratio=1.0, **attrs):
    """Draws of f from N(shift * SCALE, (ratio * SCALE)^2), and of a hyperparameter."""
    rng = np.random.default_rng(seed)
    f = SCALE * (shift + ratio * rng.standard_normal((2, S, SIZE)))
    return make({"f": f, "lengthscale": rng.lognormal(size=(2, S))}, **attrs)


@pytest.fixture(scope="module")
def fits():
    return {
        "SVGP": gaussian(1, shift=1.0, ratio=0.5, method="SVI", elbo=-7.0, seconds=3),
        "NUTS": gaussian(0, method="MCMC"),
        "HMC": gaussian(2),
    }


@pytest.fixture(scope="module")
def comparison(fits):
    return compare(fits, transform={"twice": lambda posterior: 2 * posterior["f"]})


def flat(tree):
    return tree.posterior["f"].values.reshape(-1, SIZE)


def test_default_reference_is_the_first_by_mcmc_and_variables_are_the_large(comparison):
    assert isinstance(comparison, Comparison)
    assert comparison.reference == "NUTS"
    assert comparison.var_names == ("f", "twice")
    assert list(comparison.table.index) == ["SVGP", "NUTS", "HMC"]


def test_distances_are_those_of_the_distributions(comparison):
    row = comparison.table.loc["SVGP"]
    # The distance between N(0, 1) and N(1, 0.5^2) is E|1 - 0.5 Z|, Z standard normal.
    w1 = stats.foldnorm.mean(2.0, scale=0.5)
    # Standard errors over 2000 draws and 20 entries: of a mean sqrt(1.25 / 40,000) =
    # 0.006, of a ratio of sds 0.5 / sqrt(40,000) = 0.0025. Dividing by an estimated sd
    # adds less than that. A distance has about the error of a mean.
    assert_allclose(row["mean_diff_sd[f]"], 1.0, atol=0.03)
    assert_allclose(row["mean_diff[f]"], SCALE.mean(), atol=0.03 * SCALE.max())
    assert_allclose(row["sd_ratio[f]"], 0.5, atol=0.0125)
    assert_allclose(row["w1_sd[f]"], w1, atol=0.03)


def test_distances_are_as_numpy_has_them(fits, comparison):
    q, p = flat(fits["SVGP"]), flat(fits["NUTS"])
    sd = p.std(axis=0, ddof=1)
    row = comparison.table.loc["SVGP"]
    mean_diff = np.abs(q.mean(axis=0) - p.mean(axis=0))
    # Between samples of one size the distance is that of sorted values.
    w1 = np.abs(np.sort(q, axis=0) - np.sort(p, axis=0)).mean(axis=0)
    ratio = q.std(axis=0, ddof=1) / sd
    assert_allclose(row["mean_diff[f]"], mean_diff.mean(), rtol=1e-10)
    assert_allclose(row["mean_diff_sd[f]"], (mean_diff / sd).mean(), rtol=1e-10)
    assert_allclose(row["sd_ratio[f]"], ratio.mean(), rtol=1e-10)
    assert_allclose(row["w1_sd[f]"], (w1 / sd).mean(), rtol=1e-10)


def test_two_fits_of_one_distribution_are_as_far_apart_as_documented(comparison):
    row = comparison.table.loc["HMC"]
    assert_allclose(row["w1_sd[f]"], 1.8 / np.sqrt(2 * S), rtol=0.4)
    assert_allclose(row["mean_diff_sd[f]"], 1.1 / np.sqrt(2 * S), rtol=0.4)
    own = comparison.table.loc["NUTS"]
    assert (own["mean_diff[f]"], own["sd_ratio[f]"], own["w1_sd[f]"]) == (0, 1, 0)


def test_differences_have_the_monte_carlo_errors_of_both_fits(fits, comparison):
    row = comparison.table.loc["SVGP"]
    n = 2 * S  # draws, independent
    # Variances of means are sd^2 / n and of sds sd^2 / 2n. Errors are themselves
    # estimated, from effective sample sizes with a relative error of some 5 % an entry.
    expected = np.sqrt((1 + 0.25) / n)
    assert_allclose(row["mean_diff_mcse[f]"], expected * SCALE.mean(), rtol=0.05)
    assert_allclose(row["mean_diff_sd_mcse[f]"], expected, rtol=0.05)
    assert_allclose(row["sd_ratio_mcse[f]"], 0.5 * np.sqrt(2 / (2 * n)), rtol=0.05)
    reference = comparison.table.loc["NUTS"]
    assert np.isnan(reference["mean_diff_mcse[f]"])
    # Draws that repeat each other tell less.
    f = np.repeat(fits["HMC"].posterior["f"].values[:, ::10], 10, axis=1)
    sticky = compare({"NUTS": fits["NUTS"], "sticky": make({"f": f})}).table.loc["sticky"]
    expected = np.sqrt((1 + 10) / n)
    assert_allclose(sticky["mean_diff_sd_mcse[f]"], expected, rtol=0.15)


def test_transformed_variable_keeps_relative_distances(comparison):
    table = comparison.table
    assert_allclose(table["mean_diff[twice]"], 2 * table["mean_diff[f]"], rtol=1e-10)
    for column in ("mean_diff_sd", "sd_ratio", "w1_sd"):
        assert_allclose(table[f"{column}[twice]"], table[f"{column}[f]"], rtol=1e-10)


def test_attributes_and_convergence_are_in_the_table(comparison):
    table = comparison.table
    assert (table.loc["SVGP", "elbo"], table.loc["SVGP", "seconds"]) == (-7, 3)
    assert table.loc["NUTS", ["elbo", "seconds", "elpd_loo", "k_max"]].isna().all()
    assert table.loc["SVGP", ["r_hat", "ess_bulk", "ess_tail"]].isna().all()
    # Independent draws.
    assert table.loc["NUTS", "r_hat"] < 1.02
    assert 0.8 * 2 * S < table.loc["NUTS", "ess_bulk"] < 1.2 * 2 * S


def said(comparison, name):
    return " ".join(r for r in comparison.remarks if r.startswith(f"{name}: "))


def test_nothing_is_said_of_fits_with_which_nothing_is_wrong(comparison):
    assert comparison.remarks == ()


def test_chains_that_disagree_are_told_with_the_variable(fits):
    shifted = fits["NUTS"].posterior["lengthscale"].values + [[0.0], [9.0]]
    tree = make({"f": fits["NUTS"].posterior["f"].values, "lengthscale": shifted})
    comparison = compare({"good": fits["HMC"], "bad": tree})
    row = comparison.table.loc["bad"]
    assert row["r_hat"] > 1.5
    assert row["ess_bulk"] < 50
    text = said(comparison, "bad")
    assert f"R-hat {row['r_hat']:.3f} of lengthscale is above 1.01" in text
    assert f"size {row['ess_bulk']:.0f} in the bulk of lengthscale is below 100" in text
    assert said(comparison, "good") == "" and "reference" not in text
    assert "this is the reference" in said(compare({"bad": tree}), "bad")


def test_sticky_chains_are_told_with_the_entry_bulk_and_tails():
    rng = np.random.default_rng(0)
    f = rng.standard_normal((4, 500, 3))
    f[..., 1] = np.repeat(rng.standard_normal((4, 10)), 50, axis=1)  # 50 draws alike
    comparison = compare({"NUTS": make({"f": f}, method="MCMC")})
    row, text = comparison.table.loc["NUTS"], said(comparison, "NUTS")
    assert row["ess_bulk"] < 100 and row["ess_tail"] < 100
    assert f"size {row['ess_bulk']:.0f} in the bulk of f[1] is below 100" in text
    assert f"size {row['ess_tail']:.0f} in the tails of f[1] is below 100" in text


def test_divergences_are_counted_and_told(fits):
    tree = fits["NUTS"].copy()
    diverging = np.zeros((2, S), bool)
    diverging[:, :3] = True
    stats = arviz_base.from_dict({"sample_stats": {"diverging": diverging}})
    tree["sample_stats"] = stats["sample_stats"]
    comparison = compare({"NUTS": tree, "HMC": fits["HMC"]})
    assert comparison.table.loc["NUTS", "divergences"] == 6
    assert "6 divergent transitions" in said(comparison, "NUTS")


def test_fit_that_has_not_converged_is_told_and_its_marginals_are_not_praised():
    def tree(**attrs):
        return gaussian(0, method="SVI", khat=0.9, **attrs)

    comparison = compare(
        {
            "done": tree(nats_left=0.01, loss_drop=0.4, loss_drop_se=0.01),
            "noisy": tree(nats_left=0.01, loss_drop=3.0, loss_drop_se=2.0),
            "short": tree(nats_left=46.2),
            "far": tree(nats_left=np.inf),
            "falling": tree(nats_left=0.0, loss_drop=7.2, loss_drop_se=0.2),
            "mixture": tree(nats_left=np.nan, nats_left_unknown="it is a mixture"),
            "attempt": tree(others_left=6.3, others_left_se=0.1, loss_drop=9.0),
            "random": tree(others_left=0.7, others_left_se=0.4, loss_drop=9.0),
            "few": tree(points_lose=3.1, points_mend="use 128 inducing points"),
            "single": tree(float32_loses=122.4),
            "digits": tree(float32_loses=0.1),
        }
    )
    assert comparison.table.loc["attempt", "others_left_se"] == 0.1
    assert comparison.table.loc["few", "points_lose"] == 3.1
    few = "its inducing points lose at least 3.1 nats: use 128 inducing points."
    assert few in said(comparison, "few")
    single = "float32 costs it at least 122 nats: numpyro.enable_x64() before the fit."
    assert single in said(comparison, "single")
    assert comparison.table.loc["single", "float32_loses"] == 122.4
    assert "float32" not in said(comparison, "digits")
    assert "not converged" not in said(comparison, "random")
    assert comparison.table.loc["short", "nats_left"] == 46.2
    for name in ("done", "noisy", "mixture"):
        text = said(comparison, name)
        assert "k-hat 0.90 is above 0.67" in text and "marginals may still be good" in text
        assert "not converged" not in text
    for name, words in {
        "short": "about 46 nats are left for q(u)",
        "far": "far from an optimum",
        "falling": "still fell by 7.2 ± 0.2 over the last tenth",
        "attempt": "about 6.3 nats are left for hyperparameters",
    }.items():
        text = said(comparison, name)
        assert words in text and "not converged" in text
        assert "k-hat 0.90" in text and "marginals may still be good" not in text
    assert "not known: it is a mixture" in said(comparison, "mixture")


def test_entries_that_do_not_vary_are_left_out(fits):
    f = fits["NUTS"].posterior["f"].values.copy()
    f[..., 0] = 0.3
    table = compare({"constant": make({"f": f}), "SVGP": fits["SVGP"]}).table
    assert np.isfinite(table.loc["SVGP", "w1_sd[f]"])
    assert_allclose(table.loc["SVGP", "sd_ratio[f]"], 0.5, atol=0.0125)
    f = np.full_like(f, 0.3)
    table = compare({"constant": make({"f": f}), "SVGP": fits["SVGP"]}).table
    assert np.isnan(table.loc["SVGP", "w1_sd[f]"])
    assert table.loc["SVGP", "mean_diff[f]"] > 0


def conjugate(seed, data, sd=1.0):
    """
    The posterior of t where t ~ N(0, 1) and y_i ~ N(t, 1), its sd times ``sd``: quantiles
    for draws, shuffled.
    """
    order = np.random.default_rng(seed).permutation(2 * S)
    z = stats.norm.ppf((order + 0.5) / (2 * S)).reshape(2, S, 1)
    variance = 1 / (1 + len(data))
    t = variance * data.sum() + sd * np.sqrt(variance) * z
    return make({"t": np.repeat(t, 2, -1)}, stats.norm.logpdf(data, t, 1.0), data)


DATA = np.array([-1.2, 0.3, 0.5, 0.9, 1.4, 2.0, 0.1, -0.4])


def test_elpd_is_that_of_exact_leave_one_out():
    data = DATA
    rest = data.sum() - data
    variance = 1 / len(data)  # of t given the other observations
    exact = stats.norm.logpdf(data, variance * rest, np.sqrt(1 + variance))
    row = compare({"a": conjugate(0, data)}).table.loc["a"]
    # Quantiles have no Monte Carlo error; 2000 of them are within 0.002 of the truth.
    assert_allclose(row["elpd_loo"], exact.sum(), atol=0.005)
    # ArviZ divides by 8 or by 7 in the variance, depending on its version.
    assert 0.999 < row["se"] / (np.sqrt(8) * exact.std()) < 1.001 * np.sqrt(8 / 7)
    assert row["k_max"] < 0.5 and row["k_bad"] == 0
    # Effective parameters: the log density at the data minus that left out.
    inside = stats.norm.logpdf(
        data, data.sum() / (1 + len(data)), np.sqrt(1 + 1 / (1 + len(data)))
    )
    assert_allclose(row["p_loo"], (inside - exact).sum(), atol=0.005)


def test_elpd_difference_is_paired():
    fits = {"a": conjugate(0, DATA), "b": conjugate(1, DATA, sd=1.5)}
    table = compare(fits).table
    a, b = (arviz_stats.loo(fit, pointwise=True).elpd_i for fit in fits.values())
    diff = b.values - a.values
    assert_allclose(table.loc["b", "elpd_diff"], diff.sum(), rtol=1e-9)
    assert abs(diff.sum()) > 0.1
    expected = np.sqrt(8) * diff.std(ddof=1)
    assert_allclose(table.loc["b", "se_diff"], expected, rtol=1e-9)
    assert expected < 0.7 * table.loc["b", "se"]


def test_bad_pareto_k_is_in_the_table_and_not_a_warning():
    rng = np.random.default_rng(0)
    # Weights exp(-log likelihood) have Pareto tails with k = 1.5, 0.1, 0.1 and 0.1.
    log_likelihood = -rng.exponential([1.5, 0.1, 0.1, 0.1], size=(2, S, 4))
    tree = make({"t": rng.standard_normal((2, S, 2))}, log_likelihood, np.zeros(4))
    comparison = compare({"a": tree})
    # The standard error of k from the 134 largest of 2000 is (1 + k) / sqrt(134) = 0.2.
    assert 0.9 < comparison.table.loc["a", "k_max"] < 2.5
    assert comparison.table.loc["a", "k_bad"] == 0.25
    remark = "Pareto k of 1 of 4 observations is above 0.70"
    assert remark in said(comparison, "a") and "too high most" in said(comparison, "a")
    tree.attrs["method"] = "nested"
    tree.attrs["factors"] = "censored"
    remark = said(compare({"a": tree}), "a")
    assert "too low or too high" in remark and "too high most" not in remark
    assert "LOO leaves out the terms of factors (censored)" in remark


def test_bad_pareto_k_is_that_of_arviz_for_few_draws():
    rng = np.random.default_rng(3)
    log_likelihood = -rng.exponential(0.65, size=(1, 100, 60))
    tree = make({"t": rng.standard_normal((1, 100, 2))}, log_likelihood, np.zeros(60))
    with pytest.warns(UserWarning, match="Pareto"):
        loo = arviz_stats.loo(tree, pointwise=True)
    assert loo.good_k == 0.5
    k = loo.pareto_k.values
    assert ((k > 0.5) & (k < 0.7)).any()
    comparison = compare({"a": tree})
    assert comparison.table.loc["a", "k_bad"] == np.mean(k > 0.5)
    assert "observations is above 0.50" in said(comparison, "a")


def test_an_observation_whose_density_is_one_number_keeps_it():
    """Left out it is that number too; the others are as without it."""
    rng = np.random.default_rng(4)
    t = 0.3 * np.repeat(rng.standard_normal((1, 500, 1)), 2, axis=-1)
    varying = stats.norm.logpdf(np.array([0.3, -0.2]), t, 1.0)
    both = np.concatenate([np.full((1, 500, 1), -0.7), varying], axis=-1)
    found = compare({"a": make({"t": t}, both)}).table.loc["a"]
    without = compare({"a": make({"t": t}, varying)}).table.loc["a"]
    assert_allclose(found["elpd_loo"], without["elpd_loo"] - 0.7, rtol=1e-9)
    assert_allclose(found["p_loo"], without["p_loo"], rtol=1e-9)
    each = arviz_stats.loo(make({"t": t}, varying), pointwise=True).elpd_i.values
    each = np.append(each, -0.7)
    assert_allclose(found["se"], np.sqrt(3) * each.std(), rtol=1e-9)


def test_densities_of_two_values_have_no_loo():
    """Of draws that do not repeat each other, which a sampler is not blamed for."""
    rng = np.random.default_rng(5)
    t = rng.standard_normal((1, 500, 3))
    comparison = compare({"a": make({"t": t}, np.where(t > 0.0, -0.1, -4.0))})
    assert np.isnan(comparison.table.loc["a"].get("elpd_loo", np.nan))
    assert "no LOO: the log likelihood of an observation has few" in said(comparison, "a")
    constant = compare({"a": make({"t": t}, np.full_like(t, -0.1))})
    assert "no LOO" in said(constant, "a")


def test_a_chain_that_has_not_moved_leaves_the_other_fits_their_loo():
    t = np.random.default_rng(5).standard_normal((1, 500, 3))
    fits = {"a": make({"t": t}, 0.1 * t), "b": make({"t": 0.0 * t}, 0.0 * t - 1.0)}
    comparison = compare(fits)
    elpd = comparison.table["elpd_loo"]
    assert np.isfinite(elpd["a"]) and np.isnan(elpd["b"])
    assert "chain has not moved" in said(comparison, "b")
    assert "chain has not moved" not in said(comparison, "a")


def test_sites_are_compared_in_the_order_of_their_names():
    rng = np.random.default_rng(0)
    t, first, second = (rng.normal(size=(1, 500, 10)) for _ in range(3))
    likelihoods = {"y1": 0.1 * first - np.arange(10), "y2": 0.1 * second - 3.0}

    def fit(names):
        groups = {"posterior": {"t": t}}
        groups["log_likelihood"] = {name: likelihoods[name] for name in names}
        return arviz_base.from_dict(groups)

    table = compare({"a": fit(["y1", "y2"]), "b": fit(["y2", "y1"])}).table
    assert_allclose(table.loc["b", ["elpd_diff", "se_diff"]].astype(float), 0.0, atol=1e-9)


@pytest.mark.parametrize("unit", [1.0, 1e-9, 1e9])
def test_data_are_compared_in_their_units(unit):
    data = unit * np.array([1.0, -2.0, 0.5])
    t = np.random.default_rng(6).standard_normal((1, 100, 2))
    compare({"a": make({"t": t}, data=data), "b": make({"t": t}, data=np.float32(data))})
    with pytest.raises(ValueError, match="data of site 'y' in fit 'b' differ"):
        compare({"a": make({"t": t}, data=data), "b": make({"t": t}, data=-data)})


PAIR = np.repeat(np.arange(4), 2)


def pairs_model(X, y=None):
    """One effect for each pair of rows, and a function."""
    with numpyro.plate("pairs", 4):
        c = numpyro.sample("c", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + c[PAIR], 0.3), obs=y)


@pytest.mark.slow
def test_latents_at_points_have_no_loo_no_khat_and_no_evidence_bound():
    rng = np.random.default_rng(0)
    X, noise = np.linspace(0.0, 3.0, 8)[:, None], 0.3
    y = np.sin(X[:, 0]) + rng.normal(size=4)[PAIR] + noise * rng.normal(size=8)
    effects = (PAIR[:, None] == np.arange(4)).astype(float)
    covariance = rbf(X, X) + effects @ effects.T + noise**2 * np.eye(8)
    inverse = np.linalg.inv(covariance)
    # By brute force, each row left out of the joint Gaussian of all.
    exact = sum(
        stats.norm.logpdf(
            y[i],
            covariance[i, rest] @ np.linalg.solve(covariance[rest][:, rest], y[rest]),
            1 / np.sqrt(inverse[i, i]),
        )
        for i in range(8)
        for rest in [np.delete(np.arange(8), i)]
    )
    # The point is the mode, which is the mean; q(f) is exact given it.
    mode = effects.T @ inverse @ y
    mu, S = optimal_whitened_q(X, y - mode[PAIR], X, noise)
    q = {"f_auto_qu_mu": mu, "f_auto_qu_sqrt": np.linalg.cholesky(S)}
    guesses = {
        "point": (AutoDelta, {"c_auto_loc": mode}),
        "draws": (AutoNormal, {"c_auto_loc": mode, "c_auto_scale": np.full(4, 0.2)}),
    }
    fits = {}
    for name, (base, params) in guesses.items():
        approximation = sgp.SVGP(8, inducing=X, train_inducing=False)
        guide = sgp.AutoSparseGP(pairs_model, approximation, base)
        guide.setup(X, y)
        svi = SVI(pairs_model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
        result = SVIRunResult({**q, **params}, None, None)
        fits[name] = sgp.to_arviz(svi, X, y, result=result, num_samples=300)
    point = fits["point"]
    f = point.posterior["f"].values[0]
    log_likelihood = stats.norm.logpdf(y, f + mode[PAIR], noise)[None]
    false = make({"f": f[None]}, log_likelihood, y)
    # What LOO says of it is far too good, and most of its k say nothing.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loo = arviz_stats.loo(false, pointwise=True)
    assert loo.elpd > exact + 2.0 and np.median(loo.pareto_k) < 0.5
    evidence = stats.multivariate_normal(np.zeros(8), covariance).logpdf(y)
    joint = evidence + stats.multivariate_normal(
        mode, np.eye(4) - effects.T @ inverse @ effects
    ).logpdf(mode)
    assert point.attrs["point_estimates"] == "c"
    assert_allclose(point.attrs["log_joint_bound"], joint, atol=1e-4)  # jitter
    assert "elbo" not in point.attrs and "khat" not in point.attrs
    assert "log_likelihood" not in as_tree(point).children
    comparison = compare(fits, reference="draws")
    table = comparison.table
    hidden = [
        "elpd_loo",
        "se",
        "elpd_diff",
        "p_loo",
        "k_max",
        "k_bad",
        "elbo",
        "guide_khat",
    ]
    assert table.loc["point", hidden].isna().all()
    assert table.loc["draws", hidden].notna().all()
    assert table.loc["draws", "elbo"] < evidence
    assert "held at points: c. So it has no LOO" in said(comparison, "point")
    # Also where a log likelihood has been added by hand.
    point["log_likelihood"] = false["log_likelihood"]
    assert np.isnan(compare({"a": point}).table.loc["a", "elpd_loo"])


def test_text_shows_every_fit_and_what_is_known_of_it(comparison):
    text = str(comparison)
    for name in ("SVGP", "NUTS (reference)", "HMC", "f against NUTS"):
        assert name in text
    first, chains, f, *_ = text.split("\n\n")
    # Columns without a number in any fit are left out.
    assert first.splitlines()[0].split() == ["fit", "elbo", "seconds"]
    assert first.splitlines()[1].split() == ["SVGP", "-7.0", "3.0"]
    assert chains.splitlines()[0].split() == [
        *("convergence", "r_hat", "ess_bulk", "ess_tail")
    ]
    row = comparison.table.loc["SVGP"]
    expected = f"{row['sd_ratio[f]']:.3f} ± {row['sd_ratio_mcse[f]']:.3f}"
    assert expected in f.splitlines()[1] and "±" not in f.splitlines()[2]
    assert "..." not in text and "nan" not in text.lower()
    assert max(map(len, text.splitlines())) <= 110
    assert repr(comparison) == text and len(text.splitlines()) < 25
    legend = comparison.legend()
    assert "r_hat" in legend and "w1_sd" in legend and "elpd_loo" not in legend
    assert "Wasserstein" not in text and ".legend()" in text
    html = comparison._repr_html_()
    assert html.startswith("<table") and "sd_ratio" in html and "SVGP" in html


def test_remarks_are_in_text_and_html():
    comparison = compare({"a": gaussian(0, method="SVI", nats_left=46.0)})
    assert "- a: about 46 nats are left" in str(comparison)
    assert "<li>a: about 46 nats are left" in comparison._repr_html_()


def test_plot_has_a_panel_for_each_variable_and_fit_and_one_of_elpd(comparison):
    figure = comparison.plot(x=np.linspace(1.0, 2.0, SIZE)[::-1, None])
    assert len(figure.axes) == 2 * 3  # no log likelihood, no panel for it
    for ax in figure.axes:
        x, mean = ax.lines[0].get_data()
        assert_allclose(x, np.linspace(1.0, 2.0, SIZE))
        assert [line.get_linestyle() for line in ax.lines] == ["-", ":", ":", ":"]
    _, mean = figure.axes[0].lines[0].get_data()
    assert_allclose(mean[::-1], comparison.draws["SVGP"]["f"].mean(axis=0))
    plt.close(figure)
    figure = comparison.plot(var_names="f")
    assert len(figure.axes) == 3
    plt.close(figure)
    data = np.arange(4.0)
    both = compare({"a": conjugate(0, data), "b": conjugate(1, data)})
    figure = both.plot()
    assert len(figure.axes) == 3
    labels = [label.get_text() for label in figure.axes[-1].get_yticklabels()]
    assert labels == ["a", "b"]
    plt.close(figure)


def test_several_latents_are_lines_of_one_panel():
    f = np.random.default_rng(0).standard_normal((2, 50, 3, 7))
    figure = compare({"a": make({"f": f})}).plot()
    (ax,) = figure.axes
    assert len(ax.collections) == 3 and len(ax.lines[0].get_xdata()) == 7
    plt.close(figure)


def test_errors(fits, comparison):
    with pytest.raises(ValueError, match="fits is empty"):
        compare({})
    with pytest.raises(TypeError, match="must be a dict .* got list"):
        compare([fits["NUTS"]])
    with pytest.raises(TypeError, match="Fit 'a' is not ArviZ data .* ndarray"):
        compare({"a": np.zeros(3)})
    no_posterior = arviz_base.from_dict({"prior": {"f": np.zeros((1, 2, 3))}})
    with pytest.raises(ValueError, match="Fit 'a' has no group 'posterior'"):
        compare({"a": no_posterior})
    with pytest.raises(ValueError, match="reference 'MCMC' is not in fits"):
        compare(fits, reference="MCMC")
    with pytest.raises(ValueError, match=r"Fit 'SVGP' has no variable \['g'\]"):
        compare(fits, var_names=["f", "g"])
    with pytest.raises(ValueError, match="var_names is empty"):
        compare(fits, var_names=[])
    with pytest.raises(TypeError, match="'g' must give an xarray.DataArray.*'SVGP'"):
        compare(fits, transform={"g": lambda posterior: 3})
    other = {"g": np.zeros((1, 5, 3))}
    with pytest.raises(ValueError, match="share no variable .* 'b': .'g'"):
        compare({"a": fits["NUTS"], "b": make(other)})
    short = {"f": np.zeros((1, 5, 3))}
    with pytest.raises(ValueError, match=r"'f' has shape \(3,\) in fit 'b', but \(20,"):
        compare({"a": fits["NUTS"], "b": make(short)})
    data = np.arange(4.0)
    a = conjugate(0, data)
    with pytest.raises(ValueError, match="data of site 'y' in fit 'b' differ"):
        compare({"a": a, "b": conjugate(0, data[::-1])})
    with pytest.raises(ValueError, match=r"shape \(3,\) in fit 'b', but \(4,\)"):
        compare({"a": a, "b": conjugate(0, data[:3])})
    renamed = a.copy()
    renamed["observed_data"] = a["observed_data"].to_dataset().rename(y="z")
    with pytest.raises(ValueError, match=r"Fit 'b' has the observed sites \['z'\]"):
        compare({"a": a, "b": renamed})
    with pytest.raises(ValueError, match=r"\['lengthscale'\] were not compared"):
        comparison.plot(var_names="lengthscale")
    with pytest.raises(ValueError, match=r"x must have the shape \(20,\)"):
        comparison.plot(x=np.zeros(3))

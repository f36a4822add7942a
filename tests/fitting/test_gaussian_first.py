"""What natural gradients do not train begins at a Gaussian that they trained."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_sgp as sgp
from numpyro_sgp.fitting import training
from numpyro_sgp.fitting.gaussian_first import gaussian_of, train_from_gaussian
from numpyro_sgp.fitting.progress import INTERRUPTED, Limits
from tests.helpers import counts, few_large_counts

KEY = jax.random.key(0)
X, COUNTS, LARGE = few_large_counts()

APPROXIMATIONS = {
    "mixture": sgp.MixtureSVGP(4, 2),
    "full mixture": sgp.MixtureSVGP(4, 3, covariance="full", whiten=False),
    "relaxed": sgp.InverseFreeSVGP(4),
    "fr": sgp.InverseFreeSVGP(4, bound="fr"),
    "lc": sgp.InverseFreeSVGP(4, bound="lc"),
    "pseudo-data": sgp.SVGP(4, covariance="pseudo_data"),
}


def groups(X, y=None):
    """Two functions, of which a site each."""
    kernel = sgp.kernels.RBF(1.0, 8.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    g = numpyro.sample("g", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(f), jnp.exp(g)), obs=y)


def smooth(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 8.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def fitted(model, approximation, **options):
    return sgp.fit(model, approximation, (X, COUNTS), progress_bar=False, **options)


@pytest.fixture(scope="module")
def gaussian():
    return fitted(counts, sgp.SVGP(4, covariance="diagonal"))


@pytest.mark.slow
def test_points_of_a_mixture_go_where_those_of_a_gaussian_go(gaussian):
    """A mixture by itself ended 900 nats below."""
    mixture = fitted(counts, APPROXIMATIONS["mixture"])
    Z = np.sort(np.asarray(mixture.params["f_auto_Z"])[:, 0])
    assert_allclose(Z, LARGE, atol=0.1)
    assert mixture.bound > gaussian.bound - 0.1  # the tolerance of fit
    assert mixture.stopped == "converged"
    assert mixture.bound >= -mixture.losses.min() - 1e-9  # the best of its own training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full mixture", "relaxed", "fr", "lc", "pseudo-data"])
def test_points_of_others_go_there_too(name, gaussian):
    found = fitted(counts, APPROXIMATIONS[name])
    Z = np.sort(np.asarray(found.params["f_auto_Z"])[:, 0])
    assert_allclose(Z, LARGE, atol=0.2)
    assert found.bound > gaussian.bound - 0.1


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mixture", "full mixture", "relaxed", "fr", "lc"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_q_is_that_of_the_gaussian(name, batch):
    """Moments at the data, where q(u) has less variance than the prior, as here."""
    option = APPROXIMATIONS[name]
    gaussian, rng = option.gaussian, np.random.default_rng(0)
    prior = sgp.GaussianProcess(sgp.kernels.RBF(jnp.ones(batch) * 1.3, 9.0), jnp.asarray(X))
    Z = jnp.asarray(X[5::16])
    full = gaussian.covariance == "full"
    root = np.tril(0.1 * rng.normal(size=(*batch, 4, 4))) + 0.5 * np.eye(4)
    sqrt = root if full else np.diagonal(root, axis1=-2, axis2=-1)
    values = {"Z": np.asarray(Z), "qu_mu": rng.normal(size=(*batch, 4)), "qu_sqrt": sqrt}

    def factor():
        return np.asarray(gaussian.inducing_factor(prior.kernel, (Z,)))

    expected = gaussian.posterior(prior, jax.tree.map(jnp.asarray, values))
    start = jax.tree.map(jnp.asarray, option.at_gaussian([values], [0.0], factor))
    assert start.keys() == option.start(prior, (Z,)).keys()
    found = option.posterior(prior, start)
    sd = jnp.sqrt(expected.variance)
    # Components are around it; pseudo-noise leaves out jitter, and its T has a tolerance.
    close = 0.5 if "mixture" in name else 1e-3
    assert float(jnp.abs((found.mean - expected.mean) / sd).max()) < close
    assert float(jnp.abs(jnp.log(found.variance / expected.variance)).max()) < close


def test_more_modes_than_components_are_left_out():
    """As where another site has more components."""
    family = sgp.MixtureSVGP(4, 2).family
    modes = [
        {"qu_mu": np.full(3, m), "qu_sqrt": 0.1 * np.ones(3)} for m in (1.0, -1.0, 5.0)
    ]
    found = family.around(modes, [0.0, -1.0, -2.0])
    assert_allclose(np.sort(found["qu_mu"][:, 0]), [-1.0, 1.0], atol=1e-12)
    assert_allclose(
        jax.nn.softmax(found["qu_logits"]), jax.nn.softmax(jnp.array([0, -1.0]))
    )


@pytest.mark.slow
def test_components_of_a_site_with_one_mode_are_apart_too():
    """Those of modes that differ at another site alone would have stayed equal."""

    def model(X, y=None):
        kernel = sgp.kernels.RBF(1.0, 15.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        g = numpyro.sample("g", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f**2 + g, 0.3), obs=y)

    y = (1.5 + 0.3 * np.sin(0.2 * X[:, 0])) ** 2
    found = sgp.fit(model, sgp.MixtureSVGP(5, 2), (X, y), progress_bar=False)
    f, g = (np.asarray(found.params[f"{name}_auto_qu_mu"]) for name in "fg")
    assert np.sum(f[0] * f[1]) < 0.0 and np.abs(g[0] - g[1]).max() > 1e-3


def test_diagonal_noise_keeps_the_mean():
    option = sgp.InverseFreeSVGP(4, covariance="diagonal")
    prior = sgp.GaussianProcess(sgp.kernels.RBF(1.3, 9.0), jnp.asarray(X))
    Z = jnp.asarray(X[5::16])
    values = {"Z": np.asarray(Z), "qu_mu": np.arange(4.0), "qu_sqrt": 0.3 * np.eye(4)}
    gaussian = option.gaussian
    factor = np.asarray(gaussian.inducing_factor(prior.kernel, (Z,)))
    expected = gaussian.posterior(prior, jax.tree.map(jnp.asarray, values))
    found = option.posterior(
        prior,
        jax.tree.map(jnp.asarray, option.at_gaussian([values], [0.0], lambda: factor)),
    )
    assert_allclose(found.mean, expected.mean, atol=2e-3)


def squares(X, y=None):
    """Which f and -f explain alike."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 15.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f**2, 0.3), obs=y)


@pytest.mark.slow
def test_components_are_at_modes_of_their_own():
    """The other one has as much of the posterior, which the bound knows by log 2."""
    noise = 0.3 * np.random.default_rng(0).normal(size=len(X))
    y = (1.5 + 0.3 * np.sin(0.2 * X[:, 0])) ** 2 + noise
    given = (X, y)
    one, two = (
        sgp.fit(squares, option, given, progress_bar=False)
        for option in (sgp.SVGP(6), sgp.MixtureSVGP(6, 2, covariance="full"))
    )
    # Where modes are far apart; a tolerance for each of the trainings.
    assert_allclose(two.bound - one.bound, np.log(2.0), atol=0.1)
    means = np.asarray(two.params["f_auto_qu_mu"])
    assert np.sum(means[0] * means[1]) < 0.0
    weights = jax.nn.softmax(two.params["f_auto_qu_logits"])
    assert_allclose(weights, 0.5, atol=0.02)


@pytest.mark.slow
def test_a_guide_in_the_place_of_the_approximation_begins_there_too():
    guide = sgp.AutoSparseGP(smooth, sgp.MixtureSVGP(4, 2), prefix="own")
    found, other = fitted(smooth, guide), fitted(smooth, sgp.MixtureSVGP(4, 2))
    assert found.guide is guide and abs(found.bound - other.bound) < 1e-6
    again = fitted(smooth, guide)  # which is set up, and begins where it does
    assert len(again.losses) != len(found.losses)


def test_vgp_has_points_where_they_are():
    full = gaussian_of(sgp.VGP(covariance="diagonal", jitter=1e-5))
    assert type(full) is sgp.VGP and full.jitter == 1e-5
    assert full.covariance == full.family.name == "full"
    assert gaussian_of(sgp.VGP(covariance="pseudo_data")) is None
    assert gaussian_of(sgp.SVGP(4)) is None


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("kind", [sgp.SVGP, sgp.SOLVEGP])
def test_variances_are_those_of_the_nearest_gaussian(batch, kind):
    option = kind(3, **({} if kind is sgp.SVGP else {"num_orthogonal": 2}))
    option = replace(option, covariance="diagonal")
    assert option.gaussian.covariance == "full"
    rng = np.random.default_rng(0)
    names = ("qu",) if kind is sgp.SVGP else ("qu", "qv")
    mode = {}
    for name, size in zip(names, (3, 2), strict=False):
        mode[f"{name}_mu"] = rng.normal(size=(*batch, size))
        mode[f"{name}_sqrt"] = np.tril(rng.normal(size=(*batch, size, size)), -1)
        mode[f"{name}_sqrt"] += np.eye(size)
    found = option.at_gaussian([mode], [0.0], None)
    for name in names:
        root = mode[f"{name}_sqrt"]
        precision = np.linalg.inv(root @ np.swapaxes(root, -1, -2))
        # KL(N(0, diag v) | N(0, S)) is least where 1 / v is the diagonal of S^-1.
        expected = np.diagonal(precision, axis1=-2, axis2=-1) ** -0.5
        assert_allclose(found[f"{name}_sqrt"], expected, rtol=1e-10)
        assert_allclose(found[f"{name}_mu"], mode[f"{name}_mu"])


@pytest.mark.slow
def test_variances_begin_at_a_full_covariance_and_where_the_race_ends(monkeypatch):
    own, runs = training.train_whole, []

    def train_whole(problem, starts, *args, **options):
        found = own(problem, starts, *args, **options)
        covariance = problem.guide.approximations["f"].covariance
        runs.append((covariance, starts, found.free["f_auto_Z"]))
        return found

    monkeypatch.setattr(training, "train_whole", train_whole)
    fitted(smooth, sgp.MixtureSVGP(4, 1), steps=40)
    assert [covariance for covariance, *_ in runs] == ["full", "diagonal", "diagonal"]
    full, variances, mixture = runs
    raced, known, *_ = (start["f_auto_Z"] for start in variances[1])
    assert_allclose(known, full[2], rtol=1e-9)
    assert np.any(raced != known)
    assert_allclose(mixture[1][0]["f_auto_Z"], variances[2], rtol=1e-9)


@pytest.mark.slow
def test_steps_are_of_both_trainings_together():
    assert len(fitted(smooth, sgp.SVGP(4, covariance="diagonal"), steps=12).losses) <= 12
    assert len(fitted(smooth, sgp.MixtureSVGP(4, 2), steps=12).losses) <= 12
    assert len(fitted(smooth, sgp.MixtureSVGP(4, 2), steps=1).losses) == 1


@pytest.mark.slow
def test_a_site_may_have_a_mixture_beside_another_one():
    options = {"f": sgp.MixtureSVGP(4, 2), "g": sgp.SVGP(3)}
    assert gaussian_of({"f": sgp.SVGP(4), "g": sgp.SVGP(3)}) is None
    assert gaussian_of(options)["g"] is options["g"]
    found = fitted(groups, options, steps=40)
    assert type(found.guide.approximations["f"]).__name__ == "MixtureSVGP"
    assert np.isfinite(found.bound) and len(found.losses) <= 40


@pytest.mark.slow
def test_auto_chooses_the_number_by_the_gaussian():
    found = fitted(smooth, sgp.MixtureSVGP("auto", 2), steps=40)
    assert (
        found.grown and found.guide.approximations["f"].num_inducing == found.grown[-1][0]
    )


@pytest.mark.slow
def test_ctrl_c_in_the_first_training_keeps_what_it_found(gaussian):
    def train(guide, start, limits, raced):
        assert limits.reached(0) and not raced
        return sgp.fit(counts, guide, (X, COUNTS), steps=1, progress_bar=False)

    def train_gaussian(approximation, limits):
        found = fitted(counts, approximation, steps=3)
        found.stopped = INTERRUPTED
        return found

    def make(options):
        return sgp.AutoSparseGP(counts, options)

    option = APPROXIMATIONS["mixture"]
    limits = Limits(0.1, None, None)
    found = train_from_gaussian(option, train_gaussian, make, train, limits)
    assert found.stopped == INTERRUPTED


def test_without_a_gaussian_it_begins_by_itself():
    def refuse(approximation, limits):
        raise ValueError("not for this likelihood")

    option, limits = APPROXIMATIONS["mixture"], Limits(0.1, None, None)
    assert train_from_gaussian(option, refuse, None, None, limits) is None

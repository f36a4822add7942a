"""Padded rows: the bound of the rows that count, and no program for a new number."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.training.padding import Padded

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(16, 2)), rng.normal(size=16)


def model(X, y=None, mask=True):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
    kernel = sgp.kernels.RBF(1.0, lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Laplace(f, 0.5), obs=y)


def make():
    guide = sgp.AutoSparseGP(model, sgp.SVGP(5))
    optimiser = sgp.natural_gradients(guide, 0.3, optax.adam(0.02))
    return SVI(model, guide, optimiser, sgp.TraceGP_ELBO())


@pytest.mark.slow
def test_the_bound_and_its_gradient_are_those_of_the_rows():
    svi = make()
    params = svi.get_params(svi.init(jax.random.key(0), X[:11], Y[:11]))

    def loss(params, *data):
        found = jax.tree.map(lambda v: 0.9 * v + 0.03, params)
        return svi.loss.loss(jax.random.key(0), found, model, svi.guide, *data)

    value_and_slopes = jax.jit(jax.value_and_grad(loss))
    known, slope = value_and_slopes(params, X[:11], Y[:11])
    padded = sgp.pad_rows(X[:11], Y[:11], size=14)
    assert padded[0].shape == (14, 2) and padded[2].sum() == 11
    got, gradient = value_and_slopes(params, *padded)
    assert_allclose(got, known, rtol=1e-10)
    for name in params:
        assert_allclose(gradient[name], slope[name], rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_rounds_of_growing_data_compile_nothing(count_compiled):
    svi, state, counts = make(), None, []
    for num_rows in range(9, 14):
        count_compiled()
        data = sgp.pad_rows(X[:num_rows], Y[:num_rows])
        result = sgp.train(
            svi,
            jax.random.key(num_rows),
            data,
            10,
            batch_size=16,
            shuffle=False,
            chunk=10,
            init_state=state,
            progress_bar=False,
        )
        state = result.state
        sgp.predict(svi.guide, result.params, X)
        counts.append(count_compiled())
    # The second goes on from a state, the first began.
    assert counts[0] > 0 and counts[2:] == [0, 0, 0]


def test_sizes_are_whole_numbers():
    with pytest.raises(ValueError, match="size must be a whole number.*64.5"):
        sgp.pad_rows(X, size=64.5)


def test_rows_are_filled_to_the_next_power_of_two():
    X_padded, y, mask = sgp.pad_rows(X[:5], Y[:5])
    assert_array_equal(X_padded, X[[0, 1, 2, 3, 4, 0, 1, 2]])
    assert_array_equal(y, Y[[0, 1, 2, 3, 4, 0, 1, 2]])
    assert_array_equal(mask, np.arange(8) < 5)
    assert [len(sgp.pad_rows(X[:n])[0]) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    with pytest.raises(ValueError, match="at least the 5 rows given, got 4"):
        sgp.pad_rows(X[:5], size=4)
    with pytest.raises(ValueError, match=r"same number of rows.*\(5, 2\), \(4,\)"):
        sgp.pad_rows(X[:5], Y[:4])


# ---- as an option of fit ---------------------------------------------------------------


def counts_model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.8), X))
    offset = numpyro.sample("offset", dist.Normal())
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + offset)), obs=y)


def growing(num_rows):
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-2.0, 2.0, 20))[:, None]
    y = rng.poisson(np.exp(1.0 + np.sin(2.0 * X[:, 0])))
    order = rng.permutation(20)[:num_rows]
    return X[order], y[order]


@pytest.fixture(scope="module")
def fits():
    """Of 11 rows as they are, and padded."""
    points = {"inducing": jnp.linspace(-2.0, 2.0, 5)[:, None], "train_inducing": False}
    given = counts_model, sgp.SVGP(**points), growing(11)
    return {pad: sgp.fit(*given, pad=pad, progress_bar=False) for pad in (False, True)}


@pytest.mark.slow
def test_a_padded_fit_is_that_of_the_rows_that_count(fits):
    assert fits[True].args[0].shape == (16, 1)
    assert_allclose(fits[True].bound, fits[False].bound, atol=1e-3)
    X_new = np.linspace(-2.0, 2.0, 7)[:, None]
    padded, plain = (fits[pad].posterior(X_new)["f"] for pad in (True, False))
    assert_allclose(padded.mean, plain.mean, atol=1e-2)
    assert_allclose(padded.variance, plain.variance, rtol=2e-2)
    assert "11 rows" in repr(fits[True])
    drawn = fits[True].sample(jax.random.key(0))["f"]
    assert drawn.shape == fits[True].median()["f"].shape == (11,)
    tree = fits[True].to_arviz(num_samples=20)
    assert tree["observed_data"]["y"].shape[-1] == 11
    verdict = fits[True].check()
    assert np.isfinite(verdict.to_dataframe().nats.iloc[0])


@pytest.mark.slow
def test_a_table_as_long_as_the_filled_rows_stays_whole():
    def model(X, group, table, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.8), X))
        mean = numpyro.deterministic("mean", f + table[group])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    (X, y), group, table = growing(11), np.arange(11) + 5, jnp.arange(16.0)
    given = model, sgp.SVGP(5), (X, group, table, y)
    fitted = sgp.fit(*given, steps=1, pad=True, progress_bar=False)
    drawn = fitted.sample(jax.random.key(0))
    assert_allclose(drawn["mean"] - drawn["f"], np.arange(11) + 5.0, atol=1e-9)


@pytest.mark.slow
def test_a_fit_goes_on_with_more_data_and_compiles_nothing(fits, monkeypatch, tmp_path):
    from numpyro_sgp import _programs

    fitted = sgp.fit(counts_model, fits[True], growing(11), pad=True, progress_bar=False)
    compiled, start = [], _programs._start
    monkeypatch.setattr(_programs, "_start", lambda *a: compiled.append(a) or start(*a))
    for num_rows in (12, 13, 16):
        fitted = sgp.fit(
            counts_model, fitted, growing(num_rows), pad=True, progress_bar=False
        )
        assert f"{num_rows} rows" in repr(fitted)
    assert not compiled
    sgp.fit(counts_model, fitted, growing(17), pad=True, progress_bar=False)
    assert compiled
    path = tmp_path / "padded.fit"
    fitted.save(path)
    loaded = sgp.load(path, counts_model)
    X_new = np.linspace(-2.0, 2.0, 7)[:, None]
    assert_allclose(
        loaded.posterior(X_new)["f"].mean, fitted.posterior(X_new)["f"].mean, rtol=1e-12
    )


@pytest.mark.slow
def test_what_cannot_be_padded_is_told(fits):
    data = growing(11)
    for approximation in (sgp.VGP(), sgp.SVGP(4, tight="scalar")):
        with pytest.raises(ValueError, match="has a part for each row"):
            sgp.fit(counts_model, approximation, data, pad=True, progress_bar=False)

    def one_event(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    with pytest.raises(ValueError, match="Give rows a density each"):
        sgp.fit(one_event, sgp.SVGP(4), data, pad=True, progress_bar=False)

    def factor(X, y=None, of_rows=False):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        log_prob = dist.Normal(f, 1.0).log_prob(y)
        numpyro.factor("prior of the noise", -1.0)  # of no row
        numpyro.factor("likelihood", log_prob if of_rows else log_prob.sum())

    with pytest.raises(ValueError, match="factor 'likelihood' is one number of all rows"):
        sgp.fit(factor, sgp.SVGP(4), data, pad=True, progress_bar=False)
    _, kwargs = Padded(factor).fill(data, {"of_rows": True})
    assert kwargs["rows_that_count"].sum() == 11

    def by_row(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            extra = numpyro.sample("extra", dist.Normal())
            numpyro.sample("y", dist.Normal(f + extra, 1.0), obs=y)

    with pytest.raises(ValueError, match="'extra', which has an entry for each row"):
        sgp.fit(by_row, sgp.SVGP(4), data, pad=True, progress_bar=False)

    with pytest.raises(ValueError, match="of another model"):
        sgp.fit(one_event, fits[False], data, progress_bar=False)
    with pytest.raises(ValueError, match="from fits with pad=True only"):
        sgp.fit(counts_model, fits[False], data, pad=True, progress_bar=False)


def standardised(X, y=None):
    X = (X - X.mean(0)) / X.std(0)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


def centred(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f - f.mean(), 1.0), obs=y)


def weighed(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(y.std()))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, scale), obs=y)


@pytest.mark.filterwarnings("ignore:The inputs of GP site")
@pytest.mark.parametrize(
    ("model", "site"), [(standardised, "f"), (centred, "y"), (weighed, "scale")]
)
def test_models_that_compute_with_all_rows_are_not_padded(model, site):
    """Of rows that do not count a mean is another: the bound was .5 nats off."""
    X, y = growing(11)
    with pytest.raises(ValueError, match=f"from 11 to 16 rows, and site '{site}' depends"):
        sgp.fit(model, sgp.SVGP(4), (X, 1.0 * y), pad=True, progress_bar=False)
    X, y = growing(16)
    Padded(model).fill((X, 1.0 * y), {})  # nothing is added


def beside(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)


def with_a_sum(X, y=None, z=None):
    beside(X, y)
    level = numpyro.sample("level", dist.Normal())
    numpyro.factor("z", dist.Normal(level, 1.0).log_prob(z).sum())


def with_other_data(X, y=None, z=None):
    beside(X, y)
    with numpyro.plate("others", 8):
        numpyro.sample("z", dist.Normal(), obs=z)


def with_a_table(X, y=None, z=None):
    beside(X, y)
    with numpyro.plate("groups", z.shape[0]):
        numpyro.sample("group", dist.Normal(z, 1.0))


@pytest.mark.parametrize(
    "model, z, told",
    [
        (with_a_sum, np.arange(5.0), "site 'z' depends"),
        (with_other_data, np.arange(8.0), "site 'z' has as many entries"),
        (with_a_table, np.zeros(8), "last ones are as its first"),
        (with_a_table, np.arange(5.0), "latent site 'group', which has an entry"),
    ],
)
def test_what_is_not_of_the_rows_is_not_filled_up(model, z, told):
    """A sum counted added rows, others lost their last ones, and groups became more."""
    with pytest.raises(ValueError, match=told):
        Padded(model).fill((X[:5], Y[:5], z), {})


@pytest.mark.parametrize("value", [0, True, 0.5])
def test_a_factor_of_no_row_and_keys_may_be_beside_them(value):
    def model(X, y=None, keys=None):
        beside(X, y)
        numpyro.factor("constant", jnp.asarray(value))

    keys = jax.random.split(jax.random.key(0), 8)
    (filled, _, kept), _ = Padded(model).fill((X[:5], Y[:5], keys), {})
    assert len(filled) == 8 and kept is keys


def test_functions_on_a_grid_of_their_own_are_padded_beside():
    grid = np.linspace(0.0, 1.0, 5)[:, None]

    def model(X, grid, cell, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), grid))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g[cell], 1.0), obs=y)

    X, y = growing(11)
    for T in (grid, np.linspace(0.0, 1.0, 20)[:, None]):
        (_, T_filled, _, _), _ = Padded(model).fill((X, T, np.arange(11) % 5, y), {})
        assert T_filled.shape == T.shape


def test_rows_along_another_axis_are_not_padded():
    def model(X, y=None):
        process = sgp.GaussianProcess(sgp.kernels.RBF(), X)
        f = numpyro.sample("f", process.expand([2]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    X, y = growing(11)
    with pytest.raises(
        ValueError, match=r"from 11 to 16 rows.* shape \(2, 11\).*transpose"
    ):
        Padded(model).fill((X, np.stack([y, y])), {})


@pytest.mark.slow
def test_a_fit_from_a_file_is_gone_on_from(fits, tmp_path):
    fitted = fits[False]
    fitted.save(tmp_path / "a.fit")
    loaded = sgp.load(tmp_path / "a.fit", counts_model)
    again = sgp.fit(counts_model, loaded, growing(11), steps=30, progress_bar=False)
    assert again.bound > fitted.bound - 1e-3

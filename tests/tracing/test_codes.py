"""What a model indexes by codes of the data, and what it may not observe."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer.util import log_density

import numpyro_sgp as sgp
from numpyro_sgp.guides.checks import checked_trace
from numpyro_sgp.tracing.row_indices import check_row_indices

X = np.linspace(0.0, 3.0, 12)[:, None]
GROUP = np.arange(12) % 3
KERNEL = sgp.kernels.RBF(1.0, 1.0)


def groups(X, group, y=None, *, last=False):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]))
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    ends = f[jnp.array([0, -1])].sum() if last else 0.0
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + b[group] + ends, 0.3), obs=y)


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, pd.Series, list])
def test_codes_of_groups_are_counted_from_zero(make):
    """JAX takes the last group for codes beyond, and says nothing."""
    model = sgp.AutoSparseGP(groups, sgp.SVGP(4))
    model.setup(X, make(GROUP), np.zeros(12))
    with pytest.raises(ValueError, match="argument 'group'.*from 1 to 3.*from 0 to 2"):
        sgp.AutoSparseGP(groups, sgp.SVGP(4)).setup(X, make(GROUP + 1), np.zeros(12))
    with pytest.warns(UserWarning, match="argument 'group' go from -1 to 1.*from its end"):
        sgp.AutoSparseGP(groups, sgp.SVGP(4)).setup(X, make(GROUP - 1), np.zeros(12))


MAPPED = {
    "below zero": lambda b, g: b[jnp.where(g < 0, 2, g)],
    "beyond": lambda b, g: b[jnp.where(g >= 3, 0, g)],
    "one of them": lambda b, g: b[jnp.where(g == 3, 0, g)],
    "clipped": lambda b, g: b[jnp.clip(g, 0, 2)],
    "less one": lambda b, g: b[g - 1],
}


@pytest.mark.parametrize("mapped", MAPPED)
def test_codes_that_the_model_maps_are_its_own(mapped):
    def model(X, group, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(f + MAPPED[mapped](b, group), 0.3), obs=y)

    codes = GROUP - 1 if mapped == "below zero" else GROUP + 1
    for given in (codes, jnp.asarray(codes)):
        assert not check_row_indices(model, (X, given), {}).any


@pytest.mark.slow
def test_codes_are_looked_at_where_something_is_predicted():
    options = {"steps": 3, "progress_bar": False}
    data = X, GROUP, np.zeros(12)
    fitted = sgp.fit(groups, sgp.SVGP(4), data, **options)
    nested = sgp.nested(groups, sgp.SVGP(4), data, progress_bar=False)
    new = X[:2], np.array([0, 3])
    for call in (fitted.predict, fitted.posterior, fitted.predictor(), nested.predict):
        call(X[:2], np.array([0, 2]))
        with pytest.raises(ValueError, match="codes go from 0 to 3"):
            call(*new)


def test_codes_of_samples_are_looked_at():
    samples = {"f": jnp.zeros((2, 12)), "b": jnp.zeros((2, 3))}
    predictive = sgp.GPPredictive(groups, samples, train_args=(X, GROUP))
    assert predictive(jax.random.key(0), X[:2], GROUP[:2])["y"].shape == (2, 2)
    with pytest.raises(ValueError, match="codes go from 0 to 3"):
        predictive(jax.random.key(0), X[:2], np.array([0, 3]))
    with pytest.raises(ValueError, match="codes go from 1 to 3"):
        sgp.GPPredictive(groups, samples, train_args=(X, GROUP + 1))


def test_indices_of_the_model_itself_may_count_from_the_end():
    assert not check_row_indices(groups, (X, GROUP), {"last": True}).any

    def thought_of(X, group, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]))
        effect = b.at[group].get(mode="fill", fill_value=0.0)
        numpyro.sample("y", dist.Normal(f + effect, 0.3), obs=y)

    assert not check_row_indices(thought_of, (X, GROUP + 1), {}).any


def observed(likelihood):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X).expand([3]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f), obs=y)

    return model


REFUSED = [
    (lambda f: dist.Categorical(logits=f.T), GROUP + 1, r"outside of.*\(0 to 2\).*4 rows"),
    (lambda f: dist.Bernoulli(logits=f[0]), 2 * (GROUP % 2) - 1, r"\(0 to 1\).* as -1"),
    (lambda f: dist.Binomial(jnp.full(12, 4), logits=f[0]), GROUP + 3, "0 to 4"),
    (lambda f: dist.Poisson(jnp.exp(f[0])), GROUP - 1.0, "from 0.*as -1"),
    (lambda f: dist.Poisson(jnp.exp(f[0])), GROUP + 0.5, "no whole numbers.*as 0.5"),
    (lambda f: dist.Bernoulli(logits=f[0]), GROUP / 2.0, "as 0.5.*Binomial.number"),
    (lambda f: dist.Gamma(2.0, jnp.exp(f[0])), GROUP * 1.0, "at the end of.*from 0"),
    (lambda f: dist.BetaProportion(0.5, jnp.exp(f[0])), GROUP / 2.0, "at the end of"),
    (lambda f: dist.Normal(f[0]), np.where(GROUP == 1, np.inf, 0.0), r"outside.*as inf"),
    (lambda f: dist.Categorical(logits=f.T), GROUP * 1.0, r"y.astype\(int\)"),
]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("likelihood", "y", "told"), REFUSED)
def test_values_that_cannot_be_are_told_by_name(likelihood, y, told):
    with pytest.raises(ValueError, match=f"(?s)site 'y'.*{told}"):
        checked_trace(observed(likelihood), (X, y), {})


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (lambda f: dist.Exponential(jnp.exp(f[0])), GROUP * 1.0),  # has a density at zero
        (lambda f: dist.Uniform(f[0] - 0.1, f[0] + 0.1), GROUP * 1.0),  # moves with f
        (lambda f: dist.VonMises(f[0], 1.0), GROUP + 3.0),  # angles are the same again
        (  # averages of counts
            lambda f: dist.Poisson(jnp.exp(f[0]), validate_args=False),
            GROUP + 0.5,
        ),
        (
            lambda f: dist.Bernoulli(logits=f[0]).mask(jnp.arange(12) > 0),
            3 * (X[:, 0] == 0),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Out-of-support values")
def test_values_that_can_be_are_taken(likelihood, y):
    checked_trace(observed(likelihood), (X, y), {})


@pytest.mark.filterwarnings("ignore:Out-of-support values")
def test_values_of_events_masks_and_shifts_are_left_alone():
    """Totals by row, entries masked inside of an event, a shift that is a latent."""
    counts, seen = np.full((12, 3), 2), np.arange(36).reshape(12, 3) % 2 == 0

    def totals(f):
        return dist.MultinomialLogits(f.T, jnp.full(12, 6), total_count_max=9)

    checked_trace(observed(totals), (X, counts), {})

    def within(f):
        return dist.Poisson(jnp.exp(f.T)).mask(seen).to_event(1)

    checked_trace(observed(within), (X, np.where(seen, counts, -1)), {})

    def shifted(X, y):
        shift = numpyro.sample("shift", dist.HalfNormal(2.0))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.LogNormal(f, 0.3), obs=y - shift)

    checked_trace(shifted, (X, np.full(12, 0.1)), {})


def test_missing_entries_of_outputs_are_counted_by_entry():
    def model(X, Y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X).expand([2]))
        numpyro.sample("Y", dist.Normal(f, 0.1), obs=Y)

    Y = np.zeros((2, 12))
    Y[1, 7] = np.nan
    with pytest.raises(ValueError, match=r"NaN in 1 entries \(first: \(1, 7\)\)"):
        checked_trace(model, (X, Y), {})


@pytest.mark.parametrize("rows_only", [True, False])
def test_missing_entries_that_a_mask_leaves_out_in_plates(rows_only):
    """A mask of rows was not seen behind the plate of the outputs."""

    def model(X, Y=None, seen=True):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("out", 2, dim=-2), numpyro.plate("data", 12, dim=-1):
            with handlers.mask(mask=seen):
                numpyro.sample("Y", dist.Normal(f, 0.1), obs=Y)

    Y = np.ones((2, 12))
    Y[:, 2] = np.nan
    seen = ~np.isnan(Y[0]) if rows_only else ~np.isnan(Y)
    assert np.isfinite(
        log_density(sgp.whiten(model), (X, Y, seen), {}, {"f_white": np.zeros(12)})[0]
    )
    checked_trace(model, (X, Y, seen), {})
    Y[0, 3] = np.nan
    with pytest.raises(ValueError, match=r"NaN in 1 entries \(first: \(0, 3\)\)"):
        checked_trace(model, (X, Y, seen), {})


def test_functions_by_sample_shape_are_refused():
    """Whitened and sparse sites would lose it."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X), sample_shape=(2,))
        numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=y)

    for run in (sgp.AutoSparseGP(model, sgp.SVGP(4)).setup, sgp.whiten(model)):
        with numpyro.handlers.seed(rng_seed=0):
            with pytest.raises(ValueError, match=r"sample_shape=\(2,\).*expand\(\[2\]\)"):
                run(X, np.zeros(12))


def test_shapes_of_outputs_and_masks_are_told():
    def model(X, Y, seen):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X).expand([3]))
        with numpyro.handlers.mask(mask=seen):
            numpyro.sample("Y", dist.Normal(f, 0.1), obs=Y)

    Y = np.zeros((12, 3))
    with pytest.raises(ValueError, match=r"Outputs are rows, \(P, N\)"):
        sgp.AutoSparseGP(model, sgp.SVGP(4)).setup(X, Y, Y == 0.0)


def test_a_row_of_a_frame_is_no_table():
    def model(X, y=None):
        scale = jnp.ones(X.shape[1])
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, scale), X))
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"shape \(12,\).*tables of shape \(N, D\)"):
        sgp.AutoSparseGP(model, sgp.SVGP(4)).setup(X[:, 0], np.zeros(12))


def test_a_model_is_traced_once_in_each_call():
    runs = []

    def model(X, group, y=None):
        runs.append(len(X))
        groups(X, group, y)

    for _ in range(3):
        check_row_indices(model, (X, GROUP), {})
    assert len(runs) == 3
    with pytest.raises(ValueError, match="argument 'group'.*from 1 to 3"):
        check_row_indices(model, (X, GROUP + 1), {})
    assert len(runs) == 4


@pytest.mark.parametrize("kind", [int, np.float32])
def test_codes_that_are_computed_are_looked_at_at_each_call(kind):
    """``b[group - 1]``, as of data for R, and codes that are held as floats."""

    def model(X, group, y=None):
        groups(X, group.astype(int) - 1, y)

    for _ in range(2):
        check_row_indices(model, (X, (GROUP + 1).astype(kind)), {})
        with pytest.raises(ValueError, match="an array of the model.*from 1 to 3"):
            check_row_indices(model, (X, (GROUP + 2).astype(kind)), {})


def test_codes_beside_the_arguments_may_be_others_at_the_next_call():
    beside = GROUP.copy()

    def model(X, group, y=None):
        groups(X, beside, y)

    check_row_indices(model, (X, GROUP), {})
    beside = GROUP + 1
    with pytest.raises(ValueError, match="whose codes go from 1 to 3"):
        check_row_indices(model, (X, GROUP), {})


def test_as_many_effects_as_the_codes_need_are_counted_at_each_call():
    def model(X, group, y=None):
        number = int(np.max(group)) + 1
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([number]))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(f + b[group], 0.3), obs=y)

    for codes in (GROUP, GROUP + 3, GROUP):
        check_row_indices(model, (X, codes), {})


def test_lags_are_taken_of_longer_arrays():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X[1:]))
        with numpyro.plate("times", X.shape[0] - 1) as i:
            numpyro.sample("y", dist.Normal(0.5 * y[i] + f, 0.1), obs=y[i + 1])

    assert check_row_indices(model, (X, jnp.arange(12.0)), {}).any


@pytest.mark.slow
def test_solvers_are_no_reason_to_wait():
    """At values of f of some hundreds this one does not end, in float32."""

    @jax.custom_jvp
    def solved(m):
        def step(x):
            return x - (x + 0.8 * jnp.sin(x) - m) / (1.0 + 0.8 * jnp.cos(x))

        def apart(x):
            return jnp.abs(x + 0.8 * jnp.sin(x) - m) > 1e-6

        return jax.lax.while_loop(apart, step, m)

    @solved.defjvp
    def _(primals, tangents):
        x = solved(*primals)
        return x, tangents[0] / (1.0 + 0.8 * jnp.cos(x))

    def model(X, y=None):
        shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))  # drawn by a loop too
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        mean = jax.vmap(solved)(f) if y is not None else shape * f
        numpyro.sample("y", dist.Normal(mean, shape), obs=y)

    with jax.enable_x64(False):
        assert check_row_indices(model, (X, np.zeros(12)), {}).loops
        assert not check_row_indices(model, (X,), {}).loops
        sgp.AutoSparseGP(model, sgp.SVGP(4)).setup(X, np.zeros(12))


def test_rows_of_no_weight_may_have_any_label():
    def model(X, y, weight):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.handlers.scale(scale=weight):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    y = np.where(GROUP == 0, -1, GROUP - 1)
    checked_trace(model, (X, y, (GROUP > 0) * 1.0), {})
    with pytest.raises(ValueError, match="outside of"):
        checked_trace(model, (X, y, (GROUP > 1) * 1.0 + 0.5), {})


def test_rows_of_f_as_classes_are_told():
    """One function for a class: as many classes as rows, and all rows alike."""

    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Categorical(logits=f), obs=y)

    with pytest.warns(UserWarning, match="'y' .* each of the 12 rows of f is a class"):
        checked_trace(model, (X, GROUP % 2), {})
    checked_trace(model, (X, jnp.arange(12)), {})  # a choice of an item: no warning


def numbered(X, group, y=None, *, number=3):
    with numpyro.plate("groups", number):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + b[group], 0.3), obs=y)


@pytest.mark.quick(1)
def test_more_groups_than_a_guide_has_effects_of_are_refused():
    """The effect of the last one would be taken for those of the new ones."""
    guide = sgp.AutoSparseGP(numbered, sgp.SVGP(4))
    guide.setup(X, GROUP, np.zeros(12))
    params = guide.known().starts
    calls = (
        lambda *new, **more: guide.posterior(params, *new, **more),
        lambda *new, **more: guide.sample_posterior(
            jax.random.key(0), params, *new, **more
        ),
        lambda *new, **more: sgp.log_predictive_density(
            guide, params, *new, np.zeros(2), **more
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match="an array with 3 of them by argument 'group'"):
            call(X[:2], np.array([0, 3]), number=4)
        call(X[:2], np.array([0, 1]), number=2)


def test_more_groups_whose_effects_are_filled_are_taken():
    def filled(X, group, y=None, *, number=3):
        with numpyro.plate("groups", number):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        effects = b.at[group].get(mode="fill", fill_value=0.0)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + effects, 0.3), obs=y)

    guide = sgp.AutoSparseGP(filled, sgp.SVGP(4))
    guide.setup(X, GROUP, np.zeros(12))
    params = guide.known().starts | {"b_auto_loc": jnp.array([1.0, 2.0, 3.0])}
    predicted = sgp.predict(guide, params, X[:4], np.arange(4), number=4)["y"]
    level = guide.posterior(params, X[:4], np.arange(4))["f"].mean
    assert_allclose(predicted.mean - level, [1.0, 2.0, 3.0, 0.0], atol=1e-10)


@pytest.mark.parametrize(
    ("likelihood", "y", "told"),
    [
        (lambda f: dist.Normal(f[0]), 0.7, True),
        (
            lambda f: dist.LeftCensoredDistribution(dist.Normal(f[0]), jnp.ones(12)),
            0.7,
            False,
        ),
        (lambda f: dist.Bernoulli(logits=f[0]), 1, False),  # which may be another argument
        (lambda f: dist.Normal(f[0].sum()), 0.7, False),
    ],
)
def test_one_number_for_all_rows_is_told(likelihood, y, told):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X).expand([3]))
        numpyro.sample("y", likelihood(f), obs=y)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        checked_trace(model, (X, y), {})
    texts = [str(warning.message) for warning in seen]
    assert any("one number, 0.7" in text for text in texts) is told

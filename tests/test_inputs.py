"""What users pass to models: kinds of arrays, and data of other lengths than plates."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from numpyro.contrib.control_flow import cond, scan
from numpyro.handlers import seed
from numpyro.infer import SVI, Predictive
from numpyro.infer.util import log_density
from scipy.sparse import csr_array, csr_matrix

import numpyro_sgp as sgp
from numpyro_sgp.distributions.arguments import as_arrays, as_numbers
from numpyro_sgp.fitting.problem import as_plain_arrays
from numpyro_sgp.guides.checks import check_reach, check_support_stays
from numpyro_sgp.tracing.row_indices import check_row_indices
from numpyro_sgp.training.rows import make_source
from tests.helpers import gaussian_model, regression_data, slow

N = 12
X, y = (np.asarray(a) for a in regression_data(N))
KEY = jax.random.key(0)
BACKWARDS = np.arange(N)[::-1]  # labels of a frame that has been sorted


def svi_of(model=gaussian_model):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    return SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())


@pytest.fixture(scope="module")
def fitted():
    """A guide that is set up, and its parameters."""
    svi = svi_of()
    state = svi.init(jax.random.key(0), jnp.asarray(X), jnp.asarray(y))
    return svi.guide, svi.get_params(state)


def without_index(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


# ---- kinds of arrays --------------------------------------------------------------------


class Tensor:
    """As those of PyTorch: an array that NumPy can read, and JAX cannot compute with."""

    def __init__(self, array):
        self._array, self.shape = array, array.shape

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._array, dtype)


KINDS = {
    "NumPy": (X, y),
    "long doubles": (X.astype(np.longdouble), y.astype(np.longdouble)),
    "another order of bytes": (X.astype(">f8"), y.astype(">f8")),
    "a frame and a series": (
        pd.DataFrame({"a": X[:, 0]}, index=BACKWARDS),
        pd.Series(y, index=BACKWARDS),
    ),
    "nullable types": (
        pd.DataFrame({"a": X[:, 0]}).astype("Float64"),
        pd.Series(y, dtype="Float64"),
    ),
    "lists": (X.tolist(), y.tolist()),
    "of another library": (Tensor(X), Tensor(y)),
    "a masked array without a mask": (np.ma.masked_array(X), np.ma.masked_array(y)),
}


class Variable(Tensor):
    """As those of Flax: it tells JAX what it is."""

    def __jax_array__(self):
        return self._array


def test_what_tells_jax_its_values_is_left_to_it():
    """It may hold a value that is traced, of which NumPy can make nothing."""

    def inputs(x):
        return sgp.GaussianProcess(sgp.kernels.RBF(), Variable(x)).X

    assert_allclose(jax.jit(inputs)(jnp.asarray(X)), X)


def posterior_mean(guide, params, X, y):
    return guide.posterior(params, X)["f"].mean


def draws(guide, params, X, y):
    return guide.sample_posterior(jax.random.key(0), params, X)["f"]


def predictive_density(guide, params, X, y):
    return sgp.log_predictive_density(guide, params, X, y)["y"]


def whitened_density(guide, params, X, y):
    values = {"f_white": jnp.linspace(-1.0, 1.0, N)}
    # inside of jit, where the index of the plate is not known
    return jax.jit(lambda v: log_density(sgp.whiten(gaussian_model), (X, y), {}, v)[0])(
        values
    )


def predictions(guide, params, X, y):
    samples = {"f": jnp.ones((2, N))}
    predictive = sgp.GPPredictive(gaussian_model, samples, train_args=(X, y))
    return predictive(jax.random.key(0), X)["f"]


def steps_of_lbfgs(guide, params, X, y):
    return sgp.fit_lbfgs(
        svi_of(), jax.random.key(0), X, y, max_iterations=1, progress_bar=False
    ).losses


JAX = jnp.asarray(X), jnp.asarray(y)
ENTRIES = [
    posterior_mean,
    draws,
    predictive_density,
    whitened_density,
    predictions,
    slow(steps_of_lbfgs),
]


@pytest.mark.quick(5)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_arrays_give_what_jax_arrays_give(fitted, entry, kind):
    assert_allclose(entry(*fitted, *KINDS[kind]), entry(*fitted, *JAX), rtol=1e-10)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sparsified_model_takes_other_arrays(kind):
    points = sgp.SVGP(inducing=JAX[0][:3])

    def density(X, y):
        sparse = sgp.sparsify(gaussian_model, points)
        values = {"f_u_white": jnp.linspace(-1.0, 1.0, 3)}
        return jax.jit(lambda v: log_density(sparse, (X, y), {}, v)[0])(values)

    assert_allclose(density(*KINDS[kind]), density(*JAX), rtol=1e-10)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "data"),
    [
        (gaussian_model, KINDS["NumPy"]),
        (without_index, KINDS["a frame and a series"]),
        (without_index, (X, y.tolist())),
    ],
)
def test_a_step_of_svi_takes_other_arrays(model, data):
    def loss(*data):
        svi = svi_of(model)
        state = svi.init(jax.random.key(0), *data)
        return jax.jit(lambda state: svi.evaluate(state, *data))(state)

    assert_allclose(loss(*data), loss(*JAX), rtol=1e-10)


@pytest.mark.parametrize("kind", ["a frame and a series", "lists"])
def test_svi_says_what_to_write_in_place_of_a_frame_or_list(kind):
    with pytest.raises(TypeError, match=r"'X' of the model is a .* an array: .*X"):
        svi_of().init(jax.random.key(0), *KINDS[kind])


@pytest.mark.slow
def test_predictive_says_what_to_write_in_place_of_a_numpy_array():
    """It runs the model in a loop of JAX, where a plate's index is not known."""

    def draw(model, X_new):
        svi = svi_of(model)
        params = svi.get_params(svi.init(jax.random.key(0), X, y))
        draws = Predictive(model, guide=svi.guide, params=params, num_samples=2)
        return draws(jax.random.key(0), X_new)["y"].shape

    with pytest.raises(TypeError, match=r"'X' .* is a ndarray.*jnp.asarray\(X\)"):
        draw(gaussian_model, X)
    assert draw(gaussian_model, jnp.asarray(X)) == (2, N)
    assert draw(lambda X, y=None: gaussian_model(jnp.asarray(X), y), X) == (2, N)


def test_batches_of_a_frame_are_those_of_its_numbers():
    source = make_source((pd.DataFrame(X), y.tolist()), 5, True, (0,))
    plain = make_source((X, y), 5, True, (0,))
    for found, wanted in zip(source.batch(2), plain.batch(2), strict=True):
        assert_allclose(found, wanted, rtol=0)


def test_columns_of_several_types_become_one_table():
    frame = pd.DataFrame({"a": [1.5, 2.0], "b": [True, False], "c": [3, 4]})
    assert_allclose(as_numbers(frame, "X"), [[1.5, 1.0, 3.0], [2.0, 0.0, 4.0]])
    frame["c"] = pd.array([3, None], dtype="Int64")
    found = as_numbers(frame, "X")
    assert np.isnan(found[1, 2]) and found[0, 2] == 3.0


def test_a_numpy_array_stays_numpys_but_for_indices_of_jax():
    group = np.array([0, 2, 1, 2])

    def of(i):
        ((found,), _) = as_arrays(without_index, (group,), {})
        assert int(found.max()) + 1 == 3 and isinstance(found.mean(), float)
        return (found - 1)[i] + jnp.zeros(found.max() + 1)[found[i]]

    assert_allclose(jax.jit(of)(jnp.arange(3)), group[:3] - 1)


def test_what_is_no_data_stays_as_it_is():
    options = {"widths": [8, 8], "name": "rbf", "size": np.array(3), "none": None, "f": len}
    strings, pair = np.array(["a", "b"]), (1, 2)
    args, kwargs = as_arrays(without_index, (X, strings, pair), options)
    assert args[1] is strings and args[2] is pair
    assert all(kwargs[name] is value for name, value in options.items())
    (found, counts), _ = as_arrays(without_index, (X, [1] * N), {})
    assert isinstance(counts, np.ndarray)  # as many as rows: data


def by_column(frame, y=None):
    """A model that takes a frame apart by itself."""
    town = jnp.asarray(frame["town"].astype("category").cat.codes.to_numpy())
    table = jnp.asarray(frame[["a"]].to_numpy())
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), table))
    mean = f + jnp.array([0.3, -0.2])[town] + 0.1 * jnp.asarray(frame["a"].values)
    with numpyro.plate("data", len(frame)):
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)


@pytest.mark.slow
def test_a_model_may_take_a_frame_apart_by_its_columns():
    frame = pd.DataFrame({"a": X[:, 0], "town": ["u", "v"] * (N // 2)})
    guide = sgp.AutoSparseGP(by_column, sgp.SVGP(3))
    svi = SVI(by_column, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), frame, y))
    expected = guide.posterior(params, frame)["f"].mean
    assert_allclose(sgp.predict(guide, params, frame)["f"].mean, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The inputs of GP site")
def test_a_guide_of_arrays_takes_the_matrix_of_a_frame(count_compiled):
    """Of which the mean is one number, and that of the frame one for each column."""

    def centred(X, y=None):
        inputs = jnp.asarray(X - X.mean())
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), inputs))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    table = np.c_[X[:, 0], 2.0 * X[:, 0] + 1.0]
    guide = sgp.AutoSparseGP(centred, sgp.SVGP(3))
    guide.setup(table, y)
    params = {**guide.known().starts, "f_auto_qu_mu": jnp.arange(3.0)}
    frame = pd.DataFrame(table, columns=["a", "b"])
    known = sgp.predict(guide, params, table)
    assert_allclose(guide.posterior(params, frame)["f"].mean, known["f"].mean, rtol=1e-9)
    assert_allclose(sgp.Predictor(guide, params)(frame)["f"].mean, known["f"].mean)
    density = sgp.log_predictive_density(guide, params, table, y)["y"]
    count_compiled()
    found = sgp.predict(guide, params, frame)
    assert_allclose(found["y"].quantiles, known["y"].quantiles)
    assert_allclose(sgp.log_predictive_density(guide, params, frame, y)["y"], density)
    assert count_compiled() == 0


def test_a_frame_stays_one_but_for_indices_and_products_of_jax():
    frame = pd.DataFrame({"a": X[:, 0], "b": np.arange(N)})
    ((found,), _) = as_arrays(without_index, (frame,), {})
    assert "a" in found and list(found) == ["a", "b"]
    assert (found.mean() == frame.mean()).all()
    matrix, w = frame.to_numpy(), jnp.array([2.0, 3.0])
    assert_allclose(jax.jit(lambda i: found[i])(jnp.arange(2)), matrix[:2])
    assert_allclose(jax.jit(lambda w: found @ w)(w), matrix @ np.asarray(w))
    assert_allclose(found[:, 1], matrix[:, 1])
    ((series,), _) = as_arrays(without_index, (frame["b"],), {})
    assert series.std() == pytest.approx(frame["b"].std())


def frame_with(column):
    return pd.DataFrame({"a": X[:, 0], "b": column})


@pytest.mark.parametrize(
    ("X", "told"),
    [
        (frame_with(["u", "v"] * (N // 2)), "'X' is a DataFrame.*'b'.*cat.codes"),
        (frame_with(pd.Categorical(["u"] * N)), "'b'.*category.*cat.codes"),
        (frame_with(pd.Timestamp("2020-01-01")), "'b'.*datetime64.*t.min()"),
        (np.ma.masked_less(X, 0.0), "'X' is a masked array.*handlers.mask"),
        (X.astype(object), r"X of GaussianProcess has the dtype object.*astype\(float\)"),
        (np.full((N, 1), "u"), "X of GaussianProcess has the dtype <U1.*cat.codes"),
        (np.zeros((N, 1), "datetime64[D]"), "datetime64.*timedelta64"),
    ],
)
def test_what_is_no_number_is_refused_with_what_to_write(fitted, X, told):
    guide, params = fitted
    with pytest.raises(TypeError, match=told):
        guide.posterior(params, X)


def test_strings_are_refused_by_all_predictions_and_may_be_encoded(fitted):
    guide, params = fitted
    names = np.full((N, 1), "u")
    for predict in (
        lambda X: sgp.predict(guide, params, X),
        lambda X: sgp.log_predictive_density(guide, params, X, y),
        sgp.Predictor(guide, params),
    ):
        with pytest.raises(TypeError, match="X of GaussianProcess has the dtype <U1"):
            predict(names)

    def encoding(names, y=None):
        without_index(jnp.asarray((names == "v").astype(float)), y)

    guide = sgp.AutoSparseGP(encoding, sgp.SVGP(1))
    names = np.array([["u"], ["v"]] * (N // 2))
    svi = SVI(encoding, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(KEY, names, y))
    expected = guide.posterior(params, names)["f"].mean
    assert_allclose(sgp.Predictor(guide, params)(names)["f"].mean, expected, atol=1e-9)


@pytest.mark.parametrize("kind", [csr_array, csr_matrix])
def test_sparse_matrices_are_refused_with_what_to_write(fitted, kind):
    guide, params = fitted
    for predict in (lambda X: sgp.predict(guide, params, X), sgp.Predictor(guide, params)):
        with pytest.raises(TypeError, match=r"'X' .* has a csr_.* sparse .*X.toarray\(\)"):
            predict(kind(X))
    with pytest.raises(TypeError, match=r"X of Gauss.* got a csr_.*\.toarray\(\)"):
        guide.posterior(params, kind(X))


def test_observations_that_are_no_numbers_are_refused():
    with pytest.raises(TypeError, match="value of observed site 'y' has the dtype <U1"):
        svi_of(without_index).guide.setup(X, np.full(N, "u"))


@pytest.mark.parametrize("X_new", [X[:0], jnp.asarray(X[:0]), pd.DataFrame(X)[:0]])
def test_no_rows_are_refused(fitted, X_new):
    guide, params = fitted
    with pytest.raises(ValueError, match=r"'X' .* has no rows \(shape \(0, 1\)\)"):
        guide.posterior(params, X_new)
    samples = {"f": jnp.zeros((2, N))}
    predictive = sgp.GPPredictive(without_index, samples, train_args=(X, y))
    with pytest.raises(ValueError, match="'X' of the model has no rows"):
        predictive(jax.random.key(0), X_new)


# ---- data of another length than the plate --------------------------------------------


def set_up(model, X, y):
    sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, y)


def set_up_on_batches(model, X, y):
    if model is gaussian_model:
        sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, y, batch_size=5)
    else:
        sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, y)


def density_of(wrapped):
    def density(model, X, y):
        model = numpyro.handlers.seed(wrapped(model), 0)
        numpyro.handlers.trace(model).get_trace(X, y)

    return density


def elliptical(model, X, y):
    sgp.EllipticalSlice(model).init(jax.random.key(0), 1, model_args=(X, y))


def lbfgs(model, X, y):
    sgp.fit_lbfgs(svi_of(model), jax.random.key(0), X, y, progress_bar=False)


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "entry",
    [
        set_up,
        set_up_on_batches,
        density_of(sgp.whiten),
        density_of(lambda model: sgp.sparsify(model, sgp.SVGP(3))),
        elliptical,
        lbfgs,
    ],
)
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
@pytest.mark.parametrize(("rows", "responses"), [(N, N - 2), (N - 2, N)])
def test_responses_of_another_length_are_refused(entry, kind, rows, responses):
    data = kind(X[:rows]), kind(y[:responses])
    told = f"plate 'data'.* size {rows}, but argument 'y' has {responses} rows"
    with pytest.raises(ValueError, match=told):
        entry(gaussian_model, *data)
    with pytest.raises(ValueError, match="'y' has values of shape"):
        entry(without_index, *data)


def test_held_out_responses_of_another_length_are_refused(fitted):
    with pytest.raises(ValueError, match=f"argument 'y' has {N - 1} rows"):
        sgp.log_predictive_density(*fitted, X, y[1:])


def test_svi_refuses_responses_of_another_length():
    with pytest.raises(ValueError, match=f"argument 'y' has {N - 1} rows"):
        svi_of().init(jax.random.key(0), jnp.asarray(X), jnp.asarray(y[1:]), batch_size=5)


def takes(body, batch=None):
    """A model that does something with the index of a plate of the rows of X."""

    def model(X, y, other=None):
        with numpyro.plate("data", X.shape[0], subsample_size=batch) as index:
            body(y, other, index)

    return model


LENGTHS = jnp.arange(N) % 3
RIGHT = {
    "numbers of groups": (True, lambda y, other, i: other[y[i]], LENGTHS, jnp.zeros(3)),
    "a remainder": (False, lambda y, other, i: y[i % 5], jnp.zeros(5), None),
    "the next row": (False, lambda y, other, i: y[i + 1], jnp.zeros(N + 1), None),
    "another axis": (True, lambda y, other, i: y[:, i], jnp.zeros((3, N)), None),
    "two indices": (True, lambda y, other, i: y[i, other[i]], jnp.zeros((N, 3)), LENGTHS),
    "a longer table of parameters": (
        True,
        lambda y, other, i: numpyro.param("w", jnp.zeros(2 * N))[i],
        jnp.zeros(N),
        None,
    ),
    "NumPy's functions": (True, lambda y, _, i: y[i][: len(np.unique(y))], LENGTHS, None),
}


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("name", RIGHT)
def test_arrays_that_are_not_rows_of_the_plate_are_left_alone(name, batch):
    seen, body, *data = RIGHT[name]
    assert check_row_indices(takes(body, batch), (JAX[0], *data), {}).any is seen


WRONG = {
    "take": lambda y, other, i: jnp.take(y, i, axis=0),
    "a step of map": lambda y, other, i: jax.lax.map(lambda k: y[k], i),
    "vmap": lambda y, other, i: jax.vmap(lambda k: y[k])(i),
    "jit": lambda y, other, i: jax.jit(lambda y, k: 2 * y[k])(y, i),
    "a column": lambda y, other, i: y[i, 0],
    "another axis": lambda y, other, i: y.T[:, i],
    "what is computed from it": lambda y, other, i: (y - y.mean())[i],
    "entries of a dict": lambda y, other, i: other["y"][i],
}


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("rows", [N - 1, N + 1])
def test_rows_are_counted_however_they_are_taken(name, batch, rows):
    data = JAX[0], jnp.zeros((rows, 2)), {"y": jnp.zeros((rows, 2))}
    with pytest.raises(ValueError, match=f"plate 'data'.* size {N}, but .*{rows}"):
        check_row_indices(takes(WRONG[name], batch), data, {})


def test_a_table_of_parameters_that_is_too_short_is_refused():
    def body(y, other, i):
        return numpyro.param("w", jnp.zeros(3))[i]

    with pytest.raises(ValueError, match=r"an array of shape \(3,\) has 3 rows"):
        check_row_indices(takes(body), JAX, {})


# ---- what is no number, key, shape or path ----------------------------------------------


def test_a_keyword_that_the_model_has_not_is_told():
    with pytest.raises(TypeError, match="num_rows=.*arguments are X, y.*numpyro.plate"):
        sgp.train(
            svi_of(without_index),
            jax.random.key(0),
            (X, y),
            2,
            batch_size=4,
            num_rows=N,
        )


@pytest.mark.parametrize("wrong", [None, "text", {1}, np.array(["a"] * N), 1j * X])
def test_inputs_that_are_no_numbers(wrong):
    with pytest.raises(TypeError, match="RBF: the inputs must be real numbers"):
        sgp.kernels.RBF()(wrong, X)
    with pytest.raises(TypeError, match="X of GaussianProcess"):
        sgp.GaussianProcess(sgp.kernels.RBF(), wrong)


@pytest.mark.parametrize("wrong", [None, 3, "key", np.zeros(3), jax.random.split(KEY)])
def test_keys(wrong):
    with pytest.raises(TypeError, match="key must be one random key"):
        sgp.GaussianProcess(sgp.kernels.RBF(), X).sample(wrong)


@pytest.mark.parametrize("wrong", [None, 3, "shape", (2.5,), (-1,)])
def test_sample_shapes(wrong):
    with pytest.raises(TypeError, match="sample_shape must be a tuple of whole numbers"):
        sgp.GaussianProcess(sgp.kernels.RBF(), X).sample(jax.random.key(0), wrong)


def test_options_of_another_kind():
    with pytest.raises(TypeError, match="SVGP: whiten must be True or False"):
        sgp.SVGP(3, whiten="no")
    with pytest.raises(ValueError, match="SVGP: seed must be a whole number"):
        sgp.SVGP(3, seed="one")
    with pytest.raises(ValueError, match="num_orthogonal must be a number"):
        sgp.SOLVEGP(3, [])
    with pytest.raises(ValueError, match="num_particles must be a whole number, 1 or more"):
        sgp.TraceGP_ELBO(num_particles=0)
    with pytest.raises(TypeError, match="prefix must be a text"):
        sgp.AutoSparseGP(gaussian_model, sgp.SVGP(3), prefix=3)
    for make in (sgp.whiten, lambda model: sgp.sparsify(model, sgp.SVGP(3))):
        with pytest.raises(TypeError, match="model must be a NumPyro model"):
            make("model")
    with pytest.raises(TypeError, match="path must be that of a file"):
        sgp.load(3, gaussian_model)
    with pytest.raises(TypeError, match="kernel must be a kernel"):
        sgp.assess_inducing("kernel", X, X[:3])
    with pytest.raises(TypeError, match="lengthscale must be real numbers"):
        sgp.kernels.RBF(1.0, ["a", "b"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Out-of-support")
def test_rows_that_have_no_slope_are_named():
    """Zero exposure, of which the slope is 0 / 0."""

    def model(X, exposure, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(f + level)), obs=y)

    exposure, counts = np.ones(N), np.ones(N)
    exposure[2], counts[2] = 0.0, 0.0
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    with pytest.raises(ValueError, match=r"not at 1 rows of site 'y' \(first: 2\)"):
        guide.setup(X, exposure, counts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Out-of-support")
def test_observations_without_a_finite_density_are_told():
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, scale), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    with pytest.raises(ValueError, match="not finite at any of the starting values"):
        guide.setup(X, np.full(N, 1e200))  # its square is infinite


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:.*Out-of-support")
@pytest.mark.parametrize("infer", [sgp.fit, sgp.nested])
@pytest.mark.parametrize(
    "likelihood, told",
    [
        (lambda f: dist.TruncatedNormal(f, 1.0, low=0.7), "in 1 rows .first: .2.., as 0.5"),
        slow(lambda f: dist.Beta(jnp.exp(f), 2.0), "Beta in 1 rows .first: .2.., as 0"),
    ],
    ids=["truncated", "end"],
)
def test_rows_without_density_are_told(infer, likelihood, told):
    """What no check of known values sees: bounds of what is of f."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("counts", likelihood(f), obs=y)

    y = np.full(N, 0.5) if told.startswith("Beta") else np.ones(N)
    y[2] -= 0.5
    with pytest.raises(ValueError, match=f"'counts' has no finite log density.*{told}"):
        infer(model, sgp.SVGP(3), (X, y), progress_bar=False)


@pytest.mark.slow
def test_a_rate_without_its_link_is_told():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(f), obs=y)

    with pytest.raises(ValueError, match=r"its rate is 0\. Take jnp\.exp\(f\)"):
        sgp.fit(model, sgp.SVGP(3), (X, np.full(N, 2)), progress_bar=False)


@pytest.mark.parametrize("infer", [sgp.fit, sgp.nested])
def test_supports_that_leave_observations_outside_are_refused(infer):
    """The bound is minus infinity, and quadrature would be of the nodes inside."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Uniform(f - 1.0, f + 1.0), obs=y)

    with pytest.raises(ValueError, match="support of observed site 'y' .Uniform. moves"):
        infer(model, sgp.SVGP(3), (X, np.zeros(N)), progress_bar=False)


@pytest.mark.slow
def test_supports_that_keep_them_inside_are_not():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Uniform(-jnp.exp(f) - 1.0, 1.0), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(3), (X, np.linspace(-0.9, 0.9, N)), progress_bar=False)
    assert np.isfinite(fitted.bound)


@pytest.mark.parametrize("link", ["none", "logistic"])
def test_probabilities_that_are_a_function_are_told(link):
    """NumPyro takes the nearest one: `fit` said "converged"."""

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        probs = f if link == "none" else jax.nn.sigmoid(f)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Binomial(3, probs=probs), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, np.ones(N))
    warns = pytest.warns(UserWarning, match="'y': the probs of BinomialProbs are outside")
    with warns if link == "none" else contextlib.nullcontext():
        check_support_stays(guide, (X, np.ones(N)), {})


def with_an_effect(X, y=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f + a, 0.3), obs=y)


def set_up(model):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, np.ones(N))
    return guide


def started(model):
    """A guide that is set up, and its parameters."""
    svi = svi_of(model)
    return svi.guide, svi.get_params(svi.init(KEY, X, np.ones(N)))


def test_random_numbers_that_are_no_site_are_told():
    """Drawn anew in each step; `check` named three other causes of the noise."""
    hidden = numpyro.handlers.block(with_an_effect, hide=["a"])
    with pytest.warns(UserWarning, match="no latent site of it.*learns nothing of them"):
        check_reach(*started(hidden), (X, np.ones(N)), {})
    check_reach(*started(with_an_effect), (X, np.ones(N)), {})


def a_parameter_by_key(X, y=None):
    """As NumPyro's modules of Flax make theirs: what is drawn counts once."""
    scale = numpyro.param("scale")
    if scale is None:
        start = 1.0 + jax.random.uniform(numpyro.prng_key())
        numpyro.param("scale", start)
        scale = start
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(scale * f, 0.3), obs=y)


def three_at_once(X, y=None):
    w = numpyro.sample("w", dist.Normal(), sample_shape=(3,))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f + w[2], 0.3), obs=y)


def outside_of_a_plate(X, y=None):
    rows = numpyro.plate("data", N, subsample_size=4)
    with rows as index:
        X, y = X[index], y[index]
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with rows:
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def a_walk(X, y=None):
    def step(before, _):
        now = numpyro.sample("walk", dist.Normal(before, 1.0))
        return now, now

    _, walk = scan(step, 0.0, jnp.arange(len(X)))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f + walk, 0.3), obs=y)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "model", [a_parameter_by_key, three_at_once, outside_of_a_plate, a_walk]
)
def test_parameters_latents_and_batches_are_no_such_numbers(model):
    check_reach(*started(model), (X, np.ones(N)), {})


def test_the_last_layer_counts():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.RBF(), f[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(0.0, 0.3), obs=y)

    with pytest.raises(ValueError, match="likelihood does not depend on any GP site"):
        check_reach(*started(model), (X, np.ones(N)), {})


def test_a_likelihood_without_f_is_refused():
    fixed = numpyro.handlers.do(with_an_effect, data={"f": np.zeros(N)})
    with pytest.raises(ValueError, match="likelihood does not depend on any GP site"):
        sgp.fit(fixed, sgp.SVGP(3), (X, np.ones(N)), progress_bar=False)


def test_the_axis_of_a_plate_that_is_left_free_is_told():
    def model(X, y=None):
        groups = numpyro.plate("groups", 3, dim=-2)
        with groups:
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with groups, numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    with pytest.raises(ValueError, match=r"Plates give 'f' the shape \(3, 1, 12\)"):
        sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, np.ones((3, N)))


def in_a_branch(X, y=None):
    def branch(_):
        return numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))

    f = cond(True, branch, branch, None)
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.parametrize(
    "use",
    [
        lambda: set_up(in_a_branch),
        lambda: log_density(seed(sgp.whiten(in_a_branch), 0), (X, np.ones(N)), {}, {}),
        lambda: sgp.GPPredictive(
            in_a_branch, {"f": np.zeros((1, N))}, train_args=(X, np.ones(N))
        )(KEY, X),
    ],
    ids=["guide", "whiten", "predictive"],
)
def test_functions_in_branches_are_refused(use):
    """The guide's values did not reach the likelihood, which saw draws of the prior."""
    with pytest.raises(ValueError, match=r"'f' is inside control_flow\.cond.*jnp\.where"):
        use()


# ---- what is of another kind ------------------------------------------------------------


def by_name(frame, y=None):
    age = frame["age"]
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), age[:, None]))
    with numpyro.plate("data", len(age)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def by_attribute(frame, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), frame.age[:, None]))
    with numpyro.plate("data", len(f)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


class ModelAsClass:
    """What is made by a call, and is no model."""


REFUSED = {
    "a key as noise": (
        lambda: sgp.MarginalGP(sgp.kernels.RBF(), X, KEY),
        TypeError,
        "MarginalGP: noise must be real numbers",
    ),
    "a key as a rate": (
        lambda: sgp.natural_gradients(svi_of().guide, KEY, optax.adam(0.1)),
        TypeError,
        "learning_rate must be real numbers",
    ),
    "a text as an expectation": (
        lambda: sgp.TraceGP_ELBO("quadrature"),
        TypeError,
        r"expectation must be a rule such as GaussHermite\(20\)",
    ),
    "a class as a model": (
        lambda: sgp.AutoSparseGP(ModelAsClass, sgp.SVGP(3)),
        TypeError,
        "model must be a NumPyro model",
    ),
    "draws that are no dict": (
        lambda: sgp.GPPredictive(gaussian_model, [1.0], train_args=(X, y)),
        TypeError,
        "posterior_samples must be a dict of draws by site",
    ),
    "too many starts": (
        lambda: sgp.fit(gaussian_model, sgp.SVGP(3), (X, y), restarts=10**6),
        ValueError,
        "restarts must be at most 1000",
    ),
    "an option of train": (
        lambda: sgp.fit(gaussian_model, sgp.SVGP(3), (X, y), validation=(X, y)),
        TypeError,
        "fit was given validation=.*options of sgp.train",
    ),
    "what others call steps": (
        lambda: sgp.fit(gaussian_model, sgp.SVGP(3), (X, y), num_steps=300),
        TypeError,
        "fit was given num_steps=.*How many steps it takes at most is steps=",
    ),
    "an option that is misspelt": (
        lambda: sgp.fit(gaussian_model, sgp.SVGP(3), (X, y), step=300),
        TypeError,
        r"fit was given step=.*arguments are X, y, .* Is steps=\.\.\. meant\?",
    ),
    "an option that nested has not": (
        lambda: sgp.nested(gaussian_model, sgp.SVGP(3), (X, y), steps=3),
        TypeError,
        "nested was given steps=.*whose arguments are X, y",
    ),
    "columns of a frame by name": (
        lambda: sgp.fit(by_name, sgp.SVGP(3), (pd.DataFrame({"age": X[:, 0]}), y)),
        ValueError,
        "part of an argument by its name.*pass a dict",
    ),
    "a column of a frame as its attribute": (
        lambda: sgp.fit(by_attribute, sgp.SVGP(3), (pd.DataFrame({"age": X[:, 0]}), y)),
        ValueError,
        "asks an array for something.*pass a dict",
    ),
    "a layer without a name": (
        lambda: sgp.layer(None, sgp.kernels.RBF(), X),
        TypeError,
        "A layer needs the name of its site",
    ),
    "a layer of text": (
        lambda: sgp.layer("h", sgp.kernels.RBF(), "abc"),
        TypeError,
        "Inputs of layer 'h' must be real numbers",
    ),
    "a layer of a kernel's class": (
        lambda: sgp.layer("h", sgp.kernels.RBF, X),
        TypeError,
        "Layer 'h': Not a kernel: the class RBF.*instance",
    ),
    "no points": (
        lambda: sgp.inducing.InducingVariables(np.zeros((0, 1))),
        ValueError,
        "there are no points",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_of_another_kind_is_refused_by_name(case):
    call, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        call()


def test_a_guide_that_is_none_is_refused(fitted):
    for call in (
        lambda: sgp.Predictor("guide", {}),
        lambda: sgp.log_predictive_density("guide", {}, X, y),
        lambda: sgp.predict("guide", {}, KEY, X),
    ):
        with pytest.raises(TypeError, match="guide must be an AutoSparseGP that is set up"):
            call()


def test_whole_numbers_that_jax_does_not_hold_are_told():
    guide = sgp.AutoSparseGP(without_index, sgp.SVGP(3))
    with pytest.raises(TypeError, match="observed site 'y' must be real numbers"):
        guide.setup(X, 10**30)
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="'y' is 1000000000000, which JAX does not"):
            guide.setup(X.astype("float32"), 10**12)


def test_whole_numbers_that_32_bits_do_not_hold_are_taken_as_real_ones():
    """Times in milliseconds, which JAX would wrap around without a word."""
    times = np.arange(12) * 86_400_000_000
    frame = pd.DataFrame({"t": times})
    with jax.enable_x64(False):
        for wide in (times[:, None], frame, frame["t"]):
            found = as_numbers(wide, "An argument")
            assert_allclose(found.ravel(), times)
            assert found.dtype == np.float64
        codes = np.arange(5)
        assert as_numbers(codes, "An argument") is codes
        (args, _) = as_plain_arrays(lambda X: None, (frame,), {})
        assert_allclose(args[0][:, 0], times)
    assert as_numbers(times, "An argument") is times


def test_whole_numbers_that_only_python_sees_may_be_large():
    def model(X, population, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f * (population / 8e30), 0.3), obs=y)

    sgp.AutoSparseGP(model, sgp.SVGP(3)).setup(X, 8 * 10**30, y)


def test_options_of_lbfgs_are_checked():
    svi = svi_of()
    with pytest.raises(TypeError, match="rng_key"):
        sgp.fit_lbfgs(svi, 3, X, y)
    with pytest.raises((TypeError, ValueError), match="tol must be"):
        sgp.fit_lbfgs(svi, KEY, X, y, tol=KEY)


def test_inputs_of_three_axes_are_told_with_their_shapes():
    guide = sgp.AutoSparseGP(without_index, sgp.SVGP(3))
    with pytest.raises(ValueError, match=r"argument 1 has \(2, 3, 4\)"):
        guide.setup(np.zeros((2, 3, 4)), None)


def test_chunks_longer_than_the_training_cost_nothing():
    data, options = (jnp.asarray(X), jnp.asarray(y)), {"progress_bar": False}
    result = sgp.train(svi_of(), KEY, data, 3, batch_size=N, chunk=10**9, **options)
    assert result.losses.shape == (3,)

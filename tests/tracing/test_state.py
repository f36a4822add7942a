"""What a model computes now, and predictions that follow it."""

import contextlib
import functools
import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import numpyro_sgp as sgp
from numpyro_sgp._programs import split_static
from numpyro_sgp.tracing.state import Epochs, States, running, state_of

X = np.linspace(0.0, 3.0, 8)[:, None]
Y = np.zeros(8)
SHIFT = 0.0


def model_of(link, kernel=None):
    """A regression whose mean is a function of f."""

    def model(X, y=None):
        k = sgp.kernels.RBF() if kernel is None else kernel()
        f = numpyro.sample("f", sgp.GaussianProcess(k, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(link(f), 0.5), obs=y)

    return model


class Slots:
    __slots__ = ("__hidden",)

    def __init__(self):
        self.__hidden = 0.0

    def set(self, value):
        self.__hidden = value

    def __radd__(self, f):
        return f + self.__hidden


def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


class Reader:
    level = 0.0

    def __init__(self):
        self.own = 0.0

    @logged
    def __call__(self, f):
        return f + self.own + Reader.level

    def __matmul__(self, f):
        return f + SHIFT

    @property
    def doubled(self):
        return 2.0 * self.__dict__["own"]


def changes():
    """By name a function of f, and what changes what it reads by one."""
    box, array, queue = SimpleNamespace(level=0.0), np.zeros(3), [0.0]
    frame = pd.DataFrame({"a": [0.0, 1.0]}, index=["here", "there"])
    series, reader, slots = pd.Series({"a": 0.0, "b": 1.0}), Reader(), Slots()
    big = np.zeros(20_000)

    @contextlib.contextmanager
    def shifted(f):
        yield f + box.level

    def by_context(f):
        with shifted(f) as found:
            return found

    def by_class(f):
        class Mean:
            def __init__(self):
                self.level = box.level

        return f + Mean().level

    def swapped():
        series.index = ["b", "a"]

    return {
        "an attribute": (lambda f: f + box.level, lambda: setattr(box, "level", 1.0)),
        "an entry of an array": (lambda f: f + array[1], lambda: array.__setitem__(1, 1.0)),
        "a large array": (lambda f: f + big[-1], lambda: big.__setitem__(-1, 1.0)),
        "a list": (lambda f: f + queue[0], lambda: queue.__setitem__(0, 1.0)),
        "a frame": (
            lambda f: f + frame.loc["here", "a"],
            lambda: frame.isetitem(0, [1.0, 1.0]),
        ),
        "labels": (lambda f: f + series["a"], swapped),
        "a wrapped call": (reader.__call__, lambda: setattr(reader, "own", 1.0)),
        "a property": (lambda f: f + reader.doubled, lambda: setattr(reader, "own", 0.5)),
        "a hidden slot": (lambda f: f + slots, lambda: slots.set(1.0)),
        "a mapped function": (
            jax.vmap(lambda f: f + box.level),
            lambda: setattr(box, "level", 1.0),
        ),
        "a context": (by_context, lambda: setattr(box, "level", 1.0)),
        "a class made in it": (by_class, lambda: setattr(box, "level", 1.0)),
    }


@pytest.mark.parametrize("name", changes())
def test_what_is_read_is_seen_to_change(name):
    link, change = changes()[name]
    model = model_of(link)
    before = state_of(model, (X, Y), {})
    assert isinstance(before, bytes)
    assert state_of(model, (X, Y), {}) == before
    change()
    assert state_of(model, (X, Y), {}) != before


def test_globals_operators_and_modules(monkeypatch, tmp_path):
    (tmp_path / "settings_of_a_user.py").write_text("scale, calls = 1.0, 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    reader = Reader()

    def imported(f):
        from settings_of_a_user import scale

        return f * scale

    models = [model_of(lambda f: f + SHIFT), model_of(lambda f: reader @ f)]
    models += [model_of(imported)]
    states = [state_of(model, (X, Y), {}) for model in models]
    settings = sys.modules["settings_of_a_user"]
    settings.calls = 1  # which nothing reads
    assert [state_of(model, (X, Y), {}) for model in models] == states
    settings.scale = 2.0
    monkeypatch.setitem(globals(), "SHIFT", 1.0)
    now = [state_of(model, (X, Y), {}) for model in models]
    assert all(new != old for new, old in zip(now, states, strict=True))
    monkeypatch.undo()
    assert state_of(models[0], (X, Y), {}) == states[0]


def test_kernels_means_priors_likelihoods_and_sizes_are_looked_at():
    level = SimpleNamespace(value=1.0)

    class Linear(dist.Normal):
        def log_prob(self, value, intermediates=None):
            return super().log_prob(value * level.value)

    class Product(sgp.kernels.RBF):
        def __call__(self, X, Z=None):
            return super().__call__(X, Z) * level.value

    def prior(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(level.value, 1.0))
        kernel = sgp.kernels.RBF(1.0, lengthscale)
        numpyro.sample("f", sgp.GaussianProcess(kernel, X))

    def mean(X, y=None):
        gp = sgp.GaussianProcess(sgp.kernels.RBF(), X, lambda X: level.value * X[:, 0])
        numpyro.sample("f", gp)

    def response(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", Linear(f, 1.0), obs=y)

    def robust(X, y=None):
        gp = sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([3])
        f = numpyro.sample("f", gp)
        nodes = int(50 * level.value)
        likelihood = sgp.likelihoods.RobustMax(f, num_points=nodes)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood, obs=y)

    models = [prior, mean, response, robust, model_of(lambda f: f, Product)]
    before = [state_of(model, (X, np.zeros(8, int)), {}) for model in models]
    assert before == [state_of(model, (X, np.zeros(8, int)), {}) for model in models]
    level.value = 2.0
    after = [state_of(model, (X, np.zeros(8, int)), {}) for model in models]
    assert [old == new for old, new in zip(before, after, strict=True)] == 5 * [False]


def test_an_epoch_ends_where_the_model_changes_whatever_the_shapes():
    level = SimpleNamespace(value=0.0)

    def model(X, y=None):
        shift = level.value if len(X) > 5 else 0.0  # which few rows do not tell
        numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X + shift))

    epochs, static = Epochs(), split_static(((X,), {}))[1]

    def at(n):
        return epochs.at(States(model), [np.zeros((n, 1))], static)

    first = at(8)
    assert at(6) is first and at(3) is first and at(8) is first
    level.value = 1.0
    assert at(3) is first  # computes what it did
    second = at(8)
    assert second is not first
    assert at(6) is second and at(3) is second


def test_an_epoch_of_what_cannot_be_traced_is_its_own():
    def model(X, W, y=None):
        b = numpyro.sample("b", dist.Normal().expand([2]).to_event(1))
        numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X + (W @ b)[:, None]))

    epochs, states = Epochs(), States(model)
    wrong, few, many = (
        [np.zeros((n, 1)), np.zeros((n, d))] for n, d in ((5, 3), (5, 2), (9, 2))
    )
    static = split_static(((0.0, 0.0), {}))[1]
    static = static[0], (None, None)
    found = epochs.at(states, few, static)
    assert epochs.at(states, wrong, static) is not found
    assert epochs.at(states, many, static) is found


def test_models_that_ask_for_their_data_are_equal_to_nothing():
    def model(X, group, y=None):
        numpyro.sample("b", dist.Normal().expand([int(group.max()) + 1]))

    given = X, jnp.zeros(8, int)
    assert state_of(model, given, {}) != state_of(model, given, {})
    arrays, static = split_static((given, {}))
    with running(model) as outer, running(model) as inner:
        assert outer(arrays, static) is inner(arrays, static)


def test_methods_of_one_object_have_states_of_their_own():
    class Pair:
        def first(self, X, y=None):
            model_of(lambda f: f)(X, y)

        def second(self, X, y=None):
            model_of(lambda f: 2.0 * f)(X, y)

    pair, given = Pair(), split_static(((X, Y), {}))
    with running(pair.first) as first, running(pair.second) as second:
        assert first(*given) != second(*given)
        with running(pair.first) as again:
            assert again is first


def test_what_is_called_back_is_looked_at():
    box = SimpleNamespace(level=0.0)

    def link(f, level):
        shape = jax.ShapeDtypeStruct(f.shape, f.dtype)
        return f + jax.pure_callback(lambda f: np.full(f.shape, level), shape, f)

    model = model_of(lambda f: link(f, box.level))
    before = state_of(model, (X, Y), {})
    assert isinstance(before, bytes) and state_of(model, (X, Y), {}) == before
    box.level = 1.0
    assert state_of(model, (X, Y), {}) != before


def test_functions_of_other_names_are_other_callbacks():
    def model_by(function):
        def link(f):
            shape = jax.ShapeDtypeStruct(f.shape, f.dtype)
            return f + jax.pure_callback(function, shape, f)

        return model_of(link)

    functions = [eval(f"lambda f: np.{name}(f)", {"np": np}) for name in ("sin", "cos")]
    one, other = (state_of(model_by(fn), (X, Y), {}) for fn in functions)
    assert isinstance(one, bytes) and one != other


def test_functions_of_other_libraries_are_no_options():
    def model_by(function):
        def model(X, y=None):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", sgp.BlackBox(function, f), obs=y)

        return model

    wide = np.vectorize(lambda y, f: -0.5 * (y - f) ** 2)
    narrow = np.vectorize(lambda y, f: -5.0 * (y - f) ** 2)
    found = [state_of(model_by(fn), (X, Y), {}) for fn in (wide, narrow)]
    found += [state_of(model_by(fn), (X, Y), {}) for fn in (jnp.add, jnp.hypot)]
    assert len(set(found)) == 4


def test_responses_that_cannot_be_drawn_in_a_program_are_no_obstacle():
    def model(X, n, y=None):
        gp = sgp.GaussianProcess(sgp.kernels.RBF(), X).expand([3])
        f = numpyro.sample("f", gp)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Multinomial(n, logits=f.T), obs=y)

    given = X, np.full(8, 4)
    assert isinstance(state_of(model, given, {}), bytes)


def guide_of(model, points=3):
    guide = sgp.AutoSparseGP(model, sgp.SVGP(points))
    guide.setup(X, Y)
    params = guide.known().starts
    params["f_auto_qu_mu"] = jnp.linspace(1.0, -1.0, points)
    return guide, params


@pytest.mark.slow
def test_predictions_and_scores_follow_what_a_model_reads(monkeypatch):
    guide, params = guide_of(model_of(lambda f: f + SHIFT))

    def told():
        mean = sgp.predict(guide, params, X, quantiles=())["y"].mean
        return mean, sgp.log_predictive_density(guide, params, X, mean)["y"]

    mean, density = told()
    monkeypatch.setitem(globals(), "SHIFT", 1.0)
    new_mean, new_density = told()
    assert_allclose(new_mean, mean + 1.0, rtol=1e-12)
    assert_allclose(new_density, density, rtol=1e-6)


@pytest.mark.slow
def test_objects_among_the_arguments_are_looked_at():
    def model(X, y=None, config=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + config.level, 0.5), obs=y)

    class Config:
        level = 0.0

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    config = Config()
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, Y, config=config)
    params = guide.known().starts
    before = sgp.predict(guide, params, X, quantiles=(), config=config)["y"].mean
    config.level = 2.0
    found = sgp.predict(guide, params, X, quantiles=(), config=config)["y"].mean
    assert_allclose(found, before + 2.0)
    other = Config()
    found = sgp.predict(guide, params, X, quantiles=(), config=other)["y"].mean
    assert_allclose(found, before)


def test_a_predictor_is_of_one_model(monkeypatch):
    """As it was; where that is no longer to be had, it says so."""
    monkeypatch.setitem(globals(), "SHIFT", 0.8)
    guide, params = guide_of(model_of(lambda f: f, lambda: sgp.kernels.RBF(1.0, SHIFT)))
    predictor = sgp.Predictor(guide, params)
    before = predictor(X)["f"]
    predictor(X[:2])
    monkeypatch.setitem(globals(), "SHIFT", 0.4)
    found = predictor(X)["f"]
    assert_array_equal(found.mean, before.mean)
    assert_array_equal(found.variance, before.variance)
    for other in (predictor, jax.jit(predictor), jax.vmap(predictor)):
        with pytest.raises(ValueError, match="Make another predictor"):
            other(X[None, :4] if other is not predictor else X[:4])
    found, q = sgp.Predictor(guide, params)(X[:4])["f"], guide.posterior(params, X[:4])["f"]
    assert_allclose(found.mean, q.mean, rtol=1e-6)
    assert_allclose(found.variance, q.variance, rtol=1e-6)
    monkeypatch.setitem(globals(), "SHIFT", 0.8)
    assert_allclose(predictor(X[:4])["f"].mean, before.mean[:4], rtol=1e-6)


def guide_that_counts_runs():
    """With its parameters, and a list that is longer by one after each run of its model."""
    runs = []

    def link(f):
        runs.append(f.shape)
        return f

    return *guide_of(model_of(link)), runs


def test_a_predictor_does_not_run_the_model_again(count_compiled):
    guide, params, runs = guide_that_counts_runs()
    predictor = sgp.Predictor(guide, params, batch_size=200)
    many = np.linspace(0.0, 1.0, 500)[:, None]
    for rows in (X, many):
        predictor(rows)
    count_compiled(), runs.clear()
    for rows in (X, many):
        predictor(rows + 0.1)
    assert not runs and count_compiled() == 0


def test_nothing_is_traced_again_where_nothing_changed(count_compiled):
    """But the model itself, once for each call."""
    guide, params, runs = guide_that_counts_runs()
    sgp.predict(guide, params, X)
    count_compiled(), runs.clear()
    sgp.predict(guide, params, X + 1.0)
    assert len(runs) == 1 and count_compiled() == 0


@pytest.mark.slow
def test_a_check_is_not_of_two_models(monkeypatch):
    monkeypatch.setitem(globals(), "SHIFT", 0.0)

    def model(X, y=None):
        prior = dist.LogNormal(SHIFT, 0.3)
        lengthscale = numpyro.sample("lengthscale", prior)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(3), (X, Y), progress_bar=False)
    monkeypatch.setitem(globals(), "SHIFT", 3.0)
    with pytest.warns(UserWarning, match="computes something else than when it was fitted"):
        found = fitted.check()
    assert found.causes["other parameters"].nats > 1.0


@pytest.mark.filterwarnings("ignore:The inputs of GP site")
@pytest.mark.slow
def test_rows_are_apart_or_not_by_the_numbers_of_each_call():
    """A largest value that does not count for some, and does for others."""

    def model(X, y=None):
        inputs = X / jnp.maximum(1.0, jnp.abs(X).max())
        model_of(lambda f: f)(inputs, y)

    guide, params = guide_of(model)
    small, large = (
        np.linspace(-1.0, 1.0, 600)[:, None],
        np.linspace(-1.0, 4.0, 900)[:, None],
    )
    for rows in (small, large):
        options = {"quantiles": (), "batch_size": 200}
        found = sgp.predict(guide, params, rows, **options)["f"].mean
        assert_allclose(found, guide.posterior(params, rows)["f"].mean, rtol=1e-5)
        found = sgp.Predictor(guide, params, batch_size=200)(rows)["f"].mean
        assert_allclose(found, guide.posterior(params, rows)["f"].mean, rtol=1e-5)


class Plain:
    """A kernel that is no pytree."""

    def __init__(self, lengthscale):
        self.lengthscale = lengthscale

    def __call__(self, X1, X2):
        return jnp.exp(-0.5 * jnp.sum((X1[:, None] - X2) ** 2, -1) / self.lengthscale**2)

    def diag(self, X):
        return jnp.ones(len(X), X.dtype)


def own_kernel(X, y=None):
    kernel = Plain(jnp.mean(jnp.abs(X - X.mean())))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)


def neighbours(X, y=None):
    """Of more rows than are looked at by themselves."""
    far = -jax.lax.top_k(-jnp.abs(X - X.T), 20)[0][:, -1:]
    model_of(lambda f: f, lambda: sgp.kernels.RBF(1.0, 0.8))(X + far, y)


def largest_norm(X, y=None):
    model_of(lambda f: f)(X / jnp.max(jnp.linalg.norm(X, axis=1)), y)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [own_kernel, neighbours, largest_norm])
@pytest.mark.filterwarnings("ignore:The inputs of GP site 'f' at almost all rows change")
@pytest.mark.parametrize("batch_size", [50, 10_000])
def test_rows_of_these_are_not_apart(model, batch_size):
    rows = np.sort(np.random.default_rng(0).normal(size=(200, 1)), axis=0)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(rows[:40], np.zeros(40))
    params = guide.known().starts
    params["f_auto_qu_mu"] = jnp.linspace(1.0, -1.0, 3)
    expected = guide.posterior(params, rows)["f"].mean
    found = sgp.predict(guide, params, rows, quantiles=(), batch_size=batch_size)
    assert_allclose(found["f"].mean, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_what_is_read_at_some_numbers_of_rows_is_seen():
    box, big = SimpleNamespace(level=0.0), np.zeros(100)

    def model(X, y=None):
        shift = box.level if X.shape[0] < 8 else big[: X.shape[0]]
        model_of(lambda f: f + shift)(X, y)

    guide, params = guide_of(model)
    few, many = X[:5], np.linspace(0.0, 3.0, 30)[:, None]

    def means():
        found = (sgp.predict(guide, params, rows, quantiles=()) for rows in (many, few))
        return [np.asarray(p["y"].mean) for p in found]

    before = means()
    box.level = big[20:] = 1.0
    for old, new, rows in zip(before, means(), (many, few), strict=True):
        is_moved = np.arange(len(rows)) >= (20 if len(rows) == 30 else 0)
        assert_allclose(new, old + is_moved, rtol=1e-6)


@pytest.mark.slow
def test_a_mistaken_call_does_not_make_later_ones_slow(count_compiled):
    runs = []

    def model(X, y=None):
        runs.append(X.shape)
        scales = numpyro.sample("scales", dist.LogNormal().expand([2]).to_event(1))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, scales), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    inputs = np.random.default_rng(0).normal(size=(8, 2))
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(inputs, Y)
    params = guide.known().starts
    with pytest.raises(ValueError):
        sgp.predict(guide, params, np.ones((8, 3)))
    sgp.predict(guide, params, inputs)
    count_compiled(), runs.clear()
    sgp.predict(guide, params, inputs)
    assert runs == [(8, 2)] and count_compiled() == 0


def test_predictors_of_several_threads():
    guides = [guide_of(model_of(lambda f, i=i: f + i)) for i in range(3)]
    predictors = [sgp.Predictor(guide, params) for guide, params in guides]
    wanted = [guide.posterior(params, X)["f"].mean for guide, params in guides]
    found, errors = {}, []

    def run(i):
        try:
            found[i] = predictors[i](X)["f"].mean
        except BaseException as error:  # of another thread's control flow too
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for i, mean in enumerate(wanted):
        assert_allclose(found[i], mean, rtol=1e-6)


def test_what_is_run_without_jit_is_compiled_all_the_same():
    with jax.disable_jit():
        guide, params = guide_of(model_of(lambda f: f))
        found = sgp.predict(guide, params, X, quantiles=())
    assert found["y"].mean.shape == (8,)


@pytest.mark.slow
def test_a_model_that_holds_its_fit_is_freed():
    class Own:
        def __init__(self):
            self.kept = {}

        def __call__(self, X, y=None):
            self.kept.get("scale")
            model_of(lambda f: f)(X, y)

    own = Own()
    fitted = sgp.fit(own, sgp.SVGP(3), (X, Y), steps=3, progress_bar=False)
    own.kept["fit"] = fitted
    fitted.predict(X[:1])
    guide = weakref.ref(fitted.guide)
    del fitted, own
    gc.collect()
    assert guide() is None


@pytest.mark.slow
def test_batches_of_rows_follow_what_a_model_reads(monkeypatch):
    """Whether rows are apart was remembered from before."""

    def standardised(X, y=None):
        inputs = (X - X.mean(0)) / X.std(0) if SHIFT else X
        model_of(lambda f: f)(inputs, y)

    guide, params = guide_of(standardised)
    rows = np.linspace(0.0, 3.0, 600)[:, None]

    def mean(**options):
        found = sgp.predict(guide, params, rows, quantiles=(), **options)
        return np.asarray(found["f"].mean)

    first = mean(batch_size=200)
    monkeypatch.setitem(globals(), "SHIFT", 1.0)
    found = mean(batch_size=200)
    assert_allclose(found, mean(batch_size=600), rtol=1e-6)
    assert np.abs(found - first).max() > 0.1

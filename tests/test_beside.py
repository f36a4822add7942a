"""What functions read beside their arguments."""

import functools
import gc
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp._beside import read_beside, running

SHIFT = 0.0
WEIGHTS = np.ones(3)
TABLE = {"a": [1.0, 2.0], "kernel": sgp.kernels.RBF(1.0, 0.8)}
STATE = SimpleNamespace(number=1, key=jax.random.key(0))


def helper(f):
    return f + SHIFT


def reads_all(x, scale=2.0):
    def inner():
        return WEIGHTS[0] * TABLE["a"][0] + STATE.number

    return helper(x) * scale + inner()


CHANGES = {
    "SHIFT": 1.0,  # by a function that it calls
    "WEIGHTS": np.array([1.0, 1.0, 2.0]),
    "TABLE": TABLE | {"kernel": sgp.kernels.RBF(1.0, 0.9)},
    "STATE": SimpleNamespace(number=1, key=jax.random.key(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_read_is_seen_to_change(name, monkeypatch):
    before = read_beside(reads_all)
    assert read_beside(reads_all) == before and hash(before)
    monkeypatch.setitem(globals(), name, CHANGES[name])
    assert read_beside(reads_all) != before
    monkeypatch.undo()
    assert read_beside(reads_all) == before


def test_closures_attributes_and_arguments_that_are_given():
    number = 1.0

    def closure():
        return number

    class Model:
        level = 1.0

        def __init__(self):
            self.number, self.itself, self.log = 1.0, self, []

        def __call__(self):
            return self.shifted() + self.level

        def shifted(self):
            return self.number + SHIFT

    model = Model()
    for fn in (closure, model, model.__call__, functools.partial(closure)):
        assert read_beside(fn) == read_beside(fn)
    first, object_, method = map(read_beside, (closure, model, model.__call__))
    number = model.number = 2.0
    assert read_beside(closure) != first
    assert read_beside(model) != object_ and read_beside(model.__call__) != method
    first = [read_beside(fn) for fn in (model, model.__call__)]
    model.log.append(1)  # which it does not read
    assert [read_beside(fn) for fn in (model, model.__call__)] == first
    Model.level = 2.0
    pairs = zip((model, model.__call__), first, strict=True)
    assert all(read_beside(fn) != old for fn, old in pairs)
    given = [read_beside(functools.partial(reads_all, scale=scale)) for scale in (1.0, 2.0)]
    assert given[0] != given[1]


@pytest.mark.parametrize("name", ["act", "defaults", "slots"])
def test_other_things_that_are_read(name, monkeypatch):
    class Slots:
        __slots__ = ("number",)

    slots = Slots()
    slots.number = 1.0
    first = {"act": functools.partial(max, 1.0), "defaults": 1.0, "slots": slots}
    for key, value in first.items():
        monkeypatch.setitem(globals(), key, value)

    def fn(x):
        return act(x) + defaults + slots.number  # noqa: F821

    before = read_beside(fn)
    assert read_beside(fn) == before
    if name == "slots":
        slots.number = 2.0
    else:
        new = {"act": functools.partial(max, 2.0), "defaults": 2.0}[name]
        monkeypatch.setitem(globals(), name, new)
    assert read_beside(fn) != before


def test_deep_containers_large_arrays_and_those_that_are_gone(monkeypatch):
    config = {"kernel": {"prior": {"scales": [{"w": np.ones(3)}]}}}
    large, gone = np.ones(20_000), jnp.ones(3)
    config["itself"] = config

    def fn():
        return config, large, gone

    before = read_beside(fn)
    assert read_beside(fn) == before
    gone.delete()
    assert read_beside(fn) != before
    before = read_beside(fn)
    config["kernel"]["prior"]["scales"][0]["w"] = np.zeros(3)
    assert read_beside(fn) != before
    before = read_beside(fn)
    for _ in range(60):  # which may have the place of those before
        large = np.ones(20_000)
        assert read_beside(fn) != before


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(helper(f), 0.5), obs=y)


def test_predictions_and_scores_follow_what_a_model_reads(monkeypatch):
    X, y = jnp.linspace(0.0, 3.0, 8)[:, None], jnp.zeros(8)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    guide.setup(X, y)
    params = guide.known().starts

    def told():
        mean = sgp.predict(guide, params, X, quantiles=())["y"].mean
        return mean, sgp.log_predictive_density(guide, params, X, y)["y"]

    mean, density = told()
    monkeypatch.setitem(globals(), "SHIFT", 1.0)
    new_mean, new_density = told()
    np.testing.assert_allclose(new_mean, mean + 1.0, rtol=1e-12)
    # Of N(0, 1 + 0.25) at one for zero.
    np.testing.assert_allclose(new_density, density - 0.5 / 1.25, rtol=1e-5)


def test_what_is_run_without_jit_is_compiled_all_the_same():
    X, y = np.linspace(0.0, 3.0, 8)[:, None], np.zeros(8)
    with jax.disable_jit():
        guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
        guide.setup(X, y)
        found = sgp.predict(guide, guide.known().starts, X, quantiles=())
    assert found["y"].mean.shape == (8,)


class Config:
    scale, other = 1.0, 1.0

    def value(self):
        return SHIFT + TABLE["a"][0]

    @classmethod
    def of_class(cls):
        return cls.scale

    @staticmethod
    def static():
        return SHIFT

    def __getitem__(self, name):
        return getattr(self, name)


class Derived(Config):
    def __init__(self):
        self.own = self.number = 1.0

    def __call__(self, x):
        return super().value() + outside(self)

    @property
    def doubled(self):
        return 2.0 * SHIFT


def outside(derived):
    return derived.number


OBJECT = Derived()
READERS = {
    "a class": lambda x: Config.scale,
    "a class by its object": lambda x: OBJECT.scale,
    "a class method": lambda x: OBJECT.of_class(),
    "a static method": lambda x: OBJECT.static(),
    "a method": lambda x: OBJECT.value(),
    "a property": lambda x: OBJECT.doubled,
    "an object that is called": lambda x: OBJECT(x),
    "an entry": lambda x: OBJECT["scale"],
}


@pytest.mark.parametrize("name", READERS)
def test_classes_and_what_methods_of_objects_read(name, monkeypatch):
    of_class = name in ("a class", "a class by its object", "a class method", "an entry")
    fn = READERS[name]
    before = read_beside(fn)
    assert read_beside(fn) == before
    if of_class:
        monkeypatch.setattr(Config, "scale", 2.0)
    else:
        monkeypatch.setitem(globals(), "SHIFT", 2.0)
    assert read_beside(fn) != before
    monkeypatch.undo()
    assert read_beside(fn) == before
    monkeypatch.setitem(globals(), "Config", type("Config", (), {"scale": 1.0}))
    assert (read_beside(fn) != before) is (name == "a class")


def test_an_object_that_is_handed_on_is_looked_at_as_a_whole():
    model = Derived()
    before = read_beside(model)
    model.number = 2.0  # which `outside` reads
    assert read_beside(model) != before


def test_modules_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "settings_of_a_user.py").write_text("scale, calls = 1.0, 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import settings_of_a_user as settings

    def fn(x):
        return settings.scale * np.pi

    before = read_beside(fn)
    settings.calls = 1  # which it does not name
    assert read_beside(fn) == before
    settings.scale = 2.0
    assert read_beside(fn) != before


def test_methods_of_one_object_have_states_of_their_own():
    class Pair:
        def __init__(self):
            self.one, self.other, self.calls = 1.0, 1.0, []

        def first(self, x):
            return self.one * len(self.calls)

        def second(self, x):
            return self.other

    pair = Pair()
    with running(pair.first) as first, running(pair.second) as second:
        assert first != second
        pair.calls.append(1)  # as a run of the model may
        with running(pair.first) as inner:
            assert inner == first
    with running(pair.first) as again:
        assert again == first
    pair.other = 2.0
    with running(pair.first) as same, running(pair.second) as changed:
        assert same == first and changed != second


def test_one_name_does_not_hide_what_others_stand_for():
    table = [[i, str(i)] for i in range(3_000)]
    zoom = {"scale": 1.0}

    def fn(x):
        return len(table) * zoom["scale"]

    before = read_beside(fn)
    assert read_beside(fn) == before
    zoom["scale"] = 2.0
    assert read_beside(fn) != before


def test_columns_masks_queues_and_functions_with_attributes():
    import collections

    import pandas as pd

    frame = pd.DataFrame({"s": [1.0, 2.0], "name": ["a", "b"]})
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    queue = collections.deque([1.0])

    class Log(list):
        scale = 1.0

    log = Log()

    def attributed():
        return attributed.scale

    attributed.scale = 1.0

    def fn(x):
        return frame["s"], masked, queue, log.scale, attributed()

    def changes():
        frame["s"] = [1.0, 3.0]
        yield
        masked.mask = [True, True]
        yield
        queue.append(2.0)
        yield
        log.scale = 2.0
        yield
        attributed.scale = 2.0
        yield

    before = read_beside(fn)
    frame["s"].mean()  # which pandas may keep
    assert read_beside(fn) == before
    for _ in changes():
        after = read_beside(fn)
        assert after != before and read_beside(fn) == after
        before = after


def test_long_chains_end():
    chain = None
    for _ in range(600):
        chain = SimpleNamespace(number=1.0, next=chain)

    def fn(x):
        return chain.number

    before = read_beside(fn)
    assert read_beside(fn) == before
    chain.next.number = 2.0
    assert read_beside(fn) != before


def test_a_model_that_holds_its_fit_is_freed():
    class Own:
        def __init__(self):
            self.kept = {}

        def __call__(self, X, y=None):
            self.kept.get("scale")
            model(X, y)

    own = Own()
    X, y = np.linspace(0.0, 3.0, 8)[:, None], np.zeros(8)
    fitted = sgp.fit(own, sgp.SVGP(3), (X, y), steps=3, progress_bar=False)
    own.kept["fit"] = fitted
    fitted.predict(X[:1])
    guide = weakref.ref(fitted.guide)
    del fitted, own
    gc.collect()
    assert guide() is None


def test_batches_of_rows_follow_what_a_model_reads(monkeypatch):
    """Whether rows are apart was remembered from before."""

    def standardised(X, y=None):
        inputs = (X - X.mean(0)) / X.std(0) if SHIFT else X
        model(inputs, y)

    X, y = jnp.linspace(0.0, 3.0, 8)[:, None], jnp.zeros(8)
    guide = sgp.AutoSparseGP(standardised, sgp.SVGP(3))
    guide.setup(X, y)
    params = guide.known().starts
    params["f_auto_qu_mu"] = jnp.array([1.0, -1.0, 0.5])
    rows = np.linspace(0.0, 3.0, 600)[:, None]

    def mean(**options):
        found = sgp.predict(guide, params, rows, quantiles=(), **options)
        return np.asarray(found["f"].mean)

    first = mean(batch_size=200)
    monkeypatch.setitem(globals(), "SHIFT", 1.0)
    found = mean(batch_size=200)
    np.testing.assert_allclose(found, mean(batch_size=600), rtol=1e-6)
    assert np.abs(found - first).max() > 0.1

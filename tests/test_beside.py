"""What functions read beside their arguments."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp._beside import read_beside

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

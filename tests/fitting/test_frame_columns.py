"""Frames that are taken for matrices, whose columns have names."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpy.testing import assert_array_equal

import numpyro_sgp as sgp
from numpyro_sgp.distributions.arguments import columns_in
from numpyro_sgp.fitting.problem import as_plain_arrays
from tests.helpers import slow

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(RNG.uniform(0.0, 4.0, (20, 2)), columns=["a", "b"])
Y = pd.Series(np.sin(FRAME.a) + FRAME.b)


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(4.0, 2.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def by_name(X, y=None):
    model(X[["a", "b"]], y)


@pytest.fixture(scope="module", params=["fit", slow("nested")])
def results(request, tmp_path_factory):
    """A result, and the same from a file."""
    options = {"steps": 5} if request.param == "fit" else {}
    run, path = getattr(sgp, request.param), tmp_path_factory.mktemp("saved") / "fit.npz"
    found = run(model, sgp.SVGP(4), (FRAME, Y), progress_bar=False, **options)
    found.save(path)
    return found, sgp.load(path, model)


@pytest.mark.slow
def test_columns_in_another_order_are_refused(results):
    """They were taken by place, without a word."""
    swapped = FRAME[["b", "a"]]
    for result in results:
        for call in (result.posterior, result.predict, result.median):
            with pytest.raises(ValueError, match=r"'X' has the columns b, a, where it had"):
                call(swapped[:3])
        with pytest.raises(ValueError, match=r"Give X\[\['a', 'b'\]\]"):
            result.log_score(swapped, Y)
        with pytest.raises(ValueError, match="has the columns a, c, where it had a, b"):
            result.posterior(FRAME.rename(columns={"b": "c"}))


@pytest.mark.slow
def test_rows_in_another_order_are_refused(results):
    """They were paired by place: a noise ten times too large, without a word."""
    other = Y.sample(frac=1.0, random_state=0)
    told = r"the same labels of rows in another order.*y.loc\[X.index\] if labels"
    with pytest.raises(ValueError, match=told):
        sgp.fit(model, sgp.SVGP(4), (FRAME, other), steps=1, progress_bar=False)
    for result in results:
        with pytest.raises(ValueError, match=told):
            result.log_score(FRAME, other)
        pairs = pd.MultiIndex.from_product([range(4), range(5)])
        for labels in (range(100, 120), pairs):  # which say nothing of X
            renamed = other.set_axis(labels)
            assert np.isfinite(result.log_score(FRAME, renamed)["y"].mean)


@pytest.mark.quick(1)
def test_another_number_of_columns_is_told_with_that_of_the_inputs(results):
    for result in results:
        for call in (result.posterior, result.predict):
            with pytest.raises(ValueError, match=r"'X' has the shape \(3, 1\).*2 columns"):
                call(FRAME.to_numpy()[:3, :1])
            with pytest.raises(ValueError, match=r"one row as X\[None\]"):
                call(FRAME.to_numpy()[0])


@pytest.mark.slow
def test_a_model_may_shape_its_inputs_itself():
    def shaped(x, y=None):
        model(jnp.reshape(x, (-1, 1)), y)

    x = np.linspace(0.0, 3.0, 9)
    data = x[:, None], np.sin(x)
    fitted = sgp.fit(shaped, sgp.SVGP(4), data, steps=3, progress_bar=False)
    assert fitted.predict(x[:3])["f"].mean.shape == (3,)


def test_others_are_matrices(results):
    for result in results:
        expected = result.posterior(FRAME.to_numpy())["f"].mean
        for same in (FRAME, pd.DataFrame(FRAME.to_numpy())):
            assert_array_equal(result.posterior(same)["f"].mean, expected)


def test_a_model_that_reads_names_may_have_them_anywhere():
    guide = sgp.AutoSparseGP(by_name, sgp.SVGP(4))
    guide.setup(FRAME, Y)
    fitted = sgp.Fitted(guide, guide.known().starts, (FRAME, Y))
    expected = fitted.posterior(FRAME)["f"].variance
    assert_array_equal(fitted.posterior(FRAME[["b", "a"]])["f"].variance, expected)


def test_copies_of_a_result_know_them_too(results):
    leaves = jax.tree.leaves(results[0].args)
    assert [columns_in(leaf) for leaf in leaves] == [("a", "b"), ()]
    assert not any(hasattr(leaf, "columns") for leaf in leaves)  # by which frames are told


def test_frames_in_containers_and_without_names():
    def of_dict(d, y=None):
        model(d["X"], y)

    def fitted(model, X):
        guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
        args, _ = as_plain_arrays(model, (X, Y), {})
        guide.setup(*args)
        return sgp.Fitted(guide, guide.known().starts, args)

    with pytest.raises(ValueError, match=r"Argument 'd\['X'\]' has the columns b, a"):
        fitted(of_dict, {"X": FRAME}).posterior({"X": FRAME[["b", "a"]]})
    plain = pd.DataFrame(FRAME.to_numpy())
    with pytest.raises(ValueError, match=r"Give X\[\[0, 1\]\], or X.to_numpy\(\)"):
        fitted(model, plain).posterior(plain[[1, 0]])

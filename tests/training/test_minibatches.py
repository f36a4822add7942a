"""Minibatches: each row once, the steps of svi.update, kills, NaN, early stops, files."""

import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_sgp as sgp
from numpyro_sgp.training.minibatches import _Training
from numpyro_sgp.training.rows import Order, Rows, permuted
from tests.helpers import regression_data

KEY = random.key(3)
NUM_ROWS = 60
ROOT = Path(__file__).resolve().parents[2]


def line(X, y, num_rows=None, size=None):
    """Linear regression, which compiles at once."""
    w = numpyro.param("w", jnp.zeros(2))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def no_latents(*args, **kwargs):
    """The guide of a model with parameters only."""


def process(X, y=None, num_rows=None):
    """GP regression on a batch."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def fit(svi, data, num_steps, **options):
    options = {"num_rows": NUM_ROWS, "progress_bar": False, "chunk": 4, **options}
    key = options.pop("key", KEY)
    if isinstance(data, tuple):
        options.setdefault("batch_size", 7)
    return sgp.train(svi, key, data, num_steps, **options)


def assert_same(a, b):
    """Bit for bit, but for seconds and reasons."""
    a, b = (jax.tree.leaves(tuple(result)[:5]) for result in (a, b))
    for x, y in zip(a, b, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = random.key_data(x), random.key_data(y)
        assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def data():
    return tuple(np.asarray(a) for a in regression_data(NUM_ROWS, dim=2))


@pytest.fixture(scope="module")
def plain():
    return SVI(line, no_latents, optax.adam(0.05), Trace_ELBO())


@pytest.fixture(scope="module")
def svi():
    guide = sgp.AutoSparseGP(process, sgp.SVGP(5))
    return SVI(process, guide, optax.adam(0.02), sgp.TraceGP_ELBO())


# ---- order ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000])
def test_a_permutation_of_each_size(size):
    whole = permuted(np.arange(size), size, (1, 2))
    assert_array_equal(np.sort(whole), np.arange(size))
    assert_array_equal(permuted(np.arange(size)[::-1], size, (1, 2)), whole[::-1])


def test_permutations_are_uniform():
    """Of four numbers, and of pairs of the first two of fifty."""
    draws = [permuted(np.arange(4), 4, (seed,)) for seed in range(2400)]
    _, counts = np.unique(draws, axis=0, return_counts=True)
    # Chi squared with 23 degrees of freedom: mean 23, sd 6.8.
    assert len(counts) == 24 and np.sum((counts - 100) ** 2 / 100) < 57
    whole = permuted(np.arange(10_000), 10_000, (0,))
    assert abs(np.corrcoef(whole[1:], whole[:-1])[0, 1]) < 0.05  # sd 0.01


@pytest.mark.parametrize("num_rows", [5, 100, 4096, 5000])
@pytest.mark.parametrize("block", [0, 1, 3, 16])
def test_every_row_once_in_each_epoch(num_rows, block):
    order = Order(num_rows, block, (7,))
    whole = order(0, 3 * num_rows)
    # Any part of it is computed by itself.
    for start in (0, 1, num_rows - 2, num_rows + 3):
        assert_array_equal(order(start, start + 5), whole[start : start + 5])
    for epoch in np.split(whole, 3):
        assert_array_equal(np.sort(epoch), np.arange(num_rows))
    if block and num_rows > 5:
        assert (whole[:num_rows] != whole[num_rows : 2 * num_rows]).any()
        assert (whole != Order(num_rows, block, (8,))(0, 3 * num_rows)).any()


def test_blocks_stay_near_in_the_file_and_mix():
    """A batch has rows of many blocks, and a window few pages."""
    num_rows, block = 100_000, 10
    order = Order(num_rows, block, (0,))
    rows = order(0, 256 * block)
    assert len(np.unique(rows // block)) <= 2 * 256 + 1
    assert len(np.unique(order(0, 256) // block)) > 100
    # Blocks come from everywhere: the mean is N / 2 within five standard errors.
    assert abs(rows.mean() / num_rows - 0.5) < 5 * 12**-0.5 / 256**0.5


# ---- steps ----------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_are_those_of_svi_update(svi, data):
    result = fit(svi, data, 21)
    source = Rows(data, 7, True, tuple(random.key_data(KEY).tolist()))
    state = svi.init(KEY, *source.sample(7), num_rows=NUM_ROWS)
    update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_rows=NUM_ROWS))
    losses = []
    for step in range(21):
        state, loss = update(state, *source.batch(step))
        losses.append(loss)
    assert_allclose(result.losses, losses, rtol=1e-12)
    for name, value in svi.get_params(state).items():
        assert_allclose(result.params[name], value, rtol=1e-9, atol=1e-12)


def test_arrays_files_and_devices_train_alike(plain, data, tmp_path):
    known = fit(plain, data, 20)
    for name, array in zip("Xy", data, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    files = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "Xy")
    assert_same(fit(plain, files, 20), known)
    assert_allclose(fit(plain, tuple(map(jnp.asarray, data)), 20).losses, known.losses)
    # Copies of files are of their class.
    copies = tuple(file.astype(np.float32).astype(float) for file in files)
    assert all(isinstance(copy, np.memmap) for copy in copies)
    assert_allclose(fit(plain, copies, 20).losses, known.losses, rtol=1e-6)
    source = Rows(files, 7, 3, (0,))
    for found, array in zip(source.batch(5), data, strict=True):
        assert_array_equal(found, array[source.rows(5, 6)])


def test_chunks_change_nothing_but_the_shape_of_a_block(plain, data):
    assert_allclose(fit(plain, data, 23).losses, fit(plain, data, 23, chunk=10).losses)


def test_iterators_keep_their_order(plain, data):
    X, y = data
    batches = [(X[i : i + 10], y[i : i + 10]) for i in range(0, 60, 10)]
    known = fit(plain, data, 15, shuffle=False, batch_size=10)
    assert_allclose(fit(plain, batches, 15).losses, known.losses)
    endless = (batches[i % 6] for i in range(15))
    assert_allclose(fit(plain, endless, 15).losses, known.losses)
    with pytest.raises(sgp.FitInterrupted, match="ended after 6 batches") as caught:
        fit(plain, iter(batches), 15)
    assert len(caught.value.result.losses) == 4  # the chunk before
    for broken in ([*batches, (X[:5], y[:5])], iter([*batches[:5], (X[:5], y[:5])])):
        with pytest.raises(sgp.FitInterrupted, match="smaller batch"):
            fit(plain, broken, 15)


def test_only_the_plate_of_the_rows_has_the_rows_of_the_batch(data):
    def groups(X, y, num_rows):
        levels = numpyro.param("levels", jnp.zeros(40))
        with numpyro.plate("groups", 40, subsample_size=len(X)) as index:
            numpyro.factor("prior", -(levels[index] ** 2) + levels[index])
        line(X, y, num_rows)

    svi = SVI(groups, no_latents, optax.sgd(0.1), Trace_ELBO())
    levels = fit(svi, data, 60).params["levels"]
    assert (levels > 0.1).all()  # each was drawn at least once


@pytest.mark.slow
def test_nothing_has_the_length_of_all_rows(svi, data):
    N = 10**12
    svi.guide.setup(*data)  # which would draw rows from an array of that length
    result = fit(svi, [tuple(a[:7] for a in data)], 1, num_rows=N)
    assert np.isfinite(result.losses).all()


def test_a_precision_set_for_a_block_of_code_reaches_the_reader(plain, data):
    known = fit(plain, data, 10)
    jax.config.update("jax_enable_x64", False)
    try:
        with jax.enable_x64(True):
            assert_same(fit(plain, data, 10), known)
    finally:
        jax.config.update("jax_enable_x64", True)


def test_state_that_is_not_a_parameter_is_carried(data):
    def counting(X, y, num_rows=None):
        count = numpyro.primitives.mutable("count", {"steps": jnp.zeros((), int)})
        count["steps"] = count["steps"] + 1
        line(X, y, num_rows)

    svi = SVI(counting, no_latents, optax.sgd(0.001), Trace_ELBO())
    before = svi.init(KEY, *data).mutable_state["count"]["steps"]
    assert fit(svi, data, 11).state.mutable_state["count"]["steps"] == before + 11


def test_natural_gradients_in_minibatches(data):
    guide = sgp.AutoSparseGP(process, sgp.SVGP(5))
    optimiser = sgp.natural_gradients(guide, 0.3, optax.adam(0.01))
    svi = SVI(process, guide, optimiser, sgp.TraceGP_ELBO())
    losses = fit(svi, data, 40, batch_size=30).losses
    assert losses[-5:].mean() < 0.7 * losses[0]


def test_schedules_count_steps(data):
    """A rate of zero after five steps."""
    rate = optax.piecewise_constant_schedule(0.05, {5: 0.0})
    svi = SVI(line, no_latents, optax.adam(rate), Trace_ELBO())
    five, ten = fit(svi, data, 5), fit(svi, data, 10)
    assert_allclose(ten.params["w"], five.params["w"])
    assert np.abs(five.params["w"]).min() > 0.01


@pytest.mark.slow
def test_second_calls_compile_nothing(svi, data, count_compiled):
    held_out = {"validation": data, "every": 10}
    first = fit(svi, data, 20, **held_out)
    count_compiled()
    second = fit(svi, data, 20, **held_out)
    assert count_compiled() == 0
    assert_same(first, second)
    other = tuple(a[::-1] for a in data)
    fit(svi, other, 33, key=random.key(8), **held_out)
    assert count_compiled() == 0


@pytest.mark.slow
def test_second_predictions_compile_nothing(svi, data, count_compiled):
    X, y = (jnp.asarray(a) for a in data)
    params = fit(svi, data, 4).params
    counts = []
    for shift in (0.0, 0.1):
        count_compiled()
        moved = jax.tree.map(lambda a, shift=shift: a + shift, params)
        svi.guide.posterior(moved, X)["f"].variance.block_until_ready()
        sgp.log_predictive_density(svi.guide, moved, X, y)
        draw = random.key(int(10 * shift))
        svi.guide.sample_posterior(draw, moved, X[:6], sample_shape=(3,))
        counts.append(count_compiled())
    assert counts[0] > 0 and counts[1] == 0


# ---- held-out data --------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_parameters_are_returned(svi, data):
    """Held-out data that training moves away from."""
    held_out = (data[0][:9], -data[1][:9])
    options = {"validation": held_out, "every": 6, "batch_size": 7}
    whole = fit(svi, data, 60, **options)
    assert_array_equal(whole.nlpd_steps, np.arange(6, 61, 6))
    density = sgp.log_predictive_density(svi.guide, whole.params, *held_out)["y"]
    assert_allclose(whole.nlpd.min(), -density.mean(), rtol=1e-10)
    short = fit(svi, data, 60, patience=3, **options)
    best = np.argmin(short.nlpd)
    assert len(short.nlpd) == best + 4 and len(short.losses) == 6 * (best + 4) < 60
    at_best = fit(svi, data, 6 * (best + 1))
    assert_same([short.params], [at_best.params])
    assert_same([svi.get_params(short.state)], [fit(svi, data, 6 * (best + 4)).params])


@pytest.mark.slow
def test_masked_held_out_rows_do_not_count(data):
    """The score is that of the other rows, in batches of which one has none of them."""

    def masked(X, y, mask, num_rows=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
            with numpyro.handlers.mask(mask=mask):
                numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    X, y = data
    guide = sgp.AutoSparseGP(masked, sgp.SVGP(5))
    svi = SVI(masked, guide, optax.adam(0.02), sgp.TraceGP_ELBO())
    mask = np.arange(20) % 3 == 0
    mask[7:14] = False
    held_out = X[:20], y[:20], mask
    found = fit(svi, (X, y, np.ones(60, bool)), 4, validation=held_out, every=4)
    rest = X[:20][mask], y[:20][mask], np.ones(mask.sum(), bool)
    density = sgp.log_predictive_density(guide, found.params, *rest)["y"]
    assert_allclose(found.nlpd, -density.mean(), rtol=1e-12)
    with pytest.raises(sgp.FitInterrupted, match=r"observed sites \['y'\]"):
        nothing = X[:20], y[:20], np.zeros(20, bool)
        fit(svi, (X, y, np.ones(60, bool)), 4, validation=nothing, every=4)


@pytest.mark.slow
def test_a_result_tells_in_a_few_lines_how_training_ended(svi, data):
    options = {"validation": (data[0][:9], -data[1][:9]), "every": 6, "patience": 1}
    found = fit(svi, data, 600, **options)
    steps, best = len(found.losses), np.argmin(found.nlpd)
    lines = repr(found).splitlines()
    assert len(lines) == 3 and lines[0].startswith(f"TrainResult: {steps} steps in ")
    assert found.stopped == "no better held-out NLPD in 1 validations" in lines[0]
    assert f"{found.losses[-1]:.6g} at last" in lines[1]
    assert f"{found.nlpd[best]:.5g} at best, after {6 * (best + 1)} steps" in lines[2]
    whole = fit(svi, data, 6)
    assert whole.stopped == "all steps done" and 0.0 < whole.seconds < 600.0
    assert len(repr(whole).splitlines()) == 2


# ---- checkpoints ----------------------------------------------------------------------


def steps_of(path):
    return int(path.stem.removeprefix("step-"))


class Killed(BaseException):
    """Like SIGKILL, but for the process."""


def kill_after(monkeypatch, saves):
    """Lets so many checkpoints be written, and stops in the middle of the next."""
    real, left = os.replace, [saves]

    def replace(part, path):
        left[0] -= 1
        if left[0] < 0:
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
            raise Killed
        real(part, path)

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.slow
def test_kills_leave_no_trace(svi, data, tmp_path, monkeypatch):
    options = {"validation": (data[0][:9], data[1][:9]), "every": 10, "save_every": 0.0}
    known = fit(svi, data, 50, **options)
    options["checkpoint"] = tmp_path
    rng = np.random.default_rng(0)
    for kill in range(5):
        with monkeypatch.context() as patch:
            kill_after(patch, int(rng.integers(1, 4)))
            with pytest.raises(Killed):
                fit(svi, data, 50, **options)
        assert list(tmp_path.glob("*.part"))
        files = sorted(tmp_path.glob("*.npz"))
        assert len(files) <= 2
        if kill == 3:  # as after a power failure on a disk without flush
            files[-1].write_bytes(files[-1].read_bytes()[:-100])
            with pytest.warns(UserWarning, match="cannot be read"):
                assert len(fit(svi, data, 1, **options).losses) == steps_of(files[-2])
            files[-1].unlink()
    assert_same(fit(svi, data, 50, **options), known)
    assert_same(fit(svi, data, 50, **options), known)  # nothing left to do


def test_a_longer_training_goes_on_from_a_shorter(plain, data, tmp_path):
    fit(plain, data, 9, checkpoint=tmp_path)
    batches = [(data[0][i::6], data[1][i::6]) for i in range(6)]
    assert_same(fit(plain, data, 30, checkpoint=tmp_path), fit(plain, data, 30))
    folder = tmp_path / "batches"
    fit(plain, batches, 9, checkpoint=folder)
    assert_same(fit(plain, batches, 30, checkpoint=folder), fit(plain, batches, 30))


@pytest.mark.slow
def test_a_longer_training_has_the_validations_of_a_straight_one(svi, data, tmp_path):
    """That at the end of the shorter one stayed, and could be the best."""
    options = {"validation": (data[0][:9], -data[1][:9]), "every": 6, "patience": 2}
    short = fit(svi, data, 8, checkpoint=tmp_path, **options)
    assert_array_equal(short.nlpd_steps, [6, 8])
    assert_same(fit(svi, data, 8, checkpoint=tmp_path, **options), short)
    straight = fit(svi, data, 20, **options)
    assert_same(fit(svi, data, 20, checkpoint=tmp_path, **options), straight)


def test_a_shorter_training_says_that_more_steps_were_done(plain, data, tmp_path):
    fit(plain, data, 9, checkpoint=tmp_path)
    assert fit(plain, data, 5, checkpoint=tmp_path).stopped == "9 steps were done before"


def test_a_broken_checkpoint_is_replaced_and_no_good_one_is_lost(plain, data, tmp_path):
    fit(plain, data, 30, checkpoint=tmp_path, save_every=0.0)
    older, newer = sorted(tmp_path.glob("*.npz"))
    newer.write_bytes(newer.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="cannot be read"):
        fit(plain, data, 34, checkpoint=tmp_path)
    assert steps_of(older) == 28
    assert [steps_of(p) for p in sorted(tmp_path.glob("*.npz"))] == [28, 34]
    # One that is written again under the name of a broken one stays.
    newest = tmp_path / "step-000000000034.npz"
    content = bytearray(newest.read_bytes())
    content[-900:] = bytes(900)
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="cannot be read"):
        fit(plain, data, 34, checkpoint=tmp_path)
    assert [steps_of(p) for p in sorted(tmp_path.glob("*.npz"))] == [28, 34]
    # All broken: training begins anew, with checkpoints of fewer steps than theirs.
    for path in tmp_path.glob("*.npz"):
        path.write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be read"):
        fit(plain, data, 8, checkpoint=tmp_path, save_every=0.0)
    assert [steps_of(p) for p in sorted(tmp_path.glob("*.npz"))] == [4, 8]


def test_checkpoints_of_another_training_are_refused(plain, data, tmp_path):
    fit(plain, data, 5, checkpoint=tmp_path)
    other = (data[0], data[1] + 1.0)
    for changed, what in (
        ({"key": random.key(4)}, "rng_key"),
        ({"batch_size": 8}, "batch_size: 7 there, 8 here"),
        ({"shuffle": False}, "shuffled block"),
        ({"data": other}, "some rows of data"),
        ({"data": tuple(a[:50] for a in data), "num_rows": 50}, r"shapes of data: \[\["),
    ):
        options = {"data": data, "checkpoint": tmp_path, **changed}
        with pytest.raises(ValueError, match=f"another training.*{what}"):
            fit(plain, num_steps=9, **options)
    wider = SVI(line, no_latents, optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match="parameters and state") as caught:
        fit(wider, data, 9, checkpoint=tmp_path)
    # One leaf that differs, not all that there are.
    assert re.search(r"\[.*\] int32 and 2 more there, nothing else here", str(caught.value))
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_real_kills():
    command = [sys.executable, ROOT / "benchmarks" / "kills.py"]
    options = ["--kills", "4", "--steps", "4000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *options], check=True, env=environment)


# ---- what goes wrong ------------------------------------------------------------------


def test_nan_goes_back_to_the_last_good_state(plain, data, tmp_path):
    X, y = data
    bad = y.copy()
    source = Rows(data, 7, True, tuple(random.key_data(KEY).tolist()))
    row = source.rows(6, 7)[2]  # in the seventh step
    bad[row] = np.nan
    with pytest.raises(sgp.FitInterrupted, match="step 7 had the loss (nan|inf)") as caught:
        fit(plain, (X, bad), 20, checkpoint=tmp_path)
    message = str(caught.value)
    assert "['w']" in message and "Array 1 of data is not finite in 1 rows" in message
    assert f"[{row}]" in message and isinstance(caught.value.__cause__, FloatingPointError)
    good = fit(plain, data, 6)
    assert_same(caught.value.result, good)
    # The last good state is saved: once the row is mended, training goes on from it.
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["step-000000000006"]
    assert_same(fit(plain, data, 20, checkpoint=tmp_path), fit(plain, data, 20))


def test_nan_in_a_batch_of_a_list_is_found(plain, data):
    bad = data[1].copy()
    bad[27] = np.nan
    batches = [(data[0][i : i + 10], bad[i : i + 10]) for i in range(0, 60, 10)]
    told = r"Array 1 of batch 3 of data is not finite in 1 rows \(first: \[7\]\)"
    with pytest.raises(sgp.FitInterrupted, match=told):
        fit(plain, batches, 6)


def test_divergence_says_what_to_try(data):
    svi = SVI(line, no_latents, optax.sgd(1e3), Trace_ELBO())
    with pytest.raises(sgp.FitInterrupted, match="Lower the learning rate") as caught:
        fit(svi, data, 400)
    result = caught.value.result
    assert np.isfinite(result.losses).all() and np.isfinite(result.params["w"]).all()


def test_the_user_may_interrupt(plain, data, tmp_path, monkeypatch):
    real, calls = Rows.block, []

    def block(self, start, stop, size):
        calls.append(threading.current_thread())
        if start >= 8:
            raise KeyboardInterrupt
        return real(self, start, stop, size)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "block", block)
        with pytest.raises(sgp.FitInterrupted, match="after 8 of 40 steps") as caught:
            fit(plain, data, 40, checkpoint=tmp_path)
    told = str(caught.value)
    assert "by the user (Ctrl-C).\nThe last good state" in told
    assert "in the newest checkpoint); go on by the same call, or with init_state" in told
    assert_same(caught.value.result, fit(plain, data, 8))
    assert calls and not any(thread.is_alive() for thread in calls)
    assert_same(fit(plain, data, 40, checkpoint=tmp_path), fit(plain, data, 40))
    go_on = fit(plain, data, 3, init_state=caught.value.result.state)
    assert go_on.losses[0] < caught.value.result.losses[0]


def test_a_loader_that_hangs_holds_no_interrupt_up(plain, data, monkeypatch):
    real, go_on, ended = _Training.run, threading.Event(), []

    def hangs():
        for _ in range(8):
            yield tuple(a[:7] for a in data)
        go_on.wait(20.0)
        ended.append(True)

    def run(self, start, stop, block):
        real(self, start, stop, block)
        if stop == 8:  # the reader is at the next block
            raise KeyboardInterrupt

    monkeypatch.setattr(_Training, "run", run)
    monkeypatch.setattr("numpyro_sgp.training.rows._GRACE", 0.05, raising=False)
    with pytest.raises(sgp.FitInterrupted, match="after 8 of 40 steps") as caught:
        fit(plain, hangs(), 40)
    assert not ended and len(caught.value.result.losses) == 8
    go_on.set()


@pytest.mark.quick(1)
@pytest.mark.parametrize(("num_steps", "every"), [(20, 10), (10, 100)])
def test_an_interrupted_validation_is_made_up_for(
    svi, data, tmp_path, monkeypatch, num_steps, every
):
    options = {"validation": (data[0][:9], data[1][:9]), "every": every}

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("numpyro_sgp.training.minibatches.whole_batches", stop)
        told = rf"(?s)after 10 of {num_steps} steps.*in the newest checkpoint"
        with pytest.raises(sgp.FitInterrupted, match=told):
            fit(svi, data, num_steps, checkpoint=tmp_path, **options)
    resumed = fit(svi, data, num_steps, checkpoint=tmp_path, **options)
    assert_same(resumed, fit(svi, data, num_steps, **options))


def test_the_bar_shows_elbo_and_nlpd(svi, data, capsys):
    fit(svi, data, 20, validation=data, every=10, progress_bar=True)
    shown = capsys.readouterr().err
    assert "20/20" in shown and "ELBO: -" in shown and "NLPD: " in shown


def test_a_factor_may_be_scaled_by_hand(data):
    def by_hand(X, y, num_rows):
        w = numpyro.param("w", jnp.zeros(2))
        log_prob = dist.Normal(X @ w, 1.0).log_prob(y)
        numpyro.factor("y", num_rows * log_prob.mean())

    svi = SVI(by_hand, no_latents, optax.adam(0.05), Trace_ELBO())
    known = SVI(line, no_latents, optax.adam(0.05), Trace_ELBO())
    assert_allclose(fit(svi, data, 8).losses, fit(known, data, 8).losses)


@pytest.mark.parametrize("weights", [0.5, np.linspace(0.2, 0.8, 7)])
def test_a_likelihood_in_the_right_plate_may_have_weights(plain, data, weights):
    def weighted(X, y, num_rows):
        with numpyro.handlers.scale(scale=weights):
            line(X, y, num_rows)

    data = data[0], np.ones(NUM_ROWS)  # all rows have the same density at first
    svi = SVI(weighted, no_latents, optax.adam(0.05), Trace_ELBO())
    first = fit(plain, data, 1).losses[0]
    assert_allclose(fit(svi, data, 1).losses[0], 0.5 * first)
    told = "scaled by {'y': 0.5}" if np.ndim(weights) == 0 else "{'y': '0.2 to 0.8'}"
    with pytest.raises(ValueError, match=f"by 8.57143, but .*{told}"):
        fit(svi, data, 1, num_rows=None)


def test_errors_of_a_model_are_raised_as_they_are(data):
    def broken(X, y, num_rows):
        line(X, y, num_rows)
        raise RuntimeError("of the model")

    svi = SVI(broken, no_latents, optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(RuntimeError, match="of the model") as caught:
        fit(svi, data, 5)
    assert not isinstance(caught.value, sgp.FitInterrupted)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"data": (np.zeros((5, 2)), np.zeros(4))}, ValueError, "same number of rows"),
        ({"data": (np.zeros((5, 2)), 3.0)}, ValueError, "same number of rows"),
        ({"data": 3.0}, TypeError, "tuple of arrays, such as"),
        ({"batch_size": 61}, ValueError, "between 1 and the 60 rows"),
        ({"batch_size": None}, ValueError, "batch_size must be"),
        ({"data": [1], "batch_size": 5}, ValueError, "batch_size is for a tuple"),
        ({"shuffle": -1}, ValueError, "shuffle must be"),
        ({"num_steps": 0}, ValueError, "num_steps must be positive"),
        ({"patience": 2}, ValueError, "patience needs held-out data"),
        ({"validation": (1,)}, TypeError, "validation needs an AutoSparseGP"),
        ({"batch_size": 7.0}, TypeError, "batch_size must be a whole number, got 7.0"),
        ({"num_steps": True}, TypeError, "num_steps must be a whole number"),
        ({"chunk": None}, TypeError, "chunk must be a whole number"),
        ({"data": {"X": 1}}, TypeError, "got dict"),
        ({"data": [np.zeros((5, 2)), np.zeros(5)]}, ValueError, "passed as a tuple: .X, y"),
        ({"data": [[1.0], None]}, ValueError, "Each batch of data must be a tuple"),
        ({"data": [(np.zeros((5, 2)), np.zeros(5)), 1]}, TypeError, "batch 2 is a int"),
        ({"data": (np.zeros((9, 2), ">f4"), np.zeros(9))}, TypeError, "Array 0 .* >f4"),
        ({"data": (np.zeros((9, 2)), np.full(9, "a"))}, TypeError, "Array 1 .* <U1"),
        ({"checkpoint": __file__}, ValueError, "checkpoint must be a folder"),
        ({"num_rows": None}, ValueError, "num_rows=60"),
        ({"num_rows": 70}, ValueError, "scaled by {'y': 10.0}"),
        ({"init_params": {}, "init_state": 1}, ValueError, "not both"),
        ({"size": {1, 2}}, TypeError, "neither an array nor hashable"),
    ],
)
def test_bad_input_is_refused(plain, data, options, error, match):
    options = {"data": data, "num_steps": 5, **options}
    with pytest.raises(error, match=match):
        fit(plain, **options)


def test_bad_held_out_data_are_refused(svi, data):
    X, y = data
    bad = np.where(np.arange(NUM_ROWS) == 3, np.nan, y)
    for validation, match in (
        ((X, y[:3]), "validation must be a tuple"),
        ((X[:0], y[:0]), "validation must be a tuple"),
        ((X,), r"validation has arrays of shapes \[\(60, 2\)\]"),
        ((X[:, :1], y), "may differ in the number of rows alone"),
        ((X, bad), r"Array 1 of validation is not finite in 1 rows \(first: \[3\]\)"),
    ):
        with pytest.raises(ValueError, match=match):
            fit(svi, data, 5, validation=validation)


@pytest.mark.quick(1)
@pytest.mark.parametrize("base", [AutoDelta, lambda m: AutoNormal(m, init_scale=0.1)])
def test_latents_of_rows_are_refused_where_batches_are_given(base):
    """Which rows a batch has is not known: entries would be of whichever rows come."""

    def model(X, y=None, num_rows=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
            e = numpyro.sample("e", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(f + e, 0.1), obs=y)

    X, y = np.linspace(0.0, 3.0, 20)[:, None], np.zeros(20)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(4), base)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    options = {"batch_size": 5, "num_rows": 20, "progress_bar": False}
    with pytest.raises(ValueError, match="Latent 'e' has an entry for each row of plate"):
        sgp.train(svi, jax.random.key(0), (X, y), 3, **options)


@pytest.mark.slow
def test_latents_of_rows_that_a_guide_makes_of_the_data_are_taken():
    """An encoder knows each row by what it is."""

    def model(X, y=None, num_rows=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
            e = numpyro.sample("e", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(f + e, 0.1), obs=y)

    def encoder(model):
        def guide(X, y=None, num_rows=None):
            slope = numpyro.param("slope", 0.5)
            with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
                numpyro.sample("e", dist.Normal(slope * y, 0.1))

        return guide

    X, y = np.linspace(0.0, 3.0, 20)[:, None], np.zeros(20)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(4), encoder)
    svi = SVI(model, guide, optax.adam(0.1), sgp.TraceGP_ELBO())
    guide.setup(X[:5], y[:5], 20)
    options = {"batch_size": 5, "num_rows": 20, "progress_bar": False}
    result = sgp.train(svi, jax.random.key(0), (X, y), 3, **options)
    assert np.isfinite(result.losses).all()


@pytest.mark.filterwarnings("ignore:subsample_size does not match")
@pytest.mark.slow
def test_a_loader_sets_a_guide_up_with_its_rows_once(data):
    """Not with as many as the guide would take of more data, in a plate of these."""
    svi = SVI(process, sgp.AutoSparseGP(process, sgp.SVGP(4)), optax.adam(0.05), LOSS)
    loader = [tuple(a[i : i + 15] for a in data) for i in range(0, NUM_ROWS, 15)]
    assert np.isfinite(fit(svi, loader, 2).losses).all()
    svi = SVI(process, sgp.AutoSparseGP(process, sgp.SVGP(4)), optax.adam(0.05), LOSS)
    with pytest.raises(ValueError, match="give init_rows"):
        fit(svi, itertools.cycle(loader), 2)  # which has no end


LOSS = sgp.TraceGP_ELBO()

"""How long L-BFGS on all rows follows batches, and what is told of why it ended."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting import batches
from numpyro_sgp.fitting.progress import NO_HIGHER, TIME_USED, Limits

EPOCHS, PASSES = 60, 4  # of the batches, and of each step of L-BFGS


class Descending:
    """Makes steps by which losses fall as they are told, four evaluations each."""

    def __init__(self, falls):
        self.falls, self.free, self.profiled = falls, {"Z": 0.0}, ()
        self.losses, self.work = [], 0

    @property
    def loss(self):
        return self.losses[-1]

    def index(self, names):
        return np.arange(len(names))

    def start_at(self, free):
        self.losses.append(1000.0)

    def free_now(self):
        return self.free

    def run(self, index, most, tol, show):
        try:
            for fall in self.falls:
                self.losses.append(self.loss - fall)
                self.work += PASSES
                show(self.loss)
        except StopIteration:
            pass


@pytest.fixture
def end(monkeypatch):
    """A function that gives passes and reason at the end, of falls of the loss."""

    def end(falls, until=None):
        descent = Descending(falls)
        monkeypatch.setattr(batches, "descent_of", lambda problem, key: descent)
        run = SimpleNamespace(
            count=10 * EPOCHS, share=0.1, losses=np.array([6000.0]), show=lambda *_: None
        )
        problem = SimpleNamespace(num_rows=1000)
        finish = batches._Finish(problem, None, Limits(0.1, None, until), run)
        found = finish({}, "the loss fell no more than its noise")
        assert found.bound == -descent.loss
        return descent.work, found.stopped

    return end


def test_they_go_on_while_they_gain_a_good_part(end):
    """5 of 5,000 nats in the last quarter of all steps are worth it."""
    work, stopped = end([2.0] * 1000)
    # 240 nats in 8 times the epochs; more would be left.
    assert EPOCHS * batches._LONGEST <= work < EPOCHS * batches._LONGEST + PASSES
    assert stopped.startswith(f"the most passes over all rows, {work}, were made")
    assert "fit(model, fitted, data) goes on" in stopped
    # What a quarter gains is less than that, though some nats are left.
    assert end([0.5] * 1000)[0] == EPOCHS
    # Of 38 steps the last nine gain 2 and 8 times 0.5, of 39 they gain 4.5.
    assert end([2.0] * 30 + [0.5] * 1000)[0] == PASSES * 39


def test_they_end_where_little_is_left(end):
    work, stopped = end(0.5 ** np.arange(1000))
    assert work < EPOCHS
    assert stopped == "less than 0.1 nats seemed left"


def test_they_end_where_there_is_no_more_time(end):
    assert end([2.0] * 1000, until=-np.inf) == (PASSES, TIME_USED)


def test_they_end_where_no_step_is_lower(end):
    assert end([2.0] * 3) == (3 * PASSES, NO_HIGHER)


@pytest.mark.slow
def test_a_fit_tells_of_them():
    """That the message is that of the end, not of the batches before it."""
    X = jnp.linspace(0.0, 1.0, 300)[:, None]
    y = jnp.sin(9.0 * X[:, 0]) + 0.3 * jnp.cos(57.0 * jnp.arange(300.0))

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.2), X))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    fitted = sgp.fit(model, sgp.SVGP(6), (X, y), batch_size=100, progress_bar=False)
    assert fitted.stopped in ("less than 0.1 nats seemed left", NO_HIGHER)

"""What a limit of time does to training on batches."""

import time
import types

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting import batches
from numpyro_sgp.fitting.stepper import Stepper

N = 400
X = np.linspace(0.0, 3.0, N)[:, None]
Y = np.random.default_rng(0).poisson(np.exp(np.sin(3.0 * X[:, 0])))


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 0.7), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.fixture
def clock(monkeypatch):
    """
    A second goes by with each step after the race, and twelve with each look at all rows:
    a little more than an epoch of ten steps.
    """
    clock = types.SimpleNamespace(now=0.0, runs=False, looks=[])
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    steps, polish = Stepper.__call__, batches._polish

    def step(self, state, index, natural, others, held=()):
        clock.now += len(natural) * clock.runs
        return steps(self, state, index, natural, others, held)

    def begin(*given):
        clock.runs, program = True, polish(*given)

        def look(free, arrays, most):
            clock.looks.append(1 + int(most))
            clock.now += 12.0 * clock.looks[-1]
            return program(free, arrays, most)

        look.prepare = program.prepare
        return look

    monkeypatch.setattr(Stepper, "__call__", step)
    monkeypatch.setattr(batches, "_polish", begin)
    monkeypatch.setattr(batches._Finish, "wanted", lambda *_: False)
    return clock


@pytest.mark.parametrize("seconds, looks", [(60.0, 1), (200.0, 2), (800.0, 9)])
def test_batches_and_what_follows_them_end_in_their_time(clock, seconds, looks):
    """Natural steps on all rows at the end, as many as there is time for."""
    fitted = sgp.fit(model, sgp.SVGP(5), (X, Y), seconds=seconds, batch_size=40)
    assert fitted.stopped == "the time was used up"
    assert 0.75 * seconds <= clock.now <= seconds
    assert clock.looks[-1] == looks
    assert len(fitted.losses) >= clock.now - 12.0 * sum(clock.looks) - 1

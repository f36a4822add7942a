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
    A second goes by with each step after the race, ``slow`` with each of the first five,
    and ``look`` with each look at all rows: a little more than an epoch of ten steps.
    """
    clock = types.SimpleNamespace(now=0.0, runs=False, looks=[], slow=1.0, look=12.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    steps, polish = Stepper.__call__, batches._polish
    made = [0]

    def step(self, state, index, natural, others, held=()):
        early = min(max(5 - made[0], 0), len(natural)) * clock.runs
        made[0] += len(natural) * clock.runs
        clock.now += len(natural) * clock.runs + early * (clock.slow - 1.0)
        return steps(self, state, index, natural, others, held)

    def begin(*given):
        clock.runs, program = True, polish(*given)

        def look(free, arrays, most):
            clock.looks.append(1 + int(most))
            clock.now += clock.look * clock.looks[-1]
            return program(free, arrays, most)

        look.prepare = program.prepare
        return look

    monkeypatch.setattr(Stepper, "__call__", step)
    monkeypatch.setattr(batches, "_polish", begin)
    return clock


def fitted_in(seconds):
    fitted = sgp.fit(model, sgp.SVGP(5), (X, Y), seconds=seconds, batch_size=40)
    assert fitted.stopped == "the time was used up"
    return fitted


@pytest.mark.quick(1)
@pytest.mark.parametrize("seconds, looks", [(60.0, 1), (200.0, 2), (400.0, 2)])
@pytest.mark.parametrize("slow", [1.0, 5.0])
def test_batches_and_what_follows_them_end_in_their_time(clock, seconds, looks, slow):
    """Natural steps on all rows at the end, as many as there is time for."""
    clock.slow = slow
    fitted = fitted_in(seconds)
    assert 0.85 * seconds <= clock.now <= seconds
    assert clock.looks[-1] == looks
    assert len(fitted.losses) >= clock.now - clock.look * sum(clock.looks) - 4 * slow - 1


@pytest.mark.slow
def test_where_the_bound_takes_more_than_the_time_half_of_it_goes_to_steps(clock):
    clock.look = 125.0
    fitted = fitted_in(60.0)
    assert 25 <= len(fitted.losses) <= 50 and clock.looks == [1]
    assert clock.now <= 60.0 + clock.look


@pytest.mark.slow
def test_no_step_of_all_rows_is_made_where_there_is_no_time(clock):
    fitted_in(1e-3)
    assert clock.looks == [1]

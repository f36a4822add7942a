"""Threads of OpenBLAS, in processes of their own; threads of users, one at a time."""

import inspect
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp._threads import _ALONE, alone, methods_alone

CODE = """
import os
os.sched_getaffinity = lambda pid: set(range({cores}))
from numpyro_sgp._threads import one_thread
from threadpoolctl import ThreadpoolController
print(one_thread())
import numpyro_sgp as sgp
for library in ThreadpoolController().info():
    print("scipy.libs" in library["filepath"], library["num_threads"])
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("cores", "chosen", "done"), [(2, None, True), (2, "2", False), (64, None, False)]
)
def test_one_thread_on_few_cores_unless_chosen(cores, chosen, done):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS", "OMP"))}
    if chosen is not None:
        env["OPENBLAS_NUM_THREADS"] = chosen
    code = CODE.format(cores=cores)
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    told, *libraries = out.stdout.splitlines()
    of_scipy = [line.split()[1] for line in libraries if line.startswith("True")]
    if not of_scipy:
        pytest.skip("SciPy has no OpenBLAS of its own here")
    assert told == str(done)
    assert (set(of_scipy) == {"1"}) == done or os.cpu_count() == 1


def test_one_thread_at_a_time_is_in_what_is_marked():
    inside, most = [], []

    @alone
    def first(depth):
        inside.append(depth)
        most.append(len(inside))
        time.sleep(0.01)
        if depth:  # the same thread may come again
            first(depth - 1)
        inside.pop()

    @methods_alone
    class Second:
        def method(self):
            first(1)

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(first, 1), pool.submit(Second().method)] * 2
        tasks += [pool.submit(Second().method), pool.submit(first, 0)]
    assert not any(task.exception() for task in tasks)
    assert max(most) == 2 and not inside


def is_free(seconds):
    free = _ALONE.acquire(timeout=seconds)
    if free:
        _ALONE.release()
    return free


def test_a_loader_may_run_models_beside_a_training():
    """Its threads find the lock free, but never while the training runs its model."""
    X = np.linspace(0.0, 1.0, 5)[:, None]

    def batches():
        for _ in range(12):
            assert pool.submit(is_free, 10.0).result()
            yield X, X[:, 0]

    def model(X, y):
        assert not pool.submit(is_free, 0.01).result()
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    svi = numpyro.infer.SVI(model, guide, optax.adam(0.02), sgp.TraceGP_ELBO())
    options = {"init_rows": 5, "chunk": 2, "progress_bar": False}
    with ThreadPoolExecutor(2) as pool:
        result = sgp.train(svi, jax.random.key(0), batches(), 12, **options)
    assert len(result.losses) == 12


def test_a_fit_is_made_by_one_thread_at_a_time():
    X, free = np.linspace(0.0, 1.0, 5)[:, None], []

    def model(X, y):
        free.append(pool.submit(is_free, 0.01).result())
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = sgp.AutoSparseGP(model, sgp.SVGP(3))
    svi = numpyro.infer.SVI(model, guide, optax.adam(0.02), sgp.TraceGP_ELBO())
    with ThreadPoolExecutor(1) as pool:
        result = svi.run(jax.random.key(0), 1, X, X[:, 0], progress_bar=False)
        free.clear()
        sgp.Fitted(guide, result.params, (X, X[:, 0]))
        sgp.Fitted.from_svi(svi, result, X, X[:, 0])
    assert free and not any(free)


def test_what_is_marked_keeps_its_signature():
    assert list(inspect.signature(sgp.fit).parameters)[:3] == [
        "model",
        "approximation",
        "data",
    ]
    assert sgp.Fitted.predict.__doc__ and sgp.Fitted.predict.__name__ == "predict"

"""
A soak: mixed calls in one process for an hour, and eight threads at once.

    python -m campaigns.soak                  # an hour
    python -m campaigns.soak --minutes 10

Rounds of fits, posteriors, predictions, verdicts, draws, nested inference, files and
refused calls, on data of a few shapes. Not in it are MCMC and SVI objects made anew: plain
NumPyro keeps 14 MiB for each MCMC and 2 for each SVI, with and without this package.
The models of ``same`` are functions that live as long as the process, those of ``new`` are
closures made anew for each round, as a notebook or a loop over folds makes them. After
each round what the process holds (``VmRSS``, after collection) and how long the round took
are kept. Memory is flat if its last third does not grow by more than `GROWTH` MiB a
round; nothing slows down if the median round of the last third takes at most `SLOWER`
times that of the second. ``threads``: eight threads fit and predict, each on data of its
own, with the results of one after the other.
"""

import argparse
import gc
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_sgp as sgp
from campaigns._table import Found, Table

#: MiB a round: an hour of rounds may hold some tens of MiB more, not hundreds.
GROWTH = 0.25
#: Of times of rounds on a machine that others use too.
SLOWER = 1.3
THREADS = 8
QUIET = {"progress_bar": False}


def regression(X, y=None):
    """A model that lives as long as the process."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def counts(X, y=None):
    """Another."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0, 1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def again(model):
    """The same model as a new function."""

    def renewed(X, y=None):
        return model(X, y)

    return renewed


def simulated(rng, rows):
    """Rows, normal responses and counts."""
    X = np.sort(rng.uniform(0.0, 5.0, (rows, 1)), 0)
    f = np.sin(2.0 * X[:, 0])
    return X, f + 0.3 * rng.normal(size=rows), rng.poisson(np.exp(f))


def one_round(rng, renew, folder):
    """What a user does in an hour, once."""
    X, y, k = simulated(rng, int(rng.choice([30, 60])))
    new = X[:7] + 0.1
    key = jax.random.key(int(rng.integers(2**31)))
    normal, poisson = renew(regression), renew(counts)
    fitted = sgp.fit(normal, sgp.SVGP(8), (X, y), **QUIET)
    fitted.posterior(new)["f"].mean.block_until_ready()
    fitted.predict(new)
    fitted.check()
    fitted.to_arviz()
    fitted.save(folder / "fitted.npz")
    sgp.load(folder / "fitted.npz", normal).predict(new)
    other = sgp.fit(poisson, sgp.SOLVEGP(5, 3), (X, k), steps=20, **QUIET)
    other.sample(key, new)
    sgp.nested(normal, sgp.SVGP(5), (X, y), **QUIET)
    for wrong in ((X, y[:-1]), (X * np.nan, y)):
        try:
            sgp.fit(normal, sgp.SVGP(8), wrong, **QUIET)
        except ValueError:
            continue
        raise AssertionError("wrong data were taken")


def held():
    """MiB of memory that the process has now."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def rounds(minutes, renew):
    """MiB and seconds after each round."""
    rng = np.random.default_rng(0)
    until = time.monotonic() + 60.0 * minutes
    memory, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until or len(memory) < 9:
            began = time.monotonic()
            one_round(rng, renew, Path(folder))
            seconds.append(time.monotonic() - began)
            memory.append(held())
            if len(memory) % 10 == 1:
                print(
                    f"  {len(memory)}: {memory[-1]:.0f} MiB, {seconds[-1]:.1f} s",
                    flush=True,
                )
    return np.array(memory), np.array(seconds)


def judged(memory, seconds):
    """The verdict on rounds."""
    third = len(memory) // 3
    growth = np.polyfit(np.arange(third), memory[-third:], 1)[0]
    slower = np.median(seconds[-third:]) / np.median(seconds[third:-third])
    failed = []
    if growth > GROWTH:
        failed.append(
            f"memory grows by {growth:.2f} MiB a round: {memory[-third:].round(0)}"
        )
    if slower > SLOWER:
        failed.append(f"rounds of the last third take {slower:.2f} times those before")
    numbers = {
        "MiB a round": float(growth),
        "times slower": float(slower),
        "MiB": float(memory[-1]),
        "seconds a round": float(np.median(seconds)),
    }
    return Found(len(memory), failed, numbers)


def answers(number):
    """Means and sds of two fits, on data of its own."""
    X, y, k = simulated(np.random.default_rng(number), 30)
    found = []
    for model, values in ((regression, y), (counts, k)):
        fitted = sgp.fit(model, sgp.SVGP(6), (X, values), **QUIET)
        q = fitted.posterior(X)["f"]
        found += [np.asarray(q.mean), np.sqrt(np.asarray(q.variance))]
    return np.array(found)


def in_threads(times=3):
    """Whether threads find what one after the other do."""
    failed = []
    serial = [answers(n) for n in range(THREADS)]
    for time_ in range(times):
        with ThreadPoolExecutor(THREADS) as pool:
            tasks = [pool.submit(answers, n) for n in range(THREADS)]
        for number, (task, wanted) in enumerate(zip(tasks, serial, strict=True)):
            if task.exception() is not None:
                failed.append(f"{time_}, {number}: {task.exception()!r}"[:200])
            elif not np.array_equal(task.result(), wanted):
                off = np.abs(task.result() - wanted).max()
                failed.append(f"{time_}, {number}: answers differ by {off:.2g}")
    return Found(times * THREADS, failed, {})


def look(block, minutes):
    """A block: models that stay, models that are new, or threads."""
    if block == "threads":
        return in_threads()
    renew = again if block == "new" else (lambda model: model)
    return judged(*rounds(minutes, renew))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--minutes", type=float, default=60.0, help="in all")
    minutes = parser.parse_args().minutes
    jax.config.update("jax_enable_x64", True)
    table = Table("soak")
    table.run(("threads", "same", "new"), partial(look, minutes=minutes / 2))
    sys.exit(bool(table.failed))


if __name__ == "__main__":
    main()

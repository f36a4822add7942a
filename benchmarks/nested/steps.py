"""
Time of a step of the joint guide beside one that has each site and each effect apart: two
GP sites of 256 inducing points and 20 effects, batches of 1024 rows. Rounds of both take
turns, so that what else the machine does meets both; printed is the median of the ratios.

    python benchmarks/nested/steps.py
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, autoguide

import numpyro_sgp as sgp

RESULTS = Path(__file__).resolve().parents[1] / "results" / "nested_steps.json"
NUM_ROWS, BATCH, POINTS, EFFECTS = 20_000, 1024, 256, 20


def model(X, group, y=None, num_rows=NUM_ROWS):
    """Two sites beside effects of groups; counts."""
    with numpyro.plate("groups", EFFECTS):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, 1.0), X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern32(0.3, 0.3), X))
    with numpyro.plate("data", num_rows, subsample_size=len(X)):
        rate = jnp.exp(f + g + effect[group])
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def simulated():
    """Rows in three columns."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(BATCH, 3))
    group = rng.integers(0, EFFECTS, BATCH)
    y = rng.poisson(np.exp(np.sin(X[:, 0]) + 0.3 * rng.normal(size=EFFECTS)[group]))
    return jnp.asarray(X), jnp.asarray(group), jnp.asarray(y, float)


def steps_of(guide, data):
    """A function that does ten steps and returns their seconds each."""
    optimiser = sgp.natural_gradients(guide, 0.1, optax.adam(0.01))
    svi = SVI(model, guide, optimiser, sgp.TraceGP_ELBO())
    state = svi.init(jax.random.key(0), *data)
    update = jax.jit(lambda state: svi.update(state, *data))
    state, _ = update(state)

    def run():
        nonlocal state
        began = time.perf_counter()
        for _ in range(10):
            state, loss = update(state)
        loss.block_until_ready()
        return (time.perf_counter() - began) / 10

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    found = {}
    for precision in ("float32", "float64"):
        numpyro.enable_x64(precision == "float64")
        data, option = simulated(), sgp.SVGP(POINTS)
        joint = steps_of(sgp.AutoJointGP(model, option), data)
        apart = steps_of(sgp.AutoSparseGP(model, option, autoguide.AutoNormal), data)
        times = np.array([[joint(), apart()] for _ in range(args.rounds)])
        ratio = float(np.median(times[:, 0] / times[:, 1]))
        seconds = {"joint": times[:, 0].tolist(), "apart": times[:, 1].tolist()}
        found[precision] = {"ratio": ratio, "seconds": seconds}
        median = np.median(times, axis=0) * 1e3
        print(f"{precision}: {median[0]:.0f} ms, apart {median[1]:.0f} ms: {ratio:.2f}")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Data-parallel training on simulated devices: bounds, gradients, programs, `fit`."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI

import numpyro_sgp as sgp
from tests import conftest  # noqa: F401, its settings, for the child too

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, BATCH = 1040, 208
KEY = jax.random.key(3)
STEPS = 20

CASES = {
    "SVGP": sgp.SVGP(7),
    "SOLVEGP": sgp.SOLVEGP(5, 4),
    "tight": sgp.SVGP(7, tight="diagonal"),
    "MonteCarlo": sgp.SVGP(7),
}


def process(X, y=None, num_rows=None):
    """Regression by one latent function."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def network(X, y=None, num_rows=None):
    """Three latent functions with kernels of their own, by random nodes."""
    lengthscale = numpyro.param("lengthscale", jnp.array([0.5, 1.0, 2.0]))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(jnp.ones(3), lengthscale), X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f[0] + f[1] * jnp.tanh(f[2]), 0.3), obs=y)


def inference(case):
    model, rule = process, None
    if case == "MonteCarlo":
        model, rule = network, sgp.MonteCarlo(4)
    guide = sgp.AutoSparseGP(model, CASES[case])
    return SVI(model, guide, optax.adam(0.02), sgp.TraceGP_ELBO(rule))


def make_data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(NUM_ROWS, 2))
    return X, np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=NUM_ROWS)


# ---- in a child with several devices --------------------------------------------------


def deviation(found, known):
    """The largest of the leaves, each relative to its own size."""
    each = jax.tree.map(
        lambda a, b: np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b)), found, known
    )
    return float(max(jax.tree.leaves(each)))


def bound_and_gradients(case, mesh):
    """Deviation of a loss and its gradients, and the program that gave them."""
    svi = inference(case)
    X, y = (a[:BATCH] for a in make_data())
    state = svi.init(KEY, X, y, num_rows=NUM_ROWS)
    rng = np.random.default_rng(1)
    params = svi.optim.get_params(state.optim_state)
    params = jax.tree.map(lambda p: p + 0.05 * rng.normal(size=p.shape), params)

    def loss(params, X, y):
        params = svi.constrain_fn(params)
        return svi.loss.loss(KEY, params, svi.model, svi.guide, X, y, num_rows=NUM_ROWS)

    step = jax.jit(jax.value_and_grad(loss))
    known = step(params, X, y)
    X, y = jax.device_put((X, y), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        compiled = step.lower(params, X, y).compile()
    params = jax.device_put(params, compiled.input_shardings[0][0])
    return {
        "deviation": deviation(compiled(params, X, y), known),
        "program": program(compiled.as_text(), mesh.size),
    }


def program(text, num_devices):
    """Collectives of a compiled program, and arrays in it with all rows of a batch."""
    names = r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(rf"{names}(?:-start)?\(", text)
    shape = re.compile(r"\w+\[([\d,]*)\]")
    sizes = {kind: 0 for _, kind in found}
    for shapes, kind in found:
        for dims in shape.findall(shapes):
            sizes[kind] += int(np.prod([int(d) for d in dims.split(",") if d]))
    arrays = {tuple(dims.split(",")) for dims in shape.findall(text)}
    return {
        "numbers": sizes,
        "whole": sorted(dims for dims in arrays if str(BATCH) in dims),
        "parts": len([dims for dims in arrays if str(BATCH // num_devices) in dims]),
    }


def trainings(mesh):
    """Deviations of trainings on the mesh from that on one device."""
    svi, data = inference("SVGP"), make_data()
    held_out = tuple(a[:30] for a in data)

    def fit(mesh, data=data, steps=STEPS, **options):
        options = {"num_rows": NUM_ROWS, "batch_size": BATCH, "chunk": 10, **options}
        options |= {"validation": held_out, "every": 10, "progress_bar": False}
        return sgp.fit(svi, KEY, data, steps, mesh=mesh, **options)

    def apart(result):
        return deviation(result[:1] + result[2:4], known[:1] + known[2:4])

    known = fit(None)
    found = {"arrays of the host": apart(there := fit(mesh))}
    found["on devices"] = apart(fit(mesh, tuple(jnp.asarray(a) for a in data)))
    # From the mesh to one device and back, and bit for bit on the mesh.
    with tempfile.TemporaryDirectory() as folder:
        fit(mesh, steps=10, checkpoint=folder)
        again = fit(mesh, checkpoint=folder)
    with tempfile.TemporaryDirectory() as folder:
        fit(mesh, steps=10, checkpoint=folder)
        found["from the mesh to one"] = apart(fit(None, checkpoint=folder))
    found["resumed"] = 0.0 if deviation(again[:1], there[:1]) == 0.0 else 1.0
    # The user's own loop.
    from numpyro_sgp.training.rows import Rows

    source = Rows(data, BATCH, True, tuple(jax.random.key_data(KEY).tolist()))
    state = svi.init(KEY, *source.sample(BATCH), num_rows=NUM_ROWS)
    update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_rows=NUM_ROWS))
    losses = []
    for step in range(5):
        rows = jax.device_put(source.batch(step), NamedSharding(mesh, PartitionSpec("data")))
        with jax.set_mesh(mesh):
            state, loss = update(state, *rows)
        losses.append(float(loss))
    found["svi.update"] = deviation(np.array(losses), np.asarray(known.losses[:5]))
    return found


def child(num_devices):
    assert jax.device_count() == num_devices
    mesh = Mesh(jax.devices(), ("data",))
    found = {case: bound_and_gradients(case, mesh) for case in CASES}
    print(json.dumps({**found, "trainings": trainings(mesh)}))


if __name__ == "__main__":
    child(int(sys.argv[1]))

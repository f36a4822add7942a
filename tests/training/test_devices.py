"""Data-parallel training on simulated devices: bounds, gradients, programs, `train`."""

import json
import os
import re
import socket
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
from numpyro_sgp.training.rows import Rows
from tests import conftest  # noqa: F401, its settings, for the child too

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, BATCH = 1040, 208
STEPS = 20

CASES = {
    "SVGP": sgp.SVGP(7),
    "SOLVEGP": sgp.SOLVEGP(5, 4),
    "tight": sgp.SVGP(7, tight="diagonal"),
    "MonteCarlo": sgp.SVGP(7),
}


def key():
    return jax.random.key(3)  # not before jax.distributed.initialize


def process(X, y=None, num_rows=None):
    """Regression by one latent function."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def network(X, y=None, num_rows=None):
    """Three latent functions with kernels of their own, by random nodes."""
    lengthscale = numpyro.param("lengthscale", jnp.array([0.5, 1.0, 2.0]))
    kernel = sgp.kernels.RBF(jnp.ones(3), lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f[0] + f[1] * jnp.tanh(f[2]), 0.3), obs=y)


def inference(case):
    model, rule = process, None
    if case == "MonteCarlo":
        model, rule = network, sgp.MonteCarlo(4)
    guide = sgp.AutoSparseGP(model, CASES[case])
    # At the prior slopes by Z are rounding alone, 1e-14 here, which Adam divides by itself
    # and its 1e-8; what are true slopes are over 0.1.
    optimiser = optax.adam(0.02, eps=1e-4)
    return SVI(model, guide, optimiser, sgp.TraceGP_ELBO(rule))


def make_data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(NUM_ROWS, 2))
    return X, np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=NUM_ROWS)


# ---- in a child with several devices --------------------------------------------------


def deviation(found, known):
    """The largest of the leaves, each relative to its own size."""

    def one(a, b):
        assert np.shape(a) == np.shape(b)
        return np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))

    each = jax.tree.map(one, found, known)
    return float(max(jax.tree.leaves(each)))


def bound_and_gradients(case, mesh):
    """Deviation of a loss and its gradients, and the program that gave them."""
    svi = inference(case)
    X, y = (a[:BATCH] for a in make_data())
    state = svi.init(key(), X, y, num_rows=NUM_ROWS)
    rng = np.random.default_rng(1)
    params = svi.optim.get_params(state.optim_state)
    params = jax.tree.map(lambda p: p + 0.05 * rng.normal(size=p.shape), params)

    def loss(params, X, y):
        params = svi.constrain_fn(params)
        return svi.loss.loss(key(), params, svi.model, svi.guide, X, y, num_rows=NUM_ROWS)

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
        return sgp.train(svi, key(), data, steps, mesh=mesh, **options)

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
    source = Rows(data, BATCH, True, tuple(jax.random.key_data(key()).tolist()))
    state = svi.init(key(), *source.sample(BATCH), num_rows=NUM_ROWS)
    update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_rows=NUM_ROWS))
    losses, split = [], NamedSharding(mesh, PartitionSpec("data"))
    for step in range(5):
        rows = jax.device_put(source.batch(step), split)
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


def host(process, port):
    """One of two hosts, each with two devices and half of each batch."""
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    mesh, (X, y) = Mesh(jax.devices(), ("data",)), make_data()
    svi, options = inference("SVGP"), {"num_rows": NUM_ROWS, "progress_bar": False}
    options |= {"init_rows": BATCH, "validation": (X[:30], y[:30]), "every": 10}

    def batches(parts):
        each = np.arange(NUM_ROWS).reshape(-1, 2, BATCH // 2)[:, parts]
        return [(X[rows.ravel()], y[rows.ravel()]) for rows in each]

    def bare(result):
        return jax.tree.map(np.asarray, (*result[:1], *result[2:4]))

    shared = bare(sgp.train(svi, key(), batches([process]), 10, mesh=mesh, **options))
    alone = bare(sgp.train(inference("SVGP"), key(), batches([0, 1]), 10, **options))
    # Files of its own, and checkpoints that the first host writes.
    options |= {"mesh": mesh, "batch_size": BATCH}
    data, folder = (X[process::2], y[process::2]), sys.argv[4]
    options["every"] = 5
    sgp.train(svi, key(), data, 5, checkpoint=folder, **options)
    again = bare(sgp.train(svi, key(), data, 10, checkpoint=folder, **options))
    whole = bare(sgp.train(svi, key(), data, 10, **options))
    sums = [float(np.sum(a)) for a in jax.tree.leaves(whole)]
    found = {"shared": deviation(shared, alone), "resumed": deviation(again, whole)}
    print(json.dumps({**found, "sums": sums}))


# ---- in the parent --------------------------------------------------------------------


def start(*args, num_devices):
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, __file__, *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def answer(process):
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.slow)])
def found(request):
    return answer(start("devices", request.param, num_devices=request.param))


@pytest.mark.slow
def test_bounds_and_gradients_are_those_of_one_device(found):
    assert all(found[case]["deviation"] < 1e-10 for case in CASES), found


@pytest.mark.slow
def test_rows_are_split_and_only_parameters_travel(found):
    for case in CASES:
        program = found[case]["program"]
        assert program["numbers"].keys() == {"all-reduce"}, program
        # No array in it has the rows of a whole batch.
        assert program["whole"] == [] and program["parts"] > 5, program
        # Gradients, and one number for each node: fewer than K_uf has.
        assert program["numbers"]["all-reduce"] < 7 * BATCH / 2


@pytest.mark.slow
def test_trainings_are_those_of_one_device(found):
    for name, value in found["trainings"].items():
        assert value < 1e-10, (name, value)
    assert found["trainings"]["resumed"] == 0.0


@pytest.mark.slow
def test_two_hosts_train_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    hosts = [start("host", i, port, tmp_path, num_devices=2) for i in (0, 1)]
    one, other = map(answer, hosts)
    assert one == other
    assert one["shared"] < 1e-10 and one["resumed"] == 0.0
    assert len(list(tmp_path.glob("*.npz"))) == 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mesh": 4}, TypeError, "mesh must be a mesh of devices.*got int"),
        ({"batch_size": 10}, ValueError, "4 devices.*10 rows.*multiple of 4, such as 8"),
        ({"batch_size": 3}, ValueError, "3 rows.*such as 4"),
        ({"batch_size": None, "data": [make_data()[0][:6]]}, ValueError, "6 rows"),
        ({"batch_size": 2000}, ValueError, "between 1 and the 1040 rows"),
    ],
)
def test_what_cannot_be_split_is_refused(options, error, match):
    mesh = Mesh(np.array(jax.devices() * 4), ("data",))
    options = {"data": make_data(), "mesh": mesh, "batch_size": BATCH, **options}
    with pytest.raises(error, match=match):
        sgp.train(inference("SVGP"), key(), num_steps=5, num_rows=NUM_ROWS, **options)


if __name__ == "__main__":
    run = {"devices": child, "host": host}[sys.argv[1]]
    run(*map(int, sys.argv[2:4]))

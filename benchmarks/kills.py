"""
Kills a training at random moments by SIGKILL, resumes it each time, and compares the
result with that of an undisturbed training, bit for bit.

    python benchmarks/kills.py
    python benchmarks/kills.py --kills 3 --steps 5000

A checkpoint is written after each chunk of 20 steps. Kills are of three kinds in turn: up
to a second after a new checkpoint; at any time from the start of the process, when it may
still import, compile or read a checkpoint; and where a file is seen that is half written.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_sgp as sgp


def model(X, y=None, num_rows=None):
    """GP regression with a random lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def train(folder, steps):
    """The training that is killed; writes its result when it is done."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3.0, 3.0, (2000, 2)).astype(np.float32)
    y = np.sin(2.0 * X).sum(axis=1)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(16))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    result = sgp.train(
        svi,
        jax.random.key(1),
        (X[:1800], y[:1800]),
        steps,
        num_rows=1800,
        batch_size=64,
        validation=(X[1800:], y[1800:]),
        every=500,
        checkpoint=folder,
        save_every=0.0,
        chunk=20,
        progress_bar=False,
    )
    leaves = [result.params, result.losses, result.nlpd, result.state.optim_state]
    arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(leaves))}
    np.savez(folder / "result.npz", **arrays)


def start(folder, steps):
    """The training in a process of its own."""
    command = [sys.executable, __file__, "--child", str(folder), "--steps", str(steps)]
    return subprocess.Popen(command)


def steps_done(folder):
    """The number of steps of the newest checkpoint."""
    return max((int(p.stem[5:]) for p in folder.glob("step-*.npz")), default=0)


def half_written(folder):
    """Files that a kill has left, and when they were written."""
    return {(path.name, path.stat().st_mtime_ns) for path in folder.glob("*.part")}


def main(args):
    """Trains with and without kills."""
    if args.child is not None:
        train(args.child, args.steps)
        return
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Path(folder, "calm"), Path(folder, "killed")
        for path in (calm, killed):
            path.mkdir()
        begin = time.monotonic()
        if start(calm, args.steps).wait() != 0:
            raise SystemExit("The undisturbed training failed.")
        whole = time.monotonic() - begin
        print(f"undisturbed: {args.steps} steps in {whole:.1f} s", flush=True)
        halves = 0
        for kill in range(args.kills):
            before, old = steps_done(killed), half_written(killed)
            process = start(killed, args.steps)
            if kill % 3 == 1:
                time.sleep(rng.uniform(0.0, 0.5 * whole))
            else:
                while steps_done(killed) <= before and process.poll() is None:
                    time.sleep(0.01)
                time.sleep(rng.uniform(0.0, 1.0))
            if kill % 3 == 2:
                while not list(killed.glob("*.part")) and process.poll() is None:
                    pass
            process.kill()
            process.wait()
            parts = len(half_written(killed) - old)
            halves += parts
            print(
                f"kill {kill + 1}: {before} -> {steps_done(killed)} steps, "
                f"{parts} files half written",
                flush=True,
            )
        if start(killed, args.steps).wait() != 0:
            raise SystemExit("The last resumption failed.")
        with np.load(calm / "result.npz") as a, np.load(killed / "result.npz") as b:
            same = a.files == b.files and all(
                a[k].tobytes() == b[k].tobytes() for k in a.files
            )
        print(f"{args.kills} kills, {halves} in the middle of a file: ", end="")
        print("identical" if same else "DIFFERENT")
        if not same:
            raise SystemExit(1)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

"""
Steps per second and resident memory of training from a file and from memory.

    python benchmarks/rows_on_disk.py
    python benchmarks/rows_on_disk.py --rows 2000000 --repeats 1

Writes a memory-mapped file of 20 million rows and 9 columns (float32, 800 MB with y) to a
temporary folder, which it deletes, and trains on it and on 100,000 rows in memory in turn,
each in a process of its own. The seconds are those of a second call of ``train``, which
compiles nothing. Memory: the peak of all resident pages (VmHWM, with those of the file
that are mapped, which the system may take back at any time) and of those that belong to the
process alone (RssAnon).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_sgp as sgp

COLUMNS = 9


def model(X, y=None, num_rows=None):
    """GP regression with a random lengthscale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def write(folder, num_rows, size=500_000):
    """X and y as files, a part at a time."""
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float32, (num_rows, COLUMNS))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (num_rows,))
    rng = np.random.default_rng(0)
    for i in range(0, num_rows, size):
        part = rng.normal(size=(min(size, num_rows - i), COLUMNS)).astype(np.float32)
        X[i : i + size] = part
        y[i : i + size] = np.sin(part[:, 0]) + 0.1 * part[:, 1]
    X.flush()
    y.flush()


def memory():
    """Resident memory of this process in MB, by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (
        line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS", "Rss"))
    )
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}


class Peak(threading.Thread):
    """The largest RssAnon and RssFile, looked at twenty times a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.found = {"RssAnon": 0.0, "RssFile": 0.0}

    def run(self):
        while True:
            now = memory()
            self.found = {k: max(v, now[k]) for k, v in self.found.items()}
            time.sleep(0.05)


def train(args):
    """One training; prints its figures."""
    peak = Peak()
    before = memory()
    peak.start()
    mode = None if args.child == "memory" else "r"
    X, y = (np.load(args.folder / f"{name}.npy", mmap_mode="r") for name in "Xy")
    if mode is None:
        X, y = np.array(X[: args.few]), np.array(y[: args.few])
    guide = sgp.AutoSparseGP(model, sgp.SVGP(args.inducing))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())

    def run(steps):
        options = {"batch_size": args.batch, "progress_bar": False}
        return sgp.train(svi, jax.random.key(0), (X, y), steps, num_rows=len(X), **options)

    begin = time.perf_counter()
    run(50)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    start = run(1)
    overhead = time.perf_counter() - begin
    begin, cpu = time.perf_counter(), time.process_time()
    result = run(args.steps)
    seconds = time.perf_counter() - begin - overhead
    cpu = time.process_time() - cpu - overhead
    found = {
        "data": args.child,
        "rows": len(X),
        "steps_per_s": round((args.steps - 1) / seconds, 1),
        "cpu_ms_per_step": round(1e3 * cpu / (args.steps - 1), 2),
        "first_call_s": round(first, 1),
        "start_s": round(overhead, 2),
        "VmHWM_MB": round(memory()["VmHWM"]),
        "RssAnon_MB": round(peak.found["RssAnon"]),
        "RssFile_MB": round(peak.found["RssFile"]),
        "imports_MB": round(before["VmRSS"]),
        "loss": [round(float(start.losses[0])), round(float(result.losses[-1]))],
    }
    print(json.dumps(found))


def main(args):
    """File and memory in turn."""
    if args.child is not None:
        train(args)
        return
    needed = 1.2 * args.rows * (COLUMNS + 1) * 4
    if shutil.disk_usage(args.temporary or tempfile.gettempdir()).free < needed:
        raise SystemExit(f"Less than {needed / 1e6:.0f} MB are free; see --temporary.")
    with tempfile.TemporaryDirectory(dir=args.temporary) as folder:
        write(Path(folder), args.rows)
        for _ in range(args.repeats):
            for kind in ("memory", "file"):
                command = [sys.executable, __file__, "--child", kind, "--folder", folder]
                for name in ("few", "inducing", "batch", "steps"):
                    command += [f"--{name}", str(getattr(args, name))]
                subprocess.run(command, check=True)


def parse(argv=None):
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000_000, help="in the file")
    parser.add_argument("--few", type=int, default=100_000, help="rows in memory")
    parser.add_argument("--inducing", type=int, default=64, help="M")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temporary", help="where the file is made")
    parser.add_argument("--child", choices=("memory", "file"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())

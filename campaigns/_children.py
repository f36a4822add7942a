"""
A training, a saved model and a table of results in processes of their own, which may be
killed.

Children are forked from a process that has imported all and has no JAX backend yet, so
that none of its threads is missing in them; programs are compiled once, into a cache in a
folder.
"""

import contextlib
import hashlib
import json
import mmap
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_sgp as sgp
from campaigns._table import Found, Table
from numpyro_sgp.training import checkpoint

#: Seconds after which a child hangs.
LONGEST = 120.0
STEPS, CHUNK = 800, 20
ROWS = np.linspace(-3.0, 3.0, 60, dtype=np.float32)[:, None]
DATA = ROWS, np.sin(2.0 * ROWS[:, 0])


class Told(NamedTuple):
    """
    How a child ended.

    :param end: "done", "killed by 9" or the class of an error.
    :param text: what it returned, or the error's message.
    :param seconds: how long it ran.
    """

    end: str
    text: str
    seconds: float


class Shared:
    """A number that children write and the parent reads."""

    def __init__(self):
        self._memory = mmap.mmap(-1, 8)

    @property
    def value(self) -> int:
        """The number."""
        return int.from_bytes(self._memory[:8], "little")

    @value.setter
    def value(self, number: int):
        self._memory[:8] = int(number).to_bytes(8, "little")


class Child:
    """
    A process that runs a function.

    :param work: what it runs; returns a text.
    :param seconds: after which it hangs.
    """

    def __init__(self, work: Callable[[], str], seconds: float = LONGEST):
        self._began, self._longest = time.monotonic(), seconds
        self._from, to = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of JAX, which children do not share
            self.pid = os.fork()
        if not self.pid:
            _live(work, to)
        os.close(to)

    def send(self, number: int) -> None:
        """A signal."""
        os.kill(self.pid, number)

    def told(self) -> Told:
        """Its end, for which it has so many seconds."""
        content = b""
        while True:
            left = self._began + self._longest - time.monotonic()
            ready = left > 0 and select.select([self._from], [], [], left)[0]
            part = os.read(self._from, 65536) if ready else b""
            content += part
            if not part:
                break
        if not ready:
            self.send(signal.SIGKILL)
        os.close(self._from)
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self._began
        if not ready:
            return Told("hung", f"not done in {self._longest:g} s", seconds)
        if os.WIFSIGNALED(status):
            return Told(f"killed by {os.WTERMSIG(status)}", "", seconds)
        try:
            return Told(*json.loads(content), seconds)
        except ValueError:
            return Told("silent", f"status {status}", seconds)


def _live(work, to):
    """What a child does; does not return."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "(?s).*cannot be read")
            found = "done", work()
    except BaseException as error:
        found = type(error).__name__, str(error) or traceback.format_exc()
    with contextlib.suppress(BaseException):
        with open(to, "wb") as file:
            file.write(json.dumps(found).encode())
    os._exit(0)


def programs_in(folder: Path) -> None:
    """Compiled programs are kept in a folder; to be called in a child."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def model(X, y=None, num_rows=None):
    """GP regression."""
    lengthscale = numpyro.param("lengthscale", 1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(1.0, lengthscale), X))
    with numpyro.plate("data", num_rows or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def digest(tree) -> str:
    """Of all bits of a tree of arrays."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        found.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def train(folder: Path, programs: Path, *, steps: int = STEPS, seed: int = 1) -> str:
    """The training that is disturbed, with a checkpoint after each chunk."""
    programs_in(programs)
    guide = sgp.AutoSparseGP(model, sgp.SVGP(4))
    svi = SVI(model, guide, optax.adam(0.01), sgp.TraceGP_ELBO())
    options = {"batch_size": 10, "chunk": CHUNK, "num_rows": len(ROWS)}
    options |= {"checkpoint": folder, "save_every": 0.0, "progress_bar": False}
    result = sgp.train(svi, jax.random.key(seed), DATA, steps, **options)
    return digest([result.params, result.losses, result.state.optim_state])


def counting(saved: Shared) -> None:
    """Says after each checkpoint of how many steps it is; to be called in a child."""
    real = checkpoint.Checkpoints.save

    def save(self, step, tree):
        real(self, step, tree)
        saved.value = step

    checkpoint.Checkpoints.save = save


def plain(X, y=None):
    """What is fitted and saved."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.RBF(), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def untrained() -> sgp.Fitted:
    """A fit to be saved, which took no training."""
    guide = sgp.AutoSparseGP(plain, sgp.SVGP(4))
    svi = SVI(plain, guide, optax.sgd(0.1), sgp.TraceGP_ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), *DATA))
    return sgp.Fitted(guide, params, DATA, loss=svi.loss)


def save(path: Path, programs: Path, saved: Shared, times: int = 60) -> str:
    """A fit, again and again, each time with another number of seconds."""
    programs_in(programs)
    fitted = untrained()
    for _ in range(times):
        fitted.seconds = saved.value + 1.0
        fitted.save(path)
        saved.value = int(fitted.seconds)
    return "saved"


def tabulate(folder: Path, saved: Shared, blocks: int = 300) -> str:
    """A table of results of so many blocks."""
    table = Table("kills", folder)
    real = table._write

    def write():
        real()
        saved.value = len(table.blocks)

    table._write = write
    with contextlib.redirect_stdout(None):
        table.run(map(str, range(blocks)), lambda block: Found(1, [block] * 40, {}))
    return "kept"


def newest(folder: Path) -> int:
    """Steps of the newest checkpoint."""
    return max((int(path.stem[5:]) for path in folder.glob("step-*.npz")), default=0)


def finished(place, folder, **options):
    """What is wrong with the result of a training that goes on undisturbed, or None."""
    told = Child(lambda: train(folder, place.programs, **options)).told()
    if told.end != "done":
        return f"does not go on: {told.end}: {told.text[:200]}"
    if told.text != place.known(**options):
        return "another result than that of the undisturbed training"
    if list(folder.glob("*.part")):
        return "a file that is half written is left"
    return None

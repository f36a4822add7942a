"""Checkpoints of training as plain files."""

import io
import json
import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.util import find_stack_level

_KEPT = 2


class Checkpoints:
    """
    A folder with the last two states of one training.

    A file is written by :func:`write_arrays`, at once or not at all, and each array in it
    has a checksum. So a kill leaves the files before it whole.

    :param folder: is made if it is not there.
    :param identity: what tells this training from others, as JSON has it.
    """

    def __init__(self, folder, identity: dict):
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ValueError(
                f"checkpoint must be a folder, but {self.folder} is a file."
            ) from None
        self.identity = identity
        self._unreadable = set()
        for part in self.folder.glob("step-*.part"):  # of a training that was killed
            part.unlink(missing_ok=True)

    def save(self, step: int, tree):
        """
        :param step: number of steps done, the name of the file.
        :param tree: of arrays and random keys.
        """
        leaves = {str(i): _data(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
        path = self.folder / f"step-{step:012d}.npz"
        write_arrays(path, {"identity": np.array(json.dumps(self.identity)), **leaves})
        self._unreadable.discard(path)
        # What is newer than this one could not be read: it was not gone on from.
        whole = [p for p in self._paths() if p <= path and p not in self._unreadable]
        for old in set(self._paths()) - set(whole[:_KEPT]):
            old.unlink(missing_ok=True)

    def load(self, like):
        """
        The newest state that can be read, or None.

        :param like: a tree of the same structure.
        :raises ValueError: if it is that of another training.
        :raises OSError: if the system does not let it be read.
        """
        for path in self._paths():
            content = path.read_bytes()
            try:
                with np.load(io.BytesIO(content)) as file:
                    found = dict(file)
                identity = json.loads(str(found.pop("identity")))
            except Exception as error:  # readers of damaged files raise whatever they like
                warnings.warn(
                    f"The checkpoint {path} cannot be read ({type(error).__name__}: "
                    f"{error}), so the one before it is taken, or training begins anew.",
                    UserWarning,
                    stacklevel=find_stack_level(),
                )
                self._unreadable.add(path)
                continue
            self._check(identity)
            leaves, structure = jax.tree.flatten(like)
            values = [_restored(found[str(i)], leaf) for i, leaf in enumerate(leaves)]
            return jax.tree.unflatten(structure, values)
        return None

    def _check(self, found):
        names = sorted(set(found) | set(self.identity))
        other = [n for n in names if found.get(n) != self.identity.get(n)]
        if other:
            told = "; ".join(
                f"{n}: {found.get(n)} there, {self.identity.get(n)} here" for n in other
            )
            raise ValueError(
                f"The checkpoints in {self.folder} are of another training ({told}). Use "
                "another folder, delete this one, or call fit with the same arguments."
            )

    def _paths(self):
        """The newest first."""
        return sorted(self.folder.glob("step-*.npz"), reverse=True)


def _data(leaf):
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _restored(value, like):
    if is_key(like):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
    return value if isinstance(like, np.ndarray) else jax.device_put(value)


def is_key(leaf) -> bool:
    """Whether a leaf of a state is a random key with a type of its own."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """
    Writes a ``.npz`` file under another name, flushes it to the disk and then renames it,
    which POSIX does at once or not at all.
    """
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    _sync_folder(path.parent)


def _sync_folder(folder):
    """Makes a renaming last through a power failure; not every system has it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

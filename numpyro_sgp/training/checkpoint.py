"""Checkpoints of training as plain files."""

import os
import warnings
import zlib
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.util import find_stack_level

from numpyro_sgp.training.archive import CHECKPOINT, read_archive, write_archive

_KEPT = 2


class Checkpoints:
    """
    A folder with the last two states of one training.

    A file is written by :func:`~numpyro_sgp.training.archive.write_archive`, at once or not
    at all, and with checksums. So a kill leaves the files before it whole.

    Inside ``with`` the folder is one's own, where the system has ``flock``: a lock that
    ends with the process.

    :param folder: is made if it is not there.
    :param identity: what tells this training from others, as JSON has it.
    :param writes: whether this process writes; others only read.
    :raises ValueError: if it is a file.
    """

    def __init__(self, folder, identity: dict, *, writes: bool = True):
        self.folder = Path(folder)
        self.identity = identity
        self._writes, self._lock = writes, None
        self._unreadable = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(
                f"checkpoint must be a folder, but {self.folder} is a file, or in one."
            ) from None

    def __enter__(self):
        """
        :raises ValueError: if another training is in the folder.
        """
        if self._writes:
            self._lock = _locked(self.folder)
            for part in self.folder.glob("step-*.part"):  # of a training that was killed
                part.unlink(missing_ok=True)
        return self

    def __exit__(self, *error):
        if self._lock is not None:
            # Workers of a loader that were forked hold it open, and with it the lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)

    def save(self, step: int, tree):
        """
        :param step: number of steps done, the name of the file.
        :param tree: of arrays and random keys.
        """
        leaves = {str(i): _data(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
        path = self.folder / f"step-{step:012d}.npz"
        self.folder.mkdir(parents=True, exist_ok=True)  # someone may have removed it
        write_archive(path, {"identity": self.identity}, leaves, CHECKPOINT)
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
            try:
                header, found = read_archive(path, {"identity"}, CHECKPOINT)
            except ValueError as error:
                warnings.warn(
                    f"This checkpoint cannot be read, so the one before it is taken, or "
                    f"training begins anew: {error}",
                    stacklevel=find_stack_level(),
                )
                self._unreadable.add(path)
                continue
            self._check(header["identity"])
            leaves, structure = jax.tree.flatten(like)
            values = [_restored(found[str(i)], leaf) for i, leaf in enumerate(leaves)]
            return jax.tree.unflatten(structure, values)
        return None

    def _check(self, found):
        names = sorted(set(found) | set(self.identity))
        other = [n for n in names if found.get(n) != self.identity.get(n)]
        if other:
            told = "; ".join(_difference(n, found, self.identity) for n in other)
            raise ValueError(
                f"The checkpoints in {self.folder} are of another training ({told}). Use "
                "another folder, delete this one, or call train with the same arguments."
            )

    def _paths(self):
        """The newest first."""
        return sorted(self.folder.glob("step-*.npz"), reverse=True)


def _difference(name, there, here) -> str:
    """
    What two trainings have at an entry; of leaves by name the first that one alone has.
    """
    told = []
    for own, other in ((there, here), (here, there)):
        value = own.get(name)
        if _are_named(value) and _are_named(other.get(name)):
            leaves = [leaf for leaf in value if leaf not in other[name]]
            more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
            value = " ".join(map(str, leaves[0])) + more if leaves else "nothing else"
        told.append(value)
    return f"{name}: {told[0]} there, {told[1]} here"


def _are_named(value) -> bool:
    """Whether it is a list of leaves as :func:`shapes_of` has them."""
    leaves = value if isinstance(value, list) else []
    named = [v for v in leaves if isinstance(v, list) and v and isinstance(v[0], str)]
    return 0 < len(named) == len(leaves)


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


def _locked(folder):
    """A handle of a folder that no other process has; None where there are no locks."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(
            f"Another training has the folder of checkpoints {folder} now. Use another "
            "folder, or wait until that one has ended."
        ) from None
    except OSError:  # a file system without locks
        pass
    return handle


def checksum(array):
    """Of values, types and shape."""
    array = np.asarray(array)
    return [zlib.crc32(np.ascontiguousarray(array)), str(array.dtype), *array.shape]


def shapes_of(tree):
    """Shapes and dtypes of a tree of arrays, but for those that grow."""
    leaves = jax.tree_util.tree_leaves_with_path((tree["state"], tree["best"]))
    return [
        [jax.tree_util.keystr(path), list(jnp.shape(leaf)), str(leaf.dtype)]
        for path, leaf in leaves
    ]

"""What happens to a process and its files: kills within writes, full disks, odd clocks."""

import builtins
import errno
import io
import os
import random
import resource
import signal
import time
from pathlib import Path

#: Errors that a disk gives, by what is wrong.
DISKS = {
    "full disk": errno.ENOSPC,
    "quota": errno.EDQUOT,
    "read-only file system": errno.EROFS,
    "no permission": errno.EACCES,
    "broken disk": errno.EIO,
}
#: Calls that a write consists of.
CALLS = "open", "write", "fsync", "replace"


class _File:
    """A file of which each write is looked at."""

    def __init__(self, file, before):
        self._file, self._before = file, before

    def write(self, content):
        self._before("write", lambda: self._half(content))
        return self._file.write(content)

    def _half(self, content):
        self._file.write(content[: len(content) // 2])
        self._file.flush()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __iter__(self):
        return iter(self._file)


def watch(folder: Path, before) -> None:
    """
    Calls ``before(call, half)`` before each of :data:`CALLS` to files of a folder;
    ``half`` writes the first half of what is to be written.
    """
    open_, fsync, replace, unlink = builtins.open, os.fsync, os.replace, os.unlink

    def inside(path):
        try:
            return str(folder) in os.fsdecode(path)
        except TypeError:
            return False

    def opened(path, mode="r", *given, **options):
        writes = inside(path) and any(letter in mode for letter in "wxa+")
        if writes:
            before("open", lambda: None)
        file = open_(path, mode, *given, **options)
        return _File(file, before) if writes else file

    def synced(handle):
        before("fsync", lambda: None)
        fsync(handle)

    def replaced(source, target, **options):
        if inside(target):
            before("replace", lambda: None)
        replace(source, target, **options)

    def unlinked(path, **options):
        if inside(path):
            before("unlink", lambda: None)
        unlink(path, **options)

    builtins.open = io.open = opened
    os.fsync, os.replace, os.unlink = synced, replaced, unlinked


def die_within(folder: Path, count: int, half: bool) -> None:
    """SIGKILL at a call of :data:`CALLS`, after so many."""
    left = [count]

    def before(call, write_half):
        left[0] -= 1
        if left[0] < 0:
            if half:
                write_half()
            os.kill(os.getpid(), signal.SIGKILL)

    watch(folder, before)


def refuse(folder: Path, call: str, number: int, count: int, times: float) -> None:
    """A call gives an error of the system, after so many, and so many times."""
    left = [count, times]

    def before(name, write_half):
        if name != call:
            return
        left[0] -= 1
        if left[0] < 0 < left[1]:
            left[1] -= 1
            write_half()
            raise OSError(number, os.strerror(number), str(folder))

    watch(folder, before)


def limit_files(size: int) -> None:
    """No file may be larger, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def limit_memory(more: int) -> None:
    """The process may have so many bytes more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def odd_clocks(seed: int) -> None:
    """Both clocks jump by up to a day, forward and back."""
    draw = random.Random(seed)
    for name in ("time", "monotonic"):
        real = getattr(time, name)
        setattr(time, name, lambda real=real: real() + draw.uniform(-86400.0, 86400.0))

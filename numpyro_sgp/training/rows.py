"""Batches of rows for training: shuffled from arrays and files, or from an iterator."""

import itertools
import mmap
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

import jax
import numpy as np

from numpyro_sgp.distributions.arguments import as_numbers
from numpyro_sgp.training.devices import Devices

_ROUNDS = 6  # of the Feistel cipher
_BLOCK_BYTES = 2**14  # of neighbouring rows in a file, read together
_BLOCK_ROWS = 256  # the same in rows, at most
_WINDOW = 256  # blocks whose rows are mixed
_READ_ROWS = 4096  # of a file between two releases of its pages
_SAMPLE = 8  # rows that tell data apart
_AHEAD = 2  # blocks of batches that are read while the device works
_GRACE = 3.0  # seconds for a block that is being read when training stops
_END = object()  # of an iterable


def permuted(index: np.ndarray, size: int, seed) -> np.ndarray:
    """
    Where a pseudo-random permutation of ``0, ..., size - 1`` takes some of these numbers.
    It is computed for each number by itself: memory does not grow with ``size``.

    A Feistel cipher on pairs of digits to the base ``ceil(sqrt(size))`` permutes at most
    ``size + 2 sqrt(size)`` numbers; what comes out too large goes through it again (Black
    and Rogaway 2002, Ciphers with Arbitrary Finite Domains: cycle walking).

    :param index: numbers below ``size``.
    :param seed: non-negative integers, of any length.
    """
    base = np.uint64(max(1, int(np.ceil(np.sqrt(size)))))
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)

    def cipher(x):
        left, right = np.divmod(x, base)
        for key in keys:
            left, right = right, left + _hashed(right + key, base)
            right -= base * (right >= base)
        return left * base + right

    found = cipher(np.asarray(index, np.uint64))
    while (outside := np.flatnonzero(found >= size)).size:
        found[outside] = cipher(found[outside])
    return found.astype(np.int64)


def _hashed(x, size):
    """Pseudo-random numbers below ``size``: splitmix64's finaliser, 32 bits of it."""
    half = np.uint64(32)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x >> half) * size) >> half


class Order:
    """
    The order in which rows are visited, epoch after epoch without a gap; each row once in
    each epoch. The rows of any step are computed from the step alone.

    Neighbouring rows stay together in blocks, whose places are permuted, and rows are
    mixed within windows of 256 blocks; a block of one row is a permutation of all rows.

    :param num_rows: N.
    :param block: rows of a block; 0 for the order of the data.
    :param seed: non-negative integers.
    """

    def __init__(self, num_rows: int, block: int, seed: tuple[int, ...]):
        self.num_rows, self.block, self.seed = num_rows, block, seed
        self._window = num_rows if block == 1 else _WINDOW * block

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Rows at the places ``start, ..., stop - 1`` of all epochs."""
        parts = []
        while start < stop:
            epoch, place = divmod(start, self.num_rows)
            end = min(place + stop - start, self.num_rows)
            if self.block:
                end = min(end, place + self._window - place % self._window)
                parts.append(self._shuffled(epoch, place, end))
            else:
                parts.append(np.arange(place, end))
            start += end - place
        return np.concatenate(parts)

    def _shuffled(self, epoch, place, end):
        """Rows at some places of an epoch, all in one window."""
        N, block, seed = self.num_rows, self.block, (*self.seed, epoch)
        if block == 1:
            return permuted(np.arange(place, end), N, seed)
        first = place - place % self._window
        random = np.random.default_rng((*seed, 1 + first))
        inside = random.permutation(min(self._window, N - first))
        number, inside = np.divmod(first + inside[place - first : end - first], block)
        # What is left over beside whole blocks stays last, and all rows are turned by a
        # random number, so that other rows are left over, and meet, in each epoch.
        whole = np.arange(first // block, min(first // block + _WINDOW, N // block))
        to = permuted(whole, N // block, (*seed, 0))
        to = np.append(to, N // block)[number - first // block]
        turn = int(np.random.default_rng((*seed, 0)).integers(N))
        return (to * block + inside + turn) % N


class Rows:
    """
    Batches of the rows of arrays.

    :param data: arrays with a common first axis.
    :param batch_size: rows of a batch.
    :param shuffle: as :func:`~numpyro_sgp.train` has it.
    :param seed: non-negative integers.
    :param devices: where batches are put; each of several hosts has rows of its own.
    """

    def __init__(self, data, batch_size, shuffle, seed, devices=None):
        data = [as_numbers(a, f"Array {i} of data") for i, a in enumerate(data)]
        data = tuple(a if hasattr(a, "shape") else np.asarray(a) for a in data)
        for i, array in enumerate(data):
            check_dtype(f"Array {i} of data", array)
        shapes = [np.shape(a) for a in data]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                "The arrays of data must have the same number of rows, their first axis, "
                f"but have the shapes {shapes}."
            )
        ((self.num_rows,),) = sizes
        self._devices = devices = devices or Devices()
        self.total_rows = self.num_rows * devices.hosts
        if batch_size is None or not 1 <= batch_size <= self.total_rows:
            raise ValueError(
                f"batch_size must be between 1 and the {self.total_rows} rows of the "
                f"data, got {batch_size}. For all rows in each step: "
                f"batch_size={self.total_rows}."
            )
        devices.check(batch_size)
        if shuffle < 0:
            raise ValueError(
                "shuffle must be True, False, or the number of rows of a block, got "
                f"{shuffle}."
            )
        self.batch_size, self._own_rows = batch_size, batch_size // devices.hosts
        #: Arrays on a device stay there: only row numbers travel.
        self.on_device = ()
        if devices.hosts == 1 and all(isinstance(a, jax.Array) for a in data):
            self.on_device = devices.copy(data)
        self._files = [file for a in data if (file := _file_of(a)) is not None]
        self._arrays = [a if self.on_device else np.asarray(a) for a in data]
        self.block_rows = int(shuffle)
        if shuffle is True and self._files:
            row_bytes = max(a.nbytes // self.num_rows for a in self._arrays)
            rows = min(_BLOCK_ROWS, _BLOCK_BYTES // max(row_bytes, 1))
            # A small file is read whole in any order.
            self.block_rows = max(1, min(rows, self.num_rows // _WINDOW**2))
        if devices.hosts > 1:
            seed = (*seed, jax.process_index())
        self._seed = seed
        self._order = Order(self.num_rows, self.block_rows, (*seed, 0))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of the arrays."""
        return [a.shape for a in self._arrays]

    def sample(self, num_rows: int) -> tuple:
        """Some rows at random, in the order of the data; of each host as many."""
        num_rows = min(-(-num_rows // self._devices.hosts), self.num_rows)
        rows = permuted(np.arange(num_rows), self.num_rows, (*self._seed, 1))
        return self._devices.gather(self._take(np.sort(rows)))

    def block(self, start: int, stop: int, size: int):
        """
        The batches of some steps, ``size`` of them with those that are left empty.

        :return: arrays of shape ``(size, batch_size, ...)``; the numbers of the rows where
            the arrays are on a device.
        """
        rows = self.rows(start, stop)
        shape = (size, self._own_rows)
        if self.on_device:
            block = _filled(rows, shape)
            return block if self._devices.mesh is None else self._devices.split(block, 1)
        return self._devices.split(tuple(_filled(a, shape) for a in self._take(rows)), 1)

    def fault(self, step: int, block, place: int) -> str | None:
        """
        What is not finite in the batch of a step, if anything is.

        :param block: of :meth:`block`, with that batch at ``place``; not looked at here.
        """
        return not_finite(self.batch(step), "data", self.rows(step, step + 1))

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows of the batches of some steps, one after the other."""
        return self._order(start * self._own_rows, stop * self._own_rows)

    def _take(self, rows):
        if not self._files:
            return tuple(a[rows] for a in self._arrays)
        # A file is read from front to back, a few pages at a time.
        found = [np.empty((len(rows), *a.shape[1:]), a.dtype) for a in self._arrays]
        order = np.argsort(rows)
        for some in np.array_split(order, -(-len(rows) // _READ_ROWS)):
            for taken, array in zip(found, self._arrays, strict=True):
                taken[some] = array[rows[some]]
            for file in self._files:
                _release(*file)
        return tuple(found)

    def batch(self, step: int) -> tuple:
        """The batch of one step."""
        return self._take(self.rows(step, step + 1))

    def identity(self) -> dict:
        """What tells these batches from others."""
        some = self.sample(_SAMPLE)
        return {
            "shapes of data": [list(shape) for shape in self.shapes],
            "dtypes of data": [str(a.dtype) for a in self._arrays],
            "some rows of data": [zlib.crc32(np.asarray(a).tobytes()) for a in some],
            "batch_size": self.batch_size,
            "rows of a shuffled block": self.block_rows,
        }


class Batches:
    """
    Batches of an iterable, which keeps their order.

    :param data: yields tuples of arrays; begun again at its end, unless it is an iterator.
    :param devices: where batches are put; each of several hosts has batches of its own,
        which together are one.
    """

    on_device, total_rows = (), None

    def __init__(self, data, devices=None):
        self._devices = devices or Devices()
        self._data, self._iterator = data, iter(data)
        self._once = self._iterator is data
        self.shapes, self._count = None, 0
        first = self._next()
        self._own_rows = self.shapes[0][0]
        self.batch_size = self._own_rows * self._devices.hosts
        self._devices.check(self.batch_size)
        self._put_back([first])

    def _next(self, again=True):
        batch = next(self._iterator, _END)
        if batch is _END and again and not self._once and self._count:
            self._iterator = iter(self._data)
            batch = next(self._iterator, _END)
        if batch is _END:
            raise ValueError(
                f"The iterator of data ended after {self._count} batches. Give one that "
                "has num_steps batches, or an iterable that can be begun again (a list, "
                "a loader; not a generator)."
            )
        if not hasattr(batch, "shape") and not isinstance(batch, tuple | list):
            raise TypeError(
                "Each batch of data must be a tuple of arrays, but batch "
                f"{self._count + 1} is a {type(batch).__name__}."
            )
        batch = (batch,) if hasattr(batch, "shape") else tuple(batch)
        shapes, told = [np.shape(a) for a in batch], None
        if () in shapes or len({shape[0] for shape in shapes}) != 1:
            told = (
                "Each batch of data must be a tuple of arrays with the same number of "
                f"rows, got shapes {shapes}."
            )
        elif shapes != (self.shapes or shapes):
            told = (
                f"Batch {self._count + 1} of data has arrays of shapes {shapes}, but those "
                f"of the first have {self.shapes}. Have the loader drop a last, smaller "
                "batch. (Arrays to take batches from are passed as a tuple: (X, y).)"
            )
        if told:
            self._iterator = itertools.chain([batch], self._iterator)  # found again
            raise ValueError(told)
        self.shapes = shapes
        self._count += 1
        return batch

    def _put_back(self, batches):
        self._iterator = itertools.chain(batches, self._iterator)
        self._count -= len(batches)

    def sample(self, num_rows: int) -> tuple:
        """The first batches, with so many rows or a few more, once; they are not lost."""
        batches = [self._next()]
        try:
            while len(batches) * self.batch_size < num_rows:
                batches.append(self._next(again=False))
        except ValueError:  # as far as they go; training will say what is wrong
            pass
        self._put_back(batches)
        found = tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        return self._devices.gather(found)

    def skip(self, num_batches: int):
        """Leave out batches that have been trained on."""
        for _ in range(num_batches):
            self._next()

    def block(self, start: int, stop: int, size: int):
        """The next batches, as :meth:`Rows.block` has them."""
        batches = [self._next() for _ in range(start, stop)]
        filled = tuple(
            _filled(np.concatenate(arrays), (size, self._own_rows))
            for arrays in zip(*batches, strict=True)
        )
        return self._devices.split(filled, 1)

    def fault(self, step: int, block, place: int) -> str | None:
        """What is not finite in the batch at ``place`` in a block, if anything is."""
        if not all(a.is_fully_addressable for a in block):  # on several hosts
            return None
        return not_finite([a[place] for a in block], f"batch {step + 1} of data")

    def identity(self) -> dict:
        """What tells these batches from others."""
        return {"shapes of a batch": [list(shape) for shape in self.shapes]}


def make_source(data, batch_size, shuffle, seed, devices=None) -> Rows | Batches:
    """Batches of what the user gave."""
    if hasattr(data, "shape"):
        data = (data,)
    if isinstance(data, tuple):
        return Rows(data, batch_size, shuffle, seed, devices)
    if not hasattr(data, "__iter__") or isinstance(data, str | bytes | dict):
        raise TypeError(
            "data must be a tuple of arrays, such as (X, y), or an iterable of batches, "
            f"got {type(data).__name__}."
        )
    known = data if isinstance(data, list) else []
    if len({np.ndim(a) for a in known if hasattr(a, "shape")}) > 1:
        raise ValueError(
            "data is a list of arrays with different numbers of axes, each of which would "
            "be a batch. Arrays to take batches from are passed as a tuple: (X, y)."
        )
    if batch_size is not None:
        raise ValueError(
            "batch_size is for a tuple of arrays, but data is an iterable "
            f"({type(data).__name__}), whose batches are taken as they come. Leave "
            "batch_size out, or pass the arrays as a tuple: (X, y)."
        )
    return Batches(data, devices)


def check_like(held_out, shapes):
    """Refuses held-out arrays that differ from the data in more than the number of rows."""
    found = [np.shape(a) for a in held_out]
    if [s[1:] for s in found] != [tuple(s[1:]) for s in shapes]:
        raise ValueError(
            f"validation has arrays of shapes {found}, but those of data are {shapes}: "
            "they may differ in the number of rows alone."
        )


def not_finite(arrays, of: str, rows=None) -> str | None:
    """
    Which of the arrays is not finite, and where, in words.

    :param of: what they are arrays of.
    :param rows: the numbers of their rows, if they are not 0, 1, ...
    """
    for i, array in enumerate(map(np.asarray, arrays)):
        wrong = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
        if wrong.any():
            found = np.flatnonzero(wrong) if rows is None else np.sort(rows[wrong])
            return (
                f"Array {i} of {of} is not finite in {wrong.sum()} rows"
                f"{'' if rows is None else ' of this batch'} (first: "
                f"{found[:5].tolist()}): drop or impute such rows."
            )
    return None


def check_dtype(what: str, array):
    """Refuses what JAX has no numbers for."""
    if isinstance(array, jax.Array):
        return
    dtype = np.asarray(array).dtype
    if dtype.kind not in "biuf" or not dtype.isnative:
        raise TypeError(
            f"{what} has the dtype {dtype}, which is none of JAX's real numbers. Convert "
            "it, with .astype(np.float32), say."
        )


def whole_batches(data, size: int, devices: Devices) -> Iterator[tuple[tuple, np.ndarray]]:
    """
    Batches of all rows in order, each of ``size`` rows, and which of them count: the last
    batch is filled up by its last row.
    """
    num_rows = len(data[0])
    for start in range(0, num_rows, size):
        index = np.arange(start, start + size)
        rows = np.minimum(index, num_rows - 1)
        batch = (*(a[rows] for a in data), index < num_rows)
        *batch, counts = devices.split(devices.share(batch), 0)
        yield tuple(batch), counts


def _filled(rows, shape):
    """Rows as ``(steps, batch_size, ...)``, with zeros at the end if there are too few."""
    if (missing := shape[0] * shape[1] - len(rows)) > 0:
        empty = np.zeros((missing, *rows.shape[1:]), rows.dtype)
        rows = np.concatenate([rows, empty])
    return rows.reshape(*shape, *rows.shape[1:])


def _file_of(array):
    """
    The memory map that an array looks into and how it was opened, or None. A copy of a
    part of a file is a ``np.memmap`` too, but looks into none.
    """
    mode = None
    while array is not None and not isinstance(array, mmap.mmap):
        mode = array.mode if isinstance(array, np.memmap) else mode
        array = getattr(array, "base", None)
    return None if array is None else (array, mode)


def _release(pages, mode):
    """
    Gives pages of a file back, which the system keeps as its cache: resident memory would
    otherwise grow to the size of the file. Only where nothing can be lost.
    """
    if mode == "r" and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def steps_between(begin, end, chunk, every):
    """Where chunks start and stop; they do not cross multiples of ``every``."""
    while begin < end:
        stop = min(begin + chunk, begin - begin % every + every, end)
        yield begin, stop
        begin = stop


def read_ahead(source, steps, chunk):
    """
    Blocks of batches, which a thread reads before they are needed. When this generator is
    closed, what is being read is waited for a moment only: a loader may hang.
    """
    # Where they are set for a block of code, they are set for its thread alone.
    x64, device = jax.config.jax_enable_x64, jax.config.jax_default_device

    def read(start, stop):
        with jax.enable_x64(x64), jax.default_device(device):
            return source.block(start, stop, chunk)

    waiting, tasks = deque(), SimpleQueue()
    # A daemon: the process can end while it hangs, which the threads of a pool prevent.
    reader = Thread(target=_work, args=(tasks,), name="read", daemon=True)
    reader.start()
    try:
        for step in itertools.chain(steps, [None] * _AHEAD):
            if step is not None:
                waiting.append((*step, Future()))
                tasks.put((waiting[-1][-1], read, step))
            if len(waiting) > _AHEAD or (step is None and waiting):
                start, stop, block = waiting.popleft()
                yield start, stop, block.result()
    finally:
        for *_, block in waiting:
            block.cancel()
        tasks.put(None)
        reader.join(_GRACE)


def _work(tasks: SimpleQueue) -> None:
    """Does tasks, in order, until there is a None."""
    while (task := tasks.get()) is not None:
        future, fn, args = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fn(*args))
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

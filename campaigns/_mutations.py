"""
Damaged and forged files: each is refused by name, or has what was written.

A file is damaged without a look at its checksums; a forged one has the checksums that go
with what it says, so that it may say other numbers, but nothing in it may be executed, end
the process, take longer than :data:`SECONDS` or more memory than :data:`MEMORY`.
"""

import contextlib
import copy
import hashlib
import io
import json
import re
import signal
import sys
import warnings
import zipfile
from collections import Counter
from functools import partial

import numpy as np

import numpyro_sgp as sgp
from campaigns import _disturbances as disturbances
from campaigns._children import Child, Shared, digest, plain, programs_in, save, train
from campaigns._table import Found
from numpyro_sgp.training.archive import read_archive
from numpyro_sgp.training.checkpoint import Checkpoints

SECONDS, MEMORY = 5, 2**30
#: What a reader of a file must not do. NumPy parses headers of arrays (`compile`), which
#: runs nothing.
FORBIDDEN = {
    "pickle.find_class",
    "marshal.loads",
    "exec",
    "import",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "ctypes.dlopen",
    "socket.connect",
    "os.remove",
    "os.rename",
    "shutil.rmtree",
}
#: What was seen since the last look; None while nothing is watched.
SEEN: list[str] | None = None


def _heard(event, given):
    if SEEN is not None and event in FORBIDDEN:
        SEEN.append(f"{event} {given!r}"[:100])


@contextlib.contextmanager
def watched():
    """What of :data:`FORBIDDEN` happens inside, as a list."""
    global SEEN
    SEEN = found = []
    try:
        yield found
    finally:
        SEEN = None


sys.addaudithook(_heard)


class _TooLong(BaseException):
    pass


def _alarm(*_):
    raise _TooLong


# ---- what is done to bytes -------------------------------------------------------------


def flipped(content, rng):
    """Some bits, in one place or many."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 100])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flipped_in_headers(content, rng):
    """Bits of the first bytes of an array, where its shape is, or of names in the file."""
    changed = bytearray(content)
    starts = [m.start() for m in re.finditer(b"\x93NUMPY|PK\x01\x02|PK\x03\x04", content)]
    at = rng.choice(starts) + rng.randrange(128)
    changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def digits_changed(content, rng):
    """A digit of a shape, a type or a text."""
    changed = bytearray(content)
    at = rng.choice([m.start() for m in re.finditer(rb"\d", content)])
    changed[at] = rng.choice(b"0123456789")
    return bytes(changed)


def cut(content, rng):
    """The end, the beginning or a part is missing."""
    a, b = sorted(rng.randrange(len(content)) for _ in range(2))
    return rng.choice([content[:b], content[a:], content[:a] + content[b:]])


def inserted(content, rng):
    """Bytes that do not belong there."""
    at = rng.randrange(len(content) + 1)
    more = rng.choice([rng.randbytes(rng.randrange(1, 600)), bytes(64), content[:300]])
    return content[:at] + more + content[at:]


def swapped(content, rng):
    """Two blocks that have changed places."""
    size = rng.choice([1, 16, 64, 512])
    a, b = sorted(rng.randrange(len(content) - size) for _ in range(2))
    if b < a + size:
        return content[:a] + bytes(size) + content[a + size :]
    one, two = content[a : a + size], content[b : b + size]
    return content[:a] + two + content[a + size : b] + one + content[b + size :]


def blanked(content, rng):
    """A sector of the disk that reads as zeros or ones."""
    at, size = rng.randrange(len(content)), rng.choice([64, 512, 4096])
    size = min(size, len(content) - at)
    return content[:at] + rng.choice([b"\0", b"\xff"]) * size + content[at + size :]


def sized(content, rng):
    """Huge sizes or offsets in the records of the archive."""
    changed = bytearray(content)
    mark, fields = rng.choice(
        [
            (b"PK\x01\x02", (8, 10, 16, 20, 24, 28, 30, 32, 42)),
            (b"PK\x03\x04", (6, 8, 14, 18, 22, 26, 28)),
            (b"PK\x05\x06", (4, 8, 10, 12, 16, 20)),
        ]
    )
    start = rng.choice([m.start() for m in re.finditer(re.escape(mark), content)])
    at = start + rng.choice(fields)
    value = rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)])
    changed[at : at + 4] = value.to_bytes(4, "little")
    return bytes(changed)


# ---- what is done to arrays ------------------------------------------------------------


def npy(header, data=b""):
    """Bytes of an array with this header."""
    text = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def bad_array(content, rng):
    """Bytes of another array: of objects, huge, deep, of odd types or orders."""
    shapes = ["(1000000000000,)", "(4000000000,)", "(-1,)", "(2, -4)", "(0, 10**9)", "()"]
    types = ["|O", "<f8", "|V0", "<U1000000000", "<M8[D]", ">f4", "|S0", "<c16", "nothing"]
    descr, shape = rng.choice(types), rng.choice(shapes)
    full = "{'descr': %r, 'fortran_order': False, 'shape': %s, }"
    deep = rng.choice(["(", "[", "-", "not ", "{0:", "1+", "lambda:", "~", "1if 1else "])
    array = content[content.index(b"\n") + 1 :] if b"\n" in content else content
    return rng.choice(
        [
            npy(full % (descr, shape), array),
            npy(full % (descr, shape)),
            npy(deep * (9000 // len(deep)) + "1", array),
            npy("__import__('os').system('true')"),
            npy(full.replace("%r", "__import__('os').system('true')") % shape),
            content + b"more",
            content.replace(b"False", b"True ", 1),
            content.replace(b"<f4", b"<i4", 1),
            content.replace(b"<", b">", 1),
            b"cos\nsystem\n(S'true'\ntR.",
            b"",
        ]
    )


def rewritten(content, rng):
    """An archive whose checksums are right, with another array, name, order or packing."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at, other = rng.randrange(len(members)), rng.randrange(len(members))
    name, old = members[at]
    packing = zipfile.ZIP_STORED
    what = rng.randrange(8)
    if what <= 3:
        members[at] = name, bad_array(old, rng)
    elif what == 4:
        members[at] = name, members[other][1]
    elif what == 5:
        odd = ["../out.npy", "/etc/out.npy", "", "a\0b", "x" * 5000, name + "2"]
        members[at] = rng.choice([*odd, members[other][0]]), old
    elif what == 6:
        packing = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
        members[at] = name, old + bytes(rng.choice([0, 2 * 10**7]))
    else:
        del members[at]
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", packing) as archive:
        warnings.simplefilter("ignore")  # of two members of one name
        for name, member in members:
            archive.writestr(zipfile.ZipInfo(name), member, packing)
    return file.getvalue()


DAMAGES = (
    *(flipped, flipped_in_headers, digits_changed, cut, inserted, swapped, blanked),
    *(sized, rewritten),
)
FOREIGN = (
    b"",
    b"PK",
    b"\x89PNG\r\n\x1a\n",
    b"\x93NUMPY",
    b"SQLite format 3\0",
    b"{}",
    b"\x80\x04N.",
)


# ---- what comes of them ----------------------------------------------------------------


def tried(path, read, same):
    """
    What comes of a file: a verdict, and what was said.

    :param read: reads it, and raises ValueError or warns where it is refused.
    :param same: whether what was read is what was written.
    """
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SECONDS)
    told = ""
    try:
        with warnings.catch_warnings(record=True) as caught, watched() as seen:
            warnings.simplefilter("always")
            found = read()
        told = " ".join(str(w.message) for w in caught)
        verdict = "equal" if same(found) else "other numbers"
        if found is None:
            verdict = "refused" if path.name in told else "refused without a name"
    except ValueError as error:
        told = str(error)
        named = path.name in told or str(path.parent) in told
        verdict = "refused" if named else "refused without a name"
    except _TooLong:
        verdict = f"not done in {SECONDS} s"
    except Exception as error:
        verdict, told = "another error", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    if "MemoryError" in told:
        verdict = "memory"
    if seen:
        verdict, told = "executed", "; ".join(seen)
    return verdict, told


GOOD = "equal", "refused"


def judged(content, path, read, same, rng, each, good=GOOD, damages=DAMAGES):
    """Damaged versions of a file, one after another."""
    failed, counts = [], Counter()
    for number in range(each):
        damage = rng.choice(damages)
        changed = damage(content, rng)
        if damages is DAMAGES and rng.random() < 0.01:
            damage, changed = bytes, rng.choice(FOREIGN) + rng.randbytes(100)
        path.write_bytes(changed)
        verdict, told = tried(path, read, same)
        counts[verdict] += 1
        if verdict not in good:
            failed.append(f"{number}: {damage.__name__}: {verdict}: {told[:200]}")
    return Found(each, failed, dict(counts))


def _found(work, each):
    """What a child says of its files."""
    told = Child(work, seconds=600.0).told()
    if told.end != "done":
        return Found(each, [f"{told.end}: {told.text[-300:]}"], {})
    return Found(*json.loads(told.text))


def checkpoint_reader(folder, content):
    """Path of a checkpoint, how it is read, and whether it is the one that was written."""
    path = folder / "step-000000000020.npz"
    path.write_bytes(content)
    like, identity = _like(content)

    def read():
        return Checkpoints(folder, identity).load(like)

    known = read()
    assert known is not None
    return path, read, lambda found: digest(found) == digest(known)


def _like(content):
    """A tree like that of a checkpoint, and its identity."""
    with np.load(io.BytesIO(content)) as file:
        found = dict(file)
    header = json.loads(str(found.pop("header")))
    del found["checksum"]
    values = [np.zeros_like(found[str(i)]) for i in range(len(found))]
    return values, header["identity"]


def checkpoints(place, rng, each):
    """Of a checkpoint."""
    folder = place.folder()
    place.known(steps=40)
    told = Child(partial(train, folder, place.programs, steps=20)).told()
    (path,) = folder.glob("step-*.npz")
    content = path.read_bytes()

    def work():
        programs_in(place.programs)
        given = checkpoint_reader(folder, content)
        disturbances.limit_memory(MEMORY)
        return json.dumps(judged(content, *given, rng, each))

    return Found(each, [str(told)], {}) if told.end != "done" else _found(work, each)


def _model(place):
    folder = place.folder()
    path = folder / "fit.npz"
    told = Child(partial(save, path, place.programs, Shared(), 1)).told()
    if told.end != "done":
        raise RuntimeError(f"nothing was saved: {told}")
    return path, path.read_bytes()


def archived(path):
    """What is in a saved model, as a text that tells it from others."""
    header, arrays = read_archive(path, set())
    return json.dumps(header, sort_keys=True) + digest(arrays)


def models(place, rng, each):
    """Of a saved model."""
    path, content = _model(place)

    def work():
        programs_in(place.programs)
        sgp.load(path, plain)
        known = archived(path)
        disturbances.limit_memory(MEMORY)

        def read():
            """What is whole for the reader of files would be loaded as it is."""
            try:
                return archived(path)
            except ValueError:
                return sgp.load(path, plain)

        return json.dumps(
            judged(content, path, read, lambda found: found == known, rng, each)
        )

    return _found(work, each)


ODD = (
    *(None, True, -1, 0, 10**9, 10**40, 1e308, float("nan"), "", "text", "../x", [], {}),
    *(
        [[]],
        {"value": 10**9},
        {"dict": {}},
        {"jax": "nothing"},
        {"object": ["os.system", {}]},
    ),
    {"object": ["SVGP", {}]},
)


def forgery(content, rng):
    """Another header, with its checksum."""
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    where, key = header, rng.choice([k for k in header if k != "arrays"])
    while rng.random() < 0.8:
        inner = where[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        where, key = inner, rng.choice(keys)
    value = copy.deepcopy(rng.choice(ODD))
    if rng.random() < 0.1:
        value = "DEEP"
    if rng.random() < 0.2 and isinstance(where, dict):
        del where[key]
    else:
        where[key] = value
    text = json.dumps(header)
    text = text.replace('"DEEP"', '{"list": [' * 20_000 + "]}" * 20_000)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    arrays |= {"header": np.array(text), "checksum": np.array(checksum)}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def forged(place, rng, each):
    """Of a saved model, with right checksums."""
    path, content = _model(place)

    def work():
        programs_in(place.programs)
        sgp.load(path, plain)
        disturbances.limit_memory(MEMORY)
        # JAX makes classes and imports its own modules when it traces what it has not yet.
        FORBIDDEN.difference_update({"exec", "import"})
        given = partial(sgp.load, path, plain), lambda found: True
        return json.dumps(judged(content, path, *given, rng, each, damages=(forgery,)))

    return _found(work, each)

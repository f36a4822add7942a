"""Files of arrays with a header, of which no byte that counts can change unseen."""

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from numpyro_sgp._version import __version__

_LONGEST = 300  # characters of another error's text
_VERSION = 1


class Kind(NamedTuple):
    """
    What a file is.

    :param format: what its header says.
    :param writer: the function that writes it, for messages.
    """

    format: str
    writer: str


FIT = Kind("numpyro_sgp fit", "Fitted.save")
CHECKPOINT = Kind("numpyro_sgp checkpoint", "train")


class _OtherVersion(Exception):
    """The file is whole, but of another version of the format."""


def write_archive(
    path: Path, header: dict, arrays: dict[str, np.ndarray], kind: Kind = FIT
) -> None:
    """
    Writes an ``.npz`` file, at once or not at all.

    Beside the arrays it has the members ``header``, a text in JSON with shape, dtype and
    SHA-256 of each array, and ``checksum``, the SHA-256 of that text.

    :param header: as JSON has it.
    :param arrays: by name.
    """
    known = {"format": kind.format, "format_version": _VERSION, "numpyro_sgp": __version__}
    listed = {name: _described(array) for name, array in arrays.items()}
    text = json.dumps({**known, **header, "arrays": listed})
    members = {"header": np.array(text), "checksum": np.array(_sha256(text.encode()))}
    _write(path, {**members, **arrays})


def _write(path, arrays):
    """
    Writes under another name, flushes that to the disk and then renames it, which POSIX
    does at once or not at all. The name is one's own: another process may write too.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            _write_members(file, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (Exception, KeyboardInterrupt):
        with contextlib.suppress(OSError):
            part.unlink()  # a full disk has no room for it
        raise
    _sync_folder(path.parent)


def _write_members(file, arrays):
    """As np.savez does, which in NumPy 2.0 cannot be told to write no pickles."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


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


def read_archive(
    path: Path, keys: set[str], kind: Kind = FIT
) -> tuple[dict, dict[str, np.ndarray]]:
    """
    Reads what :func:`write_archive` wrote.

    :param keys: what the header must have.
    :return: header and arrays.
    :raises ValueError: if the file is damaged, or something else.
    :raises OSError: if there is none, or the system does not let it be read.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device"
        raise ValueError(f"{path} is {what}, and no file of {kind.writer}.")
    content = path.read_bytes()
    try:
        return _parsed(content, keys | {"numpyro_sgp", "arrays"}, kind)
    except _OtherVersion as error:
        raise ValueError(f"{path} {error}") from None
    except Exception as error:  # readers of damaged files raise whatever they like
        raise ValueError(
            f"{path} is damaged, or was not written by {kind.writer} "
            f"({type(error).__name__}: {str(error)[:_LONGEST]})."
        ) from error


def _parsed(content, keys, kind):
    # NumPy takes what is no archive for a pickle.
    is_archive = content[:4] == b"PK\x03\x04" and zipfile.is_zipfile(io.BytesIO(content))
    if not is_archive:
        raise ValueError("it is no .npz archive, or its end is missing")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("it has two arrays of one name")
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise ValueError("it is compressed")

        def array(name):
            if f"{name}.npy" not in members:
                raise ValueError(f"it has no array '{name}'")
            return _array(archive.read(members[f"{name}.npy"]))

        text = _text(array("header"))
        header = json.loads(text)
        _check_format(header, kind)
        if _text(array("checksum")) != _sha256(text.encode()):
            raise ValueError("the checksum of its header is another one")
        if missing := sorted(keys - set(header)):
            raise ValueError(f"its header has no {missing}")
        if not isinstance(header["numpyro_sgp"], str):
            raise ValueError("its header does not say which version wrote it")
        listed = header["arrays"]
        if {f"{name}.npy" for name in [*listed, "header", "checksum"]} != set(members):
            raise ValueError("its arrays are others than its header says")
        arrays = {name: array(name) for name in listed}
    for name, found in arrays.items():
        if _described(found) != listed[name]:
            raise ValueError(
                f"array '{name}' of shape {found.shape} and dtype {found.dtype} is not the "
                f"one that its header says: {listed[name]}"
            )
    return header, arrays


def _check_format(header, kind):
    if not isinstance(header, dict) or header.get("format") != kind.format:
        raise ValueError(f"its header is not that of a {kind.format}")
    version = header.get("format_version")
    if type(version) is not int or version != _VERSION:
        raise _OtherVersion(
            f"has version {str(version)[:_LONGEST]} of the format of {kind.writer} "
            f"(numpyro_sgp {str(header.get('numpyro_sgp'))[:_LONGEST]}), but this is "
            f"numpyro_sgp {__version__}, which reads version {_VERSION}."
        )


def _array(content):
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"an array has version {version} of NumPy's format")
    try:
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except MemoryError:  # of Python's parser, which has room for so much alone
        raise ValueError("the header of an array is nested too deeply") from None
    # Before NumPy makes room for what is not there.
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"an array is not of shape {shape} and dtype {dtype}")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def _text(array):
    if array.shape or array.dtype.kind != "U":
        raise ValueError("its header is no text")
    return str(array)


def _described(array):
    return [list(array.shape), array.dtype.str, _sha256(np.ascontiguousarray(array))]


def _sha256(content):
    return hashlib.sha256(content).hexdigest()

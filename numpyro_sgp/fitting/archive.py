"""A file of arrays with a header, of which no byte that counts can change unseen."""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import numpy as np

from numpyro_sgp._version import __version__
from numpyro_sgp.training.checkpoint import write_arrays

_FORMAT, _VERSION = "numpyro_sgp fit", 1
_LONGEST = 300  # characters of another error's text


class _OtherVersion(Exception):
    """The file is whole, but of another version of the format."""


def write_archive(path: Path, header: dict, arrays: dict[str, np.ndarray]) -> None:
    """
    Writes an ``.npz`` file, at once or not at all.

    Beside the arrays it has the members ``header``, a text in JSON with shape, dtype and
    SHA-256 of each array, and ``checksum``, the SHA-256 of that text.

    :param header: as JSON has it.
    :param arrays: by name.
    """
    known = {"format": _FORMAT, "format_version": _VERSION, "numpyro_sgp": __version__}
    listed = {name: _described(array) for name, array in arrays.items()}
    text = json.dumps({**known, **header, "arrays": listed})
    members = {"header": np.array(text), "checksum": np.array(_sha256(text.encode()))}
    write_arrays(path, {**members, **arrays})


def read_archive(path: Path, keys: set[str]) -> tuple[dict, dict[str, np.ndarray]]:
    """
    Reads what :func:`write_archive` wrote.

    :param keys: what the header must have.
    :return: header and arrays.
    :raises ValueError: if the file is damaged, or something else.
    :raises OSError: if there is none, or the system does not let it be read.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder, and no file of Fitted.save.")
    content = path.read_bytes()
    try:
        return _parsed(content, keys | {"numpyro_sgp", "arrays"})
    except _OtherVersion as error:
        raise ValueError(f"{path} {error}") from None
    except Exception as error:  # readers of damaged files raise whatever they like
        raise ValueError(
            f"{path} is damaged, or was not written by Fitted.save "
            f"({type(error).__name__}: {str(error)[:_LONGEST]})."
        ) from error


def _parsed(content, keys):
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
        _check_format(header)
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


def _check_format(header):
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"its header is not that of a {_FORMAT}")
    version = header.get("format_version")
    if type(version) is not int or version != _VERSION:
        raise _OtherVersion(
            f"has version {str(version)[:_LONGEST]} of the format of Fitted.save "
            f"(numpyro_sgp {str(header.get('numpyro_sgp'))[:_LONGEST]}), but this is "
            f"numpyro_sgp {__version__}, which reads version {_VERSION}."
        )


def _array(content):
    file = io.BytesIO(content)
    array = np.lib.format.read_array(file, allow_pickle=False)
    if file.read(1):
        raise ValueError("there is something after the end of an array")
    return array


def _text(array):
    if array.shape or array.dtype.kind != "U":
        raise ValueError("its header is no text")
    return str(array)


def _described(array):
    return [list(array.shape), array.dtype.str, _sha256(np.ascontiguousarray(array))]


def _sha256(content):
    return hashlib.sha256(content).hexdigest()

"""Files of checkpoints: what damaged ones, full disks and neighbours do."""

import errno
import os
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from numpyro_sgp.training.archive import read_archive, write_archive
from numpyro_sgp.training.checkpoint import Checkpoints

STATE = [np.arange(4000.0), np.ones((3, 4), np.float32)]


def checkpoints(folder):
    return Checkpoints(folder, {"of": "a test"})


@pytest.fixture
def folder(tmp_path):
    with checkpoints(tmp_path) as here:
        here.save(20, STATE)
    return tmp_path


def test_a_state_comes_back(folder):
    for found, known in zip(checkpoints(folder).load(STATE), STATE, strict=True):
        assert_array_equal(found, known)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"(4000,)", b"(1000,)"), (b"(3, 4)", b"(3, 1)"), (b"(4000,)", b"(0000,)")],
)
def test_an_array_that_says_it_is_shorter_is_seen(folder, old, new):
    (path,) = folder.glob("*.npz")
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.warns(
        UserWarning, match="(?s)cannot be read.*step-000000000020.npz is dam"
    ):
        assert checkpoints(folder).load(STATE) is None


def test_a_fit_is_no_checkpoint(tmp_path):
    write_archive(tmp_path / "step-000000000001.npz", {"identity": {}}, {})
    with pytest.warns(UserWarning, match="not that of a numpyro_sgp checkpoint"):
        assert checkpoints(tmp_path).load(STATE) is None


def test_a_folder_has_one_training_at_a_time(folder):
    with checkpoints(folder) as here:
        with (
            pytest.raises(ValueError, match="Another training has the folder of checkp"),
            checkpoints(folder),
        ):
            pass
        with Checkpoints(folder, {"of": "a test"}, writes=False) as reader:
            assert reader.load(STATE) is not None
        here.save(40, STATE)
    with checkpoints(folder) as again:
        assert again.load(STATE) is not None
    assert len(list(folder.iterdir())) == 2


def test_a_folder_is_free_again_though_a_forked_worker_holds_it_open(folder):
    with checkpoints(folder) as here:
        of_worker = os.dup(here._lock)  # as a fork has it
    with checkpoints(folder) as again:
        assert again.load(STATE) is not None
    os.close(of_worker)


def test_a_folder_that_was_removed_is_made_again(folder):
    with checkpoints(folder) as here:
        shutil.rmtree(folder)
        here.save(40, STATE)
    assert checkpoints(folder).load(STATE) is not None


def test_a_folder_in_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(ValueError, match="checkpoint must be a folder"):
            checkpoints(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_what_is_half_written_goes_when_writing_fails(folder, monkeypatch, call, error):
    def fails(*_):
        raise error

    with checkpoints(folder) as here:
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(os, call, fails)
            here.save(40, STATE)
        assert [path.name for path in folder.iterdir()] == ["step-000000000020.npz"]


def test_two_writers_of_one_file_do_no_harm(tmp_path, monkeypatch):
    path, replace = tmp_path / "fit.npz", os.replace

    def late(part, target):
        """Another process writes while this one is about to rename."""
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            write_archive(path, {"by": "another"}, {"a": np.ones(1000)})
            assert read_archive(path, {"by"})[0]["by"] == "another"
        replace(part, target)

    monkeypatch.setattr(os, "replace", late)
    write_archive(path, {"by": "this one"}, {"a": np.zeros(10)})
    assert read_archive(path, {"by"})[0]["by"] == "this one"
    assert [p.name for p in tmp_path.iterdir()] == ["fit.npz"]


def test_a_shape_that_is_not_there_takes_no_memory(tmp_path):
    text = b"{'descr': '<U1', 'fortran_order': False, 'shape': (100000000,), }"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    path = tmp_path / "huge.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", header)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"an array is not of shape \(100000000,\)"):
            read_archive(path, set())
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_header_of_many_signs_is_no_lack_of_memory(tmp_path):
    text = b"-" * 9000 + b"1"
    path = tmp_path / "deep.npz"
    with zipfile.ZipFile(path, "w") as archive:
        size = len(text).to_bytes(2, "little")
        archive.writestr("header.npy", b"\x93NUMPY\x01\x00" + size + text)
    with pytest.raises(ValueError, match="deep.npz is damaged.*nested too deeply"):
        read_archive(path, set())


def test_a_device_is_no_file():
    with pytest.raises(ValueError, match="/dev/zero is a device, and no file of"):
        read_archive(Path("/dev/zero"), set())

"""A small part of the campaign of faults, with fixed seeds."""

import io
import random

import numpy as np
import pytest

from campaigns import _mutations as mutations
from campaigns import _quarrels as quarrels
from campaigns._children import Child, Told
from numpyro_sgp.training.archive import write_archive
from numpyro_sgp.training.checkpoint import Checkpoints

STATE = [np.arange(4000.0), np.ones((3, 4), np.float32)]


@pytest.fixture
def checkpoint(tmp_path):
    with Checkpoints(tmp_path, {"of": "a test"}) as here:
        here.save(20, STATE)
    return (tmp_path / "step-000000000020.npz").read_bytes()


def damaged(checkpoint, folder, **options):
    given = mutations.checkpoint_reader(folder, checkpoint)
    return mutations.judged(checkpoint, *given, random.Random(0), 300, **options)


def test_damaged_checkpoints_are_refused_or_whole(checkpoint, tmp_path):
    found = damaged(checkpoint, tmp_path)
    assert found.cases == 300 and not found.failed
    assert found.numbers["refused"] > 200


def test_damaged_archives_of_fits_are_refused_or_whole(tmp_path):
    path = tmp_path / "fit.npz"
    write_archive(path, {"more": 1}, {"a": STATE[0], "b": STATE[1]})
    content, known = path.read_bytes(), mutations.archived(path)
    given = path, lambda: mutations.archived(path), lambda found: found == known
    found = mutations.judged(content, *given, random.Random(1), 300)
    assert found.cases == 300 and not found.failed


def shorter(content, rng):
    """NumPy does not come to the end of the array, where it looks at checksums."""
    return content.replace(b"(4000,)", b"(1000,)")


def test_a_reader_without_checksums_is_seen(checkpoint, tmp_path):
    path = tmp_path / "step-000000000020.npz"

    def read():
        with np.load(io.BytesIO(path.read_bytes())) as file:
            return file["0"]

    np.load(io.BytesIO(checkpoint))["0"]  # which imports what it needs, at first
    given = path, read, lambda found: np.array_equal(found, STATE[0])
    found = mutations.judged(checkpoint, *given, random.Random(0), 20, damages=(shorter,))
    assert found.numbers == {"other numbers": 20} and len(found.failed) == 20
    assert not damaged(checkpoint, tmp_path, damages=(shorter,)).failed


def test_a_reader_that_runs_what_it_reads_is_seen(tmp_path):
    path = tmp_path / "file"

    def runs():
        exec("1 + 1")

    def allocates():
        raise ValueError(f"{path}: MemoryError")

    for read, verdict in (
        (runs, "executed"),
        (allocates, "memory"),
        (lambda: {}["a"], "another error"),
        (lambda: 1, "other numbers"),
        (lambda: None, "refused without a name"),
    ):
        assert mutations.tried(path, read, lambda found: found == 2)[0] == verdict


def test_what_a_child_says_is_heard():
    assert Child(lambda: "text").told()[:2] == ("done", "text")
    assert Child(lambda: 1 / 0).told()[:2] == ("ZeroDivisionError", "division by zero")


def test_a_lost_checkpoint_is_seen(tmp_path):
    saved = quarrels.Shared()
    saved.value = 20
    assert quarrels.lost(tmp_path, saved) == "0 steps left of 20"
    report = quarrels.Report()
    report.case("a", Told("killed by 11", "", 1.0), ("done",), None)
    report.case("b", Told("done", "", 1.0), ("done",), "another result")
    assert len(report.found().failed) == 2 and report.found().cases == 2

"""
Faults: kills, full disks, removed files, odd clocks, two processes, damaged files.

    python -m campaigns.faults              # some hundred processes, 10,000 damaged files
    python -m campaigns.faults --show       # what was found, a line each

A training with checkpoints that is killed at any moment, also while a file is written, has
to go on from the last interval to the result of an undisturbed one, bit for bit. A saved
model or a table of results is the one before or the one after. Where the system refuses
something, the message names it. Damaged files are those of `campaigns._mutations`.
"""

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from campaigns import _disturbances as disturbances
from campaigns import _mutations as mutations
from campaigns import _quarrels as quarrels
from campaigns._children import (
    Child,
    Shared,
    counting,
    finished,
    newest,
    save,
    tabulate,
    train,
)
from campaigns._table import Found, Table
from numpyro_sgp.training.archive import read_archive

#: Kills of a block; blocks of each kind.
EACH, BLOCKS = 20, 4
#: Damaged files of a block.
FILES = 1250


class Place:
    """
    Folders of a block, and the result that all its trainings must have.

    :param root: is emptied by its owner.
    """

    def __init__(self, root: Path):
        self.root, self.programs = root, root / "programs"
        self._count, self._known = 0, {}

    def folder(self) -> Path:
        """A new one."""
        self._count += 1
        path = self.root / str(self._count)
        path.mkdir()
        return path

    def known(self, **options) -> str:
        """Digest of the undisturbed training."""
        key = repr(options)
        if key not in self._known:
            told = Child(partial(train, self.folder(), self.programs, **options)).told()
            if told.end != "done":
                raise RuntimeError(f"the undisturbed training failed: {told}")
            self._known[key] = told.text
        return self._known[key]


def kills(place, rng, each, within):
    """Kills of one training after another, which goes on after each."""
    known = place.known()
    failed, counts, saved, folder = [], Counter(), Shared(), place.folder()
    cases = 0
    while counts["killed by 9"] < each and cases < 3 * each:
        cases += 1
        before = saved.value
        count, half = int(10 ** rng.uniform(0.0, 4.5)), rng.random() < 0.5

        def work(folder=folder, given=(count, half)):
            counting(saved)
            if within:
                disturbances.die_within(folder, *given)
            return train(folder, place.programs)

        child = Child(work)
        if not within:
            time.sleep(rng.uniform(0.2, 1.8))
            child.send(signal.SIGKILL)
        told = child.told()
        counts[told.end] += 1
        counts["in training"] += saved.value > before
        if newest(folder) < saved.value:
            failed.append(f"{count} calls: {newest(folder)} steps left of {saved.value}")
        if told.end == "done":
            if told.text != known:
                failed.append("another result")
            folder, saved.value = place.folder(), 0
        elif told.end != "killed by 9":
            failed.append(f"{told.end}: {told.text[:200]}")
        counts["half written"] += len(list(folder.glob("*.part")))
    if wrong := finished(place, folder):
        failed.append(f"in the end: {wrong}")
    return Found(cases + 1, failed, dict(counts))


def killed_models(place, rng, each):
    """Kills while a fit is saved over one that is there."""
    failed, counts, saved = [], Counter(), Shared()
    folder = place.folder()
    path = folder / "fit.npz"
    first = Child(partial(save, path, place.programs, saved, 1)).told()
    if first.end != "done":
        return Found(1, [f"cannot be saved: {first}"], {})
    for number in range(each):
        given = int(10 ** rng.uniform(0.0, 3.5)), rng.random() < 0.5

        def work(given=given):
            disturbances.die_within(folder, *given)
            return save(path, place.programs, saved)

        told = Child(work).told()
        counts[told.end] += 1
        try:
            there = read_archive(path, set())[0]["fit"]["seconds"]
        except (OSError, ValueError) as error:
            failed.append(f"{number}: {error}")
            continue
        if not saved.value <= there <= saved.value + 1:
            failed.append(f"{number}: fit {there} where {saved.value} was saved")
    return Found(each, failed, dict(counts))


def killed_tables(place, rng, each):
    """Kills while a table of results is written."""
    failed, counts, saved, folder = [], Counter(), Shared(), place.folder()
    for number in range(each):
        given = int(10 ** rng.uniform(0.0, 3.5)), rng.random() < 0.5

        def work(folder=folder, given=given):
            disturbances.die_within(folder, *given)
            return tabulate(folder, saved)

        told = Child(work).told()
        counts[told.end] += 1
        try:
            there = len(Table("kills", folder).blocks)
        except ValueError as error:
            failed.append(f"{number}: {error}")
            continue
        if not saved.value <= there <= saved.value + 1:
            failed.append(f"{number}: {there} blocks where {saved.value} were kept")
        if told.end == "done":
            folder, saved.value = place.folder(), 0
    return Found(each, failed, dict(counts))


def look(block, each=None):
    """A block: its kind, and a number that seeds it."""
    kind, _, seed = block.partition(", ")
    rng = random.Random(block)
    looks = {
        "kills at any time": (partial(kills, within=False), EACH),
        "kills within writes": (partial(kills, within=True), EACH),
        "kills while a model is saved": (killed_models, EACH),
        "kills while a table is kept": (killed_tables, EACH),
        "signals": (quarrels.signals, 12),
        "disks": (quarrels.disks, 20),
        "disks of a saved model": (quarrels.disks_of_models, 20),
        "removed": (quarrels.removed, 10),
        "clocks": (quarrels.clocks, 5),
        "two processes": (quarrels.two, 6),
        "memory": (quarrels.memory, 6),
        "damaged checkpoints": (mutations.checkpoints, FILES),
        "damaged models": (mutations.models, FILES),
        "forged models": (mutations.forged, FILES // 5),
    }
    function, usual = looks[kind]
    root = Path(tempfile.mkdtemp())
    try:
        return function(Place(root), rng, each=each or usual)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def blocks():
    """Their names."""
    often = ("damaged checkpoints", "damaged models", "kills within writes")
    often += ("kills at any time",)
    named = [f"{kind}, {number}" for number in range(BLOCKS) for kind in often]
    named += ["two processes", "memory", "removed", "forged models", "clocks", "signals"]
    named += ["kills while a model is saved", "kills while a table is kept"]
    return [*named, "disks of a saved model", "disks"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    table = Table("faults")
    if not options.show:
        table.run(blocks(), look)
    for sentence in table.failed:
        print(sentence)
    print(f"{table.cases} cases, {len(table.failed)} failed")


if __name__ == "__main__":
    main()

"""Trainings and the system: signals, disks, removed files, clocks, neighbours, memory."""

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from functools import partial

import jax
import numpy as np

import numpyro_sgp as sgp
from campaigns import _disturbances as disturbances
from campaigns._children import (
    DATA,
    Child,
    Shared,
    counting,
    finished,
    newest,
    plain,
    programs_in,
    save,
    train,
)
from campaigns._table import Found
from numpyro_sgp.training import minibatches
from numpyro_sgp.training.archive import read_archive

#: Seconds within which a process that is asked to end twice has to.
AT_ONCE = 20.0


class Report:
    """Cases of a block."""

    def __init__(self):
        self.cases, self.failed, self.counts = 0, [], Counter()

    def case(self, what, told, allowed, *wrong):
        """One case: how it may end, and what else was wrong (None where nothing was)."""
        self.cases += 1
        self.counts[told.end] += 1
        wrong = [text for text in wrong if text]
        if told.end not in allowed:
            wrong.append(f"{told.end}: {told.text[:200]}")
        self.failed += [f"{self.cases}, {what}: {text}" for text in wrong]

    def found(self):
        """All of them."""
        return Found(self.cases, self.failed, dict(self.counts))


def lost(folder, saved):
    """What is wrong if a checkpoint that was written is not there."""
    if newest(folder) < saved.value:
        return f"{newest(folder)} steps left of {saved.value}"
    return None


def unnamed(told, *words):
    """What is wrong if an error's message has none of some words."""
    if told.end == "done" or any(word in told.text for word in words):
        return None
    return f"a message without {words}: {told.text[:200]}"


def at_step(saved, child, steps):
    """Waits until a training has so many steps, or has ended."""
    limit = time.monotonic() + 60.0
    while saved.value < steps and time.monotonic() < limit:
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.002)


def signals(place, rng, each):
    """SIGTERM, one SIGINT and two, of trainings and of fits."""
    report = Report()
    for number in range(each):
        kind = ("term", "once", "twice", "fit once", "fit twice")[number % 5]
        if kind.startswith("fit"):
            _interrupted_fit(place, rng, report, kind)
            continue
        folder, saved = place.folder(), Shared()

        def work(folder=folder, saved=saved):
            counting(saved)
            return train(folder, place.programs)

        child = Child(work)
        at_step(saved, child, rng.randrange(20, 500))
        began = time.monotonic()
        child.send(signal.SIGTERM if kind == "term" else signal.SIGINT)
        if kind == "twice":
            time.sleep(rng.choice([0.0, 1e-4, 1e-3, 1e-2]))
            with contextlib.suppress(ProcessLookupError):
                child.send(signal.SIGINT)
        told = child.told()
        late = None if time.monotonic() - began < AT_ONCE else "took too long to end"
        ends = {
            "term": ("killed by 15", "done"),
            "once": ("FitInterrupted", "done"),
            "twice": ("FitInterrupted", "KeyboardInterrupt", "done"),
        }[kind]
        silent = kind == "once" and unnamed(told, "in the newest checkpoint")
        wrong = lost(folder, saved), finished(place, folder), late, silent
        report.case(kind, told, ends, *wrong)
    return report.found()


def _interrupted_fit(place, rng, report, kind):
    """Ctrl-C in ``fit``: what was reached so far is returned."""
    begun = Shared()

    def work():
        programs_in(place.programs)
        begun.value = 1
        fitted = sgp.fit(
            plain, sgp.SVGP(4), DATA, batch_size=10, steps=200_000, progress_bar=False
        )
        values = jax.tree.leaves(fitted.params)
        assert all(np.isfinite(value).all() for value in values)
        return fitted.stopped

    child = Child(work)
    while not begun.value:
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 6.0))
    began = time.monotonic()
    child.send(signal.SIGINT)
    if kind.endswith("twice"):
        time.sleep(rng.choice([0.0, 1e-3, 0.05, 0.3]))
        with contextlib.suppress(ProcessLookupError):
            child.send(signal.SIGINT)
    told = child.told()
    late = None if time.monotonic() - began < 2 * AT_ONCE else "took too long to end"
    # Before the first step there is nothing to return.
    report.case(kind, told, ("done", "KeyboardInterrupt"), late)


def disks(place, rng, each):
    """Errors of the disk while checkpoints are written."""
    report = Report()
    for number in range(each):
        what = list(disturbances.DISKS)[number % len(disturbances.DISKS)]
        call = disturbances.CALLS[number // len(disturbances.DISKS) % 4]
        folder, saved = place.folder(), Shared()
        count, times = rng.randrange(0, 60), rng.choice([1, 10**6])

        def work(folder=folder, saved=saved, given=(call, what, count, times)):
            call, what, count, times = given
            counting(saved)
            number = disturbances.DISKS[what]
            if call == "open" and what == "full disk":
                disturbances.limit_files(7_000)
            else:
                disturbances.refuse(folder, call, number, count, times)
            return train(folder, place.programs)

        told = Child(work).told()
        left = f"{p} is left" if (p := list(folder.glob("*.part"))) else None
        named = unnamed(told, str(folder), "Errno")
        wrong = lost(folder, saved), left, named, finished(place, folder)
        report.case(
            f"{what} at {call}", told, ("done", "FitInterrupted", "OSError"), *wrong
        )
    return report.found()


def disks_of_models(place, rng, each):
    """Errors of the disk while a fit is saved over one that is there."""
    report = Report()
    folder = place.folder()
    path, saved = folder / "fit.npz", Shared()
    Child(partial(save, path, place.programs, saved, 1)).told()
    for number in range(each):
        what = list(disturbances.DISKS)[number % len(disturbances.DISKS)]
        call = disturbances.CALLS[number // len(disturbances.DISKS) % 4]
        count = rng.randrange(0, 5)

        def work(given=(call, what, count)):
            call, what, count = given
            disturbances.refuse(folder, call, disturbances.DISKS[what], count, 10**6)
            return save(path, place.programs, saved)

        told = Child(work).told()
        left = f"{p} is left" if (p := list(folder.glob("*.part"))) else None
        there = read_archive(path, set())[0]["fit"]["seconds"]
        other = None if there - saved.value in (0, 1) else f"{there} is there"
        ends = ("OSError", "PermissionError")
        report.case(f"{what} at {call}", told, ends, left, other, unnamed(told, "Errno"))
    return report.found()


def removed(place, rng, each):
    """Files and folders that someone removes while a training writes them."""
    report = Report()
    for number in range(each):
        kind = ("newest", "all files", "folder", "part", "file in its place")[number % 5]
        folder, saved = place.folder(), Shared()

        def work(folder=folder, saved=saved):
            counting(saved)
            return train(folder, place.programs)

        child = Child(work)
        at_step(saved, child, rng.randrange(20, 400))
        for _ in range(5):
            files = sorted(folder.glob("*.npz"))
            if kind == "part":
                files = list(folder.glob("*.part"))
            for path in files[-1:] if kind == "newest" else files:
                path.unlink(missing_ok=True)
            if kind in ("folder", "file in its place"):
                shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.005)
        if kind == "file in its place":
            with contextlib.suppress(OSError):
                folder.write_text("a file")
        told = child.told()
        if folder.is_file():
            folder.unlink()
        named = unnamed(told, str(folder))
        ends = ("done", "FitInterrupted", "FileNotFoundError")
        report.case(kind, told, ends, named, finished(place, folder))
    return report.found()


def clocks(place, rng, each):
    """Clocks that jump by up to a day, forward and back."""
    report = Report()
    for number in range(each):
        folder = place.folder()

        def work(folder=folder, number=number):
            disturbances.odd_clocks(number)
            return train(folder, place.programs)

        told = Child(work).told()
        other = None if told.text == place.known() else "another result"
        report.case("clock", told, ("done",), other)
    return report.found()


def two(place, rng, each):
    """Two processes with one folder: one trains, the other is refused."""
    report = Report()
    for _ in range(each):
        folder, saved, seed = place.folder(), Shared(), rng.choice([1, 2])

        def first(folder=folder, saved=saved):
            counting(saved)
            return train(folder, place.programs)

        one = Child(first)
        at_step(saved, one, rng.choice([0, 20, 100]))
        other = Child(partial(train, folder, place.programs, seed=seed))
        tolds = one.told(), other.told()
        ends = sorted(told.end for told in tolds)
        wrong = None
        if ends == ["done", "done"]:
            if any(told.text != place.known() for told in tolds):
                wrong = "both go on, with another result"
        elif ends != ["ValueError", "done"]:
            wrong = f"ends {ends}: {[t.text[:200] for t in tolds if t.end != 'done']}"
        refused = next((told for told in tolds if told.end != "done"), tolds[0])
        if "another training" not in refused.text.lower() and refused.end != "done":
            wrong = wrong or f"a message that does not say so: {refused.text[:200]}"
        winner = 1 if tolds[0].end == "done" else seed
        report.case(
            f"seed {seed}",
            refused,
            ("done", "ValueError"),
            wrong,
            finished(place, folder, seed=winner),
        )
    return report.found()


def memory(place, rng, each):
    """A process that may have no more memory than it has, from some step on."""
    report = Report()
    for _ in range(each):
        folder, saved = place.folder(), Shared()
        more, when = rng.choice([0, 2**16, 2**20, 2**22]), rng.randrange(20, 400)

        def work(folder=folder, saved=saved, more=more, when=when):
            counting(saved)
            real = minibatches._Training.run

            def run(self, start, stop, block):
                if start <= when < stop:
                    disturbances.limit_memory(more)
                if start >= when:
                    np.ones(2**25)  # of a step that needs 256 MB
                real(self, start, stop, block)

            minibatches._Training.run = run
            return train(folder, place.programs)

        told = Child(work).told()
        named = unnamed(told, "MemoryError", "allocate", "memory")
        wrong = lost(folder, saved), named, finished(place, folder)
        report.case(f"{more} bytes more", told, ("FitInterrupted",), *wrong)
    return report.found()

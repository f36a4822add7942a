"""
Results of a study in one JSON file: a list of rows, one for each fit and one on each line
of the file, told apart by their settings. A fit whose row is there is not computed again.
"""

import fcntl
import json
import os
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


class Results:
    """
    The rows of a study.

    :param path: of the file, made when the first row is added.
    :param settings: names of the entries that tell rows apart.
    """

    def __init__(self, path, settings):
        self.path, self.settings = Path(path), tuple(settings)

    def rows(self):
        """All rows, in the order in which they were added."""
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def key(self, row):
        """What tells a row apart; None for a setting that it does not know."""
        return tuple(row.get(name) for name in self.settings)

    def has(self, **settings):
        """
        Whether there is a row with these settings.

        :raises ValueError: if they are not the settings of this study.
        """
        if set(settings) != set(self.settings):
            raise ValueError(f"Settings {sorted(settings)}, need {sorted(self.settings)}.")
        return self.key(settings) in map(self.key, self.rows())

    def add(self, row):
        """Adds a row, in the place of one with the same settings."""
        with _alone(self.path):  # other fits of the study may end at the same time
            kept = [other for other in self.rows() if self.key(other) != self.key(row)]
            lines = ",\n".join(json.dumps(other) for other in [*kept, row])
            write(self.path, f"[\n{lines}\n]\n".encode())

    def piece(self, name):
        """A path for the state of a fit that has not ended, which git ignores."""
        folder = self.path.parent / ".pieces"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


def write(path, content):
    """Bytes to a file, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    os.replace(part, path)


@contextmanager
def _alone(path):
    """One process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

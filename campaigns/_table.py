"""
What a campaign has found so far, one JSON file: for each block of cases how many were run
and which failed. A block that is there is not run again, so that a campaign goes on where
it was stopped.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "results"


class Found(NamedTuple):
    """
    What came of a block.

    :param cases: how many were run.
    :param failed: a sentence for each that failed.
    :param numbers: what else is to be kept, by name.
    """

    cases: int
    failed: list[str]
    numbers: dict[str, float | str]


class Table:
    """
    A campaign's file.

    :param name: of the campaign.
    :param folder: where the file is.
    """

    def __init__(self, name: str, folder: Path = FOLDER):
        self.path = folder / f"{name}.json"
        self.blocks = json.loads(self.path.read_text()) if self.path.exists() else {}

    def run(self, blocks: Iterable[str], look: Callable[[str], Found]) -> None:
        """Runs the blocks that are not there, and keeps each when it is done."""
        for block in blocks:
            if block in self.blocks:
                continue
            began = time.monotonic()
            found = look(block)
            self.blocks[block] = {**found._asdict(), "seconds": time.monotonic() - began}
            self._write()
            print(f"{block}: {found.cases} cases, {len(found.failed)} failed", flush=True)
            for sentence in found.failed[:5]:
                print(f"  {sentence}", flush=True)

    def _write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(self.blocks, indent=1) + "\n")
        os.replace(part, self.path)

    @property
    def cases(self) -> int:
        """How many were run."""
        return sum(found["cases"] for found in self.blocks.values())

    @property
    def failed(self) -> list[str]:
        """Those that failed, with their blocks."""
        return [f"{k}: {s}" for k, found in self.blocks.items() for s in found["failed"]]

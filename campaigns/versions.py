"""
The tests on other Pythons, with the oldest and the newest of what the package needs.

    python -m campaigns.versions "3.11, oldest"      # half an hour on two cores
    python -m campaigns.versions                     # all that were not run yet

A block is a Python and how its packages are chosen: the newest that it can have, the lower
bounds of `pyproject.toml` (`campaigns/oldest.txt`), or pre-releases too. It clones the last
commit into a new folder, installs it there and runs the tests. Kept are the versions and
the tests that failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns._table import Found, Table

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = (
    "3.11, oldest",
    "3.11, newest",
    "3.12, newest",
    "3.13, newest",
    "3.13, pre-releases",
)
#: Whose versions are kept.
KEPT = (
    "jax",
    "numpyro",
    "numpy",
    "scipy",
    "optax",
    "arviz",
    "arviz-base",
    "xarray",
    "blackjax",
)
OPTIONS = {
    "newest": [],
    "oldest": ["--constraint", "campaigns/oldest.txt"],
    "pre-releases": ["--pre"],
}


def installed(block, folder):
    """A clone with an environment, and the environment's Python."""
    version, choice = block.split(", ")
    interpreter = shutil.which(f"python{version}")
    if interpreter is None:
        raise FileNotFoundError(f"No python{version} on the PATH.")
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    subprocess.run([interpreter, "-m", "venv", folder / ".venv"], check=True)
    python = folder / ".venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", *OPTIONS[choice], "-e", ".[test]"]
    subprocess.run(install, check=True, cwd=folder)
    return python


def counted(out):
    """Numbers of the last line of pytest, and the tests that failed."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", out[-300:])}
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", out, re.M)
    return counts.get("passed", 0), [sentence[:200] for sentence in failed]


def look(block, only=()):
    """
    The tests in an environment of its own.

    :param only: paths of tests; all if there are none.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "clone"
        python = installed(block, folder)
        freeze = [python, "-m", "pip", "freeze"]
        frozen = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
        versions = dict(re.findall(r"^([\w-]+)==(.+)$", frozen, re.M))
        command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *only]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
    passed, failed = counted(done.stdout)
    if done.returncode not in (0, 1) or not passed:
        failed.append(f"pytest ended with {done.returncode}: {done.stdout[-200:]}")
    numbers = {"passed": passed} | {
        name: versions[name] for name in KEPT if name in versions
    }
    return Found(passed + len(failed), failed, numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("blocks", nargs="*", default=BLOCKS, help="; ".join(BLOCKS))
    blocks = parser.parse_args().blocks
    if set(blocks) - set(BLOCKS):
        parser.error(f"blocks are {BLOCKS}")
    table = Table("versions")
    table.run(blocks, look)
    print(
        f"{table.cases} tests, {len(table.blocks)} environments, {len(table.failed)} failed"
    )
    sys.exit(bool(table.failed))


if __name__ == "__main__":
    main()

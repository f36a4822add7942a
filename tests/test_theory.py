"""The code that the page of equations names is there."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "theory" / "equations.md"


def named():
    """What stands in backticks in the last cell of each row of a table, with the row."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not set(cells[-1]) <= {"-"} and cells[-1] != "code":
            yield cells[-1], line


def resolve(name):
    """The object of a name that is relative to the package."""
    parts = name.split(".")
    module, rest = importlib.import_module("numpyro_sgp"), parts
    for i in range(1, len(parts) + 1):
        try:
            module = importlib.import_module(".".join(["numpyro_sgp", *parts[:i]]))
        except ModuleNotFoundError:
            break
        rest = parts[i:]
    assert rest, f"{name} is a module"
    for part in rest:
        module = getattr(module, part)
    return module


def test_every_row_of_a_table_names_code_in_backticks():
    for cell, line in named():
        assert re.fullmatch(r"`[\w.]+`", cell), line


@pytest.mark.parametrize("name", sorted({cell.strip("`") for cell, _ in named()}))
def test_the_page_of_equations_names_code_that_is_there(name):
    found = resolve(name)
    own = name.rsplit(".", 1)[-1]
    assert getattr(found, "__name__", own) == own  # properties have no name


def test_the_page_of_equations_is_not_empty():
    assert len(list(named())) > 50

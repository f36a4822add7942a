"""What scripts outside of the package import from it, and call in it, is there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "numpyro_sgp"
FOLDERS = ("benchmarks", "campaigns", "examples", "docs")
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "_build" not in path.parts
)


def names_in(source: str) -> list[tuple[str, str]]:
    """Modules of the package and what is taken from them, by import or as an attribute."""
    tree, modules, found = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            found += [(node.module, alias.name) for alias in node.names]
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == PACKAGE:
                    modules[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                found.append((modules[node.value.id], node.attr))
    return found


def is_there(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_what_a_script_takes_from_the_package_is_there(script):
    names = names_in((ROOT / script).read_text())
    assert not [f"{m}.{name}" for m, name in names if not is_there(m, name)]


def test_what_is_not_there_is_seen():
    source = f"import {PACKAGE} as s\nfrom {PACKAGE}.elbo import nothing\ns.none(s.fit)"
    found = names_in(source)
    assert {is_there(*pair) for pair in found[:2]} == {False}
    assert (PACKAGE, "fit") in found

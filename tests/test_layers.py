"""Imports inside the package go one way, and ArviZ stays in one room."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "numpyro_sgp"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

# A room is a module or package at the top of the package. It imports only from rooms of
# a lower level, and from itself.
LEVELS = {
    "linalg": 0,
    "kernels": 1,
    "likelihoods": 1,
    "means": 1,
    "inducing": 2,
    "families": 3,
    "distributions": 4,
    "tracing": 5,
    "elbo": 6,
    "layers": 6,
    "guides": 7,
    "inverse_free": 8,
    "mcmc": 8,
    "predictive": 8,
    "plots": 9,
    "training": 9,
    "diagnostics": 10,
    "fitting": 11,
    "integrated": 12,
    "datasets": 10,
}
# Modules such as `_typing` lie below every room, the public face above.
PRIVATE_LEVEL = min(LEVELS.values()) - 1
FACE = "__init__"
FACE_LEVEL = max(LEVELS.values()) + 1
ARVIZ_ROOM = "diagnostics"


def level_of(room: str) -> int:
    if room == FACE:
        return FACE_LEVEL
    if room.startswith("_"):
        return PRIVATE_LEVEL
    if room not in LEVELS:
        raise KeyError(
            f"{PACKAGE}.{room} is a room without a level: add it to LEVELS in "
            f"{Path(__file__).name}"
        )
    return LEVELS[room]


def room_of(module: str) -> str:
    """``numpyro_sgp.kernels.stationary`` -> ``kernels``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def is_room(name: str) -> bool:
    in_tree = (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()
    return name in LEVELS or in_tree


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """
    Line and full name of every module that ``source`` imports, in functions too.

    ``package`` is what its relative imports start from. ``from numpyro_sgp import x``
    is an import of the room ``x`` if there is one, and of the public face if not.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                if module == PACKAGE and is_room(alias.name):
                    yield node.lineno, f"{PACKAGE}.{alias.name}"
                else:
                    yield node.lineno, module


def violations(source: str, module: str, package: str) -> list[str]:
    """Sentences on what ``source``, the text of ``module``, may not import."""
    room = room_of(module)
    found = []
    for line, imported in imported_modules(source, package):
        top = imported.split(".")[0]
        if top == PACKAGE:
            target = room_of(imported)
            if target != room and not (
                level_of(target) < level_of(room)
                or level_of(target) == level_of(room) == PRIVATE_LEVEL
            ):
                found.append(f"{module}:{line}: {room} may not import from {target}")
        elif top.startswith("arviz") and room != ARVIZ_ROOM:
            found.append(f"{module}:{line}: only {ARVIZ_ROOM} may import {top}")
    return found


def modules() -> Iterator[tuple[str, str, Path]]:
    """Name, package and file of every module of the package."""
    for path in sorted(ROOT.rglob("*.py")):
        *parents, stem = path.relative_to(ROOT.parent).with_suffix("").parts
        package = ".".join(parents)
        yield (package if stem == FACE else f"{package}.{stem}"), package, path


def test_every_room_has_a_level():
    for module, _, _ in modules():
        level_of(room_of(module))


def test_imports_go_down_and_arviz_stays_in_its_room():
    found = [
        sentence
        for module, package, path in modules()
        for sentence in violations(path.read_text(encoding="utf-8"), module, package)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("linalg.kl", "import numpyro_sgp.kernels.stationary"),
        ("linalg.kl", "from numpyro_sgp.kernels import RBF"),
        ("linalg.kl", "from numpyro_sgp import kernels"),
        ("linalg.kl", "from ..kernels import RBF"),
        ("linalg.kl", "from .. import kernels"),
        ("linalg.kl", "def f():\n    from numpyro_sgp import kernels"),
        ("kernels.base", "import numpyro_sgp as sgp"),
        ("kernels.base", "from numpyro_sgp import RBF"),
        ("mcmc.ess", "from numpyro_sgp.predictive import GPPredictive"),
        ("predictive", "from .training import train"),
        ("_typing", "from numpyro_sgp.linalg import cholesky"),
        ("training", "import arviz as az"),
        ("mcmc.ess", "def f():\n    from arviz_stats import ess"),
    ],
)
def test_forbidden_import_is_found(module, source):
    module = f"{PACKAGE}.{module}"
    assert len(violations(source, module, module.rpartition(".")[0])) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernels.base", "from numpyro_sgp.linalg import cholesky"),
        ("kernels.base", "from numpyro_sgp import linalg"),
        ("kernels.base", "from . import stationary\nfrom .stationary import RBF"),
        ("kernels.base", "from .._typing import Array"),
        ("training", "from .elbo import TraceGP_ELBO"),
        ("_util", "from numpyro_sgp._typing import Array"),
        (
            "diagnostics.compare",
            "import arviz_plots\nfrom numpyro_sgp.training import train",
        ),
        ("training", "import jax\nfrom numpyro.infer import SVI"),
    ],
)
def test_allowed_import_is_left_alone(module, source):
    module = f"{PACKAGE}.{module}"
    assert violations(source, module, module.rpartition(".")[0]) == []


def test_unknown_room_is_told_to_get_a_level():
    with pytest.raises(KeyError, match="add it to LEVELS"):
        level_of("cellar")

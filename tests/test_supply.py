"""What the package is made of: what it imports and reads, its licences, its wheel."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "numpyro_sgp"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: A requirement: name, extras, lower bound.
REQUIREMENT = re.compile(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)$")
#: Code that executes what it reads, or reaches out of the process.
FORBIDDEN_MODULES = (
    *("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code"),
    *("subprocess", "multiprocessing", "socket", "urllib", "http", "requests", "ctypes"),
)
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
#: Found in licence names, expressions or classifiers of what may be depended on.
PERMISSIVE = re.compile(r"Apache|BSD|MIT|Python Software Foundation|PSF|MPL|ISC")
COPYLEFT = re.compile(r"\bA?GPL|LGPL|General Public")


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def imported(tree):
    """Names of modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def first_bounds():
    """Lower bounds by package, of the dependencies and of the extras for users."""
    wanted = [r for r in PROJECT["dependencies"] if ";" not in r]
    wanted += [
        r for name in ("mcmc", "tinygp") for r in PROJECT["optional-dependencies"][name]
    ]
    matches = [REQUIREMENT.match(r) for r in wanted]
    assert all(matches), wanted
    return {match[1]: match[2] for match in matches}


def test_nothing_that_is_read_is_executed():
    bad = []
    for path, tree in trees():
        roots = {name.split(".")[0] for name in imported(tree)}
        bad += [f"{path} imports {name}" for name in roots.intersection(FORBIDDEN_MODULES)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name in FORBIDDEN_CALLS or name == "os.system":
                bad.append(f"{path}:{node.lineno} calls {name}")
            if words.get("allow_pickle", "False") != "False":
                bad.append(f"{path}:{node.lineno} allows pickles")
            # The default of np.load refuses them; of np.save it does not.
            if name in ("np.save", "np.savez", "np.savez_compressed"):
                if "allow_pickle" not in words:
                    bad.append(f"{path}:{node.lineno} may write pickles")
    assert not bad


def test_what_is_imported_is_declared():
    declared = {name.replace("-", "_") for name in first_bounds()} | {"numpyro_sgp"}
    for path, tree in trees():
        roots = {name.split(".")[0] for name in imported(tree)}
        foreign = roots - set(sys.stdlib_module_names) - declared
        assert not foreign, path


def test_each_dependency_has_a_lower_bound_that_is_tested_and_told():
    bounds = first_bounds()
    lines = (ROOT / "campaigns" / "oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    told = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", page, re.M))
    told |= dict(re.findall(r"adds (\w+) ([\d.]+) ", page))
    assert told == bounds
    for name, bound in bounds.items():
        assert f"{oldest[name]}.".startswith(f"{bound}."), name


def requirements(name, seen):
    """All that a package needs here, by metadata of what is installed."""
    if name in seen:
        return seen
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # for another system or Python
        return seen
    seen[name] = distribution.metadata
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            requirements(re.match(r"[\w.-]+", requirement)[0], seen)
    return seen


def licence(data):
    """All that a package says of its licence."""
    said = data.get_all("Classifier") or []
    said = [line for line in said if line.startswith("License ::")]
    names = [data.get("License-Expression") or "", (data.get("License") or "")[:2000]]
    return " ".join(said + names)


def test_licences_permit_use():
    for name, data in requirements("numpyro-sgp", {}).items():
        said = licence(data)
        assert PERMISSIVE.search(said), f"{name}: {said[:200]!r}"
        classifier = " ".join(c for c in data.get_all("Classifier") or [] if "License" in c)
        assert not COPYLEFT.search(f"{classifier} {data.get('License-Expression')}"), name


def wheel(folder):
    """Built from the files of this checkout, without a network."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_a_wheel_is_built_the_same_twice_and_has_all_files(tmp_path):
    import zipfile

    first, second = (wheel(tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    names = set(zipfile.ZipFile(first).namelist())
    shipped = (
        p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    )
    assert {str(p.relative_to(ROOT)) for p in shipped} <= names
    assert not [n for n in names if not n.startswith(("numpyro_sgp/", "numpyro_sgp-"))]


FIT = """
import numpyro_sgp as sgp
data = sgp.datasets.snelson()
assert not sgp.__file__.startswith({root!r}), sgp.__file__
print(len(data.X))
"""


@pytest.mark.slow
def test_a_wheel_goes_into_an_empty_environment(tmp_path):
    place = tmp_path / "environment"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", wheel(tmp_path)]
    subprocess.run(install, check=True, cwd=tmp_path)
    run = [python, "-I", "-c", FIT.format(root=str(ROOT))]
    done = subprocess.run(run, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert int(done.stdout) > 100

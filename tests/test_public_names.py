"""What the package and its rooms export: there, documented, and annotated."""

import importlib
import inspect
import pkgutil

import pytest

import numpyro_sgp as sgp

ROOMS = ["numpyro_sgp"] + [
    f"numpyro_sgp.{room.name}"
    for room in pkgutil.iter_modules(sgp.__path__)
    if room.ispkg or hasattr(getattr(sgp, room.name, None), "__all__")
    if not room.name.startswith("_")
]
# Rooms whose public names say the types of all arguments and results.
ANNOTATED = (
    "families",
    "fitting",
    "inducing",
    "integrated",
    "inverse_free",
    "kernels",
    "likelihoods",
    "linalg",
    "mcmc",
    "means",
    "plots",
    "training",
)


def functions(name, public):
    """A public function, or the constructor, properties and public methods of a class."""
    if not inspect.isclass(public):
        return {name: public} if inspect.isfunction(public) else {}
    found = {}
    for attribute, value in vars(public).items():
        value = value.fget if isinstance(value, property) else value
        value = inspect.unwrap(getattr(value, "__func__", value))
        is_ours = getattr(value, "__module__", "").startswith("numpyro_sgp")
        is_public = not attribute.startswith("_") or attribute in ("__init__", "__call__")
        if inspect.isfunction(value) and is_ours and is_public:
            found[f"{name}.{attribute}"] = value
    return found


def unannotated(function):
    """Arguments without a type, ``return`` among them; those of models are of any."""
    signature = inspect.signature(function)
    of_a_model = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    missing = [
        name
        for name, argument in signature.parameters.items()
        if argument.annotation is argument.empty
        and name not in ("self", "cls", "intermediates")
        and argument.kind not in of_a_model
    ]
    if signature.return_annotation is signature.empty and function.__name__ != "__init__":
        missing.append("return")
    return missing


@pytest.mark.parametrize("room", ROOMS)
def test_public_names_are_there_and_documented(room):
    module = importlib.import_module(room)
    assert module.__doc__ and len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        public = getattr(module, name)
        if inspect.isclass(public) or inspect.isfunction(public):
            assert public.__doc__, f"{room}.{name} has no docstring"


@pytest.mark.parametrize("room", ANNOTATED)
def test_public_names_are_annotated(room):
    found = {}
    module = importlib.import_module(f"numpyro_sgp.{room}")
    names = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
    for name in names:
        public = getattr(module, name)
        if getattr(public, "__module__", "").startswith(f"numpyro_sgp.{room}"):
            for full_name, function in functions(name, public).items():
                if missing := unannotated(function):
                    found[full_name] = missing
    assert not found

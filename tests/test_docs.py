"""The documentation is complete: sentences and examples of public names, a map of the house."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import functron

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "functron"
ROOMS = ("data", "models", "ops", "spmd", "transforms")


def public_modules() -> dict[str, ModuleType]:
    """The modules whose names users are to know, by the name that they are imported by."""
    exported = {f"functron.{name}": getattr(functron, name) for name in functron.__all__}
    modules = {name: value for name, value in exported.items() if inspect.ismodule(value)}
    rooms = {f"functron.{room}": import_module(f"functron.{room}") for room in ROOMS}
    return {"functron": functron, **modules, **rooms}


def public_names() -> dict[str, object]:
    """Everything in the ``__all__`` of a public module."""
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in public_modules().items()
        for name in getattr(module, "__all__", ())
    }


def test_public_names_have_sentences():
    problems = []
    for path, value in public_names().items():
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            continue  # a constant: its comment or string stands where it is defined
        first = inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0]
        made_up = first.startswith(f"{path.rpartition('.')[2]}(")  # by dataclass or NamedTuple
        if made_up or not first.endswith((".", ":")):
            problems.append(f"{path}: {first!r}")
    assert problems == []


def test_map_of_the_house_is_that_of_the_tree():
    """CONTRIBUTING.md has a row for every room: its name, and the first line of its docstring."""
    rooms = {f"{path.parent.name}/": path for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name: path for path in PACKAGE.glob("[!_]*.py")}
    wanted = {
        name: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        for name, path in {**rooms, **modules}.items()
    }
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## The house")[2]
    assert dict(re.findall(r"^\| `([a-z_]+(?:/|\.py))` \| (.*) \|$", section, re.M)) == wanted

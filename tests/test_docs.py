"""The documentation is complete: sentences and examples of public names, a map of the house."""

from __future__ import annotations

import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import functron

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "functron"
# types of what functions take and return, which need no example of their own
TYPES = {
    "functron.gpt.Details",
    "functron.hub.Format",
    "functron.nn.NormKind",
    "functron.nn.Predictions",
    "functron.ops.Gradient",
    "functron.t5.Cache",
}
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


def code_of(path: Path) -> str:
    """The code of a notebook, or the text of any other file."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


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


def test_public_names_have_examples():
    """Code that runs in CI uses each: a notebook, an example, the README or a test."""
    files = [ROOT / "README.md", *ROOT.glob("examples/*.py"), *ROOT.glob("notebooks/*.ipynb")]
    words = set()
    for path in [*files, *ROOT.glob("tests/**/*.py")]:
        if path != Path(__file__):
            words.update(re.findall(r"\w+", code_of(path)))
    without = {path for path in public_names() if path.rpartition(".")[2] not in words}
    assert without - TYPES == set()


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

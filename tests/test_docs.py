"""The documentation is complete: sentences and examples of public names, a map of the house."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import functron

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "functron"
# types of what functions take and return, which need no example of their own
TYPES = {
    "functron.gpt.Details",
    "functron.hub.HubFormat",
    "functron.nn.NormKind",
    "functron.nn.Predictions",
    "functron.ops.Gradient",
    "functron.optim.RateSchedule",
    "functron.precision.PrecisionPolicy",
    "functron.t5.T5Cache",
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


@pytest.mark.applications("planner", "zoo")
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


@pytest.mark.applications("planner", "zoo")
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


REFERENCE = re.compile(r"(?<![`\w])`([A-Za-z_]\w*(?:\.[A-Za-z_*]\w*)+)(?:\([^`]*\))?`(?!`)")


@functools.cache
def attributes(kind: type) -> set[str]:
    """What instances of a class have, by annotations, assignments and the docstring."""
    found: set[str] = set()
    for base in kind.__mro__:
        found |= set(vars(base).get("__annotations__", {}))
        section = (base.__doc__ or "").partition("Attributes:")[2]
        found |= {
            name.strip()
            for row in re.findall(r"^ +([\w, ]+):", section, re.M)
            for name in row.split(",")
        }
        if base.__module__.startswith("functron"):
            found |= set(re.findall(r"\bself\.(\w+)(?=[,\w\s.]* =)", inspect.getsource(base)))
    return found


def resolves(start: object, names: list[str]) -> bool:
    """Whether these are names in each other; ``*`` is any."""
    found = start
    for i, name in enumerate(names):
        if name == "*":
            return True
        if hasattr(found, name):
            found = getattr(found, name)
        elif hasattr(found, "__path__") and find_spec(f"{found.__name__}.{name}"):
            found = import_module(f"{found.__name__}.{name}")
        else:
            return inspect.isclass(found) and i + 1 == len(names) and name in attributes(found)
    return True


def stands_for_something(reference: str, module: ModuleType) -> bool:
    """Whether a dotted name is one where it is written: in a module, the package, or a library."""
    first, *rest = reference.split(".")
    if any(resolves(scope, [first, *rest]) for scope in (module, functron, builtins)):
        return True
    return find_spec(first) is not None and resolves(import_module(first), rest)


def test_references_in_sources_resolve():
    """Each dotted name in single backticks, in docstrings, comments and messages."""
    problems = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found = set(REFERENCE.findall(path.read_text()))
        if found and path.name != "__main__.py":
            module = import_module(name)
            problems += [
                f"{name}: `{x}`" for x in sorted(found) if not stands_for_something(x, module)
            ]
    assert problems == []


@pytest.mark.applications("guard", "megatron", "planner", "zoo")
def test_references_in_texts_resolve():
    """Those of functron's own names, in Markdown and in the cells of notebooks."""
    problems = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("kernels/*.md"), *ROOT.glob("notebooks/*.ipynb")]:
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        for found in sorted(set(REFERENCE.findall(text))):
            first, *rest = found.split(".")
            if first in ("ft", "functron") and not resolves(functron, rest):
                problems.append(f"{path.name}: `{found}`")
    assert problems == []


def test_a_reference_to_nothing_is_found():
    for found in ("spmd.shards", "functron.precision.products", "Mesh.nothing", "hub.megatron.x"):
        assert not stands_for_something(found, functron)
    for found in (
        "spmd.simulate",
        "functron.Mesh.axes",
        "functron.State.params",
        "torch.func.grad",
    ):
        assert stands_for_something(found, functron)

"""The house of functron: rooms in their order, imports that only go down, and no cycle."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "functron"

FLOORS = (
    ("core",),
    ("spmd",),
    ("program",),
    ("compiler",),
    ("transforms",),
    ("ops",),
    ("nn", "optim", "pipeline", "data", "precision"),
    ("models",),
    ("checkpoint",),
    ("hub",),
    ("partitioning", "plan"),
    ("training",),
    ("apps",),
    ("cli",),
)
"""From the ground up. A room imports itself and floors below; rooms of a floor do not meet."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FACES = {"functron", "functron.__main__"}  # of the whole house: they import from everywhere

Imports = Mapping[str, Mapping[str, int]]
"""Of every module the modules that it imports anywhere, each with the line."""


def sources() -> dict[str, str]:
    """The text of every module, by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports_of(text: str, modules: Container[str]) -> dict[str, int]:
    """Also those in functions and under TYPE_CHECKING; ``from room import module`` is of both."""
    found: dict[str, int] = {}
    for node in statements(ast.parse(text).body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            both = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
            names = [name if name in modules else parent for name, parent in both]
        else:
            continue
        for name in names:
            if name in modules:
                found.setdefault(name, node.lineno)
    return found


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All statements, at any depth; expressions, which hold no imports, are not walked."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            if isinstance(inner, list):
                yield from statements(inner)


def room(module: str) -> str:
    return module.split(".")[1]


def upward(imports: Imports) -> list[str]:
    """Imports of another room on the same floor or above, or of the whole house."""
    return [
        f"{name}:{line} imports {target}"
        for name, targets in imports.items()
        if name not in FACES
        for target, line in targets.items()
        if target in FACES
        or (room(target) != room(name) and FLOOR[room(target)] >= FLOOR[room(name)])
    ]


def cycle(imports: Imports) -> list[str]:
    """The modules of one cycle of imports; none where there is no cycle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return sources()


@pytest.fixture(scope="module")
def imports(texts) -> Imports:
    return {name: imports_of(text, texts) for name, text in texts.items()}


def test_imports_go_down(imports):
    assert upward(imports) == []


def test_no_cycle(imports):
    assert cycle(imports) == []


@pytest.mark.parametrize(
    "text",
    [
        "from functron.cli import options",
        "from functron.nn import attention",
        "def f():\n    from functron.nn.attention import self_attention",
        "if TYPE_CHECKING:\n    from functron.nn.attention import self_attention",
        "import functron.nn.attention",
        "import functron",
    ],
)
def test_an_upward_import_is_found(texts, text):
    assert len(upward({"functron.core.tree": imports_of(text, texts)})) == 1


def test_a_cycle_is_found(texts):
    names = ("functron.core.closure", "functron.core.tree")
    assert cycle({name: imports_of(texts[name], texts) for name in names}) == []
    planted = "if TYPE_CHECKING:\n    from functron.core.closure import hoist"  # is enough
    changed = {**texts, names[1]: planted}
    assert {*cycle({name: imports_of(changed[name], texts) for name in names})} == {*names}


def test_every_room_stands_on_a_floor(texts):
    rooms = {room(name) for name in texts if name not in FACES}
    assert rooms == FLOOR.keys()


def test_the_size_of_the_house(texts):
    at_top = [path for path in ROOT.iterdir() if path.name != "__pycache__"]
    more = (ROOT / "plan").exists()  # a room that becomes an application
    assert len(at_top) <= 20 + more
    assert len(texts) <= 220 + 2 * more


def test_every_room_says_what_it_is(texts):
    for name in (f"functron.{room}" for room in FLOOR):
        docstring = ast.get_docstring(ast.parse(texts[name])) or ""
        first, _, rest = docstring.partition("\n")
        assert first.endswith("."), name
        assert not rest or rest.startswith("\n"), f"{name}: the first line is a sentence"


def test_docstrings_say_what_things_are(texts):
    """In the words of the field: none opens with a "What" that the reader has to resolve."""
    assert [name for name, text in texts.items() if '"""What ' in text] == []

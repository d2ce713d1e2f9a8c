"""The house of functron: rooms in their order, imports that only go down, and no cycle."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from functron.apps import APPLICATIONS

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
    ("partitioning",),
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


def statements(body: Sequence[ast.AST], *, into_functions: bool = True) -> Iterator[ast.AST]:
    """All statements, at any depth; expressions, which hold no imports, are not walked."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef) and not into_functions:
            continue
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            if isinstance(inner, list):
                yield from statements(inner, into_functions=into_functions)


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


def names_of_applications(text: str) -> list[int]:
    """The lines of a module that import an application, or name one in a text that is code.

    Docstrings may speak of planners and guards; a text that is one of their names, or the path of
    one, is a key or an import by name.
    """
    found, code = [], ast.parse(text)
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if " " not in node.value else []
        else:
            continue
        paths = ("functron.apps", *(f"apps.{name}" for name in APPLICATIONS))
        if any(name in APPLICATIONS or any(path in name for path in paths) for name in names):
            found.append(node.lineno)
    return found


def between_applications(imports: Imports) -> list[str]:
    """Imports of one application by another; the table that names them all is of neither."""
    return [
        f"{name}:{line} imports {target}"
        for name, targets in imports.items()
        for target, line in targets.items()
        if name.count(".") > 1 and target.count(".") > 1
        and name.split(".")[:2] == target.split(".")[:2] == ["functron", "apps"]
        and name.split(".")[2] != target.split(".")[2]
    ]  # fmt: skip


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


def test_the_library_knows_no_application(texts):
    """It knows where the table of plugins is, which settings name, and nothing that is in it."""
    below = [name for name in texts if name not in FACES and FLOOR[room(name)] < FLOOR["apps"]]
    table = '\nAPPLICATIONS = "functron.apps"\n'
    assert texts["functron.core.errors"].count(table) == 1
    found = {name: names_of_applications(texts[name].replace(table, "")) for name in below}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_applications_do_not_meet(imports):
    assert between_applications(imports) == []
    planted = {"functron.apps.guard.hooks": {"functron.apps.planner.search": 3}}
    assert between_applications(planted) == [
        "functron.apps.guard.hooks:3 imports functron.apps.planner.search"
    ]


def test_the_table_has_every_application():
    folders = {path.name for path in (ROOT / "apps").iterdir() if (path / "__init__.py").is_file()}
    tested = {path.name for path in (Path(__file__).parent / "apps").iterdir() if path.is_dir()}
    # one may be left out, with its tests
    assert folders == {name for name in APPLICATIONS if name in tested}


@pytest.mark.parametrize(
    "text",
    [
        "from functron.apps import planner",
        "def f():\n    import functron.apps.planner.search",
        'x = importlib.import_module("functron.apps.planner")',
        'x = registry["planner"]',
    ],
)
def test_an_application_in_the_library_is_found(text):
    assert len(names_of_applications(text)) == 1


def needs_of_tests(tests: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """Imports of an application or its tests, as a test outside of that application is imported.

    What functions import is fine: a test that is marked ``applications`` is skipped without it.

    Args:
        tests: by path below tests/, the text.
        names: of `functron` that are in an application, and the module of each.
    """
    found = []
    for path, text in tests.items():
        own = path.split("/")[1] if path.startswith("apps/") else ""
        for node in statements(ast.parse(text).body, into_functions=False):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for module in modules:
                _, _, below = names.get(module, module).partition(".apps.")
                name = below.partition(".")[0]
                if name in APPLICATIONS and name != own:
                    found.append(f"{path}:{node.lineno} imports {module}")
    return found


def test_tests_need_the_applications_that_they_are_of():
    """So that an application goes with its folder and its tests, and all others stay green."""
    tests = Path(__file__).parent
    texts = {path.relative_to(tests).as_posix(): path.read_text() for path in tests.rglob("*.py")}
    assert needs_of_tests(texts, public_names_of_applications()) == []


def public_names_of_applications() -> dict[str, str]:
    code = ast.parse((ROOT / "__init__.py").read_text())
    return {
        f"functron.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for node in statements(code.body)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("functron.apps")
        for alias in node.names
    }


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("nn/test_x.py", "from functron.apps import planner", ["functron.apps.planner"]),
        ("nn/test_x.py", "if x:\n    import functron.apps.zoo.bert", ["functron.apps.zoo.bert"]),
        ("test_x.py", "from functron import bert, gpt, plan", ["functron.bert", "functron.plan"]),
        ("cli/test_x.py", "from tests.apps.zoo import tiny", ["tests.apps.zoo.tiny"]),
        ("apps/guard/test_x.py", "from tests.apps.zoo import tiny", ["tests.apps.zoo.tiny"]),
        ("apps/test_x.py", "import functron.apps.guard", ["functron.apps.guard"]),
        ("apps/guard/test_x.py", "from functron.apps.guard import faults", []),
        ("nn/test_x.py", "from functron.apps import APPLICATIONS", []),
        ("nn/test_x.py", "def test_x():\n    from functron.apps import zoo", []),
    ],
)
def test_a_test_that_needs_an_application_is_found(path, text, found):
    lines = needs_of_tests({path: text}, public_names_of_applications())
    assert [line.partition(" imports ")[2] for line in lines] == found


_WITHOUT = """
import sys
import tempfile
from functron import apps
from functron.cli.main import COMMANDS, main

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("functron.apps."):
            raise ModuleNotFoundError(name, name=name)

commands = {command for each in apps.APPLICATIONS.values() for command in each}
assert commands - apps.missing_commands().keys() <= COMMANDS.keys()
above = ("functron.apps", "functron.cli", "functron.training")
for name in [name for name in sys.modules if name.startswith(above)]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocker())
from functron import apps
from functron.cli.main import COMMANDS, main
assert not commands & COMMANDS.keys()
assert main(["params", "--model", "tiny"]) == 0
assert main(["doctor", "--nproc", "1"]) == 2
small = ["train", "--model", "llama3-tiny", "--seq", "8", "--global-batch", "2", "--format", "mock"]
assert main([*small, "--dry-run"]) == 0
assert main([*small, "--dry-run", "--hardware", "h100"]) == 2
assert main(["plan", "--gpus", "8"]) == 2
with tempfile.TemporaryDirectory() as folder:
    assert main([*small, "--steps", "2", "--out", folder + "/run"]) == 0
assert main([*small, "--hang-after", "3"]) == 2
from functron import hub
from functron.models.family import families, list_presets
from functron.training.config import configure, read_settings
assert list(families()) == ["gpt"]
try:
    read_settings({"mamba": "none", "restarts": {"max_restarts": 1}, "order": "megatron"}, "x")
except ValueError as error:
    guard = "functron/apps/guard"
    assert f"restarts: got an unknown key; wanted {guard}, which is not there" in str(error)
    assert "mamba" not in str(error)
else:
    raise AssertionError
try:
    configure(order="megatron").data.sample_order
except ValueError as error:
    assert "'megatron', of functron/apps/megatron, which is not there" in str(error)
else:
    raise AssertionError
assert not [name for name in list_presets() if name.startswith(("bert", "t5", "mamba"))]
assert main([*small, "--model", "bert-tiny", "--dry-run"]) == 2
assert main([*small, "--mamba.pattern", "M", "--dry-run"]) == 2
assert "llama" in hub.FORMATS and "bert" not in hub.FORMATS
import functron
assert not hasattr(functron, "bert") and hasattr(functron, "gpt")
"""


def test_the_command_line_does_without_applications():
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot tell how long a step takes" in done.stderr
    assert "hang-after" in done.stderr
    assert "model: got 'bert-tiny'" in done.stderr
    assert "'plan': a command of functron/apps/planner, which is not there" in done.stderr
    assert "not there, with what they have: functron/apps/guard, functron/apps/zoo" in done.stderr


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


def test_imports_stand_at_the_top(texts):
    """None hides a cycle in a function; torch's compiler, which takes seconds, is loaded at use."""
    inside = [
        f"{name}:{node.lineno}"
        for name, text in texts.items()
        for block in ast.parse(text).body
        if isinstance(block, ast.FunctionDef | ast.ClassDef)
        for node in statements(block.body)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "functron"
        if [each.name for each in node.names] != ["inductor"]
    ]
    assert inside == []


def test_every_room_stands_on_a_floor(texts):
    rooms = {room(name) for name in texts if name not in FACES}
    assert rooms == FLOOR.keys()


def test_the_size_of_the_house(texts):
    at_top = [path for path in ROOT.iterdir() if path.name != "__pycache__"]
    assert len(at_top) <= 20
    assert len(texts) <= 275


def test_every_room_says_what_it_is(texts):
    for name in (f"functron.{room}" for room in FLOOR):
        docstring = ast.get_docstring(ast.parse(texts[name])) or ""
        first, _, rest = docstring.partition("\n")
        assert first.endswith("."), name
        assert not rest or rest.startswith("\n"), f"{name}: the first line is a sentence"


def test_docstrings_say_what_things_are(texts):
    """In the words of the field: none opens with a "What" that the reader has to resolve."""
    assert [name for name, text in texts.items() if '"""What ' in text] == []


SHARED_TYPE_NAMES = frozenset(["Comparison", "Record", "Verdict"])
"""Names of types that several modules still have; it gets shorter."""


def type_names(text: str) -> set[str]:
    """The public classes and aliases of types of a module."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            either = isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)
            if (
                not name.isupper()
                and name[0].isupper()
                and (either or isinstance(value, ast.Subscript))
            ):
                found.add(name)
    return {name for name in found if not name.startswith("_")}


def test_a_type_name_means_one_thing(texts):
    places: dict[str, list[str]] = {}
    for module, text in texts.items():
        for name in type_names(text):
            places.setdefault(name, []).append(module)
    shared = {name: places[name] for name in places if len(places[name]) > 1}
    assert {name: at for name, at in shared.items() if name not in SHARED_TYPE_NAMES} == {}


def test_type_names_are_found():
    text = "Aa = int | str\nBb = Literal[1]\nONE = x[1]\n_Cc = int | str\nclass D: ...\nEe = f()"
    assert type_names(text) == {"Aa", "Bb", "D"}


# --- references in docstrings, and sizes of functions

REFERENCE = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
OTHERS = frozenset(
    [
        "torch",
        "F",
        "time",
        "jax",
        "optax",
        "numpy",
        "scipy",
        "safetensors",
        "transformers",
        "math",
        "os",
    ]
)
"""Libraries, whose names are not looked up."""

UNRESOLVED = frozenset(
    [
        "eval_batches",
        "eval_data",
        "eval_every",
        "lora_targets",
    ]
)
"""References of other rooms that point at nothing; it gets shorter."""


def docstrings(module: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [
        ast.get_docstring(node, clean=False) or ""
        for node in (module, *statements(module.body))
        if isinstance(node, kinds)
    ]


def defined_names(module: ast.Module) -> set[str]:
    """The names that a module defines at any depth, imports, or takes as arguments."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


@pytest.fixture(scope="module")
def trees(texts) -> Mapping[str, ast.Module]:
    return {name: ast.parse(text) for name, text in texts.items()}


@pytest.fixture(scope="module")
def names(trees) -> Mapping[str, set[str]]:
    return {module: defined_names(tree) for module, tree in trees.items()}


def unresolved(documented: Mapping[str, Sequence[str]], names: Mapping[str, set[str]]) -> list[str]:
    """References in the docstrings of modules to what no module has; full paths are looked up."""
    public = {name for own in names.values() for name in own if not name.startswith("_")}
    public |= {name.rpartition(".")[2] for name in names} | {*dir(builtins)}

    def resolves(module: str, path: str) -> bool:
        first, *rest = path.split(".")
        if first in OTHERS:
            return True
        if first != "functron":
            return all(name in public or name in names[module] for name in (first, *rest))
        places = [".".join(path.split(".")[:k]) for k in range(1, 2 + len(rest))]
        place = [name for name in places if name in names][-1]
        rest = path.removeprefix(place).split(".")[1:]
        return not rest or (rest[0] in names[place] and public.issuperset(rest[1:]))

    return [
        f"{module}: {path}"
        for module, found in documented.items()
        for docstring in found
        for path in REFERENCE.findall(docstring)
        if not resolves(module, path)
    ]


def test_references_in_docstrings_resolve(trees, names):
    found = unresolved({module: docstrings(tree) for module, tree in trees.items()}, names)
    assert [each for each in found if each.partition(": ")[2] not in UNRESOLVED] == []


@pytest.mark.parametrize(
    ("path", "is_found"),
    [
        ("shard_map", False),
        ("functron.spmd.shard_map.shard_map", False),
        ("functron.spmd.shard_map.map_shards", True),
        ("functron.spmd.nothing", True),
        ("Mesh.bind", False),
        ("Mesh.bound_nowhere", True),
        ("_Memory", True),
        ("torch.vmap", False),
    ],
)
def test_a_reference_to_nothing_is_found(names, path, is_found):
    planted = {"functron.core.scopes": [f"See `{path}`, and ``code`` of any kind."]}
    assert bool(unresolved(planted, names)) == is_found


MOST_LINES, MOST_PARAMETERS = 60, 12
LARGE = frozenset(
    [
        "_introduction",
        "context_attention",
        "generate",
        "moe",
        "partition",
    ]
)
"""Functions that are larger yet; it gets shorter."""


def size(function: ast.FunctionDef, lines: Sequence[str]) -> tuple[int, int]:
    """The lines of code of a function without its signature and docstring, and its parameters."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    begin = (first.end_lineno or 0) if documented else first.lineno - 1
    code = [line for row in lines[begin : function.end_lineno] if (line := row.strip())]
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return sum(not line.startswith("#") for line in code), len({*names} - {"self", "cls"})


def test_functions_are_small(texts, trees):
    large = []
    for module, text in texts.items():
        lines = text.splitlines()
        # the hyperparameters of an optimizer are as many as its paper has
        most = (
            99 if module.startswith(("functron.optim", "functron.ops.adamw")) else MOST_PARAMETERS
        )
        for node in statements(trees[module].body):
            if isinstance(node, ast.FunctionDef) and node.name not in LARGE:
                length, parameters = size(node, lines)
                public = not node.name.startswith("_")
                if length > MOST_LINES or (public and parameters > most):
                    large.append(f"{module}.{node.name}: {length} lines, {parameters} parameters")
    assert large == []


def test_sizes_of_functions():
    text = 'def f(\n    a, *, b\n):\n    """Doc."""\n    # why\n\n    x = 1\n    return x'
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert size(function, text.splitlines()) == (2, 2)

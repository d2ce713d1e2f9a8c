"""The public names: the same for readers, type checkers and Python, and imported only when used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import functron
from functron import training

LINES = {
    "spmd": 9_550,
    "program": 12_700,
    "compiler": 21_700,
    "transforms": 19_600,
    "ops": 12_400,
    "pipeline": 31_800,
    "data": 12_000,
    "precision": 22_500,
    "optim": 21_400,
    "nn": 28_600,
    "models.gpt": 41_000,
    "models": 42_600,
    "checkpoint": 13_900,
    "hub": 58_500,
    "partitioning": 39_000,
}
"""At most so many lines of functron are loaded for all public names of a room, or for a module."""


ROOMS = sorted(
    str(path.parent.relative_to(Path(functron.__file__).parent.parent)).replace("/", ".")
    for path in Path(functron.__file__).parent.rglob("__init__.py")
    if "import_lazily(__name__)" in path.read_text()
)


WHOLE = pytest.param("functron", marks=pytest.mark.applications("planner", "zoo"))


@pytest.mark.parametrize("package", [WHOLE, *(room for room in ROOMS if room != "functron")])
def test_public_names_are_the_same_for_all_and_can_be_imported(package):
    package = importlib.import_module(package)
    module = ast.parse(Path(package.__file__).read_text())
    (typed,) = [node for node in module.body if isinstance(node, ast.If)]
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    places = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in imports
        for alias in node.names
    }
    assert sorted(places) == sorted(package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)
    assert {*package.__all__} <= {*dir(package)}
    for name, (source, original) in places.items():
        namespace: dict = {}
        exec(f"from {source} import {original}", namespace)
        assert getattr(package, name) is namespace[original], name
    with pytest.raises(AttributeError, match="has no attribute 'grid'"):
        _ = package.grid


def test_a_function_keeps_its_name_from_the_module_that_it_is_in():
    for module in ("functron.training.train", "functron.training.loop", "functron.training.config"):
        importlib.import_module(module)
    assert training.train is sys.modules["functron.training.train"].train
    assert training.loop is sys.modules["functron.training.loop"].loop
    assert training.config is sys.modules["functron.training.config"]
    for module in ("functron.nn.mla", "functron.transforms.scan", "functron.transforms.policies"):
        importlib.import_module(module)
    assert functron.nn.mla is sys.modules["functron.nn.mla"].mla
    assert functron.transforms.scan is sys.modules["functron.transforms.scan"].scan
    assert functron.transforms.policies is sys.modules["functron.transforms.policies"]


LOADED = """
import os
import sys
import torch

for room in sys.argv[1:]:
    if os.fork() == 0:  # so that torch is imported once
        exec(f"from functron.{room} import *")
        own = [name for name in sys.modules if name.partition(".")[0] == "functron"]
        print(room, sum(len(open(sys.modules[name].__file__).readlines()) for name in own))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, room
"""


def test_a_room_loads_what_it_needs():
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *LINES], capture_output=True, text=True, check=True
    )
    loaded = {room: int(lines) for room, lines in map(str.split, done.stdout.splitlines())}
    assert loaded.keys() == LINES.keys()
    assert {room: lines for room, lines in loaded.items() if lines > LINES[room]} == {}


def test_a_room_is_empty_until_it_is_used():
    program = "import sys, functron.checkpoint, functron.nn, functron.training; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    own = {name for name in done.stdout.split() if name.partition(".")[0] == "functron"}
    assert own == {f"functron{room}" for room in ("", ".core", ".checkpoint", ".nn", ".training")}


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (["-m", "functron", "--version"], 0),
        (["-m", "functron", "--help"], 0),
        (["-m", "functron"], 2),
        (["-m", "functron", "trian"], 2),
        (["-c", "import functron, functron.training"], 0),
    ],
)
def test_what_needs_no_torch_does_not_import_it(program, code):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *program], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "functron" in imported
    assert not imported & {"torch", "numpy", "tyro", "jax"}


ALONE = r"""
import re
import sys
from importlib.metadata import packages_distributions, requires

def needed(package):
    rows = (row for row in requires(package) if "extra ==" not in row)
    return {re.split(r"[^\w-]", row)[0] for row in rows}


absent = needed("functron") - needed("torch") - {"torch", "numpy", *sys.argv[1:]}
assert "tyro" in absent, absent
names = {name for name, owners in packages_distributions().items() if absent & set(owners)}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
import torch
import functron as ft
import functron.checkpoint, functron.data, functron.hub, functron.pipeline, functron.training.train
from functron.cli.main import main

config = ft.gpt.PRESETS["tiny"]
defs, optimizer = ft.gpt.defs(config), ft.optim.adamw(1e-3)
specs = ft.param_specs(defs, ft.gpt.rules(config, ft.Mesh()))
loss = lambda params, batch, key: ft.gpt.loss(config, params, batch)
step = ft.make_step(ft.mean_gradients(loss, ft.gpt.num_targets), optimizer, ft.Mesh(), specs)
state = ft.init_state(ft.random.key(0), defs, specs, optimizer, ft.Mesh())
tokens = torch.zeros(2, 4, dtype=torch.long)
state, metrics = step(state, {"tokens": tokens, "targets": tokens, "rows": torch.arange(2)})
assert metrics["loss"].isfinite()
sys.exit(main(["params"]))
"""


def test_a_step_needs_torch_numpy_and_optree_alone():
    """From the source tree, on a machine that has these: the command line says what it lacks."""
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run([*command, "optree"], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "params: got no tyro; wanted functron installed" in done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run(command, capture_output=True, text=True)
    assert "functron: got no optree; wanted it beside torch and numpy" in done.stderr

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


@pytest.mark.parametrize("package", [functron, training])
def test_public_names_are_the_same_for_all_and_can_be_imported(package):
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
    for module in ("functron.training.train", "functron.training.config"):
        importlib.import_module(module)
    assert training.train is sys.modules["functron.training.train"].train
    assert training.config is sys.modules["functron.training.config"]


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

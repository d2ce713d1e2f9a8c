"""The parts of one's own that CONTRIBUTING.md shows: each is two files, which run as they are."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL))
PARTS = [name for name in FILES if not name.startswith("test_")]


def test_there_are_six():
    assert len(PARTS) == 6
    assert {f"test_{name}" for name in PARTS} == FILES.keys() - set(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_and_its_test_run(name, tmp_path, monkeypatch):
    for file in (name, f"test_{name}"):
        (tmp_path / file).write_text(FILES[file])
        monkeypatch.delitem(sys.modules, file.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"test_{name.removesuffix('.py')}")
    tests = [value for key, value in vars(module).items() if key.startswith("test_")]
    assert tests
    for test in tests:
        test(tmp_path)

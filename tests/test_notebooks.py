"""Every notebook runs from top to bottom, and is kept with its outputs, small."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXAMPLES = [*NOTEBOOKS, *sorted((ROOT / "examples").glob("*.py"))]
MAX_BYTES = 400 * 1024


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.fixture
def readers(monkeypatch, tmp_path):
    """The environment of a reader's kernel, and an empty folder."""
    python_path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(python_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    # JAX's settings for these tests are not what a reader's kernel would have
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.chdir(tmp_path)


def test_begins_in_a_kernel(readers):
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    code = [number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    del notebook.cells[code[2] :]  # all of it runs below
    # raises CellExecutionError with the cell and its traceback where one fails
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


# The cells in the shell that kernels have, in a process that has imported torch before it was made.
CELLS = """
import json, os, sys
import matplotlib, nbformat
from IPython.core.interactiveshell import InteractiveShell
from matplotlib_inline.backend_inline import configure_inline_support
from traitlets.config import Config

for name in [name for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name]:
    del os.environ[name]
shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
backend = "module://matplotlib_inline.backend_inline"
matplotlib.use(backend)
configure_inline_support(shell, backend)
cells = [c.source for c in nbformat.read(sys.argv[1], as_version=4).cells if c.cell_type == "code"]
for old, new in json.loads(sys.argv[2]):
    found = [source.count(old) for source in cells]
    assert sum(found) == 1, f"{old!r} is written {sum(found)} times"
    cells[found.index(1)] = cells[found.index(1)].replace(old, new)
for source in cells:
    shell.run_cell(source).raise_error()
print("to the end")
"""

# Numbers of steps: each cell of these notebooks, and what it asserts, holds for a few as for many.
SHORTER = {
    "02_tensor_parallel_transformer": [
        ("num_steps=30", "num_steps=3"),
        ("decay=0.9), state, 60", "decay=0.9), state, 3"),
    ],
    "06_moe_and_long_context": [("def train(config, steps=20)", "def train(config, steps=3)")],
    "07_data_and_models": [
        ("steps = 60", "steps = 6"),
        ("decay_steps=20, warmup_steps=5", "decay_steps=2, warmup_steps=2"),
    ],
    "10_faults": [("steps=100,", "steps=60,"), ("range(100)", "range(60)")],  # the spike is at 53
}


APPLICATIONS = {
    "07_data_and_models": "zoo",
    "10_faults": "guard",
    "11_a_trillion_parameters": "planner",
    "12_partition_a_module": "planner",
    "13_from_megatron": "megatron",
}
"""The application that a notebook is about or uses."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.applications(APPLICATIONS[path.stem]))
        if path.stem in APPLICATIONS
        else path
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_runs(path, torchrun, readers, request):
    """To the end, with few steps of training; with ``--full`` as it is."""
    changes = [] if request.config.getoption("--full") else SHORTER.get(path.stem, [])
    done = torchrun(CELLS, 1, path, json.dumps(changes), timeout=300)
    assert "to the end" in done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < MAX_BYTES


def test_own_parts_are_of_forty_lines_at_most():
    notebook = nbformat.read(ROOT / "notebooks/08_your_own_parts.ipynb", as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert max(len(list(filter(str.strip, source.splitlines()))) for source in code) <= 40


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_imports_public_names(path):
    """No reader needs more than the package and its rooms: ``from functron import tree``."""
    deep = re.findall(r"(?:from|import) functron\.\w+\.\S+", path.read_text())
    assert deep == []

"""Every notebook runs from top to bottom, and is kept with its outputs, small."""

from __future__ import annotations

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
import os, sys
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
for cell in nbformat.read(sys.argv[1], as_version=4).cells:
    if cell.cell_type == "code":
        shell.run_cell(cell.source).raise_error()
print("to the end")
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, torchrun, readers):
    assert "to the end" in torchrun(CELLS, 1, path, timeout=300).stdout


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

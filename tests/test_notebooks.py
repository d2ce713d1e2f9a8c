"""Every notebook runs from top to bottom, and is kept with its outputs, small."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

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
"""

TO_THE_END = """
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
    "02_tensor_parallel_transformer": "notebook",
    "07_data_and_models": "zoo",
    "10_faults": "guard",
    "11_a_trillion_parameters": "planner",
    "12_partition_a_module": "planner",
    "13_from_megatron": "megatron",
    "15_control_flow": "notebook",
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
    done = torchrun(CELLS + TO_THE_END, 1, path, json.dumps(changes), timeout=300)
    assert "to the end" in done.stdout


# Cells run twice, on meshes that `on_ranks` makes: simulated ones, then processes. One mesh of
# processes is open at a time.
TWICE = """
import torch
import functron as ft

_, _, _, wanted, values, tolerance = sys.argv
wanted = json.loads(wanted)
found = [[text for text in wanted if text in source] for source in cells]
assert sorted(sum(found, [])) == sorted(wanted), found
cells = [source for source, texts in zip(cells, found) if texts]
started = []


def start(**axes):
    if not started or started[-1].mesh != ft.Mesh(**axes):
        for mesh in started:
            mesh.close()
        started.append(ft.Mesh(**axes).start("cpu"))
    return started[-1]


def run_on(mesh, function, *args, specs=ft.P()):
    return function(*args) if type(mesh) is ft.Mesh else mesh.run(function, *args, specs=specs)


def values_on(make):
    shell.user_ns.update(on_ranks=make, run_on=run_on)
    for source in cells:
        shell.run_cell(source).raise_error()
    found = [eval(value, shell.user_ns) for value in json.loads(values)]
    return [1.0 * torch.as_tensor(leaf) for leaf in ft.tree.leaves(found)]


simulated, real = values_on(ft.Mesh), values_on(start)
for mesh in started:
    mesh.close()
assert simulated and started
for a, b in zip(simulated, real, strict=True):
    assert (a - b).abs().max() <= float(tolerance) * a.abs().max(), (a, b)
print("the same on", *started, sep="; ")
"""


class OnRanks(NamedTuple):
    """The cells of a notebook that run on simulated ranks and on processes.

    Attributes:
        cells: words of each cell that runs.
        changes: meshes of four ranks in the place of others, and fewer steps.
        values: of expressions afterwards, which are to be the same, up to `tolerance` of them.
        tolerance: as sums are taken in another order.
    """

    cells: list[str]
    changes: list[tuple[str, str]]
    values: list[str]
    tolerance: float


SAVE = """def save(mesh, state):
    placement = checkpoint.Placement.of(like, specs, mesh)
    checkpoint.save(folder / "1", state, placement=placement)


run_on(mesh, save, mesh, state)
state = ft.gather(state, specs, mesh)
mesh = on_ranks(fsdp=4)
"""
RESTORE = """def restore(mesh, state):
    placement = checkpoint.Placement.of(like, specs, mesh)
    return checkpoint.restore(folder / "1", state, placement=placement)


restored = run_on(mesh, restore, mesh, fresh, specs=specs)
whole = ft.gather(restored, specs, mesh)
"""
"""Every rank saves and restores its own shards."""

ON_RANKS = {
    "02_tensor_parallel_transformer": OnRanks(
        ["import functron", "runs = {", "viz.loss_curves", "inspect.getsource", "copied =",
         "class EmaState", "EmaState(*start"],
        [("(ft.Mesh(dp=2, tp=2), gpt.STREAM)", "(on_ranks(dp=2, tp=2), gpt.STREAM)"),
         ("(ft.Mesh(dp=2, tp=4), gpt.SEQ", "(on_ranks(dp=2, tp=2), gpt.SEQ"),
         ("mesh = ft.Mesh(dp=2, tp=2)\ndefs", "mesh = on_ranks(dp=2, tp=2)\ndefs"),
         ("num_steps=10", "num_steps=2"),
         ("in range(4)]\nscore", "in range(1)]\nscore")],
        ["curves", "same", "signs", "losses", "total"],
        1e-6,
    ),
    "05_sharded_state": OnRanks(
        ["import functron", "settings = optim.", "alone, metrics =", "fresh, specs ="],
        [("= Mesh(dp=4), Mesh(dp=2, fsdp=2, tp=2)", "= on_ranks(dp=4), on_ranks(dp=4)"),
         ("step, state, specs = make(Mesh(dp=2, tp=2), 1)",
          "mesh = on_ranks(dp=2, tp=2)\nstep, state, specs = make(mesh, 1)"),
         ("placement = checkpoint.Placement.of(like, specs, Mesh(dp=2, tp=2))", SAVE),
         ('checkpoint.save(folder / "1", state, {"step": 1, "note": "first of its kind"}, '
          "placement=placement)", ""),
         ("make(Mesh(fsdp=4), 0)", "make(mesh, 0)"),
         ("placement = checkpoint.Placement.of(like, specs, Mesh(fsdp=4))", RESTORE),
         ('restored = checkpoint.restore(folder / "1", fresh, placement=placement)', ""),
         ("(state, restored)", "(state, whole)")],
        ['float(metrics["loss"])', "worst < 1e-12", "same"],
        1e-12,
    ),
    "07_data_and_models": OnRanks(
        ["import functron", "texts = {", "data.open_tokens", "data.Blend", "def perplexity",
         "def first_loss"],
        [("max_seq=128)", 'max_seq=128, dtype="float64")'),  # Muon's bfloat16 enlarges rounding
         ("mesh = Mesh(dp=2, tp=2)", "mesh = on_ranks(dp=2, tp=2)"),
         ("(Mesh(), Mesh(dp=2, tp=2))", "(Mesh(), on_ranks(dp=2, tp=2))")],
        ["curves", 'float(metrics["loss"])', "average", "found"],
        1e-12,
    ),
    "08_your_own_parts": OnRanks(
        ["import functron", "def lamb", "sharded = ", "LAMB by hand", "def make_round",
         "for half in", "class Plateau", "training.loop("],
        [("Mesh(dp=2, fsdp=2, tp=2))", "on_ranks(fsdp=2, tp=2))"),
         ("Mesh(island=2, dp=2, tp=2)", "on_ranks(island=2, dp=2)"),
         ("Mesh(dp=4, tp=2)", "on_ranks(dp=2, tp=2)"),
         ("steps=200", "steps=6")],
        ["sharded", "curves", '[row["loss"] for row in history]', "trained"],
        1e-12,
    ),
}  # fmt: skip
FEWER = {
    "02_tensor_parallel_transformer": [
        ('    "dp=2, tp=4, sequence": (on_ranks(dp=2, tp=2), gpt.SEQUENCE_PARALLEL_STREAM),\n', ""),
    ],
    "07_data_and_models": [
        ('    (mamba, "mamba2-tiny", batch),\n', ""),
        ('    (t5, "t5-tiny", pairs),\n', ""),
    ],
}
"""Programs that are left out without ``--full``."""


@pytest.mark.applications("notebook", "zoo")
@pytest.mark.parametrize(
    "name",
    [name if name in FEWER else pytest.param(name, marks=pytest.mark.full) for name in ON_RANKS],
)
def test_trains_on_real_ranks(name, torchrun, readers, request):
    """The losses of four processes are those of four simulated ranks."""
    given = ON_RANKS[name]
    fewer = [] if request.config.getoption("--full") else FEWER[name]
    changes = json.dumps(SHORTER.get(name, []) + given.changes + fewer)
    rest = (json.dumps(given.cells), json.dumps(given.values), given.tolerance)
    path = ROOT / "notebooks" / f"{name}.ipynb"
    done = torchrun(CELLS + TWICE, 1, path, changes, *rest, timeout=300)
    assert "the same on" in done.stdout


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

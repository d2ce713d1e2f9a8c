"""The examples run, simulated and on processes, with the same losses; and they stay short."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from functron.spmd.mesh import STANDARD_AXES

ROOT = Path(__file__).resolve().parent.parent
PRETRAIN = ROOT / "examples" / "pretrain_gpt.py"
BERT = ROOT / "examples" / "pretrain_bert.py"
ON_DISK = ROOT / "examples" / "pretrain_on_disk.py"
ZOO = pytest.mark.applications("zoo")
SMALL_BERT = ("--seq", "32", "--global-batch", "8", "--steps", "3")
SMALL = ("--model", "llama3-tiny", "--seq", "32", "--global-batch", "4", "--steps", "12")


def losses(printed: str) -> dict[int, float]:
    """The losses an example printed, by step."""
    found = re.findall(r"^step +(\d+) +loss ([\d.]+)$", printed, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def simulate(*args: str, script: Path = PRETRAIN) -> str:
    """The output of an example that is run here as a script, where importing costs nothing."""
    small = SMALL if script == PRETRAIN else SMALL_BERT
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(script), *small, *args])
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def dense() -> str:
    return simulate()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_is_short(path):
    assert len(path.read_text().splitlines()) < 100


def test_trains_and_samples(dense):
    found = losses(dense)
    assert sorted(found) == [0, 10, 11]
    assert found[11] < found[0] - 0.3
    assert "\nThe " in dense


def test_simulated_mesh_gives_the_same_losses(dense):
    args = ("--mesh", "dp=2,tp=4", "--sequence-parallel", "--prompt", "")
    assert losses(simulate(*args)) == pytest.approx(losses(dense), rel=1e-5)


def call(script: Path, monkeypatch, capsys, *args: str) -> str:
    """The output of an example that is run in this process, where importing costs nothing."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(script), *args])
    capsys.readouterr()
    module.main()
    return capsys.readouterr().out


TINY = ("--seq", "16", "--global-batch", "4", "--steps", "2")
AXES = {
    PRETRAIN: ("dp", "fsdp", "cp", "ulysses", "tp", "ep"),
    BERT: ("dp", "fsdp", "tp"),
}


@pytest.mark.parametrize(
    "script", [PRETRAIN, pytest.param(BERT, marks=ZOO)], ids=lambda path: path.stem
)
def test_runs_on_every_axis_that_it_promises(script, monkeypatch, capsys):
    promised = script.read_text().split('"""')[1]
    axes = set(AXES[script])
    assert {name for name in STANDARD_AXES if re.search(rf"\b{name}\b", promised)} == axes
    quiet = ("--prompt", "") if script == PRETRAIN else ()
    dense: dict[str, dict[int, float]] = {}
    for axis in AXES[script]:
        model = ("--model", "mixtral-tiny") if axis == "ep" else ()
        run = functools.partial(call, script, monkeypatch, capsys, *TINY, *quiet, *model)
        if str(model) not in dense:
            dense[str(model)] = losses(run())
        found = losses(run("--mesh", f"{axis}=2"))
        assert found == pytest.approx(dense[str(model)], rel=1e-5), axis
        assert len(found) == 2


def test_a_mesh_that_is_not_promised_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"pipeline\.gradients"):
        call(PRETRAIN, monkeypatch, capsys, *TINY, "--mesh", "pp=2")


@ZOO
def test_a_mesh_that_berts_example_does_not_promise_is_refused(monkeypatch, capsys):
    with pytest.raises(ValueError, match="cannot run on this mesh"):
        call(BERT, monkeypatch, capsys, *TINY, "--mesh", "cp=2")


@pytest.mark.parametrize("mesh", ["pp=2", "fsdp=2,tp=2", "cp=2,ulysses=2"])
def test_the_example_on_disk_takes_the_meshes_of_functron_train(
    mesh, tmp_path, monkeypatch, capsys
):
    sizes = ("--megabytes", "0.05", "--vocab-size", "300", "--steps", "1", "--seq", "16")
    sizes += ("--microbatches", "2", "--global-batch", "4")
    sizes += ("--eval-every", "1", "--eval-batches", "1", "--split", "1,1")
    out = str(tmp_path / "work")
    said = call(ON_DISK, monkeypatch, capsys, "--out", out, *sizes, "--mesh", mesh)
    assert "ranks simulated in this process" in said
    apart = re.search(r"with and without the cache: (\S+) apart", said)
    assert apart is not None
    assert float(apart[1]) < 1e-4


@pytest.mark.distributed
def test_processes_give_the_same_losses(dense, torchrun):
    done = torchrun(PRETRAIN, 4, *SMALL, "--mesh", "dp=2,tp=2", timeout=300)
    assert losses(done.stdout) == pytest.approx(losses(dense), rel=1e-5)
    assert "\nThe " in done.stdout


@pytest.mark.distributed
def test_too_few_processes_is_a_taught_error(torchrun):
    done = torchrun(PRETRAIN, 2, *SMALL, "--mesh", "dp=2,tp=2", check=False)
    assert done.returncode != 0
    assert "cannot bind the mesh to processes" in done.stderr
    assert "torchrun --nproc-per-node 4" in done.stderr


@ZOO
@pytest.mark.distributed
def test_bert_on_processes_gives_the_losses_of_one(torchrun):
    mesh = ("--mesh", "fsdp=2,tp=2", "--sequence-parallel")
    found = losses(torchrun(BERT, 4, *SMALL_BERT, *mesh, timeout=300).stdout)
    assert sorted(found) == [0, 2]
    assert found == pytest.approx(losses(simulate(script=BERT)), rel=1e-5)


def test_from_text_to_a_model_that_writes(tmp_path, monkeypatch, capsys):
    sizes = ("--megabytes", "0.5", "--vocab-size", "600", "--steps", "20", "--seq", "32")
    options = ("--eval-every", "10", "--eval-batches", "2", "--mesh", "dp=2", "--pack", "best-fit")
    said = call(ON_DISK, monkeypatch, capsys, "--out", str(tmp_path / "work"), *sizes, *options)
    found = re.findall(r"^step +(\d+)  validation perplexity ([\d.]+)$", said, re.MULTILINE)
    assert [int(step) for step, _ in found] == [10, 20]
    first, last = (float(perplexity) for _, perplexity in found)
    assert last < 0.9 * first < 600  # the vocabulary, which knowing nothing would give
    assert re.search(r"^def ", said, re.MULTILINE)
    apart = re.search(r"with and without the cache: (\S+) apart", said)
    assert apart is not None
    assert float(apart[1]) < 1e-4  # float32, logits of size 1

"""Runs that end and go on: on the same mesh to the bit, on any other to rounding."""

from __future__ import annotations

import argparse
import re
import shutil

import pytest
import torch

from functron import checkpoint, tree
from functron.cli.main import main
from functron.training import run_folder
from functron.training.config import load

SMALL = [
    "--data", argparse.__file__, "--seq", "16", "--global-batch", "8", "--gpt.num-layers", "2", "--gpt.embed-dim", "32",
    "--gpt.num-heads", "4", "--gpt.num-kv-heads", "2", "--gpt.mlp-dim", "48",
    "--learning-rate.total-steps", "6",
]  # fmt: skip


def train(*arguments) -> int:
    return main(["train", *map(str, arguments)])


def losses(run) -> list[float]:
    return [record["loss"] for record in run_folder.records(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 6 steps, of which 3 and 6 are saved, that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(*SMALL, "--steps", 6, "--save-every", 3, "--out", run) == 0
    assert checkpoint.steps(run / "checkpoints") == [3, 6]
    return run


@pytest.fixture
def cut(whole, tmp_path):
    """The same run, ended after step 4 without being asked whether that is convenient."""
    run = tmp_path / "cut"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "6")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:4]) + '\n{"step": 5, "lo')
    return run


def test_goes_on_to_the_bit(whole, cut, capsys):
    assert train("--out", cut, "--resume") == 0
    assert "resume" in capsys.readouterr().out
    assert losses(cut) == losses(whole)
    assert [record["step"] for record in run_folder.records(cut)] == [1, 2, 3, 4, 5, 6]
    ends = [checkpoint.restore(run / "checkpoints" / "6") for run in (whole, cut)]
    for path, a, b in zip(tree.paths(ends[0]), *map(tree.leaves, ends), strict=True):
        assert torch.equal(a, b), path


@pytest.mark.parametrize(
    "options",
    [
        "--mesh dp=2,tp=2 --sequence-parallel",
        pytest.param("--mesh dp=4 --zero 1 --microbatches 2", marks=pytest.mark.full),
        pytest.param("--mesh dp=2,tp=2 --zero 2 --remat full", marks=pytest.mark.full),
        "--mesh dp=2,fsdp=2 --zero 1 --microbatches 2 --gather step",
        "--mesh dp=2,tp=2 --zero 3",
        "--mesh pp=2,dp=2 --zero 2 --schedule gpipe --microbatches 2",
        "--mesh pp=2 --microbatches 2 --vocab-over-pp",
    ],
)
def test_goes_on_on_another_mesh_and_back(options, whole, cut):
    assert train("--out", cut, "--resume", *options.split(), "--steps", 5) == 0
    plain = "--mesh= --zero 0 --gather use --microbatches 1 --schedule 1f1b --chunks 0 --no-vocab-over-pp"
    assert (
        train("--out", cut, "--resume", *plain.split(), "--no-sequence-parallel", "--steps", 6) == 0
    )
    torch.testing.assert_close(losses(cut), losses(whole), rtol=2e-6, atol=0)


@pytest.mark.distributed
def test_processes_go_on_and_back(whole, cut, in_processes):
    options = ["--mesh", "pp=2,dp=2", "--zero", 2, "--vocab-over-pp", "--microbatches", 2]
    in_processes(4, "train", "--out", cut, "--resume", *options, "--steps", 5)
    options = ["--mesh", "dp=2", "--zero", 1, "--no-vocab-over-pp"]
    in_processes(2, "train", "--out", cut, "--resume", *options, "--steps", 6)
    torch.testing.assert_close(losses(cut), losses(whole), rtol=2e-6, atol=0)


def test_begins_where_nothing_is_saved_yet(whole, tmp_path, capsys):
    run = tmp_path / "new"
    assert train(*SMALL, "--steps", 3, "--out", run, "--resume", "auto") == 0
    assert "none is saved yet" in capsys.readouterr().out
    assert losses(run) == losses(whole)[:3]
    shutil.rmtree(run / "checkpoints")  # killed before the first save
    assert train("--steps", 3, "--out", run, "--resume") == 0
    assert losses(run) == losses(whole)[:3]


def test_resumes_a_run_that_is_there_and_no_other(whole, cut, tmp_path, capsys):
    """Where none is nothing begins, and the run that may have been meant is named."""
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "cvt", cut / "checkpoints" / "3", tmp_path):
        before = sorted(tmp_path.rglob("*"))
        assert train(*SMALL, "--steps", 3, "--out", folder, "--resume") == 2
        said = capsys.readouterr().err
        assert f"out: got {folder}, where no run is; wanted the folder of a run" in said
        assert f"fix: --out {cut}, which is one; to begin one where there is none, --resume" in said
        assert sorted(tmp_path.rglob("*")) == before
    alone = tmp_path / "a" / "b" / "c"
    assert train(*SMALL, "--steps", 3, "--out", alone, "--resume") == 2
    assert "fix: to begin one where there is none, --resume auto" in capsys.readouterr().err
    assert train("--out", cut, "--resume", "auto") == 0
    assert losses(cut) == losses(whole)
    # that it was resumed is no setting of the run
    assert "resume = false" in (cut / "config.toml").read_text()
    (tmp_path / "mine.toml").write_text('resume = "auto"')
    assert load(tmp_path / "mine.toml").resume == "auto"
    (tmp_path / "mine.toml").write_text('resume = "now"')
    with pytest.raises(
        ValueError, match="resume: got 'now'; wanted true or false or one of 'auto'"
    ):
        load(tmp_path / "mine.toml")


def test_a_checkpoint_half_written_is_no_checkpoint(whole, cut):
    shutil.copytree(whole / "checkpoints" / "6", cut / "checkpoints" / "6")
    (cut / "checkpoints" / "6").rename(cut / "checkpoints" / "6.orbax-checkpoint-tmp")
    assert run_folder.newest(cut) == cut / "checkpoints" / "3"
    assert train("--out", cut, "--resume") == 0
    assert losses(cut) == losses(whole)


def test_a_finished_run_has_nothing_to_do(whole, cut, capsys):
    assert train("--out", whole, "--resume") == 0
    assert "has all its steps" in capsys.readouterr().out
    assert len(losses(whole)) == 6


def test_what_a_run_cannot_change(cut, capsys):
    changed = ["--seed", 3, "--gpt.mlp-dim", 64, "--global-batch", 4, "--data", cut / "config.toml"]
    assert train("--out", cut, "--resume", *changed) == 2
    said = capsys.readouterr().err
    for line in (
        "seed: got 3; wanted 0, as in the run; fix: leave it out, or begin a new run in another",
        "gpt.mlp_dim: got 64; wanted 48, as in the run",
        "global_batch: got 4; wanted 8, as in the run",
        "data: got ",
    ):
        assert line in said
    assert train("--resume") == 2
    assert "resume: got no run folder; wanted the one to go on with; fix: name it: --out RUN" in (
        capsys.readouterr().err
    )
    assert train(*SMALL, "--out", cut) == 2
    assert "to go on with the run in it, --resume" in capsys.readouterr().err


def test_another_optimizer_is_another_state(cut, capsys):
    assert train("--out", cut, "--resume", "--optimizer.name", "sgd") == 2
    assert "opt_state/" in capsys.readouterr().err


def test_damage_is_seen(cut, capsys):
    files = [p for p in (cut / "checkpoints" / "3").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert train("--out", cut, "--resume") == 2
    assert str(largest.relative_to(cut / "checkpoints")) in capsys.readouterr().err


def test_old_checkpoints_go(tmp_path):
    run = tmp_path / "run"
    kept = ["--save-every", 1, "--keep-last", 2, "--keep-every", 3]
    assert train(*SMALL, "--steps", 6, "--out", run, *kept) == 0
    assert checkpoint.steps(run / "checkpoints") == [3, 5, 6]


def test_records_are_not_guessed(cut):
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    (cut / "metrics.jsonl").write_text("\n".join(["{", *lines]))
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1: got '{'; wanted a JSON object"):
        run_folder.records(cut)


KILLED = """
import os, signal, sys
from functron.cli.process import run_guarded
from functron.cli.train import run

def at(moment, step):
    if (moment, step, os.environ["RANK"]) == ("step", 5, "1"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.exit(run_guarded(lambda: run(sys.argv[1:], at)))
"""


@pytest.mark.distributed
def test_goes_on_from_memory_without_a_checkpoint(torchrun, in_processes, tmp_path):
    """One rank is killed, and what its machine had is gone; its neighbour has a copy."""
    options = [*SMALL, "--steps", 6, "--mesh", "dp=2", "--zero", 1, "--device", "cpu"]
    kept = ["--memory-save-every", 2, "--memory-folder", tmp_path / "memory", "--prefetch", 0]
    (tmp_path / "memory").mkdir()
    run = tmp_path / "run"
    done = torchrun(KILLED, 2, *options, *kept, "--out", run, check=False)
    assert done.returncode != 0
    assert not (run / "checkpoints").exists() or checkpoint.steps(run / "checkpoints") == []
    (folder,) = (tmp_path / "memory").iterdir()
    shutil.rmtree(folder / "rank-1")
    said = in_processes(2, "train", "--out", run, "--resume", *kept[:4]).stdout
    found = re.search(r"resume .*, after step (\d), from memory", said)
    assert found
    assert int(found[1]) in (2, 4)  # which may not have been whole yet
    in_processes(2, "train", *options, "--out", tmp_path / "whole")
    assert losses(run) == losses(tmp_path / "whole")
    ends = [checkpoint.restore(path / "checkpoints" / "6") for path in (run, tmp_path / "whole")]
    for path, a, b in zip(tree.paths(ends[0]), *map(tree.leaves, ends), strict=True):
        assert torch.equal(a, b), path
    assert list((tmp_path / "memory").iterdir()) == []  # it left nothing

"""Pipelines on real processes over gloo: the simulation's numbers, and no hang when one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from functron import checkpoint, tree
from functron.cli.main import main
from functron.spmd import Mesh
from functron.training.config import load
from functron.training.run import prepare

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
SOON = 30  # seconds in which a job must have ended


@pytest.mark.parametrize(
    "checks",
    [
        ("classic", "own-tables", "own-models", "forward"),
        ("split", "training"),
        ("compiled", "inductor"),
        ("links",),
        pytest.param(
            ("more-classic", "more-split", "more-compiled", "more-inductor", "more-training"),
            marks=pytest.mark.full,
        ),
    ],
    ids="-".join,
)
def test_processes_equal_the_simulation(torchrun, checks):
    done = torchrun(Path(__file__).with_name("gloo_pipeline.py"), 4, *checks, timeout=400)
    for check in checks:
        assert f"{check}: ok" in done.stdout


@pytest.mark.parametrize(
    "checks",
    [
        ("steps", "vocabulary", "mistakes"),
        # "steps" runs compiled programs without Inductor
        pytest.param(("compiled",), marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_transfers_that_come_at_the_wait_give_the_same_numbers(torchrun, checks):
    done = torchrun(Path(__file__).with_name("gloo_late.py"), 2, *checks, timeout=400)
    for check in checks:
        assert f"check_{check}: ok" in done.stdout


# --- failures

SHAPES = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from functron import Mesh, P, shard_map
from functron.pipeline import Partition, even_layout, make, pipelined

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh, schedule = Mesh(pp=3).bind(), make(sys.argv[2], 3, 6)
layout = even_layout(3, 3)
partition = Partition(layout, schedule.pipes, {"w": "t"})
calls = []


def stage(part, params, x, batch):
    y = torch.tanh((batch if x is None else x) @ params["w"][0])
    calls.append(1)
    if part == layout[1] and len(calls) == 4:
        Path(sys.argv[1]).touch()
        y = y[:1]
    return y.sum() if part.loss else y


stages = pipelined(stage, partition, schedule)
mapped = shard_map(stages.value_and_grad, mesh, P(), P(), stages="pp")
mapped({"w": torch.ones(1, 5, 5)}, torch.ones(12, 5))
print("not refused")
"""


def ended_soon_after(mark: Path) -> bool:
    return time.time() - mark.stat().st_mtime < SOON


def test_microbatches_of_other_shapes_end_the_job(torchrun, tmp_path):
    mark = tmp_path / "raised"
    done = torchrun(SHAPES, 3, mark, "1f1b", check=False)
    assert done.returncode != 0
    assert ended_soon_after(mark)
    assert "not refused" not in done.stdout
    assert "ValueError: microbatches must have one shape" in done.stderr
    assert (
        "stage 1, microbatch 3: got (1, 5) torch.float32; wanted (2, 5) torch.float32, as of the "
        "microbatches before; fix: pad the microbatches to one shape"
    ) in done.stderr


# The command line, but rank 1 comes to grief in a stage of its third step.
FAILING = """
import gc, sys
gc.disable()
import torch.distributed as dist
from pathlib import Path
from functron.cli.main import main
from functron.models import family
import functron.cli.train
gc.freeze()
real, calls = family.GPT.stages.loss, []
def stage_loss(*args, **kwargs):
    calls.append(1)
    if dist.get_rank() == 1 and len(calls) == 8:
        Path({mark!r}).touch()
        raise RuntimeError('injected ' + 'fault')
    return real(*args, **kwargs)
object.__setattr__(family.GPT.stages, 'loss', stage_loss)
sys.exit(main({arguments}))
"""
# without looking for garbage in what is imported, as `functron` does
START = (
    "import gc, sys; gc.disable(); from functron.cli import launch; gc.freeze(); "
    "sys.exit(launch.launch(2, sys.argv[1:]))"
)
TRAIN = [
    "train", "--model", "llama3-tiny", "--seq", "16", "--mesh", "pp=2", "--schedule", "1f1b",
    "--layout", "Et|tL", "--microbatches", "3", "--global-batch", "6", "--steps", "100",
]  # fmt: skip


def failing(folder: Path) -> tuple[Path, Path, Path]:
    """A program, the file that it makes when it fails, and its run folder."""
    script, mark, out = folder / "failing.py", folder / "raised", folder / "r"
    arguments = [*TRAIN, "--out", str(out)]
    script.write_text(FAILING.format(mark=str(mark), arguments=arguments))
    return script, mark, out


def test_a_failing_stage_takes_the_job_down_with_its_traceback_first(tmp_path):
    script, mark, out = failing(tmp_path)
    command = [sys.executable, "-c", START, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENV)
    assert ended_soon_after(mark)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    errors = done.stderr[done.stderr.index("Traceback") :].rstrip().splitlines()
    assert "RuntimeError: injected fault" in errors
    assert any("in stage_loss" in line for line in errors)
    assert errors[-1] == "functron: rank 1 failed first (exit code 1); all 2 processes were stopped"
    records = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2]
    assert not (out / "checkpoints").exists()


def test_a_failing_stage_under_torchrun(torchrun, tmp_path):
    script, mark, out = failing(tmp_path)
    done = torchrun(script, 2, check=False)
    assert ended_soon_after(mark)
    assert done.returncode == 1
    assert "rank 1: RuntimeError: injected fault" in done.stderr
    assert not (out / "checkpoints").exists()


# --- the command


def losses(folder: Path) -> torch.Tensor:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return torch.tensor([[row["loss"], row["grad_norm"]] for row in rows], dtype=torch.float64)


def test_training_by_processes(tmp_path, capsys, in_processes):
    """In float64, so that rounding is no excuse: the losses without a mesh, and one checkpoint."""
    table = tmp_path / "run.toml"
    table.write_text('model = "llama3-tiny"\n[gpt]\ndtype = "float64"\ntied = true\n')
    common = ["train", "--config", str(table), "--seq", "16", "--global-batch", "8", "--steps", "3"]
    mesh = [
        "--mesh", "pp=2,tp=2", "--schedule", "zb-h1", "--microbatches", "4", "--layout", "last=1",
    ]  # fmt: skip
    assert main([*common, "--out", str(tmp_path / "dense")]) == 0
    assert main([*common, *mesh, "--out", str(tmp_path / "simulated")]) == 0
    assert "4 ranks simulated in this process" in capsys.readouterr().out
    done = in_processes(4, *common, *mesh, "--out", tmp_path / "processes")
    assert "mesh   pp=2,tp=2: 4 processes" in done.stdout
    assert "steps  not compiled: ranks send nothing over NCCL (on: --compile)" in done.stdout
    want = losses(tmp_path / "dense")
    assert want.shape == (3, 2)
    torch.testing.assert_close(losses(tmp_path / "simulated"), want, rtol=1e-9, atol=0)
    torch.testing.assert_close(losses(tmp_path / "processes"), want, rtol=1e-9, atol=0)

    config = load(tmp_path / "processes" / "config.toml")
    assert (
        config.parallelism.schedule,
        config.parallelism.layout,
        config.parallelism.microbatches,
    ) == ("zb-h1", "last=1", 4)
    like = prepare(config, Mesh.parse(config.parallelism.mesh)).state
    states = [
        checkpoint.restore(tmp_path / name / "checkpoints" / "3", like)
        for name in ("dense", "simulated", "processes")
    ]
    for other in states[:2]:
        rows = zip(tree.paths(like), tree.leaves(states[2]), tree.leaves(other), strict=True)
        for path, a, b in rows:
            largest = b.abs().max() if b.is_floating_point() else 0
            assert ((a - b).abs() <= 1e-8 * largest).all(), path

    texts = []
    for name in ("dense", "processes"):
        assert main(["sample", str(tmp_path / name), "--prompt", "def ", "--tokens", "16"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("def ")
    assert texts[0] == texts[1]

"""Checkpoints by real processes under torchrun, also when one of them is killed at any moment."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from functron import checkpoint, tree

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROGRAM = HERE / "save_loop.py"
KILLS = 3
"""How many times a process is killed; more find rarer moments, and --full twice as many."""


def program():
    spec = importlib.util.spec_from_file_location("save_loop", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_is_of_step(path: Path, step: int) -> None:
    want = program().state(step)
    got = checkpoint.restore(path, tree.map(lambda leaf: leaf.to("meta"), want))
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a, b), path


def test_two_processes_save_in_the_background(torchrun, tmp_path):
    torchrun(PROGRAM, 2, tmp_path / "checkpoints", 5, tmp_path / "log")
    assert checkpoint.steps(tmp_path / "checkpoints") == [4, 5]  # the last two are kept
    for step in (4, 5):
        assert_is_of_step(tmp_path / "checkpoints" / str(step), step)
        assert checkpoint.metadata(tmp_path / "checkpoints" / str(step)) == {"step": step}
    stored = checkpoint.Checkpoint(tmp_path / "checkpoints" / "5")
    assert stored.origin["processes"] == 2
    assert stored.origin["mesh"] == "tp=2"
    assert sorted(path.name for path in stored.path.glob("ocdbt.process_*")) == [
        "ocdbt.process_0",
        "ocdbt.process_1",
    ]
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))


def killed(folder: Path, seed: int) -> list[int]:
    """Kill a random rank of a save loop at a random moment; the steps known to be complete."""
    choice = random.Random(seed)
    log = folder / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(PROGRAM), str(folder / "checkpoints"), "100000", str(log)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 90
        while not log.exists():  # the first save is slow and would be hit too often
            assert process.poll() is None, process.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(choice.uniform(0, 1.0))
        pid = int(Path(f"{log}.{choice.randrange(2)}").read_text())
        os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    return [int(line) for line in log.read_text().split()]


def check_survivors(folder: Path, known: list[int]) -> None:
    """The last complete checkpoint is there and right, and nothing half written looks complete."""
    found = checkpoint.steps(folder)
    assert found[-1] >= known[-1]
    assert found[-1] <= known[-1] + 2  # one under way, one whose completion was not logged
    assert len(found) <= 3
    for step in found:
        checkpoint.verify(folder / str(step))
        assert_is_of_step(folder / str(step), step)
    assert checkpoint.latest(folder) == folder / str(found[-1])
    # whoever goes on removes what is unfinished
    fresh = {"x": torch.ones(3)}
    with checkpoint.Saver(folder, checkpoint.Placement.of(fresh)) as saver:
        saver.save(10**6, fresh)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*map(str, found), str(10**6)])


SEEDS = [*range(KILLS), *(pytest.param(n, marks=pytest.mark.full) for n in range(KILLS, 2 * KILLS))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_process_leaves_the_last_complete_checkpoint(tmp_path, seed):
    known = killed(tmp_path, seed)
    check_survivors(tmp_path / "checkpoints", known)

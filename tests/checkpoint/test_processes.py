"""Checkpoints by real processes under torchrun, also when one of them is killed at any moment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from functron import checkpoint, tree

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
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


SLOW = """
import os, runpy, sys, time
from functron.checkpoint import database
real = database.writing
def write_late(folder, *about):
    if os.environ["RANK"] == "1":
        time.sleep(0.4)
    return real(folder, *about)
database.writing = write_late
program, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(program, run_name="__main__")
"""


def test_waiting_for_a_slow_process_logs_nothing(torchrun, tmp_path):
    done = torchrun(SLOW, 2, PROGRAM, tmp_path / "checkpoints", 1, tmp_path / "log")
    assert checkpoint.steps(tmp_path / "checkpoints") == [1]
    lines = done.stderr.splitlines()
    assert [line for line in lines if "timed out" in line or "timeout" in line] == []


# The launcher of two ranks of the save loop, which kills one of them and tells the other to end as
# torchrun does.
KILLING = """
import os, random, runpy, signal, sys, time
from pathlib import Path
program, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
choice, log, ranks = random.Random(seed), folder / "log", []
for rank in range(2):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        sys.argv = [program, str(folder / "checkpoints"), "100000", str(log)]
        runpy.run_path(program, run_name="__main__")
        os._exit(0)
deadline = time.monotonic() + 90
while not log.exists():  # the first save is slow and would be hit too often
    assert time.monotonic() < deadline
    assert os.waitpid(-1, os.WNOHANG) == (0, 0)
    time.sleep(0.01)
time.sleep(choice.uniform(0, 1.0))
hit = choice.randrange(2)
assert ranks[hit] == int(Path(f"{log}.{hit}").read_text())
os.kill(ranks[hit], signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(ranks[hit], 0)[1]) == -signal.SIGKILL
other = ranks[1 - hit]
time.sleep(0.1)  # torchrun looks so often
os.kill(other, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) != 0
"""


def killed(torchrun, folder: Path, seed: int) -> list[int]:
    """Kill a random rank of a save loop at a random moment; the steps known to be complete."""
    torchrun(KILLING, 1, PROGRAM, folder, seed)
    return [int(line) for line in (folder / "log").read_text().split()]


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
def test_a_killed_process_leaves_the_last_complete_checkpoint(torchrun, tmp_path, seed):
    known = killed(torchrun, tmp_path, seed)
    check_survivors(tmp_path / "checkpoints", known)

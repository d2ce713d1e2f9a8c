"""Ends of runs on GPUs, and how runs go on: ranks that stop or die, and fewer of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from functron.training import records
from functron.training.loop import HANG_CODE
from tests.fake_gpu import journal

pytestmark = pytest.mark.fake_gpu

SMALL = ["--model", "llama3-tiny", "--format", "mock", "--seq", "16", "--global-batch", "4"]
SMALL += ["--no-compile", "--check-replicas-every", "0"]

# `functron train` with a fault on the first start. Kernels compute nothing, so the number of a step
# in its state, which a run goes on from, is set.
PROGRAM = """
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path

import torch

from functron.apps.guard import watchdog
from functron.cli.main import main
from functron.core.settings import setting
from functron.training.loop import LoopHook

# of 10 and 5: one rank never reports, so that they are waited for in full
watchdog.REPORT_SECONDS, watchdog.PROBE_SECONDS = 4.0, 2.0

class Fails(LoopHook):
    def __init__(self, config, session):
        self.config, self.run, self.out = config, session.run, session.out

    def before(self, at):
        mark, config = self.out / "failed", self.config
        rank = getattr(self.run.mesh, "rank", 0)
        if at.index == config.grows and config.slots and rank == 0:
            Path(config.slots).write_text("2")
        if (rank, at.index) == (config.rank, config.step) and not mark.exists():
            mark.touch()
            if config.slots:
                Path(config.slots).write_text("1")
            os.kill(os.getpid(), getattr(signal, config.how))

    def due(self, step):
        return True

    def after(self, at):
        at.state.step.copy_(torch.tensor(at.step))

@dataclass(frozen=True)
class FailsConfig:
    \"\"\"A fault.

    Attributes:
        rank: whose.
        step: from 0.
        how: a signal.
        slots: a file with the number of processes that can be had.
        grows: the step from which there are two again.
    \"\"\"

    rank: int = setting(1)
    step: int = setting(-1)
    how: str = setting("SIGKILL")
    slots: str = setting("")
    grows: int = setting(-1)

    def hook(self, session):
        return Fails(self, session)

if __name__ == "__main__":
    sys.exit(main(sections={"fails": FailsConfig}))
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """``run(*options)``: the end of ``functron train`` with a fault, and its logs in ``log``."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start(*options: object, device: str = "cuda", seconds: float = 200):
        (tmp_path / "log").mkdir(exist_ok=True)
        command = ["train", *SMALL, "--device", device, *map(str, options)]
        return subprocess.run(
            [sys.executable, str(program), *command], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"FAKE_GPU_LOG": str(tmp_path / "log")}, timeout=seconds, check=False,
        )  # fmt: skip

    return start


def find_problems(folder: Path) -> list[str]:
    """Errors that drivers report; a rank has a log for each start."""
    found = journal.read(folder)
    assert found
    return [
        problem
        for find in (journal.find_errors, journal.find_stray_contexts, journal.find_shared_pages)
        for problem in find(found)
    ]


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_a_rank_that_stops_is_named_as_on_cpus(run, tmp_path, mesh):
    told = {}
    for device in ("cuda", "cpu"):
        out = tmp_path / device
        given = ["--steps", "6", "--mesh", mesh, "--nproc", "2", "--hang-after", "3", "--out", out]
        given += ["--microbatches", "2"] if mesh == "pp=2" else []
        fault = ["--fails.rank", "1", "--fails.step", "2", "--fails.how", "SIGSTOP"]
        done = run(*given, *fault, device=device)
        assert done.returncode == HANG_CODE, done.stderr
        assert len(re.findall("step 3 hangs: rank 1 .*never arrived at", done.stderr)) == 1, (
            done.stderr
        )
        (event,) = records.read(out / records.EVENTS)
        told[device] = [event[name] for name in ("kind", "step", "rank", "reason", "ranks")]
        (report,) = [json.loads(x.read_text()) for x in (out / "hangs").glob("rank-*.json")]
        assert report["waiting"] is not None
    assert told["cuda"] == told["cpu"]


def test_a_killed_rank_is_started_again_from_its_checkpoint(run, tmp_path):
    out = tmp_path / "run"
    given = ["--steps", "6", "--mesh", "dp=2", "--nproc", "2", "--save-every", "2", "--out", out]
    again = ["--max-restarts", "1", "--restart-pause-seconds", "0"]
    done = run(*given, *again, "--fails.rank", "1", "--fails.step", "4")
    assert done.returncode == 0, done.stderr
    (event,) = records.read(out / records.EVENTS)
    assert (event["kind"], event["rank"]) == ("restart", 1)
    assert event["step"] in (2, 4)  # it may have died while the second one was written
    assert event["code"] == 128 + signal.SIGKILL
    assert [record["step"] for record in records.read(out / "metrics.jsonl")] == [*range(1, 7)]
    assert find_problems(tmp_path / "log") == []


def test_a_run_goes_on_with_fewer_ranks_and_with_all_again(run, tmp_path):
    out, slots = tmp_path / "run", tmp_path / "slots"
    slots.write_text("2")
    given = ["--steps", "10", "--mesh", "dp=2", "--nproc", "2", "--save-every", "2", "--out", out]
    again = ["--max-restarts", "1", "--restart-pause-seconds", "0"]
    elastic = ["--elastic", "dp=1:2", "--slots", slots, "--fails.slots", slots]
    done = run(*given, *again, *elastic, "--fails.step", "4", "--fails.grows", "7")
    assert done.returncode == 0, done.stderr
    kinds = [event["kind"] for event in records.read(out / records.EVENTS)]
    assert kinds == ["restart", "shrink", "grow"]
    assert [record["step"] for record in records.read(out / "metrics.jsonl")] == [*range(1, 11)]
    assert find_problems(tmp_path / "log") == []


def test_the_doctor_sees_gpus_and_measures_a_mesh(tmp_path):
    (tmp_path / "log").mkdir()

    def ask(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "functron", "doctor", *options], cwd=tmp_path, check=False,
            capture_output=True, text=True, timeout=200,
            env=os.environ | {"FAKE_GPU_LOG": str(tmp_path / "log")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = {row["name"]: row for row in json.loads(ask("--json"))}
    assert "H100" in found["gpu 0"]["found"]
    assert found["driver"]["state"] == found["nccl"]["state"] == found["kernels 7"]["state"] == "ok"
    said = ask(
        "--nproc", "4", "--mesh", "dp=2,tp=2", "--out", "machine.json", "--largest-bytes", "65536"
    )
    assert len(re.findall(r"^(?:dp|tp) +psum ", said, re.MULTILINE)) == 2
    ranks = json.loads((tmp_path / "machine.json").read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    assert find_problems(tmp_path / "log") == []

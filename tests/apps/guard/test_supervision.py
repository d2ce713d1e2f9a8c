"""Jobs that are started again: as long as they make progress, and on as many ranks as there are."""

from __future__ import annotations

import json
import signal
import time

import numpy as np
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from functron.cli import launch, main
from functron.cli.train import parse_train
from functron.training import records
from functron.training.config import configure
from tests.cli.test_launch import TRAIN

pytestmark = pytest.mark.distributed

SUPERVISED = configure(
    mesh="dp=4", nproc=4, global_batch=12, max_restarts=2, restart_pause_seconds=0, device="cpu"
)
DIED = launch.Ending(137, "functron: rank 1 failed first", 1, final=False)


@pytest.fixture
def supervised(tmp_path, capsys):
    """Starts that end as told, and what came of them: exit code, commands, events, errors."""

    def run(config, *starts):
        commands, left = [], list(starts)

        def start(nproc, arguments):
            commands.append((nproc, arguments))
            step, ending = left.pop(0)
            if step:
                with (tmp_path / "metrics.jsonl").open("a") as stream:
                    stream.write(json.dumps({"step": step}) + "\n")
            return ending if isinstance(ending, launch.Ending) else ending()

        code = launch.supervise(config, ["--seq", "16"], tmp_path, start)
        assert not left
        return code, commands, records.read(tmp_path / "events.jsonl"), capsys.readouterr().err

    return run


def test_a_job_is_started_again_as_long_as_it_makes_progress(supervised, tmp_path):
    steps = [5, 7, 7, 8, 0, 9]
    code, commands, events, said = supervised(
        SUPERVISED, *((step, DIED) for step in steps), (0, launch.Ending(0))
    )
    assert code == 0
    again = ["-m", "functron", "train", "--seq", "16", "--out", str(tmp_path), "--resume", "auto"]
    assert commands == [(4, again)] * 7
    assert [event["kind"] for event in events] == ["restart"] * 6
    assert [event["failures"] for event in events] == [1, 1, 2, 1, 2, 1]
    assert events[0] | {"time": 0} == {
        "step": 0, "kind": "restart", "time": 0, "rank": 1, "code": 137,
        "why": "functron: rank 1 failed first", "failures": 1, "pause_seconds": 0,
    }  # fmt: skip
    assert said.count("starts again in 0 s, from the beginning: nothing is saved yet") == 6


def test_a_job_without_progress_is_given_up(supervised):
    code, commands, events, said = supervised(SUPERVISED, *[(0, DIED)] * 3)
    assert (code, len(commands), len(events)) == (137, 3, 2)
    assert "given up after 3 starts without progress" in said


def test_what_another_start_would_not_mend_ends_the_job(supervised, tmp_path):
    def failed(code, final):
        info = {"py_callstack": "", "timestamp": "1", "time": 1.0, "final": final}
        (tmp_path / "error").write_text(json.dumps({"message": {"extraInfo": info}}))
        return launch._ending(1, ProcessFailure(1, 100, code, str(tmp_path / "error")), 4)

    assert not failed(1, False).final
    assert not failed(-9, False).final
    for ending in (failed(1, True), failed(2, False), failed(138, False), launch.Ending(143)):
        assert ending.final
        code, commands, events, said = supervised(SUPERVISED, (1, ending))
        assert (code, len(commands), events) == (ending.code, 1, [])
        assert said.strip() == ending.text


def test_a_job_shrinks_and_grows_with_its_slots(supervised, tmp_path):
    slots = tmp_path / "slots"
    slots.write_text("4")
    config = configure(
        SUPERVISED, elastic="dp=2:6", slots=str(slots), exit_after="1h", max_restarts=3
    )

    def then(number, ending):
        def end():
            slots.write_text(number)
            return ending

        return end

    code, commands, events, said = supervised(
        config,
        (5, then("3", DIED)),
        (8, then("6", launch.Ending(75))),
        (9, then("5", DIED)),
        (12, launch.Ending(0)),
    )
    assert code == 0
    assert [nproc for nproc, _ in commands] == [4, 3, 6, 4]
    options = [dict(zip(line[3::2], line[4::2], strict=True)) for _, line in commands]
    assert [o["--mesh"] for o in options] == ["dp=4", "dp=3", "dp=6", "dp=4"]
    assert [o["--microbatches"] for o in options] == ["1", "2", "1", "1"]
    assert {o["--elastic"] for o in options} == {"dp=2,3,4,6"}
    assert all(3590 < float(o["--exit-after"][:-1]) <= 3600 for o in options)
    kinds = [(event["kind"], event.get("mesh")) for event in events]
    assert kinds == [
        ("restart", None), ("shrink", "dp=3"), ("grow", "dp=6"), ("restart", None),
        ("shrink", "dp=4"),
    ]  # fmt: skip
    assert "goes on with dp=3, 3 processes" in said


def test_a_signal_between_two_starts_ends_the_job(supervised, monkeypatch):
    def interrupted(seconds):
        raise SignalException("asked to", signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", interrupted)
    code, commands, events, _ = supervised(SUPERVISED, (1, DIED))
    assert (code, len(commands), len(events)) == (143, 1, 1)


def test_too_few_slots_are_waited_for(supervised, tmp_path):
    slots = tmp_path / "slots"
    slots.write_text("1")
    config = configure(SUPERVISED, elastic="dp=2:4", slots=str(slots))
    code, commands, events, said = supervised(config)
    assert (code, commands, len(events)) == (1, [], 2)
    assert "too few processes can be had" in said


# The command line of the start of that number; who is there changes in the first two.
CHANGING = """
import os, sys
from pathlib import Path
from functron.cli import process, train
from functron.apps.guard.faults import Kill, moments
number, slots, *arguments = sys.argv[1:]
os.environ["TORCHELASTIC_RUN_ID"] = f"{process.MARK}tests"  # --nproc is of the command that starts it
rank = process.current().rank
kill = moments([Kill("step", 1, 9)] if number == "0" else [], rank)

def at(moment, step):
    if (moment, rank, step) in (("step", 1, 9), ("step", 0, 14)):
        Path(slots).write_text("1" if step == 9 else "2")
    kill(moment, step)

sys.exit(process.run_guarded(lambda: train.run(arguments, at)))
"""


def test_a_run_loses_ranks_and_gets_them_back(torchrun, tmp_path):
    """Two processes, one after a kill, and two again; the batches and the numbers are the same."""
    out, slots, codes = tmp_path / "r", tmp_path / "slots", []
    out.mkdir()
    slots.write_text("2")
    arguments = [*TRAIN, "--steps", "24", "--save-every", "4", "--device", "cpu"]
    arguments[arguments.index("dp=3")] = "dp=2"
    more = ["--nproc", "2", "--max-restarts", "1", "--elastic", "dp=1:2", "--slots", str(slots)]
    given = [*arguments[1:], *more, "--restart-pause-seconds", "0", "--out", str(out)]

    def start(nproc, command):
        done = torchrun(CHANGING, nproc, len(codes), slots, *command[3:], check=False)
        codes.append(done.returncode)
        return launch.Ending(abs(done.returncode), done.stderr, final=done.returncode == 0)

    assert launch.supervise(parse_train(given), given, out, start) == 0
    assert codes == [-signal.SIGKILL, launch.RESHAPE_CODE, 0]
    kinds = [event["kind"] for event in records.read(out / "events.jsonl")]
    assert kinds == ["restart", "shrink", "grow"]
    assert main.main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    found, wanted = (
        [record["loss"] for record in records.read(tmp_path / name / "metrics.jsonl")]
        for name in ("r", "whole")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)

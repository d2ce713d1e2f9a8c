"""Which rank is to blame for a hang, as reports tell it; and a job that hangs, in processes."""

from __future__ import annotations

import json
import time

import pytest

from functron.apps.guard import watchdog
from functron.apps.guard.watchdog import HANGS, Place, Watchdog, verdict
from functron.spmd.flight import FlightRecorder
from functron.training.loop import HANG_CODE
from functron.training.records import EVENTS, read

KINDS = {
    "a": ["psum", "tp", 8, "float32"],
    "b": ["psum", "dp", 8, "float32"],
    "c": ["all_gather", "dp", 16, "float32"],
    "A": ["psum", "tp", 8, "float32"],  # as a, of another line
}
AXES = {  # of ranks 0 to 3 on dp=2,tp=2
    "tp": {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]},
    "dp": {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]},
}


def report(rank, done, step=4, waits=True, heard=None, before="aabc", stage=0, **more):
    """That of a rank which has entered `done` in a step, and waits in the last of them."""
    order = list(KINDS)
    kinds = [{"text": f"{op} over {axis} at {k}", "matched": [op, axis, size, dtype], "line": k}
             for k, (op, axis, size, dtype) in KINDS.items()]  # fmt: skip
    waiting = None
    if waits:
        axis, at = KINDS[done[-1]][1], len(done) - 1
        over = sum(KINDS[k][1] == axis for k in done[:-1])
        waiting = {"op": KINDS[done[-1]][0], "axis": axis, "ranks": AXES[axis][rank], "ordinal": at,
                   "ordinal_over_axis": over, "text": kinds[order.index(done[-1])]["text"]}  # fmt: skip
    return {
        "rank": rank, "host": f"host{rank}", "stage": stage, "step": step, "phase": "step",
        "waiting": waiting, "at": "model.py:7", "kinds": kinds, "dropped": 0,
        "sequence": [order.index(k) for k in done], "before": [order.index(k) for k in before],
        "heard": {str(k): v for k, v in (heard or {}).items()}, **more,
    }  # fmt: skip


def reports(*done, **about):
    return {rank: report(rank, each, **about) for rank, each in enumerate(done) if each is not None}


def test_a_rank_that_tells_nothing():
    found = verdict(reports("aab", "aabc", None, "aa"), 4)
    assert (found.reason, found.ranks, found.step) == ("silent", (2,), 4)
    assert found.at is not None
    # rank 3 waits for it in its second collective; rank 0 comes later
    assert (found.at["axis"], found.at["ordinal"], found.at["ordinal_over_axis"]) == ("tp", 1, 1)
    assert "rank 2 never arrived at psum over tp at a, collective 1" in found.text
    assert "ranks 0, 1, 3 wait" in found.text


def test_a_rank_that_is_in_no_collective():
    late = report(1, "aa", waits=False, phase="data")
    found = verdict({**reports("aaa", "aa", "aab", "aab"), 1: late}, 4)
    assert (found.reason, found.ranks) == ("elsewhere", (1,))
    assert found.at is not None
    assert found.at["ordinal"] == 2
    assert "'data' at model.py:7" in found.text


def test_of_ranks_in_no_collective_the_one_that_is_behind():
    found = verdict({
        0: report(0, "a", step=5, waits=False),
        1: report(1, "aab", waits=False),
        2: report(2, "a", step=5),
        3: report(3, "a", step=5),
    }, 4)  # fmt: skip
    assert found.ranks == (1,)


@pytest.mark.parametrize("odd", range(4))
def test_a_rank_that_took_another_branch(odd):
    done = ["aab"] * 4
    done[odd] = "aac"
    found = verdict(reports(*done), 4)
    assert (found.reason, found.ranks) == ("mismatch", (odd,))
    assert f"rank {odd}: entered all_gather over dp at c as collective 2" in found.text
    assert "where others have psum over dp at b" in found.text


def test_of_two_ranks_the_one_that_differs_from_the_step_before():
    for odd in (0, 1):
        done = ["aab", "aab"]
        done[odd] = "aac"
        assert verdict(reports(*done), 2).ranks == (odd,)


def test_collectives_that_are_alike_are_told_apart_by_their_lines():
    found = verdict(reports("aab", "aAb", "aab", "aab"), 4)
    assert (found.reason, found.ranks) == ("mismatch", (1,))


def test_a_rank_that_is_behind_took_no_branch():
    heard = [{1: True, 2: False, 3: True}, {0: True, 2: False, 3: True},
             {0: False, 1: False, 3: False}, {0: True, 1: True, 2: False}]  # fmt: skip
    done = ["aab", "aab", "a", "a"]
    found = verdict({r: report(r, done[r], heard=heard[r]) for r in range(4)}, 4)
    assert (found.reason, found.ranks) == ("connection", (2,))
    assert found.at is not None
    assert (found.at["axis"], found.at["ordinal"]) == ("tp", 0)  # rank 3 waits for it there


def test_a_dead_connection_has_two_ends():
    heard = {0: {1: True, 2: True, 3: False}, 3: {0: False, 1: True, 2: True}}
    found = verdict({r: report(r, "aab", heard=heard.get(r)) for r in range(4)}, 4)
    assert (found.reason, found.ranks) == ("connection", (0, 3))


def test_stages_have_programs_of_their_own():
    two = {r: report(r, "aab" if r < 2 else "bb", stage=r // 2) for r in range(4)}
    assert verdict(two, 4).reason == "unknown"


def test_nobody_is_to_blame():
    found = verdict(reports("aab", "aab", "aab", "aab", heard=dict.fromkeys(range(4), True)), 4)
    assert (found.reason, found.ranks) == ("unknown", ())


PROGRAM = """
import dataclasses, sys
from pathlib import Path
import torch.distributed as dist
from functron.cli.launch import join
from functron.cli.process import current, run_guarded
from functron.cli.train import hung
from functron.spmd import Mesh
from functron.spmd.flight import FlightRecorder
from functron.apps.guard import watchdog
from functron.apps.guard import faults
from functron.training.config import configure
from functron.training.run import prepare
from functron.training.train import train

# of 10 and 5: one rank never reports, so that they are waited for in full
watchdog.REPORT_SECONDS, watchdog.PROBE_SECONDS = 5.0, 2.0

def run():
    out, checks = Path(sys.argv[1]), sys.argv[2] == "True"
    fault = faults.Detour(1, 3, 2) if checks else faults.Stop(2, 3)
    config = configure(mesh="dp=2,tp=2", format="mock", seq=16, steps=9,
        global_batch=4, hang_after=3.0, timeout_seconds=60.0, out=str(out), check_programs=checks)
    mesh, device = join(Mesh.parse(config.parallelism.mesh), current(), "cpu", 60.0, FlightRecorder())
    made = prepare(config, mesh, device)
    made = dataclasses.replace(made, step=faults.hanging(made.step, [fault], mesh))
    train(made, out, hung=hung)

sys.exit(run_guarded(run))
"""


@pytest.mark.distributed
def test_a_stopped_process_is_named(torchrun, tmp_path):
    out, began = tmp_path / "run", time.monotonic()
    done = torchrun(PROGRAM, 4, out, False, check=False, timeout=120)
    assert done.returncode == HANG_CODE, done.stderr
    assert "step 4 hangs: rank 2 never arrived at psum over 'dp'" in done.stderr
    assert done.stderr.count("step 4 hangs") == 1
    assert time.monotonic() - began < 110
    (event,) = read(out / EVENTS)
    assert (event["kind"], event["step"], event["rank"]) == ("hang", 4, 2)
    assert (event["reason"], event["axis"], event["ordinal"]) == ("silent", "dp", 0)
    assert "options.py" in event["line"]
    told = [json.loads(file.read_text()) for file in sorted((out / HANGS).glob("rank-*.json"))]
    assert [each["rank"] for each in told] == [0, 1, 3]
    assert all(
        "def wait" in str(each["stacks"]) or "wait_tensor" in str(each["stacks"]) for each in told
    )
    assert all(each["waiting"] is not None and each["phase"] == "step" for each in told)


@pytest.mark.distributed
def test_a_detour_is_found_before_anybody_waits(torchrun, tmp_path):
    done = torchrun(PROGRAM, 4, tmp_path / "run", True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "got psum of all ranks, 12 bytes of float32" in done.stderr
    assert "(step 4) on rank 1 where rank" in done.stderr
    assert "torch.where" in done.stderr
    assert not (tmp_path / "run" / HANGS).exists()


def watch(tmp_path, seconds: float) -> Watchdog:
    recorder, about = FlightRecorder(), {"hang_after": seconds, "patience": seconds, "peers": None}
    end = {"fresh": lambda step: step == 0, "end": lambda text, first: None}
    return Watchdog(tmp_path, recorder, 0, 0, [Place.here()], 1.0, **about, **end)


def test_while_it_compiles_and_right_after_it_a_rank_has_more_time(tmp_path, monkeypatch):
    dog = watch(tmp_path, 0.3)
    for phase, first in (("step", 0), ("step", 1)):  # of the second nobody knew that it compiles
        dog.phase(phase, first)
        time.sleep(0.4)
        assert not dog.report()["patient"]
        with dog.recorder.compile() as go_on:
            time.sleep(0.4)
            assert dog.report()["patient"]
            assert dog.report()["compiling"]
            monkeypatch.setattr(watchdog, "COMPILE_SECONDS", 0.1)
            assert not dog.report()["patient"]  # 0.4 s are too long for one kernel
            go_on()
            assert dog.report()["patient"]
            monkeypatch.undo()
        assert dog.report()["patient"]
        time.sleep(0.4)
        assert not dog.report()["patient"]


COMPILES = """
import dataclasses, sys, time
from pathlib import Path
import torch.distributed as dist
from functron.cli.launch import join
from functron.cli.process import current, run_guarded
from functron.cli.train import hung
from functron.compiler import inductor
from functron.core import compat
from functron.spmd import Mesh
from functron.spmd.flight import FlightRecorder
from functron.apps.guard import watchdog
from functron.apps.guard import faults
from functron.training.config import configure
from functron.training.run import prepare
from functron.training.train import train

watchdog.REPORT_SECONDS, watchdog.PROBE_SECONDS, watchdog._PATIENCE = 2.0, 1.0, 0.15  # 9 s
out, axis, stops = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
slow = [4.0 if stops else 14.0]

def compile_slowly(graph, operands, *rest, **given):
    if slow and dist.get_rank() == 0:
        time.sleep(slow.pop())
    return (lambda values: graph(*values)), ""

def run():
    inductor.compile_graph = compile_slowly
    more = {"microbatches": 2} if axis == "pp" else {}
    config = configure(mesh=f"{axis}=2", format="mock", seq=16, steps=3, compile=True,
        global_batch=4, hang_after=8.0, timeout_seconds=60.0, out=str(out), **more)
    mesh, device = join(Mesh.parse(config.parallelism.mesh), current(), "cpu", 60.0, FlightRecorder())
    made = prepare(config, mesh, device)
    groups = [dist.group.WORLD, compat.group(mesh.groups[axis])]

    def step(state, batch):
        print("waits", [compat.timeout_seconds(group) for group in groups], flush=True)
        return stepped(state, batch)

    stepped = faults.hanging(made.step, [faults.Stop(1, 0, 2)] if stops else [], mesh)
    train(dataclasses.replace(made, step=step), out, hung=hung)

sys.exit(run_guarded(run))
"""


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_a_rank_that_compiles_longer_than_others_wait_does_not_hang(torchrun, tmp_path, axis):
    done = torchrun(COMPILES, 2, tmp_path / "run", axis, False, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / HANGS / "verdict.json").exists()
    told = [line for line in done.stdout.splitlines() if line.startswith("waits")]
    assert told.count("waits [1860.0, 1860.0]") == 2, told  # the first step
    assert told.count("waits [60.0, 60.0]") == 4, told


@pytest.mark.full
@pytest.mark.distributed
def test_a_rank_that_stops_in_a_step_that_compiles_is_named(torchrun, tmp_path):
    out = tmp_path / "run"
    done = torchrun(COMPILES, 2, out, "dp", True, check=False, timeout=120)
    assert done.returncode == HANG_CODE, done.stderr
    assert "step 1 hangs: rank 1 never arrived at" in done.stderr
    (event,) = read(out / EVENTS)
    assert (event["reason"], event["rank"]) == ("silent", 1)

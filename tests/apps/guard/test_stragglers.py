"""Who is slow, from the seconds of ranks: planted, in noise, and what a stopwatch measures."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET

import pytest
import torch

from functron.apps.guard.stragglers import (
    NOISE,
    OWN,
    Comparison,
    Stopwatch,
    axes_of,
    groups_of,
    stragglers,
)
from functron.spmd import BoundMesh, Mesh
from functron.spmd.flight import EVERYWHERE, DeviceClock, FlightRecorder

MESH = Mesh(dp=2, tp=2)
GROUPS = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}


def steps(noise: random.Random, count: int = 15, ranks: int = 4, slow=None, network=0.0):
    """Seconds of steps of ranks that wait for the slowest of them, as section -> by rank."""
    found = []
    for _ in range(count):
        own = {
            "data": [0.001 * noise.uniform(0.5, 2) for _ in range(ranks)],
            "compute": [0.1 * noise.gauss(1, 0.03) for _ in range(ranks)],
            "update": [0.01 * noise.gauss(1, 0.05) for _ in range(ranks)],
            "host": [0.01 * noise.expovariate(1) for _ in range(ranks)],
        }
        if slow is not None:
            rank, name, seconds = slow
            own[name][rank] += seconds
        last = max(sum(own[name][r] for name in OWN) for r in range(ranks))
        waits = [last - sum(own[name][r] for name in OWN) + 0.01 for r in range(ranks)]
        more = {"wait/tp": [w + (network if r >= 2 else 0) for r, w in enumerate(waits)]}
        found.append({**own, **more, "wait/dp": [0.01] * ranks})
    return found


def test_groups():
    assert groups_of(MESH) == GROUPS
    assert groups_of(Mesh(dp=1)) == {}


@pytest.mark.parametrize("name", OWN)
def test_a_slow_rank_is_named_with_what_is_slow(name):
    planted = 0.04 if name == "host" else 0.022  # which is noisier
    usual = 0.11 if name in ("compute", "update") else 0.12 + planted
    for seed in range(20):
        (found,) = stragglers(steps(random.Random(seed), slow=(2, name, planted)), GROUPS)
        assert (found.ranks, found.what) == ((2,), name), seed
        assert found.seconds == pytest.approx(planted, abs=0.01)
        assert found.share == pytest.approx(planted / usual, abs=0.08)


def test_a_rank_that_waits_is_not_slow():
    """The three others wait longer than the slow one, and longer than before."""
    (found,) = stragglers(steps(random.Random(0), slow=(1, "compute", 0.05)), GROUPS)
    assert found.ranks == (1,)


def test_noise_is_no_straggler():
    for seed in range(200):
        assert stragglers(steps(random.Random(seed)), GROUPS) == []


def test_ranks_that_measured_nothing_are_no_stragglers():
    names = (*OWN, "wait/tp")
    assert stragglers([{name: [0.0] * 4 for name in names}] * 15, {"tp": [[0, 1], [2, 3]]}) == []


def test_single_long_steps_are_no_straggler():
    rows = steps(random.Random(0))
    for step in rows[::4]:
        step["host"][3] += 1.0
    assert stragglers(rows, GROUPS) == []


def test_a_slow_network():
    (found,) = stragglers(steps(random.Random(0), network=0.08), GROUPS)
    assert (found.ranks, found.what, found.axis) == ((2, 3), "network", "tp")


def test_two_ranks_and_one():
    (found,) = stragglers(steps(random.Random(0), ranks=2, slow=(0, "compute", 0.03)), {})
    assert found.ranks == (0,)
    assert stragglers(steps(random.Random(0), ranks=1), {}) == []


class Clocks:
    """The clock of the machine, and that of a thread on a processor."""

    def __init__(self):
        self.now = self.used = 0.0

    def runs(self, seconds: float):
        self.now += seconds
        self.used += seconds

    def sleeps(self, seconds: float):
        self.now += seconds


def stopwatch(clocks: Clocks, device=None) -> Stopwatch:
    recorder = FlightRecorder()
    axes = ["tp", EVERYWHERE]
    return Stopwatch(recorder, axes, device, lambda: clocks.now, lambda: clocks.used)


def take(watch: Stopwatch, clocks: Clocks, index: int) -> None:
    """A step: 1 s of data, 4 s of work of which 1 s is the update, 2 s asleep, 3 s waiting."""
    watch.phase("data", index)
    clocks.sleeps(1)
    watch.phase("step", index)
    clocks.runs(4)
    watch.recorder.marked["update"] = watch.recorder.marked.get("update", 0.0) + 1
    clocks.sleeps(2)
    clocks.sleeps(3)
    watch.recorder.seconds["tp"] = watch.recorder.seconds.get("tp", 0.0) + 3
    watch.phase("agree", index)
    clocks.runs(9)
    watch.phase("record", index)
    clocks.runs(9)


def test_what_a_stopwatch_measures():
    clocks = Clocks()
    watch = stopwatch(clocks)
    for index in range(3):
        take(watch, clocks, index)
    assert watch.sections == ("data", "compute", "update", "host", "wait/tp", "wait/all ranks")
    assert watch.rows(2) == [[1, 3, 1, 2, 3, 0]] * 2
    assert watch.rows(4) is None


class Event:
    def __init__(self, clocks: Clocks):
        self.clocks, self.at = clocks, 0.0

    def record(self):
        self.at = self.clocks.now

    def query(self):
        return self.at < self.clocks.now - 10

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_what_a_stopwatch_measures_on_a_device():
    clocks = Clocks()
    watch = stopwatch(clocks, DeviceClock(lambda: Event(clocks), lambda: False))
    for index in range(3):
        take(watch, clocks, index)
    # the events of a step are 9 s apart; the last step's are not known yet to have passed
    rows = watch.rows(2)
    assert rows is not None
    assert [row[:3] for row in rows] == [[1, 9, 0]] * 2


def compared(tmp_path, told, said, rank=0, slow=None) -> Comparison:
    """The comparison of rank 0 of four, of which the others are made up."""
    noise = random.Random(1)
    watch = stopwatch(Clocks())
    mesh = BoundMesh(MESH, rank, MESH.coordinate(rank), {"dp": "", "tp": ""}, "cpu")
    watch.axes = axes_of(mesh)

    def gather(mine):
        rows = steps(noise, count=len(mine), slow=slow)
        names = watch.sections
        return torch.tensor(
            [[[step.get(n, [0.0] * 4)[r] for n in names] for step in rows] for r in range(4)],
            dtype=torch.float64,
        )

    hosts = ["a", "a", "b", "b"]
    write = lambda kind, step, **about: told.append({"kind": kind, "step": step, **about})
    made = Comparison(mesh, hosts, 5, watch, gather, write, said.append, tmp_path / "s.svg")
    made.stopwatch.rows = lambda count: [[0.0] * 7] * count  # type: ignore[method-assign]
    return made


def test_a_straggler_is_an_event_once(tmp_path):
    told: list = []
    said: list = []
    made = compared(tmp_path, told, said, slow=(2, "compute", 0.03))
    found = [made.gathered(index) for index in range(40)]
    (event,) = told
    assert (event["kind"], event["step"], event["rank"], event["what"]) == (
        "straggler", 5 * min(NOISE), 2, "compute",
    )  # fmt: skip
    assert event["hosts"] == ["b"]
    (text,) = said
    assert text.startswith("step 10: rank 2 (on b) is slow: it computes")
    due = [index for index, each in enumerate(found) if each]
    assert due == [4, 9, 14, 19, 24, 29, 34, 39]
    row = found[4]["ranks"]
    assert list(row) == ["0", "1", "2", "3"]
    assert row["2"]["compute"] > row["1"]["compute"]
    json.dumps(found)
    made.draw()
    texts = [e.text for e in ET.parse(tmp_path / "s.svg").iter() if e.tag.endswith("text")]
    assert {"2 b", "compute", "wait/tp"} <= set(texts)


def test_a_rank_that_recovers_is_named_again_much_later(tmp_path):
    told: list = []
    made = compared(tmp_path, told, [])
    quiet, slow = made.gather, compared(tmp_path, [], [], slow=(2, "compute", 0.03)).gather
    for index in range(300):
        made.gather = slow if index < 40 or 60 <= index < 80 or index >= 200 else quiet
        made.gathered(index)
    assert [(event["step"], event["rank"]) for event in told] == [(10, 2), (210, 2)]


def test_quiet_ranks_make_no_event(tmp_path):
    told: list = []
    made = compared(tmp_path, told, told)
    for index in range(500):
        made.gathered(index)
    assert told == []


def test_steps_that_are_not_known_yet_are_left_out(tmp_path):
    told: list = []
    made = compared(tmp_path, told, told)
    made.gather = lambda mine: torch.full((4, 5, 7), float("nan"))
    assert [made.gathered(index) for index in range(20)] == [{}] * 20

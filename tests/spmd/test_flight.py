"""The flight recorder: kinds, lines, order and seconds, and what ranks agree about."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from functron.spmd.flight import (
    Agreement,
    CollectiveKind,
    DeviceClock,
    DisagreementError,
    FlightRecorder,
    SourceLine,
    describe,
)

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
import functron as ft
from functron import P, lax
from functron.spmd.flight import FlightRecorder

dist.init_process_group("gloo")
recorder = FlightRecorder()
mesh = ft.Mesh(dp=2, tp=2).bind(recorder=recorder)


def two(w, x):
    y = lax.psum(torch.relu(x @ w), "tp")  # line A
    return lax.all_gather(y, "dp", tiled=True)  # line B


specs = (P(None, "tp"), P("dp"))
f = ft.shard_map(two, mesh, in_specs=specs, out_specs=P(), check=False)
w, x = torch.ones(4, 3), torch.ones(2, 4)
recorder.begin(1)
ft.grad(lambda w: f(w, x).sum())(w)
eager = [recorder.kinds[number] for number in recorder.sequence]
compiled = ft.jit(f)
compiled(w, x)
recorder.begin(2)
compiled(w, x)
jitted = [recorder.kinds[number] for number in recorder.sequence]
most = ft.jit(ft.shard_map(lambda x: lax.pmax(x.sum(), "dp"), mesh, P("dp"), P(), check=False))
recorder.begin(3)
most(x)
kinds = [recorder.kinds[number] for number in recorder.sequence]
assert [kind.op for kind in kinds if kind.dtype == "float32"] == ["pmax"], kinds
plain = ft.shard_map(two, ft.Mesh(dp=2, tp=2).bind(), in_specs=specs, out_specs=P(), check=False)
torch.testing.assert_close(compiled(w, x), plain(w, x))
if dist.get_rank() == 1:
    rows = [[k.op, k.axis, k.bytes, k.dtype, k.line and [k.line.number, k.line.backward]]
            for k in (*eager, *jitted)]
    print(json.dumps([rows, len(eager), recorder.ranks, recorder.waiting, recorder.seconds]))
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_what_a_program_enters(torchrun, tmp_path):
    import json

    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    lines = PROGRAM.splitlines()
    a, b = (
        next(n for n, line in enumerate(lines, 1) if mark in line)
        for mark in ("# line A", "# line B")
    )
    rows, num_eager, ranks, waiting, seconds = json.loads(torchrun(file, 4).stdout)
    written = [row for row in rows[:num_eager] if row[4] is not None and row[4][0] in (a, b)]
    size = 2 * 3 * 4  # of x @ w
    assert written == [
        ["psum", "tp", size, "float32", [a, False]],
        ["all_gather", "dp", size, "float32", [b, False]],
        ["psum_scatter", "dp", 2 * size, "float32", [b, True]],
        ["psum", "tp", size, "float32", [a, True]],
    ]
    ours = [row[:4] for row in rows[num_eager:] if row[0] != "pmax"]  # of the check of shapes
    assert ours == [["psum", "tp", size, "float32"], ["all_gather", "dp", size, "float32"]]
    assert ranks == {"all ranks": [0, 1, 2, 3], "dp": [1, 3], "tp": [0, 1]}
    assert waiting is None
    assert set(seconds) == {"dp", "tp"}
    assert all(value > 0 for value in seconds.values())


def entered(recorder: FlightRecorder, *axes: str) -> None:
    for axis in axes:
        with recorder.record("psum", axis, torch.zeros(2)):
            pass


def test_order_seconds_and_what_is_waited_for():
    recorder = FlightRecorder()
    recorder.ranks |= {"tp": (0, 1), "dp": (0, 2)}
    entered(recorder, "tp", "dp", "tp")
    number = test_order_seconds_and_what_is_waited_for.__code__.co_firstlineno
    assert recorder.sequence == [0, 1, 0]
    assert all(kind.line is not None for kind in recorder.kinds)
    recorder.wait(recorder.enter("all_gather", "tp", torch.zeros(3, dtype=torch.bfloat16)))
    assert recorder.waiting is not None
    about = describe(recorder, recorder.waiting)
    assert about is not None
    assert about["ranks"] == [0, 1]
    assert (about["bytes"], about["dtype"]) == (6, "bfloat16")
    assert (about["ordinal"], about["ordinal_over_axis"]) == (3, 2)
    assert about["line"].startswith(__file__)
    assert int(about["line"].rpartition(":")[2]) > number
    time.sleep(0.02)
    before = recorder.seconds["tp"]
    recorder.leave()
    assert recorder.waiting is None
    assert 0.02 <= recorder.seconds["tp"] - before < 5
    recorder.begin(7)
    assert (recorder.step, recorder.sequence, len(recorder.before)) == (7, [], 4)
    assert describe(recorder, None) is None


def test_the_line_of_a_transpose_is_that_of_what_is_transposed():
    recorder = FlightRecorder()
    recorder.set_line(SourceLine("model.py", 3), True)
    assert recorder.enter("psum", "tp", torch.zeros(1)).kind.line == SourceLine("model.py", 3, True)
    line = recorder.enter("psum", "tp", torch.zeros(1)).kind.line
    assert line is not None
    assert line.file == __file__


def test_many_entries_are_forgotten_and_still_counted(monkeypatch):
    monkeypatch.setattr("functron.spmd.flight.MAX_ENTRIES", 8)
    recorder = FlightRecorder()
    entered(recorder, *["tp"] * 11)
    assert len(recorder.sequence) + recorder.dropped == 11
    assert len(recorder.sequence) <= 8
    assert recorder.enter("psum", "tp", None).ordinal == 11


class Event:
    """An event of a stream that is at `clock[0]` seconds, once it has got there."""

    def __init__(self, clock: list[float]):
        self.clock, self.at = clock, 0.0

    def record(self):
        self.at = self.clock[1]

    def query(self):
        return self.clock[0] >= self.at

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_seconds_on_a_device():
    clock = [0.0, 0.0]  # where the stream is, and where its end is
    recorder = FlightRecorder()
    recorder.device = DeviceClock(lambda: Event(clock), lambda: False)
    for axis, seconds in (("tp", 1.0), ("dp", 2.0), ("tp", 4.0)):
        recorder.wait(recorder.enter("psum", axis, torch.zeros(1)))
        clock[1] += seconds
        recorder.leave()
    assert recorder.device.collect() == {}
    clock[0] = 3.5
    assert recorder.device.collect() == {"tp": 1.0, "dp": 2.0}
    stuck = recorder.device.stuck()
    assert stuck is not None
    assert (stuck.kind.axis, stuck.ordinal) == ("tp", 2)
    clock[0] = 9.0
    assert recorder.device.collect() == {"tp": 4.0}
    assert recorder.device.stuck() is None


def kind(op: str, axis: str = "tp", size: int = 8) -> CollectiveKind:
    return CollectiveKind(op, axis, size, "float32", SourceLine("model.py", 3))


def told(
    store: dist.Store, kinds: list[list[CollectiveKind]], seconds: float = 5.0, **about
) -> list:
    """The findings of each of two ranks that is about to enter these kinds, in threads."""
    found: list = [None, None]

    def rank(number: int) -> None:
        host, port = store.host, store.port  # type: ignore[attr-defined]
        own = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=20))
        agreement = Agreement(own, number, seconds, **about)
        try:
            for each in kinds[number]:
                agreement.check(0, each, (number,) if each.axis == "own" else (0, 1))
            agreement.forget()
        except DisagreementError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def test_ranks_agree(store):
    same = [kind("psum"), kind("all_gather"), kind("psum")]
    assert told(store, [same, same]) == [None, None]


@pytest.mark.parametrize(
    "other", [kind("psum", size=4), kind("all_gather"), kind("psum", "dp")], ids=str
)
def test_ranks_disagree(store, other):
    found = told(store, [[kind("psum"), kind("psum")], [kind("psum"), other]])
    assert found[0] == found[1]  # whoever comes first ends the job
    assert found[0].startswith(f"collective 1: got {other} (step 1) on rank 1 where rank 0 has")
    assert "torch.where" in found[0]


def test_exchanges_of_rows_may_have_any_size(store):
    rows = [[kind("ragged_all_to_all", size=4)], [kind("ragged_all_to_all", size=12)]]
    assert told(store, rows) == [None, None]


def test_a_rank_that_does_not_come_is_an_error_too(store):
    first, second = told(store, [[kind("psum"), kind("psum")], [kind("psum")]], 0.5)
    assert "got nothing from rank 1 for 0.5 s" in first
    assert second is None


def test_orders_of_stages_are_their_own(store):
    first, last = [kind("psum", "own"), kind("psum")], [kind("psum")]
    assert told(store, [first, last], one_order=False) == [None, None]
    assert None not in told(store, [first, last], 0.5)

"""Faults that are put into tensors, files and steps on purpose."""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import pytest
import torch

from functron import checkpoint
from functron.apps.guard import faults
from functron.apps.guard.faults import Corrupt, FullDisk, Kill, flip_, flip_file, inject, moments
from functron.spmd import BoundMesh, Mesh
from functron.spmd.flight import FlightRecorder
from functron.training import run_folder
from functron.training.config import configure
from functron.training.loop import stop_requests
from functron.training.run import prepare
from functron.training.step import State
from functron.training.train import train


class Held(NamedTuple):
    step: Any
    params: Any


def held(step: int) -> Held:
    return Held(torch.tensor(step), {"w": torch.ones(2, 3), "b": torch.zeros(4)})


def taken(state, batch):
    return Held(state.step + 1, state.params), {"loss": state.params["w"].sum()}


def test_a_flipped_sign_bit_is_a_sign():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    flip_(x, 2, 31)
    assert x.tolist() == [[1.0, 2.0], [-3.0, 4.0]]
    flip_(x.t(), 1, 31)  # row-major of what is flipped, whatever its strides are
    assert x.tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_flipping_twice_is_nothing(dtype):
    x = torch.arange(6).to(dtype)
    before = x.clone()
    last = 8 * x.element_size() - 1
    flip_(x, 5, last)
    assert not torch.equal(x, before)
    flip_(x, 5, last)
    assert torch.equal(x, before)


def test_what_is_not_there_is_not_flipped(tmp_path):
    with pytest.raises(ValueError, match="bit 32 of element 0"):
        flip_(torch.zeros(2), 0, 32)
    (tmp_path / "x").write_bytes(b"ab")
    with pytest.raises(ValueError, match="byte 2"):
        flip_file(tmp_path / "x", 2, 0)
    flip_file(tmp_path / "x", 1, 0)
    assert (tmp_path / "x").read_bytes() == b"ac"


def test_a_fault_happens_at_its_step_and_rank_as_often_as_it_says():
    fault = Corrupt(step=1, leaf="params/w", rank=2)
    step = inject(taken, [fault], rank=2)
    assert step(held(0), None)[1]["loss"] == 6
    assert math.isnan(step(held(1), None)[1]["loss"])
    assert step(held(1), None)[1]["loss"] == 6
    assert inject(taken, [fault], rank=1)(held(1), None)[1]["loss"] == 6


def test_a_persistent_fault_stays_and_may_scale_a_whole_leaf():
    fault = Corrupt(step=0, leaf="params/w", element=None, value=10.0, scale=True, times=None)
    step = inject(taken, [fault], rank=7)
    assert [float(step(held(0), None)[1]["loss"]) for _ in range(2)] == [60, 60]


def test_one_layer_goes_wrong():
    whole = Held(torch.tensor(0), {"w": torch.ones(3, 2)})
    step = inject(lambda state, batch: (state, {}), [Corrupt(0, "params/w", layer=2, element=1)])
    wrong = torch.isnan(step(whole, None)[0].params["w"])
    assert wrong.tolist() == [[False, False], [False, False], [False, True]]
    with pytest.raises(ValueError, match="layer 3; wanted one of 3"):
        inject(lambda s, b: (s, {}), [Corrupt(0, "params/w", layer=3)])(whole, None)


def test_an_unknown_leaf_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="params/w"):
        inject(taken, [Corrupt(step=0, leaf="params/v")])(held(0), None)


TINY = configure(
    steps=4, global_batch=2, seq=16, save_every=2, eval_every=3, eval_batches=1, prefetch=0,
    data=argparse.__file__, eval_data=f"t={argparse.__file__}", keep_last=1,
)  # fmt: skip


def test_the_moments_of_a_run(tmp_path):
    seen = []
    run = prepare(TINY, Mesh(), at=lambda moment, step: seen.append((moment, step)))
    assert seen == [("open", 0), ("restored", 0)]
    train(run, tmp_path)
    steps = [(moment, step) for moment, step in seen if moment == "step"]
    assert steps == [("step", index) for index in range(4)]
    assert [step for moment, step in seen if moment == "evaluate"] == [3, 4]
    for step in (2, 4):  # in the thread that saves, while steps go on
        named = ("save", "write", "written", "commit", "committed")
        saved = [moment for moment, at in seen if at == step and moment in named]
        assert saved == list(named)
    seen.clear()
    run = prepare(configure(TINY, steps=5), Mesh(), begin_from=tmp_path / "checkpoints" / "4",
                  at=lambda moment, step: seen.append((moment, step)))  # fmt: skip
    assert seen == [("open", 0), ("restored", 4)]


def test_kills_are_where_they_are_told():
    at = moments([Kill("step", rank=1, step=3, signal=signal.SIGUSR1)], rank=1)
    other = moments([Kill("step", rank=1, step=3, signal=signal.SIGUSR1)], rank=0)
    anybody = moments([Kill("save", rank=None, signal=signal.SIGTERM)], rank=7)
    with stop_requests() as request:
        for moment, step in (("step", 2), ("save", 3), ("evaluate", 3)):
            at(moment, step)
            other("step", 3)
        assert request.signal is None
        at("step", 3)
        assert request.signal == signal.SIGUSR1
        anybody("save", 11)
        assert request.signal == signal.SIGTERM


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_kill_is_a_kill():
    pid = os.fork()
    if pid == 0:
        moments([Kill("open")])("open", 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_full_disk_ends_a_run_with_what_was_saved_before(tmp_path):
    run = prepare(TINY, Mesh(), at=moments([FullDisk(step=4)]))
    with pytest.raises(OSError, match="No space left on device") as caught:
        train(run, tmp_path)
    assert "cannot save the checkpoint" in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    assert checkpoint.verify(tmp_path / "checkpoints" / "2")


def alone(recorder=None) -> BoundMesh:
    return BoundMesh(Mesh(), 0, {}, {}, "cpu", recorder)


def state(step: int) -> State:
    return State(torch.tensor(step), {}, (), torch.zeros(2, dtype=torch.int64))


def work(state, batch):
    """Some milliseconds of a processor."""
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    return state, {"loss": torch.tensor(1.0)}


@pytest.mark.parametrize("how", ["compute", "sleep"])
def test_a_slow_rank(how):
    slow = faults.Slow(0, 1.5, 3, how)
    step = faults.hanging(work, [slow, faults.Slow(1, 100.0)], alone())
    for index, share in ((2, 0.0), (3, 1.5), (4, 1.5)):
        wall, used = time.perf_counter(), time.thread_time()
        step(state(index), None)
        wall, used = time.perf_counter() - wall, time.thread_time() - used
        assert wall >= 0.02 * (1 + share)
        expected = 0.02 * (1 + (share if how == "compute" else 0.0))
        assert used == pytest.approx(expected, rel=0.4)


def test_a_step_that_is_left_out():
    step = faults.hanging(work, [faults.Detour(0, 1, None)], alone())
    assert float(step(state(0), None)[1]["loss"]) == 1.0
    before = state(1)
    after, metrics = step(before, None)
    assert after is before
    assert float(metrics["loss"]) == 0.0


def test_faults_within_a_step_need_a_recorder():
    for fault in (faults.Stop(0, 1, 2), faults.Detour(0, 1, 2)):
        with pytest.raises(ValueError, match=r"mesh\.recorder: got None"):
            faults.hanging(work, [fault], alone())
        faults.hanging(work, [fault], alone(FlightRecorder()))
        faults.hanging(work, [faults.Detour(1, 1, 2)], alone())  # of another rank


GARBLED = """
import sys, torch
import torch.distributed as dist
from functron import P, lax, shard_map
from functron.spmd import Mesh
from functron.spmd.flight import FlightRecorder
from functron.apps.guard import faults
dist.init_process_group("gloo")
mesh = Mesh(tp=2).bind(recorder=FlightRecorder())
sums = shard_map(lambda x: (lax.psum(x, "tp"), lax.psum(2 * x, "tp")), mesh, P("tp"), P())
x, seen = torch.tensor([[1.0, 2.0]]), []

def step(state, batch):
    mesh.recorder.begin(int(state.step))
    seen.append([y.tolist() for y in (*sums(x), x)])
    return state, {}

class State:
    step = 0

step = faults.hanging(step, [faults.Garble(1, 1, 0, element=1, bit=31)], mesh)
for State.step in range(3):
    step(State, None)
right, wrong = [[[2, 4]], [[4, 8]], [[1, 2]]], [[[2, 0]], [[4, 8]], [[1, 2]]]
assert seen == [right, wrong, right], seen
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_a_message_that_changes_on_its_way(torchrun):
    torchrun(GARBLED, 2)


def test_a_clock_that_jumps():
    now = time.time()
    with faults.clock_jump(-3600):
        assert now - 3601 < time.time() < now - 3500
        assert abs(time.time_ns() / 1e9 - time.time()) < 1
    assert time.time() >= now


def test_a_run_does_not_mind_the_time_of_day(tmp_path):
    """It goes on from the newest step, though an older one was saved later by the clock."""
    train(prepare(TINY, Mesh()), tmp_path / "r")
    more = configure(TINY, steps=6, resume=True, out=str(tmp_path / "r"))
    with faults.clock_jump(-86400):
        run = prepare(more, Mesh(), begin_from=run_folder.newest(tmp_path / "r"))
        assert run.start == 4
        train(run, tmp_path / "r")
    assert run_folder.newest(tmp_path / "r") == tmp_path / "r" / "checkpoints" / "6"
    assert [record["step"] for record in run_folder.records(tmp_path / "r")] == [*range(1, 7)]


CUT = """
import socket, sys
from functron.apps.guard.faults import cut_connections

def pair():
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    return server, one, other

server, near, far = pair()
spared = pair()
held = cut_connections([spared[0].getsockname()[1]])
far.setblocking(False)
near.setblocking(False)
assert len(held) == 4, held  # both ends are this process's, and what stands in their place
near.sendall(b"lost")
for end in (near, far):
    try:
        raise SystemExit(f"got {end.recv(9)!r}; wanted neither data nor an end")
    except BlockingIOError:
        pass
spared[1].sendall(b"here")
assert spared[2].recv(9) == b"here"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="connections are found in /proc")
def test_connections_that_are_cut_carry_nothing_and_do_not_end(tmp_path):
    done = subprocess.run([sys.executable, "-c", CUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

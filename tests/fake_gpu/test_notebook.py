"""A mesh that a notebook starts on GPUs: nothing of them in the notebook's own process."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fake_gpu import journal

pytestmark = pytest.mark.fake_gpu

PROGRAM = """
import os, signal, sys, threading, time
import torch
import functron as ft
from functron import P, lax, optim
from tests.apps.notebook.test_session import MESH, batch_at, setup


def stop(x):
    y = lax.psum(x, "dp")
    time.sleep(60)
    return y


def send_on_one(x):  # what the other rank never sends
    if torch.distributed.get_rank() == 0:
        x = lax.psum(x, "dp")
    time.sleep(60)
    return x


with MESH.start({device!r}) as ranks:
    print(os.getpid(), *ranks.pids, ranks.device)
    step, state = setup(ranks)
    state, _ = step(state, batch_at(0))
    for program in (stop, send_on_one):
        f = ft.shard_map(program, ranks, P("dp"), P("dp"), check=False)
        threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            f(torch.ones(2))
        except KeyboardInterrupt as error:
            print(time.monotonic() - began, error)
        else:
            sys.exit("was not interrupted")
    state, metrics = step(state, batch_at(1))
    assert metrics["loss"].device.type == "cuda", metrics
    metrics["loss"].gather()
    memory = ranks.memory()
    assert all(each["taken_bytes"] >= each["held_bytes"] > 0 for each in memory), memory
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_started_mesh(run, tmp_path, device):
    program = tmp_path / "notebook.py"
    program.write_text(PROGRAM.format(device=device) + "    open('said', 'w').write('done')\n")
    processes = run(str(program))
    assert (tmp_path / "said").exists()
    assert len(processes) == 2  # the notebook's own never used a card
    ranks = []
    for process in processes:
        (rank,) = {record["rank"] for record in process.having("communicator")}
        ranks.append(dataclasses.replace(process, rank=rank))
    assert sorted(process.rank for process in ranks) == [0, 1]
    assert journal.find_stray_contexts(ranks) == []
    assert journal.find_errors(ranks) == []
    assert len(journal.find_unmatched(ranks)) == 2  # the second communicator, and what came after
    for process in ranks:
        made = [record["group"] for record in process.having("communicator")]
        left = [record["group"] for record in process.having("abort")]
        assert len(made) == 3  # anew after each interrupt
        assert {*made[:2]} <= {*left}
        last = [r for r in process.having("nccl", "abort") if r["group"] == made[2]]
        assert last[0]["at"] > max(r["at"] for r in process.having("nccl") if r["group"] == made[1])
        assert journal.find_unmatched(ranks, aborted=made[1:2]) == []
    lone = [[r["name"] for r in process.having("nccl")] for process in ranks]
    assert len(lone[0]) == len(lone[1]) + 1  # what was never matched, but aborted

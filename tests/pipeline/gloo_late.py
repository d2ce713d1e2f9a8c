"""Run by test_processes.py under torchrun with 2 processes: pipelines whose transfers come late.

Steps must give the dense numbers in float64 all the same, and planted mistakes must be found.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, gpt, random, tree
from functron.pipeline import make, p2p
from functron.spmd import shared_memory
from functron.training.config import TrainConfig, configure
from functron.training.setup import make_setup
from tests.pipeline.gloo_pipeline import EVALUATED, check_inductor, check_training, mlp_value
from tests.pipeline.late_transfers import Transfers, transfers
from tests.pipeline.test_composition import CONFIG, batch
from tests.ranks import on_the_first

PP2 = Mesh(pp=2)
STEPS = (
    (PP2, "1f1b", 4, (2, 1), True, {}),
    (PP2, "zb-h1", 4, (1, 2), True, {"compile": EVALUATED}),
    (PP2, "dualpipe", 4, (1, 2), True, {}),
)


def check_steps() -> None:
    """Three steps, with parameters that both ranks hold."""
    check_training(STEPS)


def check_compiled() -> None:
    """Stages compiled for good."""
    check_inductor(PP2, ("1f1b",))


def losses(config: TrainConfig, mesh: Any) -> list[list[float]]:
    """Loss and gradient norm of two steps as `functron train` makes them."""
    made = make_setup(config, mesh)
    state, history = made.init(random.key(1)), []
    for _ in range(2):
        data = ft.shard(batch(8), gpt.batch_specs(), mesh)
        state, metrics = made.step(state, data)
        history.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return history


def check_vocabulary() -> None:
    """Embeddings that are gathered before a step, and their gradients dealt out after it."""
    model = replace(CONFIG, num_layers=2, vocab_multiple=2)
    config = configure(gpt=model, global_batch=8, seq=8)
    divided = configure(config, mesh="pp=2", schedule="zb-h1", microbatches=4, vocab_over_pp=True)
    got = losses(divided, PP2.bind())
    want = on_the_first(lambda: losses(config, Mesh()))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


# --- planted mistakes


@contextlib.contextmanager
def planted(holder: type, name: str, make_wrong: Any) -> Iterator[None]:
    real = getattr(holder, name)
    setattr(holder, name, make_wrong(real))
    try:
        yield
    finally:
        setattr(holder, name, real)


def read_early(late, wait):
    def wrong(self):
        value = [buffer.clone() for buffer in self.buffers]
        wait(self)
        return tree.unflatten(self.boundary.structure, value)

    return wrong


def write_result(late, receive):
    def wrong(self, *arguments):
        arriving = receive(self, *arguments)
        self.flush()
        for buffer in arriving.buffers:
            buffer.zero_()
        return arriving

    return wrong


def send_copies(late, begin, then):
    def wrong(self, rows):
        rows[:] = [(x.clone() if to is None else x, peer, to) for x, peer, to in rows]
        with late.held():  # before the other process has what it waits for
            works = begin(self, rows)
            rows[:] = [(then(x) if to is None else x, peer, to) for x, peer, to in rows]
        return works

    return wrong


def write_operand(late, begin):
    return send_copies(late, begin, torch.Tensor.zero_)


def let_go(late, begin):
    return send_copies(late, begin, lambda x: torch.empty(0))


MISTAKES = (
    (p2p.Arriving, "wait", read_early, ""),
    (p2p.Post, "receive", write_result, "a result was written before the wait"),
    (p2p.Post, "_begin", write_operand, "an operand was written before the wait"),
    (p2p.Post, "_begin", let_go, "an operand was let go before the wait"),
)


def check_mistakes(late: Transfers) -> None:
    """Each is found where the contract is broken, and those that make numbers wrong make them so."""
    (((wanted, _), _),), _, _ = mlp_value(PP2, make("1f1b", 2, 4), (1, 1), (8,), torch.float64)
    for holder, name, make_wrong, offence in MISTAKES:
        with planted(holder, name, functools.partial(make_wrong, late)):
            schedule, bound = make("1f1b", 2, 4), PP2.bind()
            (((value, _), _),), _, _ = mlp_value(bound, schedule, (1, 1), (8,), torch.float64)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, late.found)
        found = {one for each in everyone for one in each}
        late.found.clear()
        assert found == ({offence} if offence else set()), (make_wrong, found)
        if make_wrong is not write_result:
            assert not torch.allclose(value, wanted), make_wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sockets = mock.patch.object(shared_memory.HostGroups, "group", lambda self, group: group)
    with sockets, transfers() as late:
        for check in (
            (check_compiled,) if "compiled" in sys.argv else (check_steps, check_vocabulary)
        ):
            check()
            assert not late.found, late.found
            assert late.started["to", 1 - dist.get_rank()]
            late.started.clear()
            if dist.get_rank() == 0:
                print(f"{check.__name__}: ok", flush=True)
        if "compiled" not in sys.argv:
            check_mistakes(late)
            if dist.get_rank() == 0:
                print("check_mistakes: ok", flush=True)
    dist.destroy_process_group()

"""Run by test_rooms.py with 4 processes: steps with a bounded room are those with room for all."""

from __future__ import annotations

import functools
import sys
from unittest import mock

import torch
import torch.distributed as dist

from functron import Mesh, gpt, tree
from functron.nn.moe import MoEConfig
from functron.spmd import DATA_AXES, BoundMesh
from functron.training import evaluation, run, setup
from functron.training.config import configure
from functron.training.costs import step_peak_bytes
from tests.program.measured_memory import measured_peak
from tests.ranks import on_the_first
from tests.training.test_rooms import (
    NODES,
    STEPS,
    TOLERANCE,
    TWO_HOP,
    begin,
    configured,
    draw_batch,
    take_steps,
)

EVALUATED = {"backend": "eager"}  # compiled programs without Inductor, which takes long
FOLDED = {"sequence_parallel": True, "expert_axes": "ep,tp"}
CASES = {
    "compiled": [("ep=2,tp=2", FOLDED)],
    "two-hop": [
        ("ep_node=2,ep=2", NODES | {"name": TWO_HOP[1]}),
        ("ep_node=2,ep=2", NODES | {"name": TWO_HOP[1], "compile": False}),
    ],
    "pipeline": [("pp=2,ep=2", {"name": "global", "schedule": "zb-h1"})],
    "more": [
        ("dp=2,ep=2", {"compile": False}),
        ("pp=2,ep=2", {"compile": False}),
        ("dp=2,ep=2", {"name": "global", "zero": 1}),
        ("dp=2,ep=2", {"name": "quantile", "zero": 1}),
        ("fsdp=2,ep=2", {}),
        ("pp=2,ep=2", {}),
        ("pp=2,ep=2", {"schedule": "combined-1f1b", "chunks": 2, "num_layers": 4}),
    ],
}


def check(mesh: str, fields: dict) -> None:
    compiled, name = fields.get("compile", True), fields.pop("name", "top-2")
    layers = fields.pop("num_layers", 2)
    config = configured(name, mesh, layers, expert_room=1.0, **{"compile": True, **fields})
    bound = Mesh.parse(mesh).bind()
    made = setup.make_setup(config, bound)
    state, (step, _) = begin(made, "some samples"), run.programs(made)
    # on every rank alike, or they would wait for each other
    reruns = []
    want = on_the_first(lambda: numbers(take_steps(name, "some samples", "", layers)[1]))
    got = []
    for index in range(STEPS):
        batch = draw_batch("some samples" if index == 0 else "even", index)
        place, count = run.part_of(bound, DATA_AXES)
        state, metrics = step(state, {k: x.chunk(count)[place] for k, x in batch.items()})
        got.append(numbers([metrics])[0])
        reruns.append(metrics.get("reruns"))
    assert int(state.step) == STEPS
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=0)
    if compiled and "pp" not in mesh:
        check_evaluation(made, name)
    told: list = [None] * dist.get_world_size()
    dist.all_gather_object(told, reruns)
    assert all(each == told[0] for each in told), told
    assert (reruns[0] > 0) if compiled else (reruns == [None] * STEPS), reruns


def check_evaluation(made: setup.RunSetup, name: str) -> None:
    """Of a batch that goes over the room on some ranks, which take it again together."""
    params, batch = begin(made, "some samples").params, draw_batch("some samples")

    def alone() -> torch.Tensor:
        one = setup.make_setup(configured(name, ""), Mesh())
        return evaluation.loss_program(one)(begin(one, "some samples").params, batch)[0]

    rooms: list[float] = []
    make, eager = evaluation._make_loss, functools.partial(evaluation.jit, **EVALUATED)
    with (
        mock.patch.object(evaluation, "jit", eager),
        mock.patch.object(evaluation, "_make_loss", lambda s, r: rooms.append(r) or make(s, r)),
    ):
        assert isinstance(made.mesh, BoundMesh)
        place, count = run.part_of(made.mesh, DATA_AXES)
        here = {k: x.chunk(count)[place] for k, x in batch.items()}
        total, _ = evaluation.loss_program(made)(params, here)
    torch.testing.assert_close(total, on_the_first(alone), rtol=TOLERANCE, atol=0)
    assert len(rooms) > 1, rooms


def check_memory() -> None:
    """All rows of all ranks on the first one: what is promised for so much room is what it holds."""
    moe = MoEConfig(num_experts=8, top_k=2, expert_dim=128, router_bias=True)
    model = gpt.GPTConfig(
        vocab_size=128, num_layers=2, embed_dim=64, num_heads=4, mlp_dim=128, max_seq=128, moe=moe
    )
    given = {"gpt": model, "mesh": "ep=4", "seq": 128, "global_batch": 16, "expert_room": 4.0}
    config, bound = configure(**given), Mesh(ep=4).bind()
    promised = step_peak_bytes(setup.make_setup(config, Mesh(ep=4)))
    made = setup.make_setup(config, bound)
    state, (step, _) = begin(made, "one rank"), run.programs(made)
    tokens = torch.randint(0, 128, (4, 129), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    batch["rows"] = 4 * dist.get_rank() + torch.arange(4)
    states = [tree.map(torch.clone, state) for _ in range(5)]
    step(state, batch)
    # of several, as the threads of process groups let go of what was sent a moment later
    measured = min(measured_peak(step, each, batch) for each in states)
    if dist.get_rank() == 0:
        assert abs(measured / promised - 1) <= 0.05, f"{measured} for {promised}"


def numbers(metrics: list[dict]) -> list[torch.Tensor]:
    return [torch.stack([m["loss"].double(), m["grad_norm"].double()]) for m in metrics]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    made = setup.pipelined

    def evaluated(*args, compile, **more):  # noqa: A002
        return made(*args, compile=None if compile is None else EVALUATED, **more)

    for name in sys.argv[1:]:
        if name == "memory":
            check_memory()
        for mesh, fields in CASES.get(name, ()):
            with (
                mock.patch.object(setup.RunSetup, "jit_settings", property(lambda _: EVALUATED)),
                mock.patch.object(setup, "pipelined", evaluated),
            ):
                check(mesh, dict(fields))
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name}: ok", flush=True)
    dist.destroy_process_group()

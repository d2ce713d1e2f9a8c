"""Run by test_rooms.py with 4 processes: steps with a bounded room are those with room for all."""

from __future__ import annotations

import sys
from unittest import mock

import torch
import torch.distributed as dist

from functron import Mesh
from functron.spmd import DATA_AXES
from functron.training import run, setup
from tests.ranks import on_the_first
from tests.training.test_rooms import STEPS, TOLERANCE, begin, configured, draw_batch, take_steps

EVALUATED = {"backend": "eager"}  # compiled programs without Inductor, which takes long
FOLDED = {"sequence_parallel": True, "expert_axes": "ep,tp"}
CASES = {
    "compiled": [("ep=2,tp=2", FOLDED)],
    "pipeline": [("pp=2,ep=2", {"schedule": "zb-h1"})],
    "more": [
        ("dp=2,ep=2", {"compile": False}),
        ("pp=2,ep=2", {"compile": False}),
        ("dp=2,ep=2", {"zero": 1}),
        ("fsdp=2,ep=2", {}),
        ("pp=2,ep=2", {}),
        ("pp=2,ep=2", {"schedule": "combined-1f1b", "chunks": 2, "num_layers": 4}),
    ],
}


def check(mesh: str, fields: dict) -> None:
    compiled = fields.get("compile", True)
    layers = fields.pop("num_layers", 2)
    config = configured("top-2", mesh, layers, expert_room=1.0, **{"compile": True, **fields})
    bound = Mesh.parse(mesh).bind()
    made = setup.make_setup(config, bound)
    state, (step, _) = begin(made, "some samples"), run.programs(made)
    # on every rank alike, or they would wait for each other
    reruns = []
    want = on_the_first(lambda: numbers(take_steps("top-2", "some samples", "", layers)[1]))
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
    told: list = [None] * dist.get_world_size()
    dist.all_gather_object(told, reruns)
    assert all(each == told[0] for each in told), told
    assert (reruns[0] > 0) if compiled else (reruns == [None] * STEPS), reruns


def numbers(metrics: list[dict]) -> list[torch.Tensor]:
    return [torch.stack([m["loss"].double(), m["grad_norm"].double()]) for m in metrics]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    made = setup.pipelined

    def evaluated(*args, compile, **more):  # noqa: A002
        return made(*args, compile=None if compile is None else EVALUATED, **more)

    for name in sys.argv[1:]:
        for mesh, fields in CASES[name]:
            with (
                mock.patch.object(setup.RunSetup, "jit_settings", property(lambda _: EVALUATED)),
                mock.patch.object(setup, "pipelined", evaluated),
            ):
                check(mesh, dict(fields))
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name}: ok", flush=True)
    dist.destroy_process_group()

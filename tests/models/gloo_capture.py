"""Run by test_capture.py in 4 processes: captured values are the parts of those of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

import functron as ft
from functron import Mesh, gpt, tree
from functron.pipeline import Partition, make
from functron.pipeline.partition import even_layout
from tests.models.test_capture import CONFIG, SEQUENCE_PARALLEL, forward_on, inputs, step_on


def check_forward() -> None:
    """Every rank has its part, by the specs that the simulation puts parts together with."""
    params, batch = inputs()
    mesh = Mesh(dp=2, tp=2)
    simulated = ft.capture(forward_on(mesh, remat="full", **SEQUENCE_PARALLEL), "*")
    _, whole = simulated(params, batch["tokens"])
    specs = simulated.out_specs[1]
    bound = mesh.bind("cpu")
    f = forward_on(bound, remat="full", **SEQUENCE_PARALLEL)
    for run in (ft.capture(f, "*"), ft.jit(ft.capture(f, "*"), backend="eager")):
        given = ft.shard((params, batch["tokens"]), f.in_specs, bound)
        _, values = run(*given)
        assert {*values} == {*whole}
        for name, wanted in ft.shard(whole, specs, bound).items():
            torch.testing.assert_close(values[name], wanted, rtol=1e-12, atol=1e-12)


def check_pipeline() -> None:
    """Every rank has the values of its stages alone."""
    params, batch = inputs()
    mesh = Mesh(pp=2, dp=2)
    step, sgd, specs = step_on(mesh, 2)
    state = ft.init_state(
        ft.random.key(1), gpt.defs(CONFIG), specs, sgd, mesh, tree.map(torch.clone, params)
    )
    _, whole = ft.capture(step, "out")(state, batch)
    bound = mesh.bind("cpu")
    step, sgd, specs = step_on(bound, 2)
    rank = bound.coordinate["pp"]
    rows = slice(0, 2) if rank == 0 else slice(2, 4)

    def begin():
        own = {name: tree.map(torch.clone, params[name]) for name in specs}
        own["blocks"] = tree.map(lambda leaf: leaf[rows], own["blocks"])
        return ft.init_state(ft.random.key(1), own_defs(rank), specs, sgd, bound, own)

    here = ft.shard(batch, gpt.batch_specs(), bound)
    _, values = ft.capture(step, "embed/out")(begin(), here)
    assert len(values) == (2 if rank == 0 else 0)  # and no rank is left alone
    _, values = ft.capture(step, "out")(begin(), here)
    layers = {"0", "1"} if rank == 0 else {"2", "3"}
    ends = {"embed"} if rank == 0 else {"norm", "unembed"}
    for name, value in values.items():
        parts = name.split("/")[2:]
        assert parts[0] in ends or parts[1] in layers, name
        half = whole[name].chunk(2)[bound.coordinate["dp"]]
        torch.testing.assert_close(value, half, rtol=1e-12, atol=1e-12)
    assert len(values) == 2 * (2 * 3 + len(ends))


def own_defs(rank: int) -> dict:
    """Of what a rank of two holds."""
    table = make("1f1b", 2, 2)
    partition = Partition(even_layout(2, 4), table.pipes, gpt.uses(CONFIG))
    return partition.local_defs(gpt.defs(CONFIG), rank)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_forward()
    check_pipeline()
    if dist.get_rank() == 0:
        print("all: ok")
    dist.destroy_process_group()

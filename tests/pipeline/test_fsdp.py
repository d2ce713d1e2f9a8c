"""Pipelines of fully sharded stages on processes, against the simulation in one process."""

from __future__ import annotations

import pytest

PROGRAM = """
import sys, torch, torch.distributed as dist
import functron as ft
from functron import Mesh, P, gpt, optim, random, tree
from functron.pipeline import Partition, collect, even_layout, make, pipelined
from functron.transforms import Gather
from tests.ranks import on_the_first

dist.init_process_group("gloo")
MESH, LAYERS = Mesh(pp=2, fsdp=2), 4
CONFIG = gpt.GPTConfig(
    vocab_size=50, vocab_multiple=8, num_layers=LAYERS, embed_dim=16, num_heads=4, mlp_dim=32,
    max_seq=8, init_stddev=0.3, dtype="float64", tied=True,
)
tokens = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(8)}


def gradients(mesh, schedule, bound, settings, spread):
    partition = Partition(
        even_layout(schedule.num_stages, LAYERS), schedule.pipes, gpt.uses(CONFIG), spread
    )
    rank = mesh.coordinate["pp"] if bound else None
    defs = partition.local_defs(gpt.defs(CONFIG), rank)
    rules = gpt.rules(CONFIG, MESH)
    specs = ft.param_specs(defs, rules)
    gather = Gather(ft.param_specs(gpt.defs(CONFIG), rules))
    stored = partition.storage_specs(specs) if bound else specs
    weights = ft.init_params(random.key(0), defs, stored, mesh)
    if bound:
        assert weights["embed"].shape == (56 // (2 if spread else 1), 8), weights["embed"].shape
        assert weights["blocks"]["mlp"]["up"]["w"].shape == (LAYERS // 2, 8, 32)

    def stage(part, params, x, data, total):
        y = gpt.stage_loss(CONFIG, part, params, x, data, ft.ModelOptions(gather=gather))
        return y / total if part.loss else y

    stages = pipelined(stage, partition, schedule, compile=settings if bound else None)

    def program(weights, batch):
        value, grads = stages.value_and_grad(weights, batch, gpt.num_targets(batch))
        grads = ft.sync_gradients(grads, specs)
        return value, grads, optim.global_norm(grads, specs, partition.copies(rank))

    mapped = ft.shard_map(
        program, mesh, (specs, P(ft.DATA_AXES)), (P(), specs, P()), stages="pp"
    )
    value, grads, norm = mapped(weights, ft.shard(batch, P(ft.DATA_AXES), mesh))
    return value, ft.gather(grads, stored, mesh), norm, partition


EVALUATED = {"backend": "eager"}
CASES = [
    ("1f1b", None, {}), ("1f1b", None, {"embed": 0}), ("1f1b", EVALUATED, {"embed": 0}),
    ("zb-h1", EVALUATED, {}),
]
for name, settings, spread in (CASES[int(index)] for index in sys.argv[1:]):
    schedule = make(name, 2, 4)
    want_value, want, want_norm = on_the_first(
        lambda: gradients(MESH, schedule, False, None, spread)[:3]
    )
    bound = MESH.bind()
    value, grads, norm, partition = gradients(bound, schedule, True, settings, spread)
    whole = collect(grads, want, partition, bound)
    torch.testing.assert_close((value, norm), (want_value, want_norm), rtol=1e-12, atol=0)
    if bound.coordinate["pp"] == 0:
        for a, b in zip(tree.leaves(whole), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
print("equal")
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("cases", [(1, 3), pytest.param((0, 2), marks=pytest.mark.full)], ids=str)
def test_processes_have_the_gradients_of_the_simulation(torchrun, cases):
    assert torchrun(PROGRAM, 4, *cases, timeout=240).stdout.splitlines() == ["equal"] * 4

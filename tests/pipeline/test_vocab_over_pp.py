"""A vocabulary divided among the ranks of a pipeline: who holds what, and the same numbers."""

from __future__ import annotations

import pytest

from functron import P
from functron.pipeline import Partition, even_layout, make
from functron.training.checks import validate
from functron.training.config import configure

PROGRAM = """
import sys, torch, torch.distributed as dist
import functron as ft
from functron import Mesh, P, gpt, optim, random, tree
from functron.pipeline import Partition, collect, even_layout, make, pipelined
from tests.ranks import on_the_first

dist.init_process_group("gloo")
MESH = Mesh(pp=2, tp=2)
tokens = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(8)}


def gradients(config, mesh, schedule, bound):
    spread = {"embed": 0} if config.tied else {"embed": 0, "unembed": 1}
    layout = even_layout(schedule.num_stages, config.num_layers)
    partition = Partition(layout, schedule.pipes, gpt.uses(config), spread)
    rank = mesh.coordinate["pp"] if bound else None
    defs = partition.local_defs(gpt.defs(config), rank)
    specs = ft.param_specs(defs, gpt.rules(config, MESH))
    stored = partition.storage_specs(specs) if bound else specs
    weights = ft.init_params(random.key(0), defs, stored, mesh)
    if bound:
        assert weights["embed"].shape == (56 // 4, 16), weights["embed"].shape

    def stage(part, params, x, data, total):
        y = gpt.stage_loss(config, part, params, x, data)
        return y / total if part.loss else y

    stages = pipelined(stage, partition, schedule)

    def program(weights, batch):
        value, grads = stages.value_and_grad(weights, batch, gpt.num_targets(batch))
        grads = ft.sync_gradients(grads, specs)
        return value, grads, optim.global_norm(grads, specs, partition.copies(rank))

    mapped = ft.shard_map(
        program, mesh, (specs, P(ft.DATA_AXES)), (P(), specs, P()), stages="pp"
    )
    value, grads, norm = mapped(weights, ft.shard(batch, P(ft.DATA_AXES), mesh))
    return value, ft.gather(grads, stored, mesh), norm, partition


for name in ("1f1b", "dualpipe"):
    for tied in (name in sys.argv[1:],):
        config = gpt.GPTConfig(
            vocab_size=50, vocab_multiple=8, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32,
            max_seq=8, init_stddev=0.3, dtype="float64", tied=tied,
        )
        schedule = make(name, 2, 8)
        want_value, want, want_norm = on_the_first(
            lambda: gradients(config, MESH, schedule, False)[:3]
        )
        bound = MESH.bind()
        value, grads, norm, partition = gradients(config, bound, schedule, True)
        whole = collect(grads, want, partition, bound)
        torch.testing.assert_close((value, norm), (want_value, want_norm), rtol=1e-12, atol=0)
        if bound.coordinate["pp"] == 0:
            for a, b in zip(tree.leaves(whole), tree.leaves(want), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
print("equal")
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [["1f1b"], pytest.param(["dualpipe"], marks=pytest.mark.full)])
def test_processes_have_the_gradients_of_the_simulation(torchrun, tied):
    assert torchrun(PROGRAM, 4, *tied, timeout=120).stdout.splitlines() == ["equal"] * 4


def test_every_rank_holds_a_part():
    schedule = make("1f1b", 4, 4)
    uses = {"embed": "EL", "blocks": "t", "norm": "L"}
    partition = Partition(even_layout(4, 4), schedule.pipes, uses, {"embed": 0})
    assert [partition.held(rank) for rank in range(4)] == [["embed", "blocks"]] * 3 + [[*uses]]
    assert partition.copies(1) == {"blocks": 1, "embed": 1}
    specs = partition.storage_specs({"embed": P("tp"), "blocks": P(None, "tp")})
    assert specs == {"embed": P(("tp", "pp")), "blocks": P(None, "tp")}


def test_teaches():
    schedule = make("1f1b", 2, 2)
    uses = {"embed": "E", "blocks": "t"}
    with pytest.raises(ValueError, match="spread/blocks: got an entry that uses='t'; wanted E, L"):
        Partition(even_layout(2, 2), schedule.pipes, uses, {"blocks": 0})
    config = configure(mesh="pp=5", vocab_over_pp=True, microbatches=2, layout="Et|t|t|t|L")
    with pytest.raises(ValueError, match="pad dim 0 to"):
        validate(config)
    with pytest.raises(
        ValueError, match="vocab_over_pp: got True, which has no effect; wanted pp in"
    ):
        validate(configure(vocab_over_pp=True))

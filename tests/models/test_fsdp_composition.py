"""The central table of sharded parameters: every mesh x option gives the dense numbers in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, tree
from functron.pipeline import Partition, make, pipelined
from functron.pipeline.partition import even_layout
from functron.spmd.spec import spec_axes
from functron.transforms import Gather
from tests.models.test_composition import BASE, MODELS, STREAMS, assert_equal, dense

MESHES = [
    Mesh(fsdp=2), Mesh(fsdp=4), Mesh(dp=2, fsdp=2), Mesh(fsdp=2, tp=2), Mesh(dp=2, fsdp=2, tp=2),
]  # fmt: skip
HYBRID, FULL = ("fsdp",), ("dp", "fsdp")


def gathered(config, mesh, axes=HYBRID, **options):
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh, fsdp=axes))
    return specs, Gather(specs, **options)


def sharded(config, mesh, num_microbatches, *, axes=HYBRID, remat="none", stream="", **options):
    """The per-rank gradient program on `mesh`, as a function of global values."""
    specs, gather = gathered(config, mesh, axes, **options)

    def program(weights, data, key):
        total = gpt.num_targets(data)

        def loss(weights, data):
            value = gpt.loss(
                config,
                weights,
                data,
                ft.ModelOptions(stream=STREAMS[stream], remat=remat, gather=gather),
                key=key,
            )
            return value / total

        both = ft.accumulate(ft.value_and_grad(loss), num_microbatches)
        value, grads = both(weights, data)
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES), P()), (P(), specs))


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("mesh", "model", "stream", "remat", "microbatches"),
    [
        pytest.param(*row, id="-".join(map(str, filter(None, row))))
        for row in [
            *itertools.product(MESHES, ["llama"], [""], ["none", "full"], [1, 2]),
            *itertools.product(MESHES[3:], ["gpt2"], STREAMS, ["none", "dots"], [2]),
            *itertools.product(MESHES[3:4], MODELS, STREAMS, ["full", "selective"], [1]),
        ]
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_composition(mesh, model, stream, remat, microbatches, tied):
    config = replace(MODELS[model], num_layers=2, tied=tied, dropout=0.3)
    weights, data, key, value, grads = dense(config)
    f = sharded(config, mesh, microbatches, remat=remat, stream=stream)
    assert_equal(*f(weights, data, key), value, grads)


@pytest.mark.parametrize(
    "mesh", [Mesh(dp=2), Mesh(dp=2, fsdp=2), Mesh(dp=2, fsdp=2, tp=2)], ids=str
)
@pytest.mark.parametrize("regather", [True, False])
def test_split_over_all_data_ranks(mesh, regather):
    """ZeRO-3 on dp, and on dp and fsdp together."""
    config = replace(MODELS["llama-multi-query"], num_layers=2, dropout=0.3)
    weights, data, key, value, grads = dense(config)
    f = sharded(config, mesh, 2, axes=FULL, regather=regather, stream="sequence-parallel")
    assert_equal(*f(weights, data, key), value, grads)


FULL_ONLY = [pytest.param(name, marks=pytest.mark.full) for name in ("none", "dots", "selective")]


@pytest.mark.parametrize("remat", ["full", *FULL_ONLY])
def test_traced_programs_are_right_and_replicated(remat):
    config = replace(MODELS["gpt2"], num_layers=2, tied=True)
    weights, data, key, value, grads = dense(config)
    f = sharded(config, Mesh(dp=2, fsdp=2, tp=2), 2, remat=remat, stream="sequence-parallel")
    program = ft.trace(f)(weights, data, key)
    program.check()
    assert_equal(*program(weights, data, key), value, grads)


def test_differentiated_from_outside():
    config = replace(MODELS["llama"], num_layers=2)
    weights, data, _, value, grads = dense(config)
    mesh = Mesh(dp=2, fsdp=2)
    specs, gather = gathered(config, mesh)

    def program(weights, data):
        return gpt.loss(config, weights, data, ft.ModelOptions(gather=gather)) / gpt.num_targets(
            data
        )

    mapped = ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES)), P())
    got, got_value = torch.func.grad_and_value(mapped)(weights, data)
    assert_equal(got_value, got, value, grads)


# --- pipelines


@pytest.mark.pairwise(
    of=lambda mesh, schedule, remat, stream: [{"mesh": mesh}, {"schedule": (schedule, remat)}]
)
@pytest.mark.parametrize(
    "mesh", [Mesh(pp=2, fsdp=2), Mesh(pp=2, fsdp=2, tp=2), Mesh(pp=2, dp=2, fsdp=2)], ids=str
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("remat", "stream"), [("none", ""), ("full", "sequence-parallel")])
def test_pipelines(mesh, schedule, remat, stream):
    config = replace(MODELS["llama"], num_layers=3, dropout=0.3, tied=remat == "full")
    weights, data, key, value, grads = dense(config)
    plain = mesh.without("pp")
    specs, gather = gathered(config, plain)
    made = make(schedule, 2, 2)
    partition = Partition(even_layout(2, 3), made.pipes, gpt.uses(config))

    def stage(part, params, x, batch, key, total):
        y = gpt.stage_loss(
            config,
            part,
            params,
            x,
            batch,
            ft.ModelOptions(stream=STREAMS[stream], remat=remat, gather=gather),
            key=key,
        )
        return y / total if part.loss else y

    stages = pipelined(stage, partition, made)

    def program(weights, data, key):
        value, grads = stages.value_and_grad(weights, data, key, gpt.num_targets(data))
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(program, mesh, (specs, P(ft.DATA_AXES), P()), (P(), specs), stages="pp")
    assert_equal(*mapped(weights, data, key), value, grads)


# --- what is held and sent


def test_each_rank_holds_its_share_and_gathers_a_layer_at_a_time():
    """Of 8 layers on 4 ranks: a quarter at rest; at the peak nothing like the whole model."""
    config = replace(
        BASE, num_layers=8, vocab_size=128, dtype="float32", embed_dim=64, mlp_dim=256, head_dim=8
    )
    mesh = Mesh(fsdp=4)
    defs = gpt.defs(config)
    data = {"tokens": torch.empty(4, 8, dtype=torch.int64, device="meta")}
    data |= {"targets": data["tokens"], "rows": data["tokens"][:, 0]}
    key = torch.empty(2, dtype=torch.int64, device="meta")
    weights = ft.params.abstract_params(defs)
    total, block = tree.nbytes(weights), tree.nbytes(weights["blocks"]) // 8

    def measured(**options):
        program = ft.trace(sharded(config, mesh, 1, **options))(
            {"params": weights}["params"], data, key
        )
        return program, program.memory()

    program, memory = measured()
    split = [
        given
        for given in program.inputs
        if given.spec is not None and "fsdp" in spec_axes(given.spec)
    ]
    assert sum(given.var.nbytes for given in split if given.path.startswith("0/")) * 4 == total
    _, kept = measured(regather=False)
    # what differs is what is kept between forward and backward: all layers but the one in use
    assert 6 * block < kept.peak_bytes - memory.peak_bytes < 8 * block


@pytest.mark.pairwise(
    of=lambda microbatches, regather: [{"microbatches": microbatches}, {"regather": regather}]
)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("regather", [True, False])
def test_bytes_sent_are_those_of_the_formula(microbatches, regather):
    config = replace(BASE, dtype="float32", dropout=0.0)
    mesh = Mesh(fsdp=4)
    weights = ft.params.abstract_params(gpt.defs(config))
    data = {"tokens": torch.empty(8, 8, dtype=torch.int64, device="meta")}
    data |= {"targets": data["tokens"], "rows": data["tokens"][:, 0]}
    f = sharded(config, mesh, microbatches, regather=regather)
    cost = ft.trace(f)(weights, data, torch.empty(2, dtype=torch.int64, device="meta")).cost()
    sent = {(row.op, row.phase): row.sent_bytes for row in cost.collectives if row.op != "psum"}
    total, blocks = tree.nbytes(weights), tree.nbytes(weights["blocks"])
    again = {("all_gather", "recompute"): microbatches * blocks * 3 // 4} if regather else {}
    assert sent == {
        ("all_gather", "forward"): microbatches * total * 3 // 4,
        **again,
        ("psum_scatter", "backward"): microbatches * total * 3 // 4,
    }


# --- what does not fit


def test_says_what_does_not_divide():
    config = replace(BASE, embed_dim=36, mlp_dim=50, num_heads=9, head_dim=4)
    with pytest.raises(ValueError, match="cannot run on this mesh") as caught:
        gpt.rules(config, Mesh(dp=2, fsdp=8, tp=2, ep=2), fsdp=FULL)
    text = str(caught.value)
    assert (
        "embed_dim: got 36; wanted a multiple of dp=2 * fsdp=8; fix: split over 4 ranks, or set embed_dim=48"
        in text
    )
    assert "num_heads" in text
    assert "ep=2" in text
    with pytest.raises(ValueError, match="fsdp: got 'tp'"):
        gpt.rules(BASE, Mesh(tp=2), fsdp=("tp",))


def test_says_that_gather_is_missing():
    config = replace(MODELS["llama"], num_layers=1)
    weights, data, *_ = dense(config)
    specs, _ = gathered(config, Mesh(fsdp=2))
    f = ft.shard_map(
        lambda w, b: gpt.loss(config, w, b), Mesh(fsdp=2), (specs, P(ft.DATA_AXES)), P()
    )
    with pytest.raises(ValueError, match=r"12 of embed_dim=24.*fix: pass ft.ModelOptions\(gather="):
        f(weights, data)


def test_rules_name_no_axes_that_the_mesh_lacks():
    assert "embed" not in gpt.rules(BASE, Mesh(dp=2, tp=2))
    assert gpt.rules(BASE, Mesh(dp=2, fsdp=2))["embed"] == "fsdp"
    assert gpt.rules(BASE, Mesh(dp=2, fsdp=2), fsdp=FULL)["embed"] == FULL
    assert "embed" not in gpt.rules(BASE, Mesh(fsdp=2), fsdp=())

"""Rows of the central table for sizes that ranks do not divide: padded parts, the dense numbers.

Vocabulary, heads, features and embed_dim are each split over ranks that do not divide them
(`functron.Uneven`), alone and together, in every option of the other tables.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, P, Uneven, checkpoint, gpt, hub, tree
from functron.nn.moe import MoEConfig
from functron.pipeline import Partition, make, pipelined
from functron.pipeline.partition import even_layout
from tests.models import gloo_uneven
from tests.models import test_moe_composition as mixtures
from tests.models.test_composition import BASE, GPT2, STREAMS, assert_equal, dense

ALL = ("vocab", "heads", "mlp", "embed", "expert")
SMALL = {"num_layers": 2, "vocab_multiple": 1, "dropout": 0.3}
SIZES = {**SMALL, "embed_dim": 20, "num_heads": 6, "mlp_dim": 45}
LLAMA = replace(BASE, **SIZES, num_kv_heads=3, qk_norm=True, fused_projections=False)
MODELS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied=True, z_loss=1e-2),
    "fused": replace(LLAMA, num_kv_heads=6, fused_projections=True),
    "multi-query": replace(LLAMA, num_kv_heads=1, num_heads=5, qkv_bias=True),
    "two-keys": replace(LLAMA, num_kv_heads=2, sinks=True, attention_gate=True),
    "gpt2": replace(GPT2, **SIZES),
    "across": replace(LLAMA, num_kv_heads=6, qk_norm_across=True),
    "few-heads": replace(LLAMA, num_heads=2, num_kv_heads=2),
    "opt": replace(GPT2, **{**SMALL, "dropout": 0.0}, embed_dim=124, activation="relu"),
}
ROWS = [
    # model, mesh, uneven, stream, remat, microbatches, tokens of logits at a time
    ("opt", Mesh(fsdp=8), ("embed",), "", "none", 1, 0),
    ("llama", Mesh(fsdp=8), ALL, "", "full", 1, 0),
    ("llama", Mesh(tp=4), ALL, "sequence-parallel", "dots", 2, 0),
    ("llama", Mesh(dp=2, fsdp=2, tp=2), ALL, "", "selective", 2, 0),
    ("llama", Mesh(tp=8), ("vocab", "heads", "mlp"), "", "none", 1, 0),
    ("tied", Mesh(tp=4, fsdp=2), ALL, "sequence-parallel", "full", 1, 5),
    ("tied", Mesh(tp=8), ALL, "", "none", 2, 7),
    ("fused", Mesh(tp=4), ALL, "sequence-parallel", "none", 1, 0),
    ("fused", Mesh(fsdp=8), ALL, "", "none", 1, 0),
    ("multi-query", Mesh(tp=2, dp=2), ALL, "sequence-parallel", "full", 1, 0),
    ("multi-query", Mesh(tp=4), ALL, "", "none", 1, 0),
    ("two-keys", Mesh(tp=4, dp=2), ALL, "sequence-parallel", "none", 1, 0),
    ("two-keys", Mesh(tp=8), ALL, "", "none", 1, 0),
    ("few-heads", Mesh(tp=4), ALL, "", "none", 1, 0),
    ("few-heads", Mesh(tp=5), ALL, "uneven", "none", 1, 0),
    ("gpt2", Mesh(tp=4, dp=2), ALL, "sequence-parallel", "none", 2, 0),
    ("gpt2", Mesh(tp=2, fsdp=4), ALL, "", "full", 1, 0),
    ("across", Mesh(tp=4), ("heads", "vocab", "mlp"), "", "none", 1, 0),
    ("across", Mesh(tp=4, fsdp=2), ALL, "sequence-parallel", "none", 1, 0),
    # 24 tokens over 5 and 7 ranks, and 12 over 5
    ("llama", Mesh(tp=5), ALL, "uneven", "full", 2, 0),
    ("gpt2", Mesh(tp=7), ALL, "uneven", "none", 1, 0),
    ("tied", Mesh(tp=7), ALL, "uneven", "selective", 1, 5),
    ("gpt2", Mesh(cp=2, tp=5), ALL, "uneven", "none", 1, 0),
    ("fused", Mesh(ulysses=2, tp=5), ALL, "uneven", "dots", 1, 0),
]


STREAMS = {
    **STREAMS,
    "uneven": P(ft.DATA_AXES, Uneven(("cp", "ulysses", "tp"), 24)),
}


def sharded(config, mesh, uneven, stream="", remat="none", num_microbatches=1, chunk=0, **options):
    """The per-rank gradient program on `mesh`, as a function of global values."""
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh, uneven=uneven))
    gather = ft.Gather(specs, **options)
    options = ft.ModelOptions(STREAMS[stream], remat, gather, loss_chunk_tokens=chunk)

    def program(weights, data, key):
        total = gpt.num_targets(data)
        gradients = ft.value_and_grad(
            lambda weights, data: gpt.loss(config, weights, data, options, key=key) / total
        )
        value, grads = ft.accumulate(gradients, num_microbatches)(weights, data)
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, gpt.batch_specs(), P()), (P(), specs))


@pytest.mark.parametrize(
    ("model", "mesh", "uneven", "stream", "remat", "num_microbatches", "chunk"),
    [pytest.param(*row, id="-".join(map(str, filter(None, row)))) for row in ROWS],
)
def test_composition(model, mesh, uneven, stream, remat, num_microbatches, chunk):
    config = MODELS[model]
    weights, data, key, value, grads = dense(config)
    run = sharded(config, mesh, uneven, stream, remat, num_microbatches, chunk)
    assert_equal(*run(weights, data, key), value, grads)


@pytest.mark.parametrize("regather", [True, False])
def test_traced_programs_are_right_and_tell_of_padding(regather):
    config, mesh = MODELS["tied"], Mesh(dp=2, fsdp=2, tp=4)
    weights, data, key, value, grads = dense(config)
    run = sharded(config, mesh, ALL, "sequence-parallel", regather=regather)
    program = ft.trace(run)(weights, data, key)
    program.check()
    assert_equal(*program(weights, data, key), value, grads)
    # 50 rows are 4 parts of 13, of which 2 rows of 20 numbers in float64 are padding
    row = next(line for line in str(program).splitlines() if " 0/embed " in line)
    assert f"P({Uneven('tp', 50)!r}, {Uneven('fsdp', 20)!r})" in row
    assert "with 320 bytes of padding" in row
    assert "bytes of padding" in str(program).splitlines()[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_layers_of_a_pipeline(schedule):
    """3 layers on 2 stages, with everything else uneven besides."""
    config, mesh = replace(MODELS["tied"], num_layers=3), Mesh(pp=2, fsdp=2, tp=5)
    weights, data, key, value, grads = dense(config)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh.without("pp"), uneven=ALL))
    made = make(schedule, 2, 2)
    partition = Partition(even_layout(2, 3), made.pipes, gpt.uses(config))
    options = ft.ModelOptions(stream=STREAMS["uneven"], gather=ft.Gather(specs))

    def stage(part, params, x, batch, key, total):
        y = gpt.stage_loss(config, part, params, x, batch, options, key=key)
        return y / total if part.loss else y

    stages = pipelined(stage, partition, made)

    def program(weights, data, key):
        value, grads = stages.value_and_grad(weights, data, key, gpt.num_targets(data))
        return value, ft.sync_gradients(grads, specs)

    mapped = ft.shard_map(program, mesh, (specs, gpt.batch_specs(), P()), (P(), specs), stages="pp")
    assert_equal(*mapped(weights, data, key), value, grads)


LATENT = replace(
    mixtures.DEEPSEEK,
    num_heads=5,
    embed_dim=18,
    vocab_multiple=1,
    mlp_dim=21,
    moe=replace(mixtures.DEEPSEEK.moe, expert_dim=5, shared_dim=7),
)


def five(name, **changes):
    """A mixture of 5 experts."""
    config = mixtures.MODELS[name]
    groups = {"num_groups": 1, "top_groups": 1}
    return replace(config, moe=replace(config.moe, num_experts=5, **groups, **changes))


OSS = replace(
    mixtures.GPT_OSS, num_heads=6, num_kv_heads=3, head_dim=4, moe=MoEConfig(
        num_experts=4, top_k=2, expert_dim=5, normalise="after", router_bias=True, expert_bias=True
    ),
)  # fmt: skip


MIXTURES = [
    ("latent", LATENT, Mesh(tp=2), True),
    ("latent", LATENT, Mesh(ep=2, tp=4), False),
    ("latent", LATENT, Mesh(fsdp=4), False),
    ("gpt-oss", OSS, Mesh(tp=4), True),
    ("gpt-oss", OSS, Mesh(ep=2, tp=2), True),
    ("mixtral", five("mixtral"), Mesh(ep=2), False),
    ("deepseek", five("deepseek"), Mesh(ep=4), False),
    ("capacity", five("capacity"), Mesh(ep=2, tp=2), True),
    ("expert-choice", five("expert-choice"), Mesh(ep=2), False),
    ("sinkhorn", five("sinkhorn"), Mesh(ep=4), False),
    ("gathered", five("mixtral", dispatch="gather"), Mesh(ep=2, tp=2), True),
]
FOLDED = [
    # of 2 x 2 ranks they have 2, 1, 2 and no expert; of 3 x 2 ranks 1, 1, 1, 1, 1 and none
    ("mixtral", five("mixtral"), Mesh(ep=2, tp=2), ("ep", "tp")),
    ("mixtral", five("mixtral"), Mesh(ep=2, tp=2), ("tp", "ep")),
    ("deepseek", five("deepseek"), Mesh(ep=2, cp=2), ("ep", "cp")),
    ("deepseek", five("deepseek"), Mesh(fsdp=2, ep=2, tp=2), ("ep", "tp")),
    ("capacity", five("capacity"), Mesh(ep=2, tp=2), ("ep", "tp")),
    ("expert-choice", five("expert-choice"), Mesh(ep=2, tp=2), ("ep", "tp")),
    ("gathered", five("mixtral", dispatch="gather"), Mesh(ep=2, tp=2), ("ep", "tp")),
    ("gathered", five("mixtral", dispatch="gather"), Mesh(cp=2, ep=2, tp=2), ("ep", "cp", "tp")),
]


@pytest.mark.parametrize(
    ("config", "mesh", "parallel"),
    [pytest.param(*row, id=f"{name}-{row[1]}") for name, *row in MIXTURES],
)
def test_mixtures(config, mesh, parallel):
    """The heads of latent attention, and the features of experts."""
    weights, data, key, value, grads = mixtures.dense(config)
    experts = mixtures.sharded(config, mesh, parallel, ("ep",), uneven=ALL)
    mixtures.assert_equal(*experts(weights, data, key), value, grads)


@pytest.mark.parametrize(
    ("config", "mesh", "axes"),
    [pytest.param(*row, id=f"{name}-{row[1]}-{row[2]}") for name, *row in FOLDED],
)
def test_experts_over_several_axes(config, mesh, axes):
    """Padding lies between experts, whose numbers in routers are without it."""
    weights, data, key, value, grads = mixtures.dense(config)
    parallel = mesh["tp"] > 1
    experts = mixtures.sharded(config, mesh, parallel, axes, uneven=("expert",))
    mixtures.assert_equal(*experts(weights, data, key), value, grads)


@pytest.mark.parametrize(
    ("changes", "mesh", "uneven", "match"),
    [
        ({}, Mesh(tp=4), (), "num_heads: got 6; wanted a multiple of tp=4"),
        ({}, Mesh(tp=4), ("head",), "uneven: got 'head'.*did you mean 'heads'"),
        ({"num_heads": 1, "num_kv_heads": 1}, Mesh(tp=2), ALL, "num_heads: got 1; wanted at least"),
        ({"fused_projections": True}, Mesh(tp=4), ALL, "fused_projections=False"),
        ({}, Mesh(tp=2, ulysses=2), ALL, "num_heads: got 6; wanted with padding"),
    ],
)
def test_what_cannot_be_split_is_refused(changes, mesh, uneven, match):
    with pytest.raises(ValueError, match=match):
        gpt.rules(replace(LLAMA, **changes), mesh, uneven=uneven)


@pytest.mark.parametrize(
    ("changes", "stream", "match"),
    [
        ({"moe": MoEConfig(num_experts=4)}, STREAMS["uneven"], "as experts are chosen for each"),
        ({}, P(ft.DATA_AXES, Uneven("tp", 25)), "got 24 tokens per sample; wanted 25"),
        ({}, STREAMS["sequence-parallel"], r"Uneven\(\('cp', 'ulysses', 'tp'\), 24\)"),
    ],
)
def test_sequences_that_cannot_be_split_are_refused(changes, stream, match):
    config = replace(LLAMA, dropout=0.0, **changes)
    weights = ft.abstract_params(gpt.defs(config))
    tokens = torch.zeros(1, 24, dtype=torch.int64, device="meta")
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, Mesh(tp=5), uneven=ALL))
    forward = functools.partial(gpt.forward, config, options=ft.ModelOptions(stream=stream))
    with pytest.raises(ValueError, match=match):
        ft.trace(ft.shard_map(forward, Mesh(tp=5), (specs, P()), P(None, None, "tp")))(
            weights, tokens
        )
    with pytest.raises(ValueError, match="padding would be measured"):
        ft.ModelOptions(stream=STREAMS["uneven"], watch=True)


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        (Mesh(cp=2), P(None, Uneven("cp", 23))),
        (Mesh(dp=3), P(Uneven("dp", 8))),
    ],
    ids=str,
)
def test_padding_of_a_batch_would_count(mesh, spec):
    config = replace(LLAMA, dropout=0.0)
    _, data, _, _, _ = dense(config)
    data = {"tokens": data["tokens"][:, :23], "targets": data["targets"][:, :23]}
    with pytest.raises(ValueError, match=r"targets: got parts with padding.*IGNORE_INDEX"):
        ft.shard_map(gpt.num_targets, mesh, (spec,), P())(data)
    loss = functools.partial(gpt.loss, config)
    weights = ft.init_params(ft.random.key(0), gpt.defs(config))
    with pytest.raises(ValueError, match=r"tokens: got parts with padding"):
        ft.shard_map(loss, mesh, (P(), spec), P())(weights, data)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_ranks_of_cp_take_samples_that_the_batch_pads(order):
    """21 of 24 tokens: the others have no target, and no token before them sees them."""
    config, mesh = replace(LLAMA, dropout=0.0), Mesh(cp=2, tp=5)
    weights, data, _, _, _ = dense(config)
    short = {name: data[name][:, :21] for name in ("tokens", "targets")}
    total = gpt.num_targets(short)
    grads, value = torch.func.grad_and_value(lambda w: gpt.loss(config, w, short) / total)(weights)
    padded = {"tokens": data["tokens"], "targets": data["targets"].clone()}
    padded["targets"][:, 21:] = ft.nn.IGNORE_INDEX
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh, uneven=ALL))
    context = gpt.Context(order=order)
    options = ft.ModelOptions(STREAMS["uneven"], gather=ft.Gather(specs), context=context)

    def program(weights, data):
        total = gpt.num_targets(data)
        loss = lambda weights: gpt.loss(config, weights, data, options) / total
        value, grads = ft.value_and_grad(loss)(weights)
        return value, ft.sync_gradients(grads, specs)

    batch_specs = {name: gpt.batch_specs()[name] for name in padded}
    f = ft.shard_map(program, mesh, (specs, batch_specs), (P(), specs))
    assert_equal(*f(weights, padded), value, grads)


def test_padded_tokens_are_never_sampled():
    """On every mesh the tokens of one rank; the logits of padding are lower than all others."""
    config = replace(MODELS["tied"], dropout=0.0)
    weights, data, _, _, _ = dense(replace(config, dropout=0.3))
    mesh = Mesh(tp=4)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh, uneven=ALL))
    options = ft.ModelOptions(gather=ft.Gather(specs))
    find = functools.partial(gpt.forward, config, options=options)
    logits = ft.shard_map(
        lambda w, tokens: ft.lax.all_gather(find(w, tokens), "tp", axis=-1, tiled=True),
        mesh, (specs, P()), P(),
    )(weights, data["tokens"])  # fmt: skip
    want = gpt.forward(config, weights, data["tokens"])
    assert (logits[..., :50] - want).abs().max() < 1e-10
    assert logits.shape[-1] == 52


@pytest.mark.distributed
@pytest.mark.parametrize("names", [("tp", "fsdp", "ep"), ("folded",)], ids="-".join)
def test_processes(torchrun, tmp_path, names):
    """Steps of ranks that divide nothing; then what they saved and exported, on one rank."""
    ranks = gloo_uneven.MESHES[names[0]].size
    script = Path(__file__).with_name("gloo_uneven.py")
    done = torchrun(script, ranks, tmp_path, *names, timeout=180)
    assert done.stdout.splitlines() == [f"{name}: ok" for name in names]
    for name in names:
        config = gloo_uneven.config_of(name)
        want = torch.load(tmp_path / f"{name}.pt")
        stored = checkpoint.restore(tmp_path / name / "1")["params"]
        loaded = hub.load(tmp_path / f"{name} hub", config)
        for path, leaf in tree.items(want):
            assert torch.equal(leaf, dict(tree.items(stored))[path]), path
            assert torch.equal(leaf, dict(tree.items(loaded))[path]), path

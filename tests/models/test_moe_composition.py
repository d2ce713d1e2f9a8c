"""Rows of the central table for mixtures of experts: every mesh gives the dense numbers.

Dense is one rank without a mesh; that its experts, routers and losses are the right ones is what
tests/nn/moe and test_hugging_face.py show. Every gradient is compared: the router's (Megatron-LM
issue 7452 and transformers issue 48687 are routers whose gradient is wrong under expert
parallelism while the loss is right), the shared expert's gate, latent attention's shared key, the
modules that predict further ahead.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, P, gpt, random, tree
from functron.nn.moe import MoEConfig

TOLERANCE = 1e-10
BATCH, SEQ, VOCAB = 4, 16, 24

MIXTRAL = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, max_seq=SEQ,
    mlp_dim=24, init_stddev=0.4, vocab_multiple=24, dtype="float64",
    moe=MoEConfig(
        num_experts=4, top_k=2, expert_dim=8, renormalise=True, aux_loss=0.3, aux="batch",
        z_loss=0.1,
    ),
)  # fmt: skip
DEEPSEEK = replace(
    MIXTRAL, num_layers=3, dense_layers=1, num_kv_heads=0, head_dim=4, q_rank=8, kv_rank=6,
    rope_head_dim=4, v_head_dim=6, mtp_depth=1,
    moe=MoEConfig(
        num_experts=8, top_k=3, expert_dim=4, score="sigmoid", renormalise=True, scale=2.5,
        num_groups=4, top_groups=2, balance_bias=True, shared_dim=8, aux_loss=0.2, z_loss=0.05,
    ),
)  # fmt: skip
CAPACITY = replace(
    MIXTRAL,
    moe=MoEConfig(
        num_experts=4, top_k=2, expert_dim=8, capacity_factor=0.75, aux_loss=0.3, latent_dim=12,
        shared_dim=8, shared_gate=True, jitter=0.1,
    ),
)  # fmt: skip
GPT_OSS = replace(
    MIXTRAL, window=5, global_every=2, sinks=True, bias=True, activation="clamped_swiglu",
    moe=MoEConfig(
        num_experts=4, top_k=2, expert_dim=8, normalise="after", router_bias=True, expert_bias=True
    ),
)  # fmt: skip
CHOICE = replace(
    MIXTRAL,
    dropout=0.2,
    moe=MoEConfig(num_experts=4, expert_dim=8, routing="expert_choice", capacity_factor=1.0),
)
SINKHORN = replace(MIXTRAL, moe=MoEConfig(4, 2, 8, routing="sinkhorn", drop="probability",
                                          capacity_factor=1.0))  # fmt: skip
MODELS = {
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "capacity": CAPACITY,
    "gpt-oss": GPT_OSS,
    "expert-choice": CHOICE,
    "sinkhorn": SINKHORN,
    "capacity-of-batch": replace(
        MIXTRAL,
        moe=MoEConfig(
            num_experts=4,
            top_k=2,
            expert_dim=8,
            capacity_factor=0.75,
            capacity_over="batch",
            drop="probability",
            renormalise=True,
        ),
    ),
    "alternating": replace(MIXTRAL, num_layers=5, dense_layers=1, dense_at=(2, 4), dropout=0.1),
    "fused": replace(CAPACITY, fused_projections=True),
    "quantile": replace(
        MIXTRAL, moe=replace(MIXTRAL.moe, balance_bias=True, balance_by="quantile")
    ),
    "ahead-repeated": replace(DEEPSEEK, num_layers=2, mtp_depth=2, mtp_repeated=True),
    "ahead-detached": replace(DEEPSEEK, num_layers=2, mtp_depth=2, mtp_detached=True),
}
FOLDED = ("ep", "tp")
# (mesh, sequence parallel, axes of the experts)
PLACES = [
    (Mesh(dp=2), False, ("ep",)),
    (Mesh(ep=2), False, ("ep",)),
    (Mesh(ep=4), False, ("ep",)),
    (Mesh(tp=2), False, ("ep",)),
    (Mesh(tp=2), True, ("ep",)),
    (Mesh(tp=2), True, ("tp",)),
    (Mesh(ep=2, tp=2), False, ("ep",)),
    (Mesh(ep=2, tp=2), True, ("ep",)),
    (Mesh(ep=2, tp=2), True, FOLDED),
    (Mesh(ep=2, cp=2), False, ("ep",)),
    (Mesh(ep=2, cp=2), False, ("ep", "cp")),
    (Mesh(dp=2, cp=2, tp=2), True, ("tp",)),
    (Mesh(fsdp=2, ep=2, tp=2), True, ("ep",)),
    (Mesh(cp=2, ulysses=2), False, ("cp", "ulysses")),
]


TWO_HOP = {
    "top-2": replace(MIXTRAL, moe=replace(MIXTRAL.moe, num_experts=8, dispatch="two-hop")),
    "top-8 of 2 groups of 4": replace(
        DEEPSEEK,
        moe=replace(DEEPSEEK.moe, num_experts=32, top_k=8, expert_dim=2, dispatch="two-hop"),
    ),
    "capacity": replace(
        CAPACITY, moe=replace(CAPACITY.moe, num_experts=8, jitter=0.0, dispatch="two-hop")
    ),
}
NODES = ("ep_node", "ep")
TWO_HOP_PLACES = [
    (Mesh(ep_node=2, ep=2), False, NODES),
    (Mesh(ep=2, tp=2), True, FOLDED),
    (Mesh(ep=2, cp=2), False, ("ep", "cp")),
    (Mesh(fsdp=2, ep=2, tp=2), True, FOLDED),
    (Mesh(ep_node=2, ep=2, tp=2), False, NODES),
    (Mesh(ep_node=2, ep=2, tp=2), True, (*NODES, "tp")),
]


def batch() -> dict:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :11] = ft.nn.IGNORE_INDEX  # so that ranks and microbatches hold different counts
    targets[2] = ft.nn.IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


@functools.cache
def dense(config: gpt.GPTConfig):
    """Parameters, batch, key, and the dense loss, its details and gradients."""
    weights, key, data = ft.init_params(random.key(0), gpt.defs(config)), random.key(7), batch()
    total = (data["targets"] != ft.nn.IGNORE_INDEX).sum()

    def loss(w):
        value, details = gpt.loss_and_details(config, w, data, key=key)
        return value / total, details

    grads, (value, details) = torch.func.grad_and_value(loss, has_aux=True)(weights)
    return weights, data, key, (value, details), grads


def sharded(
    config, mesh, parallel, experts, *, remat="none", context=None, num_microbatches=1, uneven=()
):
    """The per-rank gradient program on `mesh`, as a function of global values."""
    rules = gpt.rules(config, mesh, expert_axes=experts, uneven=uneven)
    specs = ft.param_specs(gpt.defs(config), rules)
    options = ft.ModelOptions(
        stream=gpt.SEQUENCE_PARALLEL_STREAM if parallel else gpt.STREAM,
        remat=remat,
        gather=ft.Gather(specs),
        expert_axes=experts,
        context=context or gpt.Context(),
    )

    def program(weights, data, key):
        total = gpt.num_targets(data)

        def loss(weights, data):
            value, details = gpt.loss_and_details(config, weights, data, options, key=key)
            return value / total, details

        gradients = ft.value_and_grad(loss, has_aux=True)
        value, grads = ft.accumulate(gradients, num_microbatches)(weights, data)
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, gpt.batch_specs(), P()), (P(), specs))


def assert_equal(value, grads, want_value, want_grads):
    assert abs(value[0] - want_value[0]) <= TOLERANCE * abs(want_value[0])
    for got, want in zip(tree.leaves(value[1]), tree.leaves(want_value[1]), strict=True):
        assert (got.double() - want.double()).abs().max() <= TOLERANCE * max(want.abs().max(), 1)
    rows = zip(tree.paths(grads), tree.leaves(grads), tree.leaves(want_grads), strict=True)
    for path, got, want in rows:
        unused = path.endswith(("attention/k/b", "balance"))
        assert want.abs().max() > 0 or unused, path
        error = (got - want).abs().max() / want.abs().max().clamp(min=1e-3)
        limit = TOLERANCE if want.dtype == torch.float64 else 1e-6  # the balance is float32 always
        assert error <= limit, f"{path}: {error}"


def factors(model, mesh, parallel, experts):
    """Each model with each axis, and with experts over others than theirs; and each place."""
    axes = {axis: mesh[axis] > 1 for axis in ("dp", "fsdp", "ep", "tp", "cp", "ulysses")}
    rest = {"parallel": parallel, "other": experts != ("ep",)}
    place = {"place": (str(mesh), parallel, experts)}
    split = [name for name, has in (axes | rest).items() if has]
    return [*({"model": model, "split": name} for name in split), place]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("mesh", "parallel", "experts"), PLACES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_composition(model, mesh, parallel, experts):
    config = MODELS[model]
    weights, data, key, value, grads = dense(config)
    run = sharded(config, mesh, parallel, experts)
    assert_equal(*run(weights, data, key), value, grads)


@pytest.mark.pairwise(
    of=lambda model, mesh, parallel, experts, how: [
        {"model": model, "how": how},
        {"place": (str(mesh), parallel, experts), "compiled": how == "compiled"},
    ]
)
@pytest.mark.parametrize("how", ["eager", "compiled", "remat"])
@pytest.mark.parametrize(("mesh", "parallel", "experts"), TWO_HOP_PLACES, ids=str)
@pytest.mark.parametrize("model", TWO_HOP)
def test_two_hops(model, mesh, parallel, experts, how):
    config = TWO_HOP[model]
    weights, data, key, value, grads = dense(config)
    run = sharded(config, mesh, parallel, experts, remat="full" if how == "remat" else "none")
    run = ft.jit(run, backend="eager") if how == "compiled" else run
    assert_equal(*run(weights, data, key), value, grads)


def test_two_hops_need_nodes():
    for mesh in (Mesh(ep=2), Mesh(ep_node=2)):
        (axis,) = mesh.axis_names
        with pytest.raises(ValueError, match=f"moe.dispatch: got 'two-hop' over \\('{axis}',\\)"):
            gpt.rules(TWO_HOP["top-2"], mesh, expert_axes=(axis,))
    gpt.rules(TWO_HOP["top-2"], Mesh(ep=1), expert_axes=("ep",))

"""Parts of the user's own in a decoder: on every mesh what they are on one device."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import functron as ft
from functron import Hook, Mesh, ModelOptions, P, gpt, lax, nn, random, tree
from functron.models.decoder import transformer_block
from functron.nn import moe
from functron.nn.layers import linear_defs, sequence_axes
from functron.pipeline import Partition, make, pipelined
from functron.pipeline.partition import layout_of
from functron.spmd.params import Normal, ParamDef

CONFIG = gpt.GPTConfig(
    vocab_size=37, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, max_seq=8,
    init_stddev=0.3, vocab_multiple=4, dtype="float64", dropout=0.2,
)  # fmt: skip
EXPERTS = replace(
    CONFIG, moe=moe.MoEConfig(num_experts=4, top_k=2, expert_dim=12, renormalise=True)
)
BATCH, SEQ, TOLERANCE = 4, 8, 1e-10


def scores_of(q, k, v):
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    return torch.einsum("bqhd,bkhd->bhqk", q, k), v


def softmax_attention(q, k, v):
    scores, v = scores_of(q, k, v)
    past = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    scores = (scores / q.shape[-1] ** 0.5).masked_fill(~past, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def linear_attention(q, k, v):
    """Katharopoulos et al. 2020: elu(x) + 1 in place of the exponential of scores."""
    scores, v = scores_of(F.elu(q) + 1, F.elu(k) + 1, v)
    scores = scores.tril()
    return torch.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdim=True), v)


def linear_cached(q, cache, places):
    scores, v = scores_of(F.elu(q) + 1, F.elu(cache.k) + 1, cache.v)
    seen = torch.arange(cache.k.shape[1]) <= places[:, None, :, None]
    scores = torch.where(seen, scores, 0)
    return torch.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdim=True), v)


def weighted_attention(params, q, k, v):
    """With a number for each head of queries, and one for each of keys."""
    out = linear_attention(q, k * params["keys"][:, None], v)
    return out * params["heads"][:, None]


def weighted_defs(config):
    normal, count = Normal(1.0), {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    names = {"heads": "heads", "keys": "kv_heads"}
    return {
        name: ParamDef((count[axis],), (axis,), normal, torch.float64, decay=False)
        for name, axis in names.items()
    }


def switch(params, inputs):
    """Top-k of the softmax, with the balance loss of Fedus et al. 2021 within each sequence."""
    k, experts = inputs.config.top_k, inputs.config.num_experts
    scores = (inputs.x @ params["w"] + params["b"]).softmax(-1)
    weights, chosen = scores.topk(k)
    counted = inputs.counted.unsqueeze(-1)
    load = (torch.zeros_like(scores).scatter(-1, chosen, 1.0) * counted).sum(1, keepdim=True)
    load, tokens = lax.psum(
        (lax.stop_gradient(load), counted.sum(1, keepdim=True)), sequence_axes(inputs.stream)
    )
    balance = experts * (load / (k * tokens.clamp_min(1)) * scores * counted).sum()
    return moe.RouterOutput(chosen, weights, auxiliary=0.3 * balance)


def switch_defs(config):
    return linear_defs(
        (config.embed_dim, config.moe.num_experts), ("embed", None), stddev=0.5,
        bias=(config.moe.num_experts,), bias_axes=(None,), dtype=torch.float64,
    )  # fmt: skip


def bilinear(params, x, *, stream, **_):
    x = nn.gather_sequence(x, stream)
    hidden = nn.column_parallel(x, params["a"]["w"]) * nn.column_parallel(x, params["b"]["w"])
    return nn.row_parallel(hidden, params["down"]["w"], stream=stream)


def bilinear_defs(config):
    shape, kind = (config.embed_dim, 32), {"stddev": 0.3, "dtype": torch.float64}
    a = linear_defs(shape, ("embed", "mlp"), **kind)
    return {"a": a, "b": a, "down": linear_defs(shape[::-1], ("mlp", "embed"), **kind)}


def mean_norm(params, x, *, eps, **_):
    return x / (x.abs().mean(-1, keepdim=True) + eps) * (1 + params["gain"]) + params["shift"]


def mean_norm_defs(config):
    d = ParamDef((config.embed_dim,), ("embed",), Normal(0.3), torch.float64, decay=False)
    return {"gain": d, "shift": d}


def parallel_block(layer, params, x):
    """Attention and experts, or the feed-forward layer, beside one another (PaLM)."""
    y = layer.norm(params, "attention_norm", x)
    out, auxiliary = layer.feed_forward(params, layer.norm(params, "mlp_norm", x))
    x = x + layer.drop(layer.attention(params, y), 0) + layer.drop(out, 1)
    return x if auxiliary is None else (x, auxiliary)


HOOKS = {
    "attention": (CONFIG, {"attention": linear_attention}),
    "attention with parameters": (
        CONFIG, {"attention": Hook(weighted_attention, weighted_defs)}
    ),
    "router": (EXPERTS, {"router": Hook(switch, switch_defs)}),
    "mlp": (CONFIG, {"mlp": Hook(bilinear, bilinear_defs)}),
    "norm": (CONFIG, {"norm": Hook(mean_norm, mean_norm_defs)}),
    "block": (CONFIG, {"block": parallel_block}),
    "block of experts": (EXPERTS, {"block": parallel_block}),
}  # fmt: skip


def batch():
    tokens = torch.randint(0, 37, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = nn.IGNORE_INDEX
    return {"tokens": tokens[:, :-1], "targets": targets, "rows": torch.arange(BATCH)}


@functools.cache
def dense(name):
    """Weights, and the mean loss and gradients on one device."""
    config, hooks = HOOKS[name]
    options = ModelOptions(**hooks)
    weights = ft.init_params(random.key(0), gpt.defs(config, options))
    data = batch()
    loss = lambda w: gpt.loss(config, w, data, options, key=random.key(3)) / gpt.num_targets(data)
    grads, value = torch.func.grad_and_value(loss)(weights)
    return weights, value, grads


def close(value, grads, name):
    _, want, want_grads = dense(name)
    assert abs(value - want) <= TOLERANCE * abs(want)
    for path, got, wanted in zip(
        tree.paths(grads), tree.leaves(grads), tree.leaves(want_grads), strict=True
    ):
        assert wanted.abs().max() > 0, path
        assert (got - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), path


def program_on(name, mesh, **given):
    config, hooks = HOOKS[name]
    specs = ft.param_specs(gpt.defs(config, ModelOptions(**hooks)), gpt.rules(config, mesh))
    options = ModelOptions(gather=ft.Gather(specs), **given, **hooks)

    def program(weights, data, key):
        total = gpt.num_targets(data)
        loss = lambda w, data: gpt.loss(config, w, data, options, key=key) / total
        value, grads = ft.accumulate(ft.value_and_grad(loss), 2)(weights, data)
        return value, ft.sync_gradients(grads, specs)

    return ft.shard_map(program, mesh, (specs, gpt.batch_specs(), P()), (P(), specs))


SPLIT = {"stream": gpt.SEQUENCE_PARALLEL_STREAM, "remat": "full"}
MESHES = {
    "dp=2,tp=2": SPLIT,
    "fsdp=2": {"remat": "dots"},
    "cp=2": {"remat": "selective"},
    "cp=2,tp=2": {"stream": gpt.SEQUENCE_PARALLEL_STREAM},
    "ep=2": {},
}


TABLE = [(name, mesh) for name in HOOKS for mesh in MESHES if mesh != "ep=2" or HOOKS[name][0].moe]


def factors(name, mesh):
    """Each part with and without tensor parallelism, and each mesh with experts and without."""
    return [
        {"name": name, "tp": "tp=" in mesh},
        {"mesh": mesh, "experts": bool(HOOKS[name][0].moe)},
    ]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("name", "mesh"), TABLE)
def test_meshes(name, mesh):
    run = program_on(name, Mesh.parse(mesh), **MESHES[mesh])
    close(*run(dense(name)[0], batch(), random.key(3)), name)


@pytest.mark.pairwise(
    of=lambda name, schedule: [
        {"name": name},
        {"schedule": schedule, "defs": "parameters" in name, "experts": name == "router"},
    ]
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", HOOKS)
def test_pipelines(name, schedule):
    (config, hooks), schedule = HOOKS[name], make(schedule, 2, 2)
    options = ModelOptions(**hooks)

    def stage(part, params, x, data, key, total):
        y = gpt.stage_loss(config, part, params, x, data, options, key=key)
        return (y[0] if isinstance(y, tuple) else y) / total if part.loss else y

    partition = Partition(layout_of((1, 1)), schedule.pipes, gpt.uses(config, options))
    pipeline = pipelined(stage, partition, schedule)

    def program(weights, data, key):
        value, grads = pipeline.value_and_grad(weights, data, key, gpt.num_targets(data))
        return value, ft.sync_gradients(grads, P())

    run = ft.shard_map(program, Mesh(pp=2), (P(), P(), P()), P(), stages="pp")
    close(*run(dense(name)[0], batch(), random.key(3)), name)


@pytest.mark.parametrize("name", [pytest.param("attention", marks=pytest.mark.full), "router"])
def test_traced_and_compiled(name):
    run = ft.jit(program_on(name, Mesh(tp=2)), backend="eager")
    close(*run(dense(name)[0], batch(), random.key(3)), name)


def test_the_models_own_parts_are_the_default():
    """The formulas of what the model computes anyway, as hooks."""
    config = replace(CONFIG, dropout=0.0)
    weights, data = ft.init_params(random.key(0), gpt.defs(config)), batch()
    want = gpt.loss(config, weights, data)
    norm = lambda params, x, *, eps, **_: F.rms_norm(x, x.shape[-1:], params["scale"], eps)

    def mlp(params, x, **_):
        up, gate, down = (params[name]["w"] for name in ("up", "gate", "down"))
        return (F.silu(x @ gate) * (x @ up)) @ down

    own = {"attention": softmax_attention, "norm": norm, "mlp": mlp, "block": transformer_block}
    for name, hook in own.items():
        got = gpt.loss(config, weights, data, ModelOptions(**{name: hook}))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    other = gpt.loss(config, weights, data, ModelOptions(attention=linear_attention))
    assert abs(other - want) > 1e-3


@pytest.mark.parametrize("cached", [None, linear_cached], ids=["read again", "cached"])
@pytest.mark.parametrize("mesh", [None, Mesh(dp=2, tp=2)], ids=str)
def test_generation(mesh, cached):
    config = replace(CONFIG, dropout=0.0, max_seq=8)
    weights, tokens = ft.init_params(random.key(0), gpt.defs(config)), batch()["tokens"][:, :3]
    options = ModelOptions(attention=Hook(linear_attention, cached=cached))
    want = tokens
    for _ in range(4):
        logits = gpt.forward(config, weights, want, ModelOptions(attention=linear_attention))
        want = torch.cat([want, logits[:, -1:, :37].argmax(-1)], 1)
    got = ft.generate(weights, config, tokens, 4, temperature=0, mesh=mesh, options=options)
    assert torch.equal(got, want)
    assert not torch.equal(ft.generate(weights, config, tokens, 4, temperature=0), want)
    lengths = torch.tensor([3, 2, 3, 1])
    padded = functools.partial(
        ft.generate, weights, config, tokens, 2, temperature=0, lengths=lengths, options=options
    )
    if cached is None:
        with pytest.raises(ValueError, match=r"options.attention: got a function of whole seq"):
            padded()
    else:
        alone = gpt.forward(config, weights, tokens[3:, :1], options)[0, -1, :37].argmax()
        assert padded()[3, 1] == alone


def refused(name, match, config=None, data=None, **options):
    with pytest.raises(ValueError, match=match):
        gpt.loss(config or HOOKS[name][0], dense(name)[0], data or batch(), ModelOptions(**options))


def test_hooks_without_a_place_are_refused():
    packed = {**batch(), "segments": batch()["tokens"], "positions": batch()["tokens"]}
    own, balanced = {"attention": linear_attention}, gpt.Context(order="balanced")
    refused("mlp", r"options.router: got a function; wanted None without", router=switch)
    refused("router", r"options.mlp: .* fix: use router or block", mlp=bilinear)
    refused("mlp", r"options.norm: .* with mtp", replace(CONFIG, mtp_depth=1), norm=mean_norm)
    refused("attention", r"without a parameter window", replace(CONFIG, window=3), **own)
    refused("attention", r"without a parameter segments", data=packed, **own)
    refused("attention", r"order=\"balanced\"", context=balanced, **own)
    forgets = lambda layer, params, x: layer.feed_forward(params, x)[0]
    refused("block of experts", r"options.block: got no auxiliary loss", block=forgets)
    run = program_on("attention", Mesh(cp=4, tp=2))
    with pytest.raises(ValueError, match=r"got 2 heads on each rank; wanted a multiple of the 4"):
        run(dense("attention")[0], batch(), random.key(3))
    with pytest.raises(TypeError, match=r"norm.cached: got a function; wanted None"):
        ModelOptions(norm=Hook(mean_norm, cached=mean_norm))


def test_options_without_a_place_are_refused():
    with pytest.raises(ValueError, match=r"options.watch: got True; .* gpt.loss_and_details"):
        gpt.loss(CONFIG, {}, batch(), ModelOptions(watch=True))


def best_half(layer, params, x):
    """Mixture-of-Depths (Raposo et al. 2024): the better half of the tokens goes through."""
    chosen = x.norm(dim=-1).topk(x.shape[1] // 2, dim=1).indices.sort(1).values
    index = chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    y = layer.norm(params, "mlp_norm", x.gather(1, index))
    return x.scatter_add(1, index, layer.feed_forward(params, y)[0])


def above_median(layer, params, x):
    y, _ = transformer_block(layer, params, x)
    score = x[..., :3].sum(-1, keepdim=True)
    return torch.where(score > score.median(1, keepdim=True).values, y, x)


def shifted(layer, params, x):
    y, _ = transformer_block(layer, params, x)
    return y + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def first_three(layer, params, x):
    y, _ = layer.feed_forward(params, layer.norm(params, "mlp_norm", x[:, :3]))
    return torch.cat([x[:, :3] + y, x[:, 3:]], 1)


def centred(layer, params, x):
    return transformer_block(layer, params, x)[0] - x.mean(1, keepdim=True)


MIXING = [best_half, above_median, shifted, first_three, centred]


def loss_on(mesh, block, **given):
    options = ModelOptions(block=block, **given)
    specs = ft.param_specs(gpt.defs(CONFIG, options), gpt.rules(CONFIG, mesh))
    loss = lambda w, data: gpt.loss(CONFIG, w, data, options)
    return ft.shard_map(loss, mesh, (specs, gpt.batch_specs()), P())


@pytest.mark.parametrize("block", MIXING, ids=lambda block: block.__name__)
def test_blocks_that_mix_tokens_of_a_rank_are_refused(block):
    weights = dense("block")[0]
    loss_on(Mesh(dp=2), block)(weights, batch())  # whole sequences
    for mesh, given in ((Mesh(cp=2), {}), (Mesh(tp=2), {"stream": gpt.SEQUENCE_PARALLEL_STREAM})):
        axis = "'cp'" if mesh["cp"] > 1 else "'tp'"
        run = loss_on(mesh, block, **given)
        with pytest.raises(
            ValueError, match=rf"choose or mix tokens(?s:.*){axis}.*let it take context"
        ):
            run(weights, batch())
        with pytest.raises(ValueError, match="choose or mix tokens"):
            ft.trace(run)(weights, batch())


def ramped(layer, params, x):
    ramp = 1 + 0.1 * torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1)
    return transformer_block(layer, params, x * ramp)[0]


def spread_out(layer, params, x):
    return transformer_block(layer, params, x)[0] + torch.linspace(
        0, 1, x.shape[1], dtype=x.dtype
    ).view(1, -1, 1)


def only_long(layer, params, x):
    return transformer_block(layer, params, x)[0] if x.shape[1] > SEQ // 2 else x


@pytest.mark.parametrize("block", [ramped, spread_out, only_long], ids=lambda b: b.__name__)
def test_blocks_that_go_by_places_of_a_rank_are_refused(block):
    weights = dense("block")[0]
    loss_on(Mesh(dp=2), block)(weights, batch())  # whole sequences
    for mesh, given in ((Mesh(cp=2), {}), (Mesh(tp=2), {"stream": gpt.SEQUENCE_PARALLEL_STREAM})):
        with pytest.raises(ValueError, match=r"place of a token(?s:.*)let it take context"):
            loss_on(mesh, block, **given)(weights, batch())


def test_blocks_that_mix_samples_of_a_rank_are_refused():
    def of_the_batch(layer, params, x):
        return transformer_block(layer, params, x)[0] - x.mean(0, keepdim=True)

    weights = dense("block")[0]
    loss_on(Mesh(tp=2), of_the_batch)(weights, batch())  # whole batches
    for mesh in (Mesh(dp=2), Mesh(dp=2, cp=2)):
        with pytest.raises(ValueError, match=r"mix samples(?s:.*)'dp' split the batch"):
            loss_on(mesh, of_the_batch)(weights, batch())


def loss_with(mesh, options):
    specs = ft.param_specs(gpt.defs(CONFIG), gpt.rules(CONFIG, mesh))
    loss = lambda w, data: gpt.loss(CONFIG, w, data, options)
    run = ft.shard_map(loss, mesh, (specs, gpt.batch_specs()), P())
    return run(dense("block")[0], batch())


@pytest.mark.parametrize("name", ["mlp", "norm"])
@pytest.mark.parametrize(
    ("dim", "what", "split", "whole"), [(1, "tokens", "cp", "dp"), (0, "samples", "dp", "cp")]
)
def test_hooks_of_tokens_that_mix_them_or_samples_are_refused(name, dim, what, split, whole):
    options = ModelOptions(**{name: lambda params, x, **given: x - x.mean(dim, keepdim=True)})
    wanted = loss_with(Mesh(), options)
    got = loss_with(Mesh(**{whole: 2}), options)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match=rf"options.{name}(?s:.*)'{split}' split") as error:
        loss_with(Mesh(**{split: 2}), options)
    assert f"this {name} would choose or mix {what}" in str(error.value)


def test_a_block_with_context_reaches_across_ranks_itself():
    """The mean of whole sequences, whose parts ranks have."""

    def centred_everywhere(layer, params, x, *, context):
        mean = lax.pmean(x.mean(1, keepdim=True), ("cp",))
        return transformer_block(layer, params, x)[0] - mean

    weights = dense("block")[0]
    wanted = loss_on(Mesh(), centred)(weights, batch())
    got = loss_on(Mesh(cp=2), centred_everywhere)(weights, batch())
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)

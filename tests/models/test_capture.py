"""The named values of a decoder: on every mesh those of a transformer that is written out here."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import DATA_AXES, Mesh, P, gpt, tree
from functron.nn.moe import MoEConfig
from functron.pipeline import Partition, gradients, make, pipelined
from functron.pipeline.partition import even_layout

CONFIG = gpt.GPTConfig(
    vocab_size=37, num_layers=4, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, max_seq=8,
    init_stddev=0.3, vocab_multiple=4, dtype="float64",
)  # fmt: skip
BATCH, SEQ = 8, 8
NAMES = ("q", "k", "v", "heads")


def inputs(config=CONFIG):
    tokens = torch.randint(0, 37, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(BATCH)}
    return ft.init_params(ft.random.key(0), gpt.defs(config)), batch


def rotate(x):
    """Rotary positions of Su et al. 2021, dims i and i + half a pair."""
    half = x.shape[-1] // 2
    angles = torch.arange(SEQ)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cos, sin = angles.cos()[:, None].double(), angles.sin()[:, None].double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def norm(w, x):
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * w["scale"]


def written_out(params, tokens):
    """Every value of CONFIG's decoder by its name, in the order of the program."""
    x = params["embed"][tokens]
    found = {"embed/out": x}
    past = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    for i in range(CONFIG.num_layers):
        w = tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        y, own = norm(w["attention_norm"], x), w["attention"]
        q, k, v = (torch.einsum("btd,dhk->bthk", y, own[name]["w"]) for name in "qkv")
        q, k = rotate(q), rotate(k)
        wide_k, wide_v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) / math.sqrt(q.shape[-1])
        heads = scores.masked_fill(~past, -torch.inf).softmax(-1)
        heads = torch.einsum("bhqk,bkhd->bqhd", heads, wide_v)
        out = torch.einsum("bthk,hkd->btd", heads, own["out"]["w"])
        values = zip((*NAMES, "out"), (q, k, v, heads, out), strict=True)
        found |= {f"blocks/{i}/attention/{name}": value for name, value in values}
        x = x + out
        y, own = norm(w["mlp_norm"], x), w["mlp"]
        hidden = torch.nn.functional.silu(y @ own["gate"]["w"]) * (y @ own["up"]["w"])
        out = hidden @ own["down"]["w"]
        x = x + out
        found |= {f"blocks/{i}/mlp/hidden": hidden, f"blocks/{i}/mlp/out": out}
        found[f"blocks/{i}/out"] = x
    x = found["norm/out"] = norm(params["norm"], x)
    found["unembed/out"] = x @ params["unembed"]
    return found


def close(got, wanted):
    assert {*got} == {*wanted}
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-7, msg=name)


def equal(got, wanted):
    assert {*got} == {*wanted}
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-12, atol=1e-12)


def specs_on(mesh, config=CONFIG, options=gpt.ModelOptions()):  # noqa: B008
    fsdp = ("fsdp",) if mesh["fsdp"] > 1 else ()
    return ft.param_specs(gpt.defs(config, options), gpt.rules(config, mesh, fsdp=fsdp))


def forward_on(mesh, config=CONFIG, **given):
    specs = specs_on(mesh, config)
    options = ft.ModelOptions(gather=ft.Gather(specs), **given)
    by_token = P(DATA_AXES, "cp")
    return ft.shard_map(
        lambda w, tokens: gpt.forward(config, w, tokens, options), mesh, (specs, by_token),
        P(DATA_AXES, "cp", "tp"),
    )  # fmt: skip


def test_the_names_are_those_of_a_written_out_transformer():
    """Its rotary tables are computed in float32, as the model's are: 1e-7."""
    params, batch = inputs()
    _, values = ft.capture(lambda w, x: gpt.forward(CONFIG, w, x), "*")(params, batch["tokens"])
    wanted = written_out(params, batch["tokens"])
    close(values, wanted)
    assert [*values] == [*wanted]


MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(fsdp=2, tp=2), Mesh(cp=2, dp=2)]
SEQUENCE_PARALLEL = {"stream": gpt.SEQUENCE_PARALLEL_STREAM}
ROW = {"context": gpt.Context(order="contiguous")}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("remat", ["none", "full", "dots", "selective"])
@pytest.mark.parametrize("stream", [{}, SEQUENCE_PARALLEL], ids=["", "sp"])
@pytest.mark.parametrize("life", ["eager", "traced"])
@pytest.mark.pairwise
def test_values_are_put_together_on_every_mesh(mesh, remat, stream, life):
    params, batch = inputs()
    f = ft.capture(forward_on(mesh, remat=remat, **stream, **ROW), "*")
    f = ft.trace(f)(params, batch["tokens"]) if life == "traced" else f
    logits, values = f(params, batch["tokens"])
    wanted = ft.capture(lambda w, x: gpt.forward(CONFIG, w, x), "*")(params, batch["tokens"])[1]
    equal(values, wanted)
    torch.testing.assert_close(logits, wanted["unembed/out"], rtol=1e-12, atol=1e-12)


MLA = {"kv_rank": 8, "q_rank": 8, "rope_head_dim": 4, "v_head_dim": 4, "num_kv_heads": 0}
EXPERTS = {"moe": MoEConfig(num_experts=4, top_k=2, expert_dim=12), "dense_layers": 1}
KINDS = {"mla": MLA, "experts": EXPERTS, "gated": {"attention_gate": True, "qk_norm": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_has_the_names(kind):
    config = replace(CONFIG, **KINDS[kind])
    params, batch = inputs(config)
    _, values = ft.capture(lambda w, x: gpt.forward(config, w, x), "*")(params, batch["tokens"])
    for name, layers in config.stacks.items():
        inner = "moe" if kind == "experts" and name == "blocks" else "mlp"
        wanted = [f"attention/{x}" for x in (*NAMES, "out")] + [f"{inner}/out", "out"]
        assert all(f"{name}/{i}/{x}" in values for i in range(len(layers)) for x in wanted)
    for mesh in (Mesh(dp=2, tp=2), Mesh(ep=2, tp=2) if config.moe else Mesh(tp=4)):
        equal(ft.capture(forward_on(mesh, config, remat="full"), "*")(params, batch["tokens"])[1],
              values)  # fmt: skip


def step_on(mesh, num_microbatches, schedule="1f1b", remat="none"):
    specs = specs_on(mesh)
    options = ft.ModelOptions(remat=remat, gather=ft.Gather(specs))
    if mesh["pp"] > 1:
        table = make(schedule, mesh["pp"], num_microbatches)
        partition = Partition(even_layout(table.num_stages, 4), table.pipes, gpt.uses(CONFIG))

        def stage(part, params, x, batch, key, total):
            y = gpt.stage_loss(CONFIG, part, params, x, batch, options)
            return y / total if part.loss else y

        g = gradients(pipelined(stage, partition, table), gpt.num_targets, draws=False)
        specs = partition.local(specs, mesh.coordinate["pp"]) if hasattr(mesh, "rank") else specs
    else:
        g = ft.mean_gradients(lambda w, b, key: gpt.loss(CONFIG, w, b, options), gpt.num_targets)
        g = ft.accumulated(g, num_microbatches) if num_microbatches > 1 else g
    sgd = ft.optim.sgd(0.1)
    return ft.make_step(g, sgd, mesh, specs, batch_specs=gpt.batch_specs()), sgd, specs


STEPS = [
    (Mesh(dp=2, tp=2), 1, "", "full"),
    (Mesh(dp=2, tp=2), 2, "", "full"),
    (Mesh(fsdp=2), 2, "", "none"),
    (Mesh(pp=2, tp=2), 2, "1f1b", "full"),
    (Mesh(pp=2, dp=2), 4, "interleaved", "none"),
    (Mesh(pp=2), 4, "zb-h1", "none"),
]


def step_factors(life, **row):
    return [{"row": tuple(row.values())}, {"life": life, "pipeline": bool(row["schedule"])}]


@pytest.mark.pairwise(of=step_factors)
@pytest.mark.parametrize(("mesh", "count", "schedule", "remat"), STEPS, ids=str)
@pytest.mark.parametrize("life", ["eager", "traced"])
def test_a_training_step_gives_the_values_of_every_microbatch_and_stage(
    mesh, count, schedule, remat, life
):
    params, batch = inputs()
    step, sgd, specs = step_on(mesh, count, schedule, remat)
    state = ft.init_state(ft.random.key(1), gpt.defs(CONFIG), specs, sgd, mesh, params)
    after, _ = step(tree.map(torch.clone, state), batch)
    f = ft.capture(step, "blocks/*/*/*")
    f = ft.trace(f)(state, batch) if life == "traced" else f
    (again, _), values = f(tree.map(torch.clone, state), batch)
    equal(*(dict(enumerate(tree.leaves(s.params))) for s in (again, after)))
    wanted = ft.capture(lambda w, x: gpt.forward(CONFIG, w, x), "blocks/*/*/*")(
        params, batch["tokens"]
    )[1]
    ranks = mesh["dp"] * mesh["fsdp"]
    places = torch.arange(BATCH).view(ranks, -1)
    found = {
        f"microbatches/{m}/{name}" if count > 1 else name: value[places[:, m::count].flatten()]
        for m in range(count)
        for name, value in wanted.items()
    }
    equal(values, found)


def test_patching_by_name_is_replacing_the_value():
    """The stream after layer 1 of other tokens makes all that follows that of those tokens."""
    params, batch = inputs()
    other = batch["tokens"].flip(1)

    def forward(w, x):
        return gpt.forward(CONFIG, w, x)

    wanted, there = ft.capture(forward, "blocks/1/out")(params, other)
    put = {"blocks/1/out": lambda value, name: there[name]}
    torch.testing.assert_close(ft.intervene(forward, put)(params, batch["tokens"]), wanted)

    for mesh in MESHES[:3]:

        def patched(w, x, value):
            options = ft.ModelOptions(stream=gpt.SEQUENCE_PARALLEL_STREAM, remat="full")
            inner = functools.partial(gpt.forward, CONFIG, options=options)
            return ft.intervene(inner, {"blocks/1/out": lambda old, name: value})(w, x)

        by, out = P("dp", "tp"), P("dp", None, "tp")
        f = ft.shard_map(patched, mesh, (specs_on(mesh), P("dp"), by), out)
        got = f(params, batch["tokens"], there["blocks/1/out"])
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        got = ft.trace(f)(params, batch["tokens"], there["blocks/1/out"])
        got = got(params, batch["tokens"], there["blocks/1/out"])
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_tokens_in_another_order_are_refused():
    params, batch = inputs()
    with pytest.raises(ValueError, match=r'zigzag.*order="contiguous"'):
        ft.capture(forward_on(Mesh(cp=2)), "blocks/0/out")(params, batch["tokens"])


@pytest.mark.distributed
def test_processes_have_their_parts(torchrun):
    done = torchrun(Path(__file__).with_name("gloo_capture.py"), 4, timeout=120)
    assert "all: ok" in done.stdout


def grown(value, name):
    """The change that the hooks below make, by a name's number."""
    return value * (1 + int(name.split("/")[-3]))


def numbered_attention(q, k, v, *, layer):
    return ft.nn.causal_attention(q, k, v) * (1 + layer)


def numbered_mlp(params, x, *, activation, stream, kernels, layer):
    return ft.nn.mlp(params, x, activation=activation, stream=stream) * (1 + layer)


def numbered_block(layer, weights, x):
    x = x + layer.attention(weights, layer.norm(weights, "attention_norm", x))
    y, _ = layer.feed_forward(weights, layer.norm(weights, "mlp_norm", x))
    return x + y * (1 + layer.index)


HOOKS = {
    "attention": ({"attention": numbered_attention}, "attention/heads"),
    "mlp": ({"mlp": numbered_mlp}, "mlp/out"),
    "block": ({"block": numbered_block}, "mlp/out"),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2), Mesh(pp=2, dp=2)], ids=str)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.pairwise
def test_hooks_are_told_the_number_of_their_layer(hook, mesh, traced):
    params, batch = inputs()
    given, name = HOOKS[hook]

    def dense(w, batch):
        return gpt.loss(CONFIG, w, batch)

    wanted = ft.intervene(torch.func.grad_and_value(dense), {f"blocks/*/{name}": grown})
    grads, value = wanted(params, batch)
    options = ft.ModelOptions(remat="full", **given)
    specs = specs_on(mesh, CONFIG, options)
    table = make("1f1b", 2, 2)
    partition = Partition(even_layout(2, 4), table.pipes, gpt.uses(CONFIG))

    def stage(part, w, x, batch):
        return gpt.stage_loss(CONFIG, part, w, x, batch, options)

    def program(w, batch):
        both = ft.value_and_grad(lambda w, batch: gpt.loss(CONFIG, w, batch, options))
        both = pipelined(stage, partition, table).value_and_grad if mesh["pp"] > 1 else both
        value, grads = both(w, batch)
        return value, ft.sync_gradients(grads, specs)

    stages = "pp" if mesh["pp"] > 1 else None
    f = ft.shard_map(program, mesh, (specs, gpt.batch_specs()), (P(), specs), stages=stages)
    f = ft.trace(f)(params, batch) if traced else f
    got, found = f(params, batch)
    torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)
    for a, b in zip(tree.leaves(found), tree.leaves(grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_numbered_attention_generates():
    params, batch = inputs()

    def cached(q, cache, places, *, layer):
        seen = torch.arange(cache.k.shape[1]) <= places[:, None, :, None]
        k, v = (x.repeat_interleave(2, 2) for x in (cache.k, cache.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
        scores = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", scores, v) * (1 + layer)

    hook = ft.Hook(numbered_attention, cached=cached)
    made = []
    for attention in (hook, numbered_attention):
        options = ft.ModelOptions(attention=attention)
        tokens = ft.generate(
            params, CONFIG, batch["tokens"][:2, :3], 4, temperature=0, options=options
        )
        made.append(tokens)
    assert torch.equal(*made)

"""Tokens with several positions each: against transformers' Qwen2-VL, and on every mesh.

Transformers' rotary tables are float32 where they are not told otherwise; `Float64` tells them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional as F

import functron as ft
from functron import Mesh, P, gpt, nn, random
from functron.models.generation import extend, prefill
from functron.pipeline import Partition, make, pipelined
from functron.pipeline.partition import layout_of
from tests.models.float64_models import (
    Float64,
    assert_leaves_close,
    assert_mapped,
    assert_outputs_close,
    drawn,
    pad,
    stacked,
    tensors,
)
from tests.models.test_composition import BASE, BATCH, SEQ, assert_equal, batch
from tests.models.test_context_composition import CONTEXTS, packed

CONFIG = replace(BASE, num_kv_heads=4, head_dim=8, rope_sections=(1, 2, 1), rope_theta=50.0)
SECTIONS = len(CONFIG.rope_sections)


def positions(rows: int, seq: int) -> torch.Tensor:
    """int64 [rows, seq, 3] as Qwen2-VL makes them: text, an image of 2 x 3 x width, and text.

    Every row has its image at another place; positions of what follows go on from the largest.
    """
    out = []
    for row in range(rows):
        width, before = 2 + row % 2, 1 + row % 5
        image = torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, width))) + before
        text = torch.arange(seq)[:, None].expand(-1, SECTIONS)
        after = text + int(image.max()) + 1
        out.append(torch.cat([text[:before], image, after])[:seq])
    return torch.stack(out)


def placed() -> dict:
    return {**batch(), "positions": positions(BATCH, SEQ)}


# --- transformers

VOCAB, EMBED, HEADS, MLP, LAYERS = 61, 32, 4, 48, 2
QWEN = gpt.GPTConfig(
    vocab_size=VOCAB, num_layers=LAYERS, embed_dim=EMBED, num_heads=HEADS, num_kv_heads=2,
    mlp_dim=MLP, max_seq=64, qkv_bias=True, norm_eps=1e-6, rope_theta=1e3,
    rope_sections=(1, 2, 1), vocab_multiple=8, dtype="float64",
)  # fmt: skip


def qwen() -> torch.nn.Module:
    """Qwen2-VL, of whose tower for images nothing is used."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": QWEN.norm_eps,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": QWEN.rope_theta,
            "mrope_section": list(QWEN.rope_sections),
        },
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": EMBED, "num_heads": 2, "patch_size": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    config.text_config._attn_implementation = config._attn_implementation = "eager"
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen_tree(named: dict, padding: float) -> dict:
    model = "model.language_model."
    rows = []
    for index in range(LAYERS):
        at = f"{model}layers.{index}."
        heads = {
            n: {
                "w": named[f"{at}self_attn.{n}_proj.weight"].T.reshape(EMBED, -1, EMBED // HEADS),
                "b": named[f"{at}self_attn.{n}_proj.bias"].reshape(-1, EMBED // HEADS),
            }
            for n in "qkv"
        }
        out = named[f"{at}self_attn.o_proj.weight"].T.reshape(HEADS, -1, EMBED)
        names = ("gate", "up", "down")
        rows.append(
            {
                "attention_norm": {"scale": named[at + "input_layernorm.weight"]},
                "attention": heads | {"out": {"w": out}},
                "mlp_norm": {"scale": named[at + "post_attention_layernorm.weight"]},
                "mlp": {n: {"w": named[f"{at}mlp.{n}_proj.weight"].T} for n in names},
            }
        )
    missing = QWEN.padded_vocab - VOCAB
    return {
        "embed": pad(named[model + "embed_tokens.weight"], missing, padding),
        "blocks": stacked(rows),
        "norm": {"scale": named[model + "norm.weight"]},
        "unembed": pad(named["lm_head.weight"], missing, padding).T,
    }


def test_qwen2_vl():
    """Logits, loss and all gradients of text whose tokens have three positions each."""
    with Float64():
        model = drawn(qwen)
    named = {n: x for n, x in tensors(model).items() if "visual" not in n}
    weights = qwen_tree(named, 3.0)
    assert_mapped(weights, gpt.defs(QWEN))
    tokens, places = torch.randint(0, VOCAB, (4, 20)), positions(4, 20)
    assert (places[..., 0] != places[..., 1]).any(1).all()
    assert (places[..., 1] != places[..., 2]).any(1).all()
    targets = F.pad(tokens[:, 1:], (0, 1), value=nn.IGNORE_INDEX)
    data = {"tokens": tokens, "targets": targets, "positions": places, "rows": torch.arange(4)}
    with Float64():
        logits = model(input_ids=tokens, position_ids=places.permute(2, 0, 1)).logits
        ours = gpt.forward(QWEN, weights, tokens, positions=places)[..., :VOCAB]
    assert_outputs_close(ours, logits)

    expected = F.cross_entropy(logits.mT, targets)
    with Float64():
        loss = lambda w: gpt.loss(QWEN, w, data) / gpt.num_targets(data)
        value, grads = ft.value_and_grad(loss)(weights)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=0)
    leaves = list(named)
    theirs = torch.autograd.grad(expected, [model.get_parameter(name) for name in leaves])
    assert_leaves_close(grads, qwen_tree(dict(zip(leaves, theirs, strict=True)), 0.0))


# --- meshes


@functools.cache
def dense(config: gpt.GPTConfig):
    """Parameters, batch, key, and the dense loss and gradients."""
    weights, data, key = ft.init_params(random.key(0), gpt.defs(config)), placed(), random.key(7)
    total = (data["targets"] != nn.IGNORE_INDEX).sum()
    loss = functools.partial(gpt.loss, config, batch=data, key=key)
    grads, value = torch.func.grad_and_value(lambda w: loss(w) / total)(weights)
    return weights, data, key, value, grads


@pytest.mark.parametrize(
    ("mesh", "stream", "context"),
    [
        ("dp=2", gpt.STREAM, "ring-zigzag"),
        ("dp=2,tp=2", gpt.SEQUENCE_PARALLEL_STREAM, "ring-zigzag"),
        ("fsdp=2,cp=2,tp=2", gpt.SEQUENCE_PARALLEL_STREAM, "ring-zigzag"),
        ("cp=2", gpt.STREAM, "gather-contiguous"),
        ("cp=2,ulysses=2", gpt.STREAM, "ring-zigzag"),
    ],
)
def test_meshes(mesh, stream, context):
    config, mesh = replace(CONFIG, dropout=0.2), Mesh.parse(mesh)
    weights, data, key, value, grads = dense(config)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))
    options = ft.ModelOptions(stream, gather=ft.Gather(specs), context=CONTEXTS[context])

    def program(weights, data, key):
        total = gpt.num_targets(data)
        loss = lambda w, data: gpt.loss(config, w, data, options, key=key) / total
        value, grads = ft.accumulate(ft.value_and_grad(loss), 2)(weights, data)
        return value, ft.sync_gradients(grads, specs)

    split = gpt.batch_specs(placed=True)
    run = ft.shard_map(program, mesh, (specs, split, P()), (P(), specs))
    assert_equal(*run(weights, data, key), value, grads)


@pytest.mark.parametrize("name", ["1f1b"])
def test_pipelines(name):
    weights, data, key, value, grads = dense(CONFIG)
    mesh, schedule = Mesh(pp=2), make(name, 2, 4)
    layers = (2, 1)

    def stage(part, params, x, batch, key, total):
        y = gpt.stage_loss(CONFIG, part, params, x, batch, key=key)
        return y / total if part.loss else y

    pipeline = pipelined(
        stage, Partition(layout_of(layers), schedule.pipes, gpt.uses(CONFIG)), schedule
    )

    def program(weights, data, key):
        value, grads = pipeline.value_and_grad(weights, data, key, gpt.num_targets(data))
        return value, ft.sync_gradients(grads, P())

    run = ft.shard_map(program, mesh, (P(), P(), P()), P(), stages="pp")
    assert_equal(*run(weights, data, key), value, grads)


def test_generation():
    """With keys that are kept, from prompts with images and of different lengths."""
    weights, data, *_ = dense(CONFIG)
    tokens, places, rows = data["tokens"], data["positions"], torch.arange(BATCH)
    whole = gpt.forward(CONFIG, weights, tokens, positions=places)[..., : CONFIG.vocab_size]
    lengths = 15 + rows % 3
    prompts = {"room": SEQ, "positions": places[:, :17]}
    logits, cache = prefill(CONFIG, weights, tokens[:, :17], lengths, **prompts)
    for ahead in range(7):
        at = lengths + ahead
        torch.testing.assert_close(logits, whole[rows, at - 1], rtol=1e-10, atol=1e-10)
        given = {"positions": places[rows, at]}
        logits, cache = extend(CONFIG, weights, cache, tokens[rows, at], at, **given)
    text = gpt.forward(CONFIG, weights, tokens)[..., : CONFIG.vocab_size]
    assert (text - whole).abs().max() > 0.1


def test_equal_positions_are_one():
    """Positions of text: three that are the same, one each, and none given."""
    weights, data, *_ = dense(CONFIG)
    plain = replace(CONFIG, rope_sections=())
    data = packed({n: data[n] for n in ("tokens", "targets", "rows")})
    want = gpt.loss(plain, weights, data)
    three = {**data, "positions": data["positions"][..., None].expand(-1, -1, SECTIONS)}
    assert torch.equal(gpt.loss(CONFIG, weights, data), want)
    assert torch.equal(gpt.loss(CONFIG, weights, three), want)
    data = {n: data[n] for n in ("tokens", "targets", "rows")}
    assert torch.equal(gpt.loss(CONFIG, weights, data), gpt.loss(plain, weights, data))


def test_positions_that_do_not_fit_are_taught():
    weights, data, *_ = dense(CONFIG)
    plain = replace(CONFIG, rope_sections=())
    with pytest.raises(ValueError, match=r"got \(8, 24, 3\); wanted \(8, 24\).*set rope_sections"):
        gpt.loss(plain, weights, data)
    theirs = {**data, "positions": data["positions"].permute(2, 0, 1)}
    with pytest.raises(ValueError, match=r"got \(3, 8, 24\); .*positions.permute\(1, 2, 0\)"):
        gpt.loss(CONFIG, weights, theirs)
    balanced = gpt.Context(order="balanced")
    with pytest.raises(ValueError, match='balanced"; fix: use order="zigzag"'):
        gpt.loss(CONFIG, weights, data, ft.ModelOptions(context=balanced))

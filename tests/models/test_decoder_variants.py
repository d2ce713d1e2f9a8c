"""Rows of the central table for variants of attention and norms: equal to dense in float64.

That the dense models are the right ones is what tests/hub/test_families.py shows, where they are
families of transformers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, nn
from tests.models.test_composition import BASE, STREAMS, assert_equal, dense, sharded
from tests.models.test_context_composition import CONTEXTS
from tests.models.test_context_composition import dense as dense_documents
from tests.models.test_context_composition import sharded as split_sequences

MODELS = {
    "gemma2": replace(
        BASE, num_kv_heads=4, sublayer_norms="both", score_cap=2.0, logit_cap=3.0, window=5,
        global_every=2, attention_scale=0.7, activation="gelu_tanh", zero_centered_norm=True,
        tied=True, embed_scale=3.0,
    ),
    "gemma3": replace(
        BASE, num_kv_heads=4, sublayer_norms="both", qk_norm=True, window=5, global_every=3,
        local_rope_theta=30.0, rope_scaling=nn.RopeScaling(4.0, kind="linear"),
        attention_scale=0.7, zero_centered_norm=True,
    ),
    "olmo2": replace(
        BASE, num_kv_heads=4, sublayer_norms="after", qk_norm=True, qk_norm_across=True
    ),
    "nemotron": replace(
        BASE, num_kv_heads=4, norm="layer", zero_centered_norm=True, activation="relu2",
        gated=False, rope_fraction=0.5, score_cap=4.0,
    ),
    "gated": replace(BASE, num_kv_heads=4, attention_gate=True, qkv_bias=True, qk_norm=True),
    "smollm3": replace(BASE, num_kv_heads=4, nope_every=2, logit_cap=2.0),
    "olmo": replace(BASE, num_kv_heads=4, norm="bare_layer", qkv_clip=0.9),
    "glm": replace(
        BASE, num_kv_heads=4, head_dim=6, rope_pairs="neighbours", rope_fraction=0.7,
        qkv_bias=True, nope_every=3,
    ),
    "neighbours": replace(
        BASE, num_kv_heads=1, head_dim=6, rope_pairs="neighbours", qk_norm=True,
        norm="bare_layer", sublayer_norms="both", rope_sections=(1, 2),
    ),
    "neox": replace(
        BASE, num_kv_heads=4, norm="layer", parallel_residual=True, gated=False, qkv_bias=True,
        out_bias=True, rope_fraction=0.5, qk_norm=True, qk_norm_kind="layer",
    ),
    "granite": replace(
        BASE, num_kv_heads=4, parallel_residual=True, sublayer_norms="shared", mlp_bias=True,
        residual_scale=0.3, logit_scale=2.5,
        rope_scaling=nn.RopeScaling(kind="longrope", factors=(1.5, 4.0), attention_factor=1.2),
    ),
    "cohere2": replace(
        BASE, num_kv_heads=4, norm="scaled_layer", zero_centered_norm=True, parallel_residual=True,
        sublayer_norms="shared", window=5, global_every=3, nope_every=3, tied=True,
        unembed_bias=True, qk_norm=True, qk_norm_kind="head_layer",
    ),
    "apertus": replace(
        BASE, num_kv_heads=4, norm="scaled_layer", activation="xielu", gated=False, qk_norm=True,
        unembed_bias=True, temperature=0.7, temperature_seq=3,
    ),
    "hunyuan": replace(
        BASE, num_kv_heads=4, qk_norm=True, qk_norm_last=True, temperature=0.3, temperature_seq=2,
        score_cap=4.0,
    ),
}  # fmt: skip
MESHES = [(Mesh(tp=2), "", "none"), (Mesh(dp=2, tp=8), "sequence-parallel", "full")]
LONG = [
    (Mesh(cp=2, tp=2), "ring-zigzag"),
    (Mesh(ulysses=2, cp=2), "gather-contiguous"),
    (Mesh(fsdp=2, ulysses=2), "ring-contiguous"),
]


@pytest.mark.pairwise(of=lambda name, mesh, stream, remat: [{"name": name}, {"mesh": mesh}])
@pytest.mark.parametrize(("mesh", "stream", "remat"), MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_composition(name, mesh, stream, remat):
    config = replace(MODELS[name], dropout=0.3)
    *inputs, value, grads = dense(config)
    got = sharded(config, mesh, STREAMS[stream], remat, 1)(*inputs)
    assert_equal(*got, value, grads)


def factors(name, mesh, context):
    """Each variant, and on each mesh one with windows and one without."""
    return [{"name": name}, {"mesh": mesh, "window": MODELS[name].window > 0}]


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize(("mesh", "context"), LONG, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_sequences_that_are_split(name, mesh, context):
    config = MODELS[name]
    *inputs, value, grads = dense_documents(config, False)
    run = split_sequences(config, mesh, gpt.STREAM, CONTEXTS[context])
    assert_equal(*run(*inputs), value, grads)


@pytest.mark.parametrize("name", ["gemma2", pytest.param("gemma3", marks=pytest.mark.full)])
def test_packed_documents(name):
    config = MODELS[name]
    *inputs, value, grads = dense_documents(config, True)
    run = split_sequences(config, Mesh(cp=2), gpt.STREAM, CONTEXTS["ring-zigzag"], documents=True)
    assert_equal(*run(*inputs), value, grads)


def test_capped_scores_are_the_formula():
    """Attention and its gradients against softmax(cap tanh(s / cap)) as it is written."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 9, 4, 6), (2, 9, 2, 6), (2, 9, 2, 6)]
    q, k, v = (torch.randn(*s, generator=generator, dtype=torch.float64) * 3 for s in shapes)

    def written(q, k, v):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 6**0.5
        s = 2.5 * torch.tanh(s / 2.5)
        distance = torch.arange(9)[:, None] - torch.arange(9)
        s = s.masked_fill((distance < 0) | (distance >= 4), float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    def ours(q, k, v):
        return nn.context_attention(q, k, v, window=4, cap=2.5)

    got, want = (torch.func.vjp(f, q, k, v) for f in (ours, written))
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(want[0].shape, generator=generator, dtype=torch.float64)
    for one, two in zip(got[1](cotangent), want[1](cotangent), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


def test_gates_multiply_what_heads_say():
    """One layer of one head: softmax(q k^T / sqrt(d)) v sigmoid(x W_gate) W_out, as written."""
    config = nn.AttentionConfig(embed_dim=6, num_heads=1, head_dim=4, attention_gate=True)
    defs = nn.attention_defs(config, stddev=0.5, out_stddev=0.5, dtype=torch.float64)
    params = ft.init_params(ft.random.key(3), defs)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = nn.self_attention(params, x, config, rope=None, stream=gpt.STREAM)
    q, k, v, gate = (x @ params[name]["w"][:, 0] for name in ("q", "k", "v", "gate"))
    hidden = torch.ones(5, 5).triu(1).bool()
    p = (q @ k.mT / 2).masked_fill(hidden, float("-inf")).softmax(-1)
    want = (p @ v / (1 + (-gate).exp())) @ params["out"]["w"][0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_capped_logits_cannot_be_made_in_chunks():
    config = MODELS["gemma2"]
    weights, data, *_ = dense(config)
    with pytest.raises(ValueError, match="loss_chunk_tokens: got 4 with logit_cap"):
        gpt.loss(config, weights, data, ft.ModelOptions(loss_chunk_tokens=4))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2)], ids=str)
def test_a_bias_on_logits_that_are_made_in_chunks(mesh):
    config = replace(MODELS["apertus"], temperature=0.0, z_loss=1e-2)
    weights, data, *_ = dense(config)
    weights["unembed_bias"] = torch.linspace(-1, 1, config.padded_vocab, dtype=torch.float64)
    specs = ft.param_specs(gpt.defs(config), gpt.rules(config, mesh))

    def run(chunk):
        def program(weights, data):
            options = ft.ModelOptions(loss_chunk_tokens=chunk)
            value, grads = ft.value_and_grad(lambda w: gpt.loss(config, w, data, options))(weights)
            return value, ft.sync_gradients(grads, specs)

        return ft.shard_map(program, mesh, (specs, ft.P(ft.DATA_AXES)), (ft.P(), specs))

    assert_equal(*run(4)(weights, data), *run(0)(weights, data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_cap": -1.0}, "score_cap: got -1.0"),
        ({"local_rope_theta": 1e4}, "local_rope_theta: got 10000.0 without a window"),
        ({"rope_fraction": 1.5}, "rope_fraction: got 1.5"),
        ({"rope_fraction": 0.75}, "head_dim: got 3 rotated dims"),
        ({"nope_every": 2, "positions": "none"}, "nope_every: got 2"),
        ({"qk_norm_across": True}, "qk_norm_across: got True without qk_norm"),
        ({"qkv_clip": -1.0}, "qkv_clip: got -1.0; wanted at least 0"),
        ({"norm": "bare_layer", "zero_centered_norm": True}, "zero_centered_norm: got True of"),
        ({"rope_pairs": "neighbours", "positions": "none"}, "rope_pairs: got neighbours; wanted"),
        ({"rope_sections": (1, 2)}, r"rope_sections: got \(1, 2\); .* sum to the 2 rotated pairs"),
        ({"rope_sections": (2,)}, r"rope_sections: got \(2,\); wanted two numbers or more"),
        ({"rope_sections": (2, 0)}, r"rope_sections: got \(2, 0\)"),
        ({"rope_sections": (1, 1), "positions": "learned"}, r"rope_sections: got \(1, 1\); wanted"),
        ({"sublayer_norms": "shared"}, "sublayer_norms: got 'shared' with parallel_residual=False"),
        ({"parallel_residual": True, "sublayer_norms": "both"}, "sublayer_norms: got 'both' with"),
        ({"residual_scale": 0.0}, "residual_scale: got 0.0; wanted a positive number"),
        (
            {"rope_scaling": nn.RopeScaling(kind="longrope", factors=(1.0,))},
            "factors: got 1 of them",
        ),
        (
            {"rope_scaling": nn.RopeScaling(factors=(1.0, 2.0))},
            "factors: got 2 of them; wanted none",
        ),
        ({"qk_norm_last": True}, "qk_norm_last: got True without qk_norm"),
        ({"qk_norm_kind": "layer"}, "qk_norm_kind: got 'layer' with qk_norm=False"),
        ({"activation": "xielu"}, "activation: got 'xielu' with a gate or experts"),
        ({"temperature": -1.0}, "temperature: got -1.0; wanted at least 0"),
        ({"temperature": 0.1, "temperature_seq": 0}, "temperature_seq: got 0; wanted at least 1"),
        ({"temperature": 0.1, "rope_sections": (1, 1)}, "temperature: got 0.1; wanted 0 where"),
        ({"latent_eps": 1e-5}, "latent_eps: got 1e-05; wanted 0 without kv_rank"),
    ],
)
def test_impossible_variants_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


VARIANTS = {
    "olmo2": replace(MODELS["olmo2"], score_cap=3.0, nope_every=2),
    "neighbours": replace(MODELS["neighbours"], qkv_clip=0.9),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_traced_programs_are_right_and_replicated(name):
    config = VARIANTS[name]
    *inputs, value, grads = dense(config)
    program = ft.trace(sharded(config, Mesh(dp=2, tp=2), STREAMS[""], "none", 1))(*inputs)
    program.check()
    assert_equal(*program(*inputs), value, grads)

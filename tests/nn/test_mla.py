"""Latent attention against a loop over heads and queries, and against transformers' DeepSeek-V3."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

import functron as ft
from functron import DATA_AXES, Mesh, P, nn
from functron.nn.attention import causal_attention
from functron.nn.context import context_attention
from functron.nn.mla import Latents, MLAConfig, mla, mla_absorbed, mla_cache, mla_defs

BATCH, SEQ, EMBED, HEADS, NOPE, ROPE, V = 4, 8, 6, 8, 3, 4, 5
CONFIG = MLAConfig(
    embed_dim=EMBED, num_heads=HEADS, q_rank=7, kv_rank=9, head_dim=NOPE, rope_head_dim=ROPE,
    v_head_dim=V, norm_eps=1e-3,
)  # fmt: skip
SHARPER = nn.RopeScaling(factor=math.exp(10), kind="yarn", mscale_all_dim=math.sqrt(1.7) - 1)
CONFIGS = {
    "": CONFIG,
    "biases": replace(CONFIG, bias=True, rope_scaling=SHARPER),
    "no query latent": replace(CONFIG, q_rank=0, rope_interleaved=False),
    "wide values": replace(CONFIG, v_head_dim=10, head_dim=2),
}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


def rotary(seq=SEQ, rows=None):
    """Tables in float64 that are not rounded, so that both sides can be compared to 1e-10."""
    shape = (seq,) if rows is None else (rows, seq)
    positions = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) % 5 * 1.3
    angles = positions[..., None] * torch.tensor([1.0, 0.3])
    return angles.cos(), angles.sin()


def formula(c, rope):
    """Equations 9 to 19 of the DeepSeek-V2 paper: head by head and query by query."""
    cos, sin = (part if part.dim() == 3 else part[None] for part in rope)

    def project(params, x):
        return x @ params["w"].flatten(1) + params.get("b", 0)

    def normalise(params, x):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * params["scale"]

    def rotate(x):
        pairs = x.unflatten(-1, (-1, 2)) if c.rope_interleaved else x.unflatten(-1, (2, -1)).mT
        z = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos, sin)
        return torch.cat([z.real, z.imag], -1)

    def dense(params, x):
        latent, shared = project(params["kv_down"], x).split([c.kv_rank, c.rope_head_dim], -1)
        latent, shared = normalise(params["kv_norm"], latent), rotate(shared)
        ahead, w_q = x, params["q" if c.q_rank == 0 else "q_up"]["w"]
        if c.q_rank:
            ahead = normalise(params["q_norm"], project(params["q_down"], x))
        total = 0
        for head in range(c.num_heads):
            q_nope, q_rope = (ahead @ w_q[:, head]).split([c.head_size, c.rope_head_dim], -1)
            q = torch.cat([q_nope, rotate(q_rope)], -1)
            up = latent @ params["kv_up"]["w"][:, head]
            k = torch.cat([up[..., : c.head_size], shared], -1)
            v = up[..., c.head_size :]
            rows = []
            for t in range(x.shape[1]):
                scores = (k[:, : t + 1] * q[:, t : t + 1]).sum(-1)
                scores = scores * c.softmax_factor / math.sqrt(q.shape[-1])
                rows.append((torch.softmax(scores, -1).unsqueeze(-1) * v[:, : t + 1]).sum(1))
            total = total + torch.stack(rows, 1) @ params["out"]["w"][head]
        return total + params["out"].get("b", 0)

    return dense


def drawn(draw, c):
    return draw(mla_defs(c, stddev=1.0, out_stddev=1.0, dtype=torch.float64))


@pytest.fixture
def check(agrees, draw, specs, randn):
    def run(c, mesh, stream, rope):
        defs = mla_defs(c, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
        tables = tuple(part.unsqueeze(0) if part.dim() == 2 else part for part in rope)
        at = P() if tables[0].shape[0] == 1 else P(DATA_AXES)

        def layer(params, x, *rope):
            return mla(params, x, c, rope=rope, stream=stream)

        def dense(params, x, *rope):
            return formula(c, rope)(params, x)

        args = (draw(defs), randn(BATCH, SEQ, EMBED))
        agrees(layer, dense, args, mesh, (specs(defs), stream), stream, tables, (at, at))

    return run


@pytest.mark.pairwise
@KINDS
def test_every_gradient(check, mesh, stream, kind):
    check(CONFIGS[kind], mesh, stream, rotary())


def test_packed_documents_have_positions_of_their_own(check, mesh, stream):
    check(CONFIG, mesh, stream, rotary(rows=BATCH))


def test_eight_ranks(check, stream):
    check(CONFIG, Mesh(tp=8), stream, rotary())


def test_splitting_the_sequence_gathers_latents_alone(draw, specs, randn):
    """Not the stream: what is gathered is 7 + 9 + 4 wide."""
    stream, mesh = P(DATA_AXES, "tp"), Mesh(tp=2)
    defs = mla_defs(CONFIG, stddev=1.0, out_stddev=1.0, dtype=torch.float64)

    def layer(params, x):
        return mla(params, x, CONFIG, rope=rotary(), stream=stream)

    mapped = ft.shard_map(layer, mesh, (specs(defs), stream), stream)
    program = ft.trace(mapped)(drawn(draw, CONFIG), randn(BATCH, SEQ, EMBED))
    sent = {row.op: row.sent_bytes for row in program.cost().collectives}
    assert sent == {
        "all_gather": 8 * BATCH * SEQ // 2 * 20,
        "psum_scatter": 8 * BATCH * SEQ // 2 * EMBED,
    }


@KINDS
def test_another_core_is_called_with_whole_heads(draw, randn, kind):
    c, seen = CONFIGS[kind], []

    def core(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return causal_attention(q, k, v)

    params, x = drawn(draw, c), randn(BATCH, SEQ, EMBED)
    how = {"rope": rotary(), "stream": P(DATA_AXES)}
    assert torch.equal(mla(params, x, c, core=core, **how), mla(params, x, c, **how))
    width = (BATCH, SEQ, HEADS, c.head_size + c.rope_head_dim)
    assert seen == [(width, width, (BATCH, SEQ, HEADS, c.v_head_dim))]


# --- long contexts


@pytest.mark.pairwise
@pytest.mark.parametrize("split", [("cp", "ulysses"), ("cp", "ulysses", "tp")], ids=["", "sp"])
@pytest.mark.parametrize("mesh", ["cp=2", "ulysses=4", "cp=2,ulysses=2,tp=2", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_sequences_over_ranks(agrees, draw, specs, randn, mesh, split, kind):
    """Keys, wider than values, go round; positions come with the tokens."""
    stream, mesh = P(DATA_AXES, split), Mesh.parse(mesh)
    defs = mla_defs(CONFIG, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    tables = tuple(part.unsqueeze(0) for part in rotary())

    def layer(params, x, *rope):
        core = functools.partial(context_attention, kind=kind)
        return mla(params, x, CONFIG, rope=rope, stream=stream, core=core)

    def dense(params, x, *rope):
        return formula(CONFIG, rope)(params, x)

    args = (draw(defs), randn(BATCH, SEQ, EMBED))
    whole = P(None, ("cp", "ulysses"))
    agrees(layer, dense, args, mesh, (specs(defs), stream), stream, tables, (whole, whole))


# --- absorbed


@pytest.mark.pairwise
@KINDS
def test_absorbed_is_the_same(agrees, draw, specs, randn, mesh, stream, kind):
    """Values, and gradients through the cache too."""
    c, rope = CONFIGS[kind], rotary()
    defs = mla_defs(c, stddev=1.0, out_stddev=1.0, dtype=torch.float64)

    def layer(params, x):
        cache = mla_cache(params, x, c, rope=rope, stream=stream)
        assert cache.c.shape[1:] == (SEQ, c.kv_rank)
        return mla_absorbed(params, x, cache, c, rope=rope, stream=stream)

    args = (draw(defs), randn(BATCH, SEQ, EMBED))
    agrees(layer, formula(c, rope), args, mesh, (specs(defs), stream), stream)


def test_token_by_token(draw, randn):
    """From a cache that grows: what the whole sequence gives at once."""
    params, x, how = drawn(draw, CONFIG), randn(BATCH, SEQ, EMBED), {"stream": P(DATA_AXES)}
    rope = rotary()
    whole = mla(params, x, CONFIG, rope=rope, **how)
    cache = Latents(x.new_zeros(BATCH, 0, 9), x.new_zeros(BATCH, 0, ROPE))
    for begin, end in ((0, 3), (3, 4), (4, 6), (6, 8)):
        here = {"rope": tuple(part[begin:end] for part in rope), **how}
        new = mla_cache(params, x[:, begin:end], CONFIG, **here)
        cache = Latents(*(torch.cat(pair, 1) for pair in zip(cache, new, strict=True)))
        got = mla_absorbed(params, x[:, begin:end], cache, CONFIG, **here)
        torch.testing.assert_close(got, whole[:, begin:end], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [None, BATCH])
def test_what_is_visible(draw, randn, rows):
    """Two documents in one sample: each as if alone."""
    params, x, how = drawn(draw, CONFIG), randn(BATCH, SEQ, EMBED), {"stream": P(DATA_AXES)}
    rope, segments = rotary(rows=rows), torch.tensor([0] * 5 + [1] * 3)
    visible = segments[:, None] == segments
    visible = visible & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    visible = visible if rows is None else visible.expand(rows, SEQ, SEQ)
    cache = mla_cache(params, x, CONFIG, rope=rope, **how)
    got = mla_absorbed(params, x, cache, CONFIG, rope=rope, visible=visible, **how)
    for part in (slice(0, 5), slice(5, 8)):
        alone = tuple(table[..., part, :] for table in rope)
        want = mla(params, x[:, part], CONFIG, rope=alone, **how)
        torch.testing.assert_close(got[:, part], want, rtol=1e-12, atol=1e-12)


# --- transformers

YARN = nn.RopeScaling(
    factor=40.0, original_max_seq=16, kind="yarn", mscale=1.0, mscale_all_dim=1.0, beta_fast=4.0
)


def hugging_face(c: MLAConfig, scaling: nn.RopeScaling | None) -> deepseek.DeepseekV3Config:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    if scaling is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_seq,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return transformers.DeepseekV3Config(
        hidden_size=c.embed_dim,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_heads,
        q_lora_rank=c.q_rank or None,
        kv_lora_rank=c.kv_rank,
        qk_nope_head_dim=c.head_size,
        qk_rope_head_dim=c.rope_head_dim,
        v_head_dim=c.v_head_dim,
        head_dim=c.rope_head_dim,
        attention_bias=c.bias,
        rope_interleave=c.rope_interleaved,
        rope_parameters=rope,
        max_position_embeddings=640,
        attn_implementation="eager",
    )


def copied(params: dict, module: torch.nn.Module) -> dict:
    """Our parameters by the module's names: matrices transposed, dims of heads flattened."""
    names = {
        "q_proj": "q", "q_a_proj": "q_down", "q_b_proj": "q_up", "kv_a_proj_with_mqa": "kv_down",
        "kv_b_proj": "kv_up", "o_proj": "out", "q_a_layernorm": "q_norm", "kv_a_layernorm": "kv_norm",
    }  # fmt: skip
    out = {}
    for name, _ in module.named_parameters():
        layer, kind = name.split(".")
        entry = params[names[layer]]
        if "scale" in entry:
            out[name] = entry["scale"]
        elif kind == "bias":
            out[name] = entry["b"]
        else:
            w = entry["w"].flatten(0, -2) if layer == "o_proj" else entry["w"].flatten(1)
            out[name] = w.mT
    return out


@pytest.mark.pairwise
@pytest.mark.parametrize("scaling", [None, YARN, replace(YARN, mscale=0.707)])
@pytest.mark.parametrize("q_rank", [0, 7])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_transformers(draw, randn, scaling, q_rank, interleaved, bias):
    """Values and gradients; norms, softmax and tables are in float32 there."""
    c = MLAConfig(
        embed_dim=16, num_heads=4, q_rank=q_rank, kv_rank=9, head_dim=6, rope_head_dim=4,
        v_head_dim=5, bias=bias, rope_interleaved=interleaved, rope_scaling=scaling,
    )  # fmt: skip
    settings = hugging_face(c, scaling)
    module = deepseek.DeepseekV3Attention(settings, 0).double()
    params, x, cotangent = drawn(draw, c), randn(2, 12, 16), randn(2, 12, 16)
    positions = torch.arange(12) * 7
    tables = deepseek.DeepseekV3RotaryEmbedding(settings)(x, positions[None])
    mask = torch.full((12, 12), float("-inf"), dtype=torch.float64).triu(1)[None, None]

    def theirs(params, x):
        given = (x, tables, mask)
        return torch.func.functional_call(module, copied(params, module), given)[0]

    rope = nn.rope_table(positions, 4, 100.0, scaling, torch.float64)

    def ours(params, x):
        return mla(params, x, c, rope=rope, stream=P(DATA_AXES))

    want, pull, *_ = torch.func.vjp(theirs, params, x)
    got, our_pull, *_ = torch.func.vjp(ours, params, x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    rows = zip(
        *(ft.tree.leaves(value) for value in (our_pull(cotangent), pull(cotangent))), strict=True
    )
    for a, b in rows:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


# --- the rest


def test_defs():
    def shapes(c):
        defs = mla_defs(c, stddev=0.1, out_stddev=0.05, dtype=torch.float32)
        rows = zip(ft.tree.paths(defs), ft.tree.leaves(defs), strict=True)
        return {path: (leaf.shape, leaf.axes) for path, leaf in rows}

    whole = shapes(CONFIGS["biases"])
    assert whole == {
        "kv_down/w": ((6, 13), ("embed", None)),
        "kv_down/b": ((13,), (None,)),
        "kv_norm/scale": ((9,), (None,)),
        "kv_up/w": ((9, 8, 8), ("latent", "heads", None)),
        "out/w": ((8, 5, 6), ("heads", None, "embed")),
        "out/b": ((6,), ("embed",)),
        "q_down/w": ((6, 7), ("embed", None)),
        "q_down/b": ((7,), (None,)),
        "q_norm/scale": ((7,), (None,)),
        "q_up/w": ((7, 8, 7), ("latent", "heads", None)),
    }
    direct = shapes(CONFIGS["no query latent"])
    assert direct.keys() == {"q/w", "kv_down/w", "kv_norm/scale", "kv_up/w", "out/w"}
    assert direct["q/w"] == ((6, 8, 7), ("embed", "heads", None))


def test_padding_of_widths(randn):
    for width, v_dim in ((6, 4), (4, 6), (5, 5)):
        q, k = randn(2, 2, 7, 3, width)
        v = randn(2, 7, 3, v_dim)
        got = causal_attention(q, k, v)
        want = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        )
        torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_wrong_shapes_are_taught():
    with pytest.raises(ValueError, match="invalid latent attention") as caught:
        MLAConfig(
            embed_dim=8, num_heads=0, q_rank=-1, kv_rank=4, head_dim=4, rope_head_dim=3,
            v_head_dim=4, rope_scaling=replace(SHARPER, mscale_all_dim=-1.0),
        )  # fmt: skip
    for text in (
        "num_heads: got 0; wanted at least 1",
        "q_rank: got -1; wanted at least 0",
        "rope_head_dim: got 3; wanted pairs",
        "rope_scaling: got a factor of scores of 0.0; wanted a positive",
    ):
        assert text in str(caught.value)

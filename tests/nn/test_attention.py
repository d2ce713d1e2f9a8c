"""Tensor-parallel self-attention against a loop over heads and queries."""

from __future__ import annotations

import math

import pytest
import torch

import functron as ft
from functron import Mesh, nn
from tests.nn.conftest import apart

BATCH, SEQ, EMBED, HEAD_DIM = 4, 8, 6, 4
KV_HEADS = pytest.mark.parametrize("kv_heads", [8, 4], ids=["mha", "gqa"])


def config(kv_heads, heads=8, **options):
    return nn.AttentionConfig(
        embed_dim=EMBED, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM, **options
    )


def rotary():
    """Tables in float64 that are not rounded, so that both sides can be compared to 1e-10."""
    angles = torch.arange(SEQ, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3])
    return angles.cos(), angles.sin()


def formula(c, rope):
    """Attention head by head and query by query; heads of keys are shared by consecutive queries."""

    def project(params, x, head):
        y = x @ params["w"][:, head]
        return y + params["b"][head] if "b" in params else y

    def normalise(params, x):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * params["scale"]

    def rotate(x):
        if rope is None:
            return x
        z = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]) * torch.complex(*rope)
        return torch.cat([z.real, z.imag], -1)

    def dense(params, x):
        total = torch.zeros_like(x)
        for head in range(c.num_heads):
            shared = head // (c.num_heads // c.num_kv_heads)
            q = project(params["q"], x, head)
            k = project(params["k"], x, shared)
            v = project(params["v"], x, shared)
            if c.qk_norm:
                q, k = normalise(params["q_norm"], q), normalise(params["k_norm"], k)
            q, k = rotate(q), rotate(k)
            rows = []
            for t in range(SEQ):
                scores = (k[:, : t + 1] * q[:, t : t + 1]).sum(-1) / math.sqrt(HEAD_DIM)
                weights = torch.softmax(scores, -1)
                rows.append((weights.unsqueeze(-1) * v[:, : t + 1]).sum(1))
            total = total + torch.stack(rows, 1) @ params["out"]["w"][head]
        return total + params["out"]["b"] if "b" in params["out"] else total

    return dense


@pytest.fixture
def check(agrees, draw, specs, randn):
    def run(c, mesh, stream, rope=None, **rules):
        defs = nn.attention_defs(c, stddev=1.0, out_stddev=1.0, dtype=torch.float64)

        def layer(params, x):
            return nn.self_attention(params, x, c, rope=rope, stream=stream)

        def dense(params, x):
            return formula(c, rope)(apart(params, c.num_heads // c.num_kv_heads), x)

        args = (draw(defs), randn(BATCH, SEQ, EMBED))
        agrees(layer, dense, args, mesh, (specs(defs, **rules), stream), stream)

    return run


@pytest.mark.pairwise
@KV_HEADS
def test_plain(check, mesh, stream, kv_heads):
    check(config(kv_heads), mesh, stream)


@pytest.mark.pairwise
@KV_HEADS
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_rope_biases_and_qk_norm(check, mesh, stream, kv_heads, fused):
    c = config(kv_heads, bias=True, qk_norm=True, norm_eps=1e-3, fused_projections=fused)
    check(c, mesh, stream, rotary())


def factors(mesh, **rest):
    """None of what is skipped."""
    skipped = rest["kv_heads"] == 2 and Mesh.parse(mesh)["tp"] == 2
    return [] if skipped else {"mesh": mesh, **rest}


@pytest.mark.pairwise(of=factors)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_than_ranks(check, mesh, stream, kv_heads):
    if kv_heads == 2 and mesh["tp"] == 2:
        pytest.skip("covered where heads divide")
    c = config(kv_heads, qkv_bias=True)
    check(c, mesh, stream, rotary(), kv_heads=None)


def test_eight_ranks(check, stream):
    check(config(8, qk_norm=True), Mesh(tp=8), stream, rotary())
    check(config(2), Mesh(tp=8), stream, rotary(), kv_heads=None)


def test_the_future_does_not_matter(draw, randn):
    c = config(4)
    params = draw(nn.attention_defs(c, stddev=1.0, out_stddev=1.0, dtype=torch.float64))
    x = randn(BATCH, SEQ, EMBED)

    def run(x):
        return nn.self_attention(params, x, c, rope=rotary(), stream=ft.P(ft.DATA_AXES))

    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(run(x)[:, :5], run(changed)[:, :5])
    assert not torch.allclose(run(x)[:, 5:], run(changed)[:, 5:])


def test_shared_key_heads_are_neither_copied_nor_kept():
    # the numbers of keys that are expanded, to the last bit, in the memory of those that are not
    sizes = ((6, 8), (2, 8), (2, 8))
    operands = [torch.randn(2, 70, *size, dtype=torch.bfloat16).requires_grad_() for size in sizes]
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = nn.causal_attention(*operands)
    tensors = (*operands, y)
    assert sum(kept.values()) == sum(2 * x.numel() for x in tensors) + 4 * 2 * 70 * 6
    q, *shared = operands
    each = (x.unsqueeze(3).expand(-1, -1, -1, 3, -1).flatten(2, 3) for x in shared)
    wide = [x.transpose(1, 2) for x in (q, *each)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True).transpose(1, 2)
    assert torch.equal(y, want)
    cotangent = torch.randn_like(y)
    gradients = [torch.autograd.grad(out, operands, cotangent) for out in (y, want)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_defs():
    c = config(2, bias=True, qk_norm=True)
    defs = nn.attention_defs(c, stddev=0.1, out_stddev=0.05, dtype=torch.float32)
    shapes = {
        path: leaf.shape
        for path, leaf in zip(ft.tree.paths(defs), ft.tree.leaves(defs), strict=True)
    }
    assert shapes == {
        "q/w": (EMBED, 8, HEAD_DIM),
        "q/b": (8, HEAD_DIM),
        "k/w": (EMBED, 2, HEAD_DIM),
        "k/b": (2, HEAD_DIM),
        "v/w": (EMBED, 2, HEAD_DIM),
        "v/b": (2, HEAD_DIM),
        "out/w": (8, HEAD_DIM, EMBED),
        "out/b": (EMBED,),
        "q_norm/scale": (HEAD_DIM,),
        "k_norm/scale": (HEAD_DIM,),
    }
    assert defs["q"]["w"].init.stddev == 0.1
    assert defs["out"]["w"].init.stddev == 0.05


def test_gradients_of_shared_key_heads_survive_compilation():
    # Inductor miscompiled the index by which ranks took their key head: the loss was right
    c = nn.AttentionConfig(embed_dim=4, num_heads=4, num_kv_heads=2, head_dim=2)
    defs = nn.attention_defs(c, stddev=0.3, out_stddev=0.3, dtype=torch.float64)
    params = ft.init_params(ft.random.key(0), defs)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    mesh, specs = Mesh(dp=2, tp=4), ft.param_specs(defs, ft.Rules({"heads": "tp"}))

    def squared(params, x):
        y = nn.self_attention(params, x, c, rope=None, stream=ft.P(ft.DATA_AXES))
        return ft.lax.psum(y.square().sum(), ft.DATA_AXES)

    def program(params, x):
        return ft.sync_gradients(ft.value_and_grad(squared)(params, x)[1], specs)

    mapped = ft.shard_map(program, mesh, (specs, ft.P(ft.DATA_AXES)), specs)
    want = torch.func.grad(squared)(params, x)
    got = ft.jit(mapped)(params, x)
    for a, b in zip(ft.tree.leaves(got), ft.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

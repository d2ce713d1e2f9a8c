"""Masked, biased and cross attention against a loop over heads and queries; T5's buckets by hand."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from functron import Mesh, P, nn
from functron.apps.zoo.layers import (
    cross_attention,
    masked_attention,
    relative_bias,
    relative_buckets,
)

BATCH, SEQ, KEYS, EMBED, HEADS, HEAD_DIM = 4, 8, 6, 6, 8, 4
CONFIG = nn.AttentionConfig(embed_dim=EMBED, num_heads=HEADS, head_dim=HEAD_DIM, bias=True)


def slow(q, k, v, *, seen=None, bias=None, causal=False, scale=None):
    """Query by query, over the keys that it sees."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = torch.zeros_like(q)
    rows = []
    for i in range(q.shape[0]):
        mine = [t for t in range(k.shape[1]) if seen is None or seen[i % len(seen), t]]
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                keys = [s for s in mine if not causal or s <= t]
                if not keys:
                    rows.append(0 * q[i, t, h])
                    continue
                scores = scale * (k[i, keys, h] @ q[i, t, h])
                scores = scores if bias is None else scores + bias[h, t, keys]
                rows.append(torch.softmax(scores, 0) @ v[i, keys, h])
    return torch.stack(rows).reshape(q.shape[0], q.shape[2], *out.shape[1::2]).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", ["", "rows", "one"])
@pytest.mark.parametrize("biased", [False, True])
def test_masked_attention(randn, causal, padded, biased):
    q, k, v = randn(2, 5, 3, 4), randn(2, 5, 3, 4), randn(2, 5, 3, 4)
    seen = None
    if padded:
        seen = torch.ones(2 if padded == "rows" else 1, 5, dtype=torch.bool)
        seen[0, 3:] = False
        seen[-1, 0] = False  # causally, its first query sees nothing
    bias = randn(3, 5, 5) if biased else None
    how = {"seen": seen, "causal": causal, "scale": 0.7 if biased else None}
    moving = (q, k, v, bias) if biased else (q, k, v)

    def run(f, *moving):
        return f(*moving[:3], bias=moving[3] if biased else None, **how)

    want, pull = torch.func.vjp(functools.partial(run, slow), *moving)
    got, own = torch.func.vjp(functools.partial(run, masked_attention), *moving)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    cotangent = torch.cos(want)
    torch.testing.assert_close(own(cotangent), pull(cotangent), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2, tp=2), Mesh(tp=4)], ids=str)
def test_cross_attention(agrees, draw, specs, randn, mesh, stream):
    defs = nn.attention_defs(CONFIG, stddev=1.0, out_stddev=1.0, dtype=torch.float64)
    args = (draw(defs), randn(BATCH, SEQ, EMBED), randn(BATCH, KEYS, EMBED))

    def layer(params, x, memory):
        return cross_attention(params, x, memory, CONFIG, stream=stream)

    def dense(params, x, memory):
        q, k, v = (
            torch.einsum("btd,dhe->bthe", y, params[n]["w"]) + params[n]["b"]
            for n, y in (("q", x), ("k", memory), ("v", memory))
        )
        y = torch.einsum("bthe,hed->btd", slow(q, k, v), params["out"]["w"])
        return y + params["out"]["b"]

    agrees(layer, dense, args, mesh, (specs(defs), stream, P(*stream[:1])), stream)


def test_buckets_by_hand():
    """Eight buckets up to distance 16: 0 and 1 alone, then ranges from 2 and, as 2 sqrt(8), 6."""
    buckets = relative_buckets(1, 20, num_buckets=8, max_distance=16, bidirectional=True)
    assert buckets[0].tolist() == [0, 5] + [6] * 4 + [7] * 14
    buckets = relative_buckets(20, 1, num_buckets=8, max_distance=16, bidirectional=True)
    assert buckets[:, 0].tolist() == [0, 1] + [2] * 4 + [3] * 14
    # one direction: 0 to 3 alone, then ranges from 4, 4 sqrt(2), 8 and 8 sqrt(2)
    buckets = relative_buckets(20, 2, num_buckets=8, max_distance=16, bidirectional=False)
    assert buckets[:, 0].tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6] + [7] * 8
    assert buckets[0, 1] == 0


def test_bias_is_looked_up_per_head(randn):
    table, buckets = randn(8, 3), torch.tensor([[0, 5], [2, 7]])
    assert torch.equal(relative_bias(table, buckets)[1], table[:, 1][buckets])


def test_grouped_heads_are_refused():
    config = replace(CONFIG, num_kv_heads=2, bias=False)
    with pytest.raises(ValueError, match="num_kv_heads=num_heads"):
        cross_attention({}, torch.ones(1, 1, 1), torch.ones(1, 1, 1), config, stream=P())
